from __future__ import annotations

import itertools
import math

import pytest
import torch
from generation_cases import EOS, PAD, spell
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lit_rl.core.rollout import Prompts, Sampling
from lit_rl.generation import noise, token_sampler
from lit_rl.generation.generator import DecodeBatch, decode_batches
from lit_rl.generation.token_sampler import EndDetector, TokenSampler
from lit_rl.ops.sampling_distribution import temperature, top_k

LARGEST = 1 - 2**-24
seeds = st.integers(0, 2**31)


def random_logits(seed: int, rows: int = 4, vocabulary: int = 17) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, vocabulary, generator=generator)
    return torch.where(torch.rand(rows, vocabulary, generator=generator) < 0.2, logits.round(), logits)  # some ties


@pytest.mark.parametrize("value", [1e-6, 1e-30, 1e-40])
def test_tiny_temperature_is_greedy_and_finite(value: float) -> None:
    logits = random_logits(2)
    tokens, logprobs = token_sampler.draw(temperature(logits, value), torch.full((4,), LARGEST))
    assert torch.equal(logits.gather(1, tokens[:, None]), logits.amax(1, keepdim=True))
    assert logprobs.isfinite().all()


def test_draws_edit_nothing() -> None:
    logits = random_logits(1)
    before = logits.clone()
    token_sampler.draw(logits, torch.rand(4))
    token_sampler.greedy(logits)
    assert torch.equal(logits, before)


def test_draw_by_hand() -> None:
    logits = torch.tensor([0.0, 0.25, 0.5, 0.0, 0.25, 0.0]).log().expand(6, 6)
    # Noise runs down from the top of the mass: 1 - u is the place on the CDF 0, 0.25, 0.75, 0.75, 1, 1.
    tokens, logprobs = token_sampler.draw(logits, torch.tensor([0.0, 0.249, 0.25, 0.749, 0.75, LARGEST]))
    assert tokens.tolist() == [4, 4, 2, 2, 1, 1]
    expected = [math.log(p) for p in (0.25, 0.25, 0.5, 0.5, 0.25, 0.25)]
    torch.testing.assert_close(logprobs, torch.tensor(expected), atol=1e-6, rtol=0)


@settings(max_examples=25)
@given(seed=seeds, kept=st.integers(1, 16), u=st.sampled_from([0.0, 2**-24, 0.5, LARGEST - 2**-24, LARGEST]))
def test_a_token_of_zero_probability_is_never_drawn(seed: int, kept: int, u: float) -> None:
    logits = top_k(random_logits(seed, rows=8, vocabulary=5000), kept)
    tokens, logprobs = token_sampler.draw(logits, torch.full((8,), u))
    assert logits.gather(1, tokens[:, None]).isfinite().all()
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=1e-5)


@settings(max_examples=25)
@given(seed=seeds, size=st.sampled_from([4097, 5120, 9000]), scale=st.sampled_from([0.1, 2.0, 20.0]))
def test_a_large_vocabulary_is_searched_as_the_whole_cdf_would_be(seed: int, size: int, scale: float) -> None:
    """The token drawn is where the float64 CDF reaches the mass, up to the rounding of a sum in float32."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(16, size, generator=generator)
    uniforms = torch.randint(2**24, (16,), generator=generator) * 2.0**-24
    tokens, logprobs = token_sampler.draw(logits, uniforms)
    cdf = logits.double().softmax(-1).cumsum(-1)
    upper, probability = (x.gather(1, tokens[:, None])[:, 0] for x in (cdf, logits.double().softmax(-1)))
    mass = 1 - uniforms.double()
    assert (mass <= upper + 2e-6).all() and (mass >= upper - probability - 2e-6).all()
    torch.testing.assert_close(logprobs, probability.log().float(), atol=1e-5, rtol=1e-5)


def drawn_by_hand(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The draw as it is written down: a running sum over blocks of 512, then inside the block that was met."""
    size, left = logits.shape[-1], 1 - uniforms[:, None]
    top, likeliest = logits.max(-1, keepdim=True)
    weights = (logits - top).exp()
    if size <= 4096:
        cdf = weights.cumsum(-1)
        total = cdf[:, -1:]
        tokens = torch.searchsorted(cdf, left * total).clamp(max=size - 1)
    else:
        blocks = torch.stack([part.sum(-1) for part in weights.split(512, -1)], -1)
        cdf = blocks.cumsum(-1)
        total = cdf[:, -1:]
        block = torch.searchsorted(cdf, left * total).clamp(max=blocks.shape[-1] - 1)
        tokens = torch.zeros_like(block)
        for row, at in enumerate(block[:, 0].tolist()):
            inside = weights[row, at * 512 : (at + 1) * 512].cumsum(-1)
            rest = left[row] * total[row] - (cdf[row, at] - blocks[row, at])
            rest = rest.clamp(min=torch.finfo(torch.float32).tiny).minimum(inside[-1:])
            tokens[row] = at * 512 + torch.searchsorted(inside, rest).clamp(max=len(inside) - 1)
    tokens = torch.where(weights.gather(-1, tokens) > 0, tokens, likeliest)
    return tokens[:, 0], (logits.gather(-1, tokens) - top - total.log())[:, 0]


@settings(max_examples=25)
@given(seed=seeds, size=st.sampled_from([17, 4096, 4097, 5000]), kept=st.sampled_from([1, 3, 17]))
def test_tokens_are_those_of_the_draw_by_hand(seed: int, size: int, kept: int) -> None:
    logits = top_k(random_logits(seed, rows=8, vocabulary=size), kept)
    uniforms = torch.tensor([0.0, 2**-24, 0.1, 0.3, 0.5, 0.9, LARGEST - 2**-24, LARGEST])
    for ours, by_hand in zip(token_sampler.draw(logits, uniforms), drawn_by_hand(logits, uniforms), strict=True):
        assert torch.equal(ours, by_hand)


@pytest.mark.parametrize("size", [17, 5000, 5120])
def test_greedy_over_blocks_takes_the_lowest_of_equals(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    logits = random_logits(3, rows=7, vocabulary=size).clamp(max=2)  # some share the highest logit
    logits[0, :-1] = -torch.inf
    monkeypatch.setattr(token_sampler, "_MOST_LOGITS", 3 * size)
    tokens, logprobs = token_sampler.greedy(logits)
    assert tokens.tolist() == [row.index(max(row)) for row in logits.tolist()]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).amax(-1), atol=1e-6, rtol=1e-6)


def test_noise_that_is_made_at_once_is_that_of_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = Prompts([[1], [1, 2]], [5, 6], 2, (EOS,), PAD)
    (batch,) = decode_batches(prompts, None, torch.device("cpu"))
    sampling, logits = Sampling(max_new_tokens=6), random_logits(4)
    rows, columns = torch.tensor([0, 2, 3]), torch.tensor([0, 4, 6])
    drawn = []
    for numbers in (token_sampler._MOST_NOISE, 0):
        monkeypatch.setattr(token_sampler, "_MOST_NOISE", numbers)
        sampler = TokenSampler(batch, prompts, sampling)
        assert (sampler._uniforms is None) == (numbers == 0)
        drawn += [[sampler(logits, 3).tokens, sampler(logits[rows], columns, rows).tokens]]
        assert torch.equal(sampler._noise(rows, columns), noise.uniform(batch.keys[rows], columns))
    assert all(torch.equal(*both) for both in zip(*drawn, strict=True))


def test_a_row_does_not_depend_on_how_many_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, uniforms = random_logits(3, rows=7, vocabulary=5000), torch.arange(7) / 7
    together = token_sampler.draw(logits, uniforms)
    monkeypatch.setattr(token_sampler, "_MOST_LOGITS", 3 * 5000)
    for whole, parts in zip(together, token_sampler.draw(logits, uniforms)):
        assert torch.equal(whole, parts)


def counts_of(tokens: Tensor, size: int) -> Tensor:
    return torch.bincount(tokens, minlength=size).double()


def test_nan_gives_nan_and_no_crash() -> None:
    for bad, size in itertools.product((torch.nan, -torch.inf), (5, 5000)):
        tokens, logprobs = token_sampler.draw(torch.full((1, size), bad), torch.tensor([0.3]))
        assert 0 <= int(tokens) < size
        assert logprobs.isnan().all()


def sampler(sampling: Sampling, prompt: list[list[int]], mask: list[list[int]]) -> TokenSampler:
    numbers = torch.arange(len(prompt))
    batch = DecodeBatch(torch.tensor(prompt), torch.tensor(mask).bool(), 1, numbers, numbers, numbers.tolist())
    return TokenSampler(batch, Prompts(prompt, numbers.tolist(), 1, (EOS, 3), PAD), sampling)


def test_seen_tokens_are_those_of_prompt_and_response_but_not_padding() -> None:
    logits = torch.tensor([[4.0, 0.0, 3.9, 0.0, 3.8]])
    draw = sampler(Sampling(temperature=0, repetition_penalty=1.5, max_new_tokens=9), [[PAD, PAD, 2]], [[0, 0, 1]])
    # Token 0 only pads, so it is not penalised until it is drawn; token 2 stands in the prompt.
    assert [int(draw(logits, position)[0]) for position in range(3)] == [0, 4, 0]


def test_rows_that_go_on_keep_their_history_and_noise() -> None:
    sampling = Sampling(repetition_penalty=1.8)
    logits = random_logits(5, rows=6)
    whole, part = (sampler(sampling, [[i, i + 1] for i in range(6)], [[1, 1]] * 6) for _ in range(2))
    rows = torch.tensor([1, 4])
    whole(logits, 0), part(logits, 0)
    ours, theirs = part(logits[rows], 1, rows), whole(logits, 1)
    assert torch.equal(ours.tokens, theirs.tokens[rows])
    assert torch.equal(ours.logprobs, theirs.logprobs[rows])


truncated = {"top_k": st.integers(0, 17), "top_p": st.floats(0.2, 1), "min_p": st.floats(0, 0.5)}


def ends_at(response: list[int], stop: tuple[str, ...], min_new_tokens: int = 0, every: int = 1) -> int | None:
    """The place of the token that ends it, where one looks after each ``every`` tokens."""
    prompts = Prompts([[2]], [0], 1, (EOS,), PAD, spell)
    detector = EndDetector(prompts, Sampling(stop=stop, min_new_tokens=min_new_tokens), torch.device("cpu"))
    eos = detector.by_eos(torch.tensor(response)).tolist()
    length = eos.index(True) + 1 if True in eos else len(response)
    for asked in range(0, length, every):
        spoken = min(asked + every, length)
        tail = response[max(asked + 1 - detector.window, 0) : spoken]
        if (behind := detector.behind(tail, spoken, spoken - asked)) is not None:
            return spoken - 1 - behind
    return length - 1 if True in eos else None


@pytest.mark.parametrize("every", [1, 3, 4])
def test_stop_string_completed_too_early_does_not_count_later(every: int) -> None:
    response = [5, 6, 7, 8, 5, 6, 7]
    stop = spell([5, 6])[1:3]
    assert ends_at(response, (stop,), every=every) == 1
    assert ends_at(response, (stop,), min_new_tokens=1, every=every) == 1
    assert ends_at(response, (stop,), min_new_tokens=2, every=every) == 5
    assert ends_at(response, (stop,), min_new_tokens=6, every=every) is None
