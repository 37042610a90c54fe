"""Sums and means over rows of weights, in float64: the folds that several chains have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from workbook import ops

__all__ = ["COLUMN_SUM", "GROUP_MEAN", "column_sum", "group_mean"]

# The sources of each, under kernels/: they count in the digest of who folds with it.
COLUMN_SUM = ("column_sum/column_sum.cpp", "column_sum/column_sum.cu")
GROUP_MEAN = ("group_mean/group_mean.cpp", "group_mean/group_mean.cu")


@functools.cache
def _column_sum(device: str) -> Callable | None:
    return ops.built(
        "column_sum", device, ["column_sum.cu" if device == "cuda" else "column_sum.cpp"]
    )


BLOCK = 1 << 22  # elements of a weight that are widened at a time
SLICES = 16  # of the rows, on a GPU: 8192 columns alone are 64 blocks, for 132 multiprocessors


def column_sum(weight: Tensor) -> Tensor:
    """weight (N, K) -> (K,) in float64, its sum over rows, added in float64 in a fixed order.

    A float32 running sum loses digits with each row; float64 also can't overflow.
    """
    usable = weight.dtype == torch.float32 and weight.is_contiguous()
    run = _column_sum(weight.device.type) if usable else None
    if run is None:
        return weight.sum(0, dtype=torch.float64)
    columns = weight.size(1)
    total = weight.new_empty(columns, dtype=torch.float64)
    partial = weight.new_empty((SLICES if weight.is_cuda else 0, columns), dtype=torch.float64)
    run(weight, partial, total)
    return total


@functools.cache
def _group_mean(device: str) -> Callable | None:
    return ops.built(
        "group_mean", device, ["group_mean.cu" if device == "cuda" else "group_mean.cpp"]
    )


def group_mean(weight: Tensor, pool: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """weight (N, K) -> w in dtype, w_exact in float64 (N // pool, K): means of `pool` rows.

    Added in float64. Rows that are left over are not read. w_exact is empty unless weight and dtype
    are float32.
    """
    groups, columns = weight.size(0) // pool, weight.size(1)
    means = weight.new_empty((groups, columns), dtype=dtype)
    both = weight.dtype == dtype == torch.float32
    exact = weight.new_empty((groups, columns) if both else 0, dtype=torch.float64)
    run = _group_mean(weight.device.type) if both and weight.is_contiguous() else None
    if run is not None:
        run(weight, pool, means, exact)
        return means, exact
    block = max(1, BLOCK // max(1, pool * columns))  # groups at a time: they are copied
    for first in range(0, groups, block):
        last = min(first + block, groups)
        rows = weight[first * pool : last * pool].double().reshape(last - first, pool, columns)
        means[first:last] = found = rows.mean(1)
        if both:
            exact[first:last] = found
    return means, exact
