"""`lit-rl fit|validate|test|predict`: they run, and nothing foreign runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import warm
import yaml
from standin_judge import marked, standing_in_for_a_judge
from tiers import quick

import lit_rl.cli
from lit_rl.algorithms import GRPO, AdamW, Linear
from lit_rl.cli import lightning_app
from lit_rl.cli.lightning_app import CONFIG_NAME, WithKeywords
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.ops.policy_losses import clipped_policy_loss
from lit_rl.reports.secrets import redact_command
from lit_rl.rewards import exact_match
from lit_rl.runs.run_lock import LOCK_FILE

STEPS = 10
SMALL = ["--data.prompts_per_rollout=4", "--data.task.val_rows=8", "--trainer.accelerator=cpu"]
LEAST = ["--model=GRPO", "--model.model=tiny", "--data.task=lit_rl.data.tasks.Addition"]
REWARD = "--model.reward=lit_rl.rewards.exact_match"


@dataclass(frozen=True)
class Outcome:
    """What a command line left behind."""

    code: int
    out: str
    err: str


CommandLine = Callable[..., Outcome]


@pytest.fixture
def lit_rl_run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CommandLine:
    """A command line in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lit-rl"])

    def run(*arguments: str) -> Outcome:
        capfd.readouterr()
        code = lit_rl.cli.run(list(arguments))
        written = capfd.readouterr()
        return Outcome(code, str(written.out), str(written.err))

    return run


@pytest.fixture(scope="session")
def demo(root: Path) -> str:
    return f"--config={root / 'conf' / 'lightning' / 'addition.yaml'}"


@pytest.fixture(scope="session")
def fitted(root: Path, demo: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A short `lit-rl fit` in a process of its own: its folder and its outcome."""
    folder = tmp_path_factory.mktemp("fit")
    command = [sys.executable, "-c", "from lit_rl.cli import main; main()", "fit", demo, *SMALL]
    command += [f"--trainer.max_steps={STEPS}", "--trainer.default_root_dir=run"]
    command += ["--trainer.logger=lit_rl.callbacks.JsonlLogger", "--trainer.logger.path=logs/metrics.jsonl"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    return folder / "run", Outcome(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def checkpoint(fitted: tuple[Path, Outcome]) -> Path:
    (path,) = fitted[0].rglob("*.ckpt")
    return path


# ---------------------------------------------------------------------- the four commands


def test_fit_ends_well_and_warns_of_nothing(fitted: tuple[Path, Outcome]) -> None:
    folder, outcome = fitted
    assert outcome.code == 0, outcome.err
    assert "Warning" not in outcome.err and "deprecated" not in outcome.err
    assert "completions per rollout" in outcome.out
    assert "Held-out reward" in outcome.out and "Where the time went" in outcome.out  # as a run of `train` ends
    assert "logs/report.html  (one file: open it in a browser)" in outcome.out
    assert "\nmetrics       " in outcome.out and "logs/metrics.jsonl\n" in outcome.out
    assert "none are written; every completion as parquet: add --trainer.callbacks+=lit_rl.callbacks.S" in outcome.out
    assert "no export; a folder for transformers" in outcome.out and "curves" not in outcome.out
    assert "train/reward" in (folder.parent / "logs" / "metrics.jsonl").read_text()


def test_fit_learns_from_a_judge_of_groups(demo: str, lit_rl_run: CommandLine, tmp_path: Path) -> None:
    """The completions are those of a real rollout; what the stand-in says of them depends on their letters alone."""

    def answer(body: dict[str, Any], number: int) -> tuple[int, str]:
        shown = re.findall(r"<(completion_\d+)-[0-9a-f]{16}>", message := body["messages"][0]["content"])
        marks = {name.rpartition("_")[2]: sum(map(ord, marked(message, name))) % 101 for name in shown}
        return 200, json.dumps({name: {"reason": "so", "verdict": mark} for name, mark in marks.items()})

    with standing_in_for_a_judge() as server:
        server.answer = answer
        words = ["fit", demo, *SMALL, "--trainer.limit_val_batches=0", "--trainer.max_steps=1"]
        words += ["--trainer.logger=lit_rl.callbacks.JsonlLogger", "--trainer.logger.path=metrics.jsonl"]
        words += ["--model.reward=lit_rl.rewards.GroupJudge", f"--model.reward.base_url={server.url}"]
        outcome = lit_rl_run(*words, "--model.reward.model=m", "--model.reward.concurrency=2")
    assert outcome.code == 0, outcome.err
    assert len(server.asked) == 4 and server.most <= 2
    (row,) = (
        json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if "reward_std" in line
    )
    assert abs(row["train/reward"]) < 1e-6 < row["train/rewards/judge_group/std"]
    assert row["train/rewards/judge_group/unparsable"] == row["train/rewards/judge_group/cached"] == 0
    assert row["train/rewards/judge_group/requests"] > 0 < row["train/rewards/judge_group/prompt_tokens"]
    counts = "".join(outcome.out.partition("What judges were asked")[2].split())
    assert "│judge_group│4│28│12│0│" in counts  # of 7 tokens read and 3 written each


def test_the_line_that_evaluates_a_fit_works(
    fitted: tuple[Path, Outcome], lit_rl_run: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(fitted[0].parent)
    told = re.search(r"evaluate it   lit-rl (validate --config \S+ --ckpt_path .+)\n", fitted[1].out)
    assert told is not None, fitted[1].out
    outcome = lit_rl_run(*shlex.split(told[1]))
    assert outcome.code == 0 and "val/reward" in outcome.out, outcome.err


def test_fit_trains_as_the_plain_constructors_do(
    fitted: tuple[Path, Outcome], checkpoint: Path, tmp_path: Path
) -> None:
    """To the bit: the command line adds nothing and forgets nothing."""
    saved = torch.load(checkpoint, weights_only=True)
    module = GRPO(
        "tiny",
        exact_match,
        sampling=Sampling(max_new_tokens=6),
        optimizer=AdamW(lr=5e-4),
        scheduler=Linear(warmup_steps=20),
    )
    module.configure_model()
    untrained = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trainer = L.Trainer(
        max_steps=STEPS,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        inference_mode=False,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, datamodule=RolloutDataModule(task=Addition(val_rows=8), prompts_per_rollout=4))
    assert saved["global_step"] == STEPS
    for name, tensor in saved["state_dict"].items():
        torch.testing.assert_close(tensor, module.state_dict()[name], rtol=0, atol=0)
    assert any(not torch.equal(tensor, untrained[name]) for name, tensor in saved["state_dict"].items())


@pytest.mark.all
def test_fit_with_an_environment(lit_rl_run: CommandLine, tmp_path: Path) -> None:
    """Its class and its limits are arguments like any other's, and it answers the policy."""
    game = ["--model.env=lit_rl.environments.CustomEnvironment", "--model.env.max_turns=3", "--model.env.max_tokens=24"]
    game += ["--model.env.path=lit_rl.environments.games:GuessNumber", "--model.env.max_observation_tokens=8"]
    least = ["--model=GRPO", "--model.model=tiny", "--model.reward=lit_rl.rewards.environment"]
    rows = ["--data.task=lit_rl.data.tasks.Repeated", "--data.task.prompt=0..9=", "--data.task.val_rows=4"]
    run = ["--trainer.max_steps=1", "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=log"]
    few = ["--data.prompts_per_rollout=4", "--model.sampling.max_new_tokens=4", "--trainer.accelerator=cpu"]
    run += ["--trainer.log_every_n_steps=1"]
    # A key in a file that only its owner reads is taken, and in nothing that the run writes.
    secret = "hf_" + "Ab3" * 12
    own = tmp_path / "own.yaml"
    own.write_text(f"model:\n  class_path: GRPO\n  init_args:\n    sampling: {{stop: [{secret}]}}\n")
    outcome = lit_rl_run("fit", f"--config={own}", *least, *game, *rows, *few, *run, "--trainer.default_root_dir=run")
    assert outcome.code == 0, outcome.err
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path != own]
    assert any("<redacted>" in path.read_text() for path in files if path.suffix == ".yaml")
    assert not [path for path in files if secret.encode() in path.read_bytes()]
    (logged,) = (tmp_path / "log").rglob("metrics.csv")
    assert "train/turns/mean" in logged.read_text() and "train/env/failed" in logged.read_text()
    refused = lit_rl_run("fit", *least, *game, "--model.env.max_turns=0", *rows, *few, *run)
    assert refused.code == 2 and "env.max_turns=0" in refused.err


@pytest.mark.all
def test_fit_leaves_its_config_and_the_config_runs_again(fitted: tuple[Path, Outcome], lit_rl_run: CommandLine) -> None:
    saved = yaml.safe_load((fitted[0] / CONFIG_NAME).read_text())
    assert saved["optimizer"]["init_args"]["lr"] == 5e-4 and saved["trainer"]["max_steps"] == STEPS
    again = lit_rl_run("fit", f"--config={fitted[0] / CONFIG_NAME}", "--print_config")
    assert again.code == 0, again.err
    assert yaml.safe_load(again.out) == saved


@pytest.mark.all
def test_a_folder_with_another_runs_config_is_refused_and_resuming_is_not(
    fitted: tuple[Path, Outcome], demo: str, lit_rl_run: CommandLine, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(fitted[0], tmp_path / "run"))
    (checkpoint,) = folder.rglob("*.ckpt")
    own = ["--trainer.logger=lit_rl.callbacks.JsonlLogger", f"--trainer.default_root_dir={folder}"]
    same = ["fit", demo, *SMALL, "--trainer.limit_val_batches=1", *own]
    (folder / "error.json").write_text("{}")  # of an attempt before
    before = (folder / CONFIG_NAME).read_bytes()
    refused = lit_rl_run(*same, "--trainer.max_steps=1")
    assert refused.code == 2 and str(folder / CONFIG_NAME) in refused.err and "another run" in refused.err
    assert (folder / CONFIG_NAME).read_bytes() == before and (folder / "error.json").read_text() == "{}"
    assert not (folder / "metrics.jsonl").exists(), "nothing is measured there"
    more = ["--trainer.callbacks=null", f"--trainer.max_steps={STEPS + 1}", f"--ckpt_path={checkpoint}"]
    resumed = lit_rl_run(*same, *more)
    assert resumed.code == 0, resumed.err
    assert yaml.safe_load((folder / CONFIG_NAME).read_text())["trainer"]["max_steps"] == STEPS + 1
    assert not (folder / "error.json").exists()


HOLDS = """
import pathlib, time
def score(completions):
    beside = pathlib.Path(__file__)
    beside.with_name("met").touch()
    while not beside.with_name("go_on").exists():
        time.sleep(0.05)
    return [1.0] * len(completions)
"""


@pytest.mark.all
def test_a_second_fit_is_refused_while_the_first_writes_and_whoever_dies_holds_nothing(
    demo: str, lit_rl_run: CommandLine, tmp_path: Path
) -> None:
    """The first dies before its first checkpoint, so that `last` means none: that run begins anew, another does not."""
    reward, folder = tmp_path / "mine.py", tmp_path / "run"
    reward.write_text(HOLDS)
    words = ["fit", demo, *SMALL, "--trainer.limit_val_batches=0", "--trainer.logger=lit_rl.callbacks.JsonlLogger"]
    words += [f"--trainer.default_root_dir={folder}", "--model.reward=lit_rl.rewards.from_paths"]
    words += [f"--model.reward.fn={reward}:score", "--trainer.max_steps=1"]
    child = warm.Popen([sys.executable, "-c", "from lit_rl.cli import main; main()", *words])
    try:
        while not (tmp_path / "met").exists():
            assert child.poll() is None
            time.sleep(0.05)
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert json.loads(before[folder / LOCK_FILE])["pid"] == child.pid
        for more in ([], ["--ckpt_path=last"]):
            refused = lit_rl_run(*words, *more)
            assert refused.code == 7 and f"in use by process {child.pid}" in refused.err, refused.err
            assert "take another trainer.default_root_dir" in refused.err
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    finally:
        child.kill()
        child.wait()
    (tmp_path / "go_on").touch()
    assert (folder / LOCK_FILE).exists(), "what a dead process has left"
    other = lit_rl_run(*words, "--ckpt_path=last", "--optimizer.lr=1e-4")
    assert other.code == 2 and "--ckpt_path=last finds no last.ckpt" in other.err, other.err
    assert (folder / CONFIG_NAME).read_bytes() == before[folder / CONFIG_NAME]
    again = lit_rl_run(*words, "--ckpt_path=last")
    assert again.code == 0, again.err
    assert "Held-out reward" in again.out or "Where the time went" in again.out
    assert not (folder / LOCK_FILE).exists()


@pytest.mark.all
def test_a_fit_that_fails_leaves_what_train_leaves(demo: str, lit_rl_run: CommandLine, tmp_path: Path) -> None:
    reward = tmp_path / "mine.py"
    small = [*SMALL, "--trainer.limit_val_batches=0", "--trainer.max_steps=3"]
    mine = ["--model.reward=lit_rl.rewards.from_paths", f"--model.reward.fn={reward}:score"]
    reward.write_text("def score(completions):\n    assert False, 'sk-abcdefghijklmnopqrstuvwxyz'\n")
    assert lit_rl_run("fit", demo, *small, *mine).code == 4
    assert not (tmp_path / "runs").exists(), "nothing was learned"
    assert lit_rl_run("fit", demo, *small, *mine, "--trainer.logger=false").code == 4
    assert not list(tmp_path.rglob(CONFIG_NAME)), (
        "also of a folder that was there before: the next start is no other run"
    )
    later = reward.read_text().replace("False", "score.calls < 3")
    later = later.replace("    assert", "    score.calls = getattr(score, 'calls', 0) + 1\n    assert")
    reward.write_text(f"{later}    return [1.0] * len(completions)\n")
    assert lit_rl_run("fit", demo, *small, *mine, "--trainer.log_every_n_steps=1").code == 4
    (folder,) = (tmp_path / "runs" / "lightning").iterdir()
    said = json.loads((folder / "error.json").read_text())
    assert (said["error"], said["exit_code"], said["rank"], said["step"]) == ("RewardError", 4, 0, 2)
    assert said["command"].startswith("lit-rl fit --config") and "mine.py" in said["traceback"]
    assert 'class="failed"' in (folder / "report.html").read_text()
    assert not (folder / LOCK_FILE).exists(), "the next run may come in"
    assert not any("sk-abc" in (folder / name).read_text() for name in ("error.json", "report.html"))


@pytest.mark.parametrize("command", ["validate", "test"])
@pytest.mark.all
def test_validate_and_test_measure_a_checkpoint(
    command: str, demo: str, checkpoint: Path, lit_rl_run: CommandLine, tmp_path: Path
) -> None:
    outcome = lit_rl_run(command, demo, *SMALL, "--trainer.logger=false", f"--ckpt_path={checkpoint}")
    assert outcome.code == 0, outcome.err
    assert f"{'val' if command == 'validate' else 'test'}/reward" in outcome.out
    assert not list(tmp_path.rglob(CONFIG_NAME))


@pytest.mark.all
class Canary:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.path),)


def flip_a_weight(path: Path, sung: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda part: part.file_size)
    place = largest.header_offset + 200 + largest.file_size // 2
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


SPOILT: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "a flipped bit": (flip_a_weight, "it is damaged"),
    "code": (
        lambda path, sung: torch.save({"state_dict": {}, "a": Canary(sung)}, path),
        "a Python object (posix.mkdir)",
    ),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_checkpoint_that_cannot_be_used_is_named_and_not_run(
    kind: str, checkpoint: Path, demo: str, lit_rl_run: CommandLine, tmp_path: Path
) -> None:
    path, sung = tmp_path / "theirs.ckpt", tmp_path / "canary"
    shutil.copy(checkpoint, path)
    spoil, words = SPOILT[kind]
    spoil(path, sung)
    before = path.read_bytes()
    outcome = lit_rl_run("fit", demo, *SMALL, "--trainer.max_steps=11", f"--ckpt_path={path}")
    assert outcome.code == 7, outcome.err
    assert str(path) in outcome.err and words in outcome.err and "Traceback" not in outcome.err
    assert not sung.exists() and path.read_bytes() == before
    assert not list(tmp_path.rglob("metrics.jsonl")) and list(tmp_path.rglob("*.ckpt")) == [path]


def test_a_checkpoint_of_another_algorithm_is_refused_before_anything_is_written(
    checkpoint: Path, demo: str, lit_rl_run: CommandLine, tmp_path: Path
) -> None:
    outcome = lit_rl_run("fit", demo, *SMALL, "--model=RLOO", "--trainer.max_steps=11", f"--ckpt_path={checkpoint}")
    assert outcome.code == 7, outcome.err
    assert "GRPO wrote it, and this run trains with RLOO" in outcome.err and "Traceback" not in outcome.err
    assert "--model.model=<run_dir>/hf" in outcome.err
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_brings_no_settings(checkpoint: Path, demo: str, lit_rl_run: CommandLine, tmp_path: Path) -> None:
    """Lightning's command line would build the model with the `hyper_parameters` that stand in the file."""
    path = tmp_path / "theirs.ckpt"
    saved = torch.load(checkpoint, weights_only=True)
    saved["hyper_parameters"] = {"_class_path": "lit_rl.algorithms.RLOO", "seed": 7}
    torch.save(saved, path)
    outcome = lit_rl_run("fit", demo, *SMALL, "--trainer.max_steps=10", "--trainer.logger=false", f"--ckpt_path={path}")
    assert outcome.code == 0, outcome.err
    (config,) = tmp_path.rglob(CONFIG_NAME)
    model = yaml.safe_load(config.read_text())["model"]
    assert model["class_path"].endswith("GRPO") and model["init_args"]["seed"] == 0


def test_predict_writes_a_line_for_each_prompt(
    demo: str, checkpoint: Path, lit_rl_run: CommandLine, tmp_path: Path
) -> None:
    arguments = ["--trainer.logger=false", "--trainer.default_root_dir=out", f"--ckpt_path={checkpoint}"]
    outcome = lit_rl_run("predict", demo, *SMALL, *arguments)
    assert outcome.code == 0, outcome.err
    rows = [json.loads(line) for line in (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()]
    held_out = Addition(val_rows=8).val()
    assert [(row["prompt"], row["answer"]) for row in rows] == [(row["prompt"], row["answer"]) for row in held_out]
    assert [row["reward"] for row in rows] == [float(row["completion"] == row["answer"]) for row in rows]


@pytest.mark.all
def test_fast_dev_run_writes_nothing(demo: str, lit_rl_run: CommandLine, tmp_path: Path) -> None:
    outcome = lit_rl_run("fit", demo, *SMALL, "--trainer.fast_dev_run=true")
    assert outcome.code == 0, outcome.err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.all
def test_the_shipped_config_ends_with_a_report_of_its_own_run(
    demo: str, lit_rl_run: CommandLine, tmp_path: Path
) -> None:
    export = ["--trainer.callbacks+=lit_rl.callbacks.Export", "--trainer.callbacks.folder=out"]
    export += ["--trainer.callbacks.every", "1", "--trainer.default_root_dir=here"]
    outcome = lit_rl_run("fit", demo, *SMALL, "--trainer.max_steps=1", "--trainer.limit_val_batches=1", *export)
    assert outcome.code == 0, outcome.err
    folder = tmp_path / "here" / "lightning" / "version_0"  # a typed folder beats that of the file's logger
    assert not (tmp_path / "runs").exists()
    model = Path("out") / "step_00000001"
    for line in (
        f"model         {model}  (verified as it was written)",
        f"use it        AutoModelForCausalLM.from_pretrained('{model}'), AutoTokenizer likewise",
        f"talk to it    lit-rl chat model={model}",
    ):
        assert line in outcome.out
    assert re.search(r"curves        tensorboard --logdir \S*here/lightning/version_0\n", outcome.out)
    assert "lightning/version_0/report.html  (one file: open it in a browser)" in outcome.out
    assert "held-out: reward" in (folder / "report.html").read_text()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "val/reward" in row] == [0, 1]
    assert [row["step"] for row in rows if "val_sampled/reward" in row] == [0, 1]
    told = (tmp_path / "out" / "step_00000001" / "README.md").read_text().split("```bash\n")[1].split("\n```")[0]
    assert told.startswith("lit-rl fit ") and told.endswith(
        "--trainer.callbacks.folder=out --trainer.callbacks.every=1"
    )


def test_a_command_is_noted_with_each_key_beside_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lit-rl", "fit", "--judge.api_key", "k1", "--seed=-1", "--x", "-2", "--y"])
    told = redact_command(lightning_app._command())
    assert shlex.split(told) == ["lit-rl", "fit", "--judge.api_key=<redacted>", "--seed=-1", "--x=-2", "--y"]


# ---------------------------------------------------------------------- help and configs


@pytest.mark.all
def test_help_shows_the_docstrings(lit_rl_run: CommandLine) -> None:
    text = " ".join(lit_rl_run("fit", "--help").out.split())
    assert "Prompts of one rollout, all ranks together" in text
    assert "--optimizer" in text and "--scheduler" in text and "--reference" in text and "--data.task" in text
    text = " ".join(lit_rl_run("fit", "--model.help=GRPO").out.split())
    assert "2 or more if the advantage compares completions of one prompt. (type: int, default: 8)" in text
    assert "Linear warm-up" not in text and "--model.optimizer" not in text


@pytest.mark.all
def test_print_config_is_a_config(lit_rl_run: CommandLine, tmp_path: Path) -> None:
    short = "--trainer.callbacks+=EMAWeights"
    first = lit_rl_run("fit", *LEAST, REWARD, "--model.beta=0.1", short, "--print_config")
    assert first.code == 0, first.err
    (tmp_path / "mine.yaml").write_text(first.out)
    again = lit_rl_run("fit", "--config=mine.yaml", "--print_config")
    assert yaml.safe_load(again.out) == yaml.safe_load(first.out)
    assert yaml.safe_load(first.out)["model"]["init_args"]["beta"] == 0.1


@pytest.mark.all
def test_a_reward_of_your_own_needs_no_permission(lit_rl_run: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(completions, **kwargs):\n    return [1.0 for _ in completions]\n")
    reward = ["--model.reward=lit_rl.rewards.from_paths", "--model.reward.fn=./mine.py:score"]
    outcome = lit_rl_run(
        "validate", *LEAST, *reward, *SMALL, "--model.sampling.max_new_tokens=4", "--trainer.logger=false"
    )
    assert outcome.code == 0, outcome.err
    assert "val/rewards/score/mean" in outcome.out


def test_with_keywords_is_the_function_with_its_settings() -> None:
    wide = WithKeywords(clipped_policy_loss, {"clip_high": 0.5})
    logprobs = torch.tensor([[0.4]], requires_grad=True)
    arguments = (logprobs, torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1, dtype=torch.bool))
    assert wide(*arguments)[0].item() == clipped_policy_loss(*arguments, clip_high=0.5)[0].item()
    assert wide(*arguments)[0].item() != clipped_policy_loss(*arguments)[0].item()
    with pytest.raises(ConfigError, match=r"clip_higg.*'clip_high'"):
        WithKeywords(clipped_policy_loss, {"clip_higg": 0.5})

    def many(x: int, *, first: int, second: int, third: int, fourth: int, fifth: int, sixth: int) -> int: ...

    with pytest.raises(ConfigError, match=r"'sixth'.* many has sixth, .* and 1 more"):
        WithKeywords(many, {"sixht": 1})


MINE = ["--model.reward=lit_rl.rewards.from_paths", "--model.reward.fn=math:sqrt"]


def test_null_is_read_below_two_classes(lit_rl_run: CommandLine) -> None:
    """jsonargparse hands it on as a text, which is no number."""
    more = [*MINE, "--model.reward.timeout=null", "--model.reward.cache=7", "--model.evaluation.limit=None"]
    outcome = lit_rl_run("fit", *LEAST, *more, "--print_config")
    assert outcome.code == 0, outcome.err
    model = yaml.safe_load(outcome.out)["model"]["init_args"]
    assert (model["reward"]["init_args"]["timeout"], model["reward"]["init_args"]["cache"]) == (None, 7)
    assert model["evaluation"]["limit"] is None


PLACES = {
    "model": "model: SPEC",
    "loss": "model: {class_path: GRPO, init_args: {model: tiny, reward: REWARD, loss: SPEC}}",
    "task": "data: {task: SPEC}",
    "callback": "trainer: {callbacks: [SPEC]}",
    "optimizer": "optimizer: SPEC",
}


@pytest.mark.parametrize("place", quick(PLACES, {"callback"}))
def test_a_config_cannot_name_a_function_of_any_package(place: str, lit_rl_run: CommandLine, tmp_path: Path) -> None:
    bare = place in ("model", "task")
    written = "os.system" if bare else "{class_path: os.system, init_args: {command: touch canary}}"
    (tmp_path / "theirs.yaml").write_text(
        PLACES[place].replace("SPEC", written).replace("REWARD", "lit_rl.rewards.exact_match")
    )
    outcome = lit_rl_run("fit", *LEAST, REWARD, "--config=theirs.yaml", "--trainer.fast_dev_run=true")
    assert outcome.code == 2
    assert "os.system" in outcome.err and "--allow_targets=[os]" in outcome.err and "lit_rl.*" in outcome.err
    assert not (tmp_path / "canary").exists()


def test_what_is_refused_goes_by_where_it_really_comes_from(lit_rl_run: CommandLine) -> None:
    for target in ("functools.partial", "lit_rl.core.user_functions.importlib.import_module"):
        outcome = lit_rl_run("validate", *LEAST, f"--model.reward={target}")
        assert outcome.code == 2 and "is not on the list" in outcome.err


def test_yaml_that_makes_objects_is_refused(lit_rl_run: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text("seed_everything: !!python/object/apply:os.system [touch canary]\n")
    outcome = lit_rl_run("fit", *LEAST, REWARD, "--config=theirs.yaml")
    assert outcome.code == 2 and "python/object" in outcome.err
    assert not (tmp_path / "canary").exists()


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 8)}]\n" for i in range(1, 9)
)


@pytest.mark.all
@pytest.mark.parametrize(
    "key, text, word",
    [
        ("config", BOMB, "once its aliases"),
        ("model", BOMB, "once its aliases"),
    ],
)
def test_a_file_that_would_blow_up_is_refused_unbuilt(key, text, word, lit_rl_run: CommandLine, tmp_path: Path) -> None:
    """A file that another key names is read by jsonargparse alone."""
    (tmp_path / "theirs.yaml").write_text(text)
    outcome = lit_rl_run("fit", *LEAST, REWARD, f"--{key}=theirs.yaml")
    assert outcome.code == 2 and word in outcome.err and "theirs.yaml" in outcome.err


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package of the user's own; importing it leaves a trace."""
    (tmp_path / "their_package.py").write_text(
        "import pathlib\npathlib.Path('imported').touch()\n"
        "def score(completions, **kwargs):\n    return [0.5] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "their_package"
    sys.modules.pop("their_package", None)


@pytest.mark.all
def test_a_package_is_imported_only_by_the_users_own_hand(
    package: str, lit_rl_run: CommandLine, tmp_path: Path
) -> None:
    validate = ["validate", *LEAST, f"--model.reward={package}.score", *SMALL, "--trainer.logger=false"]
    validate += ["--model.sampling.max_new_tokens=4"]
    assert lit_rl_run(*validate).code == 2
    (tmp_path / "theirs.yaml").write_text(f"allow_targets: [{package}]\n")
    itself = lit_rl_run(*validate, "--config=theirs.yaml")
    assert itself.code == 2 and not (tmp_path / "imported").exists()
    allowed = lit_rl_run(*validate, f"--allow_targets=[{package}]")
    assert allowed.code == 0, allowed.err
    assert (tmp_path / "imported").exists()
    assert lit_rl_run(*validate).code == 2  # a permission ends with its command
    (tmp_path / "theirs.yaml").write_text("allow_targets: [os]\n")
    theirs = lit_rl_run("validate", *LEAST, REWARD, "--config=theirs.yaml")
    assert theirs.code == 2 and "stands in a config file" in theirs.err
