"""Recorded episodes as one HTML page that needs no network: conversations, with every token coloured.

What an episode says is not to be trusted: it is escaped, control characters are shown as escapes, and the page's policy
lets no script run but its own.
"""

from __future__ import annotations

import base64
import html
import math
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from lit_rl.callbacks.text import printable, said
from lit_rl.commands.html_file import document
from lit_rl.commands.html_file import safe as _safe
from lit_rl.commands.transcript_record import Recorded, RecordedRollout, Tokens
from lit_rl.commands.transcript_style import COLOURINGS, LEVELS, SCRIPT, style
from lit_rl.data.images import image_of
from lit_rl.episodes import words_of
from lit_rl.errors import DataError
from lit_rl.images import as_png

_LIKELY = (0.9, 0.5, 0.1, 0.01)
"""Probabilities below which the colour of a log-prob is a shade stronger."""

_EXCERPT = 80


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


def log_ratios(tokens: Tokens) -> list[float]:
    """Return the log-ratios of the training's probability to the sampler's; none where the training's was not
    recorded."""
    if tokens.old_logprobs is None:
        return []
    return [old - sampler for old, sampler in zip(tokens.old_logprobs, tokens.sampler_logprobs)]


def page(title: str, rollouts: Sequence[RecordedRollout], most_tokens: int) -> str:
    """Return the whole page.

    Args:
        title: Title of the page.
        rollouts: Rollouts in their order.
        most_tokens: Most tokens of an episode; a note says how many more are left out.
    """
    scale = Scale.of(rollouts)
    shown = [each for rollout in rollouts for each in rollout.shown]
    ends = sorted({each.end for each in shown})
    sections = "".join(_rollout(rollout, scale, most_tokens) for rollout in rollouts)
    body = f"<h1>Transcripts: {_safe(title)}</h1>\n{_controls(ends, scale)}{_legends(scale)}<main>\n{sections}</main>\n"
    images = any(each.images or each.returned for each in shown)
    return document(f"Transcripts: {title}", style(), body, SCRIPT, attributes='data-by="author"', images=images)


# ---------------------------------------------------------------------- what is chosen


def _controls(ends: Sequence[str], scale: Scale) -> str:
    choices = "".join(
        f'<option value="{by}">{what}</option>' for by, what in COLOURINGS.items() if by != "ratio" or scale.has_ratio
    )
    kinds = "".join(f"<option>{_safe(end)}</option>" for end in ends)
    return (
        f'<form id="controls"><label>colour <select id="by">{choices}</select></label>'
        '<label>search <input id="words" type="search"></label>'
        '<label>reward from <input id="low" type="number" step="any"></label>'
        '<label>to <input id="high" type="number" step="any"></label>'
        f'<label>end <select id="end"><option value="">any</option>{kinds}</select></label>'
        '<label><input id="bad" type="checkbox"> failures only</label><output id="count"></output></form>\n'
    )


def _legends(scale: Scale) -> str:
    shades = range(1, LEVELS + 1)
    both = {
        sign: "".join(f'<i class="{sign}{level}">{level}</i>' for level in shades) for sign in ("a", "b", "r", "s", "l")
    }
    ratio = math.exp(scale.log_ratio)
    texts = {
        "author": '<i class="p">policy, learned from</i> <i class="q">policy, not learned from</i> '
        '<i class="e">read, never learned from</i>',
        "advantage": f"above 0 {both['a']} below 0 {both['b']}, full at {scale.advantage:.3g}",
        "ratio": f"above 1 {both['r']} below 1 {both['s']}, full at {ratio:.6g} and its inverse",
        "logprob": f"probability below {', '.join(map(str, _LIKELY))}: {both['l']}",
    }
    return "".join(f'<p class="legend" data-for="{by}">{texts[by]}</p>' for by in COLOURINGS) + "\n"


# ---------------------------------------------------------------------- rollouts, groups, episodes


def _rollout(rollout: RecordedRollout, scale: Scale, most_tokens: int) -> str:
    shown = f"{len(rollout.shown)} of {rollout.completions}" if rollout.shown else "none"
    groups = "".join(
        _group(number, list(members), scale, most_tokens)
        for number, members in groupby(rollout.shown, key=lambda each: each.group)
    )
    return (
        f"<section><h2>{_safe(rollout.name)}: step {rollout.step}, mean reward {_number(rollout.mean_reward)} "
        f"({shown} episodes shown)</h2>\n{groups}</section>\n"
    )


def _group(number: int, members: Sequence[Recorded], scale: Scale, most_tokens: int) -> str:
    prompts = _excerpt(_prompt_text(members[0]))
    episodes = "".join(_episode(each, scale, most_tokens) for each in members)
    return f"<section><h3>group {number}: {prompts}</h3>\n{_pictures(members[0].images)}{episodes}</section>\n"


def _pictures(images: Sequence[dict[str, Any]]) -> str:
    """Return thumbnails; the name of an image that is not there any more."""
    shown = "".join(map(_picture, images))
    return f'<p class="pictures">{shown}</p>\n' if shown else ""


def _picture(image: dict[str, Any]) -> str:
    name = _safe(str(image["path"] or "image"))
    try:
        small = as_png(image_of(image, "samples", max_pixels=sys.maxsize).thumbnail())
    except DataError:
        return f"[{name}]"
    return f'<img src="data:image/png;base64,{base64.b64encode(small).decode()}" alt="{name}" title="{name}">'


def _prompt_text(each: Recorded) -> str:
    if isinstance(each.prompt, str):
        return each.prompt
    words = ({**message, "content": said(message.get("content"))} for message in each.prompt)
    return "\n".join(f"{message['role']}: {words_of(message)}" for message in words)


def _excerpt(text: str) -> str:
    return html.escape(printable(" ".join(text.split()), _EXCERPT))


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"


def _episode(each: Recorded, scale: Scale, most_tokens: int) -> str:
    length = "" if each.tokens is None else f" · {len(each.tokens)} tokens"
    calls = f" · {each.calls} calls, {each.failed_calls} failed" if each.calls else ""
    error = f" · {_safe(each.error)}" if each.error else ""
    reward = "unscored" if math.isnan(each.reward) else _number(each.reward)
    first = " ".join(words_of(message) for message in each.messages)
    head = (
        f"<summary><b>{reward}</b> {_safe(each.end)} · {each.turns} turns{length} · advantage "
        f"{_number(each.advantage)}{calls}{error} · {_excerpt(first)}</summary>\n"
    )
    prompt = _turn("prompt", "prompt", _safe(_prompt_text(each)))
    known = "" if math.isnan(each.reward) else f"{each.reward:.6g}"
    attributes = f'data-reward="{known}" data-end="{_safe(each.end)}" data-bad="{each.bad:d}"'
    return (
        f'<details class="{"bad" if each.bad else "good"}" {attributes}>{head}{prompt}'
        f"{_pictures(each.returned)}{''.join(_turns(each, scale, most_tokens))}</details>\n"
    )


# ---------------------------------------------------------------------- turns and tokens


def _turn(kind: str, who: str, said: str) -> str:
    return f'<div class="turn {kind}"><div class="who">{who}</div><div class="said">{said}</div></div>\n'


def _turns(each: Recorded, scale: Scale, most_tokens: int) -> Iterator[str]:
    """Yield the policy's turns and their answers: by tokens where they were recorded, else by messages."""
    said = by_turn(each.messages)
    last = each.tokens.turn[-1] if each.tokens else -1
    for turn in range(max(len(said), last + 1)):
        # A turn has no message where the episode had failed before it was over.
        message, answers = said[turn] if turn < len(said) else ({"role": "assistant"}, [])
        given = each.turn_rewards[turn] if turn < len(each.turn_rewards) else None
        who = f"{_safe(message['role'])} · turn {turn}" + ("" if given is None else f"<br>reward {given:+.3f}")
        if each.tokens is None:
            yield _turn("policy", who, _safe(words_of(message)))
            yield from (_turn("env", _safe(answer["role"]), _safe(words_of(answer))) for answer in answers)
        else:
            yield from _turn_of_tokens(each.tokens, turn, who, answers, scale, most_tokens)
    if each.tokens is not None and len(each.tokens) > most_tokens:
        yield _turn("unread", "", f"{len(each.tokens) - most_tokens} tokens more are in the parquet file")


def _turn_of_tokens(
    tokens: Tokens, turn: int, who: str, answers: Sequence[dict], scale: Scale, most: int
) -> Iterator[str]:
    """Yield the tokens that the policy wrote in a turn and those that it read after it; the text of an answer that it
    did not read."""
    first, last = bisect_left(tokens.turn, turn), min(bisect_right(tokens.turn, turn), most)
    middle = next((i for i in range(first, last) if not tokens.by_policy[i]), last)
    roles = ", ".join(dict.fromkeys(_safe(answer["role"]) for answer in answers)) or "between turns"
    if first < most:
        yield _turn("policy", who, "".join(_spans(tokens, first, middle, scale)))
    if middle < last:
        yield _turn("env", roles, "".join(_spans(tokens, middle, last, scale)))
    elif answers and last < most:
        words = "\n".join(words_of(answer) for answer in answers)
        yield _turn("unread", f"{roles}<br>not read any more", _safe(words))


def by_turn(messages: Sequence[dict]) -> list[tuple[dict, list[dict]]]:
    """Return each turn of the policy with its answers."""
    turns: list[tuple[dict, list[dict]]] = []
    for message in messages:
        if message["role"] == "assistant":
            turns.append((message, []))
        elif turns:
            turns[-1][1].append(message)
    return turns


def _spans(tokens: Tokens, start: int, end: int, scale: Scale) -> Iterator[str]:
    """Yield one `<i>` a token: its author and shades as classes, its numbers as a tooltip."""
    ratios = log_ratios(tokens)
    for i in range(start, end):
        text, shown = tokens.text[i], _safe(tokens.text[i])
        ends_line = " n" if "\n" in text else ""
        if not tokens.by_policy[i]:
            yield f'<i class="e{ends_line}" data-t="{tokens.ids[i]}">{shown}</i>'
            continue
        logprob, advantage = tokens.sampler_logprobs[i], tokens.advantages[i]
        classes = ["p" if tokens.learned[i] else "q", _shade("ab", advantage, scale.advantage)]
        numbers = f"{tokens.ids[i]} {logprob:.3g} {advantage:.3g}"
        if ratios:
            classes.append(_shade("rs", ratios[i], scale.log_ratio))
            numbers += f" {math.exp(ratios[i]):.6g}"
        unlikely = sum(math.exp(logprob) < limit for limit in _LIKELY)
        classes.append(f"l{unlikely}" if unlikely else "")
        yield f'<i class="{" ".join(filter(None, classes))}{ends_line}" data-t="{numbers}">{shown}</i>'


def _shade(signs: str, value: float, full: float) -> str:
    """Return a class: the first letter above 0, the second below; nothing at 0."""
    if not value or not full:
        return ""
    return f"{signs[value < 0]}{math.ceil(LEVELS * min(1.0, abs(value) / full))}"
