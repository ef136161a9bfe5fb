"""The source of rollouts: from a batch of prompts to completions, drawn now or while the last rollout was learned from.

Everything that a completion can be enters here: one answer today, and an episode of several turns with its environment,
or an answer to an image, by the same request.

With `generator.lag=1`, rollout k takes what was asked for when rollout k - 1 began, so it was drawn with the weights of
then. The engine is then given the weights of now and asked for rollout k + 1, in a thread, while this one is learned
from. What the weights have moved since is in the log-probs that the engine reported: the correction weighs by it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lit_rl.algorithms.ranks import Ranks
from lit_rl.algorithms.rollouts import state
from lit_rl.algorithms.rollouts.episodes import Failures
from lit_rl.algorithms.rollouts.plan import mix
from lit_rl.algorithms.rollouts.stopwatch import Stopwatch
from lit_rl.data.image_prompts import Processor
from lit_rl.environments.source import EpisodeSource
from lit_rl.errors import GenerationError, LitRLError
from lit_rl.generation.ahead import Ahead, Name
from lit_rl.generation.base import EngineLost, Generator
from lit_rl.generation.collect import Vocabulary, request
from lit_rl.generation.native import for_another_policy
from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.ops.step import Highest, Metrics
from lit_rl.rollout import Completions, PromptBatch, Sampling
from lit_rl.vision import PromptVision


@dataclass(frozen=True)
class RolloutRequest:
    """What is to be completed, and by whom."""

    batch: PromptBatch
    policy: nn.Module
    model: LanguageModel
    """The description of the policy, for its tokenizer."""
    version: int
    """Optimizer steps that the policy has taken."""
    sampling: Sampling
    group_size: int
    """Completions of each prompt."""
    seed: int
    """Of the samples."""
    interaction: EpisodeSource | None = None
    """What answers the policy's turns. None: a completion is one turn."""
    on_finished: Callable[[int, list[int]], None] | None = None
    """Is told of completions of one turn that are finished while others are still written."""

    def by_another(self, policy: nn.Module) -> RolloutRequest:
        """The same of another model, whose noise is its own: with the same noise two equal models write the same."""
        return replace(self, policy=policy, seed=mix(self.seed, 1))


class RolloutSource:
    """Draws completions with a generator, and knows how long that took.

    Args:
        generator: What draws.
        stopwatch: Takes the seconds of the phase "generate", and those in it that environments were waited for.
    """

    def __init__(self, generator: Generator, stopwatch: Stopwatch) -> None:
        self.generator = generator
        self.sampled_tokens = 0
        """Drawn for the rollout at hand, also those that nothing was learned from."""
        self.failures = Failures()
        """Of the episodes that were drawn for the rollout at hand."""
        self._stopwatch = stopwatch
        self._ahead = Ahead()

    def begin_rollout(self) -> None:
        """What is drawn from now on is drawn for another rollout."""
        self.sampled_tokens = 0
        self.failures = Failures()

    # ------------------------------------------------------------------ now

    def draw(self, asked: RolloutRequest, ranks: Ranks) -> Completions:
        """The completions, with groups that are numbered over all ranks."""
        with self._stopwatch.measure("generate"), self._waited(asked.interaction):
            completions = self._begin(asked)()
        return self._received(completions, asked.batch, ranks)

    @contextmanager
    def _waited(self, interaction: EpisodeSource | None) -> Iterator[None]:
        before = 0.0 if interaction is None else interaction.waited
        yield
        if interaction is not None:
            self._stopwatch.add_part("environment", interaction.waited - before)

    def draw_other(self, asked: RolloutRequest) -> Completions:
        """The completions of another model than the policy, which is `asked.policy` here.

        They are drawn with a copy of the generator, so that the policy's never holds other weights.
        """
        with self._stopwatch.measure("generate"):
            completions = _ask(copy.copy(for_another_policy(self.generator)), asked)()
        self.sampled_tokens += int(completions.lengths.sum())
        return completions

    def _begin(self, asked: RolloutRequest) -> Callable[[], Completions]:
        """Give the generator the weights of now. What is returned draws the completions when it is called."""
        self._ahead.wait()  # the weights of a request in flight stay as they are
        return _ask(self.generator, asked)

    def _received(self, completions: Completions, batch: PromptBatch, ranks: Ranks) -> Completions:
        self.sampled_tokens += int(completions.lengths.sum())
        self.failures.count(completions.episodes or ())
        return replace(completions, group_id=completions.group_id + ranks.rank * len(batch))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Draw what is no part of the rollout at hand: neither its seconds nor its tokens count."""
        sampled, failures = self.sampled_tokens, self.failures
        self.failures = Failures()
        with self._stopwatch.aside():
            yield
        self.sampled_tokens, self.failures = sampled, failures

    # ------------------------------------------------------------------ ahead

    def request_ahead(self, asked: RolloutRequest) -> None:
        """Begin to draw the completions of the next rollout, with the weights of now. Once a rollout."""
        with self._stopwatch.measure("generate"):  # the update of the engine: nothing else goes on
            try:
                draw = self._begin(asked)
            except GenerationError as error:
                error.on_every_rank = True  # ranks fail to update an engine together
                raise
        self._ahead.start(_name(asked.batch), draw)

    def take_ahead(self, asked: RolloutRequest, ranks: Ranks, *, oldest: int) -> Completions | None:
        """What was drawn for this rollout while the one before it was learned from; None where nothing was.

        Args:
            asked: The prompts of this rollout, and the policy of now.
            ranks: They all draw anew, or none, and all fail, or none: to bring an engine back is a collective.
            oldest: Optimizer steps that the completions may be behind the policy.

        Raises:
            GenerationError: the generator of any rank failed, or the completions are too old.
        """
        if not self.generator.lag and not self._ahead.pending:
            return None
        found, error = None, None
        with self._stopwatch.measure("generate"):
            try:
                found = self._ahead.take()
            except LitRLError as failed:
                error = failed
        worst = max(ranks.counts(0 if error is None else 1 if isinstance(error, EngineLost) else 2))
        if worst == 2:
            raise error or _other_rank()
        if error is not None:
            rank_zero_warn(f"{error} What was drawn ahead is lost with it, and drawn with the weights of now.")
        if found is None or worst:
            return None
        name, completions = found
        if name != _name(asked.batch):
            rank_zero_warn(
                f"Completions were drawn ahead for rollout {name[0]}, and this is rollout {asked.batch.rollout} of "
                "other prompts: they are thrown away, and drawn with the weights of now."
            )
            return None
        if (age := asked.version - completions.version) > oldest:
            raise GenerationError(
                f"The completions of rollout {asked.batch.rollout} are {age} optimizer steps old; with "
                f"generator.lag={self.generator.lag} they may be {oldest}. They are not learned from."
            )
        return self._received(completions, asked.batch, ranks)

    # ------------------------------------------------------------------ the generator

    def proof(self, device: torch.device) -> Metrics:
        """What the generator saw when it held its engine's log-probs against the policy's, after the last update."""
        gap = self.generator.gap
        if gap is None:
            return {}
        mean, most = torch.tensor([gap.mean, gap.max], device=device)
        name = "sampling/sampling_logp_difference"
        return {f"{name}/probe_mean": (mean, torch.ones_like(mean)), f"{name}/probe_max": Highest(most)}

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """The completions drawn ahead; waits until they are."""
        found = self._ahead.peek()
        if found is None:
            return {}
        (rollout, rows), completions = found
        return {"ahead": {"rollout": rollout, "rows": list(rows), "completions": state.to_plain(completions)}}

    def load_state(
        self,
        saved: dict[str, Any],
        device: torch.device,
        see: Callable[[int], PromptVision | None],
        processor: Callable[[], Processor | None],
    ) -> None:
        """The counterpart of `state`; `see` and `processor` are those of `state.made`."""
        if ahead := saved.get("ahead"):
            name = ahead["rollout"], tuple(ahead["rows"])
            self._ahead.put(name, state.made(state.completions_of(ahead["completions"], device), see, processor))


@contextmanager
def failing_together(ranks: Ranks) -> Iterator[None]:
    """Where the generator of any rank fails, all ranks raise, so they can still save together.

    Raises:
        GenerationError: the generator of this rank, or of another one, failed.
    """
    failure: LitRLError | None = None
    try:
        yield
    except LitRLError as error:
        failure = error
    if ranks.world_size > 1 and ranks.any(failure is not None):
        failure = failure or _other_rank()
        if isinstance(failure, GenerationError):
            failure.on_every_rank = True
    if failure is not None:
        raise failure


def _ask(generator: Generator, asked: RolloutRequest) -> Callable[[], Completions]:
    return request(
        generator,
        asked.policy,
        asked.batch,
        sampling=asked.sampling,
        group_size=asked.group_size,
        vocabulary=Vocabulary.of(asked.model),
        version=asked.version,
        seed=asked.seed,
        interaction=asked.interaction,
        on_finished=asked.on_finished,
    )


def _other_rank() -> GenerationError:
    return GenerationError("The generator of another rank failed: see what that rank says.")


def _name(batch: PromptBatch) -> Name:
    return batch.rollout, tuple(batch.rows)
