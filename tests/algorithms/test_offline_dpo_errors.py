"""What DPO refuses, and the key that its message names."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from small_rollouts import trainer

from lit_rl.algorithms import DPO
from lit_rl.core.errors import ConfigError, LitRLError
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import PreferenceDataModule, SupervisedDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition, AdditionPairs, AdditionText
from lit_rl.ops import preference_losses

REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no beta": ({"beta": 0.0}, ["algo.beta", "0"]),
    "a beta below 0": ({"beta": -0.1}, ["algo.beta", "-0.1"]),
    "a weight of no loss": (
        {
            "preference": {"sigmoid": preference_losses.sigmoid, "sft": preference_losses.sft},
            "preference_weights": {"sigmoi": 0.5},
        },
        ["algo.preference_weights.sigmoi", "sigmoid, sft", "Did you mean"],
    ),
    "a weight below 0": ({"preference_weights": {"sigmoid": -1.0}}, ["algo.preference_weights.sigmoid", "-1.0"]),
    "no loss": ({"preference": {}}, ["algo.preference", "empty"]),
    "a smoothing above 1/2": (
        {"preference": partial(preference_losses.sigmoid, label_smoothing=0.6)},
        ["preference.sigmoid", "label_smoothing=0.6", "[0, 0.5]"],
    ),
    "a smoothing of 0 where it has to be above": (
        {"preference": partial(preference_losses.exo_pair, label_smoothing=0.0)},
        ["preference.exo_pair", "(0, 0.5]"],
    ),
    "a smoothing of 1/2 where it has to be below": (
        {"preference": partial(preference_losses.robust, label_smoothing=0.5)},
        ["preference.robust", "[0, 0.5)"],
    ),
    "a divergence of a loss of ratios": (
        {"preference": preference_losses.bco_pair, "divergence": preference_losses.js_divergence},
        ["algo/divergence", "bco_pair", "reverse_kl"],
    ),
    "a divergence of one of several losses": (
        {
            "preference": {"sigmoid": preference_losses.sigmoid, "nca_pair": preference_losses.nca_pair},
            "divergence": partial(preference_losses.alpha_divergence, alpha=0.3),
        },
        ["algo/divergence", "nca_pair"],
    ),
    "an infinite alpha": (
        {"divergence": partial(preference_losses.alpha_divergence, alpha=float("inf"))},
        ["divergence", "alpha=inf"],
    ),
    "weights of pairs in a loss that sorts": (
        {"preference": preference_losses.aot, "likelihood_weights": True},
        ["algo.likelihood_weights", "aot"],
    ),
    "a tail weight above 1": ({"tail_weight": 1.5}, ["algo.tail_weight", "1.5"]),
    "a router's loss below 0": ({"router_aux_loss_coef": -1.0}, ["algo.router_aux_loss_coef"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_is_refused(name: str) -> None:
    settings, words = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        DPO("tiny", **settings)
    for word in words:
        assert word in str(error.value), str(error.value)


def fit(tmp_path: Path, data: Any, **settings: Any) -> None:
    trainer(tmp_path, max_steps=1, **settings).fit(DPO("tiny", sampling=Sampling(max_new_tokens=6)), datamodule=data)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (lambda: RolloutDataModule(task=Addition(5, 4), prompts_per_rollout=4), "RolloutDataModule"),
        (lambda: SupervisedDataModule(task=AdditionText(5, 4), batch_size=4), "SupervisedDataModule"),
    ],
)
def test_another_data_module_is_refused(data: Any, word: str, tmp_path: Path) -> None:
    with pytest.raises(LitRLError) as error:
        fit(tmp_path, data())
    assert word in str(error.value) and "pairs" in str(error.value)


def test_a_batch_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    data = PreferenceDataModule(task=AdditionPairs(9, 4), batch_size=10)
    with pytest.raises(ConfigError, match="data.batch_size=10 .*Nearest that work: data.batch_size=8, .*=12"):
        fit(tmp_path, data, accumulate_grad_batches=4)


def test_more_rows_a_step_than_there_are_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LitRLError, match="data.batch_size"):
        fit(tmp_path, PreferenceDataModule(task=AdditionPairs(2, 2), batch_size=64))


def test_rows_without_a_rejected_side_are_refused(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}", "chosen": "a"} for i in range(8)]
    with pytest.raises(LitRLError, match="rejected"):
        fit(tmp_path, PreferenceDataModule(rows=rows, batch_size=4))


def test_a_reference_that_no_loss_reads_is_not_loaded() -> None:
    """`simpo` and its reward are of the policy's log-probs alone. Beside a loss that compares the reference is needed;
    with `sft` too: the rewards that are logged are measured against it, as in TRL."""
    simpo = partial(preference_losses.simpo, gamma=1.0)
    assert not DPO("tiny", preference=simpo).needs_reference
    assert DPO("tiny", preference={"a": simpo, "b": preference_losses.sigmoid}).needs_reference
    assert DPO("tiny", preference=preference_losses.sft).needs_reference
