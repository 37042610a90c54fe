"""Which way a product of matrices goes on a Hopper GPU: torch's, or by halves, and how x is split.

A way's time is a sum: a launch, what it reads and writes, its waves of blocks. The costs are fitted
to times of 200 shapes on one H200, records of kind "curve" with how.sweep "ways"; the least sum
wins.

    torch   x W^T by torch.mm, on the route the user has chosen
    split   by halves, x split before by a kernel of its own
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
TILES = {"split": (128, 256), "raw": (128, 128), "floats": (128, 128)}  # rows, columns of a block's
SAID = {"split": "x split before", "raw": "x split on the way", "floats": "x and W as they are"}
PAIRS_OF_A_PART = 4  # at least: chosen, not measured
# Microseconds, of what `counts` counts.
COSTS: Mapping[tuple[str, str], tuple[float, ...]] = {
    ("torch", "float32"): (11.19, 18.2, 1.16, 1.997, 1.135),
    ("split", "float32"): (8.206, 2.226, 2.006, 7.812, 0.4925),
    ("raw", "float32"): (5.517, 1.426, 2.916, 0.4116),
    ("torch", "tf32"): (8.193, 1.877, 0.7781, 0.2178, 0.7874),
    ("split", "tf32"): (9.713, 1.89, 0.8693, 8.647, -0.04605),
    ("raw", "tf32"): (6.415, 0.989, 1.913, 0.2968),
    ("floats", "tf32"): (4.008, 0.7472, 2.821, 0.1185),
}
# In the halves' recorded times is a sum over the parts, which tails do themselves: a launch, and
# 1e6 numbers read or written, by the difference at one shape.
ADDED_US = (3.0, 1.54)
FASTER = 0.93  # of torch's time, at most: what a fit is off by at half of the shapes
LEAST = (8, 512, 32)  # of B, K, N: below, nothing was timed


def cut(rows: int, columns: int, outputs: int, processors: int, way: str) -> tuple[int, int]:
    """(tiles of z, parts of the sum over k): as many as keep processors from being idle."""
    down, across = TILES[way]
    tiles = max(1, -(-rows // down) * -(-outputs // across))
    most = max(1, -(-columns // PANEL) // PAIRS_OF_A_PART)
    return tiles, min(most, max(1, processors // tiles))


def counts(way: str, rows: int, columns: int, outputs: int, processors: int) -> tuple[float, ...]:
    """What a way does for x (B, K) and N outputs, in the order of its COSTS.

    torch: a launch, 1e9 operations, 1e6 numbers read, 1e6 written, 1e3 of K. By halves: launches,
    1e6 numbers of x where it is split before, pairs of panels one after the other in all waves,
    waves, 1e6 numbers of z in all parts.
    """
    x = rows * columns / 1e6
    if way == "torch":
        moved = x + columns * outputs / 1e6, rows * outputs / 1e6
        return 1.0, 2e-9 * rows * columns * outputs, *moved, columns / 1e3
    tiles, parts = cut(rows, columns, outputs, processors, way)
    waves, pairs = -(-tiles * parts // processors), -(-columns // PANEL // parts)
    found = float(waves * pairs), float(waves), parts * rows * outputs / 1e6
    return (1.0, x, *found) if way == "split" else (1.0, *found)


def predicted_us(
    way: str, route: str, rows: int, columns: int, outputs: int, processors: int
) -> float:
    """The time of a way in microseconds, by COSTS."""
    done = counts(way, rows, columns, outputs, processors)
    return sum(cost * n for cost, n in zip(COSTS[way, route], done, strict=True))


@functools.lru_cache(maxsize=1024)
def best(
    route: str, rows: int, columns: int, outputs: int, processors: int, whole: bool = False
) -> str:
    """The way for x (B, K) and N outputs on a route: torch where no other is clearly faster.

    whole: W is at hand, not its halves alone.
    """
    if rows < LEAST[0] or columns < LEAST[1] or outputs < LEAST[2]:
        return "torch"
    shape = rows, columns, outputs, processors
    found = fastest(ours(route, whole), route, *shape)
    mine, other = (predicted_us(way, route, *shape) for way in (found, "torch"))
    return found if mine <= FASTER * other else "torch"


def ours(route: str, whole: bool) -> tuple[str, ...]:
    """The ways but torch's, on a route."""
    return ("split", "raw", "floats") if whole and route == "tf32" else ("split", "raw")


def fastest(
    can: Sequence[str], route: str, rows: int, columns: int, outputs: int, processors: int
) -> str:
    """Of some ways the fastest."""
    shape = rows, columns, outputs, processors
    return min(can, key=lambda way: predicted_us(way, route, *shape))
