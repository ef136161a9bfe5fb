"""The commands of the pages that are not run compose, and the keys of docs/from-verl.md exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from composed_configs import tree_of
from doc_blocks import Block, blocks, table_rows
from doc_runs import SMALL, left_as_found

from lit_rl import cli
from lit_rl.cli import run_reports
from lit_rl.cli.aliases import expand_aliases
from lit_rl.core.speedups import DecodingSpeedups, ModelSpeedups

GUIDES = ("start.md", "how-to.md", "tutorials.md", "from-verl.md", "algorithms/README.md")
REFERENCE = (
    "commands.md",
    "generators.md",
    "hardware.md",
    "real-model.md",
    "reliability.md",
    "replay.md",
    "scale.md",
)
COMMAND = re.compile(r"\s*(lit-rl|python|make|srun) ")
VERL = ("Methods", "Batches", "Objective", "Sampling", "Model and devices", "Runs")
"""Headings of the tables of from-verl.md."""
RUN_ELSEWHERE = ("make", "pip", "source", "tensorboard")
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WHOLE = {"algo": "grpo", "experiment": "null"}
"""Groups that choose parts of others, with their defaults: what is composed together has the same of them."""
ANY_VALUE = ("run_dir", "seed", "ckpt_path", "task", "trainer.max_steps", "model.name", "data.path", "optimizer.lr")
"""Keys of which one value stands for all."""

SPEEDUPS = {"model": ModelSpeedups, "generator": DecodingSpeedups}


@dataclass
class Asked:
    """Words of a command line, as keys and values, and keys that must then be there."""

    words: dict[str, str]
    keys: list[str] = field(default_factory=list)

    def agrees(self, other: Asked) -> bool:
        """Whether one config can have both."""
        same = all(other.words.get(key, value) == value for key, value in self.words.items() if key not in ANY_VALUE)
        same &= all(self.words.get(key, plain) == other.words.get(key, plain) for key, plain in WHOLE.items())
        return same and not self.needs_default(other) and not other.needs_default(self)

    def needs_default(self, other: Asked) -> bool:
        """Whether a key here is one of a group of which only the other makes a choice."""
        names = [*self.words, *self.keys]
        under = {name.replace(".", "/")[: len(group) + 1] for name in names for group in other.words}
        alone = [group for group in other.words if "." not in group and group not in self.words]
        return any(f"{group}/" in under and group not in WHOLE for group in alone)


def of_one_process(words: list[str]) -> list[str]:
    """The command that a launcher starts several times; any other as it is."""
    words = words[1:] if words[0] == "srun" else words
    return ["python", *words[words.index("train.py") :]] if words[0] == "torchrun" else words


def write_files(found: list[Block], cwd: Path) -> None:
    for block in found:
        if block.file is not None:
            (cwd / block.file).parent.mkdir(parents=True, exist_ok=True)
            (cwd / block.file).write_text(block.text)


def check_light(command: str, typed: list[str]) -> None:
    """The words of a command that composes no config are ones that it takes."""
    if command == "compare":
        run_reports.folders_of(typed)  # it alone needs runs
    else:
        assert cli.run([command, *typed]) == 0, (command, typed)


def commands_of(document: Path, cwd: Path) -> Iterator[list[str]]:
    """What is composed of each command of a page; its scripts are run, and its files written, on the way."""
    found = blocks(document)
    write_files(found, cwd)
    for words in (words for block in found for words in block.commands):
        match of_one_process(words):
            case ["python", "train.py", "--config-dir", *_]:
                continue  # of the page's own files, with which a test below trains
            case ["python", "train.py", "-m", *overrides]:
                yield [word.split(",")[0] for word in overrides]
            case ["lit-rl", command, *typed] if command in cli.LIGHT:
                check_light(command, typed)
            case ["python", "train.py", *overrides]:
                yield overrides
            case ["lit-rl", command, *overrides]:
                assert command in cli.HYDRA, words
                yield overrides
            case ["python", script, *_] if (ROOT / script).is_file():
                continue  # of scripts/, whose tests run them; its options: test_script_options.py
            case ["python", script]:
                exec(compile((cwd / script).read_text(), script, "exec"), {})
            case [command, *_]:
                assert command in RUN_ELSEWHERE, f"{document.name} has a command that no test knows: {words}"


def lines_of_verl(document: Path) -> Iterator[Asked]:
    """What each line of the tables names on our side."""
    tables = {heading: table_rows(document, heading) for heading in VERL}
    assert all(tables.values()), [heading for heading, rows in tables.items() if not rows]
    for row in (row for rows in tables.values() for row in rows):
        named = re.findall(r"`([^`]+)`", row[1])
        assert named or row[1] in ("not built", "not needed"), row
        yield Asked(as_words([n for n in named if "=" in n]), [n for n in named if "=" not in n])


def as_words(overrides: list[str]) -> dict[str, str]:
    """Keys and values, after other tools' names were read as ours."""
    return dict(word.split("=", 1) for word in expand_aliases(overrides)[0])


@pytest.mark.all
def test_the_commands_of_the_guides_compose(root: Path, cwd: Path) -> None:
    """Those that agree in one config. What they do is tested by the pages that explain it."""
    asked: list[Asked] = list(lines_of_verl(root / "docs" / "from-verl.md"))
    for name in (*GUIDES, *REFERENCE):
        own = [Asked(as_words(words)) for words in commands_of(root / "docs" / name, cwd)]
        assert own, name
        asked += own
    together: list[Asked] = []
    for one in asked:
        home = next((other for other in together if one.agrees(other)), None)
        if home is None:
            together.append(home := Asked({}))
        home.words |= one.words
        home.keys += one.keys
    for one in together:
        with left_as_found():
            tree = tree_of(*(f"{key}={value}" for key, value in one.words.items()))
        for key in one.keys:
            group, _, switch = key.partition(".speedups.")
            if switch:  # a name of the mapping that the key may hold
                assert switch in SPEEDUPS[group].names(), (key, one.words)
                continue
            node = tree
            for name in key.split("."):
                assert name in node, (key, one.words)
                node = node[name]


@pytest.mark.all
def test_a_task_of_ones_own_trains_as_the_tutorials_write_it(root: Path, cwd: Path, train) -> None:
    """Its Python, its choice of `data=` and its command, with a step."""
    found = {name: blocks(root / "docs" / name) for name in (*GUIDES, *REFERENCE)}
    own = [
        (name, words[2:])
        for name, of_page in found.items()
        for words in (words for block in of_page for words in block.commands)
        if "--config-dir" in words
    ]
    assert [name for name, _ in own] == ["tutorials.md"]
    write_files(found["tutorials.md"], cwd)
    assert train(*own[0][1], *SMALL, "logger=none", "run_dir=run", "trainer.accelerator=cpu") == 0


@pytest.mark.all
def test_the_callback_of_the_how_to_watches_a_run(
    root: Path, cwd: Path, train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its file and its command, also before the first rollout is finished: it prints a completion and its reward."""
    page = blocks(root / "docs" / "how-to.md")
    write_files(page, cwd)
    (words,) = (words[2:] for block in page for words in block.commands if "watch_rewards" in str(words))
    split = "trainer.accumulate_grad_batches=2"
    assert train(*words, *SMALL, split, "logger=none", "run_dir=run", "trainer.accelerator=cpu") == 0
    rewards = [line.split()[0] for line in capsys.readouterr().out.splitlines() if re.match(r"[01]\.0 ", line)]
    assert rewards, "the callback printed nothing"


def test_a_block_of_commands_says_that_it_is_one() -> None:
    """What tests compose and run are blocks of bash; a command in a block of text would go unread."""
    unread = [
        block.text
        for page in PAGES
        for block in blocks(page)
        if block.language == "text" and all(COMMAND.match(line) for line in block.text.splitlines() if line)
    ]
    assert not unread


@pytest.mark.all
def test_the_runs_that_the_first_page_compares_can_be_compared(root, cwd, train, capsys, monkeypatch) -> None:
    """Its own commands, with a step each."""
    monkeypatch.setenv("COLUMNS", "200")
    trained: dict[str, list[str]] = {}
    said = ""
    found = blocks(root / "docs" / "start.md")
    write_files(found, cwd)
    for block in found:
        for words in block.commands:
            if words[:2] == ["python", "train.py"]:
                folder = next((word.partition("=")[2] for word in words if word.startswith("run_dir=")), "")
                trained[folder] = words[2:]
            elif words[0] == "python":
                exec(compile((cwd / words[1]).read_text(), words[1], "exec"), {})
            elif words[:2] == ["lit-rl", "compare"]:
                for each in words[2:]:
                    assert train(*trained[each], *SMALL, "logger=none", "trainer.accelerator=cpu") == 0, each
                capsys.readouterr()
                assert train(*words[1:]) == 0
                said = capsys.readouterr().out
    for decoding in ("greedy", "sampled at 1"):
        assert f"held-out, {decoding}: reward" in said
    assert "note:" not in said and "algo._target_" in said


def test_llms_txt_names_every_page(root: Path) -> None:
    text = (root / "docs" / "llms.txt").read_text()
    named = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): \S", text, re.M)
    pages = {path.relative_to(root / "docs").as_posix() for path in (root / "docs").rglob("*.md")}
    pages |= {f"../{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")}
    pages |= {f"../notebooks/{path.name}" for path in (root / "notebooks").glob("*.ipynb")}
    assert len(named) == len(set(named)) and set(named) == pages
