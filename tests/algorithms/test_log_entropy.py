"""Entropies are computed for what reads them: a term, or the metric, which `log_entropy` leaves out."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from offline_cuts import MODEL, PAIRS, VERDICTS, data_of, loaded, step_of
from small_rollouts import trainer

from lit_rl.algorithms import DPO, GKD, GRPO, KTO, SFT, NashMD
from lit_rl.algorithms.terms.regularizers import FixedEntropy
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import SupervisedDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.models import head
from lit_rl.ops import selection


@pytest.fixture
def passes(monkeypatch) -> list[tuple[bool, bool]]:
    """Of each pass through a head: whether it has a gradient, and whether it was asked for entropies."""
    seen: list[tuple[bool, bool]] = []
    real = head.linear_logprobs

    def watched(hidden, weight, ids, distribution, **how):
        seen.append((torch.is_grad_enabled(), distribution.entropy))
        return real(hidden, weight, ids, distribution, **how)

    monkeypatch.setattr(head, "linear_logprobs", watched)
    return seen


def by_characters(completions: list[str]) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


def fitted(tmp_path: Any, method: Any, log_entropy: bool, **settings: Any) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Metrics and weights after one rollout of two optimizer steps."""
    module = method(
        "tiny", by_characters, minibatches=2, sampling=Sampling(max_new_tokens=4), log_entropy=log_entropy, **settings
    )
    data = RolloutDataModule(task=Addition(max_operand=30, val_rows=4), prompts_per_rollout=4)
    run = trainer(tmp_path, max_steps=2)
    run.fit(module, datamodule=data)
    return dict(run.callback_metrics), [weight.detach().clone() for weight in module.policy.parameters()]


@pytest.mark.parametrize(
    "method",
    [partial(GRPO, group_size=4, beta=0.1), partial(NashMD, group_size=2)],
    ids=["grpo", "nash_md"],
)
def test_on_policy_methods_learn_the_same_without_the_metric_and_no_reference_is_asked(tmp_path, passes, method):
    weights = {}
    for log_entropy in (True, False):
        passes.clear()
        metrics, weights[log_entropy] = fitted(tmp_path / str(log_entropy), method, log_entropy)
        assert {entropy for gradient, entropy in passes if gradient} == {log_entropy}
        assert {entropy for gradient, entropy in passes if not gradient} == {False}
        assert ("train/entropy" in metrics) == log_entropy
    assert all(torch.equal(one, other) for one, other in zip(*weights.values(), strict=True))


@pytest.mark.parametrize(
    "term",
    [{"entropy": FixedEntropy(0.01)}, {"selection": selection.top_entropy_per_sequence}],
    ids=["bonus", "chosen"],
)
def test_where_a_term_reads_entropies_they_are_logged_all_the_same(tmp_path, passes, term):
    metrics, _ = fitted(tmp_path, partial(GRPO, group_size=4, **term), False)
    assert "train/entropy" in metrics
    assert all(entropy for gradient, entropy in passes if gradient)


def texts() -> SupervisedDataModule:
    rows = [{name: row[name] for name in ("prompt", "completion")} for row in VERDICTS]
    data = SupervisedDataModule(rows=rows, batch_size=len(rows), shuffle=False, val_fraction=0.0)
    data.prepare(MODEL.tokenizer, "texts")
    return data


@pytest.mark.parametrize(
    ("method", "data", "left_out"),
    [
        (DPO, partial(data_of, PAIRS, "pairs"), {"entropy"}),
        (KTO, partial(data_of, VERDICTS, "verdicts"), {"entropy"}),
        (SFT, texts, {"entropy"}),
        (partial(GKD, teacher="tiny", on_policy_fraction=0.0), texts, {"entropy", "teacher/entropy"}),
    ],
    ids=["dpo", "kto", "sft", "gkd"],
)
def test_methods_of_data_sets_learn_the_same_without_the_metric(passes, method, data, left_out):
    steps = {}
    for log_entropy in (True, False):
        passes.clear()
        steps[log_entropy] = step_of(loaded(method(MODEL, log_entropy=log_entropy)), data())
        assert {entropy for gradient, entropy in passes if gradient} <= {log_entropy}
        assert {entropy for gradient, entropy in passes if not gradient} <= {False}
    with_it, without = steps.values()
    assert with_it.loss == without.loss and torch.equal(with_it.gradient, without.gradient)
    assert with_it.metrics.keys() - without.metrics.keys() == left_out
    assert all(with_it.metrics[name] == pytest.approx(value, nan_ok=True) for name, value in without.metrics.items())
