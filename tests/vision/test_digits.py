"""The digits that come with the package: their rows, the policy that reads them, and what teaches it more."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from lit_rl.algorithms import DPO, GRPO, PPO, SFT, AdamW, Constant
from lit_rl.callbacks.preference_sets import PreferenceSets
from lit_rl.core.errors import ConfigError
from lit_rl.core.model_paths import DIGITS
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import PreferenceDataModule, SupervisedDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import IMAGES, Digits, DigitTexts, Task
from lit_rl.models import LanguageModel
from lit_rl.models.model_costs import ModelShape
from lit_rl.rewards import exact_match

GREEDY, SAMPLED = 0.457, 0.369
"""Held-out rates of the shipped policy, as `scripts/make_models.py digits` printed them."""


def pixels(row: dict[str, Any]) -> Image.Image:
    return Image.open(io.BytesIO(row["image"]))


def test_rows_are_the_images_once_each_and_three_hundred_are_held_out():
    task = Digits()
    train, val = task.train(), task.val()
    assert isinstance(task, Task) and (len(train), len(val)) == (IMAGES - 300, 300)
    assert len({row["image"] for row in train + val}) == IMAGES
    counted = Counter(row["answer"] for row in train + val)
    assert sorted(counted) == [str(digit) for digit in range(10)] and min(counted.values()) == 174
    assert all(row["prompt"] == [{"role": "user", "content": "Which digit?"}] for row in train)
    assert Digits().train() == train and Digits(seed=1).val() != val and Digits(val_rows=0).val() == []
    with pytest.raises(ConfigError, match=r"data\.task\.val_rows=1797"):
        Digits(val_rows=IMAGES)


def test_each_pixel_of_the_data_is_a_square_and_most_of_a_digit_is_black():
    for row in Digits().val()[:20]:
        image = pixels(row)
        assert (image.size, image.mode) == ((32, 32), "RGB")
        small = image.resize((8, 8), Image.Resampling.NEAREST)
        assert small.resize((32, 32), Image.Resampling.NEAREST).tobytes() == image.tobytes()
        greys = list(small.convert("L").tobytes())
        assert {grey * 16 % 255 for grey in greys} <= {0, *range(239, 255)} and max(greys) > 200
        assert sum(grey < 64 for grey in greys) > 20


def test_texts_have_the_same_images_with_their_replies():
    for row, text in zip(Digits().val(), DigitTexts().val()):
        assert text == {**row, "completion": [{"role": "assistant", "content": row["answer"]}]}


def test_the_module_imports_no_pillow():
    code = "import sys, lit_rl.data.tasks; assert 'PIL' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_the_shipped_policy_is_small_and_has_its_name():
    model = LanguageModel("digits")
    assert (model.label, model.is_local, model.sees) == ("digits", True, True)
    assert sum(file.stat().st_size for file in DIGITS.iterdir()) < 1_000_000
    shape = ModelShape.of(model.config)
    assert shape.parameters == sum(parameter.numel() for parameter in model.load().parameters())


def rates(policy: Any, model: LanguageModel) -> tuple[float, float]:
    """Of right replies to held-out images: the share when it is greedy, and the mean chance when it samples."""
    data = RolloutDataModule(rows=Digits().val(), val_fraction=0.0)
    data.prepare(model.tokenizer, processor=model.processor, stage="predict")
    batch, end = data.peek(300), model.tokenizer.eos_token_id
    asked = zip(batch.prompt_ids, batch.columns["answer"])
    ids = torch.tensor([[*prompt, *model.tokenizer.encode(answer), end] for prompt, answer in asked])
    assert batch.vision is not None
    seen = [vision for vision in batch.vision(batch.rows) if vision is not None]
    inputs = {name: torch.cat([vision.inputs[name] for vision in seen]) for name in seen[0].inputs}
    with torch.no_grad():
        logits = policy.eval()(input_ids=ids, **inputs).logits[:, -3:-1]
    chances = logits.log_softmax(-1).gather(-1, ids[:, -2:, None])[..., 0].sum(1).exp()
    return float((logits.argmax(-1) == ids[:, -2:]).all(1).float().mean()), float(chances.mean())


def test_the_shipped_policy_reads_digits_at_its_documented_rate():
    model = LanguageModel("digits")
    greedy, sampled = rates(model.load(), model)
    assert greedy == pytest.approx(GREEDY, abs=0.02) and sampled == pytest.approx(SAMPLED, abs=0.01)


@pytest.fixture
def fitted(trainer_of: Any) -> Any:
    """A method after some steps on the digits."""

    def fit(module: Any, data: Any, steps: int) -> Any:
        trainer_of(max_steps=steps, gradient_clip_val=1.0, limit_val_batches=0).fit(module, datamodule=data)
        return module.policy

    return fit


@pytest.fixture
def trainer_of() -> Any:
    import lightning as L

    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return lambda **settings: L.Trainer(accelerator="cpu", **dict.fromkeys(off, False), **settings)


@pytest.mark.all
def test_a_few_steps_of_imitation_teach_it(fitted):
    model = LanguageModel("digits", freeze=())
    module = SFT(model, optimizer=AdamW(lr=1e-3), scheduler=Constant(), sampling=Sampling(max_new_tokens=2), seed=0)
    policy = fitted(module, SupervisedDataModule(task=DigitTexts(), batch_size=32, seed=0), 12)
    greedy, sampled = rates(policy, model)
    assert greedy > GREEDY + 0.1 and sampled > SAMPLED + 0.1


@pytest.mark.exhaustive  # in every run notebooks/05_images.ipynb does the same in fewer steps
def test_reinforcement_teaches_it(fitted):
    model = LanguageModel("digits", freeze=())
    module = GRPO(
        model,
        exact_match,
        optimizer=AdamW(lr=1e-3),
        scheduler=Constant(),
        sampling=Sampling(max_new_tokens=2),
        seed=0,
    )
    policy = fitted(module, RolloutDataModule(task=Digits(), prompts_per_rollout=16, seed=0), 300)
    greedy, sampled = rates(policy, model)
    assert greedy > GREEDY + 0.2 and sampled > 0.75


@pytest.mark.exhaustive
def test_a_policy_and_a_critic_that_sees_learn_together(fitted):
    model = LanguageModel("digits", freeze=())
    how: Any = {"optimizer": AdamW(lr=1e-3), "scheduler": Constant(), "sampling": Sampling(max_new_tokens=2)}
    module = PPO(model, exact_match, iterations=1, minibatches=1, reward_beta=0.0, **how)
    policy = fitted(module, RolloutDataModule(task=Digits(), prompts_per_rollout=128, seed=0), 30)
    greedy, sampled = rates(policy, model)
    assert greedy > GREEDY + 0.1 and sampled > SAMPLED + 0.2


@pytest.mark.exhaustive
def test_pairs_that_it_wrote_itself_teach_it(fitted, trainer_of, tmp_path: Path):
    model = LanguageModel("digits", freeze=())
    still: Any = {"optimizer": AdamW(lr=1e-12), "scheduler": Constant(), "sampling": Sampling(max_new_tokens=2)}
    here: Any = {"default_root_dir": tmp_path, "callbacks": [PreferenceSets()]}
    writes = trainer_of(max_steps=60, limit_val_batches=0, **here)
    writes.fit(GRPO(model, exact_match, **still), datamodule=RolloutDataModule(task=Digits(), prompts_per_rollout=16))
    pairs = PreferenceDataModule(path=str(tmp_path / "datasets" / "pairs.jsonl"), batch_size=32, val_fraction=0.0)
    policy = fitted(DPO(model, optimizer=AdamW(lr=5e-4), scheduler=Constant()), pairs, 60)
    greedy, sampled = rates(policy, model)
    assert greedy > GREEDY + 0.15 and sampled > SAMPLED + 0.15
