"""paths: found from the file, overridden by the environment, a cache that always exists."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

from workbook import paths

REPOSITORY = Path(__file__).resolve().parent.parent
VARIABLES = ("WORKBOOK_CACHE", "WORKBOOK_RUNS", "WORKBOOK_REPORTS", "XDG_CACHE_HOME")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    paths._fallback.cache_clear()


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    for name in ("kernels", "notebooks", "workbook"):
        (root / name).mkdir(parents=True)
    monkeypatch.setattr(paths, "_PACKAGE", root / "workbook")
    return root


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_package_is_where_the_file_is() -> None:
    assert paths._PACKAGE == REPOSITORY / "workbook"


def test_places_do_not_follow_the_working_directory(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert paths.root() == checkout
    assert paths.kernels() == checkout / "kernels"
    assert paths.notebooks() == checkout / "notebooks"
    assert paths.data() == checkout / "data"
    assert paths.reports() == checkout / "reports"
    assert paths.runs() == checkout / ".runs"


@pytest.mark.parametrize("lacking", ["kernels", "notebooks"])
def test_without_its_folders_it_says_so_in_one_line(checkout: Path, lacking: str) -> None:
    (checkout / lacking).rmdir()
    with pytest.raises(paths.NotInCheckout) as caught:
        paths.root()
    assert str(caught.value) == (
        "workbook is installed without its notebooks/ and kernels/: "
        "clone the repository and run `pip install -e .` there"
    )


def test_runs_and_reports_follow_the_environment_without_a_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "site-packages" / "workbook")
    monkeypatch.setenv("WORKBOOK_RUNS", str(tmp_path / "r"))
    monkeypatch.setenv("WORKBOOK_REPORTS", "~/pages")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.runs() == tmp_path / "r"
    assert paths.reports() == tmp_path / "pages"


def test_cache_is_the_first_that_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert paths.cache() == tmp_path / "home" / ".cache" / "workbook"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert paths.cache() == tmp_path / "xdg" / "workbook"
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "deep" / "chosen"))
    assert paths.cache() == tmp_path / "deep" / "chosen"
    monkeypatch.setenv("WORKBOOK_CACHE", "  ")  # set to nothing is not set
    assert paths.cache() == tmp_path / "xdg" / "workbook"
    assert (tmp_path / "deep" / "chosen").is_dir()
    assert not list((tmp_path / "deep" / "chosen").iterdir())  # the trial file is gone


def test_unwritable_cache_falls_back_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, temporary: Path
) -> None:
    (tmp_path / "file").write_text("")
    wanted = tmp_path / "file" / "cache"  # a file is in the way, for root too
    monkeypatch.setenv("WORKBOOK_CACHE", str(wanted))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first, second = paths.cache(), paths.cache()
    assert first == second == temporary / f"workbook-{os.getuid()}"
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    caught = [w for w in caught if issubclass(w.category, UserWarning)]  # not a collector's
    assert len(caught) == 1
    text = str(caught[0].message)
    assert str(wanted) in text and str(first) in text and "WORKBOOK_CACHE" in text
    assert "\n" not in text


@pytest.mark.parametrize("trap", ["link", "open to all", "file"])
def test_fallback_does_not_take_a_folder_somebody_prepared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, temporary: Path, trap: str
) -> None:
    prepared = temporary / f"workbook-{os.getuid()}"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if trap == "link":
        prepared.symlink_to(elsewhere)
    elif trap == "file":
        prepared.write_text("")
    else:
        prepared.mkdir()
        prepared.chmod(0o777)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="WORKBOOK_CACHE"):
        found = paths.cache()
    assert found.parent == temporary and found != prepared and found.is_dir()


def test_no_home_folder(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert paths.wanted_cache() is None
    with pytest.warns(UserWarning, match="no home folder"):
        assert paths.cache().parent == temporary


@pytest.mark.parametrize("module", ["paths", "stats", "record", "journal", "limits", "tools"])
def test_light_modules_do_not_load_torch(module: str, tmp_path: Path) -> None:
    code = f"import sys, workbook.{module}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "False", done.stderr
