"""The kernels of the maxpool chain: each rung within the bound of its own arithmetic.

CPU rungs are built and run, the best one both by halves of a product and by windows; CUDA rungs run
where a GPU is, their forms on a CPU around a plain kernel. The guard is run with and without.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
from batchnorm import with_headers
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import (
    assert_argument_is_named,
    assert_opens_well,
    drawn,
    needs_compiler,
    needs_gpu,
    needs_nvcc,
)
from maxpool import (
    ALL_CALLS,
    CALLS,
    CPU_CALLS,
    FOLDER,
    HALVED,
    PROBLEM,
    RUNGS,
    U32,
    U64,
    assert_near,
    call_of,
    chain,
    device_of,
    file_of,
    library,
    magnitudes,
    parameters,
    rung,
    running,
    takes,
    values,
    windows,
)
from torch import Tensor

from workbook import build, ops, paths

INF, NAN = math.inf, math.nan
ARCHITECTURES = ["80", "90", "100"]
FILES = sorted(p for p in FOLDER.iterdir() if p.suffix in (".cpp", ".cu") and p.stem != "binding")
every_call = pytest.mark.parametrize("name", ALL_CALLS)
by_halves = pytest.mark.parametrize(
    "name", [c for c in ALL_CALLS if CALLS[c.values[0]][1] in HALVED]
)


def assert_right(name: str, call, x: Tensor, given: tuple) -> None:
    assert_near(call(x, *given), x, *given, form=CALLS[name][1])


# --- right, at any shape, stride, pool and scale ----------------------------------------------

# B, K, N, pool, scale: pools of 1, 2, 3, more than half, all; features left over; vectors of a CPU
# and of a GPU and one more, windows of more than a warp and of more than there are warps.
SHAPES = [
    (1, 1, 1, 1, 0.5), (1, 1, 2, 2, -0.5), (3, 7, 5, 2, -1.5), (5, 33, 17, 17, 1.0),
    (17, 4, 9, 5, -3.0), (2, 129, 31, 3, 0.0), (9, 16, 32, 2, 2.0), (9, 17, 34, 2, 2.0),
    (4, 15, 30, 2, -2.0), (3, 100, 101, 51, 0.5), (3, 2051, 7, 4, 0.5), (2, 2052, 8, 2, 0.5),
    (2, 9001, 35, 2, 2.0), (65, 20, 1100, 2, 2.0), (65, 20, 1101, 1, -2.0), (5, 20, 1100, 32, 1.0),
    (5, 3, 1100, 31, 1.0), (1100, 20, 67, 2, 1.0), (130, 70, 600, 3, -0.1), (2, 5, 4200, 2, 1.0),
    (2, 5, 4201, 7, 1.0), (3, 2, 40000, 2000, 1.0), (0, 7, 5, 2, 2.0), (3, 0, 6, 2, -2.0),
    (3, 0, 5, 1, 1.0), (4, 3, 17000, 2, 0.5),
]  # fmt: skip


@pytest.mark.parametrize(("name", "shape"), [
    pytest.param(*c.values, s, marks=c.marks, id=f"{c.values[0]}-{s}")
    for c in ALL_CALLS for s in SHAPES if takes(c.values[0], s[3])
])  # fmt: skip
def test_within_bound(name, shape):
    B, K, N, pool, scale = shape
    device = device_of(name)
    given = parameters(K, N, pool, scale, device=device)
    assert_right(name, rung(name), drawn((B, K), 7).to(device), given)


@every_call
def test_many_short_rows(name):
    """More rows than a grid's y or z may have, and than one block has threads."""
    given = parameters(3, 4, 2, 2.0, device=device_of(name))
    assert_right(name, rung(name), drawn((70001, 3), 7).to(device_of(name)), given)


@every_call
@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(0, 19), features=st.integers(0, 70), outs=st.integers(2, 70),
    pool=st.integers(1, 40), scale=st.sampled_from([2.0, 1.0, 0.0, -0.5, -3.0]),
    gap=st.integers(0, 7), offset=st.integers(0, 5), overlap=st.booleans(),
    shift=st.sampled_from([0.0, -10.0, 1e4]),
)  # fmt: skip
def test_within_bound_at_any_stride(
    name, rows, features, outs, pool, scale, gap, offset, overlap, shift
):
    """Rows at any distance and alignment; overlapping rows, or one row for all."""
    stride, device = gap if overlap else features + gap, device_of(name)
    memory = drawn((offset + rows * stride + features + 1,), outs).to(device)
    x = memory.as_strided((rows, features), (stride, 1), offset)
    pool = min(pool, outs) if takes(name, pool) else pool % 2 + 1
    weight, bias, *options = parameters(features, outs, pool, scale, 3, device)
    bias[1::2] += shift
    assert_right(name, rung(name), x, (weight, bias, *options))


@every_call
@pytest.mark.parametrize("view", ["transposed", "columns skipped", "expanded"])
def test_inputs_and_weights_that_are_no_plain_rows(name, view):
    base, device = drawn((40, 40), 5).to(device_of(name)), device_of(name)
    x = {"transposed": base.T, "columns skipped": base[:, ::2], "expanded": base[:1].expand(9, -1)}
    x, call = x[view], rung(name)
    weight, bias, pool, scale = parameters(x.size(1), 31, 2, 2.0, device=device)
    assert_right(name, call, x, (weight, bias, pool, scale))
    assert_right(name, call, x, (weight.T.contiguous().T, bias, 1, -scale))
    assert_right(name, call, x, (weight, bias.repeat_interleave(2)[::2], pool, scale))


@every_call
@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e30], ids=str)
def test_values_of_every_size(name, size):
    """Denormals and large values, the biases with them."""
    weight, bias, *options = parameters(101, 12, 2, 2.0, device=device_of(name))
    x = (drawn((5, 101), 3).double() * size).float().to(device_of(name))
    bias = (bias.double() * size).float()
    assert_right(name, rung(name), x, (weight, bias, *options))


@every_call
@pytest.mark.parametrize("scale", [0.0, -0.0, -1.0, -2.5, 1e300, -1e300, 1e-300, NAN])
def test_a_scale_of_any_kind(name, scale):
    """None, of either sign, and beyond float32: an infinite product is that."""
    given = parameters(9, 12, 2, scale, device=device_of(name))
    x = drawn((6, 9), 3).to(device_of(name))
    y = rung(name)(x, *given)
    if scale != scale or abs(scale) > 1e38:
        torch.testing.assert_close(y, values(x, *given).float(), equal_nan=True)
        return
    assert_right(name, rung(name), x, given)
    assert (y == 0).all() or abs(scale) >= 1


@every_call
def test_a_sum_beyond_float32_is_infinite_before_it_is_scaled(name):
    """As torch's is: no scale brings it back, and 0 makes it NaN."""
    call, device = rung(name), device_of(name)
    biases = [3e38] * 4
    for scale, wanted in ((0.1, INF), (-0.1, -INF), (0.0, NAN)):
        y = of_biases(call, biases, 1, scale, device)
        torch.testing.assert_close(y, torch.full((1,), wanted), equal_nan=True)
    y = of_biases(call, [1e38, 1e37, -3e38, 2e38], 2, 1.0, device)
    torch.testing.assert_close(y, torch.tensor([3e38]))


# --- what is not finite -----------------------------------------------------------------------


def of_biases(call, biases: list[float], pool: int, scale: float, device: str) -> Tensor:
    """y of one row where z is the biases."""
    x, weight = torch.zeros(1, 5, device=device), torch.zeros(len(biases), 5, device=device)
    return call(x, weight, torch.tensor(biases, device=device), pool, scale).cpu()


@every_call
@pytest.mark.parametrize("pool", [1, 2])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("row", [0, 2, 8])
def test_what_is_not_finite_stays_in_its_row(name, pool, value, row):
    device = device_of(name)
    call, given = rung(name), parameters(37, 71, pool, -0.5, device=device)
    x = drawn((9, 37), 3).to(device)
    clean, others = call(x, *given), [i for i in range(9) if i != row]
    for column in (0, 17, 36):
        spoiled = x.clone()
        spoiled[row, column] = value
        y = call(spoiled, *given)
        assert torch.equal(y[others], clean[others]) and not y[row].isfinite()
        if CALLS[name][1] not in HALVED:  # a dot product with sums of weights can't say inf - inf
            assert_near(y, spoiled, *given, form=CALLS[name][1])


@every_call
def test_a_huge_row_leaves_the_others_alone(name):
    device = device_of(name)
    call, given = rung(name), parameters(37, 71, 2, -0.5, device=device)
    x = drawn((9, 37), 3).to(device)
    clean = call(x, *given)
    x[4] *= 1e30
    y, others = call(x, *given), [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(y[others], clean[others])
    assert_near(y, x, *given, form=CALLS[name][1])


@every_call
@pytest.mark.parametrize("pool", [1, 2, 3, 33])
@pytest.mark.parametrize("count", [99, 1200])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_one_z_that_is_not_finite(name, pool, count, value):
    """NaN wins, +inf wins, -inf loses to its neighbours; in any place of its window."""
    if not takes(name, pool):
        pool = 2
    call, zeros = rung(name), (torch.zeros(1, 5), torch.zeros(count, 5))
    for place in {0, 1, pool - 1, count // 2, count // pool * pool - 1}:
        biases = drawn((count,), 3)
        biases[place] = value
        y = of_biases(call, biases.tolist(), pool, -0.5, device_of(name))
        wanted = values(*zeros, biases, pool, -0.5).float()
        torch.testing.assert_close(y, wanted, rtol=2 * U32, atol=0, equal_nan=True)
        assert math.isfinite(wanted.item()) == (value == -INF and pool > 1)


@every_call
@pytest.mark.parametrize("pair", [(INF, -INF), (-INF, -INF), (INF, INF), (NAN, INF), (-INF, NAN)])
def test_a_window_of_two_that_are_not_finite(name, pair):
    wanted = NAN if any(map(math.isnan, pair)) else max(pair)
    for biases in ([*pair, 1.0, 2.0], [1.0, 2.0, *pair], [*reversed(pair), 0.5, 7.0]):
        y = of_biases(rung(name), biases, 2, 1.0, device_of(name))
        torch.testing.assert_close(y, torch.tensor([wanted]), equal_nan=True)
    y = of_biases(rung(name), [INF, 0.0, -INF, -INF], 2, 1.0, device_of(name))
    assert y.isnan().all(), "inf - inf"


@every_call
@pytest.mark.parametrize("value", [NAN, INF, -INF, 3e38])
@pytest.mark.parametrize(("pool", "left"), [(2, 1), (5, 3)])
def test_features_that_are_left_over_do_not_count(name, value, pool, left):
    if not takes(name, pool):
        pool, left = 2, 1
    device = device_of(name)
    call, (weight, bias, *options) = rung(name), parameters(9, 10 + left, pool, 2.0, device=device)
    x = drawn((6, 9), 3).to(device)
    clean = call(x, weight, bias, *options)
    weight[10:], bias[10:] = value, value
    assert torch.equal(call(x, weight, bias, *options), clean)


@pytest.mark.parametrize("name", [c for c in ALL_CALLS if CALLS[c.values[0]][1] == "tail"])
@pytest.mark.parametrize("pool", [2, 3, 31, 40])
def test_a_tail_alone_drops_what_is_left_over(name, pool):
    """Torch's part of it gives whole windows; the kernel does not rely on that."""
    z, device = drawn((5, 79), 3), device_of(name)
    y, rest = torch.full((5,), NAN), 79 % pool
    z[:, 79 - rest :] = NAN
    run, there = library([file_of(name)], *CALLS[name]).op("run").default, y.to(device)
    run(z.to(device), pool, -0.5, there)
    wanted = values(torch.eye(5), z.nan_to_num().T, torch.zeros(79), pool, -0.5)
    torch.testing.assert_close(there.cpu(), wanted.float(), rtol=2 * U32, atol=0)


@needs_gpu
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("pool", [1, 2, 3, 4, 8, 31, 33, 600])
@pytest.mark.parametrize(("N", "start"), [(600, 0), (2048, 0), (2048, 1), (16_388, 0), (70_001, 0)])
def test_the_tail_of_a_whole_product(N, start, pool, biased):
    """By vectors of whole windows or by windows, z with its bias or without, at any alignment."""
    flags = chain.DIRECT.forms["split" if biased else "tail"].flags
    file = FOLDER / "04_gemm_block_tail.cu"
    run = ops.kernel_library(chain.SLUG, "cuda", [file], flags=flags).op("run").default
    room, bias = drawn((3 * N + start,), 3).cuda(), drawn((N + start,), 4).cuda()[start:]
    z, y = room[start:].view(3, N), torch.full((3,), NAN, device="cuda")
    used = N // pool * pool
    z[0, used:], z[1, used - 1], z[2, 0] = NAN, INF, NAN
    run(z, *([bias] if biased else []), pool, -0.5, y)
    told = z.double() + bias.double() if biased else z.double()
    wanted = -0.5 * windows(told[:, :used], pool).amax(2).sum(1)
    assert y[1] == -INF and y[2].isnan()
    bound = N // pool * 4 * U32 * 5 if biased else 2 * U32 * abs(wanted[0])  # z + b rounds
    assert abs(y[0] - wanted[0]) <= bound


@every_call
def test_ties_and_zeros_of_either_sign(name):
    for biases in ([1.5, 1.5, -2.0, -2.0], [0.0, -0.0, -0.0, 0.0], [-0.0, -0.0, -3.0, -3.0]):
        y = of_biases(rung(name), biases, 2, 1.0, device_of(name))
        assert y.item() == biases[0] + biases[2]


# --- the guard --------------------------------------------------------------------------------


@pytest.fixture
def flagged(monkeypatch):
    """Rows that a CPU computes directly, by the first element of x, which numbers them."""
    seen, kept = [], running.directly

    def watched(x: Tensor, *given: object) -> Tensor:
        seen.extend(x[:, 0].tolist())
        return kept(x, *given)

    monkeypatch.setattr(running, "directly", watched)
    return seen


def lowered(by: float, K: int = 33, N: int = 201, scale: float = 0.5, device: str = "cpu") -> tuple:
    """Every second bias lower: one side of each pair dominates."""
    weight, bias, *options = parameters(K, N, 2, scale, device=device)
    weight[:, 0] = 0  # x numbers its rows there
    bias[1::2] -= by
    return weight, bias, *options


def numbered(B: int, K: int = 33, seed: int = 7) -> Tensor:
    x = drawn((B, K), seed)
    x[:, 0] = torch.arange(B)
    return x


@by_halves
@pytest.mark.parametrize("scale", [0.5, -3.0, 0.0])
@pytest.mark.parametrize("by", [0.0, 10.0, 1e4, INF, -10.0, -1e4])
def test_rows_that_cancel_are_right(name, by, scale):
    """One side of every pair far below: half a product has A = -B but for what is left."""
    device = device_of(name)
    given, x = lowered(by, scale=scale, device=device), numbered(70).to(device)
    assert_right(name, rung(name), x, given)


@needs_compiler
@pytest.mark.parametrize("by", [1e4, INF], ids=str)
def test_a_row_that_is_flagged_is_rounded_once(by):
    """By far: without the guard it errs by half a product's roundings, with it by its own."""
    given, x = lowered(by, 301, 2001), numbered(40, 301)
    of_g, total = magnitudes(x, *given[:2])
    guarded, bare = (rung("cpu halves", limit=v)(x, *given).double() for v in (4.0, INF))
    true = values(x, *given)
    rows = ~(of_g <= 4 * total)
    if by == INF:
        assert rows.all(), "NaN is flagged, whatever the limit"
        assert torch.equal(guarded, bare)
    slack = U32 * true.abs() + 1e5 * U64
    assert ((guarded - true).abs() <= slack)[rows].all() and rows.sum() > 10
    assert by == INF or ((bare - true).abs() > 8 * slack)[rows].any()


def test_control_without_a_guard_a_masked_feature_is_nan():
    """In plain torch, biases in float32 too: far off where eager is not."""
    x = drawn((40, 301), 7)
    for by, least in ((10.0, 1e-5), (1e4, 1e-3)):
        given = lowered(by, 301, 2001)
        found = chain.plain(x, *chain.fold(torch.float32, *given[:3]), *given[2:])
        true, eager = values(x, *given), chain.reference(x, *given)
        error, own = (((y - true).abs() / true.abs()).max() for y in (found, eager))
        assert error > least and error > 20 * own
    given = lowered(INF, 301, 2001)
    found = chain.plain(x, *chain.fold(torch.float32, *given[:3]), *given[2:])
    assert found.isnan().all() and values(x, *given).isfinite().all()


@needs_compiler
@pytest.mark.parametrize("by", [0.0, 3.0, 10.0, 1e4], ids=str)
def test_exactly_the_rows_above_the_limit_are_flagged(by, flagged):
    given, x = lowered(by, 33, 401), numbered(200)
    of_g, total = magnitudes(x, *given[:2])
    rung("cpu halves")(x, *given)
    kappa = of_g / total
    for i in range(200):
        if abs(kappa[i] / running.LIMIT - 1) > 1e-4:  # not within the rounding of g
            assert (i in flagged) == (kappa[i] > running.LIMIT), kappa[i]
    assert by == 0.0 or 0 < len(flagged) < 200


@needs_compiler
def test_the_limit_itself_is_not_flagged(flagged):
    """One pair, u = 1 and v = -7: |u - v| is 4 times |A + B| = 2. Beyond, and NaN, it is."""
    call, x = rung("cpu halves"), torch.ones(1, 1)
    for low, many in ((-7.0, 0), (-7.000001, 1), (-6.9, 0), (NAN, 1), (-INF, 1)):
        flagged.clear()
        weight = torch.tensor([[1.0], [low]])
        call(x, weight, torch.zeros(2), 2, 1.0)
        assert len(flagged) == many, low
    call(x * 0, torch.tensor([[1.0], [-7.0]]), torch.zeros(2), 2, 1.0)
    assert len(flagged) == 1, "0 is no more than 4 times 0"


@needs_compiler
@pytest.mark.parametrize("family", ["uniform", "normal", "mean 1000"])
def test_no_row_is_flagged_as_weights_are_drawn(family, flagged):
    model, x = PROBLEM.Model(256, 2048, 2, 0.5), drawn((64, 256), 3)
    x = {"uniform": torch.rand(64, 256), "normal": x, "mean 1000": x + 1000}[family]
    rung("cpu halves")(x, model.matmul.weight, model.matmul.bias, 2, 0.5)
    assert not flagged


@needs_compiler
def test_a_pool_of_one_has_no_guard(flagged):
    """Its sum is all in float64; a row that is NaN is not computed again."""
    weight, bias, _, scale = lowered(1e4)
    x = numbered(20)
    assert_near(rung("cpu halves")(x, weight, bias, 1, scale), x, weight, bias, 1, scale,
                form="blocks")  # fmt: skip
    x[3, 5] = NAN
    assert rung("cpu halves")(x, weight, bias, 1, scale)[3].isnan() and not flagged


@needs_gpu
@pytest.mark.parametrize("B", [1, 31, 33, 4095, 4097, 9000])
@pytest.mark.parametrize("N", [2, 127, 128, 130, 1001])
def test_flagged_rows_of_a_gpu(B, N):
    """More than a tile of them, than are looked at at once; some, none and all."""
    x = drawn((B, 70), 7).cuda()
    for by in (0.0, 10.0, INF):
        given = lowered(by, 70, N, device="cuda")
        assert_right("05_half_gemm_guard", rung("05_half_gemm_guard"), x, given)


# --- the same on every run --------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("name", [n for n in CALLS if n not in CPU_CALLS])
def test_runs_repeat_to_the_bit_on_a_gpu(name):
    given, x = lowered(10.0, 2050, 320, device="cuda"), drawn((430, 2050), 3).cuda()
    call = rung(name)
    y = call(x, *given)
    assert all(torch.equal(call(x, *given), y) for _ in range(5))


def alone(name: str, K: int = 33, N: int = 4001):
    """rows -> what a kernel makes of them, without torch's product, whose bits may depend on the
    batch: (y,) or the three sums."""
    form, run = CALLS[name][1], library([file_of(name)], *CALLS[name]).op("run").default
    weight, bias, *options = parameters(K, N, 2, 0.5)
    x, z, none = drawn((43, K), 3), drawn((43, N), 4), torch.empty(0, dtype=torch.float64)
    w_sum, c = (drawn((n,), 5).double() for n in (K, N))

    def call(rows: object) -> Tensor:
        count = x[rows].size(0)
        found = (
            torch.full((count,), NAN)
            if form in ("chain", "tail")
            else torch.ones(count, 3).double()
        )
        if form == "chain":
            run(x[rows], weight[:300], bias[:300], *options, found)
        elif form == "tail":
            run(z[rows], *options, found)
        elif form == "blocks":
            run(x[rows], w_sum, z[rows], c, 0, found)
        else:
            run(x[rows][:, :0], none, z[rows], none, 2, found)
        return found

    return call


@needs_compiler
@pytest.mark.parametrize("name", CPU_CALLS)
def test_bits_depend_on_the_row_alone(name):
    """Not on the run, the batch around it, its order, or its place in it; nor on threads, from one
    to more than there are rows."""
    call, before = alone(name), torch.get_num_threads()
    y, order = call(slice(None)), torch.randperm(43, generator=torch.Generator().manual_seed(1))
    try:
        for threads in (before, 1, 3, 8):
            torch.set_num_threads(threads)
            for rows in (slice(None), order, slice(0, 1), slice(5, 8), slice(1, None), slice(0, 2)):
                assert torch.equal(call(rows), y[rows])
    finally:
        torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("block", [7, 40, 1000])
@pytest.mark.parametrize(("name", "pool"), [
    (name, pool) for name in ("cpu halves", "cpu windows") for pool in (1, 2, 3)
    if takes(name, pool)
])  # fmt: skip
def test_a_product_by_blocks(name, block, pool, monkeypatch):
    """The same sums in other pieces: a last digit at most."""
    weight, bias, _, scale = lowered(2.0, N=47)
    given, x = (weight, bias, pool, scale), numbered(29)
    whole = rung(name)(x, *given)
    monkeypatch.setattr(running, "BLOCK", block)
    monkeypatch.setattr(running, "ROWS", 5)
    y = rung(name)(x, *given)
    assert_right(name, rung(name), x, given)
    torch.testing.assert_close(y, whole, rtol=1e-6, atol=1e-4)


# --- the forms of a GPU, around a plain kernel ------------------------------------------------

PLAIN = """
    #include "problem.h"
    static double direct(const Pooled& p, int64_t i) {
      double total = 0;
      for (int64_t m = 0; m < p.M; ++m) {
        double z[2] = {p.b[2 * m], p.b[2 * m + 1]};
        for (int64_t k = 0; k < p.K; ++k)
          for (int j = 0; j < 2; ++j)
            z[j] += static_cast<double>(p.x[i * p.x_stride + k]) * p.W[(2 * m + j) * p.K + k];
        total += z[0] > z[1] || z[0] != z[0] ? z[0] : z[1];
      }
      return total;
    }
    void launch(const Pooled& p, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        double sum = *p.b_sum, size = 0;
        for (int64_t k = 0; k < p.K; ++k) sum += p.x[i * p.x_stride + k] * p.w_sum[k];
        for (int64_t m = 0; m < p.M; ++m) {
          sum += std::fabs(p.g[i * p.M + m] + p.c[m]);
          size += std::fabs(static_cast<double>(p.g[i * p.M + m]));
        }
        p.flags[i] = p.M > 0 && !(size <= p.limit * std::fabs(sum));
        for (int64_t n = 0; n < (2 * p.M + kGuardFeatures - 1) / kGuardFeatures; ++n)
          p.partial[n * p.B + i] = 0;  // the room that is asked for is there
        p.y[i] = scaled(p.flags[i] ? direct(p, i) : sum / p.pool, p.scale);
      }
      *p.done = 0;
    }"""


@needs_compiler
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[3] <= 2], ids=str)
@pytest.mark.parametrize("by", [0.0, 10.0, INF])
def test_the_form_of_a_gpu(shape, by):
    B, K, N, pool, scale = shape
    weight, bias, *options = parameters(K, N, pool, scale)
    bias[1::2] -= by if pool == 2 else 0
    x, given = drawn((B, K), 7), (weight, bias, *options)
    assert_near(call_of({"plain.cpp": PLAIN}, "cpu", "half")(x, *given), x, *given, form="half")


@needs_compiler
@pytest.mark.parametrize(("form", "name"), [("half", ""), ("tail", "cpu_02_gemm_then_tail")])
def test_forms_of_a_gpu_by_blocks_of_rows(form, name, monkeypatch):
    """As many rows at a time as a product may have elements."""
    call = rung(name) if name else call_of({"plain.cpp": PLAIN}, "cpu", form)
    x, given = drawn((29, 40), 7), lowered(3.0, 40, 31)
    monkeypatch.setattr(running, "ELEMENTS", 100)
    assert_near(call(x, *given), x, *given, form=form)


# --- the binding's checks ---------------------------------------------------------------------

B, K, N, M = 3, 8, 13, 6


def arguments(form: str) -> dict[str, object]:
    """What the op "run" of a form takes, by name."""
    weight, bias, *_ = parameters(K, N, 2, 2.0)
    x, y, options = drawn((B, K)), torch.empty(B), {"pool": 2, "scale": 2.0}
    differences, c, w_sum, b_sum = chain.fold(torch.float64, weight, bias, 2)
    if form == "chain":
        return {"x": x, "weight": weight, "bias": bias, **options, "y": y}
    if form == "tail":
        return {"z": drawn((B, N)), **options, "y": y}
    g = x @ differences.T
    if form == "blocks":
        sums = torch.zeros(B, 3, dtype=torch.float64)
        return {"x": x, "w_sum": w_sum, "z": g, "c": c, "pool": 0, "sums": sums}
    flags, done = torch.empty(B, dtype=torch.uint8), torch.empty(1, dtype=torch.int32)
    scratch = {"flags": flags, "done": done, "partial": torch.empty(1, B, dtype=torch.float64)}
    folded = {"g": g, "c": c, "w_sum": w_sum, "b_sum": b_sum, "weight": weight, "bias": bias}
    return {"x": x, **folded, **options, "limit": 4.0, **scratch, "y": y}


def op_of(form: str):
    names = {"chain": CPU_CALLS[0], "tail": CPU_CALLS[1], "blocks": CPU_CALLS[2]}
    sources = {"plain.cpp": PLAIN} if form == "half" else [file_of(names[form])]
    return library(sources, "cpu", form).op("run").default


def _apart(t: Tensor) -> Tensor:
    return t.repeat_interleave(2, -1)[..., ::2]


def _late(t: Tensor) -> Tensor:
    """The same, 4 or 8 bytes behind an address of 16."""
    return torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape)


def _double(t: Tensor) -> Tensor:
    return t.double() if t.dtype != torch.float64 else t.float()


def _short(t: Tensor) -> Tensor:
    return t[1:]


WRONG = [
    *((form, name, change, name) for form, names in (
        ("chain", ("x", "weight", "y")), ("tail", ("z", "y")), ("blocks", ("x", "z", "w_sum")),
        ("half", ("x", "g", "c", "w_sum", "y")),
    ) for name in names for change in (_apart, _double)),
    *((form, name, _short, name) for form, names in (
        ("chain", ("bias", "y")), ("tail", ("y",)), ("blocks", ("w_sum", "c", "sums", "z")),
        ("half", ("g", "c", "w_sum", "bias", "flags", "done", "partial", "y")),
    ) for name in names),
    *((form, "pool", lambda _, p=pool: p, "pool") for form, pools in (
        ("chain", (0, -1, N + 1)), ("tail", (0, N + 1, 2**62)), ("half", (0, 3)),
    ) for pool in pools),
    ("chain", "x", lambda t: t[0], "x"),
    ("chain", "x", lambda t: t[:, 1:], "weight"),
    ("chain", "weight", lambda t: t[1:], "bias"),
    ("chain", "bias", _apart, "bias"),
    ("tail", "z", lambda t: t[:, :0], "pool"),
    ("tail", "z", lambda t: t[0], "z"),
    ("blocks", "pool", lambda _: 2, "c"),
    ("blocks", "pool", lambda _: -1, "pool"),
    ("blocks", "sums", lambda t: t[:, :2], "sums"),
    ("blocks", "sums", Tensor.float, "sums"),
    ("half", "pool", lambda _: 1, "g"),
    ("half", "b_sum", lambda t: t.view(1), "b_sum"),
    ("half", "weight", lambda t: t[:, 1:], "weight"),
    ("half", "weight", _short, "bias"),
    ("half", "flags", Tensor.int, "flags"),
    ("half", "done", Tensor.long, "done"),
    ("half", "partial", lambda t: t.repeat(2, 1), "partial"),
    ("half", "g", _late, "g"),
    ("half", "w_sum", _late, "w_sum"),
]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("case", range(len(WRONG)))
def test_a_wrong_argument_is_named(case):
    form, name, change, named = WRONG[case]
    assert_argument_is_named(op_of(form), arguments(form), name, change, named)


@needs_gpu
def test_an_argument_on_another_device_is_refused():
    run = library([file_of("05_half_gemm_guard")], "cuda", "half").op("run").default
    there = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in arguments("half").items()}
    run(*there.values())
    for name in [k for k, v in there.items() if isinstance(v, Tensor)]:
        with pytest.raises((RuntimeError, NotImplementedError), match=f"{name}|device|backend"):
            run(*{**there, name: there[name].cpu()}.values())


@needs_compiler
@pytest.mark.parametrize(
    ("place", "wrong", "words"),
    [
        (0, torch.zeros(3, 2, dtype=torch.float64), r"sums: got float64 \(3, 2\)"),
        (0, torch.zeros(3, 3), r"sums: got float32"),
        (1, torch.zeros(1, dtype=torch.float64), r"b_sum: got float64 \(1\)"),
        (2, 0, "pool: got 0; wants at least 1"),
        (5, torch.zeros(2), r"y: got float32 \(2\)"),
        (6, torch.zeros(3), r"flags: got float32"),
    ],
)
def test_a_wrong_argument_of_the_finish_is_named(place, wrong, words):
    library = ops.kernel_library(chain.SLUG, "cpu", [FOLDER / "cpu.cpp"], flags=("-DWB_BLOCKS",))
    finish, sums = library.op("finish").default, torch.tensor([[1.0, 2.0, 3.0]] * 3).double()
    y, flags = torch.empty(3), torch.empty(3, dtype=torch.uint8)
    given = [sums, torch.tensor(4.0).double(), 2, 0.5, 0.4, y, flags]
    assert finish(*given) == 3 and y.tolist() == [1.75] * 3 and flags.tolist() == [1] * 3
    given[4] = 0.5  # 3 are not more than half of 7
    assert finish(*given) == 0 and flags.tolist() == [0] * 3
    given[place] = wrong
    with pytest.raises(RuntimeError, match=words):
        finish(*given)


# --- wrong kernels are found ------------------------------------------------------------------

SABOTAGE = {
    "the last window": ("cpu_01_row_at_a_time", "first + p.pool <= p.N;", "first + p.pool < p.N;"),
    "NaN": ("cpu_01_row_at_a_time", "u > v || u != u ? u : v", "u > v ? u : v"),
    "the first of a window": ("cpu_02_gemm_then_tail", "top = z[0];", "top = z[pool - 1];"),
    "the first of eight": ("cpu windows", "z[u * pool];", "z[u * pool + pool - 1];"),
    "NaN among eight": ("cpu windows", "is_nan |= v != v;", ""),
    "a half of the sums": ("cpu windows", "sum[2 * u] + sum[2 * u + 1]", "sum[2 * u]"),
    "an overflow": ("cpu_02_gemm_then_tail", "fits = rounded - rounded == 0", "fits = true"),
    "the shift": ("cpu halves", "value + load(c + m + v * kDoubles)", "value"),
    "the size": ("cpu halves", "sums[2] += total(of_g);", ""),
    "the last lanes": ("cpu halves", "m = whole; m < M; ++m", "m = whole; m < M - 1; ++m"),
    "the block before": ("cpu halves", "sums[1] += total(of_sums);", "sums[1] = total(of_sums);"),
    "a guard that lets all pass": ("cpu halves", "of_row[2] <= limit", "0 <= limit"),
    "the sum of biases": ("cpu halves", "of_row[1] + more", "of_row[1]"),
    "the pool": ("cpu windows", "sum_of_maxima(z, p.N, p.pool)", "sum_of_maxima(z, p.N, 2)"),
}  # fmt: skip


def assert_all_right(name: str, call, monkeypatch) -> None:
    """What the tests above ask, in few calls: blocks, pools, left-over features, the guard."""
    pools = [pool for pool in (1, 2, 3) if takes(name, pool)]
    for block in (40, 1 << 20):
        monkeypatch.setattr(running, "BLOCK", block)
        for pool, N in ((pool, N) for pool in pools for N in (66, 77)):
            for by in (0.0, 1e4):
                weight, bias, _, scale = lowered(by, 35, N, -1.5)
                given = weight, bias - 3, pool, scale
                assert_right(name, call, numbered(5, 35), given)
    for biases in ([3e38, 1.0, 3e38, 1.0], [1.0, NAN, NAN, 1.0]):
        y, wanted = of_biases(call, biases, 2, 0.1, "cpu"), NAN if NAN in biases else INF
        torch.testing.assert_close(y, torch.tensor([wanted]), equal_nan=True)
        for place in (0, 1, 17, 39):
            biases = [1.0] * 40
            biases[place] = NAN
            assert of_biases(call, biases, 2, 0.1, "cpu").isnan().all()
    if name == "cpu halves":
        given, x = lowered(1e4, 301, 2001), numbered(40, 301)
        true = values(x, *given)
        assert ((call(x, *given) - true).abs() <= U32 * true.abs() + 1e5 * U64).all()


@needs_compiler
@pytest.mark.parametrize("name", SABOTAGE)
def test_control_a_sabotaged_kernel_is_rejected(name, monkeypatch):
    called, old, new = SABOTAGE[name]
    sources = with_headers(FOLDER, [file_of(called).name], old, new)
    assert_all_right(called, rung(called), monkeypatch)
    with pytest.raises(AssertionError):
        assert_all_right(called, call_of(sources, *CALLS[called]), monkeypatch)


CONTROLS = {v.name: v for v in PROBLEM.variants if v.is_control and v.source}


@needs_gpu
@pytest.mark.parametrize("name", CONTROLS)
def test_each_wrong_kernel_is_rejected(name):
    """One block holds 1024 rows; fmaxf drops NaN: both are right elsewhere."""
    call, given = call_of(CONTROLS[name].files, "cuda", "tail"), lowered(0.0, device="cuda")
    x = numbered(1025).cuda()
    assert_near(call(x[:33], *given), x[:33], *given, form="tail")
    with pytest.raises(AssertionError):
        assert_near(call(x, *given), x, *given, form="tail")
        assert of_biases(call, [1.0, NAN], 2, 1.0, "cuda").isnan().all()


@needs_compiler
@pytest.mark.parametrize("name", CPU_CALLS)
def test_control_the_bound_sees_weights_that_are_a_little_off(name):
    x, (weight, bias, *options) = drawn((9, 31), 7), parameters(31, 240, 2, 2.0)
    y = rung(name)(x, weight * 1.001, bias, *options)
    with pytest.raises(AssertionError, match="times the bound"):
        assert_near(y, x, weight, bias, *options, form=CALLS[name][1])


# --- the files --------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.name)
def test_a_rung_is_short_and_opens_with_what_it_does(file):
    assert_opens_well(file, r"y\[i\] = scale", 80)


def test_every_file_is_a_rung_or_a_control():
    known = {v.source for v in PROBLEM.variants if v.source and v.source.parent == FOLDER}
    assert set(FILES) == known
    best = {FOLDER / n for op in (chain.OP, chain.DIRECT) for k in op.kernels.values()
            for n in k.files}  # fmt: skip
    assert best <= set(FILES)
    assert {name.partition(" ")[0] for name in CALLS} == set(RUNGS), "each rung is called here"
    assert running.FEATURES == 128, "kGuardFeatures: what the binding asks for"


@needs_nvcc
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("file", [f for f in FILES if f.suffix == ".cu"], ids=lambda p: p.name)
def test_compiles_without_spills(file, arch):
    include = [FOLDER, paths.kernels() / "common"]
    flags = next(v.flags for v in PROBLEM.variants if v.source == file)
    report = build.cubin(file, arch=arch, include=include, flags=["-DWB_CUDA", *flags])
    assert report.kernels and report.path.stat().st_size > 0
    for kernel in report.kernels:
        assert kernel.spill_bytes == 0, kernel
        assert kernel.stack_bytes == 0, kernel
        assert 0 < kernel.registers <= 128, kernel
        assert re.search(r"[a-z_]+_kernel\b", kernel.name), "the name spells what is fused"
