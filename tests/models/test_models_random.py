"""`scripts/make_models.py random`: known shapes, and a tokenizer that every text passes through."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lit_rl.models import LanguageModel

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_models.py"
spec = importlib.util.spec_from_file_location("make_models", SCRIPT)
assert spec is not None and spec.loader is not None
make_models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_models)


@pytest.mark.parametrize(
    "name, parameters",  # as their makers count them, tied weights once
    [
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-0.6b", 596_049_920),
        ("smollm2-135m", 134_515_008),
        ("llama3.2-1b", 1_235_814_400),
    ],
)
def test_the_shapes_have_the_published_number_of_parameters(name, parameters):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_models.shapes()[name])
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen3-0.6b", "llama3.2-1b"])
def test_what_it_writes_loads_as_a_policy(name, tmp_path, monkeypatch):
    config = make_models.shapes()[name]
    small = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, head_dim=16)
    config.update({**small, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512})
    config.layer_types = ["full_attention"]
    monkeypatch.setattr(make_models, "shapes", lambda: {name: config})
    make_models.make_random(name, tmp_path / "model", dtype="bfloat16")
    model = LanguageModel(str(tmp_path / "model"), dtype="auto")
    assert model.load().dtype == torch.bfloat16
    assert (model.eos_ids, model.pad_id) == ((258,), 256)
    for text in ("Hello", "naïve 日本語 🙂", " two  spaces\n"):
        ids = model.tokenizer.encode(text)
        assert len(ids) == len(text.encode()) and model.tokenizer.decode(ids) == text
    chat = [{"role": "user", "content": "hi"}]
    rendered = model.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
