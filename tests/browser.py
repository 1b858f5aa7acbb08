"""Debian's Chromium without a window, driven by its DevTools protocol.

    with browser() as page:
        page.open("http://127.0.0.1:8000/")
        page.until("document.querySelectorAll('tr').length > 3")
        page.press("Tab")

`python -m tests.browser --pictures` makes the pictures of docs/watching.md, from made snapshots.
"""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from tests.deadline import DEADLINE_S, until

# Nothing is asked of anybody else, and nothing outlives it: no crash handler, no zygote.
FLAGS = """
--headless=new --remote-debugging-port=0 --no-first-run --no-default-browser-check --disable-gpu
--disable-dev-shm-usage --disable-extensions --disable-sync --disable-background-networking
--disable-component-update --disable-breakpad --disable-crash-reporter --no-zygote --no-sandbox
--mute-audio --no-proxy-server --disable-features=MediaRouter,OptimizationHints,Translate
--password-store=basic
"""
KEYS = {"Tab": 9, "Enter": 13, " ": 32, "Home": 36, "ArrowRight": 39, "Backspace": 8}


class Browser:
    """A page of a running Chromium. What it says and asks for is kept, as it comes in."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        session: aiohttp.ClientSession,
        ws: aiohttp.ClientWebSocketResponse,
    ) -> None:
        self._loop, self.session, self._ws = loop, session, ws
        self._number = 0
        self.requests: list[str] = []
        """Addresses it has asked for, since `open`."""
        self.errors: list[str] = []
        """Errors on its console, since `open`."""

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the DevTools protocol; its result."""
        work = asyncio.wait_for(self._call(method, parameters), DEADLINE_S)
        return self._loop.run_until_complete(work)

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        await self._ws.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            message = await self._ws.receive_json()
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                return dict(message["result"])
            self._take(message.get("method", ""), message.get("params", {}))

    def _take(self, event: str, about: dict[str, Any]) -> None:
        match event:
            case "Network.requestWillBeSent":
                self.requests.append(about["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(str(about["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if about["type"] in ("error", "assert", "warning"):
                self.errors.append(str(about["args"]))
            case "Log.entryAdded" if about["entry"]["level"] in ("error", "warning"):
                self.errors.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")

    def open(self, url: str) -> None:
        """Go to an address, and wait until it is there."""
        self.call("Page.navigate", url="about:blank")
        self.until("location.href === 'about:blank'")
        self.requests.clear()
        self.errors.clear()
        self.call("Page.navigate", url=url)
        self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        how = {"returnByValue": True, "awaitPromise": True}
        result = self.call("Runtime.evaluate", expression=script, **how)
        assert "exceptionDetails" not in result, f"{script}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def until(self, script: str, what: str = "") -> Any:
        """Wait until an expression holds; its value."""
        return until(lambda: self.evaluate(script), what or script)

    def text(self, selector: str) -> str:
        """What people read in an element."""
        return str(self.evaluate(f"document.querySelector({selector!r}).innerText"))

    def press(self, *keys: str) -> None:
        """Press keys one after the other: a name such as Tab, or text, which is typed."""
        for key in keys:
            if key not in KEYS:
                self.call("Input.insertText", text=key)
                continue
            text = {"Enter": "\r", " ": " "}.get(key, "")
            about = {"key": key, "code": "Space" if key == " " else key, "text": text}
            about["windowsVirtualKeyCode"] = KEYS[key]
            for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
                self.call("Input.dispatchKeyEvent", type=kind, **about)

    def size(self, width: int, height: int, *, is_phone: bool = False) -> None:
        screen = {"deviceScaleFactor": 2 if is_phone else 1, "mobile": is_phone}
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, **screen)

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def offline(self, is_offline: bool) -> None:
        rates = {"downloadThroughput": -1, "uploadThroughput": -1}
        self.call("Network.emulateNetworkConditions", offline=is_offline, latency=0, **rates)

    def screenshot(self, path: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def metrics(self) -> dict[str, float]:
        """Chromium's own sums, such as TaskDuration, the seconds of its main thread."""
        found = self.call("Performance.getMetrics")["metrics"]
        return {metric["name"]: metric["value"] for metric in found}


@contextmanager
def browser() -> Iterator[Browser]:
    """A Chromium with an empty page and a folder of its own; nothing of it is left."""
    program = shutil.which("chromium")
    assert program, "there is no chromium: tests/lab/install.sh"
    folder = Path(tempfile.mkdtemp(prefix="isles-browser-"))
    environment = {**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    environment.pop("XDG_CACHE_HOME", None)
    with (folder / "log").open("wb") as output:
        process = subprocess.Popen(
            [program, *FLAGS.split(), f"--user-data-dir={folder / 'data'}", "about:blank"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    loop, page = asyncio.new_event_loop(), None
    try:
        where = folder / "data" / "DevToolsActivePort"

        def port() -> str:
            assert process.poll() is None, (folder / "log").read_text(errors="replace")[-3000:]
            return where.read_text().partition("\n")[0] if where.is_file() else ""

        found = until(port, "chromium has not opened its port")
        page = loop.run_until_complete(_connect(loop, f"http://127.0.0.1:{found}"))
        for domain in ("Page", "Runtime", "Network", "Log", "Performance"):
            page.call(f"{domain}.enable")
        page.size(1440, 900)
        yield page
    finally:
        if page is not None:
            loop.run_until_complete(page.session.close())
        loop.close()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


async def _connect(loop: asyncio.AbstractEventLoop, address: str) -> Browser:
    session = aiohttp.ClientSession()
    async with session.get(f"{address}/json/list") as answer:
        targets = await answer.json()
    page = next(target for target in targets if target["type"] == "page")
    ws = await session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)
    return Browser(loop, session, ws)


def pictures(folder: Path) -> None:
    """Make the pictures of docs/watching.md and README.md from made snapshots."""
    from PIL import Image

    from tests.made_watch import MadeWatch, made, other, served

    runs = [MadeWatch(made()), MadeWatch(other(1100, 1, "wide-2"))]
    for name, scheme, width, watches in (
        ("dashboard", "light", 1440, runs[:1]),
        ("dashboard-compared", "dark", 1440, runs),
        ("dashboard-phone", "light", 390, runs[:1]),
    ):
        with browser() as page, served(*watches) as server:
            page.prefer(scheme)
            page.call("Emulation.setScrollbarsHidden", hidden=True)
            page.size(width, 900, is_phone=width < 500)
            page.open(server.link)
            page.until("document.querySelectorAll('#ranks tbody tr').length === 6")
            page.until("document.querySelectorAll('#chart .line').length > 0")
            if width > 500:
                page.size(width, page.evaluate("document.documentElement.scrollHeight"))
            path = folder / f"{name}.png"
            page.screenshot(path)
            with Image.open(path) as image:  # a palette that keeps rare colors: half the size
                small = image.convert("RGB").quantize(
                    256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
                )
            small.save(path, optimize=True)
            print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__" and sys.argv[1:] == ["--pictures"]:
    pictures(Path(__file__).parents[1] / "docs" / "pictures")
