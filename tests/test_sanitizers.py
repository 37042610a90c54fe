"""CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer, over edge shapes.

A driver of each folder that has some (tests/sanitizers/) calls `launch` as the binding does, on
heap memory that ends where a tensor ends. A kernel that reads or writes one element beyond stops
it; that it would is shown by making each buffer one element short, and by kernels spoiled on
purpose.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from kit import needs_compiler

import workbook as wb
from workbook import paths, toolchain

DRIVERS = Path(__file__).parent / "sanitizers"
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]
FOLDERS = sorted(  # those for a CPU; others have but a binding in C++
    {p.parent.name for p in paths.kernels().glob("*/*.cpp") if p.stem != "binding"}
)
pytestmark = needs_compiler


def kernels() -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """(folder, files, flags) of every CPU kernel: rungs, controls, and what the ops run."""
    found = {}
    for p in wb.problems():
        for v in p.variants:
            if v.source is not None and v.source.suffix == ".cpp":
                found[p.slug, v.source.name] = tuple(f.name for f in v.files), v.flags
    for file in paths.kernels().glob("*/*.cpp"):
        if file.stem == file.parent.name:  # what several problems share
            found[file.stem, file.name] = (file.name,), ()
    return [(slug, files, flags) for (slug, _), (files, flags) in sorted(found.items())]


KERNELS = kernels()


def compiled(
    folder: Path, slug: str, files: tuple, flags: tuple, *, texts: dict | None = None
) -> Path:
    """The driver of a folder and these kernels, one unit as the binding and its kernels are.

    texts: other contents of some of the files, or of headers that they ask for.
    """
    unit = folder / "unit.cpp"
    lines = [f'#include "{DRIVERS / slug}.cpp"']
    for name, text in ({name: text_of(slug, name) for name in files} | (texts or {})).items():
        (folder / name).write_text(text, encoding="utf-8")  # a header is found beside who asks
    lines += [f'#include "{folder / name}"' for name in files]
    unit.write_text("\n".join(lines) + "\n", encoding="utf-8")
    include = [DRIVERS, paths.kernels() / slug, paths.kernels() / "common"]
    program = folder / "driver"
    command = [
        toolchain.compiler().path,
        *toolchain.compiler().options,
        *toolchain.host_flags(),
        *SANITIZE,
        *flags,
        *(f"-I{i}" for i in include),
        str(unit),
        "-o",
        str(program),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if "unrecognized argument" in done.stderr or "cannot find" in done.stderr:
        pytest.skip("this compiler has no sanitizers here")
    assert done.returncode == 0, done.stderr
    return program


def text_of(slug: str, name: str) -> str:
    places = [paths.kernels() / folder / name for folder in (slug, "common")]
    return next(place for place in places if place.is_file()).read_text(encoding="utf-8")


def run(program: Path, *arguments: object) -> subprocess.CompletedProcess:
    """Leaks are no subject here: their check traces the process, which some hosts forbid."""
    return subprocess.run(
        [str(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=0"},
    )


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: f"{k[0]}/{k[1][-1]}")
def test_a_kernel_stays_in_its_memory(kernel, tmp_path):
    slug, files, flags = kernel
    program = compiled(tmp_path, slug, files, flags)
    done = run(program)
    assert done.returncode == 0, done.stdout + done.stderr
    buffers = int(done.stdout)
    assert buffers >= 2
    for i in range(buffers):  # the control: to the last element of each, and seen one beyond
        seen = run(program, i)
        assert seen.returncode not in (0, 3), f"buffer {i} one element short goes unseen"
        # a vector across the end is an unknown crash to the sanitizer
        overflow = re.search("AddressSanitizer: (heap-buffer-overflow|unknown-crash)", seen.stderr)
        assert overflow, seen.stderr[:2000]


def test_every_cpu_kernel_is_run():
    there = {(f, p.name) for f in FOLDERS for p in (paths.kernels() / f).glob("*.cpp")}
    run_here = {(slug, name) for slug, files, _ in KERNELS for name in files}
    assert there - run_here == {(f, "binding.cpp") for f in FOLDERS}
    assert {f"{f}.cpp" for f in FOLDERS} == {p.name for p in DRIVERS.glob("*.cpp")}


SPOILED = {  # what: (folder, file, old, new, what the sanitizer says)
    "reads one beyond": (
        "matmul_sum_max_mean_logsumexp",
        "cpu_02_folded_one_chain.cpp",
        "k < p.K;",
        "k <= p.K;",
        "heap-buffer-overflow",
    ),
    "writes one beyond": (
        "matmul_sum_max_mean_logsumexp",
        "cpu_02_folded_one_chain.cpp",
        "p.y[i] =",
        "p.y[i + 1] =",
        "heap-buffer-overflow",
    ),
    "reads one before": (
        "matmul_maxpool_sum_scale",
        "cpu_02_gemm_then_tail.cpp",
        "p.z + i * p.N",
        "p.z - 1 + i * p.N",
        "heap-buffer-overflow",
    ),
    "reads by vectors beyond the end": (
        "narrow_product",
        "dot_tiles.h",
        "add(whole, p.K - whole);",
        "add(whole, kFloats);",
        "heap-buffer-overflow",
    ),
    "writes a panel's vectors beyond a row": (
        "whole_batch",
        "outer_tiles.h",
        "if (count >= kFloats) return",
        "return",
        "heap-buffer-overflow",
    ),
    "an index of 32 bits overflows": (
        "matmul_sum_max_mean_logsumexp",
        "cpu_02_folded_one_chain.cpp",
        "p.y[i] =",
        "volatile int at = 2147483647; at = at + static_cast<int>(i) + 1; p.y[i] =",
        "signed integer overflow",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_control_a_spoiled_kernel_is_stopped(name, tmp_path):
    slug, file, old, new, says = SPOILED[name]
    text = text_of(slug, file)
    assert text.count(old) == 1
    is_header = file.endswith(".h")
    files, flags = next((f, g) for s, f, g in KERNELS if s == slug and (is_header or f[-1] == file))
    done = run(compiled(tmp_path, slug, files, flags, texts={file: text.replace(old, new)}))
    assert done.returncode != 0 and says in done.stderr, done.stdout + done.stderr


def test_control_a_row_that_is_not_written_is_seen(tmp_path):
    slug, file = "matmul_sum_max_mean_logsumexp", "cpu_02_folded_one_chain.cpp"
    text = text_of(slug, file).replace("i < end;", "i < end - (end == p.B);")
    done = run(compiled(tmp_path, slug, (file,), (), texts={file: text}))
    assert done.returncode == 3 and "not written" in done.stdout
