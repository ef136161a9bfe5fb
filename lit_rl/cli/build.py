"""From a resolved config to objects. What `_target_` may name stands on a list; everything else is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lit_rl.errors import BackendError, ConfigError, LitRLError

ALLOWED = ("lit_rl.", "lightning.", "torch.optim.")
"""Prefixes that `_target_` may have. `allow_targets=[my_package]` adds the user's own, by their own hand."""

OPTIONAL = {"lit_rl.models.lora.Lora"}
"""Objects that are there only if one of their settings is."""


def plain(config: DictConfig) -> dict[str, Any]:
    """The config as dicts, lists and primitives, resolved, without what is switched off.

    Raises:
        ConfigError: a mandatory value is missing, an interpolation leads nowhere, or a target is not allowed.
    """
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        hint = _HINTS.get(missing[0], "")
        raise ConfigError(f"{missing[0]} has no value and needs one: {missing[0]}=...{hint}")
    container = OmegaConf.to_container(config, resolve=True)
    assert isinstance(container, dict)
    tree = prune(container)
    allowed = (*ALLOWED, *(f"{name}." for name in tree.get("allow_targets") or ()))
    for key, target in targets(tree):
        check_target(key, target, allowed)
    return tree


_HINTS = {
    "data.path": " (a .jsonl, .json, .parquet or .csv file, a saved datasets folder, or a hub id)",
    "reward.fn": " (package.module:name or ./file.py:name)",
    "model.name": " (a folder or a hub id)",
}


def prune(node: Any) -> Any:
    """Null settings of optional objects are dropped; an optional object without any setting is None."""
    if isinstance(node, list):
        return [prune(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("_target_") in OPTIONAL:
        given = {key: value for key, value in node.items() if value is not None}
        return given if len(given) > 1 else None
    return {key: prune(value) for key, value in node.items()}


def targets(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every dotted path that building the tree would import, with the key that it stands under."""
    if isinstance(node, list):
        for i, item in enumerate(node):
            yield from targets(item, f"{key}[{i}]")
    elif isinstance(node, dict):
        target = node.get("_target_")
        if target == "hydra.utils.get_method":
            yield f"{key}.path", str(node.get("path"))
        elif target is not None:
            yield f"{key}._target_", str(target)
        for name, value in node.items():
            yield from targets(value, f"{key}.{name}" if key else str(name))


def check_target(key: str, target: str, allowed: Sequence[str]) -> None:
    """Refuse a path outside the list: a config is read from files, and a path can be any function of any package."""
    if not target.startswith(tuple(allowed)):
        raise ConfigError(
            f"{key}={target!r} is not on the list of what a config may build ({', '.join(f'{a}*' for a in allowed)}). "
            f"For a class of your own, allow its package on the command line: allow_targets=[{target.split('.')[0]}]. "
            "A reward function needs no target: reward=function reward.fn=package.module:name."
        )


def build(tree: dict[str, Any]) -> Any:
    """The objects of a part of the tree.

    Raises:
        LitRLError: as the constructor raised it; anything else is a ConfigError with the constructor's words.
    """
    from hydra.errors import InstantiationException

    try:
        return instantiate(tree, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error.__context__
        if isinstance(cause, LitRLError):
            raise cause from error
        if isinstance(cause, ImportError):
            raise BackendError(f"{tree.get('_target_', 'The config')} cannot be imported: {cause}") from error
        text = str(cause or error)
        if "deepspeed" in text.lower():
            raise BackendError(
                f"{text} Install it with: pip install 'lit-rl[deepspeed]', or take strategy=fsdp."
            ) from error
        raise ConfigError(f"{error}".split("\nfull_key")[0]) from error
