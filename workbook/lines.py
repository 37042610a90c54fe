"""Objects as lines of standard JSON on stdout, for whoever reads the command line by machine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

__all__ = ["print_lines"]


def print_lines(objects: Iterable[dict]) -> None:
    """A line each; inf and nan, which JSON lacks, as strings, as in the records."""
    for one in objects:
        plain = {k: str(v) if v in (math.inf, -math.inf) or v != v else v for k, v in one.items()}
        print(json.dumps(plain, default=str, allow_nan=False), flush=True)
