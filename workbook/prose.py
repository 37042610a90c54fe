"""Declarations → what a notebook says: sources, derivations, what the compiler reports."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from workbook import build, ops, paths
from workbook.spec import Problem, Variant

__all__ = ["Text", "derivation", "resources", "show"]

AGREES = 1e-10  # relative, in float64: far above rounding, far below any wrong step


@dataclass(frozen=True)
class Text:
    """Markdown: rendered in a notebook, plain elsewhere."""

    markdown: str

    def _repr_markdown_(self) -> str:
        return self.markdown

    def __str__(self) -> str:
        return self.markdown


def show(what: Variant | type | Path, *names: str) -> Text:
    """A kernel's source from its file, or a class's from its module, as highlighted code.

    names: of a file, only these functions and structs, each with the comment above it; A::b of A.
    """
    if isinstance(what, Path):
        text = what.read_text(encoding="utf-8").rstrip()
        text = "\n\n".join(_definition(text, name) for name in names) or text
        return Text(f"```cpp\n{text}\n```")
    if isinstance(what, Variant):
        if what.source is None:
            raise ValueError(f"variant: {what.key} has no kernel of its own to show")
        text, language, idea = what.source.read_text(encoding="utf-8"), "cpp", f"*{what.idea}*\n\n"
    else:
        text, language, idea = inspect.getsource(what), "python", ""
    return Text(f"{idea}```{language}\n{text.rstrip()}\n```")


def _definition(text: str, name: str) -> str:
    """A function or struct of C++ as clang-format leaves it: from the blank line before it to the
    first line that closes it. A::b: of what stands in A, unindented."""
    outer, _, name = name.rpartition("::")
    text = _definition(text, outer) if outer else text
    head = rf"^( *)(?!//|return )\S[^\n(]*[ *&]{re.escape(name)}(?: \{{|\().*"
    started = re.search(head, text, re.M)
    if started is None:
        raise KeyError(f"name: got {name!r}; there is no function or struct of that name")
    blank = text.rfind("\n\n", 0, started.start())
    first = 0 if blank < 0 else blank + 2
    last = re.compile(rf"^{started[1]}\}};?$", re.M).search(text, started.start())
    lines = text[first : last.end() if last else len(text)].strip("\n").split("\n")
    return "\n".join(line.removeprefix(started[1]) for line in lines)


def derivation(
    p: Problem, *, mode: str = "eval", batch: int = 7, features: tuple[int, int] = (97, 67)
) -> Text:
    """Each step's formula and reason, run in float64 against the first on a small odd size.

    The steps are those of the mode. A model with buffers is put in the first of the problem's own
    states: statistics that are 0 and 1 prove little. Says the relative difference of each.
    AssertionError where a step that is said to hold does not, or a tempting wrong one agrees.
    """
    steps = [step for step in p.steps if step.mode == p.mode(mode)]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, features[0], generator=generator, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = p.Model(*features, *p.init_args()[2:]).train(mode == "train")
        for state in [*p.states.values()][: len([*model.buffers()][:1])]:
            state(model, generator)
        arguments = p.arguments(model.double())
        first = steps[0].compute(x, *arguments)
        parts = []
        for number, step in enumerate(steps):
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
    """Registers, spills and shared memory of each CUDA rung, compiled here to sm_`arch`; of rungs
    for Hopper, to sm_90a."""
    rungs = [v for v in p.variants if v.is_rung and v.source.suffix == ".cu"]
    lacking = ops.missing("cuda")
    if lacking:
        return Text(f"The CUDA rungs are not compiled here: {lacking}")
    include = [paths.kernels() / p.slug, paths.kernels() / "common"]
    rows = []
    for v in rungs:
        flags, target = ["-DWB_CUDA", *v.flags], "90a" if v.implementation == "hopper" else arch
        rows += [
            f"| {v.key} | `{k.name.split('(')[0].removeprefix('void ')}` "
            f"| {k.registers} | {k.spill_bytes} | {k.shared_bytes} |"
            for k in build.cubin(v.source, arch=target, include=include, flags=flags).kernels
        ]
    head = "| rung | kernel | registers a thread | bytes spilled | bytes shared |"
    return Text("\n".join([head, "|---|---|---|---|---|", *rows]))
