"""Resume from a checkpoint that was written with another world size.

A rollout, and a step of a data set, are the same rows whatever the number of processes. Their batches are not, so
counts of batches become counts of whole rollouts or steps: a half-used one is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_rl.data.loader import whole_steps
from lit_rl.errors import StorageError

_PROGRESS = "epoch_loop.batch_progress"


def processes(count: int) -> str:
    """Return the number of processes as text."""
    return "1 process" if count == 1 else f"{count} processes"


def slots_before(loops: Mapping[str, Any], wrote: int, world_size: int) -> int:
    """Return the batches of a rollout, or of a step of a data set, in the run that wrote the checkpoint.

    Args:
        loops: Lightning's loops in the checkpoint.
        wrote: World size of the run that wrote it.
        world_size: World size of this run.

    Raises:
        StorageError: an earlier version wrote it, and did not record them.
    """
    loaders = loops["fit_loop"]["state_dict"].get("combined_loader") or [{}]
    if "slots" not in loaders[0]:
        raise StorageError(
            f"The checkpoint was written by {processes(wrote)} and this run has {world_size}; the version of lit_rl "
            "that wrote it did not note what another number needs. Go on with as many processes "
            f"(trainer.devices={wrote}, times trainer.num_nodes), or start a new run from the exported model: "
            "model.name=<run_dir>/hf."
        )
    return loaders[0]["slots"]


def move_on(loops: Mapping[str, Any], before: int, now: int, epoch: int) -> None:
    """Advance Lightning's loops to the end of the rollout or step that was begun last. The loader does so itself.

    Args:
        loops: Lightning's loops in the checkpoint, changed in place.
        before: Batches of a rollout or step in the run that wrote it.
        now: Batches of a rollout or step in this run.
        epoch: Batches of an epoch of this run.
    """
    progress = loops["fit_loop"][_PROGRESS]
    total, current = progress["total"], progress["current"]
    moved = whole_steps(current["ready"], before) * now
    earlier = (total["ready"] - current["ready"]) // before * now
    # Lightning infers from their differences in which hook a checkpoint was written.
    progress["current"] = _shifted(current, moved)
    progress["total"] = _shifted(total, earlier + moved)
    progress["is_last_batch"] = moved >= epoch


def _shifted(counts: Mapping[str, int], ready: int) -> dict[str, int]:
    return {name: ready + count - counts["ready"] for name, count in counts.items()}
