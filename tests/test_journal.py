"""journal and record: lines that survive kills, crowds and odd values."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
import warnings
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import filelock
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbook import journal
from workbook.journal import JournalError, Record, Records

REPOSITORY = Path(__file__).resolve().parent.parent
FULL = Record(
    kind="bench",
    problem="sum_chain",
    variant="fused",
    implementation="hopper",
    method="fp16x3",
    route="float32",
    device="cuda",
    card="NVIDIA H100 80GB HBM3",
    size="paper",
    shape={"B": 1024, "K": 8192, "N": 8192},
    dtype="float32",
    mode="train",
    grad=True,
    samples_ms=(0.5, 0.25, 1.0),
    how={"warmup": 3, "flush": True, "stream": None, "nested": {"a": [1, 2.5]}},
    fold_ms=(1.5, 1.25),
    fold_bytes=32768,
    launches=1,
    peak_bytes=5,
    floor_ms=0.0112,
    bytes_moved=33_591_296.0,
    flops=16_777_216.0,
    rel_error=1e-7,
    rel_error_rows=2e-7,
    rel_error_eager=3e-7,
    rel_error_eager_rows=4e-7,
    limit=8e-7,
    family="uniform",
    state="default",
    seed=0,
    passed=False,
    reason="worst row",
    extrapolated=True,
    value=0.0,
    unit="GB/s",
    note="é ∑ 日本 \u2028 line",
    versions={"torch": "2.11"},
    clocks={"sm_mhz": 1980.0},
    commit="abc",
    dirty=False,
    kernels_digest="d",
    date="2025-01-31T23:59:59Z",
    run="r1",
)


def bench(**given_fields) -> Record:
    return Record(**{"kind": "bench", "problem": "p", "card": "C", **given_fields})


def strict(line: str) -> dict:
    """Standard JSON only: Python's own reader would take NaN and Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in {line}")

    return json.loads(line, parse_constant=refuse)


# --- one record --------------------------------------------------------------------------------


def test_every_field_survives() -> None:
    assert all(  # the example above leaves no field at its default, or its loss would not show
        getattr(FULL, spec.name) != getattr(Record(kind="build", problem=""), spec.name)
        for spec in fields(Record)
        if spec.name != "schema"
    )
    assert Record.from_json(FULL.to_json()) == FULL


def test_a_line_is_one_line_and_says_only_what_it_knows() -> None:
    line = bench(samples_ms=[1, 2]).to_json()
    assert strict(line) == {
        "schema": 1, "kind": "bench", "problem": "p", "card": "C", "samples_ms": [1.0, 2.0]
    }  # fmt: skip
    assert "\n" not in FULL.to_json()
    assert strict(FULL.to_json())["passed"] is False  # false is not empty
    assert strict(FULL.to_json())["seed"] == 0
    assert strict(FULL.to_json())["value"] == 0.0
    assert "∑ 日本" in FULL.to_json()


def test_frozen_and_apart_from_what_it_was_made_of() -> None:
    shape = {"B": 1}
    record = bench(shape=shape)
    shape["B"] = 2
    assert record.shape == {"B": 1}
    with pytest.raises(FrozenInstanceError):
        record.kind = "check"  # type: ignore[misc]


def test_inf_and_nan_are_strings_in_the_file_and_floats_in_the_record() -> None:
    record = bench(
        rel_error=math.inf,
        limit=-math.inf,
        value=math.nan,
        samples_ms=(1.0, math.inf),
        how={"worst": math.nan, "list": [math.inf]},
    )
    written = strict(record.to_json())
    assert (written["rel_error"], written["limit"], written["value"]) == ("inf", "-inf", "nan")
    assert written["samples_ms"] == [1.0, "inf"]
    assert written["how"] == {"worst": "nan", "list": ["inf"]}
    back = Record.from_json(record.to_json())
    assert back.rel_error == math.inf and back.limit == -math.inf and math.isnan(back.value)
    assert back.samples_ms == (1.0, math.inf)
    assert back.how == record.how
    assert math.isnan(back.median_ms)


def test_a_text_that_says_inf_stays_a_text() -> None:
    assert Record.from_json(bench(note="inf", reason="nan").to_json()).note == "inf"


def test_numpy_numbers_become_plain() -> None:
    numpy = pytest.importorskip("numpy")
    record = bench(
        samples_ms=numpy.array([0.5, 0.25], dtype=numpy.float32),
        seed=numpy.int64(7),
        passed=numpy.bool_(True),
        value=numpy.float32(0.5),
        shape={"B": numpy.int32(4)},
    )
    assert (record.samples_ms, record.seed, record.passed) == ((0.5, 0.25), 7, True)
    assert type(record.value) is float and type(record.shape["B"]) is int
    assert Record.from_json(record.to_json()) == record


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"kind": "benchmark"}, "kind: got 'benchmark'; want one of build, check"),
        ({"samples_ms": 1.0}, r"samples_ms: got 1.0 \(float\); want tuple"),
        ({"samples_ms": "12"}, "samples_ms: got '12'"),
        ({"launches": 1.5}, "launches: got 1.5"),
        ({"launches": True}, "launches: got True"),
        ({"grad": 1}, "grad: got 1"),
        ({"grad": None}, "grad: got None"),
        ({"dtype": float}, "dtype: got <class 'float'>"),
        ({"value": "fast"}, "value: got 'fast'"),
        ({"value": 10**400}, "value: got 1000"),
        ({"shape": [1]}, "shape: got"),
        ({"how": {"device": object()}}, "how: got"),
        ({"how": {1: 2}}, "how: got"),
        ({"date": "yesterday"}, "date: got 'yesterday'; want UTC"),
        ({"date": "2025-01-31T23:59:59+02:00"}, "date: got"),
        ({"schema": 0}, "schema: got 0"),
    ],
)
def test_wrong_values_are_named(wrong: dict, words: str) -> None:
    with pytest.raises(JournalError, match=words):
        bench(**wrong)


def test_median() -> None:
    assert FULL.median_ms == 0.5
    assert bench().median_ms is None


@given(st.text(), st.floats(), st.lists(st.floats(allow_nan=False)), st.integers())
def test_any_values_survive(note: str, value: float, samples: list[float], seed: int) -> None:
    record = bench(note=note, value=value, samples_ms=samples, seed=seed)
    strict(record.to_json())
    back = Record.from_json(record.to_json())
    assert (back.note, back.samples_ms, back.seed) == (note, tuple(samples), seed)
    assert back.value == value or (math.isnan(back.value) and math.isnan(value))


# --- files -------------------------------------------------------------------------------------


def test_append_and_load(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folders" / "p.jsonl"
    journal.append(FULL, path)
    journal.append([bench(seed=1), bench(seed=2)], str(path))
    journal.append([], path)
    assert path.read_bytes().count(b"\n") == 3 and path.read_bytes().endswith(b"}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = journal.load(path)
    assert loaded == [FULL, bench(seed=1), bench(seed=2)]
    assert isinstance(loaded, Records)


def test_nothing_to_append_makes_no_file(tmp_path: Path) -> None:
    journal.append([], tmp_path / "a" / "p.jsonl")
    assert not (tmp_path / "a").exists()


def test_undecodable_bytes_of_a_message_survive(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    reason = b"error: \xff here".decode("utf-8", "surrogateescape")
    journal.append(bench(reason=reason), path)
    path.read_bytes().decode("utf-8")  # the file itself stays UTF-8
    assert journal.load(path)[0].reason == reason


def test_torn_last_line_is_ended_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    journal.append(bench(seed=1), path)
    with path.open("ab") as file:
        file.write(FULL.to_json().encode()[:77])
    with pytest.warns(UserWarning, match=rf"left out 1 .*{path}:2$"):
        assert journal.load(path) == [bench(seed=1)]
    journal.append(bench(seed=3), path)
    with pytest.warns(UserWarning, match=rf"{path}:2$"):
        assert journal.load(path) == [bench(seed=1), bench(seed=3)]


def test_whole_last_line_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(bench(seed=1).to_json())
    journal.append(bench(seed=2), path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert journal.load(path) == [bench(seed=1), bench(seed=2)]


def test_torn_inside_a_character(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    text = bench(note="日").to_json().encode()
    path.write_bytes(text[: text.index("日".encode()) + 1])
    with pytest.warns(UserWarning, match="left out 1"):
        assert journal.load(path) == []


def test_invalid_lines_make_one_warning_with_their_places(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    good = bench().to_json()
    bad = [
        "not json",
        "[1]",
        '{"schema":1,"kind":"bench"}',  # no problem
        '{"schema":1,"kind":"dance","problem":"p"}',
        '{"schema":1,"kind":"bench","problem":"p","value":NaN}',
        '{"schema":1,"kind":"bench","problem":"p","grad":"yes"}',
    ]
    path.write_text("\n".join([good, "", *bad, good]) + "\n")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert journal.load(path) == [bench(), bench()]
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "left out 6" in text and "and 1 more" in text
    assert [f"{path}:{n}" in text for n in (1, 2, 3, 4, 5, 6, 7)] == [False] * 2 + [True] * 5
    assert caught[0].filename == __file__


def test_a_newer_schema_is_an_error_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    newer = '{"schema":2,"kind":"dream","problem":"p","colour":"red"}'
    path.write_text(bench().to_json() + "\n" + newer + "\n")
    with pytest.raises(JournalError, match=rf"{path}:2: schema 2 is newer .*update the checkout"):
        journal.load(path)


def test_an_unknown_field_is_an_error_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"schema":1,"kind":"bench","problem":"p","colour":"red"}\n')
    with pytest.raises(JournalError, match=rf"{path}:1: unknown field colour: update"):
        journal.load(path)


def test_empty_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert journal.load(tmp_path) == []
        assert journal.load(tmp_path / "not there") == []
        assert journal.load([]) == []
    journal.append(bench(), tmp_path / "empty.jsonl")
    assert (tmp_path / "empty.jsonl").read_text() == bench().to_json() + "\n"
    with pytest.raises(FileNotFoundError, match="lost.jsonl: no such file"):
        journal.load(tmp_path / "lost.jsonl")


def test_folders_are_read_at_any_depth_in_order(tmp_path: Path) -> None:
    for number, name in enumerate(["b/z.jsonl", "a/p.jsonl", "a/deep/q.jsonl"]):
        journal.append(bench(seed=number), tmp_path / name)
    (tmp_path / "a" / "notes.txt").write_text("no record")
    assert [r.seed for r in journal.load(tmp_path)] == [2, 1, 0]
    both = journal.load([tmp_path / "b", tmp_path / "a" / "p.jsonl"])
    assert [r.seed for r in both] == [0, 1]


def test_a_line_that_can_not_be_written_leaves_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.jsonl"
    journal.append(bench(seed=1), path)
    before = path.read_bytes()
    really = os.write
    with monkeypatch.context() as patched:  # a disk with room for 10 bytes
        patched.setattr(os, "write", lambda file, text: really(file, text[:10]))
        with pytest.raises(OSError, match=r"only 10 of \d+ bytes fit"):
            journal.append(bench(seed=2), path)
    assert path.read_bytes() == before


def test_one_write_for_all_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, writes, really = tmp_path / "p.jsonl", [], os.write
    monkeypatch.setattr(os, "write", lambda file, text: writes.append(text) or really(file, text))
    journal.append([bench(seed=n) for n in range(3)], path)
    mine = [text for text in writes if b"schema" in text]  # the lock may write its own file
    assert len(mine) == 1 and mine[0] == path.read_bytes()


def test_a_held_lock_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "LOCK_SECONDS", 0.1)
    with filelock.FileLock(tmp_path / ".p.jsonl.lock"):
        with pytest.raises(JournalError, match=r"p.jsonl: another process held .*append again"):
            journal.append(bench(), tmp_path / "p.jsonl")
    journal.append(bench(), tmp_path / "p.jsonl")


# --- several processes -------------------------------------------------------------------------

WRITER = """
import sys
from workbook.journal import Record, append
path, who, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
for n in range(count):
    append([Record(kind="bench", problem=who, seed=n, note=who * 3000) for _ in range(2)], path)
    print(n, flush=True)
"""


def writer(path: Path, who: str, count: int) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), who, str(count)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_two_processes_lose_and_mix_nothing(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    writers = [writer(path, who, 25) for who in "ab"]
    for one in writers:
        one.communicate(timeout=120)
        assert one.returncode == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = journal.load(path)
    for who in "ab":
        twice = [n for n in range(25) for _ in range(2)]
        assert [r.seed for r in loaded if r.problem == who] == twice
        assert {r.note for r in loaded if r.problem == who} == {who * 3000}
    firsts, seconds = loaded[0::2], loaded[1::2]  # the two lines of one append stay together
    assert [(r.problem, r.seed) for r in firsts] == [(r.problem, r.seed) for r in seconds]


def test_a_killed_writer_blocks_nobody_and_keeps_what_it_reported(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    killed = writer(path, "k", 100_000)
    for _ in range(5):
        reported = int(killed.stdout.readline())
    killed.kill()
    rest, _ = killed.communicate(timeout=60)
    reported = max([reported, *map(int, rest.split())])
    started = time.monotonic()
    journal.append(bench(), path)
    assert time.monotonic() - started < journal.LOCK_SECONDS / 2  # the lock went with the process
    with warnings.catch_warnings():  # at most one line can be torn, and it is not ours
        warnings.simplefilter("ignore")
        loaded = journal.load(path)
    assert loaded[-1] == bench()
    assert [r.seed for r in loaded if r.problem == "k"][: 2 * reported + 2] == [
        n for n in range(reported + 1) for _ in range(2)
    ]


DYING = """
import os, signal, sys
from workbook.journal import Record, append
really = os.write
def dying(file, text):
    if b"schema" in text:
        really(file, text[: len(text) - 40])
        os.kill(os.getpid(), signal.SIGKILL)
    return really(file, text)
os.write = dying
append([Record(kind="bench", problem="k", seed=n) for n in range(2)], sys.argv[1])
"""


def test_killed_in_the_middle_of_a_write(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    journal.append(bench(seed=9), path)
    done = subprocess.run(
        [sys.executable, "-c", DYING, str(path)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=60,
    )
    assert done.returncode == -9
    assert not path.read_bytes().endswith(b"\n")
    journal.append(bench(seed=10), path)
    with pytest.warns(UserWarning, match=rf"left out 1 .*{path}:3$"):
        loaded = journal.load(path)
    assert [(r.problem, r.seed) for r in loaded] == [("p", 9), ("k", 0), ("p", 10)]


# --- choosing ----------------------------------------------------------------------------------


def test_query() -> None:
    records = [
        bench(variant="eager", seed=1, shape={"B": 1}),
        bench(variant="fused", seed=2),
        bench(variant="compile", seed=3, grad=True),
    ]
    assert [r.seed for r in journal.query(records, variant="fused")] == [2]
    assert [r.seed for r in journal.query(records, variant=("eager", "fused"))] == [1, 2]
    assert [r.seed for r in journal.query(records, seed={3, 4}, grad=True)] == [3]
    assert [r.seed for r in journal.query(records, shape={"B": 1})] == [1]
    assert [r.seed for r in journal.query(records)] == [1, 2, 3]
    assert [r.seed for r in Records(records).query(grad=False)[1:].query()] == [2]
    with pytest.raises(TypeError, match="no field varient; want some of schema, kind"):
        journal.query(records, varient="fused")


def test_newest_keeps_the_newest_run_of_each_key() -> None:
    old = bench(variant="fused", run="r1", date="2025-01-01T00:00:00Z", seed=1)
    new = [
        bench(variant="fused", run="r2", date="2025-01-02T00:00:00Z", family=name)
        for name in ("uniform", "normal")
    ]
    later_check = Record(
        kind="check", problem="p", card="C", variant="fused", run="r3", date="2025-01-03T00:00:00Z"
    )
    other_card = bench(variant="fused", card="D", run="r0", date="2024-01-01T00:00:00Z")
    records = [new[0], old, later_check, new[1], other_card]
    assert journal.newest(records) == [new[0], new[1], later_check, other_card]
    assert Records(records).newest(("problem",)) == [later_check]
    with pytest.raises(TypeError, match="no field colour"):
        journal.newest(records, by=("colour",))


def test_a_run_of_another_flush_hides_none() -> None:
    read = bench(run="r1", date="2025-01-01T00:00:00Z", how={"flush": "read"})
    write = bench(run="r2", date="2025-01-02T00:00:00Z", how={"flush": "write"})
    assert journal.newest([read, write]) == [read, write]
    assert journal.query([read, write], flush="read") == [read]
    assert bench().flush == ""


def test_newest_takes_a_kept_record_once_and_the_last_of_equal_dates() -> None:
    date = "2025-01-02T00:00:00Z"
    kept = bench(run="r1", date=date, seed=1)
    assert journal.newest([kept, Record.from_json(kept.to_json())]) == [kept]
    assert journal.newest([kept, bench(run="r2", date="2025-01-02T00:00:00+00:00")])[0].run == "r2"
    alone = [bench(date=date, seed=1), bench(date=date, seed=2)]  # no run: each stands alone
    assert journal.newest(alone) == [alone[1]]
    assert journal.newest([]) == []


def test_runs_differ_and_sort_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert journal.new_run() != journal.new_run()
    monkeypatch.setattr(time, "gmtime", lambda: time.struct_time((2025, 1, 31, 9, 5, 7, 0, 0, 0)))
    assert journal.new_run().startswith("20250131T090507-")


@pytest.mark.parametrize(
    ("card", "slug"),
    [
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "intel-xeon-cpu-2-20ghz"),
        ("  ../Odd™/Ünit ", "odd-nit"),
    ],
)
def test_card_slug(card: str, slug: str) -> None:
    assert journal.card_slug(card) == slug


def test_place(tmp_path: Path) -> None:
    assert journal.place(FULL, tmp_path) == tmp_path / "nvidia-h100-80gb-hbm3" / "sum_chain.jsonl"
    ceiling = Record(kind="ceiling", problem="", card="C")
    assert journal.place(ceiling, "data") == Path("data/c/machine.jsonl")
    with pytest.raises(ValueError, match="card is ''"):
        journal.place(bench(card=""), tmp_path)
    with pytest.raises(ValueError, match=r"problem is '\.\./x'"):
        journal.place(bench(problem="../x"), tmp_path)


# --- showing -----------------------------------------------------------------------------------


def test_frame() -> None:
    pytest.importorskip("pandas")
    frame = Records([bench(samples_ms=(1.0, 3.0)), bench(seed=4)]).frame()
    names = ["schema", "kind", "problem", "card", "grad", "samples_ms", "seed", "extrapolated"]
    assert list(frame.columns) == [*names, "median_ms"]
    assert frame["median_ms"][0] == 2.0 and frame["seed"][1] == 4
    assert len(Records().frame()) == 0


def test_html_is_escaped_and_counts() -> None:
    page = Records([bench(variant="<b>&", samples_ms=(0.123456,))] * 40)._repr_html_()
    assert "&lt;b&gt;&amp;" in page and "<b>" not in page
    assert "0.1235" in page
    assert "40 records, the first 30 shown" in page and page.count("<tr>") == 31
    assert "rel_error" not in page
    assert "0 records" in Records()._repr_html_()
