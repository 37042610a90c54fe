"""A reference and a candidate side by side: built, loaded, called, moved, timed.

A candidate is a class that is built by itself, as a drop-in is, or what a variant makes around a
Model. Whatever it raises is told in words, and is its failure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workbook import timing
from workbook.accuracy import in_words
from workbook.families import STATES
from workbook.judge import Judge, Verdict, misfit
from workbook.precision import using_route
from workbook.spec import Problem, Size

__all__ = ["Pair", "Source"]

FLUSH_BYTES = 256 << 20  # written once before a sample: on an H100 it hides 0.09 ms of host time
GPU_BUDGET_S = 20.0  # for the timing of eager and candidate together
WARMUPS = 3
FAILURES = (Exception, SystemExit)  # a file may end the process where it should raise


@dataclass(frozen=True)
class Source:
    """Where a candidate comes from. build(*init) -> a module; make: what is made around it, None
    where the module itself is the candidate. text: of its file. sample: rows to run."""

    key: str
    implementation: str
    digest: str
    build: Callable[..., nn.Module]
    make: Callable[[nn.Module], Callable[[Tensor], Tensor]] | None = None
    text: str | None = None
    sample: int | None = None


@dataclass(frozen=True)
class Pair:
    """owner: the module whose parameters and buffers the candidate reads."""

    reference: nn.Module
    candidate: Callable[[Tensor], Tensor]
    owner: nn.Module

    @classmethod
    def of(
        cls, p: Problem, source: Source, size: Size, device: torch.device, seed: int, train: bool
    ) -> Pair:
        """Built on the CPU, then moved; to train, both after the same seed, else one after the
        other, so that weights are equal only once they are loaded."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            reference = p.Model(*size.init)
            if train:
                torch.manual_seed(seed)
            built = source.build(*size.init).to(device)
        reference = reference.to(device)
        if source.make is None:
            return cls(reference, built, built)
        candidate = source.make(built.train(train))  # the mode may be read here
        inner = getattr(candidate, "_orig_mod", candidate)  # of torch.compile
        return cls(reference, candidate, inner if isinstance(inner, nn.Module) else built)

    def load(self) -> str:
        """The reference's state into the candidate, strictly, then eval mode; why it did not."""
        self.reference.eval()
        try:
            self.owner.load_state_dict(self.reference.state_dict())
        except FAILURES as error:
            words = str(error).partition(":\n")[2] or in_words(error)
            self.owner.eval()
            return f"strict load: {' '.join(words.split())}"
        self.owner.eval()
        return ""

    def follow(self) -> bool:
        """Copy the reference's numbers in place, by name, else by order; False if neither fits."""
        ours, theirs = (
            dict([*module.named_parameters(), *module.named_buffers()])
            for module in (self.owner, self.reference)
        )
        if theirs.keys() <= ours.keys():  # it may have buffers of its own beside them
            ours = {name: ours[name] for name in theirs}
        if [t.shape for t in ours.values()] != [t.shape for t in theirs.values()]:
            return False
        with torch.no_grad():
            for a, b in zip(ours.values(), theirs.values(), strict=True):
                a.copy_(b)
        return True

    def trial(
        self, x: Tensor, differ: Callable[[Tensor, object], str]
    ) -> tuple[str, Verdict | None]:
        """(what `differ(wanted, output)` says of one call, our verdict); None without an output
        that can be compared."""
        judge = Judge(self.reference, x)
        with torch.no_grad(), using_route("float32"):
            wants = self.reference(x)
            try:
                y = self.candidate(x)
            except FAILURES as error:
                return f"raised {in_words(error)}", None
        judge.note(self.owner)
        try:
            reason = differ(wants, y)
        except Exception as error:  # allclose refuses other types and shapes
            reason = f"the comparison raised {in_words(error)}"
        try:
            verdict = judge.verdict(y, x)
        except Exception as error:  # a sparse tensor, one without memory, on another device
            return reason or f"the comparison raised {in_words(error)}", None
        fault = misfit(self.owner, self.reference) or verdict.reason
        return reason, dataclasses.replace(verdict, reason=fault)

    def moved(self, x: Tensor) -> str:
        """What our rule says once the weights were changed in place, in both alike."""
        if not self.follow():
            return "the weights of the reference do not fit it"
        with torch.no_grad():
            STATES["trained"](self.reference, torch.Generator().manual_seed(0))
        self.follow()
        raised, verdict = self.trial(x, lambda wants, y: "")
        return raised if verdict is None else verdict.reason

    def timed(
        self, x: Tensor, rows: int | None, samples: int, budget_s: float
    ) -> dict[str, list[float]]:
        """Milliseconds of "eager", and of "candidate" on the first rows of x, in turn: gradients
        on, current stream, the cache emptied by writing."""
        part = x[:rows]
        calls = {
            "eager": timing.Call(lambda: self.reference(x)),
            "candidate": timing.Call(lambda: self.candidate(part)),
        }
        budget = GPU_BUDGET_S if x.is_cuda else budget_s
        with torch.enable_grad():
            for _ in range(WARMUPS):
                self.candidate(part)
            return timing.interleaved(
                calls, x.device, rounds=samples, budget_s=budget, flush=_flush(x.device)
            )


def _flush(device: torch.device) -> Callable[[], object]:
    """As the public harness empties the L2 of a GPU: one pass of writing."""
    if device.type != "cuda":
        return timing.Flush(device, "write")
    buffer = torch.empty(FLUSH_BYTES // 8, dtype=torch.int64, device=device)
    return lambda: buffer.fill_(42)
