"""Reward models over images: trained on pairs, exported, loaded again, and asked in a rollout."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from standin_judge import StandInJudge, standing_in_for_a_judge
from tiers import in_turn
from transformers import AutoModelForSequenceClassification, AutoProcessor
from vision_kinds import KINDS
from vision_toys import picture

from lit_rl.algorithms import GRPO, PPO, AdamW, Constant, Evaluation, OnlineDPO, RewardModeling
from lit_rl.algorithms.reward_modeling import ProcessRewardModeling
from lit_rl.core.errors import ConfigError, DataError, RewardError
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import PreferenceDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.row_visuals import image_of
from lit_rl.data.tasks import Digits
from lit_rl.generation.native import NativeGenerator
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.critics import AdapterCritic
from lit_rl.models.references import AdapterBase
from lit_rl.models.scoring import RewardAdapter
from lit_rl.rewards import GroupJudge, JudgeReward, LLMJudge, PairRMJudge, RewardModel, Rewards

ASKED = [{"role": "user", "content": "Which?"}]
SHORT = Sampling(max_new_tokens=3)
IMAGE_LIMIT = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}]


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def uri(number: int) -> str:
    encoded = io.BytesIO()
    picture(number).save(encoded, "PNG")
    return f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}"


def pairs(count: int = 8) -> list[dict[str, Any]]:
    return [
        {"prompt": ASKED, "chosen": said("a" * (i % 3 + 1)), "rejected": said("b"), "image": uri(i)}
        for i in range(count)
    ]


def trainer(folder: Path, steps: int) -> L.Trainer:
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    quiet |= {"enable_checkpointing": False, "log_every_n_steps": 1}
    return L.Trainer(default_root_dir=folder, max_steps=steps, **quiet)


def exported(module: Any, folder: Path) -> Path:
    report = module.export(module.policy.state_dict(), folder, {"base_model": "toy", "algorithm": "reward_model"})
    assert report.max_abs_diff == 0
    return folder


@pytest.mark.all
@in_turn(kind=KINDS, lora=[None, Lora(r=4)])
def test_what_was_trained_is_what_the_export_says(
    toy_folder: Any, kind: str, lora: Lora | None, tmp_path: Path
) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in pairs()))
    data = PreferenceDataModule(path=str(path), val_path=str(path), batch_size=4)
    module = RewardModeling(LanguageModel(str(toy_folder(kind)), lora=lora))
    run = trainer(tmp_path, 2)
    run.fit(module, datamodule=data)
    trained = [name for name, parameter in module.policy.named_parameters() if parameter.requires_grad]
    assert any("score" in name for name in trained)
    assert not any("vision" in name for name in trained), "what sees is frozen"
    wanted: Any = run.predict(module, datamodule=data)
    reward = RewardModel(str(exported(module, tmp_path / "hf")))
    seen = [image_of(uri(i), "row") for i in range(8)]
    for which in ("chosen", "rejected"):
        replies = [row[which] for row in pairs()]
        found = reward([IMAGE_LIMIT] * 8, replies, image=seen)
        assert found == pytest.approx([value for table in wanted for value in table[f"{which}_reward"]], abs=2e-5)
        assert found == reward([IMAGE_LIMIT] * 8, replies, images=[[ref] for ref in seen])
        alone = [reward([IMAGE_LIMIT], [reply], image=[ref])[0] for reply, ref in zip(replies, seen, strict=True)]
        assert found == pytest.approx(alone, abs=2e-5), "a score does not depend on its batch"
    assert len({round(score or 0, 4) for score in reward([IMAGE_LIMIT] * 3, [said("a")] * 3, image=seen[:3])}) == 3

    scorer = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    scorer.config._name_or_path = ""  # no file is read
    processor = AutoProcessor.from_pretrained(tmp_path / "hf")
    assert RewardModel(scorer, tokenizer=processor)([IMAGE_LIMIT] * 8, replies, image=seen) == found
    again, by_path = RewardModeling(scorer, tokenizer=processor), RewardModeling(str(tmp_path / "hf"))
    for each in (again, by_path):
        trainer(tmp_path, 2).fit(each, datamodule=data)
    ours, theirs = again.policy.state_dict(), by_path.policy.state_dict()
    assert again.policy is scorer and all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.all
@pytest.mark.parametrize(("steps", "accuracy"), [(2, 0.0), pytest.param(50, 0.75, marks=pytest.mark.exhaustive)])
def test_digits_are_rewarded_as_they_are_read(steps: int, accuracy: float, tmp_path: Path) -> None:
    """A reward model of pairs tells right digits from wrong ones, and a policy is trained with it."""
    rows = [
        {
            "prompt": row["prompt"],
            "image": row["image"],
            "chosen": said(row["answer"]),
            "rejected": said(str((int(row["answer"]) + 1 + i % 9) % 10)),
        }
        for i, row in enumerate(Digits(val_rows=0).train()[: 24 * steps])
    ]
    module = RewardModeling(LanguageModel("digits"), optimizer=AdamW(lr=1e-3), scheduler=Constant())
    run = trainer(tmp_path, steps)
    data = PreferenceDataModule(rows=rows, batch_size=16, val_fraction=0.1)
    run.fit(module, datamodule=data)
    (learned,) = run.validate(module, datamodule=data, verbose=False)
    assert learned["val/accuracy"] >= accuracy, learned
    reward = RewardModel(str(exported(module, tmp_path / "hf")))
    policy = GRPO(
        "digits", Rewards({"model": reward, "right": right}, weights={"right": 0.0}), group_size=4, sampling=SHORT
    )
    trainer(tmp_path, 2).fit(policy, datamodule=RolloutDataModule(task=Digits(), prompts_per_rollout=4))


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [float(reply[0]["content"] == wanted) for reply, wanted in zip(completions, answer, strict=True)]


def test_what_cannot_be_scored_is_refused(toy_folder: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="scores of steps are learned from text alone"):
        ProcessRewardModeling(str(toy_folder("llava"))).setup("fit")
    module = RewardModeling("tiny")
    module.configure_model()
    blind = RewardModel(str(exported(module, tmp_path / "blind")), chat_template="{{ messages | length }}")
    with pytest.raises(RewardError, match="show images, and the reward model .* reads text alone"):
        blind([IMAGE_LIMIT], [said("a")], image=[image_of(uri(0), "row")])
    module = RewardModeling(str(toy_folder("idefics3")))
    module.configure_model()
    cutting = RewardModel(str(exported(module, tmp_path / "hf")), max_length=40, overlong="truncate_left")
    with pytest.raises(RewardError, match="truncate_left to max_length=40 would cut through them"):
        cutting([IMAGE_LIMIT], [said("a" * 40)], image=[image_of(uri(0), "row")])
    with pytest.raises(DataError, match="row 0 for the reward model .* shows 1 of the prompt's 2 images"):
        cutting([IMAGE_LIMIT], [said("a")], images=[[image_of(uri(0), "row"), image_of(uri(1), "row")]])


READERS: dict[str, Any] = {
    "reward=judge": lambda model, never, url: GRPO(
        model, Rewards({"j": JudgeReward(url, "m", rubric="helpful")}), generator=never
    ),
    "reward=judge_group": lambda model, never, url: GRPO(model, Rewards({"j": GroupJudge(url, "m")}), generator=never),
    "judge=llm": lambda model, never, url: OnlineDPO(model, judge=LLMJudge(url, "m"), generator=never),
    "judge=pairrm": lambda model, never, url: OnlineDPO(model, judge=PairRMJudge("tiny"), generator=never),
    "judge=llm of validation": lambda model, never, url: GRPO(
        model, right, judge=LLMJudge(url, "m"), evaluation=Evaluation(win_rate_against="base"), generator=never
    ),
}
"""What reads text alone, and learns or compares by it."""


@pytest.fixture
def server() -> Iterator[StandInJudge]:
    with standing_in_for_a_judge() as made:
        yield made


@pytest.mark.parametrize("who", READERS)
def test_who_reads_text_is_refused_images_before_anything_is_written(
    toy_of: Any, who: str, tmp_path: Path, server: StandInJudge
) -> None:
    """And not where no row shows any."""

    class Never(NativeGenerator):
        def generate(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("it was written")

    part = {"type": "image", "url": uri(1)}
    for content, error, message in (
        ([part, *IMAGE_LIMIT[0]["content"][1:]], RewardError, f"{who.split()[0]} reads text alone, and row 0"),
        ("Which?", AssertionError, "it was written"),
    ):
        rows = [{"prompt": [{"role": "user", "content": content}], "answer": str(i)} for i in range(8)]
        module = READERS[who](toy_of("idefics3").model.path, Never(), server.url)
        data = RolloutDataModule(rows=rows, prompts_per_rollout=2, val_fraction=0.5)
        with pytest.raises(error, match=message):
            trainer(tmp_path, 1).fit(module, datamodule=data)


def test_rewards_find_images_of_messages_in_a_column(toy_folder: Any) -> None:
    content = [{"type": "image", "url": uri(1)}, {"type": "image"}, {"type": "text", "text": "Which?"}]
    row = {"prompt": [{"role": "user", "content": content}], "image": uri(2)}
    data = RolloutDataModule(rows=[row, row], val_fraction=0.0)
    model = LanguageModel(str(toy_folder("llava")))
    data.prepare(model.tokenizer, processor=model.processor, stage="predict")
    (images, _) = data.peek(2).columns["images"]
    assert [ref.digest for ref in images] == [image_of(uri(1), "row").digest, image_of(uri(2), "row").digest]
    assert "image" not in data.peek(2).columns


def test_policy_critic_reference_and_reward_model_are_adapters_of_one_base(
    toy_folder: Any, toy_of: Any, tmp_path: Path
) -> None:
    model = LanguageModel(str(toy_folder("idefics3")), lora=Lora(r=2))
    scorer = RewardModeling(model)
    trainer(tmp_path, 2).fit(scorer, datamodule=PreferenceDataModule(rows=pairs(), batch_size=4, val_fraction=0.0))
    adapter = str(exported(scorer, tmp_path / "hf") / "adapter")
    module = PPO(
        model,
        right,
        critic=AdapterCritic(r=2),
        reference=AdapterBase(),
        reward_adapter=adapter,
        reward_beta=0.1,
        iterations=1,
        minibatches=1,
        sampling=SHORT,
    )
    rows = [{"prompt": ASKED, "answer": "a", **({"image": uri(i)} if i % 3 else {})} for i in range(8)]
    run = trainer(tmp_path, 2)
    run.fit(module, datamodule=RolloutDataModule(rows=rows, prompts_per_rollout=8, val_fraction=0.0))
    assert float(run.callback_metrics["train/rewards/reward_adapter/mean"]) != 0
    toy = toy_of("idefics3")
    drawn = toy.drawn(toy.asked([toy.prompt("Which?", [image_of(uri(1), "row")]), toy.prompt("Or?", [])]))
    adapter_of = RewardAdapter(adapter)
    seen, blind = (
        adapter_of.rewards(module.policy, module.reward_adapter, each) for each in (drawn, replace(drawn, vision=None))
    )
    assert (seen - blind)[:2].abs().min() > 1e-4 and torch.equal(seen[2:], blind[2:])
