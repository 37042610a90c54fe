"""The derivation of the maxpool chain in float64, the chain's own functions, and its controls."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import assert_accurate, drawn, needs_compiler, needs_gpu, outcome, truth
from maxpool import PROBLEM, U32, chain, magnitudes, parameters, running, values, windows
from torch import Tensor, nn

from workbook import split
from workbook.families import FAMILIES
from workbook.precision import using_route
from workbook.spec import Product

Model, ModelNew = PROBLEM.Model, PROBLEM.ModelNew
HOLDING = [step for step in PROBLEM.steps if step.holds]
TEMPTING = [step for step in PROBLEM.steps if not step.holds]
FOR_ANY_POOL = HOLDING[:2]  # the rest is about pairs
by_title = {"ids": lambda step: step.title}
# B, K, N, pool, scale
SHAPES = [(3, 7, 5, 2, 2.0), (1, 1, 2, 2, -1.0), (5, 13, 9, 2, -2.5), (4, 101, 17, 2, 0.0),
          (9, 11, 60, 2, -0.3)]  # fmt: skip
POOLS = [(3, 7, 5, 1, 2.0), (2, 5, 7, 3, -1.0), (4, 9, 11, 6, 0.5), (4, 9, 11, 11, 0.5)]
INF, NAN = math.inf, math.nan


def arguments(B: int, K: int, N: int, pool: int, scale: float, seed: int = 0) -> tuple:
    """x, weight, bias in float64, pool, scale."""
    weight, bias, *options = parameters(K, N, pool, scale, seed)
    return (drawn((B, K), seed + 7).double(), weight.double(), bias.double(), *options)


def distance(compute, given: tuple) -> float:
    true = values(*given)
    return ((compute(*given) - true).abs() / (1 + true.abs())).max().item()


def twins(K: int, N: int, pool: object, scale: object, seed: int = 0) -> tuple[Model, ModelNew]:
    torch.manual_seed(seed)
    new = ModelNew(K, N, pool, scale)
    reference = Model(K, N, pool, scale)
    reference.load_state_dict(new.state_dict())
    return reference, new


# --- the derivation ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [*SHAPES, *POOLS], ids=str)
def test_the_first_step_is_the_reference(shape):
    given = arguments(*shape)
    model = Model(*shape[1:]).double()
    model.load_state_dict({"matmul.weight": given[1], "matmul.bias": given[2]})
    assert torch.equal(PROBLEM.steps[0].compute(*given), model(given[0]))
    assert torch.equal(chain.reference(*given), model(given[0]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("step", HOLDING, **by_title)
def test_steps_that_hold_agree_with_the_definition(step, shape):
    got = step.compute(*arguments(*shape))
    assert got.shape == (shape[0],) and got.dtype == torch.float64
    assert distance(step.compute, arguments(*shape)) <= 1e-12


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 6), st.integers(0, 30), st.integers(2, 20), st.integers(1, 20),
    st.floats(-9, 9), st.integers(0, 99),
)  # fmt: skip
def test_steps_that_hold_agree_at_any_size(B, K, N, pool, scale, seed):
    for step in HOLDING:
        of = min(pool, N) if step in FOR_ANY_POOL else 2
        assert distance(step.compute, arguments(B, K, N, of, scale, seed)) <= 1e-11, step.title


@pytest.mark.parametrize("step", TEMPTING, **by_title)
def test_tempting_steps_differ(step):
    assert distance(step.compute, arguments(7, 97, 67, 2, 2.0)) > 1e-3


def test_where_a_tempting_step_is_right():
    """Why each tempts: nothing left over; equal weights; differences of one sign."""
    of_weights, outside, left_over = (step.compute for step in TEMPTING)
    assert distance(left_over, arguments(7, 97, 66, 2, 2.0)) <= 1e-12
    x, weight, bias, *options = arguments(7, 97, 66, 2, 2.0)
    assert distance(of_weights, (x, weight[:1].expand(66, -1), bias, *options)) <= 1e-12
    bias[1::2] -= 1000
    assert distance(outside, (x, weight, bias, *options)) <= 1e-9


@pytest.mark.parametrize("step", HOLDING, **by_title)
def test_steps_keep_nan_in_its_row(step):
    given = arguments(4, 7, 6, 2, 2.0)
    given[0][2, 3] = NAN
    got = step.compute(*given)
    assert got[[0, 1, 3]].isfinite().all() and got[2].isnan()


@settings(deadline=None, max_examples=200)
@given(st.integers(-(2**50), 2**50), st.integers(-(2**50), 2**50))
def test_the_larger_of_two_numbers(u, v):
    """Exact where the sums are."""
    u, v = u / 8, v / 8
    assert (u + v + abs(u - v)) / 2 == max(u, v)


def test_an_infinite_number_has_no_such_form():
    """-inf + 3 + |-inf - 3| is NaN, where the maximum is 3: rows that a guard has to see."""
    u, v = -INF, 3.0
    assert math.isnan(u + v + abs(u - v)) and max(u, v) == 3.0


def test_every_step_is_explained():
    for step in PROBLEM.steps:
        assert step.title and step.formula and step.reason
        assert "$" not in step.formula and step.formula.count("{") == step.formula.count("}")
    assert len({step.title for step in PROBLEM.steps}) == len(PROBLEM.steps)
    assert HOLDING and TEMPTING and PROBLEM.steps[0].holds


# --- the fold ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("pool", "N"), [(1, 1), (1, 3), (1, 40), (2, 2), (2, 3), (2, 17), (2, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_fold_is_differences_and_sums(dtype, pool, N):
    """Differences are rounded once, in the weights' type; sums are made in float64."""
    weight, bias, *_ = parameters(9, N, pool, 1.0)
    bias += 1e6  # alike and far: c is their difference all the same
    D, c, w_sum, b_sum = chain.fold(dtype, weight, bias, pool)
    M = N // 2 if pool == 2 else 0
    used = 2 * M if pool == 2 else N
    w, b = weight.double()[:used], bias.double()[:used]
    assert D.shape == (M, 9) and D.dtype == torch.float32 and c.shape == (M,)
    if M:
        u, v = windows(w.T, 2).unbind(-1)
        torch.testing.assert_close(D, (u - v).T.float(), rtol=0, atol=0)
        torch.testing.assert_close(c, (b[0::2] - b[1::2]).to(dtype), rtol=0, atol=0)
    for got, true in ((w_sum, w.sum(0)), (b_sum, b.sum())):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), true, rtol=torch.finfo(dtype).eps, atol=1e-14)


@pytest.mark.parametrize("pool", [3, 4, 17, 100])
def test_other_pools_fold_nothing(pool):
    assert chain.fold(torch.float64, drawn((17, 9)), drawn((17,)), pool) == ()


def test_a_feature_that_is_left_over_is_not_folded():
    weight, bias = drawn((7, 5)), drawn((7,))
    clean = chain.fold(torch.float64, weight, bias, 2)
    weight[6], bias[6] = NAN, INF
    found = chain.fold(torch.float64, weight, bias, 2)
    assert all(torch.equal(a, b) for a, b in zip(clean, found, strict=True))


@pytest.mark.parametrize("shape", [*SHAPES, (3, 7, 5, 1, -2.0)], ids=str)
def test_plain_torch_is_the_folded_chain(shape):
    given = arguments(*shape)
    folded = chain.fold(torch.float64, *given[1:4])
    folded = (folded[0].double(), *folded[1:])
    torch.testing.assert_close(chain.plain(given[0], *folded, *given[3:]), values(*given),
                               rtol=1e-12, atol=1e-12)  # fmt: skip


# --- which way it goes ------------------------------------------------------------------------


@pytest.mark.parametrize(("N", "K", "pool", "halved"), [
    (2048, 256, 2, True), (2047, 256, 2, False), (2048, 255, 2, False), (2049, 300, 2, True),
    (2048, 256, 3, False), (2048, 256, 1, True), (1, 1, 1, True), (2, 1, 2, False),
])  # fmt: skip
def test_products_are_halved_from_a_size_on(N, K, pool, halved):
    assert running.is_folded(torch.empty(N, K), pool) == halved


@pytest.mark.parametrize(("N", "K", "float32", "tf32"), [
    (2048, 256, True, True), (2047, 256, True, False), (512, 256, True, False),
    (511, 4096, False, False), (4096, 255, False, False),
])  # fmt: skip
def test_three_products_of_halves_serve_fewer_features(N, K, float32, tf32):
    shape = {"B": 1024, "N": N, "K": K, "pool": 2}
    half, whole = Product(N // 2), Product(N, whole=True)
    for route, halved in (("float32", float32), ("tf32", tf32)):
        other = whole if route == "tf32" else None
        assert running.multiplied("eval", route, shape) == (half if halved else other)
        assert running.multiplied("eval", route, {**shape, "pool": 3}) == other
        assert running.multiplied("eval", route, {**shape, "pool": 1}) is None
    assert not running.is_halved(torch.empty(N, K), 2) or N >= 2048, "on a CPU as before"
    assert not running.is_halved(torch.empty(N, K), 3)


@needs_gpu
@pytest.mark.parametrize("family", ["uniform", "normal", "one huge row", "wide range"])
@pytest.mark.parametrize(("N", "K"), [(512, 512), (514, 4096), (1023, 8192), (512, 32768)])
def test_of_few_features_half_a_product_is_as_accurate(family, N, K, monkeypatch):
    model, new = (twin.cuda() for twin in twins(K, N, 2, 0.5))
    x = FAMILIES[family](128, K, torch.Generator().manual_seed(1)).cuda()
    seen, product = [], split.product
    monkeypatch.setattr(split, "product", lambda *a, **k: (seen.append(a), product(*a, **k))[1])
    with torch.no_grad():
        assert_accurate(new(x), model(x), truth(model, x))
        for parameter in (*model.parameters(), *new.parameters()):
            parameter.mul_(-1.5)  # in place: folded anew
        assert_accurate(new(x), model(x), truth(model, x))
        row = new(x)[5]
        x[3] = math.nan
        y = new(x)
        assert y[3].isnan() and y[5] == row and y.isfinite().sum() == 127
    halved = torch.cuda.get_device_capability() == (9, 0) and K > 512  # else torch is the faster
    assert len(seen) == (4 if halved else 0)


@needs_gpu
@pytest.mark.parametrize("route", ["float32", "tf32"])
@pytest.mark.parametrize("family", ["uniform", "normal", "one huge row", "wide range"])
@pytest.mark.parametrize(("N", "K", "pool"), [(4096, 2048, 3), (3001, 4100, 5), (128, 16384, 2)])
def test_a_whole_product_on_tensor_cores(N, K, pool, family, route, monkeypatch):
    """By TF32, of other pools and of few features: with its bias, folded anew after a change."""
    model, new = (twin.cuda() for twin in twins(K, N, pool, 0.5))
    x = FAMILIES[family](128, K, torch.Generator().manual_seed(1)).cuda()
    seen, product = [], split.product
    monkeypatch.setattr(split, "product", lambda *a, **k: (seen.append(a), product(*a, **k))[1])
    with torch.no_grad(), using_route(route):
        for _ in range(2):
            assert_accurate(new(x), model(x), truth(model, x))
            for parameter in (*model.parameters(), *new.parameters()):
                parameter.mul_(-1.5)
        new.matmul.weight[1, 0] = model.matmul.weight[1, 0] = math.inf
        x[3] = math.nan
        torch.testing.assert_close(new(x), model(x), rtol=1e-2, atol=1e-1, equal_nan=True)
        made = route == "tf32" and split.suits(x, N, whole=True)
    assert len(seen) == (3 if made else 0)


def test_form_half_folds_nothing_where_it_multiplies_whole():
    W, bias = drawn((512, 256), 1), drawn((512,), 2)
    assert chain.fold_half(torch.float64, W, bias, 2) == ()
    assert len(chain.fold_half(torch.float64, drawn((2048, 256), 1), drawn((2048,), 2), 2)) == 4


@pytest.mark.as_sized
@pytest.mark.parametrize(("B", "K", "N", "pool", "left"), [
    (128, 2048, 2048, 2, False), (128, 2048, 2047, 2, True), (128, 255, 2048, 2, True),
    (1, 1, 1, 1, False), (128, 2048, 2048, 3, True), (128, 2048, 4096, 3, False),
    (8, 16, 4096, 3, True), (9, 512, 4096, 3, False), (128, 64, 4096, 2, False),
])  # fmt: skip
def test_what_is_small_is_left_to_the_reference(B, K, N, pool, left):
    """Half products never; whole ones on a CPU where oneDNN's product rounds too much to be taken,
    or where few numbers are multiplied."""
    (model, new), x = twins(K, N, pool, 0.5), drawn((B, K), 3)
    assert running.is_left(x, new.matmul, pool) == left
    assert not running.is_left(x[:, 1:], new.matmul, pool), "does not fit: explained"
    assert not running.is_left(x.double(), new.matmul, pool) and not running.is_left(
        1, new.matmul, 2
    )
    if left:
        assert torch.equal(new(x), model(x)), "the reference's own bits"


@needs_gpu
@pytest.mark.as_sized
def test_of_a_gpu_few_products_alone_are_left_to_the_reference():
    few, linear = (nn.Linear(1024, n, device="cuda") for n in (511, 1024))
    x = torch.empty(17, 1024, device="cuda")
    assert running.is_left(x[:16], few, 2) and running.is_left(x[:16], linear, 3)
    assert not running.is_left(x[:16], linear, 2), "halved"
    assert not running.is_left(x, linear, 3)


@pytest.mark.parametrize("shape", [*SHAPES, *POOLS, (3, 0, 5, 2, 1.0), (0, 3, 5, 2, 1.0)], ids=str)
@pytest.mark.parametrize("block", [1, 20, 1 << 22])
def test_directly_is_the_definition_in_float64(shape, block, monkeypatch):
    """In blocks of windows of any size; rounded once."""
    monkeypatch.setattr(running, "WIDENED", block)
    x, weight, bias, *options = (
        t.float() if isinstance(t, Tensor) else t for t in arguments(*shape)
    )
    true = values(x, weight, bias, *options)
    y = running.directly(x, weight, bias, *options)
    assert ((y - true).abs() <= 1.01 * U32 * true.abs() + 1e-13).all()


@pytest.mark.parametrize("scale", [0.5, -2.0, 0.0, 1e30, NAN, INF])
def test_scaled_rounds_once_but_for_a_sum_that_overflowed(scale):
    total = torch.tensor([1.0, -3e38, 3.5e38, -1e300, INF, -INF, NAN, 0.1], dtype=torch.float64)
    eager = total.float() * scale
    found = running.scaled(total, scale)
    torch.testing.assert_close(found, eager, rtol=2 * U32, atol=0, equal_nan=True)
    assert found[7] == (total[7] * scale).float() or math.isnan(scale)


@pytest.mark.parametrize("rows", [0, 1, 7, 1024, 5000])
@pytest.mark.parametrize("columns", [0, 1, 301, 40000])
@pytest.mark.parametrize("step", [1, 3, 7000])
def test_blocks_are_whole_windows_that_stay_in_the_cache(rows, columns, step):
    of_rows, of_columns = running._blocks(rows, columns, step)
    assert of_rows >= 1 and of_columns >= 1
    if of_columns < columns:
        assert of_columns % step == 0
        assert of_rows * of_columns <= running.BLOCK or of_columns == step
    assert of_rows >= min(rows, running.ROWS)


@needs_compiler
@pytest.mark.parametrize(
    "shape", [(40, 2049, 2, -0.3), (40, 2050, 3, 2.0), (40, 2048, 1, 1.0)], ids=str
)
@pytest.mark.parametrize("by", [0.0, 1e4, INF])
def test_the_drop_in_at_a_size_that_is_halved(shape, by):
    """Rows at most twice as wrong as eager's worst, or rounded once."""
    rows, N, pool, scale = shape
    reference, new = twins(256, N, pool, scale)
    with torch.no_grad():
        for model in (reference, new):
            model.matmul.bias[1::2] -= by
        x = drawn((rows, 256), 7)
        true = values(x, new.matmul.weight, new.matmul.bias, pool, scale)
        y, eager = new(x), reference(x)
    odd = ~true.isfinite()  # a window that is masked as a whole
    assert torch.equal(y[odd].double(), true[odd]) and odd.any() == (pool == 1 and by == INF)
    errors = (((v - true) / true)[~odd].abs() for v in (y, eager))
    ours, own = (e.max().item() if e.numel() else 0.0 for e in errors)
    assert ours <= max(2 * own, 2e-7)


# --- how far the halves cancel ----------------------------------------------------------------


def test_kappa_says_how_far_the_halves_cancel():
    """Near 1 as weights are drawn; the lower one side, the larger, as sums of one side cancel."""
    weight, bias, *_ = parameters(300, 2000, 2, 1.0)
    found = []
    for by in (0.0, 3.0, 1e4):
        lower = bias.clone()
        lower[1::2] -= by
        of_g, total = magnitudes(drawn((99, 300), 3), weight, lower)
        found.append((of_g / total).median().item())
    assert found[0] < 1.2 and found[0] < found[1] < found[2] and found[2] > running.LIMIT


# --- the options ------------------------------------------------------------------------------


def normal(model, x) -> bool:
    """True where an op stands for the chain."""
    seen, kept = [], (chain.OP, chain.DIRECT)

    def watched(op):
        return lambda *given: seen.append(op) or op(*given)

    chain.OP, chain.DIRECT = map(watched, kept)
    try:
        model(x)
    finally:
        chain.OP, chain.DIRECT = kept
    return bool(seen)


CHANGES = {
    "a stride": lambda m: setattr(m.max_pool, "stride", 1),
    "padding": lambda m: setattr(m.max_pool, "padding", 1),
    "a dilation": lambda m: setattr(m.max_pool, "dilation", 2),
    "the ceiling": lambda m: setattr(m.max_pool, "ceil_mode", True),
    "a hook of the pool": lambda m: m.max_pool.register_forward_hook(lambda *_: None),
    "a hook of the Linear": lambda m: m.matmul.register_forward_hook(lambda *_: None),
    "another pool module": lambda m: setattr(m, "max_pool", nn.AvgPool1d(3)),
    "a scale that is a tensor": lambda m: setattr(m, "scale_factor", torch.tensor(2.0)),
    "a scale that is a bool": lambda m: setattr(m, "scale_factor", True),
    "a huge whole scale": lambda m: setattr(m, "scale_factor", 2**60),
    "no bias": lambda m: setattr(m.matmul, "bias", None),
    "a pool larger than the row": lambda m: setattr(m, "max_pool", nn.MaxPool1d(14)),
    "indices": lambda m: setattr(m.max_pool, "return_indices", True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_anything_unusual_runs_the_reference(name):
    (reference, new), x = twins(9, 13, 3, 2.0), drawn((4, 9), 3)
    assert normal(new, x)
    for model in (reference, new):
        CHANGES[name](model)
    (y, error, text), theirs = outcome(lambda: new(x)), outcome(lambda: reference(x))
    assert (error, text) == theirs[1:]
    if error is None:
        assert not normal(new, x)
        torch.testing.assert_close(y, theirs[0], rtol=0, atol=0)


@pytest.mark.parametrize(("size", "scale"), [(1, 2), (2, 0.5), ((3,), -2.0), (7, 0), (13, -0.0)],
                         ids=str)  # fmt: skip
def test_options_are_read_at_each_call(size, scale):
    _, new = twins(9, 13, 3, 2.0)
    x = drawn((4, 9), 3)
    new(x)
    new.max_pool.kernel_size = new.max_pool.stride = size
    new.scale_factor = scale
    assert normal(new, x)
    reference = Model(9, 13, size, scale)
    reference.load_state_dict(new.state_dict())
    torch.testing.assert_close(new(x), reference(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pool", [0, -1, 14])
def test_a_pool_without_a_window_raises_as_the_reference_does(pool):
    for model in twins(9, 13, pool, 2.0):
        with pytest.raises(RuntimeError):
            model(drawn((4, 9)))


def test_a_scale_that_changes_keeps_the_fold():
    _, new = twins(256, 2048, 2, 2.0)
    x = drawn((3, 256))
    before = len(chain.OP.folds)
    for scale in (1.0, -2.0, 0.5, NAN):
        new.scale_factor = scale
        new(x)
    assert len(chain.OP.folds) == before + 1


# --- omissions, controls, work ----------------------------------------------------------------


@pytest.mark.parametrize("pool", [2, 3])
@pytest.mark.parametrize("name", PROBLEM.omissions)
def test_what_an_omission_leaves_out_shows(name, pool):
    torch.manual_seed(0)
    model, x = Model(40, 66, pool, 2.0).double(), drawn((60, 40)).double()
    got, true = PROBLEM.omissions[name](model, x), model(x)
    assert got.shape == (60,) and got.dtype == torch.float64
    assert ((got - true).norm() / true.norm()).item() > 1e-3


CONTROLS = [v for v in PROBLEM.variants if v.is_control and not v.source]
# Where each of them is seen, but for what all of them meet: (N, pool, change of the bias).
CASES = [
    (67, 2, lambda b: b), (66, 3, lambda b: b), (66, 2, lambda b: b),
    (67, 2, lambda b: b.index_fill(0, torch.tensor([1, 5]), -INF)),
    (67, 2, lambda b: b.index_fill(0, torch.tensor([2]), NAN)),
]  # fmt: skip


def assert_follows(make) -> None:
    """A candidate before and after its weights change in place."""
    for N, pool, change in CASES:
        reference, _ = twins(40, N, pool, -1.5)
        x, call = drawn((60, 40), 7), make(reference)
        if isinstance(call, nn.Module):
            assert list(call.state_dict()) == list(reference.state_dict()), "does not load"
        for seed in (0, 20):
            weight, bias, *options = parameters(40, N, pool, -1.5, seed)
            with torch.no_grad():
                reference.matmul.weight.copy_(weight)
                reference.matmul.bias.copy_(change(bias))
                y, true = call(x), values(x, weight, change(bias), *options)
            assert y.shape == true.shape and torch.equal(y.isnan(), true.isnan())
            off = (y - true)[~true.isnan()]
            assert off.norm() <= 1e-5 * true[~true.isnan()].norm()


@pytest.mark.parametrize("variant", CONTROLS, ids=lambda v: v.name)
def test_the_oracle_rejects_each_control(variant):
    """By y, by weights that move, or by a state_dict that does not fit."""
    with pytest.raises(AssertionError):
        assert_follows(variant.make)


def test_the_oracle_accepts_what_is_right():
    for make in (lambda m: m, PROBLEM.drop_in):
        assert_follows(make)


def test_work_counts_what_the_chain_says():
    """Half of the operations and of the weights' bytes for a pool of 2, next to none for 1, all for
    others; a feature that is left over costs nothing."""
    before, after = (PROBLEM.work[key](128, 8192, 8192, 2) for key in ("before", "after"))
    product = 2 * 128 * 8192 * 8192
    assert before.flops >= product and 0.5 <= after.flops / product < 0.51
    assert before.read >= 4 * 8192 * (8192 + 128) and after.read < 4 * 8192 * (4096 + 128) * 1.01
    assert after.written == 4 * 128
    assert PROBLEM.work["after"](128, 8192, 8192, 1).flops < product / 4000
    assert PROBLEM.work["after"](128, 8192, 8192, 4).flops >= product
    assert PROBLEM.work["after"](3, 50, 71, 2).flops == PROBLEM.work["after"](3, 50, 70, 2).flops
    assert PROBLEM.work["fold"](3, 50, 70, 2).read >= 4 * 70 * 50
    assert PROBLEM.shape("paper") == {"B": 128, "K": 32768, "N": 32768, "pool": 2}


@needs_compiler
def test_an_infinite_input_is_nan_where_the_reference_has_nan():
    reference, new = twins(256, 2048, 2, 0.5)
    x = torch.ones(1, 256)
    x[0, 7] = math.inf
    with torch.no_grad():
        torch.testing.assert_close(new(x), reference(x), equal_nan=True)
