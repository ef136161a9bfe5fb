"""Texts of a config that look like references."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lit_rl.cli.build import build, escape_interpolations

TEXTS = st.text(st.sampled_from("\\${}ab'\" :,.")) | st.text()


@settings(max_examples=30)
@given(TEXTS.filter(lambda text: text != "???"))  # OmegaConf's own word for a value that is missing
@example(r"\\\${oc.env:HOME}\\")
def test_whatever_a_text_holds_it_is_the_same_behind_hydra(text: str) -> None:
    tree = {"a": text, "b": [text, {"c": text}], "d": 3, "e": None}
    assert OmegaConf.to_container(OmegaConf.create(escape_interpolations(tree)), resolve=True) == tree
    assert build(tree) == tree and build([tree]) == [tree]
    made = build({"_target_": "builtins.dict", "inner": {"_target_": "builtins.dict", **tree}, **tree})
    assert made == {"inner": tree, **tree}
