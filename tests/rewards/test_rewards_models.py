"""Reward models: tiny sequence classifiers made on the spot, against direct calls of transformers."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiers import in_turn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from lit_rl.algorithms import GRPO
from lit_rl.core.errors import ConfigError, RewardError, StorageError
from lit_rl.rewards import RewardModel, Rewards

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
PROMPTS = ["2+2=", "a much longer question than the others: ", "", "2+2="]
COMPLETIONS = ["4", "short", "the longest completion of all of them, by far", "5"]


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<pad>", "<end>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")
    fast.chat_template = template
    return fast


def decoder(**changes: Any) -> PreTrainedConfig:
    settings: dict[str, Any] = dict(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.3,
        num_labels=1,
        pad_token_id=256,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen2Config(**settings | changes)


def encoder(**changes: Any) -> PreTrainedConfig:
    settings: dict[str, Any] = dict(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        num_labels=1,
        pad_token_id=256,
    )
    return BertConfig(**settings | changes)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., str]:
    """`make(config)` saves a random classifier of this config with a tokenizer, and names its folder."""

    def made(config: PreTrainedConfig | None = None, template: str | None = TEMPLATE, auto: Any = None) -> str:
        torch.manual_seed(0)
        auto = auto or AutoModelForSequenceClassification
        auto.from_config(config or decoder()).save_pretrained(tmp_path / "model")
        tokenizer(template).save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return made


def direct(folder: str, texts: list[str], **special: bool) -> list[float]:
    """Each text alone, without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    reader = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [model(**reader(text, return_tensors="pt", **special)).logits[0, 0].item() for text in texts]


@in_turn(batch_size=[1, 3, 16], config=[decoder, encoder, lambda: decoder(pad_token_id=None)])
def test_scores_are_those_of_transformers_whatever_the_batch(make, config, batch_size):
    folder = make(config())
    scores = RewardModel(folder, batch_size=batch_size)(PROMPTS, COMPLETIONS)
    assert scores == pytest.approx(direct(folder, [p + c for p, c in zip(PROMPTS, COMPLETIONS)]), rel=1e-4, abs=1e-5)
    order = [2, 0, 3, 1]
    again = RewardModel(folder, batch_size=2)([PROMPTS[i] for i in order], [COMPLETIONS[i] for i in order])
    assert again == pytest.approx([scores[i] for i in order], rel=1e-4, abs=1e-5)
    assert len({round(score, 3) for score in scores}) == 4


def test_a_model_without_a_pad_reads_every_last_token(make):
    folder = make(decoder(pad_token_id=None))
    texts = ["!!", '"', "#", "a!", "\x00"]  # the tokens 0, 1 and 2 of this vocabulary among the last ones
    assert RewardModel(folder)([""] * 5, texts) == pytest.approx(direct(folder, texts), rel=1e-4, abs=1e-5)


def test_messages_go_through_its_own_template(make):
    folder = make()
    prompts = [[{"role": "system", "content": "s"}, {"role": "user", "content": text}] for text in ("q", "question")]
    replies = [[{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "answer"}]]
    texts = ["<system>s\n<user>q\n<assistant>a\n", "<system>s\n<user>question\n<assistant>answer\n"]
    expected = direct(folder, texts, add_special_tokens=False)
    assert RewardModel(folder)(prompts, replies) == pytest.approx(expected, rel=1e-4)
    other = RewardModel(folder, chat_template="{{ messages[-1]['content'] }}")
    assert other(prompts, replies) == pytest.approx(direct(folder, ["a", "answer"]), rel=1e-4)


def test_messages_without_a_template_are_refused(make):
    with pytest.raises(ConfigError, match="no chat template"):
        RewardModel(make(template=None))([[{"role": "user", "content": "q"}]], ["a"])


def test_no_gradient_and_no_autocast(make):
    reward = RewardModel(make())
    scores = reward(PROMPTS, COMPLETIONS)
    with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert reward(PROMPTS, COMPLETIONS) == scores
    model, _ = reward.load()
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())


def plain_logits(folder: str, texts: list[str]) -> torch.Tensor:
    """`(b, labels)` of each text alone."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    reader = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return torch.cat([model(**reader(text, return_tensors="pt")).logits for text in texts])


class TestLabels:
    """Classifiers with several labels, against the probabilities that transformers' own pipeline gives."""

    NAMES = {0: "bad", 1: "fair", 2: "good"}

    @pytest.mark.parametrize("kind", ["single_label_classification", "multi_label_classification"])
    def test_a_label_by_number_and_by_name_on_every_scale(self, make, kind):
        from transformers import pipeline

        folder = make(encoder(num_labels=3, id2label=self.NAMES, problem_type=kind))
        texts = [prompt + completion for prompt, completion in zip(PROMPTS, COMPLETIONS)]
        logits = plain_logits(folder, texts)
        classify = pipeline("text-classification", folder, device="cpu")
        expected = [{each["label"]: each["score"] for each in found} for found in classify(texts, top_k=None)]

        def asked(**how: Any) -> Any:
            return RewardModel(folder, batch_size=3, **how)(PROMPTS, COMPLETIONS)

        for label in (2, "good"):
            assert asked(label=label) == pytest.approx(logits[:, 2].tolist(), rel=1e-4, abs=1e-5)
        probability = [found["good"] for found in expected]
        assert asked(label="good", output="probability") == pytest.approx(probability, rel=1e-4)
        logs = [math.log(value) for value in probability]
        assert asked(label="good", output="log_probability") == pytest.approx(logs, rel=1e-3)
        assert (sum(expected[0].values()) == pytest.approx(1)) == kind.startswith("single")

    def test_one_label_needs_no_name_and_has_a_probability(self, make):
        folder = make()
        logits = direct(folder, [p + c for p, c in zip(PROMPTS, COMPLETIONS)])
        expected = [1 / (1 + math.exp(-logit)) for logit in logits]
        assert RewardModel(folder, output="probability")(PROMPTS, COMPLETIONS) == pytest.approx(expected, rel=1e-4)
        assert RewardModel(folder, label=0)(PROMPTS, COMPLETIONS) == RewardModel(folder)(PROMPTS, COMPLETIONS)

    def test_the_labels_are_named_where_none_or_a_wrong_one_is_chosen(self, make):
        folder = make(encoder(num_labels=3, id2label=self.NAMES))
        for label, word in (
            (None, r"num_labels=3.*Set label.*0 \(bad\), 1 \(fair\), 2 \(good\)"),
            ("god", "Did you mean 'good'"),
            (3, "label=3 is no label"),
            (-1, "label=-1 is no label"),
            (True, "label=True is no label"),
        ):
            with pytest.raises(ConfigError, match=word):
                RewardModel(folder, label=label).load()


class TestKwargs:
    def test_the_template_is_rendered_with_them(self, make):
        folder = make(template="{{ mood }}:{% for m in messages %}{{ m['content'] }}{% endfor %}")
        prompts, replies = [[{"role": "user", "content": "q"}]], [[{"role": "assistant", "content": "a"}]]
        scores = RewardModel(folder, chat_template_kwargs={"mood": "calm"})(prompts, replies)
        assert scores == pytest.approx(direct(folder, ["calm:qa"]), rel=1e-4)

    def test_the_config_is_overridden_and_the_attention_chosen(self, make):
        reward = RewardModel(make(), init_kwargs={"max_position_embeddings": 20, "attn_implementation": "eager"})
        assert reward.load()[0].config._attn_implementation == "eager"
        with pytest.raises(RewardError, match="max_length=20"):
            reward(PROMPTS, COMPLETIONS)

    def test_what_the_model_does_not_know_is_refused(self, make):
        with pytest.raises(ConfigError, match="max_positon_embeddings is no field.*Did you mean 'max_position_emb"):
            RewardModel(make(), init_kwargs={"max_positon_embeddings": 20}).load()


class TestLoading:
    def test_waits_for_the_first_use_and_happens_once(self, make):
        reward = RewardModel(make(), dtype="bfloat16", device="cpu")
        assert reward._loaded is None
        reward(PROMPTS, COMPLETIONS)
        assert reward.load()[0] is reward.load()[0]
        assert reward.load()[0].dtype == torch.bfloat16
        copied = pickle.loads(pickle.dumps(reward))
        assert copied._loaded is None and copied(PROMPTS, COMPLETIONS) == reward(PROMPTS, COMPLETIONS)

    @pytest.mark.parametrize("on_error", [None, 0.0])
    def test_rewards_load_their_models_before_a_run(self, make, on_error):
        good = RewardModel(make())
        Rewards({"text": len, "model": good}).load()
        assert good._loaded is not None
        with pytest.raises(ConfigError, match="num_labels=2"):
            Rewards({"model": RewardModel(make(decoder(num_labels=2)))}, on_error=on_error).load()

    def test_a_language_model_has_no_trained_head(self, make):
        folder = make(decoder(), auto=AutoModelForCausalLM)
        with pytest.raises(StorageError, match=r"score\.weight"):
            RewardModel(folder).load()
        config = json.loads((Path(folder) / "config.json").read_text())
        assert config["architectures"] == ["Qwen2ForCausalLM"]

    def test_pickled_weights_are_refused(self, make):
        folder = Path(make())
        torch.save({}, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        with pytest.raises(StorageError, match="pickle"):
            RewardModel(str(folder)).load()


class TestLength:
    def test_the_longest_row_is_named(self, make):
        with pytest.raises(RewardError, match=r"row 1 has 45 tokens.*2 with more than max_length=40"):
            RewardModel(make(), max_length=40)(PROMPTS, COMPLETIONS)

    def test_the_last_tokens_are_kept(self, make):
        folder = make()
        texts = [(p + c)[-6:] for p, c in zip(PROMPTS, COMPLETIONS)]
        scores = RewardModel(folder, max_length=6, overlong="truncate_left")(PROMPTS, COMPLETIONS)
        assert scores == pytest.approx(direct(folder, texts), rel=1e-4, abs=1e-5)

    def test_too_long_rows_have_no_score(self, make):
        folder = make()
        scores = RewardModel(folder, max_length=6, overlong="skip")(PROMPTS, COMPLETIONS)
        assert [score is None for score in scores] == [False, True, True, False]
        assert scores[0] == pytest.approx(direct(folder, ["2+2=4"])[0], rel=1e-4)
        assert all(math.isfinite(score) for score in scores if score is not None)

    def test_nothing_at_all(self, make):
        reward = RewardModel(make())
        assert reward([], []) == []
        with pytest.raises(RewardError, match="row 1 is empty"):
            reward(["a", ""], ["b", ""])


def test_a_device_that_is_none(make):
    with pytest.raises(ConfigError, match="device='gpu'"):
        RewardModel(make(), device="gpu").load()


def test_a_reward_model_counts_in_a_plan_where_the_memory_is_said(make):
    folder = make()
    data = SimpleNamespace(longest_prompt=4, longest_val_prompt=4)
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")), datamodule=data)
    module = GRPO("tiny", RewardModel(folder))
    module.trainer = trainer
    module.reward_functions.load()
    assert not module.step_facts().frozen  # what is free on this machine by now is without it
    module.micro_batches.memory_gb = 1.0
    weights = AutoModelForSequenceClassification.from_pretrained(folder).parameters()
    assert module.step_facts().frozen == {"reward models": sum(4 * weight.numel() for weight in weights)}
    on_the_cpu = GRPO("tiny", RewardModel(folder, device="cpu"))
    on_the_cpu.trainer = trainer
    on_the_cpu.micro_batches.memory_gb = 1.0
    on_the_cpu.reward_functions.load()
    assert on_the_cpu.step_facts().frozen == {"reward models": 0}
