"""The errors that a user can act on, and the checks of settings that raise them. Standard library only.

Each class has the exit code of `train.py` and `lit-rl`. A message names the key or the file, the value, what
is allowed and the likely fix.
"""

from __future__ import annotations

import difflib
import errno
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any


class LitRLError(Exception):
    """Base of every error that a user can do something about."""

    exit_code = 1


class ConfigError(LitRLError):
    """A setting is unknown, of the wrong type, out of range, or does not fit another setting."""

    exit_code = 2


class DataError(LitRLError):
    """A data set, a file or a row cannot be used."""

    exit_code = 3


class RewardError(LitRLError):
    """A reward function cannot be called, raised, or returned anything but one number (or None) per completion."""

    exit_code = 4


class GenerationError(LitRLError):
    """A generator or an environment failed, or samples cannot be trusted."""

    exit_code = 5
    on_every_rank = False
    """True if all ranks raise it at one place, and so can still save a checkpoint together."""


class NumericError(LitRLError):
    """NaN or infinity where a number is needed."""

    exit_code = 6


class StorageError(LitRLError):
    """A run directory, a checkpoint or an export cannot be written, read or verified."""

    exit_code = 7


class BackendError(LitRLError):
    """The environment lacks something required: a package, a device, memory, a model that cannot be reached."""

    exit_code = 8


SIGNALLED = 128
"""The number that is added to a signal's number for the exit code of a run that it ended."""
_NO_MEMORY = re.compile(
    "can't allocate memory|Cannot allocate memory|out of memory|std::bad_alloc|CUBLAS_STATUS_ALLOC_FAILED"
    "|could not create a memory object|could not create a primitive(?! descriptor)"
)
"""Messages of PyTorch's allocators, on the CPU and elsewhere, and of oneDNN, which raise a plain RuntimeError.
(oneDNN has no primitive descriptor for an unknown configuration.)"""

INTERRUPTED = SIGNALLED + 2
TERMINATED = SIGNALLED + 15


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that memory ran out, on any device."""
    torch = sys.modules.get("torch")  # a process that never loaded it has none of its errors
    if isinstance(error, (MemoryError, getattr(torch, "OutOfMemoryError", MemoryError))):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None


_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = (os.path.dirname(os.path.abspath(os.__file__)) + os.sep, "<frozen ")
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")


def line_of(error: BaseException) -> str:
    """Return ``line 3 of FILE``: the place where the user's own code raised, or called the code that did.

    Where none of the lines is of the user's, it is the first one outside of this package, and empty for an error of
    this package, which says all in its text. A user's line is the last one that is neither in this package, nor in
    Python's library, nor in an installed package.
    """
    frames = traceback.extract_tb(error.__traceback__)
    others = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    users = [f for f in others if not f.filename.startswith(_LIBRARIES) and not _INSTALLED.search(f.filename)]
    if not users and isinstance(error, LitRLError):
        return ""
    frame = next(iter(users[-1:] or others[:1] or frames[1:][-1:]), None)  # the first of ours is the call
    return "" if frame is None else f"line {frame.lineno} of {frame.filename}"


def describe_error(error: BaseException) -> str:
    """Return the kind, the text and the line of an error of the user's own code. A syntax error has its line in its
    text."""
    line = "" if isinstance(error, SyntaxError) else line_of(error)
    return f"{type(error).__name__}: {error}" + (f" ({line})" if line else "")


_SHORT = 6
"""Letters below which a word has to be nearer: of three, almost any two words share one."""


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that a word was probably meant to be, or None: a wrong hint is worse than none.

    Near is the same word in other capitals or with its letters in another order, one that differs in few letters, one
    that begins with the word, and one with its first letter and its number, as `float32` is to `fp32`. A word that
    shares letters by chance, as `eps` does with `steps`, is not.
    """
    typed = word.lower()
    lowered = {choice.lower(): choice for choice in choices}
    mixed = (choice for choice in lowered if sorted(choice) == sorted(typed))
    short = len(typed) < _SHORT
    as_long = [choice for choice in lowered if not short or abs(len(choice) - len(typed)) < 2]
    similar = difflib.get_close_matches(typed, as_long, n=1, cutoff=0.75 if short else 0.7)
    longer = sorted((choice for choice in lowered if len(typed) > 2 and choice.startswith(typed)), key=len)
    numbered = [choice for choice in lowered if _digits_of(typed) and _digits_of(choice) == _digits_of(typed)]
    numbered = [choice for choice in numbered if choice[0] == typed[0]]
    near = typed if typed in lowered else next(iter([*mixed, *similar, *longer, *numbered]), None)
    return None if near is None else lowered[near]


def _digits_of(word: str) -> str:
    return "".join(filter(str.isdigit, word))


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"``, or an empty string where nothing is near."""
    near = nearest(word, choices)
    return "" if near is None else f" Did you mean {near!r}?"


def one_of(key: str, value: str, allowed: Iterable[str | None]) -> None:
    """Refuse a word that is none of those allowed, of which None is null.

    Raises:
        ConfigError: names the key, the value, what is allowed and the nearest of it.
    """
    choices = list(allowed)
    if value not in choices:
        near = did_you_mean(str(value), filter(None, choices))
        raise ConfigError(
            f"{key}={value!r} is unknown: allowed is {', '.join(word or 'null' for word in choices)}.{near}"
        )


def excerpt(text: str, length: int = 80) -> str:
    """Return the first characters of a text on one line, control characters written as escapes."""
    head = text[:length]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in head)


def check_draws(temperature: float) -> None:
    """Refuse greedy decoding where a group of completions is to be learned from.

    Raises:
        ConfigError: explains what greedy decoding is for.
    """
    if temperature == 0:
        raise ConfigError(
            "sampling.temperature=0 draws one and the same completion for a whole group, so every advantage is 0. A "
            "greedy choice has no log-probability to learn from. Train with 1.0; greedy decoding is for evaluation "
            "(eval.temperature=0)."
        )


def check_strings(key: str, strings: object) -> None:
    """Refuse anything but a list of strings.

    Raises:
        ConfigError: names the key, the value and how to write it.
    """
    if isinstance(strings, str):
        raise ConfigError(f"{key}={strings!r} is a string; it takes a list of strings: [{strings!r}].")
    if isinstance(strings, list | tuple) and all(isinstance(each, str) for each in strings):
        return
    written = [str(each) for each in strings] if isinstance(strings, list | tuple) else [str(strings)]
    raise ConfigError(f'{key}={strings!r} is no list of strings. In a shell: "{key}={written}".')


def check_betas(key: str, betas: object) -> None:
    """Refuse anything but two decay rates.

    Raises:
        ConfigError: names the key, the value and what is allowed.
    """
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise ConfigError(f"{key}={betas!r} must be two numbers, such as {key}=[0.9,0.999].")
    for i, beta in enumerate(betas):
        in_range(f"{key}[{i}]", beta, low=0, high=1, open_high=True)


def check_function_setting(key: str, value: object, *, optional: bool) -> None:
    """Refuse a setting that is not a function of tensors.

    Args:
        key: The setting.
        value: Its value.
        optional: Whether None is allowed.

    Raises:
        ConfigError: it cannot be called, or is None where a function is needed.
    """
    if not callable(value) and not (optional and value is None):
        or_none = ", or None" if optional else ""
        raise ConfigError(
            f"{key} is {value!r:.60}. Allowed is a function of tensors{or_none}: one of lit_rl.ops, such as "
            "lit_rl.clipped_policy_loss for loss, functools.partial of one, or your own "
            "(docs/configuration.md#your-own-files)."
        )


def check_instance(key: str, value: Any, kind: type, example: str) -> None:
    """Refuse a setting of another type.

    Raises:
        ConfigError: says what came, and an example of what to write.
    """
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{key} is {value!r:.60}, a {type(value).__name__}. Write {example}.")


def seed_in_range(key: str, seed: int) -> None:
    """Refuse a seed that a random generator of PyTorch or NumPy cannot take.

    Raises:
        ConfigError: names the key, the value and the range.
    """
    if not 0 <= seed < 2**63:
        raise ConfigError(f"{key}={seed} is out of range: allowed are whole numbers from 0 to {2**63 - 1}.")


def format_bytes(size: float) -> str:
    """Return bytes as readable text: `0.07 GiB`, or `72 MiB` below a tenth of a GiB."""
    return f"{size / 2**20:.3g} MiB" if size < 2**30 / 10 else f"{size / 2**30:.3g} GiB"


def in_range(
    key: str,
    value: float,
    *,
    low: float,
    high: float = float("inf"),
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Refuse a value outside ``[low, high]``, without an end that is open, and NaN.

    Raises:
        ConfigError: names the key, the value and the range.
    """
    left, right = "(" if open_low else "[", ")" if open_high else "]"
    try:
        above = value > low if open_low else value >= low
        below = value < high if open_high else value <= high
    except TypeError as error:
        raise ConfigError(f"{key}={value!r} is no number: allowed is {left}{low:g}, {high:g}{right}.") from error
    if not (above and below):
        raise ConfigError(f"{key}={value} is out of range: allowed is {left}{low:g}, {high:g}{right}.")


class UnknownKeyword(ConfigError):
    """A keyword that no constructor takes."""

    keyword = ""
    """An attribute and no constructor argument, so that it survives pickling."""


def keyword_names(kind: type) -> set[str]:
    """Return the names of all keywords of a class's constructor, and of its parents' if it passes keywords on to
    them."""
    found: set[str] = set()
    for maker in constructors_of(kind):
        parameters = inspect.signature(maker).parameters.values()
        found |= {each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}
    return found - {"self"}


def constructors_of(kind: type) -> Iterator[Callable[..., Any]]:
    """Yield the constructor of a class, and those of its parents as long as each passes `**keywords` on."""
    for maker in (vars(each)["__init__"] for each in kind.__mro__ if "__init__" in vars(each)):
        yield maker
        try:
            parameters = inspect.signature(maker).parameters.values()
        except (TypeError, ValueError):  # written in C
            return
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            return
