"""Engines that tests share: one in this process and one server for each model, for the whole session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_cases import described, untied_folder

from lit_rl.generation.vllm.engine_generator import EngineGenerator
from lit_rl.generation.vllm.in_process import VLLMGenerator
from lit_rl.generation.vllm.server import VLLMServerGenerator
from lit_rl.models import LanguageModel

MAKERS: dict[str, Callable[[], EngineGenerator]] = {
    "vllm": lambda: VLLMGenerator(heartbeat=None),
    "server": lambda: VLLMServerGenerator(launch=True, heartbeat=None),
    "server-gloo": lambda: VLLMServerGenerator(launch=True, transport="gloo", heartbeat=None),
}


@dataclass
class Case:
    """An engine, and the model that it was started for."""

    kind: str
    name: str
    generator: EngineGenerator
    model: LanguageModel
    _version: int = 0

    def fresh(self, **settings: Any) -> Any:
        """A policy of this model, its weights those of the files, with the engine synced to it."""
        model = described(Path(self.model.name), **settings)
        policy = model.load()
        self.sync(policy)
        return policy

    def sync(self, policy: Any) -> int:
        """Sync under the next version."""
        self._version += 1
        self.generator.sync(policy, self._version)
        return self._version


CASES = ("vllm-tied", "vllm-untied", "server-tied", "server-gloo-untied")


@pytest.fixture(scope="session")
def started(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Case]]:
    """Engines by name, each started when it is first asked for."""
    folders = {"tied": tiny_dir, "untied": untied_folder(tiny_dir, tmp_path_factory.mktemp("untied"))}
    running: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in running:
            kind, _, model = name.rpartition("-")
            generator = MAKERS[kind]()
            description = described(folders[model])
            generator.prepare(description)
            running[name] = Case(kind, name, generator, description)
        return running[name]

    yield get
    for case in running.values():
        case.generator.close()


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, started: Callable[[str], Case]) -> Case:
    return started(request.param)


@pytest.fixture(params=["vllm-tied", "server-tied"])
def tied(request: pytest.FixtureRequest, started: Callable[[str], Case]) -> Case:
    return started(request.param)
