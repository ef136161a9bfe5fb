"""What is said of a reward function that raised, hung or took its process with it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from lit_rl.errors import LitRLError, RewardError
from lit_rl.rewards.completion import Completion, text_of
from lit_rl.rewards.execution.settings import CallSettings
from lit_rl.rewards.execution.worker_output import quote_output
from lit_rl.rewards.workers.job import CallFailed, Failure, n_completions


class WorkerTraceback(Exception):
    """The traceback of a worker process, as text: the cause of a RewardError."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def call_error(
    name: str, failed: CallFailed, rows: int, completions: Sequence[Completion], settings: CallSettings
) -> LitRLError:
    """Return the error that ends a run after a failed call for `rows` completions. A LitRLError keeps its class."""
    failure = failed.failure
    if failed.__cause__ is None and failure.trace:
        failed.__cause__ = WorkerTraceback(failure.trace)
    while_ = f"while it scored {n_completions(rows)}"
    if failure.row is not None:
        while_ = f"while it scored completion {failure.row}, which starts {text_of(completions[failure.row])[:80]!r}"
    score = "reward.on_error=0 would score such completions instead of ending the run."
    if failure.timed_out:
        return RewardError(
            f"reward function {name!r} took {failure.text}{quote_output(failure.output)}. Give it longer with "
            f"reward.timeout (now {settings.timeout:g} seconds a batch), or look for an endless loop. {score}"
        )
    limit = f" Its process may take {settings.memory_mb} MiB (reward.memory_mb)." if settings.memory_mb else ""
    if failure.died:
        return RewardError(
            f"the worker process of reward function {name!r} {failure.text} "
            f"{while_}{quote_output(failure.output)}.{limit} {score}"
        )
    place = f" ({failure.place})" if failure.place else ""
    memory = limit if failure.kind == "MemoryError" else ""
    cause = failed.__cause__
    kind = type(cause) if isinstance(cause, LitRLError) else RewardError
    return kind(
        f"reward function {name!r} raised {failure.kind} {while_}: {failure.text}{place}{quote_output(failure.output)}."
        f"{memory}"
    )


def warn_of_failures(
    name: str,
    failures: Sequence[Failure | None],
    completions: Sequence[Completion],
    settings: CallSettings,
    warned: set[str],
) -> None:
    """Warn once for each kind of failure of a function, with the first completion that it happened on."""
    for i, failure in enumerate(failures):
        if failure is None or failure.kind in warned:
            continue
        warned.add(failure.kind)
        count = sum(other is not None for other in failures)
        place = f" ({failure.place})" if failure.place else ""
        warnings.warn(
            f"reward function {name!r} failed on {count} of {len(failures)} completions, which score "
            f"on_error={settings.on_error:g}: {failure.kind}: {failure.text}{place}{quote_output(failure.output)}. The "
            f"first starts {text_of(completions[i])[:80]!r}. Later ones of this kind are counted in "
            f"rewards/{name}/failure_ratio only.",
            stacklevel=4,
        )
