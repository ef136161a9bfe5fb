"""A watchdog for collectives: a run ends when a rank does not join the others, with the stack of that rank.

Nothing depends on the training thread. A watchdog thread in each rank looks at its stack. A rank whose training thread
has been in the same call of torch.distributed for longer than the limit asks all others, through the store of the
process group, where theirs are. Ranks that do not wait themselves are the missing ones. They end their process;
connections close, and the collective in which the others wait fails.

Where all ranks wait for each other and none of them computes, it is a deadlock, which is noticed sooner. A single rank
that sleeps is no proof of one: it may wait for a reward, a disk or a function of the user's.
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
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from torch.distributed import DistError

from lit_rl.algorithms import data_parallel
from lit_rl.core import upstream
from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import BackendError
from lit_rl.core.ranks import callback_store
from lit_rl.ops.ranges import Positive

_SHARE = 0.9
"""Share of the process group's timeout after which the watchdog acts, while it still can report."""
_LOOK_EVERY = 5.0
"""Most seconds between two looks at the stack."""
_ANSWER = 10.0
"""Seconds that ranks have to report their stack."""
_LAST = 30.0
"""Seconds until a rank exits whose collective does not fail, though the others are gone."""
_TO_END = 2.0
"""Seconds that the end of the run waits for the thread, which may be querying the others."""
_FRAMES = 12
"""Innermost frames of a missing rank's stack that are reported."""
_IDLE = 0.05
"""Most CPU time of a process that only waits, as a share of the time: its other threads poll."""
_TORCH = str(Path(torch.__file__).parent)
_BESIDE = tuple(
    f"{Path(__file__).parents[1]}{os.sep}{name}{os.sep}" for name in ("generation", "rewards", "environments")
)
"""Folders of code whose collectives may involve a server or a worker, which are no ranks."""
_STOPPED = 10
"""Looks missed in a row after which this process counts as suspended: Ctrl-Z, a frozen container, a sleeping
machine."""
_FILES = f"{_TORCH}{os.sep}distributed{os.sep}checkpoint{os.sep}"
"""Folder of code in which a rank may wait for a disk."""


@checked("callbacks.watchdog")
class Watchdog(L.Callback):
    """A watchdog that ends a run of several processes when one does not join the collective of the others.

    Args:
        limit: Seconds that a rank may wait for the others. None: nine tenths of the process group's timeout, which is
            30 minutes where the strategy sets no other.
        all_wait: Seconds that all ranks may wait for each other while none of them computes, and none is in a rollout
            or a reward.

    Raises:
        ConfigError: one of them is not above 0.
    """

    def __init__(self, limit: Positive | None = None, all_wait: Positive = 120.0) -> None:
        self.limit, self.all_wait = limit, all_wait
        self._watch: _Watch | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._end()
        store = callback_store("watchdog", trainer.global_rank) if trainer.world_size > 1 else None
        if store is None:
            return
        from torch.distributed.constants import default_pg_timeout

        timeout: Any = upstream.process_group_timeout(trainer.strategy) or default_pg_timeout
        self._watch = _Watch(trainer, store, self.limit or _SHARE * timeout.total_seconds(), self.all_wait)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._end()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        reason = self._watch.end_reason if self._watch is not None else None
        self._end()
        if reason is not None:  # the failure is that of waiting for the named rank
            raise BackendError(reason) from exception

    def on_train_batch_start(self, *args: Any, **keywords: Any) -> None:
        if self._watch is not None:
            self._watch.moves += 1

    on_train_batch_end = on_validation_batch_start = on_validation_batch_end = on_train_batch_start

    def _end(self) -> None:
        if self._watch is not None:
            self._watch.end()
            self._watch = None


class _Watch:
    """The watchdog thread of one rank, a daemon: it holds nothing that has to be released."""

    def __init__(self, trainer: L.Trainer, store: Any, limit: float, all_wait: float) -> None:
        self.moves = 0
        self.end_reason: str | None = None
        """The reason why the run ends, once a rank is missing."""
        self.over = threading.Event()
        self._trainer, self._store, self._limit, self._all_wait = trainer, store, limit, all_wait
        self._rank, self._size, self._thread = trainer.global_rank, trainer.world_size, threading.get_ident()
        self._tick = min(_LOOK_EVERY, limit / 10, all_wait / 10)
        self._waiting_at: tuple[Any, float, float] = None, 0.0, 0.0
        """Place where this rank waits, the time since when, and the CPU time of its process then."""
        self._asks_again = 0.0
        self._round, self._answered = 0, False
        self._looks = threading.Thread(target=self._run, name="lit_rl-watchdog", daemon=True)
        self._looks.start()

    def end(self) -> None:
        """Stop the thread, and release its store with it."""
        self.over.set()
        self._looks.join(_TO_END)

    def _run(self) -> None:
        looked = time.monotonic()
        try:
            while self.end_reason is None and not self.over.wait(self._tick):
                if time.monotonic() - looked > _STOPPED * self._tick:
                    self._waiting_at = None, 0.0, 0.0  # suspended, not waiting
                self._look()
                looked = time.monotonic()
        except DistError:
            return  # rank 0 held the store, and is gone: waiting ranks get a lost connection

    def _look(self) -> None:
        waited = self._waited()
        asks = waited > self._limit
        if not asks and self._idle(waited) > self._all_wait and time.monotonic() >= self._asks_again:
            asks, self._asks_again = True, time.monotonic() + self._all_wait / 4
        if asks and self._store.add(f"{self._round}/asks", 1) == 1:
            self._ask()
        if not self._answered and self._store.check([f"{self._round}/asks"]):
            self._store.set(f"{self._round}/answer/{self._rank}", json.dumps(self._state(waited)))
            self._answered = True
        if self._store.check([f"{self._round}/verdict"]):
            self._take(json.loads(self._store.get(f"{self._round}/verdict")))

    # ------------------------------------------------------------------ the state of this rank

    def _waited(self) -> float:
        """Return the seconds spent in one call that waits for others; 0 where it computes."""
        frames = self._stack()
        if not waits_for_ranks(frames):
            self._waiting_at = None, 0.0, 0.0
            return 0.0
        # A later call may be at the same place: then a batch has begun or ended in between.
        place, now = (self.moves, *((id(frame), frame.f_lasti) for frame in frames)), time.monotonic()
        if place != self._waiting_at[0]:
            self._waiting_at = place, now, time.process_time()
        return now - self._waiting_at[1]

    def _idle(self, waited: float) -> float:
        """Return `waited` where the process computed nothing meanwhile, and can only be waiting for ranks; else 0."""
        place, _, computed = self._waiting_at
        computes = time.process_time() - computed > _IDLE * waited
        return 0.0 if place is None or computes or may_wait_for_others_than_ranks(self._stack()) else waited

    def _stack(self) -> list[FrameType]:
        """Return the frames of the watched thread, the innermost first."""
        frame = sys._current_frames().get(self._thread)
        return [] if frame is None else [each for each, _ in traceback.walk_stack(frame)]

    def _state(self, waited: float) -> dict[str, Any]:
        frame = sys._current_frames().get(self._thread)
        stack = [] if frame is None else traceback.format_stack(frame)[-_FRAMES:]
        process = {"host": socket.gethostname(), "pid": os.getpid(), "step": self._trainer.global_step}
        return process | {"waits": waited > 0, "idle": self._idle(waited), "stack": "".join(stack).rstrip()}

    # ------------------------------------------------------------------ the query and its verdict

    def _ask(self) -> None:
        """Collect the states of all ranks, and publish which are missing. Called by the first that waited too long."""
        until = time.monotonic() + min(_ANSWER, 2 * self._limit + 10 * self._tick)
        others = {rank: f"{self._round}/answer/{rank}" for rank in range(self._size) if rank != self._rank}
        while time.monotonic() < until and not self._store.check(list(others.values())):
            time.sleep(self._tick / 4)
        found = {rank: json.loads(self._store.get(key)) for rank, key in others.items() if self._store.check([key])}
        waited = self._waited()
        idle = [self._idle(waited), *(found.get(rank, {}).get("idle", 0.0) for rank in others)]
        if waited <= self._limit and min(idle) <= self._all_wait:  # they joined in the meantime, or still may
            self._store.set(f"{self._round}/verdict", json.dumps(None))
            return
        missing = {rank: found.get(rank) for rank in others if not found.get(rank, {}).get("waits")}
        ends = list(missing or others)  # where all wait for each other, one is left to report it
        message = self._message(waited, missing or found, together=not missing)
        self._store.set(f"{self._round}/verdict", json.dumps({"message": message, "ends": ends}))

    def _take(self, verdict: Mapping[str, Any] | None) -> None:
        if verdict is None:
            self._round, self._answered = self._round + 1, False
            return
        if self._rank in verdict["ends"]:
            time.sleep(max(1.0, 3 * self._tick))  # until the others have read the verdict
            self._leave()
        self.end_reason = verdict["message"]
        if not self.over.wait(_LAST):
            sys.stderr.write(f"{BackendError.__name__}: {self.end_reason}\n")
            sys.stderr.flush()
            if (launcher := self._trainer.strategy.launcher) is not None:
                launcher.kill(signal.SIGKILL)  # the processes started here: a suspended one would remain
            os._exit(BackendError.exit_code)

    def _leave(self) -> None:
        """End this process, whose training thread may never return."""
        # Where a child fails, Lightning kills its parent, which has to report why the run ends.
        environment: Any = getattr(self._trainer.strategy, "cluster_environment", None)
        started = environment is not None and not environment.creates_processes_externally
        os._exit(0 if started and self._trainer.local_rank > 0 else BackendError.exit_code)

    def _message(self, waited: float, found: Mapping[int, dict[str, Any] | None], *, together: bool) -> str:
        here = f"rank {self._rank} waited {waited:.0f} s for it in optimizer step {self._trainer.global_step + 1}"
        parts = [f"Rank {rank} did not arrive: {here}." for rank in found]
        if together:
            parts = [
                f"All ranks wait for each other, rank {self._rank} for {waited:.0f} s: they are at different places in "
                "the code, or the network between them is down."
            ]
        for rank, state in found.items():
            if state is None:
                parts.append(
                    f"Rank {rank} does not answer either: its process is stopped, or its code lets no thread run."
                )
                continue
            name = f"Rank {rank} (process {state['pid']} on {state['host']})"
            parts.append(f"{name} is in optimizer step {state['step'] + 1}, here:\n{state['stack']}")
        if together:
            own = self._state(waited)["stack"]
            return " ".join(parts) + (
                f"\nRank {self._rank} is here:\n{own}\nIf the ranks are only slow, raise "
                "callbacks.watchdog.all_wait. Resume with ckpt_path=last."
            )
        return " ".join(parts) + (
            "\nSet a time limit for the call that did not return: reward.timeout, env.step_timeout or the deadlines of "
            "a server; or raise callbacks.watchdog.limit, if it is only slow. Resume with ckpt_path=last."
        )


def waits_for_ranks(frames: list[FrameType]) -> bool:
    """Tell whether a thread is where it waits for other ranks.

    That is a call of torch.distributed, a method of `Ranks` that reads its result, or a backward pass, in which
    gradients are reduced.

    Args:
        frames: The thread's frames, the innermost first.
    """
    for frame in frames:
        path = frame.f_code.co_filename
        if path.startswith(f"{_TORCH}{os.sep}distributed{os.sep}") or path == data_parallel.__file__:
            return True
        if not path.startswith(f"{_TORCH}{os.sep}"):
            return False
        if frame.f_code.co_name == upstream.BACKWARD:
            return True
    return False


def may_wait_for_others_than_ranks(frames: list[FrameType]) -> bool:
    """Tell whether a waiting thread may wait for something else than ranks.

    That may be a server that receives weights, a reward, a disk, or its own backward pass, which may still reduce
    gradients, or page from a disk.

    Args:
        frames: The thread's frames.
    """
    return any(
        frame.f_code.co_filename.startswith((*_BESIDE, _FILES)) or frame.f_code.co_name == upstream.BACKWARD
        for frame in frames
    )
