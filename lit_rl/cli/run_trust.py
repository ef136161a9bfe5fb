"""Trust in the run folder of somebody else: code that its config would run is refused, until the command line trusts
it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from omegaconf import DictConfig

from lit_rl.cli.targets import ALLOWED, check_target, targets
from lit_rl.core.errors import ConfigError

_NAMES_CODE = (
    "lit_rl.core.event_loops.",
    "lit_rl.core.user_functions.",
    "lit_rl.rewards.",
    "lit_rl.environments.",
    "lit_rl.data.tasks.VerifiersTasks.",
    "lit_rl.generation.rollout_function.",
    "lit_rl.algorithms.optim.optimizers.ByPath.",
    "lit_rl.algorithms.optim.schedules.ScheduleByPath.",
)
"""Objects of ours that import a module or a Python file by its path, or start a program."""

_BUILTIN = tuple(
    f"lit_rl.{name}."
    for name in (
        *("rewards.text_rewards", "rewards.token_rewards", "rewards.math_rewards"),
        *(f"rewards.task_rewards.{name}" for name in ("environment", "environment_turns")),
        *(f"rewards.task_rewards.{name}" for name in ("ReasoningGymScore", "ReasoningGymExact")),
        *("rewards.weighted_rewards.Rewards", "rewards.judges.RewardJudge", "environments.games"),
    )
)
"""Objects among these that compute from texts alone, or make rows: they run nobody's code, ask no server and load no
model."""

_OUR_RECIPE = re.compile(r"lit_rl\.data\.recipes[.:]\w+")
"""A path of a function from row to row that comes with this package."""

_KERNELS = ("allow_all_kernels", "use_kernels")
"""Arguments of `from_pretrained` with which transformers fetches kernels from a hub, and runs them."""


def check(parts: dict[str, Any], config: DictConfig) -> None:
    """Refuse parts of a run's config that may not be built, or whose building runs code of the run's author.

    Args:
        parts: Nodes that are about to be built, by key.
        config: Config of the command line.

    Raises:
        ConfigError: names the key, and how to trust the run.
    """
    found = code_in(parts, config.allow_targets)
    if config.trust_run:
        return
    for key, what in found:
        raise ConfigError(
            f"{key}={what} of the run's config.yaml runs code, or asks a server or a model, that the run's author "
            "chose. Where you trust the run, say trust_run=true."
        )


def code_in(parts: dict[str, Any], allow_targets: Iterable[str]) -> list[tuple[str, Any]]:
    """Return keys, and their values, with which a run's author has chosen code that runs.

    Raises:
        ConfigError: a part may not be built at all.
    """
    allowed = (*ALLOWED, *(f"{name}." for name in allow_targets))
    found = {key: check_target(key, target, allowed) for key, target in targets(parts)}
    named = ((key, made) for key, made in found.items() if f"{made}.".startswith(_NAMES_CODE))
    chosen = ((key, made) for key, made in named if not f"{made}.".startswith(_BUILTIN))
    return [*chosen, *_row_functions(parts), *_remote_code(parts)]


def _row_functions(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys, and their values, that name a function from row to row by its path; those of the package are
    known."""
    children = enumerate(node) if isinstance(node, list) else node.items() if isinstance(node, dict) else ()
    for name, item in children:
        inner = f"{key}[{name}]" if isinstance(node, list) else f"{key}.{name}" if key else str(name)
        if name == "map_row" and isinstance(item, str) and not _OUR_RECIPE.fullmatch(item):
            yield inner, item
        yield from _row_functions(item, inner)


def _remote_code(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys, and their values, with which transformers runs code that comes with a model, or a kernel of a hub."""
    if isinstance(node, list):
        for i, item in enumerate(node):
            yield from _remote_code(item, f"{key}[{i}]")
    elif isinstance(node, dict):
        for name, item in node.items():
            inner = f"{key}.{name}" if key else str(name)
            fetched = name == "attn_implementation" and "/" in str(item)
            if fetched or (name in ("trust_remote_code", *_KERNELS) and item):
                yield inner, item
            yield from _remote_code(item, inner)
