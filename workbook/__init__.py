"""A research workbook of fused PyTorch chains: the algebra, the kernels, the measuring.

    import workbook as wb

    p = wb.problem("matmul_sum_max_mean_logsumexp")
    wb.check(p).require()
    wb.bench(p)

Names load when first used, so that records can be read without importing torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "problem": "chains",
    "problems": "chains",
    "freeze": "fold",
    "refresh": "fold",
    "check": "accuracy",
    "protocol": "protocols",
    "protocol_table": "verdicts",
    "bench": "compare",
    "bench_training": "training",
    "try_kernel": "trial",
    "predict": "predictions",
    "yardsticks": "compare",
    "records": "results",
    "measure_ceilings": "ceilings",
    "ceilings_of": "ceilings",
    "describe": "machine",
    "median": "stats",
    "missing": "ops",
    "label": "tables",
    "resources": "prose",
    "show": "prose",
    "derivation": "prose",
    "floor_of": "tables",
    "folds": "costs",
    "recorded_training": "costs",
    "training_lines": "costs",
    "gains": "tables",
    "host_lines": "tables",
    "ceiling_of_speedup": "tables",
    "yardstick_lines": "tables",
    "outcome": "tables",
    "shares": "tables",
    "predicted": "tables",
    "recorded": "tables",
    "on_one_card": "tables",
    "rooflines": "tables",
    "sweep": "scaling",
    "swept": "sweeps",
    "crossovers": "sweeps",
    "doctor": "diagnosis",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'workbook' has no attribute {name!r}")
    return getattr(importlib.import_module(f"workbook.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
