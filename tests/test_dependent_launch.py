"""Kernels that begin while the one before them ends touch no memory before they have waited."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kit import needs_nvcc
from sass import disassembled

from workbook import build, paths

KERNELS = paths.kernels()
FILES = {  # what they are built with, for a GPU that has such launches
    "split_product/split_product.cu": (),
    "split_rows/split_rows.cu": (),
    "split_weights/split_weights.cu": (),
    "matmul_avgpool_gelu_scale_max/05_winner_in_double.cu": ("-DWB_WINNER",),
    "matmul_maxpool_sum_scale/05_half_gemm_guard.cu": (),
    "gemm_batchnorm_scale_softmax/04_tiles.cu": ("-DWB_TILES",),
    "gemm_batchnorm_scale_softmax/train_centre.cu": ("-DWB_TILES", "-DWB_TRAIN"),
    "gemm_batchnorm_scale_softmax/train_mean.cu": ("-DWB_TILES", "-DWB_TRAIN"),
    "gemm_batchnorm_scale_softmax/train_statistics.cu": ("-DWB_TILES", "-DWB_TRAIN"),
}
USUAL = ("add_slices_kernel", "fold_kernel")  # launched as ever
# May read weights before: all but the launch before it has ended. Weights have a kind of load to
# themselves; what that launch writes is read by others. Of means the compiler leaves them before.
EARLY, OF_WEIGHTS = "row_exponents_kernel", "LDG.E.NA."
TOUCHES = re.compile(
    r"\b(LDG|LD|STG|ST|ATOMG|ATOM|REDG|RED|UTMALDG|UTMASTG|UBLKCP|LDGSTS|CCTL)\b[.\w]* "
)


def early(file: Path, flags: tuple[str, ...]) -> dict[str, list[str]]:
    """By kernel, what touches global memory, or lets the next launch begin, before it waits for the
    one before."""
    arch = "90a" if file.name.startswith("split_product") else "90"
    common = ["-DWB_CUDA", *flags]
    report = build.cubin(file, arch=arch, include=[KERNELS / "common", file.parent], flags=common)
    found: dict[str, list[str]] = {}
    name, waited = "", True
    for line in disassembled(report.path).splitlines():
        if begins := re.match(r"\s*\.text\.(\w+):", line):
            name, waited = begins[1], False
            found[name] = []
        elif "ACQBULK" in line:
            waited = True
        elif not waited and (TOUCHES.search(line) or "PREEXIT" in line):
            found[name].append(line.strip())
    return found


@needs_nvcc
@pytest.mark.parametrize("file", FILES)
def test_nothing_is_touched_before_the_launch_before_has_ended(file):
    seen = early(KERNELS / file, FILES[file])
    mine = {name: lines for name, lines in seen.items() if not any(u in name for u in USUAL)}
    assert mine
    for name, lines in mine.items():
        others = [line for line in lines if EARLY not in name or OF_WEIGHTS not in line]
        assert not others, (name, others[:3])
        assert bool(lines) == (EARLY in name and "Means" in name), name


@needs_nvcc
@pytest.mark.parametrize("moved", ["to the end", "nowhere"])
def test_control_a_kernel_that_waits_too_late(tmp_path, moved):
    text = (KERNELS / "split_rows" / "split_rows.cu").read_text()
    wait, end = "  wait_for_previous();\n", "      give_halves<Width>"
    assert text.count(wait) == 1 and text.count(end) == 1
    text = text.replace(wait, "")
    if moved == "to the end":
        text = text.replace(end, wait + end)
    file = copied(tmp_path, text)
    assert any(early(file, ()).values())


@needs_nvcc
def test_control_a_kernel_that_lets_the_next_begin_before_it_has_waited(tmp_path):
    text = (KERNELS / "split_rows" / "split_rows.cu").read_text()
    wait, let = "  wait_for_previous();\n", "  let_next_begin();\n"
    assert text.count(wait) == 1
    seen = early(copied(tmp_path, text.replace(wait, wait + let)), ())
    assert seen and not any(seen.values())
    seen = early(copied(tmp_path, text.replace(wait, let + wait)), ())
    assert all(lines for name, lines in seen.items() if "split_rows" in name)


def copied(folder: Path, text: str) -> Path:
    """split_rows.cu as given, with its own headers beside it."""
    file = folder / "split_rows.cu"
    file.write_text(text)
    for header in (KERNELS / "split_rows").glob("*.h"):
        (folder / header.name).write_text(header.read_text())
    return file


def test_every_file_with_such_launches_is_looked_at():
    def includes(file: Path) -> bool:
        named = re.findall(r'#include "([^"]+)"', file.read_text())
        if "dependent_launch.cuh" in named:
            return True
        near = [folder / n for n in named for folder in (file.parent, KERNELS / "common")]
        return any(includes(f) for f in near if f.is_file())

    using = {f for f in KERNELS.rglob("*.cu") if includes(f)}
    # 04_tiles.cu includes rung 3, and is looked at with it
    using -= {KERNELS / "gemm_batchnorm_scale_softmax" / "03_row_in_registers.cu"}
    assert using == {KERNELS / name for name in FILES}
