"""Factories of environments: the base of every `env=`, with the limits of its episodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError
from lit_rl.environments.environment_base import Environment, Interactive
from lit_rl.environments.environment_pool import Pool
from lit_rl.environments.frames import AnswerRole
from lit_rl.environments.parser_base import Parser
from lit_rl.environments.tool_parsers import ParserName, check_parser
from lit_rl.environments.tools import Toolbox
from lit_rl.ops.ranges import AtLeastOne, AtLeastZero, Portion, Positive


class EnvironmentKind(ABC):
    """One kind of environment: what is the same in all its episodes."""

    toolbox: Toolbox | None = None
    """Tools that the chat template renders; None: the environment has no tools."""
    is_async: bool = False
    """True if any of its calls is awaited: then its episodes run at the same time."""
    opens: bool = False
    """True if an episode may begin with an observation."""
    gives_reward: bool = False
    """True if its episodes have a reward of their own."""
    has_state: bool = True
    """True if a reply depends on earlier turns, so that an environment made again has to replay them all."""

    @property
    def answers_as(self) -> AnswerRole:
        """The role of what answers the policy."""
        return "user" if self.toolbox is None else "tool"

    @abstractmethod
    def make(self, parser: Parser | None) -> Environment:
        """Return a new environment for one episode. A kind with tools gets the parser of their calls."""

    def check_columns(self, columns: Sequence[str]) -> None:  # noqa: B027 (optional)
        """Refuse data whose rows it could not begin with.

        Raises:
            ConfigError: names the argument and the columns.
        """


@checked("env")
class EnvironmentFactory(Interactive, ABC):
    """Abstract: subclasses say which kinds of environments there are.

    Args:
        parser: Form of tool calls; ``auto`` goes by the tokenizer and its chat template.
        call_pattern: With ``parser=regex``, one call as a regular expression with the groups ``name`` and
            ``arguments``, see `RegexParser`. None: ``name(1, "two")``.
        max_turns: Turns of the policy in an episode, 1 or more.
        max_tokens: Tokens of an episode, the policy's and those that it is answered; ``sampling.max_new_tokens`` are
            those of one turn. None: 2048, or as many as the model's context leaves.
        max_observation_tokens: Tokens of an answer; what is longer is cut, and marked. None: 512, or a quarter of what
            the context leaves, where that is less.
        step_timeout: Seconds that an answer, a reset or a reward may take.
        episode_timeout: Seconds that an episode may take from the end of its first turn on, generation included; None
            is no limit. It is looked at when a turn is over and while the environment answers: no turn is cut.
        rollout_timeout: Seconds that the episodes of one draw may take together from the first reset on, generation
            included; those that then go on are out of time, and the others are learned from. None is no limit.
        max_failed: Share of a rollout's episodes that may fail or run into a time limit. They are not learned from;
            more of them end the run.
        seed: ``group``: the episodes of one prompt begin with the same seed. ``sample``: each with its own.
        workers: Processes of each rank in which environments and tools run, and which are killed where a call takes too
            long; what is named has to be named by its path. 0: they run in the training process.
        memory_mb: Most memory of each worker, in MiB of address space; None is no limit.
        journal: Write replies to disk, in ``env_journal`` of the run's folder or in a folder that is named, so that a
            run which is killed in the middle of a rollout does not ask for them again when it is resumed.

    Raises:
        ConfigError: a setting is out of range.
    """

    def __init__(  # noqa: PLR0913 (one keyword a setting, as in the config)
        self,
        *,
        parser: ParserName = "auto",
        call_pattern: str | None = None,
        max_turns: AtLeastOne = 8,
        max_tokens: AtLeastOne | None = None,
        max_observation_tokens: AtLeastOne | None = None,
        step_timeout: Positive = 30.0,
        episode_timeout: Positive | None = None,
        rollout_timeout: Positive | None = None,
        max_failed: Portion = Interactive.max_failed,
        seed: Literal["group", "sample"] = "group",
        workers: AtLeastZero = 0,
        memory_mb: AtLeastOne | None = None,
        journal: bool | str = False,
    ) -> None:
        check_parser(parser, call_pattern, "env.")
        self.parser, self.call_pattern = parser, call_pattern
        sizes = {"max_tokens": max_tokens, "max_observation_tokens": max_observation_tokens}
        self.max_turns, self.untyped = max_turns, frozenset(key for key, size in sizes.items() if size is None)
        self.max_tokens = Interactive.max_tokens if max_tokens is None else max_tokens
        self.max_observation_tokens = 512 if max_observation_tokens is None else max_observation_tokens
        self.step_timeout, self.episode_timeout, self.max_failed = step_timeout, episode_timeout, max_failed
        self.rollout_timeout = rollout_timeout
        self.seed: Literal["group", "sample"] = seed
        if memory_mb is not None and not workers:
            raise ConfigError(
                f"env.memory_mb={memory_mb} limits a worker process, but env.workers=0 starts none. Set "
                "env.workers=1 or more."
            )
        if not isinstance(journal, (bool, str)) or journal == "":
            raise ConfigError(
                f"env.journal={journal!r}: allowed are true, false, or the folder to write the replies to."
            )
        self.pool = Pool(workers, memory_mb) if workers else None
        self.journal = journal

    @property
    @abstractmethod
    def kinds(self) -> Mapping[str, EnvironmentKind]:
        """Every kind by its name."""

    def kind_of(self, row: Mapping[str, Any]) -> str:
        """Return the name of the kind that a row of the data is for.

        Raises:
            ConfigError: it names none of them.
        """
        return next(iter(self.kinds))

    @property
    def is_async(self) -> bool:
        """True if episodes run at the same time."""
        return self.pool is not None or any(kind.is_async for kind in self.kinds.values())

    @property
    def gives_reward(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(kind.gives_reward for kind in self.kinds.values())

    def check_columns(self, columns: Mapping[str, Sequence[Any]] | Sequence[str]) -> None:
        """Refuse data that the environments could not begin with.

        Raises:
            ConfigError: see `EnvironmentKind.check_columns`.
        """
        super().check_columns(columns)
        for kind in self.kinds.values():
            kind.check_columns(list(columns))


Functions = Sequence[str | Callable[..., Any]]
"""Tools: functions, or their paths."""
