"""A penalty for saying the same thing again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lit_rl.errors import ConfigError, in_range


class RepetitionPenalty:
    """``max_penalty * (1 - distinct / all)`` over the n-grams of the completion's token ids (2502.03373, appendix C.2).

    In ``[max_penalty, 0]``; 0 for a completion that repeats nothing, or is shorter than one n-gram.

    Args:
        ngram_size: Tokens of one n-gram.
        max_penalty: The limit for a completion that repeats one n-gram, at most 0.

    Raises:
        ConfigError: ``ngram_size`` is below 1, or ``max_penalty`` is above 0 or not finite.
    """

    def __init__(self, ngram_size: int = 3, max_penalty: float = -1.0) -> None:
        in_range("ngram_size", ngram_size, low=1)
        if not -float("inf") < max_penalty <= 0:
            raise ConfigError(f"max_penalty={max_penalty} is out of range: allowed is (-inf, 0]; it is a penalty.")
        self.ngram_size = ngram_size
        self.max_penalty = max_penalty

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        **_: Any,
    ) -> list[float]:
        return [self.max_penalty * self._repeated(ids) for ids in completion_ids]

    def _repeated(self, ids: Sequence[int]) -> float:
        """Return the share of n-grams that repeat an earlier one of the completion."""
        ngrams = list(zip(*(ids[start:] for start in range(self.ngram_size))))
        return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
