"""The source of rollouts: from a batch of prompts to completions, drawn now or while the last rollout was learned from.

All kinds of completions come by the same request: one answer, an episode of several turns with its environment, or an
answer to an image. Rewards may begin while other completions of the batch are still written (`EarlyRewards`).

With `generator.lag=N`, rollout k takes what was requested when rollout k - N began, so it was drawn with the weights of
that time. While rollout k is learned from, the engine gets the current weights and draws rollout k + N. The change of
the weights since is in the log-probs that the engine reported: the correction weighs by it.

With N = 1 no request is in flight by then: the engine is updated at once, and a thread only draws. With more, rollouts
k + 1 to k + N - 1 may still be drawn, each with its older weights: the thread updates the engine when its turn comes,
from a copy.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.rollouts import checkpoints
from lit_rl.algorithms.rollouts.phase_costs import Stopwatch
from lit_rl.algorithms.rollouts.rollout_plan import mix
from lit_rl.core import interrupts
from lit_rl.core.episode import Episode
from lit_rl.core.errors import GenerationError, LitRLError
from lit_rl.core.interrupts import Interrupted
from lit_rl.core.ranks import background_thread
from lit_rl.core.rollout import Completions, PromptBatch
from lit_rl.core.transfers import to_device
from lit_rl.core.vision_inputs import PromptVision
from lit_rl.data.visual_prompts import Processor
from lit_rl.generation.collect import RolloutRequest, answer_to, as_reward_input
from lit_rl.generation.generator import EngineLost, Gap, Generator
from lit_rl.generation.native import for_another_policy
from lit_rl.models.sharding import is_tensor_parallel
from lit_rl.models.trunk import shared_copy
from lit_rl.ops.reductions import Highest, Metrics
from lit_rl.rewards.jobs import TrainerState
from lit_rl.rewards.weighted_rewards import PendingRewards, Rewards

_PATIENCE = 5.0
"""Seconds that a stopping run waits for completions drawn ahead."""


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
        self.episodes: list[Episode] = []
        """The episodes drawn for the current rollout, including those that are not learned from."""
        self._stopwatch = stopwatch
        self._ahead = Ahead()
        self._gap: Gap | None = None
        """The probe's result for the weights that drew the current rollout."""
        self._taken: tuple[RolloutName, DrawnAhead] | None = None
        """The completions drawn ahead for the current rollout."""

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Begin another rollout: draws inside count for it. If it is aborted or fails, the completions that were drawn
        ahead for it are kept for a resume."""
        self.sampled_tokens, self.episodes, self._taken = 0, [], None
        try:
            yield
        except (Interrupted, Exception):
            if self._taken is not None:
                self._ahead.put_first(*self._taken)  # pyright: ignore[reportGeneralTypeIssues]  # `take_ahead` sets it
            raise

    # ------------------------------------------------------------------ now

    def draw(self, asked: RolloutRequest, ranks: Ranks) -> Completions:
        """Draw the completions, with groups numbered over all ranks."""
        interaction = asked.interaction
        waited = 0.0 if interaction is None else interaction.waited
        with self._stopwatch.measure("generate"), self._interruptible(asked):
            if self._ahead.requests:
                self._ahead.wait()  # the weights of a request in flight must not change
            completions = asked.send_to(self.generator)()
        if interaction is not None:
            parts = self._stopwatch.parts
            parts["environment"] = parts.get("environment", 0.0) + interaction.waited - waited
        self._gap = self.generator.gap
        return self._received(completions, asked.batch, ranks)

    def draw_other(self, asked: RolloutRequest) -> Completions:
        """Draw the completions of `asked.policy`, another model than the policy, with noise of their own.

        With the same noise equal models write the same. A copy of the generator draws, so that the policy's never holds
        other weights.
        """
        asked = replace(asked, seed=mix(asked.seed, 1))
        with self._stopwatch.measure("generate"), self._interruptible(asked):
            completions = asked.send_to(copy.copy(for_another_policy(self.generator)))()
        self.sampled_tokens += int(completions.lengths.sum())
        return completions

    def _interruptible(self, asked: RolloutRequest) -> AbstractContextManager[None]:
        """Return the context for a draw that may be aborted.

        Engine calls are collective. A generator that is the policy itself is called by each rank alone, unless its
        layers are cut over several.
        """
        return interrupts.interruptible(alone=self.generator.exact and not is_tensor_parallel(asked.policy))

    def _received(self, completions: Completions, batch: PromptBatch, ranks: Ranks) -> Completions:
        others = ranks.rank // batch.sharing * len(batch)  # prompts of the ranks before
        found = replace(completions, group_id=completions.group_id + others).with_host()
        self.sampled_tokens += int(found.on_host.response_mask.sum())
        self.episodes += found.episodes or ()
        return found

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Draw outside of the current rollout: neither seconds nor tokens count."""
        sampled, episodes, gap = self.sampled_tokens, self.episodes, self._gap
        self.episodes = []
        with self._stopwatch.aside():
            yield
        self.sampled_tokens, self.episodes, self._gap = sampled, episodes, gap

    # ------------------------------------------------------------------ ahead

    def request_ahead(self, asked: Sequence[RolloutRequest]) -> None:
        """Request the completions of coming rollouts, with the current weights. To be called once a rollout.

        Args:
            asked: The next rollouts, as many as the generator's lag; those already requested are skipped.
        """
        known = [request.name for request in self._ahead.requests]
        new = [each for each in asked if _request_name(each.batch) not in known]
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
            self._ahead.wait()
            draw = asked.send_to(self.generator)
        except GenerationError as error:
            error.on_every_rank = True  # ranks fail to update an engine together
            raise

        def drawn() -> DrawnAhead:
            with background_thread():
                return DrawnAhead(draw(), self.generator.gap)

        self._ahead.start(_request_name(asked.batch), drawn)

    def _draw_with_a_copy(self, asked: Sequence[RolloutRequest]) -> None:
        """Update and draw in the thread, as there is one process; it also restarts a lost engine."""
        policy = shared_copy(asked[0].policy)
        for each in asked:
            self._ahead.start(
                _request_name(each.batch), _draw_in_thread(self.generator, replace(_with_pixels(each), policy=policy))
            )

    def take_ahead(self, asked: RolloutRequest, ranks: Ranks, *, max_age: int) -> Completions | None:
        """Return the completions drawn ahead for this rollout; None where there are none.

        Args:
            asked: The prompts of this rollout, and the current policy.
            ranks: The ranks. All draw anew, or none, and all fail, or none: restarting an engine is a collective.
            max_age: Most optimizer steps that the completions may be behind the policy.

        Raises:
            GenerationError: the generator of any rank failed, or the completions are too old.
            Interrupted: any rank received a stop request while it waited.
        """
        if not self.generator.lag and not self._ahead.requests:
            return None
        found, error = None, None
        with self._stopwatch.measure("generate"):
            try:
                with interrupts.interruptible():
                    found = self._ahead.take()
            except (LitRLError, Interrupted) as failed:
                error = failed
        worst = max(ranks.counts(_failure_severity(error)))
        if worst == _failure_severity(Interrupted()):
            if found is not None:
                self._ahead.put_first(*found)
            raise Interrupted
        if worst == 2:
            raise error or _other_rank_failed()
        if error is not None:
            rank_zero_warn(f"{error} Completions drawn ahead are lost with it, and drawn again with current weights.")
        if found is None or worst:
            return None
        name, drawn = found
        if name != _request_name(asked.batch):
            self._ahead.forget()
            rank_zero_warn(
                f"Completions were drawn ahead for rollout {name[0]}, and this is rollout {asked.batch.rollout} of "
                "other prompts: they are dropped, and drawn again with the current weights."
            )
            return None
        if (age := asked.version - drawn.completions.version) > max_age:
            raise GenerationError(
                f"The completions of rollout {asked.batch.rollout} are {age} optimizer steps old; with "
                f"generator.lag={self.generator.lag} they may be {max_age}. They are not learned from."
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
        if not self.generator.lag and not self._ahead.requests:
            return {}
        drawn_ahead = self._ahead.peek(_PATIENCE if interrupts.stop_requested() else None)
        kept = [
            {"rollout": rollout, "rows": list(rows), **checkpoints.to_plain(drawn)}
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
        """Restore what `state` returned; `see` and `processor` are those of `checkpoints.restore_pixels`."""
        self._ahead.forget()  # from another run in this process that ended early
        for each in saved.get("ahead", ()):
            completions = checkpoints.restore_pixels(
                checkpoints.completions_from_plain(each["completions"], device), see, processor
            )
            gap = None if each["gap"] is None else Gap(**each["gap"])
            self._ahead.put((each["rollout"], tuple(each["rows"])), DrawnAhead(completions, gap))


@contextmanager
def fail_on_all_ranks(ranks: Ranks) -> Iterator[None]:
    """Raise on all ranks where any rank fails; if only generators failed, all can still save together.

    Raises:
        GenerationError: the generator of this rank failed, or another rank.
        Interrupted: see `abort_on_all_ranks`.
    """
    failure: LitRLError | None = None
    with abort_on_all_ranks(ranks):
        try:
            yield
        except LitRLError as error:
            failure = error
    if not ranks.alone and ranks.any(failure is not None):
        # Saving is a collective that a rank with another error does not enter.
        only_generators = not ranks.any(failure is not None and not isinstance(failure, GenerationError))
        failure = failure or _other_rank_failed()
        if isinstance(failure, GenerationError):
            failure.on_every_rank = only_generators
    if failure is not None:
        raise failure


@contextmanager
def abort_on_all_ranks(ranks: Ranks) -> Iterator[None]:
    """Abort on all ranks where any rank aborts its work because of a stop request.

    Raises:
        Interrupted: this rank, or another one, aborted.
    """
    if not interrupts.ranks_must_agree():
        yield
        return
    try:
        with interrupts.agreed_by_ranks():
            yield
    except Interrupted:
        interrupts.record_stop_request()
    if ranks.any(interrupts.stop_requested()):
        interrupts.record_stop_request()
        raise Interrupted


def _failure_severity(error: BaseException | None) -> int:
    """Return the severity shared by ranks: 0 ok, 1 engine lost, 2 error, 3 interrupted; 2 and more end the run."""
    if isinstance(error, Interrupted):
        return 3
    return 0 if error is None else 1 if isinstance(error, EngineLost) else 2


def _draw_in_thread(generator: Generator, asked: RolloutRequest) -> Callable[[], DrawnAhead]:
    """Return a function for a thread: give the generator the weights of a private policy, and draw."""

    def draw() -> DrawnAhead:
        # Autocast's cache of cast weights is global. Leaving its outermost region in any thread clears it, so this
        # thread never does: the training would cast a weight anew, and sum its gradient in another order.
        torch.autocast_increment_nesting()
        # A thread begins with gradients, on the first GPU, and without autocast: the engine is compared with the plain
        # weights.
        with torch.no_grad(), torch.cuda.device_of(next(asked.policy.parameters())):
            return DrawnAhead(asked.send_to(generator)(), generator.gap)

    return draw


def _with_pixels(asked: RolloutRequest) -> RolloutRequest:
    """Return the request with the pixels of its prompts made now: the training uses the same processor."""
    batch = asked.batch
    if batch.vision is None:
        return asked
    seen = batch.vision(batch.rows)
    return replace(asked, batch=replace(batch, vision=lambda rows: seen))


def _other_rank_failed() -> GenerationError:
    return GenerationError("The generator of another rank failed: see what that rank says.")


def _request_name(batch: PromptBatch) -> RolloutName:
    return batch.rollout, tuple(batch.rows)


class EarlyRewards:
    """Early calls of reward functions for one batch, until its rewards are requested.

    A copy or a pickle holds none.
    """

    def __init__(self) -> None:
        self._begun: tuple[PromptBatch, PendingRewards] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(EarlyRewards())

    @contextmanager
    def begun(
        self, rewards: Rewards, asked: RolloutRequest, tokenizer: Any, state: TrainerState, *, expected: bool
    ) -> Iterator[RolloutRequest]:
        """Yield the request; if scoring is expected next, with a callback that begins it, cancelled on failure.

        Rewards of episodes need whole episodes, so they do not begin early.
        """
        self._drop()
        if not expected or asked.interaction is not None:
            yield asked
            return
        batch = asked.batch
        prompts, _, columns = as_reward_input(batch, [""] * (len(batch) * asked.group_size))
        begun = rewards.begin(prompts, columns, state)
        if begun is None:
            yield asked
            return

        def on_finished(row: int, token_ids: list[int]) -> None:
            (text,) = tokenizer.batch_decode([token_ids], skip_special_tokens=True)
            begun.tell(row, answer_to(prompts[row], text), token_ids)

        self._begun = batch, begun
        try:
            yield replace(asked, on_finished=on_finished)
        except BaseException:
            self._drop()
            raise

    def take(self, batch: PromptBatch) -> PendingRewards | None:
        """Return the early calls for this batch; any others are cancelled."""
        found, self._begun = self._begun, None
        if found is None or found[0] is batch:
            return None if found is None else found[1]
        found[1].cancel()
        return None

    def _drop(self) -> None:
        if self._begun is not None:
            self._begun[1].cancel()
        self._begun = None


# ---------------------------------------------------------------------- completions that are requested ahead


RolloutName = tuple[int, tuple[int, ...]]
"""The index of a rollout, and the data-set rows of its prompts."""


@dataclass(frozen=True)
class DrawnAhead:
    """Completions that were requested ahead."""

    completions: Completions
    gap: Gap | None = None
    """The probe's gap for the weights that they were drawn with; None without a probe."""


class Ahead:
    """A queue of requests in the order in which they are needed, drawn one at a time.

    For a generator that draws elsewhere, with weights of its own. Nothing that a request in flight needs may change:
    any other use of the generator waits first. A copy or a pickle holds no request.
    """

    def __init__(self) -> None:
        self.requests: deque[_Request] = deque()
        """All requests, waiting, in flight or done."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(Ahead())

    def start(self, name: RolloutName, draw: Callable[[], DrawnAhead]) -> None:
        """Draw in a thread, after all earlier requests. Where one of those fails, this one fails with it."""
        request = _Request(name)
        request.begin(draw, self.requests[-1] if self.requests else None)
        self.requests.append(request)

    def wait(self) -> None:
        """Wait until nothing is in flight. Results are kept, and errors too."""
        for request in self.requests:
            request.wait()

    def take(self) -> tuple[RolloutName, DrawnAhead] | None:
        """Return the next completions, after a wait for them; None where nothing was requested.

        Raises:
            Exception: the generator's own, if it failed. All requests are gone then.
        """
        if not self.requests:
            return None
        self.requests[0].wait()
        if (error := self.requests[0].error) is not None:
            self.forget()
            raise error
        request = self.requests.popleft()
        assert request.drawn is not None
        return request.name, request.drawn

    def peek(self, patience: float | None = None) -> list[tuple[RolloutName, DrawnAhead]]:
        """Return all completions, after a wait for them, up to the first failure; they stay in the queue.

        Args:
            patience: Seconds after which the wait ends, without the completions that are not drawn by then. None waits
                for all.
        """
        until = None if patience is None else time.monotonic() + patience
        for request in self.requests:
            request.wait(None if until is None else max(0.0, until - time.monotonic()))
        return [(request.name, request.drawn) for request in self.requests if request.drawn is not None]

    def put(self, name: RolloutName, drawn: DrawnAhead) -> None:
        """Append completions that an earlier process of the run has drawn."""
        self.requests.append(_Request(name, drawn))

    def put_first(self, name: RolloutName, drawn: DrawnAhead) -> None:
        """Put back completions that were taken and not used, before all others."""
        self.requests.appendleft(_Request(name, drawn))

    def forget(self) -> None:
        """Wait until nothing is in flight, and discard all requests."""
        self.wait()
        self.requests.clear()


class _Request:
    """One request, and its result."""

    def __init__(self, name: RolloutName, drawn: DrawnAhead | None = None) -> None:
        self.name, self.drawn = name, drawn
        self.error: BaseException | None = None
        self._done = threading.Event()
        if drawn is not None:
            self._done.set()

    def begin(self, draw: Callable[[], DrawnAhead], before: _Request | None) -> None:
        name = f"rollout {self.name[0]}"
        threading.Thread(target=self._work, args=(draw, before), name=name, daemon=True).start()

    def _work(self, draw: Callable[[], DrawnAhead], before: _Request | None) -> None:
        try:
            if before is not None:
                before.wait()
                self.error = before.error
            if self.error is None:
                self.drawn = draw()
        except BaseException as error:  # raised by `take`, where the run can end in order
            self.error = error
        finally:
            self._done.set()

    def wait(self, seconds: float | None = None) -> None:
        self._done.wait(seconds)  # a thread whose `join` was interrupted counts as ended
