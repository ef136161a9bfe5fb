"""Responses while they are decoded: each grows by a token at a time, at its own pace.

`Responses` holds the tokens of all rows and the rows that still run. Finished rows are reported to
`Prompts.on_finished` while others are still written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_rl.core.episode import EnvironmentTurn, PolicyTurn
from lit_rl.core.errors import GenerationError
from lit_rl.core.rollout import Prompts, Sampling
from lit_rl.core.vision_inputs import Later
from lit_rl.generation.generator import Decoded
from lit_rl.generation.token_sampler import Drawn, EndDetector


@dataclass(frozen=True)
class RowStates:
    """The state of some rows on the host."""

    rows: list[int]
    running: list[bool]
    """True where the turn of a row goes on."""
    lengths: list[int]
    """Tokens of each so far, answers included."""
    behind: Tensor | None
    """Long ``(m,)``: tokens of each that were drawn behind a stop string, and are removed. None: of no row."""
    finite: bool
    """True where the newest log-prob of every row is finite."""

    def newly_finished(self, reported: set[int]) -> list[int]:
        """Return the rows whose turn has ended and that are not in the set, and add them to it."""
        new = [row for row, runs in zip(self.rows, self.running, strict=True) if not runs and row not in reported]
        reported.update(new)
        return new


class Responses:
    """Tokens and log-probs of ``n`` rows, and the state of each.

    Args:
        prompts: The requested completions.
        sampling: How to draw.
        n_rows: All rows of the request.
        device: The device of the tokens.
    """

    def __init__(self, prompts: Prompts, sampling: Sampling, n_rows: int, device: torch.device) -> None:
        self.longest = prompts.longest_response(sampling)
        """Most tokens of a row, answers included."""
        self._per_turn = sampling.max_new_tokens
        self._ends = EndDetector(prompts, sampling, device)
        self.poll_every = self._ends.every
        """The number of tokens between two looks: on an accelerator the host waits for it."""
        shape = (n_rows, self.longest + 1)  # one column more: for tokens of rows whose turn is over
        self._ids = torch.full(shape, -1, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(shape, device=device)
        self._kept_logmass = None if sampling.truncation.off else torch.zeros(shape, device=device)
        self._turns = None if prompts.responder is None else _Turns(shape, device)
        self._later: dict[int, tuple[Later, ...]] = {}
        self._limits = torch.full((n_rows,), min(self._per_turn, self.longest), dtype=torch.long, device=device)
        self._begun = torch.zeros(n_rows, dtype=torch.long, device=device)
        # Tokens of each row when the host last looked, and how many were added since to those that it looks at.
        self._known, self._since = [0] * n_rows, 0
        # Where the next token of each row goes: behind its others, or into the column more where its turn is over.
        self._columns = torch.zeros(n_rows, dtype=torch.long, device=device)
        self.lengths = torch.zeros(n_rows, dtype=torch.long, device=device)
        """Long ``(n,)``: tokens of each row so far, answers included: the column of its next one."""
        self.ended = torch.zeros(n_rows, dtype=torch.bool, device=device)
        """Bool ``(n,)``: the rows whose newest turn an EOS or a stop string has ended, or whose conversation ended."""

    def turn_lengths(self, rows: Tensor) -> Tensor:
        """Return long ``(m,)``: tokens of these rows in their newest turn."""
        return self.lengths[rows] - self._begun[rows]

    def finished(self, rows: Tensor) -> Tensor:
        """Return bool ``(m,)``: rows whose turn is finished, as far as the last `read_states` and the device know."""
        return self._columns[rows] == self.longest

    def add(self, rows: Tensor, drawn: Drawn) -> None:
        """Write the next token of these rows, long ``(m,)``, each at most once; where a turn is over nothing is kept.

        The device is not queried, so stop strings end a turn at the next `read_states` only. Every row has to be looked
        at before others are added without it.
        """
        column = self._columns[rows]
        self._ids[rows, column] = drawn.tokens
        self._logprobs[rows, column] = drawn.logprobs
        if self._kept_logmass is not None:
            assert drawn.kept_logmass is not None
            self._kept_logmass[rows, column] = drawn.kept_logmass
        running = column < self.longest
        if self._turns is not None:
            self._turns.sampled[rows, column] = running
            self._turns.index[rows, column] = self._turns.now[rows]
        ended = running & self._ends.by_eos(drawn.tokens)
        goes_on = running & ~ended & (column + 1 < self._limits[rows])
        self.ended[rows] |= ended
        self.lengths[rows] += running
        self._columns[rows] = (column + 1).where(goes_on, self.longest)
        self.count_token()

    def count_token(self) -> None:
        """Count a token of the rows that are looked at, by `add` or by a replay of it."""
        self._since += 1

    def read_states(self, rows: Tensor) -> RowStates:
        """Read the state of these rows in one transfer, long ``(m,)``, and end those that have completed a stop string.

        Tokens behind it are removed: the row is as if it had ended with the stop string.
        """
        lengths, begun = self.lengths[rows], self._begun[rows]
        finite = self._logprobs[rows, (lengths - 1).clamp(min=0)].isfinite()
        facts = torch.stack([rows, (~self.finished(rows)).long(), finite.long(), lengths, begun])
        if not self._ends.stops:
            self._since, (numbers, running, finites, known, _) = 0, facts.tolist()
            for row, length in zip(numbers, known):
                self._known[row] = length
            return RowStates(numbers, list(map(bool, running)), known, None, all(finites))
        columns = lengths[:, None] + torch.arange(1 - self._ends.window - self._since, 0, device=rows.device)
        facts = torch.cat([facts.T, self._ids[rows[:, None], columns.clamp(min=0)]], 1)
        self._since, table = 0, facts.tolist()
        behind: list[int | None] = []
        for row, _, _, length, begin, *tail in table:
            turn_length, new = length - begin, length - self._known[row]
            behind.append(self._ends.behind(tail[-turn_length:], turn_length, new) if new else None)
            self._known[row] = length - (behind[-1] or 0)
        return RowStates(
            rows=[each[0] for each in table],
            running=[bool(each[1]) and back is None for each, back in zip(table, behind, strict=True)],
            lengths=[self._known[each[0]] for each in table],
            behind=None if all(back is None for back in behind) else self._take_back(rows, behind),
            finite=all(each[2] for each in table),
        )

    def end_at_stop_strings(self, rows: Tensor) -> None:
        """End the rows, of long ``(m,)``, that have completed a stop string since they were last read."""
        if self._since and self._ends.stops:
            self.read_states(rows)

    def _take_back(self, rows: Tensor, behind: Sequence[int | None]) -> Tensor:
        """End the turns of rows with a number in `behind`, and remove that many of their last tokens."""
        counts = torch.tensor([-1 if back is None else back for back in behind], device=rows.device)
        stopped, back = counts >= 0, counts.clamp(min=0)
        self.lengths[rows] -= back
        self.ended[rows] |= stopped
        self._columns[rows] = self._columns[rows].masked_fill(stopped, self.longest)
        width = torch.arange(self._ids.shape[1], device=rows.device)
        gone = stopped[:, None] & (width >= self.lengths[rows][:, None])
        self._logprobs[rows] = self._logprobs[rows].masked_fill(gone, 0.0)
        if self._turns is not None:
            self._turns.sampled[rows] = self._turns.sampled[rows] & ~gone
        return back

    def add_turn(self, row: int, token_ids: Sequence[int], logprobs: Sequence[float], *, ended: bool) -> None:
        """Write a whole turn of a row, which an engine has drawn and ended by rules of its own."""
        assert self._turns is not None
        begin = int(self.lengths[row])
        end = begin + len(token_ids)
        if not begin < end <= int(self._limits[row]):
            raise GenerationError(
                f"The engine wrote {len(token_ids)} tokens in a turn of row {row}; asked for were 1 to "
                f"{self.tokens_left(row)}."
            )
        self._ids[row, begin:end] = torch.tensor(token_ids, dtype=torch.long, device=self._ids.device)
        self._logprobs[row, begin:end] = torch.tensor(logprobs, device=self._ids.device)
        self._turns.sampled[row, begin:end] = True
        self._turns.index[row, begin:end] = self._turns.now[row]
        self.ended[row], self.lengths[row], self._columns[row] = ended, end, self.longest
        self._known[row] = end

    def newest_turns(self, rows: Sequence[int]) -> list[PolicyTurn]:
        """Return the newest turn of each of these rows, for the responder."""
        assert self._turns is not None
        at = torch.tensor(rows, device=self._ids.device)
        facts = torch.stack([self._turns.now[at], self._begun[at], self.lengths[at], self.ended[at].long()], 1)
        table = zip(rows, torch.cat([facts, self._ids[at]], 1).tolist(), strict=True)
        return [PolicyTurn(row, turn, ids[begun:end], bool(ended)) for row, (turn, begun, end, ended, *ids) in table]

    def texts(self, rows: Sequence[int]) -> list[list[int]]:
        """Return all tokens of these rows so far."""
        at = torch.tensor(rows, device=self._ids.device)
        table = torch.cat([self.lengths[at][:, None], self._ids[at]], 1).tolist()
        return [ids[:length] for length, *ids in table]

    def images(self, row: int) -> tuple[Later, ...]:
        """Return the images in a row's response so far."""
        return self._later.get(row, ())

    def tokens_left(self, row: int) -> int:
        """Return the tokens that a row may still write in its turn."""
        return int(self._limits[row] - self.lengths[row])

    def turn(self, row: int) -> int:
        """Return the newest turn of a row, 0 for the first."""
        return 0 if self._turns is None else int(self._turns.now[row])

    def add_answer(self, answer: EnvironmentTurn) -> int:
        """Write the answer to a row, and begin its next turn.

        Returns:
            The tokens that it may write in it, 1 or more; 0 where its conversation is over.
        """
        assert self._turns is not None
        row, ids = answer.row, answer.token_ids
        if ids is None:
            self.ended[row].fill_(answer.ended)
            return 0
        begin = self._known[row]
        end = begin + len(ids)
        limit = min(end + answer.max_new_tokens, end + self._per_turn)
        if answer.max_new_tokens < 1 or limit > self.longest:
            raise GenerationError(
                f"The answer to row {row} has {len(ids)} tokens after {begin}, and allows {answer.max_new_tokens} new "
                f"ones, expected 1 or more, and at most {self.longest} tokens in all."
            )
        self._ids[row, begin:end] = torch.tensor(ids, dtype=torch.long, device=self._ids.device)
        self._turns.index[row, begin:end] = self._turns.now[row]
        if answer.seen:
            self._later[row] = (*self.images(row), *(each.moved(begin) for each in answer.seen))
        self._turns.now[row] += 1
        # To assign a number to one element would copy it to an accelerator, and wait for that.
        for field in (self.lengths, self._begun, self._columns):
            field[row].fill_(end)
        self._limits[row].fill_(limit)
        self.ended[row].fill_(False)
        self._known[row] = end
        return limit - end

    @property
    def complete(self) -> bool:
        """Tell whether the newest turn of every row has finished."""
        return bool((self._columns == self.longest).all())

    def decoded(self) -> Decoded:
        """Return all responses, as wide as the longest row."""
        self.end_at_stop_strings(torch.arange(len(self._known), device=self._ids.device))
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
            later=tuple(map(self.images, range(len(within)))) if self._later else None,
        )


class _Turns:
    """The sampled tokens and their turns, for conversations only."""

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self.sampled = torch.zeros(shape, dtype=torch.bool, device=device)
        self.index = torch.zeros(shape, dtype=torch.long, device=device)
        self.now = torch.zeros(shape[0], dtype=torch.long, device=device)


# ------------------------------------------------------------------ reports of finished rows


class FinishedRows:
    """Rows of one turn, each reported once.

    Args:
        on_finished: Called with each row of the completions and its tokens.
        responses: The responses of the rows.
    """

    def __init__(self, on_finished: Callable[[int, list[int]], None], responses: Responses) -> None:
        self._on_finished, self._responses = on_finished, responses
        self._reported: set[int] = set()

    def report(self, states: RowStates) -> None:
        """Report rows that have newly finished."""
        new = states.newly_finished(self._reported)
        for row, ids in zip(new, self._responses.texts(new) if new else (), strict=True):
            self._on_finished(row, ids)
