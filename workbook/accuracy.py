"""Is it right: a candidate against the reference in float64, beside eager's own error.

The rule: over the whole output, and for the worst row, the relative error is at most twice
eager's own, or 2e-7, whichever is larger (1.2 times eager's on the tf32 route).
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
from workbook.families import FAMILIES, SPECIAL, STATES
from workbook.journal import Record, Records
from workbook.precision import poisoned, using_route
from workbook.spec import Problem, Size, Variant
from workbook.variants import kernels_digest

__all__ = ["CheckFailed", "CheckResult", "check", "errors_of", "excess", "limits_of", "oracle"]

FLOOR = 2e-7  # relative: about three roundings of float32
FACTOR = {"float32": 2.0, "tf32": 1.2}
# Sizes that break kernels: one of everything, primes, a batch above 1024 threads, none at all; rows
# longer than a warp's share, a block's, and just beyond each, by 16 bytes and by one float.
EDGES = (Size("one", (1, 1), 1), Size("odd", (97, 31), 7), Size("tall", (67, 33), 1031),
         Size("none", (5, 3), 0), Size("long", (2052, 3), 5), Size("long odd", (2053, 3), 5),
         Size("longest", (9004, 3), 3))  # fmt: skip


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


def oracle(model: nn.Module, x: Tensor, rows: int = 1024) -> Tensor:
    """The reference in float64, by blocks of rows."""
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        return torch.cat([exact(block.double()) for block in x.split(rows)])


def errors_of(y: Tensor, exact: Tensor) -> tuple[float, float]:
    """(‖y − exact‖ / ‖exact‖, the same for the worst row); inf where y is not finite and exact is,
    or has another shape.

    Rows that are not finite in `exact` are left out.
    """
    if y.shape != exact.shape:
        return float("inf"), float("inf")
    if not exact.numel():
        return 0.0, 0.0
    y, exact = y.double().reshape(y.size(0), -1), exact.reshape(exact.size(0), -1)
    kept = exact.isfinite().all(1)
    y, exact = y[kept], exact[kept]
    if not exact.numel():
        return 0.0, 0.0
    if not y.isfinite().all():
        return float("inf"), float("inf")
    rows = _ratio((y - exact).norm(dim=1), exact.norm(dim=1))
    return _ratio((y - exact).norm(), exact.norm()).item(), rows.max().item()


def _ratio(error: Tensor, size: Tensor) -> Tensor:
    return torch.where(error == 0, 0.0, error / size)


def limits_of(eager: tuple[float, float], route: str = "float32") -> tuple[float, float]:
    """The largest errors the rule accepts, whole and worst row, beside eager's own."""
    return tuple(max(FACTOR[route] * e, FLOOR) for e in eager)


def check(
    p: Problem,
    *,
    variant: str | Variant = "fused",
    device: str | None = None,
    size: str | Size = "laptop",
    seeds: Sequence[int] = (0, 1),
    families: Sequence[str] = tuple(FAMILIES),
    states: Sequence[str] = tuple(STATES),
    route: str = "float32",
    stop: bool = False,
    keep: bool = False,
    progress: bool = False,
) -> CheckResult:
    """Run a variant over input families, weight states, seeds and edge sizes; judge each case.

    Each case: the candidate is made and called once; then the weights change in place; then the
    output is judged, from memory poisoned with NaN. Shape, dtype, device, an untouched input and
    bit-identical repeats are part of it. stop: at the first failure.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen = p.variant(variant, device) if isinstance(variant, str) else variant
    full = p.size(size)
    for argument, asked, there in (("families", families, FAMILIES), ("states", states, STATES)):
        for name in asked or [""]:
            if name not in there:
                raise KeyError(f"{argument}: got {name!r}; there are {', '.join(there)}")
    cases = [(full, f, s, seeds[0]) for f in families for s in states]
    cases += [(full, families[0], states[0], seed) for seed in seeds[1:]]
    cases += [(edge, families[0], states[-1], seeds[0]) for edge in EDGES]
    cases += [(full, family, states[0], seeds[0]) for family in SPECIAL]
    base = {
        "problem": p.slug, "variant": chosen.key, "implementation": chosen.implementation,
        "route": route, "device": device, "card": machine.card(device), "dtype": "float32",
        "kernels_digest": kernels_digest(p.slug, chosen, device), "mode": "eval",
        "run": journal.new_run(), **machine.provenance(),
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


def _judged(
    p: Problem, variant: Variant, device: str, route: str, case: tuple, base: dict, scores: _Scores
) -> Record:
    """One case as a record. A candidate that raises is a failed case, with its words."""
    size, family, state, seed = case
    generator = torch.Generator().manual_seed(1000 + seed)
    model = p.model(size, seed=seed, device=device)
    shape = p.shape(size)
    x = {**FAMILIES, **SPECIAL}[family](shape["B"], shape["K"], generator).to(device)
    found = {"size": size.name, "shape": shape, "family": family, "state": state, "seed": seed}
    try:
        with torch.no_grad(), using_route(route):
            candidate = variant.make(model)
            candidate(x)
            STATES[state](model, generator)
            kept = x.clone()
            with poisoned():
                y = copy.deepcopy(candidate(x))  # a copy: it may write the same memory again
            again, eager = candidate(x), model(x)
    except Exception as error:  # whatever it raises, the candidate failed
        reason = f"raised {in_words(error)}"
        return Record(kind="check", passed=False, reason=reason, **found, **base)
    exact = oracle(model, x)
    own = errors_of(eager, exact)
    ours = errors_of(y, exact) if isinstance(y, Tensor) else (float("inf"), float("inf"))
    limits = limits_of(own, route)
    reason = _fault(y, again, eager, x, kept) or excess(ours, own, limits)
    if family == scores.family and shape["N"] > 1:
        scores.add(model, x, exact, limits)
    return Record(
        kind="check", passed=not reason, reason=reason, rel_error=ours[0], rel_error_rows=ours[1],
        rel_error_eager=own[0], rel_error_eager_rows=own[1], limit=limits[0],
        how={"limit_rows": limits[1]}, **found, **base,
    )  # fmt: skip


def _fault(y: Tensor, again: Tensor, eager: Tensor, x: Tensor, kept: Tensor) -> str:
    """What is wrong beside the size of the error; empty if nothing."""
    if not isinstance(y, Tensor):
        return f"output: got a {type(y).__name__}, wants a Tensor"
    for name in ("shape", "dtype", "device"):
        got, wants = getattr(y, name), getattr(eager, name)
        if got != wants:
            return f"{name}: got {got}, wants {wants}"
    if not _same(x, kept):
        return "the input was modified"
    lost = (eager.isfinite() & ~y.isfinite()).sum().item()
    if lost:
        return f"{lost} of {y.numel()} outputs are not finite where eager's are"
    dropped = (eager.isnan() & ~y.isnan()).sum().item()
    if dropped:
        return f"{dropped} of {y.numel()} outputs are not NaN where eager's are"
    if not _same(y, again):
        return "two calls on the same input differ"
    return ""


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def in_words(error: Exception) -> str:
    """Class and first line of an exception, which may be without words."""
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"


def excess(ours: tuple, own: tuple, limits: tuple) -> str:
    """By which error, of which kind, the rule is broken; empty if it holds."""
    for what, error, eager, limit in zip(("whole", "worst row"), ours, own, limits, strict=True):
        if not error <= limit:
            return f"error {error:.1e} ({what}), limit {limit:.1e}, eager {eager:.1e}"
    return ""


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
            "zeros": lambda model, x, exact: torch.zeros_like(exact),
            "a constant (the mean)": lambda model, x, exact: exact.mean().expand_as(exact),
        }
        for name, f in p.omissions.items():
            self._wrong[name] = lambda model, x, exact, f=f: f(model, x.double())
        self._found: dict[str, dict] = {}

    @property
    def table(self) -> list[dict]:
        return list(self._found.values())

    def add(self, model: nn.Module, x: Tensor, exact: Tensor, limits: tuple[float, float]) -> None:
        """Score each on one case: accepted over all only if accepted in every case."""
        if not x.numel():
            return
        double = copy.deepcopy(model).double()
        for name, output in self._wrong.items():
            with torch.no_grad():
                errors = errors_of(output(double, x, exact).reshape(exact.shape), exact)
            accepted = all(e <= limit for e, limit in zip(errors, limits, strict=True))
            seen = self._found.setdefault(name, {"name": name, "rel_error": 0.0, "accepted": True})
            seen["rel_error"] = max(seen["rel_error"], errors[0])
            seen["accepted"] = seen["accepted"] and accepted
