"""Terms of the methods that learn from single verdicts: BCO's reward shift and prompt weights, KTO's mismatched texts.

BCO (2404.04656) compares a reward with the mean of the steps' mean rewards, and may weigh a prompt by how much more
often it occurs with desirable completions than with undesirable ones. KTO's baseline is taken from completions of
other prompts: `ExampleSet.before` pairs the rows of a step, so every epoch has other pairs, all of them known before
the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.terms.precomputed_reference import text_key, unpadded_rows
from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError, NumericError
from lit_rl.core.examples import TokenBatch
from lit_rl.data.example_set import Encoded, Example, ExampleSet, token_batch
from lit_rl.ops.ranges import AtLeastTwo, Positive, Range, Share

# ------------------------------------------------------------------ BCO: reward shift


class RewardShift:
    """The mean of the mean rewards of all steps so far, which changes only between steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.value = 0.0

    def with_step(self, mean: Tensor) -> Tensor:
        """Return the mean with one further step of this mean reward, 0-dim. Changes no state."""
        return (self.steps * self.value + mean) / (self.steps + 1)

    def add(self, mean: float) -> None:
        """Add a step with this mean reward."""
        self.value += (mean - self.value) / (self.steps + 1)
        self.steps += 1

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"steps": self.steps, "shift": self.value}

    def load_state(self, saved: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.steps, self.value = saved["steps"], saved["shift"]


# ------------------------------------------------------------------ BCO: prompt weights


EMBED_BATCH_SIZE = 32
"""The number of prompts in an embedding batch."""

Embed = Callable[[TokenBatch, Tensor], Tensor]
"""A function from texts and a mask of their prompts `(b, s)` to embeddings `(b, h)` of the prompts."""


@checked("algo.prompt_weights")
class DensityRatio:
    """Weights of undesirable rows that match their prompts to those of the desirable rows (UDM).

    If the two classes of completions answer different prompts, a reward could distinguish prompts instead of
    completions. A logistic regression on embeddings of prompts gives p, the probability that a prompt is of the
    desirable class if both classes are equally frequent; p / (1 - p) is the ratio of the two densities of prompts.

    Args:
        sample_rows: Training rows that the regression is fitted to, drawn once, at least 2.
        penalty: Weight of half the squared norm of its coefficients on standardised embeddings, above 0.
        low: Smallest weight, in (0, 1].
        high: Largest weight, 1 or more.
    """

    def __init__(
        self,
        sample_rows: AtLeastTwo = 1024,
        *,
        penalty: Positive = 1.0,
        low: Share = 0.5,
        high: Annotated[float, Range(1)] = 10.0,
    ) -> None:
        self.sample_rows, self.penalty, self.low, self.high = sample_rows, penalty, low, high
        self._fitted: dict[str, Tensor] | None = None

    @property
    def fitted(self) -> bool:
        return self._fitted is not None

    def fit(self, embeddings: Tensor, desirable: Tensor) -> None:
        """Fit the regression. The two classes have the same total weight.

        Args:
            embeddings: `(n, h)` of prompts.
            desirable: Bool `(n,)`, with both classes.

        Raises:
            ConfigError: all rows are of one class.
            NumericError: an embedding is not finite.
        """
        good = int(desirable.sum())
        if not 0 < good < len(desirable):
            raise ConfigError(
                f"algo/prompt_weights=density_ratio: {good} of {len(desirable)} sampled rows are desirable, and the "
                "ratio compares the prompts of both kinds. Raise algo.prompt_weights.sample_rows, or take "
                "algo/prompt_weights=none."
            )
        x, y = embeddings.detach().double().cpu(), desirable.double().cpu()
        if not bool(x.isfinite().all()):
            raise NumericError("algo/prompt_weights=density_ratio: the embedding of a prompt is not finite.")
        mean, scale = x.mean(0), x.std(0, correction=0)
        scale = torch.where(scale > 0, scale, 1.0)
        row_weights = torch.where(desirable.cpu(), len(y) / (2 * good), len(y) / (2 * (len(y) - good)))
        coefficients = _fit_logistic_regression((x - mean) / scale, y, row_weights, self.penalty)
        with torch.inference_mode(False):  # the first call may be in validation, and training uses these later
            self._fitted = {"mean": mean.clone(), "scale": scale.clone(), "coefficients": coefficients}

    @torch.no_grad()
    def weights(self, embeddings: Tensor) -> Tensor:
        """Return p / (1 - p) of each prompt, float32 `(b,)` within `[low, high]`."""
        assert self._fitted is not None
        found = {name: part.to(embeddings.device) for name, part in self._fitted.items()}
        standard = (embeddings.double() - found["mean"]) / found["scale"]
        # p / (1 - p) of a logistic function is the exponential of its argument.
        log_odds = standard @ found["coefficients"][:-1] + found["coefficients"][-1]
        return log_odds.exp().clamp(self.low, self.high).float()

    def state(self) -> dict[str, Tensor]:
        return dict(self._fitted or {})

    def load_state(self, saved: dict[str, Tensor]) -> None:
        self._fitted = dict(saved) or None


class PromptWeights:
    """The weights of prompts in a run: by their embeddings, or computed before the reference was released.

    Args:
        ratio: The density ratio.
    """

    def __init__(self, ratio: DensityRatio) -> None:
        self.ratio = ratio
        self.known: dict[bytes, float] = {}
        """Weights by the prompt's `text_key`."""

    def fit(self, examples: Sequence[Example], embed: Embed, *, seed: int, pad_id: int, ranks: Ranks) -> None:
        """Fit the ratio to a sample of the training rows, the same on every rank. A collective.

        Args:
            examples: All training rows.
            embed: Embeds prompts.
            seed: Seed of the sample.
            pad_id: The tokenizer's padding token.
            ranks: The ranks of the run. All take rank 0's regression, as last digits may differ between machines.

        Raises:
            ConfigError: the sample has completions of one class only.
            NumericError: an embedding is not finite.
        """
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(examples), generator=generator)[: self.ratio.sample_rows].tolist()
        rows = [examples[row] for row in chosen]
        found = []
        for tokens in _embed_batches([_prompt_text(example) for example in rows], pad_id):
            tokens = tokens.to(ranks.device)
            found.append(embed(tokens, tokens.attention_mask))
        self.ratio.fit(torch.cat(found), torch.tensor([bool(example.desirable) for example in rows]))
        self.ratio.load_state(ranks.broadcast(self.ratio.state()))

    def compute(
        self, examples: Iterable[Example], embed: Embed, *, pad_id: int, device: torch.device | str = "cpu"
    ) -> None:
        """Compute the weights of all prompts of these rows, for use after the reference is released."""
        prompts = {text_key(text.ids, []): text for text in map(_text_before_learned, examples)}
        weights: list[float] = []
        for tokens in _embed_batches(list(prompts.values()), pad_id):
            tokens = tokens.to(device)
            weights += self.ratio.weights(embed(tokens, tokens.attention_mask)).tolist()
        self.known |= dict(zip(prompts, weights, strict=True))

    def of(self, tokens: TokenBatch, embed: Embed) -> Tensor:
        """Return the weights, float32 `(b,)`, of a batch's prompts: the tokens before the first learned one."""
        prompts = tokens.attention_mask & (tokens.loss_mask.long().cumsum(1) == 0)
        if not self.known:
            return self.ratio.weights(embed(tokens, prompts))
        rows = zip(tokens.input_ids.tolist(), prompts.sum(1).tolist())
        known = [self.known[text_key(ids[:count], [])] for ids, count in rows]
        return torch.tensor(known, device=tokens.input_ids.device)


def _embed_batches(texts: Sequence[Encoded], pad_id: int) -> Iterator[TokenBatch]:
    for start in range(0, len(texts), EMBED_BATCH_SIZE):
        yield token_batch([[text] for text in texts[start : start + EMBED_BATCH_SIZE]], pad_id)


def _prompt_text(example: Example) -> Encoded:
    ids = example.texts[0].ids[: example.texts[0].prompt_tokens]
    return Encoded(ids, [False] * len(ids), len(ids))


def _text_before_learned(example: Example) -> Encoded:
    """Return the tokens before the first learned one, which `PromptWeights.of` takes for the prompt."""
    text = example.texts[0]
    count = text.learned.index(True) if any(text.learned) else len(text)
    return Encoded(text.ids[:count], [False] * count, count)


@torch.no_grad()
def prompt_embeddings(scorer: nn.Module | Callable[..., Any], ids: Tensor, attended: Tensor) -> Tensor:
    """Return a model's last hidden states averaged over the tokens of each prompt, float32 `(b, h)`.

    Args:
        scorer: A causal language model.
        ids: `(b, s)`, padded on the right.
        attended: Bool `(b, s)`: True on tokens of the prompt. The embedding of an empty prompt is 0.
    """
    width = max(1, int(attended.sum(1).max()))
    ids, attended = ids[:, :width], attended[:, :width]
    mask = attended.clone()
    mask[:, 0] = True  # a row that attends to nothing has no softmax
    output = scorer(
        input_ids=ids,
        attention_mask=mask.long(),
        position_ids=(mask.long().cumsum(1) - 1).clamp(min=0),
        logits_to_keep=1,
        output_hidden_states=True,
        use_cache=False,
    )
    hidden = output.hidden_states[-1].to(ids.device).float().masked_fill(~attended.unsqueeze(-1), 0.0)
    return hidden.sum(1) / attended.sum(1, keepdim=True).clamp(min=1)


def _fit_logistic_regression(x: Tensor, y: Tensor, row_weights: Tensor, penalty: float) -> Tensor:
    """Minimise the weighted cross-entropy plus penalty, which is convex; return `(h + 1,)`, the intercept last."""
    with torch.enable_grad(), torch.inference_mode(False):
        x, y, row_weights = x.clone(), y.clone(), row_weights.clone()
        coefficients = torch.zeros(x.shape[1] + 1, dtype=x.dtype, requires_grad=True)
        solver = torch.optim.LBFGS(
            [coefficients], max_iter=500, tolerance_grad=1e-9, tolerance_change=1e-14, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            solver.zero_grad()
            logits = x @ coefficients[:-1] + coefficients[-1]
            loss = binary_cross_entropy_with_logits(logits, y, weight=row_weights, reduction="sum")
            loss = loss + 0.5 * penalty * coefficients[:-1].square().sum()
            loss.backward()
            return loss

        solver.step(closure)
    return coefficients.detach()


# ------------------------------------------------------------------ KTO: mismatched completions


RowsOfSteps = Iterable[Sequence[int]]
"""The row indices of every optimizer step, over all ranks."""


@dataclass(frozen=True)
class RunLength:
    """The Trainer's limits on the length of a run; -1 is no limit."""

    max_steps: int
    max_epochs: int | None
    limit_train_batches: int | float = 1.0

    @classmethod
    def of(cls, trainer: Any) -> RunLength:
        return cls(trainer.max_steps, trainer.max_epochs, trainer.limit_train_batches)

    def check(self) -> None:
        """Refuse a run without an end.

        Raises:
            ConfigError: no limit ends the run, so that its steps cannot all be computed before the first.
        """
        if self.max_steps < 0 and (self.max_epochs or -1) < 0:
            raise ConfigError(
                "algo.precompute_reference=true computes log-probs of the mismatched completions of every step, but "
                "the number of steps is unknown. Set trainer.max_steps or trainer.max_epochs, or "
                "algo/verdict=apo_zero_unpaired, which has no baseline."
            )

    def epochs(self, loader: Any) -> Iterator[tuple[int, list[list[int]]]]:
        """Yield number and `RowsOfSteps` of every epoch that the run will reach, of an `ExampleLoader`."""
        limit, size = self.limit_train_batches, loader.order.prompts_per_rollout
        batches = int(len(loader) * limit) if isinstance(limit, float) else min(limit, len(loader))
        each, left = -(-batches // loader.slots), self.max_steps
        epoch = 0
        while (left < 0 or left > 0) and epoch != self.max_epochs and each:
            count = each if left < 0 else min(each, left)
            rows = loader.order.epoch(epoch)
            yield epoch, [rows[step * size : (step + 1) * size] for step in range(count)]
            epoch, left = epoch + 1, max(0, left - count) if left > 0 else left


def mismatched_texts(
    train: ExampleSet, epochs: Iterable[tuple[int, RowsOfSteps]], val: Mapping[str, ExampleSet]
) -> Iterator[tuple[str, ExampleSet]]:
    """Yield each epoch's prompts with their mismatched completions, as texts; then those of validation.

    Each epoch is a separate set, so that a longer run finds the files of a shorter one.
    """
    for epoch, steps in epochs:
        yield f"the mismatched completions of epoch {epoch}", _mismatched_set(train, steps)
    for name, data in val.items():
        yield f"the mismatched completions of val/{name}".removesuffix("/"), _mismatched_set(data, [range(len(data))])


def _mismatched_set(data: ExampleSet, steps: RowsOfSteps) -> ExampleSet:
    """Return the mismatched texts that the set puts into the batches of these steps."""
    texts: list[Encoded] = []
    for rows in steps:
        batch: Any = data.batch(rows, data.before(rows), data.totals(rows), step=0, slot=0)
        texts += [Encoded(ids, learned, 0) for ids, learned in unpadded_rows(batch.mismatched)]
    return ExampleSet("texts", [Example((text,), "") for text in texts], data.pad_id)
