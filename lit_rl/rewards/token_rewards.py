"""Rewards that read the token ids of a completion: its length (EOS included) and its repetition."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError, RewardError, in_range
from lit_rl.ops.ranges import AtLeastOne
from lit_rl.rewards.contract import LooksAtData, check_callable


@checked("")
class SoftOverlong:
    """The soft overlong punishment of DAPO (2503.14476, equation 13).

    0 up to ``max_length - cache`` tokens, then falling in a straight line to -1 at ``max_length``, and -1 beyond. Add
    it to a reward for being right: alone it only rewards short completions.

    Args:
        max_length: Tokens from which on the penalty is whole.
        cache: Tokens over which it falls. None is a fifth of ``max_length``, as in the paper (4096 of 20480).

    Raises:
        ConfigError: ``max_length`` is below 1, or ``cache`` is outside ``[0, max_length]``.
    """

    measures_length = True

    def __init__(self, max_length: AtLeastOne, cache: int | None = None) -> None:
        self.max_length = max_length
        self.cache = max_length // 5 if cache is None else cache
        in_range("cache", self.cache, low=0, high=max_length)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        **_: Any,
    ) -> list[float]:
        free, lengths = self.max_length - self.cache, [len(ids) for ids in completion_ids]
        return [
            0.0 if length <= free else -1.0 if length > self.max_length else (free - length) / self.cache
            for length in lengths
        ]


@checked("")
class CosineScaledLength:
    """A reward for being right that changes with the length along half a cosine (2502.03373, appendix C.1).

    ``long + (short - long) / 2 * (1 + cos(pi * min(length / max_length, 1)))``, with ``correct_short`` and
    ``correct_long`` where the completion is right, ``wrong_short`` and ``wrong_long`` where it is not: by default a
    right answer is worth more the shorter it is, and a wrong one costs less the longer was thought about it. None where
    ``correct`` gives None.

    Args:
        correct: The reward function of correctness: a value of 1 or more is right.
        max_length: Tokens at which the long end is reached; longer completions stay there.
        correct_short: Reward of a right completion of no length.
        correct_long: Reward of a right completion of ``max_length`` tokens.
        wrong_short: Reward of a wrong completion of no length.
        wrong_long: Reward of a wrong completion of ``max_length`` tokens.
        exceeded: Reward of any completion of ``max_length`` tokens or more, the paper's r_e. None: the cosine's end.

    Raises:
        ConfigError: ``max_length`` is below 1, a reward is not finite, or ``correct`` is async or per sample.
    """

    def __init__(
        self,
        correct: Callable[..., Sequence[float | None]],
        max_length: AtLeastOne,
        correct_short: float = 1.0,
        correct_long: float = 0.5,
        wrong_short: float = -1.0,
        wrong_long: float = -0.5,
        exceeded: float | None = None,
    ) -> None:
        ends = {"correct_short": correct_short, "correct_long": correct_long}
        ends |= {"wrong_short": wrong_short, "wrong_long": wrong_long}
        for key, value in (ends | {"exceeded": exceeded or 0.0}).items():
            if not math.isfinite(value):
                raise ConfigError(f"{key}={value} must be a finite number.")
        check_callable("correct", correct)
        inner = inspect.signature(correct).parameters
        asynchronous = inspect.iscoroutinefunction(correct) or inspect.iscoroutinefunction(type(correct).__call__)
        if asynchronous or inner.keys() & {"prompt", "completion"}:
            raise ConfigError("correct must be a plain function that scores a whole batch, not async or per sample.")
        self.correct = correct
        self.max_length = max_length
        self.when_right = correct_short, correct_long
        self.when_wrong = wrong_short, wrong_long
        self.exceeded = exceeded
        # Its own signature is that of `correct` with completion_ids, by which columns are asked for and checked.
        own = inspect.Parameter("completion_ids", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.__signature__ = inspect.Signature([own, *(p for name, p in inner.items() if name != own.name)])

    def check_columns(self, columns: Mapping[str, Sequence[Any]], given: Sequence[str] = ()) -> None:
        """Let `correct` refuse rows, if it checks the data."""
        if isinstance(self.correct, LooksAtData):
            self.correct.check_columns(columns, given)

    def __call__(self, completion_ids: Sequence[Sequence[int]], **arguments: Any) -> list[float | None]:
        inner, lengths = inspect.signature(self.correct).parameters, [len(ids) for ids in completion_ids]
        if "completion_ids" in inner or any(p.kind is p.VAR_KEYWORD for p in inner.values()):
            arguments["completion_ids"] = completion_ids  # which `correct` may change
        values: Any = self.correct(**arguments)
        return [None if v is None else self._score(v, n) for v, n in zip(values, lengths, strict=True)]

    def _score(self, value: float, length: int) -> float:
        if math.isnan(value):
            raise RewardError("the function `correct` returned NaN: return None where it does not apply.")
        if self.exceeded is not None and length >= self.max_length:
            return self.exceeded
        short, long = self.when_right if value >= 1 else self.when_wrong
        return long + (short - long) / 2 * (1 + math.cos(math.pi * min(length / self.max_length, 1.0)))


@checked("")
class RepetitionPenalty:
    """``max_penalty * (1 - distinct / all)`` over the n-grams of the completion's token ids (2502.03373, appendix C.2).

    In ``[max_penalty, 0]``; 0 for a completion that repeats nothing, or is shorter than one n-gram.

    Args:
        ngram_size: Tokens of one n-gram.
        max_penalty: The limit for a completion that repeats one n-gram, at most 0.

    Raises:
        ConfigError: ``ngram_size`` is below 1, or ``max_penalty`` is above 0 or not finite.
    """

    def __init__(self, ngram_size: AtLeastOne = 3, max_penalty: float = -1.0) -> None:
        if not -float("inf") < max_penalty <= 0:
            raise ConfigError(f"max_penalty={max_penalty} is out of range: allowed is (-inf, 0]; it is a penalty.")
        self.ngram_size = ngram_size
        self.max_penalty = max_penalty

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        **_: Any,
    ) -> list[float]:
        penalties = []
        for ids in completion_ids:
            ngrams = list(zip(*(ids[start:] for start in range(self.ngram_size))))
            penalties.append(self.max_penalty * (1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0))
        return penalties
