"""Every bad setting ends with its exit code, names the key and what is allowed, and leaves nothing on the disk."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from cli_helpers import QUICK, Command, contents, refused
from no_room import small_disk
from omegaconf import DictConfig, OmegaConf
from secret_examples import HARMLESS, OF_A_FORM, OF_A_NAME
from tiers import quick

from lit_rl.cli import build, hydra_start, lightning_words, typed_secrets
from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.reports.secrets import CONTEXT_FORMS, SECRET_NAMES, TOKEN_FORMS
from lit_rl.runs.run_dir import RunDir


@pytest.mark.parametrize("name", ["x" * 300, "'a\0b'"], ids=["long", "nul"])
@pytest.mark.all
def test_a_folder_that_cannot_be_named(step: Command, cwd: Path, name: str):
    refused(step(f"run_dir={name}"), 7, f"run_dir='{name[:1].strip(chr(39))}")
    assert contents(cwd) == []


# What only the data or the length of its prompts can show: known once the run directory is open, before any weight.


@pytest.mark.all
def test_a_key_of_ones_own_that_another_refers_to_is_read(step: Command):
    assert step("+my_rate=1e-3", "optimizer.lr=${my_rate}", "task=validate", "run_dir=run").code == 0
    refused(step("+my_rate=1e-3", "+my_rate_too=1", "optimizer.lr=${my_rate}"), 2, "my_rate_too is no key")


def test_the_three_nearest_batch_settings_work(step: Command):
    """Here the third; that each of them works is tested of the plan, in algorithms/test_batching.py."""
    outcome = step("data.prompts_per_rollout=7", "algo.minibatches=2", "run_dir=run")
    refused(outcome, 2, "data.prompts_per_rollout=7", "algo.minibatches=2", "divisible")
    advised = [line.split() for line in outcome.err.splitlines() if line.startswith("  data.prompts_per_rollout")]
    assert len(advised) == 3
    assert step(*advised[2], "run_dir=run").code == 0


@pytest.mark.all
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="deepspeed is installed")
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_that_is_not_installed(step: Command, cwd, stage):
    outcome = step(f"strategy=deepspeed_{stage}")
    refused(outcome, 8, "lit-rl[deepspeed]", "strategy=fsdp")
    assert outcome.err.count("pip install") == 1, "not Lightning's line too, which names no version"
    assert contents(cwd) == []


@pytest.mark.all
@pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(step: Command, cwd, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    wanted = "trainer.accelerator=gpu"
    refused(
        step(wanted), 8, wanted, "sees no GPU with CUDA_VISIBLE_DEVICES=''", "trainer.accelerator=auto", "lit-rl env"
    )
    assert contents(cwd) == []


@pytest.mark.all
@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_logger_that_is_not_installed(step: Command, cwd):
    refused(step("logger=wandb"), 8, "wandb")
    assert contents(cwd) == []


class TestRunDirectory:
    @pytest.mark.all
    def test_that_is_a_file(self, step: Command, cwd: Path):
        (cwd / "taken").write_text("mine")
        refused(step("run_dir=taken"), 7, "run_dir=taken", "is a file")
        refused(step("run_dir=taken/run"), 7, "run_dir=taken/run")
        assert contents(cwd) == ["taken"] and (cwd / "taken").read_text() == "mine"

    def test_that_cannot_be_made_leaves_no_folder_above_it(self, tmp_path: Path):
        folder = RunDir(tmp_path / "new" / "a" / ("x" * 300))
        made = [tmp_path / "new" / "a", tmp_path / "new"]
        with pytest.raises(StorageError, match="File name too long"):
            folder.make()
        assert all(path.is_dir() for path in made)
        folder.withdraw([folder.path, *made], "train/")
        assert contents(tmp_path) == []

    @pytest.mark.all
    @pytest.mark.parametrize("summary", [b'{"status": "fin', b"[1]", b"\x00\xff"], ids=["torn", "list", "bytes"])
    def test_with_a_damaged_summary(self, tmp_path: Path, summary: bytes):
        (tmp_path / "summary.json").write_bytes(summary)
        with pytest.warns(UserWarning, match="summary.json is damaged"):
            assert RunDir(tmp_path).read_summary() == {}

    def test_of_a_run_that_did_not_finish(self, step: Command, cwd: Path):
        (cwd / "run").mkdir()
        (cwd / "run" / "config.yaml").write_text("{algo: {}, data: {}, run_dir: run, task: fit, trainer: {}}\n")
        (cwd / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
        refused(step("run_dir=run"), 2, "did not finish", "ckpt_path=last")

    def test_with_an_odd_name_whose_run_finishes_and_repeats_no_token(self, step: Command, cwd: Path, monkeypatch):
        token = "hf_" + "Ab3" * 12
        monkeypatch.setenv("HF_TOKEN", token)
        name = "two words/../größe, a=b; it's"
        words = ["run_dir='" + name.replace("'", "\\'") + "'", "sampling.stop=['${oc.env:HF_TOKEN}']"]
        outcome = step(*words)
        assert outcome.code == 0 and token not in outcome.err + outcome.out, outcome.err
        run = cwd / name
        assert json.loads((run / "summary.json").read_text())["status"] == "finished"
        assert (run / "hf" / "model.safetensors").is_file()
        assert not [path for path in cwd.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
        refused(step(*words), 2, "a finished run", "ckpt_path=last")
        outcome = step(*words, "ckpt_path=last")
        assert outcome.code == 0 and "nothing to do" in outcome.out
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before

    @pytest.mark.all
    def test_on_a_disk_that_nobody_may_write(self, step: Command, cwd: Path):
        with small_disk(cwd / "disk", 1_000_000, "ro"):
            refused(step("run_dir=disk/run"), 7, "run_dir=disk/run", "Read-only file system")


YAMLS = {
    "duplicate-deep": ("algo:\n  beta: 0.1\n  beta: 0.2\n", "beta"),
    "tab": ("algo:\n\tbeta: 0.1\n", "line 3"),
    "object": ("seed: !!python/object/apply:os.system ['touch canary']\n", "python/object"),
    "not-yaml": ("algo: [1, 2\n", "line"),
    "list": ("- 1\n- 2\n", "mine"),
    "bomb": (
        "a0: &a0 [x, x, x, x, x, x, x, x]\n"
        + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 8)}]\n" for i in range(1, 9)),
        "once its aliases",
    ),
    "deep": ("seed: " + "[" * 3000 + "]" * 3000 + "\n", "nested too deeply"),
    "hydra-callback": (
        "hydra: {callbacks: {x: {_target_: shutil.copyfile, src: a, dst: canary}}}\n",
        "hydra.callbacks.x",
    ),
}


@pytest.fixture
def experiment(tmp_path: Path, command: Command):
    """Runs with an experiment file of the user's: `--config-dir DIR experiment=mine`."""

    def run(text: str, *arguments: str):
        folder = tmp_path / "mine" / "experiment"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "mine.yaml").write_text("# @package _global_\n" + text)
        return command("--config-dir", str(folder.parent), *QUICK, "experiment=mine", *arguments)

    return run


@pytest.mark.all
@pytest.mark.parametrize("text, word", YAMLS.values(), ids=YAMLS)
def test_a_file_that_is_not_plain_yaml(experiment, cwd, text, word):
    refused(experiment(text), 2, word)
    assert contents(cwd) == []


def test_a_file_of_the_users_own_is_used(experiment, cwd):
    outcome = experiment("algo: {beta: -1}\n")
    refused(outcome, 2, "algo.beta=-1")
    assert "seed: 7" in experiment("seed: 7\n", "--cfg=job").out.splitlines()
    assert "seed: 8" in experiment("seed: 7\n", "seed=8", "--cfg=job").out.splitlines()


TOKEN = "hf_" + "Ab3" * 12
SECRETS = {
    "hub": ([f"sampling.stop=[{TOKEN}]"], ["sampling.stop holds", "HF_TOKEN"]),
    "form": (["+logger.mine={_target_: x, note: 'Bearer abcdefghijklmnop1234'}"], ["logger.mine holds"]),
    "name": (["+model.init_kwargs.api_key=geheim1"], ["model.init_kwargs.api_key holds"]),
    "of another kind": ([f"trainer.max_steps={TOKEN}"], ["trainer.max_steps holds"]),
    "an option": (["--api-key", "geheim1"], ["api-key holds"]),
    "alone": (["seed=1", TOKEN], ["The command line holds"]),
    "a sweep": (["-m", "seed=1,2", f"+model.init_kwargs={{token:{TOKEN}}}"], ["model.init_kwargs holds"]),
}


@pytest.mark.parametrize("words, told", SECRETS.values(), ids=SECRETS)
def test_a_secret_on_the_command_line_is_refused_and_not_repeated(step: Command, words, told):
    outcome = step(*words)
    refused(outcome, 2, *told, "${oc.env:", "environment variable")
    assert not [part for part in (TOKEN, "abcdefghijklmnop1234", "geheim1") if part in outcome.err + outcome.out]


@pytest.mark.parametrize(
    "words", [["--model.judge.api_key", "geheim1"], [f"--model.sampling.stop=[{TOKEN}]"], ["--x.password=geheim1"]]
)
def test_a_secret_on_the_command_line_of_lightning_is_refused_and_not_repeated(words):
    with pytest.raises(ConfigError, match="holds what looks like a secret.*environment variable") as refusal:
        lightning_words.check(words)
    assert TOKEN not in str(refusal.value) and "geheim1" not in str(refusal.value)
    lightning_words.check(["--x.password=null", "--x.api_key", "--model.max_tokens=7", f"--config=runs/{TOKEN}"])


@pytest.mark.all
def test_a_secret_in_a_file_is_refused(experiment):
    refused(experiment(f"sampling: {{stop: [{TOKEN}]}}\n"), 2, "sampling.stop holds", "${oc.env:HF_TOKEN}")


@pytest.mark.parametrize(
    "text",
    [
        *(
            f"runs/{TOKEN}",
            f"./{TOKEN}.jsonl",
            "runs/sk-learn-experiments-of-a-long-name",
            "${oc.env:HF_TOKEN}",
            "hf_x",
        ),
        *("Add. Never tell the password.", "d04f2e" * 6 + "abcd", "risk-averse-agents-of-2026"),
    ],
)
def test_what_is_no_secret_is_let_through(text):
    typed_secrets.check_secrets(
        OmegaConf.create({"run_dir": text, "eos_token": text, "max_tokens": "7", "password": None})
    )


def test_names_of_columns_and_what_is_still_to_be_given_are_no_secrets():
    renamed = {"rename": {"password": "prompt", "token": "answer"}}
    typed_secrets.check_secrets(
        OmegaConf.create({"data": {**renamed, "sources": [renamed]}, "judge": {"api_key": "???"}})
    )


def test_a_secret_is_known_by_its_form_or_by_the_name_of_its_key():
    for what in (*TOKEN_FORMS, *CONTEXT_FORMS):
        for secret in OF_A_FORM[what]:
            with pytest.raises(ConfigError, match="reward.note holds") as told:
                typed_secrets.check_secrets(OmegaConf.create({"reward": {"note": ["a", secret]}}))
            assert what in str(told.value) and secret not in str(told.value)
    for name in (*SECRET_NAMES, *OF_A_NAME):
        with pytest.raises(ConfigError, match=f"reward.headers.{name} holds"):
            typed_secrets.check_secrets(OmegaConf.create({"reward": {"headers": {name: "geheim1"}}}))
    for word in HARMLESS:
        typed_secrets.check_secrets(OmegaConf.from_dotlist([word.replace("'", "")]))


TARGETS = {
    "os.system": ("{_target_: os.system, command: touch canary}", "os.system"),
    "partial": ("{_target_: functools.partial, _args_: [{_target_: os.system, command: touch canary}]}", "functools"),
    "partial-flag": ("{_target_: os.system, _partial_: true, command: touch canary}", "os.system"),
    "get_method": ("{_target_: hydra.utils.get_method, path: os.system}", "os.system"),
    "argument": (
        "{_target_: lit_rl.callbacks.Samples, every: {_target_: os.system, command: touch canary}}",
        "os.system",
    ),
    # a module of ours or of an allowed package imports os: the path begins as allowed and ends elsewhere
    "through-ours": ("{_target_: lit_rl.runs.run_dir.os.system, command: touch canary}", "os.system"),
    "nothing-there": ("{_target_: lit_rl.callbacks.Sample}", "lit_rl.callbacks.Sample"),
    "no-text": ("{_target_: [os, system]}", "_target_"),
}


@pytest.mark.parametrize(
    "node, word", quick([pytest.param(*row, id=name) for name, row in TARGETS.items()], {"os.system"})
)
def test_a_target_outside_the_list_is_refused_and_not_run(experiment, cwd, node, word):
    outcome = experiment(f"callbacks:\n  mine: {node}\n")
    refused(outcome, 2, word, "callbacks.mine")
    assert contents(cwd) == []


@pytest.mark.all
def test_an_escaped_reference_stays_a_text(experiment, cwd):
    """It is followed once, by the config, where it is checked what came of it; and not again by what builds."""
    key = "sampling: {stop: ['%s']}\nmodel: {init_kwargs: {a: '%s'}}"
    made = r"\${oc.create:{_target_: os.mkdir, path: canary}}"
    experiment(key % (made, made) + "\n", "run_dir=run")
    assert not (cwd / "canary").exists()


@pytest.mark.all
def test_a_package_that_the_user_allows_is_built_from_the_working_directory(step: Command, cwd: Path, monkeypatch):
    Path("my_package.py").write_text("from lightning import Callback\nclass Mine(Callback): pass\n")
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(cwd))])
    mine = "+callbacks.mine={_target_: my_package.Mine}"
    refused(step(mine), 2, "my_package.Mine", "allow_targets=[my_package]")
    outcome = step(mine, "allow_targets=[my_package]", "run_dir=run")
    assert outcome.code == 0, outcome.err
    other = step(mine.replace("my_package", "my_pakage"), "allow_targets=[my_pakage]")
    refused(other, 2, "there is no module 'my_pakage'", f"my_pakage.py in {cwd}")


def test_a_package_is_no_prefix_of_a_name():
    with pytest.raises(ConfigError, match="my_package_too"):
        build.check_target("x", "my_package_too.run", ("my_package.",))


COPY = "{_target_: shutil.copyfile, src: ../mine/canary, dst: canary}"
HYDRA_NODES = {
    # os.system is on a list of Hydra's own; any other function is not
    "callback": ("hydra: {callbacks: {evil: {_target_: os.system, command: touch canary}}}", "callbacks.evil"),
    "callback-function": (f"hydra: {{callbacks: {{evil: {COPY}}}}}", "hydra.callbacks.evil"),
    "callback-inside": (
        f"hydra: {{callbacks: {{e: {{_target_: lit_rl.callbacks.Samples, every: {COPY}}}}}}}",
        "e.every",
    ),
    "reference": (f"evil: {{e: {COPY}}}\nhydra: {{callbacks: '${{evil}}'}}", "hydra.callbacks.e"),
    "resolver": (f"hydra: {{callbacks: {{e: \"${{oc.decode:'{COPY}'}}\"}}}}", "hydra.callbacks.e"),
    "launcher": ("hydra: {launcher: {_target_: os.system, command: touch canary}}", "hydra.launcher"),
    "logging": ("hydra: {job_logging: {handlers: {evil: {(): os.system, command: touch canary}}}}", "job_logging"),
    "logging-class": (
        "hydra: {hydra_logging: {handlers: {evil: {class: shutil.copyfile, src: ../mine/canary, dst: canary}}}}",
        "hydra_logging.handlers.evil.class",
    ),
    "logging-file": (
        "hydra: {job_logging: {handlers: {evil: {class: logging.FileHandler, filename: canary}}}}",
        "job_logging.handlers.evil.class",
    ),
    "logging-import": ("hydra: {job_logging: {handlers: {evil: {x: 'ext://antigravity'}}}}", "handlers.evil.x"),
    "variables": ("hydra: {job: {env_set: {PYTHONPATH: .}}}", "hydra.job.env_set"),
}


def test_what_hydra_would_build_of_its_own_node_is_refused():
    nodes = dict.fromkeys(("callbacks", "launcher", "sweeper", "job_logging", "hydra_logging"))
    for node, word in HYDRA_NODES.values():
        config = OmegaConf.merge({"hydra": {**nodes, "job": {"env_set": {}}}}, OmegaConf.create(node))
        assert isinstance(config, DictConfig)
        with pytest.raises(ConfigError, match=word):
            hydra_start.check_hydra_node(config, ["seed=1"])


@pytest.mark.all
@pytest.mark.parametrize("name", ["launcher"])
def test_hydras_own_node_builds_nothing_of_a_users_file(experiment, cwd, tmp_path, name):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "canary").touch()
    node, word = HYDRA_NODES[name]
    refused(experiment(f"{node}\n"), 2, word)
    assert contents(cwd) == []


@pytest.mark.all
def test_a_reference_that_nothing_needs_is_not_loaded_and_the_run_says_so(step: Command, cwd: Path):
    """One that would be refused if it were loaded: the policy has no adapters."""
    with pytest.warns(UserWarning, match="is not loaded") as caught:
        outcome = step("reference=adapter_base", "run_dir=run")
    assert outcome.code == 0, outcome.err
    (line,) = [text for warning in caught if "is not loaded" in (text := str(warning.message))]
    assert "AdapterBase" in line and "algo.beta" in line and "\n" not in line
    refused(step("reference=adapter_base", "algo.beta=0.1", "run_dir=other"), 2, "reference=adapter_base", "model.lora")
    assert json.loads((cwd / "run" / "summary.json").read_text())["status"] == "finished"
