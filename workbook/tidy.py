"""The last hand on a page: headings, tables, long outputs, links; and what must not be in it.

Works on the parsed HTML (BeautifulSoup, which comes with nbconvert and is imported when used).
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bs4 import BeautifulSoup, NavigableString, Tag

__all__ = [
    "Finished",
    "Heading",
    "PageError",
    "escape",
    "finish",
    "plain",
    "soup",
    "stream",
    "texts",
]

_LONG_OUTPUT = 30  # lines: what fits on a laptop's screen beside the code that made it
_TEX = re.compile(r"\$[^$\n]*[\\_^][^$\n]*\$|\$\$|\\[a-zA-Z]{2,}|\\[\[\](){}]")
_LOADS = {"src", "srcset", "poster", "data", "background", "xlink:href"}
_NOT_PROSE = ("pre", "code", "math", "script", "style", "svg")
_SENTENCE = re.compile(r"[.!?](?=\s|$)")


class PageError(ValueError):
    """Something in a page would not work offline; the message names notebook, cell and what."""


@dataclass(frozen=True)
class Heading:
    """An entry of the table of contents; `html` may hold MathML."""

    level: int
    anchor: str
    html: str


@dataclass(frozen=True)
class Finished:
    """What finish() found; title, lead, summary and figure are HTML."""

    title: str
    lead: str
    summary: str
    headings: Sequence[Heading]
    figure: str
    warnings: Sequence[str]


def soup(source: str) -> BeautifulSoup:
    """`source` parsed."""
    from bs4 import BeautifulSoup

    return BeautifulSoup(source, features="html.parser")


def escape(text: str) -> str:
    """`text` as HTML text."""
    return html.escape(text, quote=False)


def plain(source: str) -> str:
    """The text of an HTML fragment, safe in an attribute or a <title>."""
    return html.escape(" ".join(soup(source).get_text().split()))


def stream(text: str) -> str:
    """What a terminal shows in the end: a carriage return starts a line over (progress bars)."""
    text = re.sub(r"\x1b\[\d*[A-HJKf]", "", text).replace("\r\n", "\n")
    return "\n".join(_last_written(line) for line in text.split("\n")).strip("\n")


def texts(tags: Iterable[Tag]) -> Iterator[NavigableString]:
    """The text nodes of prose: not in code, formulas, scripts, styles."""
    for tag in tags:
        for node in list(tag.find_all(string=True)):
            if not node.find_parents(_NOT_PROSE):
                yield node


def finish(page: BeautifulSoup, name: str) -> Finished:
    """Finish `page` in place. PageError for raw TeX, scripts, and anything that would be loaded."""
    for style in page.select(".html style"):
        if "scoped" in style.attrs or ".hll" in style.get_text():
            style.decompose()  # of pandas and Pygments: the page has its own
    headings = _anchor(page)
    _wrap_tables(page)
    _fold_long(page)
    _link_pages(page)
    _refuse(page, name)
    image = page.select_one(".cover img[alt]") or page.find("img", alt=True)
    lead = page.select_one(".prose > p")
    return Finished(
        title=next((h.html for h in headings if h.level == 1), ""),
        lead=lead.decode_contents() if lead else "",
        summary=_first_sentence(lead),
        headings=[h for h in headings if h.level in (2, 3)],
        figure=str(image) if image else "",
        warnings=_without_alt(page, name),
    )


def _anchor(page: BeautifulSoup) -> list[Heading]:
    """Give each heading of the prose Jupyter's anchor (unique) and a link to itself."""
    found, used = [], set()
    for tag in page.select(":is(.prose, .html) :is(h1, h2, h3, h4)"):
        text = "-".join(tag.get_text().split())
        anchor, number = text, 1
        while anchor in used:
            number += 1
            anchor = f"{text}-{number}"
        used.add(anchor)
        tag["id"] = anchor
        found.append(Heading(int(tag.name[1]), anchor, tag.decode_contents()))
        link = page.new_tag("a", attrs={"class": "anchor", "href": f"#{anchor}"})
        link["aria-label"] = "Link to this section"
        link.string = "#"
        tag.append(link)
    return found


def _wrap_tables(page: BeautifulSoup) -> None:
    for table in page.find_all("table"):
        table.attrs.pop("border", None)
        for row in table.find_all("tr"):
            row.attrs.pop("style", None)  # pandas aligns its header by a style attribute
        table.wrap(page.new_tag("div", attrs={"class": "table", "tabindex": "0"}))


def _fold_long(page: BeautifulSoup) -> None:
    """Text outputs of more than _LONG_OUTPUT lines are folded away, tracebacks are not."""
    for block in page.select(".output > pre:not(.error)"):
        lines = block.get_text().count("\n") + 1
        if lines > _LONG_OUTPUT:
            details = block.wrap(page.new_tag("details"))
            summary = page.new_tag("summary")
            summary.string = f"{lines} lines of output"
            details.insert(0, summary)


def _link_pages(page: BeautifulSoup) -> None:
    """Links between notebooks become links between pages."""
    for link in page.find_all("a", href=re.compile(r"^[^:#]+\.ipynb(#.*)?$")):
        link["href"] = link["href"].replace(".ipynb", ".html").rsplit("/", 1)[-1]


def _refuse(page: BeautifulSoup, name: str) -> None:
    found = [*_loads(page), *_scripts(page), *_raw_tex(page), *_broken_tables(page)]
    if found:
        raise PageError("\n".join(f"{name}, {_where(tag)}: {what}" for tag, what in found))


def _loads(page: BeautifulSoup) -> Iterator[tuple[Tag, str]]:
    for tag in page.find_all(True):
        for key in _LOADS & set(tag.attrs):
            if not tag[key].startswith(("data:", "#")):
                yield tag, f"<{tag.name} {key}={tag[key][:60]!r}> would load: embed it as data:"
        if tag.name in ("link", "base", "iframe", "object", "embed"):
            yield tag, f"<{tag.name}> has no place in a page that stands alone"
        style = tag.get_text() if tag.name == "style" else tag.get("style", "")
        if re.search(r"@import|url\(\s*['\"]?(?!data:|#|['\"])", style):
            yield tag, "a style that would load something: embed it as data:"


def _scripts(page: BeautifulSoup) -> Iterator[tuple[Tag, str]]:
    for tag in page.find_all(True):
        if tag.name == "script" or any(key.startswith("on") for key in tag.attrs):
            yield tag, f"<{tag.name}> with a script, which the page does not run: show a figure"


def _raw_tex(page: BeautifulSoup) -> Iterator[tuple[Tag, str]]:
    for node in texts([page]):
        match = _TEX.search(node)
        if match:
            near = " ".join(node[max(0, match.start() - 30) : match.end() + 30].split())
            yield (
                node.parent,
                f"raw TeX in the text: {near!r} (between `...` if it is code)",
            )


def _broken_tables(page: BeautifulSoup) -> Iterator[tuple[Tag, str]]:
    for paragraph in page.select(".prose p"):
        if re.search(r"\|\s*:?-{3,}", paragraph.get_text()):
            yield (
                paragraph,
                "a table with rows of different lengths: a | inside a formula splits a cell, "
                "write \\lvert, \\rvert or \\mid there",
            )


def _without_alt(page: BeautifulSoup, name: str) -> list[str]:
    return [
        f"{name}, {_where(image)}: an image without alternative text: give its output the "
        'metadata {"image/png": {"alt": "what it shows"}}'
        for image in page.find_all("img")
        if not image.get("alt", "").strip()
    ]


def _where(tag: Tag) -> str:
    cell = tag if "data-cell" in tag.attrs else tag.find_parent(attrs={"data-cell": True})
    return f"cell {cell['data-cell']}" if cell else "page"


def _first_sentence(paragraph: Tag | None) -> str:
    """The first sentence of a paragraph of prose, formulas included, links as text."""
    parts = []
    for node in paragraph.children if paragraph else ():
        end = _SENTENCE.search(node) if node.name is None else None
        if end:
            return "".join([*parts, escape(node[: end.end()])])
        text = escape(node) if node.name is None else str(node)
        parts.append(node.decode_contents() if node.name == "a" else text)
    return "".join(parts)


def _last_written(line: str) -> str:
    shown = [part for part in line.split("\r") if part.strip()]
    return shown[-1] if shown else ""
