"""BCO by hand: TRL has none any more. Its reward shift, the weights of prompts, and how a step is cut."""

from __future__ import annotations

import math

import lightning as L
import pytest
import torch
from offline_cuts import MODEL, VERDICTS, assert_same_step, data_of, loaded, micro_batches, step_of
from small_rollouts import trainer as quiet_trainer

from lit_rl.algorithms import BCO
from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.terms.verdict_terms import DensityRatio, RewardShift, prompt_embeddings
from lit_rl.algorithms.terms.whole_step import WholeStep
from lit_rl.core.errors import ConfigError, NumericError
from lit_rl.data.example_module import PreferenceDataModule
from lit_rl.models.references import EMA

SUMS = ["1+2=", "11+22=", "5+5=", "40+2=", "7+1=", "60+60=", "9+9=", "3+4="]
OTHERS = ["a", "bb", "c?", "dd!", "e", "ff", "g.", "h h"]
APART = [{"prompt": prompt, "completion": "3", "label": True} for prompt in SUMS] + [
    {"prompt": prompt, "completion": "4", "label": False} for prompt in OTHERS
]
"""Desirable completions answer sums, the others do not."""


@pytest.fixture
def module() -> BCO:
    return loaded(BCO(MODEL))


def rewards_of(module: BCO) -> torch.Tensor:
    (batch,) = micro_batches(data_of(VERDICTS, "verdicts"))[0]
    with torch.no_grad():
        return module.step_columns(batch)["rewards"]


# ---------------------------------------------------------------------- the reward shift


def test_the_first_step_by_hand(module: BCO) -> None:
    step, rewards = step_of(module, data_of(VERDICTS, "verdicts")), rewards_of(module)
    delta = sum(rewards.tolist()) / 8
    signs = [1 if row["label"] else -1 for row in VERDICTS]
    losses = [math.log1p(math.exp(-sign * (reward - delta))) for sign, reward in zip(signs, rewards.tolist())]
    assert step.metrics["delta"] == pytest.approx(delta, abs=1e-6)
    assert step.loss == pytest.approx(sum(losses) / 8, rel=1e-5)


def test_the_shift_is_the_mean_of_the_steps_so_far() -> None:
    shift, seen = RewardShift(), []
    for mean in (1.5, 4.5, 7.5):
        seen.append(float(shift.with_step(torch.tensor(mean))))
        shift.add(mean)
    assert seen == pytest.approx([1.5, (1.5 + 4.5) / 2, (1.5 + 4.5 + 7.5) / 3]) and shift.value == seen[-1]


def test_micro_batches_of_a_step_shift_it_once(module: BCO) -> None:
    """Each of them takes the whole step in, and the step is added after it was taken."""
    (batches,) = micro_batches(data_of(VERDICTS, "verdicts"), 4)
    whole = WholeStep.of(module.step_columns, batches[0], Ranks())
    deltas = [float(module.training_loss(batch, whole)[1]["delta"][0]) for batch in batches]  # pyright: ignore
    assert deltas == [pytest.approx(float(whole.columns["rewards"].mean()))] * 4
    assert module.shift.steps == 0
    module.after_step()
    assert (module.shift.steps, module.shift.value) == (1, deltas[0])
    module.after_step()
    assert module.shift.steps == 1, "nothing was learned from in between"


def test_what_is_validated_shifts_nothing(module: BCO) -> None:
    (batch,) = micro_batches(data_of(VERDICTS, "verdicts"))[0]
    module.shift.add(3.0)
    module.eval()
    assert float(module.loss(batch)[1]["delta"][0]) == 3.0  # pyright: ignore
    module.after_step()
    assert (module.shift.steps, module.shift.value) == (1, 3.0)


def test_a_step_that_broke_shifts_nothing(module: BCO) -> None:
    (batch,) = micro_batches(data_of(VERDICTS, "verdicts"))[0]
    module.training_loss(batch)
    module.broken_steps.last = True
    module.after_step()
    assert module.shift.steps == 0 and module._step_reward is None


def test_no_gradient_goes_through_the_shift(module: BCO) -> None:
    """One row alone is at its own shift: its loss is log 2, and its gradient that of its reward."""
    data = data_of(VERDICTS[:1], "verdicts")
    step = step_of(module, data)
    assert step.loss == pytest.approx(math.log(2), abs=1e-6)
    assert step.gradient.norm() > 1e-3


def test_the_shift_and_the_weights_go_on_from_a_checkpoint() -> None:
    first = loaded(BCO(MODEL, prompt_weights=DensityRatio()))
    data = data_of(APART, "verdicts")
    first.match_prompts(data.corpus.train.examples)
    first.shift.add(3.0)
    second = loaded(BCO(MODEL, prompt_weights=DensityRatio()))
    second._records.load_state = lambda *_: None  # pyright: ignore
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    second.trainer = trainer
    second.load_rank_state(first.rank_state())
    second._trainer = None
    assert (second.shift.steps, second.shift.value) == (1, 3.0)
    assert_same_step(step_of(second, data), step_of(first, data))


# ---------------------------------------------------------------------- the weights of prompts


def test_the_ratio_of_two_normal_densities() -> None:
    """Unit variance and means 1 and -1: the ratio at x is exp(2 x). The penalty shrinks it little with many rows."""
    generator = torch.Generator().manual_seed(0)
    desirable = torch.arange(6000) % 3 == 0  # one in three: the ratio is of densities, not of numbers
    x = torch.randn(6000, 1, generator=generator) + torch.where(desirable, 1.0, -1.0).unsqueeze(1)
    ratio = DensityRatio(low=1e-6, high=1e6)
    ratio.fit(x, desirable)
    at = torch.tensor([[-1.0], [0.0], [0.5], [1.0]])
    torch.testing.assert_close(ratio.weights(at).log(), 2 * at[:, 0], atol=0.15, rtol=0.1)


def test_the_regression_is_at_its_minimum() -> None:
    """Where the gradient of the weighted cross-entropy and the penalty is 0, computed here on its own."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(40, 3, generator=generator), torch.arange(40) < 10
    ratio = DensityRatio(penalty=2.0, low=1e-9, high=1e9)
    ratio.fit(x, y)
    z = (x.double() - x.double().mean(0)) / x.double().std(0, correction=0)
    found = ratio.state()["coefficients"]
    p = torch.sigmoid(z @ found[:3] + found[3])
    residual = torch.where(y, 40 / 20, 40 / 60) * (p - y.double())
    torch.testing.assert_close(z.T @ residual + 2.0 * found[:3], torch.zeros(3).double(), atol=1e-6, rtol=0)
    assert float(residual.sum()) == pytest.approx(0.0, abs=1e-6)
    torch.testing.assert_close(ratio.weights(x).double(), p / (1 - p), rtol=1e-5, atol=0)


def test_weights_stay_within_their_range() -> None:
    x, y = torch.tensor([[-1.0], [-0.9], [0.9], [1.0]]), torch.tensor([False, False, True, True])
    ratio = DensityRatio(penalty=1e-4)
    ratio.fit(x, y)
    torch.testing.assert_close(ratio.weights(torch.tensor([[-5.0], [5.0]])), torch.tensor([0.5, 10.0]))


def test_prompts_that_say_nothing_weigh_1() -> None:
    """Both kinds answer the same prompts."""
    rows = [{"prompt": prompt, "completion": str(n), "label": bool(n % 2)} for prompt in SUMS for n in (1, 2)]
    module = loaded(BCO(MODEL, prompt_weights=DensityRatio()))
    data = data_of(rows, "verdicts")
    module.match_prompts(data.corpus.train.examples)
    (batch,) = micro_batches(data)[0]
    torch.testing.assert_close(module._weights(batch), torch.ones(16), atol=1e-5, rtol=0)


def test_only_undesirable_rows_are_weighed_and_by_their_prompts() -> None:
    rows = [*APART, {"prompt": "8+8=", "completion": "1", "label": False}]
    module = loaded(BCO(MODEL, prompt_weights=DensityRatio()))
    data = data_of(rows, "verdicts")
    module.match_prompts(data.corpus.train.examples)
    (batch,) = micro_batches(data)[0]
    weights = module._weights(batch)
    assert weights is not None
    assert weights[:8].tolist() == [1.0] * 8
    assert weights[16] > weights[8:16].max(), "the wrong sum stands where the desirable ones do"


def test_an_embedding_is_of_the_prompt_alone() -> None:
    """Neither the completion, nor padding, nor what the policy has become changes it."""
    module = loaded(BCO(MODEL, prompt_weights=DensityRatio()))
    (batch,) = micro_batches(data_of(VERDICTS, "verdicts"))[0]
    tokens = batch.tokens
    prompts = tokens.attention_mask & ~tokens.loss_mask
    found = module.embed(tokens, prompts)
    ids = tokens.input_ids[1:2, : int(prompts[1].sum())]
    base = module.reference_policy(input_ids=ids, output_hidden_states=True)  # pyright: ignore
    torch.testing.assert_close(found[1], base.hidden_states[-1][0].mean(0), rtol=1e-4, atol=1e-5)


def test_a_prompt_of_no_tokens_is_0(module: BCO) -> None:
    nothing = torch.zeros(1, 4, dtype=torch.bool)
    found = prompt_embeddings(module.policy, torch.ones(1, 4, dtype=torch.long), nothing)
    assert not found.any()


# ---------------------------------------------------------------------- what is refused, and a run


def test_one_kind_has_no_ratio() -> None:
    with pytest.raises(ConfigError, match="4 of 4 sampled rows are desirable"):
        DensityRatio().fit(torch.randn(4, 2), torch.ones(4, dtype=torch.bool))


def test_embeddings_that_are_not_finite() -> None:
    with pytest.raises(NumericError, match="not finite"):
        DensityRatio().fit(torch.tensor([[math.nan], [0.0]]), torch.tensor([True, False]))


def test_a_reference_may_move_where_it_embeds_nothing() -> None:
    assert BCO(MODEL, reference=EMA()).reference.moves


def test_a_run_fits_the_ratio_once_and_counts_its_steps() -> None:
    module = BCO(MODEL, prompt_weights=DensityRatio(sample_rows=16))
    trainer = quiet_trainer(None, max_steps=3, accumulate_grad_batches=2, log_every_n_steps=1)
    data = PreferenceDataModule(rows=APART, batch_size=4, val_fraction=0.0)
    trainer.fit(module, datamodule=data)
    assert module.shift.steps == 3 and module.prompt_weights is not None and module.prompt_weights.ratio.fitted
    assert math.isfinite(float(trainer.callback_metrics["train/delta"]))
