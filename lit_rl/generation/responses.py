"""The responses of all rows while they are decoded: each is written a token at a time, at its own pace."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_rl.errors import GenerationError
from lit_rl.generation.batches import Decoded
from lit_rl.generation.transforms import Drawn, EndDetector
from lit_rl.rollout import Prompts, Sampling
from lit_rl.turns import Heard, Said
from lit_rl.vision import Later


class Responses:
    """Tokens and log-probs of ``n`` rows, and which of them go on.

    Args:
        prompts: What was asked for.
        sampling: How it is drawn.
        n_rows: Rows that are decoded, at whatever time.
        device: Where the tokens are drawn.
    """

    def __init__(self, prompts: Prompts, sampling: Sampling, n_rows: int, device: torch.device) -> None:
        self._longest = prompts.longest_response(sampling)
        self._per_turn = sampling.max_new_tokens
        self._ends = EndDetector(prompts, sampling, device)
        shape = (n_rows, self._longest + 1)  # one column more: for what is drawn of rows whose turn is over
        self._ids = torch.full(shape, -1, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(shape, device=device)
        self._kept_logmass = None if sampling.truncation.off else torch.zeros(shape, device=device)
        self._turns = None if prompts.responder is None else _Turns(shape, device)
        self._later: dict[int, tuple[Later, ...]] = {}
        self._limits = torch.full((n_rows,), min(self._per_turn, self._longest), dtype=torch.long, device=device)
        self._begun = torch.zeros(n_rows, dtype=torch.long, device=device)
        # Where the next token of each row goes: behind its others, or into the column more where its turn is over.
        self._columns = torch.zeros(n_rows, dtype=torch.long, device=device)
        self.lengths = torch.zeros(n_rows, dtype=torch.long, device=device)
        """Long ``(n,)``: tokens of each row so far, what it heard included: the column of its next one."""
        self.ended = torch.zeros(n_rows, dtype=torch.bool, device=device)
        """Bool ``(n,)``: the rows whose newest turn an EOS or a stop string has ended, or whose conversation ended."""

    def spoken(self, rows: Tensor) -> Tensor:
        """Long ``(m,)``: tokens of these rows in their newest turn."""
        return self.lengths[rows] - self._begun[rows]

    def add(self, rows: Tensor, drawn: Drawn) -> Tensor:
        """Write the next token of these rows, long ``(m,)``, each at most once; where a turn is over nothing is kept.

        Returns:
            Bool ``(m,)``: the rows whose turn goes on.
        """
        column = self._columns[rows]
        self._ids[rows, column] = drawn.tokens
        self._logprobs[rows, column] = drawn.logprobs
        if self._kept_logmass is not None:
            assert drawn.kept_logmass is not None
            self._kept_logmass[rows, column] = drawn.kept_logmass
        running = column < self._longest
        if self._turns is not None:
            self._turns.sampled[rows, column] = running
            self._turns.index[rows, column] = self._turns.now[rows]
        tail, spoken = self._tail(rows, column, drawn.tokens), column - self._begun[rows]
        ended = running & self._ends(tail, spoken, running)
        goes_on = running & ~ended & (column + 1 < self._limits[rows])
        self.ended[rows] |= ended
        self.lengths[rows] += running
        self._columns[rows] = (column + 1).where(goes_on, self._longest)
        return goes_on

    def take(self, row: int, token_ids: Sequence[int], logprobs: Sequence[float], *, ended: bool) -> None:
        """Write a whole turn of a row, which an engine has drawn and ended by rules of its own."""
        assert self._turns is not None
        begin = int(self.lengths[row])
        end = begin + len(token_ids)
        if not begin < end <= int(self._limits[row]):
            raise GenerationError(
                f"The engine wrote {len(token_ids)} tokens in a turn of row {row}; asked for were 1 to "
                f"{self.room(row)}."
            )
        self._ids[row, begin:end] = torch.tensor(token_ids, dtype=torch.long, device=self._ids.device)
        self._logprobs[row, begin:end] = torch.tensor(logprobs, device=self._ids.device)
        self._turns.sampled[row, begin:end] = True
        self._turns.index[row, begin:end] = self._turns.now[row]
        self.ended[row], self.lengths[row], self._columns[row] = ended, end, self._longest

    def said(self, rows: Tensor) -> list[Said]:
        """The newest turn of each of these rows, as the responder is told of it."""
        assert self._turns is not None
        facts = torch.stack(
            [rows, self._turns.now[rows], self._begun[rows], self.lengths[rows], self.ended[rows].long()]
        )
        told = zip(*facts.tolist(), self._ids[rows].tolist())
        return [Said(row, turn, ids[begun:end], bool(ended)) for row, turn, begun, end, ended, ids in told]

    def text(self, row: int) -> list[int]:
        """All tokens of a row so far."""
        return self._ids[row, : int(self.lengths[row])].tolist()

    def later(self, row: int) -> tuple[Later, ...]:
        """What a row sees in its response so far."""
        return self._later.get(row, ())

    def room(self, row: int) -> int:
        """Tokens that a row may still say in its turn."""
        return int(self._limits[row] - self.lengths[row])

    def turn(self, row: int) -> int:
        """The newest turn of a row, 0 for the first."""
        return 0 if self._turns is None else int(self._turns.now[row])

    def last(self, row: int) -> int:
        """The newest token of a row."""
        return int(self._ids[row, self.lengths[row] - 1])

    def hear(self, heard: Heard) -> bool:
        """Write what a row has heard, and begin its next turn; False where its conversation is over."""
        assert self._turns is not None
        row, ids = heard.row, heard.token_ids
        if ids is None:
            self.ended[row] = heard.ended
            return False
        begin = int(self.lengths[row])
        end = begin + len(ids)
        limit = min(end + heard.room, end + self._per_turn)
        if heard.room < 1 or limit > self._longest:
            raise GenerationError(
                f"Row {row} heard {len(ids)} tokens after {begin}, and may say {heard.room} more; it takes 1 or more, "
                f"and no more than {self._longest} in all."
            )
        self._ids[row, begin:end] = torch.tensor(ids, dtype=torch.long, device=self._ids.device)
        self._turns.index[row, begin:end] = self._turns.now[row]
        if heard.seen:
            self._later[row] = (*self.later(row), *(each.moved(begin) for each in heard.seen))
        self._turns.now[row] += 1
        self.lengths[row] = self._begun[row] = end
        self._limits[row] = limit
        self._columns[row], self.ended[row] = end, False
        return True

    @property
    def complete(self) -> bool:
        """Whether the newest turn of every row is over."""
        return bool((self._columns == self._longest).all())

    def decoded(self) -> Decoded:
        """What was written, as wide as the longest row."""
        length = int(self.lengths.max())
        within = torch.arange(length, device=self._ids.device) < self.lengths[:, None]
        turns = self._turns
        return Decoded(
            ids=self._ids[:, :length],
            mask=within if turns is None else turns.sampled[:, :length] & within,
            logprobs=self._logprobs[:, :length],
            ended=self.ended,
            kept_logmass=None if self._kept_logmass is None else self._kept_logmass[:, :length],
            attended=None if turns is None else within,
            turn=None if turns is None else turns.index[:, :length],
            later=tuple(map(self.later, range(len(within)))) if self._later else None,
        )

    def _tail(self, rows: Tensor, column: Tensor, tokens: Tensor) -> Tensor:
        """The newest tokens of each row's turn, ``(m, w)``, -1 before its first."""
        if self._ends.window == 1:
            return tokens[:, None]
        columns = column[:, None] + torch.arange(1 - self._ends.window, 1, device=rows.device)
        before = columns < self._begun[rows][:, None]
        return self._ids[rows[:, None], columns.clamp(min=0)].masked_fill(before, -1)


class _Turns:
    """Which tokens were sampled, and in which turn: what only conversations need."""

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self.sampled = torch.zeros(shape, dtype=torch.bool, device=device)
        self.index = torch.zeros(shape, dtype=torch.long, device=device)
        self.now = torch.zeros(shape[0], dtype=torch.long, device=device)
