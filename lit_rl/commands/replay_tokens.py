"""What the first objective of `lit-rl replay` saw of each token, as a file of samples that `lit-rl report` shows."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import torch
from rich.console import Console
from torch import Tensor

from lit_rl.algorithms.evaluation.tables import sample_table
from lit_rl.algorithms.evaluation.token_columns import token_columns
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.callbacks.sample_files import tables_in, write_parquet
from lit_rl.durable import replacing
from lit_rl.errors import StorageError
from lit_rl.generation.collect import texts_of
from lit_rl.models.policy.forward import TokenScores
from lit_rl.ops.masking import masked_mean
from lit_rl.rollout import Rollout


@dataclass(frozen=True)
class SeenTokens:
    """A rollout with one objective's credit, and the policy's numbers for its tokens."""

    scored: Scored
    rollout: Rollout
    logprobs: Tensor
    """Float32 `(b, t)`: log-probs of the policy whose gradient was taken; filled part by part."""
    entropies: Tensor
    """Entropies of its next-token distributions, likewise; NaN until a part with them is added."""

    @classmethod
    def of(cls, scored: Scored, rollout: Rollout) -> SeenTokens:
        """Return the rollout before any part of it was scored."""
        shape, device = rollout.loss_mask.shape, rollout.loss_mask.device
        return cls(scored, rollout, torch.zeros(shape, device=device), torch.full(shape, torch.nan, device=device))

    def add(self, rows: Tensor, scores: TokenScores) -> None:
        """Add a micro-batch: its rows, which are trimmed on the right."""
        self.logprobs[rows, : scores.logprobs.shape[1]] = scores.logprobs.detach()
        if scores.entropy is not None:
            self.entropies[rows, : scores.entropy.shape[1]] = scores.entropy.detach()


def write_tokens(seen: SeenTokens, step: int, folder: Path, tokenizer: Any) -> None:
    """Write `samples/replay_<step>.parquet` in the run's folder, and print its path.

    Raises:
        StorageError: it cannot be written.
    """
    target = folder / "samples" / f"replay_{step:08d}.parquet"
    try:
        target.parent.mkdir(exist_ok=True)
        table = _table(seen, step, tokenizer)
        with replacing(target, f"{target.stem}.partial") as partial:
            write_parquet(table | _as_it_was_written(table, step, target.parent), partial)
    except OSError as error:
        raise StorageError(f"{target} could not be written: {error.strerror}.") from error
    text = f"tokens   {target}  (lit-rl report run_dir={folder} shows them)"
    Console().print(text, soft_wrap=True, highlight=False, markup=False)


def _as_it_was_written(table: dict[str, list[Any]], step: int, folder: Path) -> dict[str, list[Any]]:
    """Add columns that the rollout's own file has and this table lacks (rank, the data's, notes of rewards), where
    both have the same completions in the same order."""
    stored = next((each for each in tables_in(folder) if each.name == f"step_{step:08d}"), None)
    if stored is None:
        return {}
    with contextlib.suppress(OSError, pyarrow.ArrowException, KeyError):
        lacking = [name for name in stored.columns() if name not in table]
        written = stored.read(["completion", *lacking]).to_pydict()
        if written.pop("completion") == table["completion"]:
            return written
    return {}


def _table(seen: SeenTokens, step: int, tokenizer: Any) -> dict[str, list[Any]]:
    scored, rollout = seen.scored, seen.rollout
    completions, advantages = scored.completions, rollout.advantages
    if advantages is not None and advantages.ndim == 2:
        advantages = masked_mean(advantages, rollout.loss_mask, 1)
    texts = texts_of(completions, tokenizer)
    table = sample_table(step, scored.batch, texts, completions, scored.scores, advantages)
    more = {"logprobs": seen.logprobs}
    if not bool(seen.entropies[completions.response_mask].isnan().any()):
        more["entropies"] = seen.entropies
    if rollout.ref_logprobs is not None:
        more["ref_logprobs"] = rollout.ref_logprobs
    return table | token_columns(completions, rollout, tokenizer, more)
