"""The figures: the records are what is drawn, texts are apart and inside, bad input raises."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from workbook import chart, legend, paths, plot, plot_pipeline, style
from workbook.journal import Record, Records

SLUG = "matmul_sum_max_mean_logsumexp"
H100 = "NVIDIA H100 80GB HBM3"
PAPER = {"B": 1024, "K": 8192, "N": 8192}
LAPTOP = {"B": 256, "K": 2048, "N": 2048}
HOW = {"flush": "read", "clock": "CUDA events", "budget_s": 20.0}
FLOOR = 0.0152  # 33.6 MB at 3.0 TB/s and a launch


def samples(ms: float, spread: float = 0.02, count: int = 40) -> tuple[float, ...]:
    """Odd or even, their median is `ms` exactly, their quartiles are near ms (1 ± spread / 2)."""
    half = [ms * (1 + spread * (i + 0.5) / (count // 2)) for i in range(count // 2)]
    both = [*half, *(2 * ms - x for x in half)]
    random.Random(str(ms)).shuffle(both)
    return tuple(both)


def timed(variant: str, ms: float | None, spread: float = 0.02, **more: object) -> Record:
    about = {
        "kind": "bench", "problem": SLUG, "variant": variant, "route": "float32", "device": "cuda",
        "card": H100, "size": "paper", "shape": PAPER, "mode": "eval", "dtype": "float32",
        "how": HOW, "floor_ms": FLOOR, "date": "2026-11-20T10:00:00Z", "commit": "5f1a0ff2b",
        "run": "r1", "passed": True, "samples_ms": samples(ms, spread) if ms else (),
    }  # fmt: skip
    return Record(**about | more)


def predicted(variant: str, ms: float, **more: object) -> Record:
    plain = timed(variant, None, samples_ms=(), how={}, floor_ms=None, passed=None)
    return replace(plain, kind="prediction", value=ms, unit="ms", **more)


def h100() -> Records:
    """The sum chain on an H100, as measured, and a few made-up rungs."""
    return Records(
        [
            timed("eager", 2.76, 0.004),
            timed("compile", 2.69, 0.004),
            timed("algebra", 0.0217),
            timed("eager", 0.422, route="tf32"),
            timed("compile", 0.371, route="tf32"),
            timed("algebra", 0.0217, route="tf32"),
            timed(
                "01_row_in_shared", 300.0, 0.001, extrapolated=True,
                reason="16 of 1024 rows were run, the time is 64 times theirs",
            ),
            timed("02_fold_thread_per_sample", 0.9),
            timed("03_block_shared_tree", 0.021),
            timed("04_vector_warp_shuffle", 0.018),
            timed("05_whole_row_in_flight", 0.0155),
            timed("fused", 0.0155, fold_ms=samples(0.35)),
            timed("fused+fold", 0.36),
            timed("wrong_one_block", 0.002, passed=False),
            predicted("01_row_in_shared", 306.0),
            predicted("02_fold_thread_per_sample", 0.82),
            predicted("03_block_shared_tree", 0.0205),
            predicted("04_vector_warp_shuffle", 0.0172),
            predicted("05_whole_row_in_flight", 0.015),
        ]
    )  # fmt: skip


CPU = {"device": "cpu", "card": "AMD EPYC 7763 64-Core Processor", "size": "laptop",
       "shape": LAPTOP, "floor_ms": 0.081, "how": {"flush": "read", "threads": 2}}  # fmt: skip


def laptop() -> Records:
    """The sum chain on two cores of a CPU, with a wide spread; one rung failed, one is wrong."""
    return Records(
        [
            timed("eager", 36.4, 0.2, **CPU),
            timed("compile", None, **CPU, passed=False, reason="no C++ compiler was found"),
            timed("algebra", 0.131, 0.3, **CPU),
            timed("cpu_01_row_at_a_time", 412.0, 0.1, **CPU),
            timed(
                "cpu_02_folded_one_chain", 0.38, 0.15,
                **CPU | {"passed": False, "rel_error": 3.2e-3, "limit": 2e-7},
            ),
            timed("cpu", 0.092, 0.3, **CPU),
            timed("fused", 0.103, 0.3, **CPU, fold_ms=samples(5.1)),
            timed("tried", None, **CPU, passed=False, reason="tried.cpp:12: expected ';'"),
        ]
    )  # fmt: skip


FAMILIES = ("uniform", "normal", "mean 1000", "log-normal", "scaled rows", "cauchy", "zeros")


def checked(state: str, family: str, n: int, **more: object) -> Record:
    about = {
        "kind": "check", "problem": SLUG, "variant": "fused", "route": "float32",
        "device": "cuda", "card": H100, "size": "laptop", "shape": LAPTOP, "mode": "eval",
        "family": family, "state": state, "rel_error": 6e-8 * (1 + n), "seed": 0,
        "rel_error_rows": 9e-8 * (1 + n), "rel_error_eager": 2.4e-7 * (1 + n / 3),
        "rel_error_eager_rows": 3.1e-7 * (1 + n), "limit": 6.2e-7 * (1 + n), "passed": True,
        "date": "2026-11-20T10:00:00Z", "commit": "5f1a0ff2b",
    }  # fmt: skip
    return Record(**about | more)


def checks() -> Records:
    found = Records(
        checked(state, family, n)
        for state in ("default", "trained")
        for n, family in enumerate(FAMILIES[:-1])
    )
    exact = dict.fromkeys(("rel_error", "rel_error_rows"), 0.0)
    found.append(checked("default", "zeros", 0, **exact))
    wrong = {"passed": False, "reason": "not finite", "rel_error": float("nan")}
    return Records([*found, checked("default", "normal", 0, variant="wrong_log_exp", **wrong)])


SCORES = [
    {"name": "zeros", "rel_error": 1.0, "accepted": False},
    {"name": "a constant", "rel_error": 3.1e-2, "accepted": False},
    {"name": "bias left out", "rel_error": 2.3e-4, "accepted": False},
]


PROBLEMS = [
    SimpleNamespace(slug=SLUG, title="Linear → sum → max → mean → logsumexp → logsumexp"),
    SimpleNamespace(
        slug="matmul_avgpool_gelu_scale_max", title="Linear → AvgPool → GELU → scale → max"
    ),
    SimpleNamespace(
        slug="gemm_batchnorm_scale_softmax", title="Linear → BatchNorm → scale → softmax"
    ),
    SimpleNamespace(slug="matmul_maxpool_sum_scale", title="Linear → MaxPool → sum → scale"),
]


def all_problems() -> Records:
    pool, norm, halves = (p.slug for p in PROBLEMS[1:])
    made = [
        *(replace(r, problem=pool) for r in (
            timed("eager", 2.72), timed("compile", 2.71), timed("eager", 0.393, route="tf32"),
            timed("compile", 0.379, route="tf32"), timed("fused", 0.0712))),
        *(replace(r, problem=norm) for r in (
            timed("eager", 2.77), timed("compile", 2.72), timed("eager", 0.451, route="tf32"),
            timed("compile", 0.394, route="tf32"), timed("fused", 0.771),
            timed("fused", 0.38, route="tf32"))),
        *(replace(r, problem=halves, shape={"B": 128, "K": 32768, "N": 32768}) for r in (
            timed("eager", 5.34), timed("compile", 5.28), timed("eager", 1.494, route="tf32"),
            timed("fused", 0.853))),
    ]  # fmt: skip
    return Records([*h100(), *laptop(), *made])


PICTURES = {
    "ladder_h100": lambda: plot.ladder(h100()),
    "ladder_laptop": lambda: plot.ladder(laptop()),
    "ladder_one": lambda: plot.ladder([timed("fused", 0.0155)]),
    "waterfall_h100": lambda: plot.waterfall(h100()),
    "waterfall_laptop": lambda: plot.waterfall(laptop()),
    "waterfall_outside": lambda: plot.waterfall(
        [timed("eager", 2.76), outside("algebra", 0.0217), *h100()[11:13]]
    ),
    "waterfall_bare": lambda: plot.waterfall(
        [timed("eager", 2.0, floor_ms=None), timed("fused", 2.1, floor_ms=None)]
    ),
    "errors": lambda: plot.errors(checks(), SCORES),
    "errors_two_limits": lambda: plot.errors([two_limits(), two_limits("normal", seed=1)]),
    "errors_failed": lambda: plot.errors(failed_checks()),
    "overview": lambda: plot.overview(all_problems(), PROBLEMS),
    "overview_one": lambda: plot.overview(h100()),
    "break_even": lambda: plot.break_even(h100()),
    "break_even_later": lambda: plot.break_even(slow_fold()),
    "break_even_never": lambda: plot.break_even(
        [timed("eager", 0.02), timed("fused", 0.03, fold_ms=(0.5,))]
    ),
}


def failed_checks() -> SimpleNamespace:
    records = [
        checked("default", "uniform", 0),
        checked("default", "uniform", 0, seed=1, rel_error_rows=5e-3, passed=False),
        checked("default", "odd biases at -inf", 0, rel_error=float("nan"),
                rel_error_rows=float("nan"), passed=False, reason="NaN where eager is finite"),
        checked("default", "batch 1", 0, rel_error=None, rel_error_rows=None, limit=None,
                rel_error_eager=None, rel_error_eager_rows=None, passed=False,
                reason="RuntimeError: invalid launch"),
    ]  # fmt: skip
    scores = [{"name": "zeros", "rel_error": 1.2e-4, "accepted": True}]
    return SimpleNamespace(records=records, scores=scores)


def slow_fold() -> Records:
    return Records([timed("eager", 0.5), timed("fused", 0.4, fold_ms=samples(0.73))])


@pytest.fixture(params=PICTURES)
def picture(request: pytest.FixtureRequest) -> style.Picture:
    return PICTURES[request.param]()


def marks(picture: style.Picture, start: str) -> dict[str, float]:
    """What follows `start` in the gid of a mark -> its x in data coordinates."""
    found = {}
    for artist in picture.figure.axes[0].get_children():
        gid = artist.get_gid() or ""
        if gid.startswith(start):
            offsets = getattr(artist, "get_offsets", None)
            found[gid.removeprefix(start)] = float(
                offsets()[0][0] if offsets else artist.get_xdata()[-1]
            )
    return found


def bars(picture: style.Picture) -> dict[str, tuple[float, float]]:
    """Key of a step -> (left, right) of its bar."""
    found = {}
    for container in picture.figure.axes[0].containers:
        (bar,) = container
        found[bar.get_gid().removeprefix("step/")] = (bar.get_x(), bar.get_x() + bar.get_width())
    return found


def texts(picture: style.Picture) -> list[str]:
    found = (t.get_text() for t in picture.figure.findobj(Text))
    return [" ".join(text.split("\n")) for text in found if text.strip()]


# --- every figure ---------------------------------------------------------------------------


@pytest.fixture(params=["own fonts", "DejaVu Sans"])
def fonts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fonts of this machine, and the one that every matplotlib has, which is wider."""
    if request.param == "DejaVu Sans":
        monkeypatch.setattr(chart, "_families", lambda: ["DejaVu Sans"])
    chart.width_of.cache_clear()
    yield
    chart.width_of.cache_clear()


def test_texts_are_apart_and_on_the_canvas(fonts: None, picture: style.Picture):
    canvas = FigureCanvasAgg(picture.figure)
    canvas.draw()
    shown = [t for t in picture.figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
    boxes = [(t.get_text(), t.get_window_extent(canvas.get_renderer())) for t in shown]
    width, height = canvas.get_width_height()
    for text, box in boxes:
        assert box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height, text
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        down = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across <= 0 or down <= 3, f"{one!r} lies on {other!r}"  # boxes hold empty descents


def test_marks_stay_inside_the_axes(picture: style.Picture):
    low, high = picture.figure.axes[0].get_xlim()
    for start in ("median/", "predicted/", "rel_error", "control/", "speedup/"):
        for name, x in marks(picture, start).items():
            assert low <= x <= high, name


@pytest.mark.parametrize(
    ("raw", "turns", "says"),
    [(False, 2, "128 × 256: one thread fills 4 stages of 48 KB, 2 warpgroups"),
     (True, 1, "128 × 128: one thread fills 6 stages of 32 KB, 2 warpgroups")],
)  # fmt: skip
def test_the_pipeline_is_that_of_the_kernel(fonts: None, raw: bool, turns: int, says: str):
    picture = plot.pipeline(raw)
    test_texts_are_apart_and_on_the_canvas(fonts, picture)
    test_type_is_at_least_nine_points(picture)
    c = plot_pipeline.constants(raw)
    source = (paths.kernels() / "common/split_sides.cuh").read_text(encoding="utf-8")
    assert f"kPanel = {c['kPanel']}, " in source
    assert (c["kTurns"], c["kThreads"], c["small"], c["large"]) == (turns, 384, 4, 2)
    said = picture.alt
    assert says in said
    assert "A turn is 12 products of 64 × 128 × 16: 8 small ones (light), then 4" in said
    assert picture._repr_html_().startswith("<img")


def test_type_is_at_least_nine_points(picture: style.Picture):
    assert min(t.get_fontsize() for t in picture.figure.findobj(Text) if t.get_text()) >= 9


def test_every_figure_says_card_size_shape_and_how(picture: style.Picture):
    caption = texts(picture)
    said = " ".join(caption + [picture.alt])
    assert any(card in said for card in (H100, CPU["card"]))
    assert "size (B " in said and "2026-11-20, commit\u00a05f1a0ff" in " ".join(caption)


def test_html_is_one_image_with_its_text(picture: style.Picture):
    html = picture._repr_html_()
    assert html.startswith('<img width="736"') and html.count("<") == 1 and 'alt=""' not in html
    assert "data:image/png;base64,iVBOR" in html and "max-width:100%" in html


def test_alt_text_is_escaped():
    bad = timed("fused", None, passed=False, reason='a "quote" <and> & more')
    html = plot.ladder([timed("eager", 2.0), bad])._repr_html_()
    assert "&quot;quote&quot; &lt;and&gt; &amp; more" in html


def test_png_has_two_pixels_to_a_css_pixel(tmp_path: Path):
    path = plot.ladder(h100()).save(tmp_path / "deep" / "ladder.png")
    assert int.from_bytes(path.read_bytes()[16:20], "big") == 2 * 736
    assert plot.ladder(h100()).save(tmp_path / "ladder.svg").read_text().startswith("<?xml")


def test_nothing_global_is_touched():
    before = dict(matplotlib.rcParams)
    for make in PICTURES.values():
        make().png()
    assert dict(matplotlib.rcParams) == before


def test_neither_torch_nor_pyplot_is_imported():
    code = "import sys, workbook.plot; print({'torch', 'matplotlib.pyplot'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


# --- what is drawn --------------------------------------------------------------------------


def test_ladder_draws_medians_predictions_and_floor():
    picture = plot.ladder(h100())
    assert marks(picture, "median/") == pytest.approx(
        {
            "eager": 2.76,
            "compile": 2.69,
            "algebra": 0.0217,
            "01_row_in_shared": 300.0,
            "02_fold_thread_per_sample": 0.9,
            "03_block_shared_tree": 0.021,
            "04_vector_warp_shuffle": 0.018,
            "05_whole_row_in_flight": 0.0155,
            "fused": 0.0155,
        }
    )
    assert marks(picture, "predicted/") == pytest.approx(
        {
            "01_row_in_shared": 306.0,
            "02_fold_thread_per_sample": 0.82,
            "03_block_shared_tree": 0.0205,
            "04_vector_warp_shuffle": 0.0172,
            "05_whole_row_in_flight": 0.015,
        }
    )
    assert marks(picture, "floor") == {"": pytest.approx(0.0152)}


def test_ladder_says_its_numbers():
    picture = plot.ladder(h100())
    for said in ("eager 2.76 ms", "1 row in shared 300 ms", "predicted 310 ms", "16 of 1024 rows"):
        assert said in picture.alt
    for said in ("5 whole row in flight 15.5 µs", "floor 15.2 µs", "178× as fast as eager", H100):
        assert said in picture.alt
    assert {"2.76 ms", "178×", "1×", "900 µs", "0.0092×"} <= set(texts(picture))


def test_ladder_is_in_the_order_of_the_ladder():
    records = h100()
    random.Random(1).shuffle(records)
    said = plot.ladder(records).alt
    names = ["eager", "compile", "1 row", "2 fold", "3 block", "4 vector", "5 whole", "ours ("]
    places = [said.index(name, said.index("paper size")) for name in names]
    assert places == sorted(places)
    middles = {}
    for artist in plot.ladder(records).figure.axes[0].get_children():
        if (artist.get_gid() or "").startswith("median/0"):
            at = (
                artist.get_offsets()[0]
                if hasattr(artist, "get_offsets")
                else artist.get_xydata()[0]
            )
            middles[artist.get_gid()] = at[1]
    assert sorted(middles, key=middles.get) == sorted(middles) and len(middles) == 5


def test_ladder_shows_what_failed_and_what_is_wrong():
    picture = plot.ladder(laptop())
    assert "compile" not in marks(picture, "median/")
    assert marks(picture, "median/")["cpu_02_folded_one_chain"] == pytest.approx(0.38)
    assert "did not run: no C++ compiler was found" in texts(picture)
    assert "outside the accuracy rule: error 3.2e-3, limit 2.0e-7" in picture.alt
    assert "tried.cpp:12: expected ';'" in picture.alt


def test_ladder_leaves_out_controls_and_predictions_of_other_sizes():
    other = predicted("fused", 7.0, size="laptop", shape=LAPTOP)
    picture = plot.ladder([*h100(), other])
    assert "wrong" not in picture.alt and "fused" not in marks(picture, "predicted/")


def test_waterfall_steps_from_time_to_time():
    picture = plot.waterfall(h100())
    assert bars(picture) == {
        "algebra": pytest.approx((0.0217, 2.76)),
        "fused": pytest.approx((0.0155, 0.0217)),
        "floor": pytest.approx((0.0152, 0.0155)),
    }
    assert marks(picture, "median/") == pytest.approx(
        {
            "eager": 2.76,
            "compile": 2.69,
            "eager/tf32": 0.422,
            "compile/tf32": 0.371,
            "algebra/tf32": 0.0217,
            "fused+fold": 0.36,
        }
    )
    for said in ("178× from eager to ours", "127× by algebra", "1.40× by the kernel", "1.02× left"):
        assert said in picture.alt
    assert {"127×", "1.40×", "1.02×", "27.3×", "23.9×"} <= set(texts(picture))


def test_waterfall_without_floor_algebra_and_compile():
    picture = PICTURES["waterfall_bare"]()
    assert bars(picture) == {"fused": pytest.approx((2.0, 2.1))}
    assert any("slower" in text for text in texts(picture))


def test_waterfall_does_not_count_a_wrong_kernel():
    wrong = timed("fused", 0.001, passed=False, rel_error=1.0, limit=2e-7)
    picture = plot.waterfall([timed("eager", 2.0), timed("algebra", 0.02), wrong])
    assert set(bars(picture)) == {"algebra", "floor"} and "to the algebra" in picture.alt
    assert "outside the accuracy rule" in picture.alt


def outside(variant: str, ms: float) -> Record:
    """A timing outside the accuracy rule by its worst row, as the plain algebra on a CPU."""
    reason = "error 9.6e-6 (worst row), limit 8.1e-6, eager 4.1e-6"
    return timed(variant, ms, passed=False, reason=reason)


def test_waterfall_keeps_an_algebra_outside_the_rule_in_its_place():
    picture = plot.waterfall([timed("eager", 2.76), outside("algebra", 0.0217), h100()[11]])
    assert list(bars(picture)) == ["algebra", "fused", "floor"]
    assert bars(picture)["fused"] == pytest.approx((0.0155, 0.0217))
    assert marks(picture, "outside/") == {"algebra": pytest.approx(0.0217)}
    assert "127× by algebra, 1.40× by the kernel" in picture.alt
    said = texts(picture)
    assert any("outside the accuracy rule: error 9.6e-6 (worst row)" in text for text in said)
    assert "outside the accuracy rule" in said and "For comparison" not in said


def test_waterfall_keeps_an_eager_outside_the_rule_in_its_place():
    picture = plot.waterfall([outside("eager", 2.76), timed("algebra", 0.0217), h100()[11]])
    assert list(bars(picture)) == ["algebra", "fused", "floor"]
    assert marks(picture, "outside/") == {"eager": pytest.approx(2.76)}


def test_waterfall_of_an_algebra_outside_the_rule_says_so_when_no_kernel_is_right():
    failed = timed("fused", None, passed=False, reason="no C++ compiler was found")
    picture = plot.waterfall([timed("eager", 2.76), outside("algebra", 0.0217), failed])
    assert picture.alt.startswith("127× from eager to the algebra (outside the accuracy rule)")
    assert set(bars(picture)) == {"algebra", "floor"}
    assert "did not run: no C++ compiler was found" in texts(picture)


def test_errors_are_where_the_records_say():
    picture = plot.errors(checks(), SCORES)
    assert marks(picture, "rel_error_rows/")["default/uniform"] == pytest.approx(9e-8)
    assert marks(picture, "rel_error/")["trained/cauchy"] == pytest.approx(3.6e-7)
    assert marks(picture, "rel_error_eager/")["default/normal"] == pytest.approx(3.2e-7)
    assert marks(picture, "rel_error_eager_rows/")["default/cauchy"] == pytest.approx(1.86e-6)
    assert marks(picture, "limit/")["default/uniform"] == pytest.approx(6.2e-7)
    low, high = picture.figure.axes[0].get_xlim()
    assert marks(picture, "control/") == pytest.approx(
        {"zeros": 1.0, "a constant": 3.1e-2, "bias left out": 2.3e-4, "log exp": high}
    )
    assert marks(picture, "rel_error_rows/")["default/zeros"] == pytest.approx(low)
    assert "all 13 cases" in picture.alt and "all 4 wrong results rejected" in picture.alt
    assert "default, uniform: ours 6.0e-8, worst row 9.0e-8, eager 2.4e-7" in picture.alt


def test_errors_show_the_case_nearest_to_its_limit():
    near = checked("default", "uniform", 0, seed=1, rel_error_rows=5e-7)
    for records in (
        [checked("default", "uniform", 0), near],
        [near, checked("default", "uniform", 0)],
    ):
        drawn = marks(plot.errors(records), "rel_error_rows/")
        assert drawn == {"default/uniform": pytest.approx(5e-7)}


def two_limits(family: str = "uniform", **more: object) -> Record:
    """A case of the sum chain: rows that cancel let eager's worst row be 80 times its whole."""
    about = {
        "rel_error": 2.3e-8, "rel_error_rows": 5.6e-8, "rel_error_eager": 1.5e-6,
        "rel_error_eager_rows": 1.2e-4, "limit": 2.9e-6, "how": {"limit_rows": 2.4e-4},
    }  # fmt: skip
    return checked("initial", family, 0, **about | more)


def lanes(picture: style.Picture, start: str) -> dict[str, float]:
    """What follows `start` in the gid of a mark -> its y in inches from the top."""
    artists = [a for a in picture.figure.axes[0].lines if (a.get_gid() or "").startswith(start)]
    return {a.get_gid().removeprefix(start): float(a.get_ydata()[-1]) for a in artists}


def test_errors_show_each_error_beside_its_own_limit():
    picture, case = plot.errors([two_limits()]), "initial/uniform"
    assert marks(picture, "limit/") == {case: pytest.approx(2.9e-6)}
    assert marks(picture, "limit_rows/") == {case: pytest.approx(2.4e-4)}
    for whole in ("rel_error", "rel_error_eager"):
        rows = f"{whole}_rows"
        assert marks(picture, f"{whole}/")[case] < marks(picture, "limit/")[case]
        assert marks(picture, f"{rows}/")[case] < marks(picture, "limit_rows/")[case]
        assert lanes(picture, f"{whole}/") == lanes(picture, "limit/")
        assert lanes(picture, f"{rows}/") == lanes(picture, "limit_rows/")
    assert lanes(picture, "limit_rows/")[case] < lanes(picture, "limit/")[case]
    said = texts(picture)
    assert "2.4e-4" in said and "2.9e-6" not in said  # the column: beside the worst row's error
    assert {"allowed, worst row (upper half)", "allowed, whole (lower half)"} <= set(said)
    assert "limit 2.9e-6, of the worst row 2.4e-4" in picture.alt


def test_errors_nearness_measures_each_error_by_its_own_limit():
    far = two_limits(rel_error_rows=2.4e-6)  # 1% of its limit, 83% of that of the whole
    near = two_limits(seed=1, rel_error=1.4e-6)  # half of its limit
    for records in ([far, near], [near, far]):
        drawn = marks(plot.errors(records), "rel_error/")
        assert drawn == {"initial/uniform": pytest.approx(1.4e-6)}
    reason = "error 3.1e-6 (whole), limit 2.9e-6, eager 1.5e-6"
    broken = two_limits(rel_error=3.1e-6, rel_error_rows=1e-4, passed=False, reason=reason)
    crosses = plot.errors([broken])
    assert marks(crosses, "outside/") == {"initial/uniform": pytest.approx(3.1e-6)}
    assert lanes(crosses, "outside/") == lanes(crosses, "limit/")


def test_errors_name_failures_nan_and_accepted_controls():
    picture = plot.errors(failed_checks())
    assert "Outside the limit in 3 of 4 cases" in picture.alt
    assert "1 of 1 wrong results accepted" in picture.alt
    assert {"nan", "accepted", "RuntimeError: invalid launch"} <= set(texts(picture))


def test_errors_that_are_all_zero_or_all_nan():
    numbers = ("rel_error", "rel_error_rows", "rel_error_eager", "rel_error_eager_rows")
    for value in (0.0, float("nan"), float("inf")):
        record = checked("default", "zeros", 0, limit=None, **dict.fromkeys(numbers, value))
        assert plot.errors([record]).png()


def test_overview_draws_speed_ups():
    picture = plot.overview(all_problems(), PROBLEMS)
    drawn = sorted(marks(picture, "speedup/").values())
    expected = [
        2.76 / 0.0155, 2.69 / 0.0155, 0.422 / 0.0155, 0.371 / 0.0155, 2.72 / 0.0712, 2.71 / 0.0712,
        0.393 / 0.0712, 0.379 / 0.0712, 2.77 / 0.771, 2.72 / 0.771, 0.451 / 0.771, 0.394 / 0.771,
        0.451 / 0.38, 0.394 / 0.38, 5.34 / 0.853, 5.28 / 0.853, 1.494 / 0.853, 36.4 / 0.103,
    ]  # fmt: skip
    assert drawn == pytest.approx(sorted(expected), rel=0.05)  # medians of paired ratios
    assert "TF32 baselines: 27.3× over eager, 23.9× over compile" in picture.alt
    assert picture.alt.count("not measured") == 3


def test_the_overview_s_title_holds_ours_in_tf32_against_tf32():
    """0.394 / 0.771 is drawn, but says nothing of a user who has switched TF32 on."""
    norm = all_problems().query(problem=PROBLEMS[2].slug)
    title = plot.overview(norm).alt.partition(". ")[0]
    assert title.startswith("Ours is ") and "0.5" not in title
    assert "1.03× to 1.19× as fast as TF32 PyTorch" in title
    plain = [r for r in norm if (r.variant, r.route) != ("fused", "tf32")]
    assert "0.51× to 0.58× as fast as TF32" in plot.overview(plain).alt, "control: no such row"


def test_routes_are_drawn_where_they_stand_and_told():
    """Error and time of each way; eager's errors as lines; what has no error is left out."""
    norm = all_problems().query(problem=PROBLEMS[2].slug)
    errors = {"eager": 1e-7, "compile": 2e-7, "fused": 5e-8, "eager/tf32": 1e-4, "fused/tf32": 4e-5}
    key = {("fused", "float32"): "fp16x3", ("fused", "tf32"): "fp16x1"}
    told = Records(
        replace(r, rel_error=errors.get(r.variant + ("/tf32" if r.route == "tf32" else "")),
                method=key.get((r.variant, r.route), ""))
        for r in norm
    )  # fmt: skip
    picture = plot.routes(told)
    lines = {line.get_gid(): line for line in picture.figure.axes[0].lines if line.get_gid()}
    points = {gid: (line.get_xdata()[0], line.get_ydata()[0]) for gid, line in lines.items()
              if gid.startswith("point/")}  # fmt: skip
    assert set(points) == {f"point/{name}" for name in errors}, "compile in TF32 has no error"
    assert points["point/fused/tf32"] == (pytest.approx(0.38, rel=0.05), 4e-5)
    levels = {route: lines[f"eager/{route}"].get_ydata()[0] for route in ("float32", "tf32")}
    assert levels == {"float32": 1e-7, "tf32": 1e-4}
    assert "in float32 3.60× as fast as eager, with 0.50× its error" in picture.alt
    shown = texts(picture)
    assert any("one product" in t for t in shown) and any("three products" in t for t in shown)
    assert "eager's error in TF32" in shown and "eager's error in float32" in shown
    alike = Records(replace(r, rel_error=1e-7) for r in told)
    assert "eager's error in float32 and TF32" in texts(plot.routes(alike)), "on one line"
    with pytest.raises(ValueError, match="routes: records: got 0 timings with an error"):
        plot.routes(norm)


def test_overview_takes_the_largest_size_and_any_problem():
    small = replace(timed("fused", 9.0), size="laptop", shape=LAPTOP)
    picture = plot.overview([*h100(), small, timed("eager", 1.0, size="laptop", shape=LAPTOP)])
    assert "paper size" in picture.alt and "laptop" not in picture.alt
    picture = plot.overview(h100(), [SLUG, "not_there"])
    assert "not_there on NVIDIA H100 80GB HBM3: not measured" in picture.alt


def test_break_even_is_where_the_lines_cross():
    picture = plot.break_even(slow_fold())
    lines = {line.get_gid(): line for line in picture.figure.axes[0].lines if line.get_gid()}
    assert lines["break even"].get_xdata()[0] == pytest.approx(7.3)
    assert lines["break even"].get_ydata()[0] == pytest.approx(3.65)
    assert lines["total/eager"].get_ydata()[[0, -1]] == pytest.approx([0.5, 500])
    assert lines["total/fused"].get_ydata()[[0, -1]] == pytest.approx([1.13, 400.73])
    assert "after 8 calls" in picture.alt and "fold 730 µs" in picture.alt


def test_break_even_at_once_never_and_from_a_folding_run():
    assert "after one call" in PICTURES["break_even"]().alt
    assert "never pays" in PICTURES["break_even_never"]().alt
    folding = [timed("eager", 0.5), timed("fused", 0.4), timed("fused+fold", 1.13)]
    assert "after 8 calls" in plot.break_even(folding).alt


# --- numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ms", "spread", "text"),
    [
        (0.0155, 0.02, "15.5 µs"),
        (2.76, 0.004, "2.76 ms"),
        (300.0, 0.2, "300 ms"),
        (2260.0, 0.01, "2.26 s"),
        (0.9999, 0.01, "1.000 ms"),  # not 1000 µs
        (0.0004, float("nan"), "0.40 µs"),
        (1.5e6, 0.01, "1\u202f500 s"),
        (float("inf"), 0.1, "inf ms"),
    ],
)
def test_durations(ms: float, spread: float, text: str):
    assert style.duration(ms, spread) == text


def test_factors_and_errors_in_words():
    assert style.factor(1224.4, 0.001) == "1\u202f224×"
    assert style.factor(0.83, 0.05) == "0.83×"
    values = (None, 0.0, float("nan"), 8.94e-8, 0.031, 1.0)
    assert [style.error_text(v) for v in values] == ["–", "0", "nan", "8.9e-8", "0.031", "1.0"]


def test_a_ratio_is_paired_only_within_a_run():
    slow, fast = legend.Timed(timed("eager", 4.0)), legend.Timed(timed("fused", 2.0))
    other = legend.Timed(timed("fused", 2.0, run="r2"))
    assert legend.ratio(slow, fast)[1] > 0
    assert legend.ratio(slow, other)[0] == pytest.approx(2.0)


def test_the_newest_run_is_drawn():
    later = timed("fused", 0.011, run="r2", date="2026-11-21T10:00:00Z")
    drawn = marks(plot.ladder([later, *h100()]), "median/")
    assert drawn["fused"] == pytest.approx(0.011)
    assert any("2026-11-20 to 2026-11-21" in text for text in texts(plot.ladder([later, *h100()])))


def flushed(how: str, run: str, *records: Record) -> list[Record]:
    return [
        replace(r, how=HOW | {"flush": how}, run=run, date="2026-11-21T10:00:00Z") for r in records
    ]


def test_timings_of_two_flushes_are_not_mixed():
    folds = {"fold_ms": samples(0.35)}
    later = flushed("write", "r2", timed("eager", 9.0), timed("fused", 0.011, **folds))
    later += flushed("write", "r2", timed("algebra", None, passed=False, reason="boom"))
    for records in ([*h100(), *later], [*later, *h100()]):
        assert marks(plot.ladder(records), "median/") == marks(plot.ladder(h100()), "median/")
        assert bars(plot.waterfall(records)) == bars(plot.waterfall(h100()))
        speedups = marks(plot.overview(records), "speedup/")
        assert speedups == marks(plot.overview(h100()), "speedup/")
        assert plot.break_even(records).alt == plot.break_even(h100()).alt
        for draw in (plot.ladder, plot.waterfall, plot.overview, plot.break_even):
            said = " ".join(texts(draw(records))).lower()
            assert "cold cache (flushed by reading)" in said
            assert "left out: timings with a cold cache (flushed by writing)" in said
            assert "left out" not in " ".join(texts(draw(h100()))).lower()


def test_one_flush_is_drawn_whichever_it_is():
    written = flushed("write", "r2", timed("eager", 9.0), timed("fused", 0.011))
    failed = timed("compile", None, passed=False, reason="boom", how={})
    picture = plot.ladder([*written, failed])
    assert marks(picture, "median/")["fused"] == pytest.approx(0.011)
    assert "Left out" not in " ".join(texts(picture)) and "boom" in picture.alt
    picture = plot.ladder([timed("fused", 0.0155), *written, failed])
    assert list(marks(picture, "median/")) == ["fused"] and "boom" in picture.alt


@pytest.mark.parametrize("draw", [plot.ladder, plot.waterfall, plot.overview, plot.break_even])
def test_two_flushes_without_reading_say_what_to_choose(draw):
    both = [timed("eager", 2.0), timed("fused", 0.01, fold_ms=(0.3,))]
    mixed = [*flushed("write", "r1", *both), *flushed("none", "r2", *both)]
    with pytest.raises(ValueError, match=r"how\['flush'\]: 'write', 'none'.*== 'write'\]"):
        draw(mixed)


# --- what can't be drawn --------------------------------------------------------------------


@pytest.mark.parametrize("draw", [plot.ladder, plot.waterfall, plot.errors, plot.overview])
def test_no_records_says_what_to_do(draw):
    with pytest.raises(ValueError, match=r"got 0 records.*run wb\."):
        draw([])


@pytest.mark.parametrize(
    ("draw", "records", "says"),
    [
        (plot.ladder, [*h100(), timed("fused", 1.0, size="laptop")], "several values of size"),
        (plot.ladder, [*h100(), timed("fused", 1.0, card="H200")], "several values of card"),
        (
            plot.ladder,
            [timed("fused", 1.0), timed("fused", 2.0, implementation="cpu")],
            "implement",
        ),
        (plot.ladder, [timed("eager", 1.0)], "want a kernel beside them"),
        (
            plot.ladder,
            [timed("fused", None, passed=False, reason="boom")],
            "all of them failed.*boom",
        ),
        (plot.ladder, [timed("wrong_one_block", 1.0)], "only controls"),
        (plot.waterfall, [timed("fused", 1.0)], "want eager"),
        (plot.waterfall, [timed("eager", 1.0)], "want eager and"),
        (plot.errors, h100(), "none of kind 'check'"),
        (plot.errors, [checked("a", "b", 0), checked("a", "b", 0, card="H200")], "values of card"),
        (plot.overview, [timed("eager", 1.0)], "no problem with both"),
        (plot.break_even, [timed("eager", 1.0)], "want fused"),
        (plot.break_even, [timed("eager", 1.0), timed("fused", 0.5)], "no fold_ms"),
        (plot.break_even, [], "got 0 records"),
    ],
)
def test_what_can_not_be_drawn_says_why(draw, records, says: str):
    with pytest.raises(ValueError, match=says):
        draw(records)


# --- curves -----------------------------------------------------------------------------------


def test_curves_show_each_point_and_leave_out_what_has_no_place():
    picture = plot.curves(
        [1.0, 10.0, 100.0],
        {"eager": [1e-7, 1e-6, 1e-5], "ours": [0.0, 2e-7, math.inf]},
        title="Errors grow", axes=("size", "error"),
    )  # fmt: skip
    drawn = [line for line in picture.figure.axes[0].get_lines() if len(line.get_xdata()) > 0]
    points = {tuple(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in drawn}
    assert ((1.0, 1e-7), (10.0, 1e-6), (100.0, 1e-5)) in points and ((10.0, 2e-7),) in points
    assert "eager: 1.0e-7 at 1, 1.0e-6 at 10" in picture.alt and "ours: 2.0e-7 at 10" in picture.alt


@pytest.mark.parametrize(
    ("ys", "words"), [([1.0], "has 1 points"), ([0.0, math.nan], "no point above 0")]
)
def test_curves_that_can_not_be_drawn_say_why(ys, words):
    with pytest.raises(ValueError, match=f"lines: 'a' {words}|lines: 'a' has {words}"):
        plot.curves([1.0, 2.0], {"a": ys}, title="", axes=("x", "y"))
