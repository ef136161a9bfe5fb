"""`lit-rl reward-test`: what the configured reward says of a few rows, without any weight being read."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_helpers import Command, refused, write_jsonl
from standin_judge import marked, standing_in_for_a_judge

from lit_rl.core.errors import DataError
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.models import LanguageModel
from lit_rl.rewards import Rewards
from lit_rl.runs.reward_test import reward_test


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("lit_rl.models.LanguageModel.load", load)


@pytest.fixture
def ask(command: Command, no_weights: None) -> Command:
    return lambda *arguments: command("reward-test", "trainer.accelerator=cpu", "logger=none", *arguments)


def rows(out: str) -> list[list[str]]:
    """The cells of the tables' lines."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]


def test_right_wrong_and_empty_completions_of_the_data(ask):
    outcome = ask("reward=combined")
    assert outcome.code == 0, outcome.err
    cells = rows(outcome.out)
    scored = [(kind, right, shape, total) for row, _, kind, _, right, shape, total in (c for c in cells if len(c) == 7)]
    expected = [("answer", "1", "0", "1"), ("boxed", "1", "0", "1"), ("wrong", "0", "0", "0"), ("empty", "0", "0", "0")]
    assert scored == expected * 4
    times = [c for c in cells if len(c) == 5]
    assert [(c[0], c[-1]) for c in times] == [("math_answer", "16 of 16"), ("regex_format", "16 of 16")]


@pytest.mark.all
def test_messages_own_completions_and_rows_that_no_function_applies_to(ask, tmp_path):
    prompt = [{"role": "user", "content": "Say \\[hi\\] [bold]!"}]
    data = [{"prompt": prompt, "completion": "<think>a</think>b", "answer": None}]
    data.append({"prompt": prompt, "completion": None, "answer": "b"})
    path = write_jsonl(tmp_path / "data.jsonl", data * 8)
    template = "model.chat_template=\"{% for m in messages %}{{ m['content'] }}{% endfor %}\""
    outcome = ask("data=jsonl", f"data.path={path}", "data.val_fraction=0", "reward=contains", template)
    assert outcome.code == 0, outcome.err
    cells = [c for c in rows(outcome.out) if len(c) == 6]
    assert cells[0] == ["0", "Say \\[hi\\] [bold]!", "completion", "<think>a</think>b", "none", "none"]
    assert [c[2:] for c in cells[3:7]] == [
        ["answer", "b", "1", "1"],
        ["boxed", "\\boxed{b}", "1", "1"],
        ["wrong", "something else", "0", "0"],
        ["empty", "", "0", "0"],
    ]


def test_a_judge_shows_its_verdicts_and_reasons(ask):
    why = "every sentence of it was compared with the request, word by word, twice, and found to be so"
    entries = {name: {"reason": why, "verdict": "yes"} for name in ("correct", "to_the_point")}
    said = json.dumps(entries | {"clear": {"reason": why, "verdict": 3}})
    settings = ["base_url={}", "model=m", "rubric=helpful"]
    with standing_in_for_a_judge() as server:
        server.answer = lambda body, number: (
            200,
            said if marked(body["messages"][0]["content"], "completion") else "?",
        )
        words = [f"reward.functions.judge.{each.format(server.url)}" for each in settings]
        outcome = ask("reward=judge", *words, "reward_test.rows=1")
    assert outcome.code == 0, outcome.err
    assert [c[4:] for c in rows(outcome.out) if len(c) == 6] == [["0.9", "0.9"]] * 3 + [["none", "none"]]
    told = " ".join(c[3] for c in rows(outcome.out) if len(c) == 4)
    assert told.split().count("correct:") == 3 and f"clear: 3 ({why})" in " ".join(told.split())
    assert "no verdict in the answer '?'" in " ".join(told.split())


MINE = """
functions:
  right: { _target_: hydra.utils.get_method, path: lit_rl.rewards.exact_match }
weights: { right: 2.0 }
timeout: 60
"""


@pytest.mark.parametrize("head", ["_target_: lit_rl.rewards.Rewards", "defaults: [/schemas/Rewards@_here_]"])
@pytest.mark.all
def test_a_yaml_of_ones_own(command, no_weights, cwd, head):
    (cwd / "mine" / "reward").mkdir(parents=True)
    (cwd / "mine" / "reward" / "mine.yaml").write_text(head + MINE)
    options, settings = ["--config-dir", "mine"], ["trainer.accelerator=cpu", "logger=none", "reward=mine"]
    weights = [*settings, "reward.timeout=20", "reward.weights.right=3.0"]
    for arguments in ([*options, *weights], [*weights, *options]):
        outcome = command("reward-test", *arguments)
        assert outcome.code == 0, outcome.err
        assert next(c[-2:] for c in rows(outcome.out) if len(c) == 6) == ["1", "3"]
    refused(command("reward-test", *options, *settings, "reward.tiemout=20"), 2, "tiemout")


@pytest.mark.all
def test_recipes_show_the_values_before_their_weights(ask, cwd):
    row = {"prompt": "a", "answer": "7", "source": "word_problems"}
    row["completion"] = "<think>.</think><answer>7</answer>"
    path = write_jsonl(cwd / "data.jsonl", [row] * 8)
    outcome = ask("data=jsonl", f"data.path={path}", "data.val_fraction=0", "reward=recipes", "reward_test.rows=1")
    assert outcome.code == 0, outcome.err
    (own, *_) = [c for c in rows(outcome.out) if len(c) == 8]
    assert own[4:] == ["none", "1", "1", "1.1"]


@pytest.mark.all
def test_rows_and_completions_are_keys(ask, cwd):
    outcome = ask("reward=contains", "reward_test.rows=1")
    assert len([c for c in rows(outcome.out) if len(c) == 6]) == 4, outcome.err
    path = write_jsonl(cwd / "mine.jsonl", [{"completion": "x", "row": 3}])
    outcome = ask("reward=contains", f"reward_test.completions={path}")
    assert [(c[0], c[3]) for c in rows(outcome.out) if len(c) == 6] == [("3", "x")], outcome.err


class TestFile:
    """Completions of a file, scored by a reward that logs."""

    @pytest.fixture
    def run(self, no_weights: None) -> Any:
        def right(completions, answer, log_extra):
            log_extra("size", [len(c) for c in completions])
            return [float(c == a) for c, a in zip(completions, answer)]

        data = RolloutDataModule(rows=[{"prompt": f"{n}+0=", "answer": str(n)} for n in range(40)], val_fraction=0)
        model = LanguageModel("tiny")
        module = SimpleNamespace(model=model, tokenizer=model.tokenizer, reward_functions=Rewards(right))
        strategy = SimpleNamespace(root_device=torch.device("cpu"))
        trainer = SimpleNamespace(is_global_zero=True, strategy=strategy)
        return SimpleNamespace(generating=module, data=data, trainer=trainer)

    def test_its_lines_are_scored(self, run, tmp_path, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "200")
        lines = [{"completion": "0"}, {"completion": "0"}, {"completion": "7", "row": 7}]
        assert reward_test(run, completions=str(write_jsonl(tmp_path / "mine.jsonl", lines))) == 0
        cells = [c for c in rows(capsys.readouterr().out) if len(c) == 7]
        assert [(c[0], c[1], c[4], c[6]) for c in cells] == [
            ("0", "0+0=", "1", "1"),
            ("1", "1+0=", "0", "1"),
            ("7", "7+0=", "1", "1"),
        ]

    def test_a_line_with_a_prompt_is_a_row_by_itself(self, run, tmp_path, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "200")
        lines = [
            {"prompt": "2+3=", "answer": "5", "completion": "5"},
            {"prompt": "1+1=", "answer": "2", "completion": "0"},
        ]
        assert reward_test(run, completions=str(write_jsonl(tmp_path / "mine.jsonl", lines))) == 0
        cells = [c for c in rows(capsys.readouterr().out) if len(c) == 7]
        assert [(c[1], c[3], c[4]) for c in cells] == [("2+3=", "5", "1"), ("1+1=", "0", "0")]

    WRONG = {
        "answer alone": ('{"completion": "a", "answer": "a"}', "columns of its own .answer. and no prompt"),
        "some prompts": ('{"completion": "a"}\n{"completion": "a", "prompt": "b"}', "all of them, or none"),
        "no json": ("{", "line 1 is no JSON"),
        "no completion": ('{"text": "a"}', "line 1: a line is"),
        "negative row": ('{"completion": "a"}\n{"completion": "a", "row": -1}', "line 2: row=-1"),
        "beyond": ('{"completion": "a", "row": 40}', "row 40 is asked for, and the data has 40 rows"),
        "empty": ("", "is empty"),
    }

    def test_what_is_wrong_with_it_is_said(self, run, tmp_path):
        for text, told in self.WRONG.values():
            (tmp_path / "mine.jsonl").write_text(text)
            with pytest.raises(DataError, match=told):
                reward_test(run, completions=str(tmp_path / "mine.jsonl"))
