"""What a chat template leaves out of messages: it refuses nothing, and a policy learns from what is left."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_warn

from lit_rl.chat_template import THOUGHTS, apply_chat_template, arguments_of_rendering, call_arguments
from lit_rl.data.checks import excerpt
from lit_rl.data.image_parts import text_of
from lit_rl.errors import ConfigError, DataError, did_you_mean
from lit_rl.rollout import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAYS_WHAT_IS_LEARNED = ("weight", "train", "training", "loss", "loss_mask", "mask")
"""Keys by which other programs choose the turns that are learned."""


class LeftOut:
    """A comparison of messages with their renderings, which says once what is missing of each role's.

    What a reply says and what it calls is refused where it is to be learned and is missing.

    Args:
        tokenizer: The tokenizer with the chat template.
        kwargs: Further arguments of the template, `data.chat_template_kwargs`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]) -> None:
        self._tokenizer, self._kwargs = tokenizer, kwargs
        self._source = template_source(tokenizer)
        self._words: dict[str, str] = {}
        """Kinds of content that are missing, each with an example."""
        self._of_rows: dict[str, None] = {}
        """Names of the arguments that rows bring themselves."""
        self._keys: dict[str, None] = {}
        """Keys of messages that the template does not read."""
        self._notes: dict[str, str] = {}
        self._said: set[str] = set()
        self._looked, self._opened = False, None
        """Flags: any messages were seen; the template opens a turn (None: not known yet)."""

    def look(
        self,
        messages: Sequence[Message],
        text: str,
        where: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        replies: tuple[int, int] | None = None,
    ) -> None:
        """Compare the messages of a row with their rendering.

        Args:
            messages: All that were rendered.
            text: The rendering.
            where: The row, for messages.
            kwargs: Arguments of the template for this row, those of the run among them; `tools` are the schemas.
            replies: The number of the first message that is learned, and where in the text it begins. None: none is.

        Raises:
            DataError: a call of a reply that is learned is not in the text, or nothing of what it says.
        """
        self._look_at_template(messages)
        kwargs = kwargs or {}
        self._of_rows.update(dict.fromkeys(name for name in kwargs if name != "tools" and name not in self._kwargs))
        first, place = replies or (len(messages), len(text))
        reply = text[place:]
        for number, message in enumerate(messages):
            learned = number >= first and message["role"] == "assistant"
            for what, words in self._missing(message, reply if learned else text):
                if learned and what in ("tool_calls", "words"):
                    raise DataError(_lost(f"{where}: message {number} (assistant)", what, words))
                self._words.setdefault(f"{what} of the {message['role']}", words)
        for tool in kwargs.get("tools") or ():
            name = str((tool.get("function") or tool).get("name") or "") if isinstance(tool, Mapping) else ""
            if not _is_in(name, text):
                self._words.setdefault("tools", name)

    def note(self, subject: str, line: str) -> None:
        """Have `say` say something else that a template does."""
        self._notes.setdefault(subject, line)

    def say(self) -> None:
        """Say what was found since this was called last, a line each."""
        lines = {what: f"The chat template leaves out {what}: {excerpt(said)}" for what, said in self._words.items()}
        lines |= self._notes
        if keys := [key for key in self._keys if key not in self._said]:
            lines[f"keys {keys}"] = _line_of_keys(keys)
        if self._opened is False:
            lines["turn"] = (
                "The chat template does not open the assistant's turn (add_generation_prompt changes nothing: look "
                "with lit-rl data-check whether prompts end where it should begin)."
            )
        lines |= self._lines_of_kwargs()
        for subject, line in lines.items():
            if subject not in self._said:
                self._said.add(subject)
                rank_zero_warn(line)
        self._said.update(keys)

    def _look_at_template(self, messages: Sequence[Message]) -> None:
        self._looked = True
        if self._opened is not None:
            return
        user = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
        how = {**self._kwargs, "tokenize": False}
        try:
            plain, told = (
                apply_chat_template(self._tokenizer, messages[: user + 1], add_generation_prompt=opening, **how)
                for opening in (False, True)
            )
        except ConfigError:
            raise
        except Exception:  # a template may raise anything, such as for too few messages
            return
        self._opened = plain != told

    def _missing(self, message: Message, text: str) -> Iterator[tuple[str, str]]:
        """Yield each part of a message that is missing from a text: what it is, and its words."""
        for key, value in message.items():
            if key == "content":
                yield from _missing_words(text_of(value), text)
            elif key in THOUGHTS:
                if not _is_in(str(value), text):
                    yield key, str(value)
            elif key == "tool_calls":
                yield from (("tool_calls", words) for words in _missing_calls(value, text))
                self._note_texts(value)
                self._note_key("tool_calls.id", [call.get("id") for call in value if isinstance(call, Mapping)], text)
            elif key != "role":
                self._note_key(key, [value], text)

    def _note_texts(self, calls: Any) -> None:
        """Note arguments that no function takes by name: a template writes them between quotes, or as they are."""
        for call in calls if isinstance(calls, list | tuple) else [calls]:
            arguments = call_arguments((call.get("function") or call).get("arguments"))
            if isinstance(arguments, str):
                line = f"Arguments of tool calls that are no JSON object are rendered as text: {excerpt(arguments)}"
                self.note("arguments", line)

    def _note_key(self, key: str, values: Sequence[Any], text: str) -> None:
        """Note a key whose text is missing; for a number, a key whose name the template does not read."""
        texts = [value for value in values if isinstance(value, str) and value]
        others = [value for value in values if not isinstance(value, str) and value not in (None, [], {})]
        if any(not _is_in(value, text) for value in texts) or (others and not self._reads(key.rpartition(".")[2])):
            self._keys.setdefault(key)

    def _reads(self, name: str) -> bool:
        name = re.escape(name)
        return re.search(rf"\.{name}\b|['\"]{name}['\"]", self._source) is not None

    def _lines_of_kwargs(self) -> dict[str, str]:
        names = {f"data.chat_template_kwargs.{name}": name for name in self._kwargs}
        if names and not self._looked:
            return {"kwargs": f"{', '.join(names)} does nothing: no row is rendered by a chat template."}
        names |= {f"{name} of the rows' chat_template_kwargs": name for name in self._of_rows}
        if not names:
            return {}
        read = variables(self._source)
        known = {*(read or ()), *arguments_of_rendering(self._tokenizer)}
        return {
            key: f"{key} does nothing: the chat template reads no such name.{did_you_mean(name, known)}"
            for key, name in names.items()
            if read is not None and name not in known
        }


def template_source(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of the chat template; of several, all of them."""
    template: Any = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else str(template or "")


def variables(source: str) -> set[str] | None:
    """Return the names that a chat template reads and does not set; None where it cannot be parsed here."""
    from jinja2 import Environment, TemplateError, meta

    bare = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", source)  # unknown to Jinja
    try:
        return meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(bare))
    except TemplateError:
        return None


def strings_in(value: Any) -> Iterator[str]:
    """Yield every string of plain data, keys included, at every depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item)


def _line_of_keys(keys: Sequence[str]) -> str:
    line = f"The chat template leaves out what these keys of messages say: {', '.join(keys)}."
    if any(key in _SAYS_WHAT_IS_LEARNED for key in keys):
        line += " Which messages are learned is chosen by data.learn alone."
    return line


def _missing_words(words: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield what of the words is missing, thoughts before them apart, which templates leave out of earlier turns."""
    if _is_in(words, text):
        return
    thought, closed, answer = words.rpartition("</think>")
    if closed and not _is_in(thought.rpartition("<think>")[2], text):
        yield "thoughts", thought
    if not _is_in(answer, text):
        some = any(_is_in(line, text) for line in answer.splitlines() if line.strip())
        yield ("some words" if some else "words"), answer


def _missing_calls(calls: Any, text: str) -> Iterator[str]:
    """Yield names and arguments of calls that are not in a text."""
    for call in calls if isinstance(calls, list | tuple) else [calls]:
        function = call.get("function") or call
        arguments = call_arguments(function.get("arguments"))
        if not _is_in(function["name"], text):
            yield str(function["name"])
        elif isinstance(arguments, str) and arguments not in text:
            yield f"arguments {arguments}, which are no JSON object"
        elif lost := [leaf for leaf in _leaves(arguments) if not _is_in(leaf, text)]:
            yield f"{function['name']}, its {lost[0]!r}"


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif value is not None:  # which templates write as null, none, None, or not at all
        yield value


def _is_in(value: Any, text: str) -> bool:
    """Tell whether a text holds a value: as it is, or as a string of JSON or Python; blanks at its ends may go."""
    if isinstance(value, bool):
        return str(value).lower() in text.lower()
    if not isinstance(value, str):
        return str(value) in text or json.dumps(value) in text
    value = value.strip()
    if value in text:
        return True
    if any(form[1:-1] in text for form in (json.dumps(value, ensure_ascii=False), json.dumps(value), repr(value))):
        return True
    bare = re.sub(r"\s+", "", value)
    return bare.casefold() in re.sub(r"\s+", "", text).casefold()


def _lost(where: str, what: str, words: str) -> str:
    fix = "Give a template that writes it with model.chat_template=FILE"
    if what == "words":
        return f"{where}: the chat template leaves out what it says: {excerpt(words)}. {fix}."
    return (
        f"{where}: the chat template leaves out its tool call: {excerpt(words)}. The reply would be learned without "
        f"it. {fix}, or write the call into content."
    )
