"""The loop of the methods that learn from a data set: optimizer steps, their metrics, and validation by the loss.

The data module cuts an optimizer step of `data.batch_size` rows into micro-batches, and tells each what the whole step
counts; so a loss has the step's denominator, however the step is cut. No term of an objective is here, and nothing is
generated: `offline_policy.py` adds that for policies, and reward models go without.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_rl.algorithms.evaluation.speed import Work
from lit_rl.algorithms.evaluation.statistics import Averages
from lit_rl.algorithms.evaluation.validation import prefixed
from lit_rl.algorithms.loop.module import PolicyModule
from lit_rl.algorithms.preflight import data as preflight
from lit_rl.algorithms.preflight.cut import Cut, Step, rows_scored_at_once
from lit_rl.algorithms.preflight.memory import Lengths
from lit_rl.algorithms.preflight.offline import AllRows, example_data, examples_of, stream_will_do, texts_fit
from lit_rl.algorithms.ranks import data_ranks
from lit_rl.algorithms.records import OfflineRecords, learning_rates
from lit_rl.algorithms.rollouts import state
from lit_rl.algorithms.rollouts.plan import OfflinePlan
from lit_rl.algorithms.terms.whole_step import WholeStep
from lit_rl.data.offline.example import Kind
from lit_rl.errors import in_range
from lit_rl.examples import ExampleBatch, Totals
from lit_rl.models.policy.flops import Span
from lit_rl.ops.step import Metrics


class OfflineModule(PolicyModule, ABC):
    """Abstract base of methods that learn from a data set: subclasses define the loss. Validation measures it.

    Args:
        model: The model to train: a description, or its name, folder or hub id.
        router_aux_loss_coef: Weight of the load-balancing loss of a mixture of experts (2101.03961, eq. 4 to 6), which
            is defined over a micro-batch.
        shared: Arguments of every `PolicyModule`.
    """

    learns_from: ClassVar[Kind]
    """The kind of examples that the data module must provide."""

    hub_tags = ()

    headline: ClassVar[tuple[str, ...]] = ("loss",)
    """Validation metrics that a run shows before and after training."""

    def __init__(self, model: Any, *, router_aux_loss_coef: float = 0.0, **shared: Any) -> None:
        super().__init__(model, **shared)
        in_range("algo.router_aux_loss_coef", router_aux_loss_coef, low=0)
        self.router_aux_loss_coef = router_aux_loss_coef
        self.plan: OfflinePlan | None = None
        self.samples: dict[str, list[Any]] = {}
        self._records = OfflineRecords()
        self._rates: dict[str, float] = {}
        self._val_averages: list[Averages] = []
        self._micro: ExampleBatch | None = None
        self._whole: WholeStep | None = None
        self._scored: int | None = None

    # ------------------------------------------------------------------ interface of a method

    @abstractmethod
    def loss(self, batch: Any, whole: WholeStep | None = None) -> tuple[Tensor, Metrics]:
        """Return this micro-batch's share of the objective (shares of a step sum to it), and metrics. Changes no state.

        Args:
            batch: The micro-batch; `batch.totals` are the totals of its step.
            whole: The columns of `look` of the whole step, if `couples_rows`. None: this micro-batch is the whole step.
        """

    def training_loss(self, batch: Any, whole: WholeStep | None = None) -> tuple[Tensor, Metrics]:
        """Return the loss in a training step. A method that keeps values until `after_step` overrides this."""
        return self.loss(batch, whole)

    couples_rows = False
    """True if a row's loss depends on the other rows of its optimizer step: then `look` is called before the step."""

    def look(self, batch: Any) -> dict[str, Tensor]:
        """Return columns `(b,)` of a micro-batch, without gradient, that the losses of other rows depend on."""
        return {}

    def denominator(self, totals: Totals) -> int:
        """Return the denominator of a step's objective: its rows, unless a method overrides this."""
        return max(1, totals.rows)

    def reads_all_rows(self) -> Iterator[AllRows]:
        """Return the active terms that read every row before the first step, so that streams are refused."""
        return iter(())

    def after_step(self) -> None:
        """Update what changes between optimizer steps. Called after each of them."""

    def coefficients(self) -> dict[str, float]:
        """Return current values of coefficients that change during the run, for the log."""
        return {}

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
        data = examples_of(trainer, self.learns_from, type(self).__name__)
        preflight.one_accumulation(trainer, "data.batch_size counts the rows of a whole step")
        texts_fit(self.model, data.longest_text, streamed=data.stream_buffer is not None)
        unused = f"{type(self).__name__} has no use for one."
        preflight.reference_is_read(self.reference, self.needs_reference, unused)
        if stage == "fit":
            columns = data.unread_columns(margins=self.reads_margins)
            preflight.say_unread(data, columns, self.columns_read(columns), sees=self.model.sees)
            if data.stream_buffer is not None:
                stream_will_do(self.reads_all_rows())
            plan = OfflinePlan(
                batch_size=data.batch_size,
                accumulate=self.accumulation_by_hand,
                world_size=self.data_ranks,
                rows=len(data.corpus.train),
                stream_buffer=data.stream_buffer,
            )
            accumulate, why = self.cut_step(Step(data.batch_size // self.data_ranks, 1))
            self.plan = replace(plan, accumulate=accumulate, why=why)
            self.check_length(data)
        elif self.cut is None:
            self.fit_scoring()

    reads_margins = False
    """True if the loss of pairs reads the column `margin`."""

    def columns_read(self, columns: Sequence[str]) -> set[str]:
        """Return the columns that are read besides the learned texts."""
        return set()

    def check_processes(self, data: Any, trainer: Any) -> None:
        examples = example_data(data, self.learns_from, type(self).__name__)
        if not examples.size_is_given:
            return  # checked once the rows are read
        OfflinePlan(
            batch_size=examples.batch_size,
            accumulate=trainer.accumulate_grad_batches,
            world_size=data_ranks(trainer),
            rows=0,
        )

    def lengths(self) -> Lengths:
        longest, scored = self.longest_text(), self.most_scored_tokens()
        return Lengths(longest - scored, scored, texts=2 if self.learns_from == "pairs" else 1)

    @property
    def most_texts(self) -> int | None:
        rows = self.cut.scored if self.cut is not None else self._scored
        return None if rows is None else rows * (2 if self.learns_from == "pairs" else 1)

    def fit_scoring(self) -> None:
        """Bound the rows scored at once in a validation without training."""
        if self.micro_batch_size != "auto":
            return
        memory, room = self.memory(), self.room()
        if memory is not None and room is not None:
            unlearned = replace(memory.numbers, gradient=0, moments=0, remainder=0)
            self._scored = rows_scored_at_once(replace(memory, numbers=unlearned, masters=0), room)

    def longest_text(self) -> int:
        """Return the number of tokens of the longest text of a step."""
        data: Any = self.trainer.datamodule  # pyright: ignore
        return data.longest_text

    def most_scored_tokens(self) -> int:
        """Return the most tokens of a text that a step scores. Without a fused head all rows have the same width."""
        data: Any = self.trainer.datamodule  # pyright: ignore
        return data.most_learned if self.model.forward_options.fused_head else self.longest_text()

    def resume_cut(self, cut: Cut) -> None:
        super().resume_cut(cut)
        if self.plan is not None:
            self.plan = replace(self.plan, accumulate=cut.micro_batches, why=cut.why)

    def on_train_batch_start(self, batch: ExampleBatch, batch_idx: int) -> None:
        self.in_a_step = True
        if batch.slot == 0:
            self.speed.begin()
            self._records.open(batch.totals)
            self.phase_memory.begin()
            self._whole = None
            if self.couples_rows and batch.totals.shares > 1:
                with self.trainer.precision_plugin.forward_context():  # Lightning opens it in `training_step` only
                    self._whole = WholeStep.of(self.look, batch, self.ranks)

    def training_step(self, batch: ExampleBatch, batch_idx: int) -> Tensor:
        self._micro, shares = batch, batch.totals.shares
        if self._whole is not None:
            self._whole.draw_again(batch)
        loss, metrics = self.training_loss(batch, self._whole)
        self._records.add({"loss": (loss, loss.new_full((), 1 / shares)), **metrics})
        # Lightning divides by the accumulated batches and averages over ranks; the loss already has its denominator.
        return self.with_blind_rows(loss * shares)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Take an optimizer step, and log its metrics before any callback can save."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.after_step()
        self.speed.add(self._work())
        self._records.close(self.grad_norm, skipped=self.broken_steps.last)
        self.phase_memory.end("update")
        self._rates = learning_rates(self.trainer.optimizers[0])
        every = self.trainer.log_every_n_steps  # pyright: ignore
        if every and (self.global_step + 1) % every == 0:
            self._log_steps(self.global_step + 1)

    def log_rest(self) -> None:
        if self.trainer.log_every_n_steps and self.told_at != self.global_step:  # pyright: ignore
            self._log_steps(self.global_step, kept=True)

    def _log_steps(self, step: int, *, kept: bool = False) -> None:
        """Log one line of metrics for the optimizer steps since the last line."""
        seconds = self.take_generation_seconds()
        metrics = self._records.line(self.ranks, self.coefficients(), self._rates, seconds, kept=kept)
        metrics |= self.speed_of({"generate": seconds, "update": metrics["time/update"]})
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics, step=step)
        self.tell_callbacks(metrics, step)

    def _work(self) -> Work:
        """Return this rank's share of the optimizer step's work, without KTO's mismatched texts and GKD's teacher."""
        assert self._micro is not None
        totals, ref = self._micro.totals, self._micro.ref_logprobs
        spans, reads = [Span(0, tokens) for tokens in totals.texts], int(self.needs_reference and ref is None)
        flops = self.flops_of_update(spans, spans, totals.learned, reads=reads)
        return Work(flops / self.data_ranks, totals.learned / self.data_ranks)

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

    def of_other_ranks(self, saved: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the counts without averages, whose weights depend on the number of ranks."""
        kept = {"tokens_seen": saved[0]["tokens_seen"], "averages": Averages().state()}
        return super().of_other_ranks(saved) | kept

    def stays(self) -> dict[str, Any]:
        return super().stays() | self._records.state()

    def dropped(self, saved: Sequence[dict[str, Any]], slots: int) -> str:
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
