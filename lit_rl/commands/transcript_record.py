"""What a run recorded of its completions, read back from `samples/`: episodes, or texts of one turn."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_rl.callbacks.sample_files import SampleTable, tables_in
from lit_rl.episodes import RETURNED_IMAGES
from lit_rl.episodes import TOKENS as PREFIX
from lit_rl.errors import ConfigError, StorageError
from lit_rl.images import COLUMNS as IMAGE_COLUMNS
from lit_rl.videos import COLUMNS as VIDEO_COLUMNS

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True)
class Tokens:
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
class Recorded:
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
    tokens: Tokens | None
    """None where no tokens were written: in validations, and for completions of one turn."""
    images: list[dict[str, Any]] = field(default_factory=list)
    """Images of the prompt, each with its `bytes` or its `path`."""
    returned: list[dict[str, Any]] = field(default_factory=list)
    """Images that tools and environments returned, in their order."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Score of each reward function; NaN where it did not apply."""
    columns: dict[str, str] = field(default_factory=dict)
    """The data's own columns, and notes of rewards, as text."""

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
    shown: list[Recorded]
    """Completions of the groups at its beginning."""


def read(run_dir: Path, files: str, rollouts: int, episodes: int) -> list[RecordedRollout]:
    """Read rollouts that are spread evenly from the first to the last.

    Args:
        run_dir: Folder of the run.
        files: Which names in its `samples/`, such as `step_*`.
        rollouts: At most.
        episodes: Completions at most, all of them together.

    Raises:
        ConfigError: there is none of that name.
        StorageError: a file is damaged.
    """
    found = [table for table in tables_in(run_dir / "samples") if fnmatchcase(table.name, files)]
    if not found:
        raise ConfigError(
            f"There is no {files}.parquet in {run_dir / 'samples'}. A run writes them with callbacks=default "
            "(callbacks.samples); transcripts.files names others, such as 'val_*'."
        )
    chosen = spread(found, min(rollouts, episodes))
    return [read_table(table, episodes // len(chosen)) for table in chosen]


def spread(items: Sequence[Any], most: int) -> list[Any]:
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
        groups = _groups(table.column("group").to_pylist() if "group" in table.column_names else asked(table))
        rows = table.slice(0, whole_groups(groups, most)).to_pylist()
        shown = [_recorded(i, group, row) for i, (group, row) in enumerate(zip(groups, rows))]
    except (OSError, pyarrow.ArrowException, KeyError, ValueError) as error:
        raise StorageError(f"{stored.path} holds no samples of a run, or is damaged: {error}.") from error
    scored = [reward for reward in columns["reward"] if not math.isnan(reward)]
    mean = sum(scored) / len(scored) if scored else math.nan
    step = columns["step"][0] if len(table) else 0
    return RecordedRollout(stored.name, step, len(table), mean, shown)


ASKED = ("prompt", *IMAGE_COLUMNS, *VIDEO_COLUMNS)
"""Columns that hold the prompt."""


def asked(table: pyarrow.Table) -> list[Any]:
    """Return the text and images of each row's prompt."""
    return table.select([name for name in ASKED if name in table.column_names]).to_pylist()


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


def _recorded(number: int, group: int, row: Mapping[str, Any]) -> Recorded:
    said = [{"role": "assistant", "content": row["completion"]}]
    return Recorded(
        number=number,
        group=group,
        prompt=_prompt(row["prompt"]),
        messages=_json(row["messages"]) if "turns" in row else said,
        reward=row["reward"],
        advantage=row.get("advantage", math.nan),
        end=row.get("end", "ended" if row["ended"] else "cut"),
        turn_rewards=_json(row.get("turn_rewards", "[]")),
        calls=row.get("calls", 0),
        failed_calls=row.get("failed_calls", 0),
        error=row.get("episode_error", ""),
        tokens=_tokens(row) if "tokens/ids" in row else None,
        images=[
            *(image for name in IMAGE_COLUMNS for image in _images(row.get(name))),
            *(image for name in VIDEO_COLUMNS for image in _first_frames(row.get(name))),
        ],
        returned=_images(row.get(RETURNED_IMAGES)),
        rewards={name.removeprefix(_REWARDS): value for name, value in row.items() if name.startswith(_REWARDS)},
        columns={
            name: str(value)
            for name, value in row.items()
            if isinstance(value, _PLAIN) and not name.startswith((_REWARDS, PREFIX)) and name not in _OF_THE_TABLE
        },
    )


_PLAIN = (str, int, float, bool)
_REWARDS = "rewards/"
_OF_THE_TABLE = {
    "step", "prompt", "completion", "reward", "advantage", "ended", "group", "end", "turn_rewards", "messages",
    "episode_error",
}  # fmt: skip
"""Columns that have a field of their own."""


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


def _tokens(row: Mapping[str, Any]) -> Tokens:
    return Tokens(
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
