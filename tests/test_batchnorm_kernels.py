"""The kernels of the batchnorm chain: each rung within the bound of its own arithmetic.

Whole rungs run from x on; the kernels behind the product also alone, on a z that is given. CPU
rungs are built and run, CUDA rungs run where a GPU is; their forms, and torch's part of them, run
on a CPU around a plain kernel.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
from batchnorm import (
    CPU_EVAL,
    EPS,
    EVAL_RUNGS,
    FOLDER,
    PROBLEM,
    RUNGS,
    TILE,
    TRAIN_RUNGS,
    U32,
    assert_batch,
    assert_eval,
    assert_tail,
    call_of,
    form_of,
    library,
    of_batch,
    parameters,
    rung,
    running,
    softmax,
    tail,
    tail_of,
    with_headers,
)  # fmt: skip
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
from torch import Tensor

from workbook import build, ops, paths
from workbook.chains import gemm_batchnorm_scale_softmax_run_eval as by_running

INF, NAN = math.inf, math.nan
ARCHITECTURES = ["80", "90", "100"]
FILES = sorted(p for p in FOLDER.iterdir() if p.suffix in (".cpp", ".cu") and p.stem != "binding")
every_rung = pytest.mark.parametrize(("name", "device"), EVAL_RUNGS)
every_train_rung = pytest.mark.parametrize(("name", "device"), TRAIN_RUNGS)


def maps(N: int, device: str = "cpu", seed: int = 0, size: float = 1.0) -> list[Tensor]:
    """shift, a, d (N,), a of both signs."""
    return [size * drawn((N,), seed + i).to(device) for i in range(3)]


def identity(N: int, device: str = "cpu") -> list[Tensor]:
    """A map that leaves z as it is."""
    return [torch.full((N,), value, device=device) for value in (0.0, 1.0, 0.0)]


def of_row(call, t: list[float] | Tensor, device: str = "cpu") -> Tensor:
    """The softmax of one row by a kernel alone."""
    row = torch.as_tensor(t, dtype=torch.float32, device=device).unsqueeze(0)
    return call(row, *identity(row.size(1), device)).squeeze(0)


# --- right, at any shape and stride -----------------------------------------------------------

# B, K, N
SHAPES = [(1, 1, 1), (3, 7, 5), (17, 4, 31), (2, 129, 67), (5, 2048, 33), (4, 67, 1025),
          (1031, 5, 3), (67, 300, 130), (0, 7, 5), (3, 0, 5), (33, 64, 2100)]  # fmt: skip


@every_rung
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_within_bound(name, device, shape):
    B, K, N = shape
    given, x = parameters(K, N, device=device), drawn((B, K), 7).to(device)
    assert_eval(rung(name, device)(x, *given), x, *given)


@every_rung
@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(0, 19), features=st.integers(0, 60), outs=st.integers(1, 80),
    gap=st.integers(0, 7), offset=st.integers(0, 5), overlap=st.booleans(), each=st.booleans(),
)  # fmt: skip
def test_within_bound_at_any_stride(name, device, rows, features, outs, gap, offset, overlap, each):
    """Rows at any distance and alignment; overlapping rows, or one row for all."""
    stride = gap if overlap else features + gap
    memory = drawn((offset + rows * stride + features + 1,), outs).to(device)
    x = memory.as_strided((rows, features), (stride, 1), offset)
    given = parameters(features, outs, 3, device, (1, outs) if each else ())
    assert_eval(rung(name, device)(x, *given), x, *given)


@every_rung
@pytest.mark.parametrize("view", ["transposed", "columns skipped", "expanded"])
def test_inputs_and_weights_that_are_no_plain_rows(name, device, view):
    base = drawn((40, 40), 5).to(device)
    x = {"transposed": base.T, "columns skipped": base[:, ::2], "expanded": base[:1].expand(9, -1)}
    x, call = x[view], rung(name, device)
    weight, *vectors, batches, eps = parameters(x.size(1), 30, device=device)
    assert_eval(call(x, weight, *vectors, batches, eps), x, weight, *vectors, batches, eps)
    apart = [v.repeat_interleave(2)[::2] for v in vectors]
    given = (weight.T.contiguous().T, *apart, batches, eps)
    assert_eval(call(x, *given), x, *given)


@every_rung
def test_many_short_rows(name, device):
    """More rows than a grid's y or z may have, and than one block has threads."""
    z, of = drawn((70001, 3), 7).to(device), maps(3, device)
    assert_tail(tail(name, device)(z, *of), z, *of)


# Of a piece and its lanes on a CPU; of a warp, of 128 threads, of a tile, of 512 threads on a GPU,
# one less, one more, and beyond, by vectors of four and by single floats.
EDGES = [1, 2, 15, 16, 17, 31, 511, 512, 513, 1023, 1024, 1025, 1028, 4095, 4096, 4097, 4100,
         16383, 16384, 16385, 16388, 33001, 33004]  # fmt: skip


@every_rung
@pytest.mark.parametrize("N", EDGES)
def test_a_row_of_each_length_that_a_launcher_tells_apart(name, device, N):
    z, of = drawn((3, N), 7).to(device), maps(N, device)
    assert_tail(tail(name, device)(z, *of), z, *of)


@every_rung
@pytest.mark.parametrize("N", [4, 1028, 4100, 16388])
@pytest.mark.parametrize("late", [0, 1, 2, 3], ids=["y", "shift", "a", "d"])
def test_memory_that_does_not_start_at_16_bytes(name, device, N, late):
    """Rows of whole vectors, at an address that is none of a vector."""
    z, of = drawn((3, N), 7).to(device), maps(N, device)
    if late:
        moved = drawn((N + 1,)).to(device)[1:]
        of[late - 1] = moved.copy_(of[late - 1])
    assert_tail(tail(name, device)(z, *of, offset=int(late == 0)), z, *of)


@every_rung
@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e4, 1e30], ids=str)
def test_values_of_every_size(name, device, size):
    """Denormals, and logits of which a row's largest is all there is."""
    z, of = (drawn((5, 301), 3).double() * size).float().to(device), identity(301, device)
    assert_tail(tail(name, device)(z, *of), z, *of)


@every_rung
@pytest.mark.parametrize("order", ["up", "down", "ties", "a step", "alternating"])
def test_a_maximum_at_any_place(name, device, order):
    """Each element a new maximum, or the first one all of it; equal ones."""
    up = torch.linspace(-30, 30, 3001)
    signs = (-1.0) ** torch.arange(3001)
    row = {"up": up, "down": up.flip(0), "ties": 7 * signs.abs(), "a step": (up > 29.9) * 88.0}
    z, of = (
        {**row, "alternating": up * signs}[order].repeat(2, 1).to(device),
        identity(3001, device),
    )
    assert_tail(tail(name, device)(z, *of), z, *of)


@needs_compiler
@settings(deadline=None, max_examples=60)
@given(st.sets(st.integers(1, 2599), max_size=6), st.integers(1, 7), st.integers(0, 99))
def test_a_row_in_any_blocks(cuts, rows, seed):
    """(m, s) of what came before is all that a block is told."""
    z, of = drawn((rows, 2600), seed) * 5, maps(2600, seed=seed)
    assert_tail(tail("cpu", "cpu")(z, *of, cuts=sorted(cuts)), z, *of)


# --- what a softmax is ------------------------------------------------------------------------

LENGTHS = [1, 17, 513, 1025, 4097, 16388]


@every_rung
@pytest.mark.parametrize("N", LENGTHS)
def test_rows_sum_to_one(name, device, N):
    y = tail(name, device)(10 * drawn((5, N), 3).to(device), *maps(N, device)).double()
    assert (y >= 0).all() and (y.sum(1) - 1).abs().max() <= U32 * (70 + N / 256)


@every_rung
@pytest.mark.parametrize("by", [-64.0, 1024.0])
def test_a_shift_common_to_a_row_changes_no_bit(name, device, by):
    """Sums of whole numbers are exact: what reaches exp is the same."""
    z = (drawn((4, 1031), 3) * 9).round().to(device)
    shift, a, d = identity(1031, device)
    call = tail(name, device)
    assert torch.equal(call(z, shift, a, d), call(z, shift, a, d + by))
    assert torch.equal(call(z, shift, a, d), call(z + by, shift, a, d))


@every_rung
def test_equal_logits_share_alike(name, device):
    """Exactly: the sum is a whole number."""
    for N in (1, 3, 100, 1025, 5000):
        assert torch.equal(of_row(tail(name, device), torch.full((N,), -3.5), device).cpu(),
                           torch.full((N,), float(torch.tensor(1 / N))))  # fmt: skip


# --- what is not finite -----------------------------------------------------------------------


@every_rung
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("row", [0, 2, 8])
def test_what_is_not_finite_in_x_stays_in_its_row(name, device, value, row):
    call, given = rung(name, device), parameters(37, 70, device=device)
    x = drawn((9, 37), 3).to(device)
    clean, others = call(x, *given), [i for i in range(9) if i != row]
    for column in (0, 17, 36):
        spoiled = x.clone()
        spoiled[row, column] = value
        y = call(spoiled, *given)
        assert torch.equal(y[others], clean[others]) and y[row].isnan().all()


@every_rung
@pytest.mark.parametrize("N", LENGTHS)
@pytest.mark.parametrize("value", [NAN, INF])
def test_one_logit_makes_nan_of_its_row(name, device, N, value):
    call, z = tail(name, device), drawn((3, N), 3).to(device)
    clean = call(z, *identity(N, device))
    for place in {0, N // 2, N - 1}:
        spoiled = z.clone()
        spoiled[1, place] = value
        y = call(spoiled, *identity(N, device))
        assert y[1].isnan().all() and torch.equal(y[::2], clean[::2])


@every_rung
@pytest.mark.parametrize("N", LENGTHS)
def test_masked_logits_are_zero_and_nothing_else(name, device, N):
    """-inf at each place, in pieces that hold nothing else, and in all but one."""
    call, z = tail(name, device), drawn((1, N), 3).to(device)
    for masked in (slice(0, 1), slice(N - 1, N), slice(0, N // 2), slice(1, N), slice(0, N - 1)):
        row = z.clone()
        row[:, masked] = -INF
        if not row.isfinite().any():
            assert call(row, *identity(N, device)).isnan().all()
            continue
        y = call(row, *identity(N, device))
        assert (y[row == -INF] == 0).all()
        kept = row.isfinite()
        assert_tail(
            y[kept].unsqueeze(0), row[kept].unsqueeze(0), *identity(int(kept.sum()), device)
        )


@every_rung
@pytest.mark.parametrize("N", LENGTHS)
def test_a_row_that_is_masked_as_a_whole_is_nan(name, device, N):
    """As torch has it: 0 / 0. A NaN among them changes nothing."""
    call = tail(name, device)
    assert of_row(call, torch.full((N,), -INF), device).isnan().all()
    row = torch.full((N,), -INF)
    row[-1] = NAN
    assert of_row(call, row, device).isnan().all()


@needs_compiler
@pytest.mark.parametrize("cuts", [(1,), (512, 600), (16, 1024, 1500)], ids=str)
def test_what_is_not_finite_passes_from_block_to_block(cuts):
    call, z = tail("cpu", "cpu"), drawn((2, 2000), 3)
    for value, place in ((NAN, 0), (INF, 0), (NAN, 1999), (INF, 700), (NAN, cuts[-1])):
        row = z.clone()
        row[0, place] = value
        y = call(row, *identity(2000), cuts=cuts)
        assert y[0].isnan().all() and torch.equal(y[1], call(z, *identity(2000), cuts=cuts)[1])
    row = z.clone()
    row[0, : cuts[-1]] = -INF  # no maximum yet, when the last block comes
    y = call(row, *identity(2000), cuts=cuts)
    assert (y[0, : cuts[-1]] == 0).all()
    rest = y[:1, cuts[-1] :]
    assert_tail(rest, row[:1, cuts[-1] :], *identity(2000 - cuts[-1]))


# --- the same on every run --------------------------------------------------------------------


@every_rung
@pytest.mark.parametrize("N", [37, 1025, 4100, 16388])
def test_bits_depend_on_the_row_alone(name, device, N):
    """Not on the run, the batch around it, its order, or its place in it."""
    call, of, z = tail(name, device), maps(N, device), drawn((13, N), 3).to(device)
    y, order = call(z, *of), torch.randperm(13, generator=torch.Generator().manual_seed(1))
    assert torch.equal(call(z, *of), y)
    assert torch.equal(call(z[order], *of), y[order])
    for rows in (slice(0, 1), slice(5, 8), slice(1, None)):
        assert torch.equal(call(z[rows], *of), y[rows])


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("name", CPU_EVAL)
def test_bits_do_not_depend_on_threads(name, threads):
    """From one thread to more threads than rows."""
    call, of, z, found = tail(name, "cpu"), maps(9001), drawn((23, 9001), 3), []
    for count in (1, 2, 3, 8):
        threads(count)
        found += [call(z[:rows], *of)[:2] for rows in (2, 5, 23)]
    assert all(torch.equal(y, found[0]) for y in found)


# --- train mode -------------------------------------------------------------------------------

# B, K, N: two samples, a prime of them, more than a block of threads; few features and many.
BATCHES = [(2, 1, 1), (2, 129, 67), (3, 7, 5), (7, 33, 64), (7, 33, 65), (33, 20, 257),
           (1031, 5, 3), (41, 300, 130), (3, 0, 5), (5, 9, 2100), (17, 40, 1028)]  # fmt: skip


@every_train_rung
@pytest.mark.parametrize("shape", BATCHES, ids=str)
@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_a_batch_within_bound(name, device, shape, mean):
    """y, mean and unbiased variance; wherever the inputs lie."""
    B, K, N = shape
    given, x = of_batch(parameters(K, N, device=device)), (drawn((B, K), 7) + mean).to(device)
    assert_batch(rung(name, device)(x, *given), x, *given)


def test_control_eager_is_beyond_that_bound_far_from_zero():
    """It rounds what cancels: the bound is that of the centred form."""
    given, x = of_batch(parameters(5, 130)), drawn((41, 5), 7) + 1000
    with torch.no_grad():
        assert_batch(running.plain_of_batch(x, *given), x, *given)
    z = torch.nn.functional.linear(x, *given[:2])
    found = running.reference_of_batch(x, *given), z.mean(0), z.var(0)
    with pytest.raises(AssertionError, match="^y: .* times the bound"):
        assert_batch(found, x, *given)


@every_train_rung
@settings(deadline=None, max_examples=30)
@given(st.integers(2, 19), st.integers(1, 60), st.integers(1, 90), st.integers(0, 9), st.booleans())
def test_a_batch_within_bound_at_any_stride(name, device, rows, features, outs, gap, each):
    memory = drawn((rows * (features + gap) + 3,), outs).to(device)
    x = memory.as_strided((rows, features), (features + gap, 1), gap % 4)
    given = of_batch(parameters(features, outs, 3, device, (outs,) if each else (1, 1)))
    assert_batch(rung(name, device)(x, *given), x, *given)


@every_train_rung
def test_a_batch_of_equal_rows_has_no_variance(name, device):
    """Exactly 0, and the outputs are those of beta alone."""
    given = of_batch(parameters(50, 70, device=device))
    y, mean, var = rung(name, device)(drawn((1, 50), 3).to(device).expand(6, -1), *given)
    assert (var == 0).all() and torch.equal(y, y[:1].expand(6, -1))
    torch.testing.assert_close(y[:1], torch.softmax(given[4] * given[3], 0).unsqueeze(0))


@every_train_rung
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_batch_that_is_not_finite_is_so_as_a_whole(name, device, value):
    """Statistics are of all samples. A bias that is not finite makes its feature's so."""
    given, x = of_batch(parameters(9, 70, device=device)), drawn((6, 9), 3).to(device)
    spoiled = x.clone()
    spoiled[2, 4] = value
    y, mean, var = rung(name, device)(spoiled, *given)
    assert y.isnan().all() and not mean.isfinite().any() and not var.isfinite().any()
    given[1][7] = value
    y, mean, var = rung(name, device)(x, *given)
    others = [n for n in range(70) if n != 7]
    assert y.isnan().all() and not mean[7].isfinite() and not var[7].isfinite()
    assert mean[others].isfinite().all() and var[others].isfinite().all()


@every_train_rung
def test_a_batch_gives_the_same_bits_again(name, device):
    call, given = rung(name, device), of_batch(parameters(300, 2100, device=device))
    x = drawn((43, 300), 3).to(device)
    first = call(x, *given)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(call(x, *given), first, strict=True))


def batch_statistics(run, z: Tensor, vectors: tuple, cuts: list[int]) -> tuple[Tensor, Tensor]:
    """(map, var) by the CPU's op of blocks of features."""
    N = z.size(1)
    found, var = torch.full((3, N), NAN), torch.full((N,), NAN)
    for first, last in zip([0, *cuts], [*cuts, N], strict=True):
        run(z, *vectors, found, var, first, last, EPS)
    return found, var


@needs_compiler
def test_bits_of_the_statistics_depend_on_the_feature_alone(threads):
    """Not on threads, nor on the blocks that features come in."""
    run = ops.beside(library(RUNGS["cpu_train"].files, "cpu", "blocks", train=True)
                          .op("run").default, "statistics")  # fmt: skip
    z, vectors, found = drawn((37, 1300), 3), of_batch(parameters(3, 1300))[1:5], []
    for count, cuts in ((1, []), (2, []), (8, [1, 255, 256, 257, 1000]), (3, [512])):
        threads(count)
        found.append(batch_statistics(run, z, vectors, cuts))
    for map_, var in found:
        assert torch.equal(map_, found[0][0]) and torch.equal(var, found[0][1])
    true = 4 * z.double().var(0)
    assert ((found[0][1] - true).abs() <= 2 * U32 * true).all()


@needs_compiler
@pytest.mark.parametrize("block", [1, 7, 256, 1000])
def test_a_product_by_blocks_of_features(block, monkeypatch):
    monkeypatch.setattr(by_running, "BLOCK", block)
    monkeypatch.setattr(by_running, "ELEMENTS", 1)
    given, x = parameters(40, 1100), drawn((11, 40), 3)
    assert_eval(rung("cpu", "cpu")(x, *given), x, *given)
    found = rung("cpu_train", "cpu")(x, *of_batch(given))
    assert_batch(found, x, *of_batch(given))
    assert found[0].untyped_storage().nbytes() >= found[0].nbytes and found[0].is_contiguous()


# --- the forms of a GPU, around a plain kernel ------------------------------------------------

PLAIN = """
    #include <cmath>
    #include "problem.h"
    static double t_of(const Tail& p, int64_t i, int64_t n) {
      return p.a[n] * (static_cast<double>(p.y[i * p.N + n]) + p.shift[n]) + p.d[n];
    }
    void launch(const Tail& p, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        double m = -INFINITY, s = 0;
        for (int64_t n = 0; n < p.N; ++n) m = std::fmax(m, t_of(p, i, n));
        for (int64_t n = 0; n < p.N; ++n) s += std::exp(t_of(p, i, n) - m);
        for (int64_t n = 0; n < p.N; ++n)
          p.y[i * p.N + n] = static_cast<float>(std::exp(t_of(p, i, n) - m) / s);
    #ifdef WB_TILES  // the room that is asked for is there
        for (int64_t k = 0; k < 2 * p.tiles; ++k) p.partial[2 * p.tiles * i + k] = 0;
    #endif
      }
    }"""


@needs_compiler
@pytest.mark.parametrize("form", ["tail", "tiles"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forms_of_a_gpu(form, shape):
    B, K, N = shape
    given, x = parameters(K, N), drawn((B, K), 7)
    y = call_of({"plain.cpp": PLAIN}, "cpu", form)(x, *given)
    assert_eval(y, x, *given)


@pytest.fixture(scope="module")
def tiles_run():
    """The ops that a GPU has in train mode, in torch: what is around them runs on any machine."""
    name, made = "batchnorm_tests", torch.library.Library("batchnorm_tests", "FRAGMENT")

    def run(y: Tensor, shift: Tensor, a: Tensor, d: Tensor, partial: Tensor) -> None:
        assert partial.shape == (y.size(0), -(-y.size(1) // TILE), 2)
        y.copy_(softmax(a.double() * (y.double() + shift) + d))

    def statistics(
        z: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, scale: Tensor, map: Tensor,
        var: Tensor, partial: Tensor, eps: float,
    ) -> None:  # fmt: skip
        assert partial.dtype == torch.float64 and partial.shape[1:] == (2, z.size(1))
        z, found = z.double(), 4 * z.double().var(0)
        divisor = (found * (z.size(0) - 1) / z.size(0) + eps).sqrt()
        for row, values in enumerate((-z.mean(0), 2 * gamma * scale / divisor, beta * scale)):
            map[row] = values
        var.copy_(found)

    def mean(weight: Tensor, bias: Tensor, total: Tensor, mean: Tensor, batch: int) -> None:
        mean.copy_(weight.double() @ total / batch + bias)

    def centre(x: Tensor, partial: Tensor, total: Tensor, c: Tensor) -> None:
        groups = min(5, x.size(0))
        assert partial.dtype == torch.float64 and partial.size(0) > groups
        total.copy_(x.double().sum(0))
        parts = x[: x.size(0) // groups * groups].double().unflatten(0, (groups, -1))
        c.copy_(parts.mean(1).sort(0).values[(groups - 1) // 2])

    vectors = "Tensor bias, Tensor gamma, Tensor beta, Tensor scale"
    for function, schema in (
        (centre, "(Tensor x, Tensor(a!) partial, Tensor(b!) total, Tensor(c!) c) -> ()"),
        (run, "(Tensor(a!) y, Tensor shift, Tensor a, Tensor d, Tensor(b!) partial) -> ()"),
        (statistics, f"(Tensor z, {vectors}, Tensor(a!) map, Tensor(b!) var, Tensor(c!) partial,"
                     " float eps) -> ()"),
        (mean, "(Tensor weight, Tensor bias, Tensor total, Tensor(a!) mean, int batch) -> ()"),
    ):  # fmt: skip
        made.define(f"{function.__name__}{schema}")
        made.impl(function.__name__, function, "CPU")
    yield getattr(torch.ops, name).run.default
    made._destroy()


@pytest.mark.parametrize("shape", BATCHES, ids=str)
def test_the_form_of_a_gpu_in_train_mode(tiles_run, shape):
    B, K, N = shape
    given, x = of_batch(parameters(K, N)), drawn((B, K), 7) + 1000
    with torch.no_grad():
        found = running.TRAIN.run_kernel(tiles_run, running.TRAIN.forms["tiles"], x, *given)
    assert_batch(found, x, *given)


# --- the binding's checks ---------------------------------------------------------------------

B, N = 3, 12


def arguments(form: str) -> dict[str, object]:
    """What the op of a form takes, by name."""
    known = dict(zip(("shift", "a", "d"), maps(N), strict=True))
    if form == "statistics":
        vectors = {name: drawn((N,), 3) for name in ("bias", "gamma", "beta", "scale")}
        found = {"map": torch.empty(3, N), "var": torch.empty(N), "first": 0, "last": N}
        return {"z": drawn((B, N)), **vectors, **found, "eps": EPS}
    y = {"y": drawn((B, N))}
    if form == "tiles":
        return y | known | {"partial": torch.empty(B, 1, 2)}
    blocks = {"partial": torch.empty(B, 2, dtype=torch.float64), "first": 0, "last": N}
    return y | known | (blocks if form == "blocks" else {})


def op_of(form: str):
    if form == "tiles":
        return library({"plain.cpp": PLAIN}, "cpu", "tiles").op("run").default
    if form == "statistics":
        found = library(RUNGS["cpu_train"].files, "cpu", "blocks", train=True)
        return ops.beside(found.op("run").default, "statistics")
    name = "cpu" if form == "blocks" else CPU_EVAL[0]
    return library(RUNGS[name].files, "cpu", form).op("run").default


def _apart(t: Tensor) -> Tensor:
    return t.repeat_interleave(2, -1)[..., ::2]


WRONG = [
    *((form, "y", change, "y") for form in ("tail", "blocks", "tiles")
      for change in (lambda t: t[0], Tensor.double, lambda t: t.t().contiguous().t(), _apart)),
    *(("tail", name, change, name) for name in ("shift", "a", "d")
      for change in (lambda t: t[1:], Tensor.double, _apart, lambda t: t.unsqueeze(0))),
    ("blocks", "partial", Tensor.float, "partial"),
    ("blocks", "partial", lambda t: t[1:], "partial"),
    ("blocks", "first", lambda _: -1, "first, last"),
    ("blocks", "first", lambda _: N, "first, last"),
    ("blocks", "last", lambda _: 0, "first, last"),
    ("blocks", "last", lambda _: N + 1, "first, last"),
    ("tiles", "partial", lambda t: t.repeat(1, 2, 1), "partial"),
    ("tiles", "partial", Tensor.double, "partial"),
    ("statistics", "z", lambda t: t[:1], "z"),
    ("statistics", "z", _apart, "z"),
    ("statistics", "z", Tensor.half, "z"),
    *(("statistics", name, change, name) for name in ("bias", "gamma", "beta", "scale", "var")
      for change in (lambda t: t[1:], Tensor.double, _apart)),
    ("statistics", "map", lambda t: t[1:], "map"),
    ("statistics", "map", _apart, "map"),
    ("statistics", "first", lambda _: -1, "first, last"),
    ("statistics", "last", lambda _: N + 1, "first, last"),
    ("statistics", "first", lambda _: 2**62, "first, last"),
]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("case", range(len(WRONG)))
def test_a_wrong_argument_is_named(case):
    form, name, change, named = WRONG[case]
    assert_argument_is_named(op_of(form), arguments(form), name, change, named)


@needs_gpu
def test_an_argument_on_another_device_is_refused():
    run = library(RUNGS["03_row_in_registers"].files, "cuda", "tail").op("run").default
    for name in ("shift", "a", "d"):
        given = {k: v.cuda() for k, v in arguments("tail").items()}
        run(*given.values())
        given[name] = given[name].cpu()
        with pytest.raises((RuntimeError, NotImplementedError), match=f"{name}|device"):
            run(*given.values())


# --- wrong kernels are found ------------------------------------------------------------------


def assert_tail_is_right(call, device: str = "cpu", *, blocks: bool = False) -> None:
    """What the tests above ask, in few calls: odd rows, masks, far and large logits."""
    for rows, N in ((3, 1), (5, 301), (4, 1101)):
        z, of, h, same = 5 * drawn((rows, N), 7).to(device), maps(N, device), N // 2, identity
        for cuts in ((), (h, N - 1)) if blocks and N > 2 else ((),):
            more = {"cuts": cuts} if blocks else {}
            assert_tail(call(z, *of, **more), z, *of)
            masked = z.clone()
            masked[:, :h] = -INF
            y = call(masked, *same(N, device), **more)
            assert (y[:, :h] == 0).all()
            assert_tail(y[:, h:], z[:, h:], *same(N - h, device))
    same = identity(997, device)
    for row in (torch.linspace(-110, 0, 997), torch.linspace(0, -110, 997), drawn((997,)) + 200):
        z = row.repeat(3, 1).to(device)
        assert_tail(call(z, *same), z, *same)
    z[1, 990] = NAN
    y = call(z, *same)
    assert y[1].isnan().all() and y[::2].isfinite().all()


SABOTAGE = {
    "no maximum": ("cpu_01_three_walks", "m = m < y[n] ? y[n] : m;", "m = 0;"),
    "online, not rescaled": ("cpu_02_online", "s = s * std::exp(m - t) +", "s = s +"),
    "the block before": ("cpu", "p.first ? RowSum{kept[0], kept[1]} : RowSum{}", "RowSum{}"),
    "a masked block": ("cpu", "double from = m == kNothing ? 0 : m;", "double from = m;"),
    "lanes beyond the row": ("cpu", "t[k] = kNothing;", "t[k] = 0;"),
    "exp, small ones": ("cpu", "kLowest = -104.0f", "kLowest = -80.0f"),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("name", SABOTAGE)
def test_control_a_sabotaged_kernel_is_rejected(name):
    stem, old, new = SABOTAGE[name]
    form = form_of(stem)
    files = [file.name for file in RUNGS[stem].files]
    assert_tail_is_right(tail(stem, "cpu"), blocks=form == "blocks")
    call = tail_of(with_headers(FOLDER, files, old, new), "cpu", form)
    with pytest.raises(AssertionError):
        assert_tail_is_right(call, blocks=form == "blocks")


SABOTAGE_OF_BATCHES = {
    "the last strip": ("(last - first + kStrip - 1) / kStrip", "(last - first) / kStrip"),
    "the biased variance": ("var * p.B / (p.B - 1)", "var"),
    "the unbiased one": ("sqrt(var + p.eps)", "sqrt(var * p.B / (p.B - 1) + p.eps)"),
}  # fmt: skip


def assert_batches_are_right(call) -> None:
    for B, K, N in ((2, 3, 5), (7, 20, 300), (300, 3, 70)):
        given, x = of_batch(parameters(K, N, scale_shape=(N,))), drawn((B, K), 7)
        assert_batch(call(x, *given), x, *given)
    given, x = of_batch(parameters(4, 9)), 1e-3 * drawn((6, 4), 7)  # where eps counts
    assert_batch(call(x, *given), x, *given)


@needs_compiler
@pytest.mark.parametrize("name", SABOTAGE_OF_BATCHES)
def test_control_sabotaged_statistics_are_rejected(name):
    files = [file.name for file in RUNGS["cpu_train"].files]
    assert_batches_are_right(rung("cpu_train", "cpu"))
    sources = with_headers(FOLDER, files, *SABOTAGE_OF_BATCHES[name])
    with pytest.raises(AssertionError):
        assert_batches_are_right(call_of(sources, "cpu", "blocks", train=True))


CONTROLS = {v.name: v for v in PROBLEM.variants if v.is_control and v.source}


@pytest.mark.parametrize(("name", "device"), [
    pytest.param(n, d, marks=needs_compiler if d == "cpu" else needs_gpu)
    for n, v in CONTROLS.items() for d in v.devices
])  # fmt: skip
def test_each_wrong_kernel_is_rejected(name, device):
    """One block holds 1024 rows: it is right below."""
    call = tail_of(CONTROLS[name].files, device, "tail")
    if name == "wrong_one_block":
        z, of = drawn((1025, 9)).to(device), identity(9, device)
        assert_tail(call(z[:33], *of), z[:33], *of)
        with pytest.raises(AssertionError):
            assert_tail(call(z, *of), z, *of)
        return
    with pytest.raises(AssertionError):
        assert_tail_is_right(call, device)


@needs_compiler
def test_control_the_bound_sees_weights_that_are_a_little_off():
    given, x = parameters(30, 300), drawn((9, 30), 7)
    y = rung("cpu", "cpu")(x, given[0] * 1.001, *given[1:])
    with pytest.raises(AssertionError, match="times the bound"):
        assert_eval(y, x, *given)
    found = rung("cpu_train", "cpu")(x * 1.001, *of_batch(given))
    with pytest.raises(AssertionError, match="times the bound"):
        assert_batch(found, x, *of_batch(given))


# --- the files --------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.name)
def test_a_rung_is_short_and_opens_with_what_it_does(file):
    softmax = r"= (exp\(t(\[n\])? - [mM]\)|e\^\(t-[mM]\)( e\^\(m-M\))?) / [sS]"
    assert_opens_well(file, softmax if file.stem != "train_centre" else r"c\[k\] = median_g", 100)


def test_every_file_is_a_rung_or_a_control():
    every = {file for v in PROBLEM.variants if v.source for file in v.files}
    known = {file for file in every if file.parent == FOLDER}
    assert set(FILES) == known
    best = {FOLDER / n for op in (running.EVAL, running.TRAIN) for k in op.kernels.values()
            for n in k.files}  # fmt: skip
    assert best <= known


SPILLING = {("train_centre.cu", "100")}  # ptxas aims at 8 blocks of it there; it is not the product


@needs_nvcc
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("file", [f for f in FILES if f.suffix == ".cu"], ids=lambda p: p.name)
def test_compiles_without_spills(file, arch):
    include = [FOLDER, paths.kernels() / "common"]
    flags = next(v.flags for v in PROBLEM.variants if v.source and file in v.files)
    report = build.cubin(file, arch=arch, include=include, flags=["-DWB_CUDA", *flags])
    assert report.kernels and report.path.stat().st_size > 0
    for kernel in report.kernels:
        if (file.name, arch) not in SPILLING:
            assert kernel.spill_bytes == kernel.stack_bytes == 0, kernel
        assert 0 < kernel.registers <= 128, kernel
        assert re.search(r"[a-z_]+_kernel\b", kernel.name), "the name spells what is fused"


@needs_gpu
@pytest.mark.parametrize("shape", [(2, 1), (3, 7), (5, 300), (9, 131), (1031, 260), (64, 4096)])
def test_the_centre_of_a_batch_on_a_gpu(shape):
    (B, K), called = shape, running.TRAIN.forms["tiles"]
    files = [FOLDER / name for name in running.TRAIN.kernels["cuda"].files]
    run = ops.kernel_library(PROBLEM.slug, "cuda", files, flags=called.flags).op("run").default
    x, groups = drawn((B, K), 3).cuda() + 100, min(5, B)
    x[0] = 1e30  # one far row moves no median of five
    partial = x.new_full((groups * 4 + 1, K), torch.nan, dtype=torch.float64)
    total, c = x.new_full((K,), torch.nan, dtype=torch.float64), x.new_full((K,), torch.nan)
    ops.beside(run, "centre")(x, partial, total, c)
    torch.testing.assert_close(total, x.double().sum(0), rtol=1e-12, atol=0)
    means = x[: B // groups * groups].double().unflatten(0, (groups, -1)).mean(1)
    median = means.sort(0).values[(groups - 1) // 2]
    torch.testing.assert_close(c.double(), median, rtol=1e-7, atol=0)
