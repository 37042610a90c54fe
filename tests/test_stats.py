"""stats: against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbook import stats


def test_median() -> None:
    assert stats.median([3.0, 1.0, 2.0]) == 2.0
    assert stats.median([4, 1, 3, 2]) == 2.5
    assert stats.median((7.5,)) == 7.5


def test_quartiles() -> None:
    # sorted 1 2 3 4: q1 lies 0.75 of the way from 1 to 2, q3 0.25 from 3 to 4
    assert stats.quartiles([4.0, 2.0, 1.0, 3.0]) == (1.75, 2.5, 3.25)
    assert stats.quartiles([10.0, 30.0, 20.0, 50.0, 40.0]) == (20.0, 30.0, 40.0)
    assert stats.quartiles([1.0, 2.0]) == (1.25, 1.5, 1.75)
    assert stats.quartiles([5.0]) == (5.0, 5.0, 5.0)


@given(st.lists(st.floats(min_value=1e-3, max_value=1e3), min_size=2, max_size=30))
def test_quartiles_are_those_of_numpy(samples: list[float]) -> None:
    numpy = pytest.importorskip("numpy")
    assert stats.quartiles(samples) == pytest.approx(tuple(numpy.percentile(samples, [25, 50, 75])))


def test_spread() -> None:
    assert stats.spread([1.0, 2.0, 3.0, 4.0]) == pytest.approx(1.5 / 2.5)
    assert stats.spread([2.0, 2.0, 2.0]) == 0.0
    assert stats.spread([-4.0, -2.0, -3.0, -1.0]) == pytest.approx(0.6)
    assert stats.spread([-1.0, 0.0, 1.0]) == math.inf
    assert stats.spread([0.0, 0.0]) == 0.0
    assert math.isnan(stats.spread([1.0]))


def test_wide_is_over_a_tenth_or_unknown() -> None:
    assert not stats.is_wide([95.0, 100.0, 105.0])  # IQR 5 of 100
    assert not stats.is_wide([90.0, 100.0, 110.0])  # exactly 10 of 100
    assert stats.is_wide([80.0, 100.0, 120.0])  # 20 of 100
    assert stats.is_wide([1.0])


def test_paired_ratio_cancels_what_both_felt() -> None:
    # the machine slows down fourfold in between; each pair still says 2, 2.5, 3, 4
    ratio = stats.paired_ratio([2.0, 5.0, 12.0, 16.0], [1.0, 2.0, 4.0, 4.0])
    assert ratio == stats.Ratio(median=2.75, q1=2.375, q3=3.25, pairs=4)
    # the ratio of the medians, 8.5 / 3, would say otherwise
    assert stats.paired_ratio([3.0], [6.0]) == stats.Ratio(0.5, 0.5, 0.5, 1)


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ([1.0, 2.0], [1.0], "2 samples in a and 1 in b"),
        ([], [], "a is empty"),
        ([1.0, 2.0], [1.0, 0.0], r"b\[1\] is 0"),
        ([1.0, math.nan], [1.0, 1.0], r"a\[1\] is nan"),
        ([1.0], [math.inf], r"b\[0\] is inf"),
    ],
)
def test_paired_ratio_rejects(a: list[float], b: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        stats.paired_ratio(a, b)


@pytest.mark.parametrize("function", [stats.median, stats.quartiles, stats.spread, stats.is_wide])
@pytest.mark.parametrize(
    ("samples", "words"),
    [([], "samples is empty"), ([1.0, math.nan], r"\[1\] is nan"), ([math.inf], r"\[0\] is inf")],
)
def test_no_statistics_of_nothing(function, samples: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        function(samples)


@pytest.mark.parametrize(
    ("value", "relative", "text"),
    [
        (2.7634, 0.01, "2.76"),  # +- 0.028: hundredths
        (2.7634, 0.05, "2.8"),  # +- 0.14: tenths
        (2.7634, 0.5, "3"),  # +- 1.4: units
        (1.0512, 0.05, "1.05"),  # +- 0.053: hundredths
        (2.7, 0.01, "2.70"),  # the zero is known
        (2261.3, 0.03, "2260"),  # +- 68: tens
        (2261.3, 0.0, "2261"),  # never more than four
        (0.011197, 0.02, "0.0112"),  # +- 0.00022
        (9.99, 0.05, "10.0"),  # +- 0.5: tenths
        (9.96, 0.05, "10.0"),
        (9.94, 0.05, "9.9"),
        (999.96, 0.0, "1000"),  # the carry does not make a fifth digit
        (9.996, 0.4, "10"),  # +- 4: units, and the rounding carries
        (99.96, 0.5, "100"),  # tens
        (-0.5234, 0.03, "-0.52"),
        (2.3e-7, 0.1, "2.3e-07"),
        (0.0, 0.1, "0"),
        (123456.0, 3.0, "100000"),  # spread beyond the value: one digit
        (5.0, math.inf, "5"),
        (2.7634, math.nan, "2.8"),  # unknown: two
        (1.5e7, 0.01, "1.50e+07"),
        (math.inf, 0.1, "inf"),
        (math.nan, 0.1, "nan"),
    ],
)
def test_significant(value: float, relative: float, text: str) -> None:
    assert stats.significant(value, relative) == text


def test_significant_rejects_a_negative_spread() -> None:
    with pytest.raises(ValueError, match="relative_spread is -0.1"):
        stats.significant(1.0, -0.1)


@given(
    st.floats(min_value=1e-9, max_value=1e9),
    st.floats(min_value=1e-3, max_value=0.99),
    st.sampled_from([1.0, -1.0]),
)
def test_rounding_stays_within_the_spread(size: float, relative: float, sign: float) -> None:
    # half a unit of the first digit of size * relative is at most half of it; a bit for floats
    # (four digits resolve 5e-4, so a spread of 1e-3 is the least that the cap allows)
    shown = float(stats.significant(sign * size, relative))
    assert abs(shown - sign * size) <= 0.5001 * size * relative
