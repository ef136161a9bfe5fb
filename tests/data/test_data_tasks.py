from __future__ import annotations

import hashlib
import json

import pytest

from lit_rl.data.tasks import Addition, Task
from lit_rl.errors import ConfigError


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


def test_a_small_task_and_refused_arguments():
    assert len(Addition(max_operand=1, val_rows=1).train()) == 3
    assert Addition(val_rows=0).val() == []
    for arguments in ({"max_operand": -1}, {"max_operand": 1, "val_rows": 4}, {"val_rows": -1}):
        with pytest.raises(ConfigError, match=r"data\.task\."):
            Addition(**arguments)
