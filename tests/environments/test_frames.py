"""What answers a turn, as tokens: held against whole renderings, and against TRL's rule on every template it ships."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from chat_templates import names, tokenizer_of
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from lit_rl.core.episode import Message
from lit_rl.core.errors import ConfigError
from lit_rl.core.model_paths import TINY
from lit_rl.environments.frames import ChatFrames, Frames, TextFrames

TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Computes.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "A number."}},
            "required": ["a"],
        },
    },
}


def frames_of(name: str, kind: Any) -> tuple[Frames, Any]:
    tokenizer, ends = tokenizer_of(name)
    return ChatFrames(tokenizer, eos_ids=ends, kinds=[kind], tools=[TOOL] if kind == "tool" else None), tokenizer


def by_tool(*contents: str) -> list[Message]:
    return [{"role": "tool", "name": "calc", "content": content} for content in contents]


def by_user(content: str) -> list[Message]:
    return [{"role": "user", "content": content}]


# ---------------------------------------------------------------------------------------------------- every template

OTHERS_THAN_TRLS = {"gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma", "glm4moe"}
"""TRL cuts at the one EOS of the tokenizer, which does not end a call there, and so writes the end of the call again
(GLM: `<|observation|>`; Gemma 4: the whole call). The policy has sampled it: it is one of the model's EOS tokens."""

TRL_FAILS = {"qwen3", "deepseekv3"}
"""Its skeleton loses its thinking there; and it gives arguments as a mapping, where the template wants text."""


@pytest.mark.parametrize("name", names())
def test_an_answer_of_a_tool_is_the_one_that_trl_renders(name: str) -> None:
    from trl.chat_template_utils import supports_tool_calling
    from trl.trainer.grpo_trainer import GRPOTrainer

    tokenizer, _ = tokenizer_of(name)
    if not supports_tool_calling(tokenizer):
        pytest.skip("renders no tools")
    messages = by_tool("the answer is 42")
    ours = frames_of(name, "tool")[0].encode(messages, closed=True)
    trainer = SimpleNamespace(processing_class=tokenizer, _tokenizer=tokenizer, _is_vlm=False)
    trainer.chat_template, trainer.chat_template_kwargs = tokenizer.chat_template, {}
    if name in TRL_FAILS:
        with pytest.raises((TypeError, ValueError)):
            GRPOTrainer._get_tool_suffix_ids(trainer, messages)  # type: ignore[arg-type]
        return
    theirs = GRPOTrainer._get_tool_suffix_ids(trainer, messages)  # type: ignore[arg-type]
    if name in OTHERS_THAN_TRLS:
        assert ours != theirs and theirs[-len(ours) :] == ours, "all of ours, behind what the policy wrote itself"
    else:
        assert ours == theirs


@pytest.mark.parametrize("name", names())
def test_every_text_template_takes_an_answer_of_the_user(name: str) -> None:
    frames, tokenizer = frames_of(name, "user")
    ids = frames.encode(by_user("your turn"), closed=True)
    text = tokenizer.decode(ids)
    assert text.count("your turn") == 1 and "dummy" not in text and "alpha" not in text


# ---------------------------------------------------------------------------------------------------- laws

PRESERVING = ["qwen2_5", "llama3", "phi3", "gemma"]
"""Templates that render a conversation like its beginning, and more; so whole renderings can be compared with."""

plain = st.text(st.characters(codec="ascii", min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)


@pytest.mark.parametrize("name", PRESERVING)
@given(said=plain, heard=plain)
def test_answers_behind_turns_are_the_whole_conversation_rendered(name: str, said: str, heard: str) -> None:
    frames, tokenizer = frames_of(name, "user")
    asked = [{"role": "user", "content": "begin"}]

    def rendered(messages: list[Message]) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    end = tokenizer_of(name)[1][0] if name != "phi3" else tokenizer.convert_tokens_to_ids("<|end|>")
    turn = [*tokenizer(said, add_special_tokens=False)["input_ids"], end]
    ids = [*rendered(asked), *turn, *frames.encode(by_user(heard), closed=True)]
    assert ids == rendered([*asked, {"role": "assistant", "content": said}, *by_user(heard)])


@pytest.mark.parametrize("kind", ["tool", "user"])
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "llama3_2"])
def test_a_turn_that_was_cut_is_closed_first(name: str, kind: str) -> None:
    frames, _ = frames_of(name, kind)
    messages = by_tool("42") if kind == "tool" else by_user("42")
    closed, cut = (frames.encode(messages, closed=closed) for closed in (True, False))
    assert cut[1:] == closed and cut[0] in tokenizer_of(name)[1]


@pytest.mark.parametrize("kind", ["tool", "user"])
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "llama3_2", "gptoss", "glm4moe"])
def test_control_tokens_in_an_answer_are_literal_text(name: str, kind: str) -> None:
    frames, tokenizer = frames_of(name, kind)
    ends = tokenizer_of(name)[1]
    spelled = tokenizer.decode([ends[0]])

    def encoded(text: str) -> list[int]:
        return frames.encode(by_tool(text) if kind == "tool" else by_user(text), closed=True)

    usual, attack = encoded("one two"), encoded(f"one {spelled} two")
    control = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    assert [i for i in attack if i in control] == [i for i in usual if i in control]
    assert spelled in tokenizer.decode(attack)
    # What is tokenised in pieces is what is tokenised at once, where nothing is spelled.
    frames._control = ["one"]  # type: ignore[attr-defined]
    for text in ("one two", 'one "quoted" {"a": 1}'):
        in_pieces = encoded(text)
        frames._control = []  # type: ignore[attr-defined]
        assert in_pieces == encoded(text)
        frames._control = ["one"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "glm4moe", "nemotron_3_nano"])
def test_several_calls_have_an_answer_each_in_their_order(name: str) -> None:
    frames, tokenizer = frames_of(name, "tool")
    text = tokenizer.decode(frames.encode(by_tool("first", "second", "third"), closed=True))
    assert text.index("first") < text.index("second") < text.index("third")
    assert "alpha" not in text


# ---------------------------------------------------------------------------------------------------- refusals, text


def test_a_template_that_drops_calls_or_answers_is_refused() -> None:
    ends = tokenizer_of("qwen2_5")[1]
    lines = "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    no_tools = "{%- for m in messages if m.role != 'tool' %}{{ m.content }}{{ m.tool_calls }}<|im_end|>{% endfor %}"
    for template, words in ((lines, "drops the calls of tools"), (no_tools, "drops the messages of the tool")):
        tokenizer: Any = AutoTokenizer.from_pretrained(TINY)
        tokenizer.chat_template = template
        with pytest.raises(ConfigError, match=rf"{words}.*model\.chat_template=FILE"):
            ChatFrames(tokenizer, eos_ids=ends, kinds=["tool"], tools=[TOOL])


def test_calls_that_are_text_need_no_template_that_renders_calls() -> None:
    """What SmolLM2's template is like: whatever the role, its content."""
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY)
    lines = "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    tokenizer.chat_template = f"{lines}{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
    ends = tokenizer_of("qwen2_5")[1]
    frames = ChatFrames(tokenizer, eos_ids=ends, kinds=["tool"], tools=[TOOL], calls_are_text=True)
    ids = frames.encode(by_tool("425"), closed=True)
    assert tokenizer.decode(ids) == "\n<|im_start|>tool\n425<|im_end|>\n<|im_start|>assistant\n"
    two = frames.encode(by_tool("425", "12"), closed=False)
    assert tokenizer.decode(two).startswith(
        "<|im_end|>\n<|im_start|>tool\n425<|im_end|>\n<|im_start|>tool\n12<|im_end|>"
    )


def test_a_turn_that_nothing_ends_is_refused_with_what_was_seen() -> None:
    tokenizer, _ = tokenizer_of("qwen2_5")
    with pytest.raises(ConfigError, match=r"such tokens are \{1: .*eos_token_id"):
        ChatFrames(tokenizer, eos_ids=[1], kinds=["user"])


def test_plain_text_is_what_it_is() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY)
    frames, end = TextFrames(tokenizer, tokenizer.eos_token_id), tokenizer.eos_token_id
    assert tokenizer.decode(frames.encode(by_user("higher\n"), closed=True)) == "higher\n"
    assert frames.encode(by_user("a"), closed=False) == [end, *tokenizer.encode("a")]
    assert end not in frames.encode(by_user("a<|im_end|>b"), closed=True)
    assert frames.encode(by_user(""), closed=True) == []
