"""The programs the workbook calls: where they are, which version. No torch."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

__all__ = ["compiler", "missing_compiler", "ninja", "nvcc", "output", "tool_version"]

TOOL_SECONDS = 10.0  # an idle GPU without persistence mode takes seconds to answer nvidia-smi
_CUDA_FOLDER = Path("/usr/local/cuda")


def compiler() -> Path | None:
    """The C++ compiler: $CXX if set (even when that is not found), else c++, g++ or clang++."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    return _first_on_path(chosen[:1] if chosen else ["c++", "g++", "clang++"])


def missing_compiler() -> str | None:
    """One line with the remedy when there is no C++ compiler, else None."""
    if compiler() is not None:
        return None
    if os.environ.get("CXX", "").strip():
        return f"CXX={os.environ['CXX']!r} is not a program here: correct it or unset CXX"
    return (
        "no C++ compiler (c++, g++ or clang++ on PATH, or $CXX): install one, for example "
        "`apt install g++`, `conda install -c conda-forge cxx-compiler` or `xcode-select --install`"
    )


def ninja() -> Path | None:
    """The ninja program: of the installed Python package, else on PATH."""
    if importlib.util.find_spec("ninja") is not None:
        import ninja as package

        for name in ("ninja", "ninja.exe"):
            program = Path(package.BIN_DIR) / name
            if program.is_file():
                return program
    return _first_on_path(["ninja"])


def nvcc() -> Path | None:
    """The CUDA compiler, looked for where torch does: CUDA_HOME, CUDA_PATH, PATH, /usr/local."""
    homes = [Path(os.environ[n]) for n in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(n)]
    on_path = _first_on_path(["nvcc"])
    for program in [*(h / "bin" / "nvcc" for h in homes), on_path, _CUDA_FOLDER / "bin" / "nvcc"]:
        if program is not None and os.access(program, os.X_OK):
            return program
    return None


def tool_version(program: Path | None) -> str:
    """The line of `program --version` that holds the version; "" when it does not run."""
    if program is None:
        return ""
    text = output([str(program), "--version"]) or ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    release = [line for line in lines if line.startswith("Cuda compilation tools")]
    return (release or lines or [""])[0]


def _first_on_path(names: Sequence[str]) -> Path | None:
    found = filter(None, map(shutil.which, names))
    return next((Path(program) for program in found), None)


def output(command: Sequence[str], cwd: Path | None = None) -> str | None:
    """What a program prints; None when it is not there, fails or takes longer than 10 s."""
    env = {**os.environ, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            command,
            cwd=cwd,
            env=env,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=TOOL_SECONDS,
            encoding="utf-8",
            errors="replace",
        )
        return done.stdout if done.returncode == 0 else None
    return None
