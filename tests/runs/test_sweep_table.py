"""The table of a sweep: what it says of jobs of every kind, and that sweeps end with it."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from pathlib import Path

import pytest
from run_folders import run_folder

from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.reports import sweep as jobs
from lit_rl.reports import sweep as sweep_report

REFUSED = "optimizer.lr=-1\x1b[31m: allowed is > 0."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four jobs: one that learned, one that learned more, one that was refused, one of which nothing more is known."""
    sweep = tmp_path / "mine"
    for number, (lr, rewards) in enumerate((("1e-5", (0.1, 0.5, 0.25)), ("1e-4", (0.1, 0.4, 0.75)))):
        rows = [{"step": step, "val/reward": reward} for step, reward in enumerate(rewards)]
        summary = {"status": "finished", "steps": 2, "seconds": 3.5}
        run_folder(sweep / str(number), rows, summary=summary)
        note(sweep, number, f"optimizer.lr={lr}", "seed=1", "judge.api_key=mine")
        note(sweep, number, f"optimizer.lr={lr}", "seed=1", "judge.api_key=mine", exit_code=0)
    note(sweep, 2, "optimizer.lr=-1|x", "seed=1", "judge.api_key=mine", exit_code=2, message=REFUSED)
    note(sweep, 3, "optimizer.lr=1e-3", "seed=1", "judge.api_key=mine")
    return sweep


def note(sweep: Path, number: int, *overrides: str, **end: object) -> None:
    jobs.note_job(sweep, {"job": number, "overrides": list(overrides), "folder": str(sweep / str(number)), **end})


def table(text: str) -> list[dict[str, str]]:
    """Of Markdown."""
    lines = [re.split(r" ?(?<!\\)\| ?", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    return [dict(zip(lines[0], line)) for line in lines[2:]]


def test_a_job_that_found_an_earlier_run_in_its_place_shows_none_of_its_numbers(folder: Path) -> None:
    """A sweep said again into the same folder: what lies there is of other words."""
    words, refused = ["optimizer.lr=1", "seed=1", "judge.api_key=mine"], {"exit_code": 2, "message": "holds a run"}
    note(folder, 0, *words, earlier_run=True, **refused)
    note(folder, 1, *words, earlier_run=True, exit_code=0)  # it went on with that run: ckpt_path=last
    first, second, *_ = jobs.read_sweep(folder).jobs
    assert first.run is None and first.last is None and second.last == 0.75


def test_a_row_says_what_was_given_what_came_of_it_and_how_it_ended(folder: Path, capsys) -> None:
    assert sweep_report.write_sweep(folder) == 0
    said, text = capsys.readouterr().out, (folder / "sweep.md").read_text()
    first, second, refused, unknown = table(text)
    assert first == {
        **{"job": "0", "lr": "1e-5", "last": "0.25", "best": "0.5"},
        **{"steps": "2", "time": "3.5 s", "state": "finished", "folder": "0"},
    }
    assert (second["job"], second["last"], second["best"]) == ("1*", "0.75", "0.75"), "the best last value has a star"
    assert (refused["lr"], refused["state"], refused["last"], refused["folder"]) == (
        "-1\\|x",
        "failed, code 2",
        "-",
        "-",
    )
    assert (unknown["state"], unknown["last"]) == ("not ended", "-")
    assert "4 jobs, measured by val/reward." in text and "- job 2: `optimizer.lr=-1\\x1b[31m: allowed is > 0.`" in text
    assert "failed, code 2" in said and str(folder / "sweep.html") in said and "sweep.csv" in said
    rows = list(csv.DictReader(io.StringIO((folder / "sweep.csv").read_text())))
    assert [row["optimizer.lr"] for row in rows] == ["1e-5", "1e-4", "-1|x", "1e-3"]
    assert [row["exit_code"] for row in rows] == ["0", "0", "2", ""] and rows[1]["best"] == "0.75"
    assert "mine" not in (folder / jobs.JOBS_FILE).read_text().replace(str(folder), ""), "a secret is left out"


def test_what_a_message_or_a_word_quotes_is_no_markup(folder: Path) -> None:
    """A failed reward quotes a completion."""
    quoted = "the completion <script>alert(1)</script> `[![x](http://far/)` is no number"
    note(folder, 4, "optimizer.lr=<b>_1_|[x](y)", "seed=1", "judge.api_key=mine", exit_code=4, message=quoted)
    sweep_report.write_sweep(folder)
    text = (folder / "sweep.md").read_text()
    in_code = quoted.replace("`", "'")
    assert f"- job 4: `{in_code}`\n" in text and "alert" not in text.replace(in_code, "")
    assert table(text)[4]["lr"] == r"&lt;b&gt;\_1\_\|\[x\](y)"


def test_the_page_shows_each_key_and_the_curves(folder: Path) -> None:
    sweep_report.write_sweep(folder)
    page = (folder / "sweep.html").read_text()
    assert 'aria-label="val/reward, last, by optimizer.lr: 1e-5: 0.25; 1e-4: 0.75"' in page
    assert "job 0: lr=1e-5" in page and 'data-name="job 1"' in page and "\x1b" not in page
    assert page.index(">1e-5</text>") < page.index(">1e-4</text>"), "numbers stand by size"


def test_a_loss_is_better_where_it_is_lower_and_a_sweep_that_was_moved_keeps_its_jobs(tmp_path: Path) -> None:
    sweep = tmp_path / "mine"
    for number, losses in enumerate(((3.0, 1.0, 2.0), (3.0, 2.5, 2.5))):
        run_folder(sweep / str(number), [{"step": step, "val/loss": loss} for step, loss in enumerate(losses)])
        note(sweep, number, f"seed={number}", exit_code=0)
    found = jobs.read_sweep(sweep.rename(tmp_path / "moved"))
    assert [(job.last, job.best) for job in found.jobs] == [(2.0, 1.0), (2.5, 2.5)]
    assert found.winner is found.jobs[0] and found.keys == ["seed"]


def test_a_folder_without_jobs_and_a_damaged_list_are_refused(tmp_path: Path, capsys) -> None:
    with pytest.raises(ConfigError, match="holds no sweep"):
        jobs.read_sweep(tmp_path)
    (tmp_path / jobs.JOBS_FILE).write_text("no JSON\n")
    with pytest.raises(StorageError, match="damaged"):
        jobs.read_sweep(tmp_path)
    sweep_report.write_sweep_at_end(tmp_path)  # raises nothing: the sweep's exit code is that of its jobs
    assert "not written" in capsys.readouterr().out


def test_lines_of_jobs_beside_each_other_stay_whole(tmp_path: Path) -> None:
    children = []
    for letter in "ab":
        if (child := os.fork()) == 0:
            for number in range(200):
                note(tmp_path, number, f"x={letter * 500}")
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    rows = [json.loads(line) for line in (tmp_path / jobs.JOBS_FILE).read_text().splitlines()]
    assert len(rows) == 400
