"""Properties, with inputs that Hypothesis draws: shapes, strides, and values of every kind.

The oracle is the definition in float64, the rule that of `kit`. What is said of rows (an order, a
concatenation, threads) holds within the rule: products are torch's, and which kernel its library
takes may depend on the number of rows. The same call gives the same bits.
"""

from __future__ import annotations

import math

import pytest
import torch
from cases import STATES, put
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kit import (
    AVG,
    BN,
    BN_TRAIN,
    INF,
    MAX,
    NAN,
    SUBJECTS,
    SUM,
    assert_accurate,
    assert_like,
    drawn,
    each,
    reference_of,
    slack_of,
    truth,
)
from torch import Tensor, nn

from workbook.chains import matmul_maxpool_sum_scale_run as maxpool

IS_LEFT = maxpool.is_left
ROWWISE = [s for s in SUBJECTS if not s.has_statistics]
each_rowwise = pytest.mark.parametrize("subject", ROWWISE, ids=str)
many = settings(deadline=None, max_examples=40)
few = settings(deadline=None, max_examples=15)

# Values that break kernels, beside normal ones: a float32's ends and all that is no number.
SPECIAL = [0.0, -0.0, 1.0, 1e-45, -1e-45, 1e-40, 3e38, -3e38, 1e30, 1e-30, 88.8, -104.0]
NOT_FINITE = [INF, -INF, NAN]
FINITE_STATES = list(STATES)[:-4]


@pytest.fixture(autouse=True)
def as_small_as_it_is(ours_at_every_size, monkeypatch):
    """A max pool of so few roundings keeps the rule by luck, or by the reference itself."""
    monkeypatch.setattr(maxpool, "is_left", IS_LEFT)


@st.composite
def problems(draw, *, rowwise: bool = False, least: int = 1):
    """(subject with options of its own, in_features, out_features), every pool that fits."""
    subject = draw(st.sampled_from(ROWWISE if rowwise else SUBJECTS))
    K, N = draw(st.integers(1, 40)), draw(st.integers(least, 40))
    if subject.slug in (AVG.slug, MAX.slug):
        scale = draw(st.sampled_from([2.0, 0.5, -1.5, 0.0, 1, -3]))
        subject = subject.with_options(draw(st.integers(1, N)), scale)
    elif subject.slug == BN.slug:
        shape = draw(st.sampled_from([(1,), (), (N,), (1, N)]))
        eps, momentum = draw(st.sampled_from([1e-5, 1e-2])), draw(st.sampled_from([0.1, None, 1.0]))
        subject = subject.with_options(eps, momentum, shape)
    return subject, K, N


@st.composite
def inputs(draw, K: int, *, rows: int = 0, special: list[float] = SPECIAL) -> Tensor:
    """x (rows, K) at any offset and any stride, with a few values of `special`."""
    B = draw(st.integers(max(rows, 0), 9))
    step, gap, offset = draw(st.integers(1, 3)), draw(st.integers(0, 5)), draw(st.integers(0, 5))
    by_columns = draw(st.booleans())
    shape = (K, B) if by_columns else (B, K)
    inner = shape[1] * step + gap
    memory = drawn((offset + shape[0] * inner + 1,), draw(st.integers(0, 99)))
    memory *= 10.0 ** draw(st.integers(-3, 3))
    x = memory.as_strided(shape, (inner, step), offset)
    x = x.t() if by_columns else x
    for _ in range(draw(st.integers(0, 3)) if x.numel() and special else 0):
        row, column = draw(st.integers(0, B - 1)), draw(st.integers(0, K - 1))
        x[row, column] = draw(st.sampled_from(special))
    return x


def twins_of(subject, K: int, N: int, state: str) -> tuple[nn.Module, nn.Module]:
    reference, new = subject.twins(K, N)
    put(state, reference, new)
    return reference, new


@settings(deadline=None, max_examples=250)
@given(st.data())
def test_the_definition_within_the_rule(data):
    """Whatever is finite or not in x, whatever state the weights are in."""
    subject, K, N = data.draw(problems())
    x = data.draw(inputs(K, special=NOT_FINITE + SPECIAL))
    reference, new = twins_of(subject, K, N, data.draw(st.sampled_from(list(STATES))))
    with torch.no_grad():
        assert_like(reference, new, x)


@many
@given(st.data())
def test_the_definition_where_the_weights_are_drawn_too(data):
    subject, K, N = data.draw(problems())
    x = data.draw(inputs(K))
    reference, new = subject.twins(K, N)
    weights = data.draw(inputs(K, rows=0))
    for model in (reference, new):
        with torch.no_grad():
            layer = getattr(model, subject.linear)
            rows = min(N, weights.size(0))
            layer.weight[:rows] = weights[:rows]
            if rows:
                layer.bias[:rows] = weights[:rows, 0]
    with torch.no_grad():
        assert_like(reference, new, x)


def rounding(model: nn.Module, x: Tensor) -> Tensor:
    """(rows) how far apart two right outputs may be."""
    true = truth(model, x)
    size = true.reshape(true.size(0), -1).norm(dim=1)
    return 1e-6 * size + 4 * slack_of(model, x) + 1e-30


def assert_near(y: Tensor, wanted: Tensor, allowed: Tensor) -> None:
    difference = (y.double() - wanted.double()).reshape(y.size(0), -1).norm(dim=1)
    assert (difference <= allowed).all(), f"{(difference / allowed).max():.3g} times what may be"


@many
@given(st.data())
def test_rows_in_another_order(data):
    """Also in training: the statistics are of the whole batch."""
    subject, K, N = data.draw(problems())
    x = data.draw(inputs(K, rows=2, special=[]))
    reference, new = twins_of(subject, K, N, data.draw(st.sampled_from(["drawn", "trained"])))
    order = torch.randperm(x.size(0), generator=torch.Generator().manual_seed(1))
    allowed = rounding(reference, x)
    again = reference_of(new)
    again.__class__ = subject.ModelNew
    assert_near(new(x).detach()[order], again(x[order]).detach(), allowed[order])


@many
@given(st.data())
def test_rows_apart_and_together(data):
    """Batches one after the other, or as one: rows know nothing of each other (but in training)."""
    subject, K, N = data.draw(problems(rowwise=True))
    x = data.draw(inputs(K, rows=2, special=[]))
    reference, new = twins_of(subject, K, N, data.draw(st.sampled_from(["drawn", "trained"])))
    at = data.draw(st.integers(0, x.size(0)))
    with torch.no_grad():
        apart = torch.cat([new(x[:at]), new(x[at:])])
        assert_near(apart, new(x), rounding(reference, x))


@few
@given(st.data())
def test_a_batch_twice_over_in_training(data):
    """Twice the same rows have the same mean and the same biased variance."""
    K, N = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    x = data.draw(inputs(K, rows=2, special=[]))
    assume(float(x.std(0, unbiased=False).min()) > 1e-3)
    reference, new = twins_of(BN_TRAIN, K, N, "trained")
    allowed = rounding(reference, x)
    y, twice = new(x).detach(), new(torch.cat([x, x])).detach()
    assert_near(twice[: x.size(0)], y, allowed)
    assert_near(twice[x.size(0) :], y, allowed)


@many
@given(st.data())
def test_the_same_bits_on_every_call(data):
    subject, K, N = data.draw(problems())
    x = data.draw(inputs(K, special=NOT_FINITE + SPECIAL))
    assume(x.size(0) > 1)
    new = twins_of(subject, K, N, data.draw(st.sampled_from(FINITE_STATES)))[1]
    twin = reference_of(new)
    twin.__class__ = subject.ModelNew
    with torch.no_grad():
        first, second = new(x), twin(x)
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
    theirs, ours = dict(twin.named_buffers()), dict(new.named_buffers())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@each
@pytest.mark.parametrize("size", [(33, 17), (257, 1025), (2048, 1030)], ids=str)
def test_the_number_of_threads_does_not_matter(subject, size):
    """From one thread to more than there are cores, within the rule; twice the same, to the bit."""
    reference, _ = subject.twins(*size)
    put("trained", reference)
    x, before = drawn((23, size[0]), 3), torch.get_num_threads()
    true, slack = truth(reference, x), slack_of(reference, x)
    eager = copy_of(reference)(x).detach()
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            found = [as_drop_in(reference, subject)(x).detach() for _ in range(3)]
            assert all(torch.equal(y, found[0]) for y in found), f"{threads} threads"
            assert_accurate(found[0], eager, true, slack)
    finally:
        torch.set_num_threads(before)


def copy_of(reference: nn.Module) -> nn.Module:
    return reference_of(reference)


def as_drop_in(reference: nn.Module, subject) -> nn.Module:
    new = reference_of(reference)
    new.__class__ = subject.ModelNew
    return new


# --- softmax ----------------------------------------------------------------------------------


@many
@given(st.data())
def test_rows_of_a_softmax_sum_to_one(data):
    """Nothing is negative or above one; also where a feature is masked."""
    K, N = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 300))
    subject = data.draw(st.sampled_from([BN, BN_TRAIN]))
    x = data.draw(inputs(K, rows=2, special=[0.0, -0.0, 1e-40, 88.8, -104.0, 1e10]))
    states = [*FINITE_STATES, *(["a masked feature"] if subject is BN and N > 2 else [])]
    states.remove("huge and opposite")
    state = data.draw(st.sampled_from(states))
    reference, new = twins_of(subject, K, N, state)
    y = new(x).detach()
    assume(reference(x).isfinite().all())
    assert (y >= 0).all() and (y <= 1 + 1e-6).all()
    assert ((y.double().sum(1) - 1).abs() <= 1e-6 + 1e-8 * N).all()


@many
@given(st.data())
def test_a_softmax_ignores_a_shift_of_its_row(data):
    """The same number added to every beta: as if it were not there, but for rounding."""
    K, N = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 60))
    subject = data.draw(st.sampled_from([BN, BN_TRAIN]))
    x = data.draw(inputs(K, rows=2, special=[]))
    shift = data.draw(st.sampled_from([-300.0, -50.0, 0.25, 3.0, 100.0, 300.0]))
    reference, new = twins_of(subject, K, N, data.draw(st.sampled_from(["drawn", "trained"])))
    with torch.no_grad():
        reference.scale.fill_(1.0), new.scale.fill_(1.0)
    allowed = rounding(reference, x) + 4 * 2.0**-23 * abs(shift)
    y = new(x).detach()
    with torch.no_grad():
        new.bn.bias.add_(shift)
    assert_near(new(x).detach(), y, allowed)


# --- the others -------------------------------------------------------------------------------


@many
@given(st.data())
def test_a_scale_in_front_is_a_factor_behind(data):
    """For a positive scale: of GELU's maximum, and of the sum of maxima."""
    subject, K, N = data.draw(problems(rowwise=True).filter(lambda p: p[0].slug in _SCALED))
    x = data.draw(inputs(K, rows=1, special=[]))
    pool, factor = subject.options[0], data.draw(st.sampled_from([2.0, 0.25, 1024.0]))
    found = []
    for scale in (1.0, factor):
        reference, new = subject.with_options(pool, scale).twins(K, N)
        put("trained", reference, new)
        found.append(new(x).detach())
    allowed = factor * rounding(subject.with_options(pool, 1.0).twins(K, N)[0], x)
    torch.testing.assert_close(found[1], found[0] * factor, rtol=1e-5, atol=allowed.max().item())


_SCALED = (AVG.slug, MAX.slug)


@few
@given(st.data())
def test_windows_of_equal_features_are_one_feature(data):
    """Every feature repeated pool times: the pool gives back the features themselves."""
    subject = data.draw(st.sampled_from([AVG, MAX]))
    K, N, pool = (data.draw(st.integers(1, 20)) for _ in range(3))
    x = data.draw(inputs(K, rows=1, special=[]))
    small = subject.with_options(1, 2.0).new(K, N)
    large = subject.with_options(pool, 2.0).new(K, N * pool)
    with torch.no_grad():
        large.matmul.weight.copy_(small.matmul.weight.repeat_interleave(pool, 0))
        large.matmul.bias.copy_(small.matmul.bias.repeat_interleave(pool))
        assert_near(large(x), small(x), rounding(small, x))


@few
@given(st.data())
def test_the_sum_chain_is_linear(data):
    """y(a + b) + y(0) = y(a) + y(b), and a feature twice counts twice."""
    K, N = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    new = SUM.new(K, N)
    a, b = drawn((5, K), 1), drawn((5, K), 2)
    with torch.no_grad():
        left, right = new(a + b) + new(torch.zeros(5, K)), new(a) + new(b)
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


# --- controls ---------------------------------------------------------------------------------


def test_control_special_values_are_met():
    """What the strategies draw contains what they are for."""
    seen: set = set()

    @settings(database=None, max_examples=400, deadline=None)
    @given(st.data())
    def draw(data):
        subject, K, N = data.draw(problems())
        x = data.draw(inputs(K, special=NOT_FINITE + SPECIAL))
        seen.add(subject.slug)
        seen.add("strided" if not x.is_contiguous() else "contiguous")
        if x.numel():
            seen.update({"NaN"} if x.isnan().any() else ())
            seen.update({"infinite"} if x.isinf().any() else ())
            tiny = (x != 0) & (x.abs() < 1.2e-38)
            seen.update({"denormal"} if tiny.any() else ())
        seen.update({"empty"} if not x.size(0) else ())

    draw()
    assert seen >= {s.slug for s in SUBJECTS}
    assert seen >= {"strided", "contiguous", "NaN", "infinite", "denormal", "empty"}


def test_control_neighbours_are_told_apart():
    """What these properties allow is far below what a wrong row would show."""
    for subject in SUBJECTS:
        reference, new = subject.twins(33, 17)
        x = drawn((9, 33), 1)
        allowed, y = rounding(reference, x), new(x).detach()
        with pytest.raises(AssertionError, match="times what may be"):
            assert_near(y.roll(1, 0), y, allowed)
        with pytest.raises(AssertionError, match="times what may be"):
            assert_near(y * (1 + 1e-3), y, allowed)
        assert math.isfinite(float(allowed.max()))
