"""What the KL is measured against while a policy trains: 0 at step 0, then fixed or following as it says."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from small_rollouts import EachBatch, trainer
from tiers import in_turn

from lit_rl.algorithms import GRPO, PPO, AdamW, Constant
from lit_rl.algorithms.evaluation.validation import Evaluation
from lit_rl.algorithms.families import policy_gradient
from lit_rl.algorithms.terms.credit import RunningNorm
from lit_rl.algorithms.terms.regularizers import AdaptiveKL
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.models.adapters import Lora
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.references import BEMA, EMA, AdapterBase, Auto, FrozenCopy, InitialAdapter, Mixing, OtherModel


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """An adapter that was trained before."""
    policy = LanguageModel("tiny", lora=Lora(r=2)).load()
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    folder = tmp_path_factory.mktemp("adapter")
    policy.save_pretrained(str(folder))
    return folder


def model(kind: str, adapter: Path) -> LanguageModel:
    if kind == "full":
        return LanguageModel("tiny")
    return LanguageModel("tiny", lora=Lora(r=2)) if kind == "fresh" else LanguageModel("tiny", adapter=str(adapter))


REFERENCES = {
    "auto": Auto,
    "auto-cpu": lambda: Auto(device="cpu"),
    "frozen": FrozenCopy,
    "ema": lambda: EMA(0.9),
    "bema": lambda: BEMA(every=1),
    "mixing": lambda: Mixing(every=1),
    "base": AdapterBase,
    "initial": InitialAdapter,
}
CASES = [
    ("full", "auto"), ("fresh", "auto"), ("continued", "auto"), ("continued", "frozen"), ("full", "ema"),
    ("fresh", "bema"), ("continued", "mixing"), ("full", "auto-cpu"), ("fresh", "base"), ("continued", "initial"),
]  # fmt: skip


def varied(completions: list[str]) -> list[float]:
    """Any policy gets different rewards within a group."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


def grpo(policy: LanguageModel, reference: Any, algorithm: Any = GRPO, **settings: Any) -> Any:
    return algorithm(
        policy,
        varied,
        reference=reference,
        **{
            "group_size": 4,
            "sampling": Sampling(max_new_tokens=5, temperature=0.8),
            "optimizer": AdamW(lr=3e-3),
            "scheduler": Constant(),
            **settings,
        },
    )


def fit(tmp_path: Any, module: Any, steps: int, look: Any) -> list[Any]:
    looks = EachBatch(look)
    data = RolloutDataModule(task=Addition(max_operand=5, val_rows=4), prompts_per_rollout=8)
    trainer(tmp_path, max_steps=steps, max_epochs=-1, callbacks=[looks]).fit(module, datamodule=data)
    return looks.seen


def kl(module: Any) -> float:
    """The largest log-ratio of a token to the reference, when the rollout was taken."""
    rollout = module.rollout
    return float((rollout.old_logprobs - rollout.ref_logprobs)[rollout.completions.response_mask].abs().max())


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_the_kl_is_zero_at_the_first_rollout_and_not_afterwards(kind, name, adapter, tmp_path):
    module = grpo(model(kind, adapter), REFERENCES[name](), beta=0.1, reward_beta=0.1)
    seen = fit(tmp_path, module, 2, kl)
    assert seen[0] < 1e-4
    assert seen[1] > 1e-3, "the policy did not move, so nothing was seen"


@in_turn(minibatches=[1, 2], kind=["full", "fresh", "continued"])
def test_an_average_follows_every_optimizer_step(kind, minibatches, adapter, tmp_path):
    module = grpo(model(kind, adapter), EMA(0.7), beta=0.1, minibatches=minibatches)
    seen = fit(tmp_path, module, 4, lambda m: (trained(m.policy), followers(m)))
    module_again = grpo(model(kind, adapter), EMA(0.7), beta=0.1)
    module_again.configure_model()
    average = trained(module_again.policy)
    for now, reference in seen:
        for name, value in now.items():
            average[name] = 0.7 * average[name] + 0.3 * value
            torch.testing.assert_close(reference[name], average[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("group_size", [1, 3])
def test_validation_logs_entropy_and_distance_to_the_reference_and_the_loss(group_size, tmp_path):
    """By hand: plain forward passes of policy and reference over each completion alone."""
    evaluation = Evaluation(group_size=group_size, temperature=0.8, log_policy=True)
    module = grpo(LanguageModel("tiny"), FrozenCopy(), beta=0.1, evaluation=evaluation)
    data = RolloutDataModule(task=Addition(max_operand=5, val_rows=4), prompts_per_rollout=8)
    runs = trainer(tmp_path, max_steps=3, max_epochs=-1, limit_val_batches=1.0)
    runs.fit(module, datamodule=data)
    (logged,) = runs.validate(module, datamodule=data, verbose=False)
    batch = next(iter(runs.val_dataloaders[0] if isinstance(runs.val_dataloaders, list) else runs.val_dataloaders))
    completions, scores = module.evaluate(batch)
    rewards = scores.total.reshape(-1, group_size)
    better = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten().tolist()
    entropy, distance, losses = [], [], []
    for advantage, prompt, asked, response, said in zip(
        better, completions.prompt_ids, completions.prompt_mask, completions.response_ids, completions.response_mask
    ):
        ids = torch.cat([prompt[asked], response[said]])[None]
        logs = [
            torch.log_softmax(each(ids).logits[0, int(asked.sum()) - 1 : -1].float() / 0.8, -1).detach()
            for each in (module.policy.eval(), module.reference_policy.eval())
        ]
        entropy += (-(logs[0].exp() * logs[0]).sum(-1)).tolist()
        now, ref = (log.gather(1, response[said][:, None])[:, 0] for log in logs)
        distance += ((ref - now).exp() - 1 - (ref - now)).tolist()
        losses += [-advantage] * len(now)
    assert logged["val/entropy"] == pytest.approx(sum(entropy) / len(entropy), rel=1e-3)
    assert logged["val/kl"] == pytest.approx(sum(distance) / len(distance), rel=1e-2, abs=1e-6)
    assert logged["val/kl"] > 1e-6, "the policy did not move, so nothing was seen"
    if group_size == 1:
        assert "val/loss" not in logged  # an only completion has no advantage
        return
    assert logged["val/loss"] == pytest.approx(sum(losses) / len(losses) + 0.1 * logged["val/kl"], rel=1e-4)
    assert logged["val/clip_ratio/region_mean"] == 0.0


@pytest.mark.parametrize("algorithm", [GRPO, PPO])
def test_the_loss_of_a_validation_is_the_same_in_any_parts_and_changes_no_term(algorithm, tmp_path, monkeypatch):
    def validated(rows_at_once: int) -> tuple[float, Any]:
        monkeypatch.setattr(policy_gradient, "MOST_ROWS", rows_at_once)
        terms = {"reward_norm": RunningNorm(), "kl_control": AdaptiveKL(0.1, 8), "reward_beta": 0.1}
        evaluation = Evaluation(group_size=3, temperature=0.8, log_policy=True)
        module = grpo(LanguageModel("tiny"), None, algorithm, evaluation=evaluation, **terms)
        data = RolloutDataModule(task=Addition(max_operand=5, val_rows=4))
        (logged,) = trainer(tmp_path, limit_val_batches=1.0).validate(module, datamodule=data, verbose=False)
        return logged["val/loss"], {name: term.state() for name, term in module._stateful().items()}

    (whole, state), (in_parts, _) = validated(12), validated(3)
    assert whole == pytest.approx(in_parts, rel=1e-4) and abs(whole) > 1e-4
    assert state == {"kl_control": AdaptiveKL(0.1, 8).state(), "reward_norm": RunningNorm().state()}


def test_without_a_kl_validation_logs_the_entropy_alone(tmp_path):
    module = grpo(LanguageModel("tiny"), None, evaluation=Evaluation(group_size=2, log_policy=True))
    data = RolloutDataModule(task=Addition(max_operand=5, val_rows=4), prompts_per_rollout=8)
    (logged,) = trainer(tmp_path, limit_val_batches=1.0).validate(module, datamodule=data, verbose=False)
    assert logged["val/entropy"] > 0 and "val/kl" not in logged
    assert "val/loss" not in logged  # greedy completions are not the training's


def trained(policy: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.named_parameters() if p.requires_grad}


def followers(module: Any) -> dict[str, torch.Tensor]:
    names = trained(module.policy)
    return {n: p.detach().clone() for n, p in module.reference_policy.named_parameters() if n in names}


def test_a_mixture_is_taken_every_few_steps(tmp_path):
    module = grpo(LanguageModel("tiny"), Mixing(alpha=1.0, every=2), beta=0.1)
    seen = fit(tmp_path, module, 4, lambda m: (trained(m.policy), followers(m)))

    def same(a: Any, b: Any) -> bool:
        return all(torch.equal(a[name], b[name]) for name in a)

    (one, ref_one), (two, ref_two), (three, ref_three), (four, ref_four) = seen
    assert not same(one, ref_one) and same(two, ref_two) and same(two, ref_three) and same(four, ref_four)
    assert not same(three, ref_three)


@pytest.mark.parametrize("algorithm", [GRPO, PPO])
def test_without_a_kl_term_no_reference_is_loaded_and_the_run_says_so(algorithm, tmp_path):
    class Forbidden(FrozenCopy):
        def module(self, policy: Any) -> Any:
            raise AssertionError("it was loaded")

    module = grpo(LanguageModel("tiny"), Forbidden(), algorithm, reward_beta=0.0, iterations=1)
    with pytest.warns(UserWarning, match="is not loaded") as caught:
        fit(tmp_path, module, 1, lambda m: None)
    (said,) = [text for warning in caught if "is not loaded" in (text := str(warning.message))]
    assert "reference=Forbidden" in said and "algo.beta" in said and "\n" not in said


def test_the_default_reference_needs_no_word(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tmp_path, grpo(LanguageModel("tiny"), None), 1, lambda m: None)
    assert not [warning for warning in caught if "is not loaded" in str(warning.message)]


def test_a_reference_to_adapters_is_refused_for_a_policy_without(tmp_path):
    with pytest.raises(ConfigError, match="reference=adapter_base"):
        fit(tmp_path, grpo(LanguageModel("tiny"), AdapterBase(), beta=0.1), 1, lambda m: None)


def test_other_weights_are_far_from_the_policy_from_the_start(adapter, tmp_path):
    module = grpo(LanguageModel("tiny"), OtherModel("tiny", adapter=str(adapter)), beta=0.1, reward_beta=0.1)
    assert fit(tmp_path, module, 1, kl)[0] > 1e-2


def test_the_adaptive_weight_is_logged_and_steers(tmp_path):
    module = grpo(
        LanguageModel("tiny"), FrozenCopy(), beta=0.5, kl_control=AdaptiveKL(target=1e6, horizon=64), minibatches=2
    )
    seen = fit(tmp_path, module, 6, lambda m: (m.rollout.kl_factor, m.trainer.callback_metrics.get("train/kl_coef")))
    # 32 sequences a rollout of two steps, always far below the target: 1 - 0.2 * 32 / 64 a rollout
    assert [factor for factor, _ in seen] == pytest.approx([1, 1, 0.9, 0.9, 0.81, 0.81])
    # logged at a rollout's end is what comes next
    assert [float(c) for _, c in seen[1::2]] == pytest.approx([0.5 * 0.9, 0.5 * 0.81, 0.5 * 0.729])


class Doubling:
    """A controller of the user's own, which is none of ours by class: twice the weight after each rollout."""

    adapts = True

    def __init__(self) -> None:
        self.factor, self.given = 1.0, []

    def update(self, kl: float, sequences: int) -> None:
        self.factor *= 2
        self.given.append((kl, sequences))

    def state(self) -> dict[str, float]:
        return {"factor": self.factor}

    def load_state(self, saved) -> None:
        self.factor = saved["factor"]


def test_a_users_own_controller_is_updated(tmp_path):
    """With a KL in the loss alone and one step a rollout, only the controller asks for old log-probs."""
    control = Doubling()
    assert not grpo(LanguageModel("tiny"), FrozenCopy(), beta=0.1).needs_old_logprobs
    module = grpo(LanguageModel("tiny"), FrozenCopy(), beta=0.1, kl_control=control)
    assert module.needs_old_logprobs
    seen = fit(tmp_path, module, 3, lambda m: (m.rollout.kl_factor, m.trainer.callback_metrics["train/kl_coef"].item()))
    assert [factor for factor, _ in seen] == [1, 2, 4]
    assert [weight for _, weight in seen] == pytest.approx([0.2, 0.4, 0.8])
    assert [sequences for _, sequences in control.given] == [32] * 3
    assert control.given[0][0] == pytest.approx(0, abs=1e-6) and control.given[2][0] != 0
