"""Rollouts as tables for people: one row a completion."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lit_rl.environments.observations import images_of_content
from lit_rl.episodes import RETURNED_IMAGES, Episode
from lit_rl.generation.collect import as_reward_input
from lit_rl.rewards.sums.weighted import Scores
from lit_rl.rollout import Completions, PromptBatch


def sample_table(
    step: int,
    batch: PromptBatch,
    texts: Sequence[str],
    completions: Completions,
    scores: Scores,
    advantages: Tensor | None,
) -> dict[str, list[Any]]:
    """Return the table of samples of a rollout, one row a completion.

    Columns: step, prompt, completion, reward, each function's reward, advantage, length, ended, then the data's own
    columns and the rewards' values for `log_extra`. A name that is taken already is not overwritten.

    In episodes a completion is the transcript, and there are the columns group, turns, end, turn_rewards,
    episode_reward, calls, failed_calls, unreadable_calls, observed_tokens, episode_error, messages, as JSON, and
    returned_images, where tools and environments returned any.

    `advantages`: `(b,)`; for pairs that a judge compared its verdicts, 1, -1 or 0. None leaves the column out.
    """
    prompts, _, columns = as_reward_input(batch, texts, len(texts) // len(batch), completions.episodes)
    columns.pop("episodes", None)
    table: dict[str, list[Any]] = {"step": [step] * len(texts), "prompt": prompts, "completion": list(texts)}
    table["reward"] = scores.total.tolist()
    table |= {f"rewards/{name}": scores.values[:, i].tolist() for i, name in enumerate(scores.names)}
    if advantages is not None:
        table["advantage"] = advantages.tolist()
    host = completions.on_host
    table |= {"length": host.lengths.tolist(), "ended": host.ended.tolist()}
    if completions.episodes is not None:
        table |= {"group": host.group_id.tolist()} | _of_episodes(completions.episodes)
    return table | {name: values for name, values in {**columns, **scores.extras}.items() if name not in table}


def _of_episodes(episodes: Sequence[Episode]) -> dict[str, list[Any]]:
    returned = [
        [image for message in episode.messages for image in images_of_content(message.get("content"))]
        for episode in episodes
    ]
    seen = {RETURNED_IMAGES: returned} if any(returned) else {}
    return seen | {
        "completion": [episode.transcript() for episode in episodes],
        "turns": [episode.turns for episode in episodes],
        "end": [episode.end for episode in episodes],
        "turn_rewards": [json.dumps(episode.turn_rewards, default=float) for episode in episodes],
        "episode_reward": [math.nan if episode.reward is None else float(episode.reward) for episode in episodes],
        "calls": [episode.calls for episode in episodes],
        "failed_calls": [episode.failed_calls for episode in episodes],
        "unreadable_calls": [episode.unreadable_calls for episode in episodes],
        "observed_tokens": [episode.observed_tokens for episode in episodes],
        "episode_error": [episode.error or "" for episode in episodes],
        "messages": [json.dumps(episode.messages, ensure_ascii=False, default=str) for episode in episodes],
    }
