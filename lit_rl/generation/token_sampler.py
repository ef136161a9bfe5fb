"""Sampling of a step's tokens from its logits, and detection of the end of a response.

`draw` and `greedy` choose a token; `Bans` holds logit bias, bad words and the EOS that ``min_new_tokens`` blocks;
`TokenSampler` and `EndDetector` are shared by all decoders of this process. Temperature and truncation themselves are
in ``lit_rl.ops.sampling_distribution``, where the scoring of training uses them too.

Logits are float32 ``(b, v)`` everywhere. A transform returns new logits and edits nothing; a token that may not be
drawn gets minus infinity. Order: logit bias, bans, repetition penalty, temperature, top-k, top-p, min-p: as in vLLM,
and the last five as in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Prompts, Sampling
from lit_rl.generation import noise
from lit_rl.generation.generator import DecodeBatch
from lit_rl.ops.sampling_distribution import ban, kept_logmass, penalised, running_sum, temperature

_MOST_NOISE = 1 << 22
"""Most numbers of noise that are made in advance: 16 MiB."""


class Drawn(NamedTuple):
    """The next token of every row. All are ``(b,)``."""

    tokens: Tensor
    logprobs: Tensor
    """Log-probs of the distribution drawn from: after every transform, renormalised."""
    kept_logmass: Tensor | None
    """Log of the mass that truncation kept; None where none is in force."""


class TokenSampler:
    """The sampler of a batch's next tokens, with the history that repetition penalty and bad words need.

    Args:
        batch: The rows.
        prompts: The request that they belong to.
        sampling: How to draw.
    """

    def __init__(self, batch: DecodeBatch, prompts: Prompts, sampling: Sampling) -> None:
        self.sampling, self.keys = sampling, batch.keys
        self._greedy, truncation = sampling.greedy, sampling.truncation
        self._truncation = None if truncation.off else truncation
        self._bans = Bans(sampling, prompts.eos_ids, bad_word_ids(prompts, sampling), len(batch.keys))
        self._prompt = None if sampling.repetition_penalty == 1 else batch.repeated()
        self._seen: Tensor | None = None
        self._begun = batch.begun
        self._uniforms: Tensor | None = None
        longest = prompts.longest_response(sampling) + 1  # one column more: for tokens of finished rows
        if not self._greedy and batch.begun is None and len(batch.keys) * longest <= _MOST_NOISE:
            self._uniforms = noise.uniform(batch.keys[:, None], torch.arange(longest, device=batch.keys.device))

    def __call__(self, logits: Tensor, position: int | Tensor, rows: Tensor | None = None) -> Drawn:
        """Draw the next tokens of all rows, or of those in ``rows``, long ``(n,)``, each at most once.

        ``position`` is their place in the turn, one for all or long ``(n,)``: 0, 1, 2, ... one after another. The noise
        goes by the place in the whole response.
        """
        sampling, these = self.sampling, slice(None) if rows is None else rows
        logits = self._bans(logits, position, these)
        if sampling.repetition_penalty != 1:
            logits = repetition_penalty(logits, self._history(logits)[these], sampling.repetition_penalty)
        column = position if self._begun is None else position + self._begun[these]
        if self._greedy:
            drawn = Drawn(*greedy(logits), None)
        else:
            scaled = temperature(logits, sampling.temperature)
            kept = scaled if self._truncation is None else self._truncation(scaled)
            mass = None if self._truncation is None else kept_logmass(scaled, kept)
            drawn = Drawn(*draw(kept, self._noise(rows, column)), mass)
        if self._seen is not None:
            drew = torch.ones_like(drawn.tokens, dtype=torch.bool)  # True alone would be copied to an accelerator
            self._seen[torch.arange(len(self.keys), device=logits.device)[these], drawn.tokens] = drew
        self._bans.drew(drawn.tokens, these)
        return drawn

    def next_turn(self, row: int, response_ids: Sequence[int]) -> None:
        """Begin a row's next turn behind this response so far: all of it counts as seen, and begins no bad word.

        Filler tokens of the row since the end of its last turn are forgotten.
        """
        if self._begun is None:
            self._begun = torch.zeros(len(self.keys), dtype=torch.long, device=self.keys.device)
        self._begun[row].fill_(len(response_ids))  # assigned, it would be copied to the device
        if self._seen is not None:
            assert self._prompt is not None
            ids, mask = (part[row] for part in self._prompt)
            self._seen[row] = False
            self._seen[row, ids[mask]] = True
            self._seen[row, list(response_ids)] = True
        self._bans.next_turn(row)

    def _noise(self, rows: Tensor | None, column: int | Tensor) -> Tensor:
        """Return the uniform number ``(n,)`` of the token in a column of these rows' responses."""
        if self._uniforms is None:
            return noise.uniform(self.keys if rows is None else self.keys[rows], column)
        return self._uniforms[torch.arange(len(self.keys), device=self.keys.device) if rows is None else rows, column]

    def _history(self, logits: Tensor) -> Tensor:
        if self._seen is None:
            assert self._prompt is not None
            ids, mask = self._prompt
            # Padding does not count as seen: it would make a row depend on the batch it stands in. It goes to a column
            # of its own, so that the device is not queried.
            size = logits.shape[-1]
            seen = torch.zeros((len(ids), size + 1), dtype=torch.bool, device=logits.device)
            self._seen = seen.scatter_(1, ids.masked_fill(~mask, size), True)[:, :size]
        return self._seen


def repetition_penalty(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide the logits of ``seen`` tokens, bool ``(b, v)``, by ``penalty``; multiply negative ones (1909.05858)."""
    return torch.where(seen, penalised(logits, penalty), logits)


# ------------------------------------------------------------------ draws

_ONE_LEVEL = 4096
"""Up to this many tokens the vocabulary is searched at once."""

_BLOCK = 512
"""Tokens of a block of larger ones."""

_MOST_LOGITS = 1 << 21
"""Most logits of one draw on a CPU: its intermediate results stay in the caches."""


def draw(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Sample softmax(logits) by inverse CDF over the vocabulary in index order.

    A large vocabulary is searched in two levels: the CDF over blocks of tokens, then the one inside the block that was
    met. It saves a running sum over the vocabulary, and rounds otherwise in the last bits.

    Args:
        logits: ``(b, v)``, at least one finite entry a row.
        uniforms: ``(b,)`` in [0, 1). Multiples of 2^-24: rarer tokens are drawn, but in steps of that size.

    Returns:
        Token ids ``(b,)``, never one of zero probability, and their log-probabilities ``(b,)`` under softmax(logits):
        NaN where the row holds NaN or no finite entry.
    """
    return _in_parts(_draw, logits, uniforms)


def _draw(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    size, left = logits.shape[-1], 1 - uniforms[:, None]
    if size <= _ONE_LEVEL:
        top = logits.amax(-1, keepdim=True)
        weights = (logits - top).exp_()
        cdf = running_sum(weights)
        total = cdf[:, -1:]
        tokens = _reaching(cdf, left * total)
    else:
        top = _tops(logits).amax(-1, keepdim=True)
        weights = (logits - top).exp_()
        blocks = _by_block(weights, lambda part: part.sum(-1))
        cdf = running_sum(blocks)
        total = cdf[:, -1:]
        mass = left * total
        block = _reaching(cdf, mass)
        inside = running_sum(_of_block(weights, block, 0.0))
        # Blocks and tokens are summed in another order. Whatever that leaves is a mass in (0, that of the block].
        rest = (mass - (cdf - blocks).gather(-1, block)).clamp(min=torch.finfo(mass.dtype).tiny)
        tokens = (block * _BLOCK + _reaching(inside, rest.minimum(inside[:, -1:]))).clamp_(max=size - 1)
    if logits.device.type != "cpu":  # a parallel scan may be off by one rounding from being monotone
        tokens = torch.where(weights.gather(-1, tokens) > 0, tokens, _likeliest(logits)[1])
    logprobs = logits.gather(-1, tokens) - top - total.log()
    return tokens.squeeze(-1), logprobs.squeeze(-1)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the likeliest token (the lowest id of equals) and its log-probability under softmax(logits), both
    ``(b,)``."""
    return _in_parts(_greedy, logits)


def _greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    top, tokens = _likeliest(logits)
    return tokens.squeeze(-1), -(logits - top).exp_().sum(-1).log()


def _in_parts(drawn: Callable[..., tuple[Tensor, Tensor]], logits: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
    """Draw few rows at a time, on a CPU."""
    rows = max(_MOST_LOGITS // logits.shape[-1], 1)
    if logits.device.type != "cpu" or len(logits) <= rows:
        return drawn(logits, *others)
    parts = zip(*(part.split(rows) for part in (logits, *others)))
    tokens, logprobs = zip(*(drawn(*part) for part in parts))
    return torch.cat(tokens), torch.cat(logprobs)


def _likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the highest logit of each row, and the lowest token that has it, both `(b, 1)`."""
    if logits.shape[-1] <= _ONE_LEVEL:
        return logits.max(-1, keepdim=True)
    top, block = _tops(logits).max(-1, keepdim=True)
    return top, block * _BLOCK + _of_block(logits, block, -torch.inf).argmax(-1, keepdim=True)


def _tops(logits: Tensor) -> Tensor:
    """Return the highest logit of each block, `(b, blocks)`."""
    return _by_block(logits, lambda part: part.amax(-1))


def _reaching(cdf: Tensor, mass: Tensor) -> Tensor:
    """Return the first index, `(b, 1)`, where `cdf` `(b, m)` is at least `mass` `(b, 1)`, a mass in (0, total]."""
    # Searching right for one in [0, total) would step past the last place wherever the mass rounds up to the total,
    # and land on a weight of zero.
    return torch.searchsorted(cdf, mass).clamp_(max=cdf.shape[-1] - 1)


def _by_block(values: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Reduce `(b, v)` to `(b, blocks)`; the last block is shorter where the vocabulary is no multiple."""
    whole = values.shape[-1] // _BLOCK * _BLOCK
    reduced = reduce(values[:, :whole].unflatten(-1, (-1, _BLOCK)))
    return reduced if whole == values.shape[-1] else torch.cat([reduced, reduce(values[:, whole:])[:, None]], -1)


def _of_block(values: Tensor, block: Tensor, fill: float) -> Tensor:
    """Return the values `(b, _BLOCK)` in the block `(b, 1)` of each row, and `fill` beyond the end."""
    columns = block * _BLOCK + torch.arange(_BLOCK, device=block.device)
    there = columns < values.shape[-1]
    return values.gather(-1, columns.clamp_(max=values.shape[-1] - 1)).where(there, fill)


# ------------------------------------------------------------------ bias and bans


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


def bad_word_ids(prompts: Prompts, sampling: Sampling) -> list[list[int]]:
    """Return the token sequences of ``sampling.bad_words``: of each word, and of the word after a space where that has
    as many tokens and another first one. The rule is vLLM's, so that a word means the same to every generator.

    Raises:
        ConfigError: there is no tokenizer to ask, or it makes no token of a word.
    """
    sequences: list[list[int]] = []
    for word in sampling.bad_words:
        assert prompts.encode is not None  # see check_request
        plain, spaced = (list(prompts.encode(text)) for text in (word.lstrip(), f" {word.lstrip()}"))
        if not plain:
            raise ConfigError(f"sampling.bad_words: the tokenizer makes no token of {word!r}.")
        sequences.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences.append(spaced)
    return sequences


# ------------------------------------------------------------------ ends

_LOOK_ON_CPU = 1

_LOOK_ON_GPU = 4
"""Tokens between two queries of the device for the rows that still run: a query of an accelerator waits for it. Tokens
that finished rows draw meanwhile are thrown away."""


class EndDetector:
    """A detector of the ends of responses: any EOS on the device, a token that completes a stop string on the host.

    Args:
        prompts: Has ``eos_ids`` and ``decode``.
        sampling: Has ``stop`` and ``min_new_tokens``.
        device: The device of the tokens.
    """

    def __init__(self, prompts: Prompts, sampling: Sampling, device: torch.device) -> None:
        self._eos_ids = frozenset(prompts.eos_ids)
        self._eos = torch.tensor(prompts.eos_ids, dtype=torch.long, device=device)
        self._stop = sampling.stop
        self._min_new_tokens = sampling.min_new_tokens
        self._decode = prompts.decode
        # A token is one byte or more, so this many hold any stop string, and the rest of a character cut before it.
        self.window = max((len(text.encode()) for text in self._stop), default=-3) + 4
        self.stops = bool(sampling.stop)
        """True where there are stop strings."""
        self.every = _LOOK_ON_CPU if device.type == "cpu" else _LOOK_ON_GPU
        """Tokens between two looks for stop strings, and for rows that are over."""

    def by_eos(self, tokens: Tensor) -> Tensor:
        """Return bool ``(b,)``: which of the newest tokens, long ``(b,)``, are an EOS."""
        return (tokens[:, None] == self._eos).any(-1)

    def behind(self, tail: Sequence[int], turn_length: int, new: int) -> int | None:
        """Return how many tokens of a turn stand behind the one that completes a stop string; None where none does.

        Args:
            tail: The last ``window + new - 1`` tokens of the turn, or all where it is shorter.
            turn_length: Tokens of the turn.
            new: How many of the last tokens were not asked about yet. Of several that complete one the first counts.
        """
        for behind in reversed(range(min(new, turn_length - self._min_new_tokens) if self._stop else 0)):
            end = len(tail) - behind
            if tail[end - 1] in self._eos_ids:
                continue
            assert self._decode is not None  # see check_request
            newest = tail[max(end - self.window, 0) : end]
            text = self._decode(newest)
            if any(stop in text for stop in self._stop):
                # One that an earlier token completed does not count: it stood before min_new_tokens.
                before = self._decode(newest[:-1])
                if any(text.rfind(stop) > before.rfind(stop) for stop in self._stop):
                    return behind
        return None
