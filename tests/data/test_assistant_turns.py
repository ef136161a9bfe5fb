"""Rows of a conversation, by hand, and beside the templates that TRL has written for training."""

from __future__ import annotations

import copy
import logging
from itertools import groupby
from typing import Any

import chat_templates
import pytest
from byte_tokenizers import CHATML, make_tokenizer
from merging_tokenizers import make_merging_tokenizer

from lit_rl.core.errors import DataError
from lit_rl.data.encode import Encoder
from lit_rl.data.example_module import SupervisedDataModule
from lit_rl.data.example_reader import ExampleOptions, read_examples
from lit_rl.data.sources import Rows

THOUGHTFUL = CHATML.replace(
    "{{ m['content'] }}",
    "{% if m['reasoning_content'] and loop.last %}<think>{{ m['reasoning_content'] }}</think>{% endif %}"
    "{{ m['content'] }}",
)
"""ChatML in which the last message alone keeps its thought."""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **keys}


TALK = [user("a"), assistant("b", reasoning_content="hm"), user("c"), assistant("d", reasoning_content="ah")]


def marked(tokenizer: Any, ids: list[int], learned: list[Any]) -> str:
    """The text, with what is learned in brackets."""
    runs = groupby(zip(ids, learned), key=lambda pair: bool(pair[1]))
    texts = ((flag, tokenizer.decode([token for token, _ in run])) for flag, run in runs)
    return "".join(f"[{text}]" if flag else text for flag, text in texts)


def read(rows: list[dict[str, Any]], template: str = THOUGHTFUL, learn: Any = "assistant", **options: Any) -> Any:
    tokenizer = make_merging_tokenizer(template=template)
    options = {"max_length": None, "max_dropped": 1, **options}
    examples, counts, _ = read_examples(
        Rows("f", rows), Encoder(tokenizer, learn=learn), "texts", ExampleOptions(learn=learn, **options)
    )
    return [(marked(tokenizer, each.texts[0].ids, each.texts[0].learned), each.prompt) for each in examples], counts


def test_a_template_that_only_appends_gives_one_row():
    ((text, prompt),), counts = read([{"messages": TALK}], CHATML)
    assert text == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[d<|im_end|>]\n"
    )
    assert prompt == TALK[:3] and counts["kept"] == 1 and not counts["forked"]


@pytest.mark.parametrize("learn", ["assistant", "completion"])
def test_a_template_that_rewrites_earlier_turns_gives_rows_as_inference_meets_them(learn):
    """Of a completion too; the row behind the row's own prompt is the one that validation generates from."""
    row = {"messages": TALK} if learn == "assistant" else {"prompt": TALK[:1], "completion": TALK[1:]}
    rows, counts = read([row], learn=learn)
    assert [text for text, _ in rows] == [
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[<think>hm</think>b<|im_end|>]\n",
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[<think>ah</think>d<|im_end|>]\n",
    ]
    assert [prompt for _, prompt in rows] == ([None, TALK[:3]] if learn == "assistant" else [TALK[:1], None])
    assert (counts["rows"], counts["kept"], counts["forked"], counts["truncated"]) == (1, 1, 1, 0)


def test_rows_of_a_conversation_are_cut_and_dropped_each_by_itself():
    whole, counts = read([{"messages": TALK}])
    short = counts["longest"] - 3
    cut, counts = read([{"messages": TALK}], max_length=short)
    assert cut[0] == whole[0] and whole[1][0].startswith(cut[1][0].removesuffix("]")) and counts["truncated"] == 1
    left, counts = read([{"messages": TALK}], max_length=short, overlong="drop")
    assert left == whole[:1] and (counts["kept"], counts["forked"], counts["truncated"]) == (1, 1, 1)
    none, counts = read([{"messages": TALK}], max_length=4)
    assert not none and counts["overlong"] == 1 and counts["kept"] == counts["forked"] == 0
    assert read([{"messages": [user("a"), user("b")]}])[1]["empty"] == 1, "the assistant says nothing"


def test_rows_of_a_conversation_are_held_out_together():
    rows = [{"messages": [user(f"a{n}"), *TALK[1:]]} for n in range(9)]
    tokenizer = make_merging_tokenizer(template=THOUGHTFUL)
    data = SupervisedDataModule(rows=rows, learn="assistant", val_fraction=1 / 3, batch_size=2)
    data.prepare(tokenizer, "texts", stage="fit")
    parts = [data.corpus.train, *data.corpus.val.values()]
    assert [len(part.examples) for part in parts] == [12, 6]
    train, held = (
        {tokenizer.decode(row.texts[0].ids).split("user\n")[1][:2] for row in part.examples} for part in parts
    )
    assert (len(train), len(held)) == (6, 3) and not train & held


def test_a_text_is_learned_once_where_a_message_follows_the_last_reply_or_nothing_stands_before_the_first():
    rows, _ = read([{"messages": [*TALK, user("e")]}])
    assert rows == [(text, None) for text, _ in read([{"messages": TALK}])[0]]
    ((text, _),), _ = read([{"messages": TALK[1:2]}])
    assert text == "<|im_start|>assistant\n[<think>hm</think>b<|im_end|>]\n", "the generation prompt is not learned"


@pytest.mark.parametrize("blank", ["", " \n"])
def test_a_reply_that_says_nothing_is_read_and_not_learned_wherever_it_stands(blank):
    last = [user("a"), assistant("b"), user("c"), assistant(blank)]
    ((text, _),), counts = read([{"messages": last}], CHATML)
    assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]\n" and counts["kept"] == 1
    with pytest.warns(UserWarning, match=r"Replies that say nothing are not learned, from f\[0\] on"):
        ((text, _),), _ = read([{"messages": [user("a"), assistant(blank), user("c"), assistant("d")]}], CHATML)
    assert text.count("[") == 1 and text.endswith("<|im_start|>assistant\n[d<|im_end|>]\n")
    assert read([{"messages": [user("a"), assistant(blank)]}], CHATML)[1]["empty"] == 1


def test_a_reply_that_does_not_continue_the_generation_prompt_is_met_under_the_templates_switch():
    """As Nemotron's: a thought is opened unless `enable_thinking` is false."""
    opens = CHATML.replace(
        "<|im_start|>assistant\n",
        "<|im_start|>assistant\n{{ '<think></think>' if enable_thinking is false else '<think>\\n' }}",
    ).replace(
        "{{ m['content'] }}",
        "{% if m['role'] == 'assistant' %}<think>{{ '\\n' ~ m['reasoning_content'] if m['reasoning_content'] }}</think>"
        "{% endif %}{{ m['content'] }}",
    )
    tokenizer = make_tokenizer(template=opens)
    messages = [user("a"), assistant("b"), user("c"), assistant("d", reasoning_content="ah")]
    encoder = Encoder(tokenizer, learn="assistant")
    (row,) = encoder.rows([], messages, "f", every_turn=True)
    text = marked(tokenizer, row.ids, row.learned)
    assert "assistant\n<think></think>[b<|im_end|>]" in text and "assistant\n<think>\n[ah</think>d<|im_end|>]" in text
    with pytest.warns(UserWarning, match="learned as the chat template writes .* enable_thinking=False, from f on"):
        encoder.left_out.warn()
    fixed = Encoder(tokenizer, {"enable_thinking": True}, "assistant")
    with pytest.raises(DataError, match=r"f: message 1 \(assistant\): .*opens every reply with '<think>\\n'"):
        fixed.rows([], messages, "f", every_turn=True)


def test_two_replies_that_the_template_joins_are_refused():
    joins = CHATML.replace(
        "<|im_start|>{{ m['role'] }}\n",
        "{% if loop.first or m['role'] != loop.previtem.role %}<|im_start|>{{ m['role'] ~ '\\n' }}{% endif %}",
    )
    assert joins != CHATML
    with pytest.raises(DataError, match=r"f\[0\]: message 2 \(assistant\): the chat template renders the prompt diff"):
        read([{"messages": [user("a"), assistant("b"), assistant("d")]}], joins)


# ------------------------------------------------------------------------------------ TRL's templates for training

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
    }
]
ASKED: dict[str, list[dict[str, Any]]] = {
    "talk": [user("one"), assistant("uno"), user("two"), assistant("dos")],
    "thoughts": [
        user("one"),
        assistant("uno", reasoning_content="hm1"),
        user("two"),
        assistant("dos", reasoning_content="hm2"),
    ],
    "tools": [
        user("one"),
        assistant("", tool_calls=[CALL]),
        {"role": "tool", "name": "f", "content": "r1"},
        assistant("uno"),
        user("two"),
        assistant("dos"),
    ],
}
THEIRS = {
    "deepseek_r1_distill": "refused thoughts",
    "deepseekv3": "refused thoughts",
    "diffusion_gemma": "end opening thoughts",
    "glm4moe": "end thoughts",
    "gptoss": "end header thoughts",
    "idefics3": "words",
    "lfm2": "refused",
    "llama3": "refused",
    "llava_next": "words",
    "muse_glimmer": "header",
    "nemotron_3_5_lightning": "header thoughts",
    "nemotron_3_nano": "header thoughts",
    "nemotron_3_super": "header thoughts",
    "nemotron_3_ultra": "header thoughts",
    "phi3": "end refused",
    "phi3_5": "end refused",
    "qwen2_5_vl": "refused",
    "qwen3_5_nothink": "header",
    "qwen3_5_think": "header",
    "qwen3_6": "header",
    "qwen3_8": "header",
    "smolvlm": "words",
}
"""Where TRL learns otherwise, by family; the other families are equal in every reply. `header`: also what the
generation prompt has written already, such as `<think>`. `opening`: not what the template writes before a reply behind
a tool's answer and the generation prompt does not. `thoughts`: a reply without its thought, which its template
drops of all turns but the last. `end`: another end of generation, or a second one. `words`: it does not learn what the
assistant says, or refuses the conversation. `refused`: it learns a call that the template has left out, or a reply
without the thought that the model would write; that is refused here."""


@pytest.mark.parametrize(
    "name, talk, thoughts, tools", [("qwen2_5", 1, 1, 1), ("phi3", 1, 1, 0), ("qwen3", 2, 2, 3), ("gptoss", 2, 2, 2)]
)
def test_a_row_ends_where_the_template_of_a_family_rewrites_what_stood_there(name, talk, thoughts, tools):
    """Phi-3's writes a second end behind the last reply, which is not learned; gpt-oss' writes another one."""
    tokenizer, ends = chat_templates.tokenizer_of(name)
    encoder = Encoder(tokenizer, learn="assistant", eos_ids=ends)
    for kind, count in {"talk": talk, "thoughts": thoughts, "tools": tools}.items():
        given = TOOLS if kind == "tools" else None
        if count:
            assert len(encoder.rows([], ASKED[kind], "f", tools=given, every_turn=True)) == count, kind


def test_a_reply_that_rewrites_the_history_before_it_is_met_behind_what_was_read():
    """gpt-oss' template drops the thought before a call once the answer stands there: the model has read it."""
    tokenizer, ends = chat_templates.tokenizer_of("gptoss")
    question, call, answer, reply = ASKED["tools"][:4]
    talk = [question, {**call, "reasoning_content": "hm1"}, answer, {**reply, "reasoning_content": "hm2"}]
    (row,) = Encoder(tokenizer, learn="assistant", eos_ids=ends).rows([], talk, "f", tools=TOOLS, every_turn=True)
    assert marked(tokenizer, row.ids, row.learned).partition("<|start|>assistant")[2] == (
        "[<|channel|>analysis<|message|>hm1<|end|><|start|>assistant to=functions.f<|channel|>commentary json"
        '<|message|>{"x": 1}<|call|>]<|start|>functions.f to=assistant<|channel|>commentary<|message|>"r1"<|end|>'
        "<|start|>assistant"
        "[<|channel|>analysis<|message|>hm2<|end|><|start|>assistant<|channel|>final<|message|>uno<|return|>]"
    )


def differences(name: str) -> set[str]:
    tokenizer, ends = chat_templates.tokenizer_of(name)
    training = copy.deepcopy(tokenizer)
    training.chat_template = (chat_templates.templates() / f"{name}_training.jinja").read_text()
    marks = tuple(tokenizer.convert_ids_to_tokens(list(ends)))
    found = set[str]()
    for kind, messages in ASKED.items():
        tools = TOOLS if kind == "tools" else None
        try:
            made = training.apply_chat_template(
                messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        except Exception:
            made = {"input_ids": [], "assistant_masks": []}
        theirs = _replies(tokenizer, made["input_ids"], made["assistant_masks"])
        try:
            encoder = Encoder(tokenizer, learn="assistant", eos_ids=ends)
            rows = encoder.rows([], messages, "f", tools=tools, every_turn=True)
        except DataError:
            found |= {"refused"} if theirs else set()
            continue
        ours = [reply for row in rows for reply in _replies(tokenizer, row.ids, row.learned)]
        if len(theirs) != len(ours):
            found.add("words")
        for (before, mine), (_, other) in zip(ours, theirs):
            bare, others = _without(mine, marks), _without(other, marks)
            if "hm" in bare and "hm" not in others:
                found.add("thoughts")
            elif not others:
                found.add("words")
            elif bare == others:
                found |= {"end"} if mine != other else set()
            elif others.endswith(bare) and before.rstrip().endswith(others.removesuffix(bare).rstrip()):
                found |= {"header", *(["end"] if mine[len(bare) :] != other[len(others) :] else [])}
            elif bare.endswith(others):
                found |= {"opening"}
            else:
                found.add(f"other: {mine!r} for {other!r}")
    return found


def _replies(tokenizer: Any, ids: list[int], learned: list[Any]) -> list[tuple[str, str]]:
    """What stands before each learned part, and the part."""
    before, replies = "", []
    for flag, run in groupby(zip(ids, learned), key=lambda pair: bool(pair[1])):
        text = tokenizer.decode([token for token, _ in run])
        if flag:
            replies.append((before, text.strip()))
        before += text
    return replies


def _without(text: str, marks: tuple[str, ...]) -> str:
    while bare := next((text.removesuffix(mark) for mark in marks if text.endswith(mark)), ""):
        text = bare.rstrip()
    return "" if text in marks else text


def test_replies_are_those_of_trls_training_templates_but_for_differences_that_are_known(caplog):
    caplog.set_level(logging.ERROR, "transformers")
    names = [
        name for name in chat_templates.names() if (chat_templates.templates() / f"{name}_training.jinja").exists()
    ]
    assert len(names) >= 29
    found = {name: " ".join(sorted(differences(name))) for name in names}
    assert {name: what for name, what in found.items() if what} == THEIRS
