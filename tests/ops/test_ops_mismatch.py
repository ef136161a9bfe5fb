import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.ops.engine_mismatch import (
    effective_share,
    engine_log_ratio,
    engine_ratios,
    k1_statistic,
    k2_statistic,
    k3_statistic,
    mismatch_metrics,
    normalize_sequence_weights,
    normalize_token_weights,
    reject_outside_trust_region,
    reject_sequences_by_max,
    reject_sequences_by_mean,
    reject_sequences_by_sum,
    reject_tokens,
    sequence_mask,
    sequence_truncate,
    token_mask,
    token_truncate,
    tv_statistic,
)
from lit_rl.ops.reductions import Highest, Lowest, WeightTotals, masked_moments

reproducible = settings(derandomize=True, deadline=None, max_examples=15)
CORRECTIONS = [token_truncate, token_mask, sequence_truncate, sequence_mask]
BY_ROW = [reject_sequences_by_sum, reject_sequences_by_mean, reject_sequences_by_max]
REJECTIONS = [partial(reject, statistic=k3_statistic, high=0.1) for reject in (reject_tokens, *BY_ROW)]
REJECTIONS += [
    partial(reject_sequences_by_mean, statistic=tv_statistic, high=0.2),
    partial(reject_outside_trust_region, statistic=k2_statistic, high=0.2, high_mean=0.1),
]
every_correction = pytest.mark.parametrize("correction", CORRECTIONS)

LOG2, LOG3 = math.log(2), math.log(3)
D = torch.tensor([[LOG2, LOG3, 9.0], [-LOG2, -LOG2, 0.0], [math.nan, LOG2, 0.0]])
"""d of each token: ratios 2, 3 | 1/2, 1/2, 1 | not scored, 2, 1."""
MASK = torch.tensor([[True, True, False], [True, True, True], [True, True, True]])


def logprobs():
    """Log-probs of both sides with the differences above; NaN on the engine's side where it did not score a token."""
    old = torch.full((3, 3), -1.5)
    return old, old - D


@st.composite
def batches(draw):
    b, t = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    values = st.sampled_from([0.0, 0.1, -0.1, 0.7, -0.7, 2.0, -2.0, math.nan])
    d = torch.tensor(draw(st.lists(values, min_size=b * t, max_size=b * t))).reshape(b, t)
    mask = torch.tensor(draw(st.lists(st.sampled_from([1, 1, 0]), min_size=b * t, max_size=b * t))).bool().reshape(b, t)
    old = torch.full((b, t), -1.0)
    return old, old - d, mask


class TestWeights:
    @pytest.mark.parametrize(
        "correction, bounds, want",
        [
            (token_truncate, {"high": 2.5}, [[2, 2.5, 0], [0.5, 0.5, 1], [1, 2, 1]]),
            (token_truncate, {"low": 0.75, "high": None}, [[2, 3, 0], [0.75, 0.75, 1], [1, 2, 1]]),
            (token_mask, {"high": 2.5}, [[2, 0, 0], [0.5, 0.5, 1], [1, 2, 1]]),
            (token_mask, {"low": 0.75, "high": 2.5}, [[2, 0, 0], [0, 0, 1], [1, 2, 1]]),
            (sequence_truncate, {"low": 0.3, "high": 5.0}, [[5, 5, 0], [0.3] * 3, [2] * 3]),
            (sequence_mask, {"low": 0.3, "high": 5.0}, [[0, 0, 0], [0, 0, 0], [2] * 3]),
            (sequence_mask, {"high": None, "low": 0.0}, [[6, 6, 0], [0.25] * 3, [2] * 3]),
        ],
    )
    def test_by_hand(self, correction, bounds, want):
        torch.testing.assert_close(correction(*logprobs(), MASK, **bounds), torch.tensor(want).float())

    @every_correction
    def test_the_default_is_trls_upper_bound_of_three_and_no_lower_one(self, correction):
        old = torch.zeros(3, 1)
        weights = correction(
            old, old - torch.tensor([[math.log(2.9)], [math.log(3.1)], [-9.0]]), torch.ones(3, 1).bool()
        )
        over = 0.0 if correction in (token_mask, sequence_mask) else 3.0
        torch.testing.assert_close(weights, torch.tensor([[2.9], [over], [math.exp(-9)]]))

    @every_correction
    @reproducible
    @given(batch=batches(), data=st.data())
    def test_order_padding_and_what_is_outside_the_mask_do_not_matter(self, correction, batch, data):
        old, sampler, mask = batch
        got = correction(old, sampler, mask, low=0.2)
        assert got[~mask].eq(0).all() and got.isfinite().all()
        order = torch.tensor(data.draw(st.permutations(range(len(mask)))))
        torch.testing.assert_close(correction(old[order], sampler[order], mask[order], low=0.2), got[order])
        noisy = sampler.masked_fill(~mask, -math.inf)
        torch.testing.assert_close(correction(old.masked_fill(~mask, math.nan), noisy, mask, low=0.2), got)
        wide = [torch.nn.functional.pad(x, (0, 2), value=math.nan) for x in (old, sampler)]
        padded = correction(*wide, torch.nn.functional.pad(mask, (0, 2)), low=0.2)
        torch.testing.assert_close(padded, torch.nn.functional.pad(got, (0, 2)))

    @every_correction
    def test_no_gradient_flows(self, correction):
        old = torch.zeros(2, 2, requires_grad=True)
        assert not correction(old, torch.ones(2, 2), torch.ones(2, 2).bool()).requires_grad

    @every_correction
    @pytest.mark.parametrize("d", [1000.0, -1000.0, math.inf, -math.inf])
    def test_nothing_overflows(self, correction, d):
        old, mask = torch.zeros(2, 2), torch.ones(2, 2).bool()
        sampler = torch.tensor([[-d, 0.0], [-d, d]])  # in the second row the two cancel
        weights = correction(old, sampler, mask, low=0.0, high=math.inf)
        assert weights.isfinite().all()
        if correction in (sequence_truncate, sequence_mask):
            assert weights[1].eq(1).all()
            assert bool((weights[0] > 1e8).all()) == (d > 0)

    @every_correction
    @pytest.mark.parametrize(
        "bounds, words",
        [
            ({"low": None, "high": None}, "low=None high=None"),
            ({"low": 4.0}, "low=4.0 high=3.0"),
            ({"low": 3.0, "high": 3.0}, "low=3.0 high=3.0"),
            ({"low": -1.0}, "low=-1.0"),
            ({"high": math.nan}, "high=nan"),
        ],
    )
    def test_bounds_that_bound_nothing_are_refused(self, correction, bounds, words):
        with pytest.raises(ValueError, match=words):
            correction(*logprobs(), MASK, **bounds)


def test_ratios_of_tokens_and_of_rows():
    of_token, of_row = engine_ratios(*logprobs(), MASK)
    torch.testing.assert_close(of_token, torch.tensor([[2.0, 3, 1], [0.5, 0.5, 1], [1, 2, 1]]))
    torch.testing.assert_close(of_row, torch.tensor([[6.0] * 3, [0.25] * 3, [2.0] * 3]))
    assert engine_log_ratio(*logprobs(), MASK)[2, 0] == 0


class TestRejection:
    def test_the_statistics(self):
        d = torch.tensor([LOG2, -LOG2, 0.0])
        torch.testing.assert_close(k1_statistic(d), -d)
        torch.testing.assert_close(k2_statistic(d), torch.tensor([LOG2**2 / 2, LOG2**2 / 2, 0]))
        torch.testing.assert_close(k3_statistic(d), torch.tensor([1 - LOG2, LOG2 - 0.5, 0]))
        torch.testing.assert_close(tv_statistic(d), torch.tensor([0.5, 0.25, 0]))

    def test_the_mean_of_tv_over_the_engines_tokens_is_the_total_variation(self):
        policy, engine = torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(1)
        mean = (engine * tv_statistic(policy.log() - engine.log())).sum()
        torch.testing.assert_close(mean, (policy - engine).abs().sum() / 2)

    def test_tokens_by_hand(self):
        keep = partial(reject_tokens, *logprobs(), MASK)
        # d: log 2, log 3 | -log 2, -log 2, 0 | not scored, log 2, 0
        two = keep(statistic=k2_statistic, high=0.25)
        assert two.tolist() == [[True, False, False], [True, True, True], [True, True, True]]
        three = keep(statistic=k3_statistic, high=0.25)  # harder on ratios above 1
        assert three.tolist() == [[False, False, False], [True, True, True], [True, False, True]]
        one = keep(statistic=k1_statistic, low=-0.7, high=0.5)
        assert one.tolist() == [[True, False, False], [False, False, True], [True, True, True]]

    def test_rows_by_hand(self):
        # k2 of the rows: (0.240, 0.603), (0.240, 0.240, 0), (0, 0.240, 0)
        call = {"statistic": k2_statistic}
        by_sum = reject_sequences_by_sum(*logprobs(), MASK, high=0.5, **call)
        assert by_sum.any(1).tolist() == [False, True, True]
        by_mean = reject_sequences_by_mean(*logprobs(), MASK, high=0.1, **call)
        assert by_mean.any(1).tolist() == [False, False, True]
        by_max = reject_sequences_by_max(*logprobs(), MASK, high=0.5, **call)
        assert by_max.any(1).tolist() == [False, True, True]
        for keep in (by_sum, by_mean, by_max):
            assert torch.equal(keep, MASK & keep.any(1, keepdim=True))  # a row stays or goes as a whole

    def test_a_row_outside_the_trust_region_by_hand(self):
        """tv of the rows: (0.5, 1), (0.25, 0.25, 0), (0, 0.5, 0): the largest 1, 0.25, 0.5; the means 3/4, 1/6, 1/6."""
        for high, high_mean, want in ((2.0, 0.8, [1, 1, 1]), (2.0, 0.7, [0, 1, 1]), (0.4, 0.2, [0, 1, 0])):
            keep = reject_outside_trust_region(
                *logprobs(), MASK, statistic=tv_statistic, high=high, high_mean=high_mean
            )
            assert torch.equal(keep, MASK & torch.tensor(want).bool()[:, None]), (high, high_mean)

    @pytest.mark.parametrize("reject", REJECTIONS)
    @reproducible
    @given(batch=batches(), data=st.data())
    def test_a_part_of_the_mask_whatever_order_and_padding(self, reject, batch, data):
        old, sampler, mask = batch
        keep = reject(old, sampler, mask)
        assert not (keep & ~mask).any()
        order = torch.tensor(data.draw(st.permutations(range(len(mask)))))
        assert torch.equal(reject(old[order], sampler[order], mask[order]), keep[order])
        wide = [torch.nn.functional.pad(x, (0, 2), value=math.nan) for x in (old, sampler)]
        padded = reject(*wide, torch.nn.functional.pad(mask, (0, 2)))
        assert torch.equal(padded, torch.nn.functional.pad(keep, (0, 2)))
        assert torch.equal(reject(old, old, mask), mask)  # nothing to reject
        assert torch.equal(reject(old, torch.full_like(old, math.nan), mask), mask)  # nothing known

    @pytest.mark.parametrize("reject", [reject_tokens, reject_sequences_by_sum, reject_sequences_by_mean])
    def test_bounds_have_to_fit_the_statistic(self, reject):
        call = partial(reject, *logprobs(), MASK)
        with pytest.raises(ValueError, match="low=None .*both bounds"):
            call(statistic=k1_statistic, high=0.5)
        with pytest.raises(ValueError, match="low=0.5 high=0.1.*low below high"):
            call(statistic=partial(k1_statistic), low=0.5, high=0.1)
        with pytest.raises(ValueError, match="low=0.0.*upper bound only"):
            call(statistic=k3_statistic, low=0.0, high=0.5)
        with pytest.raises(ValueError, match="high=0.0 rejects everything"):
            call(statistic=partial(k2_statistic), high=0.0)

    def test_the_largest_of_k1_is_refused(self):
        with pytest.raises(ValueError, match="take k2 or k3"):
            reject_sequences_by_max(*logprobs(), MASK, statistic=k1_statistic, high=0.5)
        with pytest.raises(ValueError, match="high=-1.0 rejects everything"):
            reject_sequences_by_max(*logprobs(), MASK, statistic=k2_statistic, high=-1.0)
        region = partial(reject_outside_trust_region, *logprobs(), MASK)
        with pytest.raises(ValueError, match="take k2 or k3"):
            region(statistic=k1_statistic, high=0.5, high_mean=0.1)
        for high, high_mean in ((0.1, 0.5), (1.0, 0.0)):
            with pytest.raises(ValueError, match=f"high_mean={high_mean} high={high}"):
                region(statistic=k3_statistic, high=high, high_mean=high_mean)


class TestNormalisation:
    WEIGHTS = torch.tensor([[2.0, 4.0, 0.0], [1.0, 1.0, 1.0]])
    KEPT = torch.tensor([[True, True, False], [True, True, True]])

    def test_by_hand(self):
        totals = WeightTotals.of(self.WEIGHTS, self.KEPT)
        assert [float(x) for x in vars(totals).values()] == [5, 2, 9, 4]
        torch.testing.assert_close(normalize_token_weights(self.WEIGHTS, totals), self.WEIGHTS / (9 / 5))
        torch.testing.assert_close(normalize_sequence_weights(self.WEIGHTS, totals), self.WEIGHTS / (4 / 2))

    @reproducible
    @given(batch=batches())
    def test_the_mean_over_the_step_is_one_however_it_is_cut(self, batch):
        mask = batch[2]
        weights = token_truncate(*batch)
        parts = [WeightTotals.of(weights[i : i + 1], mask[i : i + 1]) for i in range(len(mask))]
        totals = WeightTotals(*(sum(vars(part)[name] for part in parts) for name in vars(parts[0])))
        whole = WeightTotals.of(weights, mask)
        for normalize in (normalize_token_weights, normalize_sequence_weights):
            cut = [normalize(weights[i : i + 1], totals) for i in range(len(mask))]
            torch.testing.assert_close(torch.cat(cut), normalize(weights, whole))
        if mask.any():
            assert normalize_token_weights(weights, whole)[mask].mean().item() == pytest.approx(1, rel=1e-5)
            rows = WeightTotals.of(normalize_sequence_weights(weights, whole), mask)
            assert (rows.sequence_weights / rows.sequences).item() == pytest.approx(1, rel=1e-5)

    def test_weights_that_are_all_zero_stay(self):
        zeros = torch.zeros(2, 3)
        totals = WeightTotals.of(zeros, self.KEPT)
        assert normalize_token_weights(zeros, totals).eq(0).all()
        assert normalize_sequence_weights(zeros, totals).eq(0).all()


def value(metric):
    if isinstance(metric, Highest | Lowest):
        return float(metric.value)
    return float(metric[0] / metric[1])


class TestMetrics:
    def test_by_hand(self):
        weights = sequence_truncate(*logprobs(), MASK, low=0.3, high=5.0)
        keep = MASK & torch.tensor([[True], [True], [False]])
        got = {name: value(metric) for name, metric in mismatch_metrics(*logprobs(), MASK, weights, keep).items()}
        # 7 tokens have a log-prob of the engine: d = log 2, log 3 | -log 2, -log 2, 0 | log 2, 0
        w = [5, 5, 0.3, 0.3, 0.3, 2, 2, 2]
        want = {
            "sampling/sampling_logp_difference/mean": (4 * LOG2 + LOG3) / 7,
            "sampling/sampling_logp_difference/max": LOG3,
            "sampling/kl": -LOG3 / 7,
            "sampling/k3": (1 + 2 - 0.5 - 0.5 + 1 - LOG3) / 7,
            "sampling/chi2": (3 + 8 - 0.75 - 0.75 + 3) / 7,
            "sampling/ppl_ratio": (6**-0.5 + 4 ** (1 / 3) + 2**-0.5) / 3,
            "sampling/importance_sampling_ratio/mean": sum(w) / 8,
            "sampling/importance_sampling_ratio/min": 0.3,
            "sampling/importance_sampling_ratio/max": 5.0,
            "sampling/truncated": 5 / 8,
            "sampling/masked": 0.0,
            "sampling/rejected": 3 / 8,
        }
        # the third row is (not scored, log 2, 0): the mean of its two scored tokens is log 2 / 2
        assert got == pytest.approx(want, rel=1e-5)
        share = effective_share(masked_moments(weights, MASK))
        assert float(share) == pytest.approx(sum(w) ** 2 / sum(x * x for x in w) / 8)

    @pytest.mark.parametrize(
        "correction, truncated, masked",
        [(token_truncate, 1 / 8, 0), (token_mask, 0, 1 / 8), (sequence_truncate, 2 / 8, 0), (sequence_mask, 0, 2 / 8)],
    )
    def test_shares_of_every_correction(self, correction, truncated, masked):
        weights = correction(*logprobs(), MASK, high=2.5)
        got = mismatch_metrics(*logprobs(), MASK, weights)
        assert value(got["sampling/truncated"]) == pytest.approx(truncated)
        assert value(got["sampling/masked"]) == pytest.approx(masked)

    @pytest.mark.parametrize("high, share", [(2.0, 1), (9.9, 1), (10.1, 0), (math.inf, 0)])
    def test_shares_are_of_raw_ratios(self, high, share):
        """All of them are 10: what a bound left says nothing of how many it changed."""
        sampler = -torch.rand(2, 1)
        old, mask = sampler + math.log(10), torch.ones(2, 1, dtype=torch.bool)
        for truncate, mask_out in ((token_truncate, token_mask), (sequence_truncate, sequence_mask)):
            truncated = mismatch_metrics(old, sampler, mask, truncate(old, sampler, mask, high=high))
            masked = mismatch_metrics(old, sampler, mask, mask_out(old, sampler, mask, high=high))
            assert value(truncated["sampling/truncated"]) == value(masked["sampling/masked"]) == share

    def test_only_what_was_done_is_reported(self):
        got = mismatch_metrics(*logprobs(), MASK)
        assert "sampling/kl" in got and "sampling/masked" not in got and "sampling/rejected" not in got

    def test_nothing_to_measure(self):
        """No loss token: sums of 0 over counts of 0, and extremes of nothing."""
        got = mismatch_metrics(*logprobs(), torch.zeros(3, 3).bool(), torch.zeros(3, 3), torch.zeros(3, 3).bool())
        for name, metric in got.items():
            if isinstance(metric, Highest | Lowest):
                assert float(metric.value) == (math.inf if isinstance(metric, Lowest) else -math.inf), name
            else:
                assert [float(part) for part in metric] == [0, 0], name

    def test_means_over_parts_are_the_mean_over_the_whole(self):
        weights = token_truncate(*logprobs(), MASK)
        whole = mismatch_metrics(*logprobs(), MASK, weights, MASK)
        old, sampler = logprobs()
        parts = [
            mismatch_metrics(*(x[i : i + 1] for x in (old, sampler, MASK, weights, MASK))) for i in range(len(MASK))
        ]
        for name, metric in whole.items():
            if isinstance(metric, tuple):
                total = [sum(float(part[name][side]) for part in parts) for side in (0, 1)]
                assert total == pytest.approx([float(side) for side in metric]), name


class TestEffectiveShare:
    def test_of_the_parts_sums_and_not_of_their_shares(self):
        """Ranks with weights of 0.2 and of 3 have a share of 1 each; together (4 * 3.2)^2 / (8 * 4 * 9.04)."""
        mask = torch.ones(2, 2).bool()
        parts = [masked_moments(torch.full((2, 2), weight), mask) for weight in (0.2, 3.0)]
        assert [float(effective_share(part)) for part in parts] == pytest.approx([1, 1])
        assert float(effective_share(sum(parts))) == pytest.approx(3.2**2 / (2 * 9.04))

    def test_weights_of_zero_and_no_weights(self):
        assert effective_share(masked_moments(torch.zeros(2, 3), MASK[:2])) == 0
        assert effective_share(masked_moments(torch.ones(2, 3), torch.zeros(2, 3).bool())).isnan()
