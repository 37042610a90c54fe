"""Sources to a loaded library: one digest, one build each, readable errors.

A library is built by torch.utils.cpp_extension.load_inline in a child process, in a folder of its
own, and moved into the cache when it is complete and has been loaded once there. So nothing half
built is ever loaded, a registration that aborts does not take this process along, and this
process neither imports cpp_extension nor lends it its stdout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import filelock
import torch

from workbook import paths, recipe, toolchain
from workbook.recipe import Recipe, Sources
from workbook.toolchain import BuildError, CompilerMissing, KernelReport, NvccMissing

__all__ = [
    "BuildError",
    "CompilerMissing",
    "CubinReport",
    "KernelReport",
    "Library",
    "NvccMissing",
    "cubin",
    "kernel_reports",
    "load",
]

kernel_reports = toolchain.kernel_reports

_SAY_WAITING_AFTER = 3.0  # seconds
_REFUSED = "Exception in aoti_torch"  # torch 2.11 prints it and goes on without the op
_CHILD = """
import json, os, shlex, sys
sys.excepthook = lambda kind, error, trace: print(error, error.__cause__ or "", sep="\\n")
from torch.utils import cpp_extension
if " " in cpp_extension.TORCH_LIB_PATH:  # it goes into -L as it is
    cpp_extension.TORCH_LIB_PATH = shlex.quote(cpp_extension.TORCH_LIB_PATH)
with open(sys.argv[1], encoding="utf-8") as job:
    cpp_extension.load_inline(**json.load(job))
sys.stdout.flush()
os._exit(0)
"""


@dataclass(frozen=True)
class Library:
    """A loaded library. `seconds` is what `load` took; `log` is what the compilers said."""

    name: str
    digest: str
    path: Path
    namespace: str
    seconds: float
    cached: bool
    log: str

    def op(self, name: str) -> Callable:
        """The op that the binding registered as `name`: torch.ops.<namespace>.<name>."""
        with contextlib.suppress(AttributeError):
            return getattr(getattr(torch.ops, self.namespace), name)
        start = self.namespace + "::"
        known = torch._C._dispatch_get_all_op_names()
        there = sorted(found.removeprefix(start) for found in known if found.startswith(start))
        raise AttributeError(
            f"library {self.name} registers no op {name!r}; it has {', '.join(there) or 'none'}"
        )


@dataclass(frozen=True)
class CubinReport:
    """A cubin: its kernels, what nvcc said, its file, whether it was there already."""

    kernels: tuple[KernelReport, ...]
    log: str
    path: Path
    cached: bool


_loaded: dict[str, Library] = {}


def load(
    name: str,
    sources: Sources,
    *,
    include: Sequence[Path | str] = (),
    cuda: bool = False,
    flags: Sequence[str] = (),
    cuda_flags: Sequence[str] = (),
    verbose: bool = False,
) -> Library:
    """Build (or find) the library of these sources and load it into this process.

    name: letters, digits, . _ -; names the folder in the cache.
    sources: paths, or {file name: text}; .cpp and .cu. All .cpp make one translation unit, all
        .cu another, in the order given. The binding registers its ops in WB_NAMESPACE.
    include: folders for #include; the folders of the sources are searched before them.
    cuda: link CUDA, compile .cu and define WB_CUDA. flags, cuda_flags: after the defaults; a
        -gencode in cuda_flags replaces the default one, a -D in flags is for both compilers.
    verbose: stream what the compilers say (ptxas too) to stderr; a cached build repeats it.

    Raises BuildError, CompilerMissing, NvccMissing; ValueError for a wrong argument.
    """
    start = time.perf_counter()
    plan = recipe.recipe_of(
        name, sources, include=include, cuda=cuda, flags=flags, cuda_flags=cuda_flags
    )
    found = _loaded.get(plan.digest)
    cached = found is not None
    if found is None:
        library = _folder(paths.cache() / "build" / name / plan.digest) / f"{plan.namespace}.so"
        cached = _opened(library) or not _built(plan, library, verbose)
        if not _opened(library):
            torch.ops.load_library(str(library))  # raises with the linker's reason
        found = Library(name, plan.digest, library, plan.namespace, 0.0, cached, _log(library))
        _loaded[plan.digest] = found
    if verbose and cached:
        print(found.log, file=sys.stderr)
    return dataclasses.replace(found, seconds=time.perf_counter() - start, cached=cached)


def cubin(
    source: Path | str,
    *,
    arch: str = "90",
    include: Sequence[Path | str] = (),
    flags: Sequence[str] = (),
    verbose: bool = False,
) -> CubinReport:
    """Compile device code for one architecture ("90", "90a"), no GPU needed, and read ptxas.

    source: a path, or the text itself. Raises NvccMissing, BuildError, FileNotFoundError.
    """
    nvcc = toolchain.nvcc()
    is_text = isinstance(source, str) and ("\n" in source or not source.endswith(".cu"))
    taken = recipe.read({"kernel.cu": source} if is_text else [source])
    folders = recipe.folders_of([] if is_text else [source], include)
    options = toolchain.device_flags((toolchain.gencode(arch), *flags))
    content = [
        recipe.texts(taken),
        recipe.headers(taken, folders, include),
        options,
        nvcc.path,
        nvcc.version,
    ]
    stem = f"{Path(taken[0].name).stem}-sm_{arch}-{recipe.digest(content)}"
    target = _folder(paths.cache() / "cubin" / stem) / "kernel.cubin"
    cached = target.is_file()
    if not cached:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="tmp-") as temporary:
            unit, made = Path(temporary, "kernel.cu"), Path(temporary, target.name)
            unit.write_text(recipe.unit(taken), encoding="utf-8")
            command = [nvcc.path, "-cubin", *options, *recipe.includes(folders), str(unit)]
            status, log = toolchain.run(
                [*command, "-o", str(made)], folder=unit.parent, echo=verbose
            )
            if status or not made.is_file():
                raise toolchain.build_error(taken[0].name, log, target.parent)
            _publish(made, log, target)
    log = _log(target)
    if verbose and cached:
        print(log, file=sys.stderr)
    return CubinReport(kernel_reports(log), log, target, cached)


def _opened(library: Path) -> bool:
    """Load a library that is there and fits; once a process, as to register twice aborts it."""
    if any(Path(known).name == library.name for known in torch.ops.loaded_libraries):
        return True
    with contextlib.suppress(OSError):
        if library.is_file():
            torch.ops.load_library(str(library))
            return True
    return False


def _built(plan: Recipe, library: Path, verbose: bool) -> bool:
    """Build under the lock of this digest; False if another process had just done it."""
    folder = library.parent
    with _locked(folder, plan.name), contextlib.ExitStack() as stack:
        if _opened(library):
            return False
        for left_over in folder.glob("tmp-*"):  # of a killed build: the lock says nobody is in it
            shutil.rmtree(left_over, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(dir=folder, prefix="tmp-"))
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        command = [sys.executable, "-c", _CHILD, str(_job(plan, temporary))]
        env = _environment(plan.cuda)
        status, log = toolchain.run(command, folder=temporary, env=env, echo=verbose)
        made = temporary / library.name
        if status or not made.is_file() or _REFUSED in log:
            raise toolchain.build_error(plan.name, log, folder)
        _publish(made, log, library)
    return True


def _job(plan: Recipe, folder: Path) -> Path:
    """A file with the arguments of load_inline; texts beside it, so a compiler can quote them."""
    for source in plan.sources:
        if source.where == Path(source.name).name:
            (folder / source.name).write_text(source.text, encoding="utf-8")
    job = folder / "job.json"
    job.write_text(json.dumps(plan.arguments(folder)), encoding="utf-8")
    return job


def _environment(cuda: bool) -> dict[str, str]:
    """The child's: the programs found here, the modules of this process, no compiler wrapper."""
    hidden = ("PYTORCH_NVCC", "TORCH_CUDA_ARCH_LIST")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    compiler = Path(toolchain.compiler().path)
    search = [str(toolchain.ninja_folder()), env.get("PATH", os.defpath)]
    if " " in str(compiler.parent):  # torch 2.11 does not quote it
        search.insert(0, str(compiler.parent))
        compiler = Path(compiler.name)
    env["CXX"] = str(compiler)
    env["PATH"] = os.pathsep.join(search)
    env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    env["PYTHONSAFEPATH"] = "1"
    env["TORCH_NO_COMPILER_WRAPPER"] = "1"
    if cuda:
        env["CUDA_HOME"] = str(toolchain.cuda_home(toolchain.nvcc().path))
    return env


def _publish(made: Path, log: str, target: Path) -> None:
    """The log first: a library that is there has one. Both appear whole or not at all."""
    told = made.with_name("log.txt")
    told.write_text(log, encoding="utf-8")
    os.replace(told, target.with_name("log.txt"))
    os.replace(made, target)


def _log(target: Path) -> str:
    log = target.with_name("log.txt")
    return log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""


@contextlib.contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    """The system drops this lock with the process that holds it, however that ends."""
    lock = filelock.FileLock(folder / "build.lock")
    with contextlib.suppress(filelock.Timeout):
        lock.acquire(timeout=_SAY_WAITING_AFTER)
    if not lock.is_locked:
        print(f"waiting for another process that builds {name}", file=sys.stderr)
        lock.acquire()
    with contextlib.ExitStack() as stack:
        stack.callback(lock.release)
        yield


def _folder(wanted: Path) -> Path:
    """A folder to build in: one that has its library already may be read-only."""
    if any(wanted.glob("*.so")) or any(wanted.glob("*.cubin")) or paths.is_writable(wanted):
        return wanted
    other = _instead(wanted.parents[1]) / wanted.name
    other.mkdir(exist_ok=True)
    return other


@functools.cache
def _instead(folder: Path) -> Path:
    other = Path(tempfile.mkdtemp(prefix="workbook-"))
    warnings.warn(f"{folder} can not be written: building in {other}", stacklevel=5)
    return other
