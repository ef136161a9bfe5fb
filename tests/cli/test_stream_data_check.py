"""`lit-rl data-check` of a stream looks at its first window and says so."""

from __future__ import annotations

from cli_helpers import Command, refused, write_jsonl


def test_the_first_window_is_looked_at(command: Command, tmp_path):
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(30)]
    path = write_jsonl(tmp_path / "mine.jsonl", [*rows[:12], {"prompt": "unread", "completion": 3}, *rows[12:]])
    stream = [f"data.path={path}", "data.val_fraction=0", "data.batch_size=5", "data.stream_buffer=12"]
    outcome = command("data-check", *stream)
    assert outcome.code == 0, outcome.err
    assert "Of the first 12 rows only (data.stream_buffer)." in outcome.out
    assert "train: rows 12, kept 12, left_over 2" in outcome.out
    refused(command("data-check", *stream[:3], "data.stream_buffer=13"), 3, "mine.jsonl:13")
    few = command("data-check", *stream, "data.batch_size=12", "data.max_completion_tokens=2", "data.overlong=drop")
    assert few.code == 0 and "Too few rows to train on" in few.out and "first window of the stream" in few.out
    refused(
        command("data-check", f"data.path={path}", "data.stream_buffer=40"), 2, "data.val_fraction", "data.val_path"
    )
