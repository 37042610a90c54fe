"""Folds stay fresh: every way to change a weight that torch has, and the ones that it hides.

Each way is tried on each path of each problem, in eager mode and compiled. What is about the cache
itself is tried on the sum chain, whose op folds once for each change and no more.
"""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import weakref

import numpy
import pytest
import torch
from cases import put
from kit import (
    AVG,
    BN,
    BN_TRAIN,
    DEVICES,
    MAX,
    SUBJECTS,
    SUM,
    B,
    K,
    N,
    X,
    assert_fresh,
    assert_like,
    drawn,
    each,
    layer_of,
    needs_gpu,
    needs_inductor,
    reference_of,
    subject_of,
    truth,
)
from torch import nn
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef

import workbook as wb
from workbook import fold
from workbook.chains import matmul_maxpool_sum_scale_run as maxpool

EVAL = [s for s in SUBJECTS if not s.has_statistics]
each_eval = pytest.mark.parametrize("subject", EVAL, ids=str)
# Where torch.compile takes seconds: one path of each problem, both modes of BatchNorm.
DEAR = [s for s in SUBJECTS if not s.name.endswith(("negative", "-3"))]
each_dear = pytest.mark.parametrize("subject", DEAR, ids=str)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def folds(monkeypatch) -> list:
    """One entry for every fold that is made, of whatever problem."""
    made, make = [], fold._made

    def counted(recipe):
        made.append(recipe)
        return make(recipe)

    monkeypatch.setattr(fold, "_made", counted)
    return made


@pytest.fixture(autouse=True)
def halving(monkeypatch):
    """A max pool folds at every size, not where it is large alone."""
    monkeypatch.setattr(maxpool, "LEAST", (0, 0))


@pytest.fixture
def light():
    """What is there already is not looked through again at each collection."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def kept() -> int:
    """Folds in the caches, once the dead are gone."""
    gc.collect()
    return sum(map(len, fold.FoldCache.caches))


# --- every way to change a weight -------------------------------------------------------------
# Each by values of its own: a factor common to all would vanish in BatchNorm.


def another(model: nn.Module) -> nn.Module:
    """A reference of the same options with other parameters, and other buffers."""
    other = reference_of(model)
    layer_of(other).reset_parameters()
    put("trained", other)
    return other


def factors(model: nn.Module) -> torch.Tensor:
    """(N, 1), a factor a row."""
    return 2 + drawn((N, 1), 31).to(layer_of(model).weight)


def loads_a_state(model):
    model.load_state_dict(another(model).state_dict())


def assigns_a_state(model):
    model.load_state_dict(another(model).state_dict(), assign=True)


def copies(model):
    with torch.no_grad():
        layer_of(model).weight.copy_(torch.randn(N, K))


def copies_a_bias(model):
    with torch.no_grad():
        layer_of(model).bias.add_(torch.randn(N).to(layer_of(model).bias))


def writes_one_element(model):
    with torch.no_grad():
        layer_of(model).weight[3, 4] += 30


def writes_through_detach(model):
    layer_of(model).weight.detach().mul_(factors(model))


def writes_in_inference_mode(model):
    with torch.inference_mode():
        layer_of(model).weight.mul_(factors(model))


def writes_with_foreach(model):
    with torch.no_grad():
        parameters = list(model.parameters())
        torch._foreach_add_(parameters, [torch.randn_like(p) for p in parameters])


def initialises(model):
    nn.init.xavier_normal_(layer_of(model).weight)


def swaps_data(model):
    layer_of(model).weight.data = torch.randn_like(layer_of(model).weight)


def swaps_data_at_the_same_address(model):
    """`.data` moves no version counter, and the allocator gives the old address again."""
    weight = layer_of(model).weight
    weight.data = torch.empty(0, device=weight.device)
    weight.data = torch.randn(N, K, device=weight.device)


def new_parameter(model):
    layer_of(model).weight = nn.Parameter(torch.randn_like(layer_of(model).weight))


def new_parameter_on_the_old_storage(model):
    old = layer_of(model).weight.detach()
    old.mul_(factors(model))
    layer_of(model).weight = nn.Parameter(old)


def new_view_of_the_old_storage(model):
    """Same storage, address and shape, other strides: the upper part of a larger square."""
    whole = torch.randn(N, N, device=layer_of(model).weight.device)
    layer_of(model).weight = nn.Parameter(whole[:, :K])
    assert_fresh(model, model, X.to(whole.device))
    layer_of(model).weight = nn.Parameter(whole.t()[:, :K])


def vector_to_parameters(model):
    count = sum(p.numel() for p in model.parameters())
    vector = torch.randn(count, device=layer_of(model).weight.device)
    nn.utils.vector_to_parameters(vector, model.parameters())


def resets(model):
    layer_of(model).reset_parameters()


def resizes_storage(model):
    """As sharded training does: the memory is given back, taken again and filled."""
    storage = layer_of(model).weight.untyped_storage()
    size, memory = storage.size(), storage._cdata
    storage.resize_(0)
    storage.resize_(size)
    with torch.no_grad():
        for p in model.parameters():  # others may lie in it too
            if p.untyped_storage()._cdata == memory:
                p.copy_(torch.randn(p.shape))


def new_linear(model):
    layer = nn.Linear(K, N, device=layer_of(model).weight.device)
    setattr(model, subject_of(model).linear, layer)


def averages(model):
    average = torch.optim.swa_utils.AveragedModel(another(model))
    average.update_parameters(model)
    copies(model)
    average.update_parameters(model)
    model.load_state_dict(average.module.state_dict())


CHANGES = {
    f.__name__: f
    for f in (
        loads_a_state,
        assigns_a_state,
        copies,
        copies_a_bias,
        writes_one_element,
        writes_through_detach,
        writes_in_inference_mode,
        writes_with_foreach,
        initialises,
        swaps_data,
        swaps_data_at_the_same_address,
        new_parameter,
        new_parameter_on_the_old_storage,
        new_view_of_the_old_storage,
        vector_to_parameters,
        resets,
        resizes_storage,
        new_linear,
        averages,
    )
}


def _rewrites(name: str, positive: bool = False):
    """Writes one tensor of BatchNorm, or the scale, in place."""

    def change(model: nn.Module) -> None:
        with torch.no_grad():
            held = model.get_parameter(name) if name == "scale" else _attribute(model, name)
            value = torch.randn_like(held) + 0.1
            held.copy_(value.exp() if positive else value)

    return change


def _attribute(model: nn.Module, name: str) -> torch.Tensor:
    return getattr(model.bn, name.removeprefix("bn."))


def _swaps(name: str, positive: bool = False):
    """Puts new memory behind it, or, for a buffer, a new tensor in its place."""

    def change(model: nn.Module) -> None:
        held = _attribute(model, name)
        value = torch.randn_like(held)
        value = value.exp() if positive else value
        if isinstance(held, nn.Parameter):
            held.data = value
        else:
            setattr(model.bn, name.removeprefix("bn."), value)

    return change


OF_BN = {
    "writes_gamma": _rewrites("bn.weight"),
    "writes_beta": _rewrites("bn.bias"),
    "writes_the_scale": _rewrites("scale"),
    "writes_running_mean": _rewrites("bn.running_mean"),
    "writes_running_var": _rewrites("bn.running_var", positive=True),
    "swaps_gamma": _swaps("bn.weight"),
    "swaps_running_mean": _swaps("bn.running_mean"),
    "swaps_running_var": _swaps("bn.running_var", positive=True),
    "resets_statistics": lambda model: (put("trained", model), model.bn.reset_running_stats()),
    "resets_batchnorm": lambda model: (put("trained", model), model.bn.reset_parameters()),
    "trains_a_step": lambda model: (model.train()((X * 3 + 1).to(model.scale)), model.eval()),
}


def changes_of(subject) -> dict:
    """By name: f(model)."""
    if subject.slug != BN.slug:
        return CHANGES
    return CHANGES | {n: f for n, f in OF_BN.items() if subject is BN or n != "trains_a_step"}


WAYS = [(s, name) for s in SUBJECTS for name in changes_of(s)]
each_way = pytest.mark.parametrize(("subject", "name"), WAYS, ids=str)


@pytest.mark.parametrize("device", DEVICES)
@each_way
def test_a_change_is_seen(subject, name, device):
    new, x = subject.new(K, N).to(device), X.to(device)
    for _ in range(2):
        assert_fresh(new, new, x)
        changes_of(subject)[name](new)
        assert_fresh(new, new, x)


@each_way
def test_a_change_is_seen_with_gradients_on(subject, name):
    new = subject.new(K, N)
    y = new(X)
    (y * drawn(tuple(y.shape), 4)).sum().backward()
    changes_of(subject)[name](new)
    assert_like(reference_of(new), new, X)


@pytest.mark.parametrize(("subject", "name"), [w for w in WAYS if w[0] in EVAL], ids=str)
def test_control_a_fold_made_once_is_caught(subject, name):
    """The same assertion rejects a model that folds at its first call: each change has teeth."""
    new = subject.new(K, N)
    old = copy.deepcopy(new)

    def stale(x):
        return truth(old, x).float()

    assert_fresh(stale, new, X)
    changes_of(subject)[name](new)
    with pytest.raises(AssertionError):
        assert_fresh(stale, new, X)


def adopts(model, memory) -> None:
    """Puts the weights into memory that others own: always the same address."""
    layer_of(model).weight.data = torch.from_numpy(memory)


def test_new_weights_at_the_old_address(monkeypatch):
    """Assigning `.data` moves no version counter, and the address may be the old one."""
    new, memory = SUM.new(K, N), numpy.ones((N, K), dtype=numpy.float32)

    def changed() -> bool:
        adopts(new, memory)
        new(X)
        before = new.linear.weight.data_ptr(), new.linear.weight._version
        memory[:] += 1
        adopts(new, memory)
        return before != (new.linear.weight.data_ptr(), new.linear.weight._version)

    assert not changed(), "torch shows this change now: the storage may leave the stamp"
    assert_fresh(new, new, X)
    stamp = fold._stamp
    monkeypatch.setattr(fold, "_stamp", lambda t: stamp(t)[:1] + stamp(t)[2:])
    assert not changed()
    with pytest.raises(AssertionError):  # the control: without the storage it goes unseen
        assert_fresh(new, new, X)


# --- optimizers -------------------------------------------------------------------------------

OPTIMIZERS = [
    name
    for name, kind in sorted(vars(torch.optim).items())
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    if name not in ("Optimizer", "SparseAdam")  # SparseAdam takes sparse gradients only
]


def optimizer_of(name: str, model: nn.Module, **options) -> torch.optim.Optimizer:
    parameters = [layer_of(model).weight] if name == "Muon" else model.parameters()  # 2-D only
    return getattr(torch.optim, name)(parameters, lr=0.5, **options)


def variants_of(name: str) -> list[dict]:
    known = inspect.signature(getattr(torch.optim, name)).parameters
    return [{}, *({option: True} for option in ("foreach", "fused") if option in known)]


def steps(optimizer, call) -> None:
    """One step on a loss that every optimizer moves the weights for."""

    def closure():
        optimizer.zero_grad()
        y = call(X)
        loss = (y - 100 * drawn(tuple(y.shape), 4)).square().mean()
        loss.backward()
        return loss

    closure()
    optimizer.step(closure)


@each
@pytest.mark.parametrize(
    ("name", "options"), [(n, o) for n in OPTIMIZERS for o in variants_of(n)], ids=str
)
def test_an_optimizer_step_is_seen(subject, name, options):
    new = subject.new(K, N)
    optimizer = optimizer_of(name, new, **options)
    before = new(X).detach()
    for _ in range(2):
        steps(optimizer, new)
        assert_fresh(new, new, X)
    assert not torch.equal(new(X), before)


@each_eval
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_control_fused_steps_are_seen_by_the_epoch_alone(subject, name, monkeypatch, folds):
    new = subject.new(K, N)
    optimizer = optimizer_of(name, new, fused=True)
    new(X)
    if not folds:
        pytest.skip("nothing is derived from the weights here: no fold to go stale")
    version, epoch = layer_of(new).weight._version, fold._Epoch.value
    steps(optimizer, new)
    if layer_of(new).weight._version != version:
        pytest.skip("this torch moves the version counter in a fused step")
    assert fold._Epoch.value > epoch
    new(X)
    stale = fold._Epoch.value
    steps(optimizer, new)
    monkeypatch.setattr(fold._Epoch, "value", stale)
    with pytest.raises(AssertionError):  # unless it is seen by something else than the epoch
        assert_fresh(new, new, X)


def test_two_models_one_optimizer_step_refolds_both_and_no_more(folds):
    models = [SUM.new(K, N) for _ in range(2)]
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
    for _ in range(3):
        for model in models:
            model(X)
    assert len(folds) == 2
    steps(optimizer, models[0])
    count = len(folds)
    for _ in range(3):
        for model in models:
            model(X)
    assert len(folds) <= count + 2


# --- dtypes, copies, files --------------------------------------------------------------------


@each
@pytest.mark.parametrize("names", ["half", "double", "bfloat16", "half float", "double float"])
def test_conversions(subject, names):
    new = subject.new(K, N)
    new(X)
    for name in names.split():
        new = getattr(new, name)()
        x = X.to(layer_of(new).weight.dtype)
        assert_fresh(new, new, x)
        copies(new)
        assert_fresh(new, new, x)


@each
def test_to_and_back_without_a_call_between(subject):
    """Rounding by .half().float() changes the weights; the memory may be the old one."""
    for _ in range(20):
        new = subject.new(K, N)
        new(X)
        new.half().float()
        assert_fresh(new, new, X)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "save": lambda m: _saved(m),
    "a state in a file": lambda m: _saved_state(m),
}


def _saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _saved_state(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    twin = copy.deepcopy(model)
    copies(twin)
    twin.load_state_dict(torch.load(file, weights_only=True), strict=True)
    return twin


@each
@pytest.mark.parametrize("name", COPIES)
def test_copies_are_models_of_their_own(subject, name):
    new = subject.new(K, N)
    new(X)
    twin = COPIES[name](new)
    assert torch.equal(twin(X), new(X)) and twin.training == new.training
    copies(twin)
    assert_fresh(twin, twin, X)
    assert_fresh(new, new, X)
    copies(new)
    assert_fresh(new, new, X)
    assert_fresh(twin, twin, X)


@each
def test_nothing_of_the_fold_is_pickled_or_in_the_state(subject):
    new = subject.new(K, N).eval()
    empty, keys = len(pickle.dumps(new)), set(new.__dict__)
    new(X)
    assert len(pickle.dumps(new)) == empty and set(new.__dict__) == keys
    assert set(layer_of(new).__dict__) == set(nn.Linear(1, 1).__dict__)
    assert list(new.state_dict()) == list(subject.Model(K, N, *subject.options).state_dict())


@each
def test_shared_memory_written_by_others_is_seen(subject):
    """Another process moves no counter here; a write through numpy moves none either."""
    new = subject.new(K, N)
    new(X)
    new.share_memory()
    assert_fresh(new, new, X)
    layer_of(new).weight.detach().numpy()[:] = drawn((N, K), 3).numpy()
    assert_fresh(new, new, X)
    layer_of(new).bias.detach().numpy()[:] = drawn((N,), 4).numpy()
    assert_fresh(new, new, X)


@each
def test_tied_weights(subject):
    first, second = subject.new(K, N), subject.new(K, N)
    layer_of(second).weight = layer_of(first).weight
    for change in (lambda: None, lambda: copies(first), lambda: copies_a_bias(second)):
        change()
        for model in (first, second):
            assert_fresh(model, model, X)


def test_tied_weights_of_two_problems():
    """Their folds are different things of the same parameters."""
    models = [s.new(K, N) for s in SUBJECTS]
    for model in models[1:]:
        setattr(model, subject_of(model).linear, layer_of(models[0]))
    for _ in range(2):
        for model in models:
            assert_fresh(model, model, X)
        copies(models[0])


@each
def test_views_of_one_storage(subject):
    """Two models on one storage; a write through either is seen by both."""
    both = torch.randn(2, N, K)
    models = [subject.new(K, N) for _ in range(2)]
    for model, part in zip(models, both, strict=True):
        layer_of(model).weight = nn.Parameter(part)
        assert_fresh(model, model, X)
    both.mul_(3)
    for model in models:
        assert_fresh(model, model, X)


@each
def test_functional_call_uses_what_it_is_given(subject):
    """Parameters and buffers; in training it is the given buffers that are written."""
    new = subject.new(K, N)
    held = copy.deepcopy(new.state_dict())
    for seed in range(5):
        torch.manual_seed(seed)
        other = another(new)
        given = {**dict(other.named_parameters()), **dict(other.named_buffers())}
        given = {n: t.detach().clone() for n, t in given.items()}
        got = functional_call(new, given, (X,))
        torch.testing.assert_close(got, other(X), rtol=1e-4, atol=1e-6)
        for name, b in other.named_buffers():
            torch.testing.assert_close(given[name], b, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(dict(new.state_dict()), dict(held), rtol=0, atol=0)
    assert_fresh(new, new, X)


@each
def test_parameters_made_in_inference_mode(subject, light):
    with torch.inference_mode():
        new = subject.new(K, N)
    held = kept()
    with torch.inference_mode():
        assert_fresh(new, new, X)
        layer_of(new).weight.mul_(factors(new))
        assert_fresh(new, new, X)
        layer_of(new).bias.add_(drawn((N,), 3))
        assert_fresh(new, new, X)
    assert kept() == held, "an inference tensor has no version: nothing may be kept"


# --- under torch.compile ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled():
    """subject -> a compiled drop-in, whose weights the tests change; made once."""
    made = {}

    def of(subject):
        if subject not in made:
            torch._dynamo.reset()
            made.clear()
            new = subject.new(K, N)
            made[subject] = new, torch.compile(new, fullgraph=True)
            made[subject][1](X)
        return made[subject]

    return of


COMPILED_WAYS = [w for w in WAYS if w[0] in DEAR and w[1] != "trains_a_step"]


@needs_inductor
@pytest.mark.parametrize(("subject", "name"), COMPILED_WAYS, ids=str)
def test_a_change_is_seen_by_a_compiled_model(compiled, subject, name):
    new, call = compiled(subject)
    assert_fresh(call, new, X)
    changes_of(subject)[name](new)
    assert_fresh(call, new, X)


@needs_inductor
@each_dear
@pytest.mark.parametrize("name", ["SGD", "Adam"])
@pytest.mark.parametrize("option", ["foreach", "fused"])
def test_an_optimizer_step_is_seen_by_a_compiled_model(compiled, subject, name, option):
    new, call = compiled(subject)
    steps(optimizer_of(name, new, **{option: True}), call)
    assert_fresh(call, new, X)


@each_dear
def test_conversions_of_a_compiled_model(subject):
    torch._dynamo.reset()
    new = subject.new(K, N)
    call = torch.compile(new, fullgraph=True, backend="aot_eager")
    for dtype in (torch.float32, torch.float64, torch.float16, torch.float32):
        new.to(dtype)
        assert_fresh(call, new, X.to(dtype))


@needs_inductor
def test_a_compiled_model_folds_once(compiled, folds):
    new, call = compiled(SUM)
    copies(new)
    folds.clear()  # the model may have been made just now
    for _ in range(3):
        call(X)
    for _ in range(3):
        call(X.clone().requires_grad_()).sum().backward()
    assert len(folds) == 1


@needs_inductor
def test_hidden_edits_refresh_and_freeze_of_a_compiled_model(compiled):
    new, call = compiled(SUM)
    y = call(X)
    new.linear.weight.data.mul_(2)
    assert torch.equal(call(X), y)
    wb.refresh(new)
    assert_fresh(call, new, X)
    wb.freeze(new)
    y = call(X)
    copies(new)
    assert torch.equal(call(X), y)
    wb.refresh(new)
    assert_fresh(call, new, X)


@needs_inductor
@each_dear
def test_copies_and_ties_of_a_compiled_model(compiled, subject):
    new, call = compiled(subject)
    twin = copy.deepcopy(new)
    other = torch.compile(twin, fullgraph=True)
    copies(new)
    for model, compiled_model in ((new, call), (twin, other)):
        assert_fresh(compiled_model, model, X)
    layer_of(twin).weight = layer_of(new).weight
    copies(new)
    for model, compiled_model in ((new, call), (twin, other)):
        assert_fresh(compiled_model, model, X)


@each_dear
def test_inference_parameters_of_a_compiled_model(subject):
    torch._dynamo.reset()
    with torch.inference_mode():
        new = subject.new(K, N)
        call = torch.compile(new, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            assert_fresh(call, new, X)
            layer_of(new).weight.mul_(factors(new))
        assert_fresh(call, new, X)


@needs_inductor
@each_eval
def test_weights_written_by_compiled_code(subject):
    torch._dynamo.reset()
    new = subject.new(K, N)
    new(X)
    with torch.no_grad():
        torch.compile(lambda w, f: w.mul_(f))(layer_of(new).weight, factors(new))
    assert_fresh(new, new, X)


# --- what stays hidden, and what is promised --------------------------------------------------

HIDDEN = {
    "data": lambda w: w.data.mul_(2),
    "numpy": lambda w: w.detach().numpy().__imul__(2),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_hidden_edit_is_stale_until_refresh(name):
    new = SUM.new(K, N)
    y = new(X)
    HIDDEN[name](new.linear.weight)
    assert torch.equal(new(X), y), "torch shows this edit now: the documentation may say so"
    with pytest.raises(AssertionError):
        assert_fresh(new, new, X)
    wb.refresh(new)
    assert_fresh(new, new, X)


@each
@pytest.mark.parametrize("name", HIDDEN)
def test_a_hidden_edit_is_seen_after_refresh(subject, name):
    """Of every parameter and every buffer."""
    for tensor in [n for n, t in subject.new(K, N).state_dict().items() if t.is_floating_point()]:
        new = subject.new(K, N)
        put("trained", new)
        new(X)
        HIDDEN[name](new.state_dict()[tensor])
        wb.refresh(new)
        assert_fresh(new, new, X)


def test_refresh_reaches_submodules_and_leaves_others(folds):
    inner, other = SUM.new(K, N), SUM.new(K, N)
    outer = nn.Sequential(inner)
    for model in (inner, other):
        model(X)
    inner.linear.weight.data.mul_(2)
    wb.refresh(outer)
    assert_fresh(outer, inner, X)
    count = len(folds)
    other(X)
    assert len(folds) == count


def test_frozen_weights_are_not_compared(folds):
    new = SUM.new(K, N)
    wb.freeze(new)
    y = new(X)
    copies(new)
    assert torch.equal(new(X), y), "the promise was that weights stay"
    assert len(folds) == 1
    wb.refresh(new)
    assert_fresh(new, new, X)
    copies(new)
    assert_fresh(new, new, X)


@each
def test_freeze_and_refresh(subject):
    """Frozen is right while the promise is kept; refresh ends it."""
    new = subject.new(K, N)
    wb.freeze(new)
    for _ in range(2):
        assert_fresh(new, new, X)
    wb.refresh(new)
    copies(new)
    assert_fresh(new, new, X)


@each
def test_freeze_after_a_change_does_not_keep_the_old_fold(subject):
    new = subject.new(K, N)
    new(X)
    copies(new)
    wb.freeze(new)
    assert_fresh(new, new, X)
    layer_of(new).weight.data.mul_(factors(new))
    wb.freeze(new)
    assert_fresh(new, new, X)


@each
def test_freeze_is_of_tensors_not_of_names(subject):
    new = subject.new(K, N)
    wb.freeze(new)
    new(X)
    new_parameter(new)
    assert_fresh(new, new, X)
    copies(new)
    assert_fresh(new, new, X)
    twin = copy.deepcopy(new)
    copies(twin)
    assert_fresh(twin, twin, X)


def test_freeze_of_shared_memory_keeps_the_fold(folds):
    new = SUM.new(K, N)
    new.share_memory()
    for _ in range(3):
        new(X)
    assert len(folds) == 3
    wb.freeze(new)
    for _ in range(3):
        new(X)
    assert len(folds) == 4


# --- the cache --------------------------------------------------------------------------------


@each
def test_folded_once_for_many_calls(subject, folds):
    new = subject.new(K, N)
    new(X)
    first = len(folds)
    assert first <= 2
    for size in (2, 3, B):
        new(X[:size])
        new(X[:size].requires_grad_())
    with torch.no_grad():
        new(X)
    with torch.inference_mode():
        new(X)
    assert len(folds) == first


@pytest.mark.parametrize("subject", [SUM, AVG, MAX], ids=str)
def test_what_should_fold_folds(subject, folds):
    """The tests of this file are about something."""
    subject.new(K, N)(X)
    assert len(folds) == 1


@each
def test_an_entry_dies_with_its_parameter(subject, light):
    held = kept()
    new = subject.new(K, N)
    new(X)
    made = kept() - held
    layer_of(new).bias = nn.Parameter(torch.zeros(N))
    assert kept() <= held + made
    new(X)
    assert kept() == held + made
    del new
    assert kept() == held


def test_a_frozen_entry_dies_with_its_parameter(light):
    held, known = kept(), len(fold._frozen._refs)
    frozen = SUM.new(K, N)
    wb.freeze(frozen)
    frozen(X)
    assert kept() == held + 1 and len(fold._frozen._refs) == known + 2
    del frozen
    assert kept() == held and len(fold._frozen._refs) == known


@each
def test_an_entry_keeps_neither_model_nor_old_memory_alive(subject, light):
    new = subject.new(K, N)
    new(X)
    old = StorageWeakRef(layer_of(new).weight.untyped_storage())
    swaps_data(new)
    gc.collect()
    assert old.expired()
    alive = weakref.ref(new)
    del new
    gc.collect()
    assert alive() is None


@each
def test_many_short_lives_leave_nothing(subject, light):
    """Parameters at recycled addresses and ids: never another one's fold, never a leak."""
    held = kept()
    for i in range(100):
        new = subject.new(3, 8, seed=i)
        x = drawn((3, 3), i)
        reference = reference_of(new)
        torch.testing.assert_close(new(x), reference(x), rtol=1e-4, atol=1e-5)
        del new, reference
    assert kept() == held


def test_weights_changed_while_folding_are_folded_again():
    """What another thread writes between reading and stamping must not pass as fresh."""
    cache, weight = fold.FoldCache(), torch.ones(3)

    def torn():
        made = weight.clone()
        weight.add_(1)  # the other thread
        return (made,)

    assert cache.get("sum", [weight], torn)[0].tolist() == [1, 1, 1]
    assert cache.get("sum", [weight], lambda: (weight.clone(),))[0].tolist() == [2, 2, 2]


def test_folding_runs_without_gradients_and_a_failed_fold_is_not_kept():
    cache, weight = fold.FoldCache(), torch.ones(3, requires_grad=True)
    with pytest.raises(ZeroDivisionError):
        cache.get("sum", [weight], lambda: 1 / 0)
    assert len(cache) == 0
    assert not cache.get("sum", [weight], lambda: (weight * 2,))[0].requires_grad
    cache.get("other recipe", [weight], lambda: (weight * 3,))
    assert len(cache) == 2
    cache.drop([weight])
    assert len(cache) == 0


# --- on a GPU ---------------------------------------------------------------------------------


@needs_gpu
@each
def test_a_fold_made_on_one_stream_is_waited_for_on_another(subject):
    new, x = subject.new(2048, 8192).cuda(), torch.rand(64, 2048, device="cuda")
    reference = reference_of(new)
    wanted = reference(x)
    torch.cuda.synchronize()
    for _ in range(10):
        wb.refresh(new)
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(first), torch.no_grad():
            torch.cuda._sleep(20_000_000)  # the fold is late
            new(x)
        if subject.has_statistics:
            torch.cuda.synchronize()  # the running statistics themselves are the user's to order
        with torch.cuda.stream(second), torch.no_grad():
            got = new(x)
        torch.cuda.synchronize()
        torch.testing.assert_close(got, wanted.detach(), rtol=1e-3, atol=1e-4)


@needs_gpu
@each
def test_a_side_stream_is_the_stream_that_is_used(subject):
    """The input is made late on a side stream: a kernel on another stream would read it early."""
    reference, new = subject.twins(256, 512, device="cuda")
    new(drawn((64, 256)).cuda())
    reference.load_state_dict(new.state_dict())
    side, x = torch.cuda.Stream(), torch.zeros(64, 256, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side), torch.no_grad():
        torch.cuda._sleep(20_000_000)
        x.copy_(drawn((64, 256), 3))
        y = new(x)
    side.synchronize()
    torch.testing.assert_close(y, reference(x).detach(), rtol=1e-3, atol=1e-4)


def captured(new, x):
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            new(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = new(x)
    return graph, y


@needs_gpu
@each_eval
def test_a_captured_graph_folds_unless_frozen(subject):
    new, x = subject.new(K, N).cuda(), X.cuda()
    graph, y = captured(new, x)
    for _ in range(2):
        copies(new)
        graph.replay()
        assert_fresh(lambda _: y, new, x)
    wb.freeze(new)
    graph, y = captured(new, x)
    graph.replay()
    assert_fresh(lambda _: y, new, x)


@needs_gpu
def test_a_graph_captured_from_a_frozen_model_keeps_its_fold():
    new, x = SUM.new(K, N).cuda(), X.cuda()
    wb.freeze(new)
    graph, y = captured(new, x)
    copies(new)
    graph.replay()
    with pytest.raises(AssertionError):
        assert_fresh(lambda _: y, new, x)


@needs_gpu
def test_a_captured_graph_of_training_updates_the_statistics():
    new, x = BN_TRAIN.new(K, N).cuda(), X.cuda()
    graph, y = captured(new, x)
    reference = reference_of(new)
    for i in range(3):
        x.copy_(drawn((B, K), i))
        graph.replay()
        torch.testing.assert_close(y, reference(x).detach(), rtol=1e-4, atol=1e-5)
        theirs, ours = dict(reference.named_buffers()), dict(new.named_buffers())
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@needs_gpu
@each
def test_moved_to_the_gpu_and_back(subject):
    new = subject.new(K, N)
    new(X)
    for device in ("cuda", "cpu", "cuda"):
        new.to(device)
        assert_fresh(new, new, X.to(device))
        copies(new)
    assert_fresh(new, new, X.cuda())


def test_statistics_that_torch_itself_has_moved_are_seen():
    """torch's BatchNorm writes them without moving their version: it counts the batch, though.

    With a momentum of None it is the original's forward that runs in train mode.
    """
    (new,) = (s.new(K, N) for s in SUBJECTS if s.name == "bn")
    new.bn.momentum = None
    assert_fresh(new, new, X)
    versions = new.bn.running_mean._version, new.bn.running_var._version
    new.train()(X * 3 + 1)
    assert (new.bn.running_mean._version, new.bn.running_var._version) == versions, "no trace"
    assert_fresh(new.eval(), new, X)
    torch.nn.functional.batch_norm(  # the control: a call by hand, that counts nothing
        drawn((5, N), 3), new.bn.running_mean, new.bn.running_var, training=True
    )
    with pytest.raises(AssertionError):
        assert_fresh(new, new, X)
    wb.refresh(new)
    assert_fresh(new, new, X)
