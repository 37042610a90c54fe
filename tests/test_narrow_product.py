"""Products that are rounded no more than a BLAS rounds them: the narrow kernel, and k in parts.

The narrow kernel's bound is that of its order: a chain of K / lanes products and additions, then a
tree of at most 16 lanes, all in float.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import drawn, needs_compiler
from torch import Tensor

from workbook import cpuinfo, gemm, ops, paths

U32 = 2.0**-24
LANES = 4  # at least: of 16 bytes
FOLDER = paths.kernels() / "narrow_product"
# B, K, N: around the tile of rows and of features, a vector, and a piece of k
SHAPES = [(1, 1, 1), (3, 7, 5), (4, 16, 3), (5, 17, 4), (6, 15, 9), (20, 1031, 13), (68, 64, 33),
          (0, 5, 3), (3, 0, 5), (3, 5, 0), (11, 300, 130), (7, 4096, 5), (7, 4097, 5),
          (8, 9001, 6)]  # fmt: skip


@pytest.fixture(scope="module")
def run():
    return ops.kernel_library("narrow_product", "cpu", [FOLDER / "narrow_product.cpp"]).op("run")


def poisoned(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """z (rows, columns) of a wider memory, all NaN but its margins."""
    memory = torch.full((rows + 2, columns + 9), math.nan)
    memory[0], memory[-1], memory[:, :4], memory[:, columns + 4 :] = 7.0, 7.0, 7.0, 7.0
    return memory[1 : rows + 1, 4 : columns + 4], memory


def assert_product(run, x: Tensor, W: Tensor) -> None:
    z, memory = poisoned(x.size(0), W.size(0))
    run(x, W, z)
    outside = memory.clone()
    outside[1 : x.size(0) + 1, 4 : W.size(0) + 4] = 7.0
    assert (outside == 7.0).all(), "written outside"
    true, size = x.double() @ W.double().T, x.double().abs() @ W.double().abs().T
    chain = x.size(1) / LANES + 5
    assert not z.isnan().any(), "not all is written"
    assert ((z - true).abs() <= 1.01 * chain * U32 * size + 2.0**-149).all()


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_within_bound(run, shape):
    B, K, N = shape
    assert_product(run, drawn((B, K), 3), drawn((N, K), 4))


@needs_compiler
@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(0, 14),
    features=st.integers(0, 70),
    outs=st.integers(0, 14),
    gap=st.integers(0, 5),
    offset=st.integers(0, 3),
    overlap=st.booleans(),
)
def test_rows_at_any_distance(run, rows, features, outs, gap, offset, overlap):
    stride = gap if overlap else features + gap
    memory = drawn((offset + max(rows, outs) * stride + features + 1,), gap)
    x, W = (memory.as_strided((n, features), (stride, 1), offset) for n in (rows, outs))
    assert_product(run, x, W)


@needs_compiler
def test_a_chain_is_short(run):
    """1, then what is rounded away beside it: one chain over all of k would lose it all."""
    x, W = torch.full((6, 4096), 2.0**-25), torch.ones(5, 4096)
    x[:, 0] = 1.0
    z = torch.empty(6, 5)
    run(x, W, z)
    true = 1 + 4095 * 2.0**-25
    assert ((z - true).abs() <= (4096 / LANES) * 2.0**-25).all()
    total = torch.ones(())
    for _ in range(4095):
        total = total + 2.0**-25
    assert (total - true).abs() > (4096 / LANES) * 2.0**-25, "the control: one chain"


@needs_compiler
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_row_and_feature(run, value):
    x, W = drawn((11, 37), 3), drawn((9, 37), 4)
    clean, z = (torch.empty(11, 9) for _ in range(2))
    run(x, W, clean)
    for row in (0, 5, 10):
        spoiled = x.clone()
        spoiled[row, 17] = value
        run(spoiled, W, z)
        others = [i for i in range(11) if i != row]
        assert not z[row].isfinite().any() and torch.equal(z[others], clean[others])
    spoiled = W.clone()
    spoiled[8, 36] = value
    run(x, spoiled, z)
    assert not z[:, 8].isfinite().any() and torch.equal(z[:, :8], clean[:, :8])


@needs_compiler
def test_bits_depend_on_row_and_feature_alone(run):
    x, W = drawn((23, 1030), 3), drawn((30, 1030), 4)
    z = torch.empty(23, 30)
    run(x, W, z)
    before = torch.get_num_threads()
    try:
        for threads, rows, outs in [(1, 23, 30), (2, 7, 30), (3, 23, 5), (2, 1, 1), (8, 6, 29)]:
            torch.set_num_threads(threads)
            part = torch.empty(rows, outs)
            run(x[-rows:], W[-outs:], part)
            assert torch.equal(part, z[-rows:, -outs:])
    finally:
        torch.set_num_threads(before)


WRONG = [
    (0, lambda t: t.double(), "x"), (0, lambda t: t[0], "x"), (0, lambda t: t.T, "x"),
    (1, lambda t: t.double(), "W"), (1, lambda t: t[:, 1:], "W"), (1, lambda t: t.T, "W"),
    (2, lambda t: t[1:], "z"), (2, lambda t: t[:, 1:], "z"), (2, lambda t: t.double(), "z"),
]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("case", range(len(WRONG)))
def test_a_wrong_argument_is_named(run, case):
    at, change, named = WRONG[case]
    given = [drawn((3, 8)), drawn((5, 8)), torch.empty(3, 5)]
    run(*given)
    given[at] = change(given[at])
    with pytest.raises(RuntimeError, match=rf"^{named}: .*wants"):
        run(*given)


# --- which product is taken -------------------------------------------------------------------


def produced(x: Tensor, weight: Tensor) -> list[Tensor]:
    """Into a block of a wider matrix, and as a new one."""
    out, memory = poisoned(x.size(0), weight.size(0))
    product = gemm.short_chains(x)
    assert product(weight, out) is out
    assert (memory[0] == 7).all() and (memory[-1] == 7).all()
    assert (memory[:, :4] == 7).all() and (memory[:, -5:] == 7).all()
    return [out, product(weight)]


# Of the kernel, of oneDNN by parts and whole, and of a BLAS, where the product is small; of more
# rows than go together, the last ones few, and as many.
TAKEN = [(5, 700, 300), (80, 700, 300), (200, 3000, 90), (900, 100, 90), (100, 20, 30),
         (gemm.TOGETHER + 3, 700, 90), (2 * gemm.TOGETHER, 700, 30)]  # fmt: skip


@pytest.mark.parametrize("shape", TAKEN, ids=str)
@pytest.mark.parametrize("layout", ["rows", "transposed", "columns skipped"])
def test_any_product_errs_no_more_than_twice_a_blas(shape, layout):
    rows, columns, outs = shape
    x = drawn((rows, columns), 3).abs()
    weight = {  # of one sign: all roundings go one way
        "rows": drawn((outs, columns), 4).abs(),
        "transposed": drawn((columns, outs), 4).abs().T,
        "columns skipped": drawn((outs, 2 * columns), 4).abs()[:, ::2],
    }[layout]
    true = x.double() @ weight.double().T
    own = (x @ weight.T - true).norm()
    for z in produced(x, weight):
        assert (z - true).norm() <= 2 * own


def test_many_rows_go_some_at_a_time_and_each_where_it_belongs(monkeypatch):
    seen, whole = [], gemm.short_chains
    monkeypatch.setattr(gemm, "short_chains", lambda x: seen.append(x.size(0)) or whole(x))
    x, weight = drawn((2 * gemm.TOGETHER + 5, 300), 1), drawn((7, 300), 2)
    z = gemm.short_chains(x)(weight)
    assert seen[1:] == [gemm.TOGETHER, gemm.TOGETHER, 5]
    torch.testing.assert_close(z.double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-4)


def test_control_one_chain_errs_more():
    """What oneDNN makes of a long k at once: the reason for the parts."""
    if gemm._onednn() is None:
        pytest.skip("this torch has no oneDNN")
    x, weight = drawn((150, 2048), 3).abs(), drawn((300, 2048), 4).abs()
    true = x.double() @ weight.double().T
    one, several = ((z - true).norm() for z in (gemm.product(x, weight), produced(x, weight)[1]))
    assert several < 0.7 * one


def test_who_makes_the_product(monkeypatch):
    """The kernel for few rows, oneDNN by parts for more, neither for a weight it can't read."""
    seen = []
    kernel, linear = gemm._narrow(), gemm._onednn()
    if kernel is None or linear is None:
        pytest.skip("no compiler, or no oneDNN in this torch")

    class Linear:
        def __call__(self, *a):
            seen.append("parts")
            return linear(*a)

        binary = staticmethod(linear.binary)

    monkeypatch.setattr(gemm, "_narrow", lambda: lambda *a: (seen.append("narrow"), kernel(*a)))
    monkeypatch.setattr(gemm, "_onednn", Linear)
    monkeypatch.setattr(gemm, "_in_halves", lambda: False)
    weight = drawn((300, 4500), 4)
    for rows, taken, who in [
        (gemm.NARROW, weight, ["narrow"]),
        (gemm.NARROW, weight[:, :256], ["narrow"]),
        (gemm.NARROW, drawn((1100, 255), 4), ["parts"]),
        (gemm.NARROW + 1, weight[:, :999].contiguous(), ["parts"]),
        (gemm.NARROW + 1, weight, ["parts"]),
        (gemm.NARROW + 1, weight[:, :1000], ["narrow"]),
        (gemm.NARROW, drawn((4500, 300), 4).T, []),
        (gemm.NARROW + 1, drawn((4500, 300), 4).T, []),
        (100, weight[:2], []),
    ]:
        seen.clear()
        gemm.short_chains(drawn((rows, taken.size(1)), 3))(taken)
        assert seen == who


@needs_compiler
@pytest.mark.parametrize(
    ("rows", "chunks"),
    [(100, [100]), (260, [260]), (383, [383]), (384, [192, 192]), (1024, [256] * 4),
     (1030, [256] * 4 + [6]), (700, [234, 234, 232]), (1, [1]), (0, [])],
)  # fmt: skip
def test_where_the_kernel_is_as_fast_it_takes_all_rows(rows, chunks, monkeypatch):
    seen, kernel = [], gemm._narrow()

    def narrow(x: Tensor, *others: Tensor) -> None:
        seen.append(x.size(0))
        kernel(x, *others)

    monkeypatch.setattr(gemm, "_narrow", lambda: narrow)
    monkeypatch.setattr(gemm, "_in_halves", lambda: True)
    x, weight = drawn((rows, 300), 1), drawn((7, 300), 2)
    z, memory = gemm.short_chains(x)(weight), torch.full((rows, 9), math.nan)
    assert seen == chunks
    torch.testing.assert_close(z.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
    gemm.short_chains(x)(weight, memory[:, 1:8])
    assert torch.equal(memory[:, 1:8], z) and memory[:, [0, 8]].isnan().all()
    seen.clear()
    gemm.short_chains(x[:, :255])(weight[:, :255])
    assert not seen, "short rows are not for it"


CPUINFO = "processor\t: 0\nvendor_id\t: {}\ncpu family\t: {}\nmodel\t\t: 17\n"


@pytest.mark.parametrize(
    ("text", "capability", "in_halves"),
    [
        (CPUINFO.format("AuthenticAMD", 25), "AVX512", True),
        (CPUINFO.format("AuthenticAMD", 25), "AVX2", False),  # Zen 3, or told to
        (CPUINFO.format("AuthenticAMD", 26), "AVX512", False),
        (CPUINFO.format("AuthenticAMD", 255), "AVX512", False),
        (CPUINFO.format("GenuineIntel", 25), "AVX512", False),
        ("", "AVX512", False),
        (None, "AVX512", False),
    ],
)
def test_which_cpus_multiply_in_halves(text, capability, in_halves, monkeypatch, tmp_path):
    monkeypatch.setattr(cpuinfo, "FILE", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    if text is not None:
        cpuinfo.FILE.write_text(text)
    assert gemm._in_halves.__wrapped__() is in_halves
