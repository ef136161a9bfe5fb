"""One completion as a conversation over OpenAI's API: the drawn tokens stay those that are learned from.

`read_request` reads a request for a chat completion, and `ChatTurn` is the answer to it. An agent sends the whole
conversation with each request. The policy's own turns in it are not tokenised again: they have to equal the earlier
answers, and stand for their tokens. New messages answer the last turn, and are rendered behind it as
`lit_rl.environments.frames` does. A request that does not answer the last turn goes on from an earlier one, or begins
another text, as far as `env.max_branches` allows: see `lit_rl.core.branches`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lit_rl.core.branches import TokenTree
from lit_rl.core.episode import End, Message, message_text
from lit_rl.core.errors import excerpt
from lit_rl.environments.frames import AnswerRole, ChatFrames, check_tools_are_rendered
from lit_rl.environments.parser_base import UNREADABLE, BadCall, Parser
from lit_rl.environments.thoughts import speaks_on_channels, split_thoughts
from lit_rl.environments.tool_parsers import RegexParser, parser_for
from lit_rl.environments.tools import ToolCall

MODEL = "policy"
"""The policy's name in the API."""


class ChatRequestRefused(Exception):
    """A refusal that is answered in place of a turn.

    Args:
        why: The reason, for a person.
        status: The HTTP status.
        code: The code of OpenAI's errors, for programs.
    """

    def __init__(self, why: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(why)
        self.status, self.code = status, code

    @property
    def body(self) -> bytes:
        """The refusal as JSON."""
        error = {"message": str(self), "type": "invalid_request_error", "param": None, "code": self.code}
        return json.dumps({"error": error}).encode()


@dataclass(frozen=True)
class ChatRequest:
    """A request for a turn of the policy."""

    messages: list[Message]
    """Messages with texts as contents; calls as OpenAI writes them, their arguments as JSON text."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    max_new_tokens: int | None = None
    stream: bool = False


@dataclass(frozen=True)
class ChatTurn:
    """A turn of the policy as an answer."""

    message: Message
    finish: str
    """``stop``, ``tool_calls`` or ``length``."""
    prompt_tokens: int
    new_tokens: int

    @property
    def body(self) -> dict[str, Any]:
        """The turn as a chat completion."""
        choice = {"index": 0, "message": self.message, "finish_reason": self.finish, "logprobs": None}
        return self._around("chat.completion", [choice]) | {"usage": self._usage}

    @property
    def events(self) -> bytes:
        """The turn as the events of a stream: the message, the reason of its end, its length."""
        calls = [{"index": number, **call} for number, call in enumerate(self.message.get("tool_calls") or ())]
        delta = {**self.message, **({"tool_calls": calls} if calls else {})}
        chunks = [
            self._around("chat.completion.chunk", [{"index": 0, "delta": delta, "finish_reason": None}]),
            self._around("chat.completion.chunk", [{"index": 0, "delta": {}, "finish_reason": self.finish}]),
            self._around("chat.completion.chunk", []) | {"usage": self._usage},
        ]
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        return "".join([*lines, "data: [DONE]\n\n"]).encode()

    def _around(self, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"id": "chatcmpl-lit-rl", "object": kind, "created": 0, "model": MODEL, "choices": list(choices)}

    @property
    def _usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.new_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.new_tokens, "total_tokens": total}


def read_request(body: bytes) -> ChatRequest:
    """Parse a request. Its sampling settings are ignored: the run's apply.

    Raises:
        ChatRequestRefused: it is no valid request, or asks for a setting that would change a turn.
    """
    try:
        request = json.loads(body)
    except ValueError as error:
        raise ChatRequestRefused(f"the request is not JSON: {error}") from error
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list) or not request["messages"]:
        raise ChatRequestRefused("the request is an object with a list of messages")
    if refused := [name for name, allowed in _ALLOWED_VALUES.items() if request.get(name) not in allowed]:
        raise ChatRequestRefused(f"{', '.join(refused)} cannot be asked of a policy in training; leave it out")
    limits = [request[name] for name in ("max_tokens", "max_completion_tokens") if request.get(name) is not None]
    if any(not isinstance(limit, int) or limit < 1 for limit in limits):
        raise ChatRequestRefused(f"max_tokens={limits} is no number of tokens")
    tools = []
    for tool in _listed("tools", request.get("tools")):
        function = _function_of(tool, "function that can be called")
        described = {"name": function["name"], "description": function.get("description") or ""}
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        tools.append({"type": "function", "function": {**described, "parameters": parameters}})
    return ChatRequest(
        messages=[_message(each) for each in request["messages"]],
        tools=tools,
        max_new_tokens=min(limits, default=None),
        stream=bool(request.get("stream")),
    )


_ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "stop": (None, [], ""),
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "tool_choice": (None, "auto"),
}
"""Settings that would change a turn, and the values that do not."""


def _message(value: Any) -> Message:
    if not isinstance(value, dict) or value.get("role") not in ("system", "developer", "user", "assistant", "tool"):
        raise ChatRequestRefused(f"{excerpt(repr(value))} is not a chat message")
    content = value.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if content is not None and not isinstance(content, str):
        raise ChatRequestRefused(f"the content {excerpt(repr(content))} is no text, and the policy reads texts")
    message: Message = {"role": "system" if value["role"] == "developer" else value["role"], "content": content or ""}
    if calls := _listed("tool_calls", value.get("tool_calls")):
        for call in calls:
            _function_of(call, "call of a function: that has function.name")
        message["tool_calls"] = calls
    if value["role"] == "tool":
        message["tool_call_id"] = str(value.get("tool_call_id") or "")
    return message


def _listed(name: str, value: Any) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise ChatRequestRefused(f"{name}={excerpt(repr(value))} is not a list")
    return value or []


def _function_of(value: Any, what: str) -> dict[str, Any]:
    """Return the function of a call or a tool; refuse one without a name."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ChatRequestRefused(f"{excerpt(repr(value))} is no {what}")
    return function


# ------------------------------------------------------------------ a completion as a conversation


@dataclass
class ChatConversation:
    """A completion while it is written.

    Args:
        reading: Converts its tokens.
        max_tokens: Most tokens of the completion, with the answers that the policy reads between its turns; of each of
            its branches.
        max_branches: Most branches.
    """

    reading: ChatReading
    max_tokens: int
    max_branches: int = 1
    tree: TokenTree = field(default_factory=TokenTree)
    """The tokens."""
    ended: bool = False
    """True where the last turn came to its end, and nothing was cut."""
    full: bool = False
    """True where a turn was requested that a limit forbids: of tokens, or of several branches."""
    limit: End | None = None
    """The limit of branches, where the last request met it."""
    turns: int = 0
    messages: list[Message] = field(default_factory=list)
    """The messages behind the prompt, in the form for templates: one of the assistant for each turn. Where another text
    begins, they are all of that text; what an assistant says in it is of a user with that name, as it is only read."""
    _past: list[_PastTurn] = field(default_factory=list)
    """The turns so far."""
    _pending: _PendingRequest | None = None
    _answered: tuple[ChatRequest, ChatTurn] | None = None

    @property
    def prompt_ids(self) -> list[int]:
        return self.tree.prompt_ids

    @property
    def completion_ids(self) -> list[int]:
        return self.tree.token_ids

    @property
    def logprobs(self) -> list[float]:
        return self.tree.logprobs

    @property
    def written(self) -> list[int]:
        """1 for the tokens of the policy."""
        return self.tree.written

    @property
    def follows(self) -> list[int]:
        """The place that each token stands behind."""
        return self.tree.follows

    def answered(self, request: ChatRequest) -> ChatTurn | None:
        """Return the answer to this very request if it was the last one: a client repeats it where it has lost the
        answer."""
        return self._answered[1] if self._answered is not None and self._answered[0] == request else None

    def ask(self, request: ChatRequest) -> tuple[list[int], int]:
        """Return the tokens from which the policy continues, and the most that it may write.

        Raises:
            ChatRequestRefused: the request is no next turn of this conversation and may begin no other, or there is no
                room for one.
        """
        if self._pending is not None:
            raise ChatRequestRefused("the policy was asked before it had answered: one turn of a completion at a time")
        asked = self._continued(request) if self._past else self._begun(request)
        if (count := self.tree.branches_with(asked.place)) > self.max_branches:
            self.ended, self.full, self.limit = False, True, "max_branches"
            raise ChatRequestRefused(
                f"A completion may have env.max_branches={self.max_branches} texts, and this would be number {count}: "
                "go on with one of them, or end.",
                code="max_branches",
            )
        path = self.tree.path(asked.place)
        own = next((number for number, place in enumerate(path) if place >= 0 and self.written[place]), None)
        prompt = min(len(path) + len(asked.read) if own is None else own, len(self.prompt_ids))
        room = self.max_tokens - (len(path) - prompt) - len(asked.read)
        if room < 1:
            self.ended, self.full = False, True
            raise ChatRequestRefused(
                f"This model's maximum context length is reached: a completion may have env.max_tokens="
                f"{self.max_tokens} tokens.",
                code="context_length_exceeded",
            )
        self._pending, self._answered = asked, None
        return [*self.tree.text(asked.place), *asked.read], room

    def answer(self, ids: Sequence[int], logprobs: Sequence[float], *, ended: bool) -> ChatTurn:
        """Record the policy's continuation, and return it as a turn."""
        assert self._pending is not None, "nobody asked"
        asked, self._pending = self._pending, None
        request, prompt = asked.request, len(self.tree.path(asked.place)) + len(asked.read)
        goes_on = asked.place == self.tree.last
        self.tree.grow(asked.place, asked.read, ids, logprobs)
        earlier = request.messages if self._past else ()
        calls = sum(len(each.get("tool_calls") or ()) for each in earlier)
        message = self.reading.turn(ids, request, calls)
        self._note(asked.noted if asked.read or not goes_on else [], message, joins=goes_on)
        history, closed = [*request.messages, message], self.reading.closed(ids)
        self._past.append(_PastTurn(history, self.tree.last, closed, asked.tools))
        self.ended, self.limit, self.turns = ended, None, self.turns + 1
        finish = "tool_calls" if message.get("tool_calls") else "stop" if ended else "length"
        self._answered = request, ChatTurn(message, finish, prompt, len(ids))
        return self._answered[1]

    def write(self, prompt_ids: Sequence[int], ids: Sequence[int], logprobs: Sequence[float], *, ended: bool) -> None:
        """Record a completion of one turn without a request."""
        self.tree.begin(prompt_ids)
        self.tree.grow(self.tree.last, [], ids, logprobs)
        self.ended, self.turns = ended, 1
        self._note([], self.reading.plain_turn(ids))

    def _note(self, answers: Sequence[Message], turn: Message, *, joins: bool = True) -> None:
        """Append the answers that were read, and the turn behind them. Where nothing was read between two turns that
        stand behind each other (`joins`), their tokens are one turn, and so are their messages."""
        # The turn in the form for templates: arguments of calls as mappings, thoughts under ``thinking``.
        message: Message = {"role": "assistant", "content": turn["content"]}
        if thought := turn.get(THOUGHTS[0]):
            message["thinking"] = thought
        calls = [{**call, "function": _function(call)} for call in turn.get("tool_calls") or ()]
        if joins and not answers and self.messages:
            before = self.messages.pop()
            calls = [*before.get("tool_calls", ()), *calls]
            message = {**before, **message, "content": before["content"] + message["content"]}
        self.messages += [*answers, message | {"tool_calls": calls} if calls else message]

    def _begun(self, request: ChatRequest) -> _PendingRequest:
        """Return the first request."""
        self.tree.begin(self.reading.prompt(request))
        return _PendingRequest(request, -1, [], [], _names(request))

    def _continued(self, request: ChatRequest) -> _PendingRequest:
        """Return a later request: of the newest turn that it answers, or of another text."""
        for past in reversed(self._past):
            try:
                answers = self._answers(request, past)
            except ChatRequestRefused:
                if self.max_branches == 1:
                    raise
                continue
            between = self.reading.answers(answers, request, closed=past.closed)
            return _PendingRequest(request, *self.tree.walk(past.place, between), answers, past.tools)
        place, read = self.tree.walk(self.tree.root, self.reading.prompt(request))
        first, noted = self._past[0].history[:-1], list(_examples(request.messages))
        if list(map(_compared, first)) == list(map(_compared, request.messages[: len(first)])):
            noted = noted[len(first) :]
        return _PendingRequest(request, place, read, [_quoted(message) for message in noted], _names(request))

    def _answers(self, request: ChatRequest, past: _PastTurn) -> list[Message]:
        """Return the messages that answer a turn, in the form for templates."""
        history = past.history
        known, new = request.messages[: len(history)], request.messages[len(history) :]
        for number, (was, now) in enumerate(zip(history, known)):
            if _compared(was) != _compared(now):
                raise ChatRequestRefused(
                    f"message {number} was {excerpt(json.dumps(was))} and is now {excerpt(json.dumps(now))}: "
                    "with env.max_branches=1 a completion is one conversation that goes on, and this begins or "
                    "rewrites another"
                )
        roles = {message["role"] for message in new}
        if len(known) < len(history) or roles not in ({"tool"}, {"user"}):
            raise ChatRequestRefused(
                f"after a turn of the policy, messages of tools or of the user are expected, got "
                f"{sorted(roles) or 'none'}"
            )
        if self.reading.parser != "regex" and (new_tools := _names(request) - past.tools):
            raise ChatRequestRefused(
                "the tools of a conversation are those of its first request, which did not contain "
                f"{', '.join(sorted(new_tools))}"
            )
        names = {call["id"]: call["function"]["name"] for call in history[-1].get("tool_calls") or ()}
        return [_answer(message, names) for message in new]


@dataclass(frozen=True)
class _PastTurn:
    """A turn of the policy."""

    history: list[Message]
    """The messages of its request, and the turn."""
    place: int
    """The place of its last token."""
    closed: bool
    """True if it ended with a token that ends turns."""
    tools: frozenset[str]
    """The names of the tools at the beginning of its text."""


@dataclass(frozen=True)
class _PendingRequest:
    """A request that waits for its turn."""

    request: ChatRequest
    place: int
    """The place behind which the policy goes on."""
    read: list[int]
    """The tokens that it reads behind that place before its turn."""
    noted: list[Message]
    """The messages of these tokens."""
    tools: frozenset[str]


_ID = re.compile(r"[A-Za-z0-9]{9}")
"""An id as Mistral's templates demand it."""

THOUGHTS = ("reasoning_content", "reasoning")
"""The keys of a message's thoughts: of DeepSeek, SGLang and older vLLM, and of vLLM today."""


@dataclass
class ChatReading:
    """The conversion between conversations of one rollout and tokens, in both directions.

    Args:
        tokenizer: The policy's.
        encode: A first prompt's tokens, by its messages and the arguments of the chat template.
        template_kwargs: Arguments of the chat template.
        eos_ids: Every token that ends a turn.
        parser: Name of the parser of tool calls, see `parser_for`.
        call_pattern: Pattern for `parser=regex`.
    """

    tokenizer: Any
    encode: Callable[..., list[int]]
    template_kwargs: Mapping[str, Any]
    eos_ids: frozenset[int]
    parser: str = "auto"
    call_pattern: str | None = None
    _frames: dict[tuple[str, AnswerRole, bool], ChatFrames] = field(default_factory=dict)
    _parsers: dict[str, Parser] = field(default_factory=dict)

    def prompt(self, request: ChatRequest) -> list[int]:
        """Return the tokens of a first request.

        Raises:
            ChatRequestRefused: the arguments of a call in it are no JSON object, or an answer of a tool is to no call.
            ConfigError: the chat template does not show the tools to the policy, or the format of calls is unknown.
        """
        settings, messages = dict(self.template_kwargs), request.messages
        if request.tools:
            settings["tools"] = request.tools
            if not isinstance(self._parser(request), RegexParser):  # of a call that no template knows, prompts tell
                check_tools_are_rendered(self.tokenizer, request.tools, settings)
        if any("tool_calls" in message for message in messages):
            messages = self._framed("tool", request, calls_are_text=False).with_calls([*_examples(messages)])
        return self.encode(messages, chat_template_kwargs=settings)

    def answers(self, messages: Sequence[Message], request: ChatRequest, *, closed: bool) -> list[int]:
        """Return the tokens between a turn and the next, for the messages that answer it."""
        kind: AnswerRole = "tool" if messages[0]["role"] == "tool" else "user"
        return self._framed(kind, request, calls_are_text=self.parser == "regex").encode(messages, closed=closed)

    def turn(self, ids: Sequence[int], request: ChatRequest, number: int) -> Message:
        """Return a turn of the policy as a message for the agent; calls without an id get one by their number."""
        message = self.plain_turn(ids)
        parsed = self._parser(request).parse(self._written(ids)) if request.tools else None
        if parsed is None or not parsed.calls:
            return message
        message["content"] = parsed.content + "".join(call.text for call in parsed.calls if isinstance(call, BadCall))
        calls = [call for call in parsed.calls if isinstance(call, ToolCall)]
        written = []
        for place, call in enumerate(calls):
            function = {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}
            written.append({"id": call.id or _call_id(number + place), "type": "function", "function": function})
        return message | {"tool_calls": written} if written else message

    def plain_turn(self, ids: Sequence[int]) -> Message:
        """Return a turn in which no tool can be called, as a message for the agent."""
        message: Message = {"role": "assistant", "content": self.tokenizer.decode(ids, skip_special_tokens=True)}
        if self._on_channels:
            message["content"], thought = split_thoughts(self._written(ids))
            message |= dict.fromkeys(THOUGHTS, thought) if thought else {}
        return message

    def _written(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids[:-1] if self.closed(ids) else ids))

    def closed(self, ids: Sequence[int]) -> bool:
        """Tell whether a turn ended with a token that ends turns."""
        return bool(ids) and ids[-1] in self.eos_ids

    @cached_property
    def _on_channels(self) -> bool:
        return speaks_on_channels(self.tokenizer)

    def _parser(self, request: ChatRequest) -> Parser:
        key = json.dumps(request.tools, sort_keys=True)
        if key not in self._parsers:
            rendered_with = {**self.template_kwargs, "tools": request.tools}
            self._parsers[key] = parser_for(
                self.parser, self.tokenizer, request.tools, self.call_pattern, rendered_with
            )
        return self._parsers[key]

    def _framed(self, kind: AnswerRole, request: ChatRequest, *, calls_are_text: bool) -> ChatFrames:
        key = json.dumps(request.tools, sort_keys=True), kind, calls_are_text
        if key not in self._frames:
            self._frames[key] = ChatFrames(
                self.tokenizer,
                eos_ids=sorted(self.eos_ids),
                kinds=(kind,),
                tools=request.tools,
                calls_are_text=calls_are_text,
                chat_template_kwargs=self.template_kwargs,
            )
        return self._frames[key]


def _names(request: ChatRequest) -> frozenset[str]:
    return frozenset(tool["function"]["name"] for tool in request.tools)


def _call_id(number: int) -> str:
    return f"call{number:05d}"


def _examples(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages of a prompt in the form for templates: the arguments of calls as mappings, the answers of
    tools with the tool's name, and unsupported ids as numbers."""
    names, ids = dict[str, str](), dict[str, str]()
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            name, id = call["function"]["name"], str(call.get("id"))
            names[id], ids[id] = name, id if _ID.fullmatch(id) else _call_id(len(ids))
            calls.append({"id": ids[id], "type": "function", "function": _function(call)})
        if message["role"] == "tool":
            yield _answer(message, names) | {"tool_call_id": ids[message["tool_call_id"]]}
        else:
            yield message | {"tool_calls": calls} if calls else message


def _function(call: Message) -> Message:
    """Return name and arguments of a call, with the arguments as a mapping: OpenAI's API sends them as JSON text."""
    name, written = call["function"]["name"], call["function"].get("arguments")
    try:
        read = json.loads(written or "{}") if isinstance(written, str | None) else written
    except UNREADABLE:
        read = None
    if not isinstance(read, dict):
        raise ChatRequestRefused(f"the arguments of a call of {name} are {excerpt(repr(written))}, and no JSON object")
    return {"name": name, "arguments": read}


def _answer(message: Message, names: Mapping[str, str]) -> Message:
    """Return an answer in the form for templates. An id that no template supports is left out."""
    if message["role"] != "tool":
        return message
    id = message["tool_call_id"]
    if id not in names:
        raise ChatRequestRefused(f"a tool answers the call {id!r}, and the policy's last calls are {sorted(names)}")
    answer: Message = {"role": "tool", "name": names[id], "content": message["content"]}
    return answer | {"tool_call_id": id} if _ID.fullmatch(id) else answer


def _quoted(message: Message) -> Message:
    """Return a message of a text that was not drawn as it stands: what an assistant says in it is no turn."""
    if message["role"] != "assistant":
        return message
    return {"role": "user", "name": "assistant", "content": message_text(message)}


def _compared(message: Message) -> tuple[Any, ...]:
    calls = [(call.get("id"), call["function"]["name"]) for call in message.get("tool_calls") or ()]
    return message["role"], message["content"], calls, message.get("tool_call_id")
