"""Wrong candidates, made as `check` makes a variant: make(model) -> f(x). Each is wrong in one way.

All else is the model in float64, rounded once, and the buffers are written as they should be: what
rejects one of them rejects that one thing. `right` is the control of the controls.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import definitions
import torch
from kit import AVG, BN, MAX, SUM, Subject, buffers_after, layer_of
from torch import Tensor, nn

Make = Callable[[nn.Module], Callable[[Tensor], Tensor]]


def _write_buffers(model: nn.Module, x: Tensor) -> None:
    written = {name: value for name, (value, _) in buffers_after(model, x).items()}
    if not written and any(True for _ in model.buffers()):  # in eval, or a batch without variance
        twin = copy.deepcopy(model)
        twin(x)
        written = dict(twin.named_buffers())
    for name, value in written.items():
        model.get_buffer(name).copy_(value)


def exact(model: nn.Module, x: Tensor) -> Tensor:
    """The model itself in float64, of which `check` takes its truth; raises what it raises."""
    with torch.no_grad():
        return copy.deepcopy(model).double()(x.double())


def candidate(compute: Callable[[nn.Module, Tensor], Tensor], *, writes: bool = True) -> Make:
    """compute(model, x) -> y in float64; then the buffers, as a right one would."""

    def make(model: nn.Module) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            y = compute(model, x).float()
            if writes:
                _write_buffers(model, x)
            return y

        return run

    return make


def edited(change: Callable[[nn.Module], object]) -> Make:
    """The output of a changed copy of the model."""

    def compute(model: nn.Module, x: Tensor) -> Tensor:
        twin = copy.deepcopy(model)
        with torch.no_grad():
            change(twin)
        return exact(twin, x)

    return candidate(compute)


def after(change: Callable[[Tensor], Tensor]) -> Make:
    """The right output, changed."""
    return candidate(lambda model, x: change(exact(model, x)))


right = after(lambda y: y)


# --- wrong for every problem ------------------------------------------------------------------


def _first_tenth_of_K(model: nn.Module) -> None:
    weight = layer_of(model).weight
    weight[:, : max(1, weight.size(1) // 10)] = 0


def _first_tenth_of_N(model: nn.Module) -> None:
    layer = layer_of(model)
    count = max(1, layer.weight.size(0) // 10)
    layer.weight[:count], layer.bias[:count] = 0, 0


def _half(model: nn.Module) -> None:
    for p in model.parameters():
        p.copy_(p.half())


def _stale(model: nn.Module) -> Callable[[Tensor], Tensor]:
    old = copy.deepcopy(model)

    def run(x: Tensor) -> Tensor:
        y = exact(old, x).float()
        _write_buffers(model, x)
        return y

    return run


def _one_update_old(model: nn.Module) -> Callable[[Tensor], Tensor]:
    held = [copy.deepcopy(model)]

    def run(x: Tensor) -> Tensor:
        y = exact(held[0], x).float()
        held[0] = copy.deepcopy(model)
        _write_buffers(model, x)
        return y

    return run


def _previous_output(model: nn.Module) -> Callable[[Tensor], Tensor]:
    held: list[Tensor] = []

    def run(x: Tensor) -> Tensor:
        held.append(exact(model, x).float())
        _write_buffers(model, x)
        return held[-2] if len(held) > 1 else held[-1]

    return run


def _cached_by_pointer(model: nn.Module) -> Callable[[Tensor], Tensor]:
    held: dict[int, Tensor] = {}

    def run(x: Tensor) -> Tensor:
        y = exact(model, x).float()
        _write_buffers(model, x)
        return held.setdefault(layer_of(model).weight.data_ptr(), y)

    return run


def _odd_row_skipped(y: Tensor) -> Tensor:
    y = y.clone()
    y[-1:] = 0
    return y


def _block_not_written(y: Tensor) -> Tensor:
    whole = torch.full_like(y, float("nan"))
    whole[: -(y.size(0) // 3)] = y[: -(y.size(0) // 3)]
    return whole


COMMON: dict[str, Make] = {
    "zeros": after(torch.zeros_like),
    "the mean as a constant": after(lambda y: y.nanmean().expand_as(y)),
    "bias left out": edited(lambda m: layer_of(m).bias.zero_()),
    "first tenth of K left out": edited(_first_tenth_of_K),
    "first tenth of the features left out": edited(_first_tenth_of_N),
    "half precision": edited(_half),
    "made in the constructor": _stale,
    "one update old": _one_update_old,
    "the previous output": _previous_output,
    "cached by pointer": _cached_by_pointer,
    "the last row skipped": after(_odd_row_skipped),
    "a block not written": after(_block_not_written),
    "NaN dropped": after(lambda y: y.nan_to_num(0.0)),
}


# --- wrong for one ----------------------------------------------------------------------------


def _running_sum(weight: Tensor) -> Tensor:
    total = torch.zeros_like(weight[0])
    for row in weight:
        total += row
    return total.double()


def _sum_of_float32(model: nn.Module, x: Tensor) -> Tensor:
    layer = model.linear
    return (x.double() @ _running_sum(layer.weight) + layer.bias.double().sum()).unsqueeze(1)


def _pool(module: nn.Module) -> int:
    size = module.kernel_size  # AvgPool1d keeps a tuple
    return size[0] if isinstance(size, tuple) else size


def _ceil(name: str, fill: float) -> Callable[[nn.Module, Tensor], Tensor]:
    """The features after the last whole window in a window of their own."""

    def compute(model: nn.Module, x: Tensor) -> Tensor:
        twin, pool = copy.deepcopy(model), _pool(getattr(model, name))
        layer = layer_of(twin)
        missing = -layer.weight.size(0) % pool
        layer.weight = nn.Parameter(
            torch.cat([layer.weight, layer.weight.new_zeros(missing, layer.weight.size(1))])
        )
        layer.bias = nn.Parameter(torch.cat([layer.bias, layer.bias.new_full((missing,), fill)]))
        return exact(twin, x)

    return compute


def _window(name: str, change: Callable[[int], int]) -> Make:
    def set_pool(model: nn.Module) -> None:
        module = getattr(model, name)
        module.kernel_size = module.stride = change(_pool(module))

    return edited(set_pool)


def _set_scale(model: nn.Module) -> None:
    model.scale_factor = 1.0


def _tail_dropped(name: str) -> Make:
    """One window more than the pool drops."""

    def change(model: nn.Module) -> None:
        pool, layer = _pool(getattr(model, name)), layer_of(model)
        kept = layer.weight.size(0) // pool * pool - 1
        layer.weight, layer.bias = (
            nn.Parameter(layer.weight[:kept]),
            nn.Parameter(layer.bias[:kept]),
        )

    return edited(change)


def _pooled(model: nn.Module, x: Tensor) -> Tensor:
    pool = _pool(model.avg_pool)
    z = x.double() @ model.matmul.weight.double().T + model.matmul.bias.double()
    count = z.size(1) // pool
    return z[:, : count * pool].reshape(z.size(0), count, pool).mean(2)


def _tanh_gelu(model: nn.Module, x: Tensor) -> Tensor:
    gelu = nn.functional.gelu(_pooled(model, x), approximate="tanh")
    return (gelu * model.scale_factor).amax(1)


def _gelu_of_the_max(model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.gelu(_pooled(model, x).amax(1)) * model.scale_factor


def _gelu_of_the_ends(model: nn.Module, x: Tensor) -> Tensor:
    """Right for scales that are not negative, and only for them."""
    pooled = _pooled(model, x)
    ends = torch.stack([pooled.amax(1), pooled.amin(1)])
    return (nn.functional.gelu(ends) * model.scale_factor).amax(0)


def _no_guard(model: nn.Module, x: Tensor) -> Tensor:
    """max = (sum + |difference|) / 2 in float32, wherever it cancels."""
    z = (x.double() @ model.matmul.weight.double().T + model.matmul.bias.double()).float()
    z = z[:, : z.size(1) // 2 * 2]
    total, difference = z.sum(1), (z[:, ::2] - z[:, 1::2]).abs().sum(1)
    return (0.5 * model.scale_factor * (total + difference)).double()


def _mean_for_sum(model: nn.Module, x: Tensor) -> Tensor:
    return exact(model, x) / (layer_of(model).weight.size(0) // _pool(model.max_pool))


def _no_batchnorm(model: nn.Module, x: Tensor) -> Tensor:
    z = x.double() @ model.gemm.weight.double().T + model.gemm.bias.double()
    return (model.scale.double() * z).softmax(1)


def _literal_softmax(model: nn.Module, x: Tensor) -> Tensor:
    """exp without the maximum taken off, in float32."""
    bn, z = model.bn, x.double() @ model.gemm.weight.double().T + model.gemm.bias.double()
    mean, var = (z.mean(0), z.var(0, False)) if bn.training else (bn.running_mean, bn.running_var)
    z = (z - mean) / (var.double() + bn.eps).sqrt() * bn.weight.double() + bn.bias.double()
    e = (model.scale.double() * z).float().exp()
    return (e / e.sum(1, keepdim=True)).double()


def _other_eps(model: nn.Module) -> None:
    model.bn.eps = 1e-3


OF_SUM = {
    "float32 running sum": candidate(_sum_of_float32),
    "mean instead of sum": after(lambda y: y / 17),
}
OF_AVG = {
    "scale left out": edited(_set_scale),
    "window too wide": _window("avg_pool", lambda pool: pool + 1),
    "window of one": _window("avg_pool", lambda pool: 1),
    "tail used": candidate(_ceil("avg_pool", 0.0)),
    "a window too few": _tail_dropped("avg_pool"),
    "tanh GELU": candidate(_tanh_gelu),
    "GELU of the maximum": candidate(_gelu_of_the_max),
}
OF_MAX = {
    "scale left out": edited(_set_scale),
    "window too wide": _window("max_pool", lambda pool: pool + 1),
    "window of one": _window("max_pool", lambda pool: 1),
    "tail used": candidate(_ceil("max_pool", float("-inf"))),
    "a window too few": _tail_dropped("max_pool"),
    "mean for sum": candidate(_mean_for_sum),
}
OF_BN = {
    "uniform": after(lambda y: torch.full_like(y, 1 / y.size(1))),
    "scale left out": edited(lambda m: m.scale.fill_(1.0)),
    "BatchNorm left out": candidate(_no_batchnorm),
    "gamma left out": edited(lambda m: m.bn.weight.fill_(1.0)),
    "beta left out": edited(lambda m: m.bn.bias.zero_()),
    "the other mode": edited(lambda m: m.train(not m.training)),
    "another eps": edited(_other_eps),
    "softmax without its maximum": candidate(_literal_softmax),
}


def _updates_anyway(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        y = exact(model, x).float()
        model.train()
        _write_buffers(model, x)
        model.eval()
        return y

    return run


def _biased(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        y, before = exact(model, x).float(), model.bn.running_var.double()
        after_ = definitions.buffers_after(model, x)["bn.running_var"]
        _write_buffers(model, x)
        share = model.bn.momentum
        batch = (after_ - (1 - share) * before) / share * (x.size(0) - 1) / x.size(0)
        model.bn.running_var.copy_((1 - share) * before + share * batch)
        return y

    return run


OF_EVAL = {"statistics updated": _updates_anyway}
OF_TRAIN = {
    "statistics not updated": candidate(exact, writes=False),
    "biased variance kept": _biased,
}


def of(subject: Subject) -> dict[str, Make]:
    """What is wrong for a subject; what its options or its mode make right is left out."""
    if subject.slug == SUM.slug:
        return {**COMMON, **OF_SUM}
    if subject.slug == AVG.slug:
        negative = {"GELU of the ends": candidate(_gelu_of_the_ends)}
        return {**COMMON, **OF_AVG, **(negative if subject.options[1] < 0 else {})}
    if subject.slug == MAX.slug:
        pairs = {"no guard": candidate(_no_guard)}
        return {**COMMON, **OF_MAX, **(pairs if subject.options[0] == 2 else {})}
    assert subject.slug == BN.slug
    common = {
        k: v for k, v in COMMON.items() if not (subject.has_statistics and k == "bias left out")
    }
    return {**common, **OF_BN, **(OF_TRAIN if subject.has_statistics else OF_EVAL)}


# --- wrong beside their numbers ---------------------------------------------------------------


def modifies_its_input(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        y = exact(model, x).float()
        x.mul_(0.5)
        return y

    return run


def unrounded(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: exact(model, x)


def raises(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        raise RuntimeError("on purpose")

    return run


def jitters(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Right within the rule, with other bits at each call."""
    calls = [0]

    def run(x: Tensor) -> Tensor:
        calls[0] += 1
        return (exact(model, x) * (1 + 6e-8 * (calls[0] % 2))).float()

    return run
