"""What the tests of the avgpool chain share: a float64 oracle, arguments, calls of rungs.

Nothing here calls the code under test to decide what is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

import pytest
import torch
from kit import drawn, needs_compiler, needs_gpu
from torch import Tensor

import workbook as wb
from workbook import ops, paths
from workbook.chains import matmul_avgpool_gelu_scale_max as chain
from workbook.precision import poisoned

PROBLEM = wb.problem(chain.SLUG)
FOLDER = paths.kernels() / chain.SLUG
U32, U64 = 2.0**-24, 2.0**-53  # unit roundoffs
TINY = 2.0**-149  # the least float32: an underflow loses no more
STEEPEST = 1.13  # of GELU: |g'| is nowhere larger
LOST = 2e-15  # by 1 + erf in float64, times |u|: below -8.3 torch's GELU is 0
RUNGS = {v.name: v for v in PROBLEM.variants if v.is_rung and v.implementation != "hopper"}
# The rung "cpu" leaves a product of few features to no library: here as a rung of its own, for any
# number of them.
ALONE = "cpu, without a library"
RUNGS[ALONE] = RUNGS["cpu"]
FEW = {"cpu": 0, ALONE: 1 << 30}
CPU_RUNGS = [name for name, v in RUNGS.items() if v.devices == ("cpu",)]
CUDA_RUNGS = [name for name, v in RUNGS.items() if v.devices == ("cuda",)]
ALL_RUNGS = [
    *(pytest.param(name, "cpu", marks=needs_compiler) for name in CPU_RUNGS),
    *(pytest.param(name, "cuda", marks=needs_gpu) for name in CUDA_RUNGS),
]
EXACT = {"cpu", ALONE, "05_winner_in_double"}  # rungs that compute the winner once more

Call = Callable[..., Tensor]  # (x, weight, bias, pool, scale) -> y


def form_of(name: str) -> str:
    """The form that a rung is called in, by its macros."""
    return next(n for n, form in chain.OP.forms.items() if form.flags == RUNGS[name].flags)


def call_of(source: Path | Mapping[str, str], device: str, form: str) -> Call:
    """A rung's file, or {file name: text}, called as its form says, into poisoned memory."""
    sources = source if isinstance(source, Mapping) else [source]
    called = chain.OP.forms[form]
    run = ops.kernel_library(chain.SLUG, device, sources, flags=called.flags).op("run").default

    def call(x: Tensor, *arguments: object) -> Tensor:
        with torch.no_grad(), poisoned():
            return chain.OP.run_kernel(run, called, x, *arguments)

    return call


def with_few(call: Call, few: int) -> Call:
    """The call where products of up to `few` features are the kernel's own."""

    def called(*given: object) -> Tensor:
        with mock.patch.object(chain, "FEW", few):
            return call(*given)

    return called


def rung(name: str, device: str) -> Call:
    call = call_of(RUNGS[name].source, device, form_of(name))
    return with_few(call, FEW[name]) if name in FEW else call


def parameters(
    K: int, N: int, pool: int, scale: float, seed: int = 0, device: str = "cpu"
) -> tuple[Tensor, Tensor, int, float]:
    """(weight (N, K), bias (N,), pool, scale)."""
    weight, bias = drawn((N, K), seed), drawn((N,), seed + 1)
    return weight.to(device), bias.to(device), pool, scale


def gelu(u: Tensor) -> Tensor:
    return 0.5 * u * torch.special.erfc(-math.sqrt(0.5) * u)


def averaged(t: Tensor, pool: int) -> Tensor:
    """(..., N) -> (..., N // pool), means of whole groups, from the definition."""
    groups = t.size(-1) // pool
    return t[..., : groups * pool].unflatten(-1, (groups, pool)).mean(-1)


def values(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    """scale * gelu(u) (B, M) in float64."""
    products = averaged(x.double() @ weight.double().T, pool)
    return scale * gelu(products + averaged(bias.double(), pool))


def allowed(
    x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float, *, folded: bool
) -> Tensor:
    """The most (B,) that y may be off, whatever the order of the additions.

    A sum of n terms errs by at most n u times the sum of the magnitudes, its products and its
    rounded weights included; max and GELU do not magnify that beyond the steepest slope of GELU.
    """
    K, terms = x.size(1), (x.size(1) + 4) if folded else (x.size(1) + pool + 4)
    size = weight.double().abs()
    if folded:
        size = averaged(weight.double().T, pool).T.abs()
        sizes = x.double().abs() @ size.T + averaged(bias.double(), pool).abs()
    else:
        sizes = averaged(x.double().abs() @ size.T + bias.double().abs(), pool)
    off = 1.01 * terms * U32 * sizes.amax(1) + (K + 2) * TINY
    u = averaged(x.double() @ weight.double().T + bias.double(), pool)
    return abs(scale) * (STEEPEST * off + LOST * u.abs().amax(1))


def assert_is_the_largest(y: Tensor, x: Tensor, *given: object, exact: bool, folded: bool) -> None:
    """Every row of y is written and within its bound; where it is `exact`, it is one of the values
    to its last digit, and no other is larger by more than the product may err."""
    found, (scale, bound) = values(x, *given), (given[3], allowed(x, *given, folded=folded))
    y = y.double().cpu()
    found, bound = found.cpu(), bound.cpu()
    best = found.amax(1)
    assert not y.isnan().any(), "a row is not written"
    rounding = 1.01 * U32 * best.abs() + TINY
    excess = (y - best).abs() / (2 * bound + rounding).clamp_min(TINY)
    assert not (excess > 1).any(), f"{excess.max():.3g} times the bound"
    if exact and y.numel():
        weight, bias = (t.double().abs() for t in given[:2])
        sizes = (x.double().abs() @ averaged(weight.T, given[2]) + averaged(bias, given[2])).cpu()
        near = 2 * U32 * found.abs() + abs(scale) * (1e-13 + 1e-14 * sizes) + TINY
        assert ((y.unsqueeze(1) - found).abs() <= near).any(1).all(), "no u has that value"
