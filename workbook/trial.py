"""A kernel from a string: built, checked, timed beside ours."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workbook import accuracy, compare, plot, results
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
    source: str,
    *,
    device: str | None = None,
    size: str | Size | None = None,
    against: tuple[str, ...] = ("eager", "algebra", "fused"),
    budget_s: float = 8.0,
) -> Trial:
    """Build a kernel of the problem's ladder from its text, check it, time it beside `against`.

    source: what a file of kernels/<slug>/ holds, defining `launch`: C++ for a CPU, CUDA for a GPU.
    Raises BuildError with the compiler's words; a wrong result is no error, `.check` says so.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    variant = p.rung_of_text(source, device)
    variant.make(p.model(size or "laptop", device=device))  # a failed build is raised, not judged
    check = accuracy.check(p, variant=variant, device=device, stop=True)
    bench = compare.bench(
        p, size=size, device=device, variants=[*against, variant], budget_s=budget_s
    )
    return Trial(check, bench, plot.ladder(bench.records))
