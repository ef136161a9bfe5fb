"""Make the pictures of pages: the report of a run, its samples by tokens, a notebook, the site. All from real runs.

    python scripts/pictures.py [report] [samples] [notebook] [site] [--runs runs/pictures] [--out docs/images]

| picture | made from |
|---|---|
| `report.png` | the demo, `python train.py` |
| `report_samples.png` | the game of `experiment=guess`, learned by PPO, after `experiment=guess_sft` |
| `notebook.png` | `notebooks/02_ppo_step_by_step.ipynb`, run by the command `jupyter nbconvert` (`--jupyter`) |
| `site.png` | what `make site` builds |

A run that is there and finished is not run again: all of them take about six minutes of one core. Needs Chromium.
`--dark` and `--width` make variants to look at, which the documentation does not show.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from browser import Page, browser
from PIL import Image

from lit_rl.reports import run_page

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / ".venv-site" / "bin" / "mkdocs"
MOST = 300_000
"""Bytes of a picture."""
LEARNED = ("algo=ppo", "algo.beta=0.02", "algo.reward_beta=0", "callbacks.token_samples.completions=32")
"""A critic gives every token an advantage of its own, and a KL in the loss is known of every token."""
COLOURINGS = ("value", "kl", "entropy", "mask")
"""Beside the advantage."""


def train(folder: Path, *settings: str) -> Path:
    """The folder of a run with these settings, which is made where no finished one is there."""
    summary = folder / "summary.json"
    if not summary.is_file() or json.loads(summary.read_text()).get("status") != "finished":
        print(f"python train.py {' '.join(settings)} run_dir={folder}", flush=True)
        with (folder.parent / f"{folder.name}.log").open("w") as log:
            command = [sys.executable, "train.py", *settings, f"run_dir={folder}"]
            subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=True)
    run_page.write_run_page(folder)
    return folder


def stacked(parts: Sequence[Image.Image]) -> Image.Image:
    """One below the other."""
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
    """The browser of samples by advantage, and below it the same completion by the other colours."""
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
    """The first page, from the top to where its third section begins."""
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
    """The address at which a folder is served, by another thread."""
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
