"""A file that defines ModelNew, as anybody may give one: its text, what it says, its class.

The file is run in a module of its own. The public harness looks at the text before it runs a file:
`refusals` repeats that, comments (# and //) left aside as there.
"""

from __future__ import annotations

import hashlib
import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Draft", "DraftError", "read", "refusals"]

ENTRY = "ModelNew"


class DraftError(ValueError):
    """The file is none that could be judged; the text names it and what to do."""


@dataclass(frozen=True)
class Draft:
    """The text of a file. Run once a process, as long as the text is the same."""

    path: Path
    text: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    def entry(self) -> type:
        """Its ModelNew. DraftError without one; whatever the file raises when it is run."""
        module = _ran.get((self.path, self.text)) or self._run()
        if not callable(getattr(module, ENTRY, None)):
            raise DraftError(
                f"FILE: {self.path} defines no {ENTRY}: give the class that takes Model's place "
                f"this name, with the constructor of Model"
            )
        return getattr(module, ENTRY)

    def _run(self) -> types.ModuleType:
        name = f"workbook_draft_{self.digest}"
        try:
            code = compile(self.text, str(self.path), "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            where = f"{self.path}:{line}" if line else str(self.path)
            words = getattr(error, "msg", None) or str(error)
            raise DraftError(f"FILE: {where}: {words}: wants a Python file") from error
        module = types.ModuleType(name)
        module.__file__ = str(self.path)
        sys.modules[name] = module  # dataclasses and pickle look a class's module up there
        try:
            exec(code, module.__dict__)
        except BaseException:
            del sys.modules[name]
            raise
        _ran[self.path, self.text] = module
        return module


_ran: dict[tuple[Path, str], types.ModuleType] = {}


def read(path: str | Path) -> Draft:
    """The file's text. FileNotFoundError and DraftError say what to give instead."""
    path = Path(path)
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "not there"
        raise FileNotFoundError(f"FILE: {path} is {kind}: give a Python file that defines {ENTRY}")
    try:
        return Draft(path.resolve(), path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise DraftError(f"FILE: {path} is no UTF-8 text: give a Python file") from error


# What may not be in the text, and what it is called.
_FORBIDDEN = {
    r"\btry\s*:": "`try:`",
    r"\bexcept\s*:|\bexcept\s+\w+": "`except`",
    r"\bpass\b": "the word `pass`",
    r"\bimport\s+threading\b|\bfrom\s+threading\s+import\b": "`import threading`",
    r"\btorch\.cuda\.(Event(\.record|\.elapsed_time)?|synchronize)\s*=(?!=)": "a patch of timing",
    r"\btime\.(perf_counter|time)\s*=(?!=)": "a patch of timing",
}
# What has to be there: one of the words of each line.
_WANTED = (("__global__",), ("load_inline", "cpp_extension"))


def refusals(text: str) -> list[str]:
    """Why the static check of the public harness refuses a text; empty if it does not."""
    lines = [re.split(r"#|//", line, maxsplit=1)[0] for line in text.split("\n")]
    code, found = "\n".join(lines), []
    for words in _WANTED:
        if not any(word in code for word in words):
            found.append(f"`{'` or `'.join(words)}` is missing")
    for pattern, name in _FORBIDDEN.items():
        hit = re.search(pattern, code)
        if hit:
            found.append(f"{name} in line {code.count(chr(10), 0, hit.start()) + 1}")
    return found
