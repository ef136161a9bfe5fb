"""Chat templates of models over images, some of which read nothing but parts."""

from __future__ import annotations

from typing import Any

import pytest
from vision_kinds import kinds
from vision_toys import picture

from lit_rl.core.errors import DataError
from lit_rl.data.example_module import PreferenceDataModule, SupervisedDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.models import LanguageModel

SMOLVLM = (
    "<|start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""As SmolVLM's: it finds no part in a message that is a text."""


def test_a_template_that_reads_parts_alone_loses_no_text(toy_folder: Any) -> None:
    model = LanguageModel(str(toy_folder("idefics3")), chat_template=SMOLVLM)
    assert model.processor is not None
    data = PreferenceDataModule(
        rows=[
            {
                "prompt": [{"role": "system", "content": "Short."}, {"role": "user", "content": "Which?"}],
                "image": picture(1),
                "chosen": [{"role": "assistant", "content": "seven"}],
                "rejected": [{"role": "assistant", "content": "eight"}],
            }
        ]
        * 4,
        batch_size=4,
        val_fraction=0.0,
    )
    data.prepare(model.tokenizer, kind="pairs", processor=model.processor)
    chosen, rejected = (model.tokenizer.decode(text.ids) for text in data.corpus.train.examples[0].texts)
    assert "System: Short.<|end|>" in chosen and "Which?<|end|>" in chosen
    assert chosen.endswith("Assistant: seven<|end|>\n") and rejected.endswith("Assistant: eight<|end|>\n")


def test_a_template_that_reads_texts_stays_as_it_is(toy_folder: Any) -> None:
    model = LanguageModel(str(toy_folder("idefics3")))
    before = model.tokenizer.chat_template
    assert model.processor is not None and model.processor.processor.chat_template in (
        before,
        model.tokenizer.chat_template,
    )
    assert "with_parts" not in model.tokenizer.chat_template


def test_other_settings_of_the_processor_are_other_data(toy_folder: Any) -> None:
    row = {"prompt": [{"role": "user", "content": "Which?"}], "image": picture(1)}

    def fingerprint(mean: float, backend: str = "") -> str:
        model = LanguageModel(str(toy_folder("idefics3")))
        assert model.processor is not None
        made_by = model.processor.processor.image_processor
        made_by.image_mean = [mean] * 3
        if backend:
            made_by.__class__ = type(backend, (type(made_by),), {})
        data = RolloutDataModule(rows=[row] * 4, prompts_per_rollout=4, val_fraction=0.0)
        data.prepare(model.tokenizer, processor=model.processor)
        return data.sets.train.fingerprint

    assert fingerprint(0.5) == fingerprint(0.5) != fingerprint(0.1)
    assert fingerprint(0.5) != fingerprint(0.5, backend="AnotherImageProcessor")


ASKED: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "image", "image": picture(1)}, {"type": "text", "text": "Which?"}]},
    {"role": "assistant", "content": "seven"},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "eight or so"},
]


def learned_of(model: LanguageModel, messages: list[dict[str, Any]]) -> list[Any]:
    """The examples of one conversation."""
    data = SupervisedDataModule(rows=[{"messages": messages}] * 2, batch_size=2, val_fraction=0.0, learn="assistant")
    data.prepare(model.tokenizer, kind="texts", processor=model.processor)
    examples = data.corpus.train.examples
    return list(examples[: len(examples) // 2])


@pytest.mark.parametrize("marked", [False, True], ids=["", "marked"])
@pytest.mark.parametrize("kind", kinds("idefics3", "gemma3", "llava_onevision"))
def test_every_reply_beside_an_image_is_learned_once_behind_what_it_is_asked_for_with(
    toy_folder: Any, kind: str, marked: bool
) -> None:
    """With generation markers in the template, which say nothing about images, and without."""
    model = LanguageModel(str(toy_folder(kind)))
    tokenizer, processor = model.tokenizer, model.processor
    assert processor is not None
    if marked:
        tokenizer.chat_template = f"{tokenizer.chat_template}{{% generation %}}{{% endgeneration %}}"
    said = list[str]()
    for example in learned_of(model, ASKED):
        (text,) = example.texts
        assert example.shown is not None and len(example.shown.visuals) == 1
        begins = [i for i, flag in enumerate(text.learned) if flag and not text.learned[i - 1]]
        for begin in begins:
            end = next((i for i in range(begin, len(text)) if not text.learned[i]), len(text))
            said.append(tokenizer.decode(text.ids[begin:end], skip_special_tokens=True).strip())
            before = ASKED[: 1 if said[-1] == "seven" else 3]
            asked = RolloutDataModule(rows=[{"prompt": before}] * 2, prompts_per_rollout=2, val_fraction=0.0)
            asked.prepare(tokenizer, processor=processor)
            assert text.ids[:begin] == asked.sets.train.prompt_ids[0]
            assert text.ids[end - 1] in model.eos_ids
        assert not {id for id, flag in zip(text.ids, text.learned) if flag} & {*processor.placeholders}
        assert text.prompt_tokens == begins[-1], "it is validated by its last reply"
        shown = example.shown.vision(processor, 0)
        assert shown is not None
    assert said == ["seven", "eight or so"]


def test_an_image_behind_a_learned_reply_is_refused(toy_folder: Any) -> None:
    model, later = LanguageModel(str(toy_folder("idefics3"))), [ASKED[2], ASKED[1], ASKED[0], ASKED[3]]
    with pytest.raises(DataError, match=r"an image stands behind the first reply that data.learn=assistant learns"):
        learned_of(model, later)
