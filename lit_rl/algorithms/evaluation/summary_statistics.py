"""Numbers for people: averages, rollout metrics, confidence intervals, pass@k, and tables of sampled completions.

Nothing here feeds a gradient.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.core.episode import RETURNED_IMAGES, TOKENS
from lit_rl.core.rollout import Completions, PromptBatch, Rollout
from lit_rl.core.transfers import to_host
from lit_rl.environments.observations import images_of_content
from lit_rl.generation.collect import as_reward_input, pieces_of
from lit_rl.ops.advantages import group_std
from lit_rl.ops.engine_mismatch import effective_share
from lit_rl.ops.intervals import Z, wilson
from lit_rl.ops.reductions import Highest, Lowest, Metric, Summed, variance
from lit_rl.ops.returns import explained_variance
from lit_rl.rewards.weighted_rewards import Scores

SUMMARIES = {function.__name__: function for function in (effective_share, explained_variance, variance)}
"""Functions by name that make one number from the sums of a `Summed` metric."""


# ---------------------------------------------------------------------- averages


def prefixed(metrics: Mapping[str, float], *parts: str) -> dict[str, float]:
    """Return metrics with a prefix: `prefixed({"reward": 1}, "val", "math")` is `{"val/math/reward": 1}`."""
    head = "/".join(part for part in parts if part)
    return {f"{head}/{name}": value for name, value in metrics.items()}


class Averages:
    """Averages of metrics: ratios of sums, extremes, and other sums, reduced over all ranks at once."""

    def __init__(self) -> None:
        self._means: dict[str, Tensor] = {}
        self._extremes: dict[str, Tensor] = {}
        """Highest values by name; a lowest value is kept as its negative, with a minus sign before its name."""
        self._sums: dict[str, Tensor] = {}
        """Sums by `<summary>:<name>`."""

    def add(self, metrics: Mapping[str, Metric]) -> None:
        """Add the metrics of a micro-batch or another part."""
        pairs = {name: metric for name, metric in metrics.items() if isinstance(metric, tuple)}
        for name, part in _in_float64(pairs).items():
            _add_to(self._means, name, part)
        for name, metric in metrics.items():
            if isinstance(metric, Highest):
                self._raise_to(name, metric.value.detach().double())
            elif isinstance(metric, Lowest):
                self._raise_to(f"-{name}", -metric.value.detach().double())
            elif isinstance(metric, Summed):
                _add_to(self._sums, f"{metric.summary}:{name}", metric.sums.detach())

    def _raise_to(self, name: str, value: Tensor) -> None:
        self._extremes[name] = torch.maximum(self._extremes[name], value) if name in self._extremes else value

    def reduce(self, ranks: Ranks = Ranks()) -> dict[str, float]:  # noqa: B008 (frozen)
        """Reduce everything added on every rank since the last call; NaN for empty averages. A collective."""
        sums_by_summary = (
            {name: value for name, value in self._sums.items() if name.startswith(f"{summary}:")}
            for summary in SUMMARIES
        )
        parts = [(self._means, "SUM"), (self._extremes, "MAX"), *((part, "SUM") for part in sums_by_summary)]
        tables = [_reduce_over_ranks(values, ranks, operation) for values, operation in parts]
        on_host = to_host([table for _, table in tables])  # in one transfer
        means, extremes, *others = (dict(zip(names, table.tolist())) for (names, _), table in zip(tables, on_host))
        sums = {name: total for part in others for name, total in part.items()}
        self._means, self._extremes, self._sums = {}, {}, {}
        averages = {name: (num / den if den else math.nan) for name, (num, den) in means.items()}
        finite = {name: value if math.isfinite(value) else math.nan for name, value in extremes.items()}
        found = averages | {name.lstrip("-"): -value if name[0] == "-" else value for name, value in finite.items()}
        for key, total in sums.items():
            summary, _, name = key.partition(":")
            found[name] = float(SUMMARIES[summary](torch.tensor(total, dtype=torch.float64)))
        return found

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the state for a checkpoint."""
        parts = {"means": self._means, "extremes": self._extremes, "sums": self._sums}
        on_host = iter(to_host([value for values in parts.values() for value in values.values()]))
        return {part: {name: next(on_host).clone() for name in values} for part, values in parts.items()}

    def load_state(self, saved: Mapping[str, Mapping[str, Tensor]], device: torch.device) -> None:
        """Restore what `state` returned."""
        parts = ({name: value.to(device) for name, value in saved[p].items()} for p in ("means", "extremes", "sums"))
        self._means, self._extremes, self._sums = parts


def _in_float64(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return numerator and denominator of each as ``(2,)``, in a few operations for dozens of metrics."""
    by_type: dict[tuple[torch.device, torch.dtype], list[tuple[str, int]]] = {}
    for name, pair in pairs.items():
        for column, number in enumerate(pair):
            by_type.setdefault((number.device, number.dtype), []).append((name, column))
    numbers: dict[tuple[str, int], Tensor] = {}
    for keys in by_type.values():
        column_of_type = torch.stack([pairs[name][column].detach() for name, column in keys]).double()
        numbers |= zip(keys, column_of_type.unbind())
    return {name: torch.stack([numbers[name, 0], numbers[name, 1]]) for name in pairs}


def _add_to(sums: dict[str, Tensor], name: str, part: Tensor) -> None:
    sums[name] = sums[name] + part if name in sums else part


def _reduce_over_ranks(values: Mapping[str, Tensor], ranks: Ranks, operation: str) -> tuple[list[str], Tensor]:
    """Return names, and sums or maxima over ranks of tensors of one shape; a rank may lack some of them."""
    shapes = ranks.objects({name: tuple(value.shape) for name, value in values.items()})
    known = {name: shape for names_and_shapes in shapes for name, shape in names_and_shapes.items()}
    if not known:
        return [], torch.zeros(0)
    names, neutral = sorted(known), 0.0 if operation == "SUM" else -torch.inf
    neutral_values = (torch.full(known[name], neutral, device=ranks.device) for name in names if name not in values)
    table = torch.stack(
        [(values[name] if name in values else next(neutral_values)).to(ranks.device, torch.float64) for name in names]
    )
    return names, ranks.all_reduce(table, operation)


# ---------------------------------------------------------------------- metrics of a rollout


def rollout_metrics(
    names: Sequence[str], values: Tensor, rewards: Tensor, group_id: Tensor, lengths: Tensor, ended: Tensor
) -> dict[str, float]:
    """Return TRL's rollout metrics over the rows of all ranks.

    Args:
        names: Reward functions, k of them.
        values: `(n, k)` values of each function; NaN where it does not apply.
        rewards: `(n,)` weighted sums; NaN where no function applies.
        group_id: `(n,)` group of each row.
        lengths: `(n,)` sampled tokens.
        ended: `(n,)` bool: ended by EOS or stop string, not cut.
    """
    scored = ~rewards.isnan()
    std = group_std(rewards.float(), group_id)
    metrics = {
        "reward": _mean(rewards[scored]),
        "reward_std": _std(rewards[scored]),
        "frac_reward_zero_std": _mean((std[scored] == 0).double()),
        "completions/mean_length": _mean(lengths),
        "completions/min_length": _extreme(lengths, torch.min),
        "completions/max_length": _extreme(lengths, torch.max),
        "completions/clipped_ratio": _mean((~ended).double()),
        "completions/mean_terminated_length": _mean(lengths[ended]),
        "completions/min_terminated_length": _extreme(lengths[ended], torch.min),
        "completions/max_terminated_length": _extreme(lengths[ended], torch.max),
        "completions/unscored": float((~scored).sum()),
    }
    for i, name in enumerate(names):
        column = values[:, i][~values[:, i].isnan()]
        metrics[f"rewards/{name}/mean"] = _mean(column)
        metrics[f"rewards/{name}/std"] = _std(column)
    return metrics


_FACTOR = -7046029254386353131  # odd: 2 ** 64 / golden ratio, as int64


@torch.no_grad()
def repeated_share(ids: Tensor, mask: Tensor, n: int = 4) -> tuple[Tensor, Tensor]:
    """Return the share of n-grams of each row that stood in it before, in [0, 1): 1 - distinct / all (2502.03373, C.2).

    N-grams are told apart by 64-bit hashes: among 4096 of them two different ones look alike with a chance below 1e-12.

    Args:
        ids: Tokens, long `(b, t)`.
        mask: Bool `(b, t)`: those that count; an n-gram counts where all of its tokens do.
        n: Tokens of one n-gram, at least 1.

    Returns:
        The shares, float32 `(b,)`, 0 of rows without an n-gram; and which rows have one.
    """
    if ids.shape[1] < n:
        return torch.zeros(len(ids), device=ids.device), torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    counts = mask.unfold(1, n, 1).all(-1)
    hashes = torch.zeros_like(ids[:, n - 1 :])
    for place in range(n):  # integers wrap around, so this is a polynomial modulo 2 ** 64
        hashes = (hashes + ids[:, place : place + hashes.shape[1]] + 1) * _FACTOR
        hashes = hashes ^ (hashes >> 29)
    # What does not count gets numbers that no other place has: it is never a repetition.
    own = torch.arange(hashes.shape[1], device=ids.device).expand_as(hashes)
    keys, order = torch.where(counts, hashes, own).sort(dim=1)
    same = (keys[:, 1:] == keys[:, :-1]) & counts.gather(1, order)[:, 1:] & counts.gather(1, order)[:, :-1]
    total = counts.sum(1)
    return same.sum(1) / total.clamp(min=1), total > 0


def _mean(x: Tensor) -> float:
    return float(x.double().mean()) if len(x) else math.nan


def _std(x: Tensor) -> float:
    if len(x) == 0:
        return math.nan
    return float(x.double().std()) if len(x) > 1 else 0.0


def _extreme(x: Tensor, which) -> float:
    return float(which(x)) if len(x) else math.nan


def mean_with_interval(x: Tensor) -> tuple[float, float, float]:
    """Return the mean and its 95 % interval `(mean, low, high)`.

    Wilson's score interval where every value is 0 or 1 (it is accurate near 0 and 1); otherwise the normal interval of
    the mean. `x`: `(n,)`, one independent value each (average the samples of one prompt first).
    """
    x = x.double()
    n = len(x)
    if n == 0:
        return math.nan, math.nan, math.nan
    mean = float(x.mean())
    if bool(((x == 0) | (x == 1)).all()):
        return mean, *wilson(mean, n)
    half = Z * float(x.std()) / math.sqrt(n) if n > 1 else math.inf
    return mean, mean - half, mean + half


def pass_at_k(right: int, samples: int, k: int) -> float:
    """Return the probability that at least one of k of the `samples`, `right` of them right, is right (2107.03374)."""
    if not 1 <= k <= samples:
        raise ValueError(f"k={k} is outside 1..{samples}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


# ---------------------------------------------------------------------- tables of samples


def token_columns(
    completions: Completions, rollout: Rollout | None, tokenizer: Any, more: Mapping[str, Tensor] | None = None
) -> dict[str, list[Any]]:
    """Return the columns of tokens.

    They are `tokens/ids`, `text`, `turn`, `by_policy` (sampled; the others were read), `sampler_logprobs`; for a
    rollout that is learned from also `learned` (in the loss), `advantages`, and `old_logprobs` where the run computed
    them. `more` has further numbers `(b, t)` of sampled tokens, by name.

    Numbers are numpy arrays, so that long rollouts take little memory; they are 0 on tokens that were read.
    """
    sampled = completions.response_mask
    tokens = sampled if completions.attended is None else completions.attended
    turn = torch.zeros_like(completions.response_ids) if completions.turn is None else completions.turn
    columns: dict[str, Tensor] = {
        "ids": completions.response_ids,
        "turn": turn,
        "by_policy": sampled,
        "sampler_logprobs": completions.sampler_logprobs,
    }
    if rollout is not None:
        columns["learned"] = rollout.loss_mask
        if rollout.advantages is not None:
            of_rows = rollout.advantages.ndim < sampled.ndim
            per_token = rollout.advantages[:, None].expand(sampled.shape) if of_rows else rollout.advantages
            columns["advantages"] = per_token.masked_fill(~sampled, 0.0)
        if rollout.old_logprobs is not None:
            columns["old_logprobs"] = rollout.old_logprobs.masked_fill(~sampled, 0.0)
    columns |= {name: values.masked_fill(~sampled, 0.0) for name, values in (more or {}).items()}
    lengths = tokens.sum(1).tolist()
    table: dict[str, list[Any]] = {}
    for name, values in columns.items():
        flat = values.detach()[tokens].cpu()
        flat = flat.float() if flat.is_floating_point() else flat
        table[TOKENS + name] = [row.numpy() for row in flat.split(lengths)]
    return table | {f"{TOKENS}text": pieces_of(table[f"{TOKENS}ids"], tokenizer)}


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
    columns and the rewards' values for `log_extra`. A name that is already taken is not replaced.

    In episodes a completion is the transcript, and there are the columns group, turns, end, turn_rewards,
    episode_reward, calls, failed_calls, unreadable_calls, observed_tokens, episode_error, messages, as JSON;
    returned_images, where tools and environments returned any; branches and forks, as JSON, where there may be several.

    `completions` are best in the host's memory. `advantages`: `(b,)`; for pairs that a judge compared its verdicts: 1,
    -1 or 0. None leaves the column out.
    """
    prompts, _, columns = as_reward_input(batch, texts, completions.episodes)
    columns.pop("episodes", None)
    table: dict[str, list[Any]] = {"step": [step] * len(texts), "prompt": prompts, "completion": list(texts)}
    table["reward"] = scores.total.tolist()
    table |= {f"rewards/{name}": scores.values[:, i].tolist() for i, name in enumerate(scores.names)}
    if advantages is not None:
        table["advantage"] = advantages.tolist()
    table |= {"length": completions.lengths.tolist(), "ended": completions.ended.tolist()}
    if (episodes := completions.episodes) is not None:
        images = [
            [image for message in episode.messages for image in images_of_content(message.get("content"))]
            for episode in episodes
        ]
        table |= {"group": completions.group_id.tolist()} | ({RETURNED_IMAGES: images} if any(images) else {})
        table |= {
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
        if all(episode.branches is not None for episode in episodes):
            table |= {
                "branches": [episode.branches for episode in episodes],
                "forks": [json.dumps(episode.forks) for episode in episodes],
            }
    return table | {name: values for name, values in {**columns, **scores.extras}.items() if name not in table}
