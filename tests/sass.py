"""What a compiled kernel is made of."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from workbook import tools


def disassembled(file: Path) -> str:
    """By nvdisasm: on PATH, beside nvcc, or from its package in this environment."""
    packages = Path(sys.prefix).glob("lib/*/site-packages/nvidia/*/bin")
    near = [Path(tools.nvcc() or ".").resolve().parent, *packages]
    found = shutil.which("nvdisasm") or next(
        (str(folder / "nvdisasm") for folder in near if (folder / "nvdisasm").is_file()), None
    )
    if found is None:
        pytest.skip("no nvdisasm here: pip install nvidia-cuda-nvdisasm")
    done = subprocess.run([found, str(file)], capture_output=True, text=True, check=True)
    return done.stdout
