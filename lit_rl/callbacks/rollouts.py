"""The newest rollouts as tensors on the disk, so that other objectives can be computed of them: `lit-rl replay`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_rl.algorithms.rollouts import state
from lit_rl.callbacks.unwritten import Unwritten
from lit_rl.data.datamodule import RolloutDataModule
from lit_rl.durable import replacing
from lit_rl.errors import StorageError, in_range
from lit_rl.rewards.sums.weighted import Scores
from lit_rl.rollout import Completions

STEP_FILES = f"step_{'[0-9]' * 8}.pt"
"""Names of the files that `Rollouts` writes, and removes; another file beside them is the user's."""


@dataclass(frozen=True)
class SavedRollout:
    """A scored rollout of one rank, with everything that an objective is computed of but the policy. On the CPU."""

    step: int
    """Optimizer steps that the policy had taken when it drew the completions."""
    number: int
    """Of the rollout since the start of the run."""
    rows: list[int]
    """Index of each prompt in its data set."""
    completions: Completions
    scores: Scores
    """Each function's own values, their weights and weighted sum, and spans; what rewards logged is in `samples/`."""
    micro_batches: int
    """Into how many the run cut one pass over the rollout."""
    split_groups: int
    """Slices that a group was cut into."""
    world_size: int
    """Ranks of the run; the rows are those of rank 0."""
    old_logprobs: Tensor | None = None
    """Float32 `(b, t)`: the policy that drew them, as training scores them. None where the run had no use for it."""
    ref_logprobs: Tensor | None = None
    """Float32 `(b, t)`: the reference. None where the run's loss had no KL."""
    greedy_rewards: Tensor | None = None
    """Float32 `(b,)`: reward of the greedy completion of each row's prompt. None where the run had no use for it."""
    data: str | None = None
    """Fingerprint of the data whose rows show images, from which pixels are made again. None: no completion sees any,
    or the prompts came from elsewhere than a `RolloutDataModule`."""

    @classmethod
    def of(cls, module: Any) -> SavedRollout:
        """The last rollout of an `OnPolicyModule`, as it was scored."""
        scored, rollout, plan = module.scored, module.rollout, module.plan
        # Where a replay buffer stepped in, the log-probs are of other rows than were scored.
        known = rollout if rollout.completions.response_ids is scored.completions.response_ids else None
        return cls(
            step=scored.completions.version,
            number=scored.batch.rollout,
            rows=list(scored.batch.rows),
            completions=scored.completions,
            scores=dataclasses.replace(scored.scores, metrics={}, extras={}),
            micro_batches=plan.minibatches * plan.accumulate,
            split_groups=plan.split_groups,
            world_size=plan.world_size,
            old_logprobs=known and known.old_logprobs,
            ref_logprobs=known and known.ref_logprobs,
            greedy_rewards=scored.greedy_rewards,
            data=None if scored.completions.vision is None else _fingerprint_of(module.trainer),
        )

    @classmethod
    def read(cls, path: Path) -> SavedRollout:
        """The file that `write` wrote.

        Raises:
            StorageError: the file is damaged, or is something else.
        """
        try:
            plain = torch.load(path, map_location="cpu", weights_only=True)
            plain["completions"] = state.completions_of(plain["completions"], torch.device("cpu"))
            plain["scores"] = Scores(**plain["scores"])
            return cls(**plain)
        except Exception as error:  # an unpickler fails on a file of another kind in every way there is
            raise StorageError(
                f"{path} is no rollout that this version of lit_rl wrote: {error}. Take a file of run_dir/rollouts/."
            ) from error

    def write(self, path: Path) -> None:
        """Tensors, numbers and strings only. Beside the target first, then renamed: it is there whole or not at all."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # One name for all rollouts, so that a killed run leaves no more than one of them.
            with replacing(path, ".partial") as partial, partial.open("wb") as file:
                torch.save(state.to_plain(self), file)
        except (OSError, RuntimeError) as error:
            raise StorageError(f"The rollout {path} could not be written: {error}.") from error

    def __len__(self) -> int:
        return len(self.completions)


class Rollouts(L.Callback):
    """Writes every rollout of rank 0 to `rollouts/` in the Trainer's `default_root_dir`, and removes the older ones.

    No run needs them to go on: one that cannot be written is warned of, and the training goes on (`unwritten`).

    Args:
        keep: Rollouts that stay on the disk, the newest ones; 1 or more.
    """

    def __init__(self, keep: int = 1) -> None:
        in_range("callbacks.rollouts.keep", keep, low=1)
        self.keep = keep
        self.unwritten = Unwritten("Rollouts")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        fresh = batch.slot == 0 and getattr(pl_module, "scored", None) is not None
        if not fresh or not trainer.is_global_zero or trainer.fast_dev_run:  # pyright: ignore
            return
        rollout = SavedRollout.of(pl_module)
        folder = Path(trainer.default_root_dir) / "rollouts"
        target = folder / f"step_{rollout.step:08d}.pt"
        with self.unwritten.spared(f"rollouts/{target.name}"):
            rollout.write(target)
            there = saved_rollouts(folder)
            up_to_now = [path for path in there if path.name <= target.name]
            for path in there:
                if path not in up_to_now[-self.keep :]:  # those of a later step are another run's
                    path.unlink(missing_ok=True)


def _fingerprint_of(trainer: L.Trainer) -> str | None:
    data = getattr(trainer, "datamodule", None)
    return data.fingerprint if isinstance(data, RolloutDataModule) else None


def saved_rollouts(folder: Path) -> list[Path]:
    """The files of a folder that hold rollouts, oldest first."""
    return sorted(folder.glob(STEP_FILES))
