"""Whole runs, in this process or in real ones."""

from __future__ import annotations

import contextlib
import importlib
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
    """What two processes left, in a folder for each list of `dist_jobs` that a test of this session reads."""
    import dist_jobs  # not before: it imports every list

    files = {item.path.stem for item in request.session.items}
    wanted = [name for name in dist_jobs.LISTS if f"test_dist_{name}" in files]
    folder = tmp_path_factory.mktemp("two_ranks")
    if "worlds" in wanted:
        dist_jobs.dist_worlds.alone(folder / "worlds")
    if "mesh" in wanted:
        for kind in dist_jobs.dist_mesh.OTHERS:
            dist_jobs.dist_mesh.other_family(kind, folder / kind)
    return in_processes(dist_jobs.__file__, folder, *wanted)


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, two_ranks: Path) -> Path:
    """What two processes left behind of the list `dist_NAME.py`, for `test_dist_NAME.py`."""
    return two_ranks / request.module.__name__.removeprefix("test_dist_")


@pytest.fixture(scope="module")
def one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ones:
    """`one(name)`: what one process does of the same list."""
    jobs = importlib.import_module(request.module.__name__.removeprefix("test_"))
    return Ones(jobs.run, tmp_path_factory.mktemp("one"))


@pytest.fixture
def process(root: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """`process(*overrides)` starts a `python train.py` (see `warm`), in a session of its own, one thread."""
    yield from _processes(root)


@pytest.fixture(scope="module")
def module_process(root: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """`process` for fixtures that a module shares."""
    yield from _processes(root)
