"""The completions that a run recorded in `samples/`: read back as episodes or texts, and chosen and cut to size for the
browser of samples in its page."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import groupby
from typing import TYPE_CHECKING, Any

from lit_rl.callbacks.display import content_text, escape_control
from lit_rl.callbacks.output_files import SampleTable
from lit_rl.core.episode import RETURNED_IMAGES, message_text
from lit_rl.core.episode import TOKENS as PREFIX
from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.core.visuals import IMAGE_COLUMNS, VIDEO_COLUMNS
from lit_rl.reports.metric_groups import decoding_label
from lit_rl.reports.run_files import RunFiles

if TYPE_CHECKING:
    import pyarrow


# ---------------------------------------------------------------------- completions, read back


@dataclass(frozen=True)
class RecordedTokens:
    """The tokens of an episode behind its prompt, in order: lists of one length."""

    ids: list[int]
    text: list[str]
    turn: list[int]
    by_policy: list[bool]
    learned: list[bool]
    """True for a token in the loss."""
    sampler_logprobs: list[float]
    advantages: list[float]
    old_logprobs: list[float] | None
    """Log-probs of the policy that drew the tokens, as training scores them; None where the run took none."""
    logprobs: list[float] | None = None
    """Log-probs of the policy that learned from them last, or that `lit-rl replay` scored them with; None where there
    is none."""
    ref_logprobs: list[float] | None = None
    """Log-probs of the reference, likewise."""
    entropies: list[float] | None = None
    """Entropies of that policy's next-token distributions, in nats, likewise."""
    values: list[float] | None = None
    """Values of the critic, likewise."""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class RecordedCompletion:
    """One completion."""

    number: int
    """Number of its row."""
    group: int
    """Number of its group: equal for completions of one prompt."""
    prompt: str | list[dict[str, Any]]
    messages: list[dict[str, Any]]
    """Messages after the prompt; for a completion of one turn, its text."""
    reward: float
    """NaN: unscored."""
    advantage: float
    """The mean over its tokens in the loss; NaN where there is none."""
    end: str
    turn_rewards: list[float | None]
    calls: int
    failed_calls: int
    error: str
    tokens: RecordedTokens | None
    """None where no tokens were written: in validations, and for completions of one turn."""
    images: list[dict[str, Any]] = field(default_factory=list)
    """Images of the prompt, each with its `bytes` or its `path`."""
    returned: list[dict[str, Any]] = field(default_factory=list)
    """Images that tools and environments returned, in their order."""
    forks: list[list[int | None]] = field(default_factory=list)
    """See `lit_rl.core.episode.Episode.forks`."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Score of each reward function; NaN where it did not apply."""
    columns: dict[str, str] = field(default_factory=dict)
    """The data's own columns, and notes of rewards, as text."""

    @property
    def prompt_text(self) -> str:
        """The prompt as text: of messages, each after its role."""
        if isinstance(self.prompt, str):
            return self.prompt
        words = ({**message, "content": content_text(message.get("content"))} for message in self.prompt)
        return "\n".join(f"{message['role']}: {message_text(message)}" for message in words)

    @property
    def turns(self) -> int:
        """Number of the policy's turns."""
        return sum(message["role"] == "assistant" for message in self.messages)

    @property
    def bad(self) -> bool:
        """True if the environment or a call failed."""
        return self.end in ("failed", "timeout") or bool(self.error) or self.failed_calls > 0


@dataclass(frozen=True)
class RecordedRollout:
    """One rollout or validation, with those of its completions that are shown."""

    name: str
    step: int
    """Optimizer steps that the policy had taken."""
    completions: int
    """Number of all completions."""
    mean_reward: float
    """Mean over those that were scored; NaN where none was."""
    shown: list[RecordedCompletion]
    """Completions of the groups at its beginning."""


def read_rollouts(run: RunFiles, files: str, rollouts: int, episodes: int) -> list[RecordedRollout]:
    """Read rollouts that are spread evenly from the first to the last.

    Args:
        run: The run.
        files: Which names in its `samples/`, such as `step_*`.
        rollouts: At most.
        episodes: Completions at most, all of them together.

    Raises:
        ConfigError: there is none of that name.
        StorageError: a file is damaged.
    """
    found = [table for table in run.samples if fnmatchcase(table.name, files)]
    if not found:
        raise ConfigError(
            f"There is no {files}.parquet in {run.samples_folder}. A run writes them with callbacks=default "
            "(callbacks.samples); transcripts.files names others, such as 'val_*'."
        )
    chosen = evenly_spread(found, min(rollouts, episodes))
    return [read_table(table, episodes // len(chosen)) for table in chosen]


def evenly_spread(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` of the items, the first and the last included; the last where it is one."""
    if most >= len(items):
        return list(items)
    if most == 1:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def read_table(stored: SampleTable, most: int) -> RecordedRollout:
    """Read one rollout or validation, of which at most `most` completions are shown.

    Raises:
        StorageError: its file is damaged.
    """
    import pyarrow

    try:
        table = stored.read()
        columns = table.select(["step", "prompt", "reward"]).to_pydict()
        groups = _groups(table.column("group").to_pylist() if "group" in table.column_names else prompts_shown(table))
        rows = table.slice(0, whole_groups(groups, most)).to_pylist()
        shown = [_recorded(i, group, row) for i, (group, row) in enumerate(zip(groups, rows))]
    except (OSError, pyarrow.ArrowException, KeyError, ValueError) as error:
        raise StorageError(f"{stored.path} holds no samples of a run, or is damaged: {error}.") from error
    scored = [reward for reward in columns["reward"] if not math.isnan(reward)]
    mean = sum(scored) / len(scored) if scored else math.nan
    step = columns["step"][0] if len(table) else 0
    return RecordedRollout(stored.name, step, len(table), mean, shown)


PROMPT_COLUMNS = ("prompt", *IMAGE_COLUMNS, *VIDEO_COLUMNS)
"""Columns that hold the prompt."""


def prompts_shown(table: pyarrow.Table) -> list[Any]:
    """Return the text and images of each row's prompt."""
    return table.select([name for name in PROMPT_COLUMNS if name in table.column_names]).to_pylist()


def _groups(keys: Sequence[Any]) -> list[int]:
    """Return the number of each row's group: neighbours with one key are one."""
    return [number for number, (_, members) in enumerate(groupby(keys)) for _ in members]


def whole_groups(groups: Sequence[int], most: int) -> int:
    """Return the number of rows to take, `most` or fewer: whole groups, or a part of the first."""
    if most >= len(groups):
        return len(groups)
    end = most
    while end > 0 and groups[end - 1] == groups[end]:
        end -= 1
    return end or most


_PLAIN = (str, int, float, bool)

_REWARDS = "rewards/"

_OWN_FIELDS = {
    "step", "prompt", "completion", "reward", "advantage", "ended", "group", "end", "turn_rewards", "messages",
    "episode_error", "forks",
}  # fmt: skip
"""Columns that have a field of their own."""


def _recorded(number: int, group: int, row: Mapping[str, Any]) -> RecordedCompletion:
    message = [{"role": "assistant", "content": row["completion"]}]
    return RecordedCompletion(
        number=number,
        group=group,
        prompt=_prompt(row["prompt"]),
        messages=_json(row["messages"]) if "turns" in row else message,
        reward=row["reward"],
        advantage=row.get("advantage", math.nan),
        end=row.get("end", "ended" if row["ended"] else "cut"),
        turn_rewards=_json(row.get("turn_rewards", "[]")),
        calls=row.get("calls", 0),
        failed_calls=row.get("failed_calls", 0),
        error=row.get("episode_error", ""),
        tokens=_tokens_of_row(row) if "tokens/ids" in row else None,
        images=[
            *(image for name in IMAGE_COLUMNS for image in _images(row.get(name))),
            *(image for name in VIDEO_COLUMNS for image in _first_frames(row.get(name))),
        ],
        returned=_images(row.get(RETURNED_IMAGES)),
        forks=_json(row.get("forks", "[]")),
        rewards={name.removeprefix(_REWARDS): value for name, value in row.items() if name.startswith(_REWARDS)},
        columns={
            name: str(value)
            for name, value in row.items()
            if isinstance(value, _PLAIN) and not name.startswith((_REWARDS, PREFIX)) and name not in _OWN_FIELDS
        },
    )


def _tokens_of_row(row: Mapping[str, Any]) -> RecordedTokens:
    return RecordedTokens(
        ids=row["tokens/ids"],
        text=row["tokens/text"],
        turn=row["tokens/turn"],
        by_policy=row["tokens/by_policy"],
        learned=row["tokens/learned"],
        sampler_logprobs=row["tokens/sampler_logprobs"],
        advantages=row.get("tokens/advantages") or [0.0] * len(row["tokens/ids"]),
        old_logprobs=row.get("tokens/old_logprobs"),
        logprobs=row.get("tokens/logprobs"),
        ref_logprobs=row.get("tokens/ref_logprobs"),
        entropies=row.get("tokens/entropies"),
        values=row.get("tokens/values"),
    )


def _images(value: Any) -> list[dict[str, Any]]:
    """Return the images in a column; none where it holds something else."""
    many = value if isinstance(value, list) else [value]
    return [each for each in many if isinstance(each, dict) and each.keys() == {"bytes", "path"}]


def _first_frames(value: Any) -> list[dict[str, Any]]:
    """Return the first frames of the videos in a column."""
    many = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    return [frame for each in many for frame in _images(each)[:1]]


def _json(text: str) -> Any:
    """Parse JSON. Text that arrow could not store (half a surrogate pair) was made JSON twice."""
    value = json.loads(text)
    return json.loads(value) if isinstance(value, str) else value


def _prompt(text: str) -> str | list[dict[str, Any]]:
    """Parse a prompt: messages are stored as JSON, a plain text as it is."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    messages = isinstance(value, list) and all(isinstance(each, dict) and "role" in each for each in value)
    return value if messages else text


# ---------------------------------------------------------------------- tables of the browser: which, and their names


ROLLOUTS, BY_TOKENS, ROWS, CHARACTERS, TOKENS = 4, 4, 48, 4000, 800
"""Most rollouts, rollouts by tokens, completions of one of them, characters of a text, tokens of a completion."""

MAX_SIZE = 3_000_000
"""Characters and numbers of all samples together, beyond which no further completion is taken."""


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
    tables = run.samples
    chosen, total = chosen_tables(tables), len(tables)
    found = SampleFiles()
    if total > len(chosen):
        found.left_out.append(f"{len(chosen)} of the {total} files of samples/ are shown.")
    room = MAX_SIZE
    cut = bool((run.config.get("algo") or {}).get("mask_truncated"))
    for table in chosen:
        if room <= 0:
            found.left_out.append(f"{table.name} and what comes after it: the page would be too large.")
            break
        try:
            room -= _add_table(found, table, room, cut)
        except StorageError as error:
            found.left_out.append(str(error))
    return found


def chosen_tables(tables: Sequence[SampleTable]) -> list[SampleTable]:
    """Choose tables of `samples/`, in the order of the menu: first those with colours for tokens, and the newest of a
    kind before the others."""
    validations: dict[str, list[SampleTable]] = {}
    for table in tables:
        if (validation := validation_key(table)) is not None:
            validations.setdefault(validation, []).append(table)
    rollouts = [table for table in tables if re.fullmatch(r"step_\d+", table.name)]
    by_tokens = [table for table in tables if re.fullmatch(r"tokens_\d+", table.name)]
    replays = [table for table in tables if re.fullmatch(r"replay_\d+", table.name)]
    ends = [table for found in validations.values() for table in dict.fromkeys((found[-1], found[0]))]
    drawn = [*evenly_spread(by_tokens, BY_TOKENS)[::-1], *evenly_spread(rollouts, ROLLOUTS)[::-1]]
    return [*replays[-1:], *drawn, *ends]


def validation_key(table: SampleTable) -> str | None:
    """Return the part of the name that is equal for validations of one set and decoding; None for a rollout."""
    match = re.fullmatch(r"val_\d+_(t.*)", table.name)
    return match[1] if match else None


def validation_title(table: SampleTable) -> str:
    """Return set and decoding of a validation in words; empty for anything else."""
    match = re.fullmatch(r"t([0-9.e+-]+)(?:_(.+))?", validation_key(table) or "")
    if match is None:
        return ""
    return escape_control(f"{match[2] or 'held-out'}, {decoding_label(float(match[1]))}")


def table_label(table: SampleTable, step: int) -> str:
    """Return the name of a table in words."""
    if name := validation_title(table):
        return f"{name}, step {step}"
    if table.name.startswith("replay_"):
        return f"replayed rollout of step {step}, by tokens"
    if table.name.startswith("tokens_"):
        return f"rollout of step {step}, by tokens"
    return f"rollout of step {step}"


# ---------------------------------------------------------------------- rows of the browser


def _add_table(found: SampleFiles, table: SampleTable, room: int, cut: bool) -> int:
    """Add a table, and return the size of what was added."""
    rollout = read_table(table, ROWS)
    prompts: list[str] = []
    rows: list[dict[str, Any]] = []
    size, last, shortened = 0, -1, 0
    for each in rollout.shown:
        if size > room:
            break
        prompt, was_cut = _shortened(each.prompt_text)
        if each.group != last:
            prompts.append(prompt)
            last, size = each.group, size + len(prompt)
        row, row_size = _browser_row(each, len(prompts) - 1, cut)
        rows.append(row)
        size += row_size
        shortened += was_cut or row.get("cut", False)
    part = "" if len(rows) == rollout.completions else f"{len(rows)} of "
    description = f"{part}{rollout.completions} completions"
    if shortened:
        description += f"; long texts and episodes are cut after {CHARACTERS} characters or {TOKENS} tokens"
    found.files.append(
        {"name": table_label(table, rollout.step), "said": description, "prompts": prompts, "rows": rows}
    )
    return size


def _browser_row(each: RecordedCompletion, prompt: int, mask_cut: bool) -> tuple[dict[str, Any], int]:
    row: dict[str, Any] = {
        "p": prompt,
        "r": _rounded(each.reward),
        "a": _rounded(each.advantage),
        "e": escape_control(each.end),
    }
    row["f"] = {escape_control(name): _rounded(value) for name, value in each.rewards.items()}
    row["x"] = {escape_control(name): _shortened(value)[0] for name, value in each.columns.items()}
    size = sum(map(len, row["x"].values()))
    if each.error:
        row["x"]["error"] = escape_control(each.error[:CHARACTERS])
    if each.tokens is None:
        alone = len(each.messages) == 1
        texts = (f"{'' if alone else message['role'] + ': '}{message_text(message)}" for message in each.messages)
        row["c"], row["cut"] = _shortened("\n".join(texts))
        return row, size + len(row["c"])
    columns: dict[str, Sequence[float] | None] = {
        "advantage": each.tokens.advantages,
        "logprob": each.tokens.sampler_logprobs,
        **token_measures(each.tokens),
    }
    tokens: dict[str, list[Any]] = {"text": [escape_control(text) for text in each.tokens.text[:TOKENS]]}
    tokens["mask"] = list(mask_reasons(each, each.tokens, mask_cut))[:TOKENS]
    tokens |= {name: [_rounded(value) for value in values[:TOKENS]] for name, values in columns.items() if values}
    row["t"], row["cut"] = tokens, len(each.tokens) > TOKENS
    return row, size + 8 * sum(map(len, tokens.values()))


def _shortened(text: str) -> tuple[str, bool]:
    if len(text) <= CHARACTERS:
        return escape_control(text), False
    half = CHARACTERS // 2
    return escape_control(f"{text[:half]}\n[... {len(text) - CHARACTERS} characters more ...]\n{text[-half:]}"), True


def _rounded(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


# ---------------------------------------------------------------------- tokens: measures and reasons


NOT_BY_POLICY = "read"

MASK_REASONS = {
    "": "learned from",
    "still": "advantage 0: no gradient of the policy loss",
    NOT_BY_POLICY: "not written by the policy: read, never learned from",
    "cut": "not in the loss: the completion was cut (algo.mask_truncated)",
    "unscored": "not in the loss: no reward applied",
    "failed": "not in the loss: its environment failed",
    "left": "not in the loss: the algorithm left it out (groups, rejection)",
}
"""Reasons why a token is not learned from, by the page's names for them."""


def token_measures(tokens: RecordedTokens) -> dict[str, list[float]]:
    """Return the measures of each token that the file allows: `ratio` of the policy now, or when it was trained, to
    the one that drew it; `kl` to the reference by k3; `entropy`; `value`."""
    found: dict[str, list[float]] = {}
    now = tokens.logprobs or tokens.old_logprobs
    before = (tokens.old_logprobs or tokens.sampler_logprobs) if tokens.logprobs else tokens.sampler_logprobs
    if now:
        found["ratio"] = [_capped_exp(new - old) for new, old in zip(now, before)]
    if tokens.ref_logprobs:
        policy = now or tokens.sampler_logprobs
        found["kl"] = [_capped_exp(ref - new) - (ref - new) - 1 for ref, new in zip(tokens.ref_logprobs, policy)]
    if tokens.entropies:
        found["entropy"] = tokens.entropies
    if tokens.values:
        found["value"] = tokens.values
    return found


def _capped_exp(value: float) -> float:
    return math.exp(min(value, 50.0))


def mask_reasons(each: RecordedCompletion, tokens: RecordedTokens, mask_cut: bool) -> Iterator[str]:
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
        yield NOT_BY_POLICY if not by_policy else why if not learned else "" if advantage else "still"


# ---------------------------------------------------------------------- distributions


def completion_distributions(run: RunFiles) -> list[tuple[str, list[tuple[str, list[float]]]]]:
    """Return rewards, advantages and lengths of completions in rollouts from the first to the last: names with rows
    for `histograms`. Rollouts that cannot be read are left out, and columns with one number everywhere."""
    import pyarrow

    rollouts = evenly_spread([table for table in run.samples if re.fullmatch(r"step_\d+", table.name)], 6)
    found: dict[str, list[tuple[str, list[float]]]] = {}
    for table in rollouts:
        try:
            names = table.columns()
            wanted = [name for name in ("reward", "advantage", "length") if name in names]
            columns: Mapping[str, list[Any]] = table.read(wanted).to_pydict()
        except (OSError, pyarrow.ArrowException):
            continue
        for name, values in columns.items():
            finite = [float(value) for value in values if isinstance(value, (int, float)) and math.isfinite(value)]
            if finite:
                found.setdefault(name, []).append((f"step {int(table.name[5:])}", finite))
    return [(name, rows) for name, rows in found.items() if len({value for _, row in rows for value in row}) > 1]
