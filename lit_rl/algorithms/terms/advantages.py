"""Transformations of estimated advantages: whitening over the rows or tokens of all ranks, and clipping."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lit_rl.algorithms.ranks import Ranks
from lit_rl.algorithms.signatures import arguments_for, name_of, parameters
from lit_rl.errors import ConfigError, in_range
from lit_rl.rollout import Completions


class Whitening:
    """Normalisation of advantages to mean 0 and variance 1, without rows that have no reward.

    If tokens are whitened and there is one advantage a row, each of the row's tokens gets it: long rows weigh more.

    Args:
        function: `(advantages, ...) -> advantages`; it names `scored` (rows) or `mask` (tokens). None: no whitening.
        of: Name of the estimator, for messages.
    """

    def __init__(self, function: Callable[..., Tensor] | None, of: str) -> None:
        self.function, self.of = function, of

    def __call__(self, advantages: Tensor, rewards: Tensor, completions: Completions, ranks: Ranks) -> Tensor:
        """Return the whitened advantages, `(b,)` or `(b, t)`.

        Args:
            advantages: `(b,)` or `(b, t)`.
            rewards: `(b,)`, NaN for rows without a reward.
            completions: `b` completions.
            ranks: The ranks over whose rows mean and variance are taken.

        Raises:
            ConfigError: rows are to be whitened, and the advantages are of tokens.
        """
        whiten = self.function
        if whiten is None:
            return advantages
        self.fits(of_tokens=advantages.ndim == 2)
        scored = ~rewards.isnan()
        mask = completions.response_mask & scored[:, None]
        if advantages.ndim == 1 and "mask" in parameters(whiten):
            advantages = torch.where(mask, advantages[:, None], 0.0)
        columns = {"rewards": advantages, "group_id": completions.group_id, "scored": scored, "mask": mask}

        def over_all(advantages: Tensor, group_id: Tensor, mask: Tensor, scored: Tensor) -> Tensor:
            return whiten(advantages, **arguments_for(whiten, {"mask": mask, "scored": scored}))

        return ranks.apply(over_all, columns)

    def fits(self, *, of_tokens: bool) -> None:
        """Refuse to whiten one advantage a token by rows. (The other way round every token counts.)

        Raises:
            ConfigError: names the whitening and the estimator.
        """
        if self.function is None or not of_tokens:
            return
        names = parameters(self.function)
        if "mask" not in names and "scored" in names:
            raise ConfigError(
                f"algo/whitening: {name_of(self.function)} takes one advantage a completion, and {self.of} gives "
                "one a token. Take algo/whitening=tokens."
            )


class AdvantageClip:
    """A bound on the size of advantages.

    Args:
        limit: Largest size, above 0. None: no bound.
    """

    def __init__(self, limit: float | None) -> None:
        if limit is not None:
            in_range("algo.advantage_clip", limit, low=0, open_low=True)
        self.limit = limit

    def __call__(self, advantages: Tensor) -> Tensor:
        return advantages if self.limit is None else advantages.clamp(-self.limit, self.limit)
