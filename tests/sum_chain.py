"""The sum chain's part of `kit`, for tests that are about this one problem."""

from __future__ import annotations

from kit import DEVICES, SUM, drawn, errors, needs_compiler, needs_gpu, needs_nvcc, truth

import workbook as wb

__all__ = [
    "DEVICES",
    "Model",
    "ModelNew",
    "PROBLEM",
    "drawn",
    "errors",
    "needs_compiler",
    "needs_gpu",
    "needs_nvcc",
    "truth",
]

PROBLEM = wb.problem(SUM.slug)
Model, ModelNew = PROBLEM.Model, PROBLEM.ModelNew
