"""Batch arithmetic: whole groups everywhere, nothing lost, nothing twice."""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_rollouts import trainer

from lit_rl.algorithms import GRPO, SFT, OnlineDPO
from lit_rl.algorithms.checks.micro_batching import MicroBatches, StepRows, micro_batches_of_size
from lit_rl.algorithms.checks.policy_gradient_checks import check_shared_groups
from lit_rl.algorithms.loop import on_policy
from lit_rl.algorithms.rollouts.rollout_plan import BatchPlan, RowCounts, deal_rows, micro_rows, minibatch_rows
from lit_rl.algorithms.terms.groups import GroupReplay
from lit_rl.algorithms.terms.self_teacher import ColumnContext, OutcomeContext, SelfTeacher
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import PromptBatch, Sampling
from lit_rl.data.example_module import SupervisedDataModule
from lit_rl.data.loaders import RolloutLoader
from lit_rl.data.order import RolloutOrder, fit_step_rows
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.generation.noise import row_keys, sample_key
from lit_rl.ops.selection import top_entropy
from lit_rl.rewards import exact_match


def plan(**changes) -> BatchPlan:
    return BatchPlan(
        **{
            "prompts_per_rollout": 8,
            "group_size": 4,
            "minibatches": 1,
            "iterations": 1,
            "accumulate": 1,
            "world_size": 1,
            **changes,
        }
    )


@given(
    groups=st.integers(1, 4),
    group_size=st.sampled_from([2, 4, 6]),
    minibatches=st.integers(1, 3),
    iterations=st.integers(1, 2),
    accumulate=st.integers(1, 3),
    split=st.sampled_from([1, 2]),
    data=st.data(),
)
def test_every_pass_takes_every_row_once_in_whole_groups(
    groups, group_size, minibatches, iterations, accumulate, split, data
):
    prompts = groups * minibatches * accumulate
    p = plan(
        prompts_per_rollout=prompts,
        group_size=group_size,
        minibatches=minibatches,
        iterations=iterations,
        accumulate=accumulate,
        split_groups=split,
    )
    group_id = torch.arange(prompts).repeat_interleave(group_size)
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, 9), min_size=len(group_id), max_size=len(group_id))))
    for iteration in range(iterations):
        taken = []
        for rows in minibatch_rows(group_id, p, seed=3, rollout=5, iteration=iteration):
            ids, counts = group_id[rows].unique(return_counts=True)
            assert set(counts.tolist()) == {group_size} and len(ids) == prompts // minibatches
            parts = micro_rows(rows, group_id, lengths, p)
            assert len(parts) == accumulate and {len(part) for part in parts} == {len(rows) // accumulate}
            assert sorted(torch.cat(parts).tolist()) == rows.tolist()
            if split == 1:
                for part in parts:
                    assert set(group_id[part].unique(return_counts=True)[1].tolist()) == {group_size}
            taken += rows.tolist()
        assert sorted(taken) == list(range(len(group_id)))


def test_each_pass_of_each_rollout_has_its_own_order_and_the_seed_decides():
    p, group_id = plan(minibatches=4), torch.arange(8).repeat_interleave(4)

    def order(seed, rollout, iteration):
        return torch.cat(minibatch_rows(group_id, p, seed, rollout, iteration)).tolist()

    assert order(0, 0, 0) == order(0, 0, 0)
    assert len({tuple(order(*key)) for key in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]}) == 4


def test_micro_batches_are_balanced_by_tokens():
    group_id = torch.arange(8).repeat_interleave(2)
    lengths = torch.tensor([100, 100, 90, 90, 80, 80, 70, 70, 4, 4, 3, 3, 2, 2, 1, 1])
    parts = micro_rows(torch.arange(16), group_id, lengths, plan(group_size=2, accumulate=2))
    assert [int(lengths[part].sum()) for part in parts] == [350, 350]


def counts_of(group_id: torch.Tensor, lengths: torch.Tensor) -> RowCounts:
    """Of a rollout of which every token behind a prompt was sampled."""
    return RowCounts(group_id, torch.ones_like(lengths), lengths, lengths)


def test_slots_run_through_passes_minibatches_and_micro_batches_in_this_order():
    p, group_id = plan(minibatches=2, iterations=2, accumulate=2), torch.arange(8).repeat_interleave(4)
    assert p.slots == 8 and p.steps_per_rollout == 4
    lengths = torch.arange(32) % 5 + 1
    slots = deal_rows(counts_of(group_id, lengths), p, seed=3, index=5)
    at = iter(slots)
    for iteration in range(2):
        for rows in minibatch_rows(group_id, p, 3, 5, iteration):
            for part in micro_rows(rows, group_id, lengths, p):
                assert torch.equal(next(at), part)
    assert next(at, None) is None


@given(
    groups=st.integers(1, 4),
    accumulate=st.integers(1, 3),
    minibatches=st.integers(1, 2),
    data=st.data(),
)
def test_rows_that_teach_nothing_are_left_out_and_every_slot_has_a_row(groups, accumulate, minibatches, data):
    prompts = groups * accumulate * minibatches
    p, rows = (
        plan(prompts_per_rollout=prompts, accumulate=accumulate, minibatches=minibatches, group_size=2),
        2 * prompts,
    )
    group_id, lengths = torch.arange(prompts).repeat_interleave(2), torch.arange(rows) % 7 + 1
    teaching = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
    slots = deal_rows(counts_of(group_id, lengths), p, seed=0, index=0, teaching=teaching)
    assert len(slots) == p.slots and all(len(slot) for slot in slots)
    taught = torch.cat([slot[teaching[slot]] for slot in slots])
    assert sorted(taught.tolist()) == teaching.nonzero().flatten().tolist()
    for slot in slots:  # a row that teaches nothing is there only to have one
        assert teaching[slot].all() or len(slot) == 1


def test_micro_batches_are_balanced_by_the_tokens_of_rows_that_teach():
    group_id = torch.arange(4).repeat_interleave(2)
    lengths = torch.tensor([100, 100, 90, 90, 10, 10, 9, 9])
    teaching = torch.tensor([True, True, False, False, True, True, False, False])
    p = plan(prompts_per_rollout=4, group_size=2, accumulate=2)
    slots = deal_rows(counts_of(group_id, lengths), p, seed=0, index=0, teaching=teaching)
    assert [slot.tolist() for slot in slots] == [[0, 1], [4, 5]]


@pytest.mark.parametrize(
    "changes",
    [
        {"prompts_per_rollout": 7, "accumulate": 2},
        {"prompts_per_rollout": 2, "minibatches": 4},
        {"prompts_per_rollout": 9, "group_size": 3, "world_size": 2},
        {"prompts_per_rollout": 9, "split_groups": 4, "world_size": 2},
        {"prompts_per_rollout": 32, "minibatches": 3, "accumulate": 5, "world_size": 2},
    ],
)
def test_what_does_not_divide_is_refused_with_three_settings_that_work(changes):
    with pytest.raises(ConfigError) as caught:
        plan(**changes)
    text = str(caught.value)
    for key in (
        "data.prompts_per_rollout",
        "algo.minibatches",
        "trainer.accumulate_grad_batches",
        "data-parallel size",
    ):
        assert key in text
    found = re.findall(
        r"prompts_per_rollout=(\d+) algo.minibatches=(\d+) trainer.accumulate_grad_batches=(\d+)\n?", text
    )
    assert len(found) == 3
    for prompts, minibatches, accumulate in found:
        plan(
            **{
                **changes,
                "prompts_per_rollout": int(prompts),
                "minibatches": int(minibatches),
                "accumulate": int(accumulate),
            }
        )


@pytest.mark.parametrize(
    ("prompts", "group_size", "minibatches", "ranks", "shared"),
    [(1, 64, 1, 8, 8), (32, 8, 1, 64, 2), (6, 8, 1, 4, 2), (3, 8, 3, 2, 2), (2, 8, 2, 4, 4), (8, 8, 2, 4, 1)],
)
def test_ranks_share_prompts_that_do_not_divide_and_every_completion_is_drawn_once(
    prompts, group_size, minibatches, ranks, shared
):
    """By the keys of its noise, which are those of one process."""
    p = plan(prompts_per_rollout=prompts, group_size=group_size, minibatches=minibatches, world_size=ranks)
    assert p.ranks_per_group == shared and ("prompt and rank" in str(p.table())) == (shared > 1)
    rows = SimpleNamespace(
        fingerprint="", batch=lambda rows, **more: PromptBatch([""] * len(rows), [], {}, rows, **more)
    )
    drawn, in_step = [], set()
    for rank in range(ranks):
        order = RolloutOrder((prompts,), prompts)
        loader = RolloutLoader(rows, order, rank=rank, world_size=ranks, sharing=shared)  # pyright: ignore
        (batch,) = loader
        asked = GRPO("tiny", exact_match, group_size=group_size).request(batch)
        keys = [sample_key(key, asked.first_sample) for key in batch.rows]
        drawn += row_keys(keys, asked.group_size).tolist()
        ids = torch.arange(len(batch)).repeat_interleave(asked.group_size)
        assert len(batch) == p.prompts_per_rank and asked.group_size == group_size // shared
        first = minibatch_rows(ids, p, seed=3, rollout=5, iteration=0)[0]
        in_step |= {(rank // shared, tuple(ids[first].unique().tolist()))}
    assert sorted(drawn) == sorted(row_keys(list(range(prompts)), group_size).tolist())
    assert len(in_step) == ranks // shared, "ranks that share prompts take the same of them in a step"


def test_what_compares_whole_groups_is_refused_where_ranks_share_them():
    check_shared_groups(plan(world_size=2), ["a judge"])
    check_shared_groups(plan(prompts_per_rollout=3, world_size=2), [])
    with pytest.raises(ConfigError, match=r"prompts_per_rollout=3: of 2 ranks 2 .* a judge compares .* such as 4"):
        check_shared_groups(plan(prompts_per_rollout=3, world_size=2), ["a judge"])
    judged = GRPO("tiny", lambda completions, group_ids: [0.0] * len(completions), group_size=4)
    assert list(judged.needs_whole_groups()) == [], "asking for groups is not comparing them"
    assert list(OnlineDPO("tiny", exact_match).needs_whole_groups()) == ["OnlineDPO"]
    assert list(GRPO("tiny", exact_match, replay=GroupReplay()).needs_whole_groups()) == ["algo/replay=buffer"]
    for context, named in ((OutcomeContext(), ["algo.teacher.context"]), (ColumnContext("shown"), [])):
        assert list(GRPO("tiny", exact_match, teacher=SelfTeacher(context)).needs_whole_groups()) == named


def test_counts_below_one_and_slices_that_are_not_equal_are_refused():
    counts = ("prompts_per_rollout", "minibatches", "iterations", "accumulate", "split_groups")
    for key, value in (*((key, 0) for key in counts), ("split_groups", 3)):
        with pytest.raises(ConfigError, match=rf"{key}\w*={value}"):
            plan(**{key: value})


def test_how_a_rollout_is_dealt_out_is_worked_out_once(tmp_path, monkeypatch):
    """For all of its slots, also those that are looked at ahead."""
    dealt: list[int] = []
    looked: list[int] = []

    def deal(*args, index, **others):
        dealt.append(index)
        return deal_rows(*args, index=index, **others)

    monkeypatch.setattr(on_policy, "deal_rows", deal)

    class Counted(GRPO):
        def look_ahead(self, micro_batches):
            looked.append(len(micro_batches))
            return super().look_ahead(micro_batches)

    module = Counted(
        "tiny",
        exact_match,
        group_size=4,
        minibatches=2,
        iterations=2,
        sampling=Sampling(max_new_tokens=3),
        selection=partial(top_entropy, share=0.5),
    )
    data = RolloutDataModule(task=Addition(max_operand=5, val_rows=4), prompts_per_rollout=8)
    trainer(tmp_path, max_steps=8, accumulate_grad_batches=2).fit(module, datamodule=data)
    assert module.plan.slots == 8 and looked == [2] * 8
    assert dealt == [0, 1]


@given(
    group_size=st.sampled_from([2, 4, 6]),
    split=st.sampled_from([1, 2, "auto"]),
    minibatches=st.integers(1, 7),
    cut=st.one_of(st.integers(1, 8), st.integers(1, 8).map(lambda groups: (groups,))),
    ranks=st.integers(1, 5),
)
def test_a_rollout_that_nobody_sized_divides_into_what_the_user_cut_it_into(group_size, split, minibatches, cut, ranks):
    by_number = isinstance(cut, int)
    slices = 1 if split == "auto" else split
    trainer = SimpleNamespace(accumulate_grad_batches=cut if by_number else 1)
    micro_batches = MicroBatches(None if by_number else cut[0] * group_size)
    micro_batches.split_groups = split
    parts = minibatches * micro_batches.parts_of_groups(trainer, group_size)
    prompts = fit_step_rows(10_000, 32, parts * ranks) or 32
    whole = plan(
        prompts_per_rollout=prompts,
        group_size=group_size,
        minibatches=minibatches,
        accumulate=trainer.accumulate_grad_batches,
        world_size=ranks,
        split_groups=slices,
    )
    if not by_number:
        step = StepRows(whole.units, group_size // slices)
        assert micro_batches_of_size(step, micro_batches.size) * micro_batches.size == whole.units * step.rows


@pytest.mark.parametrize(
    ("made", "data", "key", "size"),
    [
        (
            lambda: GRPO("tiny", exact_match, minibatches=3, sampling=Sampling(max_new_tokens=4)),
            lambda: RolloutDataModule(task=Addition()),
            "prompts_per_rollout",
            30,
        ),
        (
            lambda: SFT("tiny", micro_batch_size=5),
            lambda: SupervisedDataModule([{"text": f"{n}"} for n in range(80)], val_fraction=0.0),
            "batch_size",
            30,
        ),
    ],
)
def test_a_step_that_nobody_sized_divides_in_a_run(tmp_path, made, data, key, size):
    data = data()
    trainer(tmp_path, max_steps=0).fit(made(), datamodule=data)
    assert getattr(data, key) == size
