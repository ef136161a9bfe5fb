"""`data=verifiers`: the tasks of a task set of the package verifiers as rows."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

from lit_rl.data.tasks import HoldsOut
from lit_rl.errors import ConfigError, in_range
from lit_rl.tasksets import COLUMN as TASKSET_COLUMN
from lit_rl.tasksets import TaskSet, prompt_of, written


class VerifiersTasks(HoldsOut):
    """Tasks of a task set of verifiers, as chats:

    `{"prompt": [{"role": "user", "content": "Say the third letter of tree."}], "answer": "e", "verifiers": "..."}`

    The further column holds the task, so that `reward=verifiers` asks its own scorers; `answer` is there where the
    task's data has one. A task whose prompt is held out, or a duplicate, is left out.

    Args:
        id: Name of the set: of a module, installed or a file in the current directory, that exports one
            `verifiers.v1.Taskset` by its `__all__`.
        settings: Settings of its config, such as `{task: {judges: []}}`; what is not given is as it comes.
        train_rows: Rows to learn from, 1 or more. None: all that are not held out, of a set that ends.
        val_rows: Other rows, held out for validation; 0 holds out none.
        seed: Shuffles the tasks before the first of them are held out. None: they stay in the order of the set.

    Raises:
        BackendError: verifiers is not installed.
        ConfigError: there is no such set or setting, a task has no prompt of texts, or there are too few tasks.
    """

    def __init__(
        self,
        id: str,
        settings: dict[str, Any] | None = None,
        train_rows: int | None = None,
        val_rows: int = 0,
        seed: int | None = None,
    ) -> None:
        if train_rows is not None:
            in_range("data.task.train_rows", train_rows, low=1)
        in_range("data.task.val_rows", val_rows, low=0)
        self.taskset = TaskSet.of(id, settings or {})
        self.train_rows, self.val_rows, self.seed = train_rows, val_rows, seed
        self._loaded: list[dict[str, Any]] | None = None

    def _rows(self) -> list[dict[str, Any]]:
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    def _load(self) -> list[dict[str, Any]]:
        made = self.taskset.made()
        wanted = None if self.train_rows is None else self.train_rows + self.val_rows
        if wanted is None and not made.bounded:
            raise ConfigError(
                f"data.task.id={self.taskset.id!r} yields tasks for ever: say how many are learned from, "
                "data.task.train_rows=1000."
            )
        # A finite set is shuffled whole; of an infinite one only the requested tasks are.
        most = None if made.bounded and self.seed is not None else wanted
        tries = None if most is None else 2 * most + 100
        found = dict[str, dict[str, Any]]()
        for task in itertools.islice(made, tries):
            row = self._row(task)
            found.setdefault(json.dumps(row["prompt"]), row)
            if len(found) == most:
                break
        rows = list(found.values())
        if self.seed is not None:
            random.Random(self.seed).shuffle(rows)
        if len(rows) < (self.val_rows + 1 if wanted is None else wanted):
            raise ConfigError(
                f"data.task.train_rows={self.train_rows} and data.task.val_rows={self.val_rows}: {self.taskset.id!r} "
                f"has {len(rows)} different prompts. Lower the rows."
            )
        return rows[:wanted]

    def _row(self, task: Any) -> dict[str, Any]:
        row = {"prompt": prompt_of(task), TASKSET_COLUMN: written(self.taskset, task).text}
        answer = getattr(task.data, "answer", None)
        return row if answer is None else {**row, "answer": answer}
