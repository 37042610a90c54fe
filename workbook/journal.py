"""Records are kept as JSON lines that are only ever appended to; a median is made when read."""

from __future__ import annotations

import html
import os
import re
import secrets
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import filelock

from .record import FIELDS, KINDS, SCHEMA, JournalError, Record

__all__ = [
    "KINDS",
    "SCHEMA",
    "JournalError",
    "Record",
    "Records",
    "append",
    "card_slug",
    "load",
    "new_run",
    "newest",
    "place",
    "query",
]

MACHINE = "machine"  # the file of records that belong to a card and to no problem
NEWEST_BY = ("kind", "card", "problem", "variant", "route", "size", "mode", "device", "flush",
             "protocol", "part")  # fmt: skip
LOCK_SECONDS = 60.0
SHOWN = ("kind", "problem", "variant", "route", "size", "device", "card", "median_ms")
SHOWN += ("rel_error", "passed", "value", "unit", "date")  # columns of the HTML table
SHOWN_ROWS = 30


class Records(list[Record]):
    """A list of records that shows itself as a table."""

    def query(self, **equals: Any) -> Records:
        """See journal.query."""
        return query(self, **equals)

    def newest(self, by: tuple[str, ...] = NEWEST_BY) -> Records:
        """See journal.newest."""
        return newest(self, by)

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return Records(found) if isinstance(index, slice) else found

    def frame(self) -> Any:
        """A pandas DataFrame: a row a record, the fields that any of them fills, and median_ms."""
        import pandas as pd

        names = [name for name in (*FIELDS, "median_ms") if any(_filled(r, name) for r in self)]
        return pd.DataFrame([[getattr(r, n) for n in names] for r in self], columns=names)

    def _repr_html_(self) -> str:
        names = [name for name in SHOWN if any(_filled(r, name) for r in self)]
        head = "".join(f"<th>{name}</th>" for name in names)
        rows = "".join(
            "<tr>" + "".join(f"<td>{_cell(getattr(r, n))}</td>" for n in names) + "</tr>"
            for r in self[:SHOWN_ROWS]
        )
        more = f", the first {SHOWN_ROWS} shown" if len(self) > SHOWN_ROWS else ""
        return f"<table><tr>{head}</tr>{rows}</table><p>{len(self)} records{more}</p>"


def append(records: Record | Iterable[Record], path: str | Path) -> None:
    """Add records to `path`, a line each, all or none of them, safe beside other processes.

    Folders are created. A torn last line (a writer that was killed) is ended first. JournalError
    when another process holds the file for a minute; OSError when the disk can not take the lines.
    """
    lines = [r.to_json() for r in ([records] if isinstance(records, Record) else records)]
    if not lines:
        return
    # a lone surrogate (an undecodable byte of a compiler's message) becomes its JSON escape
    text = "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    try:
        with filelock.FileLock(lock, timeout=LOCK_SECONDS):
            _write(path, text)
    except filelock.Timeout as error:
        raise JournalError(
            f"{path}: another process held {lock.name} for {LOCK_SECONDS:.0f} s; "
            "wait for it or end it, then append again"
        ) from error


def _write(path: Path, text: bytes) -> None:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o644)
    try:
        end = os.lseek(file, 0, os.SEEK_END)
        if end:
            os.lseek(file, end - 1, os.SEEK_SET)
            text = text if os.read(file, 1) == b"\n" else b"\n" + text
        written = os.write(file, text)
        if written != len(text):
            os.ftruncate(file, end)
            raise OSError(f"{path}: only {written} of {len(text)} bytes fit; nothing was kept")
        os.fsync(file)
    finally:
        os.close(file)


def load(paths: str | Path | Iterable[str | Path]) -> Records:
    """The records of a file, of a folder's *.jsonl at any depth, or of several of these.

    Torn and invalid lines are left out, with one warning that names them. A folder that is not
    there holds no records; a file that is not there is a FileNotFoundError.
    """
    found, skipped = Records(), []
    for path in _files([paths] if isinstance(paths, (str, Path)) else paths):
        for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                found.append(Record.from_json(line, f"{path}:{number}"))
            except (ValueError, RecursionError):
                skipped.append(f"{path}:{number}")
    if skipped:
        more = f" and {len(skipped) - 5} more" if len(skipped) > 5 else ""
        warnings.warn(
            f"left out {len(skipped)} torn or invalid line(s): {', '.join(skipped[:5])}{more}",
            stacklevel=2,
        )
    return found


def _files(places: Iterable[str | Path]) -> Iterator[Path]:
    for place_ in map(Path, places):
        if place_.is_dir():
            yield from sorted(place_.rglob("*.jsonl"))
        elif place_.is_file():
            yield place_
        elif place_.suffix == ".jsonl":
            raise FileNotFoundError(f"{place_}: no such file; want a file or folder of records")


def query(records: Iterable[Record], **equals: Any) -> Records:
    """The records whose fields equal these; a tuple, list or set means any of its members.

    TypeError for a name that is no field.
    """
    _fields_only(equals)
    wanted = {
        name: list(value) if isinstance(value, (tuple, list, set, frozenset)) else [value]
        for name, value in equals.items()
    }
    return Records(
        record
        for record in records
        if all(getattr(record, name) in values for name, values in wanted.items())
    )


def newest(records: Iterable[Record], by: tuple[str, ...] = NEWEST_BY) -> Records:
    """For each value of the fields `by`, all records of its newest run, each once, in order.

    The newest run is that of the latest date, of the last in the list among equal dates. A record
    without a run stands alone.
    """
    _fields_only(by)
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(repr(getattr(record, name)) for name in by), []).append(record)
    kept = Records()
    for group in groups.values():
        last = max(enumerate(group), key=lambda numbered: (numbered[1].date[:19], numbered[0]))[1]
        same_run = [r for r in group if r is last or (last.run and r.run == last.run)]
        kept.extend({r.to_json(): r for r in same_run}.values())  # a kept record is in two files
    return kept


def new_run() -> str:
    """An id for the records of one run, sorting by time: 20250131T235959-1a2b3c."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def card_slug(card: str) -> str:
    """ "NVIDIA H100 80GB HBM3" -> "nvidia-h100-80gb-hbm3": letters, digits and dashes.

    ValueError when nothing is left.
    """
    bare = re.sub(r"\((?:r|tm|c)\)", " ", card.lower())
    slug = re.sub(r"[^a-z0-9]+", "-", bare).strip("-")
    if not slug:
        raise ValueError(f"card_slug: card is {card!r}; want a name with letters or digits")
    return slug


def place(record: Record, base: str | Path) -> Path:
    """base/<card slug>/<problem>.jsonl; machine.jsonl for what belongs to no problem.

    ValueError when the record has no card, or its problem can not be a file's name.
    """
    name = record.problem or MACHINE
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ValueError(f"place: problem is {name!r}; want letters, digits, '_', '-' and '.'")
    return Path(base) / card_slug(record.card) / f"{name}.jsonl"


def _fields_only(names: Iterable[str]) -> None:
    unknown = sorted(set(names) - set(FIELDS) - {"flush", "protocol", "part"})
    if unknown:
        raise TypeError(f"no field {', '.join(unknown)}; want some of {', '.join(FIELDS)}")


def _filled(record: Record, name: str) -> bool:
    return getattr(record, name) not in (None, "", (), {})


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return html.escape(f"{value:.4g}" if isinstance(value, float) else str(value))
