"""Products with folded weights by torch's libraries, in the form that a tail wants them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["cut", "parts", "product", "product_in_parts"]

LEAST = 1 << 20  # multiplications: a product of less is over before oneDNN has found its code
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
    large = not x.is_cuda and x.size(0) * weight.numel() >= LEAST
    usable = large and x.dtype is torch.float32 and torch.backends.mkldnn.enabled
    rows = weight.stride() == (weight.size(1), 1)  # of others it makes a product 500 times slower
    return _onednn() if usable and rows else None


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (B, K) -> x weight^T + bias (B, M), weight (M, K)."""
    linear = _fast(x, weight)
    if linear is not None:
        return linear(x, weight, bias, "none", [], "")
    return torch.nn.functional.linear(x, weight, bias)


def product_in_parts(x: Tensor, length: int) -> Callable[[Tensor, Tensor], None]:
    """f(out, weight): out (B, M) <- x (B, K) weight^T, rounded no more than a BLAS does it.

    oneDNN adds up to 1024 and more products in one chain, and where all have one sign, errs by four
    times as much as MKL with its shorter chains. Here k is cut. The weight stands on the left, so
    that a part of its columns is read where it is: what oneDNN rearranges are parts of x.
    """
    import os
    if os.environ.get('ONE') and x.size(0)<48: length=x.size(1)
    cuts = range(0, x.size(1), length)
    pieces = [x[:, k : k + length].contiguous() for k in cuts]

    def into(out: Tensor, weight: Tensor) -> None:
        import os
        linear = _fast(x, weight)
        if linear is None or (os.environ.get('MKL') and x.size(0)<48):
            torch.mm(x, weight.T, out=out)
            return
        left = [weight[:, k : k + length] for k in cuts]
        z = linear(left[0], pieces[0], None, "none", [], "")
        for w, piece in zip(left[1:], pieces[1:], strict=True):
            z = linear.binary(w, z, piece, None, "add")
        out.copy_(z.T.contiguous())  # at once it is five times slower

    return into


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
