"""How rows become examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lit_rl.data.checks import one_of
from lit_rl.data.formats import RowFunction
from lit_rl.data.images import MAX_IMAGE_PIXELS, MOST_IMAGE_PIXELS
from lit_rl.data.jsonl import ON_BAD_ROW, OnBadRow
from lit_rl.data.offline.encode import LEARN, Learn
from lit_rl.data.offline.example import Kind
from lit_rl.data.offline.packing import PACKING, Packing
from lit_rl.data.offline.truncation import KEEP, OVERLONG, Keep, Overlong
from lit_rl.data.templates import check_template_kwargs
from lit_rl.errors import ConfigError, in_range


@dataclass(frozen=True)
class ExampleOptions:
    """Settings by which a row becomes an example; the fields are those of the data modules.

    Args:
        rename: New names of columns, old to new.
        map_row: A function from row to row, applied first.
        system_prompt: Opens every prompt that has no system message of its own; a string prompt becomes messages.
        chat_template_kwargs: Further arguments of the chat template.
        max_length: Longest text, prompt and completion together, in tokens, at least 2; None is no limit.
        max_completion_tokens: Longest completion (a text without a prompt is one), in tokens, at least 1; None is no
            limit of its own.
        keep: The end of a too long text that stays; see `windows`.
        overlong: Action for a row over either limit: `truncate` cuts it in token space, and drops it where nothing
            learned is left; `drop` leaves the row out and counts it; `error` refuses it.
        on_bad_row: Action for a row that cannot be read: `error` raises, `skip` counts it.
        max_image_pixels: Width times height of an image, at most.
        max_dropped: Share of the rows that may be dropped as empty, equal or without a common prompt, in [0, 1].
        learn: Texts: which tokens are learned; see `Encoder`. Of a row of `messages`, `completion` is the last message,
            and `assistant` all that the assistant says. Of other rows both learn nothing of the prompt.
        packing: Texts: how they are put together into rows of `max_length`; with `wrapped` no text is cut for being
            long.
        separator: Labelled steps: what ends each.
        last_step_only: Labelled steps: learn the last label only.
    """

    rename: Mapping[str, str] = field(default_factory=dict)
    map_row: RowFunction | None = None
    system_prompt: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_length: int | None = 1024
    max_completion_tokens: int | None = None
    keep: Keep = "start"
    overlong: Overlong = "truncate"
    on_bad_row: OnBadRow = "error"
    max_image_pixels: int = MAX_IMAGE_PIXELS
    max_dropped: float = 0.1
    learn: Learn = "completion"
    packing: Packing = "none"
    separator: str = "\n"
    last_step_only: bool = False

    def __post_init__(self) -> None:
        for key, low in (("max_length", 2), ("max_completion_tokens", 1)):
            if getattr(self, key) is not None:
                in_range(f"data.{key}", getattr(self, key), low=low)
        in_range("data.max_image_pixels", self.max_image_pixels, low=1, high=MOST_IMAGE_PIXELS)
        in_range("data.max_dropped", self.max_dropped, low=0, high=1)
        one_of("data.keep", self.keep, KEEP)
        one_of("data.overlong", self.overlong, OVERLONG)
        one_of("data.on_bad_row", self.on_bad_row, ON_BAD_ROW)
        one_of("data.learn", self.learn, LEARN)
        one_of("data.packing", self.packing, PACKING)
        if self.keep != "start" and self.overlong != "truncate":
            raise ConfigError(
                f"data.keep={self.keep} says what is left of a text that is cut, and data.overlong={self.overlong} "
                "cuts none: leave data.keep at start, or set data.overlong to truncate."
            )
        if self.packing != "none" and self.max_length is None:
            raise ConfigError(f"data.packing={self.packing} needs data.max_length, the tokens of a row, which is null.")
        check_template_kwargs(self.chat_template_kwargs)

    @property
    def text_limit(self) -> int | None:
        """The longest text."""
        return None if self.packing == "wrapped" else self.max_length

    def check_kind(self, kind: Kind) -> None:
        """Refuse options that do nothing for this kind of examples.

        Raises:
            ConfigError: an option that would do nothing for this kind.
        """
        for key, value, neutral, owner in (
            ("learn", self.learn, "completion", "texts"),
            ("packing", self.packing, "none", "texts"),
            ("last_step_only", self.last_step_only, False, "stepwise"),
        ):
            if value != neutral and kind != owner:
                raise ConfigError(
                    f"data.{key}={value} is for methods that learn from {owner}, and this one learns from {kind}: "
                    f"leave it at {neutral}."
                )
