"""`lit-rl report`: the page of a run, in its folder; the same in a notebook."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lit_rl.commands import html_file, run_files, run_page
from lit_rl.commands.run_names import PAGE, RunNames


def report(run_dir: Path) -> int:
    """Write the page, and print its path.

    Raises:
        ConfigError: the folder holds no run.
        StorageError: the page cannot be written.
    """
    Console().print(line(write(run_dir)), soft_wrap=True, highlight=False, markup=False)
    return 0


def write(run_dir: Path) -> Path:
    """Write the page, and return its path."""
    target = RunNames(run_dir).page
    html_file.write(target, run_page.page(run_files.read(run_dir)))
    return target


def write_at_the_end(run_dir: Path) -> None:
    """Write the page of a run that has ended. Failures are printed in one line, and never change the exit code."""
    try:
        said = line(write(run_dir))
    except Exception as error:
        said = f"not written   {PAGE} ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
    Console().print(said, soft_wrap=True, highlight=False, markup=False)


def write_or_say_what_to_add(run_dir: RunNames) -> None:
    """Write the page of a LightningCLI run that has ended, where it logged its metrics; else print the keys that make
    it do so."""
    if run_dir.metrics.is_file():
        return write_at_the_end(run_dir.path)
    keys = f"--trainer.logger=lit_rl.callbacks.JsonlLogger --trainer.logger.path={run_dir.metrics}"
    said = f"report        none without {run_dir.metrics.name}: add {keys}"
    Console().print(said, soft_wrap=True, highlight=False, markup=False)


def line(target: Path) -> str:
    """Return the line for the console."""
    return f"report        {target}  (one file: open it in a browser)"


@dataclass(frozen=True)
class RunPage:
    """A run in a notebook: the page, in a sandboxed frame."""

    run_dir: Path
    height: int = 800
    """Pixels."""

    def _repr_html_(self) -> str:
        page = html.escape(run_page.page(run_files.read(self.run_dir)))
        return (
            f'<iframe srcdoc="{page}" sandbox="allow-scripts" title="Report of a run" width="100%" '
            f'height="{self.height}" style="border: 0"></iframe>'
        )


def show(run_dir: str | Path) -> RunPage:
    """Return an object that a notebook displays as the page of `lit-rl report`, as the run is at that moment. Writes
    nothing.

    Args:
        run_dir: The folder of a run, of one that still goes on too.
    """
    return RunPage(Path(run_dir).expanduser())
