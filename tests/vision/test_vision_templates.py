"""Chat templates of models over images, some of which read nothing but parts."""

from __future__ import annotations

from typing import Any

from vision_toys import picture

from lit_rl.data.example_module import PreferenceDataModule
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
