"""What the tests of the maxpool chain share: a float64 oracle, a bound, arguments, calls of rungs.

Nothing here calls the code under test to decide what is right.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from kit import drawn, needs_compiler, needs_gpu
from torch import Tensor

import workbook as wb
from workbook import ops, paths
from workbook.chains import matmul_maxpool_sum_scale as chain
from workbook.chains import matmul_maxpool_sum_scale_run as running
from workbook.precision import poisoned

PROBLEM = wb.problem(chain.SLUG)
FOLDER = paths.kernels() / chain.SLUG
U32, U64 = 2.0**-24, 2.0**-53  # unit roundoffs
TINY = 2.0**-149  # the least float32: an underflow loses no more
CHAIN = 64  # kChain of guard.cuh: products that a GPU adds in float32 for a row that is flagged
RUNGS = {v.name: v for v in PROBLEM.variants if v.is_rung and v.implementation != "hopper"}
# How a rung may be called: our best one on a CPU by halves, and without (pools above 2).
CALLS = {
    "cpu_01_row_at_a_time": ("cpu", "chain"),
    "cpu_02_gemm_then_tail": ("cpu", "tail"),
    "cpu halves": ("cpu", "blocks"),
    "cpu windows": ("cpu", "windows"),
    "01_thread_per_sample": ("cuda", "chain"),
    "02_block_per_sample": ("cuda", "chain"),
    "03_gemm_thread_per_row": ("cuda", "tail"),
    "04_gemm_block_tail": ("cuda", "tail"),
    "05_half_gemm_guard": ("cuda", "half"),
}
HALVED = ("blocks", "half")  # forms for a pool of 1 or 2
CPU_CALLS = [name for name, (device, _) in CALLS.items() if device == "cpu"]
ALL_CALLS = [
    pytest.param(name, marks=needs_compiler if device == "cpu" else needs_gpu)
    for name, (device, _) in CALLS.items()
]

Call = Callable[..., Tensor]  # (x, weight, bias, pool, scale) -> y
Sources = Sequence[Path] | Mapping[str, str]


# --- calls ------------------------------------------------------------------------------------


def file_of(name: str) -> Path:
    return RUNGS[name.partition(" ")[0]].source


def takes(name: str, pool: int) -> bool:
    return pool <= 2 or CALLS[name][1] not in HALVED


def flags_of(form: str) -> tuple[str, ...]:
    return chain.OP.forms["blocks" if form == "windows" else form].flags


def library(sources: Sources, device: str, form: str):
    if isinstance(sources, Mapping):
        return ops.kernel_library(chain.SLUG, device, sources, flags=flags_of(form))
    return _of_files(tuple(sources), device, form)


@functools.cache  # to find a library that is there takes longer than most of the tests
def _of_files(files: tuple[Path, ...], device: str, form: str):
    return ops.kernel_library(chain.SLUG, device, files, flags=flags_of(form))


@contextlib.contextmanager
def halving() -> Iterator[None]:
    """Products of every size are halved, not large ones alone."""
    before, running.LEAST = running.LEAST, (0, 0)
    try:
        yield
    finally:
        running.LEAST = before


def call_of(sources: Sources, device: str, form: str, **more: object) -> Call:
    """Files, or {file name: text}, called as their form says, into poisoned memory.

    more: for the forms that halve, the limit of the guard.
    """
    run = library(sources, device, form).op("run").default

    def call(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
        with torch.no_grad(), poisoned(), halving():
            if form == "windows":
                return running.run_blocks(run, x, (weight, bias), (), (pool, scale))
            called = chain.OP.forms[form]
            if more:
                folded = chain.fold(torch.float64, weight, bias, pool)
                return called.call(run, x, (weight, bias), folded, (pool, scale), **more)
            return chain.OP.run_kernel(run, called, x, weight, bias, pool, scale)

    return call


def rung(name: str, **more: object) -> Call:
    return call_of([file_of(name)], *CALLS[name], **more)


def device_of(name: str) -> str:
    return CALLS[name][0]


def parameters(K: int, N: int, pool: int, scale: float, seed: int = 0, device: str = "cpu"):
    """(weight (N, K), bias (N,), pool, scale); z is about 1."""
    weight, bias = drawn((N, K), seed) / max(K, 1) ** 0.5, drawn((N,), seed + 1)
    return weight.to(device), bias.to(device), pool, scale


# --- the oracle -------------------------------------------------------------------------------


def windows(t: Tensor, pool: int) -> Tensor:
    """(..., N) -> (..., N // pool, pool), whole windows, from the definition."""
    count = t.size(-1) // pool
    return t[..., : count * pool].unflatten(-1, (count, pool))


def values(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    """scale sum_w max_j z[w pool + j] (B,) in float64; a sum beyond float32 is infinite, as torch's
    is before it is scaled."""
    z = x.double() @ weight.double().T + bias.double()
    total = windows(z, pool).amax(-1).sum(-1)
    return torch.where(total.float().isfinite(), total * scale, total.float().double() * scale)


def allowed(
    x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float, *, form: str
) -> Tensor:
    """The most (B,) that y may be off, whatever the order of the additions.

    A sum of n terms errs by at most n u times the sum of the magnitudes. A maximum errs by no more
    than the worst of its window; all that follows is in float64. By halves the product is one with
    differences of weights, the rest is float64 too.
    """
    K, N, size = x.size(1), weight.size(0), values(x, weight, bias, pool, scale).abs()
    x, w, b = x.double().abs(), weight.double(), bias.double().abs()
    sizes = windows(x @ w.abs().T + b, pool)
    of_double = 2 * (N + K + 8) * U64 * sizes.sum((1, 2))
    off = (K + 3) * U32 * sizes.amax(2).sum(1)
    if form in HALVED:
        pairs = windows(w.T, 2) if pool == 2 else w.new_zeros(K, 0, 2)
        halves = (K + 3) * U32 * (x @ (pairs[..., 0] - pairs[..., 1]).abs()).sum(1) / 2
        flagged = (min(K, CHAIN) + 3) * U32 * sizes.amax(2).sum(1) if form == "half" else 0
        off = halves + flagged
    off = 1.01 * abs(scale) * (off + of_double + (K + 2) * N * TINY)
    return off + 1.01 * U32 * size + TINY


def assert_near(y: Tensor, x: Tensor, *given: object, form: str) -> None:
    """Every row is written and within its bound; what is not finite is that."""
    true, bound = values(x, *given).cpu(), allowed(x, *given, form=form).cpu()
    y = y.cpu()
    assert y.shape == true.shape and y.dtype == torch.float32
    odd = ~true.float().isfinite()
    torch.testing.assert_close(y[odd], true[odd].float(), rtol=0, atol=0, equal_nan=True)
    y, true, bound = (t.double()[~odd] for t in (y, true, bound))
    assert not y.isnan().any(), "a row is not written"
    excess = (y - true).abs() / bound
    assert not (excess > 1).any(), f"{excess.max():.3g} times the bound"


def magnitudes(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(sum |g|, |A + B|) (B,) of pairs in float64: what the guard compares."""
    w, b = (windows(p, 2).unbind(-1) for p in (weight.double().T, bias.double()))
    g = x.double() @ (w[0] - w[1])
    sums = (x.double() @ (w[0] + w[1])).sum(1) + (b[0] + b[1]).sum()
    return g.abs().sum(1), (sums + (g + b[0] - b[1]).abs().sum(1)).abs()
