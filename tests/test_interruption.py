"""Which work a signal ends, and where: one rank, several that agree, threads, functions that catch everything."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import pytest
import torch.distributed as dist

from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.rollouts.rollout_source import Ahead, DrawnAhead, abort_on_all_ranks
from lit_rl.callbacks import graceful_stop
from lit_rl.callbacks.graceful_stop import SignalWatch
from lit_rl.core import interrupts
from lit_rl.core.interrupts import Interrupted, agreed_by_ranks, interruptible, run_ending_hook, uninterruptible


class Ended(Exception):
    """Stands for the end of the run, saved."""


def end() -> NoReturn:
    raise Ended


@pytest.fixture(params=[False, True], ids=["one rank", "several"])
def several(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Signals are listened to; SIGUSR2 asks to stop."""
    before = signal.signal(signal.SIGUSR2, lambda number, frame: interrupts.request_stop())
    interrupts.enable_interrupts(end, several=request.param)
    yield request.param
    interrupts.disable_interrupts()
    signal.signal(signal.SIGUSR2, before)


def waits(seconds: float = 30.0) -> None:
    """Is told to stop while it waits."""
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR2)).start()
    time.sleep(seconds)


def is_told() -> None:
    """Is told to stop, here."""
    os.kill(os.getpid(), signal.SIGUSR2)
    time.sleep(0)


def test_a_wait_ends_at_once_and_the_run_with_it(several: bool) -> None:
    began = time.monotonic()
    with pytest.raises(Ended), run_ending_hook(), agreed_by_ranks(), interruptible():
        waits()
    assert time.monotonic() - began < 10 and not interrupts.is_interruptible()


def test_a_step_that_has_to_be_whole_is_finished_first_and_no_other_follows(several: bool) -> None:
    steps: list[str] = []
    with pytest.raises(Ended), run_ending_hook(), agreed_by_ranks(), interruptible():
        while len(steps) < 4:
            with uninterruptible():
                steps.append("begun")
                is_told()
                steps.append("done")
    assert steps == ["begun", "done"] and not interrupts.is_interruptible()
    with uninterruptible():  # no work that may be given up: nothing is raised
        is_told()


@pytest.mark.parametrize("work", [lambda: interruptible(), lambda: interruptible(alone=False)])
def test_where_ranks_do_not_agree_afterwards_work_goes_on(several: bool, work: Callable) -> None:
    done = []
    if not several:
        with pytest.raises(Ended), run_ending_hook(), work():
            waits()
        return
    with run_ending_hook(), work():
        is_told()
        done.append(True)
    assert done and interrupts.stop_requested()


def test_a_hook_that_may_not_be_left_is_not_left(several: bool) -> None:
    with agreed_by_ranks(), interruptible():
        is_told()
    assert interrupts.stop_requested()
    with pytest.raises(Ended), run_ending_hook(), agreed_by_ranks(), interruptible():
        raise AssertionError("it was asked before")


@pytest.mark.parametrize("several", [True], indirect=True)
def test_what_catches_everything_is_told_again_and_left_at_its_end(several: bool) -> None:
    caught: list[BaseException] = []
    watch = SignalWatch(lambda: signal.SIGUSR2 if interrupts.stop_requested() else None, ranks=1)
    threading.Timer(0.5, watch.begin).start()
    began = time.monotonic()
    with pytest.raises(Ended), run_ending_hook(), agreed_by_ranks(), interruptible():
        for wait in (waits, lambda: time.sleep(30)):
            try:
                wait()
            except BaseException as error:
                caught.append(error)
    watch.end()
    assert [type(each) for each in caught] == [Interrupted] * 2 and time.monotonic() - began < 20


@contextmanager
def job() -> Iterator[None]:
    """What ranks have found each other by, of one process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_signal_reaches_a_rank_that_was_started_for_the_second_job_of_a_sweep() -> None:
    """Rank 0 has had a training before, in the same process; both ranks are threads of this one."""
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    try:
        with job():
            SignalWatch(lambda: None, ranks=2, rank=0).end()
        with job():
            watches = [
                SignalWatch(lambda: signal.SIGUSR2, ranks=2, rank=0),
                SignalWatch(lambda: heard[0] if heard else None, ranks=2, rank=1),
            ]
            until = time.monotonic() + 20
            while not heard and time.monotonic() < until:
                time.sleep(0.05)
            for watch in watches:
                watch.end()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert heard == [signal.SIGUSR2]


def test_what_another_rank_was_told_and_the_same_signal_here_are_one_and_the_next_is_the_second() -> None:
    """Ctrl-C goes to every rank: both may come before either was known here."""
    told, known = threading.Event(), threading.Event()
    before = signal.signal(signal.SIGUSR2, lambda number, frame: told.set())
    try:
        watch = SignalWatch(lambda: signal.SIGUSR2 if known.is_set() else None, ranks=1)
        key = graceful_stop._SIGNAL_KEY
        watch._received = lambda name: signal.SIGUSR2 if name == key and not told.is_set() else None  # pyright: ignore
        watch.begin()
        assert told.wait(20) and watch._sent
        known.set()
        until = time.monotonic() + 20
        while watch._sent and time.monotonic() < until:
            time.sleep(0.05)
        assert not watch.was_sent_here()
        watch.end()
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_thread_beside_goes_on(several: bool) -> None:
    done = []

    def work() -> None:
        with run_ending_hook(), agreed_by_ranks(), interruptible():
            time.sleep(0.5)
            done.append(True)

    beside = threading.Thread(target=work)
    beside.start()
    os.kill(os.getpid(), signal.SIGUSR2)
    beside.join()
    assert done


def test_a_rank_that_has_done_its_work_gives_it_up_where_it_was_asked(several: bool) -> None:
    """Of one process: what it says of itself is what all say."""
    with pytest.raises(Ended), run_ending_hook():
        with abort_on_all_ranks(Ranks()):
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(0.1)
        with interruptible():
            raise AssertionError


def test_what_a_wait_was_given_up_for_is_waited_for_again(several: bool) -> None:
    ahead, go_on = Ahead(), threading.Event()
    drawn = DrawnAhead(None)  # pyright: ignore
    ahead.start((1, (1,)), lambda: [go_on.wait(30), drawn][1])
    with pytest.raises(Ended), run_ending_hook(), agreed_by_ranks(), interruptible():
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        ahead.wait()
    threading.Timer(0.5, go_on.set).start()
    assert ahead.take() == ((1, (1,)), drawn)


def test_what_is_drawn_ahead_is_waited_for_as_long_as_it_is_said() -> None:
    ahead, go_on = Ahead(), threading.Event()
    drawn = DrawnAhead(None)  # pyright: ignore
    ahead.start((1, (1,)), lambda: drawn)
    ahead.start((2, (2,)), lambda: [go_on.wait(30), drawn][1])
    assert [name for name, _ in ahead.peek(0.5)] == [(1, (1,))]
    taken = ahead.take()
    assert taken is not None
    ahead.put_first(*taken)
    go_on.set()
    assert [name for name, _ in ahead.peek()] == [(1, (1,)), (2, (2,))]
