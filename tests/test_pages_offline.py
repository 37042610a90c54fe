"""Every exported page in a real browser without a network: nothing is asked for, nothing is broken.

The pages under $WORKBOOK_TEST_REPORTS, or of a sample notebook exported here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

websocket = pytest.importorskip("websocket", reason="needs websocket-client: pip install '.[test]'")

CLOSED_PORT = "127.0.0.1:9"  # "discard": nothing listens there, so every request fails
NARROW = 420  # CSS pixels: a phone
SETTLE = 0.3  # seconds for what a page does after it has loaded
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
    f"--proxy-server={CLOSED_PORT}",
    "--proxy-bypass-list=<-loopback>",
]
LOOK = r"""
(() => {
  const found = [];
  for (const image of document.images) {
    const name = image.outerHTML.slice(0, 60);
    if (!image.complete || image.naturalWidth === 0) found.push("broken image: " + name);
    if (!(image.alt || "").trim()) found.push("image without alternative text: " + name);
  }
  for (const details of document.querySelectorAll("details")) details.open = true;
  for (const code of document.querySelectorAll("pre, code")) code.remove();
  const text = document.body.innerText;
  const tex = /\$[^$\n]+\$|\$\$|\\[a-zA-Z]{2,}|\\[()[\]]/.exec(text);
  if (tex) found.push("raw TeX: " + text.slice(Math.max(0, tex.index - 20), tex.index + 40));
  if (!document.title) found.push("no title");
  return found;
})()
"""
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


class Browser:
    """A headless Chromium with an empty profile, driven over its DevTools socket."""

    def __init__(self, profile: Path) -> None:
        command = [chromium(), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        log = (profile.parent / "chromium.log").open("wb")
        with log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        endpoint = profile / "DevToolsActivePort"
        deadline = time.monotonic() + 60
        while not (endpoint.exists() and endpoint.read_text().count("\n")):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Chromium did not start: {Path(log.name).read_text()[-2000:]}")
            time.sleep(0.05)
        port, path = endpoint.read_text().split()
        self.socket = websocket.create_connection(
            f"ws://127.0.0.1:{port}{path}", timeout=60, suppress_origin=True
        )
        self.numbers = itertools.count(1)
        self.events: list[dict] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    session: str | None = None

    def call(self, method: str, **params: object) -> dict:
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.socket.send(json.dumps(message))
        while True:
            answer = json.loads(self.socket.recv())
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def evaluate(self, script: str) -> object:
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"]["value"]

    def visit(self, url: str) -> None:
        self.call("Page.navigate", url="about:blank")
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(json.loads(self.socket.recv()))
        time.sleep(SETTLE)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.session = None
            self.call("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self.process.wait()


def faults(browser: Browser, page: Path) -> list[str]:
    """What is wrong with a page: requests, console messages, exceptions, images, TeX, overflow."""
    url = page.resolve().as_uri()
    browser.call("Emulation.clearDeviceMetricsOverride")
    browser.visit(url)
    found = list(browser.evaluate(LOOK))
    size = {"width": NARROW, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    if browser.evaluate(OVERFLOW) > 0:
        found.append(f"wider than a screen of {NARROW} pixels")
    for event in browser.events:
        found += _fault_of(event.get("method"), event.get("params", {}), url)
    return found


def _fault_of(method: str | None, params: dict, url: str) -> list[str]:
    if method == "Network.requestWillBeSent":
        asked = params["request"]["url"]
        return [] if asked == url or asked.startswith("data:") else [f"request: {asked}"]
    if method == "Runtime.consoleAPICalled":
        return [f"console: {params['args']}"]
    if method == "Runtime.exceptionThrown":
        return [f"exception: {params['exceptionDetails']['text']}"]
    if method == "Log.entryAdded":
        return [f"log: {params['entry']['text']}"]
    return []


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if chromium() is None:
        pytest.skip("no Chromium here: install it, or name it in $CHROMIUM")
    browser = Browser(tmp_path_factory.mktemp("browser") / "profile")
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    chosen = os.environ.get("WORKBOOK_TEST_REPORTS")
    if chosen:
        return Path(chosen)
    for name in ("nbconvert", "nbclient", "ipykernel", "math_core"):
        pytest.importorskip(name, reason="the export needs Jupyter: pip install -e .")
    from workbook import report

    out = tmp_path_factory.mktemp("reports")
    report.export([Path(__file__).parent / "data" / "sample.ipynb"], out, progress=False)
    return out


def test_exported_pages_need_nothing_and_show_no_fault(browser, folder):
    pages = sorted(folder.glob("*.html"))
    assert len(pages) >= 2, f"a page and index.html are not in {folder}"
    found = {page.name: faults(browser, page) for page in pages}
    assert not any(found.values()), json.dumps(found, indent=1)


PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYGBgAAAABQABXvMqOgAA"
    "AABJRU5ErkJggg=="
)
PLANTED = {
    "image": ('<img alt="x" src="https://example.org/x.png">', "request: https://example.org"),
    "loopback": ('<img alt="x" src="http://127.0.0.1:8/x.png">', "request: http://127.0.0.1:8"),
    "file": ('<link rel="stylesheet" href="beside.css">', "request: file:"),
    "script": ('<script src="https://example.org/m.js"></script>', "request: https://example.org"),
    "fetch": ("<script>fetch('https://example.org/d')</script>", "request: https://example.org"),
    "console": ("<script>console.warn('x')</script>", "console: "),
    "exception": ("<script>throw new Error('x')</script>", "exception: "),
    "policy": (
        "<meta http-equiv='Content-Security-Policy' content=\"img-src 'none'\">"
        f'<img alt="x" src="{PIXEL}">',
        "log: ",
    ),
    "broken": ('<img alt="x" src="data:image/png;base64,AAAA">', "broken image"),
    "alt": (f'<img src="{PIXEL}">', "without alternative text"),
    "dollars": ("<p>so $x = 1$ here</p>", "raw TeX"),
    "command": ("<p>so \\frac{1}{2}</p>", "raw TeX"),
    "parentheses": ("<p>so \\(x\\)</p>", "raw TeX"),
    "folded": ("<details><summary>s</summary><p>\\sum</p></details>", "raw TeX"),
    "wide": ("<div style='width: 900px'>x</div>", "wider than"),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_fault_is_found(browser, tmp_path, kind):
    body, message = PLANTED[kind]
    page = tmp_path / "planted.html"
    text = f"<!DOCTYPE html><html><head><title>planted</title></head><body>{body}</body></html>"
    page.write_text(text, encoding="utf-8")
    found = faults(browser, page)
    assert any(fault.startswith(message) or message in fault for fault in found), found


def test_a_good_page_has_no_fault(browser, tmp_path):
    page = tmp_path / "good.html"
    code, math = "<pre>$CXX $LD \\frac</pre>", "<math><mi>x</mi></math>"
    body = f'<title>good</title><img alt="a dot" src="{PIXEL}">{code}<p>5 $ and {math}</p>'
    page.write_text(f"<!DOCTYPE html>{body}", encoding="utf-8")
    assert faults(browser, page) == []
