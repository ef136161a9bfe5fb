"""A signal ends a run within seconds: a rollout, a reward, a validation and the wait for a server are given up, and the
run that goes on equals one that nothing has interrupted."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from runs_helpers import SMALL, assert_same_run, newest
from safetensors.torch import load_file
from signalling_rewards import say_when_and_send
from standin_server import hangs, standing_in

RUN = [
    *SMALL,
    "trainer.max_steps=6",
    "data.task.max_operand=3",
    "data.val_batch_size=1",
    "trainer.val_check_interval=2",
    "reward=function",
    f"reward.fn={Path(__file__).parent / 'signalling_rewards.py'}:signals",
]
"""Before the training 2 decodings of 2 batches; then each second optimizer step of 3 has a validation of 2 batches."""
TERM, INT = signal.SIGTERM, signal.SIGINT
WHERE: dict[str, tuple[list[str], list[tuple[signal.Signals, int, int]]]] = {
    "in the rollout before a validation": ([], [(TERM, 6, 1)]),
    "in the first batch of a validation": ([], [(TERM, 7, 2)]),
    "in the last rollout of an epoch": ([], [(TERM, 9, 2)]),
    "in the first rollout": ([], [(TERM, 5, 0)]),
    "in the training's own process": (["reward.workers=0"], [(INT, 6, 1), (TERM, 10, 2)]),
}
"""What else is set; and each signal, the call of the reward at which it comes, and the optimizer step that is saved.
The function then goes on for two minutes. A second signal comes to the run that goes on."""
AT_ONCE = 15.0
"""Seconds from the signal to the end of the run, on a busy machine; what is given up would take two minutes."""


def ended_at_once(folder: Path) -> bool:
    """Whether it is no longer than that since the signal was sent, as the file `SENT` says."""
    since = time.time() - float((folder / "sent").read_text())
    return since < AT_ONCE


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("whole") / "run"


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path, train, whole) -> None:
    """No signal comes, until a test says so; the run that nothing interrupts is there."""
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("SIGNALLED", str(os.getpid()))
    monkeypatch.setenv("SENT", str(tmp_path / "sent"))
    monkeypatch.setenv("SIGNAL_AT", "0")
    if not whole.exists():
        assert train(*RUN, f"run_dir={whole}") == 0
        (tmp_path / "calls").unlink()


@pytest.mark.parametrize("where", [pytest.param(name, marks=pytest.mark.all) for name in WHERE])
def test_nothing_is_waited_for_after_a_signal_and_going_on_equals_the_whole_run(
    train, whole, where, tmp_path, monkeypatch, capsys
) -> None:
    (more, stops), run, calls = WHERE[where], tmp_path / "run", tmp_path / "calls"
    command = [*RUN, *more, f"run_dir={run}"]
    for by, call, step in stops:
        monkeypatch.setenv("SIGNAL", by.name)
        monkeypatch.setenv("SIGNAL_AT", str(call))
        assert train(*command) == 128 + by
        assert ended_at_once(tmp_path)
        assert len(calls.read_text().split()) == call, "no reward is asked for after that one"
        said = capsys.readouterr().out
        assert (f"Stopped at step {step}, saved" in said) == bool(step)
        assert [path.name for path in run.glob("checkpoints/*.ckpt")] == [f"step_{step:08d}.ckpt"][: 1 if step else 0]
        assert json.loads((run / "summary.json").read_text())["status"] == "stopped"
        assert (f"{run / 'hf'}  (verified" in said) == (by == INT), "Ctrl-C waits; other signals give seconds"
        assert by == INT or "lit-rl export" in said or not step
        assert (run / "hf").exists() == (INT in (each for each, *_ in stops))
        if by == INT:
            held, kept = load_file(run / "hf" / "model.safetensors"), newest(run)["state_dict"]
            assert all(any(torch.equal(each, weight) for weight in kept.values()) for each in held.values())
        command = [*RUN, *more, f"run_dir={run}", "ckpt_path=last"]
    monkeypatch.setenv("SIGNAL_AT", "0")
    assert train(*command) == 0
    assert_same_run(whole, run)


@pytest.mark.parametrize(
    ("task", "signum", "said"),
    [
        ("eval", signal.SIGTERM, "SIGTERM: ended before it was done"),
        pytest.param("predict", signal.SIGINT, "SIGINT: ended before it was done", marks=pytest.mark.all),
        pytest.param("fit", signal.SIGTERM, "Stopped before the first optimizer step was over", marks=pytest.mark.all),
    ],
)
def test_where_nothing_is_learned_yet_the_process_ends_at_once(
    train, task, signum, said, tmp_path, monkeypatch, capfd
) -> None:
    monkeypatch.setenv("SIGNAL_AT", "1")
    monkeypatch.setenv("SIGNAL", signum.name)
    run = tmp_path / "run"
    assert train(*RUN, f"task={task}", f"run_dir={run}") == 128 + signum
    assert ended_at_once(tmp_path)
    assert said in capfd.readouterr().err and run.exists() == (task == "fit")
    assert task != "fit" or ((run / "config.yaml").is_file() and not list(run.rglob("*.ckpt")))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "as it was before"


@pytest.mark.all
def test_a_rollout_of_minutes_is_given_up(train, whole, tmp_path, monkeypatch) -> None:
    run = tmp_path / "run"
    slow = [
        "~generator",
        "+generator._target_=slow_generators.SlowNative",
        "allow_targets=[slow_generators]",
        f"run_dir={run}",
    ]
    monkeypatch.setenv("SLOW_AT", "3")
    assert train(*RUN, *slow) == 128 + signal.SIGTERM
    assert ended_at_once(tmp_path)
    assert [path.name for path in run.glob("checkpoints/*.ckpt")] == ["step_00000003.ckpt"]
    monkeypatch.delenv("SLOW_AT")
    assert train(*RUN, *slow, "ckpt_path=last") == 0
    assert_same_run(whole, run)


@pytest.mark.all
def test_an_optimizer_step_is_finished_and_saved(train, whole, tmp_path, monkeypatch, capsys) -> None:
    run = tmp_path / "run"
    words = ["+callbacks.sends._target_=signalling_callbacks.InAnUpdate", "allow_targets=[signalling_callbacks]"]
    monkeypatch.setenv("UPDATE_AT", "3")
    assert train(*RUN, *words, f"run_dir={run}") == 128 + signal.SIGTERM
    assert ended_at_once(tmp_path) and "Stopped at step 3, saved" in capsys.readouterr().out
    monkeypatch.delenv("UPDATE_AT")
    assert train(*RUN, *words, f"run_dir={run}", "ckpt_path=last") == 0
    assert_same_run(whole, run)


@pytest.mark.all
def test_a_server_that_does_not_answer_is_waited_for_no_longer(train, tmp_path, capsys) -> None:
    """Before the first step: there is nothing to save, and it says so."""
    with standing_in(hangs(150.0)) as server:
        waits = ["generator=vllm_server", f"generator.urls=[{server.url}]", "generator.answer_deadline=300"]
        sends = threading.Thread(target=_send_when_asked, args=(server,))
        sends.start()
        code = train(*RUN, *waits, "trainer.limit_val_batches=0", f"run_dir={tmp_path / 'run'}")
        assert code == 128 + signal.SIGTERM and ended_at_once(tmp_path)
        sends.join()
    assert not list((tmp_path / "run").rglob("*.ckpt")) and "nothing is saved" in capsys.readouterr().out


def _send_when_asked(server) -> None:
    while not server.seen:
        time.sleep(0.05)
    time.sleep(0.5)
    say_when_and_send(os.getpid())
