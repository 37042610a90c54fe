"""What a build is made of: sources, headers, flags and compilers, under one digest."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from workbook import toolchain
from workbook.toolchain import NvccMissing, Program

__all__ = ["Recipe", "Source", "Sources", "recipe_of"]

Sources = Mapping[str, str] | Sequence[Path | str]

_HEADERS = (".h", ".cuh", ".hpp")
_SUFFIXES = (".cpp", ".cc", ".cu")
_INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">\n]+)[">]', re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """One file: its name and text count in the digest; `where` is what the compiler calls it."""

    name: str
    text: str
    where: str

    @property
    def is_cuda(self) -> bool:
        return self.name.endswith(".cu")


@dataclass(frozen=True)
class Recipe:
    """All that `digest` covers, ready to be built."""

    name: str
    sources: tuple[Source, ...]
    folders: tuple[Path, ...]
    host_flags: tuple[str, ...]
    device_flags: tuple[str, ...]
    cuda: bool
    digest: str

    @property
    def namespace(self) -> str:
        """The op namespace, and the library's file name."""
        return f"wb_{self.digest}"

    def arguments(self, folder: Path) -> dict[str, object]:
        """The arguments of load_inline, to build in `folder`."""
        common = [f"-DWB_NAMESPACE={self.namespace}", *includes(self.folders)]
        common += ["-DWB_CUDA"] if self.cuda else []
        device = [source for source in self.sources if source.is_cuda]
        return {
            "name": self.namespace,
            "cpp_sources": [unit(s for s in self.sources if not s.is_cuda)],
            "cuda_sources": [unit(device)] if device else None,
            "extra_cflags": _quoted([*self.host_flags, *common]),
            "extra_cuda_cflags": _quoted([*self.device_flags, *common]),
            "extra_ldflags": _quoted(toolchain.link_flags()),
            "build_directory": str(folder),
            "with_cuda": self.cuda,
            "verbose": True,  # ninja's output comes through the child's stdout
            "is_python_module": False,
            "no_implicit_headers": True,
        }


def recipe_of(
    name: str,
    sources: Sources,
    *,
    include: Sequence[Path | str] = (),
    cuda: bool = False,
    flags: Sequence[str] = (),
    cuda_flags: Sequence[str] = (),
) -> Recipe:
    """The recipe of one library; arguments and errors as in build.load."""
    if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
        raise ValueError(f"name: got {name!r}, wants letters, digits, '.', '_' or '-'")
    taken = read(sources)
    if not cuda and any(source.is_cuda for source in taken):
        raise ValueError(f"sources of {name}: a .cu file with cuda=False; give cuda=True")
    searched = folders_of(() if isinstance(sources, Mapping) else sources, include)
    compiler = toolchain.compiler()
    unique = () if compiler.is_clang else ("-fno-gnu-unique",)  # as for hidden symbols
    host = (toolchain.STABLE_ABI, *toolchain.host_flags(), *unique, *compiler.options, *flags)
    macros = [flag for flag in flags if flag.startswith("-D")]
    device = toolchain.device_flags((*cuda_flags, *macros)) if cuda else ()
    machine = [torch.__version__, sys.platform, compiler.path, compiler.version]
    machine += toolchain.link_flags()
    if cuda:
        nvcc = _linkable_nvcc()
        machine += [nvcc.path, nvcc.version, os.environ.get("CC", "")]  # CC: nvcc's host compiler
    content = [name, texts(taken), headers(taken, searched, include), host, device, machine]
    return Recipe(name, taken, searched, host, device, cuda, digest(content))


def read(sources: Sources) -> tuple[Source, ...]:
    """The sources themselves. ValueError for a wrong kind of file, OSError for a missing one."""
    if isinstance(sources, str | Path):
        raise ValueError(f"sources: got {sources!r}, wants a list of paths or {{file name: text}}")
    if isinstance(sources, Mapping):
        taken = tuple(Source(name, text, name) for name, text in sources.items())
    else:
        files = [Path(source).absolute() for source in sources]
        taken = tuple(Source(f.name, f.read_text(encoding="utf-8"), str(f)) for f in files)
    wrong = [source.name for source in taken if not source.name.endswith(_SUFFIXES)]
    if wrong or not taken:
        kinds = ", ".join(_SUFFIXES)
        raise ValueError(f"sources: got {wrong or 'none'}, wants files that end in {kinds}")
    return taken


def folders_of(files: Iterable[Path | str], include: Iterable[Path | str]) -> tuple[Path, ...]:
    """Where #include looks: beside the files, then in `include`. ValueError if one is missing."""
    wanted = [*(Path(file).absolute().parent for file in files), *map(Path, include)]
    missing = [str(folder) for folder in wanted if not folder.is_dir()]
    if missing:
        raise ValueError(f"include: got {', '.join(missing)}, wants folders that are there")
    return tuple(dict.fromkeys(folder.absolute() for folder in wanted))


def includes(folders: Iterable[Path]) -> list[str]:
    """The folders as compiler flags."""
    return [f"-I{folder}" for folder in folders]


def headers(
    sources: Iterable[Source], folders: Iterable[Path], include: Iterable[Path | str]
) -> list[tuple[str, str]]:
    """What a build may include, by name and digest: every header below `include`, whoever asks
    for it, and those in `folders` (which may be somebody's home) that the sources ask for."""
    below = [
        (str(file.relative_to(folder)), file.read_text(encoding="utf-8", errors="replace"))
        for folder in map(Path, include)
        for file in sorted(folder.rglob("*"))
        if file.suffix in _HEADERS and file.is_file()
    ]
    asked: dict[Path, str] = {}
    waiting = [(source.text, tuple(folders)) for source in sources]
    while waiting:
        text, places = waiting.pop()
        for name in _INCLUDE.findall(text):
            file = next((place / name for place in places if (place / name).is_file()), None)
            if file is not None and file not in asked:
                asked[file] = file.read_text(encoding="utf-8", errors="replace")
                waiting.append((asked[file], (file.parent, *folders)))
    found = [*below, *((file.name, text) for file, text in asked.items())]
    return [(name, digest(text)) for name, text in found]


def texts(sources: Iterable[Source]) -> list[tuple[str, str]]:
    """What of the sources counts in a digest: a library does not depend on where they lie."""
    return [(source.name, source.text) for source in sources]


def digest(content: object) -> str:
    """16 hexadecimal digits of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def unit(sources: Iterable[Source]) -> str:
    """One translation unit; #line makes the compiler speak of the original files."""
    return "".join(
        f"#line 1 {json.dumps(source.where, ensure_ascii=False)}\n{source.text}\n"
        for source in sources
    )


def _linkable_nvcc() -> Program:
    if torch.version.cuda is None:
        raise NvccMissing(
            f"torch {torch.__version__} is built without CUDA, so a CUDA library can not be linked "
            "here: install a CUDA build of torch, or use build.cubin to compile only"
        )
    return toolchain.nvcc()


def _quoted(flags: Iterable[str]) -> list[str]:
    """cpp_extension pastes flags, as they are, into a shell command of a ninja file."""
    return [shlex.quote(flag).replace("$", "$$") for flag in flags]
