"""Linear -> BatchNorm -> scale -> softmax over the features: one map a feature behind the product.

    eval:  y[i] = softmax_n(a[n] (z[i,n] + shift[n]) + d[n]),  z = x W^T
    train: the same with x less a centre of the batch, and the batch's own statistics

The product stays as large as it was. What goes are three of the four matrices behind it: z becomes
the softmax in place, by a reduction over (maximum, sum of exp) that takes a row in any pieces.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbook import normal, ops, paths, variants
from workbook.chains._batchnorm_ops import EVAL, TRAIN, fold, plain, track
from workbook.chains._batchnorm_story import PARTS, STATES, STEPS, without
from workbook.limits import Ceilings, Work, floor_ms, gemm_work
from workbook.spec import EDGES, Problem, Size, Variant

__all__ = ["Model", "ModelNew", "fold", "plain", "problem"]


class Model(nn.Module):
    """x (B, in_features) -> (B, out_features): softmax over the features, rows sum to 1."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bn_eps: float = 1e-5,
        bn_momentum: float = 0.1,
        scale_shape: tuple[int, ...] = (1,),
    ) -> None:
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.bn = nn.BatchNorm1d(out_features, eps=bn_eps, momentum=bn_momentum)
        self.scale = nn.Parameter(torch.ones(scale_shape))
        self.softmax = nn.Softmax(dim=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gemm(x)
        x = self.bn(x)
        x = self.scale * x
        x = self.softmax(x)
        return x


class ModelNew(Model):
    """The drop-in: constructor, submodules, state_dict and random draws of Model, in both modes.

    In eval mode the map is derived when first used and again after a parameter or a running
    statistic changes. After an edit in place through `.data`, which torch hides, call
    `workbook.refresh(model)`. In train mode nothing is kept.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not _is_normal(self, x):
            normal.explain(x, self.gemm)
            return super().forward(x)
        if not self.bn.training:
            return EVAL(x, *EVAL.arguments(self))
        return _tracked(self, TRAIN(x, *TRAIN.arguments(self)))


def _is_normal(model: nn.Module, x: Tensor) -> bool:
    """Where an op stands for the chain: plain modules, an affine BatchNorm with statistics, a scale
    for all features or one each, two samples at least to train on. Half types have no kernel here:
    torch's own product is the fastest for them."""
    operands = normal.operands(x, model._modules["gemm"])
    bn, softmax = model._modules["bn"], model._modules["softmax"]
    if operands is None or x.dtype not in (torch.float32, torch.float64):
        return False
    if not normal.is_plain(bn, nn.BatchNorm1d) or not normal.is_plain(softmax, nn.Softmax):
        return False
    N, scale = operands[1].size(0), model._parameters.get("scale")
    held, kept = bn._parameters, bn._buffers
    vectors = held["weight"], held["bias"], kept["running_mean"], kept["running_var"]
    return (
        N > 0
        and softmax.dim in (1, -1)
        and normal.are_like(x, *vectors, scale)
        and all(v.dim() == 1 and v.size(0) == N for v in vectors)
        and scale.dim() <= 2
        and scale.numel() in (1, N)
        and (scale.dim() < 2 or scale.size(0) == 1)
        and not (vectors[2].requires_grad or vectors[3].requires_grad)
        and (not bn.training or (_tracks(bn) and x.size(0) > 1))
    )


def _tracks(bn: nn.BatchNorm1d) -> bool:
    return bn.track_running_stats and bn.momentum is not None and bn.num_batches_tracked is not None


def _op_of(model: nn.Module) -> ops.FusedOp:
    return TRAIN if model.bn.training else EVAL


def _algebra(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        op = _op_of(model)
        found = op.run_plain(x, *op.arguments(model), dtype=x.dtype)
        return _tracked(model, found) if op is TRAIN else found

    return run


def _tracked(model: nn.Module, found: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    track(model.bn, *found[1:])
    return found[0]


def _before(B: int, K: int, N: int) -> Work:
    """The Linear, and three matrices written and read behind it: BatchNorm, scale, softmax."""
    return gemm_work(B, K, N) + Work(9.0 * B * N, 12.0 * B * N + 20.0 * N, 12.0 * B * N)


def _after(B: int, K: int, N: int) -> Work:
    """The product, its output the softmax; a map, exp and sum an element."""
    return gemm_work(B, K, N) + Work(8.0 * B * N, 12.0 * N, 0.0)


def _fold(B: int, K: int, N: int) -> Work:
    """The chain after the algebra; five vectors read, three written."""
    return _after(B, K, N) + Work(6.0 * N, 24.0 * N, 12.0 * N)


# --- controls: wrong drafts, each rejected by `check` -----------------------------------------


def _lacking(part: str) -> Callable[[nn.Module], Callable[[Tensor], Tensor]]:
    return lambda model: functools.partial(without, part, model)


def _fold_in_init(model: nn.Module) -> Callable[[Tensor], Tensor]:
    *vectors, eps = EVAL.arguments(model)
    folded = fold(torch.float32, *vectors[1:], eps)
    return lambda x: plain(x, model.gemm.weight, *folded, eps)


def _fold_over_the_weight(model: nn.Module) -> Callable[[Tensor], Tensor]:
    *vectors, eps = EVAL.arguments(model)
    shift, a, d = fold(torch.float32, *vectors[1:], eps)
    with torch.no_grad():
        model.gemm.weight.mul_(a.unsqueeze(1))
        model.gemm.bias.copy_(a * shift + d)
    return lambda x: model.softmax(model.gemm(x))


def _renamed(model: nn.Module) -> Callable[[Tensor], Tensor]:
    new = Model(model.gemm.in_features, model.gemm.out_features)
    new.matmul = new._modules.pop("gemm")
    new.load_state_dict(model.state_dict())  # raises: that is the mistake
    return new


def _in_mode(train: bool) -> Callable[[nn.Module], Callable[[Tensor], Tensor]]:
    def make(model: nn.Module) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            bn = model.bn
            given = (None, None) if train else (bn.running_mean, bn.running_var)
            z = F.batch_norm(model.gemm(x), *given, bn.weight, bn.bias, train, 0.0, bn.eps)
            return F.softmax(model.scale * z, dim=1)

        return run

    return make


def _untracked(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: TRAIN.run_plain(x, *TRAIN.arguments(model), dtype=x.dtype)[0]


def _biased(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        y, mean, var = TRAIN.run_plain(x, *TRAIN.arguments(model), dtype=x.dtype)
        return _tracked(model, (y, mean, var * ((x.size(0) - 1) / x.size(0))))

    return run


def _controls() -> tuple[Variant, ...]:
    def of_torch(name: str, idea: str, make: Callable, wrong: str, *modes: str) -> Variant:
        modes = modes or ("eval", "train")
        return Variant(f"wrong_{name}", "torch", idea, make, wrong=wrong, modes=modes)

    def of_file(file: str, idea: str, wrong: str) -> Variant:
        path = paths.kernels() / EVAL.slug / file
        return variants.rung(EVAL, path, idea, form="tail", wrong=wrong, modes=("eval",))

    stale = "stale after load_state_dict, a step, any edit of a parameter or a statistic"
    blind = "an absolute tolerance does not see it at freshly initialised weights"
    overflow = "exp overflows above 88, and divides 0 by 0 where all is below -103"
    unsummed = "the outputs are right, and eval mode is wrong ever after"
    return (
        *(of_torch(f"no_{part}", said, _lacking(part), blind) for part, said in PARTS.items()),
        of_torch("train_in_eval", "the batch's statistics in eval mode", _in_mode(True),
                 "a sample's output depends on its neighbours", "eval"),
        of_torch("eval_in_train", "the running statistics in train mode", _in_mode(False),
                 "the batch is not normalised", "train"),
        of_torch("untracked", "running statistics not moved", _untracked, unsummed, "train"),
        of_torch("biased", "the biased variance in running_var", _biased, unsummed, "train"),
        of_torch("fold_in_init", "the map made once, in the constructor", _fold_in_init, stale,
                 "eval"),
        of_torch("fold_over_the_weight", "the map written over the layer's weight",
                 _fold_over_the_weight, "lost with the next load: BatchNorm is gone", "eval"),
        of_torch("renamed", "the layer named matmul", _renamed, "the state_dict does not load"),
        of_file("01_exp_without_max.cu", "softmax as defined, without the maximum", overflow),
        of_file("wrong_exp_without_max.cpp", "softmax as defined, without the maximum", overflow),
        of_file("wrong_odd_row_skipped.cpp", "two rows at a time",
                "the last row of an odd number is the bare product"),
        of_file("wrong_one_block.cu", "launched as <<<1, batch>>>",
                "a block has at most 1024 threads: a batch above 1024 is not launched"),
    )  # fmt: skip


# --- the ladder -------------------------------------------------------------------------------


def _behind_the_product(gbs_of: Callable[[Ceilings], float], bytes_each: float) -> Callable:
    """The floor, and what the tail moves behind the product."""

    def predict(shape: dict, reach: Ceilings) -> float:
        moved = bytes_each * shape["B"] * shape["N"]
        return floor_ms(_after(**shape), reach).ms + moved / gbs_of(reach) * 1e-6

    return predict


CYCLES_OF_EXP = 20.0  # of a call to libm for one float, with what stands around it
CPU_HZ = 3.0e9


def _calls_of_exp(each: int) -> Callable:
    def predict(shape: dict, reach: Ceilings) -> float:
        cycles = each * shape["B"] * shape["N"] * CYCLES_OF_EXP
        return (
            floor_ms(_after(**shape), reach).ms + cycles / (torch.get_num_threads() * CPU_HZ) * 1e3
        )

    return predict


def _ladder() -> tuple[Variant, ...]:
    folder, eval_only = paths.kernels() / EVAL.slug, {"modes": ("eval",)}

    def rung(file: str, idea: str, predict: Callable, form: str = "tail") -> Variant:
        return variants.rung(EVAL, folder / file, idea, form=form, predict=predict, **eval_only)

    def train_rung(file: str, idea: str, *beside: str) -> Variant:
        found = variants.rung(TRAIN, folder / file, idea, beside=beside, modes=("train",))
        return dataclasses.replace(found, make=_tracking(found.make))

    copy = _behind_the_product
    return (
        rung(
            "cpu_01_three_passes.cpp",
            "the maximum, the sum, the division, one after the other",
            _calls_of_exp(1),
        ),
        rung("cpu_02_online.cpp", "maximum and sum in one walk, online", _calls_of_exp(2)),
        rung(
            "cpu.cpp",
            "blocks of features, reduced while in the cache",
            copy(lambda r: r.copy_gbs, 8.0),
            "blocks",
        ),
        rung(
            "02_three_passes.cu",
            "the maximum, the sum, the division: three walks",
            copy(lambda r: r.copy_gbs, 24.0),
        ),
        rung(
            "03_row_in_registers.cu",
            "online, one walk, the row in registers",
            copy(lambda r: r.copy_gbs, 8.0),
        ),
        rung(
            "04_tiles.cu", "rows of any length by tiles", copy(lambda r: r.copy_gbs, 8.0), "tiles"
        ),
        train_rung(
            "cpu_train.cpp", "centred before the product, statistics from the cache", "cpu.cpp"
        ),
        train_rung(
            "train_statistics.cu",
            "centred before the product, statistics without atomics",
            "04_tiles.cu",
            "train_mean.cu",
        ),
    )


def _tracking(make: Callable) -> Callable:
    """A train rung gives (y, mean, var): the running statistics are moved as the drop-in does."""

    def tracking(model: nn.Module) -> Callable[[Tensor], Tensor]:
        call = make(model)
        return lambda x: _tracked(model, call(x))

    return tracking


def _folded(model: nn.Module) -> tuple[Tensor, ...]:
    *tensors, eps = EVAL.arguments(model)
    return () if model.bn.training else fold(torch.float32, *tensors[1:], eps)


problem = Problem(
    slug=EVAL.slug,
    title="Linear → BatchNorm → scale → softmax",
    question="What is left to gain when the matrix product stays as large as it was?",
    Model=Model,
    ModelNew=ModelNew,
    sizes={
        "laptop": Size("laptop", (2048, 2048), 256),
        "small": Size("small", (8192, 8192), 16),
        "paper": Size("paper", (8192, 8192), 1024),
        "wide": Size("wide", (4096, 65536), 256),
    },
    steps=STEPS,
    work={"before": _before, "after": _after, "fold": _fold},
    variants=(
        *variants.standard(EVAL, lambda m: problem.drop_in(m), algebra=_algebra, others=(TRAIN,)),
        *_ladder(),
        *_controls(),
    ),
    omissions={said: functools.partial(without, part) for part, said in PARTS.items()},
    arguments=lambda model: _op_of(model).arguments(model),
    fold=_folded,
    yardsticks={},
    bare=lambda model, x: variants.bare(_op_of(model), model, x),
    rung_of_text=lambda *source: variants.rung_of_text(EVAL, *source),
    modes=("eval", "train"),
    edges=(*EDGES, Size("pair", (33, 1025), 2), Size("row beyond registers", (5, 16388), 3),
           Size("odd row beyond registers", (5, 16387), 3)),
    states=STATES,
)  # fmt: skip
