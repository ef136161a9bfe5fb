"""A resumed run equals the uninterrupted one bit for bit, from any optimizer step."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from runs_helpers import SMALL, assert_same_run, interrupted, newest, rows

EVERY_STEP = ["callbacks.checkpoint.every_n_train_steps=1", "callbacks.checkpoint.save_top_k=-1"]
SHAPES = {
    # one rollout a step; 8 rollouts an epoch, so step 8 is an epoch's last batch
    "on-policy": [],
    # 4 optimizer steps a rollout, each of 2 micro-batches; checkpoints fall inside rollouts
    "mid-rollout": [
        "algo.minibatches=2",
        "algo.iterations=2",
        "trainer.accumulate_grad_batches=2",
        "algo.beta=0.1",
        "data.task.max_operand=3",
        "callbacks.token_samples.every=1",
    ],
    # dropout draws from the global generator
    "dropout": ["+model.init_kwargs.attention_dropout=0.1", "algo.minibatches=2"],
    "rloo": ["algo=rloo", "algo.minibatches=2", "scheduler=cosine"],
    # weights, their masters and moments, each in its own type
    "halves": ["trainer.precision=bf16-true", "optimizer=adamw_split", "algo.minibatches=2"],
    "masters": ["trainer.precision=bf16-true", "algo.minibatches=2", "optimizer.weight_decay=0.1"],
}


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory):
    return {}


@pytest.mark.all
@pytest.mark.parametrize("shape", SHAPES)
def test_resume_from_any_step_equals_the_uninterrupted_run(shape, train, tmp_path):
    whole = tmp_path / "whole"
    overrides = [*SMALL, *EVERY_STEP, *SHAPES[shape]]
    assert train(*overrides, f"run_dir={whole}") == 0
    steps = sorted(int(p.stem[5:]) for p in (whole / "checkpoints").glob("*.ckpt"))
    assert steps == list(range(1, 13))
    by_tokens = [int(p.stem[7:]) for p in sorted((whole / "samples").glob("tokens_*.parquet"))]
    assert by_tokens == ([0, 4, 8] if shape == "mid-rollout" else [0, 10])

    for step in (1, 3, 6, 8, 11) if shape == "mid-rollout" else (3, 8):
        again = tmp_path / f"from_{step}"
        interrupted(whole, again, step)
        assert train(*overrides, f"run_dir={again}", "ckpt_path=last") == 0
        assert_same_run(whole, again)


LARGE = [
    *("trainer.precision=32-true", "data.prompts_per_rollout=32", "algo.group_size=16", "algo.iterations=2"),
    *("trainer.max_steps=2", "trainer.limit_val_batches=0"),
]
"""Rows enough for torch to share single operations out over its threads: 32,768 numbers each."""


def test_on_two_threads_equal_commands_are_one_run_and_so_is_a_resumed_one(two_threads, train, tmp_path):
    whole, twin, again = tmp_path / "whole", tmp_path / "twin", tmp_path / "again"
    overrides = [*SMALL, *EVERY_STEP, *LARGE]
    assert train(*overrides, f"run_dir={whole}") == train(*overrides, f"run_dir={twin}") == 0
    assert_same_run(whole, twin)
    interrupted(whole, again, 1)
    assert train(*overrides, f"run_dir={again}", "ckpt_path=last") == 0
    assert_same_run(whole, again)


@pytest.mark.all
@pytest.mark.parametrize(
    "words",
    [
        [*("rloo", "ppo_adapter", "grpo_tools", "grpo_images"), "--set", "algo.group_size=16"],
        ["dpo", "sft", "kto", "reward_model", "gkd", "online_dpo"],
        pytest.param(["grpo_two_ranks"], marks=pytest.mark.dist),
    ],
    ids=["rollouts", "rows", "two ranks"],
)
def test_on_two_threads_runs_of_every_kind_repeat_and_so_do_resumed_ones(words, root):
    """Of `scripts/same_bits.py`, which has more of them: LoRA, images and tools are here."""
    script = [sys.executable, str(root / "scripts" / "same_bits.py"), "repeat", "--threads", "2", "--only", *words]
    said = subprocess.run([*script, "--python", sys.executable], capture_output=True, text=True)
    hashes = dict(line.split() for line in said.stdout.splitlines()[1:])
    names = words[: words.index("--set")] if "--set" in words else words
    assert set(hashes) == {*names, *(f"{name}-resumed" for name in names)}, said.stdout + said.stderr
    assert said.returncode == 0 and "DIFFERENT" not in hashes.values(), said.stdout + said.stderr


@pytest.mark.all
def test_the_comparison_can_fail(train, tmp_path):
    """Another seed is another run: weights and metrics differ."""
    overrides = [*SMALL, "trainer.max_steps=2"]
    train(*overrides, f"run_dir={tmp_path / 'a'}")
    train(*overrides, f"run_dir={tmp_path / 'b'}", "seed=1")
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path / "a", tmp_path / "b")


def test_a_finished_run_returns_at_once(train, tmp_path, capsys):
    run_dir = f"run_dir={tmp_path / 'run'}"
    assert train(*SMALL, "trainer.max_steps=2", run_dir) == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    assert train(*SMALL, "trainer.max_steps=2", run_dir, "ckpt_path=last") == 0
    assert "finished" in capsys.readouterr().out
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}


@pytest.mark.parametrize("steps", [3, 8], ids=["in an epoch", "at its end"])
def test_a_run_that_was_killed_after_its_last_checkpoint_ends_as_the_whole_one(steps, train, tmp_path):
    """Nothing is left to train, and the last validation is logged under the step and the epoch of the whole run."""
    whole, again = tmp_path / "whole", tmp_path / "again"
    overrides = [*SMALL, *EVERY_STEP, f"trainer.max_steps={steps}"]
    assert train(*overrides, f"run_dir={whole}") == 0
    interrupted(whole, again, steps)
    assert train(*overrides, f"run_dir={again}", "ckpt_path=last") == 0
    assert_same_run(whole, again)


def test_a_finished_run_goes_on_to_a_later_end(train, tmp_path, capsys):
    words = [*SMALL, "trainer.limit_val_batches=0", f"run_dir={tmp_path / 'run'}", "ckpt_path=last"]
    words.append("scheduler.warmup_steps=0")
    assert train(*words, "trainer.max_steps=2") == 0
    assert train(*words, "trainer.max_steps=3") == 0
    assert "finished after 2 steps" in (said := capsys.readouterr().out) and "schedule" in said
    assert newest(tmp_path / "run")["global_step"] == 3
    rates = [row["train/lr"] for row in rows(tmp_path / "run") if "train/reward" in row]
    assert rates[2] == pytest.approx(rates[0] / 3), "the last of three steps of a schedule that falls to zero"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    for end in (3, 1):  # as it is, or sooner
        assert train(*words, f"trainer.max_steps={end}") == 0
        assert "nothing to do" in capsys.readouterr().out


def test_last_without_a_checkpoint_starts_anew_and_says_so(train, tmp_path, capsys):
    assert train(*SMALL, "trainer.max_steps=1", f"run_dir={tmp_path / 'run'}", "ckpt_path=last") == 0
    assert "starting anew" in capsys.readouterr().out


@pytest.mark.all
def test_a_truncated_checkpoint_is_passed_over_for_the_one_before(train, tmp_path):
    whole, again = tmp_path / "whole", tmp_path / "again"
    overrides = [*SMALL, *EVERY_STEP]
    assert train(*overrides, f"run_dir={whole}") == 0
    shutil.copytree(whole, again)
    (again / "summary.json").unlink()
    last = again / "checkpoints" / "step_00000012.ckpt"
    last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    assert train(*overrides, f"run_dir={again}", "ckpt_path=last") == 0
    assert_same_weights(whole, again)


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_same_weights(a, b):
    first, second = newest(a)["state_dict"], newest(b)["state_dict"]
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_checkpoint_of_another_model_is_refused(train, tmp_path, capsys):
    run, run_dir = tmp_path / "run", f"run_dir={tmp_path / 'run'}"
    logged = [*SMALL, "logger=[csv,tensorboard]", run_dir]
    train(*logged, "trainer.max_steps=1")
    (run / "error.json").write_text("{}")  # of an attempt before
    stood = files_of(run)
    assert train(*logged, "trainer.max_steps=2", "ckpt_path=last", "model.lora.r=4") == 7
    said = capsys.readouterr().err
    assert "on another model than this run's" in said and "model.lora.r (not set) -> 4" in said
    assert files_of(run) == stood
    code = train(*logged, "trainer.max_steps=2", "ckpt_path=last", "data.task.max_operand=6")
    assert code == 3 and "data.allow_changed=true" in capsys.readouterr().err
    assert files_of(run) == stood, "the data are looked at last, when all else of the checkpoint was taken"
    last, elsewhere = next((tmp_path / "run" / "checkpoints").iterdir()), tmp_path / "elsewhere"
    code = train(*SMALL, "trainer.max_steps=2", f"run_dir={elsewhere}", f"ckpt_path={last}", "model.lora.r=4")
    assert code == 7 and "report" not in capsys.readouterr().out and not elsewhere.exists()


def test_a_checkpoint_of_another_algorithm_is_refused_with_the_way_to_go_on(train, tmp_path, capsys):
    """Also where weights and state would fit, as those of GRPO and RLOO, or of SFT and DPO."""
    kinds = {"grpo": "GRPO", "rloo": "RLOO", "ppo": "PPO", "sft": "SFT", "dpo": "DPO"}
    examples = ["trainer.max_steps=1", "trainer.limit_val_batches=0", "data.batch_size=4", "logger=none"]
    for algo, others in {"grpo": ("rloo", "sft", "ppo"), "sft": ("grpo", "dpo")}.items():
        words = {name: examples if name in ("sft", "dpo") else SMALL for name in (algo, *others)}
        run = tmp_path / algo
        short = [*words[algo], f"algo={algo}", "trainer.max_steps=1", "trainer.limit_val_batches=0"]
        assert train(*short, f"run_dir={run}") == 0
        (last,), config = (run / "checkpoints").iterdir(), (run / "config.yaml").read_text()
        for other in others:
            elsewhere = [f"run_dir={tmp_path / 'elsewhere'}", f"ckpt_path={last}"]
            for where in (elsewhere, [f"run_dir={run}", "ckpt_path=last"]):
                (run / "summary.json").unlink(missing_ok=True)
                assert train(*words[other], f"algo={other}", "trainer.max_steps=2", *where) == 7, (algo, other)
                said = capsys.readouterr().err
                assert f"{kinds[algo]} wrote it, and this run trains with {kinds[other]}" in said
                assert "config.yaml" in said and "model.name=<run_dir>/hf" in said and "Traceback" not in said
            assert not (tmp_path / "elsewhere").exists()
            assert (run / "config.yaml").read_text() == config and [*(run / "checkpoints").iterdir()] == [last]


def test_other_settings_of_an_algorithm_are_no_other_algorithm(train, tmp_path):
    short = [*SMALL, "trainer.limit_val_batches=0", f"run_dir={tmp_path}"]
    assert train(*short, "trainer.max_steps=1") == 0
    assert newest(tmp_path)["algorithm"] == "GRPO"
    assert train(*short, "trainer.max_steps=2", "algo=dr_grpo", "ckpt_path=last") == 0


@pytest.mark.all
def test_a_checkpoint_holds_what_is_trained_and_no_reference(train, tmp_path):
    assert train(*SMALL, "trainer.max_steps=1", f"run_dir={tmp_path / 'full'}", "algo.beta=0.1") == 0
    assert all(name.startswith("policy.") for name in newest(tmp_path / "full")["state_dict"])
    assert train(*SMALL, "trainer.max_steps=1", f"run_dir={tmp_path / 'lora'}", "model.lora.r=4") == 0
    assert all("lora_" in name for name in newest(tmp_path / "lora")["state_dict"])


@pytest.mark.all
def test_metrics_are_one_row_a_rollout_and_one_a_validation(train, tmp_path):
    assert train(*SMALL, f"run_dir={tmp_path / 'run'}") == 0
    table = rows(tmp_path / "run")
    assert [row["step"] for row in table if "train/reward" in row] == list(range(1, 13))
    # before, after the first epoch of 8 rollouts, after
    assert [row["step"] for row in table if "val/reward" in row] == [0, 8, 12]
    assert [row["step"] for row in table if "val_sampled/reward" in row] == [0, 12]


@pytest.mark.all
def test_a_finished_run_keeps_one_checkpoint(train, tmp_path):
    """The interval saves the second step, the end the third; a run that goes on from there leaves one again."""
    every = ["callbacks.checkpoint.every_n_train_steps=2", "data.task.val_rows=0", f"run_dir={tmp_path}"]
    for steps, more in ((3, []), (5, ["ckpt_path=last"])):
        assert train(*SMALL, *every, f"trainer.max_steps={steps}", *more) == 0
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step_0000000{steps}.ckpt"]
