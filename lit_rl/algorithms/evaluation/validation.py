"""Validation by generating: own sampling, means with 95 % intervals, pass@k, each prompt counted once.

With `eval.log_policy` the policy and its reference score the completions too: entropy and distance to the reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.evaluation.summary_statistics import (
    Averages,
    mean_with_interval,
    pass_at_k,
    rollout_metrics,
)
from lit_rl.algorithms.optim.strategies import shards_weights
from lit_rl.algorithms.rollouts.episode_outcomes import episode_metrics
from lit_rl.algorithms.rollouts.rollout_plan import without_gradient
from lit_rl.core.declared_settings import checked
from lit_rl.core.episode import Episode
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Completions, PromptBatch, Sampling
from lit_rl.core.transfers import to_host
from lit_rl.models.forward import score
from lit_rl.models.language_model import ForwardOptions
from lit_rl.ops.ranges import AtLeastOne, AtLeastZero, NotNegative, Share
from lit_rl.ops.reductions import masked_sum
from lit_rl.rewards.weighted_rewards import Scores


@checked("eval")
@dataclass(frozen=True)
class Evaluation:
    """The sampling of `validate`, `test` and `predict`, independent of the training's truncation.

    Args:
        group_size: Completions a prompt. Above 1, pass@k is reported too.
        temperature: 0 is greedy decoding; a `group_size` above 1 is useful only above 0.
        top_p: As `Sampling.top_p`.
        top_k: As `Sampling.top_k`.
        max_new_tokens: Longest response in tokens; null takes `sampling.max_new_tokens`.
        limit: Most prompts of each validation set; null takes all.
        win_rate_against: A model to compare the policy's completions with, on the same prompts: its name, folder or hub
            id, or "base" for the policy before its first step. Null compares with none.
        log_policy: Score the completions again, with the policy and, where the objective has a KL, with the reference,
            under the training's distribution: `val/entropy`, `val/kl`; and the loss of those that were drawn from it:
            `val/loss`.
    """

    group_size: AtLeastOne = 1
    temperature: NotNegative = 0.0
    top_p: Share = 1.0
    top_k: AtLeastZero = 0
    max_new_tokens: AtLeastOne | None = None
    limit: AtLeastOne | None = None
    win_rate_against: str | None = None
    log_policy: bool = False

    def sampling(self, training: Sampling) -> Sampling:
        """Return the training's stop strings and lengths with the evaluation's own distribution."""
        return replace(
            training,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=0.0,
            repetition_penalty=1.0,
            max_new_tokens=self.max_new_tokens or training.max_new_tokens,
            min_new_tokens=0,
        )


class EvaluationRows:
    """The results of the validation of one data set, by row of the set: a row seen twice counts once."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self.names: tuple[str, ...] = ()
        self.objective = Averages()
        """The loss, and metrics of it."""

    def add(
        self,
        batch: PromptBatch,
        completions: Completions,
        scores: Scores,
        wins: torch.Tensor | None = None,
        of_tokens: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Add the numbers of one batch; completions of a prompt are neighbours.

        `wins`: `(b,)`, the probability of each completion to be better than the other model's; NaN without a verdict.
        `of_tokens`: `(b, t)` by name, whose means over sampled tokens are logged.
        """
        sums = {name: masked_sum(each, completions.response_mask, 1) for name, each in (of_tokens or {}).items()}
        self.names = scores.names
        per_prompt = len(scores.total) // len(batch)
        # In one transfer for the whole batch, as it waits for the device.
        totals, values, *counted = to_host([scores.total, scores.values, *sums.values()])
        lengths, ended = completions.on_host.lengths, completions.on_host.ended
        sums = dict(zip(sums, counted))
        for i, row in enumerate(batch.rows):
            part = slice(i * per_prompt, (i + 1) * per_prompt)
            self.rows[row] = {
                "total": totals[part].tolist(),
                "values": values[part].tolist(),
                "length": lengths[part].tolist(),
                "ended": ended[part].tolist(),
                "wins": None if wins is None else wins[part].tolist(),
                "sums": {name: each[part].tolist() for name, each in sums.items()},
                # Without their texts.
                "episodes": [
                    replace(each, prompt="", messages=[], extra={}) for each in (completions.episodes or ())[part]
                ],
            }

    def gather(self, ranks: Ranks) -> None:
        """Gather the rows of every rank."""
        parts = ranks.objects((self.rows, self.names))
        self.rows = {row: seen for rows, _ in parts for row, seen in rows.items()}
        self.names = max((names for _, names in parts), key=len)

    @property
    def episodes(self) -> list[Episode]:
        """The episodes by prompt, without their texts."""
        return [each for row in sorted(self.rows) for each in self.rows[row]["episodes"]]

    def metrics(self) -> dict[str, float]:
        """Return means over prompts of the means over their completions, the reward with its 95 % interval, and the
        spreads and lengths of a rollout."""
        results = [self.rows[row] for row in sorted(self.rows)]
        totals = torch.tensor([row["total"] for row in results], dtype=torch.float64).reshape(len(results), -1)
        by_prompt = totals.nanmean(1)
        by_prompt = by_prompt[~by_prompt.isnan()]
        mean, low, high = mean_with_interval(by_prompt)
        lengths = torch.tensor([row["length"] for row in results], dtype=torch.float64)
        values = torch.tensor([row["values"] for row in results], dtype=torch.float64)
        metrics = rollout_metrics(
            self.names,
            values.reshape(totals.numel(), len(self.names)),
            totals.flatten(),
            torch.arange(len(results)).repeat_interleave(totals.shape[1]),
            lengths.flatten(),
            torch.tensor([row["ended"] for row in results], dtype=torch.bool).flatten(),
        )
        of_groups = ("reward_std", "frac_reward_zero_std") if totals.shape[1] > 1 else ("reward_std",)
        kept = ("completions/", "rewards/", *(of_groups if self.names else ()))
        metrics = {name: value for name, value in metrics.items() if name.startswith(kept)}
        del metrics["completions/unscored"]
        metrics |= {"reward": mean, "reward_low": low, "reward_high": high} if self.names else {}
        metrics["prompts"] = float(len(by_prompt) if self.names else len(results))
        if episodes := self.episodes:
            averages = Averages()
            averages.add(episode_metrics(episodes, Ranks()))  # already gathered over all ranks
            metrics |= averages.reduce()
        for name in results[0]["sums"] if results else ():
            total = sum(sum(row["sums"][name]) for row in results)
            metrics[name] = total / float(lengths.sum()) if lengths.sum() else math.nan
        wins = [row["wins"] for row in results if row["wins"] is not None]
        return metrics | (self._pass_at_k(totals) if self.names else {}) | (_win_rate(wins) if wins else {})

    def _pass_at_k(self, totals: torch.Tensor) -> dict[str, float]:
        """Return pass@k for k = 1, 2, 4, ... up to the group size; a completion passes with a total of 1 or more.

        An unscored completion is no sample: a prompt counts for each k up to its number of scored ones.
        """
        n = totals.shape[1]
        if n < 2:
            return {}
        counts = [(int((row >= 1).sum()), int((~row.isnan()).sum())) for row in totals]
        metrics = {}
        for k in sorted({*(2**i for i in range(int(math.log2(n)) + 1)), n}):
            chances = [pass_at_k(right, scored, k) for right, scored in counts if scored >= k]
            metrics[f"pass@{k}"] = sum(chances) / len(chances) if chances else math.nan
        return metrics


def _win_rate(rows: list[list[float]]) -> dict[str, float]:
    """Return the mean over prompts of the mean win rate, a tie being half a win, with its 95 % interval."""
    wins = torch.tensor(rows, dtype=torch.float64)
    by_prompt = wins.nanmean(1)
    mean, low, high = mean_with_interval(by_prompt[~by_prompt.isnan()])
    judged = ~wins.isnan()
    return {
        "win_rate": mean,
        "win_rate_low": max(0.0, low),
        "win_rate_high": min(1.0, high),
        "win_rate_ties": float((wins == 0.5).sum() / judged.sum()),
        "win_rate_unjudged": float((~judged).double().mean()),
    }


# ---------------------------------------------------------------------- scores of the policy


MOST_ROWS = 16
"""Most completions of one forward pass: validation batches are larger than micro-batches."""


def check_policy_scores(name: str, rolls_out: bool, sampling: Sampling, strategy: Any) -> None:
    """Refuse `eval.log_policy` where it has nothing to log, or is not supported.

    Args:
        name: Name of the method.
        rolls_out: Whether it learns from its own completions.
        sampling: Sampling of the training, under whose distribution the completions are scored.
        strategy: The Trainer's strategy; None without one.

    Raises:
        ConfigError: names what to set.
    """
    if not rolls_out:
        raise ConfigError(
            f"eval.log_policy=true: {name} learns from a data set, and logs val/entropy and its distances with the "
            "validation's loss. Leave it out."
        )
    if sampling.greedy:
        raise ConfigError(
            "eval.log_policy=true scores completions under the training's distribution, and with "
            "sampling.temperature=0 there is none. Set it above 0; the validation itself may be greedy "
            "(eval.temperature=0)."
        )
    if shards_weights(strategy):
        raise ConfigError(
            f"eval.log_policy=true does not work with sharded weights ({type(strategy).__name__}). Set strategy=auto "
            "or ddp, or leave it out."
        )


def entropies(policy: Any, completions: Completions, sampling: Sampling, options: ForwardOptions) -> Tensor:
    """Return `(b, t)`, in nats: the entropy of the policy's distribution at each sampled token."""

    def of_rows(part: Completions) -> Tensor:
        found = score(policy, part, sampling, entropy=True, options=options).entropy
        assert found is not None
        return found

    return without_gradient(policy, completions, of_rows, rows_at_once=MOST_ROWS)
