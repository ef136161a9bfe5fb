"""References that follow the policy: sequences by hand and beside a peer, what they leave alone, and resuming."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference_cases import Two, logprobs, make_policy, score, train_a_little, trained
from tiers import in_turn
from torch import nn

from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.models.references import BEMA, EMA, Mixing

MAKE = {
    "ema": lambda **settings: EMA(decay=0.9, **settings),
    "bema": lambda **settings: BEMA(every=2, lag=3, **settings),
    "bema-after-burn-in": lambda **settings: BEMA(every=2, burn_in=3, **settings),
    "mixing": lambda **settings: Mixing(alpha=0.3, every=2, **settings),
}


@pytest.fixture
def policy_of(make_model, tmp_path):
    def make(kind: str) -> nn.Module:
        return make_policy(kind, make_model(), tmp_path / "adapter")

    return make


@pytest.fixture
def completions(make_completions):
    return make_completions([[5, 6, 7], [8]], [[1, 2], [3, 258]])


def follow(reference, steps: dict[int, tuple[float, float]]) -> list[tuple[float, float]]:
    """Where a reference of two numbers, (0, 10) at first, is after each of these steps."""
    policy = Two(0.0, 10.0)
    module = reference.module(policy)
    found = []
    for step, numbers in steps.items():
        policy.set(*numbers)
        reference.update(policy, module, step)
        found.append(module.numbers)
    return found


# ------------------------------------------------------------------ by hand


def test_ema_by_hand():
    assert follow(EMA(decay=0.75), {1: (8, 6), 2: (4, -3)}) == [(2.0, 9.0), (2.5, 6.0)]


def test_mixing_by_hand():
    steps = {1: (8, 6), 2: (4, 2), 3: (100, 100), 4: (9, 0)}
    assert follow(Mixing(alpha=0.25, every=2), steps) == [(0, 10), (1, 8), (1, 8), (3, 6)]


def test_bema_by_hand():
    """beta is 4^-1/2 = 1/2 and then 16^-1/2 = 1/4, alpha is 1/4 and then 1/16; averages are (4, 8) and (7, 6.5)."""
    reference = BEMA(lag=1, multiplier=3, ema_power=0.5, bias_power=1, every=1)
    assert follow(reference, {1: (8, 6), 5: (16, 2)}) == [(6, 7), (8, 6)]


def test_bema_after_a_burn_in_by_hand():
    """theta_0 and the average are (8, 6) after one step; at step 5 beta is 1/4 and alpha is 1/16."""
    reference = BEMA(lag=1, multiplier=3, ema_power=0.5, bias_power=1, every=4, burn_in=1)
    steps = {1: (8, 6), 2: (99, 99), 4: (99, 99), 5: (16, 2)}
    assert follow(reference, steps) == [(0, 10), (0, 10), (0, 10), (10.5, 4.75)]


@given(st.lists(st.tuples(st.floats(-9, 9, width=32), st.floats(-9, 9, width=32)), min_size=1, max_size=5))
def test_limits(policies):
    steps = dict(enumerate(policies, start=1))
    assert follow(EMA(decay=1), steps) == [(0, 10)] * len(steps)
    assert follow(EMA(decay=0), steps) == policies
    assert follow(Mixing(alpha=0, every=1), steps) == [(0, 10)] * len(steps)
    assert follow(Mixing(alpha=1, every=1), steps) == policies
    assert follow(EMA(decay=0.75), steps) == follow(Mixing(alpha=0.25, every=1), steps)
    # beta = 1 makes the average the policy; alpha = 0 leaves it at that, and alpha = 1 adds the way from the start.
    there = torch.tensor(policies)
    torch.testing.assert_close(torch.tensor(follow(BEMA(ema_power=0, bias_power=99, every=1), steps)), there)
    beyond = 2 * there - torch.tensor([0.0, 10.0])
    torch.testing.assert_close(torch.tensor(follow(BEMA(ema_power=0, bias_power=0, every=1), steps)), beyond)


# ------------------------------------------------------------------ beside a peer


class Peer(Two):
    """A model that TRL's callback can make a copy of."""

    def __init__(self, config: tuple[float, float]) -> None:
        super().__init__(*config)
        self.config = config
        del self.fixed  # the peer pairs the trained parameters with all parameters of the copy


@pytest.mark.parametrize("every, burn_in", [(1, 0), (3, 0), (2, 3)])
def test_bema_is_the_peers(every, burn_in):
    callbacks = pytest.importorskip("trl.trainer.callbacks")
    from transformers import TrainerControl, TrainerState

    settings = dict(ema_power=0.7, bias_power=0.3, lag=4, multiplier=2.0)
    peer = callbacks.BEMACallback(update_freq=every, update_after=burn_in, **settings)
    reference = BEMA(every=every, burn_in=burn_in, **settings)
    policy = Peer((1.0, 2.0))
    module, state, control = reference.module(policy), TrainerState(), TrainerControl()
    peer.on_train_begin(None, state, control, model=policy)
    for step in range(1, 12):
        train_a_little(policy, seed=step)
        state.global_step = step
        peer.on_step_end(None, state, control, model=policy)
        reference.update(policy, module, step)
        assert module.numbers == pytest.approx(peer.running_model.numbers, rel=1e-5, abs=1e-6)


def test_mixing_is_the_peers():
    callbacks = pytest.importorskip("trl.trainer.callbacks")
    policy, reference = Two(3.0, -2.0), Mixing(alpha=0.6, every=1)
    module, theirs = reference.module(policy), copy.deepcopy(policy)
    for step in range(1, 6):
        train_a_little(policy, seed=step)
        callbacks.SyncRefModelCallback._sync_target_model(policy, theirs, 0.6)
        reference.update(policy, module, step)
        assert module.numbers == pytest.approx(theirs.numbers, rel=1e-5, abs=1e-6)


# ------------------------------------------------------------------ what moves


@in_turn(device=[None, "cpu"], kind=["full", "fresh", "continued"])
def test_a_full_update_gives_the_policy_and_touches_nothing_else(policy_of, completions, kind, device):
    policy = policy_of(kind)
    reference = Mixing(alpha=1, every=1, device=device)
    module = reference.module(policy)
    train_a_little(policy)
    bare = module if device is None else module.model
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    flags = {name: p.requires_grad for name, p in policy.named_parameters()}
    frozen = {name: p.clone() for name, p in bare.named_parameters() if not flags[name]}
    assert (score(policy, reference, module, completions) - logprobs(policy, completions)).abs().max() > 0.01

    reference.update(policy, module, 1)

    torch.testing.assert_close(
        score(policy, reference, module, completions), logprobs(policy, completions), rtol=0, atol=2e-6
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())
    assert all(torch.equal(dict(bare.named_parameters())[name], tensor) for name, tensor in frozen.items())
    assert {name: p.requires_grad for name, p in policy.named_parameters()} == flags
    assert not any(p.requires_grad or p.grad is not None for p in bare.parameters())
    assert policy.training


def test_another_adapter_of_the_policy_is_left_alone(policy_of):
    from peft import LoraConfig

    policy = policy_of("continued")
    policy.add_adapter("critic", LoraConfig(r=1, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    policy.set_adapter("default")
    reference = Mixing(alpha=1, every=1)
    module = reference.module(policy)
    others = {name: p for name, p in policy.named_parameters() if ".critic." in name}
    with torch.no_grad():
        for parameter in others.values():
            parameter.add_(1)
    values = {name: p.clone() for name, p in others.items()}
    train_a_little(policy)
    reference.update(policy, module, 1)
    assert others and all(torch.equal(p, values[name]) for name, p in others.items())
    assert not any(".critic." in name for name in reference.state(module))
    assert (policy.active_adapter, module.active_adapter) == ("default", "default")


def test_what_is_frozen_for_a_while_is_still_followed(policy_of):
    """A critic's warm-up stops the policy's gradients; what the reference follows was settled at the start."""
    policy = policy_of("full")
    reference = Mixing(alpha=1, every=1)
    module = reference.module(policy)
    train_a_little(policy)
    policy.requires_grad_(False)
    reference.update(policy, module, 1)
    theirs = dict(module.named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in policy.named_parameters())


# ------------------------------------------------------------------ types


@in_turn(
    reference=[EMA(decay=0), Mixing(alpha=1, every=1)],
    dtype=[torch.bfloat16, torch.float16, torch.float32, torch.float64],
)
def test_a_full_update_is_exact_in_every_type(dtype, reference):
    policy = Two(1 / 3, -2 / 7).to(dtype)
    module = reference.module(policy)
    for step in (1, 2):
        train_a_little(policy, seed=step)
        reference.update(policy, module, step)
        theirs = dict(module.named_parameters())
        assert all(torch.equal(p, theirs[name]) for name, p in policy.named_parameters())
        assert {p.dtype for p in theirs.values()} == {dtype}


def test_small_steps_are_not_lost_in_bfloat16():
    """A step of 0.2 % of 1/64 is far below bfloat16's spacing of 1/128 at 1, and a thousand of them are not."""
    policy = Two(1.0, 1.0).to(torch.bfloat16)
    reference = EMA(decay=0.998)
    module = reference.module(policy)
    policy.set(1 + 1 / 64, 1.0)
    reference.update(policy, module, 1)
    assert module.a.item() == 1.0
    for step in range(2, 1001):
        reference.update(policy, module, step)
    exact = 1 + (1 - 0.998**1000) / 64
    assert module.a.item() == torch.tensor(exact).bfloat16().item() != 1.0
    assert reference.state(module)["average/a"].item() == pytest.approx(exact, abs=1e-4)
    assert module.b.item() == 1.0


# ------------------------------------------------------------------ state


@pytest.mark.parametrize("kind", MAKE)
def test_a_state_is_plain_and_a_snapshot_of_what_is_trained(policy_of, kind):
    policy = policy_of("fresh")
    reference = MAKE[kind]()
    module = reference.module(policy)
    assert reference.moves
    assert reference.state(module).keys() == trained(policy).keys()  # nothing else yet, and never the frozen base
    for step in range(1, 9):
        train_a_little(policy, seed=step)
        reference.update(policy, module, step)
    state = reference.state(module)
    assert {key.rpartition("/")[2] for key in state} == trained(policy).keys()
    assert all(type(tensor) is torch.Tensor and not tensor.requires_grad for tensor in state.values())
    kept = {name: tensor.clone() for name, tensor in state.items()}
    train_a_little(policy, seed=9)
    reference.update(policy, module, 10)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in state.items())


def test_a_new_module_begins_anew():
    reference = BEMA(every=1)
    for _ in range(2):  # a second run in the same notebook: nothing is left of the first
        policy = Two(1.0, 2.0)
        module = reference.module(policy)
        assert set(reference.state(module)) == {"a", "b"}
        policy.set(3.0, 4.0)
        reference.update(policy, module, 1)


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda state: state.pop("b"), "b"),
        (lambda state: state.update(c=torch.zeros(())), "c"),
        (lambda state: state.update(b=torch.zeros(2)), "b"),
        (lambda state: state.update({"momentum/a": torch.zeros(())}), "momentum/a"),
        (lambda state: state.update({"average/c": torch.zeros(())}), "average/c"),
    ],
)
def test_a_state_of_another_reference_is_refused_and_changes_nothing(change, named):
    reference = EMA()
    module = reference.module(Two(1.0, 2.0))
    state = reference.state(module)
    state["a"] = torch.tensor(7.0)
    change(state)
    with pytest.raises(StorageError, match=rf"no reference of this kind.*\({re.escape(named)}\)"):
        reference.load_state(module, state)
    assert module.numbers == (1.0, 2.0)


# ------------------------------------------------------------------ refusals


def test_parameters_that_zero_stage_3_took_apart_are_refused():
    policy = Two()
    reference = EMA()
    module = reference.module(policy)
    policy.a.ds_id = 1  # how DeepSpeed marks one
    with pytest.raises(ConfigError, match="strategy=fsdp"):
        reference.update(policy, module, 1)
