"""float32 products from half precision: an exact split, and a model of the tensor core behind it.

A row is scaled by a power of two and written as two float16 numbers, v = 2^e (hi + lo); three
products of halves, hi·lo + lo·hi + hi·hi, make up one of floats. What a tensor core does with them
is modelled here on any device, to be looked at and to be held against the kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

__all__ = [
    "INSTRUCTION",
    "ROUNDINGS",
    "TILE",
    "column_exponents",
    "product",
    "rounded_tf32",
    "split",
    "truncated",
    "truncated_tf32",
]

INSTRUCTION = 16  # of k that one fp16 instruction of a tensor core (wgmma) takes
TILE = 64  # of k whose products follow each other: the small ones first, then hi·hi
TOP = 15  # a row's maximum is scaled below 2^15: float16 ends at 65504, and rounds up to 2^15 here
ONE_FACTOR = 126  # 2^±126 are normal numbers of float32
TWO_FACTORS = 2 * ONE_FACTOR  # an exponent up to this is applied as two factors, each half of it
ALIGNED_BITS = 25  # fraction bits to which a Hopper tensor core aligns the terms of a sum
TF32_DROPPED = 13  # of float32's 23 fraction bits; tf32 keeps 10


# --- the split ------------------------------------------------------------------------------


def column_exponents(weight: Tensor) -> Tensor:
    """c (K,), int32: the largest finite |weight[:, k]| is in [0.5, 1) 2^c[k]; 0 where it is 0.

    Dividing a column of the weight by 2^c and multiplying x's by it changes no product, exactly.
    Clamped to ±126, so that 2^c and 2^-c are normal numbers of float32.
    """
    return _exponents(weight, 0).clamp(-ONE_FACTOR, ONE_FACTOR)


def split(v: Tensor, columns: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(hi, lo, e) of the rows of v (rows, K), times 2^columns where given.

    hi and lo are float16 (rows, K), e int32 (rows,), and v 2^columns = (hi + lo) 2^e: to 2^-23 of
    an element that is not below 2^-16 of its row's maximum, to 2^-39 of that maximum below. The
    maximum is scaled into [2^14, 2^15). A row of zeros has e = 0; NaN and infinity are in hi, with
    0 in lo, and don't count for e. |e| <= 252: a device applies 2^e as two factors.
    """
    v = v.double()  # powers of two are exact there: a float32 loses nothing, whatever its exponent
    if columns is not None:
        v = v * _power(columns)
    largest = _exponents(v, 1)
    exponents = torch.where(_finite_max(v, 1) > 0, largest - TOP, 0)
    exponents = exponents.clamp(-TWO_FACTORS, TWO_FACTORS).int()
    scaled = v * _power(-exponents).unsqueeze(1)
    hi = scaled.float().half()
    lo = (scaled - hi.double()).float().half()
    return hi, torch.where(hi.isfinite(), lo, 0), exponents


def _finite_max(v: Tensor, dim: int) -> Tensor:
    """The largest finite |v| along dim; 0 where there is none."""
    if not v.numel():
        return v.new_zeros(v.size(1 - dim))
    return torch.where(v.isfinite(), v.abs(), 0).amax(dim)


def _exponents(v: Tensor, dim: int) -> Tensor:
    """int32 E, the largest finite |v| along dim in [0.5, 1) 2^E; 0 for 0, which has no log2."""
    return torch.frexp(_finite_max(v, dim).double()).exponent.int()


def _power(n: Tensor) -> Tensor:
    """2^n in float64, exactly, made of its bits: an exp2 may be a bit off."""
    return ((n.long() + 1023) << 52).view(torch.float64)


# --- the tensor core ------------------------------------------------------------------------


def product(
    x: Tensor,
    weight: Tensor,
    *,
    products: int = 3,
    promote: int = 64,
    equalise: bool = True,
    rounding: str = "toward zero",
) -> Tensor:
    """x (B, K) times weight (N, K) transposed, in float32, as a device would from halves.

    products: 1 (hi·hi), 3, or 4 (lo·lo too). promote: after so much of k the accumulator is added
    to a float32 register, rounded to nearest, and begins again at 0; a multiple of 16.

    rounding: of the accumulator, once an instruction of 16 in k. "toward zero": the exact sum of
    the 16 products and the accumulator, cut to float32. "aligned": what is published of Hopper's
    wgmma: each of the 17 terms is first cut at 2^-25 of the largest one's power of two. "to
    nearest": the machine one would wish for. The sums are made in float64. A model: the first
    leaves out the alignment, none knows the order in which a device takes tiles of k.
    """
    if products not in (1, 3, 4):
        raise ValueError(f"products: got {products!r}; want 1, 3 or 4")
    if promote < INSTRUCTION or promote % INSTRUCTION:
        raise ValueError(f"promote: got {promote!r}; want a multiple of {INSTRUCTION}")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding: got {rounding!r}; want one of {', '.join(ROUNDINGS)}")
    columns = column_exponents(weight) if equalise else None
    x_hi, x_lo, x_e = split(x, columns)
    w_hi, w_lo, w_e = split(weight, None if columns is None else -columns)
    pairs = [(x_lo, w_lo), (x_hi, w_lo), (x_lo, w_hi), (x_hi, w_hi)][-products:]  # small ones first
    pairs = [(a.double(), b.double()) for a, b in pairs]
    z = torch.zeros(x.size(0), weight.size(0), device=x.device)
    with _one_thread():
        for start in range(0, x.size(1), promote):
            z = z + _interval(pairs, start, min(start + promote, x.size(1)), ROUNDINGS[rounding], z)
    exponents = x_e.unsqueeze(1) + w_e  # (B, N)
    return (z.double() * _power(exponents.clamp(-TWO_FACTORS, TWO_FACTORS))).float()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Sums of 16 are too short to be shared: on a busy machine the threads' waiting costs 80 ×."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _interval(
    pairs: list[tuple[Tensor, Tensor]], start: int, stop: int, add: Callable, like: Tensor
) -> Tensor:
    """The accumulator of a tensor core after k in start .. stop, from 0."""
    accumulator = torch.zeros_like(like)
    for tile in range(start, stop, TILE):
        end = min(tile + TILE, stop)
        for a, b in pairs:
            for k in range(tile, end, INSTRUCTION):
                last = min(k + INSTRUCTION, end)
                accumulator = add(accumulator, a[:, k:last], b[:, k:last])
    return accumulator


def _toward_zero(accumulator: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return truncated(accumulator.double() + a @ b.T)


def _to_nearest(accumulator: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (accumulator.double() + a @ b.T).float()


def _aligned(accumulator: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Each term cut at a common bit; a product's power of two is that of its factors' powers."""
    terms = torch.cat([accumulator.double().unsqueeze(2), a.unsqueeze(1) * b], 2)  # (B, N, 1 + 16)
    own = torch.frexp(accumulator.double()).exponent
    x, w = (torch.frexp(t).exponent.clamp(min=-13) for t in (a, b))  # float16: not below 2^-14
    powers = torch.cat([own.unsqueeze(2) - 1, x.unsqueeze(1) + w - 2], 2)
    powers = torch.where(terms == 0, -TWO_FACTORS, powers.clamp(max=TWO_FACTORS))
    unit = _power(powers.amax(2, keepdim=True) - ALIGNED_BITS)
    return truncated(((terms / unit).trunc() * unit).sum(2))


ROUNDINGS = {"toward zero": _toward_zero, "aligned": _aligned, "to nearest": _to_nearest}


def truncated(v: Tensor) -> Tensor:
    """float64 to float32, rounded toward zero; infinity and NaN stay."""
    nearest = v.float()
    below = torch.nextafter(nearest, torch.zeros_like(nearest))
    return torch.where(nearest.double().abs() > v.abs(), below, nearest)


# --- tf32 -----------------------------------------------------------------------------------


def truncated_tf32(v: Tensor) -> Tensor:
    """float32 with the last 13 bits cut off: what wgmma does to its operands."""
    return _with_bits(v, lambda bits: bits)


def rounded_tf32(v: Tensor) -> Tensor:
    """float32 rounded to tf32, to nearest, ties away from 0, as PTX's cvt.rna does."""
    return _with_bits(v, lambda bits: bits + (1 << (TF32_DROPPED - 1)))


def _with_bits(v: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A NaN whose last bits alone say so would become an infinity: what is not finite stays."""
    v = v.float()
    bits = change(v.view(torch.int32)) >> TF32_DROPPED << TF32_DROPPED
    return torch.where(v.isfinite(), bits.view(torch.float32), v)
