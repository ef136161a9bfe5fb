"""Graceful stop: on Ctrl-C, SIGTERM, SIGHUP or Slurm's signal, all ranks save and stop within seconds.

An optimizer step that has begun is finished. A rollout, its rewards and a validation are abandoned: nothing was
learned from them, and the resumed run makes them anew (`lit_rl.core.interrupts`). A signal to one rank reaches the
others by `SignalWatch`, a thread that reads the key-value store of the process group. A second signal ends the
process at once. What signals do in other phases is in `lit_rl.core.signals`.

An error ends the run too: see `algorithms.loop.save_on_error`.
"""

from __future__ import annotations

import _thread
import contextlib
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info

from lit_rl.algorithms.loop.save_on_error import SaveOnError, folder_of
from lit_rl.callbacks.checkpoint_io import is_whole
from lit_rl.callbacks.timed_checkpoint import save_step
from lit_rl.core import interrupts, signals, upstream
from lit_rl.core.ranks import callback_store

POLL_SECONDS = 0.5
"""Seconds between two polls, after which a signal reaches the other ranks."""

RESEND_SECONDS = 2.0
"""Seconds after which a signal is sent again to work that still runs: it may have caught the exception."""

_SIGNAL_KEY = "signal"
"""Key of the signal's number in the store."""

_SECOND_SIGNAL_KEY = "at once"
"""Key of the number of a second signal, with which a rank exits at once."""


class SignalWatch:
    """A thread that sends this process the signals it has to know of; the handler recognises them by `was_sent_here`.

    Any rank may receive a signal, and while the ranks decode or score they meet in no collective. So the number of the
    signal goes through the rendezvous store of the process group, and so does that of a second one. Only this thread
    uses the store: a handler must not wait for it.

    Args:
        received_here: Getter of the signal that this process has received; None before any.
        ranks: World size.
        rank: This rank.
    """

    def __init__(self, received_here: Callable[[], int | None], ranks: int, rank: int = 0) -> None:
        self._received_here, self._sent, self._over = received_here, 0, False
        self._began, self._rank = False, rank
        self._store: Any = callback_store("signal", rank) if ranks > 1 else None
        self._forwarded = False
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
        until = time.monotonic() + 4 * POLL_SECONDS  # a poll of the store may take a moment
        while self._began and not self._ended and time.monotonic() < until:
            time.sleep(POLL_SECONDS / 50)  # no lock: a handler may run in between, and wait here itself

    def was_sent_here(self) -> bool:
        """Tell whether the handler runs for a signal that this thread has sent."""
        sent, self._sent = self._sent, 0
        return sent > 0

    def _run(self) -> None:
        try:
            asked_at, known = time.monotonic(), False
            while not self._over:
                time.sleep(POLL_SECONDS)
                number = self._received_here()
                if number is None:
                    asked_at, number = time.monotonic(), self._received(_SIGNAL_KEY)
                    self._forwarded = self._forwarded or number is not None
                    self._send(number)
                    continue
                if not known:  # the handler has run, for the signal sent here or for the user's own at the same moment
                    known, self._sent = True, 0
                if self._store is not None and not self._forwarded:
                    self._forwarded = True
                    self._store.set(_SIGNAL_KEY, str(number))
                if (last := self._received(_SECOND_SIGNAL_KEY)) is not None:
                    if self._rank == 0:  # it holds the store: the others poll first
                        time.sleep(1.5 * POLL_SECONDS)
                    return self._send(last, own=False)
                if interrupts.is_interruptible() and time.monotonic() - asked_at > RESEND_SECONDS:
                    asked_at = time.monotonic()
                    self._send(number)
            if self._store is not None and self._leaves is not None:
                self._store.set(_SECOND_SIGNAL_KEY, str(self._leaves))
                time.sleep(1.5 * POLL_SECONDS)  # until the others have polled: the store may be in this process
        except Exception:  # the rank that holds the store is gone: that ends the others
            pass
        finally:
            self._ended = True

    def _received(self, key: str) -> int | None:
        if self._store is None or not self._store.check([key]):
            return None
        return int(self._store.get(key))

    def _send(self, number: int | None, *, own: bool = True) -> None:
        """Send a signal to the main thread; with `own` false its handler takes it for one from outside."""
        if number is not None and not self._over:
            self._sent = number if own else 0
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, number)


class GracefulStop(SaveOnError):
    """A stop at the next optimizer step, on which all ranks agree, in place of Lightning's signal handler.

    Lightning broadcasts inside the handler: with one rank generating and another waiting, that hangs. Here the handler
    sets a flag, on which all ranks agree between two optimizer steps. Where a signal comes in work that may be
    abandoned, the handler ends that work, and the ranks agree after it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.signum: int | None = None
        """The received signal; None before any."""
        self._handlers = signals.SignalHandlers()
        self.gave_up = False
        """True where the signal came in work that was abandoned."""
        self.saved: Path | None = None
        """The checkpoint of the step that the run stopped at; None while there is none."""
        self._watch: SignalWatch | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.signum, self.gave_up, self.saved = None, False, None
        if threading.current_thread() is not threading.main_thread():
            return
        interrupts.enable_interrupts(lambda: self._give_up(trainer), several=trainer.world_size > 1)
        self._watch = SignalWatch(lambda: self.signum, trainer.world_size, trainer.global_rank)
        self._handlers.install(signals.stop_signals(trainer), partial(self._on_signal, trainer))

    @classmethod
    def of(cls, trainer: L.Trainer) -> GracefulStop | None:
        """Return the Trainer's own; None without one."""
        return next((each for each in trainer.callbacks if isinstance(each, cls)), None)  # pyright: ignore

    def _on_signal(self, trainer: L.Trainer, number: int, frame: Any) -> None:
        assert self._watch is not None
        again = self.signum is not None and self._watch.was_sent_here()
        if again or (number == self.signum and signals.may_repeat(number, trainer)):
            return interrupts.request_stop()
        if self.signum is not None:
            self._restore(trainer, leaves=number)
            signal.raise_signal(number)  # for the previous handler
            return
        self.signum = number
        if number == signal.SIGHUP:
            signals.detach_from_terminal()
        self._watch.begin()
        what = "stopping and saving" if folder_of(trainer) else "stopping; nothing is saved, as checkpoints are off"
        # The handler may have interrupted a write: a second write to the same stream is refused in the same thread, and
        # waits in another. `_thread` starts one without a lock that the main thread might hold.
        line = f"{signal.Signals(number).name}: {what}. Once more to stop at once."
        with contextlib.suppress(RuntimeError):  # no thread can be started: it stops silently
            _thread.start_new_thread(rank_zero_info, (line,))
        interrupts.request_stop()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if upstream.is_accumulating(trainer):
            return
        # A validation that is due is begun, and ends before its first batch: the next start makes it.
        if self._is_to_end(trainer) and not upstream.validates_next(trainer):
            folder = folder_of(trainer)
            if folder is not None:
                self.saved = folder / f"step_{trainer.global_step:08d}.ckpt"
                save_step(trainer, self.saved)
            trainer.should_stop = True
            upstream.skip_validation(trainer)
            signals.requeue_if_asked(self.signum, trainer)

    def _is_to_end(self, trainer: L.Trainer) -> bool:
        """Tell whether a signal ends the run, the same on every rank, and set `signum` to it. A collective."""
        if trainer.world_size > 1:
            local = torch.tensor(float(self.signum or 0), device=trainer.strategy.root_device)
            self.signum = int(trainer.strategy.reduce(local, reduce_op="max")) or None  # pyright: ignore
        if self.signum is not None:
            interrupts.record_stop_request()
        return self.signum is not None

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        super().on_validation_batch_start(trainer, pl_module, batch, batch_idx, dataloader_idx)
        # Every rank has as many batches, so all get here. Half a validation is dropped: the next start makes it anew.
        if self._place is not None and self._is_to_end(trainer):
            self._give_up(trainer)

    def _give_up(self, trainer: L.Trainer) -> NoReturn:
        """End the run in the middle of a rollout or a validation, in the state before it. Every rank gets here."""
        self._is_to_end(trainer)
        self.gave_up, in_validation = True, trainer.validating
        self.saved = self._save_place(trainer, in_validation=in_validation, anew=in_validation)
        signals.requeue_if_asked(self.signum, trainer)
        upstream.end_fit(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if self._place is not None and self._is_to_end(trainer):
            self.saved = self._save_place(trainer, in_validation=False)
            trainer.should_stop = True
            signals.requeue_if_asked(self.signum, trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._restore(trainer)

    def saves_after(self, exception: BaseException) -> bool:
        again = isinstance(exception, KeyboardInterrupt) and self.signum is not None
        return super().saves_after(exception) and not again

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._restore(trainer)
        super().on_exception(trainer, pl_module, exception)

    def is_saved(self, path: Path) -> bool:
        return is_whole(path)

    def save(self, trainer: L.Trainer, path: Path) -> None:
        save_step(trainer, path)

    def _restore(self, trainer: L.Trainer, leaves: int | None = None) -> None:
        interrupts.disable_interrupts()
        if self._watch is not None:
            self._watch.end(leaves)
        comes_again = self.signum is not None and signals.may_repeat(self.signum, trainer)  # the run is about to end
        self._handlers.restore(ignored=self.signum if comes_again else None)
        self._watch = None  # with its store: the next job of a sweep must find nothing of this one
