"""What stands before the avgpool chain's tails: means of groups of rows, and torch's products."""

from __future__ import annotations

import math

import pytest
import torch
from avgpool import U32, averaged
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import DEVICES, drawn, needs_compiler

from workbook import gemm, ops, paths, sums

U64 = 2.0**-53
STRIP = 1024  # columns of one task on a CPU
# N, K, pool
SHAPES = [(1, 1, 1), (1, 5, 1), (5, 1, 2), (7, 1023, 3), (9, 1024, 4), (8, 1025, 8), (1031, 33, 5),
          (64, 4097, 16), (300, 7, 300), (31, 40, 16)]  # fmt: skip


# --- means ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    source = paths.kernels() / "group_mean" / "group_mean.cpp"
    return ops.kernel_library("group_mean", "cpu", [source]).op("run")


def assert_means(got: tuple, W: torch.Tensor, pool: int) -> None:
    w, exact = (t.cpu() for t in got)
    true = averaged(W.double().T, pool).T
    bound = (pool + 2) * U64 * averaged(W.double().abs().T, pool).T
    assert w.shape == exact.shape == true.shape and (w.dtype, exact.dtype) == (
        torch.float32,
        torch.float64,
    )
    assert ((exact - true).abs() <= bound).all()
    assert torch.equal(w, exact.float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_means_of_odd_shapes(shape, device):
    N, K, pool = shape
    W = drawn((N, K), 3)
    assert_means(sums.group_mean(W.to(device), pool, torch.float32), W, pool)


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 2100), st.integers(1, 40), st.integers(0, 5))
def test_means_of_any_shape(N, K, pool, seed):
    W = drawn((N, K), seed)
    assert_means(sums.group_mean(W, pool, torch.float32), W, pool)


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_only_the_means_are_written_and_all_of_them(run, shape):
    N, K, pool = shape
    W, count = drawn((N, K), 4), N // pool * K
    kept, memory = W.clone(), [torch.full((count + 16,), math.nan, dtype=t)
                               for t in (torch.float32, torch.float64)]  # fmt: skip
    for m in memory:
        m[:8], m[count + 8 :] = 17.0, 17.0
    w, exact = (m[8 : count + 8].view(N // pool, K) for m in memory)
    run(W, pool, w, exact)
    assert all((m[:8] == 17).all() and (m[count + 8 :] == 17).all() for m in memory)
    assert_means((w, exact), W, pool)
    assert torch.equal(W, kept)
    alone = torch.full_like(w, math.nan)
    run(W, pool, alone, exact.new_empty(0))
    assert torch.equal(alone, w)


@pytest.mark.parametrize(
    "view",
    [
        lambda W: W.T,
        lambda W: W[:, ::2],
        lambda W: W[::3],
        lambda W: W[1:, 3:40],
        lambda W: W[:1].expand(9, -1),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_views(view, device):
    W = view(drawn((37, 64), 5))
    assert_means(sums.group_mean(view(drawn((37, 64), 5).to(device)), 3, torch.float32), W, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block", [1, 100, 1 << 22])
def test_other_types_by_blocks(dtype, block, monkeypatch):
    monkeypatch.setattr(sums, "BLOCK", block)
    W = drawn((31, 40), 6).to(dtype)
    w, exact = sums.group_mean(W, 4, torch.float64)
    torch.testing.assert_close(w, averaged(W.double().T, 4).T, rtol=1e-15, atol=1e-17)
    assert exact.numel() == 0


def test_without_a_compiler_torch_averages(monkeypatch):
    monkeypatch.setattr(sums, "_group_mean", lambda device: None)
    W = drawn((50, 70), 10)
    assert_means(sums.group_mean(W, 7, torch.float32), W, 7)


def test_the_kernel_is_what_group_mean_runs(monkeypatch):
    seen, kernel = [], sums._group_mean("cpu")
    assert kernel is not None
    monkeypatch.setattr(sums, "_group_mean", lambda device: lambda *a: (seen.append(a), kernel(*a)))
    sums.group_mean(drawn((6, 5)), 2, torch.float32)
    assert len(seen) == 1


@needs_compiler
def test_numbers_of_every_size_keep_their_digits(run):
    for size in (1e-42, 1e-30, 1e30, 3e38):
        W = (drawn((8, 300), 7).clamp(-1, 1).double() * size).float()
        assert_means(sums.group_mean(W, 4, torch.float32), W, 4)
    huge = torch.full((4, 3), 3e38)
    assert (sums.group_mean(huge, 4, torch.float32)[0] == huge[0]).all(), "a float32 sum overflows"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_group_and_column(device, value):
    W = drawn((13, 1100), 6)
    clean = sums.group_mean(W.to(device), 4, torch.float32)[0].cpu()
    for row, column in ((0, 0), (5, 517), (7, 1023), (11, 1099), (12, 3)):
        W[row, column] = value  # row 12 is left over
    got = sums.group_mean(W.to(device), 4, torch.float32)[0].cpu()
    hit = torch.zeros(3, 1100, dtype=torch.bool)
    hit[[0, 1, 1, 2], [0, 517, 1023, 1099]] = True
    assert torch.equal(got[~hit], clean[~hit])
    torch.testing.assert_close(got[hit], torch.full((4,), value), equal_nan=True)


@needs_compiler
def test_means_do_not_depend_on_the_number_of_threads(run):
    W, was, found = drawn((101, 5 * STRIP + 3), 8), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            found.append(sums.group_mean(W, 5, torch.float32))
    finally:
        torch.set_num_threads(was)
    assert all(torch.equal(a, b) for f in found for a, b in zip(f, found[0], strict=True))


def F32(*shape):
    return torch.zeros(shape)


def F64(*shape):
    return torch.zeros(shape, dtype=torch.float64)


@needs_compiler
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((F32(3), 1, F32(3, 1), F64(0)), r"W: wants a \(N, K\) matrix"),
        ((F64(4, 3), 2, F32(2, 3), F64(0)), r"W: got float64 \(4, 3\)"),
        ((F32(3, 4).T, 2, F32(2, 3), F64(0)), r"W: got float32 \(4, 3\), not contiguous"),
        ((F32(4, 3), 0, F32(2, 3), F64(0)), "pool: got 0; wants at least 1"),
        ((F32(4, 3), 2, F32(1, 3), F64(0)), r"w: got float32 \(1, 3\); wants .*\(2, 3\)"),
        ((F32(4, 3), 2, F64(2, 3), F64(0)), r"w: got float64"),
        ((F32(4, 3), 2, F32(2, 3), F32(2, 3)), r"w_exact: got float32"),
        ((F32(4, 3), 2, F32(2, 3), F64(2, 2)), r"w_exact: got float64 \(2, 2\); wants .*\(2, 3\)"),
    ],
)
def test_the_binding_of_means_refuses_what_it_can_not_read(run, arguments, words):
    with pytest.raises(RuntimeError, match=words):
        run(*arguments)


# --- products ---------------------------------------------------------------------------------


@pytest.mark.parametrize("least", [1, gemm.LEAST])
@pytest.mark.parametrize("shape", [(5, 33, 7), (1, 1, 1), (0, 4, 3), (3, 0, 2), (129, 300, 65)])
def test_a_product_is_that_of_torch(shape, least, monkeypatch):
    monkeypatch.setattr(gemm, "LEAST", least)
    monkeypatch.setattr(gemm, "SOONER", least)
    B, K, M = shape
    x, weight, bias = drawn((B, K), 1), drawn((M, K), 2), drawn((M,), 3)
    for rows in (x, drawn((K, B), 4).T):
        for b in (bias, None):
            got = gemm.product(rows, weight, b)
            true = rows.double() @ weight.double().T + (0 if b is None else b.double())
            size = rows.double().abs() @ weight.double().abs().T + bias.abs()
            assert got.shape == (B, M) and got.dtype == torch.float32
            assert ((got - true).abs() <= 1.01 * (K + 2) * U32 * size).all()


def test_a_large_product_goes_to_onednn_where_that_is_switched_on(monkeypatch):
    if gemm._onednn() is None:
        pytest.skip("this torch has no oneDNN")
    seen, x, weight = [], drawn((64, 520)), drawn((520, 520))
    linear = gemm._onednn()
    monkeypatch.setattr(gemm, "_onednn", lambda: lambda *a: seen.append(a) or linear(*a))
    gemm.product(x, weight)
    assert len(seen) == 1
    gemm.product(x[:1], weight)
    gemm.product(x.double(), weight.double())
    with torch.backends.mkldnn.flags(enabled=False):
        gemm.product(x, weight)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("rows", "columns", "outs", "fast"),
    [
        (4, 512, 512, True),  # a large weight
        (3, 512, 512, False),
        (255, 128, 256, False),  # one that is not
        (256, 128, 256, True),
        (1024, 2048, 4, True),
        (1023, 2048, 4, False),  # outputs that MKL has code for
        (256, 2048, 5, True),  # and has not
        (256, 512, 15, True),
        (256, 512, 16, False),
        (64, 512, 15, False),
    ],
)
def test_which_products_are_large(rows, columns, outs, fast, monkeypatch):
    monkeypatch.setattr(gemm, "_onednn", lambda: "oneDNN")
    assert gemm._fast(drawn((rows, columns)), drawn((outs, columns))) == (
        "oneDNN" if fast else None
    )


def test_without_onednn_torch_multiplies(monkeypatch):
    monkeypatch.setattr(gemm, "_onednn", lambda: None)
    x, weight, bias = drawn((64, 520)), drawn((520, 520)), drawn((520,))
    assert torch.equal(gemm.product(x, weight, bias), torch.nn.functional.linear(x, weight, bias))


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 9), st.integers(0, 90), st.integers(1, 9), st.integers(1, 30))
def test_parts_add_up_to_the_product(B, K, M, count):
    x, weight = drawn((B, K), 1), drawn((M, K), 2)
    found = gemm.parts(x, weight, count)
    assert found.shape[1:] == (B, M) and 1 <= found.size(0) <= count + 1
    size = x.double().abs() @ weight.double().abs().T
    true = x.double() @ weight.double().T
    assert ((found.double().sum(0) - true).abs() <= 1.01 * (K + 2) * U32 * size).all()


def test_parts_of_an_even_length_are_one_batch(monkeypatch):
    monkeypatch.setattr(torch, "mm", None)
    assert gemm.parts(drawn((3, 64)), drawn((5, 64)), 4).shape == (4, 3, 5)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 70000), st.integers(0, 40000), st.integers(1, 40000), st.integers(1, 9000))
def test_how_a_product_is_cut(rows, columns, outputs, averaged):
    block, count = gemm.cut(rows, columns, outputs, averaged)
    assert 128 <= block <= 1024 and 1 <= count <= max(1, math.isqrt(columns) // 4)
    if columns // count >= 4 and count > 1:
        assert columns // count >= 4 * math.isqrt(columns) // 2, "parts stay long"


def test_the_papers_product_fits_in_a_gpus_cache():
    assert gemm.cut(1024, 8192, 512, 16) == (1024, 8)
    assert gemm.cut(16, 8192, 512, 16) == (1024, 16)
