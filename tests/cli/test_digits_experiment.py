"""The experiment over the digits that come with the package, on the command line."""

from __future__ import annotations

import csv
import json
from typing import Any

import pytest
from cli_helpers import Command

from lit_rl.data.example_module import SupervisedDataModule
from lit_rl.data.tasks import Digits
from lit_rl.models import LanguageModel

pytestmark = pytest.mark.all


def test_it_trains_exports_and_goes_on_from_its_export(command: Command, cwd):
    """And its rollout is replayed over pixels that are made again; not over those of other data."""

    def train(name: str, *arguments: str) -> dict[str, Any]:
        small = ["trainer.max_steps=2", "data.task.val_rows=20", "data.prompts_per_rollout=8", "logger=csv"]
        told = command("experiment=vl_digits", f"run_dir={cwd / name}", "trainer.accelerator=cpu", *small, *arguments)
        assert told.code == 0, told.out + told.err
        return json.loads((cwd / name / "summary.json").read_text())

    first = train("first", "callbacks.checkpoint.every_n_train_steps=1", "callbacks.checkpoint.save_top_k=-1")
    folder = cwd / "first"
    assert first["status"] == "finished" and set(first["before"][""]) == {"greedy", "sampled at 1"}
    assert (folder / "hf" / "processor_config.json").is_file()
    with (folder / "csv" / "samples.csv").open(newline="") as file:
        assert {row["step"] for row in csv.DictReader(file)} == {"0", "1"}, "loggers have the last rollout too"
    second = train("second", f"model.name={folder / 'hf'}", "seed=1", "trainer.max_steps=1")
    assert second["before"][""]["greedy"] == first["after"][""]["greedy"]
    replay = ["replay", f"run_dir={folder}", "replay.losses=[run,gspo]"]
    told = command(*replay, f"ckpt_path={folder / 'checkpoints' / 'step_00000001.ckpt'}")
    assert told.code == 0, told.out + told.err
    (report,) = folder.glob("replay_*.json")
    own = json.loads(report.read_text())["objectives"][0]
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (norm,) = [row["train/grad_norm"] for row in logged if row["step"] == 2 and "train/grad_norm" in row]
    assert own["gradient_norm"] == pytest.approx(norm, rel=1e-4) and norm > 0
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("val_rows: 20", "val_rows: 19"))
    refused = command(*replay)
    assert refused.code == 2 and "would see other images" in refused.err, refused.err


def test_a_reward_that_reads_text_is_refused_before_the_first_rollout(command: Command, cwd):
    told = command(
        "experiment=vl_digits",
        "reward=judge",
        "reward.functions.judge.base_url=http://127.0.0.1:9",
        "reward.functions.judge.model=m",
        "reward.functions.judge.rubric=helpful",
        f"run_dir={cwd / 'run'}",
    )
    assert told.code == 4 and "reward=judge reads text alone, and row 0 of the prompts shows" in told.err, told.err


def test_the_best_of_several_are_texts_again(command: Command, cwd):
    few = ["data.task.val_rows=8", "eval.group_size=4", "trainer.accelerator=cpu", f"run_dir={cwd / 'run'}"]
    told = command("best-of-n", "experiment=vl_digits", "logger=none", *few)
    assert told.code == 0, told.err
    (path,) = (cwd / "run").glob("best_of_n_*/best_of_n.jsonl")
    model, data = LanguageModel("digits"), SupervisedDataModule(path=str(path), batch_size=2, val_fraction=0.0)
    data.prepare(model.tokenizer, processor=model.processor)
    seen = [example.shown.visuals[0].read() for example in data.corpus.train.examples if example.shown]
    assert seen and set(seen) <= {row["image"] for row in Digits(val_rows=8).val()}
    assert len(set(seen)) == data.report["train"]["kept"] == len(path.read_text().splitlines())
