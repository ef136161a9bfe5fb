"""Messages, tool calls and tools as other programs write them, normalized to one form.

Messages may be text in a cell, have ShareGPT's keys, or be arrays of numpy. Calls, their answers and thoughts may have
the form of OpenAI's or Anthropic's APIs.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lit_rl.core.chat_template import THOUGHTS, call_arguments
from lit_rl.core.errors import DataError, excerpt
from lit_rl.data.readers import ARGUMENTS, without_none

ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response", "tool_response", "ipython"), "tool"),
    "system": "system",
    "developer": "developer",
}
"""Names of roles in other programs, and the role that each is."""

_A_CALL = '"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]'


def _unclear_error(where: str, what: str) -> DataError:
    return DataError(f"{where} {what} Or make messages of role and content of such rows with data.map_row.")


def normalize_calls(messages: Sequence[Any], where: str) -> list[Any]:
    """Return the messages with their calls in ``tool_calls``, answers of the role tool, thoughts in a key of their own.

    Read are: ``tool_calls`` that are JSON text, a single call, or calls with their name at the top and the arguments in
    ``arguments``, ``args``, ``input`` or ``parameters``; ``function_call`` and the role ``function`` of OpenAI's older
    API; the parts ``tool_use``, ``tool_result`` and ``thinking`` of Anthropic's; the parts ``input_text`` and
    ``output_text``. A message with answers of tools becomes several.

    Args:
        messages: Each with a role. None of them is changed; one that is in our form already is itself.
        where: The column, for messages of errors.

    Raises:
        DataError: the order of texts, thoughts and calls is ambiguous, or a call is unclear.
    """
    names: dict[str, str] = {}
    found: list[Any] = []
    for number, message in enumerate(messages):
        place = f"{where}: message {number}"
        role = ROLES.get(str(message.get("role")).strip().lower(), message.get("role"))
        message = message if role == message.get("role") else {**message, "role": role}
        message = _with_listed_calls(message, place)
        content = message.get("content")
        if role == "assistant" and isinstance(content, list):
            message = _split_assistant_parts(message, content, place)
        for call in message.get("tool_calls") or ():
            if isinstance(call, Mapping) and call.get("id") is not None and isinstance(call.get("function"), Mapping):
                names[str(call["id"])] = str(call["function"].get("name"))
        if role == "user" and isinstance(content, list):
            found += _split_tool_results(message, content, names)
        elif role in ("system", "developer") and isinstance(content, list):
            texts = [_as_text(part) for part in content]
            found.append(message if texts == content else {**message, "content": texts})
        else:
            found.append(message)
    return found


def _as_text(part: Any) -> Any:
    """Return a part of OpenAI's Responses API as a part of text; any other as it is."""
    is_input = isinstance(part, Mapping) and part.get("type") == "input_text"
    return {**part, "type": "text"} if is_input else part


def read_calls(value: Any, where: str) -> list[Any]:
    """Return the calls that a value writes out, in our form: a list, a single one, or the text of either.

    Raises:
        DataError: it is a text of anything else, or a call has its arguments twice.
    """
    calls = parse_literal(value) if isinstance(value, str) else value
    calls = [calls] if isinstance(calls, Mapping) else calls
    if not isinstance(calls, list):
        raise _unclear_error(
            where, f"has calls of tools that are no JSON of calls: {excerpt(str(value))}. Write {_A_CALL}."
        )
    return [_normalize_call(parse_literal(call) if isinstance(call, str) else call, where) for call in calls]


def parse_literal(text: str) -> Any:
    """Return the value that a text writes out, as JSON or as Python does; the text itself where it is neither."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text.strip())
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return text


def _with_listed_calls(message: Mapping[str, Any], where: str) -> Any:
    """Return the message with its calls as a list in our form."""
    given, older = message.get("tool_calls"), message.get("function_call")
    absent = [key for key in _CALLS if message.get(key) is not None and _is_absent(message[key])]
    if absent:
        message = {key: item for key, item in message.items() if key not in absent}
        given, older = message.get("tool_calls"), message.get("function_call")
    if older:
        message = {key: item for key, item in message.items() if key != "function_call"}
        if given and not _are_among(read_calls(older, where), read_calls(given, where)):
            raise _unclear_error(where, "has calls in function_call and others in tool_calls: leave one of them out.")
        given = given or older
    if not isinstance(given, str | Mapping | list):
        return message
    calls = read_calls(given, where)
    return message if not older and calls == given else {"content": None, **message, "tool_calls": calls}


_CALLS = ("tool_calls", "function_call")


def _is_absent(value: Any) -> bool:
    """Tell whether it is nothing, the text of that, or what a table makes of a struct that a row does not have."""
    if isinstance(value, Mapping):
        return all(map(_is_absent, value.values()))
    return value is None or (isinstance(value, str) and value.strip().lower() in ("", "none", "null"))


def _are_among(calls: Sequence[Any], others: Sequence[Any]) -> bool:
    """Tell whether every one of these calls, in our form, is one of the others too, written in another place."""

    def same(one: Any, other: Any) -> bool:
        if not all(isinstance(each, Mapping) and isinstance(each.get("function"), Mapping) for each in (one, other)):
            return bool(one == other)
        ids = [each["id"] for each in (one, other) if each.get("id") is not None]
        contents = [
            (each["function"].get("name"), call_arguments(each["function"].get("arguments"))) for each in (one, other)
        ]
        return len(set(map(str, ids))) < 2 and contents[0] == contents[1]

    return len(calls) <= len(others) and all(any(same(call, other) for other in others) for call in calls)


def _normalize_call(call: Any, where: str) -> Any:
    """Return a call with its function in a mapping; other values are left for the check of messages."""
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    function = parse_literal(function) if isinstance(function, str) else function
    if isinstance(function, Mapping):
        rest, inner = call, function
    elif isinstance(function, str) or isinstance(call.get("name"), str):
        inner = {key: call[key] for key in ("name", *ARGUMENTS) if key in call}
        inner = inner if function is None else {**inner, "name": function}
        rest = {key: item for key, item in call.items() if key not in inner}
        if rest.get("id") is None and (known := rest.get("call_id") or rest.get("tool_call_id")):
            rest = {key: item for key, item in rest.items() if key not in ("call_id", "tool_call_id")} | {"id": known}
        rest = {key: item for key, item in rest.items() if item is not None} | {"type": "function"}
    else:
        return call
    if rest is call and isinstance(inner.get("name"), str) and inner.get("arguments") is not None:
        return call if inner is call["function"] else {**call, "function": inner}  # normal form already
    given = [key for key in ARGUMENTS if inner.get(key) is not None]
    if len(given) > 1:
        raise _unclear_error(where, f"has a call with {' and '.join(given)}: keep the one that holds its arguments.")
    if not isinstance(inner.get("name"), str) or (rest is call and "arguments" in inner and not given):
        return call  # arguments of None are read where they are rendered
    arguments = inner[given[0]] if given else {}
    others = {key: item for key, item in inner.items() if key not in ARGUMENTS}
    return {**rest, "function": {**others, "arguments": arguments}}


def _split_assistant_parts(message: Mapping[str, Any], parts: Sequence[Any], where: str) -> Any:
    """Return the assistant's message with the thoughts and calls of its parts in keys."""
    kinds = [str(part.get("type")) if isinstance(part, Mapping) else "" for part in parts]
    if "redacted_thinking" in kinds:
        raise _unclear_error(where, "has a thought that is encrypted (redacted_thinking): leave the part out.")
    rest: list[Any] = []
    thoughts: list[str] = []
    calls: list[Any] = []
    for kind, part in zip(kinds, parts):
        if kind in ("thinking", "reasoning"):
            if calls or not all(map(_is_blank, rest)):
                raise _unclear_error(
                    where,
                    "thinks behind what it says, and chat templates write thoughts first: divide it into "
                    "messages, or write all of it as one text.",
                )
            thoughts.append(_thought_text(part, where))
            rest.clear()  # blanks
        elif kind == "tool_use":
            calls += read_calls({key: item for key, item in part.items() if key != "type"}, where)
        elif calls and not _is_blank(part):
            raise _unclear_error(
                where,
                "says something behind a call (tool_use), and chat templates write calls last: divide it into "
                "messages, or write all of it as one text.",
            )
        else:
            rest.append({**part, "type": "text"} if kind == "output_text" else part)
    if rest == list(parts):
        return message
    keys = {key: item for key, item in message.items() if key != "content" or item is None}
    if thoughts:
        if any(message.get(key) for key in THOUGHTS):
            raise _unclear_error(where, "has thoughts in its content and in a key of its own: leave one of them out.")
        keys[THOUGHTS[0]] = "\n".join(thoughts)
    if calls:
        listed = message.get("tool_calls") or []
        if listed and not _are_among(calls, listed):
            raise _unclear_error(where, "has calls in its content and others in tool_calls: leave one of them out.")
        keys["tool_calls"] = listed or calls
    return {**keys, "content": rest if rest else ""}


def _thought_text(part: Mapping[str, Any], where: str) -> str:
    given = next((part[key] for key in ("thinking", "reasoning", "text") if part.get(key) is not None), None)
    if isinstance(given, list) and all(isinstance(each, Mapping) for each in given):
        given = "".join(str(each.get("text") or "") for each in given)
    if not isinstance(given, str):
        raise _unclear_error(where, f"has a thought without text: {excerpt(repr(part))}.")
    return given


def _split_tool_results(message: Mapping[str, Any], parts: Sequence[Any], names: Mapping[str, str]) -> list[Any]:
    """Return the user's message, with the answers of tools among its parts as messages of their own, in their order."""
    found: list[Any] = []
    changed = False
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "tool_result":
            known = str(part.get("tool_use_id"))
            answer = {"role": "tool", "content": "" if part.get("content") is None else part["content"]}
            answer |= {"tool_call_id": known} if part.get("tool_use_id") is not None else {}
            answer |= {"name": names[known]} if part.get("tool_use_id") is not None and known in names else {}
            answer |= {"is_error": True} if part.get("is_error") else {}
            found.append(answer)
            changed = True
            continue
        changed = changed or kind == "input_text"
        if not found or found[-1]["role"] == "tool":
            found.append({**message, "content": []})
        found[-1]["content"].append(_as_text(part))
    return found if changed else [message]


def _is_blank(part: Any) -> bool:
    return (
        isinstance(part, Mapping)
        and part.get("type") in ("text", "output_text")
        and not str(part.get("text") or "").strip()
    )


MESSAGES = ("prompt", "messages", "completion", "chosen", "rejected")
"""Columns that may hold messages."""

SHAREGPT = "conversations"
"""The column of messages in ShareGPT and in data sets of that form."""

_CALL = "function_call"
"""The speaker, in ShareGPT, of a message whose value is the JSON text of a call or of a list of calls."""

_BEGINS = re.compile(r"""\s*"?\s*\[?\s*"?\{\s*\\?["']\w+\\?["']\s*:""")
"""A text that may be an object, or a list of objects."""

_BEGINS_A_LIST = re.compile(r"""\s*"?\s*\[""")

_NAMES_A_ROLE = re.compile(r"""["'](role|from)\\?["']\s*:""")

_ROWS_OF_NUMPY = re.compile(r"\}\s*\n\s*\{")
"""The place where numpy's `str` of an array of dicts lacks a comma; a line break cannot stand inside a string of one
line."""


def normalize_messages(row: Mapping[str, Any], where: str, *keys: str) -> tuple[dict[str, Any], list[str]]:
    """Return the row with its messages as lists of role and content, and a sentence for each form that was converted.

    A cell that holds the text of a list of messages, as JSON or as Python writes it, becomes the list; a single message
    becomes a list of one; `from` and `value` become role and content. The column `conversations` becomes `messages`, or
    the `prompt` of a pair; a `system` text beside it becomes the first message. A text of anything else stays a text,
    and so does one of messages from nobody who is known.

    Args:
        row: A row whose columns are renamed already.
        where: The row, for messages.
        keys: Further columns that may hold messages.

    Raises:
        DataError: a text of a list is neither JSON nor Python and names roles, or a message has an unknown speaker.
    """
    row, notes = dict(row), list[str]()
    for name in dict.fromkeys((*MESSAGES, SHAREGPT, *keys)):
        value = row.get(name)
        if value is None or (isinstance(value, str) and not _BEGINS.match(value)):
            continue
        found = _read_messages(value, f"{where}: {name}")
        if found is not value:
            row[name] = found
            form = "one message" if isinstance(value, Mapping) else "messages of other keys"
            form = "text" if isinstance(value, str) else form
            notes.append(f"{name} is read as a list of messages: it came as {form}")
    if SHAREGPT in row and SHAREGPT not in keys and isinstance(row[SHAREGPT], list):
        target = "prompt" if {"chosen", "rejected"} <= row.keys() else "messages"
        if row.get(target) is None:
            notes.append(f"the column {SHAREGPT} is read as {target}")
            row[target] = _with_system(row.pop(SHAREGPT), row)
    return row, notes


def read_tools(value: Any, where: str) -> list[Any] | None:
    """Return the schemas of tools, given as a list or as its text (JSON or a Python literal); None where there are
    none.

    Keys that hold None are left out, at every depth: tables fill the absent keys of a struct with it.

    Raises:
        DataError: neither.
    """
    if isinstance(value, str) and value.strip():
        text, value = value, parse_nested_literal(value)
        if value is text:
            raise DataError(f"{where}: tools is a string that is no JSON, and no Python literal: {excerpt(text)}")
    if not value:
        return None
    if isinstance(value, list):  # some data sets write each schema as text
        value = [parse_nested_literal(tool) if isinstance(tool, str) else tool for tool in value]
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise DataError(f"{where}: tools is {excerpt(repr(value))}; a list of JSON schemas is needed.")
    return without_none(value)


def tools_argument(tools: Any) -> dict[str, Any]:
    """Return the chat template's argument for a row's tools; empty where its column holds no schemas."""
    schemas = isinstance(tools, list) and tools and all(isinstance(tool, Mapping) for tool in tools)
    return {"tools": tools} if schemas else {}


def parse_nested_literal(text: str) -> Any:
    """Return the value that a text writes out, as JSON or as Python does; the text itself where it is neither."""
    value = parse_literal(text)
    nested = isinstance(value, str) and value is not text and _BEGINS.match(value)
    return parse_nested_literal(value) if nested else value


def parse_list(value: Any) -> Any:
    """Return the list that a text writes out; any other value as it is."""
    found = parse_nested_literal(value) if isinstance(value, str) else value
    return found if isinstance(found, list) else value


def to_plain(value: Any) -> Any:
    """Copy the containers of a value, with one-dimensional arrays as lists and scalars of numpy and torch as Python's
    (tables of pandas hold such). Images and other objects are not copied."""
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_plain(item) for item in value)
    if type(value).__module__.partition(".")[0] in ("numpy", "torch") and getattr(value, "ndim", 2) < 2:
        made = value.tolist()
        return to_plain(made) if isinstance(made, list) else made
    return value


def _read_messages(value: Any, where: str) -> Any:
    """Return the messages that a value is, in our form; the value itself where it is that already, or is none."""
    read = value
    if isinstance(read, str):
        read = parse_nested_literal(_ROWS_OF_NUMPY.sub("}, {", read))
        if isinstance(read, str):
            if _BEGINS_A_LIST.match(value) and _NAMES_A_ROLE.search(value):
                raise DataError(
                    f"{where} is a text that looks like messages and is neither JSON nor a Python literal: "
                    f"{excerpt(value)}. Write it with json.dumps (a table of pandas: column.map(list).map(json.dumps))."
                )
            return value
    listed = [read] if isinstance(read, Mapping) else read
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes) or not listed:
        return value
    each: list[Any] = [
        parse_nested_literal(item) if isinstance(item, str) and _BEGINS.match(item) else item for item in listed
    ]
    if not all(_is_message(message) for message in each):
        return value
    known = any(
        str(message.get("role")).lower() in ROLES or str(message.get("from")).lower() in (*ROLES, _CALL)
        for message in each
    )
    if isinstance(value, str) and not known:  # an object to be written, such as a payment's
        return value
    found = [_from_sharegpt(message, f"{where}: message {i}") for i, message in enumerate(each)]
    found = normalize_calls(found, where)
    return value if found == value and isinstance(value, list) else found


def _is_message(value: Any) -> bool:
    """Tell whether a value is a message with role and content, or one of ShareGPT."""
    if not isinstance(value, Mapping):
        return False
    spoken = ("content", "tool_calls", "function_call")
    return ("role" in value and any(key in value for key in spoken)) or {"from", "value"} <= value.keys()


def _from_sharegpt(message: Mapping[str, Any], where: str) -> Any:
    if message.get("role") is not None or "from" not in message:
        return message
    speaker = str(message["from"]).strip().lower()
    rest = {key: item for key, item in message.items() if key not in ("from", "value", "role", "content")}
    if speaker == _CALL:  # LLaMA-Factory's form
        return {"role": "assistant", "content": "", **rest, "tool_calls": read_calls(message["value"], where)}
    role = ROLES.get(speaker)
    if role is None:
        raise DataError(
            f"{where} is from {excerpt(repr(message['from']))}; known are {', '.join((*ROLES, _CALL))}. Make messages "
            "of role and content of such rows with data.map_row."
        )
    return {"role": role, "content": message["value"], **rest}


def _with_system(messages: list[Any], row: dict[str, Any]) -> list[Any]:
    """Return the messages with the row's `system` text in front, taken out of the row."""
    text = row.get("system")
    if not isinstance(text, str) or not messages or messages[0].get("role") in ("system", "developer"):
        return messages
    del row["system"]
    return [{"role": "system", "content": text}, *messages] if text.strip() else messages
