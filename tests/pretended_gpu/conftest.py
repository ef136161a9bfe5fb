"""Starts the pretended GPU (`pretend.py`) for the tests of this folder, and holds what they share.

``PRETEND=2 pytest tests/pretended_gpu`` runs them on two devices (`make test-pretended-gpu`). Without PRETEND they are
skipped: a process that has pretended devices keeps them, and the other tests are written for a machine without a GPU.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pretend
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch.utilities.seed import isolate_rng

from lit_rl import cli

HERE = Path(__file__).parent
TESTS, ROOT = HERE.parent, HERE.parents[1]
sys.path += [str(TESTS), *(str(TESTS / name) for name in ("runs", "doors", "algorithms", "generation", "rewards"))]
sys.path += [str(ROOT / "scripts")]
import dist_equal  # noqa: E402
import same_bits  # noqa: E402


def _reason_to_skip() -> str | None:
    if not os.environ.get("PRETEND"):
        return "no pretended GPU was asked for: make test-pretended-gpu"
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned, "constraints.txt pins torch"
    there = torch.__version__.partition("+")[0]
    if there != pinned[1]:
        return f"the pretended GPU is made for torch {pinned[1]} (constraints.txt), and this is torch {there}"
    return pretend.unavailable()


SKIPPED = _reason_to_skip()
if SKIPPED is None:  # before pytest-xdist starts its workers, so that only one process compiles
    os.environ["PYTHONPATH"] = os.pathsep.join(
        dict.fromkeys([str(HERE / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    )
    pretend.start(int(os.environ["PRETEND"]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if SKIPPED else ():
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=SKIPPED))


@pytest.fixture(autouse=True)
def _as_in_a_new_process() -> None:
    """Undo what runs leave in a process: the current device, and a demand for deterministic kernels."""
    if SKIPPED is None:
        torch.cuda.set_device(0)
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that runs name as `{work}/...`: files of `same_bits`, another tiny policy, a reward model."""
    folder = tmp_path_factory.mktemp("work")
    for name, text in same_bits.FILES.items():
        (folder / name).write_text(text)
    same_bits.teacher(same_bits.HERE, folder / "teacher")
    dist_equal.scorer_in(folder)
    return folder


Command = Callable[..., int]
"""`command("eval", "run_dir=...")` is `lit-rl eval run_dir=...` in this process; returns the exit code."""


@pytest.fixture(scope="session")
def command(work: Path) -> Command:
    """Return a function that runs the command line in this process, and undoes what it does to the process."""

    def run(*words: str) -> int:
        environment = dict(os.environ)
        GlobalHydra.instance().clear()
        with pytest.MonkeyPatch.context() as patch, isolate_rng():
            patch.setattr(sys, "argv", ["lit-rl", *words])
            patch.syspath_prepend(str(work))
            try:
                return cli.run([word.replace("{work}", str(work)) for word in words])
            finally:
                os.environ.clear()
                os.environ.update(environment)

    return run
