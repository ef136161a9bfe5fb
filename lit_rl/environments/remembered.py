"""An environment that can be made again in mid-episode: it remembers the past calls.

Where its worker was ended for another episode's sake, or the process of the run was, a new one is told the same again
and has to answer the same: else the episode fails, since the policy would go on in another world than the one it read
of. What a journal holds is not asked for at all, unless something is asked for that it does not hold.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from lit_rl.data.checks import excerpt
from lit_rl.environments.base import Environment, Opening, Reply, Turn
from lit_rl.environments.journal import Entry, EpisodeJournal, as_json
from lit_rl.environments.pool import Gone
from lit_rl.environments.runner import ASKED, Late, NoReply
from lit_rl.episodes import End
from lit_rl.errors import LitRLError
from lit_rl.process_state import raised_by_itself

_Ask = Callable[[Environment], Coroutine[Any, Any, Any]]


class FailedBefore(Exception):
    """The error for an episode that failed at this call according to the journal.

    Args:
        end: End of the episode.
        error: Error of the episode.
    """

    def __init__(self, end: End, error: str) -> None:
        super().__init__(error)
        self.end: End = end


class AnsweredOtherwise(NoReply):
    """The error for a new environment that answers the replayed calls otherwise."""


@dataclass(frozen=True)
class _Said:
    """A past call, with its seed and its result."""

    ask: _Ask
    seed: int
    given: Any


class RememberedEnvironment(Environment):
    """An environment that remembers its calls and can replay them.

    Args:
        make: Makes one.
        has_state: True if a new environment has to replay all past calls.
        journal: Journal of the episode; None: nothing outlives this process.
    """

    def __init__(self, make: Callable[[], Environment], *, has_state: bool, journal: EpisodeJournal | None) -> None:
        self._make, self._has_state, self._journal = make, has_state, journal
        self._made: Environment | None = None
        self._said: list[_Said] = []
        self._turns = 0
        self._at: tuple[str, str | None] = ("reset", None)
        """The current or next call, and its action where it is known."""
        self._over, self._lock = False, threading.Lock()

    async def reset(self, seed: int, row: Mapping[str, Any]) -> Opening:
        return await self._ask("reset", None, lambda made: made.reset(seed, copy.deepcopy(dict(row))))

    async def answer(self, turn: Turn) -> Reply:
        reply = await self._ask(str(self._turns), f"{turn.cut} {turn.written}", lambda made: made.answer(turn))
        self._turns += 1
        self._at = (str(self._turns), None)
        return reply

    async def reward(self) -> float | None:
        return await self._ask("reward", None, lambda made: made.reward())

    async def close(self) -> None:
        with self._lock:
            self._over = True  # the time of closing does not count for the episode
        if self._made is not None:
            await self._made.close()

    def timed_out(self, error: str) -> None:
        self._write(Entry(failed=("timeout", error)), last=True)

    # ------------------------------------------------------------------ one call

    async def _ask(self, at: str, action: str | None, ask: _Ask) -> Any:
        self._at = at, action
        seed, entry = ASKED.get().seed, self._journal and self._journal.known(at, action)
        if entry is None:
            given = await self._asked_now(ask)
        elif entry.failed is not None:
            raise FailedBefore(*entry.failed)
        else:
            given = entry.given
        self._said.append(_Said(ask, seed, given))
        return given

    async def _asked_now(self, ask: _Ask) -> Any:
        while True:
            try:
                given = await ask(await self._living())
            except Gone:
                self._made = None
                continue
            except (LitRLError, Late):
                raise
            except BaseException as error:
                if not raised_by_itself(error):
                    raise
                self._write(Entry(failed=("failed", told_of(error))))
                raise
            self._write(Entry(given=given))
            return given

    async def _living(self) -> Environment:
        """Return the environment, made again and with the past calls replayed where it was lost."""
        if self._made is None:
            self._made = self._make()
            if self._has_state and self._said:
                await self._tell_again(self._made)
        return self._made

    async def _tell_again(self, made: Environment) -> None:
        now = ASKED.get()
        for said in self._said:
            ASKED.set(now.once_more(said.seed))
            given = await said.ask(made)
            if as_json(given) != as_json(said.given):
                raise AnsweredOtherwise(
                    f"made anew in the middle of its episode, it gave {_shown(given)} and not {_shown(said.given)}"
                )
        ASKED.set(now.once_more(now.seed))

    def _write(self, entry: Entry, *, last: bool = False) -> None:
        """Write to the journal, unless the episode has ended at a limit meanwhile."""
        with self._lock:
            if self._journal is not None and not self._over:
                self._journal.write(*self._at, entry)
            self._over = self._over or last


def told_of(error: BaseException) -> str:
    """Return an error of an environment in one line."""
    return excerpt(f"{type(error).__name__}: {error}", 200)


def _shown(given: Any) -> str:
    """Return a result for a message: its text and reward."""
    if isinstance(given, Reply):
        text = " ".join(str(message["content"]) for message in given.messages)
        given = text if given.reward is None else f"{text} ({given.reward})"
    return excerpt(repr(given), 50)
