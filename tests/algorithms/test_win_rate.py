"""`eval.win_rate_against`: who is compared with whom, by what, and what it says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from small_rollouts import batch, completions, scores, trainer

from lit_rl.algorithms import (
    DPO,
    GKD,
    GRPO,
    KTO,
    PPO,
    SFT,
    XPO,
    AdamW,
    Constant,
    Evaluation,
)
from lit_rl.algorithms.evaluation.validation import EvaluationRows
from lit_rl.algorithms.rollouts.rollout_source import RolloutSource
from lit_rl.core import interrupts
from lit_rl.core.errors import ConfigError, RewardError
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import PreferenceDataModule, SupervisedDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition, AdditionPairs, AdditionText
from lit_rl.models import LanguageModel
from lit_rl.rewards import exact_match
from lit_rl.rewards.judges import RewardJudge

NAMES = ("win_rate", "win_rate_low", "win_rate_high", "win_rate_ties", "win_rate_unjudged")


def grpo(against: str | None = "base", reward: Any = exact_match, **evaluation: Any) -> GRPO:
    return GRPO(
        LanguageModel("tiny"),
        reward,
        group_size=2,
        sampling=Sampling(max_new_tokens=5),
        evaluation=Evaluation(win_rate_against=against, **evaluation),
        optimizer=AdamW(lr=1e-3),
        scheduler=Constant(),
    )


def prompts(**settings: Any) -> RolloutDataModule:
    task = Addition(max_operand=30, val_rows=24)
    return RolloutDataModule(**{"task": task, "prompts_per_rollout": 8, "val_batch_size": 10, **settings})


def measured(module: Any, folder: Path, data: Any = None) -> dict[str, float]:
    runner = trainer(folder, limit_val_batches=1.0)
    runner.validate(module, datamodule=data or prompts(), verbose=False)
    return {name.removeprefix("val/"): float(value) for name, value in runner.callback_metrics.items()}


def constant_length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


# ---------------------------------------------------------------- the numbers


def test_a_tie_is_half_a_win_and_a_prompt_counts_once():
    rows = EvaluationRows()
    drawn, said = completions([1] * 6, 2), scores([0.0] * 6)
    wins = torch.tensor([1.0, 0.0, 0.5, 0.5, 1.0, math.nan], dtype=torch.float64)
    rows.add(batch([0, 1, 2]), drawn, said, wins)
    found = rows.metrics()
    assert found["win_rate"] == pytest.approx((0.5 + 0.5 + 1.0) / 3)
    assert found["win_rate_ties"] == pytest.approx(2 / 5) and found["win_rate_unjudged"] == pytest.approx(1 / 6)
    half = 1.959964 * float(torch.tensor([0.5, 0.5, 1.0], dtype=torch.float64).std()) / math.sqrt(3)
    assert found["win_rate_low"] == pytest.approx(2 / 3 - half, rel=1e-5)
    assert found["win_rate_high"] == pytest.approx(2 / 3 + half, rel=1e-5)


def test_an_interval_stays_a_rate_and_a_prompt_without_a_verdict_is_in_no_mean():
    def of_two_prompts(*wins: float) -> dict[str, float]:
        rows = EvaluationRows()
        rows.add(batch([0, 1]), completions([1, 1], 1), scores([0.0, 0.0]), torch.tensor(wins, dtype=torch.float64))
        return rows.metrics()

    assert of_two_prompts(1.0, 0.5)["win_rate_high"] == 1.0
    found = of_two_prompts(math.nan, 1.0)
    assert (found["win_rate"], found["win_rate_ties"], found["win_rate_unjudged"]) == (1.0, 0.0, 0.5)


# ---------------------------------------------------------------- runs


def test_the_policy_ties_with_itself_at_step_0(tmp_path: Path):
    found = measured(grpo(), tmp_path)
    assert (found["win_rate"], found["win_rate_ties"], found["win_rate_unjudged"]) == (0.5, 1.0, 0.0)
    assert found["win_rate_low"] == found["win_rate_high"] == 0.5


def test_samples_of_two_equal_models_are_apart(tmp_path: Path):
    found = measured(grpo(reward=constant_length, temperature=1.5, group_size=4), tmp_path)
    assert found["win_rate_ties"] < 1.0
    assert found["win_rate_low"] < 0.5 < found["win_rate_high"]


def test_without_it_nothing_of_it_is_logged(tmp_path: Path):
    assert not measured(grpo(None), tmp_path).keys() & set(NAMES)


def test_by_the_reward_it_is_the_difference_of_accuracies(tmp_path: Path):
    """For rewards of 0 and 1: P(win) + P(tie) / 2 = (1 + mine - theirs) / 2, prompt by prompt."""
    module, base = grpo(), measured(grpo(None), tmp_path)
    trainer(tmp_path, max_steps=3).fit(module, datamodule=prompts())
    found = measured(module, tmp_path)
    assert found["reward"] != base["reward"]
    assert found["win_rate"] == pytest.approx((1 + found["reward"] - base["reward"]) / 2, abs=1e-6)


def test_another_model_reads_by_its_own_tokenizer(tmp_path: Path):
    """One with other ids for the same characters, and an EOS of its own; it says what the policy says."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True), "<pad>", "<end>"]
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    inner.decoder = decoders.ByteLevel()  # pyright: ignore
    other = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>")
    ours = LanguageModel("tiny")
    policy: Any = ours.load()
    with torch.no_grad():  # the same model under other numbers
        old = {text: ours.tokenizer(text)["input_ids"] for text in map(chr, range(33, 127))}
        weight = policy.get_input_embeddings().weight
        moved = torch.full_like(weight, 0.0)
        for text, ids in old.items():
            if len(ids) == 1:
                moved[other(text)["input_ids"][0]] = weight[ids[0]]  # pyright: ignore
        moved[other.eos_token_id] = weight[ours.tokenizer.eos_token_id]  # pyright: ignore
        weight.copy_(moved)
    policy.config.eos_token_id, policy.config.pad_token_id = other.eos_token_id, other.pad_token_id
    policy.generation_config.eos_token_id = other.eos_token_id
    policy.save_pretrained(tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    found = measured(grpo(str(tmp_path / "other")), tmp_path)
    assert found["win_rate_ties"] == 1.0
    assert found["win_rate"] == 0.5 and found["reward"] > 0.2


def test_it_is_asked_once_and_its_weights_are_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module, loads = grpo(), []
    monkeypatch.setattr(LanguageModel, "load", _counted(LanguageModel.load, loads))
    first = measured(module, tmp_path)
    assert len(loads) == 2 and module._compared_model._loaded is None  # the policy and the base
    assert measured(module, tmp_path) == first and len(loads) == 2
    assert "_compared_model" not in dict(module.named_modules())
    assert not any("ompared" in key for key in module.state_dict())
    module.evaluation = Evaluation(win_rate_against="base", temperature=1.0)  # other completions: asked again
    measured(module, tmp_path)
    assert len(loads) == 3


def _counted(function: Any, calls: list[Any]) -> Any:
    def load(self: Any) -> Any:
        calls.append(self)
        return function(self)

    return load


def test_it_leaves_the_training_as_it_was(tmp_path: Path):
    runs = [grpo(against) for against in (None, "base")]
    for module in runs:
        settings = {"limit_val_batches": 1.0, "val_check_interval": 1, "check_val_every_n_epoch": None}
        trainer(tmp_path, max_steps=3, num_sanity_val_steps=0, **settings).fit(module, datamodule=prompts())
    for one, two in zip(*(module.policy.parameters() for module in runs), strict=True):
        assert torch.equal(one, two)


# ---------------------------------------------------------------- judges


class Longer:
    """A judge that needs no reward: the longer one is better, and of equal ones it prefers what it reads first."""

    reads_rewards = False

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def bind(self, columns: Any) -> None:
        pass

    def __call__(self, prompts: Any, firsts: Any, seconds: Any, **columns: Any) -> list[float | None]:
        if self.fails:
            return [None] * len(firsts)
        return [float(len(one) >= len(two)) for one, two in zip(firsts, seconds, strict=True)]


def test_the_judge_is_asked_and_seats_change(tmp_path: Path):
    """Between equal completions a judge that prefers the first seat gives either side half."""
    module = grpo(reward=exact_match)
    module.judge = Longer()
    found = measured(module, tmp_path, prompts(val_batch_size=24))
    assert found["win_rate"] == pytest.approx(0.5) and found["win_rate_ties"] == 0.0


def test_a_comparison_is_given_up_where_the_run_is_asked_to_stop(tmp_path: Path):
    class Asks(Longer):
        def __call__(self, *asked: Any, **columns: Any) -> list[float | None]:
            interrupts.request_stop()
            raise AssertionError("it goes on")

    def ends() -> NoReturn:
        raise InterruptedError

    module = grpo()
    module.judge = Asks()
    interrupts.enable_interrupts(ends, several=False)
    try:
        with pytest.raises(InterruptedError):
            measured(module, tmp_path)
    finally:
        interrupts.disable_interrupts()


def test_verdicts_that_fail_are_counted(tmp_path: Path):
    module = grpo()
    module.judge = Longer(fails=True)
    found = measured(module, tmp_path)
    assert math.isnan(found["win_rate"]) and found["win_rate_unjudged"] == 1.0


def sums_to_imitate() -> SupervisedDataModule:
    return SupervisedDataModule(task=AdditionText(max_operand=30, val_rows=12), batch_size=8)


def pairs_of_sums() -> PreferenceDataModule:
    return PreferenceDataModule(task=AdditionPairs(max_operand=30, val_rows=12), batch_size=8)


def sums() -> RolloutDataModule:
    return prompts(task=Addition(30, val_rows=12))


METHODS: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "sft": (SFT, sums_to_imitate),
    "gkd": (partial(GKD, teacher=LanguageModel("tiny"), on_policy_fraction=0.5), sums_to_imitate),
    **{method.__name__.lower(): (method, pairs_of_sums) for method in (DPO, KTO)},
    **{method.__name__.lower(): (partial(method, reward=exact_match), sums) for method in (GRPO, PPO)},
    "xpo": (XPO, sums),
}
"""One of each family: the others take what they compare by from the same class."""


@pytest.mark.parametrize("name", METHODS)
def test_a_judge_compares_in_every_method(name: str, tmp_path: Path):
    """By itself, where there is no reward; between equal completions a liking for a seat is half a win."""
    make, data = METHODS[name]
    asked: list[int] = []

    def judge(prompts: Any, firsts: Any, seconds: Any, answer: Any) -> list[float]:
        asked.append(len(answer))
        return [float(len(one) >= len(two)) for one, two in zip(firsts, seconds, strict=True)]

    module = make(
        LanguageModel("tiny"), judge=judge, sampling=Sampling(max_new_tokens=5), evaluation=Evaluation(
            win_rate_against="base")
    )  # fmt: skip
    found = measured(module, tmp_path, data())
    assert sum(asked) == 12
    assert (found["win_rate"], found["win_rate_ties"], found["win_rate_unjudged"]) == (0.5, 0.0, 0.0)
    assert found["win_rate_low"] < 0.5 < found["win_rate_high"]


def test_a_judge_that_nobody_asks_is_named(tmp_path: Path):
    module = SFT(LanguageModel("tiny"), exact_match, judge=Longer(), sampling=Sampling(max_new_tokens=5))
    with pytest.warns(UserWarning, match="judge=Longer is never asked.*eval.win_rate_against"):
        measured(module, tmp_path, METHODS["sft"][1]())


# ---------------------------------------------------------------- rows with tools

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t['function']['name'] }}]{% endfor %}"
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
ADD = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def spoken(text: str, tools: Any = None) -> dict[str, Any]:
    row: dict[str, Any] = {"prompt": [{"role": "user", "content": text}]}
    return row | {"completion": [{"role": "assistant", "content": "42"}]} | ({"tools": tools} if tools else {})


class HeldOut:
    """A task of these rows."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def train(self) -> list[dict[str, Any]]:
        return [{**self.rows[0], "prompt": spoken("7+8")["prompt"]}]

    def val(self) -> list[dict[str, Any]]:
        return self.rows


def seen_by(opponent: str, module: Any, data: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that the other model reads, as text."""
    seen: list[str] = []

    draw_other = RolloutSource.draw_other

    def watched(source: RolloutSource, asked: Any) -> Any:
        seen.extend(module.tokenizer.batch_decode(asked.batch.prompt_ids))
        return draw_other(source, asked)

    monkeypatch.setattr(RolloutSource, "draw_other", watched)
    module.evaluation = Evaluation(win_rate_against=opponent)
    measured(module, folder, data)
    return seen


@pytest.mark.parametrize("named", [True, False], ids=["another", "base"])
def test_the_other_model_reads_a_rows_tools(named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = LanguageModel("tiny", chat_template=TEMPLATE)
    model.load().save_pretrained(str(tmp_path / "other"))
    model.tokenizer.save_pretrained(str(tmp_path / "other"))
    module = SFT(model, judge=Longer(), sampling=Sampling(max_new_tokens=3))
    rows = [spoken("1+2", ADD), spoken("3+4"), spoken("5+6", json.dumps(ADD))]
    data = SupervisedDataModule(task=HeldOut(rows), batch_size=1)
    read = seen_by(str(tmp_path / "other") if named else "base", module, data, tmp_path, monkeypatch)
    assert read == ["[add]u:1+2;a:", "u:3+4;a:", "[add]u:5+6;a:"]


def test_the_tools_of_a_prompt_reach_the_other_model_as_they_reach_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = LanguageModel("tiny", chat_template=TEMPLATE)
    model.load().save_pretrained(str(tmp_path / "other"))
    model.tokenizer.save_pretrained(str(tmp_path / "other"))
    module = GRPO(model, exact_match, sampling=Sampling(max_new_tokens=3))
    rows = [{"prompt": spoken("1+2")["prompt"], "answer": "3", "tools": ADD}]
    data = prompts(task=HeldOut(rows), prompts_per_rollout=1)
    assert seen_by(str(tmp_path / "other"), module, data, tmp_path, monkeypatch) == ["[add]u:1+2;a:"]
    assert str(model.tokenizer.decode(data.sets.train.prompt_ids[0])).startswith("[add]u:")


# ---------------------------------------------------------------- what is refused


def test_a_judge_that_needs_what_is_no_column_is_refused_before_loading(tmp_path: Path):
    def judge(prompts: Any, firsts: Any, seconds: Any, rubric: Any) -> list[float]:
        return [0.5] * len(prompts)

    settings = {"sampling": Sampling(max_new_tokens=5), "evaluation": Evaluation(win_rate_against="base")}
    module = SFT(LanguageModel("tiny"), judge=judge, **settings)
    with pytest.raises(RewardError, match="rubric"):
        measured(module, tmp_path, METHODS["sft"][1]())
    assert module.policy is None


def test_without_reward_and_judge_there_is_nothing_to_compare_by(tmp_path: Path):
    against = Evaluation(win_rate_against="base")
    module = SFT(LanguageModel("tiny"), sampling=Sampling(max_new_tokens=5), evaluation=against)
    data = SupervisedDataModule(task=AdditionText(max_operand=30, val_rows=24), batch_size=8)
    with pytest.raises(ConfigError, match=r"eval\.win_rate_against='base'.*Set reward"):
        measured(module, tmp_path, data)
    assert module.policy is None
    module.judge = RewardJudge(soft=True)
    with pytest.raises(ConfigError, match="Set reward"):
        measured(module, tmp_path, data)


@pytest.mark.parametrize("column", ["completion", "text"])
def test_without_validation_prompts_there_is_nothing_to_compare_at(column: str, tmp_path: Path):
    """No validation set, and one of texts that have no prompts."""
    rows = [{"prompt": f"{n}+1=", "completion": f"{n + 1}"} for n in range(40)]
    if column == "text":
        rows = [{"text": row["prompt"] + row["completion"]} for row in rows]
    data = SupervisedDataModule(rows=rows, batch_size=8, val_fraction=0.0 if column == "completion" else 0.2)
    module = SFT(LanguageModel("tiny"), exact_match, evaluation=Evaluation(win_rate_against="base"))
    with pytest.raises(ConfigError, match=r"eval\.win_rate_against='base'.*data\.val_path"):
        measured(module, tmp_path, data)
    assert module.policy is None


@pytest.mark.parametrize("name", ["./no/such/folder", ""])
def test_a_model_that_is_not_there_is_refused_before_loading(tmp_path: Path, name: str):
    with pytest.raises(ConfigError, match=r"eval\.win_rate_against"):
        measured(grpo(name), tmp_path)
