"""Rewards named in a config: ``package.module:name`` or ``./file.py:name``, one or several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lit_rl.errors import ConfigError
from lit_rl.rewards.functions.by_path import FunctionFromPath, load_function
from lit_rl.rewards.sums.weighted import Rewards

__all__ = ["FunctionFromPath", "from_paths", "load_function"]


def from_paths(  # noqa: PLR0913 (one keyword a setting, as in the config)
    fn: str | list[str],
    weights: list[float] | None = None,
    *,
    on_error: float | None = None,
    timeout: float | None = 600.0,
    workers: int = 1,
    memory_mb: int | None = None,
    recycle_after: int = 1000,
    max_concurrent: int = 32,
    cache: int = 0,
    constant_limit: int = 0,
    while_generating: bool = True,
) -> Rewards:
    """Make rewards from one path or several; functions of the same name are called ``file.name``.

    Args:
        fn: ``package.module:name`` or ``./file.py:name``, or a list of these.
        weights: One for each path. None: all 1.
        on_error: Score of a completion that a function raised on, hung on or ended its process on; None ends the run.
        timeout: Seconds that one call of a function may take before its process is killed; None is no limit.
        workers: Processes of each function; several share the completions of a per-sample function, and 0 runs it in
            the training process.
        memory_mb: Address space of each worker process in MiB, Linux only; None is no limit.
        recycle_after: Calls after which a worker process is replaced; 0 is never.
        max_concurrent: Completions that an async per-sample function is awaited on at once.
        cache: Completions of each function whose values are kept in memory and not asked for again, for functions whose
            value depends on the prompt, the completion and its columns alone; 0 is off.
        constant_limit: Batches in a row of one and the same value after which a function ends the run; 0 is never.
        while_generating: Call functions that look at one completion at a time for those that are over, while others are
            still written. Values and metrics are the same.

    Raises:
        ConfigError: `fn` is neither a path nor a list of them, a path does not exist, two functions share a name, or a
            setting is out of range.
        RewardError: a module or file fails on import.
    """
    paths = [fn] if isinstance(fn, str) else fn
    if not isinstance(paths, Sequence) or not paths or not all(isinstance(path, str) for path in paths):
        raise ConfigError(
            f"reward.fn={fn!r} names no function; allowed are './my_reward.py:score', 'package.module:name' and a list "
            "of such."
        )
    functions = [load_function(path) for path in paths]
    counts = Counter(function.__name__ for function in functions)
    names = [f.__name__ if counts[f.__name__] == 1 else f"{f.owner}.{f.__name__}" for f in functions]
    if len(set(names)) < len(names):
        raise ConfigError(f"reward.fn holds the same function or file name twice: {', '.join(names)}.")
    return Rewards(
        dict(zip(names, functions)),
        weights,
        on_error=on_error,
        timeout=timeout,
        workers=workers,
        memory_mb=memory_mb,
        recycle_after=recycle_after,
        max_concurrent=max_concurrent,
        cache=cache,
        constant_limit=constant_limit,
        while_generating=while_generating,
    )
