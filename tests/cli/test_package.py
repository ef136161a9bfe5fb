"""The package as it is installed: a wheel, another directory, real processes."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from cli_helpers import QUICK, Command, metrics, refused
from omegaconf import OmegaConf

import lit_rl
from lit_rl.cli import HYDRA, LIGHT, help, listing
from lit_rl.cli import listing as completion
from lit_rl.cli.help import page

ROOT = Path(lit_rl.__file__).parents[1]
KEYS = [
    "model",
    "model.lora.r",
    "data.path",
    "reward",
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
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the checkout: setuptools leaves its traces beside what it builds."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("sdist")
    for name in ("lit_rl", "conf", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    done = python("-c", f"from setuptools.build_meta import build_sdist; build_sdist({str(target)!r})", cwd=source)
    assert done.returncode == 0, done.stderr
    (path,) = target.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist alone."""
    target = tmp_path_factory.mktemp("wheel")
    build = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(target)]
    done = python(*build, str(sdist), cwd=target)
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
    pages = {
        f"lit_rl/reports/templates/{name}"
        for name in below(ROOT / "lit_rl" / "reports" / "templates", ".html", ".css", ".js")
    }
    assert {"lit_rl/reports/templates/page.html", "lit_rl/reports/templates/runs.js"} < pages
    others = {
        "lit_rl/data/digits.csv.gz",
        "lit_rl/cli/schema_keys.yaml",
        "lit_rl/core/other_names.yaml",
        "lit_rl/reports/defaults.yaml",
        "lit_rl/rewards/rubrics/helpful.yaml",
        "lit_rl/py.typed",
    }
    assert names == conf | code | policies | pages | others
    assert wheel.stat().st_size < 4_500_000


@pytest.mark.all
def test_the_package_says_who_may_use_it_and_how_it_is_cited(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    told = email.message_from_bytes(archive.read(metadata))
    assert told["License-Expression"] == "Apache-2.0" and told["License-File"] == "LICENSE"
    assert "Typing :: Typed" in told.get_all("Classifier")
    citation = OmegaConf.load(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # what the format requires
    assert (citation.version, citation.license) == (told["Version"], told["License-Expression"])


@pytest.mark.all
def test_the_wheel_alone_trains_from_another_directory(wheel, tmp_path):
    site, here = tmp_path / "site", tmp_path / "here"
    here.mkdir()
    install = ["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    assert python(*install, cwd=here).returncode == 0
    lines = "import sys, lit_rl; sys.stderr.write(lit_rl.__file__); from lit_rl.cli import main; main()"
    done = python("-c", lines, "train", "debug=fdr", *QUICK, cwd=here, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    assert str(site) in done.stderr  # not the checkout
    assert list(here.iterdir()) == []  # fast_dev_run writes nothing
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "train/reward": 0.5}\n')
    done = python("-c", lines, "report", f"run_dir={tmp_path / 'run'}", cwd=here, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    assert "<script>'use strict'" in (tmp_path / "run" / "report.html").read_text(), "with its script"
    helped = python("-c", lines, "--help", cwd=here, PYTHONPATH=str(site))
    assert helped.stdout == help.overview()


class TestHelp:
    def test_fits_a_page(self):
        for text in (help.overview(), *map(help.of, help.COMMANDS)):
            lines = text.splitlines()
            assert len(lines) <= 32 and max(map(len, lines)) <= 120, text

    def test_names_the_keys_that_matter_and_every_command(self):
        for key in KEYS:
            assert f"  {key}=" in page()
        assert set(help.COMMANDS) == {*HYDRA, *LIGHT}
        assert all(f"\n  {name} " in help.overview() for name in help.COMMANDS)

    def test_every_key_of_a_command_is_one(self, command: Command, cwd):
        (cwd / "my_reward.py").write_text("def score(completions):\n    return [0.0] * len(completions)\n")
        values = {"model": "tiny", "data.path": "x.jsonl", "reward": "./my_reward.py:score", "run_dir": "run"}
        keys = {key for page in help.COMMANDS.values() for key, _ in page.keys} | {*KEYS}
        outcome = command("--cfg", "job", "data=jsonl", *(f"{key}={values.get(key, 7)}" for key in sorted(keys)))
        assert outcome.code == 0, outcome.err

    def test_alone_asks_for_help_and_a_command_has_its_own(self, command: Command, cwd):
        assert command().out == command("--help").out == help.overview()
        assert command("chat", "--help").out == help.of("chat") and command("algo=dpo", "-h").out == page()
        assert re.fullmatch(r"lit_rl \d\S*\n", command("--version").out)

    def test_lists_every_choice_with_its_first_line(self, command: Command, cwd):
        for group in {path.parent.relative_to(ROOT / "conf").as_posix() for path in (ROOT / "conf").rglob("*.yaml")}:
            if group not in (".", "lightning"):
                choices = listing.groups([ROOT / "conf"])[group]
                assert set(choices) == {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")}
                assert all(choices.values()), group
        assert "\n  dpo " in command("list", "algo").out and "(default: grpo)" in command("list", "algo").out
        listed = command("list", "algo").out
        page = (ROOT / "docs" / "algorithms" / "README.md").read_text().partition("<!-- index")[2]
        for table in page.split("\n### ")[1:7]:  # the same families
            title, names = table.partition("\n")[0], re.findall(r"^\| \[(\w+)\]", table, re.M)
            shown = listed.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
            assert sorted(re.findall(r"^  (\w+)", shown, re.M)) == sorted(names), title
        assert listed.splitlines()[3].startswith("  grpo ")
        refused(command("list", "aglo"), 2, "Did you mean 'algo'?")

    def test_lists_the_users_own(self, command: Command, cwd):
        (cwd / "mine" / "model").mkdir(parents=True)
        (cwd / "mine" / "model" / "own.yaml").write_text("# @package _global_\n# My own model\nname: x\n")
        listed = command("list", "model", "--config-dir", "mine").out.splitlines()
        assert any(line.split() == ["own", "My", "own", "model"] for line in listed)

    def test_lists_a_method_that_has_the_name_of_its_schema(self, monkeypatch, tmp_path):
        (tmp_path / "algo").mkdir()
        (tmp_path / "algo" / "mine.yaml").write_text("# My own\ndefaults:\n  - /schemas/Mine@_here_\n")
        monkeypatch.setattr(listing, "conf_folder", lambda: tmp_path)
        assert listing._families({"mine": "My own"}) == {"Your own": ["mine"]}

    def test_completes_words_in_bash(self, cwd):
        words = completion.candidates("algo=re", ["chat"])
        assert "algo=remax" in words and all(word.startswith("algo=re") for word in words)
        assert completion.candidates("ch", ["chat"]) == ["chat"]
        script = 'eval "$(lit-rl completion bash)"; COMP_LINE="lit-rl algo=rema"; COMP_POINT=${#COMP_LINE}; _lit_rl; '
        found = (
            'lit-rl() { "$PYTHON" -c "from lit_rl.cli import main; main()" "$@"; }; '
            + script
            + 'echo "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            ["bash", "-c", found], cwd=cwd, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True
        )
        assert done.stdout == "remax\n", done.stderr

    @pytest.mark.parametrize("shell", ["zsh", "fish"])
    def test_completes_words_in_other_shells(self, shell, command: Command, cwd):
        assert command("completion", shell).out == completion.SHELLS[shell]
        refused(command("completion", "tcsh"), 2, "lit-rl completion knows bash, zsh, fish, but got tcsh")
        if (there := shutil.which(shell)) is None:
            pytest.skip(f"{shell} is not installed")
        (cwd / "lit-rl").write_text(
            f"#!/bin/sh\nexec {sys.executable} -c 'from lit_rl.cli import main; main()' \"$@\"\n"
        )
        (cwd / "lit-rl").chmod(0o755)
        asks = {
            "fish": 'lit-rl completion fish | source; complete -C "lit-rl algo=rema"',
            "zsh": "compdef() { }; compadd() { print -l ${(P)@[-1]} }; PREFIX=algo=rema; "
            'eval "$(lit-rl completion zsh)"; _lit_rl',
        }
        env = {**os.environ, "PATH": f"{cwd}:{os.environ['PATH']}", "HOME": str(cwd)}
        plain = ["-f"] if shell == "zsh" else []
        done = subprocess.run([there, *plain, "-c", asks[shell]], env=env, capture_output=True, text=True)
        assert done.stdout.split() == ["algo=remax"], done.stderr

    def test_says_what_is_installed(self, command: Command, cwd):
        outcome = command("env")
        assert outcome.code == 0
        said = {line.split()[0]: line for line in outcome.out.splitlines() if line.strip()}
        assert {"lit_rl", "python", "devices", "torch", "vllm", "model"} <= set(said)
        assert "pip install 'lit-rl[vllm]'" in said["vllm"] or "not installed" not in said["vllm"]

    def test_answers_without_loading_what_is_slow_to_load(self, tmp_path):
        script = (
            "import sys; from lit_rl.cli import run; code = run(sys.argv[1:]);"
            "heavy = {'torch', 'lightning', 'hydra', 'transformers'} & set(sys.modules);"
            "sys.exit(str(heavy) if heavy else code)"
        )
        for arguments, said in (
            (["--help"], help.overview()),
            (["train", "-h"], page()),
            (["list", "debug"], "debug="),
        ):
            done = python("-c", script, *arguments, cwd=tmp_path)
            assert done.returncode == 0 and done.stdout.startswith(said), done.stderr


@pytest.mark.all
class TestSweep:
    def test_makes_one_folder_a_job_under_one_folder(self, command: Command, cwd):
        outcome = command("-m", *QUICK, "algo.group_size=8", "seed=1,2")
        assert outcome.code == 0, outcome.err
        (sweep,) = (cwd / "runs").iterdir()
        jobs = [sweep / "0", sweep / "1"]
        assert [json.loads((job / "summary.json").read_text())["status"] for job in jobs] == ["finished"] * 2
        assert [OmegaConf.load(job / "config.yaml").seed for job in jobs] == [1, 2]
        assert metrics(jobs[0])["train/grad_norm"] != metrics(jobs[1])["train/grad_norm"]
        assert "The sweep: 2 jobs, measured by val/reward" in outcome.out
        assert f"{sweep / 'sweep.html'}" in outcome.out and "LIT_RL_SWEEP" not in os.environ

    def test_goes_on_after_a_job_that_fails_and_says_so_at_the_end(self, command: Command, cwd):
        outcome = command("-m", *QUICK, "run_dir=mine", "algo.group_size=1,2")
        assert outcome.code == 2 and "algo.group_size=1" in outcome.err
        assert not (cwd / "mine" / "0").exists()
        assert json.loads((cwd / "mine" / "1" / "summary.json").read_text())["status"] == "finished"
        table = (cwd / "mine" / "sweep.md").read_text()
        assert re.search(r"\| 0 \| 1 \|.* failed, code 2 \| - \|", table)
        assert re.search(r"\| 1 \| 2 \|.* finished \| 1 \|", table)
        assert command("report", "run_dir=mine").code == 0, "the table of a sweep can be made again"


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
