"""Which drafts the public protocols let through although they are wrong: a table from records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workbook import chains, machine
from workbook.journal import Record, Records
from workbook.prose import Text
from workbook.protocols import NOT_RUN, PROTOCOLS, protocol
from workbook.results import records
from workbook.spec import Problem, Size, Variant
from workbook.tables import is_stale

__all__ = ["protocol_table"]

# Of a table that is made here because none is recorded: a size that takes a second a version.
LIVE, LIVE_FEATURES, LIVE_ROWS = "live", (512, 1024), 16
NAMES = tuple(PROTOCOLS)


def protocol_table(
    kept: Records | None = None,
    *,
    problems: Sequence[Problem] | None = None,
    device: str | None = None,
) -> Text:
    """For each problem: wrong versions by protocol, what they err, what finds them; then the right.

    kept: records of checks; those in data/ and .runs/ if not given. problems: all if not given. Of
    several cards and sizes the one that tells most is shown: a GPU before a CPU, paper size before
    others, then the newest. A problem of which nothing is recorded is run here, small, and says so;
    `device` is where.
    """
    every = records(kind="check") if kept is None else kept.query(kind="check")
    chosen = chains.problems() if problems is None else problems
    return Text("\n\n".join(_section(p, every.query(problem=p.slug), device) for p in chosen))


def judged(p: Problem, device: str | None = None) -> Records:
    """ModelNew and the controls by both protocols, here, small."""
    device = machine.default_device(device)
    size = Size(LIVE, (*LIVE_FEATURES, *p.init_args("laptop")[2:]), LIVE_ROWS)
    chosen = [v for v in _here(p, device) if v.is_control or v.key == "fused"]
    return Records(
        protocol(p, name, variant=v, device=device, size=size, samples=1).record
        for v in chosen
        for name in NAMES
    )


def _section(p: Problem, every: Records, device: str | None) -> str:
    told = [r for r in every if r.protocol]
    files = Records(r for r in told if r.implementation == "file")  # somebody's, of whatever size
    found = [r for r in told if r.implementation != "file"] or judged(p, device)
    best = max(found, key=lambda r: (r.device == "cuda", _rank(r.size), r.date))
    place = {"card": best.card, "device": best.device}
    ours = Records(found).query(**place, size=best.size).newest()
    checks = every.query(**place, protocol="")
    by = {(r.variant, r.protocol): r for r in ours}
    controls = [v for v in _here(p, best.device) if v.is_control]
    lines = [
        f"**{p.title}** on one {best.card}, {best.size} size, recorded {best.date[:10]}.",
        _counted(controls, by),
        _table(p, controls, by, checks),
        _right(p, [v for v in _here(p, best.device) if not v.is_control], by),
        _files(files.query(**place).newest()),
    ]
    return "\n\n".join(filter(None, lines))


def _rank(size: str) -> int:
    return 2 if size.endswith("paper") else int(size != LIVE)


def _here(p: Problem, device: str) -> list[Variant]:
    """Those of the device that keep weights of their model, in float32."""
    return [
        v for v in p.variants if device in v.devices and v.route == "float32" and v.reads != "fold"
    ]


By = dict[tuple[str, str], Record]


def _counted(controls: Iterable[Variant], by: By) -> str:
    """How many wrong versions each protocol let through, and how many both."""
    through = {n: {v.key for v in controls if _passed(by, v.key, n)} for n in NAMES}
    tried = {v.key for v in controls if any((v.key, n) in by for n in NAMES)}
    parts = [f"{len(through[n])} get through {n}" for n in NAMES]
    both = set.intersection(*through.values())
    return f"Of {len(tried)} wrong versions {', '.join(parts)}, {len(both)} through both."


def _passed(by: By, key: str, name: str) -> bool:
    return (key, name) in by and bool(by[key, name].passed)


def _table(p: Problem, controls: Iterable[Variant], by: By, checks: Records) -> str:
    head = ("wrong version", "what is wrong", *NAMES, "eager", "our rule finds it")
    rows = [head, ("---",) * len(head)]
    for v in controls:
        its = [by[v.key, n] for n in NAMES if (v.key, n) in by]
        old = " (stale)" if any(is_stale(p, r) for r in its) else ""
        verdicts = (_verdict(v, by.get((v.key, n))) for n in NAMES)
        eager = _number(max((r.rel_error_eager or 0.0 for r in its), default=0.0) or None)
        found = _found(its, checks.query(variant=v.key))
        rows.append((f"`{v.key}`{old}", v.wrong, *verdicts, eager, found))
    return "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in rows) if rows[2:] else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _verdict(v: Variant, record: Record | None) -> str:
    """And the relative error of what the protocol saw."""
    if record is None:
        return "not recorded"
    if not record.passed and record.mode not in v.modes:
        return f"rejected: {_alone(v)}"  # not for what is wrong with it
    said = "**let through**" if record.passed else "rejected"
    return f"{said}, {_number(record.rel_error)}"


def _alone(v: Variant) -> str:
    return f"computes {' and '.join(v.modes)} alone"


def _number(error: float | None) -> str:
    return "no output" if error is None else f"{error:.1e}"


def _found(its: Sequence[Record], checks: Records) -> str:
    """Where our rule finds it first: in what the protocols let through, with moved weights, in a
    check."""
    through = [r for r in its if r.passed] or its
    for words, name in (("on the same outputs", "rule"), ("once the weights moved", "moved")):
        if any(r.how[name] not in ("", NOT_RUN) for r in through):
            return words
    last = max((r.date, r.run) for r in checks)[1] if checks else ""
    failed = next((r for r in checks if r.run == last and not r.passed), None)
    if failed is not None:
        shape = ", ".join(f"{k} = {v}" for k, v in failed.shape.items())
        where = f"{failed.mode} mode, {failed.family} input, {failed.state} weights, {shape}"
        how = "" if failed.reason.startswith("error") else f": {failed.reason}"
        return f"in `check`: {where}{how}"
    return "**not in `check`**" if checks else "`check` is not recorded"


def _right(p: Problem, right: Iterable[Variant], by: By) -> str:
    """How many of the versions that mean to be right each protocol accepted, and which not."""
    right = [v for v in right if any((v.key, n) in by for n in NAMES)]
    if not right:
        return ""
    parts = []
    for name in NAMES:
        its = [(v, by[v.key, name]) for v in right if (v.key, name) in by]
        count = sum(bool(r.passed) for _, r in its)
        parts.append(f"{name} accepts {count} of {len(its)}")
        parts += [f"not `{v.key}`: {_why(v, r)}" for v, r in its if not r.passed]
    return f"Of the versions that mean to be right {'; '.join(parts)}."


def _why(v: Variant, record: Record) -> str:
    return record.reason if record.mode in v.modes else f"it {_alone(v)}"


def _files(its: Records) -> str:
    return "\n".join(
        f"- file `{r.variant}`, {r.protocol}: {'accepted' if r.passed else f'rejected: {r.reason}'}"
        for r in its
    )
