"""What is written down of an error that ends a run, through both command lines."""

from __future__ import annotations

import lightning as L

from lit_rl.cli.messages import described
from lit_rl.cli.other_processes import has_lost_another
from lit_rl.commands.other_ranks import OtherRankFailed
from lit_rl.commands.run_dir import RunDir, redact_command


def write_down(error: Exception, run_dir: RunDir, trainer: L.Trainer, command: str) -> OtherRankFailed | None:
    """Write `error.json`. Of several ranks the first that fails writes it.

    Returns:
        What to raise instead, where this rank failed only because that one is gone.
    """
    where = {"rank": trainer.global_rank, "step": trainer.global_step}
    first = run_dir.write_error(described(error) | where | {"command": redact_command(command)})
    return OtherRankFailed(first) if first is not None and has_lost_another(error) else None
