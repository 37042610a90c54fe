"""How it scales: a chain timed over its batch, its in_features or its out_features.

A sweep keeps records of kind "curve", a variant and a size each:

    how            axis: B, K or N; compile_mode: torch.compile's, "default", since the strongest
                   takes half a minute a shape; flush, timer, ... as in a bench
    size           "over B", "over K", "over N"
    shape          B, K, N and the chain's own; run: one of the whole sweep
    floor_ms       of the work that the algebra leaves, at that shape
    rel_error...   of the first 64 rows (in train mode of all), beside eager's own
"""

from __future__ import annotations

import dataclasses
import gc
import operator
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor, nn
from tqdm import tqdm

from workbook import accuracy, ceilings, compare, journal, limits, machine, paths, timing
from workbook.journal import Records
from workbook.precision import ROUTES
from workbook.record import AXES
from workbook.spec import Problem, Size, Variant
from workbook.variants import chosen_variants

__all__ = ["sweep"]

NAMES = ("eager", "compile", "algebra", "fused")  # what is timed, unless told otherwise
ROUNDS, BUDGET_S = 12, 1.5  # of a point: samples of each variant, seconds for all of them
ROWS = 64  # held against float64: a whole batch in float64 would take longer than the timing
COMPILE_MODE = "default"


def sweep(
    p: Problem,
    axis: str,
    *,
    values: Iterable[int] | None = None,
    device: str | None = None,
    mode: str = "eval",
    variants: Sequence[str | Variant] | None = None,
    routes: Sequence[str] = ("float32",),
    compile_at: Collection[int] | None = None,
    rounds: int = ROUNDS,
    budget_s: float = BUDGET_S,
    flush: str = "read",
    keep: bool = False,
    progress: bool = False,
) -> Records:
    """Time variants over one axis, "B", "K" or "N", the rest as at laptop (CPU) or paper size.

    values: sizes of that axis; the problem's own if not given. variants: keys or Variants; None is
    eager, compile, algebra and fused by each of `routes`. compile_at: the values at which
    torch.compile is timed, in its default mode; all if not given. rounds, budget_s: samples of a
    variant, and seconds for those of all, at one value. keep: write to data/ too.

    Records of kind "curve", in ms, appended value by value. A variant that raises is kept with its
    reason, and so is a value at which the model can not be made. ValueError, KeyError: an argument.
    """
    _, device = compare.defaults(None, device)
    where = torch.device(device)
    points = _points(p, axis, values, where.type, mode)
    chosen = _chosen(p, variants, routes, device, mode)
    compiled = _compiled_at(compile_at, points)
    how = {"axis": axis, "compile_mode": COMPILE_MODE, "flush": flush}
    base = compare.base_of(p, next(iter(points.values())), device, mode)
    base |= {"kind": "curve", "how": how, "seed": 0, "clocks": machine.clocks(device)}
    flusher, reach, found = timing.Flush(where, flush), ceilings.measure_ceilings(device), Records()
    for value, size in tqdm(points.items(), desc=f"over {axis}", disable=not progress, leave=False):
        here = [v for v in chosen if v.name != "compile" or value in compiled]
        if not here:
            continue
        at = {**base, "size": size.name, "shape": p.shape(size)}
        made = _point(p, size, mode, here, at, flusher, reach, rounds, budget_s, where)
        _release(where)
        _append(made, device, keep, first=not found)
        found += made
    return found


def _point(
    p: Problem, size: Size, mode: str, chosen: Sequence[Variant], base: dict,
    flusher: timing.Flush, reach: limits.Ceilings, rounds: int, budget_s: float,
    where: torch.device,
) -> Records:  # fmt: skip
    """The records of one shape; where it has no room, or no meaning, each with the reason."""
    try:
        model, x = _drawn(p, size, mode, where)
        task = compare.Task(p, size, mode, model, x, compare.Truth(model, x, ROWS))
        return compare.in_turn(
            task, chosen, base, flusher, reach, rounds=rounds, budget_s=budget_s, brief=True
        )
    except Exception as error:  # a failed run is a result: kept with its reason
        why = accuracy.in_words(error)
        failed = {"passed": False, "reason": why}
        return Records(compare.record_of(p, v, base, **failed) for v in chosen)


def _drawn(p: Problem, size: Size, mode: str, where: torch.device) -> tuple[nn.Module, Tensor]:
    """Model and x, drawn where they are used: a CPU takes seconds for the weights of a GPU."""
    gpus = [where] if where.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), where:
        torch.manual_seed(0)
        model = p.Model(*size.init).train(mode == "train")
        return model, torch.rand(size.batch, size.init[0])


def _release(where: torch.device) -> None:
    """Memory of one shape is free before the next: compiled code holds its model's weights."""
    torch._dynamo.reset()
    gc.collect()
    if where.type == "cuda":
        torch.cuda.empty_cache()


def _append(made: Records, device: str, keep: bool, first: bool) -> None:
    journal.append(made, journal.place(made[0], paths.runs()))
    if not keep:
        return
    reached = ceilings.measured_records(device) if first else Records()
    for kept in filter(None, (made, reached)):  # floors need their ceilings
        journal.append(kept, journal.place(kept[0], paths.data()))


# --- arguments ----------------------------------------------------------------------------------


def _points(
    p: Problem, axis: str, values: Iterable[int] | None, kind: str, mode: str
) -> dict[int, Size]:
    """value -> the size with it, in rising order."""
    if axis not in AXES:
        raise ValueError(f"axis: got {axis!r}, wants one of {', '.join(AXES)}")
    p.mode(mode)
    least = 2 if mode == "train" and axis == "B" else 1  # one row has no variance
    given = p.sweeps[kind][axis] if values is None else values
    wanted = sorted({_whole(v, axis) for v in given})
    if not wanted:
        raise ValueError(
            f"values: got none, wants sizes of {axis}; leave it out for {p.sweeps[kind][axis]}"
        )
    if values is None:
        wanted = sorted({max(v, least) for v in wanted})
    middle = p.size("paper" if kind == "cuda" else "laptop")
    return {v: _with(middle, axis, v) for v in wanted}


def _whole(value: int, axis: str) -> int:
    try:
        whole = operator.index(value)
    except TypeError:
        whole = 0
    if whole < 1 or isinstance(value, bool):
        raise ValueError(
            f"values: got {value!r}, wants whole numbers of at least 1 as sizes of {axis}"
        )
    return whole


def _with(size: Size, axis: str, value: int) -> Size:
    K, N, *rest = size.init
    batch = value if axis == "B" else size.batch
    init = (value if axis == "K" else K, value if axis == "N" else N, *rest)
    return Size(f"over {axis}", init, batch)


def _chosen(
    p: Problem, names: Sequence[str | Variant] | None, routes: Sequence[str], device: str, mode: str
) -> list[Variant]:
    """Variants of the names; torch.compile of the chain's own in its default mode."""
    unknown = sorted({*routes} - {*ROUTES})
    if unknown or not routes:
        got = repr(routes) if isinstance(routes, str) else ", ".join(unknown) or "none"
        raise ValueError(f"routes: got {got}, wants a list with some of {', '.join(ROUTES)}")
    there = {v.route for v in p.variants if device.partition(":")[0] in v.devices}
    missing = [r for r in routes if r not in there]
    if missing:
        raise ValueError(
            f"routes: got {', '.join(missing)}, but on this {device} there is only "
            f"{', '.join(sorted(there))}: leave routes out"
        )
    if names is None:
        every = chosen_variants(p, None, torch.device(device).type, mode)
        found = [v for v in every if v.name in NAMES and v.route in routes]
    else:
        found = chosen_variants(p, names, torch.device(device).type, mode)
    own = [v for v in p.variants if v.name == "compile"]
    return [dataclasses.replace(v, make=_compiled) if v in own else v for v in found]


def _compiled(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, fullgraph=True)


def _compiled_at(values: Collection[int] | None, points: Collection[int]) -> Collection[int]:
    unknown = sorted({*(values or ())} - {*points})
    if unknown:
        raise ValueError(
            f"compile_at: got {', '.join(map(str, unknown))}, wants some of the sweep's values, "
            f"{', '.join(map(str, points))}"
        )
    return points if values is None else values
