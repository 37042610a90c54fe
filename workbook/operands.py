"""Families of factors of a product, x (B, K) and weight (N, K): what may trouble a way to multiply.

Each makes them from (B, K, N, generator), on the CPU: the same numbers on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Generator, Tensor

__all__ = ["FAMILIES"]

Family = Callable[[int, int, int, Generator], tuple[Tensor, Tensor]]
FAR = 2.0**30  # beyond the 2^16 within which a split into halves loses nothing


def _weight(n: int, k: int, g: Generator) -> Tensor:
    """As torch initialises a Linear's."""
    return (2 * torch.rand(n, k, generator=g) - 1) / k**0.5


def _powers(count: int, g: Generator) -> Tensor:
    """2^-20 ... 2^20."""
    return torch.exp2(torch.randint(-20, 21, (count,), generator=g).float())


def _of_x(draw: Callable[[int, int, Generator], Tensor]) -> Family:
    return lambda b, k, n, g: (draw(b, k, g), _weight(n, k, g))


def _rows(b: int, k: int, n: int, g: Generator) -> tuple[Tensor, Tensor]:
    x, weight = torch.randn(b, k, generator=g), _weight(n, k, g)
    return x * _powers(b, g).unsqueeze(1), weight * _powers(n, g).unsqueeze(1)


def _columns(b: int, k: int, n: int, g: Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(b, k, generator=g) * _powers(k, g), _weight(n, k, g)


def _against(b: int, k: int, n: int, g: Generator) -> tuple[Tensor, Tensor]:
    """Each product is of ordinary size, its factors are not: one exponent a row fits neither."""
    s = _powers(k, g)
    return torch.randn(b, k, generator=g) * s, _weight(n, k, g) / s


def _small_alone(b: int, k: int, n: int, g: Generator) -> tuple[Tensor, Tensor]:
    """Every other output sees the small half of the inputs only: small beside its neighbours."""
    x, weight = torch.randn(b, k, generator=g), _weight(n, k, g)
    x[:, 1::2] /= FAR
    weight[1::2, 0::2] = 0
    return x, weight


def _one_weight(b: int, k: int, n: int, g: Generator) -> tuple[Tensor, Tensor]:
    """The first weight is very large: its output is too, and its column's exponent."""
    x, weight = torch.randn(b, k, generator=g), _weight(n, k, g)
    weight[0, 0] *= FAR
    return x, weight


FAMILIES: Mapping[str, Family] = {
    "uniform": _of_x(lambda b, k, g: torch.rand(b, k, generator=g)),
    "normal": _of_x(lambda b, k, g: torch.randn(b, k, generator=g)),
    "mean 1000": _of_x(lambda b, k, g: torch.randn(b, k, generator=g) + 1000.0),
    "log-normal": _of_x(lambda b, k, g: torch.exp(3.0 * torch.randn(b, k, generator=g))),
    "Cauchy": _of_x(lambda b, k, g: torch.empty(b, k).cauchy_(generator=g)),
    "scaled rows": _rows,
    "scaled columns": _columns,
    "columns against each other": _against,
    "outputs of small inputs": _small_alone,
    "one large weight": _one_weight,
}
