"""machine, tools and diagnosis: facts against independent sources, remedies with things hidden."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import types
from pathlib import Path

import pytest
import torch

from workbook import cpuinfo, diagnosis, machine, paths, tools
from workbook.diagnosis import Finding
from workbook.journal import Record

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
VARIABLES = ("CXX", "CUDA_HOME", "CUDA_PATH", "WORKBOOK_COMMIT", "WORKBOOK_DIRTY", "WORKBOOK_CACHE")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with an empty PATH, no CUDA folder and no ninja package; returns the PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(tools, "_CUDA_FOLDER", tmp_path / "no cuda")
    hide(monkeypatch, "ninja")
    return programs


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    for name in ("kernels", "notebooks", "workbook"):
        (root / name).mkdir(parents=True)
        (root / name / "file").write_text("1\n")
    monkeypatch.setattr(paths, "_PACKAGE", root / "workbook")
    return root


def hide(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    really = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name in packages else really(name, *rest),
    )


def program(folder: Path, name: str, prints: str = "", code: int = 0) -> Path:
    """A shell script that needs no PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / name
    body = "\n".join(f"echo '{line}'" for line in prints.splitlines())
    script.write_text(f"#!/bin/sh\n{body}\nexit {code}\n")
    script.chmod(0o755)
    return script


def finding(name: str) -> Finding:
    return next(found for found in diagnosis.doctor() if found.name == name)


NVCC_TEXT = """nvcc: NVIDIA (R) Cuda compiler driver
Copyright (c) 2005-2025 NVIDIA Corporation
Cuda compilation tools, release 13.0, V13.0.88
Build cuda_13.0.r13.0/compiler.0"""


# --- facts -------------------------------------------------------------------------------------


def test_cpu_facts() -> None:
    facts = machine.facts()
    assert facts["device"] == "cpu"
    assert facts["name"] == machine.card("cpu") == machine.card(torch.device("cpu")) != ""
    assert 1 <= facts["cores"] <= os.cpu_count()
    assert facts["torch_threads"] == torch.get_num_threads()
    assert 2**28 < facts["memory_bytes"] < 2**46
    assert facts["capability"] == torch.backends.cpu.get_cpu_capability()
    assert 2**18 <= facts["last_level_cache_bytes"] < 2**34
    Record(kind="bench", problem="p", card=facts["name"], how=facts)  # fits into a record


def test_cpu_name_by_model_or_by_architecture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bare: Path
) -> None:
    monkeypatch.setattr(cpuinfo, "FILE", tmp_path / "cpuinfo")
    cpuinfo.FILE.write_text(
        "processor\t: 0\nmodel\t\t: 85\nmodel name\t: Some CPU @ 2 GHz\n\nmodel name : B"
    )
    assert machine.card() == "Some CPU @ 2 GHz"
    cpuinfo.FILE.write_text("processor\t: 0\nmodel name\t: Some CPU\n")  # neither family nor model
    assert machine.card() == "Some CPU"
    cpuinfo.FILE.write_text("processor : 0\nCPU part : 0xd0c\n")  # arm64
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert machine.card() == "aarch64"
    program(bare, "sysctl", "Apple M9")
    cpuinfo.FILE.unlink()
    assert machine.card() == "Apple M9"


CPU = """processor\t: 0
vendor_id\t: {vendor}
cpu family\t: {family}
model\t\t: {model}
model name\t: {name}
stepping\t: 1

processor\t: 1
model\t\t: 99
model name\t: another
"""


@pytest.mark.parametrize(
    ("vendor", "family", "model", "name", "card"),
    [
        ("AuthenticAMD", 25, 17, "AMD EPYC", "AMD EPYC Zen 4"),
        ("AuthenticAMD", 26, 2, "AMD EPYC", "AMD EPYC Zen 5"),
        ("AuthenticAMD", 25, 1, "AMD EPYC", "AMD EPYC Zen 3"),
        ("AuthenticAMD", 25, 0x61, "AMD EPYC", "AMD EPYC Zen 4"),
        ("AuthenticAMD", 23, 0x31, "AMD EPYC-Rome Processor", "AMD EPYC-Rome Processor Zen 2"),
        ("AuthenticAMD", 26, 0x50, "AMD EPYC", "AMD EPYC family 26 model 80"),
        ("AuthenticAMD", "?", 17, "AMD EPYC", "AMD EPYC"),
        ("AuthenticAMD", 25, 17, "AMD EPYC 9554 64-Core", "AMD EPYC 9554 64-Core"),
        ("HygonGenuine", 25, 17, "Hygon", "Hygon family 25 model 17"),
        (
            "GenuineIntel",
            6,
            85,
            "Intel Xeon Processor (Skylake, IBRS)",
            "Intel Xeon Processor (Skylake, IBRS) family 6 model 85",
        ),
        (
            "GenuineIntel",
            6,
            143,
            "Intel(R) Xeon(R) Platinum 8488C",
            "Intel(R) Xeon(R) Platinum 8488C",
        ),
    ],
)
def test_a_cpu_whose_name_has_no_number_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vendor: str, family: object, model: int,
    name: str, card: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(cpuinfo, "FILE", tmp_path / "cpuinfo")
    cpuinfo.FILE.write_text(CPU.format(vendor=vendor, family=family, model=model, name=name))
    assert machine.card() == machine.facts()["name"] == card


def test_generations_do_not_overlap() -> None:
    for ranges in machine._AMD.values():
        assert all(first <= last for first, last, _ in ranges)
        ends = [(first, last) for first, last, _ in sorted(ranges)]
        assert all(before[1] < after[0] for before, after in zip(ends, ends[1:], strict=False))


def cache(folder: Path, level: int, kind: str, size: str, shared: str) -> None:
    folder.mkdir(parents=True)
    for name, text in (
        ("level", str(level)), ("type", kind), ("size", size), ("shared_cpu_list", shared)
    ):  # fmt: skip
        (folder / name).write_text(text + "\n")


def test_caches_shared_by_cores_count_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_CPUS", tmp_path)
    monkeypatch.setattr(machine, "_usable_cpus", lambda: [0, 1, 2])
    for cpu, l3 in ((0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3"), (4, "4")):  # 3, 4 not usable
        cache(tmp_path / f"cpu{cpu}/cache/index0", 1, "Data", "48K", str(cpu))
        cache(tmp_path / f"cpu{cpu}/cache/index1", 1, "Instruction", "32K", str(cpu))
        cache(tmp_path / f"cpu{cpu}/cache/index2", 2, "Unified", "2M", str(cpu))
        cache(tmp_path / f"cpu{cpu}/cache/index3", 3, "Unified", "30720K", l3)
    assert machine.last_level_cache_bytes("cpu") == 2 * 30720 * 1024  # of CPUs 0-1 and of 2-3
    assert machine.facts()["caches"] == {
        "L1d": 48 * 1024, "L1i": 32 * 1024, "L2": 2 * 1024**2, "L3": 30 * 1024**2
    }  # fmt: skip


def test_caches_that_are_not_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_CPUS", tmp_path)
    assert machine.last_level_cache_bytes("cpu") == 32 * 1024 * 1024
    first = machine._usable_cpus()[0]
    cache(tmp_path / f"cpu{first}/cache/index0", 1, "Data", "odd", "0")
    assert machine.facts()["caches"] == {}


def test_memory_is_what_the_container_may_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "_MEMORY_LIMIT", tmp_path / "memory.max")
    whole = machine.facts()["memory_bytes"]
    (tmp_path / "memory.max").write_text("1073741824\n")
    assert machine.facts()["memory_bytes"] == 1073741824
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.facts()["memory_bytes"] == whole > 1073741824


def test_describe_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    line = machine.describe()
    assert "\n" not in line
    assert machine.card() in line and f"{len(machine._usable_cpus())} cores" in line
    assert f"torch {torch.__version__}" in line


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "meta"])
def test_no_such_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    calls = (machine.facts, machine.card, machine.describe, machine.last_level_cache_bytes)
    for function in calls:
        with pytest.raises(machine.NoDevice, match=f"device is '{device}', .* sees 0 CUDA GPUs"):
            function(device)


def test_gpu_facts_from_what_torch_and_nvidia_smi_say(
    monkeypatch: pytest.MonkeyPatch, bare: Path
) -> None:
    props = types.SimpleNamespace(
        name="Card 9", multi_processor_count=132, L2_cache_size=52428800, uuid="aa-bb",
        total_memory=85 * 10**9, major=9, minor=0,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: props)
    script = bare / "nvidia-smi"
    script.write_text(
        '#!/bin/sh\ncase "$*" in *--id=GPU-aa-bb*) ;; *) exit 6;; esac\n'
        'case "$*" in *driver_version*) echo 580.1;; '
        "*) echo '1980, 2619, [N/A], 2619, 71.50, 700.00, 30';; esac\n"
    )
    script.chmod(0o755)
    assert machine.facts("cuda:1") == {
        "device": "cuda", "name": "Card 9", "sms": 132, "l2_bytes": 52428800,
        "memory_bytes": 85 * 10**9, "capability": "9.0", "driver": "580.1",
    }  # fmt: skip
    assert machine.clocks("cuda") == {
        "sm_mhz": 1980.0, "memory_mhz": 2619.0, "memory_max_mhz": 2619.0,
        "power_w": 71.5, "power_limit_w": 700.0, "temperature_c": 30.0,
    }  # fmt: skip
    assert machine.last_level_cache_bytes("cuda") == 52428800
    assert "Card 9: 132 SMs, capability 9.0, 50 MiB L2, 79.2 GiB" in machine.describe("cuda")
    assert "driver 580.1" in machine.describe("cuda")
    script.unlink()  # a container may lack the program
    assert machine.clocks("cuda") == {}
    assert machine.facts("cuda")["driver"] == ""
    assert "driver" not in machine.describe("cuda")
    with pytest.raises(machine.NoDevice, match="'cuda:2', .* sees 2 CUDA GPUs"):
        machine.facts("cuda:2")


@needs_gpu
def test_gpu_that_is_there() -> None:
    facts = machine.facts("cuda")
    assert facts["name"] == torch.cuda.get_device_name(0)
    assert machine.card("cuda") == facts["name"] and facts["name"] in machine.describe("cuda")
    assert facts["sms"] > 0 and facts["l2_bytes"] > 2**20 and facts["memory_bytes"] > 2**30
    if shutil.which("nvidia-smi"):
        assert re.fullmatch(r"\d+\.\d+(\.\d+)?", facts["driver"])
        assert 0 < machine.clocks("cuda")["sm_mhz"] <= machine.clocks("cuda")["sm_max_mhz"]
        assert machine.versions()["driver"] == facts["driver"]
    assert finding("GPU").ok is True


def test_a_cpu_tells_no_clocks() -> None:
    assert machine.clocks("cpu") == {}


# --- provenance --------------------------------------------------------------------------------


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


@needs_git
def test_commit_and_dirty_from_git(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "one")
    monkeypatch.chdir("/")
    found = machine.provenance()
    assert (found["commit"], found["dirty"]) == (git(checkout, "rev-parse", "HEAD"), False)
    (checkout / "kernels" / "file").write_text("2\n")
    assert machine.provenance()["dirty"] is True
    git(checkout, "commit", "-qam", "two")
    assert machine.provenance()["dirty"] is False
    (checkout / "kernels" / "new").write_text("a new kernel counts\n")
    assert machine.provenance()["dirty"] is True


@needs_git
def test_a_copy_in_another_repository_is_not_at_its_commit(checkout: Path) -> None:
    git(checkout.parent, "init", "-q")
    git(checkout.parent, "add", ".")
    git(checkout.parent, "commit", "-qm", "around")
    assert machine._git_state() == ("unknown", None)


@needs_git
def test_a_repository_without_commits(checkout: Path) -> None:
    git(checkout, "init", "-q")
    assert machine._git_state() == ("unknown", None)


def test_without_git_or_checkout(
    checkout: Path, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine._git_state() == ("unknown", None)
    shutil.rmtree(checkout / "kernels")
    found = machine.provenance()
    assert (found["commit"], found["dirty"]) == ("unknown", None)


@pytest.mark.parametrize(
    ("value", "dirty"), [("1", True), ("true", True), ("True", True), ("0", False), ("", False)]
)
def test_the_environment_goes_first(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, value: str, dirty: bool
) -> None:
    monkeypatch.setenv("WORKBOOK_COMMIT", "abc123")
    monkeypatch.setenv("WORKBOOK_DIRTY", value)
    found = machine.provenance()
    assert (found["commit"], found["dirty"]) == ("abc123", dirty)
    monkeypatch.delenv("WORKBOOK_DIRTY")
    assert machine.provenance()["dirty"] is False


def test_provenance_fits_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBOOK_COMMIT", "abc123")
    record = Record(kind="build", problem="p", **machine.provenance())
    assert record.commit == "abc123"
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", record.date)
    assert record.versions["torch"] == torch.__version__
    assert record.versions["python"] == platform.python_version()


def test_versions_name_only_what_is_there(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert set(machine.versions()) == {"torch", "python"}
    program(bare, "c++", "c++ (Here) 14.1\nCopyright")
    program(bare, "nvcc", NVCC_TEXT)
    program(bare, "nvidia-smi", "580.65.06")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = machine.versions()
    assert found["compiler"] == "c++ (Here) 14.1"
    assert found["nvcc"] == "Cuda compilation tools, release 13.0, V13.0.88"
    assert (found["driver"], found["cuda"]) == ("580.65.06", "13.0")


def test_a_program_that_hangs_is_given_up(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = bare / "git"
    hanging.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(tools, "TOOL_SECONDS", 0.2)
    assert tools.output([str(hanging)]) is None


# --- what is missing ---------------------------------------------------------------------------


def test_every_finding_is_there_once_and_has_a_remedy_when_it_fails() -> None:
    found = diagnosis.doctor()
    assert [one.name for one in found] == [
        "compiler", "ninja", "headers", "nvcc", "torch", "GPU", "jupyter", "checkout", "cache"
    ]  # fmt: skip
    assert all(one.remedy for one in found if one.ok is False)
    assert all(not one.remedy for one in found if one.ok)
    assert all("\n" not in one.detail + one.remedy and one.detail for one in found)


def test_finding_shows_its_remedy() -> None:
    assert str(Finding("ninja", True, "here")) == "ok      ninja        here"
    first, second = str(Finding("ninja", False, "no ninja", "install it")).splitlines()
    assert first == "MISSING ninja        no ninja" and second.strip() == "install it"
    assert str(Finding("GPU", None, "none")).startswith("-  ")


def test_compiler(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tools.compiler() is None
    assert "apt install g++" in machine.missing_compiler()
    assert "\n" not in machine.missing_compiler()
    assert finding("compiler") == Finding(
        "compiler", False, "no C++ compiler", machine.missing_compiler()
    )
    clang = program(bare, "clang++", "clang version 19\nTarget: x")
    assert tools.compiler() == clang
    assert machine.missing_compiler() is None
    assert finding("compiler") == Finding("compiler", True, f"{clang}: clang version 19")
    assert tools.compiler() != program(bare, "g++", "g++ 14") != clang
    assert tools.compiler() == bare / "g++"
    program(bare, "c++", "broken", code=1)
    broken = finding("compiler")
    assert broken.ok is False and f"{bare / 'c++'} --version" in broken.remedy
    monkeypatch.setenv("CXX", f"{clang} -stdlib=libc++")
    assert tools.compiler() == clang
    monkeypatch.setenv("CXX", "g++-99")
    assert tools.compiler() is None
    assert machine.missing_compiler() == (
        "CXX='g++-99' is not a program here: correct it or unset CXX"
    )
    assert finding("compiler").remedy == machine.missing_compiler()


def test_ninja(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert finding("ninja") == Finding(
        "ninja", False, "no ninja", "pip install --force-reinstall ninja"
    )
    on_path = program(bare, "ninja", "1.99")
    assert finding("ninja") == Finding("ninja", True, f"{on_path}: 1.99")
    program(bare, "ninja", code=127)
    assert finding("ninja").ok is False and "does not run" in finding("ninja").detail


def test_ninja_of_the_package_without_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = pytest.importorskip("ninja")
    inside = program(tmp_path / "package", "ninja", "1.98")
    monkeypatch.setattr(package, "BIN_DIR", str(inside.parent))
    monkeypatch.setenv("PATH", "")
    assert tools.ninja() == inside
    monkeypatch.setattr(package, "BIN_DIR", str(tmp_path / "gone"))
    assert tools.ninja() is None


def test_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert finding("headers").ok is None and "python3-dev" in finding("headers").remedy
    (tmp_path / "Python.h").touch()
    assert finding("headers") == Finding("headers", True, str(tmp_path / "Python.h"))


def test_nvcc_is_found_where_torch_looks(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert finding("nvcc").ok is None and "CUDA_HOME" in finding("nvcc").remedy
    usual = program(tools._CUDA_FOLDER / "bin", "nvcc", NVCC_TEXT)
    assert tools.nvcc() == usual
    on_path = program(bare, "nvcc", NVCC_TEXT)
    assert tools.nvcc() == on_path
    home = program(bare.parent / "home" / "bin", "nvcc", NVCC_TEXT)
    monkeypatch.setenv("CUDA_PATH", str(home.parent.parent))
    assert tools.nvcc() == home
    monkeypatch.setenv("CUDA_HOME", str(bare.parent / "empty"))  # set to a place without one
    assert tools.nvcc() == home
    assert finding("nvcc").detail == f"{home}: Cuda compilation tools, release 13.0, V13.0.88"
    home.write_text("#!/bin/sh\nexit 1\n")
    assert finding("nvcc").ok is False and "does not run" in finding("nvcc").detail


def test_nvcc_is_missed_where_there_is_a_gpu(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    missing = diagnosis._nvcc()
    assert missing.ok is False and "CUDA toolkit 13.0" in missing.remedy


@pytest.mark.parametrize(
    ("built_for", "ok", "words"),
    [(None, True, "CPU only"), ("13.2", True, "nvcc 13.0"), ("12.8", False, "but nvcc 13.0")],
)
def test_torch_against_nvcc(
    bare: Path, monkeypatch: pytest.MonkeyPatch, built_for: str | None, ok: bool, words: str
) -> None:
    program(bare, "nvcc", NVCC_TEXT)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    found = diagnosis._torch()
    assert found.ok is ok and words in found.detail
    if not ok:
        assert "built for CUDA 12.8" in found.remedy and "for CUDA 13" in found.remedy


def test_gpu(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert finding("GPU").ok is None and "no NVIDIA GPU" in finding("GPU").detail
    program(bare, "nvidia-smi", "No devices were found")
    assert finding("GPU").ok is None
    program(bare, "nvidia-smi", "GPU 0: NVIDIA Card 9 (UUID: GPU-1)")
    assert finding("GPU").detail == "NVIDIA Card 9 is there, but torch does not see it"
    assert "built without CUDA" in finding("GPU").remedy
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert finding("GPU").ok is False and "driver for CUDA 13.0" in finding("GPU").remedy


def test_gpu_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card 9")
    assert diagnosis._gpu() == Finding("GPU", True, "Card 9 and 2 more")


def test_jupyter(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "nbconvert", "ipykernel", "jupyterlab")
    found = finding("jupyter")
    assert found.ok is None
    assert found.remedy.endswith("pip install nbconvert ipykernel jupyterlab")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: object())
    assert diagnosis._jupyter().ok is True


def test_checkout(checkout: Path) -> None:
    assert finding("checkout") == Finding("checkout", True, str(checkout))
    shutil.rmtree(checkout / "notebooks")
    assert finding("checkout").ok is False
    assert finding("checkout").remedy.startswith("clone the repository")


def test_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "here"))
    assert finding("cache") == Finding("cache", True, str(tmp_path / "here"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "file" / "cache"))
    found = finding("cache")
    assert found.ok is False and str(tmp_path / "file") in found.detail
    assert "set WORKBOOK_CACHE" in found.remedy
