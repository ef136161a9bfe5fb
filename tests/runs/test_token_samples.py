"""`callbacks.token_samples`: which completions, and what is there of each token, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

from lit_rl.algorithms.rollouts.rollout_plan import SeenRows
from lit_rl.callbacks.samples import token_table
from lit_rl.core.rollout import Completions, Rollout
from lit_rl.models.forward import TokenScores


@pytest.fixture(scope="module")
def tokenizer(tiny_dir):
    """Of the tiny model: digit i is token 15 + i."""
    return AutoTokenizer.from_pretrained(tiny_dir)


def rollout() -> Rollout:
    """Two prompts with two completions each, of 1, 2, 3 and 1 tokens."""
    lengths = torch.tensor([1, 2, 3, 1])
    mask = torch.arange(3) < lengths[:, None]
    ids = (15 + torch.arange(12).view(4, 3)) * mask
    completions = Completions(
        prompt_ids=15 + torch.tensor([[0, 1]] * 2 + [[2, 3]] * 2),
        prompt_mask=torch.tensor([[False, True]] * 2 + [[True, True]] * 2),
        response_ids=ids,
        response_mask=mask,
        sampler_logprobs=-torch.arange(12.0).view(4, 3) * mask,
        ended=torch.tensor([True, True, False, True]),
        group_id=torch.tensor([5, 5, 7, 7]),
    )
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.5])
    learned = mask & torch.tensor([True, True, False, True])[:, None]
    return Rollout(completions, rewards=torch.tensor([1.0, 0.0, 0.5, 0.5]), advantages=advantages, loss_mask=learned)


SCORES = TokenScores(logprobs=torch.tensor([[-0.5, 9.0]], requires_grad=True), values=torch.tensor([[0.25, 9.0]]))


def test_completions_of_the_prompts_of_the_last_micro_batch_with_what_was_computed_of_each(tokenizer):
    seen = SeenRows.of(torch.tensor([3]), SCORES)
    assert not seen.scores.logprobs.requires_grad, "no graph is kept"
    noted = {"rewards/right": [0.0, 1.0, 2.0, 3.0], "answer": list("abcd"), "length": [9, 9, 9, 9]}
    table = token_table(40, rollout(), seen, 8, tokenizer, noted)
    assert table["rewards/right"] == [2.0, 3.0] and table["answer"] == ["c", "d"] and table["length"] == [3, 1]
    assert table["prompt"] == ["23", "23"] and table["completion"] == ["678", "9"] and table["step"] == [40, 40]
    assert table["reward"] == [0.5, 0.5] and table["advantage"] == [0.0, 0.5] and table["ended"] == [False, True]
    numbers = {name: [each if each is None else each.tolist() for each in table[f"tokens/{name}"]] for name in (
        "ids", "learned", "advantages", "sampler_logprobs", "logprobs", "values"
    )}  # fmt: skip
    assert numbers == {
        "ids": [[21, 22, 23], [24]],
        "learned": [[False] * 3, [True]],
        "advantages": [[0.0] * 3, [0.5]],
        "sampler_logprobs": [[-6.0, -7.0, -8.0], [-9.0]],
        "logprobs": [None, [-0.5]],  # row 2 was in no micro-batch, or in another
        "values": [None, [0.25]],
    }
    assert not {"tokens/ref_logprobs", "tokens/old_logprobs", "tokens/entropies"} & table.keys(), "nobody computed them"


def test_of_pairs_the_verdict_is_the_advantage_and_no_more_rows_than_asked_for(tokenizer):
    judged = replace(rollout(), advantages=None, verdicts=torch.tensor([1.0, -1.0, 0.0, 0.0]))
    seen = SeenRows.of(torch.tensor([0, 1]), replace(SCORES, logprobs=torch.zeros(2, 2), values=None))
    table = token_table(0, judged, seen, 1, tokenizer)
    assert table["prompt"] == ["1"] and table["advantage"] == [1.0] and table["tokens/advantages"][0].tolist() == [1.0]
