"""What `check` draws: families of inputs and states of weights, each able to break something.

A kernel that is right on U[0, 1) with freshly initialised weights may still be wrong: fixed
tolerances and one family of numbers are blind. Every state is written into the weights *after*
the candidate was made and called once, so that a fold which does not follow is found out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Generator, Tensor, nn

__all__ = ["FAMILIES", "SPECIAL", "STATES"]

Family = Callable[[int, int, Generator], Tensor]
State = Callable[[nn.Module, Generator], None]


def _one_huge_row(rows: int, features: int, generator: Generator) -> Tensor:
    x = torch.rand(rows, features, generator=generator)
    x[rows // 2 :][:1] *= 2.0**20
    return x


FAMILIES: Mapping[str, Family] = {
    "uniform": lambda b, k, g: torch.rand(b, k, generator=g),
    "normal": lambda b, k, g: torch.randn(b, k, generator=g),
    "large mean": lambda b, k, g: torch.randn(b, k, generator=g) + 1000.0,
    "wide range": lambda b, k, g: torch.exp(3.0 * torch.randn(b, k, generator=g)),
    "one huge row": _one_huge_row,
}


def _one_nan(rows: int, features: int, generator: Generator) -> Tensor:
    x = torch.rand(rows, features, generator=generator)
    x[rows // 2 :][:1, features // 2] = float("nan")
    return x


# Run once, with the first state: a maximum or a clamp that loses a NaN looks right on numbers.
SPECIAL: Mapping[str, Family] = {"one NaN": _one_nan}


def _parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name.rpartition(".")[2], p) for name, p in model.named_parameters()]


def _trained(model: nn.Module, g: Generator) -> None:
    """Weights and biases moved by half their size, as a training run would."""
    for _, p in _parameters(model):
        p.add_(0.5 * p.abs().mean() * torch.randn(p.shape, generator=g).to(p))


def _large_bias(model: nn.Module, g: Generator) -> None:
    for name, p in _parameters(model):
        if name == "bias":
            p.copy_(10.0 * torch.randn(p.shape, generator=g))


def _large_sums(model: nn.Module, g: Generator) -> None:
    """All weights of one sign: nothing cancels, outputs are far above 88, where expf overflows."""
    for _, p in _parameters(model):
        p.copy_(p.abs() + 0.1)


def _cancelling(model: nn.Module, g: Generator) -> None:
    """Rows of weights in pairs of opposite sign, but for a thousandth: sums lose their digits."""
    for name, p in _parameters(model):
        pairs = p.size(0) // 2
        if name == "weight" and pairs:
            p[1 : 2 * pairs : 2] = -p[0 : 2 * pairs : 2] * 1.001


def _scaled_rows(model: nn.Module, g: Generator) -> None:
    """Rows of weights over 2^-20 .. 2^20."""
    for name, p in _parameters(model):
        if name == "weight" and p.dim() > 1:
            exponent = torch.randint(-20, 21, (p.size(0), 1), generator=g)
            p.mul_(torch.exp2(exponent.float()).to(p))


STATES: Mapping[str, State] = {
    "initial": lambda model, g: None,
    "trained": _trained,
    "large bias": _large_bias,
    "large sums": _large_sums,
    "cancelling": _cancelling,
    "scaled rows": _scaled_rows,
}
