"""The table of the first minutes: what is read from a terminal, and what the page has of each command."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import first_minutes
import pytest
from first_minutes import STEPS, Typed, play, shown, with_table

THEIRS = ("python constructors.py", "python cli.py")
"""Programs of a person's own, which are silent while they import."""


def seen(command: str, tmp_path: Path, *lines: str, longest: float = 30.0) -> first_minutes.Played:
    return play(Typed("someone", command, lines=lines), tmp_path, longest=longest)


def test_seconds_exit_code_and_last_line_are_those_of_the_command(tmp_path: Path) -> None:
    played = seen("sleep 0.3; echo begun; sleep 0.3; echo '+----+'; exit 3", tmp_path)
    assert played.code == 3 and played.last_line == "begun"  # a frame says nothing
    assert 0.3 <= played.first < played.seconds and played.seconds - played.first >= 0.25
    assert played.wrong == "left with 3 and not with 0"


def test_it_is_a_terminal_of_100_columns_and_answers_are_typed_when_it_is_quiet(tmp_path: Path) -> None:
    played = seen("test -t 0 && test -t 1 && stty size; read -r word; echo got $word", tmp_path, "17+25=")
    assert shown(played.text)[0] == "40 100" and played.last_line == "got 17+25=" and not played.wrong


def test_a_traceback_is_wrong_whatever_the_exit_code(tmp_path: Path) -> None:
    played = seen(f"{sys.executable} -c '1/0' || true", tmp_path)
    assert played.code == 0 and played.wrong == "a traceback"


def test_what_hangs_is_killed(tmp_path: Path) -> None:
    assert seen("echo here; exec sleep 60", tmp_path, longest=1.0).code == -9


def test_ctrl_c_goes_through_the_terminal_once_the_text_is_there(tmp_path: Path) -> None:
    words = "trap 'echo stopped; exit 130' INT; echo 'step 1'; while :; do sleep 0.1; done"
    played = play(Typed("someone", words, code=130, lines=("\x03",), after="step 1"), tmp_path, longest=20)
    assert played.last_line.endswith("stopped") and not played.wrong and played.seconds < 15


def test_slow_is_what_is_said_after_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_minutes, "FIRST_LINE", 0.2)
    monkeypatch.setattr(first_minutes, "FIRST_ERROR", 0.6)
    played = seen("sleep 0.3; echo loading; sleep 0.4; echo 'ConfigError: no'; sleep 0.3", tmp_path)
    assert re.fullmatch(r"first line 0\.\d s, error 0\.\d s", played.slow), played.slow
    assert played.error is not None and 0.7 <= played.error < played.seconds - 0.2
    monkeypatch.setattr(first_minutes, "FIRST_ERROR", 10.0)
    assert played.slow.startswith("first line") and "error" not in played.slow
    assert seen("echo 'the word ConfigError: is inside'", tmp_path).error is None


def test_lines_are_those_that_stay_on_the_screen() -> None:
    assert shown("\x1b[1mone\x1b[0m\r\n10 %\r50 %\rdone\r\n\r\n\x1b]0;title\x07two") == ["one", "done", "two"]


def test_the_table_takes_the_place_of_the_old_one() -> None:
    page = f"above\n{first_minutes.BEGIN}\nold\n{first_minutes.END}\nbelow\n"
    once = with_table(page, "new", "here")
    assert once == f"above\n{first_minutes.BEGIN}\nnew\n\nhere\n{first_minutes.END}\nbelow\n"
    assert with_table(once, "new", "here") == once


def test_the_page_has_every_command_with_its_exit_code_and_no_traceback(root: Path) -> None:
    page = (root / "docs" / "first-minutes.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| `([^`]+)` \| ([\d.]+) \| [\d.]+ \| (-?\d+) \|", page, re.MULTILINE)
    typed = [(who, command, int(code)) for who, command, _, code in rows]
    ours = [float(first) for _, command, first, _ in rows if not command.startswith(THEIRS)]
    assert len(ours) == len(rows) - len(THEIRS) and max(ours) < 2  # nobody waits without a word
    expected = [(step.who, step.command, step.code) for step in STEPS]
    assert [row for row in typed if row[1] != "make setup"] == expected
    assert "Traceback" not in page and not re.search(r"(?<![\w.])/(?:tmp|root|home)/", page)


@pytest.mark.all
def test_a_mistyped_command_in_a_fresh_clone(root: Path, capfd: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["first_minutes.py", "--venv", sys.prefix, "--only", "caht"])
    assert first_minutes.main() == 0
    assert "| typos | `lit-rl caht run_dir=runs/demo` |" in capfd.readouterr().out
