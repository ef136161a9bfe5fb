"""A model that cannot be trained ends the command with its exit code and a message, and leaves nothing.

One of each exit code; what exactly is said of each is tested at the objects that say it, in `models/`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import Command, refused
from small_models import save_model, save_tokenizer

pytestmark = pytest.mark.all


def of_fewer_ids(folder: Path) -> None:
    path = save_tokenizer(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 200}))


def cut(folder: Path) -> None:
    file = save_model(folder) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("make", "code", "words"),
    [(of_fewer_ids, 2, ["ids up to", "200 rows"]), (cut, 7, ["model.safetensors is damaged"])],
)
def test_a_model_that_cannot_be_trained_is_refused(
    make: Callable[[Path], Any], code: int, words: list[str], step: Command, tmp_path: Path
) -> None:
    make(tmp_path / "model")
    refused(step("model=local", f"model.name={tmp_path / 'model'}", "run_dir=run"), code, *words)
