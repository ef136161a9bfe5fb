"""The base of the methods that train a policy from a data set: log-probs of texts, and validation that also generates.

The steps are those of every method that learns from a data set (`offline.py`); completions are written and scored as
those of every policy are (`generating.py`). The log-probs of a reference may be computed before the training.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.loop.generating import GeneratingModule
from lit_rl.algorithms.loop.offline import OfflineModule
from lit_rl.algorithms.optim.strategies import flattens
from lit_rl.algorithms.preflight import data as preflight
from lit_rl.algorithms.preflight.offline import AllRows
from lit_rl.algorithms.terms.precomputed_reference import PrecomputedReference, ReferenceSource, free_memory
from lit_rl.algorithms.terms.reference_files import ReferenceFiles, hash_of_weights
from lit_rl.data.offline.example_set import ExampleSet
from lit_rl.errors import ConfigError
from lit_rl.examples import ExampleBatch, TokenBatch
from lit_rl.models.policy.text_forward import TextScores, refuse_leaks, score_texts
from lit_rl.rollout import PromptBatch


class OfflinePolicyModule(OfflineModule, GeneratingModule, ABC):
    """Abstract base of methods that train a policy from a data set: subclasses define the loss.

    Validation measures the loss, and generates completions of the validation prompts.

    Args:
        model: The policy: a description, or its name, folder or hub id.
        reward: Reward functions and weights, or one function, for the completions that validation generates; None only
            generates them. Nothing is learned from it.
        shared: Arguments of every `OfflineModule` and every `GeneratingModule`.
    """

    def __init__(self, model: Any, reward: Any = None, **shared: Any) -> None:
        super().__init__(model, reward=reward, **shared)  # by name: `OfflineModule` passes it to `GeneratingModule`

    precomputed: PrecomputedReference | None = None
    """Log-probs of the reference that are computed before the training, in the methods that support it."""

    def texts_beside(self) -> Iterable[tuple[str, ExampleSet]]:
        """Return named sets of further texts, besides the rows, whose reference log-probs the loss reads."""
        return ()

    def before_release(self) -> None:
        """Compute whatever else needs the reference, before a precomputed one is released."""

    def reads_all_rows(self) -> Iterator[AllRows]:
        if self.precomputed is not None:
            yield AllRows("algo.precompute_reference=true asks the reference about", "set it to false")

    def after_step(self) -> None:
        if self.needs_reference:
            self.reference.update(self.policy, self.reference_policy, self.global_step + 1)

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
            preflight.fits_context(self.model, f"{group}.max_new_tokens", longest, new_tokens, "data.max_length")
        preflight.evaluation_is_used(self.evaluation, self.trainer, data.val_names, stage)
        preflight.bind_validation(self.reward_functions, data)
        self.load_rewards()
        if stage != "fit":
            self.fit_decoding()

    def columns_read(self, columns: Sequence[str]) -> set[str]:
        return self.reward_functions.reads(columns)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        data: Any = self.trainer.datamodule  # pyright: ignore
        if data.options.packing != "none":
            with self.rollout_context():
                self.refuse_leaks()
        if self.precomputed is not None and self.model.sees and next(iter(self.texts_beside()), None) is not None:
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
