"""What an error about the context advises is a key of the data module at hand, and taking the advice is enough."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from small_rollouts import trainer

from lit_rl.algorithms import GRPO, SFT
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import SupervisedDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.rewards import exact_match

NEW_TOKENS = 500
ROWS = [{"prompt": f"{n} is the first of many numbers ", "completion": "1", "answer": "1"} for n in range(4)]


def validated(folder: Path, module: Any, data: Any) -> None:
    trainer(folder, max_steps=1, limit_val_batches=0.0).validate(module, datamodule=data, verbose=False)


@pytest.mark.parametrize(
    ("module", "data", "key"),
    [
        (SFT, SupervisedDataModule, "max_length"),
        (lambda *args, **more: GRPO(*args, group_size=2, **more), RolloutDataModule, "max_prompt_tokens"),
    ],
    ids=["texts", "prompts"],
)
def test_the_key_exists_and_bounds_the_prompts(tmp_path: Path, module: Any, data: Any, key: str) -> None:
    def run(**settings: Any) -> None:
        made = module("tiny", exact_match, sampling=Sampling(max_new_tokens=NEW_TOKENS))
        more = {"overlong": "truncate_left"} if key == "max_prompt_tokens" else {"keep": "end"}
        validated(tmp_path, made, data(rows=ROWS, val_fraction=0.5, **more, **settings))

    with pytest.raises(ConfigError, match=rf"Lower sampling\.max_new_tokens to \d+, or data\.{key} to (\d+)") as caught:
        run()
    advised = int(re.findall(rf"data\.{key} to (\d+)", str(caught.value))[0])
    run(**{key: advised})
