"""The avgpool chain, told: its derivation, its work, the ladder and the wrong versions.

Nothing here runs in the drop-in. Functions of (x, weight, bias, pool, scale) are plain torch, in
the type of their input.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from workbook import controls, paths, split, variants
from workbook.limits import Ceilings, Work, floor_ms, gemm_work
from workbook.ops import FusedOp
from workbook.spec import Size, Step, Variant

__all__ = ["EDGES", "OMISSIONS", "STATES", "WORK", "ladder", "steps", "wrong"]

VERTEX = -0.7517915246935645  # where GELU turns


# --- the derivation -------------------------------------------------------------------------


def _outputs(x: Tensor, weight: Tensor, bias: Tensor, pool: int) -> Tensor:
    """z (B, M, pool), the Linear's outputs by group; those left over are dropped."""
    groups = bias.size(0) // pool
    return F.linear(x, weight, bias)[:, : groups * pool].unflatten(1, (groups, pool))


def _finish(u: Tensor, scale: float) -> Tensor:
    return (scale * F.gelu(u)).amax(1)


def _folded(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    groups = bias.size(0) // pool
    means = weight[: groups * pool].unflatten(0, (groups, pool)).mean(1)
    return _finish(F.linear(x, means, bias[: groups * pool].view(groups, pool).mean(1)), scale)


def _scale_outside(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    g = F.gelu(_outputs(x, weight, bias, pool).mean(2))
    return scale * (g.amax(1) if scale >= 0 else g.amin(1))


def _two_numbers(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    u = _outputs(x, weight, bias, pool).mean(2)
    if scale >= 0:
        return scale * F.gelu(torch.stack([u.amin(1), u.amax(1)])).amax(0)
    low, high = u.where(u <= VERTEX, -torch.inf).amax(1), u.where(u > VERTEX, torch.inf).amin(1)
    two = torch.stack([low, high])  # one of them may be missing
    return scale * F.gelu(two).where(two.isfinite(), torch.inf).amin(0)


def _left_over_averaged(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    z = F.linear(x, weight, bias).unsqueeze(1)
    return _finish(F.avg_pool1d(z, pool, ceil_mode=True).squeeze(1), scale)


def _ends_for_any_scale(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    u = _outputs(x, weight, bias, pool).mean(2)
    return _finish(torch.stack([u.amin(1), u.amax(1)], 1), scale)


def steps(reference: Callable[..., Tensor]) -> tuple[Step, ...]:
    """The derivation; `reference` is its first step."""
    return (
        Step(
            "The chain",
            r"y_i = \max_{m} \; s \, g\Big(\tfrac1p \sum_{j=0}^{p-1} z_{i,\,mp+j}\Big), \quad"
            r" z_{in} = \sum_k x_{ik} W_{nk} + b_n, \quad g(u) = u\,\Phi(u)",
            "the definition: s is the scale, p the pool, m = 0, ..., floor(N / p) - 1",
            reference,
        ),
        Step(
            "Exchange the mean and the product",
            r"u_{im} = \sum_k x_{ik} \underbrace{\tfrac1p \sum_j W_{mp+j,\,k}}_{\bar W_{mk}}"
            r" + \underbrace{\tfrac1p \sum_j b_{mp+j}}_{\bar b_m}, \qquad"
            r" y_i = \max_m s\,g(u_{im})",
            "a mean is linear and x does not depend on j: the mean belongs to the weights, once",
            _folded,
        ),
        Step(
            "Take the scale out",
            r"\max_m s\,g(u_{im}) = s \max_m g(u_{im}) \;\; (s \ge 0), \qquad"
            r" \max_m s\,g(u_{im}) = s \min_m g(u_{im}) \;\; (s < 0)",
            "multiplying by s keeps the order, or turns it around",
            _scale_outside,
        ),
        Step(
            "Two numbers are enough",
            r"\max_m g(u_m) = \max\big(g(\min_m u_m),\, g(\max_m u_m)\big), \qquad"
            r" \min_m g(u_m) = \min\big(g(\max_{u_m \le v} u_m),\, g(\min_{u_m > v} u_m)\big)",
            "g falls until v = -0.7518 and rises after it: over a set it is largest at one of the"
            " set's ends, and smallest next to v, on one of its two sides",
            _two_numbers,
        ),
        Step(
            "Tempting and wrong: exchange the mean and the GELU",
            r"y_i \stackrel{?}{=} \max_m \tfrac{s}{p} \sum_j g(z_{i,\,mp+j})",
            "g is not linear: only what stands directly behind the product goes through it",
            lambda x, weight, bias, pool, scale: (
                scale * F.gelu(_outputs(x, weight, bias, pool)).mean(2)
            ).amax(1),
            holds=False,
        ),
        Step(
            "Tempting and wrong: average what is left over, too",
            r"m \stackrel{?}{=} 0, \ldots, \lceil N / p \rceil - 1",
            "the pool drops the last N mod p features; their mean may well be the largest",
            _left_over_averaged,
            holds=False,
        ),
        Step(
            "Tempting and wrong: the sum for the mean",
            r"y_i \stackrel{?}{=} \max_m \tfrac{s}{p}\, g\Big(\sum_j z_{i,\,mp+j}\Big)",
            "the factor 1/p can't be pulled out of the GELU",
            lambda x, weight, bias, pool, scale: _finish(
                _outputs(x, weight, bias, pool).sum(2), scale / pool
            ),
            holds=False,
        ),
    )


# --- work, and what `check` draws -----------------------------------------------------------


def _before(B: int, K: int, N: int, pool: int) -> Work:
    """The Linear, then pool, GELU, scale and maximum, each of which writes what the next reads."""
    M = N // pool
    tail = Work(float(B * N + 4 * B * M), 4.0 * B * (N + 3 * M), 4.0 * B * (3 * M + 1))
    return gemm_work(B, K, N) + tail


def _after(B: int, K: int, N: int, pool: int) -> Work:
    """x and the folded weights once; y."""
    M = N // pool
    return Work(2.0 * B * K * M, 4.0 * (B * K + M * K + M), 4.0 * B)


def _fold(B: int, K: int, N: int, pool: int) -> Work:
    """The chain after the algebra, and all weights read once, their means written."""
    M = N // pool
    folding = Work(float(M * pool * K), 4.0 * M * pool * (K + 1), 4.0 * M * (K + 1))
    return _after(B, K, N, pool) + folding


WORK = {"before": _before, "after": _after, "fold": _fold}


def _below_zero(model: nn.Module, g: Generator) -> None:
    """u around the vertex of GELU: its smallest u decides as often as its largest."""
    linear = model.matmul
    linear.weight.mul_(0.2)
    spread = (
        0.5 * torch.randn(linear.bias.shape, generator=g) * model.avg_pool.kernel_size[0] ** 0.5
    )
    linear.bias.copy_(spread - 1.2)


STATES = {"below zero": _below_zero}
# Pools that divide and that don't, of one, of more than half; scales of either sign, and none.
EDGES = (Size("odd", (97, 31, 3, -1.5), 7), Size("one", (1, 1, 1, 2.0), 1),
         Size("tall", (67, 33, 2, 0.5), 1031), Size("none", (5, 3, 1, 2.0), 0),
         Size("long", (2052, 18, 16, 2.0), 5), Size("long odd", (2053, 19, 10, -3.0), 5),
         Size("longest", (9004, 33, 2, 2.0), 3), Size("pool 1", (33, 300, 1, -0.7), 9),
         Size("scale 0", (97, 31, 5, 0.0), 7), Size("whole scale", (97, 64, 4, -2), 7),
         Size("many groups", (19, 2100, 2, 2.0), 1500),
         Size("pool too large", (5, 3, 4, 2.0), 2))  # fmt: skip


def _linear(model: nn.Module) -> tuple[Tensor, Tensor, int, float]:
    return (model.matmul.weight, model.matmul.bias, model.avg_pool.kernel_size[0],
            model.scale_factor)  # fmt: skip


def _without_first(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
    """The first tenth of K left out."""
    first = x.size(1) // 10
    return _folded(x[:, first:], weight[:, first:], *rest)


def _every_other(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    """Every second group left out: of a single one the same few rows of weights often win all."""
    return _finish(_outputs(x, weight, bias, pool).mean(2)[:, ::2], scale)


OMISSIONS = {
    "bias left out": lambda m, x: _folded(x, m.matmul.weight, 0 * m.matmul.bias, *_linear(m)[2:]),
    "scale left out": lambda m, x: _folded(x, *_linear(m)[:3], 1.0),
    "GELU left out": lambda m, x: (m.scale_factor * _outputs(x, *_linear(m)[:3]).mean(2)).amax(1),
    "pool left out": lambda m, x: _folded(x, *_linear(m)[:2], 1, m.scale_factor),
    "first 10% of K left out": lambda m, x: _without_first(x, *_linear(m)),
    "every second group left out": lambda m, x: _every_other(x, *_linear(m)),
}


# --- the ladder -----------------------------------------------------------------------------

CYCLES_OF_AN_ADD = 4  # latency of one floating-point addition on today's CPUs
CPU_HZ = 3.0e9
SM_HZ, SMS = 1.7e9, 132  # H100 SXM under load


def _chain_of_adds(outputs: Callable[[dict], int]) -> Callable:
    def predict(shape: dict, ceilings: Ceilings) -> float:
        adds = shape["B"] * shape["K"] * outputs(shape)
        return adds * CYCLES_OF_AN_ADD / (torch.get_num_threads() * CPU_HZ) * 1e3

    return predict


def _line_a_cycle(outputs: Callable[[dict], int]) -> Callable:
    """A load of a warp touches 32 cache lines, of which a multiprocessor takes one a cycle."""

    def predict(shape: dict, ceilings: Ceilings) -> float:
        return shape["B"] * shape["K"] * outputs(shape) / (SMS * SM_HZ) * 1e3

    return predict


def _product_and(trips: float, launches: int) -> Callable:
    """The floor of the product; u written and read in `trips` round trips; a launch each."""

    def predict(shape: dict, ceilings: Ceilings) -> float:
        u = 4.0 * shape["B"] * (shape["N"] // shape["pool"])
        floor = floor_ms(_after(**shape), ceilings).ms
        return floor + trips * 2 * u / ceilings.copy_gbs / 1e6 + launches * ceilings.launch_ms

    return predict


def _all(shape: dict) -> int:
    return shape["N"]


def _groups(shape: dict) -> int:
    return shape["N"] // shape["pool"]


def _by_halves(shape: dict, ceilings: Ceilings) -> float:
    """Three products of halves, or their bytes; four parts written and read."""
    B, K, M = shape["B"], shape["K"], shape["N"] // shape["pool"]
    moved = 32.0 * B * M / ceilings.copy_gbs * 1e-6
    return split.floor_ms(B, K, M, ceilings) + moved + 2 * ceilings.launch_ms


def ladder(op: FusedOp) -> tuple[Variant, ...]:
    """From the kernel that one writes first to ours: a CPU's, then a GPU's."""
    said = (
        ("cpu_01_rows_summed_each_call.cpp", "chain", _chain_of_adds(_all), 16,
         "the chain as written: all N dot products of a row, averaged by `pool`"),
        ("cpu_02_folded_one_chain.cpp", "folded", _chain_of_adds(_groups), 64,
         "the mean of the rows folded: M dot products a row, one chain of additions each"),
        ("cpu.cpp", "blocks", _product_and(0, 0), None,
         "torch's product by blocks, the tail in the cache, the winner once more in double"),
        ("01_rows_summed_in_kernel.cu", "chain", _line_a_cycle(_all), None,
         "the chain as written: block per sample, the rows of W summed inside, at each call"),
        ("02_fold_thread_per_group.cu", "folded", _line_a_cycle(_groups), None,
         "the mean of the rows folded, a thread per group, a tree in shared memory"),
        ("03_product_then_tail.cu", "product", _product_and(1, 1), None,
         "the library's product on folded weights, then one kernel for the tail"),
        ("04_parts_then_tail.cu", "parts", _product_and(8, 1), None,
         "the product in parts over k, a batch; the tail adds them, by vectors and shuffles"),
        ("05_winner_in_double.cu", "winner", _product_and(8, 1), None,
         "the winner once more, in double, where groups are few or a batch is small"),
    )  # fmt: skip
    folder = paths.kernels() / op.slug
    on_tensor_cores = variants.rung(
        op, folder / "05_winner_in_double.cu", "float32 by halves on tensor cores, rung 5's tail",
        form="split", predict=_by_halves, shared=split.SHARED, name="06_split_product",
    )  # fmt: skip
    return *(
        variants.rung(op, folder / file, idea, form=form, predict=predict, sample=sample)
        for file, form, predict, sample, idea in said
    ), on_tensor_cores


# --- wrong versions -------------------------------------------------------------------------


def _u(x: Tensor, weight: Tensor, bias: Tensor, pool: int) -> Tensor:
    """u (B, M); refuses a pool that is too large, as the chain does."""
    return F.avg_pool1d(F.linear(x, weight, bias).unsqueeze(1), pool).squeeze(1)


def _tanh(x: Tensor, *given: object) -> Tensor:
    return (F.gelu(_u(x, *given[:3]), approximate="tanh") * given[3]).amax(1)


def _overlapping(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    z = F.linear(x, weight, bias).unsqueeze(1)
    return _finish(F.avg_pool1d(z, pool, stride=(pool + 1) // 2).squeeze(1), scale)


def _one_group_less(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    kept = max(pool, bias.size(0) - 1)
    return _folded(x, weight[:kept], bias[:kept], pool, scale)


def _without_nan(x: Tensor, *given: object) -> Tensor:
    return (F.gelu(_u(x, *given[:3])) * given[3]).nan_to_num(-torch.inf).amax(1)


def wrong(op: FusedOp) -> tuple[Variant, ...]:
    """Controls: `check` has to reject each."""
    said = (
        ("hard_coded_pool", "a pool of 16, whatever the model's",
         lambda x, weight, bias, pool, scale: _folded(x, weight, bias, 16, scale),
         "another pool is another model"),
        ("tanh_gelu", "GELU by its tanh formula", _tanh, "off by up to 5e-4: another function"),
        ("gelu_of_max", "GELU of the largest u alone",
         lambda x, *given: given[3] * F.gelu(_u(x, *given[:3]).amax(1)),
         "GELU falls first: below zero the smallest u may have the largest GELU"),
        ("ends_for_any_scale", "the smallest and the largest u for a negative scale, too",
         _ends_for_any_scale, "for scale < 0 the u next to the vertex decide"),
        ("overlapping_windows", "windows that overlap by half", _overlapping,
         "the pool's stride is its width"),
        ("left_over_averaged", "a shorter mean of the features left over", _left_over_averaged,
         "the pool drops them"),
        ("one_group_less", "M = (N - 1) // pool", _one_group_less,
         "where the pool divides N the last group is missing"),
        ("nan_dropped", "a maximum that skips NaN", _without_nan, "torch's max says NaN"),
    )  # fmt: skip
    folder = paths.kernels() / op.slug
    return (
        controls.fold_in_init(op),
        controls.fold_over_weight(op, "matmul"),
        controls.renamed_layer(op, "matmul"),
        *(controls.computed(op, f"wrong_{name}", *rest) for name, *rest in said),
        variants.rung(
            op, folder / "wrong_one_block.cu", "launched as <<<1, batch>>>", form="product",
            wrong="a block has at most 1024 threads: a batch above 1024 is not launched",
        ),
        variants.rung(
            op, folder / "wrong_fmaxf.cu", "the maximum by fmaxf", form="product",
            wrong="fmaxf drops a NaN: torch's max says NaN",
        ),
    )  # fmt: skip
