"""`lit-rl compare`: the paired tests by hand, what is paired, and what is refused."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from run_folders import CONFIG, run_folder, samples

from lit_rl import cli
from lit_rl.core.errors import ConfigError
from lit_rl.reports import run_files
from lit_rl.reports.compare import compare, comparison, mcnemar, newcombe, paired_test, t_quantile, t_within
from lit_rl.runs.closing_report import closing_table

PROMPTS = ["a", "b", "c", "d"]


def run(
    folder: Path, rewards: Sequence[float], prompts: Sequence[Any] = PROMPTS, name: str = "val_00000040_t0"
) -> Path:
    run_folder(folder, [{"step": i, "train/reward": i / 9, "val/reward": 0.5} for i in range(3)])
    samples(folder, name, prompts, rewards)
    return folder


# ---------------------------------------------------------------------- the statistics


def test_the_chance_of_an_uneven_split_by_hand() -> None:
    assert mcnemar(0, 0) == 1 and mcnemar(1, 1) == 1
    assert mcnemar(5, 0) == mcnemar(0, 5) == 2 / 2**5
    assert mcnemar(2, 4) == pytest.approx(2 * (1 + 6 + 15) / 64)


def test_the_interval_of_paired_shares_is_that_of_the_paper() -> None:
    """Newcombe (1998): 36 right in both, 12 in one, 2 in the other, 0 in neither, of 50: 0.0569 to 0.3404."""
    one, other = [1.0] * 48 + [0.0] * 2, [1.0] * 36 + [0.0] * 12 + [1.0] * 2
    found = paired_test(other, one)
    assert (found.difference, found.test, found.prompts) == (pytest.approx(0.2), "McNemar", 50)
    assert (found.low, found.high) == (pytest.approx(0.0569, abs=5e-5), pytest.approx(0.3404, abs=5e-5))
    assert newcombe(one, other) == (pytest.approx(-found.high), pytest.approx(-found.low))
    low, high = newcombe([1.0] * 20, [1.0] * 20)
    assert -0.25 < low < 0 < high < 0.25, "twenty equal prompts prove no equality"


@pytest.mark.parametrize(("freedom", "t"), [(1, 12.7062), (2, 4.30265), (9, 2.26216), (30, 2.04227), (499, 1.96473)])
def test_quantiles_of_t_are_those_of_the_tables(freedom: int, t: float) -> None:
    assert t_quantile(0.95, freedom) == pytest.approx(t, abs=1e-5) and t_within(t, freedom) == pytest.approx(
        0.95, abs=1e-6
    )


def test_the_t_test_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, standard error 1/sqrt(3), so t = 2 sqrt(3) of two degrees of freedom."""
    found = paired_test([0.5, 0.5, 0.5], [1.5, 2.5, 3.5])
    t, half = 2 * math.sqrt(3), 4.30265 / math.sqrt(3)
    assert found.p == pytest.approx(1 - t / math.sqrt(2 + t * t)) and found.test == "t"
    assert (found.low, found.high) == (pytest.approx(2 - half, abs=1e-5), pytest.approx(2 + half, abs=1e-5))
    assert paired_test([0.5, 0.25], [0.5, 0.25]).p == 1 and paired_test([0.5], [0.75]).high == math.inf
    assert paired_test([0.5, 0.5], [0.75, 0.75]).p == 0


def test_one_prompt_has_no_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = {"reward_low": -math.inf, "reward_high": math.inf}
    resumed = {"reward_low": None, "reward_high": None}  # as summary.json has them
    measured = {
        "before": {"": {"greedy": {"reward": 0.25} | resumed}},
        "after": {"": {"greedy": {"reward": 0.5} | ends}},
    }
    closing_table(measured | {"seconds": 1.0})
    said = capsys.readouterr().out
    assert "0.250  (one prompt)" in said and "0.500  (one prompt)" in said and "inf" not in said
    first, second = (run(tmp_path / name, [value], ["a"]) for name, value in (("a", 0.25), ("b", 0.75)))
    assert compare(first, second) == 0
    for text in (capsys.readouterr().out, (first / "compare_b.html").read_text()):
        assert "one prompt" in text and "inf]" not in text


# ---------------------------------------------------------------------- what is paired


def test_prompts_are_paired_by_what_they_say_and_completions_of_one_are_averaged(tmp_path: Path) -> None:
    first = run(tmp_path / "a", [1, 0, 0, 0, 1, 1, math.nan], ["a", "b", "c", "d", "a", "b", "e"])
    second = run(tmp_path / "b", [0, 1, 1, 1, 1], ["d", "c", "b", "a", "e"], name="val_00000050_t0")
    run(tmp_path / "b", [0, 0, 0, 0, 0], ["d", "c", "b", "a", "e"], name="val_00000000_t0")  # an earlier one
    found = comparison(run_files.RunFiles.of(first), run_files.RunFiles.of(second))
    ((name, test),) = found.tests
    assert name == "held-out, greedy: reward, steps 40 and 50"
    assert (test.prompts, test.first, test.second, test.test) == (4, 1.5 / 4, 3 / 4, "t")
    assert any("1 prompts without a value" in note for note in found.notes)


def test_prompts_that_both_runs_have_are_paired_and_the_others_are_counted(tmp_path: Path) -> None:
    first, second = run(tmp_path / "a", [1] * 4), run(tmp_path / "b", [0, 0, 1, 1], ["a", "b", "c", "<other>"])
    found = comparison(run_files.RunFiles.of(first), run_files.RunFiles.of(second))
    assert found.tests[0][1].prompts == 3 and found.tests[0][1].difference == pytest.approx(-2 / 3)
    (note,) = found.notes
    assert "the 3 prompts that both runs have are paired; 1 of the 4 prompts of a are not in b, such as 'd'; 1" in note
    with pytest.raises(ConfigError, match="the same folder"):
        compare(first, first)


@pytest.mark.parametrize(
    ("prompts", "name", "said"),
    [
        (["e", "f", "g", "h"], "val_00000040_t0", "no prompt is in both runs; 4 of the 4 prompts of a are not in b"),
        (PROMPTS, "val_00000040_t1_hard", "no validation in common: a has held-out, greedy; b has hard, sampled at 1"),
    ],
)
def test_runs_without_a_prompt_in_common_have_a_page_and_no_test(
    tmp_path: Path, prompts: list[str], name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = run(tmp_path / "a", [1] * 4), run(tmp_path / "b", [1] * 4, prompts, name)
    assert compare(first, second) == 0
    page = (first / "compare_b.html").read_text()
    assert said in " ".join(capsys.readouterr().out.split()) and said in page and "McNemar" not in page
    assert page.count("A: training") > 1 and "0.5" in page.split("Last validations")[1]


def test_a_set_that_is_not_tested_keeps_its_reward(tmp_path: Path) -> None:
    """Three validation sets: two have common prompts, of the other one run has no value. Files spell `a/b` as a_b."""
    folders = []
    for name in ("one", "two"):
        folder = run(tmp_path / name, [0, 0, 1, 1])
        run_folder(folder, [{"step": 1, "val/reward": 0.5, "val/a/b/reward": 0.5, "val/hard/reward": 0.25}])
        samples(folder, "val_00000040_t0_a_b", PROMPTS, [0, 1, 1, 0])
        samples(folder, "val_00000040_t0_hard", PROMPTS, [math.nan] * 4 if name == "two" else [0, 1, 1, 0])
        folders.append(folder)
    found = comparison(*(run_files.RunFiles.of(folder) for folder in folders))
    assert [name for name, _ in found.tests] == ["held-out, greedy: reward, step 40", "a_b, greedy: reward, step 40"]
    assert found.values == [("val/hard/reward", 0.25, 0.25)]
    assert "hard, greedy: no test, as no prompt has a value in both runs." in found.notes


def test_rewards_of_other_functions_are_not_compared(tmp_path: Path) -> None:
    first, second = run(tmp_path / "a", [1] * 4), run(tmp_path / "b", [1] * 4)
    samples(second, "val_00000040_t0", PROMPTS, [1, 0, 1, 0], **{"rewards/other": [1.0, 0.0, 1.0, 0.0]})
    found = comparison(run_files.RunFiles.of(first), run_files.RunFiles.of(second))
    assert [name for name, _ in found.tests] == ["held-out, greedy: right, step 40"]
    assert any("rewards of different functions (right and other, right)" in note for note in found.notes)


def test_unlike_rewards_have_no_difference_and_the_note_says_why(tmp_path: Path) -> None:
    """Of runs whose rewards share no function, as the first reward of one's own and a built-in one."""
    folders = []
    for folder, name in ((tmp_path / "a", "right"), (tmp_path / "b", "score")):
        run_folder(folder, [{"step": 40, "val/reward": 0.5, f"val/rewards/{name}/mean": 0.5, "val/win_rate": 0.25}])
        samples(folder, "val_00000040_t0", PROMPTS, [1, 0, 1, 0])
        path = folder / "samples" / "val_00000040_t0.parquet"
        table = pyarrow.parquet.read_table(path).rename_columns({"rewards/right": f"rewards/{name}"})
        pyarrow.parquet.write_table(table, path)
        folders.append(run_files.RunFiles.of(folder))
    found = comparison(*folders)
    assert not found.tests and found.values == [("val/win_rate", 0.25, 0.25)]
    assert found.notes == [
        "held-out, greedy: rewards of different functions (right and score) are not compared.",
        "No test: no reward function scored both runs. Compare runs with one reward.",
    ]


def test_runs_that_write_nothing_are_compared_by_their_last_numbers(tmp_path: Path) -> None:
    folders = []
    for name, loss in (("a", 2.0), ("b", 1.5)):
        rows = [{"step": 0, "val/loss": 9.0}, {"step": 4, "val/loss": loss}, {"step": 4, "train/loss": 1.0}]
        folders.append(run_files.RunFiles.of(run_folder(tmp_path / name, rows)))
    found = comparison(*folders)
    assert found.values == [("val/loss", 2.0, 1.5)] and not found.tests and "No test" in found.notes[0]


# ---------------------------------------------------------------------- the command


def test_the_command_prints_tables_and_writes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lit-rl"])
    first, second = run(tmp_path / "a", [0, 0, 0, 1]), run(tmp_path / "<b>", [1, 1, 1, 1])
    run_folder(second, [{"step": 1, "train/reward": 0.5}], CONFIG | {"seed": "<i>\x1b[31m"})
    assert cli.run(["compare", str(first), str(second)]) == 0
    said = capsys.readouterr().out
    assert "+0.750" in said and "0.2500" in said and "McNemar" in said and "seed" in said and "\x1b[31m" not in said
    page = (first / "compare_<b>.html").read_text()
    assert "&lt;b&gt;" in page and "&lt;i&gt;\\x1b" in page and "<b>:" not in page and "<i>" not in page
    assert page.count("A: training") > 1 and page.count("B: training") > 0
