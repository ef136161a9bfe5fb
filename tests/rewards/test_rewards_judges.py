"""Judges of pairs: rewards, functions in and out of process, one pair at a time, and a language model over HTTP."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from standin_judge import StandInJudge, chat, marked, standing_in_for_a_judge

from lit_rl.core.errors import RewardError
from lit_rl.rewards.judges import FunctionJudge, Judge, PairwiseJudge, RewardJudge, as_judge
from lit_rl.rewards.llm_judge import LLMJudge, verdict_of

REWARDS = {"first_rewards": [1.0, 0.0, 2.0, None], "second_rewards": [0.0, 3.0, 2.0, 1.0]}
FOUR = (["p"] * 4, ["a", "bb", "c", "dd"], ["aa", "b", "d", "e"])


class TestRewardJudge:
    def test_the_higher_reward_wins(self) -> None:
        assert RewardJudge()(*FOUR, **REWARDS) == [1.0, 0.0, 0.5, None]

    def test_soft_is_bradley_terry(self) -> None:
        found = RewardJudge(soft=True)(*FOUR, **REWARDS)
        expected = [1 / (1 + math.exp(-1.0)), 1 / (1 + math.exp(3.0)), 0.5]
        assert found[:3] == pytest.approx(expected) and found[3] is None

    def test_soft_takes_any_gap(self) -> None:
        found = RewardJudge(soft=True)(
            ["p"] * 2, ["a"] * 2, ["b"] * 2, first_rewards=[1e6, -1e6], second_rewards=[0, 0]
        )
        assert found == [1.0, 0.0]


class TestFunctions:
    def test_gets_what_it_names(self) -> None:
        seen: dict[str, Any] = {}

        def judge(prompts, firsts, seconds, completions, answer, first_rewards, trainer_state, log_metric):
            seen.update(locals())
            log_metric("judge/mine", 3.0)
            return [0.0, 0.25, 1, None]

        logged = []
        made = FunctionJudge(judge)
        assert made.reads_rewards and isinstance(made, Judge)
        made.bind(["answer"])
        got = made(*FOUR, answer=[1, 2, 3, 4], **REWARDS, log_metric=lambda *pair: logged.append(pair))
        assert got == [0.0, 0.25, 1.0, None]
        assert seen["answer"] == [1, 2, 3, 4] and seen["first_rewards"] == REWARDS["first_rewards"]
        assert seen["completions"] == [list(pair) for pair in zip(FOUR[1], FOUR[2])]
        assert logged == [("judge/mine", 3.0)]

    def test_of_single_pairs_and_async(self) -> None:
        async def judge(prompt, first, second, answer):
            return float(len(first) > len(second)) if answer else None

        assert FunctionJudge(judge)(*FOUR, answer=[1, 1, 0, 1], **REWARDS) == [0.0, 1.0, None, 1.0]

    def test_an_error_ends_the_run_or_is_a_pair_without_a_verdict(self) -> None:
        def judge(prompt, first, second):
            return 1.0 / (len(first) - 2) + 1.0

        with pytest.raises(RewardError, match="ZeroDivisionError"):
            FunctionJudge(judge)(*FOUR)
        with pytest.warns(UserWarning, match="ZeroDivisionError"):
            assert FunctionJudge(judge, skip_errors=True)(*FOUR) == [0.0, None, 0.0, None]

    def test_by_path_runs_in_a_process_that_is_killed_at_its_limit(self, tmp_path: Path) -> None:
        file = tmp_path / "mine.py"
        file.write_text(
            "import os, time\n"
            "def judge(prompts, firsts, seconds):\n    print(os.getpid())\n    return [1.0 for _ in prompts]\n"
            "def slow(prompts, firsts, seconds):\n    time.sleep(60)\n"
        )
        assert FunctionJudge(f"{file}:judge")(*FOUR) == [1.0] * 4
        with pytest.raises(RewardError, match="more than 0.5 seconds"):
            FunctionJudge(f"{file}:slow", timeout=0.5)(*FOUR)

    def test_as_judge(self) -> None:
        assert isinstance(as_judge(None), RewardJudge)
        mine = RewardJudge(soft=True)
        assert as_judge(mine) is mine
        assert isinstance(as_judge(lambda prompts, firsts, seconds: []), FunctionJudge)


class TestPairwise:
    def test_both_orders_cancel_a_liking_for_a_place(self) -> None:
        assert PairwiseJudge(lambda prompt, first, second: 0)(*FOUR) == [0.5] * 4
        assert PairwiseJudge(lambda prompt, first, second: 0, both_orders=False)(*FOUR) == [1.0] * 4
        longer = PairwiseJudge(lambda prompt, first, second: int(len(second) > len(first)))
        assert longer(*FOUR) == [0.0, 1.0, 0.5, 1.0]

    def test_the_rewards_change_places_too(self) -> None:
        judge = PairwiseJudge(
            lambda prompt, first, second, first_rewards, second_rewards: int(second_rewards > first_rewards)
        )
        columns: Any = {"first_rewards": [1.0, 0.0], "second_rewards": [0.0, 1.0]}
        assert judge(["p"] * 2, ["a"] * 2, ["b"] * 2, **columns) == [1.0, 0.0]

    def test_one_order_without_a_verdict_is_none_for_the_pair(self) -> None:
        assert PairwiseJudge(lambda prompt, first, second: None if first == "aa" else 0)(*FOUR) == [None, 0.5, 0.5, 0.5]
        assert PairwiseJudge(lambda prompt, first, second: -1)(*FOUR) == [None] * 4


def texts(body: dict[str, Any]) -> tuple[str, str]:
    """Answers A and B of a request."""
    content = body["messages"][0]["content"]
    return marked(content, "first"), marked(content, "second")


@pytest.fixture
def server() -> Iterator[StandInJudge]:
    with standing_in_for_a_judge() as made:
        yield made


def longer(body: dict[str, Any], number: int) -> tuple[int, str]:
    first, second = texts(body)
    return 200, "verdict: tie" if len(first) == len(second) else f"verdict: {'A' if len(first) > len(second) else 'B'}"


class TestLanguageModel:
    def test_asks_both_orders_and_averages(self, server: StandInJudge) -> None:
        server.answer = longer
        judge = LLMJudge(server.url, "m", temperature=0.2, max_tokens=9)
        assert judge(*FOUR) == [0.0, 1.0, 0.5, 1.0]
        assert len(server.asked) == 8 and {body["path"] for body in server.asked} == {"/v1/chat/completions"}
        assert {(body["model"], body["temperature"], body["max_tokens"]) for body in server.asked} == {("m", 0.2, 9)}
        assert {texts(body) for body in server.asked} == {pair for a, b in zip(*FOUR[1:]) for pair in ((a, b), (b, a))}
        assert set(server.headers) == {None}

    def test_messages_and_texts_with_dollars_are_sent_as_they_are(self, server: StandInJudge) -> None:
        prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "cost of $first?"}]
        answers = [{"role": "assistant", "content": "$second and $prompt"}], [{"role": "assistant", "content": "5"}]
        LLMJudge(server.url, "m")([prompt], [answers[0]], [answers[1]])
        content = server.asked[0]["messages"][0]["content"]
        assert marked(content, "prompt") == "system: Be brief.\n\nuser: cost of $first?"
        assert {texts(body) for body in server.asked} == {("$second and $prompt", "5"), ("5", "$second and $prompt")}

    def test_prompts_with_images_are_not_judged_blind(self, server: StandInJudge) -> None:
        prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}]
        with pytest.raises(RewardError, match="judge=llm reads text alone, and a prompt shows images"):
            LLMJudge(server.url, "m")([prompt], ["7"], ["8"])
        assert not server.asked

    def test_a_failed_request_is_sent_again(self, server: StandInJudge) -> None:
        bad: list[tuple[int, Any]] = [
            (500, b"busy"),
            (429, b""),
            (200, b"no json"),
            (200, b"[" * 10**5),
            (200, b'{"choices": []}'),
        ]
        server.answer = lambda body, number: bad[number - 1] if number <= len(bad) else longer(body, number)
        logged: dict[str, float] = {}
        judge = LLMJudge(server.url, "m", backoff=0.001, attempts=6)
        assert judge(*FOUR, log_metric=logged.__setitem__) == [0.0, 1.0, 0.5, 1.0]
        assert len(server.asked) == 8 + len(bad)
        failed = {"judge/unanswered": 0, "judge/unparsable": 0}
        costs = {"judge/prompt_tokens": 7, "judge/completion_tokens": 3, "judge/requests": (8 + len(bad)) / 8}
        assert logged == failed | costs | {"judge/cached": 0, "judge/rate_limit_seconds": 0}

    def test_what_cannot_be_read_is_no_verdict_and_is_counted(self, server: StandInJudge) -> None:
        server.answer = lambda body, number: (200, "I like both" if texts(body)[0] == "a" else "B")
        logged: dict[str, float] = {}
        assert LLMJudge(server.url, "m")(*FOUR, log_metric=logged.__setitem__) == [None, 0.5, 0.5, 0.5]
        assert (logged["judge/unanswered"], logged["judge/unparsable"]) == (0, 1 / 8)

    def test_an_answer_without_text_is_no_verdict(self, server: StandInJudge) -> None:
        server.answer = lambda body, number: (200, json.dumps(chat(None)).encode())
        assert LLMJudge(server.url, "m")(*FOUR) == [None] * 4

    def test_more_failures_than_the_budget_end_the_run(self, server: StandInJudge) -> None:
        server.answer = lambda body, number: (200, "no idea")
        judge = LLMJudge(server.url, "m", max_failures=0.0)
        for _ in range(2):
            assert judge(*FOUR) == [None] * 4  # eight are forgiven
        with pytest.raises(RewardError, match=r"12 of 12 pairs.*judge\.max_failures=0.*no idea"):
            judge(*FOUR)

    def test_the_budget_is_a_share(self, server: StandInJudge) -> None:
        server.answer = lambda body, number: (200, "?" if "bb" in texts(body) else "A")
        judge = LLMJudge(server.url, "m", max_failures=0.25)
        for _ in range(12):
            assert judge(*FOUR).count(None) == 1

    def test_concurrency_is_a_limit(self, server: StandInJudge) -> None:
        wait = threading.Event()
        server.answer = lambda body, number: (200, str(wait.wait(0.05)))
        LLMJudge(server.url, "m", concurrency=3, cache=0)(["p"] * 6, ["a"] * 6, ["b"] * 6)
        assert 1 < server.most <= 3

    def test_concurrency_is_reached_whatever_the_number_of_processors(self, server: StandInJudge) -> None:
        pairs = min(32, (os.cpu_count() or 1) + 4) // 2 + 2  # two requests each: more than an event loop has threads
        together = threading.Barrier(2 * pairs)
        server.answer = lambda body, number: (200, f"verdict: A {together.wait(20)}")
        judge = LLMJudge(server.url, "m", concurrency=2 * pairs, cache=0)
        assert judge(["p"] * pairs, ["a"] * pairs, ["b"] * pairs)
        assert server.most == 2 * pairs and not together.broken

    @pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
    def test_a_refusal_that_would_stay_one_is_not_asked_for_again(self, server: StandInJudge, status: int) -> None:
        server.answer = lambda body, number: (
            (status, b"no such model") if texts(body)[0] == "a" else longer(body, number)
        )
        logged: dict[str, float] = {}
        judge = LLMJudge(server.url, "m", attempts=4, backoff=30.0)  # a second attempt would take too long
        assert judge(*FOUR, log_metric=logged.__setitem__) == [None, 1.0, 0.5, 1.0]
        assert len(server.asked) == 8 and logged["judge/unanswered"] == 1 / 8

    @pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 503])
    def test_a_refusal_that_may_pass_is(self, server: StandInJudge, status: int) -> None:
        server.answer = lambda body, number: (status, b"") if number == 1 else longer(body, number)
        assert LLMJudge(server.url, "m", attempts=2, backoff=0.001)(*FOUR) == [0.0, 1.0, 0.5, 1.0]
        assert len(server.asked) == 9

    def test_the_first_failure_is_told_and_no_other(self, recwarn: pytest.WarningsRecorder) -> None:
        judge = LLMJudge("http://127.0.0.1:9/v1", "m", attempts=1)
        for _ in range(2):
            assert judge(*FOUR) == [None] * 4
        told = [str(warning.message) for warning in recwarn if "no verdict" in str(warning.message)]
        assert len(told) == 1 and "4 of 4 pairs" in told[0] and "refused" in told[0]


@pytest.mark.parametrize(
    "answer, verdict",
    [
        ("verdict: A", 1.0),
        ("Verdict: b.", 0.0),
        ("**verdict:** tie", 0.5),
        ("First I thought verdict: A, but no.\nverdict: B", 0.0),
        (" A ", 1.0),
        ("[[B]]", 0.0),
        ("Tie.", 0.5),
        ("verdict: C", None),
        ("A is better", None),
        ("<think>So verdict: A? Hmm", None),
        ("<think>verdict: A?</think>\nverdict: B", 0.0),
        ("verdict: A</think>B", 0.0),
        ("<think>B", None),
        ("A or B", None),
        ("", None),
    ],
)
def test_reading_an_answer(answer: str, verdict: float | None) -> None:
    assert verdict_of(answer) == verdict
