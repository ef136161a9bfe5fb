"""Data modules of the methods that learn from a data set as it is: texts, pairs or verdicts, and labelled steps."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import lightning as L

from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import PromptForm
from lit_rl.data.corpus import Corpus, example_reader
from lit_rl.data.data_module import SourcedDataModule, check_keywords
from lit_rl.data.encode import Encoder
from lit_rl.data.example_reader import ExampleOptions
from lit_rl.data.example_set import ExampleSet
from lit_rl.data.kinds import Kind
from lit_rl.data.loaders import EvalLoader, ExampleEvalLoader, ExampleLoader
from lit_rl.data.prompt_set import PromptSet
from lit_rl.data.sources import GivenRows
from lit_rl.data.streams import (
    RowStream,
    StreamLoader,
    Windows,
    check_first_window,
    check_stream_settings,
    check_stream_trainer,
)
from lit_rl.data.visual_prompts import Processor
from lit_rl.ops.ranges import AtLeastOne, AtLeastTwo, Portion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_LEARNERS: dict[Kind, str] = {
    "texts": "lit_rl.SFT(model)",
    "pairs": "lit_rl.DPO(model)",
    "triples": "lit_rl.TPO(model)",
    "verdicts": "lit_rl.KTO(model)",
    "stepwise": "lit_rl.ProcessRewardModeling(model)",
}
"""A method that learns from each kind of rows."""


@checked("data")
class ExampleDataModule(SourcedDataModule):
    """The base of the three. The format of the rows is recognised from their columns; every row left out is counted in
    `report`.

    Args:
        rows: The rows themselves. In Python also a `datasets.Dataset` or `IterableDataset`.
        batch_size: Rows of one optimizer step, over all its micro-batches and ranks; null: as many as are left for
            training, at most 32.
        max_length: Longest text, prompt included, in tokens; null is no limit.
        max_completion_tokens: Longest completion, in tokens; null is no limit of its own.
        keep: The end of a too long text that stays: `start` cuts the end of the completion, `end` the start of the
            prompt.
        overlong: Action for a too long row: `truncate`, `drop` (and count it), or `error`.
        max_dropped: Share of the rows that may be dropped because there is nothing to learn from (a side is empty, both
            are equal), in [0, 1]; beyond it the data is refused.
        stream_buffer: Rows in memory at a time, of sources that are read as the run needs them, at least `batch_size`;
            null reads everything before the first step.
        group_by_length: Put rows of a step that are about as long into the same micro-batch, with less padding. The
            rows of a step stay what they are. Off with a router's loss, which is one of a micro-batch.
        val_batch_size: Rows of a validation batch, on each rank.
        source: Further arguments of `SourcedDataModule`.
    """

    serves: ClassVar[tuple[Kind, ...]] = ()
    """The kinds of examples that it can make."""

    size_name = "batch_size"
    options: ExampleOptions

    def __init__(
        self,
        rows: GivenRows | None = None,
        *,
        batch_size: AtLeastOne | None = None,
        max_length: AtLeastTwo | None = 1024,
        max_completion_tokens: AtLeastOne | None = None,
        keep: Literal["start", "end"] = "start",
        overlong: Literal["truncate", "drop", "error"] = "truncate",
        max_dropped: Portion = 0.1,
        stream_buffer: int | None = None,
        group_by_length: bool = True,
        val_batch_size: AtLeastOne = 32,
        **source: Any,
    ) -> None:
        check_keywords(type(self), source, SourcedDataModule)
        super().__init__(rows, val_batch_size=val_batch_size, **source)
        self.batch_size = self.choose_step_rows(batch_size)
        self.group_by_length = group_by_length
        self.options = ExampleOptions(
            max_length=max_length,
            max_completion_tokens=max_completion_tokens,
            keep=keep,
            overlong=overlong,
            max_dropped=max_dropped,
            **self.reading,
        )
        self.stream_buffer = stream_buffer
        if stream_buffer is not None:
            check_stream_settings(self, stream_buffer, batch_size=batch_size or 1, max_length=max_length)
        self._encoder: Encoder | None = None
        self._kind: Kind | None = None
        self._windows: Windows | None = None

    def prepare(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kind: Kind | None = None,
        *,
        processor: Processor | None = None,
        eos_ids: Collection[int] | None = None,
        stage: str = "fit",
    ) -> None:
        """Read, tokenise, split and count, once for a tokenizer. Needs no weights.

        Args:
            tokenizer: The policy's.
            kind: Kind of examples that the method learns from; None is the first of `serves`.
            processor: Processor of a policy over images; None for one over text.
            eos_ids: Every token at which generation ends, `LanguageModel.eos_ids`; None: the tokenizer's EOS token, or
                those of the last call. Empty: of a model that scores.
            stage: `fit` also checks that the rows fill one step.

        Raises:
            ConfigError: this data module makes no examples of that kind.
            DataError: a set cannot be used; for the stage `fit` also where its rows do not fill one step.
            BackendError: the hub cannot be reached.
        """
        kind = kind or self._kind or self.serves[0]
        if kind not in self.serves:
            raise ConfigError(
                f"{type(self).__name__} provides {' or '.join(self.serves)}, and the algorithm learns from {kind}."
            )
        held = self._encoder if self._encoder is not None and self._encoder.tokenizer is tokenizer else None
        if eos_ids is None and held is not None:
            eos_ids = held.eos_ids
        options = self.options
        encoder = Encoder(tokenizer, options.chat_template_kwargs, options.learn, processor, eos_ids)
        if held is None or (self._kind, held.ends, held.closes) != (kind, encoder.ends, encoder.closes):
            self._corpus = self._read(encoder, kind)
            self._encoder, self._kind = encoder, kind
        if stage == "fit":
            if self._windows is None:
                self.fit_step_to(sum(self.sets.sizes))
                self.order(self.shuffle)
            else:
                check_first_window(self.sets.sizes, self.batch_size, self.report["train"])

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.check_trainer(self.trainer_of_run())
        method = type(self.trainer_of_run().lightning_module)
        if hasattr(method, "slots_per_rollout") and not hasattr(method, "learns_from"):
            learners = " or ".join(dict.fromkeys(_LEARNERS[kind] for kind in self.serves))
            raise ConfigError(
                f"{method.__name__} learns from prompts that it answers, and the Trainer got {type(self).__name__}, "
                "whose rows are learned from as they are. Pass datamodule=lit_rl.RolloutDataModule(rows), or train "
                f"{learners} with this one."
            )
        kind = self.module_attribute("learns_from")
        ends = self.eos_ids_of_run() if self._generates else ()
        self.prepare(
            self.module_attribute("tokenizer"), kind, processor=self.processor_of_run(), eos_ids=ends, stage=stage
        )

    @property
    def report(self) -> dict[str, dict[str, int]]:
        """Counts of each set, `train` and `val` or `val/<name>`, by filter: see `CorpusReader.whole`."""
        report = self.sets.report
        return report if self._windows is None else {**report, "train": self._windows.counts}

    @property
    def prompt_form(self) -> PromptForm | None:
        """The form of the first source's prompts; None where rows are tokens, whose form is unknown."""
        name, examples = self.sets.formats[0], self.corpus.train.examples
        if name == "tokenised" or not examples:
            return None
        return "messages" if isinstance(examples[0].prompt, list) or "messages" in name else "text"

    @property
    def corpus(self) -> Corpus[ExampleSet]:
        """All examples that were read; of a stream its first window, read again if the stream has moved on.

        Raises:
            ConfigError: nothing was, yet.
        """
        if self._windows is None:
            return self.sets
        return replace(self.sets, train=self._windows.at(self._windows.start).data)

    def unread_columns(self, *, margins: bool) -> list[str]:
        """Return the columns that rows have beside those that examples are made of; rewards may read them.

        Args:
            margins: True if the method reads margins of pairs.
        """
        corpus = self.corpus
        names = {
            name: None for each in corpus.train.examples for name, value in each.columns.items() if value is not None
        }
        if self._kind == "texts" and any(name.startswith("preference (") for name in corpus.formats):
            names["rejected"] = None
        if not margins and any(each.margin is not None for each in corpus.train.examples):
            names["margin"] = None
        return [*names]

    def check_trainer(self, trainer: L.Trainer) -> None:
        """Refuse Trainer settings that no stream can be learned with. Needs no data.

        Raises:
            ConfigError: `max_steps` is missing, or loaders are rebuilt.
        """
        if self.stream_buffer is not None:
            check_stream_trainer(trainer)

    @property
    def train_prompts(self) -> PromptSet:
        return self.corpus.train.prompts

    @property
    def val_prompts(self) -> dict[str, PromptSet]:
        if not self._generates:
            return {}
        return {name: examples.prompts for name, examples in self.sets.val.items() if len(examples.prompts)}

    @property
    def _generates(self) -> bool:
        """True if the run's module evaluates generated text; a model that scores has no use for prompts."""
        module = None if self.trainer is None else self.trainer.lightning_module
        return module is None or hasattr(module, "evaluation")

    @property
    def loss_names(self) -> list[str]:
        """Names of all validation sets, in the order of the loaders after those of prompts."""
        return list(self.sets.val)

    @property
    def longest_text(self) -> int:
        """Tokens of the longest row of any set; of a stream, whose rows are not known yet, the limit `max_length`."""
        return self._most(lambda examples: examples.longest)

    @property
    def most_learned(self) -> int:
        """Learned tokens of the row that has most of them, of any set; of a stream the limit `max_length`."""
        return self._most(lambda examples: examples.most_learned)

    def _most(self, count: Callable[[ExampleSet], int]) -> int:
        train = count(self.sets.train) if self._windows is None else self.options.max_length or 0
        return max(train, *map(count, self.sets.val.values()), 0)

    def train_dataloader(self) -> ExampleLoader | StreamLoader:
        trainer, place = self.trainer_of_run(), self.place()
        place["row_settings"] |= {"data.stream_buffer": self.stream_buffer}
        place["accumulate"] = trainer.accumulate_grad_batches
        place["group_by_length"] = self.group_by_length and not self.module_attribute("router_aux_loss_coef")
        if self._windows is None:
            order = self.order(self.shuffles())
            return ExampleLoader(self.corpus.train, order, epoch=trainer.current_epoch, **place)
        return StreamLoader(
            self._windows,
            length=trainer.max_steps * trainer.accumulate_grad_batches,
            seed=self.seed,
            shuffle=self.shuffles(),
            overfit=bool(getattr(trainer, "overfit_batches", 0)),
            **place,
        )

    def val_dataloader(self) -> list[EvalLoader | ExampleEvalLoader]:
        return [*self.prompt_loaders(), *self._example_loaders()]

    test_dataloader = val_dataloader

    def predict_dataloader(self) -> list[EvalLoader | ExampleEvalLoader]:
        return [*(self.prompt_loaders() if self._generates else self._example_loaders())]

    def _example_loaders(self) -> list[ExampleEvalLoader]:
        (rank, world_size), size = self.rank(), self.val_batch_size
        return [
            ExampleEvalLoader(examples, batch_size=size, rank=rank, world_size=world_size)
            for examples in self.sets.val.values()
        ]

    def _read(self, encoder: Encoder, kind: Kind) -> Corpus[ExampleSet]:
        val, reader = self.val_rows(), example_reader(encoder, kind, self.options)
        if self.stream_buffer is None:
            corpus = self.read_whole(reader, val)
        elif encoder.processor is not None:
            raise ConfigError("data.stream_buffer reads rows of text alone: leave it out with a model over images.")
        else:
            self._windows = None  # release its rows before reading others
            sources, weights = (
                [RowStream(source, self.on_bad_row) for source in self.streamable],
                self.weights or (1.0,),
            )
            windows = Windows(sources, self.stream_buffer, weights, encoder, kind, self.options, self.batch_size)
            if not self.size_is_given:
                self.fit_step_to(len(windows.at(windows.start).data))
                if self.batch_size != windows.batch_size:
                    windows.set_batch_size(self.batch_size)
            first = windows.at(windows.start)  # bad data shows at once
            keys = {example.key for example in first.data.examples}
            corpus = reader.streamed(first.data, first.sizes, keys, windows.formats, val)
            corpus = replace(corpus, train=replace(first.data, examples=(), packs=None))
            self._windows = windows
        report = corpus.report if self._windows is None else {**corpus.report, "train": self._windows.counts}
        self.log_row_counts(report, f"data.max_length={self.options.max_length}")
        return corpus


@checked("data")
class SupervisedDataModule(ExampleDataModule):
    """Texts to imitate, for `SFT`.

    Args:
        rows: The rows themselves. In Python also a `datasets.Dataset` or `IterableDataset`.
        learn: Tokens that are learned: `completion` (all tokens of a text without a prompt), `assistant` (what the chat
            template marks as the assistant's), or `all`.
        packing: `none` is a row a text; `best_fit` puts whole texts together into rows of `max_length`, `wrapped` cuts
            them wherever a row is full. Texts of a row never see each other.
        shared: Further arguments of `ExampleDataModule`.
    """

    serves = ("texts",)

    def __init__(
        self,
        rows: GivenRows | None = None,
        *,
        learn: Literal["completion", "assistant", "all"] = "completion",
        packing: Literal["none", "best_fit", "wrapped"] = "none",
        **shared: Any,
    ) -> None:
        super().__init__(rows, **shared)
        self.options = replace(self.options, learn=learn, packing=packing)


class PreferenceDataModule(ExampleDataModule):
    """Pairs of a chosen and a rejected completion, perhaps beside a reference, or single completions with a verdict.

    Methods that learn from verdicts take pairs too: each gives two. Those that learn from triples need the column
    `reference` in every row; the others do not read it.

    Args:
        rows: The rows themselves. In Python also a `datasets.Dataset` or `IterableDataset`.
        shared: Further arguments of `ExampleDataModule`.
    """

    serves = ("pairs", "verdicts", "triples")

    def __init__(self, rows: GivenRows | None = None, **shared: Any) -> None:
        super().__init__(rows, **shared)


class StepwiseDataModule(ExampleDataModule):
    """Solutions in steps, each step labelled right or wrong, for a process reward model.

    Args:
        rows: The rows themselves. In Python also a `datasets.Dataset` or `IterableDataset`.
        separator: Ends every step.
        last_step_only: Learn the label of the last step only.
        shared: Further arguments of `ExampleDataModule`.
    """

    serves = ("stepwise",)

    def __init__(
        self, rows: GivenRows | None = None, *, separator: str = "\n", last_step_only: bool = False, **shared: Any
    ) -> None:
        super().__init__(rows, **shared)
        self.options = replace(self.options, separator=separator, last_step_only=last_step_only)
