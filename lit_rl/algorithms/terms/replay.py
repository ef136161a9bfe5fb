"""A replay buffer of good groups of earlier rollouts, which replace groups without spread."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.ranks import Ranks
from lit_rl.algorithms.rollouts import state
from lit_rl.algorithms.rollouts.plan import mix
from lit_rl.data.image_prompts import Processor
from lit_rl.errors import in_range
from lit_rl.ops.step import Metrics
from lit_rl.rollout import Rollout, join_rollouts, select, trim_rollout
from lit_rl.vision import PromptVision


class GroupReplay:
    """A buffer of groups with spread, which replace groups whose completions all have the same advantage.

    A group's score is the sum of the sizes of its advantages times the standard deviation of its rewards; the buffer
    keeps the highest scores, and draws in proportion to them. A drawn group keeps the log-probs of the policy that
    sampled it, so its importance ratio is right; its KL is to the reference of that time. Each rank has its own buffer.

    Logged: `replay/groups`, the number of groups of the rollout from the buffer, and `replay/age`, their mean age in
    policy versions.

    Args:
        size: Number of groups to keep, on each rank.
    """

    def __init__(self, size: int = 64) -> None:
        in_range("algo.replay.size", size, low=1)
        self.size = size
        self._groups: list[tuple[float, Rollout]] = []
        self._rollouts = 0

    def __call__(self, rollout: Rollout, *, seed: int, ranks: Ranks) -> tuple[Rollout, Metrics]:
        """Replace the groups without spread; afterwards add the rollout's own good groups to the buffer."""
        ids = rollout.completions.group_id
        rows = {int(group): (ids == group).nonzero().flatten() for group in ids.unique()}
        scores = {group: _score(rollout, at) for group, at in rows.items()}
        flat = [group for group, score in scores.items() if score == 0]
        replacements = self._draw(len(flat), seed=mix(seed, self._rollouts, ranks.rank))
        fresh = [(score, _alone(rollout, rows[group])) for group, score in scores.items() if score > 0]
        for group, stored in zip(flat, replacements):
            rollout = _replaced(rollout, rows[group], stored)
        self._groups = sorted([*self._groups, *fresh], key=lambda item: -item[0])[: self.size]
        self._rollouts += 1
        count = torch.tensor(float(len(replacements)), device=ranks.device)
        age = sum(rollout.completions.version - stored.completions.version for stored in replacements)
        return rollout, {
            "replay/groups": (count, torch.ones_like(count)),
            "replay/age": (torch.full_like(count, age), count),
        }

    def _draw(self, count: int, *, seed: int) -> list[Rollout]:
        """Draw distinct groups in proportion to their scores."""
        count = min(count, len(self._groups))
        if not count:
            return []
        weights = torch.tensor([score for score, _ in self._groups], dtype=torch.float64)
        chosen = torch.multinomial(weights, count, generator=torch.Generator().manual_seed(seed))
        return [self._groups[i][1] for i in chosen.tolist()]

    def state(self) -> dict[str, Any]:
        return {
            "groups": [{"score": score, "rollout": state.to_plain(group)} for score, group in self._groups],
            "rollouts": self._rollouts,
        }

    def dealt_out(self, saved: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """Return the state of rank `rank` of `world_size`, from the buffers of another number of ranks.

        Ranks take the groups in turn, from the highest score down, up to their size.

        Args:
            saved: The `state` of each rank that wrote the checkpoint.
        """
        groups = sorted((group for kept in saved for group in kept["groups"]), key=lambda group: -group["score"])
        return {"groups": groups[rank::world_size][: self.size], "rollouts": saved[0]["rollouts"]}

    def see(self, see: Callable[[int], PromptVision | None], processor: Callable[[], Processor | None]) -> None:
        """Restore the pixels of a checkpoint's groups, which names rows of the data, or contains encoded images.

        The arguments are those of `state.made`.
        """
        self._groups = [(score, state.made(group, see, processor)) for score, group in self._groups]

    def load_state(self, saved: dict[str, Any]) -> None:
        self._rollouts = saved["rollouts"]
        self._groups = [
            (item["score"], state.rollout_of(item["rollout"], torch.device("cpu"))) for item in saved["groups"]
        ]


def _alone(rollout: Rollout, rows: Tensor) -> Rollout:
    """Return one group, without padding and without the images of other groups."""
    group = trim_rollout(select(rollout, rows))
    if group.completions.vision is None:
        return group
    return dataclasses.replace(
        group, completions=dataclasses.replace(group.completions, vision=group.completions.vision.used())
    )


def _score(rollout: Rollout, rows: Tensor) -> float:
    assert rollout.advantages is not None
    advantages, rewards = rollout.advantages[rows], rollout.rewards[rows]
    scored = rewards[~rewards.isnan()]
    return float(advantages.abs().sum() * scored.std()) if len(scored) > 1 else 0.0


def _replaced(rollout: Rollout, rows: Tensor, stored: Rollout) -> Rollout:
    """Return the rollout with `stored` in the place of `rows`, under their group id."""
    device, count = rollout.rewards.device, len(rollout)
    both = join_rollouts(rollout, state.to_device_dataclass(stored, device))
    source = torch.arange(count, device=device)
    source[rows] = count + torch.arange(len(rows), device=device)
    found = select(both, source)
    completions = dataclasses.replace(found.completions, group_id=rollout.completions.group_id)
    return dataclasses.replace(found, completions=completions)
