"""The derivation of the sum chain, in float64: what holds, what does not, what is left out."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sum_chain import PROBLEM, Model, drawn, errors, truth

import workbook as wb
from workbook import paths

STEPS = PROBLEM.steps
HOLDING = [step for step in STEPS if step.holds]
TEMPTING = [step for step in STEPS if not step.holds]
SHAPES = [(3, 7, 5), (1, 1, 1), (5, 13, 2), (2, 64, 33), (4, 101, 17)]


def parameters(B: int, K: int, N: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """x (B, K), weight (N, K), bias (N) in float64."""
    shapes = ((B, K), (N, K), (N,))
    return tuple(drawn(s, seed + i).double() for i, s in enumerate(shapes))


def distance(compute, x, weight, bias) -> float:
    """How far from the first step, against the sum of the magnitudes that are added."""
    size = x.abs() @ weight.abs().sum(0) + bias.abs().sum()
    difference = (compute(x, weight, bias) - STEPS[0].compute(x, weight, bias)).flatten().abs()
    return (difference / size).max().item()


def test_the_first_step_is_the_reference():
    x, weight, bias = parameters(3, 7, 5)
    model = Model(7, 5).double()
    model.load_state_dict({"linear.weight": weight, "linear.bias": bias})
    assert torch.equal(STEPS[0].compute(x, weight, bias), model(x))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step", HOLDING, ids=lambda step: step.title)
def test_steps_that_hold_agree_with_the_first(step, shape):
    got = step.compute(*parameters(*shape))
    assert got.shape == (shape[0], 1) and got.dtype == torch.float64
    assert distance(step.compute, *parameters(*shape)) <= 1e-12


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 6), st.integers(0, 40), st.integers(0, 20), st.integers(0, 99), st.floats(-9, 9)
)
def test_steps_that_hold_agree_at_any_size(B, K, N, seed, scale):
    x, weight, bias = parameters(B, K, N, seed)
    x, bias = x * 10.0**scale, bias + 1.0
    for step in HOLDING:
        if N:
            assert distance(step.compute, x, weight, bias) <= 1e-12, step.title
        else:
            assert torch.equal(step.compute(x, weight, bias), torch.zeros(B, 1).double())


@pytest.mark.parametrize("shape", [s for s in SHAPES if s[2] > 1])
@pytest.mark.parametrize("step", TEMPTING, ids=lambda step: step.title)
def test_tempting_steps_differ(step, shape):
    assert distance(step.compute, *parameters(*shape)) > 1e-3


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("step", HOLDING, ids=lambda step: step.title)
def test_steps_keep_what_is_not_finite_in_its_row(step, value):
    x, weight, bias = parameters(4, 7, 5)
    weight = weight.abs()
    x[2, 3] = value
    got = step.compute(x, weight, bias).flatten()
    assert torch.isfinite(got[[0, 1, 3]]).all()
    torch.testing.assert_close(got[2], torch.tensor(value).double(), equal_nan=True)


def test_every_step_is_explained():
    for step in STEPS:
        assert step.title and step.formula and step.reason
        assert "$" not in step.formula and step.formula.count("{") == step.formula.count("}")
    assert len({step.title for step in STEPS}) == len(STEPS)
    assert HOLDING and TEMPTING and STEPS[0].holds


@pytest.mark.parametrize("name", PROBLEM.omissions)
def test_what_an_omission_leaves_out_shows(name):
    torch.manual_seed(0)
    model, x = Model(40, 20).double(), drawn((6, 40)).double()
    got = PROBLEM.omissions[name](model, x)
    assert got.shape == (6, 1) and got.dtype == torch.float64
    assert errors(got, truth(model, x))[0] > 1e-3


def test_omissions_are_the_chain_but_for_one_thing():
    """With that one thing made void, an omission is right: nothing else is wrong with it."""
    torch.manual_seed(0)
    model, x = Model(40, 20).double(), drawn((6, 40)).double()
    void = {
        "bias left out": lambda: model.linear.bias.zero_(),
        "last feature left out": lambda: (
            model.linear.weight[-1].zero_(),
            model.linear.bias.zero_(),
        ),
        "first 10% of K left out": lambda: x[:, :4].zero_(),
        "sum left out (first feature)": lambda: (
            model.linear.weight[1:].zero_(),
            model.linear.bias.zero_(),
        ),
    }
    for name, change in void.items():
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with torch.no_grad():
            change()
            assert errors(PROBLEM.omissions[name](model, x), truth(model, x))[1] < 1e-9, name
        model.load_state_dict(before)
    mean = PROBLEM.omissions["mean instead of sum"](model, x)
    assert errors(mean * 20, truth(model, x))[1] < 1e-9


def test_the_reference_as_a_function_shares_nothing_between_calls():
    x, weight, bias = parameters(3, 7, 5)
    reference = STEPS[0].compute
    first = reference(x, weight, bias)
    assert not torch.equal(reference(x, 2 * weight, bias), first)
    assert torch.equal(reference(x, weight, bias), first)


def test_work_counts_what_the_chain_says():
    """The GEMM is gone: from 2 B K N operations to 2 B K, and the weights are not read."""
    before, after = (PROBLEM.work[key](3, 50, 70) for key in ("before", "after"))
    assert before.flops >= 2 * 3 * 50 * 70 and after.flops == 2 * 3 * 50
    assert before.read >= 4 * 70 * 50 and after.read == 4 * 3 * 50 + 8 * 50
    assert after.written == 4 * 3


@pytest.mark.parametrize("slug", [p.slug for p in wb.problems()])
def test_inputs_are_not_the_weights_in_disguise(slug):
    """Drawn by one seed, x would be W shifted and scaled: each sample has a feature that shouts."""
    p = wb.problem(slug)
    weight = next(v for n, v in p.model("laptop").named_parameters() if n.endswith("weight"))
    drawn_alike = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0))
    for x, alike in ((p.inputs("laptop")[0], False), (drawn_alike, True)):
        rows = min(x.size(0), weight.size(0))
        both = torch.stack([(t[:rows] - t[:rows].mean()).flatten() for t in (x, weight.detach())])
        assert (torch.corrcoef(both)[0, 1].abs() > 0.9) == alike


def test_sizes_and_inputs():
    paper = PROBLEM.size("paper")
    assert (paper.init, paper.batch) == ((8192, 8192), 1024)
    assert list(inspect.signature(Model).parameters) == ["in_features", "out_features"]
    first, again, other = (PROBLEM.inputs("laptop", seed=s)[0] for s in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.shape == (256, 2048) and 0 <= first.min() and first.max() < 1
    assert PROBLEM.get_init_inputs() == [8192, 8192]
    with pytest.raises(KeyError, match="size.*laptop"):
        PROBLEM.size("huge")
    with pytest.raises(KeyError, match="variant.*fused"):
        PROBLEM.variant("nothing")


FILTERED = re.compile(r"try:|except |pass|import threading")
EXPORTED = [paths.root() / "workbook" / f"{name}.py" for name in ("spec", "fold", "build", "ops")]
EXPORTED += sorted((paths.root() / "workbook" / "chains").glob("*.py"))


@pytest.mark.parametrize("file", EXPORTED, ids=lambda p: p.name)
def test_words_that_the_public_harness_refuses(file):
    """It searches the text, comments too: a class named `Entry` before a colon is found."""
    assert not FILTERED.findall(file.read_text(encoding="utf-8"))


def test_control_the_filter_finds_them():
    for text in ("class Entry:", "try:\n", "except ValueError:", "# bypass", "import threading"):
        assert FILTERED.search(text)
