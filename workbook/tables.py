"""Records → tables and sentences of a notebook and of the README.

A number in a sentence is computed here from records, so that it can not go stale.
"""

from __future__ import annotations

import dataclasses
import math

from workbook import chains, journal, limits, paths, plot, split, stats, style, ways
from workbook.journal import Record, Records
from workbook.prose import Text
from workbook.results import BenchResult, key_of, records, variant_of
from workbook.spec import Problem
from workbook.variants import kernels_digest

__all__ = [
    "ceiling_of_speedup",
    "cover",
    "floor_of",
    "fullest",
    "gains",
    "host_lines",
    "is_stale",
    "label",
    "on_one_card",
    "outcome",
    "predicted",
    "recorded",
    "rooflines",
    "shares",
    "summary",
    "yardstick_lines",
]

NEAR = 1.5  # a time within this factor of its prediction counts as predicted


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


def shares(bench: BenchResult, *more: BenchResult) -> Text:
    """Algebra's share × kernel's share = total, from paired ratios of one run, a row a run.

    Of a single run also what folding costs.
    """
    rows = [_shares_row(run, named=bool(more)) for run in (bench, *more)]
    head = "| where | algebra (eager → algebra) | kernel (algebra → fused) | total |"
    said = "" if more else f"\n\n{_fold_in_words(bench)}"
    return Text("\n".join([head, "|---" * 4 + "|", *rows]) + said)


def _shares_row(bench: BenchResult, named: bool) -> str:
    pairs = ("eager", "algebra"), ("algebra", "fused"), ("eager", "fused")
    algebra, kernel, total = (style.ratio(bench.ratio(*pair)) for pair in pairs)
    first = bench.records[0]
    shape = ", ".join(f"{k} = {v}" for k, v in first.shape.items())
    where = f"{first.card}, {first.size}: {shape}"
    if named:
        where = f"`{first.problem}`, {first.mode}, {where}"
    return f"| {where} | {algebra} | {kernel} | **{total}** |"


def _fold_in_words(bench: BenchResult) -> str:
    """Empty where nothing is folded."""
    if not bench["fused"].fold_ms:
        return ""
    calls, fold = bench.break_even_calls(), stats.median(bench["fused"].fold_ms)
    whole = calls if math.isinf(calls) else max(math.ceil(calls), 1)
    after = "never pays" if whole == math.inf else f"is earned back after {whole} calls"
    after = after if whole != 1 else "is earned back by the first call"
    return f"Folding takes {style.duration(fold, 0.1)} and {after}."


def ceiling_of_speedup(bench: BenchResult, slow: str = "eager") -> Text:
    """The largest speed-up the machine allows over `slow`, and what was reached: from one run."""
    record, floor = bench["fused"], bench["fused"].floor_ms
    possible, reached = bench[slow].median_ms / floor, bench[slow].median_ms / record.median_ms
    return Text(
        f"{bench[slow].variant} takes {style.duration(bench[slow].median_ms, 0.05)}, the floor is "
        f"{style.duration(floor, 0.05)}: no kernel here can be more than "
        f"{style.factor(possible, 0.05)} as fast. Reached: {style.factor(reached, 0.05)}."
    )


def gains(bench: BenchResult, fast: str, *slow: str) -> Text:
    """How many times as fast one variant of a run was as others; says so where it is not in it."""
    there, first = _timed(bench.records), bench.records[0]
    where = f"{first.card}, {first.size}, {first.mode}, {first.date}"
    if fast not in there:
        return Text(f"{where}: `{fast}` is not in this run: older than it, or a GPU without it.")
    lines = [f"- over `{s}`: {style.ratio(bench.ratio(s, fast))}" for s in slow if s in there]
    return Text(f"{where}, `{fast}`:\n\n" + "\n".join(lines))


def yardstick_lines(kept: Records) -> Text:
    """Our speed over that of torch calls on the same bytes, newest run of kind "profile"."""
    if not kept:
        return Text("no yardsticks are recorded")
    run = BenchResult(kept.query(run=max(kept, key=lambda r: (r.date, r.run)).run))
    names = [key_of(r) for r in run.records]
    others = [n for n in names if n not in ("kernel", "fused")]
    lines = [
        f"- {ours} over {other}: {style.ratio(run.ratio(other, ours))}"
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
    """True where the kernel's sources have changed since the record was taken, or a product that
    was ours is made in another way today."""
    known = {v.key: v for v in p.variants}
    variant = known.get(variant_of(record))
    if variant is None:
        return True
    if record.kernels_digest != kernels_digest(p.slug, variant, record.device):
        return True
    ours = variant.implementation == "kernel" and record.method != ""
    return ours and record.method != _method_now(p, record)


def _method_now(p: Problem, record: Record) -> str:
    left = p.multiplied(record.mode, record.route, record.shape)
    if left is None:
        return ""
    shape = record.shape["B"], record.shape["K"], left.outputs, ways.PROCESSORS
    raw = record.shape["K"] % 4 == 0
    way = ways.best(record.route, *shape, left.whole, p.through, raw)
    return split.method(way, record.route)


def recorded(
    p: Problem, *, flush: str = "read", mode: str = "eval", **equals: object
) -> BenchResult | None:
    """The newest recorded GPU run of a problem, by default at paper size; None without one.

    On whichever card; a run of the kernels as they are now goes before a stale one.

    flush: how the cache was emptied in it; mode: of the model; equals: other fields, such as
    card="...".
    """
    wanted = {"kind": "bench", "device": "cuda", "size": "paper", "mode": mode, **equals}
    kept = records(p, **wanted, flush=flush)
    return fullest(kept)


def predicted(bench: BenchResult) -> Records:
    """What was last predicted for the problem, card, size and mode of a run."""
    first = bench.records[0]
    names = ("problem", "card", "device", "size", "mode")
    return records(kind="prediction", **{n: getattr(first, n) for n in names}).newest()


def fullest(kept: Records) -> BenchResult | None:
    """The newest run that timed eager, the algebra and ours, as ours is now; else a stale one.

    Then one with the ladder's last rung goes before one without, then one with torch.compile. None
    without any: ratios and figures compare these.
    """
    runs: dict[str, Records] = {}
    for record in kept:
        runs.setdefault(record.run, Records()).append(record)
    compared = {"eager", "algebra", "fused"}
    whole = [r for r in runs.values() if compared <= _timed(r)]
    return BenchResult(max(whole, key=_worth)) if whole else None


def _timed(run: Records) -> set[str]:
    return {key_of(r) for r in run if r.samples_ms}


def _worth(run: Records) -> tuple:
    """Of the run that is shown, the largest."""
    ours = BenchResult(run)["fused"]
    p, timed = chains.problem(ours.problem), _timed(run)
    here = [v for v in p.variants if ours.device in v.devices and ours.mode in v.modes]
    last = [v.key for v in here if v.is_rung][-1:]  # what ours is made of today
    fresh = not is_stale(p, ours)
    return fresh, timed >= set(last), "compile" in timed, run[0].date, run[0].run


STANDS_FOR_PAPER = "cpu paper"  # the size of a problem whose weights a laptop can not hold
SUMMARY = ("eager", "compile", "eager/tf32", "compile/tf32", "algebra", "fused", "fused/tf32")


def summary(kept: Records | None = None) -> Text:
    """The table of the README: every problem, mode and card, newest run read from cold cache.

    At paper size, or what stands for it where that does not fit. kept: bench records; data/ if not
    given.
    """
    every = journal.load(paths.data()) if kept is None else kept
    timed = every.query(kind="bench", flush="read")
    order = {p.slug: place for place, p in enumerate(chains.problems())}
    places = {(r.problem, r.mode, r.card) for r in timed if r.problem in order}
    head = [*SUMMARY, "floor", "ours over eager", "error, ours / eager"]
    rows = ["| problem | card | " + " | ".join(head) + " |", "|---" * (len(head) + 2) + "|"]
    for place in sorted(places, key=lambda place: (order[place[0]], *place[1:])):
        its = Records(r for r in timed if (r.problem, r.mode, r.card) == place)
        bench = fullest(its.query(size="paper")) or fullest(its.query(size=STANDS_FOR_PAPER))
        if bench is not None:
            rows.append(_summary_row(chains.problem(place[0]), bench))
    return Text("\n".join(rows))


def _summary_row(p: Problem, bench: BenchResult) -> str:
    found = {key_of(r): r for r in bench.records}
    cells = [_time_of(found.get(key)) for key in SUMMARY]
    ours, speedup = found["fused"], bench.ratio()
    cells += [style.duration(ours.floor_ms, 0.01), style.ratio(speedup)]
    cells += [f"{ours.rel_error:.1e} / {ours.rel_error_eager:.1e}"]
    old = " (stale)" if is_stale(p, ours) else ""
    shape = ours.shape
    size = f"{shape['B']}, {shape['K']}→{shape['N']}"
    mode = f", {ours.mode}" if len(p.modes) > 1 else ""
    return f"| `{p.slug}` {size}{mode} | {ours.card}{old} | " + " | ".join(cells) + " |"


def cover(kept: Records | None = None) -> plot.Picture:
    """The README's picture: speed-ups at paper size, from runs of its table."""
    return plot.overview([r for run in on_one_card(kept) for r in run.records], chains.problems())


def on_one_card(kept: Records | None = None) -> list[BenchResult]:
    """Runs of all problems and modes at paper size, on the GPU of which most are of today's
    kernels, and the newest. kept: bench records; data/ if not given."""
    every = journal.load(paths.data()) if kept is None else kept
    timed = every.query(kind="bench", size="paper", flush="read", device="cuda")
    found: dict[str, list[BenchResult]] = {}
    places = [(p.slug, mode) for p in chains.problems() for mode in p.modes]
    for card in dict.fromkeys(r.card for r in timed):
        runs = [fullest(timed.query(problem=slug, mode=m, card=card)) for slug, m in places]
        found[card] = [run for run in runs if run is not None]
    return max(filter(None, found.values()), key=_freshness, default=[])


def _freshness(runs: list[BenchResult]) -> tuple[int, str]:
    """How many runs of a card are of the kernels as they are now, and the date of the newest."""
    fresh = [not is_stale(chains.problem(run["fused"].problem), run["fused"]) for run in runs]
    return sum(fresh), max(run.records[0].date for run in runs)


def _time_of(record: Record | None) -> str:
    if record is None or record.median_ms is None:
        return "–"
    wrong = "†" if record.passed is False else ""  # a time of something else
    return style.duration(record.median_ms, stats.spread(record.samples_ms)) + wrong


def label(p: Problem, bench: BenchResult | Records) -> Text:
    """Which card, when, at which commit; and which records are older than their kernels."""
    shown = getattr(bench, "records", bench)
    first, old = shown[0], dict.fromkeys(key_of(r) for r in shown if is_stale(p, r))
    said = f" **Stale** (sources or ways changed since): {', '.join(old)}." if old else ""
    flush = first.how.get("flush", "?")
    return Text(
        f"Recorded on one {first.card}, {first.date}, commit {first.commit[:12] or 'unknown'}; "
        f"cache emptied by {flush}, {first.how.get('timer', '')}.{said}"
    )


def floor_of(
    p: Problem, reach: limits.Ceilings, size: str, which: str, route: str = "float32"
) -> limits.Floor:
    """The floor of the work "before" or "after" the algebra at a size; route: as in limits."""
    return limits.floor_ms(p.least(which, p.shape(size), route), reach, route)


def rooflines(p: Problem, reach: limits.Ceilings) -> Text:
    """Floors of what the algebra leaves: its bytes, and its product in float32 and by halves.

    A row a size. The rate of halves is taken to be twice TF32's where it was not measured, and the
    text says so; without either there is no such column.
    """
    said = f"Ceilings of {reach.source}."
    if reach.half_tflops is None and reach.tf32_tflops is not None:
        reach = dataclasses.replace(reach, half_tflops=2 * reach.tf32_tflops)
        said += " The rate of halves was not measured with them: twice TF32's is taken for it."
    if reach.half_tflops is None:
        return Text(f"{said} They have no rate of halves: there is no floor to show.")
    rows = ["| size | bytes | product, float32 | product, halves | bound by | float32 / halves |"]
    rows.append("|---" * 6 + "|")
    for size in p.sizes:
        floats, halves = (floor_of(p, reach, size, "after", r) for r in ("float32", "fp16x3"))
        shape = ", ".join(f"{k} = {v}" for k, v in p.shape(size).items())
        times = (halves.memory_ms, floats.compute_ms, halves.compute_ms)
        rows.append(
            f"| {size}: {shape} | " + " | ".join(style.duration(t, 0.02) for t in times)
            + f" | {halves.bound} | {style.factor(floats.ms / halves.ms, 0.02)} |"
        )  # fmt: skip
    return Text("\n".join(rows) + f"\n\n{said} The last two are of the floors, launch and all.")
