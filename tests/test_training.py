"""Training steps timed and told, and what folding costs: records, tables, sentences. No times."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kit import PROBLEMS, each_problem, needs_gpu

import workbook as wb
from workbook import cli, compare, costs, journal, legend, paths, plot, tables, timing, training
from workbook.chains import matmul_sum_max_mean_logsumexp
from workbook.journal import Record, Records
from workbook.results import BenchResult, key_of, variant_of
from workbook.spec import Size

SUM = wb.problem("matmul_sum_max_mean_logsumexp")
AVG = wb.problem("matmul_avgpool_gelu_scale_max")
BN = wb.problem("gemm_batchnorm_scale_softmax")
QUICK = {"device": "cpu", "rounds": 5, "budget_s": 5.0, "flush": "none"}


def small(p) -> Size:
    return Size("small", (64, 48, *p.init_args("laptop")[2:]), 33)


def steps(p=SUM, **more) -> BenchResult:
    return wb.bench_training(p, **{"size": small(p), **QUICK, **more})


@pytest.fixture(autouse=True)
def _runs(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBOOK_RUNS", str(tmp_path / "runs"))


# --- what is timed ----------------------------------------------------------------------------


@each_problem
def test_each_problem_is_trained_and_recorded(subject, tmp_path):
    p = wb.problem(subject.slug)
    found = steps(p)
    keys = [f"{v} {part}" for v in ("eager", "fused") for part in ("step", *training.PARTS)]
    assert list(map(key_of, found.records)) == keys
    for record in found.records:
        assert record.kind == "bench" and record.grad is True and record.problem == p.slug
        assert record.mode == p.modes[-1], "train where the problem knows it"
        assert len(record.samples_ms) == 5 and all(s > 0 for s in record.samples_ms)
        assert record.how["flush"] == "none" and record.how["timer"] == "wall clock"
        assert record.how["optimizer"] == "SGD, foreach" and record.size == "small"
    for v in ("eager", "fused"):
        step = found[f"{v} step"]
        assert step.passed and 0 <= step.rel_error <= step.limit, step.reason
        assert step.rel_error_eager == found["eager step"].rel_error
        assert step.how["first_call_ms"] > 0 and step.launches > 0 and step.peak_bytes > 0
        parts = [found[f"{v} {part}"].samples_ms for part in training.PARTS]
        for whole, *its in zip(step.samples_ms, *parts, strict=True):
            assert sum(its) <= whole, "parts of the same samples"
    assert found["fused step"].kernels_digest and not found["eager step"].kernels_digest
    assert len({r.run for r in found.records}) == 1
    assert list(journal.load(tmp_path / "runs")) == list(found.records)
    assert found.ratio("eager step", "fused step").pairs == 5


def with_drop_in(forward):
    """The sum chain with another drop-in, whose forward is `forward(ModelNew's own, self, x)`."""

    class Other(SUM.ModelNew):
        def forward(self, x):
            return forward(super().forward, self, x)

    def make(model):
        model.__class__ = Other
        return model

    return dataclasses.replace(
        SUM,
        variants=tuple(
            dataclasses.replace(v, make=make) if v.key == "fused" else v for v in SUM.variants
        ),
    )


def test_the_order_of_a_step_and_that_all_of_it_happens(monkeypatch):
    """No gradient is left from before, the loss depends on each output, each weight moves."""
    seen, weights = [], []

    def spy(forward, self, x):
        assert self.training and torch.is_grad_enabled() and not x.requires_grad
        assert all(p.grad is None for p in self.parameters()), "zero_grad(set_to_none)"
        weights.append(self.linear.weight.detach().clone())
        y = forward(x)
        y.register_hook(lambda grad: seen.append(grad.clone()))
        return y

    monkeypatch.setattr(training, "RATE", 1e-3)  # seen in float32
    with torch.no_grad():  # whatever the caller is in
        steps(with_drop_in(spy), variants=["fused"])
    assert len(seen) == 1 + training.WARMUPS + 5 + 2, "first, warm, timed, profiled"
    assert all((g != 0).all() and g.unique().numel() == 33 for g in seen), "not a plain sum"
    assert all(torch.equal(g, seen[0]) for g in seen), "the same loss each time"
    for before, after in zip(weights, weights[1:], strict=False):
        assert (before != after).all()


def test_each_variant_has_weights_of_its_own_and_the_drop_in_folds_each_time(monkeypatch):
    folded = []
    op = matmul_sum_max_mean_logsumexp.OP
    fold = op.fold
    monkeypatch.setattr(op, "fold", lambda *a: (folded.append(a[1]), fold(*a))[1])
    steps(SUM)
    calls = 1 + training.WARMUPS + 5 + 2
    assert len(folded) == calls, "each step changes the weights"
    assert len({id(w) for w in folded}) == 1, "weights of its own"


def test_torch_compile_where_it_is_asked_for(monkeypatch):
    modes = []

    def compiled(model, **options):
        modes.append(options)
        return model

    monkeypatch.setattr(torch, "compile", compiled)
    assert "compile step" not in {key_of(r) for r in steps().records} and not modes
    assert steps(variants=["eager", "compile"])["compile step"].passed
    assert modes == [{"fullgraph": True}], "the default mode"


def test_a_failed_variant_is_kept_with_its_reason(tmp_path):
    def fails(forward, self, x):
        raise RuntimeError("no luck\nsecond line")

    found = steps(with_drop_in(fails))
    failed = found["fused step"]
    assert failed.passed is False and failed.reason == "RuntimeError: no luck" and failed.grad
    assert failed.samples_ms == () and len(found["eager step"].samples_ms) == 5
    assert journal.load(tmp_path / "runs")[-1] == failed
    assert "did not run: RuntimeError: no luck" in str(wb.training_lines(found))
    assert "The drop-in did not run" in str(wb.training_lines(found))
    assert "failed" in str(found)


@pytest.mark.parametrize("wrong", ["scaled", "missing", "nan"])
def test_wrong_gradients_are_timed_and_marked(wrong):
    def forward(own, self, x):
        if wrong == "missing":
            return own(x).detach() + self.linear.bias.sum()
        return own(x) * {"scaled": 1.00001, "nan": float("nan")}[wrong]

    found = steps(with_drop_in(forward))
    assert found["eager step"].passed and found["fused step"].passed is False
    assert "(gradients)" in found["fused step"].reason and found["fused step"].samples_ms


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"variants": ["algebra"]}, KeyError, "variants: got 'algebra', wants some of eager, comp"),
        ({"variants": ["eager/tf32"]}, KeyError, "variants: got 'eager/tf32'.*runs on cpu"),
        ({"variants": []}, ValueError, "variants: got none, wants some of .*or None for all"),
        ({"mode": "test"}, KeyError, "mode: got 'test', wants train or eval"),
        ({"rounds": 0}, ValueError, "rounds: got 0, wants at least 1"),
        ({"flush": "l2"}, ValueError, "flush: got 'l2', wants one of read, write, none"),
        ({"size": "poster"}, KeyError, "size: got 'poster'.*laptop, small, paper"),
    ],
)
def test_bad_arguments_are_told_and_nothing_is_recorded(tmp_path, options, kind, words):
    with pytest.raises(kind, match=words):
        steps(**options)
    assert not journal.load(tmp_path / "runs")


def test_the_mode_is_the_modules():
    assert {r.mode for r in steps(BN, mode="eval", variants=["eager"]).records} == {"eval"}
    assert {r.mode for r in steps(BN, variants=["eager"]).records} == {"train"}
    assert {r.mode for r in steps(SUM, mode="train", variants=["eager"]).records} == {"eval"}


def test_what_is_kept_is_in_data_too(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "data", lambda: tmp_path / "data")
    found = steps(keep=True)
    assert list(journal.load(tmp_path / "data")) == list(found.records)


@needs_gpu
def test_on_a_gpu_eager_is_trained_by_both_routes():
    found = wb.bench_training(SUM, size="laptop", rounds=5)
    assert {variant_of(r) for r in found.records} == {"eager", "eager/tf32", "fused"}
    assert all(found[f"{v} step"].passed for v in ("eager", "eager/tf32", "fused"))


def test_laps_of_a_call(monkeypatch):
    now = iter([1.0, 1.5, 3.5])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    laps = timing.Laps(torch.device("cpu"))
    laps.mark(), laps.mark()
    assert laps.ms() == pytest.approx([500.0, 2000.0])


# --- never mixed with forwards -----------------------------------------------------------------

ABOUT = {"route": "float32", "device": "cuda", "size": "paper", "mode": "eval", "passed": True,
         "shape": {"B": 8, "K": 16, "N": 32}, "card": "a card", "dtype": "float32"}  # fmt: skip
DAYS = {"forward": "2026-01-01T00:00:00Z", "training": "2026-02-02T00:00:00Z"}  # training is newer


def timed(variant: str, *samples: float, part: str = "", **more) -> Record:
    kind = "training" if part else "forward"
    how = {"flush": "read", **({"part": part} if part else {}), **more.pop("how", {})}
    more = {**ABOUT, "run": kind, "date": DAYS[kind], "grad": bool(part), "how": how, **more}
    return Record(kind="bench", problem=more.pop("problem", SUM.slug), variant=variant,
                  samples_ms=samples, **more)  # fmt: skip


FORWARDS = Records(
    [
        timed("eager", 10.0, 10.0, rel_error=1e-6, rel_error_eager=1e-6, floor_ms=0.5),
        timed("algebra", 5.0, 5.0, floor_ms=0.5),
        timed("fused", 1.0, 1.0, floor_ms=0.5, rel_error=1e-7, rel_error_eager=1e-6,
              fold_ms=(2.0, 2.0), fold_bytes=136, how={"host_us_grad": [20.0]}),
        timed("fused+fold", 3.0, 3.0, floor_ms=0.5),
    ]
)  # fmt: skip
TRAINED = Records(
    timed(variant, ms, ms, part=part, rel_error=1e-7, rel_error_eager=2e-7)
    for variant, times in {"eager": (9.0, 4.0, 4.0, 1.0), "fused": (6.0, 1.0, 4.0, 1.0)}.items()
    for part, ms in zip(("step", *training.PARTS), times, strict=True)
)


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A function that puts records into data/."""
    monkeypatch.setattr(paths, "data", lambda: tmp_path / "data")

    def put(*records: Record) -> None:
        journal.append(records, tmp_path / "data" / f"{SUM.slug}.jsonl")

    return put


def shown(capsys) -> dict[str, str]:
    """Every table, sentence and figure that is made of bench records."""
    every = journal.load(paths.data())
    assert cli.main(["results"]) == 0
    said = {
        "summary": str(tables.summary(every)),
        "recorded": str(wb.recorded(SUM)),
        "of a card": str([str(run) for run in tables.on_one_card(every)]),
        "host": str(wb.host_lines(wb.records(SUM, kind="bench", device="cuda"))),
        "label": str(wb.label(SUM, wb.recorded(SUM))),
        "shares": str(wb.shares(wb.recorded(SUM))),
        "folds": str(wb.folds()),
        "ladder": plot.ladder(every).alt,
        "waterfall": plot.waterfall(every).alt,
        "break-even": plot.break_even(every).alt,
        "overview": plot.overview(every).alt,
        "left out": legend.left_out(every),
        "newest": str([r.to_json() for r in every.newest() if not r.part]),
        "results": capsys.readouterr().out,
    }
    return said


def test_tables_and_figures_do_not_change_when_training_is_recorded(data, capsys):
    data(*FORWARDS)
    before = shown(capsys)
    assert "10.0" in before["recorded"] and "fused" in before["results"]
    data(*TRAINED, *(dataclasses.replace(r, how={**r.how, "flush": "write"}) for r in TRAINED))
    after = shown(capsys)
    for name, text in before.items():
        assert after[name] == text, name
    every = journal.load(paths.data())
    assert len(every.newest()) == len(FORWARDS) + 2 * len(TRAINED), "none hides another"


def test_keys_of_training_are_no_variants():
    found = BenchResult(TRAINED)
    assert not {key_of(r) for r in TRAINED} & {v.key for v in SUM.variants}
    with pytest.raises(KeyError, match="variant: got 'fused'; this run has eager step"):
        found["fused"]
    assert tables.fullest(TRAINED) is None
    assert [r.part for r in TRAINED.query(part="step")] == ["step", "step"]
    assert [row.split("  ")[0] for row in str(found).splitlines()[1:]] == [
        key_of(r) for r in TRAINED
    ]
    assert "1.500×" in str(found).splitlines()[5], "the drop-in's step over eager's step"


def test_a_figure_of_training_alone_is_refused():
    with pytest.raises(ValueError, match="records: got 8 records, none of kind 'bench'"):
        plot.ladder(TRAINED)


def test_a_training_record_is_stale_by_its_variants_kernels():
    ours, eager = TRAINED[4], TRAINED[0]
    digest = compare.kernels_digest(SUM.slug, SUM.variant("fused"), "cuda")
    assert tables.is_stale(SUM, dataclasses.replace(ours, kernels_digest="other"))
    assert not tables.is_stale(SUM, dataclasses.replace(ours, kernels_digest=digest))
    assert not tables.is_stale(SUM, eager)


# --- what is said -----------------------------------------------------------------------------


def test_training_in_words():
    said = str(wb.training_lines(BenchResult(TRAINED)))
    assert "| eager | 4.0" in said and "1.500×" in said and "1.0e-7, 2.0e-7" in said
    assert "is 1.500× as fast as eager's: forward −3.0 ms, backward −0" in said
    assert said.endswith("The forward folds: the weights have just changed.")
    batch = Records(dataclasses.replace(r, mode="train") for r in TRAINED)
    assert "folds" not in str(wb.training_lines(BenchResult(batch))), "nothing is folded there"
    slower = [dataclasses.replace(r, samples_ms=(12.0, 12.0)) if key_of(r) == "fused step" else
              dataclasses.replace(r, samples_ms=(10.0, 10.0)) if key_of(r) == "fused backward" else
              r for r in TRAINED]  # fmt: skip
    said = str(wb.training_lines(BenchResult(Records(slower))))
    assert "slower than eager's, 0.7500× as fast" in said and "backward +6.0 ms" in said
    even = [dataclasses.replace(r, samples_ms=(8.0, 10.0)) if key_of(r) == "fused step" else r
            for r in TRAINED]  # fmt: skip
    assert "within the noise" in str(wb.training_lines(BenchResult(Records(even))))
    with pytest.raises(ValueError, match="bench: got 4 records without gradients, wants eager st"):
        wb.training_lines(BenchResult(FORWARDS))


def test_the_recorded_training_is_the_newest_whole_one(data):
    assert wb.recorded_training(SUM) is None
    newer = {"run": "newer", "date": "2026-03-03T00:00:00Z"}
    data(*FORWARDS, *TRAINED, *(dataclasses.replace(r, **newer) for r in TRAINED[:4]))
    assert wb.recorded_training(SUM).records == TRAINED, "the newer one lacks ours"
    assert wb.recorded_training(SUM, card="another") is None


def ceiling(card: str, gbs: float, launch: float) -> list[Record]:
    values = {"read": gbs, "copy": gbs, "gemm_float32": 1.0, "launch": launch}
    return [Record(kind="ceiling", problem="", variant=name, card=card, device="cuda", value=v,
                   unit="GB/s", date=DAYS["forward"]) for name, v in values.items()]  # fmt: skip


@pytest.mark.parametrize(
    ("K", "launch", "bound"), [(8192, 0.001, True), (8192, 1.0, False), (64, 0.0, False)]
)
def test_folds_by_hand(data, K, launch, bound):
    """W and b are read, what is kept is written, over the bandwidth of that very run."""
    shape, N = {"B": 8, "K": K, "N": K}, K
    moved = 4 * K * N + 4 * N + 8 * K + 8
    fold = 3 * moved / 100e9 * 1e3
    digest = compare.kernels_digest(SUM.slug, SUM.variant("fused"), "cuda")
    its = [dataclasses.replace(r, shape=shape, how={**r.how, "read_gbs": 100.0},
                               kernels_digest=digest if r.variant == "fused" else "")
           for r in FORWARDS]  # fmt: skip
    its[2] = dataclasses.replace(its[2], fold_ms=(fold, fold), fold_bytes=8 * K + 8)
    data(*its, *ceiling("a card", 50.0, launch))
    assert costs.fold_floor_ms(SUM, its[2]) == pytest.approx(fold / 3)
    beside = dataclasses.replace(its[2], how={**its[2].how, "fold_read_gbs": 25.0})
    assert costs.fold_floor_ms(SUM, beside) == pytest.approx(4 * fold / 3), "at that very time"
    unknown = dataclasses.replace(its[2], how={"flush": "read"})
    assert costs.fold_floor_ms(SUM, unknown) == pytest.approx(2 * fold / 3), "the card's own"
    said = str(wb.folds(SUM))
    assert ("3.0" in said) == bound and "3.3×" in said and "1 call |" in said
    assert f"0 of {int(bound)} folds that bandwidth bounds" in said
    assert "1 of 1 first calls (`fused+fold`) are faster than eager" in said
    assert "(stale)" not in said
    stale = dataclasses.replace(its[2], kernels_digest="other")
    said = str(wb.folds(SUM, Records([*its[:2], stale, its[3]])))
    assert "(stale)" in said and "0 of 0 folds" in said and "0 of 0 first calls" in said
    with pytest.raises(ValueError, match="folds: got 0 records, none of a run with"):
        wb.folds(AVG)


def test_by_halves_all_weights_are_read():
    shape = {"B": 8, "K": 64, "N": 32}
    record = timed("fused", 1.0, problem=BN.slug, shape=shape, fold_bytes=1000)
    assert costs._moved(BN, record).read < 4 * 64 * 32
    halves = dataclasses.replace(record, method="fp16x3")
    assert costs._moved(BN, halves).read == 4 * 64 * 32
    assert costs._moved(BN, halves).written == 1000


def test_every_problem_is_in_the_table_of_todays_records():
    said = str(wb.folds())
    for subject in PROBLEMS:
        assert f"`{subject.slug}`" in said


def test_a_device_may_have_a_number():
    for device in ("cuda", "cuda:1"):
        keys = [v.key for v in training._chosen(SUM, None, device)]
        assert keys == ["eager", "eager/tf32", "fused"], device
