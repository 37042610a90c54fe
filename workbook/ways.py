"""Which way a product of matrices goes on a Hopper GPU: torch's, by halves, or as it is by TF32.

A way's time is a sum: a launch, what it reads and writes, its waves of blocks, and what it costs to
read its parts of z behind it. The costs are fitted to times of 215 shapes on an H200, records of
kind "curve" with how.sweep "ways"; the least sum wins.

    torch   x W^T by torch.mm, on the route the user has chosen
    split   by halves, x split before by a kernel of its own
    through the same by one product that is accumulated over all of k, where that will do
    raw     by halves, x split where it is multiplied
    floats  x and W as they are, rounded to TF32 on their way: on that route, where W is at hand
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

__all__ = [
    "ADDED_US",
    "COSTS",
    "PANEL",
    "PROCESSORS",
    "SAID",
    "TILES",
    "best",
    "counts",
    "cut",
    "fastest",
    "ours",
    "predicted_us",
]

PANEL = 64  # of k that is promoted at once, a pair of panels: what parts of k are cut into
PROCESSORS = 132  # multiprocessors of an H100 or an H200
TILES = {  # rows and columns of a block's
    "split": (128, 256),
    "through": (128, 256),
    "raw": (128, 128),
    "floats": (128, 128),
}
SAID = {
    "split": "x split before",
    "through": "x split before",
    "raw": "x split on the way",
    "floats": "x and W as they are",
}
PAIRS_OF_A_PART = 4  # at least: chosen, not measured
MEANWHILE = 0.5  # 1e6 numbers that come in the time of a pair of panels: the best fit of tenths
# Microseconds, of what `counts` counts.
COSTS: Mapping[tuple[str, str], tuple[float, ...]] = {
    ("torch", "float32"): (11.87, 18.72, 1.497, 0.293, 0.3177),
    ("split", "float32"): (5.186, 2.314, 2.02, 6.578, 1.886),
    ("raw", "float32"): (3.424, 1.377, 4.748, 0.6427, 1.58),
    ("torch", "tf32"): (8.402, 1.844, 0.8629, 0.2176, 0.4804),
    ("split", "tf32"): (4.865, 1.957, 0.8857, 7.191, 1.766),
    ("through", "tf32"): (4.889, 1.967, 0.711, 7.244, 1.682),
    ("raw", "tf32"): (4.181, 0.9533, 3.656, 0.4681, 1.508),
    ("floats", "tf32"): (2.553, 0.7196, 4.48, 1.21, 1.239),
}
# The halves' recorded times have a sum of their parts behind them. A tail reads these, too, so that
# is counted; it saves a launch and writing the sum: microseconds, and those for 1e6 numbers, by the
# difference at one shape.
ADDED_US = (3.0, 1.54)
FASTER = 0.95  # of torch's time, at most: fits of ours are off by as much at half of the shapes
LEAST = (8, 32, 32)  # of B, K, N: below, nothing is predicted; timed from (16, 32, 8) on
TALL, SHORT = 128, 512  # of fewer rows and less k torch is seen to be faster, whatever is predicted


def cut(rows: int, columns: int, outputs: int, processors: int, way: str) -> tuple[int, int]:
    """(tiles of z, parts of the sum over k): as many as keep processors from being idle."""
    down, across = TILES[way]
    tiles = max(1, -(-rows // down) * -(-outputs // across))
    most = max(1, -(-columns // PANEL) // PAIRS_OF_A_PART)
    return tiles, min(most, max(1, processors // tiles))


def counts(way: str, rows: int, columns: int, outputs: int, processors: int) -> tuple[float, ...]:
    """What a way does for x (B, K) and N outputs, in the order of its COSTS.

    torch: a launch, 1e9 operations, 1e6 numbers read, 1e6 written, 1e3 of K. Ours, split before:
    launches, 1e6 numbers of x, pairs of panels one after the other in all waves, waves, 1e6 numbers
    of z in all parts, written and read. Ours, of x as it is: a launch, pairs, waves, 1e6 numbers of
    x and W beyond those that come while pairs are multiplied, and of z likewise.
    """
    x, both = rows * columns / 1e6, (rows + outputs) * columns / 1e6
    if way == "torch":
        moved = both, rows * outputs / 1e6
        return 1.0, 2e-9 * rows * columns * outputs, *moved, columns / 1e3
    tiles, parts = cut(rows, columns, outputs, processors, way)
    waves, pairs = -(-tiles * parts // processors), -(-columns // PANEL // parts)
    loop, z = (float(waves * pairs), float(waves)), parts * rows * outputs / 1e6
    if way in ("raw", "floats"):
        return 1.0, *loop, max(0.0, both - MEANWHILE * loop[0]), z
    return 1.0, x, *loop, z


def predicted_us(
    way: str, route: str, rows: int, columns: int, outputs: int, processors: int
) -> float:
    """The time of a way in microseconds, by COSTS."""
    done = counts(way, rows, columns, outputs, processors)
    return sum(cost * n for cost, n in zip(COSTS[way, route], done, strict=True))


@functools.lru_cache(maxsize=1024)
def best(
    route: str,
    rows: int,
    columns: int,
    outputs: int,
    processors: int,
    whole: bool = False,
    through: bool = False,
    raw: bool = True,
) -> str:
    """The way for x (B, K) and N outputs on a route: torch where no other is clearly faster.

    whole, through, raw: as of `ours`.
    """
    few = rows < LEAST[0] or (rows < TALL and columns < SHORT)
    if few or columns < LEAST[1] or outputs < LEAST[2]:
        return "torch"
    shape, can = (rows, columns, outputs, processors), ours(route, whole, through, raw)
    least = min(predicted_us(way, route, *shape) for way in can)
    is_faster = least <= FASTER * predicted_us("torch", route, *shape)
    return fastest(can, route, *shape) if is_faster else "torch"


def ours(route: str, whole: bool, through: bool, raw: bool = True) -> tuple[str, ...]:
    """The ways but torch's, on a route.

    whole: W is at hand, not its halves alone. through: what one product draws toward zero, where
    tensor cores accumulate over all of k, is small beside what else is lost. raw: x can be
    multiplied as it is, and W: their rows start at 16 bytes, and x has no centre.
    """
    tf32 = route == "tf32"
    names = ("through", tf32 and through), ("raw", raw), ("floats", tf32 and raw and whole)
    return "split", *(name for name, can in names if can)


def fastest(
    can: Sequence[str], route: str, rows: int, columns: int, outputs: int, processors: int
) -> str:
    """Of some ways the fastest; of two that are as fast the one that launches one kernel."""
    shape = rows, columns, outputs, processors
    alone = {"raw", "floats"}
    return min(
        can, key=lambda way: predicted_us(way, route, *shape) * (FASTER if way in alone else 1.0)
    )
