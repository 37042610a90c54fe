"""`check` rejects every kind of wrong candidate of every problem, and says why; it accepts ours.

The candidates are made in `wrongs`, each wrong in one way and float64 else. What the chains declare
as their own controls is rejected too; those that need a GPU where there is one.
"""

from __future__ import annotations

import pytest
import torch
import wrongs
from kit import BN, BN_TRAIN, MAX, SUBJECTS, SUM, each, needs_compiler, needs_gpu

import workbook as wb
from workbook.spec import Size, Variant

WRONG = [(s, name) for s in SUBJECTS for name in wrongs.of(s)]
OWN = [
    pytest.param(s, v.key, marks=() if "cpu" in v.devices else needs_gpu)
    for s in (SUM, *(s for s in SUBJECTS if s.name in ("avgpool", "bn", "maxpool")))
    for v in wb.problem(s.slug).variants
    if v.is_control
]


@pytest.fixture(autouse=True)
def _runs(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBOOK_RUNS", str(tmp_path / "runs"))


def checked(subject, make=None, *, stop: bool = True, size: Size | None = None):
    """A candidate, or ours, at a small size, in the subject's mode."""
    p = wb.problem(subject.slug)
    tried = "fused" if make is None else Variant("tried", "torch", "by hand", make, ("cpu",))
    modes = [subject.mode] if subject.slug == BN.slug else None
    size = size or Size("small", (64, 49, *subject.options), 33)
    return wb.check(p, variant=tried, size=size, device="cpu", modes=modes, stop=stop)


@each
def test_what_is_right_is_accepted(subject):
    checked(subject, wrongs.right, stop=False).require()


# A softmax with large logits hangs on the rounded difference of the two largest: how eager errs
# there is chance, and the rule, which compares with it, holds at this size and not at every one.
OURS = {BN.slug: Size("small", (520, 700), 40)}


@needs_compiler
@each
def test_ours_is_accepted(subject):
    size = OURS.get(subject.slug)
    checked(subject, stop=False, size=size).require()


@pytest.mark.parametrize(("subject", "name"), WRONG, ids=str)
def test_a_wrong_candidate_is_rejected(subject, name):
    result = checked(subject, wrongs.of(subject)[name])
    assert not result.ok and not result.records[-1].passed
    assert result.reason


REASONS = {  # of what no number says: (subject, make, words of the reason)
    "statistics not updated": (BN_TRAIN, wrongs.of(BN_TRAIN)["statistics not updated"], "buffer"),
    "biased variance kept": (BN_TRAIN, wrongs.of(BN_TRAIN)["biased variance kept"], "running_var"),
    "a block not written": (SUM, wrongs.COMMON["a block not written"], "not finite where"),
    "the input is modified": (SUM, wrongs.modifies_its_input, "input was modified"),
    "another shape": (MAX, wrongs.after(lambda y: y.unsqueeze(1)), "shape"),
    "another dtype": (MAX, wrongs.unrounded, "dtype"),
    "raises": (MAX, wrongs.raises, "raised RuntimeError: on purpose"),
    "another answer each time": (SUM, wrongs.jitters, "differ"),
}


@pytest.mark.parametrize("name", REASONS)
def test_the_reason_is_said(name):
    subject, make, words = REASONS[name]
    assert words in checked(subject, make).reason


@needs_compiler
@pytest.mark.parametrize(("subject", "key"), OWN, ids=str)
def test_a_control_of_the_chain_itself_is_rejected(subject, key):
    """At sizes where it is wrong: a block of threads holds 1024 rows."""
    p = wb.problem(subject.slug)
    variant = p.variant(key)
    device = variant.devices[0]
    options = p.size("laptop").init[2:]
    size = Size("small", (64, 96, *options), 1031)
    result = wb.check(p, variant=variant, size=size, device=device, stop=True)
    assert not result.ok and variant.wrong


def test_the_list_of_the_wrong_is_whole():
    """By problem: what has to be among the candidates, here or among the chain's own controls."""
    every = {
        "zeros", "the mean as a constant", "bias left out", "first tenth of K left out",
        "first tenth of the features left out", "half precision", "made in the constructor",
        "one update old", "the previous output", "cached by pointer", "the last row skipped",
        "a block not written", "NaN dropped",
    }  # fmt: skip
    pools = {"scale left out", "window too wide", "tail used", "a window too few"}
    wanted = {
        "sum": every | {"float32 running sum", "mean instead of sum"},
        "avgpool": every | pools | {"tanh GELU", "GELU of the maximum"},
        "avgpool-negative": every | pools | {"GELU of the ends"},
        "maxpool": every | pools | {"no guard", "mean for sum"},
        "maxpool-3": every | pools,
        "bn": every | {"uniform", "scale left out", "BatchNorm left out", "the other mode"},
        # in training the bias before a BatchNorm vanishes
        "bn-train": every - {"bias left out"} | {"statistics not updated", "the other mode"},
    }
    assert {s.name: wanted[s.name] - set(wrongs.of(s)) for s in SUBJECTS} == {
        s.name: set() for s in SUBJECTS
    }
    for subject in SUBJECTS:
        assert any(v.is_control for v in wb.problem(subject.slug).variants)


def test_the_candidates_leave_gradients_alone():
    assert torch.is_grad_enabled()
