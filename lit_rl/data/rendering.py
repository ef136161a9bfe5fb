"""Rendering by the chat template: prompts and conversations as text and tokens, and what a template leaves out.

A chat template refuses nothing and may drop parts of a message silently; `TemplateOmissions` compares each message
with its rendering and warns. A prompt is rendered once and tokenised once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_warn

from lit_rl.core.chat_template import (
    THOUGHTS,
    apply_chat_template,
    arguments_of_rendering,
    call_arguments,
    common_prefix_length,
)
from lit_rl.core.episode import Message, Prompt
from lit_rl.core.errors import ConfigError, DataError, did_you_mean, excerpt
from lit_rl.data.message_forms import parse_nested_literal
from lit_rl.data.readers import without_none

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PROBE_REPLY = "qqalphaqq"
"""A reply that no template writes by itself."""

FIXED_ARGUMENTS = (
    "add_generation_prompt",
    "continue_final_message",
    "conversation",
    "return_dict",
    "return_tensors",
    "tokenize",
)
"""Arguments of `apply_chat_template` that a prompt's rendering fixes."""

KWARGS_COLUMN = "chat_template_kwargs"
"""The column of a row's own arguments of the chat template, as TRL has it."""


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    where: str,
    kwargs: Mapping[str, Any],
    control: Sequence[str] | None = None,
    left_out: TemplateOmissions | None = None,
) -> str:
    """Return the text of messages up to the assistant's turn, as the chat template writes it.

    `left_out` looks at what it lacks.

    Raises:
        DataError: there is no chat template, it refuses them, or a message holds the text of a control token.
        ConfigError: `kwargs` sets what is fixed here.
    """
    require_chat_template(tokenizer, where)
    control = control_tokens(tokenizer) if control is None else control
    refuse_control_tokens(control, messages, where, tokenizer=tokenizer, tools=kwargs.get("tools"))
    check_template_kwargs(kwargs)
    text = str(render(tokenizer, messages, where, kwargs, add_generation_prompt=True))
    if left_out is not None:
        left_out.compare(messages, text, where, kwargs)
    return text


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    *,
    where: str = "prompt",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    control: Sequence[str] | None = None,
    left_out: TemplateOmissions | None = None,
) -> list[int]:
    """Return the token ids of a prompt.

    A text gets the special tokens that the tokenizer adds by itself, without an EOS at the end, and without a second
    BOS where the text already begins with one. Messages are rendered by the chat template up to the assistant's turn,
    and that text is tokenised as it stands.

    Control tokens written in a text count, so that a prompt rendered elsewhere can be handed over; in a message they
    are refused. `control` is what `control_tokens` gives, to be asked once where there are many prompts; `left_out`
    looks at what the chat template lacks of them.

    Raises:
        DataError: no token comes out; or, for messages, there is no chat template, it refuses them, or a message holds
            the text of a control token. The message opens with `where`.
        ConfigError: `chat_template_kwargs` sets what is fixed here.
    """
    if isinstance(prompt, str):
        ids = _encode_text(tokenizer, prompt)
    else:
        text = render_prompt(tokenizer, prompt, where, chat_template_kwargs or {}, control, left_out)
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not ids:
        raise DataError(f"{where}: the tokenizer makes no token of this prompt: {excerpt(str(prompt))}")
    return ids


def require_chat_template(tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Check that the tokenizer can render messages.

    Raises:
        DataError: the tokenizer has no chat template; the message gives the three ways out.
    """
    if not tokenizer.chat_template:
        raise DataError(
            f"{where}: the prompt is a list of chat messages, and the tokenizer has no chat template. Use an Instruct "
            "model, or give a template with model.chat_template=FILE, or make the prompts plain strings."
        )


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Refuse keywords of the chat template that are not the user's to set.

    Raises:
        ConfigError: a keyword that `encode_prompt` fixes itself.
    """
    taken = [key for key in kwargs if key in FIXED_ARGUMENTS]
    if taken:
        raise ConfigError(f"data.chat_template_kwargs: {', '.join(taken)} cannot be set; prompts fix it: remove it.")


def row_template_kwargs(columns: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a row's own arguments of the chat template, which go before those of the run; empty where it has none.

    Keys that hold None are left out: tables fill the absent keys of a struct with it.

    Args:
        columns: Columns of the row: `KWARGS_COLUMN` may be an object or the text of one.
        where: The row, for messages.

    Raises:
        DataError: it is neither, or sets what prompts fix, the template, or the tools, which have a column.
    """
    column = columns.get(KWARGS_COLUMN)
    read = parse_nested_literal(column) if isinstance(column, str) and column.strip() else column
    if not read:
        return {}
    if not isinstance(read, Mapping) or not all(isinstance(key, str) for key in read):
        raise DataError(
            f"{where}: {KWARGS_COLUMN} is {excerpt(repr(column))}; an object of arguments of the chat template is "
            "needed, "
            'such as {"enable_thinking": false}.'
        )
    taken = [key for key in without_none(read) if key in (*FIXED_ARGUMENTS, "chat_template", "tools")]
    if taken:
        raise DataError(
            f"{where}: {KWARGS_COLUMN} of a row cannot set {', '.join(taken)}: a template is given with "
            "model.chat_template=FILE, tools in the column tools, and the rest prompts fix."
        )
    return without_none(read)


def _encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    has_bos = isinstance(bos, str) and text.startswith(bos)
    ids = list(tokenizer(text, add_special_tokens=not has_bos)["input_ids"])
    written = 0
    while isinstance(eos, str) and eos and text.endswith(eos * (written + 1)):
        written += 1
    ends = written + 1  # one more where the tokenizer adds its own
    if len(ids) >= ends and all(token == tokenizer.eos_token_id for token in ids[-ends:]):
        ids.pop()
    return ids


def refuse_control_tokens(
    control: Sequence[str],
    messages: Sequence[Message],
    where: str,
    *,
    tokenizer: PreTrainedTokenizerBase,
    tools: Any = None,
) -> None:
    """Refuse text that spells a control token: it would become that token, and could close a turn or open another role.

    It is looked for in all that the chat template could write: every text, at every depth, of the keys of a message
    that the template names, and of the schemas of tools.

    Raises:
        DataError: a message or a tool holds such a text.
    """
    source = template_source(tokenizer)
    for i, message in enumerate(messages):
        for key, value in message.items():
            if key != "role" and (key == "content" or key in source):
                _refuse_in(control, value, f"{where}: message {i} ({message['role']})", "" if key == "content" else key)
    _refuse_in(control, tools, where, "tools")


def _refuse_in(control: Sequence[str], value: Any, where: str, key: str) -> None:
    text = value if isinstance(value, str) else "\0".join(strings_in(value))
    for token in control:
        if token in text:
            raise DataError(
                f"{where} holds the text {token!r}{key and f' in {key}'}, which the tokenizer would "
                "turn into a control token. Take it out, or leave such rows out with data.on_bad_row=skip."
            )


def turn_end(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]) -> str:
    """Return what the chat template writes after the words of the last turn; nothing where it takes no such turn."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE_REPLY}]
    try:
        text = str(render(tokenizer, messages, "", kwargs))
    except DataError:  # the template refuses these messages
        return ""
    return text.rpartition(PROBE_REPLY)[2] if PROBE_REPLY in text else ""


def warn_unknown_end(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any], eos_ids: Collection[int]) -> None:
    """Warn where the chat template ends a turn with control tokens at none of which generation ends."""
    end = turn_end(tokenizer, kwargs)
    ids: Any = tokenizer(end, add_special_tokens=False)["input_ids"]
    known = end_marks(tokenizer, end)
    if (marks := [token for token in ids if token in known]) and not set(marks) & set(eos_ids):
        rank_zero_warn(
            f"The chat template ends a turn with {tokenizer.convert_ids_to_tokens(marks[0])!r}, at which generation "
            f"does not end: {unknown_end_fix(tokenizer, marks[0])}"
        )


def end_marks(tokenizer: PreTrainedTokenizerBase, end: str) -> set[int]:
    """Return the tokens that a template could end a turn with: control tokens, and others that stand for no text in
    `end`."""
    added = tokenizer.added_tokens_decoder.items()
    return {number for number, token in added if token.special or token.content in end}


def unknown_end_fix(tokenizer: PreTrainedTokenizerBase, mark: int) -> str:
    """Say how to make a token one at which generation ends."""
    token = tokenizer.convert_ids_to_tokens(mark)
    return f"set model.eos_token={token!r}, or add its id {mark} to eos_token_id in the model's generation_config.json."


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of every special token of the tokenizer."""
    added = (str(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return sorted({*added, *map(str, tokenizer.all_special_tokens)})


GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], where: str, kwargs: Mapping[str, Any], **how: Any
) -> Any:
    """Return the rendered text of messages, or the value of `apply_chat_template` that `how` requests instead.

    Raises:
        DataError: the template refuses the messages. The message opens with `where`.
    """
    try:
        return apply_chat_template(tokenizer, messages, **{**kwargs, "tokenize": False, **how})
    except ConfigError:
        raise
    except Exception as error:  # a template may raise anything
        raise DataError(f"{where}: the chat template refuses the messages: {excerpt(str(error), 200)}") from error


def marked_characters(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], where: str, kwargs: Mapping[str, Any]
) -> list[bool]:
    """Return which characters of the rendered messages have a token between the template's generation markers. The
    tokenizer has offsets."""
    marked = render(
        tokenizer,
        messages,
        where,
        kwargs,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    characters = [False] * max((end for _, end in marked["offset_mapping"]), default=0)
    for flag, (start, end) in zip(marked["assistant_masks"], marked["offset_mapping"]):
        if flag:
            characters[start:end] = [True] * (end - start)
    return characters


def tokens_with_places(
    tokenizer: PreTrainedTokenizerBase, parts: Sequence[str]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return token ids of parts that are tokenised apart, with the span of each token in all of them."""
    ids: list[int] = []
    places: list[tuple[int, int]] = []
    place = 0
    for part in parts:
        encoding: Any = tokenizer(part, add_special_tokens=False, return_offsets_mapping=True)
        ids += encoding["input_ids"]
        places += [(place + start, place + end) for start, end in encoding["offset_mapping"]]
        place += len(part)
    return ids, places


def check_prefix(begin: str, whole: str, where: str) -> None:
    """Check that a conversation begins with its prompt, so that the rest is the completion.

    Raises:
        DataError: the rendered conversation does not begin with the rendered prompt. The message shows where they part.
    """
    if whole.startswith(begin):
        return
    place = common_prefix_length(begin, whole)
    alone, followed = (excerpt(text[max(0, place - 20) : place + 40]) for text in (begin, whole))
    raise DataError(
        f"{where}: the chat template renders the prompt differently when a completion follows: alone ...{alone!r}, "
        f"followed ...{followed!r}. So the start of the completion cannot be found. Templates that add or drop "
        "thinking blocks do this. Give a template that only appends with model.chat_template=FILE, try "
        "data.chat_template_kwargs (such as enable_thinking), or make the rows plain strings."
    )


_SAYS_WHAT_IS_LEARNED = ("weight", "train", "training", "loss", "loss_mask", "mask")
"""Keys by which other programs choose the turns that are learned."""


class TemplateOmissions:
    """A comparison of messages with their renderings, which says once what is missing of each role's.

    A row is refused if the words or the tool calls of a reply that is learned are missing.

    Args:
        tokenizer: The tokenizer with the chat template.
        kwargs: Further arguments of the template, `data.chat_template_kwargs`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]) -> None:
        self._tokenizer, self._kwargs = tokenizer, kwargs
        self._source = template_source(tokenizer)
        self._words: dict[str, str] = {}
        """Kinds of content that are missing, each with an example."""
        self._row_arguments: dict[str, None] = {}
        """Names of the arguments that rows bring themselves."""
        self._keys: dict[str, None] = {}
        """Keys of messages that the template does not read."""
        self._notes: dict[str, str] = {}
        self._warned: set[str] = set()
        self._saw_messages, self._opens_turn = False, None
        """Flags: any messages were seen; the template opens a turn (None: not known yet)."""

    def compare(
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
        self._row_arguments.update(
            dict.fromkeys(name for name in kwargs if name != "tools" and name not in self._kwargs)
        )
        first, place = replies or (len(messages), len(text))
        reply = text[place:]
        for number, message in enumerate(messages):
            learned = number >= first and message["role"] == "assistant"
            for what, words in self._missing(message, reply if learned else text):
                if learned and what in ("tool_calls", "words"):
                    lost, further = "what it says", ""
                    if what == "tool_calls":
                        lost, further = "its tool call", ", or write the call into content"
                    raise DataError(
                        f"{where}: message {number} (assistant): the chat template leaves out {lost}: "
                        f"{excerpt(words)}. The reply would be learned without it. Give a template that writes it with "
                        f"model.chat_template=FILE{further}."
                    )
                self._words.setdefault(f"{what} of the {message['role']}", words)
        for tool in kwargs.get("tools") or ():
            name = str((tool.get("function") or tool).get("name") or "") if isinstance(tool, Mapping) else ""
            if not _is_in(name, text):
                self._words.setdefault("tools", name)

    def note(self, subject: str, line: str) -> None:
        """Add a line to what `warn` writes."""
        self._notes.setdefault(subject, line)

    def warn(self) -> None:
        """Warn of what was found since the last call, a line each."""
        lines = {what: f"The chat template leaves out {what}: {excerpt(words)}" for what, words in self._words.items()}
        lines |= self._notes
        if keys := [key for key in self._keys if key not in self._warned]:
            line = f"The chat template leaves out what these keys of messages say: {', '.join(keys)}."
            if any(key in _SAYS_WHAT_IS_LEARNED for key in keys):
                line += " Which messages are learned is chosen by data.learn alone."
            lines[f"keys {keys}"] = line
        if self._opens_turn is False:
            lines["turn"] = (
                "The chat template does not open the assistant's turn (add_generation_prompt changes nothing: look "
                "with lit-rl data-check whether prompts end where it should begin)."
            )
        lines |= self._lines_of_kwargs()
        for subject, line in lines.items():
            if subject not in self._warned:
                self._warned.add(subject)
                rank_zero_warn(line)
        self._warned.update(keys)

    def _look_at_template(self, messages: Sequence[Message]) -> None:
        self._saw_messages = True
        if self._opens_turn is not None:
            return
        user = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
        begin = list(messages[: user + 1])
        try:
            plain, opened = (
                render(self._tokenizer, begin, "", self._kwargs, add_generation_prompt=opens) for opens in (False, True)
            )
        except DataError:  # the template refuses so few messages
            return
        self._opens_turn = plain != opened

    def _missing(self, message: Message, text: str) -> Iterator[tuple[str, str]]:
        """Yield each part of a message that is missing from a text: what it is, and its words."""
        for key, value in message.items():
            if key == "content":
                parts = [value] if isinstance(value, str) else [part.get("text", "") for part in value]  # or images
                for words in parts:
                    yield from _missing_words(words, text)
            elif key in THOUGHTS:
                if not _is_in(str(value), text):
                    yield key, str(value)
            elif key == "tool_calls":
                yield from (("tool_calls", words) for words in _missing_calls(value, text))
                for call in value if isinstance(value, list | tuple) else [value]:
                    arguments = call_arguments((call.get("function") or call).get("arguments"))
                    if isinstance(arguments, str):
                        line = "Arguments of tool calls that are no JSON object are rendered as text"
                        self.note("arguments", f"{line}: {excerpt(arguments)}")
                self._note_key("tool_calls.id", [call.get("id") for call in value if isinstance(call, Mapping)], text)
            elif key != "role":
                self._note_key(key, [value], text)

    def _note_key(self, key: str, values: Sequence[Any], text: str) -> None:
        """Note a key whose text is missing; for a number, a key whose name the template does not read."""
        texts = [value for value in values if isinstance(value, str) and value]
        others = [value for value in values if not isinstance(value, str) and value not in (None, [], {})]
        name = re.escape(key.rpartition(".")[2])
        is_read = re.search(rf"\.{name}\b|['\"]{name}['\"]", self._source) is not None
        if any(not _is_in(value, text) for value in texts) or (others and not is_read):
            self._keys.setdefault(key)

    def _lines_of_kwargs(self) -> dict[str, str]:
        names = {f"data.chat_template_kwargs.{name}": name for name in self._kwargs}
        if names and not self._saw_messages:
            return {"kwargs": f"{', '.join(names)} does nothing: no row is rendered by a chat template."}
        names |= {f"{name} of the rows' chat_template_kwargs": name for name in self._row_arguments}
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
