"""The proof on one GPU keeps what each stage found, however it ended, and its checks can fail."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench import page
from bench.bounds import Work
from bench.protocol import FirstStep
from bench.workload import SHAPES, Spec, Workload
from gpu import checks, prove, speed, training
from gpu.prove import Result
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import Interval
from transformers import AutoModelForCausalLM, Qwen2Config
from waiting import until
from warm import run

from lit_rl.core.processes import is_alive
from lit_rl.models.model_costs import ModelFlops
from lit_rl.models.trial import EquivalenceTrial

SCRIPTS = Path(prove.__file__).parents[1]
FIRST = "from gpu.prove import Result; from pathlib import Path; Result(Path({file!r})).check('first', 1, most=2); "


def stage(out: Path, then: str, box: float = 60) -> dict[str, Any]:
    """Run a stage named "sound" that finds one row and goes on so; returns its file."""
    code = FIRST.format(file=str(out / "sound.json")) + then
    prove.run_stage("sound", [sys.executable, "-c", code], out, box, {"PYTHONPATH": str(SCRIPTS)})
    return prove.read_stages(out)["sound"]


def test_a_stage_that_breaks_keeps_its_rows_and_its_last_lines(tmp_path: Path) -> None:
    found = stage(tmp_path, "raise ValueError('no such card')")
    assert found["status"] == "broke with 1" and found["rows"][0]["passed"] is True
    assert found["last_lines"][-1] == "ValueError: no such card"
    assert not prove.passed({"sound": found})
    assert "ValueError: no such card" in prove.markdown({"sound": found})


def test_a_part_that_breaks_leaves_what_it_said_though_the_stage_goes_on(tmp_path: Path) -> None:
    """Its traceback in its row, and the lines before that row, of a log whose last lines are of later parts."""
    then = """
r = Result(Path({file!r}))
with r.part("early"):
    print("the door said why")
    raise ValueError("it ended with 1")
for number in range(1000):
    print("later", number)
"""
    found = stage(tmp_path, f"exec({then.format(file=str(tmp_path / 'sound.json'))!r})")
    assert found["status"] == prove.ENDED and not prove.passed({"sound": found})
    assert found["rows"][-1]["trace"][-1] == "ValueError: it ended with 1"
    assert "the door said why" in found["last_lines"] and found["last_lines"][-1] == "later 999"
    assert len(found["last_lines"]) <= prove.LAST + prove.BEFORE
    log = ["long before", *["before"] * 39, "Row(passed=False)", *["later"] * 500]
    assert prove.excerpt(log) == log[1:41] + ["later"] * 150


def test_a_stage_out_of_time_is_killed_with_its_children_though_it_ignores_signals(tmp_path: Path) -> None:
    child = "import subprocess, sys, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    child += (
        f"c = subprocess.Popen(['sleep', '60']); Path({str(tmp_path / 'child')!r}).write_text(str(c.pid)); c.wait()"
    )
    began = time.perf_counter()
    found = stage(tmp_path, child, box=6)
    assert time.perf_counter() - began < 30
    assert found["status"] == "ran out of time" and len(found["rows"]) == 1
    child = int((tmp_path / "child").read_text())
    assert until(lambda: not is_alive(child), 20)  # a signal takes a moment where cores are busy


def test_a_stage_that_ended_passes_unless_a_check_failed(tmp_path: Path) -> None:
    found = stage(tmp_path, "assert 0 < Result(Path('unwritten')).left <= 60")
    assert prove.passed({"sound": found}) and "last_lines" not in found
    result = Result(tmp_path / "sound.json")
    result.check("within", 0.5, least=0.5, most=0.5)
    assert result.rows[-1].passed
    for value in (0.6, 0.4, math.nan, None):
        result.check("without", value, least=0.5, most=0.5)
        assert result.rows[-1].passed is False
    with result.part("a part"):
        raise RuntimeError("broken\nin two lines")
    assert result.rows[-1].passed is False and result.rows[-1].note == "broke: RuntimeError: broken"
    told = json.loads((tmp_path / "sound.json").read_text())
    assert len(told["rows"]) == 6 and not prove.passed({"sound": told | {"status": prove.ENDED}})


def test_the_page_shows_every_row_with_its_bound_and_without_files_that_no_card_was_there(tmp_path: Path) -> None:
    (tmp_path / "gpu").mkdir()
    page.write(tmp_path, tmp_path / "page.md", tmp_path)
    assert "has not run on a GPU yet" in (tmp_path / "page.md").read_text()
    result = Result(tmp_path / "gpu" / "machine.json")
    result.figure("card", "A card of 2031")
    told = json.loads((tmp_path / "gpu" / "machine.json").read_text())
    machine = told | {"status": prove.ENDED, "seconds": 3.0, "box": 20}
    rows = Result(tmp_path / "gpu" / "kernels.json")
    rows.check("a | kernel", 3e-5, most=1e-4, unit="nats")
    rows.check("another", 2.0, most=1e-4)
    rows.not_run("a third", "there is no NCCL")
    found = json.loads((tmp_path / "gpu" / "kernels.json").read_text())
    found |= {"status": prove.ENDED, "seconds": 61.0, "box": 80}
    for name, one in (("machine", machine), ("kernels", found)):
        (tmp_path / "gpu" / f"{name}.json").write_text(json.dumps(one))
    page.write(tmp_path, tmp_path / "page.md", tmp_path)
    text = (tmp_path / "page.md").read_text()
    assert "has not run on a GPU yet" not in text and "card A card of 2031." in text
    assert "| kernels | ended | 61 | 80 | 1 of 2 | 1 |" in text
    assert "| a / kernel | 3e-05 nats | <= 0.0001 | passed |  |" in text
    assert "| another | 2 | <= 0.0001 | **failed** |  |" in text


@pytest.mark.all
def test_kernels_are_compared_with_the_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = Result(tmp_path / "kernels.json")
    checks.each_function(result)
    passed = [row.passed for row in result.rows if row.passed is not None]
    assert len(passed) > 20 and all(passed)
    calls = []

    def wrong(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        calls.append(hidden)
        return (hidden @ weight.T)[:, 0] * (1 + 1e-3 * (len(calls) % 2))

    checks.compared(result, "wrong", wrong, torch.float32, (4, 8), (16, 8))
    assert not any(row.passed for row in result.rows[-3:])


def test_first_steps_are_compared_only_where_both_scored_what_teaches(tmp_path: Path) -> None:
    given = [[1, 2, 3, 4], [2, 2, 2, 2]]
    (tmp_path / "given.json").write_text(json.dumps(given))
    spec = Spec(Workload("two", prompts=1, group=2, completion_tokens=4), tmp_path, tmp_path / "other", "cpu", {})
    for name, rows, logprob in (("one", 2, -1.0), ("other", 2, -1.5), ("half", 1, -1.0)):
        (tmp_path / name).mkdir()
        first = FirstStep()
        first.add_logprobs(torch.tensor(given[:rows]), torch.full((rows, 4), logprob), torch.ones(rows, 4))
        first.add_gradient([("weight", torch.tensor([1.0, 0.0]))], tmp_path / name)
    found = training.agreement(spec, tmp_path / "one")
    assert (found.tokens, found.logprobs, found.cosine) == (8, 0.5, 1.0)
    for sides in ((spec, tmp_path / "half"), (replace(spec, work=tmp_path / "half"), tmp_path / "one")):
        with pytest.raises(RuntimeError, match="half did not score 1 completions"):
            training.agreement(*sides)


def test_a_trial_that_is_not_passed_leaves_its_words(tmp_path: Path) -> None:
    trained = training.Trained(training.Clock(), Workload("any"), 0)
    own, model = torch.tensor([0.0, 1.0]), torch.nn.Linear(1, 1)
    before = EquivalenceTrial.passes
    with training.watched(trained):
        assert EquivalenceTrial("a.way", "The model's own is taken", 0.1).passes(model, lambda: (own, own))
        assert not EquivalenceTrial("b.way", "The model's own is taken", 0.1).passes(model, lambda: (own + 1, own))
    assert EquivalenceTrial.passes is before
    assert trained.trials["a.way"] == ""
    assert "b.way=true does not fit Linear on cpu: its numbers differ" in trained.trials["b.way"]


def event(name: str, start: float, end: float, *, card: bool = False, annotation: bool = False) -> Any:
    kind = DeviceType.CUDA if card else DeviceType.CPU
    return SimpleNamespace(name=name, time_range=Interval(start, end), device_type=kind, is_user_annotation=annotation)


def test_a_profile_is_told_in_kernels_alone(tmp_path: Path) -> None:
    """Microseconds: kernels from 0 to 400 and from 600 to 1000, under spans that are no kernels."""
    result = Result(tmp_path / "step_trace.json")
    speed.profile_told(
        result,
        [
            event("phase: generate", 0, 500),
            event("cudaLaunchKernel", 10, 11),
            event("cuLaunchKernelEx", 20, 21),
            event("cudaLaunchKernel", 600, 601),
            event("gemm", 0, 300, card=True),
            event("copy", 200, 400, card=True),
            event("gemm", 600, 1000, card=True),
            event("phase: generate", 0, 5000, card=True),
            event("Optimizer.step#AdamW.step", 0, 6000, card=True),
            event("anything", 0, 7000, card=True, annotation=True),
        ],
    )
    assert {row.what: row.value for row in result.rows} == {
        "the card idles in a profiled step": pytest.approx(0.2),
        "launches in a step": 3,
        "launches a token": 2 / speed.TRACED.completion_tokens,
        "kernel gemm": pytest.approx(7e-4),
        "kernel copy": pytest.approx(2e-4),
    }
    assert [row.note for row in result.rows][-2:] == ["70.0% of the step", "20.0% of the step"]


def test_a_wait_is_of_the_innermost_line_of_lit_rl_or_of_the_harness(tmp_path: Path) -> None:
    def frame(*place: str) -> traceback.FrameSummary:
        return traceback.FrameSummary(str(Path(*place)), 7, "f")

    ours, harness = frame(speed.PACKAGE, "loop.py"), frame(speed.HARNESS, "bench", "ours.py")
    torchs, watch = frame("torch", "_tensor.py"), frame(speed.HARNESS, "gpu", "speed.py")
    assert speed.waiting([harness, ours, torchs, watch]) == "loop.py:7 f"
    assert speed.waiting([ours, harness, torchs, watch]) == "the harness, ours.py:7 f"
    result = Result(tmp_path / "step_trace.json")
    speed.waits_told(result, Counter({"loop.py:7 f": 2, "the harness, ours.py:7 f": 5}))
    assert result.rows[0].value == 2 and len(result.rows) == 3


def test_flops_are_those_of_the_benchmark_but_for_norms_and_biases() -> None:
    work = Workload("small", shape="7m", prompts=2, group=2, prompt_tokens=8, completion_tokens=4)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**SHAPES["7m"], tie_word_embeddings=True))
    trained = training.Trained(training.Clock(), work, 0, costs=ModelFlops.of_model(model))
    assert trained.flops == pytest.approx(Work.of(work, 0).useful_flops, rel=2e-3)


def test_spans_that_overlap_count_once() -> None:
    assert speed.covered([(0, 2), (1, 3), (5, 6), (5.5, 5.75)]) == 4


@pytest.mark.all
def test_a_whole_stage_in_small_shapes(tmp_path: Path) -> None:
    """The main command, as `prove.sh` runs it."""
    command = ["bash", str(SCRIPTS / "gpu" / "prove.sh"), str(tmp_path), "--only", "machine", "main_command"]
    environment = os.environ | {"PROOF_SMALL": "1", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    what = {row["what"]: row["value"] for row in prove.read_stages(tmp_path)["main_command"]["rows"]}
    assert what["lit_rl: a step"] > what["lit_rl: generate"] > 0
    assert 0 < what["lit_rl: MFU of learning"] < 1 and 0 < what["lit_rl: share of the limit, step"] < 1
    assert what["lit_rl: decode steps"] == "lean_steps"
    assert what["lit_rl: training passes that compute a prompt once"] == "4 of 4"
    assert what["lit_rl: trial of generator.speedups.lean_steps"] == "taken"
    assert "A rehearsal in small shapes" in (tmp_path / "table.md").read_text()


STAGES = """
import itertools, sys
from pathlib import Path
from gpu import speed
from gpu.prove import Result
speed.FIGURES = dict(itertools.islice(speed.FIGURES.items(), 2))
for one in (speed.figures, speed.trl, speed.step_trace):
    one(Result(Path(sys.argv[1], one.__name__ + ".json")), Path(sys.argv[1], "work"))
"""


@pytest.mark.all
def test_figures_trl_and_the_trace_in_small_shapes(tmp_path: Path) -> None:
    """In one process, for the imports' sake; of the figures, the first of SFT and the one of a group of one."""
    path = os.pathsep.join((str(SCRIPTS.parent), str(SCRIPTS)))
    environment = os.environ | {"PROOF_SMALL": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = run([sys.executable, "-c", STAGES, str(tmp_path)], env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = prove.read_stages(tmp_path)
    assert not [row for one in found.values() for row in one["rows"] if row["passed"] is False]
    for name, some in {"figures": "RL learning, 0.6B, 16,384: learned", "trl": "TRL, as it comes: a step"}.items():
        assert next(row["value"] for row in found[name]["rows"] if row["what"] == some) > 0
    assert [row["what"] for row in found["step_trace"]["rows"]][1:] == [
        "a step, not profiled",
        "the step that is profiled",
    ]
    folder = tmp_path / "work" / "tiny"
    assert json.loads((folder / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {file.parent.name for file in folder.glob("*/gradient.safetensors")} == {"trl_best"}
    assert not list(folder.glob("figure_*"))
