"""What a fold takes, and on a CPU the bandwidth at that time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from workbook import stats, timing

__all__ = ["fold_cost"]

FOLDS = 7  # samples of the fold


def fold_cost(
    make: Callable, model: nn.Module, where: torch.device, flusher: timing.Flush
) -> tuple[dict, dict]:
    """(fold_ms and fold_bytes, what goes into a record's `how`) of make(model) -> tensors.

    The bandwidth of a shared CPU changes from minute to minute: there the largest parameter is
    read, by torch's sum, in turn with the fold, and the median rate (GB/s) kept as fold_read_gbs.
    """
    largest = max(model.parameters(), key=torch.numel).detach()
    with torch.no_grad():
        calls = {"fold": timing.Call(lambda: make(model))}
        if where.type == "cpu":
            calls["read"] = timing.Call(largest.sum)
        times = timing.interleaved(calls, where, rounds=FOLDS, budget_s=5.0, flush=flusher)
        size = sum(t.numel() * t.element_size() for t in calls["fold"].run())
    read_ms = stats.median(times["read"]) if "read" in times else 0.0
    gigabytes = largest.numel() * largest.element_size() * 1e-9
    how = {"fold_read_gbs": gigabytes / read_ms * 1e3} if read_ms else {}
    return {"fold_ms": tuple(times["fold"]), "fold_bytes": size}, how
