"""Process reward modelling: the loss by hand, the laws of its step, and an export that scores steps as trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from small_rollouts import trainer as quiet_trainer

from lit_rl.algorithms import AdamW, Constant, ProcessRewardModeling
from lit_rl.core.errors import ConfigError
from lit_rl.core.examples import Totals
from lit_rl.data.example_module import StepwiseDataModule
from lit_rl.data.tasks import AdditionSteps
from lit_rl.models import LanguageModel
from lit_rl.models.sharding import full_state_dict
from lit_rl.rewards import ProcessRewardModel

MODEL = LanguageModel("tiny")
ROWS = [
    {"prompt": "17+25=", "completions": ["7+5=12", "1+2+1=4"], "labels": [True, True]},
    {"prompt": "3+4=", "completions": ["3+4=8"], "labels": [False]},
    {"prompt": "50+13=", "completions": ["0+3=3", "5+1=7", "nothing more"], "labels": [True, False, False]},
    {"prompt": "1+1=", "completions": ["1+1=2"], "labels": [True]},
]


def data_of(rows: Any = ROWS, **settings: Any) -> StepwiseDataModule:
    data = StepwiseDataModule(rows=rows, batch_size=len(rows), shuffle=False, val_fraction=0.0, **settings)
    data.prepare(MODEL.tokenizer, "stepwise")
    return data


def batch_of(part: slice = slice(None), shares: int = 1, **settings: Any) -> Any:
    train, every = data_of(**settings).corpus.train, list(range(len(ROWS)))
    return train.batch(every[part], every[part], train.totals(every, shares), step=0, slot=0)


def trainer_of(folder: Path, steps: int) -> L.Trainer:
    return quiet_trainer(folder, max_steps=steps, num_sanity_val_steps=0, limit_val_batches=1.0)


@pytest.fixture(scope="module")
def module() -> ProcessRewardModeling:
    made = ProcessRewardModeling(MODEL)
    made.configure_model()
    torch.nn.init.normal_(made.policy.score.weight, std=0.5, generator=torch.Generator().manual_seed(1))
    return made


def test_the_loss_is_the_cross_entropy_at_the_separators(module: ProcessRewardModeling) -> None:
    batch = batch_of()
    logits = module.logits(batch.tokens)
    losses, right = [], 0
    for i, row in enumerate(ROWS):
        place = len(row["prompt"])  # a byte is a token
        for step, label in zip(row["completions"], row["labels"]):
            place += len(step) + 1
            assert bool(batch.tokens.loss_mask[i, place - 1])
            losses.append(-logits[i, place - 1].log_softmax(-1)[int(label)])
            right += int(logits[i, place - 1].argmax()) == int(label)
    loss, metrics = module.loss(batch)
    assert len(losses) == batch.totals.tokens == 7
    torch.testing.assert_close(loss, torch.stack(losses).mean())
    assert [float(part) for part in metrics["accuracy"]] == [right, 7]  # pyright: ignore
    labels = batch.labels.long().masked_fill(
        ~batch.tokens.loss_mask, -100
    )  # as transformers' token classifiers take it
    torch.testing.assert_close(torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels), loss)


def test_the_last_step_only(module: ProcessRewardModeling) -> None:
    batch = batch_of(last_step_only=True)
    assert batch.tokens.loss_mask.sum(1).tolist() == [1, 1, 1, 1]
    assert batch.labels[batch.tokens.loss_mask].tolist() == [1.0, 0.0, 0.0, 1.0]
    logits, mask = module.step_logits(batch), batch.tokens.loss_mask
    wanted = -torch.nn.functional.logsigmoid(logits[mask] * torch.tensor([1.0, -1.0, -1.0, 1.0])).mean()
    torch.testing.assert_close(module.loss(batch)[0], wanted)


def test_what_follows_a_step_does_not_change_it(module: ProcessRewardModeling) -> None:
    batch = batch_of(slice(2, 3))
    cut = batch.to("cpu")
    first = int(batch.tokens.loss_mask[0].nonzero()[0])
    cut.tokens.input_ids = batch.tokens.input_ids.clone()
    cut.tokens.input_ids[0, first + 1 :] = 7
    one, other = module.step_logits(batch)[0, first], module.step_logits(cut)[0, first]
    torch.testing.assert_close(one, other)
    assert isinstance(batch.totals, Totals)


def test_it_learns_and_its_export_scores_steps_as_trained(tmp_path: Path) -> None:
    """Wrong steps say `?` here: a rule that a small model finds in a test's time, at the place of each step."""

    def marked(row: dict[str, Any]) -> dict[str, Any]:
        flags = zip(row["completions"], row["labels"])
        return {**row, "completions": [step if right else step.rpartition("=")[0] + "=?" for step, right in flags]}

    task = AdditionSteps(val_rows=64)
    data = StepwiseDataModule(task=task, batch_size=16, val_batch_size=64, map_row=marked)
    model = LanguageModel("tiny")
    made = ProcessRewardModeling(model, optimizer=AdamW(lr=1e-3), scheduler=Constant())
    trainer = trainer_of(tmp_path, 40)
    trainer.fit(made, datamodule=data)
    trainer.validate(made, datamodule=data, verbose=False)
    assert float(trainer.callback_metrics["val/accuracy"]) > 0.9
    tables: Any = trainer.predict(made, datamodule=data)
    trained = [values for table in tables for values in table["right"]]
    made.export(full_state_dict(made.policy), tmp_path / "hf", {"base_model": "tiny", "algorithm": "x"})
    rows = [marked(row) for row in task.val()]
    texts = ["\n".join(row["completions"]) for row in rows]
    spans = ProcessRewardModel(str(tmp_path / "hf"), aggregate="spans")([row["prompt"] for row in rows], texts)
    for found, wanted in zip(spans, trained, strict=True):
        assert [span[2] for span in found or ()] == pytest.approx(wanted, abs=1e-6)  # pyright: ignore
    with pytest.raises(ConfigError, match="was trained with"):
        ProcessRewardModel(str(tmp_path / "hf"), separator=". ").load()


def test_the_shipped_steps_are_right_where_they_say_so() -> None:
    for row in AdditionSteps(val_rows=0).train()[:500]:
        so_far = True
        for step, label in zip(row["completions"], row["labels"], strict=True):
            sums, _, result = step.rpartition("=")
            so_far = so_far and sum(map(int, sums.split("+"))) == int(result)
            assert label == so_far
