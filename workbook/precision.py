"""The user's switch between float32 and TF32 matrix products."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["ROUTES", "using_route"]

ROUTES = {"float32": "ieee", "tf32": "tf32"}  # our name -> torch.backends' name


@contextlib.contextmanager
def using_route(route: str) -> Iterator[None]:
    """Matrix products of float32 on a GPU run by this route within the block; a CPU has one.

    Sets torch.backends.cuda.matmul.fp32_precision, the newer of torch's two switches, and puts
    back what was there. Raises ValueError for a route that does not exist.
    """
    if route not in ROUTES:
        raise ValueError(f"route: got {route!r}, wants one of {', '.join(ROUTES)}")
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    switch.fp32_precision = ROUTES[route]
    try:
        yield
    finally:
        switch.fp32_precision = before
