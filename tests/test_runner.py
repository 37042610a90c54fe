"""The runner: a notebook without Jupyter, its outputs in the standard format, its errors placed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from workbook import runner, standin

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = Path(__file__).parent / "data" / "sample.ipynb"
JUPYTER = ("IPython", "nbformat", "nbclient", "nbconvert", "ipykernel", "jupyter_client")


def write(path: Path, *cells: str, tags: dict[int, list[str]] | None = None) -> Path:
    """A notebook of code cells; a cell that starts with "#md" is Markdown."""
    made = []
    for number, source in enumerate(cells):
        source = textwrap.dedent(source).strip("\n")
        kind = "markdown" if source.startswith("#md") else "code"
        cell = {"cell_type": kind, "id": f"c{number}", "source": source.removeprefix("#md\n")}
        cell["metadata"] = {"tags": tags[number]} if tags and number in tags else {}
        if kind == "code":
            cell.update(execution_count=None, outputs=[])
        made.append(cell)
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": made}
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return path


def run(tmp_path: Path, *cells: str, tags=None, **options):
    """Run the cells; (result, outputs of each cell)."""
    path = write(tmp_path / "nb.ipynb", *cells, tags=tags)
    out = tmp_path / "out.ipynb"
    result = runner.run_notebook(path, output=out, progress=False, **options)
    made = json.loads(out.read_text(encoding="utf-8"))["cells"]
    return result, [cell.get("outputs") for cell in made]


def test_the_last_expression_is_the_result_and_prints_are_streams(tmp_path):
    cell = "import sys\nprint('a')\nprint('b')\nprint('c', file=sys.stderr)\n1 + 1"
    result, (outputs,) = run(tmp_path, cell)
    assert result.ok and result.error is None and result.cells == 1
    assert [o["output_type"] for o in outputs] == ["stream", "stream", "execute_result"]
    assert (outputs[0]["name"], outputs[0]["text"]) == ("stdout", "a\nb\n")
    assert (outputs[1]["name"], outputs[1]["text"]) == ("stderr", "c\n")
    assert outputs[2]["data"] == {"text/plain": "2"} and outputs[2]["execution_count"] == 1


def test_nothing_is_shown_for_none_a_statement_and_a_semicolon(tmp_path):
    _, outputs = run(tmp_path, "None", "x = 3", "x;", "", "# a comment", "x")
    assert outputs[:5] == [[], [], [], [], []]
    assert outputs[5][0]["data"]["text/plain"] == "3"


def test_the_namespace_is_main_and_is_shared(tmp_path):
    cells = (
        "from __future__ import annotations\nclass A:\n    x: undefined = 1\n__name__",
        "import pickle\npickle.loads(pickle.dumps(A())).x",
        "def f(y: undefined): return y\nf(_)",  # the future import holds here too
        "import inspect\ninspect.getsource(f)",
    )
    before = sys.modules["__main__"]
    result, outputs = run(tmp_path, *cells)
    assert result.ok, result.error
    assert [o[-1]["data"]["text/plain"] for o in outputs[:3]] == ["'__main__'", "1", "1"]
    assert "def f(y: undefined)" in outputs[3][0]["data"]["text/plain"]
    assert sys.modules["__main__"] is before


def test_it_runs_in_the_folder_of_the_notebook_and_leaves_no_trace(tmp_path, monkeypatch):
    monkeypatch.setenv("KEPT", "1")
    here, search = Path.cwd(), list(sys.path)
    cell = "import os\nos.environ['LEFT'] = '1'\nos.environ['KEPT'] = '2'\nos.getcwd()"
    _, (outputs,) = run(tmp_path, cell)
    assert outputs[0]["data"]["text/plain"] == repr(str(tmp_path))
    assert (Path.cwd(), sys.path) == (here, search)
    assert "LEFT" not in os.environ and os.environ["KEPT"] == "1"


def test_an_error_stops_the_run_and_names_cell_line_and_source(tmp_path):
    cells = ("#md\n# Title", "def f(x):\n    return 1 / x", "y = 1\nf(0)", "print('never')")
    result, outputs = run(tmp_path, *cells)
    error = result.error
    assert not result.ok and (error.cell, error.line, error.source) == (2, 2, "f(0)")
    assert error.name == "ZeroDivisionError" and "return 1 / x" in error.traceback
    assert "runner.py" not in error.traceback
    recorded = outputs[2][-1]
    assert (recorded["output_type"], recorded["ename"]) == ("error", "ZeroDivisionError")
    assert outputs[3] == []
    assert str(error) == "cell 2, line 2, `f(0)`: ZeroDivisionError: division by zero"
    stamped = runner.read(result.output)["metadata"]["workbook"]
    assert stamped["error"] == str(error) and stamped["machine"] and stamped["date"]


def test_a_cell_may_be_expected_to_fail_or_skipped(tmp_path):
    tags = {0: ["raises-exception"], 1: ["skip-execution"]}
    result, outputs = run(tmp_path, "1 / 0", "1 / 0", "2", tags=tags)
    assert result.ok and result.cells == 2
    assert outputs[0][0]["ename"] == "ZeroDivisionError" and outputs[1] == []


def test_exit_is_an_error_and_an_interrupt_is_raised_after_the_copy_is_written(tmp_path):
    result, _ = run(tmp_path, "import sys\nsys.exit(0)")
    assert result.error.name == "SystemExit"
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "print('kept')\nraise KeyboardInterrupt")
    outputs = runner.read(tmp_path / "out.ipynb")["cells"][0]["outputs"]
    assert [o["output_type"] for o in outputs] == ["stream", "error"]


@pytest.mark.parametrize("line", ["%timeit x", "%%time", "!ls"])
def test_a_magic_is_refused_with_its_line(tmp_path, line):
    result, _ = run(tmp_path, f"x = 1\n{line}")
    assert result.error.name == "SyntaxError" and result.error.line == 2
    assert "IPython magic" in result.error.value and "plain Python" in result.error.value


def test_a_syntax_error_that_is_no_magic_stays_one(tmp_path):
    result, _ = run(tmp_path, "x = (1 % 2\ny = 3")
    assert result.error.name == "SyntaxError" and "magic" not in result.error.value


def test_parameters_follow_the_tagged_cell(tmp_path):
    cells, tags = ("size, depth = 'laptop', 2", "(size, depth)"), {0: ["parameters"]}
    result, outputs = run(tmp_path, *cells, tags=tags, parameters={"size": "paper"})
    assert outputs[2][0]["data"]["text/plain"] == "('paper', 2)"
    injected = runner.read(result.output)["cells"][1]
    assert injected["metadata"]["tags"] == ["injected-parameters"]
    assert injected["source"] == "size = 'paper'"


def test_parameters_that_can_not_be_set_are_refused(tmp_path):
    with pytest.raises(ValueError, match="tag 'parameters'"):
        run(tmp_path, "1", parameters={"size": 1})
    with pytest.raises(ValueError, match="size=<object.*literal"):
        run(tmp_path, "1", tags={0: ["parameters"]}, parameters={"size": object()})


def test_rich_representations_and_display(tmp_path):
    cell = """
    class Rich:
        def _repr_html_(self): return "<b>x</b>"
        def _repr_markdown_(self): return "**x**"
        def _repr_latex_(self): return "$x$"
        def _repr_png_(self): return b"png", {"alt": "a picture"}
    class Bundle:
        def _repr_mimebundle_(self, include=None, exclude=None):
            return {"text/plain": "p", "text/html": "h"}, {"text/html": {"k": 1}}
        def _repr_html_(self): raise AssertionError("the bundle comes first")
    class Silent:
        _repr_html_ = None
        def _repr_markdown_(self): return None
    display(Rich(), Bundle(), metadata={"text/html": {"k": 2}})
    display({"text/plain": "raw"}, raw=True)
    display(Rich)
    Silent()
    """
    result, (outputs,) = run(tmp_path, cell)
    assert result.ok, result.error
    rich, bundle, raw, kind, silent = outputs
    assert rich["output_type"] == "display_data"
    assert rich["data"]["text/html"] == "<b>x</b>" and rich["data"]["image/png"] == "cG5n"
    assert {"text/markdown", "text/latex", "text/plain"} < set(rich["data"])
    assert rich["metadata"] == {"image/png": {"alt": "a picture"}, "text/html": {"k": 2}}
    assert bundle["data"] == {"text/plain": "p", "text/html": "h"}
    assert raw["data"] == {"text/plain": "raw"}
    assert set(kind["data"]) == set(silent["data"]) == {"text/plain"}


def test_an_object_that_answers_to_every_name_is_plain():
    from unittest.mock import MagicMock

    assert set(standin.bundle(MagicMock())[0]) == {"text/plain"}


def test_figures_are_shown_once_and_closed(tmp_path):
    pytest.importorskip("matplotlib")
    cells = (
        "import matplotlib.pyplot as plt\nplt.plot([1, 2]);\nplt.show()",
        "fig, ax = plt.subplots()\nfig",
        "plt.get_fignums()",
    )
    result, outputs = run(tmp_path, *cells)
    assert result.ok, result.error
    assert [[sorted(o["data"]) for o in cell] for cell in outputs] == [
        [["image/png", "text/plain"]],
        [["image/png", "text/plain"]],
        [["text/plain"]],
    ]


def test_the_notebook_itself_is_never_written(tmp_path):
    path = write(tmp_path / "nb.ipynb", "1")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="is the notebook itself"):
        runner.run_notebook(path, output=tmp_path / "." / "nb.ipynb", progress=False)
    assert runner.run_notebook(path, progress=False).output is None
    assert path.read_bytes() == before


def test_another_format_is_refused(tmp_path):
    path = tmp_path / "old.ipynb"
    path.write_text('{"nbformat": 3, "worksheets": []}', encoding="utf-8")
    with pytest.raises(ValueError, match="wants notebook format 4, got 3"):
        runner.run_notebook(path, progress=False)


def test_progress_goes_to_stderr_with_the_section(tmp_path, capfd):
    cells = ("#md\n# Title\n```sh\n# no heading\n```", "print('inside')", "#md\n## Fast?", "2")
    runner.run_notebook(write(tmp_path / "nb.ipynb", *cells))
    out, err = capfd.readouterr()
    assert out == "" and "Title" in err and "Fast?" in err and "2/2" in err
    assert "no heading" not in err


def test_it_needs_no_jupyter(tmp_path):
    """A process in which Jupyter can not be imported runs the sample, and export() says so."""
    script = f"""
    import sys
    sys.modules.update(dict.fromkeys({JUPYTER!r}))
    from workbook import pages, report, runner
    result = runner.run_notebook({str(SAMPLE)!r}, output={str(tmp_path / "out.ipynb")!r})
    assert result.ok, result.error.traceback
    assert sys.modules["IPython"] is None
    try:
        report.export([{str(SAMPLE)!r}], {str(tmp_path)!r})
    except pages.MissingJupyter as error:
        print(error)
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    message = done.stdout.strip()
    assert "the HTML export needs nbconvert, nbclient" in message and "\n" not in message
    made = runner.read(tmp_path / "out.ipynb")
    kinds = {
        mime
        for cell in made["cells"]
        for output in cell.get("outputs", ())
        for mime in output.get("data", ())
    }
    assert {"text/html", "text/latex", "text/markdown", "image/png", "text/plain"} <= kinds


def test_the_copy_is_a_valid_notebook(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    out = tmp_path / "out.ipynb"
    assert runner.run_notebook(SAMPLE, output=out, progress=False).ok
    nbformat.validate(nbformat.read(out, as_version=4))
