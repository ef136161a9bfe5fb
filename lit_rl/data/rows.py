"""A row of a source in the one form that is checked and tokenised: mapped, renamed, messages and images in place.

Every refusal names the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from lit_rl.core.episode import Message, Prompt
from lit_rl.core.errors import ConfigError, DataError, LitRLError, describe_error, did_you_mean, excerpt
from lit_rl.core.process_state import is_raised_by_user_code, mix_seed, temporarily_seeded
from lit_rl.core.user_functions import FUNCTION_FORM, is_file_path, load_by_path
from lit_rl.data.message_forms import normalize_messages, to_plain
from lit_rl.data.row_visuals import check_parts, text_of

RowFunction = Callable[[dict[str, Any]], dict[str, Any]]
ROLES = ("system", "developer", "user", "assistant", "tool")


def row_function(given: RowFunction | str | None, key: str = "data.map_row") -> RowFunction | None:
    """Return a function from row to row, or load it from a path: `./file.py:name`, `package.module:name`,
    `package.module.name`.

    Raises:
        ConfigError: it is no function, or nothing of this name is there.
        DataError: the module or file fails on import.
    """
    found: Any = given
    if isinstance(given, str):
        path = given
        if ":" not in path and not is_file_path(path):
            module, _, name = path.rpartition(".")
            path = f"{module}:{name}"
        found = load_by_path(path, key, DataError).value
    if found is not None and not callable(found):
        raise ConfigError(f"{key}={given!r} is no function from row to row, and no path of one: {FUNCTION_FORM}.")
    return cast("RowFunction | None", found)


def rename_columns(
    row: Mapping[str, Any], where: str, rename: Mapping[str, str], key: str = "data.rename"
) -> dict[str, Any]:
    """Return the row with columns renamed, old name to new; names that the row lacks are ignored.

    Raises:
        DataError: the row already has a column of the new name.
    """
    renamed: dict[str, Any] = {}
    for column, value in row.items():
        new = rename.get(column, column)
        if new in renamed:
            raise DataError(f"{where}: {key} gives the row two columns named {new!r}.")
        renamed[new] = value
    return renamed


@dataclass(frozen=True)
class ReadRow:
    """A row as it is read, whatever it is for."""

    row: dict[str, Any]
    raw_columns: tuple[str, ...]
    """Names of its columns before they were renamed."""
    notes: tuple[str, ...]
    """Notes on what was converted to another form."""


def read_row(
    row: dict[str, Any],
    where: str,
    *,
    rename: Mapping[str, str] | None = None,
    map_row: RowFunction | None = None,
    keys: Sequence[str] = (),
) -> ReadRow:
    """Map a row, rename its columns, and normalize its messages (`normalize_messages`).

    Raises:
        DataError: the function raised or returned no dict, two columns would have one name, or messages are of no
            known form.
    """
    row = row if map_row is None else apply_map_row(map_row, row, where)
    found, notes = normalize_messages(rename_columns(row, where, rename or {}), where, *keys)
    return ReadRow(found, tuple(row), tuple(notes))


def apply_map_row(map_row: RowFunction, row: dict[str, Any], where: str, key: str = "data.map_row") -> dict[str, Any]:
    """Return what the function of `key` makes of a copy of a row: rows are read again, and stay what they were.

    So what it draws from the global generators depends on the place of the row in its file alone.

    Raises:
        DataError: it raised, or returned no dict.
    """
    name = getattr(map_row, "__name__", repr(map_row))
    try:
        with temporarily_seeded(mix_seed("data.map_row", where.replace("\\", "/").rpartition("/")[2])):
            mapped = map_row(to_plain(row))
    except LitRLError as error:
        raise DataError(f"{where}: {error}") from error
    except BaseException as error:  # the user's function may raise anything
        if not is_raised_by_user_code(error):
            raise
        raise DataError(f"{where}: {key}={name} raised {describe_error(error)}") from error
    if not isinstance(mapped, dict):
        raise DataError(f"{where}: {key}={name} returned {excerpt(repr(mapped))}; it must return a dict.")
    return mapped


def split_prompt(row: Mapping[str, Any], where: str, *, prompt_key: str = "prompt") -> tuple[Prompt, dict[str, Any]]:
    """Return the checked prompt of a row in its normal form, and the other columns.

    Message content may be a list of parts: texts are joined, and bare parts of images and videos stay where they are
    (`lit_rl.data.row_visuals`).

    Raises:
        DataError: no such column, or the prompt is neither a text nor a sound list of chat messages.
    """
    if prompt_key not in row:
        found = ", ".join(row) or "none"
        raise DataError(
            f"{where}: no column {prompt_key!r}; columns found: {found}. Name the prompt's column with "
            f"data.prompt_key.{did_you_mean(prompt_key, row)}"
        )
    columns = {name: value for name, value in row.items() if name != prompt_key}
    prompt = row[prompt_key]
    if isinstance(prompt, str):
        return _sound_text(prompt, where), columns
    if isinstance(prompt, list):
        return _messages(prompt, where), columns
    raise DataError(
        f"{where}: the prompt is {excerpt(repr(prompt))} ({type(prompt).__name__}); "
        "allowed are a string or a list of chat messages."
    )


def add_system_prompt(prompt: Prompt, system_prompt: str | None) -> Prompt:
    """Put the system prompt in front of messages that have no system message of their own.

    A text becomes the user's message. Without a system prompt, and where it is empty, the prompt stays what it was.
    """
    if system_prompt is None or not prompt:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def is_blank(text: str | list[Message]) -> bool:
    """Tell whether a text is blank: white space, or messages without words and tool calls, the system's left out."""
    if isinstance(text, str):
        return not text.strip()
    spoken = (m for m in text if m["role"] not in ("system", "developer"))
    return not any(
        text_of(m["content"]).strip() or isinstance(m["content"], list) or m.get("tool_calls") for m in spoken
    )


def _messages(prompt: list[Any], where: str) -> list[Message]:
    if not prompt:
        raise DataError(f"{where}: the prompt is an empty list of messages.")
    messages = [check_message(message, f"{where}: message {i}") for i, message in enumerate(prompt)]
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{where}: the last message is the assistant's; a prompt ends before the assistant speaks.")
    return messages


def check_message(message: Any, where: str) -> Message:
    """Return one chat message in one form: role, content as a string, and its other keys that hold something.

    Raises:
        DataError: no message, an unknown role, content that is no text, or malformed tool calls.
    """
    if not isinstance(message, Mapping) or "role" not in message:
        shown = f"keys {', '.join(map(str, message))}" if isinstance(message, Mapping) else excerpt(repr(message))
        raise DataError(f"{where} needs the keys role and content; found {shown}.")
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        hint = did_you_mean(str(role), ROLES)
        raise DataError(f"{where} has the role {excerpt(repr(role))}; allowed are {', '.join(ROLES)}.{hint}")
    # Tables fill absent keys of a struct with None: they mean the same as no key.
    extras = {key: value for key, value in message.items() if value is not None and key not in ("role", "content")}
    if "tool_calls" in extras:
        _check_calls(extras["tool_calls"], where)
    if content is None and extras.get("tool_calls"):
        content = ""
    if isinstance(content, list):
        content = check_parts(content, where)
        content = content if any(part["type"] != "text" for part in content) else text_of(content)
    if not isinstance(content, str | list):
        raise DataError(f"{where} has the content {excerpt(repr(content))}; allowed is a string or a list of parts.")
    _sound_text(text_of(content), where)
    return {"role": role, "content": content, **extras}


def _check_calls(calls: Any, where: str) -> None:
    """Refuse what is no list of named calls: a chat template writes it as something else, or leaves it out."""
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, Mapping) and isinstance(calls, list) else None
        if (
            not isinstance(function, Mapping)
            or not isinstance(function.get("name"), str)
            or not isinstance(function.get("arguments"), Mapping | str | None)
        ):
            raise DataError(
                f"{where} has the tool call {excerpt(repr(call))}; tool_calls is a list of calls such as "
                '{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}.'
            )


def _sound_text(text: str, where: str) -> str:
    try:
        text.encode()
        bad = "a NUL character" if "\0" in text else ""
    except UnicodeEncodeError:
        bad = "a NUL character" if "\0" in text else "half of a surrogate pair"
    if bad:
        raise DataError(f"{where} holds {bad}, which no tokenizer keeps: {excerpt(text)}")
    return text
