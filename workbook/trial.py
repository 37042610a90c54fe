"""A kernel from a string: built, checked, timed beside ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from workbook import accuracy, compare, journal, machine, plot, results
from workbook.spec import Problem, Size

__all__ = ["Trial", "try_kernel"]


@dataclass(frozen=True)
class Trial:
    """What became of a tried kernel; the picture has it among the others."""

    check: accuracy.CheckResult
    bench: results.BenchResult
    picture: plot.Picture

    @property
    def ok(self) -> bool:
        return self.check.ok

    def __str__(self) -> str:
        return f"{self.check}\n{self.bench}"

    def _repr_html_(self) -> str:
        return self.check._repr_html_() + self.bench._repr_html_() + self.picture._repr_html_()


def try_kernel(
    p: Problem,
    source: str | Path,
    *,
    device: str | None = None,
    size: str | Size | None = None,
    against: Sequence[str] | None = None,
    form: str = "",
    budget_s: float = 8.0,
) -> Trial:
    """Build a kernel of the problem's ladder from its text, check it, time it beside `against`.

    source: what a file of kernels/<slug>/ holds, or the file: it defines `launch`, in C++ for a
    CPU, in CUDA for a GPU. form: how it is called, such as "chain" where it takes the weights as
    they are; as our best kernel if not given. against: keys; eager, the algebra and our last rung
    if not given.
    Raises BuildError with the compiler's words; a wrong result is no error, `.check` says so.
    """
    device = machine.default_device(device)
    text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
    variant = p.rung_of_text(text, device, form)
    rungs = [v.key for v in p.variants if v.is_rung and device in v.devices]
    against = ("eager", "algebra", rungs[-1]) if against is None else against
    variant.make(p.model(size or "laptop", device=device))  # a failed build is raised, not judged
    check = accuracy.check(p, variant=variant, device=device, stop=True)
    bench = compare.bench(
        p, size=size, device=device, variants=[*against, variant], budget_s=budget_s
    )
    if not check.ok:  # its one input may not show it
        bench = results.BenchResult(
            journal.Records(
                dataclasses.replace(r, passed=False, reason=r.reason or check.reason)
                if r.variant == variant.name
                else r
                for r in bench.records
            )
        )
    return Trial(check, bench, plot.ladder(bench.records))
