"""Settings: those of an algorithm are a dataclass, those of every other class stand in its constructor."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import math
import pickle
import pkgutil
import re
import subprocess
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lit_rl
from lit_rl import algorithms
from lit_rl.core.declared_settings import Allowed, annotated_metadata, checked, declared, declared_by
from lit_rl.core.errors import ConfigError
from lit_rl.ops import ranges
from lit_rl.ops.ranges import AtLeastOne, Portion, Range
from lit_rl.settings import algorithms as settings
from lit_rl.settings.base import REQUIRED, Imported, Settings, field_owners, sentences, types_of

METHODS = {
    name: kind
    for name, kind in vars(algorithms).items()
    if inspect.isclass(kind) and hasattr(kind.__init__, "settings") and not inspect.isabstract(kind)
}
CONFIGS = {name: kind.__init__.settings for name, kind in METHODS.items()}


def test_every_method_has_settings_of_its_own_name_which_lit_rl_exports():
    assert len(METHODS) == 17
    for name, config in CONFIGS.items():
        assert getattr(lit_rl, f"{name}Config") is config


def test_settings_are_read_without_torch():
    """What is refused early cannot wait seconds for PyTorch."""
    script = (
        "import sys, lit_rl.settings.algorithms as s; s.GRPOConfig(group_size=4); "
        "print({'torch', 'lightning'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("name", METHODS)
def test_the_signature_is_the_dataclass(name):
    """Every setting is a keyword with its default, its type and its sentence; nothing is behind `**keywords`."""
    config, signature = CONFIGS[name], inspect.signature(METHODS[name])
    fields = {field.name: field for field in dataclasses.fields(config) if field.init}
    assert signature.parameters.keys() == fields.keys()
    for parameter in signature.parameters.values():
        default = fields[parameter.name].default
        default = default.load() if isinstance(default, Imported) else default
        if default is REQUIRED:
            assert parameter.default is parameter.empty
        else:
            assert parameter.default is default
    assert typing.get_type_hints(METHODS[name].__init__, include_extras=True) == types_of(config)
    assert [*sentences(config)] == [*field_owners(config)] == [*signature.parameters]
    assert all(f"    {setting}: " in METHODS[name].__init__.__doc__ for setting in fields)


def test_a_setting_stands_once():
    """No class repeats a field of its parent with the same default and the same sentence."""
    tree = ast.parse(Path(settings.__file__).read_text())
    for node in (each for each in tree.body if isinstance(each, ast.ClassDef)):
        config = getattr(settings, node.name)
        parents = [parent for parent in config.__mro__[1:] if dataclasses.is_dataclass(parent)]
        for name in vars(config).get("__annotations__", ()):
            for parent in parents:
                theirs = {field.name: field.default for field in dataclasses.fields(parent)}
                mine = next(field.default for field in dataclasses.fields(config) if field.name == name)
                if name in theirs and theirs[name] == mine:
                    assert sentences(parent).get(name) != sentences(config).get(name), (node.name, name)


def test_an_object_of_settings_is_the_same_as_its_keywords():
    reward = lit_rl.exact_match
    by_keyword = lit_rl.GRPO("tiny", reward, group_size=4, beta=0.1)
    config = lit_rl.GRPOConfig(group_size=4, beta=0.1)
    assert lit_rl.GRPO("tiny", reward, config=config)._arguments == by_keyword._arguments
    whole = dataclasses.replace(config, model="tiny", reward=reward)
    assert lit_rl.GRPO(config=whole)._arguments == by_keyword._arguments


def test_a_keyword_beside_an_object_wins():
    made = lit_rl.GRPO("tiny", lit_rl.exact_match, config=lit_rl.GRPOConfig(group_size=4, beta=0.1), group_size=2)
    assert (made.group_size, made.beta) == (2, 0.1)


@pytest.mark.parametrize("name", METHODS)
def test_a_number_out_of_range_is_refused_by_the_dataclass_and_by_the_constructor_alike(name):
    reward = {} if "reward" not in inspect.signature(METHODS[name]).parameters else {"reward": lit_rl.exact_match}
    needed = {"model": "tiny", **reward} | ({"teacher": "tiny"} if name == "GKD" else {})
    ranges = {setting: allowed.range for setting, allowed in declared_by(CONFIGS[name]).items() if allowed.range}
    for setting, allowed in ranges.items():
        below = allowed.low if allowed.open_low else allowed.low - 1
        below = int(below) if allowed.whole else below
        with pytest.raises(ConfigError, match=rf"algo\.{setting}={below} is out of range") as by_object:
            CONFIGS[name](**{setting: below})
        with pytest.raises(ConfigError) as by_keyword:
            METHODS[name](**needed, **{setting: below})
        assert str(by_object.value) == str(by_keyword.value)


def test_what_is_checked_is_what_the_types_say():
    """Reading the annotations without importing their types finds what importing them does."""
    for config in CONFIGS.values():
        found = {name: declared(hint) for name, hint in types_of(config).items()}
        assert declared_by(config) == {name: allowed for name, allowed in found.items() if allowed is not None}


def test_settings_travel():
    assert pickle.loads(pickle.dumps(lit_rl.GRPOConfig(group_size=4))) == lit_rl.GRPOConfig(group_size=4)


# ---------------------------------------------------------------------- constructors of everything else


@checked("env")
class Walk:
    """A class with settings of each kind."""

    def __init__(
        self,
        turns: AtLeastOne | None = 8,
        *,
        share: Portion = 0.5,
        seed: Literal["group", "row"] = "group",
        rows: AtLeastOne | Literal["auto"] = "auto",
    ) -> None:
        self.turns, self.share, self.seed, self.rows = turns, share, seed, rows


@checked("env")
@dataclasses.dataclass(frozen=True)
class Stroll:
    """The same as a dataclass."""

    turns: AtLeastOne | None = 8
    share: Portion = 0.5
    seed: Literal["group", "row"] = "group"
    rows: AtLeastOne | Literal["auto"] = "auto"


@pytest.mark.parametrize("kind", [Walk, Stroll])
@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"turns": 0}, r"env\.turns=0 is out of range: allowed is \[1, inf\]"),
        ({"turns": 1.5}, r"env\.turns is 1\.5, a float\. Write a whole number, such as turns=8"),
        ({"turns": True}, r"env\.turns is True, a bool"),
        ({"share": 1.1}, r"env\.share=1\.1 is out of range: allowed is \[0, 1\]"),
        ({"share": math.nan}, r"env\.share=nan is out of range"),
        ({"share": "half"}, r"env\.share='half' is no number"),
        ({"seed": "grup"}, r"env\.seed='grup' is unknown: allowed is group, row\. Did you mean 'group'\?"),
        ({"share": None}, r"env\.share=None is no number"),
        ({"seed": None}, r"env\.seed=None is unknown: allowed is group, row\."),
        ({"rows": "all"}, r"env\.rows='all' is unknown: allowed is a whole number, auto\."),
        ({"rows": 0}, r"env\.rows=0 is out of range"),
    ],
)
def test_a_constructor_refuses_what_its_annotations_do_not_allow(kind, settings, refusal):
    with pytest.raises(ConfigError, match=refusal):
        kind(**settings)


@pytest.mark.parametrize("kind", [Walk, Stroll])
@given(turns=st.one_of(st.none(), st.integers(1, 10**9), st.integers(1, 100).map(np.int64)), share=st.floats(0, 1))
def test_a_constructor_takes_what_its_annotations_allow(kind, turns, share):
    made = kind(turns, share=share, seed="row", rows=turns or "auto")
    assert (made.turns, made.share, made.seed, made.rows) == (turns, share, "row", turns or "auto")
    assert (kind().turns, kind().share, kind().seed) == (8, 0.5, "group")


def test_a_checked_constructor_keeps_its_signature_and_pythons_own_errors():
    assert str(inspect.signature(Walk)) == (
        "(turns: 'AtLeastOne | None' = 8, *, share: 'Portion' = 0.5, seed: \"Literal['group', 'row']\" = 'group', "
        "rows: \"AtLeastOne | Literal['auto']\" = 'auto') -> 'None'"
    )
    with pytest.raises(TypeError, match="unexpected keyword argument 'step'"):
        Walk(step=1)
    with pytest.raises(ConfigError, match=r"env\.turns=0"):
        dataclasses.replace(Stroll(), turns=0)
    assert pickle.loads(pickle.dumps(Stroll(2))) == Stroll(2)


PER_EPOCH = Portion | Sequence[Portion]


def test_one_number_or_one_for_each_epoch():
    allowed = declared(PER_EPOCH)
    for value in (0.5, [0.5], (0, 1, 0.2)):
        allowed.check("algo.mixture_coef", value)
    for value, refusal in (
        (1.5, r"algo\.mixture_coef=1\.5 is out of range: allowed is \[0, 1\]"),
        ([0.5, -0.1], r"algo\.mixture_coef=-0\.1 is out of range"),
        ([], r"algo\.mixture_coef=\[\] has no number"),
        ([None], r"algo\.mixture_coef=None is no number"),
        ("0.5, 1", r"algo\.mixture_coef='0\.5, 1' is no number"),
    ):
        with pytest.raises(ConfigError, match=refusal):
            allowed.check("algo.mixture_coef", value)


def test_a_bound_has_one_form():
    """`typing` keeps one object for equal annotations: the one that was made first."""
    whole, real = (repr(Allowed(Range(low, 2 * low + 1)).record) for low in (0, 0.0))
    assert whole == real == "{'low': 0.0, 'high': 1.0}"


def test_a_record_makes_what_it_was_made_of():
    kinds = (AtLeastOne, Portion | None, Literal["a", "b"], AtLeastOne | Literal["auto"] | None, PER_EPOCH | None)
    for annotation in kinds:
        allowed = declared(annotation)
        assert allowed is not None and Allowed.restore(allowed.record) == allowed


RANGES = {name for name, value in vars(ranges).items() if any(isinstance(n, Range) for n in annotated_metadata(value))}


def test_every_annotation_that_declares_something_is_checked():
    """A dataclass has a constructor of its own, so one that is not decorated would check nothing of its parent's; and
    an annotation with a name that cannot be resolved at run time would declare nothing."""
    for info in pkgutil.walk_packages(lit_rl.__path__, "lit_rl."):
        if info.name.startswith("lit_rl.generation.vllm.worker"):  # it needs vLLM
            continue
        module = importlib.import_module(info.name)
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == info.name and "__init__" in vars(kind):
                constructor: Any = kind.__init__
                if hasattr(constructor, "settings"):
                    continue
                texts = vars(kind).get("__annotations__", {}) if dataclasses.is_dataclass(kind) else {}
                texts = texts or inspect.unwrap(constructor).__annotations__
                named = {name for name, text in texts.items() if RANGES & {*re.findall(r"\w+", str(text))}}
                known = issubclass(kind, Settings) or hasattr(constructor, "key")
                assert named <= (declared_by(kind).keys() if known else set()), kind
