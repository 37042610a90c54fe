"""What Jupyter gives a cell, without Jupyter: rich output, captured streams, figures, `display`."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import io
import os
import pprint
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

__all__ = ["Outputs", "bundle", "surroundings"]

_MIMES = {
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_svg_": "image/svg+xml",
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
    "_repr_latex_": "text/latex",
}
_CANARY = "_ipython_canary_method_should_not_exist_"  # an object that has it answers to any name


class Outputs:
    """Collects the outputs of one cell after another, in the notebook format (nbformat 4)."""

    def __init__(self) -> None:
        self.items: list[dict] = []

    def write(self, name: str, text: str) -> None:
        """Text on the stream `name`, joined to what was written there just before."""
        last = self.items[-1] if self.items else {}
        if last.get("output_type") == "stream" and last["name"] == name:
            last["text"] += text
        else:
            self.items.append({"output_type": "stream", "name": name, "text": text})

    def display(
        self, *objects: object, metadata: Mapping | None = None, raw: bool = False, **_: object
    ) -> None:
        """Stand-in for IPython's display: one output for each object."""
        for item in objects:
            data, found = (dict(item), {}) if raw else bundle(item)
            self._add("display_data", data, {**found, **(metadata or {})})

    def result(self, value: object, count: int) -> None:
        """The value of a cell's last expression."""
        self._add("execute_result", *bundle(value), execution_count=count)

    def figures(self) -> None:
        """Figures that are still open are shown and closed at a cell's end, as Jupyter does."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return
        shown = {output["data"].get("image/png") for output in self.items if "data" in output}
        for number in pyplot.get_fignums():
            data, metadata = bundle(pyplot.figure(number))
            if data["image/png"] not in shown:
                self._add("display_data", data, metadata)
        pyplot.close("all")

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """What is printed inside becomes stream outputs."""
        streams = _Stream(self, "stdout"), _Stream(self, "stderr")
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            yield

    def _add(self, kind: str, data: dict, metadata: dict, **more: object) -> None:
        self.items.append(dict(output_type=kind, data=data, metadata=metadata, **more))


class _Stream(io.TextIOBase):
    encoding = "utf-8"

    def __init__(self, outputs: Outputs, name: str) -> None:
        self._outputs, self._name = outputs, name

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if text:
            self._outputs.write(self._name, text)
        return len(text)


def bundle(value: object) -> tuple[dict, dict]:
    """The representations of `value` by MIME type, and their metadata, as IPython finds them."""
    plain = isinstance(value, dict | list | tuple | set)
    data: dict = {"text/plain": pprint.pformat(value, sort_dicts=False) if plain else repr(value)}
    metadata: dict = {}
    whole = _call(value, "_repr_mimebundle_", include=None, exclude=None)
    if whole is not None:
        found, more = whole if isinstance(whole, tuple) else (whole, {})
        data.update(found)
        metadata.update(more)
    for method, mime in _MIMES.items():
        found = _call(value, method) if mime not in data else None
        if found is not None:
            data[mime], more = found if isinstance(found, tuple) else (found, None)
            metadata.update({mime: more} if more else {})
    if type(value).__module__ == "matplotlib.figure" and "image/png" not in data:
        buffer = io.BytesIO()
        value.savefig(buffer, format="png", bbox_inches="tight")
        data["image/png"] = buffer.getvalue()
    for mime, content in data.items():
        if isinstance(content, bytes):
            data[mime] = base64.b64encode(content).decode("ascii")
    return data, metadata


def _call(value: object, method: str, **arguments: object) -> object:
    found = getattr(value, method, None)
    if isinstance(value, type) or hasattr(value, _CANARY) or not callable(found):
        return None
    return found(**arguments)


@contextlib.contextmanager
def surroundings(main: types.ModuleType, folder: Path, display: Callable) -> Iterator[None]:
    """The process as a cell expects it: `main` is __main__, `folder` is where it runs."""
    search, variables = list(sys.path), dict(os.environ)
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*non-interactive.*cannot be shown")
        stack.callback(sys.modules.__setitem__, "__main__", sys.modules["__main__"])
        stack.callback(sys.path.__setitem__, slice(None), search)
        stack.callback(_restore, variables)
        stack.enter_context(contextlib.chdir(folder))
        stack.enter_context(_ipython(display))
        os.environ["MPLBACKEND"] = "agg"
        if "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].switch_backend("agg")
        sys.modules["__main__"] = main
        sys.path.insert(0, str(folder))
        yield


def _restore(variables: Mapping[str, str]) -> None:
    """os.environ as it was: what a cell sets must not reach the next notebook."""
    for name in set(os.environ) - set(variables):
        del os.environ[name]
    os.environ.update(variables)


@contextlib.contextmanager
def _ipython(display: Callable) -> Iterator[None]:
    """`from IPython.display import display, HTML` works, with IPython installed or not."""
    if importlib.util.find_spec("IPython") is not None:
        import IPython.display as module

        original, module.display = module.display, display
        try:
            yield
        finally:
            module.display = original
        return
    package, module = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    package.display, module.display = module, display
    package.get_ipython, package.version_info = lambda: None, (9, 0)  # matplotlib asks
    for kind in ("HTML", "Markdown", "Latex", "SVG"):
        methods = {
            "__init__": lambda self, data: setattr(self, "data", data),
            f"_repr_{kind.lower()}_": lambda self: self.data,
        }
        setattr(module, kind, type(kind, (), methods))
    names = {"IPython": package, "IPython.display": module}
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(names)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)
