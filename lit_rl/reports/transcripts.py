"""`lit-rl transcripts`: the recorded episodes of a run as one HTML page, conversations with every token coloured.

Text of an episode is not trusted: see `html_page`.
"""

from __future__ import annotations

import base64
import math
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from lit_rl.callbacks.display import printable
from lit_rl.core.episode import fork_lines, message_text
from lit_rl.core.errors import ConfigError, DataError, in_range
from lit_rl.core.visuals import as_png
from lit_rl.data.row_visuals import image_of
from lit_rl.reports.html_page import page, write_atomically
from lit_rl.reports.run_files import RunFiles
from lit_rl.reports.run_samples import RecordedCompletion, RecordedRollout, RecordedTokens, read_rollouts

TRANSCRIPTS_FILE = "transcripts.html"
"""File in the run's folder. It is written anew each time."""


def transcripts(run_dir: Path, files: str = "step_*", rollouts: int = 4, episodes: int = 64, tokens: int = 2000) -> int:
    """Write the page.

    Args:
        run_dir: Folder of the run.
        files: Which files of `run_dir/samples`: a name without its ending, with `*` for what may stand there.
        rollouts: Most of these files, spread evenly from the first to the last.
        episodes: Most episodes, over all rollouts.
        tokens: Most tokens of an episode.

    Raises:
        ConfigError: there is no such file, or a limit is no number from 1 on.
        StorageError: a file is damaged, or the page cannot be written.
    """
    for name, value in (("rollouts", rollouts), ("episodes", episodes), ("tokens", tokens)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"transcripts.{name}={value} is not a whole number; it takes one from 1 on.")
        in_range(f"transcripts.{name}", value, low=1)
    if not isinstance(files, str) or not files or Path(files).name != files:
        raise ConfigError(
            f"transcripts.files={files} names no files of {run_dir / 'samples'}: give a name such as 'step_*' or "
            "'val_*'."
        )
    found = read_rollouts(RunFiles(run_dir), files, rollouts, episodes)
    target = run_dir / TRANSCRIPTS_FILE
    write_atomically(target, transcripts_html(str(run_dir), found, tokens))
    shown, total = (sum(counts) for counts in zip(*((len(each.shown), each.completions) for each in found)))
    text = f"transcripts  {target}  ({shown} of {total} episodes of {len(found)} rollouts; open it in a browser)"
    Console().print(text, soft_wrap=True, highlight=False, markup=False)
    return 0


# ---------------------------------------------------------------------- the page


def transcripts_html(title: str, rollouts: Sequence[RecordedRollout], most_tokens: int) -> str:
    """Return the whole page.

    Args:
        title: Title of the page.
        rollouts: Rollouts in their order.
        most_tokens: Most tokens of an episode; a note says how many more are left out.
    """
    scale = Scale.of(rollouts)
    shown = [each for rollout in rollouts for each in rollout.shown]

    def turns(each: RecordedCompletion) -> Iterator[ShownTurn]:
        return shown_turns(each, scale, most_tokens)

    return page(
        "transcripts.html",
        "transcripts",
        title=title,
        rollouts=rollouts,
        ends=sorted({each.end for each in shown}),
        images=any(each.images or each.returned for each in shown),
        scale=scale,
        ratio=math.exp(scale.log_ratio),
        likely=_LIKELY,
        levels=range(1, LEVELS + 1),
        groups=lambda rollout: [(key, list(them)) for key, them in groupby(rollout.shown, key=lambda each: each.group)],
        turns=turns,
        thumbnail=_thumbnail,
        excerpt=lambda text: printable(" ".join(text.split()), _EXCERPT),
        first_words=lambda each: " ".join(message_text(message) for message in each.messages),
        number=lambda value: "-" if value is None or math.isnan(value) else f"{value:.3f}",
    )


_EXCERPT = 80
"""Characters of a prompt or an episode in its head."""


def _thumbnail(image: dict[str, Any]) -> str:
    """Return a PNG in base64; empty where the image is not there any more."""
    try:
        return base64.b64encode(as_png(image_of(image, "samples", max_pixels=sys.maxsize).thumbnail())).decode()
    except DataError:
        return ""


# ---------------------------------------------------------------------- turns


class ShownToken(NamedTuple):
    """One token: its text, its author and shades as classes of the style sheet, its numbers for the tooltip."""

    text: str
    classes: str
    numbers: str


class ShownTurn(NamedTuple):
    """A turn of the policy, or an answer to one."""

    kind: str
    """`policy`, `env`, or `unread` for what nobody read."""
    authors: tuple[str, ...]
    """Lines beside the turn."""
    text: str = ""
    """The words of a turn whose tokens are not known."""
    tokens: Sequence[ShownToken] = ()


def shown_turns(each: RecordedCompletion, scale: Scale, most_tokens: int) -> Iterator[ShownTurn]:
    """Yield the policy's turns and their answers: by tokens where they were recorded, else by messages."""
    turns: list[tuple[dict, list[dict]]] = []  # each message of the policy, with its answers
    for message in each.messages:
        if message["role"] == "assistant":
            turns.append((message, []))
        elif turns:
            turns[-1][1].append(message)
    last, forks = each.tokens.turn[-1] if each.tokens else -1, fork_lines(each.forks)
    for turn in range(max(len(turns), last + 1)):
        # A turn has no message where the episode had failed before it was over.
        message, answers = turns[turn] if turn < len(turns) else ({"role": "assistant"}, [])
        reward = each.turn_rewards[turn] if turn < len(each.turn_rewards) else None
        authors = f"{message['role']} · turn {turn}", *(() if reward is None else (f"reward {reward:+.3f}",))
        authors += (forks[turn],) if turn in forks else ()
        if each.tokens is None:
            yield ShownTurn("policy", authors, message_text(message))
            yield from (ShownTurn("env", (str(answer["role"]),), message_text(answer)) for answer in answers)
        else:
            yield from _turn_of_tokens(each.tokens, turn, authors, answers, scale, most_tokens)
    if each.tokens is not None and len(each.tokens) > most_tokens:
        yield ShownTurn("unread", (), f"{len(each.tokens) - most_tokens} tokens more are in the parquet file")


# ---------------------------------------------------------------------- tokens, and their colours


def _turn_of_tokens(
    tokens: RecordedTokens, turn: int, authors: tuple[str, ...], answers: Sequence[dict], scale: Scale, most: int
) -> Iterator[ShownTurn]:
    """Yield the tokens that the policy wrote in a turn and those that it read after it; the text of an answer that it
    did not read."""
    first, last = bisect_left(tokens.turn, turn), min(bisect_right(tokens.turn, turn), most)
    middle = next((i for i in range(first, last) if not tokens.by_policy[i]), last)
    roles = ", ".join(dict.fromkeys(str(answer["role"]) for answer in answers)) or "between turns"
    if first < most:
        yield ShownTurn("policy", authors, tokens=list(_shown_tokens(tokens, first, middle, scale)))
    if middle < last:
        yield ShownTurn("env", (roles,), tokens=list(_shown_tokens(tokens, middle, last, scale)))
    elif answers and last < most:
        words = "\n".join(message_text(answer) for answer in answers)
        yield ShownTurn("unread", (roles, "not read any more"), words)


def _shown_tokens(tokens: RecordedTokens, start: int, end: int, scale: Scale) -> Iterator[ShownToken]:
    ratios = log_ratios(tokens)
    for i in range(start, end):
        text = tokens.text[i]
        ends_line = " n" if "\n" in text else ""
        if not tokens.by_policy[i]:
            yield ShownToken(text, f"e{ends_line}", f"{tokens.ids[i]}")
            continue
        logprob, advantage = tokens.sampler_logprobs[i], tokens.advantages[i]
        classes = ["p" if tokens.learned[i] else "q", _shade("ab", advantage, scale.advantage)]
        numbers = f"{tokens.ids[i]} {logprob:.3g} {advantage:.3g}"
        if ratios:
            classes.append(_shade("rs", ratios[i], scale.log_ratio))
            numbers += f" {math.exp(ratios[i]):.6g}"
        unlikely = sum(math.exp(logprob) < limit for limit in _LIKELY)
        classes.append(f"l{unlikely}" if unlikely else "")
        yield ShownToken(text, " ".join(filter(None, classes)) + ends_line, numbers)


_LIKELY = (0.9, 0.5, 0.1, 0.01)
"""Probabilities below which the colour of a log-prob is a shade stronger."""


@dataclass(frozen=True)
class Scale:
    """The sizes that have the full colour."""

    advantage: float
    log_ratio: float
    has_ratio: bool
    """True if log-probs of the training were recorded."""

    @classmethod
    def of(cls, rollouts: Sequence[RecordedRollout]) -> Scale:
        """Return the scale of the largest sizes that are shown."""
        tokens = [each.tokens for rollout in rollouts for each in rollout.shown if each.tokens is not None]
        ratios = [abs(ratio) for each in tokens for ratio in log_ratios(each)]
        return cls(
            advantage=max((abs(value) for each in tokens for value in each.advantages), default=0.0),
            log_ratio=max(ratios, default=0.0),
            has_ratio=any(each.old_logprobs is not None for each in tokens),
        )


def log_ratios(tokens: RecordedTokens) -> list[float]:
    """Return the log-ratios of the training's probability to the sampler's; none where the training's was not
    recorded."""
    if tokens.old_logprobs is None:
        return []
    return [old - sampler for old, sampler in zip(tokens.old_logprobs, tokens.sampler_logprobs)]


def _shade(signs: str, value: float, full: float) -> str:
    """Return a class: the first letter above 0, the second below; nothing at 0."""
    if not value or not full:
        return ""
    return f"{signs[value < 0]}{math.ceil(LEVELS * min(1.0, abs(value) / full))}"


LEVELS = 4
"""Shades of a colour; the style sheet has as many."""
