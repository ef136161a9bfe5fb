"""Policies that see, in training: what is learned does not depend on a step's cut, and a resumed run is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vision_kinds import kinds
from vision_more_toys import MORE_TOYS
from vision_runs import by_letters
from vision_runs import quiet_trainer as trainer
from vision_toys import picture

from lit_rl.algorithms import DPO, GRPO, PPO, RLOO, SFT, Constant
from lit_rl.algorithms.optim.optimizers import ByPath
from lit_rl.core.errors import ConfigError, DataError
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import PreferenceDataModule, SupervisedDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.vision_parts import part_of

ASKED = [{"role": "user", "content": "Which?"}]


def rows(count: int = 12, first: int = 0) -> list[dict[str, Any]]:
    """Every fourth row has no image."""
    return [
        {"prompt": ASKED, "answer": str(i), **({} if i % 4 == 3 else {"image": picture(first + i)})}
        for i in range(count)
    ]


def grpo(folder: Any, **more: Any) -> GRPO:
    settings = {"group_size": 4, "beta": 0.1, "sampling": Sampling(max_new_tokens=5), "minibatches": 2} | more
    return GRPO(str(folder), by_letters, **settings)


def rollouts(**more: Any) -> RolloutDataModule:
    return RolloutDataModule(**{"rows": rows(), "prompts_per_rollout": 4, "val_fraction": 0.0} | more)


def weights(module: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.policy.state_dict().items()}


def fitted(module: Any, data: Any, folder: Path, steps: int = 4, **more: Any) -> dict[str, torch.Tensor]:
    trainer(folder, steps, **more).fit(module, datamodule=data)
    return weights(module)


def test_another_image_before_a_resume_is_noticed(toy_folder: Any, tmp_path: Path) -> None:
    half = trainer(tmp_path, 1)
    half.fit(grpo(toy_folder("idefics3")), datamodule=rollouts())
    half.save_checkpoint(tmp_path / "half.ckpt")
    with pytest.raises(DataError, match="The data is not the checkpoint's: the rows"):
        trainer(tmp_path, 2).fit(
            grpo(toy_folder("idefics3")),
            datamodule=rollouts(rows=rows(first=50)),
            ckpt_path=tmp_path / "half.ckpt",
        )


@pytest.mark.parametrize("kind", kinds("idefics3", "llava", "gemma3", *MORE_TOYS))
def test_the_cut_of_a_step_changes_nothing_and_what_is_frozen_stays(toy_folder: Any, kind: str, tmp_path: Path) -> None:
    folder = toy_folder(kind)
    one, many = (
        fitted(grpo(folder), rollouts(), tmp_path / str(parts), accumulate_grad_batches=parts) for parts in (1, 2)
    )
    for name, value in one.items():
        torch.testing.assert_close(many[name], value, rtol=1e-4, atol=1e-6, msg=name)
    policy = LanguageModel(str(folder)).load()
    start, part = policy.state_dict(), part_of(policy)
    assert {part(name) for name, value in one.items() if not torch.equal(value, start[name])} == {"projector", "text"}


@pytest.mark.all
@pytest.mark.parametrize("kind", kinds("idefics3", "qwen2_5_vl"))
def test_checkpointing_and_another_attention_end_at_the_same_weights_and_halves_near_them(
    toy_folder: Any, kind: str, tmp_path: Path
) -> None:
    """Of texts, so that all learn from the same tokens; what sees is trained too."""

    def ended(name: str, precision: Any = "32-true", **more: Any) -> dict[str, torch.Tensor]:
        model = LanguageModel(str(toy_folder(kind)), freeze=(), **more)
        module = SFT(model, optimizer=ByPath("torch.optim.SGD", lr=0.1), scheduler=Constant())
        data = SupervisedDataModule(rows=texts(), batch_size=6, val_fraction=0.0)
        return fitted(module, data, tmp_path / name, 2, precision=precision)

    usual = ended("usual")
    others = {"checkpointed": {"gradient_checkpointing": True}, "eager": {"attn_implementation": "eager"}}
    for name, more in others.items():
        for weight, value in ended(name, **more).items():
            torch.testing.assert_close(value, usual[weight], rtol=1e-3, atol=2e-5)
    policy = LanguageModel(str(toy_folder(kind))).load()
    start, part = policy.state_dict(), part_of(policy)
    halves = {name: value for name, value in ended("halves", "bf16-true").items() if value.is_floating_point()}
    assert {value.dtype for value in halves.values()} == {torch.bfloat16}
    for kept in ("vision", "text"):
        names = [name for name in halves if part(name) == kept]
        one, other = (torch.cat([(end[n].float() - start[n]).flatten() for n in names]) for end in (usual, halves))
        assert float(torch.cosine_similarity(one, other, 0)) > 0.8, kept


@pytest.mark.parametrize("kind", kinds("idefics3", "qwen2_5_vl"))
@pytest.mark.parametrize("critic", ["separate", "shared", "adapter"])
def test_a_critic_sees_too(toy_folder: Any, kind: str, critic: str, tmp_path: Path) -> None:
    from lit_rl.models.critics import AdapterCritic, SeparateCritic, SharedTrunk

    model: Any = str(toy_folder(kind))
    if critic == "adapter":
        from lit_rl.models import LanguageModel

        model = LanguageModel(model, lora=Lora(r=2))
    chosen = {"separate": SeparateCritic, "shared": SharedTrunk, "adapter": AdapterCritic}[critic]()
    module = PPO(model, by_letters, critic=chosen, sampling=Sampling(max_new_tokens=5), minibatches=2)
    rolls = trainer(tmp_path, 2)
    rolls.fit(module, datamodule=rollouts(prompts_per_rollout=8))
    assert all(bool(value.isfinite().all()) for value in module.state_dict().values() if value.is_floating_point())
    eyes = [name for name, p in module.critic.named_parameters() if "vision" in name or "visual.blocks" in name]
    trained = [name for name, p in module.critic.named_parameters() if name in eyes and p.requires_grad]
    assert not trained and (eyes or critic == "shared"), "what sees is frozen in the critic too"


@pytest.mark.parametrize("method", ["rloo", "lora", "dynamic", "replay"])
def test_other_methods_take_images(toy_folder: Any, method: str, tmp_path: Path) -> None:
    from lit_rl.algorithms.terms.groups import GroupReplay
    from lit_rl.models import LanguageModel

    folder = toy_folder("idefics3")
    if method == "rloo":
        module: Any = RLOO(str(folder), by_letters, group_size=4, sampling=Sampling(max_new_tokens=5))
    elif method == "lora":
        module = GRPO(LanguageModel(str(folder), lora=Lora(r=2)), by_letters, sampling=Sampling(max_new_tokens=5))
    elif method == "replay":
        module = grpo(folder, replay=GroupReplay(4))
    else:
        from lit_rl.algorithms.terms.groups import DynamicSampling

        module = grpo(folder, groups=DynamicSampling())
    found = fitted(module, rollouts(prompts_per_rollout=4), tmp_path, steps=2)
    assert all(bool(value.isfinite().all()) for value in found.values() if value.is_floating_point())


# ------------------------------------------------------------------ data sets that are learned from as they are


def texts() -> list[dict[str, Any]]:
    return [{**row, "completion": [{"role": "assistant", "content": row["answer"]}]} for row in rows()]


def conversations() -> list[dict[str, Any]]:
    """Two replies behind an image."""
    again = [{"role": "user", "content": "Again?"}, {"role": "assistant", "content": "yes"}]
    return [{**row, "completion": [*row["completion"], *again]} for row in texts()]


def pairs() -> list[dict[str, Any]]:
    return [
        {
            **row,
            "chosen": [{"role": "assistant", "content": row["answer"]}],
            "rejected": [{"role": "assistant", "content": "no idea"}],
        }
        for row in rows()
    ]


@pytest.mark.parametrize("kind", kinds("idefics3", "gemma3", "qwen2_5_vl", "llava_onevision"))
@pytest.mark.parametrize("method", ["sft", "dpo", "sft-assistant"])
def test_data_sets_with_images_are_learned_whatever_the_cut(
    toy_folder: Any, kind: str, method: str, tmp_path: Path
) -> None:
    folder, found = str(toy_folder(kind)), []
    for parts in (1, 3):
        module = DPO(folder) if method == "dpo" else SFT(folder)
        learn, said = ("assistant", conversations()) if method == "sft-assistant" else ("completion", texts())
        data: Any = (
            PreferenceDataModule(rows=pairs(), batch_size=6, val_fraction=0.0)
            if method == "dpo"
            else SupervisedDataModule(rows=said, batch_size=6, val_fraction=0.0, learn=learn)
        )
        found.append(fitted(module, data, tmp_path / str(parts), steps=3, accumulate_grad_batches=parts))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-6, msg=name)


# ------------------------------------------------------------------ what is refused


def test_images_and_a_policy_over_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.rows\[0\]: .*\(column 'image'\)"):
        fitted(GRPO("tiny", by_letters), rollouts(), tmp_path)


def test_prompts_that_are_too_long_with_their_images(toy_folder: Any, tmp_path: Path) -> None:
    data = rollouts(max_prompt_tokens=20, overlong="truncate_left")
    with pytest.raises(ConfigError, match="tokens with its images.*truncate_left would cut through"):
        fitted(grpo(toy_folder("idefics3")), data, tmp_path)


def test_packing_and_images(toy_folder: Any, tmp_path: Path) -> None:
    data = SupervisedDataModule(rows=texts(), batch_size=6, val_fraction=0.0, packing="best_fit")
    with pytest.raises(ConfigError, match=r"data\.packing=best_fit packs text only"):
        fitted(SFT(str(toy_folder("idefics3"))), data, tmp_path)
