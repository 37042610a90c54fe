"""What a batch-normalised product takes from its batch on a CPU: mean, centre, halves."""

from __future__ import annotations

import math

import pytest
import torch
from kit import drawn, needs_compiler
from torch import Tensor

from workbook.chains import gemm_batchnorm_scale_softmax_run as chain
from workbook.chains.gemm_batchnorm_scale_softmax_run_eval_back import GROUPS

U32 = 2.0**-24
# Samples around the groups and eight rows together, features around a strip and a vector
SHAPES = [(1, 1), (2, 5), (4, 15), (5, 16), (9, 17), (43, 255), (64, 256), (41, 300), (130, 1031)]
pytestmark = needs_compiler


@pytest.fixture(scope="module")
def run():
    return chain._batch_halves()


def written(run, x: Tensor, rows: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    (B, K), poison = x.shape, math.nan
    half, c = torch.full((B + rows, K), poison), torch.full((K,), poison)
    mean = torch.full((K,), poison, dtype=torch.float64)
    run(x, chain.RUN, half, c, mean)
    return half, c, mean


def lower_median(x: Tensor) -> Tensor:
    groups = min(GROUPS, x.size(0))
    parts = x[: x.size(0) // groups * groups].double().unflatten(0, (groups, -1))
    return parts.mean(1).float().median(0).values


def assert_right(run, x: Tensor) -> None:
    B = x.size(0)
    half, c, mean = written(run, x)
    torch.testing.assert_close(mean, x.double().mean(0), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(c, lower_median(x), rtol=2 * U32, atol=1e-30)
    away = (x.double() - c.double()) / 2
    assert ((half[:B] - away).abs() <= U32 * away.abs() + 2.0**-149).all()
    assert torch.equal(half[B:], chain._spread(mean.float()))
    bare, *others = written(run, x, rows=0)
    assert torch.equal(bare, half[:B]) and all(map(torch.equal, others, (c, mean)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_mean_centre_and_halves(run, shape, offset):
    assert_right(run, drawn(shape, seed=1) + offset)


def test_rows_at_a_distance(run):
    memory = drawn((20, 400), seed=2)
    assert_right(run, memory[::2, 3:303])
    assert_right(run, memory[:1, :7].expand(9, 7))


def test_one_far_row_moves_no_centre(run):
    x = drawn((40, 300), seed=3)
    far = x.clone()
    far[17] = 2.0**40
    (_, near, _), (_, c, mean) = written(run, x), written(run, far)
    assert (c - near).abs().max() < 1 and mean.min() > 2.0**33


def test_halves_of_the_largest_numbers_are_finite(run):
    x = torch.tensor([[3e38, -3e38], [-3e38, 3e38], [-3e38, 3e38]]).repeat(2, 1)
    half, *_ = written(run, x, rows=0)
    assert half.isfinite().all() and half.abs().max() > 2e38


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_column(run, value):
    x = drawn((12, 40), seed=4)
    x[5, 7] = value
    half, c, mean = written(run, x)
    others = [k for k in range(40) if k != 7]
    assert not mean[7].isfinite() and not half[5, 7].isfinite()
    assert half[:, others].isfinite().all() and c[others].isfinite().all()


def test_it_does_not_depend_on_the_number_of_threads(run):
    x, was = drawn((300, 1300), seed=5), torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(written(run, x))
    finally:
        torch.set_num_threads(was)
    assert all(all(map(torch.equal, each, found[0])) for each in found)


def test_without_the_kernel_torch_finds_as_much(run, monkeypatch):
    x = drawn((43, 300), seed=6)
    half, c, mean = chain._centred(x, 4)
    monkeypatch.setattr(chain, "_batch_halves", lambda: None)
    plain, its_c, its_mean = chain._centred(x, 4)
    torch.testing.assert_close(plain + its_c / 2, half + c / 2, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(its_mean, mean, rtol=1e-12, atol=1e-12)
    assert torch.equal(plain[43:], half[43:])


@pytest.mark.parametrize(
    ("x", "run_", "half", "words"),
    [
        ((0, 5), 64, (4, 5), "x: got no sample"),
        ((3, 5), 0, (7, 5), "run: got 0"),
        ((3, 5), 64, (2, 5), "half: got 2 rows; wants 3 or more"),
        ((3, 5), 64, (7, 4), "half"),
    ],
)
def test_what_the_binding_refuses(run, x, run_, half, words):
    c, mean = torch.empty(5), torch.empty(5, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=words):
        run(torch.empty(x), run_, torch.empty(half), c, mean)
