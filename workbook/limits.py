"""Arithmetic of limits: operations, bytes, floors and predicted speedups. Nothing is measured.

Units: bytes; GB = 1e9 bytes; TFLOP/s = 1e12 operations a second, a multiply and an add being two;
times in milliseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = [
    "Ceilings",
    "Floor",
    "Work",
    "break_even_calls",
    "floor_ms",
    "gemm_work",
    "predicted_speedup",
]

# How a product is computed -> the ceiling that holds for it, and the products it takes for one.
# fp16x3 splits each float32 in two halves: hi*lo + lo*hi + hi*hi.
_RATES = {
    "float32": ("fp32_tflops", 1),
    "ffma": ("fp32_tflops", 1),
    "tf32": ("tf32_tflops", 1),
    "fp16x1": ("half_tflops", 1),
    "fp16x3": ("half_tflops", 3),
}


@dataclass(frozen=True)
class Work:
    """What must be done at least: operations, and bytes read and written in slow memory."""

    flops: float
    read: float
    written: float

    def __post_init__(self) -> None:
        for name in ("flops", "read", "written"):
            _at_least_zero(getattr(self, name), f"Work.{name}")

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.read + other.read, self.written + other.written)

    @property
    def bytes(self) -> float:
        """Read + written."""
        return self.read + self.written

    @property
    def intensity(self) -> float:
        """Operations per byte; inf without bytes, 0 without either."""
        if self.bytes:
            return self.flops / self.bytes
        return math.inf if self.flops else 0.0


@dataclass(frozen=True)
class Ceilings:
    """What a machine reaches. `copy_gbs` counts read + written; None where there is no such unit.

    `source` says where the numbers come from: measured here, or the record they were read from.
    """

    read_gbs: float
    copy_gbs: float
    fp32_tflops: float
    tf32_tflops: float | None
    launch_ms: float
    source: str
    half_tflops: float | None = None

    def __post_init__(self) -> None:
        for name in ("read_gbs", "copy_gbs", "fp32_tflops", "tf32_tflops", "half_tflops"):
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise ValueError(f"Ceilings.{name} is {rate}; want a rate above 0")
        _at_least_zero(self.launch_ms, "Ceilings.launch_ms")


@dataclass(frozen=True)
class Floor:
    """The least time in ms: max(memory, compute) + launch, and which of the three is largest."""

    ms: float
    memory_ms: float
    compute_ms: float
    launch_ms: float
    bound: str


def floor_ms(work: Work, ceilings: Ceilings, route: str = "float32") -> Floor:
    """The least time for `work`, memory and arithmetic overlapping perfectly, in one launch.

    `route`: float32 (or ffma), tf32, fp16x1, fp16x3. Every written byte, and as many read ones,
    goes at the copy rate, reads beyond that at the read rate. ValueError for an unknown route or
    one the machine has no rate for.
    """
    copied = work.written + min(work.read, work.written)
    only_read = work.read - min(work.read, work.written)
    # bytes / (GB/s) is 1e-9 s, which is 1e-6 ms; operations / (TFLOP/s) is 1e-12 s
    memory = (copied / ceilings.copy_gbs + only_read / ceilings.read_gbs) * 1e-6
    rate, products = _rate(ceilings, route)
    compute = work.flops * products / rate * 1e-9
    parts = {"memory": memory, "compute": compute, "launch": ceilings.launch_ms}
    return Floor(
        ms=max(memory, compute) + ceilings.launch_ms,
        memory_ms=memory,
        compute_ms=compute,
        launch_ms=ceilings.launch_ms,
        bound=max(parts, key=parts.__getitem__),
    )


def predicted_speedup(before: Floor, after: Floor) -> float:
    """before.ms / after.ms: above 1 where `after` can be faster; inf when `after` takes none."""
    if after.ms:
        return before.ms / after.ms
    return math.inf if before.ms else 1.0


def gemm_work(B: int, K: int, N: int, itemsize: int = 4) -> Work:
    """x (B, K) times W (N, K) transposed: 2BKN operations, both read once, (B, N) written once.

    No bias. `itemsize` is in bytes. ValueError unless all are whole numbers of at least 1.
    """
    for name, size in (("B", B), ("K", K), ("N", N), ("itemsize", itemsize)):
        if size != int(size) or size < 1:
            raise ValueError(f"gemm_work: {name} is {size}; want a whole number of at least 1")
    return Work(
        flops=2.0 * B * K * N,
        read=float(itemsize * (B * K + N * K)),
        written=float(itemsize * B * N),
    )


def break_even_calls(fold_ms: float, slow_ms: float, fast_ms: float) -> float:
    """Calls after which a fold of `fold_ms` has paid: fold / (slow - fast); inf when never."""
    for name, ms in (("fold_ms", fold_ms), ("slow_ms", slow_ms), ("fast_ms", fast_ms)):
        _at_least_zero(ms, f"break_even_calls: {name}")
    return fold_ms / (slow_ms - fast_ms) if slow_ms > fast_ms else math.inf


def _rate(ceilings: Ceilings, route: str) -> tuple[float, int]:
    if route not in _RATES:
        raise ValueError(f"floor_ms: route is {route!r}; want one of {', '.join(_RATES)}")
    name, products = _RATES[route]
    rate = getattr(ceilings, name)
    if rate is None:
        raise ValueError(
            f"floor_ms: route {route!r} needs Ceilings.{name}, which is None "
            f"({ceilings.source}); use route='float32' or measure it"
        )
    return rate, products


def _at_least_zero(value: float, name: str) -> None:
    if not value >= 0:
        raise ValueError(f"{name} is {value}; want 0 or more")
