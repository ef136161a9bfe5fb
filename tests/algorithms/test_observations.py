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

from lit_rl.algorithms import GRPO, PPO
from lit_rl.algorithms.rollouts.rollout_plan import BatchPlan, micro_batch, rows_of_slots, step_counts, step_totals
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.core.rollout import Completions, Rollout, Sampling
from lit_rl.environments import CustomEnvironment
from lit_rl.models.forward import TokenScores
from lit_rl.ops.distillation import TeacherScores
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
    if module.distillation is not None:
        rollout, taught = module.distillation.at_rollout(rollout, teaches(completions, given["ref"]))
        metrics, said = metrics | taught, dataclasses.replace(said, further=likeliest(logprobs))
    mask = rollout.loss_mask
    totals = dataclasses.replace(
        StepTotals.of(mask),
        weights=WeightTotals(*map(torch.tensor, (int(mask.sum()), int(mask.any(1).sum()), 9.0, 4.0))),
    )
    loss, more = module.loss(rollout, said, totals)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return rollout, loss.detach(), gradient, metrics | more


def likeliest(logprobs: Tensor) -> Tensor:
    """Log-probs of three tokens, `(b, t, 3)`, that depend on one number each."""
    return (logprobs[..., None] * torch.tensor([1.0, 2.0, 3.0])).log_softmax(-1)


def teaches(completions: Completions, logprobs: Tensor) -> TeacherScores:
    top = torch.zeros(*logprobs.shape, 3, dtype=torch.long)
    return TeacherScores(logprobs, completions.response_mask, top, likeliest(logprobs))


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


# ---------------------------------------------------------------------- ECHO, the one term that learns them


class Echoes:
    def reset(self, *, seed: int) -> None: ...

    def step(self, action: str) -> tuple[str, float, bool]:
        return action, 0.0, True


def echo(coef: float, method: Any = GRPO, **settings: Any) -> Any:
    env = CustomEnvironment(Echoes, max_turns=4, max_tokens=64)
    return method("tiny", lambda completions: REWARDS, env=env, echo_coef=coef, **{"group_size": 4, **settings})


def rollout_of(module: Any, completions: Completions, **more: Any) -> Rollout:
    rewards = torch.tensor(REWARDS)
    return Rollout(completions, rewards, rewards - 1, completions.response_mask, **more)


def shares(module: Any, rollout: Rollout, logprobs: Tensor, plan: BatchPlan) -> tuple[Tensor, dict[str, list[Any]]]:
    """The loss of a step, summed over its micro-batches, and the metrics of each."""
    (counts,), total, metrics = step_counts(rollout, plan, seed=0, index=0), torch.zeros(()), {}
    for rows in rows_of_slots(rollout, plan, seed=0, index=0):
        part = micro_batch(rollout, rows)
        scored = TokenScores(logprobs[rows, : part.loss_mask.shape[1]])
        loss, found = module.loss(part, scored, step_totals(counts, plan))
        total = total + loss
        for name, metric in found.items():
            metrics.setdefault(name, []).append(metric)
    return total, metrics


def test_echo_learns_what_was_observed_in_rows_that_are_learned_from():
    """A row that is left out of the loss is left out of the term; its mean is over the whole step, however cut."""
    completions = drawn()
    left_out = torch.arange(8) == 3
    mask = completions.response_mask & ~left_out[:, None]
    observed = completions.observed & ~left_out[:, None]
    assert observed.sum() == sum(row.count("o") for i, row in enumerate(TURNS) if i != 3) == 10
    logprobs = numbers(1, mask.shape, -3, 0).requires_grad_()
    found = {}
    for accumulate in (1, 2):
        plan = BatchPlan(2, 4, 1, 1, accumulate, 1)
        for coef in (0.0, 0.1):
            module = echo(coef)
            rollout = dataclasses.replace(rollout_of(module, completions), loss_mask=mask)
            loss, metrics = shares(module, rollout, logprobs, plan)
            (gradient,) = torch.autograd.grad(loss, logprobs)
            found[accumulate, coef] = loss.detach(), gradient
        expected = found[accumulate, 0.0][0] - 0.1 * logprobs.detach()[observed].mean()
        torch.testing.assert_close(found[accumulate, 0.1][0], expected)
        slopes = found[accumulate, 0.1][1] - found[accumulate, 0.0][1]
        torch.testing.assert_close(slopes, torch.where(observed, -0.1 / 10, 0.0))
        above, below = (sum(float(pair[side]) for pair in metrics["echo_loss"]) for side in (0, 1))
        assert above / below == pytest.approx(-float(logprobs.detach()[observed].mean()))
    torch.testing.assert_close(found[1, 0.1], found[2, 0.1])


@pytest.mark.parametrize("method", [GRPO, PPO])
def test_echo_scores_observations_in_the_pass_of_what_was_sampled(method):
    """At their own places, by the logits before them; what was sampled has the scores that it has without."""
    module = echo(0.1, method, sampling=Sampling(temperature=0.5))
    module.configure_model()
    completions = drawn()
    completions = dataclasses.replace(completions, response_ids=completions.response_ids % 200)
    with torch.no_grad():
        scores = module.token_scores(completions).logprobs
        module.echo_coef = 0.0
        plain = module.token_scores(completions).logprobs
        ids = torch.cat([completions.prompt_ids, completions.response_ids], 1)
        logits = module.policy(input_ids=ids, attention_mask=completions.attention_mask.long()).logits
    expected = (logits[:, 1:-1] / 0.5).log_softmax(-1).gather(2, completions.response_ids[..., None])[..., 0]
    there = completions.response_mask | completions.observed
    torch.testing.assert_close(scores[there], expected[there], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scores[completions.response_mask], plain[completions.response_mask])
    if method is GRPO:
        assert (
            module.rows_that_teach(dataclasses.replace(rollout_of(module, completions), advantages=torch.zeros(8)))
            is not None
        )
        module.echo_coef = 0.1
        assert module.rows_that_teach(rollout_of(module, completions)) is None, "a row without an advantage teaches"
