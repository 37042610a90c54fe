"""The sum chain's fold on a CPU in one op: sums in double, and whether float chains will do.

A sum in double of N numbers errs by at most N units of their sizes, in any order.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import drawn, needs_compiler
from torch import Tensor

from workbook import ops, paths
from workbook.chains import matmul_sum_max_mean_logsumexp_run as chain

U64 = 2.0**-53
FOLDER = paths.kernels() / "sum_fold"
# N, K: around eight rows together, slices of 64, four of them, a vector, columns of a task
SHAPES = [(1, 1), (7, 9), (8, 16), (9, 17), (63, 5), (64, 33), (127, 8), (128, 31), (129, 70),
          (255, 6), (256, 40), (300, 1031), (1001, 3), (20, 4095), (130, 4097),
          (9, 8200)]  # fmt: skip
pytestmark = needs_compiler


@pytest.fixture(scope="module")
def run():
    return chain._sum_fold()


def assert_right(run, W: Tensor, bias: Tensor) -> None:
    w_sum, b_sum, rounded, _ = run(W, bias)
    assert w_sum.dtype == b_sum.dtype == torch.float64 and b_sum.shape == ()
    for found, of in ((w_sum, W), (b_sum, bias)):
        wide = of.double()
        columns = wide.reshape(len(of), -1).T.tolist()
        true = torch.tensor([math.fsum(c) for c in columns], dtype=torch.float64)
        bound = len(of) * U64 * wide.abs().sum(0)
        assert ((found - true.reshape(found.shape)).abs() <= bound).all()
    assert rounded.dtype == torch.float32 and torch.equal(rounded, w_sum.float())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums(run, shape):
    assert_right(run, drawn(shape, 3), drawn(shape[:1], 4))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 70), st.integers(0, 5))
def test_sums_of_any_shape(N, K, seed):
    assert_right(chain._sum_fold(), drawn((N, K), seed), drawn((N,), seed + 1))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_no_rows_are_zero_and_no_columns_are_nothing(run, shape):
    w_sum, b_sum, rounded, is_short = run(torch.empty(shape), torch.ones(shape[0]))
    assert w_sum.shape == rounded.shape == shape[1:] and (w_sum == 0).all()
    assert b_sum == shape[0] and is_short == (shape[1] > 0)


def test_huge_values_that_cancel_leave_the_small_ones(run):
    small = torch.randint(-9, 9, (5, 300)).float()
    huge = 2.0**40 * torch.randint(1, 9, (90, 300)).float()
    W = torch.cat([huge, small, -huge])
    assert torch.equal(run(W, torch.zeros(185))[0], small.double().sum(0))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_column(run, value):
    W, bias = drawn((200, 1100), 6), torch.zeros(200)
    clean = run(W, bias)
    assert clean[3]
    W[150, 517] = value
    w_sum, _, rounded, is_short = run(W, bias)
    others = torch.arange(1100) != 517
    assert torch.equal(w_sum[others], clean[0][others]) and not w_sum[517].isfinite()
    assert not rounded[517].isfinite() and not is_short


def test_a_sum_that_is_nan_is_not_short(run):
    """Of squares that are infinite: most of NaNs would be 0."""
    W = drawn((200, 1100), 6)
    W[150, 517], W[40, 517] = math.inf, -math.inf
    w_sum, _, _, is_short = run(W, torch.zeros(200))
    assert w_sum[517].isnan() and not is_short and not may_be_short(W)


def test_the_same_bits_again_by_any_threads(run):
    before = torch.get_num_threads()
    for shape in ((403, 3000), (101, 9000)):
        W, bias = drawn(shape, 7), drawn(shape[:1], 8)
        try:
            found = []
            for threads in (1, 2, 3, 5, 8, 1):
                torch.set_num_threads(threads)
                found.append(run(W, bias)[:3])
        finally:
            torch.set_num_threads(before)
        assert all(all(map(torch.equal, found[0], other)) for other in found)


def may_be_short(W: Tensor) -> bool:
    """The rule, in torch."""
    sums = W.double().sum(0)
    size, most = W.double().square().sum().div(W.size(1)).sqrt(), sums.abs().max()
    least = sums[sums != 0].abs().min() if (sums != 0).any() else 1.0
    return bool(most <= 6 * size and most <= 2.0**60 and least >= 2.0**-60)


@pytest.mark.parametrize("scale", [1.0, 2.0**-40, 2.0**-70, 2.0**58, 2.0**70])
@pytest.mark.parametrize("towards", [0.0, 0.1, 0.2, 0.3, 0.4, 1.0])
def test_where_float_chains_will_do(run, scale, towards):
    """Weights that have more and more of one sign, of all sizes."""
    W = (drawn((300, 700), 3) + towards) * scale
    is_short = run(W, torch.zeros(300))[3]
    assert is_short == may_be_short(W)


def test_columns_of_zeros_do_not_count_as_small(run):
    W = drawn((300, 70), 3)
    W[:, ::2] = 0
    assert run(W, torch.zeros(300))[3]


def F(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((F(3), F(3)), r"W: got float32 \(3\)"),
        ((F(2, 3, dtype=torch.float64), F(2)), r"W: got float64 \(2, 3\); wants .* float32"),
        ((F(3, 2).T, F(2)), r"W: got float32 \(2, 3\), not contiguous"),
        ((F(2, 3), F(3)), r"bias: got float32 \(3\); wants a contiguous float32 \(2\)"),
        ((F(2, 3), F(2, dtype=torch.float64)), r"bias: got float64"),
    ],
)
def test_the_binding_refuses_what_it_can_not_read(run, arguments, words):
    with pytest.raises(RuntimeError, match=words):
        run(*arguments)


@pytest.mark.parametrize("kind", ["usual", "transposed", "no compiler"])
def test_the_chain_folds_with_it(kind, monkeypatch):
    seen, kernel = [], chain._sum_fold()
    counted = None if kind == "no compiler" else lambda *a: (seen.append(a), kernel(*a))[1]
    monkeypatch.setattr(chain, "_sum_fold", lambda: counted)
    W, bias = drawn((300, 70), 3), drawn((300,), 4)
    W = W.T.contiguous().T if kind == "transposed" else W
    folded = chain.fold(torch.float64, W, bias)
    assert len(seen) == (kind != "no compiler") and len(folded) == 2 + len(seen)
    torch.testing.assert_close(folded[0], W.double().sum(0))
    torch.testing.assert_close(folded[1], bias.double().sum())


SABOTAGE = {  # what: (old, new)
    "a slice is lost": ("s < p.slices", "s < p.slices - 1"),
    "rows between slices": ("p.N * (slice + 1) / p.slices - from", "p.N / p.slices"),
    "columns of a later task": ("task % blocks * kColumns", "0"),
    "no matter how large": ("most <= kCoherent * size && ", ""),
    "zeros are small": ("size == 0 ? kLarge : size", "size"),
    "squares of a task are lost": ("task < tasks_of(p)", "task < 1"),
    "squares of whole vectors alone": (" + square.alone", ""),
    "half of the size": ("kCoherent = 6", "kCoherent = 3"),
}


def raised(K: int, times: float) -> Tensor:
    """Normal weights, a column's sum raised to as many times what a random one has."""
    W = drawn((300, K), 3)
    size = W.double().square().sum().div(K).sqrt().item()
    W[:, 1] += (times * size - W[:, 1].double().sum().item()) / 300
    return W


def assert_all_right(run) -> None:
    for shape in ((300, 70), (263, 9), (70, 8200)):
        assert_right(run, drawn(shape, 3), drawn(shape[:1], 4))
    zeros = torch.zeros(300)
    for K in (7, 64, 70):
        for times in (5.0, 8.0):
            W = raised(K, times)
            W[:, 3] = 0
            assert run(W, zeros)[3] == (times < 6) == may_be_short(W)


@pytest.mark.parametrize("name", SABOTAGE)
def test_control_a_sabotaged_kernel_is_rejected(name, run):
    old, new = SABOTAGE[name]
    text = (FOLDER / "sum_fold.cpp").read_text(encoding="utf-8")
    assert text.count(old) == 1
    texts = {"sum_fold.cpp": text.replace(old, new)}
    assert_all_right(run)
    with pytest.raises(AssertionError):
        assert_all_right(ops.kernel_library("sum_fold", "cpu", texts).op("run").default)
