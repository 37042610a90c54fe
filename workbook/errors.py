"""The rule of accuracy: errors relative to float64, and how large they may be beside eager's own.

Over the whole output, and for the worst row, the relative error is at most twice eager's own, or
2e-7, whichever is larger (1.2 times eager's on the tf32 route).
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

__all__ = ["FACTOR", "FLOOR", "errors_of", "exact", "excess", "limits_of", "oracle"]

FLOOR = 2e-7  # relative: about three roundings of float32
FACTOR = {"float32": 2.0, "tf32": 1.2}


def oracle(model: nn.Module, x: Tensor, rows: int = 1024) -> Tensor:
    """The reference in float64, by blocks of rows in eval mode; `model` stays as it is."""
    return exact(copy.deepcopy(model).double(), x, rows)


def exact(double: nn.Module, x: Tensor, rows: int = 1024) -> Tensor:
    """In train mode the rows of a batch may know of each other: the batch goes whole."""
    blocks = [x] if double.training else x.split(rows)
    with torch.no_grad():
        return torch.cat([double(block.double()) for block in blocks])


def errors_of(y: Tensor, exact: Tensor) -> tuple[float, float]:
    """(‖y − exact‖ / ‖exact‖, the same for the worst row); inf where y is not finite and exact is,
    or has another shape.

    Rows that are not finite in `exact` are left out.
    """
    if y.shape != exact.shape:
        return float("inf"), float("inf")
    if not exact.numel():
        return 0.0, 0.0
    y, exact = y.double().reshape(y.size(0), -1), exact.reshape(exact.size(0), -1)
    kept = exact.isfinite().all(1)
    y, exact = y[kept], exact[kept]
    if not exact.numel():
        return 0.0, 0.0
    if not y.isfinite().all():
        return float("inf"), float("inf")
    rows = _ratio((y - exact).norm(dim=1), exact.norm(dim=1))
    return _ratio((y - exact).norm(), exact.norm()).item(), rows.max().item()


def _ratio(error: Tensor, size: Tensor) -> Tensor:
    return torch.where(error == 0, 0.0, error / size)


def limits_of(eager: tuple[float, float], route: str = "float32") -> tuple[float, float]:
    """The largest errors the rule accepts, whole and worst row, beside eager's own."""
    return tuple(max(FACTOR[route] * e, FLOOR) for e in eager)


def excess(ours: tuple, own: tuple, limits: tuple) -> str:
    """By which error, of which kind, the rule is broken; empty if it holds."""
    for what, error, eager, limit in zip(("whole", "worst row"), ours, own, limits, strict=True):
        if not error <= limit:
            return f"error {error:.1e} ({what}), limit {limit:.1e}, eager {eager:.1e}"
    return ""
