"""The registry of problems, a module each, in reading order."""

from __future__ import annotations

import importlib

from workbook.spec import Problem

__all__ = ["problem", "problems"]

SLUGS = (
    "matmul_sum_max_mean_logsumexp",
    "matmul_avgpool_gelu_scale_max",
    "gemm_batchnorm_scale_softmax",
    "matmul_maxpool_sum_scale",
)


def problems() -> list[Problem]:
    """All problems, in reading order."""
    return [problem(slug) for slug in SLUGS]


def problem(slug: str) -> Problem:
    """The problem of that slug. Raises KeyError naming the slugs there are."""
    if slug not in SLUGS:
        raise KeyError(f"slug: got {slug!r}; there are {', '.join(SLUGS)}")
    return importlib.import_module(f"workbook.chains.{slug}").problem
