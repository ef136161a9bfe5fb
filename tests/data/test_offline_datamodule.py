"""Sets of examples, their loaders and data modules: what a step holds, however it is cut, and exact positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from byte_tokenizers import make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.core.errors import ConfigError, DataError
from lit_rl.core.examples import PairBatch, TextBatch, VerdictBatch
from lit_rl.core.visuals import ImageRef
from lit_rl.data.example_module import PreferenceDataModule, SupervisedDataModule
from lit_rl.data.example_set import Encoded, Example, ExampleSet, token_batch
from lit_rl.data.loaders import ExampleEvalLoader, ExampleLoader
from lit_rl.data.order import RolloutOrder
from lit_rl.data.tasks import AdditionPairs, AdditionText
from lit_rl.data.visual_prompts import PromptVisuals

TOKENIZER = make_tokenizer()
PAD = TOKENIZER.pad_token_id


def text(prompt: list[int], completion: list[int]) -> Encoded:
    return Encoded(prompt + completion, [False] * len(prompt) + [True] * len(completion), len(prompt))


def verdicts(count: int) -> ExampleSet:
    """Rows whose tokens say which row they are."""
    rows = [Example((text([10, i], [20, i, i]),), f"row {i}", f"p{i}", desirable=i % 2 == 0) for i in range(count)]
    return ExampleSet("verdicts", rows, PAD)


def pairs(count: int) -> ExampleSet:
    rows = [
        Example((text([1, i], [2] * (i + 1)), text([1, i], [3])), f"row {i}", f"p{i}", margin=0.5 * i)
        for i in range(count)
    ]
    return ExampleSet("pairs", rows, PAD)


def loader(data: ExampleSet, size: int = 8, **settings: Any) -> ExampleLoader:
    return ExampleLoader(data, RolloutOrder((len(data),), size, seed=3), **{"group_by_length": True, **settings})


# ---------------------------------------------------------------------------------------------------------- batches


def test_rows_are_padded_and_packed_texts_are_told_apart():
    batch = token_batch([[text([5], [6, 7]), text([8], [9])], [text([4], [3])]], PAD)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9], [4, 3, PAD, PAD, PAD]]
    assert batch.attention_mask.sum(1).tolist() == [5, 2]
    assert batch.loss_mask.tolist() == [[False, True, True, False, True], [False, True, False, False, False]]
    assert batch.segment is not None and batch.segment[0].tolist() == [0, 0, 0, 1, 1]
    assert batch.position_ids[0].tolist() == [0, 1, 2, 0, 1]
    assert batch.position_ids[1, :2].tolist() == [0, 1]


def test_nothing_predicts_the_first_token_of_a_packed_text():
    """A text without a prompt learns all its tokens but the first, wherever in a row it stands."""
    whole = Encoded([4, 5, 6], [True, True, True], 0)
    assert token_batch([[whole, whole]], PAD).loss_mask.tolist() == [[False, True, True, False, True, True]]


def test_a_pair_stands_as_two_rows_and_its_margin_travels():
    batch = pairs(3).batch([2, 0], [1, 1], pairs(3).totals([2, 0]), step=4, slot=1)
    assert isinstance(batch, PairBatch) and batch.margins is not None
    assert batch.tokens.input_ids[:, :2].tolist() == [[1, 2], [1, 0], [1, 2], [1, 0]]
    assert batch.tokens.loss_mask.sum(1).tolist() == [3, 1, 1, 1]
    assert batch.margins.tolist() == [1.0, 0.0]
    assert (batch.totals.rows, batch.totals.tokens, batch.totals.attended) == (2, 4, 5 + 3 + 3 + 3)
    assert (batch.step, batch.slot, len(batch)) == (4, 1, 2)


def test_a_mismatched_row_is_a_prompt_with_the_completion_before_it():
    data = verdicts(4)
    batch = data.batch([1, 2], [0, 1], data.totals([1, 2]), step=0, slot=0)
    assert isinstance(batch, VerdictBatch) and batch.mismatched is not None and batch.desirable is not None
    assert batch.mismatched.input_ids.tolist() == [[10, 1, 20, 0, 0], [10, 2, 20, 1, 1]]
    assert batch.mismatched.loss_mask.tolist() == [[False, False, True, True, True]] * 2
    assert batch.desirable.tolist() == [False, True]


def test_a_mismatched_completion_answers_another_prompt():
    """Two verdicts of one pair stand side by side: neither is compared with the other."""
    rows = [Example((text([10, i // 2], [20 + i]),), f"row {i}", f"p{i // 2}", desirable=i % 2 == 0) for i in range(6)]
    data = ExampleSet("verdicts", rows, PAD)
    assert data.before(range(6)) == [5, 5, 1, 1, 3, 3]
    assert data.before([0, 1]) == [1, 0]  # there is no other prompt
    shown = [PromptVisuals("p", (ImageRef.held("an image", 2, 2, bytes([i])),), "row") for i in range(2)]
    seen = [Example((text([10, 1], [20 + i]),), "row", "p", shown=shown[i // 2 % 2], desirable=True) for i in range(4)]
    assert ExampleSet("verdicts", seen, PAD).before(range(4)) == [3, 3, 1, 1], "another image is another prompt"
    (batch,) = ExampleEvalLoader(data, batch_size=6)
    assert [int(ids[2]) for ids in batch.mismatched.input_ids] == [25, 25, 21, 21, 23, 23]
    ones = list(ExampleEvalLoader(data, batch_size=1))
    assert [int(b.mismatched.input_ids[0, 2]) for b in ones] == [25, 25, 21, 21, 23, 23]  # however they are cut


# ---------------------------------------------------------------------------------------------------------- loaders


@settings(max_examples=40, deadline=None)
@given(
    accumulate=st.sampled_from([1, 2, 4]),
    world_size=st.sampled_from([1, 2]),
    rows=st.integers(8, 40),
    seed=st.integers(0, 5),
    by_length=st.booleans(),
)
def test_a_step_holds_the_same_rows_however_it_is_cut(accumulate, world_size, rows, seed, by_length):
    data = verdicts(rows)
    order = RolloutOrder((rows,), 8, seed=seed)
    whole = [batch.rows for batch in ExampleLoader(data, order, group_by_length=True)]
    cut = {"accumulate": accumulate, "world_size": world_size, "group_by_length": by_length}
    ranks = [list(ExampleLoader(data, order, rank=rank, **cut)) for rank in range(world_size)]
    for step, expected in enumerate(whole):
        micro = [b for rank in ranks for b in rank[step * accumulate : (step + 1) * accumulate]]
        found = [row for batch in micro for row in batch.rows]
        assert sorted(found) == sorted(expected) and (by_length or found == expected)
        assert {len(batch) for batch in micro} == {8 // accumulate // world_size}
        assert {(b.totals.rows, b.totals.tokens, b.totals.shares) for b in micro} == {(8, 24, accumulate * world_size)}
        shifted = dict(zip(expected, [expected[-1], *expected[:-1]], strict=True))
        mismatched = [int(ids[3]) for b in micro for ids in b.mismatched.input_ids]
        assert mismatched == [shifted[row] for row in found]
        assert [len(b.whole) for b in micro] == ([accumulate] + [0] * (accumulate - 1)) * world_size * (
            accumulate > 1
        ) or accumulate == 1


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_of_like_length_share_a_micro_batch(world_size):
    """Row i of `pairs` is i + 3 tokens long, so the micro-batches of a step are its rows from the longest down, and the
    same for one rank and for two."""
    data, order = pairs(24), RolloutOrder((24,), 8, seed=3)
    cut = {"accumulate": 4 // world_size, "world_size": world_size, "group_by_length": True}
    ranks = [list(ExampleLoader(data, order, rank=rank, **cut)) for rank in range(world_size)]
    steps = [batch.rows for batch in ExampleLoader(data, order, group_by_length=True)]
    slots = cut["accumulate"]
    for step, expected in enumerate(steps):
        micro = [set(rank[step * slots + slot].rows) for slot in range(slots) for rank in ranks]
        falling = sorted(expected, reverse=True)
        assert micro == [set(falling[i : i + 2]) for i in range(0, 8, 2)]
    assert [sorted(rows) for rows in steps] != [rows for rows in steps]  # uncut, a step has the order that was drawn


def test_a_packed_row_is_as_long_as_its_texts_together():
    data = ExampleSet("texts", [], PAD, packs=[[text([1], [2, 3]), text([1], [2])], [text([1], [2, 3, 4])]])
    assert [data.length(0), data.length(1), data.longest] == [5, 4, 5]
    assert pairs(3).length(2) == 5


def test_a_state_of_other_data_or_of_another_cut_is_refused():
    state = loader(verdicts(20), accumulate=2).state_dict()
    with pytest.raises(DataError, match=r"the rows themselves, 20 -> 21 .*data\.allow_changed"):
        loader(verdicts(21), accumulate=2).load_state_dict(state)
    with pytest.raises(DataError, match="micro-batches"):
        loader(verdicts(20), accumulate=4).load_state_dict(state)
    with pytest.raises(DataError, match=r"data\.group_by_length"):
        loader(verdicts(20), accumulate=2, group_by_length=False).load_state_dict(state)
    # A step of one micro-batch is the same either way.
    loader(verdicts(20), group_by_length=False).load_state_dict(loader(verdicts(20)).state_dict())
    loader(verdicts(21), accumulate=2, allow_changed=True).load_state_dict(state)


def test_a_batch_that_does_not_divide_over_ranks_is_refused():
    with pytest.raises(ConfigError, match=r"data\.batch_size=7 .* 6 and 8"):
        loader(verdicts(20), size=7, world_size=2)


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(2, 60), size=st.integers(1, 9), world_size=st.sampled_from([1, 2]), limit=st.integers(2, 70))
def test_validation_sees_every_row_once_and_all_ranks_take_as_many_batches(rows, size, world_size, limit):
    data = verdicts(rows)
    ranks = [
        list(ExampleEvalLoader(data, batch_size=size, limit=limit, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    assert sorted(row for batches in ranks for b in batches for row in b.rows) == list(range(min(rows, limit)))
    assert all(len(b) for batches in ranks for b in batches)
    assert max(len(b) for batches in ranks for b in batches) <= size + (world_size > 1)


def test_fewer_validation_rows_than_ranks_are_refused():
    with pytest.raises(ConfigError, match="1 rows for 2 ranks"):
        ExampleEvalLoader(verdicts(1), batch_size=4, world_size=2)


def test_the_fingerprint_knows_tokens_masks_and_labels():
    base = verdicts(3).fingerprint
    rows = list(verdicts(3).examples)
    other = Example(rows[1].texts, rows[1].where, rows[1].prompt, desirable=True)
    assert verdicts(3).fingerprint == base
    assert ExampleSet("verdicts", [rows[0], other, rows[2]], PAD).fingerprint != base
    assert ExampleSet("verdicts", rows[::-1], PAD).fingerprint != base


# ------------------------------------------------------------------------------------------------------ data modules


def rows_of_pairs(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"q{i // 2}", "chosen": f"yes {i}", "rejected": "no", "topic": f"t{i}"} for i in range(count)]


def test_one_data_module_makes_pairs_and_verdicts():
    data = PreferenceDataModule(rows=rows_of_pairs(40), val_fraction=0.2, batch_size=4)
    data.prepare(TOKENIZER, "pairs")
    assert (data.corpus.train.kind, len(data.corpus.train)) == ("pairs", 32)
    data.prepare(TOKENIZER, "verdicts")
    assert (data.corpus.train.kind, len(data.corpus.train)) == ("verdicts", 64)
    assert [example.desirable for example in data.corpus.train.examples[:4]] == [True, False, True, False]


def test_held_out_prompts_are_trained_on_nowhere_and_each_is_written_to_once():
    data = PreferenceDataModule(rows=rows_of_pairs(40), val_fraction=0.2, batch_size=4)
    data.prepare(TOKENIZER, "pairs")
    train = {example.prompt for example in data.corpus.train.examples}
    (held,) = data.corpus.val.values()
    assert len(held) == 8 and not train & {example.prompt for example in held.examples}
    assert (data.val_names, data.loss_names) == ([""], [""])
    assert len(held.prompts) == 4 and len(set(held.prompts.prompts)) == 4
    assert data.val_columns[""] == ["topic"]
    assert [TOKENIZER.decode(ids) for ids in held.prompts.prompt_ids] == list(held.prompts.prompts)
    report = data.report
    assert (report["train"]["rows"], report["train"]["kept"], report["train"]["held_out"]) == (40, 32, 8)


def test_a_kind_that_a_data_module_does_not_make_is_refused():
    with pytest.raises(ConfigError, match="pairs or verdicts or triples, .* from texts"):
        PreferenceDataModule(rows=rows_of_pairs(4)).prepare(TOKENIZER, "texts")


def test_rows_that_do_not_fill_a_step_are_refused():
    data = PreferenceDataModule(rows=rows_of_pairs(6), val_fraction=0.0, batch_size=8)
    with pytest.raises(DataError, match=r"data\.batch_size=8, and 6 rows are left for training"):
        data.prepare(TOKENIZER, "pairs")
    data.prepare(TOKENIZER, "pairs", stage="validate")
    with pytest.raises(DataError, match=r"hold none out with data\.val_fraction=0 \(2 rows are\)"):
        PreferenceDataModule(rows=rows_of_pairs(6), val_fraction=0.1, batch_size=6).prepare(TOKENIZER, "pairs")


def test_packed_rows_hold_every_token_of_the_texts():
    task = AdditionText(max_operand=9, val_rows=10)
    plain = SupervisedDataModule(task=task, batch_size=4)
    packed = SupervisedDataModule(task=task, batch_size=4, max_length=32, packing="best_fit")
    for data in (plain, packed):
        data.prepare(TOKENIZER)
    tokens = [data.corpus.train.totals(range(len(data.corpus.train))) for data in (plain, packed)]
    assert (tokens[0].tokens, tokens[0].attended) == (tokens[1].tokens, tokens[1].attended)
    assert len(packed.corpus.train) < len(plain.corpus.train) / 3
    assert packed.report["train"]["packed_rows"] == len(packed.corpus.train)
    assert packed.longest_text <= 32
    for data in (plain, packed):
        rows = {**data.corpus.val, "train": data.corpus.train}.values()
        assert data.most_learned == max(examples.totals([i]).tokens for examples in rows for i in range(len(examples)))
    rows = [0, 1]
    batch = packed.corpus.train.batch(rows, rows, packed.corpus.train.totals(rows), step=0, slot=0)
    assert isinstance(batch, TextBatch) and batch.tokens.segment is not None
    assert len(packed.corpus.train.prompts) == 90  # validation still knows every prompt


def test_the_pairs_of_sums_are_one_right_and_one_wrong_answer():
    task = AdditionPairs(max_operand=12, val_rows=20)
    assert task.train() == task.train() and len(task.val()) == 20
    for row in task.train() + task.val():
        left, right = map(int, row["prompt"].rstrip("=").split("+"))
        assert row["chosen"] == row["answer"] == str(left + right)
        assert abs(int(row["rejected"]) - left - right) in (1, 10) and int(row["rejected"]) >= 0


def test_tensors_of_a_batch_move_and_the_rest_stays():
    batch = verdicts(4).batch([0, 1], [1, 0], verdicts(4).totals([0, 1]), step=0, slot=0)
    moved = batch.to(torch.device("meta"))
    assert moved.tokens.input_ids.is_meta and moved.mismatched.input_ids.is_meta and moved.desirable.is_meta
    assert moved.rows == [0, 1] and moved.totals == batch.totals and not batch.tokens.input_ids.is_meta
