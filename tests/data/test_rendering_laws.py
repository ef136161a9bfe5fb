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
from pathlib import Path
from typing import Any

import pytest
import trl
from hypothesis import given, settings
from hypothesis import strategies as st
from merging_tokenizers import make_llama_like_tokenizer, make_merging_tokenizer
from transformers import AutoTokenizer

from lit_rl.data.offline.encode import Encoder
from lit_rl.data.offline.options import ExampleOptions
from lit_rl.data.offline.read import read_examples
from lit_rl.data.prompt_set import PromptOptions
from lit_rl.data.prompt_set import read_examples as read_prompts
from lit_rl.data.sources import Rows
from lit_rl.data.templates import encode_prompt
from lit_rl.errors import DataError
from lit_rl.named import TINY

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
            text = str(tokenizer.apply_chat_template([*ASKED, {"role": "assistant", **reply}], tokenize=False))
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
    reply: dict[str, Any] = {"role": "assistant", "content": draw(SAID)}
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
    try:
        whole = tokenizer.apply_chat_template([*prompt, said], tokenize=False, **how)
    except TypeError:  # DeepSeek's, which wants text
        whole = tokenizer.apply_chat_template(
            [*prompt, {**reply, "tool_calls": [_as_text(each) for each in calls]}], tokenize=False, **how
        )
    rest = whole[len(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **how)) :]
    written = text_of(tokenizer, text.ids[: stop - 1])[len(text_of(tokenizer, begin)) :]
    assert rest.startswith(written)
    marks = "|".join(re.escape(str(token)) for token in tokenizer.convert_ids_to_tokens(sorted(ends)))
    assert re.fullmatch(rf"(\s|{marks})*", rest[len(written) :]), "no word is left behind"
    assert squeezed(reply["content"]) in squeezed(written)


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
    seen, _ = read_prompts(Rows("f", [asked]), tokenizer, PromptOptions(max_prompt_tokens=10**6))
    if not tools:
        assert seen[0].prompt_ids == examples[0].texts[0].ids[: examples[0].texts[0].prompt_tokens]
    return "kept"


@pytest.mark.parametrize(
    "examples", [40, pytest.param(600, marks=[pytest.mark.exhaustive, pytest.mark.all])], ids=["some", "many"]
)
def test_what_is_learned_is_the_reply_and_an_end_of_generation(examples):
    kept = Counter()

    @settings(deadline=None, max_examples=examples, database=None)
    @given(
        name=st.sampled_from(sorted(FILES)),
        tokens=st.sampled_from(["tiny", "bytes", "llama"]),
        prompt=conversations(),
        sides=st.lists(replies(), min_size=2, max_size=2),
        tools=st.sampled_from([None, None, [SCHEMA]]),
        own=st.sampled_from([None, None, {"enable_thinking": False}, {"enable_thinking": True}]),
    )
    def holds(name, tokens, prompt, sides, tools, own):
        kept.update(law(kind, name, tokens, prompt, sides, tools, own) == "kept" for kind in KINDS)

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
