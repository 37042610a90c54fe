"""How public protocols judge a drop-in, and beside it what our rule says of the same outputs.

eval     Model and candidate are built, Model's state_dict is loaded strictly, .eval(), one input,
         allclose at 1e-3.
harness  Both are built on the CPU after the same seed, nothing is loaded, they stay in train mode;
         five fresh inputs, same shape and dtype, allclose at 1e-4. A file's text is looked at
         first (`drafts.refusals`). What is accepted is timed, gradients on.

Neither changes the weights of a candidate that has run: `moved` says what our rule finds then.
"""

from __future__ import annotations

import contextlib
import html
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from workbook import drafts, journal, machine, paths, stats
from workbook.accuracy import CheckFailed, in_words
from workbook.journal import Record
from workbook.pairs import FAILURES, Pair, Source
from workbook.spec import Problem, Size, Variant
from workbook.variants import kernels_digest

__all__ = ["PROTOCOLS", "Protocol", "ProtocolResult", "protocol"]

SAMPLES = 100  # of what was accepted; on a CPU as many as the budget has room for
NOT_RUN = "not run"
BUSY = ("lock", "No such file or directory")  # in an error's text: also in "block"


@dataclass(frozen=True)
class Protocol:
    """tolerance: atol and rtol of its allclose. trials: inputs. mode: of the models."""

    name: str
    tolerance: float
    trials: int
    mode: str

    def differ(self, wants: Tensor, y: object) -> str:
        """Why the output is not accepted; empty if it is. eval compares as allclose does, which
        broadcasts."""
        if not isinstance(y, Tensor):
            return f"output: got a {type(y).__name__}, wants a Tensor"
        for name in ("shape", "dtype") if self.is_harness else ():
            if getattr(y, name) != getattr(wants, name):
                return f"{name}: got {getattr(y, name)}, wants {getattr(wants, name)}"
        if torch.allclose(wants, y, rtol=self.tolerance, atol=self.tolerance):
            return ""
        return f"allclose at {self.tolerance:g}: off by up to {(wants - y).abs().max().item():.1e}"

    @property
    def is_harness(self) -> bool:
        return self.mode == "train"


PROTOCOLS = {p.name: p for p in (Protocol("eval", 1e-3, 1, "eval"),
                                 Protocol("harness", 1e-4, 5, "train"))}  # fmt: skip


@dataclass(frozen=True)
class ProtocolResult:
    """The verdict of a protocol and ours, as the record has them."""

    record: Record

    @property
    def ok(self) -> bool:
        """The protocol accepted it."""
        return bool(self.record.passed)

    @property
    def reason(self) -> str:
        """Why the protocol did not."""
        return self.record.reason

    @property
    def rule(self) -> str:
        """What our rule finds wrong with the outputs that the protocol saw; empty if nothing."""
        return self.record.how["rule"]

    @property
    def moved(self) -> str:
        """The same for one more output, after the weights changed in place."""
        return self.record.how["moved"]

    @property
    def is_let_through(self) -> bool:
        """Accepted by the protocol, wrong by our rule."""
        return self.ok and bool(self.rule or self.moved)

    @property
    def speedup(self) -> float:
        """Over eager, gradients on: the median over pairs of samples of the same round."""
        eager, ours = self.record.how["eager_ms"], self.record.samples_ms
        pairs = min(len(eager), len(ours))
        return stats.paired_ratio(eager[:pairs], ours[:pairs]).median

    def require(self) -> ProtocolResult:
        """Itself, or CheckFailed where the protocol rejects it."""
        if not self.ok:
            r = self.record
            raise CheckFailed(f"{r.problem}, {r.variant}, {r.protocol}: {self.reason}")
        return self

    def __str__(self) -> str:
        r = self.record
        verdict = "accepted" if self.ok else f"REJECTED: {self.reason}"
        lines = [f"{r.problem} / {r.variant}, {r.protocol}: {verdict}"]
        if r.rel_error is not None:
            lines.append(
                f"  error {r.rel_error:.1e}, worst row {r.rel_error_rows:.1e} "
                f"(eager {r.rel_error_eager:.1e}, {r.rel_error_eager_rows:.1e})"
            )
        for what, said in (("the same outputs", self.rule), ("the weights moved", self.moved)):
            lines.append(f"  our rule, {what}: {_in_words(said)}")
        if r.samples_ms:
            lines.append(f"  {r.median_ms:.3g} ms, {self.speedup:.3g} times as fast as eager")
        return "\n".join([*lines, *([f"  {r.note}"] if r.note else [])])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def _in_words(reason: str) -> str:
    return reason if reason == NOT_RUN else f"WRONG: {reason}" if reason else "right"


def protocol(
    p: Problem,
    name: str,
    *,
    variant: str | Variant | None = None,
    file: str | Path | None = None,
    device: str | None = None,
    size: str | Size = "laptop",
    seed: int = 0,
    samples: int = SAMPLES,
    budget_s: float = 2.0,
    keep: bool = False,
) -> ProtocolResult:
    """Judge a variant (ModelNew if none is named), or the ModelNew of a file, by a protocol.

    A variant with a `sample` runs these rows alone. What raises is rejected, with its words. The
    record, of kind "check" with the protocol in `how`, is appended to .runs/, with `keep` to data/.
    samples: of the timing of what is accepted; budget_s: its seconds on a CPU. KeyError, ValueError
    and FileNotFoundError say what the argument wants.
    """
    if name not in PROTOCOLS:
        raise KeyError(f"protocol: got {name!r}; there are {', '.join(PROTOCOLS)}")
    if file is not None and variant is not None:
        raise ValueError("variant and file: got both, wants one of them")
    rule, full = PROTOCOLS[name], p.size(size)
    device = machine.default_device(device)
    card = machine.card(device)  # NoDevice where it is not here
    source = _of_variant(p, variant or "fused", device) if file is None else _of_file(file)
    with contextlib.redirect_stdout(sys.stderr):  # what it prints is not what we say
        found = _Bout(p, rule, source, full, seed).run(torch.device(device), samples, budget_s)
    how = {"protocol": name, "tolerance": rule.tolerance, "trials": rule.trials, **found.pop("how")}
    record = Record(
        kind="check", problem=p.slug, variant=source.key, implementation=source.implementation,
        kernels_digest=source.digest, route="float32", device=device, card=card, dtype="float32",
        size=full.name, shape=p.shape(full), family="uniform", state="initial", seed=seed,
        mode=rule.mode, grad=rule.is_harness, run=journal.new_run(), how=how, **found,
        **machine.provenance(),
    )  # fmt: skip
    for place in [paths.runs(), *([paths.data()] if keep else [])]:
        journal.append(record, journal.place(record, place))
    return ProtocolResult(record)


def _of_variant(p: Problem, variant: str | Variant, device: str) -> Source:
    v = p.variant(variant, device) if isinstance(variant, str) else variant
    if v.reads == "fold":
        raise ValueError(
            f"variant: {v.key} has weights of its own, which nobody can load: use fused"
        )
    if v.route != "float32":
        raise ValueError(f"variant: {v.key} runs by {v.route}, which the protocols leave off")
    digest = kernels_digest(p.slug, v, device)
    if v.key == "fused":  # ModelNew by its own constructor, as its users build it
        return Source(v.key, v.implementation, digest, p.ModelNew)
    return Source(v.key, v.implementation, digest, p.Model, v.make, sample=v.sample)


def _of_file(file: str | Path) -> Source:
    draft = drafts.read(file)
    return Source(draft.path.name, "file", draft.digest, lambda *init: draft.entry()(*init),
                  text=draft.text)  # fmt: skip


class _Bout:
    """A candidate under a protocol: reasons to reject it, fields of its record."""

    def __init__(self, p: Problem, rule: Protocol, source: Source, size: Size, seed: int) -> None:
        self.p, self.rule, self.source, self.size, self.seed = p, rule, source, size, seed
        self.reasons: list[str] = []
        self.how: dict = {"rule": NOT_RUN, "moved": NOT_RUN}
        self.how |= {"flush": "write"} if rule.is_harness else {}
        self.fields: dict = {}

    def run(self, device: torch.device, samples: int, budget_s: float) -> dict:
        """The fields of the record that are found out."""
        if self.rule.is_harness and self.source.text is not None:
            refused = drafts.refusals(self.source.text)
            self.reasons += [f"static check: {'; '.join(refused)}"] if refused else []
        pair = self._pair(device)
        x = self._trials(pair, device) if pair else None
        if x is not None:
            if self.rule.is_harness and not self.reasons:
                self._time(pair, x, samples, budget_s)
            self.how["moved"] = pair.moved(x[: self.source.sample])
        reason = "; ".join(self.reasons)
        return {"passed": not reason, "reason": reason, "how": self.how, **self.fields}

    def _pair(self, device: torch.device) -> Pair | None:
        """None where it can not be built, or nothing of it can be compared."""
        p, train = self.p, self.rule.is_harness
        try:
            pair = Pair.of(p, self.source, self.size, device, self.seed, train)
        except drafts.DraftError:
            raise
        except FAILURES as error:
            busy = train and any(words in str(error) for words in BUSY)
            more = "; the public harness would think a lock is busy and try again" if busy else ""
            self.reasons.append(f"building it raised {in_words(error)}{more}")
            return None
        refused = "" if train else pair.load()
        if refused:
            self.reasons.append(refused)
            return pair if pair.follow() else None  # its numbers are told all the same
        return pair

    def _trials(self, pair: Pair, device: torch.device) -> Tensor | None:
        """All inputs, and the worst of our verdicts; the last input, or None where it raised."""
        generator, verdicts, failed = torch.Generator().manual_seed(self.seed), [], ""
        for number in range(1, self.rule.trials + 1):
            x = self._input(device, int(torch.randint(2**31, (), generator=generator)))
            reason, verdict = pair.trial(x[: self.source.sample], self.rule.differ)
            failed = failed or (reason and f"input {number}: {reason}")
            verdicts.append(verdict)
            if verdict is None:
                break
        self.reasons += filter(None, [failed])
        if verdicts[-1] is None:
            self.how["rule"] = reason
            return None
        worst = max(verdicts, key=lambda v: (bool(v.reason), v.nearness))
        self.how |= {"rule": worst.reason, "limit_rows": worst.limits[1]}
        self.fields |= worst.fields()
        return x

    def _input(self, device: torch.device, seed: int) -> Tensor:
        return self.p.inputs(self.size, seed=seed, device=device)[0]

    def _time(self, pair: Pair, x: Tensor, samples: int, budget_s: float) -> None:
        try:
            times = pair.timed(x, self.source.sample, samples, budget_s)
        except FAILURES as error:
            self.reasons.append(f"timing it, gradients on, raised {in_words(error)}")
            return
        rows = min(self.source.sample or x.size(0), x.size(0))
        factor = x.size(0) / max(rows, 1)
        self.fields |= {
            "samples_ms": [ms * factor for ms in times["candidate"]], "extrapolated": factor != 1,
            "note": f"measured on {rows} rows, times {factor:g}" if factor != 1 else "",
        }  # fmt: skip
        self.how["eager_ms"] = times["eager"]
