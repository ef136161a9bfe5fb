"""A checkpoint is as large as what is trained and the optimizer's state, and 5 % at most on top."""

from __future__ import annotations

from pathlib import Path

import torch
from runs_helpers import EVERY_STEP, SMALL

STEPS = ["trainer.max_steps=2", "algo.minibatches=2", "algo.beta=0.1", "trainer.limit_val_batches=0"]
"""One rollout: a checkpoint in its middle and one at its end; beside a reference, which is frozen."""
RANK = 16
ADAPTED = 2 * RANK * (4 * (128 + 128) + 3 * (128 + 512))
"""Numbers of the adapters: in each of two layers four matrices of attention, and three of the MLP."""


def test_a_checkpoint_at_a_rollouts_end_holds_weights_and_optimizer_and_little_else(train, tmp_path: Path) -> None:
    assert train(*SMALL, *STEPS, *EVERY_STEP, f"model.lora.r={RANK}", f"run_dir={tmp_path}") == 0
    trained = 4 * ADAPTED  # bytes; AdamW holds two more numbers of each
    middle, end = sorted((tmp_path / "checkpoints").glob("*.ckpt"))
    assert 3 * trained < end.stat().st_size < 1.05 * 3 * trained
    # In its middle the rollout comes on top: 2 KB, and 300 bytes of the archive for each of its tensors.
    used = [torch.load(path, weights_only=True)["lit_rl"][0]["module"].get("rollout") for path in (middle, end)]
    assert used[0] is not None and used[1] is None
    assert 0 < middle.stat().st_size - end.stat().st_size < 2**14
