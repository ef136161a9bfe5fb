"""References: the KL is 0 before the first update in every mode, and then it is measured to the initial policy."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lit_rl.errors import ConfigError
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.forward import token_logprobs
from lit_rl.models.reference import AdapterBase, Auto, FrozenCopy


def train_a_little(policy: nn.Module) -> None:
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))


def score(policy, reference, module, completions):
    with torch.no_grad(), reference.scoring(policy, module) as scorer:
        return token_logprobs(scorer, completions, temperature=1.0)[0]


@pytest.fixture
def make_policy(make_model, tmp_path):
    """The three kinds of policy: all weights, a fresh LoRA, a LoRA that was trained before."""

    def make(kind: str) -> nn.Module:
        folder = str(make_model(attention_dropout=0.3))
        if kind == "full":
            return LanguageModel(folder).load()
        policy = LanguageModel(folder, lora=Lora(r=2)).load()
        if kind == "fresh":
            return policy
        train_a_little(policy)
        policy.save_pretrained(tmp_path / "adapter")
        return LanguageModel(folder, adapter=str(tmp_path / "adapter")).load()

    return make


CASES = [
    ("full", FrozenCopy(), True),
    ("full", Auto(), True),
    ("fresh", FrozenCopy(), True),
    ("fresh", AdapterBase(), False),
    ("fresh", Auto(), False),
    ("continued", FrozenCopy(), True),
    ("continued", Auto(), True),
]


@pytest.mark.parametrize("kind, reference, second", CASES)
def test_kl_is_zero_at_step_zero_and_the_reference_stays_where_it_was(
    make_policy, make_completions, kind, reference, second
):
    policy = make_policy(kind)
    completions = make_completions([[5, 6, 7], [8]], [[1, 2], [3, 258]])
    reference = copy.deepcopy(reference)
    module = reference.module(policy)
    assert (module is not None) == second
    with torch.no_grad():
        initial = token_logprobs(policy.eval(), completions, temperature=1.0)[0]
    policy.train()
    # Copied weights lie elsewhere in memory, which alone may change the order of sums: not bit for bit.
    torch.testing.assert_close(score(policy, reference, module, completions), initial, rtol=0, atol=2e-6)
    train_a_little(policy)
    torch.testing.assert_close(score(policy, reference, module, completions), initial, rtol=0, atol=2e-6)
    with torch.no_grad():
        moved = token_logprobs(policy.eval(), completions, temperature=1.0)[0]
    assert (moved - initial).abs().max() > 0.01


def test_the_base_of_a_trained_adapter_is_not_where_the_policy_began(make_policy, make_completions):
    policy = make_policy("continued").eval()
    completions = make_completions([[5, 6, 7]], [[1, 2]])
    reference = AdapterBase()
    base = score(policy, reference, reference.module(policy), completions)
    with torch.no_grad():
        now = token_logprobs(policy, completions, temperature=1.0)[0]
    assert (base - now).abs().max() > 0.01


def test_a_frozen_copy_is_frozen_and_copies_only_what_is_trained(make_policy):
    policy = make_policy("fresh")
    module = FrozenCopy().module(policy)
    assert not module.training
    assert not any(p.requires_grad for p in module.parameters())
    theirs = dict(module.named_parameters())
    for name, parameter in policy.named_parameters():
        assert (theirs[name] is parameter) == (not parameter.requires_grad), name
    full = make_policy("full")
    ours = {id(p) for p in full.parameters()}
    assert not any(id(p) in ours for p in FrozenCopy().module(full).parameters())


def test_switching_the_adapters_off_leaves_no_trace(make_policy, make_completions):
    policy = make_policy("continued")
    completions = make_completions([[5, 6, 7]], [[1, 2]])
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    before = token_logprobs(policy.eval(), completions, temperature=1.0)[0]
    policy.train()
    reference = AdapterBase()
    with pytest.raises(RuntimeError, match="inside"), reference.scoring(policy, None) as scorer:
        assert not scorer.training
        raise RuntimeError("inside")
    assert policy.training
    assert {name for name, p in policy.named_parameters() if p.requires_grad} == trained
    assert torch.equal(token_logprobs(policy.eval(), completions, temperature=1.0)[0], before)


def test_adapter_base_needs_adapters(make_policy):
    policy = make_policy("full")
    with pytest.raises(ConfigError, match=r"reference=frozen_copy"):
        AdapterBase().module(policy)
