"""Online methods over a policy of a few hundred weights, without a Trainer: rollouts made by hand, losses of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from small_rollouts import credited, trainer
from torch import Tensor

from lit_rl.algorithms import AdamW, Constant
from lit_rl.algorithms.rollouts.rollout_plan import BatchPlan, micro_batch, rows_of_slots, step_counts, step_totals
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.core.rollout import Completions, PromptBatch, Rollout, Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.rewards import exact_match
from lit_rl.rewards.weighted_rewards import Scores

VOCABULARY = 12


def small_policy(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.3, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def with_policies(module: Any, *, same: bool = False) -> Any:
    """The module with a small policy, and another small model as its reference (or its equal)."""
    module.policy, module.reference_policy = small_policy(0), small_policy(0 if same else 1)
    module.reference_policy.requires_grad_(False)
    return module


def completions(lengths: Sequence[int], group: int = 2) -> Completions:
    generator = torch.Generator().manual_seed(7)
    rows, width = len(lengths), max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    prompts = torch.randint(0, VOCABULARY, (rows // group, 3), generator=generator).repeat_interleave(group, 0)
    return Completions(
        prompt_ids=prompts,
        prompt_mask=torch.ones_like(prompts, dtype=torch.bool),
        response_ids=torch.randint(0, VOCABULARY, (rows, width), generator=generator).masked_fill(~mask, 0),
        response_mask=mask,
        sampler_logprobs=torch.zeros(rows, width),
        ended=torch.ones(rows, dtype=torch.bool),
        group_id=torch.arange(rows) // group,
    )


def scores(rewards: Sequence[float]) -> Scores:
    """Of one function."""
    total = torch.tensor(rewards, dtype=torch.float32)
    table = total[:, None]
    return Scores(("f",), table, total, torch.ones_like(table))


def wins_of(verdicts: Sequence[float | None]) -> Tensor:
    """Of both completions of each pair."""
    rates = [rate for v in verdicts for rate in ((math.nan, math.nan) if v is None else (v, 1 - v))]
    return torch.tensor(rates, dtype=torch.float64)


def rollout_of(module: Any, drawn: Completions, verdicts: Sequence[float | None], **more: Any) -> Rollout:
    """What is learned from, where the judge said this of the pairs."""
    said, wins = scores([0.0] * len(drawn)), wins_of(verdicts)
    taken, _ = credited(module, Scored(prompts(len(verdicts)), drawn, said, win_rates=wins, **more))
    return module.rollout_to_learn(taken)[0]


def step_of(module: Any, rollout: Rollout, accumulate: int = 1) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient and metrics of an optimizer step, cut into so many micro-batches."""
    groups = len(rollout.completions.group_id.unique())
    plan = BatchPlan(groups, 2, minibatches=1, iterations=1, accumulate=accumulate, world_size=1)
    counts = step_counts(rollout, plan, seed=0, index=0)[0]
    module.policy.train()
    module.policy.zero_grad()
    total, sums = 0.0, {}
    for rows in rows_of_slots(rollout, plan, seed=0, index=0):
        micro = micro_batch(rollout, rows)
        loss, metrics = module.loss(micro, module.token_scores(micro.completions), step_totals(counts, plan))
        loss.backward()
        total += loss.item()
        for name, (value, count) in metrics.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + value.item(), before[1] + count.item()
    gradient = torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in module.policy.parameters()]
    )
    return total, gradient, {name: value / count if count else float("nan") for name, (value, count) in sums.items()}


def sums_by_hand(model: Any, drawn: Completions) -> list[Tensor]:
    """Log-prob of each completion, one row at a time, without padding."""
    found = []
    for i, length in enumerate(drawn.lengths.tolist()):
        ids = torch.cat([drawn.prompt_ids[i], drawn.response_ids[i, :length]])
        logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)[2:-1]
        found.append(logprobs.gather(1, ids[3:, None]).sum())
    return found


def gradient_by_hand(model: Any, loss: Tensor) -> Tensor:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in found])


def prompts(count: int) -> PromptBatch:
    return PromptBatch(
        prompts=[f"{i}+{i}=" for i in range(count)],
        prompt_ids=[[5, 6, 7 + i % 3] for i in range(count)],
        columns={"answer": [str(2 * i) for i in range(count)]},
        rows=list(range(count)),
        occurrences=[0] * count,
    )


def run_of_sums(method: Any, tmp_path: Path, steps: int, **settings: Any) -> tuple[Any, L.Trainer]:
    """Some steps of the shipped policy, each of a rollout of 32 sums."""
    usual = {"reward": exact_match, "sampling": Sampling(max_new_tokens=6), "optimizer": AdamW(lr=3e-4)}
    module = method(settings.pop("model", "tiny"), **{**usual, "scheduler": Constant(), **settings})
    data = RolloutDataModule(task=Addition(max_operand=12, val_rows=4), prompts_per_rollout=32)
    fit = trainer(tmp_path, max_steps=steps, gradient_clip_val=1.0)
    fit.fit(module, datamodule=data)
    return module, fit
