"""A drawing of the split product's block: who owns what of a tile, and who waits for whom.

Sizes are read from the kernel's source, so that the drawing can not show another kernel.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from workbook import paths, style
from workbook.chart import MARGIN, SMALL, WIDTH, Chart, Page
from workbook.style import Picture

__all__ = ["pipeline"]

# Under kernels/common.
SOURCES = ("hopper.cuh", "split_sides.cuh", "split_launch.cuh", "split_gemm.cuh")
SHOWN = 9.2  # turns of a warpgroup on the time axis
# In instructions' times, drawn so: how long they take is not known.
LATENCY, PROMOTION, SPLITTING = 1.0, 3.0, 5.0
LANE, GAP = 0.26, 0.1  # inches, of a lane of the timeline and below it
TILE, ACROSS = 1.25, 2.5  # inches, of a tile's rows and columns
PANELS = 0.15  # inches that a panel of 32 of k is drawn wide
TOP, LANES = 0.44, 2.24  # inches from the top: of the tile, of the first lane
BELOW = 0.38  # inches of the axis that other figures have, and this one has not
HATCH = "/////"
ENDS = {"color": style.INK, "lw": 0.8, "ls": (0, (2, 2))}
COPY, FIRST, SECOND = style.EAGER, style.OURS, style.ALGEBRA


@functools.cache
def constants(raw: bool = False) -> dict[str, int]:
    """The constexpr ints of the kernel, kColumns and kStages among them, for x split before or raw;
    how many panels a pair of them is multiplied by: `small` before the first commit, then `large`.
    """
    found: dict[str, int] = {}
    texts = [(paths.kernels() / "common" / name).read_text(encoding="utf-8") for name in SOURCES]
    for line in re.findall(r"^constexpr int (.*?);", "\n".join(texts), re.M):
        for item in re.findall(r"(k\w+) = ([^,]+)", line):
            found[item[0]] = _value(item[1], found)
    form = "kRawX" if raw else "kHalves"
    found["kColumns"] = _number(rf"launch<Way<(\d+), {form}, Products>>", texts)
    room = _number(r"kStages = \((\d+) << 10\) / sizeof\(Stage<Way>\);", texts)
    # two halves of each number, or a raw one
    found["kStages"] = (room << 10) // (4 * found["kPanel"] * (found["kRows"] + found["kColumns"]))
    found["kTurns"] = found["kColumns"] // found["kWide"]
    body = texts[-1][texts[-1].index(" multiply_pair(") :]
    small, *large = body[: body.index("\n}\n")].split("commit_products();")
    found["small"] = small.count("x.template multiply<")
    found["large"] = "".join(large).count("x.template multiply<")
    return found


def _number(pattern: str, texts: list[str]) -> int:
    (found,) = re.findall(pattern, "\n".join(texts))
    return int(found)


def _value(text: str, known: dict[str, int]) -> int | None:
    """A product, quotient or sum of whole numbers and names; None for anything else."""
    text = re.sub(r"\w+::", "", text)
    text = re.sub(r"k[A-Z]\w*", lambda name: str(known.get(name[0], "?")), text)
    return eval(text.replace("/", "//")) if re.fullmatch(r"[\d +*/()]+", text) else None


def pipeline(raw: bool = False) -> Picture:
    """The tile of a block with its panels, and below it the turns of its two warpgroups.

    raw: for an x that is split by who multiplies it, where tiles are half as wide.
    """
    c = constants(raw)
    steps = c["kPanel"] // c["kStep"]  # instructions of a panel
    turn = (c["small"] + c["large"]) * steps
    stage = 4 * c["kPanel"] * (c["kRows"] + c["kColumns"])  # bytes: two halves of each number
    then = ", then splitting the next" if raw else ""
    title = (
        f"A tile of {c['kRows']} × {c['kColumns']}: one thread fills {c['kStages']} stages of "
        f"{stage // 1024} KB, {c['kMultipliers']} warpgroups take turns"
    )
    caption = (
        f"A turn is {turn} products of 64 × {c['kWide']} × {c['kStep']}: "
        f"{c['small'] * steps} small ones (light), then {c['large'] * steps} of hi·hi. Drawn to "
        "scale, in instructions; how long copies and promotions take is not known from the code."
    )
    lanes = 4 * (LANE + GAP)
    key = (
        ({"hatch": HATCH}, f"promotion, every {2 * c['kPanel']} of k{then}"),
        (dict(ENDS), f"both have read {2 * c['kPanel']} of k: two stages are free again"),
    )
    high, wide = LANES + lanes, WIDTH - 2 * MARGIN
    page = Page(title, caption, key, high - BELOW, 0)
    place = (MARGIN / WIDTH, 1 - (page.above + high) / page.height)
    size = (wide / WIDTH, high / page.height)
    axes = page.figure.add_axes((*place, *size), xlim=(0, wide), ylim=(high, 0))
    axes.set_axis_off()
    chart = Chart(page.figure, axes, [], wide)
    _tile(chart, c, raw)
    _stages(chart, c, stage)
    _turns(chart, c, steps, turn, LATENCY + PROMOTION + (SPLITTING if raw else 0))
    said = (
        f"Warpgroup 1 owns the upper {c['kRows'] // 2} rows, warpgroup 2 the lower ones; each "
        f"takes {c['kWide']} columns at a time. Panels are {c['kPanel']} of k wide. "
        "While a warpgroup promotes, the products of the other run."
    )
    return Picture(page.figure, f"{title}. {said} {caption}")


def _box(axes: Axes, x: float, y: float, wide: float, high: float, colour: str, **how: Any) -> None:
    how = {"facecolor": colour, "edgecolor": style.PAPER, "lw": 1.0} | how
    axes.add_patch(Rectangle((x, y), wide, high, **how))


def _tile(chart: Chart, c: dict[str, int], raw: bool) -> None:
    """The tile in four pieces, panels of x on its left, of W above it."""
    axes, x, y, turns = chart.axes, 2 * PANELS + 1.0, TOP, c["kTurns"]
    across = ACROSS * turns / 2
    high, wide = TILE / c["kMultipliers"], across / turns
    small = {"size": SMALL, "ha": "center"}
    for group, colour in enumerate((FIRST, SECOND)):
        for h in range(turns):
            at = x + h * wide, y + group * high
            _box(axes, *at, wide, high, colour, alpha=0.9 if h == 0 else 0.7)
            words = f"warpgroup {group + 1}" + (f"\nturn {h + 1}" if turns > 1 else "")
            chart.text(at[0] + wide / 2, at[1] + high / 2, words, color=style.PAPER, **small)
    for n, part in enumerate(("lo", "hi")):
        left, above = x - (2 - n) * (PANELS + 0.02), y - (2 - n) * (PANELS + 0.02)
        if not raw:
            _box(axes, left, y, PANELS, TILE, COPY, alpha=0.45 + 0.3 * n)
        _box(axes, x, above, across, PANELS, COPY, alpha=0.45 + 0.3 * n)
        chart.text(x + across + 0.06, above + PANELS / 2, f"w {part}", size=SMALL)
    beside = x - 2 * PANELS - 0.1, y + TILE / 2
    if raw:
        _box(axes, x - 2 * PANELS - 0.04, y, 2 * PANELS + 0.02, TILE, COPY, alpha=0.6)
    what = "x, float32" if raw else "x lo, hi"
    chart.text(*beside, f"{what}\n{c['kRows']} rows", size=SMALL, ha="right")
    words = f"{c['kColumns']} columns" + (f": two turns of {c['kWide']}" if turns > 1 else "")
    chart.text(x + across / 2, y + TILE + 0.15, words, color=style.SOFT, **small)


def _stages(chart: Chart, c: dict[str, int], stage: int) -> None:
    """The stages in shared memory, and the barriers that let a thread go on."""
    axes, x, wide = chart.axes, 4.5, 2.9 / c["kStages"] - 0.06
    high = 0.5
    chart.text(
        x, TOP - 0.2, f"shared memory: stages of {stage // 1024} KB, {c['kPanel']} of k", size=SMALL
    )
    for s in range(c["kStages"]):
        at = x + s * (wide + 0.06)
        _box(axes, at, TOP, wide, high, COPY, alpha=0.75)
        middle = at + wide / 2
        how = {"size": SMALL, "ha": "center", "color": style.PAPER}
        chart.text(middle, TOP + high / 2, str(s), **how)
    said = (
        ("full", "the bytes of a stage have come"),
        ("empty", "both warpgroups have read it"),
        ("turn", "the other is at its last products"),
    )
    chart.text(x, TOP + 0.73, "barriers", size=SMALL, color=style.SOFT)
    for line, (name, words) in enumerate(said):
        y = TOP + 0.92 + 0.19 * line
        chart.text(x, y, name, size=SMALL, bold=True)
        chart.text(x + 0.54, y, words, size=SMALL)


def _turns(chart: Chart, c: dict[str, int], steps: int, turn: int, busy: float) -> None:
    """Lanes over time, in instructions: copies, both warpgroups, the tensor cores."""
    names = ("copy engine", "warpgroup 1", "warpgroup 2", "tensor cores")
    left = 1.0
    lanes = {name: LANES + i * (LANE + GAP) for i, name in enumerate(names)}
    pair = turn * c["kMultipliers"] * c["kTurns"]  # instructions of a pair of panels
    end = SHOWN * turn
    inch = (WIDTH - 2 * MARGIN - left) / end
    small = {"size": SMALL, "ha": "center"}

    def put(lane: str, start: float, stop: float, colour: str, words: str = "", **how: Any) -> None:
        if start >= end:
            return
        at, wide = left + start * inch, (min(stop, end) - start) * inch
        _box(chart.axes, at, lanes[lane], wide, LANE, colour, **how)
        if words and stop <= end:
            ink = style.INK if how.get("hatch") or how.get("alpha", 1) < 0.5 else style.PAPER
            chart.text(at + wide / 2, lanes[lane] + LANE / 2, words, color=ink, **small)

    for name, y in lanes.items():
        chart.text(0, y + LANE / 2, name, size=SMALL)
        _box(chart.axes, left, y, end * inch, LANE, style.SUNK)
    count = int(end // turn) + 1
    for number in range(count):
        group, h = number % 2, number // 2 % c["kTurns"]
        start, lane = number * turn, names[1 + group]
        middle, stop = start + c["small"] * steps, (number + 1) * turn
        colour = (FIRST, SECOND)[group]
        put(lane, start, stop, colour, f"turn {h + 1}" if c["kTurns"] > 1 else "products")
        paper = {"edgecolor": colour, "hatch": HATCH, "lw": 0.8}
        put(lane, stop + LATENCY, stop + busy, style.PAPER, **paper)
        put("tensor cores", start, middle, colour, alpha=0.45)
        put("tensor cores", middle, stop, colour)
    for number in range(
        int(end // pair) + 1
    ):  # a pair is read: the one after the next is asked for
        for half in range(2):
            start = number * pair + half * 0.4 * pair
            first = (2 * (number - 1) + half) % c["kStages"]
            words = f"stage {first}" if c["kTurns"] > 1 else str(first)
            put("copy engine", start, start + 0.4 * pair, COPY, words, alpha=0.75)
    for number in range(1, int(end // pair) + 1):
        at = left + number * pair * inch
        low, high = LANES - 0.08, LANES + 4 * LANE + 3 * GAP
        chart.axes.plot([at, at], [low, high], **ENDS)
