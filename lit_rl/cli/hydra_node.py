"""What Hydra would build, open or set by its own node of a config is checked before Hydra reads it.

Hydra makes objects of `hydra.callbacks`, of launchers, sweepers and loggers while it starts, before any of our code
sees the config. So its loader is replaced by one that looks at what it has composed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hydra._internal import hydra as internals
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from lit_rl.cli import sweeping
from lit_rl.cli.targets import ALLOWED, check_target, targets
from lit_rl.cli.typed_values import with_line_breaks
from lit_rl.errors import ConfigError

_PLUGINS = ("hydra._internal.core_plugins.", "hydra_plugins.")
_BUILT = ("callbacks", "launcher", "sweeper")
_LOGGING = ("hydra_logging", "job_logging")
_CLASSES = ("logging.StreamHandler", "logging.NullHandler", "logging.Formatter", "colorlog.ColoredFormatter")
_LOG_FILE = "${hydra.runtime.output_dir}/${hydra.job.name}.log"
"""File of Hydra's own `hydra/job_logging=default`; any other file might be one of the user's."""
_STREAMS = ("ext://sys.stdout", "ext://sys.stderr")


class CheckedLoader(ConfigLoaderImpl):
    """Hydra's loader, with a check of the composed config before anything reads it."""

    def load_configuration(self, config_name: str | None, overrides: list[str], *rest: Any, **named: Any) -> DictConfig:
        read = with_line_breaks(overrides)
        config = super().load_configuration(config_name, read, *rest, **named)
        check(config, read)
        # The record holds words as they were typed: jobs of a sweep, and a config with more groups, are composed of it.
        typed = dict(zip(read, overrides, strict=True))
        with flag_override(config.hydra, ["readonly", "struct"], [False, False]):
            config.hydra.overrides.task = [typed.get(word, word) for word in config.hydra.overrides.task]
        # To find out whether it is a sweep at all, Hydra composes as for one and takes any override.
        if RunMode.MULTIRUN in (*rest, *named.values()) and named.get("validate_sweep_overrides", True):
            sweeping.began(config)
        return config


def install() -> None:
    """Let `hydra.main` compose with it."""
    internals.ConfigLoaderImpl = CheckedLoader  # pyright: ignore[reportPrivateImportUsage]


def check(config: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse settings that would run code, or write where they should not.

    Args:
        config: As it was composed, with Hydra's node.
        overrides: As they were typed: `allow_targets` of a file widens nothing.

    Raises:
        ConfigError: names the key.
    """
    if (hydra := config.get("hydra")) is None:
        return
    mine = config.get("allow_targets") if typed(overrides, "allow_targets") else None
    if mine is not None and not (OmegaConf.is_list(mine) and all(isinstance(name, str) for name in mine)):
        names = mine if isinstance(mine, str) else "my_package"
        raise ConfigError(f"allow_targets={mine} is no list of packages: type 'allow_targets=[{names}]'.")
    allowed = (*ALLOWED, *_PLUGINS, *(f"{name}." for name in mine or ()))
    for name in (*_BUILT, *_LOGGING):
        node = _followed(hydra, name, f"hydra.{name}")
        for key, target in targets(node, f"hydra.{name}"):
            check_target(key, target, allowed)
        for key, told in _refused(node, f"hydra.{name}") if name in _LOGGING else ():
            raise ConfigError(f"{key}={told!r}: a config may choose {', '.join(_CLASSES)}, and standard output.")
    if hydra.job.env_set and not typed(overrides, "hydra.job.env_set"):
        raise ConfigError("hydra.job.env_set is taken from the command line only: variables choose what programs load.")


def typed(overrides: Sequence[str], key: str) -> bool:
    """Tell whether the command line sets this key, or one below it."""
    return any(f"{override.lstrip('+').partition('=')[0]}.".startswith(f"{key}.") for override in overrides)


def _followed(parent: Any, name: Any, key: str) -> Any:
    """Return the plain values of a node. References are followed; a text with a reference in it stays a text."""
    if OmegaConf.is_missing(parent, name):
        return None
    raw = parent._get_node(name)
    if OmegaConf.is_interpolation(parent, name):
        text = str(raw._value())
        if text.startswith("${") and ":" in text:
            raise ConfigError(f"{key}={text}: what a resolver makes of it is known too late here; write it out.")
        try:
            raw = parent[name]
        except OmegaConfBaseException:
            return text
        if not OmegaConf.is_config(raw):
            return text
    if OmegaConf.is_dict(raw):
        return {inner: _followed(raw, inner, f"{key}.{inner}") for inner in raw}
    if OmegaConf.is_list(raw):
        return [_followed(raw, i, f"{key}[{i}]") for i in range(len(raw))]
    return raw._value()


def _refused(node: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield an entry that `logging.config.dictConfig` would call or import beyond the needs of a log."""
    if isinstance(node, str) and node.startswith("ext://") and node not in _STREAMS:
        yield key, node
    elif isinstance(node, list):
        for i, item in enumerate(node):
            yield from _refused(item, f"{key}[{i}]")
    elif isinstance(node, dict):
        files = node.get("class") == "logging.FileHandler" and node.get("filename") == _LOG_FILE
        for name in ("()", "class"):
            if name in node and node[name] not in _CLASSES and not files:
                yield f"{key}.{name}", str(node[name])
        for name, item in node.items():
            yield from _refused(item, f"{key}.{name}")
