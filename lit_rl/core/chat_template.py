"""Messages to text by a chat template, in bounded time and length; parts of a text to tokens.

A template is a program that comes with a model. Jinja's sandbox bounds what it reaches and how long one loop
is, but neither nested loops, nor recursion, nor the length of the text. All rendering goes through
`apply_chat_template`. `tokenize_parts` tokenises texts that continue each other, such that each part keeps
the tokens it has where nothing follows.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_rl.core.errors import ConfigError
from lit_rl.core.interrupts import TimeLimitExceeded, time_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


LIMIT = 10.0
"""Seconds for one conversation. Templates of models take less than a thousandth of that for a long one."""

LONGEST = 10_000_000
"""Characters that a rendering may have, or `_LONGEST_FACTOR` those of the messages where that is more: long rows are no
fault of a template, which adds some hundred characters to a message."""
_LONGEST_FACTOR = 100

_WATCH_INTERVAL = 0.25
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
    except TimeLimitExceeded:
        raise ConfigError(
            f"The chat template of {_source_of_template(tokenizer)} still ran after {LIMIT:g} s on one conversation of "
            f"{len(messages)} messages, and was stopped: it has loops that hardly end, for these messages or for all. "
            "Read it, or take another one with model.chat_template=FILE."
        ) from None
    except MemoryError:
        raise ConfigError(
            f"The chat template of {_source_of_template(tokenizer)} asked for more memory than there is, on one "
            f"conversation of {len(messages)} messages. Read it, or take another one with model.chat_template=FILE; "
            "if it is sound, something else fills this machine."
        ) from None
    if isinstance(text, str) and len(text) > LONGEST and len(text) > _LONGEST_FACTOR * len(str(messages)):
        raise ConfigError(
            f"The chat template of {_source_of_template(tokenizer)} made {len(text)} characters of one conversation of "
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
    in_form = _in_parts if _wants_parts(tokenizer) else list[Any]

    def thinks(message: Any) -> bool:
        return isinstance(message, Mapping) and (
            any(message.get(key) for key in THOUGHTS) or _CLOSES in str(message.get("content"))
        )

    with_thoughts = messages
    if any(map(thinks, messages)):
        form = _form_of_thoughts(tokenizer)
        with_thoughts = [_thoughts_by_key(message, form) if thinks(message) else message for message in messages]
    try:
        return _with_calls(tokenizer, in_form(with_thoughts), how)
    except (TimeLimitExceeded, MemoryError):
        raise
    except Exception:  # gpt-oss' refuses thoughts beside content and calls: they are dropped, with a warning
        if with_thoughts == messages:
            raise
        return _with_calls(tokenizer, in_form(messages), how)


THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of messages in which data sets keep the thoughts of the assistant."""

_OPENS, _CLOSES = "<think>", "</think>"
_OPENED = re.compile(rf"\s*{_OPENS}(.*?){_CLOSES}(.*)", re.DOTALL)
_CLOSED = re.compile(rf"(\s*|.*?\n)[ \t]*{_CLOSES}[ \t\r]*(|[\n<].*)", re.DOTALL)
"""A content with a thought between both marks; and with the end of one that the generation prompt has opened, whose
mark stands on a line of its own, or before the mark of a call. Marks anywhere else are part of the reply."""


@dataclass(frozen=True)
class _ThoughtForm:
    """The way in which a template takes thoughts."""

    keys: tuple[str, ...]
    """The keys of `THOUGHTS` that it reads."""
    moves: tuple[bool, bool]
    """True if thoughts in a content are to be passed by the key: between both marks, and before the second."""


_thought_forms: dict[str, _ThoughtForm] = {}
"""Cache by template."""

_PROBE, _THOUGHT, _REPLY = "qqpartsqq", "qqthoughtqq", "qqsaidqq"
"""Texts of trial renderings."""


def _thoughts_by_key(message: Mapping[str, Any], form: _ThoughtForm) -> Mapping[str, Any]:
    """Return a message of the assistant with its thought by the key that the template reads."""
    if not form.keys or message.get("role") != "assistant" or any(message.get(key) for key in form.keys):
        return message
    content = message.get("content")
    found_key = next((key for key in THOUGHTS if isinstance(message.get(key), str) and message[key]), None)
    if found_key is not None:
        others = {key: item for key, item in message.items() if key != found_key}
        return {**others, form.keys[0]: message[found_key]}
    if not isinstance(content, str):
        return message
    opened = content.lstrip().startswith(_OPENS)
    found = (_OPENED if opened else _CLOSED).fullmatch(content)
    if found is None or not form.moves[0 if opened else 1]:
        return message
    if not opened and (_OPENS in found[1] or content.count(_CLOSES) > 1):
        return message
    return {**message, form.keys[0]: found[1].strip("\n"), "content": found[2].lstrip("\n")}


def _form_of_thoughts(tokenizer: Any) -> _ThoughtForm:
    """Return how the template takes thoughts, by trial renderings; cached by template."""
    template = tokenizer.chat_template
    source = "\n".join(template.values()) if isinstance(template, dict) else str(template)
    if source not in _thought_forms:
        keys = tuple(key for key in THOUGHTS if re.search(rf"\.{key}\b|['\"]{key}['\"]", source))
        moves = (False, False)
        if keys and _thinks_once(tokenizer, {keys[0]: _THOUGHT, "content": _REPLY}):
            both, closed = f"{_OPENS}\n{_THOUGHT}\n{_CLOSES}\n\n{_REPLY}", f"{_THOUGHT}\n{_CLOSES}\n\n{_REPLY}"
            moves = not _thinks_once(tokenizer, {"content": both}), not _thinks_once(tokenizer, {"content": closed})
        _thought_forms[source] = _ThoughtForm(keys, moves)
    return _thought_forms[source]


def _thinks_once(tokenizer: Any, reply: Mapping[str, Any]) -> bool:
    """Tell whether the template writes one thought before the content of a reply, and the reply's own."""
    asked = [{"role": "user", "content": _PROBE}, {"role": "assistant", **reply}]
    turn = _trial(tokenizer, asked).rpartition(_PROBE)[2].partition(_REPLY)[0]
    return all(turn.count(words) == 1 for words in (_THOUGHT, _OPENS, _CLOSES))


_wanting_parts: dict[str, bool] = {}
"""Cache by template: whether it reads texts in parts alone."""


def _wants_parts(tokenizer: Any) -> bool:
    """Tell whether the template drops a text that is a plain string, and writes one in a part."""
    template = str(tokenizer.chat_template)
    if template not in _wanting_parts:
        asked = [{"role": "user", "content": _PROBE}]
        drops = _PROBE not in _trial(tokenizer, asked)
        _wanting_parts[template] = drops and _PROBE in _trial(tokenizer, _in_parts(asked))
    return _wanting_parts[template]


def _trial(tokenizer: Any, messages: Sequence[Any]) -> str:
    """Return the rendering of probe messages; empty where the template refuses them."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except (TimeLimitExceeded, MemoryError):
        raise
    except Exception:  # a template is a program, and may raise anything
        return ""


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
        return tokenizer.apply_chat_template(_with_arguments(messages, as_text=False), **how)
    except (TimeLimitExceeded, MemoryError):
        raise
    except Exception as error:  # a template is a program, and may raise anything if it gets an object
        try:
            return tokenizer.apply_chat_template(_with_arguments(messages, as_text=True), **how)
        except (TimeLimitExceeded, MemoryError):
            raise
        except Exception:
            raise error from None


def _with_arguments(messages: Sequence[Any], *, as_text: bool) -> list[Any]:
    """Return the messages with the arguments of every call as an object, or as JSON text; the input is not changed."""

    def changed(call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": changed(call["function"])}
        if "arguments" not in call:
            return call
        arguments = call["arguments"]
        if not as_text:
            arguments = call_arguments(arguments)
        elif not isinstance(arguments, str) or not arguments.strip():
            arguments = json.dumps(call_arguments(arguments), ensure_ascii=False)
        return {**call, "arguments": arguments}

    found = []
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        if isinstance(calls, list | tuple):
            message = {**message, "tool_calls": [changed(call) for call in calls]}
        found.append(message)
    return found


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
            TimeLimitExceeded: in the block, and out of it.
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
            time.sleep(_WATCH_INTERVAL)
            with self._turn:
                for thread, due in self._due.items():
                    if time.monotonic() > due:
                        _raise_in(ctypes.c_ulong(thread), ctypes.py_object(TimeLimitExceeded))


_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_watch = _Watch()
if hasattr(os, "register_at_fork"):  # a child has no thread of the parent, to give its lock back
    os.register_at_fork(after_in_child=_watch.__init__)


def _source_of_template(tokenizer: Any) -> str:
    """Return the file in the model's folder that holds the template, or the model with a note that it was set by
    hand."""
    name, template = getattr(tokenizer, "name_or_path", "") or "this tokenizer", tokenizer.chat_template
    jinja, config = Path(name) / "chat_template.jinja", Path(name) / "tokenizer_config.json"
    if jinja.is_file() and jinja.read_text(encoding="utf-8") == template:
        return str(jinja)
    if config.is_file() and json.loads(config.read_text(encoding="utf-8")).get("chat_template") == template:
        return str(config)
    return f"{name} (which model.chat_template has set, or the model's own)"


_ANCHORS = ("\n", ".", "a", "1")
"""Texts to tokenise a continuation behind, where the tokenizer marks the start of a text."""

_FEW = 3
"""Number of parts, as of a prompt and its completion, up to which settled tokens are not separated to save time."""


def tokenize_parts(tokenizer: PreTrainedTokenizerBase, parts: Sequence[str]) -> tuple[list[int], list[int]]:
    """Return the token ids of the parts one after another, and their number up to the end of each part.

    The text up to the end of a part has the tokens that it has without the rest, as a model that was prompted with it
    has read just these. So the parts are tokenised together where that leaves the earlier tokens unchanged, and
    separately where a token would straddle the border.

    No special tokens are added. Tokenizers that mark the start of a text like a space (Llama's) tokenise a part after
    some other text, which is then removed; if the part merges with each of these, the straddling token is the later
    part's.
    """
    ids: list[int] = []  # of the text before `text`
    held: list[int] = []  # of `text`
    ends: list[int] = []
    text, inside = "", False  # whether `text` has the tokens of a text inside another one
    special = {} if len(parts) <= _FEW else tokenizer.added_tokens_decoder
    control = {number: str(token.content) for number, token in special.items() if token.special}
    for part in parts:
        whole = _after(tokenizer, text + part) if inside else _token_ids(tokenizer, text + part)
        apart = None if whole is not None and whole[: len(held)] == held else _after(tokenizer, part)
        if apart is not None:
            ids += held
            held, text, inside = apart, part, bool(ids)
        else:
            whole = _token_ids(tokenizer, text + part) if whole is None else whole
            common = common_prefix_length(held, whole)
            ends = [min(end, len(ids) + common) for end in ends]
            held, text = whole, text + part
        ends.append(len(ids) + len(held))
        if len(ends) == len(parts) or len(parts) <= _FEW:
            continue
        place, begin = _settled(tokenizer, text, held, control)
        if place:  # so that a part is not tokenised again for each later one
            ids += held[:place]
            held, text, inside = held[place:], text[begin:], False
    return [*ids, *held], ends


def _settled(
    tokenizer: PreTrainedTokenizerBase, text: str, held: Sequence[int], control: Mapping[int, str]
) -> tuple[int, int]:
    """Return the number of tokens and characters before the last control token of a text; 0 where that is unsafe.

    Tokenizers look for control tokens before all else, so the text after one has no influence on the tokens before it.
    """
    place = next((i for i in range(len(held) - 1, 0, -1) if held[i] in control), 0)
    begin = text.rfind(control[held[place]]) if place else 0
    return (place, begin) if begin > 0 and _token_ids(tokenizer, text[begin:]) == list(held[place:]) else (0, 0)


def common_prefix_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many leading ids, or characters, two sequences have in common."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def marks_start(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether a text by itself begins with a mark that it does not have inside another one."""
    alone, spaced = _token_ids(tokenizer, "a"), _token_ids(tokenizer, " a")
    tokens = tokenizer.convert_ids_to_tokens(alone)
    return bool(tokens) and (str(tokens[0]).startswith(("\u2581", "\u0120")) or alone == spaced)


def _after(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int] | None:
    """Return the token ids of a text inside another one, or None if they cannot be separated from what precedes it."""
    if not marks_start(tokenizer):
        return _token_ids(tokenizer, text)
    for anchor in _ANCHORS:
        before, whole = _token_ids(tokenizer, anchor), _token_ids(tokenizer, anchor + text)
        if before and whole[: len(before)] == before and str(tokenizer.decode(before)).strip() == anchor.strip():
            return whole[len(before) :]
    return None


def _token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
    return list(ids)
