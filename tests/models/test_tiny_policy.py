"""The shipped policy is what the documents say, and its script makes it."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_rl.data.tasks import Addition


@pytest.fixture(scope="module")
def script(root):
    spec = importlib.util.spec_from_file_location("make_models", root / "scripts" / "make_models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_small_and_vllm_can_run_it(tiny_dir):
    assert sum(path.stat().st_size for path in tiny_dir.iterdir()) < 4 * 2**20
    model = AutoModelForCausalLM.from_pretrained(tiny_dir)
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert model.config.model_type == "qwen2"
    assert model.config.hidden_size // model.config.num_attention_heads >= 32
    assert not list(tiny_dir.glob("*.bin")) and (tiny_dir / "model.safetensors").exists()


def test_its_tokenizer_survives_a_reload(tiny_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    for text in ("17+25=", "42", " two  spaces ", "naïve ☃ 数", "line\nbreak\ttab"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    rendered = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    marked = [i for i, m in zip(encoded["input_ids"], encoded["assistant_masks"]) if m]
    assert tokenizer.decode(marked) == "2<|im_end|>"


def test_it_solves_a_third_to_a_half_when_it_samples(script, tiny_dir):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_dir), AutoTokenizer.from_pretrained(tiny_dir)
    held_out = Addition().val()
    assert 1 / 3 <= script.accuracy(model, held_out, tokenizer, temperature=1.0) <= 1 / 2
    assert 0.45 <= script.accuracy(model, held_out, tokenizer, temperature=0.0) <= 0.65


def test_no_prompt_stands_in_both_sets():
    task = Addition()
    train, val = ({row["prompt"] for row in rows} for rows in (task.train(), task.val()))
    assert not train & val and len(train) + len(val) == 10_000 and len(val) == 500


@pytest.mark.exhaustive
def test_the_script_is_deterministic(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "TARGET", 0.0)  # stop at the first look
    digests = []
    for name in ("a", "b"):
        monkeypatch.setattr(sys, "argv", ["make_models.py", "tiny", str(tmp_path / name)])
        script.main()
        digests.append({p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (tmp_path / name).iterdir()})
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_the_script_makes_a_policy_as_good_as_the_shipped_one(script, root, tmp_path):
    """Another one: the shipped weights are older than `algo=sft`, and margins of many tests are measured on them."""
    subprocess.run([sys.executable, root / "scripts" / "make_models.py", "tiny", tmp_path / "out"], check=True)
    ours, held_out = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), Addition().val()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert 1 / 3 <= script.accuracy(ours, held_out, tokenizer, temperature=1.0) <= 1 / 2
    assert 0.45 <= script.accuracy(ours, held_out, tokenizer, temperature=0.0) <= 0.75


def test_the_shipped_policy_is_what_the_script_describes(script, tiny_dir):
    tokenizer = script.make_tiny_tokenizer()
    made, shipped = script.make_tiny_model(tokenizer), AutoModelForCausalLM.from_pretrained(tiny_dir)
    assert {name: p.shape for name, p in made.named_parameters()} == {
        name: p.shape for name, p in shipped.named_parameters()
    }
    reloaded = AutoTokenizer.from_pretrained(tiny_dir)
    assert reloaded.get_vocab() == tokenizer.get_vocab() and reloaded.chat_template == tokenizer.chat_template
