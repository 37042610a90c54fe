"""Products of halves on a Hopper GPU: the splitting, its layout, the product, where they serve.

Oracles: float64, and `workbook.halves`, the splitting in plain torch. Without such a GPU kernels
are compiled to cubin, and their machine code is read.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kit import assert_accurate, drawn
from torch import Tensor

import workbook as wb
from workbook import build, halves, paths, precision, split, tools

U32 = 2.0**-24
KERNELS = paths.kernels()
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="no Hopper GPU here",
)
needs_nvcc = pytest.mark.skipif(tools.nvcc() is None, reason="no nvcc here")
# B, K, N: one, odd, around a tile's 128 x 256, around panels of 64 of k
SHAPES = [(1, 1, 1), (7, 7, 5), (129, 65, 257), (128, 64, 256), (257, 1000, 129), (3, 8200, 300),
          (1031, 67, 33), (300, 4097, 520), (1, 131072, 3)]  # fmt: skip


def rows_of(stored: Tensor, rows: int, K: int) -> Tensor:
    """The matrix (rows, K) that stands by panels, 16 bytes of a row swizzled."""
    panels, height, width = stored.shape
    chunks = stored.view(panels, height, width // 8, 8)
    row = torch.arange(height, device=stored.device)
    order = torch.arange(4, device=stored.device).unsqueeze(0) ^ (row // 2 % 4).unsqueeze(1)
    plain = chunks.gather(2, order.view(1, height, 4, 1).expand_as(chunks))
    return plain.reshape(panels, height, width).transpose(0, 1).reshape(height, -1)[:rows, :K]


def relative(z: Tensor, x: Tensor, W: Tensor) -> float:
    true = x.double() @ W.double().T
    return ((z.double() - true).norm() / true.norm()).item()


# --- splitting ------------------------------------------------------------------------------


@on_hopper
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (9, 31), (8, 64), (130, 2049), (3, 8196), (2, 40000)])
def test_split_as_in_plain_torch(shape, dtype):
    W = drawn(shape, 1, dtype) * torch.exp2(torch.arange(shape[1]) % 37 - 18).to(dtype)
    W[0, 0] = 0
    found = split.halved(W.cuda())
    columns = halves.column_exponents(W)
    hi, lo, exponents = halves.split(W, -columns)
    assert torch.equal(found.columns.cpu().int(), columns)
    assert torch.equal(found.exponents.cpu(), exponents)
    assert torch.equal(rows_of(found.hi, *shape).cpu(), hi)
    assert torch.equal(rows_of(found.lo, *shape).cpu(), lo)


@on_hopper
def test_split_of_zeros_and_of_the_least_and_largest_numbers():
    W = torch.stack([torch.zeros(70), torch.full((70,), 1e-41), torch.full((70,), 3e38)])
    found = split.halved(W.cuda())
    hi, lo = (rows_of(t, 3, 70).double() for t in found[:2])
    scale = (found.exponents.double().unsqueeze(1) + found.columns.double()).exp2()
    torch.testing.assert_close((hi + lo) * scale, W.double().cuda(), rtol=2e-6, atol=0)


@on_hopper
def test_what_stands_behind_k_is_zero():
    found = split.halved(drawn((5, 70), 2).cuda())
    assert found.hi.shape == (4, 8, 32)
    whole = rows_of(found.hi, 5, 128)
    assert (whole[:, 70:] == 0).all() and (whole[:, :70] != 0).any()


# --- the product ------------------------------------------------------------------------------


@on_hopper
@pytest.mark.parametrize("shape", SHAPES)
def test_product(shape):
    B, K, N = shape
    x, W = drawn((B, K), 3).cuda(), drawn((N, K), 4).cuda()
    parts = split.product(x, split.halved(W))
    assert parts.shape[1:] == (B, N) and not parts.isnan().any()
    # two splits of 2^-23, then one rounding to nearest for every 64 of k
    assert relative(parts.double().sum(0), x, W) < 4 * U32 + 0.3 * U32 * math.sqrt(K / 64) + 2e-7


@on_hopper
@pytest.mark.parametrize("family", ["rows", "columns", "against each other", "mean"])
def test_product_of_families(family):
    x, W = drawn((200, 1500), 5), drawn((300, 1500), 6)
    powers = torch.exp2(torch.randint(-20, 21, (1500,), generator=torch.manual_seed(0)).float())
    if family == "rows":
        x, W = x * powers[:200, None], W * powers[300:600, None]
    elif family == "mean":
        x = x + 1000
    else:
        x = x * powers
        W = W / powers if family == "against each other" else W
    x, W = x.cuda(), W.cuda()
    z, true = split.product(x, split.halved(W)).sum(0), x.double() @ W.double().T
    assert_accurate(*(t.cpu() for t in (z, torch.mm(x, W.T), true)))


@on_hopper
def test_control_without_equalised_columns_a_family_is_lost():
    x, W = drawn((200, 1500), 5), drawn((300, 1500), 6)
    powers = torch.exp2(torch.randint(-20, 21, (1500,), generator=torch.manual_seed(0)).float())
    x, W = (x * powers).cuda(), (W / powers).cuda()
    none = torch.zeros(1500, dtype=torch.int8, device="cuda")
    z = split.product(x, split._split(W, none, True, None)).sum(0)
    assert relative(z, x, W) > 1e-3


@pytest.mark.parametrize(
    ("shape", "outputs", "tiles", "parts"),
    [
        ((1024, 8192), 8192, 256, 1),
        ((1024, 8192), 512, 16, 8),
        ((128, 32768), 16384, 64, 2),
        ((129, 8192), 257, 4, 32),  # 33 parts would fit; 128 panels of k are enough for 32
        ((1, 100), 1, 1, 1),
        ((1, 8192), 0, 1, 32),
    ],
)
def test_where_tiles_are_few_k_is_cut(shape, outputs, tiles, parts):
    assert split.cut(*shape, outputs, 132) == (tiles, parts)


@on_hopper
def test_repeats_are_bit_identical():
    x, W = drawn((300, 2000), 7).cuda(), drawn((700, 2000), 8).cuda()
    first = split.product(x, split.halved(W))
    assert all(torch.equal(split.product(x, split.halved(W)), first) for _ in range(5))


@on_hopper
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_stays_alone(value):
    x, W = drawn((140, 500), 9).cuda(), drawn((300, 500), 10).cuda()
    clean = split.product(x, split.halved(W)).sum(0)
    x[17, 3] = value
    z = split.product(x, split.halved(W)).sum(0)
    assert not z[17].isfinite().any()
    others = torch.arange(140) != 17
    assert torch.equal(z[others.cuda()], clean[others.cuda()])


@on_hopper
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_of_weights_that_is_not_finite_is_taken_as_it_is(value):
    x, W = drawn((140, 500), 9).cuda().abs() + 0.1, drawn((300, 500), 10).cuda()
    clean = split.product(x, split.halved(W)).sum(0)
    W[290, 499] = value
    z = split.product(x, split.halved(W), whole=W).sum(0)
    others = (torch.arange(300) != 290).cuda()
    torch.testing.assert_close(z[:, others], clean[:, others], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(z[:, 290], torch.mm(x, W[290:].T)[:, 0], equal_nan=True)


@on_hopper
def test_centred():
    x, W = drawn((200, 900), 11).cuda() + 1000, drawn((300, 900), 12).cuda()
    centre = x.mean(0)
    z = split.product(x, split.halved(W), centre=centre).sum(0)
    true = (x.double() - centre.double()) / 2 @ W.double().T
    assert ((z - true).norm() / true.norm()).item() < 3e-7


@on_hopper
@pytest.mark.parametrize("view", ["transposed", "stepped", "offset", "expanded"])
def test_views(view):
    W = drawn((300, 900), 12).cuda()
    x = {
        "transposed": lambda: drawn((900, 200), 1).cuda().T,
        "stepped": lambda: drawn((200, 1800), 1).cuda()[:, ::2],
        "offset": lambda: drawn((201, 901), 1).cuda()[1:, 1:],
        "expanded": lambda: drawn((1, 900), 1).cuda().expand(200, 900),
    }[view]()
    assert relative(split.product(x, split.halved(W)).sum(0), x, W) < 3e-7
    assert relative(split.product(W, split.halved(x)).sum(0), W, x) < 3e-7


@on_hopper
def test_arguments_are_named():
    x, weight = drawn((5, 70), 1).cuda(), split.halved(drawn((9, 70), 2).cuda())
    with pytest.raises(RuntimeError, match="columns"):
        split.product(x[:, :60], weight)
    with pytest.raises(RuntimeError, match="wants a GPU"):
        split.product(x.cpu(), weight)


# --- where it serves --------------------------------------------------------------------------


CHAINS = {
    "matmul_avgpool_gelu_scale_max": (1000, 4096, 4, -1.5),
    "gemm_batchnorm_scale_softmax": (1000, 2049),
    "matmul_maxpool_sum_scale": (1000, 4097, 2, 0.5),
}


@on_hopper
@pytest.mark.parametrize("slug", CHAINS)
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_the_drop_in_takes_it_where_it_is_large(slug, mode, monkeypatch):
    p = wb.problem(slug)
    model = p.Model(*CHAINS[slug]).cuda().train(mode == "train")
    seen, product = [], split.product
    monkeypatch.setattr(split, "product", lambda *a, **k: seen.append(1) or product(*a, **k))
    new = p.drop_in(model)
    x = drawn((1031, 1000), 1).cuda()
    with torch.no_grad():
        y, eager, true = new(x), model(x), model.double()(x.double())
        assert seen
        assert_accurate(*(t.cpu() for t in (y, eager, true)))
        model.float()
        seen.clear()
        new(x[:2])
        assert not seen, "too small"
        with precision.using_route("tf32"):
            new(x)
        assert not seen, "the user's route is faster"


@on_hopper
def test_halves_of_a_parameter_follow_it():
    weight = torch.nn.Parameter(drawn((300, 900), 12).cuda())
    x = drawn((200, 900), 1).cuda()
    first = split.kept(weight)
    assert split.kept(weight).hi is first.hi
    with torch.no_grad():
        weight.mul_(2)
    assert relative(split.product(x, split.kept(weight)).sum(0), x, weight.detach()) < 3e-7


def test_without_such_a_gpu_the_portable_kernels_serve():
    assert not split.suits(torch.empty(1024, 8192), 8192)


# --- machine code -----------------------------------------------------------------------------


def cubin(name: str, arch: str) -> build.CubinReport:
    file = KERNELS / name / f"{name}.cu"
    return build.cubin(file, arch=arch, include=[KERNELS / "common"], flags=["-DWB_CUDA"])


@needs_nvcc
@pytest.mark.parametrize("name", ["split_rows", "column_exponents"])
@pytest.mark.parametrize("arch", ["80", "90", "100"])
def test_splitting_compiles_without_spills(name, arch):
    for kernel in cubin(name, arch).kernels:
        assert kernel.spill_bytes == kernel.stack_bytes == 0, kernel


@needs_nvcc
def test_the_product_has_hopper_s_instructions():
    report = cubin("split_product", "90a")
    assert [kernel.spill_bytes for kernel in report.kernels] == [0]
    assert "wgmma" not in report.log, "no remark that products wait for one another"
    code = disassembled(report.path)
    assert "HGMMA.64x128x16.F32" in code and "UTMALDG.3D" in code
    assert code.count("HGMMA") == 2 * 12, "two turns, twelve products each"


@needs_nvcc
def test_control_other_architectures_do_not_have_them():
    with pytest.raises(build.BuildError) as raised:
        cubin("split_product", "90")
    assert "wgmma" in raised.value.log and "not supported on .target" in raised.value.log


def disassembled(file: Path) -> str:
    """By nvdisasm: on PATH, beside nvcc, or from its package in this environment."""
    packages = Path(sys.prefix).glob("lib/*/site-packages/nvidia/*/bin")
    near = [Path(tools.nvcc() or ".").resolve().parent, *packages]
    found = shutil.which("nvdisasm") or next(
        (str(folder / "nvdisasm") for folder in near if (folder / "nvdisasm").is_file()), None
    )
    if found is None:
        pytest.skip("no nvdisasm here: pip install nvidia-cuda-nvdisasm")
    done = subprocess.run([found, str(file)], capture_output=True, text=True, check=True)
    return done.stdout
