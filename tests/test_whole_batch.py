"""The batchnorm chain on a small batch by one op on a CPU, and one that moves running statistics.

Held to the bounds of the kernels that do it in steps; controls are broken on purpose.
"""

from __future__ import annotations

import math
import re
from unittest import mock

import pytest
import torch
from batchnorm import EPS, assert_batch, of_batch, parameters, running
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import drawn, needs_compiler
from torch import Tensor, nn

from workbook import gemm, ops, paths
from workbook.chains import gemm_batchnorm_scale_softmax as chain

FOLDER, COMMON = paths.kernels() / "whole_batch", paths.kernels() / "common"
NAN, INF = math.nan, math.inf
# B, K, N: around the groups of the batch, its tiles of 8 and of 6 rows, columns of a task and of a
# step, a chain of k, the longest short k, a piece of a long one, vectors, panels and strips of N
SHAPES = [(2, 1, 1), (4, 7, 15), (5, 63, 16), (6, 64, 17), (7, 65, 47), (8, 127, 48), (9, 128, 49),
          (15, 129, 191), (16, 255, 192), (17, 256, 193), (41, 257, 210), (13, 300, 70),
          (12, 4096, 9), (11, 4097, 5), (6, 9001, 6), (300, 3, 70), (3, 40, 2048),
          (3, 0, 5)]  # fmt: skip
pytestmark = needs_compiler


@pytest.fixture(scope="module")
def run():
    return running._whole_batch()


def product_of(x: Tensor, c: Tensor, weight: Tensor) -> Tensor:
    return (x.double() - c.double()) / 2 @ weight.double().T


def assert_right(run, x: Tensor, *of: object) -> None:
    B, N = x.size(0), of[0].size(0)
    y, mean, var, c = run(x, *of, None)
    assert_batch((y, mean, var), x, *of)
    memory = torch.full((B * N + 16,), 7.0)
    z = memory[8:-8].view(B, N).fill_(NAN)
    others = run(x, *of, z)
    assert all(map(torch.equal, others, (y, mean, var, c))), "the same bits, z beside y"
    assert (memory[:8] == 7).all() and (memory[-8:] == 7).all()
    if x.size(1):
        size = (x.double() - c.double()).abs() @ of[0].double().abs().T
        bound = (x.size(1) + 5) * 2.0**-24 * size + 2.0**-149
        assert ((z - product_of(x, c, of[0])).abs() <= bound).all()


def test_rows_are_short_to_the_kernel_where_they_are_to_the_dispatch():
    (said,) = re.findall(r"is_short\(int64_t K\) \{ return K < (\d+); \}",
                         (FOLDER / "whole_batch.h").read_text())  # fmt: skip
    assert int(said) == gemm.NOT_SHORT


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_within_bound(run, shape, mean):
    B, K, N = shape
    assert_right(run, drawn((B, K), 7) + mean, *of_batch(parameters(K, N)))


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 30), st.integers(1, 300), st.integers(1, 220), st.integers(0, 9),
       st.booleans())  # fmt: skip
def test_within_bound_at_any_stride(rows, features, outs, gap, each):
    memory = drawn((rows * (features + gap) + 3,), outs)
    x = memory.as_strided((rows, features), (features + gap, 1), gap % 4)
    weight, *others = of_batch(parameters(features, outs, 3, scale_shape=(outs,) if each else (1,)))
    wide = torch.full((outs, features + gap), NAN)
    wide[:, :features] = weight
    assert_right(running._whole_batch(), x, wide[:, :features], *others)


def test_the_centre_is_that_of_batch_halves(run):
    """A way back takes it, whoever made it."""
    for shape in ((43, 300), (9, 70)):
        x = drawn(shape, 3) + 5
        c = run(x, *of_batch(parameters(shape[1], 20)), None)[3]
        assert torch.equal(c, running._centred(x, 0)[1])


@pytest.mark.parametrize("K", [100, 400])
def test_equal_rows_have_no_variance(run, K):
    y, _, var, _ = run(drawn((1, K), 3).expand(6, -1), *of_batch(parameters(K, 70)), None)
    assert (var == 0).all() and torch.equal(y, y[:1].expand(6, -1))


@pytest.mark.parametrize("K", [9, 400])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_not_finite(run, K, value):
    """In x it is in all statistics; in a row of weights, or a bias, in those of its feature."""
    of, x = of_batch(parameters(K, 70)), drawn((8, K), 3)
    spoiled = x.clone()
    spoiled[2, 4] = value
    y, mean, var, _ = run(spoiled, *of, None)
    assert y.isnan().all() and not mean.isfinite().any() and not var.isfinite().any()
    others = [n for n in range(70) if n != 7]
    for which in (0, 1):
        weight, bias = of[0].clone(), of[1].clone()
        (weight, bias)[which][7] = value
        y, mean, var, _ = run(x, weight, bias, *of[2:], None)
        assert y.isnan().all() and not mean[7].isfinite() and not var[7].isfinite()
        assert mean[others].isfinite().all() and var[others].isfinite().all()


@pytest.mark.parametrize("shape", [(43, 100, 300), (43, 200, 61), (43, 500, 300)], ids=str)
def test_the_same_bits_again_by_any_threads(run, shape):
    B, K, N = shape
    of, x = of_batch(parameters(K, N)), drawn((B, K), 3)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3, 5, 8, 1):
            torch.set_num_threads(threads)
            found.append(run(x, *of, None))
    finally:
        torch.set_num_threads(before)
    assert all(all(map(torch.equal, found[0], other)) for other in found)


def test_a_feature_does_not_depend_on_its_neighbours(run):
    for K in (100, 500):
        weight, bias, gamma, beta, scale, eps = of_batch(parameters(K, 300))
        x, whole, part = drawn((43, K), 3), torch.empty(43, 300), torch.empty(43, 41)
        run(x, weight, bias, gamma, beta, scale, eps, whole)
        cut = slice(100, 141)
        run(x, weight[cut], bias[cut], gamma[cut], beta[cut], scale, eps, part)
        assert torch.equal(part, whole[:, cut])


WRONG = [
    (0, lambda t: t.double(), "x"), (0, lambda t: t[:1], "x"), (0, lambda t: t.T, "x"),
    (1, lambda t: t.double(), "W"), (1, lambda t: t[:, 1:], "W"), (1, lambda t: t.T, "W"),
    (2, lambda t: t[1:], "bias"), (3, lambda t: t.double(), "gamma"), (4, lambda t: t[:3], "beta"),
    (5, lambda t: t.repeat(3), "scale"), (7, lambda t: t[1:], "z"), (7, lambda t: t.T, "z"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_a_wrong_argument_is_named(run, case):
    at, change, named = WRONG[case]
    arguments = [drawn((3, 8)), *of_batch(parameters(8, 5)), torch.empty(3, 5)]
    run(*arguments)
    arguments[at] = change(arguments[at])
    with pytest.raises(RuntimeError, match=f"^{named}: "):
        run(*arguments)


# --- who takes it ------------------------------------------------------------------------------


def calls(monkeypatch, x: Tensor, *of: object, model: nn.Module | None = None) -> int:
    """How often the op is called: for the best kernel, or by a model on x."""
    whole = running._whole_batch()
    seen = mock.Mock(wraps=whole, namespace=whole.namespace)
    monkeypatch.setattr(running, "_whole_batch", lambda: seen)
    op = running.TRAIN
    if model is not None:
        model(x)
    else:
        assert_batch(
            op.run_kernel(op.kernel("cpu"), op.forms[op.kernels["cpu"].form], x, *of), x, *of
        )
    return seen.call_count


@pytest.mark.parametrize(
    ("shape", "halves", "times"),
    [
        ((9, 40, 30), False, 1),  # a short k
        ((9, 300, 30), False, 1),  # few rows
        ((200, 300, 30), True, 1),
        ((200, 300, 30), False, 0),  # a BLAS is faster
        ((1024, 512, 512), True, 1),
        ((1024, 512, 513), True, 0),  # halves would be made too often
        ((1025, 4, 30), True, 0),  # too many rows
        ((1024, 4, 2049), True, 0),  # and features
    ],
)
def test_batches_that_it_is_for(shape, halves, times, monkeypatch):
    B, K, N = shape
    monkeypatch.setattr(gemm, "_in_halves", lambda: halves)
    assert calls(monkeypatch, drawn((B, K), 3), *of_batch(parameters(K, N))) == times


@pytest.mark.parametrize(("key", "times"), [("fused", 1), ("cpu_train", 0)])
def test_the_rung_is_its_own_kernel(key, times, monkeypatch):
    p = chain.problem
    model = p.variant(key).make(p.Model(40, 30).train())
    assert calls(monkeypatch, drawn((9, 40), 3), model=model) == times


def test_weights_and_vectors_of_any_stride(monkeypatch):
    weight, *vectors, eps = of_batch(parameters(40, 30, scale_shape=(30,)))
    x, apart = drawn((9, 40), 3), [v.repeat_interleave(2)[::2] for v in vectors]
    assert calls(monkeypatch, x, weight, *apart, eps) == 1
    monkeypatch.undo()
    assert calls(monkeypatch, x, weight.T.contiguous().T, *vectors, eps) == 0


# --- running statistics ------------------------------------------------------------------------


def moved(bn: nn.BatchNorm1d, mean: Tensor, var: Tensor) -> list[Tensor]:
    """In float64: what it will hold."""
    m, held = float(bn.momentum), (bn.running_mean, bn.running_var)
    found = [(1 - m) * r.double() + m * t.double() for r, t in zip(held, (mean, var), strict=True)]
    return [*found, bn.num_batches_tracked + 1]


@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0, 1])
@pytest.mark.parametrize("kind", ["usual", "apart", "a float count", "float64", "no compiler"])
def test_running_statistics_are_moved(kind, momentum, monkeypatch):
    bn, mean, var = nn.BatchNorm1d(70, momentum=momentum), drawn((70,), 1), drawn((70,), 2).exp()
    if kind == "apart":
        bn.running_mean = drawn((140,), 3)[::2]
    if kind == "a float count":
        bn.num_batches_tracked = torch.tensor(3.0)
    if kind == "float64":
        bn, mean, var = bn.double(), mean.double(), var.double()
    if kind == "no compiler":
        monkeypatch.setattr(running, "_tracker", lambda: None)
    wanted, held = moved(bn, mean, var), list(bn.buffers())
    versions = [t._version for t in held]
    running.track(bn, mean, var)
    for ours, true in zip(held, wanted, strict=True):
        torch.testing.assert_close(ours.double(), true.double(), rtol=3e-7, atol=1e-7)
    assert all(t._version > v for t, v in zip(held, versions, strict=True)), "folds go by them"


def test_by_the_kernel_each_is_rounded_once():
    bn, mean, var = nn.BatchNorm1d(70), drawn((70,), 1), drawn((70,), 2).exp()
    wanted = moved(bn, mean, var)
    running.track(bn, mean, var)
    assert torch.equal(bn.running_mean, wanted[0].float())
    assert torch.equal(bn.running_var, wanted[1].float())


def test_statistics_of_inference_mode_move_there_alone():
    with torch.inference_mode():
        bn = nn.BatchNorm1d(5)
        running.track(bn, drawn((5,)), drawn((5,)).exp())
        assert bn.num_batches_tracked == 1
    with pytest.raises(RuntimeError, match="inference"):
        running.track(bn, drawn((5,)), drawn((5,)).exp())


def test_a_model_in_training_takes_both(monkeypatch):
    seen, tracker = [], running._tracker()
    monkeypatch.setattr(running, "_tracker", lambda: lambda *a: (seen.append(a), tracker(*a))[1])
    model = chain.ModelNew(40, 30).train()
    model(drawn((9, 40)))
    assert len(seen) == 1 and model.bn.num_batches_tracked == 1


# --- wrong kernels are found ---------------------------------------------------------------------

SABOTAGE = {  # what: (old, new); in the kernel or the header that has it
    "the biased variance": ("var * p.B / (p.B - 1)", "var"),
    "a chain of k is lost": ("K, outs, k > 0}, p.B", "K, outs, false}, p.B"),
    "a piece of k is lost": ("i == 0, k > 0}", "i == 0, false}"),
    "k from the first piece": ("p.x_stride + k, p.c + k", "p.x_stride, p.c"),
    "the bias is not in the mean": ("total + p.bias[n + f]", "total"),
    "means by vectors alone": ("k = whole; k < p.K; ++k) total", "k = whole; 0;) total"),
    "no centre": ("0.5f * x[k] - 0.5f * c[k]", "0.5f * x[k]"),
    "rows beyond the tiles": ("if constexpr (Rows > 1) outer_rows", "if (false) outer_rows"),
    "a panel's last feature": ("n = 0; n < outs; ++n)", "n = 0; n < outs - (outs == kPanel); ++n)"),
    "the last feature": ("statistics(p, n, after)", "statistics(p, n, after - (after > n + 16))"),
}


def assert_all_right(run) -> None:
    for B, K, N in ((9, 200, 210), (7, 300, 70), (9, 4100, 5), (12, 20, 96)):
        assert_right(run, drawn((B, K), 7) + 1000, *of_batch(parameters(K, N)))


def broken(name: str):
    old, new = SABOTAGE[name]
    text = (FOLDER / "whole_batch.cpp").read_text(encoding="utf-8")
    for header in ("batch_centre.h", "dot_tiles.h", "outer_tiles.h"):
        put_in = (COMMON / header).read_text(encoding="utf-8").replace("#pragma once", "")
        text = text.replace(f'#include "{header}"', put_in)
    assert text.count(old) == 1, "what is to be broken is there once"
    texts = {"whole_batch.cpp": text.replace(old, new)}
    return ops.kernel_library("whole_batch", "cpu", texts).op("run").default


@pytest.mark.parametrize("name", SABOTAGE)
def test_control_a_sabotaged_kernel_is_rejected(name, run):
    assert_all_right(run)
    with pytest.raises(AssertionError):
        assert_all_right(broken(name))


def test_eps_counts(run):
    of, x = of_batch(parameters(4, 9)), 1e-3 * drawn((6, 4), 7)
    assert of[-1] == EPS
    assert_right(run, x, *of)
