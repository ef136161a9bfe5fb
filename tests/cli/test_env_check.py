"""`lit-rl env-check`: is an environment fit to train on, without any weight being read or a file written."""

from __future__ import annotations

import time
from pathlib import Path

import faulty_games
import pytest
from cli_helpers import Command, contents, refused

HERE = Path(__file__).parent
LIMITS = ["env.max_turns=3", "env.max_tokens=96", "env.max_observation_tokens=40", "sampling.max_new_tokens=16"]
GAME = ["env=environment", "reward=environment", "data=repeated", "data.task.prompt=go", *LIMITS]
TOOLS = ["env=tools", f"env.functions=[{HERE}/small_tools.py:double]", "env.parser=regex", *LIMITS]


@pytest.fixture
def check(command: Command, cwd: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    def load(*_: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("lit_rl.models.LanguageModel.load", load)

    def run(*arguments: str):
        outcome = command("env-check", "trainer.accelerator=cpu", *arguments)
        assert contents(cwd) == []
        return outcome

    return run


def levels(out: str) -> dict[str, str]:
    """The checks with what they said: ok, note or WRONG."""
    heads = [line.split(":")[0] for line in out.splitlines() if line.startswith(("ok ", "note ", "WRONG "))]
    return {head.split(maxsplit=1)[1]: head.split()[0] for head in heads}


CHECKS = {
    "calls",
    "the same again",
    "in another process",
    "side by side",
    "random generators",
    "left behind",
    "lengths",
    "pay for nothing",
    "time",
}


def test_the_shipped_game_is_fit_and_it_is_told_in_seconds(check):
    began = time.process_time()
    outcome = check("experiment=guess")
    assert time.process_time() - began < 10
    assert outcome.code == 0, outcome.err
    assert levels(outcome.out) == dict.fromkeys(CHECKS, "ok")
    assert "Fit to train on: nothing is wrong." in outcome.out
    assert "0..9=⟦0<|im_end|>⟧" in outcome.out


@pytest.mark.all
@pytest.mark.parametrize(
    ("game", "what"),
    [
        pytest.param("Dice", "random generators", marks=pytest.mark.exhaustive),
        pytest.param("Shared", "the same again", marks=pytest.mark.exhaustive),
        pytest.param("Clock", "the same again", marks=pytest.mark.exhaustive),
        ("Hashed", "in another process"),
        ("Generous", "pay for nothing"),
        pytest.param("Files", "left behind", marks=pytest.mark.exhaustive),
        ("NotANumber", "calls"),
    ],
)
def test_a_fault_is_named_and_ends_with_an_exit_code(check, game, what):
    """Each finding by itself is tested in test_env_findings."""
    outcome = check(f"env.path={HERE}/faulty_games.py:{game}", *GAME)
    refused(outcome, 5, "not fit to train on", what)
    told = levels(outcome.out)
    wrong = {name for name, level in told.items() if level == "WRONG"}
    assert wrong == ({what, "reward"} if game == "NotANumber" else {what}), outcome.out
    assert outcome.out.count("why:") >= 1 <= outcome.out.count("fix:")


@pytest.mark.all
@pytest.mark.parametrize("workers", [0, 2])
def test_tools_are_called_as_their_schemas_say(check, workers):
    outcome = check(*TOOLS, f"env.workers={workers}")
    assert outcome.code == 0, outcome.err
    assert levels(outcome.out)["tools"] == "ok"
    assert "⟦double(1)<|im_end|>⟧2⟦double()" in outcome.out


@pytest.mark.all
def test_what_the_policy_says_can_be_given(check):
    outcome = check("experiment=guess", "env_check.actions=[9,'5','5']")
    assert outcome.code == 0, outcome.err
    assert "0..9=⟦9<|im_end|>⟧<=⟦5<|im_end|>⟧" in outcome.out


@pytest.mark.parametrize(
    ("settings", "code", "told"),
    [
        (["env=none"], 2, "env=none"),
        (["env=rollout_func", f"env.path={HERE}/small_tools.py:rollout"], 2, "a function makes whole rollouts"),
        (["env=environment"], 2, "env.path"),
        ([*GAME, f"env.path={HERE}/faulty_games.py:shared_instance"], 2, "the same object twice"),
        ([*TOOLS, "env.parser=auto"], 2, "env.parser"),
        ([*TOOLS, "env.max_turns=0"], 2, "env.max_turns=0"),
        ([*TOOLS, "env.max_tokens=4000"], 2, "An episode may have"),
        ([*TOOLS, "reward=environment"], 2, "env= has none with a reward"),
        (["env=environment", f"env.path={HERE}/nothing.py:Game"], 2, "there is no file"),
    ],
)
def test_what_refuses_a_run_is_said_in_the_same_words(check, settings, code, told):
    refused(check(*settings), code, told)


def test_the_games_have_their_faults_and_nothing_else():
    made = faulty_games.Sound()
    assert made.reset(seed=3) == faulty_games.Sound().reset(seed=3) and made.step("win")[1] == 1.0
