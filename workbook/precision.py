"""Switches of torch that are set for a block and put back: the route of products, poison."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch

__all__ = ["ROUTES", "chosen_route", "poisoned", "using_route"]

ROUTES = {"float32": "highest", "tf32": "high"}  # our name -> torch's older switch


@contextlib.contextmanager
def using_route(route: str) -> Iterator[None]:
    """Matrix products of float32 on a GPU run by this route within the block; a CPU has one.

    Leaves the switches alone where they mean float32 and that is wanted: a user's own choice among
    its spellings stays. Else it sets torch's older switch: with the newer at "tf32" the older can
    not be read, and torch.compile reads it. Puts back what was there. ValueError for an unknown
    route.
    """
    if route not in ROUTES:
        raise ValueError(f"route: got {route!r}, wants one of {', '.join(ROUTES)}")
    older, newer = _older(), [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]
    before = [switch.fp32_precision for switch in newer]
    if route == "float32" and before[0] != "tf32":
        yield
        return
    torch.set_float32_matmul_precision(ROUTES[route])
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(older)
        for switch, was in zip(newer, before, strict=True):
            switch.fp32_precision = was


def _older() -> str:
    """What the older switch says; "highest" where torch refuses to read it beside the newer."""
    with contextlib.suppress(RuntimeError):
        return torch.get_float32_matmul_precision()
    return "highest"


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """New tensors are filled with NaN: an output that is left partly unwritten shows."""
    was, warn = torch.are_deterministic_algorithms_enabled(), (
        torch.is_deterministic_algorithms_warn_only_enabled()
    )  # fmt: skip
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warn)


def chosen_route() -> str:
    """The route that the user has chosen for products of float32, by either of torch's switches;
    float32 where they can not be read."""
    with contextlib.suppress(RuntimeError, AttributeError):
        if torch.backends.cuda.matmul.fp32_precision == "tf32":
            return "tf32"
    return "float32"
