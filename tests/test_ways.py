"""Which way a product goes: costs against recorded times, and what is chosen by them."""

from __future__ import annotations

import statistics

import pytest
import torch

from workbook import journal, paths, ways

SMS = 132  # multiprocessors of the card that was timed
FOUND = journal.load(paths.data()).query(kind="curve", variant="ways")


def timed(record, way: str) -> float:
    """The recorded time in microseconds, of halves without the sum of their parts."""
    B, K, N = (record.shape[name] for name in "BKN")
    us = record.how[f"{way}_us"]
    if way == "torch":
        return us
    _, parts = ways.cut(B, K, N, SMS, way)
    launch, number = ways.ADDED_US
    return us - launch - number * (parts + 1) * B * N / 1e6


def predicted(record, way: str, route: str) -> float:
    return ways.predicted_us(way, route, *(record.shape[name] for name in "BKN"), SMS)


def test_there_are_200_shapes_by_each_route():
    for route in ("float32", "tf32"):
        shapes = {tuple(r.shape.values()) for r in FOUND if r.route == route}
        assert len(shapes) == 200


def off(way: str, route: str, by: str) -> list[float]:
    """How far predictions by the costs of `by` are from what was timed on a route, ascending."""
    mine = [r for r in FOUND if r.route == route]
    return sorted(abs(predicted(r, way, by) / timed(r, way) - 1) for r in mine)


def fitted(way: str, route: str) -> list[float]:
    """The costs by least squares of relative errors, those far off counting less each time."""
    mine = [r for r in FOUND if r.route == route]
    rows = [ways.counts(way, *(r.shape[n] for n in "BKN"), SMS) for r in mine]
    counts = torch.tensor(rows, dtype=torch.float64)
    times = torch.tensor([timed(r, way) for r in mine], dtype=torch.float64)
    weights = 1 / times
    for _ in range(8):
        of = weights.unsqueeze(1)
        costs = torch.linalg.lstsq(counts * of, (times * weights).unsqueeze(1)).solution[:, 0]
        error = (counts @ costs / times - 1).abs()
        weights = 1 / times / error.clamp(min=0.05).sqrt()
    return costs.tolist()


@pytest.mark.parametrize("route", ["float32", "tf32"])
@pytest.mark.parametrize("way", ["torch", "split", "raw"])
def test_costs_are_the_fit_to_the_records(way, route):
    assert ways.COSTS[way, route] == pytest.approx(fitted(way, route), rel=2e-2, abs=2e-3)


@pytest.mark.parametrize("route", ["float32", "tf32"])
@pytest.mark.parametrize("way", ["torch", "split", "raw"])
def test_costs_are_those_of_the_records(way, route):
    found = off(way, route, route)
    assert statistics.median(found) < 0.07 and found[len(found) * 8 // 10] < 0.16
    other = "tf32" if route == "float32" else "float32"
    assert statistics.median(off(way, route, other)) > 0.1, "control: costs of the other route"


@pytest.mark.parametrize("route", ["float32", "tf32"])
def test_what_is_chosen_is_seldom_slower_than_torch_and_mostly_the_fastest(route):
    slower = missed = 0
    mine = [r for r in FOUND if r.route == route]
    for r in mine:
        times = {way: timed(r, way) for way in ("torch", "split", "raw")}
        chosen = times[ways.best(route, *(r.shape[name] for name in "BKN"), SMS)]
        slower += chosen > 1.1 * times["torch"]
        missed += chosen > 1.25 * min(times.values())
    assert slower <= 0.05 * len(mine) and missed <= 0.1 * len(mine)


@pytest.mark.parametrize(
    ("shape", "float32", "tf32"),
    [
        ((1024, 8192, 8192), "split", "split"),  # as whole chains were seen to be faster
        ((128, 32768, 16384), "split", "split"),
        ((1024, 8192, 512), "raw", "raw"),
        ((4096, 8192, 512), "raw", "torch"),
        ((65536, 8192, 512), "raw", "torch"),
        ((65536, 8192, 8192), "split", "split"),
        ((1024, 2048, 8192), "split", "split"),
        ((1, 8192, 8192), "torch", "torch"),
        ((1024, 8192, 16), "torch", "torch"),
        ((0, 8192, 8192), "torch", "torch"),
    ],
)
def test_the_best_way(shape, float32, tf32):
    assert ways.best("float32", *shape, SMS) == float32
    assert ways.best("tf32", *shape, SMS) == tf32


def test_more_work_never_takes_less():
    for way, route in ways.COSTS:
        sizes = [(B, K, N) for B in (64, 8192) for K in (512, 65536) for N in (256, 16384)]
        for B, K, N in sizes:
            less = ways.predicted_us(way, route, B, K, N, SMS)
            assert less > 0
            for more in ((8 * B, K, N), (B, 8 * K, N), (B, K, 8 * N)):
                assert ways.predicted_us(way, route, *more, SMS) > less


@pytest.mark.parametrize(
    ("shape", "outputs", "way", "tiles", "parts"),
    [
        ((1024, 8192), 8192, "split", 256, 1),
        ((1024, 8192), 512, "split", 16, 8),
        ((1024, 8192), 512, "raw", 32, 4),
        ((128, 32768), 16384, "split", 64, 2),
        ((129, 8192), 257, "split", 4, 32),  # 33 parts would fit; k has panels for 32
        ((1, 100), 1, "split", 1, 1),
        ((1, 8192), 0, "split", 1, 32),
    ],
)
def test_where_tiles_are_few_k_is_cut(shape, outputs, way, tiles, parts):
    assert ways.cut(*shape, outputs, SMS, way) == (tiles, parts)
