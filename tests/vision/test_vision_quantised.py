"""A base over images in 4 or 8 bits under adapters (QLoRA): what is held so, what is learned, what is refused.

bitsandbytes is beside torchvision in the folder of `make test-families`; it runs on a CPU too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vision_runs import by_letters, quiet_trainer
from vision_seen import SEEN, Toy, drawn
from vision_toys import picture

from lit_rl.algorithms import GRPO, PPO
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.critics import AdapterCritic, SeparateCritic
from lit_rl.models.engine_weights import whole_weights
from lit_rl.models.forward import response_logprobs
from lit_rl.models.vision_parts import part_of

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.all

SHORT = {"sampling": Sampling(max_new_tokens=5)}
KINDS = pytest.mark.parametrize(("kind", "bits"), [("idefics3", "nf4"), ("llava", "int8")])
HELD = {"nf4": "Linear4bit", "int8": "Linear8bitLt"}


def rollouts() -> RolloutDataModule:
    asked = [{"role": "user", "content": "Which?"}]
    rows = [{"prompt": asked, **({"image": picture(i)} if i % 4 else {})} for i in range(8)]
    return RolloutDataModule(rows=rows, prompts_per_rollout=4, val_fraction=0.0)


@KINDS
def test_a_step_of_grpo(toy_folder: Any, kind: str, bits: Any, tmp_path: Path) -> None:
    """As transformers has it, every linear layer is in few bits but the head, those of what sees too."""
    model = LanguageModel(str(toy_folder(kind)), lora=Lora(r=2), quantization=bits)
    module = GRPO(model, by_letters, group_size=4, beta=0.1, **SHORT)
    quiet_trainer(tmp_path, 2).fit(module, datamodule=rollouts())
    base = module.policy.get_base_model()
    few = [name for name, each in base.named_modules() if type(each).__name__ == HELD[bits]]
    assert {part_of(base)(name) for name in few} == {"vision", "projector", "text"}
    assert type(base.get_output_embeddings()).__name__ == "BanningHead"

    after, before = module.policy.state_dict(), model.load().state_dict()
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    taught = {name for name in after if ".lora_B." in name}
    assert taught <= moved and all(".lora_" in name for name in moved)
    assert not any("vision" in name for name in taught)
    module.export(
        after, tmp_path / "hf", {"base_model": kind, "algorithm": "grpo"}
    )  # merged into the weights as they were published
    assert not hasattr(LanguageModel(str(tmp_path / "hf")).load().config, "quantization_config")


@KINDS
def test_gradients_pass_the_base_after_a_rollout_as_before(toy_folder: Any, kind: str, bits: Any) -> None:
    model = LanguageModel(str(toy_folder(kind)), lora=Lora(r=2), quantization=bits)
    torch.manual_seed(0)
    policy = model.load()
    toy = Toy(kind, model, policy)
    for name, parameter in policy.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.01, generator=torch.Generator().manual_seed(0))
    rows = drawn(Toy(kind, model, model.load()))

    def taught() -> list[torch.Tensor]:
        logprobs = response_logprobs(policy.train(), rows, Sampling())
        trained = [each for each in policy.parameters() if each.requires_grad]
        return list(torch.autograd.grad(logprobs[rows.response_mask].sum(), trained))

    before = taught()
    said = toy.drawn(toy.asked([toy.prompt(text, images) for text, images in SEEN]))
    assert all(torch.equal(one, two) for one, two in zip(before, taught(), strict=True))
    assert all(bool(each.any()) for each in before)
    with torch.no_grad():
        found = response_logprobs(policy.eval(), said, Sampling())
    close = 1e-3 if bits == "nf4" else 0.2  # int8 rounds what a layer reads too: the last digit moves a whole one
    assert (found - said.sampler_logprobs)[said.response_mask].abs().max() < close


def test_what_is_refused(toy_folder: Any, tmp_path: Path) -> None:
    folder = str(toy_folder("idefics3"))
    with pytest.raises(ConfigError, match="quantised weights cannot be trained. Add model.lora"):
        LanguageModel(folder, quantization="nf4", freeze=["vision"])
    model = LanguageModel(folder, lora=Lora(r=2), quantization="nf4")
    with pytest.raises(ConfigError, match=r"algo\.critic: .*algo/critic=adapter"):
        quiet_trainer(tmp_path, 1).fit(PPO(model, by_letters, critic=SeparateCritic(), **SHORT), datamodule=rollouts())
    with pytest.raises(ConfigError, match=r"The policy's base is quantised \(model\.quantization\)"):
        list(whole_weights(model.load()))
    module = PPO(model, by_letters, critic=AdapterCritic(r=2), minibatches=1, iterations=1, **SHORT)
    quiet_trainer(tmp_path, 1).fit(module, datamodule=rollouts())
