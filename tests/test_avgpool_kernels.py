"""The kernels of the avgpool chain: each rung within the bound of its own arithmetic.

A bound follows from the order and the type of a rung's additions; no tolerance is picked by hand.
CPU rungs are built and run; CUDA rungs are compiled to cubin where nvcc is, run where a GPU is. The
bindings of the GPU's forms, and torch's part of them, run on a CPU around a plain kernel.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
from avgpool import (
    ALL_RUNGS,
    CPU_RUNGS,
    EXACT,
    FEW,
    FOLDER,
    PROBLEM,
    RUNGS,
    U32,
    assert_is_the_largest,
    call_of,
    chain,
    form_of,
    gelu,
    parameters,
    rung,
    values,
    with_few,
)
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

from workbook import build, gemm, ops, paths, precision

INF, NAN = math.inf, math.nan
ARCHITECTURES = ["80", "90", "100"]
FILES = sorted(p for p in FOLDER.iterdir() if p.suffix in (".cpp", ".cu") and p.stem != "binding")
every_rung = pytest.mark.parametrize(("name", "device"), ALL_RUNGS)


def assert_right(name: str, call, x: Tensor, given: tuple) -> None:
    folded = RUNGS[name].reads == "after"
    y = call(x, *given)
    assert y.shape == (x.size(0),) and y.dtype == torch.float32
    assert_is_the_largest(y, x, *given, exact=name in EXACT, folded=folded)


# --- right, at any shape, stride and scale ----------------------------------------------------

# B, K, N, pool, scale
SHAPES = [
    (1, 1, 1, 1, 2.0),
    (3, 7, 5, 2, -1.5),
    (5, 33, 17, 17, 1.0),
    (17, 4, 9, 5, -3.0),
    (2, 129, 31, 3, 0.0),
    (9, 2048, 67, 16, 2.0),
    (4, 2052, 64, 64, -2.0),
    (3, 2051, 6, 4, 0.5),
    (2, 9000, 34, 2, 2.0),
    (65, 100, 1100, 2, 2.0),  # more groups than a block of features of the CPU has
    (65, 100, 1100, 1, -2.0),
    (1100, 20, 260, 1, 2.0),  # more rows than a block of the CPU
    (0, 7, 5, 2, 2.0),
    (3, 0, 5, 2, -2.0),
    (130, 70, 600, 1, -0.1),
    # few samples of long rows: teams of a block share the parts, while M and their width allow
    (2, 4096, 2056, 2, 2.0),
    (2, 4096, 4096, 1, -2.0),
    (1, 4096, 4100, 1, 2.0),
    (3, 4097, 1027, 1, -2.0),
    (128, 4100, 36, 2, 2.0),
]


@every_rung
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_within_bound(name, device, shape):
    B, K, N, pool, scale = shape
    given = parameters(K, N, pool, scale, device=device)
    assert_right(name, rung(name, device), drawn((B, K), 7).to(device), given)


@every_rung
def test_many_short_rows(name, device):
    """More rows than a grid's y or z may have, and than one block has threads."""
    given = parameters(3, 4, 2, 2.0, device=device)
    assert_right(name, rung(name, device), drawn((70001, 3), 7).to(device), given)


@every_rung
@settings(deadline=None, max_examples=50)
@given(
    rows=st.integers(0, 19),
    features=st.integers(0, 90),
    outs=st.integers(1, 40),
    pool=st.integers(1, 40),
    scale=st.sampled_from([2.0, 1.0, 0.0, -0.5, -3.0]),
    gap=st.integers(0, 7),
    offset=st.integers(0, 5),
    overlap=st.booleans(),
    shift=st.sampled_from([0.0, -0.75, -3.0]),
)
def test_within_bound_at_any_stride(
    name, device, rows, features, outs, pool, scale, gap, offset, overlap, shift
):
    """Rows at any distance and alignment; overlapping rows, or one row for all."""
    stride = gap if overlap else features + gap
    memory = drawn((offset + rows * stride + features + 1,), outs).to(device)
    x = memory.as_strided((rows, features), (stride, 1), offset)
    weight, bias, *options = parameters(features, outs, min(pool, outs), scale, 3, device)
    weight /= 8
    assert_right(name, rung(name, device), x, (weight, bias / 8 + shift, *options))


@every_rung
@pytest.mark.parametrize("view", ["transposed", "columns skipped", "expanded"])
def test_inputs_that_are_no_plain_rows(name, device, view):
    base = drawn((40, 40), 5).to(device)
    x = {"transposed": base.T, "columns skipped": base[:, ::2], "expanded": base[:1].expand(9, -1)}
    given = parameters(x[view].size(1), 30, 4, 2.0, device=device)
    assert_right(name, rung(name, device), x[view], given)


@every_rung
def test_weights_that_are_no_plain_rows(name, device):
    weight, bias = drawn((20, 30), 3).to(device).T, drawn((60,), 4).to(device)[::2]
    assert_right(name, rung(name, device), drawn((5, 20), 5).to(device), (weight, bias, 3, 2.0))
    assert_right(name, rung(name, device), drawn((5, 20), 5).to(device), (weight, bias, 1, -2.0))


@every_rung
@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e30], ids=str)
def test_values_of_every_size(name, device, size):
    """Denormals and large values."""
    given = parameters(101, 12, 3, 2.0, device=device)
    x = (drawn((5, 101), 3).to(device).double() * size).float()
    assert_right(name, rung(name, device), x, given)


# --- what is not finite -----------------------------------------------------------------------


@every_rung
@pytest.mark.parametrize("scale", [2.0, 0.0, -2.0])
@pytest.mark.parametrize("row", [0, 2, 8])
def test_nan_stays_in_its_row(name, device, scale, row):
    call, given = rung(name, device), parameters(37, 70, 2, scale, device=device)
    x = drawn((9, 37), 3).to(device)
    clean = call(x, *given)
    for column in (0, 17, 36):
        spoiled = x.clone()
        spoiled[row, column] = NAN
        y, others = call(spoiled, *given), [i for i in range(9) if i != row]
        assert torch.equal(y[others], clean[others]) and y[row].isnan()


LONG = 4096  # the least K of rows that 1024 threads take, where samples are few


def of_biases(call, biases: list[float], scale: float, device: str, columns: int = 5) -> Tensor:
    """y of one row where u is the biases, each of a group of its own."""
    x, weight = (torch.zeros(rows, columns, device=device) for rows in (1, len(biases)))
    return call(x, weight, torch.tensor(biases, device=device), 1, scale)


@every_rung
@pytest.mark.parametrize(
    ("count", "columns"), [(1, 5), (3, 5), (40, 5), (600, 5), (3, LONG), (600, LONG)]
)
@pytest.mark.parametrize("value", [NAN, -INF])
@pytest.mark.parametrize("scale", [2.0, 0.0, -2.0, INF, -INF])
def test_one_u_can_make_nan_of_a_row(name, device, count, columns, value, scale):
    """GELU of -inf is NaN, as torch has it."""
    call = rung(name, device)
    for place in {0, count // 2, count - 1}:
        biases = [0.25] * count
        biases[place] = value
        assert of_biases(call, biases, scale, device, columns).isnan().all()


@every_rung
@pytest.mark.parametrize("scale", [INF, -INF])
@pytest.mark.parametrize("columns", [5, LONG])
def test_an_infinite_scale_makes_nan_where_gelu_is_0(name, device, scale, columns):
    """Of a u so low that nothing is left of it, beside one that would win."""
    call = rung(name, device)
    for biases in ([-30.0, 0.25], [0.25, -30.0, 3.0]):
        assert of_biases(call, biases, scale, device, columns).isnan().all()


@every_rung
@pytest.mark.parametrize(("count", "columns"), [(3, 5), (40, 5), (600, 5), (3, LONG), (600, LONG)])
def test_an_infinite_u_wins_or_loses_by_the_sign_of_the_scale(name, device, count, columns):
    call = rung(name, device)

    def of(biases: list[float], scale: float) -> Tensor:
        return of_biases(call, biases, scale, device, columns)

    for place in (0, count // 2, count - 1):
        biases = [0.25] * count
        biases[place] = INF
        assert of(biases, 2.0) == INF
        assert of(biases, 0.0).isnan().all(), "0 times inf"
        expected = -2.0 * 0.25 * 0.5987063256829237  # Phi(0.25)
        torch.testing.assert_close(of(biases, -2.0).item(), expected, rtol=1e-6, atol=0)
    assert of([INF] * count, -2.0) == -INF


@every_rung
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_features_that_are_left_over_do_not_count(name, device, value):
    call, (weight, bias, *options) = rung(name, device), parameters(9, 11, 4, 2.0, device=device)
    x = drawn((6, 9), 3).to(device)
    clean = call(x, weight, bias, *options)
    weight[8:], bias[8:] = value, value
    assert torch.equal(call(x, weight, bias, *options), clean)


@every_rung
def test_a_scale_that_float32_can_not_hold(name, device):
    call = rung(name, device)
    assert of_biases(call, [0.5, 1.0], 1e300, device) == INF
    assert of_biases(call, [0.5, 1.0], -1e300, device) == -INF
    assert of_biases(call, [0.5, 1.0], NAN, device).isnan().all()
    assert of_biases(call, [0.5, 1.0], 1e-300, device) == 0


# --- two numbers of a row ---------------------------------------------------------------------

numbers = st.floats(-12, 12, width=32) | st.sampled_from([-0.75179152, -0.7517915, 0.0, -0.0, -8.3])


@every_rung
@settings(deadline=None, max_examples=150)
@given(
    u=st.lists(numbers, min_size=1, max_size=90),
    scale=st.sampled_from([2.0, 0.5, 0.0, -2.0, -0.3]),
    columns=st.sampled_from([5, LONG]),
)
def test_the_largest_of_any_set(name, device, u, scale, columns):
    """Against every element's own GELU, in float64."""
    y = of_biases(rung(name, device), u, scale, device, columns).double().item()
    wants = values(torch.zeros(1, 1), torch.zeros(len(u), 1), torch.tensor(u), 1, scale).amax()
    assert abs(y - wants.item()) <= 1.5 * U32 * abs(wants.item()) + 1e-13 * abs(scale) + 2.0**-149


@every_rung
def test_the_vertex_itself_on_either_side(name, device):
    """Neighbours of the vertex in float32: GELU is flat there, whichever side they stand on."""
    call, v = rung(name, device), torch.tensor(-0.7517915246935645)
    low, high = torch.nextafter(v, v - 1), torch.nextafter(v, v + 1)
    for one in (low, v, high):
        for scale in (-2.0, 2.0):
            found = of_biases(call, [-4.0, one.item(), 3.0], scale, device).item()
            least = -0.16997120747990369 if scale < 0 else 3.0 * 0.9986501019683699
            assert abs(found - scale * least) <= 2 * U32 * abs(found)


# --- the same on every run --------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("name", CPU_RUNGS)
@pytest.mark.parametrize("size", [(37, 9, 3), (2050, 32, 4), (129, 1500, 1)], ids=str)
def test_bits_depend_on_the_row_alone(name, size):
    """Not on the run, the batch around it, its order, or its place in it."""
    call, given = rung(name, "cpu"), parameters(*size, 2.0)
    x = drawn((43, size[0]), 3)
    y = call(x, *given)
    order = torch.randperm(43, generator=torch.Generator().manual_seed(1))
    assert torch.equal(call(x, *given), y)
    assert torch.equal(call(x[order], *given), y[order])
    for rows in (slice(0, 1), slice(5, 8), slice(1, None), slice(0, 40)):
        assert torch.equal(call(x[rows], *given), y[rows])


@needs_gpu
@pytest.mark.parametrize("name", [n for n in RUNGS if n not in CPU_RUNGS])
def test_runs_repeat_to_the_bit_on_a_gpu(name):
    call, given = rung(name, "cuda"), parameters(2050, 320, 4, 2.0, device="cuda")
    x = drawn((43, 2050), 3).cuda()
    y = call(x, *given)
    assert all(torch.equal(call(x, *given), y) for _ in range(5))


@needs_compiler
@pytest.mark.parametrize("name", CPU_RUNGS)
def test_bits_do_not_depend_on_threads(name):
    """From one thread to more threads than rows."""
    call, given, x = rung(name, "cpu"), parameters(3001, 48, 3, -2.0), drawn((23, 3001), 3)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            found += [call(x[:rows], *given)[:2] for rows in (2, 5, 23)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(y, found[0]) for y in found)


@needs_compiler
@pytest.mark.parametrize("block", [(1, 1), (3, 2), (1024, 7)], ids=str)
@pytest.mark.parametrize("scale", [2.0, -2.0])
def test_bits_do_not_depend_on_the_order_of_blocks(block, scale, monkeypatch):
    call, given, x = rung("cpu", "cpu"), parameters(70, 90, 2, scale), drawn((11, 70), 3)
    whole = call(x, *given)  # of one block, which keeps nothing
    monkeypatch.setattr(chain, "ROWS", block[0])
    monkeypatch.setattr(chain, "FEATURES", block[1])
    assert torch.equal(call(x, *given), whole)


# --- the forms of a GPU, around a plain kernel ------------------------------------------------

PLAIN = {
    "product": "return p.u[i * p.M + m];",
    "parts": """
      double sum = p.b[m];
      for (int64_t s = 0; s < p.parts; ++s) sum += p.u_parts[(s * p.B + i) * p.M + m];
      return sum;""",
    "winner": """
      if (!p.w_exact) {
        double sum = p.b[m];
        for (int64_t k = 0; k < p.K; ++k) sum += double(p.x[i * p.x_stride + k]) * p.w[m * p.K + k];
        return sum;
      }
      double sum = p.b_exact[m];
      for (int64_t k = 0; k < p.K; ++k) sum += p.x[i * p.x_stride + k] * p.w_exact[m * p.K + k];
      return sum;""",
}


def plain(form: str):
    text = f"""
    #include "gelu.h"
    #include "problem.h"
    static double u_of(const PoolChain& p, int64_t i, int64_t m) {{ {PLAIN[form]} }}
    void launch(const PoolChain& p, int64_t begin, int64_t end) {{
      for (int64_t i = begin; i < end; ++i) {{
        float best = -INFINITY;
        for (int64_t m = 0; m < p.M; ++m)
          best = larger(best, static_cast<float>(p.scale * gelu(u_of(p, i, m))));
        p.y[i] = best;
      }}
    }}"""
    return call_of({f"{form}.cpp": text}, "cpu", form)


@needs_compiler
@pytest.mark.parametrize("form", PLAIN)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forms_of_a_gpu(form, shape):
    B, K, N, pool, scale = shape
    x, given = drawn((B, K), 7), parameters(K, N, pool, scale)
    y = plain(form)(x, *given)
    assert_is_the_largest(y, x, *given, exact=form == "winner", folded=True)


@needs_compiler
@pytest.mark.parametrize("form", ["parts", "winner"])
def test_forms_of_a_gpu_by_blocks_of_rows(form, monkeypatch):
    """As many rows at a time as the parts may take bytes."""
    x, given = drawn((700, 64), 7), parameters(64, 6, 3, 2.0)
    whole, seen = plain(form)(x, *given), []
    cut = gemm.cut
    monkeypatch.setattr(gemm, "PARTS_BYTES", 4096)
    monkeypatch.setattr(gemm, "cut", lambda *a, **k: seen.append(cut(*a, **k)) or seen[-1])
    y = plain(form)(x, *given)
    assert seen[0][0] < 700 and torch.allclose(y, whole, rtol=1e-5)


@needs_compiler
@pytest.mark.parametrize("rows", [1, 2, 17, 700])
def test_by_tf32_a_product_is_one_part(rows, monkeypatch):
    x, given = drawn((rows, 64), 7), parameters(64, 12, 3, 2.0)
    call, seen, parts = plain("winner"), [], gemm.parts
    monkeypatch.setattr(gemm, "parts", lambda *a: seen.append(a[2]) or parts(*a))
    wanted = call(x, *given)
    assert seen, "by float32 through parts"
    seen.clear()
    with precision.using_route("tf32"):
        y = call(x, *given)
    assert seen == [1]
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("pool", [1, 3])
def test_by_tf32_the_winner_takes_the_rounded_means(pool):
    """Half the bytes; a pool of 1 has no others."""
    x, given = drawn((5, 64), 7), parameters(64, 12, pool, 2.0)
    folded, seen = chain.fold(torch.float32, *given[:2], pool), []
    with precision.using_route("tf32"):
        chain._run_winner(lambda *a: seen.append(a), x, (), folded, (pool, 2.0))
    chain._run_winner(lambda *a: seen.append(a), x, (), folded, (pool, 2.0))
    (*_, exact, bias, _, _), (*_, kept, kept_bias, _, _) = seen
    assert exact.numel() == bias.numel() == 0
    assert kept is folded[2] and kept_bias is folded[3] and (kept.numel() > 0) == (pool > 1)


@needs_gpu
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8, 9])
@pytest.mark.parametrize("M", [256, 512, 1031, 4100])
@pytest.mark.parametrize("scale", [2.0, -2.0])
def test_the_tail_of_many_samples(M, parts, scale):
    """A warp a sample where parts are eight at most and nothing is computed again."""
    B, K = 1031, 2100
    run = ops.kernel_library(
        chain.SLUG, "cuda", [FOLDER / "05_winner_in_double.cu"], flags=("-DWB_WINNER",)
    ).op("run").default  # fmt: skip
    u_parts, b = drawn((parts, B, M), 3).cuda(), drawn((M,), 4).cuda()
    u_parts[0, 3, 5], u_parts[-1, 4, M - 1], u_parts[0, B - 1, 7] = NAN, INF, -INF
    x, w = torch.full((B, K), NAN, device="cuda"), torch.full((M, K), NAN, device="cuda")
    none, y = b[:0].double(), torch.full((B,), NAN, device="cuda")
    run(u_parts, x, w, b, none, none, scale, y)  # x and w are not read
    u = u_parts.double().sum(0) + b.double()
    wanted = (scale * gelu(u)).amax(1)
    near = 8 * U32 * (u_parts.double().abs().sum(0) + b.double().abs()).amax(1)
    odd = ~wanted.float().isfinite()
    assert odd.sum() >= 2 and torch.equal(y[odd].isnan(), wanted[odd].isnan())
    assert ((y.double() - wanted).abs() <= 2 * near)[~odd].all()


# --- the binding's checks ---------------------------------------------------------------------

B, K, N, M, POOL = 3, 8, 12, 4, 3


def arguments(form: str) -> dict[str, object]:
    """What the op "run" of a form takes, by name."""
    weight, bias, *_ = parameters(K, N, POOL, 2.0)
    w, b, w_exact, b_exact = chain.fold(torch.float32, weight, bias, POOL)
    x, y = drawn((B, K)), torch.empty(B)
    u = x @ w.T + b
    exact = {"w_exact": w_exact, "b_exact": b_exact}
    known = {
        "chain": {"x": x, "weight": weight, "bias": bias, "pool": POOL, "scale": 2.0, "y": y},
        "folded": {"x": x, "w": w, "b": b, "scale": 2.0, "y": y},
        "product": {"u": u, "scale": 2.0, "y": y},
        "parts": {"u_parts": torch.stack([u, u]), "b": b, "scale": 2.0, "y": y},
        "winner": {
            "u_parts": u.unsqueeze(0), "x": x, "w": w, "b": b, **exact, "scale": 2.0, "y": y,
        },
        "blocks": {
            "u": u, "x": x, "w": w, "b": b, **exact, "first": 0, "scale": 2.0,
            "ends": torch.empty(B, 2), "at": torch.empty(B, 2, dtype=torch.int64), "y": y,
        },
    }  # fmt: skip
    return known[form]


SOURCES = {"chain": CPU_RUNGS[0], "folded": CPU_RUNGS[1], "blocks": CPU_RUNGS[2]}


def op_of(form: str):
    flags = chain.OP.forms[form].flags
    if form in SOURCES:
        return ops.kernel_library(chain.SLUG, "cpu", [RUNGS[SOURCES[form]].source], flags=flags).op(
            "run"
        )
    text = """
    #include "problem.h"
    void launch(const PoolChain& p, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) p.y[i] = 1;
    }"""
    return ops.kernel_library(chain.SLUG, "cpu", {"any.cpp": text}, flags=flags).op("run")


WRONG = [
    ("chain", "x", lambda t: t[0], "x"),
    ("chain", "x", lambda t: t.double(), "x"),
    ("chain", "x", lambda t: t.t().contiguous().t(), "x"),
    ("chain", "x", lambda t: t[:, 1:], "weight"),
    ("chain", "weight", lambda t: t.double(), "weight"),
    ("chain", "weight", lambda t: t.t().contiguous().t(), "weight"),
    ("chain", "weight", lambda t: t[1:], "bias"),
    ("chain", "bias", lambda t: t.half(), "bias"),
    ("chain", "pool", lambda _: 0, "pool"),
    ("chain", "pool", lambda _: -1, "pool"),
    ("chain", "pool", lambda _: N + 1, "pool"),
    ("chain", "y", lambda t: t[1:], "y"),
    ("chain", "y", lambda t: t.double(), "y"),
    ("chain", "y", lambda t: t.unsqueeze(1), "y"),
    ("folded", "x", lambda t: t[:, :1].expand(B, K), "x"),
    ("folded", "w", lambda t: t[:, 1:], "w"),
    ("folded", "w", lambda t: t[1:], "b"),
    ("folded", "w", lambda t: t[:0], "w"),
    ("folded", "b", lambda t: t.double(), "b"),
    ("folded", "b", lambda t: t.repeat(2)[::2], "b"),
    ("folded", "y", lambda t: t.repeat(2)[::2], "y"),
    ("product", "u", lambda t: t.t().contiguous().t(), "u"),
    ("product", "u", lambda t: t[:, :0], "u"),
    ("product", "u", lambda t: t[1:], "y"),
    ("parts", "u_parts", lambda t: t[0], "u_parts"),
    ("parts", "u_parts", lambda t: t.double(), "u_parts"),
    ("parts", "u_parts", lambda t: t[:, :, 1:].contiguous(), "b"),
    ("parts", "b", lambda t: t[1:], "b"),
    ("winner", "u_parts", lambda t: t[:, 1:].contiguous(), "u_parts"),
    ("winner", "u_parts", lambda t: t[:, :, 1:].contiguous(), "u_parts"),
    ("winner", "w_exact", lambda t: t.float(), "w_exact"),
    ("winner", "w_exact", lambda t: t[1:], "w_exact"),
    ("winner", "b_exact", lambda t: t[:0], "b_exact"),
    ("winner", "w_exact", lambda t: t[:0, :0], "w_exact"),
    ("blocks", "u", lambda t: t[:, :0], "first"),
    ("blocks", "u", lambda t: t[1:], "u"),
    ("blocks", "u", lambda t: t.repeat(1, 2), "first"),
    ("blocks", "first", lambda _: -1, "first"),
    ("blocks", "first", lambda _: 1, "first"),
    ("blocks", "first", lambda _: 2**62, "first"),
    ("blocks", "ends", lambda t: t[:, :1], "ends"),
    ("blocks", "ends", lambda t: t.double(), "ends"),
    ("blocks", "at", lambda t: t.int(), "at"),
    ("blocks", "at", lambda t: t.t().contiguous().t(), "at"),
    ("blocks", "w_exact", lambda t: t.flatten()[1:].resize_(M, K), "w_exact"),
    ("blocks", "b_exact", lambda t: t.unsqueeze(0), "b_exact"),
]


@needs_compiler
@pytest.mark.parametrize("case", range(len(WRONG)))
def test_a_wrong_argument_is_named(case):
    form, name, change, named = WRONG[case]
    assert_argument_is_named(op_of(form), arguments(form), name, change, named)


@needs_compiler
@pytest.mark.parametrize(("columns", "kept"), [(M - 1, ()), (M - 1, ("at",)), (M, ("ends",))])
def test_a_block_of_some_features_wants_what_is_kept(columns, kept):
    given = arguments("blocks")
    given["u"] = given["u"][:, :columns].contiguous()
    given |= {name: None for name in ("ends", "at") if name not in kept}
    with pytest.raises(RuntimeError, match=r"^ends: got .*; wants both"):
        op_of("blocks")(*given.values())


@needs_compiler
@pytest.mark.parametrize(
    ("B", "M", "products"), [(9, 1, 0), (9, 3, 0), (9, 4, 1), (6, 8, 1), (7, 8, 2), (6, 9, 2)]
)
def test_how_a_product_is_cut_in_blocks(B, M, products, monkeypatch):
    """None of few features, one where all fit; also of an x whose features are not adjacent."""
    seen, product = [], gemm.product
    monkeypatch.setattr(gemm, "product", lambda *a: seen.append(a[1].size(0)) or product(*a))
    for name, value in {"FEW": 3, "FEATURES": 8, "ROWS": 6 if B < 9 else 9}.items():
        monkeypatch.setattr(chain, name, value)
    call = call_of(RUNGS["cpu"].source, "cpu", form_of("cpu"))
    given = parameters(33, 2 * M, 2, -2.0)
    for x in (drawn((B, 33), 7), drawn((33, B), 7).T, drawn((B, 66), 7)[:, ::2]):
        seen.clear()
        assert_right("cpu", call, x, given)
        assert len(seen) == products and (not seen or max(seen) <= 8)


@needs_compiler
def test_a_u_beyond_float32_is_infinite_however_it_is_multiplied():
    x, weight = torch.full((5, 4), 1e30), torch.full((2, 4), 1e20)
    for name in FEW:
        for sign, scale, y in [(1, 1e-30, INF), (1, -1e-30, -INF), (-1, 1e-30, NAN)]:
            found = rung(name, "cpu")(x, sign * weight, torch.zeros(2), 1, scale)
            assert found.isnan().all() if math.isnan(y) else (found == y).all()


@needs_compiler
def test_an_empty_batch_and_no_input_features_are_fine():
    for name in CPU_RUNGS:
        call = rung(name, "cpu")
        assert call(torch.empty(0, K), *parameters(K, N, POOL, 2.0)).shape == (0,)


# --- wrong kernels are found ------------------------------------------------------------------

SABOTAGE = {
    "the bias": ("cpu.cpp", "u + (p.b_exact ? p.b_exact[m] : p.b[m])", "u"),
    "the place": ("cpu.cpp", "at[winner.is_right]", "at[!winner.is_right]"),
    "the place in one block": (
        "cpu.cpp", "is_right ? ends.right : ends.left", "is_right ? ends.left : ends.right",
    ),
    "the sign that tells": ("cpu.cpp", "scale >= 0 && ends.right >= 0", "ends.right >= 0"),
    "a value that is found": ("cpu.cpp", "u[m] != value", "u[m] > value"),
    "the first of the block": ("cpu.cpp", "at[1] = p.first + ", "at[1] = "),
    "the block before": ("cpu.cpp", "p.first ? Ends<float>{kept[0], kept[1]} : ", ""),
    "the last feature": ("cpu_02_folded_one_chain.cpp", "k < p.K;", "k < p.K - 1;"),
    "the last group": ("cpu_02_folded_one_chain.cpp", "m < p.M;", "m < p.M - 1;"),
    "the pool's last row": (
        "cpu_01_rows_summed_each_call.cpp", "n < (m + 1) * p.pool", "n < (m + 1) * p.pool - 1",
    ),
    "the scale": ("cpu_01_rows_summed_each_call.cpp", "p.scale * gelu(u)", "gelu(u)"),
    "the bias of few features": (
        "cpu.cpp", "u[r][f] + (p.b_exact ? p.b_exact[m + f] : p.b[m + f])", "u[r][f]",
    ),
    "features left over": ("cpu.cpp", "case 2: join_features<Rows, 2>(p, i, m, ends);", "case 2:"),
    "inputs left over": ("cpu.cpp", "u[r][m] += static_cast", "u[r][m] += 0 * static_cast"),
    "rows left over": ("cpu.cpp", "for (; i < end; ++i) from_x<1>(p, i);", ""),
    "a row": ("cpu_02_folded_one_chain.cpp", "i = begin;", "i = begin + 1;"),
}  # fmt: skip


def text_of(file: str) -> str:
    """A rung's file; that of the best one with the headers of its own in it."""
    if file != "cpu.cpp":
        return (FOLDER / file).read_text(encoding="utf-8")
    parts = [(FOLDER / name).read_text(encoding="utf-8") for name in ("row.h", "few.h", file)]
    return re.sub(r'#pragma once|#include "(row|few).h"', "", "".join(parts))


@needs_compiler
@pytest.mark.parametrize("name", SABOTAGE)
def test_control_a_sabotaged_kernel_is_rejected(name, monkeypatch):
    file, old, new = SABOTAGE[name]
    text, stem = text_of(file), file.removesuffix(".cpp")
    assert text.count(old) == 1
    call = call_of({file: text.replace(old, new)}, "cpu", form_of(stem))
    with pytest.raises(AssertionError):
        for few, features in [(0, 3), (0, 512), (512, 512)]:  # blocks, one block, no library
            monkeypatch.setattr(chain, "FEATURES", features)
            for scale in (-2.0, 2.0):
                given = parameters(201, 21, 2, scale)
                assert_right(stem, with_few(call, few), drawn((43, 201), 7), given)


@needs_compiler
def test_control_the_bound_sees_wrong_weights():
    x, (weight, bias, *options) = drawn((9, 301), 7), parameters(301, 24, 3, 2.0)
    y = rung("cpu", "cpu")(x, weight * 1.001, bias, *options)
    with pytest.raises(AssertionError, match="no u has that value|times the bound"):
        assert_is_the_largest(y, x, weight, bias, *options, exact=True, folded=True)


# --- the files --------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.name)
def test_a_rung_is_short_and_opens_with_what_it_does(file):
    assert_opens_well(file, r"y(\[i\])? = ", 64)


def test_every_file_is_a_rung_or_a_control():
    known = {v.source for v in PROBLEM.variants if v.source and v.source.parent == FOLDER}
    assert set(FILES) == known
    best = {FOLDER / name for k in chain.OP.kernels.values() for name in k.files}
    assert best <= known


def flags_of(file) -> list[str]:
    variant = next(v for v in PROBLEM.variants if v.source == file)
    return ["-DWB_CUDA", *variant.flags]


@needs_nvcc
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("file", [f for f in FILES if f.suffix == ".cu"], ids=lambda p: p.name)
def test_compiles_without_spills(file, arch):
    include = [FOLDER, paths.kernels() / "common"]
    report = build.cubin(file, arch=arch, include=include, flags=flags_of(file))
    assert report.kernels and report.path.stat().st_size > 0
    for kernel in report.kernels:
        assert kernel.spill_bytes == 0, kernel
        assert kernel.stack_bytes == 0, kernel
        assert 0 < kernel.registers <= 128, kernel
        assert re.search(r"[a-z_]+_kernel\b", kernel.name), "the name spells what is fused"
