"""How figures look and how numbers are written: colours, units, digits; a picture with its text.

Nothing here touches pyplot or matplotlib's global settings.
"""

from __future__ import annotations

import base64
import html
import io
import math
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from workbook import stats

__all__ = [
    "ALGEBRA",
    "BAD",
    "COMPILE",
    "EAGER",
    "FLOOR",
    "INK",
    "LINE",
    "OURS",
    "PAPER",
    "SOFT",
    "SUNK",
    "TRIED",
    "Picture",
    "duration",
    "error_text",
    "factor",
    "grouped",
    "ratio",
    "tick_time",
]

# Told apart by colour-blind readers too; what is wrong is also marked by a cross and by words.
EAGER, COMPILE, ALGEBRA, OURS = "#5f6670", "#d07a00", "#00876c", "#0b62b5"
FLOOR, BAD, TRIED = "#16181c", "#c2271d", "#7b3fa0"
INK, SOFT, LINE, SUNK = "#23262b", "#5c616a", "#dcdde0", "#eceef1"
PAPER = "#ffffff"  # the pages multiply images in, so white becomes their paper

PX = 96  # CSS pixels to the inch
DPI = 2 * PX  # of the PNG: two pixels to a CSS pixel
NARROW_SPACE = "\u202f"


@dataclass(frozen=True)
class Picture:
    """A figure and its alternative text, which states the numbers shown."""

    figure: Figure
    alt: str

    def png(self) -> bytes:
        """The figure as PNG, two pixels to a CSS pixel."""
        file = io.BytesIO()
        FigureCanvasAgg(self.figure)
        self.figure.savefig(
            file, format="png", dpi=DPI, facecolor=PAPER, metadata={"Software": None}
        )
        return file.getvalue()

    def save(self, path: str | Path) -> Path:
        """Write it; the suffix says how (.png, .svg, .pdf). Folders are created."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() == ".png":
            path.write_bytes(self.png())
        else:
            self.figure.savefig(path, facecolor=PAPER)
        return path

    def _repr_html_(self) -> str:
        data = base64.b64encode(self.png()).decode("ascii")
        width = round(self.figure.get_figwidth() * PX)
        return (
            f'<img width="{width}" style="max-width:100%;height:auto" '
            f'alt="{html.escape(self.alt, quote=True)}" src="data:image/png;base64,{data}">'
        )


# --- numbers --------------------------------------------------------------------------------


def grouped(text: str) -> str:
    """ "1224.5" -> "1 224.5", with narrow spaces that do not break."""
    whole, dot, rest = text.partition(".")
    return f"{int(whole):,}".replace(",", NARROW_SPACE) + dot + rest if whole.isdigit() else text


def duration(ms: float, spread: float = math.nan) -> str:
    """A time in ms with its unit (µs, ms, s), with the digits that `spread` (IQR/median) supports.

    Two digits when the spread is unknown (nan).
    """
    if not math.isfinite(ms):
        return f"{ms:g} ms"
    text = ""
    for unit, in_ms in (("µs", 1e-3), ("ms", 1.0), ("s", 1e3)):
        text = stats.significant(ms / in_ms, spread)
        if abs(float(text)) < 1000 or unit == "s":
            return f"{grouped(text)} {unit}"
    return text


def factor(value: float, spread: float = math.nan) -> str:
    """A ratio: 178×, 1.40×, 1 224×, with the digits that `spread` supports."""
    return f"{grouped(stats.significant(value, spread))}×"


def ratio(found: stats.Ratio) -> str:
    """A ratio of times as `factor` has it, at least with the digits of a spread of 9 %."""
    return factor(found.median, min((found.q3 - found.q1) / found.median, 0.09))


def error_text(value: float | None) -> str:
    """A relative error: 8.9e-8, 0, nan; a dash when there is none."""
    if value is None:
        return "–"
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if 0.01 <= value < 1000:
        return f"{value:#.2g}".rstrip(".")
    digits, power = f"{value:.1e}".split("e")
    return f"{digits}e{int(power)}"


def tick_time(ms: float) -> str:
    """A round time in ms with its unit, all its digits."""
    unit, in_ms = next((u for u in (("s", 1e3), ("ms", 1.0)) if ms >= u[1]), ("µs", 1e-3))
    return f"{grouped(f'{ms / in_ms:.10g}')} {unit}"
