"""Equal backward passes on two threads of a CPU give equal gradients, whatever a model's own code indexes by."""

from __future__ import annotations

import pytest
import torch
from loss_laws import adds_in_one_order
from torch.utils import deterministic
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from lit_rl.algorithms import GRPO
from lit_rl.algorithms.optim.fixed_order import fixed_order

CPU = torch.device("cpu")


def test_a_mixture_of_experts_learns_the_same_from_the_same_tokens(two_threads: None) -> None:
    """Of 6 backward passes of 1,024 tokens, 8 experts each, all 6 gave other gradients."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=16, hidden_size=32, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=16, num_experts_per_tok=8,
    )  # fmt: skip
    mixture, module = Qwen3MoeForCausalLM(config), GRPO("tiny", lambda completions: [0.0] * len(completions))
    ids = torch.randint(16, (8, 64))
    with pytest.raises(AssertionError, match="IndexBackward0"):
        adds_in_one_order(mixture(input_ids=ids).logits.sum())

    def gradient() -> torch.Tensor:
        mixture.zero_grad()
        module.backward(mixture(input_ids=ids, labels=ids).loss)
        return torch.cat([weight.grad.flatten() for weight in mixture.parameters() if weight.grad is not None])

    first = gradient()
    assert all(torch.equal(first, gradient()) for _ in range(5))


def test_torch_is_left_as_it_was() -> None:
    fills = deterministic.fill_uninitialized_memory
    with pytest.raises(ZeroDivisionError), fixed_order(CPU):
        assert torch.get_deterministic_debug_mode() == 1 and not deterministic.fill_uninitialized_memory
        raise ZeroDivisionError
    assert torch.get_deterministic_debug_mode() == 0 and deterministic.fill_uninitialized_memory == fills
    with fixed_order(torch.device("cuda")):
        assert torch.get_deterministic_debug_mode() == 0


def test_a_users_own_choice_stands() -> None:
    torch.set_deterministic_debug_mode("error")
    try:
        with fixed_order(CPU):
            assert torch.get_deterministic_debug_mode() == 2
        assert torch.get_deterministic_debug_mode() == 2
    finally:
        torch.set_deterministic_debug_mode("default")
