"""Tasks whose rows are computed, or come with a package, so that a first run needs no download.

The digits are 1797 images of ``digits.csv.gz``, 8 x 8 pixels of 17 greys each: the test set of "Optical Recognition
of Handwritten Digits" by E. Alpaydin and C. Kaynak (UCI Machine Learning Repository, 1998, doi:10.24432/C50P49),
licensed under CC BY 4.0. The file is the one that scikit-learn distributes, byte for byte.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError, in_range
from lit_rl.core.task_sets import REASONING_GYM_COLUMN as PROBLEM_COLUMN
from lit_rl.core.task_sets import VERIFIERS_COLUMN as TASKSET_COLUMN
from lit_rl.core.task_sets import ReasoningGymProblem, TaskSet, prompt_of, row_of_task
from lit_rl.core.visuals import as_png, pillow
from lit_rl.ops.ranges import AtLeastOne, AtLeastTwo, AtLeastZero, Range


@runtime_checkable
class Task(Protocol):
    """Anything that makes its own rows."""

    def train(self) -> list[dict[str, Any]]:
        """Return the training rows, in the same order at every call."""
        ...

    def val(self) -> list[dict[str, Any]]:
        """Return the held-out rows; no prompt of theirs is in `train()`."""
        ...


class HoldsOut(ABC):
    """Rows of which the first `val_rows` are held out."""

    val_rows: int

    def train(self) -> list[dict[str, Any]]:
        """Return the rows that are not held out."""
        return self._rows()[self.val_rows :]

    def val(self) -> list[dict[str, Any]]:
        """Return the `val_rows` held-out rows."""
        return self._rows()[: self.val_rows]

    @abstractmethod
    def _rows(self) -> list[dict[str, Any]]: ...


@checked("data.task")
class Addition(HoldsOut):
    """Sums of two whole numbers: `{"prompt": "17+25=", "answer": "42"}`.

    Every ordered pair of operands is a row of exactly one of the two sets. The held-out pairs depend only on the
    arguments: they are drawn with Python's own generator, so no library version changes them.

    Args:
        max_operand: Largest operand; there are `(max_operand + 1) ** 2` pairs.
        val_rows: Rows held out for validation; 0 holds out none.
        seed: Seed of the rows and of those held out.
    """

    def __init__(self, max_operand: AtLeastZero = 99, val_rows: int = 500, seed: int = 0) -> None:
        pairs = (max_operand + 1) ** 2
        if not 0 <= val_rows < pairs:
            raise ConfigError(
                f"data.task.val_rows={val_rows} is out of range: allowed is 0 to {pairs - 1}, because "
                f"max_operand={max_operand} makes {pairs} pairs and training needs at least one."
            )
        self.max_operand = max_operand
        self.val_rows = val_rows
        self.seed = seed

    def _rows(self) -> list[dict[str, Any]]:
        side = self.max_operand + 1
        order = list(range(side * side))
        random.Random(self.seed).shuffle(order)
        return [{"prompt": f"{n // side}+{n % side}=", "answer": str(n // side + n % side)} for n in order]


class AdditionText(Addition):
    """The same sums with their answers written out: `{"prompt": "17+25=", "completion": "42", "answer": "42"}`."""

    def _rows(self) -> list[dict[str, Any]]:
        return [{**row, "completion": row["answer"]} for row in super()._rows()]


class AdditionPairs(Addition):
    """The same sums with a right and a wrong answer: `{"prompt": "17+25=", "chosen": "42", "rejected": "32", ...}`.

    The wrong one is 1 or 10 off, as a carry that was lost or made up: a mistake that a learner makes. It depends on the
    seed and the operands alone. `answer` is the right one again, for rewards.
    """

    def _rows(self) -> list[dict[str, Any]]:
        rows = []
        for row in super()._rows():
            right = int(row["answer"])
            wrong = [value for value in (right - 10, right - 1, right + 1, right + 10) if value >= 0]
            mistake = random.Random(f"{self.seed} {row['prompt']}").choice(wrong)
            rows.append({**row, "chosen": row["answer"], "rejected": str(mistake)})
        return rows


class AdditionTriples(AdditionPairs):
    """The same pairs beside the right answer, with a chosen one that is only nearer to it than the rejected one:

    `{"prompt": "17+25=", "chosen": "41", "rejected": "32", "reference": "42", ...}`

    The chosen one is 1 off, the rejected one 10.
    """

    def _rows(self) -> list[dict[str, Any]]:
        rows = []
        for row in super()._rows():
            right = int(row["answer"])
            side = 1 if right == 0 else random.Random(f"{self.seed} {row['prompt']}").choice((-1, 1))
            far = right + 10 * (side if right >= 10 else 1)
            rows.append({**row, "chosen": str(right + side), "rejected": str(far), "reference": row["answer"]})
        return rows


class AdditionSteps(Addition):
    """The same sums worked out digit by digit, from the right, each step labelled right or wrong:

    `{"prompt": "17+25=", "completions": ["7+5=12", "1+2+1=4"], "labels": [True, True], "answer": "42"}`

    A step adds two digits and, where there is one, the carry. In half of the rows one step, any of them, is 1 off; that
    step is wrong, and so are those after it, whatever they say. Which ones depends on the seed and the operands alone.
    """

    def _rows(self) -> list[dict[str, Any]]:
        rows = []
        for row in super()._rows():
            draw = random.Random(f"{self.seed} {row['prompt']}")
            first, second = row["prompt"].rstrip("=").split("+")
            columns = list(itertools.zip_longest(reversed(first), reversed(second), fillvalue="0"))
            wrong_at = draw.choice((len(columns), draw.randrange(len(columns))))
            steps, carry = [], 0
            for place, (one, other) in enumerate(columns):
                right = int(one) + int(other) + carry
                shown = right + (draw.choice((-1, 1)) if right else 1) * (place == wrong_at)
                steps.append(f"{one}+{other}{f'+{carry}' if carry else ''}={shown}")
                carry = right // 10
            labels = [place < wrong_at for place in range(len(columns))]
            rows.append({**row, "completions": steps, "labels": labels})
        return rows


@checked("data.task")
class Largest(HoldsOut):
    """The largest of a few numbers, asked for as one message of a chat, for models that follow instructions:

    `{"prompt": [{"role": "user", "content": "Which is the largest number: 7, 64, 12, 31? Reply with just the
    number."}], "answer": "64"}`

    The numbers of a row differ, and no two rows have the same ones in the same order. Rows depend on the arguments
    alone: they are drawn with Python's own generator.

    Args:
        count: Numbers in a row, 2 or more.
        max_number: Largest of them, at least `count`; the smallest is 1.
        train_rows: Rows to learn from, 1 or more.
        val_rows: Rows held out for validation; 0 holds out none.
        seed: Seed of the rows and of those held out.
    """

    def __init__(
        self,
        count: AtLeastTwo = 4,
        max_number: int = 99,
        train_rows: AtLeastOne = 2000,
        val_rows: AtLeastZero = 500,
        seed: int = 0,
    ) -> None:
        in_range("data.task.max_number", max_number, low=count)
        if train_rows + val_rows > (most := math.perm(max_number, count)):
            raise ConfigError(
                f"data.task.train_rows={train_rows} and data.task.val_rows={val_rows}: {count} of {max_number} numbers "
                f"make {most} rows. Lower one of the two, or raise max_number or count."
            )
        self.count, self.max_number, self.train_rows, self.val_rows = count, max_number, train_rows, val_rows
        self.seed = seed

    def _rows(self) -> list[dict[str, Any]]:
        draw, found = random.Random(self.seed), dict[tuple[int, ...], None]()
        while len(found) < self.train_rows + self.val_rows:
            found[tuple(draw.sample(range(1, self.max_number + 1), self.count))] = None
        return [self._row(numbers) for numbers in found]

    @staticmethod
    def _row(numbers: tuple[int, ...]) -> dict[str, Any]:
        question = f"Which is the largest number: {', '.join(map(str, numbers))}? Reply with just the number."
        return {"prompt": [{"role": "user", "content": question}], "answer": str(max(numbers))}


class LargestText(Largest):
    """The same questions with the reply that is wanted, as a message of the assistant, in the column `completion`."""

    def _rows(self) -> list[dict[str, Any]]:
        return [{**row, "completion": _reply(row["answer"])} for row in super()._rows()]


class LargestPairs(Largest):
    """The same questions with a right and a wrong reply, as messages, in the columns `chosen` and `rejected`.

    The wrong one is another of the numbers, which one depends on the seed and the question alone.
    """

    def _rows(self) -> list[dict[str, Any]]:
        return [self._pair(row) for row in super()._rows()]

    def _pair(self, row: dict[str, Any]) -> dict[str, Any]:
        question = row["prompt"][0]["content"]
        others = [number for number in re.findall(r"\d+", question) if number != row["answer"]]
        wrong = random.Random(f"{self.seed} {question}").choice(others)
        return {**row, "chosen": _reply(row["answer"]), "rejected": _reply(wrong)}


def _reply(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@checked("data.task")
class Repeated:
    """One prompt many times, for environments that make a different problem of each row by its seed.

    Args:
        prompt: A text, or the messages of a chat.
        train_rows: Rows to learn from, 1 or more.
        val_rows: Rows held out for validation; 0 holds out none. Their seeds are others.
    """

    def __init__(
        self, prompt: str | list[dict[str, Any]], train_rows: AtLeastOne = 1000, val_rows: AtLeastZero = 100
    ) -> None:
        self.prompt, self.train_rows, self.val_rows = prompt, train_rows, val_rows

    def train(self) -> list[dict[str, Any]]:
        """Return the rows to learn from."""
        return [{"prompt": self.prompt}] * self.train_rows

    def val(self) -> list[dict[str, Any]]:
        """Return the rows to validate on."""
        return [{"prompt": self.prompt}] * self.val_rows


@checked("data.task")
@dataclass(eq=False)
class ReasoningGym(HoldsOut):
    """Problems of a generator of reasoning-gym (2505.24760), as one message of a chat:

    `{"prompt": [{"role": "user", "content": "State the final answer to ...: 4 + 3 ="}], "answer": "7", ...}`

    The further column names the problem, so that `reward=reasoning_gym` finds its scorer; some have no single `answer`.
    Rows depend on the arguments and the version of reasoning-gym alone. Problems that come again are left out.

    Args:
        name: Name of the generator, such as "chain_sum" or "leg_counting".
        settings: Settings of its config, such as `{max_terms: 3}`; what is not given is as it comes.
        instruction: Text added to each question, on a line of its own; empty adds nothing.
        train_rows: Rows to learn from, 1 or more.
        val_rows: Rows held out for validation; 0 holds out none. They are other problems.
        seed: Seed of the rows and of those held out.

    Raises:
        BackendError: reasoning-gym is not installed.
        ConfigError: the generator has no such name or setting, or makes too few different problems.
    """

    name: str
    settings: Mapping[str, Any] | None = None
    instruction: str = ""
    train_rows: AtLeastOne = 2000
    val_rows: AtLeastZero = 200
    seed: int = 0

    def __post_init__(self) -> None:
        self.settings = dict(self.settings or {})

    def _rows(self) -> list[dict[str, Any]]:
        wanted, found = self.train_rows + self.val_rows, dict[str, dict[str, Any]]()
        tries = 2 * wanted + 100
        for index in range(tries):
            problem = ReasoningGymProblem(self.name, self.settings or {}, self.seed, tries, index)
            entry = problem.entry()
            found.setdefault(entry["question"], self._row(problem, entry))
            if len(found) == wanted:
                return list(found.values())
        raise ConfigError(
            f"data.task.train_rows={self.train_rows} and data.task.val_rows={self.val_rows}: reasoning-gym's "
            f"{self.name!r} with settings={self.settings} made {len(found)} different problems in {tries} "
            "tries. Lower the rows, or widen its settings."
        )

    def _row(self, problem: ReasoningGymProblem, entry: dict[str, Any]) -> dict[str, Any]:
        return {"prompt": self._prompt(entry["question"]), "answer": entry["answer"], PROBLEM_COLUMN: problem.text}

    def _prompt(self, question: str) -> str | list[dict[str, str]]:
        return [{"role": "user", "content": f"{question}\n{self.instruction}" if self.instruction else question}]


@checked("data.task")
@dataclass(eq=False)
class ReasoningGymPlain(ReasoningGym):
    """The same problems as plain text, for models that know no chat: `{"prompt": "4+3=", "answer": "7", ...}`

    Args:
        name: Name of the generator, such as "chain_sum".
        settings: See `ReasoningGym`, also for the rest.
        instruction: Text added after the question.
        train_rows: Rows to learn from.
        val_rows: Held-out rows.
        seed: Seed of the problems.
        shown: The part of a question that is shown, as a regular expression: its matches, concatenated.
            `[-+=0-9]` makes "4+3=" of "State the final answer to the following arithmetic problem: 4 + 3 =". By default
            all of it.

    Raises:
        BackendError: reasoning-gym is not installed.
        ConfigError: as for `ReasoningGym`; or `shown` is no regular expression, or matches nothing in a question.
    """

    shown: str = r"(?s:.+)"

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            re.compile(self.shown)
        except re.error as error:
            raise ConfigError(f"data.task.shown={self.shown!r} is no regular expression: {error}.") from error

    def _prompt(self, question: str) -> str:
        prompt = "".join(match.group() for match in re.finditer(self.shown, question))
        if not prompt:
            raise ConfigError(
                f"data.task.shown={self.shown!r} matches nothing in a question of {self.name!r}: {question!r:.200}"
            )
        return prompt + self.instruction


class ReasoningGymText(ReasoningGym):
    """The same problems with the generator's own answer, as a message of the assistant, in the column `completion`.

    Raises:
        ConfigError: as for `ReasoningGym`; or the generator scores answers and has none of its own.
    """

    def _row(self, problem: ReasoningGymProblem, entry: dict[str, Any]) -> dict[str, Any]:
        row = super()._row(problem, entry)
        if row["answer"] is None:
            raise ConfigError(
                f"data.task.name={self.name!r}: this generator of reasoning-gym scores answers and has none of its own "
                "to imitate. Take data=reasoning_gym and an algorithm that learns from rewards, or another generator."
            )
        return {**row, "completion": _reply(row["answer"])}


QUESTION = "Which digit?"
IMAGES = 1797
_SIDE, _GREYS, _SCALE = 8, 16, 4
_FILE = Path(__file__).with_name("digits.csv.gz")


@checked("data.task")
@dataclass(eq=False)
class Digits(HoldsOut):
    """The digit that an image shows, as one message of a chat:

    `{"prompt": [{"role": "user", "content": "Which digit?"}], "image": b"...", "answer": "7"}`

    Images are PNG files of 32 x 32 pixels in RGB: each pixel of the data is a square of 4 x 4. Rows depend on the
    arguments alone. Needs Pillow.

    Args:
        val_rows: Rows held out for validation; 0 holds out none. There are 1797 images.
        seed: Seed of the rows and of those held out.

    Raises:
        ConfigError: `val_rows` leaves nothing to learn from.
    """

    val_rows: Annotated[int, Range(0, IMAGES - 1, whole=True)] = 300
    seed: int = 0

    def _rows(self) -> list[dict[str, Any]]:
        lines = gzip.decompress(_FILE.read_bytes()).decode("ascii").split()
        random.Random(self.seed).shuffle(lines)
        return [self._row([int(float(number)) for number in line.split(",")]) for line in lines]

    @staticmethod
    def _row(numbers: list[int]) -> dict[str, Any]:
        *greys, digit = numbers
        module, side = pillow(), _SIDE * _SCALE
        image = module.frombytes("L", (_SIDE, _SIDE), bytes(grey * 255 // _GREYS for grey in greys))  # 0 is black
        png = as_png(image.resize((side, side), module.Resampling.NEAREST).convert("RGB"))
        return {"prompt": [{"role": "user", "content": QUESTION}], "image": png, "answer": str(digit)}


class DigitTexts(Digits):
    """The same images with the reply that is wanted, as a message of the assistant, in the column `completion`."""

    def _rows(self) -> list[dict[str, Any]]:
        return [{**row, "completion": _reply(row["answer"])} for row in super()._rows()]


@checked("data.task")
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
        train_rows: AtLeastOne | None = None,
        val_rows: AtLeastZero = 0,
        seed: int | None = None,
    ) -> None:
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
        row = {"prompt": prompt_of(task), TASKSET_COLUMN: row_of_task(self.taskset, task).text}
        answer = getattr(task.data, "answer", None)
        return row if answer is None else {**row, "answer": answer}
