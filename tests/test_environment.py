"""The environment's files agree with each other, and the Makefile does what the README says.

The Makefile runs against a stand-in Python that writes down how it was called, so these tests
install nothing and need no network.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import Specifier, SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def requirements() -> list[Requirement]:
    """What the project asks for, the test extra included."""
    return [Requirement(text) for text in [*PROJECT["dependencies"], *EXTRAS["test"]]]


def pins() -> dict[str, Requirement]:
    """constraints.txt: canonical name -> requirement."""
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").open()]
    found = [Requirement(line) for line in lines if line]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


# --- constraints.txt ------------------------------------------------------------------------


def test_every_dependency_is_pinned_to_a_version_that_pyproject_allows():
    pinned = pins()
    for requirement in requirements():
        pin = pinned[canonicalize_name(requirement.name)]
        (only,) = pin.specifier
        assert only.operator == "=="
        assert requirement.specifier.contains(only.version), f"{pin} against {requirement}"
        assert requirement.marker is None or pin.marker == requirement.marker


def test_constraints_work_on_other_machines():
    text = (ROOT / "constraints.txt").read_text()
    for line in text.splitlines():
        if line and not line.startswith("#"):
            machine = r'; sys_platform == "\w+"( and platform_machine == "\w+")?'
            pattern = rf"[A-Za-z0-9._-]+==[A-Za-z0-9.]+({machine})?"
            assert re.fullmatch(pattern, line), f"a plain pin was wanted: {line}"
    assert str(pins()["torch"]) == "torch==2.13.0"


@pytest.mark.parametrize(
    "name", ["pyproject.toml", "constraints.txt", "environment.yml", "Makefile", ".ci/run"]
)
def test_no_registry_is_named(name: str):
    text = (ROOT / name).read_text()
    assert not re.search(r"https?://|index-url|find-links|trusted-host|file:/", text)


def test_transitive_dependencies_are_pinned():
    pinned, missing = pins(), set()
    queue = [r for r in requirements() if not r.marker or r.marker.evaluate()]
    seen: set[tuple[str, frozenset[str]]] = set()
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        if (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        if name not in pinned:
            missing.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed here, so its dependencies can't be followed")
        for text in distribution.requires or []:
            below = Requirement(text)
            wanted = [
                not below.marker or below.marker.evaluate({"extra": extra})
                for extra in ("", *requirement.extras)
            ]
            # A CUDA build of torch pins its own CUDA libraries and triton.
            own = name == "torch" and re.match(r"nvidia|cuda|triton", below.name)
            if any(wanted) and not own:
                queue.append(below)
    assert not missing, f"constraints.txt lacks {sorted(missing)}"


def test_pins_install_on_the_oldest_python():
    oldest = Specifier(PROJECT["requires-python"]).version + ".0"  # Debian 12 has 3.11.2
    for name, pin in pins().items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            distribution = importlib.metadata.distribution(name)
            if pin.specifier.contains(distribution.version):
                wants = SpecifierSet(distribution.metadata["Requires-Python"] or "")
                assert wants.contains(oldest), f"{pin} wants Python {wants}"


def test_pytest_stays_below_10_for_nbmake():
    (requirement,) = [r for r in requirements() if r.name == "pytest"]
    assert not requirement.specifier.contains("10.0")


# --- environment.yml ------------------------------------------------------------------------


def test_conda_gives_the_same_environment():
    yaml = pytest.importorskip("yaml", reason="PyYAML reads environment.yml")
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = [item for item in environment["dependencies"] if isinstance(item, str)]
    (pip,) = [item["pip"] for item in environment["dependencies"] if isinstance(item, dict)]
    assert environment["name"] == PROJECT["name"]
    assert "python" + PROJECT["requires-python"] in conda
    assert {"pip", "make", "cxx-compiler"} < set(conda)
    # Whatever pyproject asks for comes from pyproject, with constraints.txt's versions: a package
    # written here a second time would drift.
    assert pip == ["--constraint constraints.txt", "--editable .[test]"]
    twice = {re.split(r"[<>=! ]", item)[0] for item in conda} & {r.name for r in requirements()}
    assert not twice


# --- Makefile -------------------------------------------------------------------------------

STAND_IN = """\
#!/bin/sh
# A stand-in for Python: writes down its arguments, makes environments of itself.
printf '%s|PYTHONPATH=%s|PATH=%s\\n' "$*" "$PYTHONPATH" "$PATH" >> "{log}"
case "$*" in
  *version_info*) exit {old} ;;
  *sys.version.split*) echo 3.9.1 ;;
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  *"pip install"*) exit {pip} ;;
  *"import nbmake"*) exit {nbmake} ;;
  *"import pytest"*) exit {pytest} ;;
  *"import xdist"*) exit {xdist} ;;
  "-m pytest"*--nbmake*) exit 0 ;;
  "-m pytest"*) exit {red} ;;
esac
"""


class Checkout:
    """A copy of the Makefile and what it reads, in a folder whose name has spaces."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "a checkout with spaces"
        self.folder.mkdir()
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.folder)
        self.log, self.python = folder / "log", folder / "my python"
        self.behave()

    def behave(self, **status: int) -> None:
        defaults = {"old": 0, "pip": 0, "nbmake": 0, "pytest": 0, "xdist": 0, "red": 0}
        self.python.write_text(STAND_IN.format(log=self.log, **(defaults | status)))
        self.python.chmod(0o755)

    def make(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        self.log.write_text("")
        outer = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
        dropped = ("PYTHON", "VENV", "PIP_ARGS", "PYTHONPATH", "CELL_SECONDS", "WORKERS")
        clean = {k: v for k, v in outer.items() if k not in dropped} | environment
        command = ["make", *arguments]
        if not any(a.startswith("PYTHON=") for a in arguments):
            command.append(f"PYTHON={self.python}")
        return subprocess.run(
            command, cwd=self.folder, env=clean, capture_output=True, text=True, timeout=60
        )

    def calls(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if not line.startswith("-c")]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    if not shutil.which("make"):
        pytest.skip("make is not on PATH")
    return Checkout(tmp_path)


def test_help_is_the_default_and_lists_every_target(checkout: Checkout):
    listed = checkout.make()
    assert listed.returncode == 0
    for target in ("report", "test", "lab", "lint", "clean", "help"):
        assert f"make {target} " in listed.stdout
    assert checkout.calls() == []


def test_report_installs_the_pins_once(checkout: Checkout):
    first = checkout.make("report", "PIP_ARGS=--no-cache-dir -q")
    assert first.returncode == 0, first.stderr
    venv, pip, report = checkout.calls()
    assert venv.startswith("-m venv .venv|")
    assert "-m pip install" in pip
    assert "--no-cache-dir -q -c constraints.txt -e .[test]|" in pip
    assert report.startswith("-m workbook report|")
    assert f"PATH={checkout.folder}/.venv/bin:" in report  # where ninja is

    assert checkout.make("report").returncode == 0
    assert [call.split("|")[0] for call in checkout.calls()] == ["-m workbook report"]


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_changed_dependency_installs_again(checkout: Checkout, name: str):
    checkout.make("report")
    later = (checkout.folder / ".venv/.installed").stat().st_mtime + 10
    os.utime(checkout.folder / name, (later, later))
    checkout.make("report")
    assert any("pip install" in call for call in checkout.calls())


def test_a_moved_checkout_installs_again(checkout: Checkout):
    checkout.make("report")
    checkout.folder = checkout.folder.rename(checkout.folder.with_name("moved"))
    checkout.make("report")
    assert any("pip install" in call for call in checkout.calls())


def test_a_failed_installation_is_taken_up_again(checkout: Checkout):
    checkout.behave(pip=1)
    assert checkout.make("report").returncode != 0
    assert not any("workbook report" in call for call in checkout.calls())
    checkout.behave()
    assert checkout.make("report").returncode == 0
    assert any("pip install" in call for call in checkout.calls())


def test_an_old_python_is_named_with_the_remedy(checkout: Checkout):
    checkout.behave(old=1)
    told = checkout.make("report")
    assert told.returncode != 0 and checkout.calls() == []
    assert "Python 3.11 or newer is needed" in told.stderr and "3.9.1" in told.stderr
    assert "make PYTHON=python3.12" in told.stderr


def test_a_python_that_is_not_there_is_named(checkout: Checkout):
    told = checkout.make("report", "PYTHON=python-of-nowhere")
    assert told.returncode != 0
    assert 'There is no Python named "python-of-nowhere"' in told.stderr


@pytest.mark.parametrize(
    ("arguments", "xdist", "options"),
    [((), 0, " -n 2 --dist worksteal"), (("WORKERS=5",), 0, " -n 5 --dist worksteal"), ((), 1, "")],
)
def test_test_runs_both_suites_in_the_environment(checkout: Checkout, arguments, xdist, options):
    checkout.behave(xdist=xdist)
    assert checkout.make("test", *arguments).returncode == 0
    assert [call.split("|")[0] for call in checkout.calls()][2:] == [
        f"-m pytest{options}",
        f"-m pytest{options} --nbmake --nbmake-timeout=300 -v notebooks/",
    ]


def test_a_red_test_makes_make_test_red(checkout: Checkout):
    checkout.behave(red=1)
    assert checkout.make("test").returncode != 0


def test_system_installs_nothing_and_finds_the_checkout(checkout: Checkout):
    done = checkout.make("report", "VENV=system", PYTHONPATH="/theirs")
    assert done.returncode == 0, done.stderr
    (report,) = checkout.calls()
    assert report.startswith(f"-m workbook report|PYTHONPATH={checkout.folder}:/theirs|")
    assert not (checkout.folder / ".venv").exists()


def test_system_without_nbmake_says_what_was_not_run(checkout: Checkout):
    checkout.behave(nbmake=1)
    done = checkout.make("test", "VENV=system")
    assert done.returncode == 0
    (tests,) = checkout.calls()
    assert tests.startswith("-m pytest") and "nbmake" not in tests.split("|")[0]
    assert "NOT RUN: the notebooks" in done.stdout and "nbmake" in done.stdout


def test_an_environment_that_lost_nbmake_is_an_error(checkout: Checkout):
    checkout.behave(nbmake=1)
    told = checkout.make("test")
    assert told.returncode != 0 and "make clean" in told.stderr


def test_system_without_pytest_says_so(checkout: Checkout):
    checkout.behave(pytest=1)
    told = checkout.make("test", "VENV=system")
    assert told.returncode != 0 and checkout.calls() == []
    assert "make test needs pytest" in told.stderr


def test_a_venv_with_spaces_is_refused(checkout: Checkout):
    told = checkout.make("report", "VENV=my venv")
    assert told.returncode != 0 and "without spaces" in told.stderr


def test_clean_keeps_records(checkout: Checkout):
    checkout.make("report")
    for name in ("data", ".runs", "reports"):
        (checkout.folder / name).mkdir()
        (checkout.folder / name / "kept").touch()
    assert checkout.make("clean").returncode == 0
    left = {path.name for path in checkout.folder.iterdir()}
    assert {"data", ".runs", "Makefile"} <= left and not {".venv", "reports"} & left


# --- installation without the checkout ------------------------------------------------------


def test_a_copy_without_the_notebooks_says_in_one_line_what_to_do(tmp_path: Path):
    shutil.copytree(ROOT / "workbook", tmp_path / "workbook")
    program = textwrap.dedent(
        """
        from workbook import paths
        try:
            paths.root()
        except paths.NotInCheckout as error:
            print(error)
        """
    )
    told = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        timeout=120,
    )
    assert told.returncode == 0, told.stderr
    (line,) = told.stdout.splitlines()
    assert "clone the repository" in line and "pip install -e ." in line
