"""Problems of the package reasoning-gym (2505.24760): each can be made again from its name, so that its scorer can.

A problem is a function of five things: the generator's name, its settings, a seed, how many problems are asked for
(some make all of them at once), and an index. What else a generator draws from, the global random numbers of Python and
numpy, is set by seed and index while it runs, and put back after.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from lit_rl.errors import BackendError, ConfigError, did_you_mean

COLUMN = "reasoning_gym"
"""The column of a row that names its problem, as JSON."""


@dataclass(frozen=True)
class Problem:
    """The name of one problem of one generator.

    Args:
        name: Of the generator, such as "chain_sum".
        settings: Of its config, such as `{"max_terms": 3}`.
        seed: Of all its problems.
        size: How many these are.
        index: Of this one, below `size`.
    """

    name: str
    settings: Mapping[str, Any]
    seed: int
    size: int
    index: int

    @classmethod
    def read(cls, text: str) -> Problem:
        """Parse `text`."""
        return cls(**json.loads(text))

    @property
    def text(self) -> str:
        """JSON, for the column of a row."""
        return json.dumps(asdict(self), sort_keys=True)

    def entry(self) -> dict[str, Any]:
        """Return the generator's dict with `question`, `answer` and `metadata`.

        Raises:
            BackendError: reasoning-gym is not installed.
            ConfigError: the generator has no such name or setting.
        """
        generator = self._generator()
        with _own_random_numbers(f"{self.seed} {self.index}"):
            return generator[self.index]

    def scorer(self) -> Callable[[str], float]:
        """Return the generator's own scorer: from an answer to a number in [0, 1]."""
        generator, entry = self._generator(), self.entry()
        return lambda answer: float(generator.score_answer(answer, entry))

    def _generator(self) -> Any:
        return _generator(self.name, json.dumps(dict(self.settings), sort_keys=True), self.seed, self.size)


@functools.lru_cache(maxsize=32)
def _generator(name: str, settings: str, seed: int, size: int) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise BackendError(
            "Problems of reasoning-gym need the package reasoning-gym: pip install 'lit-rl[reasoning]'."
        ) from error
    if name not in DATASETS:
        raise ConfigError(f"data.task.name={name!r} is no generator of reasoning-gym.{did_you_mean(name, DATASETS)}")
    try:
        with _own_random_numbers(f"{seed}"):
            generator = reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(settings))
            generator[0]  # some generators read their settings only when they make a problem
            return generator
    except (ImportError, OSError):
        raise
    except Exception as error:
        allowed = ", ".join(sorted(set(DATASETS[name][1].__dataclass_fields__) - {"seed", "size"}))
        raise ConfigError(
            f"data.task.settings={settings} does not suit reasoning-gym's {name!r} "
            f"({type(error).__name__}: {error}). Its settings: {allowed}."
        ) from error


@contextmanager
def _own_random_numbers(seed: str) -> Iterator[None]:
    import numpy

    python, array = random.getstate(), numpy.random.get_state()
    random.seed(seed)
    numpy.random.seed(random.getrandbits(32))
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(array)
