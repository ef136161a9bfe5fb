"""A model that would score a token by what follows it is refused before the first step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vision_runs import by_letters, quiet_trainer
from vision_seen import image
from vision_toys import picture

from lit_rl.algorithms import GRPO, SFT
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import SupervisedDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.models.forward import refuse_lookahead
from lit_rl.models.vision_processor import VisionProcessor


def test_values_that_let_paligemma_look_ahead(toy_of: Any) -> None:
    toy = toy_of("paligemma")
    ids, vision = toy.prompt("Which?", [image(1)])
    assert vision is not None and vision.in_response == {"token_type_ids": 1}
    with pytest.raises(ConfigError, match=r"PaliGemma.* tokens that follow it: .*nats"):
        refuse_lookahead(toy.policy, ids, replace(vision, in_response={"token_type_ids": 0}))


@pytest.mark.parametrize("method", ["grpo", "sft"])
def test_a_run_is_refused_before_its_first_step(
    toy_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    made = VisionProcessor._vision
    wrong = {"token_type_ids": 0}
    monkeypatch.setattr(VisionProcessor, "_vision", lambda *given: replace(made(*given), in_response=wrong))
    row = {"prompt": [{"role": "user", "content": "Which?"}], "image": picture(1)}
    if method == "grpo":
        module: Any = GRPO(str(toy_folder("paligemma")), by_letters, sampling=Sampling(max_new_tokens=5))
        data: Any = RolloutDataModule(rows=[row] * 8, prompts_per_rollout=4, val_fraction=0.0)
    else:
        module = SFT(str(toy_folder("paligemma")))
        told = {**row, "completion": [{"role": "assistant", "content": "7"}]}
        data = SupervisedDataModule(rows=[told] * 8, batch_size=4, val_fraction=0.0)
    with pytest.raises(ConfigError, match="tokens that follow it"):
        quiet_trainer(tmp_path, 1).fit(module, datamodule=data)
    assert module.global_step == 0
