"""Products with folded weights by torch's libraries, in the form that a tail wants them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["parts", "product"]

# Products below this are over before oneDNN has looked up its code.
_LEAST = 1 << 20


@functools.cache
def _onednn() -> Callable | None:
    """torch's linear by oneDNN, where this build has it."""
    there = torch.backends.mkldnn.is_available()
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None) if there else None


def product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x (B, K) -> x weight^T + bias (B, M), weight (M, K) contiguous.

    On a CPU by oneDNN: `torch.addmm` goes to a BLAS, and MKL's takes half of the vector width on
    CPUs of other makers.
    """
    large = not x.is_cuda and x.size(0) * weight.numel() >= _LEAST
    if large and x.dtype is torch.float32 and torch.backends.mkldnn.enabled:
        linear = _onednn()
        if linear is not None:
            return linear(x, weight, bias, "none", [], "")
    return torch.addmm(bias, x, weight.T)


def parts(x: Tensor, weight: Tensor, count: int) -> Tensor:
    """x (B, K) -> (parts, B, M), whose sum over the parts is x weight^T; weight (M, K) contiguous.

    The sum over k is cut in `count` parts of equal length, a multiple of 4, and one of what is
    left: a batch of products in one call. More tiles for a GPU to work on, shorter chains of
    additions; who adds the parts may do so in double.
    """
    rows, columns = x.shape
    length = columns // count // 4 * 4 if count > 1 else columns
    count = min(count, columns // length) if length else 0
    whole = count * length
    found = x.new_empty((count + (whole < columns or not count), rows, weight.size(0)))
    if count:
        cut = (count, length)
        left = x[:, :whole].unflatten(1, cut).transpose(0, 1)
        right = weight[:, :whole].unflatten(1, cut).permute(1, 2, 0)
        torch.bmm(left, right, out=found[:count])
    if count < found.size(0):
        torch.mm(x[:, whole:], weight[:, whole:].T, out=found[count])
    return found
