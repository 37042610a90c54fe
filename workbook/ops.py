"""A built kernel as a torch op: folding, choosing the kernel, gradients, the way back.

The op takes (x, *parameters, *options) and looks the fold up *inside*, where torch.compile does
not trace: a compiled model sees changed weights. The backward is the reference's own vjp, or a
chain's closed form of it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from workbook import build, normal, paths, recipe, toolchain
from workbook.fold import FoldCache

__all__ = ["COMPUTES", "Form", "FusedOp", "Kernel", "adjacent", "beside", "built", "is_watched",
           "kernel_library", "kind_of", "missing"]  # fmt: skip

NAMESPACE = "workbook"
COMPUTES = {  # a type -> what it is computed in where it has no kernel
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}
ARCHITECTURE = {"hopper": (toolchain.gencode("90a"),)}  # flags of nvcc for a kind of device
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_TAGS = [torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else []


def kernel_library(
    slug: str,
    device: str,
    sources: Sequence[Path] | Mapping[str, str],
    *,
    flags: Sequence[str] = (),
    verbose: bool = False,
) -> build.Library:
    """The library of a problem's binding and one kernel, for `device`: cpu, cuda, or hopper, which
    is cuda with the instructions of that architecture alone."""
    folder = paths.kernels() / slug
    binding = folder / "binding.cpp"
    if isinstance(sources, Mapping):
        sources = {binding.name: binding.read_text(encoding="utf-8"), **sources}
    else:
        sources = [binding, *sources]
    return build.load(
        f"{slug}_{device}",
        sources,
        include=[folder, paths.kernels() / "common"],
        cuda=device != "cpu",
        flags=flags,
        cuda_flags=ARCHITECTURE.get(device, ()),
        verbose=verbose,
    )


def kind_of(file: Path) -> str:
    """What a kernel's file is built for: cpu, cuda, or hopper, where it includes hopper.cuh."""
    if file.suffix != ".cu":
        return "cpu"
    folders = recipe.folders_of([file], [paths.kernels() / "common"])
    asked = dict(recipe.headers(recipe.read([file]), folders, ()))
    return "hopper" if "hopper.cuh" in asked else "cuda"


def missing(device: str) -> str:
    """What a build for this device lacks, in a line with the remedy; empty if nothing."""
    with _Noted(build.CompilerMissing) as noted:
        toolchain.compiler()
        toolchain.ninja_folder()
        if device != "cpu":
            toolchain.nvcc()
    return noted.text


def built(
    name: str, device: str, files: Sequence[str], flags: Sequence[str] = ()
) -> Callable | None:
    """The op "run" of kernels/<name>/ with these files; None, and a warning, without a compiler."""
    with _Noted(build.CompilerMissing) as noted:
        sources = [paths.kernels() / name / file for file in files]
        return kernel_library(name, device, sources, flags=flags).op("run").default
    warnings.warn(f"{name} runs as plain torch on {device}: {noted.text}", stacklevel=2)
    return None


def adjacent(x: Tensor) -> Tensor:
    """x (B, K) itself where the features of a row are adjacent in memory, else a copy."""
    return x.contiguous() if x.stride()[1] != 1 and x.shape[1] > 1 else x


def beside(run: Callable, name: str) -> Callable:
    """Another op of the library that `run` is of."""
    return getattr(getattr(torch.ops, run.namespace), name).default


@dataclass(frozen=True)
class Form:
    """How kernels of one form are called: what the op "run" gets, what torch does around it.

    call(run, x, parameters, folded, options) -> y, on float32 x (B, K) of any stride; it allocates
    y. flags: the form's macros, for binding and kernel. reads: "before" where it takes the
    parameters as they are (folded is then empty), "after" where it takes the folded ones.
    keeps: call also takes `kept`, a list to add to what a vjp wants, None where there is none.
    fold: instead of the op's. suits(x, *parameters, *options): where a form for hopper is taken.
    """

    call: Callable[..., object]
    flags: tuple[str, ...] = ()
    reads: str = "after"
    fold: Callable[..., tuple[Tensor, ...]] | None = None
    suits: Callable[..., bool] | None = None
    keeps: bool = False


@dataclass(frozen=True)
class Kernel:
    """A kernel of kernels/<slug>/: its files, and the form they are called in.

    shared: files of other folders, "folder/file", that the form calls beside.
    """

    form: str
    files: tuple[str, ...]
    shared: tuple[str, ...] = ()


class FusedOp:
    """torch.ops.workbook.<name>(x, *parameters, *options) -> y: tensors first, then plain numbers.

    fold(dtype, *parameters, *options) -> derived weights, the work of once; None: nothing is.
    whole: how many of the first parameters it does not take; fold_options: how many of the options
    it takes, all if not given.
    plain(x, *whole, *folded, *options) -> y: the algebra in torch, also where there is no kernel.
    reference(x, *parameters, *options) -> y: differentiable, the original chain.
    output(x, *parameters, *options) -> an empty y. arguments(model) -> (*parameters, *options).
    forms: by name; kernels: the best one for cpu, cuda and, where its form suits, hopper.
    dtype: what kernels want folds in.
    computes: dtype of x -> what `plain` computes it in; the reference runs where there is none.
    vjp(grad, kept, needed, x, *parameters, *options) -> gradients of x and the parameters, None
    where not `needed`: instead of running the reference again, but for gradients of gradients and
    other rare ways back, or where it returns None. kept: what a form that `keeps` has added, else
    (); (y,) for a vjp that `reads_y`, which can then not be edited in place.

    An op may give further outputs beside y (plain, a form's call and output then return tuples):
    statistics, without gradients.
    """

    def __init__(
        self,
        slug: str,
        schema: str,
        *,
        fold: Callable[..., tuple[Tensor, ...]] | None,
        plain: Callable[..., object],
        reference: Callable[..., Tensor],
        output: Callable[..., object],
        arguments: Callable[[object], tuple],
        forms: Mapping[str, Form],
        kernels: Mapping[str, Kernel],
        name: str = "",
        whole: int = 0,
        dtype: torch.dtype = torch.float32,
        computes: Mapping[torch.dtype, torch.dtype] = COMPUTES,
        fold_options: int | None = None,
        vjp: Callable[..., tuple[Tensor | None, ...] | None] | None = None,
        reads_y: bool = False,
    ) -> None:
        self.slug, self.fold, self.plain = slug, fold, plain
        self.fold_options, self.vjp, self.reads_y = fold_options, vjp, reads_y
        self.reference, self.output, self.arguments = reference, output, arguments
        self.forms, self.kernels = forms, kernels
        self.whole, self.dtype, self.computes = whole, dtype, computes
        self.parameters = schema.partition("->")[0].count("Tensor ") - 1
        self.folds = FoldCache()
        self._runs: dict[str, Callable | None] = {}
        self.op = self._registered(name or slug, schema)
        # Function.apply itself looks for functorch's wrappers, of which `normal` lets none in.
        self._with_gradients = super(torch.autograd.Function, self._function()).apply

    def _registered(self, name: str, schema: str) -> Callable:
        _library.define(f"{name}{schema}", tags=_TAGS)
        full = f"{NAMESPACE}::{name}"
        for key in ("CPU", "CUDA"):
            _library.impl(name, self._forward, key)
        torch.library.register_fake(full, self.output, lib=_library)
        torch.library.register_autograd(
            full, self._backward, setup_context=self._save, lib=_library
        )
        return getattr(getattr(torch.ops, NAMESPACE), name).default

    def __call__(self, x: Tensor, *arguments: object) -> object:
        """The op; in plain eager mode its parts directly, at half of the dispatcher's host time."""
        if is_watched():
            return self.op(x, *arguments)
        if torch.is_grad_enabled():
            for tensor in (*arguments[: self.parameters], x):
                if tensor.requires_grad:
                    return self._with_gradients(x, *arguments)
        return self._forward(x, *arguments)

    def _save(
        self, ctx: object, inputs: tuple, output: object, kept: Sequence[Tensor] = ()
    ) -> None:
        saved = inputs[: self.parameters + 1]
        ctx.save_for_backward(*saved, *([output] if self.reads_y else kept))
        ctx.options = inputs[self.parameters + 1 :]
        if isinstance(output, tuple):
            ctx.mark_non_differentiable(*output[1:])

    def _function(self) -> type[torch.autograd.Function]:
        forward, back, save = self._forward, self._backward, self._save

        class Eager(torch.autograd.Function):
            @staticmethod
            def forward(ctx: object, *inputs: object) -> object:
                kept = []
                output = forward(*inputs, kept=kept)
                save(ctx, inputs, output, kept)
                return output

            @staticmethod
            def backward(ctx: object, *grads: Tensor) -> tuple:
                return back(ctx, *grads)

        return Eager

    def folded(
        self, dtype: torch.dtype, *arguments: object, form: Form | None = None
    ) -> tuple[Tensor, ...]:
        """The derived weights, fresh; those of a form where it has its own."""
        fold = self.fold if form is None or form.fold is None else form.fold
        if fold is None:
            return ()
        tensors = arguments[self.whole : self.parameters]
        options = arguments[self.parameters :][: self.fold_options]
        made = functools.partial(fold, dtype, *tensors, *options)
        return self.folds.get((fold, dtype, *options), tensors, made)

    def run_plain(self, x: Tensor, *arguments: object, dtype: torch.dtype) -> object:
        """The algebra in torch, computed in `dtype`, returned in that of x."""
        whole, options = arguments[: self.whole], arguments[self.parameters :]
        whole = (t.to(dtype) for t in whole)
        found = self.plain(x.to(dtype), *whole, *self.folded(dtype, *arguments), *options)
        if isinstance(found, tuple):
            return tuple(t.to(x.dtype) for t in found)
        return found.to(x.dtype)

    def run_kernel(
        self, run: Callable, form: Form, x: Tensor, *arguments: object, kept: list | None = None
    ) -> object:
        """A kernel of the problem's binding on float32 x (B, K)."""
        before = form.reads == "before"
        folded = () if before else self.folded(self.dtype, *arguments, form=form)
        split = self.parameters
        more = {"kept": kept} if form.keeps else {}
        return form.call(run, x, arguments[:split], folded, arguments[split:], **more)

    def place(self, x: Tensor, *arguments: object) -> str:
        """Whose kernel x takes: cpu, cuda or hopper."""
        if not x.is_cuda:
            return "cpu"
        best = self.kernels.get("hopper")
        return "hopper" if best and self.forms[best.form].suits(x, *arguments) else "cuda"

    def kernel(self, place: str) -> Callable | None:
        """The best kernel for a place, built when first asked for; None without a compiler."""
        if place not in self._runs:
            best = self.kernels[place]
            device, flags = "cpu" if place == "cpu" else "cuda", self.forms[best.form].flags
            self._runs[place] = built(self.slug, device, best.files, flags)
        return self._runs[place]

    def _forward(self, x: Tensor, *arguments: object, kept: list | None = None) -> object:
        """The kernel for float32 where there is one, else the algebra in torch or the reference."""
        if x.dtype is torch.float32:
            place = self.place(x, *arguments)
            run = self.kernel(place)
            if run is not None:
                form = self.forms[self.kernels[place].form]
                return self.run_kernel(run, form, x, *arguments, kept=kept)
        if x.dtype not in self.computes:
            return self.reference(x, *arguments)
        return self.run_plain(x, *arguments, dtype=self.computes[x.dtype])

    def _backward(self, ctx: object, grad: Tensor, *_: Tensor) -> tuple:
        """The vjp of the reference; differentiable again under create_graph."""
        saved = ctx.saved_tensors  # once: checkpointing unpacks no second time
        tensors = saved[: self.parameters + 1]
        needed = ctx.needs_input_grad[: len(tensors)]
        kept, found = saved[len(tensors) :], None
        if self.vjp and normal.is_usual(grad):
            found = self.vjp(grad, kept, needed, *tensors, *ctx.options)
        if found is None:
            found = self._vjp_of_reference(grad, needed, tensors, ctx.options)
        return (*found, *(None for _ in ctx.options))

    def _vjp_of_reference(
        self, grad: Tensor, needed: Sequence[bool], tensors: Sequence[Tensor], options: tuple
    ) -> tuple[Tensor | None, ...]:
        """The chain runs once more, its activations kept until it has run backward."""
        twice = torch.is_grad_enabled()
        if not twice:
            tensors = [t.detach().requires_grad_(n) for t, n in zip(tensors, needed, strict=True)]
        with torch.enable_grad():
            if twice:  # tensors of their own: one may depend on another, or be it
                tensors = [t.view_as(t) for t in tensors]
            with torch.autocast(grad.device.type, enabled=False):  # as the forward ran
                y = self.reference(*tensors, *options)
            wanted = [t for t, n in zip(tensors, needed, strict=True) if n]
            grads = iter(torch.autograd.grad(y, wanted, grad, create_graph=twice))
        return tuple(next(grads) if n else None for n in needed)


class _Noted:
    """A block that may end in one kind of error, whose text is kept."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind, self.text = kind, ""

    def __enter__(self) -> _Noted:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> bool:
        self.text = str(error or "")
        return isinstance(error, self.kind)


def is_watched() -> bool:
    """True where something looks at each op: a compiler, an exporter, a tracer, a torch mode."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._get_tracing_state() is not None
    )
