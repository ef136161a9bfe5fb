"""`model=` takes a model that is loaded already: the run is that of the folder, bit for bit, and trains the object."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning as L
import peft
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoProcessor,
    AutoTokenizer,
)
from vision_toys import picture

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
from lit_rl.models.loaded_model import why_unpublished
from lit_rl.models.modes import recomputes, set_checkpointing
from lit_rl.models.sharding import full_state_dict
from lit_rl.models.trunk import base_of, name_in_base
from lit_rl.models.vision_parts import part_of, sees

PAIRS = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "x"} for n in range(4)]
PROMPTS = [{"prompt": row["prompt"]} for row in PAIRS]
TEXTS = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
STEP: dict[str, Any] = {"optimizer": AdamW(lr=0.01), "scheduler": Constant()}


def distinct(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(len(set(text if isinstance(text, str) else text[0]["content"]))) for text in completions]


def loaded(folder: Path) -> tuple[Any, Any]:
    if folder.name == "digits":
        return AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def shown(rows: list[dict[str, Any]], model: Any) -> list[dict[str, Any]]:
    """The rows as conversations about pictures, where the model sees any."""
    config = (LanguageModel(model) if isinstance(model, str) else model).config
    if not sees(config):
        return rows
    of = {key: [{"role": "user" if key == "prompt" else "assistant"}] for key in rows[0]}
    said = [{key: [of[key][0] | {"content": text}] for key, text in row.items()} for row in rows]
    return [row | {"image": picture(i)} for i, row in enumerate(said)]


def by_rollout(kind: type) -> Any:
    def make(model: Any, **more: Any) -> tuple[Any, Any]:
        drawn = {"sampling": Sampling(max_new_tokens=3), "group_size": 4} | ({"beta": 0.1} if kind is GRPO else {})
        validated = {"prompts_per_rollout": 2, "val_fraction": 0.25 if "evaluation" in more else 0}
        data = RolloutDataModule(rows=shown(PROMPTS, model), **validated)
        return kind(model, distinct, **drawn, **STEP, **more), data

    return make


def by_pairs(model: Any, **more: Any) -> tuple[Any, Any]:
    return DPO(model, **STEP, **more), PreferenceDataModule(rows=shown(PAIRS, model), batch_size=2, val_fraction=0)


def by_texts(model: Any, **more: Any) -> tuple[Any, Any]:
    return SFT(model, **STEP, **more), SupervisedDataModule(rows=shown(TEXTS, model), batch_size=2, val_fraction=0)


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


@pytest.fixture(params=["tiny", "digits"])
def shipped(request: pytest.FixtureRequest, tiny_dir: Path) -> Path:
    """The policy over text, and the one over images."""
    return tiny_dir.with_name(request.param)


@pytest.mark.parametrize("name", MAKERS)
def test_a_run_of_an_object_is_the_run_of_its_folder(name: str, shipped: Path, tmp_path: Path) -> None:
    model, tokenizer = loaded(shipped)
    held = getattr(tokenizer, "tokenizer", tokenizer)
    held.padding_side, initial = "right", {key: each.clone() for key, each in model.state_dict().items()}
    template = held.chat_template
    by_object = fit(MAKERS[name](model, tokenizer=tokenizer), tmp_path)
    by_path = fit(MAKERS[name](str(shipped)), tmp_path)
    assert same(by_object.policy, by_path.policy)
    assert by_object.policy is model  # trained in place
    assert any(not torch.equal(each, model.state_dict()[key]) for key, each in initial.items())
    assert held is getattr(tokenizer, "tokenizer", tokenizer)
    assert (held.padding_side, held.chat_template) == ("right", template)
    trained = {key for key, each in by_object.policy.named_parameters() if each.requires_grad}
    assert trained == {key for key, each in by_path.policy.named_parameters() if each.requires_grad}


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


def test_a_run_is_gone_on_with_by_the_object_loaded_anew_and_exported(shipped: Path, tmp_path: Path) -> None:
    model, tokenizer = loaded(shipped)
    fit(MAKERS["grpo"](model, tokenizer=tokenizer), tmp_path, steps=1)
    with pytest.raises(StorageError, match=r"trained in place since it was loaded.*Load it anew"):
        fit(MAKERS["grpo"](model, tokenizer=tokenizer), tmp_path, resume=tmp_path / "1.ckpt")
    resumed = fit(MAKERS["grpo"](loaded(shipped)[0], tokenizer=tokenizer), tmp_path, resume=tmp_path / "1.ckpt")
    whole = fit(MAKERS["grpo"](loaded(shipped)[0], tokenizer=tokenizer), tmp_path)
    assert same(resumed.policy, whole.policy)
    facts = {"base_model": "tiny", "algorithm": "grpo"}
    report = whole.export(full_state_dict(whole.policy), tmp_path / "hf", facts)
    assert same(type(model).from_pretrained(report.folder), whole.policy)
    read = LanguageModel(str(report.folder))
    assert read.tokenizer.chat_template == tokenizer.chat_template and read.sees == (shipped.name == "digits")
    assert read.processor is None or read.processor.name == whole.model.processor.name
    again = GRPO.load_from_checkpoint(
        tmp_path / "2.ckpt", model=loaded(shipped)[0], tokenizer=tokenizer, reward=distinct
    )
    assert same(again.policy, whole.policy)


def test_which_parts_of_a_model_over_images_are_trained(tiny_dir: Path, tmp_path: Path) -> None:
    """As `freeze` says, with adapters or without; the adapter of a PeftModel says it itself, as one of a folder."""
    digits = tiny_dir.with_name("digits")

    def parts(module: Any) -> set[str]:
        part = part_of(base_of(module.policy))
        return {part(name_in_base(name)) for name, each in module.policy.named_parameters() if each.requires_grad}

    everything = fit(MAKERS["sft"](LoadedModel(*loaded(digits), freeze=[])), tmp_path)
    assert parts(everything) == {"vision", "projector", "text"}
    assert same(everything.policy, fit(MAKERS["sft"](LanguageModel("digits", freeze=[])), tmp_path).policy)
    again = fit(MAKERS["sft"](everything.policy, tokenizer=loaded(digits)[1]), tmp_path)  # an object that ran before
    assert parts(again) == {"projector", "text"} and type(again.policy.lm_head).__name__ == "BanningHead"
    by_setting = fit(MAKERS["grpo"](LoadedModel(*loaded(digits), lora=Lora(r=4, targets=["q_proj"]))), tmp_path)
    by_path = fit(MAKERS["grpo"](LanguageModel("digits", lora=Lora(r=4, targets=["q_proj"]))), tmp_path)
    assert same(by_setting.policy, by_path.policy) and parts(by_setting) == {"text"}

    model, processor = loaded(digits)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(ConfigError, match=r"a PeftModel, whose adapter says which parts are trained.*leave it out"):
        LoadedModel(adapted, processor, freeze=["vision"])
    processor.chat_template = processor.chat_template.replace("assistant", "Assistant")
    module = fit(MAKERS["grpo"](adapted, tokenizer=processor), tmp_path)
    continued = LanguageModel("digits", adapter=str(tmp_path / "adapter"), chat_template=processor.chat_template)
    assert parts(module) == {"vision", "text"}
    assert same(module.policy, fit(MAKERS["grpo"](continued), tmp_path).policy)
    facts = {"base_model": "digits", "algorithm": "grpo"}
    report = module.export(full_state_dict(module.policy), tmp_path / "adapted", facts)
    assert report.adapter is not None and not report.note
    assert AutoProcessor.from_pretrained(report.folder).chat_template == processor.chat_template

    untied = AutoConfig.from_pretrained(digits)
    untied.tie_word_embeddings = untied.text_config.tie_word_embeddings = False
    plain = AutoModelForImageTextToText.from_pretrained(digits, config=untied)
    heads = peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    with pytest.raises(ConfigError, match=r"plain linear head; this one's is Linear\. .*LoadedModel\(model, processor"):
        GRPO(heads, distinct, tokenizer=processor).configure_model()


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
    seeing, processor = loaded(tiny_dir.with_name("digits"))
    refused: dict[str, Any] = {
        r"Qwen2ForCausalLM that is loaded already, and its tokenizer did not come: pass tokenizer=": (model, None),
        r"and tokenizer is a str: pass tokenizer=": (model, "tiny"),
        r"tokenizer belongs to a model that is loaded already": ("tiny", tokenizer),
        r"model is a Linear, a module of torch that is .*\. Allowed is a name": (torch.nn.Linear(2, 2), tokenizer),
        r"model is the class Qwen2ForCausalLM": (type(model), None),
        r"Idefics3\w+ that is .*and its processor did not come: .*tokenizer=AutoProcessor": (seeing, None),
        r"tokenizer is a \w+, no processor of images: pass tokenizer=AutoProcessor": (seeing, processor.tokenizer),
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
    with pytest.raises(ConfigError, match=r"Idefics3Model; a causal.*one saved as Idefics3ForConditionalGeneration"):
        GRPO(seeing.model, distinct, tokenizer=processor).configure_model()
    with pytest.raises(ConfigError, match=r"model\.freeze=\['vision'\] freezes parts of a model over images"):
        LoadedModel(model, tokenizer, freeze=["vision"]).load()
    model.is_quantized, model.quantization_method = True, "gptq"
    with pytest.raises(ConfigError, match=r"that is quantised by gptq, .*quantization_config=BitsAndBytesConfig"):
        GRPO(model, distinct, tokenizer=tokenizer)
    model.is_quantized = False
    spoken = LoadedModel(model, processor).read_tokenizer()  # as in TRL, the tokenizer of a processor serves
    assert spoken.chat_template == processor.chat_template and spoken.get_vocab() == processor.tokenizer.get_vocab()
    prompts = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ConfigError, match=r"The adapter of model is of PEFT's kind PROMPT_TUNING"):
        GRPO(prompts, distinct, tokenizer=tokenizer)


def test_which_files_hold_the_weights_that_were_quantised(tiny_dir: Path, tmp_path: Path) -> None:
    """Embeddings and norms are not, also where a dtype has rounded them."""
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.bfloat16).float()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"]))
    torch.nn.init.normal_(base_of(adapted).model.norm.modules_to_save["default"].weight)
    other = AutoModelForCausalLM.from_pretrained(tiny_dir)
    longer = AutoModelForCausalLM.from_pretrained(tiny_dir)
    longer.resize_token_embeddings(300)
    torch.nn.init.normal_(other.model.norm.weight)
    for name, each in {"other": other, "longer": longer, "packed": other, "gone": other}.items():
        each.save_pretrained(tmp_path / name)
    packed = tmp_path / "packed" / "config.json"
    packed.write_text(packed.read_text().replace("{", '{"quantization_config": {},', 1))
    (tmp_path / "gone" / "model.safetensors").unlink()
    expected = {
        str(tiny_dir): "^$",
        "": "its config names no files",
        "nobody/nothing": "'nobody/nothing' are not on this machine",
        str(tmp_path / "other"): r"are others: model\.norm\.weight differs",
        str(tmp_path / "longer"): r"are others: (model\.embed_tokens|lm_head)\.weight differs",
        str(tmp_path / "packed"): "are quantised themselves",
        str(tmp_path / "gone"): "are not on this machine .*holds no",
    }
    for name, message in expected.items():
        assert re.search(message, why_unpublished(base_of(adapted), name, None)), name


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
