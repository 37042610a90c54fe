"""The kernel of the fold: column sums against float64, in any shape, deterministic, each its own.

The bound is that of the arithmetic: N additions in float64, whatever their order.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sum_chain import DEVICES, drawn, needs_compiler, needs_gpu, needs_nvcc

from workbook import build, ops, paths, sums

U64 = 2.0**-53
FOLDER = paths.kernels() / "column_sum"
STRIP = 1024  # columns of one task on a CPU
# Rows around eight together, columns around a task's and around the 8192 taken at once by a thread
SHAPES = [(1, 1), (1, 5), (5, 1), (3, 1023), (4, 1024), (7, 1025), (1031, 33), (64, 4097),
          (8, 8192), (15, 8193), (23, 20011)]  # fmt: skip
pytestmark = needs_compiler


@pytest.fixture(scope="module")
def run():
    return ops.kernel_library("column_sum", "cpu", [FOLDER / "column_sum.cpp"]).op("run")


def summed(run, W: torch.Tensor) -> torch.Tensor:
    """The kernel's sums into poisoned memory with margins, which nobody may write."""
    K = W.size(1)
    memory = torch.full((K + 16,), math.nan, dtype=torch.float64)
    memory[:8], memory[K + 8 :] = 17.0, 17.0
    run(W, D(0, K), memory[8 : K + 8])
    assert (memory[:8] == 17).all() and (memory[K + 8 :] == 17).all(), "written beside s"
    return memory[8 : K + 8].clone()


def assert_sums(got: torch.Tensor, W: torch.Tensor) -> None:
    true = torch.tensor([math.fsum(c) for c in W.double().T.tolist()], dtype=torch.float64)
    bound = W.size(0) * U64 * W.double().abs().sum(0)
    assert got.shape == true.shape and got.dtype == torch.float64
    assert ((got - true).abs() <= bound).all()


def test_the_kernel_is_what_column_sum_runs(monkeypatch):
    """The tests below hold for sums.column_sum: it takes the kernel, not torch, where it can."""
    seen = []
    kernel = sums._column_sum("cpu")
    assert kernel is not None
    monkeypatch.setattr(sums, "_column_sum", lambda device: lambda *a: (seen.append(a), kernel(*a)))
    W = drawn((5, 7))
    assert_sums(sums.column_sum(W), W)
    assert len(seen) == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_of_odd_shapes(shape, device):
    W = drawn(shape, seed=3)
    assert_sums(sums.column_sum(W.to(device)).cpu(), W)


@pytest.mark.parametrize("shape", SHAPES)
def test_only_s_is_written_and_all_of_it(run, shape):
    W = drawn(shape, seed=4)
    kept = W.clone()
    assert_sums(summed(run, W), W)
    assert torch.equal(W, kept)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 2100), st.integers(0, 5))
def test_sums_of_any_shape(N, K, seed):
    W = drawn((N, K), seed)
    assert_sums(sums.column_sum(W), W)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (0, 2000)])
def test_no_rows_are_zero_and_no_columns_are_nothing(shape, device):
    got = sums.column_sum(torch.empty(shape, device=device))
    assert got.shape == (shape[1],) and got.dtype == torch.float64 and (got == 0).all()


def test_no_rows_are_written_as_zero(run):
    assert (summed(run, torch.empty(0, 1500)) == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "view",
    [
        lambda W: W.T,
        lambda W: W[:, ::2],
        lambda W: W[::3],
        lambda W: W[1:, 3:40],
        lambda W: W[:1].expand(9, -1),
        lambda W: W.double(),
        lambda W: W.half(),
    ],
)
def test_views_and_other_types(view, device):
    W = view(drawn((37, 64), seed=5))
    assert_sums(sums.column_sum(view(drawn((37, 64), seed=5).to(device))).cpu(), W)


def test_an_unaligned_contiguous_view(run):
    for offset in range(1, 5):
        W = drawn((16 * 65 + offset,), seed=offset)[offset:].view(16, 65)
        assert W.is_contiguous()
        assert_sums(summed(run, W), W)


def test_huge_values_that_cancel_leave_the_small_ones(run):
    small = torch.randint(-9, 9, (5, 300)).float()
    huge = 2.0**40 * torch.randint(1, 9, (4, 300)).float()
    W = torch.cat([huge, small, -huge])  # exact in float64 in any order: 2^43 * 9 < 2^53
    assert torch.equal(summed(run, W), small.double().sum(0))
    assert not torch.equal(W.sum(0).double(), small.double().sum(0)), "float32 loses them"


def test_sums_beyond_float32_are_finite(run):
    W = torch.full((1000, 3), 3e38)
    got = summed(run, W)
    assert got.isfinite().all() and not W.sum(0).isfinite().any()
    assert_sums(got, W)


def test_subnormal_numbers_count(run):
    W = torch.full((1000, 3), 2.0**-149)
    assert (summed(run, W) == 1000 * 2.0**-149).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("row", [0, 3, 4, 8])
def test_what_is_not_finite_stays_in_its_column(device, value, row):
    W = drawn((9, 1100), seed=6)
    clean = sums.column_sum(W.to(device)).cpu()
    for column in (0, 517, 1023, 1024, 1099):
        W[row, column] = value
    got = sums.column_sum(W.to(device)).cpu()
    hit = torch.zeros(1100, dtype=torch.bool)
    hit[[0, 517, 1023, 1024, 1099]] = True
    assert torch.equal(got[~hit], clean[~hit]), "the others keep every bit"
    torch.testing.assert_close(got[hit], torch.full((5,), value).double(), equal_nan=True)


def test_inf_and_its_opposite_are_nan(run):
    W = torch.zeros(6, 40)
    W[1, 7], W[5, 7] = math.inf, -math.inf
    got = summed(run, W)
    assert got[7].isnan() and (got[torch.arange(40) != 7] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_it_repeats_to_the_bit(device):
    W = drawn((403, 3000), seed=7).to(device)
    first = sums.column_sum(W)
    assert all(torch.equal(sums.column_sum(W), first) for _ in range(5))


def test_it_does_not_depend_on_the_number_of_threads(run):
    W = drawn((101, 5 * STRIP + 3), seed=8)
    was = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3, 5, 7):
            torch.set_num_threads(threads)
            found.append(summed(run, W))
    finally:
        torch.set_num_threads(was)
    assert all(torch.equal(f, found[0]) for f in found)


def test_a_column_does_not_depend_on_its_neighbours(run):
    W = drawn((33, 2500), seed=9)
    whole = summed(run, W)
    for begin, end in ((0, 1), (1023, 1026), (2047, 2500)):
        part = summed(run, W[:, begin:end].contiguous())
        assert torch.equal(part, whole[begin:end])


def F(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def D(*shape):
    return F(*shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((F(3), D(0, 3), D(3)), r"W: wants a \(N, K\) matrix"),
        ((F(2, 3, 4), D(0, 3), D(3)), r"W: wants a \(N, K\) matrix"),
        ((D(2, 3), D(0, 3), D(3)), r"W: got float64 \(2, 3\); wants a contiguous float32 \(2, 3\)"),
        ((F(3, 2).T, D(0, 3), D(3)), r"W: got float32 \(2, 3\), not contiguous; wants"),
        ((F(2, 3), D(0, 4), D(3)), r"partial: got float64 \(0, 4\); wants .* \(\*, 3\)"),
        ((F(2, 3), F(0, 3), D(3)), r"partial: got float32 \(0, 3\); wants a contiguous float64"),
        ((F(2, 3), D(0, 3), D(2)), r"s: got float64 \(2\); wants a contiguous float64 \(3\)"),
        ((F(2, 3), D(0, 3), F(3)), r"s: got float32 \(3\); wants a contiguous float64 \(3\)"),
        ((F(2, 3), D(0, 3), D(3, 1)), r"s: got float64 \(3, 1\)"),
        ((F(2, 3), D(0, 3), D(6)[::2]), r"s: got float64 \(3\), not contiguous"),
    ],
)
def test_the_binding_refuses_what_it_can_not_read(run, arguments, words):
    with pytest.raises(RuntimeError, match=words):
        run(*arguments)


def test_without_a_compiler_torch_sums(monkeypatch):
    monkeypatch.setattr(sums, "_column_sum", lambda device: None)
    W = drawn((50, 70), seed=10)
    assert_sums(sums.column_sum(W), W)


# --- with the differences of pairs --------------------------------------------------------------

# Around a slice's step of 16 pairs by 8 warps, 4 columns a lane, 128 a block, and both widths; the
# last two are of more than 4 MB, which on a CPU go past the caches where rows start at a vector
PAIRS = [(2, 1), (2, 1023), (4, 1024), (6, 1025), (130, 33), (64, 4097), (30, 128), (34, 132),
         (1030, 260), (1100, 31), (1030, 2064), (1034, 2060)]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", PAIRS)
def test_differences_of_pairs_and_their_sum(shape, device):
    W = drawn(shape, seed=13)
    there = W.to(device)
    differences, total = sums.pair_difference(there)
    assert differences.device == total.device == there.device
    assert torch.equal(differences.cpu(), W[0::2] - W[1::2]) and differences.is_contiguous()
    assert_sums(total.cpu(), W)
    assert torch.equal(there.cpu(), W)
    if device == "cpu":
        assert torch.equal(total, sums.column_sum(W)), "the same bits"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 5), (8, 0), (0, 0), (0, 2000)])
def test_no_pairs_sum_to_zero(shape, device):
    differences, total = sums.pair_difference(torch.empty(shape, device=device))
    assert differences.shape == (shape[0] // 2, shape[1])
    assert total.shape == (shape[1],) and (total == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_pairs_repeat_to_the_bit(device):
    W = drawn((806, 3000), seed=7).to(device)
    first = sums.pair_difference(W)
    for _ in range(5):
        assert all(map(torch.equal, sums.pair_difference(W), first))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_pairs_of_an_unaligned_contiguous_view(offset, device):
    W = drawn((16 * 64 + offset,), seed=offset)[offset:].view(16, 64)
    there = drawn((16 * 64 + offset,), seed=offset).to(device)[offset:].view(16, 64)
    differences, total = sums.pair_difference(there)
    assert torch.equal(differences.cpu(), W[0::2] - W[1::2])
    assert_sums(total.cpu(), W)


@pytest.mark.parametrize("offset", [0, 1, 4, 8, 16])
@pytest.mark.parametrize("shape", [(2060, 8192), (2060, 8208), (2062, 8191), (520, 4096)])
def test_large_differences_are_written_whole_and_nothing_beside(shape, offset):
    """From 32 MB on they go past the caches, where vectors of D are aligned."""
    (N, K), poison = shape, -17.0
    W = drawn(shape, seed=19)
    memory = torch.full((N // 2 * K + offset + 8,), poison)
    differences = memory[offset : offset + N // 2 * K].view(N // 2, K)
    s = torch.full((K,), math.nan, dtype=torch.float64)
    sums._pair_difference("cpu")(W, differences, D(0, K), s)
    assert torch.equal(differences, W[0::2] - W[1::2])
    assert torch.equal(s, sums.column_sum(W)), "the same bits"
    assert (memory[:offset] == poison).all() and (memory[offset + N // 2 * K :] == poison).all()


@needs_gpu
@pytest.mark.parametrize("slices", [1, 3, 40])
@pytest.mark.parametrize("K", [260, 261])
def test_on_a_gpu_pairs_are_written_whole_and_nothing_beside(K, slices):
    """Slices that are uneven, and more of them than there are pairs, into poisoned memory."""
    W = drawn((2 * 37, K), seed=17)
    differences = torch.full((37 * K + 16,), math.nan, device="cuda")
    s = torch.full((K + 16,), math.nan, dtype=torch.float64, device="cuda")
    for memory in (differences, s):
        memory[:8], memory[-8:] = 17.0, 17.0
    partial = torch.full((slices, K), math.nan, dtype=torch.float64, device="cuda")
    sums._pair_difference("cuda")(W.cuda(), differences[8:-8].view(37, K), partial, s[8:-8])
    assert torch.equal(differences[8:-8].view(37, K).cpu(), W[0::2] - W[1::2])
    assert_sums(s[8:-8].cpu(), W)
    for memory in (differences, s):
        assert (memory[:8] == 17).all() and (memory[-8:] == 17).all(), "written beside"


@needs_gpu
def test_on_a_gpu_pairs_want_a_slice():
    W, D_, s = torch.zeros(4, 8), torch.empty(2, 8), torch.empty(8, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="partial: wants at least one slice"):
        sums._pair_difference("cuda")(W.cuda(), D_.cuda(), D(0, 8).cuda(), s.cuda())


@needs_nvcc
@pytest.mark.parametrize("name", ["column_sum", "pair_difference"])
@pytest.mark.parametrize("arch", ["80", "90", "100"])
def test_compiles_without_spills(name, arch):
    file = paths.kernels() / name / f"{name}.cu"
    include = [file.parent, paths.kernels() / "common"]
    report = build.cubin(file, arch=arch, include=include, flags=["-DWB_CUDA"])
    assert len(report.kernels) == 3  # by 16 bytes, by 4; the slices
    for kernel in report.kernels:
        assert kernel.spill_bytes == kernel.stack_bytes == 0, kernel


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 20), st.integers(0, 2100), st.integers(0, 5))
def test_differences_of_any_shape(M, K, seed):
    W = drawn((2 * M, K), seed)
    differences, total = sums.pair_difference(W)
    assert torch.equal(differences, W[0::2] - W[1::2])
    assert torch.equal(total, sums.column_sum(W))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [1030, 1032])
@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_differences_that_are_not_finite(value, columns, device):
    W = drawn((8, columns), seed=14)
    W[3, 5], W[2, 5] = value, -value
    differences, total = (found.cpu() for found in sums.pair_difference(W.to(device)))
    wanted = W[0::2] - W[1::2]
    torch.testing.assert_close(differences, wanted, rtol=0, atol=0, equal_nan=True)
    finite = W.isfinite().all(0)
    assert_sums(total[finite], W[:, finite])
    assert total[~finite].isnan().all(), "inf less inf"


@pytest.mark.parametrize("kind", ["float64", "transposed", "no compiler"])
def test_torch_does_what_the_kernels_do_not(kind, monkeypatch):
    W = drawn((50, 70), seed=15)
    if kind == "no compiler":
        monkeypatch.setattr(sums, "_column_sum", lambda device: None)
        monkeypatch.setattr(sums, "_pair_difference", lambda device: None)
    W = W.double() if kind == "float64" else W.T.contiguous().T if kind == "transposed" else W
    differences, total = sums.pair_difference(W)
    assert torch.equal(differences, W[0::2] - W[1::2]) and differences.dtype == W.dtype
    assert_sums(total, W)


def test_pairs_that_the_kernel_runs(monkeypatch):
    """The tests above hold for the kernel, which is what pair_difference takes."""
    seen, kernel = [], sums._pair_difference("cpu")
    monkeypatch.setattr(
        sums, "_pair_difference", lambda device: lambda *a: (seen.append(a), kernel(*a))[1]
    )
    sums.pair_difference(drawn((4, 6)))
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((F(3), F(1, 3), D(0, 3), D(3)), r"W: wants a \(2 M, K\) matrix"),
        ((F(3, 4), F(1, 4), D(0, 4), D(4)), r"W: got 3 rows; wants pairs of them"),
        ((D(2, 4), F(1, 4), D(0, 4), D(4)), r"W: got float64 \(2, 4\); wants a contiguous float32"),
        ((F(4, 2).T, F(1, 4), D(0, 4), D(4)), r"W: got float32 \(2, 4\), not contiguous"),
        ((F(4, 4), F(1, 4), D(0, 4), D(4)), r"D: got float32 \(1, 4\); wants .* float32 \(2, 4\)"),
        ((F(2, 4), F(1, 4), D(0, 3), D(4)), r"partial: got float64 \(0, 3\); wants .* \(\*, 4\)"),
        ((F(2, 4), F(1, 4), D(0, 4), D(3)), r"s: got float64 \(3\); wants .* float64 \(4\)"),
    ],
)
def test_pairs_that_the_binding_refuses(arguments, words):
    with pytest.raises(RuntimeError, match=words):
        sums._pair_difference("cpu")(*arguments)


@pytest.mark.parametrize("rows", [2, 2048])
def test_large_folds_are_written_whole(rows):
    """In pages of both sizes, to the last element."""
    W = drawn((2 * rows, 1500), seed=16)
    differences, _ = sums.pair_difference(W)
    assert torch.equal(differences, W[0::2] - W[1::2])
    means, exact = sums.group_mean(W, 2, torch.float32)
    torch.testing.assert_close(exact, (W[0::2].double() + W[1::2].double()) / 2)
    assert torch.equal(means, exact.float())
