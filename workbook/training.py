"""A training step, timed: eager and the drop-in in turn, each on weights of its own.

    zero_grad -> y = model(x) -> loss -> backward -> a step of SGD

The weights change with each step, so the drop-in folds in each forward. The loss is the dot product
of the outputs with fixed random numbers: the plain sum of a softmax's row is always 1.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from workbook import accuracy, compare, errors, journal, machine, paths, timing
from workbook.journal import Record, Records
from workbook.precision import using_route
from workbook.results import BenchResult
from workbook.spec import Problem, Size, Variant
from workbook.variants import kernels_digest

__all__ = ["PARTS", "bench_training"]

PARTS = ("forward", "backward", "optimizer")  # of a step, one after the other
LEARN = ("eager", "compile", "fused", "eager/tf32", "compile/tf32")  # variants with gradients
ROUNDS = 15
WARMUPS = 2  # steps after the first
RATE = 1e-7  # of SGD: the steps are real, yet the weights stay the kind of numbers they are
SEED = 1  # of the loss
BLOCK = 1 << 26  # elements of a gradient that are held against float64 at a time


def bench_training(
    p: Problem,
    *,
    size: str | Size | None = None,
    device: str | None = None,
    mode: str | None = None,
    variants: Sequence[str] | None = None,
    rounds: int = ROUNDS,
    budget_s: float = 20.0,
    flush: str = "read",
    keep: bool = False,
    progress: bool = False,
) -> BenchResult:
    """Time a training step of variants in turn, each sample from a cold cache, and its parts.

    Records of kind "bench" with grad, four a variant, by `how["part"]`: the whole "step", and its
    "forward", "backward" and "optimizer" in the same samples. `found["fused step"]` is one of
    them, `found.ratio("eager step", "fused step")` compares. The step's errors are those of all
    first gradients together, against float64.

    variants: of eager, fused, compile (torch.compile of eager, default mode), and on a GPU
    eager/tf32, compile/tf32; None is all of the device but compile. size, device, flush, keep: as
    of `bench`. mode: what the module is put in; train if not given. One that fails is recorded
    with its reason.
    """
    size, device = compare.defaults(size, device)
    chosen, where = _chosen(p, variants, device), torch.device(device)
    if rounds < 1:
        raise ValueError(f"rounds: got {rounds}, wants at least 1: leave it out for {ROUNDS}")
    task = _Task(p, size, device, mode or "train")
    flusher = timing.Flush(where, flush)
    how = {
        "flush": flush, "flush_MB": flusher.bytes >> 20, "timer": compare.TIMER[where.type],
        "optimizer": "SGD, foreach", "rate": RATE,
    }  # fmt: skip
    base = {**compare.base_of(p, size, device, task.recorded), "grad": True, "seed": 0,
            "clocks": machine.clocks(device), "how": how}  # fmt: skip
    with torch.enable_grad():
        steps, failed = _made(task, chosen)
        calls = {key: timing.Call(step, step.variant.route) for key, step in steps.items()}
        samples = timing.interleaved(
            calls, where, rounds=rounds, budget_s=budget_s, flush=flusher, progress=progress
        )
        found = Records(
            record for key in steps for record in _measured(p, steps[key], samples[key], base)
        )
    found += [_record(p, v, base, "step", passed=False, reason=why) for v, why in failed]
    journal.append(found, journal.place(found[0], paths.runs()))
    if keep:
        journal.append(found, journal.place(found[0], paths.data()))
    return BenchResult(found)


def _chosen(p: Problem, names: Sequence[str] | None, device: str) -> list[Variant]:
    kind = torch.device(device).type
    there = {v.key: v for v in p.variants if v.key in LEARN and kind in v.devices}
    if names is None:
        return [v for key, v in there.items() if not key.startswith("compile")]
    if not names:
        raise ValueError(f"variants: got none, wants some of {', '.join(there)}, or None for all")
    for name in names:
        if name not in there:
            raise KeyError(
                f"variants: got {name!r}, wants some of {', '.join(there)}: what has gradients "
                f"and runs on {device}"
            )
    return [there[name] for name in dict.fromkeys(names)]


class _Task:
    """A model to train, its input, the weights of its loss, its gradients in float64.

    recorded: the mode as records have it; eval where the problem knows no other, for there train
    mode is the same.
    """

    def __init__(self, p: Problem, size: str | Size, device: str, mode: str) -> None:
        if mode not in ("train", "eval"):
            raise KeyError(f"mode: got {mode!r}, wants train or eval")
        self.p, self.recorded = p, mode if mode in p.modes else p.modes[0]
        model = p.model(size, device=device, mode=self.recorded)
        self.model, (self.x,) = model.train(mode == "train"), p.inputs(size, device=device)
        with torch.no_grad():
            outputs = copy.deepcopy(self.model)(self.x).numel()
        drawn = torch.randn(outputs, generator=torch.Generator().manual_seed(SEED))
        self.weigh = drawn.to(device)
        self._exact: list[Tensor] = []
        self._own: dict[str, float] = {}

    def _gradients(self, model: nn.Module) -> list[Tensor]:
        dtype = next(model.parameters()).dtype
        y = model(self.x.to(dtype))
        loss = torch.dot(y.reshape(-1), self.weigh.to(dtype))
        return list(torch.autograd.grad(loss, list(model.parameters())))

    def error(self, model: nn.Module) -> float:
        """Of all gradients that the parameters of a model hold now, together."""
        if not self._exact:
            self._exact = self._gradients(copy.deepcopy(self.model).double())
        return _error([p.grad for p in model.parameters()], self._exact)

    def own(self, route: str) -> float:
        """The same of eager, by a route."""
        if route not in self._own:
            model = copy.deepcopy(self.model)
            with using_route(route):
                for p, grad in zip(model.parameters(), self._gradients(model), strict=True):
                    p.grad = grad
            self._own[route] = self.error(model)
        return self._own[route]

    def forget(self) -> None:
        """Gradients in float64 are large."""
        self._exact = []


def _error(found: Sequence[Tensor | None], exact: Sequence[Tensor]) -> float:
    """‖found − exact‖ / ‖exact‖ over all of them; inf where one is missing or not finite."""
    away = size = 0.0
    for one, true in zip(found, exact, strict=True):
        if one is None:
            return float("inf")
        for a, b in zip(one.reshape(-1).split(BLOCK), true.reshape(-1).split(BLOCK), strict=True):
            away += (a.double() - b).square().sum().item()
            size += b.square().sum().item()
    return (away / size) ** 0.5 if size and away == away else float("inf") if away else 0.0


class _Step:
    """One step of training, a call of no arguments that notes how long its parts take."""

    def __init__(self, task: _Task, variant: Variant) -> None:
        self.task, self.variant = task, variant
        self.model = copy.deepcopy(task.model)  # weights of its own
        if variant.name == "compile":
            self.function = torch.compile(self.model, fullgraph=True)
        else:
            self.function = variant.make(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, foreach=True)
        self.laps: list[timing.Laps] = []
        self.first_ms = self.error = 0.0

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        laps = timing.Laps(self.task.x.device)
        y = self.function(self.task.x)
        laps.mark()
        torch.dot(y.reshape(-1), self.task.weigh).backward()
        laps.mark()
        self.optimizer.step()
        laps.mark()
        self.laps.append(laps)

    def warm(self) -> None:
        """The first step, whose gradients are looked at, and a few more."""
        with using_route(self.variant.route):
            self.first_ms = timing.once_ms(self, self.task.x.device)
            self.error = self.task.error(self.model)
            for _ in range(WARMUPS):
                self()
        self.laps.clear()


def _made(
    task: _Task, chosen: Sequence[Variant]
) -> tuple[dict[str, _Step], list[tuple[Variant, str]]]:
    """Each variant's step, warm; those that raise, with their words. torch.compile comes last, as
    it makes each Python frame of the process dearer."""
    steps, failed = {}, []
    torch._dynamo.reset()  # after 8 shapes torch.compile silently runs eager
    for v in sorted(chosen, key=lambda v: v.name == "compile"):
        try:
            task.own(v.route)
            step = _Step(task, v)
            step.warm()
        except Exception as error:  # a failed run is a result: kept with its reason
            failed.append((v, accuracy.in_words(error)))
            continue
        steps[v.key] = step
    task.forget()
    return {v.key: steps[v.key] for v in chosen if v.key in steps}, failed


def _measured(p: Problem, step: _Step, samples: Sequence[float], base: Mapping) -> list[Record]:
    """The records of a step and of its parts."""
    v, own = step.variant, step.task.own(step.variant.route)
    times = [laps.ms() for laps in step.laps]
    with using_route(v.route):
        launches, peak = timing.profile(step, step.task.x.device)
    limit = errors.limits_of((own,), v.route)[0]
    excess = ""
    if not step.error <= limit:
        excess = f"error {step.error:.1e} (gradients), limit {limit:.1e}, eager {own:.1e}"
    how = {**base["how"], "first_call_ms": step.first_ms}
    whole = _record(
        p, v, {**base, "how": how}, "step", samples_ms=tuple(samples), launches=launches,
        peak_bytes=peak, rel_error=step.error, rel_error_eager=own, limit=limit,
        passed=not excess, reason=excess,
    )  # fmt: skip
    parts = zip(PARTS, zip(*times, strict=True), strict=True)
    return [whole, *(_record(p, v, base, part, samples_ms=ms) for part, ms in parts)]


def _record(p: Problem, v: Variant, base: Mapping, part: str, **found: object) -> Record:
    return Record(
        kind="bench", variant=v.name, implementation=v.implementation, route=v.route,
        kernels_digest=kernels_digest(p.slug, v, base["device"]),
        **{**base, "how": {**base["how"], "part": part}, **found},
    )  # fmt: skip
