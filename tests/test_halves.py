"""The split into halves and the model of a tensor core: against float64, and against wrong ways."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workbook import halves, operands

B, K, N = 8, 4096, 8
MOST = torch.tensor(3e38).item()
DENORMAL = 2.0**-149


def factors(family: str, k: int = K) -> tuple[Tensor, Tensor]:
    return operands.FAMILIES[family](B, k, N, torch.Generator().manual_seed(1))


def error(z: Tensor, x: Tensor, weight: Tensor, rows: bool = True) -> float:
    """Relative, of the worst row or of the whole."""
    exact = x.double() @ weight.double().T
    dim = 1 if rows else (0, 1)
    return ((z.double() - exact).norm(dim=dim) / exact.norm(dim=dim)).max().item()


def drift(z: Tensor, x: Tensor, weight: Tensor) -> float:
    return (z.double().abs().sum() / (x.double() @ weight.double().T).abs().sum() - 1).item()


def joined(hi: Tensor, lo: Tensor, exponents: Tensor) -> Tensor:
    """(hi + lo) 2^e in float64, by another way than the module's."""
    e = exponents.tolist()
    rows = [
        math.ldexp(1.0, n) * (h.double() + low.double())
        for h, low, n in zip(hi, lo, e, strict=True)
    ]
    return torch.stack(rows)


def within(v: Tensor) -> Tensor:
    """What a split may be off by: 2^-23 of a number, and 2^-39 of its row's largest at least."""
    return torch.maximum(v.abs() * 2.0**-23, v.abs().amax(1, keepdim=True) * 2.0**-39)


# --- wrong ways, kept ---------------------------------------------------------------------------


def half_at_once(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """No scaling: float16 begins at 2^-24 and ends at 65504."""
    hi = v.half()
    return hi, (v - hi.float()).half(), torch.zeros(v.size(0), dtype=torch.int32)


def half_cut(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """hi cut instead of rounded, as by a mask over bits: lo then needs a bit more than it has."""
    e = torch.frexp(v.abs().amax(1)).exponent - 15
    scaled = torch.ldexp(v, -e.unsqueeze(1))
    hi = (scaled.view(torch.int32) >> 13 << 13).view(torch.float32).half()
    lo = ((scaled - hi.float()).view(torch.int32) >> 13 << 13).view(torch.float32).half()
    return hi, lo, e


def exponent_by_log2(v: Tensor) -> Tensor:
    return torch.floor(torch.log2(v.abs().amax(1))) - 14


# --- column exponents -----------------------------------------------------------------------------


def test_a_columns_maximum_is_below_one_and_not_below_a_half():
    weight = factors("columns against each other")[1]
    weight[:, 3], weight[0, 5], weight[1, 5] = 0.0, math.nan, math.inf
    c = halves.column_exponents(weight)
    assert c.dtype == torch.int32 and c.shape == (K,) and c[3] == 0
    finite = torch.where(weight.isfinite(), weight, 0).double()
    largest = (finite.abs() * torch.exp2(-c.double())).amax(0)
    largest[3] = 0.5
    assert (largest >= 0.5).all() and (largest < 1).all()


def test_column_exponents_keep_both_factors_normal():
    weight = torch.tensor([[DENORMAL, 2.0**-126, MOST, 1.0, math.nan]])
    c = halves.column_exponents(weight)
    assert c.tolist() == [-126, -125, 126, 1, 0]
    for factor in (torch.exp2(c.float()), torch.exp2(-c.float())):
        assert (factor >= torch.finfo(torch.float32).tiny).all() and factor.isfinite().all()


# --- the split ------------------------------------------------------------------------------------

sizes = st.floats(-MOST, MOST, width=32, allow_nan=False)
lists = st.lists(sizes, min_size=1, max_size=20)


@settings(max_examples=300, deadline=None)
@given(lists, st.sampled_from([torch.float32, torch.float64]))
def test_a_split_keeps_twenty_two_bits_above_two_to_minus_sixteen_of_the_maximum(values, dtype):
    v = torch.tensor([values], dtype=dtype)
    hi, lo, e = halves.split(v)
    assert hi.dtype == lo.dtype == torch.float16 and e.dtype == torch.int32 and e.shape == (1,)
    assert ((joined(hi, lo, e) - v.double()).abs() <= within(v.double())).all()
    most = v.double().abs().max()
    if most > 0:
        assert 2.0**14 <= most * 2.0 ** -e.item() < 2.0**15


@settings(max_examples=100, deadline=None)
@given(st.floats(2.0**-14, 1.0, width=32))
def test_lo_is_below_half_a_unit_of_hi(value):
    hi, lo, _ = halves.split(torch.tensor([[1.0, value]]))
    spacing = 2.0 ** (math.frexp(hi[0, 1].item())[1] - 11)
    assert abs(lo[0, 1].item()) <= spacing / 2


def test_most_numbers_of_float32_come_back_exactly():
    """hi leaves up to 12 bits, lo holds 11: a half of the numbers need all 12, every other fits."""
    bits = torch.randint(1 << 23, (1, 100_000), generator=torch.Generator().manual_seed(0))
    v = 1 + bits * 2.0**-23
    exact = (joined(*halves.split(v)) == v.double()).double().mean().item()
    assert 0.74 < exact < 0.76


def test_columns_are_taken_along_exactly():
    x, weight = factors("columns against each other")
    c = halves.column_exponents(weight)
    for v, columns in ((x, c), (weight, -c)):
        scaled = v.double() * torch.exp2(columns.double())
        off = (joined(*halves.split(v, columns)) - scaled).abs()
        assert (off <= within(scaled)).all()


def test_zeros_denormals_and_the_largest_numbers():
    v = torch.tensor([[0.0, 0.0], [DENORMAL, 0.0], [MOST, 1.0], [MOST, DENORMAL], [-0.0, 0.0]])
    hi, lo, e = halves.split(v)
    assert e[0] == 0 and e[4] == 0
    assert hi.isfinite().all() and (lo == lo).all() and e.abs().max() <= 252
    back = joined(hi, lo, e)
    assert torch.equal(back[:2], v[:2].double())
    assert ((back[2:4, 0] - MOST) / MOST).abs().max() < 2.0**-23


def test_a_column_exponent_may_take_a_number_beyond_float32():
    hi, _, e = halves.split(torch.tensor([[MOST, 0.0]]), torch.tensor([126, 0], dtype=torch.int32))
    assert hi.isfinite().all() and 2.0**14 <= hi[0, 0] <= 2.0**15 and e.item() == 128 + 126 - 15


def test_what_is_not_finite_is_in_hi_and_leaves_the_rest_alone():
    v = torch.tensor(
        [[math.inf, 1.0, -3.0], [math.nan, 1.0, -3.0], [-math.inf] * 3, [5.0, 1.0, 2.0]]
    )
    hi, lo, e = halves.split(v)
    assert hi[0, 0] == math.inf and hi[1, 0].isnan() and (hi[2] == -math.inf).all()
    assert (lo[~hi.isfinite()] == 0).all() and e[2] == 0
    back = joined(hi, lo, e)
    assert back[0, 1:].tolist() == back[1, 1:].tolist() == [1.0, -3.0]
    assert back[3].tolist() == [5.0, 1.0, 2.0]


def test_without_scaling_bits_are_lost():
    v = torch.rand(1, 1000, generator=torch.Generator().manual_seed(0)) * 1e-3
    good, bad = joined(*halves.split(v)), joined(*half_at_once(v))
    assert ((good - v) / v).abs().max() < 2.0**-22 and ((bad - v) / v).abs().max() > 1e-4
    assert not half_at_once(torch.tensor([[1e5]]))[0].isfinite().all()


def test_a_cut_hi_is_worse_and_biased():
    v = torch.rand(1, 100_000, generator=torch.Generator().manual_seed(0)) + 1
    off = {way: (joined(*way(v)) - v.double()).mean().item() for way in (halves.split, half_cut)}
    assert abs(off[halves.split]) < 1e-10 and off[half_cut] < -1e-8


def test_a_row_of_zeros_has_no_logarithm():
    zeros = torch.zeros(1, 4)
    assert exponent_by_log2(zeros).isinf().all()
    assert (torch.ldexp(zeros, -exponent_by_log2(zeros))).isnan().all(), "0 · 2^inf is NaN"
    assert (joined(*halves.split(zeros)) == 0).all()


# --- the product ----------------------------------------------------------------------------------

WELL = [f for f in operands.FAMILIES if f not in ("outputs of small inputs", "one large weight")]


@pytest.mark.parametrize("rounding", halves.ROUNDINGS)
@pytest.mark.parametrize("family", WELL)
def test_three_products_are_as_good_as_float32(family, rounding):
    x, weight = factors(family)
    z = halves.product(x, weight, rounding=rounding)
    assert z.dtype == torch.float32 and z.shape == (B, N)
    own = error(x @ weight.T, x, weight)
    assert error(z, x, weight) <= max(2 * own, 2e-7)


def test_columns_against_each_other_need_equalising():
    x, weight = factors("columns against each other")
    assert error(halves.product(x, weight), x, weight) < 1e-6
    assert error(halves.product(x, weight, equalise=False), x, weight) > 1e-2


def test_one_product_has_eleven_bits_three_have_float32s_and_a_fourth_hardly_adds():
    x, weight = factors("normal")
    one, three, four = (
        error(halves.product(x, weight, products=n, rounding="to nearest"), x, weight, rows=False)
        for n in (1, 3, 4)
    )
    assert 1e-4 < one < 5e-4 and three < 3e-7 and 0.5 < three / four < 1.5


@pytest.mark.parametrize("rounding", ["toward zero", "aligned"])
def test_without_promotion_the_product_shrinks(rounding):
    x, weight = factors("uniform")
    drifts = [
        drift(halves.product(x, weight, promote=p, rounding=rounding), x, weight)
        for p in (64, 512, K)
    ]
    assert drifts[2] < 4 * drifts[1] < 16 * drifts[0] < 0 and drifts[2] < -5e-6
    straight = halves.product(x, weight, promote=K, rounding="to nearest")
    assert abs(drift(straight, x, weight)) < 5e-7


def test_the_drift_of_numbers_of_one_sign_is_as_many_truncations_say():
    """Each of n truncations loses half a unit, 2^-24 / m, of an accumulator that is on average half
    of the last; over a binade 1/m averages ln 2."""
    x, weight = factors("uniform")[0], factors("uniform")[1].abs()
    for promote in (256, 1024, K):
        n = 3 * promote / halves.INSTRUCTION
        predicted = -n * 2.0**-25 * math.log(2)
        assert 0.6 < drift(halves.product(x, weight, promote=promote), x, weight) / predicted < 1.5


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 3), st.integers(0, 70), st.integers(0, 3),
    st.sampled_from(sorted(halves.ROUNDINGS)), st.sampled_from([16, 64, 128]),
)  # fmt: skip
def test_any_shape(b, k, n, rounding, promote):
    g = torch.Generator().manual_seed(b + 10 * k + n)
    x, weight = torch.randn(b, k, generator=g), torch.randn(n, k, generator=g)
    z = halves.product(x, weight, rounding=rounding, promote=promote)
    exact = x.double() @ weight.double().T
    bound = (x.double().abs() @ weight.double().abs().T) * 2.0**-20
    assert z.shape == (b, n) and ((z - exact).abs() <= bound).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(-60, 60), st.integers(-60, 60))
def test_powers_of_two_change_nothing(s, t):
    """Rows and columns scaled exactly: the answer is scaled, bit for bit."""
    g = torch.Generator().manual_seed(2)
    x, weight = torch.randn(2, 40, generator=g), torch.randn(3, 40, generator=g)
    plain = halves.product(x, weight)
    assert torch.equal(halves.product(x * 2.0**s, weight * 2.0**t), plain * 2.0 ** (s + t))
    x[:, ::2] *= 2.0**s
    weight[:, ::2] *= 2.0**-s
    assert torch.equal(halves.product(x, weight), plain)


def test_extremes_of_float32():
    x = torch.tensor([[MOST, 0.0], [DENORMAL, 0.0], [0.0, 0.0], [1e30, 1e-30]])
    weight = torch.tensor([[1e-30, 1.0], [0.5, 1e30], [0.0, 0.0]])
    z, exact = halves.product(x, weight), x.double() @ weight.double().T
    assert torch.equal(z == 0, exact.float() == 0)
    assert torch.allclose(z.double(), exact, rtol=1e-6, atol=DENORMAL)
    assert (halves.product(x[:1] * 1.0, x[:1] * 1.0) == math.inf).all(), "beyond float32, as there"


def test_a_row_that_is_not_finite_stays_alone_and_an_infinity_may_turn_nan():
    """inf · lo of the other factor may have the other sign: a limit of the split, told aloud."""
    g = torch.Generator().manual_seed(3)
    x, weight = torch.randn(4, 64, generator=g), torch.randn(5, 64, generator=g)
    plain = halves.product(x, weight)
    x[1, 7], x[2, 9] = math.inf, math.nan
    for rounding in halves.ROUNDINGS:
        z = halves.product(x, weight, rounding=rounding)
        assert not z[1].isfinite().any() and z[2].isnan().all() and z[[0, 3]].isfinite().all()
        assert z[1].isnan().any(), "eager has only infinities there"
    assert torch.equal(halves.product(x, weight)[[0, 3]], plain[[0, 3]])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"products": 2}, "products: got 2; want 1, 3 or 4"),
        ({"promote": 0}, "promote: got 0; want a multiple of 16"),
        ({"promote": 40}, "promote: got 40"),
        ({"rounding": "up"}, "rounding: got 'up'; want one of toward zero"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        halves.product(torch.ones(1, 1), torch.ones(1, 1), **wrong)


# --- rounding -------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.floats(-MOST, MOST, allow_nan=False))
def test_truncated_is_the_nearest_number_not_farther_from_zero(value):
    v = torch.tensor([value], dtype=torch.float64)
    cut = halves.truncated(v)
    away = torch.nextafter(cut, torch.tensor([math.copysign(math.inf, value)]))
    assert cut.double().abs() <= v.abs() < away.double().abs()


def test_truncated_keeps_what_is_not_finite():
    v = torch.tensor([math.inf, -math.inf, math.nan, 1e39], dtype=torch.float64)
    cut = halves.truncated(v)
    assert cut[:2].tolist() == [math.inf, -math.inf] and cut[2].isnan()
    assert cut[3] == torch.finfo(torch.float32).max, "toward zero, no sum becomes infinite"


def test_alignment_drops_what_is_far_below_the_largest_term():
    """1 - 1 + 2^-26: the small term is gone before the large ones cancel; 2^-25 is not."""
    one = torch.tensor([[1.0, 1.0, 1.0]])
    for power, left in ((-25, 2.0**-25), (-26, 0.0)):
        b = torch.tensor([[1.0, -1.0, 2.0**power]])
        accumulator = torch.zeros(1, 1)
        assert halves.ROUNDINGS["aligned"](accumulator, one.double(), b.double()) == left
        assert halves.ROUNDINGS["toward zero"](accumulator, one.double(), b.double()) == 2.0**power


@settings(max_examples=200, deadline=None)
@given(st.floats(-MOST, MOST, width=32, allow_nan=False))
def test_tf32_keeps_ten_bits_cut_or_rounded(value):
    v = torch.tensor([value])
    cut, near = halves.truncated_tf32(v), halves.rounded_tf32(v)
    spacing = 2.0 ** (max(math.frexp(value)[1], -125) - 11)
    assert math.fmod(cut.item() / spacing, 1) == 0 and math.fmod(near.item() / spacing, 1) == 0
    assert 0 <= abs(value) - abs(cut.item()) < spacing
    assert abs(near.double().item() - value) <= spacing / 2


def test_tf32_keeps_what_is_not_finite():
    quiet = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)  # NaN by its last bit
    for way in (halves.truncated_tf32, halves.rounded_tf32):
        assert way(quiet).isnan().all() and way(torch.tensor([-math.inf])) == -math.inf


def test_cut_operands_make_a_product_too_small():
    x, weight = factors("uniform")
    cut, near = (
        drift(way(x).double() @ way(weight).double().T, x, weight)
        for way in (halves.truncated_tf32, halves.rounded_tf32)
    )
    assert -9e-4 < cut < -5e-4 and abs(near) < 2e-4
