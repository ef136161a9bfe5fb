"""The memory plan of a policy that sees, against what autograd keeps and the most that tensors take."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from live_tensors import Live
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from vision_runs import quiet_trainer
from vision_seen import Toy, image
from vision_toys import of_idefics, picture, shown, text_of, tokenizer_of

from lit_rl.algorithms import DPO, GRPO
from lit_rl.algorithms.checks.memory import AuxiliaryTexts, Memory, MemoryPlan, Network, NumberSizes, RowLengths
from lit_rl.algorithms.checks.model_sizes import (
    LargestPrompt,
    critic_network,
    find_largest_prompt,
    model_shape,
    policy_network,
    with_images,
)
from lit_rl.core.examples import TokenBatch
from lit_rl.core.rollout import Completions, Sampling
from lit_rl.core.vision_inputs import Vision
from lit_rl.data.example_module import PreferenceDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Digits
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.critics import AdapterCritic, SeparateCritic
from lit_rl.models.forward import score, score_texts
from lit_rl.models.language_model import ForwardOptions
from lit_rl.runs.plan import prepare_plan
from lit_rl.runs.run_dir import RunDir
from lit_rl.runs.train import Run

PROMPTS, GROUP, RESPONSE, SIDE = 3, 4, 24, 112
SMALL = {"hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 512}
ALL = ("vision", "projector")
NUMBERS = NumberSizes.of("32-true", 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An Idefics3 large enough that a plan's terms can be told apart: 64 patches and 16 tokens an image."""
    tokenizer = tokenizer_of(["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"])
    edge = {"longest_edge": SIDE}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = hf.Idefics3Processor(images, tokenizer, image_seq_len=16, chat_template=shown("<image>"))
    of_text = text_of(tokenizer, model_type="llama", **SMALL | {"num_key_value_heads": 3})
    of_vision = {**SMALL, "image_size": SIDE, "patch_size": 14}
    config = hf.Idefics3Config(**of_idefics(tokenizer) | {"text_config": of_text, "vision_config": of_vision})
    place = tmp_path_factory.mktemp("larger")
    torch.manual_seed(0)
    hf.Idefics3ForConditionalGeneration(config).save_pretrained(place)
    processor.save_pretrained(place)
    return place


class Case:
    """A policy, a rollout of it and its plan."""

    def __init__(self, model: LanguageModel, *, shared: bool, images: int = 1, response: int = RESPONSE) -> None:
        self.policy, self.shared = model.load().train(), shared
        self.toy = Toy("larger", model, self.policy)
        self.prompts = [
            self.toy.prompt("Which one is it?", [image(i, 300, 200)] * images, row=i) for i in range(PROMPTS)
        ]
        ids, vision = self.prompts[0]
        assert model.processor is not None and vision is not None
        self.rows = rollout(self.prompts, response)
        shape = model_shape(model)
        assert shape is not None
        self.network = policy_network(model, shape, NUMBERS, "fused")
        lengths = RowLengths(len(ids), response, group=GROUP, shares=shared)
        tokens = sum(token in model.processor.placeholders for token in ids)

        def planned(network: Network, texts: AuxiliaryTexts | None = None) -> MemoryPlan:
            memory = Memory(network, NUMBERS, lengths, auxiliary=texts, decoding=lengths)
            shown = with_images(memory, model, *[LargestPrompt(vision, tokens)] * (1 if texts is None else 2))
            return shown.plan(len(self.rows), len(self.rows), steps_in_parts=True)

        self.planned, self.plan = planned, planned(self.network)

    def loss(self) -> torch.Tensor:
        return score(
            self.policy, self.rows, Sampling(), options=ForwardOptions(True, self.shared, False, False)
        ).logprobs.sum()

    def kept(self, run: Callable[[], Any] | None = None, *others: torch.nn.Module) -> int:
        """Bytes that a forward pass keeps for the backward pass, parameters left out: of the policy, or this one."""
        parameters = (parameter for module in (self.policy, *others) for parameter in module.parameters())
        known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        found: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if (address := tensor.untyped_storage().data_ptr()) not in known:
                found[address] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            (run or self.loss)()
        return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


def rollout(prompts: list[Any], response: int) -> Completions:
    """Completions of random tokens."""
    ids = torch.tensor([ids for ids, _ in prompts]).repeat_interleave(GROUP, 0)
    shape = (len(ids), response)
    return Completions(
        prompt_ids=ids,
        prompt_mask=torch.ones_like(ids, dtype=torch.bool),
        response_ids=torch.randint(0, 200, shape),
        response_mask=torch.ones(shape, dtype=torch.bool),
        sampler_logprobs=torch.zeros(shape),
        ended=torch.ones(len(ids), dtype=torch.bool),
        group_id=torch.arange(len(prompts)).repeat_interleave(GROUP),
        version=0,
        vision=Vision.of([vision for _, vision in prompts], GROUP),
    )


def of_steps(parts: Any) -> int:
    """What comes and goes: not what is held, and no holes of an allocator."""
    return sum(size for name, size in parts.items() if name not in ("weights", "gradients", "optimizer", "allocator"))


@pytest.mark.parametrize("shared", [True, False], ids=["a prompt a group", "a prompt a row"])
@pytest.mark.parametrize("freeze", [(), ("vision",), ALL], ids=["nothing", "vision", "both"])
def test_what_is_planned_is_what_autograd_keeps_and_tensors_take(folder: Path, freeze: Any, shared: bool) -> None:
    case = Case(LanguageModel(str(folder), freeze=freeze), shared=shared)
    learning = case.plan.learning
    planned = learning["activations"] + learning.get("activations of images", 0)
    assert planned == pytest.approx(case.kept(), rel=0.08)
    assert ("activations of images" in learning) == (freeze != ALL) and learning["pixels"]
    case.loss().backward()  # from here on there are gradients, which are planned apart
    gc.collect()
    with Live() as live:
        case.loss().backward()
    assert of_steps(learning) == pytest.approx(live.peak, rel=0.15)


@pytest.mark.parametrize(("freeze", "images"), [((), 1), (ALL, 1), (ALL, 8)])
def test_texts_that_show_images_are_planned_beside_the_rows(folder: Path, freeze: Any, images: int) -> None:
    """They show as much as the rows do, of one image or of several."""
    case = Case(LanguageModel(str(folder), freeze=freeze), shared=False, images=images, response=RESPONSE // images)
    count = len(case.prompts)
    ids = torch.cat([case.rows.prompt_ids, case.rows.response_ids], 1)[::GROUP]
    learned = torch.ones_like(ids, dtype=torch.bool)
    learned[:, : 1 - RESPONSE // images] = False
    vision = Vision.of([seen for _, seen in case.prompts], 1)
    texts = TokenBatch(ids, torch.ones_like(learned), learned, vision=vision)

    def loss() -> torch.Tensor:
        return (
            case.loss()
            + score_texts(case.policy, texts, options=ForwardOptions(True, False, False, False)).logprobs.sum()
        )

    learning = case.planned(case.network, AuxiliaryTexts(count, len(case.rows), ids.shape[1])).learning
    planned = learning["activations"] + learning.get("activations of images", 0)
    assert planned == pytest.approx(case.kept(loss), rel=0.08)
    loss().backward()  # from here on there are gradients, which are planned apart
    gc.collect()
    with Live() as live:
        loss().backward()
    # The pixels of both passes are planned together; those that no part keeps are gone when the second one runs.
    assert 0.85 * live.peak < of_steps(learning) < 1.4 * live.peak


def test_a_frozen_tower_works_before_the_text_runs(folder: Path) -> None:
    """Many images of few words: what one of its layers works with is more than a layer of the text."""
    case = Case(LanguageModel(str(folder)), shared=False, images=4, response=2)
    seen = Vision.of([vision for _, vision in case.prompts], 1)
    assert seen is not None
    with Live() as live, torch.no_grad():
        case.policy.get_image_features(**seen.inputs(torch.device("cpu")))
    generating = case.plan.generating
    assert generating["pixels"] + generating["working memory"] == pytest.approx(live.peak, rel=0.15)


@pytest.mark.parametrize(
    ("freeze", "lora"), [((), None), (None, None), (ALL, None), (None, Lora(r=2))], ids=["all", "tower", "both", "lora"]
)
def test_trained_parameters_are_those_of_the_model(folder: Path, freeze: Any, lora: Any) -> None:
    model = LanguageModel(str(folder), freeze=freeze, lora=lora)
    shape = model_shape(model)
    assert shape is not None
    trained = sum(each.numel() for each in model.load().parameters() if each.requires_grad)
    assert policy_network(model, shape, NumberSizes(), "fused").trained == trained


@pytest.mark.parametrize(
    ("critic", "freeze", "lora"),
    [
        (SeparateCritic(), (), None),
        (SeparateCritic(), (), Lora(r=2)),
        (AdapterCritic(r=2), None, Lora(r=2)),
    ],
    ids=["all", "beside adapters", "adapter"],
)
def test_a_critic_trains_and_keeps_what_is_planned(folder: Path, critic: Any, freeze: Any, lora: Any) -> None:
    model = LanguageModel(str(folder), freeze=freeze, lora=lora)
    case = Case(model, shared=False)
    module = critic.module(case.policy)
    network = critic_network(critic, case.network, NUMBERS, model)
    assert network is not None
    head = sum(each.numel() for each in module.head.parameters())
    assert network.trained == sum(each.numel() for each in critic.parameters(case.policy, module)) - head
    learning = case.planned(network).learning
    kept = case.kept(lambda: critic.values(case.policy, module, case.rows), module)
    assert learning["activations"] + learning.get("activations of images", 0) == pytest.approx(kept, rel=0.08)


def test_the_largest_prompt_is_the_one_of_most_images() -> None:
    model = LanguageModel("digits")
    assert model.processor is not None
    asked = [{"role": "user", "content": "Which?"}]
    rows = [{"prompt": asked, "images": [picture(j) for j in range(count)]} for count in (1, 3, 0, 2)]
    said = {"chosen": [{"role": "assistant", "content": "a"}], "rejected": [{"role": "assistant", "content": "b"}]}
    prompts = RolloutDataModule(rows=rows, val_fraction=0.0, prompts_per_rollout=2)
    pairs = PreferenceDataModule(rows=[{**row, **said} for row in rows], val_fraction=0.0, batch_size=2)
    prompts.prepare(model.tokenizer, processor=model.processor)
    pairs.prepare(model.tokenizer, processor=model.processor)
    for data in (prompts, pairs):
        found = find_largest_prompt(data, model.processor)
        assert found is not None and (found.tokens, found.vision.row) == (12, 1)
        assert found.vision.inputs["pixel_values"].numel() == 3 * 3 * 32 * 32
    words = RolloutDataModule(rows=[{"prompt": asked}] * 2, val_fraction=0.0, prompts_per_rollout=2)
    words.prepare(model.tokenizer, processor=model.processor)
    assert find_largest_prompt(words, model.processor) is None


@pytest.mark.parametrize("method", ["grpo", "dpo"])
def test_the_command_counts_images(method: str, tmp_path: Path) -> None:
    model = LanguageModel("digits", freeze=())
    if method == "grpo":
        module: Any = GRPO(model, lambda **_: [], group_size=4, sampling=Sampling(max_new_tokens=2))
        data: Any = RolloutDataModule(task=Digits(), prompts_per_rollout=8)
    else:
        said = {"chosen": [{"role": "assistant", "content": "7"}], "rejected": [{"role": "assistant", "content": "1"}]}
        rows = [{**row, **said} for row in Digits().val()[:32]]
        module, data = DPO(model), PreferenceDataModule(rows=rows, batch_size=8, val_fraction=0.0)
    run = Run(module, data, quiet_trainer(tmp_path, 1), RunDir(tmp_path), None, "", "")
    _, sizes, _ = prepare_plan(run)
    assert sizes is not None
    rows = 8 if method == "grpo" else 16  # a prompt a group; a text of a pair
    pixels = 32 * 32 * (3 * 4 + 8)  # and which of them are there
    assert sizes.learning["pixels"] == rows * pixels and sizes.learning["activations of images"] > rows * pixels
    assert ("pixels" in sizes.generating) == (method == "grpo")
