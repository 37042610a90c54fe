"""What this machine lacks for the workbook, and the remedy for each."""

from __future__ import annotations

import importlib.util
import re
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from . import paths
from .machine import card
from .tools import compiler, missing_compiler, ninja, nvcc, output, tool_version

__all__ = ["Finding", "doctor"]

_MARKS = {True: "ok", False: "MISSING", None: "-"}


@dataclass(frozen=True)
class Finding:
    """One thing looked for. ok: there and works; not, and needed; None: not there, not needed here.

    `remedy` is what to do, empty when there is nothing to do.
    """

    name: str
    ok: bool | None
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"\n{'':21}{self.remedy}" if self.remedy else ""
        return f"{_MARKS[self.ok]:8}{self.name:13}{self.detail}{remedy}"


def doctor() -> list[Finding]:
    """Everything the workbook needs from this machine, looked at anew; raises nothing itself."""
    return [
        _compiler(),
        _ninja(),
        _headers(),
        _nvcc(),
        _torch(),
        _gpu(),
        _jupyter(),
        _checkout(),
        _cache(),
    ]


def _compiler() -> Finding:
    missing = missing_compiler()
    if missing is not None:
        return Finding("compiler", False, "no C++ compiler", missing)
    program = compiler()
    version = tool_version(program)
    if version:
        return Finding("compiler", True, f"{program}: {version}")
    remedy = f"run `{program} --version` and mend what it reports, or set CXX to another compiler"
    return Finding("compiler", False, f"{program} does not run", remedy)


def _ninja() -> Finding:
    program = ninja()
    version = tool_version(program)
    if version:
        return Finding("ninja", True, f"{program}: {version}")
    detail = "no ninja" if program is None else f"{program} does not run"
    return Finding("ninja", False, detail, "pip install --force-reinstall ninja")


def _headers() -> Finding:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.is_file():
        return Finding("headers", True, str(header))
    remedy = "only torch.compile on the CPU needs it: `apt install python3-dev`, or conda's Python"
    return Finding("headers", None, f"no {header}", remedy)


def _nvcc() -> Finding:
    program = nvcc()
    if program is None:
        needed = torch.cuda.is_available()
        remedy = "install the CUDA toolkit" + _of_torch() + ", or set CUDA_HOME to where it is"
        use = "CUDA kernels are not built" if needed else "only needed to compile CUDA kernels"
        return Finding("nvcc", False if needed else None, f"no nvcc: {use}", remedy)
    version = tool_version(program)
    if version:
        return Finding("nvcc", True, f"{program}: {version}")
    remedy = f"run `{program} --version` and mend what it reports, or set CUDA_HOME"
    return Finding("nvcc", False, f"{program} does not run", remedy)


def _torch() -> Finding:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    detail = f"torch {torch.__version__} ({build})"
    toolkit = re.search(r"release (\d+)\.(\d+)", tool_version(nvcc()))
    if not torch.version.cuda or not toolkit:
        return Finding("torch", True, detail)
    if toolkit[1] == torch.version.cuda.partition(".")[0]:
        return Finding("torch", True, f"{detail}, nvcc {toolkit[1]}.{toolkit[2]}")
    remedy = (
        f"torch was built for CUDA {torch.version.cuda}: install that major version of the CUDA "
        f"toolkit and set CUDA_HOME to it, or a torch built for CUDA {toolkit[1]}"
    )
    return Finding("torch", False, f"{detail}, but nvcc {toolkit[1]}.{toolkit[2]}", remedy)


def _gpu() -> Finding:
    with warnings.catch_warnings():  # an old driver makes torch warn; it is told below
        warnings.simplefilter("ignore")
        if torch.cuda.is_available():
            others = torch.cuda.device_count() - 1
            return Finding("GPU", True, card("cuda") + (f" and {others} more" if others else ""))
    lines = (output(["nvidia-smi", "-L"]) or "").splitlines()
    seen = next((line for line in lines if line.startswith("GPU ")), "")
    if not seen:
        return Finding("GPU", None, "no NVIDIA GPU: CPU kernels run live, GPU results are recorded")
    name = seen.partition(": ")[2].partition(" (UUID")[0]
    if not torch.version.cuda:
        remedy = "this torch is built without CUDA: install a CUDA build of torch (pytorch.org)"
    else:
        remedy = (
            f"torch needs a driver for CUDA {torch.version.cuda}: update the driver, or install a "
            "torch built for an older CUDA; also look at CUDA_VISIBLE_DEVICES"
        )
    return Finding("GPU", False, f"{name} is there, but torch does not see it", remedy)


def _jupyter() -> Finding:
    lacking = [
        name
        for name in ("nbconvert", "ipykernel", "jupyterlab")
        if importlib.util.find_spec(name) is None
    ]
    if not lacking:
        return Finding("jupyter", True, "nbconvert, ipykernel and jupyterlab are there")
    remedy = f"only notebooks and their reports need it: pip install {' '.join(lacking)}"
    return Finding("jupyter", None, f"no {', '.join(lacking)}", remedy)


def _checkout() -> Finding:
    try:
        return Finding("checkout", True, str(paths.root()))
    except paths.NotInCheckout as error:
        detail, _, remedy = str(error).partition(": ")
        return Finding("checkout", False, detail, remedy)


def _cache() -> Finding:
    wanted = paths.wanted_cache()
    if wanted is not None and paths.is_writable(wanted):
        return Finding("cache", True, str(wanted))
    detail = f"{wanted or 'no home folder'}: can not be written, a temporary folder is used"
    return Finding("cache", False, detail, "set WORKBOOK_CACHE to a folder you can write")


def _of_torch() -> str:
    return f" {torch.version.cuda}" if torch.version.cuda else ""
