"""Interfaces of environments: one episode's `Environment`, and the `EpisodeSource` that a run draws episodes from."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, Self, TypeVar

from lit_rl.core.episode import End, Message
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Completions, PromptBatch, Prompts, Sampling

Opening = str | Sequence[Message] | None
"""The first observation of an environment: a text that goes on the end of the prompt's last message, messages after it,
or nothing. Parts of texts and images (`lit_rl.environments.observations.Content`), which have no role, go on the end of
the last message too."""


@dataclass(frozen=True)
class Turn:
    """A turn of the policy."""

    text: str
    """Without special tokens, and without what is thought apart."""
    written: str
    """The text, with the special tokens but for the one that ended it: calls of tools may be written with them."""
    cut: bool
    """True if it was cut at its maximal length, and did not end by itself."""
    thought: str = ""
    """Its thoughts, where a model writes them apart (gpt-oss); of other models thoughts are part of the text."""

    def message(self, content: str) -> Message:
        """Return the turn as a message of this content, with its thoughts under the key that templates read."""
        said: Message = {"role": "assistant", "content": content}
        return said | {"thinking": self.thought} if self.thought else said


@dataclass(frozen=True)
class Reply:
    """The reply to a turn."""

    said: Message
    """The policy's turn as a message, with the calls that were read in it."""
    messages: Sequence[Message] = ()
    """The replies, all of tools or all of the user. Those to the last turn are never read by the policy, and kept."""
    end: End | None = None
    """Why the episode is over with it; None: it goes on."""
    reward: float | None = None
    """The reward of the turn."""
    calls: int = 0
    failed_calls: int = 0
    unreadable_calls: int = 0


class Environment(ABC):
    """The environment of one episode: made for it, used by it alone, and closed after it."""

    @abstractmethod
    async def reset(self, seed: int, row: Mapping[str, Any]) -> Opening:
        """Begin the episode.

        Args:
            seed: In [0, 2^31). The episodes of one prompt have the same, so that they differ by what the policy does.
            row: The prompt and the other columns of the data's row.
        """

    @abstractmethod
    async def answer(self, turn: Turn) -> Reply:
        """Answer a turn of the policy."""

    async def reward(self) -> float | None:
        """Return the reward of the whole episode when it is over; None where it has none beside those of its turns."""
        return None

    @property
    def user_object(self) -> Any:
        """The object of the user's that answers, in this process; None where there is none."""
        return None

    async def close(self) -> None:  # noqa: B027 (optional)
        """Release its resources."""

    def timed_out(self, error: str) -> None:  # noqa: B027 (optional)
        """Record that the episode ran into a time limit, which the error names. Only `close` is called after it."""


Generate = Callable[[Prompts, Sampling], Completions]
"""A generator that has the policy's weights."""
Result = TypeVar("Result")


class RunTogether(Protocol):
    """A function that runs work; if ranks take a rollout together, all fail where one does."""

    def __call__(self, work: Callable[[], Result]) -> Result: ...


@dataclass(frozen=True)
class EpisodeRequest:
    """A request for the completions of a batch, to a source of episodes."""

    generate: Generate
    """The run's generator."""
    agree: RunTogether
    """Runs work that may fail on this rank alone."""
    batch: PromptBatch
    """The prompts, with the columns of their rows."""
    prompts: Prompts
    """The same prompts for a generator: tokens, noise keys, and the size of groups."""
    sampling: Sampling
    """Sampling settings; ``max_new_tokens`` are those of a turn."""
    row_keys: Sequence[int]
    """One a completion, any integers: what is random in it is drawn from its own."""
    prompt_keys: Sequence[int]
    """One a prompt, any integers: the same on all ranks that complete it."""
    context: float = 0
    """Tokens that a text and what is written behind it may have together, as far as the generator can tell; else 0."""
    version: int = 0
    """Optimizer steps that the policy has taken."""
    device: Any = "cpu"
    """The device of the policy."""


class Interactive:
    """The settings of `env=`, abstract. Subclassed by environments that answer the policy, and by functions of the
    user's that make whole rollouts."""

    max_tokens: int = 2048
    """Tokens of a completion, what the policy reads between its turns included."""
    max_branches: int = 1
    """Texts that the policy may read and write in an episode: with 1, a single one that goes on."""
    untyped: frozenset[str] = frozenset()
    """Names of the sizes that the user did not choose: they are lowered to what the model's context leaves."""
    converses: bool = True
    """True if the run's generator holds its conversations."""
    max_failed: float = 0.1
    """Share of a rollout's episodes that may fail; more end the run."""
    gives_reward: bool = False
    """True if episodes have a reward of their own."""
    journal: bool | str = False
    """True if replies are journaled for a run that is killed in the middle of a rollout; or in which folder."""
    columns: tuple[str, ...] = ("episodes",)
    """Names of the columns for rewards, beside those of the data."""
    has_objects: bool = False
    """True if episodes are answered by objects of a class of the user's."""
    given: Mapping[str, Any] = MappingProxyType({})
    """The constructor's arguments, by name: a part of a run's identity."""

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        made = super().__new__(cls)
        made.given = dict(zip(inspect.signature(cls).parameters, arguments, strict=False)) | named
        return made

    def check_columns(self, columns: Mapping[str, Sequence[Any]] | Sequence[str]) -> None:
        """Refuse data that it does not go with.

        Args:
            columns: Columns of a set of the data; their names, or by name.

        Raises:
            ConfigError: a column has the name of something that rewards get of episodes.
        """
        for name in self.columns:
            if name in columns:
                raise ConfigError(
                    f"The data has a column {name!r}, and reward functions get something of the episodes by this name: "
                    f"rename it, data.rename={{{name}:{name}_column}}."
                )


class EpisodeSource(ABC):
    """Abstract: makes the completions of a batch, each with its episode."""

    waited: float = 0.0
    """Seconds that were waited for environments so far, while nothing else was done."""

    @property
    @abstractmethod
    def settings(self) -> Interactive:
        """The settings that it was made from."""

    @abstractmethod
    def lengths(self, longest: int) -> dict[str, int]:
        """Return the tokens that prompt and completion may have, by the setting that needs them.

        Args:
            longest: Tokens of the longest prompt of the data.
        """

    def longest_prompt(self, longest: int) -> int:
        """Return the tokens that a prompt may have as the policy reads it, where the data's have at most `longest`."""
        return sum(self.lengths(longest).values()) - self.settings.max_tokens

    def template_kwargs(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of the chat template for the prompt of a row's episodes, its tools among them.

        Only where its settings say that it `converses`; others write prompts themselves.

        Args:
            row: The columns of the data's row.
        """
        raise NotImplementedError

    @abstractmethod
    def draw(self, request: EpisodeRequest) -> Completions:
        """Draw the completions of a batch."""

    def pop_metrics(self) -> Mapping[str, tuple[float, float]]:
        """Return the metrics of the episodes drawn since the last call, beside those of each episode: numerators and
        denominators by name."""
        return {}

    def saved(self, rollout: int) -> None:  # noqa: B027 (optional)
        """Prepare for a checkpoint that holds this rollout."""

    def forget(self) -> None:  # noqa: B027 (optional)
        """Forget the current rollout, which ends the run."""
