"""Linear -> BatchNorm -> scale -> softmax as two ops: by running statistics, and by the batch's.

    eval:  y[i] = softmax_n(a[n] (z[i,n] + shift[n]) + d[n]),  z = x W^T,
           shift = b - mean,  a = gamma scale / sqrt(var + eps),  d = beta scale
    train: the same with z = (x - c) W^T, shift[n] = -mean_i z[i,n], var[n] = var_i z[i,n]

In train mode a centre c of the batch is taken from x before the product. Neither c nor b is seen in
what is left, and large numbers that would cancel behind the product are gone. Nothing is folded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbook import gemm, ops, split, sums
from workbook.chains import gemm_batchnorm_scale_softmax_run_back as back

__all__ = ["EVAL", "TRAIN", "fold", "plain", "track"]

SLUG = "gemm_batchnorm_scale_softmax"
# A float32 dot product of thousands errs by 3e-7: too much for a running mean, since torch's is of
# all rows. Cut in as many, added in double, by half; with few features in double itself.
MEAN_ROWS, RUN = 4, 64
FEW = 64  # features
SLICES = 16  # of the batch, on a GPU: 8192 features alone are 64 blocks, for 132 multiprocessors
TILE = 1024  # kTile of the CUDA kernel
# Features of a product on a CPU, at least, and elements: its output stays in the cache.
BLOCK, ELEMENTS = 2048, 1 << 21


def _beside(run: Callable, name: str) -> Callable:
    """Another op of the library that `run` is of."""
    return getattr(getattr(torch.ops, run.namespace), name).default


def _blocks(B: int, N: int) -> list[tuple[int, int]]:
    """First and last of each block of features."""
    step = max(BLOCK, ELEMENTS // max(B, 1))
    return [(first, min(first + step, N)) for first in range(0, N, step)]


def _tiles_of(y: Tensor) -> Tensor:
    """Room for (m, s) of every tile of a row of y (B, N)."""
    return y.new_empty((y.size(0), -(-y.size(1) // TILE), 2))


@torch.no_grad()
def fold(
    dtype: torch.dtype,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    mean: Tensor,
    var: Tensor,
    scale: Tensor,
    batches: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(shift, a, d), (N,) each, of a (z + shift) + d, derived in float64.

    The shift stays beside a: a z and a shift can be large and cancel, z + shift is rounded once.
    batches is not read. It is there for the fold's stamp: torch's own BatchNorm moves running
    statistics without moving their version counters, but not without counting the batch.
    """
    kappa = scale.reshape(-1).double()
    a = gamma * kappa / (var.double() + eps).sqrt()
    return tuple(t.to(dtype) for t in (bias.double() - mean, a, beta * kappa))


def plain(x: Tensor, weight: Tensor, shift: Tensor, a: Tensor, d: Tensor, eps: float) -> Tensor:
    """x (B, K) -> (B, N) in torch: a product with a bias, one map, torch's softmax."""
    return torch.addcmul(d, torch.addmm(shift, x, weight.T), a).softmax(1)


def reference(
    x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor,
    var: Tensor, scale: Tensor, batches: Tensor, eps: float,
) -> Tensor:  # fmt: skip
    """The original chain in eval mode as a function of its parameters, differentiable."""
    z = F.linear(x, weight, bias)
    return F.softmax(scale * F.batch_norm(z, mean, var, gamma, beta, False, 0.0, eps), dim=1)


def _softmax_like(x: Tensor, weight: Tensor, *others: object) -> Tensor:
    return x.new_empty((x.size(0), weight.size(0)))


def eval_arguments(model: nn.Module) -> tuple:
    """(weight, bias, gamma, beta, mean, var, scale, batches, eps), as they are now."""
    gemm, bn = model.gemm, model.bn
    return (gemm.weight, gemm.bias, bn.weight, bn.bias, bn.running_mean, bn.running_var,
            model.scale, bn.num_batches_tracked, bn.eps)  # fmt: skip


def _run_tail(run: Callable, x: Tensor, parameters: tuple, folded: tuple, options: tuple) -> Tensor:
    y = torch.mm(x, parameters[0].T)
    run(y, *folded)
    return y


def _run_tiles(
    run: Callable, x: Tensor, parameters: tuple, folded: tuple, options: tuple,
    kept: list | None = None,
) -> Tensor:  # fmt: skip
    y = _kept(torch.mm(x, parameters[0].T), kept)
    run(y, *folded, _tiles_of(y))
    return y


def _suits(x: Tensor, weight: Tensor, *_: object) -> bool:
    return split.suits(x, weight.size(0))


def _kept(z: Tensor, kept: list | None) -> Tensor:
    """z itself, of which `kept` gets a copy."""
    if kept is not None:
        kept.append(z.clone())
    return z


def _added(parts: Tensor) -> Tensor:
    """parts (parts, B, N) -> (B, N), their sum."""
    return parts[0] if parts.size(0) == 1 else parts.sum(0)


def _run_split(
    run: Callable, x: Tensor, parameters: tuple, folded: tuple, options: tuple,
    kept: list | None = None,
) -> Tensor:  # fmt: skip
    """A feature whose weights are infinite may leave a row finite: it is taken as it is."""
    weight = parameters[0]
    y = _kept(_added(split.product(x, split.kept(weight), whole=weight)), kept)
    run(y, *folded, _tiles_of(y))
    return y


def _run_blocks(
    run: Callable, x: Tensor, parameters: tuple, folded: tuple, options: tuple,
    kept: list | None = None,
) -> Tensor:  # fmt: skip
    weight, x = parameters[0], ops.adjacent(x)
    partial = x.new_empty((x.size(0), 2), dtype=torch.float64)
    product, blocks = gemm.short_chains(x), _blocks(x.size(0), weight.size(0))
    y = product(weight) if len(blocks) == 1 else _softmax_like(x, weight)
    z = None if kept is None else torch.empty_like(y)
    for first, last in blocks:
        if len(blocks) > 1:
            product(weight[first:last], y[:, first:last])
        if z is not None:
            z[:, first:last] = y[:, first:last]
        run(y, *folded, partial, first, last)
    if kept is not None:
        kept.append(z)
    return y


EVAL = ops.FusedOp(
    SLUG,
    "(Tensor x, Tensor weight, Tensor bias, Tensor gamma, Tensor beta, Tensor mean, Tensor var,"
    " Tensor scale, Tensor batches, float eps) -> Tensor",
    fold=fold,
    whole=1,
    plain=plain,
    reference=reference,
    output=_softmax_like,
    arguments=eval_arguments,
    forms={
        "tail": ops.Form(_run_tail),
        "blocks": ops.Form(_run_blocks, ("-DWB_BLOCKS",), keeps=True),
        "tiles": ops.Form(_run_tiles, ("-DWB_TILES",), keeps=True),
        "split": ops.Form(_run_split, ("-DWB_TILES",), suits=_suits, keeps=True),
    },
    kernels={
        "cpu": ops.Kernel("blocks", ("cpu.cpp",), gemm.NARROW_PRODUCT),
        "cuda": ops.Kernel("tiles", ("04_tiles.cu",)),
        "hopper": ops.Kernel("split", ("04_tiles.cu",), split.SHARED),
    },
    vjp=back.vjp,
)


# --- train mode -------------------------------------------------------------------------------


def reference_of_batch(
    x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, scale: Tensor, eps: float
) -> Tensor:
    """The original chain as a function, differentiable; it moves no running statistics."""
    z = F.linear(x, weight, bias)
    return F.softmax(scale * F.batch_norm(z, None, None, gamma, beta, True, 0.0, eps), dim=1)


def _spread(mean: Tensor) -> Tensor:
    """mean (K) -> (MEAN_ROWS, K), whose sum it is: a row has RUN elements of every MEAN_ROWS RUN,
    so that chains of neighbours and of every 16th element are shorter."""
    rows, columns = (torch.arange(n, device=mean.device) for n in (MEAN_ROWS, mean.numel()))
    return torch.where(columns // RUN % MEAN_ROWS == rows.unsqueeze(1), mean, 0.0)


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
    return _softmax_like(x, weight), x.new_empty(N), x.new_empty(N)


def train_arguments(model: nn.Module) -> tuple:
    """(weight, bias, gamma, beta, scale, eps), as they are now."""
    gemm, bn = model.gemm, model.bn
    return gemm.weight, gemm.bias, bn.weight, bn.bias, model.scale, bn.eps


def _run_batch_blocks(
    run: Callable, x: Tensor, parameters: tuple, folded: tuple, options: tuple,
    kept: list | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Rows behind half hold the mean of x: the product with W gives the mean of z as well."""
    weight, *vectors = parameters
    (B, K), N, mean_x = x.shape, weight.size(0), sums.column_sum(x) / x.size(0)
    rows = B + MEAN_ROWS if N > FEW else B
    half, map_, var = (x.new_empty(s) for s in ((rows, K), (3, N), (N,)))
    c, own = back.centre(x), None if kept is None else x.new_empty((B, N))
    back.halves(x, c, half[:B])
    if rows > B:
        half[B:] = _spread(mean_x.float())
    vectors = [v.reshape(-1).contiguous() for v in vectors]
    partial, statistics = x.new_empty((B, 2), dtype=torch.float64), _beside(run, "statistics")
    product, blocks = gemm.short_chains(half), _blocks(rows, N)
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
    return z.resize_(B, N), (mean + vectors[0]).float(), var


def _run_batch(
    run: Callable, x: Tensor, parameters: tuple, options: tuple, multiply: Callable,
    kept: list | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """multiply(x, c, weight) -> the product of (x - c) / 2."""
    weight, *vectors = parameters
    B, N = x.size(0), weight.size(0)
    vectors = [v.reshape(-1).contiguous() for v in vectors]
    x, K = ops.adjacent(x), x.size(1)
    map_, mean, var, c = (x.new_empty(shape) for shape in ((3, N), (N,), (N,), (K,)))
    slices = min(back.GROUPS, B) * back.CENTRE_SLICES + 1
    scratch, total = (x.new_empty(s, dtype=torch.float64) for s in ((slices, K), (K,)))
    _beside(run, "centre")(x, scratch, total, c)
    _beside(run, "mean")(ops.adjacent(weight), vectors[0], total, mean, B)
    y = _kept(multiply(x, c, weight), kept)
    if kept is not None:
        kept.append(c)
    partial = x.new_empty((SLICES, 2, N), dtype=torch.float64)
    _beside(run, "statistics")(y, *vectors, map_, var, partial, *options)
    run(y, *map_, _tiles_of(y))
    return y, mean, var


def _run_batch_tiles(
    run: Callable, x: Tensor, parameters: tuple, folded: tuple, options: tuple,
    kept: list | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    def multiply(x: Tensor, c: Tensor, weight: Tensor) -> Tensor:
        return torch.mm(back.halves(x, c, torch.empty_like(x)), weight.T)

    return _run_batch(run, x, parameters, options, multiply, kept)


def _run_batch_split(
    run: Callable, x: Tensor, parameters: tuple, folded: tuple, options: tuple,
    kept: list | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    def multiply(x: Tensor, c: Tensor, weight: Tensor) -> Tensor:
        return _added(split.product(x, split.kept(weight), centre=c))

    return _run_batch(run, x, parameters, options, multiply, kept)


CPU_SHARED = (*gemm.NARROW_PRODUCT, sums.COLUMN_SUM[0])
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
        "tiles": ops.Form(_run_batch_tiles, ("-DWB_TILES", "-DWB_TRAIN"), "before", keeps=True),
        "split": ops.Form(
            _run_batch_split, ("-DWB_TILES", "-DWB_TRAIN"), "before", suits=_suits, keeps=True
        ),
    },
    kernels={
        "cpu": ops.Kernel("blocks", ("cpu.cpp", "cpu_train.cpp"), CPU_SHARED),
        "cuda": ops.Kernel("tiles", BATCH_FILES),
        "hopper": ops.Kernel("split", BATCH_FILES, split.SHARED),
    },
    vjp=back.vjp_of_batch,
)


@torch.no_grad()
def track(bn: nn.BatchNorm1d, mean: Tensor, var: Tensor) -> None:
    """Move the running statistics by those of a batch, as nn.BatchNorm1d does."""
    running = [bn.running_mean, bn.running_var]
    bn.num_batches_tracked.add_(1)
    torch._foreach_mul_(running, 1 - bn.momentum)
    torch._foreach_add_(running, [mean, var], alpha=bn.momentum)
