"""The package as it is installed: a wheel, another directory, real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from cli_helpers import QUICK, Command, metrics

import lit_rl
from lit_rl.cli.help import page

ROOT = Path(lit_rl.__file__).parents[1]
KEYS = [
    "model.name",
    "model.lora.r",
    "data.path",
    "reward.fn",
    "algo.group_size",
    "data.prompts_per_rollout",
    "optimizer.lr",
    "sampling.max_new_tokens",
    "trainer.max_steps",
    "run_dir",
]


def python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A new interpreter that never reaches for a hub."""
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the checkout: setuptools leaves its traces beside what it builds."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("lit_rl", "conf", "pyproject.toml", "README.md"):
        (source / name).symlink_to(ROOT / name)
    build = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(target), "."]
    done = python(*build, cwd=source)
    assert done.returncode == 0, done.stderr
    (path,) = target.glob("*.whl")
    return path


def below(folder: Path, *suffixes: str) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and (not suffixes or path.suffix in suffixes)
    }


@pytest.mark.all
def test_the_wheel_holds_everything_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    conf = {f"lit_rl/conf/{name}" for name in below(ROOT / "conf", ".yaml", ".py")}
    code = {f"lit_rl/{name}" for name in below(ROOT / "lit_rl", ".py")}
    policies = {
        f"lit_rl/models/{policy}/{name}"
        for policy in ("tiny", "digits")
        for name in below(ROOT / "lit_rl" / "models" / policy)
    }
    assert {"lit_rl/models/tiny/model.safetensors", "lit_rl/models/digits/model.safetensors"} < policies
    assert len(conf) > 50
    assert names == conf | code | policies | {"lit_rl/data/digits.csv.gz", "lit_rl/py.typed"}
    assert wheel.stat().st_size < 4_000_000


@pytest.mark.all
def test_the_wheel_alone_trains_from_another_directory(wheel, tmp_path):
    site, here = tmp_path / "site", tmp_path / "here"
    here.mkdir()
    zipfile.ZipFile(wheel).extractall(site)  # what `pip install --target` does with a pure wheel
    lines = "import sys, lit_rl; sys.stderr.write(lit_rl.__file__); from lit_rl.cli import main; main()"
    done = python("-c", lines, "train", "debug=fdr", *QUICK, cwd=here, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    assert str(site) in done.stderr  # not the checkout
    assert list(here.iterdir()) == []  # fast_dev_run writes nothing
    helped = python("-c", lines, "--help", cwd=here, PYTHONPATH=str(site))
    assert helped.stdout == page()


class TestHelp:
    def test_fits_a_page(self):
        lines = page().splitlines()
        assert len(lines) <= 75 and max(map(len, lines)) <= 120

    def test_names_every_group_with_its_choices_and_the_keys_that_matter(self):
        text = page()
        for key in KEYS:
            assert f"  {key}=" in text
        for path in (ROOT / "conf").rglob("*.yaml"):
            if path.parent != ROOT / "conf" and "lightning" not in path.parts:
                assert path.stem in text.replace(",", " ").split(), path

    def test_answers_without_loading_what_is_slow_to_load(self, tmp_path):
        script = (
            "import sys; from lit_rl.cli import run; code = run(sys.argv[1:]);"
            "heavy = {'torch', 'lightning', 'hydra', 'transformers'} & set(sys.modules);"
            "sys.exit(str(heavy) if heavy else code)"
        )
        for argument in ("--help", "-h"):
            done = python("-c", script, argument, cwd=tmp_path)
            assert done.returncode == 0 and done.stdout == page(), done.stderr

    def test_every_key_that_matters_is_one(self, command: Command, cwd):
        (cwd / "my_reward.py").write_text("def score(completions):\n    return [0.0] * len(completions)\n")
        values = {"model.name": "tiny", "data.path": "x.jsonl", "reward.fn": "./my_reward.py:score", "run_dir": "run"}
        groups = ["model=local", "data=jsonl", "reward=function"]
        outcome = command("--cfg", "job", *groups, *(f"{key}={values.get(key, 7)}" for key in KEYS))
        assert outcome.code == 0, outcome.err


class TestConfigOnTheScreen:
    def test_is_the_whole_config(self, command: Command, cwd):
        outcome = command("--cfg", "job", "algo.group_size=5")
        assert outcome.code == 0, outcome.err
        assert "  group_size: 5" in outcome.out and "run_dir: null" in outcome.out
        assert list(cwd.iterdir()) == []

    def test_refuses_an_unknown_key(self, command: Command, cwd):
        assert command("--cfg", "job", "algo.group_sise=5").code == 2


@pytest.mark.all
class TestSweep:
    def test_makes_one_folder_a_job_under_one_folder(self, command: Command, cwd):
        outcome = command("-m", *QUICK, "algo.group_size=8", "seed=1,2")
        assert outcome.code == 0, outcome.err
        (sweep,) = (cwd / "runs").iterdir()
        jobs = [sweep / "0", sweep / "1"]
        assert [json.loads((job / "summary.json").read_text())["status"] for job in jobs] == ["finished"] * 2
        assert [f"\nseed: {seed}\n" in (job / "config.yaml").read_text() for seed, job in enumerate(jobs, 1)] == [
            True
        ] * 2
        assert metrics(jobs[0])["train/grad_norm"] != metrics(jobs[1])["train/grad_norm"]

    def test_goes_into_the_folder_that_the_user_names(self, command: Command, cwd):
        outcome = command("-m", *QUICK, "run_dir=mine", "algo.group_size=2,4")
        assert outcome.code == 0, outcome.err
        assert [(cwd / "mine" / name / "hf").is_dir() for name in ("0", "1")] == [True, True]

    def test_goes_on_after_a_job_that_fails_and_says_so_at_the_end(self, command: Command, cwd):
        outcome = command("-m", *QUICK, "run_dir=mine", "algo.group_size=1,2")
        assert outcome.code == 2 and "algo.group_size=1" in outcome.err
        assert not (cwd / "mine" / "0").exists()
        assert json.loads((cwd / "mine" / "1" / "summary.json").read_text())["status"] == "finished"


@pytest.mark.all
def test_import_is_light_and_touches_neither_network_nor_gpu(tmp_path):
    script = """
import socket, sys
def refuse(*arguments): raise AssertionError(f"the network: {arguments}")
socket.socket.connect = socket.getaddrinfo = refuse
import lit_rl
assert not {"torch", "lightning", "transformers"} & set(sys.modules)
import lit_rl.algorithms, lit_rl.callbacks, lit_rl.data, lit_rl.models, lit_rl.rewards
import torch
assert not torch.cuda.is_initialized()
assert not [name for name in ("peft", "bitsandbytes", "datasets", "pandas", "trl") if name in sys.modules]
"""
    done = python("-c", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
