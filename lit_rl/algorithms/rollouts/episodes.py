"""What the episodes of a rollout change in its scores, and what is logged of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lit_rl.episodes import Episode
from lit_rl.errors import RewardError
from lit_rl.ops.step import Highest, Metrics
from lit_rl.rewards.sums.weighted import Scores


def scores_of(scores: Scores, episodes: Sequence[Episode]) -> Scores:
    """The scores without those of episodes that failed by no fault of the policy.

    What failed is unscored: it is neither learned from nor compared with.

    Raises:
        RewardError: a function gave spans of characters for several messages.
    """
    failed = torch.tensor([episode.failed for episode in episodes])
    spans = scores.span_rewards
    if spans is not None and any(of and each.turns > 1 for of, each in zip(spans, episodes) if _is_chat(each)):
        raise RewardError(
            "A reward function returned spans of characters for an episode of several messages, and a span is of one "
            "text. Return a number for the episode."
        )
    return dataclasses.replace(
        scores,
        values=scores.values.masked_fill(failed[:, None], math.nan),
        total=scores.total.masked_fill(failed, math.nan),
        span_rewards=None if spans is None else [[] if each.failed else of for each, of in zip(episodes, spans)],
    )


def _is_chat(episode: Episode) -> bool:
    return not isinstance(episode.prompt, str)


def metrics_of(episodes: Sequence[Episode], device: torch.device | str) -> Metrics:
    """What episodes were like. Where TRL has a number, it has TRL's name."""

    def over(count: int, *counted: float) -> tuple[Tensor, Tensor]:
        return torch.tensor(float(sum(counted)), device=device), torch.tensor(float(count), device=device)

    rows, calls = len(episodes), sum(each.calls for each in episodes)
    return {
        "turns/mean": over(rows, *(each.turns for each in episodes)),
        "turns/max": Highest(torch.tensor(float(max(each.turns for each in episodes)), device=device)),
        "completions/observation_length": over(rows, *(each.observed_tokens for each in episodes)),
        "tools/call_frequency": over(rows, calls),
        "tools/failure_frequency": over(calls, *(each.failed_calls for each in episodes)),
        "tools/parse_failures": over(calls, *(each.unreadable_calls for each in episodes)),
        "env/failed": over(rows, *(each.end == "failed" for each in episodes)),
        "env/timeouts": over(rows, *(each.end == "timeout" for each in episodes)),
        "env/cut": over(rows, *(each.cut for each in episodes)),
        "env/seconds_mean": over(rows, *(each.seconds for each in episodes)),
        "env/seconds_max": Highest(torch.tensor(float(max(each.seconds for each in episodes)), device=device)),
    }
