# pyright: reportUnnecessaryTypeIgnoreComment=error
"""What a type checker knows of settings. `make lint` fails where a line that is marked is let through, or another is
refused."""

from __future__ import annotations

from lit_rl import GRPO, GRPOConfig, exact_match


def write_settings() -> None:
    GRPO("tiny", exact_match, group_size=4, config=GRPOConfig(beta=0.1))
    GRPO(model="tiny", reward=exact_match, group_size="4")  # pyright: ignore[reportArgumentType]
    GRPO("tiny", exact_match, grup_size=4)  # pyright: ignore[reportCallIssue]
    GRPO("tiny", exact_match, advantage=3)  # pyright: ignore[reportArgumentType]
