"""Data modules take data sets of `datasets`, and rewards take classifiers that are loaded already."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from typing import Any

import datasets
import lightning as L
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from lit_rl import (
    GRPO,
    SFT,
    Constant,
    PreferenceDataModule,
    RewardModel,
    Rewards,
    RolloutDataModule,
    Sampling,
    SupervisedDataModule,
    exact_match,
)
from lit_rl.core import progress_bar
from lit_rl.core.errors import ConfigError, DataError, RewardError
from lit_rl.data import sources
from lit_rl.rewards import ProcessRewardModel

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
TEXTS = [{"prompt": row["prompt"], "completion": row["answer"]} for row in ROWS]
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "accelerator": "cpu",
}


@pytest.fixture(scope="module")
def tokenizer(tiny_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_dir)


def test_a_data_set_is_its_rows(tokenizer: Any) -> None:
    held = datasets.Dataset.from_list(ROWS)
    forms = [ROWS, held, held.to_iterable_dataset(), datasets.IterableDataset.from_generator(lambda: iter(ROWS))]
    made = []
    for rows in forms:
        data = RolloutDataModule(rows, val=held.select(range(3)), prompts_per_rollout=4)
        data.prepare(tokenizer)
        assert data.report["val"]["kept"] == 3 and data.report["train"]["kept"] == 8 and data.columns == ["answer"]
        made.append(data.fingerprint)
    assert len(set(made)) == 1


def test_validation_rows_by_name(tokenizer: Any) -> None:
    data = RolloutDataModule(ROWS, val=datasets.DatasetDict(easy=datasets.Dataset.from_list(ROWS[:2])))
    data.prepare(tokenizer, stage="predict")
    assert data.val_names == ["easy"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)), r"DatasetDict with the splits train: give one"),
        (datasets.Dataset.from_list([]), r"data\.rows: no rows"),
        (torch.utils.data.TensorDataset(torch.ones(2)), r"is a TensorDataset; it takes a list of dicts, or a data set"),
    ],
)
def test_what_are_no_rows(rows: Any, message: str, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=message):
        RolloutDataModule(rows).prepare(tokenizer)


def test_a_run_of_a_stream_is_the_run_of_its_file(tmp_path: Path) -> None:
    """Read as the rows are needed, and resumed where it was."""
    (tmp_path / "texts.jsonl").write_text(
        "\n".join(f'{{"prompt": "{r["prompt"]}", "completion": "{r["completion"]}"}}' for r in TEXTS)
    )

    def run(steps: int, resume: Path | None = None, **source: Any) -> Any:
        module = SFT("tiny", scheduler=Constant())
        data = SupervisedDataModule(**source, stream_buffer=4, batch_size=2, max_length=64, val_fraction=0)
        trainer = L.Trainer(max_steps=steps, use_distributed_sampler=False, default_root_dir=tmp_path, **QUIET)
        trainer.fit(module, datamodule=data, ckpt_path=resume)
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return module.policy.state_dict()

    def stream() -> Any:
        return datasets.Dataset.from_list(TEXTS).to_iterable_dataset()

    whole = run(5, rows=stream())
    by_file = run(5, path=str(tmp_path / "texts.jsonl"))
    assert all(torch.equal(tensor, whole[name]) for name, tensor in by_file.items())
    run(3, rows=stream())
    resumed = run(5, tmp_path / "3.ckpt", rows=stream())
    assert all(torch.equal(tensor, whole[name]) for name, tensor in resumed.items())


def test_who_waits_for_the_end_of_a_stream_is_told_how_to_cut_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sources, "MANY", 100)
    monkeypatch.setattr(progress_bar, "PROGRESS_DELAY", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    endless = datasets.IterableDataset.from_generator(lambda: ({"prompt": f"{n}+1="} for n in itertools.count()))
    with caplog.at_level("INFO"):
        assert len(sources.rows_of_object("data.rows", endless.take(99))) == 99 and not caplog.messages
        assert len(sources.rows_of_object("data.rows", endless.take(450))) == 450
    told = [said for said in caplog.messages if "take(N)" in said]
    assert [re.findall(r"data\.rows: (\d+) rows so far", said) for said in told] == [["100"], ["200"], ["400"]]
    assert re.search(r"reading the stream data\.rows: 0row .*row/s", capsys.readouterr().err)


def test_pairs_as_a_data_set(tokenizer: Any) -> None:
    pairs = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "x"} for row in ROWS]
    data = PreferenceDataModule(datasets.Dataset.from_list(pairs), batch_size=2, val=pairs[:2])
    data.prepare(tokenizer)
    assert data.report["train"]["kept"] == 8 and data.report["val"]["kept"] == 2


def test_a_step_takes_what_a_small_set_has(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    prompts, texts = RolloutDataModule(datasets.Dataset.from_list(ROWS)), SupervisedDataModule(TEXTS)
    with caplog.at_level("INFO"):
        for _ in range(2):
            prompts.prepare(tokenizer)
            texts.prepare(tokenizer)
    assert (prompts.prompts_per_rollout, texts.batch_size) == (7, 7)
    assert sum("=7, in place of the default 32: 7 rows are left for training" in said for said in caplog.messages) == 2
    many = RolloutDataModule([{"prompt": f"{n}+1="} for n in range(40)])
    many.prepare(tokenizer)
    assert many.prompts_per_rollout == 32
    with pytest.raises(DataError, match=r"7 rows .* lower data\.batch_size to 7"):
        SupervisedDataModule(TEXTS, batch_size=32).prepare(tokenizer)


def test_a_size_that_is_set_later_stays(tokenizer: Any) -> None:
    """As Lightning's tuner of batch sizes sets it."""
    data = SupervisedDataModule([{"prompt": f"{n}+1=", "completion": f"{n + 1}"} for n in range(9)], val_fraction=0)
    data.prepare(tokenizer)
    assert data.batch_size == 9
    data.batch_size = 4
    data.prepare(tokenizer)
    assert data.batch_size == 4


def test_rows_of_equal_prompts_that_are_held_out_together_are_named(tokenizer: Any) -> None:
    equal = (
        r"held_out 4\. Rows of equal prompts are held out together, or none of them is.*val_fraction=0 \(4 rows are\)"
    )
    with pytest.raises(DataError, match=equal):
        RolloutDataModule([{"prompt": f"{n % 2}+1="} for n in range(8)], prompts_per_rollout=8).prepare(tokenizer)
    pairs = [{"prompt": f"{n % 2}+1=", "chosen": "2", "rejected": "3"} for n in range(8)]
    with pytest.raises(DataError, match=equal):
        PreferenceDataModule(pairs, batch_size=8).prepare(tokenizer)
    with pytest.raises(DataError, match=r"held_out 1\. [^R]"):
        RolloutDataModule([{"prompt": "1+1="}, {"prompt": "2+2="}], prompts_per_rollout=2).prepare(tokenizer)


def test_a_single_row_is_trained_on_and_the_hint_for_a_larger_step_works(tokenizer: Any) -> None:
    data = RolloutDataModule(ROWS[:1])
    data.prepare(tokenizer)
    assert (data.prompts_per_rollout, data.report["train"]["held_out"], data.val_names) == (1, 0, [])
    with pytest.raises(DataError, match=r"lower data\.prompts_per_rollout to 1 "):
        RolloutDataModule(ROWS[:1], prompts_per_rollout=2).prepare(tokenizer)
    RolloutDataModule(ROWS[:1], prompts_per_rollout=1, val_fraction=0).prepare(tokenizer)


def test_a_small_set_divides_into_the_steps_of_the_trainer(tmp_path: Path) -> None:
    module = GRPO("tiny", exact_match, group_size=2, minibatches=2, sampling=Sampling(max_new_tokens=2))
    data = RolloutDataModule(ROWS)
    trainer = L.Trainer(max_steps=1, default_root_dir=tmp_path, limit_val_batches=0, **QUIET)
    trainer.fit(module, datamodule=data)
    assert data.prompts_per_rollout == 6 and trainer.global_step == 1


@pytest.fixture(scope="module")
def classifier(tiny_dir: Path) -> Any:
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_pretrained(tiny_dir, num_labels=1)


def test_a_classifier_is_a_reward(classifier: Any, tokenizer: Any, tmp_path: Path) -> None:
    classifier.save_pretrained(tmp_path / "rm")
    tokenizer.save_pretrained(tmp_path / "rm")
    classifier.train()
    by_object, by_path = RewardModel(classifier, tokenizer=tokenizer), RewardModel(str(tmp_path / "rm"))
    asked = {"prompts": ["1+1=", "2+2=", "3+3="], "completions": ["2", "five", ""]}
    assert by_object(**asked) == by_path(**asked)
    assert all(weight.requires_grad for weight in classifier.parameters())  # nothing of it was changed
    module = GRPO("tiny", Rewards([by_object, exact_match]), group_size=2, sampling=Sampling(max_new_tokens=2))
    data = RolloutDataModule(datasets.Dataset.from_list(ROWS), prompts_per_rollout=2, val_fraction=0)
    before = {name: tensor.clone() for name, tensor in classifier.state_dict().items()}
    trainer = L.Trainer(max_steps=1, default_root_dir=tmp_path, **QUIET)
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == 1
    assert all(torch.equal(tensor, classifier.state_dict()[name]) for name, tensor in before.items())


def test_what_is_no_reward_model_says_what_to_pass(classifier: Any, tokenizer: Any, tiny_dir: Path) -> None:
    language_model = AutoModelForCausalLM.from_pretrained(tiny_dir)
    with pytest.raises(RewardError, match=r"PyTorch module .*lit_rl\.rewards\.RewardModel"):
        GRPO("tiny", classifier)
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (classifier, {}, r"loaded already, and no tokenizer: pass tokenizer="),
        (language_model, {"tokenizer": tokenizer}, r"RewardModel got a Qwen2ForCausalLM\. It takes a folder"),
        ("tiny", {"tokenizer": tokenizer}, r"tokenizer belongs to a model that is loaded already"),
        (
            classifier,
            {"tokenizer": tokenizer, "dtype": "bfloat16"},
            r"revision, dtype and init_kwargs apply to loading",
        ),
        (classifier, {"tokenizer": tokenizer, "init_kwargs": {"x": 1}}, r"apply to loading"),
    ]
    for given, settings, message in refused:
        with pytest.raises(ConfigError, match=message):
            RewardModel(given, **settings)
    with pytest.raises(ConfigError, match=r"ProcessRewardModel got a Qwen2ForSequenceClassification"):
        ProcessRewardModel(classifier, tokenizer=tokenizer)
