"""Rewards that begin while other completions of the batch are still written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lit_rl.algorithms.rollouts.source import RolloutRequest
from lit_rl.generation.collect import answer_to, as_reward_input
from lit_rl.rewards.sums.begun import BegunRewards
from lit_rl.rewards.sums.weighted import Rewards, TrainerState
from lit_rl.rollout import PromptBatch


class EarlyRewards:
    """Early calls of reward functions for one batch, until its rewards are requested.

    A copy or a pickle holds none.
    """

    def __init__(self) -> None:
        self._begun: tuple[PromptBatch, BegunRewards] | None = None
        self._expected = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(EarlyRewards())

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Mark that the completions drawn inside are scored next."""
        self._expected = True
        try:
            yield
        finally:
            self._expected = False

    @contextmanager
    def begun(self, rewards: Rewards, asked: RolloutRequest, state: TrainerState) -> Iterator[RolloutRequest]:
        """Yield the request; if it is to be scored, with a callback that begins its rewards, cancelled on failure.

        Rewards of episodes need whole episodes, so they do not begin early.
        """
        self._drop()
        if not self._expected or asked.interaction is not None:
            yield asked
            return
        batch, tokenizer = asked.batch, asked.model.tokenizer
        prompts, _, columns = as_reward_input(batch, [""] * (len(batch) * asked.group_size), asked.group_size)
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

    def take(self, batch: PromptBatch) -> BegunRewards | None:
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
