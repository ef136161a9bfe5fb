"""The data module of every algorithm that generates: prompts in, batches of prompts for rollouts out."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError, check_instance
from lit_rl.core.rollout import PromptBatch, PromptForm
from lit_rl.core.vision_inputs import PromptVision
from lit_rl.data.corpus import Corpus, prompt_reader
from lit_rl.data.curriculum import Curriculum, RowDraws
from lit_rl.data.data_module import SourcedDataModule, check_keywords
from lit_rl.data.encode import Encoder
from lit_rl.data.loaders import EvalLoader, RolloutLoader, SparePrompts
from lit_rl.data.prompt_reader import PromptOptions
from lit_rl.data.prompt_set import PromptSet
from lit_rl.data.rendering import warn_unknown_end
from lit_rl.data.sources import GivenRows
from lit_rl.data.tasks import Repeated
from lit_rl.data.visual_prompts import Processor
from lit_rl.ops.ranges import AtLeastOne

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@checked("data")
class RolloutDataModule(SourcedDataModule):
    """Prompts and columns for rollouts.

    A row needs a prompt, a string or a list of chat messages; its other columns go to the reward functions. Every row
    left out is counted in `report`.

    Args:
        rows: The rows themselves. In Python also a `datasets.Dataset` or `IterableDataset`, which is read whole.
        prompt_key: The column of the prompt.
        prompts_per_rollout: Prompts of one rollout, all ranks together. null: as many as are left for training, at most
            32.
        max_prompt_tokens: Longest prompt, in tokens.
        overlong: Action for a longer prompt: `drop` leaves it out, `truncate_left` keeps its last tokens (rewards still
            see all of it), `error` refuses the data.
        curriculum: Draws rows by how well the policy did on them the last time. null: every row once an epoch.
        source: Further arguments of `SourcedDataModule`.
    """

    size_name = "prompts_per_rollout"
    options: PromptOptions

    def __init__(
        self,
        rows: GivenRows | None = None,
        *,
        prompt_key: str = "prompt",
        prompts_per_rollout: AtLeastOne | None = None,
        max_prompt_tokens: AtLeastOne = 512,
        overlong: Literal["drop", "truncate_left", "error"] = "drop",
        curriculum: Curriculum | None = None,
        **source: Any,
    ) -> None:
        check_keywords(type(self), source, SourcedDataModule)
        super().__init__(rows, **source)
        if curriculum is not None:
            check_instance("data.curriculum", curriculum, Curriculum, "curriculum=Curriculum(weights=[0.2, 1.0, 0.2])")
            if not self.shuffle:
                raise ConfigError(
                    "data.shuffle=false keeps the order of the rows, and data.curriculum draws them at random. Leave "
                    "one of them out."
                )
        self.curriculum = curriculum
        self.draws: RowDraws | None = None
        """The draws of a training with a curriculum, made when it is set up."""
        self.prompts_per_rollout = self.choose_step_rows(prompts_per_rollout)
        self.options = PromptOptions(
            prompt_key=prompt_key, max_prompt_tokens=max_prompt_tokens, overlong=overlong, **self.reading
        )
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._warned_of_end = False

    def prepare(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        processor: Processor | None = None,
        eos_ids: Collection[int] | None = None,
        stage: str = "fit",
    ) -> None:
        """Load, format, tokenise, split and count, once for a tokenizer. Needs no weights.

        Args:
            tokenizer: Tokenizer of the policy.
            processor: Processor of a policy over images; None for one over text.
            eos_ids: Every token at which generation ends, `LanguageModel.eos_ids`: it is said where the chat template
                ends a turn with none of them. None: they are not known.
            stage: `fit` also checks that the rows fill a rollout.

        Raises:
            DataError: a set cannot be used; for the stage `fit` also where its rows do not fill one rollout.
            BackendError: the hub cannot be reached.
        """
        if self._tokenizer is not tokenizer:
            self._corpus = self._read(tokenizer, processor)
            self._tokenizer = tokenizer
            self._warned_of_end = False
        if eos_ids is not None and not self._warned_of_end and self.prompt_form == "messages":
            self._warned_of_end = True
            warn_unknown_end(tokenizer, self.options.chat_template_kwargs, eos_ids)
        if stage == "fit":
            self.fit_step_to(sum(self.sets.sizes))
            self.order(self.shuffle)

    def setup(self, stage: str) -> None:
        how: dict[str, Any] = {"processor": self.processor_of_run(), "eos_ids": self.eos_ids_of_run()}
        self.prepare(self.module_attribute("tokenizer"), stage=stage, **how)
        if stage == "fit" and self.curriculum is not None:
            if not self.shuffles():
                raise ConfigError(
                    "trainer.overfit_batches takes the same few rows again and again, and data.curriculum draws other "
                    "ones. Leave one of them out."
                )
            self.draws = RowDraws(self.curriculum, self.train_prompts, self.order(shuffle=True))

    @property
    def report(self) -> dict[str, dict[str, int]]:
        """Counts of each set, `train` and `val` or `val/<name>`, by filter: see `CorpusReader.whole`."""
        return self.sets.report

    @property
    def train_prompts(self) -> PromptSet:
        return self.sets.train

    @property
    def val_prompts(self) -> dict[str, PromptSet]:
        return dict(self.sets.val)

    @property
    def prompt_form(self) -> PromptForm:
        """The form of the training prompts."""
        return "text" if isinstance(self.train_prompts.prompts[0], str) else "messages"

    @property
    def columns(self) -> list[str]:
        """Columns of the training rows beside the prompt; None fills a row that lacks one."""
        return list(self.train_prompts.columns)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest training prompt that is left."""
        return max(map(len, self.train_prompts.prompt_ids))

    @property
    def prompt_keys(self) -> list[str]:
        """A text for each training row, equal for rows of equal prompts and images."""
        return self.train_prompts.keys

    def columns_of_sets(self) -> list[Mapping[str, Sequence[Any]]]:
        """Return the columns of the training rows and of each validation set, with their values."""
        return [self.train_prompts.columns, *(rows.columns for rows in self.val_prompts.values())]

    def peek(self, count: int) -> PromptBatch:
        """Return the first training rows, in the order of the data."""
        data = self.train_prompts
        return data.batch(range(min(count, len(data))))

    def train_dataloader(self) -> RolloutLoader:
        trainer = self.trainer_of_run()
        generator = getattr(trainer.lightning_module, "generator", None)  # a user's own module may have none
        lag = 0 if generator is None else generator.lag
        return RolloutLoader(
            self.train_prompts,
            self.order(self.shuffles()),
            repeat=self.module_attribute("slots_per_rollout"),
            ahead=lag,
            run=self._length() if lag else (math.inf, math.inf),
            draws=self.draws,
            epoch=trainer.current_epoch,
            sharing=getattr(trainer.lightning_module, "ranks_per_group", 1),
            **self.place(),
        )

    def _length(self) -> tuple[float, float]:
        """Return the rollouts and epochs after which the run ends; infinite where it has no such limit."""
        trainer = self.trainer_of_run()
        steps = self.module_attribute("slots_per_rollout") // trainer.accumulate_grad_batches
        rollouts = math.inf if trainer.max_steps == -1 else math.ceil(trainer.max_steps / steps)
        return rollouts, math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs

    def val_dataloader(self) -> list[EvalLoader]:
        return self.prompt_loaders()

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader

    @property
    def spare(self) -> SparePrompts:
        """Training prompts beyond those of the epochs, for what a rollout drops."""
        return SparePrompts(self.train_prompts, self.order(self.shuffle), self.draws)

    @property
    def fingerprint(self) -> str:
        """A digest of the training rows, their tokens and images: equal for the same rows in the same order."""
        return self.train_prompts.fingerprint

    def vision(self, row: int) -> PromptVision | None:
        """Return the vision inputs of a training prompt."""
        return self.train_prompts.vision(row)

    def _read(self, tokenizer: PreTrainedTokenizerBase, processor: Processor | None) -> Corpus[PromptSet]:
        encoder = Encoder(tokenizer, self.options.chat_template_kwargs, processor=processor)
        corpus = self.read_whole(prompt_reader(encoder, self.options), self.val_rows())
        limit = f"data.max_prompt_tokens={self.options.max_prompt_tokens}"
        self.log_row_counts(corpus.report, limit, repeats=isinstance(self.task, Repeated))
        return corpus
