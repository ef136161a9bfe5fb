"""What a run wrote, for the browser of samples in its page: which files, how much of each, and what colours a token."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_rl.callbacks.sample_files import SampleTable
from lit_rl.callbacks.text import said, visible
from lit_rl.commands.run_curves import decoding
from lit_rl.commands.run_files import RunFiles
from lit_rl.commands.transcript_record import Recorded, Tokens, read_table, spread
from lit_rl.episodes import words_of
from lit_rl.errors import StorageError

ROLLOUTS, BY_TOKENS, ROWS, CHARACTERS, TOKENS = 4, 4, 48, 4000, 800
"""Most rollouts, rollouts by tokens, completions of one of them, characters of a text, tokens of a completion."""

SIZE = 3_000_000
"""Characters and numbers of all samples together, beyond which no further completion is taken."""

READ = "read"
REASONS = {
    "": "learned from",
    "still": "advantage 0: no gradient of the policy loss",
    READ: "not written by the policy: read, never learned from",
    "cut": "not in the loss: the completion was cut (algo.mask_truncated)",
    "unscored": "not in the loss: no reward applied",
    "failed": "not in the loss: its environment failed",
    "left": "not in the loss: the algorithm left it out (groups, rejection)",
}
"""Reasons why a token is not learned from, by the page's names for them."""


@dataclass(frozen=True)
class SampleFiles:
    """The samples in the page."""

    files: list[dict[str, Any]] = field(default_factory=list)
    """Files in the form that the page's script reads."""
    left_out: list[str] = field(default_factory=list)
    """Sentences about samples that were left out."""


def samples_of(run: RunFiles) -> SampleFiles:
    """Return the newest replay, rollouts and tokens from the first to the last, the first and the last validation of
    each set and decoding."""
    there = run.samples
    chosen, total = chosen_tables(there), len(there)
    found = SampleFiles()
    if total > len(chosen):
        found.left_out.append(f"{len(chosen)} of the {total} files of samples/ are shown.")
    room = SIZE
    cut = bool((run.config.get("algo") or {}).get("mask_truncated"))
    for table in chosen:
        if room <= 0:
            found.left_out.append(f"{table.name} and what comes after it: the page would be too large.")
            break
        try:
            room -= _add(found, table, room, cut)
        except StorageError as error:
            found.left_out.append(str(error))
    return found


def chosen_tables(tables: Sequence[SampleTable]) -> list[SampleTable]:
    """Choose tables of `samples/`, in the order of the menu: first those with colours for tokens, and the newest of a
    kind before the others."""
    validations: dict[str, list[SampleTable]] = {}
    for table in tables:
        if (validation := validation_of(table)) is not None:
            validations.setdefault(validation, []).append(table)
    rollouts = [table for table in tables if re.fullmatch(r"step_\d+", table.name)]
    by_tokens = [table for table in tables if re.fullmatch(r"tokens_\d+", table.name)]
    replays = [table for table in tables if re.fullmatch(r"replay_\d+", table.name)]
    ends = [table for found in validations.values() for table in dict.fromkeys((found[-1], found[0]))]
    drawn = [*spread(by_tokens, BY_TOKENS)[::-1], *spread(rollouts, ROLLOUTS)[::-1]]
    return [*replays[-1:], *drawn, *ends]


def _add(found: SampleFiles, table: SampleTable, room: int, cut: bool) -> int:
    """Add a table, and return the size of what was added."""
    rollout = read_table(table, ROWS)
    prompts: list[str] = []
    rows: list[dict[str, Any]] = []
    size, last, shortened = 0, -1, 0
    for each in rollout.shown:
        if size > room:
            break
        prompt, was_cut = _shortened(_prompt_text(each))
        if each.group != last:
            prompts.append(prompt)
            last, size = each.group, size + len(prompt)
        row, of_row = _row(each, len(prompts) - 1, cut)
        rows.append(row)
        size += of_row
        shortened += was_cut or row.get("cut", False)
    part = "" if len(rows) == rollout.completions else f"{len(rows)} of "
    said_of = f"{part}{rollout.completions} completions"
    if shortened:
        said_of += f"; long texts and episodes are cut after {CHARACTERS} characters or {TOKENS} tokens"
    found.files.append({"name": label(table, rollout.step), "said": said_of, "prompts": prompts, "rows": rows})
    return size


def validation_of(table: SampleTable) -> str | None:
    """Return the part of the name that is equal for validations of one set and decoding; None for a rollout."""
    match = re.fullmatch(r"val_\d+_(t.*)", table.name)
    return match[1] if match else None


def title(table: SampleTable) -> str:
    """Return set and decoding of a validation in words; empty for anything else."""
    match = re.fullmatch(r"t([0-9.e+-]+)(?:_(.+))?", validation_of(table) or "")
    if match is None:
        return ""
    return visible(f"{match[2] or 'held-out'}, {decoding(float(match[1]))}")


def label(table: SampleTable, step: int) -> str:
    """Return the name of a table in words."""
    if name := title(table):
        return f"{name}, step {step}"
    if table.name.startswith("replay_"):
        return f"replayed rollout of step {step}, by tokens"
    if table.name.startswith("tokens_"):
        return f"rollout of step {step}, by tokens"
    return f"rollout of step {step}"


def _shortened(text: str) -> tuple[str, bool]:
    if len(text) <= CHARACTERS:
        return visible(text), False
    half = CHARACTERS // 2
    return visible(f"{text[:half]}\n[... {len(text) - CHARACTERS} characters more ...]\n{text[-half:]}"), True


def _prompt_text(each: Recorded) -> str:
    if isinstance(each.prompt, str):
        return each.prompt
    words = ({**message, "content": said(message.get("content"))} for message in each.prompt)
    return "\n".join(f"{message['role']}: {words_of(message)}" for message in words)


def _row(each: Recorded, prompt: int, mask_cut: bool) -> tuple[dict[str, Any], int]:
    row: dict[str, Any] = {"p": prompt, "r": _number(each.reward), "a": _number(each.advantage), "e": visible(each.end)}
    row["f"] = {visible(name): _number(value) for name, value in each.rewards.items()}
    row["x"] = {visible(name): _shortened(value)[0] for name, value in each.columns.items()}
    size = sum(map(len, row["x"].values()))
    if each.error:
        row["x"]["error"] = visible(each.error[:CHARACTERS])
    if each.tokens is None:
        row["c"], row["cut"] = _shortened(_completion_text(each))
        return row, size + len(row["c"])
    row["t"], row["cut"] = _tokens(each, each.tokens, mask_cut), len(each.tokens) > TOKENS
    return row, size + 8 * sum(map(len, row["t"].values()))


def _completion_text(each: Recorded) -> str:
    if len(each.messages) == 1:
        return words_of(each.messages[0])
    return "\n".join(f"{message['role']}: {words_of(message)}" for message in each.messages)


def _tokens(each: Recorded, tokens: Tokens, mask_cut: bool) -> dict[str, list[Any]]:
    """Return lists of one length: texts, reasons, and the numbers that the file holds."""
    columns: dict[str, Sequence[float] | None] = {
        "advantage": tokens.advantages,
        "logprob": tokens.sampler_logprobs,
        **measures(tokens),
    }
    found: dict[str, list[Any]] = {"text": [visible(text) for text in tokens.text[:TOKENS]]}
    found["mask"] = list(reasons(each, tokens, mask_cut))[:TOKENS]
    found |= {name: [_number(value) for value in values[:TOKENS]] for name, values in columns.items() if values}
    return found


def measures(tokens: Tokens) -> dict[str, list[float]]:
    """Return the measures of each token that the file allows: `ratio` of the policy now, or when it was trained, to
    the one that drew it; `kl` to the reference by k3; `entropy`; `value`."""
    found: dict[str, list[float]] = {}
    now = tokens.logprobs or tokens.old_logprobs
    before = (tokens.old_logprobs or tokens.sampler_logprobs) if tokens.logprobs else tokens.sampler_logprobs
    if now:
        found["ratio"] = [_exp(new - old) for new, old in zip(now, before)]
    if tokens.ref_logprobs:
        policy = now or tokens.sampler_logprobs
        found["kl"] = [_exp(ref - new) - (ref - new) - 1 for ref, new in zip(tokens.ref_logprobs, policy)]
    if tokens.entropies:
        found["entropy"] = tokens.entropies
    if tokens.values:
        found["value"] = tokens.values
    return found


def _exp(value: float) -> float:
    return math.exp(min(value, 50.0))


def reasons(each: Recorded, tokens: Tokens, mask_cut: bool) -> Iterator[str]:
    """Yield for each token the reason why it is not learned from, a key of `MASK_REASONS`.

    Args:
        each: The completion.
        tokens: Its own.
        mask_cut: True if the run masks completions that were cut.
    """
    why = "left"
    if each.end in ("failed", "timeout"):
        why = "failed"
    elif math.isnan(each.reward):
        why = "unscored"
    elif mask_cut and each.end == "cut":
        why = "cut"
    for by_policy, learned, advantage in zip(tokens.by_policy, tokens.learned, tokens.advantages):
        yield READ if not by_policy else why if not learned else "" if advantage else "still"


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


# ---------------------------------------------------------------------- distributions


def distributions(run: RunFiles) -> list[tuple[str, list[tuple[str, list[float]]]]]:
    """Return rewards, advantages and lengths of completions in rollouts from the first to the last: names with rows
    for `histograms`. Rollouts that cannot be read are left out, and columns with one number everywhere."""
    import pyarrow

    rollouts = spread([table for table in run.samples if re.fullmatch(r"step_\d+", table.name)], 6)
    found: dict[str, list[tuple[str, list[float]]]] = {}
    for table in rollouts:
        try:
            names = table.columns()
            wanted = [name for name in ("reward", "advantage", "length") if name in names]
            columns: Mapping[str, list[Any]] = table.read(wanted).to_pydict()
        except (OSError, pyarrow.ArrowException):
            continue
        for name, values in columns.items():
            there = [float(value) for value in values if isinstance(value, (int, float)) and math.isfinite(value)]
            if there:
                found.setdefault(name, []).append((f"step {int(table.name[5:])}", there))
    return [(name, rows) for name, rows in found.items() if len({value for _, row in rows for value in row}) > 1]
