"""Equal backward passes on two threads of a CPU give equal gradients, whatever a model's own code indexes by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loss_laws import AddsInOneOrder
from torch.utils import deterministic
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from lit_rl.algorithms import GRPO
from lit_rl.models.kernels import fixed_order

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
    with pytest.raises(AssertionError, match="index_put"), AddsInOneOrder():
        mixture(input_ids=ids).logits.sum().backward()

    def gradient() -> torch.Tensor:
        mixture.zero_grad()
        module.backward(mixture(input_ids=ids, labels=ids).loss)
        return torch.cat([weight.grad.flatten() for weight in mixture.parameters() if weight.grad is not None])

    first = gradient()
    assert all(torch.equal(first, gradient()) for _ in range(5))


class Added(torch.autograd.Function):
    """A sum of rows whose own backward pass adds the rows of a table up by ``index_put_``."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor) -> torch.Tensor:
        ctx.table = table
        return table.sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        places = (torch.tensor([0, 0]),)
        return torch.zeros_like(ctx.table).index_put_(places, grads[0].expand(2, 3), accumulate=True)


RACES: dict[str, Callable[[torch.Tensor], Any]] = {
    "an index": lambda x: x[torch.tensor([0, 1, 0])].sum().backward(),
    "take": lambda x: x.take(torch.tensor([0, 0])).sum().backward(),
    "a sum in the forward pass": lambda x: x.detach().index_put((torch.tensor([1, 1]),), x[:2], accumulate=True),
    "put in the forward pass": lambda x: x.detach().put(torch.tensor([1, 1]), x[0, :2], accumulate=True),
    "a function's own backward": lambda x: Added.apply(x).backward(),  # pyright: ignore
    "an assignment": lambda x: x.detach().clone().__setitem__(torch.tensor([1, 1]), 0.0),
}


@pytest.mark.parametrize("race", RACES)
def test_the_law_sees_every_way_to_race(race: str) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(AssertionError, match="put"), AddsInOneOrder():
        RACES[race](x)


def test_the_law_lets_pass_what_adds_in_one_order() -> None:
    x, index = torch.ones(2, 3, requires_grad=True), torch.tensor([0, 1, 0])
    with AddsInOneOrder():
        (x.index_select(0, index).sum() + x[x > 0].sum() + x[torch.tensor([1, 0])].sum()).backward()
        torch.nn.functional.embedding(index, x).sum().backward()


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
