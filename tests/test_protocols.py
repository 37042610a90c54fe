"""Public protocols, by hand: what each has to accept or reject, and what our rule says beside it.

Most candidates are wrong on purpose. A protocol that is stricter or laxer than the public one tells
lies about it in the table, so both sides are held.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sum_chain import DEVICES, PROBLEM
from torch import Tensor, nn

import workbook as wb
from workbook import cli, drafts, journal, plot, protocols, verdicts
from workbook.accuracy import CheckFailed
from workbook.journal import Record, Records
from workbook.protocols import NOT_RUN, PROTOCOLS, ProtocolResult
from workbook.spec import Size, Variant

SMALL = Size("small", (64, 48), 33)
Make = Callable[[nn.Module], Callable[[Tensor], Tensor]]


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch) -> Path:
    """Records go below tmp_path, those of --keep too."""
    monkeypatch.setenv("WORKBOOK_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr("workbook.paths.data", lambda: tmp_path / "data")
    return tmp_path


def judged(name: str, make: Make, p=PROBLEM, size: Size = SMALL, **options) -> ProtocolResult:
    tried = options.pop("variant", Variant("tried", "torch", "by hand", make, ("cpu",)))
    options = {"samples": 2, "budget_s": 0.05, "device": "cpu", **options}
    return wb.protocol(p, name, variant=tried, size=size, **options)


def both(make: Make, **options) -> tuple[ProtocolResult, ProtocolResult]:
    return judged("eval", make, **options), judged("harness", make, **options)


def right(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        weight, bias = model.linear.weight.double(), model.linear.bias.double()
        return (x.double() @ weight.sum(0)[:, None] + bias.sum()).float()

    return run


def after(change: Callable[[Tensor], object]) -> Make:
    return lambda model: lambda x: change(right(model)(x))


# --- chains of which a protocol sees less ------------------------------------------------------


class Softmax(nn.Module):
    """Outputs near 1/N: far below both tolerances."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.linear(x), 1)


class Normed(nn.Module):
    """Differs in train mode, where a call also updates the running statistics."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.bn = nn.BatchNorm1d(out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.linear(x))


def chain(model: type[nn.Module], new: type[nn.Module] | None = None):
    return dataclasses.replace(PROBLEM, Model=model, ModelNew=new or model)


WIDE = Size("wide", (4, 65536), 5)
SOFTMAX, NORMED = chain(Softmax), chain(Normed)


# --- what is right is accepted ------------------------------------------------------------------


@pytest.mark.parametrize("name", PROTOCOLS)
@pytest.mark.parametrize("variant", ["fused", "eager"])
@pytest.mark.parametrize("device", DEVICES)
def test_right_variants_are_accepted(name, variant, device):
    result = judged(name, right, variant=variant, device=device)
    assert result.ok and result.reason == "" and result.require() is result
    assert result.rule == result.moved == "" and not result.is_let_through


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_package_s_drop_in_is_built_by_its_own_constructor(name):
    class Renamed(PROBLEM.Model):
        def __init__(self, in_features: int, out_features: int) -> None:
            super().__init__(in_features, out_features)
            made.append(self)

    made: list[nn.Module] = []
    p = dataclasses.replace(PROBLEM, ModelNew=Renamed)
    assert wb.protocol(p, name, device="cpu", size=SMALL, samples=1).ok and len(made) == 1


def test_what_a_protocol_says_of_it_is_its_own():
    said = [(p.tolerance, p.trials, p.mode) for p in PROTOCOLS.values()]
    assert list(PROTOCOLS) == ["eval", "harness"]
    assert said == [(1e-3, 1, "eval"), (1e-4, 5, "train")]


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_mode_and_the_weights_that_a_candidate_meets(name):
    seen: list = []

    def make(model):
        seen.append(model.training)
        before = model.linear.weight.clone()

        def run(x: Tensor) -> Tensor:
            moved = not torch.equal(before, model.linear.weight)
            seen.append((model.training, moved, torch.is_grad_enabled(), x.clone()))
            return model(x)

        return run

    assert judged(name, make, samples=1).ok
    trials, timed = PROTOCOLS[name].trials, (3 + 1) * (name == "harness")
    assert seen[0] is (name == "harness"), "the mode may be read when it is made"
    calls = seen[1:]
    assert len(calls) == trials + timed + 1
    assert {training for training, *_ in calls} == {name == "harness"}
    loaded = [moved for _, moved, *_ in calls]
    assert loaded[:-1] == [name == "eval"] * (trials + timed) and loaded[-1], "moved at the end"
    grads = [grad for *_, grad, _ in calls]
    assert grads == [False] * trials + [True] * timed + [False]
    xs = [x for *_, x in calls[:trials]]
    assert all(x.shape == (33, 64) and 0 <= x.min() and x.max() < 1 for x in xs)
    assert len({x[0, 0].item() for x in xs}) == trials, "fresh inputs"


# --- tolerances ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("off", "passes"),
    [(3e-5, "eval harness"), (5e-4, "eval"), (5e-3, "")],
)
def test_an_output_off_by_a_relative_error(off, passes):
    results = both(after(lambda y: y * (1 + off)))
    assert [r.record.protocol for r in results if r.ok] == passes.split()
    for result in results:
        assert result.record.rel_error == pytest.approx(off, rel=0.05)
        assert result.record.rel_error_rows == pytest.approx(off, rel=0.05)
        assert "error" in result.rule and "(whole), limit" in result.rule
        assert result.is_let_through == result.ok
        if not result.ok:
            assert f"allclose at {PROTOCOLS[result.record.protocol].tolerance:g}" in result.reason
            with pytest.raises(CheckFailed, match=f"tried, {result.record.protocol}: input 1"):
                result.require()


@pytest.mark.parametrize(("off", "ok"), [(0.9e-4, True), (1.2e-4, False)])
def test_the_absolute_part_of_the_tolerance(off, ok):
    p = chain(Softmax)

    def make(model):
        return lambda x: model(x) + off

    assert judged("harness", make, p, WIDE).ok is ok
    assert judged("eval", make, p, WIDE).ok


def test_tolerances_are_blind_to_small_outputs():
    """A softmax over 65536: zeros and uniform 1/N pass both, and our rule finds them."""
    for change in (torch.zeros_like, lambda y: torch.full_like(y, 1 / 65536)):
        for result in both(lambda m, f=change: lambda x: f(m(x)), p=SOFTMAX, size=WIDE):
            assert result.ok and result.is_let_through
            assert "(whole), limit" in result.rule and result.record.rel_error > 0.1


# --- what is not a question of tolerance --------------------------------------------------------


def test_zeros_are_rejected_where_outputs_are_large():
    for result in both(after(torch.zeros_like)):
        assert not result.ok and result.record.rel_error == 1.0


@pytest.mark.parametrize(
    ("change", "words", "in_eval"),
    [
        (lambda y: y.squeeze(1), r"shape: got torch.Size\(\[33\]\), wants .*33, 1", "allclose"),
        (lambda y: y[1:], "shape: got", "comparison raised RuntimeError"),
        (
            lambda y: y.double(),
            "dtype: got torch.float64, wants torch.float32",
            "comparison raised",
        ),
        (lambda y: y.half(), "dtype: got torch.float16", "comparison raised RuntimeError: Float"),
        (lambda y: [y], "output: got a list, wants a Tensor", "output: got a list"),
        (lambda y: None, "output: got a NoneType, wants a Tensor", "output: got a NoneType"),
        (lambda y: y.to_sparse(), "comparison raised", "comparison raised"),
        (lambda y: y.to("meta"), "comparison raised", "comparison raised"),
        (lambda y: y * float("nan"), "off by up to nan", "off by up to nan"),
    ],
)
def test_shape_and_type(change, words, in_eval):
    lenient, strict = both(after(change))
    assert not strict.ok and not lenient.ok
    with pytest.raises(CheckFailed, match=words):
        strict.require()
    with pytest.raises(CheckFailed, match=in_eval):
        lenient.require()
    assert strict.rule and lenient.rule


def test_eval_compares_as_allclose_does_and_accepts_another_shape():
    make = lambda model: lambda x: torch.full((), 1 / 65536)  # noqa: E731
    lenient, strict = both(make, p=SOFTMAX, size=WIDE)
    assert lenient.is_let_through and lenient.rule.startswith("shape: got torch.Size([])")
    assert lenient.record.rel_error == float("inf")
    assert strict.reason.startswith("input 1: shape: got torch.Size([])")


def test_what_raises_is_rejected_with_its_words():
    def make(model):
        def run(x: Tensor) -> Tensor:
            calls.append(x)
            if len(calls) == 3:
                raise RuntimeError("boom\nmore")
            return model(x)

        calls: list[Tensor] = []
        return run

    lenient, strict = both(make)
    assert lenient.ok and lenient.moved == "" and len(lenient.reason) == 0
    assert strict.reason == "input 3: raised RuntimeError: boom"
    assert strict.rule == "raised RuntimeError: boom" and strict.moved == NOT_RUN
    assert strict.record.rel_error is None and not strict.record.samples_ms
    assert "our rule, the weights moved: not run" in str(strict)


def test_what_can_not_be_made_is_rejected_with_its_words():
    def make(model):
        raise KeyError("no weight")

    for result in both(make):
        assert result.reason == "building it raised KeyError: 'no weight'" and not result.ok
        assert result.rule == result.moved == NOT_RUN


def test_gradients_are_on_while_it_is_timed():
    def make(model):
        def run(x: Tensor) -> Tensor:
            weight = model.linear.weight.t()
            z = torch.mm(x, weight, out=torch.empty(x.size(0), weight.size(1)))
            return (z + model.linear.bias).sum(1, keepdim=True)

        return run

    lenient, strict = both(make)
    assert lenient.ok and not lenient.record.samples_ms and not lenient.record.grad
    assert strict.reason.startswith("timing it, gradients on, raised RuntimeError")
    assert strict.record.rel_error < 1e-5 and strict.moved == ""


def test_what_is_accepted_is_timed_beside_eager():
    result = judged("harness", right, samples=7, budget_s=10)
    assert len(result.record.samples_ms) == 7 == len(result.record.how["eager_ms"])
    assert result.record.grad and result.record.flush == "write" and result.speedup > 0
    assert "times as fast as eager" in str(result)
    assert not judged("harness", after(torch.zeros_like)).record.samples_ms


def test_a_sample_runs_its_rows_alone():
    rows: list[int] = []

    def make(model):
        def run(x: Tensor) -> Tensor:
            rows.append(x.size(0))
            return model(x)

        return run

    slow = Variant("slow", "torch", "by hand", make, ("cpu",), sample=11)
    for name in PROTOCOLS:
        result = judged(name, make, variant=slow)
        assert result.ok and set(rows) == {11} and result.record.shape["B"] == 33
    assert result.record.extrapolated and result.record.note == "measured on 11 rows, times 3"
    all_of_them = dataclasses.replace(slow, sample=64)
    assert not judged("harness", make, variant=all_of_them).record.extrapolated


# --- stale weights ------------------------------------------------------------------------------


def first_call(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Folds when first called, and never again."""
    folded: list[Tensor] = []

    def run(x: Tensor) -> Tensor:
        if not folded:
            weight, bias = model.linear.weight.double(), model.linear.bias.double()
            folded.extend([weight.sum(0)[:, None].detach(), bias.sum().detach()])
        return (x.double() @ folded[0] + folded[1]).float()

    return run


def test_a_fold_of_the_first_call_passes_both_and_our_rule_finds_it_when_weights_change():
    for result in both(first_call):
        assert result.ok and result.rule == "" and "(whole), limit" in result.moved
        assert result.is_let_through and result.record.rel_error < 2e-7
    stale = Variant("stale", "torch", "by hand", first_call, ("cpu",))
    found = wb.check(PROBLEM, variant=stale, device="cpu", size=SMALL, stop=True)
    assert "trained weights" in found.reason


def test_a_fold_in_the_constructor_is_seen_by_who_loads():
    """eval loads other weights into what was built; the harness builds both after one seed."""
    lenient, strict = both(PROBLEM.variant("wrong_fold_in_init", "cpu").make)
    assert not lenient.ok and "allclose at 0.001" in lenient.reason and lenient.rule
    assert strict.ok and "(whole), limit" in strict.moved and strict.is_let_through


def test_the_output_of_the_call_before():
    def make(model):
        kept: list[Tensor] = []

        def run(x: Tensor) -> Tensor:
            kept.append(right(model)(x))
            return kept[max(len(kept) - 2, 0)]

        return run

    lenient, strict = both(make)
    assert lenient.ok and lenient.rule == "" and lenient.moved
    assert strict.reason.startswith("input 2: allclose") and strict.rule


def test_an_input_that_is_modified_is_let_through():
    def make(model):
        def run(x: Tensor) -> Tensor:
            y = right(model)(x)
            x.add_(1)
            return y

        return run

    for result in both(make):
        assert result.ok and result.rule == "the input was modified" and result.is_let_through


# --- names, draws, modes ------------------------------------------------------------------------


class Renamed(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.fc = nn.Linear(in_features, out_features)

    def forward(self, x: Tensor) -> Tensor:
        return right(types.SimpleNamespace(linear=self.fc))(x)


def test_a_renamed_layer_fails_the_strict_load_alone():
    p = chain(PROBLEM.Model, Renamed)
    lenient, strict = (
        wb.protocol(p, n, device="cpu", size=SMALL, samples=1, budget_s=0.1) for n in PROTOCOLS
    )
    assert lenient.reason == (
        'strict load: Missing key(s) in state_dict: "fc.weight", "fc.bias". '
        'Unexpected key(s) in state_dict: "linear.weight", "linear.bias".'
    )
    assert lenient.record.rel_error < 2e-7
    assert strict.ok and strict.is_let_through
    said = {r.rule for r in (lenient, strict)} | {r.moved for r in (lenient, strict)}
    assert said == {"state_dict: linear.weight is missing"}


def test_a_module_made_around_the_model_is_loaded_by_its_own_names():
    class Around(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    lenient, strict = both(Around)
    assert lenient.reason.startswith("strict load: Missing key(s)") and strict.ok
    assert lenient.record.rel_error < 1e-5 and lenient.rule.startswith("state_dict: ")


def test_weights_of_other_shapes_are_not_compared():
    class Wider(nn.Module):
        def __init__(self, in_features: int, out_features: int) -> None:
            super().__init__()
            self.linear = nn.Linear(in_features, out_features + 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).sum(1, keepdim=True)

    p = chain(PROBLEM.Model, Wider)
    lenient = wb.protocol(p, "eval", device="cpu", size=SMALL)
    assert lenient.reason.startswith("strict load: size mismatch") and lenient.rule == NOT_RUN
    strict = wb.protocol(p, "harness", device="cpu", size=SMALL, samples=1)
    assert not strict.ok and strict.moved == "the weights of the reference do not fit it"


def _drawing(place: str) -> type[nn.Module]:
    class Draws(PROBLEM.Model):
        def __init__(self, in_features: int, out_features: int) -> None:
            if place == "before":
                torch.rand(())
            super().__init__(in_features, out_features)
            if place == "after":
                torch.rand(())

    return Draws


@pytest.mark.parametrize(("place", "ok"), [("before", False), ("after", True), ("nowhere", True)])
def test_an_extra_draw_in_the_constructor(place, ok):
    p = chain(PROBLEM.Model, _drawing(place))
    assert wb.protocol(p, "eval", device="cpu", size=SMALL).ok
    strict = wb.protocol(p, "harness", device="cpu", size=SMALL, samples=1)
    assert strict.ok is ok and bool(strict.rule) is not ok


def _folds_in_eval() -> type[nn.Module]:
    class Folds(PROBLEM.Model):
        def train(self, mode: bool = True) -> nn.Module:
            super().train(mode)
            self.folded = None if mode else self.linear.weight.double().sum(0)[:, None].detach()
            return self

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                return super().forward(x)
            return (x.double() @ self.folded + self.linear.bias.double().sum()).float()

    return Folds


def test_eval_mode_comes_after_the_load():
    p = chain(PROBLEM.Model, _folds_in_eval())
    result = wb.protocol(p, "eval", device="cpu", size=SMALL)
    assert result.ok and result.rule == "" and result.moved


def _batchnorm(statistics: str, update: bool) -> Make:
    def make(model):
        def run(x: Tensor) -> Tensor:
            bn, z = model.bn, model.linear(x)
            batch = model.training if statistics == "right" else statistics == "batch"
            mean, var = (bn.running_mean.clone(), bn.running_var.clone())
            y = nn.functional.batch_norm(z, mean, var, bn.weight, bn.bias, batch, 0.1, bn.eps)
            if update and model.training:
                bn.running_mean.copy_(mean)
                bn.running_var.copy_(var)
                bn.num_batches_tracked.add_(1)
            return y

        return run

    return make


@pytest.mark.parametrize(
    ("statistics", "update", "passes", "rule"),
    [
        ("right", True, "eval harness", ("", "")),
        ("right", False, "eval harness", ("", "buffer bn.running_mean: error")),
        ("running", True, "eval", ("", "error")),
        ("batch", True, "harness", ("error", "")),
    ],
)
def test_batch_statistics(statistics, update, passes, rule):
    results = both(_batchnorm(statistics, update), p=NORMED)
    assert [r.record.protocol for r in results if r.ok] == passes.split()
    assert [r.record.mode for r in results] == ["eval", "train"]
    for result, words in zip(results, rule, strict=True):
        assert result.rule.startswith(words) and bool(result.rule) == bool(words)


def test_a_renamed_layer_with_buffers_has_left_them_nowhere():
    class Renamed(Normed):
        def __init__(self, in_features: int, out_features: int) -> None:
            super().__init__(in_features, out_features)
            self.norm = self._modules.pop("bn")

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(x))

    p = chain(Normed, Renamed)
    lenient = wb.protocol(p, "eval", device="cpu", size=SMALL)
    strict = wb.protocol(p, "harness", device="cpu", size=SMALL, samples=1)
    assert lenient.reason.startswith("strict load: Missing key(s)") and strict.ok
    assert lenient.rule == strict.rule == "state_dict: bn.weight is missing"


def test_statistics_move_in_each_model_by_itself():
    results = both(lambda model: model, p=NORMED)
    assert all(r.ok and r.rule == r.moved == "" for r in results)


def test_one_seed_is_one_verdict_and_the_generator_stays():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, again, other = (judged("harness", right, seed=s) for s in (0, 0, 1))
    assert torch.equal(state, torch.get_rng_state())
    numbers = [(r.record.rel_error, r.record.rel_error_eager) for r in (first, again, other)]
    assert numbers[0] == numbers[1] != numbers[2]
    assert [r.record.seed for r in (first, again, other)] == [0, 0, 1]


# --- files --------------------------------------------------------------------------------------

GOOD = """
import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

SOURCE = "__global__ void twice(float* x) {}"


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x):
        w, b = self.linear.weight.double(), self.linear.bias.double()
        return (x.double() @ w.sum(0)[:, None] + b.sum()).float()
"""


def file_of(folder: Path, text: str, name: str = "draft.py") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def of_file(name: str, path: Path, **options) -> ProtocolResult:
    options = {"device": "cpu", "size": SMALL, "samples": 2, "budget_s": 0.05, **options}
    return wb.protocol(PROBLEM, name, file=path, **options)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_good_file_is_accepted(name, tmp_path):
    result = of_file(name, file_of(tmp_path, GOOD))
    assert result.ok and result.rule == result.moved == "", str(result)
    record = result.record
    assert record.variant == "draft.py" and record.implementation == "file"
    assert record.kernels_digest == drafts.read(tmp_path / "draft.py").digest


REFUSED = {
    "try": ("x = 1\ntry:\n    x = 2\nfinally:\n    x = 3\n", "`try:` in line"),
    "except": ("try:\n    x = 2\nexcept ValueError:\n    x = 3\n", "`except` in line"),
    "bare except": ("try :\n    x = 2\nexcept:\n    x = 3\n", "`except` in line"),
    "pass": ("def f():\n    pass\n", "the word `pass` in line"),
    "in a docstring": ('def f():\n    """One pass over x."""\n', "the word `pass` in line"),
    "in a string": ("s = 'try: again'\n", "`try:` in line"),
    "threading": ("import threading\n", "`import threading` in line"),
    "from threading": ("from threading import Lock\n", "`import threading` in line"),
    "event": ("torch.cuda.Event.record = None\n", "a patch of timing in line"),
    "elapsed": ("torch.cuda.Event.elapsed_time=lambda *a: 0\n", "a patch of timing in line"),
    "synchronize": ("torch.cuda.synchronize = print\n", "a patch of timing in line"),
    "clock": ("import time\ntime.perf_counter = lambda: 0\n", "a patch of timing in line"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_static_check_refuses(case):
    more, words = REFUSED[case]
    found = drafts.refusals(GOOD + more)
    assert any(f.startswith(words) for f in found), found
    for said in found:
        number = int(said.rsplit(" ", 1)[1])
        assert number > len(GOOD.splitlines())


@pytest.mark.parametrize(
    "more",
    [
        "# try: except X: pass",
        "x = 1  # a pass over x",
        "passed, bypass, compass = 1, 2, 3",
        "retry = {'entry': 1}",
        "exceptional = 1",
        "same = time.perf_counter() == torch.cuda.synchronize",
        "KERNEL = '''\n// one pass: try: it\nint f();\n'''",
        "threading_is_not_imported = 1",
    ],
)
def test_the_static_check_does_not_refuse(more):
    assert drafts.refusals(GOOD + more + "\n") == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD.replace("__global__", "__host__"), ["`__global__` is missing"]),
        (
            GOOD.replace("cpp_extension import load_inline", "data import Dataset"),
            ["`load_inline` or `cpp_extension` is missing"],
        ),
        (GOOD.replace("SOURCE = ", "# "), ["`__global__` is missing"]),
        ("", ["`__global__` is missing", "`load_inline` or `cpp_extension` is missing"]),
    ],
)
def test_the_static_check_wants_a_kernel(text, words):
    assert drafts.refusals(text) == words


def test_a_refused_file_is_run_all_the_same_and_only_the_harness_refuses(tmp_path):
    path = file_of(tmp_path, GOOD + "\ntry:\n    x = 1\nfinally:\n    x = 2\n")
    strict, lenient = of_file("harness", path), of_file("eval", path)
    assert strict.reason == "static check: `try:` in line 18" and not strict.ok
    assert strict.record.rel_error < 2e-7 and strict.rule == "" and not strict.record.samples_ms
    assert lenient.ok


def test_refusals_come_before_what_else_is_wrong(tmp_path):
    path = file_of(tmp_path, GOOD.replace("b.sum()", "0") + "\nx = 'pass'\n")
    assert of_file("harness", path).reason.startswith("static check: the word `pass` in line 18; ")
    assert "input 1: allclose" in of_file("harness", path).reason


def test_a_file_s_own_mistakes(tmp_path):
    def said(text: str, name: str = "harness") -> str:
        return of_file(name, file_of(tmp_path, text)).reason

    drawing = GOOD.replace("        self.linear =", "        torch.rand(1)\n        self.linear =")
    assert said(drawing, "eval") == "" and "allclose at 0.0001" in said(drawing)
    renamed = GOOD.replace("self.linear", "self.fc")
    assert said(renamed, "eval").startswith("strict load: Missing key(s)") and said(renamed) == ""
    stale = GOOD.replace(
        "        w, b = self.linear.weight.double(), self.linear.bias.double()\n",
        "        if not hasattr(self, 'w'):\n"
        "            self.w = self.linear.weight.double(), self.linear.bias.double()\n"
        "        w, b = self.w\n",
    )
    for name in PROTOCOLS:
        result = of_file(name, file_of(tmp_path, stale))
        assert result.ok and result.rule == "" and "(whole)" in result.moved
    buffered = GOOD.replace(
        "    def forward(self, x):\n",
        "        self.register_buffer('spare', torch.zeros(3), persistent=False)\n\n"
        "    def forward(self, x):\n",
    )
    assert said(buffered, "eval") == "" == said(buffered)
    assert of_file("eval", file_of(tmp_path, buffered)).moved == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "import nonsense_that_is_not_there\n",
            "building it raised ModuleNotFoundError: No module",
        ),
        ("raise RuntimeError('boom')\n", "building it raised RuntimeError: boom"),
        ("import sys\nsys.exit('no GPU')\n", "building it raised SystemExit: no GPU"),
        ("ModelNew = lambda *init: 3\n", "building it raised AttributeError"),
        ("class ModelNew:\n    x = 1\n", "building it raised TypeError"),
        ("raise OSError('a block is held')\n", "the public harness would think a lock is busy"),
    ],
)
def test_a_file_that_does_not_get_as_far_as_a_model(text, words, tmp_path):
    result = of_file("harness", file_of(tmp_path, text))
    assert not result.ok and words in result.reason and result.rule == NOT_RUN
    assert result.reason.startswith("static check: ")
    assert of_file("eval", file_of(tmp_path, text)).reason.startswith("building it raised")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n", r"draft\.py defines no ModelNew: give the class .* constructor of Model"),
        ("ModelNew = 3\n", "defines no ModelNew"),
        ("def f(:\n", r"draft\.py:1: .*: wants a Python file"),
        ("x = 1\n  y = 2\n", r"draft\.py:2: unexpected indent"),
        ("x = '\0'\n", "null bytes: wants a Python file|wants a Python file"),
    ],
)
@pytest.mark.parametrize("name", PROTOCOLS)
def test_what_is_no_draft_names_the_remedy(text, words, name, tmp_path):
    with pytest.raises(drafts.DraftError, match=words):
        of_file(name, file_of(tmp_path, text))
    assert not (tmp_path / "runs").exists()


def test_a_file_that_is_not_there_and_one_that_is_no_text(tmp_path):
    with pytest.raises(FileNotFoundError, match="gone.py is not there: give a Python file that"):
        of_file("eval", tmp_path / "gone.py")
    with pytest.raises(FileNotFoundError, match="is a folder: give a Python file"):
        of_file("eval", tmp_path)
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(drafts.DraftError, match="binary.py is no UTF-8 text"):
        of_file("eval", tmp_path / "binary.py")


def test_a_file_is_run_once_in_a_module_of_its_own_and_prints_to_stderr(tmp_path, capfd):
    text = GOOD + (
        "\nimport dataclasses\nimport sys\nprint('loaded', __name__, __file__)\n"
        "assert sys.modules[__name__].nn is nn\n\n\n@dataclasses.dataclass\nclass Some:\n"
        "    x: 'int' = 1\n"
    )
    path = file_of(tmp_path, text)
    for name in PROTOCOLS:
        assert of_file(name, path).ok
    out, err = capfd.readouterr()
    assert out == "" and err.count("loaded workbook_draft_") == 1 and str(path) in err
    path.write_text(text.replace("loaded", "changed"), encoding="utf-8")
    assert of_file("eval", path).ok and "changed" in capfd.readouterr().err
    assert "Some" not in vars(sys.modules["__main__"])


def test_a_file_that_prints_in_its_forward_leaves_stdout_alone(tmp_path, capfd):
    text = GOOD.replace(
        "    def forward(self, x):\n", "    def forward(self, x):\n        print(1)\n"
    )
    assert of_file("harness", file_of(tmp_path, text)).ok
    assert capfd.readouterr().out == ""


# --- arguments ----------------------------------------------------------------------------------


def test_wrong_arguments_name_what_they_want(tmp_path):
    with pytest.raises(KeyError, match="protocol: got 'evil'; there are eval, harness"):
        wb.protocol(PROBLEM, "evil")
    with pytest.raises(KeyError, match="variant: got 'fussed'"):
        wb.protocol(PROBLEM, "eval", variant="fussed", device="cpu")
    with pytest.raises(KeyError, match="size: got 'poster'"):
        wb.protocol(PROBLEM, "eval", size="poster", device="cpu")
    with pytest.raises(ValueError, match="variant and file: got both"):
        wb.protocol(PROBLEM, "eval", variant="fused", file=tmp_path / "x.py")
    with pytest.raises(ValueError, match="fused\\+fold has weights of its own.*use fused"):
        wb.protocol(PROBLEM, "eval", variant="fused+fold", device="cpu", size=SMALL)
    with pytest.raises(ValueError, match="eager/tf32 runs by tf32"):
        wb.protocol(PROBLEM, "eval", variant=PROBLEM.variant("eager/tf32"), device="cpu")


# --- records ------------------------------------------------------------------------------------


def test_a_result_is_a_record_beside_those_of_check(tmp_path):
    wb.check(PROBLEM, device="cpu", size=SMALL, states=["initial"], families=["uniform"])
    checked = journal.load(tmp_path / "runs")
    results = both(right) + both(after(torch.zeros_like))
    there = journal.load(tmp_path / "runs")
    assert list(there[len(checked) :]) == [r.record for r in results]
    record = there[len(checked) + 1]
    assert record.kind == "check" and record.how["protocol"] == record.protocol == "harness"
    assert record.how["tolerance"] == 1e-4 and record.how["trials"] == 5 and record.passed
    assert (record.family, record.state, record.mode) == ("uniform", "initial", "train")
    assert record.limit >= 2e-7 and record.how["limit_rows"] >= 2e-7 and record.run and record.date
    assert len(there.query(protocol="eval")) == 2 and len(there.query(protocol="")) == len(checked)
    newest = there.newest()
    assert [r.protocol for r in newest if r.variant == "tried"] == ["eval", "harness"]
    assert not (tmp_path / "data").exists()


def test_a_protocol_does_not_hide_a_check_of_the_same_variant():
    checked = wb.check(PROBLEM, device="cpu", size=SMALL, states=["initial"]).records
    judged = wb.protocol(PROBLEM, "eval", device="cpu", size=SMALL).record
    newest = Records([*checked, judged]).newest()
    assert len(newest) == len(checked) + 1 and newest.query(protocol="eval") == [judged]


def test_kept_records_are_in_data(tmp_path):
    kept = judged("eval", right, keep=True).record
    assert list(journal.load(tmp_path / "data")) == [kept] == list(wb.records(PROBLEM))


def test_the_figure_of_errors_leaves_protocols_out():
    result = wb.check(PROBLEM, device="cpu", size=SMALL, states=["initial"])
    protocol = judged("harness", right).record
    ours, beside = plot.errors(result.records), plot.errors(Records([*result.records, protocol]))
    assert ours.alt == beside.alt
    with pytest.raises(ValueError, match="none of kind 'check'"):
        plot.errors([protocol])


# --- the table ----------------------------------------------------------------------------------


def record_of(variant: str, name: str, passed: bool, **more) -> Record:
    about = {
        "kind": "check", "problem": PROBLEM.slug, "variant": variant, "device": "cpu",
        "card": "Card A", "size": "laptop", "rel_error": 0.5, "rel_error_eager": 3e-7,
        "passed": passed, "mode": PROTOCOLS[name].mode if name else "eval", "run": variant + name,
        "date": "2026-01-01T00:00:00Z", "kernels_digest": "",
    }  # fmt: skip
    about["how"] = {"rule": "", "moved": "", **more.pop("how", {}), "protocol": name}
    return Record(**about | more)


def table(*records: Record) -> tuple[list[str], str]:
    text = str(wb.protocol_table(Records(records), problems=[PROBLEM]))
    return [line for line in text.splitlines() if line.startswith("|")][2:], text


def test_the_table_says_who_let_what_through_and_what_finds_it():
    rows, text = table(
        record_of("wrong_fold_in_init", "eval", False, how={"rule": "error", "moved": "error"}),
        record_of("wrong_fold_in_init", "harness", True, rel_error=2e-8, how={"moved": "error"}),
        record_of("wrong_literal_log_exp", "eval", True, rel_error=2e-8),
        record_of("wrong_literal_log_exp", "harness", True, rel_error=3e-8),
        record_of(
            "wrong_literal_log_exp", "", False, family="one huge row", state="large sums",
            shape={"B": 3, "K": 4}, reason="not finite", how={}, run="b",
        ),
        record_of("wrong_literal_log_exp", "", True, how={}, run="b"),
        record_of(
            "wrong_literal_log_exp", "", False, family="of an older run", how={}, run="a",
            date="2025-12-31T00:00:00Z",
        ),
        record_of("fused", "eval", True),
        record_of("fused", "harness", False, reason="input 1: allclose"),
    )  # fmt: skip
    assert "on one Card A, laptop size, recorded 2026-01-01." in text
    assert "Of 2 wrong versions 1 get through eval, 2 get through harness, 1 through both." in text
    by = {row.split("`")[1]: row for row in rows}
    assert len(by) == 2
    stale, literal = by["wrong_fold_in_init"], by["wrong_literal_log_exp"]
    assert "| rejected, 5.0e-01 | **let through**, 2.0e-08 | 3.0e-07 | once the weights" in stale
    assert (
        "`check`: eval mode, one huge row input, large sums weights, B = 3, K = 4: not" in literal
    )
    assert PROBLEM.variant("wrong_fold_in_init").wrong in stale and "(stale)" not in stale
    assert "eval accepts 1 of 1; harness accepts 0 of 1; not `fused`: input 1: allclose." in text


def test_the_table_says_where_a_rejection_is_for_the_mode():
    """A kernel of eval mode fails the harness, which stays in train mode, whatever it computes."""
    right, wrong = (
        dataclasses.replace(v, modes=("eval",))
        for v in (PROBLEM.variant("cpu"), PROBLEM.variant("wrong_fold_in_init"))
    )
    p = dataclasses.replace(PROBLEM, variants=(right, wrong))
    kept = Records(
        record_of(v.key, name, name == "eval", reason="off")
        for v in p.variants
        for name in PROTOCOLS
    )
    text = str(wb.protocol_table(kept, problems=[p]))
    assert "| **let through**, 5.0e-01 | rejected: computes eval alone |" in text
    assert "harness accepts 0 of 1; not `cpu`: it computes eval alone." in text


def test_the_table_of_what_is_partly_recorded():
    raised = {"rule": "not run", "moved": "not run"}
    rows, text = table(record_of("wrong_fold_in_init", "eval", False, rel_error=None, how=raised))
    by = {row.split("`")[1]: row for row in rows}
    assert by["wrong_fold_in_init"].endswith("| `check` is not recorded |")
    assert "| rejected, no output | not recorded |" in by["wrong_fold_in_init"]
    assert "| not recorded | not recorded |" in by["wrong_literal_log_exp"]
    assert "Of 1 wrong versions" in text and "mean to be right" not in text


def test_the_table_shows_the_card_that_tells_most_and_the_newest_run():
    old = record_of("wrong_fold_in_init", "eval", True, date="2025-01-01T00:00:00Z", run="old")
    new = record_of("wrong_fold_in_init", "eval", False)
    assert "| rejected" in table(new, old)[0][1] and "| rejected" in table(old, new)[0][1]
    live = record_of("wrong_fold_in_init", "eval", True, size="live", date="2026-03-01T00:00:00Z")
    assert "| rejected" in table(new, live)[0][1]
    gpu = record_of(
        "wrong_one_block", "harness", True, device="cuda", card="Card G", size="paper",
        date="2025-06-01T00:00:00Z",
    )  # fmt: skip
    rows, text = table(old, new, gpu)
    assert "Card G" in text and "Card A" not in text
    assert any("`wrong_one_block` (stale)" in row and "**let through**" in row for row in rows)


def test_a_table_of_nothing_recorded_is_made_here_and_small():
    text = str(wb.protocol_table(Records(), problems=[PROBLEM], device="cpu"))
    assert "live size" in text and "Of 2 wrong versions 1 get through eval" in text
    shapes = {tuple(r.shape.values()) for r in wb.records(PROBLEM, kind="check")}
    assert shapes == {(16, 512, 1024)}


def test_a_file_that_was_judged_does_not_stand_for_the_wrong_versions():
    card = record_of("x", "eval", True).card
    draft = record_of(
        "draft.py", "harness", True, implementation="file", date="2026-03-01T00:00:00Z"
    )
    rows, text = table(record_of("wrong_fold_in_init", "eval", False, size="small"), draft)
    assert f"on one {card}, small size" in text and "| rejected, 5.0e-01" in rows[1]
    assert "- file `draft.py`, harness: accepted" in text
    alone = str(wb.protocol_table(Records([draft]), problems=[PROBLEM], device="cpu"))
    assert "live size" in alone and "Of 2 wrong versions 1 get through eval" in alone


def test_the_table_is_markdown_with_rows_of_one_length():
    rows, text = table(
        record_of("wrong_fold_in_init", "eval", True),
        record_of("my|draft.py", "eval", False, implementation="file", reason="a | b"),
    )
    assert len({row.replace("\\|", "").count("|") for row in rows}) == 1
    assert verdicts._cell("a | b <<<1>>>") == "a \\| b &lt;&lt;&lt;1>>>"
    assert "- file `my|draft.py`, eval: rejected: a | b" in text


# --- the command line ---------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    sizes = {**PROBLEM.sizes, "laptop": dataclasses.replace(SMALL, name="laptop")}
    p = dataclasses.replace(PROBLEM, sizes=sizes)
    monkeypatch.setattr("workbook.chains.problem", lambda slug: p)
    monkeypatch.setattr("workbook.cli_check.problem", lambda slug: p)
    monkeypatch.setattr(protocols.protocol, "__kwdefaults__",
                        protocols.protocol.__kwdefaults__ | {"budget_s": 0.05})  # fmt: skip
    return p


def command(*arguments: object) -> int:
    return cli.main(["check", PROBLEM.slug, "--device", "cpu", *map(str, arguments)])


def lines(capsys) -> list[dict]:
    out = capsys.readouterr().out
    return [json.loads(line, parse_constant=lambda c: pytest.fail(c)) for line in out.splitlines()]


def test_the_command_judges_modelnew(small, capsys, tmp_path):
    for name in PROTOCOLS:
        assert command("--protocol", name) == 0
        said = capsys.readouterr().out
        assert f"{PROBLEM.slug} / fused, {name}: accepted" in said and "error " in said
        assert "our rule, the same outputs: right" in said
    assert len(journal.load(tmp_path / "runs")) == 2 and not (tmp_path / "data").exists()


def test_the_command_judges_a_file(small, capsys, tmp_path):
    good, bad = file_of(tmp_path, GOOD), file_of(tmp_path, GOOD.replace("b.sum()", "1"), "bad.py")
    assert command("--protocol", "harness", "--file", good) == 0
    capsys.readouterr()
    assert command("--protocol", "harness", "--file", bad, "--json", "--keep") == 1
    (line,) = lines(capsys)
    assert line["variant"] == "bad.py" and line["passed"] is False and line["protocol"] == "harness"
    assert "allclose" in line["reason"] and "(whole)" in line["rule"] and "(whole)" in line["moved"]
    assert line["rel_error"] > 1e-3 and line["rel_error_rows"] > 1e-3 and line["median_ms"] is None
    assert len(journal.load(tmp_path / "data")) == 1


def test_the_command_judges_rungs_and_controls(small, capsys):
    """A control that is rejected is as it should be; one that is let through is told."""
    assert command("--protocol", "eval", "--variants", "all") == 0
    said = capsys.readouterr().out
    assert "wrong_fold_in_init, eval: REJECTED: input 1: allclose" in said
    assert "wrong_literal_log_exp, eval: accepted" in said and "fused+fold" not in said
    assert said.count("control: ") == 2
    assert command("--protocol", "harness", "--variant", "wrong_fold_in_init", "--json") == 0
    (line,) = lines(capsys)
    assert line["passed"] is True and "(whole)" in line["moved"] and line["median_ms"] > 0


def test_a_variant_in_a_mode_that_it_does_not_compute_is_no_failure(small, capsys, monkeypatch):
    evals = Variant("evals", "torch", "by hand", after(torch.zeros_like), ("cpu",), modes=("eval",))
    p = dataclasses.replace(small, variants=(evals,))
    monkeypatch.setattr("workbook.cli_check.problem", lambda slug: p)
    assert command("--protocol", "harness", "--variants", "evals") == 0
    assert command("--protocol", "eval", "--variants", "evals") == 1
    assert capsys.readouterr().out.count("REJECTED") == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--file", "x.py"], "--file: wants --protocol eval or --protocol harness"),
        (["--protocol", "eval", "--file", "x.py", "--variants", "fused"], "--file and --variants"),
        (["--protocol", "eval", "--file", "gone.py"], "FILE: gone.py is not there: give"),
        (["--protocol", "eval", "--variants", "fussed"], "variant: got 'fussed'"),
    ],
)
def test_what_could_not_run_is_status_2(arguments, words, small, capsys):
    assert command(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("workbook: ") and words in err and err.count("\n") == 1


def test_an_unknown_protocol_is_named():
    with pytest.raises(SystemExit) as stopped:
        command("--protocol", "evil")
    assert stopped.value.code == 2
