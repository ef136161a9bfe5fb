"""The source of rollouts: from a batch of prompts to completions, drawn now or while the last rollout was learned from.

All kinds of completions come by the same request: one answer, an episode of several turns with its environment, or an
answer to an image.

With `generator.lag=N`, rollout k takes what was requested when rollout k - N began, so it was drawn with the weights of
that time. While rollout k is learned from, the engine gets the current weights and draws rollout k + N. The change of
the weights since is in the log-probs that the engine reported: the correction weighs by it.

With N = 1 no request is in flight by then: the engine is updated at once, and a thread only draws. With more, rollouts
k + 1 to k + N - 1 may still be drawn, each with its older weights: the thread updates the engine when its turn comes,
from a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lit_rl import interruption
from lit_rl.algorithms.ranks import Ranks
from lit_rl.algorithms.rollouts import state
from lit_rl.algorithms.rollouts.episodes import Failures
from lit_rl.algorithms.rollouts.plan import mix
from lit_rl.algorithms.rollouts.stopwatch import Stopwatch
from lit_rl.data.image_prompts import Processor
from lit_rl.environments.source import EpisodeSource
from lit_rl.errors import GenerationError, LitRLError
from lit_rl.generation.ahead import Ahead, Drawn, Name
from lit_rl.generation.base import EngineLost, Gap, Generator
from lit_rl.generation.collect import Vocabulary, request
from lit_rl.generation.native import for_another_policy
from lit_rl.generation.ranks import beside
from lit_rl.interruption import Interrupted
from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.models.policy.tensor_parallel import is_spread
from lit_rl.models.reference.base import shared_copy
from lit_rl.ops.step import Highest, Metrics
from lit_rl.rollout import Completions, PromptBatch, Sampling
from lit_rl.transfers import to_device
from lit_rl.vision import PromptVision

_PATIENCE = 5.0
"""Seconds that a stopping run waits for completions drawn ahead."""


@dataclass(frozen=True)
class RolloutRequest:
    """A request for completions of prompts by a policy."""

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
    """Seed of the samples."""
    interaction: EpisodeSource | None = None
    """The source of replies to the policy's turns. None: a completion is one turn."""
    on_finished: Callable[[int, list[int]], None] | None = None
    """Callback for finished completions of one turn, while others are still written."""

    def by_another(self, policy: nn.Module) -> RolloutRequest:
        """Return the request for another model with noise of its own: with the same noise equal models write the
        same."""
        return replace(self, policy=policy, seed=mix(self.seed, 1))


class RolloutSource:
    """The source of completions, drawn with a generator and timed.

    Args:
        generator: The generator.
        stopwatch: Timer of the phase "generate", and of the waits for environments within it.
    """

    def __init__(self, generator: Generator, stopwatch: Stopwatch) -> None:
        self.generator = generator
        self.sampled_tokens = 0
        """Tokens drawn for the current rollout, including those that are not learned from."""
        self.failures = Failures()
        """Failures among the episodes drawn for the current rollout."""
        self._stopwatch = stopwatch
        self._ahead = Ahead()
        self._gap: Gap | None = None
        """The probe's result for the weights that drew the current rollout."""
        self._taken: tuple[Name, Drawn] | None = None
        """The completions drawn ahead for the current rollout."""

    def begin_rollout(self) -> None:
        """Begin another rollout: later draws count for it."""
        self.sampled_tokens = 0
        self.failures = Failures()
        self._taken = None

    @contextmanager
    def kept_if_given_up(self) -> Iterator[None]:
        """Keep the completions drawn ahead for the current rollout if it is aborted or fails, for a resume."""
        try:
            yield
        except (Interrupted, Exception):
            if self._taken is not None:
                self._ahead.put_first(*self._taken)
            raise

    # ------------------------------------------------------------------ now

    def draw(self, asked: RolloutRequest, ranks: Ranks) -> Completions:
        """Draw the completions, with groups numbered over all ranks."""
        with self._stopwatch.measure("generate"), self._waited(asked.interaction), self._given_up(asked):
            completions = self._begin(asked)()
        self._gap = self.generator.gap
        return self._received(completions, asked.batch, ranks)

    @contextmanager
    def _waited(self, interaction: EpisodeSource | None) -> Iterator[None]:
        before = 0.0 if interaction is None else interaction.waited
        yield
        if interaction is not None:
            self._stopwatch.add_part("environment", interaction.waited - before)

    def draw_other(self, asked: RolloutRequest) -> Completions:
        """Draw the completions of another model than the policy, given as `asked.policy`.

        A copy of the generator draws them, so that the policy's never holds other weights.
        """
        with self._stopwatch.measure("generate"), self._given_up(asked):
            completions = _ask(copy.copy(for_another_policy(self.generator)), asked)()
        self.sampled_tokens += int(completions.lengths.sum())
        return completions

    def _given_up(self, asked: RolloutRequest) -> AbstractContextManager[None]:
        """Return the context for a draw that may be aborted.

        Engine calls are collective. A generator that is the policy itself is called by each rank alone, unless its
        layers are cut over several.
        """
        return interruption.may_be_given_up(alone=self.generator.exact and not is_spread(asked.policy))

    def _begin(self, asked: RolloutRequest) -> Callable[[], Completions]:
        """Give the generator the current weights, and return the function that draws the completions."""
        self._ahead.wait()  # the weights of a request in flight must not change
        return _ask(self.generator, asked)

    def _received(self, completions: Completions, batch: PromptBatch, ranks: Ranks) -> Completions:
        found = replace(completions, group_id=completions.group_id + ranks.rank * len(batch)).with_host()
        self.sampled_tokens += int(found.on_host.lengths.sum())
        self.failures.count(found.episodes or ())
        return found

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Draw outside of the current rollout: neither seconds nor tokens count."""
        sampled, failures, gap = self.sampled_tokens, self.failures, self._gap
        self.failures = Failures()
        with self._stopwatch.aside():
            yield
        self.sampled_tokens, self.failures, self._gap = sampled, failures, gap

    # ------------------------------------------------------------------ ahead

    def request_ahead(self, asked: Sequence[RolloutRequest]) -> None:
        """Request the completions of coming rollouts, with the current weights. To be called once a rollout.

        Args:
            asked: The next rollouts, as many as the generator's lag; those already requested are skipped.
        """
        known = self._ahead.names
        new = [each for each in asked if _name(each.batch) not in known]
        if not new:
            return
        with self._stopwatch.measure("generate"):
            if self.generator.lag == 1:
                self._update_and_draw(*new)
            else:
                self._draw_with_a_copy(new)

    def _update_and_draw(self, asked: RolloutRequest) -> None:
        """Update the engine here, as that is a collective over ranks; then draw in a thread."""
        try:
            draw = self._begin(asked)
        except GenerationError as error:
            error.on_every_rank = True  # ranks fail to update an engine together
            raise

        def drawn() -> Drawn:
            with beside():
                return Drawn(draw(), self.generator.gap)

        self._ahead.start(_name(asked.batch), drawn)

    def _draw_with_a_copy(self, asked: Sequence[RolloutRequest]) -> None:
        """Update and draw in the thread, as there is one process; it also restarts a lost engine."""
        policy = shared_copy(asked[0].policy)
        for each in asked:
            self._ahead.start(_name(each.batch), _drawn_with(self.generator, replace(_seen_now(each), policy=policy)))

    def take_ahead(self, asked: RolloutRequest, ranks: Ranks, *, oldest: int) -> Completions | None:
        """Return the completions drawn ahead for this rollout; None where there are none.

        Args:
            asked: The prompts of this rollout, and the current policy.
            ranks: The ranks. All draw anew, or none, and all fail, or none: restarting an engine is a collective.
            oldest: Most optimizer steps that the completions may be behind the policy.

        Raises:
            GenerationError: the generator of any rank failed, or the completions are too old.
            Interrupted: any rank received a stop request while it waited.
        """
        if not self.generator.lag and not self._ahead.pending:
            return None
        found, error = None, None
        with self._stopwatch.measure("generate"):
            try:
                with interruption.may_be_given_up():
                    found = self._ahead.take()
            except (LitRLError, Interrupted) as failed:
                error = failed
        worst = max(ranks.counts(_how_bad(error)))
        if worst == _how_bad(Interrupted()):
            if found is not None:
                self._ahead.put_first(*found)
            raise Interrupted
        if worst == 2:
            raise error or _other_rank()
        if error is not None:
            rank_zero_warn(f"{error} Completions drawn ahead are lost with it, and drawn again with current weights.")
        if found is None or worst:
            return None
        name, drawn = found
        if name != _name(asked.batch):
            self._ahead.forget()
            rank_zero_warn(
                f"Completions were drawn ahead for rollout {name[0]}, and this is rollout {asked.batch.rollout} of "
                "other prompts: they are dropped, and drawn again with the current weights."
            )
            return None
        if (age := asked.version - drawn.completions.version) > oldest:
            raise GenerationError(
                f"The completions of rollout {asked.batch.rollout} are {age} optimizer steps old; with "
                f"generator.lag={self.generator.lag} they may be {oldest}. They are not learned from."
            )
        self._gap, self._taken = drawn.gap, found
        return self._received(drawn.completions, asked.batch, ranks)

    # ------------------------------------------------------------------ the generator

    def proof(self, device: torch.device) -> Metrics:
        """Return the metrics of the probe: the engine's log-probs against the policy's, after the last update.

        Where a thread updates the engine, the last update depends on timing: there it is that of the weights that drew
        the rollout.
        """
        gap = self._gap if self.generator.lag > 1 else self.generator.gap
        if gap is None:
            return {}
        mean, most = to_device(torch.tensor([gap.mean, gap.max]), device)
        name = "sampling/sampling_logp_difference"
        return {f"{name}/probe_mean": (mean, torch.ones_like(mean)), f"{name}/probe_max": Highest(most)}

    # ------------------------------------------------------------------ checkpoints

    def state(self, ranks: Ranks) -> dict[str, Any]:
        """Return the state with the completions drawn ahead, once they are.

        A stopping run waits for a few seconds only: missing ones are drawn anew by the resumed run, with newer weights.

        Args:
            ranks: The ranks. All keep equally many: drawing anew is a collective.
        """
        if not self.generator.lag and not self._ahead.pending:
            return {}
        drawn_ahead = self._ahead.peek(_PATIENCE if interruption.asked() else None)
        kept = [
            {"rollout": rollout, "rows": list(rows), **state.to_plain(drawn)}
            for (rollout, rows), drawn in drawn_ahead[: min(ranks.counts(len(drawn_ahead)))]
        ]
        return {"ahead": kept} if kept else {}

    def load_state(
        self,
        saved: dict[str, Any],
        device: torch.device,
        see: Callable[[int], PromptVision | None],
        processor: Callable[[], Processor | None],
    ) -> None:
        """Restore what `state` returned; `see` and `processor` are those of `state.made`."""
        self._ahead.forget()  # from another run in this process that ended early
        ahead = saved.get("ahead", [])
        for each in [ahead] if isinstance(ahead, dict) else ahead:  # earlier versions wrote the only one
            completions = state.made(state.completions_of(each["completions"], device), see, processor)
            gap = each.get("gap")
            name = each["rollout"], tuple(each["rows"])
            self._ahead.put(name, Drawn(completions, None if gap is None else Gap(**gap)))


@contextmanager
def failing_together(ranks: Ranks) -> Iterator[None]:
    """Raise on all ranks where the generator of any rank fails, so that they can still save together.

    Raises:
        GenerationError: the generator of this rank, or of another one, failed.
        Interrupted: see `given_up_together`.
    """
    failure: LitRLError | None = None
    with given_up_together(ranks):
        try:
            yield
        except LitRLError as error:
            failure = error
    if not ranks.alone and ranks.any(failure is not None):
        failure = failure or _other_rank()
        if isinstance(failure, GenerationError):
            failure.on_every_rank = True
    if failure is not None:
        raise failure


@contextmanager
def given_up_together(ranks: Ranks) -> Iterator[None]:
    """Abort on all ranks where any rank aborts its work because of a stop request.

    Raises:
        Interrupted: this rank, or another one, aborted.
    """
    if not interruption.agrees():
        yield
        return
    try:
        with interruption.agreed():
            yield
    except Interrupted:
        interruption.agree_to_stop()
    if ranks.any(interruption.asked()):
        interruption.agree_to_stop()
        raise Interrupted


def _how_bad(error: BaseException | None) -> int:
    """Return the severity shared by ranks: 0 ok, 1 engine lost, 2 error, 3 interrupted; 2 and more end the run."""
    if isinstance(error, Interrupted):
        return 3
    return 0 if error is None else 1 if isinstance(error, EngineLost) else 2


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


def _drawn_with(generator: Generator, asked: RolloutRequest) -> Callable[[], Drawn]:
    """Return a function for a thread: give the generator the weights of a private policy, and draw."""

    def draw() -> Drawn:
        # Autocast's cache of cast weights is global. Leaving its outermost region in any thread clears it, so this
        # thread never does: the training would cast a weight anew, and sum its gradient in another order.
        torch.autocast_increment_nesting()
        # A thread begins with gradients, on the first GPU, and without autocast: the engine is compared with the plain
        # weights.
        with torch.no_grad(), torch.cuda.device_of(next(asked.policy.parameters())):
            return Drawn(_ask(generator, asked)(), generator.gap)

    return draw


def _seen_now(asked: RolloutRequest) -> RolloutRequest:
    """Return the request with the pixels of its prompts made now: the training uses the same processor."""
    batch = asked.batch
    if batch.vision is None:
        return asked
    seen = batch.vision(batch.rows)
    return replace(asked, batch=replace(batch, vision=lambda rows: seen))


def _other_rank() -> GenerationError:
    return GenerationError("The generator of another rank failed: see what that rank says.")


def _name(batch: PromptBatch) -> Name:
    return batch.rollout, tuple(batch.rows)
