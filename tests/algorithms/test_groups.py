"""Which groups a rollout is learned from: dynamic sampling and the best of a group."""

from __future__ import annotations

import dataclasses
import math
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_rollouts import EachBatch, batch, completions, credited, scored, scores, trainer
from small_rollouts import Ranks as Threads

from lit_rl.algorithms import GRPO
from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.evaluation.summary_statistics import Averages
from lit_rl.algorithms.rollouts.rollout_plan import BatchPlan, step_counts
from lit_rl.algorithms.rollouts.scored import Scored, Spare
from lit_rl.algorithms.terms.groups import BestOfGroup, DynamicSampling, TopOfGroup, reward_per_token, shortest
from lit_rl.core.errors import RewardError
from lit_rl.core.rollout import Completions, PromptBatch, Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.ops.advantages import group_normalized
from lit_rl.ops.reductions import Metrics
from lit_rl.rewards import Length, Rewards, SoftOverlong

GROUP = 2
TOKENIZER: Any = SimpleNamespace(batch_decode=lambda rows, **_: ["" for _ in rows])
SPARE = 1000
"""The spare prompt at position p is row `SPARE + p`."""


class World:
    """What a module does for `DynamicSampling`. Which rows are flat is known; a row's tokens and scores name it."""

    def __init__(self, flat: set[int], *, exact: bool = True) -> None:
        self.flat, self.exact = flat, exact
        self.positions: list[int] = []
        self.logged: list[dict[str, float]] = []
        self.asked = threading.local()

    def choice(self, groups: DynamicSampling, rows: list[int], ranks: Ranks) -> Scored:
        """The rollout of these rows, with the groups that are learned from."""
        data = SimpleNamespace(spare=SimpleNamespace(batch=self._spare))
        spare = Spare(data, self.generate, self.generate, self.reward, self.exact)
        selected, metrics = groups(self.rollout(rows), spare=spare, tokenizer=None, ranks=ranks)
        self.logged.append({name.partition("/")[2]: float(a / b) for name, (a, b) in metrics.items()})  # pyright: ignore
        return selected

    def generate(self, prompts: PromptBatch, group_size: int = GROUP) -> Completions:
        self.asked.times = getattr(self.asked, "times", 0) + 1
        drawn = completions([1 + row % 3 for row in prompts.rows for _ in range(group_size)], group_size)
        ids = torch.tensor(prompts.rows).repeat_interleave(group_size)[:, None]
        return dataclasses.replace(drawn, response_ids=ids * drawn.response_mask)

    def reward(self, prompts: PromptBatch, drawn: Completions) -> Any:
        values = [value for row in prompts.rows for value in ([0.5, 0.5] if row in self.flat else [0.0, 1.0])]
        return scores(values, extras={"row": [row for row in prompts.rows for _ in range(GROUP)]})

    def rollout(self, rows: list[int]) -> Scored:
        prompts = batch(rows)
        drawn = self.generate(prompts)
        return Scored(prompts, drawn, self.reward(prompts, drawn))

    def _spare(self, positions: range, *, rollout: int, first: int) -> PromptBatch:
        self.positions += positions
        return batch([SPARE + p for p in positions], rollout=rollout)


def check(world: World, before: list[int], selected: Scored, empty: int) -> list[int]:
    """Prompts, completions and scores still belong together; returns the rows that came from the spare prompts."""
    prompts, drawn, kept = selected.batch, selected.completions, selected.kept
    assert len(prompts) == len(before)
    group = torch.arange(len(before)).repeat_interleave(GROUP)
    assert torch.equal(drawn.group_id, group)
    rows = torch.tensor(prompts.rows)[group]
    assert prompts.prompts == [f"prompt {row}" for row in prompts.rows]
    assert prompts.columns["answer"] == [str(row) for row in prompts.rows]
    assert torch.equal(drawn.response_ids, rows[:, None] * drawn.response_mask)
    assert drawn.lengths.tolist() == [1 + row % 3 for row in rows.tolist()]
    assert selected.scores.extras["row"] == rows.tolist()
    flat = torch.tensor([row in world.flat for row in prompts.rows])
    assert int(flat.sum()) == empty
    if empty:
        assert kept is not None and torch.equal(kept, ~flat.repeat_interleave(GROUP))
    else:
        assert kept is None
    for place, (was, now) in enumerate(zip(before, prompts.rows)):
        assert now == was or was in world.flat, place
    return [row for row in prompts.rows if row >= SPARE]


@given(
    flat=st.sets(st.one_of(st.integers(0, 5), st.integers(SPARE, SPARE + 30))),
    prompts=st.integers(1, 6),
    cap=st.integers(0, 12),
)
def test_groups_without_spread_are_replaced_from_spare_prompts_up_to_the_cap(flat, prompts, cap):
    world, groups = World(flat), DynamicSampling(cap)
    start = 0
    for _ in range(2):  # the second rollout goes on where the first one stopped
        rows = list(range(prompts))
        selected = world.choice(groups, rows, Ranks())
        counts = world.logged[-1]
        new = check(world, rows, selected, int(counts["empty"]))
        assert counts["dropped"] == len(flat & set(rows))
        drawn = int(counts["drawn"])
        assert world.positions == list(range(start, start + drawn)) and drawn <= cap
        assert counts["empty"] == 0 or drawn == cap
        good = [SPARE + p for p in world.positions if SPARE + p not in flat]
        assert sorted(new) == good == sorted(set(new)) and len(new) == counts["dropped"] - counts["empty"]
        world.positions.clear()
        start += drawn
        assert groups.state() == {"position": start}


@given(
    flat=st.sets(st.one_of(st.integers(0, 20), st.integers(SPARE, SPARE + 20)), max_size=20),
    ranks=st.integers(2, 3),
    cap=st.integers(0, 9),
)
def test_ranks_draw_different_spare_prompts_under_one_cap(flat, ranks, cap):
    world = World(flat)
    rows = {rank: list(range(3 * rank, 3 * rank + 3)) for rank in range(ranks)}
    states = []

    def work(module: Any) -> Any:
        groups = DynamicSampling(cap)
        selected = world.choice(groups, rows[module.ranks.rank], module.ranks)
        states.append(groups.state())
        return selected

    parts = Threads(ranks).run(work)
    counts = world.logged[0]
    assert all(logged == counts for logged in world.logged) and len(world.logged) == ranks
    assert sorted(world.positions) == list(range(int(counts["drawn"]))) and counts["drawn"] <= cap
    assert states == [{"position": counts["drawn"]}] * ranks
    assert counts["dropped"] == len(flat & set(range(3 * ranks)))
    new: list[int] = []
    for rank, part in enumerate(parts):
        left = sum(row in flat for row in part.batch.rows)
        new += check(world, rows[rank], part, left)
    assert len(set(new)) == len(new) == counts["dropped"] - counts["empty"]


@given(
    rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0, math.nan]), min_size=16, max_size=16),
    groups=st.sampled_from(
        [DynamicSampling(0), DynamicSampling(0, tolerance=0.3), TopOfGroup(2, shortest), BestOfGroup()]
    ),
)
def test_ranks_that_share_prompts_choose_what_one_process_chooses(rewards, groups):
    """Four prompts of four completions on four ranks: two have the first two prompts, half of each group each."""
    lengths = [1 + row * 7 % 5 for row in range(16)]

    def chosen(rows: list[int], size: int, ranks: Any, **shared: int) -> tuple[torch.Tensor, dict[str, Any]]:
        drawn = completions([lengths[row] for row in rows], size)
        found = Scored(batch(range(len(rows) // size), **shared), drawn, scores([rewards[row] for row in rows]))
        no_spare: Any = SimpleNamespace()
        selected, metrics = groups(found, spare=no_spare, tokenizer=TOKENIZER, ranks=ranks)
        kept = torch.ones(len(rows), dtype=torch.bool) if selected.kept is None else selected.kept
        return kept, metrics

    whole, metrics = chosen(list(range(16)), 4, Ranks())
    expected = whole.view(2, 2, 2, 2)  # the pair of ranks, the prompt, the rank of the pair, the completion

    def work(module: Any) -> Any:
        pair, share = divmod(module.ranks.rank, 2)
        rows = torch.arange(16).view(2, 2, 2, 2)[pair, :, share].flatten().tolist()
        kept, mine = chosen(rows, 2, module.ranks, sharing=2, share=share)
        assert torch.equal(kept, expected[pair, :, share].flatten())
        return mine

    every = Threads(4).run(work)
    for name, (above, below) in metrics.items():
        sums = [sum(float(mine[name][part]) for mine in every) for part in (0, 1)]
        assert sums[0] * float(below) == pytest.approx(sums[1] * float(above)), name


@pytest.mark.parametrize("exact", [True, False])
def test_an_engine_of_its_own_is_asked_by_every_rank_as_often(exact):
    """To ask an engine is a collective; the policy itself is asked by the ranks that need it."""
    world = World({0, 1, SPARE, SPARE + 1, SPARE + 2}, exact=exact)

    def work(module: Any) -> int:
        world.choice(DynamicSampling(8), [[0, 1], [2, 3]][module.ranks.rank], module.ranks)
        return world.asked.times

    assert Threads(2).run(work) == ([4, 4] if not exact else [4, 1])


def test_unscored_completions_make_no_spread():
    world = World(set())
    world.reward = lambda prompts, drawn: scores([math.nan, 1.0, 0.0, 1.0, math.nan, math.nan][: len(drawn)])  # type: ignore
    kept = world.choice(DynamicSampling(0), [0, 1, 2], Ranks()).kept
    assert kept is not None and kept.tolist() == [False, False, True, True, False, False]


def test_the_position_survives_a_checkpoint():
    world = World({0, SPARE, SPARE + 1})
    first, second = DynamicSampling(8), DynamicSampling(8)
    world.choice(first, [0], Ranks())
    second.load_state(first.state())
    world.positions.clear()
    world.choice(second, [0], Ranks())
    assert world.positions == [3]


# ---------------------------------------------------------------------- what is left out counts nowhere


def counts_of(module: GRPO, kept: torch.Tensor, rewards: list[float]) -> tuple[torch.Tensor, Any]:
    drawn = completions([3, 1, 2, 2], 2)
    rollout, _ = credited(module, scored(drawn, scores(rewards), kept=kept))
    plan = BatchPlan(2, 2, 1, 1, 1, 1)
    return step_counts(rollout, plan, seed=0, index=0)[0], rollout


def test_a_group_that_is_left_out_has_no_loss_token_and_is_in_no_denominator():
    module = GRPO("tiny", len)
    kept = torch.tensor([False, False, True, True])
    counts, rollout = counts_of(module, kept, [1.0, 1.0, 0.0, 1.0])
    assert not rollout.loss_mask[:2].any() and rollout.loss_mask[2:].sum() == 4
    # rows, tokens, rows with tokens, weights of tokens and of rows, tokens of rows that a judge found better
    assert counts.tolist() == [2, 4, 2, 4, 2, 0, 0]
    assert rollout.advantages[:2].tolist() == [0, 0] and rollout.rewards[:2].isnan().all()


def test_a_truncated_completion_is_a_row_and_an_unscored_one_is_too():
    module = GRPO("tiny", len, mask_truncated=True)
    drawn = dataclasses.replace(completions([3, 1, 2, 2], 2), ended=torch.tensor([False, True, True, True]))
    rollout, _ = credited(module, scored(drawn, scores([1.0, math.nan, 0.0, 1.0])))
    counts = step_counts(rollout, BatchPlan(2, 2, 1, 1, 1, 1), seed=0, index=0)[0]
    assert counts[:3].tolist() == [4, 5, 3]


# ---------------------------------------------------------------------- whole runs


class Parity:
    """1 for an even number of characters at one half of the prompts; the other half gets the same for everything."""

    __name__ = "parity"

    def __call__(self, completions: list[str], answer: list[str]) -> list[float]:
        return [float(len(text) % 2 == 0) if int(a) % 2 else 1.0 for text, a in zip(completions, answer)]


ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]


def run(tmp_path: Any, groups: Any, **settings: Any) -> tuple[list[Any], Any]:
    module = GRPO(
        "tiny", Parity(), groups=groups, group_size=4, minibatches=2, sampling=Sampling(max_new_tokens=4), **settings
    )
    looks = EachBatch(
        lambda m: {
            "rows": list(m.scored.batch.rows),
            "table": list(m.samples["answer"]),
            "rewards": m.rollout.rewards.clone(),
            "ids": m.rollout.completions.response_ids.clone(),
            "mask": m.rollout.loss_mask.clone(),
            "metrics": {k: float(v) for k, v in m.trainer.callback_metrics.items() if "/groups/" in k},
        }
    )
    fit = trainer(tmp_path, max_epochs=1, callbacks=[looks])
    fit.fit(module, datamodule=RolloutDataModule(rows=ROWS, prompts_per_rollout=8, val_fraction=0))
    return looks.seen, fit


def test_a_run_keeps_its_steps_and_epochs_and_shows_the_new_prompts(tmp_path):
    plain, without = run(tmp_path, None)
    seen, fit = run(tmp_path, DynamicSampling(64))
    assert fit.global_step == without.global_step == 4 and len(seen) == len(plain) == 4
    for look, old in zip(seen, plain):
        stds = look["rewards"].reshape(8, 4).std(1)
        assert (stds > 0).all() and look["mask"].any(1).all()
        assert look["rows"] != old["rows"]  # some answer is even in every rollout
        assert look["table"] == [ROWS[row]["answer"] for row in look["rows"] for _ in range(4)]
    metrics = seen[-1]["metrics"]
    flat = int((plain[2]["rewards"].reshape(8, 4).std(1) == 0).sum())
    # the policy of the second rollout has learned something else, so only the first rollout's count is known
    assert metrics["train/groups/empty"] == 0 and metrics["train/groups/drawn"] >= metrics["train/groups/dropped"] > 0
    first = seen[1]["metrics"]
    assert first["train/groups/dropped"] == int((plain[0]["rewards"].reshape(8, 4).std(1) == 0).sum())
    assert flat > 0


def test_what_the_cap_leaves_is_not_learned_from(tmp_path):
    seen, _ = run(tmp_path, DynamicSampling(0))
    plain, _ = run(tmp_path, None)
    spread = plain[0]["rewards"].reshape(8, 4).std(1) > 0
    rows = spread.repeat_interleave(4)
    assert torch.equal(seen[0]["mask"].any(1), rows) and 0 < spread.sum() < 8
    first = seen[1]["metrics"]
    assert first["train/groups/empty"] == first["train/groups/dropped"] == int((~spread).sum())
    assert first["train/groups/drawn"] == 0


# ---------------------------------------------------------------------- the best of a group


class Alone:
    """A module by hand, without a policy."""

    def __init__(self, **settings: Any) -> None:
        self.module = GRPO("tiny", len, **{"group_size": 4, **settings})

    def select(self, lengths: list[int], rewards: list[float]) -> tuple[Scored, torch.Tensor, Metrics]:
        found = scored(completions(lengths, self.module.group_size), scores(rewards))
        nothing: Any = None  # no spare prompt is asked for
        assert self.module.groups is not None
        selected, metrics = self.module.groups(found, spare=nothing, tokenizer=self.module.tokenizer, ranks=Ranks())
        assert selected.kept is not None
        return selected, selected.kept, metrics


def test_statistics_of_advantages_are_those_of_the_kept_ones():
    # the two shortest of each group of four: rewards 1, 0 and 0, 1; the others would change mean and deviation
    alone = Alone(groups=TopOfGroup(2, shortest))
    selected, kept, metrics = alone.select([1, 2, 3, 4, 4, 1, 3, 2], [1.0, 0.0, 9.0, 9.0, 9.0, 0.0, 9.0, 1.0])
    assert kept.tolist() == [True, True, False, False, False, True, False, True]
    rollout, _ = credited(alone.module, selected)
    size = 0.5 / (math.sqrt(0.5) + 1e-4)
    expected = torch.tensor([size, -size, 0, 0, 0, -size, 0, size])
    torch.testing.assert_close(rollout.advantages, expected)
    assert torch.equal(rollout.loss_mask.any(1), kept)
    averages = Averages()
    averages.add(metrics)
    assert averages.reduce()["groups/kept_length"] == 1.5


@given(st.data())
def test_kept_are_the_best_scored_ones_and_of_equals_the_earlier(data):
    keep = data.draw(st.integers(2, 4))
    points = data.draw(st.lists(st.integers(0, 3), min_size=8, max_size=8))
    rewards = data.draw(st.lists(st.sampled_from([0.0, 1.0, math.nan]), min_size=8, max_size=8))
    alone = Alone(groups=TopOfGroup(keep, lambda completions: points))
    _, kept, _ = alone.select([2] * 8, rewards)
    for start in (0, 4):
        order = sorted(
            range(start, start + 4),
            key=lambda i: (math.isnan(rewards[i]), 0 if math.isnan(rewards[i]) else -points[i], i),
        )
        assert kept[start : start + 4].nonzero().flatten().tolist() == sorted(i - start for i in order[:keep])


def test_reward_per_token_by_hand():
    assert reward_per_token([1.0, 1.0, 0.0, math.nan], [2, 4, 3, 1]) == [0.5, 0.25, 0.0, 0.0]
    assert shortest([3, 1]) == [-3.0, -1.0]


def test_a_users_score_gets_what_it_names():
    got: dict[str, Any] = {}

    def score(prompts, completions, rewards, lengths, answer):
        got.update(prompts=prompts, rewards=rewards, lengths=lengths, answer=answer, count=len(completions))
        return [float(a) for a in answer]

    Alone(groups=TopOfGroup(2, score)).select([1, 2, 3, 4] * 2, [0.0, 1.0] * 4)
    assert got["prompts"] == ["prompt 0"] * 4 + ["prompt 1"] * 4 and got["answer"] == ["0"] * 4 + ["1"] * 4
    assert got["rewards"] == [0.0, 1.0] * 4 and got["lengths"] == [1, 2, 3, 4] * 2 and got["count"] == 8


def test_a_score_that_is_not_one_number_a_completion_is_refused():
    def leaves(completions):
        raise SystemExit(0)

    wrong = ([1.0], [[1.0]] * 8, [math.nan] * 8, 3.0, None, ["a"] * 8, [None] * 8)
    scores = [lambda completions, said=said: said for said in wrong]
    for score in (*scores, lambda difficulty: difficulty, lambda completions: 1 / 0, leaves):
        with pytest.raises(RewardError, match=r"algo\.groups\.score"):
            Alone(groups=TopOfGroup(2, score)).select([1, 2, 3, 4] * 2, [0.0, 1.0] * 4)


# ---------------------------------------------------------------------- what decides


def flat_places(groups: DynamicSampling, said: Any, group_size: int = 2) -> list[int]:
    """Places of the groups that are left out, where there is nothing to replace them by."""
    drawn = completions([1] * len(said.total), group_size)
    selected, _ = groups(scored(drawn, said), spare=None, tokenizer=None, ranks=Ranks())  # pyright: ignore
    kept = torch.ones(len(drawn), dtype=torch.bool) if selected.kept is None else selected.kept
    return [place for place, row in enumerate(kept.view(-1, group_size)) if not row.all()]


@pytest.mark.parametrize(
    ("metric", "flat"), [(None, [2]), ("right", [0, 2]), (["length"], [1, 2]), (["right", "length"], [2])]
)
def test_named_functions_decide_what_a_group_without_spread_is(metric: Any, flat: list[int]):
    values = {"right": [0.0, 0.0, 1.0, 0.0, 1.0, 1.0], "length": [-0.1, -0.9, 0.0, 0.0, -0.5, -0.5]}
    functions = {name: (lambda completions, said=said: said) for name, said in values.items()}
    said = Rewards(functions).score(["p"] * 6, ["c"] * 6, {})
    assert flat_places(DynamicSampling(0, metric), said) == flat


def test_a_length_penalty_does_not_make_a_group_of_wrong_answers_alive():
    """In the sum all groups differ; by the answers only the last one teaches anything. No shaping is read at all."""
    right = {"right": [0.0] * 4 + [1.0] * 4 + [0.0, 1.0, 0.0, 0.0]}
    length = {"length": [-0.1, -0.2, -0.3, -0.4] * 3}
    functions = {n: (lambda completions, said=said: said) for n, said in (right | length).items()}
    said = Rewards(functions).score(["p"] * 12, ["c"] * 12, {})
    assert flat_places(DynamicSampling(0), said, 4) == []
    assert flat_places(DynamicSampling(0, "right"), said, 4) == [0, 1]


@pytest.mark.parametrize(
    ("tolerance", "flat"), [(0.0, [2]), (0.04, [2]), (0.05, [0, 2]), (0.3, [0, 2]), (0.5, [0, 1, 2])]
)
def test_values_within_the_tolerance_of_their_mean_are_no_spread(tolerance: float, flat: list[int]):
    """By hand: distances 0.05 (of 0.2 and 0.3, which float32 cannot hold), 0.5 and 0."""
    said = scores([0.2, 0.3, 0.0, 1.0, 0.7, 0.7])
    assert flat_places(DynamicSampling(0, tolerance=tolerance), said) == flat


def test_the_tolerance_is_on_the_farthest_value_and_on_every_named_function():
    said = scores([0.0, 0.0, 0.0, 0.4])  # their mean is 0.1
    assert flat_places(DynamicSampling(0, tolerance=0.29), said, 4) == []
    assert flat_places(DynamicSampling(0, tolerance=0.3), said, 4) == [0]
    two = scores([[0.0, 0.0], [0.1, 1.0], [0.0, 0.3], [0.1, 0.3]])
    assert flat_places(DynamicSampling(0, ["f0", "f1"], 0.1), two) == [1]
    assert flat_places(DynamicSampling(0, "f0", 0.1), two) == [0, 1]


def test_a_function_decides_whatever_its_weight_and_its_unscored_rows_are_left_out():
    values = {"sum": [1.0, 0.0, 1.0, 0.0], "watched": [1.0, 0.0, None, 0.0]}
    functions = {name: (lambda completions, said=said: said) for name, said in values.items()}
    said = Rewards(functions, {"sum": 1.0, "watched": 0.0}).score(["p"] * 4, ["c"] * 4, {})
    assert flat_places(DynamicSampling(0, "watched"), said) == [1]


PARTS = {
    "0.1 + 0.6 and 0.7": ([0.1, 0.6, 0.7], [[1.0, 1.0, None], [None, None, 1.0]]),
    "0.1 + 0.8 and 0.9": ([0.1, 0.8, 0.9], [[1.0, 1.0, None], [None, None, 1.0]]),
    "1 - 0.7 - 0.3 and 0": ([1.0, -0.7, -0.3], [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]),
    "values of their own": ([1.0, 1.0, 1.0], [[0.1, 0.6, None], [0.7, None, None]]),
    "spans": ([1.0], [[[(0, 1, 0.3), (1, 2, 0.6)]], [0.9]]),
}


@pytest.mark.parametrize(("weights", "rows"), PARTS.values(), ids=PARTS.keys())
def test_equal_sums_are_equal_rewards_whatever_they_are_made_of(weights: list[float], rows: list[list[Any]]):
    columns = list(zip(*rows))
    functions = {f"f{i}": (lambda completions, column=column: list(column)) for i, column in enumerate(columns)}
    said = Rewards(functions, weights).score(["p", "p"], ["cc", "cc"], {})
    assert len(set(said.total.tolist())) == 1 and flat_places(DynamicSampling(0), said) == [0]
    assert not group_normalized(said.total, torch.zeros(2, dtype=torch.long), eps=0.0).any()


def test_small_rewards_are_no_rounding():
    said = Rewards({"f": lambda completions: [1e-9, 2e-9]}).score(["p", "p"], ["c", "c"], {})
    assert flat_places(DynamicSampling(0), said) == []


def test_a_score_of_ones_own_is_seeded_and_leaves_the_training_alone():
    drawn = []

    def score(completions):
        drawn.append([random.random(), float(torch.rand(()))])
        torch.set_default_dtype(torch.float64)
        return [float(len(completions))] * len(completions)

    torch.manual_seed(5)
    before = torch.get_rng_state()
    for _ in range(2):
        random.random()
        Alone(groups=TopOfGroup(2, score)).select([1, 2, 3, 4] * 2, [0.0, 1.0] * 4)
    assert drawn[0] == drawn[1]
    assert torch.equal(torch.get_rng_state(), before) and torch.get_default_dtype() == torch.float32


def test_a_length_penalty_in_the_sum_is_said(recwarn):
    """A group of wrong answers differs in it; where the reward that counts decides, or nothing else is there, it does
    not matter."""
    right, penalty = (lambda prompts, completions, **_: [0.0] * len(prompts)), SoftOverlong(9)
    both = Rewards({"right": right, "soft": penalty})
    for rewards, metric in ((both, "right"), (Rewards({"right": right, "also": right}), None),
                            (Rewards({"soft": penalty, "short": Length(9)}), None),
                            (Rewards({"right": right, "soft": penalty}, {"soft": 0.0}), None)):  # fmt: skip
        module = GRPO("tiny", rewards, groups=DynamicSampling(metric=metric), group_size=4)
        assert module.groups is not None and not recwarn.list, (rewards, metric)
    with pytest.warns(UserWarning, match=r"soft is in the sum.*algo\.groups\.metric=\[right\]"):
        GRPO("tiny", both, groups=DynamicSampling(), group_size=4)
