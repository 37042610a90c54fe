"""Modules merged into one text do what they did apart, and what can't be merged is said."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from pathlib import Path

import pytest

from workbook import amalgam

PACKAGE = "planted"


@pytest.fixture
def plant(tmp_path, monkeypatch):
    """A function that writes modules of a package, given as texts."""

    def write(**texts: str) -> Path:
        folder = tmp_path / PACKAGE
        folder.mkdir()
        (folder / "__init__.py").touch()
        for name, text in texts.items():
            (folder / f"{name}.py").write_text(textwrap.dedent(text))
        monkeypatch.syspath_prepend(str(tmp_path))
        for name in [n for n in sys.modules if n.partition(".")[0] == PACKAGE]:
            monkeypatch.delitem(sys.modules, name)
        return folder

    return write


def merged(folder: Path, *roots: tuple[str, str], **options: object) -> str:
    made = amalgam.amalgamate(folder, roots, **options)
    return f"{made.imports}\n\n{made.text}\n"


def run(text: str, tmp_path: Path) -> dict:
    """Its names, executed as a module that is in no table of modules."""
    file = tmp_path / "merged.py"
    file.write_text("import os\n" + text)
    found = importlib.util.spec_from_file_location("merged", file)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    assert PACKAGE not in text.partition("# ---")[0]
    return vars(module)


def test_only_what_is_reached_comes_along(plant, tmp_path):
    folder = plant(
        low='''
            """Low things.

            Told here."""
            from __future__ import annotations
            import math, json
            from collections import OrderedDict as Ordered, deque

            # why two
            TWO = 2  # not three
            UNUSED = json.dumps(deque())

            def root(x: float) -> float:
                """Of x."""
                return math.sqrt(x) + len(Ordered())

            def unused(): return json
        ''',
        high="""
            from planted import low
            from planted.low import TWO as two

            def f(x):
                return low.root(x) * two
        """,
    )
    text = merged(folder, ("high", "f"))
    assert run(text, tmp_path)["f"](9) == 6
    assert "# why two\nTWO = 2  # not three\n" in text and '"""Of x."""' in text
    assert (
        "# Low things.\n#\n# Told here.\n" in text
        and "from collections import OrderedDict as" in text
    )
    for gone in ("unused", "UNUSED", "json", "deque", "__future__"):
        assert gone not in text


def test_names_that_meet(plant, tmp_path):
    """Of two modules, of a builtin, of an import, of a local variable, one that must stay free."""
    folder = plant(
        low="""
            import math
            VALUE, taken = 1, 10
            def value(): return VALUE
            def print(): return 100
            def batch(): return taken
        """,
        other="""
            VALUE = 2
            def value(): return VALUE
            def math(): return 1000
        """,
        high="""
            import math
            from planted import low, other
            from planted.other import math as other_math

            def f(value=5):
                batch = low.batch()
                values = [value for value in (low.value(), other.value())]
                def g(low=low.value()):
                    return low
                return math.floor(value), values, g(), batch, low.print(), other_math()
        """,
    )
    text = merged(folder, ("high", "f"), reserved={"taken"})
    assert run(text, tmp_path)["f"]() == (5, [1, 2], 1, 10, 100, 1000)
    for name in ("low_value", "other_VALUE", "low_print", "other_math", "low_batch", "low_taken"):
        assert name in text


def test_local_names_are_left_alone(plant, tmp_path):
    """Parameters, loops, handlers, comprehensions, class bodies, walrus, global, nested scopes."""
    folder = plant(
        low="def a(): return 'low'\nb = c = d = e = 'low'\n",
        high="""
            from planted import low
            a = b = c = d = e = counted = 0

            def f(a, *b, c=1, **d):
                for e in range(3): ...
                with open(__import__("os").devnull) as g: ...
                try:
                    raise ValueError
                except ValueError as h:
                    i = str(h)
                pairs = {c: d for c, d in [(1, 2)]}
                return a, b, c, d, e, (lambda a: a)(7), [b for b in (c,)], pairs

            class A:
                a = 5
                c = a
                def g(self): return a, low.a()

            def count():
                global counted
                counted += 1
                if (b := 3): return counted, b
        """,
    )
    text = merged(folder, ("high", "f"), ("high", "A"), ("high", "count"))
    space = run(text, tmp_path)
    assert space["f"](1, 2, x=3) == (1, (2,), 1, {"x": 3}, 2, 7, [1], {1: 2})
    assert space["A"].c == 5 and space["A"]().g() == (0, "low")
    assert space["count"]() == (1, 3) and space["count"]() == (2, 3)


def test_annotations_and_dataclasses(plant, tmp_path):
    """None is evaluated too early, none of a field is a string: that needs a table of modules."""
    folder = plant(
        low="""
            from __future__ import annotations
            from dataclasses import dataclass
            Names = tuple[str, ...]
            @dataclass(frozen=True)
            class One:
                names: Names
                def with_name(self, name: str) -> One: return One((*self.names, name))
            def made(later: Later, unknown: Unused[
                    One]) -> Later | None: return later
            class Later:
                every: set[One] = set()
            class Unused: ...
        """
    )
    text = merged(folder, ("low", "made"), ("low", "Later"), ("low", "One"))
    space = run(text, tmp_path)
    assert space["One"](()).with_name("a").names == ("a",)
    assert 'def made(later: "Later", unknown: "Unused[One]") -> "Later | None"' in text
    assert "class Unused" not in text and "    names: Names" in text


def test_statements_without_a_name_come_with_their_module(plant, tmp_path):
    folder = plant(
        low="seen = []\nhooks = []\n",
        hook='''
            """About."""
            from planted import low
            def noted(): low.seen.append(1)
            low.hooks.append(noted)
            def used(): return low.hooks
        ''',
        idle="from planted import low\nlow.hooks.append(None)\nX = 1\n",
        high="from planted import hook, idle\ndef f():\n    return hook.used()\n",
    )
    space = run(merged(folder, ("high", "f")), tmp_path)
    (hook,) = space["f"]()
    hook()
    assert space["seen"] == [1]


def test_stand_ins_texts_and_names_to_give(plant, tmp_path):
    folder = plant(
        real="import os\nTABLE = {}\ndef built(): return os\n",
        fake="TABLE: dict = {}\ndef built(): return TABLE\n",
        high="from planted import real\nclass Model: ...\nclass New(Model): x = real.built()\n",
    )
    text = merged(
        folder,
        ("high", "New"),
        stand_ins={("real", "built"): ("fake", "built")},
        texts={("fake", "TABLE"): "{'a': 1}"},
        called={("high", "Model"): "_Model"},
    )
    space = run(text, tmp_path)
    assert space["New"].x == {"a": 1} and space["New"].__mro__[1].__name__ == "_Model"
    assert "import os" not in text


def test_relative_imports_and_subpackages(plant, tmp_path):
    folder = plant(
        low="A = 1\n", high="from . import low\nfrom .sub import deep\nB = low.A + deep.C\n"
    )
    (folder / "sub").mkdir()
    (folder / "sub" / "__init__.py").write_text("D = 5\n")
    (folder / "sub" / "deep.py").write_text(
        "from ..low import A\nfrom planted.sub import D\nC = A + D\n"
    )
    assert run(merged(folder, ("high", "B")), tmp_path)["B"] == 7


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def f():\n    from planted import low\n", "line 1: imports the package inside"),
        ("def f():\n    import planted.low\n", "line 1: imports the package inside"),
        ("from planted import low\ndef f(): return low\n", "line 2: low is a module"),
        ("from planted import low\ndef f(): return low.b\n", "line 2: low defines no b"),
        ("def f():\n    return nothing\n", "line 2: nothing is defined nowhere"),
        ("def f():\n    return __file__\n", "line 2: __file__ is defined nowhere"),
        ("from planted.none import x\ndef f(): return x\n", "there is no module none"),
        ("import json as math\nfrom planted import low\ndef f(): return low.a(math)\n",
         "math means two things"),
    ],
)  # fmt: skip
def test_what_can_not_be_merged(text, says, plant):
    folder = plant(low="import math\ndef a(x): return math.pi\n", high=text)
    with pytest.raises(ValueError, match=says):
        amalgam.amalgamate(folder, [("high", "f")])


def test_a_name_that_can_not_be_given(plant):
    folder = plant(low="def a(): ...\n", high="from planted import low\ndef f(a): return low.a()\n")
    with pytest.raises(ValueError, match="a is also a local name"):
        amalgam.amalgamate(folder, [("high", "f")], called={("low", "a"): "a"})
    with pytest.raises(ValueError, match="high defines no g"):
        amalgam.amalgamate(folder, [("high", "g")])
