"""`lit-rl compare`: two runs by their last validations, prompt by prompt, and their curves on top of each other."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lit_rl.callbacks.sample_files import SampleTable
from lit_rl.callbacks.text import in_file_name, printable
from lit_rl.commands import html_file, run_files
from lit_rl.commands.compare_page import page
from lit_rl.commands.config_changes import between
from lit_rl.commands.paired import Paired, paired
from lit_rl.commands.run_curves import of_set, sets_of
from lit_rl.commands.run_files import RunFiles
from lit_rl.commands.run_page import HIGHER, LOWER
from lit_rl.commands.run_samples import title, validation_of
from lit_rl.commands.transcript_record import ASKED, asked
from lit_rl.errors import ConfigError, StorageError


@dataclass(frozen=True)
class Comparison:
    """The differences of two runs."""

    names: tuple[str, str]
    tests: list[tuple[str, Paired]] = field(default_factory=list)
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
    runs = run_files.read(first), run_files.read(second)
    found = comparison(*runs)
    _say(found)
    target = first / f"compare_{second.resolve().name}.html"
    body = page(found.names, runs, found.tests, found.values, found.config, found.notes)
    html_file.write(target, body)
    Console().print(f"page  {target}  (one file: open it in a browser)", soft_wrap=True, highlight=False, markup=False)
    return 0


def comparison(first: RunFiles, second: RunFiles) -> Comparison:
    """Compare everything but the curves."""
    names = _names(first.path, second.path)
    found = Comparison(names, config=between(first.config, second.config))
    ours, theirs = (_last_validations(run.samples) for run in (first, second))
    if ours and theirs and not ours.keys() & theirs.keys():
        sets = [", ".join(title(table) for table in each.values()) for each in (ours, theirs)]
        found.notes.append(
            f"These runs have no validation in common: {names[0]} has {sets[0]}; {names[1]} has {sets[1]}. Take runs "
            "with the same validation sets and eval.temperature."
        )
    tested_files = set[str]()
    for key in ours:
        if key in theirs and _add_tests(found, _read(ours[key]), _read(theirs[key])):
            tested_files.add(key.partition("_")[2])
    for mine, other, name in ((ours, theirs, names[0]), (theirs, ours, names[1])):
        for key in mine.keys() - other.keys():
            found.notes.append(f"{title(mine[key])}: only {name} was validated so.")
    unlike = [name for name in sets_of(first.series) if _functions(first, name) != _functions(second, name)]
    if not found.tests and unlike:
        found.notes.append("No test: no reward function scored both runs. Compare runs with one reward.")
    elif not found.tests and not (ours and theirs):
        found.notes.append("No test: the files of these runs hold no value for each prompt.")
    tested = {name for name in sets_of(first.series) if in_file_name(name) in tested_files}
    found.values.extend(_last_values(first, second, {*tested, *unlike}))
    return found


def _functions(run: RunFiles, name: str) -> set[str]:
    """Return the functions that the reward of a validation set is made of, by the logged names."""
    head = of_set("rewards/", name)
    return {full for full in run.series if full.startswith(head) and full.endswith("/mean")}


def _names(first: Path, second: Path) -> tuple[str, str]:
    one, two = first.resolve(), second.resolve()
    if one == two:
        raise ConfigError(f"{first} and {second} are the same folder: give two runs.")
    return (one.name, two.name) if one.name != two.name else (str(first), str(second))


# ---------------------------------------------------------------------- prompts


def _last_validations(tables: Sequence[SampleTable]) -> dict[str, SampleTable]:
    """Return the last validation of each temperature and set, by the names of the tables."""
    found: dict[str, SampleTable] = {}
    for table in tables:  # in the order of steps
        if (validation := validation_of(table)) is not None:
            found[validation] = table
    return found


def _read(stored: SampleTable) -> _Validation:
    import pyarrow

    try:
        names = stored.columns()
        measured = [name for name in names if name == "reward" or name.startswith("rewards/")]
        shown = [name for name in ASKED if name in names]
        table = stored.read(["step", *shown, *measured])
        rows = asked(table)
        columns = table.select(["step", *measured]).to_pydict()
        keys = [hashlib.sha256(repr(row).encode("utf-8", "surrogatepass")).hexdigest() for row in rows]
        prompts = {key: str(row["prompt"]) for key, row in zip(keys, rows)}
    except (OSError, pyarrow.ArrowException, KeyError, ValueError) as error:
        raise StorageError(f"{stored.path} holds no samples of a run, or is damaged: {error}.") from error
    step = columns["step"][0] if keys else 0
    return _Validation(stored, step, prompts, {name: _means(keys, columns[name]) for name in measured})


def _means(keys: Sequence[str], values: Sequence[Any]) -> dict[str, float]:
    by_prompt: dict[str, list[float]] = {}
    for key, value in zip(keys, values):
        if isinstance(value, (int, float)) and math.isfinite(value):
            by_prompt.setdefault(key, []).append(float(value))
    return {key: sum(found) / len(found) for key, found in by_prompt.items()}


def _add_tests(found: Comparison, ours: _Validation, theirs: _Validation) -> bool:
    """Add the tests of one validation; tell whether there was something to test."""
    of = title(ours.table)
    _note_prompts(found, of, ours.prompts, theirs.prompts)
    common = ours.prompts.keys() & theirs.prompts.keys()
    if not common:
        return False
    steps = f"step {ours.step}" if ours.step == theirs.step else f"steps {ours.step} and {theirs.step}"
    functions = [{name for name in each.values if name != "reward"} for each in (ours, theirs)]
    wanted = [name for name in ours.values if name in theirs.values]
    if functions[0] != functions[1]:
        wanted = [name for name in wanted if name != "reward"]
        said = (", ".join(sorted(name.removeprefix("rewards/") for name in each)) or "none" for each in functions)
        found.notes.append(f"{of}: rewards of different functions ({' and '.join(said)}) are not compared.")
    seen: list[tuple[Mapping[str, float], Mapping[str, float]]] = []
    for name in wanted:
        both = ours.values[name], theirs.values[name]
        shared = [key for key in both[0] if key in both[1]]
        if both in seen or not shared:
            continue
        seen.append(both)
        if left := len(common) - len(shared):
            found.notes.append(f"{of}, {name}: {left} prompts without a value in one of the runs are left out.")
        result = paired([both[0][key] for key in shared], [both[1][key] for key in shared])
        found.tests.append((f"{of}: {name.removeprefix('rewards/')}, {steps}", result))
    if wanted and not seen:
        found.notes.append(f"{of}: no test, as no prompt has a value in both runs.")
    return bool(seen)


def _note_prompts(found: Comparison, of: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Add a note on prompts that only one of the runs was validated on."""
    alone = [[text for key, text in a.items() if key not in b] for a, b in ((ours, theirs), (theirs, ours))]
    if not any(alone):
        return
    names = found.names
    said = [
        f"{len(texts)} of the {len(all_of)} prompts of {name} are not in {other}, such as {printable(texts[0], 80)!r}"
        for name, other, texts, all_of in ((*names, alone[0], ours), (*names[::-1], alone[1], theirs))
        if texts
    ]
    if shared := len(ours) - len(alone[0]):
        found.notes.append(f"{of}: the {shared} prompts that both runs have are paired; {'; '.join(said)}.")
    else:
        found.notes.append(
            f"{of}: no prompt is in both runs; {'; '.join(said)}. No test. Take runs with the same validation data "
            "(data.val_path, data.val_split, data.task, data.seed, eval.limit, ranks)."
        )


def _last_values(first: RunFiles, second: RunFiles, without_reward: Container[str]) -> list[tuple[str, float, float]]:
    """Return the last values of the metrics that the runs are judged by, over all prompts of each. The reward is left
    out for sets with a test of it, and where it is made otherwise."""
    found = []
    for name in sets_of(first.series):
        for leaf in (*HIGHER, *LOWER):
            full = of_set(leaf, name)
            left_out = leaf == "reward" and name in without_reward
            if not left_out and full in first.series and full in second.series:
                last = (run.series[full].first_of_each_step().values[-1] for run in (first, second))
                found.append((full, *last))
    return found


# ---------------------------------------------------------------------- the console


def _say(found: Comparison) -> None:
    console = Console()
    title = f"{found.names[0]} (A) and {found.names[1]} (B) on the same validation prompts"
    console.print()
    if found.tests:
        table = _table(printable(title), ("", "A", "B", "B - A", "95 % interval", "p", "test", "prompts"))
        for name, each in found.tests:
            table.add_row(printable(name), *cells(each))
        console.print(table)
        console.print()
    if found.values:
        title = "Last validations, as they were logged: each over all prompts of its run"
        table = _table(title, ("metric", "A", "B", "B - A"))
        for name, one, two in found.values:
            table.add_row(printable(name), f"{one:.4g}", f"{two:.4g}", f"{two - one:+.4g}")
        console.print(table)
        console.print()
    if found.config:
        table = _table("What the configs differ in", ("key", "A", "B"), numbers=False)
        for row in found.config:
            table.add_row(*(printable(str(each)) for each in row))
        console.print(table)
        console.print()
    for note in found.notes:
        console.print(f"note: {printable(note, 400)}", highlight=False, markup=False)


def cells(each: Paired) -> tuple[str, ...]:
    """Return the cells of a row: both means, the difference, its interval, the probability, the test, the prompts."""
    numbers = f"{each.first:.3f}", f"{each.second:.3f}", f"{each.difference:+.3f}"
    return *numbers, each.interval, each.p_text, each.test, f"{each.prompts}"


def _table(title: str, columns: Sequence[str], *, numbers: bool = True) -> Table:
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for i, name in enumerate(columns):
        right = bool(numbers and i)
        table.add_column(name, justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table
