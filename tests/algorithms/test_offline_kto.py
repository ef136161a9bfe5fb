"""Laws of KTO: how a step is cut, where its constants lie. Its numbers are compared with TRL's."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from offline_cuts import MODEL, PAIRS, VERDICTS, data_of, loaded, micro_batches, step_of
from small_rollouts import trainer as quiet_trainer

from lit_rl.algorithms import KTO
from lit_rl.core.errors import ConfigError
from lit_rl.ops.preference_losses import apo_zero_unpaired, kto


@pytest.fixture(scope="module")
def module() -> KTO:
    return loaded(KTO(MODEL))


def with_verdict(module: KTO, verdict: Any) -> KTO:
    module.verdict = verdict
    return module


def test_the_baseline_is_that_of_the_whole_step(module: KTO) -> None:
    """Micro-batches on their own have other baselines, so the invariance above is not of something constant."""
    data = data_of(VERDICTS, "verdicts")
    module = with_verdict(module, kto)
    with torch.no_grad():
        alone = [float(module.step_columns(batch)["mismatched"].mean()) for batch in micro_batches(data, 4)[0]]
    assert max(alone) - min(alone) > 0.01
    assert step_of(module, data, 4).metrics["kl"] == pytest.approx(max(0.0, sum(alone) / 4), abs=1e-5)


def test_a_verdict_without_baseline_scores_no_mismatched_completions(module: KTO) -> None:
    (batch,) = micro_batches(data_of(VERDICTS, "verdicts"))[0]
    module = with_verdict(module, apo_zero_unpaired)
    assert not module.couples_rows
    loss, metrics = module.loss(replace(batch, mismatched=None))
    assert loss.isfinite() and "kl" not in metrics
    assert with_verdict(module, partial(kto)).couples_rows


def test_a_verdict_of_ones_own_is_told_by_how_many_arguments_it_takes() -> None:
    def with_baseline(r, good, z, b, *, weight=1.0):
        return -weight * b * (r - z)

    def without(r, good, b, *, weight=1.0):
        return -weight * b * r

    def everything(*given):
        assert len(given) == 4
        return -given[0]

    needs = {with_baseline: True, without: False, everything: True, partial(without, weight=2.0): False}
    assert {verdict: KTO(MODEL, verdict=verdict).couples_rows for verdict in needs} == needs


@pytest.mark.parametrize("label", [True, False])
def test_a_step_of_one_kind(module: KTO, label: bool) -> None:
    """What it has none of is NaN, and no margin is made up."""
    module = with_verdict(module, kto)
    step = step_of(module, data_of([{**row, "label": label} for row in VERDICTS], "verdicts"), 2)
    assert math.isfinite(step.loss)
    assert math.isnan(step.metrics["rewards/chosen"]) is not label
    assert math.isnan(step.metrics["rewards/rejected"]) is label
    assert math.isnan(step.metrics["rewards/margins"])


def test_pairs_are_two_verdicts_each() -> None:
    corpus = data_of(PAIRS, "verdicts").corpus.train
    assert [example.desirable for example in corpus.examples] == [True, False] * len(PAIRS)


# ---------------------------------------------------------------------- what is refused, and what is said


def trained(module: KTO, rows: list[dict[str, Any]], **data: Any) -> list[str]:
    """Two steps of a Trainer; returns what it warned of."""
    from lit_rl.data.example_module import PreferenceDataModule

    given = {"batch_size": 4, "val_fraction": 0.0, "shuffle": False} | data
    trainer = quiet_trainer(None, max_steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=PreferenceDataModule(rows=rows, **given))
    return [str(warning.message) for warning in caught]


def test_a_step_of_one_row_has_no_baseline() -> None:
    with pytest.raises(ConfigError, match="data.batch_size=1"):
        trained(KTO(MODEL), VERDICTS, batch_size=1)


def test_classes_out_of_balance_are_named_with_what_balances_them() -> None:
    """5 desirable rows and 3 others weigh 5/3; 3/5 to 4/5, or 5/4 to 5/3, brings that to 1 to 4/3."""
    (said,) = [line for line in trained(KTO(MODEL), VERDICTS) if "desirable" in line]
    assert "5 are desirable and 3 are not" in said
    assert "desirable_weight to 0.6 to 0.8" in said and "undesirable_weight to 1.25 to 1.67" in said


@pytest.mark.parametrize("verdict", [partial(kto, desirable_weight=0.7), partial(kto, undesirable_weight=1.5)])
def test_balanced_classes_are_not_spoken_of(verdict: Any) -> None:
    assert not [line for line in trained(KTO(MODEL, verdict=verdict), VERDICTS) if "desirable" in line]


def test_one_kind_only_is_spoken_of() -> None:
    rows = [{**row, "label": True} for row in VERDICTS]
    (said,) = [line for line in trained(KTO(MODEL), rows) if "desirable" in line]
    assert "only one kind is learned from" in said
