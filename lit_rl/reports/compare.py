"""`lit-rl compare`: two runs by their last validations, prompt by prompt, with paired tests, and their curves on top of
each other."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column
from rich.text import Text

from lit_rl.callbacks.display import file_name_part, printable, ruled_table
from lit_rl.callbacks.output_files import SampleTable
from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.ops.intervals import wilson
from lit_rl.reports.config_changes import changes_between
from lit_rl.reports.html_page import page, write_atomically
from lit_rl.reports.metric_groups import chart_groups, drawn_groups, metric_of_set, validation_sets
from lit_rl.reports.run_files import RunFiles
from lit_rl.reports.run_findings import RunFinding
from lit_rl.reports.run_page import HIGHER_IS_BETTER, LOWER_IS_BETTER, config_value
from lit_rl.reports.run_samples import PROMPT_COLUMNS, prompts_shown, validation_key, validation_title


@dataclass(frozen=True)
class Comparison:
    """The differences of two runs."""

    names: tuple[str, str]
    tests: list[tuple[str, PairedTest]] = field(default_factory=list)
    """Name of a validation and a measure, each with its paired test."""
    values: list[tuple[str, float, float]] = field(default_factory=list)
    """Names of metrics that both runs have, each with both last values: no file has them by prompt."""
    config: list[tuple[str, Any, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Validation:
    """One validation in `samples/`: values by prompt."""

    table: SampleTable
    step: int
    prompts: dict[str, str]
    """Texts by the key of a prompt: its text and images."""
    values: dict[str, dict[str, float]]
    """Means over the completions of a prompt, of the reward and of each function; prompts without any are left out."""


def compare(first: Path, second: Path) -> int:
    """Print the tables, and write the page into the first folder.

    Raises:
        ConfigError: a folder holds no run, or both are the same.
        StorageError: a file of samples is damaged, or the page cannot be written.
    """
    runs = RunFiles.of(first), RunFiles.of(second)
    found = comparison(*runs)
    _print_comparison(found)
    target = first / f"compare_{second.resolve().name}.html"
    write_atomically(target, comparison_html(found, runs))
    Console().print(f"page  {target}  (one file: open it in a browser)", soft_wrap=True, highlight=False, markup=False)
    return 0


def comparison(first: RunFiles, second: RunFiles) -> Comparison:
    """Compare everything but the curves."""
    one, two = first.path.resolve(), second.path.resolve()
    if one == two:
        raise ConfigError(f"{first.path} and {second.path} are the same folder: give two runs.")
    names = (one.name, two.name) if one.name != two.name else (str(first.path), str(second.path))
    found = Comparison(names, config=changes_between(first.config, second.config))
    # The last validation of each set and temperature: tables are in the order of steps.
    ours, theirs = (
        {key: table for table in run.samples if (key := validation_key(table)) is not None} for run in (first, second)
    )
    if ours and theirs and not ours.keys() & theirs.keys():
        sets = [", ".join(validation_title(table) for table in each.values()) for each in (ours, theirs)]
        found.notes.append(
            f"These runs have no validation in common: {names[0]} has {sets[0]}; {names[1]} has {sets[1]}. Take runs "
            "with the same validation sets and eval.temperature."
        )
    tested_files = set[str]()
    for key in ours:
        if key in theirs and _add_tests(found, _read_validation(ours[key]), _read_validation(theirs[key])):
            tested_files.add(key.partition("_")[2])
    for tables, others, name in ((ours, theirs, names[0]), (theirs, ours, names[1])):
        for key in tables.keys() - others.keys():
            found.notes.append(f"{validation_title(tables[key])}: only {name} was validated so.")
    unlike = [
        name
        for name in validation_sets(first.series)
        if _reward_functions(first, name) != _reward_functions(second, name)
    ]
    if not found.tests and unlike:
        found.notes.append("No test: no reward function scored both runs. Compare runs with one reward.")
    elif not found.tests and not (ours and theirs):
        found.notes.append("No test: the files of these runs hold no value for each prompt.")
    tested = {name for name in validation_sets(first.series) if file_name_part(name) in tested_files}
    found.values.extend(_last_values(first, second, {*tested, *unlike}))
    return found


def _reward_functions(run: RunFiles, name: str) -> set[str]:
    """Return the functions that the reward of a validation set is made of, by the logged names."""
    head = metric_of_set("rewards/", name)
    return {full for full in run.series if full.startswith(head) and full.endswith("/mean")}


# ---------------------------------------------------------------------- validations, prompt by prompt


def _read_validation(stored: SampleTable) -> _Validation:
    import pyarrow

    try:
        names = stored.columns()
        measured = [name for name in names if name == "reward" or name.startswith("rewards/")]
        shown = [name for name in PROMPT_COLUMNS if name in names]
        table = stored.read(["step", *shown, *measured])
        rows = prompts_shown(table)
        columns = table.select(["step", *measured]).to_pydict()
        keys = [hashlib.sha256(repr(row).encode("utf-8", "surrogatepass")).hexdigest() for row in rows]
        prompts = {key: str(row["prompt"]) for key, row in zip(keys, rows)}
    except (OSError, pyarrow.ArrowException, KeyError, ValueError) as error:
        raise StorageError(f"{stored.path} holds no samples of a run, or is damaged: {error}.") from error
    step = columns["step"][0] if keys else 0
    return _Validation(stored, step, prompts, {name: _means_by_prompt(keys, columns[name]) for name in measured})


def _means_by_prompt(keys: Sequence[str], values: Sequence[Any]) -> dict[str, float]:
    by_prompt: dict[str, list[float]] = {}
    for key, value in zip(keys, values):
        if isinstance(value, (int, float)) and math.isfinite(value):
            by_prompt.setdefault(key, []).append(float(value))
    return {key: sum(found) / len(found) for key, found in by_prompt.items()}


def _add_tests(found: Comparison, ours: _Validation, theirs: _Validation) -> bool:
    """Add the tests of one validation; tell whether there was something to test."""
    title = validation_title(ours.table)
    _note_prompts(found, title, ours.prompts, theirs.prompts)
    common = ours.prompts.keys() & theirs.prompts.keys()
    if not common:
        return False
    steps = f"step {ours.step}" if ours.step == theirs.step else f"steps {ours.step} and {theirs.step}"
    functions = [{name for name in each.values if name != "reward"} for each in (ours, theirs)]
    wanted = [name for name in ours.values if name in theirs.values]
    if functions[0] != functions[1]:
        wanted = [name for name in wanted if name != "reward"]
        listed = (", ".join(sorted(name.removeprefix("rewards/") for name in each)) or "none" for each in functions)
        found.notes.append(f"{title}: rewards of different functions ({' and '.join(listed)}) are not compared.")
    seen: list[tuple[Mapping[str, float], Mapping[str, float]]] = []
    for name in wanted:
        pair = ours.values[name], theirs.values[name]
        shared = [key for key in pair[0] if key in pair[1]]
        if pair in seen or not shared:
            continue
        seen.append(pair)
        if left := len(common) - len(shared):
            found.notes.append(f"{title}, {name}: {left} prompts without a value in one of the runs are left out.")
        result = paired_test([pair[0][key] for key in shared], [pair[1][key] for key in shared])
        found.tests.append((f"{title}: {name.removeprefix('rewards/')}, {steps}", result))
    if wanted and not seen:
        found.notes.append(f"{title}: no test, as no prompt has a value in both runs.")
    return bool(seen)


def _note_prompts(found: Comparison, title: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Add a note on prompts that only one of the runs was validated on."""
    alone = [[text for key, text in a.items() if key not in b] for a, b in ((ours, theirs), (theirs, ours))]
    if not any(alone):
        return
    names = found.names
    missing = [
        f"{len(texts)} of the {len(prompts)} prompts of {name} are not in {other}, such as {printable(texts[0], 80)!r}"
        for name, other, texts, prompts in ((*names, alone[0], ours), (*names[::-1], alone[1], theirs))
        if texts
    ]
    if shared := len(ours) - len(alone[0]):
        found.notes.append(f"{title}: the {shared} prompts that both runs have are paired; {'; '.join(missing)}.")
    else:
        found.notes.append(
            f"{title}: no prompt is in both runs; {'; '.join(missing)}. No test. Take runs with the same validation "
            "data (data.val_path, data.val_split, data.task, data.seed, eval.limit, ranks)."
        )


def _last_values(first: RunFiles, second: RunFiles, without_reward: Container[str]) -> list[tuple[str, float, float]]:
    """Return the last values of the metrics that the runs are judged by, over all prompts of each. The reward is left
    out for sets with a test of it, and where it is made otherwise."""
    found = []
    for name in validation_sets(first.series):
        for leaf in (*HIGHER_IS_BETTER, *LOWER_IS_BETTER):
            full = metric_of_set(leaf, name)
            left_out = leaf == "reward" and name in without_reward
            if not left_out and full in first.series and full in second.series:
                last = (run.series[full].first_of_each_step().values[-1] for run in (first, second))
                found.append((full, *last))
    return found


# ---------------------------------------------------------------------- paired tests


@dataclass(frozen=True)
class PairedTest:
    """The result of a paired test on two runs."""

    prompts: int
    first: float
    """Mean of the first run."""
    second: float
    difference: float
    """The second less the first."""
    low: float
    high: float
    """Ends of its 95 % interval; infinite for a single prompt."""
    p: float
    """Probability of a difference as large, or larger, where the runs do not differ; two-sided."""
    test: str
    """`McNemar` or `t`."""

    @property
    def interval(self) -> str:
        """The interval as text."""
        return f"[{self.low:+.3f}, {self.high:+.3f}]" if math.isfinite(self.high) else "one prompt"

    @property
    def p_text(self) -> str:
        """`p` as text."""
        return "<0.0001" if self.p < 1e-4 else f"{self.p:.4f}"

    @property
    def cells(self) -> tuple[str, ...]:
        """Cells of a row: both means, the difference, its interval, the probability, the test, the prompts."""
        numbers = f"{self.first:.3f}", f"{self.second:.3f}", f"{self.difference:+.3f}"
        return *numbers, self.interval, self.p_text, self.test, f"{self.prompts}"


def paired_test(first: Sequence[float], second: Sequence[float]) -> PairedTest:
    """Test finite values of the same prompts, one a prompt, in the same order; at least one.

    Where every value is 0 or 1: McNemar's exact test (1947), and the interval that Newcombe (1998) makes of the two
    Wilson intervals and their correlation, which stays right near 0 and 1. Else the t test of the differences, and its
    interval.
    """
    n = len(first)
    differences = [b - a for a, b in zip(first, second, strict=True)]
    means = sum(first) / n, sum(second) / n
    difference = sum(differences) / n
    if {*first, *second} <= {0.0, 1.0}:
        low, high = newcombe(first, second)
        better, worse = differences.count(1.0), differences.count(-1.0)
        return PairedTest(n, *means, difference, low, high, mcnemar(better, worse), "McNemar")
    if n == 1:
        return PairedTest(n, *means, difference, -math.inf, math.inf, 1.0, "t")
    spread = math.sqrt(sum((each - difference) ** 2 for each in differences) / (n - 1) / n)
    half = spread * t_quantile(0.95, n - 1)
    p = 1 - t_within(abs(difference) / spread, n - 1) if spread else float(difference == 0)
    return PairedTest(n, *means, difference, difference - half, difference + half, max(0.0, p), "t")


def mcnemar(better: int, worse: int) -> float:
    """Return the two-sided probability that a fair coin splits the prompts that changed as unevenly as this, or
    more."""
    changed, fewer = better + worse, min(better, worse)
    tail = sum(math.comb(changed, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2**changed)


def newcombe(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return the interval of a difference of paired shares (Newcombe 1998, method 10)."""
    n = len(first)
    p, q = sum(first) / n, sum(second) / n
    (low_p, high_p), (low_q, high_q) = wilson(p, n), wilson(q, n)
    both = sum(a * b for a, b in zip(first, second))
    neither = sum((1 - a) * (1 - b) for a, b in zip(first, second))
    a, b, c, d = both, n * p - both, n * q - both, neither
    sizes = (a + b) * (c + d) * (a + c) * (b + d)
    product = a * d - b * c
    if product > 0:
        product = max(product - n / 2, 0.0)
    phi = product / math.sqrt(sizes) if sizes > 0 else 0.0

    def reach(one: float, other: float) -> float:
        return math.sqrt(max(0.0, one * one - 2 * phi * one * other + other * other))

    return q - p - reach(q - low_q, high_p - p), q - p + reach(high_q - q, p - low_p)


def t_within(t: float, freedom: int) -> float:
    """Return the probability that Student's t with these degrees of freedom lies within -t and t (Abramowitz and
    Stegun 26.7.3 and 4).

    `t`: at least 0. `freedom`: at least 1.
    """
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = (cosine, 0.0) if freedom % 2 else (1.0, 0.0)
    for k in range(3 if freedom % 2 else 2, freedom + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    return 2 / math.pi * (angle + sine * total) if freedom % 2 else sine * total


def t_quantile(within: float, freedom: int) -> float:
    """Return the t that this share lies within, `within` in (0, 1)."""
    low, high = 0.0, 1.0
    while t_within(high, freedom) < within:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, freedom) < within else (low, middle)
    return high


# ---------------------------------------------------------------------- the console


def _print_comparison(found: Comparison) -> None:
    console = Console()
    title = f"{found.names[0]} (A) and {found.names[1]} (B) on the same validation prompts"
    console.print()
    if found.tests:
        columns = ("", "A", "B", "B - A", "95 % interval", "p", "test", "prompts")
        table = ruled_table(Text(printable(title)), _columns(*columns))
        for name, each in found.tests:
            table.add_row(printable(name), *each.cells)
        console.print(table)
        console.print()
    if found.values:
        title = "Last validations, as they were logged: each over all prompts of its run"
        table = ruled_table(Text(title), _columns("metric", "A", "B", "B - A"))
        for name, one, two in found.values:
            table.add_row(printable(name), f"{one:.4g}", f"{two:.4g}", f"{two - one:+.4g}")
        console.print(table)
        console.print()
    if found.config:
        columns = [Column(name, overflow="fold") for name in ("key", "A", "B")]
        table = ruled_table(Text("What the configs differ in"), columns)
        for row in found.config:
            table.add_row(*(printable(str(each)) for each in row))
        console.print(table)
        console.print()
    for note in found.notes:
        console.print(f"note: {printable(note, 400)}", highlight=False, markup=False)


def _columns(first: str, *numbers: str) -> list[Column]:
    """Return a column of names, and columns of numbers."""
    right = (Column(name, justify="right", no_wrap=True, overflow="fold") for name in numbers)
    return [Column(first, overflow="fold"), *right]


# ---------------------------------------------------------------------- the page


def comparison_html(found: Comparison, runs: tuple[RunFiles, RunFiles]) -> str:
    """Return the whole page.

    Args:
        found: The differences.
        runs: The files of both runs, for the curves.
    """
    tests = []
    for name, each in found.tests:
        first, second, difference, interval, *rest = each.cells
        tests.append((name, first, second, (difference, interval), *rest))
    return page(
        "compare.html",
        "runs",
        names=found.names,
        tests=tests,
        values=[(name, f"{one:.4g}", f"{two:.4g}", f"{two - one:+.4g}") for name, one, two in found.values],
        notes=[RunFinding("note", note) for note in found.notes],
        groups=drawn_groups(chart_groups(list(zip("AB", runs)))),
        config=[tuple(map(config_value, row)) for row in found.config],
    )
