"""Messages and tools as other programs write them: as text in a cell, with ShareGPT's keys, as arrays of numpy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lit_rl.data.call_forms import ROLES, literal_of, read_calls, with_our_calls
from lit_rl.data.checks import excerpt
from lit_rl.data.raw_rows import without_none
from lit_rl.errors import DataError

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


def in_our_form(row: Mapping[str, Any], where: str, *keys: str) -> tuple[dict[str, Any], list[str]]:
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
        found = _messages_of(value, f"{where}: {name}")
        if found is not value:
            row[name] = found
            notes.append(f"{name} is read as a list of messages: it came as {_form_of(value)}")
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
        text, value = value, literal(value)
        if value is text:
            raise DataError(f"{where}: tools is a string that is no JSON, and no Python literal: {excerpt(text)}")
    if not value:
        return None
    if isinstance(value, list):  # some data sets write each schema as text
        value = [literal(tool) if isinstance(tool, str) else tool for tool in value]
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise DataError(f"{where}: tools is {excerpt(repr(value))}; a list of JSON schemas is needed.")
    return without_none(value)


def told_of(tools: Any) -> dict[str, Any]:
    """Return the chat template's argument for a row's tools; empty where its column holds no schemas."""
    schemas = isinstance(tools, list) and tools and all(isinstance(tool, Mapping) for tool in tools)
    return {"tools": tools} if schemas else {}


def literal(text: str) -> Any:
    """Return the value that a text writes out, as JSON or as Python does; the text itself where it is neither."""
    value = literal_of(text)
    return literal(value) if isinstance(value, str) and value is not text and _BEGINS.match(value) else value


def list_of(value: Any) -> Any:
    """Return the list that a text writes out; any other value as it is."""
    found = literal(value) if isinstance(value, str) else value
    return found if isinstance(found, list) else value


def plain(value: Any) -> Any:
    """Copy the containers of a value, with one-dimensional arrays as lists and scalars of numpy and torch as Python's
    (tables of pandas hold such). Images and other objects are not copied."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    if type(value).__module__.partition(".")[0] in ("numpy", "torch") and getattr(value, "ndim", 2) < 2:
        made = value.tolist()
        return plain(made) if isinstance(made, list) else made
    return value


def _messages_of(value: Any, where: str) -> Any:
    """Return the messages that a value is, in our form; the value itself where it is that already, or is none."""
    read = value
    if isinstance(read, str):
        read = literal(_ROWS_OF_NUMPY.sub("}, {", read))
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
    each: list[Any] = [literal(item) if isinstance(item, str) and _BEGINS.match(item) else item for item in listed]
    if not all(_is_message(message) for message in each):
        return value
    if isinstance(value, str) and not any(map(_speaks, each)):  # an object to be written, such as a payment's
        return value
    found = [_renamed(message, f"{where}: message {i}") for i, message in enumerate(each)]
    found = with_our_calls(found, where)
    return value if found == value and isinstance(value, list) else found


def _is_message(value: Any) -> bool:
    """Tell whether a value is a message with role and content, or one of ShareGPT."""
    if not isinstance(value, Mapping):
        return False
    spoken = ("content", "tool_calls", "function_call")
    return ("role" in value and any(key in value for key in spoken)) or {"from", "value"} <= value.keys()


def _speaks(message: Mapping[str, Any]) -> bool:
    """Tell whether a message has a known speaker."""
    return str(message.get("role")).lower() in ROLES or str(message.get("from")).lower() in (*ROLES, _CALL)


def _renamed(message: Mapping[str, Any], where: str) -> Any:
    if message.get("role") is not None or "from" not in message:
        return message
    said_by = str(message["from"]).strip().lower()
    rest = {key: item for key, item in message.items() if key not in ("from", "value", "role", "content")}
    if said_by == _CALL:  # LLaMA-Factory's form
        return {"role": "assistant", "content": "", **rest, "tool_calls": read_calls(message["value"], where)}
    role = ROLES.get(said_by)
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


def _form_of(value: Any) -> str:
    if isinstance(value, str):
        return "text"
    return "one message" if isinstance(value, Mapping) else "messages of other keys"
