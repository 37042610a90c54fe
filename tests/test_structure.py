"""The house keeps its shape: import order, sizes, names, and notebooks as they belong in git.

Each rule is a function from sources to a list of complaints. The tests run it over the repository
(no complaint) and over planted violations (a complaint each), so a rule that sees nothing fails.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "workbook"

# Lowest first: a module imports only from those before it. `chains` is a package: its __init__ is
# the registry and imports the problems; the problems share SHARED and don't import each other.
ORDER = (
    "paths stats record journal tools cpuinfo machine diagnosis precision limits halves spec "
    "timing fold_timing fold toolchain recipe build normal ops sums backward gemm ways split "
    "variants controls chains ceilings families errors operands curves judge accuracy drafts pairs "
    "protocols results compare predictions training scaling style chart legend crossings "
    "plot_errors plot_overview plot_curves plot_halves plot_pipeline plot_routes "
    "plot_break_even plot_scaling plot trial prose tables costs sweeps verdicts standin runner "
    "tidy pages report standalone scopes modules amalgam export lines cli_options cli_check "
    "cli_sweep cli"
).split()
SHARED = {"chains.variants"}
EXEMPT = {"__init__", "__main__"}  # the public face, and `python -m workbook`

MODULE_LINES = 350
FUNCTION_LINES = 60
CELL_LINES = 25
CELL_DEF_LINES = 10


# --- import order ---------------------------------------------------------------------------


def module_name(path: Path, package: Path) -> str:
    """workbook/chains/x.py -> "workbook.chains.x"; an __init__ is its package."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def called_import(call: ast.Call, module: str, package: str) -> tuple[str, ...]:
    """What import_module(...) or __import__(...) imports; () for any other call.

    A name put together at run time counts up to its first unknown part ("workbook.chains.?").
    """
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name not in {"import_module", "__import__"} or not call.args:
        return ()
    text = literal_prefix(call.args[0], module, package)
    return (absolute(text.lstrip("."), len(text) - len(text.lstrip(".")), package),)


def literal_prefix(node: ast.expr, module: str, package: str) -> str:
    """The known beginning of a string expression, "?" standing for what is not known."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Name):
        return {"__name__": module, "__package__": package}.get(node.id, "?")
    if isinstance(node, ast.FormattedValue):
        return literal_prefix(node.value, module, package)
    if isinstance(node, ast.JoinedStr):
        return "".join(literal_prefix(part, module, package) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = (node.left, node.right)
        return "".join(literal_prefix(side, module, package) for side in sides)
    return "?"


def absolute(name: str, level: int, package: str) -> str:
    """A relative import's full name: level 1 is the package itself, 2 its parent."""
    if level == 0:
        return name
    base = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join([*base, *([name] if name else [])])


def imports(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """(line, full name) of everything a module imports, at any depth, importlib included.

    `from a import b` yields "a.b": whether b is a module is decided by the caller.
    """
    module = module_name(path, package)
    home = module if path.stem == "__init__" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = absolute(node.module or "", node.level, home)
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, name) for name in called_import(node, module, home))


def order_complaints(package: Path) -> list[str]:
    """Modules missing from ORDER, and imports that don't go down."""
    found = []
    for path in sorted(package.rglob("*.py")):
        own = module_name(path, package).split(".")[1:]  # [] for the package's own __init__
        if not own or own[0] in EXEMPT:
            continue
        where = path.relative_to(package.parent).as_posix()
        if own[0] not in ORDER:
            found.append(f"{where}: {own[0]} is not in ORDER")
            continue
        for line, name in imports(path, package):
            why = forbidden(name, own, package)
            if why:
                found.append(f"{where}:{line}: imports {name}: {why}")
    return found


def forbidden(name: str, own: list[str], package: Path) -> str:
    """Why module `own` (parts below the package) may not import `name`; "" when it may."""
    if name.startswith("?"):
        return "a name made at run time can't be checked: write it out"
    parts = name.split(".")
    if parts[0] != PACKAGE:
        return ""
    parts = parts[1:]
    if not parts or parts[0] not in ORDER:
        return "that is the public face or no module: name a module of ORDER"
    if parts[0] != own[0]:
        return "" if ORDER.index(parts[0]) < ORDER.index(own[0]) else "not lower in ORDER"
    if len(own) == 1:  # a package's registry takes in its own modules
        return "" if (package / own[0] / "__init__.py").exists() else "a module imports itself"
    if ".".join(parts[:2]) in SHARED and ".".join(own) not in SHARED:
        return ""
    if parts[1:] and parts[1].startswith(f"{own[1]}_"):  # a module's second part carries its name
        return ""
    return "modules of one package don't import each other"


# --- sizes and names ------------------------------------------------------------------------


def size_complaints(package: Path) -> list[str]:
    """Modules of 350 lines or more, functions over 60."""
    found = []
    for path in sorted(package.rglob("*.py")):
        text, where = path.read_text(encoding="utf-8"), path.relative_to(package.parent).as_posix()
        lines = len(text.splitlines())
        if lines >= MODULE_LINES:
            found.append(f"{where}: {lines} lines, at most {MODULE_LINES - 1}")
        for name, line, length in functions(text):
            if length > FUNCTION_LINES:
                found.append(f"{where}:{line}: {name} has {length} lines, at most {FUNCTION_LINES}")
    return found


def functions(text: str) -> Iterator[tuple[str, int, int]]:
    """(name, first line, lines) of every def in a source text, nested ones and methods too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1


def public_names(init: Path) -> set[str]:
    """What `workbook/__init__.py` offers beside its modules: defs, imported and lazy names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(init.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.module not in (None, PACKAGE):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Dict):
            names |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
    return {str(name) for name in names}


def name_complaints(package: Path) -> list[str]:
    """Modules that carry the name of something the package offers: the import would shadow it."""
    offered = public_names(package / "__init__.py")
    modules = {path.stem for path in package.glob("*.py")} | {
        path.parent.name for path in package.glob("*/__init__.py")
    }
    return [
        f"workbook/{name}: a public function is called that too"
        for name in sorted((modules - EXEMPT) & offered)
    ]


# --- notebooks ------------------------------------------------------------------------------


def notebook_complaints(path: Path) -> list[str]:
    """Kernel name, stripped outputs, short cells, short defs."""
    book, found = json.loads(path.read_text(encoding="utf-8")), []
    kernel = book.get("metadata", {}).get("kernelspec", {}).get("name")
    if kernel != "python3":
        found.append(f"{path.name}: kernel {kernel!r}: only 'python3' exists elsewhere")
    for number, cell in enumerate(book["cells"]):
        if cell["cell_type"] != "code":
            continue
        where = f"{path.name} cell {number}"
        if cell.get("outputs") or cell.get("execution_count") is not None:
            found.append(f"{where}: outputs are not stripped")
        if "execution" in cell.get("metadata", {}):
            found.append(f"{where}: carries the times of an execution")
        text = "".join(cell["source"])
        lines = text.strip("\n").splitlines()
        if len(lines) > CELL_LINES:
            found.append(f"{where}: {len(lines)} lines, at most {CELL_LINES}")
        python = "\n".join("" if line.lstrip()[:1] in ("%", "!") else line for line in lines)
        for name, _, length in functions(python):
            if length > CELL_DEF_LINES:
                found.append(f"{where}: def {name} has {length} lines, at most {CELL_DEF_LINES}")
    return found


# --- the repository -------------------------------------------------------------------------


def test_modules_import_only_from_lower_ones():
    assert order_complaints(ROOT / PACKAGE) == []


def test_modules_and_functions_are_short():
    assert size_complaints(ROOT / PACKAGE) == []


def test_no_module_is_called_like_a_public_function():
    assert name_complaints(ROOT / PACKAGE) == []


def test_the_public_face_is_seen():
    assert {"check", "bench", "problem", "problems", "records"} <= public_names(
        ROOT / PACKAGE / "__init__.py"
    )


def test_there_are_notebooks():
    assert (ROOT / "notebooks" / "00_start_here.ipynb").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.name)
def test_notebook_is_fit_for_git(path: Path):
    assert notebook_complaints(path) == []


# --- planted violations ---------------------------------------------------------------------


def planted(folder: Path, files: dict[str, str]) -> Path:
    """A small well-behaved package, with some files replaced."""
    good = {
        "__init__.py": "from workbook.accuracy import check\nfrom . import paths\n",
        "__main__.py": "from workbook.cli import main\n",
        "paths.py": "import os\n",
        "fold.py": "from __future__ import annotations\nfrom workbook import paths\n",
        "accuracy.py": "from .fold import x\nfrom . import chains\ndef check(): ...\n",
        "chains/__init__.py": "import importlib\nimportlib.import_module(f'{__name__}.{slug}')\n",
        "chains/one.py": "from workbook.fold import x\nfrom ..paths import root\n"
        "from workbook.chains import one_told, variants\n",
        "chains/one_told.py": "from workbook.fold import x\n",
        "chains/variants.py": "from workbook.fold import x\n",
        "cli.py": "def main():\n    from workbook import accuracy\n",
    }
    for name, text in (good | files).items():
        path = folder / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / PACKAGE


def test_the_planted_package_is_clean(tmp_path: Path):
    package = planted(tmp_path, {})
    assert order_complaints(package) + size_complaints(package) + name_complaints(package) == []


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("paths.py", "from workbook import fold", "not lower"),
        ("paths.py", "from workbook.fold import x", "not lower"),
        ("paths.py", "import workbook.fold as f", "not lower"),
        ("paths.py", "from . import fold", "not lower"),
        ("paths.py", "from .fold import x", "not lower"),
        ("paths.py", "def f():\n    def g():\n        from .fold import x", "not lower"),
        ("paths.py", "if TYPE_CHECKING:\n    from .fold import x", "not lower"),
        ("paths.py", "import importlib\nimportlib.import_module('workbook.fold')", "not lower"),
        ("paths.py", "import_module('.fold', 'workbook')", "not lower"),
        ("paths.py", "import_module('.fold', package=__package__)", "not lower"),
        ("paths.py", "import_module('workbook.chains.' + slug)", "not lower"),
        ("paths.py", "import_module(f'workbook.chains.{slug}')", "not lower"),
        ("paths.py", "__import__('workbook.fold')", "not lower"),
        ("paths.py", "import_module(name)", "can't be checked"),
        ("paths.py", "import workbook", "public face"),
        ("paths.py", "import workbook as wb", "public face"),
        ("paths.py", "from workbook import check", "public face"),
        ("chains/one.py", "from ..accuracy import check", "not lower"),
        ("chains/one.py", "from . import two", "don't import each other"),
        ("chains/one_told.py", "from workbook.chains import one", "don't import each other"),
        ("chains/two.py", "from workbook.chains import one_told", "don't import each other"),
        ("chains/one.py", "from workbook.chains import two", "don't import each other"),
        ("chains/one.py", "from workbook import chains", "don't import each other"),
        ("chains/variants.py", "from . import one", "don't import each other"),
        ("chains/__init__.py", "from workbook import cli", "not lower"),
        ("helpers.py", "", "not in ORDER"),
    ],
)
def test_a_forbidden_import_is_seen(tmp_path: Path, name: str, text: str, says: str):
    (complaint,) = order_complaints(planted(tmp_path, {name: text}))
    assert says in complaint and name in complaint


def body(lines: int) -> str:
    return "".join(f"    x = {i}\n" for i in range(lines))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\n" * MODULE_LINES, "350 lines, at most 349"),
        ("def f():\n" + body(FUNCTION_LINES), "f has 61 lines"),
        ("class A:\n  async def f():\n" + body(FUNCTION_LINES), "f has 61 lines"),
    ],
)
def test_too_long_is_seen(tmp_path: Path, text: str, says: str):
    (complaint,) = size_complaints(planted(tmp_path, {"fold.py": text}))
    assert says in complaint


def test_just_short_enough_is_not_seen(tmp_path: Path):
    text = "def f():\n" + body(FUNCTION_LINES - 1)
    text += "x = 1\n" * (MODULE_LINES - 1 - FUNCTION_LINES)
    assert size_complaints(planted(tmp_path, {"fold.py": text})) == []


@pytest.mark.parametrize(
    "init",
    ["from workbook.accuracy import go as fold", "def fold(): ...", "LAZY = {'fold': 'accuracy'}"],
)
def test_a_module_named_like_a_function_is_seen(tmp_path: Path, init: str):
    (complaint,) = name_complaints(planted(tmp_path, {"__init__.py": init}))
    assert "workbook/fold" in complaint


def notebook(folder: Path, source: str = "x = 1", kernel: str = "python3", **cell: object) -> Path:
    code = {"cell_type": "code", "source": source.splitlines(keepends=True), "metadata": {}}
    blank = {"outputs": [], "execution_count": None}
    prose = {"cell_type": "markdown", "source": ["a line\n"] * 99, "metadata": {}}
    book = {"metadata": {"kernelspec": {"name": kernel}}, "cells": [prose, code | blank | cell]}
    path = folder / "planted.ipynb"
    path.write_text(json.dumps(book))
    return path


def test_the_planted_notebook_is_clean(tmp_path: Path):
    longest = "%time x\n!ls\ndef f():\n" + body(CELL_DEF_LINES - 1) + "x = 1\n" * 13
    assert len(longest.splitlines()) == CELL_LINES
    assert notebook_complaints(notebook(tmp_path, longest)) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kernel": "my-env"}, "kernel 'my-env'"),
        ({"outputs": [{"output_type": "stream"}]}, "outputs are not stripped"),
        ({"execution_count": 3}, "outputs are not stripped"),
        ({"metadata": {"execution": {"iopub.execute_input": ""}}}, "times of an execution"),
        ({"source": "x = 1\n" * (CELL_LINES + 1)}, "26 lines, at most 25"),
        ({"source": "def f():\n" + body(CELL_DEF_LINES)}, "def f has 11 lines"),
    ],
)
def test_an_unfit_notebook_is_seen(tmp_path: Path, change: dict[str, object], says: str):
    (complaint,) = notebook_complaints(notebook(tmp_path, **change))
    assert says in complaint
