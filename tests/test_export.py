"""An exported file stands alone, is right, is what the public harness takes, and stays the same."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from workbook import build, cli, export, paths, standalone, toolchain, tools
from workbook.chains import SLUGS, problem

ALONE = Path(__file__).with_name("alone.py")
NEEDED = ("PATH", "HOME", "LD_LIBRARY_PATH", "CUDA_HOME", "CXX", "TMPDIR", "LANG", "CC")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU"))]  # fmt: skip
K, N, B = 67, 96, 7
LARGER = {"matmul_maxpool_sum_scale": (300, 2049)}  # smaller ones are left to the reference
SECONDS = 200  # who waits for somebody else's build for ever is stopped


@pytest.fixture(scope="session")
def written(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """Slug -> the exported file and the reference."""
    folder = tmp_path_factory.mktemp("exported")
    found = {}
    for slug in SLUGS:
        found[slug] = folder / f"{slug}.py", folder / f"{slug}_reference.py"
        export.export(slug, *found[slug])
    return found


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    """Where the libraries of exported files are kept for this session."""
    return tmp_path_factory.mktemp("extensions")


def environment(extensions: Path, **more: str) -> dict[str, str]:
    """No PYTHONPATH, nothing of ours."""
    kept = {name: os.environ[name] for name in NEEDED if name in os.environ}
    return kept | {"TORCH_EXTENSIONS_DIR": str(extensions)} | more


def alone(code: list[str], folder: Path, env: dict[str, str]) -> str:
    """What a fresh Python prints, run in an empty folder."""
    empty = folder / "empty"
    empty.mkdir(exist_ok=True)
    start = [sys.executable, "-P", *code]
    done = subprocess.run(
        start, cwd=empty, env=env, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert not list(empty.iterdir())
    return done.stdout


def init_of(slug: str) -> list:
    return [*LARGER.get(slug, (K, N)), *problem(slug).init_args("laptop")[2:]]


def judged(slug: str, files: list[Path], reference: Path, folder: Path, env: dict,
           device: str = "cpu") -> list[dict]:  # fmt: skip
    """What alone.py says of each file."""
    job = {
        "files": [str(file) for file in files],
        "reference": str(reference),
        "init": init_of(slug),
        "batch": B,
        "device": device,
    }
    told = json.loads(alone([str(ALONE), json.dumps(job)], folder, env).splitlines()[-1])
    assert not told["package"]
    return told["files"]


# --- right, and alone -------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slug", SLUGS)
def test_the_file_alone_is_right(slug, device, written, built, tmp_path):
    file, reference = written[slug]
    (told,) = judged(slug, [file], reference, tmp_path, environment(built), device)
    assert told["said"] == "" and told["warnings"] == []
    assert told["kernels"], "plain torch ran"


WRONG = {
    "imports the package": ("import workbook.fold\n", "ImportError: workbook"),
    "draws more": ("def __init__(s, *a): torch.rand(1); super().__init__(*a)", "draws"),
    "renames a layer": ("def __init__(s, *a): super().__init__(*a); s.extra = nn.Linear(0, 0)",
                        "state_dict"),
    "weights of the first call": (
        "def forward(s, x):\n"
        "  if 'first' not in s.__dict__: s.__dict__['first'] = copy.deepcopy(s)\n"
        "  y = super().forward(x)\n"
        "  return y + (WAS.forward(s.__dict__['first'].train(s.training), x) - y).detach()",
        "another state loaded: error"),
    "lower precision": ("def forward(s, x): return super().forward(x.bfloat16().float())", "error"),
    "off by a little": ("def forward(s, x): return super().forward(x) * (1 + 1e-5)", "error"),
    "changes x": ("def forward(s, x):\n  y = super().forward(x)\n  x.data.add_(1)\n  return y",
                  "x was changed"),
    "no gradients": ("def forward(s, x): return super().forward(x).detach().requires_grad_()",
                     "gradients"),
    "replaces Model": ("Model = ModelNew\n", "Model of the reference"),
}  # fmt: skip


def worsened(text: str, change: str) -> str:
    """The file with a method of ModelNew replaced, or with lines at its end."""
    if not change.startswith("def "):
        return f"{text}\n{change}"
    body = textwrap.indent(change, "    ")
    return f"{text}\nimport copy\nWAS = ModelNew\nclass ModelNew(WAS):\n{body}\n"


def test_wrong_files_are_rejected(written, built, tmp_path):
    slug = SLUGS[0]
    file, reference = written[slug]
    files = []
    for name, (change, _) in WRONG.items():
        files.append(tmp_path / f"{name}.py")
        files[-1].write_text(worsened(file.read_text(), change))
    told = judged(slug, files, reference, tmp_path, environment(built))
    for (name, (_, says)), one in zip(WRONG.items(), told, strict=True):
        assert says in one["said"], f"{name}: {one['said'] or 'accepted'}"
    spaces = [one["space"] for one in told if one["space"]]
    assert len(set(spaces)) == len(spaces), "op names of one process met"


@pytest.mark.parametrize("slug", SLUGS)
def test_without_a_compiler_it_runs_as_plain_torch(slug, written, tmp_path):
    file, reference = written[slug]
    env = environment(tmp_path / "none", CXX="/nowhere/c++")
    (told,) = judged(slug, [file], reference, tmp_path, env)
    assert told["said"] == "" and told["kernels"] == []
    (warning,) = told["warnings"]
    assert "plain torch on cpu" in warning and "correct it or unset CXX" in warning


def test_on_an_older_torch_it_says_so_and_runs(written, tmp_path):
    code = f"""
import torch, warnings
torch.__version__ = "2.9.1"
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    exec(open({str(written[SLUGS[0]][0])!r}).read())
    ModelNew(*{init_of(SLUGS[0])})(torch.rand({B}, {K}))
print([str(warning.message) for warning in told if "ModelNew" in str(warning.message)])
"""
    major, minor = standalone.OLDEST_TORCH
    assert toolchain.STABLE_ABI.endswith(f"=0x{major:02x}{minor:02x}{0:012x}")
    told = alone(["-c", code], tmp_path, environment(tmp_path / "none"))
    assert re.fullmatch(r"\['ModelNew runs as plain torch on cpu: .* 2.11 or later'\]\n", told)


MODULE = """
import copy, importlib.util, io, pickle, sys, torch
sys.path.insert(0, {folder!r})
import {name} as one
torch.manual_seed(0)
new = one.ModelNew(*{init})
x = torch.rand({batch}, {init}[0])
y = new.eval()(x)
for made in (copy.deepcopy(new), pickle.loads(pickle.dumps(new))):
    assert type(made) is one.ModelNew and torch.equal(made(x), y)
stored = io.BytesIO()
torch.save(new, stored)
stored.seek(0)
assert torch.equal(torch.load(stored, weights_only=False)(x), y)

# once more, as a module that is in no table of modules
found = importlib.util.spec_from_file_location("temporary", {file!r})
two = importlib.util.module_from_spec(found)
found.loader.exec_module(two)
assert two.NAMESPACE != one.NAMESPACE
other = two.ModelNew(*{init}).eval()
other.load_state_dict(new.state_dict())
assert torch.equal(other(x), y)

# and another file; each is compiled whole
import {other} as three
for model in (new, other, three.ModelNew(*{other_init}).eval()):
    torch._dynamo.reset()
    given = torch.rand({batch}, next(p for p in model.parameters() if p.dim() == 2).size(1))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(given), model(given), rtol=1e-5, atol=1e-6)

# an edit that nobody can see, and frozen weights
next(new.parameters()).data.mul_(2)
one.refresh(new)
wanted = one.ModelNew(*{init}).eval()
wanted.load_state_dict(new.state_dict())
assert torch.equal(new(x), wanted(x)) and not torch.equal(new(x), y)
one.freeze(new)
assert torch.equal(new(x), wanted(x))
print("all well")
"""


@pytest.mark.parametrize("slug", SLUGS)
def test_as_a_module_twice_and_beside_another(slug, written, built, tmp_path):
    """Copies, pickles, op names of one process, torch.compile, refresh and freeze."""
    file, other = written[slug][0], SLUGS[SLUGS.index(slug) - 1]
    code = MODULE.format(
        folder=str(file.parent), name=slug, file=str(file), init=init_of(slug), batch=B,
        other=other, other_init=init_of(other),
    )  # fmt: skip
    assert alone(["-c", code], tmp_path, environment(built)) == "all well\n"


def test_beside_the_package(written, built, monkeypatch):
    slug = SLUGS[0]
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(built))
    space: dict = {}
    exec(written[slug][0].read_text(), space)
    ours, alone = (m(*init_of(slug)).eval() for m in (problem(slug).ModelNew, space["ModelNew"]))
    alone.load_state_dict(ours.state_dict())
    x = torch.rand(B, K)
    assert torch.equal(ours(x), alone(x))


def test_two_processes_build_at_once_over_what_a_killed_one_left(written, tmp_path):
    file = written[SLUGS[0]][0]
    folder = tmp_path / "extensions" / "workbook"
    (folder / "tmp-killed").mkdir(parents=True)
    (folder / "tmp-killed" / "lock").touch()  # of load_inline, which waits for it for ever
    code = f"exec(open({str(file)!r}).read()); print(OP.kernel('cpu'))"
    start, env = [sys.executable, "-P", "-c", code], environment(folder.parent)
    with contextlib.ExitStack() as stack:
        running = [
            subprocess.Popen(start, env=env, stdout=subprocess.PIPE, text=True) for _ in "12"
        ]
        for process in running:
            stack.callback(process.kill)
        told = [process.communicate(timeout=SECONDS)[0] for process in running]
    assert told[0] == told[1] and told[0].startswith("wb_")
    assert [f.name for f in folder.iterdir() if f.is_dir()] == ["tmp-killed"]
    for library in folder.glob("*.so"):
        os.utime(library, (1, 1))
    subprocess.run(start, env=env, check=True, stdout=subprocess.DEVNULL)
    assert {int(library.stat().st_mtime) for library in folder.glob("*.so")} == {1}, "built again"


def test_two_threads_build_at_once(written, tmp_path):
    """As on a GPU, where CPU kernels are built when first asked for."""
    code = f"""
import os, sys, concurrent.futures, torch
text = open({str(written[SLUGS[0]][0])!r}).read()
exec(text[:text.rindex("build_for")])
before = dict(os.environ)
x, models = torch.rand({B}, {K}), [ModelNew(*{init_of(SLUGS[0])}) for _ in range(2)]
with concurrent.futures.ThreadPoolExecutor(3) as pool:
    found = list(pool.map(lambda model: model(x), models))
    more = list(pool.map(lambda library: built(*library), 3 * LIBRARIES["cpu"]))
assert dict(os.environ) == before
print(OP.kernel("cpu"), len(set(more)) == len(LIBRARIES["cpu"]) > 1)
"""
    told = alone(["-c", code], tmp_path, environment(tmp_path / "extensions"))
    assert re.fullmatch(r"wb_\w+\.run\.default True\n", told)


@pytest.mark.skipif(tools.nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize("slug", SLUGS)
def test_its_cuda_sources_compile(slug, written, built, monkeypatch):
    """Without a GPU too; on one, the tests above build and run them."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(built))
    space: dict = {}
    exec(written[slug][0].read_text(), space)
    assert space["LIBRARIES"]["cuda"]
    for name, kind, files, flags in space["LIBRARIES"]["cuda"]:
        unit = space["_unit"](name, [file for file in files if file.endswith(".cu")])
        arch = "90a" if kind == "hopper" else "90"
        assert build.cubin(unit, arch=arch, flags=[*flags, "-DWB_CUDA"]).kernels


WITHOUT_A_PRODUCT = {"matmul_sum_max_mean_logsumexp"}  # nothing is left to multiply
WITH_A_PRODUCT = [slug for slug in SLUGS if slug not in WITHOUT_A_PRODUCT]


def unbuilt(file: Path) -> dict:
    """What the file defines, without its last line, which builds."""
    text, space = file.read_text(), {}
    exec(text[: text.rindex("build_for")], space)
    return space


@pytest.mark.parametrize("slug", SLUGS)
def test_kernels_for_hopper_are_listed_for_a_gpu_alone(slug, written):
    space = unbuilt(written[slug][0])
    cpu, cuda = ({name: kind for name, kind, *_ in space["LIBRARIES"][d]} for d in ("cpu", "cuda"))
    shared = {"split_product": "hopper", "split_rows": "cuda", "split_weights": "cuda"}
    assert set(cpu.values()) == {"cpu"} and not shared.keys() & cpu.keys()
    found = {name: cuda.get(name) for name in shared}
    assert found == (shared if slug in WITH_A_PRODUCT else dict.fromkeys(shared))
    assert ("common/split_gemm.cuh" in space["SOURCES"]) == (slug in WITH_A_PRODUCT)


class Planned(Exception):
    """In place of a build."""


@pytest.mark.skipif(tools.nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize("slug", WITH_A_PRODUCT)
def test_an_exported_library_for_hopper_is_built_for_that_architecture(slug, written):
    space = unbuilt(written[slug][0])

    def load(namespace: str, plan: dict) -> None:
        raise Planned(plan)

    space["_load"] = load
    for library in space["LIBRARIES"]["cuda"]:
        with pytest.raises(Planned) as planned:
            space["built"](*library)
        (plan,) = planned.value.args
        assert plan["with_cuda"] and "-DWB_CUDA" in plan["extra_cflags"]
        special = toolchain.gencode("90a")
        targets = {flag for flag in plan["extra_cuda_cflags"] if "arch" in flag}
        if library[1] == "hopper":
            assert targets == {special}
        else:
            assert targets and special not in targets


# --- the text ---------------------------------------------------------------------------------


def harness_says(text: str) -> list[str]:
    """What the public harness would say of a text: by words, where `export` has patterns."""
    words = re.findall(r"\w+|[^\w\s]", text)
    follows = list(zip(words, words[1:], strict=False))
    said = [w for w in ("__global__", "load_inline") if w not in words]
    said += [f"{a} {b}" for a, b in follows if (a, b) == ("try", ":")]
    said += [f"{a} {b}" for a, b in follows if a == "except" and (b == ":" or b.isidentifier())]
    said += [w for w in words if w in ("pass", "ThreadPoolExecutor", "ProcessPoolExecutor")]
    said += [f"{a} {b}" for a, b in follows if a in ("import", "from") and b == "threading"]
    clocks = ("Event", "record", "elapsed_time", "synchronize", "perf_counter", "time")
    for i, word in enumerate(words[:-1]):
        before = words[max(0, i - 4) : i]
        if word in clocks and words[i + 1] == "=" and ("cuda" in before or "time" in before):
            said.append(f"{word} =")
    return said


FILTERED = [
    "try:\n    x = 1", "except ValueError:", "except:", "# in one pass", "import threading",
    "from threading import Thread", "torch.cuda.synchronize = f", "time.perf_counter = lambda: 0",
    "torch.cuda.Event.elapsed_time = f",
]  # fmt: skip


@pytest.mark.parametrize("slug", SLUGS)
def test_the_harness_takes_the_text(slug, written):
    text = written[slug][0].read_text()
    assert harness_says(text) == [] == list(export.complaints(text))
    for bad in FILTERED:
        assert harness_says(f"{text}\n{bad}\n"), bad
        (complaint, *_) = export.complaints(f"{text}\n{bad}\n")
        assert complaint.endswith(f"line {len(text.splitlines()) + 2}")
    for needed in ("__global__", "load_inline"):
        without = text.replace(needed, "")
        assert harness_says(without) and list(export.complaints(without))


@pytest.mark.parametrize("slug", SLUGS)
def test_what_the_file_says(slug, written):
    text, reference = (file.read_text() for file in written[slug])
    head = text.split('"""')[1]
    digest = re.search(r"^text +([0-9a-f]{16})$", head, re.MULTILINE)[1]
    assert f'DIGEST = "{digest}"' in text and problem(slug).title in head
    assert re.search(r"^commit +([0-9a-f]{40}|unknown)", head, re.MULTILINE)
    assert re.search(r"^kernels +cpu [0-9a-f]{16}, cuda [0-9a-f]{16}$", head, re.MULTILINE)
    assert re.search(r"^torch +2\.\d+", head, re.MULTILINE)
    for each in (text, reference):
        assert not re.search(r"^\s*(from|import) workbook", each, re.MULTILINE)
        assert "__future__" not in each and str(paths.root()) not in each
    for word in ("Problem", "Variant", "bench"):
        assert not re.search(rf"\b{word}\b", text), word
    space: dict = {}
    exec(reference, space)
    assert space["get_init_inputs"]() == problem(slug).get_init_inputs()
    torch.manual_seed(0)
    (x,) = space["get_inputs"]()
    torch.manual_seed(0)
    assert torch.equal(x, problem(slug).get_inputs()[0]) and x.device.type == "cpu"


def test_two_exports_are_the_same_to_the_byte(written, tmp_path):
    slug = SLUGS[-1]
    code = f"import sys; from workbook import export; sys.stdout.write(export.text_of({slug!r}))"
    for seed in ("1", "2"):
        env = environment(tmp_path, PYTHONPATH=str(paths.root()), PYTHONHASHSEED=seed)
        env |= {k: v for k, v in os.environ.items() if k.startswith("WORKBOOK_")}
        again = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, check=True, cwd=tmp_path
        )
        assert again.stdout == written[slug][0].read_bytes()


# --- the command ------------------------------------------------------------------------------


def test_the_command_writes_both_files(written, tmp_path, capsys):
    slug = SLUGS[0]
    files = tmp_path / "new.py", tmp_path / "model.py"
    command = ["export", slug, "-o", str(files[0]), "--reference", str(files[1])]
    for _ in range(2):  # its own files it replaces
        assert cli.main(command) == 0
        assert capsys.readouterr().out.splitlines() == [str(file) for file in files]
    assert [f.read_bytes() for f in files] == [f.read_bytes() for f in written[slug]]


def test_what_is_refused(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("import torch\n")
    (tmp_path / "folder").mkdir()
    slug, new = SLUGS[0], str(tmp_path / "new.py")
    for arguments, says in {
        ("sum", "-o", new): f"there are {SLUGS[0]}",
        (slug, "-o", str(tmp_path / "mine.py")): "FILE: .*mine.py is there .*--force",
        (slug, "-o", new, "--reference", str(tmp_path / "mine.py")): "--reference: .* --force",
        (slug, "-o", new, "--reference", new): "--reference: .*wants another name",
        (slug, "-o", str(tmp_path / "folder")): "is no file; wants the name of a file in it",
        (slug, "-o", str(tmp_path / "none" / "new.py")): "none is not there: make it first",
        (slug, "-o", str(tmp_path / "mine.py" / "new.py")): "mine.py is not there",
    }.items():
        assert cli.main(["export", *arguments]) == 2
        assert re.search(says, capsys.readouterr().err), arguments
        assert not Path(new).exists()
    assert (tmp_path / "mine.py").read_text() == "import torch\n"
    assert cli.main(["export", slug, "-o", str(tmp_path / "mine.py"), "--force"]) == 0
    assert "class ModelNew" in (tmp_path / "mine.py").read_text()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write")
def test_a_folder_that_can_not_be_written(tmp_path, capsys):
    tmp_path.chmod(0o500)
    assert cli.main(["export", SLUGS[0], "-o", str(tmp_path / "new.py")]) == 2
    assert "can't be written: choose another place" in capsys.readouterr().err


def test_a_text_that_the_harness_would_reject_is_not_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(export, "_head", lambda p, digest: "# in one pass")
    assert cli.main(["export", SLUGS[0], "-o", str(tmp_path / "new.py")]) == 2
    assert "the word pass in line 1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('#ifdef A\n#include "a.h"\n#endif\n', "under no condition"),
        ('  #include "a.h"\n', "a line of its own"),
        ('#include "a.h"  // for b\n', "a line of its own"),
        ('#include "missing.h"\n', "missing.h: wanted in kernels/"),
    ],
)
def test_a_source_that_can_not_be_inlined(text, says, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "kernels", lambda: tmp_path)
    (tmp_path / "one").mkdir()
    for name in ("binding.cpp", "a.h"):
        (tmp_path / "one" / name).write_text("\n")
    (tmp_path / "one" / "cpu.cpp").write_text(text)
    with pytest.raises(ValueError, match=says):
        export._sources([("one", "cpu", ("cpu.cpp",), ())])
