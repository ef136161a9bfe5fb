"""The base of the methods that train a model to score texts: the head, its scores, and its export."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lit_rl.algorithms.loop.offline import OfflineModule
from lit_rl.algorithms.optim.optimizers import OptimizerFactory
from lit_rl.algorithms.optim.schedules import GivenSchedule
from lit_rl.examples import TokenBatch
from lit_rl.models.export.policy import ExportReport, model_card
from lit_rl.models.policy.loaded import GivenModel, GivenTokenizer
from lit_rl.models.scoring.export import export_scoring
from lit_rl.models.scoring.forward import scoring_logits
from lit_rl.models.scoring.model import Scoring, check_scoring, load_scoring

# transformers has no classifiers over images for most model families, so the card shows how lit_rl calls the model.
_HOW_TO_ASK = """from pathlib import Path

from lit_rl.data.images import image_of
from lit_rl.rewards import RewardModel

score = RewardModel("path/to/this/folder")
photo = image_of(Path("photo.png").resolve(), "photo")
asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is shown?"}]}]
score([asked], [[{"role": "assistant", "content": "a reply"}]], images=[[photo]])"""


class ScalarModule(OfflineModule, ABC):
    """Abstract base of scoring models: subclasses define what is scored, and the loss of the scores.

    Here the `policy` of the base classes is the scoring model.

    Args:
        model: The language model whose trunk it starts from, or a scoring model of the same kind to train further: a
            description, or its name, folder or hub id. In Python also a classifier that is already loaded.
        tokenizer: The tokenizer of a classifier that is already loaded.
        optimizer: Factory of the optimizer. None is AdamW at a learning rate of 1e-6.
        scheduler: The learning-rate schedule, or a function from an optimizer to a scheduler of torch, which steps once
            an optimizer step. None is linear to zero.
        seed: Seed of the fresh head.
        router_aux_loss_coef: Weight of the load-balancing loss of a mixture of experts (2101.03961, eq. 4 to 6), which
            is defined over a micro-batch.
        micro_batch_size: Rows of a forward pass on each rank, instead of `trainer.accumulate_grad_batches`; "auto"
            takes as many as fit into memory.
    """

    scoring: ClassVar[Scoring]
    head = "none"

    def __init__(
        self,
        model: GivenModel,
        *,
        tokenizer: GivenTokenizer = None,
        optimizer: OptimizerFactory | None = None,
        scheduler: GivenSchedule | None = None,
        seed: int = 0,
        router_aux_loss_coef: float = 0.0,
        micro_batch_size: int | Literal["auto"] | None = None,
    ) -> None:
        shared: dict[str, Any] = {"optimizer": optimizer, "scheduler": scheduler, "seed": seed}
        shared |= {"tokenizer": tokenizer, "micro_batch_size": micro_batch_size}
        super().__init__(model, router_aux_loss_coef=router_aux_loss_coef, **shared)

    @property
    def loaded_by(self) -> str:
        return self.scoring.auto

    def load_policy(self) -> nn.Module:
        return load_scoring(self.model, self.scoring)

    def setup(self, stage: str) -> None:
        check_scoring(self.model, self.scoring)
        super().setup(stage)

    def logits(self, tokens: TokenBatch) -> Tensor:
        """Return the logits in float32, with gradient: `(b, labels)`, or `(b, s, labels)` for tokens."""
        most = self.forward_options.most_rows
        if most is None or torch.is_grad_enabled():
            return scoring_logits(self.policy, tokens)[0]
        parts = torch.arange(len(tokens), device=tokens.input_ids.device).split(most)
        return torch.cat([scoring_logits(self.policy, tokens.take(rows))[0] for rows in parts])

    def logits_and_aux(self, tokens: TokenBatch) -> tuple[Tensor, Tensor | None]:
        """Return the logits, and the router's load-balancing loss if that has a weight."""
        if self.router_aux_loss_coef == 0:
            return self.logits(tokens), None
        return scoring_logits(self.policy, tokens, router_aux=True)

    @abstractmethod
    def scores(self, batch: Any) -> dict[str, list[Any]]:
        """Return the scores of a batch, as columns for `predict`."""

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, list[Any]]:
        return {"row": list(batch.rows), **self.scores(batch)}

    def reads(self) -> dict[str, Any]:
        """Return settings of the exported config that make texts be read as in training."""
        return {}

    def export(self, weights: Mapping[str, Tensor], folder: str | Path, facts: Mapping[str, Any]) -> ExportReport:
        how = _HOW_TO_ASK if self.model.sees else None
        card = model_card(facts, loaded_by=self.scoring.auto, pipeline=self.scoring.pipeline, how_to_load=how)
        return export_scoring(self.model, self.scoring, weights, self.policy, folder, card=card, reads=self.reads())
