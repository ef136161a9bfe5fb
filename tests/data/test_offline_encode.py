"""Token ids of texts and pairs, where completions begin, and what is learned; TRL is the oracle where we agree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from byte_tokenizers import CHATML, make_tokenizer
from datasets import Dataset
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from merging_tokenizers import MARKED, make_merging_tokenizer
from transformers import ByT5Tokenizer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.sft_trainer import SFTTrainer

from lit_rl.core.chat_template import marks_start
from lit_rl.core.errors import ConfigError, DataError
from lit_rl.core.model_paths import TINY
from lit_rl.data import encode
from lit_rl.data.encode import Encoder
from lit_rl.data.rendering import encode_prompt, turn_end
from lit_rl.rewards import RewardModel

MERGING: Any = make_merging_tokenizer()
METASPACE: Any = make_merging_tokenizer(metaspace=True)
WRAPS: Any = make_tokenizer(wraps=True)
WORDS = st.lists(
    st.sampled_from(["the", " cat", " ", "\n", "12", "34", "hello", " mat", "it", "'s", "é", "🙂", "abc"]),
    min_size=1,
    max_size=6,
).map("".join)
ALPHABET = st.text("the catsonm", min_size=1, max_size=12)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def learned(text: Any, tokenizer: Any) -> str:
    return tokenizer.decode([token for token, flag in zip(text.ids, text.learned) if flag])


@settings(deadline=None, max_examples=200)
@given(prompt=WORDS, completion=WORDS)
@pytest.mark.parametrize("tokenizer", [MERGING, WRAPS], ids=["merging", "wraps"])
def test_a_string_prompt_has_the_tokens_that_generation_sees(tokenizer, prompt, completion):
    text = Encoder(tokenizer).encode(prompt, completion, "f")
    assert text.ids[: text.prompt_tokens] == encode_prompt(tokenizer, prompt)
    assert text.learned == [i >= text.prompt_tokens for i in range(len(text))]
    assert tokenizer.decode(text.ids[text.prompt_tokens :]) == completion + tokenizer.eos_token
    assert text.ids.count(tokenizer.eos_token_id) == 1 and text.ids.count(tokenizer.bos_token_id) <= 1


@settings(deadline=None, max_examples=200)
@given(prompt=ALPHABET, completion=ALPHABET)
def test_tokenizers_that_mark_the_start_split_the_whole_text(prompt, completion):
    text = Encoder(METASPACE).encode(prompt, completion, "f")
    whole = METASPACE(prompt + completion)["input_ids"]
    assert text.ids == [*whole, METASPACE.eos_token_id], "no space gets in between"
    assert text.ids[: text.prompt_tokens] == encode_prompt(METASPACE, prompt)[: text.prompt_tokens]


def test_a_straddling_token_is_divided_where_the_prompt_ends():
    assert MERGING.tokenize("abcabc") == ["abcabc"]
    text = Encoder(MERGING).encode("ab", "cabc", "f")
    assert MERGING.convert_ids_to_tokens(text.ids) == ["ab", *MERGING.tokenize("cabc"), "<|im_end|>"]
    assert text.prompt_tokens == 1


def test_no_eos_and_no_bos_comes_twice():
    plain = Encoder(WRAPS).encode("p", "c", "f").ids
    bos, eos = WRAPS.bos_token_id, WRAPS.eos_token_id
    assert (plain[0], plain[-1]) == (bos, eos) and len(plain) == 4
    assert Encoder(WRAPS).encode("p", "c<|im_end|>", "f").ids == plain
    assert Encoder(WRAPS).encode("<|bos|>p", "c<|im_end|>", "f").ids == plain
    assert Encoder(WRAPS).encode("<|bos|>p", "c", "f").ids == plain
    assert Encoder(MERGING).encode("x", "y<|im_end|>", "f") == Encoder(MERGING).encode("x", "y", "f")
    assert Encoder(WRAPS).encode(None, "c", "f").ids == [bos, *plain[2:]]


def test_a_text_without_a_prompt_is_learned_but_for_its_first_token():
    text = Encoder(MERGING).encode(None, "hello world", "f")
    assert text.learned == [False] + [True] * (len(text) - 1) and text.prompt_tokens == 0
    assert MERGING.decode(text.ids) == "hello world<|im_end|>"


def test_learn_all_takes_the_prompt_too():
    text = Encoder(MERGING, learn="all").encode("the cat", " sat", "f")
    assert text.learned == [False] + [True] * (len(text) - 1)
    assert text.prompt_tokens == Encoder(MERGING).encode("the cat", " sat", "f").prompt_tokens > 0


def prepare(trainer: Any, row: dict[str, Any], tokenizer: Any, **own: Any) -> dict[str, Any]:
    """What a trainer of TRL makes of a row."""
    itself: Any = SimpleNamespace(_tokenizer=tokenizer, completion_only_loss=True, chat_template=None, **own)
    args: Any = SimpleNamespace(
        dataset_num_proc=None,
        dataset_text_field="text",
        assistant_only_loss=own.get("assistant_only_loss", False),
        max_length=None,
        shuffle_dataset=False,
        truncation_mode="keep_start",
    )
    rest: Any = (False, None, "train") if trainer is SFTTrainer else ("train",)
    prepared: Any = trainer._prepare_dataset(itself, Dataset.from_list([row]), tokenizer, args, *rest)
    return prepared[0]


@pytest.mark.parametrize(
    "prompt, completion",
    [("the cat", " sat on the mat"), ("1234\n", "hello"), ("x: ", "é🙂"), ("the cat", " sat<|im_end|>")],
)
def test_strings_as_trl_where_no_token_straddles(prompt, completion):
    ours = Encoder(MERGING).encode(prompt, completion, "f")
    theirs = prepare(SFTTrainer, {"prompt": prompt, "completion": completion}, MERGING)
    assert ours.ids == theirs["input_ids"]
    assert ours.learned == [label != -100 for label in theirs["labels"]]
    pair = Encoder(MERGING).pair(prompt, (completion, "y"), "f")
    theirs = prepare(DPOTrainer, {"prompt": prompt, "chosen": completion, "rejected": "y"}, MERGING)
    for side, name in zip(pair, ("chosen_ids", "rejected_ids")):
        assert side.ids[: side.prompt_tokens] == theirs["prompt_ids"]
        assert side.ids[side.prompt_tokens :] == theirs[name]


@pytest.mark.parametrize("reply", ["the cat", "\nthe cat", "é🙂"])
def test_conversations_as_trl_but_for_the_line_break_after_the_last_turn(reply):
    prompt, completion = [user("hello"), assistant("world"), user("12")], [assistant(reply)]
    ours = Encoder(MERGING).encode(prompt, completion, "f")
    theirs = prepare(SFTTrainer, {"prompt": prompt, "completion": completion}, MERGING)
    labels = [label != -100 for label in theirs["labels"]]
    assert ours.ids == theirs["input_ids"]
    assert MERGING.decode(ours.ids[-1:]) == "\n" and (labels[-1], ours.learned[-1]) == (True, False)
    assert ours.learned[:-1] == labels[:-1]
    pair = Encoder(MERGING).pair(prompt, (completion, [assistant("y")]), "f")
    row = {"prompt": prompt, "chosen": completion, "rejected": [assistant("y")]}
    theirs = prepare(DPOTrainer, row, MERGING)
    for side, name in zip(pair, ("chosen_ids", "rejected_ids")):
        assert side.ids[: side.prompt_tokens] == theirs["prompt_ids"]
        assert side.ids[side.prompt_tokens :] == theirs[name]


@settings(deadline=None, max_examples=60)
@given(question=WORDS, chosen=WORDS, rejected=WORDS)
@pytest.mark.parametrize("kind", ["strings", "messages"])
def test_a_pair_shares_its_prompt_and_swaps(kind, question, chosen, rejected):
    assume(question.strip())
    prompt: Any = [user(question)] if kind == "messages" else question
    sides: list[Any] = [[assistant(text)] if kind == "messages" else text for text in (chosen, rejected)]
    one, other = Encoder(MERGING).pair(prompt, sides, "f")
    assert one.prompt_tokens == other.prompt_tokens > 0
    assert one.ids[: one.prompt_tokens] == other.ids[: other.prompt_tokens]
    for side, text in ((one, chosen), (other, rejected)):
        assert text + "<|im_end|>" in learned(side, MERGING) and not any(side.learned[: side.prompt_tokens])
    assert Encoder(MERGING).pair(prompt, sides[::-1], "f") == (other, one)


def test_a_token_over_the_end_of_a_rendered_prompt_is_divided_there():
    """The prompt has the tokens with which the model is asked; TRL leaves its last one to the completion."""
    text = Encoder(MERGING).encode([user("the cat")], [assistant("\n\nhello")], "f")
    assert any(token.startswith("ĊĊ") for token in MERGING.tokenize("assistant\n\n\nhello")), "one token of both"
    assert text.ids[: text.prompt_tokens] == encode_prompt(MERGING, [user("the cat")])
    both = Encoder(MERGING).pair([user("the cat")], ([assistant("\n\nhello")], [assistant("hello")]), "f")
    assert [learned(side, MERGING) for side in both] == ["\n\nhello<|im_end|>", "hello<|im_end|>"]


def test_assistant_turns_are_those_that_the_template_marks():
    messages = [user("the"), assistant("cat"), user("sat"), assistant("on")]
    every = Encoder(MERGING, learn="assistant").encode(messages[:3], messages[3:], "f", every_turn=True)
    assert learned(every, MERGING) == "cat<|im_end|>on<|im_end|>"
    last = Encoder(MERGING, learn="assistant").encode(messages[:3], messages[3:], "f")
    assert learned(last, MERGING) == "on<|im_end|>"
    theirs = prepare(SFTTrainer, {"messages": messages}, MERGING, assistant_only_loss=True)
    assert (every.ids, every.learned) == (theirs["input_ids"], [label != -100 for label in theirs["labels"]])


def test_assistant_turns_need_messages_and_without_marks_and_offsets_the_rows_of_a_conversation():
    with pytest.raises(ConfigError, match=r"f: data\.learn=assistant needs rows of chat messages"):
        Encoder(MERGING, learn="assistant").encode("a", "b", "f")
    with pytest.raises(ConfigError, match=r"data\.learn=assistant may make several rows of a conversation"):
        Encoder(slow(), learn="assistant").encode([user("a")], [assistant("b")], "f")
    (row,) = Encoder(slow(), learn="assistant").rows([user("a")], [assistant("b")], "f")
    assert learned(row, slow()) == "b</s>"


def slow() -> Any:
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{% generation %}{{ m['content'] }}</s>{% endgeneration %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return tokenizer


def test_tokenizers_without_offsets_tokenise_the_parts_apart():
    tokenizer = slow()
    text = Encoder(tokenizer).encode([user("hi")], [assistant("yés")], "f")
    assert tokenizer.decode(text.ids[: text.prompt_tokens]) == "[user]hi</s>[assistant]"
    assert learned(text, tokenizer) == "yés</s>"
    assert Encoder(tokenizer).encode("hi", "yés", "f").ids == tokenizer("hiyés")["input_ids"]


def test_a_template_that_renders_the_prompt_differently_is_refused():
    thinking = MARKED.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    with pytest.raises(DataError, match=r"f: the chat template.*differently.*<think>.*model\.chat_template=FILE"):
        Encoder(make_merging_tokenizer(template=thinking)).encode([user("a")], [assistant("b")], "f")


def test_tools_and_keywords_reach_the_template():
    template = "{% if tools %}{{ tools[0]['name'] }}!{% endif %}{{ mood }}" + MARKED
    tokenizer = make_merging_tokenizer(template=template)
    encoder = Encoder(tokenizer, {"mood": "calm"})
    text = encoder.encode([user("a")], [assistant("b")], "f", tools=[{"name": "search"}])
    begin = tokenizer.decode(text.ids[: text.prompt_tokens])
    assert begin == "search!calm<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert encoder.prompt_ids([user("a")], "f", tools=[{"name": "search"}]) == text.ids[: text.prompt_tokens]


def test_control_tokens_in_any_message_are_refused():
    with pytest.raises(DataError, match=r"f: message 1 \(assistant\) holds the text '<\|im_end\|>'"):
        Encoder(MERGING).encode([user("a")], [assistant("b<|im_end|>")], "f")
    with pytest.raises(DataError, match=r"f: message 0 \(user\).*data\.on_bad_row=skip"):
        Encoder(MERGING).encode([user("a<|im_start|>")], [assistant("b")], "f")
    with pytest.raises(DataError, match=r"f: .*no chat template"):
        Encoder(make_merging_tokenizer(template=None)).encode([user("a")], [assistant("b")], "f")


@settings(deadline=None, max_examples=60)
@given(prompt=WORDS, steps=st.lists(WORDS, min_size=1, max_size=4), separator=st.sampled_from(["\n", "\n\n", " ки\n"]))
def test_a_step_is_learned_at_the_last_token_of_its_separator(prompt, steps, separator):
    text = Encoder(MERGING).steps(prompt, steps, separator, "f")
    assert text.ids[: text.prompt_tokens] == encode_prompt(MERGING, prompt)
    assert MERGING.decode(text.ids[text.prompt_tokens :]) == "".join(step + separator for step in steps)
    ends = [i + 1 for i, flag in enumerate(text.learned) if flag]
    written = [MERGING.decode(text.ids[text.prompt_tokens : end]) for end in ends]
    assert written == ["".join(step + separator for step in steps[: i + 1]) for i in range(len(steps))]


def test_a_separator_without_tokens_is_refused():
    with pytest.raises(ConfigError, match=r"data\.separator=''"):
        Encoder(MERGING).steps("p", ["a"], "", "f")


def test_the_shipped_tokenizer_learns_the_turns_end_and_not_the_line_break():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    text = Encoder(tokenizer).encode([user("1+1=")], [assistant("2")], "f")
    assert learned(text, tokenizer) == "2<|im_end|>" and tokenizer.decode(text.ids).endswith("2<|im_end|>\n")
    assert text.ids[: text.prompt_tokens] == encode_prompt(tokenizer, [user("1+1=")])


@pytest.mark.parametrize("metaspace", [False, True])
@pytest.mark.parametrize(
    "parts",
    [("ab", "c d"), ("the c", "at sat"), ("hel", "lo"), ("hello ", "world"), ("1", "234")],
)
def test_a_reward_model_that_was_trained_on_these_tokens_reads_them_again(parts, metaspace, monkeypatch):
    """Also where a token would straddle the border of prompt and completion."""
    tokenizer = make_merging_tokenizer(metaspace=metaspace)
    config = SimpleNamespace(ends_with_eos=True, prompt_apart=not marks_start(tokenizer))
    scorer = RewardModel("tiny")
    monkeypatch.setattr(scorer, "load", lambda: (SimpleNamespace(config=config), tokenizer))
    trained = Encoder(tokenizer, {}, "completion").encode(parts[0], parts[1], "row")
    assert scorer._ids(tokenizer, *parts) == trained.ids


def test_the_end_of_a_turn_is_rendered_once_for_equal_arguments_of_rows(monkeypatch):
    tokenizer = make_tokenizer(template=CHATML.replace("<|im_end|>", "{{ mood }}<|im_end|>"))
    encoder, made = Encoder(tokenizer, {"mood": "."}), []
    monkeypatch.setattr(encode, "turn_end", lambda _, kwargs: made.append(kwargs) or turn_end(tokenizer, kwargs))
    ends = [encoder.with_kwargs(own).turn_end for own in ({"mood": "!"}, {"mood": "?"}, {"mood": "!"}, {})]
    assert [end[0] for end in ends] == ["!", "?", "!", "."] and len(made) == 3
