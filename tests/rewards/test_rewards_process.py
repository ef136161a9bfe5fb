"""Process reward models: every step is read where training reads it, and put together as asked."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForTokenClassification, PreTrainedTokenizerFast, Qwen2Config

from lit_rl.core.errors import ConfigError, RewardError
from lit_rl.rewards import ProcessRewardModel, Rewards
from lit_rl.rewards.model_rewards import steps_of

PROMPTS = ["17+25=", "a longer prompt: ", "1+1="]
COMPLETIONS = ["7+5=12\n1+2+1=4", "only one step\n", "\n \n"]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<pad>", "<end>"])
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>").save_pretrained(tmp_path)
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    config = Qwen2Config(
        vocab_size=258, num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.3, num_labels=2,
        pad_token_id=256, **sizes,
    )  # fmt: skip
    config.update({"step_separator": "\n"})
    AutoModelForTokenClassification.from_config(config).save_pretrained(tmp_path)
    return str(tmp_path)


def by_hand(folder: str, prompt: str, steps: list[str]) -> list[float]:
    """Each step's probability, the row alone and without padding; a byte is a token."""
    from transformers import AutoTokenizer

    model, tokenizer = (
        AutoModelForTokenClassification.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    ids = tokenizer(prompt + "".join(f"{step}\n" for step in steps), return_tensors="pt")
    with torch.no_grad():
        right = model(**ids).logits.softmax(-1)[0, :, 1]
    ends = [len(prompt) + sum(len(step) + 1 for step in steps[: i + 1]) - 1 for i in range(len(steps))]
    return [float(right[end]) for end in ends]


@pytest.mark.parametrize("batch_size", [1, 8])
def test_every_step_is_read_at_its_separator(folder: str, batch_size: int) -> None:
    wanted = [by_hand(folder, PROMPTS[0], ["7+5=12", "1+2+1=4"]), by_hand(folder, PROMPTS[1], ["only one step"]), []]
    model = ProcessRewardModel(folder, aggregate="spans", batch_size=batch_size)
    found = model(PROMPTS, COMPLETIONS)
    assert [[span[:2] for span in spans or ()] for spans in found] == [[(0, 6), (7, 14)], [(0, 13)], []]  # pyright: ignore
    for spans, values in zip(found, wanted):
        assert [span[2] for span in spans or ()] == pytest.approx(values, abs=1e-6)  # pyright: ignore
    functions = {
        "min": min,
        "mean": lambda values: sum(values) / len(values),
        "prod": math.prod,
        "last": lambda values: values[-1],
    }
    for name, function in functions.items():
        values = ProcessRewardModel(folder, aggregate=name)(PROMPTS, COMPLETIONS)  # pyright: ignore
        assert values == pytest.approx([function(row) if row else 0.0 for row in wanted], abs=1e-6)


def test_spans_reach_the_places_that_earned_them(folder: str) -> None:
    scores = Rewards(ProcessRewardModel(folder, aggregate="spans"), weights=[2.0]).score(PROMPTS, COMPLETIONS, {})
    assert scores.span_rewards is not None
    for total, spans in zip(scores.total.tolist(), scores.span_rewards):
        assert total == pytest.approx(sum(value for *_, value in spans), abs=1e-6)
    assert [len(spans) for spans in scores.span_rewards] == [2, 1, 0]


def test_the_steps_of_a_text() -> None:
    assert steps_of("ab\n\ncd\n", "\n") == [(0, 2), (4, 6)]
    assert steps_of("a b c", " ") == [(0, 1), (2, 3), (4, 5)]
    assert steps_of("one##two", "##") == [(0, 3), (5, 8)]
    assert steps_of(" \n", "\n") == steps_of("", "\n") == []


def test_long_rows(folder: str) -> None:
    long = ["x" * 80, "short", "1"]
    with pytest.raises(RewardError, match=r"row 0 has 87 tokens.*max_length=64.*skip"):
        ProcessRewardModel(folder)(PROMPTS, long)
    values = ProcessRewardModel(folder, overlong="skip")(PROMPTS, long)
    assert values[0] is None and values[1] is not None


def test_another_separator_than_that_of_training_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"separator=' ', and .* was trained with '\\n'"):
        ProcessRewardModel(folder, separator=" ").load()


def test_messages_need_a_chat_template(folder: str) -> None:
    prompt = [{"role": "user", "content": "1+1="}]
    with pytest.raises(ConfigError, match="no chat template"):
        ProcessRewardModel(folder)([prompt], ["2"])
    template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    spoken = ProcessRewardModel(folder, chat_template=template)([prompt], [[{"role": "assistant", "content": "2"}]])
    assert spoken == pytest.approx(by_hand(folder, "<1+1=>", ["2"]), abs=1e-6)
