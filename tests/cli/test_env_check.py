"""`lit-rl env-check`: is an environment fit to train on, without any weight being read or a file written."""

from __future__ import annotations

import time
from pathlib import Path

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
def test_a_fault_is_named_and_ends_with_an_exit_code(check):
    """Each finding by itself is tested in test_env_findings. What the policy says in the check can be given."""
    path = f"env.path={HERE}/faulty_games.py:Hashed"
    outcome = check(path, *GAME, "env_check.actions=[9,'5','5']")
    refused(outcome, 5, "not fit to train on", "in another process")
    wrong = {name for name, level in levels(outcome.out).items() if level == "WRONG"}
    assert wrong == {"in another process"}, outcome.out
    assert outcome.out.count("why:") >= 1 <= outcome.out.count("fix:")
    assert "⟦9<|im_end|>⟧" in outcome.out and "⟦5<|im_end|>⟧" in outcome.out


@pytest.mark.all
def test_tools_are_called_as_their_schemas_say(check):
    outcome = check(*TOOLS, "env.workers=2")
    assert outcome.code == 0, outcome.err
    assert levels(outcome.out)["tools"] == "ok"
    assert "⟦double(1)<|im_end|>⟧2⟦double()" in outcome.out


@pytest.mark.parametrize(
    ("settings", "code", "told"),
    [
        (["env=rollout_func", f"env.path={HERE}/small_tools.py:rollout"], 2, "a function makes whole rollouts"),
        ([*GAME, f"env.path={HERE}/faulty_games.py:shared_instance"], 2, "the same object twice"),
        ([*TOOLS, "reward=environment"], 2, "env= has none with a reward"),
    ],
)
def test_what_refuses_a_run_is_said_in_the_same_words(check, settings, code, told):
    refused(check(*settings), code, told)
