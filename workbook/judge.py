"""One output held against the rule, and the buffers that its call left behind."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workbook.errors import FACTOR, FLOOR, errors_of, exact, excess, limits_of
from workbook.precision import using_route

__all__ = ["Judge", "Verdict", "misfit"]


@dataclass(frozen=True)
class Verdict:
    """Errors (whole, worst row) of an output and of eager's own, their limits; `reason` is empty
    where the rule holds. true: the reference's output in float64."""

    ours: tuple[float, float]
    own: tuple[float, float]
    limits: tuple[float, float]
    reason: str
    true: Tensor

    @property
    def nearness(self) -> float:
        """The larger of error / limit: above 1 the rule is broken."""
        return max(error / limit for error, limit in zip(self.ours, self.limits, strict=True))

    def fields(self) -> dict[str, float]:
        """Its numbers under the names they have in a record."""
        return {
            "rel_error": self.ours[0], "rel_error_rows": self.ours[1], "limit": self.limits[0],
            "rel_error_eager": self.own[0], "rel_error_eager_rows": self.own[1],
        }  # fmt: skip


class Judge:
    """Made before a candidate runs: a copy of the model and of its input x."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.model, self.x = copy.deepcopy(model), x.clone()
        self._left: dict[str, Tensor] | None = None

    def note(self, model: nn.Module) -> None:
        """Keep the buffers that the candidate's one call left behind in `model`."""
        self._left = {name: b.clone() for name, b in model.named_buffers()}

    def verdict(
        self, y: object, x: Tensor, again: object = None, route: str = "float32"
    ) -> Verdict:
        """Of output y, made from x; again: what a second call on x gave, where there was one."""
        plain, double = copy.deepcopy(self.model), copy.deepcopy(self.model).double()
        with torch.no_grad(), using_route(route):
            eager = plain(self.x)
        true = exact(double, self.x)
        own = errors_of(eager, true)
        ours = errors_of(y, true) if isinstance(y, Tensor) else (float("inf"), float("inf"))
        limits = limits_of(own, route)
        reason = self._fault(y, again, eager, x) or excess(ours, own, limits)
        reason = reason or self._fault_of_buffers(plain, double, FACTOR[route])
        return Verdict(ours, own, limits, reason, true)

    def _fault(self, y: object, again: object, eager: Tensor, x: Tensor) -> str:
        """What is wrong beside the size of the error; empty if nothing."""
        if not isinstance(y, Tensor):
            return f"output: got a {type(y).__name__}, wants a Tensor"
        for name in ("shape", "dtype", "device"):
            got, wants = getattr(y, name), getattr(eager, name)
            if got != wants:
                return f"{name}: got {got}, wants {wants}"
        if not _same(x, self.x):
            return "the input was modified"
        lost = (eager.isfinite() & ~y.isfinite()).sum().item()
        if lost:
            return f"{lost} of {y.numel()} outputs are not finite where eager's are"
        dropped = (eager.isnan() & ~y.isnan()).sum().item()
        if dropped:
            return f"{dropped} of {y.numel()} outputs are not NaN where eager's are"
        if again is not None and not _same(y, again):
            return "two calls on the same input differ"
        return ""

    def _fault_of_buffers(self, plain: nn.Module, double: nn.Module, factor: float) -> str:
        """The first buffer that errs more than `factor` times eager's own, or the floor."""
        if self._left is None:
            return ""
        eager = dict(plain.named_buffers())
        for name, wants in double.named_buffers():
            if name not in self._left:
                return f"buffer {name} is missing"
            error, own = (
                errors_of(t.reshape(1, -1), wants.double().reshape(1, -1))[0]
                for t in (self._left[name], eager[name])
            )
            if not error <= max(factor * own, FLOOR):
                return f"buffer {name}: error {error:.1e}, eager {own:.1e}"
        return ""


def misfit(candidate: object, model: nn.Module) -> str:
    """Why the model's state_dict does not load into a candidate that is a module; else empty."""
    candidate = getattr(candidate, "_orig_mod", candidate)  # of torch.compile
    if not isinstance(candidate, nn.Module):
        return ""
    got, wants = (
        {name: tuple(t.shape) for name, t in m.state_dict().items()} for m in (candidate, model)
    )
    for name in {**wants, **got}:
        if name not in got or name not in wants:
            return f"state_dict: {name} is {'missing' if name in wants else 'one too many'}"
        if got[name] != wants[name]:
            return f"state_dict: {name} has shape {got[name]}, wants {wants[name]}"
    return ""


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
