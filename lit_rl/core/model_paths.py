"""Names of models in a config, resolved and checked without loading: shipped ones, folders, hub ids."""

from __future__ import annotations

import os
import re
from pathlib import Path

from lit_rl.core.errors import BackendError, ConfigError, did_you_mean
from lit_rl.core.machine import go_offline_if_unreachable

MODEL_FILES = ("config.json", "adapter_config.json")
"""Files of which every folder with a model or an adapter has at least one."""

_MODELS = Path(__file__).parents[1] / "models"

TINY = _MODELS / "tiny"
"""The policy that comes with the package: small enough to learn on a laptop CPU."""

DIGITS = _MODELS / "digits"
"""The one over images: it reads handwritten digits, a third of them right when it samples."""

SHIPPED = {"tiny": TINY, "digits": DIGITS}
"""Policies that come with the package, by their names."""

NOT_CACHED = (
    "is not in the local cache, and the hub is not asked (HF_HUB_OFFLINE is set, or it cannot be reached). Where there "
    "is a network, run `hf download {name}` and copy the cache; or give a folder."
)
"""The message for a model of the hub of which nothing is cached."""

_PAGE = re.compile(r"https?://[^/]+/([^/?#]+/[^/?#]+)")
"""A model's page on the hub."""

_LOCAL = re.compile(r"[./~\\]|[A-Za-z]:\\")
"""The beginning of a name that can only mean a folder."""

_OTHER_CACHES = ("TRANSFORMERS_CACHE", "PYTORCH_TRANSFORMERS_CACHE", "PYTORCH_PRETRAINED_BERT_CACHE")
"""Variables with which older versions of transformers read another cache."""


def resolve_model_path(key: str, name: str) -> Path | None:
    """Return the folder of a model, or None for a name that can only be one of the hub's.

    Raises:
        ConfigError: it is empty, a file, an address, the folder of a run, or written as a path where no folder is.
    """
    if not name.strip():
        raise ConfigError(f"{key}={name!r} is empty. Give a folder, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct.")
    folder = Path(name).expanduser()
    if folder.is_dir():
        is_model = any((folder / file).is_file() for file in MODEL_FILES)
        if not is_model and (folder / "config.yaml").is_file():  # of a run, whose model is in a folder inside it
            first = "" if (folder / "hf").is_dir() else f"; `lit-rl export run_dir={name}` makes it"
            raise ConfigError(f"{key}={name!r} is the folder of a run. Its model is {key}={Path(name) / 'hf'}{first}.")
        return folder.resolve()
    if folder.exists():
        what = "GGUF, made for inference: give a folder with safetensors" if folder.suffix == ".gguf" else ""
        raise ConfigError(f"{key}={name!r} is a file{f' of {what}' if what else '. Give the folder that holds it'}.")
    if page := _PAGE.match(name):
        raise ConfigError(f"{key}={name!r} is an address. Give the hub id {page[1]!r}, or a folder.")
    if _LOCAL.match(name) or name.count("/") > 1:
        models = {file.parent.name for each in MODEL_FILES for file in folder.parent.glob(f"*/{each}")}
        near = did_you_mean(folder.name, models)
        raise ConfigError(f"{key}={name!r} is written as a path, and there is no such folder.{near}")
    return None


def copy_without_hub(name: str) -> Path:
    """Return the folder in which scripts such as `scripts/make_models.py` put a substitute for a model of the hub.

    `$LIT_RL_CACHE` moves it; it is `~/.cache/lit_rl` otherwise.
    """
    cache = Path(os.environ.get("LIT_RL_CACHE") or "~/.cache/lit_rl").expanduser()
    return cache / "models" / name


def check_model_is_readable(key: str, name: str) -> None:
    """Refuse a model of the hub that must be missing: the hub cannot be reached, and nothing of it is in the cache.
    Other faults are reported where it is read.

    Raises:
        ConfigError: as `resolve_model_path`.
        BackendError: it is missing.
    """
    if name in SHIPPED or resolve_model_path(key, name) or (copy_without_hub(name) / "config.json").is_file():
        return
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is None or any(os.environ.get(each) for each in _OTHER_CACHES):
        return
    go_offline_if_unreachable()
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    if constants.HF_HUB_OFFLINE and not any(folder.glob("snapshots/*/*")):
        raise BackendError(f"{key}={name!r} {NOT_CACHED.format(name=name)}")
