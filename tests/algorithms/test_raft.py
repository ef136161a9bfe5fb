"""RAFT: which completions are imitated, that it is their cross-entropy, and what does not fit. It learns: see
`test_presets_learn`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from small_rollouts import EachBatch, completions, scored, scores, trainer

from lit_rl.algorithms import GRPO, Reinforce
from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.evaluation.summary_statistics import Averages
from lit_rl.algorithms.terms.groups import BestOfGroup
from lit_rl.cli import schemas
from lit_rl.cli.build import build, plain
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.models import LanguageModel
from lit_rl.models.forward import score
from lit_rl.ops.advantages import constant
from lit_rl.ops.policy_losses import reinforce_loss
from lit_rl.rewards import Rewards

NAN = math.nan


def raft(reward: Any, **settings: Any) -> Reinforce:
    settings = {"advantage": constant, "loss": reinforce_loss, "groups": BestOfGroup(), "group_size": 3, **settings}
    return Reinforce(LanguageModel("tiny"), reward, sampling=Sampling(max_new_tokens=4), **settings)


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


class BesideOne(Ranks):
    """Another rank takes part, and counts 1 of whatever is counted."""

    def counts(self, count: int) -> list[int]:
        return [count, 1]


def chosen(rewards: list[float]) -> tuple[list[bool], dict[str, float]]:
    found = scored(completions([2] * len(rewards), 3), scores(rewards))
    nothing: Any = None  # the choice asks for no spare prompt and no text
    kept, metrics = BestOfGroup()(found, spare=nothing, tokenizer=nothing, ranks=BesideOne())
    averages = Averages()
    averages.add(metrics)
    assert kept.kept is not None and torch.equal(kept.completions.response_ids, found.completions.response_ids)
    return kept.kept.tolist(), averages.reduce()


def test_the_best_of_each_group_is_kept():
    kept, seen = chosen([0.0, 2.0, 1.0, -3.0, -1.0, -2.0])
    assert kept == [False, True, False, False, True, False]
    assert seen == {"groups/best_reward": 0.5, "groups/tied": 0.0, "groups/unscored": 1.0}


def test_of_several_best_the_first_is_kept_also_where_all_are_equal():
    kept, seen = chosen([1.0, 3.0, 3.0, 0.0, 0.0, 0.0])
    assert kept == [False, True, False, True, False, False]
    assert seen["groups/tied"] == 1.0 and seen["groups/best_reward"] == 1.5


def test_what_has_no_reward_is_never_the_best():
    kept, seen = chosen([NAN, -5.0, NAN, NAN, NAN, NAN])
    assert kept == [False, True, False, False, False, False]
    assert seen == {"groups/best_reward": -5.0, "groups/tied": 0.0, "groups/unscored": 2.0}


def test_the_advantage_is_1_whatever_the_reward():
    rewards = torch.tensor([3.0, -1.0, NAN, 0.0])
    assert constant(rewards, torch.arange(4)).tolist() == [1.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_is_the_cross_entropy_of_the_best(tmp_path: Path, accumulate: int):
    """The logged loss is the mean over the tokens of the best completions, by the policy that drew them."""
    module = raft(length)
    logged = EachBatch(lambda m: float(m.trainer.callback_metrics.get("train/loss", NAN)))
    runner = trainer(tmp_path, max_steps=1, accumulate_grad_batches=accumulate, callbacks=[logged])
    runner.fit(
        module, datamodule=RolloutDataModule(rows=Addition(9, 0).train()[:4], prompts_per_rollout=4, val_fraction=0.0)
    )
    assert module.rollout is not None
    drawn = module.rollout.completions
    best = length_of_best(module)
    fresh = LanguageModel("tiny").load()
    logprobs = score(fresh, drawn, module.sampling).logprobs
    mask = drawn.response_mask & best[:, None]
    assert torch.equal(mask, module.rollout.loss_mask)
    assert logged.seen[-1] == pytest.approx(float(-(logprobs * mask).sum().detach() / mask.sum()), rel=1e-5)


def length_of_best(module: Any) -> torch.Tensor:
    """Bool `(b,)`: the first of the longest texts of each group."""
    assert module.scored is not None
    total = module.scored.scores.total.reshape(-1, 3)
    return torch.nn.functional.one_hot(total.argmax(1), 3).bool().flatten()


def test_the_preset_is_these_parts():
    schemas.register_schemas()
    GlobalHydra.instance().clear()
    with initialize_config_module("lit_rl.conf", version_base="1.3"):
        module = build(plain(compose("config", ["algo=raft"]))["algo"])
    GlobalHydra.instance().clear()
    assert type(module) is Reinforce and isinstance(module.groups, BestOfGroup)
    terms: Any = module
    assert terms.advantage.func is constant and terms.policy_loss.func is reinforce_loss
    assert (module.group_size, module.beta, module.reward_beta, module.iterations) == (8, 0.0, 0.0, 1)
    assert not module.needs_reference and isinstance(module.reward_functions, Rewards)


@pytest.mark.parametrize(
    ("module", "key"),
    [
        (lambda: raft(length, group_size=1), "algo.group_size=1"),
        (lambda: GRPO(LanguageModel("tiny"), length, groups=BestOfGroup(), sampling=Sampling(max_new_tokens=4)),
         "algo/advantage=constant"),
    ],
)  # fmt: skip
def test_what_would_learn_nothing_is_refused(tmp_path: Path, module: Any, key: str):
    data = RolloutDataModule(rows=Addition(9, 0).train()[:4], prompts_per_rollout=4, val_fraction=0.0)
    with pytest.raises(ConfigError, match=key):
        trainer(tmp_path, max_steps=1).fit(module(), datamodule=data)
