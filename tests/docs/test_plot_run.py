"""`scripts/run_curves.py plot` draws what each family of methods logs, not empty axes."""

from __future__ import annotations

import importlib
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("logged", "label"),
    [
        (["rewards/accuracies", "mean_token_accuracy"], "accuracy"),  # pairs
        (["rewards/margins"], "margin"),  # verdicts
        (["mean_token_accuracy"], "mean token accuracy"),  # texts
        (["accuracy", "margin"], "accuracy"),  # scores
    ],
)
def test_a_run_without_rewards_is_drawn_by_what_it_logs(logged: list[str], label: str, root, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(root / "scripts"))
    run_curves: Any = importlib.import_module("run_curves")
    names = [*logged, "loss"]
    rows = [{"step": step, **{f"train/{name}": 0.5 + step for name in names}} for step in range(1, 5)]
    rows += [{"step": step, **{f"val/easy/{name}": 0.25 for name in names}} for step in (0, 4)]
    _, (top, bottom) = run_curves.plt.subplots(2)
    assert run_curves.draw_learned(top, rows)
    run_curves.draw_loss(bottom, rows)
    run_curves.plt.close()
    assert (top.get_ylabel(), bottom.get_ylabel()) == (label, "loss")
    for axes in (top, bottom):
        assert [line.get_label() for line in axes.lines][1:] == ["training", "held-out"]
        assert list(axes.lines[0].get_ydata()) == [1.5, 2.5, 3.5, 4.5] and list(axes.lines[2].get_xdata()) == [0, 4]
