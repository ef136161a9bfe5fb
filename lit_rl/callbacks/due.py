"""An every-N-steps trigger for code that runs once per rollout."""

from __future__ import annotations

from lit_rl.errors import in_range


class Due:
    """A trigger, due at step 0, then at the first rollout that begins at or after each multiple of `every` steps.

    Args:
        key: Name of the setting, for the error.
        every: Optimizer steps, 1 or more.

    Raises:
        ConfigError: `every` is below 1.
    """

    def __init__(self, key: str, every: int) -> None:
        in_range(key, every, low=1)
        self.every = every
        self.last: int | None = None
        """The step at which the last rollout began; None before the first, where one step a rollout is assumed."""

    def at(self, step: int) -> bool:
        """Tell whether it is due at the rollout that begins after ``step`` optimizer steps. To be called once a
        rollout."""
        before = step - 1 if self.last is None else self.last
        self.last = step
        return step // self.every > before // self.every
