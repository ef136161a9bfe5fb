"""`task=eval`, `validate`, `test` and `predict`: generate, score, report with intervals, write the samples."""

from __future__ import annotations

import json
import math
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lit_rl.algorithms.loop.generating import GeneratingModule
from lit_rl.algorithms.loop.module import PolicyModule
from lit_rl.callbacks.kept_images import KeptImages
from lit_rl.callbacks.text import one_line
from lit_rl.commands.run_curves import decoding
from lit_rl.commands.step_memory import told_of_memory
from lit_rl.commands.train import Run


def evaluate(run: Run) -> int:
    """Validate with the `eval` group's sampling; means with 95 % intervals, pass@k, samples as parquet."""
    with told_of_memory(run.module):
        run.trainer.validate(run.module, datamodule=run.data, ckpt_path=run.ckpt_path, verbose=False)
    return _report(run, "val")


def test(run: Run) -> int:
    """Evaluate through `Trainer.test`: metrics have the prefix `test/`."""
    with told_of_memory(run.module):
        run.trainer.test(run.module, datamodule=run.data, ckpt_path=run.ckpt_path, verbose=False)
    return _report(run, "test")


def _report(run: Run, stage: str) -> int:
    metrics = {name: float(value) for name, value in run.trainer.callback_metrics.items() if name.startswith(stage)}
    if not run.trainer.is_global_zero:
        return 0
    evaluated = f"{run.ckpt_path or run.module.model.name}{_decoding(run.module)}"
    Console().print(f"Evaluation of {evaluated}", soft_wrap=True, markup=False, highlight=False)
    table = Table()
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in sorted(metrics.items()):
        table.add_row(Text(one_line(name)), f"{value:.4f}" if math.isfinite(value) else "-")  # one prompt: no interval
    Console().print(table)
    if not run.dry:
        summary = {"status": "evaluated", "model": run.module.model.name, "ckpt_path": run.ckpt_path}
        run.run_dir.write_summary(summary | {"metrics": metrics})
        Console().print(f"samples  {run.run_dir.path}/samples/", soft_wrap=True, highlight=False)
    return 0


def _decoding(module: PolicyModule) -> str:
    """Return the decoding in words: the names of metrics are the same for each temperature."""
    if not isinstance(module, GeneratingModule):
        return ""
    temperature, count = module.evaluation.temperature, module.evaluation.group_size
    each = f", {count} completions a prompt" if count > 1 else ""
    return f": {decoding(temperature)}{each}"


def predict(run: Run) -> int:
    """Write completions of the validation prompts, one JSON line each, to `predictions.jsonl` (one file a rank)."""
    with told_of_memory(run.module):
        batches: Any = run.trainer.predict(run.module, datamodule=run.data, ckpt_path=run.ckpt_path) or []
    if run.dry:
        return 0
    rank = "" if run.trainer.world_size == 1 else f"-rank{run.trainer.global_rank}"
    target = run.run_dir.path / f"predictions{rank}.jsonl"
    tables = [batch for entry in batches for batch in (entry if isinstance(entry, list) else [entry])]
    images = KeptImages(target.parent)
    with target.open("w") as file:
        for table in tables:
            for values in zip(*table.values(), strict=True):
                row = dict(zip(table, values))
                images.write(row)
                file.write(json.dumps(images.named(row), default=str) + "\n")
    if run.trainer.is_global_zero:
        Console().print(f"predictions  {target}", soft_wrap=True, highlight=False)
    return 0
