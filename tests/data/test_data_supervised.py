"""Texts of PPO-ptx: what is learned, the order, the shares of a step, and bad rows."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizers import CHATML, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from merging_tokenizers import make_llama_like_tokenizer, make_merging_tokenizer

from lit_rl.core.errors import ConfigError, DataError
from lit_rl.core.examples import TokenBatch
from lit_rl.data.encode import Encoder
from lit_rl.data.example_module import SupervisedDataModule
from lit_rl.data.example_set import ExampleSet
from lit_rl.data.supervised_text import SupervisedText

TOKENIZER = make_tokenizer()
END = TOKENIZER.eos_token_id
ENCODER = Encoder(TOKENIZER)
SHOWS = [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> str:
    return write(tmp_path_factory.mktemp("ptx") / "texts.jsonl", [{"text": "x" * (i + 1)} for i in range(7)])


def whole(texts: ExampleSet) -> TokenBatch:
    """All texts of a step as one batch."""
    rows = range(len(texts))
    return texts.batch(rows, (), texts.totals(rows), step=0, slot=0).tokens


def parts(batch) -> tuple[Any, Any, Any]:
    return batch.input_ids, batch.attention_mask, batch.loss_mask


def decoded(batch) -> list[str]:
    return [TOKENIZER.decode(ids[mask]) for ids, mask in zip(batch.input_ids, batch.attention_mask)]


def test_every_token_of_a_text_but_the_first_is_learned(tmp_path):
    source = SupervisedText(write(tmp_path / "a.jsonl", [{"text": "abc"}]), batch_size=1)
    ids, attended, learned = parts(whole(source.step(ENCODER, 0, seed=0)))
    assert ids.tolist() == [[*TOKENIZER("abc").input_ids, END]]
    assert attended.all() and learned.tolist() == [[False, True, True, True]]


def test_with_a_bos_the_first_token_of_the_text_is_learned_and_there_is_one_end(tmp_path):
    source = SupervisedText(write(tmp_path / "a.jsonl", [{"text": "abc"}]), batch_size=1)
    wraps = make_tokenizer(wraps=True)
    ids, _, learned = parts(whole(source.step(Encoder(wraps), 0, seed=0)))
    assert ids[0].tolist() == [wraps.bos_token_id, *TOKENIZER("abc").input_ids, END]
    assert learned.tolist() == [[False, True, True, True, True]]


@pytest.mark.parametrize("prompt", ["ab", [{"role": "user", "content": "ab"}]])
def test_of_a_prompt_nothing_is_learned(tmp_path, prompt):
    path = write(tmp_path / "a.jsonl", [{"question": prompt, "answer": "cd"}])
    source = SupervisedText(path, batch_size=1, text_key="answer", prompt_key="question")
    batch = whole(source.step(ENCODER, 0, seed=0))
    assert TOKENIZER.decode(batch.input_ids[batch.loss_mask]) == "cd<|im_end|>"
    before = TOKENIZER.decode(batch.input_ids[~batch.loss_mask])
    assert before == ("ab" if isinstance(prompt, str) else "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("make", [make_tokenizer, make_merging_tokenizer, make_llama_like_tokenizer])
@pytest.mark.parametrize("prompt", [None, "the c", "hello", [{"role": "user", "content": "ab"}]])
def test_a_text_has_the_tokens_and_the_end_that_sft_gives_it(tmp_path, make, prompt):
    """Also where a tokenizer marks the start of a text (Llama's), or its end is written."""
    tokenizer = make()
    rows = [{"text": text, **({"prompt": prompt} if prompt else {})} for text in ("the cat", " at", "ab")]
    source = SupervisedText(write(tmp_path / "a.jsonl", rows), batch_size=3, prompt_key=prompt and "prompt")
    batch = whole(source.step(Encoder(tokenizer), 0, seed=0))
    found = {tuple(ids[mask].tolist()) for ids, mask in zip(batch.input_ids, batch.attention_mask)}
    learned = {tokenizer.decode(ids[mask]) for ids, mask in zip(batch.input_ids, batch.loss_mask)}
    key = "completion" if prompt else "text"
    data = SupervisedDataModule([{key: row.pop("text"), **row} for row in rows], val_fraction=0)
    data.prepare(tokenizer)
    texts = [example.texts[0] for example in data.corpus.train.examples]
    assert found == {tuple(text.ids[: len(text) - text.learned[::-1].index(True)]) for text in texts}
    assert learned == {tokenizer.decode([i for i, flag in zip(text.ids, text.learned) if flag]) for text in texts}
    written = SupervisedText(write(tmp_path / "b.jsonl", [{"text": "ab<|im_end|>"}]), batch_size=1)
    assert whole(written.step(Encoder(tokenizer), 0, seed=0)).input_ids[0].tolist().count(tokenizer.eos_token_id) == 1


def test_a_text_may_be_messages_as_in_sft(tmp_path):
    """Of a conversation the last reply is learned; behind a prompt all that the assistant says."""
    turns = [{"role": role, "content": role[:3]} for role in ("user", "assistant", "user", "assistant")]
    forms = (
        ({"messages": turns}, "messages", None),
        ({"prompt": turns[:3], "completion": turns[3:]}, "completion", "prompt"),
        ({"prompt": "ab", "completion": turns[1:]}, "completion", "prompt"),
    )
    for row, text_key, prompt_key in forms:
        path = write(tmp_path / "a.jsonl", [row])
        (found,) = SupervisedText(path, 1, text_key=text_key, prompt_key=prompt_key).step(ENCODER, 0, 0).examples
        data = SupervisedDataModule([row], val_fraction=0)
        data.prepare(TOKENIZER)
        (wanted,) = data.corpus.train.examples[0].texts
        assert found.texts[0].ids == wanted.ids[: len(found.texts[0])] and any(found.texts[0].learned)
        assert found.texts[0].learned == wanted.learned[: len(found.texts[0])]
        assert not any(wanted.learned[len(found.texts[0]) :])
    written = SupervisedText(write(tmp_path / "b.jsonl", [{"text": json.dumps(turns)}]), 1).step(ENCODER, 0, 0)
    assert TOKENIZER.decode(written.examples[0].texts[0].ids).startswith(json.dumps(turns)), "a text stays one"


def test_a_prompt_of_messages_is_rendered_as_the_run_renders_its_own_and_checked_before_a_step(tmp_path):
    asks = [{"role": "user", "content": "ab"}]
    template = CHATML.replace("{{ m['content'] }}", "{{ m['content'] }}{{ mood }}{{ (tools or [{}])[0].name }}")
    encoder = Encoder(make_tokenizer(template=template), {"mood": "!"})
    own = {"chat_template_kwargs": {"mood": "?"}, "tools": [{"name": "add"}]}
    rows = [{"prompt": asks, "text": "cd"}, {"prompt": asks, "text": "cd", **own}]
    source = SupervisedText(write(tmp_path / "a.jsonl", rows), batch_size=2, prompt_key="prompt")
    source.check(encoder)
    texts = {encoder.tokenizer.decode(ids[mask]) for ids, mask in zip(*parts(whole(source.step(encoder, 0, 0)))[:2])}
    assert {text.partition("user\n")[2].partition("<|")[0] for text in texts} == {"ab!", "ab?add"}
    bad = SupervisedText(write(tmp_path / "b.jsonl", [{"prompt": asks, "text": "cd<|im_end|>"}]), prompt_key="prompt")
    with pytest.raises(DataError, match=r"b\.jsonl:1: message 1 \(assistant\) holds the text '<\|im_end\|>'"):
        bad.check(encoder)


def test_before_a_run_the_first_256_rows_of_messages_are_rendered(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", [{"prompt": [{"role": "user", "content": "ab"}], "text": "cd"}] * 300)
    source = SupervisedText(path, prompt_key="prompt")
    seen = []
    monkeypatch.setattr(SupervisedText, "_encode", lambda self, encoder, index, *_: seen.append(index))
    source.check(Encoder(make_tokenizer(template=CHATML)))
    assert seen == [*range(256)]


def test_long_texts_are_cut_at_the_end(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"p": "abc", "text": "defg"}])
    cut = whole(SupervisedText(path, batch_size=1, max_tokens=5, prompt_key="p").step(ENCODER, 0, seed=0))
    assert decoded(cut) == ["abcde"] and int(cut.loss_mask.sum()) == 2
    prompt_alone = SupervisedText(path, batch_size=1, max_tokens=2, prompt_key="p")
    assert not whole(prompt_alone.step(ENCODER, 0, seed=0)).loss_mask.any()


def test_padding_is_neither_attended_nor_learned(texts):
    batch = whole(SupervisedText(texts, batch_size=7).step(ENCODER, 0, seed=0))
    lengths = batch.attention_mask.sum(1)
    assert sorted(lengths.tolist()) == list(range(2, 9))
    assert torch.equal(batch.attention_mask, torch.arange(8) < lengths[:, None])
    assert not (batch.loss_mask & ~batch.attention_mask).any()
    assert batch.input_ids[~batch.attention_mask].eq(TOKENIZER.pad_token_id).all()


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), batch_size=st.integers(1, 20), steps=st.integers(1, 6))
def test_every_text_comes_once_before_any_comes_again(texts, seed, batch_size, steps):
    source = SupervisedText(texts, batch_size=batch_size)
    seen = [text for step in range(steps) for text in decoded(whole(source.step(ENCODER, step, seed)))]
    assert len(seen) == batch_size * steps
    for start in range(0, len(seen), 7):
        assert max(Counter(seen[start : start + 7]).values()) == 1


def test_a_step_is_a_function_of_its_number_and_the_seed(texts):
    first, second = (SupervisedText(texts, batch_size=3) for _ in range(2))
    assert decoded(whole(first.step(ENCODER, 5, seed=1))) == decoded(whole(second.step(ENCODER, 5, seed=1)))
    orders = [[decoded(whole(first.step(ENCODER, i, seed))) for i in range(4)] for seed in (1, 2)]
    assert orders[0] != orders[1]


class TestBadRows:
    @pytest.mark.parametrize(
        ("row", "words"),
        [
            ({"txt": "a"}, "Did you mean 'txt'"),
            ({"text": 7}, "text is 7"),
            ({"text": "  "}, "not empty"),
            ({"text": None}, "text is None"),
            ({"text": []}, "not empty"),
            ({"text": [{"role": "user", "content": "ab"}]}, "the last is the assistant's"),
            ({"text": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": " "}]}, "not empty"),
        ],
    )
    def test_the_message_names_file_and_line(self, tmp_path, row, words):
        path = write(tmp_path / "bad.jsonl", [{"text": "fine"}, row])
        with pytest.raises(DataError, match=rf"bad\.jsonl:2: .*{words}"):
            SupervisedText(path).check(ENCODER)

    @pytest.mark.parametrize(
        ("row", "keys"),
        [
            ({"text": "fine", "image": "a.png"}, {}),
            ({"text": "fine", "p": SHOWS}, {"prompt_key": "p"}),
            ({"text": "fine", "p": json.dumps(SHOWS)}, {"prompt_key": "p"}),
            ({"m": SHOWS}, {"text_key": "m"}),
        ],
    )
    def test_a_policy_over_text_is_shown_no_image_whatever_the_keys_are(self, tmp_path, row, keys):
        path = write(tmp_path / "a.jsonl", [row])
        with pytest.raises(ConfigError, match=r"a\.jsonl:1: the row has images or videos .*model="):
            SupervisedText(path, **keys).check(ENCODER)

    def test_a_missing_file_or_prompt_says_that_it_is_of_ptx(self, tmp_path):
        with pytest.raises(DataError, match="no such file") as missing:
            SupervisedText(str(tmp_path / "nothing.jsonl")).check(ENCODER)
        path = write(tmp_path / "a.jsonl", [{"text": "fine"}])
        with pytest.raises(DataError, match=r"a\.jsonl:1: no column 'p'") as column:
            SupervisedText(path, prompt_key="p").check(ENCODER)
        for caught in (missing, column):
            assert any("algo.ptx" in note for note in caught.value.__notes__)

    def test_parquet_is_read_too(self, tmp_path):
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": ["ab", "cd"]}), tmp_path / "a.parquet")
        source = SupervisedText(str(tmp_path / "a.parquet"), batch_size=2)
        assert sorted(decoded(whole(source.step(ENCODER, 0, seed=0)))) == ["ab<|im_end|>", "cd<|im_end|>"]
