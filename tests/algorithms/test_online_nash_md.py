"""Nash-MD: the policy against its mixture with the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from online_modules import completions, gradient_by_hand, rollout_of, run_of_sums, step_of, with_policies
from tiers import in_turn

from lit_rl.algorithms import NashMD
from lit_rl.core.rollout import Completions, Sampling
from lit_rl.models.references import FrozenCopy
from lit_rl.rewards import exact_match
from lit_rl.rewards.judges import RewardJudge

LENGTHS = (4, 2, 3, 5, 1, 4, 2, 2)
VERDICTS = (1.0, 0.2, 0.5, 0.3)


def module_of(same: bool = False, **settings: Any) -> NashMD:
    made = NashMD("tiny", exact_match, reference=FrozenCopy(), sampling=Sampling(max_new_tokens=6), **settings)
    return with_policies(made, same=same)


def tokens(model: Any, drawn: Completions, row: int) -> torch.Tensor:
    ids = torch.cat([drawn.prompt_ids[row], drawn.response_ids[row, : int(drawn.lengths[row])]])
    return model(input_ids=ids[None]).logits[0].log_softmax(-1)[2:-1].gather(1, ids[3:, None])[:, 0]


def by_hand(module: NashMD, drawn: Completions, verdicts: Any, beta: float) -> torch.Tensor:
    total, judged = torch.zeros(()), 0
    for pair, verdict in enumerate(verdicts):
        if verdict is not None:
            pi, ref = (tokens(model, drawn, 2 * pair) for model in (module.policy, module.reference_policy))
            total = total + (beta * (pi - ref).detach() * pi).sum() - (verdict - 0.5) * pi.sum()
            judged += 1
    return total / judged


@in_turn(accumulate=[1, 2, 4], verdicts=[VERDICTS, (1.0, None, 0.5, 0.3)])
def test_loss_and_gradient_by_hand_however_a_step_is_cut(verdicts: Any, accumulate: int) -> None:
    module, drawn = module_of(beta=0.7), completions(LENGTHS)
    loss, gradient, metrics = step_of(module, rollout_of(module, drawn, verdicts), accumulate)
    expected = by_hand(module, drawn, verdicts, 0.7)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient, gradient_by_hand(module.policy, expected), rtol=1e-4, atol=1e-6)
    assert metrics["loss/kl"] + metrics["loss/score"] == pytest.approx(loss, rel=1e-5)


def test_a_tie_has_its_kl_and_no_preference() -> None:
    module, drawn = module_of(beta=0.7), completions(LENGTHS)
    _, gradient, metrics = step_of(module, rollout_of(module, drawn, (0.5,) * 4))
    assert metrics["loss/score"] == 0 and gradient.norm() > 1e-3


def test_without_any_verdict_nothing_is_learned() -> None:
    module = module_of()
    loss, gradient, _ = step_of(module, rollout_of(module, completions(LENGTHS), (None,) * 4))
    assert loss == 0 and not gradient.any()


def test_only_the_policys_completions_are_run_again() -> None:
    module, drawn = module_of(), completions(LENGTHS)
    rollout = rollout_of(module, drawn, VERDICTS)
    assert torch.equal(rollout.completions.response_ids, drawn.response_ids[0::2])
    torch.testing.assert_close(rollout.advantages, torch.tensor(VERDICTS) - 0.5)
    assert rollout.verdicts is None, "there are no pairs to learn"


def test_the_opponent_is_the_mixture(tmp_path: Path) -> None:
    """With a coefficient of 1 it is the reference itself, whose log-probs are known."""
    module, _ = run_of_sums(NashMD, tmp_path, 8, mixture_coef=[1.0])
    batch = module.trainer.datamodule.peek(16)
    with module.rollout_context():
        drawn = module.draw_rollout(batch)
        own, ref = module.old_logprobs(drawn), module.ref_logprobs(drawn)
    mask = drawn.response_mask
    for rows, right in ((slice(0, None, 2), own), (slice(1, None, 2), ref)):
        torch.testing.assert_close(right[rows][mask[rows]], drawn.sampler_logprobs[rows][mask[rows]], rtol=0, atol=2e-4)
    assert (own - ref)[mask].abs().max() > 1e-3


def test_what_is_logged_is_of_the_policy_and_of_its_opponent(tmp_path: Path) -> None:
    """That it learns is in test_presets_learn.py."""
    _, fit = run_of_sums(NashMD, tmp_path, 3, judge=RewardJudge(soft=True))
    found = {name: float(value) for name, value in fit.callback_metrics.items()}
    margin = found["train/rewards/chosen"] - found["train/rewards/rejected"]
    assert found["train/mixture_coef"] == 0.5
    assert found["train/rewards/margins"] == pytest.approx(margin, abs=1e-6)
    assert found["train/rewards/chosen"] == pytest.approx(found["train/reward"], abs=1e-6)
