"""Linear -> BatchNorm -> scale -> softmax over the features: one map a feature behind the product.

    eval:  y[i] = softmax_n(a[n] (z[i,n] + shift[n]) + d[n]),  z = x W^T
    train: the same with x less a centre of the batch, and the batch's own statistics

The product stays as large as it was. What goes are three of the four matrices behind it: z becomes
the softmax in place, by a reduction over (maximum, sum of exp) that takes a row in any pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from workbook import normal, ops, split, variants
from workbook.chains import gemm_batchnorm_scale_softmax_ladder as ladder
from workbook.chains import gemm_batchnorm_scale_softmax_road as road
from workbook.chains import gemm_batchnorm_scale_softmax_run as running
from workbook.chains.gemm_batchnorm_scale_softmax_run import EVAL, TRAIN, fold, plain, track
from workbook.spec import EDGES, Problem, Size

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
    statistic changes. After an edit that torch hides, in place through `.data` or of the running
    statistics by F.batch_norm itself, call `workbook.refresh(model)`. In train mode nothing is
    kept.
    """

    def forward(self, x: Tensor) -> Tensor:
        if running.is_left(x, self.gemm, self.bn):
            return super().forward(x)
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
    N, scale, eps = operands[1].size(0), model._parameters.get("scale"), bn.eps
    held, kept = bn._parameters, bn._buffers
    vectors = held["weight"], held["bias"], kept["running_mean"], kept["running_var"]
    return (
        N > 0
        and softmax.dim in (1, -1)
        and type(eps) in (float, int)
        and normal.are_like(x, *vectors, scale)
        and all(v.dim() == 1 and v.size(0) == N for v in vectors)
        and scale.dim() <= 2
        and scale.numel() in (1, N)
        and (scale.dim() < 2 or scale.size(0) == 1)
        and not (vectors[2].requires_grad or vectors[3].requires_grad)
        and isinstance(kept["num_batches_tracked"], Tensor)
        and (not bn.training or (_tracks(bn) and eps > 0 and x.size(0) > 1))
    )


def _tracks(bn: nn.BatchNorm1d) -> bool:
    """By a factor of its own, not cumulatively."""
    return bn.track_running_stats and type(bn.momentum) in (float, int)


def _tracked(model: nn.Module, found: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """y of (y, mean, var), the running statistics moved."""
    track(model.bn, *found[1:])
    return found[0]


def _op_of(model: nn.Module) -> ops.FusedOp:
    return TRAIN if model.bn.training else EVAL


def _algebra(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        op = _op_of(model)
        if op is TRAIN and x.size(0) < 2:
            return model(x)
        found = op.run_plain(x, *op.arguments(model), dtype=x.dtype)
        return _tracked(model, found) if op is TRAIN else found

    return run


def _drop_in(model: nn.Module) -> nn.Module:
    return problem.drop_in(model)


def _of_steps(model: nn.Module) -> tuple:
    """The op's arguments, but for the count of batches, which no formula reads."""
    return tuple(a for a in _op_of(model).arguments(model) if a is not model.bn.num_batches_tracked)


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
    steps=road.STEPS,
    work=ladder.WORK,
    variants=(
        *variants.standard(EVAL, _drop_in, algebra=_algebra, others=(TRAIN,)),
        *ladder.ladder(EVAL, TRAIN, _tracked),
        *ladder.controls(
            EVAL, TRAIN, _tracked, {part: partial(road.without, part) for part in road.PARTS}
        ),
    ),
    omissions={said: partial(road.without, part) for part, said in road.PARTS.items()},
    arguments=_of_steps,
    fold=_folded,
    yardsticks={},
    bare=lambda model, x: variants.bare(_op_of(model), model, x),
    multiplied=running.multiplied,
    fold_halves=lambda model: (*_folded(model), *split.halved(model.gemm.weight)),
    rung_of_text=lambda *source: variants.rung_of_text(EVAL, *source),
    modes=("eval", "train"),
    through=True,
    edges=(*EDGES, Size("pair", (33, 1025), 2), Size("ours", (33, 65), 9),
           Size("ours, odd", (35, 1031), 37), Size("row beyond registers", (5, 16388), 3),
           Size("odd row beyond registers", (5, 16387), 3)),
    states=road.STATES,
)  # fmt: skip
