"""A base in 4 or 8 bits under adapters (QLoRA), over images most of all: what is held so, what is learned, what is
refused.

bitsandbytes is beside torchvision in the folder of `make test-families`; it runs on a CPU too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoProcessor,
    AutoTokenizer,
    BitsAndBytesConfig,
)
from vision_runs import by_letters, quiet_trainer
from vision_seen import SEEN, Toy, drawn
from vision_toys import picture

from lit_rl.algorithms import GRPO, PPO, RewardModeling
from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import PreferenceDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.critics import AdapterCritic, SeparateCritic
from lit_rl.models.engine_weights import whole_weights
from lit_rl.models.forward import response_logprobs
from lit_rl.models.loaded_model import LoadedModel
from lit_rl.models.loading import quantization_config
from lit_rl.models.sharding import full_state_dict
from lit_rl.models.vision_parts import part_of

has_avx512bf16 = pytest.importorskip("bitsandbytes.functional").has_avx512bf16
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


def held_in_few_bits(folder: Path, bits: str, auto: Any, **how: Any) -> Any:
    return auto.from_pretrained(folder, quantization_config=quantization_config(bits), **how)


@pytest.mark.parametrize(("kind", "bits"), [("tiny", "nf4"), ("idefics3", "nf4"), ("llava", "int8")])
def test_a_loaded_model_in_few_bits_is_the_run_of_its_name(
    toy_folder: Any, tiny_dir: Path, kind: str, bits: Any, tmp_path: Path
) -> None:
    seeing = kind != "tiny"
    folder = toy_folder(kind) if seeing else tiny_dir
    auto, given = (AutoModelForImageTextToText, AutoProcessor) if seeing else (AutoModelForCausalLM, AutoTokenizer)
    tokenizer = given.from_pretrained(folder)

    def run(model: Any, steps: int = 2, resume: Path | None = None, **more: Any) -> Any:
        reward: Any = by_letters if seeing else lambda completions, **_: [float(len(set(text))) for text in completions]
        texts = RolloutDataModule(rows=[{"prompt": f"{i}+1="} for i in range(8)], prompts_per_rollout=4, val_fraction=0)
        module = GRPO(model, reward, group_size=4, beta=0.1, **SHORT, **more)
        trainer = quiet_trainer(tmp_path, steps)
        trainer.fit(module, datamodule=rollouts() if seeing else texts, ckpt_path=resume)
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return module

    def adapted(*, prepared: bool) -> Any:
        base = held_in_few_bits(folder, bits, auto)
        base = peft.prepare_model_for_kbit_training(base) if prepared else base
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **settings))

    def adapters(module: Any) -> dict[str, torch.Tensor]:
        return {name: each for name, each in module.policy.state_dict().items() if ".lora_" in name}

    by_name = run(LanguageModel(str(folder), lora=Lora(r=2), quantization=bits))
    config = by_name.policy.peft_config["default"]
    settings = {"r": 2, "lora_alpha": 32, "target_modules": config.target_modules}
    settings["exclude_modules"] = config.exclude_modules
    wanted = adapters(by_name)
    by_setting = run(LoadedModel(held_in_few_bits(folder, bits, auto), tokenizer, lora=Lora(r=2)))
    run(adapted(prepared=False), 1, tokenizer=tokenizer)
    resumed = run(adapted(prepared=False), tokenizer=tokenizer, resume=tmp_path / "1.ckpt")
    behind = run(adapted(prepared=True), tokenizer=tokenizer)
    for module, apart in ((by_setting, 0), (resumed, 0), (behind, 1e-5)):  # recomputed activations round otherwise
        torch.testing.assert_close(adapters(module), wanted, rtol=0, atol=apart)
    assert behind.model.gradient_checkpointing is True and behind.model.quantization == bits

    facts = {"base_model": kind, "algorithm": "grpo"}
    folders = []
    for name, module in {"name": by_name, "object": resumed}.items():
        report = module.export(full_state_dict(module.policy), tmp_path / name, facts)
        assert report.adapter is not None and not report.note
        folders.append(report.folder)
    one, other = (auto.from_pretrained(each) for each in folders)
    assert not hasattr(other.config, "quantization_config")
    whole, again = one.state_dict(), other.state_dict()
    assert whole.keys() == again.keys() and all(torch.equal(each, again[name]) for name, each in whole.items())
    LanguageModel(str(folder), adapter=str(folders[1] / "adapter"), quantization=bits).load()


def test_a_loaded_model_in_few_bits_whose_whole_weights_are_missing(tiny_dir: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    model = held_in_few_bits(tiny_dir, "nf4", AutoModelForCausalLM, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"quantised weights cannot be trained\. Add model\.lora"):
        GRPO(model, by_letters, tokenizer=tokenizer)
    narrow = LoadedModel(model, tokenizer, lora=Lora(r=2))
    assert (narrow.dtype, narrow.quantization) == ("bfloat16", "nf4")
    held = narrow.held_in("float32").load().get_base_model()  # as trainer.precision has it
    assert {each.dtype for each in held.parameters()} == {torch.float32, torch.uint8}

    model = held_in_few_bits(tiny_dir, "nf4", AutoModelForCausalLM)
    model.save_pretrained(tmp_path / "packed")
    model.config._name_or_path = str(tmp_path / "packed")
    with pytest.raises(StorageError, match=r"quantised, and its adapter is exported merged.*are quantised themselves"):
        LoadedModel(model, tokenizer, lora=Lora(r=2))
    floats = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=torch.bfloat16)
    stored = AutoModelForCausalLM.from_pretrained(tiny_dir, quantization_config=floats)
    with pytest.raises(ConfigError, match=r"quantised with bnb_4bit_quant_storage=torch.bfloat16"):
        LoadedModel(stored, tokenizer, lora=Lora(r=2))


@pytest.mark.skipif(not has_avx512bf16(), reason="bitsandbytes packs weights on processors with AVX512-BF16 alone")
def test_weights_that_a_run_before_has_packed_are_refused_and_not_packed_afterwards(tiny_dir: Path) -> None:
    tokenizer, ids = AutoTokenizer.from_pretrained(tiny_dir), torch.tensor([[5, 6, 7]])
    model = held_in_few_bits(tiny_dir, "nf4", AutoModelForCausalLM)
    LoadedModel(model, tokenizer, lora=Lora(r=2))
    model.eval().generate(ids, max_new_tokens=1)
    LoadedModel(model, tokenizer, lora=Lora(r=2))
    another = held_in_few_bits(tiny_dir, "nf4", AutoModelForCausalLM)
    another.eval().generate(ids, max_new_tokens=1)
    with pytest.raises(ConfigError, match="was run on the CPU in evaluation mode before\."):
        LoadedModel(another, tokenizer, lora=Lora(r=2))


def test_a_reward_model_goes_on_from_a_loaded_classifier_in_few_bits(tiny_dir: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "x"} for n in range(4)]
    torch.manual_seed(0)
    tokenizer, classes = AutoTokenizer.from_pretrained(tiny_dir), AutoModelForSequenceClassification
    classes.from_pretrained(tiny_dir, num_labels=1).save_pretrained(tmp_path / "rm")
    tokenizer.save_pretrained(tmp_path / "rm")

    def run(model: LanguageModel) -> Any:
        module = RewardModeling(model)
        data = PreferenceDataModule(rows=pairs, batch_size=2, val_fraction=0)
        quiet_trainer(tmp_path, 2).fit(module, datamodule=data)
        return module

    def packed(*skipped: str) -> LanguageModel:
        config = quantization_config("nf4")
        config.llm_int8_skip_modules = list(skipped)
        model = classes.from_pretrained(tmp_path / "rm", quantization_config=config)
        return LoadedModel(model, tokenizer, lora=Lora(r=2))

    by_object, by_name = (
        run(packed("score")),
        run(LanguageModel(str(tmp_path / "rm"), lora=Lora(r=2), quantization="nf4")),
    )
    ours, theirs = ({n: p for n, p in m.policy.named_parameters() if p.requires_grad} for m in (by_object, by_name))
    assert ours.keys() == theirs.keys() and all(torch.equal(each, theirs[name]) for name, each in ours.items())
    facts = {"base_model": "rm", "algorithm": "reward_model"}
    report = by_object.export(full_state_dict(by_object.policy), tmp_path / "hf", facts)
    head = by_object.policy.get_base_model().score.modules_to_save["default"].weight
    assert torch.equal(classes.from_pretrained(report.folder).score.weight, head)
    with pytest.raises(ConfigError, match=r"whose head, score, is quantised.*llm_int8_skip_modules=\['score'\]"):
        run(packed("nothing"))


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
