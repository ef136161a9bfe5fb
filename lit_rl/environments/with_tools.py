"""An environment whose turns call tools: functions, and the public methods of an object of the user's."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lit_rl.environments.base import Environment, Opening, Reply, Turn
from lit_rl.environments.parsers import BadCall, Parser
from lit_rl.environments.tools import ToolAnswer, Toolbox, ToolCall
from lit_rl.environments.user_class import UserClass, called, closed, opening_of, reward_of
from lit_rl.rollout import Message

_ID = re.compile(r"[A-Za-z0-9]{9}")
"""An id as Mistral's templates demand it. In other templates it is of no use."""


class ToolEnvironment(Environment):
    """A turn without a call is the final answer; every call of a turn is answered, in the order of the calls. Async
    tools that one turn calls run at the same time.

    Args:
        toolbox: Tools that may be called.
        parser: Reads the calls.
    """

    def __init__(self, toolbox: Toolbox, parser: Parser) -> None:
        self._toolbox, self._parser = toolbox, parser

    async def reset(self, seed: int, row: Mapping[str, Any]) -> Opening:
        return None

    async def answer(self, turn: Turn) -> Reply:
        parsed = self._parser.parse(turn.written)
        if not parsed.calls:
            return Reply(turn.message(turn.text), end="cut" if turn.cut else "answered")
        answers = await self._answers(parsed.calls)
        return Reply(
            _said(turn, parsed.content, parsed.calls),
            [self._message(call, answer) for call, answer in zip(parsed.calls, answers, strict=True)],
            calls=len(answers),
            failed_calls=sum(answer.failed for answer in answers),
            unreadable_calls=sum(isinstance(call, BadCall) for call in parsed.calls),
        )

    async def _answers(self, calls: Sequence[ToolCall | BadCall]) -> list[ToolAnswer]:
        """Return the replies in the order of the calls. Async tools run at the same time."""
        if not self._toolbox.is_async:
            return [await self._answer(call) for call in calls]
        begun = [asyncio.ensure_future(self._answer(call)) for call in calls]
        try:
            return list(await asyncio.gather(*begun))
        finally:
            for each in begun:  # one raised, or the time is over
                each.cancel()

    async def _answer(self, call: ToolCall | BadCall) -> ToolAnswer:
        if isinstance(call, BadCall):
            return ToolAnswer(f"error: {call.why}", failed=True)
        return await self._toolbox.answer(call)

    def _message(self, call: ToolCall | BadCall, answer: ToolAnswer) -> Message:
        """Return the reply as templates expect it. Names and ids that the policy made up are left out."""
        name, id_ = ("unknown", None) if isinstance(call, BadCall) else (call.name, call.id)
        known = name if name in self._toolbox.tools else "unknown"
        message: Message = {"role": "tool", "name": known, "content": answer.content}
        return message | {"tool_call_id": id_} if id_ and _ID.fullmatch(id_) else message


class ObjectWithTools(ToolEnvironment):
    """A `ToolEnvironment` whose tools are methods of a user's object, which begins the episode and may reward it.

    Args:
        made: The object.
        described: Description of its class.
        toolbox: Its methods, and other tools that may be called.
        parser: Reads the calls.
    """

    def __init__(self, made: Any, described: UserClass, toolbox: Toolbox, parser: Parser) -> None:
        super().__init__(toolbox, parser)
        self._made, self._described = made, described

    async def reset(self, seed: int, row: Mapping[str, Any]) -> Opening:
        arguments = self._described.arguments(seed, row)
        return opening_of(await called(self._made.reset, **arguments), f"{self._described.name}.reset")

    async def reward(self) -> float | None:
        return await reward_of(self._made, self._described)

    async def close(self) -> None:
        await closed(self._made)


def _said(turn: Turn, content: str, calls: Sequence[ToolCall | BadCall]) -> Message:
    """Return the policy's turn with its calls as templates expect them. An unreadable one is text."""
    unread = "".join(call.text for call in calls if isinstance(call, BadCall))
    written = [_written(call) for call in calls if isinstance(call, ToolCall)]
    message = turn.message(content + unread)
    return message | {"tool_calls": written} if written else message


def _written(call: ToolCall) -> Message:
    written: Message = {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
    return written if call.id is None else {"id": call.id, **written}
