"""How often a micro-batch makes the host wait for the device: where a size or a choice depends on its numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import lightning as L
import pytest
import torch
from offline_cuts import PAIRS
from small_rollouts import trainer
from torch.utils._python_dispatch import TorchDispatchMode

from lit_rl.algorithms import DPO, GRPO
from lit_rl.data.datamodule import RolloutDataModule
from lit_rl.data.offline.datamodule import PreferenceDataModule
from lit_rl.data.tasks import Addition
from lit_rl.models import LanguageModel
from lit_rl.rollout import Completions, Sampling, select, used_columns, used_columns_of_parts

WAITS = {"_local_scalar_dense", "nonzero", "equal", "_unique2", "masked_select", "is_nonzero"}


class Waits(TorchDispatchMode):
    """Counts operations whose result, or its size, the host has to know. It does not see `tolist` on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation._schema.name.removeprefix("aten::")
        by_mask = name == "index" and any(at is not None and at.dtype == torch.bool for at in args[1])
        if name in WAITS or by_mask:
            self.seen["index by a mask" if by_mask else name] += 1
        return operation(*args, **(kwargs or {}))


class Watched(L.Callback):
    """Counts inside each training step."""

    def __init__(self) -> None:
        self.steps: list[Counter[str]] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        real = pl_module.training_step

        def watched(batch: Any, batch_idx: int) -> Any:
            with Waits() as waits, pytest.MonkeyPatch.context() as patch:
                tolist = torch.Tensor.tolist
                patch.setattr(torch.Tensor, "tolist", lambda t: waits.seen.update(["tolist"]) or tolist(t))
                loss = real(batch, batch_idx)
            self.steps.append(waits.seen)
            return loss

        pl_module.training_step = watched  # pyright: ignore[reportAttributeAccessIssue]


def by_characters(completions: list[str]) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


def grpo() -> tuple[Any, Any]:
    data = RolloutDataModule(task=Addition(max_operand=99, val_rows=4), prompts_per_rollout=8)
    # An accelerator does not fold its attention, whose groups are known to the host.
    model = LanguageModel("tiny", folded_attention=False)
    return GRPO(model, by_characters, group_size=8, beta=0.1, sampling=Sampling(max_new_tokens=8)), data


def dpo() -> tuple[Any, Any]:
    return DPO("tiny"), PreferenceDataModule(rows=PAIRS, batch_size=8, val_fraction=0.0)


@pytest.mark.parametrize(
    ("made", "most"),
    [
        # Which prompts are the same (2), how rows are cut by length (1), which tokens are scored (1 a pass), and what
        # transformers asks of the attention mask of a pass.
        (grpo, {"_unique2": 1, "nonzero": 2, "_local_scalar_dense": 3, "tolist": 1}),
        # Which columns and which tokens are scored, of the policy and of the reference; how rows are cut by length.
        (dpo, {"nonzero": 4, "_local_scalar_dense": 4, "tolist": 2}),
    ],
    ids=["grpo", "dpo"],
)
def test_a_micro_batch_waits_for_the_device_only_to_shape_its_forward_pass(tmp_path, made, most):
    module, data = made()
    watched = Watched()
    trainer(tmp_path, max_steps=2, accumulate_grad_batches=4, callbacks=[watched]).fit(module, datamodule=data)
    assert len(watched.steps) == 8
    for seen in watched.steps[1:4]:  # the first one works out what is dealt to all slots
        assert not {name: n for name, n in seen.items() if n > most.get(name, 0)}, seen


def test_columns_of_many_parts_are_those_of_each():
    draw = torch.Generator().manual_seed(0)
    prompt, response = (torch.arange(w) < torch.randint(w + 1, (12, 1), generator=draw) for w in (5, 7))
    drawn = Completions(
        prompt_ids=torch.ones(12, 5, dtype=torch.long),
        prompt_mask=prompt.flip(1),
        response_ids=torch.ones(12, 7, dtype=torch.long),
        response_mask=response,
        sampler_logprobs=torch.zeros(12, 7),
        ended=torch.ones(12, dtype=torch.bool),
        group_id=torch.arange(12),
    )
    parts = [torch.tensor([row]) for row in range(12)] + [torch.tensor([3, 1]), torch.arange(12)]
    assert used_columns_of_parts(drawn, parts) == [used_columns(select(drawn, rows)) for rows in parts]
    for rows, used in zip(parts, used_columns_of_parts(drawn, parts), strict=True):
        prompt_columns, response_columns = used.values()
        mine = select(drawn, rows)
        assert not mine.prompt_mask[:, : prompt_columns.start].any()
        assert not mine.response_mask[:, response_columns.stop :].any()
        assert prompt_columns.start == 5 or mine.prompt_mask[:, prompt_columns.start].any()
        assert response_columns.stop == 1 or mine.response_mask[:, response_columns.stop - 1].any()
