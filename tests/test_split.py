"""Products of halves on a Hopper GPU: the splitting, its layout, the product, where they serve.

Oracles: float64, and `workbook.halves`, the splitting in plain torch. Without such a GPU kernels
are compiled to cubin, and their machine code is read.
"""

from __future__ import annotations

import math
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from kit import assert_accurate, drawn, needs_nvcc
from sass import disassembled
from torch import Tensor

import workbook as wb
from workbook import build, errors, halves, paths, precision, split, ways

U32 = 2.0**-24
KERNELS = paths.kernels()
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="no Hopper GPU here",
)
# B, K, N: one, odd, around a tile's 128 x 256, around panels of 64 of k, several tiles either way
SHAPES = [(1, 1, 1), (7, 7, 5), (129, 65, 257), (128, 64, 256), (257, 1000, 129), (3, 8200, 300),
          (1031, 67, 33), (300, 4097, 520), (1, 131072, 3), (100, 700, 500),
          (500, 1300, 1000)]  # fmt: skip


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


# K up to 2048, 8192, 16384 and 32768 has an instance each, in steps of 4; what is longer, one
SPLIT = [(1, 1), (9, 31), (8, 64), (130, 2049), (3, 8196), (3, 16384), (2, 16388), (2, 20000),
         (9, 32768), (2, 32772), (2, 40000)]  # fmt: skip


# --- splitting ------------------------------------------------------------------------------


@on_hopper
@pytest.mark.parametrize("shape", SPLIT)
def test_inputs_split_as_in_plain_torch(shape):
    x = drawn(shape, 1) * torch.exp2((torch.arange(shape[1]) % 37 - 18).float())
    x[0, 0] = 0
    columns = torch.zeros(-(-shape[1] // 64) * 64, dtype=torch.int8)
    columns[: shape[1]] = torch.arange(shape[1]) % 31 - 15
    hi, lo, exponents = halves.split(x, columns[: shape[1]])
    found = split._split(x.cuda(), columns.cuda())
    assert torch.equal(found.exponents.cpu(), exponents)
    assert torch.equal(rows_of(found.hi, *shape).cpu(), hi)
    assert torch.equal(rows_of(found.lo, *shape).cpu(), lo)


def away(found: split.Halves, V: Tensor) -> Tensor:
    """The error of each element of V, beside the larger of itself and 2^-12 of its row's largest,
    both without the exponents of the columns."""
    columns = found.columns[: V.size(1)].cpu().double().exp2()
    hi, lo = (rows_of(t, *V.shape).double().cpu() for t in found[:2])
    error = (hi + lo) * found.exponents.cpu().double().exp2().unsqueeze(1) - V.double() / columns
    size = (V.double() / columns).abs()
    return error.abs() / torch.maximum(size, 2.0**-12 * size.amax(1, keepdim=True))


ROWS = 300  # of which every third is looked at
FOLDS = {"as it is": 1, "differences": 2, "means of 3": 3, "means of 16": 16}


def folded_halves(W: Tensor, fold: str) -> tuple[split.Halves, Tensor]:
    """The halves of W (N, K) folded, and what they are of, in double."""
    if fold == "as it is":
        return split.halved(W.cuda()), W.double()
    if fold == "differences":
        bias = drawn((W.size(0) + 1, 1), 2)[:, 0]  # one is left over
        found, sums, shifts, total = split.halved_differences(W.cuda(), bias.cuda())
        even, odd = bias[:-1:2].double(), bias[1::2].double()
        torch.testing.assert_close(sums.cpu(), W.double().sum(0), rtol=1e-12, atol=1e-12)
        assert torch.equal(shifts.cpu(), even - odd)
        torch.testing.assert_close(total.cpu(), (even + odd).sum(), rtol=1e-12, atol=1e-12)
        return found, (W[0::2] - W[1::2]).double()
    found, w, w_exact = split.halved_means(W.cuda(), FOLDS[fold])
    V = W.double().unflatten(0, (-1, FOLDS[fold])).mean(1)
    torch.testing.assert_close(w_exact.cpu(), V, rtol=1e-14, atol=1e-18)
    assert torch.equal(w, w_exact.float())
    return found, V


# Of the rows up to 128 are looked at for the columns' exponents, of the columns 64 for a row's, and
# 256 of 4096 columns or more.
WEIGHTS = [(1, 1), (9, 31), (8, 64), (130, 2049), (3, 8196), (300, 1500), (2, 20000), (520, 132)]


@on_hopper
@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("shape", WEIGHTS)
def test_weights_are_split_to_22_bits(shape, fold):
    rows, width = shape
    W = drawn((rows * FOLDS[fold], width), 1)
    W *= torch.exp2((torch.arange(width) % 37 - 18).float())  # columns of all sizes, and rows
    W *= torch.exp2((torch.arange(rows) % 41 - 20).float()).repeat_interleave(FOLDS[fold])[:, None]
    found, V = folded_halves(W, fold)
    assert away(found, V).max() <= 2.0**-22


@on_hopper
def test_code_for_an_earlier_gpu_waits_for_the_kernel_before(monkeypatch):
    """PTX of 8.0, which has no such wait: its launches have to be launches as ever."""
    W = drawn((4096, 1024), 1).cuda()
    usual = split.halved_differences(W, W[:, 0].contiguous())
    folder = KERNELS / "split_weights"
    library = build.load(
        "split_weights_of_ptx_80",
        [folder / "binding.cpp", folder / "split_weights.cu"],
        include=[folder, KERNELS / "common"],
        cuda=True,
        cuda_flags=("-gencode=arch=compute_80,code=compute_80",),
    )
    monkeypatch.setattr(split, "_split_weights", lambda: library.op("run").default)
    for _ in range(50):
        with precision.poisoned():
            found = split.halved_differences(W, W[:, 0].contiguous())
        for one, other in zip((*found[0], *found[1:]), (*usual[0], *usual[1:]), strict=True):
            assert torch.equal(one, other)


@on_hopper
def test_of_no_rows_sums_and_exponents_are_zero():
    with precision.poisoned():
        nothing = torch.empty(0, 700, device="cuda")
        found, sums, shifts, total = split.halved_differences(nothing, nothing[:, 0])
    assert found.exponents.numel() == 0 and shifts.numel() == 0
    assert not found.columns.any() and not sums.any() and not total.any()


# Where the samples do not look: rows but every third (of V: 300), columns behind 128, but some in
# the middle.
FAR = {"above": 2.0**30, "a little above": 2.0**4, "as far as floats go": 2.0**126}


@on_hopper
@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("width", [700, 2052, 2053, 5000, 5001])
@pytest.mark.parametrize("far", FAR.values(), ids=FAR)
def test_a_number_that_the_samples_do_not_show(far, width, fold):
    each = FOLDS[fold]
    W = 0.5 + drawn((300 * each, width), 1).abs()
    W[::2] *= -1  # no difference is small
    for row in (100, 299):  # of a slice the fifth, and the twelfth
        W[row * each, 200] = W[row * each, width - 1] = far
    found, V = folded_halves(W, fold)
    assert away(found, V).max() <= 2.0**-22
    if far >= FAR["above"]:  # so far that all is split again, by exponents of all of V
        most = V[:, [200, width - 1]].abs().amax(0).log2().floor() + 1
        assert torch.equal(
            found.columns[[200, width - 1]].cpu(), most.clamp(max=126).to(torch.int8)
        )
    again, shape = folded_halves(W, fold)[0], tuple(V.shape)
    for one, other in zip(found[:2], again[:2], strict=True):
        assert torch.equal(rows_of(one, *shape), rows_of(other, *shape))
    assert torch.equal(found.exponents, again.exponents)
    assert torch.equal(found.columns, again.columns)


@on_hopper
@pytest.mark.parametrize("what", ["a column", "a row", "a row's sample"])
def test_zeros_where_one_looks(what):
    W = 0.5 + drawn((ROWS, 700), 1).abs()
    {"a column": W[::3, 7], "a row": W[5], "a row's sample": W[5, :-1]}[what].zero_()
    W[:, 9] = 0
    found = split.halved(W.cuda())
    kept = W.abs().sum(1) > 0
    assert away(found, W)[kept][:, W.abs().sum(0) > 0].max() <= 2.0**-22
    x = drawn((5, 700), 2)
    x[0, 9] = 1e30  # times zero
    assert relative(split.product(x.cuda(), found).sum(0).cpu(), x, W) < 1e-6


@on_hopper
def test_control_exponents_of_the_sample_alone_lose_a_row():
    W = 0.5 + drawn((ROWS, 70), 1).abs()
    W[100, 5] = FAR["above"]
    columns = halves.column_exponents(W[::3])
    hi, lo, exponents = halves.split(W, -columns)
    powers = (exponents.unsqueeze(1) + columns).double().exp2()
    assert (((hi.double() + lo.double()) * powers - W) / W).abs().max() > 2.0**-12


@on_hopper
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_exponent_of_weights_that_are_not_finite(value):
    W = drawn((ROWS, 700), 1)
    W[100, 300] = value
    found = split.halved(W.cuda())
    marked = found.exponents.cpu() == 1 << 20
    assert marked[100] and marked.sum() == 1
    rest = torch.arange(ROWS) != 100
    assert away(found, torch.where(W.isfinite(), W, 0))[rest].max() <= 2.0**-22


@on_hopper
def test_weights_of_zeros_and_of_the_least_and_largest_numbers():
    W = torch.stack([torch.zeros(70), torch.full((70,), 1e-41), torch.full((70,), 3e38)])
    found = split.halved(W.cuda())
    hi, lo = (rows_of(t, 3, 70).double() for t in found[:2])
    scale = (found.exponents.double().unsqueeze(1) + found.columns[:70].double()).exp2()
    torch.testing.assert_close((hi + lo) * scale, W.double().cuda(), rtol=2e-6, atol=0)


@on_hopper
def test_what_stands_behind_k_is_zero():
    found = split.halved(drawn((5, 70), 2).cuda())
    assert found.hi.shape == (4, 8, 32)
    whole = rows_of(found.hi, 5, 128)
    assert (whole[:, 70:] == 0).all() and (whole[:, :70] != 0).any()


# --- the product ------------------------------------------------------------------------------


def padded(shape: tuple[int, int], seed: int) -> Tensor:
    """x (B, K) whose rows start at 16 bytes, NaN between them: what lies behind K is not read."""
    memory = torch.full((shape[0], -(-shape[1] // 4) * 4), math.nan)
    memory[:, : shape[1]] = drawn(shape, seed)
    return memory.cuda()[:, : shape[1]]


@on_hopper
@pytest.mark.parametrize("way", ["split", "raw"])
@pytest.mark.parametrize("shape", SHAPES)
def test_product(shape, way):
    B, K, N = shape
    x, W = padded((B, K), 3), drawn((N, K), 4).cuda()
    parts = split.product(x, split.halved(W), way=way)
    assert parts.shape[1:] == (B, N) and not parts.isnan().any()
    # two splits of 2^-23, then one rounding to nearest for every 64 of k
    assert relative(parts.double().sum(0), x, W) < 4 * U32 + 0.3 * U32 * math.sqrt(K / 64) + 2e-7


@on_hopper
def test_no_rows_have_no_product():
    for K in (5, 8, 600):
        z = split.product(torch.empty(0, K, device="cuda"), split.halved(drawn((3, K), 4).cuda()))
        assert z.shape[1:] == (0, 3)


@on_hopper
def test_what_is_promoted_late_is_rounded_toward_zero():
    """One part of k, so that promotion is all that differs; eager errs by about 6e-7 here."""
    x, W = torch.rand(512, 8192).cuda(), drawn((8192, 8192), 4).cuda()
    found = [split.product(x, split.halved(W), way="split", promote=p)
             for p in (64, 128, 256, 1024, 8192)]  # fmt: skip
    assert [len(parts) for parts in found] == [1] * 5
    late = [relative(parts[0], x, W) for parts in found]
    assert late == sorted(late) and late[0] < 3e-7 and late[2] > 5e-7 and late[-1] > 1e-5
    with pytest.raises(ValueError, match="promote"):
        split.product(x, split.halved(W), promote=96)


# A number rounded to 11 bits errs by at most 2^-11 of itself, by 2^-11 / sqrt(3) in the root of the
# mean of squares; two factors.
OF_TF32 = 2.0**-11 * math.sqrt(2 / 3)


@on_hopper
@pytest.mark.parametrize("way", ["split", "through", "raw", "floats"])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_product(shape, way):
    """By the his alone, promoted or not, or as they are: in TF32's accuracy, and no better, or it
    would not be one."""
    B, K, N = shape
    x, W = padded((B, K), 3), padded((N, K), 4)
    z = split.product(x, split.halved(W), W, way=way, products=1, through=True).double().sum(0)
    assert z.shape == (B, N) and not z.isnan().any()
    assert relative(z, x, W) < 2.0**-10
    if B * N > 1000:
        assert 1e-5 < relative(z, x, W) < OF_TF32


@on_hopper
def test_floats_are_rounded_and_not_cut_off():
    """What a product cuts off draws all of it one way: numbers just below the next of 11 bits."""
    x = torch.full((200, 512), 1 + 2.0**-10 - 2.0**-20, device="cuda")
    W = torch.full((300, 512), 1 + 2.0**-10 - 2.0**-20, device="cuda")
    z = split.product(x, split.halved(W), W, way="floats", products=1).sum(0)
    assert relative(z, x, W) < 1e-5
    cut_off = torch.ones_like(x)
    assert relative(cut_off @ torch.ones_like(W).T, x, W) > 1e-3, "control"


@on_hopper
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("of", ["x", "W"])
def test_floats_of_a_row_that_is_not_finite(value, of):
    x, W = drawn((140, 500), 9).cuda().abs() + 0.1, drawn((300, 500), 10).cuda()
    halves = split.halved(W)  # not read
    clean = split.product(x, halves, W, way="floats", products=1).sum(0)
    (x if of == "x" else W)[77, 3] = value
    z, found = split.product(x, halves, W, way="floats", products=1).sum(0), clean.double()
    true = x.double() @ W.double().T
    hurt = ~true.isfinite()
    assert torch.equal(z.isfinite(), ~hurt) and hurt.any()
    assert torch.equal(z[~hurt].double(), found[~hurt])
    assert torch.equal(z[hurt & ~true.isnan()].double(), true[hurt & ~true.isnan()])


@on_hopper
def test_floats_keep_float32_s_exponents():
    x, W = drawn((140, 500), 9).cuda(), drawn((300, 500), 10).cuda()
    z = split.product(x, split.halved(W), W, way="floats", products=1).sum(0)
    for power in (-90, 90):
        W_far = W * 2.0**power
        y = split.product(x, split.halved(W), W_far, way="floats", products=1).sum(0)
        assert torch.equal(y, z * 2.0**power)


@on_hopper
def test_one_product_reads_no_lo_and_writes_none():
    x, W = drawn((300, 4097), 3).cuda(), drawn((520, 4097), 4).cuda()
    weight = split.halved(W)
    spoiled = weight._replace(lo=torch.full_like(weight.lo, math.nan))
    first = split.product(x, weight, products=1)
    assert torch.equal(split.product(x, spoiled, products=1), first)
    assert split.product(x, spoiled, products=3).isnan().all()
    for products in (2, 0.5):
        with pytest.raises(ValueError, match="products: got"):
            split.product(x, weight, products=products)
    with pytest.raises(ValueError, match="products: got 1"):
        split.product(x, weight, products=1, promote=128)


def drawn_toward_zero(z: Tensor, x: Tensor, W: Tensor) -> float:
    true = x.double() @ W.double().T
    return (1 - z.double().sum(0).abs().sum() / true.abs().sum()).item()


@on_hopper
def test_one_product_through_all_of_k_drifts_and_a_promoted_one_does_not():
    x, W = torch.rand(512, 32768).cuda(), torch.rand(8192, 32768).cuda()
    halves = split.halved(W)
    promoted, through = (
        split.product(x, halves, way=way, products=1, through=True) for way in ("split", "through")
    )
    assert relative(through.sum(0), x, W) < OF_TF32
    assert drawn_toward_zero(through, x, W) > 2e-5 > 4 * abs(drawn_toward_zero(promoted, x, W))
    x, W = drawn((300, 2000), 7).cuda(), drawn((2100, 2000), 8).cuda()
    found = [split.product(x, split.halved(W), products=3, through=t) for t in (False, True)]
    assert torch.equal(*found), "three products are promoted, whatever may be"


@on_hopper
@pytest.mark.parametrize("way", ["split", "raw"])
@pytest.mark.parametrize("family", ["rows", "columns", "against each other", "mean"])
def test_product_of_families(family, way):
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
    z, true = split.product(x, split.halved(W), way=way).sum(0), x.double() @ W.double().T
    assert_accurate(*(t.cpu() for t in (z, torch.mm(x, W.T), true)))


@on_hopper
def test_control_without_equalised_columns_a_family_is_lost():
    x, W = drawn((200, 1500), 5), drawn((300, 1500), 6)
    powers = torch.exp2(torch.randint(-20, 21, (1500,), generator=torch.manual_seed(0)).float())
    x, W = (x * powers).cuda(), (W / powers).cuda()
    none = torch.zeros(1536, dtype=torch.int8, device="cuda")
    for way in ("split", "raw"):
        z = split.product(x, split._split(W, none), way=way).sum(0)
        assert relative(z, x, W) > 1e-3


@on_hopper
@pytest.mark.parametrize(
    ("way", "products"),
    [("split", 3), ("raw", 3), ("split", 1), ("through", 1), ("raw", 1), ("floats", 1)],
)
def test_repeats_are_bit_identical(way, products):
    x, W = drawn((300, 2000), 7).cuda(), drawn((700, 2000), 8).cuda()
    halves = split.halved(W)

    def product() -> Tensor:
        return split.product(x, halves, W, way=way, products=products, through=True)

    first = product()
    assert all(torch.equal(product(), first) for _ in range(5))


@on_hopper
@pytest.mark.parametrize("way", ["split", "raw"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_stays_alone(value, way):
    x, W = drawn((140, 500), 9).cuda(), drawn((300, 500), 10).cuda()
    clean = split.product(x, split.halved(W), way=way).sum(0)
    x[17, 3] = value
    z = split.product(x, split.halved(W), way=way).sum(0)
    assert not z[17].isfinite().any()
    others = torch.arange(140) != 17
    assert torch.equal(z[others.cuda()], clean[others.cuda()])


@on_hopper
@pytest.mark.parametrize("way", ["split", "raw"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_of_weights_that_is_not_finite_is_taken_as_it_is(value, way):
    x, W = drawn((140, 500), 9).cuda().abs() + 0.1, drawn((300, 500), 10).cuda()
    clean = split.product(x, split.halved(W), way=way).sum(0)
    W[290, 499] = value
    z = split.product(x, split.halved(W), whole=W, way=way).sum(0)
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


def ours_by(
    route: str, rows: int, columns: int, outputs: int, processors: int,
    whole: bool = False, through: bool = False, raw: bool = True,
) -> str:  # fmt: skip
    """`ways.best` without torch's."""
    can = ways.ours(route, whole, through, raw)
    return ways.fastest(can, route, rows, columns, outputs, processors)


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
        monkeypatch.setattr(ways, "best", ours_by)  # torch's way is the faster one here
        with precision.using_route("tf32"):
            y, eager = new(x), model(x)
        assert seen, "one product of halves"
        bounds = errors.limits_of(errors.errors_of(eager, true), "tf32")
        assert not errors.excess(errors.errors_of(y, true), errors.errors_of(eager, true), bounds)


def _older(route: str) -> None:
    torch.set_float32_matmul_precision(precision.ROUTES[route])


def _newer(route: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32" if route == "tf32" else "ieee"


@on_hopper
@pytest.mark.parametrize("slug", CHAINS)
@pytest.mark.parametrize(
    ("choose", "compiled"), [(_older, False), (_newer, False), (_older, True)],
    ids=["older switch", "newer switch", "older switch, compiled"],
)  # fmt: skip
def test_the_switch_between_calls(slug, choose, compiled, monkeypatch):
    """The newer one under torch.compile: torch itself refuses to read the older beside it."""
    monkeypatch.setattr(ways, "best", ours_by)
    counts, run = [], split._split_product()
    monkeypatch.setattr(
        split, "_split_product",
        lambda: lambda *a: counts.append(3 if a[7].numel() else 1) or run(*a),
    )  # fmt: skip
    p = wb.problem(slug)
    with torch.device("cuda"):
        new = p.ModelNew(*CHAINS[slug]).eval()
    x = drawn((1031, 1000), 1).cuda()
    call = torch.compile(new, fullgraph=True) if compiled else new

    @torch.no_grad()
    def elsewhere() -> Tensor:
        return new(x)

    was = torch.get_float32_matmul_precision()
    found = {}
    try:
        with torch.no_grad():
            for route in ("float32", "tf32", "float32", "tf32"):
                choose(route)
                counts.clear()
                y = call(x)
                assert set(counts) == {1 if route == "tf32" else 3}
                assert torch.equal(found.setdefault(route, y), y)
                with ThreadPoolExecutor(1) as other:  # the switch is the process's
                    assert torch.equal(other.submit(elsewhere).result(), new(x))
    finally:
        _newer("float32")
        torch.set_float32_matmul_precision(was)
    if slug != "matmul_avgpool_gelu_scale_max":  # there the winner is computed once more, in double
        assert not torch.equal(found["float32"], found["tf32"])


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


@pytest.mark.parametrize("processors", [0, 132])
def test_the_way_of_ours_without_such_a_gpu_and_where_rows_do_not_start_at_16_bytes(
    processors, monkeypatch
):
    monkeypatch.setattr(split, "_processors", lambda index: processors)
    x = torch.empty(()).expand(1024, 8192)
    assert split.our_way(x, 512, "tf32", whole=True, through=False) == "floats"
    assert split.our_way(x, 8192, "tf32", whole=True, through=True) == "through"
    odd = torch.empty(()).expand(1024, 8191)
    assert split.our_way(odd, 512, "tf32", whole=True, through=False) == "split"
    assert split._has_even_rows(torch.empty(9, 12)[:, :8])
    assert not split._has_even_rows(torch.empty(9, 13)[:, :8])
    assert split._has_even_rows(torch.empty(8, 9).T), "a copy is read"


# --- machine code -----------------------------------------------------------------------------


def cubin(name: str, arch: str) -> build.CubinReport:
    file = KERNELS / name / f"{name}.cu"
    return build.cubin(file, arch=arch, include=[KERNELS / "common"], flags=["-DWB_CUDA"])


@needs_nvcc
@pytest.mark.parametrize("name", ["split_rows", "split_weights"])
@pytest.mark.parametrize("arch", ["80", "90", "100"])
def test_splitting_compiles_without_spills(name, arch):
    for kernel in cubin(name, arch).kernels:
        assert kernel.spill_bytes == kernel.stack_bytes == 0, kernel


def torn_stores(kernels: Path) -> int:
    """Stores of 4 bytes at an offset of 4, where halves and means are given by four."""
    file = kernels / "split_weights" / "split_weights.cu"
    report = build.cubin(file, arch="90", include=[kernels / "common"], flags=["-DWB_CUDA"])
    parts = re.split(r"(?=\s\.text\.)", disassembled(report.path))
    code = "".join(part for part in parts if re.match(r"\s\.text\.\w*split_\w+Li4EEv", part))
    assert "STG" in code
    return len(re.findall(r"STG\.E desc\S+\[\S+\+0x4\]", code))


@needs_nvcc
def test_four_neighbours_are_stored_at_once():
    assert torn_stores(KERNELS) == 0


@needs_nvcc
def test_control_of_a_plain_copy_four_neighbours_are_not(tmp_path):
    for folder in ("common", "split_weights"):
        shutil.copytree(KERNELS / folder, tmp_path / folder)
    header = tmp_path / "common" / "vector.cuh"
    text = header.read_text()
    first = text.index("    const half2 a = ")
    end = text.index("  } else {", first)
    plain = "    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(v);\n"
    header.write_text(text[:first] + plain + text[end:])
    assert torn_stores(tmp_path) > 0


@needs_nvcc
def test_the_product_has_hopper_s_instructions():
    report = cubin("split_product", "90a")
    # x split before or raw, in three products or one; three promoted late, one not at all; floats
    products = [kernel for kernel in report.kernels if "split_gemm" in kernel.name]
    assert [kernel.spill_bytes for kernel in products] == [0] * 7
    assert "wgmma" not in report.log, "no remark that products wait for one another"
    code = disassembled(report.path)
    assert "HGMMA.64x128x16.F32" in code and "UTMALDG.3D" in code and "UTMALDG.2D" in code
    three, one = 12, 4  # for 64 of k and 128 columns; the first of 256 columns stands apart
    # turns of a loop: of a split x, a raw one, one promoted late
    assert code.count("HGMMA.64x128x16.F32 ") == (2 + 1 + 1) * three + (2 + 1) * one
    # of all of k, panels of 32 of it, as many as the compiler unrolls: of halves, of floats
    for instruction, panel in (("HGMMA.64x256x16.F32 ", 2), ("HGMMA.64x128x8.F32.TF32 ", 4)):
        panels, rest = divmod(code.count(instruction), panel)
        assert panels >= 2 and rest == 0


@needs_nvcc
def test_control_other_architectures_do_not_have_them():
    with pytest.raises(build.BuildError) as raised:
        cubin("split_product", "90")
    assert "wgmma" in raised.value.log and "not supported on .target" in raised.value.log


@on_hopper
@pytest.mark.parametrize("power", [-120, -60, 60, 120])
def test_huge_and_tiny_rows_and_weights(power):
    x, W = drawn((140, 500), 9).cuda(), drawn((300, 500), 10).cuda()
    z = split.product(x, split.halved(W), way="raw").sum(0)
    for a, b in ((2.0**power, 1.0), (1.0, 2.0**power)):
        for way in ("split", "raw"):
            y = split.product(x * a, split.halved(W * b), way=way).sum(0)
            torch.testing.assert_close(y.double(), z.double() * 2.0**power, rtol=1e-5, atol=1e-42)
