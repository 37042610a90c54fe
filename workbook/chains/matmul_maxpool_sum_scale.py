"""Linear -> max pool over features -> sum -> scale: for pairs, half of a product.

    y[i] = scale sum_w max_{j < pool} z[i, w pool + j],   z = x W^T + b

Two numbers have max(u, v) = (u + v + |u - v|) / 2. The sum of all u + v is one dot product, and a
difference of two rows of weights folds, so that a pool of 2 takes a product of half the width:

    y[i] = scale / 2 (A[i] + B[i]),   A[i] = x[i].w_sum + b_sum,   B[i] = sum_m |x[i].D[m] + c[m]|

That cancels where one side of the pairs is far below the other. A guard finds such rows, and they
are computed as they are written. A pool of 1 is the sum alone; other pools have no such form.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbook import backward, normal, ops, split, sums, variants
from workbook.chains import matmul_maxpool_sum_scale_back as back
from workbook.chains import matmul_maxpool_sum_scale_ladder as ladder
from workbook.chains import matmul_maxpool_sum_scale_road as road
from workbook.chains import matmul_maxpool_sum_scale_run as running
from workbook.spec import Problem, Size

__all__ = ["Model", "ModelNew", "fold", "plain", "problem"]

SLUG = "matmul_maxpool_sum_scale"
FOLDS = (*sums.PAIR_DIFFERENCE, *sums.COLUMN_SUM)  # on a GPU: of a pool of 2, and of 1


class Model(nn.Module):
    """x (B, in_features) -> (B,): a Linear, maxima of windows of its outputs, their sum, scaled."""

    def __init__(
        self, in_features: int, out_features: int, kernel_size: int, scale_factor: float
    ) -> None:
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.max_pool = nn.MaxPool1d(kernel_size)
        self.scale_factor = scale_factor

    def forward(self, x: Tensor) -> Tensor:
        x = self.matmul(x)
        x = self.max_pool(x.unsqueeze(1)).squeeze(1)
        x = torch.sum(x, dim=1)
        return x * self.scale_factor


class ModelNew(Model):
    """The drop-in: constructor, submodules, state_dict and random draws of Model; half a product.

    The weights are folded when first used and again after they change. After an edit in place
    through `.data`, which torch hides, call `workbook.refresh(model)`.
    """

    def forward(self, x: Tensor) -> Tensor:
        linear, options = self._modules["matmul"], _options(self)
        if options is not None and running.is_left(x, linear, options[0]):
            return super().forward(x)
        operands = normal.operands(x, linear)
        if operands is not None and options is not None:
            weight, pool = operands[1], options[0]
            if pool <= weight.size(0):
                op = OP if running.is_halved(weight, pool) else DIRECT
                return op(*operands, *options)
        normal.explain(x, linear)
        return super().forward(x)


def _options(model: nn.Module) -> tuple[int, float] | None:
    """(pool, scale) as they are now; None where the reference's forward has to run."""
    pool, scale = model._modules["max_pool"], model.scale_factor
    if not normal.is_plain(pool, nn.MaxPool1d) or pool.ceil_mode or pool.return_indices:
        return None
    size = pool.kernel_size[0] if type(pool.kernel_size) is tuple else pool.kernel_size
    number = type(scale) is float or (type(scale) is int and abs(scale) <= 2**53)
    if not number or type(size) is not int or size < 1 or pool.stride not in (size, (size,)):
        return None
    usual = pool.padding in (0, (0,)) and pool.dilation in (1, (1,))
    return (size, float(scale)) if usual else None


def fold(dtype: torch.dtype, weight: Tensor, bias: Tensor, pool: int) -> tuple[Tensor, ...]:
    """(D (M, K), c (M,), w_sum (K,), b_sum ()): differences and sums of rows; no gradients.

    D, in the weights' own type, and c are those of pairs, W[2m] - W[2m+1]; M = N // 2, and 0 for a
    pool of 1. The rest in `dtype`, from float64. () for other pools, where nothing folds.
    """
    if pool > 2:
        return ()
    if torch.is_grad_enabled():  # to ask takes less than to switch it off
        weight, bias = weight.detach(), bias.detach()
    if pool == 2:
        differences, shifts, w_sum, b_sum = sums.pair_fold(weight, bias)
    else:
        differences, shifts = weight[:0].clone(), bias[:0].double()
        w_sum, b_sum = sums.column_sum(weight), bias.double().sum()
    return differences, shifts.to(dtype), w_sum.to(dtype), b_sum.to(dtype)


def fold_half(dtype: torch.dtype, weight: Tensor, bias: Tensor, pool: int) -> tuple[Tensor, ...]:
    """`fold` where half a product in float32 stands for the whole one; else ()."""
    return fold(dtype, weight, bias, pool) if running.is_folded(weight, pool) else ()


@torch.no_grad()
def fold_halves(dtype: torch.dtype, weight: Tensor, bias: Tensor, pool: int) -> tuple[Tensor, ...]:
    """(halves of D, four tensors, c (M,), w_sum (K,), b_sum ()); `fold` where nothing is halved."""
    if pool != 2 or not running.is_halved(weight, pool):
        return fold(dtype, weight, bias, pool)
    halves, w_sum, shifts, b_sum = split.halved_differences(weight, bias)
    return *halves, shifts.to(dtype), w_sum.to(dtype), b_sum.to(dtype)


def plain(
    x: Tensor, differences: Tensor, shifts: Tensor, w_sum: Tensor, b_sum: Tensor,
    pool: int, scale: float,
) -> Tensor:  # fmt: skip
    """x (B, K) -> (B,), the folded chain in torch, without a guard."""
    total = x @ w_sum + b_sum
    if pool == 2:
        total = total + torch.addmm(shifts, x, differences.to(x.dtype).T).abs().sum(1)
    return scale / pool * total


def reference(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    """The original chain as a function of its parameters, differentiable.

    No module is shared behind it: two threads may run it at once.
    """
    parts = SimpleNamespace(
        matmul=lambda x: F.linear(x, weight, bias),
        max_pool=lambda z: F.max_pool1d(z, pool),
        scale_factor=scale,
    )
    return Model.forward(parts, x)


def _output(x: Tensor, *arguments: object) -> Tensor:
    return x.new_empty(x.size(0))


def _vjp(
    grad: Tensor, _: object, needed: Sequence[bool], x: Tensor, weight: Tensor, bias: Tensor,
    pool: int, scale: float,
) -> tuple[Tensor | None, ...] | None:  # fmt: skip
    """Of float32 pairs, by the fold of the way there; not where a tracer can't look it up, nor
    while a graph is captured, which may not wait to see whether numbers are finite."""
    usual = pool == 2 and x.dtype is torch.float32 and running.is_folded(weight, pool)
    if not usual or ops.is_watched() or backward.is_capturing(x):
        return None
    place = OP.place(x, weight, bias, pool, scale)
    form = {"hopper": OP.forms["split"], "cuda": OP.forms["half"]}.get(place)
    folded = OP.folded(OP.dtype, weight, bias, pool, scale, form=form)
    g = running.differences(x, folded, place)
    return back.vjp(grad, needed, (x, weight, bias), g, scale)


def _arguments(model: nn.Module) -> tuple[Tensor, Tensor, int, float]:
    return model.matmul.weight, model.matmul.bias, *_options(model)


_SCHEMA = "(Tensor x, Tensor weight, Tensor bias, int pool, float scale) -> Tensor"
_COMMON = {
    "reference": reference,
    "output": _output,
    "arguments": _arguments,
    "computes": {},  # float32 alone has another form; the reference runs without a compiler, too
}

DIRECT = ops.FusedOp(  # any pool, and products too small to be halved
    SLUG,
    _SCHEMA,
    fold=None,
    plain=reference,
    forms={
        "tail": ops.Form(running.run_tail, ("-DWB_TAIL",), reads="before"),
        "blocks": ops.Form(running.run_blocks, ("-DWB_BLOCKS",), reads="before"),
        "split": ops.Form(
            running.run_tail_split,
            ("-DWB_TAIL", "-DWB_BIAS"),
            fold=lambda dtype, weight, bias: split.halved(weight),
            suits=running.suits_tail_split,
        ),
    },
    kernels={
        "cpu": ops.Kernel("blocks", ("cpu.cpp",)),
        "cuda": ops.Kernel("tail", ("04_gemm_block_tail.cu",)),
        "hopper": ops.Kernel("split", ("04_gemm_block_tail.cu",), split.SHARED),
    },
    name=f"{SLUG}_direct",
    fold_options=0,
    **_COMMON,
)

OP = ops.FusedOp(
    SLUG,
    _SCHEMA,
    fold=fold,
    plain=plain,
    forms={
        "chain": ops.Form(running.run_chain, ("-DWB_CHAIN",), reads="before"),
        "tail": ops.Form(running.run_tail, ("-DWB_TAIL",), reads="before"),
        "blocks": ops.Form(partial(running.run_half_blocks, direct=DIRECT), ("-DWB_BLOCKS",)),
        "half": ops.Form(partial(running.run_half, direct=DIRECT), fold=fold_half),
        "split": ops.Form(
            partial(running.run_split, direct=DIRECT), fold=fold_halves, suits=running.suits_split
        ),
    },
    kernels={
        "cpu": ops.Kernel("blocks", ("cpu.cpp",), (*sums.PAIR_FOLD, *sums.PAIR_DIFFERENCE)),
        "cuda": ops.Kernel("half", ("05_half_gemm_guard.cu",), FOLDS),
        "hopper": ops.Kernel("split", ("05_half_gemm_guard.cu",), (*split.SHARED, *FOLDS)),
    },
    dtype=torch.float64,  # of all but the differences
    fold_options=1,
    vjp=_vjp,
    **_COMMON,
)


def _algebra(model: nn.Module) -> object:
    """`plain` where there is one."""

    def run(x: Tensor) -> Tensor:
        arguments = _arguments(model)
        return OP.run_plain(x, *arguments, dtype=x.dtype) if arguments[2] <= 2 else model(x)

    return run


def _drop_in(model: nn.Module) -> nn.Module:
    return problem.drop_in(model)


problem = Problem(
    slug=SLUG,
    title="Linear → max pool → sum → scale",
    question="How much of a matrix product does the sum of pairwise maxima need?",
    Model=Model,
    ModelNew=ModelNew,
    sizes={
        "laptop": Size("laptop", (2048, 2048, 2, 0.5), 128),
        "small": Size("small", (16384, 16384, 2, 0.5), 8),
        "cpu paper": Size("cpu paper", (16384, 16384, 2, 0.5), 128),
        "paper": Size("paper", (32768, 32768, 2, 0.5), 128),
        "wide": Size("wide", (1024, 32768, 2, 0.5), 1024),
    },
    dims=("pool",),
    steps=road.steps(reference),
    work=ladder.WORK,
    variants=(
        *variants.standard(OP, _drop_in, algebra=_algebra, others=(DIRECT,)),
        *ladder.ladder(OP),
        *road.wrong(OP),
    ),
    omissions=road.OMISSIONS,
    arguments=_arguments,
    fold=lambda model: fold(torch.float64, *_arguments(model)[:3]),
    yardsticks={
        "torch.mm(x, D.T)": lambda x, differences, *_: torch.mm(x, differences.T),
    },
    bare=lambda model, x: variants.bare(OP, model, x),
    multiplied=running.multiplied,
    fold_halves=lambda model: fold_halves(torch.float64, *_arguments(model)[:3]),
    rung_of_text=lambda *source: variants.rung_of_text(OP, *source),
    edges=road.EDGES,
    sweeps=ladder.SWEEPS,
    states=road.STATES,
)
