"""Evaluation without training: `task=eval`, `validate`, `test`, `predict`, and `lit-rl best-of-n`.

The first four generate, score, report with intervals and write samples; best-of-n draws several completions of every
validation prompt and keeps the best of each as a text to learn from.
"""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lit_rl.algorithms.evaluation.summary_statistics import mean_with_interval
from lit_rl.algorithms.evaluation.validation import Evaluation
from lit_rl.algorithms.loop.generating import GeneratingModule
from lit_rl.callbacks.display import one_line
from lit_rl.callbacks.output_files import ImageWriter
from lit_rl.callbacks.preference_sets import forbidden_texts, is_readable
from lit_rl.core.durable_files import replacing
from lit_rl.core.errors import ConfigError, RewardError, StorageError
from lit_rl.core.ranks import gather_objects
from lit_rl.core.rollout import PromptBatch
from lit_rl.reports.metric_groups import decoding_label
from lit_rl.runs.run_dir import nan_to_null
from lit_rl.runs.step_memory import explain_out_of_memory
from lit_rl.runs.train import Run

# ---------------------------------------------------------------------- validate, test, predict


def evaluate(run: Run) -> int:
    """Validate with the `eval` group's sampling; means with 95 % intervals, pass@k, samples as parquet."""
    with explain_out_of_memory(run.module):
        run.trainer.validate(run.module, datamodule=run.data, ckpt_path=run.ckpt_path, verbose=False)
    return _print_evaluation(run, "val")


def evaluate_test(run: Run) -> int:
    """Evaluate through `Trainer.test`: metrics have the prefix `test/`."""
    with explain_out_of_memory(run.module):
        run.trainer.test(run.module, datamodule=run.data, ckpt_path=run.ckpt_path, verbose=False)
    return _print_evaluation(run, "test")


def _print_evaluation(run: Run, stage: str) -> int:
    metrics = {name: float(value) for name, value in run.trainer.callback_metrics.items() if name.startswith(stage)}
    if not run.trainer.is_global_zero:
        return 0
    evaluated = str(run.ckpt_path or run.module.model.name)
    if isinstance(run.module, GeneratingModule):  # names of metrics are the same for each temperature
        decoding = run.module.evaluation
        each = f", {decoding.group_size} completions a prompt" if decoding.group_size > 1 else ""
        evaluated += f": {decoding_label(decoding.temperature)}{each}"
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


def predict_completions(run: Run) -> int:
    """Write completions of the validation prompts, one JSON line each, to `predictions.jsonl` (one file a rank)."""
    with explain_out_of_memory(run.module):
        batches: Any = run.trainer.predict(run.module, datamodule=run.data, ckpt_path=run.ckpt_path) or []
    if run.dry:
        return 0
    rank = "" if run.trainer.world_size == 1 else f"-rank{run.trainer.global_rank}"
    target = run.run_dir.path / f"predictions{rank}.jsonl"
    tables = [batch for entry in batches for batch in (entry if isinstance(entry, list) else [entry])]
    images = ImageWriter(target.parent)
    with target.open("w") as file:
        for table in tables:
            for values in zip(*table.values(), strict=True):
                row = dict(zip(table, values))
                images.write(row)
                file.write(json.dumps(images.named(row), default=str) + "\n")
    if run.trainer.is_global_zero:
        Console().print(f"predictions  {target}", soft_wrap=True, highlight=False)
    return 0


# ---------------------------------------------------------------------- best of n


BEST_OF_N_FILE = "best_of_n.jsonl"

_UNREADABLE = "their best completion is empty, or no text that a data module reads"


def best_of_n(run: Run) -> int:
    """Draw `eval.group_size` completions a prompt, score them, and write the best of each to `best_of_n.jsonl`.

    Where the best completion could not be learned from (it is empty), the prompt is left out of the file and counted.

    They are drawn at `eval.temperature`; where that is 0, which draws one completion again and again, at
    `sampling.temperature`, which the table shows.

    Raises:
        ConfigError: nothing that writes, no reward, one completion a prompt, or both temperatures 0.
        RewardError: no function applied to any completion.
        StorageError: the file cannot be written.
    """
    module = run.generating
    _check_best_of_n(module)
    if module.evaluation.temperature == 0:
        module.evaluation = replace(module.evaluation, temperature=module.sampling.temperature)
    bests = KeepBest()
    run.trainer.callbacks.append(bests)  # pyright: ignore
    with warnings.catch_warnings():
        # Where the file itself is asked, it is both sets, and nothing is trained on.
        warnings.filterwarnings("ignore", message=".*have a training prompt.*")
        run.trainer.predict(module, datamodule=run.data, ckpt_path=run.ckpt_path, return_predictions=False)
    if not run.trainer.is_global_zero:
        return 0
    found = [bests.seen[key] for key in sorted(bests.seen)]
    kept = [best for best in found if best is not None]
    if not kept:
        names = ", ".join(module.reward_functions.names)
        raise RewardError(f"{names} returned None for every completion: there is no best one. Look at the columns.")
    control = forbidden_texts(module)
    texts = [best.row for best in kept if is_readable(best.row["completion"], best.row["prompt"], control)]
    left_out = {
        "no reward applies to any completion": len(found) - len(kept),
        _UNREADABLE: len(kept) - len(texts),
    }
    _print_best_of_n(module.evaluation, kept, left_out)
    if not run.dry:
        target = run.run_dir.path / BEST_OF_N_FILE
        _write_best(target, texts)
        learn = f"python train.py algo=sft data=texts data.path={target}"
        for line in (f"best     {target}", f"To learn from them: {learn}"):
            Console().print(line, soft_wrap=True, markup=False, highlight=False)
    return 0


def _check_best_of_n(module: GeneratingModule) -> None:
    evaluation = module.evaluation
    if not module.reward_functions.names:
        raise ConfigError("lit-rl best-of-n needs a reward to choose by: set reward, such as reward=exact_match.")
    if evaluation.group_size < 2:
        raise ConfigError(
            f"eval.group_size={evaluation.group_size}: there is no best of one. Set the number of completions of each "
            "prompt, such as eval.group_size=8."
        )
    if evaluation.temperature == 0 and module.sampling.temperature == 0:
        raise ConfigError(
            "eval.temperature=0 and sampling.temperature=0: every completion of a prompt would be the same. Set "
            "eval.temperature=1."
        )


@dataclass(frozen=True)
class BestCompletion:
    """The best completion of a prompt."""

    row: dict[str, Any]
    """Prompt, completion, reward, each function's reward, length, ended, then the data's own columns."""
    mean: float
    """Mean reward of the completions that were scored."""


class KeepBest(L.Callback):
    """A callback that keeps the best completion of every prompt that `Trainer.predict` sees, over all ranks."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], BestCompletion | None] = {}
        """Results by data set and row, so that a row that pads the last batch of a rank counts once; None: nothing
        scored."""

    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: Any,
        outputs: Any,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        size = len(outputs["reward"]) // len(batch)
        for i, row in enumerate(batch.rows):
            part = {name: values[i * size : (i + 1) * size] for name, values in outputs.items() if name != "step"}
            self.seen[dataloader_idx, row] = _best_completion(part)

    def on_predict_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.seen = {key: best for part in gather_objects(self.seen) for key, best in part.items()}


def _best_completion(part: dict[str, list[Any]]) -> BestCompletion | None:
    """Return the completion of the highest reward, the first of equals; None where no function applied to any."""
    scored = [i for i, reward in enumerate(part["reward"]) if not math.isnan(reward)]
    if not scored:
        return None
    best = max(scored, key=lambda i: part["reward"][i])
    mean = math.fsum(part["reward"][i] for i in scored) / len(scored)
    return BestCompletion({name: values[best] for name, values in part.items()}, mean)


def _print_best_of_n(evaluation: Evaluation, kept: list[BestCompletion], left_out: dict[str, int]) -> None:
    prompts = len(kept) + next(iter(left_out.values()))
    title = f"{evaluation.group_size} completions of {prompts} prompts at temperature {evaluation.temperature:g}"
    table = Table(title=title, title_justify="left")
    for name in ("reward", "mean", "95 % interval"):
        table.add_column(name, justify="left" if name == "reward" else "right")
    columns = {"of all completions": [best.mean for best in kept], "of the best": [b.row["reward"] for b in kept]}
    for name, values in columns.items():
        mean, low, high = mean_with_interval(torch.tensor(values))
        table.add_row(name, f"{mean:.4f}", f"{low:.4f} to {high:.4f}")
    Console().print(table)
    cut = sum(not best.row["ended"] for best in kept)
    notes = [f"{count} of the prompts are not in the file: {why}." for why, count in left_out.items() if count]
    if cut:
        notes.append(f"{cut} of the best were cut at max_new_tokens (ended is false): texts that stop there.")
    for note in notes:
        Console().print(note, soft_wrap=True, markup=False, highlight=False)


def _write_best(path: Path, rows: list[dict[str, Any]]) -> None:
    images = ImageWriter(path.parent)
    try:
        with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
            for row in rows:
                images.write(row)
                file.write(json.dumps(nan_to_null(images.named(row)), default=str, allow_nan=False) + "\n")
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error}.") from error
