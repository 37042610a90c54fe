"""Several modules of a package in one text: the definitions that some names reach, by `ast`.

A definition stands as it does in its file, comments included. What changes in it:

- a reference to another module (`ops.operands`) becomes a plain name. Where that name is taken, by
  another definition, an import or a local variable, the module's name goes before it;
- an annotation that names what comes later, or not at all, becomes a string. `from __future__
  import annotations` is left out: it has to be the first statement, and a harness may put its own
  lines before the file.

Statements without a name, such as a registration, belong to their module: they come along when
anything of it does. Modules follow one another as Python would have run them.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbook.modules import Module, Name, read
from workbook.scopes import Annotation, Use, bound_at_top, uses

__all__ = ["Amalgam", "Name", "amalgamate"]


@dataclass(frozen=True)
class Amalgam:
    """The text, its import statements apart, and what every definition is called in it."""

    imports: str
    text: str
    called: Mapping[Name, str]


def amalgamate(
    package: Path,
    roots: Sequence[Name],
    *,
    stand_ins: Mapping[Name, Name] | None = None,
    texts: Mapping[Name, str] | None = None,
    called: Mapping[Name, str] | None = None,
    reserved: Collection[str] = (),
) -> Amalgam:
    """The definitions of a package that `roots` reach.

    stand_ins: definitions taken instead of others. texts: assignments whose value is replaced, by
    Python text. called: names to give; reserved: names that must stay free.

    Raises ValueError, with file and line, for what can not be taken over.
    """
    return _Amalgamation(package, stand_ins or {}, texts or {}).made(
        roots, called or {}, frozenset(reserved)
    )


class _Amalgamation:
    def __init__(
        self, package: Path, stand_ins: Mapping[Name, Name], texts: Mapping[Name, str]
    ) -> None:
        self.package, self.stand_ins, self.texts = package, stand_ins, texts
        self.modules: dict[str, Module] = {}
        self.reached: dict[Name, int] = {}  # the line of the last statement that binds it
        self.kept: dict[str, dict[int, ast.stmt]] = {}  # by module, by first line
        self.order: list[str] = []

    def made(
        self, roots: Sequence[Name], called: Mapping[Name, str], reserved: frozenset[str]
    ) -> Amalgam:
        self._reach(roots)
        used = [
            (module, use)
            for module in map(self._module, self.order)
            for statement in self.kept[module.name].values()
            for use in self._uses(module, statement)
            if isinstance(use, Use)
        ]
        externals = self._externals(used)
        flat = self._flat(used, called, reserved | externals.keys())
        sections = [self._section(module, flat) for module in self.order if self.kept[module]]
        return Amalgam(_imports(externals.values()), "\n\n\n".join(sections), flat)

    # --- what is reached ---------------------------------------------------------------------

    def _reach(self, roots: Sequence[Name]) -> None:
        waiting = [self._home(*root, "the roots") for root in roots]
        while waiting:
            name = waiting.pop()
            if name in self.reached:
                continue
            module = self._module(name[0])
            statements = module.definitions[name[1]]
            self.reached[name] = max(statement.lineno for statement in statements)
            for statement in statements + ([] if self.kept[module.name] else module.effects):
                self.kept[module.name][statement.lineno] = statement
                waiting += self._targets(module, statement)

    def _targets(self, module: Module, statement: ast.stmt) -> Iterator[Name]:
        """What comes along with a statement; the annotations of functions ask for nothing."""
        yield from ((module.name, bound) for bound in bound_at_top(statement))
        if any(module.is_of_package(node) for node in ast.walk(statement)):
            raise ValueError(
                f"{module.name} line {statement.lineno}: imports the package inside of a function"
            )
        for use in () if self._replaced(module, statement) else uses(statement):
            if isinstance(use, Annotation):
                parts = use.uses if use.in_class else ()
            else:
                parts = (use,)
            yield from filter(None, (self._target(module, part) for part in parts))

    def _replaced(self, module: Module, statement: ast.stmt) -> str | None:
        bound = (self.texts.get((module.name, name)) for name in bound_at_top(statement))
        return next(filter(None, bound), None)

    def _uses(self, module: Module, statement: ast.stmt) -> Iterator[Use | Annotation]:
        """What is taken, once all is known: an annotation that can stay counts as its names."""
        for use in () if self._replaced(module, statement) else uses(statement):
            if isinstance(use, Use) or self._is_late(module, statement, use):
                yield use
            else:
                yield from use.uses

    def _is_late(self, module: Module, statement: ast.stmt, annotation: Annotation) -> bool:
        here = self.order.index(module.name), statement.lineno
        for use in annotation.uses:
            target = self._target(module, use)
            if target is not None:
                line = self.reached.get(target)
                if line is None or (self.order.index(target[0]), line) >= here:
                    return True
        return False

    def _target(self, module: Module, use: Use) -> Name | None:
        """The definition that a name, or an attribute of a module, stands for."""
        where = _where(module, use)
        if use.name in module.modules:
            if not use.attribute:
                raise ValueError(f"{where}: {use.name} is a module; only its names can be used")
            return self._home(module.modules[use.name], use.attribute, where)
        if use.name in module.definitions or use.name in module.names:
            return self._home(module.name, use.name, where)
        return None

    def _home(self, name: str, attribute: str, where: str) -> Name:
        """Where a name is defined, through stand-ins and imports from elsewhere."""
        if (name, attribute) in self.stand_ins:
            name, attribute = self.stand_ins[name, attribute]
        module = self._module(name)
        if attribute in module.definitions:
            return name, attribute
        if attribute in module.names:
            return self._home(*module.names[attribute], where)
        raise ValueError(f"{where}: {name} defines no {attribute}")

    def _module(self, name: str) -> Module:
        if name not in self.modules:
            module = self.modules[name] = read(self.package, name)
            self.kept[name] = {}
            for needed in sorted(
                {*module.modules.values(), *(n for n, _ in module.names.values())}
            ):
                self._module(needed)
            for (home, _), (other, _) in self.stand_ins.items():
                if home == name:
                    self._module(other)
            self.order.append(name)
        return self.modules[name]

    # --- names -------------------------------------------------------------------------------

    def _externals(self, used: Sequence[tuple[Module, Use]]) -> dict[str, tuple[str, str, str]]:
        found: dict[str, tuple[str, str, str]] = {}
        for module, use in used:
            if self._target(module, use) is not None or hasattr(builtins, use.name):
                continue
            if use.name not in module.externals:
                raise ValueError(f"{_where(module, use)}: {use.name} is defined nowhere")
            else:
                taken = (*module.externals[use.name], use.name)
                if found.setdefault(use.name, taken) != taken:
                    raise ValueError(f"{_where(module, use)}: {use.name} means two things")
        return found

    def _flat(
        self,
        used: Sequence[tuple[Module, Use]],
        called: Mapping[Name, str],
        reserved: Collection[str],
    ) -> dict[Name, str]:
        """A name each; the module's before it where it would meet another or hide behind one."""
        hidden: dict[Name, set[str]] = {}
        for module, use in used:
            if (target := self._target(module, use)) is not None:
                hidden.setdefault(target, set()).update(use.hidden)
        flat: dict[Name, str] = {}
        taken = {*reserved, *dir(builtins), *called.values()}
        for target in sorted(self.reached, key=lambda t: (self.order.index(t[0]), t[1])):
            home, name = target
            if target in called:
                name = called[target]
                if name in hidden.get(target, ()):
                    raise ValueError(f"{home}: {name} is also a local name where it is used")
            else:
                while name in taken or name in hidden.get(target, ()):
                    name = f"{home.rpartition('.')[2]}_{name}"
            flat[target] = name
            taken.add(flat[target])
        return flat

    # --- the text ----------------------------------------------------------------------------

    def _section(self, name: str, flat: Mapping[Name, str]) -> str:
        module = self.modules[name]
        title = f"# --- {name.replace('.', '/')}.py "
        about = (ast.get_docstring(module.tree) or "").splitlines()
        pieces = [title.ljust(100, "-"), *(f"# {line}".rstrip() for line in about)]
        before: ast.stmt | None = None
        for _, statement in sorted(self.kept[name].items()):
            pieces += _blank(before, statement)
            pieces.append(self._written(module, statement, flat))
            before = statement
        return "\n".join(pieces)

    def _written(self, module: Module, statement: ast.stmt, flat: Mapping[Name, str]) -> str:
        bound = bound_at_top(statement)
        if replaced := self._replaced(module, statement):
            return f"{flat[module.name, next(iter(bound))]} = {replaced}"
        edits = {span: (name, flat[module.name, name]) for name, span in bound.items()}
        for use in self._uses(module, statement):
            if isinstance(use, Annotation):
                edits[use.span] = ("", json.dumps(use.text))
            elif (target := self._target(module, use)) is not None:
                if use.name in module.modules:
                    edits[use.whole] = (f"{use.name}.{use.attribute}", flat[target])
                else:
                    edits[use.span] = (use.name, flat[target])
        first, last = module.lines_of(statement)
        begin = module.offset(first, 0)
        text = module.source[begin : module.offset(last + 1, 0)]
        for (line, column, end_line, end), (old, new) in sorted(edits.items(), reverse=True):
            at, to = module.offset(line, column) - begin, module.offset(end_line, end) - begin
            if old and old != new and text[at:to].decode() != old:
                raise ValueError(f"{module.name} line {line}: {old} can't be called {new} there")
            if old != new:
                text = text[:at] + new.encode() + text[to:]
        return text.decode().rstrip("\n")


def _where(module: Module, use: Use) -> str:
    return f"{module.name.replace('.', '/')}.py line {use.span[0]}"


def _blank(before: ast.stmt | None, statement: ast.stmt) -> list[str]:
    """Two empty lines around definitions of functions and classes, one or none else."""
    blocks = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    if isinstance(before, blocks) or isinstance(statement, blocks):
        return ["", ""]
    gap = before is None or statement.lineno - (before.end_lineno or 0) > 1
    return [""] if gap else []


def _imports(externals: Collection[tuple[str, str, str]]) -> str:
    plain, grouped = set(), {}
    for source, name, local in externals:
        if not source:
            plain.add(f"import {name}" + (f" as {local}" if local != name.split(".")[0] else ""))
        else:
            grouped.setdefault(source, set()).add(name if name == local else f"{name} as {local}")
    froms = {f"from {s} import {', '.join(sorted(names))}" for s, names in grouped.items()}
    lines = [*sorted(plain), *sorted(froms)]
    torch = [line for line in lines if re.match(r"(import|from) torch\b", line)]
    return "\n".join([*(line for line in lines if line not in torch), "", *torch]).strip()
