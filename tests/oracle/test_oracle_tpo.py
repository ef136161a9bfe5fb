"""TPO and TPO-L against TRL 1.16: every loss and option, of all weights and of adapters, and every metric.

TRL's likelihood is a mean over the gold tokens of a micro-batch, ours over those of the whole step: one batch is the
whole step here, so they agree.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from oracle_cases import Outcome, assert_same_step, backward
from oracle_pairs import ROWS, make_trainer
from oracle_verdicts import trained

from lit_rl.algorithms import TPO
from lit_rl.core.examples import PairBatch, TokenBatch, Totals
from lit_rl.models import LanguageModel
from lit_rl.ops import preference_losses

GOLD = [" answer, in full", " yes", "b", "four"]
TRIPLES = [{**row, "reference": gold} for row, gold in zip(ROWS, GOLD)]
BASE: dict[str, Any] = {
    "loss_type": "sigmoid",
    "beta": 0.01,
    "label_smoothing": 0.0,
    "tpo_alpha": 1.0,
    "tpo_l_gamma": 0.5,
}


@pytest.fixture(scope="module", params=["full", "lora"])
def trl(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from trl.experimental.tpo import TPOConfig, TPOTrainer

    folder = tmp_path_factory.mktemp(request.param)
    return make_trainer(TPOTrainer, TPOConfig, folder, lora=request.param == "lora", rows=TRIPLES)


def our_module(trl: dict[str, Any]) -> TPO:
    """The module that TRL's settings are."""
    name = "simpo" if trl["loss_type"] == "tpo-l" else trl["loss_type"]
    smooth = {"label_smoothing": trl["label_smoothing"]} if name in ("sigmoid", "simpo") else {}
    gamma = {"gamma": trl["tpo_l_gamma"]} if name == "simpo" else {}
    loss = partial(getattr(preference_losses, name), **smooth, **gamma)
    return TPO(LanguageModel("tiny"), beta=trl["beta"], preference=loss, nll_coef=trl["tpo_alpha"])


def assert_same(trainer: Any, **settings: Any) -> None:
    """TRL's loss of one batch, its gradient, and what it logs, are ours of the same tensors."""
    merged = BASE | settings
    for name, value in merged.items():
        setattr(trainer, name, value)
    inputs = trainer.data_collator([trainer.train_dataset[i] for i in range(len(TRIPLES))])
    trainer._metrics["train"].clear()
    trainer.model.train()
    theirs = backward(trained(trainer.model), [trainer.compute_loss(trainer.model, inputs)])
    logged = {name: values[0] for name, values in trainer._metrics["train"].items() if name != "num_tokens"}

    attended, learned = inputs["attention_mask"].bool(), inputs["completion_mask"].bool()
    count = len(TRIPLES)
    totals = Totals(rows=count, tokens=int(learned[2 * count :].sum()), attended=int(attended.sum()))
    module = our_module(merged)
    module.policy = trainer.model
    loss, metrics = module.loss(
        PairBatch(TokenBatch(inputs["input_ids"], attended, learned), list(range(count)), totals)
    )
    ours: Outcome = backward(trained(trainer.model), [loss])
    assert_same_step(ours, theirs)
    assert len(logged) == 10
    for name, value in logged.items():
        top, bottom = metrics[name]  # pyright: ignore
        assert float((top / bottom).detach()) == pytest.approx(value, rel=1e-5, abs=1e-6), name
    with torch.no_grad():
        gold, at = slice(2 * count, None), learned[2 * count :, 1:]
        logits = trainer.model(inputs["input_ids"][gold], attention_mask=inputs["attention_mask"][gold]).logits
        expected = torch.nn.functional.cross_entropy(logits[:, :-1][at], inputs["input_ids"][gold, 1:][at])
    assert float((metrics["nll_loss"][0] / metrics["nll_loss"][1]).detach()) == pytest.approx(float(expected), rel=1e-5)  # pyright: ignore


@pytest.mark.parametrize("alpha", [1.0, 0.3])
@pytest.mark.parametrize("beta", [0.01, 2.0])
@pytest.mark.parametrize("name", ["sigmoid", "hinge", "ipo", "tpo-l"])
def test_every_loss(trl: Any, name: str, alpha: float, beta: float) -> None:
    assert_same(trl, loss_type=name, tpo_alpha=alpha, beta=beta)


@pytest.mark.parametrize("name", ["sigmoid", "tpo-l"])
def test_label_smoothing(trl: Any, name: str) -> None:
    assert_same(trl, loss_type=name, label_smoothing=0.2, beta=1.0)


@pytest.mark.parametrize("gamma", [0.0, 1.6])
def test_margin(trl: Any, gamma: float) -> None:
    assert_same(trl, loss_type="tpo-l", tpo_l_gamma=gamma, beta=2.5)


def test_the_rows_become_the_same_tokens(trl: Any) -> None:
    from lit_rl.data.example_module import PreferenceDataModule

    data = PreferenceDataModule(rows=TRIPLES, batch_size=4, shuffle=False, val_fraction=0.0)
    data.prepare(trl.processing_class, "triples")
    for example, row in zip(data.corpus.train.examples, trl.train_dataset):
        for text, side in zip(example.texts, ("chosen", "rejected", "reference"), strict=True):
            assert text.ids == [*row["prompt_ids"], *row[f"{side}_ids"]], side
            assert text.learned == [False] * len(row["prompt_ids"]) + [True] * len(row[f"{side}_ids"]), side
