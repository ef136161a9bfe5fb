"""A model that cannot be trained ends the command with its exit code and a message, and leaves nothing.

What exactly is said of each is tested at the objects that say it, in `models/`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import Command, refused
from small_models import save_model, save_tokenizer

pytestmark = pytest.mark.all


def config(**changes: Any) -> Callable[[Path], Any]:
    """A model of which everything is there but the weights, with other entries in its config.json."""

    def make(folder: Path) -> None:
        path = save_tokenizer(folder) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return make


def cut(folder: Path) -> None:
    file = save_model(folder) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def pickled(folder: Path) -> None:
    torch.save({}, save_tokenizer(folder) / "pytorch_model.bin")


def adapter(folder: Path) -> None:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")


CODE = {"model_type": "new", "auto_map": {"AutoConfig": "code.Config"}}
MODELS: dict[str, tuple[Callable[[Path], Any], list[str], int, list[str]]] = {
    "small-embedding": (config(vocab_size=200), [], 2, ["ids up to", "200 rows"]),
    "encoder-decoder": (
        config(architectures=["T5ForConditionalGeneration"], model_type="t5"),
        [],
        2,
        ["encoder-decoder", "causal"],
    ),
    "code": (config(**CODE), [], 2, ["Such code can do anything", "model.trust_remote_code"]),
    "adapter": (adapter, [], 2, ["is an adapter", "model.adapter="]),
    "cut": (cut, [], 7, ["model.safetensors is damaged"]),
    "pickled": (pickled, [], 7, ["pytorch_model.bin", "safetensors"]),
    "lora": (save_model, ["model.lora.targets=[query]"], 2, ["targets names 'query'", "q_proj"]),
    "hub": (lambda folder: None, ["model.name=nobody/nothing-at-all"], 8, ["nobody/nothing-at-all", "hf download"]),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_cannot_be_trained_is_refused(kind: str, step: Command, tmp_path: Path) -> None:
    make, more, code, words = MODELS[kind]
    make(tmp_path / "model")
    refused(step("model=local", f"model.name={tmp_path / 'model'}", "run_dir=run", *more), code, *words)


def test_a_reference_with_another_vocabulary_is_refused(step: Command, tmp_path: Path) -> None:
    config(vocab_size=300)(tmp_path / "other")
    words = ["reference=path", f"reference.name={tmp_path / 'other'}", "algo.beta=0.1", "run_dir=run"]
    refused(step(*words), 2, "another vocabulary", "300 rows")
