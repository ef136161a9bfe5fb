"""What a run says at its start and at its end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lit_rl.errors import StorageError

PHASES = ("generate", "reward", "update")


def phase_totals(metrics: Path) -> dict[str, dict[str, float]]:
    """Seconds and tokens per second of each phase, summed over a metrics.jsonl."""
    seconds, tokens = dict.fromkeys(PHASES, 0.0), 0.0
    for row in read_rows(metrics):
        if "time/generate" in row:
            spent = [row.get(f"time/{phase}") or 0.0 for phase in PHASES]
            for phase, value in zip(PHASES, spent):
                seconds[phase] += value
            tokens += (row.get("tokens_per_second") or 0.0) * sum(spent)
    return {
        phase: {"seconds": value, "tokens_per_second": tokens / value if value else math.nan}
        for phase, value in seconds.items()
    }


def read_rows(metrics: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; none where there is no file."""
    if not metrics.exists():
        return []
    try:
        return [json.loads(line) for line in metrics.read_text().splitlines()]
    except json.JSONDecodeError as error:
        raise StorageError(f"{metrics} is damaged: {error}.") from error


def closing_table(summary: dict[str, Any]) -> None:
    """Accuracy before and after, and where the time went."""
    console = Console()
    table = Table(title="Held-out reward (accuracy where it is 0 or 1), mean and 95 % interval", title_justify="left")
    for column in ("set", "decoding", "before", "after"):
        table.add_column(column, no_wrap=True)
    for name, decodings in summary.get("after", {}).items():
        for decoding, after in decodings.items():
            before = summary.get("before", {}).get(name, {}).get(decoding)
            table.add_row(name or "held-out", decoding, _interval(before), _interval(after))
    if table.row_count:
        console.print(table)
    times = Table(title="Where the time went", title_justify="left")
    for column, justify in (("phase", "left"), ("seconds", "right"), ("tokens per second", "right")):
        times.add_column(column, justify=justify)  # pyright: ignore
    for phase, numbers in summary.get("phases", {}).items():
        times.add_row(phase, f"{numbers['seconds']:.1f}", f"{numbers['tokens_per_second']:,.0f}")
    times.add_row("whole run", f"{summary['seconds']:.1f}", "")
    console.print(times)


def _interval(numbers: dict[str, float] | None) -> str:
    if numbers is None or any(value is None or math.isnan(value) for value in numbers.values()):
        return "-"
    return f"{numbers['reward']:.3f}  [{numbers['reward_low']:.3f}, {numbers['reward_high']:.3f}]"


def closing_lines(run_dir: Path, command: str, export: str | None, logged: bool) -> list[str]:
    """Where everything is, and the commands to go on with."""
    lines = [
        f"samples       {run_dir}/samples/ (parquet, one file a rollout)",
        f"metrics       {run_dir}/metrics.jsonl",
    ]
    if logged:
        lines.append(f"curves        tensorboard --logdir {_quoted(run_dir)}")
    if export is not None:
        lines.append(f"model         {run_dir}/hf  ({export})")
        lines.append(
            f"use it        AutoModelForCausalLM.from_pretrained({str(run_dir / 'hf')!r}), AutoTokenizer likewise"
        )
    lines.append(f"evaluate it   {command} task=eval ckpt_path=last eval.group_size=8 eval.temperature=1")
    return lines


def _quoted(path: Path) -> str:
    text = str(path)
    return text if all(c.isalnum() or c in "/._-" for c in text) else "'" + text.replace("'", "'\\''") + "'"
