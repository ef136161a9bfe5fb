"""What a run says of its speed: the operations that it counts are those that its steps execute."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from small_rollouts import trainer
from torch.utils.flop_counter import FlopCounterMode

from lit_rl.algorithms import DPO, GRPO
from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.rollouts import phase_costs
from lit_rl.algorithms.rollouts.phase_costs import CARDS, PHASES, RunCosts, UpdateWork, is_speed, peak_of
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import PreferenceDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.model_costs import Span
from lit_rl.reports import metric_groups


def by_characters(completions: list[str]) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


def grpo(model: LanguageModel) -> tuple[Any, Any]:
    """Prompts of one length, and completions of one length: nothing is padding."""
    data = RolloutDataModule(task=Addition(max_operand=9, val_rows=4), prompts_per_rollout=4)
    sampling = Sampling(max_new_tokens=8, min_new_tokens=8)
    return GRPO(model, by_characters, group_size=4, sampling=sampling, log_entropy=False), data


def dpo(model: LanguageModel) -> tuple[Any, Any]:
    rows = [{"prompt": f"{i}+{i}=", "chosen": f"{2 * i}", "rejected": f"{9 - 2 * i}"} for i in range(5)]
    return DPO(model), PreferenceDataModule(rows=rows, batch_size=5, val_fraction=0.0)


def _added(total: Any, left: Any, right: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


IN_PLACE = {torch.ops.aten.addmm_: _added}
"""A product that is added to what is there: the gradient of a fused head. Torch leaves it out."""


class Counted(L.Callback):
    """Counts with torch what training steps and their backward passes execute, and with the module what it says.

    Not in the first step, in which trials of two tokens find out what a model can do.
    """

    def __init__(self) -> None:
        self.executed, self.said, self.learned = 0, 0.0, 0

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._counting(pl_module, "training_step")
        self._counting(pl_module, "backward")
        add = pl_module.costs.add

        def said(work: UpdateWork) -> None:
            if trainer.global_step > 0:
                self.said, self.learned = self.said + work.flops, self.learned + int(work.learned)
            add(work)

        pl_module.costs.add = said

    def _counting(self, module: Any, name: str) -> None:
        real = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
                found = real(*args, **kwargs)
            rotary = (sum(ops.values()) for at, ops in counter.get_flop_counts().items() if at.endswith("rotary_emb"))
            self.executed += (counter.get_total_flops() - sum(rotary)) * (module.global_step > 0)
            return found

        setattr(module, name, counted)


@pytest.mark.parametrize(("made", "shares", "lora"), [(grpo, True, None), (grpo, False, Lora(r=2)), (dpo, False, None)])
def test_a_step_executes_what_it_says(tmp_path, monkeypatch, made, shares, lora):
    """Eager attention multiplies whole squares of scores, where the formula has the pairs that a mask lets meet; and a
    fused head computes the logits of many tokens a second time, which is left out."""
    monkeypatch.setattr(Span, "pairs", lambda span, window=None: span.new * (span.past + span.new))
    speedups = {"shared_prompts": shares, "folded_attention": False}
    module, data = made(LanguageModel("tiny", attn_implementation="eager", speedups=speedups, lora=lora))
    counted = Counted()
    trainer(tmp_path, max_steps=2, callbacks=[counted]).fit(module, datamodule=data)
    (flops,) = module.costs.flops
    again = flops.scored.forward * counted.learned if made is grpo else 0
    assert 0 < counted.said == counted.executed - again


CPU = torch.device("cpu")


def line(costs: RunCosts, *, devices: int = 1, **given: Any) -> dict[str, float]:
    """With what a line of one process on one device has."""
    strategy = SimpleNamespace(root_device=CPU)
    trainer = SimpleNamespace(world_size=devices, precision="32-true", strategy=strategy)
    costs.memory.held = given.pop("held", {})
    default = {"seconds": {"generate": 1.0, "update": 2.0}}
    return costs.take_metrics(given.pop("ranks", Ranks()), trainer, "float32", **{**default, **given})


def test_a_line_by_hand(monkeypatch):
    clock = iter([100.0, 110.0, 115.0])
    monkeypatch.setattr(phase_costs.time, "perf_counter", lambda: next(clock))
    told = RunCosts()
    told.begin()
    told.add(UpdateWork(3e12, 40))
    told.restart()  # a rollout that was given up
    told.add(UpdateWork(6e12, 40))
    told.add(UpdateWork(2e12, 10))
    seconds = {"generate": 4.0, "reward": 0.0, "score": 1.5, "update": 2.0}
    held = {"generate": 2**30, "update": 3 * 2**29}
    monkeypatch.setattr(phase_costs, "peak_of", lambda *_, **__: 8e12)
    assert line(told, seconds=seconds, sampled=60, held=held, devices=2) == {
        "memory/generate": 1.0,
        "memory/update": 1.5,
        "tokens_per_second_per_device/generate": 60 / 4 / 2,
        "tokens_per_second_per_device/update": 50 / 2 / 2,
        "tflops_per_second": 2.0,
        "mfu": 0.25,
        "idle_share": pytest.approx(0.25),
    }
    # The next line is of what came since; nothing is said of what is not known.
    assert line(told, seconds={"generate": 0.0, "update": 4.0}) == {"idle_share": pytest.approx(0.2)}


def test_work_is_summed_and_memory_is_the_most_of_any_rank():
    class Two(Ranks):
        def objects(self, mine: Any) -> list[Any]:
            work, held = mine
            return [mine, (UpdateWork(2 * work.flops, 3 * work.learned), {**held, "update": 5 * held["update"]})]

    told = RunCosts()
    told.add(UpdateWork(1e12, 10))
    found = line(told, ranks=Two(), held={"generate": 2**30, "update": 2**30}, devices=2)
    assert (found["tflops_per_second"], found["tokens_per_second_per_device/update"]) == (3 / 2 / 2, 40 / 2 / 2)
    assert (found["memory/generate"], found["memory/update"]) == (1.0, 5.0)


def test_the_work_of_an_update_is_of_the_policy_and_of_trunks_beside_it():
    policy, spans = LanguageModel("tiny").load(), [Span(0, 6)]
    alone, costs = RunCosts(), RunCosts()
    of_policy = alone.flops_of_update([policy], spans, spans, 4)
    beside = torch.nn.Module()
    beside.trunk = policy
    assert costs.flops_of_update([policy, beside], spans, spans, 4) == 2 * of_policy > 0
    assert alone.flops_of_update([policy], spans, spans, 4, reads=1) > of_policy
    assert RunCosts().flops_of_update([torch.nn.Linear(2, 2)], spans, spans, 4) == 0


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", (989.4, 66.9)),
        ("NVIDIA H100 PCIe", (756, 51.2)),
        ("NVIDIA H200", (989.4, 66.9)),
        ("NVIDIA H100 NVL", (835, None)),
        ("NVIDIA B200", (2250, None)),
        ("NVIDIA A100-SXM4-80GB", (312, 19.5)),
        ("NVIDIA L40S", (362, None)),
        ("NVIDIA L4", (121, 30.3)),
        ("NVIDIA A10", (125, 31.2)),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA A1000", None),
        ("NVIDIA GB200", None),
    ],
)
def test_the_peak_of_a_card_by_its_name(monkeypatch, name, tera):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    device, found = torch.device("cuda", 0), {}
    for precision in ("highest", "high"):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda said=precision: said)
        found[precision] = [peak_of(device, half=half) for half in (True, False)]
    if tera is None:
        assert found == {"highest": [None, None], "high": [None, None]}
    else:
        half, single = (None if each is None else pytest.approx(each * 1e12) for each in tera)
        assert found == {"highest": [half, single], "high": [half, pytest.approx(tera[0] * 5e11)]}
    assert peak_of(CPU, half=True) is None


def test_the_peaks_of_cards_are_those_of_other_projects(monkeypatch):
    """TRL's in half precision, Lightning's in float32 where it finds the card."""
    from lightning.fabric.utilities.throughput import get_available_flops
    from trl.trainer.utils import get_peak_flops

    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    monkeypatch.setattr("lightning.fabric.accelerators.cuda._is_ampere_or_later", lambda: True)
    for part in CARDS:
        name = "NVIDIA H100 80GB HBM3" if part == "H100" else "NVIDIA A10G" if part == "A10" else f"NVIDIA {part}"
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        theirs = get_peak_flops(f"NVIDIA {part}", "bfloat16")
        if theirs is not None:
            assert 1e12 * CARDS[part].half == pytest.approx(theirs, rel=1e-3), part
        if CARDS[part].single is not None and not part.startswith("H200"):
            assert 1e12 * CARDS[part].single == pytest.approx(get_available_flops(device, torch.float32)), part


def test_the_report_knows_the_phases():
    assert metric_groups.PHASES == PHASES


def test_speed_is_told_from_what_is_the_same_in_every_run(monkeypatch):
    monkeypatch.setattr(phase_costs, "peak_of", lambda *_, **__: 1e15)
    told = RunCosts()
    told.begin()
    told.add(UpdateWork(1e12, 10))
    time.sleep(0.001)
    found = line(told, held={"update": 2**30}, sampled=5)
    assert len(found) == 6 and all(map(is_speed, found))
    assert all(map(is_speed, ["time/update", "tokens_per_second", "env/seconds_mean", "val/env/seconds_mean"]))
    assert not any(map(is_speed, ["train/reward", "train/num_tokens", "val/loss", "train/loss/update"]))
