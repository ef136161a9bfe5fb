"""`model=` takes a model that is loaded already: the run is that of the folder, bit for bit, and trains the object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import peft
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from lit_rl import (
    DPO,
    GRPO,
    PPO,
    RLOO,
    SFT,
    AdamW,
    Constant,
    Evaluation,
    LanguageModel,
    LoadedModel,
    Lora,
    PreferenceDataModule,
    RewardModeling,
    RolloutDataModule,
    Sampling,
    SupervisedDataModule,
)
from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.generation.vllm.engine_settings import model_arguments
from lit_rl.models.modes import recomputes, set_checkpointing
from lit_rl.models.sharding import full_state_dict

PAIRS = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "x"} for n in range(4)]
PROMPTS = [{"prompt": row["prompt"]} for row in PAIRS]
TEXTS = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
STEP: dict[str, Any] = {"optimizer": AdamW(lr=0.01), "scheduler": Constant()}


def distinct(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


def loaded(tiny_dir: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(tiny_dir), AutoTokenizer.from_pretrained(tiny_dir)


def by_rollout(kind: type) -> Any:
    def make(model: Any, **more: Any) -> tuple[Any, Any]:
        drawn = {"sampling": Sampling(max_new_tokens=3), "group_size": 4} | ({"beta": 0.1} if kind is GRPO else {})
        data = RolloutDataModule(rows=PROMPTS, prompts_per_rollout=2, val_fraction=0.25 if "evaluation" in more else 0)
        return kind(model, distinct, **drawn, **STEP, **more), data

    return make


def by_pairs(model: Any, **more: Any) -> tuple[Any, Any]:
    return DPO(model, **STEP, **more), PreferenceDataModule(rows=PAIRS, batch_size=2, val_fraction=0)


def by_texts(model: Any, **more: Any) -> tuple[Any, Any]:
    return SFT(model, **STEP, **more), SupervisedDataModule(rows=TEXTS, batch_size=2, val_fraction=0)


MAKERS = {"grpo": by_rollout(GRPO), "rloo": by_rollout(RLOO), "ppo": by_rollout(PPO), "dpo": by_pairs, "sft": by_texts}


def fit(made: tuple[Any, Any], folder: Path, steps: int = 2, resume: Path | None = None, **how: Any) -> Any:
    module, data = made
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "use_distributed_sampler": False}
    trainer = L.Trainer(max_steps=steps, accelerator="cpu", default_root_dir=folder, **quiet, **how)
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    if trainer.optimizers:  # of processes that are forked the one that forks them has none
        trainer.save_checkpoint(folder / f"{steps}.ckpt")
    return module


def same(one: Any, other: Any) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize("name", MAKERS)
def test_a_run_of_an_object_is_the_run_of_its_folder(name: str, tiny_dir: Path, tmp_path: Path) -> None:
    model, tokenizer = loaded(tiny_dir)
    side, initial = tokenizer.padding_side, {key: each.clone() for key, each in model.state_dict().items()}
    by_object = fit(MAKERS[name](model, tokenizer=tokenizer), tmp_path)
    by_path = fit(MAKERS[name](str(tiny_dir)), tmp_path)
    assert same(by_object.policy, by_path.policy)
    assert by_object.policy is model  # trained in place
    assert any(not torch.equal(each, model.state_dict()[key]) for key, each in initial.items())
    assert tokenizer.padding_side == side


def test_a_model_of_peft_is_the_run_of_lora(tiny_dir: Path, tmp_path: Path) -> None:
    model, tokenizer = loaded(tiny_dir)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # as a module with seed 0 makes its adapters
        adapted = peft.get_peft_model(
            model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=32, target_modules="all-linear")
        )
    by_object = fit(MAKERS["grpo"](adapted, tokenizer=tokenizer), tmp_path)
    by_path = fit(MAKERS["grpo"](LanguageModel(str(tiny_dir), lora=Lora(r=4))), tmp_path)
    by_setting = fit(MAKERS["grpo"](LoadedModel(*loaded(tiny_dir), lora=Lora(r=4))), tmp_path)
    assert by_object.policy is adapted
    assert same(by_object.policy, by_path.policy) and same(by_setting.policy, by_path.policy)
    held = torch.load(tmp_path / "2.ckpt", weights_only=True)["state_dict"]
    assert held and all("lora_" in name for name in held)


def test_a_run_is_gone_on_with_by_the_object_loaded_anew_and_exported(tiny_dir: Path, tmp_path: Path) -> None:
    model, tokenizer = loaded(tiny_dir)
    fit(MAKERS["grpo"](model, tokenizer=tokenizer), tmp_path, steps=1)
    with pytest.raises(StorageError, match=r"trained in place since it was loaded.*Load it anew"):
        fit(MAKERS["grpo"](model, tokenizer=tokenizer), tmp_path, resume=tmp_path / "1.ckpt")
    whole = fit(MAKERS["grpo"](loaded(tiny_dir)[0], tokenizer=tokenizer), tmp_path, resume=tmp_path / "1.ckpt")
    facts = {"base_model": "tiny", "algorithm": "grpo"}
    report = whole.export(full_state_dict(whole.policy), tmp_path / "hf", facts)
    assert same(AutoModelForCausalLM.from_pretrained(report.folder), whole.policy)
    again = GRPO.load_from_checkpoint(
        tmp_path / "2.ckpt", model=loaded(tiny_dir)[0], tokenizer=tokenizer, reward=distinct
    )
    assert same(again.policy, whole.policy)


def test_a_model_that_has_no_files(make_nothing: Any, tmp_path: Path, tiny_dir: Path) -> None:
    """Made in code: nothing but the object says what it is."""
    model, tokenizer = make_nothing
    model.model.embed_tokens.requires_grad_(False)
    set_checkpointing(model, True)
    rows = model.model.embed_tokens.weight.clone()
    module = fit(MAKERS["sft"](model, tokenizer=tokenizer), tmp_path)
    assert module.model.name == "Qwen2ForCausalLM" and module.model.label == "Qwen2ForCausalLM"
    assert torch.equal(model.model.embed_tokens.weight, rows) and recomputes(model)
    held = torch.load(tmp_path / "2.ckpt", weights_only=True)["state_dict"]
    assert held and not any("embed_tokens" in name for name in held)
    module.export(full_state_dict(module.policy), tmp_path / "hf", {"base_model": "mine", "algorithm": "sft"})
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), module.policy)


@pytest.fixture
def make_nothing(tiny_dir: Path) -> tuple[Any, Any]:
    config = AutoModelForCausalLM.from_pretrained(tiny_dir).config.to_dict()
    from transformers import Qwen2Config

    config.pop("_name_or_path", None)
    return AutoModelForCausalLM.from_config(Qwen2Config(**config)), AutoTokenizer.from_pretrained(tiny_dir)


def test_a_reward_model_goes_on_from_a_classifier(tiny_dir: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    scorer = AutoModelForSequenceClassification.from_pretrained(tiny_dir, num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    scorer.save_pretrained(tmp_path / "rm")
    tokenizer.save_pretrained(tmp_path / "rm")
    data = lambda: PreferenceDataModule(rows=PAIRS, batch_size=2, val_fraction=0)  # noqa: E731
    by_object = fit((RewardModeling(scorer, tokenizer=tokenizer, **STEP), data()), tmp_path)
    by_path = fit((RewardModeling(str(tmp_path / "rm"), **STEP), data()), tmp_path)
    assert by_object.policy is scorer and same(scorer, by_path.policy)
    facts = {"base_model": "tiny", "algorithm": "reward_model"}
    by_object.export(full_state_dict(by_object.policy), tmp_path / "hf", facts)
    assert same(AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf"), scorer)


def test_a_language_model_is_no_reward_model(tiny_dir: Path) -> None:
    module = RewardModeling(loaded(tiny_dir)[0], tokenizer=loaded(tiny_dir)[1])
    with pytest.raises(ConfigError, match="model is a Qwen2ForCausalLM .*AutoModelForSequenceClassification"):
        module.configure_model()


def test_what_is_not_taken_says_what_to_pass(tiny_dir: Path) -> None:
    model, tokenizer = loaded(tiny_dir)
    refused: dict[str, Any] = {
        r"Qwen2ForCausalLM that is loaded already, and its tokenizer did not come: pass tokenizer=": (model, None),
        r"and tokenizer is a str: pass tokenizer=": (model, "tiny"),
        r"tokenizer belongs to a model that is loaded already": ("tiny", tokenizer),
        r"model is a Linear, a module of torch that is .*\. Allowed is a name": (torch.nn.Linear(2, 2), tokenizer),
        r"model is the class Qwen2ForCausalLM": (type(model), None),
    }
    for message, (given, tokens) in refused.items():
        with pytest.raises(ConfigError, match=message):
            GRPO(given, distinct, tokenizer=tokens)
    with pytest.raises(ConfigError, match=r"revision is no setting"):
        LoadedModel(model, tokenizer, revision="main")
    with pytest.raises(ConfigError, match=r"Qwen2Model; a causal"):
        GRPO(model.model, distinct, tokenizer=tokenizer).configure_model()
    with pytest.raises(ConfigError, match=r"vLLM .* model is an object"):
        model_arguments(LoadedModel(model, tokenizer))
    model.is_quantized = True
    with pytest.raises(ConfigError, match=r"is quantised, and an export needs"):
        GRPO(model, distinct, tokenizer=tokenizer)
    model.is_quantized = False
    prompts = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ConfigError, match=r"The adapter of model is of PEFT's kind PROMPT_TUNING"):
        GRPO(prompts, distinct, tokenizer=tokenizer)


def test_the_policy_before_its_first_step_is_not_kept(tiny_dir: Path, tmp_path: Path) -> None:
    model, tokenizer = loaded(tiny_dir)
    module, data = MAKERS["grpo"](model, tokenizer=tokenizer, evaluation=Evaluation(win_rate_against="base"))
    with pytest.raises(ConfigError, match=r"eval\.win_rate_against=base .*model is an object"):
        fit((module, data), tmp_path)


def test_what_a_forked_process_learned_comes_back(tiny_dir: Path, tmp_path: Path) -> None:
    """As `strategy="ddp_notebook"` of a notebook: the process that calls `fit` has loaded no policy of its own."""
    module = fit(by_rollout(GRPO)("tiny"), tmp_path, 1, strategy="ddp_fork")
    exported = module.save_pretrained(tmp_path / "hf")
    assert exported is not None
    here = fit(by_rollout(GRPO)("tiny"), tmp_path, 1)
    ours, theirs = (dict(each.policy.named_parameters()) for each in (module, here))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    base = AutoModelForCausalLM.from_pretrained(tiny_dir)
    assert any(not torch.equal(tensor, ours[name]) for name, tensor in base.named_parameters())


@pytest.mark.parametrize("case", ["merged", "frozen", "not trainable", "merged in place"])
def test_a_policy_of_which_nothing_is_trained_says_what_to_pass(case: str, tiny_dir: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_dir)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    policy: Any = base.requires_grad_(False)
    if case != "frozen":
        policy = peft.get_peft_model(base.requires_grad_(True), config)
    if case == "merged":
        policy = policy.merge_and_unload()
    elif case == "merged in place":
        policy.merge_adapter()
    elif case == "not trainable":
        policy.save_pretrained(tmp_path / "adapter")
        policy = peft.PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(tiny_dir), str(tmp_path / "adapter")
        )
    what = {
        "not trainable": r"False \(PeftModel\.from_pretrained loads an adapter frozen\).*is_trainable=True",
        "merged in place": r"merged into 2 of its 2 layers.*unmerge_adapter\(\)",
    }.get(case, r"Nothing of model is trained: all \d+ parameters of the \w+ have.*requires_grad_\(True\)")
    with pytest.raises(ConfigError, match=what):
        fit(by_rollout(GRPO)(policy, tokenizer=AutoTokenizer.from_pretrained(tiny_dir)), tmp_path)


def test_float64_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    module, data = by_rollout(GRPO)("tiny")
    with pytest.raises(ConfigError, match=r"trainer\.precision=64-true.*32-true"):
        fit((module, data), tmp_path, precision="64-true")
    assert module.policy is None
