"""What the tests of the sum chain share: twins of a model, a float64 oracle, the assertions.

Nothing here calls the code under test to decide what is right.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import workbook as wb
from workbook import tools

PROBLEM = wb.problem("matmul_sum_max_mean_logsumexp")
Model, ModelNew = PROBLEM.Model, PROBLEM.ModelNew
LEAST = 2e-7  # the relative error that is allowed whatever eager's own is
ROUNDING = {torch.float64: 1e-12, torch.float32: LEAST, torch.float16: 1e-3, torch.bfloat16: 8e-3}

needs_compiler = pytest.mark.skipif(tools.compiler() is None, reason="no C++ compiler here")
needs_nvcc = pytest.mark.skipif(tools.nvcc() is None, reason="no nvcc here")
needs_inductor = pytest.mark.skipif(
    " " in torch.__path__[0], reason="torch.compile can't build below a path with a space"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


def drawn(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values from a generator of their own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def twins(
    K: int, N: int, *, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[nn.Module, nn.Module]:
    """The reference and the drop-in, with equal parameters that share no memory."""
    torch.manual_seed(seed)
    new = ModelNew(K, N).to(device, dtype)
    return reference_of(new), new


def reference_of(new: nn.Module) -> nn.Module:
    """A reference with the parameters that `new` has now, in memory of its own."""
    weight = new.linear.weight
    reference = Model(weight.size(1), weight.size(0)).to(weight.device, weight.dtype)
    reference.load_state_dict(new.state_dict())
    return reference


def truth(model: nn.Module, x: Tensor) -> Tensor:
    """y (B, 1) in float64 from the definition: every product z[i, n], their sum, the biases' sum.

    The biases by themselves: where huge z cancel they are what is left.
    """
    with torch.no_grad():
        z = x.double() @ model.linear.weight.double().T
        return z.sum(1, keepdim=True) + model.linear.bias.double().sum()


def errors(y: Tensor, true: Tensor) -> tuple[float, float]:
    """Relative error of the whole, in the 2-norm, and of the worst row; 0/0 is no error."""
    difference, size = (y.double() - true).abs(), true.abs()
    whole = difference.norm() / size.norm()
    rows = torch.where(difference == 0, 0.0, difference / size)
    return (whole if difference.any() else difference.sum()).item(), rows.max().item()


def assert_accurate(y: Tensor, eager: Tensor, true: Tensor) -> None:
    """At most twice eager's own error, or what one rounding of the type costs: whole and rows."""
    assert y.shape == eager.shape and y.dtype == eager.dtype and y.device == eager.device
    rows = torch.isfinite(eager).flatten()
    assert torch.isfinite(y.flatten()[rows]).all(), "a row that eager has finite is not"
    if not rows.any():
        return
    least = ROUNDING[y.dtype]
    ours, theirs = errors(y[rows], true[rows]), errors(eager[rows], true[rows])
    for name, got, own in zip(("whole", "worst row"), ours, theirs, strict=True):
        assert got <= max(2 * own, least), f"{name}: error {got:.3g}, eager's own {own:.3g}"


def assert_fresh(new: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> None:
    """`new` computes with the weights that `model` has at this moment."""
    reference = reference_of(model)
    with torch.no_grad():
        assert_accurate(new(x), reference(x), truth(reference, x))


def outcome(function: Callable[[], Tensor]) -> tuple[Tensor | None, type | None, str]:
    """(value, None, "") or (None, class of the exception, its text)."""
    try:
        return function(), None, ""
    except Exception as error:
        return None, type(error), str(error)


def assert_like(reference: Callable, new: Callable, x: object) -> str:
    """The same value, or an exception of the same class; its text is returned."""
    wanted, wanted_error, _ = outcome(lambda: reference(x))
    got, error, text = outcome(lambda: new(x))
    assert error is wanted_error, f"{error} instead of {wanted_error}: {text}"
    if wanted is None:
        return text
    assert got.shape == wanted.shape and got.dtype == wanted.dtype and got.device == wanted.device
    assert got.requires_grad == wanted.requires_grad and got.stride() == wanted.stride()
    if isinstance(x, Tensor) and x.dim() == 2 and x.layout is torch.strided:
        assert_accurate(got.detach(), wanted.detach(), truth(reference, x))
    else:
        torch.testing.assert_close(got, wanted)
    return ""
