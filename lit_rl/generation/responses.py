"""The responses of all rows while they are decoded: each is written a token at a time, at its own pace."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.generation.batches import Decoded
from lit_rl.generation.transforms import Drawn, EndDetector
from lit_rl.rollout import Prompts, Sampling


class Responses:
    """Tokens and log-probs of ``n`` rows, and which of them go on.

    Args:
        prompts: What was asked for.
        sampling: How it is drawn.
        n_rows: Rows that are decoded, at whatever time.
        device: Where the tokens are drawn.
    """

    def __init__(self, prompts: Prompts, sampling: Sampling, n_rows: int, device: torch.device) -> None:
        self._longest = sampling.max_new_tokens
        self._ends = EndDetector(prompts, sampling, device)
        shape = (n_rows, self._longest + 1)  # one column more: for what is drawn of rows that are over
        self._ids = torch.full(shape, -1, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(shape, device=device)
        self._kept_logmass = None if sampling.truncation.off else torch.zeros(shape, device=device)
        self.lengths = torch.zeros(n_rows, dtype=torch.long, device=device)
        """Long ``(n,)``: tokens of each row so far, which is the position of its next one."""
        self.ended = torch.zeros(n_rows, dtype=torch.bool, device=device)
        """Bool ``(n,)``: the rows that an EOS or a stop string has ended."""

    def add(self, rows: Tensor, drawn: Drawn) -> Tensor:
        """Write the next token of these rows, long ``(m,)``, each at most once; of rows that are over nothing is kept.

        Returns:
            Bool ``(m,)``: the rows that go on.
        """
        lengths, over = self.lengths[rows], self.ended[rows]
        column = lengths.masked_fill(over, self._longest)
        self._ids[rows, column] = drawn.tokens
        self._logprobs[rows, column] = drawn.logprobs
        if self._kept_logmass is not None:
            assert drawn.kept_logmass is not None
            self._kept_logmass[rows, column] = drawn.kept_logmass
        running = column < self._longest
        over = over | (self._ends(self._tail(rows, column, drawn.tokens), column, running) & running)
        self.ended[rows], self.lengths[rows] = over, lengths + running
        return ~over & (column + 1 < self._longest)

    @property
    def complete(self) -> bool:
        """Whether every row ended or is as long as it may be."""
        return bool((self.ended | (self.lengths == self._longest)).all())

    def decoded(self) -> Decoded:
        """What was written, as wide as the longest row."""
        length = int(self.lengths.max())
        return Decoded(
            ids=self._ids[:, :length],
            mask=torch.arange(length, device=self._ids.device) < self.lengths[:, None],
            logprobs=self._logprobs[:, :length],
            ended=self.ended,
            kept_logmass=None if self._kept_logmass is None else self._kept_logmass[:, :length],
        )

    def _tail(self, rows: Tensor, column: Tensor, tokens: Tensor) -> Tensor:
        """The newest tokens of each row, ``(m, w)``, -1 before the first."""
        if self._ends.window == 1:
            return tokens[:, None]
        columns = column[:, None] + torch.arange(1 - self._ends.window, 1, device=rows.device)
        return self._ids[rows[:, None], columns.clamp(min=0)].masked_fill(columns < 0, -1)
