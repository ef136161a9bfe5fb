"""What a run that goes on from a checkpoint refuses, keeps and says; its bits: `test_resume_cases.py`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from runs_helpers import SMALL, newest, rows

QUICK = [*SMALL, "trainer.limit_val_batches=0"]
ROWS = [
    "data.task.max_operand=5",
    "data.task.val_rows=4",
    "data.batch_size=8",
    "trainer.max_steps=6",
    "trainer.accumulate_grad_batches=2",
    "logger=none",
    "eval.limit=2",
]
"""Steps of two micro-batches; 32 training rows, so step 4 is an epoch's last (8 where a pair is two verdicts)."""
OTHERS = {
    "no-critic": (["algo=ppo"], ["algo/critic=shared_trunk"], ["not of this model", "unexpected", "critic."]),
    "no-reference": (["algo.beta=0.1"], ["reference=ema"], ["lacks its weights", "reference=EMA"]),
    "no-norm": (["algo.beta=0.1"], ["algo/reward_norm=running"], ["algo.reward_norm", "RunningNorm"]),
    "other-control": (["algo.beta=0.1"], ["algo/kl_control=adaptive"], ["AdaptiveKL"]),
    "other-groups": (["algo/groups=top", "algo.groups.keep=2"], ["algo/groups=dynamic"], ["algo.groups"]),
}


@pytest.mark.all
def test_a_checkpoint_of_other_terms_is_refused(train, tmp_path, capsys):
    for name, (first, second, fragments) in OTHERS.items():
        run = tmp_path / "-".join(first).replace("/", "-")
        if not run.exists():
            assert train(*QUICK, "trainer.max_steps=1", f"run_dir={run}", *first) == 0
        (run / "summary.json").unlink(missing_ok=True)
        kept = [word for word in first if not word.startswith("algo/groups") and ".keep" not in word]
        assert train(*QUICK, "trainer.max_steps=2", f"run_dir={run}", "ckpt_path=last", *kept, *second) == 7, name
        said = capsys.readouterr().err
        assert "Traceback" not in said and all(each in said for each in [*fragments, "config.yaml"]), said


@pytest.mark.exhaustive
def test_runs_of_every_kind_repeat(root):
    """The script itself, with each run twice in new processes, two ranks among them."""
    names = ["rloo", "dpo", "kto", "gkd", "grpo_two_ranks"]
    script = [sys.executable, str(root / "scripts" / "same_bits.py"), "repeat", "--threads", "2", "--only", *names]
    said = subprocess.run([*script, "--python", sys.executable], capture_output=True, text=True)
    hashes = dict(line.split() for line in said.stdout.splitlines()[1:])
    assert set(hashes) == {*names, *(f"{name}-resumed" for name in names)}, said.stdout + said.stderr
    assert said.returncode == 0 and "DIFFERENT" not in hashes.values(), said.stdout + said.stderr


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


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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
    kinds = {"grpo": "GRPO", "rloo": "RLOO", "sft": "SFT", "dpo": "DPO"}
    examples = ["trainer.max_steps=1", "trainer.limit_val_batches=0", "data.batch_size=4", "logger=none"]
    for algo, others in {"grpo": ("rloo", "sft"), "sft": ("dpo",)}.items():
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
def test_metrics_are_averages_over_the_steps_of_a_line(train, tmp_path):
    """One line every three steps: the mean of what three lines say; a run that is not logged logs nothing."""
    common = [*ROWS, "algo=dpo", "trainer.max_steps=6", "trainer.limit_val_batches=0"]
    assert train(*common, f"run_dir={tmp_path / 'each'}", "trainer.log_every_n_steps=1") == 0
    assert train(*common, f"run_dir={tmp_path / 'third'}", "trainer.log_every_n_steps=3") == 0
    each, third = ([row for row in rows(tmp_path / name) if "train/loss" in row] for name in ("each", "third"))
    assert [row["step"] for row in each] == [1, 2, 3, 4, 5, 6] and [row["step"] for row in third] == [3, 6]
    for name in ("train/loss", "train/rewards/margins", "train/logps/chosen", "train/grad_norm"):
        assert third[0][name] == pytest.approx(sum(row[name] for row in each[:3]) / 3, rel=1e-5), name
    assert third[1]["train/num_tokens"] == each[5]["train/num_tokens"]


@pytest.mark.all
def test_validation_measures_the_loss_and_writes_to_the_prompts(train, tmp_path):
    assert train(*ROWS, "algo=dpo", f"run_dir={tmp_path / 'run'}") == 0
    table = rows(tmp_path / "run")
    last = next(row for row in reversed(table) if "val/loss" in row)
    assert 0 < last["val/loss"] < 2 and 0 <= last["val/rewards/accuracies"] <= 1
    assert any("val/reward" in row for row in table) and any("val_sampled/reward" in row for row in table)
    assert not any("val_sampled/loss" in row for row in table), "a loss has no decoding"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["losses"]["before"]["val/loss"] == pytest.approx(0.6931, abs=1e-4)  # the policy is its reference
    assert summary["losses"]["after"]["val/loss"] == last["val/loss"]
    assert list((tmp_path / "run" / "samples").glob("val_*.parquet"))
