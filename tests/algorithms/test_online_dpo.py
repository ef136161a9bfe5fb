"""Online DPO: which completions are learned from, and what of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from online_modules import (
    completions,
    gradient_by_hand,
    prompts,
    rollout_of,
    step_of,
    sums_by_hand,
    with_policies,
)
from online_modules import scores as said
from small_rollouts import EachBatch, credited, trainer
from torch.nn.functional import logsigmoid

from lit_rl.algorithms import Constant, OnlineDPO
from lit_rl.algorithms.families.judged import WIN_RATE, best_and_worst, compared_rows
from lit_rl.algorithms.optim.optimizers import AdamW
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.core.errors import ConfigError, RewardError
from lit_rl.core.rollout import Sampling, select
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.models.references import FrozenCopy, ReferenceFree
from lit_rl.ops import preference_losses
from lit_rl.rewards import exact_match

LOSSES = {
    name: getattr(preference_losses, name)
    for name in ("alphapo", "apo_down", "apo_zero", "bco_pair", "discopop", "exo_pair", "hinge", "ipo", "nca_pair",
                 "robust", "sft", "sigmoid", "sigmoid_norm", "simpo", "sppo_hard")
}  # fmt: skip
"""Those that do not sort over a step."""

LENGTHS = (4, 2, 3, 5, 1, 4, 2, 2)
VERDICTS = (1.0, 0.0, 0.9, 0.3)


def module_of(same: bool = False, **settings: Any) -> OnlineDPO:
    made = OnlineDPO("tiny", exact_match, reference=FrozenCopy(), sampling=Sampling(max_new_tokens=6), **settings)
    return with_policies(made, same=same)


class TestLoss:
    def test_is_dpo_of_the_judged_pairs_by_hand(self) -> None:
        module, drawn = module_of(beta=0.7), completions(LENGTHS)
        loss, gradient, _ = step_of(module, rollout_of(module, drawn, VERDICTS))
        pi, ref = (sums_by_hand(model, drawn) for model in (module.policy, module.reference_policy))
        pairs = [(0, 1), (3, 2), (4, 5), (7, 6)]
        by_hand: Any = sum(-logsigmoid(0.7 * (pi[c] - ref[c] - pi[r] + ref[r])) for c, r in pairs) / 4
        assert loss == pytest.approx(by_hand.item(), rel=1e-5)
        torch.testing.assert_close(gradient, gradient_by_hand(module.policy, by_hand), rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("accumulate", [2, 4])
    @pytest.mark.parametrize("verdicts", [VERDICTS, (1.0, 0.5, None, 0.0)], ids=["all", "some"])
    def test_cutting_a_step_changes_nothing(self, verdicts: Any, accumulate: int) -> None:
        losses = {"sigmoid": preference_losses.sigmoid, "ipo": preference_losses.ipo, "sft": preference_losses.sft}
        module = module_of(preference=losses, preference_weights={"sft": 0.3})
        rollout = rollout_of(module, completions(LENGTHS), verdicts)
        (loss, whole, metrics), (cut_loss, cut, cut_metrics) = (
            step_of(module, rollout),
            step_of(module, rollout, accumulate),
        )
        assert cut_loss == pytest.approx(loss, rel=1e-5)
        assert (whole - cut).norm() <= 1e-5 * whole.norm() and whole.norm() > 1e-3
        assert cut_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)

    @pytest.mark.parametrize("nothing", [0.5, None], ids=["tie", "failure"])
    def test_a_pair_without_a_better_one_is_as_if_it_were_not_there(self, nothing: float | None) -> None:
        module = module_of(preference={"sigmoid": preference_losses.sigmoid, "sft": preference_losses.sft})
        some = step_of(module, rollout_of(module, completions(LENGTHS), (1.0, nothing, nothing, 0.3)))
        drawn = completions(LENGTHS)
        rows = torch.tensor([0, 1, 6, 7])
        without = step_of(module, rollout_of(module, select(drawn, rows), (1.0, 0.3)))
        assert some[0] == pytest.approx(without[0], rel=1e-5)
        torch.testing.assert_close(some[1], without[1], rtol=1e-4, atol=1e-7)

    def test_nothing_but_ties_has_no_gradient(self) -> None:
        module = module_of()
        loss, gradient, _ = step_of(module, rollout_of(module, completions(LENGTHS), (0.5, None, 0.5, 0.5)), 2)
        assert loss == 0 and not gradient.any()

    def test_ipo_reads_sums_unless_told_to_divide_by_the_length(self) -> None:
        drawn = completions(LENGTHS)
        for per_token in (False, True):
            module = module_of(preference=preference_losses.ipo, beta=0.4, per_token=per_token)
            loss, *_ = step_of(module, rollout_of(module, drawn, VERDICTS))
            pi, ref = (sums_by_hand(model, drawn) for model in (module.policy, module.reference_policy))
            length = [float(n) if per_token else 1.0 for n in LENGTHS]
            rho = [(p - r) / n for p, r, n in zip(pi, ref, length)]
            pairs = [(0, 1), (3, 2), (4, 5), (7, 6)]
            assert loss == pytest.approx(sum(float((rho[c] - rho[r] - 1 / 0.8) ** 2) for c, r in pairs) / 4, rel=1e-4)

    @pytest.mark.parametrize("name", LOSSES)
    def test_per_token_is_refused_exactly_where_it_would_change_nothing(self, name: str) -> None:
        drawn, losses, setting = completions(LENGTHS), [], {"preference": LOSSES[name]}
        module = module_of(**setting)
        for module.per_token in (False, True):
            losses.append(step_of(module, rollout_of(module, drawn, VERDICTS))[0])
        assert (losses[0] != losses[1]) == (name in ("alphapo", "ipo", "sigmoid_norm", "simpo"))
        if losses[0] != losses[1]:
            assert module_of(**setting, per_token=True).per_token
            return
        with pytest.raises(ConfigError, match=rf"algo\.per_token=true.*\({name}\) reads none"):
            module_of(**setting, per_token=True)

    def test_one_loss_of_several_that_reads_lengths_is_enough(self) -> None:
        both = {"sigmoid": preference_losses.sigmoid, "simpo": preference_losses.simpo}
        assert module_of(preference=both, per_token=True).per_token
        assert module_of(preference=lambda pairs, beta: pairs.chosen_mean * beta, per_token=True).per_token

    def test_sft_is_a_mean_over_the_tokens_of_the_better_ones(self) -> None:
        module, drawn = module_of(preference=preference_losses.sft), completions(LENGTHS)
        loss, *_ = step_of(module, rollout_of(module, drawn, VERDICTS), 2)
        pi = sums_by_hand(module.policy, drawn)
        better = (0, 3, 4, 7)
        assert loss == pytest.approx(-sum(pi[i].item() for i in better) / sum(LENGTHS[i] for i in better), rel=1e-5)

    def test_without_a_reference_the_log_probs_themselves_are_compared(self) -> None:
        module, drawn = module_of(), completions(LENGTHS)
        module.reference = ReferenceFree()
        assert not module.needs_reference
        loss, *_ = step_of(module, rollout_of(module, drawn, VERDICTS))
        pi = sums_by_hand(module.policy, drawn)
        pairs = [(0, 1), (3, 2), (4, 5), (7, 6)]
        assert loss == pytest.approx(sum(float(-logsigmoid(0.1 * (pi[c] - pi[r]))) for c, r in pairs) / 4, rel=1e-5)


class TestBestAgainstWorst:
    def test_of_each_row(self) -> None:
        nan = math.nan
        wins = torch.tensor([[0.2, 0.9, 0.5, 0.9], [0.5] * 4, [nan, 0.1, nan, 0.7], [nan, 0.3, nan, nan], [nan] * 4])
        assert best_and_worst(wins).tolist() == [[-1, 1, 0, 0], [0] * 4, [0, -1, 0, 1], [0] * 4, [0] * 4]

    def test_two_rows_a_prompt_are_learned_from_in_their_order(self) -> None:
        better = torch.tensor([0.0, 1, 0, -1, 0, 0, 0, 0, -1, 0, 1, 0])
        assert compared_rows(better, torch.arange(12) // 4).tolist() == [1, 3, 4, 5, 8, 10]

    def test_the_judge_is_asked_about_every_pair_and_win_rates_are_means(self) -> None:
        asked = []

        def judge(prompts, firsts, seconds, answer, first_rewards):
            asked.extend(zip(prompts, firsts, seconds, answer, first_rewards))
            return [1.0, 0.5, None] * (len(firsts) // 3)

        module = OnlineDPO("tiny", exact_match, judge=judge, group_size=3, sampling=Sampling(max_new_tokens=3))
        drawn = completions((2,) * 6, group=3)
        batch = prompts(2)
        found = module.judged(Scored(batch, drawn, module.reward(batch, drawn)))
        assert len(asked) == 6 and [a[3] for a in asked] == ["0"] * 3 + ["2"] * 3
        assert found.win_rates.tolist() == [0.75, 0.0, 0.5] * 2
        assert found.scores.metrics["judge/failures"] == (2.0, 6) and found.scores.metrics["judge/ties"] == (0.0, 2)

    def test_rows_left_out_are_not_learned_from(self) -> None:
        module, drawn = module_of(group_size=3), completions((2,) * 6, group=3)
        rates = torch.tensor([1.0, 0.5, 0.0, 1.0, 0.5, 0.0], dtype=torch.float64)
        kept = torch.tensor([True, True, True, False, True, True])
        rollout, _ = credited(module, Scored(prompts(2), drawn, said([1.0] * 6), kept=kept, win_rates=rates))
        assert rollout.verdicts is not None and rollout.verdicts.tolist() == [1, 0, -1, 0, 1, -1]
        assert rollout.loss_mask.any(1).tolist() == [True, False, True, False, True, True]
        assert rollout.rewards.isnan().tolist() == [False, False, False, True, False, False]


def test_the_penalty_is_taken_off_before_the_judge_sees_the_reward() -> None:
    module = module_of(missing_eos_penalty=2.0)
    drawn, batch = completions((2, 2)), prompts(1)
    drawn.ended[0] = False
    found = module.judged(Scored(batch, drawn, said([1.0, 0.0])))
    assert found.win_rates.tolist() == [0.0, 1.0] and found.scores.total.tolist() == [1.0, 0.0]
    assert module.as_rollout(found, loss_mask=drawn.response_mask).rewards.tolist() == [-1, 0]


def test_beta_by_epoch() -> None:
    module = module_of(beta=[0.3, 0.2])
    assert module.coefficients()["beta"] == 0.3
    values = [0.3, 0.2, 0.2]
    for epoch, value in enumerate(values):
        module._trainer = type("T", (), {"current_epoch": epoch})()  # pyright: ignore
        assert module.at_epoch(module.beta) == value


def test_a_judge_that_needs_what_is_no_column_is_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    module = OnlineDPO("tiny", exact_match, judge=lambda prompts, firsts, seconds, nowhere: [])
    with pytest.raises(RewardError, match="nowhere"):
        trainer(tmp_path, max_steps=1).fit(
            module, datamodule=RolloutDataModule(task=Addition(max_operand=9, val_rows=4))
        )
    assert module.policy is None


class TestRuns:
    """Whole runs of the shipped policy."""

    def run(self, tmp_path: Path, steps: int, look: Any, **settings: Any) -> Any:
        module = OnlineDPO(
            "tiny",
            settings.pop("reward", exact_match),
            sampling=Sampling(max_new_tokens=6),
            optimizer=AdamW(lr=3e-4),
            scheduler=Constant(),
            **settings,
        )
        seen = EachBatch(look)
        data = RolloutDataModule(task=Addition(max_operand=12, val_rows=4), prompts_per_rollout=16)
        fit = trainer(tmp_path, max_steps=steps, accumulate_grad_batches=2, gradient_clip_val=1.0, callbacks=[seen])
        fit.fit(module, datamodule=data)
        return module, fit, seen.seen

    def test_a_judge_without_any_reward_is_enough(self, tmp_path: Path) -> None:
        def longer(prompts, firsts, seconds):
            return [0.5 + 0.5 * ((len(a) > len(b)) - (len(a) < len(b))) for a, b in zip(firsts, seconds)]

        module, fit, _ = self.run(tmp_path, 2, lambda module: None, reward=None, judge=longer)
        assert fit.callback_metrics["train/reward"] == pytest.approx(0.5)
        assert WIN_RATE in module.samples and 0 <= fit.callback_metrics["train/judge/ties"] < 1
