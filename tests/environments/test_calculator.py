"""Products with a calculator: what is held out, what demonstrations are like, and what the reward pays for."""

from __future__ import annotations

from typing import Any

import pytest
from talks import Talk, asked, one, texts

from lit_rl.environments import FunctionTools
from lit_rl.environments.games import (
    CalculatorDemonstrations,
    ProductQuestions,
    Products,
    QuestionDemonstrations,
    mul,
    multiply,
)
from lit_rl.rewards import math_answer

KEYED = {"parser": "regex", "max_turns": 3}


def calls(rows: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """The left operand that a call has, the right one, and the right one of its prompt."""
    found = []
    for row in rows[::2]:
        a, b = row["completion"].removeprefix("mul(").removesuffix(")").split(",")
        left, asked_for = row["prompt"].removesuffix("=").split("*")
        assert int(a) == int(left)
        found.append((int(a), int(b), int(asked_for)))
    return found


def test_every_product_is_a_row_of_one_of_the_two_sets() -> None:
    task = Products(max_operand=12, val_rows=20, seed=3)
    train, val = task.train(), task.val()
    prompts = [row["prompt"] for row in (*train, *val)]
    assert sorted(prompts) == sorted(f"{a}*{b}=" for a in range(2, 13) for b in range(2, 13)) and len(val) == 20
    for row in (*train, *val):
        a, b = row["prompt"].removesuffix("=").split("*")
        assert int(row["answer"]) == int(a) * int(b)
    assert task.train() == train and Products(max_operand=12, val_rows=20, seed=4).val() != val


def test_questions_are_the_same_products_in_a_chat() -> None:
    settings: dict[str, Any] = {"max_operand": 12, "val_rows": 20, "seed": 3}
    questions, products = ProductQuestions(**settings, instruction="Use multiply(a, b)."), Products(**settings)
    for rows, plain in ((questions.train(), products.train()), (questions.val(), products.val())):
        for row, product in zip(rows, plain, strict=True):
            a, b = product["prompt"].removesuffix("=").split("*")
            question = f"Use multiply(a, b). What is {a} times {b}?"
            assert row == {**product, "prompt": [{"role": "user", "content": question}]}
            assert str(multiply(int(a), int(b))) == row["answer"]


def test_questions_are_answered_with_the_tool_turn_by_turn() -> None:
    settings: dict[str, Any] = {"instruction": "Use it.", "max_operand": 12, "val_rows": 20, "seed": 3}
    rows, questions = QuestionDemonstrations(**settings).train(), ProductQuestions(**settings).train()
    assert len(rows) == 2 * len(questions) and not QuestionDemonstrations(**settings).val()
    for first, second, question in zip(rows[::2], rows[1::2], questions):
        assert first["prompt"] == question["prompt"]
        (call,), (answer,) = first["completion"], second["completion"]
        tool = {"role": "tool", "content": question["answer"]}
        assert second["prompt"] == [*question["prompt"], call, tool]
        assert answer == {"role": "assistant", "content": question["answer"]}
        assert str(eval(call["content"], {"multiply": multiply})) == question["answer"]


def test_demonstrations_ask_for_no_product_that_is_held_out() -> None:
    settings: dict[str, Any] = {"max_operand": 12, "val_rows": 20, "seed": 3}
    rows = CalculatorDemonstrations(**settings).train()
    assert [row["prompt"] for row in rows[::2]] == [row["prompt"] for row in Products(**settings).train()]
    assert rows == CalculatorDemonstrations(**settings).train() and not CalculatorDemonstrations(**settings).val()


def test_a_demonstration_is_the_conversation_as_it_is_read() -> None:
    """Each second prompt is what the policy would have read, had it made the call, a wrong one too."""
    rows = CalculatorDemonstrations(max_operand=12, seed=1, val_rows=0, wrong=0.5).train()
    assert len(rows) == 2 * 11**2
    for first, second in zip(rows[:24:2], rows[1:24:2]):
        talk = Talk(texts(FunctionTools([mul], **KEYED)), asked(first["prompt"]), [0])
        heard = talk.heard(0, first["completion"])
        assert second["prompt"] == f"{first['prompt']}{first['completion']}<|im_end|>{heard}"
        assert heard == f"{second['completion']}="
        talk.heard(0, second["completion"])
        (episode,) = talk.over()
        assert (episode.end, episode.turns, episode.calls, episode.failed_calls) == ("answered", 2, 1, 0)


@pytest.mark.parametrize(("wrong", "low", "high"), [(0.0, 0, 0), (0.3, 0.27, 0.33), (1.0, 1, 1)])
def test_so_many_have_a_wrong_operand(wrong: float, low: float, high: float) -> None:
    """Of some 9600; four standard deviations are 0.019."""
    made = calls(CalculatorDemonstrations(wrong=wrong).train())
    share = sum(pressed != asked_for for _, pressed, asked_for in made) / len(made)
    assert low <= share <= high
    assert {pressed for _, pressed, _ in made} == set(range(2, 100))


@pytest.mark.parametrize(
    ("turns", "worth"),
    [
        (["mul(17,25)", "425"], 1.0),
        (["425"], 1.0),
        (["mul(17,25)", "424"], 0.0),
        (["mul(17,26)", "442"], 0.0),
        (["mul(17,25)", ""], 0.0),
        (["mul(17,25)", "mul(17,25)", "mul(17,25)"], 0.0),
        (["mul(17,25", "425"], 0.0),
    ],
)
def test_the_reward_pays_for_the_last_turn_of_the_policy(turns: list[str], worth: float) -> None:
    """The number that the tool wrote is worth nothing until the policy says it."""
    episode = one(texts(FunctionTools([mul], **KEYED)), *turns, prompt="17*25=")
    written = "".join(turns[: episode.turns])
    assert math_answer(["17*25="], [written], answer=["425"]) == [worth]


def test_one_operand_needs_no_wrong_one() -> None:
    assert len(CalculatorDemonstrations(2, 0, wrong=0).train()) == 2
