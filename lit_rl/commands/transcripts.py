"""`lit-rl transcripts`: what a run recorded of its episodes, as one HTML file for a browser without a network."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from lit_rl.commands.html_file import write
from lit_rl.commands.transcript_page import page
from lit_rl.commands.transcript_record import read
from lit_rl.errors import ConfigError, in_range

NAME = "transcripts.html"
"""File in the run's folder. It is written anew each time."""


def transcripts(run_dir: Path, files: str = "step_*", rollouts: int = 4, episodes: int = 64, tokens: int = 2000) -> int:
    """Write the page.

    Args:
        run_dir: Folder of the run.
        files: Which files of `run_dir/samples`: a name without its ending, with `*` for what may stand there.
        rollouts: Most of these files, spread evenly from the first to the last.
        episodes: Most episodes, over all rollouts.
        tokens: Most tokens of an episode.

    Raises:
        ConfigError: there is no such file, or a limit is no number from 1 on.
        StorageError: a file is damaged, or the page cannot be written.
    """
    for name, value in (("rollouts", rollouts), ("episodes", episodes), ("tokens", tokens)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"transcripts.{name}={value} is no whole number; it takes one from 1 on.")
        in_range(f"transcripts.{name}", value, low=1)
    if not isinstance(files, str) or not files or Path(files).name != files:
        raise ConfigError(
            f"transcripts.files={files} is no name of files in {run_dir / 'samples'}: take such as 'step_*', 'val_*'."
        )
    found = read(run_dir, files, rollouts, episodes)
    target = run_dir / NAME
    write(target, page(str(run_dir), found, tokens))
    shown, there = (sum(counts) for counts in zip(*((len(each.shown), each.completions) for each in found)))
    text = f"transcripts  {target}  ({shown} of {there} episodes of {len(found)} rollouts; open it in a browser)"
    Console().print(text, soft_wrap=True, highlight=False, markup=False)
    return 0
