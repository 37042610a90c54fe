"""The export: formulas, outputs, failures, links, what it refuses, and a kernel of this Python."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

for needed in ("nbconvert", "nbclient", "nbformat", "ipykernel", "math_core"):
    pytest.importorskip(needed, reason="the export needs Jupyter: pip install -e .")

from workbook import pages, report, runner, tidy  # noqa: E402

SAMPLE = Path(__file__).parent / "data" / "sample.ipynb"
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYGBgAAAABQABXvMqOgAAAABJRU5ErkJg"
    "gg=="
)


def notebook(*cells: object, **metadata: object) -> dict:
    """Markdown from strings, code cells from (source, outputs) or (source, outputs, tags)."""
    import nbformat

    made = []
    for number, cell in enumerate(cells):
        new = {"id": f"c{number}", "metadata": {}}
        if isinstance(cell, str):
            new |= {"cell_type": "markdown", "source": cell}
        else:
            source, outputs, *tags = cell
            new |= {"cell_type": "code", "source": source, "outputs": outputs}
            new |= {"execution_count": None if outputs is None else 1}
            new["outputs"] = outputs or []
            new["metadata"] = {"tags": tags[0]} if tags else {}
        made.append(new)
    whole = {"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": made}
    return nbformat.from_dict(whole)


def shown(metadata: dict | None = None, **data: str) -> dict:
    """An output of one MIME type: shown(text_html="<b>")."""
    return {
        "output_type": "display_data",
        "data": {name.replace("_", "/", 1): value for name, value in data.items()},
        "metadata": metadata or {},
    }


def body(*cells: object) -> str:
    return pages.render(notebook(*cells), "nb.ipynb").body


def save(path: Path, *cells: object) -> Path:
    path.write_text(json.dumps(notebook(*cells)), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "tex",
    [
        r"\sum_{n=1}^{N} x_n",
        r"\underbrace{\sum_n W_n}_{w}",
        r"\left( \frac{a}{b} \right)",
        r"\begin{aligned} a &= b \\ &= c \end{aligned}",
        r"\begin{pmatrix} a & b \\ c & d \end{pmatrix}",
        r"\begin{cases} a & x > 0 \\ b & \text{otherwise} \end{cases}",
        r"x \in \mathbb{R}^{B \times K}, \; \mathcal{O}(n), \mathbf{1}^\top, \mathrm{GELU}",
        r"\operatorname{logsumexp}(x) \operatorname*{max}_n z_n",
        r"\lVert x \rVert_2 \le \bigl|A\bigr| + \lfloor N/p \rfloor",
        r"\tfrac12 \sqrt{\sigma^2 + \varepsilon} \cdot \hat{y} \bar{x} \Phi(z / \sqrt2)",
        r"\xrightarrow{\text{fold}} \overset{!}{=} \ldots \infty",
    ],
)
def test_formulas_become_mathml_in_every_place(tex):
    inline = body(f"# T\n\nso ${tex}$ holds")
    assert "<math>" in inline and "$" not in inline
    assert '<math display="block">' in body(f"# T\n\n$$\n{tex}\n$$")
    assert '<math display="block">' in body(("x", [shown(text_latex=f"$\\displaystyle {tex}$")]))
    assert "<math>" in body(("x", [shown(text_markdown=f"so ${tex}$")]))
    escaped = tex.replace("&", "&amp;").replace("<", "&lt;")
    assert "<math>" in body(("x", [shown(text_html=f"<p>so ${escaped}$</p>")]))


def test_environments_are_numbered_through_the_page():
    first = "\\begin{align}a &= b \\\\ c &= d\\end{align}"
    made = body(f"{first}\n\ntext\n\n\\begin{{equation}}e\\end{{equation}}")
    assert re.findall(r"\((\d)\)", made) == ["1", "2", "3"]


def test_all_formulas_without_mathml_are_named_with_their_cells():
    with pytest.raises(pages.FormulaError) as error:
        body("fine $x$", "bad $\\foo{x}$", ("y", [shown(text_latex=r"\frac{a}")]))
    text = str(error.value)
    assert "nb.ipynb, cell 1: no MathML for `\\foo{x}`" in text
    assert "nb.ipynb, cell 2: no MathML for `\\frac{a}`" in text


def test_a_bad_formula_shows_before_anything_runs(tmp_path):
    ran = tmp_path / "ran"
    files = [
        save(tmp_path / "a.ipynb", "# T", (f"open({str(ran)!r}, 'w')", None)),
        save(tmp_path / "b.ipynb", "# T $\\foo$"),
    ]
    with pytest.raises(pages.FormulaError, match=r"b.ipynb, cell 0"):
        report.export(files, tmp_path, progress=False)
    assert not ran.exists()


@pytest.mark.parametrize(
    "cell",
    [
        "stray \\alpha in prose",
        ("x", [shown(text_html="<p>stray \\frac</p>")]),
    ],
)
def test_raw_tex_is_refused(cell):
    with pytest.raises(tidy.PageError, match=r"nb.ipynb, cell 1: raw TeX"):
        body("# T", cell)


def test_a_table_that_a_formula_breaks_is_refused():
    with pytest.raises(tidy.PageError, match=r"nb.ipynb, cell 1: a table .* \\lvert"):
        body("# T", "| a | b |\n|---|---|\n| $|x|_2$ | 1 |")


def test_code_may_hold_dollars_and_backslashes():
    made = body("`$CXX` and\n\n```sh\necho $CXX \\alpha $x_1$\n```", ("print('$x_1$')", []))
    assert "<math" not in made


@pytest.mark.parametrize(
    "html",
    [
        '<img alt="x" src="https://example.org/x.png">',
        '<img alt="x" src="x.png">',
        "<script>1</script>",
        '<p onclick="f()">x</p>',
        '<link rel="stylesheet" href="x.css">',
        "<iframe></iframe>",
        "<style>@import 'x.css';</style>",
        '<p style="background: url(x.png)">x</p>',
    ],
)
def test_what_would_not_work_offline_is_refused(html):
    with pytest.raises(tidy.PageError, match=r"nb.ipynb, cell 1: "):
        body("# T", ("x", [shown(text_html=html)]))


def test_images_carry_their_text_and_those_without_are_named():
    alt = {"image/png": {"alt": 'eager "2" < 3'}}
    good = pages.render(notebook(("x", [shown(alt, image_png=PIXEL)])), "nb.ipynb")
    image = tidy.soup(good.body).find("img")
    assert image["alt"] == 'eager "2" < 3' and image["src"].startswith("data:image/png;base64,")
    assert good.warnings == [] and "data:image/png" in good.figure
    own = f'<img alt="own" src="data:image/png;base64,{PIXEL}">'
    assert pages.render(notebook(("x", [shown(text_html=own)])), "nb.ipynb").warnings == []
    (warning,) = pages.render(notebook("# T", ("x", [shown(image_png=PIXEL)])), "nb").warnings
    assert warning.startswith("nb, cell 1: an image without alternative text")


def test_tags_hide_input_cell_or_output():
    cell = ("secret = 1", [shown(text_plain="seen")])
    assert "secret" in body(cell) and "seen" in body(cell)
    for tag, source, output in [
        ("remove-input", False, True),
        ("remove-output", True, False),
        ("remove-cell", False, False),
    ]:
        made = body((*cell, [tag]))
        assert ("secret" in made, "seen" in made) == (source, output)


def test_long_outputs_fold_and_progress_bars_show_their_end():
    long = {"output_type": "stream", "name": "stdout", "text": "line\n" * 40}
    assert "40 lines of output" in body(("x", [long]))
    bar = {"output_type": "stream", "name": "stderr", "text": "\r 0%\r 50%\x1b[A\r100%\nnext\n"}
    assert '<pre class="stderr">100%\nnext</pre>' in body(("x", [bar]))


def test_colours_of_a_terminal_and_markup_in_text_do_not_reach_the_page():
    made = body(("x", [shown(text_plain="\x1b[31m<b>red</b>\x1b[0m")]))
    assert "&lt;b&gt;red&lt;/b&gt;" in made and "\x1b" not in made


def test_title_summary_contents_and_anchors():
    first = "# The *title*\n\nFirst $x$ [link](a.ipynb). Second."
    made = pages.render(notebook(first, "## A b\n\n### c", "## A b"), "nb.ipynb")
    assert made.title == "The <em>title</em>"
    assert made.summary.startswith("First <math>") and made.summary.endswith("link.")
    assert [(h.level, h.anchor) for h in made.contents] == [(2, "A-b"), (3, "c"), (2, "A-b-2")]
    assert 'href="a.html"' in made.body and 'id="A-b-2"' in made.body


def test_tables_lose_the_styles_of_pandas():
    html = "<style scoped>th {color: red}</style><table border='1' class='dataframe'></table>"
    made = body(("x", [shown(text_html=html)]))
    assert "<style" not in made and "border" not in made and 'class="table"' in made


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Three notebooks, the second of which fails, exported with execution."""
    folder = tmp_path_factory.mktemp("notebooks")
    (folder / "beside.txt").write_text("found", encoding="utf-8")
    shows = "import sys\nprint(sys.executable, open('beside.txt').read(), SIZE)"
    files = [
        save(
            folder / "00_start_here.ipynb",
            "# Home\n\nThe lead.",
            ("SIZE = 'laptop'", None, ["parameters"]),
            (shows, None),
        ),
        save(
            folder / "01_bad.ipynb",
            "# Bad\n\nIt fails.",
            ("SIZE = 1", None, ["parameters"]),
            ("1 / 0", None),
            ("'never'", None),
        ),
        save(folder / "02_good.ipynb", "# Good", ("SIZE = 1", None, ["parameters"])),
    ]
    out = folder / "out"
    before = [file.read_bytes() for file in files]
    written = report.export(files, out, parameters={"SIZE": "paper"}, progress=False)
    assert [file.read_bytes() for file in files] == before
    return written, out


def test_the_kernel_is_this_python_in_the_folder_of_the_notebook(exported):
    text = (exported[1] / "00_start_here.html").read_text(encoding="utf-8")
    assert f"{sys.executable} found paper" in text


def test_a_user_level_python3_kernel_does_not_matter(tmp_path, monkeypatch):
    spec = tmp_path / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    wrong = {"argv": ["/nowhere/python"], "display_name": "wrong", "language": "python"}
    spec.write_text(json.dumps(wrong), encoding="utf-8")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    file = save(tmp_path / "nb.ipynb", ("import sys\nsys.executable", None))
    made = report.execute(file, progress=False)
    assert made["cells"][0]["outputs"][0]["data"]["text/plain"] == repr(sys.executable)


def test_a_failure_is_a_page_with_its_traceback_and_a_status(exported):
    written, out = exported
    assert [page.status for page in written] == ["ok", "failed", "ok"]
    assert [page.ok for page in written] == [True, False, True]
    assert report.exit_status(written) == 1 and report.exit_status(written[::2]) == 0
    assert written[1].error == "cell 2 [3]: ZeroDivisionError: division by zero"
    text = (out / "01_bad.html").read_text(encoding="utf-8")
    assert 'id="failure"' in text and "----&gt; 1" in text and "stopped before its end" in text


def test_pages_link_to_their_neighbours_and_the_front_page(exported):
    text = (exported[1] / "01_bad.html").read_text(encoding="utf-8")
    page = tidy.soup(text)
    links = {link["rel"][0]: link["href"] for link in page.select("nav.turn a")}
    assert links == {"prev": "00_start_here.html", "next": "02_good.html"}
    assert page.select_one("a.home")["href"] == "index.html"


def test_the_front_page_has_the_lead_a_card_for_each_and_where_it_ran(exported):
    written, out = exported
    page = tidy.soup((out / "index.html").read_text(encoding="utf-8"))
    assert page.h1.get_text() == "Home" and page.select_one(".lead").get_text() == "The lead."
    cards = [card.select_one("h2 a")["href"] for card in page.select(".card")]
    assert cards == ["01_bad.html", "02_good.html"]
    assert [s.get_text() for s in page.select("header .status")] == ["2 ok", "1 failed"]
    assert written[0].machine in page.select_one("header .ran").get_text()


def test_a_part_exported_again_leaves_the_front_page_of_all(exported):
    written, out = exported
    front = (out / "index.html").read_bytes()
    again = report.export([written[2].notebook], out, execute=False, progress=False)
    assert [page.path.name for page in again] == ["02_good.html"]
    assert (out / "index.html").read_bytes() == front


def test_it_says_where_the_pages_are_and_what_failed(tmp_path, capsys):
    file = save(tmp_path / "nb.ipynb", "# T", ("raise ValueError('no\\nmore')", None))
    report.export([file], tmp_path / "out")
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == f"1 page: open {tmp_path / 'out' / 'index.html'}"
    assert "FAILED nb.ipynb, cell 1 [1]: ValueError: no\n" in err and "0/1" in err


@pytest.mark.parametrize(
    ("source", "name"),
    [("import os\nos._exit(1)", "DeadKernelError"), ("while True: ...", "CellTimeoutError")],
)
def test_a_kernel_that_dies_or_hangs_is_a_failure(tmp_path, source, name):
    file = save(tmp_path / "nb.ipynb", "# T", (source, None))
    (page,) = report.export([file], tmp_path, timeout=2, progress=False)
    assert page.error.startswith("cell 1") and name in page.error
    assert 'id="failure"' in page.path.read_text(encoding="utf-8")


def test_a_copy_from_the_runner_is_exported_without_running_it(tmp_path):
    copy = tmp_path / "sample.ipynb"
    assert runner.run_notebook(SAMPLE, output=copy, progress=False).ok
    (page,) = report.export([copy], tmp_path, execute=False)
    assert page.ok and page.machine and page.seconds and page.warnings == ()
    failing = save(tmp_path / "bad.ipynb", "# T", ("1 / 0", None))
    runner.run_notebook(failing, output=tmp_path / "copies" / "bad.ipynb", progress=False)
    (page,) = report.export([tmp_path / "copies" / "bad.ipynb"], tmp_path, execute=False)
    assert not page.ok and "ZeroDivisionError" in page.error
    assert "Traceback (most recent call last)" in page.path.read_text(encoding="utf-8")


def test_a_notebook_that_was_never_run_or_failed_elsewhere_is_not_called_ok(tmp_path):
    failed = {"output_type": "error", "ename": "E", "evalue": "why", "traceback": []}
    files = [
        save(tmp_path / "a.ipynb", "# T", ("1", None)),
        save(tmp_path / "b.ipynb", "# T", ("1", [failed])),
        save(tmp_path / "c.ipynb", "# T", ("1", [failed], ["raises-exception"])),
    ]
    written = report.export(files, tmp_path, execute=False)
    assert [page.status for page in written] == ["not run", "failed", "ok"]
    assert written[1].error == "cell 1 [1]: E: why"


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no"):
        report.export([tmp_path / "none.ipynb"], tmp_path)
    with pytest.raises(ValueError, match="none given"):
        report.export([], tmp_path)
    one = save(tmp_path / "nb.ipynb", "# T")
    with pytest.raises(ValueError, match="two are named nb"):
        report.export([one, one], tmp_path)
