"""A thread that repeats a signal to the main thread, and forwards one that another rank received."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from lit_rl import interruption
from lit_rl.callbacks.rank_store import own_store

EVERY = 0.5
"""Seconds between two polls, after which a signal reaches the other ranks."""

AGAIN = 2.0
"""Seconds after which a signal is sent again to work that still runs: it may have caught the exception."""

_WORD = "signal"
"""Key of the signal's number in the store."""

_AT_ONCE = "at once"
"""Key of the number of a second signal, with which a rank exits at once."""


class SignalWatch:
    """A thread that sends this process the signals it has to know of; the handler recognises them by `was_sent_here`.

    Any rank may receive a signal, and while the ranks decode or score they meet in no collective. So the number of the
    signal goes through the rendezvous store of the process group, and so does that of a second one. Only this thread
    uses the store: a handler must not wait for it.

    Args:
        came: Getter of the signal that this process has received; None before any.
        ranks: World size.
        rank: This rank.
    """

    def __init__(self, came: Callable[[], int | None], ranks: int, rank: int = 0) -> None:
        self._came, self._sent, self._over = came, 0, False
        self._began, self._rank = False, rank
        self._store: Any = own_store("signal", rank) if ranks > 1 else None
        self._told = False
        self._ended = False
        self._leaves: int | None = None
        if self._store is not None:
            self.begin()

    def begin(self) -> None:
        """Start the thread; with one rank, once a signal was received.

        `_thread` starts it without a lock that the main thread might hold while its handler runs.
        """
        if not self._began:
            self._began = True
            _thread.start_new_thread(self._run, ())

    def end(self, leaves: int | None = None) -> None:
        """Stop the thread; it sends nothing any more.

        Args:
            leaves: The second signal, with which this rank exits at once. It is forwarded, and the others exit too.
        """
        self._leaves, self._over = leaves, True
        until = time.monotonic() + 4 * EVERY  # a poll of the store may take a moment
        while self._began and not self._ended and time.monotonic() < until:
            time.sleep(EVERY / 50)  # no lock: a handler may run in between, and wait here itself

    def was_sent_here(self) -> bool:
        """Tell whether the handler runs for a signal that this thread has sent."""
        sent, self._sent = self._sent, 0
        return sent > 0

    def _run(self) -> None:
        try:
            asked_at, known = time.monotonic(), False
            while not self._over:
                time.sleep(EVERY)
                number = self._came()
                if number is None:
                    asked_at, number = time.monotonic(), self._heard()
                    self._send(number)
                    continue
                if not known:  # the handler has run, for the signal sent here or for the user's own at the same moment
                    known, self._sent = True, 0
                self._tell(number)
                if (last := self._asked(_AT_ONCE)) is not None:
                    if self._rank == 0:  # it holds the store: the others poll first
                        time.sleep(1.5 * EVERY)
                    return self._send(last, mine=False)
                if interruption.is_working() and time.monotonic() - asked_at > AGAIN:
                    asked_at = time.monotonic()
                    self._send(number)
            self._tell_that_it_leaves()
        except Exception:  # the rank that holds the store is gone: that ends the others
            pass
        finally:
            self._ended = True

    def _heard(self) -> int | None:
        number = self._asked(_WORD)
        self._told = self._told or number is not None
        return number

    def _asked(self, word: str) -> int | None:
        if self._store is None or not self._store.check([word]):
            return None
        return int(self._store.get(word))

    def _tell(self, number: int) -> None:
        if self._store is not None and not self._told:
            self._told = True
            self._store.set(_WORD, str(number))

    def _tell_that_it_leaves(self) -> None:
        if self._store is not None and self._leaves is not None:
            self._store.set(_AT_ONCE, str(self._leaves))
            time.sleep(1.5 * EVERY)  # until the others have polled: the store may be in this process

    def _send(self, number: int | None, *, mine: bool = True) -> None:
        """Send a signal to the main thread; with `mine` false its handler takes it for one from outside."""
        if number is not None and not self._over:
            self._sent = number if mine else 0
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, number)
