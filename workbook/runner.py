"""Run a notebook without Jupyter: the cells in order, in this process, into an executed copy.

For machines that have torch and nothing else. The copy is an ordinary notebook (format 4), which
`report.export(execute=False)` turns into a page wherever Jupyter is installed.
"""

from __future__ import annotations
import __future__

import ast
import itertools
import json
import linecache
import re
import time
import traceback
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from workbook import standin

__all__ = [
    "CellError",
    "RunResult",
    "clear",
    "finished",
    "inject",
    "numbers",
    "read",
    "run_notebook",
    "sections",
    "stamp",
    "tags",
]

_INJECTED = "injected-parameters"  # papermill's name for it
_FORMAT = 4  # of the notebooks: the current one since 2015


@dataclass(frozen=True)
class CellError:
    """The exception that stopped a run: `cell` is as numbers() counts, `line` is from 1."""

    cell: int
    line: int
    source: str
    name: str
    value: str
    traceback: str

    def __str__(self) -> str:
        return f"cell {self.cell}, line {self.line}, `{self.source}`: {self.name}: {self.value}"


@dataclass(frozen=True)
class RunResult:
    """What a run did: `cells` code cells in `seconds`; `error` says why it stopped, if it did."""

    path: Path
    seconds: float
    cells: int
    ok: bool
    error: CellError | None
    output: Path | None


def run_notebook(
    path: Path | str,
    *,
    parameters: Mapping[str, object] | None = None,
    output: Path | str | None = None,
    progress: bool = True,
) -> RunResult:
    """Run the code cells of the notebook at `path` in order and write the executed copy.

    The working directory is the notebook's folder, `__name__` is "__main__", and the value of a
    cell's last expression is displayed. The first exception stops the run: it is recorded in the
    copy and in the result, not raised. `output` must not be the notebook itself (ValueError).
    """
    path = Path(path).resolve()
    output = Path(output).resolve() if output is not None else None
    if output == path:
        raise ValueError(f"output: {output} is the notebook itself: name another file")
    notebook = read(path)
    inject(notebook, parameters or {})
    clear(notebook)
    note = stamp()
    session = _Session(path)
    start = time.perf_counter()
    try:
        with standin.surroundings(session.module, path.parent, session.outputs.display):
            _run_cells(session, notebook["cells"], progress)
    finally:  # an interrupted run leaves what it had, too
        seconds = time.perf_counter() - start
        error = str(session.error) if session.error else ""
        notebook.setdefault("metadata", {})["workbook"] = note | finished(seconds, error)
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(notebook, indent=1, ensure_ascii=False)
            output.write_text(text + "\n", encoding="utf-8")
    return RunResult(path, seconds, session.count, session.error is None, session.error, output)


def read(path: Path) -> dict:
    """The notebook at `path` as a dictionary; ValueError unless it is of format 4."""
    notebook = json.loads(Path(path).read_text(encoding="utf-8"))
    if notebook.get("nbformat") != _FORMAT:
        got = notebook.get("nbformat")
        raise ValueError(f"{path}: wants notebook format {_FORMAT}, got {got}: save it in Jupyter")
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
    return notebook


def clear(notebook: dict) -> None:
    """Drop what an earlier run left."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None


def inject(notebook: dict, parameters: Mapping[str, object]) -> None:
    """Put a cell that sets `parameters` after the cell tagged "parameters" (papermill's rule).

    Values must be plain literals. ValueError when one is not, or when no cell has the tag.
    """
    if not parameters:
        return
    for name, value in parameters.items():
        if not name.isidentifier() or not _is_literal(value):
            raise ValueError(
                f"parameters: {name}={value!r} is not a name and a literal: "
                "give numbers, strings, None, and lists or dictionaries of them"
            )
    cells = notebook["cells"]
    tagged = [i for i, cell in enumerate(cells) if "parameters" in tags(cell)]
    if not tagged:
        raise ValueError(
            f"parameters: {', '.join(parameters)} can not be set, as no cell of the notebook has "
            "the tag 'parameters': tag the one that holds the defaults"
        )
    cell = type(cells[tagged[0]])(cells[tagged[0]])
    cell["metadata"] = {"tags": [_INJECTED]}
    cell["source"] = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
    if "id" in cell:
        cell["id"] = "injected-parameters"
    cells.insert(tagged[0] + 1, cell)


def numbers(cells: Iterable[Mapping]) -> list[int]:
    """The place of each cell in the notebook's source, from 0; -1 for one that inject() made."""
    given = itertools.count()
    return [-1 if _INJECTED in tags(cell) else next(given) for cell in cells]


def sections(cells: Iterable[Mapping]) -> list[str]:
    """For each cell, the last Markdown heading at or before it ("" before the first)."""
    titles, title = [], ""
    for cell in cells:
        if cell["cell_type"] == "markdown":
            prose = re.sub(r"(?ms)^```.*?^```", "", "".join(cell["source"]))
            title = ([title] + re.findall(r"(?m)^#{1,6} +(.+?) *$", prose))[-1]
        titles.append(title)
    return titles


def stamp() -> dict:
    """What an executed notebook says about where and when it ran."""
    from workbook import machine

    return {
        "machine": machine.describe(machine.default_device()),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def finished(seconds: float, error: str) -> dict:
    """The rest of the stamp; `error` is "" after a run without one."""
    return {"seconds": round(seconds, 1), "error": error}


def tags(cell: Mapping) -> list[str]:
    """The tags of a cell."""
    return cell.get("metadata", {}).get("tags", [])


def _run_cells(session: _Session, cells: list[dict], progress: bool) -> None:
    from tqdm import tqdm

    wanted = [
        (number, cell, title)
        for number, cell, title in zip(numbers(cells), cells, sections(cells), strict=True)
        if cell["cell_type"] == "code" and "skip-execution" not in tags(cell)
    ]
    name = session.path.stem
    with tqdm(total=len(wanted), desc=name, unit="cell", disable=not progress) as bar:
        for number, cell, title in wanted:
            bar.set_postfix_str(title[:40])
            error = session.run(number, cell)
            bar.update()
            if error is not None and "raises-exception" not in tags(cell):
                session.error = error
                return


class _Session:
    """One namespace, and the outputs of the cell that runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outputs = standin.Outputs()
        self.count = 0
        self.error: CellError | None = None
        self.module = types.ModuleType("__main__")
        self.module.__dict__.update(__builtins__=__builtins__, display=self.outputs.display)
        self._flags = 0

    def run(self, number: int, cell: dict) -> CellError | None:
        """Run one code cell into its own outputs; return its exception, if any."""
        self.count += 1
        cell["execution_count"] = self.count
        self.outputs.items = cell["outputs"]
        source, file = cell["source"], f"<{self.path.name} cell {number}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        try:
            with self.outputs.capture():
                value = self._execute(source, file)
                if value is not None and not source.rstrip().endswith(";"):
                    self.module.__dict__["_"] = value
                    self.outputs.result(value, self.count)
                self.outputs.figures()
        except KeyboardInterrupt as interrupt:
            self.error = self._record(interrupt, number, file)
            raise
        except (Exception, SystemExit) as exception:
            return self._record(exception, number, file)
        return None

    def _execute(self, source: str, file: str) -> object:
        """Execute a cell; the value of its last expression, if it ends in one."""
        names = self.module.__dict__
        try:
            tree = ast.parse(source, file)
        except SyntaxError:
            _refuse_magics(source)
            raise
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(self._compile(tree, file, "exec"), names)
        if last is None:
            return None
        return eval(self._compile(ast.Expression(last.value), file, "eval"), names)

    def _compile(self, tree: ast.AST, file: str, mode: str) -> types.CodeType:
        code = compile(tree, file, mode, flags=self._flags, dont_inherit=True)
        # `from __future__ import annotations` holds for later cells too
        self._flags |= code.co_flags & __future__.annotations.compiler_flag
        return code

    def _record(self, exception: BaseException, number: int, file: str) -> CellError:
        frames = exception.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != file:
            frames = frames.tb_next  # leave out the runner's own frames
        shown = traceback.TracebackException(type(exception), exception, frames)
        text = "".join(shown.format())
        lines = [frame.lineno for frame in shown.stack if frame.filename == file]
        line = (lines[0] if lines else getattr(exception, "lineno", None)) or 1
        name, value = type(exception).__name__, str(exception)
        self.outputs.items.append(
            {
                "output_type": "error",
                "ename": name,
                "evalue": value,
                "traceback": text.splitlines(),
            }
        )
        return CellError(number, line, linecache.getline(file, line).strip(), name, value, text)


def _refuse_magics(source: str) -> None:
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith(("%", "!")):
            error = SyntaxError(
                f"{line.strip()!r} is an IPython magic, which only Jupyter runs: "
                "write it in plain Python"
            )
            error.lineno = number
            raise error from None


def _is_literal(value: object) -> bool:
    try:
        return ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError):
        return False
