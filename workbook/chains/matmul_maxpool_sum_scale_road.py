"""The maxpool chain, told: its derivation, what `check` draws, and the wrong versions.

Nothing here runs in the drop-in. Functions of (x, weight, bias, pool, scale) are plain torch, in
the type of their input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from workbook import controls, paths, variants
from workbook.ops import FusedOp
from workbook.spec import Size, Step, Variant

__all__ = ["EDGES", "OMISSIONS", "STATES", "steps", "wrong"]


# --- the derivation -------------------------------------------------------------------------


def _windows(x: Tensor, weight: Tensor, bias: Tensor, pool: int) -> Tensor:
    """z (B, N // pool, pool), the Linear's outputs by window; those left over are dropped."""
    count = bias.size(0) // pool
    return F.linear(x, weight, bias)[:, : count * pool].unflatten(1, (count, pool))


def _dropped(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    return scale * _windows(x, weight, bias, pool).amax(2).sum(1)


def _by_magnitude(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    u, v = _windows(x, weight, bias, pool).unbind(2)
    return scale * ((u + v + (u - v).abs()) / 2).sum(1)


def _sums(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A (B,): all outputs that have a partner, added; one dot product."""
    used = bias.size(0) // 2 * 2
    return x @ weight[:used].sum(0) + bias[:used].sum()


def _apart(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    u, v = _windows(x, weight, bias, pool).unbind(2)
    return scale / 2 * (_sums(x, weight, bias) + (u - v).abs().sum(1))


def _differences(weight: Tensor) -> Tensor:
    used = weight.size(0) // 2 * 2
    return weight[0:used:2] - weight[1:used:2]


def _halved(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    differences = F.linear(x, _differences(weight), _differences(bias))
    return scale / 2 * (_sums(x, weight, bias) + differences.abs().sum(1))


def _maxima_of_weights(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    used = bias.size(0) // 2 * 2
    w, b = (p[:used].unflatten(0, (-1, 2)).amax(1) for p in (weight, bias))
    return scale * (x @ w.sum(0) + b.sum())


def _magnitude_outside(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    difference = x @ _differences(weight).sum(0) + _differences(bias).sum()
    return scale / 2 * (_sums(x, weight, bias) + difference.abs())


def _left_over_kept(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    z = F.linear(x, weight, bias).unsqueeze(1)
    return scale * F.max_pool1d(z, pool, ceil_mode=True).squeeze(1).sum(1)


_TEMPTING = (
    Step(
        "Tempting and wrong: the maximum of the weights",
        r"\max\Big(\sum_k x_k a_k,\, \sum_k x_k b_k\Big) \stackrel{?}{=}"
        r" \sum_k x_k \max(a_k, b_k)",
        "max(a + c, b + d) is not max(a, b) + max(c, d): one side wins as a whole, not term by"
        " term. It would remove the product",
        _maxima_of_weights,
        holds=False,
    ),
    Step(
        "Tempting and wrong: the magnitude outside of the sum",
        r"\sum_m |g_{im} + c_m| \stackrel{?}{=} \Big|\sum_m (g_{im} + c_m)\Big|",
        "differences of either sign cancel inside of the magnitude. It, too, would remove the"
        " product",
        _magnitude_outside,
        holds=False,
    ),
    Step(
        "Tempting and wrong: a window for what is left over",
        r"m \stackrel{?}{=} 0, \ldots, \lceil N / p \rceil - 1",
        "that is the pool with ceil_mode; ours drops the last feature of an odd N",
        _left_over_kept,
        holds=False,
    ),
)


def steps(reference: Callable[..., Tensor]) -> tuple[Step, ...]:
    """The derivation; `reference` is its first step."""
    return (
        Step(
            "The chain",
            r"y_i = s \sum_{m} \max_{0 \le j < p} z_{i,\,mp+j}, \qquad"
            r" z_{in} = \sum_k x_{ik} W_{nk} + b_n",
            "the definition: s is the scale, p the pool",
            reference,
        ),
        Step(
            "What is left over drops out",
            r"m = 0, \ldots, \lfloor N / p \rfloor - 1",
            "a pool without padding looks at whole windows only: the last N mod p rows of W and b"
            " are never used",
            _dropped,
        ),
        Step(
            "The larger of two numbers",
            r"\max(u, v) = \tfrac12 \big(u + v + |u - v|\big)",
            "half way between the two, and half of their distance up",
            _by_magnitude,
        ),
        Step(
            "The sum belongs to the weights",
            r"\sum_m (z_{i,2m} + z_{i,2m+1}) = \sum_k x_{ik} \underbrace{\sum_n W_{nk}}_{w_k}"
            r" + \underbrace{\sum_n b_n}_{\beta} = A_i",
            "as for the sum of a Linear: one dot product a row",
            _apart,
        ),
        Step(
            "A difference of rows folds",
            r"|z_{i,2m} - z_{i,2m+1}| = \Big|\sum_k x_{ik} \underbrace{(W_{2m,k} - W_{2m+1,k})}"
            r"_{D_{mk}} + \underbrace{b_{2m} - b_{2m+1}}_{c_m}\Big|, \qquad"
            r" y_i = \tfrac{s}{2} \Big(A_i + \sum_m |g_{im} + c_m|\Big), \quad g = x D^{\mathsf T}",
            "the difference is linear, the magnitude is taken after the product: half the rows",
            _halved,
        ),
        *_TEMPTING,
    )


# --- what `check` draws -------------------------------------------------------------------


def _one_side_lower(by: float) -> Callable[[nn.Module, Generator], None]:
    def change(model: nn.Module, g: Generator) -> None:
        model.matmul.bias[1::2] -= by

    return change


def _lower_by_weights(model: nn.Module, g: Generator) -> None:
    """Every second row far below its partner for positive inputs, as a bias would have it."""
    weight = model.matmul.weight
    weight[1::2] -= 100.0 / weight.size(1)


def _masked(model: nn.Module, g: Generator) -> None:
    """Biases of minus infinity, as one masks features, on random ones of odd number."""
    odd = model.matmul.bias[1::2]
    chosen = torch.rand(odd.shape, generator=g) < 0.3
    odd.masked_fill_(chosen.to(odd.device), -torch.inf)


def _one_nan(model: nn.Module, g: Generator) -> None:
    """NaN in one feature of a pair: its window is NaN, and so is every row."""
    model.matmul.bias[:1] = torch.nan


STATES = {
    "biases lower by 10": _one_side_lower(10.0),
    "one NaN": _one_nan,
    "biases lower by 1e4": _one_side_lower(1e4),
    "lower by weights": _lower_by_weights,
    "masked": _masked,  # the last one, in which edges are checked: finite
}
# Pools that divide and that don't, of one, of more than half, too large; scales of either sign and
# none; wide enough to be halved, with a feature that is left over and without.
EDGES = (Size("one", (1, 1, 1, 0.5), 1), Size("odd", (97, 31, 3, -1.5), 7),
         Size("tall", (67, 33, 2, 0.5), 1031), Size("none", (5, 3, 2, 0.5), 0),
         Size("long", (2052, 5, 2, 0.5), 5), Size("longest", (9004, 33, 32, 2.0), 3),
         Size("pool 1", (97, 300, 1, -0.7), 9), Size("scale 0", (97, 31, 5, 0.0), 7),
         Size("whole scale", (97, 64, 40, -2), 7), Size("wide pool", (1030, 1030, 3, 0.5), 40),
         Size("halved", (257, 2049, 2, -0.3), 33), Size("halved, one row", (2053, 2051, 2, 0.5), 1),
         Size("halved, none", (300, 2048, 2, 1.0), 0),
         Size("halved, tall", (256, 2048, 2, 2), 1031),
         Size("whole", (251, 4099, 3, -0.7), 19), Size("whole pairs", (251, 4097, 2, 1.5), 19),
         Size("pool too large", (5, 3, 4, 0.5), 2))  # fmt: skip


def _given(model: nn.Module) -> tuple[Tensor, Tensor, int, float]:
    linear = model.matmul
    return linear.weight, linear.bias, model.max_pool.kernel_size, model.scale_factor


def _without_first(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
    """The first tenth of K left out."""
    first = -(-x.size(1) // 10)
    return _dropped(x[:, first:], weight[:, first:], *rest)


def _without_last(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    """The last window left out."""
    kept = (bias.size(0) // pool - 1) * pool
    return _dropped(x, weight[:kept], bias[:kept], pool, scale)


OMISSIONS = {
    "bias left out": lambda m, x: _dropped(x, m.matmul.weight, 0 * m.matmul.bias, *_given(m)[2:]),
    "scale left out": lambda m, x: _dropped(x, *_given(m)[:3], 1.0),
    "maximum left out (mean of a window)": lambda m, x: (
        m.scale_factor * _windows(x, *_given(m)[:3]).mean(2).sum(1)
    ),
    "pool left out": lambda m, x: _dropped(x, *_given(m)[:2], 1, m.scale_factor),
    "first 10% of K left out": lambda m, x: _without_first(x, *_given(m)),
    "last window left out": lambda m, x: _without_last(x, *_given(m)),
}


# --- wrong versions -------------------------------------------------------------------------


def _by_fmax(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    if pool > bias.size(0):
        return _checked(x, weight, bias, pool, scale)
    windows = _windows(x, weight, bias, pool).unbind(2)
    return scale * functools.reduce(torch.fmax, windows).sum(1)


def _running_sum(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    used = bias.size(0) // 2 * 2
    start = torch.zeros_like(weight[0]), torch.zeros_like(bias[:1])
    w_sum = functools.reduce(torch.add, weight[:used], start[0])  # a cumsum adds in another order
    b_sum = functools.reduce(torch.add, bias[:used], start[1])
    magnitudes = F.linear(x, _differences(weight), _differences(bias)).double().abs().sum(1)
    return (scale / 2 * (x.double() @ w_sum.double() + b_sum + magnitudes)).to(x.dtype)


def _unguarded(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    """Ours in all but the guard."""
    g = F.linear(x, _differences(weight)).double() + _differences(bias.double())
    sums = _sums(x.double(), weight.double(), bias.double())
    return (scale / 2 * (sums + g.abs().sum(1))).to(x.dtype)


def _first_tenth(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    kept = max(pool, bias.size(0) // 10)
    return 10 * _dropped(x, weight[:kept], bias[:kept], pool, scale)


def _one_window_less(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    kept = max(pool, bias.size(0) - 1)
    return _dropped(x, weight[:kept], bias[:kept], pool, scale)


def _checked(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    """The chain; refuses a pool that is too large."""
    return scale * F.max_pool1d(F.linear(x, weight, bias).unsqueeze(1), pool).squeeze(1).sum(1)


def _for_pairs(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Any other pool as it should be: the mistake alone is to be found."""

    def run(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
        right = pool != 2 or bias.size(0) < 2
        return (_checked if right else compute)(x, weight, bias, pool, scale)

    return run


_WRONG = (  # computed in float64, rounded once: wrong in one thing
    ("pool_hard_coded", "pairs, whatever the model's pool",
     lambda x, weight, bias, pool, scale: _dropped(x, weight, bias, 2, scale),
     "another pool is another model"),
    ("maximum_of_weights", "max(a, b) + max(c, d) for max(a + c, b + d)",
     _for_pairs(_maxima_of_weights), "one side of a pair wins as a whole, not term by term"),
    ("left_over_kept", "a window for the feature that is left over", _left_over_kept,
     "the pool drops it"),
    ("one_window_less", "(N - 1) // pool windows", _one_window_less,
     "where the pool divides N the last window is missing"),
    ("no_scale", "the scale left out",
     lambda x, *given: _checked(x, *given[:3], 1.0), "off by the factor of the scale"),
    ("no_bias", "the bias left out",
     lambda x, weight, bias, *rest: _checked(x, weight, 0 * bias, *rest), "another model"),
    ("first_tenth", "the first 10% of the features, times 10", _first_tenth,
     "near where features are alike; that is luck"),
    ("nan_dropped", "a maximum that skips NaN", _by_fmax, "torch's pools say NaN"),
)  # fmt: skip
_ROUNDED = (  # what is wrong with them is how they round
    ("no_guard", "half a product for every row", _for_pairs(_unguarded),
     "cancels where one side of the pairs is far below; a bias of -inf gives NaN"),
    ("running_sum", "the sum of the rows of W as a running sum in float32",
     _for_pairs(_running_sum), "loses digits with each row, which nothing gives back"),
    ("half_precision", "computed in bfloat16, returned as float32",
     lambda x, weight, bias, *rest: _checked(x.bfloat16(), weight.bfloat16(), bias.bfloat16(),
                                             *rest).float(), "three digits of seven"),
)  # fmt: skip


def _as_it_is(op: FusedOp, name: str, idea: str, compute: Callable, wrong: str) -> Variant:
    def make(model: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: compute(x, *op.arguments(model))

    return Variant(name, "torch", idea, make, wrong=wrong)


def wrong(op: FusedOp) -> tuple[Variant, ...]:
    """Controls: `check` has to reject each."""
    folder = paths.kernels() / op.slug
    return (
        controls.fold_in_init(op),
        controls.fold_over_weight(op, "matmul"),
        controls.renamed_layer(op, "matmul"),
        *(controls.computed(op, f"wrong_{name}", *rest) for name, *rest in _WRONG),
        *(_as_it_is(op, f"wrong_{name}", *rest) for name, *rest in _ROUNDED),
        variants.rung(
            op, folder / "wrong_one_block.cu", "launched as <<<1, batch>>>", form="tail",
            wrong="a block has at most 1024 threads: a batch above 1024 is not launched",
        ),
        variants.rung(
            op, folder / "wrong_fmaxf.cu", "the maximum by fmaxf", form="tail",
            wrong="fmaxf drops a NaN: torch's pools say NaN",
        ),
    )  # fmt: skip
