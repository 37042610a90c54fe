"""How a callable is timed: variants in turn, raw samples, a cache that is cold or warm.

On a GPU a sample is the time between two events on the current stream, and the flush keeps the GPU
busy until the host has enqueued the call: host time is measured apart. A sample for which the host
was late, as on a shared machine it may be, is taken again behind a longer flush, twice at most. On
a CPU a sample is the wall clock around the call. Before each sample the cache is emptied of the
inputs:

    read   a buffer several times the last-level cache is read. What it leaves behind is clean.
    write  the buffer is written. The next kernel also pays for writing it back to memory.
           Public harnesses do this.
    none   warm: the inputs may still be in the cache.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from tqdm import tqdm

from workbook import machine
from workbook.precision import using_route

__all__ = ["FLUSHES", "Call", "Flush", "Laps", "host_us", "interleaved", "once_ms", "profile"]

FLUSHES = ("read", "write", "none")
CACHES = 8  # the flush buffer, in last-level caches of a GPU
PASSES = 8  # over it: about a millisecond, in which a slow host gets ahead of the GPU
TRIES = 3  # of a sample for which the host was late, each behind twice as many flushes
CPU_CACHES, CPU_FLUSH_LIMIT = 2, 256 << 20  # of a CPU, where reading takes real time
MIN_SAMPLES = 5


@dataclass(frozen=True)
class Call:
    """Something to time: a callable of no arguments and the route it runs by."""

    run: Callable[[], object]
    route: str = "float32"


class Flush:
    """Empties a device's cache of everything but what the flush itself read or wrote."""

    def __init__(self, device: torch.device, how: str = "read") -> None:
        if how not in FLUSHES:
            raise ValueError(f"flush: got {how!r}, wants one of {', '.join(FLUSHES)}")
        cache = machine.last_level_cache_bytes(device)
        size = CACHES * cache if device.type == "cuda" else min(CPU_CACHES * cache, CPU_FLUSH_LIMIT)
        self.how, self.bytes = how, 0 if how == "none" else size
        self._buffer = torch.zeros(self.bytes // 4, device=device)

    def __call__(self) -> None:
        for _ in range(PASSES if self._buffer.is_cuda else 1):
            if self.how == "read":
                self._buffer.sum()
            elif self.how == "write":
                self._buffer.zero_()


def once_ms(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call."""
    return _once(run, device)[0]


def _once(run: Callable[[], object], device: torch.device) -> tuple[float, bool]:
    """(milliseconds of one call, whether a GPU had begun before the host had enqueued it all)."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3, False
    with torch.cuda.device(device):
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record()
        run()
        end_event.record()
        is_late = start_event.query()
        end_event.synchronize()
        return start_event.elapsed_time(end_event), is_late


def _sample(run: Callable[[], object], device: torch.device, flush: Flush) -> float:
    """Milliseconds of one call behind a flush; without the host's time, if three tries have it."""
    for attempt in range(TRIES):
        for _ in range(2**attempt):
            flush()
        ms, is_late = _once(run, device)
        if not is_late or not flush.bytes:
            break
    return ms


class Laps:
    """Where the time of one call goes: made when it starts, `mark` ends a part of it.

    On a GPU a mark is an event on the current stream; it waits for nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu, self._marks = device.type == "cuda", []
        self.mark()

    def mark(self) -> None:
        if self._on_gpu:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def ms(self) -> list[float]:
        """Milliseconds of each part; on a GPU once the call is done."""
        pairs = itertools.pairwise(self._marks)
        return [a.elapsed_time(b) if self._on_gpu else (b - a) * 1e3 for a, b in pairs]


def interleaved(
    calls: Mapping[str, Call],
    device: torch.device,
    *,
    rounds: int,
    budget_s: float,
    flush: Flush,
    progress: bool = False,
) -> dict[str, list[float]]:
    """Milliseconds by name, one sample of each call a round, the order turned each round.

    A call leaves when its samples have used its share of `budget_s` seconds, after at least 5
    samples. The i-th samples of two calls belong to the same round: their ratio is paired.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    spent = dict.fromkeys(calls, 0.0)
    share = budget_s / max(len(calls), 1)
    with tqdm(total=rounds, desc="rounds", disable=not progress, leave=False) as bar:
        for turn in range(rounds if calls else 0):
            names = list(calls)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                if spent[name] > share and len(samples[name]) >= MIN_SAMPLES:
                    continue
                with using_route(calls[name].route):
                    start = time.perf_counter()
                    samples[name].append(_sample(calls[name].run, device, flush))
                    spent[name] += time.perf_counter() - start
            bar.update()
    return samples


def host_us(run: Callable[[], object], device: torch.device, calls: int = 50) -> list[float]:
    """Microseconds that the calling thread spends on one call, in 9 runs of `calls` calls."""
    times = []
    for _ in range(9):
        _wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - start) / calls * 1e6)
    _wait(device)
    return times


def profile(run: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """(launches, peak bytes above what was allocated) of one call, after a first one.

    Launches are kernels on a GPU, operators that call no other operator on a CPU.
    """
    run()
    _wait(device)
    on_gpu = device.type == "cuda"
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, kinds.CUDA] if on_gpu else [kinds.CPU]
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    with _quiet(), torch.profiler.profile(activities=activities, profile_memory=not on_gpu) as seen:
        kept = run()
        _wait(device)
    del kept
    events = seen.events()
    if on_gpu:
        kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
        return len(kernels), torch.cuda.max_memory_allocated(device) - before
    leaves = [e for e in events if not e.cpu_children and "::" in e.name]
    return len(leaves), _cpu_peak(seen)


def _cpu_peak(seen: torch.profiler.profile) -> int:
    """The largest sum of allocations less releases, in the order they happened."""
    changes = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda e: e.start_ns()):
        held += change.nbytes()
        peak = max(peak, held)
    return peak


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The profiler's C++ writes to the process's stderr, past sys.stderr: that goes nowhere."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
