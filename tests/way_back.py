"""What tests of gradients share: the truth in float64, how large the terms of its sums are, and
the rule: at most twice the reference's own error, or one rounding of the terms."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from kit import (
    AVG,
    BN,
    ROUNDING,
    SUM,
    assert_gradients_close,
    drawn,
    gradients,
    side_by_side,
    subject_of,
)
from torch import Tensor, nn
from torch.nn import functional as F

CLOSED = {SUM.slug, AVG.slug, BN.slug}  # problems whose way back does not run the reference again


def gradients_in_double(reference: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Those of the reference, weighed as it is."""
    double = copy.deepcopy(reference).double()
    given = x.detach().double().requires_grad_(x.requires_grad)
    return gradients(double, given, weigh=weights_of(reference, x).double())


def weights_of(reference: nn.Module, x: Tensor) -> Tensor:
    """What `gradients` weighs its outputs with."""
    y = copy.deepcopy(reference)(x.detach())
    return drawn(tuple(y.shape), 4).to(y)


def assert_gradients_accurate(
    ours: Mapping, theirs: Mapping, true: Mapping, terms: Mapping | None = None
) -> None:
    """Each, as a whole, errs at most twice as much as the reference's, or by one rounding; NaN and
    infinities are where the reference has them.

    terms: the sizes of what is added, where it may cancel: a rounding is one of these.
    """
    assert list(theirs) == list(true)
    for name, got, wanted in side_by_side(ours, theirs):
        finite = wanted.isfinite()
        torch.testing.assert_close(got[~finite], wanted[~finite], rtol=0, atol=0, equal_nan=True)
        assert got[finite].isfinite().all(), f"{name}: not finite where the reference is"
        exact = true[name][finite]
        error, own = (((t[finite].double() - exact).norm()).item() for t in (got, wanted))
        size = exact if terms is None else terms[name][finite].nan_to_num()
        most = max(2 * own, ROUNDING[wanted.dtype] * size.norm().item())
        assert error <= most, f"{name}: error {error:.3g}, the reference's {own:.3g}"


def assert_gradients_like(
    ours: Mapping, theirs: Mapping, reference: nn.Module, x: Tensor, tolerance: float = 1e-5
) -> None:
    """Close to the reference's, or, of BatchNorm, whose sums cancel, as accurate as those."""
    try:
        assert_gradients_close(ours, theirs, tolerance)
    except AssertionError:
        if not isinstance(reference, BN.Model) or x.dtype not in (torch.float32, torch.float64):
            raise
        true = gradients_in_double(reference, x)
        assert_gradients_accurate(ours, theirs, true, terms_of(reference, x))


def terms_of(reference: nn.Module, x: Tensor) -> dict[str, Tensor] | None:
    """Sizes of the terms that gradients are sums of: of the averages, of their winners; of
    BatchNorm, with what a rounding of z does to them, for z cancels with its mean."""
    known = {BN.slug: _of_batchnorm, AVG.slug: _of_averages}.get(subject_of(reference).slug)
    if known is None or not x.numel():
        return None
    with torch.no_grad():
        return known(copy.deepcopy(reference).double(), x.detach(), weights_of(reference, x))


def _of_averages(model: nn.Module, x: Tensor, weigh: Tensor) -> dict[str, Tensor]:
    x, (weight, bias) = x.double(), (p.data for p in model.matmul.parameters())
    z = F.linear(x, weight, bias).requires_grad_()
    with torch.enable_grad():
        u = model.avg_pool(z.unsqueeze(1)).squeeze(1)
        y = (F.gelu(u) * model.scale_factor).max(1).values
        (dz,) = torch.autograd.grad(y, z, weigh.double())
    dz = dz.abs().nan_to_num()
    return {"x": dz @ weight.abs(), "matmul.weight": dz.T @ x.abs(), "matmul.bias": dz.sum(0)}


def _of_batchnorm(model: nn.Module, x: Tensor, weigh: Tensor) -> dict[str, Tensor]:
    in_float64 = x.dtype == torch.float64  # the truth is then the reference, which has x itself
    bn, x, g = model.bn, x.double().flatten(0, -2), weigh.double().abs().flatten(0, -2)
    (weight, bias), scale = (p.data for p in model.gemm.parameters()), model.scale.data
    z, of_batch = F.linear(x, weight, bias), bn.training or bn.running_mean is None
    mean, var = (z.mean(0), z.var(0, False)) if of_batch else (bn.running_mean, bn.running_var)
    inverse, gamma = (var + bn.eps).rsqrt(), bn.weight.data
    normed, moved = (z - mean) * inverse, F.linear(x.abs(), weight.abs(), bias.abs()) * inverse
    normed, moved = (t.nan_to_num(posinf=0.0, neginf=0.0) for t in (normed, moved))
    mapped = (gamma * normed + bn.bias.data).nan_to_num()
    y = (scale * mapped).softmax(1)
    dt = y * (g + (g * y).sum(1, keepdim=True)) * (1 + (scale * gamma * moved).abs().amax())
    dn = (dt * scale).abs()
    dz = dn * gamma.abs() * inverse * (1 + moved.amax(0))
    if of_batch:
        dz = dz + dz.mean(0) + normed.abs() * (dz * normed.abs()).mean(0)
    away = (x - x.mean(0) if of_batch and not in_float64 else x).abs()
    return {
        "x": dz @ weight.abs(),
        "gemm.weight": dz.T @ away,
        "gemm.bias": dz.sum(0),
        "bn.weight": (dn * (normed.abs() + moved)).sum(0),
        "bn.bias": dn.sum(0),
        "scale": (dt * (mapped.abs() + gamma.abs() * moved)).sum_to_size(scale.shape),
    }
