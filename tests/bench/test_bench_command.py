"""The command line chooses workloads, contenders, rounds and steps of a suite."""

from __future__ import annotations

import pytest
from bench import run


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def of(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["run", "full", "--list", *words])
        run.main()
        return capsys.readouterr().out

    return of


def test_some_workloads_and_contenders_in_fewer_rounds(listed) -> None:
    text = listed(
        "--only", "prompt 256", "SFT", "--rounds", "2", "--steps", "3", "--contenders", "TRL, default", "fused"
    )
    assert text.splitlines() == [
        "C1, prompt 256: 2 rounds of 3 steps",
        "    TRL, default",
        "    lit_rl, float32, without: head fused with the softmax",
        "C3, SFT: 2 rounds of 3 steps",
        "    TRL, default",
        "    lit_rl, float32, without: head fused with the softmax",
    ]


def test_techniques_are_switched_off_of_the_base_that_is_named(listed) -> None:
    assert "    lit_rl, bf16-true, without: own decode loop" in listed("--base", "bf16-true").splitlines()


def test_processes_are_kept_or_fresh_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def resident(*words: str) -> set[bool]:
        monkeypatch.setattr("sys.argv", ["run", "full", "--only", "C1", *words])
        return {one.resident for one in run.chosen(run.arguments())}

    assert (resident(), resident("--kept"), resident("--fresh")) == ({False}, {True}, {False})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "nothing"], "no benchmark of full has one of these in its name"),
        (["--contenders", "TRL, default", "nobody"], "--contenders 'nobody'"),
    ],
)
def test_a_wrong_name_is_told(listed, words: list[str], said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        listed(*words)
