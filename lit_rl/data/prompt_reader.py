"""Rows become prompts to be answered, formatted and tokenised once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lit_rl.core.declared_settings import checked
from lit_rl.core.episode import Prompt
from lit_rl.core.errors import ConfigError, DataError
from lit_rl.data.encode import Encoder
from lit_rl.data.message_forms import read_tools
from lit_rl.data.prompt_set import PromptExample
from lit_rl.data.rendering import KWARGS_COLUMN, row_template_kwargs
from lit_rl.data.rows import add_system_prompt, is_blank, split_prompt
from lit_rl.data.set_reader import RowOptions, SetReader, read_source
from lit_rl.data.sources import Rows
from lit_rl.data.visual_prompts import PromptVisuals
from lit_rl.ops.ranges import AtLeastOne

Overlong = Literal["drop", "truncate_left", "error"]


@checked("data")
@dataclass(frozen=True, kw_only=True)
class PromptOptions(RowOptions):
    """Settings by which a row becomes a prompt; the fields are those of `RolloutDataModule`."""

    prompt_key: str = "prompt"
    max_prompt_tokens: AtLeastOne = 512
    overlong: Overlong = "drop"


class PromptReader(SetReader[PromptExample, PromptExample | None]):
    """A reader of rows with prompts; see `SetReader`."""

    label = "tokenising prompts"
    filters = ("empty",)

    def __init__(
        self, encoder: Encoder, options: PromptOptions, folder: Path | None = None, chat: bool = False
    ) -> None:
        super().__init__(encoder, options, folder, chat)
        self.options = options
        self.forms: dict[type, str] = {}

    def encode(self, row: dict[str, Any], where: str) -> tuple[str, PromptExample | None, int]:
        options = self.options
        row, images = self.take(row, where, options.prompt_key)
        prompt, columns = split_prompt(row, where, prompt_key=options.prompt_key)
        self.forms.setdefault(type(prompt), where)
        if is_blank(prompt):
            return "empty", None, 0
        self.note_system(prompt, where)
        prompt = add_system_prompt(prompt, options.system_prompt)
        own = row_template_kwargs(columns, where)
        if own and isinstance(prompt, str):
            self.note(
                f"the column {KWARGS_COLUMN} does nothing: the prompt is plain text, without a chat template", where
            )
        columns |= {KWARGS_COLUMN: own or None} if KWARGS_COLUMN in columns else {}
        tools = self._tools(prompt, columns.get("tools"), where)
        columns |= {"tools": tools} if tools else {}
        encoder, shown = self.encoder.with_kwargs(own), None
        if images and self.processor is not None and not isinstance(prompt, str):
            text = encoder.render_prompt(prompt, where, tools=tools)
            self.videos.check(images, where)
            ids, _ = self.processor.process(text, images, where)
            shown = PromptVisuals(text, images, where)
        else:
            encoder.refuse_unseen(prompt if isinstance(prompt, str) else "", where)
            ids = encoder.prompt_ids(prompt, where, tools=tools)
        return "", PromptExample(prompt, ids, columns, where, shown), len(ids)

    def keep(self, found: PromptExample | None, where: str) -> tuple[str, list[PromptExample]]:
        assert found is not None
        limit, overlong = self.options.max_prompt_tokens, self.options.overlong
        if len(found.prompt_ids) <= limit:
            if found.shown is not None:
                self.videos.add(found.shown.visuals, where)
            return "kept", [found]
        if overlong == "drop":
            return "overlong", []
        if overlong == "error":
            raise DataError(
                f"{where}: the prompt has {len(found.prompt_ids)} tokens, data.max_prompt_tokens={limit}. Raise it, or "
                "set data.overlong to drop or truncate_left."
            )
        if found.shown:
            raise ConfigError(
                f"{where}: the prompt has {len(found.prompt_ids)} tokens with its images, data.max_prompt_tokens="
                f"{limit}, and data.overlong=truncate_left would cut through an image. Use drop or error, raise the "
                "limit, or make images smaller."
            )
        return "kept truncated", [replace(found, prompt_ids=found.prompt_ids[-limit:])]

    def check_alike(self) -> None:
        if len(self.forms) > 1:
            raise DataError(
                f"Prompts of two kinds: {self.forms[str]} is a string, {self.forms[list]} a list of messages. "
                "Make all of them one kind, for example with data.map_row."
            )

    def _tools(self, prompt: Prompt, column: Any, where: str) -> list[Any] | None:
        """Return the schemas for the chat template; a column of anything else is for rewards alone."""
        if not column:
            return None
        try:
            tools = read_tools(column, where)
        except DataError:
            self.note("the column tools holds no JSON schemas: rewards see it, the chat template does not", where)
            return None
        if isinstance(prompt, str):
            self.note("the column tools is not shown: the prompt is plain text, without a chat template", where)
            return None
        return tools


def read_prompts(rows: Rows, encoder: Encoder, options: PromptOptions) -> tuple[list[PromptExample], Counter[str]]:
    """Return every row that passes the filters, and the counts of `SetReader.read`.

    `rows = bad + empty + overlong + kept`.

    Raises:
        DataError: as `SetReader.read`; texts and messages mixed; an overlong prompt where `overlong` is `error`.
        ConfigError: an overlong prompt with images where `overlong` is `truncate_left`.
    """
    kept, counts, _ = read_source(rows, lambda chat: PromptReader(encoder, options, rows.folder, chat))
    return kept, counts
