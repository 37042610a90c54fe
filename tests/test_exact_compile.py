"""The drop-ins under torch.compile, opcheck, export, functorch and threads."""

from __future__ import annotations

import copy
import threading

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
    assert_buffers,
    assert_fresh,
    assert_gradients_close,
    assert_like,
    buffers_after,
    buffers_of,
    drawn,
    each,
    gradients,
    layer_of,
    needs_inductor,
    outcome,
    reference_of,
)
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

import workbook as wb
from workbook import ops

# Where torch.compile takes seconds: one subject of each problem, and both modes of BatchNorm.
DEAR = [SUM, AVG, BN, BN_TRAIN, MAX]
each_dear = pytest.mark.parametrize("subject", DEAR, ids=str)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    assert torch.is_grad_enabled(), "gradients were left switched off"


def op_calls(monkeypatch, new: nn.Module, x: torch.Tensor) -> list[tuple]:
    """The fused ops that a call runs, with their arguments."""
    made, call = [], ops.FusedOp.__call__

    def counted(self, *args):
        made.append((self, args))
        return call(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ops.FusedOp, "__call__", counted)
        new(x)
    return made


@each
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [B, 0])
def test_opcheck(subject, dtype, device, batch, monkeypatch):
    new = subject.new(K, N).to(device, dtype)
    x = X[:batch].to(device, dtype, copy=True).requires_grad_()
    if subject.has_statistics and not batch:
        pytest.skip("torch's own BatchNorm takes no empty batch in training")
    made = op_calls(monkeypatch, new, x)
    if not made and dtype != torch.float32:
        pytest.skip("the reference itself runs in this type")
    assert made
    near = 1e-2 if dtype == torch.bfloat16 else None
    for op, args in made:
        args = tuple(
            a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a
            for a in args
        )
        torch.library.opcheck(op.op, args, rtol=near, atol=near)


@each_dear
@needs_inductor
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dynamic", [False, None, True])
def test_compiled_forward_and_backward(subject, dynamic, device):
    reference, new = subject.twins(K, N, device=device)
    # C++ for a CPU takes torch 2.11 half a minute: once is enough
    backend = "inductor" if dynamic is False or device == "cuda" else "aot_eager"
    call = torch.compile(new, fullgraph=True, dynamic=dynamic, backend=backend)
    for batch in (B, 3, 2, *(() if subject.has_statistics else (1,))):
        x = drawn((batch, K), batch).to(device).requires_grad_()
        reference.load_state_dict(new.state_dict())
        true, before = buffers_after(reference, x), (buffers_of(new), buffers_of(reference))
        theirs = gradients(reference, x)
        ours = gradients(call, x, of=new)
        if subject.has_statistics:  # before BatchNorm its gradient is rounding alone
            assert ours.pop("gemm.bias").abs().max() < 1e-6 > theirs.pop("gemm.bias").abs().max()
        assert_gradients_close(ours, theirs, 1e-4)
        assert_buffers(new, reference, before, true)
    with torch.no_grad():
        assert_like(reference, call, X.to(device), model=new)


@needs_inductor
def test_a_compiled_batchnorm_goes_back_and_forth():
    reference, new = BN_TRAIN.twins(K, N)
    call = torch.compile(new, fullgraph=True)
    for training in (True, False, True, True, False):
        for model in (reference, new):
            model.train(training)
        with torch.no_grad():
            assert_like(reference, call, X + training, model=new)
    assert new.bn.num_batches_tracked == 3


@pytest.mark.parametrize("subject", [AVG, MAX], ids=str)
def test_a_compiled_model_sees_other_options(subject):
    new = subject.new(K, N)
    call = torch.compile(new, fullgraph=True, backend="aot_eager")
    call(X)
    for scale in (-1.5, 0.0, 3):
        new.scale_factor = scale
        assert_fresh(call, new, X)
    pool = [m for m in new.children() if not isinstance(m, nn.Linear)][0]
    pool.kernel_size = pool.stride = 4
    assert_fresh(call, new, X)


@each
def test_compiled_in_a_larger_model(subject):
    y = subject.new(K, N)(X)
    last = nn.Linear(y.size(1), 2) if y.dim() == 2 else nn.Identity()
    body = nn.Sequential(nn.Linear(K, K), nn.GELU(), subject.new(K, N), last, nn.Tanh())
    twin = copy.deepcopy(body)
    twin[2].__class__ = subject.Model
    call = torch.compile(body, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(call(X), twin(X), rtol=1e-4, atol=1e-5)
    call(X).sum().backward()
    twin(X).sum().backward()
    for ours, theirs in zip(body.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)


@each
def test_compiled_beyond_the_normal_case(subject):
    reference, new = subject.twins(K, N)
    call = torch.compile(new, fullgraph=True, backend="aot_eager")
    x = drawn((2, N, K))
    wanted, error, _ = outcome(lambda: reference(x))
    if error is None:  # a pool takes no fourth dimension
        torch.testing.assert_close(call(x), wanted, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = reference(X)
        assert call(X).dtype == wanted.dtype
        torch.testing.assert_close(call(X), reference(X), rtol=5e-2, atol=5e-2)
    layer_of(new).register_forward_hook(lambda module, args, y: 2 * y)
    layer_of(reference).register_forward_hook(lambda module, args, y: 2 * y)
    torch.testing.assert_close(call(X), reference(X), rtol=1e-3, atol=1e-4)


def as_function(model):
    """x, weight, bias -> y; buffers are copies."""
    name = next(n for n, m in model.named_children() if isinstance(m, nn.Linear))
    buffers = dict(model.named_buffers())

    def call(x, weight, bias):
        given = {f"{name}.weight": weight, f"{name}.bias": bias}
        return functional_call(model, given | {n: b.clone() for n, b in buffers.items()}, (x,))

    return call


TRANSFORMS = {
    "vmap": lambda m: torch.vmap(m)(drawn((3, B, K))),
    "vmap over columns": lambda m: torch.vmap(m, in_dims=1)(drawn((B, 3, K))),
    "vmap over parameters": lambda m: torch.vmap(as_function(m), (None, 0, 0))(
        X, drawn((3, N, K)), drawn((3, N))
    ),
    "jvp": lambda m: torch.func.jvp(m, (X,), (drawn((B, K), 3),)),
    "vjp": lambda m: _vjp(m),
    "grad": lambda m: torch.func.grad(lambda x: m(x).square().sum())(X),
    "grad of parameters": lambda m: torch.func.grad(
        lambda w: as_function(m)(X, w, layer_of(m).bias).square().sum()
    )(layer_of(m).weight.detach()),
    "grad of each sample": lambda m: torch.vmap(
        torch.func.grad(lambda x: m(x.unsqueeze(0)).square().sum())
    )(X),
    "jacrev": lambda m: torch.func.jacrev(m)(X),
    "jacfwd": lambda m: torch.func.jacfwd(m)(X),
    "hessian": lambda m: torch.func.hessian(lambda x: m(x).square().sum())(X[:2]),
    "forward mode": lambda m: _forward_mode(m),
    "autograd.functional": lambda m: torch.autograd.functional.jacobian(m, X),
    "is_grads_batched": lambda m: _batched_gradients(m),
}


def _vjp(model):
    y, pull = torch.func.vjp(model, X)
    return pull(y.cos())


def _forward_mode(model):
    with torch.autograd.forward_ad.dual_level():
        y = model(torch.autograd.forward_ad.make_dual(X, torch.ones_like(X)))
        return torch.autograd.forward_ad.unpack_dual(y).tangent


def _batched_gradients(model):
    x = X.clone().requires_grad_()
    y = model(x)
    return torch.autograd.grad(y, x, drawn((3, *y.shape), 4), is_grads_batched=True)


def transformed(model, name: str) -> tuple:
    """The leaves of the result, or the class of what was raised, and the buffers afterwards."""
    try:
        return tree_leaves(TRANSFORMS[name](model)), dict(model.named_buffers())
    except Exception as error:
        return [type(error)], {}


@each
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(subject, name):
    reference, new = subject.twins(K, N)
    (theirs, their_buffers), (ours, our_buffers) = (transformed(m, name) for m in (reference, new))
    for got, wanted in zip(ours, theirs, strict=True):
        if isinstance(wanted, type):
            assert got is wanted
        else:
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(our_buffers, their_buffers, rtol=1e-4, atol=1e-5)


def test_control_most_transforms_give_numbers():
    """What raises in both is compared by its class alone. BatchNorm in training writes buffers in
    place, which most transforms refuse."""
    for subject in (s for s in SUBJECTS if not s.has_statistics):
        found = [
            name
            for name in TRANSFORMS
            if isinstance(transformed(subject.new(K, N), name)[0][0], type)
        ]
        assert not found, subject


@pytest.mark.full  # after a thousand other tests torch once could not trace its own vjp
@pytest.mark.parametrize("subject", [SUM, AVG, BN, MAX], ids=str)
@pytest.mark.parametrize("name", ["vmap", "vmap over parameters", "jvp", "grad", "vjp"])
@pytest.mark.filterwarnings("ignore")
def test_compiled_transforms(subject, name):
    torch._dynamo.reset()  # what was compiled before must not count
    reference, new = subject.twins(K, N)
    of_reference = torch.compile(lambda: TRANSFORMS[name](reference), backend="aot_eager")
    if outcome(of_reference)[1]:
        pytest.skip("torch can't compile that of the reference either")
    got = torch.compile(lambda: TRANSFORMS[name](new), backend="aot_eager")()
    wanted = TRANSFORMS[name](reference)
    for ours, theirs in zip(tree_leaves(got), tree_leaves(wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.as_sized
@pytest.mark.parametrize(("slug", "init"), [
    ("matmul_maxpool_sum_scale", (9, 13, 2, 0.5)),
    ("matmul_maxpool_sum_scale", (251, 4099, 3, 0.5)),
    ("matmul_maxpool_sum_scale", (300, 2049, 2, 0.5)), ("gemm_batchnorm_scale_softmax", (9, 13)),
    ("gemm_batchnorm_scale_softmax", (33, 70)),
])  # fmt: skip
def test_an_export_for_batches_of_any_size(slug, init):
    """What is left to the reference does not hang on the size of a batch that is not known."""
    new = wb.problem(slug).ModelNew(*init).eval()
    x, batch = torch.rand(7, init[0]), torch.export.Dim("batch", min=2, max=1 << 16)
    exported = torch.export.export(new, (x,), dynamic_shapes={"x": {0: batch}}).module()
    for rows in (7, 40, 300):
        x = torch.rand(rows, init[0])
        torch.testing.assert_close(exported(x), new(x), rtol=1e-5, atol=1e-5)


@each
def test_fake_tensors_and_export(subject):
    reference, new = subject.twins(K, N)
    exported = torch.export.export(new, (X,))
    torch.testing.assert_close(exported.module()(X), reference(X), rtol=1e-5, atol=1e-5)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = new(mode.from_tensor(X))
    y = subject.new(K, N)(X)
    assert fake.shape == y.shape and fake.dtype == y.dtype


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_shape_function_is_right_at_every_size(subject, dtype, monkeypatch):
    """What the compiler is told about an output is what comes out: shape, type, strides."""
    for size in ((K, N), (1, 4), (7, 6)):
        for batch in (2, 3, 9):
            new, x = subject.new(*size).to(dtype), drawn((batch, size[0])).to(dtype)
            for op, args in op_calls(monkeypatch, new, x):
                with torch.no_grad():
                    told, made = op.output(*args), op(*args)
                for a, b in zip(tree_leaves(told), tree_leaves(made), strict=True):
                    assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


# --- threads ----------------------------------------------------------------------------------


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
        assert not thread.is_alive(), "a thread hangs"
    if failed:
        raise failed[0]


@each
def test_two_threads_forward_and_backward(subject):
    """A model each, of one class: nothing is shared behind the modules."""
    models = [subject.new(K, N, seed=i) for i in range(2)]
    x = X.clone().requires_grad_()
    wanted = [gradients(copy.deepcopy(model), x) for model in models]

    def work(model, grads):
        for _ in range(100):
            model.load_state_dict(copy.deepcopy(model.state_dict()))
            assert_gradients_close(gradients(model, x), grads)

    in_threads(*(lambda m=m, w=w: work(m, w) for m, w in zip(models, wanted, strict=True)))


@pytest.mark.parametrize("subject", [s for s in SUBJECTS if not s.has_statistics], ids=str)
def test_two_threads_one_model_that_changes(subject):
    new = subject.new(K, N)

    def reads():
        for _ in range(200):
            assert torch.isfinite(new(X)).all()

    def writes():
        for i in range(100):
            with torch.no_grad():
                layer_of(new).weight.copy_(drawn((N, K), i))

    in_threads(reads, writes, reads)
    assert_fresh(new, new, X)


@each
def test_two_threads_build_and_call_their_first_at_once(subject):
    """The kernel is asked for, and the fold made, by both at the same moment."""
    new = subject.new(K, N).eval()
    put("trained", new)
    wanted = reference_of(new)(X)
    in_threads(*(lambda: torch.testing.assert_close(new(X), wanted) for _ in range(4)))
