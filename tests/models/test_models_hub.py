"""What a name that is no folder is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_rl.core.errors import ConfigError
from lit_rl.models import hub_files


def refused(name: str | Path) -> str:
    with pytest.raises(ConfigError, match="is written as a path, and there is no such folder") as raised:
        hub_files.resolve("reference.name", str(name))
    return str(raised.value)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A model, an adapter, and two folders that are neither."""
    for name, file in {"qwen-small": "config.json", "math-lora": "adapter_config.json", "opt": "notes.txt"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    (tmp_path / "photos").mkdir()
    return tmp_path


@pytest.mark.parametrize(("typed", "meant"), [("qwen-smal", "qwen-small"), ("math-lorra", "math-lora")])
def test_a_model_beside_it_is_suggested(typed, meant, models):
    assert refused(models / typed).endswith(f"Did you mean {meant!r}?")


@pytest.mark.parametrize("typed", ["nope", "opt2", "photo", "nowhere/qwen-smal"])
def test_a_folder_without_a_model_is_not(typed, models):
    assert "Did you mean" not in refused(models / typed)


def test_the_root_of_the_system_holds_no_model():
    assert "Did you mean" not in refused("/nope")


@pytest.mark.parametrize("cache", [None, "elsewhere"])
def test_a_copy_without_the_hub_stands_for_the_hub_unless_a_revision_is_asked_for(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LIT_RL_CACHE", str(tmp_path / cache) if cache else "")
    name = "owner/small"
    assert hub_files.resolve("model.name", name) == name
    copy = hub_files.copy_without_hub(name)
    assert copy == tmp_path / (cache or ".cache/lit_rl") / "models" / "owner" / "small"
    copy.mkdir(parents=True)
    assert hub_files.resolve("model.name", name) == name  # a folder that is not finished is none
    (copy / "config.json").touch()
    assert hub_files.resolve("model.name", name) == str(copy)
    assert hub_files.resolve("model.name", name, revision="main") == name
    assert hub_files.resolve("model.name", "owner/other") == "owner/other"
