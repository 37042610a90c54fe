"""Timing and its records: turns, budgets, failures, extrapolation, ceilings, trials. No times."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from sum_chain import PROBLEM, needs_compiler, needs_gpu

import workbook as wb
from workbook import (
    accuracy,
    build,
    ceilings,
    compare,
    journal,
    paths,
    precision,
    results,
    timing,
)
from workbook.journal import Record, Records
from workbook.limits import Ceilings
from workbook.spec import Size, Variant
from workbook.variants import chosen_variants

CPU = torch.device("cpu")
SMALL = Size("small", (64, 48), 33)
REACH = Ceilings(20.0, 15.0, 0.5, None, 0.0, "by hand")
QUICK = {"size": SMALL, "device": "cpu", "rounds": 6, "budget_s": 5.0, "flush": "none"}


@pytest.fixture(autouse=True)
def _runs(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBOOK_RUNS", str(tmp_path / "runs"))


@pytest.fixture
def reach(monkeypatch):
    """Ceilings by hand: nothing large is measured."""
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda device="cpu", progress=False: REACH)
    return REACH


class Clock:
    """time.perf_counter that moves only when told."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def call(self, seconds: float, note=lambda: None) -> timing.Call:
        def run() -> None:
            note()
            self.now += seconds

        return timing.Call(run)


def no_flush() -> None: ...


# --- turns and budgets ------------------------------------------------------------------------


@pytest.mark.parametrize(("late", "bytes_", "wanted", "flushes"), [
    ((False,), 64, 1.0, 1), ((True, False), 64, 2.0, 3), ((True, True, True), 64, 3.0, 7),
    ((True,), 0, 1.0, 1),
])  # fmt: skip
def test_a_sample_the_host_was_late_for_is_taken_again(late, bytes_, wanted, flushes, monkeypatch):
    """Behind twice as many flushes each time, three times at most; not where nothing is flushed."""
    once, seen = iter(enumerate(late, 1)), []

    class Counted:
        bytes = bytes_

        def __call__(self):
            seen.append(self)

    monkeypatch.setattr(timing, "_once", lambda *_: tuple(map(float, next(once))))
    calls = {"a": timing.Call(lambda: None)}
    found = timing.interleaved(calls, CPU, rounds=1, budget_s=1, flush=Counted())
    assert found == {"a": [wanted]} and len(seen) == flushes


def test_variants_take_turns_and_the_order_turns_each_round(monkeypatch):
    clock, seen = Clock(monkeypatch), []
    calls = {n: clock.call(0.001, lambda n=n: seen.append(n)) for n in "abc"}
    found = timing.interleaved(calls, CPU, rounds=4, budget_s=100, flush=lambda: seen.append("-"))
    assert "".join(seen) == "-a-b-c-b-c-a-c-a-b-a-b-c"
    assert {name: len(times) for name, times in found.items()} == {"a": 4, "b": 4, "c": 4}
    assert found["a"] == pytest.approx([1.0] * 4), "milliseconds"


def test_the_flush_is_before_each_sample_and_not_in_it(monkeypatch):
    clock = Clock(monkeypatch)

    def flush() -> None:
        clock.now += 5.0

    found = timing.interleaved({"a": clock.call(0.002)}, CPU, rounds=3, budget_s=1e9, flush=flush)
    assert found["a"] == pytest.approx([2.0] * 3)


@pytest.mark.parametrize(
    ("budget", "rounds", "wants"),
    [
        (100.0, 8, {"slow": 8, "fast": 8}),
        (16.0, 30, {"slow": 9, "fast": 30}),  # its share is 8 s: it leaves once that is over
        (0.0, 30, {"slow": 5, "fast": 5}),  # never less than 5
        (0.0, 3, {"slow": 3, "fast": 3}),  # but for fewer rounds
        (4.0, 30, {"slow": 5, "fast": 30}),
    ],
)
def test_budget_and_least_samples(monkeypatch, budget, rounds, wants):
    clock = Clock(monkeypatch)
    calls = {"slow": clock.call(1.0), "fast": clock.call(1e-6)}
    found = timing.interleaved(calls, CPU, rounds=rounds, budget_s=budget, flush=no_flush)
    assert {name: len(times) for name, times in found.items()} == wants


def test_a_flush_counts_in_the_budget(monkeypatch):
    clock = Clock(monkeypatch)

    def flush() -> None:
        clock.now += 1.0

    calls = {"a": clock.call(0.0)}
    found = timing.interleaved(calls, CPU, rounds=30, budget_s=6.5, flush=flush)
    assert len(found["a"]) == 7


def test_nothing_to_time_is_no_error():
    assert timing.interleaved({}, CPU, rounds=3, budget_s=1, flush=no_flush) == {}


def test_each_call_runs_by_its_route():
    seen = {}

    def note(name):
        seen[name] = torch.get_float32_matmul_precision()

    calls = {r: timing.Call(lambda r=r: note(r), r) for r in ("float32", "tf32")}
    timing.interleaved(calls, CPU, rounds=1, budget_s=1, flush=no_flush)
    assert seen == {"float32": "highest", "tf32": "high"}


def test_an_unknown_route_of_a_call_is_told():
    with pytest.raises(ValueError, match="route: got 'bf16', wants one of float32, tf32"):
        calls = {"a": timing.Call(no_flush, "bf16")}
        timing.interleaved(calls, CPU, rounds=1, budget_s=1, flush=no_flush)


@pytest.mark.parametrize("how", timing.FLUSHES)
def test_flushes(how):
    flush = timing.Flush(CPU, how)
    if how == "none":
        assert flush.bytes == 0 and flush._buffer.numel() == 0
    else:
        from workbook import machine

        cache = machine.last_level_cache_bytes("cpu")
        assert flush.bytes == flush._buffer.numel() * 4 or flush.bytes % 4
        assert flush.bytes == min(timing.CPU_CACHES * cache, timing.CPU_FLUSH_LIMIT)
    flush._buffer.fill_(3.0)
    flush()
    wrote = bool((flush._buffer == 0).all()) and flush._buffer.numel() > 0
    assert wrote == (how == "write"), "a read leaves what it reads, a write does not"


def test_an_unknown_flush_is_told_by_name(reach):
    words = "flush: got 'l2', wants one of read, write, none"
    with pytest.raises(ValueError, match=words):
        timing.Flush(CPU, "l2")
    with pytest.raises(ValueError, match=words):
        wb.bench(PROBLEM, **QUICK | {"flush": "l2", "variants": ["eager"]})


def test_host_time_is_per_call_and_in_microseconds(monkeypatch):
    clock = Clock(monkeypatch)
    times = timing.host_us(clock.call(3e-6).run, CPU, calls=10)
    assert times == pytest.approx([3.0] * 9)


def test_profile_counts_operators_and_peak_memory():
    x = torch.ones(1 << 20)
    launches, peak = timing.profile(lambda: x + x, CPU)
    assert launches == 1 and peak == 4 << 20
    launches, peak = timing.profile(lambda: ((x + x) * x, None)[1], CPU)
    assert launches == 2 and peak == 8 << 20, "both temporaries are alive at once"
    launches, peak = timing.profile(lambda: ((x + x).sum(), (x * x).sum()), CPU)
    assert peak < 6 << 20, "one is released before the other"
    assert timing.profile(lambda: None, CPU) == (0, 0)


# --- the route's switches -----------------------------------------------------------------------


def switches() -> tuple:
    with_newer = torch.backends.cuda.matmul.fp32_precision
    return precision._older(), with_newer, torch.backends.mkldnn.matmul.fp32_precision


@pytest.fixture
def _put_back():
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("_put_back")
@pytest.mark.parametrize("before", ["highest", "high", "medium", "newer tf32", "newer ieee"])
@pytest.mark.parametrize("route", ["float32", "tf32"])
@pytest.mark.parametrize("fails", [False, True])
def test_using_route_puts_every_switch_back(before, route, fails):
    if before.startswith("newer"):
        torch.backends.cuda.matmul.fp32_precision = before.split()[1]
    else:
        torch.set_float32_matmul_precision(before)
    was = switches()
    try:
        with precision.using_route(route):
            inside = switches()
            if fails:
                raise KeyError("in the block")
    except KeyError:
        assert fails
    assert inside[:2] == (("high", "tf32") if route == "tf32" else ("highest", "ieee"))
    assert switches() == was
    if not before.startswith("newer tf32"):  # there torch itself refuses to read the older one
        assert torch.get_float32_matmul_precision() == was[0]


@pytest.mark.usefixtures("_put_back")
def test_routes_nest_and_unknown_ones_change_nothing():
    torch.set_float32_matmul_precision("high")
    was = switches()
    with precision.using_route("float32"):
        with precision.using_route("tf32"):
            assert switches()[0] == "high"
        assert switches()[0] == "highest"
    with pytest.raises(ValueError, match="route: got 'half'"), precision.using_route("half"):
        raise AssertionError("not reached")
    assert switches() == was


@pytest.mark.usefixtures("_put_back")
@pytest.mark.parametrize(
    ("switch", "setting", "route"),
    [
        ("older", "highest", "float32"),
        ("older", "high", "tf32"),
        ("older", "medium", "tf32"),
        ("newer", "tf32", "tf32"),  # the older one can then not be read
        ("newer", "ieee", "float32"),
        ("newer", "none", "float32"),
        ("of all", "tf32", "tf32"),
        ("of all", "none", "float32"),
    ],
)
def test_the_chosen_route_by_every_switch(switch, setting, route, monkeypatch):
    if switch == "older":
        torch.set_float32_matmul_precision(setting)
    elif switch == "newer":
        torch.backends.cuda.matmul.fp32_precision = setting
    else:
        torch.backends.cuda.matmul.fp32_precision = "none"
        monkeypatch.setattr(torch.backends, "fp32_precision", setting)
    was = switches()
    assert precision.chosen_route() == route
    assert switches() == was, "looking changes nothing"


@pytest.mark.usefixtures("_put_back")
def test_the_chosen_route_where_the_later_word_counts():
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert precision.chosen_route() == "float32"
    torch.set_float32_matmul_precision("high")
    assert precision.chosen_route() == "tf32"
    with precision.using_route("float32"):
        assert precision.chosen_route() == "float32"
    assert precision.chosen_route() == "tf32"


@pytest.mark.parametrize("error", [RuntimeError, AttributeError])
def test_the_chosen_route_is_float32_where_it_can_not_be_read(error, monkeypatch):
    class Unreadable:
        @property
        def fp32_precision(self) -> str:
            raise error("mixed use of the older and the newer switch")

    monkeypatch.setattr(torch.backends.cuda, "matmul", Unreadable())
    assert precision.chosen_route() == "float32"


# --- bench ---------------------------------------------------------------------------------------


def broken(error: Exception) -> Variant:
    def make(model):
        raise error

    return Variant("broken", "torch", "raises", make, ("cpu",))


def by_hand(name: str, **more) -> Variant:
    return Variant(name, "torch", "by hand", lambda model: model, ("cpu",), **more)


def test_bench_keeps_raw_samples_errors_and_provenance(reach, tmp_path):
    result = wb.bench(PROBLEM, **QUICK, variants=["eager", "algebra", "fused", "fused+fold"])
    assert list(map(results.key_of, result.records)) == ["eager", "algebra", "fused", "fused+fold"]
    for record in result.records:
        assert record.kind == "bench" and record.problem == PROBLEM.slug and record.mode == "eval"
        assert len(record.samples_ms) == 6 and all(s > 0 for s in record.samples_ms)
        assert record.size == "small" and record.shape == {"B": 33, "K": 64, "N": 48}
        assert record.how["flush"] == "none" and record.how["timer"] == "wall clock"
        assert record.how["first_call_ms"] > 0 and record.launches >= 0
        assert record.rel_error < 1e-5 and record.rel_error_eager == result["eager"].rel_error
        assert record.date and record.card and record.versions["torch"] == torch.__version__
        assert record.device == "cpu" and record.dtype == "float32" and not record.extrapolated
    assert len({r.run for r in result.records}) == 1
    assert list(journal.load(tmp_path / "runs")) == list(result.records)
    fused, eager = result["fused"], result["eager"]
    assert fused.passed and fused.kernels_digest and not eager.kernels_digest
    assert len(fused.how["host_us_grad"]) == 9 and "host_us_grad" not in eager.how
    assert eager.bytes_moved is None, "eager moves more than it must: no rate is known"
    assert fused.bytes_moved == PROBLEM.work["after"](33, 64, 48).bytes
    assert fused.floor_ms == pytest.approx(eager.floor_ms), "one floor: of the work after"


def test_only_variants_that_fold_have_a_fold(reach):
    result = wb.bench(PROBLEM, **QUICK, variants=["eager", "algebra", "fused"])
    assert result["eager"].fold_ms is None and result["eager"].fold_bytes is None
    for key in ("algebra", "fused"):
        assert len(result[key].fold_ms) == 7 and all(t > 0 for t in result[key].fold_ms)
        assert result[key].fold_bytes == 64 * 8 + 8
        assert 0 < result[key].how["fold_read_gbs"] < 1e4, "the bandwidth at that time"
    assert "fold_read_gbs" not in result["eager"].how


def test_default_variants_are_those_of_the_device_without_controls():
    chosen = {v.key for v in chosen_variants(PROBLEM, None, "cpu")}
    assert {"eager", "compile", "algebra", "fused", "fused+fold", "cpu"} <= chosen
    assert not [key for key in chosen if key.startswith(("wrong", "0")) or "tf32" in key]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("no luck\nsecond line"), "RuntimeError: no luck"),
        (ValueError(), "ValueError: no message"),
        (build.CompilerMissing("no C++ compiler"), "CompilerMissing: no C++ compiler"),
    ],
)
def test_a_failed_variant_is_kept_with_its_reason(reach, tmp_path, error, reason):
    result = wb.bench(PROBLEM, **QUICK, variants=["eager", broken(error)])
    record = result["broken"]
    assert record.passed is False and record.reason == reason and record.samples_ms == ()
    assert len(result["eager"].samples_ms) == 6, "the others are timed"
    assert journal.load(tmp_path / "runs")[-1] == record
    assert "failed" in str(result) and reason in str(result) and reason in result._repr_html_()
    with pytest.raises(ValueError):
        result.ratio("eager", "broken")


def test_a_bench_in_which_all_fail_is_recorded_too(reach, tmp_path):
    result = wb.bench(PROBLEM, **QUICK, variants=[broken(RuntimeError("no luck"))])
    assert [r.reason for r in result.records] == ["RuntimeError: no luck"]
    assert len(journal.load(tmp_path / "runs")) == 1


def test_a_wrong_result_is_timed_and_marked(reach):
    wrong = {
        "zeros": lambda model: lambda x: torch.zeros(x.size(0), 1),
        "flat": lambda model: lambda x: model(x).squeeze(1),
        "scalar": lambda model: lambda x: model(x).sum(),
    }
    tried = [dataclasses.replace(by_hand(name), make=make) for name, make in wrong.items()]
    result = wb.bench(PROBLEM, **QUICK, variants=["eager", *tried])
    assert [r.passed for r in result.records] == [True, False, False, False]
    assert result["zeros"].rel_error == pytest.approx(1.0)
    assert result["flat"].rel_error == float("inf")
    assert str(result).count("outside") == 3 and str(result).count("within") == 1


def test_a_sample_of_rows_is_scaled_and_labelled(reach, monkeypatch):
    clock = Clock(monkeypatch)
    seen = []

    def make(model):
        def run(x):
            seen.append(x.size(0))
            clock.now += 0.001 * x.size(0)
            return model(x)

        return run

    part = Variant("part", "torch", "some rows", make, ("cpu",), sample=11)
    whole = dataclasses.replace(part, name="whole", sample=33)
    more = dataclasses.replace(part, name="more", sample=1000)
    result = wb.bench(PROBLEM, **QUICK, variants=[part, whole, more])
    assert result["part"].extrapolated
    assert result["part"].reason == "measured at batch 11, times 3"
    assert result["part"].samples_ms == pytest.approx([33.0] * 6)
    for key in ("whole", "more"):
        assert not result[key].extrapolated and result[key].reason == ""
        assert result[key].samples_ms == pytest.approx([33.0] * 6)
    assert set(seen) == {11, 33} and result["part"].passed
    assert "measured at batch 11" in str(result)


def test_keep_writes_to_data(reach, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "data", lambda: tmp_path / "data")
    wb.bench(PROBLEM, **QUICK, variants=["eager"])
    assert not (tmp_path / "data").exists()
    reading = Record(kind="ceiling", problem="", variant="read", card="here", value=1.0)
    monkeypatch.setattr(ceilings, "measured_records", lambda device: Records([reading]))
    result = wb.bench(PROBLEM, **QUICK, variants=["eager"], keep=True)
    kept = journal.load(tmp_path / "data")
    assert kept.query(kind="bench") == list(result.records)
    assert kept.query(kind="ceiling") == [reading], "a floor is kept with its ceilings"
    assert len(journal.load(tmp_path / "runs")) == 2
    assert len(wb.records(PROBLEM, variant="eager")) == 2, "what is in data and .runs is one"
    assert wb.records("another") == []
    names = {file.name for file in (tmp_path / "data").rglob("*.jsonl")}
    assert names == {f"{PROBLEM.slug}.jsonl", "machine.jsonl"}


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"variants": ["fussed"]}, KeyError, "variant: got 'fussed'.*fused"),
        ({"variants": ["eager/tf32"]}, KeyError, "variant: got 'eager/tf32'"),
        ({"variants": []}, ValueError, "variants: got none"),
        ({"size": "poster"}, KeyError, "size: got 'poster'.*laptop, small, paper"),
    ],
)
def test_bad_arguments_are_told_and_nothing_is_recorded(reach, tmp_path, options, kind, words):
    with pytest.raises(kind, match=words):
        wb.bench(PROBLEM, **QUICK | options)
    with pytest.raises(kind, match=words):
        wb.predict(PROBLEM, **{"size": SMALL, "device": "cpu"} | options)
    assert not journal.load(tmp_path / "runs")


def test_interrupted_bench_leaves_nothing_torn(reach, tmp_path):
    class Stops:
        calls = 0

        def __call__(self, x):
            Stops.calls += 1
            if Stops.calls > 4:
                raise KeyboardInterrupt
            return x.sum(1, keepdim=True)

    tried = dataclasses.replace(by_hand("stops"), make=lambda model: Stops())
    with pytest.raises(KeyboardInterrupt):
        wb.bench(PROBLEM, **QUICK, variants=["eager", tried])
    assert journal.load(tmp_path / "runs") == []
    assert torch.get_float32_matmul_precision() == "highest"


@needs_gpu
def test_on_a_gpu_the_baselines_run_by_both_routes():
    result = wb.bench(PROBLEM, size="laptop", variants=["eager", "eager/tf32"], rounds=6)
    assert [results.key_of(r) for r in result.records] == ["eager", "eager/tf32"]
    assert result["eager/tf32"].rel_error > 10 * result["eager"].rel_error


# --- results -------------------------------------------------------------------------------------


def timed(variant: str, *samples: float, **more) -> Record:
    about = {"route": "float32", "card": "a card", "device": "cpu", "passed": True}
    return Record(kind="bench", problem="p", variant=variant, samples_ms=samples, **about | more)


def test_ratios_are_of_pairs_of_the_same_round():
    result = results.BenchResult(
        Records([timed("eager", 90, 10, 20), timed("fused", 1, 4, 10), timed("algebra", 5, 5)])
    )
    ratio = result.ratio()
    assert (ratio.median, ratio.pairs) == (2.5, 3), "90/1, 10/4, 20/10: not 20/4"
    assert result.ratio("algebra", "fused").pairs == 2, "the rounds that both have"
    assert result.ratio("algebra", "fused").median == pytest.approx((5 / 1 + 5 / 4) / 2)
    with pytest.raises(KeyError, match="variant: got 'compile'; this run has eager, fused"):
        result["compile"]


def test_break_even_by_hand():
    records = [timed("eager", 10, 10), timed("fused", 2, 2, fold_ms=(30, 40, 50))]
    result = results.BenchResult(Records(records))
    assert result.break_even_calls() == 5
    assert result.break_even_calls("fused", "eager") == float("inf")


def test_a_table_of_times():
    result = results.BenchResult(
        Records(
            [
                timed("eager", 10.0, 10.0, floor_ms=1.0, bytes_moved=2e9, rel_error=1e-7),
                timed("eager", 5.0, 5.0, route="tf32", passed=False, launches=3),
                timed("<b>", reason="a & b", passed=False),
            ]
        )
    )
    lines = str(result).splitlines()
    assert len(lines) == 4 and lines[0].startswith("variant")
    assert [cell.strip() for cell in lines[1].split("  ") if cell] == [
        "eager", "10.00 ms", "1.000×", "10 %", "200", "1.0e-07", "within",
    ]  # fmt: skip
    assert "eager/tf32" in lines[2] and "2.000×" in lines[2] and "outside" in lines[2]
    assert "failed" in lines[3] and "a & b" in lines[3]
    page = result._repr_html_()
    assert page.count("<tr>") == 4 and "&lt;b&gt;" in page and "a &amp; b" in page
    frame = result.frame()
    assert len(frame) == 3 and list(frame["median_ms"])[:2] == [10.0, 5.0]


def test_a_line_has_medians_and_no_samples():
    record = timed("eager", 1.0, 3.0, 8.0, route="tf32", fold_ms=(2.0, 4.0), size="laptop")
    found = results.line(record)
    assert found["variant"] == "eager/tf32"
    assert found["median_ms"] == 3.0 and found["fold_ms"] == 3.0
    assert "samples_ms" not in found
    wants = (
        "problem variant implementation route device size mode median_ms floor_ms rel_error "
        "rel_error_eager date commit"
    )
    assert set(wants.split()) <= set(found)
    assert results.line(timed("broken"))["median_ms"] is None


# --- ceilings and predictions --------------------------------------------------------------------


@pytest.fixture
def small_ceilings(monkeypatch):
    monkeypatch.setattr(ceilings, "BUFFER_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(ceilings, "GEMM_SIDE", {"cpu": 64})
    ceilings.measured_records.cache_clear()
    yield
    ceilings.measured_records.cache_clear()


@pytest.mark.usefixtures("small_ceilings")
def test_ceilings_are_recorded_and_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "data", lambda: tmp_path / "data")
    from workbook import machine

    card = machine.card("cpu")
    assert ceilings.ceilings_of(card) is None
    made = ceilings.measure_ceilings("cpu")
    records = journal.load(tmp_path / "runs")
    assert [r.variant for r in records] == ["read", "copy", "gemm_float32"]
    assert [r.unit for r in records] == ["GB/s", "GB/s", "TFLOP/s"]
    assert all(r.kind == "ceiling" and r.problem == "" and r.card == card for r in records)
    assert all(len(r.samples_ms) == ceilings.ROUNDS["cpu"] for r in records)
    read, copy, gemm = records
    best = {r.variant: min(r.samples_ms) for r in records}
    assert read.value == pytest.approx((1 << 20) / 1e6 / best["read"]), "GB/s of 1 MiB"
    assert copy.value == pytest.approx(2 * (1 << 20) / 1e6 / best["copy"]), "read and written"
    assert gemm.value == pytest.approx(2 * 64**3 / 1e9 / best["gemm_float32"])
    assert (made.read_gbs, made.copy_gbs, made.fp32_tflops) == (read.value, copy.value, gemm.value)
    assert made.tf32_tflops is None and made.launch_ms == 0 and card in made.source
    assert ceilings.ceilings_of(card) == made
    assert ceilings.measure_ceilings("cpu") == made
    assert len(journal.load(tmp_path / "runs")) == 3, "once a process"


def test_the_newest_ceilings_of_a_card_count(tmp_path):
    for run, date, factor in (("b", "2026-02-02T00:00:00Z", 2), ("a", "2026-01-01T00:00:00Z", 1)):
        found = [
            Record(kind="ceiling", problem="", variant=name, card="made up", value=value * factor,
                   unit="GB/s", run=run, date=date)
            for name, value in (("read", 10.0), ("copy", 8.0), ("gemm_float32", 1.0),
                                ("gemm_tf32", 4.0), ("gemm_half", 6.0), ("launch", 0.002))
        ]  # fmt: skip
        journal.append(found, journal.place(found[0], paths.runs()))
    reach = ceilings.ceilings_of("made up")
    assert (reach.read_gbs, reach.copy_gbs, reach.fp32_tflops) == (20.0, 16.0, 2.0)
    assert (reach.tf32_tflops, reach.half_tflops, reach.launch_ms) == (8.0, 12.0, 0.004)
    assert reach.source == "made up, 2026-02-02T00:00:00Z"
    assert ceilings.ceilings_of("unknown card") is None


def test_ceilings_of_no_card_are_those_of_the_gpu_measured_last(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "data", lambda: tmp_path / "data")
    assert ceilings.ceilings_of() is None
    for card, device, day in (("new", "cuda", 2), ("old", "cuda", 1), ("a CPU", "cpu", 3)):
        found = [
            Record(kind="ceiling", problem="", variant=name, card=card, device=device, value=1.0,
                   unit="GB/s", run=card, date=f"2026-01-0{day}T00:00:00Z")
            for name in ("read", "copy", "gemm_float32", "gemm_half")
        ]  # fmt: skip
        journal.append(found, journal.place(found[0], paths.runs()))
    reach = ceilings.ceilings_of()
    assert reach.source.startswith("new, ") and reach.half_tflops == 1.0


def test_predictions_come_from_rules_and_floors_before_anything_is_timed(
    reach, tmp_path, monkeypatch
):
    def timed_too_early(*args, **kwargs):
        raise AssertionError("predict timed something")

    monkeypatch.setattr(timing, "interleaved", timed_too_early)
    found = wb.predict(PROBLEM, size="laptop", device="cpu")
    value = {results.key_of(r): r.value for r in found}
    assert set(value) == {v.key for v in chosen_variants(PROBLEM, None, "cpu")}
    assert all(r.kind == "prediction" and r.unit == "ms" and not r.samples_ms for r in found)
    flops = 2 * 256 * 2048 * 2048 + 256 * 2048  # the GEMM and the sum over its rows
    assert value["eager"] == pytest.approx(flops / 0.5e12 * 1e3)
    written = 4 * 256
    moved = (4 * 256 * 2048 + 8 * 2048 - written) / 20e9 * 1e3 + 2 * written / 15e9 * 1e3
    assert value["fused"] == pytest.approx(moved)
    assert {r.note for r in found} == {
        "its own rule",
        "floor of the work before the algebra",
        "floor of the work after the algebra",
        "floor of the work after the algebra and of the fold",
    }
    assert list(journal.load(tmp_path / "runs")) == list(found)


# --- a kernel from a string -----------------------------------------------------------------------


def text(*changes: tuple[str, str]) -> str:
    source = PROBLEM.variant("cpu").source.read_text(encoding="utf-8")
    for old, new in changes:
        assert source.count(old) >= 1, f"cpu.cpp has no {old!r}: the test needs another sabotage"
        source = source.replace(old, new)
    return source


def tried(source: str):
    return wb.try_kernel(PROBLEM, source, device="cpu", size=SMALL, budget_s=0.2)


@needs_compiler
@pytest.mark.usefixtures("reach")
def test_a_kernel_may_be_a_file():
    trial = tried(PROBLEM.variant("cpu").source)
    assert trial.ok and trial.bench["tried"].passed


@needs_compiler
@pytest.mark.usefixtures("reach")
def test_a_good_kernel_is_checked_timed_and_drawn(tmp_path):
    trial = tried(text())
    assert trial.ok and trial.check.variant == "tried"
    assert [results.key_of(r) for r in trial.bench.records] == [
        "eager", "algebra", "cpu", "tried",
    ]  # fmt: skip
    assert trial.bench["tried"].passed and trial.bench["tried"].samples_ms
    assert "your kernel" in trial.picture.alt and trial.picture.png().startswith(b"\x89PNG")
    page = trial._repr_html_()
    assert page.count("<table>") == 2 and "<img" in page
    assert "right in" in str(trial) and "variant" in str(trial)
    kinds = {r.kind for r in journal.load(tmp_path / "runs")}
    assert kinds == {"check", "bench"}


@needs_compiler
@pytest.mark.usefixtures("reach")
def test_a_kernel_without_the_bias_is_rejected_and_still_drawn():
    trial = tried(text((" + *p.b_sum", "")))
    assert not trial.ok and "error" in trial.check.reason
    assert trial.bench["tried"].passed is False and trial.bench["cpu"].passed
    assert "WRONG" in str(trial) and "outside" in str(trial)
    assert trial.picture.png().startswith(b"\x89PNG")


@needs_compiler
@pytest.mark.usefixtures("reach")
def test_a_kernel_that_is_wrong_elsewhere_is_marked_where_it_was_timed():
    trial = tried(text(("total + *p.b_sum)", "total + *p.b_sum > 1e3 ? 0 : total + *p.b_sum)")))
    assert not trial.ok and trial.bench["tried"].passed is False
    assert trial.bench["tried"].reason.startswith(trial.check.reason)
    assert trial.bench["tried"].rel_error <= trial.bench["tried"].limit, "its one input hid it"
    assert trial.bench["cpu"].passed and "your kernel" in trial.picture.alt


@needs_compiler
@pytest.mark.usefixtures("reach")
def test_a_kernel_that_leaves_the_last_row_unwritten_is_found_by_the_poison():
    """begin .. end are the rows of a task: the last one of all is left as it was allocated."""
    name = "void launch("
    source = text((name, "static void rows("))
    arguments = source.partition("static void rows(")[2].partition(")")[0]
    kind, problem = arguments.split(",")[0].replace("&", " & ").rsplit(" ", 1)
    whole = f"{kind} {problem}, int64_t begin, int64_t end"
    source += (
        f"\n{name}{whole}) {{ rows({problem}, begin, end == {problem}.B ? end - 1 : end); }}\n"
    )
    trial = tried(source)
    assert "1 of 256 outputs are not finite where eager's are" in trial.check.reason


@needs_compiler
@pytest.mark.usefixtures("reach")
def test_a_syntax_error_is_a_build_error_that_names_the_line(tmp_path):
    source = text()
    lines = source.splitlines()
    number = next(i for i, line in enumerate(lines) if line.startswith("void launch"))
    lines.insert(number, "int half_a_line = ;")
    with pytest.raises(build.BuildError) as caught:
        tried("\n".join(lines))
    assert f"tried.cpp:{number + 1}" in str(caught.value)
    assert not journal.load(tmp_path / "runs"), "nothing was judged or timed"


def test_in_words():
    assert accuracy.in_words(ValueError("a\nb")) == "ValueError: a"
    assert accuracy.in_words(ValueError()) == "ValueError: no message"


def test_a_variant_that_shrinks_runs_on_fewer_features_and_is_scaled_by_their_square():
    """1 / 8 of the features each way: 1 / 64 of the weights."""
    seen = []

    def make(model):
        def run(x):
            seen.append((x.size(1), model.linear.weight.size(0)))
            return model(x)

        return run

    small = dataclasses.replace(PROBLEM.variant("eager"), name="small", make=make, shrink=8)
    size = Size("broad", (4104, 4104), 3)
    record = compare.bench(PROBLEM, size=size, device="cpu", variants=[small], rounds=5)["small"]
    assert set(seen) == {(513, 513)} and record.shape["K"] == 4104 and record.extrapolated
    assert "measured at K = 513, N = 513, times 64" in record.reason
    assert record.passed and record.rel_error < 1e-5, "held against its own float64"
    seen.clear()
    compare.bench(PROBLEM, size="laptop", device="cpu", variants=[small], rounds=5)
    assert set(seen) == {(2048, 2048)}, "small enough as it is"


def test_the_fold_that_is_timed_is_the_one_that_the_product_takes():
    """Where halves are multiplied, splitting the weights is part of it."""
    model, (x,) = PROBLEM.model(SMALL), PROBLEM.inputs(SMALL)
    found = compare.bench(PROBLEM, size=SMALL, device="cpu", variants=["eager", "fused"]).records
    p = dataclasses.replace(PROBLEM, fold_halves=lambda model: (torch.zeros(1000),))
    flush = timing.Flush(x.device, "none")
    for method, size in (("", found[-1].fold_bytes), ("fp16x3", 4000)):
        ours = [dataclasses.replace(r, method=method) for r in found]
        folded = compare._with_folds(p, model, x.device, flush, ours)
        assert folded[-1].fold_bytes == size
    both = [dataclasses.replace(found[-1], method=method, run=method) for method in ("", "fp16x1")]
    mixed = compare._with_folds(p, model, x.device, flush, both)
    assert [r.fold_bytes for r in mixed] == [found[-1].fold_bytes, 4000], "each its own"
