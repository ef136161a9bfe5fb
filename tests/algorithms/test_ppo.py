"""PPO's rollout by hand, its two parameter groups, the critic's warm-up and the supervised text beside it."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from small_rollouts import EachBatch, batch, completions, scores, trainer

from lit_rl.algorithms import GRPO, PPO, AdamW, Constant, Linear
from lit_rl.algorithms.evaluation.summary_statistics import Averages
from lit_rl.algorithms.optim.optimizers import ByPath
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.core.errors import ConfigError, DataError
from lit_rl.core.examples import TokenBatch
from lit_rl.core.rollout import Rollout, Sampling
from lit_rl.data.encode import Encoder
from lit_rl.data.example_set import ExampleSet
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.supervised_text import SupervisedText
from lit_rl.data.tasks import Addition
from lit_rl.models.adapters import Lora
from lit_rl.models.critics import AdapterCritic, SeparateCritic, SharedTrunk
from lit_rl.models.forward import score_texts
from lit_rl.models.language_model import LanguageModel
from lit_rl.ops.imitation import chord
from lit_rl.ops.kl import k1
from lit_rl.ops.policy_losses import clipped_policy_loss
from lit_rl.ops.reductions import Metrics
from lit_rl.ops.returns import gae
from lit_rl.rewards import exact_match

CRITICS = {
    "separate": (SeparateCritic(), None),
    "shared-trunk": (SharedTrunk(), None),
    "adapter": (AdapterCritic(r=2), Lora(r=2)),
}
KIND = pytest.mark.parametrize("kind", CRITICS)


def ppo(kind: str = "separate", **settings: Any) -> PPO:
    critic, lora = CRITICS[kind]
    return PPO(
        LanguageModel("tiny", lora=lora),
        settings.pop("reward", exact_match),
        critic=critic,
        **{
            "sampling": Sampling(max_new_tokens=5),
            "optimizer": AdamW(lr=1e-3),
            "scheduler": Constant(),
            "iterations": 1,
            **settings,
        },
    )


def fit(tmp_path: Any, module: PPO, steps: int, look: Any = None, **settings: Any) -> list[Any]:
    looks = EachBatch(look or (lambda m: None))
    data = RolloutDataModule(task=Addition(max_operand=5, val_rows=4), prompts_per_rollout=8)
    trainer(tmp_path, max_steps=steps, callbacks=[looks], **settings).fit(module, datamodule=data)
    return looks.seen


def weights(module: Any, *names: str) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": value.detach().clone()
        for name in names
        for key, value in getattr(module, name).named_parameters()
    }


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, value in before.items() if not torch.equal(value, after[name])}


# ---------------------------------------------------------------------- the rollout

OLD = torch.tensor([[-1.0, -2.0], [-0.5, 0.0], [-1.0, -1.0]])
REF = torch.tensor([[-1.5, -1.0], [-1.0, 9.0], [-1.0, -3.0]])
VALUES = torch.tensor([[0.3, 0.6], [0.5, 7.0], [0.2, 0.4]])


def by_hand(monkeypatch: Any, **settings: Any) -> PPO:
    module = PPO("tiny", len, **{"whitening": None, "reward_beta": 0.1, **settings})
    monkeypatch.setattr(module, "old_logprobs", lambda drawn: OLD)
    monkeypatch.setattr(module, "ref_logprobs", lambda drawn: REF)
    monkeypatch.setattr(module, "values", lambda drawn: VALUES)
    return module


def taken(module: PPO, rewards: list[float]) -> tuple[Rollout, Metrics]:
    """The rollout of three rows, of 2, 1 and 2 tokens, and what was logged of it."""
    drawn = completions([2, 1, 2], 1)
    scored = Scored(batch([0, 1, 2]), drawn, scores(rewards))
    old = module.old_logprobs(drawn) if module.needs_old_logprobs else None
    ref = module.reference_of(scored) if module.needs_reference else None
    return module.advantages(scored, old, ref)


def logged(metrics: Metrics) -> dict[str, float]:
    averages = Averages()
    averages.add(metrics)
    return averages.reduce()


def test_advantages_and_returns_by_hand(monkeypatch):
    module = by_hand(monkeypatch)
    rollout, _ = taken(module, [1.0, 2.0, math.nan])
    # row 0: rewards -0.05 and 1 + 0.1; the last delta is 1.1 - 0.6, the first -0.05 + 0.6 - 0.3. Row 1: 2 - 0.05 - 0.5
    advantages = torch.tensor([[0.25 + 0.95 * 0.5, 0.5], [1.45, 0.0]])
    torch.testing.assert_close(rollout.advantages[:2], advantages)
    torch.testing.assert_close(
        rollout.returns[:2][rollout.loss_mask[:2]], (advantages + VALUES[:2])[rollout.loss_mask[:2]]
    )
    # a row without a reward teaches neither policy nor critic
    assert rollout.loss_mask.tolist() == [[True, True], [True, False], [False, False]]
    assert torch.equal(rollout.old_values, VALUES) and rollout.rewards.tolist()[:2] == pytest.approx([1.05, 1.95])


def test_gamma_and_lambda_are_the_users(monkeypatch):
    module = by_hand(monkeypatch, advantage=functools.partial(gae, gamma=0.5, lam=0.0), reward_beta=0.0)
    rollout, _ = taken(module, [1.0, 2.0, 3.0])
    torch.testing.assert_close(rollout.advantages[0], torch.tensor([0.5 * 0.6 - 0.3, 1 - 0.6]))


def test_whitening_leaves_the_returns_alone(monkeypatch):
    plain, _ = taken(by_hand(monkeypatch), [1.0, 2.0, math.nan])
    module = PPO("tiny", len, reward_beta=0.1)
    for name, values in {"old_logprobs": OLD, "ref_logprobs": REF, "values": VALUES}.items():
        monkeypatch.setattr(module, name, lambda drawn, values=values: values)
    white, _ = taken(module, [1.0, 2.0, math.nan])
    tokens = white.advantages[white.loss_mask]
    torch.testing.assert_close(tokens.mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    assert len(tokens) == 3 and torch.equal(white.returns, plain.returns)
    assert torch.equal(tokens.argsort(), plain.advantages[plain.loss_mask].argsort())


def test_the_objectives_parts_add_up(monkeypatch):
    module = by_hand(monkeypatch)
    seen = logged(taken(module, [1.0, 2.0, math.nan])[1])
    assert seen["objective/scores"] == pytest.approx(1.5)  # over rows with a reward
    assert seen["objective/kl"] == pytest.approx((-0.5 + 0.5) / 2, abs=1e-6)
    assert seen["objective/non_score_reward"] == pytest.approx((0.05 - 0.05) / 2, abs=1e-6)
    assert seen["objective/rlhf_reward"] == pytest.approx(1.5, abs=1e-6)
    assert seen["objective/entropy"] == pytest.approx((3.0 + 0.5) / 2)  # -log-prob of the whole row
    assert seen["value/num_eos_tokens"] == 3


TRL_NAMES = {
    "objective": ("kl", "entropy", "non_score_reward", "rlhf_reward", "scores"),
    "policy": ("approxkl_avg", "clipfrac_avg", "entropy_avg"),
    "loss": ("policy_avg", "value_avg"),
    "val": ("clipfrac_avg", "ratio", "ratio_var", "num_eos_tokens"),
}
"""Of the PPO of TRL 0.26. Its `eps` and `episode` count completions: here `tokens_per_second` and `num_tokens` do."""

RENAMED = {"val": "value"}
"""`val/` is what validation logs here."""


@pytest.mark.parametrize("settings", [{"iterations": 2}, {"reward_beta": 0.0, "beta": 0.05}], ids=["default", "loss"])
def test_everything_that_trl_logs_has_its_name(settings, tmp_path):
    module = ppo(**settings)
    fit(tmp_path, module, 2)
    logged = {name: float(value) for name, value in module.trainer.callback_metrics.items()}
    ours = {f"train/{RENAMED.get(head, head)}/{name}" for head, names in TRL_NAMES.items() for name in names}
    assert {name for name in ours | {"train/lr"} if not math.isfinite(logged.get(name, math.nan))} == set()


def test_with_the_kl_in_the_loss_only_the_kl_of_the_objective_is_the_same(tmp_path):
    """One step a rollout and no KL in the reward: the log-probs of the rollout are needed for the metric alone."""
    module = ppo(beta=0.05, reward_beta=0.0, kl=k1, optimizer=AdamW(lr=1e-2))
    fit(tmp_path, module, 2)
    logged = {name: float(value) for name, value in module.trainer.callback_metrics.items()}
    tokens = module.rollout.completions.response_mask.sum(1).float().mean()  # a row
    assert abs(logged["train/kl"]) > 1e-4
    assert logged["train/objective/kl"] == pytest.approx(float(tokens) * logged["train/kl"], rel=1e-3)


def test_without_a_reference_there_is_no_kl_to_tell_of(monkeypatch):
    module = by_hand(monkeypatch, reward_beta=0.0, iterations=1)
    seen = logged(taken(module, [1.0, 2.0, math.nan])[1])
    assert "objective/scores" in seen and not {"objective/kl", "objective/entropy"} & seen.keys()


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_variance_of_the_ratio_is_that_of_all_tokens_of_all_updates(accumulate, tmp_path):
    module = ppo(iterations=2, optimizer=AdamW(lr=1e-2))
    ratios = []

    def loss(logprobs, old, advantages, mask):
        ratios.append((logprobs - old).detach()[mask].exp())
        return clipped_policy_loss(logprobs, old, advantages, mask)

    module.policy_loss = loss
    fit(tmp_path, module, 2, accumulate_grad_batches=accumulate)
    assert len(ratios) == 2 * accumulate
    expected = float(torch.cat(ratios).double().var(correction=0))
    assert expected > 1e-5
    assert float(module.trainer.callback_metrics["train/value/ratio_var"]) == pytest.approx(expected, rel=1e-4)
    assert "value/ratio_var" not in module._records.averages.reduce()  # of the next rollout


# ---------------------------------------------------------------------- training


@KIND
def test_both_groups_are_trained_and_nothing_else(kind, tmp_path):
    module = ppo(kind, critic_lr=1e-2, reward_beta=0.1)
    module.configure_model()
    before = weights(module, "policy", "critic")
    parts = ("policy", "critic")
    names = {
        f"{part}.{key}" for part in parts for key, p in getattr(module, part).named_parameters() if p.requires_grad
    }
    seen = fit(tmp_path, module, 3, lambda m: [(g["name"], g["lr"]) for g in m.trainer.optimizers[0].param_groups])
    assert seen[-1] == [("policy", 1e-3), ("critic", 1e-2)]
    changed = moved(before, weights(module, "policy", "critic"))
    assert changed <= names
    for part in parts:  # the head starts at 0, so the trunk of a critic has no gradient in its first step
        assert any(name.startswith(part) for name in changed)
    frozen = {name for name in before if name not in names}
    assert bool(frozen) == (kind == "adapter")


@KIND
def test_the_temperature_of_sampling_scales_logits_and_no_value(kind, tmp_path):
    module = ppo(kind, optimizer=AdamW(lr=0.1))
    fit(tmp_path, module, 1)  # at first the critic says nothing
    drawn = completions([3, 2], 2)
    drawn = replace(drawn, response_ids=drawn.response_ids % 50)
    values, logprobs = [], []
    for temperature in (1.0, 0.5):
        module.sampling = Sampling(max_new_tokens=5, temperature=temperature)
        with torch.no_grad():
            scored = module.token_scores(drawn)
            values += [module.values(drawn), scored.values]
        logprobs.append(scored.logprobs)
    first, _, second, _ = (each[drawn.response_mask] for each in values)
    assert torch.equal(first, second) and first.abs().min() > 0
    assert torch.equal(values[1], values[3]) and not torch.allclose(*logprobs)


@KIND
def test_in_the_warm_up_only_the_critic_moves(kind, tmp_path):
    module = ppo(kind, critic_warmup=2, iterations=2)
    module.configure_model()
    before = weights(module, "policy", "critic")
    seen = fit(tmp_path, module, 4, lambda m: (weights(m, "policy", "critic"), moments(m)))
    for step, (after, seen_of_policy) in enumerate(seen, 1):
        changed = moved(before, after)
        assert any(name.startswith("critic") for name in changed)
        assert any(name.startswith("policy") for name in changed) == (step > 2), step
        if kind != "shared-trunk":  # there the critic's gradient goes through the policy too
            assert seen_of_policy == (step > 2), step


def moments(module: PPO) -> bool:
    """Whether the optimizer has seen any gradient of the policy."""
    optimizer = module.trainer.optimizers[0]
    states = [optimizer.state[p] for p in optimizer.param_groups[0]["params"]]
    return any(bool(state["exp_avg"].any()) for state in states if state)


def test_the_critic_has_a_schedule_of_its_own(tmp_path):
    module = ppo(critic_lr=1e-2, critic_scheduler=Linear(), critic_warmup=1)
    seen = fit(tmp_path, module, 4, lambda m: [g["lr"] for g in m.trainer.optimizers[0].param_groups])
    rates = [1e-2 * (1 - step / 4) for step in range(1, 5)]  # of the next step
    assert [lr for _, lr in seen] == pytest.approx(rates)
    assert [lr for lr, _ in seen] == [1e-3] * 4


def test_at_the_start_policy_and_reference_agree_and_the_critic_says_nothing(tmp_path):
    module = ppo(iterations=2, reward_beta=0.1, beta=0.1)
    first, _ = fit(tmp_path, module, 2, lambda m: m._records.averages.state()["means"])
    first = {name: float(total / count) for name, (total, count) in first.items() if count}
    for name in ("policy/approxkl_avg", "objective/kl", "objective/non_score_reward", "kl"):
        assert first[name] == pytest.approx(0, abs=1e-5), name
    assert first["value/ratio"] == pytest.approx(1, abs=1e-5)
    assert first["objective/rlhf_reward"] == pytest.approx(first["objective/scores"], abs=1e-5)
    assert (module.rollout.old_values == 0).all()


# ---------------------------------------------------------------------- supervised text


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    rows = [{"text": text} for text in ("1+1=2", "two", "a longer one", "x", "3+4=7", "yes")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def whole(texts: ExampleSet) -> TokenBatch:
    """All texts of a step as one batch."""
    rows = range(len(texts))
    return texts.batch(rows, (), texts.totals(rows), step=0, slot=0).tokens


@pytest.mark.parametrize("accumulate", [1, 4])
def test_supervised_text_adds_its_cross_entropy_however_the_step_is_cut(accumulate, texts, tmp_path):
    def change(**settings: Any) -> dict[str, torch.Tensor]:
        module = ppo(optimizer=ByPath("torch.optim.SGD", lr=1.0), **settings)
        module.configure_model()
        before = weights(module, "policy")
        fit(tmp_path, module, 1, accumulate_grad_batches=accumulate)
        return {name: value - before[name] for name, value in weights(module, "policy").items()}

    text = SupervisedText(str(texts), batch_size=5)
    with_text, without = change(ptx=text, ptx_coef=0.5), change()

    policy = ppo()
    policy.configure_model()
    batch = whole(text.step(Encoder(policy.tokenizer), 0, policy.seed))
    ids, attention, learned = batch.input_ids, batch.attention_mask, batch.loss_mask
    loss = torch.zeros(())
    for row in range(len(ids)):  # one text at a time, without padding
        own = ids[row][attention[row]]
        logits = policy.policy(input_ids=own[None]).logits[0, :-1].log_softmax(-1)
        loss = loss - logits.gather(1, own[1:, None]).sum()
    (0.5 * loss / learned.sum()).backward()
    for name, parameter in policy.policy.named_parameters():
        expected = -parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        difference = with_text[f"policy.{name}"] - without[f"policy.{name}"]
        assert (difference - expected).norm() <= 1e-4 * expected.norm() + 1e-6, name


def test_beside_grpo_the_weight_of_the_text_decays_and_its_tokens_count_by_their_doubt(texts, tmp_path):
    """Two steps that nothing but the text moves, weighed 0.6 and 0.35 on the way from 0.6 to 0.1 over two steps."""
    text, seen = SupervisedText(str(texts), batch_size=5), []

    class Watched(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            step, policy = trainer.global_step, pl_module.policy
            seen.append((pl_module.supervised.weight(step), {n: p.grad.clone() for n, p in policy.named_parameters()}))
            batch = whole(text.step(Encoder(pl_module.tokenizer), step, pl_module.seed))
            scores = score_texts(policy, batch).logprobs
            p = scores.detach().exp()
            loss = -(p * (1 - p) * scores)[batch.learned].sum() / batch.learned.sum()
            own = torch.autograd.grad(seen[-1][0] * loss, list(policy.parameters()))
            for wanted, found in zip(own, seen[-1][1].values()):
                assert (found - wanted).norm() <= 1e-4 * wanted.norm() + 1e-7

    settings = {"ptx_loss": chord, "ptx_coef": 0.6, "ptx_decay_steps": 2, "ptx_final_coef": 0.1}
    module = GRPO(
        "tiny",
        lambda completions: [0.0] * len(completions),
        group_size=2,
        ptx=text,
        sampling=Sampling(max_new_tokens=3),
        **settings,
    )
    data = RolloutDataModule(task=Addition(max_operand=5, val_rows=0), prompts_per_rollout=4)
    trainer(tmp_path, max_steps=2, callbacks=[Watched()], accumulate_grad_batches=2).fit(module, datamodule=data)
    assert [weight for weight, _ in seen] == pytest.approx([0.6, 0.35])
    assert module.coefficients()["ptx_coef"] == pytest.approx(0.1) and module.supervised.weight(99) == 0.1


def test_the_weight_of_supervised_text_decays_in_some_steps_or_not_at_all(texts):
    for settings in (
        {"ptx_decay_steps": 9},
        {"ptx": SupervisedText(str(texts)), "ptx_coef": 1.0, "ptx_final_coef": 0.1},
    ):
        with pytest.raises(ConfigError, match=r"algo\.ptx_decay_steps"):
            ppo(**settings)


def test_a_missing_file_ends_the_run_before_weights_are_loaded(tmp_path):
    module = ppo(ptx=SupervisedText(str(tmp_path / "gone.jsonl")), ptx_coef=0.1)
    with pytest.raises(DataError, match=r"gone\.jsonl"):
        fit(tmp_path, module, 1)
    assert module.policy is None
