"""The rule and its judge: hand-made wrong candidates are rejected, each for what is wrong with it.

The candidates are functions over the model, so that no compiler is needed to see the teeth.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable

import pytest
import torch
from sum_chain import PROBLEM, needs_compiler
from torch import Tensor, nn

import workbook as wb
from workbook import accuracy, errors, families, journal, paths, spec
from workbook.accuracy import CheckFailed
from workbook.errors import errors_of, limits_of
from workbook.precision import poisoned
from workbook.spec import Size, Variant
from workbook.variants import kernels_digest

SMALL = Size("small", (64, 48), 33)
INF, NAN = math.inf, math.nan
HERE = [v for v in PROBLEM.variants if "cpu" in v.devices]
CONTROLS = [v.key for v in HERE if v.is_control]


@pytest.fixture(autouse=True)
def _runs(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBOOK_RUNS", str(tmp_path / "runs"))


def candidate(make: Callable[[nn.Module], Callable[[Tensor], Tensor]]) -> Variant:
    return Variant("tried", "torch", "by hand", make, ("cpu",))


def judged(make, **options) -> accuracy.CheckResult:
    """Checked at a small size, all families and states, until the first failure."""
    tried = candidate(make)
    return wb.check(PROBLEM, variant=tried, size=SMALL, device="cpu", stop=True, **options)


def right(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        weight, bias = model.linear.weight.double(), model.linear.bias.double()
        return (x.double() @ weight.sum(0)[:, None] + bias.sum()).float()

    return run


def after(change: Callable[[Tensor], Tensor]):
    """The right candidate with its output changed."""
    return lambda model: lambda x: change(right(model)(x))


# --- the numbers ------------------------------------------------------------------------------


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


@pytest.mark.parametrize(
    ("y", "exact", "whole", "worst"),
    [
        (column(3, 4), column(3, 4), 0, 0),
        (column(3.3, 4), column(3, 4), 0.3 / 5, 0.1),  # the small row is the worst
        (column(3, 4, 0), column(3, 4, 0), 0, 0),  # 0/0 is no error
        (column(3, 4, 1e-30), column(3, 4, 0), 1e-30 / 5, INF),  # something where nothing is
        (column(0, 0), column(3, 4), 1, 1),
        (column(NAN, 4), column(3, 4), INF, INF),
        (column(INF, 4), column(3, 4), INF, INF),
        (column(7, 4.4), column(INF, 4), 0.1, 0.1),  # rows that are not finite are left out
        (column(7, 4), column(NAN, 4), 0, 0),
        (column(1, 2), column(NAN, -INF), 0, 0),
        (column(), column(), 0, 0),
        (column(3, 4), column(3), INF, INF),  # another shape
        (torch.tensor(3.0), column(3), INF, INF),
    ],
)
def test_errors_by_hand(y, exact, whole, worst):
    got = errors_of(y, exact)
    assert got == pytest.approx((whole, worst), rel=1e-12)


def test_errors_of_rows_of_several_elements_and_of_integers():
    exact = torch.tensor([[3.0, 4.0], [0.0, 1.0]], dtype=torch.float64)
    y = torch.tensor([[3.0, 4.0], [0.0, 1.1]], dtype=torch.float64)
    assert errors_of(y, exact) == pytest.approx((0.1 / math.sqrt(26), 0.1))
    whole, row = errors_of(exact.to(torch.int32), exact)
    assert (whole, row) == (0, 0)
    partly = torch.tensor([[NAN, 4.0], [0.0, 1.0]], dtype=torch.float64)
    assert errors_of(y, partly) == pytest.approx((0.1, 0.1)), "a row with one NaN is left out whole"


@pytest.mark.parametrize(
    ("eager", "route", "limits"),
    [
        ((1e-6, 3e-6), "float32", (2e-6, 6e-6)),
        ((1e-8, 0.0), "float32", (2e-7, 2e-7)),
        ((1e-8, 1e-3), "float32", (2e-7, 2e-3)),
        ((1e-3, 2e-3), "tf32", (1.2e-3, 2.4e-3)),
        ((0.0, 1e-7), "tf32", (2e-7, 2e-7)),
    ],
)
def test_the_rule(eager, route, limits):
    assert limits_of(eager, route) == pytest.approx(limits, rel=1e-12)


def test_the_oracle_is_the_reference_in_float64_and_leaves_the_model_alone():
    model = PROBLEM.model(SMALL)
    (x,) = PROBLEM.inputs(SMALL)
    exact = errors.oracle(model, x, rows=7)  # in blocks, the last one smaller
    z = x.double() @ model.linear.weight.double().T + model.linear.bias.double()
    torch.testing.assert_close(exact, z.sum(1, keepdim=True), rtol=1e-13, atol=1e-13)
    assert exact.dtype == torch.float64 and not exact.requires_grad
    assert model.linear.weight.dtype == torch.float32
    assert errors.oracle(model, x[:0]).shape == (0, 1)


# --- what is right is accepted, controls are not ----------------------------------------------


@pytest.mark.parametrize("variant", ["fused", "eager"])
def test_right_variants_are_accepted(variant):
    result = wb.check(PROBLEM, variant=variant, device="cpu", size=SMALL)
    assert result.ok and result.reason == "" and result.require() is result
    cases = {(r.family, r.state, r.seed, r.size) for r in result.records}
    assert len(cases) == len(result.records) == 5 * 6 + 1 + len(spec.EDGES) + 1
    assert {r.family for r in result.records} == {*families.FAMILIES, *families.SPECIAL}
    assert {r.state for r in result.records} == set(families.STATES)
    assert {r.seed for r in result.records} == {0, 1}
    assert {r.shape["B"] for r in result.records} == {33, 1, 7, 1031, 0, 5, 3}


def test_a_right_candidate_made_by_hand_is_accepted():
    assert judged(right).ok, judged(right).reason


@pytest.mark.parametrize("name", CONTROLS)
def test_controls_are_rejected(name):
    result = wb.check(PROBLEM, variant=name, device="cpu", size=SMALL, stop=True)
    assert not result.ok and not result.records[-1].passed
    with pytest.raises(CheckFailed, match=f"{PROBLEM.slug}, {name}: .* input, .* weights, B="):
        result.require()


def test_controls_say_why():
    stale = wb.check(PROBLEM, variant="wrong_fold_in_init", device="cpu", size=SMALL, stop=True)
    assert "trained weights" in stale.reason and "error" in stale.reason
    huge = wb.check(
        PROBLEM, variant="wrong_literal_log_exp", device="cpu", size=SMALL, stop=True,
        families=["one huge row"], states=["large sums"],
    )  # fmt: skip
    assert "not finite where eager's are" in huge.reason


class Remembers:
    """Returns the output of the call before."""

    def __init__(self, model: nn.Module) -> None:
        self.run, self.last = right(model), None

    def __call__(self, x: Tensor) -> Tensor:
        y = self.run(x)
        last, self.last = self.last, y
        return y if last is None else last


class FirstCall:
    """Returns the output of its first call on an input of that shape."""

    def __init__(self, model: nn.Module) -> None:
        self.run, self.first = right(model), {}

    def __call__(self, x: Tensor) -> Tensor:
        return self.first.setdefault(x.shape, self.run(x)).clone()


class OneMemory:
    """Writes every output into the same memory, a little different each time."""

    def __init__(self, model: nn.Module) -> None:
        self.run, self.calls, self.memory = right(model), 0, {}

    def __call__(self, x: Tensor) -> Tensor:
        y = self.memory.setdefault(x.shape, torch.empty(x.size(0), 1))
        self.calls += 1
        return y.copy_(self.run(x) * (1 + self.calls * 2.0**-23))


def _last_row_unwritten(model):
    def run(x: Tensor) -> Tensor:
        y = torch.empty(x.size(0), 1)
        y[:-1] = right(model)(x)[:-1]
        return y

    return run


def _shifts_x(model):
    def run(x: Tensor) -> Tensor:
        y = right(model)(x)
        x.mul_(1.5)
        return y

    return run


def _raises(error: Exception):
    def make(model):
        def run(x: Tensor) -> Tensor:
            raise error

        return run

    return make


def _skips_a_row(y: Tensor) -> Tensor:
    y = y.clone()
    y[y.size(0) // 3 :][:1] = 0
    return y


def _noisy(y: Tensor) -> Tensor:
    return torch.nextafter(y, torch.where(torch.rand_like(y) < 0.5, INF, -INF))


WRONG = {
    "zeros": (after(torch.zeros_like), r"uniform input, initial .* error 1.0e\+00 \(whole\)"),
    "a constant": (after(lambda y: y.mean().expand_as(y).clone()), "error .* limit"),
    "one number for ever": (after(lambda y: torch.full_like(y, 3.0)), "error .* limit"),
    "flat": (after(lambda y: y.squeeze(1)), r"shape: got torch.Size\(\[33\]\), wants .*\[33, 1\]"),
    "a row too many": (after(lambda y: torch.cat([y, y[:1]])), "shape: got"),
    "a row too few": (after(lambda y: y[1:]), "shape: got"),
    "scalar": (after(lambda y: y.sum()), "shape: got"),
    "float64": (after(lambda y: y.double()), "dtype: got torch.float64, wants torch.float32"),
    "half": (after(lambda y: y.half()), "dtype: got torch.float16, wants torch.float32"),
    "a list": (after(lambda y: [y]), "output: got a list, wants a Tensor"),
    "nothing": (after(lambda y: None), "output: got a NoneType, wants a Tensor"),
    "writes into x": (_shifts_x, "the input was modified"),
    "last row unwritten": (_last_row_unwritten, "1 of 33 outputs are not finite where eager's"),
    "noisy": (after(_noisy), "two calls on the same input differ"),
    "noisy, in one memory": (OneMemory, "two calls on the same input differ"),
    "the call before": (Remembers, "trained weights, .*: two calls on the same input differ"),
    "the first call for ever": (FirstCall, "trained weights, .*: error"),
    "a NaN lost": (after(lambda y: y.nan_to_num(0.0)), "one NaN input, .* 1 of 33 .* not NaN"),
    "a NaN everywhere": (
        after(lambda y: y * torch.where(y.isnan().any(), NAN, 1.0)),
        "one NaN input, .* 32 of 33 outputs are not finite",
    ),
    "a row skipped": (after(_skips_a_row), r"error 1.0e\+00 \(worst row\)|error .* \(whole\)"),
    "the huge row skipped": (
        after(lambda y: torch.where(y.abs() > 1e6, 0.0, y)),
        "one huge row input|large|scaled|wide",
    ),
    "bfloat16 inside": (after(lambda y: y.bfloat16().float()), "error .* limit"),
    "raises": (_raises(RuntimeError("boom\nmore")), "raised RuntimeError: boom$"),
    "raises another": (_raises(IndexError("no row 3")), "raised IndexError: no row 3"),
    "raises without a word": (_raises(NotImplementedError()), "raised NotImplementedError: no"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_candidates_are_rejected_for_what_is_wrong(name):
    make, words = WRONG[name]
    result = judged(make)
    assert not result.ok
    with pytest.raises(CheckFailed, match=words):
        result.require()


def test_a_candidate_that_can_not_be_made_is_a_failed_case():
    def make(model):
        raise KeyError("no weight")

    result = judged(make)
    assert result.reason.endswith("raised KeyError: 'no weight'") and len(result.records) == 1


def test_an_unwritten_row_shows_even_if_the_memory_happens_to_hold_the_right_value():
    """Poison is in what the candidate allocates itself: with the right bits there, it shows."""
    with poisoned():
        assert torch.empty(5).isnan().all() and torch.empty(3, 2).new_empty(4).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ZeroDivisionError), poisoned():
            raise ZeroDivisionError
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_without_stop_every_case_is_run():
    zeros = candidate(after(torch.zeros_like))
    result = wb.check(PROBLEM, variant=zeros, device="cpu", size=SMALL, states=["initial"])
    assert len(result.records) == 5 + 1 + len(spec.EDGES) + 1
    assert [r.size for r in result.records if r.passed] == ["none"], "no row, no error"
    assert result.worst.passed is False


def test_worst_is_the_case_nearest_to_its_limit_by_whole_or_row():
    def case(whole, row, passed=True):
        return journal.Record(
            kind="check", problem="p", rel_error=whole, rel_error_rows=row, limit=1e-6,
            how={"limit_rows": 1e-5}, passed=passed,
        )  # fmt: skip

    far, near, row = case(1e-7, 1e-7), case(5e-7, 1e-6), case(1e-7, 9e-6)
    failed = case(None, None, passed=False)
    for records, worst in (([far, near], near), ([near, row, far], row), ([failed, row], failed)):
        result = accuracy.CheckResult("p", "v", journal.Records(records))
        assert result.worst is worst


# --- a blind rule -------------------------------------------------------------------------------


def test_a_rule_that_accepts_a_left_out_step_is_refused():
    """With x and biases such that a left-out step changes nothing, nobody is found right."""
    same = dataclasses.replace(
        PROBLEM, omissions={"nothing left out": lambda m, x: m(x), "zeros": lambda m, x: 0 * m(x)}
    )
    result = wb.check(same, device="cpu", size=SMALL, states=["initial"])
    assert all(r.passed for r in result.records)
    assert result.reason == "the rule is blind here: it would accept nothing left out"
    with pytest.raises(CheckFailed, match="blind here: it would accept nothing left out"):
        result.require()
    assert "WRONG" in str(result) and "accepted: the rule is blind" in result._repr_html_()


@pytest.mark.parametrize("family", families.FAMILIES)
def test_wrong_outputs_are_scored_whatever_family_is_asked_for(family):
    result = wb.check(PROBLEM, device="cpu", size=SMALL, families=[family], states=["initial"])
    names = {score["name"] for score in result.scores}
    assert names == {"zeros", "a constant (the mean)", *PROBLEM.omissions}
    assert not any(score["accepted"] for score in result.scores) and result.ok


def test_no_case_is_no_pass():
    result = accuracy.CheckResult("p", "v", journal.Records())
    assert not result.ok and result.reason == "no case was run"


# --- states and families ------------------------------------------------------------------------


@pytest.mark.parametrize("name", families.STATES)
def test_a_state_moves_what_it_says(name):
    model = PROBLEM.model(SMALL)
    weight, bias = (p.clone() for p in model.parameters())
    with torch.no_grad():
        families.STATES[name](model, torch.Generator().manual_seed(0))
    moved = {
        "initial": (False, False), "trained": (True, True), "large bias": (False, True),
        "large sums": (True, True), "cancelling": (True, False), "scaled rows": (True, False),
    }[name]  # fmt: skip
    after_ = model.linear.weight, model.linear.bias
    assert tuple(not torch.equal(a, b) for a, b in zip(after_, (weight, bias))) == moved  # noqa: B905
    if name == "cancelling":
        sums = model.linear.weight.double().sum(0).abs().max()
        assert sums < 2e-3 * model.linear.weight.double().abs().sum(0).max()
    if name == "large sums":
        assert (model.linear.weight > 0).all() and model(torch.rand(1, 64)).min() > 88


@pytest.mark.parametrize("name", [*families.FAMILIES, *families.SPECIAL])
@pytest.mark.parametrize("shape", [(5, 7), (1, 1), (0, 3)])
def test_a_family_is_of_the_shape_and_repeats(name, shape):
    draw = {**families.FAMILIES, **families.SPECIAL}[name]
    x, again = (draw(*shape, torch.Generator().manual_seed(3)) for _ in range(2))
    assert x.shape == shape and x.dtype == torch.float32
    torch.testing.assert_close(x, again, rtol=0, atol=0, equal_nan=True)
    assert int(x.isnan().sum()) == (name == "one NaN" and shape[0] > 0)


# --- what is left behind ------------------------------------------------------------------------


def test_records_are_appended_and_read_back(tmp_path):
    first = wb.check(PROBLEM, device="cpu", size=SMALL, states=["initial"])
    second = wb.check(PROBLEM, device="cpu", size=SMALL, states=["initial"])
    there = journal.load(tmp_path / "runs")
    assert list(there) == [*first.records, *second.records]
    record = there[0]
    assert record.kind == "check" and record.problem == PROBLEM.slug and record.passed
    assert record.variant == "fused" and record.kernels_digest and record.date and record.card
    assert record.rel_error_eager > 0 and record.limit >= 2e-7 and record.how["limit_rows"] >= 2e-7
    assert first.records[0].run != second.records[0].run
    assert list(wb.records(PROBLEM, kind="check", run=record.run)) == list(first.records)


def test_failed_cases_are_recorded_too(tmp_path):
    judged(_raises(RuntimeError("boom")))
    (record,) = journal.load(tmp_path / "runs")
    assert record.passed is False and record.reason == "raised RuntimeError: boom"


def test_keep_writes_to_data_too(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "data", lambda: tmp_path / "data")
    result = wb.check(PROBLEM, device="cpu", size=SMALL, states=["initial"], keep=True)
    assert list(journal.load(tmp_path / "data")) == list(result.records)
    wb.check(PROBLEM, device="cpu", size=SMALL, states=["initial"])
    assert len(journal.load(tmp_path / "data")) == len(result.records)


def test_results_show_themselves_and_become_pandas():
    result = wb.check(PROBLEM, device="cpu", size=SMALL, states=["initial"])
    assert f"{PROBLEM.slug} / fused: right in {len(result.records)} cases" in str(result)
    assert "nearest to its limit" in str(result)
    page = result._repr_html_()
    assert "<table>" in page and "bias left out" in page and page.count("rejected") == 7
    frame = result.frame()
    assert len(frame) == len(result.records) and {"family", "state", "rel_error"} <= {*frame}
    wrong = judged(_raises(RuntimeError("<b>boom</b>")))
    assert "WRONG in 1 case:" in str(wrong) and "&lt;b&gt;boom" in wrong._repr_html_()
    assert "<b>boom" not in wrong._repr_html_()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"families": []}, "families: got ''.*normal"),
        ({"variant": "fussed"}, "variant: got 'fussed'.*fused"),
        ({"size": "poster"}, "size: got 'poster'.*laptop"),
        ({"families": ["gaussian"]}, "families: got 'gaussian'.*normal"),
        ({"states": ["tired"]}, "states: got 'tired'.*trained"),
    ],
)
def test_unknown_names_are_told(options, words):
    with pytest.raises(KeyError, match=words):
        wb.check(PROBLEM, device="cpu", **{"size": SMALL, **options})


# --- the digest of the sources -------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """kernels/ in a scratch folder, and a variant that points there."""
    folder = tmp_path / "kernels"
    shutil.copytree(paths.kernels(), folder)
    monkeypatch.setattr(paths, "kernels", lambda: folder)
    file = folder / PROBLEM.slug / "cpu.cpp"
    variant = dataclasses.replace(PROBLEM.variant("cpu"), source=file, files=(file,))
    return folder, variant


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("matmul_sum_max_mean_logsumexp/cpu.cpp", True),
        ("matmul_sum_max_mean_logsumexp/problem.h", True),
        ("matmul_sum_max_mean_logsumexp/binding.cpp", True),
        ("common/stable.h", True),
        ("matmul_sum_max_mean_logsumexp/cpu_02_folded_one_chain.cpp", False),
        ("matmul_sum_max_mean_logsumexp/05_whole_row_in_flight.cu", False),
    ],
)
def test_the_digest_changes_with_the_sources_of_a_variant_and_with_no_other(copied, file, changes):
    folder, variant = copied
    before = kernels_digest(PROBLEM.slug, variant, "cpu")
    assert before == kernels_digest(PROBLEM.slug, variant, "cpu") and len(before) == 16
    path = folder / file
    path.touch()  # a time is no change
    assert kernels_digest(PROBLEM.slug, variant, "cpu") == before
    text = path.read_text(encoding="utf-8")
    path.write_text(text + "\n// changed\n", encoding="utf-8")
    assert (kernels_digest(PROBLEM.slug, variant, "cpu") != before) == changes
    path.write_text(text, encoding="utf-8")
    assert kernels_digest(PROBLEM.slug, variant, "cpu") == before


def test_the_digest_of_plain_torch_is_empty_and_of_a_gpu_another():
    assert kernels_digest(PROBLEM.slug, PROBLEM.variant("eager"), "cpu") == ""
    fused = PROBLEM.variant("fused")
    assert kernels_digest(PROBLEM.slug, fused, "cpu") != kernels_digest(PROBLEM.slug, fused, "cuda")


WITH_A_PRODUCT = {  # what counts in variants that call shared kernels, on a GPU
    "split_product/split_product.cu": True,
    "split_product/split_product.h": True,
    "split_product/binding.cpp": True,
    "split_rows/split_rows.cu": True,
    "split_rows/binding.cpp": True,
    "split_weights/split_weights.cu": True,
    "common/split_gemm.cuh": True,
    "common/hopper.cuh": True,  # by way of split_gemm.cuh
    "common/exponent.cuh": True,
    "gemm_batchnorm_scale_softmax/binding.cpp": True,
    "gemm_batchnorm_scale_softmax/04_tiles.cu": True,
    "gemm_batchnorm_scale_softmax/02_three_walks.cu": False,
    "column_sum/column_sum.cu": False,
    "common/simd.h": False,
}


@pytest.mark.parametrize("name", ["05_split_product", "train_split_product", "fused"])
@pytest.mark.parametrize("file", WITH_A_PRODUCT)
def test_the_digest_counts_shared_kernels(name, file, copied):
    folder, _ = copied
    p = wb.problem("gemm_batchnorm_scale_softmax")
    found = p.variant(name)
    files = tuple(folder / f.parent.name / f.name for f in found.files)
    variant = dataclasses.replace(found, files=files)
    before = [kernels_digest(p.slug, variant, device) for device in ("cuda", "cpu")]
    path = folder / file
    path.write_text(path.read_text(encoding="utf-8") + "\n// changed\n", encoding="utf-8")
    after = [kernels_digest(p.slug, variant, device) for device in ("cuda", "cpu")]
    assert (after[0] != before[0]) == WITH_A_PRODUCT[file]
    on_a_cpu = file == "common/simd.h" and name == "fused"  # its narrow product
    if not file.startswith(p.slug):
        assert (after[1] != before[1]) == on_a_cpu


@needs_compiler
@pytest.mark.parametrize("rung", ["cpu_02_folded_one_chain", "cpu"])
def test_the_folded_cpu_rungs_are_right(rung):
    result = wb.check(PROBLEM, variant=rung, device="cpu", size=SMALL)
    assert result.ok, result.reason
