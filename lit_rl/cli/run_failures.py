"""The record of an error that ends a run (`error.json`, the summary), for both command lines."""

from __future__ import annotations

import sys
from typing import Any

import lightning as L

from lit_rl.cli.messages import describe, has_lost_another, one_has_ended
from lit_rl.core.errors import BackendError, LitRLError
from lit_rl.reports.secrets import redact_command
from lit_rl.runs.rank_processes import OtherRankFailed, child_exit_reason
from lit_rl.runs.run_dir import RunDir


def record_error(error: Exception, run_dir: RunDir, trainer: L.Trainer, command: str) -> LitRLError | None:
    """Write `error.json`. Of several ranks the first that fails writes it.

    Returns:
        What to raise instead, where this rank failed only because another one is gone.
    """
    if not has_lost_another(error):
        _write(error, run_dir, trainer, command)
        return None
    ended, killed = child_exit_reason(trainer.global_rank) or (None, False)
    known = None
    if ended is not None:
        begun = any(run_dir.checkpoints.glob("*.ckpt"))
        known = one_has_ended(ended, killed, run_dir.path if begun else None, error)
        known.__cause__ = error  # the traceback in the file is this one's
    first = _write(known or error, run_dir, trainer, command)
    return known if first is None or killed else OtherRankFailed(first)  # a process that was killed wrote nothing


def record_lost_rank(error: BackendError, run_dir: RunDir | None, trainer: L.Trainer, command: str) -> int:
    """Record and print that another rank is gone, for a process that does not notice it by itself.

    Args:
        error: The error as known here; that rank's own record replaces it.
        run_dir: None where nothing is written.

    Returns:
        The exit code.
    """
    first = None if run_dir is None else _write(error, run_dir, trainer, command)
    heard: LitRLError = error if first is None else OtherRankFailed(first)
    sys.stderr.write(f"{type(heard).__name__}: {heard}\n")
    sys.stderr.flush()
    return heard.exit_code


def _write(error: Exception, run_dir: RunDir, trainer: L.Trainer, command: str) -> dict[str, Any] | None:
    where = {"rank": trainer.global_rank, "step": trainer.global_step}
    return run_dir.write_error(describe(error) | where | {"command": redact_command(command)})
