"""Products with weights, by torch's libraries or a kernel of ours, as a tail wants them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from workbook import cpuinfo, ops

__all__ = ["NARROW_PRODUCT", "cut", "parts", "product", "short_chains", "suits_narrow"]

NARROW_PRODUCT = ("narrow_product/narrow_product.cpp",)  # under kernels/, of `short_chains`

# Multiplications from which oneDNN is faster than a BLAS, though its call takes 14 us more: sooner
# for weights that MKL is slow with, large ones, packed each time, and those of more outputs than
# its code for 4 takes and fewer than that for 16.
LEAST, SOONER = 1 << 23, 1 << 20
LARGE, BETWEEN = 1 << 18, range(5, 16)
# A kernel of ours is faster for rows of x that are few and not short, or long and stay in L2.
NARROW, NOT_SHORT, IS_LONG, NEAR = 68, 256, 1000, 1 << 18
AT_ONCE = 256  # rows of x for the kernel of ours: of more, less of x stays in the cache
CHAINS, SHORT, LONG = 16, 128, 512  # a chain is about a sixteenth of k, but within these
TOGETHER = 1024  # rows of x: of more, what a chain leaves is out of the cache when the next adds
PARTS_BYTES = 16 << 20  # of partial products at a time on a GPU: they stay in its L2


@functools.cache
def _onednn() -> Callable | None:
    """torch's linear by oneDNN, where this build has it."""
    there = torch.backends.mkldnn.is_available()
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None) if there else None


def _fast(x: Tensor, weight: Tensor) -> Callable | None:
    """oneDNN's linear, where it is the faster one.

    torch.addmm goes to a BLAS, and MKL keeps to half of the vector width on CPUs of other makers.
    """
    size = weight.numel()
    sooner = size >= LARGE or weight.size(0) in BETWEEN
    if x.is_cuda or x.size(0) * size < (SOONER if sooner else LEAST):
        return None
    usable = x.dtype is torch.float32 and torch.backends.mkldnn.enabled
    rows = weight.stride() == (weight.size(1), 1)  # of others it makes a product 500 times slower
    return _onednn() if usable and rows else None


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (B, K) -> x weight^T + bias (B, M), weight (M, K)."""
    linear = _fast(x, weight)
    if linear is not None:
        return linear(x, weight, bias, "none", [], "")
    return torch.nn.functional.linear(x, weight, bias)


@functools.cache
def _narrow() -> Callable | None:
    return ops.built("narrow_product", "cpu", ["narrow_product.cpp"])


@functools.cache
def _in_halves() -> bool:
    """True where 512 bits are multiplied in two halves: on AMD's Zen 4, whose family it shares with
    Zen 3, which has no such instruction.

    What is loaded keeps the multipliers busy for twice as long there, and the kernel of ours is as
    fast as a BLAS for any rows of x.
    """
    told = cpuinfo.told()
    is_its = (told.get("vendor_id"), told.get("cpu family")) == ("AuthenticAMD", "25")
    return is_its and torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def suits_narrow(x: Tensor) -> bool:
    """True where the kernel of ours is as fast as a BLAS."""
    rows, columns = x.shape
    few = rows <= NARROW or (columns >= IS_LONG and x.numel() <= NEAR)
    usable = columns >= NOT_SHORT and not x.is_cuda and x.dtype is torch.float32
    return usable and (few or _in_halves())


def _narrow_for(x: Tensor) -> Callable | None:
    return _narrow() if suits_narrow(x) else None


def _narrow_product(narrow: Callable, x: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
    """By rows of x, about AT_ONCE of them and as many each time."""
    z = x.new_empty(x.size(0), weight.size(0)) if out is None else out
    rows = -(-x.size(0) // max(1, round(x.size(0) / AT_ONCE)))
    for first in range(0, x.size(0), max(rows, 1)):
        narrow(x[first : first + rows], weight, z[first : first + rows])
    return z


def short_chains(x: Tensor) -> Callable[..., Tensor]:
    """f(weight, out) -> x (B, K) weight^T (B, M) on a CPU, rounded as little as by a BLAS.

    out: where to, a new matrix if None.

    oneDNN adds a thousand products and more in one chain; where all have one sign it errs by four
    times as much as MKL with its shorter ones. A few rows of x go to a kernel of ours, with a chain
    a lane, and any rows where it is as fast for them. Else k is cut. The weight then stands on the
    left, so that a part of its columns is read where it is, and what oneDNN rearranges are parts of
    x.
    """
    if x.size(0) > TOGETHER and not x.is_cuda:
        return _by_rows(x)
    narrow = _narrow_for(x)
    columns = x.size(1)
    count = max(1, round(columns / max(SHORT, min(LONG, columns // CHAINS))))
    length = -(-columns // count // 16) * 16  # whole cache lines
    cuts = [slice(k, k + length) for k in range(0, columns, max(length, 1))]
    pieces: list[Tensor] = []

    def product_of(weight: Tensor, out: Tensor | None = None) -> Tensor:
        if narrow and ops.adjacent(weight) is weight:
            return _narrow_product(narrow, x, weight, out)
        linear = None if narrow else _fast(x, weight)
        if linear is None:
            return torch.mm(x, weight.T, out=out)
        if len(cuts) < 2:
            z = linear(x, weight, None, "none", [], "")
        else:
            pieces.extend(() if pieces else (x[:, cut].contiguous() for cut in cuts))
            z = linear(weight[:, cuts[0]], pieces[0], None, "none", [], "")
            for cut, piece in zip(cuts[1:], pieces[1:], strict=True):
                z = linear.binary(weight[:, cut], z, piece, None, "add")
            z = z.T.contiguous()  # copied at once it takes five times as long
        return z if out is None else out.copy_(z)

    return product_of


def _by_rows(x: Tensor) -> Callable[..., Tensor]:
    """`short_chains` of TOGETHER rows at a time."""
    each = [(first, short_chains(x[first : first + TOGETHER]))
            for first in range(0, x.size(0), TOGETHER)]  # fmt: skip

    def product_of(weight: Tensor, out: Tensor | None = None) -> Tensor:
        z = x.new_empty(x.size(0), weight.size(0)) if out is None else out
        for first, product in each:
            product(weight, z[first : first + TOGETHER])
        return z

    return product_of


def parts(x: Tensor, weight: Tensor, count: int) -> Tensor:
    """x (B, K) -> (parts, B, M), whose sum over the parts is x weight^T; weight (M, K).

    The sum over k is cut in `count` parts of equal length, a multiple of 4, and one of what is
    left: a batch of products in one call. That gives a GPU more tiles to work on, and chains of
    additions that are shorter; who adds the parts may do so in double.
    """
    rows, columns = x.shape
    length = columns // count // 4 * 4 if count > 1 else columns
    count = count if length else 0
    whole = count * length
    found = x.new_empty((count + (whole < columns or not count), rows, weight.size(0)))
    if count:
        left = x[:, :whole].unflatten(1, (count, length)).transpose(0, 1)
        right = weight[:, :whole].unflatten(1, (count, length)).permute(1, 2, 0)
        torch.bmm(left, right, out=found[:count])
    if count < found.size(0):
        torch.mm(x[:, whole:], weight[:, whole:].T, out=found[count])
    return found


def cut(rows: int, columns: int, outputs: int, averaged: int) -> tuple[int, int]:
    """(rows at a time, parts of the sum over k) for `parts` on a GPU; averaged: what weight is.

    The mean of n sums carries sqrt(n) times less rounding than one sum, for each rounds in its own
    way. One sum in that many parts is as good, in more parts better: as many as stay in L2.
    """
    least, most = math.isqrt(averaged - 1) + 1, max(1, math.isqrt(columns) // 4)
    block = max(128, min(1024, PARTS_BYTES // (4 * outputs * least) // 128 * 128))
    room = PARTS_BYTES // (4 * outputs * max(1, min(block, rows)))
    wanted = min(most, max(least, room))
    even = [c for c in range(wanted, wanted // 2, -1) if columns % (4 * c) == 0]
    return block, even[0] if even else wanted
