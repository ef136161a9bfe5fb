"""The tests of the real vLLM. Elsewhere than in its environment they are skipped, and say so."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torchvision_beside  # noqa: F401 (before transformers, which looks for it once)
from engine_fixtures import case, started, tied  # noqa: F401 (fixtures)

HERE = Path(__file__).parent
SHARING = ("test_engine_contract", "test_engine_turns", "test_engine_updates")
MISSING = importlib.util.find_spec("vllm") is None

# Read when vLLM is imported. One thread: two cores, and a server beside the tests.
os.environ.update({"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})

# glibc's own default. With any such variable processes give freed memory back (`lit_rl.cli.process`):
# the engines of two workers nearly fill the machine.
os.environ.setdefault("MALLOC_ARENA_TEST", "8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engines)
            if MISSING:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed here: make test-engines"))
    # Of two workers one begins with the runs, which take longest, the other with the files that share engines.
    turn = {name: at for at, name in enumerate(("test_engine_runs", *SHARING))}
    items.sort(key=lambda item: turn.get(item.path.stem, len(turn)))
