"""When something that is counted in optimizer steps is due, where one looks at the start of each rollout only."""

from __future__ import annotations

from lit_rl.errors import in_range


class Due:
    """Is due at step 0, and then at the first rollout that begins at or after each multiple of a number of steps.

    Args:
        key: What the error calls the number.
        every: Optimizer steps, 1 or more.

    Raises:
        ConfigError: it is below 1.
    """

    def __init__(self, key: str, every: int) -> None:
        in_range(key, every, low=1)
        self.every = every
        self.last: int | None = None
        """The step at which the last rollout began; None before the first, where one step a rollout is assumed."""

    def at(self, step: int) -> bool:
        """Whether it is due at the rollout that begins after ``step`` optimizer steps. To be asked once a rollout."""
        before = step - 1 if self.last is None else self.last
        self.last = step
        return step // self.every > before // self.every
