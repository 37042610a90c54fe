"""Records and declarations → what a notebook says: sources, derivations, tables, sentences.

A number in a sentence is computed here from records, so that it can not go stale.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass

import torch

from workbook import build, chains, journal, limits, ops, paths, plot, stats, style
from workbook.journal import Record, Records
from workbook.results import BenchResult, key_of, records
from workbook.spec import Problem, Variant
from workbook.variants import kernels_digest

__all__ = [
    "Text",
    "ceiling_of_speedup",
    "cover",
    "derivation",
    "floor_of",
    "host_lines",
    "is_stale",
    "label",
    "outcome",
    "recorded",
    "resources",
    "shares",
    "show",
    "summary",
    "yardstick_lines",
]

AGREES = 1e-10  # relative, in float64: far above rounding, far below any wrong step
NEAR = 1.5  # a time within this factor of its prediction counts as predicted


@dataclass(frozen=True)
class Text:
    """Markdown: rendered in a notebook, plain elsewhere."""

    markdown: str

    def _repr_markdown_(self) -> str:
        return self.markdown

    def __str__(self) -> str:
        return self.markdown


def show(what: Variant | type) -> Text:
    """A kernel's source from its file, or a class's from its module, as highlighted code."""
    if isinstance(what, Variant):
        if what.source is None:
            raise ValueError(f"variant: {what.key} has no kernel of its own to show")
        text, language, idea = what.source.read_text(encoding="utf-8"), "cpp", f"*{what.idea}*\n\n"
    else:
        text, language, idea = inspect.getsource(what), "python", ""
    return Text(f"{idea}```{language}\n{text.rstrip()}\n```")


def derivation(p: Problem, *, batch: int = 7, features: tuple[int, int] = (97, 67)) -> Text:
    """Each step's formula and reason, run in float64 against the first on a small odd size.

    Says the relative difference of each. AssertionError where a step that is said to hold does
    not, or a tempting wrong one agrees.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, features[0], generator=generator, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        arguments = p.arguments(p.Model(*features, *p.init_args()[2:]).double())
        first = p.steps[0].compute(x, *arguments)
        parts = []
        for number, step in enumerate(p.steps):
            apart = ((step.compute(x, *arguments) - first).norm() / first.norm()).item()
            if step.holds != (apart < AGREES):
                claim = "hold" if step.holds else "be wrong"
                raise AssertionError(
                    f"{step.title!r} is said to {claim}, but differs by {apart:.1e}"
                )
            verdict = f"agrees with the chain to {apart:.1e}, relatively, in float64"
            if number == 0:
                verdict = "the definition itself"
            elif not step.holds:
                verdict = f"differs from the chain by {apart:.1e}, relatively, in float64: wrong"
            parts.append(f"**{step.title}** — {step.reason}.\n\n$${step.formula}$$\n\n*{verdict}*")
    return Text("\n\n".join(parts))


def resources(p: Problem, arch: str = "90") -> Text:
    """Registers, spills and shared memory of each CUDA rung, compiled here to sm_`arch`."""
    rungs = [v for v in p.variants if v.is_rung and v.source.suffix == ".cu"]
    lacking = ops.missing("cuda")
    if lacking:
        return Text(f"The CUDA rungs are not compiled here: {lacking}")
    include = [paths.kernels() / p.slug, paths.kernels() / "common"]
    rows = []
    for v in rungs:
        flags = ["-DWB_CUDA", *v.flags]
        rows += [
            f"| {v.key} | `{k.name.split('(')[0].removeprefix('void ')}` "
            f"| {k.registers} | {k.spill_bytes} | {k.shared_bytes} |"
            for k in build.cubin(v.source, arch=arch, include=include, flags=flags).kernels
        ]
    head = "| rung | kernel | registers a thread | bytes spilled | bytes shared |"
    return Text("\n".join([head, "|---|---|---|---|---|", *rows]))


def outcome(predictions: Records, bench: BenchResult) -> Text:
    """Prediction against measurement, a row a variant, and a sentence that counts them."""
    said = {key_of(r): r.value for r in predictions}
    rows, near = [], 0
    for record in bench.records:
        wanted, ms = said.get(key_of(record)), record.median_ms
        if wanted is None or ms is None:
            continue
        off = ms / wanted
        near += 1 / NEAR <= off <= NEAR
        words = "as predicted" if 1 / NEAR <= off <= NEAR else "slower" if off > 1 else "faster"
        spread = stats.spread(record.samples_ms)
        rows.append(
            f"| {key_of(record)} | {style.duration(wanted, 0.1)} | {style.duration(ms, spread)} "
            f"| {style.factor(off, max(spread, 0.01))} | {words} |"
        )
    if not rows:
        raise ValueError("predictions: none is of a variant in this bench: run wb.predict first")
    head = "| variant | predicted | measured | measured / predicted | |\n|---|---|---|---|---|\n"
    count = f"{near} of {len(rows)} times are within a factor {NEAR} of their prediction."
    return Text(head + "\n".join(rows) + f"\n\n{count}")


def shares(bench: BenchResult) -> Text:
    """algebra's share × kernel's share = total, from paired ratios of one run."""
    algebra, kernel = bench.ratio("eager", "algebra"), bench.ratio("algebra", "fused")
    total = bench.ratio("eager", "fused")
    first = bench.records[0]
    where = f"{first.card}, {first.size}: " + ", ".join(
        f"{k} = {v}" for k, v in first.shape.items()
    )
    calls = bench.break_even_calls()
    fold = stats.median(bench["fused"].fold_ms)
    whole = calls if math.isinf(calls) else max(math.ceil(calls), 1)
    after = "never pays" if whole == math.inf else f"is earned back after {whole} calls"
    after = after if whole != 1 else "is earned back by the first call"
    return Text(
        "| where | algebra (eager → algebra) | kernel (algebra → fused) | total |\n"
        "|---|---|---|---|\n"
        f"| {where} | {_times(algebra)} | {_times(kernel)} | **{_times(total)}** |\n\n"
        f"Folding takes {style.duration(fold, 0.1)} and {after}."
    )


def _times(ratio: stats.Ratio) -> str:
    return style.factor(ratio.median, min((ratio.q3 - ratio.q1) / ratio.median, 0.09))


def ceiling_of_speedup(bench: BenchResult, slow: str = "eager") -> Text:
    """The largest speed-up the machine allows over `slow`, and what was reached: from one run."""
    record, floor = bench["fused"], bench["fused"].floor_ms
    possible, reached = bench[slow].median_ms / floor, bench[slow].median_ms / record.median_ms
    return Text(
        f"{bench[slow].variant} takes {style.duration(bench[slow].median_ms, 0.05)}, the floor is "
        f"{style.duration(floor, 0.05)}: no kernel here can be more than "
        f"{style.factor(possible, 0.05)} as fast. Reached: {style.factor(reached, 0.05)}."
    )


def yardstick_lines(kept: Records) -> Text:
    """Our speed over that of torch calls on the same bytes, newest run of kind "profile"."""
    if not kept:
        return Text("no yardsticks are recorded")
    run = BenchResult(kept.query(run=max(kept, key=lambda r: (r.date, r.run)).run))
    names = [key_of(r) for r in run.records]
    others = [n for n in names if n not in ("kernel", "fused")]
    lines = [
        f"- {ours} over {other}: {_times(run.ratio(other, ours))}"
        for other in others
        for ours in names
        if ours not in others
    ]
    first = run.records[0]
    return Text(f"{first.card}, {first.size}, {first.date}:\n\n" + "\n".join(lines))


def host_lines(kept: Records) -> Text:
    """Host time of one forward with gradients on, each timed run: median, beside eager's."""
    lines = []
    for run in dict.fromkeys(r.run for r in kept):
        its = kept.query(run=run, kind="bench")
        host = {key_of(r): r.how["host_us_grad"] for r in its if "host_us_grad" in r.how}
        said = ", ".join(f"{key} {stats.median(times):.0f} µs" for key, times in host.items())
        if "fused" in host:
            lines.append(f"- {its[0].date}, {its[0].size}: {said}")
    return Text("\n".join(lines) or "no host times are recorded")


def is_stale(p: Problem, record: Record) -> bool:
    """True where the kernel's sources have changed since the record was taken."""
    known = {v.key: v for v in p.variants}
    variant = known.get(key_of(record))
    if variant is None:
        return True
    return record.kernels_digest != kernels_digest(p.slug, variant, record.device)


def recorded(p: Problem, *, flush: str = "read", **equals: object) -> BenchResult | None:
    """The newest recorded GPU run of a problem, by default at paper size; None without one.

    flush: how the cache was emptied in it; equals: other fields, such as card="...".
    """
    wanted = {"kind": "bench", "device": "cuda", "size": "paper", **equals}
    kept = records(p, **wanted, flush=flush)
    return fullest(kept)


def fullest(kept: Records) -> BenchResult | None:
    """The newest run that timed eager, torch.compile, the algebra and ours; else without compile.

    None without one: ratios and figures compare these.
    """
    runs: dict[str, Records] = {}
    for record in kept:
        runs.setdefault(record.run, Records()).append(record)
    compared = {"eager", "algebra", "fused"}
    for wanted in (compared | {"compile"}, compared):
        whole = [r for r in runs.values() if wanted <= {key_of(o) for o in r if o.samples_ms}]
        if whole:
            return BenchResult(max(whole, key=lambda r: (r[0].date, r[0].run)))
    return None


SUMMARY = ("eager", "compile", "eager/tf32", "compile/tf32", "algebra", "fused")


def summary(kept: Records | None = None) -> Text:
    """The table of the README: paper size, every card and problem, newest run read from cold cache.

    kept: bench records; those in data/ if not given.
    """
    every = journal.load(paths.data()) if kept is None else kept
    timed = every.query(kind="bench", size="paper", flush="read")
    places = sorted({(r.problem, r.card) for r in timed})
    head = [*SUMMARY, "floor", "ours over eager", "error, ours / eager"]
    rows = ["| problem | card | " + " | ".join(head) + " |", "|---" * (len(head) + 2) + "|"]
    for problem, card in places:
        bench = fullest(Records(r for r in timed if (r.problem, r.card) == (problem, card)))
        if bench is None:
            continue
        found = {key_of(r): r for r in bench.records}
        cells = [_time_of(found.get(key)) for key in SUMMARY]
        ours, speedup = found["fused"], bench.ratio()
        cells += [style.duration(ours.floor_ms, 0.01), _times(speedup)]
        cells += [f"{ours.rel_error:.1e} / {ours.rel_error_eager:.1e}"]
        old = " (stale)" if is_stale(chains.problem(problem), ours) else ""
        rows.append(f"| `{problem}` | {card}{old} | " + " | ".join(cells) + " |")
    return Text("\n".join(rows))


def cover(kept: Records | None = None) -> plot.Picture:
    """The README's picture: speed-ups on GPUs at paper size, from the runs of its table."""
    every = journal.load(paths.data()) if kept is None else kept
    timed = every.query(kind="bench", size="paper", flush="read", device="cuda")
    runs = [fullest(timed.query(problem=slug)) for slug in dict.fromkeys(r.problem for r in timed)]
    return plot.overview([r for run in runs if run for r in run.records], chains.problems())


def _time_of(record: Record | None) -> str:
    if record is None or record.median_ms is None:
        return "–"
    return style.duration(record.median_ms, stats.spread(record.samples_ms))


def label(p: Problem, bench: BenchResult) -> Text:
    """Which card, when, at which commit; and which records are older than their kernels."""
    first = bench.records[0]
    old = [key_of(r) for r in bench.records if is_stale(p, r)]
    said = f" **Stale** (sources changed since): {', '.join(old)}." if old else ""
    flush = first.how.get("flush", "?")
    return Text(
        f"Recorded on one {first.card}, {first.date}, commit {first.commit[:12] or 'unknown'}; "
        f"cache emptied by {flush}, {first.how.get('timer', '')}.{said}"
    )


def floor_of(p: Problem, reach: limits.Ceilings, size: str, which: str) -> limits.Floor:
    """The floor of the work "before" or "after" the algebra at a size."""
    return limits.floor_ms(p.work[which](**p.shape(size)), reach)
