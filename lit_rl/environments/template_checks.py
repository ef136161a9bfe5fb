"""A check whether the chat template would render the episodes of a rollout otherwise than the policy read them.

An episode is the tokens that were sampled and read. A chat server that continues a conversation from its messages
renders them again before every turn, and templates rewrite history: they drop the thinking of earlier turns, strip
blanks, write the arguments of calls in their own way. The policy then reads another history than it learned from.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lit_rl.core.episode import Episode
from lit_rl.core.errors import ConfigError, excerpt
from lit_rl.core.rollout import Completions
from lit_rl.environments.frames import ChatFrames, template_name
from lit_rl.environments.observations import without_payload
from lit_rl.environments.thoughts import CHANNEL_TOKEN, KNOWN_MARKS, MESSAGE_TOKEN

CHECK_EVERY = 100
"""Number of rollouts from one check to the next; the first is checked."""

_THOUGHTS = re.compile(
    "|".join(
        rf"{re.escape(opening)}(.*?)(?:{closing})"
        for opening, closing in [
            *((opening, re.escape(closing)) for opening, closing in KNOWN_MARKS),
            (f"{CHANNEL_TOKEN}analysis{MESSAGE_TOKEN}", r"<\|end\|>|<\|return\|>"),
        ]
    ),
    re.DOTALL,
)
"""Thoughts of the known families, between their marks."""


class TemplateRewriteCheck:
    """A check that renders the history before the last turn of each episode again, and compares the tokens.

    Before the last turn, because that is the longest history that was ever read; and of what comes behind it a template
    knows nothing. An episode of one turn was rendered by the template itself.

    Args:
        tokenizer: Tokenizer of the policy.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._warned = tokenizer, False
        self._counted: tuple[int, int] | None = None

    def check(self, completions: Completions, frames: Sequence[ChatFrames]) -> None:
        """Check the episodes of some completions, except failed ones and those answered with images; counts accumulate
        until `pop_metrics`.

        Args:
            completions: Completions with their episodes.
            frames: Frames that rendered the replies of each.
        """
        assert completions.episodes is not None
        held = _before_last_turns(completions, self._tokenizer)
        later = () if completions.vision is None else completions.vision.later
        looked_at = [
            row
            for row, each in enumerate(completions.episodes)
            if not each.failed and each.turns and not (later and later[row])  # placeholders that a processor expanded
        ]
        changes = [self._describe_change(held[row], completions.episodes[row], frames[row]) for row in looked_at]
        rewritten, looked = self._counted or (0, 0)
        differ = [each for each in changes if each is not None]
        self._counted = rewritten + len(differ), looked + len(looked_at)
        if (words := next(filter(None, differ), None)) and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"The {template_name(self._tokenizer)} would not give back the conversations of this run: rendering "
                f"the messages of an episode anew before its last turn, it would {words}. It rewrites {len(differ)} of "
                f"the {len(looked_at)} episodes that were looked at (train/template/rewritten). The policy learns from "
                "the tokens that were there, so the training is right; but whoever goes on with a conversation by its "
                "messages, as chat servers do, gives the policy another history than it learned from. A template that "
                "only appends does not: model.chat_template=FILE, which is exported with the policy."
            )

    def pop_metrics(self) -> dict[str, tuple[float, float]]:
        """Return the metric as numerator and denominator, once; empty where nothing was checked."""
        counted, self._counted = self._counted, None
        return {} if counted is None else {"template/rewritten": counted}

    def _describe_change(self, held: list[int], episode: Episode, frames: ChatFrames) -> str | None:
        """Describe the template's change to an episode; empty where it is other tokens of the same text, None where it
        is none."""
        if episode.turns == 1:
            return None
        last = max(place for place, message in enumerate(episode.messages) if message["role"] == "assistant")
        assert not isinstance(episode.prompt, str)
        bare = [{**message, "content": without_payload(message["content"])} for message in episode.prompt]
        try:
            anew = frames.history([*bare, *episode.messages[:last]])
        except ConfigError:
            raise
        except Exception as error:  # a template may raise anything
            return f"refuse it: {excerpt(str(error), 200)}"
        return None if anew == held else self._describe_difference(held, anew)

    def _describe_difference(self, held: Sequence[int], anew: Sequence[int]) -> str:
        before, after = str(self._tokenizer.decode(held)), str(self._tokenizer.decode(anew))
        if before == after:
            return ""
        dropped = list((Counter(_thoughts(before)) - Counter(_thoughts(after))).elements())
        if dropped:
            tokens = sum(len(self._tokenizer(each, add_special_tokens=False)["input_ids"]) for each in dropped)
            return f"drop {tokens} thinking tokens of {len(held)}, {excerpt(dropped[0], 60)!r} among them"
        place = next((i for i, (a, b) in enumerate(zip(before, after)) if a != b), min(len(before), len(after)))
        old, new = (excerpt(text[max(0, place - 20) : place + 40]) for text in (before, after))
        return f"write ...{new!r} where ...{old!r} stands"


def _before_last_turns(completions: Completions, tokenizer: Any) -> list[list[int]]:
    """Return the tokens of each row before its last turn, those of the prompt included; a prompt with images as the
    template wrote it, placeholders not expanded."""
    prompts = zip(completions.prompt_ids.tolist(), completions.prompt_mask.tolist())
    found = [[token for token, real in zip(*row) if real] for row in prompts]
    for row, seen in enumerate(completions.vision.rows if completions.vision is not None else ()):
        if seen is not None and seen.source is not None:
            found[row] = list(tokenizer(seen.source.text, add_special_tokens=False)["input_ids"])
    if completions.turn is None or completions.attended is None:
        return found
    sampled, turn = completions.response_mask, completions.turn
    last = turn.masked_fill(~sampled, 0).amax(1, keepdim=True)
    begins = (sampled & (turn == last)).int().argmax(1).tolist()
    responses = zip(begins, completions.response_ids.tolist(), completions.attended.tolist())
    for prompt, (begin, ids, attended) in zip(found, responses):
        prompt += [token for token, real in zip(ids[:begin], attended) if real]
    return found


def _thoughts(text: str) -> list[str]:
    thoughts = ("".join(filter(None, found.groups())).strip() for found in _THOUGHTS.finditer(text))
    return [thought for thought in thoughts if thought]
