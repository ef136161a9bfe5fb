"""Losses, advantages, shaping and preferences of the user's: they change nothing but what they return."""

from __future__ import annotations

import pytest
import torch
from small_rollouts import trainer as quiet_trainer

from lit_rl.algorithms import GRPO
from lit_rl.algorithms.chosen_functions import check_loss_output
from lit_rl.algorithms.families.pairs import _losses_of_pairs
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule


def fitted(**changes):
    """Four optimizer steps, of one rollout."""
    module = GRPO("tiny", len_of, group_size=2, sampling=Sampling(max_new_tokens=3), **changes)
    data = RolloutDataModule(rows=[{"prompt": f"{i}+1="} for i in range(2)], prompts_per_rollout=2, val_fraction=0.0)
    trainer = quiet_trainer(None, max_steps=4)
    trainer.fit(module, datamodule=data)
    return trainer, module


def len_of(completions):
    return [float(len(completion)) + place for place, completion in enumerate(completions)]


def spoiling(logprobs, old_logprobs, advantages, mask):
    loss = -advantages[:, None] * logprobs.masked_fill(~mask, 0.0)
    loss = loss.clone()
    for tensor in (old_logprobs, advantages, mask):
        tensor.zero_()
    return loss, {"mine": (loss.sum(), mask.new_ones(()).sum())}


def plain(logprobs, old_logprobs, advantages, mask):
    return -advantages[:, None] * logprobs.masked_fill(~mask, 0.0), {}


def centered_in_place(rewards, group_id):
    rewards -= rewards.mean()
    group_id.zero_()
    return rewards


def centered(rewards, group_id):
    return rewards - rewards.mean()


def doubled_in_place(rewards, group_id):
    return rewards.mul_(2)


def doubled(rewards, group_id):
    return rewards * 2


def test_a_function_of_tensors_changes_nothing_but_what_it_returns():
    """Seen as a loss that emptied its mask in place: a run that learned nothing, without a word."""
    found = []
    for loss, advantage, shaping in ((plain, centered, doubled), (spoiling, centered_in_place, doubled_in_place)):
        changes = {"loss": loss, "advantage": advantage, "shaping": shaping, "minibatches": 2, "iterations": 2}
        trainer, module = fitted(**changes)
        weights = torch.cat([weight.detach().flatten() for weight in module.policy.parameters()])
        found.append((weights, float(trainer.callback_metrics["train/reward"])))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


ONE = torch.ones(2, 3, requires_grad=True)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ((ONE.sum(1, keepdim=True), {}), r"tokens of shape \(2, 1\).*in the shape of logprobs \(2, 3\)"),
        ((ONE, {"mine": 1.0}), r"the metric 'mine' as a float"),
        ((ONE, {"mine": (1.0, 2)}), r"the metric 'mine' as a tuple"),
        ((ONE, [1]), r"metrics as a list"),
        ((ONE, {"reward": (ONE.sum(), ONE.sum())}), "the run itself logs train/reward"),
        ((ONE, {"rewards/mine/mean": (ONE.sum(), ONE.sum())}), "the run itself logs train/rewards"),
    ],
)
def test_what_a_loss_may_not_return(returned, words):
    """Seen as a mean over rows that was spread over tokens, and as a train/reward of 99 that no reward gave."""
    with pytest.raises(ConfigError, match=words):
        check_loss_output(returned, ONE, plain)


def test_a_loss_without_gradient_is_refused_where_no_other_term_has_one():
    """Zeros are a loss where the distance to the reference alone is learned by."""

    def detached(logprobs, old, advantages, mask):
        return torch.zeros_like(logprobs), {}

    with pytest.raises(ConfigError, match="tokens without a gradient"):
        fitted(loss=detached)
    fitted(loss=detached, beta=0.1)


@pytest.mark.parametrize("name", ["mine", "clip_ratio/low_mean", "approx_kl"])
def test_a_loss_may_log_what_losses_log(name):
    metrics = {name: (ONE.sum(), ONE.sum())}
    assert check_loss_output((ONE, metrics), ONE, plain) == (ONE, metrics)


def test_a_preference_of_pairs_changes_no_column():
    """Columns are read by the next preference, and by the metrics of margins and accuracies."""

    def spoiled(pairs, beta):
        loss = -beta * (pairs.chosen - pairs.rejected)
        with torch.no_grad():
            pairs.chosen.zero_()
        return loss

    columns = {
        name: torch.ones(3, requires_grad=True)
        for name in ("chosen", "rejected", "ref_chosen", "ref_rejected", "chosen_tokens", "rejected_tokens")
    }
    losses = _losses_of_pairs(spoiled, 0.5, {}, **columns)
    assert losses.requires_grad and all(bool((column == 1).all()) for column in columns.values())
