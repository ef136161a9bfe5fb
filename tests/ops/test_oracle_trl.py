"""TRL 1.16 as oracle: the same model and rollout give the same loss, gradient, metrics and advantages.

Each trainer is built once and its settings are changed in place, since building one costs seconds.
"""

import math

import pytest
import torch
from torch import Tensor, nn

from lit_rl.ops import kl
from lit_rl.ops.advantages import batch_normalized, centered, group_normalized, group_std, leave_one_out
from lit_rl.ops.logprobs import logprobs_and_entropy
from lit_rl.ops.losses import clipped_policy_loss, sequence_clipped_loss
from lit_rl.ops.masking import masked_mean
from lit_rl.ops.reductions import StepTotals, constant_mean, sequence_mean, token_mean

TEMPERATURE, LENGTH, LIMIT, ROWS = 0.7, 6, 8, 4
"""Responses have LENGTH columns where LIMIT tokens are allowed; two micro-batches of ROWS make an optimizer step."""

REWARDS: list[float | None] = []
"""What the reward function below returns next."""


def prepared_rewards(completions: list[str], **columns: object) -> list[float | None]:
    return list(REWARDS)


def make_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def make_trainer(trainer_class, config_class, folder, **settings):
    from datasets import Dataset
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.2,  # far from uniform, so that entropies and ratios differ between tokens
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    args = config_class(
        output_dir=str(folder),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=LIMIT,
        temperature=TEMPERATURE,
        beta=0.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        **settings,
    )
    trainer = trainer_class(
        model=str(folder / "model"),
        args=args,
        reward_funcs=prepared_rewards,
        train_dataset=Dataset.from_dict({"prompt": ["ab", "cde"] * 4}),
        processing_class=tokenizer,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 2
    return trainer


@pytest.fixture(scope="module")
def grpo(tmp_path_factory):
    from trl import GRPOConfig, GRPOTrainer

    return make_trainer(GRPOTrainer, GRPOConfig, tmp_path_factory.mktemp("grpo"))


@pytest.fixture(scope="module")
def rloo(tmp_path_factory):
    from trl import RLOOConfig, RLOOTrainer

    return make_trainer(RLOOTrainer, RLOOConfig, tmp_path_factory.mktemp("rloo"))


def scores(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Our log-probs and entropies of the completions."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    logits = model(input_ids=ids, attention_mask=attention).logits[:, -LENGTH - 1 : -1]
    return logprobs_and_entropy(logits, batch["completion_ids"], temperature=TEMPERATURE)


def make_batches(model: nn.Module) -> list[dict[str, Tensor]]:
    """One optimizer step: two micro-batches of uneven lengths; ratios on both sides of the clip range."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for lengths in ([6, 1, 4, 2], [3, 6, 0, 5]):
        mask = (torch.arange(LENGTH) < torch.tensor(lengths).unsqueeze(1)).long()
        batch = {
            "prompt_ids": torch.randint(2, 200, (ROWS, 3), generator=generator),
            "prompt_mask": torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 1], [1, 1, 1]]),
            "completion_ids": torch.randint(2, 200, (ROWS, LENGTH), generator=generator) * mask,
            "completion_mask": mask,
            "advantages": torch.randn(ROWS, generator=generator),
        }
        with torch.no_grad():
            now = scores(model, batch)[0]
        for name, spread in (("old", 0.4), ("ref", 0.6)):
            batch[f"{name}_per_token_logps"] = now + spread * torch.randn(ROWS, LENGTH, generator=generator)
        batches.append(batch)
    tokens = sum(batch["completion_mask"].sum() for batch in batches)
    return [{**batch, "num_items_in_batch": tokens} for batch in batches]


def backward(model: nn.Module, losses: list[Tensor]) -> tuple[float, Tensor]:
    """The sum of the losses, and its gradient by all parameters in one vector."""
    model.zero_grad()
    total = torch.stack(losses).sum()
    total.backward()
    return total.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def assert_same(ours: tuple[float, Tensor], theirs: tuple[float, Tensor]) -> None:
    assert theirs[1].norm() > 1e-3, "nothing to compare"
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5, abs=1e-6)
    assert (ours[1] - theirs[1]).norm() <= 1e-5 * theirs[1].norm()


REDUCTIONS = {
    "grpo": sequence_mean,
    "dapo": token_mean,
    "dr_grpo": lambda loss, mask, totals: constant_mean(loss, mask, totals, length=LIMIT),
}


@pytest.mark.parametrize("loss_type", REDUCTIONS)
@pytest.mark.parametrize(("beta", "estimator"), [(0.0, None), (0.04, kl.k3), (0.04, kl.corrected_k3)])
@pytest.mark.parametrize("clip_high", [None, 0.28])
@pytest.mark.parametrize("delta", [None, 1.6])
def test_grpo_loss(grpo, monkeypatch, loss_type, beta, estimator, clip_high, delta):
    model, batches = grpo.model, make_batches(grpo.model)
    monkeypatch.setattr(grpo, "loss_type", loss_type)
    monkeypatch.setattr(grpo, "beta", beta)
    monkeypatch.setattr(grpo, "epsilon_high", 0.2 if clip_high is None else clip_high)
    monkeypatch.setattr(grpo.args, "delta", delta)
    monkeypatch.setattr(grpo.args, "use_bias_correction_kl", estimator is kl.corrected_k3)
    grpo._metrics["train"].clear()
    theirs = backward(model, [grpo._compute_loss(model, dict(batch)) for batch in batches])

    totals = StepTotals.of(torch.cat([batch["completion_mask"] for batch in batches]).bool())
    losses, expected_metrics = [], {}
    for batch in batches:
        mask, old, ref = (batch[k] for k in ("completion_mask", "old_per_token_logps", "ref_per_token_logps"))
        mask = mask.bool()
        logprobs, entropy = scores(model, batch)
        per_token, metrics = clipped_policy_loss(
            logprobs, old, batch["advantages"], mask, clip_low=0.2, clip_high=clip_high, delta=delta
        )
        for name in ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"):
            expected_metrics.setdefault(name, []).append((metrics[name][0] / metrics[name][1]).item())
        expected_metrics.setdefault("entropy", []).append(masked_mean(entropy, mask).item())
        if estimator is not None:
            divergence = estimator(logprobs, ref, old)
            per_token = per_token + beta * divergence
            expected_metrics.setdefault("kl", []).append(masked_mean(divergence, mask).item())
        losses.append(REDUCTIONS[loss_type](per_token, mask, totals))
    assert_same(backward(model, losses), theirs)
    for name, values in expected_metrics.items():
        assert grpo._metrics["train"][name] == pytest.approx(values, rel=1e-4), name
    assert all(value > 0 for values in expected_metrics.values() for value in values), "the batch clips on both sides"


@pytest.mark.parametrize("clip_high", [None, 0.9])
def test_rloo_loss(rloo, monkeypatch, clip_high):
    model, batch = rloo.model, make_batches(rloo.model)[0]
    mask, old = batch["completion_mask"].bool(), batch["old_per_token_logps"]
    monkeypatch.setattr(rloo, "epsilon_high", 0.2 if clip_high is None else clip_high)
    theirs = backward(model, [rloo._compute_loss(model, {**batch, "old_logps": (old * mask).sum(1)})])
    logprobs, _ = scores(model, batch)
    per_row, _ = sequence_clipped_loss(logprobs, old, batch["advantages"], mask, clip_low=0.2, clip_high=clip_high)
    loss = sequence_mean(per_row.unsqueeze(1), mask.any(1, keepdim=True), StepTotals.of(mask))
    assert_same(backward(model, [loss]), theirs)


def test_rloo_row_without_loss_tokens(rloo):
    """TRL adds the constant -A / b to the value for such a row, we add nothing; the gradient is the same."""
    model, batch = rloo.model, make_batches(rloo.model)[1]
    mask, old, advantages = batch["completion_mask"].bool(), batch["old_per_token_logps"], batch["advantages"]
    theirs = backward(model, [rloo._compute_loss(model, {**batch, "old_logps": (old * mask).sum(1)})])
    logprobs, _ = scores(model, batch)
    per_row, _ = sequence_clipped_loss(logprobs, old, advantages, mask)
    ours = backward(model, [sequence_mean(per_row.unsqueeze(1), mask.any(1, keepdim=True), StepTotals.of(mask))])
    constant = -advantages[~mask.any(1)].sum().item() / ROWS
    assert_same((ours[0] + constant, ours[1]), theirs)


REWARD_CASES = {
    "plain": [0.0, 1.0, 0.35, 0.2, 3.0, 3.0, 3.0, 4.0],
    "equal in one group": [0.5, 0.5, 0.5, 0.5, 0.0, 1.0, 0.0, 1.0],
    "unscorable rows": [None, 1.0, 0.35, None, 2.0, 0.0, 1.0, None],
    "one scorable row": [None, 1.0, None, None, 2.0, 0.0, 1.0, 0.5],
    "no scorable row": [None, None, None, None, 2.0, 0.0, 1.0, 0.5],
}


def advantages_of(trainer, rewards: list[float | None]) -> tuple[Tensor, Tensor, Tensor]:
    """TRL's advantages through its own generate-and-score, beside what ours take: rewards and group ids."""
    REWARDS[:] = rewards
    trainer._metrics["train"].clear()
    inputs = [{"prompt": prompt} for prompt in ["ab"] * 4 + ["cde"] * 4]
    theirs = trainer._generate_and_score_completions(inputs)["advantages"]
    ours = torch.tensor([math.nan if reward is None else reward for reward in rewards])
    return theirs, ours, torch.arange(2).repeat_interleave(4)


@pytest.mark.filterwarnings("ignore:All reward functions returned None")
@pytest.mark.parametrize("rewards", REWARD_CASES.values(), ids=REWARD_CASES.keys())
@pytest.mark.parametrize(
    ("scale", "estimator"), [("group", group_normalized), ("batch", batch_normalized), ("none", centered)]
)
def test_grpo_advantages(grpo, monkeypatch, rewards, scale, estimator):
    monkeypatch.setattr(grpo, "scale_rewards", scale)
    theirs, ours, group_id = advantages_of(grpo, rewards)
    torch.testing.assert_close(estimator(ours, group_id), theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rewards", REWARD_CASES.values(), ids=REWARD_CASES.keys())
def test_rloo_advantages(rloo, rewards):
    theirs, ours, group_id = advantages_of(rloo, rewards)
    torch.testing.assert_close(leave_one_out(ours, group_id), theirs, atol=1e-5, rtol=1e-5)


def test_share_of_groups_without_spread(grpo):
    _, ours, group_id = advantages_of(grpo, REWARD_CASES["equal in one group"])
    assert group_std(ours, group_id).eq(0).float().mean().item() == 0.5
    assert grpo._metrics["train"]["frac_reward_zero_std"] == [0.5]
