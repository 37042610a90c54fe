"""The command `check`: variants against our rule, or, with --protocol, as others judge them."""

from __future__ import annotations

import argparse
import sys

from workbook.accuracy import check
from workbook.chains import problem
from workbook.journal import Record
from workbook.lines import print_lines
from workbook.protocols import PROTOCOLS, protocol
from workbook.spec import Problem, Variant
from workbook.variants import that_run

__all__ = ["run"]

LINE = ("problem", "variant", "route", "device", "card", "size", "shape", "family", "state",
        "seed", "rel_error", "rel_error_rows", "rel_error_eager", "rel_error_eager_rows",
        "limit", "passed", "reason", "date", "commit")  # fmt: skip


def run(arguments: argparse.Namespace, device: str) -> int:
    """0 if all is well, else 1: something that is no control is rejected; for our own rule also
    where a control is not."""
    if arguments.file and not arguments.protocol:
        raise ValueError("--file: wants --protocol eval or --protocol harness beside it")
    if arguments.file and arguments.variants:
        raise ValueError("--file and --variants: got both, wants one of them")
    judge = _by_protocol if arguments.protocol else _by_rule
    right = [judge(problem(slug), arguments, device) for slug in arguments.slugs]
    return int(not all(right))


def _by_rule(p: Problem, arguments: argparse.Namespace, device: str) -> bool:
    right = True
    for v in _named(p, arguments.variants or "fused", device):
        result = check(
            p, variant=v, device=device, size=arguments.size or "laptop",
            modes=[arguments.mode] if arguments.mode else None, stop=v.is_control,
            keep=arguments.keep, progress=sys.stderr.isatty(),
        )  # fmt: skip
        right &= result.ok != v.is_control
        if arguments.json:
            print_lines(map(_line, result.records))
            continue
        print(f"{result}" + (f"\n  control: {v.wrong}" if v.is_control else ""))
        for score in result.scores:
            verdict = "ACCEPTED: the rule is blind" if score["accepted"] else "rejected"
            print(f"  {score['name']}: {score['rel_error']:.1e}, {verdict}")
    return right


def _by_protocol(p: Problem, arguments: argparse.Namespace, device: str) -> bool:
    """A control that is rejected, and a variant in a mode that it does not compute, are as they
    should be."""
    name, right = arguments.protocol, True
    chosen = [None] if arguments.file else _named(p, arguments.variants or "fused", device)
    for v in chosen:
        result = protocol(
            p, name, variant=v, file=arguments.file, device=device,
            size=arguments.size or "laptop", keep=arguments.keep,
        )  # fmt: skip
        expected = v is not None and (v.is_control or PROTOCOLS[name].mode not in v.modes)
        right &= result.ok or expected
        if arguments.json:
            more = {"protocol": name, "rule": result.rule, "moved": result.moved}
            print_lines([{**_line(result.record), **more, "median_ms": result.record.median_ms}])
            continue
        print(f"{result}" + (f"\n  control: {v.wrong}" if v is not None and v.is_control else ""))
    return right


def _line(record: Record) -> dict:
    return {name: getattr(record, name) for name in LINE}


def _named(p: Problem, names: str, device: str) -> list[Variant]:
    here = [v for v in that_run(p, device) if v.route == "float32"]
    here = [v for v in here if v.reads != "fold"]  # the drop-in once more, on weights of its own
    if names == "all":
        return here
    if names == "controls":
        return [v for v in here if v.is_control]
    return [p.variant(name, device) for name in names.split(",")]
