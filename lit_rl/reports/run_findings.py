"""Alarms and notes about a run, concluded from its files: nothing is measured anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lit_rl.reports.run_files import RunFiles, Series

Weight = Literal["failed", "warning", "note"]


@dataclass(frozen=True)
class RunFinding:
    """One alarm or note."""

    weight: Weight
    """`failed`: it ended the run. `warning`: something was left out or is broken. `note`: worth a look."""
    text: str


def run_findings(run: RunFiles) -> list[RunFinding]:
    """Return all findings, the weightiest first."""
    found = [
        *_end_findings(run),
        *(RunFinding("warning", message) for message in run.alarms),
        *_share_findings(run),
        *_data_notes(run),
        *_late_notes(run),
    ]
    found += [RunFinding("warning", each) for each in run.unread]
    return sorted(found, key=lambda finding: ("failed", "warning", "note").index(finding.weight))


def _end_findings(run: RunFiles) -> Iterator[RunFinding]:
    if run.error:
        where = f" (rank {run.error.get('rank')}, step {run.error.get('step')})" if "rank" in run.error else ""
        yield RunFinding("failed", f"{run.error.get('error', 'Error')}: {run.error.get('message', '')}{where}")
    if run.summary.get("status") == "stopped" and not run.error:
        by = run.summary.get("stopped_by")
        where = f"The run was stopped {f'by {by}' if by else f'at step {run.last_step}'}"
        yield RunFinding("note", f"{where}: ckpt_path=last goes on from its newest checkpoint.")
    for path in sorted(run.path.glob("bad_batch*.pt")):
        yield RunFinding("warning", f"{path.name}: what the last step learned from whose gradient was not finite.")
    for missing in run.summary.get("not_written") or []:
        yield RunFinding("warning", f"Not written: {missing}.")


_SHARES = {
    "skipped_steps": "optimizer steps were left out: their gradient was not finite",
    "env/failed": "of episodes failed: their environment raised",
    "env/timeouts": "of episodes took too long",
    "tools/parse_failures": "of the calls of tools could not be read",
    "judge/failures": "of comparisons had no verdict",
    "template/rewritten": "of episodes would be rendered otherwise by the chat template before their last turn",
}
"""Shares that should be 0, and the quantity that each is a share of."""


def _share_findings(run: RunFiles) -> Iterator[RunFinding]:
    for name, series in run.series.items():
        phase, _, leaf = name.partition("/")
        if phase != "train" or not (worst := max(series.values)):
            continue
        if leaf == "completions/unscored":
            yield RunFinding(
                "warning",
                f"No reward applied to {worst:.0f} completions of a rollout at most ({_logged_lines(series)}).",
            )
        elif leaf in _SHARES:
            yield RunFinding("warning", f"{leaf}: up to {worst:.1%} {_SHARES[leaf]} ({_logged_lines(series)}).")
        elif leaf.startswith("rewards/") and leaf.endswith(("/failure_ratio", "/timeout_ratio")):
            what = "it failed on" if leaf.endswith("failure_ratio") else "its time ran out on"
            yield RunFinding(
                "warning",
                f"{leaf}: the share of completions that {what} reached {worst:.1%} ({_logged_lines(series)}).",
            )


def _logged_lines(series: Series) -> str:
    steps = [step for step, value in zip(series.steps, series.values) if value]
    lines = "1 line" if len(steps) == 1 else f"{len(steps)} lines"
    return f"{lines} of the log, the last at step {steps[-1]:.0f}"


def _data_notes(run: RunFiles) -> Iterator[RunFinding]:
    descriptions = {
        "bad": "could not be read",
        "empty": "were empty",
        "overlong": "were too long",
        "truncated": "were cut",
        "overlap": "are also training prompts",
    }
    for name, counts in (run.summary.get("data") or {}).items():
        for key, what in descriptions.items():
            if isinstance(counts, dict) and counts.get(key):
                yield RunFinding("note", f"{counts[key]} of {counts.get('rows', '?')} rows of the set {name} {what}.")


def _late_notes(run: RunFiles) -> Iterator[RunFinding]:
    """Yield notes about the last tenth of the run that a reader should see before the curves."""
    if (share := _late_mean(run, "train/frac_reward_zero_std")) is not None and share > 0.8:
        yield RunFinding(
            "note", f"{share:.0%} of the last completions are in groups of equal reward: they teach nothing."
        )
    if (share := _late_mean(run, "train/completions/clipped_ratio")) is not None and share > 0.25:
        yield RunFinding("note", f"{share:.0%} of the last completions were cut by sampling.max_new_tokens.")
    if (share := _late_mean(run, "train/clip_ratio/region_mean")) is not None and share > 0.3:
        yield RunFinding("note", f"The loss clipped {share:.0%} of the last tokens.")
    if (weight := _late_mean(run, "train/sampling/ess")) is not None and weight < 0.5:
        yield RunFinding(
            "note", f"The weights against the engine leave {weight:.0%} of the last samples (sampling/ess)."
        )


def _late_mean(run: RunFiles, name: str) -> float | None:
    series = run.series.get(name)
    if series is None:
        return None
    late = series.values[-max(1, len(series) // 10) :]
    return sum(late) / len(late)
