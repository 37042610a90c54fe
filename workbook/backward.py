"""A chain's way back in three steps, from its product instead of the chain run again.

    z = x W^T + b      kept by the way there, or made again by whatever makes it fastest
    dz, d_others       of the tail, by torch's own gradients from z on: ties go as they go there
    dx = dz W,  dW = dz^T x,  db = sum_i dz[i]      two products, as of any Linear

The products run as torch's own would, on the route that the user has chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["is_capturing", "later", "of_input", "of_linear", "of_weight", "through"]


def through(
    tail: Callable[..., Tensor],
    grad: Tensor,
    z: Tensor,
    others: Sequence[Tensor] = (),
    needed: Sequence[bool] = (True,),
) -> tuple[Tensor | None, ...]:
    """Gradients of z and the others, None where not `needed`, of y = tail(z, *others), where y has
    the gradient `grad`."""
    given = [t.detach().requires_grad_(n) for t, n in zip((z, *others), needed, strict=True)]
    wanted = [t for t in given if t.requires_grad]
    if not wanted:
        return tuple(None for _ in given)
    with torch.enable_grad():
        found = iter(torch.autograd.grad(tail(*given), wanted, grad))
    return tuple(next(found) if n else None for n in needed)


def of_input(dz: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """dx (B, K) = dz W of dz (B, N) and weight (N, K), laid out as torch does: by columns where x
    is."""
    if x.stride() == (1, x.size(0)):
        return torch.mm(weight.T, dz.T).T
    return torch.mm(dz, weight)


def of_weight(dz: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """dW (N, K) = dz^T x of dz (B, N) and x (B, K), laid out as torch does: by columns where weight
    is."""
    if weight.stride() == (weight.size(1), 1):
        return torch.mm(dz.T, x)
    return torch.mm(x.T, dz).T


def of_linear(
    dz: Tensor, needed: Sequence[bool], x: Tensor, weight: Tensor
) -> tuple[Tensor | None, ...]:
    """(dx, dW, db) of x W^T + b, None where not `needed`."""
    return (
        of_input(dz, x, weight) if needed[0] else None,
        of_weight(dz, x, weight) if needed[1] else None,
        dz.sum(0) if needed[2] else None,
    )


def is_capturing(x: Tensor) -> bool:
    """True where what is done with x becomes part of a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def later(flag: Tensor) -> Callable[[], bool]:
    """What flag () holds, to be asked for when more work has been given to its GPU: who asks waits
    for the flag alone, and the GPU for nobody."""
    if not flag.is_cuda:
        return flag.item
    held = torch.empty((), dtype=torch.bool, pin_memory=True)
    held.copy_(flag, non_blocking=True)
    there = torch.cuda.Event()
    there.record(torch.cuda.current_stream(flag.device))

    def ask() -> bool:
        there.synchronize()
        return held.item()

    return ask
