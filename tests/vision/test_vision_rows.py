"""Rows that see: what is processed alone and joined is a processor's own batch, and no row feels another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from vision_seen import SEEN, Toy, drawn, image, prompts

from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Completions, Sampling, join_completions, select, trim
from lit_rl.core.vision_inputs import PromptVision, Vision
from lit_rl.generation.hf import HFGenerator
from lit_rl.models.forward import response_logprobs, score
from lit_rl.models.forward_inputs import trunk_inputs
from lit_rl.models.head import Targets, score_targets
from lit_rl.models.language_model import ForwardOptions
from lit_rl.ops.fused_head import Distribution

TOWERS = ("vision_tower", "vision_model", "visual")
APART = ForwardOptions(shared_prompts=False, rows_by_length=False)


def logprobs(toy: Toy, rows: Completions, options: ForwardOptions = APART) -> torch.Tensor:
    with torch.no_grad():
        found = response_logprobs(toy.policy, rows, Sampling(), options)
    return found.masked_fill(~rows.response_mask, 0.0)


def test_rows_that_are_joined_see_what_they_saw() -> None:
    a, b, c = (PromptVision({}, row=row) for row in range(3))
    first, second = Vision([a], torch.tensor([0, 0])), Vision([b, c], torch.tensor([1, 0, 1]))
    both = first.joined(second)
    assert [both.prompts[number] for number in both.index.tolist()] == [a, a, c, b, c]


def test_prompts_processed_alone_are_the_processors_own_batch(toy: Toy) -> None:
    """To the bit: what a processor makes of all of them together."""
    made = prompts(toy)
    processor: Any = toy.model.processor
    texts = []
    for text, images in SEEN:
        content = [{"type": "image"}] * len(images) + [{"type": "text", "text": text}]
        message = [{"role": "user", "content": content}]
        texts.append(toy.model.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
    pictures = [[each.open() for each in images] for _, images in SEEN]
    whole = dict(
        processor.processor(text=texts, images=pictures, padding=True, add_special_tokens=False, return_tensors="pt")
    )
    width = whole.pop("input_ids").shape[1]
    assert width == max(len(ids) for ids, _ in made)
    for name in ("attention_mask", "labels"):
        whole.pop(name, None)
    vision = Vision.of([seen for _, seen in made], 1)
    assert vision is not None
    ours = vision.model_inputs(width, 0, torch.device("cpu"))
    assert ours.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(ours[name], torch.as_tensor(value), rtol=0, atol=0)


def test_what_is_sampled_is_what_is_scored(toy: Toy) -> None:
    rows = drawn(toy)
    assert rows.vision is not None and len(rows.vision.prompts) == 3, "pixels are held once a prompt"
    torch.testing.assert_close(logprobs(toy, rows), rows.sampler_logprobs, rtol=1e-4, atol=2e-5)


def test_generate_of_transformers_draws_the_same(toy: Toy) -> None:
    text = [] if toy.kind == "paligemma" else [("No picture at all?", [])]
    asked = toy.asked(prompts(toy, *text))
    ours, theirs = (toy.drawn(asked, how) for how in (None, HFGenerator()))
    assert torch.equal(ours.response_ids, theirs.response_ids)
    torch.testing.assert_close(ours.sampler_logprobs, theirs.sampler_logprobs, rtol=1e-4, atol=2e-5)


def test_a_row_is_what_it_is_alone(toy: Toy) -> None:
    """In every order, in parts, beside others, and behind padding."""
    rows = drawn(toy)
    whole = logprobs(toy, rows)
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    torch.testing.assert_close(logprobs(toy, select(rows, order)), whole[order], rtol=1e-4, atol=2e-5)
    for row in range(len(rows)):
        alone = trim(select(rows, torch.tensor([row])))
        found = logprobs(toy, alone)
        torch.testing.assert_close(found, whole[row : row + 1, : found.shape[1]], rtol=1e-4, atol=2e-5)
    both = join_completions(select(rows, torch.tensor([1, 2])), select(rows, torch.tensor([5])))
    torch.testing.assert_close(logprobs(toy, both), whole[[1, 2, 5]], rtol=1e-4, atol=2e-5)


def test_another_image_changes_its_rows_and_no_others(toy: Toy) -> None:
    rows = drawn(toy)
    before = logprobs(toy, rows)
    assert rows.vision is not None
    ids, other = toy.prompt(SEEN[0][0], [image(77)])
    assert ids == prompts(toy)[0][0]
    seen = Vision((other, *rows.vision.prompts[1:]), rows.vision.index)
    after = logprobs(toy, replace(rows, vision=seen))
    moved = (after - before).abs().amax(1)
    assert float(moved[:2].min()) > 1e-3, "the picture does not matter"
    torch.testing.assert_close(after[2:], before[2:], rtol=1e-4, atol=2e-5)


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
    from lit_rl.models import LanguageModel, Lora
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

    from lit_rl.models import LanguageModel, Lora
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
