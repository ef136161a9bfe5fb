from __future__ import annotations

import copy
import pickle
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.core.errors import ConfigError, DataError
from lit_rl.core.rollout import PromptBatch
from lit_rl.data.loaders import EvalLoader, RolloutLoader
from lit_rl.data.order import RolloutOrder
from lit_rl.data.prompt_set import PromptSet


def data(size: int, offset: int = 0) -> PromptSet:
    rows = range(offset, offset + size)
    return PromptSet([f"p{i}" for i in rows], [[i, i + 1] for i in rows], {"answer": [str(i) for i in rows]})


def make(size: int = 23, prompts: int = 4, *, seed: int = 0, weights=None, sizes=None, **kwargs) -> RolloutLoader:
    return RolloutLoader(data(size), RolloutOrder(sizes or (size,), prompts, seed, True, weights), **kwargs)


def epochs(loader: RolloutLoader, count: int) -> list[PromptBatch]:
    return [batch for _ in range(count) for batch in loader]


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 40),
    share=st.integers(1, 5),
    world=st.integers(1, 4),
    repeat=st.integers(1, 4),
    weighted=st.booleans(),
)
def test_the_ranks_together_see_what_one_process_sees(size, share, world, repeat, weighted):
    prompts = share * world
    if prompts > size:
        return
    split = {"sizes": (1, size - 1), "weights": (1.0, 1.0)} if weighted and size > 1 else {}
    one = epochs(make(size, prompts, repeat=repeat, **split), 2)
    parts = [epochs(make(size, prompts, repeat=repeat, rank=r, world_size=world, **split), 2) for r in range(world)]
    assert {len(part) for part in parts} == {len(one)} == {2 * repeat * (size // prompts)}
    for whole, *shares in zip(one, *parts):
        assert [len(part) for part in shares] == [share] * world
        assert {(part.rollout, part.slot) for part in shares} == {(whole.rollout, whole.slot)}
        for name in ("prompts", "prompt_ids", "rows", "occurrences"):
            assert [value for part in shares for value in getattr(part, name)] == getattr(whole, name)
        assert [value for part in shares for value in part.columns["answer"]] == whole.columns["answer"]


def test_a_batch_holds_the_rows_it_names():
    for batch in make(repeat=2):
        assert batch.prompts == [f"p{i}" for i in batch.rows]
        assert batch.prompt_ids == [[i, i + 1] for i in batch.rows]
        assert batch.columns == {"answer": [str(i) for i in batch.rows]}


def test_slots_count_through_each_rollout_and_rollouts_through_all_epochs():
    batches = epochs(make(23, 4, repeat=3), 2)
    assert [batch.slot for batch in batches] == [0, 1, 2] * 10
    assert [batch.rollout for batch in batches] == [i // 3 for i in range(30)]
    for i in range(0, 30, 3):
        assert batches[i].rows == batches[i + 1].rows == batches[i + 2].rows
    assert [batch.rows for batch in batches[:15:3]] != [batch.rows for batch in batches[15::3]]


def test_a_state_is_the_same_on_every_rank_and_loads_into_another_number_of_ranks():
    loaders = [make(24, 4, repeat=2, rank=rank, world_size=2) for rank in range(2)]
    for loader in loaders:
        for _, _ in zip(range(4), loader):
            pass
    states = [loader.state_dict() for loader in loaders]
    assert states[0] == states[1]
    assert set(states[0]) == {"position", "epoch", "fingerprint", "made_by", "slots", "world_size"}
    alone, fresh = make(24, 4, repeat=2), make(24, 4, repeat=2)
    alone.load_state_dict(states[0])
    assert list(alone) == list(fresh)[states[0]["position"] :]


@pytest.mark.parametrize("done", range(1, 13))
def test_another_number_of_ranks_goes_on_with_the_next_whole_rollout(done):
    """Three batches a rollout there and two here; an epoch has four rollouts."""
    theirs, ours = make(24, 6, repeat=3, world_size=2), make(24, 6, repeat=2)
    for _, _ in zip(range(done), theirs):
        pass
    ours.load_state_dict(theirs.state_dict())
    begun, all_of_two_epochs = -(-done // 3), epochs(make(24, 6, repeat=2), 2)
    rest = all_of_two_epochs[2 * begun :][: (8 - 2 * begun) or 8]
    assert list(ours) == rest and (rest[0].rollout, rest[0].slot) == (begun, 0)
    other = make(24, 6, repeat=2, seed=1)
    with pytest.raises(DataError, match=r"data\.allow_changed=true"):
        other.load_state_dict(theirs.state_dict())


def test_a_changed_order_or_data_is_refused_unless_allowed():
    state = make().state_dict()
    make().load_state_dict(state)
    changed = {
        "data.seed 0 -> 1": make(seed=1),
        "data.prompts_per_rollout 4 -> 5": make(prompts=5),
        "the micro-batches of a step (trainer.accumulate_grad_batches) 1 -> 2": make(repeat=2),
        "the rows themselves, 23 -> 22 of them": make(22),
        "the weights of data.sources None -> 1.0, 2.0": make(sizes=(11, 12), weights=(1.0, 2.0)),
        "the rows themselves (as many as before": RolloutLoader(data(23, offset=1), RolloutOrder((23,), 4)),
    }
    for cause, loader in changed.items():
        with pytest.raises(DataError, match=r"data\.allow_changed=true") as caught:
            loader.load_state_dict(state)
        assert f"not the checkpoint's: {cause}" in str(caught.value)
        assert caught.value.exit_code == 3
        loader.allow_changed = True
        loader.load_state_dict({**state, "position": 3})
        assert len(list(loader)) == len(loader) - 3


def test_allowed_data_that_became_shorter_goes_on_with_the_next_epoch():
    loader = make(8, allow_changed=True)
    loader.load_state_dict({**loader.state_dict(), "position": 5, "epoch": 2, "fingerprint": "other"})
    assert next(iter(loader)).rollout == 3 * 2


def test_the_first_epoch_can_be_set():
    fresh, late = make(), make(epoch=1)
    assert epochs(fresh, 2)[5:] == list(late)


def test_occurrences_go_over_all_ranks():
    order = RolloutOrder((2, 30), 8, weights=(3.0, 1.0))
    parts = [list(RolloutLoader(data(32), order, rank=rank, world_size=2)) for rank in range(2)]
    repeated = 0
    for left, right in zip(*parts):
        seen: dict[int, int] = {}
        for row, occurrence in zip([*left.rows, *right.rows], [*left.occurrences, *right.occurrences]):
            assert occurrence == seen.get(row, 0)
            seen[row] = occurrence + 1
        repeated += any(right.occurrences)
    assert repeated, "the rows of the small source come several times in a rollout"


def test_ranks_must_divide_a_rollout():
    with pytest.raises(ConfigError, match=r"data\.prompts_per_rollout=4 .* 3 ranks: .* 3 and 6"):
        make(world_size=3)
    with pytest.raises(ConfigError, match=r"nearest that does is 8"):
        make(world_size=8)


def test_nothing_of_it_looks_like_a_dataloader_and_copies_are_equal():
    loader = make()
    assert not hasattr(loader, "dataset") and not hasattr(loader, "sampler") and not hasattr(loader, "batch_sampler")
    assert list(pickle.loads(pickle.dumps(loader))) == list(copy.deepcopy(loader)) == list(loader)


@given(
    size=st.integers(1, 30),
    batch_size=st.integers(1, 10),
    limit=st.none() | st.integers(1, 40),
    world=st.integers(1, 5),
)
def test_evaluation_covers_every_row_with_equal_batches_on_every_rank(size, batch_size, limit, world):
    rows = data(size)
    parts = [
        list(EvalLoader(rows, batch_size=batch_size, limit=limit, rank=rank, world_size=world)) for rank in range(world)
    ]
    loader = EvalLoader(rows, batch_size=batch_size, limit=limit, world_size=world)
    assert {len(part) for part in parts} == {len(loader)}
    assert len({tuple(len(batch) for batch in part) for part in parts}) == 1
    count = size if limit is None else min(size, limit)
    seen = [row for part in parts for batch in part for row in batch.rows]
    assert len(seen) - count < world, "no more rows come twice than the ranks need"
    assert Counter(seen) == Counter(i % count for i in range(len(seen))), "the first rows fill up"
    assert all(len(batch) <= batch_size for part in parts for batch in part)
    assert {(batch.rollout, batch.slot) for part in parts for batch in part} == {(0, 0)}
    if world == 1:
        assert seen == list(range(count))
    assert list(loader) == list(loader)
