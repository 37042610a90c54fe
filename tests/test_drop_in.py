"""ModelNew stands for Model: same constructor, same outputs, same gradients, same errors."""

from __future__ import annotations

import copy
import inspect
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sum_chain import (
    DEVICES,
    ROUNDING,
    Model,
    ModelNew,
    assert_accurate,
    assert_like,
    drawn,
    errors,
    needs_gpu,
    needs_inductor,
    outcome,
    reference_of,
    truth,
    twins,
)
from torch import nn
from torch.func import functional_call
from torch.nn.utils import prune

from workbook import normal, ops
from workbook.chains import matmul_sum_max_mean_logsumexp as chain

K, N, B = 33, 17, 5
X = drawn((B, K), seed=9)
DTYPES = list(ROUNDING)
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def calls(monkeypatch) -> list:
    """The arguments of every call of the fused op: empty where the reference's forward ran."""
    made, call = [], ops.FusedOp.__call__

    def counted(self, *args):
        made.append(args)
        return call(self, *args)

    monkeypatch.setattr(ops.FusedOp, "__call__", counted)
    return made


# --- construction and state -------------------------------------------------------------------


def test_constructor_state_and_draws():
    assert inspect.signature(ModelNew) == inspect.signature(Model)
    states, generators = [], []
    for kind in (Model, ModelNew):
        torch.manual_seed(5)
        states.append(kind(K, out_features=N).state_dict())
        generators.append(torch.random.get_rng_state())
    assert list(states[0]) == list(states[1]) == ["linear.weight", "linear.bias"]
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    assert torch.equal(*generators)


def test_a_call_draws_nothing_and_changes_no_state():
    new = ModelNew(K, N)
    generator, state = torch.random.get_rng_state(), copy.deepcopy(new.state_dict())
    new(X.clone().requires_grad_()).sum().backward()
    assert torch.equal(generator, torch.random.get_rng_state())
    assert list(state) == list(new.state_dict())
    assert all(torch.equal(state[k], v) for k, v in new.state_dict().items())


def test_states_load_strictly_both_ways():
    reference, new = Model(K, N), ModelNew(K, N)
    new.load_state_dict(reference.state_dict(), strict=True)
    Model(K, N).load_state_dict(new.state_dict(), strict=True)
    new(X)
    Model(K, N).load_state_dict(new.state_dict(), strict=True)
    assert_like(reference, new, X)
    with pytest.raises(RuntimeError, match="size mismatch"):
        new.load_state_dict(Model(K + 1, N).state_dict())


def test_names_training_mode_and_printing():
    reference, new = Model(K, N), ModelNew(K, N)
    assert [n for n, _ in new.named_modules()] == [n for n, _ in reference.named_modules()]
    assert repr(new).replace("ModelNew", "Model") == repr(reference)
    assert new.training and not new.eval().training
    assert isinstance(new, Model)


# --- shapes, dtypes, layouts ------------------------------------------------------------------

SIZES = [(33, 17), (1, 1), (1, 7), (7, 1), (0, 3), (3, 0), (0, 0), (101, 13), (64, 32), (2049, 3)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_sizes_and_batches(size, dtype, device):
    reference, new = twins(*size, dtype=dtype, device=device)
    for batch in (0, 1, 3, 17):
        assert_like(reference, new, drawn((batch, size[0]), batch, dtype).to(device))


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_beyond_65535(device):
    reference, new = twins(5, 3, device=device)
    assert_like(reference, new, drawn((65537, 5)).to(device))
    assert_like(reference, new, drawn((1, 5)).to(device).expand(70001, 5))


def strided(
    rows: int, row: int, step: int, offset: int, dtype: torch.dtype, K: int
) -> torch.Tensor:
    memory = drawn((offset + rows * max(row, 1) + K * max(step, 1) + 1,), 3, dtype)
    return memory.as_strided((rows, K), (row, step), offset)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 9),
    st.integers(0, 40),
    st.integers(0, 70),
    st.sampled_from([0, 1, 2, 3]),
    st.integers(0, 5),
    st.sampled_from(DTYPES),
)
def test_any_strides(rows, size, row, step, offset, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference, new = twins(size, 4, dtype=dtype)
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
    "read only": lambda: torch.from_numpy(X.numpy()[::-1].copy()),
    "1-D": lambda: X[0],
    "0-D": lambda: X[0, 0],
    "3-D": lambda: drawn((2, 3, K)),
    "4-D": lambda: drawn((2, 1, 3, K)),
    "3-D empty": lambda: drawn((0, 3, K)),
    "sparse": lambda: X.relu().to_sparse(),
}


def _in_inference_mode():
    with torch.inference_mode():
        return X.clone()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_layouts(name):
    reference, new = twins(K, N)
    x = LAYOUTS[name]()
    if x.is_inference():  # torch saves none of these for backward
        reference.requires_grad_(False), new.requires_grad_(False)
    assert_like(reference, new, x)
    with torch.no_grad():
        assert_like(reference, new, x)


@pytest.mark.parametrize("weight", ["transposed", "part", "expanded", "negative bit"])
def test_layouts_of_weights(weight):
    reference, new = twins(K, N)
    made = {
        "transposed": lambda: drawn((K, N)).t(),
        "part": lambda: drawn((2 * N, K + 5))[::2, 2:-3],
        "expanded": lambda: drawn((1, K)).expand(N, K),
        "negative bit": lambda: torch.imag(torch.complex(drawn((N, K)), drawn((N, K))).conj()),
    }[weight]()
    for model in (reference, new):
        model.linear.weight = nn.Parameter(made)
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


@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_replaced_linear_runs_as_the_reference_runs(name, calls):
    new = ModelNew(K, N).eval()
    new(X)
    new.linear = REPLACED[name](new.linear).eval()
    assert torch.equal(new(X), Model.forward(new, X))
    assert len(calls) == 1, "the fused op ran where the reference should"


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_run_and_leave(name, calls):
    new, seen = ModelNew(K, N), []
    handle = getattr(new.linear, name)(lambda *args: seen.append(args))
    new(X.clone().requires_grad_()).sum().backward()
    assert len(seen) == 1 and not calls
    handle.remove()
    new(X)
    assert len(calls) == 1


def test_hooks_of_all_modules_run(calls):
    new, seen = ModelNew(K, N), []
    hook = nn.modules.module.register_module_forward_hook(lambda m, args, y: seen.append(type(m)))
    new(X)
    hook.remove()
    assert seen == [nn.Linear, ModelNew] and not calls


def test_hooks_of_the_model_itself_leave_the_op_in_use(calls):
    new = ModelNew(K, N)
    new.register_forward_hook(lambda module, args, y: y + 1)
    torch.testing.assert_close(new(X), Model.forward(new, X) + 1, rtol=1e-5, atol=1e-5)
    assert len(calls) == 1


@pytest.mark.parametrize("shape", [(1,), (N, 1), (B, N), (1, N)], ids=str)
def test_a_bias_that_broadcasts(shape):
    new = ModelNew(K, N)
    new.linear.bias = nn.Parameter(drawn(shape))
    reference = Model(K, N)
    reference.linear = copy.deepcopy(new.linear)
    wanted, error, _ = outcome(lambda: reference(X))
    got, our_error, _ = outcome(lambda: new(X))
    assert our_error is error
    assert wanted is None or torch.equal(got, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype, device, calls):
    reference, new = twins(K, N, device=device)
    x = X.to(device)
    with torch.autocast(device, dtype):
        for inside in (x, x.to(dtype)):
            assert torch.equal(new(inside), reference(inside))
            assert new(inside).dtype == reference(inside).dtype
        assert not calls
        with torch.autocast(device, enabled=False):
            assert_like(reference, new, x)


def test_a_backward_under_autocast():
    """The backward recomputes the chain: autocast around it must not reach that."""
    reference, new = twins(K, N)
    for model in (reference, new):
        y = model(X)
        with torch.autocast("cpu", torch.bfloat16):
            y.sum().backward()
    assert torch.equal(new.linear.weight.grad, reference.linear.weight.grad)


def test_models_without_memory():
    with torch.device("meta"):
        new, x = ModelNew(K, N), torch.empty(B, K)
    y = new(x)
    assert y.shape == (B, 1) and y.is_meta


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


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_named(name):
    make, what = WRONG[name]
    reference, new = twins(K, N)
    text = assert_like(reference, new, make())
    assert text.startswith(f"x: got {what}") and "wants" in text


@needs_gpu
def test_input_on_another_device_is_named():
    reference, new = twins(K, N, device="cuda")
    assert assert_like(reference, new, X).startswith("x: got device")


@pytest.mark.parametrize("x", [None, [1.0], 3, "x", X.numpy()], ids=lambda x: type(x).__name__)
def test_what_is_no_tensor(x):
    assert assert_like(*twins(K, N), x)


def test_a_bias_that_does_not_fit():
    for bias in (drawn((N + 1,)), drawn((N,), dtype=torch.float64), drawn((N,)).to("meta")):
        reference, new = twins(K, N)
        for model in (reference, new):
            model.linear.bias = nn.Parameter(bias)
        assert assert_like(reference, new, X)


# --- values -----------------------------------------------------------------------------------


def families(rows: int, features: int) -> dict[str, torch.Tensor]:
    """Inputs x (rows, features)."""
    x = drawn((rows, features), seed=1)
    huge = x.clone()
    huge[rows // 2] *= 1e30
    scale = torch.logspace(-20, 20, features, base=2)
    return {
        "uniform": x.sigmoid(),
        "normal": x,
        "large mean": x + 1000,
        "wide range": (3 * x).exp(),
        "columns of every size": x * scale[torch.randperm(features)],
        "one huge row": huge,
        "zeros": torch.zeros(rows, features),
        "denormal": x * 1e-40,
    }


def states(model: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(weight, bias) of the model's shape."""
    weight, bias = model.linear.weight.detach().clone(), model.linear.bias.detach().clone()
    middle = weight - weight.mean(0)
    huge = torch.zeros_like(weight)
    huge[0], huge[1] = 3e38, -3e38
    return {
        "drawn": (weight, bias),
        "shifted": (weight + 1, bias - 100),
        "sums that cancel": (middle, torch.zeros_like(bias)),
        "large bias": (weight, bias + 1e6),
        "zero": (torch.zeros_like(weight), torch.zeros_like(bias)),
        "huge and opposite": (huge, bias),
        "denormal": (weight * 1e-39, bias * 1e-39),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [(300, 70), (33, 1000), (4100, 3)], ids=str)
def test_the_accuracy_rule(size, device):
    reference, new = twins(*size, device=device)
    for state, (weight, bias) in states(reference).items():
        for model in (reference, new):
            with torch.no_grad():
                model.linear.weight.copy_(weight)
                model.linear.bias.copy_(bias)
        for family, x in families(21, size[0]).items():
            if state.startswith("huge"):
                x = x * 1e-30  # small enough for eager to stay finite
            x = x.to(device)
            with torch.no_grad():
                true, eager, y = truth(reference, x), reference(x), new(x)
            try:
                assert_accurate(y, eager, true)
            except AssertionError as error:
                raise AssertionError(f"{family}, {state}: {error}") from error


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 9), st.integers(1, 80), st.integers(1, 60), st.integers(0, 999))
def test_the_accuracy_rule_at_any_size(rows, features, outs, seed):
    reference, new = twins(features, outs, seed=seed)
    x = drawn((rows, features), seed) * 10.0 ** (seed % 7 - 3)
    with torch.no_grad():
        assert_accurate(new(x), reference(x), truth(reference, x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accuracy_of_other_types(dtype):
    reference, new = twins(300, 70, dtype=dtype)
    x = drawn((21, 300), 1, dtype)
    with torch.no_grad():
        assert_accurate(new(x), reference(x), truth(reference, x))


def test_control_the_rule_rejects_wrong_folds():
    """float32 running sums, a bias or a feature left out, a rounded row: each breaks the rule."""
    reference, _ = twins(300, 4000)
    with torch.no_grad():
        reference.linear.weight.mul_(1e-3).add_(0.1)  # running sums of 0.1 err to one side
        reference.linear.bias.add_(1)
    weight, bias = reference.linear.weight.detach(), reference.linear.bias.detach()
    x = drawn((21, 300), 1).sigmoid()
    true, eager = truth(reference, x), reference(x).detach()

    def folded(w_sum, b_sum):
        return (x.double() @ w_sum.double() + b_sum.double()).float().unsqueeze(1)

    running = torch.zeros(300)
    for row in weight:
        running += row
    right = folded(weight.double().sum(0), bias.double().sum())
    assert_accurate(right, eager, true)
    bad_row = right.clone()
    bad_row[3] *= 1 + 3e-6
    wrong = {
        "running float32 sum": folded(running, bias.double().sum()),
        "bias left out": folded(weight.double().sum(0), torch.zeros(())),
        "last feature left out": folded(weight[:-1].double().sum(0), bias.double().sum()),
        "one row": bad_row,
        "zeros": torch.zeros_like(right),
        "NaN": torch.full_like(right, NAN),
        "one NaN": torch.where(torch.arange(21).unsqueeze(1) == 20, NAN, right),
    }
    for name, y in wrong.items():
        with pytest.raises(AssertionError):
            assert_accurate(y, eager, true)
            pytest.fail(f"{name}: {errors(y, true)} passes beside {errors(eager, true)}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_not_finite_stays_in_its_row(value, device):
    reference, new = twins(K, N, device=device)
    x = X.to(device).clone()
    clean = new(x).detach()
    for column in (0, 7, K - 1):
        x = X.to(device).clone()
        x[2, column] = value
        y, wanted = new(x).detach().flatten(), reference(x).detach().flatten()
        others = [0, 1, 3, 4]
        assert torch.equal(y[others], clean.flatten()[others])
        assert not torch.isfinite(wanted[2]) and not torch.isfinite(y[2])


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_one_signed_weights_give_the_references_infinity(value):
    reference, new = twins(K, N)
    for model in (reference, new):
        with torch.no_grad():
            model.linear.weight.abs_().add_(0.1)
    x = X.clone()
    x[1, 4] = value
    torch.testing.assert_close(new(x)[1], reference(x)[1], equal_nan=True)


@pytest.mark.parametrize("where", ["weight", "bias"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_parameters_that_are_not_finite(value, where):
    reference, new = twins(K, N)
    for model in (reference, new):
        with torch.no_grad():
            getattr(model.linear, where)[3] = value
    x = X.abs() + 0.1
    torch.testing.assert_close(new(x), reference(x), equal_nan=True)
    x[0] = 0
    torch.testing.assert_close(new(x), reference(x), equal_nan=True)


def test_rows_that_overflow_only_on_the_way_stay_finite_where_eager_is():
    reference, new = twins(4, 2)
    for model in (reference, new):
        with torch.no_grad():
            model.linear.weight.fill_(3e38)
    x = torch.full((3, 4), 1e-30)
    assert torch.isfinite(reference(x)).all()
    assert_like(reference, new, x)


def test_without_a_compiler_the_result_is_as_right(monkeypatch):
    """The plain path, which serves then: same rule, weights of every size included."""
    monkeypatch.setitem(chain.OP._runs, "cpu", None)
    reference, new = twins(300, 70)
    for weight, bias in states(reference).values():
        for model in (reference, new):
            with torch.no_grad():
                model.linear.weight.copy_(weight)
                model.linear.bias.copy_(bias)
        x = families(21, 300)["normal"] * 1e-30
        with torch.no_grad():
            assert_accurate(new(x), reference(x), truth(reference, x))


# --- gradients --------------------------------------------------------------------------------


def gradients(model, x, *, weigh=None) -> list:
    """Gradients of x, weight, bias; None where none is wanted."""
    x = x.detach().clone().requires_grad_(x.requires_grad)
    y = model(x)
    (y if weigh is None else y * weigh).sum().backward()
    return [t.grad for t in (x, model.linear.weight, model.linear.bias)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_the_references(dtype, device):
    reference, new = twins(K, N, dtype=dtype, device=device)
    x = X.to(device, dtype, copy=True).requires_grad_()
    weigh = drawn((B, 1), 4, dtype).to(device)
    for ours, theirs in zip(
        gradients(new, x, weigh=weigh), gradients(reference, x, weigh=weigh), strict=True
    ):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


@pytest.mark.parametrize("x_needs", [True, False])
@pytest.mark.parametrize("weight_needs", [True, False])
@pytest.mark.parametrize("bias_needs", [True, False])
def test_subsets_of_gradients(x_needs, weight_needs, bias_needs):
    reference, new = twins(K, N)
    for model in (reference, new):
        model.linear.weight.requires_grad_(weight_needs)
        model.linear.bias.requires_grad_(bias_needs)
    x = X.clone().requires_grad_(x_needs)
    assert new(x).requires_grad == reference(x).requires_grad
    if not reference(x).requires_grad:
        return
    for ours, theirs in zip(gradients(new, x), gradients(reference, x), strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


@pytest.mark.parametrize("size", [(K, N), (1, 1), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_gradients_of_empty_things(size, batch):
    reference, new = twins(*size)
    x = drawn((batch, size[0])).requires_grad_()
    for ours, theirs in zip(gradients(new, x), gradients(reference, x), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("value", [NAN, INF])
def test_gradients_where_a_row_is_not_finite(value):
    reference, new = twins(K, N)
    x = X.clone()
    x[2, 3] = value
    x.requires_grad_()
    for ours, theirs in zip(gradients(new, x), gradients(reference, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def as_function(model):
    """x, weight, bias -> y."""
    return lambda x, weight, bias: functional_call(
        model, {"linear.weight": weight, "linear.bias": bias}, (x,)
    )


@pytest.mark.parametrize("wanted", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 1, 1)], ids=str)
def test_gradcheck_and_gradgradcheck(wanted):
    new = ModelNew(4, 3).double()
    tensors = [
        t.detach().clone().requires_grad_(bool(w))
        for t, w in zip((drawn((2, 4)).double(), *new.parameters()), wanted, strict=True)
    ]

    def call(x, weight, bias):  # gradcheck edits through .data, which hides: copies show it
        return as_function(new)(x, weight.clone(), bias.clone())

    assert torch.autograd.gradcheck(call, tensors)
    assert torch.autograd.gradgradcheck(lambda *t: call(*t).square(), tensors)


DEPENDENT = {
    "weight of x": lambda x, w: (x, w * x.mean(), w.mean(1)),
    "bias of weight": lambda x, w: (x, w, w.mean(1)),
    "x is weight": lambda x, w: (w, w, w.mean(1)),
    "all of one": lambda x, w: (w.sin(), w.cos(), w.mean(1)),
}


@pytest.mark.parametrize("name", DEPENDENT)
@pytest.mark.parametrize("twice", [False, True])
def test_arguments_that_depend_on_one_another(name, twice):
    """With create_graph, a gradient of x must not also run through a weight made from x."""
    found = []
    for kind in (Model, ModelNew):
        x = drawn((B, K), 1).double().requires_grad_()
        w = drawn((N, K), 2).double().requires_grad_()
        y = as_function(kind(K, N).double())(*DEPENDENT[name](x, w)).tanh()
        grads = torch.autograd.grad(y.sum(), [x, w], create_graph=twice, allow_unused=True)
        if twice:
            again = sum(g.square().sum() for g in grads if g is not None)
            grads += torch.autograd.grad(again, [x, w], allow_unused=True)
        found.append(grads)
    for theirs, ours in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_gradients_accumulate_are_retained_and_penalised():
    found = []
    for model in twins(K, N):
        x = X.clone().requires_grad_()
        y = model(x)
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()
        with pytest.raises(RuntimeError):
            y.sum().backward()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        found.append([x.grad, model.linear.weight.grad, model.linear.bias.grad])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_checkpointing_and_saved_tensor_hooks():
    reference, new = twins(K, N)
    x = X.clone().requires_grad_()
    wanted = gradients(reference, x)[0]
    y = torch.utils.checkpoint.checkpoint(new, x, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(x.grad, wanted)
    with torch.autograd.graph.save_on_cpu():
        assert torch.equal(gradients(new, x)[0], wanted)


def test_a_weight_changed_before_the_backward_is_an_error_as_in_the_reference():
    for model in twins(K, N):
        y = model(X.clone().requires_grad_())
        with torch.no_grad():
            model.linear.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("changed", ["bias", "weight, x without gradient", "x, weights frozen"])
@pytest.mark.xfail(
    reason="the backward recomputes the chain from x, weight and bias, so it saves all three; the "
    "reference saves only what its vjp reads",
    raises=RuntimeError,
)
def test_a_change_before_the_backward_that_the_reference_allows(changed):
    for model in twins(K, N):
        x = X.clone().requires_grad_(changed != "weight, x without gradient")
        if changed.startswith("x"):
            model.linear.requires_grad_(False)
        x = x * 1
        y = model(x)
        with torch.no_grad():
            {"b": model.linear.bias, "w": model.linear.weight, "x": x}[changed[0]].add_(1)
        y.sum().backward()


def test_no_grad_and_inference_mode():
    reference, new = twins(K, N)
    x = X.clone().requires_grad_()
    with torch.no_grad():
        assert not new(x).requires_grad
        assert_like(reference, new, x)
    with torch.inference_mode():
        assert new(x).is_inference() and reference(x).is_inference()
        assert_like(reference, new, x)
    assert new(x).requires_grad


# --- the op itself, compile, transforms -------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [B, 0])
def test_opcheck(dtype, device, batch):
    new = ModelNew(K, N).to(device, dtype)
    x = X[:batch].to(device, dtype, copy=True).requires_grad_()
    torch.library.opcheck(
        chain.OP.op,
        (x, new.linear.weight, new.linear.bias),
        rtol=1e-2 if dtype == torch.bfloat16 else None,
        atol=1e-2 if dtype == torch.bfloat16 else None,
    )


@needs_inductor
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dynamic", [False, None, True])
def test_compiled_forward_and_backward(dynamic, device):
    torch._dynamo.reset()
    reference, new = twins(K, N, device=device)
    # C++ for a CPU takes torch 2.11 half a minute: once is enough
    backend = "inductor" if dynamic is False or device == "cuda" else "aot_eager"
    call = torch.compile(new, fullgraph=True, dynamic=dynamic, backend=backend)
    for batch in (B, 3, 2, 1):
        x = drawn((batch, K), batch).to(device).requires_grad_()
        found = []
        for f, model in ((reference, reference), (call, new)):
            x.grad = None
            model.zero_grad()
            y = f(x)
            (y * torch.arange(1, batch + 1, device=device).unsqueeze(1)).sum().backward()
            found.append((y, x.grad, model.linear.weight.grad, model.linear.bias.grad))
        for theirs, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert_like(reference, call, X.to(device))


def test_compiled_in_a_larger_model():
    torch._dynamo.reset()
    body = nn.Sequential(nn.Linear(K, K), nn.GELU(), ModelNew(K, N), nn.Tanh())
    call = torch.compile(body, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(call(X), body(X), rtol=1e-5, atol=1e-5)
    call(X).sum().backward()
    got = [p.grad.clone() for p in body.parameters()]
    body.zero_grad()
    body(X).sum().backward()
    for ours, theirs in zip(got, body.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad, rtol=1e-4, atol=1e-5)


def test_compiled_beyond_the_normal_case():
    torch._dynamo.reset()
    reference, new = twins(K, N)
    call = torch.compile(new, fullgraph=True, backend="aot_eager")
    x = drawn((2, 3, K))
    torch.testing.assert_close(call(x), reference(x), rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        assert call(X).dtype == reference(X).dtype
        torch.testing.assert_close(call(X), reference(X), rtol=5e-2, atol=5e-2)
    new.linear.register_forward_hook(lambda module, args, y: 2 * y)
    torch.testing.assert_close(call(X), 2 * reference(X), rtol=1e-4, atol=1e-4)


TRANSFORMS = {
    "vmap": lambda m: torch.vmap(m)(drawn((3, B, K))),
    "vmap over columns": lambda m: torch.vmap(m, in_dims=1)(drawn((B, 3, K))),
    "vmap over parameters": lambda m: torch.vmap(as_function(m), (None, 0, 0))(
        X, drawn((3, N, K)), drawn((3, N))
    ),
    "jvp": lambda m: torch.func.jvp(m, (X,), (drawn((B, K), 3),)),
    "vjp": lambda m: torch.func.vjp(m, X)[1](torch.ones(B, 1)),
    "grad": lambda m: torch.func.grad(lambda x: m(x).square().sum())(X),
    "grad of parameters": lambda m: torch.func.grad(
        lambda w: as_function(m)(X, w, m.linear.bias).square().sum()
    )(m.linear.weight.detach()),
    "grad of each sample": lambda m: torch.vmap(
        torch.func.grad(lambda x: m(x.unsqueeze(0)).square().sum())
    )(X),
    "jacrev": lambda m: torch.func.jacrev(m)(X),
    "jacfwd": lambda m: torch.func.jacfwd(m)(X),
    "hessian": lambda m: torch.func.hessian(lambda x: m(x).square().sum())(X[:1]),
    "forward mode": lambda m: _forward_mode(m),
    "autograd.functional": lambda m: torch.autograd.functional.jacobian(m, X),
    "is_grads_batched": lambda m: _batched_gradients(m),
}


def _forward_mode(model):
    with torch.autograd.forward_ad.dual_level():
        y = model(torch.autograd.forward_ad.make_dual(X, torch.ones_like(X)))
        return torch.autograd.forward_ad.unpack_dual(y).tangent


def _batched_gradients(model):
    x = X.clone().requires_grad_()
    return torch.autograd.grad(model(x), x, torch.eye(B).unsqueeze(2), is_grads_batched=True)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name):
    reference, new = twins(K, N)
    for ours, theirs in zip(
        torch.utils._pytree.tree_leaves(TRANSFORMS[name](new)),
        torch.utils._pytree.tree_leaves(TRANSFORMS[name](reference)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["vmap", "vmap over parameters", "jvp", "grad", "vjp"])
@pytest.mark.filterwarnings("ignore")
def test_compiled_transforms(name):
    torch._dynamo.reset()
    reference, new = twins(K, N)
    got = torch.compile(lambda: TRANSFORMS[name](new), backend="aot_eager")()
    for ours, theirs in zip(
        torch.utils._pytree.tree_leaves(got),
        torch.utils._pytree.tree_leaves(TRANSFORMS[name](reference)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_fake_tensors_and_export():
    new = ModelNew(K, N)
    exported = torch.export.export(new, (X,))
    torch.testing.assert_close(exported.module()(X), new(X), rtol=1e-5, atol=1e-5)
    with torch._subclasses.FakeTensorMode() as mode:
        x = mode.from_tensor(X)
        assert chain.OP.op(x, torch.empty(N, K), torch.empty(N)).shape == (B, 1)


@pytest.mark.parametrize("device", DEVICES)
def test_the_output_is_written_whole(device):
    """Deterministic mode fills new memory with NaN: what is not written shows."""
    new = ModelNew(K, N).to(device)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3, device=device).isnan().all()
        for batch in (1, 2, 7, 1000):
            assert torch.isfinite(new(drawn((batch, K)).to(device))).all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_normal_is_what_it_says():
    """The normal case is taken, and only where it may be."""
    linear = nn.Linear(K, N)
    assert normal.operands(X, linear) is not None
    assert normal.operands(X.double(), nn.Linear(K, N).double()) is not None
    for x in (X[0], X.unsqueeze(0), X.double(), X[:, 1:], X.to("meta"), None, X.to_sparse()):
        assert normal.operands(x, linear) is None
    assert normal.operands(X, nn.Linear(K, N, bias=False)) is None
    assert normal.operands(X, Doubled(K, N)) is None


def test_two_drop_ins_in_one_chain_of_gradients():
    new = nn.Sequential(ModelNew(K, N), nn.Linear(1, K), ModelNew(K, N))
    twin = nn.Sequential(reference_of(new[0]), copy.deepcopy(new[1]), reference_of(new[2]))
    for model in (new, twin):
        model(X).sum().backward()
    for ours, theirs in zip(new.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
