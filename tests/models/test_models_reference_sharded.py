"""References under FSDP2 in a group of one: every parameter is a DTensor, and what it gives is as without sharding.

Scoring stands between the updates, because it leaves gathered parameters behind: writing to those would be lost.
"""

from __future__ import annotations

import pytest
import torch
from reference_cases import logprobs, make_policy, score
from tiers import in_turn
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lit_rl.models.references import BEMA, EMA, FrozenCopy, InitialAdapter, Mixing
from lit_rl.models.sharding import local_shard, shard, stored_parameters


@pytest.fixture
def pair_of(make_model, tmp_path):
    """Two policies of the same weights."""

    def make(kind: str, **settings) -> list[nn.Module]:
        folder = make_model()
        policies = []
        for _ in range(2):
            torch.manual_seed(0)
            policies.append(make_policy(kind, folder, tmp_path / "adapter", **settings))
        return policies

    return make


@pytest.fixture
def completions(make_completions):
    return make_completions([[5, 6, 7], [8]], [[1, 2], [3, 258]])


def learn(policy: nn.Module, step: int) -> None:
    """What an optimizer does: it knows the shards."""
    generator = torch.Generator().manual_seed(step)
    names = [name for name, p in policy.named_parameters() if p.requires_grad]
    with torch.no_grad():
        for parameter in stored_parameters(policy, names).values():
            noise = torch.randn(parameter.shape, generator=generator)
            local_shard(parameter).add_(0.1 * noise.to(parameter.dtype))


def shard_both(policy, module, mesh) -> None:
    shard(policy, mesh)
    if isinstance(module, nn.Module):  # one on the CPU stays whole
        shard(module, mesh)


MAKE = {
    "ema": lambda: EMA(decay=0.7),
    "ema-cpu": lambda: EMA(decay=0.7, device="cpu"),
    "mixing": lambda: Mixing(alpha=0.4, every=2),
    "bema": lambda: BEMA(every=1),
    "bema-after-burn-in": lambda: BEMA(every=2, burn_in=1),
}


@in_turn(mode=MAKE, kind=["full", "continued"], dtype=["bfloat16", "float32"])
def test_a_sharded_reference_moves_and_resumes_as_a_whole_one_does(pair_of, completions, mesh, kind, dtype, mode):
    one, two = MAKE[mode](), MAKE[mode]()
    plain, sharded = pair_of(kind, dtype=dtype)
    whole, parts = one.module(plain), two.module(sharded)
    shard_both(sharded, parts, mesh)
    for step in range(1, 6):
        learn(plain, step)
        learn(sharded, step)
        one.update(plain, whole, step)
        two.update(sharded, parts, step)
        score(sharded, two, parts, completions)
        if step == 3:
            state, two = two.state(parts), MAKE[mode]()
            parts = two.module(pair_of(kind, dtype=dtype)[0])
            if isinstance(parts, nn.Module):
                shard(parts, mesh)
            two.load_state(parts, state)
    for part in parts.modules() if isinstance(parts, FSDPModule) else ():
        if isinstance(part, FSDPModule):
            part.reshard()  # what was written to gathered parameters is gone now
    first, second = one.state(whole), two.state(parts)
    assert first.keys() == second.keys()
    assert all(type(tensor) is torch.Tensor for tensor in second.values())
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    atol = 2e-5 if dtype == "float32" else 0.2
    expected = score(plain, one, whole, completions)
    torch.testing.assert_close(score(sharded, two, parts, completions), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("kind, make", [("full", FrozenCopy), ("fresh", InitialAdapter), ("continued", InitialAdapter)])
def test_a_fixed_reference_that_shares_a_base_is_sharded_beside_it(pair_of, completions, mesh, kind, make):
    policy, plain = pair_of(kind)
    reference = make()
    module = reference.module(policy)
    shard_both(policy, module, mesh)
    assert all(isinstance(p, DTensor) for p in (*policy.parameters(), *module.parameters()))
    initial = logprobs(plain, completions)
    torch.testing.assert_close(score(policy, reference, module, completions), initial, rtol=0, atol=5e-6)
    learn(policy, 1)
    torch.testing.assert_close(score(policy, reference, module, completions), initial, rtol=0, atol=5e-6)
    assert (logprobs(policy, completions) - initial).abs().max() > 0.01
