"""An adapter by itself: which policies are one, and a folder that PEFT reads back bit by bit."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, PeftModel
from plain_scores import token_logits
from safetensors.torch import load_file
from shipping_cases import LORAS, QV, UNTIED, assert_unchanged, described, learn, state_of
from transformers import AutoModelForCausalLM

from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.engine_weights import adapter_only, write_adapter

SHIPPED = ("lora", "rslora", "patterns")


@pytest.mark.parametrize("kind", SHIPPED)
def test_the_folder_holds_the_adapter(make_model, make_completions, tmp_path, kind):
    folder = make_model(tie_word_embeddings=True)
    policy = described(folder, LORAS[kind]).load().eval()
    assert adapter_only(policy) is None
    learn(policy)
    before = state_of(policy)
    write_adapter(policy, tmp_path / "a" / "b")
    assert_unchanged(policy, before)
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == ["adapter_config.json", WEIGHTS]
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "a" / "b").eval()
    completions = make_completions([[5, 6, 7]], [[1, 2]])
    assert torch.equal(token_logits(again, completions), token_logits(policy, completions))
    assert policy.peft_config["default"].inference_mode is False, "the policy's own config must stay as it is"


WEIGHTS = "adapter_model.safetensors"


def test_a_folder_that_is_being_read_stays_whole_for_its_reader(make_model, tmp_path):
    """An engine maps the file into its memory: writing over it would change what is read."""
    policy = LanguageModel(str(make_model()), lora=Lora(r=2)).load()
    write_adapter(policy, tmp_path)
    old = load_file(tmp_path / WEIGHTS)
    with (tmp_path / WEIGHTS).open("rb") as reader:
        learn(policy)
        write_adapter(policy, tmp_path)
        content = reader.read()
    assert content != (tmp_path / WEIGHTS).read_bytes()
    assert not all(torch.equal(tensor, old[name]) for name, tensor in load_file(tmp_path / WEIGHTS).items())


REFUSED = {
    "dora": "use_dora",
    "modules-to-save": "modules_to_save",
    "biases": "bias=lora_only",
    "biases-of-the-adapter": "lora_bias",
    "embedding": "embed_tokens",
    "head": "lm_head",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_more_than_a_plain_adapter_is_refused_in_words(make_model, tmp_path, kind):
    policy = described(make_model(), {**LORAS, **UNTIED}[kind]).load()
    reason = adapter_only(policy)
    assert reason is not None and REFUSED[kind] in reason
    with pytest.raises(ConfigError, match=REFUSED[kind]):
        write_adapter(policy, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_a_whole_model_is_no_adapter(make_model, tmp_path):
    policy = LanguageModel(str(make_model())).load()
    assert "not a LoRA" in str(adapter_only(policy))
    with pytest.raises(ConfigError, match="not a LoRA"):
        write_adapter(policy, tmp_path)


def test_the_state_of_the_policy_is_asked_too(make_model):
    """Two adapters at once, one that is merged in place, and one whose base was changed when it was made."""
    policy = LanguageModel(str(make_model()), lora=Lora(r=2)).load()
    policy.merge_adapter()
    assert "merged" in str(adapter_only(policy))
    policy.unmerge_adapter()
    assert adapter_only(policy) is None
    policy.add_adapter("second", LoraConfig(**QV))
    assert adapter_only(policy) is None, "the second one is not active"
    policy.base_model.set_adapter(["default", "second"])
    assert "2 adapters" in str(adapter_only(policy))
    changed = described(make_model(folder="other"), {**QV, "init_lora_weights": "pissa"}).load()
    assert "pissa" in str(adapter_only(changed))


def test_only_the_active_adapter_is_written(make_model, tmp_path):
    policy = LanguageModel(str(make_model()), lora=Lora(r=2)).load()
    policy.add_adapter("second", LoraConfig(**{**QV, "r": 3}))
    policy.set_adapter("second")
    write_adapter(policy, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 3
    stored = load_file(tmp_path / WEIGHTS)
    assert {name.split(".")[-3] for name in stored} == {"q_proj", "v_proj"} and not any("second" in n for n in stored)


def test_a_folder_that_cannot_be_written_says_so(make_model, tmp_path):
    policy = LanguageModel(str(make_model()), lora=Lora(r=2)).load()
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="cannot be written"):
        write_adapter(policy, tmp_path / "file")
