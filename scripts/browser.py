"""Chromium without a window, told what to do through its DevTools protocol: pages are opened, looked at and pictured.

Needs `chromium` (of the distribution's packages) on the path, and tornado, which comes with ipykernel.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from tornado.websocket import WebSocketClientConnection, websocket_connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
_LONGEST = 60.0
"""Seconds that a page, or an answer of the browser's, may take."""
Box = tuple[float, float, float, float]
"""Left, top, width and height in pixels of a page."""


class Page:
    """The one tab of a browser.

    Args:
        connection: To the tab.
    """

    def __init__(self, connection: WebSocketClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self._frames: dict[str, int] = {}
        self.errors: list[str] = []
        """What went wrong in pages since the browser began: of scripts, and of what a page may not load."""

    async def call(self, method: str, **given: Any) -> dict[str, Any]:
        """One command of the protocol, and its answer.

        Raises:
            RuntimeError: the browser refused it, or is gone.
            TimeoutError: it does not answer.
        """
        number = next(self._numbers)
        await self._connection.write_message(json.dumps({"id": number, "method": method, "params": given}))
        while (said := await asyncio.wait_for(self._connection.read_message(), _LONGEST)) is not None:
            message = json.loads(said)
            if message.get("method") == "Runtime.executionContextCreated":
                context = message["params"]["context"]
                self._frames[context["auxData"]["frameId"]] = context["id"]
            self.errors += _errors(message)
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
        raise RuntimeError(f"{method}: the browser is gone")

    async def open(
        self, address: str, *, width: int, height: int = 900, dark: bool = False, settle: float = 1.5
    ) -> None:
        """Show a page of that width, and wait until it is loaded, and `settle` seconds for what scripts draw then, and
        for what moves."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Runtime.enable")
        await self.call("Log.enable")
        await self.call("Page.navigate", url=address)
        async with asyncio.timeout(_LONGEST):
            while (
                await self.run("document.readyState") != "complete" or await self.run("location.href") == "about:blank"
            ):
                await asyncio.sleep(0.1)
        await asyncio.sleep(settle)

    async def run(self, script: str, *, framed: bool = False) -> Any:
        """What a script of the page comes to; in its first frame, where `framed`.

        Raises:
            RuntimeError: it raised.
        """
        where = {}
        if framed:
            tree = await self.call("Page.getFrameTree")
            where = {"contextId": self._frames[tree["frameTree"]["childFrames"][0]["frame"]["id"]]}
        said = await self.call("Runtime.evaluate", expression=script, returnByValue=True, **where)
        if "exceptionDetails" in said:
            raise RuntimeError(f"{script}: {said['exceptionDetails']['exception'].get('description')}")
        return said["result"].get("value")

    async def point(self, selector: str, *, press: bool = False) -> None:
        """Move the pointer to the middle of an element, and press its button there."""
        x, y = await self.run(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)}); node.scrollIntoView({{block: "
            "'center'}); const box = node.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / "
            "2] })()"
        )
        kinds = ("mouseMoved", "mousePressed", "mouseReleased") if press else ("mouseMoved",)
        for kind in kinds:
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    async def press(self, key: str) -> None:
        """A key, by its name, in what has the focus."""
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    async def type(self, text: str) -> None:
        """Into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def box(self, first: str, last: str | None = None, *, until: str | None = None, margin: int = 14) -> Box:
        """What the elements from the first to the last selector take of the page, as wide as the page.

        Args:
            first: Selector of the element at whose top it begins.
            last: Selector of the element at whose foot it ends; the first one, where nothing is said.
            until: Selector of the element before whose top it ends instead.
            margin: Pixels above it and below.
        """
        edge = (
            f"document.querySelector({json.dumps(until)}).getBoundingClientRect().top"
            if until
            else (f"document.querySelector({json.dumps(last or first)}).getBoundingClientRect().bottom")
        )
        top, bottom, width = await self.run(
            f"[document.querySelector({json.dumps(first)}).getBoundingClientRect().top + scrollY, {edge} + scrollY, "
            "document.documentElement.clientWidth]"
        )
        begin = max(0, top - margin)
        return 0, begin, width, bottom - begin + (0 if until else margin)

    async def picture(self, box: Box) -> Image.Image:
        """A part of the page, also where it is not in the window."""
        x, y, width, height = box
        clip = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
        said = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return Image.open(io.BytesIO(base64.b64decode(said["data"]))).convert("RGB")


def _errors(message: dict[str, Any]) -> list[str]:
    """Of an event; none where it tells of anything else."""
    given = message.get("params", {})
    if message.get("method") == "Runtime.exceptionThrown":
        return [given["exceptionDetails"].get("exception", given["exceptionDetails"]).get("description", "?")]
    if message.get("method") == "Log.entryAdded" and given["entry"]["level"] == "error":
        return [given["entry"]["text"]]
    return []


@asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    """A browser that ends with the block.

    Raises:
        RuntimeError: there is none, or it does not start within half a minute.
    """
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise RuntimeError(f"none of {', '.join(NAMES)} is on the path: install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # Frames with a sandbox stay in the page's own process, where the same connection reaches them.
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0")
        apart = "--disable-features=IsolateSandboxedIframes"
        command = [found, *options, apart, f"--user-data-dir={folder}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            connection = await websocket_connect(await _address(Path(folder)), max_message_size=2**28)
            yield Page(connection)
            connection.close()
        finally:
            process.terminate()
            process.wait(30)


async def _address(folder: Path) -> str:
    """Of its tab, as it writes its port into its folder."""
    from urllib.request import urlopen

    port, until = folder / "DevToolsActivePort", time.monotonic() + 30
    while time.monotonic() < until:
        if port.is_file() and (lines := port.read_text().split()):
            with urlopen(f"http://127.0.0.1:{lines[0]}/json/list") as answer:
                tabs = [each for each in json.load(answer) if each["type"] == "page"]
            if tabs:
                return tabs[0]["webSocketDebuggerUrl"]
        await asyncio.sleep(0.1)
    raise RuntimeError("the browser did not start within 30 seconds")
