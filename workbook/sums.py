"""Sums, means and differences of rows of weights, sums in float64: what folds are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from workbook import ops

__all__ = [
    "COLUMN_SUM",
    "GROUP_MEAN",
    "MEAN_FOLD",
    "PAIR_DIFFERENCE",
    "PAIR_FOLD",
    "column_sum",
    "group_mean",
    "mean_fold",
    "pair_difference",
    "pair_fold",
]

# The sources of each, under kernels/: they count in the digest of who folds with it.
COLUMN_SUM = ("column_sum/column_sum.cpp", "column_sum/column_sum.cu")
GROUP_MEAN = ("group_mean/group_mean.cpp", "group_mean/group_mean.cu")
PAIR_DIFFERENCE = ("pair_difference/pair_difference.cpp", "pair_difference/pair_difference.cu")
# On a CPU, with the bias, in one op: torch's small ones take as long as reading the weights.
MEAN_FOLD, PAIR_FOLD = ("mean_fold/mean_fold.cpp",), ("pair_fold/pair_fold.cpp",)


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
    run = _column_sum(weight.device.type) if _is_usable(weight) else None
    if run is None:
        return weight.sum(0, dtype=torch.float64)
    columns = weight.size(1)
    shapes = (columns,), (SLICES if weight.is_cuda else 0, columns)
    total, partial = (weight.new_empty(s, dtype=torch.float64) for s in shapes)
    run(weight, partial, total)
    return total


def _is_usable(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.is_contiguous()


@functools.cache
def _pair_difference(device: str) -> Callable | None:
    return ops.built(
        "pair_difference",
        device,
        ["pair_difference.cu" if device == "cuda" else "pair_difference.cpp"],
    )


def pair_difference(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight (2 M, K) -> D (M, K) in its type, row 2m less row 2m + 1, and its column sum (K,) in
    float64, in one go."""
    run = _pair_difference(weight.device.type) if _is_usable(weight) else None
    if run is None:
        return weight[0::2] - weight[1::2], column_sum(weight)
    rows, columns = weight.shape
    differences = weight.new_empty(rows // 2, columns)
    shapes = (columns,), (SLICES if weight.is_cuda else 0, columns)
    total, partial = (weight.new_empty(s, dtype=torch.float64) for s in shapes)
    run(weight, differences, partial, total)
    return differences, total


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


@functools.cache
def _pair_fold() -> Callable | None:
    return ops.built("pair_fold", "cpu", ["pair_fold.cpp"])


@functools.cache
def _mean_fold() -> Callable | None:
    return ops.built("mean_fold", "cpu", ["mean_fold.cpp"])


def pair_fold(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """weight (N, K), bias (N) -> (D (M, K), shifts (M), w_sum (K), b_sum ()), M = N // 2.

    Row 2m less row 2m + 1 of both, and the sums of both over 2 M rows; D in the weights' type, the
    rest in float64.
    """
    run = _pair_fold() if _are_usable(weight, bias) else None
    if run is not None:
        return run(weight, bias)
    used = bias.size(0) // 2 * 2
    weight, bias = weight[:used], bias[:used].double()
    differences, w_sum = pair_difference(weight)
    return differences, bias[0::2] - bias[1::2], w_sum, bias.sum()


def mean_fold(
    weight: Tensor, bias: Tensor, pool: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """weight (N, K), bias (N) -> (w, b, w_exact, b_exact): `group_mean` of both."""
    usable = dtype == torch.float32 and _are_usable(weight, bias)
    run = _mean_fold() if usable else None
    if run is not None:
        return run(weight, bias, pool)
    w, w_exact = group_mean(weight, pool, dtype)
    b, b_exact = group_mean(bias.unsqueeze(1), pool, dtype)
    return w, b.flatten(), w_exact, b_exact.flatten()


def _are_usable(weight: Tensor, bias: Tensor) -> bool:
    return weight.is_cpu and bias.is_cpu and _is_usable(weight) and _is_usable(bias)
