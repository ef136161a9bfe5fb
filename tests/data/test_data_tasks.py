from __future__ import annotations

import hashlib
import json
import re

from lit_rl.data.tasks import Addition, AdditionTriples, Largest, LargestPairs, LargestText, Task


def test_every_pair_is_in_exactly_one_set_and_every_sum_is_right():
    task = Addition()
    rows = [*task.train(), *task.val()]
    assert len(task.val()) == 500
    assert {row["prompt"] for row in rows} == {f"{a}+{b}=" for a in range(100) for b in range(100)}
    assert len(rows) == 100 * 100
    for row in rows:
        a, b = row["prompt"].rstrip("=").split("+")
        assert row["answer"] == str(int(a) + int(b))


def test_the_sets_depend_on_the_arguments_only():
    digest = hashlib.sha256(json.dumps(Addition().val()).encode()).hexdigest()
    assert digest == "ccf1dfcd97b2533037958a813ab1844a442dad3fd673c94a09092a2b6e860c92", (
        "the shipped policy was made without these rows: they must never change"
    )
    assert Addition().train() == Addition().train()
    assert Addition(seed=1).val() != Addition().val()
    assert isinstance(Addition(), Task)


def test_a_small_task():
    assert len(Addition(max_operand=1, val_rows=1).train()) == 3
    assert Addition(val_rows=0).val() == []


def test_the_largest_number_is_the_answer_and_no_held_out_row_is_learned():
    task = Largest(train_rows=300, val_rows=100)
    train, val = task.train(), task.val()
    assert isinstance(task, Task) and (len(train), len(val)) == (300, 100)
    questions = [row["prompt"][0]["content"] for row in train + val]
    assert len(set(questions)) == 400
    places = set()
    for row, question in zip(train + val, questions):
        numbers = [int(word) for word in re.findall(r"\d+", question)]
        assert len(set(numbers)) == 4 and min(numbers) >= 1 and max(numbers) <= 99
        assert row["answer"] == str(max(numbers)) and [m["role"] for m in row["prompt"]] == ["user"]
        places.add(numbers.index(max(numbers)))
    assert places == {0, 1, 2, 3}
    assert Largest(seed=1).val() != Largest().val() == Largest().val()


def test_replies_and_pairs_of_the_largest_are_messages_and_the_wrong_one_is_another_number():
    plain, texts, pairs = (kind(train_rows=50, val_rows=5).train() for kind in (Largest, LargestText, LargestPairs))
    assert pairs == LargestPairs(train_rows=50, val_rows=5).train()
    for row, text, pair in zip(plain, texts, pairs, strict=True):
        assert text["prompt"] == pair["prompt"] == row["prompt"]
        reply = [{"role": "assistant", "content": row["answer"]}]
        assert text["completion"] == pair["chosen"] == reply
        wrong = pair["rejected"][0]["content"]
        assert wrong != row["answer"] and wrong in re.findall(r"\d+", row["prompt"][0]["content"])


def test_all_rows_of_the_largest_can_be_drawn():
    assert len(Largest(count=2, max_number=3, train_rows=4, val_rows=2).train()) == 4


def test_the_chosen_sum_of_a_triple_is_nearer_to_the_right_one_and_is_not_it():
    rows = AdditionTriples(max_operand=9, val_rows=10).train()
    for row in rows:
        right, chosen, rejected = (int(row[name]) for name in ("reference", "chosen", "rejected"))
        assert row["answer"] == row["reference"] and min(chosen, rejected) >= 0
        assert (abs(chosen - right), abs(rejected - right)) == (1, 10)
    assert {int(row["chosen"]) > int(row["reference"]) for row in rows} == {True, False}
    assert rows == AdditionTriples(max_operand=9, val_rows=10).train()
