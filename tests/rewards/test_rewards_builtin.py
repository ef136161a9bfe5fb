"""Built-in rewards for mathematics, shape, length and repetition: laws, hand-computed cases, and TRL's as oracle."""

from __future__ import annotations

import copy
import math
import pickle
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trl.rewards.accuracy_rewards import accuracy_reward, get_cosine_scaled_reward
from trl.rewards.format_rewards import think_format_reward
from trl.rewards.other_rewards import get_repetition_penalty_reward, get_soft_overlong_punishment

from lit_rl.core.errors import BackendError, ConfigError, RewardError
from lit_rl.rewards import (
    CosineScaledLength,
    MathAccuracy,
    RepetitionPenalty,
    Rewards,
    SoftOverlong,
    environment,
    environment_turns,
    math_accuracy,
    math_answer,
    reasoning_format,
)


def messages(text):
    return [{"role": "assistant", "content": text}]


def accuracy(completion, answer, reward=None):
    return (reward or math_accuracy)([None], [completion], [answer])[0]


class TestMathAccuracy:
    CASES = [
        ("4", r"\boxed{4}"),
        ("4", "it is 4"),
        ("4", "Thus, the final answer is $4$."),
        (r"$\frac{1}{3}$", r"\boxed{\frac{2}{6}}"),
        (r"$\frac{1}{3}$", r"\boxed{0.33}"),
        ("1,000", r"\boxed{1000}"),
        (r"\boxed{7}", r"so \boxed{7}"),
        ("The answer is 5", r"\boxed{5}"),
        ("3 apples", r"\boxed{3}"),
        ("$x=5$", r"\boxed{5}"),
        (r"$\{1,2\}$", r"\boxed{\{2,1\}}"),
        (r"$(-\infty, 3]$", r"\boxed{(-\infty,3]}"),
        (r"$x^2+1$", r"\boxed{1+x^2}"),
        (r"$2\sqrt{2}$", r"\boxed{\sqrt{8}}"),
        ("", r"\boxed{1}"),
        ("$4$", ""),
        ("$4$", r"\boxed{" * 50),
    ]

    @pytest.mark.parametrize(("answer", "completion"), CASES)
    def test_agrees_with_trl(self, answer, completion):
        expected = accuracy_reward([messages(completion)], [answer])[0]
        assert accuracy(messages(completion), answer) == accuracy(completion, answer) == expected

    @pytest.mark.parametrize(
        ("answer", "right", "wrong"),
        [
            ("(3, 4)", r"\boxed{(3,4)}", r"\boxed{4}"),
            ("10^{20}", r"\boxed{100000000000000000000}", r"\boxed{10}"),
            (r"\frac12", r"\boxed{0.5}", r"\boxed{2}"),
            (r"3\sqrt{2}", r"\boxed{\sqrt{18}}", r"\boxed{3}"),
            (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\boxed{1}"),
            (7, r"\boxed{7}", r"\boxed{8}"),
            (0.5, r"\boxed{\frac{1}{2}}", r"\boxed{5}"),
        ],
    )
    def test_a_bare_answer_is_read_as_latex_as_a_whole(self, answer, right, wrong):
        assert (accuracy(right, answer), accuracy(wrong, answer)) == (1.0, 0.0)

    @pytest.mark.parametrize("answer", ["Evelyn", r"\text{Evelyn}", r"\boxed{\text{Evelyn}}"])
    def test_words_are_no_products_of_letters(self, answer):
        assert accuracy(r"\boxed{Evelyn}", answer) == accuracy(r"\boxed{\text{Evelyn}}", answer) == 1.0
        assert accuracy(r"\boxed{nylevE}", answer) == accuracy("Evelyn", answer) == 0.0

    def test_no_answer_no_score(self):
        assert math_accuracy([0, 0], [r"\boxed{4}"] * 2, [None, ""]) == [None, None]

    def test_an_endless_comparison_is_worth_nothing(self):
        assert accuracy(r"\boxed{9^{9^{9^{9}}}}", "$5$", MathAccuracy(timeout=1)) == 0.0

    def test_in_another_thread_it_says_that_there_is_no_limit(self):
        seen = []

        def score():
            with pytest.warns(UserWarning, match="outside the main thread"):
                seen.append(accuracy(r"\boxed{4}", "4", MathAccuracy()))

        thread = threading.Thread(target=score)
        thread.start()
        thread.join()
        assert seen == [1.0]

    def test_settings(self, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(BackendError, match=r"pip install 'lit-rl\[math\]'.*math_answer"):
            MathAccuracy()


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "a", "\n", " ", "<answer>", "<thin"]), max_size=7)


@given(PIECES.map("".join))
def test_reasoning_format_is_trls(text):
    assert reasoning_format([0], [text]) == think_format_reward([messages(text)])
    assert reasoning_format([0], [messages(text)]) == reasoning_format([0], [text])


LENGTHS = st.lists(st.integers(0, 60), max_size=5)


def ids(lengths):
    return [list(range(length)) for length in lengths]


class TestSoftOverlong:
    @given(LENGTHS, st.integers(1, 40), st.data())
    def test_is_trls(self, lengths, most, data):
        cache = data.draw(st.integers(0, most))
        expected = get_soft_overlong_punishment(most, cache)(completion_ids=ids(lengths))
        assert SoftOverlong(most, cache)([], [], ids(lengths)) == pytest.approx(expected)

    def test_by_hand_and_the_papers_share(self):
        reward = SoftOverlong(20)
        assert reward.cache == 4
        assert reward([], [], ids([0, 16, 17, 18, 20, 21])) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def given_values(completions, values, **_):
    return values


class TestCosineScaledLength:
    @given(st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=5), st.integers(1, 40))
    def test_is_trls(self, rows, most):
        texts = [messages(r"\boxed{1}" if right else r"\boxed{2}") for _, right in rows]
        tokens = ids([length for length, _ in rows])
        expected = get_cosine_scaled_reward(most)(texts, ["1"] * len(rows), completion_ids=tokens)
        ours = CosineScaledLength(math_answer, most)
        assert ours(tokens, prompts=texts, completions=texts, answer=["1"] * len(rows)) == pytest.approx(expected)

    def test_by_hand(self):
        reward = CosineScaledLength(
            given_values, 10, correct_short=2.0, correct_long=1.0, wrong_short=-10, wrong_long=0
        )
        rows = [(0, 1.0, 2.0), (5, 1.0, 1.5), (10, 1.0, 1.0), (30, 1.0, 1.0), (0, 0.5, -10.0), (5, 0.0, -5.0)]
        tokens, values = ids([row[0] for row in rows]), [row[1] for row in rows]
        assert reward(tokens, completions=[], values=values) == pytest.approx([row[2] for row in rows])

    def test_asks_for_the_columns_of_the_function_inside(self):
        rewards = Rewards({"cosine": CosineScaledLength(math_answer, 4)})
        with pytest.raises(RewardError, match="'answer'"):
            rewards.bind(["question"])
        rewards.bind(["answer", "other"])
        scores = rewards.score(["p"], ["42"], {"answer": ["42"], "other": [0]}, completion_ids=[[1, 2]])
        assert scores.total.tolist() == [0.75]

        def by_length(completion_ids, log_metric):
            log_metric("asked", 1)
            return [float(len(row) > 1) for row in completion_ids]

        scores = Rewards(CosineScaledLength(by_length, 4)).score(["p"] * 2, ["", ""], {}, completion_ids=[[1, 2], [1]])
        assert scores.total.tolist() == pytest.approx([0.75, -1 + 0.25 * (1 - math.cos(math.pi / 4))])

    async def later(self, completions):
        return [1.0]

    def test_settings(self):
        with pytest.raises(ConfigError, match="whole batch"):
            CosineScaledLength(self.later, 4)  # pyright: ignore[reportArgumentType]
        with pytest.raises(RewardError, match="NaN"):
            CosineScaledLength(given_values, 4)([[1]], completions=[], values=[math.nan])


class TestEnvironment:
    @given(
        st.lists(st.none() | st.integers(-4, 4).map(float), min_size=1, max_size=5),
        st.none() | st.integers(-4, 4).map(float),
    )
    def test_turns_are_worth_what_the_episode_is(self, turn_rewards, whole):
        """Whether it is the sum over the turns, or `get_reward()` says so."""
        given_ones = [value for value in turn_rewards if value is not None]
        reward = sum(given_ones) if whole is None and given_ones else whole
        episode = {"turn_rewards": turn_rewards, "reward": reward, "turns": len(turn_rewards)}
        (total,), (parts,) = environment([episode]), environment_turns([episode])
        if isinstance(parts, list):
            assert sum(value for _, value in parts) == total
            turns = dict(parts)
            assert all(turns[turn] == value for turn, value in enumerate(turn_rewards[:-1]) if value is not None)
            assert len(turns) == len(parts) and max(turns) < len(turn_rewards)
        else:
            assert parts == total and not given_ones

    def test_what_was_earned_at_the_end_is_for_the_last_turn(self):
        zeros_and_a_win = {"turn_rewards": [0.0, 0.0, None], "reward": 1.0, "turns": 3}
        assert environment_turns([zeros_and_a_win]) == [[(0, 0.0), (1, 0.0), (2, 1.0)]]


class TestRepetitionPenalty:
    @given(st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=4), st.integers(1, 5), st.floats(-5, 0))
    def test_is_trls(self, rows, size, most):
        expected = get_repetition_penalty_reward(size, most)(completion_ids=rows)
        assert RepetitionPenalty(size, most)([], [], rows) == pytest.approx(expected)

    def test_by_hand(self):
        assert RepetitionPenalty(2)([], [], [[1, 2, 3], [5] * 5, [1], []]) == [0.0, -0.75, 0.0, 0.0]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize(
    "reward",
    [MathAccuracy(), SoftOverlong(4), RepetitionPenalty(), CosineScaledLength(math_answer, 8)],
    ids=lambda reward: type(reward).__name__,
)
def test_rewards_survive_copies(reward, clone):
    inputs = {"prompts": [""], "completions": [r"\boxed{4}"], "answer": ["4"], "completion_ids": [[1, 1, 1, 1]]}
    assert clone(reward)(**inputs) == reward(**inputs)
