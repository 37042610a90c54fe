"""Sentences and tables from records: each number against one worked out by hand."""

from __future__ import annotations

import dataclasses
import re
import shutil

import pytest
import torch
from sum_chain import PROBLEM, needs_nvcc

import workbook as wb
from workbook import build, journal, machine, ops, paths, tables
from workbook.journal import Record, Records
from workbook.limits import Ceilings
from workbook.results import BenchResult
from workbook.variants import kernels_digest

SLUG = PROBLEM.slug
CARD = "NVIDIA H100 80GB HBM3"
ABOUT = {
    "kind": "bench", "problem": SLUG, "route": "float32", "device": "cuda", "card": CARD,
    "size": "paper", "mode": "eval", "shape": {"B": 1024, "K": 8192, "N": 8192}, "run": "r1",
    "date": "2026-11-20T10:00:00Z", "commit": "5f1a0ff2bcdef0123456", "how": {"flush": "read"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _places(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBOOK_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(paths, "data", lambda: tmp_path / "data")


def timed(variant: str, *samples: float, **more) -> Record:
    return Record(variant=variant, samples_ms=samples, **ABOUT | more)


def predicted(variant: str, ms: float, **more) -> Record:
    about = ABOUT | {"kind": "prediction", "how": {}}
    return Record(variant=variant, value=ms, unit="ms", **about | more)


# --- the derivation ---------------------------------------------------------------------------


def test_the_derivation_has_each_step_with_its_formula_reason_and_number():
    parts = str(wb.derivation(PROBLEM)).split("\n\n**")
    assert len(parts) == len(PROBLEM.steps)
    assert "the definition itself" in parts[0]
    for number, (step, part) in enumerate(zip(PROBLEM.steps, parts, strict=True)):
        assert step.title in part and step.reason in part and f"$${step.formula}$$" in part
        if number:
            words = "agrees with the chain to" if step.holds else "differs from the chain by"
            apart = float(re.search(rf"{words} (\S+), relatively, in float64", part)[1])
            assert (apart < 1e-13) if step.holds else (apart > 1e-2), step.title


@pytest.mark.parametrize(("number", "claim"), [(4, "hold"), (3, "be wrong")])
def test_a_step_that_lies_stops_the_derivation(number, claim):
    step = PROBLEM.steps[number]
    liar = dataclasses.replace(step, holds=not step.holds)
    with pytest.raises(AssertionError, match=f"is said to {claim}, but differs by"):
        wb.derivation(dataclasses.replace(PROBLEM, steps=(PROBLEM.steps[0], liar)))


def test_a_derivation_leaves_the_random_state_alone():
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    wb.derivation(PROBLEM)
    assert torch.equal(torch.rand(3), wanted)


# --- prediction against measurement -------------------------------------------------------------


def test_outcome_counts_what_was_predicted():
    predictions = Records(
        [
            predicted("eager", 2.0),
            predicted("eager", 0.5, route="tf32"),
            predicted("algebra", 1.0),
            predicted("fused", 1.0),
            predicted("cpu", 1.0),
            predicted("broken", 1.0),
            predicted("never run", 1.0),
        ]
    )
    bench = BenchResult(
        Records(
            [
                timed("eager", 2.9, 3.0, 3.1),  # 1.5 times: still near
                timed("eager", 0.4, route="tf32"),
                timed("algebra", 1.6, 1.6),
                timed("fused", 0.66, 0.66),
                timed("cpu", 0.67, 0.67),
                timed("broken", reason="raised"),
                timed("not predicted", 1.0),
            ]
        )
    )
    text = str(wb.outcome(predictions, bench))
    rows = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if "×" in line}
    assert set(rows) == {"eager", "eager/tf32", "algebra", "fused", "cpu"}
    assert rows["eager"].endswith("as predicted |") and "1.50×" in rows["eager"]
    assert rows["eager/tf32"].endswith("as predicted |") and "400 µs" in rows["eager/tf32"]
    assert rows["algebra"].endswith("slower |") and "1.60×" in rows["algebra"]
    assert rows["fused"].endswith("faster |") and "0.660×" in rows["fused"]
    assert rows["cpu"].endswith("as predicted |")
    assert text.endswith("3 of 5 times are within a factor 1.5 of their prediction.")


def test_outcome_without_a_common_variant_says_what_to_do():
    bench = BenchResult(Records([timed("eager", 1.0)]))
    with pytest.raises(ValueError, match="predictions: none .* run wb.predict first"):
        wb.outcome(Records(), bench)


# --- shares ---------------------------------------------------------------------------------------


def shared(fold, eager=(8.0, 9.0, 10.0), fused=(0.5, 0.5, 0.5)) -> str:
    records = [timed("eager", *eager), timed("algebra", 1.0, 1.0, 1.0)]
    return str(wb.shares(BenchResult(Records([*records, timed("fused", *fused, fold_ms=fold)]))))


def test_shares_are_ratios_of_pairs():
    text = shared((34.0, 34.0, 34.0))
    row = text.splitlines()[2]
    assert row.startswith(f"| {CARD}, paper: B = 1024, K = 8192, N = 8192 |")
    cells = [cell.strip(" *") for cell in row.split("|")[2:5]]
    # 8, 9, 10 over 1: median 9, the middle half is 1 wide: one digit, but two are always shown
    assert cells == ["9.0×", "2.000×", "18×"]
    assert text.endswith("Folding takes 34 ms and is earned back after 4 calls.")


@pytest.mark.parametrize(
    ("fold", "fused", "words"),
    [
        (12.0, (0.5, 0.5, 0.5), "is earned back after 2 calls."),  # 12 / 8.5 = 1.41 calls
        (8.5, (0.5, 0.5, 0.5), "is earned back by the first call."),
        (1.0, (0.5, 0.5, 0.5), "is earned back by the first call."),
        (1.0, (10.0, 10.0, 10.0), "never pays."),
    ],
)
def test_a_fold_is_earned_back_after_whole_calls(fold, fused, words):
    assert shared((fold,), fused=fused).endswith(words)


def test_shares_of_an_incomplete_run_name_what_is_missing():
    with pytest.raises(KeyError, match="variant: got 'algebra'; this run has eager"):
        wb.shares(BenchResult(Records([timed("eager", 1.0)])))


# --- recorded runs ----------------------------------------------------------------------------


def test_a_record_is_stale_once_its_sources_change(tmp_path, monkeypatch):
    fused = PROBLEM.variant("fused")
    digest = kernels_digest(SLUG, fused, "cuda")
    fresh = timed("fused", 1.0, kernels_digest=digest)
    assert not tables.is_stale(PROBLEM, fresh)
    assert not tables.is_stale(PROBLEM, timed("eager", 1.0)), "plain torch has no sources here"
    assert not tables.is_stale(PROBLEM, timed("eager", 1.0, route="tf32"))
    assert tables.is_stale(PROBLEM, dataclasses.replace(fresh, device="cpu")), "other sources"
    assert tables.is_stale(PROBLEM, dataclasses.replace(fresh, kernels_digest=""))
    assert tables.is_stale(PROBLEM, timed("05_a_rung_that_is_gone", 1.0))
    folder = tmp_path / "kernels"
    shutil.copytree(paths.kernels(), folder)
    files = tuple(folder / f.relative_to(paths.kernels()) for f in fused.files)
    moved = dataclasses.replace(fused, files=files)
    elsewhere = dataclasses.replace(PROBLEM, variants=(moved,))
    monkeypatch.setattr(paths, "kernels", lambda: folder)
    assert not tables.is_stale(elsewhere, fresh), "the same sources elsewhere"
    for edited in ("common/reduce.cuh", "column_sum/column_sum.cu"):  # what the fold runs counts
        source = folder / edited
        whole = source.read_text()
        source.write_text(whole + "\n// edited\n")
        assert tables.is_stale(elsewhere, fresh), edited
        source.write_text(whole)
        assert not tables.is_stale(elsewhere, fresh)


@pytest.mark.parametrize(
    ("batch", "route", "method", "stale"),
    [
        (16384, "tf32", "fp16x1", True),  # many rows, few outputs: torch's product today
        (16384, "float32", "fp16x3", False),
        (1024, "tf32", "tf32", False),
        (1024, "tf32", "fp16x1", True),  # by halves; today of floats as they are
        (16, "tf32", "fp16x1", True),  # as above, of a few samples
        (16, "float32", "fp16x3", False),
        (16384, "tf32", "", False),  # it was torch's then, too
    ],
)
def test_a_record_is_stale_where_its_product_goes_another_way_today(batch, route, method, stale):
    p = wb.problem("matmul_avgpool_gelu_scale_max")
    record = Record(
        kind="bench", problem=p.slug, variant="fused", implementation="kernel", device="cuda",
        route=route, method=method, mode="eval",
        shape={"B": batch, "K": 8192, "N": 8192, "pool": 16},
        kernels_digest=kernels_digest(p.slug, p.variant("fused"), "cuda"),
    )  # fmt: skip
    assert tables.is_stale(p, record) == stale


def test_the_newest_recorded_run_is_found_and_labelled():
    variants = ["eager", "algebra", "fused"]

    def run(name: str, date: str, **more) -> list[Record]:
        return [timed(v, 1.0, run=name, date=date, **more) for v in variants]

    old, new = run("r1", "2026-11-20T10:00:00Z"), run("r2", "2026-11-21T10:00:00Z")
    laptop = run("r3", "2026-11-22T10:00:00Z", size="laptop")
    on_cpu = run("r4", "2026-11-22T10:00:00Z", device="cpu", card="a CPU")
    written = run("r5", "2026-11-22T10:00:00Z", how={"flush": "write"})
    partial = [timed("fused", 1.0, run="r6", date="2026-11-23T10:00:00Z")]
    failed = run("r7", "2026-11-23T10:00:00Z")
    failed[1] = dataclasses.replace(failed[1], samples_ms=(), reason="out of luck")
    tf32 = run("r8", "2026-11-23T10:00:00Z", route="tf32")
    for records in (partial, failed, tf32):
        journal.append(records, journal.place(records[0], paths.data()))
    assert wb.recorded(PROBLEM) is None, "they lack what figures and shares compare"
    for records in (new, old, laptop, on_cpu, written):
        journal.append(records, journal.place(records[0], paths.data()))
    journal.append(new, journal.place(new[0], paths.runs()))  # kept: it is in both
    assert list(wb.recorded(PROBLEM).records) == new
    assert list(wb.recorded(PROBLEM, flush="write").records) == written
    assert list(wb.recorded(PROBLEM, size="laptop").records) == laptop
    assert wb.recorded(PROBLEM, card="another") is None
    label = str(wb.label(PROBLEM, wb.recorded(PROBLEM)))
    for words in (CARD, "2026-11-21T10:00:00Z", "commit 5f1a0ff2bcde;", "emptied by read"):
        assert words in label
    assert label.endswith("**Stale** (sources or ways changed since): fused.")


def test_kernels_as_they_are_go_before_newer_runs_of_stale_ones_on_whichever_card(monkeypatch):
    monkeypatch.setattr(tables, "is_stale", lambda p, record: record.kernels_digest == "old")

    def run(name: str, date: str, *more: str, **about) -> list[Record]:
        keys = ("eager", *more, "algebra", "fused")
        return [timed(v, 1.0, run=name, date=date, **about) for v in keys]

    there = {"card": "NVIDIA H200", "kernels_digest": "new"}
    fresh = run("a", "2026-11-20T10:00:00Z", **there)
    stale = run("b", "2026-11-22T10:00:00Z", "compile", kernels_digest="old")
    older = run("c", "2026-11-19T10:00:00Z", "compile", kernels_digest="new")
    assert list(tables.fullest(Records([*stale, *fresh])).records) == fresh
    assert list(tables.fullest(Records([*fresh, *stale])).records) == fresh
    assert list(tables.fullest(Records(stale)).records) == stale
    assert list(tables.fullest(Records([*fresh, *older])).records) == older, "compile, then date"
    last = run("d", "2026-11-18T10:00:00Z", "05_whole_row_in_flight", kernels_digest="old")
    assert list(tables.fullest(Records([*last, *stale])).records) == last, "what ours is today"
    for records in (stale, fresh):
        journal.append(records, journal.place(records[0], paths.data()))
    assert list(wb.recorded(PROBLEM).records) == fresh


def test_predictions_are_those_for_the_card_of_a_run():
    run = BenchResult(Records([timed("fused", 1.0, card="NVIDIA H200")]))
    other = predicted("fused", 3.0, date="2026-11-25T10:00:00Z")
    train = predicted("fused", 4.0, card="NVIDIA H200", mode="train")
    old, new = (
        predicted("fused", ms, card="NVIDIA H200", date=f"2026-11-2{day}T10:00:00Z", run=str(day))
        for ms, day in ((1.0, 1), (2.0, 2))
    )
    for record in (new, old, other, train):
        journal.append(record, journal.place(record, paths.data()))
    assert [r.value for r in wb.predicted(run)] == [2.0]
    assert not wb.predicted(BenchResult(Records([timed("fused", 1.0, card="another")])))


def test_the_run_with_compile_goes_before_a_newer_one_without():
    def run(name: str, date: str, *variants: str) -> list[Record]:
        return [timed(v, 1.0, run=name, date=date) for v in variants]

    whole = run("a", "2026-11-20T10:00:00Z", "eager", "compile", "algebra", "fused")
    newer = run("b", "2026-11-21T10:00:00Z", "eager", "algebra", "fused")
    assert list(tables.fullest(Records([*newer, *whole])).records) == whole
    assert list(tables.fullest(Records(newer)).records) == newer
    assert tables.fullest(Records()) is None


@pytest.mark.parametrize(("stale", "card"), [(True, "Card A (stale)"), (False, "Card A")])
def test_the_summary_is_computed_from_paper_size_runs(stale, card, monkeypatch):
    monkeypatch.setattr(tables, "is_stale", lambda p, record: stale)

    def run(card: str, **more) -> list[Record]:
        more = {"card": card, "floor_ms": 0.01, "rel_error": 1e-8, "rel_error_eager": 4e-7} | more
        return [
            timed("eager", 2.0, 2.0, **more), timed("algebra", 0.02, 0.02, **more),
            timed("fused", 0.016, 0.016, **more),
        ]  # fmt: skip

    records = [*run("Card A"), *run("Card B", size="laptop"), timed("fused", 1.0, card="Card C")]
    lines = str(tables.summary(Records(records))).splitlines()
    assert len(lines) == 3, "a head, its line, one card"
    cells = [cell.strip(" *") for cell in lines[2].split("|")[1:-1]]
    assert cells == [
        f"`{SLUG}` 1024, 8192→8192", card, "2.000 ms", "–", "–", "–", "20.00 µs", "16.00 µs",
        "–", "10.0 µs", "125.0×", "1.0e-08 / 4.0e-07",
    ]  # fmt: skip
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")


def test_a_floor_by_hand():
    reach = Ceilings(1000.0, 500.0, 10.0, None, 0.002, "by hand")
    floor = wb.floor_of(PROBLEM, reach, "paper", "before")
    flops = 2 * 1024 * 8192 * 8192 + 1024 * 8192
    assert floor.ms == pytest.approx(flops / 10e12 * 1e3 + 0.002) and floor.bound == "compute"
    assert wb.floor_of(PROBLEM, reach, "paper", "after").bound == "memory"


@pytest.mark.parametrize(
    ("rates", "halves", "says"),
    [
        ({"half_tflops": 60.0}, "6.9 ms", "Ceilings of by hand. The last"),
        ({"tf32_tflops": 30.0}, "6.9 ms", "not measured with them: twice TF32's is taken for it."),
        ({}, None, "They have no rate of halves"),
    ],
)
def test_rooflines_by_hand(rates, halves, says):
    about = {"read_gbs": 1000.0, "copy_gbs": 500.0, "fp32_tflops": 10.0, "tf32_tflops": None}
    reach = Ceilings(**about | {"launch_ms": 0.0, "source": "by hand"} | rates)
    p = wb.problem("gemm_batchnorm_scale_softmax")
    text = str(wb.rooflines(p, reach))
    assert says in text
    if halves is None:
        assert "|" not in text
        return
    (row,) = [line for line in text.splitlines() if line.startswith("| paper: B = 1024")]
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    # 2 * 1024 * 8192^2 operations and the tail's; three times as many at 6 times the rate
    assert cells[1:] == ["13.8 ms", halves, "compute", "2.00×"]


# --- sources and resources ------------------------------------------------------------------------


def test_show_a_kernel_a_model_and_what_has_no_source():
    kernel = PROBLEM.variant("cpu")
    text = wb.show(kernel)
    source = kernel.source.read_text(encoding="utf-8").rstrip()
    shown = f"*{kernel.idea}*\n\n```cpp\n{source}\n```"
    assert str(text) == shown == text._repr_markdown_()
    shown = str(wb.show(PROBLEM.Model))
    assert shown.startswith("```python\nclass Model(nn.Module)") and "logsumexp" in shown
    with pytest.raises(ValueError, match="variant: eager has no kernel"):
        wb.show(PROBLEM.variant("eager"))


def test_show_a_part_of_a_file(tmp_path):
    file = tmp_path / "a.cuh"
    file.write_text(
        "#pragma once\n\n"
        "// of one\nstruct One {  // its own\n  int one(int i) { return i; }\n};\n\n"
        "// of two\ntemplate <int N>\n__global__ void two(int i) {\n  if (i) {\n  }\n}\n\n"
        "int three() {\n  return two(1);\n}\n"
    )
    one = "// of one\nstruct One {  // its own\n  int one(int i) { return i; }\n};"
    two = "// of two\ntemplate <int N>\n__global__ void two(int i) {\n  if (i) {\n  }\n}"
    assert str(wb.show(file, "One")) == f"```cpp\n{one}\n```"
    assert str(wb.show(file, "two", "One")) == f"```cpp\n{two}\n\n{one}\n```"
    assert str(wb.show(file, "three")) == "```cpp\nint three() {\n  return two(1);\n}\n```"
    file.write_text(
        "struct One {\n  int a;\n\n  // it\n  int one() {\n#pragma unroll\n    return f(a);\n"
        "  }\n};\n"
    )
    assert (
        str(wb.show(file, "One::one"))
        == "```cpp\n// it\nint one() {\n#pragma unroll\n  return f(a);\n}\n```"
    )
    for name in ("four", "f", "One::four"):
        with pytest.raises(KeyError, match=f"name: got '{name[-4:]}'"):
            wb.show(file, name)
    # what stands in the first lines of another begins where that does
    file.write_text("// Says what.\nstruct Own {\n  Own() {\n    f();\n  }\n};\n")
    assert str(wb.show(file, "Own::Own")).startswith("```cpp\n// Says what.\nstruct Own {")


def test_resources_come_from_the_compiler(monkeypatch):
    asked = []

    def cubin(source, *, arch, include, flags):
        asked.append((source.name, arch))
        kernel = build.KernelReport(
            f"void {source.stem}_kernel<2>(SumChain)", "sm_100", registers=40, spill_bytes=8,
            stack_bytes=0, shared_bytes=1024,
        )  # fmt: skip
        return build.CubinReport((kernel,), "", source, True)

    monkeypatch.setattr(ops, "missing", lambda device: "")
    monkeypatch.setattr(build, "cubin", cubin)
    text = str(wb.resources(PROBLEM, arch="100"))
    rungs = [v for v in PROBLEM.variants if v.is_rung and v.devices == ("cuda",)]
    assert asked == [(v.source.name, "100") for v in rungs] and len(rungs) == 5
    for v in rungs:
        assert f"| {v.key} | `{v.source.stem}_kernel<2>` | 40 | 8 | 1024 |" in text


def test_resources_without_nvcc_say_so(monkeypatch):
    monkeypatch.setattr(ops, "missing", lambda device: "no nvcc: install it")
    assert str(wb.resources(PROBLEM)) == "The CUDA rungs are not compiled here: no nvcc: install it"


@needs_nvcc
def test_resources_here():
    text = str(wb.resources(PROBLEM))
    assert text.count("_kernel") >= 5 and "| 0 |" in text


@needs_nvcc
def test_resources_of_a_rung_for_hopper_are_those_of_the_shared_kernel_there(monkeypatch):
    made, cubin = [], build.cubin

    def seen(source, *, arch, **how):
        made.append((source.name, arch))
        return cubin(source, arch=arch, **how)

    monkeypatch.setattr(build, "cubin", seen)
    p = wb.problem("matmul_maxpool_sum_scale")
    (rung,) = (v for v in p.variants if v.implementation == "hopper")
    others = [v for v in p.variants if v.is_rung and v.devices == ("cuda",) and v is not rung]
    short = dataclasses.replace(p, variants=(others[0], rung))
    lines = str(wb.resources(short)).splitlines()
    assert made == [(others[0].source.name, "90"), ("split_product.cu", "90a")]
    assert [line for line in lines if line.startswith(f"| {rung.key} | `") and "| 0 |" in line]


def test_the_label_of_a_run_here_has_this_machine():
    here = timed("eager", 1.0, device="cpu", card=machine.card("cpu"), commit="")
    label = str(wb.label(PROBLEM, BenchResult(Records([here]))))
    assert machine.card("cpu") in label and "commit unknown" in label and "Stale" not in label


# --- bounds, yardsticks, host time ----------------------------------------------------------------


def test_the_ceiling_of_a_speedup_is_eager_over_the_floor():
    bench = BenchResult(Records([timed("eager", 50.0), timed("fused", 0.5, floor_ms=0.25)]))
    text = str(wb.ceiling_of_speedup(bench))
    assert "more than 200× as fast" in text and text.endswith("Reached: 100×.")


def test_gains_are_ratios_of_one_run():
    bench = BenchResult(Records([
        timed("eager", 8.0, 8.0), timed("eager", 3.0, 3.0, route="tf32"), timed("new", 2.0, 2.0),
    ]))  # fmt: skip
    text = str(wb.gains(bench, "new", "eager", "not there", "eager/tf32"))
    assert text.splitlines()[0] == f"{CARD}, paper, eval, {ABOUT['date']}, `new`:"
    assert text.splitlines()[2:] == ["- over `eager`: 4.000×", "- over `eager/tf32`: 1.500×"]
    assert "`other` is not in this run" in str(wb.gains(bench, "other", "eager"))


def test_yardsticks_are_those_of_the_newest_run():
    def run(name: str, date: str, theirs: float, bare: float, module: float) -> list[Record]:
        more = {"kind": "profile", "run": name, "date": date}
        return [
            timed("torch.sum(x)", theirs, theirs, **more), timed("kernel", bare, bare, **more),
            timed("fused", module, module, **more),
        ]  # fmt: skip

    old = run("a", "2026-11-20T10:00:00Z", 1.0, 1.0, 1.0)
    new = run("b", "2026-11-21T10:00:00Z", 0.9, 1.0, 1.8)
    text = str(wb.yardstick_lines(Records([*new, *old])))
    assert "kernel over torch.sum(x): 0.9" in text and "fused over torch.sum(x): 0.5" in text
    assert "2026-11-21" in text and "2026-11-20" not in text
    assert str(wb.yardstick_lines(Records())) == "no yardsticks are recorded"


def test_host_times_are_medians_of_each_run():
    host = {"host_us_grad": [60.0, 50.0, 90.0]}
    fused = timed("fused", 1.0, run="a", how=host)
    eager = timed("eager", 1.0, run="a", how={"host_us_grad": [200.0]})
    other = timed("eager", 1.0, run="b", how={"host_us_grad": [300.0]})
    text = str(wb.host_lines(Records([eager, fused, other])))
    assert text.endswith("eager 200 µs, fused 60 µs") and "300" not in text
    assert str(wb.host_lines(Records([other]))) == "no host times are recorded"


def test_the_cover_shows_gpus_only():
    def run(card: str, device: str) -> list[Record]:
        more = {"card": card, "device": device, "floor_ms": 0.01, "run": card}
        more["how"] = {"flush": "read"}
        return [timed(v, ms, ms, **more) for v, ms in
                (("eager", 2.0), ("algebra", 0.02), ("fused", 0.016))]  # fmt: skip

    picture = tables.cover(Records([*run("Card A", "cuda"), *run("Card B", "cpu")]))
    assert "Card A" in picture.alt and "Card B" not in picture.alt and "125×" in picture.alt
