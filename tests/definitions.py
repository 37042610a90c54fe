"""The four problems written down once more, from their table alone: as modules and in float64.

Nothing here imports the package: the modules say what a Model has to be, bit for bit; `truth` says
what every variant of it has to come near to. Each truth reads the parameters, the hyper-parameters
and the mode that the model has at this moment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn


class SumChain(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x):
        s = self.linear(x).sum(1, keepdim=True)
        s = s.max(1, keepdim=True).values.mean(1, keepdim=True)
        return s.logsumexp(1, keepdim=True).logsumexp(1, keepdim=True)


class AvgPoolGelu(nn.Module):
    def __init__(self, in_features, out_features, pool_kernel_size, scale_factor):
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.avg_pool = nn.AvgPool1d(pool_kernel_size)
        self.scale_factor = scale_factor

    def forward(self, x):
        z = self.avg_pool(self.matmul(x).unsqueeze(1)).squeeze(1)
        return (nn.functional.gelu(z) * self.scale_factor).max(1).values


class BatchNormSoftmax(nn.Module):
    def __init__(self, in_features, out_features, bn_eps=1e-5, bn_momentum=0.1, scale_shape=(1,)):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.bn = nn.BatchNorm1d(out_features, bn_eps, bn_momentum)
        self.scale = nn.Parameter(torch.ones(scale_shape))
        self.softmax = nn.Softmax(1)

    def forward(self, x):
        return self.softmax(self.scale * self.bn(self.gemm(x)))


class MaxPoolSum(nn.Module):
    def __init__(self, in_features, out_features, kernel_size, scale_factor):
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.max_pool = nn.MaxPool1d(kernel_size)
        self.scale_factor = scale_factor

    def forward(self, x):
        z = self.max_pool(self.matmul(x).unsqueeze(1)).squeeze(1)
        return z.sum(1) * self.scale_factor


def _rows(linear: nn.Linear, x: Tensor) -> Tensor:
    """z (B, N) in float64."""
    return x.double() @ linear.weight.double().T + linear.bias.double()


def _windows(z: Tensor, pool: nn.Module) -> Tensor:
    """z (B, N) -> (B, N // pool, pool); the features after the last whole window are dropped.

    ValueError where the module was changed into something else than that.
    """
    size = [getattr(pool, name) for name in ("kernel_size", "stride", "padding")]
    width, stride, padding = (v[0] if isinstance(v, tuple) else v for v in size)
    if stride != width or padding or pool.ceil_mode or getattr(pool, "dilation", 1) != 1:
        raise ValueError(f"{pool}: not the pool of the table")
    count = z.size(1) // width
    return z[:, : count * width].reshape(z.size(0), count, width)


def sum_chain(model: nn.Module, x: Tensor) -> Tensor:
    """The biases by themselves: where huge z cancel they are what is left."""
    z = x.double() @ model.linear.weight.double().T
    return z.sum(1, keepdim=True) + model.linear.bias.double().sum()


def avg_pool_gelu(model: nn.Module, x: Tensor) -> Tensor:
    """The biases by themselves: where huge products cancel they are what is left."""
    layer = model.matmul
    products = x.double() @ layer.weight.double().T
    mean = _windows(products, model.avg_pool).mean(2)
    mean = mean + _windows(layer.bias.double().unsqueeze(0), model.avg_pool).mean(2)
    gelu = 0.5 * mean * torch.special.erfc(-mean / math.sqrt(2))
    return (gelu * model.scale_factor).amax(1)


def max_pool_sum(model: nn.Module, x: Tensor) -> Tensor:
    """A window of one is a sum, in which huge z may cancel: the biases by themselves."""
    if model.max_pool.kernel_size in (1, (1,)):
        z = _windows(x.double() @ model.matmul.weight.double().T, model.max_pool)
        return (z.sum((1, 2)) + model.matmul.bias.double().sum()) * model.scale_factor
    pooled = _windows(_rows(model.matmul, x), model.max_pool).amax(2)
    return pooled.sum(1) * model.scale_factor


def statistics(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance (N) of the batch, in float64."""
    z = _rows(model.gemm, x)
    mean = z.mean(0)
    return mean, (z - mean).square().mean(0)


def batchnorm_softmax(model: nn.Module, x: Tensor) -> Tensor:
    bn = model.bn
    of_batch = bn.training or bn.running_mean is None
    mean, variance = statistics(model, x) if of_batch else (bn.running_mean, bn.running_var)
    centred = _rows(model.gemm, x) - mean.double()
    z = centred / (variance.double() + bn.eps).sqrt() * bn.weight.double() + bn.bias.double()
    z = model.scale.double() * z
    weight = (z - z.amax(1, keepdim=True)).exp()
    return weight / weight.sum(1, keepdim=True)


def buffers_after(model: nn.Module, x: Tensor) -> Mapping[str, Tensor]:
    """What one training call makes of the buffers, in float64; call it before."""
    bn, batch, share = model.bn, x.size(0), _share(model.bn)
    mean, variance = statistics(model, x)
    unbiased = variance * batch / (batch - 1)
    return {
        "bn.running_mean": (1 - share) * bn.running_mean.double() + share * mean,
        "bn.running_var": (1 - share) * bn.running_var.double() + share * unbiased,
        "bn.num_batches_tracked": bn.num_batches_tracked + 1,
    }


def _share(bn: nn.BatchNorm1d) -> float:
    """Of the batch in the running statistics; momentum None keeps the mean of all batches."""
    return 1.0 / (bn.num_batches_tracked.item() + 1) if bn.momentum is None else bn.momentum


def sensitivity_of_buffers(model: nn.Module, x: Tensor) -> Mapping[str, Tensor]:
    """How far the statistics (N) move if each term of z = x W^T + b moves by its own size."""
    share, layer, z = _share(model.bn), model.gemm, _rows(model.gemm, x)
    weight = layer.weight.double().abs().T
    size = x.double().abs() @ weight + layer.bias.double().abs()
    if x.dtype != torch.float64:  # where the truth is better than the type: centred first
        spread = (x.double() - x.double().mean(0)).abs() @ weight
    else:
        spread = size
    return {
        "bn.running_mean": share * size.mean(0),
        "bn.running_var": share * 4 * ((z - z.mean(0)).abs() * spread).mean(0),
    }


def sensitivity(model: nn.Module, x: Tensor, formula: object) -> Tensor:
    """How far y (B) moves, row by row, if each term of z = x W^T + b moves by its own size.

    sum_n |dy/dz[n]| (sum_k |x[k] W[n,k]| + |b[n]|): a unit roundoff of it is what no order of
    additions can promise to stay below. Of a softmax: the 2-norm over the row, the affine before it
    counted like z. Of a GELU: what its argument is rounded by, too.
    """
    layer = next(m for m in model.children() if isinstance(m, nn.Linear))
    size = x.double().abs() @ layer.weight.double().abs().T + layer.bias.double().abs()
    if formula is batchnorm_softmax:
        y = batchnorm_softmax(model, x)
        mean, variance = statistics(model, x)
        if not model.bn.training:
            mean, variance = model.bn.running_mean.double(), model.bn.running_var.double()
        moves = (size + mean.abs()) / (variance + model.bn.eps).sqrt() * model.bn.weight.abs()
        moves = model.scale.double().abs() * (moves + model.bn.bias.double().abs())
        shares = torch.where(y == 0, 0.0, y * moves)  # a masked feature moves by -inf, and nothing
        return (shares + y * shares.sum(1, keepdim=True)).flatten(1).norm(dim=1)
    z = _rows(layer, x)
    with torch.inference_mode(False), torch.enable_grad():
        z = z.clone().detach().requires_grad_()
        if formula is sum_chain:
            y, extra = z.sum(1), 0.0
        elif formula is max_pool_sum:
            y, extra = _windows(z, model.max_pool).amax(2).sum(1) * model.scale_factor, 0.0
        else:
            mean = _windows(z, model.avg_pool).mean(2)
            gelu = 0.5 * mean * torch.special.erfc(-mean / math.sqrt(2)) * model.scale_factor
            y, at = gelu.max(1)
            extra = mean.detach().gather(1, at.unsqueeze(1)).squeeze(1) * model.scale_factor
            extra = abs(extra)
        (slope,) = torch.autograd.grad(y.sum(), z)
    slope = slope.nan_to_num()  # of an infinite z that is not the largest
    return torch.where(slope == 0, 0.0, slope.abs() * size).sum(1) + extra
