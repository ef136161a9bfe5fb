"""A chat template is a program: whichever it is, and whatever it is given, a rendering ends, and its text does."""

from __future__ import annotations

import ast
import copy
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import chat_templates
import pytest

from lit_rl.core import chat_template
from lit_rl.core.chat_template import apply_chat_template
from lit_rl.core.errors import ConfigError
from lit_rl.data.rendering import render, render_prompt
from lit_rl.models import LanguageModel

ASKED = [{"role": "user", "content": "1+1"}]
LOOPS = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "loops in loops": LOOPS,
    "a macro of itself": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a filter of filters": "{{ ([range(100000)] * 100000) | map('join') | list | length }}",
}
NUMBERS = {"a power": "{{ ((messages|length + 8) ** (9 ** 9)) > 1 }}", "digits": "{{ 1 | round(99999999, 'ceil') }}"}
"""One call of compiled code each: an alarm reaches them, and another thread does not."""


def tokenizer_of(template: str):
    tokenizer = copy.deepcopy(LanguageModel("tiny").tokenizer)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", (HOSTILE | NUMBERS).values(), ids=HOSTILE | NUMBERS)
def test_a_rendering_that_does_not_end_is_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "LIMIT", 0.2)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"(?s)still ran after 0.2 s.*model\.chat_template=FILE"):
        apply_chat_template(tokenizer_of(template), ASKED, tokenize=False)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE)
def test_in_another_thread_too_and_nothing_is_left_behind(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "LIMIT", 0.2)
    with ThreadPoolExecutor(1) as thread:
        with pytest.raises(ConfigError, match="still ran after"):
            thread.submit(apply_chat_template, tokenizer_of(template), ASKED, tokenize=False).result(timeout=60)
        assert thread.submit(sum, range(1_000_000)).result() == 499999500000


NO_SUCH_MEMORY = "{{ 'a' * 10 ** 15 }}"
"""More than a process can address, whatever the machine has."""


@pytest.mark.parametrize("rendered", [render_prompt, render], ids=["prompt", "conversation"])
def test_a_template_that_finds_no_memory_is_no_bad_row(rendered: Callable[..., object]) -> None:
    with pytest.raises(ConfigError, match=r"(?s)more memory than there is.*model\.chat_template=FILE"):
        rendered(tokenizer_of(NO_SUCH_MEMORY), ASKED, "row 0", {})


def test_a_text_out_of_all_proportion_is_refused_and_a_long_row_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "LONGEST", 10_000)
    with pytest.raises(ConfigError, match=r"made 10001 characters of one conversation of 1 messages.*FILE"):
        apply_chat_template(tokenizer_of("{{ 'a' * 10001 }}"), ASKED, tokenize=False)
    apply_chat_template(tokenizer_of("{{ 'a' * 10000 }}"), ASKED, tokenize=False)
    long_row = [{"role": "user", "content": "b" * 20_000}]
    assert len(apply_chat_template(tokenizer_of("{{ messages[0].content * 2 }}"), long_row, tokenize=False)) == 40_000


def test_rows_decide_and_the_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "LIMIT", 0.2)
    template = "{{ messages[0].content }}{% if 'now' in messages[0].content %}" + LOOPS + "{% endif %}"
    folder = tmp_path / "model"
    tokenizer_of(template).save_pretrained(folder)
    tokenizer = type(tokenizer_of("")).from_pretrained(folder)
    assert render_prompt(tokenizer, [{"role": "user", "content": "later"}], "row 0", {}) == "later"
    with pytest.raises(ConfigError, match=re.escape(f"The chat template of {folder / 'chat_template.jinja'} still")):
        render_prompt(tokenizer, [{"role": "user", "content": "now"}], "row 1", {})


@pytest.mark.parametrize("elsewhere", [False, True], ids=["main thread", "another thread"])
def test_what_templates_of_models_render_is_as_it_was(elsewhere: bool) -> None:
    """Those that TRL ships, by transformers' own call: those that read texts in parts alone are given a part."""
    part = [{"role": "user", "content": [{"type": "text", "text": ASKED[0]["content"]}]}]
    how = {"tokenize": False, "add_generation_prompt": True}
    with ThreadPoolExecutor(1) as thread:
        for name in chat_templates.names():
            tokenizer, _ = chat_templates.tokenizer_of(name)
            in_parts = name.startswith(("idefics3", "llava_next", "smolvlm"))
            wanted = tokenizer.apply_chat_template(part if in_parts else ASKED, **how)
            ask = (apply_chat_template, tokenizer, ASKED)
            assert (
                thread.submit(*ask, **how).result() if elsewhere else apply_chat_template(*ask[1:], **how)
            ) == wanted


def test_nobody_goes_another_way(root: Path) -> None:
    """What a model card tells others to type is no call of ours."""
    calls = {
        path.name
        for path in (root / "lit_rl").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "apply_chat_template"
    }
    assert calls == {"chat_template.py"}
