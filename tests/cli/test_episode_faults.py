"""What goes wrong while an episode goes on: whole runs of `train.py` with their exit code, and what is said of it.

One of each way to end; what exactly is answered or unscored is tested at the objects, in tests/environments. What the
policy does wrong is answered, and the run goes on. What the environment does wrong is unscored, or ends the run. The
policy of these runs says one text in its first turn, and nothing in the second.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from cli_helpers import Command, Outcome, metrics, refused
from small_models import save_speaker
from tiers import quick

HERE = Path(__file__).parent
FILE = f"{HERE}/faulty_episodes.py"
NAMES = ("double", "hangs", "counts")
TOOLS = [
    *("env=tools", "env.parser=hermes", f"env.functions=[{','.join(f'{FILE}:{name}' for name in NAMES)}]"),
    *("reward=function", f"reward.fn={FILE}:paid"),
]
RUN = [
    *("model=local", "data=repeated", "data.task.prompt=go", "data.prompts_per_rollout=1", "env.max_turns=2"),
    *(
        "env.max_tokens=160",
        "env.max_observation_tokens=80",
        "sampling.max_new_tokens=80",
        "trainer.limit_val_batches=0",
    ),
]


def call(name: str, **arguments: Any) -> str:
    """As Hermes writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def game(name: str) -> list[str]:
    return ["env=environment", f"env.path={FILE}:{name}", "reward=environment"]


def outcome_of(step: Command, cwd: Path, says: str, *overrides: str) -> Outcome:
    """One step of two episodes."""
    model = save_speaker(cwd.parent / "speaker", "go", says)
    return step(*RUN, f"model.name={model}", *overrides, "run_dir=run")


def ran(step: Command, cwd: Path, says: str, *overrides: str) -> dict[str, Any]:
    """The first episode of a run that does not fail; the second is the same."""
    outcome = outcome_of(step, cwd, says, *overrides)
    assert outcome.code == 0 and "Traceback" not in outcome.err, outcome.err
    first, other = pyarrow.parquet.read_table(cwd / "run" / "samples" / "step_00000000.parquet").to_pylist()
    assert first["messages"] == other["messages"]
    return first | {"messages": json.loads(first["messages"])}


# What the policy says, what it is told, settings, and whether its one call could not be read.
CALLS: dict[str, tuple[str, str, list[str], int]] = {
    "unknown": (call("triple", a=1), "error: there is no tool 'triple'", [], 0),
    "cut": (call("double", a=1), "not closed by </tool_call>", ["sampling.max_new_tokens=30"], 1),
}


@pytest.mark.parametrize("case", quick(CALLS, {"unknown"}))
def test_what_the_policy_says_wrongly_is_answered_and_counted(step: Command, cwd: Path, case: str) -> None:
    says, told, settings, unreadable = CALLS[case]
    episode = ran(step, cwd, says, *TOOLS, *settings)
    answer = episode["messages"][1]["content"]
    assert told in answer and "Traceback" not in answer and ".py" not in answer
    assert (episode["failed_calls"], episode["unreadable_calls"]) == (1, unreadable)
    seen = metrics(cwd / "run")
    assert seen["train/tools/failure_frequency"] == 1
    assert seen["train/tools/parse_failures"] == unreadable
    assert seen["train/env/failed"] == 0 and seen["train/reward"] == 1.0
    assert episode["end"] == "answered"
    read = [each for each, policy in zip(episode["tokens/ids"], episode["tokens/by_policy"]) if not policy]
    assert (258 in read) == (case == "cut"), "the end of a turn is read where the turn lacks it, and only there"


FAILS: dict[str, tuple[str, list[str], str, str]] = {
    "worker": (call("hangs"), [*TOOLS, "env.step_timeout=0.3", "env.workers=1"], "timeout", "took longer"),
    "raises": ("1", game("Raises"), "failed", "ConnectionError: the server of the game is gone"),
}


@pytest.mark.parametrize("case", quick(FAILS, {"raises"}))
def test_what_the_environment_does_wrongly_is_unscored(step: Command, cwd: Path, case: str) -> None:
    """Here a whole group, so nothing is learned."""
    says, settings, end, error = FAILS[case]
    episode = ran(step, cwd, says, *settings, "env.max_failed=1")
    assert episode["end"] == end and error in episode["episode_error"]
    seen = metrics(cwd / "run")
    assert (seen["train/env/failed"], seen["train/env/timeouts"]) == (float(end == "failed"), float(end == "timeout"))
    assert seen["train/grad_norm"] == 0


ENDS: dict[str, tuple[list[str], int, list[str]]] = {
    "not_finite": (game("NotANumber"), 4, ["NotANumber.step in turn 0 returned the reward nan", "not finite"]),
    "too_many": (game("Raises"), 5, ["2 of 2 episodes failed", "env.max_failed=0.1", "ConnectionError"]),
}


@pytest.mark.parametrize("case", quick(ENDS, {"not_finite"}))
def test_what_ends_the_run_says_whose_fault_it_is(step: Command, cwd: Path, case: str) -> None:
    settings, code, words = ENDS[case]
    refused(outcome_of(step, cwd, "1", *settings), code, *words)


@pytest.mark.all
def test_an_engine_that_is_lost_in_the_middle_saves_the_run_and_no_reply(
    step: Command, cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on from its checkpoint. Replies that a journal holds are not asked for again.

    An engine that comes back by itself is vLLM's: tests/engines/test_engine_turns.py.
    """
    monkeypatch.syspath_prepend(str(HERE))
    asked = cwd.parent / "asked"
    monkeypatch.setenv("ASKED", str(asked))
    engine = ["generator._target_=faulty_episodes.DiesInTheMiddle", "allow_targets=[faulty_episodes]"]
    # One plain function: beside an async one, an episode may end the run before the other was answered.
    plain = f"env.functions=[{FILE}:counts]"
    run = [*TOOLS, plain, *engine, "trainer.max_steps=2", "env.journal=true"]
    monkeypatch.setenv("ENGINE_DIES", "1")
    died = outcome_of(step, cwd, call("counts"), *run)
    refused(died, 5, "the engine died: its last words", keeps="run")
    assert asked.read_text().count("asked") == 2 + 2, "of two episodes in each rollout"
    monkeypatch.delenv("ENGINE_DIES")
    ran(step, cwd, call("counts"), *run, "ckpt_path=last")
    assert asked.read_text().count("asked") == 4
