"""Supervised text learned beside a reinforcement-learning objective: PPO-ptx (2203.02155), CHORD (2508.11408)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lit_rl.core.errors import ConfigError
from lit_rl.data.encode import Encoder
from lit_rl.data.example_set import Example, ExampleSet
from lit_rl.data.supervised_text import SupervisedText
from lit_rl.models.forward import score_texts
from lit_rl.models.language_model import ForwardOptions
from lit_rl.ops.reductions import Metrics, masked_sum


class SupervisedTerm:
    """The loss of supervised text, with a weight that may decay: a function of the step's number, without state.

    Args:
        texts: Texts of each optimizer step. None: no term.
        coef: Weight of the loss at the first step, at least 0.
        loss: `(logprobs) -> (b, t)`: the loss of each token.
        decay_steps: Optimizer steps over which the weight goes to `final_coef` in a straight line. None: it stays.
        final_coef: Weight after them, at least 0.

    Raises:
        ConfigError: texts without a weight, a weight without texts, or a decay that is none.
    """

    def __init__(
        self,
        texts: SupervisedText | None,
        coef: float,
        loss: Callable[..., Tensor],
        decay_steps: int | None,
        final_coef: float,
    ) -> None:
        if (texts is None) != (coef == 0):
            raise ConfigError(
                f"algo.ptx_coef={coef} and algo.ptx.path={None if texts is None else texts.path}: "
                "supervised text needs both, and a weight above 0. Set both, or neither."
            )
        if decay_steps is None and final_coef:
            raise ConfigError(
                f"algo.ptx_final_coef={final_coef} is the weight after algo.ptx_decay_steps, which is null, so the "
                "weight stays as it is. Set algo.ptx_decay_steps, or leave this out."
            )
        if texts is None and decay_steps is not None:
            raise ConfigError(
                f"algo.ptx_decay_steps={decay_steps}: there is no supervised text whose weight could decay. Set "
                "algo.ptx.path and algo.ptx_coef, or leave it out."
            )
        self.texts, self.coef, self.loss = texts, coef, loss
        self.decay_steps, self.final_coef = decay_steps, final_coef
        self.largest: Example | None = None
        """The text with most image tokens, once `start` has read them; None without images."""
        self._read_by: tuple[Encoder, int] | None = None
        self._latest: tuple[int, ExampleSet] | None = None

    def start(self, encoder: Encoder, max_image_pixels: int) -> None:
        """Read and check the texts, and keep how they are read.

        Args:
            encoder: Encoder of texts with the policy's tokenizer and processor.
            max_image_pixels: Width times height of an image in them, at most.

        Raises:
            DataError, ConfigError, BackendError: as `SupervisedText.check`.
        """
        assert self.texts is not None
        self._read_by, self._latest = (encoder, max_image_pixels), None
        self.largest = self.texts.check(*self._read_by)

    def weight(self, step: int) -> float:
        """Return the weight of the loss in an optimizer step, counted from 0."""
        if self.decay_steps is None:
            return self.coef
        done = min(step / self.decay_steps, 1.0)
        return (1 - done) * self.coef + done * self.final_coef

    def share(
        self,
        policy: nn.Module,
        *,
        step: int,
        seed: int,
        part: int,
        parts: int,
        device: torch.device,
        options: ForwardOptions,
        sharded: bool,
    ) -> tuple[Tensor, Metrics]:
        """Return a part of the weighted mean loss over the learned tokens of the step's texts, times the number of
        parts.

        The texts of an optimizer step are fixed by its number, and their rows are dealt to the parts (micro-batches of
        all ranks), so the gradient does not depend on how the step is cut.

        Args:
            policy: The policy.
            step: Number of the optimizer step, from 0.
            seed: Seed of the order of the texts.
            part: Number of this part, from 0.
            parts: Number of parts of the step.
            device: Device of the policy.
            options: Options of the forward pass.
            sharded: Ranks share the weights, and each takes as many passes as the others: also in a part without texts.
        """
        assert self.texts is not None
        weight, zero = self.weight(step), torch.zeros((), device=device)
        if not weight:
            return zero, {}
        if self._latest is None or self._latest[0] != step:  # all parts of a step have the same
            assert self._read_by is not None, "start was not called"
            encoder, max_image_pixels = self._read_by
            self._latest = step, self.texts.step(encoder, step, seed, max_image_pixels)
        texts = self._latest[1]
        rows, own = range(len(texts)), range(part, len(texts), parts)
        if not own and not sharded:
            return zero, {"ptx_loss": (zero, zero)}
        totals = texts.totals(rows, parts)
        # Pixels are made of its own rows alone.
        batch = texts.batch(own or range(1), (), totals, step=step, slot=part, width=texts.longest)
        own_texts, total = batch.tokens.to(device), torch.tensor(max(1, totals.tokens), device=device)
        scores = score_texts(policy, own_texts, options=options)
        learned = own_texts.learned & bool(own)
        loss = masked_sum(self.loss(scores.logprobs), learned)
        return weight * loss / total * parts, {"ptx_loss": (loss.detach(), learned.sum())}
