"""Is it right: a candidate against the reference in float64, beside eager's own error.

The rule is that of `errors`. What is drawn is in `families`.
"""

from __future__ import annotations

import copy
import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from tqdm import tqdm

from workbook import journal, machine, paths
from workbook.errors import errors_of
from workbook.families import FAMILIES, SPECIAL, STATES
from workbook.journal import Record, Records
from workbook.judge import Judge, misfit
from workbook.precision import poisoned, using_route
from workbook.spec import Problem, Size, Variant
from workbook.variants import kernels_digest

__all__ = ["CheckFailed", "CheckResult", "check", "in_words"]


class CheckFailed(AssertionError):
    """A candidate broke the rule; the text says where and by how much."""


@dataclass(frozen=True)
class CheckResult:
    """Records of kind "check", one a case; the scores of outputs that must not be accepted."""

    problem: str
    variant: str
    records: Records
    scores: list[dict] = field(default_factory=list)

    @property
    def reason(self) -> str:
        """Why it is not accepted; empty if it is."""
        failed = next((r for r in self.records if not r.passed), None)
        if failed is not None:
            shape = ", ".join(f"{k}={v}" for k, v in failed.shape.items())
            return f"{failed.family} input, {failed.state} weights, {shape}: {failed.reason}"
        blind = [s["name"] for s in self.scores if s["accepted"]]
        if blind:
            return f"the rule is blind here: it would accept {', '.join(blind)}"
        return "" if self.records else "no case was run"

    @property
    def ok(self) -> bool:
        return not self.reason

    @property
    def worst(self) -> Record:
        """The case nearest to its limit, or furthest beyond it."""
        return max(self.records, key=lambda r: (r.passed is False, _nearness(r)))

    def require(self) -> CheckResult:
        """Itself, or CheckFailed."""
        if not self.ok:
            raise CheckFailed(f"{self.problem}, {self.variant}: {self.reason}")
        return self

    def frame(self) -> object:
        """A pandas DataFrame, a row a case."""
        return self.records.frame()

    def __str__(self) -> str:
        verdict = "right" if self.ok else "WRONG"
        count = len(self.records)
        head = f"{self.problem} / {self.variant}: {verdict} in {count} case{'s' * (count != 1)}"
        if not self.ok:
            return f"{head}: {self.reason}"
        worst = self.worst
        return (
            f"{head}; nearest to its limit: {worst.family} input, {worst.state} weights, "
            f"error {worst.rel_error:.1e} (eager {worst.rel_error_eager:.1e})"
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(s['name'])}</td><td>{s['rel_error']:.1e}</td>"
            f"<td>{'accepted: the rule is blind' if s['accepted'] else 'rejected'}</td></tr>"
            for s in self.scores
        )
        table = (
            "<table><thead><tr><th>what a wrong output would score</th><th>relative error</th>"
            f"<th></th></tr></thead><tbody>{rows}</tbody></table>"
        )
        return f"<p>{html.escape(str(self))}</p>{table if rows else ''}"


def check(
    p: Problem,
    *,
    variant: str | Variant = "fused",
    device: str | None = None,
    size: str | Size = "laptop",
    seeds: Sequence[int] = (0, 1),
    families: Sequence[str] = tuple(FAMILIES),
    states: Sequence[str] | None = None,
    modes: Sequence[str] | None = None,
    route: str = "float32",
    stop: bool = False,
    keep: bool = False,
    progress: bool = False,
) -> CheckResult:
    """Run a variant over input families, weight states, seeds and edge sizes; judge each case.

    Each case: the candidate is made and called once; then the weights change in place; then the
    output is judged, from memory poisoned with NaN. Shape, dtype, device, an untouched input and
    bit-identical repeats are part of it, in train mode the buffers, and that the model's state_dict
    fits a candidate that is a module. Where the reference raises, so must the candidate. states:
    all, the problem's own too, if not given; modes: those of the problem that the variant computes.
    stop: at the first failure.
    """
    device = machine.default_device(device)
    chosen = p.variant(variant, device) if isinstance(variant, str) else variant
    known = {**STATES, **p.states}
    states = tuple(known) if states is None else states
    modes = [m for m in p.modes if m in chosen.modes] if modes is None else modes
    asked = ("families", families, FAMILIES), ("states", states, known), ("modes", modes, p.modes)
    for argument, names, there in asked:
        for name in names or [""]:
            if name not in there:
                raise KeyError(f"{argument}: got {name!r}; there are {', '.join(there)}")
    cases = [
        (*case, mode) for mode in modes for case in _cases(p, p.size(size), families, states, seeds)
    ]
    base = {
        "problem": p.slug, "variant": chosen.key, "implementation": chosen.implementation,
        "route": route, "device": device, "card": machine.card(device), "dtype": "float32",
        "kernels_digest": kernels_digest(p.slug, chosen, device), "run": journal.new_run(),
        **machine.provenance(),
    }  # fmt: skip
    records, scores = Records(), _Scores(p, families[0])
    for case in tqdm(cases, desc=f"check {chosen.key}", disable=not progress, leave=False):
        record = _judged(p, chosen, device, route, case, base, scores)
        records.append(record)
        if stop and not record.passed:
            break
    for place in [paths.runs(), *([paths.data()] if keep else [])]:
        journal.append(records, journal.place(records[0], place))
    return CheckResult(p.slug, chosen.key, records, scores.table)


def _cases(
    p: Problem, full: Size, families: Sequence[str], states: Sequence[str], seeds: Sequence[int]
) -> list[tuple[Size, str, str, int]]:
    cases = [(full, f, s, seeds[0]) for f in families for s in states]
    cases += [(full, families[0], states[0], seed) for seed in seeds[1:]]
    cases += [(edge, families[0], states[-1], seeds[0]) for edge in p.edges]
    return cases + [(full, family, states[0], seeds[0]) for family in SPECIAL]


def _judged(
    p: Problem, variant: Variant, device: str, route: str, case: tuple, base: dict, scores: _Scores
) -> Record:
    """One case as a record. A candidate that raises where the reference doesn't has failed."""
    size, family, state, seed, mode = case
    generator = torch.Generator().manual_seed(1000 + seed)
    model = p.model(size, seed=seed, device=device, mode=mode)
    shape = p.shape(size)
    x = {**FAMILIES, **SPECIAL}[family](shape["B"], shape["K"], generator).to(device)
    found = {
        "size": size.name, "shape": shape, "family": family, "state": state, "seed": seed,
        "mode": mode, **base,
    }  # fmt: skip
    refused = _raised(lambda: copy.deepcopy(model)(x))
    try:
        with torch.no_grad(), using_route(route):
            candidate = variant.make(model)
            candidate(x)
            {**STATES, **p.states}[state](model, generator)
            judge = Judge(model, x)
            with poisoned():
                y = copy.deepcopy(candidate(x))  # a copy: it may write the same memory again
            judge.note(model)
            again = candidate(x)
    except Exception as error:  # whatever it raises, the candidate failed, but as the reference
        reason = "" if type(error) is type(refused) else f"raised {in_words(error)}"
        return Record(kind="check", passed=not reason, reason=reason, **found)
    if refused is not None:
        reason = f"accepted what the reference refuses: {in_words(refused)}"
        return Record(kind="check", passed=False, reason=reason, **found)
    verdict = judge.verdict(y, x, again, route)
    reason = misfit(candidate, judge.model) or verdict.reason
    if family == scores.family and shape["N"] > 1:
        scores.add(judge.model, x, verdict.true, verdict.limits)
    return Record(
        kind="check", passed=not reason, reason=reason,
        how={"limit_rows": verdict.limits[1]}, **verdict.fields(), **found,
    )  # fmt: skip


def _raised(run: Callable[[], object]) -> Exception | None:
    """What `run` raises."""
    try:
        with torch.no_grad():
            run()
    except Exception as error:
        return error
    return None


def in_words(error: Exception) -> str:
    """Class and first line of an exception, which may be without words."""
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"


def _nearness(record: Record) -> float:
    if record.rel_error is None or not record.limit:
        return 0.0
    rows = (record.rel_error_rows or 0.0) / record.how.get("limit_rows", record.limit)
    return max(record.rel_error / record.limit, rows)


class _Scores:
    """What zeros, a constant and the chain less one step would score under the rule."""

    def __init__(self, p: Problem, family: str) -> None:
        self.family = family
        self._wrong: dict[str, Callable] = {
            "zeros": lambda model, x, true: torch.zeros_like(true),
            "a constant (the mean)": lambda model, x, true: true.mean().expand_as(true),
        }
        for name, f in p.omissions.items():
            self._wrong[name] = lambda model, x, true, f=f: f(model, x.double())
        self._found: dict[str, dict] = {}

    @property
    def table(self) -> list[dict]:
        return list(self._found.values())

    def add(self, model: nn.Module, x: Tensor, true: Tensor, limits: tuple[float, float]) -> None:
        """Score each on one case: accepted over all only if accepted in every case."""
        if not x.numel():
            return
        double = copy.deepcopy(model).double()
        for name, output in self._wrong.items():
            with torch.no_grad():
                errors = errors_of(output(double, x, true).reshape(true.shape), true)
            accepted = all(e <= limit for e, limit in zip(errors, limits, strict=True))
            seen = self._found.setdefault(name, {"name": name, "rel_error": 0.0, "accepted": True})
            seen["rel_error"] = max(seen["rel_error"], errors[0])
            seen["accepted"] = seen["accepted"] and accepted
