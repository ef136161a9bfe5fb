"""Texts to imitate beside a reinforcement-learning objective: the pretraining mix of PPO-ptx (2203.02155, eq. 2)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lit_rl.core.declared_settings import checked
from lit_rl.core.episode import Prompt
from lit_rl.core.errors import ConfigError, DataError, did_you_mean, excerpt
from lit_rl.core.examples import TokenBatch
from lit_rl.data.encode import Encoder
from lit_rl.data.example_set import Encoded, token_batch
from lit_rl.data.message_forms import normalize_messages, read_tools
from lit_rl.data.rendering import row_template_kwargs
from lit_rl.data.row_visuals import images_in
from lit_rl.data.rows import split_prompt
from lit_rl.data.sources import Rows, load_rows
from lit_rl.data.visual_prompts import Processor, refuse_reserved
from lit_rl.ops.ranges import AtLeastOne, AtLeastTwo

_CHECKED_ROWS = 256
"""Rows that are rendered before a run begins, at up to some milliseconds each."""


@checked("algo.ptx")
@dataclass(frozen=True)
class SupervisedText:
    """An endless source of texts. The texts of a step are a function of its number and the seed: nothing to checkpoint.

    Every text comes once before any comes again. A text ends with EOS, unless `max_tokens` cuts it. Behind a prompt of
    messages it is the assistant's reply, in the chat template, with the row's `tools` and `chat_template_kwargs`. A
    prompt that fills `max_tokens` alone leaves nothing to learn, and counts nothing.

    Args:
        path: A file, a folder or a hub id, as `data.path`.
        batch_size: Texts of one optimizer step, over all its micro-batches and ranks.
        max_tokens: Longest text, prompt included, in tokens; what is longer is cut at the end.
        text_key: Column of the text that is learned.
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
        """Every row, read once and checked.

        Raises:
            DataError: nothing to read, or a row without the columns. The message names the file and the line.
            BackendError: the hub cannot be reached.
        """
        try:
            rows = load_rows(self.path, split=self.split, name=self.name)
        except DataError as error:
            error.add_note("(the texts of algo.ptx)")
            raise
        for index in range(len(rows)):
            self._parts(rows, index)
        return rows

    def check(self, encoder: Encoder, processor: Processor | None) -> None:
        """Read the rows, render the first of messages, and look at what a policy that sees could take for an image.

        A warning names what a chat template leaves out of these.

        Args:
            encoder: See `batch`.
            processor: Processor of the policy; None: it reads text.

        Raises:
            DataError: as `rows`; a text holds a placeholder of images; or one of the first 256 rows cannot be rendered.
        """
        rows = self.rows
        for index in range(len(rows)):
            prompt, text = self._parts(rows, index)
            if processor is not None:
                refuse_reserved(processor, text, rows.where(index))
            if isinstance(prompt, list) and index < _CHECKED_ROWS:
                self._encode(encoder, index)
        encoder.left_out.warn()

    def batch(self, encoder: Encoder, index: int, seed: int) -> TokenBatch:
        """Return the texts of one optimizer step, the same on every rank: a rank's micro-batch takes its rows of them.

        Args:
            encoder: Encoder with the policy's tokenizer.
            index: Number of the optimizer step, from 0.
            seed: Seed of the order of the texts.

        Raises:
            DataError: a row cannot be read or tokenised.
        """
        texts = [[self._encode(encoder, row)] for row in self._drawn(index, seed)]
        assert isinstance(encoder.tokenizer.pad_token_id, int)
        return token_batch(texts, encoder.tokenizer.pad_token_id)

    def _drawn(self, index: int, seed: int) -> list[int]:
        """Return the row indices of a step: one permutation of all rows after another."""
        size, start = len(self.rows), index * self.batch_size
        stop = start + self.batch_size
        cycles = range(start // size, (stop - 1) // size + 1)
        orders = [np.random.default_rng([seed, cycle]).permutation(size) for cycle in cycles]
        return np.concatenate(orders)[start - cycles[0] * size :][: self.batch_size].tolist()

    def _encode(self, encoder: Encoder, index: int) -> Encoded:
        """Return a row as tokens."""
        row, where = self.rows[index], self.rows.where(index)
        prompt, text = self._parts(self.rows, index)
        if isinstance(prompt, list):
            own, tools = encoder.with_kwargs(row_template_kwargs(row, where)), read_tools(row.get("tools"), where)
            whole = own.encode(prompt, [{"role": "assistant", "content": text}], where, tools=tools)
        else:
            whole = encoder.encode(prompt, text, where)
        end = max(i for i, flag in enumerate(whole.learned) if flag) + 1  # white space behind it teaches nothing
        kept = slice(min(end, self.max_tokens))
        return Encoded(whole.ids[kept], whole.learned[kept], min(whole.prompt_tokens, self.max_tokens))

    def _parts(self, rows: Rows, index: int) -> tuple[Prompt | None, str]:
        """Return prompt and text of a row."""
        row, where = rows[index], rows.where(index)
        if self.text_key not in row:
            raise DataError(
                f"{where}: no column {self.text_key!r}; columns found: {', '.join(row) or 'none'}. Name the text's "
                f"column with algo.ptx.text_key.{did_you_mean(self.text_key, row)}"
            )
        text = row[self.text_key]
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{where}: {self.text_key} is {excerpt(repr(text))}; a text that is not empty is needed.")
        if held := images_in(row, self.prompt_key or self.text_key):
            raise DataError(f"{where}: the row has images ({held}), and algo.ptx reads text alone.")
        if self.prompt_key is None:
            return None, text
        try:
            normalized, _ = normalize_messages(
                {key: row[key] for key in (self.prompt_key,) if key in row}, where, self.prompt_key
            )
            return split_prompt(normalized or row, where, prompt_key=self.prompt_key)[0], text
        except DataError as error:
            error.add_note("(the prompts of algo.ptx, whose column is algo.ptx.prompt_key)")
            raise
