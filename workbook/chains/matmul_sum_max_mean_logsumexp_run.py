"""How the sum chain runs: the fold of its weights, its kernels, short chains on a CPU, and back.

The gradients are outer products. With h[i] the gradient of the sum that y[i] is made of:

    dx[i,k] = h[i] w_sum[k],   dW[n,k] = sum_i h[i] x[i,k],   db[n] = sum_i h[i]

for every n the same: no product of matrices is left of the chain's three.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workbook import ops, sums

__all__ = ["fold", "run_chain", "run_folded", "run_short", "vjp"]

ENOUGH = 1 << 22  # elements of x from which reading them counts: below, all is in double


@functools.cache
def _sum_fold() -> Callable | None:
    return ops.built("sum_fold", "cpu", ["sum_fold.cpp"])


def fold(dtype: torch.dtype, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """(w_sum (K,), b_sum ()) of weight (N, K) and bias (N,), added in float64; no gradients.

    On a CPU a third one may follow, for its kernel: w_sum in float32, where that is good enough.
    """
    if torch.is_grad_enabled():  # within a fold it is not: to ask takes less than to switch it off
        weight, bias = weight.detach(), bias.detach()
    if weight.dtype == bias.dtype == torch.float32 and dtype is torch.float64 and weight.is_cpu:
        run = _sum_fold()
        if run is not None:  # one op: torch's small ones take as long as reading the weights
            given = (t if t.is_contiguous() else t.contiguous() for t in (weight, bias))
            w_sum, b_sum, rounded, is_short = run(*given)
            return (w_sum, b_sum, rounded) if is_short else (w_sum, b_sum)
    return sums.column_sum(weight).to(dtype), bias.sum(dtype=torch.float64).to(dtype)


def run_chain(run: Callable, x: Tensor, parameters: tuple, folded: tuple, options: tuple) -> Tensor:
    y = x.new_empty(x.shape[0], 1)
    run(ops.adjacent(x), *(p.contiguous() for p in parameters), y)
    return y


def run_folded(
    run: Callable, x: Tensor, parameters: tuple, folded: tuple, options: tuple
) -> Tensor:
    y = x.new_empty(x.shape[0], 1)
    run(ops.adjacent(x), *folded[:2], y)
    return y


@functools.cache
def _rounded_dot() -> Callable | None:
    return ops.built("rounded_dot", "cpu", ["rounded_dot.cpp"])


def run_short(run: Callable, x: Tensor, parameters: tuple, folded: tuple, options: tuple) -> Tensor:
    """Short chains in float for a large x where the fold allows them, else `run`, in double."""
    short = _rounded_dot() if len(folded) == 3 and x.numel() >= ENOUGH else None
    if short is None:
        return run_folded(run, x, parameters, folded, options)
    y, (w_sum, b_sum, rounded) = x.new_empty(x.shape[0], 1), folded
    short(ops.adjacent(x), w_sum, rounded, b_sum, y)
    return y


def vjp(
    grad: Tensor,
    y: Tensor,
    needed: Sequence[bool],
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    w_sum: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """grad and y (B, 1) -> gradients of x (B, K), weight (N, K), bias (N,), None where not needed.

    w_sum (K,) in float64, where that of x is. Sums are added in float64 and rounded once. A row
    that is not finite has NaN for its h, as of the chain, whose two logsumexp take y from itself.
    """
    h = grad * (y - y).exp()
    dx = dw = db = None
    if needed[0]:
        dx = (h.double() * w_sum).to(x.dtype)
    if needed[1]:
        wide = ops.COMPUTES[x.dtype]
        weighed = x.to(wide) * h.to(wide)
        plain = type(weighed) is Tensor and not ops.is_watched()  # our op shows tracers nothing
        dw = sums.column_sum(weighed) if plain else weighed.sum(0, dtype=torch.float64)
        dw = dw.to(weight.dtype).expand_as(weight).contiguous()
    if needed[2]:
        db = h.sum(dtype=torch.float64).to(bias.dtype).expand_as(bias).contiguous()
    return dx, dw, db
