"""The variants that every chain has, rungs of its ladder from its op; which of them run here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from workbook import build, limits, ops, paths, recipe, split
from workbook.fold import refresh
from workbook.spec import Make, Predict, Problem, Variant

__all__ = [
    "bare",
    "chosen_variants",
    "kernels_digest",
    "library_of",
    "method_of",
    "rung",
    "rung_of_text",
    "standard",
    "that_run",
]


def _eager(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return model


def _compiled(model: nn.Module) -> Callable[[Tensor], Tensor]:
    on_gpu = next(model.parameters()).is_cuda
    return torch.compile(model, fullgraph=True, mode="max-autotune" if on_gpu else None)


def _algebra(op: ops.FusedOp) -> Make:
    def make(model: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: op.run_plain(x, *op.arguments(model), dtype=x.dtype)

    return make


def standard(
    op: ops.FusedOp,
    drop_in: Callable[[nn.Module], nn.Module],
    *,
    algebra: Make | None = None,
    others: Sequence[ops.FusedOp] = (),
) -> tuple[Variant, ...]:
    """eager, compile, algebra, fused, fused+fold; all but the last in TF32 too, on a GPU.

    algebra: where it is more than the op's `plain`, such as an op for each mode. others: ops that
    the drop-in calls beside, whose kernels count in its digest.
    """

    def folding(model: nn.Module) -> Callable[[Tensor], Tensor]:
        new = drop_in(copy.deepcopy(model))  # weights of its own: folds of others stay

        def run(x: Tensor) -> Tensor:
            refresh(new)
            return new(x)

        return run

    folder = paths.kernels() / op.slug
    kernels = [kernel for each in (op, *others) for kernel in each.kernels.values()]
    files = tuple(dict.fromkeys(f for kernel in kernels for f in _files(folder, kernel)))
    said = {
        "eager": ("the reference, as it is written", _eager),
        "compile": ("torch.compile of the reference, fullgraph", _compiled),
        "algebra": (
            "the same algebra in plain torch, weights folded once",
            algebra or _algebra(op),
        ),
    }
    baselines = [
        Variant(name, "torch", idea, make, reads="after" if name == "algebra" else "before")
        for name, (idea, make) in said.items()
    ]
    in_tf32 = [
        Variant(v.name, "torch", v.idea, v.make, ("cuda",), "tf32", reads=v.reads)
        for v in baselines
    ]
    chosen_tf32 = "ModelNew where the user has chosen TF32"
    ours = [
        Variant(
            "fused", "kernel", "ModelNew: the fold kept fresh, our kernel", drop_in, files=files
        ),
        Variant(
            "fused+fold",
            "kernel",
            "ModelNew, its weights just changed",
            folding,
            files=files,
            reads="fold",
        ),
        Variant("fused", "kernel", chosen_tf32, drop_in, ("cuda",), "tf32", files=files),
    ]
    return (*baselines, *in_tf32, *ours)


def _files(folder: Path, kernel: ops.Kernel) -> list[Path]:
    shared = [paths.kernels() / name for name in kernel.shared]
    return [*(folder / name for name in kernel.files), *shared]


def rung(
    op: ops.FusedOp,
    file: Path,
    idea: str,
    *,
    form: str = "",
    sample: int | None = None,
    shrink: int = 1,
    predict: Predict | None = None,
    wrong: str = "",
    modes: tuple[str, ...] = ("eval", "train"),
    beside: tuple[str, ...] = (),
    shared: tuple[str, ...] = (),
    name: str = "",
) -> Variant:
    """A kernel of the ladder from its file, .cu on a GPU, .cpp on a CPU; form: as the best one.

    beside: other files of its folder that it is built with, before its own. shared: files of other
    folders, "folder/file", for Hopper alone, of which the first is what the rung is about; name: of
    such a rung.
    """
    device = "cuda" if file.suffix == ".cu" else "cpu"
    called = op.forms[form or op.kernels[device].form]
    own = [*(file.parent / other for other in beside), file]
    others = [paths.kernels() / other for other in shared]
    portable = "portable" if device == "cuda" else "cpu"
    return Variant(
        name or file.stem,
        "hopper" if others else portable,
        idea,
        _make(op, device, own, called),
        (device,),
        source=others[0] if others else file,
        files=(*own, *others),
        wrong=wrong,
        flags=called.flags,
        folds=called.reads == "after" and op.fold is not None,
        reads=called.reads,
        modes=modes,
        sample=sample,
        shrink=shrink,
        predict=predict,
    )


def library_of(slug: str, variant: Variant, verbose: bool = False) -> build.Library:
    """The built library of a rung or of a control that has a source."""
    own = [file for file in variant.files if file.parent.name == slug]
    return ops.kernel_library(slug, variant.devices[0], own, flags=variant.flags, verbose=verbose)


def bare(op: ops.FusedOp, model: nn.Module, x: Tensor) -> Callable[[], object]:
    """Our kernel alone: the fold is there before, no module is around it.

    Raises RuntimeError where it can not be built.
    """
    given = op.arguments(model)
    place = op.place(x, *given)
    run, form = op.kernel(place), op.forms[op.kernels[place].form]
    if run is None:
        raise RuntimeError(f"{op.slug}: no kernel on {place}: {ops.missing(place)}")
    with torch.no_grad():
        folded = op.folded(op.dtype, *given, form=form)
    parameters, options = given[: op.parameters], given[op.parameters :]
    return lambda: form.call(run, x, parameters, folded, options)


def kernels_digest(slug: str, variant: Variant, device: str) -> str:
    """Of what a variant is compiled from on a device: files, their bindings, what they include.

    A record with another digest was measured with other sources; "" for plain torch.
    """
    suffix = ".cu" if device == "cuda" else ".cpp"
    files = [f for f in variant.files if f.suffix == suffix]
    if not files:
        return ""
    folders = dict.fromkeys([slug, *(f.parent.name for f in files)])
    files += [paths.kernels() / folder / "binding.cpp" for folder in folders]
    taken = recipe.read(files)
    searched = recipe.folders_of(files, [paths.kernels() / "common"])
    return recipe.digest([recipe.texts(taken), recipe.headers(taken, searched, ())])[:16]


def rung_of_text(op: ops.FusedOp, source: str, device: str, form: str = "") -> Variant:
    """A rung from the text of a kernel: what `wb.try_kernel` builds. form: as the best one.

    Raises KeyError naming the forms there are.
    """
    form = form or op.kernels[device].form
    if form not in op.forms:
        raise KeyError(f"form: got {form!r}; {op.slug} has {', '.join(op.forms)}")
    name = "tried.cu" if device == "cuda" else "tried.cpp"
    make = _make(op, device, {name: source}, op.forms[form])
    implementation = "portable" if device == "cuda" else "cpu"
    return Variant("tried", implementation, "a kernel from a string", make, (device,))


def _make(
    op: ops.FusedOp, device: str, sources: list[Path] | Mapping[str, str], form: ops.Form
) -> Make:
    def make(model: nn.Module) -> Callable[[Tensor], Tensor]:
        library = ops.kernel_library(op.slug, device, sources, flags=form.flags)
        run = library.op("run").default

        def call(x: Tensor) -> Tensor:
            with torch.no_grad():
                return op.run_kernel(run, form, x, *op.arguments(model))

        return call

    return make


# --- which of them run, and how they multiply -------------------------------------------------


def chosen_variants(
    p: Problem, names: Sequence[str | Variant] | None, device: str, mode: str = "eval"
) -> list[Variant]:
    """Those of the names, or every one that runs on the device in that mode and is no control."""
    if names is not None and not names:
        raise ValueError("variants: got none, wants keys of variants, or None for all")
    if names is not None:
        return [v if isinstance(v, Variant) else p.variant(v, device) for v in names]
    return [v for v in that_run(p, device) if mode in v.modes and not v.is_control]


def that_run(p: Problem, device: str) -> list[Variant]:
    """The variants of a device, but for rungs of another GPU than the one here."""
    there = [v for v in p.variants if device in v.devices]
    return [v for v in there if v.implementation != "hopper" or split.is_here(device)]


def method_of(
    p: Problem, v: Variant, shape: Mapping[str, int], device: str | torch.device, mode: str,
    reach: limits.Ceilings,
) -> str:  # fmt: skip
    """fp16x3 or, in TF32, fp16x1 or tf32 where a variant's product is ours at a shape, else ""."""
    left = p.multiplied(mode, v.route, shape)
    ours = v.implementation in ("kernel", "hopper") and left is not None
    if not ours or torch.device(device).type != "cuda" or not reach.half_tflops:
        return ""
    x = torch.empty((), device=device).expand(shape["B"], shape["K"])  # only asked what it is
    wanted = left.outputs, v.route, left.whole, p.through
    if v.implementation != "hopper" and not split.suits(x, *wanted):
        return ""
    return split.method(split.our_way(x, *wanted), v.route)
