"""Every shipped conf/reward/*.yaml composes, builds, binds and scores; the peer's own rewards run unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from composed_configs import config_of
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from trl.rewards.format_rewards import think_format_reward
from trl.rewards.other_rewards import get_soft_overlong_punishment

from lit_rl.cli.build import build, prune
from lit_rl.core.errors import ConfigError
from lit_rl.core.task_sets import ReasoningGymProblem
from lit_rl.rewards import (
    GroupJudge,
    JudgeReward,
    ProcessRewardModel,
    RegexFormat,
    RemoteReward,
    RewardModel,
    Rewards,
)

FOLDER = Path(__file__).parents[2] / "conf" / "reward"
SHIPPED = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != "none")
GOOD = r"<think>20 + 22</think><answer>\boxed{42}</answer>"
EXPECTED = {  # for the completions "42" of two tokens and GOOD of eleven, with room for ten
    "exact_match": [1.0, 0.0],
    "contains": [1.0, 1.0],
    "regex_format": [0.0, 1.0],
    "reasoning_format": [0.0, 1.0],
    "length": [1.0, 1.0],
    "math": [0.0, 1.0],
    "math_answer": [1.0, 1.0],
    "combined": [1.0, 1.1],
    "function": [1.0, 1.0],
    "soft_overlong": [0.0, -1.0],
    "cosine_length": [0.5 + 0.25 * (1 + 0.8090169943749475), 0.5],
    "repetition": [0.0, -8 / 9],
    "code": [0.0, 0.0],
    "recipes": [1.0, 1.1],
    "joint": [1.0, 1.0],
    "environment": [1.0, 0.25],
    "environment_turns": [1.0, 0.25],
    "reasoning_gym": [1.0, 0.0],  # its scorer gives a part to an answer with the right one inside, which is not paid
    "verifiers": [1.0, 0.25],
}
ASKS_ELSEWHERE = {"reward_model": RewardModel, "process_reward_model": ProcessRewardModel, "remote": RemoteReward}
ASKS_ELSEWHERE |= {"judge": JudgeReward, "judge_group": GroupJudge}
VALUES = {
    "function": ["reward.fn=[lit_rl.rewards:math_answer,lit_rl.rewards:contains]", "reward.weights=[0.75,0.25]"],
    "joint": ["reward.joint=lit_rl.rewards:contains"],
    "code": ["reward.functions.code_execution.allow_execution=true"],
    "reward_model": ["reward.functions.reward_model.name=owner/model"],
    "process_reward_model": ["reward.functions.process_reward_model.name=owner/model"],
    "judge": [f"reward.functions.judge.{each}" for each in ("base_url=https://h/v1", "model=m", "rubric=helpful")],
    "judge_group": [f"reward.functions.judge_group.{each}" for each in ("base_url=https://h/v1", "model=m")],
    "remote": ["reward.functions.remote.urls=[https://rewards.example/score]"],
}
TWO_DIGITS = {"max_terms": 2, "min_digits": 2, "max_digits": 2}
COLUMNS = {
    "answer": ["42", "42"],
    "episodes": [{"reward": 1.0, "turn_rewards": []}, {"reward": 0.25, "turn_rewards": [0.25, None, 0.5], "turns": 3}],
    "source": ["sums", "word_problems"],
    "tests": ["assert True", "assert True"],
    "reasoning_gym": [ReasoningGymProblem("chain_sum", TWO_DIGITS, seed=0, size=5000, index=157).text] * 2,  # 30 + 12
    "verifiers": ["a task"] * 2,
    "verifiers_scores": [{"reward": reward, "rewards": {}, "metrics": {}} for reward in (1.0, 0.25)],  # of a harness
}


@pytest.fixture
def reward() -> Callable[..., Rewards]:
    """`reward("math")` is what `train.py reward=math` builds."""

    def made(name: str, *overrides: str) -> Rewards:
        config = config_of(f"reward={name}", "sampling.max_new_tokens=10", *overrides)
        return build(OmegaConf.to_container(config.reward, resolve=True))

    return made


@pytest.mark.filterwarnings("ignore:CodeExecution")
@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_reward_builds_and_scores(reward, name):
    rewards = reward(name, *VALUES.get(name, []))
    assert isinstance(rewards, Rewards)
    rewards.bind(list(COLUMNS))
    if name in ASKS_ELSEWHERE:
        assert {type(function) for function in rewards.functions.values()} == {ASKS_ELSEWHERE[name]}
        return
    ids = [[1, 2], [7] * 11]
    scores = rewards.score(["20+22="] * 2, ["42", GOOD], COLUMNS, completion_ids=ids)
    assert scores.total.tolist() == pytest.approx(EXPECTED[name])


@pytest.mark.filterwarnings("ignore:CodeExecution")
@pytest.mark.parametrize("name", ["math", "function", "recipes", "joint"])
@pytest.mark.all
def test_every_setting_of_rewards_is_a_key_of_every_shipped_reward(reward, name):
    asked = {"timeout": 20.0, "workers": 2, "on_error": 0.0, "memory_mb": 100, "max_concurrent": 3, "cache": 5}
    made = reward(name, *VALUES.get(name, []), *(f"reward.{key}={value}" for key, value in asked.items()))
    assert {key: getattr(made.settings, key) for key in asked} == asked
    with pytest.raises(ConfigCompositionException, match="tiemout"):
        reward(name, *VALUES.get(name, []), "reward.tiemout=20")


def test_a_rubric_may_stand_in_the_config(reward):
    rubric = "{criteria: [{name: short, text: Is it short?, range: [0, 3]}, {name: kind, text: Is it kind?}]}"
    made = reward("judge", *VALUES["judge"][:2], f"reward.functions.judge.rubric={rubric}")
    judge = made.functions["judge"]
    assert judge.log_name == "judge" and [each.name for each in judge.rubric.criteria] == ["short", "kind"]
    assert judge.rubric.criteria[0].range == (0, 3) and judge.extra_body == {}
    made = reward("judge", *VALUES["judge"], "+reward.functions.judge.extra_body.max_tokens=null")
    assert made.functions["judge"].extra_body == {"max_tokens": None}
    with pytest.raises(ConfigError, match="range=.3, 1."):
        reward("judge", *VALUES["judge"][:2], f"reward.functions.judge.rubric={rubric.replace('0, 3', '3, 1')}")


def test_what_a_constructor_refuses_is_named_by_its_whole_key(reward):
    for setting, words in (("rubric=nope", r"rubric='nope': there is no"), ("template=x", r"template lacks \$prompt")):
        with pytest.raises(ConfigError, match=rf"^reward\.functions\.judge\.{words}"):
            reward(
                "judge",
                *VALUES["judge"][:2],
                "reward.functions.judge.rubric=helpful",
                f"reward.functions.judge.{setting}",
            )
    for more, words in (
        ([], "rubric=None, and there is neither a reference"),
        (["reward.functions.judge.rubric={criteria: [{name: a}]}"], "rubric, criterion 0: text=None"),
        (["reward.functions.judge.base_url=far"], "base_url: 'far' is no address"),
    ):
        with pytest.raises(ConfigError, match=rf"^reward\.functions\.judge\.{words}"):
            reward("judge", *VALUES["judge"][:2], *more)


def test_no_reward_is_none():
    assert prune(OmegaConf.to_container(OmegaConf.load(FOLDER / "none.yaml"))) is None


def test_code_is_off_until_it_is_allowed(reward):
    with pytest.raises(ConfigError, match="no sandbox"):
        reward("code")


def test_the_part_that_reasoning_gym_gives_is_logged_and_may_be_paid(reward):
    for settings, total in (([], 0), (["reasoning_gym=0", "reasoning_gym_score=1"], 2 / len(GOOD))):
        rewards = reward("reasoning_gym", *(f"reward.weights.{setting}" for setting in settings))
        rewards.bind(list(COLUMNS))
        scores = rewards.score(["20+22="] * 2, ["42", GOOD], COLUMNS, completion_ids=[[1, 2], [7] * 11])
        assert scores.total.tolist() == pytest.approx([1, total])
        assert scores.values[:, scores.names.index("reasoning_gym_score")].tolist() == pytest.approx([1, 2 / len(GOOD)])


def test_settings_are_checked_by_type(reward):
    with pytest.raises(ConfigCompositionException, match="soft_overlong.cache"):
        reward("soft_overlong", "reward.functions.soft_overlong.cache=much")
    assert reward("repetition", "reward.functions.repetition_penalty.ngram_size=5").names == ("repetition_penalty",)


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
