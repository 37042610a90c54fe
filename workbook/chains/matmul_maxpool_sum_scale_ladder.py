"""The maxpool chain's work, and its ladder of kernels with what each is predicted to take."""

from __future__ import annotations

from collections.abc import Callable

import torch

from workbook import paths, split, variants
from workbook.limits import Ceilings, Work, floor_ms, gemm_work
from workbook.ops import FusedOp
from workbook.spec import SWEEPS as USUAL
from workbook.spec import Variant

__all__ = ["SWEEPS", "WORK", "ladder"]

# At paper size the weights have 4 GB: twice as many features at most, and fewer rows than usual.
_FEATURES = (32, 128, 512, 2048, 8192, 32768, 65536)
SWEEPS = {
    "cpu": USUAL["cpu"],
    "cuda": {"B": (1, 8, 32, 128, 512, 2048, 8192), "K": _FEATURES, "N": _FEATURES},
}


def _rows_left(N: int, pool: int) -> int:
    """Rows of weights that the product is left with."""
    return {1: 0, 2: N // 2}.get(pool, N // pool * pool)


def _before(B: int, K: int, N: int, pool: int) -> Work:
    """The Linear with its output written, read by the pool, whose output is written and summed."""
    pooled = 4.0 * B * (N // pool)
    return gemm_work(B, K, N) + Work(2.0 * B * N, 4.0 * B * N + pooled, pooled + 4.0 * B)


def _after(B: int, K: int, N: int, pool: int) -> Work:
    """x, the folded weights and y once; what the product makes is used where it is made."""
    M = _rows_left(N, pool)
    flops = 2.0 * B * K * (M + 1) + 3.0 * B * M
    return Work(flops, 4.0 * K * (B + M) + 8.0 * (K + M), 4.0 * B)


def _fold(B: int, K: int, N: int, pool: int) -> Work:
    """The chain after the algebra, and all weights read once, their differences written."""
    M = _rows_left(N, pool) if pool < 3 else 0
    return _after(B, K, N, pool) + Work(2.0 * K * N, 4.0 * N * (K + 1), 4.0 * K * M + 8.0 * (K + M))


WORK = {"before": _before, "after": _after, "fold": _fold}


CYCLES_OF_AN_ADD = 4  # latency of one floating-point addition on today's CPUs
CPU_HZ = 3.0e9
SM_HZ = 1.7e9  # H100 SXM under load
L2_GBS = 5500.0  # of an H100
LATENCY_MS = 0.7e-3  # of a load that misses L1 of an H100, unloaded


def _chain_of_adds(shape: dict, ceilings: Ceilings) -> float:
    adds = shape["B"] * shape["K"] * shape["N"]
    return adds * CYCLES_OF_AN_ADD / (torch.get_num_threads() * CPU_HZ) * 1e3


def _whole_product(shape: dict, ceilings: Ceilings) -> float:
    """The product's floor, its output written; then read."""
    B, K, N = (shape[name] for name in "BKN")
    read = 4.0 * B * N / ceilings.read_gbs / 1e6 + ceilings.launch_ms
    return floor_ms(gemm_work(B, K, N), ceilings).ms + read


def _half_product(launches: int) -> Callable[[dict, Ceilings], float]:
    def predict(shape: dict, ceilings: Ceilings) -> float:
        return floor_ms(_after(**shape), ceilings).ms + launches * ceilings.launch_ms

    return predict


def _lines_of_a_warp(shape: dict, ceilings: Ceilings) -> float:
    """All samples in one block: a load of a warp touches up to 32 cache lines, one a cycle."""
    return shape["K"] * shape["N"] * min(shape["B"], 128) / SM_HZ * 1e3


def _weights_for_each_sample(shape: dict, ceilings: Ceilings) -> float:
    """Blocks that run side by side find W in L2."""
    return 4.0 * shape["B"] * shape["K"] * shape["N"] / L2_GBS / 1e6


def _sector_after_sector(shape: dict, ceilings: Ceilings) -> float:
    """The product; then a thread alone with its row, one trip for each sector of 8 floats."""
    return _whole_product(shape, ceilings) + shape["N"] / 8 * LATENCY_MS


def _half_by_halves(shape: dict, ceilings: Ceilings) -> float:
    """Three products of halves, or their bytes; x split, g written and read, four launches."""
    B, K, M = shape["B"], shape["K"], _rows_left(shape["N"], shape["pool"])
    moved = (12.0 * B * K + 8.0 * B * M) / ceilings.copy_gbs * 1e-6
    return split.floor_ms(B, K, M, ceilings) + moved + 4 * ceilings.launch_ms


def ladder(op: FusedOp) -> tuple[Variant, ...]:
    """From the kernel that one writes first to ours: a CPU's, then a GPU's."""
    said = (
        ("cpu_01_row_at_a_time.cpp", "chain", _chain_of_adds, 8,
         "the chain as written: all N dot products of a row, window by window"),
        ("cpu_02_gemm_then_tail.cpp", "tail", _whole_product, None,
         "torch's product, whole; then windows and their sum, a row at a time"),
        ("cpu.cpp", "blocks", _half_product(0), None,
         "half a product by blocks, magnitudes added in the cache, a guard"),
        ("01_thread_per_sample.cu", "chain", _lines_of_a_warp, None,
         "one thread per sample, everything inside"),
        ("02_block_per_sample.cu", "chain", _weights_for_each_sample, None,
         "block per sample, both rows of a pair in one loop"),
        ("03_gemm_thread_per_row.cu", "tail", _sector_after_sector, None,
         "the library's product, then a thread per row"),
        ("04_gemm_block_tail.cu", "tail", _whole_product, None,
         "the library's product, then a block per row"),
        ("05_half_gemm_guard.cu", "half", _half_product(2), None,
         "half a product on differences of rows, a tail with the dot product, a guard"),
    )  # fmt: skip
    folder = paths.kernels() / op.slug
    rungs = [
        variants.rung(
            op, folder / file, idea, form=form, predict=predict, sample=sample,
            shrink=8 if file.startswith("01_") else 1,
        )
        for file, form, predict, sample, idea in said
    ]  # fmt: skip
    on_tensor_cores = variants.rung(
        op, folder / "05_half_gemm_guard.cu", "float32 by halves on tensor cores, rung 5's tail",
        form="split", predict=_half_by_halves, shared=split.SHARED, name="06_split_product",
    )  # fmt: skip
    return *rungs, on_tensor_cores
