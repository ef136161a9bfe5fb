"""Every method over images: it runs, what it learns depends on what is shown, and every reference sees too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from tiers import in_turn
from vision_kinds import kinds
from vision_runs import by_letters, quiet_trainer
from vision_seen import image
from vision_toys import picture

from lit_rl.algorithms import BCO, CPO, DPO, GRPO, KTO, ORPO, XPO, NashMD, OnlineDPO, Reinforce
from lit_rl.algorithms.terms.self_teacher import ColumnContext, SelfTeacher
from lit_rl.algorithms.terms.teachers import TopDivergence
from lit_rl.core.rollout import Sampling, select
from lit_rl.core.vision_inputs import Vision
from lit_rl.data.example_module import PreferenceDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.forward import score
from lit_rl.models.references import BEMA, EMA, AdapterBase, FrozenCopy, InitialAdapter, Mixing, OtherModel

ASKED = [{"role": "user", "content": "Which?"}]
SHORT = {"sampling": Sampling(max_new_tokens=5)}


def rows(first: int, count: int = 8) -> list[dict[str, Any]]:
    """Every fourth row has no image."""
    return [
        {"prompt": ASKED, "answer": str(i), **({} if i % 4 == 3 else {"image": picture(first + i)})}
        for i in range(count)
    ]


def reply(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def pairs(first: int) -> Any:
    told = [{**row, "chosen": reply(row["answer"]), "rejected": reply("no idea")} for row in rows(first)]
    return PreferenceDataModule(rows=told, batch_size=4, val_fraction=0.0)


def verdicts(first: int) -> Any:
    told = [{**row, "completion": reply(row["answer"] * 3), "label": i % 2 == 0} for i, row in enumerate(rows(first))]
    return PreferenceDataModule(rows=told, batch_size=4, val_fraction=0.0)


def prompts(first: int) -> Any:
    return RolloutDataModule(rows=rows(first), prompts_per_rollout=4, val_fraction=0.0)


METHODS: dict[str, tuple[Any, Any]] = {
    "kto": (lambda model: KTO(model), verdicts),
    "bco": (lambda model: BCO(model), verdicts),
    "orpo": (lambda model: ORPO(model), pairs),
    "cpo": (lambda model: CPO(model), pairs),
    "online_dpo": (lambda model: OnlineDPO(model, by_letters, **SHORT), prompts),
    "xpo": (lambda model: XPO(model, by_letters, **SHORT), prompts),
    "nash_md": (lambda model: NashMD(model, by_letters, **SHORT), prompts),
    "reinforce": (lambda model: Reinforce(model, by_letters, **SHORT), prompts),
}


def learned(module: Any, data: Any, folder: Path) -> dict[str, torch.Tensor]:
    quiet_trainer(folder, 2).fit(module, datamodule=data)
    found = {name: value.clone() for name, value in module.policy.state_dict().items() if value.is_floating_point()}
    assert all(bool(value.isfinite().all()) for value in found.values())
    return found


@pytest.mark.all
@pytest.mark.parametrize("method", METHODS)
def test_what_is_learned_depends_on_what_is_shown(toy_folder: Any, method: str, tmp_path: Path) -> None:
    make, data = METHODS[method]
    kind = "gemma3" if method in ("kto", "nash_md") else "idefics3"
    runs = {"one": 0, "other": 50} | ({"same": 0} if method == "xpo" else {})
    found = {name: learned(make(str(toy_folder(kind))), data(first), tmp_path / name) for name, first in runs.items()}
    one, other, same = found["one"], found["other"], found.get("same", found["one"])
    assert all(torch.equal(one[name], same[name]) for name in one), "the same images teach the same"
    assert any(not torch.equal(one[name], other[name]) for name in one)


REFERENCES: dict[str, Callable[[Path], Any]] = {
    "frozen_copy": lambda folder: FrozenCopy(),
    "frozen_copy on the CPU": lambda folder: FrozenCopy(device="cpu"),
    "adapter_base": lambda folder: AdapterBase(),
    "ema": lambda folder: EMA(),
    "bema": lambda folder: BEMA(),
    "mixing": lambda folder: Mixing(),
    "path": lambda folder: OtherModel(str(folder)),
}


@in_turn(reference=REFERENCES, kind=["idefics3", "gemma3"])
def test_a_reference_of_the_same_weights_says_the_same_of_what_it_sees(toy_of: Any, kind: str, reference: str) -> None:
    toy = toy_of(kind)
    folder = Path(toy.model.path)
    model = LanguageModel(str(folder), lora=Lora(r=2) if reference == "adapter_base" else None)
    module = GRPO(model, by_letters, beta=0.1, reference=REFERENCES[reference](folder), **SHORT)
    module.configure_model()
    rows = toy.drawn(toy.asked([toy.prompt("Which?", [image(1)]), toy.prompt("Or?", []), toy.prompt("?", [image(2)])]))
    with torch.no_grad(), module.reference.scoring(module.policy, module.reference_policy) as scorer:
        theirs = score(scorer, rows, module.sampling).logprobs
        blind = score(scorer, replace(rows, vision=None), module.sampling).logprobs
        ours = score(module.policy.eval(), rows, module.sampling).logprobs
    torch.testing.assert_close(theirs, ours, rtol=0, atol=2e-5)
    assert (blind - theirs)[[0, 1, 4, 5]].abs().max() > 1e-3, "what is shown counts"


def test_an_adapter_that_is_continued_and_its_reference_see(toy_folder: Any, tmp_path: Path) -> None:
    first = GRPO(LanguageModel(str(toy_folder("idefics3")), lora=Lora(r=2)), by_letters, **SHORT)
    learned(first, prompts(0), tmp_path / "first")
    first.policy.save_pretrained(tmp_path / "adapter")
    model = LanguageModel(str(toy_folder("idefics3")), adapter=str(tmp_path / "adapter"))
    learned(GRPO(model, by_letters, beta=0.1, reference=InitialAdapter(), **SHORT), prompts(0), tmp_path / "second")


def test_a_reference_that_is_asked_beforehand_sees(toy_folder: Any, tmp_path: Path) -> None:
    folder = str(toy_folder("idefics3"))
    asked = learned(DPO(folder), pairs(0), tmp_path / "asked")
    ahead = learned(DPO(folder, precompute_reference=True), pairs(0), tmp_path / "ahead")
    for name, value in asked.items():
        torch.testing.assert_close(ahead[name], value, rtol=1e-5, atol=1e-7, msg=name)
    learned(DPO(folder, precompute_reference=True), pairs(50), tmp_path / "ahead")
    assert len(list((tmp_path / "ahead" / "cache").glob("*.safetensors"))) == 2, "other images, other log-probs"


@pytest.mark.parametrize("kind", kinds("idefics3", "gemma3", "qwen2_5_vl"))
def test_a_policy_that_teaches_itself_sees_behind_its_context(toy_of: Any, kind: str, tmp_path: Path) -> None:
    """By hand: each row's response behind its prompt with the context, processed with its image as a prompt of its own.
    A context that holds a placeholder of images is left out."""
    toy, kept = toy_of(kind), list[Any]()
    teacher = SelfTeacher(ColumnContext("hint", template="$prompt It is $context."), "live")
    model = LanguageModel(toy.model.path)
    module = GRPO(model, by_letters, teacher=teacher, distillation=TopDivergence(top_k=3), **SHORT, group_size=2)
    assert model.processor is not None
    hints = ["0", model.processor.reserved[0], "22", "333"]
    data = RolloutDataModule(
        rows=[row | {"hint": hint} for row, hint in zip(rows(0, 4), hints)], prompts_per_rollout=4, val_fraction=0.0
    )

    class Keep(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            kept.append((pl_module.scored, pl_module.rollout))

    quiet_trainer(tmp_path, 1, callbacks=[Keep()]).fit(module, datamodule=data)
    scored, rollout = kept[0]
    drawn = rollout.completions
    for row in range(len(drawn)):
        hint, seen = scored.batch.columns["hint"][row // 2], drawn.vision.rows[row]
        mask = drawn.response_mask[row]
        if hint == hints[1]:
            assert not rollout.teacher_mask[row].any()
            continue
        ids, told = toy.prompt(f"Which? It is {hint}.", [] if seen is None else list(seen.source.visuals))
        alone = select(replace(drawn, vision=None), torch.tensor([row]))
        one = torch.tensor([ids])
        alone = replace(alone, prompt_ids=one, prompt_mask=one == one, vision=Vision.of([told], 1), host=None)
        with torch.no_grad():
            by_hand = score(toy.policy, alone, module.sampling).logprobs[0, mask]
        torch.testing.assert_close(rollout.teacher_logprobs[row, mask], by_hand, rtol=1e-4, atol=1e-4)
    assert module.trainer.callback_metrics["train/teacher/left_out"] == 0.25
