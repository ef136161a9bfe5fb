"""A name of another library gets one answer at each of the three doors, from one table (`core/other_names.yaml`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from lit_rl import (
    DPO,
    GRPO,
    PPO,
    SFT,
    AdamW,
    LanguageModel,
    PreferenceDataModule,
    RewardModel,
    RewardModeling,
    RolloutDataModule,
    Sampling,
    SupervisedDataModule,
    exact_match,
)
from lit_rl.cli import lightning_app, lightning_words
from lit_rl.cli.aliases import expand_aliases
from lit_rl.core import other_names
from lit_rl.core.errors import ConfigError, keyword_names
from lit_rl.core.speedups import DecodingSpeedups, ModelSpeedups
from lit_rl.generation.native import NativeGenerator

PYTHON: dict[str, Any] = {
    "GRPO": partial(GRPO, "tiny", exact_match),
    "PPO": partial(PPO, "tiny", exact_match),
    "DPO": partial(DPO, "tiny"),
    "SFT": partial(SFT, "tiny"),
    "RewardModeling": partial(RewardModeling, "tiny"),
    "Sampling": Sampling,
    "AdamW": AdamW,
    "LanguageModel": LanguageModel,
    "NativeGenerator": NativeGenerator,
    "RolloutDataModule": partial(RolloutDataModule, [{"prompt": "1+1="}]),
    "PreferenceDataModule": partial(PreferenceDataModule, [{"prompt": "1+1="}]),
}
_BATCH = "It belongs to the data module: lit_rl.RolloutDataModule(rows, prompts_per_rollout=...)."
_LORA = "It belongs to the model: model=lit_rl.LanguageModel(name, lora=...), or a PeftModel with tokenizer=."


@pytest.mark.parametrize(
    ("kind", "name", "answer"),
    [
        ("GRPO", "learning_rate", "It belongs to the optimizer: optimizer=lit_rl.AdamW(lr=...)."),
        ("GRPO", "num_generations", "Here it is group_size=."),
        ("GRPO", "batch_size", _BATCH),
        ("GRPO", "max_completion_length", "It belongs to the sampling: sampling=lit_rl.Sampling(max_new_tokens=...,"),
        ("GRPO", "num_train_epochs", "It belongs to lightning.Trainer(...)."),
        ("GRPO", "lora_r", _LORA),
        ("GRPO", "warmup_steps", "The schedule is scheduler=lit_rl.Linear(warmup_steps=...), Cosine(...) or Constant"),
        ("GRPO", "kl_coef", "The KL in the loss is beta=, that in the reward reward_beta=."),
        ("GRPO", "epsilon", "epsilon is TRL's name. On the command line: algo.loss.clip_low=... More: docs/from-trl"),
        (
            "GRPO",
            "scale_rewards",
            "scale_rewards is TRL's name. On the command line: algo/advantage=group_normalized (",
        ),
        ("GRPO", "value_model", "help("),
        ("SFT", "max_length", "It belongs to the data module: lit_rl.SupervisedDataModule(rows, max_length="),
        ("DPO", "ref_model", "Here it is reference=lit_rl."),
        ("GRPO", "args", "Here it is config=lit_rl.GRPOConfig(...), or a keyword for each setting (docs/from-trl.md)."),
        ("LanguageModel", "fused_head", "Write speedups={'fused_head': False}, where True is the default."),
        ("NativeGenerator", "cuda_graphs", "Write speedups={'cuda_graphs': True}, where False is the default."),
        ("GRPO", "group_siez", "Did you mean 'group_size'?"),
        ("PPO", "value_model", "Here it is critic=, of lit_rl.models.critics: SeparateCritic() or SharedTrunk()."),
        (
            "DPO",
            "train_dataset",
            "Rows belong to a data module: trainer.fit(module, datamodule=lit_rl.PreferenceDataMo",
        ),
        ("DPO", "batch_size", "It belongs to the data module: lit_rl.PreferenceDataModule(rows, batch_size=...)."),
        (
            "DPO",
            "label_smoothing",
            "label_smoothing is TRL's name. On the command line: algo.preference.sigmoid.label_",
        ),
        ("RewardModeling", "reward_funcs", "It learns from the rows of a data set."),
        ("RewardModeling", "temperature", "help("),
        ("Sampling", "n", "It belongs to the algorithm: group_size=."),
        ("Sampling", "num_beams", "help("),
        ("AdamW", "warmup_steps", "It belongs to the algorithm: scheduler=lit_rl.Linear(...)."),
        ("RolloutDataModule", "batch_size", "Here it is prompts_per_rollout=."),
        ("PreferenceDataModule", "max_seq_length", "Here it is max_length=."),
        ("RolloutDataModule", "num_workers", "Rows are read and tokenised once, before the first step."),
    ],
)
def test_a_keyword(kind: str, name: str, answer: str) -> None:
    with pytest.raises(ConfigError) as told:
        PYTHON[kind](**{name: 1})
    said = str(told.value)
    assert said.startswith(f"{kind} takes no {name}=. {answer}") and said.endswith(f"help({kind}) lists them.")


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("algo.learning_rate", "Did you mean 'optimizer.lr'?"),
        ("epsilon", "epsilon is TRL's name. Here: algo.loss.clip_low=... More: docs/from-trl.md."),
        ("batch_size", "What it may mean: data.prompts_per_rollout counts the prompts of a rollout ("),
        ("actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.n is verl's key. Here: algo.group_size=... More: d"),
        ("model.fused_head", "Did you mean 'model.speedups.fused_head'?"),
        ("algo.group_siez", "Did you mean 'group_size'? algo has group_size, groups, "),
    ],
)
def test_a_word_of_the_command_line(word: str, answer: str) -> None:
    with pytest.raises(ConfigError) as told:
        expand_aliases([f"{word}=1"])
    assert str(told.value).startswith(f"{word} is not a key. {answer}")


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("model.learning_rate", "Did you mean 'optimizer.lr'?"),
        ("model.num_generations", "Did you mean 'model.group_size'?"),
        ("model.max_completion_length", "Did you mean 'model.sampling.max_new_tokens'?"),
        ("model.tools", "It is an environment: env=lit_rl.FunctionTools(...), "),
        ("model.epsilon", "epsilon is TRL's name. For lit-rl train: algo.loss.clip_low=... More: docs/from-trl.md."),
        ("model.group_siez", "Did you mean 'group_size'? model has group_size, "),
        ("model.sampling.max_tokens", "Here it is max_new_tokens=."),
        ("trainer.epochs", "Did you mean 'trainer.max_epochs'?"),
        ("trainer.max_grad_norm", "Did you mean 'trainer.gradient_clip_val'?"),
        ("data.batch_size", "Here it is prompts_per_rollout=."),
        ("learning_rate", "Did you mean 'optimizer.lr'?"),
        ("lean_steps", "Did you mean 'model.generator.speedups.lean_steps'?"),
    ],
)
def test_an_option_of_lightning_cli(option: str, answer: str) -> None:
    words = ["--model", "GRPO", "--model.model", "tiny", "--model.reward", "lit_rl.exact_match", f"--{option}=1"]
    with pytest.raises(ConfigError) as told:
        lightning_words.check(words)
        lightning_app.command_line(words, run=False)
    assert str(told.value).startswith(f"{option} is not a key. {answer}")


def test_an_argument_of_from_pretrained_that_is_a_setting() -> None:
    with pytest.raises(ConfigError, match=r"^init_kwargs\.token is not taken: use the HF_TOKEN environment variable"):
        RewardModel("tiny", init_kwargs={"token": "x"})


def test_every_switch_of_a_speedup_has_its_key_and_its_keyword() -> None:
    rows: dict[str, tuple[str, str]] = {}
    for key, kind in (("model.speedups", ModelSpeedups), ("generator.speedups", DecodingSpeedups)):
        for name, usual in vars(kind()).items():
            said = f"write speedups={{{name!r}: {not usual}}}, where {usual} is the default"
            rows[name] = (f"{key}.{name}", said)
    assert {
        name: (other_names.column("key")[name], said) for name, said in other_names.column("speedups").items()
    } == rows


def test_keywords_in_the_table_are_of_classes_and_every_place_has_a_name() -> None:
    taken = {
        "algorithm": keyword_names(GRPO) | keyword_names(DPO),
        "data": keyword_names(RolloutDataModule)
        | keyword_names(PreferenceDataModule)
        | keyword_names(SupervisedDataModule),
        "optimizer": keyword_names(AdamW),
        "sampling": keyword_names(Sampling),
    }
    used = set()
    for column, names in taken.items():
        for name, answer in other_names.column(column).items():
            if isinstance(answer, list):
                missing = {*answer} - names - {"max_completion_tokens", "separator", "last_step_only", "betas"}
                assert not missing, (column, name)
            used.add(answer if isinstance(answer, str) else "")
    assert other_names.PLACES.keys() <= used
