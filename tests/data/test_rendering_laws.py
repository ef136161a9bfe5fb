"""Laws of what is learned of a conversation, over chat templates of models, tokenizers and what people say.

The templates are those that TRL's package ships; each is tried with the control token by which it ends a turn.
"""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections import Counter
from functools import cache
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
import trl
from hypothesis import given, settings
from hypothesis import strategies as st
from merging_tokenizers import make_llama_like_tokenizer, make_merging_tokenizer
from transformers import AutoTokenizer

from lit_rl.core.chat_template import THOUGHTS
from lit_rl.core.errors import DataError
from lit_rl.core.model_paths import TINY
from lit_rl.data.encode import Encoder
from lit_rl.data.example_reader import ExampleOptions, read_examples
from lit_rl.data.prompt_reader import PromptOptions, read_prompts
from lit_rl.data.rendering import GENERATION, encode_prompt
from lit_rl.data.sources import Rows

FILES = {path.stem: path for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))}
ASKED = [{"role": "user", "content": "QUESTION"}]
CALL = {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": {"left": 1, "word": "zwei"}}}
SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"left": {"type": "integer", "description": "A number."}}},
    },
}


@cache
def base(kind: str) -> Any:
    if kind == "tiny":
        return AutoTokenizer.from_pretrained(TINY)
    return make_merging_tokenizer() if kind == "bytes" else make_llama_like_tokenizer()


@cache
def model(name: str, kind: str) -> tuple[Any, frozenset[int]]:
    """A tokenizer with a template, and the tokens at which generation ends: those by which it ends a turn."""
    tokenizer = copy.deepcopy(base(kind))
    tokenizer.add_tokens(["<bos>"], special_tokens=True)
    tokenizer.bos_token = "<bos>"
    tokenizer.chat_template = FILES[name].read_text()
    marks: list[str] = []
    for reply in ({"content": "ANSWER"}, {"content": "", "tool_calls": [CALL]}):
        try:
            text = rendered(tokenizer, [*ASKED, {"role": "assistant", **reply}])
        except Exception:
            continue
        if found := re.search(r"(?:ANSWER|zwei)(?!.*(?:ANSWER|zwei))(.*)$", text, re.DOTALL):
            marks += re.findall(r"<(?!/)[^<>\s]+>", found[1].replace("</think>", ""))[-1:]
    marks = [mark for mark in dict.fromkeys(marks) if mark not in ("<tool_call>", "<think>")]
    if marks:
        tokenizer.add_tokens(marks, special_tokens=True)
        tokenizer.eos_token = marks[0]
    ids = tokenizer.convert_tokens_to_ids([tokenizer.eos_token, *marks])
    return tokenizer, frozenset(ids)


WORDS = st.lists(
    st.sampled_from(["the", " ", "\n", "6", "ab", "Zoë", "🙂", '"', "\\", "answer", "{x}", ": ", "漢字"]), max_size=5
).map("".join)
SAID = WORDS.filter(str.strip)


@st.composite
def replies(draw: Any) -> dict[str, Any]:
    marks = draw(st.sampled_from(["", "", "a </think> b"]))  # a reply may talk of them
    reply: dict[str, Any] = {"role": "assistant", "content": f"{draw(SAID)}{marks}{draw(WORDS) if marks else ''}"}
    if draw(st.integers(0, 3)) == 0:
        arguments = {"left": draw(st.integers(0, 99)), "word": draw(WORDS), "deep": {"flag": [draw(st.booleans())]}}
        as_text = draw(st.booleans())
        function = {"name": "add", "arguments": json.dumps(arguments) if as_text else arguments}
        reply |= {"content": "", "tool_calls": [{"type": "function", "id": "call00000", "function": function}]}
    if draw(st.integers(0, 2)) == 0:
        reply[draw(st.sampled_from(["reasoning_content", "thinking"]))] = draw(SAID)
    if draw(st.integers(0, 5)) == 0:
        reply["weight"] = 1
    return reply


@st.composite
def conversations(draw: Any) -> list[dict[str, Any]]:
    """Up to the reply."""
    system = [{"role": "system", "content": draw(SAID)}] if draw(st.booleans()) else []
    turns = [{"role": "user", "content": draw(SAID)}]
    if draw(st.booleans()):
        turns += [{"role": "assistant", "content": draw(SAID)}, {"role": "user", "content": draw(SAID)}]
    return system + turns


def text_of(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


IN_PARTS = {FILES[name].read_text() for name in FILES if name.startswith(("idefics3", "smolvlm", "llava_next"))}
"""Templates that read texts in parts alone."""


def rendered(tokenizer: Any, messages: list[Any], **how: Any) -> str:
    if tokenizer.chat_template in IN_PARTS:
        messages = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **how))


def check_reply(
    tokenizer: Any, ends: frozenset[int], text: Any, prompt: list[Any], reply: Any, how: dict[str, Any]
) -> None:
    """What is learned is the reply as the template writes it, up to one token at which generation ends."""
    begin = encode_prompt(tokenizer, prompt, chat_template_kwargs=how)
    assert text.ids[: text.prompt_tokens] == begin, "the prompt's tokens are those that generation sees"
    places = [i for i, flag in enumerate(text.learned) if flag]
    stop = places[-1] + 1
    assert places == list(range(len(begin), stop)), "from the prompt's end on, without a gap"
    assert text.ids[stop - 1] in ends, "generation ends there"
    assert all(token in ends or not text_of(tokenizer, [token]).strip() for token in text.ids[stop:])
    assert stop < 2 or text.ids[stop - 2] not in ends, "and has not ended before"
    calls = [each | {"function": dict(each["function"])} for each in reply.get("tool_calls", ())]
    for each in calls:
        if isinstance(each["function"]["arguments"], str):
            each["function"]["arguments"] = json.loads(each["function"]["arguments"])
    said = {**reply, **({"tool_calls": calls} if calls else {})}
    prefix = len(rendered(tokenizer, prompt, add_generation_prompt=True, **how))
    rests = [whole[prefix:] for whole in _wholes(tokenizer, prompt, said, how)]
    written = text_of(tokenizer, text.ids[: stop - 1])[len(text_of(tokenizer, begin)) :]
    rest = next((rest for rest in rests if rest.startswith(written)), None)
    assert rest is not None
    marks = "|".join(re.escape(str(token)) for token in tokenizer.convert_ids_to_tokens(sorted(ends)))
    assert re.fullmatch(rf"(\s|{marks})*", rest[len(written) :]), "no word is left behind"
    assert squeezed(reply["content"]) in squeezed(written)


def _wholes(tokenizer: Any, prompt: list[Any], said: Any, how: dict[str, Any]) -> list[str]:
    """The renderings of a conversation with the thought of its reply under each key, the one that is read first."""
    thought = next((said[key] for key in THOUGHTS if key in said), None)
    bare = {key: item for key, item in said.items() if key not in THOUGHTS}
    wholes = []
    for form in [{**bare, key: thought} for key in THOUGHTS] if thought else [said]:
        for calls in (said.get("tool_calls"), [_as_text(each) for each in said.get("tool_calls", ())]):
            try:  # DeepSeek's wants arguments as text
                wholes.append(
                    rendered(tokenizer, [*prompt, {**form, **({"tool_calls": calls} if calls else {})}], **how)
                )
                break
            except Exception:
                continue
    thoughtful = [whole for whole in wholes if thought and squeezed(thought) in squeezed(whole)]
    return thoughtful or wholes


def _as_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


def missing_of(messages: list[dict[str, Any]], tools: Any, text: str) -> set[str]:
    """What a reader does not find in a rendering, as the report calls it."""
    found = squeezed(text)
    lost = set()
    for message in messages:
        for key in ("content", "reasoning_content", "thinking"):
            if squeezed(message.get(key, "")) not in found:
                lost.add(f"{'words' if key == 'content' else key} of the {message['role']}")
        if "weight" in message:
            lost.add("weight")
    return lost | ({"tools"} if tools and "add" not in text else set())


KINDS = ("texts", "pairs", "verdicts", "messages")


def law(kind: str, name: str, tokens: str, prompt: Any, sides: list[Any], tools: Any, own: Any = None) -> str:
    tokenizer, ends = model(name, tokens)
    row: dict[str, Any] = {"prompt": prompt, "completion": [sides[0]]}
    if kind == "pairs":
        row = {"prompt": prompt, "chosen": [sides[0]], "rejected": [sides[1]]}
    elif kind == "verdicts":
        row["label"] = True
    elif kind == "messages":
        row = {"messages": [*prompt, sides[0]]}
    row |= {"tools": tools} if tools else {}
    row |= {"chat_template_kwargs": own} if own else {}
    how = {**({"tools": tools} if tools else {}), **(own or {})}
    before = copy.deepcopy(row)
    encoder = Encoder(tokenizer, eos_ids=ends)
    options = ExampleOptions(max_length=None, max_dropped=1)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            examples, counts, _ = read_examples(
                Rows("f", [row]), encoder, "texts" if kind == "messages" else kind, options
            )
        except DataError as error:
            return re.sub(r"^.*?(the chat template [a-z ]*).*$", r"\1", str(error), flags=re.DOTALL)
    assert row == before, "nobody's data are changed"
    if not counts["kept"]:
        return "equal"
    report = "\n".join(str(each.message) for each in heard)
    for text, side in zip(examples[0].texts, sides):
        check_reply(tokenizer, ends, text, prompt, side, how)
        whole = text_of(tokenizer, text.ids)
        for lost in missing_of([*prompt, side], tools, whole):
            assert lost in report, report
    asked = {"prompt": prompt, **({"chat_template_kwargs": own} if own else {})}
    seen, _ = read_prompts(Rows("f", [asked]), Encoder(tokenizer), PromptOptions(max_prompt_tokens=10**6))
    if not tools:
        assert seen[0].prompt_ids == examples[0].texts[0].ids[: examples[0].texts[0].prompt_tokens]
    return "kept"


@pytest.mark.parametrize(
    "examples", [3, pytest.param(40, marks=[pytest.mark.exhaustive, pytest.mark.all])], ids=["some", "many"]
)
def test_what_is_learned_is_the_reply_and_an_end_of_generation(examples):
    """With every template, each time: one kind of row of each, and all kinds in turn."""
    kept = Counter()

    @settings(deadline=None, max_examples=examples, database=None)
    @given(
        first=st.integers(0, len(KINDS) - 1),
        tokens=st.sampled_from(["tiny", "bytes", "llama"]),
        prompt=conversations(),
        sides=st.lists(replies(), min_size=2, max_size=2),
        tools=st.sampled_from([None, None, [SCHEMA]]),
        own=st.sampled_from([None, None, {"enable_thinking": False}, {"enable_thinking": True}]),
    )
    def holds(first, tokens, prompt, sides, tools, own):
        for kind, name in zip(cycle(KINDS[first:] + KINDS[:first]), FILES):
            kept[law(kind, name, tokens, prompt, sides, tools, own) == "kept"] += 1

    holds()
    assert kept[True] > kept.total() / 4, "most conversations are learned from"


@pytest.mark.parametrize("reply", ["words", "call"])
def test_most_templates_are_learned_with(reply):
    """What the law says nothing of are templates that refuse, drop calls, or render a prompt otherwise alone."""
    said = {"words": {"content": "42"}, "call": {"content": "", "tool_calls": [CALL]}}[reply]
    side = {"role": "assistant", **said}
    fates = Counter(law("texts", name, "bytes", ASKED, [side, side], None) for name in FILES)
    assert len(FILES) == sum(fates.values()) >= 72
    assert fates["kept"] >= {"words": 54, "call": 36}[reply], fates


# ------------------------------------------------------------------------------------------- several turns are learned

SECOND_CALL = {**CALL, "id": "call00001", "function": {"name": "add", "arguments": {"left": 2, "word": "drei"}}}
TURNS: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "talk": (
        [
            *ASKED,
            {"role": "assistant", "content": "FIRST"},
            {"role": "user", "content": "AGAIN"},
            {"role": "assistant", "content": "SECOND"},
            {"role": "user", "content": "MORE"},
            {"role": "assistant", "content": "THIRD"},
        ],
        None,
    ),
    "tools": (
        [
            *ASKED,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "RESULT", "name": "add", "tool_call_id": "call00000"},
            {"role": "assistant", "content": "", "tool_calls": [SECOND_CALL]},
            {"role": "tool", "content": "OUTCOME", "name": "add", "tool_call_id": "call00001"},
            {"role": "assistant", "content": "THIRD"},
        ],
        [SCHEMA],
    ),
}
TURNS["thoughts"] = (
    [{**each, "reasoning_content": "hm"} if each["role"] == "assistant" else each for each in TURNS["talk"][0]],
    None,
)
SAYS = {"talk": ["FIRST", "SECOND", "THIRD"], "tools": ["zwei", "drei", "THIRD"]}
SAYS["thoughts"] = SAYS["talk"]
HEARD = ("QUESTION", "AGAIN", "MORE", "RESULT", "OUTCOME")
FURTHER_ENDS = {"glm4moe": ["<|user|>", "<|observation|>"], "phi3": ["<|end|>"], "phi3_5": ["<|end|>"]}
"""At which generation ends by the model's generation_config.json, beside what ends a conversation."""


def turns_learned(name: str, talk: str, learn: Any) -> str:
    """The fate of a conversation whose turns are all learned, of which nothing but these is."""
    base_tokenizer, ends = model(name, "bytes")
    tokenizer = copy.deepcopy(base_tokenizer)
    further = FURTHER_ENDS.get(name.removesuffix("_training"), [])
    tokenizer.add_tokens(further, special_tokens=True)
    encoder = Encoder(tokenizer, learn=learn, eos_ids={*ends, *tokenizer.convert_tokens_to_ids(further)})
    messages, tools = TURNS[talk]
    first = 1 if learn == "completion" else len(messages) - 1
    try:
        text = encoder.encode(messages[:first], messages[first:], "f", tools=tools, every_turn=learn == "assistant")
    except DataError as error:
        return str(error)
    runs = re.findall("1+", "".join(str(int(flag)) for flag in text.learned))
    assert len(runs) == 3, "a turn each"
    stops = [i for i, (flag, next_) in enumerate(pairwise([*text.learned, False]), 1) if flag and not next_]
    for stop, run, says in zip(stops, runs, SAYS[talk]):
        turn = text_of(tokenizer, text.ids[stop - len(run) : stop])
        assert says in turn and not any(words in turn for words in HEARD)
        assert not set(text.ids[stop - len(run) : stop - 1]) & encoder.ends, "generation has not ended before"
    open_ = [stop for stop in stops if text.ids[stop - 1] not in encoder.ends]
    assert stops[-1] not in open_
    return "open" if open_ else "kept"


@pytest.mark.parametrize("talk", TURNS)
@pytest.mark.parametrize("learn, least", [("completion", 40), ("assistant", 12)])
def test_of_several_turns_only_the_assistants_are_learned_each_with_its_end(talk, learn, least):
    """Templates that write a turn otherwise where the conversation goes on too: Qwen3's, Phi-3's, gpt-oss'."""
    names = [name for name in FILES if learn == "completion" or GENERATION.search(FILES[name].read_text())]
    fates = {name: turns_learned(name, talk, learn) for name in names}
    assert Counter(fates.values())["kept"] >= {"talk": least, "tools": least - 6, "thoughts": least - 12}[talk], fates
    refused = {name for name, fate in fates.items() if "from those of the user" in fate}
    assert refused <= ({"gptoss", "gptoss_training"} if talk == "thoughts" else set()), (
        "it drops the thought and its end"
    )
    wanted = {"qwen3", "glm4moe", "phi3"} if talk == "talk" and learn == "completion" else set()
    assert all(fates[name] == "kept" for name in wanted), fates
    assert fates.get("gptoss", "open") == "open" or talk != "talk", "its earlier turns end with <|end|>"


def test_a_turn_without_an_end_is_said_and_turns_that_nobody_can_tell_are_refused():
    tokenizer, ends = model("gptoss", "bytes")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["<|end|>"], special_tokens=True)
    encoder = Encoder(tokenizer, eos_ids=ends)
    messages, _ = TURNS["talk"]
    encoder.encode(messages[:1], messages[1:], "f")
    with pytest.warns(UserWarning, match=r"writes '.*ST<\|end\|>' where a reply ends .* model\.eos_token='<\|end\|>'"):
        encoder.left_out.warn()
    counting = copy.deepcopy(base("bytes"))
    counting.chat_template = (
        "{% for m in messages %}{{ loop.revindex if m.role == 'user' and not loop.first }}{{ m.content }}<|im_end|>"
        "{% endfor %}"
    )
    with pytest.raises(DataError, match="^f: .* earlier turns .*on_bad_row=skip"):
        Encoder(counting).encode(messages[:1], messages[1:], "f")


# ------------------------------------------------------------------------------------------------------------ thoughts


def learned_of(name: str, **reply: Any) -> tuple[str, str] | None:
    """What stands behind the question, and what is said of it; None: the template refuses the row."""
    tokenizer, ends = model(name, "bytes")
    encoder = Encoder(tokenizer, eos_ids=ends)
    try:
        text = encoder.encode(ASKED, [{"role": "assistant", **reply}], "f")
    except DataError:
        return None
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        encoder.left_out.warn()
    return text_of(tokenizer, text.ids).rpartition("QUESTION")[2], str([str(each.message) for each in heard])


def test_thoughts_are_learned_once_under_whatever_key_or_between_whatever_marks_they_come():
    """Also where the generation prompt has opened the thought, so that a response holds its end alone (TRL #6361)."""
    read = 0
    for name in FILES:
        keys = [learned_of(name, content="42", **{key: "hm"}) for key in THOUGHTS]
        texts = {found and found[0] for found in keys}
        assert len(texts) == 1, name
        for found in filter(None, keys):
            assert ("hm" in found[0]) != ("of the assistant: hm" in found[1]), name
        told = keys[0] is not None and "hm" in keys[0][0] and "</think>" in keys[0][0]
        read += told
        for content in ("<think>\nhm\n</think>\n\n42", "hm\n</think>\n\n42"):
            if (found := learned_of(name, content=content)) is not None:
                assert found[0].count("</think>") == 1 or "</think>" not in keys[0][0], (name, found)
                assert not told or found[0].count("<think>") == 1, (name, found)
    assert read >= 15


@pytest.mark.parametrize(
    "content",
    [
        "Use `<think>x</think>` tags.",
        "In prose, </think> closes it.",
        "So:\n<think>\nx\n</think>\nDone.",
        "It is </think>",
    ],
)
def test_marks_that_a_reply_talks_of_are_no_thought(content):
    for name in FILES:
        tokenizer, _ = model(name, "bytes")
        found = learned_of(name, content=content)
        if found is not None and tokenizer.chat_template not in IN_PARTS:
            whole = rendered(tokenizer, [*ASKED, {"role": "assistant", "content": content}])
            assert squeezed(found[0]).startswith(squeezed(whole.rpartition("QUESTION")[2])), name


def test_a_template_that_takes_no_thought_beside_a_call_leaves_it_out_and_that_is_said():
    tokenizer, ends = model("gptoss", "bytes")
    encoder = Encoder(tokenizer, eos_ids=ends)
    reply = {"role": "assistant", "content": "So.", "reasoning_content": "hm", "tool_calls": [CALL]}
    text = encoder.encode(ASKED, [reply], "f", tools=[SCHEMA])
    assert "zwei" in text_of(tokenizer, text.ids)
    with pytest.warns(UserWarning, match="reasoning_content of the assistant: hm"):
        encoder.left_out.warn()


# -------------------------------------------------------------- rows of a conversation, by the template's own turns

UNMARKED = {
    name: re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", path.read_text()) for name, path in FILES.items()
}


@cache
def unmarked(name: str, kind: str) -> tuple[Any, frozenset[int]]:
    """`model`, without generation markers, and with what else ends generation."""
    marked, ends = model(name, kind)
    tokenizer = copy.deepcopy(marked)
    further = FURTHER_ENDS.get(name.removesuffix("_training"), [])
    tokenizer.add_tokens(further, special_tokens=True)
    tokenizer.chat_template = UNMARKED[name]
    return tokenizer, frozenset([*ends, *tokenizer.convert_tokens_to_ids(further)])


@st.composite
def talks(draw: Any) -> list[dict[str, Any]]:
    """A conversation of one to three questions, each answered after up to two rounds of calls."""
    talk = [{"role": "system", "content": draw(SAID)}] if draw(st.booleans()) else []
    for number in range(draw(st.integers(1, 3))):
        if number and draw(st.integers(0, 9)) == 0:
            talk.append({"role": "system", "content": draw(SAID)})
        talk.append({"role": "user", "content": draw(SAID)})
        for place in range(draw(st.sampled_from([0, 0, 1, 2]))):
            names = [f"call0{number}{place}{each:04d}" for each in range(draw(st.integers(1, 2)))]
            calls = [
                {**CALL, "id": name, "function": {"name": "add", "arguments": {"left": draw(st.integers(0, 9))}}}
                for name in names
            ]
            talk.append(
                _thinks(draw, {"role": "assistant", "content": draw(st.sampled_from(["", "So."])), "tool_calls": calls})
            )
            talk += [{"role": "tool", "name": "add", "tool_call_id": name, "content": draw(SAID)} for name in names]
        talk.append(_thinks(draw, {"role": "assistant", "content": f"{draw(SAID)}{number}"}))
    return talk


def _thinks(draw: Any, reply: dict[str, Any]) -> dict[str, Any]:
    return reply | ({"reasoning_content": f"hm{draw(SAID)}"} if draw(st.booleans()) else {})


def rows_hold(name: str, kind: str, talk: list[dict[str, Any]]) -> str:
    """What is learned is what the assistant wrote, once, behind the tokens that generation would have read."""
    tokenizer, ends = unmarked(name, kind)
    tools = [SCHEMA] if any("tool_calls" in message for message in talk) else None
    how = {"tools": tools} if tools else {}
    encoder = Encoder(tokenizer, learn="assistant", eos_ids=ends)
    try:
        rows = encoder.rows([], talk, "f", tools=tools, every_turn=True)
    except DataError as error:
        return f"refused: {error}"
    replies = iter(i for i, message in enumerate(talk) if message["role"] == "assistant")
    for row in rows:
        spans = [match.span() for match in re.finditer("1+", "".join(str(int(flag)) for flag in row.learned))]
        for start, stop in spans:
            number = next(replies)
            switches = ({key: value} for key in ("enable_thinking", "thinking") for value in (False, True))
            read = [
                encode_prompt(tokenizer, talk[:number], chat_template_kwargs={**how, **more})
                for more in ({}, *switches)
            ]
            if start == spans[0][0]:
                assert row.ids[:start] in read, f"{name}: the tokens before a reply are those that generation reads"
            texts = [text_of(tokenizer, ids) for ids in read]  # a reply keeps its tokens where it begins with a blank
            assert text_of(tokenizer, row.ids[:start]) in texts, f"{name}: and so is the text before each"
            words = text_of(tokenizer, row.ids[start:stop])
            assert squeezed(talk[number]["content"]) in squeezed(words)
            assert bool(re.search(r"\badd\b", words)) == ("tool_calls" in talk[number])
            assert row.ids[stop - 1] in ends or stop < len(row.ids), "and what ends the text ends generation"
            assert not set(row.ids[start : stop - 1]) & ends or name.startswith("gptoss"), "of a reply that ends once"
    assert next(replies, None) is None, "every reply is learned"
    return f"{min(len(rows), 2)} rows"


@pytest.mark.parametrize(
    "examples", [2, pytest.param(40, marks=[pytest.mark.exhaustive, pytest.mark.all])], ids=["some", "many"]
)
def test_a_conversation_becomes_rows_that_teach_each_reply_once_as_inference_would_have_met_it(examples):
    """With every template, that of training without its markers too."""
    fates = Counter[str]()

    @settings(deadline=None, max_examples=examples, database=None)
    @given(kind=st.sampled_from(["tiny", "bytes", "llama"]), talk=talks())
    def holds(kind, talk):
        for name in FILES:
            fates[rows_hold(name, kind, talk).partition(":")[0]] += 1

    holds()
    assert fates["1 rows"] and fates["refused"] < fates.total() / 2, fates
