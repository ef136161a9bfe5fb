"""Texts of a config that look like references."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lit_rl.runs.instantiate import escape_interpolations, instantiate_plain

TEXTS = st.text(st.sampled_from("\\${}ab'\" :,.")) | st.text()


@given(TEXTS.filter(lambda text: text != "???"))  # OmegaConf's own word for a value that is missing
@example(r"\\\${oc.env:HOME}\\")
def test_whatever_a_text_holds_it_is_the_same_behind_hydra(text: str) -> None:
    tree = {"a": text, "b": [text, {"c": text}], "d": 3, "e": None}
    assert OmegaConf.to_container(OmegaConf.create(escape_interpolations(tree)), resolve=True) == tree
    assert instantiate_plain(tree) == tree and instantiate_plain([tree]) == [tree]
    made = instantiate_plain({"_target_": "builtins.dict", "inner": {"_target_": "builtins.dict", **tree}, **tree})
    assert made == {"inner": tree, **tree}
