"""Tokenizers that are safe to train with: padded on the left, with a known end, and a pad that is not the end."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_rl.core.errors import ConfigError, did_you_mean
from lit_rl.models.hub_files import quiet_about_defaults, reading, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_PADS = ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<|endoftext|>", "<|reserved_special_token_0|>")
"""Tokens that vocabularies carry for padding, or carry unused."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(?<!\.jinja)(?<!\.jinja2)(?<!\.j2)(?<!\.txt)")
"""The form of a template's name that is not on this machine: ``owner/model``, and no file that is missing."""


def load_tokenizer(name: str, path: str, key: str = "model.name", **hub: Any) -> PreTrainedTokenizerBase:
    """Load a tokenizer. Raise ConfigError where the model comes without a vocabulary, which `AutoTokenizer` lets
    pass."""
    from transformers import AutoTokenizer

    with reading(key, name, path), quiet_about_defaults():
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", **hub)
    if not set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids):
        raise ConfigError(
            f"{key}={name!r} comes without a tokenizer (no tokenizer.json or vocabulary file). Copy the tokenizer of "
            "its base model into the folder."
        )
    # Lengths are checked against the model's positions where a text is cut, and that names the row and the key.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def set_chat_template(tokenizer: PreTrainedTokenizerBase, template: str) -> list[int]:
    """Use ``template``: inline Jinja, the path of a file that holds it, or a model's folder or hub id.

    From a model everything that its template needs is taken: the tokens that were added to its vocabulary, and its EOS
    token, with which the template ends a turn. Return the ids of the tokens that are new to ``tokenizer``.

    Raises:
        ConfigError: ``template`` is none of the four, or the model has no template or no EOS token.
        BackendError: the model cannot be reached.
    """
    if "{" in template or "\n" in template:
        tokenizer.chat_template = template
        return []
    file = Path(template).expanduser()
    if file.is_file():
        tokenizer.chat_template = file.read_text(encoding="utf-8")
        return []
    if not (file.is_dir() or _HUB_ID.fullmatch(template)):
        raise ConfigError(
            f"model.chat_template={template!r} is neither a file nor Jinja (which holds a brace), nor a model's folder "
            "or hub id (owner/model)."
        )
    source = load_tokenizer(template, resolve("model.chat_template", template), "model.chat_template")
    if source.chat_template is None or source.eos_token is None:
        lacks = "chat template" if source.chat_template is None else "EOS token"
        raise ConfigError(f"model.chat_template={template!r} has no {lacks}. Name an instruction-tuned model.")
    tokenizer.chat_template = source.chat_template
    new = [token for _, token in sorted(source.added_tokens_decoder.items()) if str(token) not in tokenizer.get_vocab()]
    for token in new:  # one by one: special tokens and others are added by different calls, and keep their order
        tokenizer.add_tokens(token, special_tokens=token.special)
    tokenizer.eos_token = source.eos_token
    return [int(tokenizer.convert_tokens_to_ids(str(token))) for token in new]  # pyright: ignore


def set_token(tokenizer: PreTrainedTokenizerBase, role: str, token: str) -> None:
    """Make a token of the vocabulary the ``eos`` or the ``pad`` token."""
    vocabulary = tokenizer.get_vocab()
    if token not in vocabulary:
        near = did_you_mean(token, added_tokens(tokenizer))
        raise ConfigError(f"model.{role}_token={token!r} is not in the vocabulary.{near}")
    setattr(tokenizer, f"{role}_token", token)


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the tokens that stand for no text: special ones, and those added by hand."""
    return [str(token) for token in tokenizer.added_tokens_decoder.values()]


def choose_pad(tokenizer: PreTrainedTokenizerBase, eos_ids: Iterable[int]) -> None:
    """Give a tokenizer without a pad token one: an unused token where the vocabulary has one, else EOS.

    EOS as pad is safe here, because masks are made where tokens are made and never derived from ids.
    """
    from lightning.pytorch.utilities import rank_zero_info

    if tokenizer.pad_token_id is not None:
        return
    vocabulary, ends = tokenizer.get_vocab(), set(eos_ids)
    unused = [token for token in _PADS if token in vocabulary and vocabulary[token] not in ends]
    tokenizer.pad_token = unused[0] if unused else tokenizer.eos_token
    rank_zero_info(f"The tokenizer has no pad token: padding with {tokenizer.pad_token!r} (model.pad_token sets it).")


def different_tokens(one: Mapping[str, int], other: Mapping[str, int]) -> list[str]:
    """Return the tokens that two vocabularies do not both have under the same id, sorted."""
    return sorted({token for token, _ in one.items() ^ other.items()})


def as_ids(value: Any) -> set[int]:
    """Return the ids in an ``eos_token_id`` field, which holds none, one or a list.

    Raises:
        ConfigError: it holds something else.
    """
    if value is None:
        return set()
    try:
        return {int(one) for one in value} if isinstance(value, list | tuple) else {int(value)}
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"The model's eos_token_id is {value!r}; a token id or a list of them is needed. Correct it in its "
            "config.json or generation_config.json."
        ) from error
