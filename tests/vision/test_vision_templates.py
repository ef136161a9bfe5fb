"""Chat templates of models over images, some of which read nothing but parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vision_kinds import kinds
from vision_seen import Toy
from vision_toys import picture

from lit_rl.core.errors import DataError
from lit_rl.data.example_module import PreferenceDataModule, SupervisedDataModule
from lit_rl.data.example_set import ExampleSet
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.models import LanguageModel
from lit_rl.models.forward import score_texts

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


def eye(number: int) -> dict[str, Any]:
    return {"type": "image", "image": picture(number, *[(32, 32), (40, 24), (24, 56)][number % 3])}


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


SHOWN: list[dict[str, Any]] = [
    {"role": "user", "content": [words("Hello")]},
    {"role": "assistant", "content": [words("who is there?")]},
    {"role": "user", "content": [eye(1), words("Which?")]},
    {"role": "assistant", "content": [words("seven")]},
    {"role": "tool", "content": [words("seen "), eye(2), words("and"), eye(3)]},
    {"role": "assistant", "content": [words("seven")]},
    {"role": "user", "content": [words("Sure?")]},
    {"role": "assistant", "content": [words("eight or so")]},
]
"""Images behind replies, of a user and of a tool, and two replies that say the same."""

LAST = "{% if loop.last and m['role'] == 'assistant' %}!{% endif %}<|end|>"
"""How a template that writes a last reply otherwise ends a turn: every reply becomes a row of its own."""


@pytest.mark.parametrize("end", ["<|end|>", LAST], ids=["one row", "a row a reply"])
def test_images_behind_replies_are_learned_where_the_model_meets_them(
    toy: Toy, end: str, recwarn: pytest.WarningsRecorder
) -> None:
    """Rows are what the processor makes of the conversation up to their last reply, and the loss is transformers' own,
    with the replies for labels: each once."""
    assert toy.model.processor is not None
    template = str(toy.model.tokenizer.chat_template).replace("<|end|>", end)
    model = LanguageModel(toy.model.path, chat_template=template)
    tokenizer, processor, forks = model.tokenizer, toy.model.processor, end == LAST
    if toy.kind == "paligemma" or (toy.kind == "llava_onevision" and not forks):
        with pytest.raises(DataError, match="the prompt shows no image" if forks else "cannot be learned together"):
            learned_of(model, SHOWN)
        if toy.kind == "paligemma" and not forks:  # which ends what is processed by a line break
            with pytest.raises(DataError, match="cannot be learned together"):
                learned_of(model, ASKED)
        return
    examples = learned_of(model, SHOWN)
    assert not [each for each in recwarn if "leaves out" in str(each.message)], "words around an image are there"
    rows = [SHOWN[:length] for length in (2, 4, 6, 8)] if forks else [SHOWN]
    every = range(len(rows))
    data = ExampleSet("texts", examples, toy.model.pad_id, processor=processor)
    batch = data.batch(every, every, data.totals(every), step=0, slot=0)
    with torch.no_grad():
        ours = score_texts(toy.policy, batch.tokens).logprobs
    for row, messages in enumerate(rows):
        parts = [part for message in messages for part in message["content"]]
        pictures = [part["image"] for part in parts if "image" in part]
        inputs = processor.processor(
            text=[tokenizer.apply_chat_template(messages, tokenize=False)],
            add_special_tokens=False,
            return_tensors="pt",
            **({"images": [pictures]} if pictures else {}),
        )
        ids, labels, at = inputs["input_ids"][0].tolist(), torch.full_like(inputs["input_ids"], -100), 0
        for number in range(1, len(messages), 2):
            last = number == len(messages) - 1
            said = f"{messages[number]['content'][0]['text']}{'!' if forks and last else ''}<|end|>"
            spelt = tokenizer.encode(said, add_special_tokens=False)
            at = next(i for i in range(at, len(ids)) if ids[i : i + len(spelt)] == spelt)
            if last or not forks:
                labels[0, at : at + len(spelt)] = torch.tensor(spelt)
            at += len(spelt)
        (text,), shown = examples[row].texts, examples[row].shown
        assert text.ids == ids[: len(text)] and text.learned == (labels[0] != -100).tolist()[: len(text)]
        assert sum(text.learned) == int((labels != -100).sum())
        assert [(each.width, each.height) for each in (shown.visuals if shown else ())] == [p.size for p in pictures]
        with torch.no_grad():
            theirs = toy.policy(**inputs, labels=labels).loss
        mask = torch.tensor(text.learned)[1:]
        torch.testing.assert_close(-ours[row, : len(mask)][mask].mean(), theirs, rtol=1e-4, atol=2e-5)


def test_a_reply_of_the_assistant_with_an_image_is_refused(toy_folder: Any) -> None:
    painted = [ASKED[2], {"role": "assistant", "content": ASKED[0]["content"]}]
    with pytest.raises(DataError, match=r"message 1 is a reply of the assistant with an image.*data\.learn=completion"):
        learned_of(LanguageModel(str(toy_folder("idefics3"))), painted)
