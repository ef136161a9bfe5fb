"""Tools against TRL 1.16: its own loop and ours are given the same turns, and have to make the same rollout of them.

TRL's `_generate_and_score_completions` runs as it is, and calls its tools; ours is the `Interaction` of `env=tools`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle_cases import GIVEN, GROUP, ROWS, TEMPERATURE, Case, assert_same_step, second
from oracle_ours import our_grpo, ours
from oracle_trl import Oracle
from oracle_turns import LONGEST, call, chat_tokenizer, plain, their_rollout, tokens
from said_turns import drawn, ids_of
from torch import Tensor

from lit_rl.algorithms.rollouts.rollout_plan import frozen_logprobs
from lit_rl.core.rollout import Completions, PromptBatch, Sampling
from lit_rl.environments import FunctionTools
from lit_rl.environments.environment_base import EpisodeSource
from lit_rl.environments.interaction import Interaction
from lit_rl.generation import RolloutFunction
from lit_rl.generation.collect import as_reward_input, texts_of
from lit_rl.generation.rollout_function import RolloutCalls

QUESTIONS = ["What is 3 times 4?", "What is 17 times 25?"]
CHATS = [[{"role": "user", "content": question}] for question in QUESTIONS]


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


def shout(text: str) -> str:
    """Say it louder.

    Args:
        text: What.
    """
    return text.upper()


SAID = [
    [f"I compute.\n{call('multiply', a=3, b=4)}", "It is 12."],
    ["Twelve."],
    [call("shout", text="twelve"), call("multiply", a=12, b=1), "12"],
    [f"{call('multiply', a=3, b=4)}\n{call('shout', text='é <b> ')}", "12, I think."],
    [call("multiply", a=17, b=25), call("multiply", a=425, b=1), call("multiply", a=1, b=425), "425"],
    ["No idea."],
    [call("shout", text=""), "425!"],
    [call("multiply", a=-17, b=25), "-425"],
]
"""What each row says, turn by turn: no calls, one, two in a turn, several turns."""


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    return Oracle.of(
        GRPOTrainer,
        GRPOConfig,
        tmp_path_factory.mktemp("tools"),
        tokenizer=chat_tokenizer(),
        prompts=CHATS,
        longest=LONGEST,
        tools=[multiply, shout],
    )


# ------------------------------------------------------------------ both sides, given the same turns


def rows() -> list[dict[str, Any]]:
    return [{"prompt": CHATS[row // GROUP]} for row in range(ROWS)]


def our_completions(oracle: Oracle, said: list[list[str]] = SAID) -> tuple[PromptBatch, Completions]:
    tokenizer = oracle.trainer.processing_class
    factory = FunctionTools([multiply, shout], max_tokens=LONGEST, parser="hermes")
    ends = (tokenizer.eos_token_id,)
    interaction = Interaction(factory, tokenizer, eos_ids=ends, chat=True, template_kwargs={})
    return completions_of(oracle, interaction, said)


def completions_of(
    oracle: Oracle, interaction: EpisodeSource, said: list[list[str]] = SAID
) -> tuple[PromptBatch, Completions]:
    batch = PromptBatch(CHATS, [[1]] * len(CHATS), {}, [0, 1], [0, 0])
    return batch, drawn(interaction, oracle.trainer.processing_class, batch, said, LONGEST)


# ------------------------------------------------------------------ they agree


def test_the_same_turns_are_the_same_rollout(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that tell of the tools, tokens, who wrote them, what rewards are given, and the metrics."""
    before = oracle.trainer.state.num_input_tokens_seen
    theirs = their_rollout(oracle, monkeypatch, {}, Case(), SAID, rows())
    batch, mine = our_completions(oracle)
    assert mine.attended is not None and mine.episodes is not None
    taken = theirs.taken
    assert tokens(mine.prompt_ids, mine.prompt_mask) == tokens(taken["prompt_ids"], taken["prompt_mask"])
    assert tokens(mine.response_ids, mine.attended) == tokens(taken["completion_ids"], taken["completion_mask"])
    who = tokens(mine.response_mask.long(), mine.attended)
    assert who == tokens(taken["tool_mask"].long(), taken["completion_mask"])
    assert any(0 in row for row in who)

    _, messages, _ = as_reward_input(batch, texts_of(mine, oracle.trainer.processing_class), mine.episodes)
    assert [plain(each) for each in messages] == [plain(each) for each in theirs.completions]
    calls, failed = sum(each.calls for each in mine.episodes), sum(each.failed_calls for each in mine.episodes)
    assert theirs.metrics["tools/call_frequency"] == [calls / ROWS]
    assert theirs.metrics["tools/failure_frequency"] == [failed / calls]
    assert theirs.metrics["completions/mean_length"] == [mine.lengths.float().mean().item()]
    assert theirs.metrics["num_tokens"] == [before + int(mine.prompt_mask.sum() + mine.response_mask.sum())]


def test_calls_that_fail_are_counted_and_answered_with_an_error(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the error says differs (docs/from-trl.md); who is told of one, and how many there are, does not."""
    failing = {1: call("multiply", a=3), 6: call("divide", a=12, b=4)}
    said = [[failing[row], "No idea."] if row in failing else turns for row, turns in enumerate(SAID)]
    theirs = their_rollout(oracle, monkeypatch, {}, Case(), said, rows())
    batch, mine = our_completions(oracle, said)
    assert mine.episodes is not None
    calls, failed = sum(each.calls for each in mine.episodes), sum(each.failed_calls for each in mine.episodes)
    assert failed == len(failing)
    assert theirs.metrics["tools/call_frequency"] == [calls / ROWS]
    assert theirs.metrics["tools/failure_frequency"] == pytest.approx([failed / calls], rel=1e-6)
    _, messages, _ = as_reward_input(batch, texts_of(mine, oracle.trainer.processing_class), mine.episodes)
    for rollout in (messages, theirs.completions):
        told = [any("error" in str(message["content"]) for message in each) for each in rollout]
        assert told == [row in failing for row in range(ROWS)]


def engine_logprobs(oracle: Oracle, completions: Completions) -> Completions:
    """With what an engine reports that is a little off."""
    oracle.at("rollout")
    exact = frozen_logprobs(oracle.model, completions, sampling=Sampling(temperature=TEMPERATURE), rows_at_once=ROWS)
    noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(4))
    return replace(completions, sampler_logprobs=(exact + 0.1 * noise).masked_fill(~completions.response_mask, 0.0))


OPTIONS: dict[str, dict[str, Any]] = {
    "dapo": {"loss_type": "dapo"},
    "luspo": {"loss_type": "luspo"},
    "sequence": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02},
    "top_entropy": {"top_entropy_quantile": 0.37},
    "off_policy": {"off_policy_mask_threshold": 0.02},
    **{
        mode: {
            "use_vllm": True,
            "vllm_mode": "server",  # the other one would be asked for its longest text
            "vllm_importance_sampling_mode": mode,
            "vllm_importance_sampling_clip_max": 1.1,
        }
        for mode in ("token_truncate", "sequence_mask")
    },
}
"""One for each way in which a mask of what tools said is used; tests/oracle/test_oracle_grpo.py has the arithmetic."""


@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradient(oracle: Oracle, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.trainer.utils import split_tensor_dict

    settings, case = {"beta": 0.3, "epsilon_high": 0.4} | OPTIONS[name], Case(micro_batches=1)
    completions = engine_logprobs(oracle, our_completions(oracle)[1])
    reported = tokens(completions.sampler_logprobs, completions.response_mask)
    corrected = settings.get("use_vllm", False) or "off_policy_mask_threshold" in settings
    theirs = their_rollout(oracle, monkeypatch, settings, case, SAID, rows(), reported if corrected else None)
    oracle.at("update")
    other = oracle.step(split_tensor_dict(theirs.taken, case.micro_batches))
    other.advantages = theirs.taken["advantages"]
    mine = ours(oracle, our_grpo(settings), case, completions)
    assert_same_step(mine, other, size=1.0)
    heard = completions.attended & ~completions.response_mask  # type: ignore[operator]
    learned = ours(oracle, our_grpo(settings), case, without_mask(completions, heard))
    assert (learned.gradient - mine.gradient).norm() > 1e-3 * mine.gradient.norm(), "the mask does nothing here"


# ------------------------------------------------------------------ a function that makes the rollouts


def rollout(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
    """The turns of `SAID` with something between them, by TRL's signature: both are given this very function."""
    tokenizer = trainer.processing_class
    heard = list(tokenizer("<|im_start|>user\nGo on.<|im_end|>", add_special_tokens=False)["input_ids"])
    made: dict[str, Any] = {name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "turns")}
    for row, prompt in enumerate(prompts):
        ids, mask = list[int](), list[int]()
        for turn, text in enumerate(SAID[row]):
            said = ids_of(tokenizer, text)
            ids += [*(heard if turn else []), *said]
            mask += [*([0] * len(heard) if turn else []), *[1] * len(said)]
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        made["prompt_ids"].append(list(tokenizer(text, add_special_tokens=False)["input_ids"]))
        made["completion_ids"].append(ids)
        made["logprobs"].append([-0.5] * len(ids))
        made["env_mask"].append(mask)
        made["turns"].append(len(SAID[row]))
    return made


def test_the_same_rollout_function_makes_the_same_rollout(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, who wrote them, the columns that rewards are given, loss and gradient."""
    from trl.trainer.utils import split_tensor_dict

    trainer, tokenizer, seen = oracle.trainer, oracle.trainer.processing_class, dict[str, Any]()
    settings, case = {"loss_type": "dapo", "beta": 0.3, "epsilon_high": 0.4}, Case(micro_batches=1)

    def watched(completions: Any, turns: Any, **_: Any) -> list[float | None]:
        seen.update(turns=list(turns))
        return list(GIVEN["first"])

    oracle.configure(settings, case)
    monkeypatch.setattr(trainer, "rollout_func", rollout)
    monkeypatch.setattr(trainer, "tools", [])
    monkeypatch.setattr(trainer, "reward_funcs", [watched, second])
    GIVEN.update(first=case.first, second=case.second)
    oracle.at("rollout")
    taken = trainer._generate_and_score_completions([{"prompt": CHATS[row // GROUP]} for row in range(ROWS)])
    oracle.at("update")
    theirs = oracle.step(split_tensor_dict(taken, case.micro_batches))
    theirs.advantages = taken["advantages"]

    source = RolloutCalls(RolloutFunction(rollout, columns=["turns"], max_tokens=LONGEST), tokenizer, {}, LONGEST)
    batch, completions = completions_of(oracle, source)
    assert completions.attended is not None
    assert tokens(completions.prompt_ids, completions.prompt_mask) == tokens(taken["prompt_ids"], taken["prompt_mask"])
    written = tokens(completions.response_ids, completions.attended)
    assert written == tokens(taken["completion_ids"], taken["completion_mask"])
    who = tokens(completions.response_mask.long(), completions.attended)
    assert who == tokens(taken["tool_mask"].long(), taken["completion_mask"]) and any(0 in row for row in who)
    _, _, columns = as_reward_input(batch, texts_of(completions, tokenizer), completions.episodes)
    assert columns["turns"] == seen["turns"] == [len(said) for said in SAID]
    assert_same_step(ours(oracle, our_grpo(settings), case, completions), theirs, size=1.0)


def without_mask(completions: Completions, heard: Tensor) -> Completions:
    """As if the policy had written what it heard."""
    return Completions(
        **{
            **{name: getattr(completions, name) for name in ("prompt_ids", "prompt_mask", "response_ids", "ended")},
            "response_mask": completions.response_mask | heard,
            "sampler_logprobs": completions.sampler_logprobs,
            "group_id": completions.group_id,
        }
    )
