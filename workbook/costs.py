"""What a drop-in costs beside a call with unchanged weights: its fold, and a step of training.

Tables and sentences from records; nothing is measured here.
"""

from __future__ import annotations

import math

from workbook import chains, limits, stats, style
from workbook.ceilings import ceilings_of
from workbook.journal import Record, Records
from workbook.prose import Text
from workbook.results import BenchResult, key_of, records, variant_of
from workbook.spec import Problem
from workbook.tables import fullest, is_stale
from workbook.training import PARTS

__all__ = ["fold_floor_ms", "folds", "recorded_training", "training_lines"]

MOST = 1.5  # times its bytes over the bandwidth: what a fold may take
LEAST = 1 << 20  # bytes of a fold from which bandwidth is what bounds it,
LAUNCHES = 10  # if they also take as long as this many launches


def folds(p: Problem | None = None, kept: Records | None = None, **equals: object) -> Text:
    """What folding costs, from records: time, bytes, floor, and the first call beside eager's.

    A row for each problem, mode, card and size, of the run that figures show. p: of one problem.
    kept: records; those of data/ and .runs/ if not given. equals: fields, such as device="cuda".
    ValueError where no run of that kind has a fold.
    """
    every = records() if kept is None else kept
    equals = {"kind": "bench", "part": "", "flush": "read", **equals}
    timed = every.query(**equals, **({"problem": p.slug} if p else {}))
    rows, judged, first = [], [], []  # stale runs are shown, and not counted
    for of in chains.problems():
        places = {
            (r.mode, r.card, r.size): r for r in timed if r.problem == of.slug and r.fold_bytes
        }
        for mode, card, size in sorted(places):
            bench = fullest(timed.query(problem=of.slug, mode=mode, card=card, size=size))
            if bench is None or not bench["fused"].fold_bytes:
                continue
            row, off, gain = _fold_row(of, bench)
            rows.append(row)
            if not is_stale(of, bench["fused"]):
                judged += [off] if off is not None else []
                first += [gain] if gain is not None else []
    if not rows:
        raise ValueError(
            f"folds: got {len(timed)} records, none of a run with eager, algebra and a fold: run "
            "wb.bench(p), or ask with other fields"
        )
    names = ("problem", "card", "fold", "read + written", "bytes / bandwidth", "fold / that",
             "eager / first call", "earned back after")  # fmt: skip
    head = f"| {' | '.join(names)} |\n" + "|---" * len(names) + "|"
    near, fast = sum(off <= MOST for off in judged), sum(gain > 1 for gain in first)
    said = (
        f"Of today's kernels: {near} of {len(judged)} folds that bandwidth bounds take at most "
        f"{MOST} times their bytes over it; {fast} of {len(first)} first calls (`fused+fold`) are "
        "faster than eager."
    )
    return Text("\n".join([head, *rows]) + f"\n\n{said}")


def fold_floor_ms(p: Problem, record: Record) -> float | None:
    """ms in which the bytes of a recorded fold go at the read bandwidth: measured in turn with the
    fold, as on a CPU, or else in its process, or else the card's; None where none is known.
    Parameters are read once, what is kept is written once.
    """
    reach, how = ceilings_of(record.card), record.how
    rate = how.get("fold_read_gbs") or how.get("read_gbs") or (reach.read_gbs if reach else None)
    if rate is None or record.fold_bytes is None:
        return None
    return _moved(p, record).bytes / rate * 1e-6  # bytes / (GB/s) is 1e-9 s


def _is_bound(card: str, moved: limits.Work, floor: float | None) -> bool:
    """Whether bandwidth is what bounds a fold, and not its launches."""
    reach = ceilings_of(card)
    launch = reach.launch_ms if reach else 0.0
    return floor is not None and moved.bytes >= LEAST and floor >= LAUNCHES * launch


def _moved(p: Problem, record: Record) -> limits.Work:
    shape = record.shape
    whole, after = (p.work[which](**shape) for which in ("fold", "after"))
    read = whole.read - after.read
    if record.method:  # halves of all weights, whatever else is folded
        read = max(read, 4.0 * shape["K"] * shape["N"])
    return limits.Work(0.0, read, float(record.fold_bytes))


def _fold_row(p: Problem, bench: BenchResult) -> tuple[str, float | None, float | None]:
    """(the row, time over bytes by bandwidth where that bounds it, eager over the first call)."""
    ours, moved = bench["fused"], _moved(p, bench["fused"])
    ms, spread = stats.median(ours.fold_ms), stats.spread(ours.fold_ms)
    floor = fold_floor_ms(p, ours)
    off = ms / floor if _is_bound(ours.card, moved, floor) else None
    there = {key_of(r) for r in bench.records if r.samples_ms}
    gain = bench.ratio("eager", "fused+fold").median if "fused+fold" in there else None
    mode = f", {ours.mode}" if len(p.modes) > 1 else ""
    old = " (stale)" if is_stale(p, ours) else ""
    cells = (
        f"`{p.slug}` {ours.size}{mode}",
        f"{ours.card}{old}",
        style.duration(ms, spread),
        f"{moved.read / 1e6:.4g} + {moved.written / 1e6:.3g} MB",
        style.duration(floor, 0.02) if floor else "–",
        style.factor(off, max(spread, 0.01)) if off else "–",
        style.factor(gain, 0.05) if gain else "–",
        _calls(bench.break_even_calls()),
    )
    return f"| {' | '.join(cells)} |", off, gain


def _calls(calls: float) -> str:
    whole = calls if math.isinf(calls) else max(math.ceil(calls), 1)
    return "never" if whole == math.inf else f"{whole} call{'s' * (whole != 1)}"


def recorded_training(
    p: Problem, *, flush: str = "read", size: str = "paper", **equals: object
) -> BenchResult | None:
    """The newest recorded training steps on a GPU with eager and the drop-in; None without.

    equals: other fields, such as mode="train", card="...".
    """
    wanted = {"kind": "bench", "device": "cuda", "grad": True, "size": size, **equals}
    runs: dict[str, Records] = {}
    for record in records(p, **wanted, flush=flush, part=("step", *PARTS)):
        runs.setdefault(record.run, Records()).append(record)
    whole = [
        r for r in runs.values()
        if {"eager step", "fused step"} <= {key_of(x) for x in r if x.samples_ms}
    ]  # fmt: skip
    return BenchResult(max(whole, key=lambda r: (r[0].date, r[0].run))) if whole else None


def training_lines(bench: BenchResult) -> Text:
    """Of one run: each variant's step and its parts, and where the drop-in gains and loses.

    ValueError where the run has no training steps of eager.
    """
    there = {key_of(r): r for r in bench.records if r.part and r.samples_ms}
    if "eager step" not in there:
        got = ", ".join(there) or f"{len(bench.records)} records without gradients"
        raise ValueError(f"bench: got {got}, wants eager step: run wb.bench_training(p)")
    first = there["eager step"]
    rows = ["| variant | " + " | ".join(PARTS) + " | step | eager / this | error, eager's |"]
    rows.append("|---" * (len(PARTS) + 4) + "|")
    for name in dict.fromkeys(variant_of(r) for r in bench.records):
        if f"{name} step" not in there:
            rows.append(f"| {name} | did not run: {bench[f'{name} step'].reason}" + " |" * 6)
            continue
        its = [there[f"{name} {part}"] for part in (*PARTS, "step")]
        cells = [style.duration(r.median_ms, stats.spread(r.samples_ms)) for r in its]
        step = its[-1]
        gain = bench.ratio("eager step", f"{name} step")
        cells += [style.ratio(gain) if name != "eager" else "1"]
        cells += [f"{style.error_text(step.rel_error)}, {style.error_text(step.rel_error_eager)}"]
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    shape = ", ".join(f"{k} = {v}" for k, v in first.shape.items())
    said = f"{first.card}, {first.size}: {shape}; {first.date}."
    return Text("\n".join(rows) + f"\n\n{said} {_where(bench, there)}")


def _where(bench: BenchResult, there: dict[str, Record]) -> str:
    """Whether the drop-in's step is slower than eager's, and by which part."""
    if "fused step" not in there:
        return "The drop-in did not run."
    ratio = bench.ratio("eager step", "fused step")
    verdict = f"The drop-in's step is {style.ratio(ratio)} as fast as eager's"
    if ratio.q1 <= 1 <= ratio.q3:
        verdict = "The drop-in's step takes as long as eager's, within the noise"
    elif ratio.median < 1:
        verdict = f"The drop-in's step is slower than eager's, {style.ratio(ratio)} as fast"
    parts = []
    for part in PARTS:
        change = there[f"fused {part}"].median_ms - there[f"eager {part}"].median_ms
        sign = "+" if change > 0 else "−"
        parts.append(f"{part} {sign}{style.duration(abs(change), 0.1)}")
    folds = " The forward folds: the weights have just changed."
    batch = there["fused step"].mode == "train"  # its statistics, of which nothing can be folded
    return f"{verdict}: {', '.join(parts)}.{'' if batch else folds}"
