"""Texts to imitate beside a reinforcement-learning objective: the pretraining mix of PPO-ptx (2203.02155, eq. 2)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lit_rl.core.declared_settings import checked
from lit_rl.core.episode import Prompt
from lit_rl.core.errors import ConfigError, DataError, did_you_mean, excerpt
from lit_rl.core.visuals import Visual
from lit_rl.data.encode import Encoder
from lit_rl.data.example_formats import Text, check_completions, check_conversation
from lit_rl.data.example_set import Encoded, Example, ExampleSet
from lit_rl.data.message_forms import normalize_messages, read_tools
from lit_rl.data.rendering import row_template_kwargs
from lit_rl.data.row_visuals import MAX_IMAGE_PIXELS, ImageReader, images_in, read_images
from lit_rl.data.rows import is_blank, split_prompt
from lit_rl.data.sources import Rows, load_rows
from lit_rl.data.visual_prompts import EqualVideos, count_placeholders
from lit_rl.ops.ranges import AtLeastOne, AtLeastTwo

_CHECKED_ROWS = 256
"""Rows without images that are rendered before a run begins, at up to some milliseconds each."""


@checked("algo.ptx")
@dataclass(frozen=True)
class SupervisedText:
    """An endless source of texts. The texts of a step are a function of its number and the seed: nothing to checkpoint.

    Every text comes once before any comes again. A text ends with EOS, unless `max_tokens` cuts it. Behind a prompt of
    messages it is the assistant's reply, in the chat template, with the row's `tools` and `chat_template_kwargs`. A
    prompt that fills `max_tokens` alone leaves nothing to learn, and counts nothing. A policy that sees learns rows
    with images and videos too, read as SFT reads them: in columns, or in parts of messages.

    Args:
        path: A file, a folder or a hub id, as `data.path`.
        batch_size: Texts of one optimizer step, over all its micro-batches and ranks.
        max_tokens: Longest text, prompt included, in tokens; what is longer is cut at the end.
        text_key: Column of the text that is learned, a string or the assistant's messages; without `prompt_key` also
            whole conversations, whose last reply is learned.
        prompt_key: Column of what stands before it and is not learned; null where there is none.
        split: The split, for what has splits.
        name: The configuration, for what has several on the hub.
    """

    path: str
    batch_size: AtLeastOne = 8
    max_tokens: AtLeastTwo = 512
    text_key: str = "text"
    prompt_key: str | None = None
    split: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.prompt_key == self.text_key:
            raise ConfigError(f"algo.ptx: prompt_key and text_key are both {self.text_key!r}: name two columns.")

    @cached_property
    def rows(self) -> Rows:
        """Every row, read once.

        Raises:
            DataError: nothing to read.
            BackendError: the hub cannot be reached.
        """
        try:
            return load_rows(self.path, split=self.split, name=self.name)
        except DataError as error:
            error.add_note("(the texts of algo.ptx)")
            raise

    def check(self, encoder: Encoder, max_image_pixels: int = MAX_IMAGE_PIXELS) -> Example | None:
        """Read every row; render the first of messages, and all that show images.

        A warning names what a chat template leaves out of these.

        Args:
            encoder: See `step`.
            max_image_pixels: See `step`.

        Returns:
            The row with most image tokens; None without images.

        Raises:
            DataError: a row lacks a column, cannot be rendered, shows an image that cannot be used or that `max_tokens`
                would cut, or holds a placeholder of images. The message names the file and the line.
            ConfigError: a row has images, and the policy reads text.
        """
        rows, videos = self.rows, EqualVideos(encoder.processor)
        largest, most = None, 0
        for index in range(len(rows)):
            prompt, text, images = self._parts(encoder, index, max_image_pixels)
            if not images:
                plain = "" if isinstance(text, list) else f"{prompt or ''}{text}"
                encoder.refuse_unseen(plain, rows.where(index))
                if isinstance(text, list) and index < _CHECKED_ROWS:
                    self._encode(encoder, index, prompt, text)
                continue
            videos.add(images, rows.where(index))
            example = self._encode(encoder, index, prompt, text, images)
            assert encoder.processor is not None
            count = count_placeholders(encoder.processor.placeholders, example.texts[0].ids)
            largest, most = (example, count) if count > most else (largest, most)
        encoder.left_out.warn()
        return largest

    def step(self, encoder: Encoder, index: int, seed: int, max_image_pixels: int = MAX_IMAGE_PIXELS) -> ExampleSet:
        """Return the texts of one optimizer step, the same on every rank: a rank's micro-batch takes its rows of them.

        Args:
            encoder: Encoder with the policy's tokenizer, and its processor where it sees.
            index: Number of the optimizer step, from 0.
            seed: Seed of the order of the texts.
            max_image_pixels: Width times height of an image, at most.

        Raises:
            DataError: a row cannot be read or tokenised.
            ConfigError: a row has images, and the policy reads text.
        """
        drawn = self._drawn(index, seed)
        examples = [self._encode(encoder, row, *self._parts(encoder, row, max_image_pixels)) for row in drawn]
        assert isinstance(encoder.tokenizer.pad_token_id, int)
        return ExampleSet("texts", examples, encoder.tokenizer.pad_token_id, processor=encoder.processor)

    def _drawn(self, index: int, seed: int) -> list[int]:
        """Return the row indices of a step: one permutation of all rows after another."""
        size, start = len(self.rows), index * self.batch_size
        stop = start + self.batch_size
        cycles = range(start // size, (stop - 1) // size + 1)
        orders = [np.random.default_rng([seed, cycle]).permutation(size) for cycle in cycles]
        return np.concatenate(orders)[start - cycles[0] * size :][: self.batch_size].tolist()

    def _encode(
        self, encoder: Encoder, index: int, prompt: Prompt | None, text: Text, images: tuple[Visual, ...] = ()
    ) -> Example:
        """Return the parts of a row as tokens, with what it shows."""
        row, where = self.rows[index], self.rows.where(index)
        own, tools = encoder, None
        if isinstance(text, list):
            own, tools = encoder.with_kwargs(row_template_kwargs(row, where)), read_tools(row.get("tools"), where)
        whole = own.encode(prompt, text, where, tools=tools, images=images)
        if images and whole.prompt_tokens > self.max_tokens:
            raise DataError(
                f"{where}: the prompt has {whole.prompt_tokens} tokens with its images, algo.ptx.max_tokens="
                f"{self.max_tokens}, and a cut would go through its images. Raise it, or shrink the images."
            )
        end = max(i for i, flag in enumerate(whole.learned) if flag) + 1  # white space behind it teaches nothing
        kept = slice(min(end, self.max_tokens))
        cut = Encoded(whole.ids[kept], whole.learned[kept], min(whole.prompt_tokens, self.max_tokens))
        return Example((cut,), where, shown=whole.shown)

    def _parts(
        self, encoder: Encoder, index: int, max_image_pixels: int
    ) -> tuple[Prompt | None, Text, tuple[Visual, ...]]:
        """Return prompt and text of a row, both strings or both messages, and what the prompt shows."""
        try:
            row, images = self._shown(encoder, index, max_image_pixels)
            prompt, text = self._split(row, self.rows.where(index))
        except DataError as error:
            error.add_note("(a row of algo.ptx, whose columns are algo.ptx.prompt_key and algo.ptx.text_key)")
            raise
        return prompt, text, self._first_shown.setdefault(index, images) if images else ()

    def _shown(self, encoder: Encoder, index: int, max_image_pixels: int) -> tuple[dict[str, Any], tuple[Visual, ...]]:
        """Return a row with its images taken out of messages and columns, and these."""
        row, where, key = self._row(index), self.rows.where(index), self.prompt_key
        if self.text_key not in row:
            raise DataError(
                f"{where}: no column {self.text_key!r}; columns found: {', '.join(row) or 'none'}. Name the text's "
                f"column with algo.ptx.text_key.{did_you_mean(self.text_key, row)}"
            )
        text = row[self.text_key]
        held = images_in(row, *filter(None, (key, self.text_key)))
        if encoder.processor is None:
            if held:
                raise ConfigError(
                    f"{where}: the row has images or videos ({held}), and the policy is a language model over text. "
                    "Set model= to one that sees, such as smolvlm_256m, or take the row out of algo.ptx.path."
                )
            return row, ()
        if key is None and isinstance(text, str):
            if held:
                raise DataError(
                    f"{where}: the row has images or videos ({held}), and no prompt that shows them: name its column "
                    "with algo.ptx.prompt_key."
                )
            return row, ()
        reader = ImageReader(self.rows.folder, max_image_pixels, self._chat)
        shows, answers = (self.text_key, ()) if key is None else (key, (self.text_key,))
        return read_images(reader, row, where, shows, without=answers)

    def _split(self, row: dict[str, Any], where: str) -> tuple[Prompt | None, Text]:
        """Return prompt and text of a row without images."""
        text, key = row[self.text_key], self.prompt_key
        prompt = None if key is None else split_prompt(row, where, prompt_key=key)[0]
        if isinstance(text, list) and key is None:
            messages = check_conversation(text, f"{where}: {self.text_key}")
            assert isinstance(messages, list)
            prompt, text = messages[:-1], [each for each in messages[-1:] if each["role"] == "assistant"]
        elif isinstance(text, list) or isinstance(prompt, list):
            prompt, (text,) = check_completions(prompt, {self.text_key: text}, where, None)
        if not isinstance(text, str | list) or is_blank(text):
            raise DataError(
                f"{where}: {self.text_key} is {excerpt(repr(row[self.text_key]))}; a text that is not empty is needed, "
                "or messages of which the last is the assistant's."
            )
        return prompt, text

    def _row(self, index: int) -> dict[str, Any]:
        """Return a row with its messages in one form. A text stays one, also where it writes messages out."""
        row, where = self.rows[index], self.rows.where(index)
        held = {name: row[name] for name in (self.prompt_key, self.text_key) if name in row}
        held = {name: value for name, value in held.items() if name == self.prompt_key or isinstance(value, list)}
        return {**row, **normalize_messages(held, where, *held)[0]}

    @cached_property
    def _chat(self) -> bool:
        """True if images come with a plain prompt: all plain prompts are messages then, as in SFT."""
        rows = map(self._row, range(len(self.rows)))
        return any(isinstance(row.get(self.prompt_key or ""), str) and images_in(row) for row in rows)

    @cached_property
    def _first_shown(self) -> dict[int, tuple[Visual, ...]]:
        """The images of rows as they were first read: a file that changes later is an error."""
        return {}
