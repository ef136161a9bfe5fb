"""Tokens of texts that go on from each other, each of which keeps the tokens that it has where nothing follows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANCHORS = ("\n", ".", "a", "1")
"""Texts to tokenise a continuation behind, where the tokenizer marks the start of a text."""

_FEW = 3
"""Number of parts, as of a prompt and its completion, up to which settled tokens are not separated to save time."""


def joined(tokenizer: PreTrainedTokenizerBase, parts: Sequence[str]) -> tuple[list[int], list[int]]:
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
    control = _control(tokenizer) if len(parts) > _FEW else {}
    for part in parts:
        whole = _after(tokenizer, text + part) if inside else _plain(tokenizer, text + part)
        apart = None if whole is not None and whole[: len(held)] == held else _after(tokenizer, part)
        if apart is not None:
            ids += held
            held, text, inside = apart, part, bool(ids)
        else:
            whole = _plain(tokenizer, text + part) if whole is None else whole
            common = shared(held, whole)
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


def _control(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return the texts of the control tokens."""
    return {number: str(token.content) for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def _settled(
    tokenizer: PreTrainedTokenizerBase, text: str, held: Sequence[int], control: Mapping[int, str]
) -> tuple[int, int]:
    """Return the number of tokens and characters before the last control token of a text; 0 where that is unsafe.

    Tokenizers look for control tokens before all else, so the text after one has no influence on the tokens before it.
    """
    place = next((i for i in range(len(held) - 1, 0, -1) if held[i] in control), 0)
    begin = text.rfind(control[held[place]]) if place else 0
    return (place, begin) if begin > 0 and _plain(tokenizer, text[begin:]) == list(held[place:]) else (0, 0)


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many leading ids two sequences have in common."""
    return next((i for i, (mine, theirs) in enumerate(zip(one, other)) if mine != theirs), min(len(one), len(other)))


def marks_start(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether a text by itself begins with a mark that it does not have inside another one."""
    alone, spaced = _plain(tokenizer, "a"), _plain(tokenizer, " a")
    tokens = tokenizer.convert_ids_to_tokens(alone)
    return bool(tokens) and (str(tokens[0]).startswith(("\u2581", "\u0120")) or alone == spaced)


def _after(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int] | None:
    """Return the token ids of a text inside another one, or None if they cannot be separated from what precedes it."""
    if not marks_start(tokenizer):
        return _plain(tokenizer, text)
    for anchor in _ANCHORS:
        before, whole = _plain(tokenizer, anchor), _plain(tokenizer, anchor + text)
        if before and whole[: len(before)] == before and str(tokenizer.decode(before)).strip() == anchor.strip():
            return whole[len(before) :]
    return None


def _plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
    return list(ids)
