"""The command line, as a subprocess: what goes to stdout, what to stderr, how it ends.

It runs in a scratch checkout with a small problem and small ceilings, so that data/ can be written,
kernels broken, and nothing takes long.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sum_chain import PROBLEM, needs_compiler

from workbook import journal
from workbook.chains import SLUGS
from workbook.journal import Record

ROOT = Path(__file__).resolve().parents[1]
SLUG = PROBLEM.slug
COMMANDS = tuple("list doctor build check bench sweep results records run report".split())
SMALLER = {
    f"chains/{SLUG}.py": ('Size("laptop", (2048, 2048), 256)', 'Size("laptop", (64, 48), 33)'),
    "ceilings.py": ('{"cpu": 256 << 20,', '{"cpu": 1 << 20,'),
}
BENCH_KEYS = (
    "problem variant implementation route device size mode median_ms floor_ms rel_error "
    "rel_error_eager date commit"
).split()


@pytest.fixture(scope="session")
def original(tmp_path_factory) -> Path:
    """A checkout with small sizes: workbook/, kernels/, an empty notebooks/."""
    folder = tmp_path_factory.mktemp("checkout")
    unwanted = shutil.ignore_patterns("__pycache__")
    for name in ("workbook", "kernels"):
        shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    (folder / "notebooks").mkdir()
    for file, (old, new) in SMALLER.items():
        path = folder / "workbook" / file
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{file} has no {old!r}: adapt the test"
        path.write_text(text.replace(old, new), encoding="utf-8")
    return folder


@pytest.fixture
def checkout(original, tmp_path) -> Path:
    """A fresh copy with an empty working directory beside it, so that nothing hangs on either."""
    shutil.copytree(original, tmp_path / "copy")
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "copy"


def surroundings(checkout: Path, **env: str | None) -> dict:
    keep = {k: v for k, v in os.environ.items() if not k.startswith("WORKBOOK_") or "CACHE" in k}
    keep |= {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1", "NO_COLOR": "1"}
    return {k: v for k, v in (keep | env).items() if v is not None}


def workbook(checkout: Path, *arguments: object, **env: str | None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "workbook", *map(str, arguments)],
        cwd=checkout.parent / "elsewhere", env=surroundings(checkout, **env),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def said(done: subprocess.CompletedProcess) -> str:
    return f"status {done.returncode}\n{done.stdout}\n--- stderr\n{done.stderr}"


def objects(done: subprocess.CompletedProcess) -> list[dict]:
    """stdout as strict JSON, an object a line."""

    def constant(name: str):
        raise ValueError(f"{name} is no JSON")

    found = [json.loads(line, parse_constant=constant) for line in done.stdout.splitlines()]
    assert found and all(isinstance(one, dict) for one in found), said(done)
    return found


def assert_refused(done: subprocess.CompletedProcess, words: str) -> None:
    """Status 2, nothing on stdout, one line on stderr, no traceback."""
    assert done.returncode == 2 and done.stdout == "", said(done)
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("workbook: "), said(done)
    assert re.search(words, lines[0]), said(done)


# --- help -------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_that_parses(command, checkout):
    from workbook import cli

    done = workbook(checkout, command, "--help")
    assert done.returncode == 0 and done.stderr == "", said(done)
    example = re.search(r"example:\s+python -m workbook (.+)", done.stdout)
    assert example and example[1].split()[0] == command, said(done)
    assert cli._parser().parse_args(example[1].split()).command == command
    if SLUG in example[1]:
        assert example[1].split()[1] in (SLUG, f"01_{SLUG}")


def test_help_lists_every_command(checkout):
    done = workbook(checkout, "--help")
    assert done.returncode == 0
    for command in COMMANDS:
        assert re.search(rf"^    {command} +\w", done.stdout, re.M), command


@pytest.mark.parametrize("arguments", [(), ("frobnicate",), ("bench",), ("check", "--size", "x")])
def test_wrong_usage_is_status_2(arguments, checkout):
    done = workbook(checkout, *arguments)
    assert done.returncode == 2 and done.stdout == "" and "usage:" in done.stderr
    assert "Traceback" not in done.stderr


# --- list and doctor --------------------------------------------------------------------------


def test_list(checkout):
    every = objects(workbook(checkout, "list", "--json"))
    assert [one["problem"] for one in every] == list(SLUGS)
    found = next(one for one in every if one["problem"] == SLUG)
    assert found["title"]
    assert found["sizes"]["paper"] == {"B": 1024, "K": 8192, "N": 8192}
    assert {"eager", "eager/tf32", "fused", "wrong_one_block"} <= set(found["variants"])
    text = workbook(checkout, "list")
    assert text.returncode == 0 and SLUG in text.stdout and "fused" in text.stdout


def test_doctor_names_what_is_there(checkout):
    done = workbook(checkout, "doctor", "--json")
    found = {one["name"]: one for one in objects(done)}
    assert set(found) == {
        "compiler", "ninja", "headers", "nvcc", "torch", "GPU", "jupyter", "checkout", "cache",
    }  # fmt: skip
    assert all(set(one) == {"name", "ok", "detail", "remedy"} for one in found.values())
    assert done.returncode == int(any(one["ok"] is False for one in found.values()))
    assert found["checkout"]["detail"] == str(checkout.resolve())


def test_doctor_without_a_compiler(checkout):
    done = workbook(checkout, "doctor", PATH="/nowhere", CXX=None)
    assert done.returncode == 1, said(done)
    lines = done.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("MISSING compiler"))
    assert "apt install g++" in lines[at + 1]
    assert done.stderr == ""


# --- build, check, bench ----------------------------------------------------------------------


@needs_compiler
def test_build_says_what_it_made_and_finds_it_again(checkout):
    rungs = [v.key for v in PROBLEM.variants if v.source and "cpu" in v.devices]
    workbook(checkout, "build", SLUG, "--device", "cpu")
    done = workbook(checkout, "build", SLUG, "--device", "cpu")
    assert done.returncode == 0, said(done)
    assert done.stdout.count("was there") == len(rungs) == len(done.stdout.splitlines())
    for key in rungs:
        assert f"{SLUG} {key}: " in done.stdout


@needs_compiler
def test_a_broken_kernel_does_not_build(checkout):
    file = checkout / "kernels" / SLUG / "cpu.cpp"
    file.write_text(file.read_text() + "\nint half = ;\n")
    done = workbook(checkout, "build", SLUG, "--device", "cpu")
    assert done.returncode == 2 and "Traceback" not in done.stderr, said(done)
    assert f"cpu.cpp:{len(file.read_text().splitlines())}" in done.stderr


def test_check_prints_a_line_a_case(checkout):
    done = workbook(checkout, "check", SLUG, "--device", "cpu", "--json")
    assert done.returncode == 0, said(done)
    found = objects(done)
    assert len(found) > 30 and all(one["passed"] is True for one in found)
    wants = {"problem", "variant", "family", "state", "rel_error", "rel_error_eager", "limit"}
    assert all(wants <= set(one) for one in found)
    records = journal.load(checkout / ".runs")
    assert len(records.query(kind="check")) == len(found)
    assert not (checkout / "data").exists()


def test_check_for_people_and_controls(checkout):
    done = workbook(checkout, "check", SLUG, "--device", "cpu", "--variants", "fused,eager")
    assert done.returncode == 0 and done.stdout.count(": right in") == 2, said(done)
    assert "bias left out: " in done.stdout and "ACCEPTED" not in done.stdout
    before = len(journal.load(checkout / ".runs"))
    done = workbook(checkout, "check", SLUG, "--device", "cpu", "--variants", "controls", "--keep")
    assert done.returncode == 0, "a control that is rejected is as it should be\n" + said(done)
    assert done.stdout.count("WRONG") == 2 == done.stdout.count("control: ")
    kept = journal.load(checkout / "data")
    assert len(kept) == len(journal.load(checkout / ".runs")) - before > 0
    assert {r.variant for r in kept} == {"wrong_literal_log_exp", "wrong_fold_in_init"}


@needs_compiler
def test_a_wrong_kernel_is_status_1_with_strict_json(checkout):
    """The kernel of the drop-in without its bias, and one that writes inf."""
    file = checkout / "kernels" / SLUG / "cpu.cpp"
    good = file.read_text()
    for sabotage in ("", " + *p.b_sum + 1e300"):
        assert " + *p.b_sum" in good
        file.write_text(good.replace(" + *p.b_sum", sabotage))
        done = workbook(checkout, "check", SLUG, "--device", "cpu", "--json")
        assert done.returncode == 1, said(done)
        failed = [one for one in objects(done) if not one["passed"]]
        assert failed and all(one["reason"] for one in failed)
        assert "Traceback" not in done.stderr
    assert failed[0]["rel_error"] == "inf"


@pytest.mark.parametrize("verb", ["build", "check", "bench"])
def test_an_unknown_slug_is_one_line(verb, checkout):
    assert_refused(workbook(checkout, verb, "matmul_foo"), f"slug: got 'matmul_foo'.*{SLUG}")


@pytest.mark.parametrize(
    ("verb", "variant"),
    [("check", "fussed"), ("check", "05_whole_row_in_flight"), ("bench", "eager/tf32")],
)
def test_an_unknown_variant_is_one_line(verb, variant, checkout):
    done = workbook(checkout, verb, SLUG, "--device", "cpu", "--variants", variant)
    assert_refused(done, f"variant: got '{variant}'.*fused")
    assert not (checkout / ".runs").exists()


def test_a_gpu_that_is_not_there_is_one_line(checkout):
    done = workbook(checkout, "bench", SLUG, "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert_refused(done, "(?i)cuda|gpu")


QUICK = ("--device", "cpu", "--rounds", "5", "--budget", "1", "--flush", "none")


def test_bench_prints_a_line_a_variant_and_keeps_its_records(checkout):
    names = "eager,algebra,fused"
    done = workbook(checkout, "bench", SLUG, *QUICK, "--variants", names, "--json", "--keep")
    assert done.returncode == 0, said(done)
    found = objects(done)
    assert [one["variant"] for one in found] == names.split(",")
    for one in found:
        assert set(BENCH_KEYS) <= set(one) and one["median_ms"] > 0 and one["floor_ms"] > 0
        assert one["problem"] == SLUG and one["device"] == "cpu" and one["mode"] == "eval"
        assert one["rel_error"] < 1e-5 and one["size"] == "laptop"
    assert len(journal.load(checkout / ".runs").query(kind="bench")) == 3
    assert len(journal.load(checkout / "data").query(kind="bench")) == 3
    shown = objects(workbook(checkout, "results", SLUG, "--json"))
    assert sorted(map(str, shown)) == sorted(map(str, found)), "what was kept is what is shown"


def test_bench_for_people_and_the_runs_folder_elsewhere(checkout, tmp_path):
    done = workbook(
        checkout, "bench", SLUG, *QUICK, "--variants", "eager,fused",
        WORKBOOK_RUNS=str(tmp_path / "runs"),
    )  # fmt: skip
    assert done.returncode == 0, said(done)
    assert "B=33, K=64, N=48" in done.stdout and "over eager" in done.stdout
    assert not (checkout / ".runs").exists() and not (checkout / "data").exists()
    assert len(journal.load(tmp_path / "runs").query(kind="bench")) == 2


def test_bench_of_training_steps(checkout):
    names = ("--variants", "eager,fused")
    done = workbook(checkout, "bench", SLUG, *QUICK, *names, "--training", "--keep")
    assert done.returncode == 0 and "fused backward" in done.stdout, done.stderr
    kept = journal.load(checkout / "data").query(kind="bench")
    assert len(kept) == 8 and all(r.grad and r.part for r in kept)


def test_bench_without_a_compiler_keeps_what_failed(checkout):
    done = workbook(
        checkout, "bench", SLUG, *QUICK, "--variants", "cpu", "--json", PATH="/nowhere", CXX=None
    )
    (one,) = objects(done)
    assert one["median_ms"] is None and one["passed"] is False
    assert "CompilerMissing" in one["reason"] and "no C++ compiler" in one["reason"]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "options",
    [
        ("--rounds", "0"),
        ("--rounds", "x"),
        ("--budget", "-1"),
        ("--budget", "nan"),
        ("--flush", "l2"),
        ("--size", "poster"),
    ],
)
def test_wrong_options_are_named(options, checkout):
    done = workbook(checkout, "bench", SLUG, *options)
    assert (
        done.returncode == 2
        and options[0].strip("-") in done.stderr
        and "Traceback" not in done.stderr
    )


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT for a child there")
@pytest.mark.parametrize("verb", ["bench", "check"])
def test_ctrl_c_leaves_records_readable_and_is_status_130(verb, checkout):
    workbook(checkout, "bench", SLUG, *QUICK, "--variants", "eager")
    before = journal.load(checkout / ".runs")
    assert len(before) >= 4
    long = {
        "bench": ("--rounds", "10000000", "--budget", "100", "--variants", "eager,fused"),
        "check": ("--variants", ",".join(["eager"] * 500)),
    }[verb]
    child = subprocess.Popen(
        [sys.executable, "-m", "workbook", verb, SLUG, "--device", "cpu", *long],
        cwd=checkout.parent / "elsewhere", env=surroundings(checkout), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # the background's is deaf
    )  # fmt: skip
    try:
        began = time.monotonic()
        if verb == "bench":
            while "rounds" not in child.stderr.read(1) + child.stderr.readline(200):
                assert time.monotonic() - began < 60 and child.poll() is None
        else:
            assert "right in" in child.stdout.readline()
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 130, errors
    assert "Traceback" not in errors and "workbook: stopped" in errors.splitlines()[-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *a, **k: pytest.fail(f"torn: {a}"))
        after = journal.load(checkout / ".runs")
    assert set(map(str, before)) <= set(map(str, after))
    assert len(after.query(kind="bench")) == len(before.query(kind="bench"))


# --- records and results ----------------------------------------------------------------------


def kept(variant: str, ms: float, run: str, date: str, card: str = "Card A", **more) -> Record:
    about = {
        "kind": "bench", "problem": SLUG, "route": "float32", "implementation": "torch",
        "device": "cuda", "size": "paper", "mode": "eval", "commit": "abc", "floor_ms": 0.01,
        "rel_error": 1e-7, "rel_error_eager": 2e-7,
    }  # fmt: skip
    about |= {"variant": variant, "samples_ms": (ms, ms, ms) if ms else ()}
    return Record(**about | {"run": run, "date": date, "card": card} | more)


OLD, NEW = "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"


def test_results_of_nothing(checkout):
    assert_refused(workbook(checkout, "results"), "data/ holds no results.*--keep.*records import")


def test_results_are_the_newest_run_of_each_card(checkout):
    records = [
        kept("eager", 3.0, "r1", OLD), kept("fused", 0.5, "r1", OLD),
        kept("eager", 2.0, "r2", NEW), kept("eager", 1.0, "r2", NEW, route="tf32"),
        kept("eager", 9.0, "r3", OLD, card="Card B"),
        kept("broken", 0, "r2", NEW, passed=False, reason="out of luck", rel_error=float("inf")),
    ]  # fmt: skip
    for record in records:
        journal.append(record, journal.place(record, checkout / "data"))
    journal.append(kept("fused", 0.1, "r9", NEW), checkout / ".runs" / "a" / "b.jsonl")
    found = objects(workbook(checkout, "results", "--json"))
    assert all(set(BENCH_KEYS) <= set(one) for one in found)
    medians = {(one["card"], one["variant"]): one["median_ms"] for one in found}
    assert medians == {
        ("Card A", "eager"): 2.0, ("Card A", "eager/tf32"): 1.0, ("Card A", "fused"): 0.5,
        ("Card A", "broken"): None, ("Card B", "eager"): 9.0,
    }  # fmt: skip
    for card in ("Card A", "Card B"):
        dates = [one["date"] for one in found if one["card"] == card]
        assert dates == sorted(dates, reverse=True), "newest first"
    cards = [one["card"] for one in found]
    assert cards == sorted(cards) or cards == sorted(cards, reverse=True), "a card stays together"
    text = workbook(checkout, "results")
    assert text.returncode == 0 and len(text.stdout.splitlines()) == 5 and "failed" in text.stdout
    assert_refused(workbook(checkout, "results", "matmul_foo"), "no results of matmul_foo")


def test_results_tell_modes_and_flushes_apart(checkout):
    written = {"flush": "write", "timer": "CUDA events"}
    for record in (kept("eager", 3.0, "r1", OLD), kept("eager", 4.0, "r2", OLD, mode="train"),
                   kept("eager", 5.0, "r3", OLD, how=written)):  # fmt: skip
        journal.append(record, journal.place(record, checkout / "data"))
    lines = workbook(checkout, "results").stdout.splitlines()
    sizes = {line.split(" | ")[4]: line.split(" | ")[2] for line in lines}
    assert sizes == {"3 ms": "paper", "4 ms": "paper, train", "5 ms": "paper, flush write"}


def test_import_takes_each_record_once(checkout, tmp_path):
    records = [
        kept("eager", 3.0, "r1", OLD), kept("fused", 0.5, "r1", OLD),
        kept("eager", 9.0, "r3", OLD, card="Card B"),
        Record(kind="ceiling", problem="", variant="read", card="Card B", value=3e3, unit="GB/s"),
    ]  # fmt: skip
    file = tmp_path / "from elsewhere.jsonl"
    journal.append([*records, records[0]], file)  # one of them twice
    done = workbook(checkout, "records", "import", file)
    assert done.returncode == 0 and "4 records taken, 1 were there" in done.stderr, said(done)
    assert done.stdout.split() == [
        f"data/card-a/{SLUG}.jsonl", "data/card-b/machine.jsonl", f"data/card-b/{SLUG}.jsonl",
    ]  # fmt: skip
    assert sorted(map(str, journal.load(checkout / "data"))) == sorted(map(str, records))
    again = workbook(checkout, "records", "import", file)
    assert again.returncode == 0 and "0 records taken, 5 were there" in again.stderr, said(again)
    assert len(journal.load(checkout / "data")) == 4
    folder = workbook(checkout, "records", "import", tmp_path)
    assert folder.returncode == 0 and "0 records taken" in folder.stderr, said(folder)


def test_import_leaves_torn_lines_out_and_says_so(checkout, tmp_path):
    file = tmp_path / "torn.jsonl"
    good = [kept("eager", 3.0, "r1", OLD), kept("fused", 0.5, "r1", OLD)]
    lines = [record.to_json() for record in good]
    torn = [lines[0], lines[1][:40], "no json", lines[1], lines[0][:9]]
    file.write_text("\n".join(torn))
    done = workbook(checkout, "records", "import", file)
    assert done.returncode == 0 and "2 records taken" in done.stderr, said(done)
    assert "left out 3 torn or invalid line(s)" in done.stderr and "torn.jsonl:2" in done.stderr
    assert list(journal.load(checkout / "data")) == good


@pytest.mark.parametrize("name", ["missing.jsonl", "missing"])
def test_import_of_a_missing_file(name, checkout, tmp_path):
    done = workbook(checkout, "records", "import", tmp_path / name)
    assert_refused(done, f"FILE: .*{name} is not there")
    assert not (checkout / "data").exists()


def test_import_of_what_holds_no_records(checkout, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    assert_refused(workbook(checkout, "records", "import", tmp_path / "empty.jsonl"), "no records")
    (tmp_path / "none").mkdir()
    assert_refused(workbook(checkout, "records", "import", tmp_path / "none"), "no records")


def test_import_of_a_record_without_a_card_takes_none(checkout, tmp_path):
    file = tmp_path / "some.jsonl"
    journal.append([kept("eager", 1.0, "r", OLD), kept("fused", 1.0, "r", OLD, card="")], file)
    assert_refused(workbook(checkout, "records", "import", file), "card")
    assert not (checkout / "data").exists()


def test_a_reader_that_goes_away_is_no_error(checkout):
    for n in range(200):
        record = kept("eager", 1.0 + n, f"r{n}", OLD, card=f"Card {n}")
        journal.append(record, checkout / "data" / "x.jsonl")
    command = f'"{sys.executable}" -m workbook results --json | head -1; echo "${{PIPESTATUS[0]}}"'
    done = subprocess.run(
        ["bash", "-c", command], cwd=checkout.parent / "elsewhere", env=surroundings(checkout),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    first, status = done.stdout.splitlines()
    assert json.loads(first)["problem"] == SLUG and status == "0" and done.stderr == ""


# --- notebooks --------------------------------------------------------------------------------


def notebook(folder: Path, name: str, *cells: str) -> None:
    made = [
        {"cell_type": "code", "id": f"c{i}", "source": source, "metadata": {}, "outputs": [],
         "execution_count": None}
        for i, source in enumerate(cells)
    ]  # fmt: skip
    text = json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": made})
    (folder / f"{name}.ipynb").write_text(text)


def test_run_ends_with_1_when_a_notebook_fails(checkout, tmp_path):
    notebook(checkout / "notebooks", "01_good", "x = 1", "x + 1")
    notebook(checkout / "notebooks", "02_bad", "x = 1", "assert x == 2, 'one is not two'", "y")
    notebook(checkout / "notebooks", "03_good", "import workbook; workbook.__doc__")
    out = tmp_path / "executed"
    done = workbook(checkout, "run", "--output", out)
    assert done.returncode == 1 and "Traceback" not in done.stderr, said(done)
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["01_good", "02_bad", "03_good"]
    assert "ok" in lines[0] and "ok" in lines[2], "the ones after it are run"
    assert "FAILED: cell 1, line 1" in lines[1] and "one is not two" in lines[1]
    assert {f.name for f in out.iterdir()} == {"01_good.ipynb", "02_bad.ipynb", "03_good.ipynb"}
    assert workbook(checkout, "run", "good").returncode == 0
    assert workbook(checkout, "run", checkout / "notebooks" / "02_bad.ipynb").returncode == 1


@pytest.mark.parametrize("verb", ["run", "report"])
def test_an_unknown_notebook_is_one_line(verb, checkout):
    notebook(checkout / "notebooks", "01_good", "1")
    assert_refused(workbook(checkout, verb, "02"), "notebook: got '02'; there are 01_good")
    assert_refused(workbook(checkout, verb, "no.ipynb"), "no.ipynb|needs nbconvert")


# --- a package without its checkout -----------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [("list",), ("bench", SLUG), ("results",), ("run",), ("report",)],
)
def test_a_package_installed_alone_says_in_a_line_what_to_do(arguments, original, tmp_path):
    shutil.copytree(original / "workbook", tmp_path / "site" / "workbook")
    (tmp_path / "elsewhere").mkdir()
    done = workbook(tmp_path / "site", *arguments)
    assert done.returncode == 2 and done.stdout == "", said(done)
    assert done.stderr == (
        "workbook: workbook is installed without its notebooks/ and kernels/: "
        "clone the repository and run `pip install -e .` there\n"
    )


def test_doctor_of_a_package_installed_alone(original, tmp_path):
    shutil.copytree(original / "workbook", tmp_path / "site" / "workbook")
    (tmp_path / "elsewhere").mkdir()
    done = workbook(tmp_path / "site", "doctor", "--json")
    found = {one["name"]: one for one in objects(done)}
    assert done.returncode == 1 and found["checkout"]["ok"] is False
    assert "pip install -e ." in found["checkout"]["remedy"]
