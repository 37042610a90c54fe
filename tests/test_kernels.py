"""The kernels of the sum chain: each rung within the bound of its own arithmetic.

A bound follows from the order and the type of a rung's additions; no tolerance is picked by hand.
CPU rungs are built and run; CUDA rungs are compiled to cubin where nvcc is, run where a GPU is.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import assert_opens_well
from sum_chain import DEVICES, PROBLEM, Model, drawn, needs_compiler, needs_gpu, needs_nvcc
from torch import Tensor

from workbook import build, ops, paths
from workbook.chains import matmul_sum_max_mean_logsumexp as chain

FOLDER = paths.kernels() / PROBLEM.slug
INCLUDE = [FOLDER, paths.kernels() / "common"]
U32, U64 = 2.0**-24, 2.0**-53  # unit roundoffs
TINY = 2.0**-149  # the least float32: an underflow loses no more
ARCHITECTURES = ["80", "90", "100"]
FILES = sorted(p for p in FOLDER.iterdir() if p.suffix in (".cpp", ".cu") and p.stem != "binding")
RUNGS = {v.name: v for v in PROBLEM.variants if v.is_rung}
CPU_RUNGS = [name for name, v in RUNGS.items() if v.devices == ("cpu",)]
CUDA_RUNGS = [name for name, v in RUNGS.items() if v.devices == ("cuda",)]
ALL_RUNGS = [
    *(pytest.param(name, "cpu", marks=needs_compiler) for name in CPU_RUNGS),
    *(pytest.param(name, "cuda", marks=needs_gpu) for name in CUDA_RUNGS),
]

# run(x, weight, bias, w_sum, b_sum, y): a rung takes those of its form
Run = Callable[..., None]


def run_of(source, device: str, *, folded: bool) -> Run:
    """The op of a rung's file, or of {file name: text}."""
    sources = source if isinstance(source, dict) else [source]
    flags = [] if folded else ["-DWB_CHAIN"]
    run = ops.kernel_library(PROBLEM.slug, device, sources, flags=flags).op("run")
    if folded:
        return lambda x, weight, bias, w_sum, b_sum, y: run(x, w_sum, b_sum, y)
    return lambda x, weight, bias, w_sum, b_sum, y: run(x, weight, bias, y)


def rung_of(name: str, device: str) -> Run:
    return run_of(RUNGS[name].source, device, folded=is_folded(name))


def parameters(K: int, N: int, seed: int = 0, device: str = "cpu") -> tuple[Tensor, ...]:
    """weight (N, K), bias (N,), and their folds in float64, made here."""
    weight, bias = drawn((N, K), seed), drawn((N,), seed + 1)
    folded = weight.double().sum(0), bias.double().sum()
    return tuple(t.to(device) for t in (weight, bias, *folded))


def poisoned(rows: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """y (rows, 1) full of NaN inside a larger memory, whose margins nobody may write."""
    memory = torch.full((rows + 16, 1), float("nan"), device=device)
    memory[:8], memory[rows + 8 :] = -7.0, -7.0
    return memory[8 : rows + 8], memory


def called(run: Run, x: Tensor, given: tuple[Tensor, ...]) -> Tensor:
    y, memory = poisoned(x.size(0), x.device.type)
    run(x, *given, y)
    assert (memory[:8] == -7).all() and (memory[x.size(0) + 8 :] == -7).all(), "written outside"
    return y


def bound(x: Tensor, given: tuple[Tensor, ...], *, folded: bool) -> Tensor:
    """The largest error (B, 1) that a rung may make, whatever the order of its additions.

    A sum of n terms errs by at most n u times the sum of the magnitudes, its products included;
    the result is rounded to float32 once (rung 1 rounds each z[n] too, and adds them in double).
    """
    weight, bias, w_sum, b_sum = (t.double() for t in given)
    x, K, N = x.double(), x.size(1), weight.size(0)
    whole = x @ w_sum.unsqueeze(1) + b_sum
    if folded:
        size = x.abs() @ w_sum.abs().unsqueeze(1) + b_sum.abs()
        errs = 1.01 * (K + 2) * U64 * size
    else:
        size = x.abs() @ weight.abs().sum(0).unsqueeze(1) + bias.abs().sum()
        errs = 1.01 * ((K + 2) * U32 + N * U64) * size + (K + 1) * N * TINY
    return errs + 1.01 * U32 * whole.abs() + TINY


def assert_within_bound(run: Run, x: Tensor, given: tuple[Tensor, ...], *, folded: bool) -> None:
    """Every row of y written, and within its bound of the float64 oracle."""
    y = called(run, x, given)
    weight, bias = given[0].double(), given[1].double()
    true = (x.double() @ weight.T).sum(1, keepdim=True) + bias.sum()
    # the oracle's own error, in float64
    size = x.double().abs() @ weight.abs().sum(0).unsqueeze(1) + bias.abs().sum()
    allowed = bound(x, given, folded=folded) + (x.size(1) + weight.size(0) + 2) * U64 * size
    excess = (y.double() - true).abs() / allowed.clamp_min(TINY)
    assert not y.isnan().any(), "a row is not written"
    assert not (excess > 1).any(), f"{excess.max():.3g} times the bound"


def is_folded(name: str) -> bool:
    return RUNGS[name].reads == "after"


# --- right, at any shape and stride -----------------------------------------------------------

SHAPES = [
    (1, 1, 1),
    (3, 7, 5),
    (5, 33, 17),
    (17, 4, 1),
    (2, 129, 3),
    (9, 2048, 11),
    (4, 2052, 6),  # beyond kShortRow of rung 5, rows of float4
    (3, 2051, 6),  # and not of float4
    (2, 9000, 3),
    (65, 100, 100),
    (0, 7, 5),
    (3, 0, 5),
    (3, 7, 0),
    (3, 0, 0),
]


@pytest.mark.parametrize(("name", "device"), ALL_RUNGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_within_bound(name, device, shape):
    B, K, N = shape
    run = rung_of(name, device)
    assert_within_bound(
        run, drawn((B, K), 7).to(device), parameters(K, N, device=device), folded=is_folded(name)
    )


@pytest.mark.parametrize(("name", "device"), ALL_RUNGS)
def test_many_short_rows(name, device):
    """More rows than a grid's y or z may have, and than one block has threads."""
    run = rung_of(name, device)
    x = drawn((70001, 3), 7).to(device)
    assert_within_bound(run, x, parameters(3, 2, device=device), folded=is_folded(name))


@pytest.mark.parametrize(("name", "device"), ALL_RUNGS)
@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(0, 19),
    features=st.integers(0, 90),
    outs=st.integers(0, 9),
    gap=st.integers(0, 7),
    offset=st.integers(0, 5),
    overlap=st.booleans(),
    seed=st.integers(0, 99),
)
def test_within_bound_at_any_stride(name, device, rows, features, outs, gap, offset, overlap, seed):
    """Rows at any distance and alignment; overlapping rows, or one row for all."""
    stride = gap if overlap else features + gap
    memory = drawn((offset + rows * stride + features + 1,), seed).to(device)
    x = memory.as_strided((rows, features), (stride, 1), offset)
    run = rung_of(name, device)
    given = parameters(features, outs, seed, device)
    assert_within_bound(run, x, given, folded=is_folded(name))


@pytest.mark.parametrize(("name", "device"), ALL_RUNGS)
@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e30], ids=str)
def test_values_of_every_size(name, device, size):
    """Denormals and large values; the weights are scaled so that y is finite."""
    weight, bias, w_sum, b_sum = parameters(101, 7, device=device)
    scale = 1e-3 if size > 1 else 1.0
    given = (weight * scale, bias, (weight * scale).double().sum(0), b_sum)
    x = (drawn((5, 101), 3).to(device).double() * size).float()
    assert_within_bound(rung_of(name, device), x, given, folded=is_folded(name))


@pytest.mark.parametrize(("name", "device"), ALL_RUNGS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("row", [0, 2, 8])
def test_what_is_not_finite_stays_in_its_row(name, device, value, row):
    run, given = rung_of(name, device), parameters(37, 5, device=device)
    x = drawn((9, 37), 3).to(device)
    clean = called(run, x, given)
    for column in (0, 17, 36):
        spoiled = x.clone()
        spoiled[row, column] = value
        y = called(run, spoiled, given)
        others = [i for i in range(9) if i != row]
        assert torch.equal(y[others], clean[others]) and not torch.isfinite(y[row]).any()


# --- the same on every run --------------------------------------------------------------------


@pytest.mark.parametrize(("name", "device"), ALL_RUNGS)
@pytest.mark.parametrize("size", [(37, 5), (2050, 3), (2052, 3), (4096, 2)], ids=str)
def test_bits_depend_on_the_row_alone(name, device, size):
    """Not on the run, the batch around it, its order, or its place in it."""
    run, given = rung_of(name, device), parameters(*size, device=device)
    x = drawn((43, size[0]), 3).to(device)
    y = called(run, x, given)
    order = torch.randperm(43, generator=torch.Generator().manual_seed(1)).to(device)
    assert torch.equal(called(run, x, given), y)
    assert torch.equal(called(run, x[order], given), y[order])
    for rows in (slice(0, 1), slice(5, 8), slice(1, None), slice(0, 40)):
        assert torch.equal(called(run, x[rows], given), y[rows])


@needs_compiler
@pytest.mark.parametrize("name", CPU_RUNGS)
def test_bits_do_not_depend_on_threads(name):
    """From one thread to more threads than rows."""
    run, given, x = rung_of(name, "cpu"), parameters(9001, 3), drawn((23, 9001), 3)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            found += [called(run, x[:rows], given)[:2] for rows in (2, 5, 23)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(y, found[0]) for y in found)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=needs_compiler), DEVICES[1]])
def test_every_alignment_is_within_the_bound(device):
    """Rungs choose their loads by alignment; the rows are long and of whole float4."""
    given = parameters(2052, 3, device=device)
    for name in CPU_RUNGS if device == "cpu" else CUDA_RUNGS:
        run, memory = rung_of(name, device), drawn((5 * 2052 + 4,), 3).to(device)
        for offset in range(4):
            x = memory.as_strided((5, 2052), (2052, 1), offset)
            assert_within_bound(run, x, given, folded=is_folded(name))


# --- the binding's checks ---------------------------------------------------------------------

B, K, N = 3, 8, 5


def arguments(device: str) -> dict[str, Tensor]:
    names = ("weight", "bias", "w_sum", "b_sum")
    values = parameters(K, N, device=device)
    return {
        "x": drawn((B, K)).to(device),
        **dict(zip(names, values, strict=True)),
        "y": torch.empty(B, 1, device=device),
    }


WRONG = [
    ("x", lambda t: t[0], "x"),
    ("x", lambda t: t.unsqueeze(0), "x"),
    ("x", lambda t: t.double(), "x"),
    ("x", lambda t: t.half(), "x"),
    ("x", lambda t: t.t().contiguous().t(), "x"),
    ("x", lambda t: t[:, :1].expand(B, K), "x"),
    ("x", lambda t: t[:, 1:], "w_sum"),
    ("x", lambda t: t[1:], "y"),
    ("weight", lambda t: t.double(), "weight"),
    ("weight", lambda t: t[:, 1:], "weight"),
    ("weight", lambda t: t[0], "weight"),
    ("weight", lambda t: t.flatten()[0], "weight"),
    ("weight", lambda t: t.unsqueeze(0), "weight"),
    ("weight", lambda t: t[1:], "bias"),
    ("bias", lambda t: t.half(), "bias"),
    ("bias", lambda t: t[1:], "bias"),
    ("bias", lambda t: t[:1], "bias"),
    ("bias", lambda t: t.unsqueeze(1), "bias"),
    ("w_sum", lambda t: t.float(), "w_sum"),
    ("w_sum", lambda t: t[1:], "w_sum"),
    ("w_sum", lambda t: t.repeat(2)[::2], "w_sum"),
    ("w_sum", lambda t: t[:1].expand(K), "w_sum"),
    ("w_sum", lambda t: t.repeat(2)[1 : K + 1], "w_sum"),
    ("b_sum", lambda t: t.float(), "b_sum"),
    ("b_sum", lambda t: t.unsqueeze(0), "b_sum"),
    ("y", lambda t: t.double(), "y"),
    ("y", lambda t: t.flatten(), "y"),
    ("y", lambda t: t[1:], "y"),
    ("y", lambda t: t.repeat(2, 1)[::2], "y"),
    ("y", lambda t: t[:1].expand(B, 1), "y"),
]


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=needs_compiler), DEVICES[1]])
@pytest.mark.parametrize("case", range(len(WRONG)))
def test_a_wrong_argument_is_named(device, case):
    name, change, named = WRONG[case]
    folded = {"cpu": "cpu", "cuda": "05_whole_row_in_flight"}
    chain = {"cpu": "cpu_01_row_at_a_time", "cuda": "01_row_in_shared"}
    run = rung_of((chain if name in ("weight", "bias") else folded)[device], device)
    given = arguments(device)
    run(*given.values())
    given[name] = change(given[name])
    with pytest.raises(RuntimeError, match=rf"^{named}: .*wants"):
        run(*given.values())


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=needs_compiler), DEVICES[1]])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_rung_that_reads_the_weights_wants_them_contiguous(device, name):
    run = rung_of("cpu_01_row_at_a_time" if device == "cpu" else "01_row_in_shared", device)
    given = arguments(device)
    run(*given.values())
    given[name] = given[name].repeat_interleave(2, -1)[..., ::2]
    with pytest.raises(RuntimeError, match=f"^{name}: .*not contiguous"):
        run(*given.values())


@needs_compiler
@pytest.mark.parametrize("name", ["x", "weight", "bias", "w_sum", "b_sum", "y"])
def test_an_argument_without_memory_is_refused(name):
    given = arguments("cpu")
    given[name] = given[name].to("meta")
    rung = "cpu_01_row_at_a_time" if name in ("weight", "bias") else "cpu"
    with pytest.raises((RuntimeError, NotImplementedError)):
        rung_of(rung, "cpu")(*given.values())


@needs_gpu
@pytest.mark.parametrize("name", ["weight", "bias", "w_sum", "b_sum", "y"])
def test_an_argument_on_another_device_is_refused(name):
    given = arguments("cuda")
    given[name] = given[name].cpu()
    rung = "01_row_in_shared" if name in ("weight", "bias") else "05_whole_row_in_flight"
    with pytest.raises(RuntimeError, match="another device"):
        rung_of(rung, "cuda")(*given.values())


@needs_gpu
def test_a_row_too_long_for_shared_memory_is_an_error_not_a_wrong_answer():
    run = rung_of("01_row_in_shared", "cuda")
    given = parameters(3, 100_000, device="cuda")
    with pytest.raises(RuntimeError, match="sum chain: cuda"):
        run(torch.rand(2, 3, device="cuda"), *given, torch.empty(2, 1, device="cuda"))
    y = called(run, torch.rand(2, 3, device="cuda"), parameters(3, 20_000, device="cuda"))
    assert torch.isfinite(y).all()


@needs_gpu
def test_rows_beyond_two_to_the_31_elements():
    """64-bit indices: the last row of x lies 9 GB into its memory."""
    x = torch.empty(2**21 + 1, 1025, device="cuda")
    x[-1], x[0] = 1.0, 2.0
    for name in CUDA_RUNGS[1:]:
        given = parameters(1025, 2, device="cuda")
        y, _ = poisoned(x.size(0), "cuda")
        rung_of(name, "cuda")(x, *given, y)
        wanted = (given[2].sum() + given[3]).float()
        torch.testing.assert_close(y[-1, 0], wanted, rtol=1e-6, atol=1e-5)


# --- controls: what these assertions reject ---------------------------------------------------

SABOTAGE = {
    "bias left out": ("cpu.cpp", "total + *p.b_sum", "total"),
    "last feature left out": ("cpu_02_folded_one_chain.cpp", "k < p.K;", "k < p.K - 1;"),
    "added in float32": ("cpu_02_folded_one_chain.cpp", "double sum = 0", "float sum = 0"),
    "last row not written": ("cpu_02_folded_one_chain.cpp", "i < end;", "i < end - (end == p.B);"),
    "written beyond the end": (
        "cpu_02_folded_one_chain.cpp",
        "p.y[i] =",
        "p.y[i + (i == p.B - 1)] = p.y[i] =",
    ),
    "bias once, not each feature's": ("cpu_01_row_at_a_time.cpp", "dot + p.b[n]", "dot + p.b[0]"),
}


@needs_compiler
@pytest.mark.parametrize("name", SABOTAGE)
def test_control_a_sabotaged_kernel_is_rejected(name):
    file, old, new = SABOTAGE[name]
    text = (FOLDER / file).read_text(encoding="utf-8")
    assert text.count(old) == 1
    folded = is_folded(file.removesuffix(".cpp"))
    run = run_of({file: text.replace(old, new)}, "cpu", folded=folded)
    with pytest.raises(AssertionError):
        assert_within_bound(run, drawn((9, 1001), 7), parameters(1001, 5), folded=folded)


@needs_compiler
def test_control_a_stale_and_a_rounded_fold_are_rejected():
    run, x, given = rung_of("cpu", "cpu"), drawn((9, 1001), 7), parameters(1001, 50)
    weight, bias, w_sum, b_sum = given
    assert_within_bound(run, x, given, folded=True)
    running = torch.zeros(1001)
    for row in weight:
        running += row
    for wrong in (
        (weight * 1.001, bias, w_sum, b_sum),  # stale
        (weight, bias, running.double(), b_sum),  # a running sum in float32
        (weight, bias, w_sum, b_sum.new_zeros(())),
    ):
        with pytest.raises(AssertionError):
            assert_within_bound(run, x, wrong, folded=True)


@pytest.mark.parametrize("name", ["wrong_literal_log_exp", "wrong_log_exp"])
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=needs_compiler), DEVICES[1]])
def test_control_log_exp_overflows(name, device):
    """Right for small sums, so that shape tests would pass it; not for a sum of 100."""
    variant = PROBLEM.variant(name)
    if device not in variant.devices:
        pytest.skip(f"{name} is not for {device}")
    torch.manual_seed(0)
    model = Model(8, 4).to(device)
    call = variant.make(model)
    x = drawn((3, 8)).to(device)
    torch.testing.assert_close(call(x), model(x).detach(), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        model.linear.bias.fill_(100.0)
    assert torch.isfinite(model(x)).all() and not torch.isfinite(call(x)).any()


@needs_gpu
def test_control_one_block_launches_no_more_than_1024():
    model = Model(8, 4).cuda()
    call = PROBLEM.variant("wrong_one_block").make(model)
    torch.use_deterministic_algorithms(True)  # new memory is NaN
    try:
        for batch in (1024, 1025):
            y = call(drawn((batch, 8)).cuda())
            assert bool(torch.isfinite(y).all()) == (batch == 1024)
    finally:
        torch.use_deterministic_algorithms(False)


# --- the files --------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.name)
def test_a_rung_is_short_and_opens_with_what_it_does(file):
    assert_opens_well(file, r"y(\[i\])? = ", 60)


def test_every_file_is_a_rung_or_a_control():
    known = {v.source for v in PROBLEM.variants if v.source}
    assert set(FILES) == known
    best = {FOLDER / name for k in chain.OP.kernels.values() for name in k.files}
    assert best <= known


def flags_of(file) -> list[str]:
    variant = next(v for v in PROBLEM.variants if v.source == file)
    return ["-DWB_CUDA", *variant.flags]


@pytest.fixture(scope="module")
def cubins() -> dict:
    """(file, architecture) -> report."""
    return {
        (file.name, arch): build.cubin(file, arch=arch, include=INCLUDE, flags=flags_of(file))
        for file in FILES
        if file.suffix == ".cu"
        for arch in ARCHITECTURES
    }


@needs_nvcc
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("file", [f.name for f in FILES if f.suffix == ".cu"])
def test_compiles_without_spills(cubins, file, arch):
    report = cubins[file, arch]
    assert report.kernels and report.path.stat().st_size > 0
    for kernel in report.kernels:
        assert kernel.spill_bytes == 0, kernel
        assert kernel.stack_bytes == 0, kernel
        assert 0 < kernel.registers <= 128, kernel
        assert re.search(r"[a-z_]+_kernel\b", kernel.name), "the name spells what is fused"


@needs_nvcc
def test_the_best_kernel_keeps_its_blocks_resident(cubins):
    """8 blocks of 128 threads a multiprocessor: at most 64 registers a thread."""
    for arch in ARCHITECTURES:
        kernels = cubins["05_whole_row_in_flight.cu", arch].kernels
        assert len(kernels) == 4  # a warp or a block a row, by 4 or by 16 bytes
        assert all(kernel.registers <= 64 for kernel in kernels)


@needs_nvcc
def test_control_a_spill_is_seen():
    text = """
    extern "C" __global__ void __launch_bounds__(1024) many_kernel(float* p) {
      float v[96];
    #pragma unroll
      for (int i = 0; i < 96; ++i) v[i] = p[i * 1024 + threadIdx.x];
      for (int j = 0; j < 1000; ++j)
    #pragma unroll
        for (int i = 0; i < 96; ++i) v[i] = v[i] * v[(i * 7 + 1) % 96] + v[(i + 13) % 96];
    #pragma unroll
      for (int i = 0; i < 96; ++i) p[i * 1024 + threadIdx.x] = v[95 - i];
    }
    """
    assert build.cubin(text, arch="90").kernels[0].spill_bytes > 0
