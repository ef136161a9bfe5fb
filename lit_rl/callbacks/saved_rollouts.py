"""The newest rollouts as tensors on the disk, so that other objectives can be computed of them: `lit-rl replay`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_rl.algorithms.rollouts import checkpoints
from lit_rl.callbacks.loggers import WriteFailures
from lit_rl.core.declared_settings import checked
from lit_rl.core.durable_files import replacing
from lit_rl.core.errors import StorageError
from lit_rl.core.rollout import Completions
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.ops.ranges import AtLeastOne
from lit_rl.rewards.weighted_rewards import Scores

ROLLOUT_FILES = f"step_{'[0-9]' * 8}.pt"
"""Pattern of the files that `Rollouts` writes and removes; other files beside them are the user's."""


@dataclass(frozen=True)
class SavedRollout:
    """A scored rollout of one rank, on the CPU, with all inputs of an objective but the policy."""

    step: int
    """Optimizer steps of the policy that sampled the completions."""
    number: int
    """Number of the rollout since the start of the run."""
    rows: list[int]
    """Index of each prompt in its data set."""
    completions: Completions
    scores: Scores
    """Values of each reward function, weights, weighted sums, and spans; logged extras are in `samples/`."""
    micro_batches: int
    """Micro-batches of one pass over the rollout in the run."""
    split_groups: int
    """Slices of each group."""
    world_size: int
    """World size of the run; the rows are those of rank 0."""
    old_logprobs: Tensor | None = None
    """Float32 `(b, t)`: the sampling policy, as training scores it. None where the run did not compute it."""
    ref_logprobs: Tensor | None = None
    """Float32 `(b, t)`: the reference. None where the run's loss had no KL."""
    greedy_rewards: Tensor | None = None
    """Float32 `(b,)`: reward of the greedy completion of each row's prompt. None where the run did not compute it."""
    gradient_norms: Tensor | None = None
    """Float32 `(b, t)`: squared norms of the gradients of the tokens' log-probs. None where no advantage read them."""
    data: str | None = None
    """Fingerprint of the data whose images pixels are made from again. None: no completion sees any, or the prompts did
    not come from a `RolloutDataModule`."""

    @classmethod
    def of(cls, module: Any) -> SavedRollout:
        """Return the last rollout of an `OnPolicyModule`, as it was scored."""
        scored, rollout, plan = module.scored, module.rollout, module.plan
        # With a replay buffer the log-probs may be of other rows than those that were scored.
        known = rollout if rollout.completions.response_ids is scored.completions.response_ids else None
        data = None if scored.completions.vision is None else getattr(module.trainer, "datamodule", None)
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
            gradient_norms=scored.gradient_norms,
            data=data.fingerprint if isinstance(data, RolloutDataModule) else None,
        )

    @classmethod
    def read(cls, path: Path) -> SavedRollout:
        """Read a file that `write` wrote.

        Raises:
            StorageError: the file is damaged, or is something else.
        """
        try:
            plain = torch.load(path, map_location="cpu", weights_only=True)
            plain["completions"] = checkpoints.completions_from_plain(plain["completions"], torch.device("cpu"))
            plain["scores"] = Scores(**plain["scores"])
            return cls(**plain)
        except Exception as error:  # an unpickler fails on a file of another kind in every way there is
            raise StorageError(
                f"{path} is no rollout that this version of lit_rl wrote: {error}. Take a file of run_dir/rollouts/."
            ) from error

    def write(self, path: Path) -> None:
        """Write tensors, numbers and strings only, beside the target first: the file exists whole or not at all."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # One name for all rollouts, so that a killed run leaves no more than one of them.
            with replacing(path, ".partial") as partial, partial.open("wb") as file:
                torch.save(checkpoints.to_plain(self), file)
        except (OSError, RuntimeError) as error:
            raise StorageError(f"The rollout {path} could not be written: {error}.") from error

    def __len__(self) -> int:
        return len(self.completions)


@checked("callbacks.rollouts")
class Rollouts(L.Callback):
    """Files of the newest rollouts of rank 0, in `rollouts/` of the Trainer's `default_root_dir`.

    No resume needs them: one that cannot be written is warned of, and the training goes on (`unwritten`).

    Args:
        keep: Rollouts kept on the disk, the newest ones; 1 or more.
    """

    def __init__(self, keep: AtLeastOne = 1) -> None:
        self.keep = keep
        self.unwritten = WriteFailures("Rollouts")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        fresh = batch.slot == 0 and getattr(pl_module, "scored", None) is not None
        if not fresh or not trainer.is_global_zero or trainer.fast_dev_run:  # pyright: ignore
            return
        rollout = SavedRollout.of(pl_module)
        folder = Path(trainer.default_root_dir) / "rollouts"
        target = folder / f"step_{rollout.step:08d}.pt"
        with self.unwritten.spared(f"rollouts/{target.name}"):
            rollout.write(target)
            files = saved_rollouts(folder)
            up_to_now = [path for path in files if path.name <= target.name]
            for path in files:
                if path not in up_to_now[-self.keep :]:  # those of a later step are of another run
                    path.unlink(missing_ok=True)


def saved_rollouts(folder: Path) -> list[Path]:
    """Return the rollout files of a folder, oldest first."""
    return sorted(folder.glob(ROLLOUT_FILES))
