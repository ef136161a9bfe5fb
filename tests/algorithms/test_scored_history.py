"""Runs whose sampling goes by what stood before a token: `min_new_tokens` and a repetition penalty, scored exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from copied_engines import CopiedPolicyGenerator
from small_rollouts import EachBatch, trainer

from lit_rl.algorithms import GRPO, Evaluation, OnlineDPO
from lit_rl.algorithms.checks import episode_checks
from lit_rl.algorithms.loop.on_policy import OnPolicyModule
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.generation.hf import HFGenerator
from lit_rl.generation.native import NativeGenerator
from lit_rl.generation.rollout_function import RolloutFunction
from lit_rl.rewards import exact_match

LEAST = 5
HISTORY = Sampling(max_new_tokens=9, min_new_tokens=LEAST, repetition_penalty=1.4, temperature=1.3)


def look(module: OnPolicyModule) -> Any:
    rollout: Any = module.rollout
    now = module.token_scores(rollout.completions).logprobs.detach()
    return rollout, now, module.model.eos_ids


def seen(tmp_path: Any, algorithm: Any = GRPO, **settings: Any) -> list[Any]:
    """Of each micro-batch: the whole rollout, and its log-probs under the policy after it."""
    module = algorithm("tiny", exact_match, group_size=4, sampling=HISTORY, **settings)
    each = EachBatch(look)
    data = RolloutDataModule(task=Addition(max_operand=30, val_rows=4), prompts_per_rollout=8)
    trainer(tmp_path, max_steps=1, accumulate_grad_batches=2, callbacks=[each]).fit(module, datamodule=data)
    return each.seen


ENGINES = {"native": {}, "hf": {"generator": HFGenerator()}, "engine": {"generator": CopiedPolicyGenerator()}}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_first_ratio_is_one_and_the_engine_drew_from_what_is_scored(tmp_path, engine):
    """No step is taken before the first micro-batch is over, so the ratio is that of the policy to itself. All rows are
    scored here at once, and a micro-batch of them there: on some processors the last bits of a row depend on that."""
    settings = {"minibatches": 2, **ENGINES[engine]} if engine != "engine" else ENGINES[engine]
    rollout, now, eos_ids = seen(tmp_path, **settings)[0]
    drawn, mask = rollout.completions, rollout.completions.response_mask
    if rollout.old_logprobs is not None:
        torch.testing.assert_close(now[mask], rollout.old_logprobs[mask], atol=1e-5, rtol=0)
    torch.testing.assert_close(now[mask], drawn.sampler_logprobs[mask], atol=1e-4, rtol=0)
    if rollout.weights is not None:
        torch.testing.assert_close(rollout.weights[mask], torch.ones_like(now[mask]), atol=1e-4, rtol=0)
    ends = torch.isin(drawn.response_ids, torch.tensor(eos_ids)) & mask
    assert ends.any() and not ends[:, : LEAST - 1].any()
    assert int(drawn.lengths.min()) >= LEAST


def test_pairs_are_learned_under_it_too(tmp_path):
    rollout, now, _ = seen(tmp_path, OnlineDPO)[0]
    mask = rollout.completions.response_mask
    torch.testing.assert_close(now[mask], rollout.completions.sampler_logprobs[mask], atol=1e-4, rtol=0)


@pytest.mark.parametrize("setting", [{"repetition_penalty": 1.2}, {"min_new_tokens": 2}], ids=lambda s: next(iter(s)))
def test_a_rollout_function_does_not_say_what_stood_before(setting):
    env, sampling = RolloutFunction(print), Sampling(max_new_tokens=4, **setting)
    with pytest.raises(ConfigError, match=rf"sampling.*{next(iter(setting))}.*env=rollout_func"):
        episode_checks.check_episodes(env, NativeGenerator(), sampling, Evaluation())
