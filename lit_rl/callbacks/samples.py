"""Callbacks that show what the policy writes: samples of rollouts and validations, of tokens, and histograms.

`Samples` writes every completion to `samples/`, shows a few on the console and gives whole tables to loggers.
`TokenSamples` writes what the loss saw of each token of a few completions, by which `lit-rl report` colours tokens.
`Histograms` writes rewards, advantages and lengths for loggers that draw them (TensorBoard). The rows of all ranks
are gathered on rank 0.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_rl.algorithms.data_parallel import tensor_parallel_size
from lit_rl.algorithms.evaluation.summary_statistics import token_columns
from lit_rl.algorithms.rollouts.rollout_plan import SeenRows
from lit_rl.callbacks.display import Pictures, console_table, conversation_of, file_name_part
from lit_rl.callbacks.loggers import WriteFailures, log_tables
from lit_rl.callbacks.output_files import write_table
from lit_rl.core.declared_settings import checked
from lit_rl.core.episode import TOKENS
from lit_rl.core.rollout import Rollout, select, trim_rollout
from lit_rl.generation.collect import texts_of
from lit_rl.ops.ranges import AtLeastOne, AtLeastZero
from lit_rl.ops.reductions import masked_mean

# ---------------------------------------------------------------------- schedules, and the rows of all ranks


class EveryNSteps:
    """A trigger, due at step 0, then at the first rollout that begins at or after each multiple of `every` steps.

    Args:
        every: Optimizer steps, 1 or more.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.last: int | None = None
        """The step at which the last rollout began; None before the first, where one step a rollout is assumed."""

    def at(self, step: int) -> bool:
        """Tell whether the rollout that begins after ``step`` optimizer steps is due. To be called once a rollout."""
        before = step - 1 if self.last is None else self.last
        self.last = step
        return step // self.every > before // self.every


class _Periodic(L.Callback):
    """The base of callbacks with an every-N-steps trigger, whose state is in checkpoints."""

    _due: EveryNSteps

    def state_dict(self) -> dict[str, Any]:
        return {"last": self._due.last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._due.last = state_dict["last"]


Table = dict[str, list[Any]]


def gather_on_rank_zero(trainer: L.Trainer, local: Any, unwritten: WriteFailures) -> list[Any]:
    """Gather a value of every rank with rows of its own on rank 0, in the order of ranks; elsewhere an empty list.

    A collective. None stands for a value that could not be sent, such as a reward's extra that cannot be pickled.
    """
    if trainer.world_size == 1:
        return [local]
    sent = pickle.dumps(None)
    with unwritten.spared("sending rows to rank 0"):
        sent = pickle.dumps(local)
    parts = [b""] * trainer.world_size if trainer.is_global_zero else None
    torch.distributed.gather_object(sent, parts, dst=0)
    received: list[Any] = []
    for part in (parts or [])[:: tensor_parallel_size(trainer)]:
        received.append(None)
        with unwritten.spared("taking rows of another rank"):
            received[-1] = pickle.loads(part)
    return received


def stack_tables(tables: Sequence[Mapping[str, list[Any]] | None]) -> Table:
    """Join the rows of every rank, in the order of ranks, with a column `rank` after `step` unless the data has one.

    A column that a rank lacks, such as an extra that its rewards did not log, is None there.
    """
    present = [(rank, table) for rank, table in enumerate(tables) if table]
    names = dict.fromkeys(name for _, table in present for name in table)
    whole: Table = {"step": [], "rank": [], **{name: [] for name in names}}
    for rank, table in present:
        rows = len(table["prompt"])
        for name, values in whole.items():
            values.extend(table.get(name) or [rank if name == "rank" else None] * rows)
    return whole


def merge_validation(parts: Sequence[tuple[Table, Sequence[int | None]] | None]) -> Table:
    """Join the validation of one data set over the ranks, each of its rows once and in its order.

    Where the set does not divide over the ranks, some of them complete a row that another has.

    Args:
        parts: For every rank its table, with the data set's row of each table row; None where that is unknown.
    """
    whole = stack_tables([part and part[0] for part in parts])
    found = [(row, rank) for rank, part in enumerate(parts) if part for row in part[1]]
    first: dict[int | None, int] = {}
    for row, rank in found:
        first.setdefault(row, rank)
    places = [i for i, (row, rank) in enumerate(found) if row is None or first[row] == rank]
    places.sort(key=lambda i: -1 if (row := found[i][0]) is None else row)
    return {name: [values[i] for i in places] for name, values in whole.items()}


# ---------------------------------------------------------------------- completions


_LOGGER_INTERVAL = 50
"""Optimizer steps between two tables in loggers, by default."""


@checked("callbacks.samples")
class Samples(_Periodic):
    """Samples of rollouts and validations: files in `samples/`, tables in loggers, and a few rows on the console.

    The files go to `samples/` in the Trainer's `default_root_dir`, with the rows of all ranks. A file is one rollout,
    or one validation of a set, and is written as soon as that is scored; once there are more than a hundred of a kind,
    the oldest hundred become one file, a row group each.

    Images are shown as thumbnails, on the console by their names. In the files they are columns of `datasets.Image`.
    A file or a table that cannot be written is warned of, and the run goes on (`unwritten`).

    Args:
        print: Rows shown on the console at a time, whose images TensorBoard gets; 0 shows none.
        unique: Show at most one completion of a prompt.
        every: Optimizer steps between two tables on the console and in loggers, from step 0 on. None: every 50 and the
            last in loggers; the first, a middle one and the last on the console. Loggers get all rows, and every
            validation; the parquet files are written for every rollout.
    """

    def __init__(self, print: AtLeastZero = 4, unique: bool = True, every: AtLeastOne | None = None) -> None:
        self.print, self.unique, self.every = print, unique, every
        self._due = EveryNSteps(_LOGGER_INTERVAL if every is None else every)
        self._unshown: tuple[int, Table] | None = None
        """The newest rollout with its step, if it is to be shown at the end."""
        self._untracked: tuple[int, Table] | None = None
        """The same for loggers."""
        self._evaluated: dict[int, Table] = {}
        self._rows: dict[int, list[int | None]] = {}
        """The data set's row for each row of these tables."""
        self.unwritten = WriteFailures("Samples")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch.slot != 0 or not pl_module.samples or trainer.fast_dev_run:  # pyright: ignore
            return
        table = stack_tables(gather_on_rank_zero(trainer, pl_module.samples, self.unwritten))
        if not table["step"]:
            return
        step = table["step"][0]
        self._write(trainer, table, f"step_{step:08d}")
        before = self._due.last
        due = self._due.at(step)
        if due:
            self._track(trainer, "samples", table, step)
        if self.every is None:
            self._untracked = None if due else (step, table)
            middle = trainer.estimated_stepping_batches / 2
            due = before is None or before < middle <= step
            self._unshown = None if due else (step, table)
        if due:
            self._print(step, table)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self._unshown is not None:
            self._print(*self._unshown)
        if self._untracked is not None:
            step, table = self._untracked
            self._track(trainer, "samples", table, step)
        self._unshown = self._untracked = None

    def _print(self, step: int, table: Table) -> None:
        with self.unwritten.spared("a table on the console"):
            if rows := self._pick(table):
                console_table(f"rollout at step {step}", rows)

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._evaluated, self._rows = {}, {}

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if not outputs:
            return  # a loss was measured, nothing was generated
        kept = self._evaluated.setdefault(dataloader_idx, {})
        before, size = len(kept.get("prompt", ())), len(outputs["prompt"])
        rows = getattr(batch, "rows", None) or [None] * size
        self._rows.setdefault(dataloader_idx, []).extend(row for row in rows for _ in range(size // len(rows)))
        for name in dict.fromkeys([*kept, *outputs]):  # a batch may lack columns of images that episodes show
            kept.setdefault(name, [None] * before).extend(outputs.get(name, [None] * size))

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.sanity_checking or trainer.fast_dev_run:  # pyright: ignore
            return
        local = {index: (table, self._rows[index]) for index, table in self._evaluated.items()}
        parts = gather_on_rank_zero(trainer, local, self.unwritten)
        for index in sorted({index for part in parts for index in part or ()}):
            table = merge_validation([part and part.get(index) for part in parts])
            name = file_name_part(trainer.datamodule.val_names[index])  # pyright: ignore
            temperature = f"_t{pl_module.evaluation.temperature:g}"
            suffix = f"_{name}" if name else ""
            self._write(trainer, table, f"val_{trainer.global_step:08d}{temperature}{suffix}")
            stage = "test" if trainer.testing else "val"
            self._track(trainer, f"{stage}_samples{temperature}{suffix}", table, trainer.global_step)

    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end

    def _track(self, trainer: L.Trainer, key: str, table: Table, step: int) -> None:
        if not trainer.loggers:
            return
        with self.unwritten.spared(f"the table {key!r} for loggers"):
            log_tables(trainer, key, table, step, self._pick(table), self.unwritten)

    def _write(self, trainer: L.Trainer, table: Table, name: str) -> None:
        with self.unwritten.spared(f"samples/{name}.parquet"):
            folder = Path(trainer.default_root_dir) / "samples"
            folder.mkdir(parents=True, exist_ok=True)
            write_table(table, folder / f"{name}.parquet")

    def _pick(self, table: Table) -> list[dict[str, Any]]:
        shown, seen = [], set()
        pictures = [Pictures.of(table, i) for i in range(len(table["prompt"]))]
        sees = any(each.refs for each in pictures)
        for i, prompt in enumerate(table["prompt"]):
            digests = [ref.digest for ref in pictures[i].refs]
            key = json.dumps([prompt, digests], sort_keys=True, default=str) if self.unique else i
            if key in seen:
                continue
            seen.add(key)
            row = {"prompt": prompt} | ({"image": pictures[i]} if sees else {})
            row |= {name: table[name][i] for name in ("completion", "reward", "advantage") if name in table}
            shown.append(row | ({"completion": conversation_of(table, i)} if "tokens/ids" in table else {}))
            if len(shown) == self.print:
                break
        return shown if self.print else []


# ---------------------------------------------------------------------- tokens


@checked("callbacks.token_samples")
class TokenSamples(_Periodic):
    """Files with the loss's inputs for each token of a few completions, `samples/tokens_<step>.parquet`.

    They are written in the Trainer's `default_root_dir` for some rollouts, once each was learned from. Some completions
    of each rank have for every token its advantage, whether it is in the loss, and the log-probs of sampler, old policy
    and reference, with the policy's log-prob, entropy and value at the last update.

    Nothing is computed for it. A number that the loss does not use is missing (a reference without KL, an entropy
    without `log_entropy`), and so are the policy's own for a completion that the last update did not compute.

    The completions are those of the prompts of the last micro-batch, in the rollout's order. A file that cannot be
    written is warned of, and the run goes on (`unwritten`).

    Args:
        completions: Completions of each rank, at most; 1 or more.
        every: Optimizer steps between two files: there is one for step 0, and for the first rollout that begins at or
            after each multiple of it.

    Raises:
        ConfigError: one of them is below 1.
    """

    def __init__(self, completions: AtLeastOne = 8, every: AtLeastOne = 10) -> None:
        self.completions = completions
        self._due = EveryNSteps(every)
        self.unwritten = WriteFailures("TokenSamples")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        plan, seen = getattr(pl_module, "plan", None), getattr(pl_module, "seen", None)
        # At the last slot everything is available, also in a run that was resumed in the middle of a rollout.
        if seen is None or plan is None or batch.slot != plan.slots - 1 or trainer.fast_dev_run:  # pyright: ignore
            return
        step = trainer.global_step - plan.steps_per_rollout
        if not self._due.at(step):
            return
        local: Table | None = None
        with self.unwritten.spared("the tokens of this rank"):
            rollout, tokenizer = pl_module.dealt_out(batch).rollout, pl_module.tokenizer
            local = token_table(step, rollout, seen, self.completions, tokenizer, pl_module.plain_columns)
        table = stack_tables(gather_on_rank_zero(trainer, local, self.unwritten))
        if table["step"]:
            with self.unwritten.spared(f"samples/tokens_{step:08d}.parquet"):
                folder = Path(trainer.default_root_dir) / "samples"
                folder.mkdir(parents=True, exist_ok=True)
                write_table(table, folder / f"tokens_{step:08d}.parquet")


def token_table(
    step: int,
    rollout: Rollout,
    seen: SeenRows,
    most: int,
    tokenizer: Any,
    noted: Mapping[str, Sequence[Any]] | None = None,
) -> Table:
    """Return the table of tokens of one rank.

    Columns: step, prompt as the policy read it, completion, reward, `rewards/*`, advantage, length, ended, `tokens/*`,
    and the data's own.

    Args:
        step: Optimizer steps taken when the rollout began.
        rollout: The rollout of this rank.
        seen: The last micro-batch that was learned from.
        most: Most completions, all of the prompts of that micro-batch.
        tokenizer: The policy's tokenizer.
        noted: Rewards of each function and columns of the data, an entry for each row of the rollout.
    """
    group_id = rollout.completions.group_id
    learned = seen.rows.to(group_id.device)
    # All completions of the prompts of the last micro-batch.
    rows = torch.isin(group_id, group_id[learned]).nonzero().flatten()[:most]
    blind = replace(rollout, completions=replace(rollout.completions, vision=None))  # pixels are not needed
    chosen = trim_rollout(select(blind, rows))
    if chosen.advantages is None:
        chosen = replace(chosen, advantages=chosen.verdicts)
    completions, advantages = chosen.completions, chosen.advantages
    if advantages is not None and advantages.ndim == 2:
        advantages = masked_mean(advantages, chosen.loss_mask, 1)
    asked = [ids[mask].tolist() for ids, mask in zip(completions.prompt_ids, completions.prompt_mask)]
    table: Table = {"step": [step] * len(rows), "prompt": tokenizer.batch_decode(asked)}
    table |= {"completion": texts_of(completions, tokenizer), "reward": chosen.rewards.tolist()}
    kept = {name: [values[row] for row in rows.tolist()] for name, values in (noted or {}).items()}
    table |= {name: values for name, values in kept.items() if name.startswith("rewards/")}
    table |= {} if advantages is None else {"advantage": advantages.tolist()}
    table |= {"length": completions.lengths.tolist(), "ended": completions.ended.tolist()}

    reference = {} if chosen.ref_logprobs is None else {"ref_logprobs": chosen.ref_logprobs}
    scores, width = seen.scores, chosen.loss_mask.shape[1]
    scored = {"logprobs": scores.logprobs, "entropies": scores.entropy, "values": scores.values}
    now = {name: _values_of_rows(values, learned, rows, width) for name, values in scored.items() if values is not None}
    table |= token_columns(completions, chosen, tokenizer, reference | now)
    computed = torch.isin(rows, learned).tolist()
    for name in now:
        column = table[TOKENS + name]
        table[TOKENS + name] = [values if known else None for values, known in zip(column, computed)]
    return table | {name: values for name, values in kept.items() if name not in table}


def _values_of_rows(values: Tensor, seen: Tensor, rows: Tensor, width: int) -> Tensor:
    """Return `(rows, width)` float32: the values of the `seen` rows, 0 for the others."""
    found = values.new_zeros((len(rows), width), dtype=torch.float32)
    for place, row in enumerate(rows.tolist()):
        at = (seen == row).nonzero().flatten()
        if len(at):
            row_values = values[at[0], :width]
            found[place, : len(row_values)] = row_values
    return found


# ---------------------------------------------------------------------- histograms


@checked("callbacks.histograms")
class Histograms(_Periodic):
    """Histograms `histograms/reward`, `histograms/advantage` and `histograms/length` of this rank's rollouts.

    Args:
        every: Optimizer steps between two of them: they are written at step 0, and for the first rollout that begins
            at or after each multiple of it.

    Raises:
        ConfigError: `every` is below 1.
    """

    def __init__(self, every: AtLeastOne = 10) -> None:
        self._due = EveryNSteps(every)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = pl_module.samples.get("step", [None])[0]
        if batch.slot != 0 or step is None or not self._due.at(step):
            return
        for logger in trainer.loggers:
            add = getattr(getattr(logger, "experiment", None), "add_histogram", None)
            if add is None:
                continue
            for column in ("reward", "advantage", "length"):
                values = torch.tensor(pl_module.samples[column], dtype=torch.float32)
                if len(values := values[values.isfinite()]):
                    add(f"histograms/{column}", values, global_step=step)
