"""The budget of waits for the device outside generation: the table in docs/speed.md is what this holds.

A figure is a slope: two short runs that differ in one number, so that what a run begins and ends with is not in it.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from pretend import ledger
from small_rollouts import completions

from lit_rl import DPO, GRPO, KTO, PPO, SFT, RewardModeling
from lit_rl.algorithms.evaluation.validation import Evaluation
from lit_rl.algorithms.rollouts.checkpoints import to_device_dataclass
from lit_rl.core.examples import TokenBatch
from lit_rl.core.rollout import Sampling, join_completions, select, trim
from lit_rl.core.transfers import to_host
from lit_rl.data.example_module import PreferenceDataModule, SupervisedDataModule
from lit_rl.data.prompt_module import RolloutDataModule

pytestmark = pytest.mark.all

TABLE = Path(__file__).parents[2] / "docs/speed.md"
PROMPTS = [{"prompt": f"{n}+{1000 * (n % 3)}="} for n in range(64)]
ANSWERS = [" " + "7" * (1 + n % 5) for n in range(64)]
TEXTS = [{"prompt": f"{n}+1=", "completion": answer} for n, answer in enumerate(ANSWERS)]
PAIRS = [{"prompt": f"{n}+1=", "chosen": answer, "rejected": " 12"} for n, answer in enumerate(ANSWERS)]
VERDICTS = [{**row, "label": n % 2 == 0} for n, row in enumerate(TEXTS)]

Made = tuple[Any, Any]
Waits = Counter[tuple[str, ...]]


def graded(completions: list[str]) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


def on_policy(method: Any, **settings: Any) -> Made:
    module = method("tiny", graded, group_size=4, sampling=Sampling(max_new_tokens=6), **settings)
    return module, RolloutDataModule(PROMPTS, prompts_per_rollout=8, val_fraction=0.25, val_batch_size=4)


def offline(method: Any, data: Any, rows: Any, **settings: Any) -> Made:
    return method("tiny"), data(rows, batch_size=8, val_fraction=0, **settings)


METHODS: dict[str, Callable[[], Made]] = {
    "GRPO with a reference": partial(on_policy, GRPO, beta=0.1),
    "PPO": partial(on_policy, PPO, iterations=1, minibatches=1),
    "DPO": partial(offline, DPO, PreferenceDataModule, PAIRS),
    "KTO": partial(offline, KTO, PreferenceDataModule, VERDICTS),
    "SFT": partial(offline, SFT, SupervisedDataModule, TEXTS),
    "SFT, packed": partial(offline, SFT, SupervisedDataModule, TEXTS, packing="best_fit", max_length=16),
    "reward model": partial(offline, RewardModeling, PreferenceDataModule, PAIRS),
}


def waits(folder: Path, made: Made, *, validate: bool = False, **settings: Any) -> Waits:
    """Return how often each place of a run waited for the device; places in generation are left out."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    told = {"log_every_n_steps": 1, "limit_val_batches": 0, **quiet, "enable_model_summary": False, **settings}
    trainer = L.Trainer(accelerator="auto", devices=1, default_root_dir=folder, **told)
    ledger.clear()
    (trainer.validate if validate else trainer.fit)(made[0], datamodule=made[1])
    found: Waits = Counter()
    for (kind, operator, *frames), count in ledger.events.items():
        drawn = any(file.startswith("lit_rl/generation/") for file, _, _ in frames)
        if kind in ledger.WAITING and not drawn:
            found[kind, operator, *(f"{file}:{line} {name}" for file, line, name in frames[-4:])] += count
    return found


def slope(fewer: Waits, more: Waits, by: int) -> dict[tuple[str, ...], float]:
    """Return the waits for each of what the second run has more of, by place."""
    return {place: (more[place] - fewer[place]) / by for place in {*fewer, *more} if more[place] != fewer[place]}


def budget(row: str) -> float:
    """Return what the table in docs/speed.md allows: its last column."""
    found = re.search(rf"^\| {re.escape(row)} \| ([0-9.]+) \|$", TABLE.read_text(), re.MULTILINE)
    assert found, f"{TABLE.name} has no row {row!r}"
    return float(found[1])


def hold(row: str, found: dict[tuple[str, ...], float]) -> None:
    places = sorted(found.items(), key=lambda item: -item[1])
    total, lines = sum(found.values()), [f"{count:6.2f}  {' < '.join(place)}" for place, count in places]
    assert total <= budget(row), "\n".join([f"{row}: {total:g} waits, and {budget(row):g} are allowed", *lines])
    assert total >= budget(row) - 0.5, f"{row}: {total:g} waits are left of {budget(row):g}: lower the number"


@pytest.mark.parametrize("method", METHODS)
def test_no_micro_batch_waits_for_the_device(method: str, tmp_path: Path) -> None:
    two, four = (waits(tmp_path, METHODS[method](), max_steps=2, accumulate_grad_batches=cut) for cut in (2, 4))
    hold(f"micro-batch, {method}", slope(two, four, 2 * (4 - 2)))


@pytest.mark.parametrize("method", ["GRPO with a reference", "PPO"])
def test_waits_of_a_rollout_with_its_step_and_its_line(method: str, tmp_path: Path) -> None:
    two, four = (waits(tmp_path, METHODS[method](), max_steps=steps) for steps in (2, 4))
    hold(f"rollout, {method}", slope(two, four, 4 - 2))


def test_waits_of_an_optimizer_step_and_of_a_line_of_the_log(tmp_path: Path) -> None:
    two, four, often = (
        waits(tmp_path, METHODS["SFT"](), max_steps=steps, log_every_n_steps=every)
        for steps, every in ((2, 9), (4, 9), (4, 1))
    )
    hold("optimizer step", slope(two, four, 4 - 2))
    hold("line of the log", slope(four, often, 4 - 1))  # the run without lines has one at its end


def test_waits_of_a_validation(tmp_path: Path) -> None:
    def validated(prompts: int, batches: int) -> Waits:
        module, data = on_policy(GRPO, evaluation=Evaluation(group_size=2))
        data.val_batch_size = prompts
        return waits(tmp_path, (module, data), validate=True, limit_val_batches=batches)

    narrow, wide, twice = validated(4, 1), validated(8, 1), validated(4, 2)
    hold("validated prompt", slope(narrow, wide, 8 - 4))
    hold("batch of a validation", slope(narrow, twice, 1))


def test_tensors_of_many_types_cross_in_one_transfer() -> None:
    made = [torch.rand(3, 2), torch.tensor(True), torch.arange(5), torch.rand(2, dtype=torch.float64), torch.ones(0)]
    made += [torch.rand(4, 6)[:, ::2], torch.tensor([True, False, True]), torch.rand(3, dtype=torch.bfloat16)]
    there = [each.cuda() for each in made]
    ledger.clear()
    found = to_host([there[0], made[2], *there[1:]])
    assert ledger.waits() == 1
    assert found.pop(1) is not made[2]  # without gradient, and in its place
    assert all(torch.equal(one, two) and one.dtype == two.dtype for one, two in zip(found, made, strict=True))


def test_a_copy_on_the_host_goes_along_with_its_rows_and_is_none_of_other_columns() -> None:
    there = to_device_dataclass(completions([3, 1, 2, 4], 2), torch.device("cuda")).with_host()
    rows = torch.tensor([1, 2])
    ledger.clear()
    part = trim(select(there, rows))
    assert part.on_host.response_ids.shape == part.response_ids.shape == (2, 2) and ledger.waits() == 0
    assert torch.equal(part.on_host.response_ids, part.response_ids.cpu())
    other = dataclasses.replace(part, response_mask=~part.response_mask)
    assert torch.equal(other.on_host.response_mask, other.response_mask.cpu())
    joined = join_completions(part, there)
    assert torch.equal(joined.on_host.response_ids, joined.response_ids.cpu())
    mask = torch.tensor([[True, True], [True, False]])
    texts = TokenBatch(torch.ones(2, 2, dtype=torch.long), mask, mask).to("cuda")
    ledger.clear()
    assert texts.take(torch.tensor([1]), 1).on_host.attention_mask.tolist() == [[True]] and ledger.waits() == 0
    assert dataclasses.replace(texts, loss_mask=~texts.loss_mask).on_host.loss_mask.tolist() == (~mask).tolist()
