"""Tables of several ranks as one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lit_rl.callbacks import samples
from lit_rl.callbacks.loggers import WriteFailures
from lit_rl.callbacks.samples import gather_on_rank_zero, merge_validation, stack_tables


def test_columns_of_one_rank_alone_are_none_on_the_others() -> None:
    first = {"step": [3], "prompt": ["a"], "note": ["x"]}
    second = {"step": [3, 3], "prompt": ["b", "c"], "other": [1, 2]}
    assert stack_tables([first, None, second]) == {
        "step": [3, 3, 3], "rank": [0, 2, 2], "prompt": ["a", "b", "c"], "note": ["x", None, None],
        "other": [None, 1, 2],
    }  # fmt: skip


def test_a_column_of_the_data_that_is_called_rank_stays() -> None:
    assert stack_tables([{"step": [0], "prompt": ["a"], "rank": ["colonel"]}])["rank"] == ["colonel"]


def test_a_row_that_fills_up_a_rank_is_there_once() -> None:
    """Two completions a prompt, three rows over two ranks: the second one completes row 0 again."""
    first = {"step": [0] * 4, "prompt": ["p0", "p0", "p2", "p2"]}, [0, 0, 2, 2]
    second = {"step": [0] * 4, "prompt": ["p1", "p1", "p0", "p0"]}, [1, 1, 0, 0]
    whole = merge_validation([first, second])
    assert whole["prompt"] == ["p0", "p0", "p1", "p1", "p2", "p2"] and whole["rank"] == [0, 0, 1, 1, 0, 0]


def test_what_cannot_be_pickled_holds_up_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []

    def gather_object(data: bytes, parts: list[bytes], dst: int) -> None:
        sent.append(data)
        parts[:] = [data, sent[0]]

    monkeypatch.setattr(samples.torch.distributed, "gather_object", gather_object)
    unwritten, trainer = WriteFailures("Samples"), SimpleNamespace(world_size=2, is_global_zero=True, strategy=None)
    table: Any = {"prompt": ["a"]}
    assert gather_on_rank_zero(trainer, table, unwritten) == [table, table]  # pyright: ignore
    with pytest.warns(UserWarning, match="Samples failed in sending rows to rank 0"):
        assert gather_on_rank_zero(trainer, {"prompt": [lambda: None]}, unwritten) == [None, table]  # pyright: ignore
