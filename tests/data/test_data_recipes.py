from __future__ import annotations

import pytest

from lit_rl.data.recipes import BOXED, gsm8k, gsm8k_solution, last_boxed, math
from lit_rl.rewards import math_answer


@pytest.mark.parametrize(
    "solution, answer",
    [
        ("48/2 = <<48/2=24>>24 clips.\n#### 72", "72"),
        ("#### 1,234,567", "1234567"),
        ("a #### b\n#### -3.5 ", "-3.5"),
    ],
)
def test_gsm8k(solution, answer):
    row = gsm8k({"question": " How many? ", "answer": solution})
    assert row == {
        "prompt": [{"role": "system", "content": BOXED}, {"role": "user", "content": "How many?"}],
        "answer": answer,
    }


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"so \boxed{42}.", "42"),
        (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{\sqrt{\frac{a}{b}} + {2}}", r"\sqrt{\frac{a}{b}} + {2}"),
        (r"\fbox{7}", "7"),
        (r"\boxed {7}", "7"),
        (r"$\boxed 5$ is it", "5"),
        (r"it is \boxed 5.", "5"),
        (r"\boxed{\left\{1, 2\right)}", r"\left\{1, 2\right)"),
        (r"\boxed{\text{ (A) }}", r"\text{ (A) }"),
        (r"first \boxed{3}, then cut off \boxed{4", "3"),
        (r"\boxed{never closed", None),
        (r"\boxedness", None),
        ("nothing", None),
    ],
)
def test_last_boxed(text, answer):
    assert last_boxed(text) == answer


def test_math_takes_the_answer_column_or_the_box():
    row = {"problem": "p", "solution": r"\boxed{\frac{1}{2}}", "level": "Level 5"}
    assert math(row)["answer"] == r"\frac{1}{2}"
    assert math({**row, "answer": "0.5"})["answer"] == "0.5"
    assert math(row)["prompt"][-1] == {"role": "user", "content": "p"}
    assert "\\boxed{}" in math(row)["prompt"][0]["content"]


def test_a_solution_of_gsm8k_is_what_its_reward_takes_for_right():
    solution = "He buys 48/2 = <<48/2=24>>24 in May.\nThat is 1,000+24 = <<1000+24=1024>>1,024.\n#### 1,024"
    row = gsm8k_solution({"question": "How many?", "answer": solution})
    assert row["prompt"] == gsm8k({"question": "How many?", "answer": solution})["prompt"] and row["answer"] == "1024"
    (message,) = row["completion"]
    assert message["content"] == "He buys 48/2 = 24 in May.\nThat is 1,000+24 = 1,024.\n\\boxed{1024}"
    assert math_answer([row["prompt"]], [row["completion"]], answer=[row["answer"]]) == [1.0]
