"""Inputs of a vision model beside tokens: made once per prompt, indexed by rows, joined for each pass.

A processor is asked one prompt at a time. Of its tensors, those with one value per token of the prompt
(`token_type_ids`) are padded on the left like the prompt and continue over the response with one value of the
family; all others (pixels, grids, sizes) are padded with zeros behind their trailing dimensions and joined
along the first. That equals what processors make of a batch themselves, to the bit, in eleven families of
transformers. So rows of a rollout hold the number of a prompt, and pixels are neither repeated for a group nor
stored. Images that a tool or an environment returns between two turns are made the same way, one answer at a
time, and belong to their row alone (`Later`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class Picture(Protocol):
    """An image, `lit_rl.core.visuals.ImageRef`, or a video, `lit_rl.core.visuals.VideoRef`."""

    def open(self) -> Any:
        """Return its pixels, a PIL image in mode RGB, or a list of them."""
        ...


class Source(Protocol):
    """The source of the vision inputs of a prompt: `lit_rl.data.visual_prompts.PromptVisuals`."""

    @property
    def text(self) -> str:
        """The rendered prompt, placeholders not expanded."""
        ...

    @property
    def visuals(self) -> Sequence[Picture]:
        """Its images and videos; those of a kind in their order."""
        ...


@dataclass(frozen=True)
class PromptVision:
    """Vision inputs of one prompt with images, on the CPU."""

    inputs: Mapping[str, Tensor]
    """Joined along the first dimension, which counts images, tiles, patches, videos or frames."""
    per_token: Mapping[str, Tensor] = field(default_factory=dict)
    """Long ``(n,)`` each: a value for each token of the prompt."""
    in_response: Mapping[str, int] = field(default_factory=dict)
    """The value of each of `per_token` at tokens of a response."""
    row: int = -1
    """Number of the prompt in its data set, by which it is made again after a resume."""
    source: Source | None = field(default=None, repr=False)
    """The text and images from which it was made, for an engine that makes tokens and pixels itself. None if
    unknown."""
    from_environment: bool = False
    """True if an environment gave some of the images. No row of the data has these: a checkpoint keeps `source`."""

    def first(self, tokens: int) -> PromptVision:
        """Return the inputs for the first `tokens` tokens of the prompt, where its last one joins what follows. 0 is
        all."""
        if not tokens:
            return self
        return replace(self, per_token={name: values[:tokens] for name, values in self.per_token.items()})

    def continued(self, tokens: int) -> PromptVision:
        """Return the inputs for the prompt and `tokens` text tokens after it, read together as a prompt."""
        longer = {
            name: torch.cat([values, values.new_full((tokens,), self.in_response[name])])
            for name, values in self.per_token.items()
        }
        return replace(self, per_token=longer)


@dataclass(frozen=True)
class Later:
    """Images that a row sees behind its prompt: of one piece of an answer."""

    column: int
    """Column of the piece's first token, from the response's first (in `EnvironmentTurn`, from the answer's)."""
    seen: PromptVision
    """The inputs, with values of the piece's tokens in `per_token`."""
    tokens: int
    """Tokens of the piece, images included."""

    def moved(self, columns: int) -> Later:
        """Return the same images `columns` tokens further right."""
        return replace(self, column=self.column + columns)

    def from_column(self, first: int) -> Later:
        """Return the same images after the columns before `first`, which hold no image, are dropped."""
        cut = max(first - self.column, 0)
        if not cut:
            return self.moved(-first)
        kinds = {name: values[cut:] for name, values in self.seen.per_token.items()}
        return Later(0, replace(self.seen, per_token=kinds), self.tokens - cut)


def with_later(prompt: PromptVision | None, n: int, later: Sequence[Later], tokens: int) -> PromptVision | None:
    """Return the inputs for a prompt of `n` tokens and `tokens` more with images among them, read together as a
    prompt."""
    if not later:
        return None if prompt is None else prompt.continued(tokens)
    seen = [*([] if prompt is None else [prompt]), *(each.seen for each in later)]
    vision = Vision.of([prompt], 1, [tuple(later)])
    assert vision is not None
    lines = vision.per_token(n, tokens, torch.device("cpu"))
    return PromptVision(
        vision.inputs(torch.device("cpu")),
        {name: line[0] for name, line in lines.items()},
        {name: fill for each in seen for name, fill in each.in_response.items()},
        row=-1 if prompt is None else prompt.row,
    )


class Vision:
    """Vision inputs of rows: the prompt of each, and the images in its response. To be treated as frozen.

    No dataclass, since Lightning's precision plugins would take it apart with the batch.

    Args:
        prompts: None: a prompt without images.
        index: Long ``(b,)``, on the CPU: the number of each row's prompt.
        later: The images in each row's response, from left to right. Empty: there are none.
    """

    def __init__(
        self, prompts: Sequence[PromptVision | None], index: Tensor, later: Sequence[tuple[Later, ...]] = ()
    ) -> None:
        self.prompts, self.index = tuple(prompts), index
        self.later = tuple(later) if any(later) else ()

    @classmethod
    def of(
        cls, prompts: Sequence[PromptVision | None], group_size: int, later: Sequence[tuple[Later, ...]] = ()
    ) -> Vision | None:
        """Make the inputs for `group_size` rows per prompt; None where no row sees anything."""
        if all(each is None for each in prompts) and not any(later):
            return None
        return cls(prompts, torch.arange(len(prompts)).repeat_interleave(group_size), later)

    @classmethod
    def blind(cls, rows: int, later: Sequence[tuple[Later, ...]] = ()) -> Vision:
        """Make the inputs for rows whose prompts have no images."""
        return cls((None,), torch.zeros(rows, dtype=torch.long), later)

    def __len__(self) -> int:
        return len(self.index)

    def select(self, rows: Tensor) -> Vision:
        """Return the given rows."""
        rows = rows.to(self.index.device)
        later = [self.later[row] for row in rows.tolist()] if self.later else ()
        return Vision(self.prompts, self.index[rows], later)

    def joined(self, other: Vision) -> Vision:
        """Return the rows of both."""
        index = torch.cat([self.index, other.index + len(self.prompts)])
        later = (*self.later_of_rows, *other.later_of_rows)
        return Vision((*self.prompts, *other.prompts), index, later)

    def used(self) -> Vision:
        """Return the same without prompts that no row refers to."""
        numbers, index = self.index.unique(return_inverse=True)
        return Vision([self.prompts[number] for number in numbers.tolist()], index, self.later)

    @property
    def later_of_rows(self) -> tuple[tuple[Later, ...], ...]:
        """The images in each row's response."""
        return self.later or ((),) * len(self)

    @property
    def rows(self) -> list[PromptVision | None]:
        """One a row."""
        return [self.prompts[number] for number in self.index.tolist()]

    def model_inputs(self, prompt: int, response: int, device: torch.device) -> dict[str, Tensor]:
        """Return keyword arguments of a pass over these rows, beside ids and mask; none where no row has images.

        Args:
            prompt: Columns of the prompts, which are padded on the left.
            response: Columns behind them.
            device: Of the pass.
        """
        return self.inputs(device) | self.per_token(prompt, response, device)

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        """Return those of `model_inputs` that are joined along images, tiles or patches."""
        known = self._known()
        names = dict.fromkeys(name for row in known for name in row.inputs)
        found = {name: _joined([row.inputs[name] for row in known if name in row.inputs]) for name in names}
        return {name: value.to(device, non_blocking=True) for name, value in found.items()}

    def per_token(self, prompt: int, response: int, device: torch.device) -> dict[str, Tensor]:
        """Return those of `model_inputs` with a value for each token: long ``(b, prompt + response)``."""

        def line(values: Tensor, fill: int) -> Tensor:
            there = values[-prompt:] if prompt else values[:0]
            return torch.cat([values.new_zeros(prompt - len(there)), there, values.new_full((response,), fill)])

        lines = self._lines(line, torch.device("cpu"))
        for row, later in enumerate(self.later):
            for each in later:
                for name, values in each.seen.per_token.items():
                    at = prompt + each.column
                    lines[name][row, at : at + each.tokens] = values
        return {name: value.to(device, non_blocking=True) for name, value in lines.items()}

    def per_text_token(self, width: int, device: torch.device) -> dict[str, Tensor]:
        """Return `per_token` for texts ``(b, width)`` that begin with their prompts and are padded on the right."""

        def line(values: Tensor, fill: int) -> Tensor:
            there = values[:width]
            return torch.cat([there, values.new_full((width - len(there),), fill)])

        return self._lines(line, device)

    def _known(self) -> list[PromptVision]:
        """Return all inputs that the rows see, in the order of their tokens."""
        found: list[PromptVision] = []
        for row, later in zip(self.rows, self.later_of_rows, strict=True):
            found += [] if row is None else [row]
            found += [each.seen for each in later]
        return found

    def _lines(self, line: Callable[[Tensor, int], Tensor], device: torch.device) -> dict[str, Tensor]:
        rows, fills = self.rows, dict[str, int]()
        for each in self._known():
            fills |= each.in_response
        none = torch.zeros(0, dtype=torch.long)
        found = {
            name: torch.stack([line(none if row is None else row.per_token[name], fill) for row in rows])
            for name, fill in fills.items()
        }
        return {name: value.to(device, non_blocking=True) for name, value in found.items()}


def _joined(parts: Sequence[Tensor]) -> Tensor:
    widest = [max(part.shape[d] for part in parts) for d in range(1, parts[0].ndim)]
    padded = []
    for part in parts:
        missing = [width - size for width, size in zip(widest, part.shape[1:])]
        padded.append(F.pad(part, [end for count in reversed(missing) for end in (0, count)]))
    return torch.cat(padded)
