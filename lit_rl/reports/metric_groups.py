"""The metrics of a run in groups of charts, with training and validations of one name in one picture."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from lit_rl.reports.charts import ChartLine, Drawing, chart, number
from lit_rl.reports.run_files import RunFiles, Series

PHASES = ("generate", "reward", "score", "teacher", "update")
"""Phases of a rollout, see `lit_rl.algorithms.rollouts.phase_costs`; a run that learns from a data set has updates
only."""

JUDGE_COUNTS = {
    "requests": "requests",
    "prompt_tokens": "tokens read",
    "completion_tokens": "tokens written",
    "failures": "without a verdict",
}
"""Counts of the requests to the judges of a run: their keys in its summary, and what the report calls them."""

_LEARNED = (
    "reward", "win_rate", "pass@*", "accuracy", "rewards/accuracies", "margin", "rewards/margins",
    "mean_token_accuracy", "rewards/chosen", "rewards/rejected", "rewards/*/mean", "verifiers/*",
    "*_reward", "objective/scores*",
)  # fmt: skip
_SIGNAL = (
    "frac_reward_zero_std", "reward_std", "frac_rows_skipped", "rewards/*/std", "rewards/*", "groups/*", "replay/*",
    "judge/*", "win_rate_*", "role/*", "curriculum/*", "count/*",
)  # fmt: skip
_COMPLETIONS = (
    "completions/*",
    "turns/*",
    "tools/*",
    "env/*",
    "branches/*",
    "template/*",
    "on_policy",
    "*contain_eos_token",
    "value/num_eos_tokens",
)
_POLICY = (
    "entropy", "kl", "approx_kl", "ratio_mean", "clip_ratio/region_mean", "clip_ratio/*", "*clip*", "objective/*",
    "logps/*", "logits/*", "sampling/*", "off_policy_kept", "policy/*", "nll_loss", "log_odds*", "teacher/*",
    "delta", "kl_cov/*", "fipo/*", "m2po/*", "vespo/*",
)  # fmt: skip
_STEPS = (
    "loss", "grad_norm", "lr", "skipped_steps", "loss/*", "*_loss", "lr_*", "value/*", "return/*", "*_coef", "beta",
    "alpha",
)  # fmt: skip
_SPEED = (
    "tokens_per_second", "mfu", "tflops_per_second", "tokens_per_second_per_device/*", "idle_share", "time/*",
    "memory/*", "num_tokens", "num_input_tokens_seen",
)  # fmt: skip

CHART_GROUPS = (
    ("What it learns", _LEARNED),
    ("Is there a signal", _SIGNAL),
    ("What it writes", _COMPLETIONS),
    ("The policy", _POLICY),
    ("Optimizer steps", _STEPS),
    ("Speed", _SPEED),
)
"""Titles, each with names without `train/` or `val/` in reading order; `*` is any text. A name is in the first group
that lists it, else in a last one, `Other`."""

SECOND_DECODINGS = ("val_sampled", "val_greedy")
"""Prefixes of validations by another decoding than the `eval` group's, which a run makes at its ends: one of them."""


def decoding_label(temperature: float) -> str:
    """Return the decoding of completions in words."""
    return "greedy" if temperature == 0 else f"sampled at {temperature:g}"


_NO_CURVE = ("*_low", "*_high", "prompts", "epoch")
"""Ends of intervals, and counts that do not describe the run."""


@dataclass(frozen=True)
class ChartGroup:
    """Charts that belong together."""

    title: str
    charts: list[tuple[str, list[ChartLine]]] = field(default_factory=list)
    """Names with their lines, the first one first."""
    constant: list[tuple[str, float]] = field(default_factory=list)
    """Names whose number was always the same."""
    repeated: list[tuple[str, str]] = field(default_factory=list)
    """Names with the numbers of another one, and that one."""


def chart_groups(runs: Sequence[tuple[str, RunFiles]]) -> list[ChartGroup]:
    """Return every metric of the runs in groups, without empty ones.

    Args:
        runs: With a name for each in the legends, empty for a single one.
    """
    lines: dict[str, list[ChartLine]] = {}
    for place, (label, run) in enumerate(runs):
        for name, line in _chart_lines(run, label, place if len(runs) > 1 else None):
            lines.setdefault(name, []).append(line)
    groups = {title: ChartGroup(title) for title, _ in (*CHART_GROUPS, ("Other", ()))}
    seen: dict[str, set[bytes]] = {}
    for name in sorted(lines, key=_place):
        group = groups[next((title for title, names in CHART_GROUPS if _matches(name, names)), "Other")]
        drawn = sorted(lines[name], key=lambda line: line.points)
        values = {value for line in drawn for value in line.series.values}
        numbers = {line.series.values.tobytes() for line in drawn}
        same = next((other for other, earlier in seen.items() if numbers <= earlier), None)
        if len(values) == 1:
            group.constant.append((name, values.pop()))
        elif same is not None:
            group.repeated.append((name, same))
        else:
            seen[name] = numbers
            group.charts.append((name, drawn))
    return [group for group in groups.values() if group.charts or group.constant or group.repeated]


_FIRST, _MOST_CHARTS = 6, 90
"""Charts of a group that are open from the start, and charts of all groups together."""


@dataclass(frozen=True)
class DrawnGroup:
    """A group as a page shows it."""

    title: str
    first: list[Drawing]
    """Pictures that are open from the start."""
    more: list[Drawing]
    asides: list[str]
    """Words about metrics without a picture."""


def drawn_groups(groups: Sequence[ChartGroup]) -> list[DrawnGroup]:
    """Return the groups with their charts as pictures, as many as a page holds."""
    found, left = [], _MOST_CHARTS
    for group in groups:
        taken = [chart(name, lines) for name, lines in group.charts[:left]]
        left -= len(taken)
        constant = ", ".join(f"{name} {number(value)}" for name, value in group.constant)
        repeated = ", ".join(f"{name} = {other}" for name, other in group.repeated)
        asides = [f"always the same: {constant}"] if constant else []
        asides += [f"equal curves: {repeated}"] if repeated else []
        if left_out := len(group.charts) - len(taken):
            asides.append(f"{left_out} more in metrics.jsonl")
        found.append(DrawnGroup(group.title, taken[:_FIRST], taken[_FIRST:], asides))
    return found


def _place(name: str) -> tuple[int, int, str]:
    for group, (_, names) in enumerate(CHART_GROUPS):
        for place, pattern in enumerate(names):
            if fnmatchcase(name, pattern):
                return group, place, name
    return len(CHART_GROUPS), 0, name


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def validation_sets(names: Iterable[str]) -> list[str]:
    """Return the validation sets of a run, by the names of its metrics; the one without a name is ""."""
    found = (re.fullmatch(r"val/(?:(.+)/)?(?:reward|loss|prompts|win_rate)", name) for name in names)
    return list(dict.fromkeys(match[1] or "" for match in found if match))


def metric_of_set(leaf: str, name: str, stage: str = "val") -> str:
    """Return the name of a metric of a validation set in `metrics.jsonl`."""
    return f"{stage}/{name}/{leaf}" if name else f"{stage}/{leaf}"


def _chart_lines(run: RunFiles, label: str, colour: int | None) -> Iterator[tuple[str, ChartLine]]:
    """Yield names without their prefixes, each with a line: training first."""
    before = f"{label}: " if label else ""
    sets = sorted((name for name in validation_sets(run.series) if name), key=len, reverse=True)
    known = validation_sets(run.series)
    for full, series in run.series.items():
        phase, _, leaf = full.partition("/")
        if phase in SECOND_DECODINGS:
            continue  # drawn beside the first
        name = ""
        if phase == "val":
            name = next((each for each in sets if leaf.startswith(f"{each}/")), "")
            leaf = leaf.removeprefix(f"{name}/") if name else leaf
        elif phase != "train":
            leaf = full
        if _matches(leaf, _NO_CURVE):
            continue
        if phase != "val":
            yield leaf, ChartLine(f"{before}training", series, colour or 0)
            continue
        place = 1 + known.index(name) if name in known else 1
        yield from _validation_lines(
            run, leaf, name, f"{before}{name or 'held-out'}", place if colour is None else colour
        )


def _validation_lines(run: RunFiles, leaf: str, name: str, label: str, colour: int) -> Iterator[tuple[str, ChartLine]]:
    """Yield the validations as points; and those of the second decoding, which a run makes at its ends, hollow."""
    second = next((stage for stage in SECOND_DECODINGS if metric_of_set(leaf, name, stage) in run.series), None)
    # The decodings of the validations at the ends of the run, the `eval` group's first; none without a summary.
    measured = "reward" if second else leaf
    by_decoding = [_mapping(_mapping(run.summary.get(when)).get(name)) for when in ("before", "after")]
    decodings = list(
        dict.fromkeys(key for each in by_decoding for key, numbers in each.items() if measured in _mapping(numbers))
    )
    for place, stage in enumerate(("val", second) if second else ("val",)):
        full = metric_of_set(leaf, name, stage)
        series = run.series[full].first_of_each_step()
        low, high = (_values_at(run.series.get(f"{full}_{end}"), series.steps) for end in ("low", "high"))
        by = f", {decodings[place]}" if place < len(decodings) else ", " + stage[4:] if place else ""
        yield leaf, ChartLine(f"{label}{by}", series, colour, points=True, hollow=bool(place), low=low, high=high)


def _values_at(series: Series | None, steps: Sequence[float]) -> list[float] | None:
    if series is None:
        return None
    first = series.first_of_each_step()
    found = dict(zip(first.steps, first.values))
    return [found[step] for step in steps] if all(step in found for step in steps) else None


def before_and_after(
    summary: Mapping[str, object], name: str, decoding: str
) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Return the numbers of a set and a decoding in `summary.json`, before and after training; empty where it has
    none."""
    before, after = (
        _mapping(_mapping(_mapping(summary.get(when)).get(name)).get(decoding)) for when in ("before", "after")
    )
    return _numbers(before), _numbers(after)


def _mapping(value: object) -> Mapping:
    return value if isinstance(value, Mapping) else {}


def _numbers(found: Mapping) -> dict[str, float]:
    return {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}
