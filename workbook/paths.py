"""Where things are: found from this file, never from the working directory."""

from __future__ import annotations

import functools
import os
import tempfile
import warnings
from pathlib import Path

__all__ = [
    "NotInCheckout",
    "cache",
    "data",
    "is_writable",
    "kernels",
    "notebooks",
    "reports",
    "root",
    "runs",
    "wanted_cache",
]

_PACKAGE = Path(__file__).resolve().parent
_MARKS = ("kernels", "notebooks")


class NotInCheckout(RuntimeError):
    """The package runs, but the folders that belong beside it are not there."""


def root() -> Path:
    """The checkout: the folder that holds kernels/ and notebooks/ beside workbook/.

    Raises NotInCheckout, in one line, when the package was installed without them.
    """
    found = _PACKAGE.parent
    if not all((found / mark).is_dir() for mark in _MARKS):
        raise NotInCheckout(
            "workbook is installed without its notebooks/ and kernels/: "
            "clone the repository and run `pip install -e .` there"
        )
    return found


def kernels() -> Path:
    """Kernel sources, read-only for the package."""
    return root() / "kernels"


def notebooks() -> Path:
    """The notebooks, in reading order by name."""
    return root() / "notebooks"


def data() -> Path:
    """Kept records, in git."""
    return root() / "data"


def reports() -> Path:
    """Exported HTML: $WORKBOOK_REPORTS, else reports/ of the checkout. Not created here."""
    return _from_environment("WORKBOOK_REPORTS") or root() / "reports"


def runs() -> Path:
    """Live records: $WORKBOOK_RUNS, else .runs/ of the checkout. Not created here."""
    return _from_environment("WORKBOOK_RUNS") or root() / ".runs"


def cache() -> Path:
    """The folder for built libraries, created if needed.

    $WORKBOOK_CACHE, else $XDG_CACHE_HOME/workbook, else ~/.cache/workbook. When that one can not
    be created or written, a folder of this user under the temporary folder, with one warning.
    """
    wanted = wanted_cache()
    if wanted is not None and is_writable(wanted):
        return wanted
    return _fallback(str(wanted) if wanted else "no home folder")


def wanted_cache() -> Path | None:
    """The folder that `cache` tries first; None without a home folder. Not created here."""
    chosen = _from_environment("WORKBOOK_CACHE")
    if chosen is not None:
        return chosen
    base = _from_environment("XDG_CACHE_HOME")
    if base is not None:
        return base / "workbook"
    try:
        return Path.home() / ".cache" / "workbook"
    except RuntimeError:  # no HOME and no entry in the user database
        return None


def is_writable(folder: Path) -> bool:
    """Whether a file can be made in `folder`, which is created if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _from_environment(name: str) -> Path | None:
    value = os.environ.get(name, "").strip()
    return Path(value).expanduser().absolute() if value else None


@functools.cache
def _fallback(wanted: str) -> Path:
    """One folder, and one warning, for each cache that could not be used in this process.

    A name with the user's number is kept across processes, if it is a real folder of this user:
    a library is loaded from it, so a folder that somebody else prepared is not taken.
    """
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    folder = Path(tempfile.gettempdir()) / f"workbook-{user}"
    if not _is_mine(folder):
        folder = Path(tempfile.mkdtemp(prefix="workbook-"))
    warnings.warn(
        f"the cache {wanted} can not be written: using {folder}; set WORKBOOK_CACHE to choose",
        stacklevel=3,
    )
    return folder


def _is_mine(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.lstat()
    except OSError:
        return False
    private = not hasattr(os, "getuid") or (
        state.st_uid == os.getuid() and not state.st_mode & 0o022
    )
    return folder.is_dir() and not folder.is_symlink() and private and is_writable(folder)
