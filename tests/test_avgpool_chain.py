"""The derivation of the avgpool chain in float64, what is left out of it, and its controls."""

from __future__ import annotations

import math
import re

import pytest
import torch
from avgpool import FOLDER, PROBLEM, averaged, chain, gelu
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import drawn, needs_compiler

import workbook as wb
from workbook.spec import Size

Model, ModelNew = PROBLEM.Model, PROBLEM.ModelNew
STEPS = PROBLEM.steps
HOLDING = [step for step in STEPS if step.holds]
TEMPTING = [step for step in STEPS if not step.holds]
# B, K, N, pool, scale
SHAPES = [(3, 7, 5, 2, 2.0), (1, 1, 1, 1, -1.0), (5, 13, 9, 4, -2.5), (2, 64, 33, 16, 0.5),
          (4, 101, 17, 3, 0.0), (9, 11, 60, 4, -0.3)]  # fmt: skip
VERTEX = -0.7517915246935645


def arguments(B: int, K: int, N: int, pool: int, scale: float, seed: int = 0) -> tuple:
    """x, weight, bias in float64, pool, scale; u around the vertex, on both sides."""
    x, weight, bias = (drawn(s, seed + i).double() for i, s in enumerate([(B, K), (N, K), (N,)]))
    return x, weight / K**0.5, bias - 0.75, pool, scale


def distance(compute, given: tuple) -> float:
    first = STEPS[0].compute(*given)
    return ((compute(*given) - first).abs() / (1 + first.abs())).max().item()


def test_the_first_step_is_the_reference():
    given = arguments(3, 7, 5, 2, -1.5)
    model = Model(7, 5, 2, -1.5).double()
    model.load_state_dict({"matmul.weight": given[1], "matmul.bias": given[2]})
    assert torch.equal(STEPS[0].compute(*given), model(given[0]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("step", HOLDING, ids=lambda step: step.title)
def test_steps_that_hold_agree_with_the_first(step, shape):
    got = step.compute(*arguments(*shape))
    assert got.shape == (shape[0],) and got.dtype == torch.float64
    assert distance(step.compute, arguments(*shape)) <= 1e-12


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 6), st.integers(0, 30), st.integers(1, 20), st.integers(1, 20),
    st.floats(-9, 9), st.integers(0, 99), st.floats(-6, 3),
)  # fmt: skip
def test_steps_that_hold_agree_at_any_size(B, K, N, pool, scale, seed, shift):
    x, weight, bias, *_ = arguments(B, max(K, 1), N, 1, 1.0, seed)
    given = x[:, :K], weight[:, :K], bias + shift, min(pool, N), scale
    for step in HOLDING:
        assert distance(step.compute, given) <= 1e-12, step.title


@pytest.mark.parametrize("step", TEMPTING, ids=lambda step: step.title)
def test_tempting_steps_differ(step):
    assert distance(step.compute, arguments(7, 97, 67, 16, 2.0)) > 1e-3


@pytest.mark.parametrize("step", HOLDING, ids=lambda step: step.title)
def test_steps_keep_nan_in_its_row(step):
    given = arguments(4, 7, 6, 2, 2.0)
    given[0][2, 3] = math.nan
    got = step.compute(*given)
    assert got[[0, 1, 3]].isfinite().all() and got[2].isnan()


def test_every_step_is_explained():
    for step in STEPS:
        assert step.title and step.formula and step.reason
        assert "$" not in step.formula and step.formula.count("{") == step.formula.count("}")
    assert len({step.title for step in STEPS}) == len(STEPS)
    assert HOLDING and TEMPTING and STEPS[0].holds


# --- why two numbers are enough ---------------------------------------------------------------


def test_the_vertex_is_where_gelu_turns():
    v = torch.tensor(VERTEX, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(gelu(v), v)
    assert abs(slope.item()) < 1e-15
    header = (FOLDER / "gelu.h").read_text(encoding="utf-8")
    written = float(re.search(r"kVertex = (-[\d.]+)f;", header).group(1))
    assert torch.tensor(written).item() == torch.tensor(VERTEX).item(), "the same float32"


def test_gelu_falls_then_rises():
    u = torch.linspace(-30, 30, 200_001, dtype=torch.float64)
    steps = gelu(u).diff()
    assert (steps[u[1:] <= VERTEX] <= 0).all() and (steps[u[:-1] >= VERTEX] >= 0).all()


def test_a_u_on_the_wrong_side_of_the_vertex_costs_less_than_a_rounding():
    """float32's vertex is off by up to 3e-8: GELU is flat there to 1e-15."""
    near = torch.tensor([VERTEX - 6e-8, VERTEX + 6e-8], dtype=torch.float64)
    assert ((gelu(near) - gelu(torch.tensor(VERTEX).double())).abs() < 1e-14).all()


def test_one_number_is_not_enough():
    """Below the vertex the largest u has the smallest GELU."""
    u = torch.tensor([-3.0, -0.8])
    assert u.argmax() == 1 and gelu(u).argmax() == 0


# --- the fold, the options --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pool", [1, 2, 3, 7, 17])
def test_the_fold_is_the_mean_of_the_rows(dtype, pool):
    weight, bias = drawn((17, 9), 1).to(dtype), drawn((17,), 2).to(dtype)
    for wants in (torch.float32, torch.float64):
        w, b, w_exact, b_exact = chain.fold(wants, weight, bias, pool)
        means = averaged(weight.double().T, pool).T, averaged(bias.double(), pool)
        for got, mean in zip((w, b), means, strict=True):
            assert got.dtype == wants and got.is_contiguous()
            torch.testing.assert_close(got, mean.to(wants), rtol=2**-24, atol=0)
        kept = dtype == wants == torch.float32 and pool > 1
        assert (w_exact.numel(), b_exact.numel()) == ((w.numel(), b.numel()) if kept else (0, 0))
        if kept:
            for got, mean in zip((w_exact, b_exact), means, strict=True):
                torch.testing.assert_close(got, mean, rtol=1e-15, atol=1e-16)


def test_a_pool_of_one_copies_nothing():
    model = ModelNew(9, 7, 1, 2.0)
    w, b, *_ = chain.fold(torch.float32, model.matmul.weight, model.matmul.bias, 1)
    assert w.data_ptr() == model.matmul.weight.data_ptr()
    assert b.data_ptr() == model.matmul.bias.data_ptr()


@pytest.mark.parametrize("pool", [0, -1, 6, 100])
def test_a_pool_without_a_group_is_refused_as_by_the_pool(pool):
    with pytest.raises(RuntimeError, match="pool: got .*, wants 1 to out_features = 5"):
        chain.fold(torch.float32, drawn((5, 3)), drawn((5,)), pool)


def test_a_scale_that_changes_keeps_the_fold():
    model, x = ModelNew(16, 32, 4, 2.0), drawn((3, 16))
    before = len(chain.OP.folds)
    for scale in (1.0, -2.0, 0.5, math.nan):
        model.scale_factor = scale
        model(x)
    assert len(chain.OP.folds) == before + 1


def normal(model, x) -> bool:
    """True where the op stands for the chain."""
    seen, kept = [], chain.OP
    chain.OP = lambda *given: seen.append(given) or kept(*given)
    try:
        model(x)
    finally:
        chain.OP = kept
    return bool(seen)


CHANGES = {
    "a stride": lambda m: setattr(m.avg_pool, "stride", (1,)),
    "padding": lambda m: setattr(m.avg_pool, "padding", (1,)),
    "the ceiling": lambda m: setattr(m.avg_pool, "ceil_mode", True),
    "a hook of the pool": lambda m: m.avg_pool.register_forward_hook(lambda *_: None),
    "a scale that is a tensor": lambda m: setattr(m, "scale_factor", torch.tensor(2.0)),
    "a scale that is a bool": lambda m: setattr(m, "scale_factor", True),
    "a huge whole scale": lambda m: setattr(m, "scale_factor", 2**60),
    "another pool module": lambda m: setattr(m, "avg_pool", torch.nn.MaxPool1d(3)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_anything_unusual_runs_the_reference(name):
    new, reference, x = ModelNew(9, 13, 3, 2.0), Model(9, 13, 3, 2.0), drawn((4, 9))
    assert normal(new, x)
    reference.load_state_dict(new.state_dict())
    for model in (new, reference):
        CHANGES[name](model)
    assert not normal(new, x)
    torch.testing.assert_close(new(x), reference(x), rtol=0, atol=0)


@pytest.mark.parametrize(("size", "scale"), [(3, 2), ((3,), -2.0), (4, 0)], ids=str)
def test_options_are_read_at_each_call(size, scale):
    new, x = ModelNew(9, 13, 3, 2.0), drawn((4, 9))
    new(x)
    new.avg_pool.kernel_size = new.avg_pool.stride = size
    new.scale_factor = scale
    assert normal(new, x)
    reference = Model(9, 13, size if type(size) is int else size[0], scale)
    reference.load_state_dict(new.state_dict())
    torch.testing.assert_close(new(x), reference(x))


# --- omissions, controls, work ----------------------------------------------------------------


@pytest.mark.parametrize("name", PROBLEM.omissions)
def test_what_an_omission_leaves_out_shows(name):
    torch.manual_seed(0)
    model, x = Model(40, 64, 4, 2.0).double(), drawn((60, 40)).double()
    got = PROBLEM.omissions[name](model, x)
    assert got.shape == (60,) and got.dtype == torch.float64
    assert ((got - model(x)).norm() / model(x).norm()).item() > 1e-3


SMALL = Size("small", (161, 96, 16, 2.0), 33)


@needs_compiler
@pytest.mark.parametrize("key", [v.key for v in PROBLEM.variants
                                 if "cpu" in v.devices and v.is_control])  # fmt: skip
def test_check_rejects_each_control(key):
    result = wb.check(PROBLEM, variant=key, device="cpu", size=SMALL, stop=True)
    assert not result.ok, f"{key} was accepted: {PROBLEM.variant(key).wrong}"
    assert "raised" not in result.reason, "for what is wrong with it, not for an accident"


@needs_compiler
def test_check_accepts_ours():
    assert wb.check(PROBLEM, device="cpu", size=SMALL).require().ok
    assert wb.check(PROBLEM, variant="cpu", device="cpu", size=SMALL).require().ok


def test_work_counts_what_the_chain_says():
    """16 times fewer operations; the weights' bytes fall by 16 too."""
    before, after = (PROBLEM.work[key](1024, 8192, 8192, 16) for key in ("before", "after"))
    assert before.flops >= 2 * 1024 * 8192 * 8192 and after.flops == 2 * 1024 * 8192 * 512
    assert after.read == 4 * (1024 * 8192 + 512 * 8192 + 512) and after.written == 4 * 1024
    assert PROBLEM.work["fold"](3, 50, 70, 16).read >= 4 * 64 * 50
    assert PROBLEM.shape("paper") == {"B": 1024, "K": 8192, "N": 8192, "pool": 16}
