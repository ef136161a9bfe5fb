"""All options at once against TRL 1.16, the entropy bonus over several steps, and where a step is cut another way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from oracle_cases import Case, Outcome, assert_same_step, backward
from oracle_ours import our_grpo, our_rollout, ours, plan_of
from oracle_trl import Oracle, completions_of, theirs
from torch import Tensor

from lit_rl.algorithms.families.policy_gradient import PolicyGradient
from lit_rl.algorithms.rollouts.rollout_plan import micro_batch, rows_of_slots, step_counts, step_totals
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Rollout, select
from lit_rl.models.forward import score
from lit_rl.ops.reductions import StepTokens, StepTotals

OPTIONS: dict[str, dict[str, Any]] = {
    "k3": {"beta": 0.3, "use_bias_correction_kl": False},
    "corrected_k3": {"beta": 0.3},
    "delta": {"delta": 1.55},
    "clip_high": {"epsilon_high": 0.5},
    "mask_truncated": {"mask_truncated_completions": True},
    "off_policy": {"off_policy_mask_threshold": 0.02},
    "top_entropy": {"top_entropy_quantile": 0.37},
    "entropy": {"entropy_coef": 0.3},
    "router": {"router_aux_loss_coef": 0.5},
    "batch_scale": {"scale_rewards": "batch"},
    "one_step": {"num_iterations": 1},
    **{
        mode: {"use_vllm": True, "vllm_importance_sampling_mode": mode}
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
}
BASES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo_of_sequences": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02},
}


@pytest.mark.parametrize("base", BASES)
def test_everything_at_once(grpo: Oracle, base: str) -> None:
    names = [name for name in OPTIONS if name not in ("k3", "one_step", "mask_truncated")]
    settings = BASES[base] | {key: setting for name in names for key, setting in OPTIONS[name].items()}
    case = Case(second=(1.0, 0.0, None, 0.5, 1.0, 1.5, 0.0, None), micro_batches=1)
    completions = completions_of(grpo, case)
    assert_same_step(ours(grpo, our_grpo(settings), case, completions), theirs(grpo, settings, case, completions))


def test_vespo_takes_no_weights_of_sequences() -> None:
    """TRL's constructor refuses it too."""
    with pytest.raises(ConfigError, match="token_truncate"):
        our_grpo({"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_mode": "sequence_mask"})


def test_the_router_is_balanced_over_truncated_completions_too(grpo: Oracle) -> None:
    """TRL hides what it masks from the model, so its router loss is without them; the rest of the loss is the same."""
    settings, case = OPTIONS["router"] | OPTIONS["mask_truncated"], Case()
    completions = completions_of(grpo, case)
    mine = ours(grpo, our_grpo(settings), case, completions)
    other = theirs(grpo, settings, case, completions)

    def without_router(outcome: Outcome) -> float:
        return outcome.loss - 0.5 * sum(outcome.metrics["aux_loss"]) / case.micro_batches

    assert without_router(mine) == pytest.approx(without_router(other), abs=1e-6)
    shown = replace(completions, response_mask=completions.response_mask & completions.ended[:, None])
    for seen, outcome in ((completions, mine), (shown, other)):
        for number, rows in enumerate(torch.arange(8).chunk(2)):
            aux = score(grpo.model, select(seen, rows), our_grpo({}).sampling, router_aux=True).aux_loss
            assert aux is not None and aux.item() == pytest.approx(outcome.metrics["aux_loss"][number], rel=1e-5)


# ------------------------------------------------------------------ terms that TRL takes over a micro-batch


def step_of(oracle: Oracle, settings: dict[str, Any], case: Case) -> tuple[PolicyGradient, list[Rollout], StepTotals]:
    """Our module with a Trainer, at the weights of the update, and the micro-batches and totals of a step."""
    module, plan = our_grpo(settings), plan_of(case)
    rollout, _ = our_rollout(oracle, module, case, completions_of(oracle, case))
    counts = step_counts(rollout, plan, seed=0, index=0)[0]
    micro_batches = [micro_batch(rollout, rows) for rows in rows_of_slots(rollout, plan, seed=0, index=0)]
    module.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    oracle.at("update")
    return module, micro_batches, step_totals(counts, plan)


def share_of(module: PolicyGradient, micro: Rollout, totals: StepTotals, step: StepTokens | None = None) -> Tensor:
    """A micro-batch's share of the objective, taken as `training_step` takes it."""
    scores = module.token_scores(micro.completions)
    loss, _ = module.loss(micro, scores, totals, step)
    module.after_micro_batch(micro, scores, step)
    return loss


@pytest.mark.filterwarnings("ignore:GPU available")
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "luspo"])
@pytest.mark.parametrize("names", [("top_entropy",), ("entropy",), ("top_entropy", "entropy")], ids="-".join)
def test_terms_of_a_step_do_not_depend_on_its_cut(grpo: Oracle, loss_type: str, names: tuple[str, ...]) -> None:
    """TRL takes a quantile and a bonus over a micro-batch: cut in two, ours are still those of TRL's one batch."""
    settings = {"loss_type": loss_type} | {key: setting for name in names for key, setting in OPTIONS[name].items()}
    whole = Case(micro_batches=1)
    other = theirs(grpo, settings, whole, completions_of(grpo, whole))
    module, micro_batches, totals = step_of(grpo, settings, replace(whole, micro_batches=2))
    step = module.look_ahead(micro_batches) if module.needs_step else None
    mine = backward(grpo.model, [share_of(module, micro, totals, step) for micro in micro_batches])
    assert_same_step(replace(mine, advantages=other.advantages), other)


def test_the_bonus_of_trl_is_a_mean_of_means(grpo: Oracle) -> None:
    """TRL: sum_i H_i / n_i / micro-batches. Ours: sum_i H_i / sum_i n_i. With the counts of TRL it is TRL's."""
    settings, case = OPTIONS["entropy"] | {"loss_type": "grpo"}, Case()
    other = theirs(grpo, settings, case, completions_of(grpo, case))
    module, micro_batches, totals = step_of(grpo, settings, case)
    counted = [replace(totals, tokens=case.micro_batches * micro.loss_mask.sum()) for micro in micro_batches]
    mine = backward(grpo.model, [share_of(module, micro, counts) for micro, counts in zip(micro_batches, counted)])
    assert_same_step(replace(mine, advantages=other.advantages), other)
    assert len({int(micro.loss_mask.sum()) for micro in micro_batches}) == 2


ADAPTIVE = {
    "use_adaptive_entropy": True,
    "entropy_coef": 0.1,
    "entropy_coef_min": 0.07,
    "entropy_coef_max": 0.23,
    "entropy_coef_delta": 0.05,
    "entropy_target": 3.0,
}
SHARPNESS = (1.0, 2.5, 2.5, 2.5, 2.5, 1.0, 1.0, 1.0, 1.0, 1.0, 2.5)
"""Of the logits in each optimizer step: the entropy falls below the target and comes back; both limits are met."""


@pytest.mark.parametrize(("micro_batches", "more"), [(1, {}), (2, {}), (1, OPTIONS["top_entropy"])])
def test_adaptive_entropy(grpo: Oracle, micro_batches: int, more: dict[str, Any]) -> None:
    """Eleven optimizer steps: loss, gradient, and the coefficient after each."""
    from trl.trainer.utils import split_tensor_dict

    lengths = (7, 5, 6, 4, 7, 7, 4, 4)  # as many tokens in both groups: then TRL's bonus is that of the step
    case, settings = Case(lengths=lengths, micro_batches=micro_batches), ADAPTIVE | more
    taken = grpo.take(settings, case, completions_of(grpo, case))
    module, ours_cut, totals = step_of(grpo, settings, case)
    assert module.entropy is not None
    head = grpo.trainer.model.get_output_embeddings().weight
    coefficients = []
    for sharpness in SHARPNESS:
        grpo.at("update")
        with torch.no_grad():
            head.mul_(sharpness)
        other = grpo.step(split_tensor_dict(taken, micro_batches))
        mine = backward(grpo.model, [share_of(module, micro, totals) for micro in ours_cut])
        module.after_step()
        assert_same_step(mine, other)
        coefficients.append(grpo.trainer.entropy_coef)
        assert module.entropy.control.state()["entropy_coef"] == pytest.approx(coefficients[-1])
    assert {min(coefficients), max(coefficients)} == {0.07, 0.23}, "both limits are reached"
