"""Charts laid out in inches: labelled rows beside a log axis, under a title, over a caption.

Every text is measured before it is placed, so that labels neither overlap nor leave the canvas.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Ellipse
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from workbook.style import BAD, INK, LINE, PAPER, PX, SOFT, SUNK

__all__ = [
    "MARGIN",
    "SMALL",
    "WIDTH",
    "Chart",
    "Page",
    "Row",
    "around",
    "draw_ticks",
    "log_ticks",
    "row_chart",
    "width_of",
    "wrapped",
]

WIDTH = 736 / PX  # 46rem
SMALL, NORMAL, TITLE = 9.0, 10.0, 12.5  # points
MARGIN, GAP = 0.08, 0.17  # inches
LABEL_MOST = 2.35  # width of the labels on the left
ROW, HEADER, NOTE, LEADING = 0.27, 0.36, 0.165, 1.35  # heights in inches; line height in sizes


# --- measured text --------------------------------------------------------------------------


@functools.cache
def _families() -> list[str]:
    there = {font.name for font in font_manager.fontManager.ttflist}
    wanted = ("Arial", "Liberation Sans", "DejaVu Sans")  # the last one comes with matplotlib
    return [name for name in wanted if name in there]


def _font(size: float, bold: bool) -> font_manager.FontProperties:
    return font_manager.FontProperties(
        family=_families(), size=size, weight="bold" if bold else "normal"
    )


@functools.cache
def _renderer() -> RendererAgg:
    return RendererAgg(1, 1, 72)


@functools.cache
def width_of(text: str, size: float = NORMAL, bold: bool = False) -> float:
    """Inches that the widest line of `text` takes."""
    lines = [line for line in text.split("\n") if line]
    font = _font(size, bold)
    widths = (_renderer().get_text_width_height_descent(line, font, False)[0] for line in lines)
    return max(widths, default=0.0) / 72


def wrapped(
    text: str, width: float, size: float = NORMAL, bold: bool = False, most: int = 9
) -> str:
    """`text` broken at spaces into lines of at most `width` inches; "…" ends what is cut."""
    lines: list[str] = []
    for word in text.split(" "):  # not at spaces that do not break
        if lines and width_of(f"{lines[-1]} {word}", size, bold) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    cut = len(lines) > most
    lines = lines[:most]
    for number, line in enumerate(lines):
        end = "…" if cut and number == most - 1 else ""
        while width_of(line + end, size, bold) > width and len(line) > 1:
            line, end = line[:-1], "…"
        lines[number] = line + end
    return "\n".join(lines)


# --- the chart of rows ----------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A row: its label, a small note below it, and the texts of the columns on the right.

    `header` makes it the title of the rows that follow.
    """

    label: str
    cells: Sequence[str] = ()
    note: str = ""
    colour: str = INK
    bold: bool = False
    header: bool = False
    bad: bool = False


@dataclass
class Chart:
    """A laid out figure: its axes (y is inches from their top), the middle of each row."""

    figure: Figure
    axes: Axes
    middles: list[float]
    inches: float  # width of the axes

    def text(self, x: float, y: float, text: str, **how: Any) -> Text:
        """Text at a point of the axes, or (`transform`) elsewhere."""
        return _put(self.axes, x, y, text, **how)

    def above(self, x: float, text: str, colour: str) -> None:
        """A label over the axes at x, moved sideways so that it stays above them."""
        low, high = self.axes.get_xlim()
        half = width_of(text, SMALL) / 2 / self.inches
        middle = math.log(x / low) / math.log(high / low)
        middle = min(max(middle, half), 1 - half) if half < 0.5 else 0.5
        how = {"ha": "center", "va": "baseline", "transform": self.axes.transAxes}
        height = self.axes.get_position().height * self.figure.get_figheight()
        self.text(middle, 1 + 0.1 / height, text, size=SMALL, color=colour, **how)


def _put(
    parent: Axes | Figure,
    x: float,
    y: float,
    text: str,
    size: float = NORMAL,
    bold: bool = False,
    **how: Any,
) -> Text:
    """Text by its baseline: centred or hung by its box, letters of one row would dance."""
    how = {"color": INK, "va": "center", "linespacing": 1.2} | how
    figure = parent if isinstance(parent, Figure) else parent.figure
    where = how.pop("transform", figure.transFigure if parent is figure else parent.transData)
    if "\n" not in text and how["va"] in _BASELINE:
        down = _BASELINE[how["va"]] * size / 72
        where, how["va"] = where + ScaledTranslation(0, -down, figure.dpi_scale_trans), "baseline"
    how |= {"transform": where, "fontproperties": _font(size, bold), "parse_math": False}
    return parent.text(x, y, text, **how)


_BASELINE = {"center": 0.35, "top": 0.8}  # of the size, how far below it the baseline is


def row_chart(
    title: str,
    rows: Sequence[Row],
    *,
    headers: Sequence[str],
    limits: tuple[float, float],
    tick_text: Callable[[float], str],
    axis_name: str,
    caption: str,
    key: Sequence[tuple[dict[str, Any], str]] = (),
) -> Chart:
    """A log axis beside labelled rows and columns of text, under a title, over key and caption.

    Every row that is no header has a cell for each of `headers`; key: (style of a mark, meaning).
    """
    wide = WIDTH - 2 * MARGIN
    notes = [wrapped(r.note, wide if r.header else LABEL_MOST, SMALL, most=3) for r in rows]
    heights = [
        (HEADER if row.header else ROW) + NOTE * (note.count("\n") + 1 if note else 0)
        for row, note in zip(rows, notes, strict=True)
    ]
    tops = [sum(heights[:number]) for number in range(len(rows))]
    middles = [
        top + (HEADER - 0.13 if row.header else ROW / 2)
        for top, row in zip(tops, rows, strict=True)
    ]
    page = Page(
        title, caption, key, sum(heights), max((h.count("\n") + 1 for h in headers), default=1)
    )
    for row, note, middle in zip(rows, notes, middles, strict=True):
        how = {"bold": row.bold or row.header, "color": row.colour}
        page.text(MARGIN, page.above + middle, row.label, **how)
        if note:
            y, colour = page.above + middle + 0.1, BAD if row.bad else SOFT
            page.text(MARGIN, y, note, size=SMALL, color=colour, va="top")
    right = WIDTH - MARGIN
    for number in reversed(range(len(headers))):
        cells = [("" if row.header else row.cells[number], row.bold) for row in rows]
        page.text(right, page.above - 0.1, headers[number], size=SMALL, **_HEADER)
        for (cell, bold), row, middle in zip(cells, rows, middles, strict=True):
            colour = BAD if row.bad else INK
            page.text(right, page.above + middle, cell, bold=bold, color=colour, ha="right")
        widths = [width_of(cell, NORMAL, bold) for cell, bold in cells]
        right -= max(width_of(headers[number], SMALL), *widths) + GAP
    left = MARGIN + GAP + max(width_of(r.label, NORMAL, r.bold) for r in rows if not r.header)
    beside = [note for row, note in zip(rows, notes, strict=True) if not row.header]
    left = max([left, *(MARGIN + GAP + width_of(note, SMALL) for note in beside)])
    axes = page.axes(left, right - left, limits)
    draw_ticks(axes, right - left, sum(heights), tick_text, axis_name)
    for row, note, top, middle, height in zip(rows, notes, tops, middles, heights, strict=True):
        if not row.header:
            axes.axhline(middle, color=SUNK, lw=0.9, zorder=0.1)
        elif MARGIN + max(width_of(row.label, NORMAL, True), width_of(note, SMALL)) > left:
            axes.axhspan(top, top + height, color=PAPER, lw=0, zorder=0.9)
    return Chart(page.figure, axes, middles, right - left)


_HEADER = {"color": SOFT, "ha": "right", "va": "baseline"}


class Page:
    """Title, body, key and caption from the top down; places are inches from the top left."""

    def __init__(self, title: str, caption: str, key: Sequence, body: float, header: int) -> None:
        width = WIDTH - 2 * MARGIN
        title = wrapped(title, width, TITLE, True)
        caption = "\n".join(wrapped(line, width, SMALL) for line in caption.split("\n"))
        placed = _key_places(key, width)
        key_height = 0.21 * (placed[-1][1] + 1) + 0.08 if placed else 0.0
        self.above = MARGIN + _height(title, TITLE) + 0.04 + header * SMALL * LEADING / 72 + 0.07
        self.body = body
        key_top = self.above + body + 0.5
        self.height = key_top + key_height + _height(caption, SMALL) + MARGIN
        self.figure = Figure(figsize=(WIDTH, self.height), dpi=PX, facecolor=PAPER)
        FigureCanvasAgg(self.figure)
        self.text(MARGIN, MARGIN, title, size=TITLE, bold=True, va="top")
        self.text(MARGIN, self.height - MARGIN, caption, size=SMALL, color=SOFT, va="bottom")
        for (mark, meaning), (x, line) in zip(key, placed, strict=True):
            y = key_top + 0.21 * (line + 0.5)
            self._mark(MARGIN + x, y, mark)
            self.text(MARGIN + x + 0.27, y, meaning, size=SMALL)

    def text(self, x: float, y: float, text: str, **how: Any) -> None:
        if text:
            _put(self.figure, x / WIDTH, 1 - y / self.height, text, **how)

    def axes(self, left: float, width: float, limits: tuple[float, float]) -> Axes:
        bottom = self.height - self.above - self.body
        place = (left / WIDTH, bottom / self.height, width / WIDTH, self.body / self.height)
        axes = self.figure.add_axes(place, xscale="log", xlim=limits, ylim=(self.body, 0))
        axes.set_axis_off()
        return axes

    def _mark(self, x: float, y: float, mark: dict[str, Any]) -> None:
        """A mark of the key: a marker, a hatched disc, or (without a marker) a stretch of line."""
        middle, y = (x + 0.1) / WIDTH, 1 - y / self.height
        if "hatch" in mark:
            size, how = 0.115, {"facecolor": PAPER, "edgecolor": INK, "hatch": mark["hatch"]}
            self.figure.add_artist(Ellipse((middle, y), size / WIDTH, size / self.height, **how))
            return
        half = 0.0 if "marker" in mark else 0.1 / WIDTH
        xs = [middle - half, middle + half] if half else [middle]
        self.figure.add_artist(Line2D(xs, [y] * len(xs), **mark))


def _height(text: str, size: float) -> float:
    return (text.count("\n") + 1) * size * LEADING / 72


def _key_places(key: Sequence[tuple[dict[str, Any], str]], width: float) -> list[tuple[float, int]]:
    """(x in inches, line) of each entry, a new line where the next one does not fit."""
    places, x, line = [], 0.0, 0
    for _, meaning in key:
        takes = 0.27 + width_of(meaning, SMALL)
        if x and x + takes > width:
            x, line = 0.0, line + 1
        places.append((x, line))
        x += takes + 0.25
    return places


def draw_ticks(
    axes: Axes, inches: float, body: float, tick_text: Callable[[float], str], name: str
) -> None:
    """Grid lines and labels of a log axis, `inches` wide and `body` high, and its name."""
    low, high = axes.get_xlim()
    where = axes.get_xaxis_transform()
    below = {"size": SMALL, "color": SOFT, "va": "top", "transform": where}
    for tick in log_ticks(low, high, inches, lambda tick: width_of(tick_text(tick), SMALL) + 0.12):
        axes.axvline(tick, color=LINE, lw=0.7, zorder=0.2)
        _put(axes, tick, -0.06 / body, tick_text(tick), ha="center", **below)
    axes.plot([low, high], [0, 0], color=SOFT, lw=0.8, transform=where, clip_on=False, zorder=1)
    _put(axes, low, -0.23 / body, name, **below)


def around(values: Iterable[float | None], room: float = 1.35) -> tuple[float, float]:
    """Limits of a log axis around those values that can be on it. ValueError if there are none."""
    there = [v for v in values if v is not None and math.isfinite(v) and v > 0]
    if not there:
        raise ValueError("around: values: got none that is finite and above 0; want at least one")
    low, high = min(there), max(there)
    room = max(room, (high / low) ** 0.05)
    return low / room, high * room


def log_ticks(
    low: float, high: float, inches: float, takes: Callable[[float], float]
) -> list[float]:
    """Round values inside [low, high], as many as fit on `inches`; `takes` is a label's room."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    per_inch = math.log(high / low) / inches
    choices = [[float(f"{step}e{power}") for power in powers for step in steps] for steps in _STEPS]
    choices += [choices[-1][::every] for every in range(2, len(powers) + 1)]
    if high / low < 3:
        choices = [list(MaxNLocator(count).tick_values(low, high)) for count in (5, 4, 3)] + choices
    for choice in choices:
        ticks = [float(tick) for tick in choice if low <= tick <= high]
        gaps = [math.log(b / a) / per_inch for a, b in itertools.pairwise(ticks)]
        if ticks and min(gaps, default=math.inf) > max(map(takes, ticks)):
            return ticks
    return [math.sqrt(low * high)]


_STEPS = ((1, 2, 5), (1, 3), (1,))  # of a decade, the densest first
