"""The avgpool chain's way back: all of its products are `pool` times smaller, too.

    du[i,m] = gradient of u[i,m], but for one m a row all 0
    dx = du w,  dw = 1/pool du^T x,  dW[n] = dw[n // pool],  db[n] = 1/pool sum_i du[i, n // pool]

for n < M pool; the features behind are dropped, and their gradients are 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from workbook import backward

__all__ = ["equal", "vjp"]

BITS = 13  # of float64's 53 that a product is off by, and more


def vjp(
    grad: Tensor, needed: Sequence[bool], operands: Sequence[Tensor], u: Tensor, w: Tensor,
    pool: int, scale: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """grad (B,), u (B, M) in float64 -> gradients of the operands x (B, K), weight (N, K) and bias
    (N), None where not needed; w (M, K), the means of the weight's rows.

    The tail is in float64: below zero 1 + erf makes ties, in float32, of u that are not.
    """
    x, weight, bias = operands
    (du,) = backward.through(lambda u: torch.max(F.gelu(u) * scale, dim=1).values, grad.double(), u)
    du = du.to(x.dtype)
    mean = du / pool
    dx = dw = db = None
    if needed[0]:
        dx = backward.of_input(du, x, w)
        _add_dropped(dx, weight[w.size(0) * pool :])
    if needed[1]:
        dw = _ungrouped(backward.of_weight(mean, x, w), weight, pool)
        if dw.size(0) > w.size(0) * pool:
            dw[w.size(0) * pool :] = (x * 0).sum(0)  # NaN where x is not finite, as 0 times x
    if needed[2]:
        db = _ungrouped(mean.sum(0), bias, pool)
    return dx, dw, db


def equal(u: Tensor) -> Tensor:
    """u in float64 without its last bits, in which a BLAS may let two equal rows of weights differ:
    of two that are equal the first wins."""
    bits = u.view(torch.int64) + (1 << (BITS - 1))
    return bits.bitwise_and_(-(1 << BITS)).view(torch.float64)


def _ungrouped(means: Tensor, like: Tensor, pool: int) -> Tensor:
    """means (M, ...) -> (N, ...), shaped and laid out as `like`, each `pool` times; 0 behind."""
    found = torch.zeros_like(like) if like.size(0) % pool else torch.empty_like(like)
    groups = found[: means.size(0) * pool].unflatten(0, (means.size(0), pool))
    groups.copy_(means.unsqueeze(1).expand_as(groups))
    return found


def _add_dropped(dx: Tensor, dropped: Tensor) -> None:
    """What features without a gradient add, 0 times their weights: NaN where those are not
    finite."""
    if dropped.size(0):
        dx += (dropped * 0).sum(0)
