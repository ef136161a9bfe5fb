"""What the episodes of a rollout change in its scores, and what is logged of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from lit_rl.episodes import Episode
from lit_rl.rewards.sums.weighted import Scores


def scores_of(scores: Scores, episodes: Sequence[Episode]) -> Scores:
    """The scores without those of episodes that failed by no fault of the policy, and with the metrics of all.

    What failed is unscored: it is neither learned from nor compared with.
    """
    failed = torch.tensor([episode.failed for episode in episodes])
    spans = scores.span_rewards
    return dataclasses.replace(
        scores,
        values=scores.values.masked_fill(failed[:, None], math.nan),
        total=scores.total.masked_fill(failed, math.nan),
        span_rewards=None if spans is None else [[] if each.failed else of for each, of in zip(episodes, spans)],
        metrics=scores.metrics | metrics_of(episodes),
    )


def metrics_of(episodes: Sequence[Episode]) -> dict[str, tuple[float, int]]:
    """Sum and count of each metric. Where TRL has one, it has TRL's name."""
    rows = len(episodes)
    calls = sum(each.calls for each in episodes)
    sums = {
        "turns/mean": sum(each.turns for each in episodes),
        "completions/observation_length": sum(each.observed_tokens for each in episodes),
        "env/failed": sum(each.end == "failed" for each in episodes),
        "env/timeouts": sum(each.end == "timeout" for each in episodes),
        "env/cut": sum(each.cut for each in episodes),
        "env/seconds": sum(each.seconds for each in episodes),
    }
    metrics = {name: (float(total), rows) for name, total in sums.items()}
    if calls:
        metrics |= {
            "tools/failure_frequency": (float(sum(each.failed_calls for each in episodes)), calls),
            "tools/parse_failures": (float(sum(each.unreadable_calls for each in episodes)), calls),
        }
    return metrics | {"tools/call_frequency": (float(calls), rows)}
