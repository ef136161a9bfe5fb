"""Toys, made once."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from vision_kinds import KINDS
from vision_seen import Toy
from vision_toys import save

from lit_rl.models import LanguageModel


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a kind of toy."""
    return cache(lambda kind: save(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(scope="session")
def toy_of(toy_folder: Any) -> Any:
    """The toy of a kind."""

    @cache
    def made(kind: str) -> Toy:
        model = LanguageModel(str(toy_folder(kind)))
        return Toy(kind, model, model.load().eval())

    return made


@pytest.fixture(params=KINDS)
def toy(request: pytest.FixtureRequest, toy_of: Any) -> Toy:
    return toy_of(request.param)
