"""An environment that is stepped with the text of each turn, as gymnasium's are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lit_rl.data.checks import excerpt
from lit_rl.environments.base import Environment, Opening, Reply, Turn
from lit_rl.environments.observations import as_text, content_of, shows
from lit_rl.environments.user_class import (
    UserClass,
    called,
    checked_messages,
    closed,
    finite,
    opening_of,
    reward_of,
    says_nothing,
)
from lit_rl.errors import ConfigError
from lit_rl.rollout import Message

_FIVE = 5


class ObjectWithSteps(Environment):
    """An object of the user's whose ``step(action)`` gives gymnasium's five values. The observation, the first of them,
    is the user's next message.

    Args:
        made: The object.
        described: Description of its class.
    """

    def __init__(self, made: Any, described: UserClass) -> None:
        self._made, self._described = made, described
        self._turns = 0

    async def reset(self, seed: int, row: Mapping[str, Any]) -> Opening:
        opening = await called(self._made.reset, **self._described.arguments(seed, row))
        if isinstance(opening, tuple) and len(opening) == 2:  # gymnasium's: observation, info
            opening = opening[0]
        return opening_of(opening, self._who("reset"))

    async def answer(self, turn: Turn) -> Reply:
        who = self._who("step")
        five = await called(self._made.step, turn.text)
        if not isinstance(five, Sequence) or len(five) != _FIVE:
            raise ConfigError(
                f"env: {who} returned {excerpt(repr(five))}; it returns five values: observation, reward, terminated, "
                "truncated, info."
            )
        observation, reward, terminated, truncated, _ = five
        turn_number, self._turns = self._turns, self._turns + 1
        messages, over = _messages(observation, who), bool(terminated or truncated)
        return Reply(
            turn.message(turn.text),
            [message for message in messages if message["content"] or not over],
            end=("done" if terminated else "cut") if over else None,
            reward=finite(reward, f"{who} in turn {turn_number}"),
        )

    async def reward(self) -> float | None:
        return await reward_of(self._made, self._described)

    async def close(self) -> None:
        await closed(self._made)

    def _who(self, method: str) -> str:
        return f"{self._described.name}.{method}"


def _messages(observation: Any, who: str) -> list[Message]:
    if shows(observation):
        return [{"role": "user", "content": content_of(observation, f"env: {who}")}]
    if not isinstance(observation, list) or not observation:
        return [{"role": "user", "content": "" if says_nothing(observation) else as_text(observation, who)}]
    return checked_messages(observation, who, roles=("user",))
