"""Bfloat16 weights under float32 masters: the masters are what float32 weights would be."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
from tiers import in_turn
from torch import Tensor, nn

from lit_rl.algorithms import AdamW
from lit_rl.algorithms.optim import master_weights
from lit_rl.algorithms.optim.master_weights import REMAINDER, MasterWeights, with_masters
from lit_rl.algorithms.optim.optimizers import ByPath
from lit_rl.algorithms.optim.schedules import Linear, scheduler_by_group
from lit_rl.algorithms.optim.split_adamw import join
from lit_rl.core.errors import ConfigError

MAKES = {
    "adamw": AdamW(lr=1e-3, weight_decay=0.1),
    "sgd": ByPath("torch.optim.SGD", lr=1e-3),
    "momentum": ByPath("torch.optim.SGD", lr=1e-3, kwargs={"momentum": 0.9}),
    "adafactor": ByPath("torch.optim.Adafactor", lr=1e-3),
    "nadam": ByPath("torch.optim.NAdam", lr=1e-3),
}


def weights(dtype: torch.dtype, seed: int = 0) -> list[nn.Parameter]:
    """A matrix, a vector, and a head that is float32 in any case; every value is one of bfloat16's."""
    source = torch.Generator().manual_seed(seed)
    shapes, dtypes = [(8, 6), (6,), (3,)], [dtype, dtype, torch.float32]
    return [
        nn.Parameter(torch.randn(shape, generator=source).bfloat16().to(of))
        for shape, of in zip(shapes, dtypes, strict=True)
    ]


def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:2], "name": "policy"}, {"params": parameters[2:], "name": "critic", "lr": 1e-2}]


def gradients(step: int, scale: float = 1.0) -> list[Tensor]:
    source = torch.Generator().manual_seed(1000 + step)
    return [scale * torch.randn(shape, generator=source) for shape in [(8, 6), (6,), (3,)]]


def take(optimizer: Any, parameters: list[nn.Parameter], steps: range, schedule: Any = None) -> None:
    for step in steps:
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()


def masters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [master(p.detach(), optimizer.state[p]) for group in optimizer.param_groups for p in group["params"]]


def master(weight: Tensor, state: dict[str, Tensor]) -> Tensor:
    return join(weight, state[REMAINDER]) if REMAINDER in state else weight


def same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, two in zip(ours, theirs, strict=True):
        assert one.dtype == two.dtype and torch.equal(one, two)


@in_turn(make=MAKES.values(), bucket=[1 << 23, 48, 32])
def test_masters_are_what_float32_weights_would_be_and_weights_are_the_masters_rounded(make, bucket, monkeypatch):
    """At every step, to the bit, whether all weights move together, one after another, or a large one in slices."""
    monkeypatch.setattr(master_weights, "BUCKET", bucket)
    ours, theirs = weights(torch.bfloat16), weights(torch.float32)
    narrow, wide = with_masters(make, groups(ours)), with_masters(make, groups(theirs))
    assert isinstance(narrow, MasterWeights) and not isinstance(wide, MasterWeights)
    schedules = [scheduler_by_group(optimizer, 12, [Linear(warmup_steps=2)] * 2) for optimizer in (narrow, wide)]
    for step in range(12):
        take(narrow, ours, range(step, step + 1), schedules[0])
        take(wide, theirs, range(step, step + 1), schedules[1])
        same(masters(narrow), [weight.detach() for weight in theirs])
        same([weight.detach() for weight in ours], [m.to(w.dtype) for m, w in zip(masters(narrow), ours)])
        for weight, other in zip(ours, theirs):
            for name, value in wide.state[other].items():
                assert torch.equal(torch.as_tensor(narrow.state[weight][name]), torch.as_tensor(value)), name
    assert ours[0].dtype == torch.bfloat16 and ours[2].dtype == torch.float32


def test_float32_weights_alone_get_the_optimizer_itself():
    assert type(with_masters(AdamW(), groups(weights(torch.float32)))) is torch.optim.AdamW


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class OneStepSize(torch.optim.SGD):
    """Its steps are as long as the gradients of all weights together are not."""

    def step(self, closure: Any = None) -> Any:
        moved = [weight for group in self.param_groups for weight in group["params"] if weight.grad is not None]
        norm = torch.stack([weight.grad.square().sum() for weight in moved]).sum().sqrt()
        for weight in moved:
            weight.grad = weight.grad / norm
        return super().step(closure)


def test_an_optimizer_that_may_look_at_all_weights_sees_them_together(monkeypatch):
    monkeypatch.setattr(master_weights, "BUCKET", 32)
    make = ByPath(f"{__name__}.OneStepSize", lr=1e-2)
    ours, theirs = weights(torch.bfloat16), weights(torch.float32)
    narrow, wide = with_masters(make, groups(ours)), with_masters(make, groups(theirs))
    take(narrow, ours, range(3))
    take(wide, theirs, range(3))
    same(masters(narrow), [weight.detach() for weight in theirs])


def test_an_optimizer_that_computes_the_loss_several_times_is_refused():
    with pytest.raises(ConfigError, match=r"optimizer\.path=torch\.optim\.LBFGS.*trainer\.precision=32-true"):
        with_masters(ByPath("torch.optim.LBFGS"), [{"params": weights(torch.bfloat16)[:2]}])


def live() -> int:
    """Bytes of all tensors."""
    found = (thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter))
    return sum({s._cdata: s.nbytes() for s in (tensor.untyped_storage() for tensor in found)}.values())


@pytest.mark.parametrize("slices", [1, 4])
def test_masters_are_there_while_they_are_moved_and_a_weight_takes_sixteen_bytes(monkeypatch, slices):
    gc.collect()
    before, n, small = live(), 2**20, 2**10
    monkeypatch.setattr(master_weights, "BUCKET", n // slices)
    parameters = [nn.Parameter(torch.zeros(n, dtype=torch.bfloat16)) for _ in range(3)]
    optimizer = with_masters(AdamW(lr=1e-3), [{"params": parameters}])
    assert isinstance(optimizer, MasterWeights)
    seen: list[int] = []
    optimizer.inner.register_step_post_hook(lambda *_: seen.append(live() - before))
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones(n)
        optimizer.step()
        assert live() - before == pytest.approx(16 * 3 * n, abs=small)
    second = seen[3 * slices :]
    assert second == pytest.approx([16 * 3 * n + 4 * n // slices] * 3 * slices, abs=small), "and the master of one"
    optimizer.zero_grad()
    assert live() - before == pytest.approx(12 * 3 * n, abs=small)


def test_weights_without_gradients_stay_to_the_bit_and_keep_nothing():
    parameters = weights(torch.bfloat16)
    optimizer = with_masters(AdamW(lr=1e-3, weight_decay=0.1), groups(parameters))
    before = parameters[1].detach().clone()
    for step in range(3):
        parameters[0].grad = gradients(step)[0]
        optimizer.step()
    assert torch.equal(parameters[1], before) and set(optimizer.state) == {parameters[0]}
    assert parameters[0].grad is not None, "it is the caller's"


def test_a_state_of_float32_weights_is_taken_and_the_masters_are_the_weights():
    wide = weights(torch.float32)
    of_float32 = with_masters(AdamW(lr=1e-3), groups(wide))
    take(of_float32, wide, range(3))
    narrow = [nn.Parameter(w.detach().to(d)) for w, d in zip(wide, [torch.bfloat16, torch.bfloat16, torch.float32])]
    optimizer = with_masters(AdamW(lr=1e-3), groups(narrow))
    optimizer.load_state_dict(copy.deepcopy(of_float32.state_dict()))
    assert all(state["exp_avg"].dtype == torch.float32 for state in optimizer.state.values())
    take(optimizer, narrow, range(3, 4))
    moved = (masters(optimizer)[0] - wide[0].detach().bfloat16().float()).abs()
    assert 0 < moved.max() < 1.1e-3


def test_a_step_without_gradients_moves_neither_weights_nor_masters_nor_moments():
    parameters = weights(torch.bfloat16)
    optimizer = with_masters(AdamW(lr=1e-3), groups(parameters))
    take(optimizer, parameters, range(2))
    before = through_a_file(optimizer.state_dict()["state"])
    optimizer.zero_grad()
    optimizer.step()
    after = optimizer.state_dict()["state"]
    for key, state in before.items():
        assert all(torch.equal(value, after[key][name]) for name, value in state.items())


def test_gradients_of_several_backward_passes_are_summed_in_float32():
    """In bfloat16 a sum of 1 and of ten times 1/512 would stay 1: half of the distance to the next value is 1/256."""
    (weight,) = parameters = [nn.Parameter(torch.ones(4, dtype=torch.bfloat16))]
    optimizer = with_masters(AdamW(lr=1e-3), [{"params": parameters}])
    for factor in [1.0] + [2**-9] * 10:
        (weight * factor).sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad, torch.full((4,), 1 + 10 * 2**-9))
    optimizer.zero_grad()
    assert weight.grad is None


def test_the_norm_that_clips_is_that_of_float32_gradients():
    parameters = weights(torch.bfloat16)
    with_masters(AdamW(lr=1e-3), groups(parameters))
    for parameter, gradient in zip(parameters, gradients(0), strict=True):
        parameter.grad = gradient
    norm = nn.utils.clip_grad_norm_(parameters, 0.01)
    assert torch.isclose(norm, torch.cat([g.flatten() for g in gradients(0)]).norm(), rtol=1e-6)
    clipped = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    assert clipped.dtype == torch.float32 and clipped.norm() == pytest.approx(0.01, rel=1e-3)


def test_small_steps_add_up_where_bfloat16_alone_loses_them():
    ours, theirs, lost = weights(torch.bfloat16), weights(torch.float32), weights(torch.bfloat16)
    before = theirs[0].detach().clone()
    make = AdamW(lr=1e-6)
    narrow, wide = with_masters(make, groups(ours)), with_masters(make, groups(theirs))
    plain = torch.optim.AdamW([lost[0]], lr=1e-6, weight_decay=0.0)
    for step in range(10):
        lost[0].grad = gradients(step)[0].bfloat16()
        plain.step()
    take(narrow, ours, range(10))
    take(wide, theirs, range(10))
    moved = theirs[0].detach() - before
    assert torch.equal(masters(narrow)[0] - before, moved) and moved.ne(0).all()
    assert (lost[0].detach().float() != before).float().mean() < 0.1
