"""The build in an exported file: kernel sources as strings, a library by load_inline for each.

`export` fills in SOURCES, LIBRARIES and DIGEST; `built` stands where the package has its own,
which reads kernels/ and builds in a child process.

A library is built in a folder of its own and moved into the cache when it is complete. Processes
take turns by a lock of the system, which ends with its holder.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import re
import shlex
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from workbook import ops, toolchain, tools

__all__ = ["DIGEST", "LIBRARIES", "NAMESPACE", "SOURCES", "build_for", "built"]

DIGEST = ""  # of the exported file
SOURCES: dict[str, str] = {}  # "folder/file" below kernels/ -> its text
LIBRARIES: dict[str, list[tuple]] = {}  # device -> what `built` may be asked for
OLDEST_TORCH = 2, 11  # as in toolchain.STABLE_ABI
_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)


def _free(name: str) -> str:
    """`name`, or with a number where this process has ops of that name: a file imported twice."""
    taken = {op.partition("::")[0] for op in torch._C._dispatch_get_all_op_names()}
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free


NAMESPACE = _free(f"workbook_{DIGEST}")


def build_for(device: str) -> None:
    """Build, or find, every library for `device` (cpu or cuda)."""
    for library in LIBRARIES.get(device, ()):
        built(*library)


def built(
    name: str, device: str, files: Sequence[str], flags: Sequence[str] = ()
) -> Callable | None:
    """The op "run" of the binding and these files of kernels/<name>/; None without a compiler."""
    return _built(name, device, tuple(files), tuple(flags))


@functools.cache
def _built(
    name: str, device: str, files: tuple[str, ...], flags: tuple[str, ...]
) -> Callable | None:
    if _lacks(device):
        return None
    cuda, compiler = device != "cpu", toolchain.compiler()
    host = (toolchain.STABLE_ABI, *toolchain.host_flags(), *compiler.options)
    host += () if compiler.is_clang else ("-fno-gnu-unique",)
    macros = [flag for flag in (*flags, *(["-DWB_CUDA"] if cuda else [])) if flag.startswith("-D")]
    kernels = [file for file in files if file.endswith(".cu")]
    plan = {
        "cpp_sources": _unit(name, ["binding.cpp", *(f for f in files if f not in kernels)]),
        "cuda_sources": _unit(name, kernels) if kernels else None,
        "extra_cflags": [*host, *(flag for flag in flags if flag not in macros), *macros],
        "extra_cuda_cflags": [*toolchain.device_flags(ops.ARCHITECTURE.get(device, ())), *macros]
        if cuda
        else [],
        "extra_ldflags": [*toolchain.link_flags()],
    }
    machine = [torch.__version__, str(compiler), str(toolchain.nvcc()) if cuda else ""]
    digest = hashlib.sha256(json.dumps([plan, machine]).encode()).hexdigest()[:16]
    namespace = f"wb_{digest}"
    for kind in ("extra_cflags", "extra_cuda_cflags", "extra_ldflags"):
        own = [f"-DWB_NAMESPACE={namespace}"] if kind != "extra_ldflags" else []
        # cpp_extension pastes flags, as they are, into a shell command of a ninja file
        plan[kind] = [shlex.quote(flag).replace("$", "$$") for flag in [*plan[kind], *own]]
    _load(namespace, {**plan, "with_cuda": cuda})
    return getattr(torch.ops, namespace).run.default


def _unit(name: str, files: Sequence[str]) -> str:
    """One translation unit of these files, each header in the place where it is first asked for."""
    seen: set[str] = set()

    def text(file: str) -> str:
        place = next(p for p in (f"{name}/{file}", f"common/{file}") if p in SOURCES)
        if place in seen:
            return ""
        seen.add(place)
        whole = SOURCES[place].replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda found: text(found[1]), whole)

    return "\n".join(map(text, files))


def _load(namespace: str, plan: dict[str, object]) -> None:
    folder = _folder()
    library = folder / f"{namespace}.so"
    with contextlib.ExitStack() as stack:
        if not library.is_file():
            stack.enter_context(_turn(folder / "turn"))
        if hasattr(getattr(torch.ops, namespace), "run"):  # to register twice ends the process
            return
        if library.is_file():
            torch.ops.load_library(str(library))
            return
        temporary = stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix="tmp-"))
        stack.enter_context(_environment())
        from torch.utils.cpp_extension import load_inline

        load_inline(
            namespace,
            **plan,
            build_directory=temporary,
            is_python_module=False,
            no_implicit_headers=True,
        )
        os.replace(Path(temporary, library.name), library)


@functools.cache
def _folder() -> Path:
    """$TORCH_EXTENSIONS_DIR, else the user's cache; a temporary folder if that is read-only."""
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: no home
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        chosen = os.environ.get("TORCH_EXTENSIONS_DIR") or Path(cache, "torch_extensions")
        folder = Path(chosen, "workbook").absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix="workbook-"))


@contextlib.contextmanager
def _turn(file: Path) -> Iterator[None]:
    """Wait until no other process or thread is in here: load_inline is for one at a time."""
    import fcntl

    with open(file, "w") as handle:
        with contextlib.suppress(OSError):  # a network folder without: both build, the last stays
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Where torch looks for programs: ninja is often that of a venv that is not on PATH."""
    search = [str(toolchain.ninja_folder()), os.environ.get("PATH", os.defpath)]
    wanted = {"CXX": toolchain.compiler().path, "PATH": os.pathsep.join(search)}
    if nvcc := tools.nvcc():  # may be a script; torch reads this once, for a first CPU build too
        wanted["CUDA_HOME"] = str(toolchain.cuda_home(str(nvcc)))
    with contextlib.ExitStack() as stack:
        for name, value in wanted.items():
            if name in os.environ:
                stack.callback(os.environ.__setitem__, name, os.environ[name])
            else:
                stack.callback(os.environ.pop, name, None)
            os.environ[name] = value
        yield


@functools.cache
def _lacks(device: str) -> str:
    """What a build lacks, in a line with the remedy; told in one warning. "" if nothing."""
    told = ops.missing(device)
    if not told and importlib.util.find_spec("setuptools") is None:  # torch's builds import it
        told = f"no setuptools: run `{sys.executable} -m pip install setuptools`"
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        told = f"torch {torch.__version__} has no stable ABI yet: install torch 2.11 or later"
    if told:
        warnings.warn(f"ModelNew runs as plain torch on {device}: {told}", stacklevel=5)
    return told
