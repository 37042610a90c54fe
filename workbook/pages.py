"""An executed notebook → one HTML page that needs nothing else: no network, no script, no MathJax.

nbconvert does the walking, the template in templates/workbook the layout; formulas become MathML
here, and `tidy` finishes the page and refuses what would not work offline.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from workbook import runner, tidy

__all__ = ["FormulaError", "MissingJupyter", "Rendered", "fill", "render", "require"]

TEMPLATES = Path(__file__).resolve().parent / "templates"
_PRIORITY = [
    "text/html",
    "text/markdown",
    "text/latex",
    "image/svg+xml",
    "image/png",
    "image/jpeg",
    "text/plain",
]
_DELIMITERS = re.compile(
    r"\$\$(?P<dollars>.+?)\$\$|\\\[(?P<brackets>.+?)\\\]|"
    r"(?<![\\$])\$(?P<inline>[^\s$](?:[^$]*?[^\s$\\])?)\$|\\\((?P<parens>.+?)\\\)",
    re.DOTALL,
)


class MissingJupyter(RuntimeError):
    """A package that only the export needs is not installed."""


class FormulaError(ValueError):
    """Formulas that can not become MathML; the message names notebook, cell and formula of each."""


@dataclass(frozen=True)
class Rendered:
    """The body of a page and what the landing page shows of it; all strings are HTML."""

    body: str
    title: str
    lead: str
    summary: str
    contents: Sequence[tidy.Heading]
    figure: str
    warnings: Sequence[str] = field(default=())


def require() -> None:
    """Raise MissingJupyter, in one line with the remedy, unless the export's packages are there."""
    from importlib.util import find_spec

    wanted = ("nbconvert", "nbclient", "nbformat", "ipykernel", "math_core")
    missing = [name.replace("_", "-") for name in wanted if find_spec(name) is None]
    if missing:
        raise MissingJupyter(
            f"the HTML export needs {', '.join(missing)}: pip install {' '.join(missing)}"
        )


def render(notebook: Mapping, name: str) -> Rendered:
    """The executed `notebook` (an nbformat node) as HTML; `name` is for messages.

    FormulaError for TeX without MathML, tidy.PageError for what would not work offline.
    """
    formulas = Formulas(name)
    for number, cell in zip(runner.numbers(notebook["cells"]), notebook["cells"], strict=True):
        cell["metadata"]["number"] = number
    html, _ = _exporter(formulas).from_notebook_node(notebook)
    soup = tidy.soup(html)
    for cell in soup.select("[data-cell]"):
        formulas.cell = int(cell["data-cell"])
        for text in tidy.texts(cell.select(".html")):
            if _DELIMITERS.search(text):
                text.replace_with(tidy.soup(formulas.replace(text)))
    formulas.check()
    page = tidy.finish(soup, name)
    return Rendered(
        body=str(soup),
        title=page.title or name,
        lead=page.lead,
        summary=page.summary,
        contents=page.headings,
        figure=page.figure,
        warnings=page.warnings,
    )


def fill(template: str, **values: object) -> str:
    """A template of templates/workbook, filled; the style sheet is in it."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES / "workbook"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["text"] = tidy.plain
    style = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    return environment.get_template(template).render(style=style, **values)


class Formulas:
    """TeX → MathML for one page: equations are numbered through it, failures are collected."""

    def __init__(self, name: str) -> None:
        from math_core import LatexError, LatexToMathML

        self.name, self.cell = name, 0
        self.failures: list[str] = []
        self._converter = LatexToMathML(fancy_error=False)
        self._error = LatexError

    def mathml(self, tex: str, display: bool) -> str:
        """MathML of `tex`; a failure is kept for check(), so that one run reports them all."""
        try:
            return self._converter.convert_with_global_state(tex.strip(), displaystyle=display)
        except self._error as error:
            where = f"{self.name}, cell {self.cell}"
            self.failures.append(f"{where}: no MathML for `{tex.strip()}`: {error}")
            return ""

    def replace(self, text: str) -> str:
        """The plain `text` as HTML with the formulas between TeX delimiters converted."""
        parts, end = [], 0
        for match in _DELIMITERS.finditer(text):
            kind, tex = next((k, v) for k, v in match.groupdict().items() if v is not None)
            parts.append(tidy.escape(text[end : match.start()]))
            parts.append(self.mathml(tex, kind in ("dollars", "brackets")))
            end = match.end()
        return "".join(parts) + tidy.escape(text[end:])

    def latex(self, source: str) -> str:
        """A text/latex output: one formula, with or without delimiters."""
        match = _DELIMITERS.fullmatch(source.strip())
        tex = next(v for v in match.groups() if v is not None) if match else source
        return self.mathml(tex.removeprefix(r"\displaystyle"), display=True)

    def check(self) -> None:
        """Raise FormulaError if anything failed."""
        if self.failures:
            raise FormulaError("\n".join(self.failures))


def _exporter(formulas: Formulas):
    """nbconvert's exporter with our template and filters, and nothing of its lab theme."""
    from jinja2 import pass_context
    from nbconvert.exporters import TemplateExporter
    from nbconvert.filters import Highlight2HTML
    from nbconvert.preprocessors import TagRemovePreprocessor
    from traitlets.config import Config

    @pass_context
    def markdown(context, source: str) -> str:
        formulas.cell = context["cell"].metadata["number"]
        return _markdown(formulas, source, context["cell"].get("attachments"))

    @pass_context
    def latex(context, source: str) -> str:
        formulas.cell = context["cell"].metadata["number"]
        return formulas.latex(source)

    config = Config()
    config.NbConvertBase.display_data_priority = _PRIORITY
    config.TemplateExporter.preprocessors = [TagRemovePreprocessor]
    config.TagRemovePreprocessor.enabled = True
    config.TagRemovePreprocessor.remove_input_tags = {"remove-input"}
    config.TagRemovePreprocessor.remove_cell_tags = {"remove-cell"}
    config.TagRemovePreprocessor.remove_all_outputs_tags = {"remove-output"}
    exporter = TemplateExporter(
        config=config,
        file_extension=".html",
        template_name="workbook",
        extra_template_basedirs=[str(TEMPLATES)],
    )
    exporter.register_filter("markdown2html", markdown)
    exporter.register_filter("latex2mathml", latex)
    exporter.register_filter("highlight_code", Highlight2HTML(pygments_lexer="python"))
    exporter.register_filter("stream", tidy.stream)
    return exporter


def _markdown(formulas: Formulas, source: str, attachments: Mapping | None) -> str:
    """Markdown as Jupyter reads it, formulas as MathML."""
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    class Renderer(IPythonRenderer):
        def inline_math(self, body: str) -> str:
            return formulas.mathml(body, display=False)

        def block_math(self, body: str) -> str:
            return formulas.mathml(body, display=True)

        def latex_environment(self, name: str, body: str) -> str:
            return formulas.mathml(f"\\begin{{{name}}}{body}\\end{{{name}}}", display=True)

        def block_mermaidjs(self, code: str) -> str:
            return f"<pre>{tidy.escape(code)}</pre>"

    renderer = Renderer(escape=False, attachments=attachments, exclude_anchor_links=True)
    return MarkdownWithMath(renderer=renderer).render(source)
