"""A built kernel as a torch op: folding, choosing the kernel, gradients, the way back.

The op takes (x, *parameters) and looks the fold up *inside*, where torch.compile does not trace:
a compiled model sees changed weights. The backward is the reference's own vjp, recomputed.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

from workbook import build, paths, toolchain
from workbook.fold import FoldCache

__all__ = ["FusedOp", "built", "column_sum", "explain", "operands", "kernel_library", "missing"]

NAMESPACE = "workbook"
# What a type is computed in where it has no kernel: no library promises how it adds.
_WIDER = {
    torch.float64: torch.float64,
    torch.float32: torch.float64,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}
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
    """The library of a problem's binding and one kernel: sources for `device` (cpu or cuda)."""
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
        cuda=device == "cuda",
        flags=flags,
        verbose=verbose,
    )


def missing(device: str) -> str:
    """What a build for this device lacks, in a line with the remedy; empty if nothing."""
    with _Noted(build.CompilerMissing) as noted:
        toolchain.compiler()
        toolchain.ninja_folder()
        if device == "cuda":
            toolchain.nvcc()
    return noted.text


def built(name: str, device: str, files: Sequence[str]) -> Callable | None:
    """The op "run" of kernels/<name>/ with these files; None, and a warning, without a compiler."""
    with _Noted(build.CompilerMissing) as noted:
        sources = [paths.kernels() / name / file for file in files]
        return kernel_library(name, device, sources).op("run").default
    warnings.warn(f"{name} runs as plain torch on {device}: {noted.text}", stacklevel=2)
    return None


@functools.cache
def _column_sum(device: str) -> Callable | None:
    return built("column_sum", device, ["column_sum.cu" if device == "cuda" else "column_sum.cpp"])


SLICES = 16  # of the rows, on a GPU: 8192 columns alone are 64 blocks, for 132 multiprocessors


def column_sum(weight: Tensor) -> Tensor:
    """weight (N, K) -> (K,) in float64, its sum over rows, added in float64 in a fixed order.

    A float32 running sum loses digits with each row; float64 also can't overflow.
    """
    usable = weight.dtype == torch.float32 and weight.is_contiguous()
    run = _column_sum(weight.device.type) if usable else None
    if run is None:
        return weight.sum(0, dtype=torch.float64)
    columns = weight.size(1)
    total = weight.new_empty(columns, dtype=torch.float64)
    partial = weight.new_empty((SLICES if weight.is_cuda else 0, columns), dtype=torch.float64)
    run(weight, partial, total)
    return total


class FusedOp:
    """torch.ops.workbook.<slug>(x, *parameters) -> y.

    fold(dtype, *parameters) -> derived weights in that dtype, the work of once.
    plain(x, *folded) -> y: the algebra in torch; serves dtypes and devices without a kernel.
    reference(x, *parameters) -> y: differentiable, the original chain.
    output(x, *parameters) -> an empty y. kernels: device -> the kernel's sources.
    """

    def __init__(
        self,
        slug: str,
        schema: str,
        *,
        fold: Callable[..., tuple[Tensor, ...]],
        plain: Callable[..., Tensor],
        reference: Callable[..., Tensor],
        output: Callable[..., Tensor],
        kernels: Mapping[str, Sequence[str]],
    ) -> None:
        self.slug, self.fold, self.plain = slug, fold, plain
        self.reference, self.output, self.kernels = reference, output, kernels
        self.folds = FoldCache()
        self._runs: dict[str, Callable | None] = {}
        _library.define(f"{slug}{schema}", tags=_TAGS)
        name = f"{NAMESPACE}::{slug}"
        for key in ("CPU", "CUDA"):
            _library.impl(slug, self._forward, key)
        torch.library.register_fake(name, output, lib=_library)
        torch.library.register_autograd(
            name, self._backward, setup_context=_save_inputs, lib=_library
        )
        self.op = getattr(getattr(torch.ops, NAMESPACE), slug).default
        self._with_gradients = self._function().apply

    def __call__(self, x: Tensor, *parameters: Tensor) -> Tensor:
        """The op; in plain eager mode its parts directly, at half of the dispatcher's host time."""
        if _is_watched():
            return self.op(x, *parameters)
        if torch.is_grad_enabled():
            for tensor in (*parameters, x):
                if tensor.requires_grad:
                    return self._with_gradients(x, *parameters)
        return self._forward(x, *parameters)

    def _function(self) -> type[torch.autograd.Function]:
        forward, backward = self._forward, self._backward

        class Eager(torch.autograd.Function):
            @staticmethod
            def forward(ctx: object, *inputs: Tensor) -> Tensor:
                ctx.save_for_backward(*inputs)
                return forward(*inputs)

            @staticmethod
            def backward(ctx: object, grad: Tensor) -> tuple:
                return backward(ctx, grad)

        return Eager

    def folded(self, dtype: torch.dtype, *parameters: Tensor) -> tuple[Tensor, ...]:
        """The derived weights, fresh."""
        return self.folds.get(dtype, parameters, lambda: self.fold(dtype, *parameters))

    def run_plain(self, x: Tensor, *parameters: Tensor, dtype: torch.dtype) -> Tensor:
        """The algebra in torch, computed in `dtype`, returned in that of x."""
        return self.plain(x.to(dtype), *self.folded(dtype, *parameters)).to(x.dtype)

    def run_kernel(self, run: Callable, x: Tensor, *parameters: Tensor) -> Tensor:
        """A kernel of the problem's binding on float32 x (B, K); folds are in double."""
        folded = self.folded(torch.float64, *parameters)
        y = self.output(x, *parameters)
        if x.stride()[-1] != 1 and x.size(-1) > 1:
            x = x.contiguous()
        run(x, *parameters, *folded, y)
        return y

    def kernel(self, device: str) -> Callable | None:
        """The best kernel for cpu or cuda, built when first asked for; None without a compiler."""
        if device not in self._runs:
            self._runs[device] = built(self.slug, device, self.kernels[device])
        return self._runs[device]

    def _forward(self, x: Tensor, *parameters: Tensor) -> Tensor:
        """The kernel for float32, where there is one; the algebra in torch else."""
        if x.dtype is torch.float32:
            run = self.kernel("cuda" if x.is_cuda else "cpu")
            if run is not None:
                return self.run_kernel(run, x, *parameters)
        return self.run_plain(x, *parameters, dtype=_WIDER[x.dtype])

    def _backward(self, ctx: object, grad: Tensor) -> tuple:
        """The vjp of the reference; differentiable again under create_graph."""
        twice = torch.is_grad_enabled()
        needed = ctx.needs_input_grad
        tensors = ctx.saved_tensors
        if not twice:
            tensors = tuple(
                t.detach().requires_grad_(n) for t, n in zip(tensors, needed, strict=True)
            )
        with torch.enable_grad():
            if twice:  # tensors of their own: one may depend on another, or be it
                tensors = tuple(t.view_as(t) for t in tensors)
            with torch.autocast(grad.device.type, enabled=False):  # as the forward ran
                y = self.reference(*tensors)
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


def _save_inputs(ctx: object, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _is_watched() -> bool:
    """True where something looks at each op: a compiler, an exporter, a tracer, a torch mode."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._get_tracing_state() is not None
    )


def operands(x: Tensor, linear: nn.Module) -> tuple[Tensor, ...] | None:
    """(x, weight, bias) where the op stands for the chain; None: the reference's forward runs.

    Normal: a plain nn.Linear with a bias, its own hooks empty, x a strided 2-D tensor of a real
    floating type, all of one dtype and device, no autocast, no functorch transform, no dual.
    """
    if type(linear) is not nn.Linear or not isinstance(x, Tensor) or x.dim() != 2:
        return None
    held = linear._parameters  # the attributes themselves take nn.Module's long way
    weight, bias = held.get("weight"), held.get("bias")
    if weight is None or bias is None or not x.dtype == weight.dtype == bias.dtype:
        return None
    device, shape = x.device, weight.shape
    normal = (
        x.dtype in _WIDER
        and device.type in ("cpu", "cuda")
        and device == weight.device == bias.device
        and len(shape) == 2
        and x.size(1) == shape[1]
        and bias.dim() == 1
        and bias.size(0) == shape[0]
        and x.layout is weight.layout is torch.strided
        and not _has_hooks(linear)
        and not torch.is_autocast_enabled(device.type)
        and not torch._C._are_functorch_transforms_active()
        and (torch.compiler.is_compiling() or _is_eager(x, weight, bias))
    )
    return (x, weight, bias) if normal else None


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__  # somebody put another one on the object itself
        or _has_any_global_hook()
    )


_PLAIN = frozenset((Tensor, nn.Parameter))


def _is_eager(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """No forward-mode level, no tensor subclass with its own dispatch."""
    return (
        forward_ad._current_level < 0
        and type(x) in _PLAIN
        and type(weight) in _PLAIN
        and type(bias) in _PLAIN
    )


def explain(x: object, linear: nn.Module) -> None:
    """Raise what torch would raise on such an x, in words that name the argument.

    Silent where the reference may still accept x: it then decides.
    """
    if type(linear) is not nn.Linear or type(x) is not Tensor or x.dim() == 0:
        return
    weight = linear.weight
    name = "weight (out_features, in_features)"
    if x.size(-1) != weight.size(-1):
        raise RuntimeError(
            f"x: got shape {tuple(x.shape)}, wants (batch, in_features={weight.size(-1)}): the "
            f"last dimension must match {name} = {tuple(weight.shape)}"
        )
    if x.device != weight.device:
        raise RuntimeError(
            f"x: got device {x.device}, wants {weight.device}, where weight is: move one with .to()"
        )
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise RuntimeError(
            f"x: got dtype {x.dtype}, wants {weight.dtype}, the weight's: convert one with .to()"
        )
