"""A user's function leaves the process as it was: generators, settings of PyTorch and NumPy, folder, signals."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_rl.algorithms import GRPO
from lit_rl.core.errors import DataError, RewardError
from lit_rl.core.process_state import is_raised_by_user_code, preserve_process_state
from lit_rl.core.user_functions import load_by_path
from lit_rl.data.rows import apply_map_row
from lit_rl.environments.runner import Runner, TimedTask
from lit_rl.rewards import Rewards, TrainerState
from lit_rl.rewards.judges import FunctionJudge, ask_judge

HOSTILE = """
import logging, os, random, signal, socket, sys, threading
import numpy as np, torch

def change():
    random.seed(0); np.random.seed(0); torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("medium")
    torch.autograd.set_detect_anomaly(True)
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    np.seterr(all="raise")
    os.chdir("/")
    socket.setdefaulttimeout(0.5)
    logging.disable(logging.CRITICAL)
    sys.stdout = open(os.devnull, "w")
    if threading.current_thread() is threading.main_thread():
        torch.set_grad_enabled(False)
        torch.set_default_device("meta")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""


def snapshot() -> list[Any]:
    numpy = np.random.get_state()
    return [
        random.getstate(),
        (numpy[0], numpy[1].tolist(), *numpy[2:]),  # pyright: ignore
        torch.get_rng_state().tolist(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.is_anomaly_enabled(),
        torch.backends.cudnn.benchmark,
        np.geterr(),
        os.getcwd(),
        socket.getdefaulttimeout(),
        logging.root.manager.disable,
        sys.stdout,
        signal.getsignal(signal.SIGINT),
        signal.getsignal(signal.SIGTERM),
    ]


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What a hostile function does. Whatever a test leaves of it is undone."""
    space: dict[str, Any] = {}
    exec(HOSTILE, space)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    return space["change"]


STATE = TrainerState(seed=3)


def by_reward(change: Callable[[], None], path: Path) -> None:
    def listed(completions: list[str]) -> list[float]:
        change()
        return [1.0] * len(completions)

    assert Rewards(listed).score(["?"], ["!"], {}, trainer_state=STATE).total.tolist() == [1.0]


def by_reward_that_raises(change: Callable[[], None], path: Path) -> None:
    def single(completion: str) -> float:
        change()
        raise ValueError("no")

    with pytest.warns(UserWarning, match="ValueError"):
        Rewards(single, on_error=0.0).score(["?"], ["!"], {}, trainer_state=STATE)


def by_judge(change: Callable[[], None], path: Path) -> None:
    class Mine:
        reads_rewards = False

        def bind(self, columns: Any) -> None: ...

        def __call__(self, prompts: Any, firsts: Any, seconds: Any, **columns: Any) -> list[float]:
            change()
            return [0.5]

    assert ask_judge(Mine(), ["?"], ["a"], ["b"], trainer_state=STATE) == [0.5]
    ask_judge(
        FunctionJudge(lambda prompts, firsts, seconds: [change() or 1.0]), ["?"], ["a"], ["b"], trainer_state=STATE
    )


def by_environment(change: Callable[[], None], path: Path) -> None:
    async def step() -> int:
        change()
        return 7

    assert Runner().in_order([TimedTask(step(), 60.0, 5)]) == [7]


def by_file(change: Callable[[], None], path: Path) -> None:
    """What it chooses for speed is the whole run's to keep."""
    (path / "mine.py").write_text(HOSTILE + "\nchange()\n")
    flags = torch.backends.cudnn
    before = torch.get_num_threads(), torch.get_float32_matmul_precision(), flags.benchmark
    load_by_path(f"{path}/mine.py:change", "reward.fn")
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (before[0] + 1, "medium")
    assert flags.benchmark != before[2]
    torch.set_num_threads(before[0])
    torch.set_float32_matmul_precision(before[1])
    flags.benchmark = before[2]


def by_async_reward_of_a_rollout(change: Callable[[], None], path: Path) -> None:
    async def awaited(completion: str) -> float:
        await asyncio.sleep(0)
        change()
        return 1.0

    module = GRPO("tiny", len)
    module.policy = torch.nn.Identity()
    with module.rollout_context():
        Rewards(awaited).score(["?"], ["!"], {}, trainer_state=STATE)


DOORS = [
    by_reward,
    by_reward_that_raises,
    by_judge,
    by_environment,
    by_file,
    by_async_reward_of_a_rollout,
]


@pytest.mark.parametrize("door", DOORS)
def test_what_a_function_changes_is_put_back(door: Callable[..., None], change: Any, tmp_path: Path) -> None:
    with preserve_process_state("the test"):  # and so the suite goes on, whatever fails here
        torch.manual_seed(5)
        before = snapshot()
        door(change, tmp_path)
        after = snapshot()
    assert after == before


def test_a_setting_that_was_changed_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with preserve_process_state("reward function 'mine'"):
            torch.set_default_dtype(torch.float64)
            random.random()
    with preserve_process_state("reward function 'mild'"):
        np.random.seed(0)
        torch.rand(())
    (record,) = caplog.records
    assert record.getMessage().startswith("reward function 'mine' changed torch.set_default_dtype of the whole process")


def test_what_a_row_function_draws_is_the_rows_own() -> None:
    """Rows are read again, for splits, for checks and in a stream: a shuffled row has to be the same one then."""

    def shuffled(row: dict[str, Any]) -> dict[str, Any]:
        row["choices"] = random.sample(row["choices"], 9), np.random.permutation(9).tolist(), torch.randperm(9).tolist()
        return row

    row = {"choices": list(range(9))}
    before = snapshot()
    first = apply_map_row(shuffled, row, "folder/rows.jsonl:1")
    random.random()
    assert apply_map_row(shuffled, row, "/elsewhere/rows.jsonl:1") == first
    second = apply_map_row(shuffled, row, "folder/rows.jsonl:2")
    assert all(ours != theirs for ours, theirs in zip(first["choices"], second["choices"]))
    random.setstate(before[0])
    assert snapshot() == before
    assert row == {"choices": list(range(9))}


class Panic(BaseException):
    """As the packages that are written in Rust raise it."""


@pytest.mark.parametrize("error", [Panic("no"), SystemExit(0), asyncio.CancelledError(), StopIteration(1)])
def test_whatever_a_function_raises_is_its_own_failure(error: BaseException) -> None:
    """Seen as an end of the run: with a traceback, or with exit code 0 in the middle of it."""

    def single(completion: str) -> float:
        raise error

    async def awaited(completion: str) -> float:
        raise error

    for function in (single, awaited):
        with pytest.warns(UserWarning, match=f"failed on 1 of 1 .*{type(error).__name__}"):
            assert Rewards(function, on_error=0.25).score(["?"], ["!"], {}).total.tolist() == [0.25]
        with pytest.raises(RewardError, match=type(error).__name__):
            Rewards(function).score(["?"], ["!"], {})
    with pytest.raises(DataError, match=type(error).__name__):
        apply_map_row(single, {}, "rows:1")  # pyright: ignore


def test_ctrl_c_and_the_end_of_a_task_are_no_failures_of_a_function() -> None:
    told: list[bool] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        except BaseException as error:
            told.append(is_raised_by_user_code(error))
            raise

    async def ended() -> None:
        task = asyncio.ensure_future(waits())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(ended())
    assert told == [False] and not is_raised_by_user_code(KeyboardInterrupt())
    thread = threading.Thread(target=lambda: told.append(is_raised_by_user_code(KeyboardInterrupt())))
    thread.start()
    thread.join()
    assert told == [False, True]


def test_what_is_logged_is_what_it_was_when_it_was_logged() -> None:
    kept: list[Any] = []

    def listed(completions: list[str], log_extra: Any) -> list[float]:
        seen = [[completion] for completion in completions]
        kept.append(seen)
        log_extra("seen", seen)
        log_extra("number", torch.ones(len(completions), requires_grad=True).unbind())
        return [1.0] * len(completions)

    def single(completion: str, log_extra: Any) -> float:
        kept.append([[completion]])
        log_extra("words", kept[-1][0])
        return 1.0

    extras = Rewards([listed, single]).score(["?", "?"], ["a", "b"], {}).extras
    for seen in kept:
        seen[0].append("later")
    assert extras == {"seen": [["a"], ["b"]], "number": [1.0, 1.0], "words": [["a"], ["b"]]}


def test_handlers_that_a_ctrl_c_has_given_back_stay_so() -> None:
    """Else the run's own handler, which has let go, would be there again and answer the next signal."""
    ours, theirs = signal.getsignal(signal.SIGTERM), lambda number, frame: None
    try:
        with pytest.raises(KeyboardInterrupt), preserve_process_state("a function"):
            signal.signal(signal.SIGTERM, theirs)
            raise KeyboardInterrupt
        assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        signal.signal(signal.SIGTERM, ours)
