"""What an environment wrote between turns is attended and never learned from: laws of every objective.

Rows of several turns are given to `advantages` and `loss` directly, with chosen log-probs, so that nothing but the
objective can tell observations from what the policy sampled.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from objective_terms import TWO_STEPS, fresh
from small_rollouts import batch, scores
from tiers import quick
from torch import Tensor

from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.core.rollout import Completions, Rollout
from lit_rl.models.forward import TokenScores
from lit_rl.ops.policy_losses import m2po_loss
from lit_rl.ops.reductions import StepTotals, WeightTotals

REWARDS = [1.0, 0.0, 0.5, 2.0, 0.0, 0.0, 1.0, 3.0]
TURNS = ["ssoss", "sssooos", "s", "ssssoosos", "soss", "ssoooosss", "sos", "sss"]
"""Of each row: a letter a token, sampled or observed."""


def numbers(seed: int, shape: torch.Size, low: float, high: float) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * (high - low) + low


def drawn() -> Completions:
    width = max(map(len, TURNS))
    sampled = torch.tensor([[letter == "s" for letter in row.ljust(width, ".")] for row in TURNS])
    attended = torch.tensor([[letter != "." for letter in row.ljust(width, ".")] for row in TURNS])
    ids = (torch.arange(len(TURNS))[:, None] * 7 + torch.arange(width) + 40) * attended
    turn = torch.tensor([[row[: i + 1].count("os") for i in range(width)] for row in TURNS])
    return Completions(
        prompt_ids=torch.full((len(TURNS), 2), 50),
        prompt_mask=torch.ones(len(TURNS), 2, dtype=torch.bool),
        response_ids=ids,
        response_mask=sampled,
        sampler_logprobs=numbers(0, ids.shape, -3, 0) * sampled,
        ended=torch.ones(len(TURNS), dtype=torch.bool),
        group_id=torch.arange(len(TURNS)) // 4,
        attended=attended,
        turn=turn,
    )


def without_observations(completions: Completions) -> tuple[Completions, Tensor]:
    """The same sampled tokens side by side, and where each stood: long ``(b, t)``."""
    mask = completions.response_mask
    order = (~mask).long().argsort(dim=1, stable=True)[:, : int(mask.sum(1).max())]
    moved = {
        name: getattr(completions, name).gather(1, order)
        for name in ("response_ids", "response_mask", "sampler_logprobs")
    }
    moved["response_ids"] = moved["response_ids"] * moved["response_mask"]
    return dataclasses.replace(completions, **moved, attended=None, turn=None), order


def objective(name: str) -> Any:
    algorithm, settings = TWO_STEPS[name]
    settings = {"group_size": 4, "minibatches": 2, **fresh(settings)}
    if settings.get("iterations") == 1:
        settings["minibatches"] = 1
    if name == "m2po":  # log-probs that are drawn at random are far from the old ones
        settings["loss"] = partial(m2po_loss, threshold=1.0)
    return algorithm("tiny", lambda completions: [0.0] * len(completions), **settings)


def learned(name: str, completions: Completions, given: dict[str, Tensor]) -> tuple[Rollout, Tensor, Tensor, Any]:
    """The rollout, the loss, its gradient by the policy's log-probs, and the metrics of both."""
    module = objective(name)
    module.values = lambda _: given["old_values"]
    further = {"greedy_rewards": torch.full((8,), 0.5), "gradient_norms": given["norms"]}
    found = Scored(batch(range(2)), completions, scores(REWARDS), **further)
    with torch.no_grad():
        rollout, metrics = module.advantages(found, given["old"], given["ref"])
    logprobs = given["logprobs"].clone().requires_grad_()
    said = TokenScores(logprobs, given["entropy"], values=given["values"])
    mask = rollout.loss_mask
    totals = dataclasses.replace(
        StepTotals.of(mask),
        weights=WeightTotals(*map(torch.tensor, (int(mask.sum()), int(mask.any(1).sum()), 9.0, 4.0))),
    )
    loss, more = module.loss(rollout, said, totals)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return rollout, loss.detach(), gradient, metrics | more


def given(completions: Completions, observed: int) -> dict[str, Tensor]:
    """What models said of every column; `observed` seeds what they said of observations and padding."""
    ranges = {"old": (-3, 0), "ref": (-3, 0), "logprobs": (-3, 0), "entropy": (0, 2), "values": (-1, 1)}
    ranges |= {"old_values": (-1, 1), "norms": (0, 2)}
    shape, mask = completions.response_ids.shape, completions.response_mask
    return {
        name: torch.where(mask, numbers(i + 1, shape, *ends), numbers(100 * observed + i, shape, *ends))
        for i, (name, ends) in enumerate(ranges.items())
    }


def same_metrics(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        for left, right in zip(parts(one), parts(theirs[name]), strict=True):
            torch.testing.assert_close(left, right, equal_nan=True, rtol=1e-4, atol=1e-5, msg=name)


def parts(metric: Any) -> list[Tensor]:
    """The numbers of a metric."""
    numbers = metric if isinstance(metric, tuple) else vars(metric).values()
    return [torch.as_tensor(number).float() for number in numbers if not isinstance(number, str)]


FIRST = {"gspo", "cispo", "kl-in-both", "top-entropy", "weights", "shaped", "reinforce", "ppo"}
NAMES = quick(TWO_STEPS, FIRST)
BY_TURN = {"gigpo", "turn-ppo"}
"""What credits turns one by one: a response is another where it has other turns."""


@pytest.mark.parametrize("name", NAMES)
def test_what_models_say_of_observations_moves_nothing(name: str) -> None:
    completions = drawn()
    first, second = (learned(name, completions, given(completions, observed)) for observed in (1, 2))
    mask = completions.response_mask
    torch.testing.assert_close(first[1], second[1])
    torch.testing.assert_close(first[2], second[2])
    assert (first[2][~mask] == 0).all() and (first[2][mask] != 0).any()
    same_metrics(first[3], second[3])
    if first[0].advantages is not None and first[0].advantages.ndim == 2:
        torch.testing.assert_close(first[0].advantages[mask], second[0].advantages[mask])


@pytest.mark.parametrize("name", quick(sorted(TWO_STEPS.keys() - BY_TURN), FIRST))
def test_a_response_in_several_turns_is_learned_from_like_one_without_observations(name: str) -> None:
    completions = drawn()
    together, order = without_observations(completions)
    apart = given(completions, 1)
    (_, loss, gradient, metrics) = learned(name, completions, apart)
    moved = learned(name, together, {key: value.gather(1, order) for key, value in apart.items()})
    torch.testing.assert_close(loss, moved[1])
    torch.testing.assert_close(gradient[completions.response_mask], moved[2][together.response_mask])
    same_metrics(metrics, moved[3])
