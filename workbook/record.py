"""One record: a fact that was built, checked or measured, with where it came from."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from . import stats

__all__ = ["AXES", "FIELDS", "KINDS", "SCHEMA", "JournalError", "Record"]

SCHEMA = 1
KINDS = ("build", "check", "bench", "ceiling", "prediction", "profile", "curve")
AXES = ("B", "K", "N")  # of every shape: batch, in_features, out_features; a sweep is over one
_ALWAYS = ("schema", "kind", "problem")  # written even when empty
_DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(Z|\+00:00)")


class JournalError(RuntimeError):
    """A record that can not be written or read, with its place and what to do."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One fact with its provenance. Times in ms, sizes in bytes, rates in `unit`.

    Values are checked and made plain (numpy numbers too) when made; JournalError names the field.
    What is None or empty is not written. inf and nan are written as strings, which are read back
    as numbers in float fields and stay strings inside the dicts.
    """

    schema: int = SCHEMA
    kind: str
    problem: str
    variant: str = ""  # eager, compile, algebra, fused, or a rung of the ladder
    implementation: str = ""  # torch, cpu, portable, hopper
    method: str = ""  # ffma, tf32, fp16x1, fp16x3
    route: str = ""  # float32, tf32
    device: str = ""  # cpu, cuda
    card: str = ""  # name of the CPU or GPU
    size: str = ""  # laptop, paper, ...
    shape: dict[str, Any] = field(default_factory=dict)
    dtype: str = ""
    mode: str = ""  # eval, train
    grad: bool = False
    samples_ms: tuple[float, ...] = ()  # raw, in the order taken
    how: dict[str, Any] = field(default_factory=dict)  # warmup, cache flush, stream or graph, ...
    fold_ms: tuple[float, ...] | None = None
    fold_bytes: int | None = None
    launches: int | None = None
    peak_bytes: int | None = None
    floor_ms: float | None = None
    bytes_moved: float | None = None
    flops: float | None = None
    rel_error: float | None = None
    rel_error_rows: float | None = None  # of the worst row
    rel_error_eager: float | None = None
    rel_error_eager_rows: float | None = None
    limit: float | None = None
    family: str = ""
    state: str = ""
    seed: int | None = None
    passed: bool | None = None
    reason: str = ""  # of a failure or an extrapolation
    extrapolated: bool = False
    value: float | None = None
    unit: str = ""
    note: str = ""
    versions: dict[str, Any] = field(default_factory=dict)
    clocks: dict[str, Any] = field(default_factory=dict)
    commit: str = ""
    dirty: bool | None = None
    kernels_digest: str = ""
    date: str = ""  # UTC, ISO, seconds
    run: str = ""  # shared by the records of one run

    def __post_init__(self) -> None:
        for spec in fields(self):
            object.__setattr__(self, spec.name, _checked(spec, getattr(self, spec.name)))
        if self.schema != SCHEMA:
            raise JournalError(f"schema: got {self.schema}; want {SCHEMA}")
        if self.kind not in KINDS:
            raise JournalError(f"kind: got {self.kind!r}; want one of {', '.join(KINDS)}")
        if self.date and not _DATE.fullmatch(self.date):
            raise JournalError(f"date: got {self.date!r}; want UTC as 2025-01-31T23:59:59Z")

    @property
    def flush(self) -> str:
        """How the cache was emptied before each sample: read, write, none; "" if not timed."""
        return str(self.how.get("flush", ""))

    @property
    def protocol(self) -> str:
        """The public protocol that a check followed: eval, harness; "" for our rule's own."""
        return str(self.how.get("protocol", ""))

    @property
    def part(self) -> str:
        """What of a training step was timed: step, forward, backward, optimizer; "" if none was."""
        return str(self.how.get("part", ""))

    @property
    def median_ms(self) -> float | None:
        """Median of samples_ms; None when there are none, nan when one is not finite."""
        if not self.samples_ms:
            return None
        return (
            stats.median(self.samples_ms) if all(map(math.isfinite, self.samples_ms)) else math.nan
        )

    def to_json(self) -> str:
        """One line of standard JSON, without the newline."""
        written = {}
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name in _ALWAYS or value != _default(spec):
                written[spec.name] = _encoded(value)
        return json.dumps(written, ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str | bytes, where: str = "record") -> Record:
        """The record of one line; `where` (file:line) goes into errors.

        ValueError for a line that is torn or no record; JournalError for one that this version
        of the workbook does not know.
        """
        read = json.loads(line, parse_constant=_no_constant)
        if not isinstance(read, dict):
            raise ValueError(f"{where}: not a JSON object")
        schema = read.get("schema")
        if isinstance(schema, int) and schema > SCHEMA:
            raise JournalError(
                f"{where}: schema {schema} is newer than this workbook's {SCHEMA}: "
                "update the checkout (git pull), or load other files"
            )
        unknown = sorted(set(read) - set(FIELDS))
        if unknown:
            raise JournalError(
                f"{where}: unknown field {', '.join(unknown)}: update the checkout (git pull), "
                "or mend the line"
            )
        missing = [name for name in _ALWAYS if name not in read]
        if missing:
            raise ValueError(f"{where}: no {', '.join(missing)}")
        try:
            return cls(**read)
        except JournalError as error:
            raise ValueError(f"{where}: {error}") from error


FIELDS = tuple(spec.name for spec in fields(Record))


def _default(spec: Field) -> Any:
    if spec.default_factory is not MISSING:
        return spec.default_factory()
    return spec.default


def _encoded(value: Any) -> Any:
    """JSON has no inf and no nan: they become "inf", "-inf" and "nan"."""
    if isinstance(value, tuple):
        return [_encoded(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _checked(spec: Field, value: Any) -> Any:
    """`value` as the field declares it. Annotations are strings here (the __future__ import)."""
    wanted, _, optional = spec.type.partition(" | ")
    if optional and value is None:
        return None
    try:
        made = _MAKERS[wanted](value)
    except (TypeError, ValueError, OverflowError) as error:
        raise JournalError(
            f"{spec.name}: got {value!r} ({type(value).__name__}); want {spec.type}"
        ) from error
    return None if optional and made == () else made


def _scalar(value: Any) -> Any:
    """The Python value of a numpy scalar or of a tensor without dimensions."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return str(value)


def _bool(value: Any) -> bool:
    value = _scalar(value)
    if not isinstance(value, bool):
        raise TypeError
    return value


def _int(value: Any) -> int:
    value = _scalar(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    return int(value)


def _float(value: Any) -> float:
    value = _scalar(value)
    if isinstance(value, str) and value in ("inf", "-inf", "nan"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError
    return float(value)


def _floats(value: Any) -> tuple[float, ...]:
    if isinstance(value, (str, Mapping)):
        raise TypeError
    return tuple(_float(one) for one in value)


def _dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError
    return {_text(key): _plain(one) for key, one in value.items()}


def _plain(value: Any) -> Any:
    """A value inside a dict, as JSON gives it back: tuples as lists, inf and nan as strings."""
    value = _scalar(value)
    if isinstance(value, Mapping):
        return _dict(value)
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return _encoded(float(value))
    if value is None or isinstance(value, (str, int)):
        return value
    raise TypeError


_MAKERS = {
    "str": _text,
    "bool": _bool,
    "int": _int,
    "float": _float,
    "tuple[float, ...]": _floats,
    "dict[str, Any]": _dict,
}
