"""A prompt becomes token ids: rendered once, tokenised once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_warn

from lit_rl.chat_template import apply_chat_template
from lit_rl.data.checks import excerpt
from lit_rl.data.left_out import LeftOut, strings_in, template_source
from lit_rl.data.message_forms import literal
from lit_rl.data.raw_rows import without_none
from lit_rl.errors import ConfigError, DataError
from lit_rl.rollout import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WORDS = "qqalphaqq"
"""A reply that no template writes by itself."""

OURS = ("add_generation_prompt", "continue_final_message", "conversation", "return_dict", "return_tensors", "tokenize")
"""Arguments of `apply_chat_template` that a prompt's rendering fixes."""

OF_ROWS = "chat_template_kwargs"
"""The column of a row's own arguments of the chat template, as TRL has it."""


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    where: str,
    kwargs: Mapping[str, Any],
    control: Sequence[str] | None = None,
    left_out: LeftOut | None = None,
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
    try:
        text = str(apply_chat_template(tokenizer, messages, tokenize=False, add_generation_prompt=True, **kwargs))
    except ConfigError:
        raise
    except Exception as error:  # a template may raise anything
        raise DataError(f"{where}: the chat template refuses the messages: {excerpt(str(error), 200)}") from error
    if left_out is not None:
        left_out.look(messages, text, where, kwargs)
    return text


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    *,
    where: str = "prompt",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    control: Sequence[str] | None = None,
    left_out: LeftOut | None = None,
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
    taken = [key for key in kwargs if key in OURS]
    if taken:
        raise ConfigError(f"data.chat_template_kwargs: {', '.join(taken)} cannot be set; prompts fix it: remove it.")


def kwargs_of_row(columns: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a row's own arguments of the chat template, which go before those of the run; empty where it has none.

    Keys that hold None are left out: tables fill the absent keys of a struct with it.

    Args:
        columns: Columns of the row: `OF_ROWS` may be an object or the text of one.
        where: The row, for messages.

    Raises:
        DataError: it is neither, or sets what prompts fix, the template, or the tools, which have a column.
    """
    given = columns.get(OF_ROWS)
    read = literal(given) if isinstance(given, str) and given.strip() else given
    if not read:
        return {}
    if not isinstance(read, Mapping) or not all(isinstance(key, str) for key in read):
        raise DataError(
            f"{where}: {OF_ROWS} is {excerpt(repr(given))}; an object of arguments of the chat template is needed, "
            'such as {"enable_thinking": false}.'
        )
    taken = [key for key in without_none(read) if key in (*OURS, "chat_template", "tools")]
    if taken:
        raise DataError(
            f"{where}: {OF_ROWS} of a row cannot set {', '.join(taken)}: a template is given with "
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
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _WORDS}]
    try:
        text = str(apply_chat_template(tokenizer, messages, **{**kwargs, "tokenize": False}))
    except ConfigError:
        raise
    except Exception:  # a template may raise anything, such as for these messages
        return ""
    return text.rpartition(_WORDS)[2] if _WORDS in text else ""


def say_unknown_end(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any], eos_ids: Collection[int]) -> None:
    """Warn where the chat template ends a turn with control tokens at none of which generation ends."""
    end = turn_end(tokenizer, kwargs)
    ids: Any = tokenizer(end, add_special_tokens=False)["input_ids"]
    known = end_marks(tokenizer, end)
    if (marks := [token for token in ids if token in known]) and not set(marks) & set(eos_ids):
        rank_zero_warn(
            f"The chat template ends a turn with {tokenizer.convert_ids_to_tokens(marks[0])!r}, at which generation "
            f"does not end: {unknown_end(tokenizer, marks[0])}"
        )


def end_marks(tokenizer: PreTrainedTokenizerBase, end: str) -> set[int]:
    """Return the tokens that a template could end a turn with: control tokens, and others that stand for no text in
    `end`."""
    added = tokenizer.added_tokens_decoder.items()
    return {number for number, token in added if token.special or token.content in end}


def unknown_end(tokenizer: PreTrainedTokenizerBase, mark: int) -> str:
    """Say how to make a token one at which generation ends."""
    token = tokenizer.convert_ids_to_tokens(mark)
    return f"set model.eos_token={token!r}, or add its id {mark} to eos_token_id in the model's generation_config.json."


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of every special token of the tokenizer."""
    added = (str(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return sorted({*added, *map(str, tokenizer.all_special_tokens)})
