"""Facts about this machine: its processors, tools and versions. Nothing is measured here."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

import torch

from . import cpuinfo, paths
from .tools import compiler, missing_compiler, ninja, nvcc, output, tool_version

__all__ = [
    "NoDevice",
    "card",
    "clocks",
    "compiler",
    "default_device",
    "describe",
    "facts",
    "last_level_cache_bytes",
    "missing_compiler",
    "ninja",
    "nvcc",
    "provenance",
    "versions",
]

GUESSED_CACHE_BYTES = 32 << 20  # where a system does not tell its last-level cache
_CPUS = Path("/sys/devices/system/cpu")
_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container; "max" when there is none
# AMD CPU family -> (first model, last model, generation), as Linux tells them apart in amd.c
_AMD = {
    23: [(0x00, 0x2F, "Zen 1"), (0x30, 0x4F, "Zen 2"), (0x50, 0x5F, "Zen 1"),
         (0x60, 0x7F, "Zen 2"), (0x90, 0x91, "Zen 2"), (0xA0, 0xAF, "Zen 2")],
    25: [(0x00, 0x0F, "Zen 3"), (0x10, 0x1F, "Zen 4"), (0x20, 0x5F, "Zen 3"),
         (0x60, 0xAF, "Zen 4")],
    26: [(0x00, 0x2F, "Zen 5"), (0x40, 0x4F, "Zen 5"), (0x60, 0x7F, "Zen 5")],
}  # fmt: skip
_CLOCKS = {  # our name -> nvidia-smi's
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "sm_max_mhz": "clocks.max.sm",
    "memory_max_mhz": "clocks.max.mem",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}


class NoDevice(RuntimeError):
    """The device that was asked for is not here."""


def default_device(given: str | None = None) -> str:
    """The device that is given, else cuda where there is a GPU, else cpu."""
    return given or ("cuda" if torch.cuda.is_available() else "cpu")


def facts(device: str | torch.device = "cpu") -> dict[str, Any]:
    """What there is of `device`: sizes in bytes, counts, names. NoDevice without such a GPU.

    cpu: device, name, cores (usable ones), torch_threads, caches (level -> bytes of one),
    last_level_cache_bytes, memory_bytes, capability.
    cuda: device, name, sms, l2_bytes, memory_bytes, capability such as "9.0", driver.
    """
    device = _known(device)
    if device.type == "cuda":
        props = torch.cuda.get_device_properties(device)
        return {
            "device": "cuda",
            "name": props.name,
            "sms": props.multi_processor_count,
            "l2_bytes": props.L2_cache_size,
            "memory_bytes": props.total_memory,
            "capability": f"{props.major}.{props.minor}",
            "driver": _smi(["driver_version"], device).get("driver_version", ""),
        }
    caches = {f"L{level}{letter}": size for (level, letter, _), size in _caches().items()}
    return {
        "device": "cpu",
        "name": _cpu_name(),
        "cores": len(_usable_cpus()),
        "torch_threads": torch.get_num_threads(),
        "caches": dict(sorted(caches.items())),
        "last_level_cache_bytes": last_level_cache_bytes(device),
        "memory_bytes": _memory_bytes(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def card(device: str | torch.device = "cpu") -> str:
    """The name of the CPU or GPU that records are filed under. NoDevice without such a GPU."""
    device = _known(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


def describe(device: str | torch.device = "cpu") -> str:
    """One line for people. NoDevice without such a GPU."""
    known = facts(device)
    memory = f"{known['memory_bytes'] / 2**30:.1f} GiB memory"
    if known["device"] == "cuda":
        cuda = f"CUDA {torch.version.cuda}" + (known["driver"] and f", driver {known['driver']}")
        return (
            f"{known['name']}: {known['sms']} SMs, capability {known['capability']}, "
            f"{known['l2_bytes'] / 2**20:.0f} MiB L2, {memory}, {cuda}, torch {torch.__version__}"
        )
    return (
        f"{known['name']}: {known['cores']} cores, {known['capability']}, "
        f"{known['torch_threads']} torch threads, "
        f"{known['last_level_cache_bytes'] / 2**20:.0f} MiB last-level cache, {memory}, "
        f"torch {torch.__version__}"
    )


def last_level_cache_bytes(device: str | torch.device = "cpu") -> int:
    """The L2 of a GPU, or all last-level caches the usable cores reach; 32 MiB if not told."""
    device = _known(device)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    caches = _caches()
    last = max((level for level, letter, _ in caches if letter != "i"), default=0)
    total = sum(size for (level, letter, _), size in caches.items() if level == last)
    return total or GUESSED_CACHE_BYTES


def clocks(device: str | torch.device = "cpu") -> dict[str, float]:
    """Clocks now and at most (MHz), power (W), temperature (C) of a GPU; {} where not told."""
    device = torch.device(device)
    if device.type != "cuda":
        return {}
    told = _smi(list(_CLOCKS.values()), device)
    numbers = {ours: _number(told.get(theirs, "")) for ours, theirs in _CLOCKS.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def versions() -> dict[str, str]:
    """Those that are there of torch, cuda (torch's), driver, compiler, nvcc and python."""
    found = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "driver": _smi(["driver_version"]).get("driver_version", ""),
        "compiler": tool_version(compiler()),
        "nvcc": tool_version(nvcc()),
        "python": platform.python_version(),
    }
    return {name: str(version) for name, version in found.items() if version}


def provenance() -> dict[str, Any]:
    """commit, dirty, date (UTC, ISO, seconds) and versions, named as a Record names them.

    The commit is $WORKBOOK_COMMIT (dirty when $WORKBOOK_DIRTY is 1, true or yes), else git's,
    else "unknown", with dirty None.
    """
    commit = os.environ.get("WORKBOOK_COMMIT", "").strip()
    if commit:
        dirty: bool | None = os.environ.get("WORKBOOK_DIRTY", "").lower() in ("1", "true", "yes")
    else:
        commit, dirty = _git_state()
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"commit": commit, "dirty": dirty, "date": date, "versions": versions()}


def _known(device: str | torch.device) -> torch.device:
    device = torch.device(device)
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type != "cuda" or (device.index or 0) >= count:
        raise NoDevice(
            f"device is '{device}', but torch {torch.__version__} sees {count} CUDA GPUs; "
            "use 'cpu', or run `python -m workbook doctor`"
        )
    return device


def _cpu_name() -> str:
    """As the system tells it: Linux on x86, macOS, then whatever Python knows.

    A virtual machine may hide the number of a model: "AMD EPYC" is any of many, twice as fast as
    one another. Such a name is followed by the generation, or by the CPU's family and model.
    """
    told = cpuinfo.told()
    if name := told.get("model name"):
        return name if re.search(r"\d", name) else f"{name} {_generation(told)}".strip()
    brand = output(["sysctl", "-n", "machdep.cpu.brand_string"]) or ""
    return brand.strip() or platform.processor() or platform.machine() or "unknown CPU"


def _generation(told: dict[str, str]) -> str:
    """ "Zen 4", "family 6 model 85" where we know no name for it, "" where the two are not told."""
    try:
        family, model = int(told["cpu family"]), int(told["model"])
    except (KeyError, ValueError):
        return ""
    known = _AMD.get(family, []) if told.get("vendor_id") == "AuthenticAMD" else []
    found = [name for first, last, name in known if first <= model <= last]
    return found[0] if found else f"family {family} model {model}"


def _usable_cpus() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _caches() -> dict[tuple[int, str, str], int]:
    """(level, "d", "i" or "", the CPUs that share it) -> bytes, for the usable CPUs; Linux only."""
    found = {}
    for cpu in _usable_cpus():
        for folder in (_CPUS / f"cpu{cpu}" / "cache").glob("index*"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                level, kind, size, shared = (
                    (folder / name).read_text().strip()
                    for name in ("level", "type", "size", "shared_cpu_list")
                )
                letter = {"Data": "d", "Instruction": "i", "Unified": ""}[kind]
                found[int(level), letter, shared] = _bytes(size)
    return found


def _bytes(text: str) -> int:
    """ "48K" -> 49152, as /sys writes sizes."""
    unit = {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0)
    return int(text[:-1] if unit else text) << unit


def _memory_bytes() -> int:
    """Memory of the machine, or what its container may use when that is less; 0 if not told."""
    sizes = []
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(OSError, ValueError):
        sizes.append(int(_MEMORY_LIMIT.read_text()))
    return min(sizes, default=0)


def _smi(names: list[str], device: torch.device | None = None) -> dict[str, str]:
    """nvidia-smi's answers by name, of `device` or of the first GPU; {} when it has none.

    A GPU is named by its UUID: nvidia-smi does not count as CUDA_VISIBLE_DEVICES makes torch count.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    if device is not None:
        command.append(f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}")
    lines = (output(command) or "").strip().splitlines()
    values = [value.strip() for value in lines[0].split(",")] if lines else []
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else {}


def _number(text: str) -> float | None:
    """nvidia-smi writes [N/A] for what a card does not tell."""
    try:
        return float(text)
    except ValueError:
        return None


def _git_state() -> tuple[str, bool | None]:
    """(commit, dirty) of the checkout; ("unknown", None) outside one or without git."""
    with contextlib.suppress(paths.NotInCheckout):
        root = paths.root()
        told = (output(["git", "rev-parse", "--show-toplevel", "HEAD"], root) or "").split("\n")
        # a copy without .git inside somebody's repository is not at that repository's commit
        if len(told) >= 2 and Path(told[0]).resolve() == root:
            changed = output(["git", "status", "--porcelain"], root)
            return told[1], None if changed is None else bool(changed)
    return "unknown", None
