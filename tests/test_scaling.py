"""Sweeps: what a record says, what fails, where ours is overtaken, and nothing else changes."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import math
import weakref

import pytest
import test_plot
import torch
from kit import PROBLEMS
from sum_chain import PROBLEM
from test_compare import REACH, SMALL, broken, by_hand

import workbook as wb
from workbook import (
    ceilings,
    cli,
    compare,
    crossings,
    journal,
    paths,
    plot,
    results,
    scaling,
    sweeps,
    tables,
)
from workbook.journal import Record, Records
from workbook.record import AXES
from workbook.spec import SWEEPS, Size

P = dataclasses.replace(PROBLEM, sizes={"laptop": dataclasses.replace(SMALL, name="laptop")})
QUICK = {"device": "cpu", "rounds": 3, "budget_s": 1.0, "flush": "none"}
BARE = QUICK | {"variants": ["eager", "algebra", "fused"]}
H200 = "NVIDIA H200"


@pytest.fixture(autouse=True)
def _runs(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBOOK_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda device="cpu", progress=False: REACH)


# --- what is recorded -----------------------------------------------------------------------------


@pytest.mark.parametrize("axis", AXES)
def test_a_record_says_what_was_timed(axis, tmp_path):
    found = wb.sweep(P, axis, values=[40, 8, 8], **BARE)
    assert [(r.shape[axis], results.key_of(r)) for r in found] == [
        (value, key) for value in (8, 40) for key in ("eager", "algebra", "fused")
    ]
    middle = {"B": 33, "K": 64, "N": 48}
    for r in found:
        assert r.kind == "curve" and r.how["axis"] == axis and r.how["compile_mode"] == "default"
        assert {k: v for k, v in r.shape.items() if k != axis} == {
            k: v for k, v in middle.items() if k != axis
        }
        assert (r.size, r.mode, r.route, r.device) == (f"over {axis}", "eval", "float32", "cpu")
        assert len(r.samples_ms) == 3 and all(ms > 0 for ms in r.samples_ms)
        assert r.floor_ms == compare.limits.floor_ms(P.work["after"](**r.shape), REACH).ms
        assert r.how["flush"] == "none" and r.how["timer"] == "wall clock"
        assert r.rel_error < 1e-5 and r.rel_error_eager < 1e-5 and r.limit >= 2e-7
        assert r.commit and r.date and r.card and bool(r.kernels_digest) == (r.variant == "fused")
        assert r.launches is None and r.fold_ms is None and "host_us_grad" not in r.how
    assert len({r.run for r in found}) == 1
    assert list(journal.load(tmp_path / "runs")) == list(found)


def test_values_are_recorded_one_after_the_other(tmp_path):
    seen = []

    def make(model):
        seen.append(len(journal.load(tmp_path / "runs")))
        return model

    wb.sweep(
        P, "K", values=[8, 16, 32], **QUICK | {"variants": [dataclasses.replace(EAGER, make=make)]}
    )
    assert seen == [0, 1, 2], "an interrupted sweep keeps what it has"


EAGER = by_hand("by hand")


def test_keep_writes_to_data_and_the_ceilings_once(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "data", lambda: tmp_path / "data")
    reading = Record(kind="ceiling", problem="", variant="read", card="here", value=1.0)
    monkeypatch.setattr(ceilings, "measured_records", lambda device: Records([reading]))
    wb.sweep(P, "K", values=[8, 16], **BARE)
    assert not (tmp_path / "data").exists()
    found = wb.sweep(P, "K", values=[8, 16], keep=True, **BARE)
    kept = journal.load(tmp_path / "data")
    assert kept.query(kind="curve") == list(found) and kept.query(kind="ceiling") == [reading]
    assert len(journal.load(tmp_path / "runs")) == 12


def test_models_are_equal_wherever_they_are_drawn():
    model, x = scaling._drawn(P, SMALL, "train", torch.device("cpu"))
    assert model.training and x.shape == (33, 64)
    before = torch.get_rng_state()
    assert torch.equal(model.linear.weight, P.model(SMALL).linear.weight)
    scaling._drawn(P, SMALL, "eval", torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before), "the user's generator stays"


def test_a_size_is_gone_before_the_next_one(monkeypatch):
    models = []

    def make(model):
        assert not any(ref() for ref in models), "a model of another size is still there"
        models.append(weakref.ref(model))
        held = [model]
        held.append(held)  # as compiled code does: a cycle, which only the collector frees
        return lambda x: held[0](x)

    tried = dataclasses.replace(EAGER, make=make)
    monkeypatch.setattr(torch._dynamo, "reset", lambda: None)
    gc.disable()
    try:
        found = wb.sweep(P, "N", values=[8, 16, 32], **QUICK | {"variants": [tried]})
    finally:
        gc.enable()
    assert len(models) == 3 and all(r.samples_ms for r in found), found[-1].reason


def test_the_first_rows_are_judged_and_the_shape_of_all():
    rows = scaling.ROWS
    wrong = {
        "first": lambda y: y.index_fill(0, torch.tensor([0]), 7.0),
        "beyond": lambda y: y.index_fill(0, torch.tensor([rows]), 7.0),
        "short": lambda y: y[:-1],
        "flat": lambda y: y.squeeze(1),
        "scalar": lambda y: y.sum(),
    }
    tried = [
        dataclasses.replace(by_hand(n), make=lambda model, f=f: lambda x: f(model(x)))
        for n, f in wrong.items()
    ]
    found = wb.sweep(P, "B", values=[rows + 1], **QUICK | {"variants": tried})
    assert {r.variant: r.passed for r in found} == {
        "first": False, "beyond": True, "short": False, "flat": False, "scalar": False,
    }  # fmt: skip
    assert {r.rel_error for r in found[2:]} == {math.inf}


def test_in_train_mode_every_row_is_judged_and_one_row_is_no_batch():
    p = wb.problem("gemm_batchnorm_scale_softmax")
    p = dataclasses.replace(p, sizes={"laptop": Size("laptop", (16, 12), 8)})
    assert list(scaling._points(p, "B", None, "cpu", "train"))[0] == 2
    assert list(scaling._points(p, "B", None, "cpu", "eval"))[0] == 1
    model, (x,) = p.model("laptop", mode="train"), p.inputs("laptop")
    assert len(compare.Truth(model, x, 3).exact) == 8
    assert len(compare.Truth(model.eval(), x, 3).exact) == 3
    found = wb.sweep(p, "B", values=[1, 4], mode="train", **BARE)
    assert {r.mode for r in found} == {"train"}
    assert [bool(r.samples_ms) for r in found] == [False] * 3 + [True] * 3
    assert "Expected more than 1 value" in found[0].reason


# --- the sizes a sweep goes through ---------------------------------------------------------------


@pytest.mark.parametrize("slug", [subject.slug for subject in PROBLEMS])
@pytest.mark.parametrize("device", SWEEPS)
def test_default_sizes(slug, device):
    p = wb.problem(slug)
    middle = p.shape("paper" if device == "cuda" else "laptop")
    for axis in AXES:
        for mode in p.modes:
            points = scaling._points(p, axis, None, device, mode)
            values = list(points)
            assert 6 <= len(values) <= 8 and all(v & (v - 1) == 0 for v in values)
            assert values[0] < middle[axis] / 8 and values[-1] >= 2 * middle[axis]
            assert device == "cpu" or middle[axis] in values
            for value, size in points.items():
                assert p.shape(size) == middle | {axis: value} and size.name == f"over {axis}"
                shape = p.shape(size)
                most = {"cpu": 1 << 29, "cuda": 9 << 30}[device]
                assert 4 * shape["K"] * shape["N"] <= most, "bytes of weights"
                assert 4 * shape["B"] * max(shape["K"], shape["N"]) <= most, "bytes of x, of z"


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"axis": "M"}, ValueError, "axis: got 'M', wants one of B, K, N"),
        ({"values": []}, ValueError, "values: got none, wants sizes of K; leave it out for"),
        ({"values": [0]}, ValueError, "values: got 0, wants whole numbers of at least 1 as sizes"),
        ({"values": [8, 2.5]}, ValueError, "values: got 2.5, wants whole numbers"),
        ({"values": [True]}, ValueError, "values: got True, wants whole numbers"),
        ({"values": ["8"]}, ValueError, "values: got '8', wants whole numbers"),
        ({"variants": []}, ValueError, "variants: got none, wants keys of variants, or None"),
        ({"variants": ["fussed"]}, KeyError, "variant: got 'fussed'.*fused"),
        ({"mode": "train"}, KeyError, "mode: got 'train'; .* has eval"),
        ({"routes": ["bf16"]}, ValueError, "routes: got bf16, wants a list with some of float32"),
        ({"routes": []}, ValueError, "routes: got none, wants a list with some of float32, tf32"),
        ({"routes": "tf32"}, ValueError, "routes: got 'tf32', wants a list"),
        ({"routes": ["tf32"]}, ValueError, "routes: got tf32, .*only float32: leave routes out"),
        ({"compile_at": [9]}, ValueError, "compile_at: got 9, wants some of the sweep's values, 8"),
        ({"flush": "l2"}, ValueError, "flush: got 'l2', wants one of read, write, none"),
    ],
)
def test_bad_arguments_are_told_and_nothing_is_recorded(options, kind, words, tmp_path):
    given = {"axis": "K", "values": [8], **BARE} | options
    with pytest.raises(kind, match=words):
        wb.sweep(P, given.pop("axis"), **given)
    assert not journal.load(tmp_path / "runs")


def test_without_such_a_device_nothing_is_timed():
    if not torch.cuda.is_available():
        with pytest.raises(Exception, match="device is 'cuda'.*use 'cpu'"):
            wb.sweep(P, "K", values=[8], **BARE | {"device": "cuda"})


def test_numbers_of_other_libraries_are_sizes():
    numpy = pytest.importorskip("numpy")
    found = wb.sweep(P, "K", values=numpy.array([8]), **BARE)
    assert found[0].shape["K"] == 8 and json.loads(found[0].to_json())["shape"]["K"] == 8


def test_variants_by_route():
    def keys(routes, device="cuda"):
        return [v.key for v in scaling._chosen(P, None, routes, device, "eval")]

    assert keys(["float32"], "cpu") == ["eager", "compile", "algebra", "fused"]
    assert keys(["float32"]) == ["eager", "compile", "algebra", "fused"]
    assert keys(["tf32"]) == ["eager/tf32", "compile/tf32", "algebra/tf32", "fused/tf32"]
    assert len(keys(["float32", "tf32"])) == 8
    assert keys(["tf32"], "cuda:0") == keys(["tf32"])


# --- torch.compile, and what raises ---------------------------------------------------------------


def test_compile_is_in_its_default_mode_and_where_it_is_wanted(monkeypatch):
    seen = []

    def compiled(model, **how):
        seen.append((model.linear.in_features, how))
        return model

    monkeypatch.setattr(torch, "compile", compiled)
    found = wb.sweep(P, "K", values=[8, 16, 32], compile_at=[16], **QUICK)
    assert seen == [(16, {"fullgraph": True})], "no mode: the default one"
    assert [r.shape["K"] for r in found if r.variant == "compile"] == [16]
    assert [r.shape["K"] for r in found if r.variant == "fused"] == [8, 16, 32]
    found = wb.sweep(P, "K", values=[8, 16], **QUICK)
    assert [r.shape["K"] for r in found if r.variant == "compile"] == [8, 16]
    seen.clear()
    own = dataclasses.replace(by_hand("compile"), idea="a reader's own")
    found = wb.sweep(P, "K", values=[8], **QUICK | {"variants": [own]})
    assert not seen and found[0].samples_ms
    assert not wb.sweep(P, "K", values=[8], compile_at=[], **QUICK | {"variants": [own]})


def test_a_variant_that_raises_is_kept_and_the_sweep_goes_on(tmp_path):
    full = broken(torch.OutOfMemoryError("CUDA out of memory\nmore"))
    found = wb.sweep(P, "K", values=[8, 16], **QUICK | {"variants": ["eager", full]})
    assert [(r.variant, bool(r.samples_ms), r.passed) for r in found] == [
        ("eager", True, True), ("broken", False, False),
    ] * 2  # fmt: skip
    assert {r.reason for r in found if r.variant == "broken"} == {
        "OutOfMemoryError: CUDA out of memory"
    }
    assert all(r.how["axis"] == "K" and r.shape["K"] for r in found)
    assert list(journal.load(tmp_path / "runs")) == list(found)


def test_a_size_that_the_model_has_not_is_kept_and_the_sweep_goes_on():
    p = wb.problem("matmul_avgpool_gelu_scale_max")
    p = dataclasses.replace(p, sizes={"laptop": Size("laptop", (8, 8, 4, 2.0), 5)})
    found = wb.sweep(p, "N", values=[2, 8], **BARE)
    assert [bool(r.samples_ms) for r in found] == [False] * 3 + [True] * 3
    assert all(r.passed is False and "too small" in r.reason for r in found[:3])
    assert found[0].shape == {"B": 5, "K": 8, "N": 2, "pool": 4}
    assert "Did not run: PyTorch eager at N 2" in words(plot.scaling(found))


def test_an_interrupted_sweep_stops():
    with pytest.raises(KeyboardInterrupt):
        wb.sweep(P, "K", values=[8], **QUICK | {"variants": [broken(KeyboardInterrupt())]})


# --- where ours is overtaken ----------------------------------------------------------------------


def curve(axis, value, variant, ms, **more) -> Record:
    """A record as a GPU would leave it, at paper size but for one axis."""
    shape = {"B": 1024, "K": 8192, "N": 8192} | {axis: value}
    about = {
        "kind": "curve", "problem": PROBLEM.slug, "variant": variant, "route": "float32",
        "device": "cuda", "card": H200, "size": f"over {axis}", "shape": shape, "mode": "eval",
        "dtype": "float32", "floor_ms": 0.004, "passed": ms is not None, "run": f"r{axis}",
        "how": {"axis": axis, "compile_mode": "default", "flush": "read"},
        "date": "2026-11-20T10:00:00Z", "commit": "5f1a0ff2b",
        "samples_ms": (ms * 0.99, ms, ms * 1.02) if ms else (),
    }  # fmt: skip
    return Record(**about | more)


def line(axis="K", **times) -> Records:
    """eager=(ms, ms, ...), fused=...: over 10, 100, 1000, ...; None is a run that failed."""
    return Records(
        curve(axis, 10 ** (1 + n), variant, ms, reason="" if ms else "RuntimeError: no room")
        for variant, series in times.items()
        for n, ms in enumerate(series)
    )


def crossed(**times) -> crossings.Crossing:
    return crossings.crossing_of(crossings.points_of(line(**times), "K"), "K")


@pytest.mark.parametrize(
    ("others", "ours", "spans", "says"),
    [
        ((4, 4, 4), (1, 1, 1), [], "nowhere"),
        ((1, 1, 1), (4, 4, 4), [(None, None)], "everywhere"),
        ((1, 1, 1), (1, 1, 1), [(None, None)], "everywhere"),  # as fast is not faster
        ((1, 4, 4), (2, 1, 1), [(None, 10 * 10 ** (1 / 3))], "up to 22"),
        ((4, 4, 1), (1, 1, 2), [(100 * 10 ** (2 / 3), None)], "from 460"),
        ((1, 4, 4), (1, 1, 1), [(None, 10)], "up to 10"),  # just even at the first size
        ((4, 4, 1), (1, 1, 1), [(1000, None)], "from 1\u202f000"),
        ((1, 4, 1), (2, 2, 2), [(None, 10**1.5), (10**2.5, None)], "up to 32 and from 320"),
        ((4, 1, 4), (2, 2, 2), [(10**1.5, 10**2.5)], "from 32 to 320"),
        ((4,), (1,), [], "nowhere"),
        ((1,), (4,), [(None, None)], "everywhere"),
        ((4, 4, 4), (1, 1, None), [(100, None)], "from 100"),  # ours had no room
        ((1, None, None), (2, 2, 2), [(None, 10)], "up to 10"),  # the others had none
        ((None, 4), (None, 1), [], "nowhere"),
    ],
)
def test_crossovers_with_known_answers(others, ours, spans, says):
    found = crossed(eager=others, fused=ours)
    assert len(found.spans) == len(spans)
    for got, wanted in zip(found.spans, spans, strict=True):
        assert [g is None for g in got] == [w is None for w in wanted]
        kept = [(g, w) for g, w in zip(got, wanted, strict=True) if w is not None]
        assert all(g == pytest.approx(w) for g, w in kept), (got, wanted)
    assert found.words == says


def test_ours_is_held_against_the_best_of_the_others():
    assert crossed(eager=(9, 9), compile=(4, 9), algebra=(9, 1), fused=(2, 2)).ratios == (
        (10, pytest.approx(2.0)), (100, pytest.approx(0.5)),
    )  # fmt: skip
    assert crossed(eager=(9, 9), compile=(None, 1), fused=(2, 2)).words == "from 48"


def test_a_wrong_result_wins_nothing():
    found = line(eager=(4,), fused=(1,))
    found = [dataclasses.replace(r, passed=r.variant != "fused") for r in found]
    (point,) = crossings.points_of(Records(found), "K")
    assert point.ratio == 0 and crossings.crossing_of([point], "K").words == "everywhere"


def test_a_slow_algebra_outside_the_rule_still_counts():
    """The rule is for ours: a rival that is less exact is a rival."""
    found = line(eager=(4,), algebra=(0.5,), fused=(1,))
    found = Records(dataclasses.replace(r, passed=r.variant != "algebra") for r in found)
    assert crossings.points_of(found, "K")[0].ratio == pytest.approx(0.5)


def test_of_a_size_that_was_timed_twice_the_newer_counts():
    later = {"run": "later", "date": "2026-11-21T10:00:00Z"}
    found = [*line(eager=(4,), fused=(1,)), curve("K", 10, "eager", 0.5, **later)]
    (point,) = crossings.points_of(Records(found), "K")
    assert point.timings["eager"].ms == 0.5


def test_baselines_of_a_route_and_ours_as_it_is():
    fast = [dataclasses.replace(r, route="tf32") for r in line(eager=(2,))]
    found = Records([*line(eager=(4,), fused=(3,)), *fast])
    assert crossings.points_of(found, "K")[0].ratio == pytest.approx(4 / 3)
    (point,) = crossings.points_of(found, "K", "tf32")
    assert point.ratio == pytest.approx(2 / 3) and point.timings["fused"].record.route == "float32"
    ours = [dataclasses.replace(r, route="tf32") for r in line(fused=(1,))]
    (point,) = crossings.points_of(Records([*found, *ours]), "K", "tf32")
    assert point.ratio == pytest.approx(2.0)


def test_without_a_comparison_there_is_no_crossover():
    for times in ({"fused": (1, 1)}, {"eager": (1, 1)}):
        with pytest.raises(ValueError, match="no size of K with both fused and one of eager"):
            crossed(**times)
    other = dataclasses.replace(curve("K", 100, "fused", 1.0), shape={"B": 7, "K": 100, "N": 8192})
    with pytest.raises(ValueError, match="several shapes beside K: B 1024, N 8192; B 7, N 8192"):
        crossings.points_of(Records([*line(fused=(1,)), other]), "K")


# --- the figure -----------------------------------------------------------------------------------


B = (1, 8, 64, 512, 4096, 32768)
FEATURES = (32, 128, 512, 2048, 8192, 32768, 131072)


def gpu(**more) -> Records:
    """Made up, as a GPU would: launch-bound at first; ours loses at small batches and large N."""
    found = Records()
    for axis in AXES:
        for value in B if axis == "B" else FEATURES:
            work = math.prod(curve(axis, value, "", 1.0).shape.values()) / (1024 * 8192 * 8192)
            times = {"eager": 0.02 + 2.7 * work, "compile": 0.012 + 2.7 * work}
            times["algebra"] = 0.009 + 0.5 * work + (0.3 * work if axis == "N" else 0)
            times["fused"] = 0.012 + 0.25 * work ** (1.6 if axis == "N" else 1)
            floor = 0.002 + 0.2 * work
            found += [
                curve(axis, value, v, None if (axis, value, v) == FAILED else ms, floor_ms=floor,
                      reason="OutOfMemoryError: no room" if (axis, value, v) == FAILED else "",
                      **more)
                for v, ms in times.items()
            ]  # fmt: skip
    return found


FAILED = ("N", 131072, "compile")


def words(picture) -> str:
    return " ".join(test_plot.texts(picture))


def drawn(picture) -> dict[str, list]:
    """gid of a line -> its points."""
    every = [line for axes in picture.figure.axes for line in axes.get_lines()]
    return {line.get_gid(): line.get_xydata().tolist() for line in every if line.get_gid()}


def with_wrong() -> Records:
    found = gpu()
    for n, r in enumerate(found):
        if (r.variant in ("fused", "algebra")) and r.shape["K"] == 131072:
            found[n] = dataclasses.replace(r, passed=False, reason="error 1e-3")
    return found


def in_tf32() -> Records:
    every = [dataclasses.replace(r, route="tf32") for r in gpu() if r.variant != "fused"]
    return Records([*every, *gpu().query(variant="fused")])


PICTURES = {
    "three axes": lambda: plot.scaling(gpu()),
    "two axes": lambda: plot.scaling([r for r in gpu() if r.how["axis"] != "K"]),
    "one axis": lambda: plot.scaling([r for r in gpu() if r.how["axis"] == "N"]),
    "one size": lambda: plot.scaling(line(eager=(4,), fused=(1,))),
    "much crossed": lambda: plot.scaling(line(eager=(1, 4, 1, 4, 1), fused=(2, 2, 2, 2, 2))),
    "wrong": lambda: plot.scaling(with_wrong()),
    "tf32": lambda: plot.scaling(in_tf32(), "tf32"),
    "ours failed": lambda: plot.scaling(line(eager=(4, 4), fused=(None, None))),
    "no floor": lambda: plot.scaling(
        [dataclasses.replace(r, floor_ms=None) for r in line(eager=(4, 4), fused=(2, 8))]
    ),
    "pool": lambda: plot.scaling(
        [dataclasses.replace(r, shape=r.shape | {"pool": 16}) for r in gpu()]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PICTURES)
def test_texts_are_apart_and_large_enough(name, monkeypatch):
    for families in (None, ["DejaVu Sans"]):
        if families:
            monkeypatch.setattr(test_plot.chart, "_families", lambda: ["DejaVu Sans"])
        test_plot.chart.width_of.cache_clear()
        picture = PICTURES[name]()
        test_plot.test_texts_are_apart_and_on_the_canvas(None, picture)
        test_plot.test_type_is_at_least_nine_points(picture)
        assert picture.png().startswith(b"\x89PNG") and 'alt=""' not in picture._repr_html_()
    test_plot.chart.width_of.cache_clear()


def test_lines_hold_the_medians_and_the_floor():
    found, points = gpu(), drawn(plot.scaling(gpu()))
    for axis in AXES:
        for name in ("eager", "compile", "algebra", "fused"):
            its = [r for r in found if r.how["axis"] == axis and r.variant == name]
            wanted = [[r.shape[axis], r.median_ms or math.nan] for r in its]
            for got, own in zip(points[f"{axis}/{name}"], wanted, strict=True):
                assert got == pytest.approx(own, nan_ok=True)
        floors = {r.shape[axis]: r.floor_ms for r in found if r.how["axis"] == axis}
        assert points[f"{axis}/floor"] == [[v, pytest.approx(ms)] for v, ms in floors.items()]


def test_rings_are_where_ours_is_even():
    points = drawn(plot.scaling(gpu()))
    for axis in AXES:
        crossing = crossings.crossing_of(crossings.points_of(gpu(), axis), axis)
        rings = sorted(p[0][0] for gid, p in points.items() if gid.startswith(f"{axis}/even/"))
        assert rings == pytest.approx(crossing.edges) and len(rings) == 1
    (ring,) = [p for gid, p in drawn(PICTURES["no floor"]()).items() if gid.startswith("K/even/")]
    assert ring == [[pytest.approx(10**1.5), pytest.approx(4.0)]], "on the line of ours"


def test_what_failed_leaves_a_gap_and_is_named():
    picture = plot.scaling(gpu())
    assert "Did not run: torch.compile at N 131072" in words(picture)
    assert math.isnan(drawn(picture)["N/compile"][-1][1])
    assert "failed at 131072" in picture.alt


def test_a_wrong_result_is_crossed_out():
    picture = PICTURES["wrong"]()
    every = [line for axes in picture.figure.axes for line in axes.get_lines()]
    crosses = [line.get_xydata()[0].tolist() for line in every if line.get_marker() == "x"]
    ours = drawn(picture)["K/fused"][-1]
    assert crosses == [ours] and ours[0] == 131072, "ours alone, its rivals need not be right"
    assert "outside the accuracy rule" in words(picture)
    assert not [gid for gid in drawn(plot.scaling(gpu())) if "wrong" in gid]


def test_the_alternative_text_has_the_numbers():
    alt = plot.scaling(line(eager=(1, 4), algebra=(8, 8), fused=(2, 2))).alt
    assert alt.startswith("Ours is 0.50× to 2.0× as fast as the best of PyTorch, not the fastest ")
    for said in (
        "not the fastest at 1 of 2 sizes", f"{PROBLEM.slug} on {H200}, eval mode",
        "Over K (B 1024, N 8192): PyTorch eager 1.00 ms at 10, 4.00 ms at 100",
        "ours (ModelNew) 2.0", "floor 4.0 µs at 10", "where ours is not the fastest: up to 32.",
    ):  # fmt: skip
        assert said in alt, said
    assert "the fastest at all 2 sizes" in plot.scaling(line(eager=(4, 4), fused=(1, 1))).alt


def test_the_caption_says_how():
    said = words(plot.scaling(gpu()))
    for part in (H200, PROBLEM.slug, "compile mode default", "cold cache", "eval mode"):
        assert part in said
    assert "2026-11-20, commit\u00a05f1a0ff" in said


def test_axes_have_common_heights_and_their_own_sizes():
    axes = plot.scaling(gpu()).figure.axes
    assert len(axes) == 3 and len({a.get_ylim() for a in axes}) == 1
    assert {a.get_xscale() for a in axes} == {a.get_yscale() for a in axes} == {"log"}
    assert axes[0].get_xlim() != axes[1].get_xlim()
    (low, high), every = axes[0].get_ylim(), [r for r in gpu() if r.samples_ms]
    assert low < min(r.floor_ms for r in every) and max(r.median_ms for r in every) < high
    places = [a.get_position() for a in axes]
    assert all(a.x1 < b.x0 for a, b in itertools.pairwise(places))


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([], "scaling: records: got 0 records, none of a sweep; want some: run wb.sweep"),
        (line(eager=(1,), fused=(1,)) + [curve("N", 10, "fused", 1.0, problem="other")],
         "several values of problem"),
        (line(eager=(1,), fused=(1,)) + [curve("N", 10, "fused", 1.0, card="other")],
         "several values of card"),
        (line(eager=(1,), fused=(1,)) + [curve("N", 10, "fused", 1.0, mode="train")],
         "several values of mode"),
        ([test_plot.timed("eager", 1.0)], "got 1 records, none of a sweep"),
        (line(fused=(1,)), "no size of K with both fused and one of eager"),
        (line(eager=(None,), fused=(None,)), "no size of K with both"),
    ],
)  # fmt: skip
def test_what_can_not_be_drawn_is_told(records, says):
    with pytest.raises(ValueError, match=says):
        plot.scaling(records)


# --- the table, and which sweep is shown ----------------------------------------------------------


def today(records) -> Records:
    digest = tables.kernels_digest(PROBLEM.slug, PROBLEM.variant("fused", "cuda"), "cuda")
    return Records(
        dataclasses.replace(r, kernels_digest=digest if r.variant == "fused" else "")
        for r in records
    )


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Writes records to a data/ of its own, which is all there is."""
    monkeypatch.setattr(paths, "data", lambda: tmp_path / "data")

    def write(records) -> None:
        for record in records:
            journal.append(record, journal.place(record, tmp_path / "data"))

    return write


def test_the_table_has_a_row_a_card_and_route(kept):
    assert str(wb.crossovers()) == "no sweeps are recorded"
    assert str(wb.crossovers(Records([test_plot.timed("eager", 1.0)]))) == "no sweeps are recorded"
    kept(today(gpu()))
    tf32 = [dataclasses.replace(r, route="tf32", run="rK") for r in line(eager=(0.5, 0.5))]
    ours = today(line(eager=(4, 4), fused=(1, 2)))
    other = [dataclasses.replace(r, card="another", device="cpu", kernels_digest="")
             for r in line(eager=(4, 1), fused=(1, 2))]  # fmt: skip
    text = str(wb.crossovers())
    rows = [row for row in text.splitlines() if row.startswith("| `")]
    assert len(rows) == 1 and f"| {H200} | float32, torch.compile too |" in rows[0]
    assert f"| `{PROBLEM.slug}` |" in rows[0], "one mode: none is named"
    assert "the best of eager, the algebra in plain torch and, where the row says so" in text
    text = str(wb.crossovers(Records([*ours, *tf32, *other])))
    assert text.count("| `") == 3
    first, second, third = [row for row in text.splitlines() if row.startswith("| `")]
    assert first == (
        f"| `{PROBLEM.slug}` | {H200} | float32 | – | nowhere; 2.0× at 100 to 4.0× at 10 | – |"
    )
    assert second.startswith(f"| `{PROBLEM.slug}` | {H200} | TF32 | – | everywhere; 0.25× at 100")
    assert "| another (stale) | float32 | – | from 46; 0.50× at 100 to 4.0× at 10 | – |" in third


def test_an_axis_that_was_swept_by_one_route_alone_is_left_out_of_the_other(kept):
    """A sweep of K by both routes, of B in float32 and of N in TF32: no row raises."""
    both = line("K", eager=(4, 4), fused=(1, 2))
    fine = line("B", eager=(4, 4), fused=(1, 2))
    coarse = [dataclasses.replace(r, route="tf32") for axis in "KN"
              for r in line(axis, eager=(2, 2), fused=(1, 1))]  # fmt: skip
    text = str(wb.crossovers(Records(today(Records([*both, *fine, *coarse])))))
    first, second = [row for row in text.splitlines() if row.startswith("| `")]
    assert "| float32 | nowhere" in first and first.endswith("| – |")
    assert "| TF32 | – | nowhere" in second and not second.endswith("| – |")
    for route in ("float32", "tf32"):
        assert plot.scaling(Records(today(Records([*both, *fine, *coarse]))), route).alt


def test_a_fuller_sweep_of_today_is_shown(kept):
    full, look = today(gpu()), line(eager=(1, 1), fused=(2, 2))
    look = [dataclasses.replace(r, run="look", date="2026-12-01T10:00:00Z") for r in today(look)]
    newer = [dataclasses.replace(r, run="new " + r.run, date="2026-11-30T10:00:00Z") for r in full]
    stale = [dataclasses.replace(r, run="old " + r.run, date="2026-12-02T10:00:00Z") for r in gpu()]
    kept([*look, *stale])
    assert {r.run for r in wb.swept(PROBLEM)} == {"old rB", "old rK", "old rN"}, "not a first look"
    kept(full)
    assert {r.run for r in wb.swept(PROBLEM)} == {"rB", "rK", "rN"}
    kept(newer)
    assert {r.run for r in wb.swept(PROBLEM.slug)} == {"new rB", "new rK", "new rN"}
    assert "Stale" not in str(wb.label(PROBLEM, wb.swept(PROBLEM)))
    assert plot.scaling(wb.swept(PROBLEM)).alt == plot.scaling(full).alt
    assert wb.swept(PROBLEM, device="cpu") == [] == wb.swept(PROBLEM, card="none")


def test_of_several_cards_one_is_shown(kept):
    kept(today(gpu()))
    kept(today(gpu(card="a newer card", date="2026-12-01T10:00:00Z")))
    assert {r.card for r in wb.swept(PROBLEM)} == {"a newer card"}
    assert {r.card for r in wb.swept(PROBLEM, card=H200)} == {H200}
    kept([dataclasses.replace(r, card="newest", date="2026-12-02T10:00:00Z") for r in gpu()])
    assert {r.card for r in wb.swept(PROBLEM)} == {"a newer card"}, "the newest is stale"


def test_a_label_names_a_stale_variant_once():
    label = str(wb.label(PROBLEM, gpu()))
    assert label.endswith("**Stale** (sources or ways changed since): fused.")


# --- what was there stays as it was ---------------------------------------------------------------


def test_tables_and_figures_of_benches_do_not_see_sweeps():
    real = journal.load(paths.data())
    mixed = Records([*gpu(date="2030-01-01T00:00:00Z"), *real])
    for table in (tables.summary, tables.cover, tables.on_one_card, tables.host_lines):
        before, after = table(real), table(mixed)
        if isinstance(before, plot.Picture):
            before, after = before.alt, after.alt
        assert before == after, table.__name__
    its = real.query(kind="bench", problem=PROBLEM.slug, card=H200, size="paper", flush="read")
    swept = [r for r in mixed if r.kind == "curve"]
    assert plot.ladder([*its, *swept]).alt == plot.ladder(its).alt
    assert plot.overview([*its, *swept]).alt == plot.overview(its).alt
    assert plot.waterfall([*its, *swept]).alt == plot.waterfall(its).alt
    benches = Records(r for r in mixed.newest() if r.kind == "bench")
    assert benches == Records(r for r in real.newest() if r.kind == "bench")


def test_newest_keeps_whole_sweeps():
    later = gpu(date="2026-11-21T10:00:00Z")
    later = [dataclasses.replace(r, run=f"later {r.run}") for r in later]
    assert Records([*gpu(), *later]).newest() == sorted(
        later, key=[*Records([*gpu(), *later]).newest()].index
    )


def test_recorded_runs_do_not_see_sweeps(kept):
    real = journal.load(test_plot.paths.root() / "data" / "nvidia-h200")
    kept(real.query(problem=PROBLEM.slug))
    before = wb.recorded(PROBLEM)
    kept(today(gpu(date="2030-01-01T00:00:00Z")))
    assert wb.recorded(PROBLEM) == before and wb.predicted(before) is not None


# --- the command line -----------------------------------------------------------------------------


def command(capsys, *arguments) -> tuple[int, str, str]:
    status = cli.main(["sweep", PROBLEM.slug, "--device", "cpu", *arguments])
    said = capsys.readouterr()
    return status, said.out, said.err


FEW = ("--axis", "K", "--values", "16,8", "--variants", "eager,fused", "--rounds", "3")


def test_the_command_prints_a_table_an_axis(capsys, tmp_path):
    status, out, _ = command(capsys, *FEW)
    assert status == 0 and out.startswith(f"{PROBLEM.slug} on ")
    head, *rows = [row.split("  ") for row in out.splitlines()[1:4]]
    assert head[0] == "K (B 256, N 2048)" and head[1].strip() == "eager"
    assert [row[0].strip() for row in rows] == ["8", "16"] and out.count("\n8 ") == 1
    assert "ours is not the fastest: " in out
    found = journal.load(tmp_path / "runs")
    assert len(found) == 4 and {len(r.samples_ms) for r in found} == {3}


def test_the_command_prints_objects(capsys):
    status, out, _ = command(capsys, *FEW, "--json")
    found = [json.loads(row) for row in out.splitlines()]
    assert status == 0 and [one["shape"]["K"] for one in found] == [8, 8, 16, 16]
    assert all(one["size"] == "over K" and one["median_ms"] > 0 for one in found)


def test_the_command_tells_what_failed(capsys, monkeypatch):
    monkeypatch.setattr(compare.timing, "once_ms", lambda *a: 1 / 0)
    status, out, _ = command(capsys, *FEW)
    assert status == 0 and "eager failed: ZeroDivisionError: division by zero" in out
    assert "ours is not the fastest" not in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--values", "8,x"), "--values: got '8,x', wants sizes such as 32,512,8192"),
        (("--values", "0"), "values: got 0, wants whole numbers of at least 1"),
        (("--compile-at", "8;16"), "--compile-at: got '8;16', wants sizes"),
        (("--compile-at", "7", "--values", "8"), "compile_at: got 7, wants some of"),
        (("--route", "tf32"), "routes: got tf32, .*leave routes out"),
        (("--mode", "train"), "mode: got 'train'"),
        (("--variants", "fussed"), "variant: got 'fussed'"),
    ],
)
def test_the_command_refuses_in_one_line(arguments, says, capsys):
    status, out, err = command(capsys, *arguments)
    assert status == 2 and out == "" and len(err.splitlines()) == 1
    import re

    assert re.search(says, err)


def test_the_command_keeps_where_it_is_told(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "data", lambda: tmp_path / "data")
    monkeypatch.setattr(ceilings, "measured_records", lambda device: Records())
    command(capsys, *FEW)
    assert not (tmp_path / "data").exists()
    command(capsys, *FEW, "--keep")
    assert len(journal.load(tmp_path / "data")) == 4 and sweeps.swept(PROBLEM, device="cpu")
