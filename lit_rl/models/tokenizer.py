"""Load a tokenizer that is safe to train with: padded on the left, with a known end, and a pad that is not the end."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_rl.errors import ConfigError, did_you_mean
from lit_rl.models.hub import reading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PADS = ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<|endoftext|>", "<|reserved_special_token_0|>")
"""Tokens that vocabularies carry for padding, or carry unused."""


def load_tokenizer(name: str, path: str, **hub: Any) -> PreTrainedTokenizerBase:
    """Raises ConfigError where the model comes without a vocabulary, which `AutoTokenizer` lets pass."""
    from transformers import AutoTokenizer

    with reading("model.name", name, path):
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", **hub)
    if not set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids):
        raise ConfigError(
            f"model.name={name!r} comes without a tokenizer (no tokenizer.json or vocabulary file). Copy the tokenizer "
            "of its base model into the folder."
        )
    return tokenizer


def set_chat_template(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    """Use ``template``: inline Jinja, or the path of a file that holds it."""
    if "{" in template or "\n" in template:
        tokenizer.chat_template = template
        return
    file = Path(template).expanduser()
    if not file.is_file():
        raise ConfigError(f"model.chat_template={template!r} is neither a file nor Jinja (which holds a brace).")
    tokenizer.chat_template = file.read_text(encoding="utf-8")


def set_token(tokenizer: PreTrainedTokenizerBase, role: str, token: str) -> None:
    """Make a token of the vocabulary the ``eos`` or the ``pad`` token."""
    vocabulary = tokenizer.get_vocab()
    if token not in vocabulary:
        near = did_you_mean(token, added_tokens(tokenizer))
        raise ConfigError(f"model.{role}_token={token!r} is not in the vocabulary.{near}")
    setattr(tokenizer, f"{role}_token", token)


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The tokens that stand for no text: special ones, and those added by hand."""
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


def as_ids(value: Any) -> set[int]:
    """The ids in an ``eos_token_id`` field, which holds none, one or a list."""
    if value is None:
        return set()
    return {int(one) for one in value} if isinstance(value, list | tuple) else {int(value)}
