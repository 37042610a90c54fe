"""What Linux tells of this machine's CPU. No torch."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

__all__ = ["FILE", "told"]

FILE = Path("/proc/cpuinfo")


def told() -> dict[str, str]:
    """The first CPU's lines, such as {"vendor_id": "AuthenticAMD", "cpu family": "25", ...}; {}
    elsewhere than on Linux."""
    text = ""
    with contextlib.suppress(OSError):
        text = FILE.read_text(encoding="utf-8")
    return dict(re.findall(r"^(\w[\w ]*?)\s*:[ \t]*(\S.*?)\s*$", text.split("\n\n")[0], re.M))
