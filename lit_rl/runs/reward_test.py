"""`task=reward_test`: scores and times of the configured reward on a few rows of the configured data."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lit_rl.core.episode import Message, Prompt
from lit_rl.core.errors import ConfigError, DataError, in_range
from lit_rl.core.rollout import PromptBatch
from lit_rl.rewards import Rewards, Scores, TrainerState, text_of
from lit_rl.rewards.contract import content_of
from lit_rl.rewards.judge_endpoint import judges_among, reach_judges
from lit_rl.runs.train import Run

_PROMPT, _COMPLETION = 40, 60


@dataclass(frozen=True)
class RewardTrial:
    """A completion to score."""

    row: int
    """The row of the data that it answers."""
    kind: str
    text: str
    own: dict[str, Any] | None = None
    """Columns of its own line, where that has a prompt: then it answers that one, and no row of the data."""


def reward_test(run: Run, *, rows: int = 4, completions: str | None = None) -> int:
    """Score a few completions of the first training rows and print the scores and the time. Loads no weights.

    What a function logs of each completion is a column of the scores, or a table of its own where it has long texts,
    such as the verdicts and reasons of a judge.

    Each row gets its own `completion` column, if there is one, else its `answer`, plain and in a box; the answer of
    another row; and an empty text. A function is called twice with all of them: the first call may load something.

    Args:
        run: Built by the command line.
        rows: Rows of the data.
        completions: A JSONL file of what to score instead, each line ``{"completion": text, "row": number}``; without
            ``row`` the first line answers row 0, and so on. A line with a ``prompt`` is a row by itself: the reward
            sees its prompt and its other columns, and not the data's.

    Raises:
        ConfigError: ``rows`` is below 1, the algorithm has no reward, or the file does not exist.
        DataError: a line of the file cannot be used.
        RewardError: as in training.
    """
    in_range("reward_test.rows", rows, low=1)
    file_trials = None if completions is None else _read(Path(completions).expanduser())
    tokenizer, reward = run.generating.tokenizer, run.generating.reward_functions
    reward.run_on(run.trainer.strategy.root_device)
    data: Any = run.data
    data.prepare(tokenizer, processor=run.generating.model.processor, stage="predict")
    batch = _own_rows(file_trials)
    if batch is None:
        reward.bind(data.columns)
        for columns in data.columns_of_sets():
            reward.check(columns)
        batch = data.peek(rows if file_trials is None else max(trial.row for trial in file_trials) + 1)
    else:
        reward.bind(list(batch.columns))
        reward.check(batch.columns)
        file_trials = [replace(trial, row=number) for number, trial in enumerate(file_trials or ())]
    reach_judges(judges_among(reward.functions).values())
    trials = list(_trials(batch)) if file_trials is None else file_trials
    if (beyond := max(trial.row for trial in trials)) >= len(batch):
        raise DataError(f"{completions}: row {beyond} is asked for, and the data has {len(batch)} rows.")
    inputs = _inputs(batch, trials, tokenizer)
    scores, seconds = _score(reward, inputs)
    if run.trainer.is_global_zero:
        Console().print(_scores_table(batch, trials, scores))
        for name in _long_extras(scores):
            Console().print(_texts_table(trials, name, scores.extras[name]))
        Console().print(_times_table(scores, seconds, len(trials)))
    return 0


def _read(path: Path) -> list[RewardTrial]:
    if not path.is_file():
        raise ConfigError(f"reward_test.completions={str(path)!r}: there is no such file.")
    trials = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        where = f"{path}, line {number + 1}"
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where} is no JSON: {error}.") from error
        text = entry.get("completion") if isinstance(entry, dict) else None
        if not isinstance(text, str):
            raise DataError(f'{where}: a line is {{"completion": text}}, and may hold "row": number; it is {line:.80}.')
        row = entry.get("row", number)
        if not isinstance(row, int) or row < 0:
            raise DataError(f"{where}: row={row!r} must be the number of a row of the data, from 0 on.")
        own = {name: value for name, value in entry.items() if name not in ("completion", "row")}
        if own and "prompt" not in own:
            raise DataError(
                f"{where} has columns of its own ({', '.join(own)}) and no prompt. Give it its prompt, or leave them "
                f"out: then it answers row {row} of the data, with the columns of that."
            )
        trials.append(RewardTrial(row, "given", text, own or None))
    if len({trial.own is None for trial in trials}) == 2:
        raise DataError(f"{path}: some lines bring a prompt and others do not. Let all of them, or none.")
    if not trials:
        raise DataError(f"{path} is empty: there is nothing to score.")
    return trials


def _own_rows(trials: Sequence[RewardTrial] | None) -> PromptBatch | None:
    """Return the rows that the lines of the file are themselves; None where they answer those of the data."""
    own = [trial.own for trial in trials or () if trial.own is not None]
    if not own:
        return None
    names = dict.fromkeys(name for row in own for name in row if name != "prompt")
    columns = {name: [row.get(name) for row in own] for name in names}
    numbers = list(range(len(own)))
    prompts: list[Prompt] = [row["prompt"] for row in own]
    return PromptBatch(prompts, [[] for _ in own], columns, rows=numbers, occurrences=[0] * len(own))


def _trials(batch: PromptBatch) -> Iterator[RewardTrial]:
    """Yield correct, wrong and empty completions of every row, as far as its columns allow."""
    answers = [None if a is None else str(a) for a in batch.columns.get("answer", [None] * len(batch))]
    for row, answer in enumerate(answers):
        own = batch.columns["completion"][row] if "completion" in batch.columns else None
        if own is not None:
            yield RewardTrial(row, "completion", text_of(own))
        elif answer is not None:
            yield RewardTrial(row, "answer", answer)
            yield RewardTrial(row, "boxed", f"\\boxed{{{answer}}}")
        others = [other for other in answers if other not in (None, answer)]
        yield RewardTrial(row, "wrong", others[row % len(others)] or "" if others else "something else")
        yield RewardTrial(row, "empty", "")


def _inputs(batch: PromptBatch, trials: Sequence[RewardTrial], tokenizer: Any) -> dict[str, Any]:
    """Return the arguments of `Rewards.score`, by name."""
    prompts = [batch.prompts[trial.row] for trial in trials]
    completions: list[str | list[Message]] = [
        trial.text if isinstance(prompt, str) else [{"role": "assistant", "content": trial.text}]
        for prompt, trial in zip(prompts, trials, strict=True)
    ]
    ids = [tokenizer(trial.text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] for trial in trials]
    columns = {name: [values[trial.row] for trial in trials] for name, values in batch.columns.items()}
    named = {"prompts": prompts, "completions": completions, "columns": columns, "completion_ids": ids}
    return named | {"trainer_state": TrainerState(seed=0)}  # what is random in a reward is the same in every test


def _score(reward: Rewards, inputs: dict[str, Any]) -> tuple[Scores, dict[str, tuple[float, float]]]:
    """Return the scores of all functions, and the seconds of the first and the second call of each alone."""
    seconds = {}
    for name in reward.names:
        alone = reward.only(name)
        seconds[name] = _seconds(alone, inputs), _seconds(alone, inputs)
    return reward.score(**inputs), seconds


def _seconds(reward: Rewards, inputs: dict[str, Any]) -> float:
    started = time.perf_counter()
    reward.score(**inputs)
    return time.perf_counter() - started


def _scores_table(batch: PromptBatch, trials: Sequence[RewardTrial], scores: Scores) -> Table:
    table = Table(title="Scores", title_justify="left")
    for name in ("row", "prompt", "kind", "completion"):
        table.add_column(name)
    for name in (*scores.names, "total"):
        table.add_column(name, justify="right")
    brief = {name: values for name, values in scores.extras.items() if name not in _long_extras(scores)}
    for name in brief:
        table.add_column(name)
    for i, trial in enumerate(trials):
        prompt = batch.prompts[trial.row]
        question = prompt if isinstance(prompt, str) else content_of(prompt[-1])
        first = i == 0 or trials[i - 1].row != trial.row
        numbers = [*scores.values[i].tolist(), scores.total[i].item()]
        texts = _cut(question, _PROMPT) if first else "", trial.kind, _cut(trial.text, _COMPLETION)
        extras = [Text(_cut(str(values[i]), _COMPLETION)) for values in brief.values()]
        table.add_row(str(trial.row) if first else "", *map(Text, texts), *map(_number, numbers), *extras)
    return table


def _long_extras(scores: Scores) -> list[str]:
    """Return the names of logged columns with a text that a cell of the scores would cut."""
    long = {name: [str(value) for value in values] for name, values in scores.extras.items()}
    return [name for name, texts in long.items() if any(_cut(text, _COMPLETION) != text for text in texts)]


def _texts_table(trials: Sequence[RewardTrial], name: str, texts: Sequence[Any]) -> Table:
    table = Table(title=name, title_justify="left")
    for column in ("row", "kind", "completion", name):
        table.add_column(column)
    for trial, text in zip(trials, texts, strict=True):
        cells = str(trial.row), trial.kind, _cut(trial.text, _PROMPT), "none" if text is None else str(text)
        table.add_row(*map(Text, cells))
    return table


def _times_table(scores: Scores, seconds: dict[str, tuple[float, float]], count: int) -> Table:
    table = Table(title=f"Seconds for {count} completions", title_justify="left")
    table.add_column("function")
    for name in ("first call", "second call", "per 100 completions", "scored"):
        table.add_column(name, justify="right")
    for column, name in enumerate(scores.names):
        first, second = seconds[name]
        scored = int((~scores.values[:, column].isnan()).sum())
        table.add_row(name, f"{first:.3f}", f"{second:.3f}", f"{100 * second / count:.3f}", f"{scored} of {count}")
    return table


def _cut(text: str, length: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


def _number(value: float) -> str:
    return "none" if math.isnan(value) else f"{value:g}"
