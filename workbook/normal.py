"""The normal case: where a chain's op stands for its reference, and what is said of a wrong x."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

__all__ = ["FLOATS", "are_like", "explain", "is_plain", "is_usual", "operands", "sizes"]

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def is_plain(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """A module of that very class, with no hooks and no forward of its own."""
    return type(module) is kind and not _has_hooks(module)


def operands(x: Tensor, linear: nn.Module) -> tuple[Tensor, ...] | None:
    """(x, weight, bias) where the op stands for the chain; None: the reference's forward runs.

    Normal: a plain nn.Linear with a bias, its own hooks empty, x a strided 2-D tensor of a real
    floating type, all of one dtype and device, no autocast, no functorch transform, no dual.
    """
    if not isinstance(x, Tensor) or x.dim() != 2 or not is_plain(linear, nn.Linear):
        return None
    held = linear._parameters  # the attributes themselves take nn.Module's long way
    weight, bias = held.get("weight"), held.get("bias")
    if weight is None or bias is None:
        return None
    device, dtype, shape, on_gpu = x.device, x.dtype, weight.shape, x.is_cuda
    normal = (
        dtype in FLOATS
        and dtype == weight.dtype == bias.dtype
        and (on_gpu or x.is_cpu)  # device.type makes a string each time
        and device == weight.device == bias.device
        and len(shape) == 2
        and x.shape[1] == shape[1]
        and bias.shape == shape[:1]
        and x.layout is weight.layout is torch.strided
        and not torch.is_autocast_enabled("cuda" if on_gpu else "cpu")
        and not torch._C._are_functorch_transforms_active()
        and (torch.compiler.is_compiling() or _is_eager(x, weight, bias))
    )
    return (x, weight, bias) if normal else None


def sizes(x: object, linear: nn.Module) -> tuple[int, int, int] | None:
    """(B, K, N) of x (B, K) and an nn.Linear whose weight (N, K) it fits, whatever else they are;
    None where it does not."""
    weight = linear._parameters.get("weight") if type(linear) is nn.Linear else None
    if not isinstance(x, Tensor) or weight is None or x.is_nested:
        return None
    if x.dim() != 2 or weight.dim() != 2:
        return None
    (B, K), N = x.shape, weight.size(0)
    fits = K == weight.size(1) and x.dtype == weight.dtype and x.device == weight.device
    return (B, K, N) if fits else None


def are_like(x: Tensor, *tensors: Tensor | None) -> bool:
    """Tensors that a chain takes beside the Linear's: there, of x's type, device and layout."""
    for tensor in tensors:
        if tensor is None or tensor.dtype != x.dtype or tensor.device != x.device:
            return False
        if tensor.layout is not torch.strided:
            return False
        if not torch.compiler.is_compiling() and type(tensor) not in _PLAIN:
            return False
    return True


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


def is_usual(grad: Tensor) -> bool:
    """A gradient on its plain way back: no gradients of gradients, no forward-mode level, no batch
    of gradients, and no autocast, in which the reference's own products lose digits."""
    return not (
        torch.is_grad_enabled()
        or torch.is_autocast_enabled(grad.device.type)
        or forward_ad._current_level >= 0
        or torch._C._functorch.is_functorch_wrapped_tensor(grad)
        or torch._C._functorch.is_legacy_batchedtensor(grad)
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
