"""GRPO against TRL 1.16: every loss with each option, every pair of options, advantages, and metrics."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
from oracle_cases import GROUP, ROWS, Case, Outcome, assert_same_step, backward
from oracle_ours import REDUCTIONS, SCALES, our_grpo, our_rollout, ours, plan_of, value
from oracle_trl import Oracle, completions_of, theirs
from trl.trainer.utils import split_tensor_dict

from lit_rl.algorithms.evaluation.summary_statistics import rollout_metrics
from lit_rl.algorithms.rollouts.rollout_plan import micro_batch, rows_of_slots, step_counts, step_totals
from lit_rl.core.rollout import select

RATIOS: dict[str, dict[str, Any]] = {
    "token": {"clip": {}, "clip_high": 0.5, "delta": 1.55, "cap": 1.3, "lower_cap": 1.1},
    "sequence": {"clip": {"epsilon": 0.02}, "clip_high": 0.04, "delta": 1.045, "cap": 1.1, "lower_cap": 1.02},
}
"""Bounds that ratios of this level reach: those of sequences are nearer to 1."""

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one step a rollout": {"num_iterations": 1},
    "kl": {"beta": 0.3, "use_bias_correction_kl": False},
    "corrected kl": {"beta": 0.3},
    "mask_truncated": {"mask_truncated_completions": True},
    "off_policy": {"off_policy_mask_threshold": 0.02},
    "top_entropy": {"top_entropy_quantile": 0.37},
    "entropy": {"entropy_coef": 0.3},
    "router": {"router_aux_loss_coef": 0.5},
    "batch_scale": {"scale_rewards": "batch"},
    "token_truncate": {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
    "token_mask": {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask"},
    "sequence_truncate": {"use_vllm": True, "vllm_importance_sampling_mode": "sequence_truncate"},
    "sequence_mask": {"use_vllm": True, "vllm_importance_sampling_mode": "sequence_mask"},
}


def options(loss_type: str, level: str) -> dict[str, dict[str, Any]]:
    """Those that mean something for the loss, each with the bounds of the level."""
    bounds = RATIOS[level]
    found = dict(OPTIONS)
    if loss_type in CLIPPED:
        found |= {"clip_high": {"epsilon_high": bounds["clip_high"]}, "delta": {"delta": bounds["delta"]}}
    if loss_type == "cispo":
        found["clip_high"] = {"epsilon_high": bounds["lower_cap"]}
    if loss_type == "vespo":  # takes weights of tokens only, as in TRL
        found = {name: option for name, option in found.items() if not name.startswith("sequence_")}
        found["shape"] = {"vespo_k_pos": 1.0, "vespo_lambda_pos": 2.0, "vespo_k_neg": 2.0, "vespo_lambda_neg": 1.5}
    if loss_type == "sapo":
        found["shape"] = {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0}
    return found


def base(loss_type: str, level: str) -> dict[str, Any]:
    cap = {"epsilon_high": RATIOS[level]["cap"]} if loss_type == "cispo" else {}
    return {"loss_type": loss_type, "importance_sampling_level": level, **RATIOS[level]["clip"], **cap}


def case_of(settings: dict[str, Any]) -> Case:
    """TRL's entropy bonus is a mean over a micro-batch, ours over the step: they are the same where these are.

    With one step a rollout the policy that learns is the one that took the rollout. TRL scores it a second time for the
    engine's weights and finds the same; we make them of the training's own forward pass.
    """
    same_policy = settings.get("num_iterations") == 1 and settings.get("use_vllm", False)
    micro_batches = 1 if settings.get("entropy_coef") else 2
    return Case(micro_batches=micro_batches, now="rollout") if same_policy else Case(micro_batches=micro_batches)


def both(oracle: Oracle, settings: dict[str, Any], case: Case) -> tuple[Outcome, Outcome]:
    completions = completions_of(oracle, case)
    return ours(oracle, our_grpo(settings), case, completions), theirs(oracle, settings, case, completions)


@cache
def plain_step(oracle: Oracle, loss_type: str, level: str, case: Case) -> Outcome:
    return theirs(oracle, base(loss_type, level), case, completions_of(oracle, case))


REDUCED = ("bnpo", "dr_grpo", "luspo")
"""Losses that differ from `grpo` and `dapo` by the reduction alone: of the options that the reduction does not read,
each takes a third."""


def levels_of(loss_type: str, name: str) -> tuple[str, ...]:
    """The level of a loss with an option: both without one, else one of them in turn."""
    if name == "plain":
        return ("token", "sequence")
    at = list(OPTIONS).index(name) if name in OPTIONS else 0
    if loss_type in REDUCED and name not in ("mask_truncated", "entropy", "kl") and at % 3 != REDUCED.index(loss_type):
        return ()
    if loss_type == "vespo" and name not in options("vespo", "sequence"):
        return ()
    return (("token", "sequence")[(list(REDUCTIONS).index(loss_type) + at) % 2],)


LOSSES = [
    pytest.param(loss_type, level, name, id=f"{loss_type}-{level}-{name}".replace(" ", "_"))
    for loss_type in REDUCTIONS
    for name in options(loss_type, "token")
    for level in levels_of(loss_type, name)
]


SIZES = {"vespo": 1.0, "entropy": 1.0}
"""Of the terms of a loss, where they are larger than usual: VESPO weighs a row by a power of all its ratios, and the
entropy of a vocabulary of 200 is some 4, of which a share is taken off."""


def size_of(*names: str) -> float:
    return max([0.1, *(SIZES[name] for name in names if name in SIZES)])


@pytest.mark.parametrize(("loss_type", "level", "name"), LOSSES)
def test_loss_and_gradient(grpo: Oracle, loss_type: str, level: str, name: str) -> None:
    option = options(loss_type, level)[name]
    settings = base(loss_type, level) | option
    mine, other = both(grpo, settings, case_of(settings))
    assert_same_step(mine, other, size=size_of(loss_type, name))
    if option:
        plain = plain_step(grpo, loss_type, level, case_of(settings))
        moved = (plain.gradient - other.gradient).norm() / other.gradient.norm()
        assert max(moved.item(), abs(plain.loss - other.loss)) > 1e-3, "the option does nothing here"


MOST = 4
"""Options of one step: more would leave few tokens to learn from."""


def go_together(found: dict[str, dict[str, Any]], one: str, other: str) -> bool:
    """Whether the two name no setting twice. The router and truncated completions differ by design: see
    `test_the_router_is_balanced_over_truncated_completions_too`."""
    return not found[one].keys() & found[other].keys() and {one, other} != {"router", "mask_truncated"}


def covering(found: dict[str, dict[str, Any]], pairs: set[tuple[str, str]]) -> list[tuple[str, ...]]:
    """Sets of up to `MOST` options, so that each of the pairs is in one of them."""
    sets, left = list[tuple[str, ...]](), set(pairs)
    while left:
        chosen = list(min(left))
        while len(chosen) < MOST:
            fits = [name for name in found if name not in chosen and all(go_together(found, name, c) for c in chosen)]
            new = {name: sum(tuple(sorted((name, c))) in left for c in chosen) for name in fits}
            if not any(new.values()):
                break
            chosen.append(max(new, key=lambda name: new[name]))
        sets.append(tuple(chosen))
        left -= {tuple(sorted(pair)) for pair in combinations(chosen, 2)}  # type: ignore[misc]
    return sets


def sets_of_options() -> list[Any]:
    """Each pair of options with a clipped loss of tokens or with a weighted loss of sequences, in turn, so that an
    option meets others with both. What only some losses have meets the others with those."""
    chosen = []
    for loss_type, level, turn in (
        ("dapo", "token", 0),
        ("cispo", "sequence", 1),
        ("sapo", "token", None),
        ("vespo", "token", None),
    ):
        found = {name: option for name, option in options(loss_type, level).items() if option}
        pairs = {tuple(sorted(pair)) for pair in combinations(found, 2) if go_together(found, *pair)}
        of_it = {
            pair
            for pair in pairs
            if (
                "shape" in pair
                if turn is None
                else sum(map(list(OPTIONS).index, set(pair) & OPTIONS.keys())) % 2 == turn or "delta" in pair
            )
        }
        chosen += [(loss_type, level, names) for names in covering(found, of_it)]  # type: ignore[arg-type]
    return [pytest.param(*each, id="-".join((each[0], each[1], *each[2])).replace(" ", "_")) for each in chosen]


@pytest.mark.parametrize(("loss_type", "level", "names"), sets_of_options())
def test_options_together(grpo: Oracle, loss_type: str, level: str, names: tuple[str, ...]) -> None:
    found, settings = options(loss_type, level), base(loss_type, level)
    for name in names:
        settings |= found[name]
    assert_same_step(*both(grpo, settings, case_of(settings)), size=1.0)


BOUNDS = [
    *(("dapo", name, 0.6, 1.5) for name in OPTIONS if name.endswith(("_truncate", "_mask"))),
    *(
        ("dapo", name, low, high)
        for name in ("token_truncate", "sequence_mask")
        for low, high in ((None, 1.5), (0.6, None))
    ),
    ("vespo", "token_truncate", 0.6, 1.5),
    ("vespo", "token_mask", 0.6, 1.5),
]


@pytest.mark.parametrize(("loss_type", "mode", "low", "high"), BOUNDS)
def test_bounds_of_the_mismatch_weights(
    grpo: Oracle, loss_type: str, mode: str, low: float | None, high: float | None
) -> None:
    bounds = {"vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high}
    mine, other = both(grpo, base(loss_type, "token") | OPTIONS[mode] | bounds, Case())
    assert_same_step(mine, other, size=size_of(loss_type))


# ------------------------------------------------------------------ advantages

REWARDS: dict[str, dict[str, Any]] = {
    "one function": {},
    "two functions": {"second": (1.0, 0.0, 2.0, 0.5, 1.0, 1.5, 0.0, 0.0)},
    "a function that does not always apply": {"second": (None, 0.0, 2.0, None, None, None, None, 0.7)},
    "equal in one group": {"first": (0.5,) * GROUP + (0.0, 1.0, 0.0, 1.0)},
    "unscorable rows": {"first": (None, 1.0, 0.35, None, 2.0, 0.0, 1.0, None)},
    "one scorable row": {"first": (None, 1.0, None, None, 2.0, 0.0, 1.0, 0.5)},
    "no scorable row": {"first": (None,) * GROUP + (2.0, 0.0, 1.0, 0.5)},
}


@pytest.mark.filterwarnings("ignore:All reward functions returned None")
@pytest.mark.parametrize("rewards", REWARDS.values(), ids=REWARDS.keys())
@pytest.mark.parametrize("scale", [*SCALES, "normalize_then_sum"])
def test_advantages(grpo: Oracle, rewards: dict[str, Any], scale: str) -> None:
    aggregated = {"multi_objective_aggregation": scale} if scale not in SCALES else {"scale_rewards": scale}
    assert_same_step(*both(grpo, aggregated, Case(**rewards)))


# ------------------------------------------------------------------ metrics

LOSS_METRICS = ("kl", "entropy", "policy_loss", "aux_loss", "cispo_clip_ratio", "vespo/phi_seq_mean")
LOGGED = ("sampling/", "clip_ratio/")


def compared(other: Outcome) -> dict[str, list[float]]:
    return {k: found for k, found in other.metrics.items() if k in LOSS_METRICS or k.startswith(LOGGED)}


@pytest.mark.parametrize(
    ("loss_type", "level", "mode"),
    [
        ("grpo", "token", "token_mask"),
        ("grpo", "sequence", "sequence_mask"),
        ("sapo", "token", "sequence_mask"),
        ("sapo", "sequence", "token_mask"),
        ("bnpo", "token", "token_mask"),
        ("dr_grpo", "sequence", "token_mask"),
        ("dapo", "token", "sequence_mask"),
        ("cispo", "token", "token_mask"),
        ("cispo", "sequence", "sequence_mask"),
        ("vespo", "token", "token_mask"),
        ("luspo", "sequence", "sequence_mask"),
    ],
)
def test_metrics(grpo: Oracle, loss_type: str, level: str, mode: str) -> None:
    """Where a row has one value, TRL counts rows and we count tokens: the same for rows of one length."""
    found = options(loss_type, level)
    correction = found.get(mode, found["token_mask"])
    settings = base(loss_type, level) | found["corrected kl"] | found["router"] | correction
    ragged = level == "token" and not correction["vllm_importance_sampling_mode"].startswith("sequence")
    mine, other = both(grpo, settings, Case() if ragged else Case(lengths=(6,) * ROWS))
    expected = compared(other)
    assert {"kl", "entropy", "aux_loss", "sampling/importance_sampling_ratio/mean"} <= expected.keys()
    for name, values in expected.items():
        assert mine.metrics[name] == pytest.approx(values, rel=1e-4, abs=1e-6), name
    clipped = [name for name in expected if name in ("clip_ratio/region_mean", "cispo_clip_ratio")]
    assert all(any(expected[name]) for name in clipped), "nothing is clipped"


def test_policy_loss_beside_a_bonus(grpo: Oracle) -> None:
    mine, other = both(grpo, OPTIONS["entropy"], Case(micro_batches=1))
    assert mine.metrics["policy_loss"] == pytest.approx(other.metrics["policy_loss"], rel=1e-5, abs=1e-6)


def rows_alone(oracle: Oracle, settings: dict[str, Any], case: Case, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A metric of each row that has a loss token, as if it were alone, and its loss tokens; 0 for other rows."""
    module = our_grpo(settings)
    rollout, _ = our_rollout(oracle, module, case, completions_of(oracle, case))
    totals = step_totals(step_counts(rollout, plan_of(case), seed=0, index=0)[0], plan_of(case))
    oracle.at("update")
    counts = rollout.loss_mask.sum(1)
    alone = torch.zeros(ROWS)
    for row in counts.nonzero().flatten():
        micro = select(rollout, row[None])
        alone[row] = value(module.loss(micro, module.token_scores(micro.completions), totals)[1][name])
    return alone, counts


def test_shares_of_sequence_ratios_count_tokens_here_and_rows_in_trl(grpo: Oracle) -> None:
    """And TRL counts rows that have no token in the loss: as not clipped, so that its lowest share is 0."""
    settings = base("grpo", "sequence") | OPTIONS["mask_truncated"]
    case, name = Case(micro_batches=1), "clip_ratio/region_mean"
    mine, other = both(grpo, settings, case)
    clipped, tokens = rows_alone(grpo, settings, case, name)
    assert other.metrics[name] == pytest.approx([clipped.sum().item() / ROWS])
    assert mine.metrics[name] == pytest.approx([(clipped * tokens).sum().item() / tokens.sum().item()])
    assert (tokens == 0).any() and mine.metrics[name] != pytest.approx(other.metrics[name], rel=1e-2)


def test_vespo_counts_rows_without_a_loss_token_in_trl_only(grpo: Oracle) -> None:
    """Their weight is phi(1) = 1."""
    settings = base("vespo", "token") | OPTIONS["mask_truncated"]
    case, name = Case(micro_batches=1), "vespo/phi_seq_mean"
    mine, other = both(grpo, settings, case)
    empty = len(case.cut)
    assert other.metrics[name] == pytest.approx([(mine.metrics[name][0] * (ROWS - empty) + empty) / ROWS], rel=1e-4)


def test_mean_of_sequence_weights_counts_tokens_here_and_rows_in_trl(grpo: Oracle) -> None:
    settings, case, name = OPTIONS["sequence_truncate"], Case(), "sampling/importance_sampling_ratio/mean"
    mine, other = both(grpo, settings, case)
    rollout, _ = our_rollout(grpo, our_grpo(settings), case, completions_of(grpo, case))
    assert rollout.weights is not None
    assert other.metrics[name] == pytest.approx([rollout.weights[:, 0].mean().item()], rel=1e-5)
    assert mine.metrics[name] == pytest.approx([rollout.weights[rollout.loss_mask].mean().item()], rel=1e-5)


@pytest.mark.parametrize("rewards", REWARDS.values(), ids=REWARDS.keys())
def test_metrics_of_the_rollout(grpo: Oracle, rewards: dict[str, Any]) -> None:
    """TRL counts rows that nothing scored in its share of groups without spread, as those of their group; we do not."""
    case = Case(**rewards)
    completions = completions_of(grpo, case)
    other = theirs(grpo, {}, case, completions)
    module = our_grpo({})
    our_rollout(grpo, module, case, completions)
    scores = module.reward_functions.score([""] * ROWS, [""] * ROWS, {})
    mine = rollout_metrics(
        scores.names,
        values=scores.values,
        rewards=scores.total,
        group_id=completions.group_id,
        lengths=completions.lengths,
        ended=completions.ended,
    )
    shared = {name for name in other.metrics if name.startswith(("reward", "completions/"))} | {"frac_reward_zero_std"}
    shared -= {"rewards/second/std"} if scores.values[:, 1].isnan().all() else set()  # of nothing: NaN in TRL, 0 here
    if scores.total.isnan().any():
        shared -= {"frac_reward_zero_std"}
    assert len(shared) > 10
    for name in shared:
        assert mine[name] == pytest.approx(other.metrics[name][0], rel=1e-5, abs=1e-6, nan_ok=True), name


def test_two_micro_batches_are_four_of_trl(grpo: Oracle) -> None:
    """Each is cut by its own rule; the step is the same."""
    case, settings = Case(micro_batches=4), OPTIONS["corrected kl"]
    completions = completions_of(grpo, case)
    other = theirs(grpo, settings, case, completions)
    assert_same_step(ours(grpo, our_grpo(settings), replace(case, micro_batches=2), completions), other)


@pytest.mark.parametrize("loss_type", ["grpo", "sapo", "dr_grpo", "luspo", "dapo", "cispo", "vespo"])
def test_steps_of_one_rollout_divide_by_their_own_tokens_here_and_by_their_mean_in_trl(
    grpo: Oracle, loss_type: str
) -> None:
    """Two optimizer steps, of a group each. TRL divides a sum over tokens (dapo, cispo, vespo) by the tokens of the
    rollout over the number of its steps, so that a step of longer completions moves more; here each step is a mean over
    its own tokens. Other losses are the same."""
    settings = base(loss_type, "sequence" if loss_type == "luspo" else "token")
    case, completions = Case(), completions_of(grpo, Case())
    groups = split_tensor_dict(grpo.take(settings, case, completions), 2)
    grpo.trainer.current_gradient_accumulation_steps = 1  # of the two micro-batches that share the rollout
    module, plan = our_grpo(settings), replace(plan_of(case), minibatches=2, accumulate=1)
    rollout, _ = our_rollout(grpo, module, case, completions)
    grpo.at(case.now)
    weights = {}
    counts = step_counts(rollout, plan, seed=0, index=0)
    for slot, rows in enumerate(rows_of_slots(rollout, plan, seed=0, index=0)):
        mine, group = micro_batch(rollout, rows), int(rows[0]) // GROUP
        loss, _ = module.loss(mine, module.token_scores(mine.completions), step_totals(counts[slot], plan))
        own, other = backward(grpo.model, [loss]), grpo.step([groups[group]])
        weights[group] = ((other.gradient @ own.gradient) / own.gradient.norm() ** 2).item()
        assert (other.gradient - weights[group] * own.gradient).norm() <= 1e-5 * other.gradient.norm()
    tokens = [sum(case.lengths[:GROUP]), sum(case.lengths[GROUP:])]
    mean = sum(tokens) / 2
    by_the_mean = loss_type in ("dapo", "cispo", "vespo")
    assert [weights[0], weights[1]] == pytest.approx([n / mean if by_the_mean else 1.0 for n in tokens], rel=1e-5)
    assert tokens == [22, 15], "the numbers of docs/from-trl.md: 1.19 and 0.81"
