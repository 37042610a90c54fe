"""Right numbers: the accuracy rule over states and inputs, and what is not finite, for each path.

The rule (kit.assert_accurate): for the whole and for the worst row at most twice eager's own error
against float64, or one rounding of the type. Its teeth are the controls in `wrongs`.
"""

from __future__ import annotations

import pytest
import torch
import wrongs
from cases import STATES, families, pairwise, put
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import (
    AVG,
    BN,
    DEVICES,
    DTYPES,
    INF,
    MAX,
    NAN,
    SUBJECTS,
    SUM,
    B,
    K,
    N,
    X,
    assert_accurate,
    assert_buffers,
    assert_like,
    buffers_after,
    buffers_of,
    drawn,
    each,
    errors,
    layer_of,
    slack_of,
    truth,
)

from workbook import ops

FAMILIES = tuple(families(1, 1))
SMALL = (33, 17)
ROWWISE = [s for s in SUBJECTS if not s.has_statistics]
each_rowwise = pytest.mark.parametrize("subject", ROWWISE, ids=str)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def cell(
    subject, size, state: str, family: str, *, rows=21, dtype=torch.float32, device="cpu"
) -> None:
    """One state of the weights, one family of inputs."""
    reference, new = subject.twins(*size, dtype=dtype, device=device)
    put(state, reference, new)
    x = families(rows, size[0])[family]
    if state == "huge and opposite":
        x = x * 1e-30  # small enough for eager to stay finite
    x = x.to(device, dtype)
    with torch.no_grad():
        assert_like(reference, new, x)


def cells(subject, size, rows: list[tuple], **options) -> None:
    for state, family in rows:
        try:
            cell(subject, size, state, family, **options)
        except AssertionError as error:
            raise AssertionError(f"{size}, {state}, {family}: {error}") from error


PAIRS = [(state, family) for state in STATES for family in FAMILIES]


@each
@pytest.mark.parametrize("device", DEVICES)
def test_the_accuracy_rule(subject, device):
    cells(subject, SMALL, PAIRS, device=device)
    cells(subject, (K, N), PAIRS[::3], device=device)


@each
@pytest.mark.parametrize("size", [(300, 70), (33, 1000), (4100, 7)], ids=str)
def test_the_accuracy_rule_at_larger_sizes(subject, size):
    """Every state and every family; in the full grid they all meet."""
    rows = [(s, FAMILIES[i % len(FAMILIES)]) for i, s in enumerate(STATES)]
    cells(subject, size, rows)


@pytest.mark.full
@each
@pytest.mark.parametrize("size", [(300, 70), (33, 1000), (4100, 7)], ids=str)
def test_the_accuracy_rule_at_larger_sizes_in_full(subject, size):
    cells(subject, size, PAIRS)


@each
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
def test_the_accuracy_rule_in_other_types(subject, dtype):
    rows = [(r["s"], r["f"]) for r in pairwise({"s": list(STATES), "f": list(FAMILIES)})][::3]
    cells(subject, (K, N), rows, dtype=dtype)


@pytest.mark.full
@each
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
def test_the_accuracy_rule_in_other_types_in_full(subject, dtype):
    cells(subject, (K, N), PAIRS, dtype=dtype)


@each
@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(2, 9),
    features=st.integers(1, 80),
    outs=st.integers(4, 60),
    seed=st.integers(0, 999),
)
def test_the_accuracy_rule_at_any_size(subject, rows, features, outs, seed):
    reference, new = subject.twins(features, outs, seed=seed)
    assert_like(reference, new, drawn((rows, features), seed) * 10.0 ** (seed % 7 - 3))


@each
def test_without_a_compiler_the_result_is_as_right(subject, monkeypatch):
    """The plain path, which serves then: same rule, weights of every size included."""
    monkeypatch.setattr(ops.FusedOp, "kernel", lambda self, device: None)
    cells(subject, (300, 70), [(s, FAMILIES[i % len(FAMILIES)]) for i, s in enumerate(STATES)])
    cells(subject, (K, N), [(s, "normal") for s in STATES])


@each
@pytest.mark.parametrize("device", DEVICES)
def test_the_output_is_written_whole(subject, device):
    """Deterministic mode fills new memory with NaN: what is not written shows."""
    new = subject.new(K, N).to(device)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3, device=device).isnan().all()
        for batch in (2, 3, 7, 1000):
            assert torch.isfinite(new(drawn((batch, K)).to(device))).all()
    finally:
        torch.use_deterministic_algorithms(False)


@each
def test_the_input_and_the_weights_stay_as_they_are(subject):
    new, x = subject.new(K, N), X.clone()
    held = [p.clone() for p in new.parameters()]
    new(x)
    assert torch.equal(x, X)
    assert all(torch.equal(p, was) for p, was in zip(new.parameters(), held, strict=True))


# --- what is not finite -----------------------------------------------------------------------


@each_rowwise
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_not_finite_stays_in_its_row(subject, value, device):
    reference, new = subject.twins(K, N, device=device)
    for column in (0, 7, K - 1):
        clean, x = new(X.to(device)).detach(), X.to(device).clone()
        x[2, column] = value
        y, wanted = new(x).detach(), reference(x).detach()
        others = [0, 1, 3, 4]
        assert torch.equal(y[others], clean[others])
        assert not wanted[2].isfinite().all(), "the control: eager has it too"
        assert not y[2].isfinite().all()
        assert y[2].isnan().all() or value == value, "a NaN is lost"


@each
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_one_signed_weights_and_an_infinite_input(subject, value):
    reference, new = subject.twins(K, N)
    for model in (reference, new):
        with torch.no_grad():
            layer_of(model).weight.abs_().add_(0.1)
    x = X.clone()
    x[1, 4] = value
    assert_like(reference, new, x)
    if subject is SUM:
        torch.testing.assert_close(new(x)[1], reference(x)[1], equal_nan=True)


def tensors_of(model: torch.nn.Module) -> list[str]:
    """The names of all parameters and floating-point buffers."""
    return [n for n, t in model.state_dict().items() if t.is_floating_point()]


@each
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_parameters_and_buffers_that_are_not_finite(subject, value):
    for name in tensors_of(subject.new(K, N)):
        for where in (0, 3, -1):
            reference, new = subject.twins(K, N)
            for model in (reference, new):
                held = model.state_dict()[name].view(-1)
                held[where if held.numel() > 1 else 0] = value
            try:
                assert_like(reference, new, X)
                assert_like(reference, new, X.abs() + 0.1)
                assert_like(reference, new, torch.zeros(B, K))
            except AssertionError as error:
                raise AssertionError(f"{name}[{where}] = {value}: {error}") from error


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("subject", [AVG, MAX], ids=str)
def test_what_is_in_the_dropped_features_does_not_matter(subject, value):
    """The pool drops the last N % pool features; eager is finite there, and so are we."""
    subject = subject.with_options(3, 2.0)
    for put_into in ("weight", "bias"):
        reference, new = subject.twins(K, N)
        clean = new(X).detach()
        for model in (reference, new):
            with torch.no_grad():
                getattr(layer_of(model), put_into)[N // 3 * 3 :] = value
        assert reference(X).isfinite().all(), "the control"
        assert_like(reference, new, X)
        assert torch.equal(new(X), clean)


@pytest.mark.parametrize("pool", [1, 2, 3, 4, N])
@pytest.mark.parametrize("sign", [1, -1])
def test_masked_features_of_a_max_pool(pool, sign):
    """A bias of -inf on one side of a window leaves the other; on all sides the row is -inf."""
    subject = MAX.with_options(pool, 0.5 * sign)
    for masked in {1, max(1, pool - 1), pool}:
        reference, new = subject.twins(K, N)
        for model in (reference, new):
            with torch.no_grad():
                for i in range(masked):
                    layer_of(model).bias[i : N // pool * pool : pool] = -INF
        assert reference(X).isfinite().all() == (masked < pool), "the control"
        assert_like(reference, new, X)


@pytest.mark.parametrize("scale", [2.0, -2.0, 0.0, INF, NAN])
def test_gelu_at_its_ends(scale):
    """Means far on either side, at 0, and around the minimum of GELU, whose side a max may miss."""
    for pool in (1, 2, 3, N):
        for centre in (-200.0, -40.0, -5.5, -0.7518, 0.0, 0.7, 6.0, 200.0):
            reference, new = AVG.with_options(pool, scale).twins(K, N)
            for model in (reference, new):
                with torch.no_grad():
                    model.matmul.bias.add_(centre)
            for x in (X, X * 1e-3, torch.zeros(B, K)):
                assert_like(reference, new, x)


def test_scales_of_a_softmax_far_apart():
    """Exponents beyond float32's, both ways: a softmax that does not subtract its maximum fails."""
    for size in (1e-3, 1.0, 30.0, 1e4, -1e4):
        for subject in (s for s in SUBJECTS if s.slug == BN.slug):
            reference, new = subject.twins(K, N)
            for model in (reference, new):
                with torch.no_grad():
                    model.scale.mul_(size)
            assert_like(reference, new, X)


def test_rows_that_overflow_only_on_the_way_stay_finite_where_eager_is():
    reference, new = SUM.twins(4, 2)
    for model in (reference, new):
        with torch.no_grad():
            model.linear.weight.fill_(3e38)
    x = torch.full((3, 4), 1e-30)
    assert torch.isfinite(reference(x)).all()
    assert_like(reference, new, x)


# --- controls ---------------------------------------------------------------------------------


def rejected(subject, make) -> list[tuple]:
    """The cells in which the assertions of this file refuse a candidate."""
    found = []
    for state in (s for s in STATES if s != "huge and opposite"):  # float64 has no exact one either
        for family in ("normal", "uniform", "large mean", "one NaN"):
            reference = subject.twins(*SMALL)[0]
            put(state, reference)
            x = families(21, SMALL[0])[family]
            true, true_buffers = truth(reference, x), buffers_after(reference, x)
            slack = slack_of(reference, x)
            tried = subject.twins(*SMALL)[0]
            call = make(tried)
            with torch.no_grad():
                call(x)
            put(state, tried)
            with torch.no_grad():
                tried.load_state_dict(reference.state_dict())
                before = buffers_of(tried), buffers_of(reference)
                wanted = reference(x)
                y = call(x.clone())
            try:
                assert_accurate(y, wanted, true, slack)
                assert_buffers(tried, reference, before, true_buffers)
                nan = x.isnan().any(1)
                assert y[nan].isnan()[wanted[nan].isnan()].all()
            except AssertionError:
                found.append((state, family))
    return found


@each
def test_control_what_is_right_is_accepted(subject):
    assert rejected(subject, wrongs.right) == []


@pytest.mark.parametrize(
    ("subject", "name"), [(s, n) for s in SUBJECTS for n in wrongs.of(s)], ids=str
)
def test_control_what_is_wrong_is_rejected(subject, name):
    assert rejected(subject, wrongs.of(subject)[name])


def test_control_the_rule_rejects_wrong_rows():
    """One row a little off, NaN, or zeros: each breaks the rule, and rounding does not."""
    reference, _ = SUM.twins(300, 4000)
    x = drawn((21, 300), 1).sigmoid()
    true, eager = truth(reference, x), reference(x).detach()
    right = true.float()
    assert_accurate(right, eager, true)
    off = right.clone()
    off[3] *= 1 + 3 * max(errors(eager, true)[1], 1e-6)
    for y in (off, torch.zeros_like(right), torch.full_like(right, NAN), right * (1 + 1e-4)):
        with pytest.raises(AssertionError):
            assert_accurate(y, eager, true)
    one = torch.where(torch.arange(21).unsqueeze(1) == 20, NAN, right)
    with pytest.raises(AssertionError, match="finite"):
        assert_accurate(one, eager, true)
    lost = torch.where(torch.arange(21).unsqueeze(1) == 20, INF, true)
    with pytest.raises(AssertionError, match="can't be finite"):
        assert_accurate(right, torch.full_like(right, NAN), lost)
