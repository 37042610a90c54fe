"""The programs that build kernels here, and the flags that suit this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from workbook import tools

__all__ = ["BuildError", "CompilerMissing", "KernelReport", "NvccMissing", "kernel_reports"]

STANDARD = "-std=c++20"
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # 2.11: the oldest torch that may load it
# Value-preserving only. Hidden symbols: an older build in the same process is never linked into
# a newer one. errno and floating-point traps are not used; keeping them stops vectorisation.
HOST_FLAGS = (
    "-O3",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
)
_FMA = ("-mavx2", "-mfma", "-mf16c")
_X86_FLAGS = {
    "AVX2": _FMA,
    "AVX512": (*_FMA, "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl"),
}
# cpp_extension switches the operators of half types off; plain nvcc leaves them on. Same here.
_HALF_OPERATORS = tuple(
    f"-U__CUDA_NO_{what}__"
    for what in ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS", "HALF2_OPERATORS")
)
DEVICE_FLAGS = (STANDARD, "-O3", "--expt-relaxed-constexpr", "-lineinfo", "-Xptxas", "-v")
_WITHOUT_GPU = ("80", "90")
_MOST_LINES = 16  # of compiler output in an error's text
_ERROR = re.compile(
    r"\berror( C?\d+)? ?:|\berror:|undefined (reference|symbol)|ptxas (error|fatal)"
    r"|cannot find -l|terminate called|Exception in aoti_torch"
    r"|^\s*what\(\)|Could not load this library|\bKilled\b"
)
_HINTS = {  # a reason where torch gives none
    "aoti_torch_library_": "torch refused a registration: an op defined twice, or a wrong schema",
}
_NOISE = re.compile(r"^(frame #|ninja:|FAILED:|\[\d+/\d+\]|collect2:|Error building)")


class CompilerMissing(RuntimeError):
    """A program that a build needs is not here; the text is one line with the remedy."""


class NvccMissing(CompilerMissing):
    """There is no nvcc here, or this torch can not link CUDA code."""


class BuildError(RuntimeError):
    """A build that failed: the text has the first errors, `log` everything, `path` its file."""

    def __init__(self, text: str, log: str, path: Path) -> None:
        super().__init__(text)
        self.log = log
        self.path = path


@dataclass(frozen=True)
class Program:
    """A compiler: its path, extra words that $CXX asked for, and one line of version."""

    path: str
    options: tuple[str, ...]
    version: str

    @property
    def is_clang(self) -> bool:
        return "clang" in self.version.lower()


def compiler() -> Program:
    """The C++ compiler: $CXX, else the first of c++, g++, clang++. Raises CompilerMissing.

    A ccache before it is left out: it does not know a folder that is new for each build.
    """
    words = shlex.split(os.environ.get("CXX", ""))
    if words and Path(words[0]).name in ("ccache", "sccache"):
        words = words[1:]
    found = shutil.which(words[0]) if words else tools.compiler()
    if found is None:
        raise CompilerMissing(tools.missing_compiler() or f"CXX names no program: {words[0]}")
    return _program(Path(found), tuple(words[1:]))


def nvcc() -> Program:
    """nvcc: of $CUDA_HOME or $CUDA_PATH, on PATH, or in /usr/local/cuda. Raises NvccMissing."""
    found = tools.nvcc()
    if found is None:
        raise NvccMissing("no nvcc: install the CUDA toolkit and put nvcc on PATH or set CUDA_HOME")
    return _program(found)


@functools.cache
def cuda_home(nvcc_path: str) -> Path:
    """The toolkit of an nvcc, which may be a wrapper script or a link outside of it."""
    near = Path(nvcc_path).resolve().parents[1]
    if (near / "include" / "cuda_runtime_api.h").is_file():
        return near
    told = run([nvcc_path, "--dryrun", "-E", "-x", "cu", os.devnull])[1]
    found = re.search(r"^#\$ TOP=(.+)$", told, re.MULTILINE)
    return Path(found.group(1).strip()).resolve() if found else near


def ninja_folder() -> Path:
    """The folder of ninja, often of a venv that is not on PATH. Raises CompilerMissing."""
    found = tools.ninja()
    if found is None:
        raise CompilerMissing(f"no ninja: run `{sys.executable} -m pip install ninja`")
    return found.parent


def host_flags(capability: str | None = None, machine: str | None = None) -> tuple[str, ...]:
    """Flags for C++ on this CPU; `capability` as torch.backends.cpu.get_cpu_capability() says."""
    capability = capability or torch.backends.cpu.get_cpu_capability()
    vectors: tuple[str, ...] = ()
    if (machine or platform.machine()).lower() in ("x86_64", "amd64"):
        vectors = next((v for k, v in _X86_FLAGS.items() if capability.startswith(k)), ())
    return (STANDARD, *HOST_FLAGS, *vectors)


@functools.cache
def link_flags() -> tuple[str, ...]:
    """The C++ library that this process runs with, by path.

    A compiler without a shared one of its own would link a second, static copy into the kernel.
    The two share some of their variables, and the first number written to a stream crashes.
    """
    maps = Path("/proc/self/maps")
    mapped = maps.read_text(errors="replace").splitlines() if maps.is_file() else []
    found = (line.split(maxsplit=5)[-1] for line in mapped if "/libstdc++.so" in line)
    return tuple(path for path in [next(found, "")] if os.path.isfile(path))


def device_flags(extra: Sequence[str] = ()) -> tuple[str, ...]:
    """Flags for nvcc, `extra` last; a -gencode or -arch among those replaces the default one."""
    chosen = any(re.match(r"-{1,2}(gencode|generate-code|gpu-arch|arch)", flag) for flag in extra)
    default = () if chosen else tuple(gencode(arch) for arch in architectures())
    hidden = ("-Xcompiler", "-fvisibility=hidden")
    return (*DEVICE_FLAGS, *_HALF_OPERATORS, *hidden, *default, *extra)


def architectures() -> tuple[str, ...]:
    """The compute capabilities of the visible GPUs, as in "90"; sm_80 and sm_90 without one."""
    if not torch.cuda.is_available():
        return _WITHOUT_GPU
    found = (torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
    return tuple(sorted({f"{major}{minor}" for major, minor in found}))


def gencode(arch: str) -> str:
    """The flag that builds for one architecture: "90a" -> -gencode=arch=compute_90a,code=sm_90a."""
    return f"-gencode=arch=compute_{arch},code=sm_{arch}"


def run(
    command: Sequence[str],
    *,
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    echo: bool = False,
) -> tuple[int, str]:
    """Run a program; return its exit status and what it wrote, stdout and stderr together.

    With `echo` each line also goes to sys.stderr when it comes. The output is read here rather
    than inherited, so a notebook shows it too. An interrupt ends the program and its children.
    """
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(
                list(command),
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        )
        stack.callback(_end, process)
        lines = []
        for line in process.stdout or ():
            lines.append(line)
            if echo:
                sys.stderr.write(line)
                sys.stderr.flush()
        return process.wait(), "".join(lines)


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _program(path: Path, options: tuple[str, ...] = ()) -> Program:
    path = path.absolute()
    state = path.stat()
    return Program(str(path), options, _version(path, (state.st_mtime_ns, state.st_size)))


@functools.cache
def _version(path: Path, stamp: tuple[int, int]) -> str:
    """One line, asked again when the file has changed (`stamp`)."""
    return tools.tool_version(path) or "unknown"


# --- reading what the compilers said -------------------------------------------------------------


@dataclass(frozen=True)
class KernelReport:
    """What ptxas said of one kernel: bytes a thread (spill: stores + loads; stack), bytes a block
    of static shared memory, registers a thread."""

    name: str
    arch: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


def kernel_reports(log: str) -> tuple[KernelReport, ...]:
    """The kernels in a log of `ptxas -v`, by architecture as they come, names demangled."""
    reports: list[KernelReport] = []
    entry, about = ("", ""), ""
    stack, spill = 0, 0
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '(\S+)' for '(?:sm_)?(\S+)'", line):
            entry, stack, spill = found.groups(), 0, 0
        elif found := re.search(r"Function properties for (\S+)", line):
            about = found.group(1)  # a device function that was not inlined has some too
        elif (found := re.search(r"(\d+) bytes stack frame, (\d+) \D+, (\d+) ", line)) and (
            about == entry[0]
        ):
            stack, spill = int(found.group(1)), int(found.group(2)) + int(found.group(3))
        elif (found := re.search(r"Used (\d+) registers", line)) and entry[0]:
            shared = re.search(r"(\d+) bytes smem", line)
            size = int(shared.group(1)) if shared else 0
            reports.append(KernelReport(*entry, int(found.group(1)), spill, stack, size))
            entry = ("", "")
    names = _demangled([report.name for report in reports])
    return tuple(dataclasses.replace(r, name=n) for r, n in zip(reports, names, strict=True))


def build_error(name: str, log: str, folder: Path) -> BuildError:
    """The error to raise for a failed build; its log is kept in `folder`."""
    path = folder / "failed.txt"
    path.write_text(log, encoding="utf-8")
    text = "\n".join(f"  {line}" for line in first_errors(log))
    return BuildError(f"{name} does not build:\n{text}\n  all that was said: {path}", log, path)


def first_errors(log: str) -> list[str]:
    """The first errors with the two lines that a compiler writes below each (code and caret)."""
    lines = [line.rstrip()[:200] for line in log.splitlines() if not _NOISE.search(line)]
    chosen: list[int] = []
    for i, line in enumerate(lines):
        if _ERROR.search(line):
            chosen += [j for j in range(i, min(i + 3, len(lines))) if j not in chosen]
    picked = [lines[i] for i in chosen if lines[i].strip()] or lines[-_MOST_LINES:]
    hints = [hint for sign, hint in _HINTS.items() if sign in log]
    return picked[: _MOST_LINES - len(hints)] + hints


def _demangled(names: Sequence[str]) -> list[str]:
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if not tool or not names:
        return list(names)
    plain = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True)
    told = plain.stdout.splitlines()
    return told if plain.returncode == 0 and len(told) == len(names) else list(names)
