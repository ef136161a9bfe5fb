"""Tools against TRL 1.16: its own loop and ours are given the same turns, and have to make the same rollout of them.

TRL's `_generate_and_score_completions` runs as it is, and calls its tools; ours is the `Interaction` of `env=tools`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle_cases import GIVEN, GROUP, ROWS, Case, assert_same_step, second
from oracle_ours import our_grpo, ours
from oracle_trl import Oracle, make_tokenizer
from torch import Tensor, nn

from lit_rl.environments import FunctionTools
from lit_rl.environments.interaction import Interaction
from lit_rl.environments.source import EpisodeSource
from lit_rl.generation import RolloutFunction
from lit_rl.generation.base import Generator
from lit_rl.generation.batches import DecodeBatch, Decoded, assemble
from lit_rl.generation.collect import Vocabulary, as_reward_input, request, texts_of
from lit_rl.generation.rollout_function import RolloutCalls
from lit_rl.generation.turn_by_turn import TurnByTurn
from lit_rl.rollout import Completions, PromptBatch, Prompts, Sampling

LONGEST = 700
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


def call(name: str, **arguments: Any) -> str:
    import json

    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


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


def chat_tokenizer() -> Any:
    import trl

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"], "eos_token": "<|im_end|>"})
    templates = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (templates / "qwen2_5.jinja").read_text()
    return tokenizer


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


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


# ------------------------------------------------------------------ both sides, given the same turns


@dataclass
class Theirs:
    """TRL's rollout."""

    taken: dict[str, Any]
    completions: list[Any]
    """What rewards were given."""
    metrics: dict[str, list[float]]


def their_rollout(oracle: Oracle, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], case: Case) -> Theirs:
    trainer, turns, seen = oracle.trainer, [0] * ROWS, []
    tokenizer = trainer.processing_class

    def says(prompt_ids: Sequence[Any], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        rows = [row for row in range(ROWS) if turns[row] < len(SAID[row])]
        assert len(rows) == len(prompt_ids), "TRL goes on with other rows than those that called a tool"
        texts = [SAID[row][turns[row]] for row in rows]
        for row in rows:
            turns[row] += 1
        return [ids_of(tokenizer, text) for text in texts], None

    def watched(completions: Any, **_: Any) -> list[float | None]:
        seen.extend(copy.deepcopy(completions))
        return list(GIVEN["first"])

    oracle.configure(settings, case)
    monkeypatch.setattr(trainer, "_generate_single_turn", says)
    monkeypatch.setattr(trainer, "reward_funcs", [watched, second])
    GIVEN.update(first=case.first, second=case.second)
    oracle.at("rollout")
    prompts = [copy.deepcopy(CHATS[row // GROUP]) for row in range(ROWS)]
    taken = trainer._generate_and_score_completions([{"prompt": prompt} for prompt in prompts])
    return Theirs(taken, seen, {name: list(values) for name, values in trainer._metrics["train"].items()})


class Says(Generator):
    """An engine without a model, which says what a test wants: what is compared here is what becomes of it."""

    converses = True

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._turns = tokenizer, [0] * ROWS

    def sync(self, policy: nn.Module, version: int) -> None: ...

    def generate(self, prompts: Prompts, sampling: Sampling) -> Completions:
        decoded = TurnByTurn(self._decode, prompts, sampling, None, torch.device("cpu")).run()
        return assemble(prompts, [(torch.arange(ROWS), decoded)], version=0, device=torch.device("cpu"))

    def _decode(self, batch: DecodeBatch, prompts: Prompts, sampling: Sampling) -> Decoded:
        rows = batch.rows.tolist()
        said = [ids_of(self._tokenizer, SAID[row][self._turns[row]]) for row in rows]
        for row in rows:
            self._turns[row] += 1
        width = max(map(len, said))
        mask = torch.arange(width) < torch.tensor([len(ids) for ids in said])[:, None]
        ids = torch.tensor([ids + [prompts.pad_id] * (width - len(ids)) for ids in said])
        return Decoded(ids, mask, torch.zeros(mask.shape), torch.ones(len(said), dtype=torch.bool), None)


def our_completions(oracle: Oracle) -> tuple[PromptBatch, Completions]:
    tokenizer = oracle.trainer.processing_class
    factory = FunctionTools([multiply, shout], max_tokens=LONGEST, parser="hermes")
    ends = (tokenizer.eos_token_id,)
    return completions_of(oracle, Interaction(factory, tokenizer, eos_ids=ends, chat=True, template_kwargs={}))


def completions_of(oracle: Oracle, interaction: EpisodeSource) -> tuple[PromptBatch, Completions]:
    tokenizer = oracle.trainer.processing_class
    ends = (tokenizer.eos_token_id,)
    vocabulary = Vocabulary(ends, tokenizer.pad_token_id, tokenizer.decode, tokenizer.encode)
    batch = PromptBatch(CHATS, [[1]] * len(CHATS), {}, [0, 1], [0, 0])
    draw = request(
        Says(tokenizer),
        nn.Module(),
        batch,
        sampling=Sampling(max_new_tokens=LONGEST),
        group_size=GROUP,
        vocabulary=vocabulary,
        version=0,
        seed=0,
        interaction=interaction,
    )
    return batch, draw()


def tokens(ids: Tensor, mask: Tensor) -> list[list[int]]:
    return [row[there.bool()].tolist() for row, there in zip(ids, mask)]


# ------------------------------------------------------------------ they agree


def test_the_same_turns_are_the_same_rollout(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that tell of the tools, tokens, who wrote them, what rewards are given, and the metrics."""
    theirs = their_rollout(oracle, monkeypatch, {}, Case())
    batch, mine = our_completions(oracle)
    assert mine.attended is not None and mine.episodes is not None
    taken = theirs.taken
    assert tokens(mine.prompt_ids, mine.prompt_mask) == tokens(taken["prompt_ids"], taken["prompt_mask"])
    assert tokens(mine.response_ids, mine.attended) == tokens(taken["completion_ids"], taken["completion_mask"])
    who = tokens(mine.response_mask.long(), mine.attended)
    assert who == tokens(taken["tool_mask"].long(), taken["completion_mask"])
    assert any(0 in row for row in who)

    _, messages, _ = as_reward_input(batch, texts_of(mine, oracle.trainer.processing_class), GROUP, mine.episodes)
    assert [plain(each) for each in messages] == [plain(each) for each in theirs.completions]
    calls, failed = sum(each.calls for each in mine.episodes), sum(each.failed_calls for each in mine.episodes)
    assert theirs.metrics["tools/call_frequency"] == [calls / ROWS]
    assert theirs.metrics["tools/failure_frequency"] == [failed / calls]
    assert theirs.metrics["completions/mean_length"] == [mine.lengths.float().mean().item()]


def plain(messages: Sequence[dict[str, Any]]) -> list[tuple[str, str, Any]]:
    """Role, text without blanks around it, and calls: TRL leaves a text without calls out where it is empty."""
    return [(each["role"], (each.get("content") or "").strip(), each.get("tool_calls")) for each in messages]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "cispo"])
def test_loss_and_gradient(oracle: Oracle, loss_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.trainer.utils import split_tensor_dict

    settings, case = {"loss_type": loss_type, "beta": 0.3, "epsilon_high": 0.4}, Case(micro_batches=1)
    theirs = their_rollout(oracle, monkeypatch, settings, case)
    oracle.at("update")
    other = oracle.step(split_tensor_dict(theirs.taken, case.micro_batches))
    other.advantages = theirs.taken["advantages"]
    _, completions = our_completions(oracle)
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
    _, _, columns = as_reward_input(batch, texts_of(completions, tokenizer), GROUP, completions.episodes)
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
