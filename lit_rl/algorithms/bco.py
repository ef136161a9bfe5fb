"""BCO: binary classifier optimisation, single completions found desirable or not, arXiv:2404.04656.

For a completion y of a prompt x:

    reward         r_y = beta (sum_t log pi(y_t) - log pi_ref(y_t))
    reward shift   delta = mean of the steps' mean rewards, from the first step to this one, without gradient
    objective      mean over rows of - log sigma(r - delta) where desirable, - w(x) log sigma(delta - r) where not

`w` is 1, or with `algo/prompt_weights=density_ratio` how much more often such a prompt has desirable completions than
undesirable ones (the paper's underlying distribution matching), by a regression on the reference's hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from lit_rl.algorithms.families.verdicts import VerdictModule
from lit_rl.algorithms.terms.density_ratio import DensityRatio, prompt_embeddings
from lit_rl.algorithms.terms.precomputed_reference import text_key
from lit_rl.algorithms.terms.whole_step import WholeStep
from lit_rl.data.offline.example import Encoded, Example
from lit_rl.data.offline.example_set import token_batch
from lit_rl.errors import ConfigError
from lit_rl.examples import TokenBatch, VerdictBatch
from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.ops.preference.verdicts import bco
from lit_rl.ops.step import Metrics

EMBEDDED = 32
"""Prompts embedded at once when the regression is fitted."""


@final
class BCO(VerdictModule):
    """Binary classifier optimisation.

    Args:
        model: The policy: a description, or its name, folder or hub id.
        reward: Reward functions for the completions that validation writes. Nothing is learned from it.
        beta: Scale of the implicit reward beta (log pi - log pi_ref), above 0.
        prompt_weights: Weighs undesirable completions by their prompts; None weighs all alike.
        shared: What every `OfflineModule` takes.
    """

    couples_rows = True

    def __init__(
        self,
        model: LanguageModel | str,
        reward: Any = None,
        *,
        beta: float = 0.1,
        prompt_weights: DensityRatio | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(model, reward, beta=beta, **shared)
        if prompt_weights is not None and self.reference.moves:
            raise ConfigError(
                f"algo/prompt_weights=density_ratio embeds prompts with the reference, and reference="
                f"{type(self.reference).__name__} changes during the run. Take reference=auto or reference=frozen_copy."
            )
        self.prompt_weights = prompt_weights
        self._known_weights: dict[bytes, float] = {}
        self._steps, self._shift = 0, 0.0
        self._step_reward: Tensor | None = None

    def look(self, batch: VerdictBatch) -> dict[str, Tensor]:
        return {"rewards": self.beta * self.ratios(batch, self.text_scores(batch.tokens))}

    def loss(self, batch: VerdictBatch, whole: WholeStep | None = None) -> tuple[Tensor, Metrics]:
        scores = self.text_scores(batch.tokens, stats=True)
        ratios = self.ratios(batch, scores)
        delta = self._delta(self.beta * ratios.detach() if whole is None else whole.columns["rewards"])
        rows = bco(ratios, batch.desirable, delta, self.beta, self._weights(batch))  # pyright: ignore
        loss, aux = self.with_aux(rows.sum() / self.denominator(batch.totals), scores.aux_loss, batch.totals)
        return loss, self.verdict_metrics(batch, scores, ratios) | {"delta": (delta, torch.ones_like(delta))} | aux

    # ------------------------------------------------------------------ the reward shift

    def _delta(self, rewards: Tensor) -> Tensor:
        """The shift with the rewards of this step taken in; what is validated shifts nothing."""
        if not self.training:
            return rewards.new_tensor(self._shift)
        self._step_reward = rewards.mean()
        return (self._steps * self._shift + self._step_reward) / (self._steps + 1)

    def after_step(self) -> None:
        super().after_step()
        if self._step_reward is not None and not self.broken_steps.last:
            self._shift += (float(self._step_reward) - self._shift) / (self._steps + 1)
            self._steps += 1
        self._step_reward = None

    def rank_state(self) -> dict[str, Any]:
        weights = self.prompt_weights.state() if self.prompt_weights else {}
        return super().rank_state() | {"steps": self._steps, "shift": self._shift, "prompt_weights": weights}

    def load_rank_state(self, saved: dict[str, Any]) -> None:
        super().load_rank_state(saved)
        self._steps, self._shift = saved["steps"], saved["shift"]
        if self.prompt_weights:
            self.prompt_weights.load_state(saved["prompt_weights"])

    # ------------------------------------------------------------------ the weights of prompts

    def _weights(self, batch: VerdictBatch) -> Tensor | None:
        """`(b,)`: the density ratio of undesirable rows, 1 of the others. None: 1 everywhere."""
        if self.prompt_weights is None:
            return None
        if not self.prompt_weights.fitted:
            self.match_prompts(self.trainer.datamodule.corpus.train.examples)  # pyright: ignore
        tokens = batch.tokens
        prompts = tokens.attention_mask & (tokens.loss_mask.long().cumsum(1) == 0)
        ratio = self._precomputed_weights(tokens, prompts)
        if ratio is None:
            ratio = self.prompt_weights.weights(self._embed(tokens, prompts))
        return torch.where(batch.desirable, 1.0, ratio)  # pyright: ignore

    def match_prompts(self, examples: Sequence[Example]) -> None:
        """Fit the density ratio to a sample of the training rows, the same on every rank.

        Raises:
            ConfigError: the sample has one kind of completions only.
        """
        assert self.prompt_weights is not None
        generator = torch.Generator().manual_seed(self.seed)
        chosen = torch.randperm(len(examples), generator=generator)[: self.prompt_weights.sample_rows].tolist()
        rows = [examples[row] for row in chosen]
        found = []
        for start in range(0, len(rows), EMBEDDED):
            texts = [[_prompt(example)] for example in rows[start : start + EMBEDDED]]
            tokens = token_batch(texts, self.model.pad_id).to(self.device)
            found.append(self._embed(tokens, tokens.attention_mask))
        self.prompt_weights.fit(torch.cat(found), torch.tensor([bool(example.desirable) for example in rows]))
        if self.trainer_or_none is not None:  # a last digit may differ between machines
            self.prompt_weights.load_state(self.trainer.strategy.broadcast(self.prompt_weights.state()))

    def before_release(self) -> None:
        """The weight of every prompt of the run, which the reference embeds."""
        if self.prompt_weights is None:
            return
        corpus: Any = self.trainer.datamodule.corpus  # pyright: ignore
        sets = (corpus.train, *corpus.val.values())
        prompts = {_key(text.ids): text for examples in sets for text in map(_before_learned, examples.examples)}
        keys, texts = list(prompts), list(prompts.values())
        with self.rollout_context():
            if not self.prompt_weights.fitted:
                self.match_prompts(corpus.train.examples)
            for start in range(0, len(texts), EMBEDDED):
                part = slice(start, start + EMBEDDED)
                tokens = token_batch([[text] for text in texts[part]], self.model.pad_id).to(self.device)
                weights = self.prompt_weights.weights(self._embed(tokens, tokens.attention_mask))
                self._known_weights |= dict(zip(keys[part], weights.tolist()))

    def _precomputed_weights(self, tokens: TokenBatch, prompts: Tensor) -> Tensor | None:
        """`(b,)`; None while the reference is there to be asked."""
        if not self._known_weights:
            return None
        rows = zip(tokens.input_ids.tolist(), prompts.sum(1).tolist())
        known = [self._known_weights[_key(ids[:count])] for ids, count in rows]
        return torch.tensor(known, device=self.device)

    @torch.no_grad()
    def _embed(self, tokens: TokenBatch, prompts: Tensor) -> Tensor:
        with self.reference.scoring(self.policy, self.reference_policy) as scorer:
            return prompt_embeddings(scorer, tokens.input_ids, prompts)


def _prompt(example: Example) -> Encoded:
    ids = example.texts[0].ids[: example.texts[0].prompt_tokens]
    return Encoded(ids, [False] * len(ids), len(ids))


def _before_learned(example: Example) -> Encoded:
    """What `BCO._weights` takes for the prompt of a batch's row."""
    text = example.texts[0]
    count = text.learned.index(True) if any(text.learned) else len(text)
    return Encoded(text.ids[:count], [False] * count, count)


def _key(prompt: list[int]) -> bytes:
    return text_key(prompt, [])
