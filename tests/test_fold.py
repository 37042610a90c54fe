"""Folds stay fresh: every way to change a weight that torch has, and the ones that it hides."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import threading
import weakref

import numpy
import pytest
import torch
from sum_chain import (
    DEVICES,
    Model,
    ModelNew,
    assert_fresh,
    drawn,
    needs_gpu,
    needs_inductor,
    reference_of,
    twins,
)
from torch import nn
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef

import workbook as wb
from workbook import fold
from workbook.chains import matmul_sum_max_mean_logsumexp as chain

K, N, B = 33, 17, 5
X = drawn((B, K), seed=9)


def model_and_change(name: str, device: str = "cpu"):
    new = ModelNew(K, N).to(device)
    return new, lambda: CHANGES[name](new)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def folds(monkeypatch) -> list:
    """One entry for every fold that is made."""
    made, make = [], chain.OP.fold

    def counted(*args):
        made.append(args[0])
        return make(*args)

    monkeypatch.setattr(chain.OP, "fold", counted)
    return made


def kept() -> int:
    """Folds in the cache, once the dead are gone."""
    gc.collect()
    return len(chain.OP.folds)


# --- every way to change a weight -------------------------------------------------------------


def loads_a_state(model):
    model.load_state_dict(Model(K, N).state_dict())


def assigns_a_state(model):
    other = Model(K, N).to(model.linear.weight.device)
    model.load_state_dict(other.state_dict(), assign=True)


def copies(model):
    with torch.no_grad():
        model.linear.weight.copy_(torch.randn(N, K))


def copies_a_bias(model):
    with torch.no_grad():
        model.linear.bias.add_(1)


def writes_one_element(model):
    with torch.no_grad():
        model.linear.weight[3, 4] += 10


def writes_through_detach(model):
    model.linear.weight.detach().mul_(2)


def writes_in_inference_mode(model):
    with torch.inference_mode():
        model.linear.weight.mul_(2)


def writes_with_foreach(model):
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 2.0)


def initialises(model):
    nn.init.ones_(model.linear.weight)


def swaps_data(model):
    model.linear.weight.data = torch.randn_like(model.linear.weight)


def swaps_data_at_the_same_address(model):
    """`.data` moves no version counter, and the allocator gives the old address again."""
    weight = model.linear.weight
    weight.data = torch.empty(0, device=weight.device)
    weight.data = torch.randn(N, K, device=weight.device)


def new_parameter(model):
    model.linear.weight = nn.Parameter(torch.randn_like(model.linear.weight))


def new_parameter_on_the_old_storage(model):
    old = model.linear.weight.detach()
    old.mul_(2)
    model.linear.weight = nn.Parameter(old)


def new_view_of_the_old_storage(model):
    """Same storage and address, other strides: for a square part of the weights."""
    square = model.linear.weight.detach()[:, :N]
    model.linear.weight = nn.Parameter(torch.cat([square.t(), model.linear.weight[:, N:]], 1))


def vector_to_parameters(model):
    vector = torch.randn(N * K + N, device=model.linear.weight.device)
    nn.utils.vector_to_parameters(vector, model.parameters())


def resets(model):
    model.linear.reset_parameters()


def resizes_storage(model):
    """As sharded training does: the memory is given back, taken again and filled."""
    storage = model.linear.weight.untyped_storage()
    size = storage.size()
    storage.resize_(0)
    storage.resize_(size)
    with torch.no_grad():
        model.linear.weight.copy_(torch.randn(N, K))


def new_linear(model):
    model.linear = nn.Linear(K, N, device=model.linear.weight.device)


def averages(model):
    average = torch.optim.swa_utils.AveragedModel(Model(K, N).to(model.linear.weight.device))
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name, device):
    new, change = model_and_change(name, device)
    x = X.to(device)
    for _ in range(2):
        assert_fresh(new, new, x)
        change()
        assert_fresh(new, new, x)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_with_gradients_on(name):
    new, change = model_and_change(name)
    new(X).sum().backward()
    change()
    torch.testing.assert_close(new(X), reference_of(new)(X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CHANGES)
def test_control_a_fold_made_once_is_caught(name):
    """The same assertion rejects a model that folds at its first call: each change has teeth."""
    new, change = model_and_change(name)
    folded = chain.fold(torch.float64, new.linear.weight, new.linear.bias)

    def stale(x):
        return chain.plain(x.double(), *folded).float()

    assert_fresh(stale, new, X)
    change()
    with pytest.raises(AssertionError):
        assert_fresh(stale, new, X)


def adopts(model, memory) -> None:
    """Puts the weights into memory that others own: always the same address."""
    model.linear.weight.data = torch.from_numpy(memory)


def test_new_weights_at_the_old_address(monkeypatch):
    """Assigning `.data` moves no version counter, and the address may be the old one."""
    new, memory = ModelNew(K, N), numpy.ones((N, K), dtype=numpy.float32)

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
    parameters = [model.linear.weight] if name == "Muon" else model.parameters()  # 2-D ones only
    return getattr(torch.optim, name)(parameters, lr=0.5, **options)


def variants_of(name: str) -> list[dict]:
    known = inspect.signature(getattr(torch.optim, name)).parameters
    return [{}, *({option: True} for option in ("foreach", "fused") if option in known)]


def steps(optimizer, call) -> None:
    """One step on a loss that every optimizer moves the weights for."""

    def closure():
        optimizer.zero_grad()
        loss = (call(X) - 100).square().mean()
        loss.backward()
        return loss

    closure()
    optimizer.step(closure)


@pytest.mark.parametrize(
    ("name", "options"), [(n, o) for n in OPTIMIZERS for o in variants_of(n)], ids=str
)
def test_an_optimizer_step_is_seen(name, options):
    new = ModelNew(K, N)
    optimizer = optimizer_of(name, new, **options)
    before = new(X).detach()
    for _ in range(2):
        steps(optimizer, new)
        assert_fresh(new, new, X)
    assert (new(X).detach() - before).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_control_fused_steps_are_seen_by_the_epoch_alone(name, monkeypatch):
    new = ModelNew(K, N)
    optimizer = optimizer_of(name, new, fused=True)
    new(X)
    version, epoch = new.linear.weight._version, fold._Epoch.value
    steps(optimizer, new)
    if new.linear.weight._version != version:
        pytest.skip("this torch moves the version counter in a fused step")
    assert fold._Epoch.value > epoch
    new(X)
    stale = fold._Epoch.value
    steps(optimizer, new)
    monkeypatch.setattr(fold._Epoch, "value", stale)
    new2 = new(X)
    assert not torch.allclose(new2, reference_of(new)(X)), "seen by something else than the epoch"


def test_a_training_run_ends_where_the_references_ends():
    reference, new = twins(K, N)
    for name, options in (("SGD", {"momentum": 0.9}), ("Adam", {"fused": True}), ("AdamW", {})):
        ours, theirs = (
            getattr(torch.optim, name)(m.parameters(), lr=1e-2, **options) for m in (new, reference)
        )
        for step in range(20):
            x = drawn((B, K), seed=step)
            for model, optimizer in ((new, ours), (reference, theirs)):
                optimizer.zero_grad()
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
        torch.testing.assert_close(new.state_dict(), reference.state_dict(), rtol=1e-4, atol=1e-5)
    assert_fresh(new, new, X)


def test_two_models_one_optimizer_step_refolds_both_and_no_more(folds):
    models = [ModelNew(K, N) for _ in range(2)]
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


@pytest.mark.parametrize("chain_of", ["half", "double", "bfloat16", "half float", "double float"])
def test_conversions(chain_of):
    new = ModelNew(K, N)
    new(X)
    for name in chain_of.split():
        new = getattr(new, name)()
        x = X.to(new.linear.weight.dtype)
        assert_fresh(new, new, x)
        copies(new)
        assert_fresh(new, new, x)


def test_to_and_back_without_a_call_between():
    """Rounding by .half().float() changes the weights; the memory may be the old one."""
    for _ in range(20):
        new = ModelNew(K, N)
        new(X)
        new.half().float()
        assert_fresh(new, new, X)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "save": lambda m: _saved(m),
}


def _saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_models_of_their_own(name):
    new = ModelNew(K, N)
    y = new(X)
    twin = COPIES[name](new)
    assert torch.equal(twin(X), y)
    copies(twin)
    assert_fresh(twin, twin, X)
    assert torch.equal(new(X), y)
    copies(new)
    assert_fresh(new, new, X)


def test_nothing_of_the_fold_is_pickled_or_in_the_state():
    new = ModelNew(K, N)
    empty, keys = len(pickle.dumps(new)), set(new.__dict__)
    new(X)
    assert len(pickle.dumps(new)) == empty and set(new.__dict__) == keys
    assert set(new.linear.__dict__) == set(nn.Linear(1, 1).__dict__)
    assert not list(new.buffers())


def test_shared_memory_written_by_others_is_seen():
    """Another process moves no counter here; a write through numpy moves none either."""
    new = ModelNew(K, N)
    new(X)
    new.share_memory()
    assert_fresh(new, new, X)
    new.linear.weight.detach().numpy()[:] = 1.0
    assert_fresh(new, new, X)


def test_tied_weights():
    first, second = ModelNew(K, N), ModelNew(K, N)
    second.linear.weight = first.linear.weight
    for model in (first, second):
        assert_fresh(model, model, X)
    copies(first)
    for model in (first, second):
        assert_fresh(model, model, X)
    copies_a_bias(second)
    for model in (first, second):
        assert_fresh(model, model, X)


def test_views_of_one_storage():
    """Two models on one storage; a write through either is seen by both."""
    both = torch.randn(2, N, K)
    models = [ModelNew(K, N) for _ in range(2)]
    for model, part in zip(models, both, strict=True):
        model.linear.weight = nn.Parameter(part)
        assert_fresh(model, model, X)
    both.mul_(3)
    for model in models:
        assert_fresh(model, model, X)


def test_functional_call_uses_what_it_is_given():
    new = ModelNew(K, N)
    y = new(X)
    for seed in range(5):
        other = Model(K, N)
        torch.manual_seed(seed)
        other.linear.reset_parameters()
        got = functional_call(new, dict(other.named_parameters()), (X,))
        torch.testing.assert_close(got, other(X), rtol=1e-5, atol=1e-5)
    assert torch.equal(new(X), y)


def test_parameters_made_in_inference_mode(folds):
    with torch.inference_mode():
        new = ModelNew(K, N)
    held = kept()
    with torch.inference_mode():
        assert_fresh(new, new, X)
        new.linear.weight.mul_(2)
        assert_fresh(new, new, X)
    assert kept() == held, "an inference tensor has no version: nothing may be kept"


# --- under torch.compile ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled():
    """A compiled drop-in, whose weights the tests change."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    new = ModelNew(K, N)
    call = torch.compile(new, fullgraph=True)
    call(X)
    return new, call


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_by_a_compiled_model(compiled, name):
    new, call = compiled
    assert_fresh(call, new, X)
    CHANGES[name](new)
    assert_fresh(call, new, X)


@needs_inductor
@pytest.mark.parametrize("name", ["SGD", "Adam"])
@pytest.mark.parametrize("option", ["foreach", "fused"])
def test_an_optimizer_step_is_seen_by_a_compiled_model(compiled, name, option):
    new, call = compiled
    steps(optimizer_of(name, new, **{option: True}), call)
    assert_fresh(call, new, X)


def test_conversions_of_a_compiled_model():
    torch._dynamo.reset()
    new = ModelNew(K, N)
    call = torch.compile(new, fullgraph=True)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.float32):
        new.to(dtype)
        assert_fresh(call, new, X.to(dtype))


@needs_inductor
def test_a_compiled_model_folds_once(compiled, folds):
    new, call = compiled
    copies(new)
    for _ in range(3):
        call(X)
    for _ in range(3):
        call(X.clone().requires_grad_()).sum().backward()
    assert len(folds) == 1


def test_hidden_edits_refresh_and_freeze_of_a_compiled_model(compiled):
    new, call = compiled
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


def test_copies_and_ties_of_a_compiled_model(compiled):
    new, call = compiled
    twin = copy.deepcopy(new)
    other = torch.compile(twin, fullgraph=True)
    copies(new)
    for model, compiled_model in ((new, call), (twin, other)):
        assert_fresh(compiled_model, model, X)
    twin.linear.weight = new.linear.weight
    copies(new)
    for model, compiled_model in ((new, call), (twin, other)):
        assert_fresh(compiled_model, model, X)


def test_inference_parameters_of_a_compiled_model():
    torch._dynamo.reset()
    with torch.inference_mode():
        new = ModelNew(K, N)
        call = torch.compile(new, fullgraph=True)
        for _ in range(2):
            assert_fresh(call, new, X)
            new.linear.weight.mul_(2)
        assert_fresh(call, new, X)


@needs_inductor
def test_weights_written_by_compiled_code():
    torch._dynamo.reset()
    new = ModelNew(K, N)
    new(X)
    with torch.no_grad():
        torch.compile(lambda w: w.mul_(2))(new.linear.weight)
    assert_fresh(new, new, X)


# --- what stays hidden, and what is promised --------------------------------------------------

HIDDEN = {
    "data": lambda w: w.data.mul_(2),
    "numpy": lambda w: w.detach().numpy().__imul__(2),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_hidden_edit_is_stale_until_refresh(name):
    new = ModelNew(K, N)
    y = new(X)
    HIDDEN[name](new.linear.weight)
    assert torch.equal(new(X), y), "torch shows this edit now: the documentation may say so"
    with pytest.raises(AssertionError):
        assert_fresh(new, new, X)
    wb.refresh(new)
    assert_fresh(new, new, X)


def test_refresh_reaches_submodules_and_leaves_others(folds):
    inner, other = ModelNew(K, N), ModelNew(K, N)
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
    new = ModelNew(K, N)
    wb.freeze(new)
    y = new(X)
    copies(new)
    assert torch.equal(new(X), y), "the promise was that weights stay"
    assert len(folds) == 1
    wb.refresh(new)
    assert_fresh(new, new, X)
    copies(new)
    assert_fresh(new, new, X)


def test_freeze_after_a_change_does_not_keep_the_old_fold():
    new = ModelNew(K, N)
    new(X)
    copies(new)
    wb.freeze(new)
    assert_fresh(new, new, X)
    new.linear.weight.data.mul_(2)
    wb.freeze(new)
    assert_fresh(new, new, X)


def test_freeze_is_of_tensors_not_of_names():
    new = ModelNew(K, N)
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
    new = ModelNew(K, N)
    new.share_memory()
    for _ in range(3):
        new(X)
    assert len(folds) == 3
    wb.freeze(new)
    for _ in range(3):
        new(X)
    assert len(folds) == 4


# --- the cache --------------------------------------------------------------------------------


def test_folded_once_for_many_calls(folds):
    new = ModelNew(K, N)
    for size in (1, 3, B):
        new(X[:size])
        new(X[:size].requires_grad_())
    with torch.no_grad():
        new(X)
    with torch.inference_mode():
        new(X)
    assert len(folds) == 1


def test_an_entry_dies_with_its_parameter():
    held = kept()
    new = ModelNew(K, N)
    new(X)
    assert kept() == held + 1
    new.linear.bias = nn.Parameter(torch.zeros(N))
    assert kept() == held
    new(X)
    del new
    assert kept() == held
    frozen = ModelNew(K, N)
    wb.freeze(frozen)
    frozen(X)
    known = len(fold._frozen._refs)
    del frozen
    assert kept() == held and len(fold._frozen._refs) == known - 2


def test_an_entry_keeps_neither_model_nor_old_memory_alive():
    new = ModelNew(K, N)
    new(X)
    old = StorageWeakRef(new.linear.weight.untyped_storage())
    swaps_data(new)
    gc.collect()
    assert old.expired()
    alive = weakref.ref(new)
    del new
    gc.collect()
    assert alive() is None


def test_many_short_lives_leave_nothing():
    """Parameters at recycled addresses and ids: never another one's fold, never a leak."""
    held = kept()
    for _ in range(200):
        new = ModelNew(3, 2)
        x = torch.ones(1, 3)
        torch.testing.assert_close(new(x), Model.forward(new, x), rtol=1e-4, atol=1e-5)
        del new
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


def in_threads(*functions) -> None:
    """Run each in a thread of its own; the first error is raised here."""
    failed = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(f,)) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failed:
        raise failed[0]


def test_two_threads_forward_and_backward():
    models = [ModelNew(K, N) for _ in range(2)]
    wanted = []
    for model in models:
        new = copy.deepcopy(model)
        new(X).sum().backward()
        wanted.append((new(X).detach(), new.linear.weight.grad))

    def work(model, y, grad):
        for _ in range(200):
            model.zero_grad()
            got = model(X)
            got.sum().backward()
            assert torch.equal(got, y) and torch.equal(model.linear.weight.grad, grad)

    in_threads(*(lambda m=m, w=w: work(m, *w) for m, w in zip(models, wanted, strict=True)))


def test_two_threads_one_model_that_changes():
    new = ModelNew(K, N)

    def reads():
        for _ in range(300):
            assert torch.isfinite(new(X)).all()

    def writes():
        for _ in range(100):
            copies(new)

    in_threads(reads, writes, reads)
    assert_fresh(new, new, X)


# --- on a GPU ---------------------------------------------------------------------------------


@needs_gpu
def test_a_fold_made_on_one_stream_is_waited_for_on_another():
    new, x = ModelNew(2048, 8192).cuda(), torch.rand(64, 2048, device="cuda")
    wanted = Model.forward(new, x)
    torch.cuda.synchronize()
    for _ in range(10):
        wb.refresh(new)
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(first), torch.no_grad():
            torch.cuda._sleep(20_000_000)  # the fold is late
            new(x)
        with torch.cuda.stream(second), torch.no_grad():
            got = new(x)
        torch.cuda.synchronize()
        torch.testing.assert_close(got, wanted.detach(), rtol=1e-4, atol=1e-4)


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
def test_a_captured_graph_folds_unless_frozen():
    new, x = ModelNew(K, N).cuda(), X.cuda()
    graph, y = captured(new, x)
    for _ in range(2):
        copies(new)
        graph.replay()
        assert_fresh(lambda _: y, new, x)
    wb.freeze(new)
    graph, y = captured(new, x)
    graph.replay()
    assert_fresh(lambda _: y, new, x)
    copies(new)
    graph.replay()
    with pytest.raises(AssertionError):
        assert_fresh(lambda _: y, new, x)


@needs_gpu
def test_moved_to_the_gpu_and_back():
    new = ModelNew(K, N)
    new(X)
    for device in ("cuda", "cpu", "cuda"):
        new.to(device)
        assert_fresh(new, new, X.to(device))
        copies(new)
    assert_fresh(new, new, X.cuda())
