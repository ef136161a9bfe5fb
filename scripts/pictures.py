"""Make the pictures of pages: the report of a run, its samples by tokens, a notebook, the site. All from real runs.

    python scripts/pictures.py [report] [samples] [notebook] [site] [--runs runs/pictures] [--out docs/images]

| picture | made from |
|---|---|
| `report.png` | the demo, `python train.py` |
| `report_samples.png` | the game of `experiment=guess`, learned by PPO, after `experiment=guess_sft` |
| `notebook.png` | `notebooks/02_ppo_step_by_step.ipynb`, run by the command `jupyter nbconvert` (`--jupyter`) |
| `site.png` | what `make site` builds |

A run that is there and finished is not run again: all of them take about six minutes of one core. Needs `chromium` (of
the distribution's packages) on the path, and tornado, which comes with ipykernel. `--dark` and `--width` make variants
to look at, which the documentation does not show.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from PIL import Image
from tornado.websocket import WebSocketClientConnection, websocket_connect

from lit_rl.reports import run_page

# --------------------------------- a browser: Chromium without a window, told what to do through its DevTools protocol


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
        """Return one command of the protocol, and its answer.

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
        """Return what a script of the page comes to; in its first frame, where `framed`.

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
        """Press a key, by its name, in what has the focus."""
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    async def type(self, text: str) -> None:
        """Type into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def box(self, first: str, last: str | None = None, *, until: str | None = None, margin: int = 14) -> Box:
        """Return what the elements from the first to the last selector take of the page, as wide as the page.

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
        """Return a part of the page, also where it is not in the window."""
        x, y, width, height = box
        clip = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
        said = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return Image.open(io.BytesIO(base64.b64decode(said["data"]))).convert("RGB")


def _errors(message: dict[str, Any]) -> list[str]:
    """Return the errors of an event; none where it tells of anything else."""
    given = message.get("params", {})
    if message.get("method") == "Runtime.exceptionThrown":
        return [given["exceptionDetails"].get("exception", given["exceptionDetails"]).get("description", "?")]
    if message.get("method") == "Log.entryAdded" and given["entry"]["level"] == "error":
        return [given["entry"]["text"]]
    return []


@asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    """Start a browser that ends with the block.

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
    """Return that of its tab, as it writes its port into its folder."""
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


# ------------------------------------------------------------------------------------------------------------ pictures


ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / ".venv-site" / "bin" / "mkdocs"
MOST = 300_000
"""Bytes of a picture."""
LEARNED = ("algo=ppo", "algo.beta=0.02", "algo.reward_beta=0", "callbacks.token_samples.completions=32")
"""A critic gives every token an advantage of its own, and a KL in the loss is known of every token."""
COLOURINGS = ("value", "kl", "entropy", "mask")
"""Beside the advantage."""


def train(folder: Path, *settings: str) -> Path:
    """Return the folder of a run with these settings, which is made where no finished one is there."""
    summary = folder / "summary.json"
    if not summary.is_file() or json.loads(summary.read_text()).get("status") != "finished":
        print(f"python train.py {' '.join(settings)} run_dir={folder}", flush=True)
        with (folder.parent / f"{folder.name}.log").open("w") as log:
            command = [sys.executable, "train.py", *settings, f"run_dir={folder}"]
            subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=True)
    run_page.write_run_page(folder)
    return folder


def stacked(parts: Sequence[Image.Image]) -> Image.Image:
    """Return one below the other."""
    whole = Image.new("RGB", (max(part.width for part in parts), sum(part.height for part in parts)), "white")
    top = 0
    for part in parts:
        whole.paste(part, (0, top))
        top += part.height
    return whole


async def report(page: Page, given: argparse.Namespace) -> Image.Image:
    run = train(given.runs / "demo")
    await page.open((run / "report.html").as_uri(), width=given.width or 1200, dark=given.dark)
    return await page.picture(await page.box("h1", until="main h3:nth-of-type(3)"))


async def samples(page: Page, given: argparse.Namespace) -> Image.Image:
    """Return the browser of samples by advantage, and below it the same completion by the other colours."""
    form = train(given.runs / "form", "experiment=guess_sft")
    run = train(given.runs / "guess", "experiment=guess", *LEARNED, f"model.name={form}/hf")
    await page.open((run / "report.html").as_uri(), width=given.width or 1200, dark=given.dark)
    await page.run(CHOOSE)
    parts = [await page.picture(await page.box("#samples-of-run", "#shown table"))]
    for by in COLOURINGS:
        await page.run(f"at('by').value = '{by}'; show(); {ALONE}")
        parts.append(await page.picture(await page.box("#legend", "#shown .said:last-of-type", margin=8)))
    return stacked(parts)


CHOOSE = """
at('rows').style.height = '18rem';
const spread = xs => Math.max(...xs) - Math.min(...xs);
const told = row => row.t && row.t.entropy && row.t.text.length > MOST / 2
  ? spread(row.t.advantage.filter((_, i) => row.t.mask[i] !== 'read')) : 0;
const MOST = Math.max(...files.flatMap(each => each.rows).map(row => row.t ? row.t.text.length : 0));
let best = [0, 0, -1];
files.forEach((each, i) => each.rows.forEach((row, j) => { if (told(row) > best[2]) best = [i, j, told(row)]; }));
at('file').value = best[0];
open_file();
choose(order.indexOf(best[1]));
"""
"""Of the long completions the one whose tokens differ most in advantage, of those whose entropy is known."""

ALONE = """
at('rows').hidden = true;
document.querySelector('.browser').style.display = 'block';
for (const each of at('shown').children) each.hidden = each !== at('shown').querySelector('.said:last-of-type');
"""
"""Nothing but the completion is shown below the legend."""


async def notebook(page: Page, given: argparse.Namespace) -> Image.Image:
    made = given.runs / "02_ppo_step_by_step.html"
    if not made.is_file():
        execute(ROOT / "notebooks" / "02_ppo_step_by_step.ipynb", made, given.jupyter)
    await page.open(made.as_uri(), width=given.width or 1100, height=1200, dark=given.dark)
    await page.run(CHOOSE, framed=True)
    await page.run("at('samples-of-run').scrollIntoView()", framed=True)
    await page.run("document.querySelector('iframe').closest('.jp-Cell').id = 'pictured'")
    x, top, width, _ = await page.box("#pictured")
    frame = (await page.box("iframe", margin=0))[1]
    shown = await page.run("at('shown').querySelector('table').getBoundingClientRect().bottom", framed=True)
    return await page.picture((x, top, width, frame + shown + 14 - top))


def execute(path: Path, made: Path, jupyter: str) -> None:
    """Run a notebook in a kernel of this interpreter, and write it as a page with what its cells showed."""
    print(f"{jupyter} nbconvert --execute {path.name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "kernels" / "python3"
        spec.mkdir(parents=True)
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}))
        where = {**os.environ, "JUPYTER_PATH": folder, "JUPYTER_DATA_DIR": folder}
        command = [jupyter, "nbconvert", "--execute", "--to", "html", f"--output={made.resolve()}", str(path)]
        subprocess.run(command, env=where, check=True)


async def site(page: Page, given: argparse.Namespace) -> Image.Image:
    """Return the first page, from the top to where its third section begins."""
    with tempfile.TemporaryDirectory() as folder:
        command = [SITE, "build", "--quiet", "--strict", "--site-dir", folder]
        subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
        with served(Path(folder)) as address:  # it has no search where it is opened as a file
            await page.open(f"{address}/start.html", width=given.width or 1280, height=1200, dark=given.dark)
            await page.run(STILL)
            return await page.picture(await page.box("body", until="article h2:nth-of-type(3)", margin=0))


STILL = """
const still = document.createElement('style');
still.textContent = '* { transition: none !important }';
document.head.append(still);
"""
"""Nothing fades in: a picture that is taller than the window makes the tabs appear anew."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder by another thread, at the address that is given."""
    handler = partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    """Says nothing of each request."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


PICTURES = {"report": report, "samples": samples, "notebook": notebook, "site": site}
FILES = {"samples": "report_samples"}


async def make(given: argparse.Namespace) -> None:
    for name in given.pictures or PICTURES:
        async with browser() as page:
            image = await PICTURES[name](page, given)
        path = given.out / f"{FILES.get(name, name)}.png"
        image.save(path, optimize=True)
        size = path.stat().st_size
        print(f"{path}  {image.width} x {image.height}, {size // 1000} kB", flush=True)
        if size > MOST:
            raise SystemExit(f"{path} has {size} bytes, more than {MOST}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "pictures", nargs="*", metavar="PICTURE", choices=[[], *PICTURES], help="all, where none is named"
    )
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "pictures", help="folder of the runs")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="folder of the pictures")
    parser.add_argument("--jupyter", default="jupyter", help="the command, with nbconvert installed beside it")
    parser.add_argument("--dark", action="store_true", help="as a reader sees it whose system is dark")
    parser.add_argument("--width", type=int, help="pixels of the window")
    given = parser.parse_args()
    given.runs, given.out = given.runs.resolve(), given.out.resolve()
    given.runs.mkdir(parents=True, exist_ok=True)
    given.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(make(given))


if __name__ == "__main__":
    main()
