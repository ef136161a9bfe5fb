"""A rank that does not come to where the others wait for it: the run ends, and says which rank and where it stands.

Nothing of this asks anything of the training's own thread. A thread of each rank looks at the stack of that thread: one
that stands in the same call of torch.distributed for longer than the limit asks the threads of all others, through the
store of the process group, where theirs stand. Ranks that do not wait themselves are those that did not come. They end
their process; connections close, and with that the collective fails in which the others wait.

Where all ranks wait for each other and none of them computes, nobody can come any more: that is told sooner. Of one
rank that sleeps the same cannot be said: it may wait for a reward, a disk or a function of the user's.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from torch.distributed import DistError

from lit_rl.algorithms import ranks
from lit_rl.callbacks.rank_store import own_store
from lit_rl.errors import BackendError, in_range

_SHARE = 0.9
"""Of the time after which torch gives a collective up: before that something can be said."""
_LOOK_EVERY = 5.0
"""Seconds, at most."""
_ANSWER = 10.0
"""Seconds that ranks have to say where they stand."""
_LAST = 30.0
"""Seconds until a rank ends whose collective does not fail, though the others are gone."""
_TO_END = 2.0
"""Seconds that the end of the run waits for the thread, which may be asking the others."""
_FRAMES = 12
"""Of the stack of a rank that did not come, the innermost."""
_IDLE = 0.05
"""Share of the time that a process which only waits computes at most: its threads look around."""
_TORCH = str(Path(torch.__file__).parent)
_BESIDE = tuple(
    f"{Path(__file__).parents[1]}{os.sep}{name}{os.sep}" for name in ("generation", "rewards", "environments")
)
"""Where a collective may be one with a server or a worker, which are no ranks."""
_STOPPED = 10
"""Looks that were missed in one go, from which on this process counts as one that was stopped: Ctrl-Z, a frozen
container, a machine that slept."""
_FILES = f"{_TORCH}{os.sep}distributed{os.sep}checkpoint{os.sep}"
"""Where a rank may wait for a disk."""


class Watchdog(L.Callback):
    """Ends a run of several processes in which one does not come to where the others wait.

    Args:
        limit: Seconds that a rank waits for the others. None: nine tenths of the process group's timeout, which is 30
            minutes where the strategy sets no other.
        all_wait: Seconds that all ranks wait for each other, none of them computes, and none is in a rollout or a
            reward.

    Raises:
        ConfigError: one of them is not above 0.
    """

    def __init__(self, limit: float | None = None, all_wait: float = 120.0) -> None:
        if limit is not None:
            in_range("callbacks.watchdog.limit", limit, low=0, open_low=True)
        in_range("callbacks.watchdog.all_wait", all_wait, low=0, open_low=True)
        self.limit, self.all_wait = limit, all_wait
        self._watch: _Watch | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._end()
        store = own_store("watchdog", trainer.global_rank) if trainer.world_size > 1 else None
        if store is not None:
            self._watch = _Watch(trainer, store, self.limit or _SHARE * _timeout(trainer), self.all_wait)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._end()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        said = self._watch.said if self._watch is not None else None
        self._end()
        if said is not None:  # what failed is the wait for the rank that is named
            raise BackendError(said) from exception

    def on_train_batch_start(self, *args: Any, **keywords: Any) -> None:
        self._moved()

    def on_train_batch_end(self, *args: Any, **keywords: Any) -> None:
        self._moved()

    def on_validation_batch_start(self, *args: Any, **keywords: Any) -> None:
        self._moved()

    def on_validation_batch_end(self, *args: Any, **keywords: Any) -> None:
        self._moved()

    def _moved(self) -> None:
        if self._watch is not None:
            self._watch.moves += 1

    def _end(self) -> None:
        if self._watch is not None:
            self._watch.end()
            self._watch = None


class _Watch:
    """The thread of one rank. It is a daemon: it holds nothing that has to be given back."""

    def __init__(self, trainer: L.Trainer, store: Any, limit: float, all_wait: float) -> None:
        self.moves = 0
        self.said: str | None = None
        """Why the run ends, once a rank did not come."""
        self.over = threading.Event()
        self._trainer, self._store, self._limit, self._all_wait = trainer, store, limit, all_wait
        self._rank, self._size, self._thread = trainer.global_rank, trainer.world_size, threading.get_ident()
        self._tick = min(_LOOK_EVERY, limit / 10, all_wait / 10)
        self._stood: tuple[Any, float, float] = None, 0.0, 0.0
        """Where this rank waits; since when, and how much its process had computed then."""
        self._asks_again = 0.0
        self._round, self._answered = 0, False
        self._looks = threading.Thread(target=self._run, name="lit_rl-watchdog", daemon=True)
        self._looks.start()

    def end(self) -> None:
        """Look no more. What the thread holds of the store goes with it."""
        self.over.set()
        self._looks.join(_TO_END)

    def _run(self) -> None:
        looked = time.monotonic()
        try:
            while self.said is None and not self.over.wait(self._tick):
                if time.monotonic() - looked > _STOPPED * self._tick:
                    self._stood = None, 0.0, 0.0  # nobody waited meanwhile
                self._look()
                looked = time.monotonic()
        except DistError:
            return  # rank 0 held the store, and is gone: whoever waits hears of it by a lost connection

    def _look(self) -> None:
        waited = self._waited()
        if self._has_to_ask(waited) and self._store.add(f"{self._round}/asks", 1) == 1:
            self._ask()
        if not self._answered and self._store.check([f"{self._round}/asks"]):
            self._store.set(f"{self._round}/answer/{self._rank}", json.dumps(self._standing(waited)))
            self._answered = True
        if self._store.check([f"{self._round}/verdict"]):
            self._take(json.loads(self._store.get(f"{self._round}/verdict")))

    # ------------------------------------------------------------------ where this rank stands

    def _waited(self) -> float:
        """Seconds in one call that waits for others; 0 where it computes."""
        frames = self._stack()
        if not waits_for_others(frames):
            self._stood = None, 0.0, 0.0
            return 0.0
        # A later call may stand at the same place: then something has moved in between.
        place, now = (self.moves, *((id(frame), frame.f_lasti) for frame in frames)), time.monotonic()
        if place != self._stood[0]:
            self._stood = place, now, time.process_time()
        return now - self._stood[1]

    def _idle(self, waited: float) -> float:
        """Of the seconds that this rank has waited, all, where its process has computed nothing meanwhile, and where it
        can wait for ranks alone; 0 else."""
        place, _, computed = self._stood
        computes = time.process_time() - computed > _IDLE * waited
        return 0.0 if place is None or computes or may_wait_for_more(self._stack()) else waited

    def _stack(self) -> list[FrameType]:
        """Where the thread that is watched stands: its frames, the innermost first."""
        return list(_with_callers(sys._current_frames().get(self._thread)))

    def _standing(self, waited: float) -> dict[str, Any]:
        frame = sys._current_frames().get(self._thread)
        stack = [] if frame is None else traceback.format_stack(frame)[-_FRAMES:]
        said = {"host": socket.gethostname(), "pid": os.getpid(), "step": self._trainer.global_step}
        return said | {"waits": waited > 0, "idle": self._idle(waited), "stack": "".join(stack).rstrip()}

    # ------------------------------------------------------------------ asking, and what follows

    def _has_to_ask(self, waited: float) -> bool:
        if waited > self._limit:
            return True
        if self._idle(waited) <= self._all_wait or time.monotonic() < self._asks_again:
            return False
        self._asks_again = time.monotonic() + self._all_wait / 4
        return True

    def _ask(self) -> None:
        """By the first rank that has waited too long: hear from all where they stand, and say who did not come."""
        until = time.monotonic() + min(_ANSWER, 2 * self._limit + 10 * self._tick)
        others = {rank: f"{self._round}/answer/{rank}" for rank in range(self._size) if rank != self._rank}
        while time.monotonic() < until and not self._store.check(list(others.values())):
            time.sleep(self._tick / 4)
        found = {rank: json.loads(self._store.get(key)) for rank, key in others.items() if self._store.check([key])}
        waited = self._waited()
        idle = [self._idle(waited), *(found.get(rank, {}).get("idle", 0.0) for rank in others)]
        if waited <= self._limit and min(idle) <= self._all_wait:  # they came in the meantime, or may come
            self._store.set(f"{self._round}/verdict", json.dumps(None))
            return
        missing = {rank: found.get(rank) for rank in others if not found.get(rank, {}).get("waits")}
        ends = list(missing or others)  # where all wait for each other, one is left to say so
        message = self._message(waited, missing or found, together=not missing)
        self._store.set(f"{self._round}/verdict", json.dumps({"message": message, "ends": ends}))

    def _take(self, verdict: Mapping[str, Any] | None) -> None:
        if verdict is None:
            self._round, self._answered = self._round + 1, False
            return
        if self._rank in verdict["ends"]:
            time.sleep(max(1.0, 3 * self._tick))  # until the others have heard
            self._leave()
        self.said = verdict["message"]
        if not self.over.wait(_LAST):
            sys.stderr.write(f"{BackendError.__name__}: {self.said}\n")
            sys.stderr.flush()
            if (launcher := self._trainer.strategy.launcher) is not None:
                launcher.kill(signal.SIGKILL)  # those that this process started: one that is stopped would stay
            os._exit(BackendError.exit_code)

    def _leave(self) -> None:
        """End this process, whose own thread may never return."""
        # Of a process that fails Lightning kills the one that started it, which is to say why the run ends.
        environment: Any = getattr(self._trainer.strategy, "cluster_environment", None)
        started = environment is not None and not environment.creates_processes_externally
        os._exit(0 if started and self._trainer.local_rank > 0 else BackendError.exit_code)

    def _message(self, waited: float, found: Mapping[int, dict[str, Any] | None], *, together: bool) -> str:
        here = f"rank {self._rank} waited {waited:.0f} s for it in optimizer step {self._trainer.global_step + 1}"
        parts = [f"Rank {rank} did not come: {here}." for rank in found]
        if together:
            parts = [
                f"All ranks wait for each other, rank {self._rank} for {waited:.0f} s: at different places, or over a "
                "network that is gone."
            ]
        parts += [_where(rank, each) for rank, each in found.items()]
        if together:
            own = self._standing(waited)["stack"]
            return " ".join(parts) + (
                f"\nRank {self._rank} stands here:\n{own}\nIf they only take that long, raise "
                "callbacks.watchdog.all_wait. Go on with ckpt_path=last."
            )
        return " ".join(parts) + (
            "\nSet a limit for what did not return: reward.timeout, env.step_timeout or the deadlines of a server; or "
            "raise callbacks.watchdog.limit, if it only takes that long. Go on with ckpt_path=last."
        )


def waits_for_others(frames: list[FrameType]) -> bool:
    """Whether a thread stands where it waits for other ranks.

    A call of torch.distributed, what a method of `Ranks` reads of one, or a backward pass, in which gradients are
    summed up.

    Args:
        frames: Of the thread, the innermost first.
    """
    for frame in frames:
        path = frame.f_code.co_filename
        if path.startswith(f"{_TORCH}{os.sep}distributed{os.sep}") or path == ranks.__file__:
            return True
        if not path.startswith(f"{_TORCH}{os.sep}"):
            return False
        if frame.f_code.co_name == "_engine_run_backward":
            return True
    return False


def may_wait_for_more(frames: list[FrameType]) -> bool:
    """Whether a thread that waits may do so for something else than ranks: for a server that takes weights, for a
    reward, for a disk; or for its own backward pass, which may be in the middle of its sums, or page from a disk.

    Args:
        frames: Of the thread.
    """
    return any(
        frame.f_code.co_filename.startswith((*_BESIDE, _FILES)) or frame.f_code.co_name == "_engine_run_backward"
        for frame in frames
    )


def _with_callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _timeout(trainer: L.Trainer) -> float:
    from torch.distributed.constants import default_pg_timeout

    given: Any = getattr(trainer.strategy, "_timeout", None)
    return (given or default_pg_timeout).total_seconds()


def _where(rank: int, found: dict[str, Any] | None) -> str:
    if found is None:
        return f"Rank {rank} does not answer either: its process is stopped, or its code lets no thread run."
    who = f"Rank {rank} (process {found['pid']} on {found['host']})"
    return f"{who} stands in optimizer step {found['step'] + 1}, here:\n{found['stack']}"
