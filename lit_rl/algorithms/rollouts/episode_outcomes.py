"""Outcomes of the episodes of a rollout: failures, checks of their rewards, and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.core.episode import Episode
from lit_rl.core.errors import GenerationError, RewardError
from lit_rl.core.transfers import to_device
from lit_rl.ops.reductions import Highest, Metrics
from lit_rl.rewards.contract import is_turn_reward
from lit_rl.rewards.weighted_rewards import Scores


def check_failures(episodes: Sequence[Episode], most: float, ranks: Ranks) -> None:
    """Refuse a rollout of which too many episodes failed by no fault of the policy. A collective: all ranks raise, or
    none.

    Args:
        episodes: The episodes that this rank drew.
        most: Allowed share of the episodes of all ranks.
        ranks: The ranks of the run.

    Raises:
        GenerationError: names the most common error of this rank.
    """
    if excess := _excess(episodes, most, ranks):
        error = GenerationError(
            f"{excess}. Fix the cause, or raise env.max_failed; where time ran out, raise env.step_timeout, "
            "env.episode_timeout, env.rollout_timeout, or a rollout function's agent_timeout."
        )
        error.on_every_rank = True
        raise error


def warn_of_failures(name: str, episodes: Sequence[Episode], most: float) -> None:
    """Warn of a validation with too many failures. It does not end the run: nothing is learned from it."""
    if excess := _excess(episodes, most, Ranks()):
        of_set = f" of {name}" if name else ""
        rank_zero_warn(f"Validation{of_set}: {excess}. The rewards are means over the others.")


def _excess(episodes: Sequence[Episode], most: float, ranks: Ranks) -> str | None:
    """Describe the failures where their share exceeds `most`, else return None. A collective."""
    errors = Counter(str(each.error) for each in episodes if each.failed)
    failed, drawn = sum(ranks.counts(errors.total())), sum(ranks.counts(len(episodes)))
    if failed <= most * drawn:
        return None
    error = "".join(f"; {times} times: {kind}" for kind, times in errors.most_common(1))
    return (
        f"{failed} of {drawn} episodes failed or took too long, more than env.max_failed={most:g} of them"
        f"{error or '; see other ranks'}"
    )


def sound_rows(episodes: Sequence[Episode]) -> list[int]:
    """Return the rows that did not fail, and so can be rewarded. A failed one may not even have a message."""
    return [row for row, episode in enumerate(episodes) if not episode.failed]


def check_spans(scores: Scores, episodes: Sequence[Episode]) -> None:
    """Refuse rewards for spans of characters in episodes of several messages.

    Raises:
        RewardError: a function returned such spans.
    """
    for parts, episode in zip(scores.span_rewards or (), episodes):
        one_text = episode.turns <= 1 or isinstance(episode.prompt, str)  # else no message is the text of all tokens
        if one_text or all(map(is_turn_reward, parts)):
            continue
        raise RewardError(
            "A reward function returned spans of characters for an episode of several messages, but spans are of a "
            "single text. Return a number for the episode, or (turn, value) for its turns."
        )


def episode_metrics(episodes: Sequence[Episode], ranks: Ranks) -> Metrics:
    """Return the metrics of episodes, with TRL's names where TRL has them. A collective."""
    device = ranks.device

    def over(count: int, *counted: float) -> tuple[Tensor, Tensor]:
        return torch.full((), float(sum(counted)), device=device), torch.full((), float(count), device=device)

    seconds = torch.tensor([each.seconds for each in episodes])
    seconds = seconds if ranks.world_size == 1 else seconds.to(device)  # gathered over all ranks there
    rows, calls = len(episodes), sum(each.calls for each in episodes)
    found: Metrics = {}
    if all(each.branches is not None for each in episodes):  # by the settings: on every rank, or on none
        branches = [each.branches or 1 for each in episodes]
        found = {
            "branches/mean": over(rows, *branches),
            "branches/max": Highest(torch.full((), float(max(branches)), device=device)),
            "branches/forked": over(rows, *(count > 1 for count in branches)),
            "branches/refused": over(rows, *(each.end == "max_branches" for each in episodes)),
            "branches/read_again": over(rows, *(each.read_again for each in episodes)),
        }
    return found | {
        "turns/mean": over(rows, *(each.turns for each in episodes)),
        "turns/max": Highest(torch.full((), float(max(each.turns for each in episodes)), device=device)),
        "completions/observation_length": over(rows, *(each.observed_tokens for each in episodes)),
        "tools/call_frequency": over(rows, calls),
        "tools/failure_frequency": over(calls, *(each.failed_calls for each in episodes)),
        "tools/parse_failures": over(calls, *(each.unreadable_calls for each in episodes)),
        "env/failed": over(rows, *(each.end == "failed" for each in episodes)),
        "env/timeouts": over(rows, *(each.end == "timeout" for each in episodes)),
        "env/cut": over(rows, *(each.cut for each in episodes)),
        "env/seconds_mean": over(rows, *(each.seconds for each in episodes)),
        "env/seconds_p50": over(1, float(ranks.gather_tokens(seconds).quantile(0.5))),
        "env/seconds_max": Highest(to_device(seconds.max(), torch.device(device))),
    }
