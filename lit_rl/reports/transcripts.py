"""`lit-rl transcripts`: the recorded episodes of a run as one HTML page, conversations with every token coloured.

Text of an episode is not trusted: it is escaped, control characters are shown as escapes, and the page's policy lets no
script run but its own.
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
from pathlib import Path
from typing import Any

from rich.console import Console

from lit_rl.callbacks.display import printable
from lit_rl.core.episode import message_text
from lit_rl.core.errors import ConfigError, DataError, in_range
from lit_rl.core.visuals import as_png
from lit_rl.data.row_visuals import image_of
from lit_rl.reports.html_page import document, safe, write_atomically
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
    ends = sorted({each.end for each in shown})
    sections = "".join(_rollout(rollout, scale, most_tokens) for rollout in rollouts)
    body = f"<h1>Transcripts: {safe(title)}</h1>\n{_controls(ends, scale)}{_legends(scale)}<main>\n{sections}</main>\n"
    images = any(each.images or each.returned for each in shown)
    return document(
        f"Transcripts: {title}", style_sheet(), body, TRANSCRIPT_SCRIPT, attributes='data-by="author"', images=images
    )


def _controls(ends: Sequence[str], scale: Scale) -> str:
    choices = "".join(
        f'<option value="{by}">{what}</option>' for by, what in COLOURINGS.items() if by != "ratio" or scale.has_ratio
    )
    kinds = "".join(f"<option>{safe(end)}</option>" for end in ends)
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
    shaded = {
        sign: "".join(f'<i class="{sign}{level}">{level}</i>' for level in shades) for sign in ("a", "b", "r", "s", "l")
    }
    ratio = math.exp(scale.log_ratio)
    texts = {
        "author": '<i class="p">policy, learned from</i> <i class="q">policy, not learned from</i> '
        '<i class="e">read, never learned from</i>',
        "advantage": f"above 0 {shaded['a']} below 0 {shaded['b']}, full at {scale.advantage:.3g}",
        "ratio": f"above 1 {shaded['r']} below 1 {shaded['s']}, full at {ratio:.6g} and its inverse",
        "logprob": f"probability below {', '.join(map(str, _LIKELY))}: {shaded['l']}",
    }
    return "".join(f'<p class="legend" data-for="{by}">{texts[by]}</p>' for by in COLOURINGS) + "\n"


def _rollout(rollout: RecordedRollout, scale: Scale, most_tokens: int) -> str:
    shown = f"{len(rollout.shown)} of {rollout.completions}" if rollout.shown else "none"
    groups = "".join(
        _group(number, list(members), scale, most_tokens)
        for number, members in groupby(rollout.shown, key=lambda each: each.group)
    )
    return (
        f"<section><h2>{safe(rollout.name)}: step {rollout.step}, mean reward {_number(rollout.mean_reward)} "
        f"({shown} episodes shown)</h2>\n{groups}</section>\n"
    )


def _group(number: int, members: Sequence[RecordedCompletion], scale: Scale, most_tokens: int) -> str:
    prompts = _excerpt(members[0].prompt_text)
    episodes = "".join(_episode(each, scale, most_tokens) for each in members)
    return f"<section><h3>group {number}: {prompts}</h3>\n{_pictures(members[0].images)}{episodes}</section>\n"


_EXCERPT = 80


def _excerpt(text: str) -> str:
    return html.escape(printable(" ".join(text.split()), _EXCERPT))


def _pictures(images: Sequence[dict[str, Any]]) -> str:
    """Return thumbnails; the name of an image that is not there any more."""
    shown = "".join(map(_picture, images))
    return f'<p class="pictures">{shown}</p>\n' if shown else ""


def _picture(image: dict[str, Any]) -> str:
    name = safe(str(image["path"] or "image"))
    try:
        small = as_png(image_of(image, "samples", max_pixels=sys.maxsize).thumbnail())
    except DataError:
        return f"[{name}]"
    return f'<img src="data:image/png;base64,{base64.b64encode(small).decode()}" alt="{name}" title="{name}">'


def _episode(each: RecordedCompletion, scale: Scale, most_tokens: int) -> str:
    length = "" if each.tokens is None else f" · {len(each.tokens)} tokens"
    calls = f" · {each.calls} calls, {each.failed_calls} failed" if each.calls else ""
    error = f" · {safe(each.error)}" if each.error else ""
    reward = "unscored" if math.isnan(each.reward) else _number(each.reward)
    first = " ".join(message_text(message) for message in each.messages)
    head = (
        f"<summary><b>{reward}</b> {safe(each.end)} · {each.turns} turns{length} · advantage "
        f"{_number(each.advantage)}{calls}{error} · {_excerpt(first)}</summary>\n"
    )
    prompt = _turn("prompt", "prompt", safe(each.prompt_text))
    known = "" if math.isnan(each.reward) else f"{each.reward:.6g}"
    attributes = f'data-reward="{known}" data-end="{safe(each.end)}" data-bad="{each.bad:d}"'
    return (
        f'<details class="{"bad" if each.bad else "good"}" {attributes}>{head}{prompt}'
        f"{_pictures(each.returned)}{''.join(_turns(each, scale, most_tokens))}</details>\n"
    )


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"


def _turn(kind: str, author: str, text: str) -> str:
    return f'<div class="turn {kind}"><div class="who">{author}</div><div class="said">{text}</div></div>\n'


def _turns(each: RecordedCompletion, scale: Scale, most_tokens: int) -> Iterator[str]:
    """Yield the policy's turns and their answers: by tokens where they were recorded, else by messages."""
    turns: list[tuple[dict, list[dict]]] = []  # each message of the policy, with its answers
    for message in each.messages:
        if message["role"] == "assistant":
            turns.append((message, []))
        elif turns:
            turns[-1][1].append(message)
    last = each.tokens.turn[-1] if each.tokens else -1
    for turn in range(max(len(turns), last + 1)):
        # A turn has no message where the episode had failed before it was over.
        message, answers = turns[turn] if turn < len(turns) else ({"role": "assistant"}, [])
        reward = each.turn_rewards[turn] if turn < len(each.turn_rewards) else None
        author = f"{safe(message['role'])} · turn {turn}" + ("" if reward is None else f"<br>reward {reward:+.3f}")
        if each.tokens is None:
            yield _turn("policy", author, safe(message_text(message)))
            yield from (_turn("env", safe(answer["role"]), safe(message_text(answer))) for answer in answers)
        else:
            yield from _turn_of_tokens(each.tokens, turn, author, answers, scale, most_tokens)
    if each.tokens is not None and len(each.tokens) > most_tokens:
        yield _turn("unread", "", f"{len(each.tokens) - most_tokens} tokens more are in the parquet file")


# ---------------------------------------------------------------------- tokens, and their colours


def _turn_of_tokens(
    tokens: RecordedTokens, turn: int, author: str, answers: Sequence[dict], scale: Scale, most: int
) -> Iterator[str]:
    """Yield the tokens that the policy wrote in a turn and those that it read after it; the text of an answer that it
    did not read."""
    first, last = bisect_left(tokens.turn, turn), min(bisect_right(tokens.turn, turn), most)
    middle = next((i for i in range(first, last) if not tokens.by_policy[i]), last)
    roles = ", ".join(dict.fromkeys(safe(answer["role"]) for answer in answers)) or "between turns"
    if first < most:
        yield _turn("policy", author, "".join(_spans(tokens, first, middle, scale)))
    if middle < last:
        yield _turn("env", roles, "".join(_spans(tokens, middle, last, scale)))
    elif answers and last < most:
        words = "\n".join(message_text(answer) for answer in answers)
        yield _turn("unread", f"{roles}<br>not read any more", safe(words))


def _spans(tokens: RecordedTokens, start: int, end: int, scale: Scale) -> Iterator[str]:
    """Yield one `<i>` a token: its author and shades as classes, its numbers as a tooltip."""
    ratios = log_ratios(tokens)
    for i in range(start, end):
        text, shown = tokens.text[i], safe(tokens.text[i])
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


# ---------------------------------------------------------------------- style and script


LEVELS = 4
"""Shades of a colour."""

_LAYOUT = """
:root { color-scheme: light dark; font: 14px/1.45 system-ui, sans-serif; }
body { margin: 0 auto; max-width: 1100px; padding: 0 1rem 4rem; }
h1 { font-size: 1.3rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
h3 { font-size: .95rem; margin: 1rem 0 .3rem; }
form { position: sticky; top: 0; z-index: 1; display: flex; flex-wrap: wrap; gap: .4rem 1rem; padding: .6rem 0;
  background: Canvas; border-bottom: 1px solid #8888; }
input[type=number] { width: 5rem; }
details { border: 1px solid #8885; border-radius: 4px; margin: .3rem 0; }
summary { cursor: pointer; padding: .3rem .6rem; overflow-wrap: anywhere; }
summary b { display: inline-block; min-width: 5rem; }
.turn { display: grid; grid-template-columns: 9rem minmax(0, 1fr); gap: .8rem; padding: .3rem .6rem;
  border-top: 1px solid #8883; content-visibility: auto; }
.who { text-align: right; font-size: .85rem; opacity: .8; }
.said { font-family: ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.prompt .said, .unread .said { opacity: .6; }
.bad b { color: #d1242f; }
i { font-style: normal; border-radius: 2px; box-shadow: inset -1px 0 #8883; }
i:empty::before { content: "\\00b7"; }
i.n::before { content: "\\23ce"; opacity: .5; }
.legend { display: none; margin: .3rem 0; }
[hidden] { display: none !important; }
"""

_BLUE, _AMBER, _GREEN, _RED, _VIOLET = "37,99,235", "217,119,6", "22,163,74", "220,38,38", "124,58,237"


def style_sheet() -> str:
    """Return the style sheet."""
    rules = [
        f"[data-by=author] .p {{ background: rgba({_BLUE},.3) }}",
        f"[data-by=author] .q {{ background: rgba({_BLUE},.1); opacity: .6 }}",
        f"[data-by=author] .e {{ background: rgba({_AMBER},.2); opacity: .7 }}",
        ":not([data-by=author]) > main .e { opacity: .5 }",
    ]
    shades = {"a": ("advantage", _GREEN), "b": ("advantage", _RED), "r": ("ratio", _GREEN), "s": ("ratio", _RED)}
    for letter, (by, colour) in {**shades, "l": ("logprob", _VIOLET)}.items():
        for level in range(1, LEVELS + 1):
            strength = f"{0.75 * level / LEVELS:.2f}"
            rules.append(f"[data-by={by}] .{letter}{level} {{ background: rgba({colour},{strength}) }}")
    rules += [f"[data-by={by}] .legend[data-for={by}] {{ display: block }}" for by in COLOURINGS]
    return _LAYOUT + "\n".join(rules) + "\n"


COLOURINGS = {
    "author": "who wrote it",
    "advantage": "advantage",
    "ratio": "ratio: training to sampler",
    "logprob": "log-prob of the sampler",
}
"""Quantities that tokens may be coloured by."""

TRANSCRIPT_SCRIPT = """
'use strict';
const at = id => document.getElementById(id), all = [...document.querySelectorAll('details')];
const inside = (value, low, high) => (low === '' || (value !== '' && +value >= +low))
  && (high === '' || (value !== '' && +value <= +high));
function filter() {
  const words = at('words').value.toLowerCase(), end = at('end').value, bad = at('bad').checked;
  let count = 0;
  for (const each of all) {
    const has = each.dataset;
    const shown = (!end || has.end === end) && (!bad || has.bad === '1')
      && inside(has.reward, at('low').value, at('high').value)
      && (!words || each.textContent.toLowerCase().includes(words));
    each.hidden = !shown;
    count += shown;
  }
  for (const part of document.querySelectorAll('section')) part.hidden = !part.querySelector('details:not([hidden])');
  at('count').textContent = count + ' of ' + all.length;
}
at('by').addEventListener('change', () => { document.body.dataset.by = at('by').value; });
for (const id of ['words', 'end', 'bad', 'low', 'high']) at(id).addEventListener('input', filter);
at('controls').addEventListener('submit', event => event.preventDefault());
document.addEventListener('mouseover', event => {
  const token = event.target;
  if (!token.dataset || !token.dataset.t || token.title) return;
  const [id, logprob, advantage, ratio] = token.dataset.t.split(' ');
  token.title = 'token ' + id + (logprob ? ', log-prob ' + logprob + ', advantage ' + advantage : ', read')
    + (ratio ? ', ratio ' + ratio : '');
});
document.body.dataset.by = at('by').value;
filter();
"""
"""The script, which reads the page alone. It holds no text of an episode."""
