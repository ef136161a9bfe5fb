"""What the pretended GPU refuses and counts, as a real one does."""

from __future__ import annotations

import copy
import io

import pretend
import pytest
import torch
from torch import nn


@pytest.fixture
def events() -> pretend.Ledger:
    pretend.ledger.clear()
    return pretend.ledger


REFUSED = {
    "two devices in a sum": lambda: torch.ones(2, device="cuda") + torch.ones(2),
    "two GPUs in a sum": lambda: torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1"),
    "the host's weight": lambda: nn.Linear(2, 2)(torch.ones(1, 2, device="cuda")),
    "the host's index of gather": lambda: torch.ones(2, 2, device="cuda").gather(1, torch.zeros(2, 1).long()),
    "an index on the device into the host": lambda: torch.ones(2)[torch.zeros(1, device="cuda").long()],
    "the host's mask": lambda: torch.where(torch.ones(2).bool(), torch.ones(2, device="cuda"), 0.0),
    "the host's generator": lambda: torch.rand(2, device="cuda", generator=torch.Generator()),
    "numpy": lambda: torch.ones(2, device="cuda").numpy(),
    "integers in a product": lambda: torch.ones(2, 2, device="cuda").long() @ torch.ones(2, 2, device="cuda").long(),
    "a device that is not there": lambda: torch.ones(1, device="cuda:7"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_gpu_refuses_is_refused(what: str) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        REFUSED[what]()


def test_a_device_that_is_refused_does_not_become_the_current_one() -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.ones(1, device="cuda:7")
        assert torch.cuda.current_device() == 0 and torch.ones(1, device="cuda").device.index == 0


def test_what_adds_in_no_fixed_order_is_refused_where_order_is_asked_for() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="deterministic"):
            torch.ones(3, device="cuda").cumsum(0)
        assert torch.ones(3, device="cuda").long().cumsum(0).tolist() == [1, 2, 3]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("sync", lambda x: x.sum().item()),
        ("sync", lambda x: x.nonzero()),
        ("sync", lambda x: x[x > 0]),
        ("d2h", lambda x: x.cpu()),
        ("d2h", lambda x: x.tolist()),
        ("h2d", lambda x: torch.tensor([1.0, 2.0], device=x.device)),
        ("h2d", lambda x: torch.ones(2).to(x.device)),
        ("h2d", lambda x: x.index_put_((x.long(),), torch.tensor(1.0))),
        ("h2d_async", lambda x: torch.ones(2).to(x.device, non_blocking=True)),
        ("h2d_pinned_async", lambda x: torch.ones(2).pin_memory().to(x.device, non_blocking=True)),
        ("peer", lambda x: x.to("cuda:1")),
        ("nothing", lambda x: (x * 2 + torch.zeros_like(x)).softmax(0)),
    ],
)
def test_waits_and_copies_are_counted(events: pretend.Ledger, kind: str, asked) -> None:
    x = torch.ones(2, device="cuda")
    events.clear()
    asked(x)
    counted = {key[0]: count for key, count in events.events.items()}
    assert counted == ({} if kind == "nothing" else {kind: 1})


def test_a_module_trains_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    here = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 7))
    there = copy.deepcopy(here).to("cuda")
    ids = torch.randint(7, (3, 5))
    for module in (here, there):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(3):
            device = next(module.parameters()).device
            loss = nn.functional.cross_entropy(module(ids.to(device)).flatten(0, 1), ids.to(device).flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    file = io.BytesIO()
    torch.save(there.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for name, weight in here.state_dict().items():
        assert saved[name].is_cuda
        torch.testing.assert_close(saved[name].cpu(), weight)


def test_its_random_numbers_have_a_state_of_their_own() -> None:
    host = torch.get_rng_state()
    state = torch.cuda.get_rng_state()
    first = torch.rand(4, device="cuda")
    assert torch.equal(torch.get_rng_state(), host), "the host's are not drawn from"
    assert not torch.equal(torch.rand(4, device="cuda"), first)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="cuda"), first)
