"""A module of a package, parsed: what it imports, what it defines, what it does besides."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from workbook.scopes import bound_at_top

__all__ = ["Module", "Name", "read"]

Name = tuple[str, str]  # a module below the package, such as "chains.x", and a name in it


@dataclass
class Module:
    """`name` is below the package; local names are by what an import statement gave them."""

    package: Path
    name: str
    source: bytes
    tree: ast.Module
    modules: dict[str, str] = field(default_factory=dict)  # local name -> module of the package
    names: dict[str, Name] = field(default_factory=dict)  # local name -> definition elsewhere
    externals: dict[str, tuple[str, str]] = field(default_factory=dict)  # -> (from, import)
    definitions: dict[str, list[ast.stmt]] = field(default_factory=dict)
    effects: list[ast.stmt] = field(default_factory=list)  # statements that bind no name

    def offset(self, line: int, column: int) -> int:
        """Where a position of `ast` (columns are bytes) is in the source."""
        return len(b"".join(self.source.splitlines(keepends=True)[: line - 1])) + column

    def lines_of(self, statement: ast.stmt) -> tuple[int, int]:
        """First and last line of a statement, with its decorators and the comments right above."""
        lines = self.source.splitlines()
        decorators = getattr(statement, "decorator_list", [])
        first = min([statement.lineno, *(d.lineno for d in decorators)])
        while first > 1 and lines[first - 2].startswith(b"#"):
            first -= 1
        return first, statement.end_lineno or statement.lineno

    def imported(self, node: ast.AST) -> Iterator[tuple[str, str, str]]:
        """(local name, from, import) of an import statement, in full; none for another node."""
        if not isinstance(node, ast.Import | ast.ImportFrom):
            return
        source = getattr(node, "module", None) or ""
        if level := getattr(node, "level", 0):
            parts = [self.package.name, *self.name.split(".")]
            source = ".".join([*parts[: len(parts) - level], *([source] if source else [])])
        for alias in node.names:
            yield (alias.asname or alias.name).partition(".")[0], source, alias.name

    def is_of_package(self, node: ast.AST) -> bool:
        """An import statement of something in the package."""
        whole = (source or name for _, source, name in self.imported(node))
        return any(name.partition(".")[0] == self.package.name for name in whole)


def read(package: Path, name: str) -> Module:
    """The module of that name, or the package's or subpackage's own. ValueError if not there."""
    path = _file(package, name)
    if path is None:
        raise ValueError(f"{package.name}: there is no module {name}")
    source = path.read_bytes()
    module = Module(package, name, source, ast.parse(source))
    for statement in module.tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            _take_import(module, statement)
            continue
        for bound in (names := bound_at_top(statement)):
            module.definitions.setdefault(bound, []).append(statement)
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not names and not is_text:
            module.effects.append(statement)
    return module


def _file(package: Path, name: str) -> Path | None:
    place = package.joinpath(*name.split("."))
    files = (place.with_suffix(".py"), place / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def _take_import(module: Module, statement: ast.Import | ast.ImportFrom) -> None:
    inside = module.is_of_package(statement)
    for local, source, name in module.imported(statement):
        home = source.partition(".")[2]
        below = ".".join(filter(None, [home, name])) if source else name.partition(".")[2]
        if source == "__future__":
            continue
        if not inside:
            module.externals[local] = (source, name)
        elif _file(module.package, below) is not None:
            module.modules[local] = below
        else:
            module.names[local] = (home, name)
