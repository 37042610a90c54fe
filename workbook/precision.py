"""The user's switch between float32 and TF32 matrix products."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["ROUTES", "using_route"]

ROUTES = {"float32": "highest", "tf32": "high"}  # our name -> torch's older switch


@contextlib.contextmanager
def using_route(route: str) -> Iterator[None]:
    """Matrix products of float32 on a GPU run by this route within the block; a CPU has one.

    Sets torch's older switch: with the newer one at "tf32" the older can not be read, and
    torch.compile reads it. Puts back what was there. ValueError for an unknown route.
    """
    if route not in ROUTES:
        raise ValueError(f"route: got {route!r}, wants one of {', '.join(ROUTES)}")
    newer = torch.backends.cuda.matmul
    before = newer.fp32_precision
    torch.set_float32_matmul_precision(ROUTES[route])
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        newer.fp32_precision = before
