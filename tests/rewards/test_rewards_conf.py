"""Every shipped conf/reward/*.yaml builds, binds and scores; the peer's own rewards run unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from trl.rewards.format_rewards import think_format_reward
from trl.rewards.other_rewards import get_soft_overlong_punishment

from lit_rl.rewards import RegexFormat, Rewards

FOLDER = Path(__file__).parents[2] / "conf" / "reward"
GOOD = r"<think>20 + 22</think><answer>\boxed{42}</answer>"
EXPECTED = {  # for the completions "42" and GOOD
    "exact_match": [1.0, 0.0],
    "contains": [1.0, 1.0],
    "regex_format": [0.0, 1.0],
    "length": [1.0, 1.0],
    "math": [1.0, 1.0],
    "combined": [1.0, 1.1],
    "function": [1.0, 1.0],
}


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_every_shipped_reward_builds_and_scores(name):
    config = OmegaConf.load(FOLDER / f"{name}.yaml")
    if name == "function":
        config.fn = ["lit_rl.rewards:math_answer", "lit_rl.rewards:contains"]
        config.weights = [0.75, 0.25]
    rewards = instantiate(config)
    assert isinstance(rewards, Rewards)
    rewards.bind(["answer"])
    scores = rewards.score(["20+22="] * 2, ["42", GOOD], {"answer": ["42", "42"]})
    assert scores.total.tolist() == pytest.approx(EXPECTED[name])


def test_the_pattern_in_the_config_is_the_default():
    config = OmegaConf.load(FOLDER / "regex_format.yaml")
    assert config.functions.regex_format.pattern == RegexFormat().pattern.pattern


def test_rewards_of_the_peer_run_unchanged():
    overlong = get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=4)
    rewards = Rewards({"format": think_format_reward, "overlong": overlong})
    rewards.bind(["answer"])
    completions = [[{"role": "assistant", "content": text}] for text in ("<think>a</think>b", "b")]
    ids = [[1] * 5, [1] * 8]
    scores = rewards.score([[], []], completions, {"answer": ["b", "b"]}, completion_ids=ids)
    assert scores.values.tolist() == [[1.0, 0.0], [0.0, -0.5]]
