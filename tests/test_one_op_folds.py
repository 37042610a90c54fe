"""The folds of pairs and of means on a CPU, each one op: as what they are made of, to the bit."""

from __future__ import annotations

import gc
import math
import re
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from kit import drawn, needs_compiler
from torch import Tensor

from workbook import ops, paths, sums
from workbook.chains import matmul_avgpool_gelu_scale_max as averaged
from workbook.chains import matmul_maxpool_sum_scale as paired

pytestmark = needs_compiler
F32 = torch.float32
# N, K: one row and column, a row left over, around eight rows and a strip of 1024, past the caches
SHAPES = [(1, 5), (2, 1), (3, 7), (8, 1023), (17, 1025), (64, 4097), (1031, 33), (1035, 2064)]
POOLS = [1, 2, 3, 16, 2000]


def pairs(W: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """The same from the parts: what the op is held against."""
    used = len(bias) // 2 * 2
    even, odd = bias[0:used:2].double(), bias[1:used:2].double()
    D, w_sum = sums.pair_difference(W[:used])
    b_sum = torch.tensor(math.fsum(bias[:used].tolist()), dtype=torch.float64)
    return D, even - odd, w_sum, b_sum


def means(W: Tensor, bias: Tensor, pool: int) -> tuple[Tensor, ...]:
    (w, w_exact), (b, b_exact) = (sums.group_mean(t, pool, F32) for t in (W, bias.unsqueeze(1)))
    return w, b.flatten(), w_exact, b_exact.flatten()


def assert_same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    assert len(found) == len(wanted) == 4
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and one.is_contiguous()
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def assert_pairs(run, shape: tuple[int, int]) -> None:
    W, bias = drawn(shape, 3), drawn(shape[:1], 4)
    (*found, b_sum), (*wanted, sum_of_bias) = run(W, bias), pairs(W, bias)
    torch.testing.assert_close(b_sum, sum_of_bias, rtol=1e-13, atol=1e-13)
    assert_same((*found, b_sum), (*wanted, b_sum))
    assert torch.equal(W, drawn(shape, 3)) and torch.equal(bias, drawn(shape[:1], 4))


def assert_means(run, shape: tuple[int, int], pool: int = 3) -> None:
    W, bias = drawn(shape, 3), drawn(shape[:1], 4)
    assert_same(run(W, bias, pool), means(W, bias, pool))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pairs_are_folded_as_by_their_parts(shape):
    assert_pairs(sums._pair_fold(), shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pool", POOLS)
def test_means_are_folded_as_by_their_parts(pool, shape):
    assert_means(sums._mean_fold(), shape, pool)


@pytest.mark.parametrize("shape", [(0, 5), (6, 0), (0, 0), (1, 0)])
def test_nothing_folds_to_nothing(shape):
    W, bias = torch.empty(shape), torch.ones(shape[0])
    D, shifts, w_sum, b_sum = sums.pair_fold(W, bias)
    assert D.shape == (shape[0] // 2, shape[1]) and shifts.shape == (shape[0] // 2,)
    assert w_sum.shape == shape[1:] and not w_sum.any() and b_sum == shape[0] // 2 * 2
    w, b, w_exact, b_exact = sums.mean_fold(W, bias, 2, F32)
    assert w.shape == w_exact.shape == (shape[0] // 2, shape[1])
    assert (b == 1).all() and (b_exact == 1).all() and b.shape == (shape[0] // 2,)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_left_over_is_not_read_and_what_is_not_finite_stays(value):
    W, bias = drawn((7, 70), 1), drawn((7,), 2)
    W[6], bias[6] = value, value  # left over, by twos and by threes
    assert all(t.isfinite().all() for t in sums.pair_fold(W, bias))
    assert all(t.isfinite().all() for t in sums.mean_fold(W, bias, 3, F32))
    W[3, 5] = bias[2] = value
    D, shifts, w_sum, b_sum = sums.pair_fold(W, bias)
    assert not D[1, 5].isfinite() and not shifts[1].isfinite()
    assert not w_sum[5].isfinite() and not b_sum.isfinite() and w_sum.isfinite().sum() == 69
    assert_same(sums.mean_fold(W, bias, 3, F32), means(W, bias, 3))


@pytest.mark.parametrize("what", ["columns of W", "every other bias", "float64", "no compiler"])
def test_what_the_op_can_not_read_goes_by_parts(what, monkeypatch):
    W, bias = drawn((130, 66), 1), drawn((260,), 2)
    W, bias = {
        "columns of W": lambda: (W[:, ::2], bias[:130]),
        "every other bias": lambda: (W, bias[::2]),
        "float64": lambda: (W.double(), bias[:130].double()),
        "no compiler": lambda: (W, bias[:130]),
    }[what]()
    same = [t.clone(memory_format=torch.contiguous_format).float() for t in (W, bias)]
    wanted = sums.pair_fold(*same), sums.mean_fold(*same, 4, F32)
    seen = []
    if what == "no compiler":
        monkeypatch.setattr(sums, "_pair_fold", lambda: seen.append("pairs"))
        monkeypatch.setattr(sums, "_mean_fold", lambda: seen.append("means"))
    for found, of in zip((sums.pair_fold(W, bias), sums.mean_fold(W, bias, 4, F32)), wanted,
                         strict=True):  # fmt: skip
        for one, other in zip(found, of, strict=True):
            if one.numel() or what != "float64":  # another type has no means beside its own
                torch.testing.assert_close(one.double(), other.double(), rtol=1e-6, atol=1e-6)
    assert seen == (["pairs", "means"] if what == "no compiler" else [])


def test_the_chains_fold_by_them_and_without_gradients(monkeypatch):
    seen = []
    for name in ("_pair_fold", "_mean_fold"):
        run = getattr(sums, name)()
        call = partial(lambda of, run, *given: (seen.append(of), run(*given))[1], name, run)
        monkeypatch.setattr(sums, name, lambda call=call: call)
    W, bias = (torch.nn.Parameter(t) for t in (drawn((2050, 300), 1), drawn((2050,), 2)))
    folded = *paired.fold(torch.float64, W, bias, 2), *averaged.fold(F32, W, bias, 16)
    assert seen == ["_pair_fold", "_mean_fold"]
    assert not any(t.requires_grad for t in folded)
    for pool in (1, 2):
        assert not any(t.requires_grad for t in paired.fold(torch.float64, W, bias, pool))
        assert not any(t.requires_grad for t in averaged.fold(F32, W, bias, pool))


@pytest.mark.parametrize("pool", [1, 2])
def test_a_fold_does_not_keep_its_parameters(pool):
    for chain, size in ((averaged, (96, 64, pool, 2.0)), (paired, (300, 2048, pool, 0.5))):
        model = chain.ModelNew(*size)
        alive = [weakref.ref(parameter) for parameter in model.parameters()]
        model(torch.ones(3, size[0]))
        before = len(chain.OP.folds)
        del model
        gc.collect()
        assert not any(ref() is not None for ref in alive) and len(chain.OP.folds) < before


def test_they_do_not_depend_on_how_many_threads_there_are():
    W, bias = drawn((1030, 3000), 1), drawn((1030,), 2)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append((*sums.pair_fold(W, bias), *sums.mean_fold(W, bias, 16, F32)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("_pair_fold", ((4, 3), (3,)), r"bias: got float32 \(3\); wants .* \(4\)"),
        ("_pair_fold", ((4,), (4,)), "W: got float32"),
        ("_mean_fold", ((4, 3), (5,), 2), r"bias: got float32 \(5\); wants .* \(4\)"),
        ("_mean_fold", ((4, 3), (4,), 0), "pool: got 0; wants at least 1"),
    ],
)
def test_the_bindings_refuse_what_they_can_not_read(name, arguments, words):
    given = (torch.zeros(a) if isinstance(a, tuple) else a for a in arguments)
    with pytest.raises(RuntimeError, match=words):
        getattr(sums, name)()(*given)


SABOTAGE = {  # (op, what): (old, new)
    ("pair_fold", "the bias is added"): ("even - odd", "even + odd"),
    ("pair_fold", "every other bias"): ("even + odd", "even"),
    ("pair_fold", "a strip is lost"): ("(p.K + kPairStrip - 1) / kPairStrip", "p.K / kPairStrip"),
    ("mean_fold", "a bias of its own"): ("1, p.groups, p.pool}", "1, p.groups, 1}"),
    ("mean_fold", "a group is lost"): (
        "p.w_exact, p.K, p.groups,",
        "p.w_exact, p.K, p.groups - 1,",
    ),
}


@pytest.mark.parametrize(("name", "what"), SABOTAGE)
def test_control_a_sabotaged_kernel_is_rejected(name, what):
    old, new = SABOTAGE[name, what]
    file = paths.kernels() / name / f"{name}.cpp"
    text = file.read_text(encoding="utf-8")
    assert len(re.findall(re.escape(old), text)) == 1
    library = ops.kernel_library(name, "cpu", {file.name: text.replace(old, new)})
    run, check = library.op("run").default, {"pair_fold": assert_pairs, "mean_fold": assert_means}
    with pytest.raises(AssertionError):
        for shape in SHAPES:
            check[name](run, shape)


LARGE = (4100, 4099)  # the fold of pairs: 34 MB, more than the heap keeps by itself


def assert_folds_are_their_own(run) -> None:
    """Folds that live at the same time, and a view of one that is gone, keep their values."""
    weights = [drawn(LARGE, seed) for seed in range(3)]
    bias = drawn(LARGE[:1], 9)
    wanted = [W[0::2] - W[1::2] for W in weights]
    for _ in range(2):  # then in memory of folds that are gone
        found = [run(W, bias)[0] for W in weights]
        assert all(map(torch.equal, found, wanted))
        view = found[0][3:]
        del found
        for W in weights:
            run(W, bias)
        assert torch.equal(view, wanted[0][3:])


def test_folds_at_the_same_time_have_their_own_memory():
    assert_folds_are_their_own(sums._pair_fold())


@pytest.mark.skipif(sys.platform != "linux", reason="memory is kept on Linux")
def test_the_memory_of_a_fold_that_is_gone_is_used_again():
    W, bias = drawn(LARGE, 0), drawn(LARGE[:1], 1)
    model = paired.ModelNew(LARGE[1], LARGE[0], 2, 0.5)
    places = set()
    for _ in range(6):
        places.add(sums.pair_fold(W, bias)[0].data_ptr())
        sums.mean_fold(W, bias, 2, F32)
    assert len(places) == 1
    for scale in (1.0, 2.0, 3.0):  # and by a model whose weights change
        with torch.no_grad():
            model.matmul.weight.copy_(W * scale)
        model(drawn((2, LARGE[1]), 3))
        of = (model.matmul.weight, model.matmul.bias)
        places |= {e.folded[0].data_ptr() for e in paired.OP.folds._entries.values() if e.is_of(of)}
    assert len(places) == 1


def test_folds_of_many_threads_have_their_own_memory():
    weights = [drawn(LARGE, seed) for seed in range(4)]
    bias = drawn(LARGE[:1], 9)

    def folds(W: Tensor) -> bool:
        return all(torch.equal(sums.pair_fold(W, bias)[0], W[0::2] - W[1::2]) for _ in range(8))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(folds, weights))


def test_control_memory_that_is_given_away_while_it_is_used_is_noticed():
    header = (paths.kernels() / "common" / "kept_memory.h").read_text(encoding="utf-8")
    line = "  void* const memory = block.mutable_data_ptr();"
    assert header.count(line) == 1
    binding = paths.kernels() / "pair_fold" / "binding.cpp"
    text = binding.read_text(encoding="utf-8").replace(
        '#include "kept_memory.h"', header.replace(line, f"{line} KeptMemory::here().give(block);")
    )
    sources = {binding.name: text, "pair_fold.cpp": (binding.parent / "pair_fold.cpp").read_text()}
    library = ops.kernel_library("pair_fold", "cpu", sources)
    with pytest.raises(AssertionError):
        assert_folds_are_their_own(library.op("run").default)
