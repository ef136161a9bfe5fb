"""XPO: policy against reference, DPO on the judged pairs and the bonus on what the reference wrote."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from online_modules import completions, gradient_by_hand, rollout_of, run_of_sums, step_of, sums_by_hand, with_policies
from small_rollouts import batch
from torch.nn.functional import logsigmoid

from lit_rl.algorithms import XPO
from lit_rl.algorithms.checks.preference_checks import check_opponent_groups
from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.optim.strategies import FSDP2Strategy, shards_weights
from lit_rl.algorithms.terms.groups import DynamicSampling
from lit_rl.core import interrupts
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Sampling
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.references import FrozenCopy
from lit_rl.rewards import exact_match

LENGTHS = (4, 2, 3, 5, 1, 4, 2, 2)
VERDICTS = (1.0, 0.0, 0.9, 0.3)
PAIRS = [(0, 1), (3, 2), (4, 5), (7, 6)]


def module_of(same: bool = False, **settings: Any) -> XPO:
    made = XPO("tiny", exact_match, reference=FrozenCopy(), sampling=Sampling(max_new_tokens=6), **settings)
    return with_policies(made, same=same)


def test_loss_and_gradient_by_hand() -> None:
    module, drawn = module_of(beta=0.7, alpha=0.05), completions(LENGTHS)
    loss, gradient, metrics = step_of(module, rollout_of(module, drawn, VERDICTS))
    pi, ref = (sums_by_hand(model, drawn) for model in (module.policy, module.reference_policy))
    dpo: Any = sum(-logsigmoid(0.7 * (pi[c] - ref[c] - pi[r] + ref[r])) for c, r in PAIRS) / 4
    bonus: Any = 0.05 * sum(pi[i] for i in (1, 3, 5, 7)) / 4  # the reference's completions, chosen or not
    assert loss == pytest.approx((dpo + bonus).item(), rel=1e-5)
    assert metrics["loss/dpo"] == pytest.approx(dpo.item(), rel=1e-5)
    assert metrics["loss/xpo"] == pytest.approx(bonus.item(), rel=1e-5)
    torch.testing.assert_close(gradient, gradient_by_hand(module.policy, dpo + bonus), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("verdicts", [VERDICTS, (1.0, 0.5, None, 0.0)], ids=["all", "some"])
def test_cutting_a_step_changes_nothing(verdicts: Any) -> None:
    module = module_of(alpha=0.05)
    rollout = rollout_of(module, completions(LENGTHS), verdicts)
    (loss, whole, metrics), (cut_loss, cut, cut_metrics) = step_of(module, rollout), step_of(module, rollout, 4)
    assert cut_loss == pytest.approx(loss, rel=1e-5)
    assert (whole - cut).norm() <= 1e-5 * whole.norm() and whole.norm() > 1e-3
    assert cut_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def test_a_tie_has_no_bonus_either() -> None:
    module = module_of(alpha=0.5)
    loss, gradient, _ = step_of(module, rollout_of(module, completions(LENGTHS), (0.5, None, 0.5, 0.5)))
    assert loss == 0 and not gradient.any()


@pytest.mark.parametrize("model", ["full", "lora"])
def test_the_second_completion_is_the_references(tmp_path: Path, model: str) -> None:
    """After a step that moved the policy far: each row scores as drawn under the model that wrote it."""
    described = LanguageModel("tiny", lora=Lora(r=4)) if model == "lora" else LanguageModel("tiny")
    module, _ = run_of_sums(XPO, tmp_path, 6, model=described)
    with torch.no_grad():
        for parameter in module.policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    batch = module.trainer.datamodule.peek(16)
    with module.rollout_context():
        drawn = module.draw_rollout(batch)
        own, ref = module.old_logprobs(drawn), module.ref_logprobs(drawn)
        again = module.draw_rollout(batch)
    assert torch.equal(drawn.response_ids, again.response_ids)
    mask = drawn.response_mask
    for rows, right, wrong in ((slice(0, None, 2), own, ref), (slice(1, None, 2), ref, own)):
        inside = mask[rows]
        torch.testing.assert_close(right[rows][inside], drawn.sampler_logprobs[rows][inside], rtol=0, atol=2e-4)
        assert (wrong[rows][inside] - drawn.sampler_logprobs[rows][inside]).abs().max() > 0.05
    assert drawn.group_id.tolist() == [i for i in range(16) for _ in range(2)]


def test_at_the_start_both_are_the_same_model_and_write_different_things(tmp_path: Path) -> None:
    module, fit = run_of_sums(XPO, tmp_path, 1)
    assert 0 < fit.callback_metrics["train/judge/ties"] < 1
    table = module.samples
    assert len(table["completion"]) == 32 and table["completion"] != table["opponent"]


def test_ranks_agree_before_they_gather_the_opponents_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank has given its own completions up, and would not come to the gathering."""

    def ends() -> NoReturn:
        raise InterruptedError

    module = module_of()
    monkeypatch.setattr(XPO, "ranks", Ranks(world_size=2))
    monkeypatch.setattr(XPO, "trainer", SimpleNamespace(strategy=FSDP2Strategy()), raising=False)
    monkeypatch.setattr(XPO, "draw", lambda *asked, **more: completions(LENGTHS))
    monkeypatch.setattr(Ranks, "any", lambda ranks, flag: True)
    module.reference.scoring = None  # pyright: ignore
    interrupts.enable_interrupts(ends, several=True)
    try:
        with pytest.raises(InterruptedError), interrupts.run_ending_hook():
            module.draw_rollout(batch([0, 1]))
    finally:
        interrupts.disable_interrupts()


def test_dynamic_groups_are_refused_where_an_opponent_cannot_write_for_one_rank_alone():
    """A rank that needs no more spare groups would leave the others alone with the opponent's weights."""
    check_opponent_groups("XPO", DynamicSampling(), ranks_draw_together=False)
    check_opponent_groups("XPO", None, ranks_draw_together=True)
    with pytest.raises(ConfigError, match="algo/groups=dynamic: in XPO.*strategy=ddp"):
        check_opponent_groups("XPO", DynamicSampling(), ranks_draw_together=True)
    assert shards_weights(FSDP2Strategy()) and shards_weights(FSDPStrategy()) and not shards_weights(DDPStrategy())
