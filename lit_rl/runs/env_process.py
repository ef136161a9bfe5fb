"""The same scripted episodes in another process, for `lit-rl env-check`: with other hashes of texts, another process
id, at another time.

The process runs this module. It gets the settings of `env=` and not the objects: classes are imported anew.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.utils import instantiate

from lit_rl.core.processes import Child, die_with_parent, how_ended
from lit_rl.environments.parser_base import Parser

_SEEDS = "1", "2"
"""Seeds of text hashes: the second where this process has the first."""


class OtherProcess:
    """Another process that plays cases, one after another. To be closed.

    Args:
        settings: The node of `env=`, whose targets were checked, escaped for `hydra.utils.instantiate`.
        parsers: See `EpisodePlayer`.
        cases: See `EpisodePlayer`.
        max_image_pixels: See `EpisodePlayer`.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        parsers: Mapping[str, Parser | None],
        cases: Sequence[Any],
        max_image_pixels: int | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lit_rl-env-check-")
        folder = Path(self._folder.name)
        job, self._result, self._output = folder / "job", folder / "result.json", folder / "output"
        job.write_bytes(pickle.dumps((dict(settings), dict(parsers), max_image_pixels, list(cases))))
        hashes = _SEEDS[os.environ.get("PYTHONHASHSEED") == _SEEDS[0]]
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        with self._output.open("wb") as output:
            self._child = Child(
                [sys.executable, "-m", __name__, str(job), str(self._result), str(os.getpid())],
                env={**os.environ, "PYTHONHASHSEED": hashes, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def lines(self, seconds: float) -> list[tuple[str, ...]] | str:
        """Return the lines of each case, see `PlayedEpisode`; or the reason why there are none.

        Args:
            seconds: To wait for them.
        """
        try:
            code = self._child.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"it was not done after {seconds:.0f} seconds"
        if code:
            last = self._output.read_text(errors="replace").strip().splitlines()[-1:]
            return f"it {how_ended(code)}: {''.join(last)}"
        return [tuple(lines) for lines in json.loads(self._result.read_text())]

    def close(self) -> None:
        """End the process, and remove its files."""
        self._child.end()
        self._folder.cleanup()


def _main(job: Path, result: Path, parent: int) -> None:
    die_with_parent(parent)
    from lit_rl.runs.env_plays import EpisodePlayer

    settings, parsers, max_image_pixels, cases = pickle.loads(job.read_bytes())
    player = EpisodePlayer(instantiate(settings, _convert_="all"), parsers, max_image_pixels)
    result.write_text(json.dumps([player.play(case).lines for case in cases]))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    os._exit(0)  # what an environment left behind, such as a thread, keeps nobody waiting
