"""An environment whose turns call tools: functions, and the public methods of an object of the user's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lit_rl.environments.base import Environment, Opening, Reply, Turn
from lit_rl.environments.parsers import BadCall, Parser
from lit_rl.environments.tools import ToolAnswer, Toolbox, ToolCall
from lit_rl.environments.user_class import UserClass, called, closed, reward_of
from lit_rl.rollout import Message


class ToolEnvironment(Environment):
    """A turn without a call is the final answer; every call of a turn is answered, in the order of the calls.

    Args:
        toolbox: What may be called.
        parser: Reads the calls.
    """

    def __init__(self, toolbox: Toolbox, parser: Parser) -> None:
        self._toolbox, self._parser = toolbox, parser

    async def reset(self, seed: int, row: Mapping[str, Any]) -> Opening:
        return None

    async def answer(self, turn: Turn) -> Reply:
        parsed = self._parser.parse(turn.written)
        if not parsed.calls:
            return Reply({"role": "assistant", "content": turn.text}, end="cut" if turn.cut else "answered")
        answers = [await self._answer(call) for call in parsed.calls]
        return Reply(
            _said(parsed.content, parsed.calls),
            [_message(call, answer) for call, answer in zip(parsed.calls, answers, strict=True)],
            calls=len(answers),
            failed_calls=sum(answer.failed for answer in answers),
            unreadable_calls=sum(isinstance(call, BadCall) for call in parsed.calls),
        )

    async def _answer(self, call: ToolCall | BadCall) -> ToolAnswer:
        if isinstance(call, BadCall):
            return ToolAnswer(f"error: {call.why}", failed=True)
        return await self._toolbox.answer(call)


class ObjectWithTools(ToolEnvironment):
    """The same with an object of the user's behind the tools, which begins the episode and may reward it.

    Args:
        made: The object.
        described: Its class.
        toolbox: Its methods, and what else may be called.
        parser: Reads the calls.
    """

    def __init__(self, made: Any, described: UserClass, toolbox: Toolbox, parser: Parser) -> None:
        super().__init__(toolbox, parser)
        self._made, self._described = made, described

    async def reset(self, seed: int, row: Mapping[str, Any]) -> Opening:
        return await called(self._made.reset, **self._described.arguments(seed, row))

    async def reward(self) -> float | None:
        return await reward_of(self._made, self._described)

    async def close(self) -> None:
        await closed(self._made)


def _said(content: str, calls: Sequence[ToolCall | BadCall]) -> Message:
    """The policy's turn with its calls as templates know them. One that could not be read is text."""
    unread = "".join(call.text for call in calls if isinstance(call, BadCall))
    written = [_written(call) for call in calls if isinstance(call, ToolCall)]
    message: Message = {"role": "assistant", "content": content + unread}
    return message | {"tool_calls": written} if written else message


def _written(call: ToolCall) -> Message:
    written: Message = {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
    return written if call.id is None else {"id": call.id, **written}


def _message(call: ToolCall | BadCall, answer: ToolAnswer) -> Message:
    name = call.name if isinstance(call, ToolCall) else "unreadable"
    message: Message = {"role": "tool", "name": name, "content": answer.text}
    id_ = call.id if isinstance(call, ToolCall) else None
    return message if id_ is None else message | {"tool_call_id": id_}
