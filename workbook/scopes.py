"""Which names a statement of a module binds, and which it takes from the module, by `ast`."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["Annotation", "Span", "Use", "bound_at_top", "uses"]

Span = tuple[int, int, int, int]  # first line and column, last line and column: bytes, as in `ast`
_DEFS = ast.FunctionDef | ast.AsyncFunctionDef
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass(frozen=True)
class Use:
    """A name that a statement takes from its module, and the attribute read of it, "" if none.

    whole: where name and attribute are written. hidden: the local names around them.
    """

    name: str
    attribute: str
    span: Span
    whole: Span
    hidden: frozenset[str]


@dataclass(frozen=True)
class Annotation:
    """An annotation as it is written, and what it takes. in_class: of a field of a class."""

    text: str
    span: Span
    uses: tuple[Use, ...]
    in_class: bool


def bound_at_top(statement: ast.stmt) -> dict[str, Span]:
    """The names that a statement of a module binds there, and where each is written."""
    if isinstance(statement, _DEFS | ast.ClassDef):
        words = {ast.FunctionDef: "def ", ast.ClassDef: "class "}
        at = statement.col_offset + len(words.get(type(statement), "async def "))
        line, end = statement.lineno, at + len(statement.name.encode())
        return {statement.name: (line, at, line, end)}
    return dict(_bound([statement]))


def uses(statement: ast.stmt) -> Iterator[Use | Annotation]:
    """What a statement takes from its module."""
    return _of(statement, frozenset())


def _span(node: ast.AST) -> Span:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _bound(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, Span]]:
    """Names bound in one scope: functions, classes and comprehensions in it have their own."""
    for node in nodes:
        if isinstance(node, _DEFS | ast.ClassDef):
            yield node.name, _span(node)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id, _span(node)
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0], _span(node)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name, _span(node)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.rest, _span(node)
        if isinstance(node, _COMPREHENSIONS | ast.Lambda):  # only `:=` reaches out of the first
            inside = () if isinstance(node, ast.Lambda) else ast.walk(node)
            yield from _bound(n.target for n in inside if isinstance(n, ast.NamedExpr))
        elif not isinstance(node, _DEFS | ast.ClassDef):
            yield from _bound(ast.iter_child_nodes(node))


def _names(nodes: Iterable[ast.AST]) -> frozenset[str]:
    return frozenset(name for name, _ in _bound(nodes))


def _of(node: ast.AST | None, hidden: frozenset[str]) -> Iterator[Use | Annotation]:
    """`hidden`: the local names around a node."""
    if isinstance(node, ast.Name):
        yield from _name(node, "", node, hidden)
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        yield from _name(node.value, node.attr, node, hidden)
    elif isinstance(node, ast.Global):
        for name in node.names:
            yield Use(name, "", _span(node), _span(node), hidden)
    elif isinstance(node, _DEFS | ast.Lambda):
        yield from _function(node, hidden, hidden)
    elif isinstance(node, ast.ClassDef):
        yield from _class(node, hidden)
    elif isinstance(node, _COMPREHENSIONS):
        yield from _comprehension(node, hidden)
    elif isinstance(node, ast.AnnAssign):
        yield from _annotated(node, hidden, False)
    elif node is not None:
        yield from _each(ast.iter_child_nodes(node), hidden)


def _each(nodes: Iterable[ast.AST | None], hidden: frozenset[str]) -> Iterator[Use | Annotation]:
    for node in nodes:
        yield from _of(node, hidden)


def _name(node: ast.Name, attribute: str, whole: ast.AST, hidden: frozenset[str]) -> Iterator[Use]:
    if node.id not in hidden:
        yield Use(node.id, attribute, _span(node), _span(whole), hidden)


def _annotation(
    node: ast.expr | None, hidden: frozenset[str], in_class: bool = False
) -> Iterator[Annotation]:
    if node is not None:
        yield Annotation(ast.unparse(node), _span(node), tuple(_of(node, hidden)), in_class)


def _annotated(
    node: ast.AnnAssign, hidden: frozenset[str], in_class: bool
) -> Iterator[Use | Annotation]:
    yield from _annotation(node.annotation, hidden, in_class)
    yield from _each([node.target, node.value], hidden)


def _function(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
    hidden: frozenset[str],
    here: frozenset[str],
) -> Iterator[Use | Annotation]:
    """`here`: the local names around its head, which sees those of a class that it is in."""
    given = node.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    every += [extra for extra in (given.vararg, given.kwarg) if extra is not None]
    yield from _each([*given.defaults, *given.kw_defaults], here)
    for argument in every:
        yield from _annotation(argument.annotation, here)
    body = [node.body] if isinstance(node, ast.Lambda) else node.body
    if not isinstance(node, ast.Lambda):
        yield from _each(node.decorator_list, here)
        yield from _annotation(node.returns, here)
    ours = {*_names(body), *(argument.arg for argument in every)}
    for part in body:
        ours -= {n for g in ast.walk(part) if isinstance(g, ast.Global) for n in g.names}
    yield from _each(body, hidden | ours)


def _class(node: ast.ClassDef, hidden: frozenset[str]) -> Iterator[Use | Annotation]:
    yield from _each([*node.decorator_list, *node.bases, *node.keywords], hidden)
    here = hidden | _names(node.body)
    for part in node.body:
        if isinstance(part, _DEFS):
            yield from _function(part, hidden, here)
        elif isinstance(part, ast.AnnAssign):
            yield from _annotated(part, here, True)
        else:
            yield from _of(part, here)


def _comprehension(node: ast.AST, hidden: frozenset[str]) -> Iterator[Use | Annotation]:
    yield from _of(node.generators[0].iter, hidden)
    inner = hidden | _names(g.target for g in node.generators)
    for i, generator in enumerate(node.generators):
        yield from _each([*generator.ifs, *([generator.iter] if i else [])], inner)
    yield from _each((getattr(node, part, None) for part in ("elt", "key", "value")), inner)
