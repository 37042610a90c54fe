"""Every hyper-parameter, as it was given and as it is changed later; BatchNorm's modes and buffers.

The grid crosses sizes, batches, options, modes, types, layouts, states and inputs: pairs of values
in CI, the whole of it behind the marker `full`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping

import pytest
import torch
from cases import STATES, families, options_of, pairwise, put
from kit import (
    AVG,
    BN,
    BN_TRAIN,
    DTYPES,
    MAX,
    PROBLEMS,
    ROUNDING,
    SUM,
    B,
    K,
    N,
    X,
    assert_buffers,
    assert_fresh,
    assert_like,
    buffers_after,
    buffers_of,
    drawn,
    each_problem,
    errors,
    gradients,
    outcome,
    reference_of,
    truth,
)
from torch import nn
from way_back import assert_gradients_like

MODES = ["eval", "train"]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# --- as they were given -----------------------------------------------------------------------


def twins(subject, size: tuple[int, int], option: str, mode: str, dtype=torch.float32) -> tuple:
    reference, new = subject.twins(*size, options=options_of(subject, size[1])[option], dtype=dtype)
    return reference.train(mode == "train"), new.train(mode == "train")


@pytest.mark.parametrize(
    ("subject", "option"), [(s, o) for s in PROBLEMS for o in options_of(s, N)], ids=str
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("outs", [17, 1, 2, 31, 64])
def test_every_option(subject, option, mode, outs):
    """Also those that the reference refuses: the same class of error. Twice: buffers move on."""
    for state in ("drawn", "trained", "odd ones lose by far"):
        reference, new = twins(subject, (K, outs), option, mode)
        put(state, reference, new)
        for batch in (3, 0, 1, 2, 3, 17):
            try:
                assert_like(reference, new, drawn((batch, K), batch))
            except AssertionError as error:
                raise AssertionError(f"{state}, batch {batch}: {error}") from error


LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.t().contiguous().t(),
    "columns skipped": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "offset": lambda x: torch.cat([x[:, :1], x], 1)[:, 1:],
    "rows skipped": lambda x: x.repeat_interleave(2, 0)[::2],
    "one row for all": lambda x: x[:1].expand(x.size(0), -1),
    "3-D": lambda x: x.unsqueeze(1),
}
SIZES = [(33, 17), (1, 1), (7, 1), (1, 7), (31, 13), (64, 32), (101, 97), (2049, 6), (5, 2)]


def dimensions(subject) -> dict[str, list]:
    return {
        "size": SIZES,
        "batch": [0, 1, 2, 3, 65],
        "option": list(options_of(subject, N)),
        "mode": MODES,
        "dtype": DTYPES,
        "layout": list(LAYOUTS),
        "state": list(STATES),
        "family": list(families(1, 1)),
        "gradients": [True, False],
    }


# Of a gradient, against the reference's own: both are computed in the type itself.
CLOSE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def run_cell(subject, cell: Mapping) -> None:
    size, dtype = cell["size"], cell["dtype"]
    reference, new = twins(subject, size, cell["option"], cell["mode"], dtype)
    put(cell["state"], reference, new)
    x = LAYOUTS[cell["layout"]](families(cell["batch"], size[0])[cell["family"]].to(dtype))
    if not cell["gradients"]:
        with torch.no_grad():
            assert_like(reference, new, x)
        return
    assert_like(reference, new, x)
    x.requires_grad_()
    theirs, error, _ = outcome(lambda: gradients(reference, x))
    ours, our_error, _ = outcome(lambda: gradients(new, x))
    assert our_error is error
    if theirs is not None and subject is SUM and cell["state"] == "huge and opposite":
        # a sum of weights, in float64 here: it stays finite where the reference's overflows
        finite = {name: t if t is None else t.isfinite() for name, t in theirs.items()}
        theirs = {name: t if t is None else torch.where(finite[name], t, ours[name])
                  for name, t in theirs.items()}  # fmt: skip
    if subject is AVG and cell["state"] == "huge and opposite":
        return  # the reference's averages are the rounding of numbers that cancel, as the truth's
    if theirs is not None:
        assert_gradients_like(ours, theirs, reference, x, CLOSE[dtype])


def run_cells(subject, cells: Iterable[Mapping]) -> None:
    failed, count = [], 0
    for count, cell in enumerate(cells, 1):  # noqa: B007
        try:
            run_cell(subject, cell)
        except AssertionError as error:
            failed.append(f"{cell}: {error}")
    assert not failed, f"{len(failed)} of {count} cells:\n" + "\n".join(failed[:12])


@each_problem
@pytest.mark.parametrize("seed", range(3))
def test_pairs_of_everything(subject, seed):
    run_cells(subject, pairwise(dimensions(subject), seed))


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("subject", "option"), [(s, o) for s in PROBLEMS for o in options_of(s, N)], ids=str
)
def test_the_full_grid(subject, option, dtype):
    """Sizes, batches, modes, layouts, gradients; then states and inputs: each grid whole."""
    every = dimensions(subject) | {"option": [option], "dtype": [dtype]}
    values = itertools.cycle(itertools.product(every["state"], every["family"]))
    shapes = every | {"state": [None], "family": [None]}
    for cell in grid(shapes):
        state, family = next(values)
        run_cells(subject, [cell | {"state": state, "family": family}])
    numbers = {"size": [(33, 17)], "batch": [5], "layout": ["contiguous"], "gradients": [True]}
    run_cells(subject, grid(every | numbers))


def grid(dimensions: Mapping) -> Iterable[dict]:
    return (
        dict(zip(dimensions, row, strict=True)) for row in itertools.product(*dimensions.values())
    )


def test_pairs_meet_and_a_lost_pair_is_seen():
    every = {"a": [1, 2, 3], "b": "xyz", "c": [True, False], "d": [0]}
    rows = pairwise(every)
    assert rows == pairwise(every) and len(rows) < 18

    def met(rows: list[dict]) -> set:
        return {(n, r[n], m, r[m]) for r in rows for n, m in itertools.combinations(every, 2)}

    assert met(rows) == met(list(grid(every)))
    assert any(met(rows[:i] + rows[i + 1 :]) != met(rows) for i in range(len(rows)))


# --- as they are changed later ----------------------------------------------------------------


def _set(module: str, **values: object):
    def change(model: nn.Module) -> None:
        target = model.get_submodule(module) if module else model
        for name, value in values.items():
            setattr(target, name, value)

    return change


def _renew(name: str, make):
    return lambda model: setattr(model, name, make())


def _tensor(value: float, *shape: int):
    return torch.full(shape, value)


POOLED = {
    "scale": _set("", scale_factor=-0.7),
    "scale an int": _set("", scale_factor=3),
    "scale a tensor": _set("", scale_factor=_tensor(-0.7)),
    "scale a tensor per row": _set("", scale_factor=torch.arange(1.0, B + 1)),
    "scale a parameter": lambda m: (
        delattr(m, "scale_factor"),
        setattr(m, "scale_factor", nn.Parameter(_tensor(-0.7))),
    ),
    "scale a double": _set("", scale_factor=torch.tensor(-0.7, dtype=torch.float64)),
    "scale complex": _set("", scale_factor=1j),
    "scale None": _set("", scale_factor=None),
    "scale a word": _set("", scale_factor="2"),
    "scale True": _set("", scale_factor=True),
}
EDITS = {
    AVG.slug: {
        **POOLED,
        "kernel alone": _set("avg_pool", kernel_size=(2,)),
        "kernel and stride": _set("avg_pool", kernel_size=(2,), stride=(2,)),
        "kernel and stride, ints": _set("avg_pool", kernel_size=5, stride=5),
        "stride alone": _set("avg_pool", stride=(1,)),
        "padding": _set("avg_pool", padding=(1,)),
        "padding not counted": _set("avg_pool", padding=(1,), count_include_pad=False),
        "ceil": _set("avg_pool", ceil_mode=True),
        "another pool": _renew("avg_pool", lambda: nn.AvgPool1d(5)),
        "a pool that overlaps": _renew("avg_pool", lambda: nn.AvgPool1d(4, 2)),
        "no pool": _renew("avg_pool", nn.Identity),
        "a max pool": _renew("avg_pool", lambda: nn.MaxPool1d(3)),
    },
    MAX.slug: {
        **POOLED,
        "kernel alone": _set("max_pool", kernel_size=3),
        "kernel and stride": _set("max_pool", kernel_size=3, stride=3),
        "kernel and stride, tuples": _set("max_pool", kernel_size=(4,), stride=(4,)),
        "stride alone": _set("max_pool", stride=1),
        "padding": _set("max_pool", padding=1),
        "dilation": _set("max_pool", dilation=2),
        "ceil": _set("max_pool", ceil_mode=True),
        "indices": _set("max_pool", return_indices=True),
        "another pool": _renew("max_pool", lambda: nn.MaxPool1d(5)),
        "a pool that overlaps": _renew("max_pool", lambda: nn.MaxPool1d(3, 1)),
        "no pool": _renew("max_pool", nn.Identity),
        "an average pool": _renew("max_pool", lambda: nn.AvgPool1d(2)),
    },
    BN.slug: {
        "eps": _set("bn", eps=0.5),
        "eps a tensor": _set("bn", eps=torch.tensor(0.5)),
        "momentum": _set("bn", momentum=0.9),
        "momentum None": _set("bn", momentum=None),
        "scale": _renew("scale", lambda: nn.Parameter(_tensor(-3.0, 1))),
        "scale per feature": _renew("scale", lambda: nn.Parameter(drawn((N,), 3))),
        "scale per row": _renew("scale", lambda: nn.Parameter(drawn((B, 1), 3))),
        "scale of everything": _renew("scale", lambda: nn.Parameter(drawn((B, N), 3))),
        "scale of three dimensions": _renew("scale", lambda: nn.Parameter(drawn((2, 1, 1), 3))),
        "scale of a wrong size": _renew("scale", lambda: nn.Parameter(drawn((N + 1,), 3))),
        "scale a double": _renew("scale", lambda: nn.Parameter(drawn((N,), 3).double())),
        "gamma": lambda m: m.bn.weight.detach().copy_(drawn((N,), 4)),
        "no gamma, no beta": _renew("bn", lambda: nn.BatchNorm1d(N, affine=False)),
        "no statistics": _renew("bn", lambda: nn.BatchNorm1d(N, track_running_stats=False)),
        "statistics not tracked": _set("bn", track_running_stats=False),
        "statistics away": _set("bn", running_mean=None, running_var=None),
        "mean away": _set("bn", running_mean=None),
        "steps not counted": _set("bn", num_batches_tracked=None),
        "another size": _renew("bn", lambda: nn.BatchNorm1d(N + 1)),
        "new statistics": lambda m: setattr(m.bn, "running_var", drawn((N,), 5).exp()),
        "double statistics": lambda m: m.bn.double(),
        "bn in its own mode": lambda m: m.bn.train(not m.bn.training),
        "no bn": _renew("bn", nn.Identity),
        "softmax of the batch": _set("softmax", dim=0),
        "softmax of the last": _set("softmax", dim=-1),
        "softmax of nothing said": _set("softmax", dim=None),
        "log softmax": _renew("softmax", lambda: nn.LogSoftmax(1)),
    },
}
EDITED = [(s, name) for s in PROBLEMS for name in EDITS.get(s.slug, ())]


@pytest.mark.parametrize(("subject", "name"), EDITED, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore:Implicit dimension")
def test_an_edit_is_seen(subject, name, mode):
    """After construction and after a first call, as the reference with the same edit."""
    for called_before in (False, True):
        new = subject.new(K, N).train(mode == "train")
        if called_before:
            new(X)
        EDITS[subject.slug][name](new)
        reference = reference_of(new)
        for x in (X, drawn((3, K), 2), drawn((2, 3, K), 2)):
            assert_like(reference, new, x)
        if not outcome(lambda reference=reference: gradients(reference, X.clone()))[1]:
            x = X.clone().requires_grad_()
            assert_gradients_like(gradients(new, x), gradients(reference, x), reference, x)


@pytest.mark.parametrize(("subject", "name"), EDITED, ids=str)
def test_control_an_edit_has_teeth(subject, name):
    """In one of the modes the edited reference differs from the one before, or raises."""
    quiet = {"scale True", "steps not counted", "double statistics", "softmax of the last"}
    quiet |= {"softmax of nothing said", "indices"} if subject.slug == BN.slug else set()
    if name in quiet:
        pytest.skip("changes no number: it has to be accepted, or refused, as in the reference")
    differs = []
    for mode in MODES:
        model = subject.twins(K, N)[0].train(mode == "train")
        put("trained", model)
        edited = copy.deepcopy(model)
        EDITS[subject.slug][name](edited)
        for x in (X, drawn((40, K), 3)):
            before, after = model(x), outcome(lambda edited=edited, x=x: edited(x))[0]
            same = (
                after is not None
                and (before.shape, before.dtype) == (after.shape, after.dtype)
                and torch.allclose(before, after)
            )
            differs.append(not same or str(model.state_dict()) != str(edited.state_dict()))
    assert any(differs)


# --- BatchNorm: modes and statistics ----------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.1, None, 0.0, 1.0, 0.37])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_back_and_forth_between_training_and_eval(momentum, dtype):
    """Twenty calls in either mode: output and all three buffers after each."""
    subject = BN.with_options(1e-4, momentum)
    reference, new = subject.twins(K, N, dtype=dtype)
    put("trained", reference, new)
    before = buffers_of(new), buffers_of(reference)
    for step in range(20):
        training = step % 5 not in (2, 3)
        for model in (reference, new):
            model.train(training)
        x = (2 * drawn((2 + step, K), step) + step).to(dtype)
        if step % 3:
            with torch.no_grad():
                assert_like(reference, new, x)
        else:
            assert_like(reference, new, x)
    assert new.bn.num_batches_tracked == 7 + 12
    if momentum == 0.0:
        assert_buffers(new, reference, before, {})


@pytest.mark.parametrize("inference", [False, True])
def test_statistics_of_a_call_without_gradients(inference):
    reference, new = BN_TRAIN.twins(K, N)
    with torch.inference_mode(inference), torch.no_grad():
        true, before = buffers_after(reference, X), (buffers_of(new), buffers_of(reference))
        reference(X), new(X)
    assert_buffers(new, reference, before, true)
    assert not torch.equal(new.bn.running_mean, torch.zeros(N)), "the control"


def test_statistics_are_written_in_place_and_seen_as_written():
    """The buffers stay the same objects: others may hold them. In eval nothing is written."""
    new = BN_TRAIN.new(K, N)
    held = list(new.buffers())
    new(X)
    assert all(a is b for a, b in zip(held, new.buffers(), strict=True))
    new.eval()
    versions = [b._version for b in held]
    y = new(X)
    assert [b._version for b in held] == versions
    new.train()(X)
    assert not torch.equal(new.eval()(X), y), "eval reads the statistics as they are now"


HIDDEN_TRAINING = {
    "autocast": lambda new: _under_autocast(new),
    "3-D": lambda new: new(drawn((4, N, K), 5)),
    "the BatchNorm alone": lambda new: new.bn(drawn((B, N), 5)),
    "another model's BatchNorm": lambda new: _shared_with_a_reference(new),
    "a hook on the BatchNorm": lambda new: _hooked_once(new),
}


def _under_autocast(new: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        new(X + 3)


def _shared_with_a_reference(new: nn.Module) -> None:
    other = BN.Model(K, N)
    other.bn = new.bn
    other(X + 3)


def _hooked_once(new: nn.Module) -> None:
    handle = new.bn.register_forward_hook(lambda *args: None)
    new(X + 3)
    handle.remove()


@pytest.mark.parametrize("name", HIDDEN_TRAINING)
def test_statistics_that_torch_itself_wrote_are_seen(name):
    """torch's own BatchNorm writes them without moving their versions: stamps can't show it."""
    new = BN.new(K, N)
    for _ in range(2):
        assert_fresh(new.eval(), new, X)
        new.train()
        HIDDEN_TRAINING[name](new)
        assert_fresh(new.eval(), new, X)


def test_control_torch_moves_no_version_of_the_statistics():
    bn = nn.BatchNorm1d(3)
    bn(torch.randn(4, 3))
    version = bn.running_mean._version
    bn(torch.randn(4, 3))
    assert bn.running_mean._version == version, "torch shows it now: the docstring above may go"


@pytest.mark.parametrize("batch", [1, 0])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batches_without_a_variance(batch, momentum):
    """One row raises as in torch, and leaves the buffers as torch leaves them."""
    reference, new = BN_TRAIN.with_options(1e-5, momentum).twins(K, N)
    x = X[:batch]
    wanted, error, _ = outcome(lambda: reference(x))
    _, our_error, text = outcome(lambda: new(x))
    assert our_error is error
    assert (error is ValueError) == (batch == 1)
    if error is ValueError:
        assert "Expected more than 1 value per channel" in text
    torch.testing.assert_close(
        dict(new.named_buffers()), dict(reference.named_buffers()), equal_nan=True
    )
    assert_like(reference, new, X)
    assert_like(reference.eval(), new.eval(), x)


def test_frozen_batchnorm_in_a_training_model():
    reference, new = BN_TRAIN.twins(K, N)
    put("trained", reference, new)
    for model in (reference, new):
        model.bn.eval()
        assert model.training
    state = copy.deepcopy(new.state_dict())
    assert_like(reference, new, X)
    assert_like(reference, new, X[:1])
    torch.testing.assert_close(dict(new.state_dict()), dict(state), rtol=0, atol=0)


def test_a_state_without_the_count_of_batches_loads_as_in_the_reference():
    """Files of torch before 0.4.1 have none."""
    for kind in (BN.Model, BN.ModelNew):
        model, state = kind(K, N), kind(K, N).state_dict()
        state.pop("bn.num_batches_tracked")
        state._metadata["bn"]["version"] = 1
        model.load_state_dict(state, strict=True)
        assert model.bn.num_batches_tracked == 0


def test_the_mean_of_the_input_costs_no_digits_in_training():
    """Where eager loses digits to a large mean, what is near the truth stays near it."""
    for mean in (0.0, 1e3, 1e5):
        reference, new = BN_TRAIN.twins(300, 70)
        x = drawn((64, 300), 1) + mean
        true = truth(reference, x)
        with torch.no_grad():
            ours, eager = errors(new(x), true)[1], errors(reference(x), true)[1]
        assert ours <= 2e-6, f"mean {mean}: {ours:.1e} (eager {eager:.1e})"


def test_control_the_mean_costs_eager_its_digits():
    reference, _ = BN_TRAIN.twins(300, 70)
    x = drawn((64, 300), 1) + 1e5
    assert errors(reference(x).detach(), truth(reference, x))[1] > 1e-3


def test_running_variance_is_unbiased():
    """By hand: momentum 1 keeps the batch's own statistics."""
    new = BN_TRAIN.with_options(1e-5, 1.0).new(K, N)
    new(X)
    z = X.double() @ new.gemm.weight.double().T + new.gemm.bias.double()
    torch.testing.assert_close(new.bn.running_mean.double(), z.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(new.bn.running_var.double(), z.var(0), rtol=1e-5, atol=1e-6)
    biased = z.var(0, unbiased=False)
    assert not torch.allclose(new.bn.running_var.double(), biased, rtol=1e-2), "the control"


def test_two_models_share_one_batchnorm():
    first, second = BN_TRAIN.new(K, N), BN_TRAIN.new(K, N, seed=1)
    second.bn = first.bn
    reference = reference_of(first)
    for model in (first, second, first):
        twin = reference_of(model)
        twin.bn = reference.bn
        assert_like(twin, model, X)
    assert first.bn.num_batches_tracked == 3


def test_statistics_written_by_hand_between_calls():
    new = BN.new(K, N)
    for i in range(3):
        assert_fresh(new, new, X)
        new.bn.running_mean.copy_(drawn((N,), i))
        assert_fresh(new, new, X)
        new.bn.running_var = drawn((N,), 10 + i).exp()
        assert_fresh(new, new, X)
        new.bn.reset_running_stats()


def test_rounding_floors_are_of_the_types():
    for dtype, least in ROUNDING.items():
        assert torch.finfo(dtype).eps / 2 <= least
