"""Statistics of timings: medians, quartiles, paired ratios, and the digits they support."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

__all__ = ["Ratio", "is_wide", "median", "paired_ratio", "quartiles", "significant", "spread"]

WIDE = 0.10  # IQR / median beyond which a timing is called wide, as torch.utils.benchmark does
MOST_DIGITS = 4  # no timing here is good to more
UNKNOWN_DIGITS = 2  # what is shown of a value whose spread nobody knows


@dataclass(frozen=True)
class Ratio:
    """Median and quartiles of the ratios a[i] / b[i], and how many pairs there were."""

    median: float
    q1: float
    q3: float
    pairs: int


def median(samples: Sequence[float]) -> float:
    """The middle sample, or the mean of the two middle ones. ValueError if empty or not finite."""
    return float(statistics.median(_finite(samples, "samples")))


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """(q1, q2, q3), interpolated linearly between samples as numpy does; one sample is all three.

    ValueError if there are none or one is not finite.
    """
    values = _finite(samples, "samples")
    if len(values) == 1:
        return values[0], values[0], values[0]
    q1, q2, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return q1, q2, q3


def spread(samples: Sequence[float]) -> float:
    """Interquartile range / |median|, no unit; nan for a single sample, whose spread is unknown."""
    q1, q2, q3 = quartiles(samples)
    if len(samples) == 1:
        return math.nan
    if q3 == q1:
        return 0.0
    return (q3 - q1) / abs(q2) if q2 else math.inf


def is_wide(samples: Sequence[float]) -> bool:
    """Whether the spread is over 10 % of the median, or unknown (a single sample)."""
    return not spread(samples) <= WIDE


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """Ratios a[i] / b[i] of samples taken in turn: > 1 where a is the slower one.

    Pairs cancel what a shared machine does to both. ValueError if the lengths differ, if there
    are no pairs, or if some b[i] is 0.
    """
    if len(a) != len(b):
        raise ValueError(
            f"paired_ratio: got {len(a)} samples in a and {len(b)} in b; want one b for each a, "
            "taken in the same round"
        )
    over, under = _finite(a, "a"), _finite(b, "b")
    if 0.0 in under:
        raise ValueError(f"paired_ratio: b[{under.index(0.0)}] is 0; want samples above 0")
    q1, q2, q3 = quartiles([x / y for x, y in zip(over, under, strict=True)])
    return Ratio(median=q2, q1=q1, q3=q3, pairs=len(over))


def significant(value: float, relative_spread: float) -> str:
    """`value` with its last digit at the first digit of |value| * relative_spread.

    At least one digit and at most four; two when the spread is nan (unknown). Powers of ten are
    written out from 1e-4 up to 1e6. ValueError for a negative spread.
    """
    if relative_spread < 0:
        raise ValueError(f"significant: relative_spread is {relative_spread}; want 0 or more")
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    exact = Decimal(repr(float(value)))
    place = exact.adjusted() - _digits(abs(value), relative_spread) + 1
    rounded = exact.quantize(Decimal(1).scaleb(place))
    exponent = rounded.adjusted()  # one more where the rounding carries: 9.99 to tenths is 10.0
    digits = min(exponent - place, MOST_DIGITS - 1)
    if -4 <= exponent < 6:
        return f"{rounded:.{max(digits - exponent, 0)}f}"
    return f"{float(rounded):.{digits}e}"


def _digits(magnitude: float, relative_spread: float) -> int:
    if math.isnan(relative_spread):
        return UNKNOWN_DIGITS
    uncertain = magnitude * relative_spread
    if uncertain == 0:
        return MOST_DIGITS
    if math.isinf(uncertain):
        return 1
    digits = math.floor(math.log10(magnitude)) - math.floor(math.log10(uncertain)) + 1
    return min(max(digits, 1), MOST_DIGITS)


def _finite(samples: Sequence[float], name: str) -> list[float]:
    values = [float(sample) for sample in samples]
    if not values:
        raise ValueError(f"{name} is empty; want at least one number")
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"{name}[{index}] is {value}; want finite numbers")
    return values
