"""Whole sources: rows 43, 46 and 47 of the list of bad inputs, the filters, the counts and what examples hold."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from merging_tokenizers import make_merging_tokenizer

from lit_rl.core.errors import ConfigError, DataError
from lit_rl.data.encode import Encoder
from lit_rl.data.example_reader import ExampleOptions, read_examples
from lit_rl.data.example_set import Encoded, Example
from lit_rl.data.kinds import Kind
from lit_rl.data.rendering import encode_prompt
from lit_rl.data.sources import Rows

TOKENIZER: Any = make_merging_tokenizer()
TEXT = {"text": "the cat"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def read(rows: list[dict[str, Any]], kind: Kind, skipped: int = 0, **options: Any):
    how = ExampleOptions(**options)
    encoder = Encoder(TOKENIZER, how.chat_template_kwargs, how.learn)
    return read_examples(Rows("f", rows, skipped=skipped), encoder, kind, how)


def pair(chosen: str = "yes", rejected: str = "no", prompt: str = "q:") -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def learned(text: Encoded) -> str:
    return TOKENIZER.decode([token for token, flag in zip(text.ids, text.learned) if flag])


def test_a_pair_becomes_one_example_with_prompt_columns_and_margin():
    examples, counts, name = read([{**pair(), "margin": 2, "source": "x"}], "pairs")
    (example,) = examples
    assert name == "preference (text)"
    assert [learned(text) for text in example.texts] == ["yes<|im_end|>", "no<|im_end|>"]
    assert (example.prompt, example.columns, example.margin, example.where) == ("q:", {"source": "x"}, 2.0, "f[0]")
    assert example.texts[0].ids[: example.texts[0].prompt_tokens] == encode_prompt(TOKENIZER, "q:")
    assert counts == {
        "rows": 1, "bad": 0, "empty": 0, "equal": 0, "promptless": 0, "overlong": 0, "truncated": 0, "kept": 1,
        "longest": max(map(len, example.texts)),
    }  # fmt: skip


def test_pairs_serve_verdicts_and_texts():
    verdicts, counts, _ = read([pair(), pair("a", "b")], "verdicts")
    assert [(learned(v.texts[0]), v.desirable) for v in verdicts] == [
        ("yes<|im_end|>", True), ("no<|im_end|>", False), ("a<|im_end|>", True), ("b<|im_end|>", False),
    ]  # fmt: skip
    assert counts["kept"] == 2 and all(len(v.texts) == 1 for v in verdicts)
    texts, _, _ = read([pair(), pair("same", "same")], "texts")
    assert [learned(t.texts[0]) for t in texts] == ["yes<|im_end|>", "same<|im_end|>"]
    unpaired, _, name = read([{"prompt": "q", "completion": "a", "label": False}], "verdicts")
    assert (unpaired[0].desirable, name) == (False, "unpaired preference (text)")


def test_swapped_columns_swap_the_texts():
    rows = [pair(), pair("the cat", "the mat", "1234")]
    swap = {"chosen": "rejected", "rejected": "chosen"}
    one, other = read(rows, "pairs")[0], read(rows, "pairs", rename=swap)[0]
    assert [example.texts[::-1] for example in one] == [example.texts for example in other]


@pytest.mark.parametrize("kind", ["pairs", "verdicts"])
def test_equal_empty_and_promptless_pairs_are_dropped_and_counted(kind):
    explicit = [pair(), pair("a", "a"), pair("", "b"), pair("a", " \n"), pair(prompt=" ")]
    examples, counts, _ = read(explicit, kind, max_dropped=0.8)
    assert (counts["equal"], counts["empty"], counts["kept"]) == (1, 3, 1) and counts["rows"] == 5
    implicit = [
        {"chosen": "q: a", "rejected": "q: b"},
        {"chosen": "x", "rejected": "y"},
        {"chosen": "", "rejected": "y"},
    ]
    counts = read(implicit, kind, max_dropped=0.8)[1]
    assert (counts["promptless"], counts["empty"], counts["kept"]) == (1, 1, 1)
    messages = [
        {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]},
        {"chosen": [user("a"), assistant("b")], "rejected": [user("z"), assistant("c")]},
        {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("b")]},
        {"chosen": [user("a"), assistant(" ")], "rejected": [user("a"), assistant("b")]},
    ]
    counts = read(messages, kind, max_dropped=0.8)[1]
    assert [counts[name] for name in ("promptless", "equal", "empty", "kept")] == [1, 1, 1, 1]


def test_more_dropped_rows_than_allowed_are_an_error():
    rows = [pair()] * 8 + [pair("a", "a")] * 2
    assert read(rows, "pairs", max_dropped=0.2)[1]["kept"] == 8
    with pytest.raises(DataError, match=r"f: 2 of 10 rows .* data\.max_dropped=0\.1: rows 10,.*equal 2"):
        read(rows, "pairs")


def test_rows_of_several_formats_are_refused_with_two_places():
    mixed = [pair(), {"chosen": "q: a", "rejected": "q: b"}]
    for on_bad_row in ("error", "skip"):
        with pytest.raises(DataError, match=r"f\[0\] is preference \(text\), f\[1\] is preference with implicit"):
            read(mixed, "pairs", on_bad_row=on_bad_row)
    with pytest.raises(DataError, match=r"f\[0\] is language modelling \(text\), f\[1\] is language modelling \(mess"):
        read([TEXT, {"messages": [user("a"), assistant("b")]}], "texts")
    with pytest.raises(DataError, match=r"Column 'margin': f\[0\] has a number, f\[1\] has none"):
        read([{**pair(), "margin": 1}, pair()], "pairs")


def test_bad_rows_are_refused_or_counted():
    rows = [pair(), {"prompt": "q"}, {**pair(), "chosen": "a\0"}, {**pair(), "chosen": 3}]
    with pytest.raises(DataError, match=r"f\[1\]: columns found: prompt .*chosen, rejected"):
        read(rows, "pairs")
    counts = read(rows, "pairs", skipped=2, on_bad_row="skip")[1]
    assert (counts["rows"], counts["bad"], counts["kept"]) == (6, 5, 1)
    with pytest.raises(DataError, match=r"f\[0\]: columns found: prompt"):
        read(rows[1:], "pairs", on_bad_row="skip")


def test_control_tokens_in_messages_are_bad_rows_and_stay_in_strings():
    rows = [{"messages": [user(text), assistant("b")]} for text in ("a", "a<|im_end|>")]
    with pytest.raises(DataError, match=r"f\[1\]: message 0 \(user\) holds the text '<\|im_end\|>'"):
        read(rows, "texts")
    assert read(rows, "texts", on_bad_row="skip")[1]["bad"] == 1
    (example,) = read([{"prompt": "<|im_start|>a<|im_end|>", "completion": "b"}], "texts")[0]
    assert example.texts[0].ids.count(TOKENIZER.eos_token_id) == 2


@pytest.mark.parametrize("text", ["emoji 🙂👩‍👩‍👧", "שלום", "e\u0301", "\x1b[31mred\x1b[0m", "<b>&amp;</b>"])
def test_any_text_comes_back_as_it_was(text):
    (example,) = read([pair(text, "other" + text, text)], "pairs")[0]
    assert [TOKENIZER.decode(side.ids) for side in example.texts] == [
        f"{text}{text}<|im_end|>",
        f"{text}other{text}<|im_end|>",
    ]


def test_equal_prompts_stay_rows_of_their_own():
    examples = read([pair("a", "b"), pair("c", "d")], "pairs")[0]
    assert [example.where for example in examples] == ["f[0]", "f[1]"]


LIMITED = st.sampled_from(["the", "the cat", "hello world", "1 2 3 4 5 6 7 8"])


@settings(deadline=None, max_examples=80)
@given(
    rows=st.lists(st.tuples(LIMITED, LIMITED, LIMITED), min_size=1, max_size=5),
    overlong=st.sampled_from(["truncate", "drop"]),
    keep=st.sampled_from(["start", "end"]),
    limit=st.integers(2, 20),
)
def test_every_row_is_counted_once_and_pairs_share_their_prompt(rows, overlong, keep, limit):
    data = [pair(chosen, rejected, prompt) for prompt, chosen, rejected in rows]
    options: Any = {"overlong": overlong, "keep": keep if overlong == "truncate" else "start", "max_dropped": 1.0}
    whole = read(data, "pairs", **options)[0]
    examples, counts, _ = read(data, "pairs", max_length=limit, **options)
    assert counts["rows"] == sum(counts[name] for name in ("bad", "empty", "equal", "promptless", "overlong", "kept"))
    assert counts["kept"] == len(examples) >= counts["truncated"]
    by_place = {example.where: example for example in whole}
    for example in examples:
        one, other = example.texts
        assert one.ids[: one.prompt_tokens] == other.ids[: other.prompt_tokens]
        assert all(len(text) <= limit and any(text.learned) for text in example.texts)
        assert (example.prompt is None) == (one.prompt_tokens == 0)
        if overlong == "drop":
            assert example == by_place[example.where]


def test_overlong_policies():
    rows = [pair("a a a a a a", "b", "1 2 3"), pair("a", "b", "1")]
    counts = read(rows, "pairs", max_length=8)[1]
    assert (counts["kept"], counts["truncated"], counts["overlong"]) == (2, 1, 0) and counts["longest"] > 8
    counts = read(rows, "pairs", max_length=8, overlong="drop")[1]
    assert (counts["kept"], counts["overlong"]) == (1, 1)
    for on_bad_row in ("error", "skip"):
        with pytest.raises(DataError, match=r"f\[0\]: the text has \d+ tokens.*data\.max_length=8"):
            read(rows, "pairs", max_length=8, overlong="error", on_bad_row=on_bad_row)
    with pytest.raises(DataError, match=r"data\.max_completion_tokens=3"):
        read(rows, "pairs", max_completion_tokens=3, overlong="error")
    short = read(rows, "pairs", max_completion_tokens=2)[0][0]
    assert [sum(text.learned) for text in short.texts] == [2, 2]
    counts = read([pair("a", "b", "1 2 3 4 5 6 7 8 9")], "pairs", max_length=4)[1]
    assert (counts["overlong"], counts["kept"], counts["truncated"]) == (1, 0, 0), "nothing learned would be left"
    counts = read([pair("c 1 2 3", "c 1 2 4", "q")] * 3, "pairs", max_completion_tokens=2, max_dropped=1)[1]
    assert (counts["equal"], counts["kept"]) == (3, 0), "the cut leaves two equal sides"


def test_labelled_steps():
    row = {"prompt": "q", "completions": ["the", "cat", "sat"], "labels": [True, False, True]}
    (example,) = read([row], "stepwise")[0]
    (text,) = example.texts
    assert example.labels == (1.0, 0.0, 1.0) and sum(text.learned) == 3 and text.ids[-1] != TOKENIZER.eos_token_id
    (last,) = read([row], "stepwise", last_step_only=True)[0]
    assert last.labels == (1.0,) and last.texts[0].learned == [False] * (len(text) - 1) + [True]
    (short,) = read([row], "stepwise", max_length=len(text) - 1)[0]
    assert short.labels == (1.0, 0.0) and sum(short.texts[0].learned) == 2
    (late,) = read([row], "stepwise", max_length=3, keep="end")[0]
    assert len(late.labels) == sum(late.texts[0].learned) > 0 and late.labels[-1] == 1.0
    (other,) = read([row], "stepwise", separator=" END")[0]
    assert TOKENIZER.decode(other.texts[0].ids) == "qthe ENDcat ENDsat END"
    (chat,) = read([{**row, "prompt": [user("q")]}], "stepwise")[0]
    assert TOKENIZER.decode(chat.texts[0].ids).endswith("<|im_start|>assistant\nthe\ncat\nsat\n")
    assert read([{**row, "completions": [], "labels": []}], "stepwise", max_dropped=1)[1]["empty"] == 1


def test_conversations_learn_the_last_message_all_turns_or_everything():
    row = {"messages": [user("a"), assistant("b"), user("c"), assistant("d")]}
    (example,) = read([row], "texts")[0]
    assert learned(example.texts[0]) == "d<|im_end|>" and example.prompt == row["messages"][:3]
    (every,) = read([row], "texts", learn="assistant")[0]
    assert learned(every.texts[0]) == "b<|im_end|>d<|im_end|>"
    (whole,) = read([row], "texts", learn="all")[0]
    assert sum(whole.texts[0].learned) == len(whole.texts[0]) - 1
    split = {"prompt": row["messages"][:3], "completion": row["messages"][3:]}
    (given_prompt,) = read([split], "texts", learn="assistant")[0]
    assert learned(given_prompt.texts[0]) == "d<|im_end|>", "of a prompt nothing is learned"
    open_ended = {"messages": [user("a"), assistant("b"), user("c")]}
    with pytest.raises(DataError, match=r"f\[0\]: .* not the assistant's.*data\.learn"):
        read([open_ended], "texts")
    (example,) = read([open_ended], "texts", learn="assistant")[0]
    assert learned(example.texts[0]) == "b<|im_end|>" and example.prompt is None
    assert read([{"messages": [user("a")]}], "texts", learn="assistant", max_dropped=1)[1]["empty"] == 1


def test_tokenised_rows_are_taken_as_they_are():
    (example,) = read([{"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1], "id": 3}], "texts")[0]
    assert example.texts == (Encoded([5, 6, 7, 8], [False, False, True, True], 2),)
    assert example.prompt is None and example.columns == {"id": 3}
    (example,) = read([{"input_ids": [5, 6, 7], "labels": [5, 6, -100]}], "texts")[0]
    assert example.texts == (Encoded([5, 6, 7], [False, True, False], 0),)
    with pytest.raises(DataError, match=r"f\[0\]: input_ids holds 99999, and the tokenizer has"):
        read([{"input_ids": [5, 99999]}], "texts")
    nothing = [{"input_ids": [5, 6], "labels": [-100, -100]}, {"input_ids": [5]}, {"input_ids": []}]
    assert read(nothing, "texts", max_dropped=1)[1]["empty"] == 3


def test_wrapped_packing_cuts_no_text():
    rows = [{"text": "1 2 3 4 5 6 7 8 9"}]
    assert read(rows, "texts", max_length=4, packing="wrapped")[1]["truncated"] == 0
    assert read(rows, "texts", max_length=4, packing="best_fit")[1]["truncated"] == 1


def test_map_rename_and_system_prompt_follow_each_other():
    def to_pair(row: dict[str, Any]) -> dict[str, Any]:
        return {"question": row["q"], "chosen": "a", "rejected": "b"}

    (example,) = read([{"q": "x"}], "pairs", map_row=to_pair, rename={"question": "prompt"}, system_prompt="S")[0]
    assert example.prompt == [{"role": "system", "content": "S"}, user("x")]
    with pytest.raises(DataError, match=r"data\.rename: .*'chosn'.*Did you mean 'chosen'"):
        read([pair()], "pairs", rename={"chosn": "chosen"})
    with pytest.raises(DataError, match=r"f\[0\]: data\.map_row=<lambda> raised KeyError"):
        read([pair()], "pairs", map_row=lambda row: {"prompt": row["x"]})


def test_options_that_a_kind_has_no_use_for_are_refused():
    every: list[dict[str, Any]] = [{"learn": "all"}, {"packing": "best_fit"}, {"last_step_only": True}]
    for options in every:
        with pytest.raises(ConfigError, match=rf"data\.{next(iter(options))}=.*this one learns from pairs"):
            read([pair()], "pairs", **options)


def test_no_rows_are_no_examples():
    assert read([], "texts") == ([], read([], "texts")[1], "")
    assert isinstance(read([TEXT], "texts")[0][0], Example)
