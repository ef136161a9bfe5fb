"""What the data modules share whose rows are learned from as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lightning.pytorch.utilities import rank_zero_warn

from lit_rl.data.corpus import list_counts, set_key
from lit_rl.data.loader import EvalLoader
from lit_rl.data.offline.corpus import ExampleCorpus, read_example_corpus
from lit_rl.data.offline.example import Kind
from lit_rl.data.offline.loader import ExampleEvalLoader, ExampleLoader
from lit_rl.data.offline.read import ExampleOptions
from lit_rl.data.order import RolloutOrder
from lit_rl.data.sourced import SourcedDataModule
from lit_rl.errors import ConfigError, in_range

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ExampleDataModule(SourcedDataModule):
    """What the three share. Exactly one of `path`, `rows`, `task` and `sources` says where rows come from.

    The format of the rows is recognised from their columns; every row left out is counted in `report`.

    Args:
        path: A .jsonl, .ndjson, .json, .parquet, .csv or .tsv file, a folder of `datasets`, or a hub id.
        split: The split of `path`.
        name: The configuration of `path`, for a hub id that has several.
        rows: The rows themselves.
        task: An object whose `train()` and `val()` return rows. An empty `val()` means no validation.
        sources: Several sources, each `{path, split, name, weight}`. An epoch draws as many rows as there are, shared
            out by weight (1 if left out: equal shares, whatever the sizes).
        rename: New names of columns, old to new.
        map_row: A function from row to row, applied first.
        system_prompt: Opens every prompt that has no system message of its own; a string prompt becomes messages.
        chat_template_kwargs: Further arguments of the chat template.
        batch_size: Rows of one optimizer step, over all its micro-batches and ranks.
        shuffle: A new order of the rows in every epoch.
        max_length: Longest text, prompt included, in tokens; null is no limit.
        max_completion_tokens: Longest completion, in tokens; null is no limit of its own.
        keep: Which end of a too long text stays: `start` cuts the end of the completion, `end` the start of the prompt.
        overlong: What to do with a too long row: `truncate`, `drop` (and count it), or `error`.
        on_bad_row: What to do with a row that cannot be read: `error` refuses the data, `skip` leaves it out.
        val_path: A validation set, or several by name. Read like `path`.
        val_split: The split of `val_path`, or of `path` where no `val_path` came; by name for several.
        val_fraction: Share of the prompts held out for validation, in [0, 1), where neither a `val_*` source nor a task
            gives any; 0 holds out none.
        val_batch_size: Rows of a validation batch, on each rank.
        seed: Seed of the order and of the held-out rows.
        allow_changed: Resume though the data or its order is no longer the checkpoint's.
    """

    serves: ClassVar[tuple[Kind, ...]] = ()
    """The kinds of examples that it can make."""

    def __init__(
        self,
        *,
        path: str | None = None,
        split: str | None = None,
        name: str | None = None,
        rows: list[dict[str, Any]] | None = None,
        task: Any | None = None,
        sources: list[dict[str, Any]] | None = None,
        rename: dict[str, str] | None = None,
        map_row: Callable | None = None,
        system_prompt: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        batch_size: int = 32,
        shuffle: bool = True,
        max_length: int | None = 1024,
        max_completion_tokens: int | None = None,
        keep: Literal["start", "end"] = "start",
        overlong: Literal["truncate", "drop", "error"] = "truncate",
        on_bad_row: Literal["error", "skip"] = "error",
        val_path: str | dict[str, str] | None = None,
        val_split: str | dict[str, str] | None = None,
        val_fraction: float = 0.05,
        val_batch_size: int = 32,
        seed: int = 0,
        allow_changed: bool = False,
        **own: Any,
    ) -> None:
        super().__init__(
            path=path,
            split=split,
            name=name,
            rows=rows,
            task=task,
            sources=sources,
            on_bad_row=on_bad_row,
            val_path=val_path,
            val_split=val_split,
            val_fraction=val_fraction,
            val_batch_size=val_batch_size,
            shuffle=shuffle,
            seed=seed,
            allow_changed=allow_changed,
        )
        in_range("data.batch_size", batch_size, low=1)
        self.batch_size = batch_size
        self.options = ExampleOptions(
            rename=rename or {},
            map_row=map_row,
            system_prompt=system_prompt,
            chat_template_kwargs=chat_template_kwargs or {},
            max_length=max_length,
            max_completion_tokens=max_completion_tokens,
            keep=keep,
            overlong=overlong,
            on_bad_row=on_bad_row,
            **own,
        )
        self._read_for: tuple[Any, Kind] | None = None
        self._corpus: ExampleCorpus | None = None

    def prepare(self, tokenizer: PreTrainedTokenizerBase, kind: Kind | None = None, *, stage: str = "fit") -> None:
        """Read, tokenise, split and count, once for a tokenizer. Needs no weights.

        Args:
            tokenizer: The policy's.
            kind: What the method learns from; None is the first of `serves`.
            stage: For `fit` there must be rows for one step.

        Raises:
            ConfigError: this data module makes no examples of that kind.
            DataError: a set cannot be used; for the stage `fit` also where its rows do not fill one step.
            BackendError: the hub cannot be reached.
        """
        kind = kind or (self._read_for[1] if self._read_for else self.serves[0])
        if kind not in self.serves:
            raise ConfigError(
                f"{type(self).__name__} makes {' or '.join(self.serves)}, and the algorithm needs {kind}."
            )
        if self._read_for is None or self._read_for[0] is not tokenizer or self._read_for[1] != kind:
            self._corpus = self._read(tokenizer, kind)
            self._read_for = (tokenizer, kind)
        if stage == "fit":
            self._order(self.shuffle)

    def setup(self, stage: str) -> None:
        self.prepare(self.module_attribute("tokenizer"), self.module_attribute("learns_from"), stage=stage)

    @property
    def report(self) -> dict[str, dict[str, int]]:
        """Counts of each set, `train` and `val` or `val/<name>`, by filter: see `read_example_corpus`."""
        return self.corpus.report

    @property
    def corpus(self) -> ExampleCorpus:
        """Everything that was read.

        Raises:
            ConfigError: nothing was, yet.
        """
        if self._corpus is None:
            raise ConfigError("The data is not loaded yet: call `prepare(tokenizer)`; a Trainer does it by itself.")
        return self._corpus

    @property
    def val_names(self) -> list[str]:
        """Names of the validation sets that have prompts to generate from, in the order of the first loaders."""
        if not self._generates:
            return []
        return [name for name, examples in self.corpus.val.items() if len(examples.prompts)]

    @property
    def _generates(self) -> bool:
        """Whether the run's module writes; one that only scores has no use for prompts."""
        module = None if self.trainer is None else self.trainer.lightning_module
        return getattr(module, "generates", True)

    @property
    def val_columns(self) -> dict[str, list[str]]:
        """Columns of the validation sets that have prompts, by name."""
        return {name: list(self.corpus.val[name].prompts.columns) for name in self.val_names}

    @property
    def loss_names(self) -> list[str]:
        """Names of all validation sets, in the order of the loaders after those of prompts."""
        return list(self.corpus.val)

    @property
    def longest_text(self) -> int:
        """Tokens of the longest row of any set."""
        sets = (self.corpus.train, *self.corpus.val.values())
        return max(examples.longest for examples in sets)

    @property
    def longest_val_prompt(self) -> int:
        """Tokens of the longest validation prompt of any set; 0 where there is none."""
        sets = (self.corpus.val[name].prompts for name in self.val_names)
        return max((len(ids) for prompts in sets for ids in prompts.prompt_ids), default=0)

    def train_dataloader(self) -> ExampleLoader:
        trainer, (rank, world_size) = self.trainer_of_run(), self.rank()
        return ExampleLoader(
            self.corpus.train,
            self._order(self.shuffles()),
            accumulate=trainer.accumulate_grad_batches,
            rank=rank,
            world_size=world_size,
            epoch=trainer.current_epoch,
            limit=trainer.limit_train_batches,
            allow_changed=self.allow_changed,
        )

    def val_dataloader(self) -> list[EvalLoader | ExampleEvalLoader]:
        return [*self._prompt_loaders(), *self._example_loaders()]

    test_dataloader = val_dataloader

    def predict_dataloader(self) -> list[EvalLoader | ExampleEvalLoader]:
        return [*(self._prompt_loaders() if self._generates else self._example_loaders())]

    def _example_loaders(self) -> list[ExampleEvalLoader]:
        (rank, world_size), size = self.rank(), self.val_batch_size
        return [
            ExampleEvalLoader(examples, batch_size=size, rank=rank, world_size=world_size)
            for examples in self.corpus.val.values()
        ]

    def _prompt_loaders(self) -> list[EvalLoader]:
        limit, (rank, world_size) = self.module_attribute("evaluation").limit, self.rank()
        sets = (self.corpus.val[name].prompts for name in self.val_names)
        return [
            EvalLoader(prompts, batch_size=self.val_batch_size, limit=limit, rank=rank, world_size=world_size)
            for prompts in sets
        ]

    def _read(self, tokenizer: PreTrainedTokenizerBase, kind: Kind) -> ExampleCorpus:
        val = self.val_rows()
        corpus = read_example_corpus(
            self.train_rows(), val, tokenizer, kind, self.options, val_fraction=self.held_out(val), seed=self.seed
        )
        for name, examples in corpus.val.items():
            if overlap := corpus.report[set_key(name)]["overlap"]:
                rank_zero_warn(f"{overlap} of {len(examples)} rows of {set_key(name)} have a training prompt.")
        return corpus

    def _order(self, shuffle: bool) -> RolloutOrder:
        corpus = self.corpus
        return self.order_of(
            corpus.sizes, self.batch_size, shuffle, "data.batch_size", list_counts(corpus.report["train"])
        )
