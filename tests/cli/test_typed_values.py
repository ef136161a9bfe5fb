"""Values as people type them: a text that Hydra's grammar cannot read is that text, and what it refuses is typeable."""

from __future__ import annotations

import re
import shlex
import sys

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal import hydra as internals
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lit_rl.cli.aliases import expand_aliases as words_of
from lit_rl.cli.hydra_start import Composer, load_checked
from lit_rl.cli.typed_words import ambiguous, readable, typed, unquoted, with_line_breaks
from lit_rl.core import upstream
from lit_rl.core.errors import ConfigError

TEXTS = [
    "lr=1.jsonl",
    "runs/x/epoch=1-step=2.ckpt",
    "<|im_end|>",
    "Be brief {please}",
    "Answer (briefly)",
    "don't stop",
    "f(y)",
    "50 % & more; #1!",
    "größer",
    "\\boxed{} ends with a backslash \\",
    'say "yes"',
    "()",
    "==",
]


def read(word: str) -> object:
    value = OverridesParser.create().parse_override(word).value()
    return value


@pytest.mark.parametrize("text", TEXTS)
def test_a_plain_text_is_itself(text):
    assert read(readable(f"data.system_prompt={text}")) == text
    assert readable(again := readable(f"+a.b={text}")) == again  # a rank is started with the words as they were read


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12))
def test_what_is_typed_as_advised_is_the_text(text):
    """Through a shell and Hydra's grammar, whatever the characters; numbers and words of YAML keep their type."""
    (word,) = shlex.split(typed("key", text))
    assert (
        str(read(readable(word))).strip()
        == str(read("key=" + text) if re.fullmatch(r"[\w. +-]+", text, re.A) else text).strip()
    )


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("sampling.stop=[<|im_end|>,a=b]", ["<|im_end|>", "a=b"]),
        ("data.sources=[{path: a.jsonl}]", [{"path": "a.jsonl"}]),
        ("optimizer.lr=1e-4", 1e-4),
        ("a=[1,2]", [1, 2]),
        ("a='x y'", "x y"),
        ("a=null", None),
        ("a=${b}", "${b}"),
    ],
)
def test_structures_keep_their_meaning(word, value):
    assert read(readable(word)) == value


@pytest.mark.parametrize(
    ("word", "advice"),
    [("a=[x", "a=[x"), ("a={x}", "a={x}"), ("a='it''s'", "a=it''s"), ('a="x', "a=x"), ("a=range(b)", "a=range(b)")],
)
def test_what_is_refused_says_how_to_type_the_text(word, advice):
    with pytest.raises(ConfigError) as refusal:
        readable(word)
    (said,) = re.findall(r"Type ('.+?'|\S+) for the text", str(refusal.value).replace("'\"'\"'", "\0"))
    (again,) = shlex.split(said.replace("\0", "'\"'\"'"))
    assert read(readable(again)) == advice.partition("=")[2]


def test_a_comma_without_a_sweep_and_with_one():
    said = str(ambiguous("data.system_prompt=Be brief, please"))
    (text,) = shlex.split(re.search(r"Type (.+) for one text", said)[1])
    assert read(text) == "Be brief, please"
    swept = readable("a=<x>,<y>", sweeps=True)
    assert [each.text for each in OverridesParser.create().parse_override(swept).value().list] == ["<x>", "<y>"]


@pytest.mark.parametrize(
    ("typed_word", "value"),
    [
        (r'a="one\ntwo"', "one\ntwo"),
        (r"""a=['\n\n',"don't\n"]""", ["\n\n", "don't\n"]),
        (r"a=[\n,\n\n]", ["\n", "\n\n"]),
        (r"a=\n", "\n"),
        (r"a='\\n'", r"\n"),
        (r"a='\text \t'", "\\text \t"),
        (r"a=C:\new", r"C:\new"),
        (r"sampling.structured.grammar='root ::= x\n'", r"root ::= x\n"),
    ],
)
def test_a_line_break(typed_word, value):
    assert read(with_line_breaks([typed_word])[0]) == value


def test_null_is_the_choice_that_stands_for_nothing():
    assert words_of(["env=null", "algo/groups=null", "logger=null"])[0] == [
        "env=none",
        "algo/groups=all",
        "logger=none",
    ]
    assert words_of(["experiment=null", "seed=1"]) == (["seed=1"], [])


def test_a_reward_file_with_a_space_or_an_equals_sign():
    for word in ('reward="./my r.py:f"', "reward=./my r.py:f", "reward=./a=b.py:f"):
        choice, fn = words_of([word])[0]
        assert choice == "reward=function" and read(fn) == unquoted(word.partition("=")[2])
    with pytest.raises(ConfigError, match=r"For a function of your own, type reward=\./r\.py:NAME"):
        words_of(["reward=./r.py"])


def test_hydra_run_dir_is_where_a_run_writes():
    assert words_of(["hydra.run.dir=X"])[0] == ["run_dir=X"]


@pytest.mark.parametrize(("word", "text"), [(r'text="a\\nb"', r"a\nb"), (r'text="a\nb"', "a\nb"), (r"text=\n", "\n")])
def test_a_word_that_is_composed_twice_means_the_same(word, text, tmp_path, monkeypatch):
    """As where a group is chosen by the columns of a file, and in the jobs of a sweep."""
    (tmp_path / "config.yaml").write_text("text: a\n")
    monkeypatch.setattr(internals, "ConfigLoaderImpl", internals.ConfigLoaderImpl)  # put back after the test
    upstream.compose_with(load_checked)
    with initialize_config_dir(str(tmp_path), version_base=None):
        first = compose("config", [word], return_hydra_config=True)
        again = compose("config", list(first.hydra.overrides.task))
    assert (first.text, again.text) == (text, text)


@pytest.mark.parametrize(
    ("words", "flags", "times"),
    [
        (["text=b"], [], 1),
        (["text=[b,c]"], [], 2),  # it has a comma, so it may be a sweep
        (["text=b", "hydra.job.chdir=false"], [], 2),
        (["text=b"], ["-m"], 2),
    ],
)
def test_a_command_that_is_no_sweep_is_composed_once(words, flags, times, tmp_path, monkeypatch):
    """The config is the one of Hydra, which composes twice: to find out whether it is a sweep, and for the run."""
    (tmp_path / "config.yaml").write_text("text: a\n")
    counted: list[dict[str, object]] = []

    def counting(self, *arguments, **named):
        counted.append(named)
        return load(self, *arguments, **named)

    def of_run(more):
        with initialize_config_dir(str(tmp_path), version_base=None):
            whole = GlobalHydra.instance().hydra
            assert whole is not None
            mode = whole.get_mode("config", words)
            config = whole.compose_config("config", [*words, *more], run_mode=RunMode.RUN)
        return mode, OmegaConf.to_container(config)

    monkeypatch.setattr(sys, "argv", ["lit-rl", *words, *flags])
    monkeypatch.setattr(internals, "ConfigLoaderImpl", ConfigLoaderImpl)  # earlier commands of this process put theirs
    mode, expected = of_run(["hydra.mode=RUN"])
    load = ConfigLoaderImpl.load_configuration
    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", counting)
    upstream.compose_with(Composer().load)
    once, config = of_run([] if times == 1 else ["hydra.mode=RUN"])
    assert (mode, once) == (None, RunMode.RUN if times == 1 else None)
    assert config == expected
    assert len(counted) == times


def test_an_unforeseen_sweep_is_refused_as_before(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("text: a\n")
    monkeypatch.setattr(internals, "ConfigLoaderImpl", internals.ConfigLoaderImpl)
    upstream.compose_with(Composer().load)
    with initialize_config_dir(str(tmp_path), version_base=None):
        whole = GlobalHydra.instance().hydra
        assert whole is not None and whole.get_mode("config", ["text=b,c"]) is None
        with pytest.raises(ConfigCompositionException, match="Ambiguous value"):
            whole.compose_config("config", ["text=b,c"], run_mode=RunMode.RUN)
