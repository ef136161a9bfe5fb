"""`data=verifiers` where the package is not installed: who wants it is told so before anything is loaded.

With the package: tests/agents.
"""

from __future__ import annotations

import importlib.util

import pytest

from lit_rl.core.errors import BackendError
from lit_rl.core.task_sets import VERIFIERS_COLUMN, VERIFIERS_SCORES, TaskRow, TaskSet
from lit_rl.data.tasks import VerifiersTasks
from lit_rl.rewards import Rewards, VerifiersScore

MISSING = importlib.util.find_spec("verifiers") is None
ROW = TaskRow(TaskSet.of("my_tasks", {"most": 3}), {"prompt": "1+1=", "answer": "2"})


@pytest.mark.skipif(not MISSING, reason="verifiers is installed")
def test_what_needs_the_package_says_how_it_is_installed() -> None:
    with pytest.raises(BackendError, match=r"pip install 'lit-rl\[verifiers\]'"):
        VerifiersTasks("my_tasks").train()
    with pytest.raises(BackendError, match=r"pip install 'lit-rl\[verifiers\]'"):
        VerifiersScore().check_columns({VERIFIERS_COLUMN: [ROW.text]})


def test_a_row_is_read_back() -> None:
    assert TaskRow.read(ROW.text) == ROW
    assert TaskSet.of("a", {"x": 1, "y": 2}) == TaskSet.of("a", {"y": 2, "x": 1})


def test_what_a_harness_gave_is_the_reward_and_needs_no_package() -> None:
    scores = [{"reward": 1.5, "rewards": {"right": 1.0, "brief": 1.0}, "metrics": {"turns": 2.0}}, None]
    columns = {VERIFIERS_COLUMN: [ROW.text] * 2, VERIFIERS_SCORES: scores}
    rewards = Rewards(VerifiersScore())
    rewards.check({VERIFIERS_COLUMN: [ROW.text]}, [VERIFIERS_SCORES])
    told = rewards.score([[], []], [[], []], columns)
    assert told.total[0] == 1.5 and told.total[1].isnan()
    assert told.metrics == {"verifiers/right": (1.0, 1), "verifiers/brief": (1.0, 1), "verifiers/turns": (2.0, 1)}
