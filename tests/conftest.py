"""What every test shares: one thread (two cores, several workers), the shipped policy, small models on disk."""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import quick_configs
import torch
from hypothesis import settings

import lit_rl

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start
settings.register_profile("lit_rl", deadline=None, derandomize=True)
settings.load_profile("lit_rl")

ROOT = Path(lit_rl.__file__).parents[1]

UNTIL = float(os.environ.get("LIT_RL_TESTS_UNTIL", "inf"))
"""The time, in seconds since 1970, from which tests are left out: CI has 90 minutes, and on some days a machine takes
twice as long as on others."""

LATER = frozenset((Path(__file__).parent / "later.txt").read_text().splitlines())
"""Tests and cases that are marked `all` for what they cost; lines that begin with # say how they were chosen."""

SHARED = {"dist": "ranks", "faults": "kills", "chain": "chain"}
"""Tests with these markers share what one of them started: of two workers (`--dist loadgroup`) one takes them all."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """A million objects of modules and tests stay to the end: the collector looks at what comes later alone.

    Else it takes a third of the collection, and a tenth of the tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > UNTIL:
        pytest.skip("left out for lack of time (LIT_RL_TESTS_UNTIL)")


@pytest.hookimpl(tryfirst=True)  # before xdist writes the groups into the names by which it deals tests out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name in LATER or name.partition("[")[0] in LATER:
            item.add_marker(pytest.mark.all)
        for marker, group in SHARED.items():
            if marker in item.keywords:
                item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)  # what takes long begins first
    for item in items:
        if item.get_closest_marker("xdist_group") is None and _shares_with_its_file(item):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


def _shares_with_its_file(item: pytest.Item) -> bool:
    """Whether it asks for a fixture that is made once for its file: two workers would each make it."""
    info = getattr(item, "_fixtureinfo", None)
    made = info.name2fixturedefs.values() if info else ()
    return any(each[-1].scope == "module" and each[-1].baseid == item.location[0] for each in made if each)


@pytest.fixture(scope="module", autouse=True)
def what_earlier_files_left_is_not_gone_through_again() -> None:
    """Modules imported late, composed configs and the like, which stay: what is garbage is gone before.

    transformers' continuous batching looks at all objects twice a call, and a conversation is 40 calls of it.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Two threads of torch, as on a user's machine: where sums race, equal runs are not the same."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def modules_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of the test's folder are found first, and forgotten behind it: another test may have a file of that
    name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(f"{tmp_path}/"):
            del sys.modules[name]


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def tiny_dir() -> Path:
    """The shipped policy."""
    return ROOT / "lit_rl" / "models" / "tiny"


@pytest.fixture(scope="session", autouse=True)
def configs_are_composed_quickly() -> Iterator[pytest.MonkeyPatch]:
    """See `quick_configs`."""
    with pytest.MonkeyPatch.context() as patch:
        quick_configs.install(patch)
        yield patch


@pytest.fixture(scope="session", autouse=True)
def the_suites_own_process_gives_memory_back() -> Iterator[None]:
    """What one test frees, another process needs: engines of many tests in one process would fill the machine."""
    from lit_rl.cli import process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "keep_freed_memory", lambda: False)
        yield


@pytest.fixture(autouse=True)
def no_logger_writes_into_a_closed_stream() -> None:
    """Hydra gives loggers the streams of the test that composes: what stays behind would spoil later messages."""
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in loggers:
        for handler in list(getattr(logger, "handlers", ())):
            if isinstance(handler, logging.StreamHandler) and getattr(handler.stream, "closed", False):
                logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def lightning_speaks_as_before() -> Iterator[None]:
    """A script that silences Lightning for its own process must not silence it for the tests that come after."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    yield
    logger.setLevel(level)
