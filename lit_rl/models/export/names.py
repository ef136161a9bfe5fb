"""What a model card calls models, data and files: names that mean something elsewhere, and no path of this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_CACHED = re.compile(r"models--([^/]+?)--([^/]+)")
"""A model's folder in the hub's cache."""
_OF_A_RUN = re.compile(r"hf(?:_steps|_ema|_bema|_merged)?|step_\d+")
"""Folders of exports, which every run calls alike."""
_DATA = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv", ".gz", ".bz2", ".xz", ".zst", ".zip")
_FOLDERS = re.compile(r"(^|[=,:\[({'\" ])/(?:[^/,\])}'\"=]+/)+")
"""The folders of an absolute path in a word of a command, and what stands before them; of an address there are two
slashes behind the colon."""


@dataclass(frozen=True)
class ModelName:
    """The name of a model that a training began with."""

    name: str
    """The hub id, the short name (`tiny`), or the name of the folder; of a run's export the name of the run."""
    hub_id: str | None
    """The model's own hub id, or that of the model that it says it was made from."""
    is_folder: bool
    """True for a folder of this machine, which others do not have."""

    @classmethod
    def of(cls, model: str) -> ModelName:
        """Make the name for a value of `model.name`."""
        if is_hub_id(model):
            return cls(model, model, is_folder=False)
        folder = Path(model).expanduser()
        if not (model.startswith(("/", ".", "~")) or ("/" in model and folder.is_dir())):
            return cls(model, None, is_folder=False)
        if cached := _CACHED.search(folder.as_posix()):
            return cls("/".join(cached.groups()), "/".join(cached.groups()), is_folder=False)
        origin = next((each for each in _named_origins(folder) if is_hub_id(each)), None)
        return cls(_own_name(folder), origin, is_folder=True)

    def __str__(self) -> str:
        return self.name


def is_hub_id(name: str) -> bool:
    """Tell whether the name of a model or of a data set is one of the hub's, and not a folder or a file here."""
    return (
        _HUB_ID.fullmatch(name) is not None and name[0] != "." and not name.endswith(_DATA) and not Path(name).exists()
    )


def without_folders(word: str) -> str:
    """Return a word of a command, or the name of data, with `path/to/` in place of the folders of an absolute path."""
    return _FOLDERS.sub(r"\1path/to/", word)


def _own_name(folder: Path) -> str:
    """Return the last part of a path that is not the name of every export."""
    names = [part for part in folder.resolve().parts[1:] if not _OF_A_RUN.fullmatch(part)]
    return names[-1] if names else "model"


def _named_origins(folder: Path) -> Iterator[str]:
    """Yield the models that a folder says it was made from: in its configs, and in the card of an earlier export."""
    for file, key in (("adapter_config.json", "base_model_name_or_path"), ("config.json", "_name_or_path")):
        try:
            config = json.loads((folder / file).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(config, dict) and isinstance(config.get(key), str):
            yield config[key]
    if isinstance(base := _card_header(folder / "README.md").get("base_model"), str):
        yield base


def _card_header(card: Path) -> dict:
    """Return the header of a card that lit_rl wrote; empty for others, which may name a distant ancestor of their
    model."""
    import yaml
    from huggingface_hub import metadata_load

    try:
        header = metadata_load(card) if card.is_file() else None
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return header if header and "lit_rl" in (header.get("tags") or ()) else {}
