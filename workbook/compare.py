"""Is it fast: variants timed in turn, beside the floor, their cost and their errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workbook import accuracy, ceilings, errors, journal, limits, machine, paths, split, timing
from workbook.fold_timing import fold_cost
from workbook.journal import Record, Records
from workbook.precision import using_route
from workbook.results import BenchResult, key_of
from workbook.spec import Problem, Size, Variant
from workbook.variants import chosen_variants, kernels_digest, method_of

__all__ = ["bench", "yardsticks"]

ROUNDS = 30
WARMUPS = 3  # after the first call: torch.compile captures its CUDA graph in the third
FEW_WARMUPS = 1  # where many shapes are timed, and no graph is captured


def defaults(size: str | Size | None, device: str | None) -> tuple[str | Size, str]:
    """(size, device) where they are not given: laptop on a CPU, paper on a GPU."""
    device = machine.default_device(device)
    machine.card(device)  # NoDevice where it is not here
    return size or ("paper" if device == "cuda" else "laptop"), device


def bench(
    p: Problem,
    *,
    size: str | Size | None = None,
    device: str | None = None,
    mode: str = "eval",
    variants: Sequence[str | Variant] | None = None,
    rounds: int = ROUNDS,
    budget_s: float = 20.0,
    flush: str = "read",
    keep: bool = False,
    progress: bool = False,
) -> BenchResult:
    """Time variants in turn, each sample from a cold cache; look at errors, launches, memory.

    variants: keys or Variants; None is every one of the device but the controls. size: laptop on a
    CPU, paper on a GPU if not given. mode: of the model, eval or train. A variant that fails is
    recorded with its reason. keep: write the records to data/ too.
    """
    size, device = defaults(size, device)
    where = torch.device(device)
    chosen = chosen_variants(p, variants, device, mode)
    model, (x,) = p.model(size, device=device, mode=mode), p.inputs(size, device=device)
    task = Task(p, p.size(size), mode, model, x, Truth(model, x))
    base = {**base_of(p, size, device, mode), "clocks": machine.clocks(device), "seed": 0}
    flusher = timing.Flush(where, flush)
    found = in_turn(
        task, chosen, base, flusher, ceilings.measure_ceilings(device),
        rounds=rounds, budget_s=budget_s, progress=progress,
    )  # fmt: skip
    found = _with_folds(p, model, where, flusher, found)
    journal.append(found, journal.place(found[0], paths.runs()))
    if keep:
        for kept in (found, ceilings.measured_records(device)):  # floors need their ceilings
            journal.append(kept, journal.place(kept[0], paths.data()))
    return BenchResult(found)


def in_turn(
    task: Task,
    chosen: Sequence[Variant],
    base: Mapping,
    flusher: timing.Flush,
    reach: limits.Ceilings,
    *,
    rounds: int,
    budget_s: float,
    progress: bool = False,
    brief: bool = False,
) -> Records:
    """Variants timed in turn on the task's input; their records, those that raise at the end.

    base: fields of every record, of kind "bench" if it names none. brief: fewer warm-ups, and
    nothing of launches, peak memory and host time; for many shapes one after the other.
    """
    where = task.x.device
    with torch.no_grad():
        runs, failed = _made(chosen, task, where, brief)
        calls = {key: timing.Call(run.call, run.variant.route) for key, run in runs.items()}
        samples = timing.interleaved(
            calls, where, rounds=rounds, budget_s=budget_s, flush=flusher, progress=progress
        )
        how = {"flush": flusher.how, "flush_MB": flusher.bytes >> 20, "timer": TIMER[where.type]}
        how = {**base.get("how", {}), **how}
        found = Records(
            _measured(task.p, run, samples[key], base, how, reach, brief)
            for key, run in runs.items()
        )
    found += [record_of(task.p, v, base, passed=False, reason=why) for v, why in failed]
    return found


def yardsticks(
    p: Problem,
    *,
    size: str | Size | None = None,
    device: str | None = None,
    rounds: int = 41,
    flush: str = "read",
) -> BenchResult:
    """The drop-in beside torch calls that move the same bytes, in turn: is memory read as fast?

    Records of kind "profile", appended to .runs/. "kernel" is ours called bare, "fused" the module
    around it; `.ratio("torch.sum(x)", "kernel")` is our speed as a part of theirs.
    """
    size, device = defaults(size, device)
    where, shape = torch.device(device), p.shape(size)
    model, (x,) = p.model(size, device=device), p.inputs(size, device=device)
    new, folded = p.drop_in(model), [t.float() for t in p.fold(model)]
    calls = {name: timing.Call(lambda f=f: f(x, *folded)) for name, f in p.yardsticks.items()}
    calls["kernel"] = timing.Call(p.bare(model, x))
    calls["fused"] = timing.Call(lambda: new(x))
    flusher = timing.Flush(where, flush)
    with torch.no_grad():
        for call in calls.values():
            call.run()
        samples = timing.interleaved(calls, where, rounds=rounds, budget_s=20.0, flush=flusher)
    floor = limits.floor_ms(p.work["after"](**shape), ceilings.measure_ceilings(device))
    base = {**base_of(p, size, device), "floor_ms": floor.ms, "route": "float32"}
    base["how"] = {"flush": flush, "flush_MB": flusher.bytes >> 20, "timer": TIMER[where.type]}
    moved = p.work["after"](**shape).bytes
    found = Records(
        Record(kind="profile", variant=name, samples_ms=tuple(times), bytes_moved=moved, **base)
        for name, times in samples.items()
    )
    journal.append(found, journal.place(found[0], paths.runs()))
    return BenchResult(found)


TIMER = {"cpu": "wall clock", "cuda": "CUDA events, current stream"}


@dataclass(frozen=True)
class _Run:
    variant: Variant
    function: Callable[[Tensor], Tensor]
    x: Tensor
    truth: Truth
    first_ms: float
    factor: float  # the time asked for over that of what was run
    less: str  # what was run instead, where it was not the whole
    host: dict  # host time of a forward, for those where it matters

    def call(self) -> Tensor:
        return self.function(self.x)


class Truth:
    """The float64 oracle and eager's own errors, by route, on the bench's input.

    rows: of the input, that are judged, the first ones; all if not given. In train mode they may
    know of each other: all of them are.
    """

    def __init__(self, model: nn.Module, x: Tensor, rows: int | None = None) -> None:
        self.model, self.x = model, x
        self.exact = errors.oracle(model, x if model.training else x[:rows])
        self._eager: dict[str, tuple[float, float]] = {}

    def errors(self, y: Tensor, rows: int) -> tuple[float, float]:
        """Of an output for the first `rows` rows of the input, as far as they are judged."""
        exact = self.exact[:rows]
        if not y.dim() or y.size(0) != rows:
            return float("inf"), float("inf")
        return errors.errors_of(y[: exact.size(0)], exact)

    def eager(self, route: str) -> tuple[float, float]:
        if route not in self._eager:
            with torch.no_grad(), using_route(route):
                self._eager[route] = self.errors(self.model(self.x), self.x.size(0))
        return self._eager[route]


SHRUNK = 1 << 24  # weights from which a variant with `shrink` runs on smaller ones


@dataclass(frozen=True)
class Task:
    """What a bench asks for: a size of a problem in a mode, its model, input and truth."""

    p: Problem
    size: Size
    mode: str
    model: nn.Module
    x: Tensor
    truth: Truth

    def for_variant(self, v: Variant) -> tuple[Task, float, str]:
        """(what the variant is given, the factor that its time is multiplied by, in words)."""
        K, N, *rest = self.size.init
        if v.shrink > 1 and K * N > SHRUNK:
            size = Size(self.size.name, (K // v.shrink, N // v.shrink, *rest), self.size.batch)
            model = self.p.model(size, device=self.x.device, mode=self.mode)
            (x,) = self.p.inputs(size, device=self.x.device)
            smaller = Task(self.p, size, self.mode, model, x, Truth(model, x))
            words = f"measured at K = {size.init[0]}, N = {size.init[1]}"
            return smaller, float(v.shrink**2), words
        rows = self.x.size(0)
        if v.sample is None or v.sample >= rows:
            return self, 1.0, ""
        part = dataclasses.replace(self, x=self.x[: v.sample])
        return part, rows / v.sample, f"measured at batch {v.sample}"


def _made(
    chosen: Sequence[Variant], task: Task, where: torch.device, brief: bool = False
) -> tuple[dict[str, _Run], list[tuple[Variant, str]]]:
    """Each variant built, called once, then warmed up; those that raise, with their words.

    torch.compile comes last: once it has run, every Python frame of the process costs more.
    """
    runs, failed = {}, []
    torch._dynamo.reset()  # after 8 shapes torch.compile silently runs eager
    for v in sorted(chosen, key=lambda v: v.name == "compile"):
        given, factor, less = task.for_variant(v)
        try:
            with using_route(v.route):
                function = v.make(given.model)
                first_ms = timing.once_ms(lambda f=function, g=given: f(g.x), where)
                for _ in range(FEW_WARMUPS if brief else WARMUPS):
                    function(given.x)
                # one row; to train on one is an error, and of few a GPU's is left to the reference
                few = 64 if where.type == "cuda" else 2
                row = given.x[: few if task.mode == "train" else 1]
                host = {} if brief else _host(v, function, row)
        except Exception as error:  # a failed run is a result: kept with its reason
            failed.append((v, accuracy.in_words(error)))
            continue
        runs[v.key] = _Run(v, function, given.x, given.truth, first_ms, factor, less, host)
    return {v.key: runs[v.key] for v in chosen if v.key in runs}, failed


def base_of(p: Problem, size: str | Size, device: str, mode: str = "eval") -> dict:
    """What the records of one run have in common, a new run's id among it."""
    return {
        "problem": p.slug, "device": torch.device(device).type, "card": machine.card(device),
        "size": p.size(size).name, "shape": p.shape(size), "dtype": "float32", "mode": p.mode(mode),
        "grad": False, "run": journal.new_run(), **machine.provenance(),
    }  # fmt: skip


def record_of(p: Problem, v: Variant, base: Mapping, **found: object) -> Record:
    about = {
        "kind": "bench", "variant": v.name, "implementation": v.implementation, "route": v.route,
        "kernels_digest": kernels_digest(p.slug, v, base["device"]),
    }  # fmt: skip
    return Record(**{**about, **base, **found})


def _measured(
    p: Problem, run: _Run, samples: list[float], base: dict, how: dict,
    reach: limits.Ceilings, brief: bool = False,
) -> Record:  # fmt: skip
    v, shape = run.variant, base["shape"]
    with using_route(v.route):
        y = run.call()
        launches, peak = (None, None) if brief else timing.profile(run.call, run.x.device)
    found = run.truth.errors(y, run.x.size(0))
    own = run.truth.eager(v.route)
    bounds = errors.limits_of(own, v.route)
    method = method_of(p, v, shape, run.x.device, base["mode"], reach)
    work = p.least(v.reads, shape, method)
    halves = split.METHODS[v.route] if method else ""  # the least that our products could take
    best = limits.floor_ms(p.least("after", shape, halves), reach, halves or v.route)
    excess = errors.excess(found, own, bounds)
    scaled = f"{run.less}, times {run.factor:g}" if run.less else ""
    return record_of(
        p, v, base, method=method, samples_ms=tuple(s * run.factor for s in samples),
        how={**how, "first_call_ms": run.first_ms, "read_gbs": reach.read_gbs, **run.host},
        launches=launches, peak_bytes=peak, floor_ms=best.ms,
        bytes_moved=None if v.reads == "before" else work.bytes,  # before: more than it must
        flops=work.flops, rel_error=found[0], rel_error_rows=found[1],
        rel_error_eager=own[0], rel_error_eager_rows=own[1], limit=bounds[0],
        passed=not excess, extrapolated=run.factor != 1,
        reason="; ".join(filter(None, (excess, scaled))),
    )  # fmt: skip


def _host(v: Variant, function: Callable[[Tensor], Tensor], row: Tensor) -> dict:
    """Host time of one forward with gradients on, of few rows, for the drop-in and for eager."""
    if v.key != "fused" and not (v.key == "eager" and row.is_cuda):
        return {}
    with torch.enable_grad():
        return {"host_us_grad": timing.host_us(lambda: function(row), row.device)}


def _with_folds(
    p: Problem, model: nn.Module, where: torch.device, flusher: timing.Flush, found: Records
) -> Records:
    """The records, with what folding costs written into those that fold, into halves or not."""
    keys = {v.key for v in p.variants if v.folds and v.reads == "after"}
    folding = {id(r): bool(p.fold_halves and r.method) for r in found if key_of(r) in keys}
    made = {by_halves: p.fold_halves if by_halves else p.fold for by_halves in folding.values()}
    cost = {h: fold_cost(f, model, where, flusher) for h, f in (made or {False: p.fold}).items()}

    def with_cost(r: Record) -> Record:
        cost_of, how = cost[folding[id(r)]]
        return dataclasses.replace(r, how={**r.how, **how}, **cost_of)

    return Records(with_cost(r) if id(r) in folding else r for r in found)
