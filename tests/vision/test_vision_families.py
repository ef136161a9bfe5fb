"""What is special to a family of models over images, and that an export of each is read as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vision_kinds import KINDS, kinds
from vision_seen import SEEN, Toy, drawn

from lit_rl.core.rollout import Sampling
from lit_rl.models import LanguageModel
from lit_rl.models.forward import response_logprobs
from lit_rl.models.forward_inputs import counted_positions, prompt_positions, trunk_inputs
from lit_rl.models.hf_export import export_policy
from lit_rl.models.vision_parts import part_of

TEXT = ("No picture at all?", [])
TURNED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@pytest.mark.parametrize("kind", kinds(*TURNED))
def test_positions_of_three_axes_are_the_models_own(toy_of: Any, kind: str) -> None:
    """Of prompts and responses together, where the model finds them itself, and of prompts alone."""
    toy: Toy = toy_of(kind)
    rows = drawn(toy, TEXT)
    assert rows.vision is not None
    inputs = trunk_inputs(toy.policy, rows)
    told = {name: inputs[name] for name in ("input_ids", "attention_mask", "mm_token_type_ids", "image_grid_thw")}
    own, _ = toy.policy.model.get_rope_index(**told)
    there, p = rows.attention_mask, rows.prompt_ids.shape[1]
    assert inputs["position_ids"].shape == own.shape == (3, *there.shape)
    assert torch.equal(inputs["position_ids"][:, there], own[:, there])
    assert not torch.equal(own[0, there], own[2, there]), "nothing is turned by row and column"

    alone = prompt_positions(toy.policy, rows.prompt_ids, rows.prompt_mask, rows.vision.rows)
    assert torch.equal(alone[:, rows.prompt_mask], own[..., :p][:, rows.prompt_mask])


@pytest.mark.parametrize("kind", kinds(*TURNED))
def test_the_model_finds_the_same_without_positions(toy_of: Any, kind: str) -> None:
    """And not with those of one axis, which it takes without a word."""
    toy: Toy = toy_of(kind)
    rows = drawn(toy, TEXT)
    inputs = trunk_inputs(toy.policy, rows)

    def logits(positions: torch.Tensor | None) -> torch.Tensor:
        with torch.no_grad():
            found = toy.policy(**inputs | {"position_ids": positions}, use_cache=False).logits
        return found[rows.attention_mask]

    own = logits(None)
    torch.testing.assert_close(logits(inputs["position_ids"]), own, rtol=1e-4, atol=1e-4)
    assert float((logits(counted_positions(rows.attention_mask)) - own).abs().max()) > 0.1


@pytest.mark.parametrize("kind", kinds("qwen3_vl"))
def test_what_brings_early_features_to_the_text_is_a_projector_too(toy_of: Any, kind: str) -> None:
    policy = toy_of(kind).policy
    parts = {name: part_of(policy)(name) for name, _ in policy.named_parameters() if "merger" in name}
    assert any("deepstack" in name for name in parts) and set(parts.values()) == {"projector"}


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_read_as_it_was(toy_of: Any, kind: str, tmp_path: Path) -> None:
    """Weights, and the processor: the same tokens, pixels and log-probs."""
    toy: Toy = toy_of(kind)
    export_policy(toy.model, toy.policy.state_dict(), toy.policy, tmp_path / "hf", card="")
    again = LanguageModel(str(tmp_path / "hf"))
    read = Toy(kind, again, again.load().eval())
    assert again.processor is not None and toy.model.processor is not None
    assert again.processor.name == toy.model.processor.name
    for text, images in SEEN:
        (ids, vision), (wanted, seen) = read.prompt(text, images), toy.prompt(text, images)
        assert ids == wanted and vision is not None and seen is not None
        assert vision.inputs.keys() == seen.inputs.keys()
        assert all(torch.equal(value, seen.inputs[name]) for name, value in vision.inputs.items())
    rows = drawn(toy)
    with torch.no_grad():
        ours, theirs = (response_logprobs(each.policy, rows, Sampling()) for each in (toy, read))
    assert torch.equal(ours, theirs)
