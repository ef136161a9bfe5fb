"""Conversations by a script, for every engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lit_rl.core.episode import EnvironmentTurn, PolicyTurn, Responder
from lit_rl.core.rollout import Completions

MAX_TOKENS = 24


class Scripted(Responder):
    """Answers by what was said, and by nothing else; gives its answers late, and the last one first.

    Args:
        reply: The tokens that answer a turn; None ends the conversation.
        max_tokens: As in `Responder`.
        at_once: Answers given out together; 0 is all.
    """

    def __init__(
        self, reply: Callable[[PolicyTurn], Sequence[int] | None], max_tokens: int = MAX_TOKENS, at_once: int = 0
    ) -> None:
        self._reply, self._max_tokens, self._at_once = reply, max_tokens, at_once
        self._waiting: list[EnvironmentTurn] = []
        self._lengths: dict[int, int] = {}
        self.told: dict[int, list[PolicyTurn]] = {}

    @property
    def max_tokens(self) -> int:
        return self._max_tokens

    def tell(self, said: PolicyTurn) -> None:
        self.told.setdefault(said.row, []).append(said)
        ids = self._reply(said)
        length = self._lengths.get(said.row, 0) + len(said.token_ids) + len(ids or ())
        room = self._max_tokens - length
        if ids is None or room < 1:
            self._waiting.append(EnvironmentTurn(said.row, None, ended=ids is None))
            return
        self._lengths[said.row] = length
        self._waiting.append(EnvironmentTurn(said.row, ids, room))

    def answers(self, *, wait: bool) -> list[EnvironmentTurn]:
        if not wait and len(self._waiting) < 3:
            return []
        count = self._at_once or len(self._waiting)
        given = self._waiting[::-1][:count]
        self._waiting = self._waiting[::-1][count:][::-1]
        assert given or not wait, "nobody is waiting"
        return given


def reply(said: PolicyTurn) -> list[int] | None:
    """Up to four tokens, sometimes none; some conversations are over after one, two or three turns."""
    total = sum(said.token_ids) + said.turn
    return None if total % 5 == 0 or said.turn == 3 else [2 + (total + 3 * i) % 30 for i in range(total % 5)]


def rows_of(out: Completions) -> list[tuple[list[int], list[bool], list[int], bool]]:
    """Of each row: its tokens, which were sampled, in which turn, and whether it came to its end."""
    assert out.attended is not None and out.turn is not None
    return [
        (out.response_ids[i][there].tolist(), out.response_mask[i][there].tolist(), out.turn[i][there].tolist(), ended)
        for i, (there, ended) in enumerate(zip(out.attended, out.ended.tolist()))
    ]


def assert_rows_are_what_was_told(out: Completions, responder: Scripted) -> list[int]:
    """Each row has what was said and heard, marked as such, up to its last turn; how many turns each has."""
    turns = []
    for row, (ids, sampled, turn, ended) in enumerate(rows_of(out)):
        told = responder.told[row]
        expected, mask, numbers = list[int](), list[bool](), list[int]()
        for said in told:
            heard = [] if said is told[-1] else reply(said) or []
            expected += [*said.token_ids, *heard]
            mask += [True] * len(said.token_ids) + [False] * len(heard)
            numbers += [said.turn] * (len(said.token_ids) + len(heard))
        assert (ids, sampled, turn) == (expected, mask, numbers)
        assert sampled[-1], "the last token is the policy's"
        assert ended == (reply(told[-1]) is None)
        assert [said.turn for said in told] == list(range(len(told)))
        turns.append(len(told))
    return turns
