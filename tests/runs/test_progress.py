"""What a person sees who waits: validations and tokenising count what is done, on a terminal, and go when they end."""

from __future__ import annotations

import io
import re
import sys

import lightning as L
import pytest

from lit_rl.algorithms import GRPO
from lit_rl.callbacks import Progress, progress
from lit_rl.core import progress_bar
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.rewards import exact_match


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(terminal: io.StringIO) -> list[str]:
    """The states of its line, in order."""
    return [state.strip() for state in re.split(r"[\r\n]", terminal.getvalue())]


@pytest.mark.parametrize("patience, shown", [(0.0, True), (60.0, False)])
def test_what_takes_long_is_counted_and_the_bar_goes(monkeypatch, patience, shown):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress_bar, "PROGRESS_DELAY", patience)
    assert list(progress_bar.delayed_progress(range(3), "tokenising", "row")) == [0, 1, 2]
    assert any(state.startswith("tokenising") and "/3" in state for state in drawn(terminal)) == shown
    assert drawn(terminal)[-1] == ""


def test_without_a_terminal_and_on_other_ranks_there_is_no_bar(monkeypatch):
    monkeypatch.setattr(progress_bar, "PROGRESS_DELAY", 0.0)
    for rank, out in ((0, io.StringIO()), (1, Terminal())):
        monkeypatch.setattr(sys, "stderr", out)
        monkeypatch.setattr(progress_bar.rank_zero_only, "rank", rank)
        assert list(progress_bar.delayed_progress(range(3), "tokenising", "row")) == [0, 1, 2] and not out.getvalue()


def validate(folder: str) -> None:
    module = GRPO("tiny", exact_match, sampling=Sampling(max_new_tokens=2))
    task = Addition(max_operand=9, val_rows=6)
    trainer = L.Trainer(
        accelerator="cpu", logger=False, default_root_dir=folder, callbacks=[Progress(seconds_between_lines=0.0)]
    )
    trainer.validate(module, datamodule=RolloutDataModule(task=task, val_batch_size=2), verbose=False)


@pytest.mark.parametrize("large, said", [(2**20, True), (2**30, False)])
def test_weights_that_take_seconds_to_read_are_named(monkeypatch, tmp_path, capsys, large, said):
    """The shipped policy has 2.2 MiB of them."""
    monkeypatch.setattr(progress, "LARGE", large)
    callback, module = Progress(), GRPO("tiny", exact_match)
    callback.setup(L.Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path), module, "fit")
    assert ("GiB of weights from" in capsys.readouterr().out) == said


def test_a_validation_counts_its_batches_on_a_terminal_and_in_lines_without(monkeypatch, tmp_path, capsys):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    validate(str(tmp_path))
    states = [state for state in drawn(terminal) if state.startswith("validation")]
    assert "0/3" in states[0] and drawn(terminal)[-1] == ""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    validate(str(tmp_path))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("validation")]
    assert lines == [f"validation: {done} of 3 batches" for done in (1, 2, 3)]
