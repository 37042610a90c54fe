"""The derivation of the batchnorm chain in float64, the chain's own functions, and its controls."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from batchnorm import (
    EPS,
    PROBLEM,
    U32,
    allowed,
    assert_batch,
    assert_eval,
    logits,
    moved_eval,
    of_batch,
    parameters,
    running,
    softmax,
    statistics,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import drawn, needs_compiler, outcome
from torch import Tensor, nn

from workbook.chains import gemm_batchnorm_scale_softmax as chain
from workbook.chains import gemm_batchnorm_scale_softmax_run_eval as by_running
from workbook.precision import using_route

Model, ModelNew = PROBLEM.Model, PROBLEM.ModelNew
STEPS = {mode: [s for s in PROBLEM.steps if s.mode == mode] for mode in ("eval", "train")}
HOLDING = [step for step in PROBLEM.steps if step.holds]
TEMPTING = [step for step in PROBLEM.steps if not step.holds]
by_title = {"ids": lambda step: step.title}
SHAPES = [(3, 7, 5), (2, 1, 3), (5, 13, 9), (4, 101, 17), (9, 11, 60)]


def float64(K: int, N: int, seed: int = 0, each: bool = False) -> tuple:
    """What eval mode takes, in float64."""
    *tensors, eps = parameters(K, N, seed, scale_shape=(N,) if each else (1,))
    return (*(t.double() for t in tensors[:7]), tensors[7], eps)


def of_step(step, x: Tensor, given: tuple) -> Tensor:
    """A step's value on what its mode takes."""
    taken = (*given[:7], given[8]) if step.mode == "eval" else of_batch(given)
    return step.compute(x, *taken)


def true(mode: str, x: Tensor, given: tuple) -> Tensor:
    return softmax(logits(x, *given) if mode == "eval" else statistics(x, *of_batch(given))[0])


def distance(step, x: Tensor, given: tuple) -> float:
    wanted = true(step.mode, x, given)
    return ((of_step(step, x, given) - wanted).norm() / wanted.norm()).item()


def filled(model: nn.Module, given: tuple) -> nn.Module:
    """The model with these parameters and statistics, in their type."""
    names = ("gemm.weight", "gemm.bias", "bn.weight", "bn.bias", "bn.running_mean",
             "bn.running_var", "scale", "bn.num_batches_tracked")  # fmt: skip
    model = model.to(given[0].dtype)
    model.load_state_dict(dict(zip(names, given[:8], strict=True)))
    return model


def twins(K: int, N: int, given: tuple, mode: str) -> tuple[nn.Module, nn.Module]:
    made = (M(K, N, scale_shape=tuple(given[6].shape)) for M in (Model, ModelNew))
    reference, new = (filled(m, given).train(mode == "train") for m in made)
    return reference, new


# --- the derivation ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_the_first_step_is_the_reference(mode):
    x, given = drawn((3, 7), 7).double(), float64(7, 5)
    reference, _ = twins(7, 5, given, mode)
    assert torch.equal(of_step(STEPS[mode][0], x, given), reference(x))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("step", HOLDING, **by_title)
def test_steps_that_hold_agree_with_the_definition(step, shape):
    B, K, N = shape
    x, given = drawn((B, K), 7).double(), float64(K, N)
    assert of_step(step, x, given).shape == (B, N) and distance(step, x, given) <= 1e-12


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 6), st.integers(1, 30), st.integers(1, 20), st.integers(0, 99),
       st.floats(-9, 9), st.booleans())  # fmt: skip
def test_steps_that_hold_agree_at_any_size(B, K, N, seed, shift, each):
    x, given = drawn((B, K), seed).double() + shift, float64(K, N, seed, each)
    for step in HOLDING:
        if N > 2 or "pieces" not in step.title:  # a third of a row has to have a feature
            assert distance(step, x, given) <= 1e-11, step.title


@pytest.mark.parametrize("step", TEMPTING, **by_title)
def test_tempting_steps_differ(step):
    x, given = drawn((7, 97), 7).double() + 1, float64(97, 67)
    assert distance(step, x, given) > 1e-2


@pytest.mark.parametrize("step", [s for s in HOLDING if s.mode == "eval"], **by_title)
def test_steps_keep_nan_in_its_row(step):
    x, given = drawn((4, 7), 7).double(), float64(7, 6)
    x[2, 3] = math.nan
    got = of_step(step, x, given)
    assert got[[0, 1, 3]].isfinite().all() and got[2].isnan().all()


def test_every_step_is_explained():
    for step in PROBLEM.steps:
        assert step.title and step.formula and step.reason
        assert "$" not in step.formula and step.formula.count("{") == step.formula.count("}")
    assert len({step.title for step in PROBLEM.steps}) == len(PROBLEM.steps)
    for mode in ("eval", "train"):
        assert STEPS[mode][0].holds and any(not step.holds for step in STEPS[mode])


# --- what the derivation rests on -------------------------------------------------------------

Part = tuple[float, float]  # maximum, sum of exp
numbers = st.floats(-300, 300) | st.sampled_from([-math.inf, 0.0])


def part_of(t: list[float]) -> Part:
    m = max(t, default=-math.inf)
    return m, sum(math.exp(v - m) for v in t if v > -math.inf)


def merged(one: Part, other: Part) -> Part:
    """As the step "The sum, in any pieces" writes it; nothing, (-inf, 0), is neutral."""
    m = max(one[0], other[0])
    return m, sum(s * math.exp(of - m) for of, s in (one, other) if of > -math.inf)


def close(one: Part, other: Part) -> bool:
    return one[0] == other[0] and math.isclose(one[1], other[1], rel_tol=1e-12)


@settings(deadline=None, max_examples=200)
@given(*(st.lists(numbers, max_size=9) for _ in range(3)))
def test_the_merge_of_parts_is_associative(a, b, c):
    """And commutative, with a neutral element: lanes, warps, tiles and blocks are the same."""
    x, y, z = part_of(a), part_of(b), part_of(c)
    assert close(merged(merged(x, y), z), merged(x, merged(y, z)))
    assert close(merged(x, y), merged(y, x)) and close(merged(x, y), part_of(a + b))
    assert merged(x, (-math.inf, 0.0)) == x == merged((-math.inf, 0.0), x)


def test_control_parts_added_without_rescaling_are_not():
    x, y = part_of([0.0, 1.0]), part_of([5.0])
    assert not close((max(x[0], y[0]), x[1] + y[1]), part_of([0.0, 1.0, 5.0]))


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_outputs_sum_to_one_and_ignore_a_shift_of_the_row(mode):
    """The same number added to every beta is one shift of every row; scale is the same for all."""
    given = parameters(40, 130)
    _, new = twins(40, 130, given, mode)
    x = drawn((6, 40), 7)
    y = new(x)
    assert (y.double().sum(1) - 1).abs().max() <= 80 * U32
    moved = (*given[:3], given[3] + 64, *given[4:])
    _, new = twins(40, 130, moved, mode)
    torch.testing.assert_close(new(x), y, rtol=2e-5, atol=0)


@pytest.mark.parametrize(("mean", "gain"), [(1000.0, 100), (1e5, 1e4)], ids=str)
def test_the_centred_form_is_better_far_from_zero(mean, gain):
    """What it subtracts before the product is exact in what is left; eager rounds it first."""
    x, given = drawn((64, 300), 7) + mean, parameters(300, 130)
    reference, new = twins(300, 130, given, "train")
    wanted = statistics(x, *of_batch(given))[0].softmax(1)
    own, eager = (((m(x) - wanted).norm() / wanted.norm()).item() for m in (new, reference))
    assert own < 2e-6 and eager > gain * own


# --- fold, centre, pieces ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (17,), (1, 17)], ids=str)
def test_the_fold_is_one_map_a_feature(dtype, shape):
    """Each number rounded once, also where a bias is far."""
    _, bias, gamma, beta, mean, var, scale, batches, eps = parameters(9, 17, scale_shape=shape)
    bias = bias + 1e6
    found = chain.fold(dtype, bias, gamma, beta, mean, var, scale, batches, eps)
    kappa = scale.double().reshape(-1)
    wanted = (bias.double() - mean.double(), gamma * kappa / (var.double() + eps).sqrt(),
              beta.double() * kappa)  # fmt: skip
    for got, exact in zip(found, wanted, strict=True):
        assert got.dtype == dtype and got.shape == (17,)
        torch.testing.assert_close(got, exact.to(dtype), rtol=2**-24 if dtype.itemsize == 4 else
                                   1e-15, atol=0)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 99))
def test_the_centre_is_a_median_of_means(B, K, seed):
    x = drawn((B, K), seed)
    count = min(running.back.GROUPS, B)
    means = torch.stack([part.mean(0) for part in x[: B // count * count].chunk(count)])
    torch.testing.assert_close(running.back.centre(x), means.median(0).values)
    assert torch.equal(running.back._median(means), means.median(0).values)


def test_one_far_row_moves_no_centre():
    """A mean would follow it, and the others would lose the digits of what they have in common."""
    x = drawn((50, 20), 3) + 1000
    x[7] = 1e30
    assert (running.back.centre(x) - 1000).abs().max() < 2


def test_half_of_a_difference_is_finite_and_rounded_once():
    x, c = drawn((5, 40), 3), drawn((40,), 4)
    half = running.back.halves(x, c, torch.empty_like(x))
    exact = (x.double() - c.double()) / 2
    assert ((half - exact).abs() <= U32 * exact.abs()).all()
    huge = torch.full((1, 3), 3e38)
    assert (running.back.halves(huge, -huge[0], torch.empty_like(huge)) == 3e38).all()


@pytest.mark.parametrize("columns", [0, 1, 63, 64, 65, 255, 256, 257, 1000])
def test_a_mean_is_spread_over_rows_without_a_trace(columns):
    """Each element is in one row: their sum is exact."""
    mean = drawn((columns,), 3)
    rows = running._spread(mean)
    assert rows.shape == (running.MEAN_ROWS, columns) and torch.equal(rows.sum(0), mean)
    assert ((rows != 0).sum(0) <= 1).all()
    assert ((rows != 0).sum(1) <= -(-columns // 256) * running.RUN).all()


@pytest.mark.parametrize("B", [0, 1, 2, 1024, 5000])
@pytest.mark.parametrize("N", [1, 2047, 2048, 2049, 8192, 10_000_000])
def test_blocks_of_features_are_a_row(B, N):
    blocks = running.blocks_of(B, N)
    assert blocks[0][0] == 0 and blocks[-1][1] == N
    assert all(a[1] == b[0] for a, b in zip(blocks, blocks[1:], strict=False))
    assert all(0 < last - first <= max(by_running.BLOCK, by_running.ELEMENTS)
               for first, last in blocks)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("N", [3, 64, 65, 300])
def test_plain_torch_is_within_the_same_bounds(dtype, N):
    x = (drawn((9, 33), 7) + 1000).to(dtype)
    given = tuple(g.to(dtype) if i < 7 else g for i, g in enumerate(parameters(33, N)))
    y = chain.plain(x, given[0], *chain.fold(dtype, *given[1:]), EPS)
    of = running.plain_of_batch(x, *of_batch(given))
    if dtype == torch.float32:
        assert_eval(y, x, *given)
        assert_batch(of, x, *of_batch(given))
        return
    t, mean, var, _ = statistics(x, *of_batch(given))
    for got, wanted in zip((y, *of), (softmax(logits(x, *given)), softmax(t), mean, var * 9 / 8),
                           strict=True):  # fmt: skip
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=0)


# --- running statistics -----------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0, 0.37, 1])
def test_running_statistics_move_as_torch_moves_them(momentum):
    """Batches of several sizes, in float64; the count too."""
    reference, new = twins(20, 70, float64(20, 70), "train")
    reference.bn.momentum = new.bn.momentum = momentum
    for step, rows in enumerate((2, 3, 40, 7)):
        x = drawn((rows, 20), step).double() * 3 + 5
        torch.testing.assert_close(new(x), reference(x), rtol=1e-9, atol=1e-15)
        for ours, theirs in zip(new.buffers(), reference.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)
    assert new.bn.num_batches_tracked == 9
    assert running.TRAIN.fold is None, "nothing is kept in train mode"


def test_eval_mode_follows_the_statistics_that_training_moved():
    reference, new = twins(20, 70, parameters(20, 70), "train")
    x = drawn((9, 20), 3)
    new.eval()(x)
    for model in (new.train(), reference):
        model(5 * x)
    torch.testing.assert_close(new.eval()(x), reference.eval()(x), rtol=2e-5, atol=1e-9)


def test_eval_mode_moves_nothing():
    _, new = twins(20, 70, parameters(20, 70), "eval")
    before = copy.deepcopy(dict(new.named_buffers()))
    new(drawn((9, 20), 3))
    assert all(torch.equal(b, before[name]) for name, b in new.named_buffers())


def test_a_batch_of_one_can_not_be_normalised():
    """Torch's own error; in eval mode there is none."""
    reference, new = twins(20, 70, parameters(20, 70), "train")
    texts = []
    for model in (reference, new):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel") as raised:
            model(drawn((1, 20), 3))
        texts.append(str(raised.value))
    assert texts[0] == texts[1]
    x, given = drawn((1, 20), 3), parameters(20, 70)
    assert_eval(new.eval()(x).detach(), x, *given)


# --- the options ------------------------------------------------------------------------------


def normal(model, x) -> bool:
    """True where an op stands for the chain."""
    seen, kept = [], (chain.EVAL, chain.TRAIN)

    class Watched:
        def __init__(self, op) -> None:
            self.op, self.arguments = op, op.arguments

        def __call__(self, *given):
            seen.append(self.op)
            return self.op(*given)

    chain.EVAL, chain.TRAIN = map(Watched, kept)
    try:
        model(x)
    finally:
        chain.EVAL, chain.TRAIN = kept
    return bool(seen)


CHANGES = {  # both modes, but for those of train mode alone
    "no affine": lambda m: setattr(m, "bn", nn.BatchNorm1d(13, affine=False)),
    "no statistics": lambda m: setattr(m, "bn", nn.BatchNorm1d(13, track_running_stats=False)),
    "a hook of the softmax": lambda m: m.softmax.register_forward_hook(lambda *_: None),
    "a hook of BatchNorm": lambda m: m.bn.register_forward_hook(lambda *_: None),
    "softmax over the batch": lambda m: setattr(m.softmax, "dim", 0),
    "another softmax": lambda m: setattr(m, "softmax", nn.Softmin(1)),
    "a scale for each row": lambda m: setattr(m, "scale", nn.Parameter(drawn((4, 1)))),
    "a scale of another length": lambda m: setattr(m, "scale", nn.Parameter(drawn((4,)))),
    "no bias": lambda m: setattr(m.gemm, "bias", None),
}
IN_TRAINING = {
    "cumulative": lambda m: setattr(m.bn, "momentum", None),
    "eps 0": lambda m: setattr(m.bn, "eps", 0.0),
}


@pytest.mark.parametrize(("mode", "name"), [
    *((mode, name) for mode in ("eval", "train") for name in CHANGES),
    *(("train", name) for name in IN_TRAINING),
])  # fmt: skip
def test_anything_unusual_runs_the_reference(mode, name):
    reference, new = twins(9, 13, parameters(9, 13), mode)
    x, change = drawn((4, 9), 3), (CHANGES | IN_TRAINING)[name]
    assert normal(copy.deepcopy(new), x)
    for model in (new, reference):
        torch.manual_seed(0)
        change(model)
        model.train(mode == "train")
    (y, error, text), theirs = outcome(lambda: new(x)), outcome(lambda: reference(x))
    assert (error, text) == theirs[1:]
    if error is None:
        assert not normal(copy.deepcopy(new), x)
        torch.testing.assert_close(y, theirs[0], rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_scale_for_each_row_of_a_square_batch(mode):
    """As many numbers as there are features, along the other side."""
    reference, new = twins(9, 13, parameters(9, 13), mode)
    for model in (reference, new):
        model.scale = nn.Parameter(drawn((13, 1), 5))
    x = drawn((13, 9), 3)
    torch.testing.assert_close(new(x), reference(x), rtol=0, atol=0)


@pytest.mark.parametrize("frozen", [True, False])
def test_the_mode_is_that_of_batchnorm(frozen):
    """A BatchNorm that is frozen while the model trains, and one that trains by itself."""
    reference, new = twins(9, 13, parameters(9, 13), "train" if frozen else "eval")
    x = drawn((40, 9), 3)
    for model in (reference, new):
        model.bn.train(not frozen)
    torch.testing.assert_close(new(x), reference(x), rtol=2e-5, atol=1e-9)
    for ours, theirs in zip(new.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert reference.bn.num_batches_tracked == (5 if frozen else 6)


def test_options_are_read_at_each_call():
    reference, new = twins(9, 13, parameters(9, 13), "eval")
    x = drawn((4, 9), 3)
    before = new(x)
    for model in (new, reference):
        model.bn.eps = 0.5
        model.softmax.dim = -1
    assert normal(new, x) and not torch.allclose(new(x), before)
    torch.testing.assert_close(new(x), reference(x), rtol=2e-5, atol=1e-9)


# --- omissions, controls, work ----------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("name", PROBLEM.omissions)
def test_what_an_omission_leaves_out_shows(name, mode):
    x, given = drawn((60, 40), 7).double() + 1, float64(40, 64)
    reference, _ = twins(40, 64, given, mode)
    got, wanted = PROBLEM.omissions[name](reference, x), true(mode, x, given)
    assert got.shape == (60, 64) and got.dtype == torch.float64
    assert ((got - wanted).norm() / wanted.norm()).item() > 1e-3


CONTROLS = [(v.name, mode) for v in PROBLEM.variants if v.is_control and not v.source
            for mode in v.modes]  # fmt: skip


@pytest.mark.parametrize(("name", "mode"), CONTROLS)
def test_the_oracle_rejects_each_control(name, mode):
    """By y, by the buffers it leaves, by weights that move, or by a state_dict that does not fit;
    the reference itself passes."""
    variant = PROBLEM.variant(name)
    with pytest.raises(AssertionError):
        assert_follows(variant.make, mode)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_the_oracle_accepts_what_is_right(mode):
    for make in (lambda m: m, PROBLEM.variant("algebra").make, PROBLEM.drop_in):
        assert_follows(make, mode)


def assert_follows(make, mode: str) -> None:
    """A candidate before and after its weights change in place."""
    reference, _ = twins(40, 64, parameters(40, 64), mode)
    x, call = drawn((60, 40), 7) + 1, make(reference)
    if isinstance(call, nn.Module):
        assert list(call.state_dict()) == list(Model(1, 1).state_dict()), "does not load"
    for seed in (0, 20):
        given = parameters(40, 64, seed)
        filled(reference, given)
        with torch.no_grad():
            assert_close(call(x), true(mode, x, given))
        if mode == "train":
            _, mean, var, _ = statistics(x, *of_batch(given))
            assert_close(reference.bn.running_mean, 0.9 * given[4] + 0.1 * mean)
            assert_close(reference.bn.running_var, 0.9 * given[5] + 0.1 * var * 60 / 59)
            assert reference.bn.num_batches_tracked == given[7] + 1


def assert_close(got: Tensor, wanted: Tensor) -> None:
    assert (got - wanted).norm() <= 5e-6 * wanted.norm()


def test_work_counts_what_the_chain_says():
    """The product stays; of the passes behind it one is left, in place."""
    before, after, fold = (PROBLEM.work[k](1024, 8192, 8192) for k in ("before", "after", "fold"))
    product = 2 * 1024 * 8192 * 8192
    assert before.flops >= after.flops >= product and fold.flops >= after.flops
    assert before.read - after.read >= 3 * 4 * 1024 * 8192
    assert before.written - after.written == 3 * 4 * 1024 * 8192
    assert PROBLEM.shape("paper") == {"B": 1024, "K": 8192, "N": 8192}


@needs_compiler
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_the_drop_in_is_within_the_bounds(mode):
    x, given = drawn((9, 33), 7) + 3, parameters(33, 300)
    _, new = twins(33, 300, given, mode)
    with torch.no_grad():
        if mode == "eval":
            assert_eval(new(x), x, *given)
        else:
            found = running.TRAIN(x, *of_batch(given))
            assert_batch(found, x, *of_batch(given))
            assert torch.equal(new(x), found[0])


def test_control_the_bound_of_a_softmax_is_no_wider_than_its_rounding():
    """Some wrong outputs it must not accept: another row's, a part in 10^4, 1 / N."""
    x, given = drawn((9, 33), 7), parameters(33, 300)
    t = logits(x, *given)
    bound, y = allowed(t, moved_eval(x, *given)), softmax(t)
    for wrong in (y.roll(1, 0), y * (1 + 1e-4), torch.full_like(y, 1 / 300), torch.zeros_like(y)):
        assert ((wrong - y).abs() > bound).any()


# --- what is left to the reference ------------------------------------------------------------


@pytest.mark.as_sized
@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize(("N", "left"), [(64, True), (65, False), (1, True)])
def test_few_features_are_left_to_the_reference_on_a_cpu(N, left, mode):
    """With its own bits, and statistics that move once."""
    model, new = twins(33, N, parameters(33, N), mode)
    x = drawn((9, 33), 3)
    assert running.is_left(x, new.gemm, new.bn) == left
    with torch.no_grad():
        y, own = new(x), model(x)
    assert torch.equal(y, own) or not left
    torch.testing.assert_close(new.state_dict(), model.state_dict(), rtol=1e-5, atol=1e-6)
    if left:
        assert new.bn.num_batches_tracked == model.bn.num_batches_tracked
        assert torch.equal(new.bn.running_var, model.bn.running_var)


@pytest.mark.as_sized
@pytest.mark.parametrize(("mode", "route", "B", "N", "left"), [
    ("train", "float32", 7, 8192, True), ("train", "float32", 8, 8192, False),
    ("train", "float32", 4096, 64, True), ("train", "float32", 4096, 65, False),
    ("train", "float32", 32, 1024, True), ("train", "float32", 33, 1024, False),
    ("train", "tf32", 7, 8192, False), ("eval", "float32", 7, 64, False),
])  # fmt: skip
def test_a_small_batch_is_left_to_the_reference_in_training_on_a_gpu(
    mode, route, B, N, left, monkeypatch
):
    monkeypatch.setattr(running.normal, "sizes", lambda *_: (B, 33, N))
    bn = nn.BatchNorm1d(N).train(mode == "train")
    with using_route(route):
        assert running.is_left(SimpleNamespace(is_cuda=True), None, bn) == left
    product = running.multiplied(mode, route, {"B": B, "K": 33, "N": N})
    assert (product is None) == left
    assert left or product == (N, mode == "eval" or route == "tf32")
