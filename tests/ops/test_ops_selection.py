import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.ops.reductions import StepTokens
from lit_rl.ops.selection import off_policy_sequence_mask, top_entropy, top_entropy_per_sequence

reproducible = settings(derandomize=True, deadline=None, max_examples=20)


@pytest.fixture(scope="module")
def trl():
    """TRL's trainer class; its two masks need of an instance no more than an accelerator of one process."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    return GRPOTrainer


def high_entropy_of_trl(trl, entropy, mask, quantile):
    accelerator = SimpleNamespace(pad_across_processes=lambda x, **_: x, gather=lambda x: x)
    return trl.get_high_entropy_mask(SimpleNamespace(accelerator=accelerator), entropy, mask.int(), quantile)


@st.composite
def entropies(draw):
    """Entropies with many ties, and a mask; NaN outside."""
    b, t = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    cells = draw(st.lists(st.integers(0, 9), min_size=b * t, max_size=b * t))
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=b * t, max_size=b * t))).reshape(b, t)
    return (torch.tensor(cells).reshape(b, t) / 8).masked_fill(~mask, math.nan), mask


shares = st.sampled_from([0.1, 0.2, 0.25, 0.3, 0.5, 0.7, 0.9, 1.0])


class TestTopEntropy:
    def test_by_hand(self):
        entropy = torch.tensor([[0.1, 0.9, 0.3], [0.5, 0.7, 99.0]])
        mask = torch.tensor([[True, True, True], [True, True, False]])
        # sorted 0.1 0.3 0.5 0.7 0.9: the 0.6 quantile stands at 2.4, between 0.5 and 0.7
        got = top_entropy(entropy, mask, share=0.4)
        assert got.tolist() == [[False, True, False], [False, True, False]]
        # the 0.5 quantile is the token in the middle itself, and it is kept
        assert top_entropy(entropy, mask, share=0.5)[1].tolist() == [True, True, False]

    @reproducible
    @given(grid=entropies(), share=shares)
    def test_trl_keeps_the_same_tokens(self, trl, grid, share):
        entropy, mask = grid
        want = high_entropy_of_trl(trl, entropy, mask, 1 - share)
        near = (entropy - torch.quantile(entropy[mask], 1 - share)).abs() < 1e-6 if mask.any() else mask
        got = top_entropy(entropy, mask, share=share)
        assert torch.equal(got | near, want & mask | near)  # at the threshold rounding may decide

    @reproducible
    @given(grid=entropies(), share=shares)
    def test_micro_batches_keep_what_the_whole_step_keeps(self, grid, share):
        entropy, mask = grid
        step = StepTokens.of(mask, entropy=entropy)
        whole = top_entropy(entropy, mask, share=share)
        parts = [top_entropy(entropy[i : i + 1], mask[i : i + 1], step, share=share) for i in range(len(mask))]
        assert torch.equal(torch.cat(parts), whole)

    @reproducible
    @given(grid=entropies(), share=shares)
    def test_at_least_the_share_is_kept_and_never_a_lower_one_before_a_higher_one(self, grid, share):
        entropy, mask = grid
        got = top_entropy(entropy, mask, share=share)
        assert not (got & ~mask).any()
        n = int(mask.sum())
        assert int(got.sum()) >= math.floor(share * (n - 1) + 1e-9) + 1 - 1e-9 if n else not got.any()
        if got.any() and (mask & ~got).any():
            assert entropy[mask & ~got].max() < entropy[got].min()

    def test_all_of_it(self):
        entropy, mask = torch.rand(3, 4), torch.rand(3, 4) < 0.7
        assert torch.equal(top_entropy(entropy, mask, share=1.0), mask)
        assert torch.equal(top_entropy_per_sequence(entropy, mask, share=1.0), mask)

    def test_a_step_of_more_tokens_than_torch_takes_a_quantile_of(self):
        entropies = torch.arange(2**24 + 5, dtype=torch.int32).float()
        unused = torch.zeros(()).expand(len(entropies))
        step = StepTokens(logprobs=unused, old_logprobs=unused, advantages=unused, entropy=entropies)
        entropy = torch.tensor([[0.0, 2.0**23 - 8, 2.0**23 + 8, 2.0**24]])
        got = top_entropy(entropy, torch.ones(1, 4, dtype=torch.bool), step, share=0.5)
        assert got.tolist() == [[False, False, True, True]]


class TestTopEntropyPerSequence:
    def test_by_hand(self):
        entropy = torch.tensor([[0.1, 0.9, 0.3, 0.5], [0.0, 0.0, 7.0, 7.0], [0.2, 0.1, 0.4, 0.3]])
        mask = torch.tensor([[True] * 4, [True, True, False, False], [False] * 4])
        got = top_entropy_per_sequence(entropy, mask, share=0.5)
        assert got.tolist() == [[False, True, False, True], [True, False, False, False], [False] * 4]

    @reproducible
    @given(grid=entropies(), share=shares)
    def test_each_row_keeps_its_share_and_its_highest(self, grid, share):
        entropy, mask = grid
        got = top_entropy_per_sequence(entropy, mask, share=share)
        assert not (got & ~mask).any()
        for row in range(len(mask)):
            n = int(mask[row].sum())
            assert int(got[row].sum()) == (max(1, math.floor(share * n + 1e-9)) if n else 0)
            left = mask[row] & ~got[row]
            if left.any():
                assert entropy[row][left].max() <= entropy[row][got[row]].min()
        alone = [top_entropy_per_sequence(entropy[i : i + 1], mask[i : i + 1], share=share) for i in range(len(mask))]
        assert torch.equal(torch.cat(alone), got)

    def test_a_share_of_whole_tokens_is_not_rounded_down(self):
        mask = torch.ones(1, 100, dtype=torch.bool)
        assert top_entropy_per_sequence(torch.rand(1, 100), mask, share=0.29).sum() == 29


@pytest.mark.parametrize("select", [top_entropy, top_entropy_per_sequence])
@pytest.mark.parametrize("share", [0.0, -0.2, 1.5, math.nan])
def test_a_share_out_of_range_is_refused(select, share):
    with pytest.raises(ValueError, match=r"share=.*allowed is \(0, 1\]"):
        select(torch.rand(1, 2), torch.ones(1, 2, dtype=torch.bool), share=share)


class TestOffPolicySequenceMask:
    def test_by_hand(self):
        logprobs = torch.tensor([[-1.0, -3.0], [-1.0, -3.0], [-1.0, -1.0], [-4.0, -9.0]])
        sampler = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-1.5, -0.5], [-1.0, -1.0]])
        mask = torch.tensor([[True, True], [True, True], [True, True], [True, False]])
        advantages = torch.tensor([1.0, -1.0, -1.0, -1.0])
        # rows moved by 1, 1, 0 and 3 nats a token
        keep = off_policy_sequence_mask(logprobs, sampler, advantages, mask, threshold=0.5)
        assert keep.tolist() == [[True, True], [False, False], [True, True], [False, False]]
        keep = off_policy_sequence_mask(logprobs, sampler, advantages, mask, threshold=1.0)
        assert keep.tolist() == [[True, True], [True, True], [True, True], [False, False]]

    @reproducible
    @given(seed=st.integers(0, 999), threshold=st.sampled_from([0.0, 0.05, 0.5]))
    def test_trl_keeps_the_same_rows(self, trl, seed, threshold):
        generator = torch.Generator().manual_seed(seed)
        logprobs, sampler = -torch.rand(6, 5, generator=generator), -torch.rand(6, 5, generator=generator)
        sampler[0, 0] = math.nan
        advantages = torch.randint(-1, 2, (6,), generator=generator).float()
        mask = torch.rand(6, 5, generator=generator) < 0.7
        want = trl.get_off_policy_mask(advantages[:, None], logprobs, sampler, mask.int(), threshold)
        got = off_policy_sequence_mask(logprobs, sampler, advantages, mask, threshold=threshold)
        assert torch.equal(got, mask & want.bool())

    def test_per_token_advantages_decide_by_their_mean_over_the_loss_tokens(self):
        logprobs, sampler = torch.full((2, 3), -5.0), torch.full((2, 3), -1.0)
        mask = torch.tensor([[True, True, False], [True, True, False]])
        advantages = torch.tensor([[3.0, -1.0, -99.0], [-3.0, 1.0, 99.0]])
        keep = off_policy_sequence_mask(logprobs, sampler, advantages, mask, threshold=0.1)
        assert keep.tolist() == [[True, True, False], [False, False, False]]
        rows = torch.tensor([0.5, -0.5])
        spread = rows[:, None].expand(2, 3)
        by_token = off_policy_sequence_mask(logprobs, sampler, spread, mask, threshold=0.1)
        assert torch.equal(by_token, off_policy_sequence_mask(logprobs, sampler, rows, mask, threshold=0.1))

    def test_what_stands_outside_the_mask_changes_nothing(self):
        mask = torch.tensor([[True, False]])
        clean = off_policy_sequence_mask(-torch.ones(1, 2), -torch.ones(1, 2), -torch.ones(1), mask, threshold=0.1)
        dirty = torch.tensor([[-1.0, math.nan]])
        assert torch.equal(off_policy_sequence_mask(dirty, dirty, -torch.ones(1), mask, threshold=0.1), clean)
