"""Scoring models: a fresh head on a language model's trunk, and exports that score as what was trained."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from lit_rl.core.errors import ConfigError
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.hf_export import export_scoring
from lit_rl.models.model_card import model_card
from lit_rl.models.scoring import SEQUENCES, TOKENS, Scoring, load_scoring
from lit_rl.models.sharding import full_state_dict

KINDS = pytest.mark.parametrize("scoring", [SEQUENCES, TOKENS], ids=["sequences", "tokens"])
IDS = torch.tensor([[5, 6, 7, 258, 256, 256], [9, 8, 7, 6, 5, 258]])


def logits(scorer: nn.Module) -> Tensor:
    with torch.no_grad():
        return scorer.eval()(input_ids=IDS, attention_mask=(IDS != 256).long()).logits


def moved(scorer: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in scorer.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return scorer


def exported(model: LanguageModel, scoring: Scoring, scorer: nn.Module, folder):
    state = full_state_dict(scorer)
    return export_scoring(model, scoring, state, scorer, folder, card="card", reads={"ends_with_eos": True})


def reloaded(scoring: Scoring, folder) -> nn.Module:
    return getattr(transformers, scoring.auto).from_pretrained(folder)


@KINDS
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "smollm2", "gemma2", "gpt2"])
def test_the_trunk_is_the_language_models_and_the_head_is_fresh(make_model, scoring, kind):
    folder = make_model(kind)
    torch.manual_seed(0)
    scorer = load_scoring(LanguageModel(str(folder)), scoring)
    assert scorer.training and all(parameter.requires_grad for parameter in scorer.parameters())
    stored = transformers.AutoModelForCausalLM.from_pretrained(folder).base_model.state_dict()
    ours = scorer.base_model.state_dict()
    assert stored.keys() == ours.keys() and all(torch.equal(stored[name], ours[name]) for name in stored)
    heads = [name for name in scorer.state_dict() if name.startswith(("score", "classifier"))]
    assert heads and scorer.config.num_labels == len(scoring.labels)
    shape = (2, 1) if scoring is SEQUENCES else (2, 6, 2)
    assert logits(scorer).shape == shape


@KINDS
def test_the_head_depends_on_the_seed_alone(make_model, scoring):
    model = LanguageModel(str(make_model()))

    def head(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return load_scoring(model, scoring).get_parameter("score.weight").detach()

    assert torch.equal(head(1), head(1)) and not torch.equal(head(1), head(2))


def test_a_sequence_is_read_at_its_last_token_and_padding_changes_nothing(make_model):
    scorer = load_scoring(LanguageModel(str(make_model())), SEQUENCES).eval()
    alone = scorer(input_ids=IDS[:1, :4]).logits
    torch.testing.assert_close(logits(scorer)[:1], alone)
    before_eos = scorer(input_ids=IDS[:1, :3]).logits
    assert not torch.allclose(alone, before_eos)


def test_a_fresh_token_classifier_has_no_dropout_that_nobody_asked_for(make_model):
    assert load_scoring(LanguageModel(str(make_model())), TOKENS).dropout.p == 0.0  # pyright: ignore


@KINDS
@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_an_export_is_what_was_trained(make_model, tmp_path, scoring, kind):
    model = LanguageModel(str(make_model(kind)))
    scorer = moved(load_scoring(model, scoring))
    report = exported(model, scoring, scorer, tmp_path / "hf")
    assert (report.max_abs_diff, report.adapter, report.dtype) == (0.0, None, "float32")
    assert torch.equal(logits(reloaded(scoring, report.folder)), logits(scorer))
    config = json.loads((report.folder / "config.json").read_text())
    assert config["ends_with_eos"] is True and config["id2label"]["0"] == scoring.labels[0]
    assert config["pad_token_id"] == model.pad_id
    again = LanguageModel(str(report.folder))
    assert torch.equal(logits(load_scoring(again, scoring)), logits(scorer)), "training goes on from the head"


@KINDS
def test_a_lora_scorer_is_merged_and_its_adapter_holds_the_head(make_model, tmp_path, scoring):
    folder = str(make_model())
    model = LanguageModel(folder, lora=Lora(r=2))
    torch.manual_seed(0)
    scorer = load_scoring(model, scoring)
    trained = {name for name, parameter in scorer.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name or "score.modules_to_save" in name for name in trained)
    assert not any("score" in name and "lora" in name for name in trained), "the head gets no adapter"
    moved(scorer)
    report = exported(model, scoring, scorer, tmp_path / "hf")
    assert report.adapter is not None
    torch.testing.assert_close(logits(reloaded(scoring, report.folder)), logits(scorer), rtol=1e-4, atol=1e-4)
    assert any("score" in name for name in load_file(report.adapter / "adapter_model.safetensors"))
    continued = load_scoring(LanguageModel(folder, adapter=str(report.adapter)), scoring)
    assert torch.equal(logits(continued), logits(scorer))
    other = TOKENS if scoring is SEQUENCES else SEQUENCES
    with pytest.raises(ConfigError, match=f"was trained for {scoring.task_type}.*{other.task_type}"):
        load_scoring(LanguageModel(folder, adapter=str(report.adapter)), other)


def test_what_cannot_score_is_refused(make_model, tmp_path):
    folder = make_model()
    with pytest.raises(ConfigError, match="model.lm_head_fp32"):
        load_scoring(LanguageModel(str(folder), lm_head_fp32=True), SEQUENCES)
    with pytest.raises(ConfigError, match=r"pads with '<\|im_end\|>'.*model.pad_token"):
        load_scoring(LanguageModel(str(folder), pad_token="<|im_end|>"), SEQUENCES)
    load_scoring(LanguageModel(str(folder), pad_token="<|im_end|>"), TOKENS)
    model = LanguageModel(str(folder), init_kwargs={"num_labels": 3})
    three = transformers.AutoModelForSequenceClassification.from_config(model.config)
    three.save_pretrained(tmp_path / "three")
    model.tokenizer.save_pretrained(tmp_path / "three")
    with pytest.raises(ConfigError, match="num_labels=3.*must have 1"):
        load_scoring(LanguageModel(str(tmp_path / "three")), SEQUENCES)
    with pytest.raises(ConfigError, match="causal"):
        load_scoring(LanguageModel(str(tmp_path / "three")), TOKENS)


def test_the_card_says_how_to_load_it():
    card = model_card({"base_model": "b", "algorithm": "a"}, loaded_by=SEQUENCES.auto, pipeline=SEQUENCES.pipeline)
    assert "AutoModelForSequenceClassification.from_pretrained" in card and "AutoModelForCausalLM" not in card
    assert "pipeline_tag: text-classification" in card
