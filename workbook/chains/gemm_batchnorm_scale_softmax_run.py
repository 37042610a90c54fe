"""Linear -> BatchNorm -> scale -> softmax by the statistics of the batch, as an op, beside the one
by running statistics.

    y[i] = softmax_n(a[n] (z[i,n] + shift[n]) + d[n]),  z = (x - c) W^T / 2,
    shift[n] = -mean_i z[i,n],  a[n] = gamma[n] scale[n] / sqrt(var_i z[i,n] + eps / 4)

A centre c of the batch is taken from x before the product. Neither c nor b is seen in what is left,
and large numbers that would cancel behind the product are gone. Nothing is folded. Where the user
has chosen TF32 z is x W^T as it is: its ten bits have no digits that a centre would save, and the
mean of the batch is one of z.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn import functional as F

from workbook import gemm, normal, ops, precision, split
from workbook.chains import gemm_batchnorm_scale_softmax_run_eval_back as back
from workbook.chains.gemm_batchnorm_scale_softmax_run_eval import (
    EVAL,
    SLUG,
    blocks_of,
    fold,
    plain,
    softmax_like,
    tiles_of,
)
from workbook.spec import Product

__all__ = ["EVAL", "TRAIN", "fold", "is_left", "is_small", "multiplied", "plain", "track"]

# A float32 dot product of thousands errs by 3e-7: too much for a running mean, since torch's is of
# all rows. Cut in as many, added in double, by half; with few features in double itself.
MEAN_ROWS, RUN = 4, 64
FEW = 64  # features
# Left to the reference on a GPU, in training in float32: what ours reads of x and W beside the
# product costs more than it saves there. Of fewer samples, of as many numbers of z.
FEW_SAMPLES, SMALL = 8, 1 << 15
WHOLE = 1 << 28  # multiplications by long rows: of more, halves are stored and not made again
SLICES = 16  # of the batch, on a GPU: 8192 features alone are 64 blocks, for 132 multiprocessors


def reference_of_batch(
    x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, scale: Tensor, eps: float
) -> Tensor:
    """The original chain as a function, differentiable; it moves no running statistics."""
    z = F.linear(x, weight, bias)
    return F.softmax(scale * F.batch_norm(z, None, None, gamma, beta, True, 0.0, eps), dim=1)


def is_left(x: Tensor, linear: nn.Module, bn: nn.Module) -> bool:
    """True where the chain is left to the reference, which is the faster one. To be asked first,
    since all else that a drop-in asks takes as long as so small a product."""
    sizes = normal.sizes(x, linear)
    if sizes is None:
        return False
    B, _, N = sizes
    if not x.is_cuda:
        return N <= FEW
    if not bn.training:
        return False
    if torch.compiler.is_compiling():  # for batches of any size, on the route of each call
        return N <= FEW
    return precision.chosen_route() == "float32" and is_small(B, N)


def is_small(B: int, N: int) -> bool:
    """True where training on a GPU in float32 is left to the reference."""
    return N <= FEW or B < FEW_SAMPLES or B * N <= SMALL


def multiplied(mode: str, route: str, shape: Mapping[str, int]) -> Product | None:
    """The product that is ours to make on a GPU; in float32 a batch has a centre."""
    B, N = shape["B"], shape["N"]
    if mode == "train" and route == "float32":
        return None if is_small(B, N) else Product(N)
    return Product(N, whole=True)


def _spread(mean: Tensor) -> Tensor:
    """mean (K) -> (MEAN_ROWS, K), whose sum it is: a row has RUN elements of every MEAN_ROWS RUN,
    so that chains of neighbours and of every 16th element are shorter."""
    rows, columns = (torch.arange(n, device=mean.device) for n in (MEAN_ROWS, mean.numel()))
    return torch.where(columns // RUN % MEAN_ROWS == rows.unsqueeze(1), mean, 0.0)


@functools.cache
def _batch_halves() -> Callable | None:
    return ops.built("batch_halves", "cpu", ["batch_halves.cpp"])


def _centred(x: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(half (B + rows, K), c (K), mean (K) in float64) of x (B, K) on a CPU: x less its centre, in
    halves, and `_spread` of its mean behind."""
    B, K = x.shape
    half, mean = x.new_empty((B + rows, K)), x.new_empty(K, dtype=torch.float64)
    run = _batch_halves()
    if run is not None:
        c = x.new_empty(K)
        run(x, RUN, half, c, mean)
        return half, c, mean
    torch.mean(x, 0, dtype=torch.float64, out=mean)
    c = back.centre(x)
    back.halves(x, c, half[:B])
    if rows:
        half[B:] = _spread(mean.float())
    return half, c, mean


def plain_of_batch(
    x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y (B, N), mean (N), var (N)): the mean is of x W^T + b, the variance the unbiased one.

    Torch's own BatchNorm on the halves, with scale in its affine and a quarter of eps.
    """
    kappa, N, mean_x = scale.reshape(-1), weight.size(0), x.mean(0, dtype=torch.float64)
    z = torch.mm(back.halves(x, back.centre(x), torch.empty_like(x)), weight.T)
    mean, var = x.new_zeros(N), x.new_zeros(N)
    nothing = bias - bias  # NaN where the bias is not finite: so is the batch's mean
    t = F.batch_norm(z, mean, var, gamma * kappa, beta * kappa + nothing, True, 1.0, eps / 4)
    if N > FEW:
        mean = torch.mm(_spread(mean_x.to(x.dtype)), weight.T).sum(0, dtype=torch.float64)
    else:
        mean = torch.mv(weight.double(), mean_x)
    return t.softmax(1), (mean + bias).to(x.dtype), 4 * var + nothing


def _outputs(x: Tensor, weight: Tensor, *others: object) -> tuple[Tensor, Tensor, Tensor]:
    N = weight.size(0)
    return softmax_like(x, weight), x.new_empty(N), x.new_empty(N)


def train_arguments(model: nn.Module) -> tuple:
    """(weight, bias, gamma, beta, scale, eps), as they are now."""
    gemm, bn = model.gemm, model.bn
    return gemm.weight, gemm.bias, bn.weight, bn.bias, model.scale, bn.eps


def _vectors(parameters: list[Tensor]) -> list[Tensor]:
    """Each as one vector, adjacent; for most, which are, no op is called."""
    return [v if v.dim() == 1 and v.is_contiguous() else v.reshape(-1).contiguous()
            for v in parameters]  # fmt: skip


@functools.cache
def _whole_batch() -> Callable | None:
    return ops.built("whole_batch", "cpu", ["whole_batch.cpp"])


def _takes_whole(x: Tensor, weight: Tensor) -> bool:
    """Where one op does it all: the output stays in the caches, and a product of ours is as fast as
    torch's."""
    (B, K), N = x.shape, weight.size(0)
    is_short = K < gemm.NOT_SHORT
    return (
        B <= gemm.TOGETHER
        and len(blocks_of(B, N)) == 1
        and (is_short or (B * K * N <= WHOLE and gemm.suits_narrow(x)))
        and ops.adjacent(weight) is weight
        and _whole_batch() is not None
    )


def _run_batch_whole(
    run: Callable, x: Tensor, parameters: tuple, folded: tuple, options: tuple,
    kept: list | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """All of it in one op where that is faster, else by blocks."""
    weight, *vectors = parameters
    if not _takes_whole(x, weight):
        return _run_batch_blocks(run, x, parameters, folded, options, kept)
    x, vectors = ops.adjacent(x), _vectors(vectors)
    z = None if kept is None else x.new_empty((x.size(0), weight.size(0)))
    y, mean, var, c = _whole_batch()(x, weight, *vectors, *options, z)
    if kept is not None:
        kept += z, c
    return y, mean, var


def _run_batch_blocks(
    run: Callable, x: Tensor, parameters: tuple, folded: tuple, options: tuple,
    kept: list | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Rows behind half hold the mean of x: the product with W gives the mean of z as well."""
    weight, *vectors = parameters
    x, vectors = ops.adjacent(x), _vectors(vectors)
    B, N = x.size(0), weight.size(0)
    half, c, mean_x = _centred(x, MEAN_ROWS if N > FEW else 0)
    rows, map_, var = half.size(0), x.new_empty((3, N)), x.new_empty(N)
    own = None if kept is None else x.new_empty((B, N))
    partial, statistics = x.new_empty((B, 2), dtype=torch.float64), ops.beside(run, "statistics")
    product, blocks = gemm.short_chains(half), blocks_of(B, N)
    z = product(weight) if len(blocks) == 1 else x.new_empty((rows, N))
    for first, last in blocks:
        if len(blocks) > 1:
            product(weight[first:last], z[:, first:last])
        if own is not None:
            own[:, first:last] = z[:B, first:last]
        statistics(z[:B], *vectors, map_, var, first, last, *options)
        run(z[:B], *map_, partial, first, last)
    if kept is not None:
        kept += own, c
    mean = z[B:].sum(0, dtype=torch.float64) if rows > B else torch.mv(weight.double(), mean_x)
    # its last rows are gone, the others stay where they are
    return z.resize_(B, N), torch.add(mean, vectors[0], out=torch.empty_like(var)), var


def _run_batch(
    run: Callable, x: Tensor, parameters: tuple, options: tuple, multiply: Callable,
    kept: list | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """multiply(x, c, weight) -> the product of (x - c) / 2, or of x where the user chose TF32: then
    c is None, z twice as large, and what kernels make of it as if eps were four times as large."""
    weight, *vectors = parameters
    (B, K), N, (eps,) = x.shape, weight.size(0), options
    x, vectors = ops.adjacent(x), _vectors(vectors)
    map_, mean, var = (x.new_empty(shape) for shape in ((3, N), (N,), (N,)))
    c = x.new_empty(K) if (centred := _is_centred()) else None
    if centred:
        slices = min(back.GROUPS, B) * back.CENTRE_SLICES + 1
        scratch, total = (x.new_empty(s, dtype=torch.float64) for s in ((slices, K), (K,)))
        ops.beside(run, "centre")(x, scratch, total, c)
        ops.beside(run, "mean")(ops.adjacent(weight), vectors[0], total, mean, B)
    y = multiply(x, c, weight)
    if kept is not None:
        kept += (y.clone(), c) if centred else (y * 0.5, x.new_zeros(K))
    partial = x.new_empty((SLICES, 2, N), dtype=torch.float64)
    ops.beside(run, "statistics")(y, *vectors, map_, var, partial, eps if centred else 4 * eps)
    run(y, *map_, tiles_of(y))
    if not centred:  # the shift is less the mean of z
        torch.sub(vectors[0], map_[0], out=mean)
        var.mul_(0.25)
    return y, mean, var


def _is_centred() -> bool:
    return precision.chosen_route() == "float32"


def _run_batch_tiles(
    run: Callable, x: Tensor, parameters: tuple, folded: tuple, options: tuple,
    kept: list | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    def multiply(x: Tensor, c: Tensor | None, weight: Tensor) -> Tensor:
        return torch.mm(x if c is None else back.halves(x, c, torch.empty_like(x)), weight.T)

    return _run_batch(run, x, parameters, options, multiply, kept)


def _suits_split(x: Tensor, weight: Tensor, *_: object) -> bool:
    centred = _is_centred()
    return split.suits(x, weight.size(0), whole=not centred, through=True, centred=centred)


def _run_batch_split(
    run: Callable, x: Tensor, parameters: tuple, folded: tuple, options: tuple,
    kept: list | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    def multiply(x: Tensor, c: Tensor | None, weight: Tensor) -> Tensor:
        whole = weight if c is None else None
        return split.added(split.product(x, split.kept(weight), whole, c, through=True))

    return _run_batch(run, x, parameters, options, multiply, kept)


CPU_SHARED = (
    *gemm.NARROW_PRODUCT,
    "batch_halves/batch_halves.cpp",
    "whole_batch/whole_batch.cpp",
)
BATCH_FILES = ("04_tiles.cu", "train_centre.cu", "train_mean.cu", "train_statistics.cu")

TRAIN = ops.FusedOp(
    SLUG,
    "(Tensor x, Tensor weight, Tensor bias, Tensor gamma, Tensor beta, Tensor scale, float eps)"
    " -> (Tensor, Tensor, Tensor)",
    name=f"{SLUG}_train",
    fold=None,
    whole=5,
    plain=plain_of_batch,
    reference=reference_of_batch,
    output=_outputs,
    arguments=train_arguments,
    forms={
        "blocks": ops.Form(_run_batch_blocks, ("-DWB_BLOCKS", "-DWB_TRAIN"), "before", keeps=True),
        "whole": ops.Form(_run_batch_whole, ("-DWB_BLOCKS", "-DWB_TRAIN"), "before", keeps=True),
        "tiles": ops.Form(_run_batch_tiles, ("-DWB_TILES", "-DWB_TRAIN"), "before", keeps=True),
        "split": ops.Form(
            _run_batch_split, ("-DWB_TILES", "-DWB_TRAIN"), "before", suits=_suits_split, keeps=True
        ),
    },
    kernels={
        "cpu": ops.Kernel("whole", ("cpu.cpp", "cpu_train.cpp"), CPU_SHARED),
        "cuda": ops.Kernel("tiles", BATCH_FILES),
        "hopper": ops.Kernel("split", BATCH_FILES, split.SHARED),
    },
    vjp=back.vjp_of_batch,
)


@functools.cache
def _tracker() -> Callable | None:
    run = _whole_batch()
    return None if run is None else ops.beside(run, "track")


def track(bn: nn.BatchNorm1d, mean: Tensor, var: Tensor) -> None:
    """Move the running statistics by those of a batch, as nn.BatchNorm1d does."""
    held = bn._buffers
    running_mean, running_var = held["running_mean"], held["running_var"]
    batches = held["num_batches_tracked"]
    if mean.dtype is torch.float32 and mean.is_cpu and not ops.is_watched():
        plain = batches.dtype is torch.int64 and batches.is_cpu and batches.dim() == 0
        there = running_mean, running_var, batches
        step = None if not plain or any(t.is_inference() for t in there) else _tracker()
        if step is not None:
            step(*there, mean, var, bn.momentum)
            return increment_version(there)  # a kernel moves none, and folds go by them
    with torch.no_grad():
        batches.add_(1)
        torch._foreach_mul_([running_mean, running_var], 1 - bn.momentum)
        torch._foreach_add_([running_mean, running_var], [mean, var], alpha=bn.momentum)
