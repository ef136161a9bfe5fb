"""What the terms of a step are told of it before its first micro-batch."""

from __future__ import annotations

from functools import partial

import torch
from small_rollouts import EachBatch, trainer

from lit_rl.algorithms import GRPO, AdamW, Constant
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.ops.policy_losses import clip_cov_loss
from lit_rl.rewards import exact_match


def test_the_tokens_of_a_later_step_have_the_log_probs_of_the_rollout_too(tmp_path):
    """Clip-Cov counts what the clip leaves, so it has to know every ratio of the step."""
    module = GRPO(
        "tiny", exact_match, loss=partial(clip_cov_loss, share=0.1), iterations=2, group_size=4,
        sampling=Sampling(max_new_tokens=5), optimizer=AdamW(lr=1e-3), scheduler=Constant(),
    )  # fmt: skip

    def look(module):
        rollout = module.rollout
        return module._step_tokens, rollout.old_logprobs[rollout.loss_mask]

    looks = EachBatch(look)
    data = RolloutDataModule(task=Addition(max_operand=9, val_rows=4), prompts_per_rollout=8)
    trainer(tmp_path, max_steps=2, accumulate_grad_batches=2, callbacks=[looks]).fit(module, datamodule=data)
    (first, old), _, (second, _), _ = looks.seen
    for step in (first, second):
        assert torch.equal(step.old_logprobs.sort().values, old.sort().values)
    torch.testing.assert_close(first.logprobs, first.old_logprobs)
    assert not torch.allclose(second.logprobs, second.old_logprobs)
