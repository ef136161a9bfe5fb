"""Two real processes, replicated or sharded: each gets the whole weights of the policy, one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dist_equal
import lightning as L
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn

from lit_rl.algorithms.optim.strategies import FSDP2Strategy
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.engine_weights import adapter_only, fingerprint, weight_shapes, whole_weights, write_adapter
from lit_rl.models.sharding import shard, unsharded

pytestmark = [pytest.mark.dist, pytest.mark.all]

KINDS: dict[str, Lora | None] = {
    "full": None,
    "lora": Lora(r=2),
    "dora": Lora(r=2, dora=True),
    "modules": Lora(r=2, targets=["q_proj"], modules_to_save=["down_proj"]),
}
STRATEGIES: dict[str, Any] = {"ddp": "ddp", "fsdp": FSDP2Strategy}


def policy_of(kind: str) -> nn.Module:
    """The same in every process, its adapter no longer without effect."""
    torch.manual_seed(0)
    policy = LanguageModel("tiny", lora=KINDS[kind]).load()
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return policy


class Ships(L.LightningModule):
    """Trains for one step, and ships before and after it."""

    def __init__(self, kind: str, folder: Path) -> None:
        super().__init__()
        self.kind, self.folder, self.policy = kind, folder, policy_of(kind)
        self.got: dict[str, Any] = {}

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, FSDP2Strategy):
            assert self.device_mesh is not None
            shard(self.policy, self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.policy.parameters() if p.requires_grad], lr=1.0)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        # The ranks learn from different tokens, so equal weights were made equal by the strategy.
        tokens = batch.long() + self.global_rank
        return self.policy(input_ids=tokens, labels=tokens).loss

    def on_train_start(self) -> None:
        self.got["first"] = self.shipped()
        with unsharded(self.policy):
            self.got["gathered"] = self.shipped()
        self.got["prints"] = [fingerprint(self.policy), fingerprint(self.policy)]

    def on_train_end(self) -> None:
        self.got["last"] = self.shipped()
        self.got["prints"].append(fingerprint(self.policy))
        self.got["shapes"] = weight_shapes(self.policy)
        if adapter_only(self.policy) is None:
            target = self.folder / f"{self.kind}-adapter"
            write_adapter(self.policy, target)
            self.got["seen"] = sorted(item.name for item in target.iterdir())
        torch.save(self.got, self.folder / f"{self.kind}-{self.global_rank}.pt")

    def shipped(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in whole_weights(self.policy)}


def main(folder: Path) -> None:
    rows = torch.utils.data.DataLoader(torch.arange(5, 37).view(2, 16), batch_size=1)  # pyright: ignore
    for name, strategy in STRATEGIES.items():
        (folder / name).mkdir(exist_ok=True)
        for kind in KINDS:
            made = strategy if isinstance(strategy, str) else strategy()
            dist_equal.trainer(folder, 2, strategy=made, max_steps=1).fit(Ships(kind, folder / name), rows)


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
