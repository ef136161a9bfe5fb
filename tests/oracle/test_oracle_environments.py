"""`environment_factory` against TRL 1.16: its loop and `env=environment` are given the same class, rows and turns.

TRL resets, calls and rewards its instances itself; ours are those of `CustomEnvironment`, one for each episode.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from oracle_cases import GROUP, ROWS, WEIGHTS, Case, assert_same_step, first, second
from oracle_ours import our_grpo, ours
from oracle_trl import Oracle
from oracle_turns import LONGEST, Theirs, call, chat_tokenizer, plain, their_rollout, tokens
from said_turns import drawn

from lit_rl.core.rollout import Completions, PromptBatch
from lit_rl.environments import CustomEnvironment
from lit_rl.environments.interaction import Interaction
from lit_rl.generation.collect import as_reward_input, texts_of
from lit_rl.rewards import Rewards, environment


class Ledger:
    """A sum that is put together call by call, as a class for TRL is written."""

    def reset(self, start: int, **row: Any) -> str:
        assert row["prompt"][-1]["role"] == "user"
        self.total, self.calls = start, 0
        return f" It is {start} now."

    def add(self, amount: int) -> str:
        """Add to the sum.

        Args:
            amount: How much.
        """
        self.calls += 1
        self.total += amount
        return f"now {self.total}"

    def read(self) -> int:
        """Read the sum."""
        self.calls += 1
        return self.total

    def get_reward(self) -> float:
        return self.total / 8 - self.calls

    def _unseen(self) -> None: ...


class Echo:
    """Another class for the same run: it begins with nothing, and is awaited."""

    def reset(self, **row: Any) -> None:
        self.heard: list[str] = []

    async def shout(self, text: str) -> str:
        """Say it louder.

        Args:
            text: What.
        """
        self.heard.append(text)
        return text.upper()

    async def get_reward(self) -> float:
        return float(sum(map(len, self.heard)))


@dataclass(frozen=True)
class Play:
    """A trainer of TRL, and what both sides are given."""

    oracle: Oracle
    classes: Any
    """As TRL's `environment_factory` and our `path` take them."""
    said: list[list[str]]
    """What each row says, turn by turn."""
    columns: dict[str, list[Any]]
    """Of the data, one entry a prompt."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Of the data, one a completion, as TRL's sampler repeats them."""
        of = [{name: values[row // GROUP] for name, values in self.columns.items()} for row in range(ROWS)]
        return [{"prompt": CHATS[row // GROUP], **each} for row, each in enumerate(of)]

    def ours(self) -> tuple[PromptBatch, Completions]:
        tokenizer = self.oracle.trainer.processing_class
        factory = CustomEnvironment(self.classes, max_tokens=LONGEST, parser="hermes")
        ends = (tokenizer.eos_token_id,)
        interaction = Interaction(factory, tokenizer, eos_ids=ends, chat=True, template_kwargs={})
        batch = PromptBatch(CHATS, [[1]] * len(CHATS), self.columns, [0, 1], [0, 0])
        return batch, drawn(interaction, tokenizer, batch, self.said, LONGEST)

    def theirs(self, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], case: Case) -> Theirs:
        return their_rollout(self.oracle, monkeypatch, settings, case, self.said, self.rows)


CHATS = [[{"role": "user", "content": f"Make it {wanted}."}] for wanted in (12, 40)]
SUMS = [
    [f"First I look.\n{call('read')}", call("add", amount=9), "12"],
    ["I do nothing."],
    [f"{call('add', amount=4)}\n{call('add', amount=5)}", "It is 12."],
    [call("add", amount=-3), call("read"), call("add", amount=12), "12"],
]
SHOUTS = [
    [call("shout", text="forty é"), "40"],
    ["40?"],
    [f"{call('shout', text='a')}\n{call('shout', text='b <c>')}", call("shout", text=""), "It is said."],
    [call("shout", text="40"), "Forty."],
]


@pytest.fixture(scope="module")
def play(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Play:
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    several = request.param == "several"
    classes = {"ledger": Ledger, "echo": Echo} if several else Ledger
    columns: dict[str, list[Any]] = {"start": [3, 17]}
    oracle = Oracle.of(
        GRPOTrainer,
        GRPOConfig,
        tmp_path_factory.mktemp(request.param),
        tokenizer=chat_tokenizer(),
        prompts=CHATS,
        longest=LONGEST,
        environment_factory=classes,
    )
    if several:
        return Play(oracle, classes, SUMS + SHOUTS, columns | {"environment": ["ledger", "echo"]})
    return Play(oracle, classes, SUMS + SUMS[::-1], columns)


every_way = pytest.mark.parametrize("play", ["one", pytest.param("several", marks=pytest.mark.all)], indirect=True)


@every_way
def test_the_same_class_and_turns_are_the_same_rollout(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts with what reset returned and the tools of each row's class, tokens, who wrote them, what rewards are
    given, and the metrics."""
    theirs = play.theirs(monkeypatch, {}, Case())
    batch, mine = play.ours()
    assert mine.attended is not None and mine.episodes is not None
    taken = theirs.taken
    assert tokens(mine.prompt_ids, mine.prompt_mask) == tokens(taken["prompt_ids"], taken["prompt_mask"])
    assert tokens(mine.response_ids, mine.attended) == tokens(taken["completion_ids"], taken["completion_mask"])
    who = tokens(mine.response_mask.long(), mine.attended)
    assert who == tokens(taken["tool_mask"].long(), taken["completion_mask"]) and any(0 in row for row in who)

    prompts, messages, columns = as_reward_input(
        batch, texts_of(mine, play.oracle.trainer.processing_class), mine.episodes
    )
    assert prompts == theirs.columns["prompts"]
    assert [plain(each) for each in messages] == [plain(each) for each in theirs.completions]
    assert all(columns[name] == theirs.columns[name] for name in play.columns)
    assert [each["reward"] for each in columns["episodes"]] == [
        rewarded(each) for each in theirs.columns["environments"]
    ]
    calls = sum(each.calls for each in mine.episodes)
    assert theirs.metrics["tools/call_frequency"] == [calls / ROWS] and theirs.metrics["tools/failure_frequency"] == [0]


@pytest.mark.parametrize(
    ("play", "loss_type"), [("one", "dapo"), pytest.param("several", "grpo", marks=pytest.mark.all)], indirect=["play"]
)
def test_loss_and_gradient(play: Play, loss_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the environments' `get_reward` says, beside the rewards of functions."""
    from trl.trainer.utils import split_tensor_dict

    settings, case = {"loss_type": loss_type, "beta": 0.3, "epsilon_high": 0.4}, Case(micro_batches=1)
    theirs = play.theirs(monkeypatch, settings, case)
    play.oracle.at("update")
    other = play.oracle.step(split_tensor_dict(theirs.taken, case.micro_batches))
    other.advantages = theirs.taken["advantages"]
    _, completions = play.ours()
    functions: dict[str, Callable[..., Any]] = {"first": first, "second": second, "environment": environment}
    module = our_grpo(settings, reward=Rewards(functions, WEIGHTS))
    assert_same_step(ours(play.oracle, module, case, completions), other, size=1.0)
    without = ours(play.oracle, our_grpo(settings), case, completions)
    assert (without.advantages - other.advantages).abs().max() > 0.1, "get_reward changes nothing here"


def rewarded(made: Any) -> float:
    """What an object of TRL's says when it is over, asked once more."""
    reward = copy.deepcopy(made).get_reward()
    if isinstance(reward, float):
        return reward
    with pytest.raises(StopIteration) as over:
        reward.send(None)
    return over.value.value
