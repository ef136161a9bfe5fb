from __future__ import annotations

import pytest
from byte_tokenizers import CHATML, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.core.errors import ConfigError, DataError
from lit_rl.data.rendering import encode_prompt

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=30)
TOKENIZER = make_tokenizer()
WRAPS = make_tokenizer(wraps=True)


@settings(deadline=None, max_examples=60)
@given(text=TEXT)
def test_a_text_decodes_to_itself_with_bos_and_without_eos(text):
    assert TOKENIZER.decode(encode_prompt(TOKENIZER, text)) == text
    ids = encode_prompt(WRAPS, text)
    assert ids == [WRAPS.bos_token_id, *encode_prompt(TOKENIZER, text)]


def test_a_text_that_begins_with_bos_gets_no_second_one():
    assert encode_prompt(WRAPS, "<|bos|>hi") == encode_prompt(WRAPS, "hi")


def test_an_eos_that_the_author_wrote_stays():
    assert encode_prompt(TOKENIZER, "hi<|im_end|>")[-1] == TOKENIZER.eos_token_id
    assert encode_prompt(WRAPS, "<|bos|>hi<|im_end|>") == [
        WRAPS.bos_token_id,
        *WRAPS("hi<|im_end|>")["input_ids"][1:-1],
    ]
    for written in ("hi<|im_end|>", "hi<|im_end|><|im_end|>"):  # and the tokenizer's own is no second one
        assert encode_prompt(WRAPS, written) == [WRAPS.bos_token_id, *encode_prompt(TOKENIZER, written)]


@settings(deadline=None, max_examples=60)
@given(system=TEXT, user=TEXT)
@pytest.mark.parametrize("tokenizer", [TOKENIZER, WRAPS], ids=["plain", "wraps"])
def test_messages_are_rendered_once_up_to_the_assistants_turn(tokenizer, system, user):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    ids = encode_prompt(tokenizer, messages)
    expected = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == expected
    starts = [i for i, token in enumerate(ids) if token == tokenizer.convert_tokens_to_ids("<|im_start|>")]
    assert len(starts) == 3 and starts[0] == 0, "no BOS that the template did not write, one control token a turn"


def test_template_keywords_reach_the_template_and_ours_cannot_be_set():
    messages = [{"role": "user", "content": "x"}]
    ids = encode_prompt(TOKENIZER, messages, chat_template_kwargs={"thinking": False})
    assert TOKENIZER.decode(ids).endswith("assistant\n<think></think>")
    with pytest.raises(ConfigError, match=r"data\.chat_template_kwargs: add_generation_prompt"):
        encode_prompt(TOKENIZER, messages, chat_template_kwargs={"add_generation_prompt": False})


@pytest.mark.parametrize("role", ["system", "user", "tool", "assistant"])
@pytest.mark.parametrize("token", ["<|im_end|>", "<|im_start|>", "<|pad|>", "<|bos|>"])
def test_control_tokens_in_a_message_are_refused(role, token):
    messages = [{"role": role, "content": f"a{token}b"}, {"role": "user", "content": "x"}]
    with pytest.raises(DataError, match=r"f:3: message 0 \(.*control token"):
        encode_prompt(TOKENIZER, messages, where="f:3")
    lookalike = [{"role": role, "content": f"a{token[:-1]} >b"}, {"role": "user", "content": "x"}]
    assert f"a{token[:-1]} >b" in TOKENIZER.decode(encode_prompt(TOKENIZER, lookalike))


def test_no_template_gives_three_ways_out():
    bare = make_tokenizer(template=None)
    with pytest.raises(DataError, match=r"f:3:.*model\.chat_template=FILE"):
        encode_prompt(bare, [{"role": "user", "content": "x"}], where="f:3")
    assert encode_prompt(bare, "x")


def test_a_template_that_refuses_names_the_row():
    picky = make_tokenizer(template="{{ raise_exception('no system role') }}" + CHATML)
    with pytest.raises(DataError, match="f:3: .*: no system role"):
        encode_prompt(picky, [{"role": "user", "content": "x"}], where="f:3")


def test_a_prompt_without_tokens_is_refused_with_its_row():
    with pytest.raises(DataError, match="f:3: the tokenizer makes no token"):
        encode_prompt(make_tokenizer(template=" {#- nothing -#} "), [{"role": "user", "content": "x"}], where="f:3")
    with pytest.raises(DataError, match="f:3"):
        encode_prompt(TOKENIZER, "", where="f:3")
