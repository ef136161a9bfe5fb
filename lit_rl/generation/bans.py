"""Additive logit settings, and the tokens that may not be drawn at a position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_rl.errors import ConfigError
from lit_rl.ops.transforms import ban
from lit_rl.rollout import Prompts, Sampling


def bad_word_ids(prompts: Prompts, sampling: Sampling) -> list[list[int]]:
    """Return the token sequences of ``sampling.bad_words``: of each word, and of the word after a space where that has
    as many tokens and another first one. The rule is vLLM's, so that a word means the same to every generator.

    Raises:
        ConfigError: there is no tokenizer to ask, or it makes no token of a word.
    """
    sequences: list[list[int]] = []
    for word in sampling.bad_words:
        assert prompts.encode is not None  # base.check_request saw to it
        plain, spaced = (list(prompts.encode(text)) for text in (word.lstrip(), f" {word.lstrip()}"))
        if not plain:
            raise ConfigError(f"sampling.bad_words: the tokenizer makes no token of {word!r}.")
        sequences.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences.append(spaced)
    return sequences


class Bans:
    """Logit bias, bad words, and the EOS that ``min_new_tokens`` blocks, with the last tokens of every row.

    Args:
        sampling: Whose ``logit_bias`` and ``min_new_tokens`` to use.
        eos_ids: The tokens that ``min_new_tokens`` blocks.
        words: Forbidden token sequences; see `bad_word_ids`. The prompt's tokens do not count.
        n_rows: Rows of the batch.
    """

    def __init__(self, sampling: Sampling, eos_ids: Sequence[int], words: Sequence[Sequence[int]], n_rows: int) -> None:
        self._sampling = sampling
        self._eos_ids = eos_ids
        self._words = words
        self._n_rows = n_rows
        self._bias: Tensor | None = None
        self._tables: tuple[Tensor, Tensor] | None = None
        self._last: Tensor | None = None
        self._begun: list[tuple[Tensor, int]] = []
        self._window = max((len(word) - 1 for word in words), default=0)

    def __call__(self, logits: Tensor, position: int | Tensor, rows: Tensor | slice) -> Tensor:
        """Return the logits ``(n, v)`` of these rows' next tokens; ``position`` is one for all, or long ``(n,)``."""
        if self._sampling.logit_bias:
            logits = logits + self._biases(logits)
        if self._sampling.min_new_tokens:
            early, held = position < self._sampling.min_new_tokens, self._masks(logits)[0]
            if isinstance(early, Tensor):
                logits = ban(logits, early.reshape(-1, 1) & held)
            elif early:
                logits = ban(logits, held)
        if self._words:
            logits = ban(logits, self._masks(logits)[1])
        return ban(logits, self._completed(logits, rows)) if self._window else logits

    def drew(self, tokens: Tensor, rows: Tensor | slice) -> None:
        """Record the rows' new tokens, ``(n,)``."""
        if self._window:
            assert self._last is not None
            self._last[rows] = torch.cat([self._last[rows][:, 1:], tokens[:, None]], 1)

    def next_turn(self, row: int) -> None:
        """Forget the row's last tokens: no bad word continues from an earlier turn."""
        if self._last is not None:
            self._last[row] = -1

    def _biases(self, logits: Tensor) -> Tensor:
        if self._bias is None:
            bias, size = self._sampling.logit_bias, logits.shape[-1]
            if max(bias) >= size:
                raise ConfigError(
                    f"sampling.logit_bias names the token {max(bias)}, but the model has {size} logits: ids go from 0 "
                    f"to {size - 1}."
                )
            self._bias = logits.new_zeros(size)
            self._bias[list(bias)] = logits.new_tensor(list(bias.values()))
        return self._bias

    def _masks(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return two bool masks ``(v,)``: the tokens that are an EOS, and those that are a bad word by themselves."""
        if self._tables is None:
            vocabulary = torch.arange(logits.shape[-1], device=logits.device)
            single = [word[0] for word in self._words if len(word) == 1]
            eos, bad = (torch.isin(vocabulary, vocabulary.new_tensor(ids)) for ids in (self._eos_ids, single))
            self._tables = eos, bad
        return self._tables

    def _completed(self, logits: Tensor, rows: Tensor | slice) -> Tensor:
        """Return bool ``(n, v)``: the tokens that would complete a bad word of several tokens."""
        if self._last is None:  # -1 is no token
            self._last = torch.full((self._n_rows, self._window), -1, dtype=torch.long, device=logits.device)
            self._begun = [(self._last.new_tensor(begun), end) for *begun, end in self._words if begun]
        last, completed = self._last[rows], torch.zeros_like(logits, dtype=torch.bool)
        for begun, end in self._begun:
            completed[:, end] |= (last[:, -len(begun) :] == begun).all(1)
        return completed
