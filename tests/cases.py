"""What the tests of the drop-ins vary: hyper-parameters, states of weights, inputs, and how.

Each state and each family of inputs breaks some wrong algebra. `pairwise` takes few rows of a grid
in which all pairs of values meet.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from kit import BN, INF, NAN, SUM, Subject, drawn, layer_of
from torch import Tensor, nn


def options_of(subject: Subject, N: int) -> dict[str, tuple]:
    """Every kind of hyper-parameters at N outputs, those that the reference refuses among them."""
    if subject.slug == SUM.slug:
        return {"none": ()}
    if subject.slug == BN.slug:
        return {
            "default": (),
            "eps 1e-2": (1e-2,),
            "eps 0": (0.0,),
            "momentum 0.3": (1e-5, 0.3),
            "momentum 0": (1e-5, 0.0),
            "momentum 1": (1e-5, 1.0),
            "cumulative": (1e-5, None),
            "scale ()": (1e-5, 0.1, ()),
            "scale (N)": (1e-5, 0.1, (N,)),
            "scale (1, N)": (1e-3, 0.2, (1, N)),
            "scale (1, 1)": (1e-5, 0.1, (1, 1)),
            "scale (3, 1)": (1e-5, 0.1, (3, 1)),
            "scale (3, N)": (1e-5, 0.1, (3, N)),
            "scale (2, 1, 1)": (1e-5, 0.1, (2, 1, 1)),
            "scale (N + 1)": (1e-5, 0.1, (N + 1,)),
        }
    return {
        "pool 1": (1, 2.0),
        "pool 2": (2, 0.5),
        "pool 2, negative": (2, -0.5),
        "pool 3": (3, 2.0),
        "pool 3, negative": (3, -1.5),
        "scale 0": (2, 0.0),
        "scale -0.0": (3, -0.0),
        "scale an int": (2, 3),
        "more than half": (N // 2 + 1, 2.0),
        "more than half, negative": (N // 2 + 1, -2.0),
        "pool N": (N, 2.0),
        "pool N, negative": (N, -1.0),
        "pool N + 1": (N + 1, 2.0),
        "pool a tuple": ((2,), 2.0),
        "pool 0": (0, 2.0),
    }


# --- states and inputs --------------------------------------------------------------------------


def _trained(model: nn.Module) -> None:
    """Everything moved; of BatchNorm every sign, zeros, and statistics that are not the batch's."""
    for i, p in enumerate(model.parameters()):
        p.add_(0.5 * p.abs().mean() * drawn(p.shape, 50 + i).to(p))
    if hasattr(model, "bn"):
        N = model.bn.num_features
        for i, name in enumerate(("weight", "bias", "running_mean")):
            getattr(model.bn, name).copy_(drawn((N,), 60 + i))
        model.bn.weight[::5] = 0
        model.bn.running_var.copy_(drawn((N,), 63).exp())
        model.bn.num_batches_tracked.add_(7)


def _large(model: nn.Module) -> None:
    """Far above 88, where a float32 exp overflows."""
    model.scale.mul_(300) if hasattr(model, "scale") else layer_of(model).weight.mul_(300)


def _state(change: Callable[[Tensor, Tensor], object]) -> Callable[[nn.Module], None]:
    """A state from a change of the Linear's weight and bias."""

    def apply(model: nn.Module) -> None:
        layer = layer_of(model)
        change(layer.weight, layer.bias)

    return apply


def _opposite(w: Tensor, b: Tensor) -> None:
    w.zero_()
    w[:1], w[1:2] = 3e38, -3e38


def _cancelling(w: Tensor, b: Tensor) -> None:
    w[1::2] = -1.001 * w[: w.size(0) // 2 * 2 : 2]


def _ties(w: Tensor, b: Tensor) -> None:
    w[1::2], b[1::2] = w[: w.size(0) // 2 * 2 : 2].clone(), b[: b.size(0) // 2 * 2 : 2].clone()


# What is written into a model: each breaks some wrong algebra. The last four are not finite.
STATES: Mapping[str, Callable[[nn.Module], object]] = {
    "drawn": lambda model: None,
    "trained": _trained,
    "shifted": _state(lambda w, b: (w.add_(1), b.sub_(100))),
    "large bias": _state(lambda w, b: b.copy_(drawn(b.shape, 71) * 10)),
    "huge bias": _state(lambda w, b: b.add_(1e4)),
    "odd ones lose": _state(lambda w, b: b[1::2].sub_(10)),
    "odd ones lose by far": _state(lambda w, b: b[1::2].sub_(1e4)),
    "even ones lose by far": _state(lambda w, b: b[::2].sub_(1e4)),
    "cancelling": _state(_cancelling),
    "ties": _state(_ties),
    "large outputs": _large,
    "zero": _state(lambda w, b: (w.zero_(), b.zero_())),
    "rows of every size": _state(
        lambda w, b: w.mul_(torch.exp2(20 * drawn((w.size(0), 1), 72).clamp(-1, 1)).to(w))
    ),
    "huge and opposite": _state(_opposite),
    "denormal": _state(lambda w, b: (w.mul_(1e-39), b.mul_(1e-39))),
    "a masked feature": _state(lambda w, b: b[1:2].fill_(-INF)),
    "every other feature masked": _state(lambda w, b: b[1::2].fill_(-INF)),
    "an infinite weight": _state(lambda w, b: w[2:3, -1:].fill_(INF)),
    "NaN in the last feature": _state(lambda w, b: w[-1:, :1].fill_(NAN)),
}


def put(state: str, *models: nn.Module) -> None:
    """Write a state into the models, in place; BatchNorm's own part only where the state says."""
    for model in models:
        with torch.no_grad():
            STATES[state](model)


def families(rows: int, features: int) -> dict[str, Tensor]:
    """Inputs x (rows, features)."""
    x = drawn((rows, features), seed=1)
    huge, one_nan, one_inf = x.clone(), x.clone(), x.clone()
    huge[rows // 2 :][:1] *= 1e30
    one_nan[rows // 2 :][:1, features // 2 :][:, :1] = NAN
    one_inf[rows // 2 :][:1, features // 2 :][:, :1] = -INF
    scale = torch.logspace(-20, 20, features, base=2)
    order = torch.randperm(features, generator=torch.Generator().manual_seed(2))
    return {
        "uniform": x.sigmoid(),
        "normal": x,
        "large mean": x + 1000,
        "wide range": (3 * x).exp(),
        "columns of every size": x * scale[order],
        "one huge row": huge,
        "zeros": torch.zeros(rows, features),
        "one row for all": x[:1].repeat(rows, 1),
        "denormal": x * 1e-40,
        "one NaN": one_nan,
        "one infinity": one_inf,
    }


# --- pairs instead of the whole grid ----------------------------------------------------------


def pairwise(dimensions: Mapping[str, Sequence], seed: int = 0) -> list[dict]:
    """Few rows in which every two values of two dimensions meet at least once. Deterministic."""
    names, choose = list(dimensions), random.Random(seed)
    open_pairs = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(dimensions[a]))
        for j in range(len(dimensions[b]))
    }
    rows = []
    while open_pairs:
        first = min(open_pairs)
        tries = [_candidate(dimensions, dict(first), choose) for _ in range(20)]
        best = max(tries, key=lambda row: len(open_pairs & set(_pairs(names, row))))
        open_pairs -= set(_pairs(names, best))
        rows.append({name: dimensions[name][best[name]] for name in names})
    return rows


def _candidate(dimensions: Mapping[str, Sequence], fixed: dict, choose: random.Random) -> dict:
    return {n: fixed.get(n, choose.randrange(len(v))) for n, v in dimensions.items()}


def _pairs(names: Iterable[str], row: Mapping[str, int]) -> list[tuple]:
    return [((a, row[a]), (b, row[b])) for a, b in itertools.combinations(names, 2)]
