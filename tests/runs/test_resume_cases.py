"""A run that is stopped anywhere and goes on ends with the bits of the whole run: a table, `resume_cases.py`."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import dist_cases
import pytest
import torch
from resume_cases import CASES, FILES, Case, run
from resume_parts import PARTS
from runs_helpers import EVERY_STEP, SMALL, assert_same, assert_same_run, interrupted, kept_beside
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiers import quick

from lit_rl.callbacks import output_files


def assert_goes_on(case: Case, folder: Path, stops: Sequence[int]) -> None:
    for name, text in FILES.items():
        (folder / name).write_text(text)
    whole = run(case, folder, stops=stops)
    assert not case.shown or case.shown(whole)
    names = {name.partition(".")[0] for name in whole.saved["state_dict"]}
    assert names <= {"policy", "weight", *getattr(whole.module, "trained_beside", ())}, "no teacher and no reference"
    made = sorted(path for path in folder.rglob("*") if path.suffix != ".ckpt")
    for stop in stops:
        rest = run(case, folder, start=stop)
        assert_same(rest.seen, whole.seen[whole.record.saved[stop] :])
        assert_same(rest.lines, [(step, line) for step, line in whole.lines if step > stop])
        assert_same(rest.saved, whole.saved)
        assert rest.data.report == whole.data.report, "rows of a stream are counted on"
        begun = torch.load(folder / f"{stop}.ckpt", weights_only=True)
        state = begun.pop("state_dict")
        assert any(not torch.equal(weight, state[name]) for name, weight in whole.saved["state_dict"].items())
        del begun["optimizer_states"]
        if getattr(getattr(whole.rollouts[-1], "completions", None), "vision", None) is not None:
            assert all(each.ndim < 3 for each in tensors(begun) if each.is_floating_point()), "no pixels"
    assert made == sorted(path for path in folder.rglob("*") if path.suffix != ".ckpt"), "nothing is computed again"


def tensors(item: Any) -> list[torch.Tensor]:
    parts = item.values() if isinstance(item, dict) else item if isinstance(item, list | tuple) else ()
    return [item] if isinstance(item, torch.Tensor) else [each for part in parts for each in tensors(part)]


FIRST = {"stateful", "online-dpo", "sft", "dpo-lora", "branches", "curriculum", "oft", "step-lr", "batches"}
"""One of each path through the code, of less than two seconds; the others run in `make test-all`."""


@pytest.mark.parametrize("name", quick(CASES, FIRST))
def test_a_run_that_goes_on_is_the_whole_one(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if CASES[name].threads == 2:
        request.getfixturevalue("two_threads")
    assert_goes_on(CASES[name], tmp_path, CASES[name].stops)


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    """Another seed is another run."""
    one, other = (run(Case([*CASES["grpo"].made, f"seed={seed}"], steps=2), tmp_path) for seed in (0, 1))
    for a, b in ((one.seen, other.seen), (one.lines, other.lines), (one.saved, other.saved)):
        with pytest.raises(AssertionError):
            assert_same(a, b)


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_goes_on_says_what_it_would_have_said(name: str, tmp_path: Path) -> None:
    """From any step, in another object that reads what was written."""
    part = PARTS[name]

    def steps(one: Any, numbers: Sequence[int]) -> list[Any]:
        return [part.step(one, number, Random(number)) for number in numbers]

    whole, said, states = part.make(tmp_path), [], []
    for number in range(part.steps):
        torch.save(whole.state(), file := io.BytesIO())
        states.append(file)
        said += steps(whole, [number])
    for stop in range(part.first, part.steps):
        again = part.make(tmp_path)
        states[stop].seek(0)
        again.load_state(torch.load(states[stop], weights_only=True))
        assert_same(steps(again, range(stop, part.steps)), said[stop:], f"after {stop}")
        assert_same(again.state(), whole.state(), f"after {stop}")


WRITES = [
    *(*SMALL, *EVERY_STEP, "data.task.max_operand=3", "algo.minibatches=2", "algo.beta=0.1"),
    *("callbacks=preference_sets", "callbacks.token_samples.every=1", "callbacks.rollouts.keep=2"),
    *("callbacks.samples.print=1", "callbacks.samples.every=3", "callbacks.histograms.every=3"),
    *("trainer.val_check_interval=2", "logger=tensorboard"),
]
"""Two epochs of three rollouts of two steps; a validation is due behind every second step, so behind an epoch's too."""


@pytest.mark.all
def test_a_command_that_goes_on_leaves_the_files_of_the_whole_run(train, tmp_path, monkeypatch, capsys) -> None:
    """It is killed inside a rollout, between a checkpoint and the validation of that step, in an epoch and at its end,
    and when nothing is left to train."""
    monkeypatch.setattr(output_files, "JOINED", 3)

    def run(folder: Path, *more: str) -> list[int]:
        capsys.readouterr()
        assert train(*WRITES, f"run_dir={folder}", *more) == 0
        return [int(step) for step in re.findall(r"rollout at step (\d+)", capsys.readouterr().out)]

    def drawn(folder: Path) -> list[int]:
        board = EventAccumulator(str(folder), size_guidance={"histograms": 0})
        board.Reload()
        return [event.step for event in board.Histograms("histograms/reward")]

    def files(folder: Path) -> dict[str, bytes]:
        found = [path for part in ("datasets", "rollouts", "hf") for path in (folder / part).iterdir()]
        return {path.name: path.read_bytes() for path in found if path.suffix in (".jsonl", ".pt", ".safetensors")}

    whole = tmp_path / "whole"
    assert run(whole) == drawn(whole) == [0, 4, 6, 10]
    samples = {path.name for path in (whole / "samples").iterdir()}
    assert "step_00000000-00000004.parquet" in samples and any(name.startswith("tokens_") for name in samples)
    assert {"pairs.jsonl", "ranked.jsonl", "verdicts.jsonl", "step_00000010.pt"} < files(whole).keys()
    for stop, shown in ((3, [4, 6, 10]), (4, [4, 6, 10]), (6, [6, 10]), (12, [])):
        again = tmp_path / f"from_{stop}"
        interrupted(whole, again, stop)
        with (again / "datasets" / "pairs.jsonl").open("ab") as file:
            file.write(b'{"prompt": "half a li')  # it died while it wrote
        (again / "rollouts" / "step_00000099.pt").write_bytes((again / "rollouts" / "step_00000010.pt").read_bytes())
        assert run(again, "ckpt_path=last") == shown and drawn(again) == [0, 4, 6, 10]
        assert_same_run(whole, again)
        assert_same(kept_beside(whole), kept_beside(again))
        assert files(whole) == files(again)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*CASES, *(f"dist/{name}" for name in dist_cases.CASES)])
def test_from_any_step(name: str, tmp_path: Path) -> None:
    """Each run of this table, and each of those that two processes do as one does."""
    case = CASES.get(name)
    if case is None:
        other = dist_cases.CASES[name.removeprefix("dist/")]
        made = other.made if callable(other.made) else partial(_parts, other.made)
        case = Case(made, steps=other.steps, settings={"accumulate_grad_batches": other.alone, **other.settings})
    assert_goes_on(case, tmp_path, range(1, case.steps or 12))


def _parts(words: Sequence[str], _: Path) -> tuple[Any, Any]:
    return dist_cases.dist_equal.parts(*words)
