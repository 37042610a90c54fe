"""Linear -> BatchNorm -> scale -> softmax: its work, its ladder, and drafts that are wrong."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbook import paths, split, variants
from workbook.limits import Ceilings, Work, floor_ms, gemm_work
from workbook.ops import FusedOp
from workbook.spec import Variant

__all__ = ["WORK", "controls", "ladder"]


def _before(B: int, K: int, N: int) -> Work:
    """The Linear, and three matrices written and read behind it: BatchNorm, scale, softmax."""
    return gemm_work(B, K, N) + Work(9.0 * B * N, 12.0 * B * N + 20.0 * N, 12.0 * B * N)


def _after(B: int, K: int, N: int) -> Work:
    """The product, its output the softmax; a map, exp and sum an element."""
    return gemm_work(B, K, N) + Work(8.0 * B * N, 12.0 * N, 0.0)


def _refolded(B: int, K: int, N: int) -> Work:
    """The chain after the algebra; five vectors read, three written."""
    return _after(B, K, N) + Work(6.0 * N, 24.0 * N, 12.0 * N)


WORK = {"before": _before, "after": _after, "fold": _refolded}


# --- the ladder -------------------------------------------------------------------------------


CYCLES_OF_EXP = 20.0  # of a call to libm for one float, with what stands around it
CPU_HZ = 3.0e9


def _calls_of_exp(each: int) -> Callable:
    """The product's floor, and so many calls of exp an element, one after the other."""

    def predict(shape: dict, reach: Ceilings) -> float:
        cycles = each * shape["B"] * shape["N"] * CYCLES_OF_EXP
        calls_ms = cycles / (torch.get_num_threads() * CPU_HZ) * 1e3
        return floor_ms(_after(**shape), reach).ms + calls_ms

    return predict


def _moving(bytes_each: float, launches: int = 1) -> Callable:
    """The product's floor, and so many bytes an element moved behind it."""

    def predict(shape: dict, reach: Ceilings) -> float:
        moved = bytes_each * shape["B"] * shape["N"] / reach.copy_gbs * 1e-6
        return floor_ms(_after(**shape), reach).ms + moved + launches * reach.launch_ms

    return predict


def _by_halves(bytes_each: float, launches: int) -> Callable:
    """Three products of halves, or the bytes of x, W and what stands between, if they take longer;
    and so many bytes an element of x and of z moved around them."""

    def predict(shape: dict, reach: Ceilings) -> float:
        B, K, N = (shape[name] for name in "BKN")
        moved = (8.0 * B * K + bytes_each * B * N) / reach.copy_gbs * 1e-6
        return split.floor_ms(B, K, N, reach) + moved + launches * reach.launch_ms

    return predict


def ladder(op: FusedOp, of_batch: FusedOp, tracked: Callable) -> tuple[Variant, ...]:
    """From the kernel that one writes first to ours, a CPU's, then a GPU's; train mode's last.

    tracked(model, (y, mean, var)) -> y, the running statistics moved.
    """
    folder = paths.kernels() / op.slug
    said = (
        ("cpu_01_three_walks.cpp", "tail", _calls_of_exp(1),
         "the maximum, the sum, the division, one after the other"),
        ("cpu_02_online.cpp", "tail", _calls_of_exp(2), "maximum and sum in one walk, online"),
        ("cpu.cpp", "blocks", _moving(8.0, 0), "blocks of features, reduced while in the cache"),
        ("02_three_walks.cu", "tail", _moving(24.0),
         "the maximum, the sum, the division: three walks"),
        ("03_row_in_registers.cu", "tail", _moving(8.0), "online, one walk, the row in registers"),
        ("04_tiles.cu", "tiles", _moving(8.0), "long rows by tiles, each reduced by itself"),
    )  # fmt: skip
    others = ("04_tiles.cu", "train_centre.cu", "train_mean.cu")
    said_of_batch = (
        ("cpu_train.cpp", "blocks", _moving(24.0, 0), ("cpu.cpp",),
         "centred before the product, statistics of a block in the cache"),
        ("train_statistics.cu", "tiles", _moving(24.0, 8), others,
         "centred before the product, statistics without atomics"),
        ("train_statistics.cu", "split", _by_halves(16.0, 9), others,
         "centred while x is split in halves, the product on tensor cores", *split.SHARED),
    )  # fmt: skip
    rungs = [
        variants.rung(op, folder / file, idea, form=form, predict=predict, modes=("eval",))
        for file, form, predict, idea in said
    ]
    rungs.append(
        variants.rung(
            op, folder / "04_tiles.cu", "float32 by halves on tensor cores, then rung 4's tail",
            form="split", predict=_by_halves(12.0, 4), modes=("eval",), shared=split.SHARED,
            name="05_split_product",
        )
    )  # fmt: skip
    for file, form, predict, beside, idea, *shared in said_of_batch:
        rung = variants.rung(
            of_batch, folder / file, idea, form=form, predict=predict, modes=("train",),
            beside=beside, shared=tuple(shared), name="train_split_product" if shared else "",
        )  # fmt: skip
        rungs.append(dataclasses.replace(rung, make=partial(_tracking, tracked, rung.make)))
    return tuple(rungs)


def _tracking(tracked: Callable, make: Callable, model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Below two samples the reference runs, as in the drop-in: it raises."""
    call = make(model)
    return lambda x: model(x) if x.size(0) < 2 else tracked(model, call(x))


# --- controls: wrong drafts, each rejected by `check` -----------------------------------------


def _fold_in_init(op: FusedOp, model: nn.Module) -> Callable[[Tensor], Tensor]:
    *tensors, eps = op.arguments(model)
    folded = op.fold(torch.float32, *tensors[op.whole :], eps)
    return lambda x: op.plain(x, model.gemm.weight, *folded, eps)


class _Overwritten(nn.Module):
    """The map written over the layer's weight and bias at the first call."""

    def __init__(self, op: FusedOp, model: nn.Module) -> None:
        super().__init__()
        self.gemm = copy.copy(model.gemm)  # the very parameters, in a layer of its own
        self.gemm._parameters = dict(model.gemm._parameters)
        self.bn, self.scale, self.softmax = model.bn, model.scale, model.softmax
        self.op, self.written = op, False

    def forward(self, x: Tensor) -> Tensor:
        if not self.written:
            *tensors, eps = self.op.arguments(self)
            shift, a, d = self.op.fold(torch.float32, *tensors[self.op.whole :], eps)
            self.gemm.weight = nn.Parameter(self.gemm.weight * a.unsqueeze(1))
            self.gemm.bias, self.written = nn.Parameter(a * shift + d), True
        return self.softmax(self.gemm(x))


class _Renamed(nn.Module):
    """The chain, right, from a layer of another name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.fc, self.bn, self.scale, self.softmax = (
            model.gemm, model.bn, model.scale, model.softmax,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.softmax(self.scale * self.bn(self.fc(x)))


def _normalised_by(train: bool, model: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        bn = model.bn
        given = (None, None) if train else (bn.running_mean, bn.running_var)
        z = F.batch_norm(model.gemm(x), *given, bn.weight, bn.bias, train, 0.0, bn.eps)
        return F.softmax(model.scale * z, dim=1)

    return run


def _wrong_statistics(
    of_batch: FusedOp, tracked: Callable | None, model: nn.Module
) -> Callable[[Tensor], Tensor]:
    """The batch's outputs; its biased variance is tracked, or nothing is."""

    def run(x: Tensor) -> Tensor:
        y, mean, var = of_batch.run_plain(x, *of_batch.arguments(model), dtype=x.dtype)
        biased = var * ((x.size(0) - 1) / x.size(0))
        return y if tracked is None else tracked(model, (y, mean, biased))

    return run


def controls(
    op: FusedOp, of_batch: FusedOp, tracked: Callable, omissions: Mapping[str, Callable]
) -> tuple[Variant, ...]:
    """Each with what is wrong about it. omissions: f(model, x) less a part, by name."""
    blind = "an absolute tolerance does not see it at freshly initialised weights"
    stale = "stale after load_state_dict, a step, any edit of a parameter or a statistic"
    later = "the outputs are right, and eval mode is wrong ever after"
    overflow = "exp overflows above 88, and 0 is divided by 0 where all is below -103"
    made = [
        (f"no_{part}", f"left out: {part}", lambda model, f=f: partial(f, model), blind, None)
        for part, f in omissions.items()
    ]
    made += [
        ("train_in_eval", "the batch's statistics in eval mode", partial(_normalised_by, True),
         "a sample's output depends on its neighbours", "eval"),
        ("eval_in_train", "the running statistics in train mode", partial(_normalised_by, False),
         "the batch is not normalised", "train"),
        ("untracked", "running statistics not moved", partial(_wrong_statistics, of_batch, None),
         later, "train"),
        ("biased", "the biased variance in running_var",
         partial(_wrong_statistics, of_batch, tracked), later, "train"),
        ("fold_in_init", "the map made once, in the constructor", partial(_fold_in_init, op),
         stale, "eval"),
        ("fold_over_weight", "the map written over the layer's weight", partial(_Overwritten, op),
         "the layer's own weight is gone, and with the next load BatchNorm is", "eval"),
        ("renamed_layer", "the layer called fc", _Renamed,
         "the state_dict has fc.weight: one of the model does not load", None),
    ]  # fmt: skip
    files = (
        ("wrong_01_exp_without_max.cu", "softmax as it is defined, without the maximum", overflow),
        ("wrong_exp_without_max.cpp", "softmax as it is defined, without the maximum", overflow),
        ("wrong_odd_row_skipped.cpp", "rows two at a time",
         "the last row of an odd number is the bare product"),
        ("wrong_one_block.cu", "launched as <<<1, batch>>>",
         "a block has at most 1024 threads: a batch above 1024 is not launched"),
    )  # fmt: skip
    folder = paths.kernels() / op.slug
    return (
        *(Variant(f"wrong_{name}", "torch", idea, make, wrong=wrong,
                  modes=("eval", "train") if mode is None else (mode,))
          for name, idea, make, wrong, mode in made),
        *(variants.rung(op, folder / file, idea, form="tail", wrong=wrong, modes=("eval",))
          for file, idea, wrong in files),
    )  # fmt: skip
