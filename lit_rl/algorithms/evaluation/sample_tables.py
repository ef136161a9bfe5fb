"""Tables of samples for people: one row a completion, and columns with the tokens of each."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_rl.core.episode import RETURNED_IMAGES, TOKENS, Episode
from lit_rl.core.rollout import Completions, PromptBatch, Rollout
from lit_rl.environments.observations import images_of_content
from lit_rl.generation.collect import as_reward_input, pieces_of
from lit_rl.rewards.weighted_rewards import Scores


def token_columns(
    completions: Completions, rollout: Rollout | None, tokenizer: Any, more: Mapping[str, Tensor] | None = None
) -> dict[str, list[Any]]:
    """Return the columns of tokens.

    They are `tokens/ids`, `text`, `turn`, `by_policy` (sampled; the others were read), `sampler_logprobs`; for a
    rollout that is learned from also `learned` (in the loss), `advantages`, and `old_logprobs` where the run computed
    them. `more` has further numbers `(b, t)` of sampled tokens, by name.

    Numbers are numpy arrays, so that long rollouts take little memory; they are 0 on tokens that were read.
    """
    written = completions.response_mask
    there = written if completions.attended is None else completions.attended
    turn = torch.zeros_like(completions.response_ids) if completions.turn is None else completions.turn
    columns: dict[str, Tensor] = {
        "ids": completions.response_ids,
        "turn": turn,
        "by_policy": written,
        "sampler_logprobs": completions.sampler_logprobs,
    }
    if rollout is not None:
        columns["learned"] = rollout.loss_mask
        if rollout.advantages is not None:
            of_rows = rollout.advantages.ndim < written.ndim
            per_token = rollout.advantages[:, None].expand(written.shape) if of_rows else rollout.advantages
            columns["advantages"] = per_token.masked_fill(~written, 0.0)
        if rollout.old_logprobs is not None:
            columns["old_logprobs"] = rollout.old_logprobs.masked_fill(~written, 0.0)
    columns |= {name: values.masked_fill(~written, 0.0) for name, values in (more or {}).items()}
    found: dict[str, list[Any]] = {TOKENS + name: _token_lists(values, there) for name, values in columns.items()}
    return found | {f"{TOKENS}text": pieces_of(found[f"{TOKENS}ids"], tokenizer)}


def _token_lists(values: Tensor, there: Tensor) -> list[Any]:
    kept = values.detach()[there].cpu()
    kept = kept.float() if kept.is_floating_point() else kept
    return [part.numpy() for part in kept.split(there.sum(1).tolist())]


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
        table |= {"group": host.group_id.tolist()} | _episode_columns(completions.episodes)
    return table | {name: values for name, values in {**columns, **scores.extras}.items() if name not in table}


def _episode_columns(episodes: Sequence[Episode]) -> dict[str, list[Any]]:
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
