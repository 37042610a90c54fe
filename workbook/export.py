"""A problem's ModelNew as one file that stands alone: the real modules merged, kernels as strings.

There is no second ModelNew. `amalgam` takes the definitions that it reaches from the package's own
modules; `standalone` stands where the package builds from kernels/. What the public harness of
these problems rejects in a text is looked for here, so that the modules stay free of it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from workbook import amalgam, journal, machine, ops, paths, tools, variants
from workbook.chains import problem
from workbook.spec import Problem

__all__ = ["complaints", "export", "reference_text", "text_of"]

_PACKAGE = Path(__file__).parent
_MARK = "Written by `python -m workbook export"
_STAND_INS = {("ops", name): ("standalone", name) for name in ("built", "NAMESPACE")}
# Left free for a reference that was executed in the same namespace.
_RESERVED = {"Model", "get_inputs", "get_init_inputs", "batch_size", "in_features", "out_features"}
_REJECTED = {  # in the whole text, strings and comments too
    "try:": r"\btry\s*:",
    "except": r"\bexcept\s*(:|\s\w)",
    "the word pass": r"\bpass\b",
    "threads": r"(import|from)\s+threading|threading\.Thread|concurrent\.futures|PoolExecutor",
    "processes": r"import\s+multiprocessing|multiprocessing\.(Process|Pool|Manager|Queue|Pipe)",
    "a kind of tensor": r"_make_subclass|class\s+\w+.*\((torch\.)?Tensor\)|torch\.Tensor\.__new__",
    "a changed clock": r"cuda\.(Event(\.\w+)?|synchronize)\s*=|time\.(perf_counter|time)\s*=",
}
_WANTED = ("__global__", "load_inline", "threadIdx")

Library = tuple[str, str, tuple[str, ...], tuple[str, ...]]  # name, device, files, flags


def export(slug: str, file: Path, reference: Path | None = None, force: bool = False) -> list[Path]:
    """Write the ModelNew of a problem to `file`, its Model and inputs to `reference`.

    Raises KeyError for an unknown slug; ValueError, FileNotFoundError or PermissionError for a
    place that can't be written, or that holds a file which this did not write, unless `force`.
    """
    places = {"FILE": file} | ({"--reference": reference} if reference else {})
    if len({path.absolute() for path in places.values()}) < len(places):
        raise ValueError(f"--reference: got {reference}, which is FILE too; wants another name")
    texts = [text_of(slug), *([reference_text(slug)] if reference else [])]
    for name, path in places.items():
        _expect_free(name, path, force)
    for path, text in zip(places.values(), texts, strict=True):
        path.write_text(text, encoding="utf-8")
    return list(places.values())


def text_of(slug: str) -> str:
    """The file that defines ModelNew."""
    p = problem(slug)
    libraries = _libraries(_merged(p, {}))
    sources = _sources(library for found in libraries.values() for library in found)
    made = _merged(p, {"LIBRARIES": _table(libraries), "SOURCES": _strings(sources)})
    build, mark = (made.called["standalone", name] for name in ("build_for", "DIGEST"))
    digest = hashlib.sha256(made.text.encode()).hexdigest()[:16]
    body = made.text.replace(f'{mark} = ""', f'{mark} = "{digest}"', 1)
    body = re.sub(r"\bworkbook\.(refresh|freeze)\b", r"\1", body)
    start = f'{build}("cuda" if torch.cuda.is_available() else "cpu")'
    text = f"{_head(p, digest)}\n{made.imports}\n\n{body}\n\n\n{start}\n"
    if found := list(complaints(text)):
        raise ValueError(f"{slug}: the public harness would reject the text: {'; '.join(found)}")
    return text


def reference_text(slug: str) -> str:
    """The file that defines Model, get_inputs and get_init_inputs, at paper size."""
    p = problem(slug)
    made = amalgam.amalgamate(_PACKAGE, [(f"chains.{slug}", "Model")])
    size = p.size("paper")
    return (
        f'"""Model: {p.title}.\n\n{_MARK} {slug} --reference`.\n"""\n\n{made.imports}\n\n'
        f"{made.text}\n\n\ndef get_inputs():\n"
        f"    return [torch.rand({size.batch}, {size.init[0]})]\n\n\n"
        f"def get_init_inputs():\n    return {list(size.init)!r}\n"
    )


def complaints(text: str) -> Iterator[str]:
    """What the public harness would reject in a file, with its line."""
    for what, pattern in _REJECTED.items():
        for found in re.finditer(pattern, text):
            yield f"{what} in line {text.count(chr(10), 0, found.start()) + 1}"
    yield from (f"no {word} anywhere" for word in _WANTED if word not in text)


def _merged(p: Problem, filled: Mapping[str, str]) -> amalgam.Amalgam:
    chain = f"chains.{p.slug}"
    ours = [(chain, "ModelNew"), ("fold", "refresh"), ("fold", "freeze")]
    return amalgam.amalgamate(
        _PACKAGE,
        [*ours, ("standalone", "build_for")],
        stand_ins=_STAND_INS,
        texts={("standalone", name): text for name, text in filled.items()},
        called={(chain, "Model"): "_Model", **{name: name[1] for name in ours}},
        reserved=_RESERVED,
    )


# --- kernels --------------------------------------------------------------------------------


def _libraries(made: amalgam.Amalgam) -> dict[str, list[Library]]:
    """By device: what `built` will be asked for, by ops of chains and by folds."""
    found: dict[str, list[Library]] = {"cpu": [], "cuda": []}
    for home, name in sorted(made.called):
        above, _, chain = home.rpartition(".")
        module = importlib.import_module(f"workbook.chains.{chain}") if above else None
        op = getattr(module, name, None)
        for device, kernel in op.kernels.items() if isinstance(op, ops.FusedOp) else ():
            flags, kind = tuple(op.forms[kernel.form].flags), "cpu" if device == "cpu" else "cuda"
            found[kind].append((op.slug, kind, tuple(kernel.files), flags))
    for node in ast.walk(ast.parse(made.text)):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if is_call and node.func.id == made.called["standalone", "built"]:
            for library in _named(node):
                found["cpu" if library[1] == "cpu" else "cuda"].append(library)
    return {device: list(dict.fromkeys(each)) for device, each in found.items()}


def _named(call: ast.Call) -> Iterator[Library]:
    """The libraries of built("name", device, files) where name and files are written out."""
    if not call.args or not isinstance(call.args[0], ast.Constant):
        return
    texts = [n.value for n in ast.walk(call) if isinstance(n, ast.Constant)]
    for device, suffix in (("cpu", ".cpp"), ("cuda", ".cu")):
        files = tuple(t for t in texts if isinstance(t, str) and t.endswith(suffix))
        if files:
            kind = "hopper" if "hopper" in texts else device
            yield call.args[0].value, kind, files, ()


def _sources(libraries: Iterable[Library]) -> dict[str, str]:
    """The files of these libraries and the headers that they ask for, by "folder/file"."""
    found: dict[str, str] = {}
    waiting = [(name, file) for name, _, files, _ in libraries for file in ("binding.cpp", *files)]
    while waiting:
        name, file = waiting.pop()
        near = [f"{name}/{file}", f"common/{file}"]
        place = next((place for place in near if (paths.kernels() / place).is_file()), None)
        if place is None:
            raise ValueError(f"{file}: wanted in kernels/{name}/ or kernels/common/, not there")
        if place not in found:
            found[place] = (paths.kernels() / place).read_text(encoding="utf-8")
            waiting += [(name, header) for header in _included(place, found[place])]
    return dict(sorted(found.items()))


def _included(place: str, text: str) -> Iterator[str]:
    """Headers of ours. Each takes the place of its first #include: no condition may be around."""
    depth = 0
    for line in text.splitlines():
        depth += bool(re.match(r"\s*#\s*if", line)) - bool(re.match(r"\s*#\s*endif", line))
        if asked := re.match(r'\s*#\s*include\s*"([^"]+)"', line):
            if depth or line != f'#include "{asked[1]}"':
                raise ValueError(f"{place}: {line!r}: wants a line of its own, under no condition")
            yield asked[1]


def _strings(sources: Mapping[str, str]) -> str:
    def quoted(text: str) -> str:
        plain = "'''" not in text and not text.endswith(("'", "\\"))
        return f"r'''{text}'''" if plain else repr(text)

    return "{\n" + "".join(f'    "{place}": {quoted(t)},\n' for place, t in sources.items()) + "}"


def _table(libraries: Mapping[str, list[Library]]) -> str:
    rows = {d: "".join(f"        {each!r},\n" for each in found) for d, found in libraries.items()}
    return "{\n" + "".join(f'    "{d}": [\n{lines}    ],\n' for d, lines in rows.items()) + "}"


# --- the file -------------------------------------------------------------------------------


def _head(p: Problem, digest: str) -> str:
    fused = p.variant("fused")
    kernels = ", ".join(
        f"{device} {variants.kernels_digest(p.slug, fused, device)}" for device in ("cpu", "cuda")
    )
    return f'''"""ModelNew: {p.title}.

A drop-in for the model of these operations: same constructor, same state_dict, same random draws.

{_MARK} {p.slug}`
from the package's own modules, merged by `ast`: change those, not this. MIT licence.

commit   {_commit()}
text     {digest}
kernels  {kernels}
torch    {_lowest_torch(p)}

Needs torch, a C++ compiler and ninja; on a GPU, nvcc. Kernels are compiled at import, those for a
device that is not there when first asked for, and kept in $TORCH_EXTENSIONS_DIR, else in
~/.cache/torch_extensions. Without a compiler the same algebra runs as plain torch, with a warning.
"""
'''


def _commit() -> str:
    told = machine.provenance()
    ours = tools.output(["git", "status", "--porcelain", "--", "workbook", "kernels"], paths.root())
    changed = told["dirty"] and ours != ""  # "": only other files are new or changed, such as FILE
    return told["commit"] + (", with changes that are in no commit" if changed else "")


def _lowest_torch(p: Problem) -> str:
    """The lowest version that records of its drop-in come from."""
    records = journal.load(paths.data()).query(problem=p.slug, variant="fused")
    known = {str(r.versions["torch"]) for r in records if r.versions.get("torch")}

    def numbers(version: str) -> list[int]:
        return [int(n) for n in re.findall(r"\d+", version.partition("+")[0])]

    lowest = min(known, key=lambda version: (numbers(version), version), default=None)
    if lowest is None:
        return f"{torch.__version__} wrote this; no record tells of a run"
    return f"{lowest} is the lowest that it was run on"


def _expect_free(name: str, path: Path, force: bool) -> None:
    there = path.exists()
    if there and not path.is_file():
        raise ValueError(f"{name}: got {path}, which is no file; wants the name of a file in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{name}: the folder {path.parent} is not there: make it first")
    if not os.access(path if there else path.parent, os.W_OK):
        raise PermissionError(f"{name}: {path} can't be written: choose another place")
    if there and not force and _MARK not in path.read_text(encoding="utf-8", errors="replace"):
        raise ValueError(
            f"{name}: {path} is there and was not written by this command: choose another name, "
            "or replace it with --force"
        )
