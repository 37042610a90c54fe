"""The BatchNorm chain's way back, and the centre of a batch, which both ways take from x.

    z = x W^T + b, kept or once more; dz through BatchNorm, scale and softmax; two products

In train mode the dz of a feature sum to 0 over the batch, and z matters up to a constant: both
products with x may be products with x - c, without the digits that the rows have in common.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from workbook import backward, gemm, ops, split

__all__ = ["CENTRE_SLICES", "GROUPS", "centre", "halves", "vjp", "vjp_of_batch"]

CENTRE_SLICES = 4  # of a group: kCentreSlices of the CUDA kernel, as GROUPS is its kGroups
GROUPS = 5  # parts of a batch, of whose means the median is taken: one far row moves no median


def centre(x: Tensor) -> Tensor:
    """c (K) of x (B, K): for each feature the median of the means of up to GROUPS parts of x.

    Any c would do for the algebra. The mean is what makes x - c small, but one far row pulls it
    away from all the others, whose differences then lose the digits of what they have in common.
    """
    groups = min(GROUPS, x.size(0))
    rows = x.size(0) // groups
    parts = x[: groups * rows].unflatten(0, (groups, rows))
    return _median(torch.matmul(x.new_full((1, rows), 1 / rows), parts).squeeze(1))


def _median(means: Tensor) -> Tensor:
    """Of each column of means (groups, K), the lower one of two; torch's own sorts one by one."""
    if means.is_cuda:
        return means.median(0).values
    lines = list(means)
    for last in range(len(lines) - 1, (len(lines) - 1) // 2, -1):  # the larger half goes
        for i in range(last):
            low = torch.minimum(lines[i], lines[i + 1])
            lines[i + 1] = torch.maximum(lines[i], lines[i + 1])
            lines[i] = low
        lines.pop()
    return functools.reduce(torch.maximum, lines)


def halves(x: Tensor, c: Tensor, out: Tensor) -> Tensor:
    """(x - c) / 2: of two finite numbers half of the difference is finite, and the factor exact."""
    return torch.add(c * -0.5, x, alpha=0.5, out=out)


def _product(x: Tensor, weight: Tensor, whole: Tensor | None) -> Tensor:
    """x (B, K) -> x W^T (B, N), of its own memory; whole: as of `split.product`."""
    if split.suits(x, weight.size(0), whole=whole is not None, through=True):
        return split.added(split.product(x, split.kept(weight), whole=whole, through=True))
    if x.is_cuda or x.dtype is not torch.float32:
        return torch.mm(x, weight.T)
    return gemm.short_chains(ops.adjacent(x))(weight)


def _usable(x: Tensor) -> bool:
    """A tracer can not see the kernels above."""
    return x.dtype in (torch.float32, torch.float64) and not ops.is_watched()


def _softmax(normed: Tensor, scale: Tensor) -> Tensor:
    return F.softmax(scale * normed, dim=1)


def vjp(
    grad: Tensor, kept: Sequence[Tensor], needed: Sequence[bool],
    x: Tensor, weight: Tensor, bias: Tensor,
    gamma: Tensor, beta: Tensor, mean: Tensor, var: Tensor, scale: Tensor, batches: Tensor,
    eps: float,
) -> tuple[Tensor | None, ...] | None:  # fmt: skip
    """By running statistics: gradients of x, weight, bias, gamma, beta and scale. kept: x W^T."""
    if not _usable(x) or needed[5] or needed[6]:
        return None

    def tail(z: Tensor, gamma: Tensor, beta: Tensor, scale: Tensor) -> Tensor:
        return _softmax(F.batch_norm(z, mean, var, gamma, beta, False, 0.0, eps), scale)

    z = (kept[0] if kept else _product(x, weight, whole=weight)) + bias
    wanted = any(needed[:3]), needed[3], needed[4], needed[7]
    dz, dgamma, dbeta, dscale = backward.through(tail, grad, z, (gamma, beta, scale), wanted)
    linear = backward.of_linear(dz, needed, x, weight)
    return *linear, dgamma, dbeta, None, None, dscale, None


def vjp_of_batch(
    grad: Tensor, kept: Sequence[Tensor], needed: Sequence[bool],
    x: Tensor, weight: Tensor, bias: Tensor,
    gamma: Tensor, beta: Tensor, scale: Tensor, eps: float,
) -> tuple[Tensor | None, ...] | None:  # fmt: skip
    """By the batch's own statistics, from the product of (x - c) / 2: the eps of its variance is a
    quarter, its dz are twice those of x W^T. kept: that product, and c."""
    if not _usable(x):
        return None

    def tail(z: Tensor, gamma: Tensor, beta: Tensor, scale: Tensor) -> Tensor:
        return _softmax(F.batch_norm(z, None, None, gamma, beta, True, 0.0, eps / 4), scale)

    c = kept[1] if kept else centre(x)
    half = halves(x, c, torch.empty_like(x, memory_format=torch.contiguous_format))
    z = kept[0] if kept else _product(half, weight, whole=None)
    nothing = bias - bias  # NaN where the bias is not finite: so is the batch's mean
    wanted = any(needed[:3]), needed[3], needed[4], needed[5]
    others = gamma, beta + nothing, scale
    dz, dgamma, dbeta, dscale = backward.through(tail, grad, z, others, wanted)
    dx = dw = db = None
    if needed[0]:
        dx = backward.of_input(dz, x, weight).mul_(0.5)
    if needed[1]:
        dw = backward.of_weight(dz, half, weight)  # twice dz times half of x - c
    if needed[2]:
        db = dz.sum(0).mul_(0.5)
    return dx, dw, db, dgamma, dbeta, dscale
