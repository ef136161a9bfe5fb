"""Texts of PPO-ptx: what is learned, the order, the shares of a step, and bad rows."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizers import make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.data.supervised import SupervisedText
from lit_rl.errors import ConfigError, DataError

TOKENIZER = make_tokenizer()
END = TOKENIZER.eos_token_id


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> str:
    return write(tmp_path_factory.mktemp("ptx") / "texts.jsonl", [{"text": "x" * (i + 1)} for i in range(7)])


def parts(batch) -> tuple[Any, Any, Any]:
    return batch.input_ids, batch.attention_mask, batch.loss_mask


def decoded(batch) -> list[str]:
    return [TOKENIZER.decode(ids[mask]) for ids, mask in zip(batch.input_ids, batch.attention_mask)]


def test_every_token_of_a_text_but_the_first_is_learned(tmp_path):
    source = SupervisedText(write(tmp_path / "a.jsonl", [{"text": "abc"}]), batch_size=1)
    ids, attended, learned = parts(source.batch(TOKENIZER, 0, seed=0))
    assert ids.tolist() == [[*TOKENIZER("abc").input_ids, END]]
    assert attended.all() and learned.tolist() == [[False, True, True, True]]


def test_with_a_bos_the_first_token_of_the_text_is_learned_and_there_is_one_end(tmp_path):
    source = SupervisedText(write(tmp_path / "a.jsonl", [{"text": "abc"}]), batch_size=1)
    wraps = make_tokenizer(wraps=True)
    ids, _, learned = parts(source.batch(wraps, 0, seed=0))
    assert ids[0].tolist() == [wraps.bos_token_id, *TOKENIZER("abc").input_ids, END]
    assert learned.tolist() == [[False, True, True, True, True]]


@pytest.mark.parametrize("prompt", ["ab", [{"role": "user", "content": "ab"}]])
def test_of_a_prompt_nothing_is_learned(tmp_path, prompt):
    path = write(tmp_path / "a.jsonl", [{"question": prompt, "answer": "cd"}])
    source = SupervisedText(path, batch_size=1, text_key="answer", prompt_key="question")
    batch = source.batch(TOKENIZER, 0, seed=0)
    assert TOKENIZER.decode(batch.input_ids[batch.loss_mask]) == "cd<|im_end|>"
    before = TOKENIZER.decode(batch.input_ids[~batch.loss_mask])
    assert before == ("ab" if isinstance(prompt, str) else "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n")


def test_long_texts_are_cut_at_the_end(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"p": "abc", "text": "defg"}])
    cut = SupervisedText(path, batch_size=1, max_tokens=5, prompt_key="p").batch(TOKENIZER, 0, seed=0)
    assert decoded(cut) == ["abcde"] and int(cut.loss_mask.sum()) == 2
    prompt_alone = SupervisedText(path, batch_size=1, max_tokens=2, prompt_key="p")
    assert not prompt_alone.batch(TOKENIZER, 0, seed=0).loss_mask.any()


def test_padding_is_neither_attended_nor_learned(texts):
    batch = SupervisedText(texts, batch_size=7).batch(TOKENIZER, 0, seed=0)
    lengths = batch.attention_mask.sum(1)
    assert sorted(lengths.tolist()) == list(range(2, 9))
    assert torch.equal(batch.attention_mask, torch.arange(8) < lengths[:, None])
    assert not (batch.loss_mask & ~batch.attention_mask).any()
    assert batch.input_ids[~batch.attention_mask].eq(TOKENIZER.pad_token_id).all()


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), batch_size=st.integers(1, 20), steps=st.integers(1, 6))
def test_every_text_comes_once_before_any_comes_again(texts, seed, batch_size, steps):
    source = SupervisedText(texts, batch_size=batch_size)
    seen = [text for step in range(steps) for text in decoded(source.batch(TOKENIZER, step, seed))]
    assert len(seen) == batch_size * steps
    for start in range(0, len(seen), 7):
        assert max(Counter(seen[start : start + 7]).values()) == 1


def test_a_step_is_a_function_of_its_number_and_the_seed(texts):
    first, second = (SupervisedText(texts, batch_size=3) for _ in range(2))
    assert decoded(first.batch(TOKENIZER, 5, seed=1)) == decoded(second.batch(TOKENIZER, 5, seed=1))
    orders = [[decoded(first.batch(TOKENIZER, i, seed)) for i in range(4)] for seed in (1, 2)]
    assert orders[0] != orders[1]


class TestBadRows:
    @pytest.mark.parametrize(
        ("row", "words"),
        [
            ({"txt": "a"}, "Did you mean 'txt'"),
            ({"text": 7}, "text is 7"),
            ({"text": "  "}, "not empty"),
            ({"text": None}, "text is None"),
        ],
    )
    def test_the_message_names_file_and_line(self, tmp_path, row, words):
        path = write(tmp_path / "bad.jsonl", [{"text": "fine"}, row])
        with pytest.raises(DataError, match=rf"bad\.jsonl:2: .*{words}"):
            _ = SupervisedText(path).rows

    def test_images_are_refused_whatever_the_keys_are(self, tmp_path):
        path = write(tmp_path / "a.jsonl", [{"text": "fine", "image": "a.png"}])
        with pytest.raises(DataError, match=r"a\.jsonl:1: the row has images \(column 'image'\)"):
            _ = SupervisedText(path).rows

    def test_a_missing_file_or_prompt_says_that_it_is_of_ptx(self, tmp_path):
        with pytest.raises(DataError, match="no such file") as missing:
            _ = SupervisedText(str(tmp_path / "nothing.jsonl")).rows
        path = write(tmp_path / "a.jsonl", [{"text": "fine"}])
        with pytest.raises(DataError, match=r"a\.jsonl:1: no column 'p'") as column:
            _ = SupervisedText(path, prompt_key="p").rows
        for caught in (missing, column):
            assert any("algo.ptx" in note for note in caught.value.__notes__)

    def test_parquet_is_read_too(self, tmp_path):
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": ["ab", "cd"]}), tmp_path / "a.parquet")
        source = SupervisedText(str(tmp_path / "a.parquet"), batch_size=2)
        assert sorted(decoded(source.batch(TOKENIZER, 0, seed=0))) == ["ab<|im_end|>", "cd<|im_end|>"]

    @pytest.mark.parametrize("setting", [{"batch_size": 0}, {"max_tokens": 1}, {"prompt_key": "text"}])
    def test_settings_are_checked(self, setting):
        with pytest.raises(ConfigError, match=r"algo\.ptx"):
            SupervisedText("nowhere", **setting)
