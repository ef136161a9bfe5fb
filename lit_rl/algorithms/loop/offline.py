"""What every method shares that learns from a data set: the steps, their metrics, and validation.

The data module cuts an optimizer step of `data.batch_size` rows into micro-batches, and tells each what the whole step
counts; so a loss has the step's denominator, however the step is cut. No term of an objective is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lit_rl.algorithms.evaluation.statistics import Averages
from lit_rl.algorithms.evaluation.validation import prefixed
from lit_rl.algorithms.loop.generating import GeneratingModule
from lit_rl.algorithms.optim.strategies import flattens
from lit_rl.algorithms.preflight import data as preflight
from lit_rl.algorithms.preflight.offline import AllRows, examples_of, stream_will_do, texts_fit
from lit_rl.algorithms.records import OfflineRecords, learning_rates
from lit_rl.algorithms.rollouts import state
from lit_rl.algorithms.rollouts.plan import OfflinePlan
from lit_rl.algorithms.terms.precomputed_reference import PrecomputedReference, ReferenceSource, free_memory
from lit_rl.algorithms.terms.reference_files import ReferenceFiles, hash_of_weights
from lit_rl.algorithms.terms.whole_step import WholeStep
from lit_rl.data.offline.example import Kind
from lit_rl.data.offline.example_set import ExampleSet
from lit_rl.errors import in_range
from lit_rl.examples import ExampleBatch, TokenBatch, Totals
from lit_rl.models.policy.text_forward import TextScores, refuse_leaks, score_texts
from lit_rl.ops.step import Metrics
from lit_rl.rollout import PromptBatch


class OfflineModule(GeneratingModule, ABC):
    """Abstract: subclasses say what a loss is. Validation writes to the validation prompts and measures the loss.

    Args:
        model: The policy: a description, or its name, folder or hub id.
        reward: Reward functions and weights, or one function, for the completions that validation writes; None only
            writes them. Nothing is learned from it.
        router_aux_loss_coef: Weight of the load-balancing loss of a mixture of experts (2101.03961, eq. 4 to 6), which
            is defined over a micro-batch.
        shared: What every `GeneratingModule` takes.
    """

    learns_from: ClassVar[Kind]
    """The kind of examples that the data module has to make."""

    headline: ClassVar[tuple[str, ...]] = ("loss",)
    """Validation metrics that a run shows before and after."""

    def __init__(self, model: Any, reward: Any = None, *, router_aux_loss_coef: float = 0.0, **shared: Any) -> None:
        super().__init__(model, reward, **shared)
        in_range("algo.router_aux_loss_coef", router_aux_loss_coef, low=0)
        self.router_aux_loss_coef = router_aux_loss_coef
        self.plan: OfflinePlan | None = None
        self.samples: dict[str, list[Any]] = {}
        self._records = OfflineRecords()
        self._val_averages: list[Averages] = []
        self._micro: ExampleBatch | None = None
        self._whole: WholeStep | None = None

    # ------------------------------------------------------------------ what a method is

    @abstractmethod
    def loss(self, batch: Any, whole: WholeStep | None = None) -> tuple[Tensor, Metrics]:
        """This micro-batch's share of the objective (shares of a step sum to it), and its metrics. Changes no state.

        Args:
            batch: The micro-batch; `batch.totals` is what its step counts.
            whole: What `look` said of the whole step, where `couples_rows`. None: this micro-batch is all of it.
        """

    def training_loss(self, batch: Any, whole: WholeStep | None = None) -> tuple[Tensor, Metrics]:
        """The loss in a training step. A method that keeps something of it until `after_step` does that here."""
        return self.loss(batch, whole)

    couples_rows = False
    """Whether a row's loss depends on the other rows of its optimizer step: `look` is then asked before the step."""

    def look(self, batch: Any) -> dict[str, Tensor]:
        """Columns `(b,)` of a micro-batch, without gradient, that the losses of other rows depend on."""
        return {}

    def denominator(self, totals: Totals) -> int:
        """What the objective of a step is averaged over: its rows, unless a method says otherwise."""
        return max(1, totals.rows)

    precomputed: PrecomputedReference | None = None
    """Log-probs of the reference that were computed before the training, by the methods that can do with them."""

    def texts_beside(self) -> Iterable[tuple[str, ExampleSet]]:
        """Sets of texts, each with a name, whose reference log-probs losses read beside those of the rows."""
        return ()

    def before_release(self) -> None:
        """Called before a precomputed reference is let go: what else is to be asked of it, is asked here."""

    def reads_all_rows(self) -> Iterator[AllRows]:
        """Terms in force that look at every row before the first step, so that a stream will not do."""
        if self.precomputed is not None:
            yield AllRows("algo.precompute_reference=true asks the reference about", "set it to false")

    def after_step(self) -> None:
        """Called after each optimizer step: what changes between steps changes here."""
        if self.needs_reference:
            self.reference.update(self.policy, self.reference_policy, self.step + 1)

    def coefficients(self) -> dict[str, float]:
        """Numbers in force that are no constants of the run, for the log."""
        return {}

    # ------------------------------------------------------------------ what losses are made with

    def text_scores(self, tokens: TokenBatch, *, stats: bool = False) -> TextScores:
        """Log-probs `(b, s - 1)` of the learned tokens under the policy, with gradient."""
        return score_texts(self.policy, tokens, stats=stats, router_aux=self.router_aux_loss_coef > 0)

    @torch.no_grad()
    def ref_logprobs(self, batch: ExampleBatch, tokens: TokenBatch | None = None) -> Tensor:
        """`(b, s - 1)` under the reference, without gradient: of the batch's texts, or of these.

        Precomputed ones are taken where there are any.
        """
        if tokens is None and batch.ref_logprobs is not None:
            return batch.ref_logprobs
        if tokens is not None and self.precomputed is not None:
            known = self.precomputed.of_texts(tokens)
            if known is not None:
                return known
        with self.reference.scoring(self.policy, self.reference_policy) as scorer:
            return score_texts(scorer, batch.tokens if tokens is None else tokens).logprobs  # pyright: ignore

    def with_aux(self, loss: Tensor, aux_loss: Tensor | None, totals: Totals) -> tuple[Tensor, Metrics]:
        """The loss with the micro-batch's part of the router's load-balancing term, and that term's metric."""
        if aux_loss is None:
            return loss, {}
        one = torch.ones((), device=loss.device)
        return loss + self.router_aux_loss_coef * aux_loss / totals.shares, {"aux_loss": (aux_loss, one)}

    # ------------------------------------------------------------------ the steps

    def setup(self, stage: str) -> None:
        """Check everything that can be known before weights are loaded, and work out the batches.

        Raises:
            ConfigError: the Trainer has no data module of the right kind, lengths do not fit, or batches do not divide.
            RewardError: a reward needs what is no column.
        """
        trainer: Any = self.trainer
        data = examples_of(trainer, self.learns_from, type(self).__name__)
        preflight.one_accumulation(trainer, "data.batch_size counts the rows of a whole step")
        texts_fit(self.model, data.longest_text, streamed=data.stream_buffer is not None)
        if longest := data.longest_val_prompt:
            own = self.evaluation.max_new_tokens
            group, new_tokens = ("sampling", self.sampling.max_new_tokens) if own is None else ("eval", own)
            preflight.fits_context(self.model, group, longest, new_tokens, "data.max_length")
        preflight.bind_validation(self.reward_functions, data)
        self.reward_functions.load()
        unused = f"{type(self).__name__} has no use for one."
        preflight.reference_is_read(self.reference, self.needs_reference, unused)
        if stage == "fit":
            if data.stream_buffer is not None:
                stream_will_do(self.reads_all_rows())
            self.plan = OfflinePlan(
                batch_size=data.batch_size,
                accumulate=trainer.accumulate_grad_batches,
                world_size=trainer.world_size,
                rows=len(data.corpus.train),
                stream_buffer=data.stream_buffer,
            )

    def on_fit_start(self) -> None:
        super().on_fit_start()
        data: Any = self.trainer.datamodule  # pyright: ignore
        if data.options.packing != "none":
            with self.rollout_context():
                self.refuse_leaks()
        if self.precomputed is not None:
            self._precompute(self.precomputed, data)

    def _precompute(self, precomputed: PrecomputedReference, data: Any) -> None:
        """Ask the reference for all that the run will read of it, and let it go. A collective."""
        corpus = data.corpus
        sets = {"train": corpus.train} | {f"val/{name}".removesuffix("/"): held for name, held in corpus.val.items()}
        if precomputed.released:
            precomputed.prepare(sets, self.texts_beside(), None)
            return
        precomputed.prepare(sets, self.texts_beside(), self._reference_source(precomputed.folder, data.val_batch_size))
        self.before_release()
        if not flattens(self.trainer.strategy):
            free_memory(self.reference_policy, self.policy)
        self.reference_policy = None
        precomputed.release()

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

    def refuse_leaks(self) -> None:
        """Refuse models in which packed texts see each other, before the first step.

        Raises:
            ConfigError: one does.
        """
        refuse_leaks(self.policy)

    def on_train_batch_start(self, batch: ExampleBatch, batch_idx: int) -> None:
        self._fill(batch, 0)
        if batch.slot == 0:
            self._records.open(batch.totals)
            self._whole = None
            if self.couples_rows and batch.totals.shares > 1:
                with self.trainer.precision_plugin.forward_context():  # open in `training_step`, and not out here
                    self._whole = WholeStep.of(self.look, batch, self.ranks)

    def training_step(self, batch: ExampleBatch, batch_idx: int) -> Tensor:
        self._micro, shares = batch, batch.totals.shares
        if self._whole is not None:
            self._whole.draw_again(batch)
        loss, metrics = self.training_loss(batch, self._whole)
        self._records.add({"loss": (loss, loss.new_tensor(1 / shares)), **metrics})
        # Lightning divides by the accumulated batches and averages over ranks; the loss already has its denominator.
        return loss * shares

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """One optimizer step, after which its metrics are logged, before any callback can save."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.after_step()
        self._records.close(self.grad_norm, skipped=self.broken_steps.last)
        every = self.trainer.log_every_n_steps  # pyright: ignore
        if every and (self.step + 1) % every == 0:
            self._log_steps(self.step + 1)

    def _log_steps(self, step: int) -> None:
        """One line of metrics for the optimizer steps since the last one."""
        settings = {**self.coefficients(), **learning_rates(self.trainer.optimizers[0])}
        generated_in = self.stopwatch.take("generate")
        metrics = self._records.line(self.ranks, settings, generated_in)
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics, step=step)
        self.log_dict(metrics, logger=False, batch_size=1, rank_zero_only=False)

    def step_batch(self) -> dict[str, Any]:
        micro = self._micro
        return (
            {}
            if micro is None
            else {"slot": micro.slot, "rows": list(micro.rows), "tokens": state.to_plain(micro.tokens)}
        )

    def rank_state(self) -> dict[str, Any]:
        return self._records.state()

    def load_rank_state(self, saved: dict[str, Any]) -> None:
        self._records.load_state(saved, self.trainer.strategy.root_device)

    # ------------------------------------------------------------------ validate, test, predict

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._fill(batch, dataloader_idx)

    on_test_batch_start = on_validation_batch_start

    def _fill(self, batch: Any, dataloader_idx: int) -> None:
        """Put precomputed log-probs into a batch of examples; prompts have none."""
        if self.precomputed is None or not isinstance(batch, ExampleBatch):
            return
        data: Any = self.trainer.datamodule  # pyright: ignore
        if self.trainer.training:
            self.precomputed.fill(batch, data.corpus.train)
        else:  # loaders of prompts stand before those of examples
            self.precomputed.fill(batch, data.corpus.val[data.loss_names[dataloader_idx - len(data.val_names)]])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, list[Any]] | None:
        """A batch of prompts is written to, as in `predict_step`; of a batch of examples the loss is measured."""
        if isinstance(batch, PromptBatch):
            return self.predict_step(batch, batch_idx, dataloader_idx)
        index = dataloader_idx - len(self.trainer.datamodule.val_names)  # pyright: ignore
        while len(self._val_averages) <= index:
            self._val_averages.append(Averages())
        with torch.no_grad():
            loss, metrics = self.loss(batch)
        part = loss.new_tensor(1 / batch.totals.shares)
        self._val_averages[index].add({"loss": (loss, part), **metrics})
        return None

    test_step = validation_step

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self._val_averages = []

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        self._log_validation("val")

    def on_test_epoch_end(self) -> None:
        self._log_validation("test")

    def _log_validation(self, stage: str) -> None:
        fitting = self.trainer.state.fn == TrainerFn.FITTING
        logged = self.log_generated(stage)
        for name, averages in zip(self.trainer.datamodule.loss_names, self._val_averages):  # pyright: ignore
            logged |= self.log_validation(prefixed(averages.reduce(self.ranks), stage, name))
        if fitting and not self.trainer.sanity_checking:
            preflight.monitors(self.trainer, logged)
