"""ModelNew stands for Model: same constructor, same states, same shapes and layouts, same errors.

Every test is run for each path of each problem. Values are in test_exact_values, gradients in
test_exact_gradients, compilers and transforms in test_exact_compile, hyper-parameters and
BatchNorm's statistics in test_exact_options, weights that change in test_fold.
"""

from __future__ import annotations

import copy
import inspect
import warnings

import pytest
import torch
from cases import options_of
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import (
    DEVICES,
    DTYPES,
    PROBLEMS,
    SUBJECTS,
    SUM,
    B,
    K,
    N,
    X,
    assert_like,
    drawn,
    each,
    each_problem,
    layer_of,
    needs_gpu,
    outcome,
    reference_of,
)
from torch import nn
from torch.nn.utils import prune

from workbook import normal, ops


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def calls(monkeypatch) -> list:
    """The arguments of every call of a fused op: empty where the reference's forward ran."""
    made, call = [], ops.FusedOp.__call__

    def counted(self, *args):
        made.append(args)
        return call(self, *args)

    monkeypatch.setattr(ops.FusedOp, "__call__", counted)
    return made


# --- construction and state -------------------------------------------------------------------


@each_problem
def test_the_model_is_the_written_one(subject):
    """Bit for bit: constructor, names, draws, outputs, gradients, buffers."""
    for name, options in options_of(subject, N).items():
        found = []
        for kind in (subject.written, subject.Model):
            torch.manual_seed(5)
            model = kind(K, N, *options)
            drawn_after = torch.rand(3)
            x = X.clone().requires_grad_()
            y, error, _ = outcome(lambda model=model, x=x: model(x))
            if y is not None:
                (y * drawn(tuple(y.shape), 4)).sum().backward()
            found.append(
                (drawn_after, error, y, x.grad, [p.grad for p in model.parameters()], model)
            )
        (a, error, y, *_), (b, our_error, ours, *_) = found
        assert torch.equal(a, b) and error is our_error, name
        torch.testing.assert_close(found[1][2:5], found[0][2:5], rtol=0, atol=0, msg=name)
        states = [f[5].state_dict() for f in found]
        assert list(states[0]) == list(states[1]), name
        torch.testing.assert_close(*states, rtol=0, atol=0, msg=name)
    for kind in (subject.Model, subject.ModelNew):
        theirs, ours = (inspect.signature(k).parameters.values() for k in (subject.written, kind))
        assert [(p.name, p.default) for p in theirs] == [(p.name, p.default) for p in ours]


@each_problem
def test_constructor_state_and_draws(subject):
    assert inspect.signature(subject.ModelNew) == inspect.signature(subject.Model)
    assert issubclass(subject.ModelNew, subject.Model)
    for options in options_of(subject, N).values():
        states, generators = [], []
        for kind in (subject.Model, subject.ModelNew):
            torch.manual_seed(5)
            states.append(kind(K, N, *options).state_dict())
            generators.append(torch.random.get_rng_state())
        assert list(states[0]) == list(states[1])
        assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
        assert torch.equal(*generators)


@each
def test_a_call_draws_nothing_and_changes_no_state(subject):
    """But for BatchNorm's buffers in training, which test_exact_options looks at."""
    new = subject.new(K, N)
    generator, state = torch.random.get_rng_state(), copy.deepcopy(new.state_dict())
    held = {name: set(vars(module)) for name, module in new.named_modules()}
    new(X.clone().requires_grad_()).sum().backward()
    assert torch.equal(generator, torch.random.get_rng_state())
    assert {name: set(vars(module)) for name, module in new.named_modules()} == held
    assert list(state) == list(new.state_dict())
    written = set(dict(new.named_buffers())) if subject.has_statistics else set()
    assert all(torch.equal(state[k], v) for k, v in new.state_dict().items() if k not in written)


@each
def test_states_load_strictly_both_ways(subject):
    reference, new = subject.twins(K, N)
    for _ in range(2):
        reference.load_state_dict(new.state_dict(), strict=True)
        new.load_state_dict(reference.state_dict(), strict=True)
        assert_like(reference, new, X)
    with pytest.raises(RuntimeError, match="size mismatch"):
        new.load_state_dict(subject.new(K + 1, N).state_dict())


@each
def test_names_training_mode_and_printing(subject):
    reference, new = subject.twins(K, N)
    assert [n for n, _ in new.named_modules()] == [n for n, _ in reference.named_modules()]
    head = repr(reference).partition("(")[0]
    assert repr(new).partition("(")[2] == repr(reference).partition("(")[2] and head == "Model"
    assert new.train().training and not new.eval().training
    new(X)
    assert [type(m) for m in new.children()] == [type(m) for m in reference.children()]


# --- shapes, dtypes, layouts ------------------------------------------------------------------

SIZES = [(33, 17), (1, 1), (1, 7), (7, 1), (0, 5), (3, 0), (0, 0), (101, 13), (64, 32), (2049, 3)]


@each
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_sizes_and_batches(subject, dtype, device):
    for size in SIZES:
        reference, new = subject.twins(*size, dtype=dtype, device=device)
        for batch in (0, 1, 3, 17):
            try:
                assert_like(reference, new, drawn((batch, size[0]), batch, dtype).to(device))
            except AssertionError as error:
                raise AssertionError(f"{size}, batch {batch}: {error}") from error


@each
@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_beyond_65535(subject, device):
    reference, new = subject.twins(5, 7, device=device)
    assert_like(reference, new, drawn((65537, 5)).to(device))
    assert_like(reference, new, drawn((1, 5)).to(device).expand(70001, 5))


def strided(
    rows: int, row: int, step: int, offset: int, dtype: torch.dtype, K: int
) -> torch.Tensor:
    memory = drawn((offset + rows * max(row, 1) + K * max(step, 1) + 1,), 3, dtype)
    return memory.as_strided((rows, K), (row, step), offset)


@each
@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(0, 9),
    size=st.integers(0, 40),
    row=st.integers(0, 70),
    step=st.sampled_from([0, 1, 2, 3]),
    offset=st.integers(0, 5),
    dtype=st.sampled_from(DTYPES),
)
def test_any_strides(subject, rows, size, row, step, offset, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference, new = subject.twins(size, 7, dtype=dtype)
    assert_like(reference, new, strided(rows, row, step, offset, dtype, size))


def _negative() -> torch.Tensor:
    x = torch.imag(torch.complex(X, X).conj())
    assert x.is_neg()
    return x


LAYOUTS = {
    "transposed": lambda: drawn((K, B)).t(),
    "columns skipped": lambda: drawn((B, 2 * K))[:, ::2],
    "rows skipped": lambda: drawn((3 * B, K))[::3],
    "offset": lambda: drawn((B, K + 3))[:, 3:],
    "one row for all": lambda: X[:1].expand(B, K),
    "one column for all": lambda: X[:, :1].expand(B, K),
    "one number for all": lambda: torch.tensor(0.5).expand(B, K),
    "negative bit": _negative,
    "parameter": lambda: nn.Parameter(X.clone()),
    "inference": lambda: _in_inference_mode(),
    "of numpy": lambda: torch.from_numpy(X.numpy()[::-1].copy()),
    "1-D": lambda: X[0],
    "0-D": lambda: X[0, 0],
    "3-D": lambda: drawn((2, 3, K)),
    "3-D, as many as features": lambda: drawn((2, N, K)),
    "4-D": lambda: drawn((2, 1, 3, K)),
    "3-D empty": lambda: drawn((0, 3, K)),
    "sparse": lambda: X.relu().to_sparse(),
}


def _in_inference_mode():
    with torch.inference_mode():
        return X.clone()


@each
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_layouts(subject, name):
    reference, new = subject.twins(K, N)
    x = LAYOUTS[name]()
    if x.is_inference():  # torch saves none of these for backward
        reference.requires_grad_(False), new.requires_grad_(False)
    assert_like(reference, new, x)
    with torch.no_grad():
        assert_like(reference, new, x)


@each
@pytest.mark.parametrize("weight", ["transposed", "part", "expanded", "negative bit"])
def test_layouts_of_weights(subject, weight):
    reference, new = subject.twins(K, N)
    made = {
        "transposed": lambda: drawn((K, N)).t(),
        "part": lambda: drawn((2 * N, K + 5))[::2, 2:-3],
        "expanded": lambda: drawn((1, K)).expand(N, K),
        "negative bit": lambda: torch.imag(torch.complex(drawn((N, K)), drawn((N, K))).conj()),
    }[weight]()
    for model in (reference, new):
        layer_of(model).weight = nn.Parameter(made)
    assert_like(reference, new, X)
    assert_like(reference, new, X[:0])


# --- what is not the normal case: the reference's own forward ---------------------------------


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class LowRank(nn.Module):
    """As LoRA does: the layer wrapped, its output added to."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(K, 2, bias=False), nn.Linear(2, N, bias=False)
        self.weight, self.bias = base.weight, base.bias

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Ones(nn.Module):
    def forward(self, weight):
        return torch.ones_like(weight)


def _patched(linear):
    forward = linear.forward
    linear.forward = lambda x: 2 * forward(x)
    return linear


def _subclassed(linear):
    doubled = Doubled(K, N)
    doubled.load_state_dict(linear.state_dict())
    return doubled


def _hooked(register):
    def change(linear):
        getattr(linear, register)(*HOOKS[register])
        return linear

    return change


HOOKS = {
    "register_forward_hook": (lambda module, args, y: 2 * y,),
    "register_forward_pre_hook": (lambda module, args: (2 * args[0],),),
    "register_full_backward_hook": (lambda module, inputs, outputs: None,),
    "register_full_backward_pre_hook": (lambda module, outputs: None,),
}
REPLACED = {
    "forward put on the object": _patched,
    "subclass": _subclassed,
    "low rank": LowRank,
    "parametrized": lambda linear: (
        torch.nn.utils.parametrize.register_parametrization(linear, "weight", Ones()),
        linear,
    )[1],
    "weight norm": torch.nn.utils.parametrizations.weight_norm,
    "spectral norm by hook": torch.nn.utils.spectral_norm,
    "pruned": lambda linear: prune.l1_unstructured(linear, "weight", 0.5),
    "sequential": lambda linear: nn.Sequential(linear, nn.ReLU()),
    "no bias": lambda linear: nn.Linear(K, N, bias=False),
    **{name: _hooked(name) for name in HOOKS},
}


def assert_reference_runs(new: nn.Module, calls: list, x: torch.Tensor = X) -> None:
    """Bit for bit what the reference's forward makes of the same modules, and no fused op."""
    before, buffers = len(calls), [b.clone() for b in new.buffers()]
    wanted, error, _ = outcome(lambda: type(new).__mro__[1].forward(new, x))
    left = [b.clone() for b in new.buffers()]
    for b, was in zip(new.buffers(), buffers, strict=True):
        b.copy_(was)  # BatchNorm in training writes them at each call
    got, our_error, _ = outcome(lambda: new(x))
    assert our_error is error
    assert wanted is None or torch.equal(got, wanted)
    assert len(calls) == before, "the fused op ran where the reference should"
    torch.testing.assert_close(list(new.buffers()), left, rtol=0, atol=0, equal_nan=True)


@each
@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_replaced_linear_runs_as_the_reference_runs(subject, name, calls):
    new = subject.new(K, N)
    new(X)
    assert calls, "the control: before the change the op ran"
    changed = REPLACED[name](layer_of(new))
    setattr(new, subject.linear, changed.eval())
    assert_reference_runs(new, calls)


@each
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_run_and_leave(subject, name, calls):
    new, seen = subject.new(K, N), []
    handle = getattr(layer_of(new), name)(lambda *args: seen.append(args))
    new(X.clone().requires_grad_()).sum().backward()
    assert len(seen) == 1 and not calls
    handle.remove()
    new(X)
    assert calls


class OtherLinear(nn.Linear):
    """A class of its own: nobody knows what its forward does."""


UNUSUAL = {
    "lazy": lambda linear: nn.LazyLinear(linear.out_features),
    "nothing": lambda linear: None,
    "identity": lambda linear: nn.Identity(),
    "a subclass": lambda linear: OtherLinear(linear.in_features, linear.out_features),
}
INPUTS = {
    "a number": lambda x: 1.0,
    "a vector": lambda x: x[0],
    "too narrow": lambda x: x[:, 1:],
    "float64": lambda x: x.double(),
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[1, 1:]]),
    "sparse": lambda x: x.to_sparse(),
    "none": lambda x: x[:0],
}


@pytest.mark.as_sized
@each
@pytest.mark.parametrize("name", [*UNUSUAL, *INPUTS])
@pytest.mark.filterwarnings("ignore:.*nested.*:UserWarning")
def test_what_is_unusual_is_as_in_the_reference_at_small_sizes(subject, name):
    """Where a drop-in asks for sizes first: the same outcome, though errors may say more."""
    old, new = subject.twins(K, N)
    x = INPUTS.get(name, lambda x: x)(X)
    for model in (old, new) if name in UNUSUAL else ():
        torch.manual_seed(3)
        setattr(model, subject.linear, UNUSUAL[name](layer_of(model)))
    found = []
    for model in (old, new):
        torch.manual_seed(4)
        try:
            found.append(model(x))
        except (TypeError, RuntimeError, ValueError, IndexError, AttributeError) as error:
            found.append(type(error))
    if isinstance(found[0], torch.Tensor):
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    else:
        assert found[1] is found[0]


def others(new: nn.Module) -> list[nn.Module]:
    """The submodules beside the Linear."""
    return [m for m in new.children() if not isinstance(m, nn.Linear)]


@each
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_the_other_modules_run_and_leave(subject, name, calls):
    for i in range(len(others(subject.new(K, N)))):
        new, seen = subject.new(K, N), []
        handle = getattr(others(new)[i], name)(lambda *args, seen=seen: seen.append(args))
        new(X.clone().requires_grad_()).sum().backward()
        assert len(seen) == 1 and not calls
        handle.remove()
        new(X)
        assert calls
        calls.clear()


@each
def test_the_other_modules_replaced_run_as_the_reference_runs(subject, calls):
    for i, other in enumerate(others(subject.new(K, N))):
        kind = type("Other", (type(other),), {"forward": lambda self, x: 2 * x})
        for change in ("subclass", "forward put on the object"):
            new = subject.new(K, N)
            module = others(new)[i]
            if change == "subclass":
                module.__class__ = kind
            else:
                module.forward = lambda x: 2 * x
            assert_reference_runs(new, calls)


@each
def test_hooks_of_all_modules_run(subject, calls):
    new, seen = subject.new(K, N), []
    hook = nn.modules.module.register_module_forward_hook(lambda m, args, y: seen.append(type(m)))
    new(X)
    hook.remove()
    assert seen == [*(type(m) for m in new.children()), subject.ModelNew] and not calls


@each
def test_hooks_of_the_model_itself_leave_the_op_in_use(subject, calls):
    new = subject.new(K, N)
    reference = reference_of(new)
    new.register_forward_hook(lambda module, args, y: y + 1)
    torch.testing.assert_close(new(X), reference(X) + 1, rtol=1e-5, atol=1e-5)
    assert calls


@each
@pytest.mark.parametrize("shape", [(1,), (N, 1), (B, N), (1, N)], ids=str)
def test_a_bias_that_broadcasts(subject, shape, calls):
    new = subject.new(K, N)
    layer_of(new).bias = nn.Parameter(drawn(shape))
    assert_reference_runs(new, calls)


@each
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(subject, dtype, device, calls):
    reference, new = subject.twins(K, N, device=device)
    x = X.to(device)
    with torch.autocast(device, dtype):
        for inside in (x, x.to(dtype)):
            y = new(inside)
            assert torch.equal(y, reference(inside)) and y.dtype == reference(inside).dtype
            reference.load_state_dict(new.state_dict())
        assert not calls
        with torch.autocast(device, enabled=False):
            assert_like(reference, new, x)


@each
def test_a_backward_under_autocast(subject):
    """The backward recomputes the chain: autocast around it must not reach that."""
    reference, new = subject.twins(K, N)
    grads = []
    for model in (reference, new):
        y = model(X)
        with torch.autocast("cpu", torch.bfloat16):
            (y * drawn(tuple(y.shape), 4)).sum().backward()
        grads.append(layer_of(model).weight.grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


@each
def test_models_without_memory(subject):
    with torch.device("meta"):
        new = subject.ModelNew(K, N, *subject.options).train(subject.mode == "train")
        x = torch.empty(B, K)
    y = new(x)
    assert y.shape == subject.new(K, N)(X).shape and y.is_meta


# --- errors -----------------------------------------------------------------------------------

WRONG = {  # name: (x, what the message names)
    "features": (lambda: X[:, 1:], "shape"),
    "features, empty": (lambda: X[:0, 1:], "shape"),
    "features, 3-D": (lambda: drawn((2, 3, K + 1)), "shape"),
    "features, 1-D": (lambda: drawn((K + 1,)), "shape"),
    "float64": (lambda: X.double(), "dtype"),
    "float16": (lambda: X.half(), "dtype"),
    "int64": (lambda: X.long(), "dtype"),
    "bool": (lambda: X > 0, "dtype"),
    "complex64": (lambda: X.to(torch.cfloat), "dtype"),
    "meta": (lambda: X.to("meta"), "device"),
    "meta, empty": (lambda: X[:0].to("meta"), "device"),
}


@each
@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_named(subject, name):
    make, what = WRONG[name]
    text = assert_like(*subject.twins(K, N), make())
    assert text.startswith(f"x: got {what}") and "wants" in text


@needs_gpu
@each
def test_input_on_another_device_is_named(subject):
    assert assert_like(*subject.twins(K, N, device="cuda"), X).startswith("x: got device")


@each
@pytest.mark.parametrize("x", [None, [1.0], 3, "x", X.numpy()], ids=lambda x: type(x).__name__)
def test_what_is_no_tensor(subject, x):
    assert assert_like(*subject.twins(K, N), x)


@each
def test_a_bias_that_does_not_fit(subject):
    for bias in (drawn((N + 1,)), drawn((N,), dtype=torch.float64), drawn((N,)).to("meta")):
        reference, new = subject.twins(K, N)
        for model in (reference, new):
            layer_of(model).bias = nn.Parameter(bias)
        assert assert_like(reference, new, X)


# --- the way there, and controls --------------------------------------------------------------


def test_normal_is_what_it_says():
    """The normal case is taken, and only where it may be."""
    linear = nn.Linear(K, N)
    assert normal.operands(X, linear) is not None
    assert normal.operands(X.double(), nn.Linear(K, N).double()) is not None
    for x in (X[0], X.unsqueeze(0), X.double(), X[:, 1:], X.to("meta"), None, X.to_sparse()):
        assert normal.operands(x, linear) is None
    assert normal.operands(X, nn.Linear(K, N, bias=False)) is None
    assert normal.operands(X, Doubled(K, N)) is None


def test_every_problem_is_among_the_subjects():
    from workbook import chains

    assert {s.slug for s in SUBJECTS} == {s.slug for s in PROBLEMS} == set(chains.SLUGS)


def test_control_another_reference_is_seen():
    """A layer that was scaled, dropped a bias, or raises where the other does not."""
    reference, new = SUM.twins(K, N)
    with torch.no_grad():
        new.linear.bias.mul_(1.001)
    with pytest.raises(AssertionError, match="error"):
        assert_like(reference, new, X)
    with pytest.raises(AssertionError, match="instead of"):
        assert_like(reference, SUM.new(K + 1, N), X)
