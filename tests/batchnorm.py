"""What the tests of the batchnorm chain share: float64 oracles, bounds, arguments, calls of rungs.

Nothing here calls the code under test to decide what is right. A bound is the most that rounding
may do in any order of the additions; no tolerance is picked by hand.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from kit import drawn, needs_compiler, needs_gpu
from torch import Tensor

import workbook as wb
from workbook import ops, paths
from workbook.chains import gemm_batchnorm_scale_softmax_run as running
from workbook.precision import poisoned

PROBLEM = wb.problem("gemm_batchnorm_scale_softmax")
SLUG, FOLDER = PROBLEM.slug, paths.kernels() / PROBLEM.slug
U32 = 2.0**-24  # unit roundoff
TINY = 2.0**-149  # the least float32: an underflow loses no more
TILE, EPS = 1024, 1e-5  # kTile of problem.h
EXP = 3  # roundings of an exp, the one of its argument's last digit among them
SUMS = 64  # float32 additions of a sum of exp, one after the other, but for long rows on a GPU
RUNGS = {v.name: v for v in PROBLEM.variants if v.is_rung and v.implementation != "hopper"}
EVAL, TRAIN = ([n for n, v in RUNGS.items() if v.modes == (mode,)] for mode in ("eval", "train"))


def _marked(names: Sequence[str]) -> list:
    def mark(device: str):
        return needs_compiler if device == "cpu" else needs_gpu

    return [pytest.param(n, d, marks=mark(d)) for n in names for d in RUNGS[n].devices]


CPU_EVAL = [name for name in EVAL if RUNGS[name].devices == ("cpu",)]
EVAL_RUNGS, TRAIN_RUNGS = _marked(EVAL), _marked(TRAIN)

Call = Callable[..., object]
Sources = Sequence[Path] | Mapping[str, str]


# --- calls ------------------------------------------------------------------------------------


def form_of(name: str) -> str:
    """The form that a rung is called in, by its macros."""
    op = running.TRAIN if name in TRAIN else running.EVAL
    return next(n for n, form in op.forms.items() if form.flags == RUNGS[name].flags)


def library(sources: Sources, device: str, form: str, *, train: bool = False):
    if not isinstance(sources, Mapping):
        return _of_files(tuple(sources), device, form, train)
    op = running.TRAIN if train else running.EVAL
    return ops.kernel_library(SLUG, device, sources, flags=op.forms[form].flags)


@functools.cache  # to find a library that is there takes longer than most of the tests
def _of_files(files: tuple[Path, ...], device: str, form: str, train: bool):
    op = running.TRAIN if train else running.EVAL
    return ops.kernel_library(SLUG, device, files, flags=op.forms[form].flags)


def with_headers(folder: Path, files: Sequence[str], old: str, new: str) -> dict[str, str]:
    """{file name: text} of the binding and these, their headers put in, `old` in any of them
    replaced."""
    seen: set[str] = set()

    def put_in(found: re.Match) -> str:
        near = [place / found[1] for place in (folder, paths.kernels() / "common")]
        header = next((place for place in near if place.is_file()), near[0])
        if header in seen or not header.is_file():
            return "" if header in seen else found[0]
        seen.add(header)
        return inlined(header).replace("#pragma once", "")

    def inlined(file: Path) -> str:
        return re.sub('#include "(.*)"', put_in, file.read_text(encoding="utf-8"))

    texts = {name: inlined(folder / name) for name in ("binding.cpp", *files)}
    assert sum(text.count(old) for text in texts.values()) == 1, (
        "what is to be broken is there once"
    )
    return {name: text.replace(old, new) for name, text in texts.items()}


def call_of(sources: Sources, device: str, form: str, *, train: bool = False) -> Call:
    """Files, or {file name: text}, called as their form says, into poisoned memory: (x, *given)."""
    op = running.TRAIN if train else running.EVAL
    run = library(sources, device, form, train=train).op("run").default

    def call(x: Tensor, *given: object) -> object:
        with torch.no_grad(), poisoned():
            return op.run_kernel(run, op.forms[form], x, *given)

    return call


def rung(name: str, device: str) -> Call:
    return call_of(RUNGS[name].files, device, form_of(name), train=name in TRAIN)


def tail_of(sources: Sources, device: str, form: str) -> Callable[..., Tensor]:
    """The kernel alone, without a product: (z (B, N), shift, a, d) -> y, as a new tensor.

    cuts: where blocks end before N; of a block that is not there yet, z is NaN.
    offset: floats that y lies behind an address of 16 bytes.
    """
    run = library(sources, device, form).op("run").default

    def call(z: Tensor, *maps: Tensor, cuts: Sequence[int] = (), offset: int = 0) -> Tensor:
        (B, N), nan = z.shape, float("nan")
        y = z.new_full((offset + z.numel(),), nan)[offset:].view(B, N)
        if form != "blocks":
            y.copy_(z)
            tiles = [z.new_full((B, -(-N // TILE), 2), nan)] if form == "tiles" else []
            run(y, *maps, *tiles)
            return y
        partial = z.new_full((B, 2), nan, dtype=torch.float64)
        for first, last in zip([0, *cuts], [*cuts, N], strict=True):
            y[:, first:last] = z[:, first:last]
            run(y, *maps, partial, first, last)
        return y

    return call


def tail(name: str, device: str) -> Callable[..., Tensor]:
    return tail_of(RUNGS[name].files, device, form_of(name))


def parameters(K: int, N: int, seed: int = 0, device: str = "cpu", scale_shape=(1,)) -> tuple:
    """What eval mode takes: gamma of both signs and some 0, variances of every size."""
    vectors = [drawn((N,), seed + i) for i in range(1, 6)]
    weight, scale = drawn((N, K), seed) / max(K, 1) ** 0.5, 1.5 + drawn(scale_shape, seed + 6) / 4
    bias, gamma, beta, mean, var = vectors
    gamma[3::7] = 0
    given = (weight, bias, gamma, beta, mean, var.exp(), scale, torch.tensor(5))
    return (*(t.to(device) for t in given), EPS)


def of_batch(given: tuple) -> tuple:
    """What train mode takes, of what eval mode does."""
    return (*given[:4], given[6], given[8])


# --- oracles ----------------------------------------------------------------------------------


def softmax(t: Tensor) -> Tensor:
    e = (t - t.amax(1, keepdim=True)).exp()
    return e / e.sum(1, keepdim=True)


def logits(x: Tensor, *given: object) -> Tensor:
    """scale (gamma (z + b - mean) / sqrt(var + eps) + beta) (B, N) in float64, eval mode."""
    weight, bias, gamma, beta, mean, var, scale = (t.double() for t in given[:7])
    centred = x.double() @ weight.T + (bias - mean)
    return scale.reshape(-1) * (gamma * centred / (var + given[8]).sqrt() + beta)


def statistics(x: Tensor, *given: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(t, mean, biased variance, z - mean) of a batch in float64, train mode."""
    weight, bias, gamma, beta, scale = (t.double() for t in given[:5])
    x = x.double()
    centred = (x - x.mean(0)) @ weight.T
    var = centred.square().mean(0)
    t = scale.reshape(-1) * (gamma * centred / (var + given[5]).sqrt() + beta)
    return t, x.mean(0) @ weight.T + bias, var, centred


# --- bounds -----------------------------------------------------------------------------------


def allowed(t: Tensor, moved: Tensor) -> Tensor:
    """The most (B, N) that a softmax of t may be off, where t itself is off by `moved`.

    e^t moves by e^moved; t - m and m - m' of a merge are rounded by their own size; a merge that
    meets a new maximum rounds the sum once more.
    """
    y, below = softmax(t), t.amax(1, keepdim=True) - t
    each = torch.where(y > 0, moved + U32 * (2 * below + EXP), 0.0)
    maxima = (t.cummax(1).values.diff(dim=1) > 0).sum(1, keepdim=True)
    of_sum = (y * each.expm1()).sum(1, keepdim=True) + U32 * (SUMS + t.size(1) / 256 + 2 * maxima)
    relative = (each + 4 * U32).exp() / (1 - of_sum).clamp_min(1e-300) - 1
    return 1.01 * y * relative + 2 * TINY


def moved_map(z: Tensor, shift: Tensor, a: Tensor, d: Tensor, off: object = 0.0) -> Tensor:
    """How far t = a (z + shift) + d may be off where the sum is off by `off`, a and d rounded."""
    inner = (z + shift).abs()
    own = U32 * (5 * a.abs() * inner + d.abs() + (a * (z + shift) + d).abs())
    return 1.01 * (a.abs() * off + own) + 3 * TINY


def moved_eval(x: Tensor, *given: object) -> Tensor:
    """(B, N): t of eval mode."""
    weight, bias, gamma, beta, mean, var, scale = (t.double() for t in given[:7])
    a, K = gamma * scale.reshape(-1) / (var + given[8]).sqrt(), x.size(1)
    shift, d = bias - mean, beta * scale.reshape(-1)
    off = (K + 1) * (U32 * x.double().abs() @ weight.abs().T + TINY) + U32 * shift.abs()
    return moved_map(x.double() @ weight.T, shift, a, d, off)


def allowed_of_batch(x: Tensor, *given: object) -> tuple[Tensor, Tensor, Tensor]:
    """The most that (y, mean, unbiased variance) of a batch may be off.

    Some centre within the batch is subtracted before the product: no difference is beyond the
    range of a feature of x, wherever x itself lies.
    """
    weight, bias, gamma, beta, scale = (t.double() for t in given[:5])
    t, mean, var, centred = statistics(x, *given)
    x, (B, K) = x.double(), x.shape
    size = (x.amax(0) - x.amin(0)) @ weight.abs().T
    off = 1.01 * (K + 4) * (U32 * size + TINY)  # of z, of its mean; the shift is rounded beside
    of_var = (4 * off * centred.abs() + 4 * off**2).mean(0) + 2 * U32 * var
    free = (var + given[5] - of_var).clamp_min(1e-300)
    a = (gamma * scale.reshape(-1)).abs() / (var + given[5]).sqrt()
    moved = moved_map(centred, torch.zeros_like(var), a, beta * scale.reshape(-1), 2 * off)
    moved = moved + a * centred.abs() * of_var / (2 * free)
    of_mean = (K + 3) * (U32 * x.mean(0).abs() @ weight.abs().T + TINY) + U32 * bias.abs()
    of_mean = 1.01 * of_mean + 2 * U32 * mean.abs()
    return allowed(t, moved), of_mean, of_var * B / (B - 1) + 2 * U32 * var + TINY


def assert_near(got: Tensor, true: Tensor, bound: Tensor, name: str = "y") -> None:
    """Every element is there and within its bound."""
    got, true, bound = got.double().cpu(), true.cpu(), bound.cpu()
    assert got.shape == true.shape
    assert not got.isnan().any(), f"{name}: not written"
    excess = (got - true).abs() / bound
    assert not (excess > 1).any(), f"{name}: {excess.max():.3g} times the bound"


def assert_eval(y: Tensor, x: Tensor, *given: object) -> None:
    t = logits(x, *given)
    assert y.dtype == torch.float32
    assert_near(y, softmax(t), allowed(t, moved_eval(x, *given)))


def assert_tail(y: Tensor, z: Tensor, *maps: Tensor) -> None:
    z, shift, a, d = (t.double() for t in (z, *maps))
    t = a * (z + shift) + d
    assert_near(y, softmax(t), allowed(t, moved_map(z, shift, a, d)))


def assert_batch(found: Sequence[Tensor], x: Tensor, *given: object) -> None:
    t, mean, var, _ = statistics(x, *given)
    true = softmax(t), mean, var * x.size(0) / (x.size(0) - 1)
    for name, *of in zip(("y", "mean", "var"), found, true, allowed_of_batch(x, *given)):  # noqa: B905
        assert of[0].dtype == torch.float32
        assert_near(*of, name)
