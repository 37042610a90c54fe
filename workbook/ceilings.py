"""What this machine reaches, measured: bandwidth and GEMM rates, the denominators of floors."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from workbook import gemm, journal, machine, paths, stats, timing
from workbook.journal import Record, Records
from workbook.limits import Ceilings

__all__ = ["ceilings_of", "measure_ceilings"]

BUFFER_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
GEMM_SIDE = {"cpu": 2048, "cuda": 8192}
ROUNDS = {"cpu": 15, "cuda": 15}


def measure_ceilings(device: str = "cpu") -> Ceilings:
    """Read and copy bandwidth (GB/s), GEMM rates in float32, TF32 and half
    (TFLOP/s), an empty launch (ms).

    The best of 15 samples, of a launch their median. Measured once a process; kept as records of
    kind "ceiling" in .runs/.
    """
    return _of(measured_records(str(device)))


@functools.cache
def measured_records(device: str) -> Records:
    """The records behind measure_ceilings, one a ceiling."""
    where = torch.device(device)
    kind = where.type
    calls, amounts = _calls(where)
    samples = timing.interleaved(
        {name: timing.Call(run, route) for name, (run, route) in calls.items()},
        where,
        rounds=ROUNDS[kind],
        budget_s=8.0,
        flush=timing.Flush(where, "read" if kind == "cuda" else "none"),
    )
    run, facts = journal.new_run(), machine.provenance()
    clocks = machine.clocks(where)
    records = []
    for name, times in samples.items():
        amount, unit = amounts[name]
        ms = stats.median(times) if name == "launch" else min(times)  # reached once, it is reached
        records.append(
            Record(
                kind="ceiling", problem="", variant=name, device=kind, card=machine.card(where),
                samples_ms=tuple(times), value=amount / ms if amount else ms, unit=unit,
                clocks=clocks, run=run, **facts,
            )
        )  # fmt: skip
    journal.append(records, journal.place(records[0], paths.runs()))
    return Records(records)


def ceilings_of(card: str | None = None) -> Ceilings | None:
    """The recorded ceilings of a card, the newest ones; None where none were recorded.

    Without a card: of the GPU whose ceilings were recorded last.
    """
    every = journal.load([paths.data(), paths.runs()]).query(kind="ceiling")
    if card is None:
        gpus = every.query(device="cuda")
        card = max(gpus, key=lambda r: r.date).card if gpus else ""
    found = every.query(card=card)
    return _of(found.newest(("card", "variant"))) if found else None


def _calls(where: torch.device) -> tuple[dict, dict]:
    """name -> (call, route), and name -> (amount a millisecond of which is one unit, unit)."""
    count = BUFFER_BYTES[where.type] // 4
    source, target = torch.rand(count, device=where), torch.empty(count, device=where)
    side = GEMM_SIDE[where.type]
    a, b = (torch.rand(side, side, device=where) for _ in range(2))
    product, one = torch.empty(side, side, device=where), torch.zeros(1, device=where)
    calls: dict[str, tuple[Callable[[], object], str]] = {
        "read": (source.sum, "float32"),
        "copy": (lambda: target.copy_(source), "float32"),
        "gemm_float32": (lambda: torch.mm(a, b, out=product), "float32"),
    }
    if where.type == "cpu":  # what torch's fastest library reaches
        calls["gemm_float32"] = (lambda: gemm.product(a, b), "float32")
    if where.type == "cuda":
        calls["gemm_tf32"] = (lambda: torch.mm(a, b, out=product), "tf32")
        halves = a.half(), b.half(), product.half()
        calls["gemm_half"] = (lambda: torch.mm(*halves[:2], out=halves[2]), "float32")
        calls["launch"] = (one.zero_, "float32")
    bytes_per_ms, flops_per_ms = 4 * count / 1e6, 2 * side**3 / 1e9
    amounts = {
        "read": (bytes_per_ms, "GB/s"),
        "copy": (2 * bytes_per_ms, "GB/s"),
        "gemm_float32": (flops_per_ms, "TFLOP/s"),
        "gemm_tf32": (flops_per_ms, "TFLOP/s"),
        "gemm_half": (flops_per_ms, "TFLOP/s"),
        "launch": (0.0, "ms"),
    }
    for run, _ in calls.values():
        run()  # warm: libraries loaded, pages touched
    return calls, amounts


def _of(records: Records) -> Ceilings:
    value = {record.variant: record.value for record in records}
    newest = max(record.date for record in records)
    return Ceilings(
        read_gbs=value["read"],
        copy_gbs=value["copy"],
        fp32_tflops=value["gemm_float32"],
        tf32_tflops=value.get("gemm_tf32"),
        half_tflops=value.get("gemm_half"),
        launch_ms=value.get("launch", 0.0),
        source=f"{records[0].card}, {newest}",
    )
