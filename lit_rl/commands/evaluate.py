"""`task=eval` and `task=validate`, `test`, `predict`: generate, score, report with intervals, write the samples."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from lit_rl.commands.train import Run


def evaluate(run: Run) -> int:
    """Validate with the `eval` group's sampling; means with 95 % intervals, pass@k, samples as parquet."""
    run.trainer.validate(run.module, datamodule=run.data, ckpt_path=run.ckpt_path, verbose=False)
    metrics = {name: float(value) for name, value in run.trainer.callback_metrics.items() if name.startswith("val/")}
    if run.trainer.is_global_zero:
        summary = {
            "status": "evaluated",
            "model": run.module.model.name,
            "ckpt_path": run.ckpt_path,
            "metrics": metrics,
        }
        run.run_dir.write_summary(summary)
        table = Table(title=f"Evaluation of {run.ckpt_path or run.module.model.name}", title_justify="left")
        table.add_column("metric")
        table.add_column("value", justify="right")
        for name, value in sorted(metrics.items()):
            table.add_row(name, f"{value:.4f}")
        Console().print(table)
        Console().print(f"samples  {run.run_dir.path}/samples/", soft_wrap=True, highlight=False)
    return 0


def test(run: Run) -> int:
    """`Trainer.test`: the validation sets under the prefix `test/`."""
    run.trainer.test(run.module, datamodule=run.data, ckpt_path=run.ckpt_path)
    return 0


def predict(run: Run) -> int:
    """Completions of the validation prompts, one JSON line each, in `predictions.jsonl`."""
    batches: Any = run.trainer.predict(run.module, datamodule=run.data, ckpt_path=run.ckpt_path) or []
    target = (
        run.run_dir.path
        / f"predictions{'' if run.trainer.world_size == 1 else f'-rank{run.trainer.global_rank}'}.jsonl"
    )
    tables = [batch for entry in batches for batch in (entry if isinstance(entry, list) else [entry])]
    with target.open("w") as file:
        for table in tables:
            for values in zip(*table.values(), strict=True):
                file.write(json.dumps(dict(zip(table, values)), ensure_ascii=False, default=str) + "\n")
    if run.trainer.is_global_zero:
        Console().print(f"predictions  {target}", soft_wrap=True, highlight=False)
    return 0
