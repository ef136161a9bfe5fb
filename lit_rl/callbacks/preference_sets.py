"""Data sets for preference methods and reward models, made from the rollouts of a run while it trains."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn

from lit_rl.algorithms.data_parallel import tensor_parallel_size
from lit_rl.callbacks.output_files import ImageWriter
from lit_rl.core.declared_settings import checked
from lit_rl.core.episode import Prompt
from lit_rl.core.errors import ConfigError, StorageError, did_you_mean
from lit_rl.core.ranks import gather_objects
from lit_rl.core.visuals import IMAGE_COLUMNS, VIDEO_COLUMNS
from lit_rl.data.example_formats import OTHER_MASKS
from lit_rl.data.kinds import COLUMNS
from lit_rl.data.rendering import control_tokens
from lit_rl.data.splits import prompt_key
from lit_rl.ops.ranges import AtLeastOne, NotNegative, Real

Row = dict[str, Any]

SETS = ("pairs", "verdicts", "ranked")
_RESERVED = {*(name for names in COLUMNS.values() for name in names), *OTHER_MASKS, "margin"}
"""Columns that define the kind of a row: columns of the data under such a name are left out."""


@dataclass(frozen=True)
class Member:
    """A completion of a group, with its reward."""

    text: str
    reward: float
    ended: bool


@checked("callbacks.preference_sets")
class PreferenceSets(L.Callback):
    """Data sets of preferences from rollouts: JSON Lines files in `datasets/` of the Trainer's `default_root_dir`.

    - `pairs.jsonl` (`chosen`, `rejected`): the best and the worst completion of each group.
    - `ranked.jsonl` (the same columns): the pairs of a group whose rewards differ, the widest apart first.
    - `verdicts.jsonl` (`completion`, `label`): every completion, good or not.

    Prompts are written as the run had them, text or messages, with the data's own columns, the rewards and the step.
    Images are paths: of the original file, or in `datasets/images/` for those that came as bytes. No row is written
    twice. Left out are completions that no reward applied to, empty ones, and those that no data module would read; one
    that was cut at `max_new_tokens` is never the better one of a pair nor good. Rows of all ranks are included, and a
    resumed run's files equal those of an uninterrupted one.

    Args:
        sets: The files to write.
        margin: Least difference between the rewards of a pair, in units of the reward; a positive difference is always
            needed.
        threshold: The lowest reward of a good completion.
        ranked_per_group: Pairs of one group in `ranked.jsonl`, at most.
        max_rows: Rows of one file, at most; nothing is added beyond.

    Raises:
        ConfigError: an unknown set, none, or a number out of range; in `setup`: an algorithm that draws no rollouts, or
            no pairs because it draws one completion a prompt.
    """

    def __init__(
        self,
        *,
        sets: Sequence[Literal["pairs", "verdicts", "ranked"]] = SETS,
        margin: NotNegative = 0.0,
        threshold: Real = 0.5,
        ranked_per_group: AtLeastOne = 4,
        max_rows: AtLeastOne = 100_000,
    ) -> None:
        for name in sets:
            if name not in SETS:
                raise ConfigError(
                    f"callbacks.preference_sets.sets: {name!r} is unknown; allowed are {', '.join(SETS)}."
                    f"{did_you_mean(str(name), SETS)}"
                )
        if not sets:
            raise ConfigError("callbacks.preference_sets.sets is empty: name one or more, or take callbacks=default.")
        self.sets, self.margin, self.threshold = tuple(dict.fromkeys(sets)), margin, threshold
        self.ranked_per_group, self.max_rows = ranked_per_group, max_rows
        self._known: dict[str, set[bytes]] = {}
        """Digests of the rows of each file, so that none is written twice."""

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if not hasattr(pl_module, "scored"):
            raise ConfigError(
                f"callbacks=preference_sets needs rollouts, and {type(pl_module).__name__} generates none: use "
                "callbacks=default."
            )
        if getattr(pl_module, "opponent_writes", False) and set(self.sets) - {"verdicts"}:
            raise ConfigError(
                f"callbacks.preference_sets: {type(pl_module).__name__} writes one completion of each prompt itself, "
                "the other is its opponent's, so there are no pairs of its own. Set "
                "callbacks.preference_sets.sets=[verdicts]."
            )
        if getattr(pl_module, "env", None) is not None:
            raise ConfigError(
                "callbacks.preference_sets writes completions of one turn, and env= makes episodes of several turns, "
                "which no method can learn from as pairs: remove one of the two."
            )
        if pl_module.group_size < 2 and set(self.sets) - {"verdicts"}:
            raise ConfigError(
                "callbacks.preference_sets: pairs compare completions of one prompt, and algo.group_size=1. Set "
                "callbacks.preference_sets.sets=[verdicts]."
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if getattr(pl_module, "ranks_per_group", 1) > 1 and set(self.sets) - {"verdicts"}:
            raise ConfigError(
                f"callbacks.preference_sets: pairs compare completions of one prompt, and {pl_module.ranks_per_group} "
                "ranks share them. Set data.prompts_per_rollout to a multiple of the ranks, or "
                "callbacks.preference_sets.sets=[verdicts]."
            )
        # Read anew: when a run is resumed, rows from after the checkpoint have just been cut off.
        self._known = {name: set() for name in self.sets}
        for name, digests in self._known.items():
            path = self._path(trainer, name)
            if not path.is_file():
                continue
            try:
                with path.open(encoding="utf-8") as lines:
                    digests |= {_digest(json.loads(line)) for line in lines}
            except (OSError, ValueError, KeyError) as error:
                raise StorageError(f"{path} is damaged ({error}): remove it, or take another run_dir.") from error

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch.slot != 0 or pl_module.scored is None or trainer.fast_dev_run:  # pyright: ignore
            return
        rows_by_rank = gather_objects(self.rows(pl_module))[:: tensor_parallel_size(trainer)]
        if trainer.is_global_zero:
            for name in self.sets:
                self._append(trainer, name, [row for rows in rows_by_rank for row in rows[name]])

    def rows(self, module: Any) -> dict[str, list[Row]]:
        """Return the rows for each set from the last rollout of an `OnPolicyModule`, on this rank."""
        scored, table = module.scored, module.samples
        size = len(table["completion"]) // len(scored.batch)
        control = forbidden_texts(module)
        found: dict[str, list[Row]] = {name: [] for name in self.sets}
        for i, prompt in enumerate(scored.batch.prompts):
            group = slice(i * size, (i + 1) * size)
            columns = zip(table["completion"][group], table["reward"][group], table["ended"][group], strict=True)
            members = [Member(*column) for column in columns]
            members = [m for m in members if not math.isnan(m.reward) and is_readable(m.text, prompt, control)]
            rest = {name: values[i] for name, values in scored.batch.columns.items() if name not in _RESERVED}
            for name in self.sets:
                for row in getattr(self, f"_{name}")(members):
                    found[name].append({"prompt": prompt, **rest, **row, "step": table["step"][0]})
        return found

    def _pairs(self, members: Sequence[Member]) -> Iterator[Row]:
        ended = [m for m in members if m.ended]
        if ended:
            yield from self._pair(max(ended, key=lambda m: m.reward), min(members, key=lambda m: m.reward))

    def _ranked(self, members: Sequence[Member]) -> Iterator[Row]:
        distinct = list({member.text: member for member in reversed(members)}.values())[::-1]
        pairs = [(better, worse) for better in distinct if better.ended for worse in distinct]
        pairs.sort(key=lambda pair: pair[1].reward - pair[0].reward)  # stable: among equals the first drawn
        rows = (row for pair in pairs for row in self._pair(*pair))
        yield from (row for row, _ in zip(rows, range(self.ranked_per_group)))

    def _pair(self, better: Member, worse: Member) -> Iterator[Row]:
        difference = better.reward - worse.reward
        if difference > 0 and difference >= self.margin and better.text != worse.text:
            yield {
                "chosen": better.text,
                "rejected": worse.text,
                "chosen_reward": better.reward,
                "rejected_reward": worse.reward,
            }

    def _verdicts(self, members: Sequence[Member]) -> Iterator[Row]:
        for member in members:
            good = member.ended and member.reward >= self.threshold
            yield {"completion": member.text, "label": good, "reward": member.reward}

    def _path(self, trainer: L.Trainer, name: str) -> Path:
        return Path(trainer.default_root_dir) / "datasets" / f"{name}.jsonl"

    def _append(self, trainer: L.Trainer, name: str, rows: Sequence[Row]) -> None:
        known, lines, path = self._known[name], [], self._path(trainer, name)
        images = ImageWriter(path.parent)
        for row in rows:
            named = images.named(row)
            digest = _digest(named)
            if digest in known:
                continue
            if len(known) >= self.max_rows:
                rank_zero_warn(
                    f"{path} has callbacks.preference_sets.max_rows={self.max_rows} rows: no more are added."
                )
                break
            known.add(digest)
            images.write(row)
            lines.append(json.dumps(named, default=str) + "\n")
        if lines:
            append_bytes(path, "".join(lines).encode())


def append_bytes(path: Path, data: bytes) -> None:
    """Add all of the bytes to a file, or none.

    Raises:
        StorageError: it cannot be written; the file is as it was.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            size = file.tell()
            if file.write(data) != len(data):
                file.truncate(size)
                raise OSError("no space is left")
    except OSError as error:
        raise StorageError(f"Rows could not be added to {path}: {error}.") from error


def _digest(row: Mapping[str, Any]) -> bytes:
    """Return a digest that is equal for equal prompts, images and completions; the first such row stays."""
    prompt: Prompt = row["prompt"]
    answers = [row.get(name) for name in ("chosen", "rejected", "completion", *IMAGE_COLUMNS, *VIDEO_COLUMNS)]
    return hashlib.blake2b(json.dumps([prompt_key(prompt), answers]).encode(), digest_size=16).digest()


def forbidden_texts(module: Any) -> list[str]:
    """Return the texts that no message may hold: control tokens, and what a processor takes for an image."""
    processor = getattr(getattr(module, "model", None), "processor", None)
    return [*control_tokens(module.tokenizer), *(processor.reserved if processor is not None else ())]


def is_readable(text: str, prompt: Prompt, control: Sequence[str]) -> bool:
    """Tell whether a data module reads the completion: not blank, no NUL, and no control token in a message."""
    if not text.strip() or "\0" in text:
        return False
    return isinstance(prompt, str) or not any(token in text for token in control)
