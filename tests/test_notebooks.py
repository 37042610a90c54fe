"""The notebooks as tests: they go red at the check when a kernel is wrong, and run without one.

Each runs in a scratch copy of the checkout, in a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sum_chain import PROBLEM, needs_compiler

from workbook import journal

ROOT = Path(__file__).resolve().parents[1]
NAME = f"01_{PROBLEM.slug}"
BIAS = " + *p.b_sum"  # in the kernel of the drop-in: the wrong kernel lacks it
LEFT_OUT = (".git", ".venv", ".runs", ".hypothesis", "reports", "__pycache__", ".*_cache")
JUPYTER = ("nbmake", "nbclient", "nbformat", "ipykernel")
LACKING = [name for name in JUPYTER if importlib.util.find_spec(name) is None]


@pytest.fixture
def checkout(tmp_path) -> Path:
    """What a person has after a clone, where this checkout has its changes too."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
    return copy


def surroundings(checkout: Path, **env: str | None) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WORKBOOK_") or "CACHE" in k}
    path = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH")]))
    kept |= {"PYTHONPATH": path, "WORKBOOK_SIZE": "laptop", "WORKBOOK_DEVICE": "cpu"}
    kept |= {"PYTHONDONTWRITEBYTECODE": "1", "NO_COLOR": "1", "PY_COLORS": "0"}
    kept |= {"WORKBOOK_RUNS": str(checkout / ".runs")}
    return {k: v for k, v in (kept | env).items() if v is not None}


def cells(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def check_cell(path: Path) -> int:
    """Where the notebook holds its kernel against the rule."""
    (found,) = [
        i for i, cell in enumerate(cells(path))
        if cell["cell_type"] == "code" and "check.require()" in source(cell)
    ]  # fmt: skip
    return found


def cut_after(path: Path, last: int) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    notebook["cells"] = notebook["cells"][: last + 1]
    path.write_text(json.dumps(notebook), encoding="utf-8")


def sabotage(checkout: Path) -> None:
    kernel = checkout / "kernels" / PROBLEM.slug / "cpu.cpp"
    text = kernel.read_text(encoding="utf-8")
    assert text.count(BIAS) == 1, f"cpu.cpp has no {BIAS!r}: the test needs another sabotage"
    kernel.write_text(text.replace(BIAS, ""), encoding="utf-8")


def nbmake(checkout: Path) -> subprocess.CompletedProcess:
    """What a person types, but for the path of the plugin's cache."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--nbmake", f"notebooks/{NAME}.ipynb"],
        cwd=checkout, env=surroundings(checkout), capture_output=True, text=True, timeout=240,
    )  # fmt: skip


@needs_compiler
@pytest.mark.skipif(bool(LACKING), reason=f"no {', '.join(LACKING)} here")
@pytest.mark.parametrize("sabotaged", [False, True])
def test_nbmake_goes_red_at_the_check_cell_when_a_kernel_drops_the_bias(checkout, sabotaged):
    path = checkout / "notebooks" / f"{NAME}.ipynb"
    place = check_cell(path)
    cut_after(path, place)
    if sabotaged:
        sabotage(checkout)
    done = nbmake(checkout)
    told = f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    records = journal.load(checkout / ".runs").query(kind="check", variant="fused")
    assert records, f"the check cell was not reached\n{told}"
    if not sabotaged:
        assert done.returncode == 0 and re.search(r"\b1 passed", done.stdout), told
        assert all(r.passed for r in records)
        return
    assert done.returncode == 1 and re.search(r"\b1 failed", done.stdout), told
    assert "CheckFailed" in done.stdout and "check.require()" in done.stdout, told
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    assert f"In[{len(code)}]" in plain, f"another cell than the one of the check\n{told}"
    assert re.search(r"-> \d+ check\.require\(\)", plain), told
    assert not all(r.passed for r in records)


RUN = """
import sys
from workbook.runner import run_notebook
result = run_notebook(sys.argv[1], parameters={"BUDGET_S": 0.5}, output=sys.argv[2], progress=False)
print(result.error)
raise SystemExit(not result.ok)
"""


def text_of(outputs: list[dict]) -> str:
    parts = []
    for output in outputs:
        parts.append("".join(output.get("text", "")))
        parts.append("".join(output.get("data", {}).get("text/plain", "")))
    return "\n".join(parts)


def test_without_a_compiler_it_runs_to_the_end_on_plain_torch_and_says_what_is_missing(
    checkout, tmp_path
):
    path, out = checkout / "notebooks" / f"{NAME}.ipynb", tmp_path / "executed.ipynb"
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(path), str(out)], cwd=tmp_path,
        env=surroundings(
            checkout, PATH="/nowhere", CXX=None, CUDA_HOME=None, CUDA_PATH=None,
            WORKBOOK_CACHE=str(tmp_path / "cache"),
        ),
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    made = [cell for cell in cells(out) if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in made), "every cell was run"
    shown = [text_of(cell["outputs"]) for cell in made]
    (line,) = [
        line for text in shown for line in text.splitlines() if "plain torch runs instead" in line
    ]
    assert "no C++ compiler" in line and "apt install g++" in line
    assert not list((tmp_path / "cache").rglob("*.so")), "nothing was built"
    records = journal.load(checkout / ".runs")
    fused = records.query(kind="check", variant="fused")
    assert fused and all(r.passed for r in fused), "the plain path is held to the same rule"
    bench = {r.variant: r for r in records.query(kind="bench", size="laptop", part="")}
    assert bench["fused"].samples_ms and bench["fused"].passed
    assert "CompilerMissing" in bench["cpu"].reason and not bench["cpu"].samples_ms


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_a_check_in_a_notebook_is_required(path):
    """A result that is only shown fails nobody."""
    text = "\n".join(source(c) for c in cells(path) if c["cell_type"] == "code")
    for name in re.findall(r"(?m)^(\w+) = wb\.check\(", text):
        assert f"{name}.require()" in text, name
