"""Linear -> BatchNorm -> scale -> softmax by running statistics, as an op; what train mode shares.

y[i] = softmax_n(a[n] (z[i,n] + shift[n]) + d[n]),  z = x W^T,
shift = b - mean,  a = gamma scale / sqrt(var + eps),  d = beta scale
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbook import gemm, ops, split
from workbook.chains import gemm_batchnorm_scale_softmax_run_eval_back as back

__all__ = [
    "EVAL",
    "SLUG",
    "blocks_of",
    "fold",
    "plain",
    "softmax_like",
    "tiles_of",
]

SLUG = "gemm_batchnorm_scale_softmax"
TILE = 1024  # kTile of the CUDA kernel
# Features of a product on a CPU, at least, and elements: its output stays in the cache.
BLOCK, ELEMENTS = 2048, 1 << 21


def blocks_of(B: int, N: int) -> list[tuple[int, int]]:
    """First and last of each block of features."""
    step = max(BLOCK, ELEMENTS // max(B, 1))
    return [(first, min(first + step, N)) for first in range(0, N, step)]


def tiles_of(y: Tensor) -> Tensor:
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
    given = bias, gamma, beta, mean, var, scale
    usable = bias.is_cuda and dtype is torch.float32 and all(t.dtype is dtype for t in given)
    run = EVAL.kernel("cuda") if usable else None
    if run is not None:  # a launch, where torch takes eleven
        found = bias.new_empty(3, bias.size(0))
        ops.beside(run, "fold")(*(t.reshape(-1).contiguous() for t in given), found, eps)
        return found[0], found[1], found[2]
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


def softmax_like(x: Tensor, weight: Tensor, *others: object) -> Tensor:
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
    y = kept_of(torch.mm(x, parameters[0].T), kept)
    run(y, *folded, tiles_of(y))
    return y


def _suits(x: Tensor, weight: Tensor, *_: object) -> bool:
    return split.suits(x, weight.size(0), whole=True, through=True)


def kept_of(z: Tensor, kept: list | None) -> Tensor:
    """z itself, of which `kept` gets a copy."""
    if kept is not None:
        kept.append(z.clone())
    return z


def _run_split(
    run: Callable, x: Tensor, parameters: tuple, folded: tuple, options: tuple,
    kept: list | None = None,
) -> Tensor:  # fmt: skip
    """A feature whose weights are infinite may leave a row finite: it is taken as it is."""
    weight = parameters[0]
    z = split.added(split.product(x, split.kept(weight), whole=weight, through=True))
    y = kept_of(z, kept)
    run(y, *folded, tiles_of(y))
    return y


def _run_blocks(
    run: Callable, x: Tensor, parameters: tuple, folded: tuple, options: tuple,
    kept: list | None = None,
) -> Tensor:  # fmt: skip
    weight, x = parameters[0], ops.adjacent(x)
    partial = x.new_empty((x.size(0), 2), dtype=torch.float64)
    product, blocks = gemm.short_chains(x), blocks_of(x.size(0), weight.size(0))
    y = product(weight) if len(blocks) == 1 else softmax_like(x, weight)
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
    output=softmax_like,
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
