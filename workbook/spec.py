"""What a chain declares about itself: the problem, the steps of its algebra, its variants."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from workbook.limits import Ceilings, Work

__all__ = ["EDGES", "SWEEPS", "Problem", "Product", "Size", "Step", "Variant"]

# A model, given once, becomes a function of its input: derived weights may be kept in between.
Make = Callable[[nn.Module], Callable[[Tensor], Tensor]]
# (shape with B, K, N; what the machine reaches) -> milliseconds, said before anything is timed.
Predict = Callable[[Mapping[str, int], Ceilings], float]
INPUTS = 1_000_000  # added to a seed: that of the inputs beside that of the weights


@dataclass(frozen=True)
class Size:
    """One size of a problem: the model's positional arguments and the rows of its input."""

    name: str
    init: tuple
    batch: int


# Sizes that break kernels: one of everything, primes, a batch above 1024 threads, none at all; rows
# longer than a warp's share, a block's, and just beyond each, by 16 bytes and by one float.
EDGES = (Size("one", (1, 1), 1), Size("odd", (97, 31), 7), Size("tall", (67, 33), 1031),
         Size("none", (5, 3), 0), Size("long", (2052, 3), 5), Size("long odd", (2053, 3), 5),
         Size("longest", (9004, 3), 3))  # fmt: skip

# Device -> axis -> sizes that a sweep goes through, the others as in its laptop or paper size: from
# a product of a few rows to 4 GB of weights (a GPU), or what two cores finish in half a minute.
SWEEPS = {
    "cpu": {
        "B": (1, 4, 16, 64, 256, 1024, 4096),
        "K": (32, 128, 512, 2048, 8192, 32768),
        "N": (32, 128, 512, 2048, 8192, 32768),
    },
    "cuda": {
        "B": (1, 8, 64, 256, 1024, 4096, 16384, 65536),
        "K": (32, 128, 512, 2048, 8192, 32768, 131072),
        "N": (32, 128, 512, 2048, 8192, 32768, 131072),
    },
}


class Product(NamedTuple):
    """A product that the algebra leaves: its outputs, and whether W, or what a fold makes of it, is
    at hand as it is where it is multiplied."""

    outputs: int
    whole: bool = False


@dataclass(frozen=True)
class Step:
    """One step of a derivation, runnable: `compute(x, *arguments)` in the dtype of its input.

    formula: LaTeX, without dollar signs. `holds` is False for a tempting step that is wrong.
    mode: of the model, that it is a step for.
    """

    title: str
    formula: str
    reason: str
    compute: Callable[..., Tensor]
    holds: bool = True
    mode: str = "eval"


@dataclass(frozen=True)
class Variant:
    """One way to compute a problem, from the reference to the best kernel.

    implementation: torch, cpu, portable or hopper. source: the kernel's file, shown in the ladder;
    files: every kernel file it may run, of any device.
    wrong: for a control, what is wrong with it; `check` has to reject it.
    folds: derived weights are kept between calls. reads: the key of the problem's work: "before"
    or "after" the algebra, or "fold", after it and the weights. sample: rows to run where the whole
    batch would take too long.
    shrink: where a single row takes too long, in_features and out_features are divided by it, and
    the time is multiplied by its square.
    predict: the time, from the shape and the ceilings. flags: macros its source is compiled with.
    modes: of the model, that it computes.
    """

    name: str
    implementation: str
    idea: str
    make: Make
    devices: tuple[str, ...] = ("cpu", "cuda")
    route: str = "float32"
    source: Path | None = None
    files: tuple[Path, ...] = ()
    wrong: str = ""
    folds: bool = True
    reads: str = "after"
    sample: int | None = None
    shrink: int = 1
    predict: Predict | None = None
    flags: tuple[str, ...] = ()
    modes: tuple[str, ...] = ("eval", "train")

    @property
    def is_control(self) -> bool:
        return bool(self.wrong)

    @property
    def is_rung(self) -> bool:
        return self.source is not None and not self.wrong

    @property
    def key(self) -> str:
        """Name and route: `eager` and `eager/tf32` are two variants."""
        return self.name if self.route == "float32" else f"{self.name}/{self.route}"


@dataclass(frozen=True)
class Problem:
    """A fusion problem: reference, drop-in, sizes, derivation, variants.

    dims: names of the hyper-parameters after in_features and out_features that `work` takes.
    work: the operations and bytes at (B, K, N, *dims), "before" and "after" the algebra, of "fold".
    arguments: what the op takes of a model beside x, now: (*parameters, *options).
    omissions: `f(model, x)` in float64 with one step of the chain left out; `check` refuses to
    accept the problem if its rule would accept one of them.
    fold: the derived weights of a model, made anew; fold_halves: instead, where they are multiplied
    by halves.
    bare: (model, x) -> our kernel alone, on a fold and an output that are there.
    yardsticks: `f(x, *folded)` in float32, torch calls that move the same bytes as ours.
    rung_of_text: (source, device, form) -> a variant built from the text of a kernel.
    multiplied(mode, route, shape) -> the product that is left, for ours to make where a way of ours
    is the faster one; None where none is.
    through: of TF32's products, as of `ways.ours`.
    modes: of the model, in which it differs. edges: sizes that break kernels, for `check`.
    sweeps: device and axis -> sizes that a sweep goes through.
    states: states of weights for `check`, beside those that every problem has; derivations run in
    the first.
    """

    slug: str
    title: str
    question: str
    Model: type[nn.Module]
    ModelNew: type[nn.Module]
    sizes: Mapping[str, Size]
    steps: tuple[Step, ...]
    work: Mapping[str, Callable[..., Work]]
    variants: tuple[Variant, ...]
    omissions: Mapping[str, Callable[[nn.Module, Tensor], Tensor]]
    arguments: Callable[[nn.Module], tuple]
    fold: Callable[[nn.Module], tuple[Tensor, ...]]
    yardsticks: Mapping[str, Callable[..., Tensor]]
    bare: Callable[[nn.Module, Tensor], Callable[[], object]]
    rung_of_text: Callable[[str, str, str], Variant]
    multiplied: Callable[[str, str, Mapping[str, int]], Product | None] = lambda *_: None
    through: bool = False
    fold_halves: Callable[[nn.Module], tuple[Tensor, ...]] | None = None
    dims: tuple[str, ...] = ()
    modes: tuple[str, ...] = ("eval",)
    edges: tuple[Size, ...] = EDGES
    sweeps: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=lambda: SWEEPS)
    states: Mapping[str, Callable[[nn.Module, torch.Generator], None]] = field(default_factory=dict)

    def size(self, name: str | Size) -> Size:
        """The size of that name. Raises KeyError naming the sizes there are."""
        if isinstance(name, Size):
            return name
        if name not in self.sizes:
            raise KeyError(f"size: got {name!r}; {self.slug} has {', '.join(self.sizes)}")
        return self.sizes[name]

    def init_args(self, size: str | Size = "laptop") -> tuple:
        """Positional arguments of Model and ModelNew."""
        return self.size(size).init

    def shape(self, size: str | Size = "laptop") -> dict[str, int]:
        """B batch, K in_features, N out_features, and the problem's own dims."""
        chosen = self.size(size)
        names = ("K", "N", *self.dims)
        return {"B": chosen.batch, **dict(zip(names, chosen.init, strict=False))}

    def least(self, which: str, shape: Mapping[str, int], method: str = "") -> Work:
        """work[which] at a shape; by one product of halves a weight has two bytes, not four."""
        work = self.work[which](**shape)
        left = self.multiplied("eval", "tf32", shape)
        if method != "fp16x1" or which != "after" or left is None:
            return work
        K, weights = shape["K"], work.read - 4.0 * shape["B"] * shape["K"]
        return replace(work, read=work.read - min(2.0 * K * left.outputs, weights / 2))

    def inputs(
        self, size: str | Size = "laptop", *, seed: int = 0, device: str | torch.device = "cpu"
    ) -> list[Tensor]:
        """[x], x of shape (B, K) drawn from U[0, 1) on the CPU, then moved.

        Not by the seed that weights are drawn by: x would be their first rows, shifted and scaled.
        """
        shape = self.shape(size)
        generator = torch.Generator().manual_seed(INPUTS + seed)
        return [torch.rand(shape["B"], shape["K"], generator=generator).to(device)]

    def get_init_inputs(self) -> list:
        """The public harness's spelling of init_args("paper")."""
        return list(self.init_args("paper"))

    def get_inputs(self) -> list[Tensor]:
        """The public harness's inputs at paper size: CPU, from the global generator."""
        shape = self.shape("paper")
        return [torch.rand(shape["B"], shape["K"])]

    def model(
        self,
        size: str | Size = "laptop",
        *,
        seed: int = 0,
        device: str | torch.device = "cpu",
        mode: str = "eval",
    ) -> nn.Module:
        """The reference in eval or train mode, its parameters drawn on the CPU after `seed`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.Model(*self.init_args(size))
        return model.train(self.mode(mode) == "train").to(device)

    def mode(self, name: str) -> str:
        """The name. Raises KeyError naming the modes there are."""
        if name not in self.modes:
            raise KeyError(f"mode: got {name!r}; {self.slug} has {', '.join(self.modes)}")
        return name

    def drop_in(self, model: nn.Module) -> nn.Module:
        """ModelNew around the very submodules of `model`: their parameters stay shared."""
        new = copy.copy(model)
        new.__class__ = self.ModelNew
        return new

    def variant(self, name: str, device: str | None = None) -> Variant:
        """The variant of that key. Raises KeyError naming the variants there are."""
        there = [v for v in self.variants if device is None or device in v.devices]
        for variant in there:
            if variant.key == name:
                return variant
        known = ", ".join(v.key for v in there)
        raise KeyError(f"variant: got {name!r}; {self.slug} has {known}")

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{s.name}</td><td>{s.batch}</td><td>{s.init}</td></tr>"
            for s in self.sizes.values()
        )
        return (
            f"<p><b>{self.title}</b><br>{self.question}</p><table><thead><tr><th>size</th>"
            f"<th>batch B</th><th>arguments</th></tr></thead><tbody>{rows}</tbody></table>"
        )
