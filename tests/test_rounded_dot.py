"""Rows times a vector in short chains: within the bound of its arithmetic, and only where that is
good enough.

The bound: of a product w is rounded, then it is added eight times to a chain, and that chain to
three others; from there on all is double.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import drawn, needs_compiler
from sum_chain import Model, ModelNew, errors, truth
from torch import Tensor

import workbook as wb
from workbook import ops, paths
from workbook.chains import matmul_sum_max_mean_logsumexp_run as chain

pytestmark = needs_compiler
U32, U64 = 2.0**-24, 2.0**-53
TINY = 2.0**-149  # the least float32
ROUNDINGS = 1 + 8 + 2
FOLDER = paths.kernels() / "rounded_dot"
SHAPES = [(1, 1), (3, 7), (7, 511), (13, 512), (6, 513), (9, 1100), (2, 9000), (65, 100), (0, 7),
          (3, 0)]  # fmt: skip


def library(text: str | None = None):
    sources = [FOLDER / "rounded_dot.cpp"] if text is None else {"rounded_dot.cpp": text}
    if text is not None:
        sources["binding.cpp"] = (FOLDER / "binding.cpp").read_text(encoding="utf-8")
    return ops.kernel_library("rounded_dot", "cpu", sources).op("run")


@pytest.fixture(scope="module")
def run():
    return library()


def vector(K: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    """w (K) and b (), float64; w is no float32."""
    w = drawn((K,), seed).double()
    return w * (1 + 2.0**-30), torch.tensor(0.3, dtype=torch.float64)


def called(run, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """y from poisoned memory with margins that nobody may write."""
    memory = torch.full((x.size(0) + 16, 1), math.nan)
    memory[:8], memory[x.size(0) + 8 :] = -7.0, -7.0
    y = memory[8 : x.size(0) + 8]
    run(x, w, w.float(), b, y)
    assert (memory[:8] == -7).all() and (memory[x.size(0) + 8 :] == -7).all(), "written outside"
    return y.squeeze(1)


def assert_within_bound(run, x: Tensor, w: Tensor, b: Tensor, *, double: bool = False) -> None:
    """double: rows that are to be taken in it."""
    y, K = called(run, x, w, b), x.size(1)
    true, size = x.double() @ w + b, x.double().abs() @ w.abs() + b.abs()
    errs = 2 * (K + 2) * U64 + (0 if double else ROUNDINGS * U32)
    bound = 1.01 * (errs * size + U32 * true.abs()) + TINY
    assert not y.isnan().any(), "a row is not written"
    excess = (y.double() - true).abs() / bound
    assert not (excess > 1).any(), f"{excess.max():.3g} times the bound"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_within_bound(run, shape):
    assert_within_bound(run, drawn(shape, 7), *vector(shape[1]))


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(0, 19),
    features=st.integers(0, 1200),
    gap=st.integers(0, 7),
    offset=st.integers(0, 5),
    overlap=st.booleans(),
)
def test_within_bound_at_any_stride(run, rows, features, gap, offset, overlap):
    stride = gap if overlap else features + gap
    memory = drawn((offset + rows * stride + features + 1,), gap)
    x = memory.as_strided((rows, features), (stride, 1), offset)
    assert_within_bound(run, x, *vector(features))


def adversaries() -> dict[str, tuple[Tensor, Tensor]]:
    """What float chains lose, but for their length or their guards: x and w."""
    ones = torch.ones(4096, dtype=torch.float64)
    small = torch.full((7, 4096), 2.0**-25)  # beside 1 it is rounded away, each time
    small[:, :64] = 1.0
    large = drawn((7, 4096), 3) * 1e37  # products beyond float's range that cancel
    large[:, 1::2] = -large[:, ::2]
    large[:, 0], large[:, 1] = 1e30, -1e29
    least = drawn((7, 4096), 5) * 1e-42  # products below it
    even = drawn((7, 4096), 6)  # half of a row cancels the other, but for a millionth
    even[:, 2048:] = -even[:, :2048] * (1 + 2.0**-20)
    return {
        "length": (small, ones),
        "overflow": (large, 3e3 * ones),
        "underflow": (least, 0.7 * ones),
        "cancelling": (even, vector(2048)[0].abs().repeat(2)),
    }


@pytest.mark.parametrize("name", ["length", "overflow", "underflow", "cancelling"])
def test_what_float_chains_would_lose(run, name):
    x, w = adversaries()[name]
    assert_within_bound(run, x, w, w.new_zeros(()), double=name != "length")


SPOILED = {
    "length": ("kChain = 8;", "kChain = 64;"),
    "overflow": ("return size >=", "return true || size >="),
    "underflow": ("size >= kSmall && size <= kLarge && size * size >=", "size * size >="),
    "cancelling": ("size * size >= kLeast * row.square", "true"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_control_without_their_guard(name):
    header = (FOLDER / "dot_rows.h").read_text(encoding="utf-8").replace("#pragma once", "")
    text = (FOLDER / "rounded_dot.cpp").read_text(encoding="utf-8")
    text = text.replace('#include "dot_rows.h"', header)
    old, new = SPOILED[name]
    assert text.count(old) == 1
    x, w = adversaries()[name]
    with pytest.raises(AssertionError):
        run = library(text.replace(old, new))
        assert_within_bound(run, x, w, w.new_zeros(()), double=name != "length")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_row(run, value):
    x, given = drawn((9, 1037), 3), vector(1037)
    clean = called(run, x, *given)
    for row, column in ((0, 0), (5, 17), (8, 1036)):
        spoiled = x.clone()
        spoiled[row, column] = value
        y, others = called(run, spoiled, *given), [i for i in range(9) if i != row]
        assert torch.equal(y[others], clean[others]) and not y[row].isfinite()


def test_bits_depend_on_the_row_alone(run):
    """Not on the batch around it, its place in it, or the number of threads."""
    x, given = drawn((43, 2050), 3), vector(2050)
    x[7] *= 1e-30  # one that is taken in double
    y, before = called(run, x, *given), torch.get_num_threads()
    try:
        for threads, first, last in [(1, 0, 43), (2, 5, 9), (3, 1, 40), (2, 42, 43)]:
            torch.set_num_threads(threads)
            assert torch.equal(called(run, x[first:last], *given), y[first:last])
    finally:
        torch.set_num_threads(before)


WRONG = [
    (0, lambda t: t.double(), "x"), (0, lambda t: t.T, "x"), (1, lambda t: t.float(), "w"),
    (1, lambda t: t[1:], "w"), (2, lambda t: t.double(), "rounded"),
    (2, lambda t: t[1:], "rounded"), (3, lambda t: t.float(), "b"),
    (3, lambda t: t.unsqueeze(0), "b"),
    (4, lambda t: t[1:], "y"), (4, lambda t: t.double(), "y"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_a_wrong_argument_is_named(run, case):
    at, change, named = WRONG[case]
    w, b = vector(8)
    given = [drawn((3, 8)), w, w.float(), b, torch.empty(3, 1)]
    run(*given)
    given[at] = change(given[at])
    with pytest.raises(RuntimeError, match=rf"^{named}: .*wants"):
        run(*given)


# --- where short chains are good enough -------------------------------------------------------

K, N, B = 2048, 2048, 256
CASES = {
    "as initialised": (lambda w: w, True),
    "of one sign": (lambda w: w.abs(), False),
    "a column of one sign": (lambda w: torch.cat([w[:, :1].abs() * 3, w[:, 1:]], 1), False),
    "pairs that cancel": (lambda w: torch.cat([w[: N // 2], -w[: N // 2]]), True),
    "beyond float's range": (lambda w: w * 2.0**62, False),
    "below float's range": (lambda w: w * 2.0**-62, False),
    "a NaN": (lambda w: w.clone().index_fill_(1, torch.tensor([3]), math.nan), False),
}


@pytest.mark.parametrize("name", CASES)
def test_the_fold_says_where(name):
    change, short = CASES[name]
    torch.manual_seed(0)
    weight = change(ModelNew(K, N).linear.weight.detach())
    folded = chain.fold(torch.float64, weight, torch.zeros(N))
    assert (len(folded) == 3) == short
    assert len(chain.fold(torch.float32, weight, torch.zeros(N))) == 2
    if short:
        assert torch.equal(folded[2], folded[0].float())


@pytest.mark.parametrize("name", ["as initialised", "of one sign"])
def test_the_rule_holds_where_rows_cancel(name, monkeypatch):
    """Inputs around 0: some rows sum to nearly nothing. Short chains everywhere would break it."""
    monkeypatch.setattr(chain, "ENOUGH", 0)
    torch.manual_seed(0)
    model, x = ModelNew(K, N), drawn((B, K), 5)
    with torch.no_grad():
        model.linear.weight.copy_(CASES[name][0](model.linear.weight))
        y, eager, true = model(x), Model.forward(model, x), truth(model, x)
        for ours, own in zip(errors(y, true), errors(eager, true), strict=True):
            assert ours <= max(2 * own, 2e-7)
        if name == "of one sign":
            fold = chain._sum_fold()
            monkeypatch.setattr(chain, "_sum_fold", lambda: lambda *a: (*fold(*a)[:3], True))
            wb.refresh(model)
            short, own = errors(model(x), true), errors(eager, true)
            assert any(s > max(2 * o, 2e-7) for s, o in zip(short, own, strict=True)), (short, own)


def test_control_the_chain_runs_it(monkeypatch):
    seen, kernel = [], chain._rounded_dot()
    monkeypatch.setattr(chain, "_rounded_dot", lambda: lambda *a: (seen.append(a), kernel(*a)))
    torch.manual_seed(0)
    model = ModelNew(K, N)
    with torch.no_grad():
        model(drawn((chain.ENOUGH // K - 1, K)))
        assert not seen, "in double, where that costs nothing"
        model(drawn((chain.ENOUGH // K, K)))
        assert len(seen) == 1
        model.linear.weight.abs_()
        model(drawn((chain.ENOUGH // K, K)))
        assert len(seen) == 1
