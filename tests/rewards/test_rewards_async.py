"""`async def` rewards: awaited together, bounded, in a loop of their own."""

from __future__ import annotations

import asyncio
import functools
import threading

import pytest
import torch

from lit_rl.core.errors import RewardError
from lit_rl.core.event_loops import BackgroundLoop
from lit_rl.rewards import Rewards

PROMPTS = ["p"] * 4
COMPLETIONS = ["one", "two", "three", "four"]


async def lengths(completions):
    await asyncio.sleep(0)
    return [len(completion) for completion in completions]


class Judge:
    async def __call__(self, completions):
        return await lengths(completions)

    async def rate(self, completions):
        return await lengths(completions)


FORMS = {
    "function": lengths,
    "object": Judge(),
    "method": Judge().rate,
    "partial": functools.partial(lengths),
    "coroutine_behind_a_plain_function": lambda completions: lengths(completions),
}


@pytest.mark.parametrize("function", FORMS.values(), ids=FORMS.keys())
def test_every_form_of_async_is_awaited(function):
    assert Rewards({"f": function}).score(PROMPTS, COMPLETIONS, {}).total.tolist() == [3, 3, 5, 4]


def test_async_functions_run_at_the_same_time():
    """Each waits for the other, so one after the other would never end."""
    meet = asyncio.Barrier(2)

    async def one(completions):
        await meet.wait()
        return [1.0] * 4

    async def two(completions):
        await meet.wait()
        return [2.0] * 4

    assert Rewards([one, two], timeout=60).score(PROMPTS, COMPLETIONS, {}).total.tolist() == [3.0] * 4


def test_per_sample_calls_are_bounded_and_keep_their_places():
    running, most = 0, 0

    async def my_reward(completion):
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(100 - len(completion)):  # later rows finish first
            await asyncio.sleep(0)
        running -= 1
        return len(completion)

    completions = ["x" * i for i in range(20)]
    scores = Rewards(my_reward, max_concurrent=3).score([""] * 20, completions, {})
    assert scores.total.tolist() == list(range(20))
    assert most == 3


def test_sync_functions_stay_in_the_calling_thread_and_async_ones_leave_it():
    seen = {}

    def sync(completions):
        seen["sync"] = threading.current_thread()
        return [0.0] * 4

    async def apart(completions):
        seen["async"], seen["grad"] = threading.current_thread(), torch.is_grad_enabled()
        return [0.0] * 4

    Rewards([apart, sync]).score(PROMPTS, COMPLETIONS, {})
    assert seen["sync"] is threading.current_thread() is not seen["async"]
    assert not seen["grad"]


def test_a_running_loop_is_in_nobodys_way():
    """As in a notebook, where `score` is called from inside a running loop."""

    async def cell():
        return Rewards(lengths).score(PROMPTS, COMPLETIONS, {}).total.tolist()

    assert asyncio.run(cell()) == [3, 3, 5, 4]


async def raises(completions):
    raise KeyError("gold")


async def leaves(completions):
    raise SystemExit(0)


async def interrupts(completions):
    raise KeyboardInterrupt


async def cancels(completions):
    raise asyncio.CancelledError


async def times_out(completions):
    raise TimeoutError("the judge")


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (raises, ["KeyError", "'gold'", "test_rewards_async.py"]),
        (leaves, ["SystemExit"]),
        (interrupts, ["KeyboardInterrupt"]),
        (cancels, ["CancelledError"]),
        (times_out, ["raised TimeoutError", "the judge"]),
    ],
)
def test_what_an_async_function_raises_names_it_and_leaves_the_loop_alive(function, told):
    with pytest.raises(RewardError) as error:
        Rewards(function).score(PROMPTS, COMPLETIONS, {})
    for part in (repr(function.__name__), "4 completions", *told):
        assert part in str(error.value)
    assert error.value.__cause__ is not None
    assert Rewards(lengths).score(PROMPTS, COMPLETIONS, {}).total.tolist() == [3, 3, 5, 4]


def test_the_first_error_cancels_the_others():
    cancelled = threading.Event()
    begun = asyncio.Event()

    async def waits(completions):
        begun.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def fails(completions):
        await begun.wait()
        raise ValueError

    with pytest.raises(RewardError, match="'fails'"):
        Rewards([fails, waits]).score(PROMPTS, COMPLETIONS, {})
    assert cancelled.wait(60)


def test_an_async_function_is_cancelled_at_the_limit():
    async def waits(completions):
        await asyncio.sleep(600)

    with pytest.raises(RewardError, match=r"'waits' took more than 0.05 seconds.*reward.timeout"):
        Rewards(waits, timeout=0.05).score(PROMPTS, COMPLETIONS, {})


def test_an_async_function_may_not_wait_for_the_loop_that_it_runs_on():
    inner = Rewards(lengths)

    async def outer(completions):
        return inner.score([""] * 4, completions, {}).total

    with pytest.raises(RewardError, match="Await them instead"):
        Rewards(outer).score(PROMPTS, COMPLETIONS, {})


def test_what_concurrent_calls_log_does_not_depend_on_who_is_first():
    async def my_reward(completion, log_metric, log_extra):
        for _ in range(10 - len(completion)):
            await asyncio.sleep(0)
        log_metric("tenth", 0.1 * len(completion))
        log_extra("text", completion)
        return 0.0

    forward = Rewards(my_reward).score(PROMPTS, COMPLETIONS, {})
    backward = Rewards(my_reward).score(PROMPTS, COMPLETIONS[::-1], {})
    assert forward.metrics == backward.metrics
    assert forward.extras["text"] == COMPLETIONS == backward.extras["text"][::-1]


def test_a_loop_that_nobody_holds_ends_after_what_it_was_asked_for():
    future = BackgroundLoop("of-nobody").submit(asyncio.sleep(0.1, result=5))
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "of-nobody"]
    assert future.result(20) == 5
    thread.join(20)
    assert not thread.is_alive()
