"""`data=reasoning_gym reward=reasoning_gym` from the command line, with the real package."""

from __future__ import annotations

import pytest
from cli_helpers import Command

pytest.importorskip("reasoning_gym")
TEMPLATE = "model.chat_template=\"{% for m in messages %}{{ m['content'] }}{% endfor %}\""
ROWS = ["data=reasoning_gym", "data.task.train_rows=12", "data.task.val_rows=4"]


def test_a_step_is_learned_and_the_generators_scorer_is_the_reward(step: Command, command: Command) -> None:
    outcome = step(*ROWS, "reward=reasoning_gym", "data.task.name=leg_counting", TEMPLATE)
    assert outcome.code == 0, outcome.err
    rewards = command("reward-test", "logger=none", *ROWS, "reward=reasoning_gym", TEMPLATE)
    assert rewards.code == 0 and "reasoning_gym" in rewards.out, rewards.err


def test_a_generator_that_is_none_is_a_config_error_before_weights_load(step: Command) -> None:
    outcome = step(*ROWS, "reward=reasoning_gym", "data.task.name=chain_sun", TEMPLATE)
    assert outcome.code == 2 and "data.task.name='chain_sun'" in outcome.err and "chain_sum" in outcome.err
