"""An algorithm and a file: read as what it is, or refused with the line to type, where they do not fit."""

from __future__ import annotations

import inspect
import shlex

import pytest
from cli_helpers import Command, contents, refused, write_jsonl

from lit_rl.cli import listing
from lit_rl.cli.data_kinds import GROUPS, UNTYPED_REWARD
from lit_rl.rewards import exact_match

SUM = {"prompt": "1+1=", "answer": "2"}
ROWS = {
    "jsonl": SUM,
    "preferences": {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
    "texts": {"prompt": "1+1=", "completion": "2"},
    "steps": {"prompt": "1+1=", "completions": ["1+1", "2"], "labels": [True, True]},
}
"""A row for each data group of a file."""
WANTS = {"grpo": "jsonl", "dpo": "preferences", "kto": "preferences", "sft": "texts", "process_reward_model": "steps"}
WRONG = [
    ("grpo", "texts"),
    ("dpo", "jsonl"),
    ("kto", "steps"),
    ("sft", "preferences"),
    ("process_reward_model", "jsonl"),
]


def test_every_data_group_of_a_file_is_tried():
    assert set(ROWS) == set(GROUPS.values()) == set(WANTS.values())


@pytest.fixture
def mine(tmp_path) -> str:
    return f"data.path={write_jsonl(tmp_path / 'mine.jsonl', [SUM] * 4)}"


@pytest.mark.parametrize(("algo", "group"), WRONG)
def test_a_wrong_pair_is_refused_with_the_line_to_type(algo, group, command: Command, cwd, mine):
    outcome = command(f"algo={algo}", f"data={group}", mine)
    refused(outcome, 2, f"data={group} ", f"algo={algo} data={WANTS[algo]} {mine}")
    assert contents(cwd) == []


def test_other_commands_refuse_it_too(command: Command, cwd, mine):
    refused(command("algo=grpo", "data=preferences", mine, "task=eval"), 2, "data=jsonl")
    assert contents(cwd) == []


@pytest.mark.parametrize(("algo", "group"), [("dpo", "jsonl"), ("grpo", "preferences")])
def test_the_line_to_type_works(algo, group, command: Command, cwd, tmp_path):
    wanted = WANTS[algo]
    rows = [{**ROWS[wanted], "prompt": f"{n}+1="} for n in range(8)]
    path = write_jsonl(tmp_path / "mine.jsonl", rows)
    quick = ["trainer.max_steps=1", "trainer.accelerator=cpu", "logger=none", "run_dir=run"]
    err = command(f"algo={algo}", f"data={group}", f"data.path={path}", *quick).err
    words = shlex.split(err.splitlines()[-1])
    small = "prompts_per_rollout" if wanted == "jsonl" else "batch_size"
    outcome = command(*words[2:], f"data.{small}=2", "data.val_fraction=0.25")
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("group", ROWS)
def test_a_file_alone_chooses_data_and_algorithm(group, command: Command, cwd, tmp_path):
    rows = [{**ROWS[group], "prompt": f"{n}+1="} for n in range(8)]
    path, small = (
        write_jsonl(tmp_path / "mine.jsonl", rows),
        "prompts_per_rollout" if group == "jsonl" else "batch_size",
    )
    # The keys of the group that is chosen can be typed beside it.
    outcome = command(f"data.path={path}", f"data.{small}=2", "trainer.fast_dev_run=1", "trainer.accelerator=cpu")
    assert outcome.code == 0, outcome.err
    choice, algo = outcome.out.splitlines()[0], {"texts": "sft", "preferences": "dpo", "steps": "process_reward_model"}
    assert f"data={group} (columns prompt, " in choice
    assert (f"algo={algo.get(group)} " in choice) == (group in algo)
    assert contents(cwd) == []


def test_a_file_and_an_algorithm_choose_the_data_in_every_job_of_a_sweep(command: Command, cwd, tmp_path):
    path = write_jsonl(tmp_path / "mine.jsonl", [{**ROWS["preferences"], "prompt": f"{n}+1="} for n in range(36)])
    quick = ["trainer.fast_dev_run=1", "trainer.accelerator=cpu"]
    outcome = command("-m", "algo=dpo,sft", f"data.path={path}", *quick)  # a pair's chosen text can be imitated too
    assert outcome.code == 0, outcome.err
    assert "data=preferences (what the algorithm" in outcome.out and "data=texts (what the algorithm" in outcome.out


@pytest.mark.parametrize(
    ("algo", "row", "served"),
    [
        ("dpo", {**ROWS["preferences"], "input_ids": [1, 2]}, True),
        ("sft", {**ROWS["texts"], "label": "news"}, True),
        ("sft", {**ROWS["texts"], "label": "0"}, False),
    ],
)
def test_columns_beside_those_that_serve_change_nothing(algo, row, served, command: Command, cwd, tmp_path):
    """What the reader takes is not refused before it; a verdict it does not take."""
    path = write_jsonl(tmp_path / "mine.jsonl", [{**row, "id": n} for n in range(8)])
    quick = ["trainer.fast_dev_run=1", "trainer.accelerator=cpu", "data.batch_size=2", "data.val_fraction=0"]
    outcome = command(f"algo={algo}", f"data.path={path}", *quick)
    if served:
        assert outcome.code == 0, outcome.err
    else:
        refused(outcome, 2, "completions with a verdict", f"algo=kto data.path={path}")


@pytest.mark.parametrize("group", ["preferences", "steps"])
def test_a_file_of_another_kind_is_refused_to_a_method_that_answers_prompts(group, command: Command, cwd, tmp_path):
    path = write_jsonl(tmp_path / "mine.jsonl", [ROWS[group]] * 4)
    algo = {WANTS[algo]: algo for algo in ("dpo", "process_reward_model")}[group]
    outcome = command("algo=grpo", f"data.path={path}")
    refused(outcome, 2, "GRPO needs prompts to be answered", "the column 'answer'", f"algo={algo} data.path={path}")
    assert contents(cwd) == []


def test_with_its_own_columns_a_reward_answers_the_prompts_of_pairs(command: Command, cwd, tmp_path):
    quick = ["trainer.fast_dev_run=1", "trainer.accelerator=cpu", "data.prompts_per_rollout=2"]
    rows = [{**ROWS["preferences"], "prompt": f"{n}+1=", "answer": "2"} for n in range(8)]
    path = write_jsonl(tmp_path / "answered.jsonl", rows)
    assert command("algo=grpo", f"data.path={path}", *quick).code == 0
    path = write_jsonl(tmp_path / "pairs.jsonl", [{**row, "answer": None} for row in rows])
    assert command("algo=grpo", f"data.path={path}", "reward=length", *quick).code == 0


@pytest.mark.parametrize("group", ["texts", "preferences"])
def test_who_types_a_reward_means_prompts(group, command: Command, cwd, tmp_path):
    """Whatever other columns there are; without a prompt the run is refused, with the algorithm to type."""
    quick = ["trainer.fast_dev_run=1", "trainer.accelerator=cpu", "data.prompts_per_rollout=2"]
    rows = [{**ROWS[group], "prompt": f"{n}+1=", "answer": "2"} for n in range(8)]
    path = write_jsonl(tmp_path / "mine.jsonl", rows)
    outcome = command(f"data.path={path}", "reward=length", *quick)
    assert outcome.code == 0, outcome.err
    algo = "sft" if group == "texts" else "dpo"
    assert f"data=jsonl (prompts to be answered, as reward was typed; algo={algo} would" in outcome.out
    path = write_jsonl(tmp_path / "text.jsonl", [{"text": "1+1=2"}] * 8)
    refused(command(f"data.path={path}", "reward=length"), 2, "reward was typed", "Type algo=sft", "data.rename")


def test_the_reward_that_nobody_typed_needs_the_column_that_is_looked_for():
    name, column = UNTYPED_REWARD
    assert listing.default_choices()["reward"] == name
    assert column in inspect.signature(exact_match).parameters


@pytest.mark.all
@pytest.mark.parametrize(("algo", "named"), [("reward_model", True), ("sft", False)])
def test_typed_groups_that_a_method_does_not_take_are_named(command, recwarn, algo, named):
    """A reward model writes nothing, and SFT does in its validation."""
    typed = ["sampling.temperature=0.5", "eval.limit=4", "generator=hf"]
    assert command(f"algo={algo}", "logger=none", "trainer.fast_dev_run=true", *typed).code == 0
    lines = [str(each.message) for each in recwarn if "nothing reads what was typed" in str(each.message)]
    assert len(lines) == named
    if named:
        assert lines[0].startswith("sampling.temperature, eval.limit, generator: nothing reads")
