"""Whole runs, in this process or in real ones."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torchvision_beside  # noqa: F401  # before transformers, which looks for torchvision once
import warm
from dist_equal import Ones, end_group, in_processes
from hydra.core.global_hydra import GlobalHydra

from lit_rl import cli


@contextlib.contextmanager
def _left_as_found() -> Iterator[None]:
    """Hydra's singletons, `sys.argv` and the environment as they were."""
    argv, environment = sys.argv, dict(os.environ)
    try:
        yield
    finally:
        sys.argv = argv
        os.environ.clear()
        os.environ.update(environment)
        GlobalHydra.instance().clear()


@pytest.fixture
def train() -> Callable[..., int]:
    """`train(*overrides)` runs the Hydra door in this process and returns its exit code."""

    def run(*overrides: str) -> int:
        with _left_as_found():
            sys.argv = ["train.py"]
            return cli.run(list(overrides))

    return run


def _processes(root: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    started: list[subprocess.Popen] = []

    def start(*overrides: str, **kwargs: Any) -> subprocess.Popen:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(root / "train.py"), *overrides]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(warm.Popen(command, env=env, start_new_session=True, **{**pipes, **kwargs}))
        return started[-1]

    yield start
    for child in started:
        end_group(child)


@pytest.fixture(scope="session")
def two_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes left of all that the tests of this session read of them (`dist_jobs.py`)."""
    folder, names = tmp_path_factory.mktemp("two_ranks"), dict[str, None]()
    for item in request.session.items:
        name = item.path.stem.removeprefix("test_dist_")
        if name == "cases":
            given = item.callspec.params if hasattr(item, "callspec") else {}
            names |= dict.fromkeys([*given.get("rows", ()), *([given["row"]] if "row" in given else [])])
        elif name != item.path.stem and hasattr(item.module, "main") and name not in names:
            names[name] = None
            (folder / name).mkdir()
            if hasattr(item.module, "alone"):
                item.module.alone(folder / name)
    return in_processes(str(Path(__file__).with_name("dist_jobs.py")), folder, *names)


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, two_ranks: Path) -> Path:
    """What two processes left behind of `test_dist_NAME.py`."""
    return two_ranks / request.module.__name__.removeprefix("test_dist_")


@pytest.fixture(scope="module")
def one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ones:
    """`one(name)`: what `run` of the file does in one process."""
    return Ones(request.module.run, tmp_path_factory.mktemp("one"))


@pytest.fixture
def process(root: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """`process(*overrides)` starts a `python train.py` (see `warm`), in a session of its own, one thread."""
    yield from _processes(root)


@pytest.fixture(scope="module")
def module_process(root: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """`process` for fixtures that a module shares."""
    yield from _processes(root)
