"""`env=gymnasium`: environments that are registered with gymnasium, as text; and episodes of random actions to
imitate."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import BackendError, ConfigError, did_you_mean, excerpt
from lit_rl.core.process_state import preserve_process_state
from lit_rl.core.user_functions import load_by_path
from lit_rl.environments.environment_base import Environment
from lit_rl.environments.environment_pool import target_of
from lit_rl.environments.environment_worker import Target
from lit_rl.environments.factory import EnvironmentFactory, EnvironmentKind
from lit_rl.environments.games import GameDemonstrations
from lit_rl.environments.parser_base import Parser
from lit_rl.environments.text_game import (
    DiscreteReader,
    FunctionPath,
    TextGame,
    make_action_reader,
    make_renderer,
    render_as_text,
    render_modes,
)
from lit_rl.environments.user_environments import SteppedEnvironment, UserClass
from lit_rl.ops.ranges import AtLeastOne

_WORKER_MODULE = "lit_rl.environments.text_game"
"""The module that makes environments in workers."""


@checked("env")
class GymnasiumEnvironment(EnvironmentFactory):
    """Environments that are registered with gymnasium, of which every episode gets a new one.

    Args:
        id: Id of the environment, such as ``FrozenLake-v1``; ``package:Name-v0`` imports the package that registers it.
        options: Further arguments of ``gymnasium.make``.
        actions: Words for the actions of a `Discrete` space, in the order of their numbers; empty: the policy writes
            the number.
        observation: ``value``: the policy reads the observation. ``render``: it reads what the environment renders as
            text, with ``render_mode="ansi"`` if `options` has no other. Colours become words.
        read: A function from the text of a turn to an action, or its path, ``./file.py:name``. It raises `ValueError`
            or gives None where there is none.
        show: A function from an observation to the text that the policy reads, or its path.
        limits: Further arguments of `EnvironmentFactory`.

    Raises:
        BackendError: gymnasium, or what the environment needs beside it, is not installed.
        ConfigError: there is no such environment; it does not take the options; or nothing says how its actions or
            observations are texts.
    """

    def __init__(
        self,
        id: str,
        *,
        options: dict[str, Any] | None = None,
        actions: Sequence[str] = (),
        observation: Literal["value", "render"] = "value",
        read: str | Callable[[str], Any] | None = None,
        show: str | Callable[[Any], str] | None = None,
        **limits: Any,
    ) -> None:
        super().__init__(**limits)
        if observation == "render" and show is not None:
            raise ConfigError(
                "env.show and env.observation=render are both set, and each of them decides what the policy reads. "
                "Keep one."
            )
        self._options = {**(options or {})}
        if observation == "render":
            self._options = {"render_mode": "ansi", **self._options}
        with preserve_process_state(f"env: {id}"), _probed(id, self._options) as made:
            self._name = str(made.spec.id)
            self.actions = make_action_reader(made.action_space, actions, _function(read, "env.read"), repr(self._name))
            self._show = render_as_text
            if observation == "value":
                self._show = make_renderer(made, _function(show, "env.show"), self._name)
            try:
                first, _ = made.reset(seed=0)
                begins = self._show(made, first)
            except Exception as error:  # of the environment, or of the user's function
                raise ConfigError(f"env: {self._name!r} cannot begin: {type(error).__name__}: {error}.") from error
            if not isinstance(begins, str):
                raise ConfigError(
                    f"env.show returned {excerpt(repr(begins))} for the first observation; it has to return a str."
                )
        self._options = {"disable_env_checker": True, **self._options}  # the probe ran the checker already
        described = UserClass(self.made, self._name, "step")
        if self.pool is not None:
            keywords = {"id": id, "options": self._options, "words": list(actions), "rendered": observation == "render"}
            keywords |= {"read": _function_path(read, "env.read"), "show": _function_path(show, "env.show")}
            target = Target(_WORKER_MODULE, None, "made_in_worker", keywords)
            described.make = self.pool.objects(target, described.methods)
            self.pool.modules.append(_WORKER_MODULE)
        self._kinds = {"gymnasium": _GymnasiumKind(described)}

    @property
    def kinds(self) -> Mapping[str, EnvironmentKind]:
        return self._kinds

    def made(self) -> TextGame:
        """Return a new environment. The caller closes it."""
        return TextGame(_gymnasium().make(self._name, **self._options), self.actions, self._show)


class _GymnasiumKind(EnvironmentKind):
    opens = gives_reward = True

    def __init__(self, described: UserClass) -> None:
        self._described = described

    def make(self, parser: Parser | None) -> Environment:
        return SteppedEnvironment(self._described.make(), self._described)


def _function(function: str | Callable[..., Any] | None, key: str) -> Callable[..., Any] | None:
    found = load_by_path(function, key).value if isinstance(function, str) else function
    if found is not None and not callable(found):
        raise ConfigError(f"{key}={function!r} is a {type(found).__name__}, not a function.")
    return found


def _function_path(function: str | Callable[..., Any] | None, key: str) -> FunctionPath | None:
    """Return the path by which a worker finds a function."""
    if function is None:
        return None
    _, target = target_of(function, key)
    return target.source, target.text, target.name


def _gymnasium() -> ModuleType:
    try:
        import gymnasium
    except ImportError as error:
        raise BackendError("env=gymnasium needs the package gymnasium: pip install 'lit-rl[gymnasium]'.") from error
    return gymnasium


@contextlib.contextmanager
def _probed(id: str, options: Mapping[str, Any]) -> Iterator[Any]:
    """Yield one environment, closed afterwards."""
    gymnasium = _gymnasium()
    try:
        made = gymnasium.make(id, **options)
    except gymnasium.error.DependencyNotInstalled as error:
        raise BackendError(f"env.id={id!r} needs a package that is not installed. gymnasium: {error}") from error
    except (gymnasium.error.UnregisteredEnv, ModuleNotFoundError) as error:
        raise ConfigError(
            f"env.id={id!r} is no environment of gymnasium ({error}).{did_you_mean(id, gymnasium.registry)} Registered "
            f"are {', '.join(_newest(gymnasium.registry))}. Others are registered by a package: env.id=package:Name-v0."
        ) from error
    except Exception as error:  # an environment may raise anything for its options
        raise ConfigError(
            f"env.id={id!r} with env.options={dict(options)} cannot be made: {type(error).__name__}: {error}."
        ) from error
    with contextlib.closing(made):
        wanted, modes = options.get("render_mode"), render_modes(made)
        if wanted is not None and wanted not in modes:
            raise ConfigError(
                f"env.id={id!r} does not render {wanted!r}, which env.observation=render or env.options.render_mode "
                f"asks for. It renders {', '.join(modes) or 'nothing'}."
            )
        yield made


def _newest(registry: Mapping[str, Any]) -> list[str]:
    """Return the ids of the highest version of each name."""
    newest: dict[tuple[Any, str], Any] = {}
    for spec in registry.values():
        newest[spec.namespace, spec.name] = max(
            (spec, newest.get((spec.namespace, spec.name), spec)), key=lambda each: each.version or 0
        )
    return sorted(spec.id for spec in newest.values())


@checked("data.task")
class RandomPlay(GameDemonstrations):
    """Episodes in which every action is drawn at random:

    `{"prompt": "lake 0", "completion": "2"}`, `{"prompt": "lake 02<|im_end|>1", "completion": "0"}`, a row for each
    turn. A policy that imitates them writes actions, and what is worth doing is left to learn.

    Args:
        id: Id of the environment, as `GymnasiumEnvironment` takes it; its actions are `Discrete`.
        prompt: A text, that of the rows which are learned from afterwards.
        options: See `GymnasiumEnvironment`.
        actions: See `GymnasiumEnvironment`.
        observation: See `GymnasiumEnvironment`.
        games: Episodes, 1 or more.
        turns: Longest episode, in turns, 1 or more.
        end: The text of the token that ends a turn of the policy.
        seed: Seed of the episodes.

    Raises:
        BackendError, ConfigError: see `GymnasiumEnvironment`.
    """

    def __init__(  # noqa: PLR0913 (one keyword a setting, as in the config)
        self,
        id: str,
        prompt: str,
        *,
        options: dict[str, Any] | None = None,
        actions: Sequence[str] = (),
        observation: Literal["value", "render"] = "value",
        games: AtLeastOne = 1000,
        turns: AtLeastOne = 8,
        end: str = "<|im_end|>",
        seed: int = 0,
    ) -> None:
        super().__init__(games, turns, end, seed)
        self._environment = GymnasiumEnvironment(id, options=options, actions=actions, observation=observation)
        if not isinstance(self._environment.actions, DiscreteReader):
            raise ConfigError(f"data.task.id={id!r}: its actions are not Discrete.")
        self._actions = self._environment.actions
        self.prompt = prompt

    def _game(self, draw: random.Random) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        with contextlib.closing(self._environment.made()) as game:
            text = self.prompt + game.reset(seed=draw.getrandbits(31))
            for _ in range(self.turns):
                action = self._actions.write(draw.randrange(self._actions.count))
                rows.append({"prompt": text, "completion": action})
                observation, _, terminated, truncated, _ = game.step(action)
                if terminated or truncated:
                    break
                text += f"{action}{self.end}{observation}"
        return rows
