"""build: every trap of cpp_extension that the workbook's facts name, sprung once here."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from workbook import build, recipe, toolchain, tools

ROOT = Path(__file__).resolve().parents[1]
COMMON = ROOT / "kernels" / "common"
SECONDS = 120  # until a test that waits for a process gives up

# `answer` comes from a header; `many` from a static of a template, which GCC would share between
# all libraries of a process, old builds included.
KERNEL = """
#include <torch/csrc/stable/library.h>
#include "answer.h"
template <int N> int64_t many() { static int64_t value = ANSWER; return value; }
int64_t exported_name() { return ANSWER; }
int64_t answer() { return exported_name(); }
int64_t many_answer() { return many<0>(); }
STABLE_TORCH_LIBRARY_FRAGMENT(WB_NAMESPACE, m) {
  m.def("answer() -> int");
  m.def("many() -> int");
}
STABLE_TORCH_LIBRARY_IMPL(WB_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("answer", TORCH_BOX(&answer));
  m.impl("many", TORCH_BOX(&many_answer));
}
"""
needs_compiler = pytest.mark.skipif(tools.compiler() is None, reason="no C++ compiler")
needs_nvcc = pytest.mark.skipif(tools.nvcc() is None, reason="no nvcc")
pytestmark = needs_compiler


def _digest_of(*args, **more) -> str:
    return recipe.recipe_of(*args, **({"include": ()} | more)).digest


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A cache and a source folder, both with a space in their paths."""
    base = tmp_path_factory.mktemp("a b")
    (base / "source files").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBOOK_CACHE", str(base / "the cache"))
        yield base


def write_kernel(place: Path, answer: int, folder: str = "source files") -> Path:
    """The kernel in a folder, with a header beside it."""
    (place / folder).mkdir(exist_ok=True)
    (place / folder / "answer.h").write_text(f"#define ANSWER {answer}\n")
    source = place / folder / "kernel.cpp"
    source.write_text(KERNEL)
    return source


@pytest.fixture(scope="module")
def library(place):
    """The shared library: built where a lock of torch, a half-built folder and rubbish lie."""
    source = write_kernel(place, 41)
    digest = _digest_of("shared", [source])
    folder = place / "the cache" / "build" / "shared" / digest
    (folder / "tmp-dead").mkdir(parents=True)
    for stale in (folder / "lock", folder / "tmp-dead" / "lock", folder / f"wb_{digest}.so"):
        stale.write_text("left behind")
    return build.load("shared", [source])


def script(code: str, **env: str) -> subprocess.Popen:
    """A Python process with the workbook importable and `build` imported."""
    names = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys, time\nfrom workbook import build\n{code}"],
        env=names,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # the background's is deaf
    )


def finished(process: subprocess.Popen) -> tuple[str, str]:
    """stdout and stderr of a process that must succeed."""
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    return out.strip(), err


def wait_until(condition) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


# --- a library -------------------------------------------------------------------------------


def test_built_over_stale_lock_left_over_folder_and_broken_library(library):
    assert not library.cached
    assert library.op("answer")() == 41
    assert not list(library.path.parent.glob("tmp-*"))
    assert library.namespace == f"wb_{library.digest}"
    assert library.path.name == f"{library.namespace}.so"
    assert "c++" in library.log or "g++" in library.log or "clang" in library.log


def test_same_digest_is_one_library(library, place, monkeypatch):
    again = build.load("shared", [place / "source files" / "kernel.cpp"])
    assert again.cached and again.path == library.path
    monkeypatch.setattr(build, "_loaded", {})  # as after importlib.reload
    monkeypatch.setenv("WORKBOOK_CACHE", str(place / "emptied cache"))
    anew = build.load("shared", [place / "source files" / "kernel.cpp"])
    assert anew.op("answer")() == 41  # and the process did not abort


def test_warm_load_in_a_new_process(library, place):
    source = str(place / "source files" / "kernel.cpp")
    out, err = finished(
        script(
            f"lib = build.load('shared', [{source!r}], verbose=True)\n"
            "print(lib.cached, lib.op('answer')(), 'torch.utils.cpp_extension' in sys.modules)"
        )
    )
    assert out == "True 41 False"
    assert library.log.strip() in err  # a cached build repeats what the compilers said


def test_edited_header_is_rebuilt_in_a_live_process(library, place):
    source = write_kernel(place, 42)
    new = build.load("shared", [source])
    write_kernel(place, 41)
    assert (new.cached, new.op("answer")(), new.op("many")()) == (False, 42, 42)
    assert (library.op("answer")(), library.op("many")()) == (41, 41)
    assert new.digest != library.digest


def test_unknown_op_names_those_that_are_there(library):
    with pytest.raises(AttributeError, match=r"no op 'typo'; it has answer, many"):
        library.op("typo")


def test_two_processes_that_build_one_name(place):
    sources = [str(write_kernel(place, n, f"side {n}")) for n in (1, 2)]
    code = "lib = build.load('both', [{!r}])\nprint(lib.op('answer')(), lib.cached)"
    runs = [script(code.format(source)) for source in (sources[0], sources[1], sources[1])]
    one, two, same = (finished(run)[0].split() for run in runs)
    assert one == ["1", "False"]
    assert two[0] == same[0] == "2"
    assert sorted([two[1], same[1]]) == ["False", "True"]  # built once


# --- failures --------------------------------------------------------------------------------


def test_failed_build_shows_the_message_each_time(place):
    source = place / "source files" / "wrong.cpp"
    source.write_text("int good;\n" + "int bad() { return not_declared; }\n" * 30)
    for _ in range(2):
        with pytest.raises(build.BuildError) as caught:
            build.load("wrong", [source])
        lines = str(caught.value).splitlines()
        assert f"{source}:2:" in str(caught.value) and "not_declared" in str(caught.value)
        assert len(lines) <= 20
        log = Path(lines[-1].split(": ", 1)[1])
        assert log == caught.value.path and log.read_text() == caught.value.log
    assert not list(log.parent.glob("*.so")) and not list(log.parent.glob("tmp-*"))


def test_text_sources_are_named_and_quoted_in_errors(place):
    with pytest.raises(build.BuildError) as caught:
        build.load("wrong", {"scratch.cpp": "int f() {\n  return not_declared;\n}\n"})
    assert "scratch.cpp:2:" in str(caught.value)
    assert "return not_declared;" in str(caught.value)


def test_registering_twice_is_a_build_error_not_an_abort(place):
    twice = KERNEL.replace('"answer.h"', "<cstdint>").replace("ANSWER", "5")
    twice = twice.replace('m.def("many() -> int");', 'm.def("answer() -> int");')
    with pytest.raises(build.BuildError, match="refused a registration: an op defined twice"):
        build.load("twice", {"twice.cpp": twice})


def test_undefined_symbol_is_a_build_error(place):
    text = KERNEL.replace('"answer.h"', "<cstdint>").replace("{ return ANSWER; }", ";")
    with pytest.raises(build.BuildError, match=r"undefined symbol.*exported_name"):
        build.load("unlinked", {"unlinked.cpp": text.replace("ANSWER", "5")})


def held_compiler(place: Path) -> tuple[Path, Path, Path]:
    """A compiler that waits while `hold` exists and says by `reached` that it was started."""
    hold, reached, wrapper = place / "hold", place / "reached", place / "slow-c++"
    place.mkdir()
    hold.touch()
    wrapper.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *--version*|*-v) ;; *-c*) touch "{reached}"\n'
        f'while [ -e "{hold}" ]; do sleep 0.05; done;; esac\n'
        f'exec "{tools.compiler()}" "$@"\n'
    )
    wrapper.chmod(0o755)
    return hold, reached, wrapper


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_build_ended_midway_leaves_nothing_that_is_loaded(place, tmp_path, kind):
    hold, reached, wrapper = held_compiler(tmp_path / "a b")
    source = write_kernel(place, 7, "ended midway")
    cache = tmp_path / "cache"
    code = f"lib = build.load('ended', [{str(source)!r}])\nprint(lib.op('answer')(), lib.cached)"
    env = {"CXX": f'"{wrapper}"', "WORKBOOK_CACHE": str(cache)}
    process = script(code, **env)
    wait_until(lambda: reached.exists() or process.poll() is not None)
    process.send_signal(kind)
    process.communicate(timeout=SECONDS)
    assert process.returncode != 0
    assert not list(cache.rglob("*.so"))
    if kind == signal.SIGINT:
        assert not list(cache.rglob("tmp-*"))
    hold.unlink()
    if kind == signal.SIGKILL:  # its compiler may still be running in the folder
        assert finished(script(code, **env))[0] == "7 False"
        assert not list(cache.rglob("tmp-*"))


# --- surroundings ----------------------------------------------------------------------------


def test_unwritable_cache_falls_back_and_verbose_streams(place, tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "build").touch()  # no folder can be made there
    source = write_kernel(place, 8, "elsewhere")
    with pytest.warns(UserWarning, match="can not be written: building in"):
        with contextlib.redirect_stderr(io.StringIO()) as told:  # as in a notebook: no file behind
            lib = build.load("elsewhere", [source], verbose=True)
    assert lib.op("answer")() == 8
    assert lib.log.strip() in told.getvalue() and "kernel" not in lib.path.parts


def test_torch_in_a_path_with_a_space_and_ninja_not_on_path(place, tmp_path):
    """A venv in "a b", not activated: no program of it is on PATH."""
    site = tmp_path / "a b" / "site-packages"
    site.parent.mkdir()
    site.symlink_to(Path(torch.__file__).parents[1])
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("c++", "g++", "clang++", "as", "ld", "sh", "env"):
        if shutil.which(name):
            (programs / name).symlink_to(shutil.which(name))
    source = write_kernel(place, 9, "spaced")
    out, _ = finished(
        script(
            "import torch\nassert ' ' in torch.__file__\n"
            f"lib = build.load('spaced', [{str(source)!r}])\n"
            "print(lib.op('answer')(), lib.cached)",
            PYTHONPATH=os.pathsep.join([str(site), str(ROOT)]),
            PATH=str(programs),
        )
    )
    assert out == "9 False"


def test_missing_programs_have_a_one_line_remedy(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.CompilerMissing, match="install") as caught:
        build.load("none", {"a.cpp": ""})
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("CXX", "no-such-program")
    with pytest.raises(build.CompilerMissing, match="CXX='no-such-program'"):
        build.load("none", {"a.cpp": ""})
    monkeypatch.setattr(tools, "ninja", lambda: None)
    with pytest.raises(build.CompilerMissing, match="pip install ninja"):
        toolchain.ninja_folder()
    monkeypatch.setattr(tools, "nvcc", lambda: None)
    with pytest.raises(build.NvccMissing, match="CUDA_HOME"):
        build.cubin("__global__ void f() {}\n")


def test_a_compiler_cache_before_the_compiler_is_left_out(monkeypatch):
    plain = str(tools.compiler())
    monkeypatch.setenv("CXX", f"ccache {plain} -pipe")
    found = toolchain.compiler()
    assert found.path == plain and found.options == ("-pipe",)


# --- digest and flags ------------------------------------------------------------------------


def test_digest_covers_what_matters(tmp_path, monkeypatch):
    source = write_kernel(tmp_path, 1, "src")
    (tmp_path / "inc" / "deep").mkdir(parents=True)
    deep = tmp_path / "inc" / "deep" / "any.cuh"
    deep.write_text("1")
    stray = tmp_path / "src" / "unused.h"
    seen = []

    def digest(**more) -> str:
        return _digest_of("d", [source], include=[tmp_path / "inc"], **more)

    seen.append(digest())
    stray.write_text("nobody includes this")
    assert digest() == seen[0]
    deep.write_text("2")
    seen.append(digest())
    write_kernel(tmp_path, 2, "src")
    seen.append(digest())
    seen.append(digest(flags=["-DX=1"]))
    source.write_text(KERNEL + "\n")
    seen.append(digest())
    for target, name, value in (
        (torch, "__version__", "9.9"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT"),
        (toolchain, "_version", lambda path, stamp: "another compiler"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            seen.append(digest())
    assert len(set(seen)) == len(seen)
    shutil.copytree(tmp_path / "src", tmp_path / "moved")
    moved = _digest_of("d", [tmp_path / "moved" / "kernel.cpp"], include=[tmp_path / "inc"])
    assert moved == digest()  # not where the files lie


def test_included_headers_count_at_any_distance(tmp_path):
    (tmp_path / "a").mkdir()
    source = tmp_path / "k.cpp"
    source.write_text('#include "a/one.h"\n')
    (tmp_path / "a" / "one.h").write_text('#  include "two.inc"\n#include "one.h"\n')
    (tmp_path / "a" / "two.inc").write_text("1")
    before = _digest_of("d", [source])
    (tmp_path / "a" / "two.inc").write_text("2")
    assert _digest_of("d", [source]) != before


@pytest.mark.parametrize(
    ("capability", "machine", "wants", "lacks"),
    [
        ("AVX2", "x86_64", "-mavx2", "-mavx512f"),
        ("AVX512", "x86_64", "-mavx512f", "-ffast-math"),
        ("DEFAULT", "x86_64", "-O3", "-mavx2"),
        ("DEFAULT", "aarch64", "-fopenmp-simd", "-mavx2"),
        ("AVX512", "arm64", "-O3", "-mavx512f"),
    ],
)
def test_host_flags(capability, machine, wants, lacks):
    flags = toolchain.host_flags(capability, machine)
    assert wants in flags and lacks not in flags


def test_device_flags_name_their_own_architectures(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0+PTX")
    chosen = [flag for flag in toolchain.device_flags() if "arch" in flag]
    assert chosen == [toolchain.gencode("80"), toolchain.gencode("90")]
    own = toolchain.device_flags([toolchain.gencode("90a")])
    assert [flag for flag in own if "arch" in flag] == [toolchain.gencode("90a")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (9, 0))
    assert toolchain.architectures() == ("90",)
    assert {"-lineinfo", "-Xptxas", "-v"} <= set(toolchain.device_flags())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"name": "a b", "sources": {"a.cpp": ""}}, "name: got 'a b'"),
        ({"name": "a", "sources": {}}, "sources: got none"),
        ({"name": "a", "sources": {"a.txt": ""}}, "a.txt"),
        ({"name": "a", "sources": "a.cpp"}, "wants a list of paths"),
        ({"name": "a", "sources": {"a.cu": ""}}, "give cuda=True"),
        ({"name": "a", "sources": {"a.cpp": ""}, "include": ["/no/folder"]}, "include: got"),
    ],
)
def test_wrong_arguments(arguments, text):
    with pytest.raises(ValueError, match=text):
        build.load(**arguments)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch links CUDA")
def test_cuda_library_with_a_cpu_torch():
    with pytest.raises(build.NvccMissing, match="built without CUDA"):
        build.load("a", {"a.cpp": ""}, cuda=True)


# --- CUDA without a GPU ----------------------------------------------------------------------


@needs_nvcc
def test_cubin_report(place):
    text = """#include "size.cuh"
template <int N> __global__ void reverse_kernel(float* p) {
  __shared__ float s[N];
  s[threadIdx.x] = p[threadIdx.x];
  __syncthreads();
  p[threadIdx.x] = s[N - 1 - threadIdx.x];
}
template __global__ void reverse_kernel<SIZE>(float*);
"""
    folder = place / "source files"
    (folder / "size.cuh").write_text("#define SIZE 64\n")
    (folder / "reverse.cu").write_text(text)
    report = build.cubin(folder / "reverse.cu", arch="90a")
    (kernel,) = report.kernels
    assert "reverse_kernel" in kernel.name and kernel.arch == "90a"
    assert kernel.shared_bytes == 256 and 0 < kernel.registers < 64 and kernel.spill_bytes == 0
    assert report.path.is_file() and not report.cached
    again = build.cubin(folder / "reverse.cu", arch="90a")
    assert again.cached and again.kernels == report.kernels
    (folder / "size.cuh").write_text("#define SIZE 128\n")
    assert build.cubin(folder / "reverse.cu", arch="90a").kernels[0].shared_bytes == 512


@needs_nvcc
def test_cubin_error(place):
    with pytest.raises(build.BuildError, match=r"kernel.cu\(2\): error.*undeclared"):
        build.cubin("__global__ void f(float* p) {\n  *p = undeclared;\n}\n")


def test_kernel_reports_of_several_architectures_and_spills(monkeypatch):
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)  # raw names
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1fPf' for 'sm_80'
ptxas info    : Function properties for _Z5outerv
    64 bytes stack frame, 32 bytes spill stores, 32 bytes spill loads
ptxas info    : Function properties for _Z1fPf
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size, 352 bytes cmem[0]
ptxas info    : Compiling entry function '_Z1fPf' for 'sm_90a'
ptxas info    : Function properties for _Z1fPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 0 barriers, 1024 bytes smem, 528 bytes cmem[0]
"""  # noqa: E501
    assert build.kernel_reports(log) == (
        build.KernelReport("_Z1fPf", "80", 255, 20, 16, 0),
        build.KernelReport("_Z1fPf", "90a", 24, 0, 0, 1024),
    )


BINDING = """
#include "stable.h"
using wb::Tensor;
Tensor twice_cpu(const Tensor& x) {
  wb::expect(x, "x", wb::Float, {wb::any, 2});
  Tensor y = torch::stable::empty_like(x);
  const float* in = x.const_data_ptr<float>();
  float* out = y.mutable_data_ptr<float>();
  wb::parallel_for(0, x.numel(), 1024, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) out[i] = 2 * in[i];
  });
  return y;
}
STABLE_TORCH_LIBRARY_FRAGMENT(WB_NAMESPACE, m) { m.def("twice(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(WB_NAMESPACE, CPU, m) { m.impl("twice", TORCH_BOX(&twice_cpu)); }
#ifdef WB_CUDA
cudaError_t launch_twice(const float* x, float* y, int64_t n, cudaStream_t stream);
Tensor twice_cuda(const Tensor& x) {
  wb::expect(x, "x", wb::Float, {wb::any, 2});
  wb::OnDevice on(x);
  Tensor y = torch::stable::empty_like(x);
  wb::check(launch_twice(x.const_data_ptr<float>(), y.mutable_data_ptr<float>(), x.numel(),
                         on.stream), "twice");
  return y;
}
STABLE_TORCH_LIBRARY_IMPL(WB_NAMESPACE, CUDA, m) { m.impl("twice", TORCH_BOX(&twice_cuda)); }
#endif
"""
DEVICE = """
#include <cstdint>
#include <cuda_runtime.h>
__global__ void twice_kernel(const float* x, float* y, int64_t n) {
  const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i < n) y[i] = 2 * x[i];
}
cudaError_t launch_twice(const float* x, float* y, int64_t n, cudaStream_t stream) {
  twice_kernel<<<unsigned((n + 255) / 256), n < 0 ? 2048 : 256, 0, stream>>>(x, y, n);
  return cudaGetLastError();
}
"""


def test_binding_on_the_cpu(place):
    twice = build.load("binding", {"binding.cpp": BINDING}, include=[COMMON]).op("twice")
    x = torch.rand(1000, 2)
    assert torch.equal(twice(x), 2 * x)
    for wrong in (x.double(), x[:, :1], x.t()):
        with pytest.raises(RuntimeError, match=r"x: got float(32|64) .*wants a contiguous float32"):
            twice(wrong)


@needs_nvcc
def test_binding_compiles_for_cuda(place, tmp_path):
    """Linking needs a CUDA build of torch; the headers and the host compiler do not."""
    home = toolchain.cuda_home(toolchain.nvcc().path)
    assert (home / "include" / "cuda_runtime_api.h").is_file()
    (tmp_path / "binding.cpp").write_text(BINDING)
    torch_headers = Path(torch.__file__).parent / "include"
    status, log = toolchain.run(
        [
            toolchain.compiler().path,
            "-fsyntax-only",
            "-Wall",
            "-Werror",
            *toolchain.host_flags(),
            toolchain.STABLE_ABI,
            "-DWB_NAMESPACE=wb_x",
            "-DWB_CUDA",
            f"-I{COMMON}",
            "-isystem",
            str(torch_headers),
            "-isystem",
            str(home / "include"),
            str(tmp_path / "binding.cpp"),
        ]
    )
    assert status == 0, log
    assert build.cubin(DEVICE).kernels[0].name.startswith("twice_kernel")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_binding_on_the_gpu(place, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "nonsense")
    sources = {"binding.cpp": BINDING, "device.cu": DEVICE}
    lib = build.load("gpu", sources, include=[COMMON], cuda=True)
    x = torch.rand(1000, 2, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(lib.op("twice")(x), 2 * x)
    assert torch.equal(lib.op("twice")(x.cpu()), 2 * x.cpu())
    (kernel,) = build.kernel_reports(lib.log)
    assert kernel.registers > 0 and "twice_kernel" in kernel.name
    with pytest.raises(RuntimeError, match="twice: cudaError"):
        lib.op("twice")(torch.empty(0, 2, device="cuda"))
