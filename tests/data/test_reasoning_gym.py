"""Problems of the real reasoning-gym: made again to the bit, scored by their own generators."""

from __future__ import annotations

import random

import numpy
import pytest
from tiers import quick

from lit_rl.core.task_sets import REASONING_GYM_COLUMN, ReasoningGymProblem
from lit_rl.data.tasks import ReasoningGym, ReasoningGymPlain, ReasoningGymText, Task
from lit_rl.rewards import ReasoningGymExact, ReasoningGymScore, Rewards

reasoning_gym = pytest.importorskip("reasoning_gym")
NAMES = sorted(reasoning_gym.factory.DATASETS.keys() - {"composite"})  # which is made of others
GLOBAL = ("list_functions", "pool_matrix")
"""Generators that draw from the global random numbers of Python and of numpy."""


@pytest.mark.parametrize("name", quick(NAMES, (*GLOBAL, "chain_sum", "leg_counting")))
def test_a_problem_is_the_same_whenever_it_is_made_and_moves_no_random_numbers(name):
    random.seed(1)
    numpy.random.seed(1)
    state = random.getstate(), numpy.random.get_state()[1].tolist()
    entries = {index: ReasoningGymProblem(name, {}, 3, 20, index).entry() for index in (2, 0)}
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == state
    random.seed(2)
    numpy.random.seed(2)
    problem = ReasoningGymProblem.read(ReasoningGymProblem(name, {}, 3, 20, 2).text)
    assert problem.entry()["question"] == entries[2]["question"]
    assert str(problem.entry()["answer"]) == str(entries[2]["answer"])
    if isinstance(answer := entries[2]["answer"], str):
        assert 0.99 < problem.scorer()(answer) <= 1
        assert ReasoningGymExact()([""], [answer], [problem.text]) == [1]


def test_rows_differ_and_none_is_held_out_and_learned():
    task = ReasoningGym("leg_counting", {"max_animals": 3}, instruction="Just the number.", train_rows=60, val_rows=20)
    train, val = task.train(), task.val()
    assert isinstance(task, Task) and (len(train), len(val)) == (60, 20) and val == task.val()
    questions = [row["prompt"][0]["content"] for row in train + val]
    assert len(set(questions)) == 80 and all(text.endswith("\nJust the number.") for text in questions)
    assert all(row["answer"].isdigit() and [m["role"] for m in row["prompt"]] == ["user"] for row in train)
    assert (
        ReasoningGym("leg_counting", train_rows=5, seed=1).train() != ReasoningGym("leg_counting", train_rows=5).train()
    )


def test_texts_are_the_same_problems_with_the_generators_own_answer():
    plain, texts = (kind("needle_haystack", train_rows=8, val_rows=2) for kind in (ReasoningGym, ReasoningGymText))
    for row, text in zip(plain.train(), texts.train(), strict=True):
        assert text == {**row, "completion": [{"role": "assistant", "content": row["answer"]}]}
        assert row["answer"] in row["prompt"][0]["content"]


def test_plain_text_shows_of_a_question_what_matches():
    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    chats, plain = (
        kind("chain_sum", settings=settings, train_rows=20, val_rows=5, **shown).train()
        for kind, shown in ((ReasoningGym, {}), (ReasoningGymPlain, {"shown": "[-+=0-9]"}))
    )
    for chat, text in zip(chats, plain, strict=True):
        question = chat["prompt"][0]["content"]
        assert text == {**chat, "prompt": question.partition(": ")[2].replace(" ", "")}
        assert str(eval(text["prompt"].removesuffix("="))) == text["answer"]
    whole = ReasoningGymPlain("chain_sum", settings=settings, train_rows=20, val_rows=5).train()
    assert [row["prompt"] for row in whole] == [row["prompt"][0]["content"] for row in chats]


def test_the_reward_is_the_generators_own_score():
    rows = ReasoningGym("chain_sum", train_rows=3, val_rows=0).train()
    columns = {
        REASONING_GYM_COLUMN: [row[REASONING_GYM_COLUMN] for row in rows],
        "answer": [row["answer"] for row in rows],
    }
    replies = [f" {rows[0]['answer']}\n", f"It is {rows[1]['answer']}.", "I do not know"]
    prompts = [row["prompt"] for row in rows]
    right, inside, wrong = ReasoningGymScore()(prompts, replies, **columns)
    assert (
        right == 1
        and wrong == 0
        and 0 < inside == ReasoningGymProblem.read(rows[1][REASONING_GYM_COLUMN]).scorer()(replies[1]) < 1
    )
    assert ReasoningGymExact()(prompts, replies, **columns) == [1, 0, 0]
    tagged = [f"<answer>7</answer> no: <answer> {rows[0]['answer']} </answer>", rows[1]["answer"], "<answer>1"]
    assert ReasoningGymScore("answer")(prompts, tagged, **columns) == [1, 0, 0]
    assert ReasoningGymExact("answer")(prompts, tagged, **columns) == [1, 0, 0]


def test_a_scorer_that_raises_on_nonsense_gives_nothing():
    row = ReasoningGym("prime_factorization", train_rows=1, val_rows=0).train()[0]
    with pytest.raises(ValueError):
        ReasoningGymProblem.read(row[REASONING_GYM_COLUMN]).scorer()("nonsense")
    assert ReasoningGymScore()([row["prompt"]], ["nonsense"], [row[REASONING_GYM_COLUMN]]) == [0]


@pytest.mark.parametrize("score", [ReasoningGymScore(), ReasoningGymExact(), ReasoningGymScore("answer")])
def test_rows_without_a_problem_are_not_scored(score):
    """In mixed data another reward scores them; what a message without a text says is no answer."""
    row = ReasoningGym("chain_sum", train_rows=1, val_rows=0).train()[0]
    calls = [{"role": "assistant", "content": None, "tool_calls": []}]
    said = [f"<answer>{row['answer']}</answer>" if score.tag else row["answer"], "1", calls, calls]
    scores = Rewards(score).score(
        [row["prompt"]] * 4,
        said,
        {REASONING_GYM_COLUMN: [row[REASONING_GYM_COLUMN], None, row[REASONING_GYM_COLUMN], None]},
    )
    assert scores.total.tolist()[::2] == [1, 0] and scores.total.isnan().tolist() == [False, True, False, True]
