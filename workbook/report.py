"""Notebooks → self-contained HTML pages with a front page; each notebook is executed first.

Jupyter is needed only when export() is called, and then for `nbclient` and `nbconvert`.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbook import pages, paths, runner

__all__ = ["Page", "execute", "exit_status", "export"]

_HOME = "00_start_here"  # the notebook whose title and first paragraph open the front page
_TITLE = "Workbook"


@dataclass(frozen=True)
class Page:
    """A page that was written; title, summary and figure are HTML.

    `status` is "ok", "failed" (then `error` says at which cell and why) or "not run".
    """

    notebook: Path
    path: Path
    title: str
    summary: str
    figure: str
    ok: bool
    error: str
    status: str
    seconds: float | None
    date: str
    machine: str
    warnings: tuple[str, ...] = ()

    @property
    def number(self) -> str:
        """The part of the name that orders it: 03 of 03_softmax, A1 of A1_profiles."""
        return self.path.stem.split("_")[0]

    @property
    def duration(self) -> str:
        """For people: 48 s, 3 min 20 s; "" when the notebook does not say."""
        if self.seconds is None:
            return ""
        minutes, seconds = divmod(round(self.seconds), 60)
        return f"{minutes} min {seconds} s" if minutes else f"{self.seconds:.1f} s"


def export(
    notebooks: Sequence[Path | str] | None = None,
    out: Path | str | None = None,
    execute: bool = True,
    *,
    parameters: Mapping[str, object] | None = None,
    timeout: int | None = None,
    progress: bool = True,
) -> list[Page]:
    """Write out/<name>.html for each notebook and out/index.html, and say where they are.

    `notebooks` defaults to all of the checkout in reading order, `out` to paths.reports().
    execute=False takes the outputs as they are, for copies that runner.run_notebook() made.
    `timeout` is in seconds for a cell. A notebook that fails still becomes a page, with its
    traceback: see exit_status(). Raises pages.MissingJupyter, pages.FormulaError, tidy.PageError.
    """
    pages.require()
    files = _files(notebooks)
    out = Path(out) if out is not None else paths.reports()
    out.mkdir(parents=True, exist_ok=True)
    if execute:
        for file in files:  # what the text has wrong shows before anything runs for long
            pages.render(_read(file), file.name)
    written, bodies = [], []
    for file in files:
        notebook = _read(file)
        if execute:
            _execute(notebook, file, parameters or {}, timeout, progress)
        rendered = pages.render(notebook, file.name)
        written.append(_page(notebook, file, out, rendered))
        bodies.append(rendered)
        _write_pages(written, bodies)  # an interrupted run leaves what it had
    _write_front(written, bodies, out)
    _say(written, out)
    return written


def execute(
    file: Path | str,
    *,
    parameters: Mapping[str, object] | None = None,
    timeout: int | None = None,
    progress: bool = True,
) -> dict:
    """The notebook `file` with outputs, as an nbformat node: run by Jupyter, in its own folder.

    A failing cell does not raise: metadata["workbook"]["error"] says what happened.
    """
    pages.require()
    file = Path(file).resolve()
    notebook = _read(file)
    _execute(notebook, file, parameters or {}, timeout, progress)
    return notebook


def exit_status(written: Sequence[Page]) -> int:
    """0 when every notebook ran to its end, else 1."""
    return 0 if all(page.ok for page in written) else 1


def _files(notebooks: Sequence[Path | str] | None) -> list[Path]:
    if notebooks is None:
        found = sorted(paths.notebooks().glob("*.ipynb"))
    else:
        found = [Path(file).resolve() for file in notebooks]
    if not found:
        raise ValueError("notebooks: none given and none in notebooks/: name at least one")
    names = [file.stem for file in found]
    for file in found:
        if not file.is_file():
            raise FileNotFoundError(f"notebooks: there is no {file}")
        if names.count(file.stem) > 1:
            raise ValueError(f"notebooks: two are named {file.stem}, and one page would be lost")
    return found


def _read(file: Path) -> dict:
    import nbformat

    return nbformat.from_dict(runner.read(file))


def _execute(
    notebook: dict, file: Path, parameters: Mapping, timeout: int | None, progress: bool
) -> None:
    """Run `notebook` in place, with a progress bar over its code cells on stderr."""
    from tqdm import tqdm

    runner.clear(notebook)
    runner.inject(notebook, parameters)
    note, titles = runner.stamp(), runner.sections(notebook.cells)
    total = sum(cell.cell_type == "code" for cell in notebook.cells)
    start = time.perf_counter()
    with tqdm(total=total, desc=file.stem, unit="cell", disable=not progress) as bar:
        error = _run(
            notebook,
            file.parent,
            timeout,
            begin=lambda index: bar.set_postfix_str(titles[index][:40]),
            end=lambda index: bar.update(notebook.cells[index].cell_type == "code"),
        )
    seconds = time.perf_counter() - start
    notebook.metadata["workbook"] = note | runner.finished(seconds, error)


def _run(notebook: dict, folder: Path, timeout: int | None, begin: Callable, end: Callable) -> str:
    """Run with Jupyter; "" or what stopped it. `begin` and `end` get the index of each cell."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    at = 0

    def started(cell: Mapping, cell_index: int) -> None:
        nonlocal at
        at = cell_index
        begin(at)

    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_manager_class=_kernel_class(),
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
        on_cell_start=started,
        on_cell_complete=lambda cell, cell_index: end(cell_index),
    )
    try:
        client.execute(env=_environment())
    except CellExecutionError as failure:
        return _failure(notebook, at, failure.ename, failure.evalue)
    except (CellTimeoutError, DeadKernelError) as failure:
        name, text = type(failure).__name__, str(failure).strip()
        output = {"output_type": "error", "ename": name, "evalue": text, "traceback": [text]}
        notebook.cells[at].outputs.append(type(notebook)(output))
        return _failure(notebook, at, name, text)
    return ""


def _environment() -> dict[str, str]:
    """The kernel imports this very workbook, and shows figures in the notebook."""
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    search = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, search))}


def _failure(notebook: dict, index: int, name: str, value: str) -> str:
    """One line: the cell by its place in the source and by Jupyter's [count], and the error."""
    number, count = runner.numbers(notebook.cells)[index], notebook.cells[index].execution_count
    first = value.strip().partition("\n")[0]
    return f"cell {number}{f' [{count}]' if count else ''}: {name}: {first}"


def _kernel_class() -> type:
    """Kernels run sys.executable, even where the user's kernelspec "python3" is another Python."""
    from ipykernel.kernelspec import make_ipkernel_cmd
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    class ThisPython(AsyncKernelManager):
        @property
        def kernel_spec(self) -> KernelSpec:
            return KernelSpec(
                argv=[*make_ipkernel_cmd(executable=sys.executable), "--log-level=ERROR"],
                display_name="Python 3",
                language="python",
            )

    return ThisPython


def _page(notebook: Mapping, file: Path, out: Path, rendered: pages.Rendered) -> Page:
    note = notebook["metadata"].get("workbook", {})
    error, status = note.get("error") or _found_error(notebook), "ok"
    if error:
        status = "failed"
    elif not any(cell.get("execution_count") for cell in notebook["cells"]):
        status = "not run"
    for warning in rendered.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return Page(
        notebook=file,
        path=out / f"{file.stem}.html",
        title=rendered.title,
        summary=rendered.summary,
        figure=rendered.figure,
        ok=not error,
        error=error,
        status=status,
        seconds=note.get("seconds"),
        date=note.get("date", ""),
        machine=note.get("machine", ""),
        warnings=tuple(rendered.warnings),
    )


def _found_error(notebook: Mapping) -> str:
    """What stopped a notebook that says nothing of its run, as others than we ran it."""
    for index, cell in enumerate(notebook["cells"]):
        for output in cell.get("outputs", ()):
            if output["output_type"] == "error" and "raises-exception" not in runner.tags(cell):
                return _failure(notebook, index, output["ename"], output["evalue"])
    return ""


def _write_pages(written: Sequence[Page], bodies: Sequence[pages.Rendered]) -> None:
    """Write the last page and the one before it, which now knows its successor."""
    home = next((page.title for page in written if page.path.stem == _HOME), _TITLE)
    for index in range(max(0, len(written) - 2), len(written)):
        page, rendered = written[index], bodies[index]
        text = pages.fill(
            "page.html.j2",
            page=page,
            body=rendered.body,
            contents=rendered.contents,
            home=home,
            before=written[index - 1] if index else None,
            after=written[index + 1] if index + 1 < len(written) else None,
        )
        page.path.write_text(text, encoding="utf-8")


def _write_front(written: Sequence[Page], bodies: Sequence[pages.Rendered], out: Path) -> None:
    home = next((i for i, page in enumerate(written) if page.path.stem == _HOME), None)
    front = out / "index.html"
    if home is None and front.exists() and (out / f"{_HOME}.html").exists():
        return  # a part was exported again: the front page of all stays
    ran = {(page.machine, page.date[:10]) for page in written if page.machine}
    text = pages.fill(
        "landing.html.j2",
        home=None if home is None else written[home],
        title=_TITLE if home is None else written[home].title,
        lead="" if home is None else bodies[home].lead,
        pages=written,
        counts=Counter(page.status for page in written),
        ran=[f"{machine} · {date}" for machine, date in sorted(ran)],
    )
    front.write_text(text, encoding="utf-8")


def _say(written: Sequence[Page], out: Path) -> None:
    for page in written:
        if not page.ok:
            print(f"FAILED {page.notebook.name}, {page.error}", file=sys.stderr)
    count = "1 page" if len(written) == 1 else f"{len(written)} pages"
    print(f"{count}: open {(out / 'index.html').resolve()}")
