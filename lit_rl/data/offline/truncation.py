"""Texts are cut in token space; both sides of a pair keep the same tokens of their prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lit_rl.data.offline.example import Encoded

Keep = Literal["start", "end"]
KEEP = ("start", "end")
Overlong = Literal["truncate", "drop", "error"]
OVERLONG = ("truncate", "drop", "error")


def windows(
    texts: Sequence[Encoded], max_length: int | None, max_completion_tokens: int | None, keep: Keep
) -> list[range]:
    """Return the window of tokens that stays of each text.

    Completions are first cut at their end to `max_completion_tokens`. Then, where a text is longer than `max_length`,
    `keep="start"` cuts its end, and `keep="end"` cuts the prompt's start: by what the longest of the texts needs, from
    all of them, so that the same prompt is left in each. A completion that is longer than `max_length` by itself then
    loses its own start, and no prompt is left.

    Args:
        texts: One text, or those that begin with the same prompt tokens.
        max_length: Tokens of prompt and completion together; None is no limit.
        max_completion_tokens: Tokens of the completion; None is no limit.
        keep: The end of a too long text that stays.
    """
    stops = [len(text) for text in texts]
    if max_completion_tokens is not None:
        stops = [min(stop, text.prompt_tokens + max_completion_tokens) for stop, text in zip(stops, texts)]
    if max_length is None:
        return [range(stop) for stop in stops]
    if keep == "start":
        return [range(min(stop, max_length)) for stop in stops]
    prompt = min(text.prompt_tokens for text in texts)
    start = min(prompt, max(0, max(stops) - max_length))
    return [range(max(start, stop - max_length), stop) for stop in stops]


def cut(text: Encoded, window: range) -> Encoded:
    """Return the tokens of the window; the first of them is not learned, since nothing predicts it."""
    if len(window) == len(text):
        return text
    learned = text.learned[window.start : window.stop]
    left = min(max(0, text.prompt_tokens - window.start), len(window))
    return Encoded(text.ids[window.start : window.stop], [i > 0 and flag for i, flag in enumerate(learned)], left)


def cut_labels(text: Encoded, labels: Sequence[float], window: range) -> tuple[float, ...]:
    """Return the labels of the learned tokens that stay learned; before truncation each learned token has one."""
    places = (i for i, flag in enumerate(text.learned) if flag)
    return tuple(label for i, label in zip(places, labels) if window.start < i < window.stop)
