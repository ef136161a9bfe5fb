"""`lit-rl export`: a checkpoint as a Hugging Face folder, verified, and sent to the hub if that is asked for."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from lit_rl.algorithms.loop.module import PolicyModule
from lit_rl.core import machine
from lit_rl.core.errors import BackendError
from lit_rl.models.model_card import PAPERS, without_folders
from lit_rl.models.sharding import full_state_dict
from lit_rl.reports.config_changes import typed_commands
from lit_rl.reports.run_files import installed_version
from lit_rl.runs.saved_policy import load_saved_weights


@dataclass(frozen=True)
class CheckpointExport:
    """One export."""

    module: PolicyModule
    """The trained module, not loaded yet."""
    checkpoint: Path
    folder: Path
    """Target: a new folder, or an earlier export, which is replaced."""
    facts: Mapping[str, Any]
    """Facts for the model card."""
    push_to_hub: str | None = None
    """A repository of the hub, `user/name`; None sends nothing."""
    private: bool = True
    """True to make a new repository private."""


def export(job: CheckpointExport) -> int:
    """Load, write, verify, send.

    Raises:
        StorageError: the checkpoint cannot be read, is of another model, or the folder cannot be written.
        BackendError: the hub takes nothing.
    """
    say = Console()
    say.print(f"Reading {job.checkpoint} ...", soft_wrap=True, highlight=False, markup=False)
    step = load_saved_weights(job.module, job.checkpoint)
    done = job.module.export(full_state_dict(job.module.policy), job.folder, job.facts)
    say.print(f"{job.folder}  (step {step}, {done})", soft_wrap=True, highlight=False, markup=False)
    if job.push_to_hub is not None:
        say.print(f"Sending it to {job.push_to_hub} ...", soft_wrap=True, highlight=False, markup=False)
        say.print(
            _upload(job.folder, job.push_to_hub, step, job.private), soft_wrap=True, highlight=False, markup=False
        )
    return 0


def card_facts(model: str, algorithm: str, dataset: str, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about a run for its model card.

    Args:
        model: Name or hub id of what the run began with.
        algorithm: Name of the algorithm.
        dataset: Name of the data.
        summary: What the run wrote down of itself: rewards `before` and `after`, which prompts, the `command` that
            began it, and those that it `went_on` by.
    """
    versions = {name: installed_version(name) for name in ("lit-rl", "torch", "transformers", "lightning")}
    measured = {
        f"reward{f' on {name}' if name else ''}, {decoding}": (
            numbers,
            summary.get("before", {}).get(name, {}).get(decoding),
        )
        for name, decodings in summary.get("after", {}).items()
        for decoding, numbers in decodings.items()
        if "reward" in numbers
    }
    facts = {
        "base_model": model,
        "algorithm": algorithm,
        "dataset": dataset,
        "results": {
            name: ({"before": _mean(before)} if before and "reward" in before else {}) | {"after": _mean(after)}
            for name, (after, before) in measured.items()
        },
        "scores": {name: after["reward"] for name, (after, _) in measured.items() if math.isfinite(after["reward"])},
        "versions": {name: version for name, version in versions.items() if version},
    }
    facts |= {"paper": PAPERS[algorithm].arxiv} if algorithm in PAPERS else {}
    if command := commands_for_readers(typed_commands(summary)):
        facts["command"] = command
    return facts | ({"prompts": summary["prompts"]} if summary.get("prompts") else {})


READER_FOLDER = "runs/mine"
"""Placeholder in a card for the folder of the run."""


def commands_for_readers(commands: Sequence[str]) -> str:
    """Return the commands of one run, a line each, so that they train likewise in a reader's folder: with `path/to/`
    in place of the author's folders, and with one folder where several commands have to share it.

    Args:
        commands: Without secrets, as `redact_command` leaves them. One that cannot be read is left out.
    """
    lines = []
    for command in commands:
        try:
            typed = shlex.split(command)
        except ValueError:  # of a damaged summary: quotes that do not end
            continue
        words = []
        for word in typed:
            key = word.partition("=")[0].lstrip("+")
            if key == "run_dir":
                words += [] if len(commands) == 1 else [f"run_dir={READER_FOLDER}"]
            elif key != "--trainer.default_root_dir":
                words.append(without_folders(word))
        words = ["train.py" if word == "path/to/train.py" else word for word in words]
        lines.append(shlex.join(words).replace(str(Path.home()), "~"))
    return "\n".join(lines)


def _mean(numbers: Mapping[str, float]) -> str:
    """Return a mean reward and its 95 % interval."""
    ends = [numbers.get(f"reward_{end}") for end in ("low", "high")]
    known = [f"{end:.3f}" for end in ends if end is not None and math.isfinite(end)]
    return f"{numbers['reward']:.3f}" + (f" [{', '.join(known)}]" if len(known) == 2 else "")


def _upload(folder: Path, repository: str, step: int, private: bool) -> str:
    """Upload a folder; return its address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    whole = f"The folder {folder} is whole"
    if (why := machine.why_hub_is_unreachable()) is not None:
        raise BackendError(
            f"export.push_to_hub={repository}: {why}. {whole}: run the command again once there is a network."
        )
    try:
        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        sent = api.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"lit_rl, step {step}")
    except HFValidationError as error:
        raise BackendError(f"export.push_to_hub={repository}: {error} Write user/name.") from error
    except (HfHubHTTPError, LocalTokenNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise BackendError(
            f"export.push_to_hub={repository} failed: {reason}. {whole}: set HF_TOKEN to a token that may write there, "
            "and run the command again."
        ) from error
    return str(sent.commit_url)
