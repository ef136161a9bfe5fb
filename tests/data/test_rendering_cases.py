"""What a template drops is refused or said, calls are written as their objects, and every turn has its end."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import trl
from byte_tokenizers import CHATML, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from merging_tokenizers import MARKED, make_llama_like_tokenizer, make_merging_tokenizer

from lit_rl.core import chat_template as continuation
from lit_rl.core.chat_template import apply_chat_template, marks_start, tokenize_parts
from lit_rl.core.errors import ConfigError, DataError
from lit_rl.data.encode import Encoder
from lit_rl.data.example_module import SupervisedDataModule
from lit_rl.data.prompt_reader import PromptOptions, read_prompts
from lit_rl.data.rendering import TemplateOmissions, encode_prompt, warn_unknown_end
from lit_rl.data.sources import Rows, load_rows, rows_of_object
from lit_rl.data.splits import RowSource
from lit_rl.data.streams import RowStream
from lit_rl.rewards import RewardModel

TOOLS = CHATML.replace(
    "{{ m['content'] }}",
    "{{ m['content'] }}{% for t in m['tool_calls'] or [] %}"
    "{{ '{\"name\": \"' + t.function.name + '\", \"arguments\": ' + t.function.arguments | tojson + '}' }}{% endfor %}",
)
AS_TEXT = TOOLS.replace("t.function.arguments | tojson", "t.function.arguments")
PLAIN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str = "", **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **keys}


def calling(arguments: Any, name: str = "add") -> dict[str, Any]:
    return assistant(tool_calls=[{"type": "function", "function": {"name": name, "arguments": arguments}}])


def learned(text: Any, tokenizer: Any) -> str:
    return tokenizer.decode([token for token, flag in zip(text.ids, text.learned) if flag])


def said(look: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        look()
    return [str(each.message) for each in heard]


# ---------------------------------------------------------------------------------------------------- calls of tools


@pytest.mark.parametrize(
    "arguments", [{"a": 1, "b": "ö"}, '{"a": 1, "b": "ö"}', ' {"b":"ö",\n"a":1}'], ids=["object", "text", "odd text"]
)
@pytest.mark.parametrize("template", [TOOLS, AS_TEXT], ids=["wants objects", "wants text"])
def test_arguments_are_written_as_one_object_whatever_form_they_come_in(arguments, template):
    """The wire format of servers is JSON text, of which a template would make a string of JSON."""
    tokenizer = make_tokenizer(template=template)
    message = calling(arguments)
    text = learned(Encoder(tokenizer).encode([user("1+2?")], [message], "f"), tokenizer)
    assert text.startswith('{"name": "add", "arguments": ') and text.endswith("}}<|im_end|>")
    assert json.loads(text.removesuffix("<|im_end|>"))["arguments"] == {"a": 1, "b": "ö"}
    assert message["tool_calls"][0]["function"]["arguments"] == arguments, "the row keeps its own"
    asked = apply_chat_template(tokenizer, [user("1+2?"), message], tokenize=False)
    assert text in asked, "and so does every other door to a template"


@pytest.mark.parametrize("nothing", [None, "", {}, "{}"])
def test_a_call_without_arguments_has_the_empty_object(nothing):
    tokenizer = make_tokenizer(template=TOOLS)
    text = Encoder(tokenizer).encode([user("now?")], [calling(nothing, "clock")], "f")
    assert learned(text, tokenizer) == '{"name": "clock", "arguments": {}}<|im_end|>'


def test_arguments_that_are_no_json_stay_the_words_that_they_are_or_are_refused():
    broken = calling('{"a": "1",')
    tokenizer = make_tokenizer(template=AS_TEXT)
    text = Encoder(tokenizer).encode([user("a")], [broken], "f")
    assert learned(text, tokenizer) == '{"name": "add", "arguments": {"a": "1",}<|im_end|>'
    with pytest.raises(DataError, match=r"message 1 .*tool call: arguments"):
        Encoder(make_tokenizer(template=TOOLS)).encode([user("a")], [broken], "f")


CALLS = [{"messages": [user("Paris?"), calling(arguments, name)]} for name, arguments in (
    ("weather", {"city": "Paris", "where": {"lat": 1.0}}),
    ("add", {"a": 1, "where": {"lon": 2.0}, "many": [{"x": 1}, {"y": 2}]}),
)]  # fmt: skip


def rows_of(kind: str, folder: Path) -> list[dict[str, Any]]:
    import datasets

    data, path = datasets.Dataset.from_list(CALLS), folder / "calls.parquet"
    if kind == "Dataset":
        return rows_of_object("rows", data)
    if kind == "IterableDataset":
        return rows_of_object("rows", data.to_iterable_dataset())
    if kind == "saved":
        data.save_to_disk(folder / "saved")
        return list(load_rows(folder / "saved"))
    if kind == "stream of saved":
        data.save_to_disk(folder / "saved")
        return list(RowStream(RowSource(str(folder / "saved"))).take(_start(), 2)[0])
    data.to_parquet(path)
    return list(load_rows(path)) if kind == "parquet" else list(RowStream(RowSource(str(path))).take(_start(), 2)[0])


def _start() -> Any:
    from lit_rl.data.streams import SourcePosition

    return SourcePosition()


@pytest.mark.parametrize(
    "kind", ["parquet", "stream of parquet", "saved", "stream of saved", "Dataset", "IterableDataset"]
)
def test_a_table_gives_calls_the_arguments_that_they_had(kind, tmp_path):
    """It fills the arguments of other rows' functions with None, at every depth."""
    found = rows_of(kind, tmp_path)
    for row, before in zip(found, CALLS, strict=True):
        (call,), (wanted,) = (each["messages"][1]["tool_calls"] for each in (row, before))
        assert call["function"]["arguments"] == wanted["function"]["arguments"]


def test_a_null_that_somebody_wrote_stays(tmp_path):
    path = tmp_path / "calls.jsonl"
    path.write_text(json.dumps({"messages": [user("a"), calling({"unit": None})]}) + "\n")
    (row,) = load_rows(path)
    tokenizer = make_tokenizer(template=TOOLS)
    text = learned(Encoder(tokenizer).encode(row["messages"][:1], row["messages"][1:], "f"), tokenizer)
    assert '{"unit": null}' in text


# -------------------------------------------------------------------------------------------- what a template drops


def test_a_reply_is_refused_whose_call_or_words_are_not_in_its_rendering():
    """Also where the words stand in the prompt: what is learned is what follows it."""
    encoder = Encoder(make_tokenizer())
    with pytest.raises(DataError, match=r"message 1 .*leaves out its tool call: add"):
        encoder.encode([user('add {"a": 1}')], [calling({"a": 1})], "f")
    name_only = CHATML.replace(
        "{{ m['content'] }}", "{{ m.content }}{% for t in m.tool_calls or [] %}{{ t.function.name }}{% endfor %}"
    )
    with pytest.raises(DataError, match=r"tool call: add, its 'left'.*model\.chat_template=FILE"):
        Encoder(make_tokenizer(template=name_only)).encode([user("a")], [calling({"left": "x"})], "f")
    deaf = CHATML.replace("{{ m['content'] }}", "{{ m['content'] if m.role == 'user' }}")
    with pytest.raises(DataError, match=r"message 1 .*leaves out what it says: yes"):
        Encoder(make_tokenizer(template=deaf)).encode([user("yes")], [assistant("yes")], "f")


def test_what_else_a_template_drops_is_said_once():
    encoder = Encoder(make_tokenizer(), {"thinking": True, "enable_thinkin": False})
    for _ in range(2):
        asked = [user("a") | {"name": "Ann"}, calling({"a": 1}), {"role": "tool", "content": "3", "tool_call_id": "c7"}]
        encoder.encode(
            asked, [assistant("4", reasoning_content="two plus two", weight=1)], "f", tools=[{"name": "add"}]
        )
    told = said(encoder.left_out.warn)
    assert "The chat template leaves out reasoning_content of the assistant: two plus two" in told
    assert "The chat template leaves out tool_calls of the assistant: add" in told
    assert "The chat template leaves out tools: add" in told
    (keys,) = [line for line in told if "keys of messages" in line]
    assert ": name, tool_call_id, weight. Which messages are learned is chosen by data.learn alone." in keys
    (kwargs,) = [line for line in told if "chat_template_kwargs" in line]
    assert kwargs.startswith("data.chat_template_kwargs.enable_thinkin does nothing")
    assert len(told) == 5 and said(encoder.left_out.warn) == []


def test_prompts_say_it_too_and_arguments_of_a_template_that_nothing_renders():
    tokenizer = make_tokenizer(template=CHATML.replace("{% for m in messages %}", "{% for m in messages[1:] %}"))
    rows = Rows("f", [{"prompt": [{"role": "system", "content": "Be brief."}, user("a")]}] * 2)
    (line,) = said(lambda: read_prompts(rows, Encoder(tokenizer), PromptOptions()))
    assert line == "The chat template leaves out words of the system: Be brief."
    plain = Rows("f", [{"prompt": "a"}])
    (line,) = said(lambda: read_prompts(plain, Encoder(tokenizer, {"thinking": True}), PromptOptions()))
    assert line == "data.chat_template_kwargs.thinking does nothing: no row is rendered by a chat template."


def test_a_turn_that_is_not_opened_is_said():
    tokenizer = make_tokenizer(template="{% for m in messages %}{{ m.content }}{% endfor %}")
    left_out = TemplateOmissions(tokenizer, {})
    left_out.compare([user("a")], "a", "f")
    assert ["does not open the assistant's turn" in line for line in said(left_out.warn)] == [True]


def test_arguments_that_are_no_object_are_rendered_as_text_and_that_is_said():
    left_out = TemplateOmissions(make_tokenizer(template=TOOLS), {})
    for arguments in ("[1, 2]", '{"a": 1}'):
        call = assistant("", tool_calls=[{"type": "function", "function": {"name": "add", "arguments": arguments}}])
        left_out.compare([user("a"), call], f"add{arguments}", "f")
    (line,) = said(left_out.warn)
    assert line == "Arguments of tool calls that are no JSON object are rendered as text: [1, 2]"


MARK = "<|im_end|>"
THINKS = TOOLS.replace("{{ m['content'] }}", "{{ m.reasoning_content or '' }}{{ m['content'] }}{{ m.name or '' }}")


@pytest.mark.parametrize(
    "message, key",
    [
        (assistant(f"a{MARK}"), ""),
        (assistant([{"type": "text", "text": f"a{MARK}"}]), ""),
        (assistant("a", reasoning_content=f"b{MARK}c"), " in reasoning_content"),
        (assistant("a", name=MARK), " in name"),
        (calling({"x": [{"y": MARK}]}), " in tool_calls"),
        (calling({MARK: 1}), " in tool_calls"),
        (calling({}, MARK), " in tool_calls"),
        (calling(json.dumps({"x": MARK})), " in tool_calls"),
    ],
)
def test_control_tokens_are_found_in_all_that_is_rendered(message, key):
    encoder = Encoder(make_tokenizer(template=THINKS))
    with pytest.raises(DataError, match=rf"f: message 1 \(assistant\) holds the text '<\|im_end\|>'{key}, which"):
        encoder.encode([user("a")], [message], "f")
    with pytest.raises(DataError, match="f holds the text .* in tools"):
        encoder.encode([user("a")], [assistant("b")], "f", tools=[{"name": "f", "parameters": {"x": MARK}}])
    with pytest.raises(DataError, match="message 0.*holds the text"):
        encode_prompt(encoder.tokenizer, [{**message, "role": "user"}, user("b")], where="f")
    unread = Encoder(encoder.tokenizer).encode([user("a")], [assistant("b", raw=f"b{MARK}")], "f")
    assert learned(unread, encoder.tokenizer) == f"b{MARK}", "a key that no template reads is no text"


# --------------------------------------------------------------------------------------------------- ends of turns


def test_white_space_behind_any_end_of_generation_is_not_learned():
    """As Gemma and Phi have it: the tokenizer's EOS is not what ends a turn."""
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "<|pad|>"
    ends = tokenizer.convert_tokens_to_ids(["<|pad|>", "<|im_end|>"])
    text = Encoder(tokenizer, eos_ids=ends).encode([user("Hi")], [assistant("Hello")], "f")
    assert learned(text, tokenizer) == "Hello<|im_end|>" and tokenizer.decode(text.ids).endswith("<|im_end|>\n")
    twice = make_tokenizer(template=CHATML + "{% if not add_generation_prompt %}<|pad|>{% endif %}")
    text = Encoder(twice, eos_ids=ends).encode([user("Hi")], [assistant("Hello")], "f")
    assert learned(text, twice) == "Hello<|im_end|>", "generation never comes to the second end"


@pytest.mark.parametrize("reply, words", [("Hello", "Hello"), ("Hello\n", "Hello\n")])
@pytest.mark.parametrize("learn", ["completion", "all"])
def test_eos_stands_behind_a_reply_that_the_template_leaves_open(reply, words, learn):
    tokenizer = make_tokenizer(template=PLAIN)
    text = Encoder(tokenizer, learn=learn).encode([user("Hi")], [assistant(reply)], "f")
    assert tokenizer.decode(text.ids) == f"user: Hi\nassistant: {words}<|im_end|>"
    assert learned(text, tokenizer).endswith(f"{words}<|im_end|>")
    if learn == "completion":
        assert learned(text, tokenizer) == f"{words}<|im_end|>"
    scored = Encoder(tokenizer, eos_ids=()).encode([user("Hi")], [assistant(reply)], "f")
    assert tokenizer.decode(scored.ids) == f"user: Hi\nassistant: {words}\n", "nobody asks a model that scores to stop"


def test_a_turn_that_ends_with_a_token_at_which_nothing_ends_is_refused_and_told_of_prompts():
    """A base model with a chat template: its EOS is another token than the one that the template writes."""
    tokenizer = make_tokenizer()
    mark, tokenizer.eos_token = tokenizer.eos_token_id, "<|pad|>"
    fix = rf"set model\.eos_token='<\|im_end\|>', or add its id {mark} to eos_token_id"
    with pytest.raises(ConfigError, match=rf"f: .*ends the reply with '<\|im_end\|>', which is no EOS token.*{fix}"):
        Encoder(tokenizer).encode([user("Hi")], [assistant("Hello")], "f")
    assert learned(Encoder(tokenizer, eos_ids=()).encode([user("Hi")], [assistant("a")], "f"), tokenizer)
    (line,) = said(lambda: warn_unknown_end(tokenizer, {}, [tokenizer.eos_token_id]))
    assert "ends a turn with '<|im_end|>', at which generation does not end: set model.eos_token=" in line
    assert said(lambda: warn_unknown_end(tokenizer, {}, [mark])) == []
    assert said(lambda: warn_unknown_end(make_tokenizer(template=PLAIN), {}, [mark])) == []


def test_generation_markers_without_the_end_still_teach_the_end():
    bare = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    wide = MARKED.replace("{% endgeneration %}{% else %}", "{{ '\n' }}{% endgeneration %}{% else %}")
    asked = [user("a"), assistant("one"), user("b")]
    for template in (MARKED, bare, wide):
        tokenizer = make_merging_tokenizer(template=template)
        text = Encoder(tokenizer, learn="assistant").encode(asked, [assistant("two")], "f", every_turn=True)
        assert learned(text, tokenizer) == "one<|im_end|>two<|im_end|>"


@pytest.mark.parametrize("tokenizer", [make_tokenizer(template=TOOLS), make_merging_tokenizer(template=TOOLS)])
def test_of_a_completion_of_several_messages_the_assistants_are_learned(tokenizer):
    turns = [calling({"a": 1}), {"role": "tool", "content": "3"}, user("and?"), assistant("It is 3.")]
    encoder = Encoder(tokenizer)
    text = encoder.encode([user("1+2?")], turns, "f")
    assert learned(text, tokenizer) == '{"name": "add", "arguments": {"a": 1}}<|im_end|>It is 3.<|im_end|>'
    assert text.ids[: text.prompt_tokens] == encode_prompt(tokenizer, [user("1+2?")])
    chosen, rejected = encoder.pair([user("1+2?")], [turns, [assistant("3")]], "f")
    assert chosen == text and learned(rejected, tokenizer) == "3<|im_end|>"


def test_a_turn_that_ends_otherwise_where_the_conversation_goes_on_is_told_from_those_of_others():
    last = CHATML.replace("<|im_end|>", "{% if loop.last or m.role == 'user' %}<|im_end|>{% else %}<|pad|>{% endif %}")
    tokenizer = make_tokenizer(template=last)
    encoder = Encoder(tokenizer)
    text = encoder.encode([user("a")], [assistant("b"), user("c"), assistant("d")], "f")
    assert learned(text, tokenizer) == "bd<|im_end|>"
    assert any("and no token at which generation ends" in line for line in said(encoder.left_out.warn))


def test_chosen_that_thinks_and_rejected_that_does_not_differ_from_their_first_word():
    tokenizer = make_merging_tokenizer()
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    sides = [[assistant("<think>\nhm\n</think>\n\nyes")], [assistant("no")]]
    chosen, rejected = Encoder(tokenizer).pair([user("a")], sides, "f")
    begin = encode_prompt(tokenizer, [user("a")])
    assert chosen.ids[: len(begin)] == rejected.ids[: len(begin)] == begin
    assert chosen.prompt_tokens == rejected.prompt_tokens == len(begin)
    assert learned(chosen, tokenizer) == "<think>\nhm\n</think>\n\nyes<|im_end|>"
    assert learned(rejected, tokenizer) == "<think>\n\n</think>\n\nno<|im_end|>"


# -------------------------------------------------------------------------------------------------- the prompt's tokens


@pytest.mark.parametrize("make", [make_merging_tokenizer, make_llama_like_tokenizer])
@pytest.mark.parametrize("reply", ["6", "\n6", " the", "Zoë"])
def test_a_reply_and_its_reward_model_keep_the_prompts_tokens(make, reply, monkeypatch):
    tokenizer = make(template=PLAIN.replace("'\n'", "'<|im_end|>'"))
    ask, answer = [user("Hi")], [assistant(reply)]
    text = Encoder(tokenizer).encode(ask, answer, "f")
    begin = encode_prompt(tokenizer, ask)
    assert text.ids[: text.prompt_tokens] == begin
    assert tokenizer.decode(text.ids) == f"user: Hi<|im_end|>assistant: {reply}<|im_end|>"
    config = SimpleNamespace(ends_with_eos=True, prompt_apart=not marks_start(tokenizer))
    scorer = RewardModel("tiny")
    monkeypatch.setattr(scorer, "load", lambda: (SimpleNamespace(config=config), tokenizer))
    trained = Encoder(tokenizer, eos_ids=()).encode(ask, answer, "f")
    assert scorer._ids(tokenizer, ask, reply) == trained.ids == text.ids


def test_parts_keep_their_tokens_and_are_one_text():
    tokenizer = make_merging_tokenizer()
    assert tokenizer.tokenize("abcabc") == ["abcabc"]
    ids, ends = tokenize_parts(tokenizer, ["ab", "cabc", "", "abc the cat"])
    assert tokenizer.decode(ids) == "abcabcabc the cat" and ends[-1] == len(ids)
    assert ids[: ends[0]] == tokenizer("ab")["input_ids"] and ends[1] == ends[2]


MARKS = ["<|im_start|>user\n", "<|im_end|>\n", "<|im_end|>", "<|im_end|>\n<|im_start|>assistant\n"]
PIECES = [*MARKS, *MARKS, "the", " cat", "ab", "c", " ", "\n", "6", "::", "<|im_", "end|>"]
PARTS = st.lists(st.lists(st.sampled_from(PIECES), max_size=4).map("".join), min_size=4, max_size=9)
MERGING = [make_merging_tokenizer(), make_merging_tokenizer(metaspace=True), make_llama_like_tokenizer()]


@settings(deadline=None, max_examples=150)
@given(tokenizer=st.sampled_from(MERGING), parts=PARTS)
def test_what_is_settled_behind_a_control_token_has_the_tokens_that_the_whole_text_gives_it(tokenizer, parts):
    with mock.patch("lit_rl.core.chat_template._settled", return_value=(0, 0)):
        whole = tokenize_parts(tokenizer, parts)
    assert tokenize_parts(tokenizer, parts) == whole


@pytest.mark.parametrize("tokenizer", MERGING, ids=["bytes", "metaspace", "llama"])
def test_parts_of_a_long_talk_are_tokenised_a_few_times_each(tokenizer):
    parts = ["<|im_start|>user\n" + "the cat " * 30, "<|im_end|>\n<|im_start|>assistant\nhello world"] * 40
    with mock.patch("lit_rl.core.chat_template._token_ids", side_effect=continuation._token_ids) as asked:
        ids, ends = tokenize_parts(tokenizer, parts)
    assert len(ends) == 80 and tokenizer.decode(ids).count("hello world") == 40
    assert sum(len(call.args[1]) for call in asked.call_args_list) < 6 * len("".join(parts))


def test_ends_of_generation_reach_the_rows_of_a_run():
    """`prepare` with the ends of a run reads rows again that were looked at without; and once where they are equal."""
    tokenizer = make_tokenizer()
    mark = tokenizer.eos_token_id
    data = SupervisedDataModule(
        [{"messages": [user(f"{n}"), assistant("b")]} for n in range(3)], batch_size=1, val_fraction=0
    )
    data.prepare(tokenizer)
    first = data.corpus
    data.prepare(tokenizer, eos_ids=[mark])
    assert data.corpus is first
    pad = tokenizer.pad_token_id
    with pytest.raises(ConfigError, match=r"model\.eos_token="):
        data.prepare(tokenizer, eos_ids=[pad])
    data.prepare(tokenizer, eos_ids=[])
    assert data.corpus is not first
