"""Losses that couple the rows of a step: each rank sees all of them, and the shares add up to the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from offline_cuts import PAIRS, VERDICTS, data_of, loaded, micro_batches
from small_rollouts import Ranks as Threads
from small_rollouts import trainer as quiet_trainer
from torch import Tensor

from lit_rl.algorithms import BCO, CPO, DPO, KTO
from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.terms.whole_step import WholeStep, micro_batch_share
from lit_rl.core.examples import ExampleBatch, TokenBatch, Totals
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import PreferenceDataModule
from lit_rl.data.tasks import AdditionPairs
from lit_rl.models import LanguageModel
from lit_rl.ops.preference_losses import aot, aot_unpaired

VALUES = torch.tensor([3.0, -1.0, 2.0, 0.5, -2.0, 4.0, 1.0, -0.5])


def coupled(x: Tensor) -> Tensor:
    """Every row's loss depends on all rows."""
    return (x.unsqueeze(0) - 2 * x.unsqueeze(1)).square().mean(1) * x


def micro(rows: list[int], slot: int, shares: int) -> ExampleBatch:
    mask = torch.ones(len(rows), 2, dtype=torch.bool)
    return ExampleBatch(TokenBatch(mask.long(), mask, mask), rows, Totals(8, 8, 16, shares), slot=slot)


def step_of(rank: int, ranks: int, slots: int) -> list[ExampleBatch]:
    share = len(VALUES) // ranks
    size = share // slots
    starts = [rank * share + slot * size for slot in range(slots)]
    parts = [micro(list(range(start, start + size)), slot, ranks * slots) for slot, start in enumerate(starts)]
    parts[0].whole = tuple(parts)
    return parts


def shares(run: Ranks, slots: int) -> tuple[Tensor, Tensor]:
    """Loss and gradient of this rank's rows, one micro-batch after another."""
    x = VALUES.clone().requires_grad_()
    policy = torch.nn.Linear(1, 1)

    def look(batch: ExampleBatch) -> dict[str, Tensor]:
        assert policy.training and not torch.is_grad_enabled()
        return {"x": x[batch.rows]}

    parts = step_of(run.rank, run.world_size, slots)
    whole = WholeStep.of(look, parts[0], run)
    assert policy.training
    torch.testing.assert_close(whole.columns["x"], VALUES)
    total = torch.stack([micro_batch_share(coupled, batch, whole, x=x[batch.rows]).sum() for batch in parts]).sum()
    total.backward()
    assert x.grad is not None
    return total.detach(), x.grad


def expected() -> tuple[Tensor, Tensor]:
    x = VALUES.clone().requires_grad_()
    loss = coupled(x).sum()
    loss.backward()
    assert x.grad is not None
    return loss.detach(), x.grad


@pytest.mark.parametrize(("ranks", "slots"), [(1, 1), (1, 2), (1, 8), (2, 1), (2, 2), (4, 2), (2, 4)])
def test_shares_add_up_to_the_whole(ranks: int, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Threads(ranks)
    monkeypatch.setattr(torch.distributed, "all_reduce", group.all_reduce)
    # Autograd's mode belongs to a thread, and every rank is one.
    found = group.run(lambda module: shares(module.ranks, slots))
    loss, gradient = expected()
    torch.testing.assert_close(torch.stack([part for part, _ in found]).sum(), loss)
    torch.testing.assert_close(torch.stack([part for _, part in found]).sum(0), gradient)


def test_each_row_gets_the_gradient_of_all_rows() -> None:
    """Not only that of its own loss: the shares of a micro-batch are not what it would learn by itself."""
    alone = torch.stack([coupled(VALUES[i : i + 2]).sum() for i in range(0, 8, 2)]).sum()
    assert shares(Ranks(), 4)[0] != pytest.approx(alone.item())


def test_a_step_of_one_micro_batch_needs_no_look() -> None:
    module = loaded(DPO("tiny", preference=aot, beta=0.5, sampling=Sampling(max_new_tokens=2)))
    ((batch,),) = micro_batches(data_of(PAIRS, "pairs"), 1)
    columns = module.columns(batch, module.text_scores(batch.tokens))
    torch.testing.assert_close(module.loss(batch)[0], aot(module.pairs(columns, batch), 0.5).mean())


def test_a_column_of_another_type_is_taken_up_in_the_whole_steps() -> None:
    whole = WholeStep({"x": VALUES}, first=0)
    batch = micro([2, 3], 1, 4)
    live = torch.tensor([2.0, 0.5], dtype=torch.bfloat16, requires_grad=True)
    joined = whole.with_gradient(batch, x=live)["x"]
    assert joined.dtype == torch.float32 and joined.requires_grad
    torch.testing.assert_close(joined.detach(), VALUES)


def test_the_step_is_looked_at_in_the_precision_that_it_is_taken_in(tmp_path):
    """Lightning opens autocast for `training_step` only; cut or not, a step must see the same numbers."""
    seen = []

    class Watched(L.Callback):
        def on_train_start(self, trainer, pl_module):
            look = pl_module.step_columns
            pl_module.step_columns = lambda batch: seen.append(torch.is_autocast_enabled("cpu")) or look(batch)

    module = DPO("tiny", preference=aot, sampling=Sampling(max_new_tokens=2))
    data = PreferenceDataModule(task=AdditionPairs(max_operand=6, val_rows=2), batch_size=4)
    trainer = quiet_trainer(
        tmp_path,
        precision="bf16-mixed",
        max_steps=1,
        accumulate_grad_batches=2,
        use_distributed_sampler=False,
        callbacks=[Watched()],
    )
    trainer.fit(module, datamodule=data)
    assert seen == [True, True]


# ---------------------------------------------------------------- dropout


def with_dropout(algorithm: Any, **settings: Any) -> Any:
    model = LanguageModel("tiny", init_kwargs={"attention_dropout": 0.4})
    return algorithm(model, sampling=Sampling(max_new_tokens=2), **settings)


COUPLED: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "aot": (DPO, {"preference": aot}, PAIRS),
    "aot_unpaired": (CPO, {"preference": aot_unpaired}, PAIRS),
    "bco": (BCO, {}, VERDICTS),
}


@pytest.mark.parametrize("name", COUPLED)
def test_a_row_is_the_same_to_others_and_in_its_own_loss(name: str, tmp_path: Path) -> None:
    """In a real run, through Lightning: each forward pass with gradient has the dropout of the look before it."""
    algorithm, settings, rows = COUPLED[name]
    module, passes = with_dropout(algorithm, **settings), []
    scores = module.text_scores

    def watched(tokens: Any, **more: Any) -> Any:
        found = scores(tokens, **more)
        passes.append((found.logprobs.requires_grad, module.policy.training, found.logprobs.detach().clone()))
        return found

    module.text_scores = watched
    data = PreferenceDataModule(rows=rows, batch_size=8, val_fraction=0.0)
    trainer = quiet_trainer(
        tmp_path, max_steps=2, accumulate_grad_batches=4, max_epochs=2, use_distributed_sampler=False
    )
    trainer.fit(module, datamodule=data)
    assert [gradient for gradient, _, _ in passes] == 2 * (4 * [False] + 4 * [True])
    assert all(training for _, training, _ in passes)
    for first in (0, 8):
        for looked, learned in zip(passes[first : first + 4], passes[first + 4 : first + 8], strict=True):
            torch.testing.assert_close(learned[2], looked[2])
    assert not torch.equal(passes[0][2], passes[8][2])


@pytest.mark.parametrize("accumulate", [2, 4])
def test_a_cut_step_is_the_whole_one_of_the_same_dropout(accumulate: int) -> None:
    """The shares of the micro-batches add up to the loss of all rows at once, in value and in gradient."""
    module = loaded(with_dropout(DPO, preference=aot, beta=0.5))
    module.policy.train()
    (batches,) = micro_batches(data_of(PAIRS, "pairs"), accumulate)
    trained = list(module.policy.parameters())
    whole = WholeStep.of(module.step_columns, batches[0], Ranks())
    after = torch.get_rng_state()
    assert not torch.equal(
        whole.columns["chosen"], WholeStep.of(module.step_columns, batches[0], Ranks()).columns["chosen"]
    )  # it acts
    columns, losses = [], []
    for batch in batches:
        whole.draw_again(batch)
        losses.append(module.loss(batch, whole)[0])
    assert torch.equal(torch.get_rng_state(), after)  # no draw is wasted, and none comes twice
    for batch in batches:
        whole.draw_again(batch)
        columns.append(module.columns(batch, module.text_scores(batch.tokens)))
    joined = {name: torch.cat([part[name] for part in columns]) for name in columns[0]}
    at_once = aot(module.pairs(joined, batches[0]), 0.5).mean()
    cut = torch.stack(losses).sum()
    torch.testing.assert_close(cut, at_once)
    slopes = [torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)]) for loss in (cut, at_once)]
    assert slopes[1].norm() > 0 and (slopes[0] - slopes[1]).norm() <= 1e-5 * slopes[1].norm()


def test_a_look_that_draws_nothing_takes_nothing_back() -> None:
    """KTO's baseline is taken without dropout: its micro-batches must not all draw the same."""
    module = loaded(with_dropout(KTO))
    module.policy.train()
    (batches,) = micro_batches(data_of(VERDICTS, "verdicts"), 4)
    before = torch.get_rng_state()
    whole = WholeStep.of(module.step_columns, batches[0], Ranks())
    assert whole.noise == (None,) * 4 and torch.equal(torch.get_rng_state(), before)
    module.loss(batches[0], whole)
    between = torch.get_rng_state()
    whole.draw_again(batches[1])
    assert torch.equal(torch.get_rng_state(), between) and not torch.equal(between, before)
