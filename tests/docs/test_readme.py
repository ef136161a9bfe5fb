"""What README.md and docs/ tell people to type works: files are written, commands run in one small step, in order."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from composed_configs import tree_of
from doc_blocks import Block, blocks, table_rows
from doc_runs import SMALL, few_rows, left_as_found

from lit_rl.cli.aliases import expand_aliases
from lit_rl.core import errors

Train = Callable[..., int]

OTHER_COMMANDS = ("make", "source", "tensorboard")
PROCESSES = ("strategy=ddp", "strategy=fsdp")
"""Runs of several processes are composed here; tests/runs/test_dist.py runs them."""
SERVER = "generator=vllm_server"
"""So are runs and servers of vLLM, and runs with a judge at an address; tests/engines and tests/rewards run them."""


def documents(root: Path) -> list[Path]:
    return [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]


def shipped_models(root: Path) -> set[str]:
    """Choices of `model=` that are on the hub and so not at hand."""
    return {f"model={path.stem}" for path in (root / "conf" / "model").glob("*.yaml")} - {"model=tiny", "model=local"}


def prepare(cwd: Path, found: list[Block], root: Path) -> None:
    """The files of a document, the repository's conf, and pairs and a model where the examples say that they are."""
    for block in found:
        if block.file is not None:
            target = cwd / block.file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text)
    if not (cwd / "pairs.jsonl").exists():
        pairs = ({"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": f"{n}"} for n in range(40))
        (cwd / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    if not (cwd / "chats.jsonl").exists():
        said = ({"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"})
        (cwd / "chats.jsonl").write_text(f"{json.dumps({'messages': said})}\n" * 40)
    (cwd / "conf").symlink_to(root / "conf")
    (cwd / "path" / "to" / "a").mkdir(parents=True)
    (cwd / "path" / "to" / "a" / "model").symlink_to(root / "lit_rl" / "models" / "tiny")


def small(words: list[str], number: int) -> list[str]:
    """The same command with few steps and its own folder, where it names none."""
    if {"--help", "--cfg"} & set(words):
        return words
    more = [*SMALL, *few_rows(words)]
    if not any(word.startswith("run_dir=") for word in words):
        more.append(f"run_dir=run_{number}")
    if not any(word.startswith("logger=") for word in words):
        more.append("logger=none")
    if any(word.endswith("=val/reward") for word in words):
        more.append("trainer.val_check_interval=1")  # what is monitored has to be measured
    if any(word.startswith("scheduler.warmup_steps=") for word in words):
        more.append("scheduler.warmup_steps=1")  # one that is longer than the run is refused
    if "debug=profile" in words:
        more.append("profile.steps=[0,1]")  # and so are steps behind the last one
    return [*words, *more]


def composes(overrides: list[str]) -> None:
    """The config is sound, as far as it can be known without a network or a second process."""
    with left_as_found():
        tree_of(*expand_aliases(overrides)[0])


@pytest.mark.all
def test_the_commands_of_the_recipes_compose(root: Path, cwd: Path) -> None:
    """With models of their own they take hours: no test runs them."""
    found = blocks(root / "docs" / "recipes.md")
    prepare(cwd, found, root)
    typed = [words for block in found for words in block.commands]
    commands = [words[2:] for words in typed if words[:2] in (["python", "train.py"], ["lit-rl", "plan"])]
    plain_ones = [words for words in commands if not any(word.startswith("-") for word in words)]
    assert plain_ones
    for overrides in plain_ones:
        composes(overrides)


RUN = [
    "README.md",
    "docs/agents.md",
    "docs/vision.md",
    "docs/rewards.md",
    "docs/data.md",
    "docs/datasets.md",
    "docs/configuration.md",
]
"""Documents whose commands are run."""


@pytest.mark.all
@pytest.mark.parametrize("name", RUN)
def test_the_commands_of_a_document_run(name: str, root: Path, cwd: Path, train: Train) -> None:
    found = blocks(root / name)
    prepare(cwd, found, root)
    away, ran = shipped_models(root), 0
    for number, words in enumerate(words for block in found for words in block.commands):
        line = " ".join(words)
        match words:
            case ["python", "train.py", *overrides] if (
                away & set(words) or {*PROCESSES, SERVER} & set(words) or "=owner/" in line or ".base_url=" in line
            ):
                composes(overrides)
            case ["python", "train.py", *overrides]:
                assert train(*small(overrides, number)) == 0, line
                ran += 1
            case ["lit-rl", "serve", *overrides]:
                composes(overrides)
            case ["lit-rl", "fit", *arguments] if ".base_url=" in line:
                assert train("fit", *arguments, "--print_config") == 0, line
            case ["lit-rl", "fit", *arguments]:
                assert train("fit", *arguments, "--trainer.max_steps=1", "--trainer.limit_val_batches=1") == 0, line
            case ["lit-rl", "reward-test" | "data-check" | "env-check" | "transcripts" | "eval" as task, *overrides]:
                assert train(task, *overrides) == 0, line
            case [command, *_]:
                assert command in OTHER_COMMANDS, f"{name} has a command that no test knows: {line}"
    assert ran > 0


@pytest.mark.all
def test_the_python_of_the_page_of_agents_runs(root: Path, cwd: Path) -> None:
    scripts = [
        block.text for block in blocks(root / "docs" / "agents.md") if block.language == "python" and not block.file
    ]
    assert scripts
    for text in scripts:
        names: dict = {}
        exec(text, names)
        assert names["module"].env is (names.get("game") or names["tools"])


@pytest.mark.all
def test_the_python_of_the_readme_runs(root: Path, cwd: Path) -> None:
    scripts = [block.text for block in blocks(root / "README.md") if block.language == "python" and not block.file]
    assert scripts
    for text in scripts:
        shorter, changed = re.subn(r"max_steps=\d+", "max_steps=1, limit_val_batches=1", text)
        assert changed == 1
        with left_as_found():
            names: dict = {}
            exec(shorter, names)
            assert names["trainer"].global_step == 1


def test_every_make_target_that_is_named_exists(root: Path) -> None:
    listed = re.findall(r"^([a-z0-9-]+):[^=]", (root / "Makefile").read_text(), re.M)
    targets = set(listed)
    assert len(listed) == len(targets), "a target is there twice"
    help_page = subprocess.run(["make", "help"], cwd=root, capture_output=True, text=True, check=True)
    assert not help_page.stderr and targets == set(re.findall(r"^  make (\S+)", help_page.stdout, re.M))
    named = {target for path in documents(root) for target in re.findall(r"\bmake ([a-z0-9-]+)\b", path.read_text())}
    commands = {
        words[1] for path in documents(root) for block in blocks(path) for words in block.commands if words[0] == "make"
    }
    assert commands <= targets
    assert {"demo", "test", "setup", "format", "test-slow"} <= named & targets


def test_links_between_documents_lead_somewhere(root: Path) -> None:
    for path in documents(root):
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            if not target.startswith("http") and not target.endswith(".png"):
                assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_exit_codes_are_those_of_the_errors(root: Path) -> None:
    rows = [row[0] for row in table_rows(root / "README.md") if re.fullmatch(r"[\d, ]+", row[0])]
    told = {int(code) for cell in rows for code in cell.split(",")}
    kinds = [kind for kind in errors.LitRLError.__subclasses__() if kind.__module__ == errors.__name__]
    signals = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1  # the last is Slurm's
    assert told == {0, *(errors.SIGNALLED + number for number in signals), *(kind.exit_code for kind in kinds)}
