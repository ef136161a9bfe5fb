"""`env=gymnasium`: environments that are registered with gymnasium, in text."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

from lit_rl.by_path import named_by
from lit_rl.data.checks import excerpt
from lit_rl.environments.base import Environment
from lit_rl.environments.factory import EnvironmentFactory, EnvironmentKind
from lit_rl.environments.parsers import Parser
from lit_rl.environments.pool import target_of
from lit_rl.environments.spaces import actions_of
from lit_rl.environments.text_game import Place, TextGame, render_modes, show_rendered, shown_by
from lit_rl.environments.user_class import UserClass
from lit_rl.environments.with_steps import ObjectWithSteps
from lit_rl.environments.worker import Target
from lit_rl.errors import BackendError, ConfigError, did_you_mean, one_of
from lit_rl.process_state import process_kept

_WORKER_MODULES = [
    "lit_rl.data.checks",
    "lit_rl.environments.colours",
    "lit_rl.environments.spaces",
    "lit_rl.environments.text_game",
]


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
        one_of("env.observation", observation, ("value", "render"))
        if observation == "render" and show is not None:
            raise ConfigError("env.show and env.observation=render: either says what the policy reads.")
        self._options = {**(options or {})}
        if observation == "render":
            self._options = {"render_mode": "ansi", **self._options}
        with process_kept(f"env: {id}"), _looked_at(id, self._options) as made:
            self._name = str(made.spec.id)
            self.actions = actions_of(made.action_space, actions, _function(read, "env.read"), repr(self._name))
            self._show = show_rendered
            if observation == "value":
                self._show = shown_by(made, _function(show, "env.show"), self._name)
            self._check_begins(made)
        self._options = {"disable_env_checker": True, **self._options}  # the probe ran the checker already
        described = UserClass(self.made, self._name, "step")
        if self.pool is not None:
            keywords = {"id": id, "options": self._options, "words": list(actions), "rendered": observation == "render"}
            keywords |= {"read": _place(read, "env.read"), "show": _place(show, "env.show")}
            target = Target("lit_rl.environments.text_game", None, "made_in_worker", keywords)
            described.make = self.pool.objects(target, described.methods)
            self.pool.modules += _WORKER_MODULES
        self._kinds = {"gymnasium": _Registered(described)}

    @property
    def kinds(self) -> Mapping[str, EnvironmentKind]:
        return self._kinds

    def made(self) -> TextGame:
        """Return a new environment. The caller closes it."""
        return TextGame(_gymnasium().make(self._name, **self._options), self.actions, self._show)

    def _check_begins(self, made: Any) -> None:
        """Refuse what cannot begin an episode, or begins with what is no text."""
        try:
            observation, _ = made.reset(seed=0)
            begins = self._show(made, observation)
        except Exception as error:  # of the environment, or of the user's function
            raise ConfigError(f"env: {self._name!r} cannot begin: {type(error).__name__}: {error}.") from error
        if not isinstance(begins, str):
            raise ConfigError(f"env.show made {excerpt(repr(begins))} of an observation, which is no text.")


class _Registered(EnvironmentKind):
    opens = gives_reward = True

    def __init__(self, described: UserClass) -> None:
        self._described = described

    def make(self, parser: Parser | None) -> Environment:
        return ObjectWithSteps(self._described.make(), self._described)


def _function(function: str | Callable[..., Any] | None, key: str) -> Callable[..., Any] | None:
    found = named_by(function, key).value if isinstance(function, str) else function
    if found is not None and not callable(found):
        raise ConfigError(f"{key}={function!r} is a {type(found).__name__}, and no function.")
    return found


def _place(function: str | Callable[..., Any] | None, key: str) -> Place | None:
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
def _looked_at(id: str, options: Mapping[str, Any]) -> Iterator[Any]:
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
