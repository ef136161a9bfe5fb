"""References: the KL is 0 before the first update in every mode, and fixed ones are the initial policy ever after."""

from __future__ import annotations

import copy

import lightning as L
import pytest
import torch
from reference_cases import KINDS, logprobs, make_policy, score, train_a_little
from torch import nn

from lit_rl.core.errors import ConfigError
from lit_rl.models.modes import evaluation_mode
from lit_rl.models.references import BEMA, EMA, AdapterBase, Auto, FrozenCopy, InitialAdapter, Mixing, OnCPU, OtherModel


@pytest.fixture
def policy_of(make_model, tmp_path):
    def make(kind: str) -> nn.Module:
        return make_policy(kind, make_model(attention_dropout=0.3), tmp_path / "adapter")

    return make


@pytest.fixture
def completions(make_completions):
    return make_completions([[5, 6, 7], [8]], [[1, 2], [3, 258]])


def reference_of(mode: str, tmp_path):
    """Made by name, so that a case can name a folder that the test makes."""
    folder, adapter = str(tmp_path / "qwen2"), str(tmp_path / "adapter")
    return {
        "copy": lambda: FrozenCopy(),
        "copy-cpu": lambda: FrozenCopy(device="cpu"),
        "auto": lambda: Auto(),
        "auto-cpu": lambda: Auto(device="cpu"),
        "base": lambda: AdapterBase(),
        "initial": lambda: InitialAdapter(),
        "model": lambda: OtherModel(name=folder),
        "adapter": lambda: OtherModel(adapter=adapter),
        "model-adapter-cpu": lambda: OtherModel(name=folder, adapter=adapter, device="cpu"),
        "ema": lambda: EMA(),
        "bema": lambda: BEMA(every=1),
        "mixing": lambda: Mixing(every=1),
        "mixing-cpu": lambda: Mixing(every=1, device="cpu"),
    }[mode]()


EVERYWHERE = ("copy", "copy-cpu", "auto", "auto-cpu", "ema", "bema", "mixing", "mixing-cpu")
CASES = [(KINDS[at % len(KINDS)], mode) for at, mode in enumerate(EVERYWHERE)]
CASES += [("fresh", "base"), ("fresh", "initial"), ("continued", "initial"), ("full", "model"), ("fresh", "model")]
CASES += [("continued", "adapter"), ("continued", "model-adapter-cpu")]


@pytest.mark.parametrize("kind, mode", CASES)
def test_kl_is_zero_at_step_zero_and_stays_where_it_was_without_an_update(policy_of, completions, tmp_path, kind, mode):
    policy = policy_of(kind)
    reference = reference_of(mode, tmp_path)
    module = reference.module(policy)
    assert (module is None) == (mode == "base" or (mode.startswith("auto") and kind == "fresh"))
    assert isinstance(module, OnCPU) == (mode.endswith("cpu") and module is not None)
    initial = logprobs(policy, completions)
    # Copied weights lie elsewhere in memory, which alone may change the order of sums: not bit for bit.
    torch.testing.assert_close(score(policy, reference, module, completions), initial, rtol=0, atol=2e-6)
    assert policy.training
    train_a_little(policy)
    torch.testing.assert_close(score(policy, reference, module, completions), initial, rtol=0, atol=2e-6)
    assert (logprobs(policy, completions) - initial).abs().max() > 0.01


@pytest.mark.parametrize("mode", ["copy", "auto", "base", "initial", "model"])
def test_a_fixed_reference_has_nothing_to_follow_and_nothing_to_save(policy_of, completions, tmp_path, mode):
    policy = policy_of("fresh")
    reference = reference_of(mode, tmp_path)
    module = reference.module(policy)
    before = score(policy, reference, module, completions)
    train_a_little(policy)
    reference.update(policy, module, 1)
    assert not reference.moves
    assert reference.state(module) == {}
    reference.load_state(module, {})
    assert torch.equal(score(policy, reference, module, completions), before)


def test_the_base_of_a_trained_adapter_is_not_where_the_policy_began(policy_of, completions):
    policy = policy_of("continued")
    reference = AdapterBase()
    base = score(policy, reference, reference.module(policy), completions)
    assert (base - logprobs(policy, completions)).abs().max() > 0.01


@pytest.mark.parametrize("make", [FrozenCopy, InitialAdapter, EMA, Mixing, BEMA])
def test_a_copy_is_frozen_and_copies_only_what_is_trained(policy_of, make):
    policy = policy_of("continued")
    flags = {name: p.requires_grad for name, p in policy.named_parameters()}
    module = make().module(policy)
    assert not module.training
    assert not any(p.requires_grad for p in module.parameters())
    assert {name: p.requires_grad for name, p in policy.named_parameters()} == flags
    theirs = dict(module.named_parameters())
    for name, parameter in policy.named_parameters():
        assert (theirs[name] is parameter) == (not parameter.requires_grad), name


def test_a_copy_of_what_is_trained_in_full_shares_nothing(policy_of):
    full = policy_of("full")
    ours = {id(p) for p in full.parameters()}
    assert not any(id(p) in ours for p in FrozenCopy().module(full).parameters())


def test_the_policy_does_not_know_of_its_initial_adapter(policy_of):
    """So no checkpoint, no export, no optimizer and no generator can meet a second adapter."""
    policy = policy_of("continued")
    names, adapters = set(policy.state_dict()), set(policy.peft_config)
    reference = InitialAdapter()
    module = reference.module(policy)
    with reference.scoring(policy, module):
        assert policy.active_adapter == "default"
        assert set(policy.state_dict()) == names
        assert set(policy.peft_config) == adapters


def test_switching_the_adapters_off_leaves_no_trace(policy_of, completions):
    policy = policy_of("continued")
    for name, parameter in policy.named_parameters():
        if "q_proj.lora_A" in name:
            parameter.requires_grad_(False)  # the user's own choice, which PEFT does not know
    flags = {name: p.requires_grad for name, p in policy.named_parameters()}
    before = logprobs(policy, completions)
    reference = AdapterBase()
    with pytest.raises(RuntimeError, match="inside"), reference.scoring(policy, None) as scorer:
        assert not scorer.training
        raise RuntimeError("inside")
    assert policy.training
    assert {name: p.requires_grad for name, p in policy.named_parameters()} == flags
    assert torch.equal(logprobs(policy, completions), before)


def test_adapters_that_were_off_stay_off(policy_of, completions):
    policy = policy_of("continued")
    reference = AdapterBase()
    with policy.disable_adapter():
        off = logprobs(policy, completions)
        score(policy, reference, None, completions)
        assert torch.equal(logprobs(policy, completions), off)


@pytest.mark.parametrize("make, choice", [(AdapterBase, "adapter_base"), (InitialAdapter, "initial_adapter")])
def test_a_reference_to_adapters_needs_adapters(policy_of, make, choice):
    policy = policy_of("full")
    with pytest.raises(ConfigError, match=rf"reference={choice}.*no adapters.*reference=frozen_copy"):
        make().module(policy)


class Module(L.LightningModule):
    """Holds a reference's module the way an algorithm does."""

    def __init__(self, policy, module) -> None:
        super().__init__()
        self.policy = policy
        self.reference_policy = module


@pytest.mark.parametrize("kind", ["full", "continued"])
def test_a_reference_on_the_cpu_stays_behind_when_the_policy_moves(policy_of, completions, kind):
    policy = policy_of(kind)
    reference = FrozenCopy(device="cpu")
    module = reference.module(policy)
    owner = Module(policy, module)
    before = score(policy, reference, module, completions)
    assert not any(name.startswith("reference_policy") for name in owner.state_dict())
    ours = {p.data_ptr() for p in policy.parameters()}
    assert not any(p.data_ptr() in ours for p in module.model.parameters())
    owner.to(torch.float64)  # stands for a move to a device that is not here: it touches every parameter that it finds
    assert {p.dtype for p in policy.parameters()} == {torch.float64}
    assert {p.dtype for p in module.model.parameters()} == {torch.float32}
    assert torch.equal(score(policy, reference, module, completions), before)


def test_a_reference_beside_the_policy_moves_with_it(policy_of):
    policy = policy_of("fresh")
    module = FrozenCopy().module(policy)
    Module(policy, module).to(torch.float64)
    shared = {id(p) for p in policy.parameters()}
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    assert sum(id(p) in shared for p in module.parameters()) == sum(not p.requires_grad for p in policy.parameters())


def test_on_the_cpu_autocast_is_the_callers(policy_of, completions):
    policy = policy_of("full")
    beside, behind = FrozenCopy(), FrozenCopy(device="cpu")
    modules = beside.module(policy), behind.module(policy)
    plain = score(policy, behind, modules[1], completions)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = [score(policy, r, m, completions) for r, m in zip((beside, behind), modules, strict=True)]
    torch.testing.assert_close(cast[1], cast[0], rtol=0, atol=2e-6)
    assert (cast[1] - plain).abs().max() > 1e-4


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_reference_has_no_dropout_whoever_called_train(policy_of, completions, device):
    policy = policy_of("full")
    reference = FrozenCopy(device=device)
    module = reference.module(policy)
    before = score(policy, reference, module, completions)
    module.train()
    assert module.training
    assert torch.equal(score(policy, reference, module, completions), before)


def test_a_wrapped_model_copies_and_changes_mode():
    wrapped = copy.deepcopy(OnCPU(nn.Linear(2, 2)))
    assert wrapped.train() is wrapped and wrapped.training
    assert wrapped.eval() is wrapped and not wrapped.model.training


@pytest.mark.parametrize("wrap", [lambda model: model, OnCPU])
def test_evaluation_mode_leaves_every_part_as_it_was(wrap):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).train()
    model[1].eval()  # a part that the user froze in evaluation mode
    with pytest.raises(KeyError), evaluation_mode(wrap(model)):
        assert not any(part.training for part in model.modules())
        raise KeyError
    assert [part.training for part in model.modules()] == [True, True, False]
