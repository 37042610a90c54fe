"""limits: against figures worked out by hand for one H100 (copy 3.02 TB/s, read 3.06 TB/s)."""

from __future__ import annotations

import math

import pytest

import workbook as wb
from workbook import limits
from workbook.limits import Ceilings, Work

H100 = Ceilings(
    read_gbs=3060.0,
    copy_gbs=3020.0,
    fp32_tflops=51.0,
    tf32_tflops=375.0,
    launch_ms=0.004,
    source="recorded on an H100",
    half_tflops=682.0,
)
CPU = Ceilings(26.0, 20.0, 0.061, None, 0.0, "a laptop")

# x (1024, 8192) in float32 is 33 554 432 bytes, a folded row 32 768, the answers 4 096
SUM_CHAIN = Work(flops=16_777_216, read=33_587_200, written=4_096)


def test_sum_chain() -> None:
    assert SUM_CHAIN.bytes == 33_591_296  # 33.6 MB
    assert SUM_CHAIN.intensity == pytest.approx(0.49945, rel=1e-4)
    at_three = Ceilings(3000.0, 3000.0, 51.0, None, 0.004, "3.0 TB/s")
    floor = limits.floor_ms(SUM_CHAIN, at_three)
    assert floor.memory_ms == pytest.approx(0.0111971, rel=1e-5)  # 33.591296e6 / 3e12 s
    assert floor.compute_ms == pytest.approx(0.00032897, rel=1e-4)  # 16.78e6 / 51e12 s
    assert floor.launch_ms == 0.004
    assert floor.ms == pytest.approx(0.0151971, rel=1e-5)
    assert floor.bound == "memory"


def test_gemm() -> None:
    work = limits.gemm_work(1024, 8192, 8192)
    assert work.flops == 137_438_953_472  # 2 * 2^10 * 2^13 * 2^13 = 2^37
    assert work.read == 33_554_432 + 268_435_456  # 2^25 of x, 2^28 of W
    assert work.written == 33_554_432
    assert limits.gemm_work(3, 5, 7, itemsize=2) == Work(flops=210, read=2 * (15 + 35), written=42)


def test_whole_gemm_is_bound_by_arithmetic() -> None:
    work = limits.gemm_work(1024, 8192, 8192)
    float32 = limits.floor_ms(work, H100)
    assert float32.compute_ms == pytest.approx(2.6949, rel=1e-4)  # 137.439e9 / 51e12 s
    assert float32.bound == "compute"
    assert limits.floor_ms(work, H100, "ffma") == float32
    assert limits.floor_ms(work, H100, "tf32").compute_ms == pytest.approx(0.36650, rel=1e-4)
    assert limits.floor_ms(work, H100, "fp16x1").compute_ms == pytest.approx(0.20152, rel=1e-4)
    assert limits.floor_ms(work, H100, "fp16x3").compute_ms == pytest.approx(0.60457, rel=1e-4)


def test_half_the_weights_of_the_maxpool_problem() -> None:
    # W is (32768, 32768), 4.29 GB; its folded half 2.147 GB, x 16.8 MB: 0.70 ms at 3.06 TB/s
    folded = Work(flops=2.0 * 128 * 32768 * 16384, read=2**31 + 2**24, written=512)
    floor = limits.floor_ms(folded, H100, "tf32")
    assert floor.memory_ms == pytest.approx(0.70727, rel=1e-4)  # 2 164 260 864 / 3.06e12 s
    assert floor.bound == "memory"


def test_reads_and_copies_go_at_their_own_rates() -> None:
    uneven = Ceilings(10.0, 5.0, 1.0, None, 0.0, "made up")  # GB/s
    million = 1e6
    # 1 MB written with 1 MB read: 2 MB at 5 GB/s = 0.4 ms; 3 MB more read at 10 GB/s = 0.3 ms
    assert limits.floor_ms(Work(0, 4 * million, million), uneven).memory_ms == pytest.approx(0.7)
    assert limits.floor_ms(Work(0, 4 * million, 0), uneven).memory_ms == pytest.approx(0.4)
    assert limits.floor_ms(Work(0, million, 4 * million), uneven).memory_ms == pytest.approx(1.0)


def test_nothing_to_do_is_bound_by_the_launch() -> None:
    floor = limits.floor_ms(Work(0, 0, 0), H100)
    assert (floor.ms, floor.bound) == (0.004, "launch")


def test_work_adds_up() -> None:
    assert Work(1, 2, 3) + Work(10, 20, 30) == Work(11, 22, 33)
    assert Work(6, 1, 2).intensity == 2.0
    assert Work(1, 0, 0).intensity == math.inf
    assert Work(0, 0, 0).intensity == 0.0


def test_predicted_speedup() -> None:
    before = limits.floor_ms(limits.gemm_work(1024, 8192, 8192), H100)
    after = limits.floor_ms(SUM_CHAIN, H100)
    # (2.69488 + 0.004) / (0.0109776 + 0.004): 180 times
    assert limits.predicted_speedup(before, after) == pytest.approx(180.2, rel=1e-3)
    nothing = limits.floor_ms(Work(0, 0, 0), CPU)
    assert limits.predicted_speedup(before, nothing) == math.inf
    assert limits.predicted_speedup(nothing, nothing) == 1.0


@pytest.mark.parametrize(
    ("fold", "slow", "fast", "calls"),
    [(90.0, 2.75, 0.5, 40.0), (0.0, 2.0, 1.0, 0.0), (1.0, 1.0, 1.0, math.inf),
     (1.0, 1.0, 2.0, math.inf), (0.0, 1.0, 2.0, math.inf)],
)  # fmt: skip
def test_break_even(fold: float, slow: float, fast: float, calls: float) -> None:
    assert limits.break_even_calls(fold, slow, fast) == calls


def test_a_cpu_has_one_route() -> None:
    work = limits.gemm_work(8, 8, 8)
    assert limits.floor_ms(work, CPU).compute_ms == pytest.approx(1024 / 0.061e12 * 1e3)
    with pytest.raises(ValueError, match=r"'tf32' needs Ceilings.tf32_tflops.*a laptop"):
        limits.floor_ms(work, CPU, "tf32")
    with pytest.raises(ValueError, match="route is 'bf16'; want one of float32"):
        limits.floor_ms(work, CPU, "bf16")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Work(-1, 0, 0), "Work.flops is -1"),
        (lambda: Work(0, math.nan, 0), "Work.read is nan"),
        (lambda: Ceilings(0, 1, 1, None, 0, ""), "Ceilings.read_gbs is 0"),
        (lambda: Ceilings(1, 1, 1, -2, 0, ""), "Ceilings.tf32_tflops is -2"),
        (lambda: Ceilings(1, 1, 1, None, -1, ""), "Ceilings.launch_ms is -1"),
        (lambda: limits.gemm_work(0, 1, 1), "B is 0"),
        (lambda: limits.gemm_work(1, 1, 2.5), "N is 2.5"),
        (lambda: limits.break_even_calls(1, -1, 1), "slow_ms is -1"),
    ],
)
def test_rejects(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("half_tflops", [None, 790.0])
@pytest.mark.parametrize("p", wb.problems(), ids=lambda p: p.slug)
def test_every_variant_predicts(p, half_tflops):
    reach = Ceilings(3000, 3000, 51, 375, 0.004, "a test", half_tflops)
    predicting = [v for v in p.variants if v.predict]
    assert {v.name for v in p.variants if v.is_rung} == {v.name for v in predicting}
    for name in p.sizes:
        for v in predicting:
            assert 0 < v.predict(p.shape(name), reach) < 1e9
