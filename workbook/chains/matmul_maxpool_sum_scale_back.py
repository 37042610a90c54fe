"""The maxpool chain's way back for pairs: who wins is the sign of a difference, half a product.

    g[i,m] = z[i,2m] - z[i,2m+1] = x[i].D[m] + c[m],   s[i] = scale grad[i]
    dz[i,2m] = s[i] where g[i,m] >= 0,   dz[i,2m+1] = s[i] where g[i,m] < 0
    dx = dz W,   dW = dz^T x,   db = sum_i dz[i]

A wrong sign moves a whole s[i] from one row of weights to the other. So where g is nearest to 0 it
is computed once more, in float64. The first of two equal ones wins, as in torch's pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workbook import backward

__all__ = ["vjp"]

NEAREST = 64  # g that are computed once more: of a million, those that rounding could turn


def vjp(
    grad: Tensor, needed: Sequence[bool], operands: Sequence[Tensor], g: Tensor, scale: float
) -> tuple[Tensor | None, ...] | None:
    """grad (B,) and g (B, M) -> gradients of the operands x (B, K), weight (N, K) and bias (N,),
    None where not needed. None at all where a g is not finite, and says nothing of who wins."""
    if not g.numel():
        return None
    x, weight, bias = operands
    sizes = g.abs()
    usual = backward.later(sizes.amax().isfinite())
    first = _first_wins(g, sizes, x, weight, bias)
    dz, s = x.new_empty((x.size(0), weight.size(0))), (grad * scale).unsqueeze(1)
    pairs = dz[:, : 2 * g.size(1)].unflatten(1, (g.size(1), 2))
    nothing = s.new_zeros(())
    torch.where(first, s, nothing, out=pairs[..., 0])
    torch.where(first, nothing, s, out=pairs[..., 1])
    dz[:, 2 * g.size(1) :] = 0  # of a feature that is left over
    found = backward.of_linear(dz, needed, x, weight)
    return found if usual() else None


def _first_wins(g: Tensor, sizes: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """g >= 0 (B, M), by float64 where its size |g| is least."""
    first, M = g >= 0, g.size(1)
    near = sizes.view(-1).topk(min(NEAREST, g.numel()), largest=False, sorted=False).indices
    rows, pairs = near.div(M, rounding_mode="floor"), near % M
    one, other = (weight[2 * pairs + j].double() for j in (0, 1))
    exact = (x[rows].double() * (one - other)).sum(1)
    exact += bias[2 * pairs].double() - bias[2 * pairs + 1].double()
    first.view(-1)[near] = exact >= 0
    return first
