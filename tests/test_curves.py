"""Curve records, and their figures: any product can be measured, wrong ones show as wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from workbook import curves, halves, journal, operands, plot

SMALL = {"rows": (4, 8), "depth": 256, "depths": (1, 7, 64)}


def plain(x, weight, promote):
    return x @ weight.T


def modelled(x, weight, promote):
    return halves.product(x, weight, promote=promote)


def one_product(x, weight, promote):
    return halves.product(x, weight, promote=promote, products=1)


def only_64(x, weight, promote):
    if promote != 64:
        raise ValueError("promote: this kernel was built for 64")
    return plain(x, weight, promote)


@pytest.fixture(scope="module")
def measured():
    return curves.measure(modelled, method="fp16x3", implementation="emulation", **SMALL)


def test_the_three_sweeps_are_there_with_what_a_record_needs(measured):
    points = {(r.how["sweep"], r.family, r.shape["K"], r.how["promote"]) for r in measured}
    assert points == {
        *(("promotion", "uniform", 256, p) for p in (64, 128, 256)),
        *(("depth", "uniform", k, 64) for k in (1, 7, 64)),
        *(("family", family, 256, 64) for family in operands.FAMILIES),
    }
    assert len(points) == len(measured) and len({r.run for r in measured}) == 1
    for r in measured:
        assert (r.kind, r.problem, r.method) == ("curve", "split_product", "fp16x3")
        assert r.shape["B"] == 4 and r.shape["N"] == 8 and r.seed == 0 and r.commit and r.date
        assert r.rel_error_rows >= r.rel_error > 0 and r.rel_error_eager > 0 and r.limit >= 2e-7
        assert math.isfinite(r.value) and r.unit and r.how["outputs"] > 0


def test_a_record_is_read_back_as_it_was(measured, tmp_path):
    path = journal.place(measured[0], tmp_path)
    assert path.name == "split_product.jsonl"
    journal.append(measured, path)
    assert list(journal.load(tmp_path)) == list(measured)
    kept = journal.load(tmp_path).newest(("card", "method", "implementation"))
    assert len(kept) == len(measured)


def test_the_default_sweeps_are_the_ones_agreed_on():
    assert curves.PROMOTIONS == (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    assert curves.DEPTHS == (1, 7, 64, 4096, 131072) and curves.DEPTH == 8192


def test_the_float32_product_measures_as_itself():
    for r in curves.measure(plain, method="ffma", sweeps=["depth", "family"], **SMALL):
        assert r.passed and r.rel_error == r.rel_error_eager
        assert r.rel_error_rows == r.rel_error_eager_rows
        assert r.how["outputs"] == r.how["outputs_eager"]


def test_a_wrong_product_is_outside_the_rule():
    found = curves.measure(one_product, method="fp16x1", sweeps=["family"], **SMALL)
    assert not any(r.passed for r in found) and all("error" in r.reason for r in found)
    found = curves.measure(lambda x, w, p: 1.01 * (x @ w.T), method="x", sweeps=["depth"], **SMALL)
    assert all(r.value == pytest.approx(0.01, rel=1e-3) for r in found), "the drift has its sign"


def test_small_outputs_beside_large_ones_are_seen_by_the_column():
    (r,) = curves.measure(
        modelled, method="fp16x3", sweeps=["family"], families=["outputs of small inputs"], **SMALL
    )
    assert r.passed and r.how["outputs"] > 1e-4 and r.how["outputs_eager"] < 1e-6


def test_a_call_that_raises_is_kept_with_its_reason():
    found = curves.measure(only_64, method="ffma", sweeps=["promotion"], **SMALL)
    assert [r.passed for r in found] == [True, False, False]
    assert "built for 64" in found[1].reason and found[1].rel_error is None
    picture = plot.error_over(found, "promotion")
    assert "ffma" in picture.alt


def test_equal_seeds_are_equal_numbers():
    one, two = (
        curves.measure(plain, method="ffma", sweeps=["depth"], seed=3, **SMALL) for _ in range(2)
    )
    assert [r.rel_error for r in one] == [r.rel_error for r in two]


def test_an_unknown_sweep_is_refused():
    with pytest.raises(ValueError, match="sweeps: got colour; want some of promotion, depth"):
        curves.measure(plain, method="ffma", sweeps=["colour"])


# --- families -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", operands.FAMILIES)
def test_families_are_finite_and_as_named(family):
    make = operands.FAMILIES[family]
    x, weight = make(6, 300, 4, torch.Generator().manual_seed(0))
    assert x.shape == (6, 300) and weight.shape == (4, 300)
    assert x.dtype == weight.dtype == torch.float32
    assert x.isfinite().all() and weight.isfinite().all()
    again = make(6, 300, 4, torch.Generator().manual_seed(0))
    assert torch.equal(again[0], x) and torch.equal(again[1], weight)


def test_columns_against_each_other_multiply_to_ordinary_sizes():
    x, weight = operands.FAMILIES["columns against each other"](
        6, 300, 4, torch.Generator().manual_seed(0)
    )
    sizes = (x.abs().amax(0), weight.abs().amax(0))
    assert all(s.max() / s.min() > 2.0**30 for s in sizes)
    both = sizes[0] * sizes[1]
    assert both.max() / both.min() < 2.0**10


# --- figures --------------------------------------------------------------------------------------


def lines(picture) -> list:
    drawn = picture.figure.axes[0].get_lines()
    return [line for line in drawn if len(line.get_xdata()) > 2]


@pytest.mark.parametrize("drift", [False, True])
def test_curves_of_records_hold_their_numbers(measured, drift):
    picture = plot.error_over(measured, "promotion", drift=drift)
    wanted = [r for r in measured if r.how["sweep"] == "promotion"]
    drawn = [list(line.get_ydata()) for line in lines(picture)]
    ours = [abs(r.value) if drift else r.rel_error for r in wanted]
    own = [abs(r.how["drift_eager"]) if drift else r.rel_error_eager for r in wanted]
    assert ours in drawn and own in drawn
    assert ("sum of |z|" in picture.alt) == drift
    assert "A model in float64" in "".join(t.get_text() for t in picture.figure.texts)


def test_a_model_and_a_device_stand_side_by_side(measured):
    device = [
        replace(r, implementation="hopper", device="cuda", card="NVIDIA H100") for r in measured
    ]
    alt = plot.error_over([*measured, *device], "depth").alt
    assert all(name in alt for name in ("fp16x3, model:", "fp16x3, cuda:", "float32, cuda:"))
    assert "float32, cpu:" not in alt, "the device's own float32 product is the one to compare with"
    alt = plot.error_by_family([*measured, *device]).alt
    assert "Measured on NVIDIA H100" in alt and "A model in float64 on" in alt


def test_families_show_every_row_and_what_is_outside_the_rule(measured):
    wrong = curves.measure(one_product, method="fp16x1", sweeps=["family"], **SMALL)
    picture = plot.error_by_family([*measured, *wrong])
    drawn = {m.get_gid(): list(m.get_xdata()) for m in picture.figure.axes[0].get_lines()}
    for r in wrong:
        assert drawn[f"row/fp16x1, cpu/{r.family}"] == [r.rel_error_rows]
        assert drawn[f"output/fp16x1, cpu/{r.family}"] == [r.how["outputs"]]
        assert drawn[f"row/float32/{r.family}"] == [r.rel_error_eager_rows]
    texts = " ".join(t.get_text() for t in picture.figure.texts)
    assert texts.count("outside the rule: ") >= len(wrong) - 1


def test_without_records_of_the_sweep_a_figure_says_what_to_run(measured):
    with pytest.raises(ValueError, match="records: got 0, none of kind 'curve' over depth"):
        plot.error_over([], "depth")
    with pytest.raises(ValueError, match="over family; want some: run curves.measure"):
        plot.error_by_family([r for r in measured if r.how["sweep"] == "depth"])
    with pytest.raises(ValueError, match="sweep: got 'family'; want one of promotion, depth"):
        plot.error_over(measured, "family")
