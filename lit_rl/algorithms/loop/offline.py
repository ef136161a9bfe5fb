"""The loop of the methods that learn from a data set: optimizer steps, their metrics, and validation.

The data module cuts an optimizer step of `data.batch_size` rows into micro-batches, and each carries the totals of
the whole step; so a loss has the step's denominator, however the step is cut. No term of an objective is here.
`OfflineModule` generates nothing, and is the base of reward models. `OfflinePolicyModule` adds a policy: log-probs of
texts, a reference whose log-probs may be computed before the training, and validation that also generates
(`GeneratingModule`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_rl.algorithms.checks import data_and_trainer
from lit_rl.algorithms.checks.data_and_trainer import (
    NeedsAllRows,
    check_example_data,
    check_stream,
    check_text_lengths,
    trainer_examples,
)
from lit_rl.algorithms.checks.memory import RowLengths
from lit_rl.algorithms.checks.micro_batching import StepRows
from lit_rl.algorithms.checks.model_sizes import StepFacts
from lit_rl.algorithms.checks.strategy_checks import Feature
from lit_rl.algorithms.data_parallel import data_world_size
from lit_rl.algorithms.evaluation.summary_statistics import Averages, prefixed
from lit_rl.algorithms.loop.generating import GeneratingModule
from lit_rl.algorithms.loop.module import PolicyModule
from lit_rl.algorithms.optim.strategies import flattens_weights
from lit_rl.algorithms.records import OfflineRecords
from lit_rl.algorithms.rollouts import checkpoints
from lit_rl.algorithms.rollouts.phase_costs import UpdateWork
from lit_rl.algorithms.rollouts.rollout_plan import OfflinePlan
from lit_rl.algorithms.terms.precomputed_reference import (
    PrecomputedReference,
    ReferenceFiles,
    ReferenceSource,
    free_own_weights,
    hash_of_weights,
)
from lit_rl.algorithms.terms.whole_step import WholeStep
from lit_rl.core.errors import ConfigError
from lit_rl.core.examples import ExampleBatch, TokenBatch, Totals
from lit_rl.core.rollout import PromptBatch
from lit_rl.data.example_set import ExampleSet
from lit_rl.data.kinds import Kind
from lit_rl.models.forward import TextScores, refuse_leaks, score_texts
from lit_rl.models.hf_export import ExportForm
from lit_rl.models.model_costs import Span
from lit_rl.models.vision_parts import with_image_gradients
from lit_rl.ops.reductions import Metrics
from lit_rl.settings.algorithms import OfflineConfig, OfflinePolicyConfig
from lit_rl.settings.base import takes


class OfflineModule(PolicyModule, ABC):
    """Abstract base of methods that learn from a data set: subclasses define the loss. Validation measures it."""

    learns_from: ClassVar[Kind]
    """The kind of examples that the data module must provide."""

    export_form = ExportForm()

    headline: ClassVar[tuple[str, ...]] = ("loss",)
    """Validation metrics that a run shows before and after training."""

    @takes(OfflineConfig)
    def __init__(self, settings: OfflineConfig) -> None:
        super().__init__(config=settings)
        self.router_aux_loss_coef = settings.router_aux_loss_coef
        self.plan: OfflinePlan | None = None
        self.samples: dict[str, list[Any]] = {}
        self._records = OfflineRecords()
        self._val_averages: list[Averages] = []
        self._micro: ExampleBatch | None = None
        self._whole: WholeStep | None = None
        self.micro_batches.texts = {"pairs": 2, "triples": 3}.get(self.learns_from, 1)

    # ------------------------------------------------------------------ interface of a method

    @abstractmethod
    def loss(self, batch: Any, whole: WholeStep | None = None) -> tuple[Tensor, Metrics]:
        """Return this micro-batch's share of the objective (shares of a step sum to it), and metrics. Changes no state.

        Args:
            batch: The micro-batch; `batch.totals` are the totals of its step.
            whole: The columns of the whole step, if `couples_rows`. None: this micro-batch is the whole step.
        """

    def training_loss(self, batch: Any, whole: WholeStep | None = None) -> tuple[Tensor, Metrics]:
        """Return the loss in a training step. A method that keeps values until `after_step` overrides this."""
        return self.loss(batch, whole)

    couples_rows = False
    """True if a row's loss depends on the other rows of its step: then `step_columns` is called before the step."""

    def step_columns(self, batch: Any) -> dict[str, Tensor]:
        """Return columns `(b,)` of a micro-batch, without gradient, that the losses of other rows depend on."""
        return {}

    def denominator(self, totals: Totals) -> int:
        """Return the denominator of a step's objective: its rows, unless a method overrides this."""
        return max(1, totals.rows)

    def reads_all_rows(self) -> Iterator[NeedsAllRows]:
        """Return the active terms that read every row before the first step, so that streams are refused."""
        return iter(())

    def take_generation_seconds(self) -> float:
        """Return the seconds since the last log line of generating texts to learn from."""
        return 0.0

    def with_aux(self, loss: Tensor, aux_loss: Tensor | None, totals: Totals) -> tuple[Tensor, Metrics]:
        """Add the micro-batch's part of the router's load-balancing term to the loss, and return it with its metric."""
        if aux_loss is None:
            return loss, {}
        one = torch.ones((), device=loss.device)
        return loss + self.router_aux_loss_coef * aux_loss / totals.shares, {"aux_loss": (aux_loss, one)}

    # ------------------------------------------------------------------ the steps

    def setup(self, stage: str) -> None:
        """Check everything that can be known before weights are loaded, and plan the batches.

        Raises:
            ConfigError: the Trainer has no data module of the right kind, lengths do not fit, or batch sizes do not
                divide.
        """
        super().setup(stage)
        trainer: Any = self.trainer
        data = trainer_examples(trainer, self.learns_from, type(self).__name__)
        data_and_trainer.check_one_accumulation(trainer, "data.batch_size counts the rows of a whole step")
        check_text_lengths(self.model, data.longest_text, streamed=data.stream_buffer is not None)
        unused = f"{type(self).__name__} has no use for one."
        data_and_trainer.warn_unused_reference(self.reference, self.needs_reference, unused)
        if stage == "fit":
            columns = data.unread_columns(margins=self.reads_margins)
            data_and_trainer.report_unread_columns(data, columns, self.columns_read(columns), sees=self.model.sees)
            if data.stream_buffer is not None:
                check_stream(self.reads_all_rows())
            plan = OfflinePlan(
                batch_size=data.batch_size,
                accumulate=self.micro_batches.accumulation(trainer),
                world_size=self.ranks.world_size,
                rows=len(data.corpus.train),
                stream_buffer=data.stream_buffer,
            )
            self.split_step(StepRows(data.batch_size // self.ranks.world_size, 1))
            self.plan = self._with_micro_batches(plan)
            data_and_trainer.check_length(self.trainer, data, self.schedules())
        elif self.micro_batches.asks_plan:
            self.micro_batches.fit_scoring(self.memory())

    reads_margins = False
    """True if the loss of pairs reads the column `margin`."""

    def columns_read(self, columns: Sequence[str]) -> set[str]:
        """Return the columns that are read besides the learned texts."""
        return set()

    def check_processes(self, data: Any, trainer: Any) -> None:
        examples = check_example_data(data, self.learns_from, type(self).__name__)
        if not examples.size_is_given:
            return  # checked once the rows are read
        OfflinePlan(
            batch_size=examples.batch_size,
            accumulate=trainer.accumulate_grad_batches,
            world_size=data_world_size(trainer),
            rows=0,
        )

    def step_facts(self) -> StepFacts:
        longest, scored = self.longest_text(), self.most_scored_tokens()
        lengths = RowLengths(longest - scored, scored, texts=self.micro_batches.texts)
        return replace(super().step_facts(), lengths=lengths)

    def longest_text(self) -> int:
        """Return the number of tokens of the longest text of a step."""
        data: Any = self.trainer.datamodule  # pyright: ignore
        return data.longest_text

    def most_scored_tokens(self) -> int:
        """Return the most tokens of a text that a step scores. Without a fused head all rows have the same width."""
        data: Any = self.trainer.datamodule  # pyright: ignore
        return data.most_learned if self.model.forward_options.fused_head else self.longest_text()

    def _with_micro_batches(self, plan: OfflinePlan) -> OfflinePlan:
        taken = self.micro_batches.plan
        return plan if taken is None else replace(plan, accumulate=taken.micro_batches, why=taken.why)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if self.plan is not None:
            self.plan = self._with_micro_batches(self.plan)

    def on_train_batch_start(self, batch: ExampleBatch, batch_idx: int) -> None:
        self.in_a_step = True
        if batch.slot == 0:
            self.costs.begin()
            self._records.open(batch.totals)
            self.costs.memory.begin()
            self._whole = None
            if self.couples_rows and batch.totals.shares > 1:
                with self.trainer.precision_plugin.forward_context():  # Lightning opens it in `training_step` only
                    self._whole = WholeStep.of(self.step_columns, batch, self.ranks)

    def training_step(self, batch: ExampleBatch, batch_idx: int) -> Tensor:
        self._micro, shares = batch, batch.totals.shares
        if self._whole is not None:
            self._whole.draw_again(batch)
        loss, metrics = self.training_loss(batch, self._whole)
        self._records.add({"loss": (loss, loss.new_full((), 1 / shares)), **metrics})
        # Lightning divides by the accumulated batches and averages over ranks; the loss already has its denominator.
        share = loss * shares
        return with_image_gradients(share, self.trained_modules.values()) if self.model.sees else share

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Take an optimizer step, and log its metrics before any callback can save."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.after_step()
        self.costs.add(self._work())
        self._records.add_step(self.grad_norm, self.trainer.optimizers[0], skipped=self.broken_steps.last)
        self.costs.memory.end("update")
        every = self.trainer.log_every_n_steps  # pyright: ignore
        if every and (self.global_step + 1) % every == 0:
            self._log_steps(self.global_step + 1)

    def log_rest(self) -> None:
        if self.trainer.log_every_n_steps and self.metrics_step != self.global_step:  # pyright: ignore
            self._log_steps(self.global_step, kept=True)

    def _log_steps(self, step: int, *, kept: bool = False) -> None:
        """Log one line of metrics for the optimizer steps since the last line."""
        generating = self.take_generation_seconds()
        metrics = self._records.line(self.ranks, self.coefficients(), generating, kept=kept)
        seconds = {"generate": generating, "update": metrics["time/update"]}
        metrics |= self.costs.take_metrics(self.ranks, self.trainer, self.model.dtype, seconds=seconds)
        self.write_to_loggers(metrics, step)
        self.publish_metrics(metrics, step)

    def _work(self) -> UpdateWork:
        """Return this rank's share of the optimizer step's work, without KTO's mismatched texts and GKD's teacher."""
        assert self._micro is not None
        totals, ref = self._micro.totals, self._micro.ref_logprobs
        spans, reads = [Span(0, tokens) for tokens in totals.texts], int(self.needs_reference and ref is None)
        models = self.trained_modules.values()
        flops = self.costs.flops_of_update(models, spans, spans, totals.learned, reads=reads)
        return UpdateWork(flops / self.ranks.world_size, totals.learned / self.ranks.world_size)

    def step_batch(self) -> dict[str, Any]:
        micro = self._micro
        return (
            {}
            if micro is None
            else {"slot": micro.slot, "rows": list(micro.rows), "tokens": checkpoints.to_plain(micro.tokens)}
        )

    def rank_state(self) -> dict[str, Any]:
        return self._records.state()

    def load_rank_state(self, saved: dict[str, Any]) -> None:
        self._records.load_state(saved, self.trainer.strategy.root_device)

    def merge_rank_states(self, saved: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the counts without averages, whose weights depend on the number of ranks."""
        kept = {"tokens_seen": saved[0]["tokens_seen"], "averages": Averages().state()}
        return super().merge_rank_states(saved) | kept

    def state_kept_on_rollback(self) -> dict[str, Any]:
        return super().state_kept_on_rollback() | self._records.state()

    def describe_dropped_state(self, saved: Sequence[dict[str, Any]], slots: int) -> str:
        return (
            "Averages since the last line of the log are dropped, and nothing else. The run goes on with the rows of "
            "the next step."
        )

    # ------------------------------------------------------------------ validate, test

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, list[Any]] | None:
        """Measure the loss of a batch of examples; return no table."""
        while len(self._val_averages) <= dataloader_idx:
            self._val_averages.append(Averages())
        with torch.no_grad():
            loss, metrics = self.loss(batch)
        part = loss.new_full((), 1 / batch.totals.shares)
        self._val_averages[dataloader_idx].add({"loss": (loss, part), **metrics})
        return None

    test_step = validation_step

    def on_validation_epoch_start(self) -> None:
        self._val_averages = []

    on_test_epoch_start = on_validation_epoch_start

    def log_evaluation(self, stage: str) -> set[str]:
        """Log the loss on every validation set, and return the metric names."""
        logged: set[str] = set()
        for name, averages in zip(self.trainer.datamodule.loss_names, self._val_averages):  # pyright: ignore
            logged |= self.log_validation(prefixed(averages.reduce(self.ranks), stage, name))
        return logged


class OfflinePolicyModule(OfflineModule, GeneratingModule, ABC):
    """Abstract base of methods that train a policy from a data set: subclasses define the loss.

    Validation measures the loss, and generates completions of the validation prompts.
    """

    @takes(OfflinePolicyConfig)
    def __init__(self, settings: OfflinePolicyConfig) -> None:
        super().__init__(config=settings)

    precomputed: PrecomputedReference | None = None
    """Log-probs of the reference that are computed before the training, in the methods that support it."""

    def extra_reference_texts(self) -> Iterable[tuple[str, ExampleSet]]:
        """Return named sets of further texts, besides the rows, whose reference log-probs the loss reads."""
        return ()

    def before_release(self) -> None:
        """Compute whatever else needs the reference, before a precomputed one is released."""

    def reads_all_rows(self) -> Iterator[NeedsAllRows]:
        if self.precomputed is not None:
            yield NeedsAllRows("algo.precompute_reference=true asks the reference about", "set it to false")

    def features(self) -> Iterator[Feature]:
        yield from super().features()
        if self.precomputed is not None:
            yield Feature("precomputed reference", "algo.precompute_reference=true", "Set it to false")

    def take_generation_seconds(self) -> float:
        return self.stopwatch.take("generate")

    # ------------------------------------------------------------------ log-probs for losses

    def text_scores(self, tokens: TokenBatch, *, stats: bool = False) -> TextScores:
        """Return log-probs `(b, s - 1)` of the learned tokens under the policy, with gradient.

        Args:
            tokens: `b` rows.
            stats: Whether to compute statistics for metrics too, and entropies with `log_entropy`.
        """
        wanted = {"entropy": stats and self.log_entropy, "stats": stats, "router_aux": self.router_aux_loss_coef > 0}
        return score_texts(self.policy, tokens, **wanted, options=self.forward_options)

    @torch.no_grad()
    def ref_logprobs(self, batch: ExampleBatch, tokens: TokenBatch | None = None) -> Tensor:
        """Return log-probs `(b, s - 1)` under the reference, without gradient, of the batch's texts or of `tokens`.

        Precomputed log-probs are used if there are any.
        """
        if tokens is None and batch.ref_logprobs is not None:
            return batch.ref_logprobs
        if tokens is not None and self.precomputed is not None:
            known = self.precomputed.of_texts(tokens)
            if known is not None:
                return known
        with self.reference.scoring(self.policy, self.reference_policy) as scorer:
            texts = batch.tokens if tokens is None else tokens
            return score_texts(scorer, texts, options=self.forward_options).logprobs  # pyright: ignore

    # ------------------------------------------------------------------ the steps

    def setup(self, stage: str) -> None:
        """Check the settings of validation by generating, too.

        Raises:
            ConfigError: as in `OfflineModule`, or validation prompts do not fit.
            RewardError: a reward needs a column that is missing.
        """
        super().setup(stage)
        data: Any = self.trainer.datamodule  # pyright: ignore
        if longest := data.longest_val_prompt:
            self.shorten_to_context(longest)
            own = self.evaluation.max_new_tokens
            group, new_tokens = ("sampling", self.sampling.max_new_tokens) if own is None else ("eval", own)
            data_and_trainer.check_context_length(
                self.model, f"{group}.max_new_tokens", longest, new_tokens, "data.max_length"
            )
        data_and_trainer.warn_unused_evaluation(self.evaluation, self.trainer, data.val_names, stage)
        data_and_trainer.bind_validation(self.reward_functions, data)
        self.load_rewards()
        if stage != "fit" and self.micro_batches.asks_plan:
            self.micro_batches.fit_decoding(self.memory())

    def columns_read(self, columns: Sequence[str]) -> set[str]:
        return self.reward_functions.reads(columns)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        data: Any = self.trainer.datamodule  # pyright: ignore
        if data.options.packing != "none":
            with self.rollout_context():
                self.refuse_leaks()
        if (
            self.precomputed is not None
            and self.model.sees
            and next(iter(self.extra_reference_texts()), None) is not None
        ):
            raise ConfigError(
                f"algo.precompute_reference=true knows the mismatched completions of {type(self).__name__} by their "
                "tokens, which do not tell images apart. Set it to false with a model over images."
            )
        if self.precomputed is not None:
            self._precompute(self.precomputed, data)

    def refuse_leaks(self) -> None:
        """Refuse a model in which packed texts attend to each other, before the first step.

        Raises:
            ConfigError: they do.
        """
        refuse_leaks(self.policy)

    def _precompute(self, precomputed: PrecomputedReference, data: Any) -> None:
        """Precompute all reference log-probs of the run, and release the reference. A collective."""
        corpus = data.corpus
        sets = {"train": corpus.train} | {f"val/{name}".removesuffix("/"): held for name, held in corpus.val.items()}
        if precomputed.released:
            precomputed.prepare(sets, self.extra_reference_texts(), None)
            return
        precomputed.prepare(
            sets, self.extra_reference_texts(), self._reference_source(precomputed.folder, data.val_batch_size)
        )
        self.before_release()
        if not flattens_weights(self.trainer.strategy):
            free_own_weights(self.reference_policy, self.policy)
        self.reference_policy = None
        precomputed.released = True  # texts that are not known by now are refused

    def _reference_source(self, folder: str | None, batch_size: int) -> ReferenceSource:
        trainer: Any = self.trainer
        files = ReferenceFiles(
            folder=Path(trainer.default_root_dir) / "cache" if folder is None else Path(folder).expanduser(),
            weights=hash_of_weights(self.reference_policy, self.policy, self.ranks),
            precision=str(trainer.precision),
            ranks=self.ranks,
            writes=not trainer.fast_dev_run,
        )
        files.check()
        return ReferenceSource(self.ref_logprobs, batch_size, self.rollout_context, files, self.ranks)

    def on_train_batch_start(self, batch: ExampleBatch, batch_idx: int) -> None:
        if self.precomputed is not None:
            self.precomputed.fill(batch, self.trainer.datamodule.corpus.train)  # pyright: ignore
        super().on_train_batch_start(batch, batch_idx)

    # ------------------------------------------------------------------ validate, test, predict

    def _example_set(self, dataloader_idx: int) -> int:
        """Return the index of a loader's set of examples: loaders of prompts come before those of examples."""
        return dataloader_idx - len(self.trainer.datamodule.val_names)  # pyright: ignore

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if self.precomputed is not None and not isinstance(batch, PromptBatch):
            data: Any = self.trainer.datamodule  # pyright: ignore
            self.precomputed.fill(batch, data.corpus.val[data.loss_names[self._example_set(dataloader_idx)]])

    on_test_batch_start = on_validation_batch_start

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, list[Any]] | None:
        """Generate for a batch of prompts, as in `predict_step`; measure the loss of a batch of examples."""
        if isinstance(batch, PromptBatch):
            return self.predict_step(batch, batch_idx, dataloader_idx)
        if self.second_decoding:
            return None  # a loss does not depend on how completions are drawn
        return super().validation_step(batch, batch_idx, self._example_set(dataloader_idx))

    test_step = validation_step

    def on_validation_epoch_start(self) -> None:
        OfflineModule.on_validation_epoch_start(self)
        GeneratingModule.on_validation_epoch_start(self)

    on_test_epoch_start = on_validation_epoch_start

    def log_evaluation(self, stage: str) -> set[str]:
        return GeneratingModule.log_evaluation(self, stage) | OfflineModule.log_evaluation(self, stage)
