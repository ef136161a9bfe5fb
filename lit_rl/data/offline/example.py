"""One row of a data set, rendered and tokenised once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lit_rl.data.image_prompts import Shown
from lit_rl.data.kinds import Kind as Kind
from lit_rl.rollout import Prompt

KINDS = ("texts", "pairs", "verdicts", "stepwise")


@dataclass(frozen=True)
class Encoded:
    """A text as tokens."""

    ids: list[int]
    learned: list[bool]
    """True on tokens that are learned; never the first. As long as ``ids``."""
    prompt_tokens: int
    """Tokens of the prompt that are left of it at the start; 0 for a text without a prompt."""
    shown: str | None = None
    """The rendering of its prompt, where that shows images."""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Example:
    """One row that passed every filter."""

    texts: tuple[Encoded, ...]
    """One text; of a pair the chosen one and the rejected one, which begin with the same prompt tokens."""
    where: str
    """Place of the row, for messages."""
    prompt: Prompt | None = None
    """The prompt that validation generates from and rewards see; None for a text without a prompt."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The row's other columns, for rewards."""
    margin: float | None = None
    """Pairs: by how much the chosen one is better, where the data say so."""
    desirable: bool | None = None
    """Verdicts: whether the completion was found good."""
    shown: Shown | None = None
    """The visuals of the prompt; None: no images."""
    labels: tuple[float, ...] = ()
    """Labelled steps: 1 or 0 for each learned token of the text, in their order."""
