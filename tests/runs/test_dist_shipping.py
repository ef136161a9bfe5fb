"""Two real processes, replicated or sharded: each gets the whole weights of the policy, one at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dist_shipping import KINDS, STRATEGIES, policy_of
from peft import PeftModel
from safetensors.torch import load_file

from lit_rl.models import LanguageModel
from lit_rl.models.engine_weights import weight_shapes, whole_weights

pytestmark = [pytest.mark.dist, pytest.mark.all]


@pytest.fixture(params=STRATEGIES)
def left(two, request):
    """What each rank got, by the kind of policy."""

    def load(kind: str) -> list[Any]:
        return [torch.load(two / request.param / f"{kind}-{rank}.pt", weights_only=True) for rank in (0, 1)]

    return load


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_gets_the_weights_of_the_whole_policy(left, kind):
    policy = policy_of(kind)
    wanted = dict(whole_weights(policy))
    for rank in left(kind):
        for moment in ("first", "gathered"):
            assert rank[moment].keys() == wanted.keys()
            assert all(torch.equal(tensor, wanted[name]) for name, tensor in rank[moment].items())
        assert list(rank["shapes"].items()) == list(weight_shapes(policy).items())


@pytest.mark.parametrize("kind", KINDS)
def test_after_an_update_every_rank_gets_the_same_new_weights(two, kind):
    ranks = [
        torch.load(two / strategy / f"{kind}-{rank}.pt", weights_only=True)
        for strategy in STRATEGIES
        for rank in (0, 1)
    ]
    for name, before in ranks[0]["first"].items():
        for rank in ranks[1:]:
            torch.testing.assert_close(rank["last"][name], ranks[0]["last"][name], rtol=0, atol=1e-5)
        assert all(torch.equal(rank["last"][name], ranks[i - i % 2]["last"][name]) for i, rank in enumerate(ranks))
        trained = KINDS[kind] is None or "q_proj.weight" in name
        assert not trained or not torch.equal(ranks[0]["last"][name], before), name


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_sees_that_an_update_has_come(left, kind):
    for rank in left(kind):
        first, again, after = rank["prints"]
        assert first == again and first != after


def test_the_adapter_that_rank_0_writes_is_the_one_of_all(left, two, tiny_dir, request):
    strategy = request.node.callspec.params["left"]
    ranks = left("lora")
    assert ranks[0]["seen"] == ranks[1]["seen"] == ["adapter_config.json", "adapter_model.safetensors"]
    folder = two / strategy / "lora-adapter"
    assert all(tensor.dim() == 2 for tensor in load_file(folder / "adapter_model.safetensors").values())
    policy = PeftModel.from_pretrained(LanguageModel(str(tiny_dir)).load(), folder)
    for name, tensor in whole_weights(policy):
        assert torch.equal(tensor, ranks[0]["last"][name])
