"""A conversation by a script through all that a run's own goes through, as tokens, for `lit-rl env-check`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from lit_rl.environments.interaction import Interaction
from lit_rl.episodes import Episode
from lit_rl.rollout import PromptBatch
from lit_rl.turns import Said


@dataclass(frozen=True)
class Talk:
    """One conversation."""

    episode: Episode
    ids: list[int]
    """All tokens that the policy reads and writes."""
    learned: list[bool]
    """True for each token that the policy wrote."""

    @property
    def said(self) -> list[int]:
        """Token ids that the policy wrote."""
        return [token for token, learned in zip(self.ids, self.learned) if learned]


def talk(
    interaction: Interaction,
    tokenizer: Any,
    batch: PromptBatch,
    seed: int,
    turns: Sequence[str],
    max_new_tokens: int,
) -> Talk:
    """Play the turns until the conversation is over. A turn that is too long is cut, as a policy's is.

    Args:
        interaction: The run's interaction.
        tokenizer: The policy's tokenizer.
        batch: A batch of one prompt.
        seed: Seed of the episode.
        turns: The policy's texts.
        max_new_tokens: Most tokens of one turn.

    Raises:
        LitRLError: what would end a run.
    """
    seen = batch.vision(batch.rows) if batch.vision is not None else ()
    (opened,), conversations = interaction.begin(batch, [seed], max_new_tokens=max_new_tokens, seen=seen)
    with closing(conversations):
        ids, learned, room = list(opened.ids), [False] * len(opened.ids), max_new_tokens
        for number, text in enumerate(turns):
            whole = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            turn = whole[: min(room, max_new_tokens)]
            conversations.tell(Said(0, number, turn, ended=len(turn) == len(whole)))
            (heard,) = conversations.answers(wait=True)
            answer = list(heard.token_ids or ())
            ids, learned = [*ids, *turn, *answer], [*learned, *[True] * len(turn), *[False] * len(answer)]
            if heard.token_ids is None:
                break
            room = heard.room
        return Talk(conversations.episodes()[0], ids, learned)
