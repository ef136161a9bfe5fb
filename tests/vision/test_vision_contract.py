"""The contract of a family of models over images: laws that each family keeps, by what its rows see.

`SIGHTS` says what that is: images or videos of prompts, conversations behind images, images that are returned. A family
that is added to the toys has to keep all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_vision_episodes as turns
import test_vision_returned as returned
import torch
from peft import LoraConfig
from torch.nn import functional as F
from vision_kinds import KINDS, kinds
from vision_seen import SEEN, Toy, drawn, image, video

from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Completions, Sampling, join_completions, select, trim
from lit_rl.core.vision_inputs import PromptVision, Vision
from lit_rl.core.visuals import VideoRef, Visual
from lit_rl.generation.hf import HFGenerator
from lit_rl.generation.native import NativeGenerator
from lit_rl.models import LanguageModel
from lit_rl.models.forward import refuse_lookahead, response_logprobs, score
from lit_rl.models.forward_inputs import trunk_inputs
from lit_rl.models.head import Targets, score_targets
from lit_rl.models.hf_export import export_policy
from lit_rl.models.language_model import ForwardOptions
from lit_rl.models.vision_parts import part_of
from lit_rl.models.vision_processor import VIDEO_FAMILIES
from lit_rl.ops.fused_head import Distribution

TOWERS = ("vision_tower", "vision_model", "visual")
APART = ForwardOptions(shared_prompts=False, rows_by_length=False)
TEXT: tuple[str, list[Visual]] = ("No picture at all?", [])
STACKED = ("llava_onevision", "internvl", "smolvlm")
"""Their processors take videos of one prompt, or of one batch, that have equally many frames."""

close = partial(torch.testing.assert_close, rtol=1e-4, atol=2e-5)


def logprobs(toy: Toy, rows: Completions, options: ForwardOptions = APART) -> torch.Tensor:
    with torch.no_grad():
        found = response_logprobs(toy.policy, rows, Sampling(), options)
    return found.masked_fill(~rows.response_mask, 0.0)


def videos(kind: str) -> list[tuple[str, list[Visual]]]:
    """Videos alone, of as many lengths as the processor takes together."""
    other = 4 if kind in STACKED else 6
    return [("What?", [video(1)]), ("And then?", [video(2, other, 40, 24)]), ("So?", [video(3), video(4, 4, 24, 32)])]


def mixed(kind: str) -> list[tuple[str, list[Visual]]]:
    """Videos, images, both where the processor takes both, and nothing."""
    both: list[Visual] = [video(2)] if kind == "smolvlm" else [image(5, 24, 32), video(2), image(6)]
    last = video(4, 4 if kind == "llava_onevision" else 6)
    return [("What?", [video(1)]), TEXT, ("This?", [image(3)]), ("All?", both), ("Now?", [last])]


def of_prompts(toy: Toy, said: list[tuple[str, list[Visual]]], how: Any, group_size: int = 2) -> Completions:
    return toy.drawn(toy.asked([toy.prompt(*each, row) for row, each in enumerate(said)], group_size), how)


def images_and_none(kind: str) -> list[tuple[str, list[Visual]]]:
    return SEEN if kind == "paligemma" else [*SEEN, TEXT]


SIGHTS: dict[str, tuple[tuple[str, ...], Callable[[Toy, Any], Completions]]] = {
    "images": (KINDS, lambda toy, how: of_prompts(toy, images_and_none(toy.kind), how)),
    "videos": (kinds(*VIDEO_FAMILIES), lambda toy, how: of_prompts(toy, mixed(toy.kind), how)),
    "turns behind images": (KINDS, turns.talk),
    "returned images": ((*returned.SEEING, *kinds("gemma3")), returned.talk),
}
"""By what rows see: the families that can be shown it, and rows that a generator draws."""

CASES = [pytest.param(kind, sight, id=f"{kind}-{sight}") for sight, (seeing, _) in SIGHTS.items() for kind in seeing]


@pytest.mark.parametrize(("kind", "sight"), CASES)
def test_rows_are_drawn_and_scored_alike_together_and_alone(toy_of: Any, kind: str, sight: str) -> None:
    """By the decode loop with caches, in any batches, by `generate` of transformers, and by the pass that trains: in
    every order, joined, alone without padding, and where a prompt runs once for its group."""
    toy, draw = toy_of(kind), SIGHTS[sight][1]
    hows: list[Any] = [NativeGenerator(), NativeGenerator(batch_size=2), HFGenerator()]
    if kind in turns.WINDOWS and sight not in ("images", "videos"):
        with pytest.raises(ConfigError, match="cannot hold conversations with .*layers of its cache have a window"):
            draw(toy, hows[0])
        hows = [HFGenerator(), HFGenerator(batch_size=2)]
    rows, *others = (draw(toy, how) for how in hows)
    for other in others:
        assert torch.equal(other.response_ids, rows.response_ids)
        close(other.sampler_logprobs, rows.sampler_logprobs)
    assert rows.vision is not None
    if sight == "turns behind images":
        assert rows.attended is not None and rows.turn is not None
        assert bool((rows.attended & ~rows.response_mask).any()) and len(set(rows.turn.amax(1).tolist())) > 2
    if sight == "returned images":
        counts = returned.seen_rows(rows)
        assert 0 in counts and max(counts) > 1, "the case needs rows with and without images"
    whole = logprobs(toy, rows)
    close(whole, rows.sampler_logprobs)
    close(logprobs(toy, rows, ForwardOptions()), whole)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    close(logprobs(toy, select(rows, order)), whole[order])
    for row in range(len(rows)):
        alone = logprobs(toy, trim(select(rows, torch.tensor([row]))))
        close(alone, whole[row : row + 1, : alone.shape[1]])
    both = join_completions(select(rows, torch.tensor([1, 2])), select(rows, torch.tensor([5])))
    close(logprobs(toy, both), whole[[1, 2, 5]])


def processors_batch(toy: Toy, said: list[tuple[str, list[Visual]]]) -> dict[str, torch.Tensor]:
    """What transformers makes of prompts that show images alone, or videos alone, all together."""
    every = [each for _, visuals in said for each in visuals]
    told = [
        {"total_num_frames": len(each.frames), "frames_indices": list(range(len(each.frames))), "fps": each.fps}
        for each in every
        if isinstance(each, VideoRef)
    ]
    pixels = [[each.open() for each in visuals] for _, visuals in said]
    how = {"videos": pixels, "videos_kwargs": {"do_sample_frames": False, "video_metadata": told}}
    processor: Any = toy.model.processor
    whole = processor.processor(
        text=[toy.rendered(*each) for each in said],
        padding=True,
        add_special_tokens=False,
        return_tensors="pt",
        **(how if told else {"images": pixels}),
    )
    return {name: torch.as_tensor(value) for name, value in whole.items() if name != "labels"}


def transformers_says(toy: Toy, rows: Completions, said: list[tuple[str, list[Visual]]]) -> torch.Tensor:
    """Log-probs of responses by the model's own forward on the processor's batch; it finds positions by itself."""
    whole, t = processors_batch(toy, said), rows.response_ids.shape[1]
    whole["input_ids"] = torch.cat([whole["input_ids"], rows.response_ids], 1)
    whole["attention_mask"] = torch.cat([whole["attention_mask"], rows.response_mask.long()], 1)
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in whole:
            whole[name] = F.pad(whole[name], (0, t), value=int(toy.kind == "paligemma"))
    with torch.no_grad():
        logits = toy.policy(**whole, use_cache=False).logits
    theirs = logits[:, -t - 1 : -1].log_softmax(-1)
    return theirs.gather(2, rows.response_ids[..., None])[..., 0].masked_fill(~rows.response_mask, 0.0)


@pytest.mark.parametrize(("kind", "sight"), [case for case in CASES if case.values[1] in ("images", "videos")])
def test_prompts_processed_alone_are_the_processors_own_batch_and_say_what_transformers_says(
    toy_of: Any, kind: str, sight: str
) -> None:
    """Inputs to the bit. The model is told no positions by transformers."""
    toy, said = toy_of(kind), SEEN if sight == "images" else videos(kind)
    made, whole = [toy.prompt(*each) for each in said], processors_batch(toy_of(kind), said)
    ids, mask = whole.pop("input_ids"), whole.pop("attention_mask")
    vision = Vision.of([seen for _, seen in made], 1)
    assert vision is not None and [ids[i][mask[i].bool()].tolist() for i in range(3)] == [own for own, _ in made]
    ours = vision.model_inputs(ids.shape[1], 0, torch.device("cpu"))
    assert ours.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=0)
    rows = of_prompts(toy, said, None, group_size=1)
    close(logprobs(toy, rows), transformers_says(toy, rows, said))


@pytest.mark.parametrize(("kind", "sight"), [case for case in CASES if case.values[1] in ("images", "videos")])
def test_another_sight_changes_its_rows_and_no_others(toy_of: Any, kind: str, sight: str) -> None:
    toy = toy_of(kind)
    rows = SIGHTS[sight][1](toy, None)
    other: Visual = image(77)
    if sight == "videos":
        other = replace(video(1), frames=(*video(1).frames[:3], video(9).frames[0]))
    ids, moved = toy.prompt("What?", [other])
    assert rows.vision is not None and ids == rows.prompt_ids[0][rows.prompt_mask[0]].tolist()
    before = logprobs(toy, rows)
    after = logprobs(toy, replace(rows, vision=Vision((moved, *rows.vision.prompts[1:]), rows.vision.index)))
    assert float((after - before)[:2].abs().amax(1).min()) > 1e-3, "what is shown does not matter"
    close(after[2:], before[2:])


def test_rows_that_are_joined_see_what_they_saw() -> None:
    a, b, c = (PromptVision({}, row=row) for row in range(3))
    first, second = Vision([a], torch.tensor([0, 0])), Vision([b, c], torch.tensor([1, 0, 1]))
    both = first.joined(second)
    assert [both.prompts[number] for number in both.index.tolist()] == [a, a, c, b, c]


def test_no_token_feels_a_later_one(toy: Toy) -> None:
    """Where a model attends both ways among the tokens of an image, none of a response is taken for one."""
    rows = drawn(toy)
    last = rows.response_mask.sum(1) - 1
    every = torch.arange(len(rows))
    ids = rows.response_ids.clone()
    ids[every, last] = (ids[every, last] + 1) % 200
    before, after = logprobs(toy, rows), logprobs(toy, replace(rows, response_ids=ids))
    moved = (after - before).abs()
    assert float(moved[every, last].min()) > 1e-3
    moved[every, last] = 0
    assert float(moved.max()) < 2e-5
    refuse_lookahead(toy.policy, *toy.prompt("Which?", [image(1)]))


def test_rows_without_images_are_those_of_a_batch_without_images(toy: Toy) -> None:
    if toy.kind == "paligemma":
        pytest.skip("takes no prompt without an image")
    text = ("No picture at all?", [])
    mixed = drawn(toy, text)
    alone = toy.drawn(replace(toy.asked([toy.prompt(*text)]), keys=[10], vision=()))
    assert alone.vision is None
    last = trim(select(mixed, torch.tensor([6, 7])))
    assert torch.equal(last.response_ids, alone.response_ids[:, : last.response_ids.shape[1]])
    torch.testing.assert_close(logprobs(toy, last), logprobs(toy, alone), rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(logprobs(toy, mixed)[6:], logprobs(toy, alone), rtol=1e-4, atol=2e-5)


def test_prompts_that_are_run_once_give_the_same_numbers_and_gradients(toy: Toy) -> None:
    """The tower too runs once a prompt. In float64."""
    rows = drawn(toy, group_size=4)
    sizes: list[int] = []
    tower = next(part for name, part in toy.policy.named_modules() if name.endswith(TOWERS))
    policy = toy.policy.double()
    hook = tower.register_forward_pre_hook(lambda *given: sizes.append(pixels_in(*given)), with_kwargs=True)
    found = []
    try:
        for options in (APART, ForwardOptions(rows_by_length=False)):
            policy.zero_grad()
            cast = replace(rows, vision=_double(rows.vision))
            scores = score(policy, cast, Sampling(), options=options).logprobs[rows.response_mask]
            scores.sum().backward()
            gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
            found.append((scores.detach(), gradients))
    finally:
        hook.remove()
        toy.policy.zero_grad()
        toy.policy.float()
    apart, once = sizes
    assert apart == 4 * once
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-6)
    assert found[0][1].keys() == found[1][1].keys() and len(found[0][1]) > 5
    for name, part in found[0][1].items():
        torch.testing.assert_close(part, found[1][1][name], rtol=1e-4, atol=1e-5, msg=name)


def pixels_in(tower: Any, given: tuple[Any, ...], named: dict[str, Any]) -> int:
    return next(each.numel() for each in (*given, *named.values()) if each.is_floating_point())


def _double(vision: Vision | None) -> Vision:
    assert vision is not None
    made = [
        seen and replace(seen, inputs={k: v.double() if v.is_floating_point() else v for k, v in seen.inputs.items()})
        for seen in vision.prompts
    ]
    return Vision(made, vision.index)


def test_no_policy_says_a_placeholder(toy: Toy) -> None:
    """Its probability is 0 where it is drawn and where it is scored: with weights that would say nothing else."""
    processor: Any = toy.model.processor
    head = toy.policy.get_output_embeddings()
    rows = drawn(toy)
    number = torch.tensor(processor.placeholders)
    asked = Targets(number[0].expand_as(rows.response_ids), rows.response_mask, first=-rows.response_ids.shape[1] - 1)
    inputs = {**trunk_inputs(toy.policy, rows), "use_cache": False}
    for fused in (True, False):
        with torch.no_grad():
            found, _ = score_targets(toy.policy, asked, Distribution(entropy=True), fused=fused, **inputs)
        assert float(found.logprobs[rows.response_mask].max()) < -1e3
        assert found.entropy is not None and bool((found.entropy[rows.response_mask] > 0.1).all())
    bias = torch.zeros(head.out_features)
    bias[number] = 1e3
    head.bias = torch.nn.Parameter(bias)
    try:
        assert not torch.isin(drawn(toy).response_ids[rows.response_mask], number).any()
    finally:
        head.bias = None


def test_what_is_not_trained_and_what_adapters_leave_alone(toy: Toy, toy_folder: Any) -> None:
    from lit_rl.models import Lora
    from lit_rl.models.critics import AdapterCritic
    from lit_rl.models.vision_parts import part_of

    folder = str(toy_folder(toy.kind))

    def trained(**how: Any) -> set[str]:
        policy: Any = LanguageModel(folder, **how).load()
        base = policy.get_base_model() if "lora" in how else policy
        return {part_of(base)(name) for name, p in base.named_parameters() if p.requires_grad}

    assert trained() == {"text", "projector"}
    assert trained(freeze=[]) == {"text", "projector", "vision"}
    assert trained(freeze=["vision", "projector"]) == {"text"}
    assert trained(lora=Lora(r=2)) == {"text"}
    part, layers = part_of(toy.policy), dict[str, set[str]]()
    for name, module in toy.policy.named_modules():
        if isinstance(module, torch.nn.Linear):
            layers.setdefault(part(name), set()).add(name.rpartition(".")[2])
    if shared := sorted(layers["text"] & layers["vision"]):
        assert "vision" not in trained(lora=Lora(r=2, targets=shared))
        assert "vision" in trained(freeze=[], lora=Lora(r=2, targets=shared))
        pattern = rf".*\.({'|'.join(shared)})"
        assert "vision" not in trained(lora=Lora(r=2, targets=pattern))
        theirs = LoraConfig(r=2, target_modules=pattern, exclude_modules=r"(?i).*\.0\..*")
        assert trained(lora=theirs) == {"text"}
    alone = next(name for name in sorted(layers["vision"] - layers["text"] - layers.get("projector", set())))
    with pytest.raises(ConfigError, match=r"frozen parts alone \(.*model\.freeze=\['vision'\]"):
        trained(lora=Lora(r=2, targets=[alone]))
    with pytest.raises(ConfigError, match=r"names layers of frozen parts alone"):
        trained(lora=Lora(r=2, targets=rf".*\.{alone}"))
    # A number is the name of whole decoder layers too.
    every = rf".*\.({'|'.join(sorted(name for name in set().union(*layers.values()) if not name.isdigit()))})"
    critic: Any = AdapterCritic(r=2, targets=every).module(LanguageModel(folder, lora=Lora(r=2)).load())
    trunk = critic.trunk.get_base_model()
    part = part_of(trunk)
    assert {part(name) for name, each in trunk.named_parameters() if each.requires_grad} == {"text"}


def test_what_only_images_train_is_found_under_adapters_and_other_heads(toy: Toy, toy_folder: Any) -> None:
    from torch import nn

    from lit_rl.models import Lora
    from lit_rl.models.critics import SeparateCritic
    from lit_rl.models.vision_parts import modules_outside_text, trained_by_images

    model = LanguageModel(str(toy_folder(toy.kind)), freeze=[])
    policy = model.load()
    found = trained_by_images(policy)
    outside = [policy.get_submodule(name) for name in modules_outside_text(policy)]
    assert outside and all(any(layer.weight is each for each in found) for layer in outside)
    assert len(trained_by_images(SeparateCritic().module(policy))) == len(found)
    assert trained_by_images(nn.Linear(1, 1)) == []
    names = {name.rpartition(".")[2] for name in modules_outside_text(policy)}
    targets = sorted(name for name in names if not name.isdigit())  # "0" would be whole blocks too
    adapted = LanguageModel(str(toy_folder(toy.kind)), freeze=[], lora=Lora(r=2, targets=targets)).load()
    assert len(trained_by_images(adapted)) >= 2 * len(targets), "two matrices of an adapter"
    assert trained_by_images(LanguageModel(str(toy_folder(toy.kind)), lora=Lora(r=2)).load()) == []


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
