"""The base of all data modules: rows, their order, the size of a step, and what is asked of Trainer and module."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import lightning as L
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError, DataError, in_range, seed_in_range
from lit_rl.core.other_names import refuse_unknown_keywords
from lit_rl.core.vision_inputs import PromptVision
from lit_rl.data.corpus import Corpus, CorpusReader, Report
from lit_rl.data.loaders import EvalLoader, plain_settings
from lit_rl.data.order import DEFAULT_STEP_ROWS, RolloutOrder, fit_step_rows
from lit_rl.data.prompt_set import PromptSet
from lit_rl.data.readers import OnBadRow
from lit_rl.data.row_visuals import MAX_IMAGE_PIXELS, ImagePixels
from lit_rl.data.rows import row_function
from lit_rl.data.set_reader import list_counts
from lit_rl.data.sources import SEVERAL_PATHS, GivenRows, Rows, is_data_set
from lit_rl.data.splits import RowSource, check_rows, parse_sources, refuse_text, require_exactly_one, val_sources
from lit_rl.data.tasks import Task
from lit_rl.data.visual_prompts import Processor
from lit_rl.ops.ranges import AtLeastOne


def check_keywords(kind: type, given: Iterable[str], taken: type) -> None:
    """Refuse keywords that no constructor of a data module takes.

    Args:
        kind: The class of the data module.
        given: The names of the keywords that are handed on.
        taken: The class whose constructor gets them, and its parents'.

    Raises:
        ConfigError: names the first of them, and what it is called here or what is near.
    """
    refuse_unknown_keywords(kind, given, taken, "data")


_HELD_OUT = 0.05
"""Default share of the prompts that is held out."""

_REASONS = {
    "bad": "not sound (data.on_bad_row=skip)",
    "empty": "empty",
    "equal": "with equal sides",
    "promptless": "without a common prompt",
    "overlong": "",
    "truncated": "cut",
}
"""Words for the counts of rows that are left out or cut."""


@checked("data")
class SourcedDataModule(L.LightningDataModule, ABC):
    """Rows and validation sets. Exactly one of `path`, `rows`, `task` and `sources` says where rows come from.

    Args:
        path: A .jsonl, .ndjson, .json, .parquet, .csv or .tsv file, a folder of `datasets`, or a hub id.
        split: The split of `path`.
        name: The configuration of `path`, for a hub id that has several.
        rows: The rows themselves. In Python also a `datasets.Dataset` or `IterableDataset`.
        task: An object whose `train()` and `val()` return rows, such as `lit_rl.data.tasks.Addition`. An empty `val()`
            means no validation.
        sources: Several sources, each `{path, split, name, weight, map_row, rename, columns}`. An epoch draws as many
            rows as there are, shared out by weight (1 if left out: equal shares, whatever the sizes). The last three
            are of the source alone, before those of all: a function, new names, and the columns that are kept.
        rename: New names of columns, old to new.
        map_row: A function from row to row, applied first, or its path: `./file.py:name`, `package.module:name`, or
            `package.module.name`, such as `lit_rl.data.recipes.gsm8k`.
        system_prompt: Opens every prompt that has no system message of its own; a string prompt becomes messages.
        chat_template_kwargs: Further arguments of the chat template.
        shuffle: A new order of the rows in every epoch.
        max_image_pixels: Width times height of an image, at most, by its header. For a model over images.
        on_bad_row: Action for a row that cannot be read or is not sound: `error` refuses the data, `skip` leaves it
            out.
        val: The validation rows themselves, as `rows`, or several sets by name.
        val_path: A validation set, or several by name. Read like `path`.
        val_split: The split of `val_path`, or of `path` where no `val_path` came; by name for several.
        val_fraction: Share of the prompts held out for validation, in [0, 1), where neither a `val_*` source nor a task
            gives any; 0 holds out none.
        val_batch_size: Rows of a validation batch, on each rank.
        seed: Seed of the order and of the held-out rows.
        allow_changed: Resume though the data or its order is no longer the checkpoint's.
    """

    size_name: ClassVar[str]
    """Name of the attribute and the setting that say how many rows a step has."""

    size_is_given: bool
    """True if the user chose the number of rows of a step; otherwise it is known once the rows are."""

    options: Any
    """Settings by which a row becomes an example: `PromptOptions` or `ExampleOptions`."""

    _fitted: int | None = None
    """Rows of a step that replace the default for a small set."""

    _corpus: Corpus[Any] | None = None

    def __init__(
        self,
        rows: GivenRows | None = None,
        *,
        path: str | None = None,
        split: str | None = None,
        name: str | None = None,
        task: Task | None = None,
        sources: list[dict[str, Any]] | None = None,
        rename: dict[str, str] | None = None,
        map_row: str | Callable | None = None,
        system_prompt: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        max_image_pixels: ImagePixels = MAX_IMAGE_PIXELS,
        shuffle: bool = True,
        on_bad_row: OnBadRow = "error",
        val: Any | None = None,
        val_path: str | dict[str, str] | None = None,
        val_split: str | dict[str, str] | None = None,
        val_fraction: float = _HELD_OUT,
        val_batch_size: AtLeastOne = 64,
        seed: int = 0,
        allow_changed: bool = False,
    ) -> None:
        super().__init__()
        require_exactly_one(path=path, rows=rows, task=task, sources=sources)
        if isinstance(path, list | tuple):
            raise ConfigError(SEVERAL_PATHS)
        if rows is not None:
            refuse_text("data.rows", rows)
        if path is None and (split is not None or name is not None):
            raise ConfigError("data.split and data.name belong to data.path, which is not set. Remove them.")
        if task is not None and (isinstance(task, type) or not (hasattr(task, "train") and hasattr(task, "val"))):
            raise ConfigError(
                f"data.task is {task!r:.60}. Allowed is an object whose train() and val() return rows, such as "
                "lit_rl.Addition()."
            )
        seed_in_range("data.seed", seed)
        if not 0 <= val_fraction < 1:
            raise ConfigError(f"data.val_fraction={val_fraction} is out of range: allowed is [0, 1).")
        one = RowSource(path, split, name) if path is not None else None
        self.sources = parse_sources(sources) if sources is not None else [one] if one else []
        self.weights = tuple(s.weight for s in self.sources) if sources is not None else None
        self.val_sources = val_sources(one, val_path, val_split)
        self.reading: dict[str, Any] = {
            "rename": rename or {},
            "map_row": row_function(map_row),
            "system_prompt": system_prompt,
            "chat_template_kwargs": chat_template_kwargs or {},
            "on_bad_row": on_bad_row,
            "max_image_pixels": max_image_pixels,
        }
        """Settings for reading rows of every kind: fields of `PromptOptions` and of `ExampleOptions`."""
        self.on_bad_row: OnBadRow = on_bad_row
        if val is not None and (val_path is not None or val_split is not None):
            raise ConfigError("data.val are validation rows, and data.val_path or data.val_split name others: set one.")
        self.rows, self.task, self.val = rows, task, val
        self.val_fraction, self.val_batch_size = val_fraction, val_batch_size
        self.shuffle, self.seed, self.allow_changed = shuffle, seed, allow_changed

    def train_rows(self) -> list[Rows]:
        """Load the rows of each source."""
        if self.rows is not None:
            return [check_rows("data.rows", self.rows)]
        if self.task is not None:
            return [check_rows("data.task.train()", self.task.train())]
        return [source.load(self.on_bad_row) for source in self.sources]

    def val_rows(self) -> dict[str, Rows]:
        """Load the rows of each validation set, by its name; a single unnamed one has an empty name."""
        if self.val is not None:
            sets = self.val if isinstance(self.val, dict) else {"": self.val}
            return {name: check_rows(f"data.val{f'.{name}' if name else ''}", rows) for name, rows in sets.items()}
        if self.val_sources or self.task is None:
            return {name: source.load(self.on_bad_row) for name, source in self.val_sources.items()}
        rows = self.task.val()
        return {"": check_rows("data.task.val()", rows)} if rows else {}

    def read_whole(self, reader: CorpusReader[Any, Any], val: dict[str, Rows]) -> Corpus[Any]:
        """Read the training rows, and hold some out where `val` has none."""
        self.log_if_unvalidated(val)
        return reader.whole(self.train_rows(), val, val_fraction=self.held_out(val), seed=self.seed)

    @property
    def sets(self) -> Corpus[Any]:
        """Everything that was read; without the training rows, where they are a stream.

        Raises:
            ConfigError: nothing was, yet.
        """
        if self._corpus is None:
            raise ConfigError("The data is not loaded yet: call `prepare(tokenizer)`; a Trainer does it by itself.")
        return self._corpus

    @property
    @abstractmethod
    def train_prompts(self) -> PromptSet:
        """Prompts of the training rows."""

    @property
    @abstractmethod
    def val_prompts(self) -> dict[str, PromptSet]:
        """Prompts of the validation sets that are generated from, in the order of the loaders; a single unnamed set has
        an empty name."""

    @property
    def val_names(self) -> list[str]:
        """Names of `val_prompts`."""
        return list(self.val_prompts)

    @property
    def val_columns(self) -> dict[str, list[str]]:
        """Columns of `val_prompts`, by name."""
        return {name: list(prompts.columns) for name, prompts in self.val_prompts.items()}

    @property
    def longest_val_prompt(self) -> int:
        """Tokens of the longest validation prompt of any set; 0 where there is none."""
        return max((len(ids) for prompts in self.val_prompts.values() for ids in prompts.prompt_ids), default=0)

    def first_shown(self) -> tuple[list[int], PromptVision | None] | None:
        """Return tokens and vision inputs of the first training prompt that shows images; None where none does."""
        return self.train_prompts.first_shown()

    def prompt_loaders(self) -> list[EvalLoader]:
        """Return the loaders of `val_prompts`."""
        sets, (rank, world_size) = self.val_prompts, self.rank()
        how = {"batch_size": self.val_batch_size, "rank": rank, "world_size": world_size}
        limit = self.module_attribute("evaluation").limit if sets else None
        return [EvalLoader(prompts, limit=limit, **how) for prompts in sets.values()]

    def place(self) -> dict[str, Any]:
        """Return the arguments of training loaders that are the same for rows of every kind: see `SlottedLoader`."""
        rank, world_size = self.rank()
        return {
            "rank": rank,
            "world_size": world_size,
            "limit": self.trainer_of_run().limit_train_batches,
            "allow_changed": self.allow_changed,
            "row_settings": self.made_by(self.module_attribute("tokenizer")),
        }

    def made_by(self, tokenizer: Any) -> dict[str, Any]:
        """Return what makes the training rows, by the names of settings: for a checkpoint, see `SlottedLoader`.

        Args:
            tokenizer: Tokenizer of the policy.
        """
        named = {f"data.{each.name}": getattr(self.options, each.name) for each in dataclasses.fields(self.options)}
        places = [(source.path, source.split, source.name) for source in self.sources]
        task = (
            None
            if self.task is None
            else (type(self.task).__qualname__, sorted(plain_settings(vars(self.task)).items()))
        )
        template = getattr(tokenizer, "chat_template", None)
        return plain_settings(
            named
            | {"data.path, data.split or data.name": places, "data.task": task, "data.val_fraction": self.val_fraction}
            | {"the chat template (model.chat_template, or the tokenizer's)": template}
        )

    @property
    def streamable(self) -> list[Any]:
        """Sources that can be read as their rows are needed."""
        return self.sources or ([self.rows] if is_data_set(self.rows) else [])

    def held_out(self, val: dict[str, Rows]) -> float:
        """Share of the training rows to hold out: none where there is validation data."""
        return 0.0 if self.task is not None or val else self.val_fraction

    def log_if_unvalidated(self, val: dict[str, Rows]) -> None:
        """Tell the user where a run has no validation data, and holds nothing out: it may not be meant so."""
        if self.val_fraction not in (0, _HELD_OUT) and not self.held_out(val):
            where = "data.val, data.val_path or data.val_split names" if val and self.task is None else "data.task has"
            rank_zero_info(f"data.val_fraction={self.val_fraction} holds nothing out: {where} the validation rows.")
        if val or self.held_out(val):
            return
        if self.task is None:
            why = "data.val_fraction=0, without data.val_path and data.val_split"
        else:
            why = "data.task.val_rows=0" if getattr(self.task, "val_rows", None) == 0 else "data.task.val() has no rows"
        rank_zero_info(f"There is no validation: {why}.")

    def log_row_counts(self, report: Report, limit: str, *, repeats: bool = False) -> None:
        """Tell the user in one line a set which rows were left out or cut, and how rows were held out.

        Args:
            report: Counts by set.
            limit: The setting that bounds lengths.
            repeats: Equal prompts in both sets are meant.
        """
        reasons = _REASONS | {"overlong": f"too long ({limit})"}
        for name, counts in report.items():
            if removed := [f"{counts[key]} {words}" for key, words in reasons.items() if counts.get(key)]:
                left = counts["kept"] + counts.get("held_out", 0)
                longest = f"; the longest has {counts['longest']} tokens" if counts.get("longest") else ""
                rank_zero_info(f"{name}: {left} of {counts['rows']} rows are left: {', '.join(removed)}{longest}.")
            overlap, held = counts.get("overlap"), report["train"].get("held_out")
            if overlap and name == "val" and held == overlap:
                rank_zero_info(f"All rows have one prompt, so rows are held out and not prompts: {held} of them.")
            elif overlap and not repeats:
                rank_zero_warn(f"{overlap} of {counts['kept']} rows of {name} have a training prompt.")
        if self.task is None and self.val_fraction and len(report) == 1 and report["train"].get("kept") == 1:
            rank_zero_info("There is no validation: there is one row, and it is trained on.")
        if (held := report["train"].get("held_out", 0)) > self._share_of(held + report["train"].get("kept", 0)):
            rank_zero_info(
                f"val: {held} rows are held out, more than data.val_fraction={self.val_fraction} of them: rows with "
                "equal prompts are held out together."
            )

    def _share_of(self, rows: int) -> int:
        return max(1, round(rows * self.val_fraction))

    def choose_step_rows(self, given: int | None) -> int:
        """Note the user's number of rows of a step, and return the number until the rows are known.

        Raises:
            ConfigError: it is below 1.
        """
        self.size_is_given = given is not None
        rows = DEFAULT_STEP_ROWS if given is None else given
        in_range(f"data.{self.size_name}", rows, low=1)
        return rows

    def fit_step_to(self, rows: int) -> None:
        """Set the rows of a step where the user chose none: as many as there are and as divide into the parts of a
        step, at most `DEFAULT_STEP_ROWS` or, where there are more parts than that, one for each.

        Args:
            rows: Rows left for training.
        """
        current = getattr(self, self.size_name)
        if self.size_is_given or current not in (DEFAULT_STEP_ROWS, self._fitted):
            return  # set by the user
        unit = self._unit()
        fits = fit_step_rows(rows, DEFAULT_STEP_ROWS, unit)
        if fits is not None and fits != current:
            parts = f", and a step divides into {unit} parts (minibatches, micro-batches, ranks)" if unit > 1 else ""
            rank_zero_info(
                f"data.{self.size_name}={fits}, in place of the default {DEFAULT_STEP_ROWS}: {rows} rows are left for "
                f"training{parts}."
            )
        self._fitted = fits
        setattr(self, self.size_name, fits or DEFAULT_STEP_ROWS)

    def order(self, shuffle: bool) -> RolloutOrder:
        """Return the order of the training rows in every epoch.

        Args:
            shuffle: A new order in every epoch.

        Raises:
            DataError: the rows do not fill one step, or a source has none left.
        """
        sizes, counts = self.sets.sizes, self.sets.report["train"]
        left, size = sum(sizes), getattr(self, self.size_name)
        if left < size:
            counted = f"{left} rows are left for training: {list_counts(counts)}"
            if (held := counts.get("held_out", 0)) > self._share_of(counts["kept"] + held):
                counted += ". Rows of equal prompts are held out together, or none of them is, and there are such rows"
            raise DataError(f"data.{self.size_name}={size}, and {counted}. {self._more_rows(left, size, held)}.")
        if 0 in sizes:
            raise DataError(f"data.sources[{sizes.index(0)}]: the filters left no row of it.")
        return RolloutOrder(sizes, size, self.seed, shuffle, self.weights)

    def _unit(self) -> int:
        """Return what the rows of a step have to be a multiple of, as far as a Trainer is there."""
        trainer: Any = self.trainer
        if trainer is None:
            return 1
        return getattr(trainer.lightning_module, "parts_of_step", 1) * self.rank()[1]

    def _more_rows(self, left: int, size: int, held: int) -> str:
        """Return the advice for rows that do not fill a step."""
        unit, key = self._unit(), f"data.{self.size_name}"
        chosen = size != DEFAULT_STEP_ROWS or self.size_is_given
        fixes = ["add rows", "loosen a filter"]
        if held and (left + held >= size or left < unit <= left + held):
            also = "" if left + held >= size or not chosen else f" and lower {key} to {left + held} or less"
            fixes.insert(1, f"hold none out with data.val_fraction=0 ({held} rows are){also}")
        if left >= unit:
            whole = f", a multiple of {unit}" if unit > 1 else ""
            fixes.append(f"lower {key} to {left // unit * unit} or less{whole}")
        advice = ", ".join(fixes[:-1]) + f" or {fixes[-1]}"
        return advice[0].upper() + advice[1:]

    def shuffles(self) -> bool:
        """Tell whether the training order is shuffled: `overfit_batches` means the same few batches again and again."""
        return self.shuffle and not getattr(self.trainer_of_run(), "overfit_batches", 0)

    def processor_of_run(self) -> Processor | None:
        """Return the vision processor of the run's policy; None for a policy over text, or a module of the user's
        without any."""
        return getattr(self._model_of_run(), "processor", None)

    def eos_ids_of_run(self) -> tuple[int, ...] | None:
        """Return every token at which the policy's generation ends; None where a module of the user's does not have
        them."""
        return getattr(self._model_of_run(), "eos_ids", None)

    def _model_of_run(self) -> Any:
        return getattr(self.trainer_of_run().lightning_module, "model", None)

    def trainer_of_run(self) -> L.Trainer:
        if self.trainer is None:
            raise ConfigError("The data module has no Trainer: pass it to one with `datamodule=`, or look with `peek`.")
        return self.trainer

    def module_attribute(self, name: str) -> Any:
        """Return an attribute of the run's LightningModule."""
        module = self.trainer_of_run().lightning_module
        if not hasattr(module, name):
            raise ConfigError(
                f"{type(self).__name__} works with the LightningModules of lit_rl that learn from its rows, and "
                f"{type(module).__name__} has no attribute {name!r}."
            )
        return getattr(module, name)

    def rank(self) -> tuple[int, int]:
        """Return this rank among those that have data of their own, and their number."""
        # Under tensor parallelism several ranks share their data, which only the strategy knows.
        shard = self.trainer_of_run().distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        return shard["rank"], shard["num_replicas"]
