from __future__ import annotations

import copy
import json
import pickle
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from byte_tokenizers import make_tokenizer
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_rl.core.errors import ConfigError, DataError
from lit_rl.core.rollout import PromptBatch
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition

TOKENIZER = make_tokenizer()


def make_rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"question {i}", "answer": str(i)} for i in range(start, start + count)]


def prepared(**arguments: Any) -> RolloutDataModule:
    module = RolloutDataModule(**arguments)
    module.prepare(TOKENIZER)
    return module


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


class Recorder(L.LightningModule):
    """Takes what an algorithm of lit_rl shows to the data module, and remembers every batch."""

    def __init__(self, slots: int = 2, limit: int | None = None, folder: Path | None = None) -> None:
        super().__init__()
        self.tokenizer = TOKENIZER
        self.slots_per_rollout = slots
        self.evaluation = SimpleNamespace(limit=limit)
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[PromptBatch] = []
        self.evaluated: list[tuple[int, PromptBatch]] = []
        self.folder = folder

    def training_step(self, batch: PromptBatch, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch)
        return self.weight.sum() * len(batch)

    def validation_step(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluated.append((dataloader_idx, batch))

    test_step = validation_step

    def predict_step(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> list[int]:
        return list(batch.rows)

    def on_train_end(self) -> None:
        if self.folder is not None:
            steps = [[batch.rollout, batch.slot, *batch.rows] for batch in self.seen]
            (self.folder / f"{self.global_rank}.json").write_text(json.dumps(steps))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(folder: Path, **arguments: Any) -> L.Trainer:
    defaults: dict[str, Any] = dict(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    return L.Trainer(default_root_dir=folder, **{**defaults, **arguments})


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*(num_workers|GPU available|does not have many workers|weights_only).*"
        )
        yield


# What goes in


@pytest.mark.parametrize(
    "rows, message", [([], "no rows"), ([1], r"data\.rows\[0\]"), ({"prompt": "x"}, "list of dicts")]
)
def test_rows_of_another_kind_are_refused(rows, message):
    with pytest.raises(DataError, match=message):
        prepared(rows=rows)


def test_too_few_rows_are_refused_with_the_counts_of_every_filter():
    rows = [*make_rows(30), {"prompt": " "}, {"prompt": "x" * 99}, {"prompt": None}]
    module = RolloutDataModule(rows, prompts_per_rollout=32, max_prompt_tokens=50, on_bad_row="skip", val_fraction=0.1)
    with pytest.raises(DataError, match=r"prompts_per_rollout=32, and 27 rows") as caught:
        module.prepare(TOKENIZER)
    assert "rows 33, bad 1, empty 1, overlong 1, kept 27, longest 99, held_out 3. Add rows, loosen" in str(caught.value)
    module.prepare(TOKENIZER, stage="validate")
    assert module.val_names == [""]


def test_prompts_of_which_none_is_left_are_refused_with_the_counts():
    with pytest.raises(DataError, match=r"No row is left to train on: rows 3, empty 3, kept 0"):
        prepared(rows=[{"prompt": " "}] * 3, val_fraction=0)


def test_a_validation_set_without_rows_is_refused(tmp_path):
    path = write(tmp_path / "val.jsonl", [{"prompt": ""}])
    with pytest.raises(DataError, match=r"validation set val has no rows left: rows 1, empty 1"):
        prepared(rows=make_rows(40), val_path=path)


def test_a_source_that_the_filters_emptied_is_refused(tmp_path):
    long = write(tmp_path / "long.jsonl", [{"prompt": "x" * 99}] * 9)
    short = write(tmp_path / "short.jsonl", make_rows(9))
    with pytest.raises(DataError, match=r"data\.sources\[0\]: the filters left no row"):
        prepared(sources=[{"path": long}, {"path": short}], max_prompt_tokens=50, prompts_per_rollout=4, val_fraction=0)


def answered(row):
    return {"prompt": row["q"]["text"], "right": row["q"]["answer"], "level": row["level"]}


def test_each_source_makes_columns_of_its_own(tmp_path):
    """Its function, then its names, then what it keeps; and after that what holds for all sources."""
    plain = write(tmp_path / "plain.jsonl", make_rows(8))
    rows = [{"q": {"text": f"nested {i}", "answer": str(i)}, "level": i} for i in range(8)]
    nested = write(tmp_path / "nested.jsonl", rows)
    own = {"map_row": answered, "rename": {"right": "answer"}, "columns": ["prompt", "answer"]}
    module = prepared(
        sources=[{"path": plain}, {"path": nested, **own}],
        rename={"answer": "truth"},
        prompts_per_rollout=4,
        val_fraction=0,
    )
    batch = module.peek(16)
    assert batch.prompts == [f"question {i}" for i in range(8)] + [f"nested {i}" for i in range(8)]
    assert batch.columns == {"truth": [str(i) for i in range(8)] * 2}


def test_a_row_that_a_sources_function_cannot_read_is_bad_and_named(tmp_path):
    nested = write(tmp_path / "nested.jsonl", [{"q": {"text": "a", "answer": "1"}, "level": 0}, {"q": 3}] * 4)
    sources = [{"path": nested, "map_row": answered}]
    with pytest.raises(DataError, match=r"nested.jsonl:2: .*map_row=answered raised TypeError"):
        prepared(sources=sources, prompts_per_rollout=4, val_fraction=0)
    counts = prepared(sources=sources, prompts_per_rollout=4, val_fraction=0, on_bad_row="skip").report["train"]
    assert (counts["bad"], counts["kept"]) == (4, 4)


@pytest.mark.parametrize(
    ("own", "error", "message"),
    [
        ({"rename": {"promt": "x"}}, DataError, r"sources\[0\].rename: none of the first 8 rows.*'promt'.*'prompt'"),
        ({"rename": {"prompt": "p"}, "columns": ["prompt"]}, DataError, r"columns: none.*'prompt'; columns found: p"),
        ({"rename": {"answer": "prompt"}}, DataError, r"sources\[0\].rename gives the row two columns named 'prompt'"),
        ({"columns": "prompt"}, ConfigError, r"sources\[0\].columns='prompt' takes a list"),
        ({"rename": ["a"]}, ConfigError, r"sources\[0\].rename=\['a'\] takes a mapping"),
        ({"map_row": "mine.f"}, ConfigError, r"sources\[0\].map_row: there is no module 'mine'"),
    ],
)
def test_columns_of_a_source_that_cannot_be_are_refused(tmp_path, own, error, message):
    path = write(tmp_path / "a.jsonl", make_rows(8))
    with pytest.raises(error, match=message):
        prepared(sources=[{"path": path, **own}], prompts_per_rollout=4, val_fraction=0)


def test_columns_report_and_peek():
    module = prepared(rows=[*make_rows(40), {"prompt": "x", "level": 3}, {"prompt": ""}], val_fraction=0.0)
    assert module.columns == ["answer", "level"]
    assert module.val_names == [] and module.val_columns == {}
    assert module.report["train"]["rows"] == 42 and module.report["train"]["empty"] == 1
    batch = module.peek(2)
    assert batch.prompts == ["question 0", "question 1"]
    assert batch.columns == {"answer": ["0", "1"], "level": [None, None]}
    assert len(module.peek(1000)) == 41
    assert module.longest_prompt == len("question 39")


def test_the_counts_of_several_sources_are_one_sum(tmp_path):
    first = write(tmp_path / "a.jsonl", [{"prompt": "much longer than the others"}, {"prompt": ""}, *make_rows(8)])
    second = write(tmp_path / "b.jsonl", [{"prompt": " "}, *make_rows(8, 20)])
    counts = prepared(sources=[{"path": first}, {"path": second}], prompts_per_rollout=4, val_fraction=0).report[
        "train"
    ]
    assert {key: counts[key] for key in ("rows", "empty", "kept", "longest")} == dict(
        rows=19, empty=2, kept=17, longest=len("much longer than the others")
    )


def test_looking_before_preparing_says_what_to_do():
    module = RolloutDataModule(rows=make_rows(3))
    for look in (lambda: module.columns, lambda: module.peek(1), lambda: module.report, lambda: module.val_names):
        with pytest.raises(ConfigError, match=r"prepare\(tokenizer\)"):
            look()
    with pytest.raises(ConfigError, match="no Trainer"):
        module.setup("fit")


def test_preparing_reads_once_for_a_tokenizer(tmp_path):
    path = write(tmp_path / "a.jsonl", make_rows(40))
    module = prepared(path=path)
    Path(path).unlink()
    module.prepare(TOKENIZER)
    with pytest.raises(DataError, match="no such file"):
        module.prepare(make_tokenizer())


# Validation


@pytest.mark.parametrize("fraction, count", [(0.05, 2), (0.25, 10), (0.001, 1)])
def test_held_out_prompts_are_seeded_and_never_trained_on(fraction, count):
    rows = [*make_rows(40), *make_rows(40)]
    module = prepared(rows=rows, val_fraction=fraction)
    corpus = module.sets
    train, val = set(corpus.train.prompts), set(corpus.val[""].prompts)
    assert len(val) == count and len(corpus.val[""]) == 2 * count, "equal prompts stay together"
    assert not train & val and len(train | val) == 40
    assert module.report["val"]["overlap"] == 0
    again = prepared(rows=rows, val_fraction=fraction).sets
    other = prepared(rows=rows, val_fraction=fraction, seed=1).sets
    assert again.val[""].prompts == corpus.val[""].prompts
    assert fraction < 0.05 or other.val[""].prompts != corpus.val[""].prompts


def test_a_task_brings_its_own_validation():
    module = prepared(task=Addition(max_operand=9, val_rows=20))
    assert module.report["train"]["kept"] == 80 and module.report["val"]["kept"] == 20
    assert prepared(task=Addition(max_operand=9, val_rows=0)).val_names == []


def test_validation_sets_by_path_split_and_name(tmp_path):
    from datasets import Dataset, DatasetDict

    a, b = (write(tmp_path / f"{name}.jsonl", make_rows(3, start)) for name, start in (("a", 100), ("b", 200)))
    assert prepared(rows=make_rows(40), val_path=a).val_names == [""]
    named = prepared(rows=make_rows(40), val_path={"easy": a, "hard": b})
    assert named.val_names == ["easy", "hard"]
    assert named.sets.val["hard"].prompts == ["question 200", "question 201", "question 202"]
    assert named.val_columns == {"easy": ["answer"], "hard": ["answer"]}
    saved = str(tmp_path / "saved")
    splits = {"train": make_rows(40), "test": make_rows(5, 50), "hard": make_rows(6, 60)}
    DatasetDict({name: Dataset.from_list(rows) for name, rows in splits.items()}).save_to_disk(saved)
    assert len(prepared(path=saved, split="train", val_split="test").sets.val[""]) == 5
    both = prepared(path=saved, split="train", val_split={"easy": "test", "hard": "hard"})
    assert {name: len(rows) for name, rows in both.sets.val.items()} == {"easy": 5, "hard": 6}
    other = prepared(rows=make_rows(40), val_path=saved, val_split="hard")
    assert len(other.sets.val[""]) == 6
    assert other.report["train"]["held_out"] == 0


def test_overlap_is_counted_and_warned_of(tmp_path):
    path = write(tmp_path / "val.jsonl", [*make_rows(3), *make_rows(4, 100)])
    with pytest.warns(UserWarning, match="3 of 7 rows of val have a training prompt"):
        module = prepared(rows=make_rows(40), val_path=path)
    assert module.report["val"]["overlap"] == 3


# With a Trainer


def test_resuming_on_other_data_is_refused(tmp_path):
    keep = ModelCheckpoint(tmp_path, "last", every_n_train_steps=1)
    small = RolloutDataModule(rows=make_rows(17), prompts_per_rollout=5, val_fraction=0)
    trainer(tmp_path, callbacks=[keep], enable_checkpointing=True, max_steps=2).fit(Recorder(), datamodule=small)
    other: dict[str, Any] = dict(rows=make_rows(18), prompts_per_rollout=5, val_fraction=0)
    causes: dict[str, dict[str, Any]] = {
        "the rows themselves, 17 -> 18 of them": other,
        "data.system_prompt changed": {"rows": make_rows(17), "system_prompt": "Be brief."},
        "data.map_row changed": {"rows": make_rows(17), "map_row": lambda row: {**row, "prompt": row["prompt"] + "!"}},
        "data.val_fraction 0 -> 0.2": {"rows": make_rows(17), "val_fraction": 0.2},
    }
    for cause, settings in causes.items():
        changed = RolloutDataModule(**{"prompts_per_rollout": 5, "val_fraction": 0, **settings})
        with pytest.raises(DataError, match=r"data\.allow_changed=true") as caught:
            trainer(tmp_path).fit(Recorder(), datamodule=changed, ckpt_path=tmp_path / "last.ckpt")
        assert f"not the checkpoint's: {cause}. So" in str(caught.value)
    allowed = Recorder()
    module = RolloutDataModule(**other, allow_changed=True)
    trainer(tmp_path).fit(allowed, datamodule=module, ckpt_path=tmp_path / "last.ckpt")
    assert len(allowed.seen) == 10


def test_overfitting_repeats_the_same_first_rows(tmp_path):
    module = RolloutDataModule(rows=make_rows(40), prompts_per_rollout=4, val_fraction=0.2)
    recorder = Recorder(slots=2)
    trainer(tmp_path, overfit_batches=4, max_epochs=3).fit(recorder, datamodule=module)
    assert [batch.rows for batch in recorder.seen] == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]] * 3


def test_loaders_made_anew_each_epoch_still_go_through_the_epochs(tmp_path):
    module = RolloutDataModule(rows=make_rows(12), prompts_per_rollout=4, val_fraction=0)
    once, anew = Recorder(), Recorder()
    trainer(tmp_path).fit(once, datamodule=module)
    trainer(tmp_path, reload_dataloaders_every_n_epochs=1).fit(anew, datamodule=module)
    assert anew.seen == once.seen


def test_every_loop_gets_every_validation_set_up_to_the_limit(tmp_path):
    a, b = (write(tmp_path / f"{n}.jsonl", make_rows(7, start)) for n, start in (("a", 100), ("b", 200)))
    module = RolloutDataModule(rows=make_rows(40), val_path={"a": a, "b": b}, val_batch_size=3)
    recorder = Recorder(limit=5)
    runner = trainer(tmp_path)
    runner.validate(recorder, datamodule=module)
    expected = [(0, [0, 1, 2]), (0, [3, 4]), (1, [0, 1, 2]), (1, [3, 4])]
    assert [(index, batch.rows) for index, batch in recorder.evaluated] == expected
    assert recorder.evaluated[2][1].prompts == ["question 200", "question 201", "question 202"]
    recorder.evaluated.clear()
    runner.test(recorder, datamodule=module)
    assert [(index, batch.rows) for index, batch in recorder.evaluated] == expected
    assert runner.predict(recorder, datamodule=module) == [[[0, 1, 2], [3, 4]]] * 2


def test_fit_validates_where_there_is_a_set_and_runs_where_there_is_none(tmp_path):
    for fraction, batches in ((0.2, 1), (0.0, 0)):
        recorder = Recorder()
        module = RolloutDataModule(rows=make_rows(40), val_fraction=fraction, prompts_per_rollout=8)
        trainer(tmp_path, max_epochs=1).fit(recorder, datamodule=module)
        assert (len(recorder.evaluated), len(recorder.seen)) == (batches, 2 * (32 if fraction else 40) // 8)


def test_a_module_of_another_kind_is_told_what_is_missing(tmp_path):
    class Plain(Recorder):
        def __init__(self) -> None:
            super().__init__()
            del self.slots_per_rollout

    with pytest.raises(ConfigError, match="Plain has no attribute 'slots_per_rollout'"):
        trainer(tmp_path).fit(Plain(), datamodule=RolloutDataModule(rows=make_rows(40)))


def test_it_can_be_copied_pickled_and_printed():
    module = prepared(rows=make_rows(40), map_row=dict)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert copied.peek(3) == module.peek(3)
    assert "Train dataloader" in str(RolloutDataModule(rows=make_rows(40)))


def test_the_command_line_builds_it_from_its_signature(tmp_path):
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_class_arguments(RolloutDataModule, "data")
    path = write(tmp_path / "a.jsonl", [{"question": "1+1?", "answer": "#### 2"}] * 40)
    arguments = [f"--data.path={path}", "--data.map_row=lit_rl.data.recipes.gsm8k", "--data.val_path.x", path]
    built = parser.instantiate(parser.parse_args([*arguments, "--data.overlong=error"]))
    module = built.data
    assert isinstance(module, RolloutDataModule)
    with pytest.warns(UserWarning, match="40 of 40"):
        module.prepare(TOKENIZER)
    assert module.options.overlong == "error" and module.val_names == ["x"] and module.columns == ["answer"]
    shown = parser.format_help()
    assert "Prompts of one rollout, all ranks together." in shown and "{drop,truncate_left,error}" in shown


@pytest.mark.dist
def test_two_processes_share_each_rollout(tmp_path):
    module = RolloutDataModule(rows=make_rows(40), prompts_per_rollout=8, val_fraction=0.2)
    alone = Recorder(folder=tmp_path)
    trainer(tmp_path).fit(alone, datamodule=module)
    expected = json.loads((tmp_path / "0.json").read_text())
    runner = trainer(tmp_path, devices=2, strategy="ddp_fork")
    runner.fit(Recorder(folder=tmp_path), datamodule=module)
    parts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [[*left, *right[2:]] for left, right in zip(*parts)] == expected
