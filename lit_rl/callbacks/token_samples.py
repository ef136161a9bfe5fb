"""Token samples: the loss's inputs for each token of a few completions, by which `lit-rl report` colours tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_rl.algorithms.evaluation.token_columns import token_columns
from lit_rl.algorithms.rollouts.micro_batches import SeenRows
from lit_rl.callbacks.due import Due
from lit_rl.callbacks.sample_files import write_table
from lit_rl.callbacks.sample_rows import Table, of_all_ranks, stacked
from lit_rl.callbacks.unwritten import Unwritten
from lit_rl.episodes import TOKENS
from lit_rl.errors import in_range
from lit_rl.generation.collect import texts_of
from lit_rl.ops.masking import masked_mean
from lit_rl.rollout import Rollout, select, trim_rollout


class TokenSamples(L.Callback):
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

    def __init__(self, completions: int = 8, every: int = 10) -> None:
        in_range("callbacks.token_samples.completions", completions, low=1)
        self.completions = completions
        self._due = Due("callbacks.token_samples.every", every)
        self.unwritten = Unwritten("TokenSamples")

    def state_dict(self) -> dict[str, Any]:
        return {"last": self._due.last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._due.last = state_dict["last"]

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        plan, seen = getattr(pl_module, "plan", None), getattr(pl_module, "seen", None)
        # At the last slot everything is available, also in a run that was resumed in the middle of a rollout.
        if seen is None or plan is None or batch.slot != plan.slots - 1 or trainer.fast_dev_run:  # pyright: ignore
            return
        step = trainer.global_step - plan.minibatches * plan.iterations
        if not self._due.at(step):
            return
        mine: Table | None = None
        with self.unwritten.spared("the tokens of this rank"):
            rollout, tokenizer = pl_module.dealt_out(batch)[0], pl_module.tokenizer
            mine = token_table(step, rollout, seen, self.completions, tokenizer, pl_module.noted)
        table = stacked(of_all_ranks(trainer, mine, self.unwritten))
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
    rows = _rows_of_prompts(group_id, learned)[:most]
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
    said = {"logprobs": scores.logprobs, "entropies": scores.entropy, "values": scores.values}
    now = {name: _of_rows(values, learned, rows, width) for name, values in said.items() if values is not None}
    table |= token_columns(completions, chosen, tokenizer, reference | now)
    computed = torch.isin(rows, learned).tolist()
    for name in now:
        column = table[TOKENS + name]
        table[TOKENS + name] = [values if there else None for values, there in zip(column, computed)]
    return table | {name: values for name, values in kept.items() if name not in table}


def _rows_of_prompts(group_id: Tensor, rows: Tensor) -> Tensor:
    """Return the rows of all completions of the prompts that these rows answer."""
    return torch.isin(group_id, group_id[rows]).nonzero().flatten()


def _of_rows(values: Tensor, seen: Tensor, rows: Tensor, width: int) -> Tensor:
    """Return `(rows, width)` float32: the values of the `seen` rows, 0 for the others."""
    found = values.new_zeros((len(rows), width), dtype=torch.float32)
    for place, row in enumerate(rows.tolist()):
        at = (seen == row).nonzero().flatten()
        if len(at):
            mine = values[at[0], :width]
            found[place, : len(mine)] = mine
    return found
