"""A master in two halves and moments in 8 bits: exact where it is exact, without bias where it is drawn."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn

from lit_rl.algorithms.checks.strategy_checks import check_optimizer_shards
from lit_rl.algorithms.optim import split_adamw
from lit_rl.algorithms.optim.master_weights import with_masters
from lit_rl.algorithms.optim.optimizers import AdamW, AdamWSplit
from lit_rl.algorithms.optim.split_adamw import BLOCK, SplitAdamW, _numbers, _table, join
from lit_rl.algorithms.optim.strategies import FSDP2Strategy
from lit_rl.core.errors import ConfigError


def parameters(dtype: torch.dtype, count: int = 3 * BLOCK + 5) -> list[nn.Parameter]:
    source = torch.Generator().manual_seed(0)
    drawn = [0.1 * torch.randn(shape, generator=source) for shape in [(count,), (4, 7)]]
    return [nn.Parameter(values.bfloat16().to(dtype)) for values in drawn]


def gradients(step: int, like: list[nn.Parameter]) -> list[Tensor]:
    """Of sizes that differ by a factor of 1e6 within a block, as those of embeddings do."""
    source = torch.Generator().manual_seed(step)
    sizes = torch.Generator().manual_seed(-1)
    return [torch.randn(p.shape, generator=source) * 10 ** (-6 * torch.rand(p.shape, generator=sizes)) for p in like]


def take(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for weight, gradient in zip(weights, gradients(step, weights), strict=True):
            weight.grad = gradient
        optimizer.step()
        optimizer.zero_grad()


def masters(optimizer: torch.optim.Optimizer) -> Tensor:
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return torch.cat([master(weight.detach(), optimizer.state[weight]).flatten() for weight in weights])


def master(weight: Tensor, state: dict[str, Tensor]) -> Tensor:
    return join(weight, state["remainder"]) if "remainder" in state else weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_moves_as_adamw_does(dtype):
    ours, theirs = parameters(dtype), parameters(torch.float32)
    before = torch.cat([p.detach().flatten() for p in theirs])
    eight = with_masters(AdamWSplit(lr=1e-5, weight_decay=0.1), [{"params": ours}])
    full = with_masters(AdamW(lr=1e-5, weight_decay=0.1), [{"params": theirs}])
    assert isinstance(eight, SplitAdamW)
    take(eight, ours, range(60))
    take(full, theirs, range(60))
    moved = torch.cat([p.detach().flatten() for p in theirs]) - before
    far = masters(eight) - before - moved
    assert far.norm() < 0.25 * moved.norm(), "of the same direction"
    assert far.mean().abs() < 0.01 * moved.abs().mean(), "and without bias"
    assert far.abs().max() < moved.abs().max(), "and no weight runs away"


def test_the_state_takes_four_bytes_a_weight():
    weights = parameters(torch.bfloat16, 100 * BLOCK)
    optimizer = with_masters(AdamWSplit(lr=1e-5), [{"params": weights[:1]}])
    take(optimizer, weights[:1], range(1))
    kept = sum(v.numel() * v.element_size() for state in optimizer.state.values() for v in state.values())
    assert kept / weights[0].numel() == pytest.approx(2 + 1 + 1 + 8 / BLOCK, abs=1e-3)


def test_neither_strides_nor_parts_change_a_weight(monkeypatch):
    """A transposed weight is moved as its numbers are counted, and so is one that is moved part by part."""

    def moved(values: Tensor, part: int) -> tuple[Tensor, Tensor]:
        monkeypatch.setattr(split_adamw, "PART", part)
        weight = nn.Parameter(values)
        optimizer = with_masters(AdamWSplit(lr=1e-5, weight_decay=0.1), [{"params": [weight]}])
        take(optimizer, [weight], range(5))
        return weight.detach(), masters(optimizer)

    whole = parameters(torch.bfloat16, 8 * BLOCK)[0].detach().view(64, -1)
    weight, of_weight = moved(whole.clone(), 2**16)
    strided, of_strided = moved(whole.t().contiguous().t(), 2**16)
    assert not strided.is_contiguous() and torch.equal(strided, weight) and torch.equal(of_strided, of_weight)
    in_parts, of_parts = moved(whole.clone(), 2 * BLOCK)
    assert torch.equal(in_parts, weight) and torch.equal(of_parts, of_weight)


def test_gradients_are_summed_in_float32():
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    with_masters(AdamWSplit(lr=1e-5), [{"params": [weight]}])
    for factor in [1.0] + [2**-9] * 10:
        (weight * factor).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.full((4,), 1 + 10 * 2**-9))


def test_second_moments_fall_as_well_as_they_rise():
    """Rounded to the nearest of 8 bits, 0.999 of a number would be the number, for ever."""
    weight = nn.Parameter(torch.zeros(BLOCK, dtype=torch.float32))
    optimizer = with_masters(AdamWSplit(lr=1e-5), [{"params": [weight]}])
    for gradient in [1.0] + [0.0] * 400:
        weight.grad = torch.full((BLOCK,), gradient)
        weight.grad[0] = 1.0
        optimizer.step()
    state = optimizer.state[weight]
    kept = _numbers(state["second"], state["second_bound"], _table(weight.device, 255))
    assert kept[1:].mean() == pytest.approx(0.001 * 0.999**400, rel=0.05)


@pytest.mark.parametrize("top", [127, 255])
def test_the_mean_of_the_codes_is_the_number(top):
    """From the largest number of a block to far below the least code, over 2^16 draws of each."""
    sizes = 2.0 ** -torch.tensor([0.01, 0.1, 1.0, 1.05, 2.5, 7.3, (top - 1) / 6 - 0.01, (top - 1) / 6 + 2, 100.0])
    draws = 2**16
    numbers = torch.cat([torch.ones(draws, 1), sizes.repeat(draws, 1), torch.zeros(draws, BLOCK - 10)], 1)
    bound = torch.zeros(draws)
    drawn, _ = split_adamw._draws(3, 0, numbers.numel(), numbers.device)
    codes = split_adamw._codes(numbers.flatten(), bound, drawn, top=top)
    kept = _numbers(codes, bound, _table(codes.device, top)).view(-1, BLOCK)
    assert (bound == 2).all() and (kept[:, 10:] == 0).all()
    far, error = kept[:, 1:10].mean(0) - sizes, kept[:, 1:10].std(0) / draws**0.5
    assert (far.abs() <= 4 * error + 2**-17 * sizes.clamp(min=2 ** (1 - (top - 1) / 6))).all()


def test_draws_are_even_and_those_of_another_step_weight_or_moment_are_others():
    n = 2**16
    columns = [
        one for seed in (1, 2, 1 << 20, (1 << 20) + 1) for one in split_adamw._draws(seed, 0, n, torch.device("cpu"))
    ]
    columns += split_adamw._draws(1, n, n, torch.device("cpu"))
    table = torch.stack(columns)
    assert table.min() > 0 and table.max() < 1
    assert (torch.corrcoef(table) - torch.eye(len(table))).abs().max() < 5 / n**0.5
    next_to = torch.stack([torch.corrcoef(torch.stack([one[1:], one[:-1]]))[0, 1] for one in table])
    assert next_to.abs().max() < 5 / n**0.5
    for one in table:
        counts = torch.histc(one, 256, 0, 1)
        assert ((counts - n / 256) ** 2 / (n / 256)).sum() < 255 + 6 * (2 * 255) ** 0.5


def test_strategies_that_take_weights_apart_are_refused():
    for strategy in (FSDPStrategy(), FSDP2Strategy(), DeepSpeedStrategy.__new__(DeepSpeedStrategy)):
        with pytest.raises(ConfigError, match=f"adamw_split.*{type(strategy).__name__}.*optimizer=adamw"):
            check_optimizer_shards(AdamWSplit(), strategy)
        check_optimizer_shards(AdamW(), strategy)
    check_optimizer_shards(AdamWSplit(), SingleDeviceStrategy())
