"""Options that commands have in common, and those of the commands that have many."""

from __future__ import annotations

import argparse
from pathlib import Path

from workbook.record import AXES

__all__ = ["add_export", "add_json", "add_sweep", "add_where", "positive", "seconds"]


def add_where(command: argparse.ArgumentParser, size: bool = True) -> None:
    """Slugs and the device; with `size`, also size, mode and where the records go."""
    command.add_argument("slugs", nargs="+", metavar="SLUG", help="a problem; see `list`")
    command.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU"
    )
    if size:
        command.add_argument(
            "--size",
            help="see `list`; default: laptop, but for bench on a GPU: paper",
        )
        command.add_argument(
            "--mode", choices=("eval", "train"), help="of the model; default: check all, bench eval"
        )
        _add_keep(command)


def _add_keep(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--keep", action="store_true", help="write the records to data/, not only to .runs/"
    )
    add_json(command)


def add_sweep(sweep: argparse.ArgumentParser) -> None:
    """What `sweep` takes."""
    add_where(sweep, size=False)
    sweep.add_argument("--axis", nargs="+", choices=AXES, default=list(AXES),
                       help="all three if not given")  # fmt: skip
    sweep.add_argument("--values", help="comma-separated sizes; the problem's own if not given")
    sweep.add_argument("--mode", choices=("eval", "train"), default="eval", help="of the model")
    sweep.add_argument("--variants", help="comma-separated; eager,compile,algebra,fused if absent")
    sweep.add_argument("--route", nargs="+", choices=("float32", "tf32"), default=["float32"],
                       help="of the baselines (float32)")  # fmt: skip
    sweep.add_argument("--compile-at", metavar="VALUES",
                       help="comma-separated: torch.compile at these sizes alone")  # fmt: skip
    sweep.add_argument("--rounds", type=positive, default=12, help="samples of each, a size (12)")
    sweep.add_argument("--budget", type=seconds, default=1.5, help="seconds a size (1.5)")
    _add_keep(sweep)


def add_export(command: argparse.ArgumentParser) -> None:
    """What `export` takes."""
    command.add_argument("slug", metavar="SLUG", help="a problem; see `list`")
    command.add_argument("-o", dest="file", type=Path, metavar="FILE", required=True)
    command.add_argument("--reference", type=Path, metavar="FILE", help="its Model and inputs too")
    command.add_argument("--force", action="store_true", help="replace a file of somebody else's")


def add_json(command: argparse.ArgumentParser) -> None:
    """--json, which every command that lists something has."""
    command.add_argument("--json", action="store_true", help="one object a line on stdout")


def positive(text: str) -> int:
    """A count of at least 1, as argparse's `type`."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, wants at least 1")
    return value


def seconds(text: str) -> float:
    """Seconds above 0, as argparse's `type`."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, wants seconds above 0")
    return value
