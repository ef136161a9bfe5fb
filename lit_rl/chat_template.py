"""The one door to a chat template, behind which a rendering takes a bounded time and gives a bounded text.

A template is a program that comes with a model. Jinja's sandbox bounds what it reaches and how long one loop is, but
not loops inside loops, nor functions that call themselves, nor how long a text becomes.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_rl.errors import ConfigError
from lit_rl.time_limit import TookTooLong, time_limit

LIMIT = 10.0
"""Seconds for one conversation. Templates of models take less than a thousandth of that for a long one."""

LONGEST = 10_000_000
"""Characters that a rendering may have, or `_TIMES` those of the messages where that is more: long rows are no fault of
a template, which adds some hundred characters to a message."""
_TIMES = 100

_EVERY = 0.25
"""Seconds between two checks of renderings in other threads."""


def apply_chat_template(tokenizer: Any, messages: Sequence[Any], **how: Any) -> Any:
    """Render as the tokenizer's own does, for at most `LIMIT` seconds, a text of about `LONGEST` characters at most.

    Arguments of tool calls that are the JSON text of an object, as in the APIs of servers, are passed as that object: a
    template that writes objects as JSON would write such a text as a JSON string. If the template refuses objects
    (DeepSeek-V3's), it gets all arguments as JSON text. If it reads only texts in parts (models over images such as
    SmolVLM), every content is passed as a list of parts. Thoughts of the assistant are passed by the key that the
    template reads (`THOUGHTS`). So is a thought at the very beginning of a content, between `<think>` and `</think>` or
    before a line `</think>`: the template would render an empty thought, and the thought as part of the reply.

    Args:
        tokenizer: Of transformers, with a chat template.
        messages: One conversation.
        how: Further arguments of the tokenizer's `apply_chat_template`.

    Raises:
        ConfigError: it took longer, found no memory, or wrote more; names the file of the template.
        Exception: of any class: the template refuses the messages.
    """
    main = threading.current_thread() is threading.main_thread()
    try:
        with time_limit(LIMIT, "chat template") if main else _watch.limit(LIMIT):
            text = _rendered(tokenizer, messages, how)
    except TookTooLong:
        raise ConfigError(
            f"The chat template of {_place(tokenizer)} still ran after {LIMIT:g} s on one conversation of "
            f"{len(messages)} messages, and was stopped: it has loops that hardly end, for these messages or for all. "
            "Read it, or take another one with model.chat_template=FILE."
        ) from None
    except MemoryError:
        raise ConfigError(
            f"The chat template of {_place(tokenizer)} asked for more memory than there is, on one conversation of "
            f"{len(messages)} messages. Read it, or take another one with model.chat_template=FILE; if it is sound, "
            "something else fills this machine."
        ) from None
    if isinstance(text, str) and len(text) > LONGEST and len(text) > _TIMES * len(str(messages)):
        raise ConfigError(
            f"The chat template of {_place(tokenizer)} made {len(text)} characters of one conversation of "
            f"{len(messages)} messages, which have {len(str(messages))} themselves. Read it, or take another one with "
            "model.chat_template=FILE."
        )
    return text


def arguments_of_rendering(tokenizer: Any) -> set[str]:
    """Return the names that a tokenizer's `apply_chat_template` takes itself, for every template."""
    return set(inspect.signature(tokenizer.apply_chat_template).parameters)


def call_arguments(arguments: Any) -> Any:
    """Return the arguments of a tool call as an object if they are one or the JSON text of one, else unchanged.

    Nothing (None, or a blank text) is the object without keys: calls of functions that take nothing have it.
    """
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        read = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments


def _rendered(tokenizer: Any, messages: Sequence[Any], how: dict[str, Any]) -> Any:
    """Return the rendering, with thoughts and contents in the form that the template reads."""
    placed = _in_parts if _wants_parts(tokenizer) else list[Any]
    told = _with_thoughts(tokenizer, messages)
    try:
        return _with_calls(tokenizer, placed(told), how)
    except (TookTooLong, MemoryError):
        raise
    except Exception:  # gpt-oss' refuses thoughts beside content and calls: they are dropped, with a warning
        if told == messages:
            raise
        return _with_calls(tokenizer, placed(messages), how)


THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of messages in which data sets keep the thoughts of the assistant."""

_OPENS, _CLOSES = "<think>", "</think>"
_OPENED = re.compile(rf"\s*{_OPENS}(.*?){_CLOSES}(.*)", re.DOTALL)
_CLOSED = re.compile(rf"(\s*|.*?\n)[ \t]*{_CLOSES}[ \t\r]*(|[\n<].*)", re.DOTALL)
"""A content with a thought between both marks; and with the end of one that the generation prompt has opened, whose
mark stands on a line of its own, or before the mark of a call. Marks anywhere else are part of the reply."""


@dataclass(frozen=True)
class _Thinking:
    """The way in which a template takes thoughts."""

    keys: tuple[str, ...]
    """The keys of `THOUGHTS` that it reads."""
    apart: tuple[bool, bool]
    """True if thoughts in a content are to be passed by the key: between both marks, and before the second."""


_thinking: dict[str, _Thinking] = {}
"""Cache by template."""


def _with_thoughts(tokenizer: Any, messages: Sequence[Any]) -> Sequence[Any]:
    """Return the messages with thoughts by the key that the template reads."""

    def thinks(message: Any) -> bool:
        return isinstance(message, Mapping) and (
            any(message.get(key) for key in THOUGHTS) or _CLOSES in str(message.get("content"))
        )

    if not any(map(thinks, messages)):
        return messages
    takes = _takes_thoughts(tokenizer)
    return [_thinking_apart(message, takes) if thinks(message) else message for message in messages]


def _thinking_apart(message: Mapping[str, Any], takes: _Thinking) -> Mapping[str, Any]:
    if not takes.keys or message.get("role") != "assistant" or any(message.get(key) for key in takes.keys):
        return message
    content = message.get("content")
    given = next((key for key in THOUGHTS if isinstance(message.get(key), str) and message[key]), None)
    if given is not None:
        return {**{key: item for key, item in message.items() if key != given}, takes.keys[0]: message[given]}
    if not isinstance(content, str):
        return message
    opened = content.lstrip().startswith(_OPENS)
    found = (_OPENED if opened else _CLOSED).fullmatch(content)
    if found is None or not takes.apart[0 if opened else 1]:
        return message
    if not opened and (_OPENS in found[1] or content.count(_CLOSES) > 1):
        return message
    return {**message, takes.keys[0]: found[1].strip("\n"), "content": found[2].lstrip("\n")}


def _takes_thoughts(tokenizer: Any) -> _Thinking:
    template = tokenizer.chat_template
    source = "\n".join(template.values()) if isinstance(template, dict) else str(template)
    if source not in _thinking:
        keys = tuple(key for key in THOUGHTS if re.search(rf"\.{key}\b|['\"]{key}['\"]", source))
        apart = (False, False)
        if keys and _thinks_once(tokenizer, {keys[0]: _THOUGHT, "content": _SAID}):
            both, closed = f"{_OPENS}\n{_THOUGHT}\n{_CLOSES}\n\n{_SAID}", f"{_THOUGHT}\n{_CLOSES}\n\n{_SAID}"
            apart = not _thinks_once(tokenizer, {"content": both}), not _thinks_once(tokenizer, {"content": closed})
        _thinking[source] = _Thinking(keys, apart)
    return _thinking[source]


_THOUGHT, _SAID = "qqthoughtqq", "qqsaidqq"


def _thinks_once(tokenizer: Any, reply: Mapping[str, Any]) -> bool:
    """Tell whether the template writes one thought before the content of a reply, and the reply's own."""
    asked = [{"role": "user", "content": _PROBE}, {"role": "assistant", **reply}]
    try:
        text = str(tokenizer.apply_chat_template(asked, tokenize=False))
    except (TookTooLong, MemoryError):
        raise
    except Exception:  # a template is a program, and may raise anything
        return False
    turn = text.rpartition(_PROBE)[2].partition(_SAID)[0]
    return all(turn.count(words) == 1 for words in (_THOUGHT, _OPENS, _CLOSES))


_PROBE = "qqpartsqq"
_wanting_parts: dict[str, bool] = {}
"""Cache by template: whether it reads texts in parts alone."""


def _wants_parts(tokenizer: Any) -> bool:
    """Tell whether the template drops a text that is a plain string, and writes one in a part."""
    template = str(tokenizer.chat_template)
    if template not in _wanting_parts:
        asked = [{"role": "user", "content": _PROBE}]
        _wanting_parts[template] = not _writes(tokenizer, asked) and _writes(tokenizer, _in_parts(asked))
    return _wanting_parts[template]


def _writes(tokenizer: Any, messages: Sequence[Any]) -> bool:
    try:
        return _PROBE in str(tokenizer.apply_chat_template(messages, tokenize=False))
    except (TookTooLong, MemoryError):
        raise
    except Exception:  # a template is a program, and may raise anything
        return False


def _in_parts(messages: Sequence[Any]) -> list[Any]:
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message, Mapping) and isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def _with_calls(tokenizer: Any, messages: Sequence[Any], how: dict[str, Any]) -> Any:
    """Return the rendering, with arguments of tool calls in the form that the template reads."""
    if not any(isinstance(message, Mapping) and message.get("tool_calls") for message in messages):
        return tokenizer.apply_chat_template(messages, **how)
    try:
        return tokenizer.apply_chat_template(_arguments_as(call_arguments, messages), **how)
    except (TookTooLong, MemoryError):
        raise
    except Exception as error:  # a template is a program, and may raise anything if it gets an object
        try:
            return tokenizer.apply_chat_template(_arguments_as(_json_text, messages), **how)
        except (TookTooLong, MemoryError):
            raise
        except Exception:
            raise error from None


def _arguments_as(form: Callable[[Any], Any], messages: Sequence[Any]) -> list[Any]:
    """Return the messages with the arguments of every call in this form; the input is not changed."""

    def changed(call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": changed(call["function"])}
        return {**call, "arguments": form(call["arguments"])} if "arguments" in call else call

    def of(message: Any) -> Any:
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        return (
            {**message, "tool_calls": [changed(call) for call in calls]} if isinstance(calls, list | tuple) else message
        )

    return [of(message) for message in messages]


def _json_text(arguments: Any) -> str:
    if isinstance(arguments, str) and arguments.strip():
        return arguments
    return json.dumps(call_arguments(arguments), ensure_ascii=False)


class _Watch:
    """Interrupts renderings of threads other than the main one, which alone has an alarm: one more thread has the
    interpreter raise an exception in them, between two instructions of Python."""

    def __init__(self) -> None:
        self._due: dict[int, float] = {}
        self._turn = threading.Lock()
        self._watching = threading.Thread()

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """Interrupt the block when its time is over.

        Raises:
            TookTooLong: in the block, and out of it.
        """
        thread = threading.get_ident()
        with self._turn:
            self._due[thread] = time.monotonic() + seconds
            if not self._watching.is_alive():  # none yet, or a fork has left it behind
                self._watching = threading.Thread(target=self._watch, name="chat-template-limit", daemon=True)
                self._watching.start()
        try:
            yield
        finally:
            with self._turn:
                del self._due[thread]
                _raise_in(ctypes.c_ulong(thread), None)  # cancel an exception that is still pending

    def _watch(self) -> None:
        while True:
            time.sleep(_EVERY)
            with self._turn:
                for thread, due in self._due.items():
                    if time.monotonic() > due:
                        _raise_in(ctypes.c_ulong(thread), ctypes.py_object(TookTooLong))


_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_watch = _Watch()
if hasattr(os, "register_at_fork"):  # a child has no thread of the parent, to give its lock back
    os.register_at_fork(after_in_child=_watch.__init__)


def _place(tokenizer: Any) -> str:
    """Return the file in the model's folder that holds the template, or the model with a note that it was set by
    hand."""
    name, template = getattr(tokenizer, "name_or_path", "") or "this tokenizer", tokenizer.chat_template
    jinja, config = Path(name) / "chat_template.jinja", Path(name) / "tokenizer_config.json"
    if jinja.is_file() and jinja.read_text(encoding="utf-8") == template:
        return str(jinja)
    if config.is_file() and json.loads(config.read_text(encoding="utf-8")).get("chat_template") == template:
        return str(config)
    return f"{name} (which model.chat_template has set, or the model's own)"
