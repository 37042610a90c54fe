"""Wrong drafts that people write of any chain, made from its op: `check` has to reject them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from workbook.ops import FusedOp
from workbook.spec import Variant

__all__ = ["computed", "fold_in_init", "fold_over_weight", "renamed_layer"]


def computed(op: FusedOp, name: str, idea: str, f: Callable[..., Tensor], wrong: str) -> Variant:
    """A control that computes f(x, *arguments) in float64, so that nothing but f is wrong."""

    def make(model: nn.Module) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            given = [a.double() if isinstance(a, Tensor) else a for a in op.arguments(model)]
            return f(x.double(), *given).to(x.dtype)

        return call

    return Variant(name, "torch", idea, make, wrong=wrong)


def fold_in_init(op: FusedOp) -> Variant:
    """The fold made once, in the constructor."""

    def make(model: nn.Module) -> Callable[[Tensor], Tensor]:
        given = op.arguments(model)
        parameters, options = given[: op.parameters], given[op.parameters :]
        folded = op.fold(torch.float32, *parameters, *options[: op.fold_options])
        return lambda x: op.plain(x, *folded, *options)

    wrong = "stale after load_state_dict, a step, any edit of the weights"
    return Variant(
        "wrong_fold_in_init", "torch", "the fold made once, in the constructor", make, wrong=wrong
    )


def fold_over_weight(op: FusedOp, layer: str) -> Variant:
    """The fold written over the weight and the bias of `layer`, at the first call."""

    class Overwritten(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.options = op.arguments(model)[op.parameters :]
            self.folded = False
            own = nn.Module()  # the very parameters, in a layer of its own
            own.weight, own.bias = getattr(model, layer).weight, getattr(model, layer).bias
            self.add_module(layer, own)

        def forward(self, x: Tensor) -> Tensor:
            own = getattr(self, layer)
            if not self.folded:
                depends_on = self.options[: op.fold_options]
                w, b, *self.rest = op.fold(torch.float32, own.weight, own.bias, *depends_on)
                own.weight, own.bias = nn.Parameter(w), nn.Parameter(b)
                self.folded = True
            return op.plain(x, own.weight, own.bias, *self.rest, *self.options)

    wrong = "the layer's own weight is gone: a state_dict no longer fits, and a load is lost"
    idea = "the fold written over the layer's weight"
    return Variant("wrong_fold_over_weight", "torch", idea, Overwritten, wrong=wrong)


def renamed_layer(op: FusedOp, layer: str, name: str = "fc") -> Variant:
    """Right numbers, from a layer of another name."""

    class Renamed(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.add_module(name, getattr(model, layer))
            self.arguments = lambda: op.arguments(model)

        def forward(self, x: Tensor) -> Tensor:
            return op.run_plain(x, *self.arguments(), dtype=torch.float64)

    wrong = f"the state_dict has {name}.weight: one of the model does not load"
    return Variant("wrong_renamed_layer", "torch", f"the layer called {name}", Renamed, wrong=wrong)
