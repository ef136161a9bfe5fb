"""The way from a model's name to files that may be read; errors of Hugging Face's libraries as those of lit_rl."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lit_rl.core.errors import BackendError, ConfigError, LitRLError, StorageError
from lit_rl.core.machine import go_offline_if_unreachable
from lit_rl.core.model_paths import NOT_CACHED, copy_without_hub, resolve_model_path

_LFS = b"version https://git-lfs"
_CONFIG_ERRORS = {"StrictDataclassFieldValidationError", "StrictDataclassClassValidationError"}
"""Errors of huggingface_hub for fields of a config."""

_JSON_FILES = (
    "config", "generation_config", "tokenizer", "tokenizer_config", "special_tokens_map", "added_tokens", "vocab",
    "processor_config", "preprocessor_config", "model.safetensors.index", "adapter_config",
)  # fmt: skip
_JSON_ERRORS = {"JSONDecodeError", "UnicodeDecodeError", "AttributeError", "TypeError"}
"""Errors that reading one of them may raise: its values are read as if it were an object."""


def resolve(key: str, name: str, revision: str | None = None) -> str:
    """Return the folder that ``name`` stands for, or ``name`` itself where it is a hub id.

    A hub id of which there is a copy without the hub is that folder, unless a revision was asked for.

    Raises:
        ConfigError: ``name`` is empty, or is written as a path and no such folder exists.
    """
    if folder := resolve_model_path(key, name):
        return str(folder)
    copy = copy_without_hub(name)
    if revision is None and (copy / "config.json").is_file():
        return str(copy)
    go_offline_if_unreachable()
    return name


def refuse_pickle(key: str, path: str, stem: str) -> None:
    """Refuse a local folder without ``<stem>*.safetensors``: pickled weights run code when they are read.

    Raises:
        StorageError: there are pickled weights only, or none at all; or an index names files outside of the folder.
        ConfigError: an adapter's weights are looked for in the folder of a whole model.
    """
    folder = Path(path)
    # The hub's client refuses such names of a repository itself.
    for index in folder.glob("*.safetensors.index.json") if folder.is_dir() else ():
        with suppress(ValueError, OSError, AttributeError, TypeError):  # one that is damaged is named where it is read
            for name in set(json.loads(index.read_bytes())["weight_map"].values()):
                if Path(name).is_absolute() or ".." in Path(name).parts:
                    raise StorageError(
                        f"{key}: {index} names {name!r}, which is outside of the model's folder, and is not read. "
                        "Allowed are files of the folder: look at who made this model, and fetch it again."
                    )
    if not folder.is_dir() or any(folder.glob(f"{stem}*.safetensors")):
        return
    pickled = sorted(item.name for item in folder.iterdir() if item.suffix in {".bin", ".pt", ".pth", ".ckpt"})
    if pickled:
        raise StorageError(
            f"{key}: {folder} holds pickled weights only ({', '.join(pickled[:3])}), and reading a pickle runs "
            "whatever code is inside. Only safetensors are read: convert the files once, where you trust them, with "
            "transformers' save_pretrained."
        )
    if stem and (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
        raise ConfigError(f"{key}: {folder} holds a whole model, and no adapter: name it in model.name, without {key}.")
    raise StorageError(f"{key}: {folder} holds no {stem}*.safetensors. Is the download complete?")


@contextmanager
def reading(key: str, name: str, path: str) -> Iterator[None]:
    """Turn the errors of Hugging Face's libraries while they read ``path`` into ours."""
    try:
        yield
    except LitRLError:
        raise
    except Exception as error:
        translated = _hub_error(key, name, error) or _file_error(key, name, path, error)
        if translated is None:
            raise
        raise translated from error


@contextmanager
def rename_keys(*patterns: tuple[str, str]) -> Iterator[None]:
    """Rename keys in the errors of a loader, by regular expressions and their replacements."""
    try:
        yield
    except LitRLError as error:
        message = str(error)
        for pattern, replacement in patterns:
            message = re.sub(pattern, replacement, message)
        raise type(error)(message) from error


@contextmanager
def quiet_about_defaults() -> Iterator[None]:
    """Silence a warning of transformers that is not about the model that is read.

    It makes a config of the family's defaults, to say what differs from them, and the pad token of Idefics3's lies
    outside of its vocabulary. The model's own tokens are checked with its tokenizer.
    """
    logger = logging.getLogger("transformers.configuration_utils")

    def keep(record: logging.LogRecord) -> bool:
        return "pad_token_id must be" not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _hub_error(key: str, name: str, error: Exception) -> LitRLError | None:
    from huggingface_hub import errors

    if Path(name).expanduser().is_dir():
        return None
    download = f"`hf download {name}`"
    # The first that fits anywhere in the chain explains it: a gated repository is also "not found", and whatever the
    # hub answered ends as "not in the cache".
    explanations: list[tuple[type[BaseException], str]] = [
        (errors.HFValidationError, "is no folder and cannot be a hub id, which reads owner/model."),
        (errors.GatedRepoError, f"is gated. Accept its licence on its hub page, run `hf auth login`, then {download}."),
        (errors.RevisionNotFoundError, "exists on the hub, but not with this model.revision."),
        (
            errors.RepositoryNotFoundError,
            "is no folder and no public repository of the hub: look for a typo. If it is private, run "
            f"`hf auth login`, then {download}.",
        ),
        (errors.HfHubHTTPError, f"could not be fetched: the hub answered with an error. Try {download}."),
        (
            errors.LocalEntryNotFoundError,
            f"is not in the local cache and the hub cannot be reached. Where there is a network, run {download} and "
            "copy the cache; or give a folder.",
        ),
        (
            errors.OfflineModeIsEnabled,
            NOT_CACHED.format(name=name),
        ),
    ]
    causes = list(_chain(error))
    if any(isinstance(cause, errors.RemoteEntryNotFoundError) for cause in causes):
        return None  # the repository is there and lacks a file: not the hub's fault
    for kind, text in explanations:
        if any(isinstance(cause, kind) for cause in causes):
            return BackendError(f"{key}={name!r} {text}")
    return None


def _file_error(key: str, name: str, path: str, error: Exception) -> LitRLError | None:
    text = " ".join(str(error).split())
    kinds = {type(cause).__name__ for cause in _chain(error)}
    if key.endswith(("name", "chat_template")) and (what := _describe_missing_model(name, Path(path))):
        return ConfigError(f"{key}={name!r} {what}")
    if "SafetensorError" in kinds:
        return _damage_error(key, _damaged_weights(path), text)
    if kinds & _JSON_ERRORS and (file := _damaged_json(path)):
        return _damage_error(key, file, f"it is no JSON object ({text})")
    if "JSONDecodeError" in kinds or "UnicodeDecodeError" in kinds:
        return StorageError(f"{key}={name!r}: a JSON file of the model is damaged: {text}")
    if kinds & _CONFIG_ERRORS:
        return ConfigError(f"{key}={name!r}: config.json, or model.init_kwargs, has a value that cannot be: {text}")
    if isinstance(error, ImportError):
        return BackendError(f"{key}={name!r} needs a package that is not installed: {text}")
    if isinstance(error, RuntimeError) and "mismatched_sizes" in text:
        return StorageError(f"{key}={name!r}: the shapes of the weights differ from those that config.json describes.")
    if isinstance(error, OSError):
        return StorageError(f"{key}={name!r} cannot be read: {text}")
    if isinstance(error, ValueError) and "trust_remote_code" in text:
        return ConfigError(
            f"{key}={name!r} can only be loaded by running Python code that comes with the model. Such code can do "
            "anything that you can. If you have read it, set model.trust_remote_code=true and model.revision to the "
            "40 hexadecimal digits of the commit that you read."
        )
    if isinstance(error, ValueError | KeyError):
        return ConfigError(f"{key}={name!r}: transformers cannot use this model: {text[:400]}")
    return None


def _describe_missing_model(name: str, folder: Path) -> str:
    """Describe what a folder without config.json holds in a model's place; empty where it has one, or is no folder."""
    if not folder.is_dir() or (folder / "config.json").is_file():
        return ""
    if (folder / "adapter_config.json").is_file():
        return f"is an adapter: set model.adapter={name!r}, and model.name to the model that it was trained on."
    if any(folder.glob("*.gguf")):
        return "holds GGUF, made for inference: give a folder with safetensors."
    held = ", ".join(sorted(item.name for item in folder.iterdir())[:5]) or "nothing"
    return f"holds no config.json; it holds {held}. Give the folder that a model was saved in."


def _damage_error(key: str, file: str, why: str) -> StorageError:
    with suppress(OSError), open(file, "rb") as begin:
        if begin.read(len(_LFS)) == _LFS:
            return StorageError(f"{key}: {file} is not there yet, only its pointer of Git LFS: run `git lfs pull`.")
    return StorageError(f"{key}: {file} is damaged or only partly downloaded: {why}. Fetch it again.")


def _damaged_json(path: str) -> str:
    """Return the first of a model's own JSON files that holds no object; empty where there is none."""
    for file in filter(Path.is_file, (Path(path) / f"{stem}.json" for stem in _JSON_FILES)):
        try:
            if not isinstance(json.loads(file.read_bytes()), dict):
                return str(file)
        except (ValueError, OSError):
            return str(file)
    return ""


def _damaged_weights(path: str) -> str:
    """Return the first safetensors file of the model that does not open; the model where none is found."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else []:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError):
            return str(file)
    return path
