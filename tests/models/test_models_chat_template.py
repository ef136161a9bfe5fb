"""A chat template from another model: its tokens, their embeddings, what is trained of them, and the export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from test_models_text_forward import token_batch
from tiers import in_turn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from lit_rl.core.errors import BackendError, ConfigError
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.forward import score_texts
from lit_rl.models.hf_export import export_policy
from lit_rl.models.model_card import model_card
from lit_rl.models.sharding import full_state_dict

TEMPLATE = "{% for m in messages %}{{ '<|role|>' + m['role'] + '<tool>' + m['content'] + '<|end|>' }}{% endfor %}"
OLD = 261
"""Tokens of the small model: 260 of its own, and one that transformers gives to every Qwen2 tokenizer."""
NEW = (OLD, OLD + 1, OLD + 2)
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
CARD = model_card({"base_model": "me/base", "algorithm": "sft"})


@pytest.fixture
def source(make_model, tmp_path: Path) -> str:
    """A tokenizer with a template, two special tokens of its own, and a plain one."""
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(make_model(folder="other"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|role|>", "<|end|>"]})
    tokenizer.add_tokens(["<tool>"])
    tokenizer.eos_token = "<|end|>"
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "source")
    return str(tmp_path / "source")


def test_the_template_its_tokens_and_its_eos_are_taken(make_model, source):
    model = LanguageModel(str(make_model(vocab_size=OLD)), chat_template=source)
    tokenizer = model.tokenizer
    assert model.new_tokens == NEW
    assert tokenizer.convert_ids_to_tokens(list(NEW)) == ["<|role|>", "<|end|>", "<tool>"]
    assert tokenizer.eos_token_id == NEW[1] and NEW[1] in model.eos_ids
    ids = tokenizer.apply_chat_template(MESSAGES, return_dict=True)["input_ids"]
    assert all(ids.count(token) == 2 for token in NEW)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user<tool>hiassistant<tool>yo"
    named = LanguageModel(model.name, chat_template=source, eos_token="<|im_end|>")
    assert named.tokenizer.eos_token == "<|im_end|>", "what the user names wins"


@in_turn(rows=[OLD, 264], tied=[True, False])
def test_new_tokens_begin_as_the_mean_and_all_others_stay(make_model, source, rows, tied):
    folder = str(make_model(vocab_size=rows, tie_word_embeddings=tied))
    before, after = LanguageModel(folder).load(), LanguageModel(folder, chat_template=source).load()
    for one, other in (
        (before.get_input_embeddings().weight, after.get_input_embeddings().weight),
        (before.get_output_embeddings().weight, after.get_output_embeddings().weight),
    ):
        assert len(other) == max(rows, OLD + 3), "rows that the model has to spare are used"
        assert torch.equal(other[:OLD], one[:OLD])
        torch.testing.assert_close(other[OLD : OLD + 3], one[:OLD].mean(0).expand(3, -1))
    assert after.config.vocab_size == max(rows, OLD + 3)
    again = LanguageModel(folder, chat_template=source).load()
    assert all(torch.equal(p, q) for p, q in zip(after.parameters(), again.parameters()))
    tokens = token_batch([[[5, 6, 7, 8]]])
    scores = [score_texts(model, tokens).logprobs for model in (before, after)]
    if rows == OLD:  # the softmax has three more terms, and no log-prob moved against another
        shift = scores[0] - scores[1]
        assert (shift > 0).all() and (shift < 1).all()


@pytest.mark.parametrize("tied", [True, False])
def test_under_lora_the_new_rows_are_trained_and_no_others(make_model, source, tied):
    folder = str(make_model(vocab_size=OLD, tie_word_embeddings=tied))
    policy = LanguageModel(folder, lora=Lora(r=2), chat_template=source).load()
    rows = {name: p for name, p in policy.named_parameters() if p.requires_grad and "lora_" not in name}
    assert [tuple(p.shape) for p in rows.values()] == [(3, 64)] * (1 if tied else 2)
    tokens = token_batch([[[NEW[0], 5, NEW[2], 6, NEW[1]]]])
    base = LanguageModel(folder, chat_template=source).load()
    torch.testing.assert_close(score_texts(policy, tokens).logprobs, score_texts(base, tokens).logprobs)
    score_texts(policy, tokens).logprobs.sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in rows.values())
    frozen = [p for name, p in policy.named_parameters() if not p.requires_grad]
    assert all(p.grad is None for p in frozen)


@in_turn(tied=[True, False], lora=[None, Lora(r=2)])
def test_the_export_has_the_new_rows_and_reloads(make_model, source, tmp_path, lora, tied):
    model = LanguageModel(str(make_model(vocab_size=OLD, tie_word_embeddings=tied)), lora=lora, chat_template=source)
    policy = model.load().eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    report = export_policy(model, full_state_dict(policy), policy, tmp_path / "hf", card=CARD)
    assert report.max_abs_diff == 0.0
    reloaded, tokenizer = (
        AutoModelForCausalLM.from_pretrained(report.folder),
        AutoTokenizer.from_pretrained(report.folder),
    )
    assert reloaded.config.vocab_size == OLD + 3 and reloaded.config.eos_token_id == NEW[1]
    rendered = tokenizer.apply_chat_template(MESSAGES, return_dict=True)["input_ids"]
    tokens = token_batch([[rendered]])
    torch.testing.assert_close(
        score_texts(reloaded, tokens).logprobs, score_texts(policy, tokens).logprobs, rtol=1e-5, atol=1e-5
    )
    # It is a whole model: trained again, it needs no template and gets no new tokens.
    again = LanguageModel(str(report.folder))
    assert again.tokenizer.chat_template == TEMPLATE and again.new_tokens == ()
    assert LanguageModel(str(report.folder), chat_template=source).new_tokens == ()
    if lora is not None:  # the adapter by itself goes onto a base with the same rows
        continued = LanguageModel(model.name, adapter=str(report.folder / "adapter"), chat_template=source).load()
        assert isinstance(continued, PeftModel)
        torch.testing.assert_close(score_texts(continued.eval(), tokens).logprobs, score_texts(policy, tokens).logprobs)


def test_what_cannot_be_a_source_is_refused(make_model, source, tmp_path, offline):
    folder = str(make_model())

    def refused(template: str, message: str, kind: type[Exception] = ConfigError) -> None:
        with pytest.raises(kind, match=message):
            _ = LanguageModel(folder, chat_template=template).tokenizer

    refused("templates/chat.jinja", r"model\.chat_template='templates/chat\.jinja' is neither a file")
    refused("chat", r"neither a file nor Jinja.*hub id")
    refused("some/model", r"model\.chat_template='some/model' is not in the local cache", BackendError)
    bare = AutoTokenizer.from_pretrained(source)
    bare.chat_template = None
    bare.save_pretrained(tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink(missing_ok=True)
    refused(str(tmp_path / "bare"), r"has no chat template. Name an instruction-tuned model")
    (tmp_path / "empty").mkdir()
    with pytest.raises(Exception, match=r"model\.chat_template"):
        _ = LanguageModel(folder, chat_template=str(tmp_path / "empty")).tokenizer


def test_a_float32_head_of_which_rows_would_be_trained_is_refused(make_model, source):
    folder = str(make_model(vocab_size=OLD))
    with pytest.raises(ConfigError, match=r"model\.chat_template .*model\.lm_head_fp32=false"):
        LanguageModel(folder, lora=Lora(r=2), lm_head_fp32=True, chat_template=source).load()
    LanguageModel(folder, lm_head_fp32=True, chat_template=source).load()
