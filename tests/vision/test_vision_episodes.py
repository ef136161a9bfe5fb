"""Episodes whose prompts show images: what is drawn over turns is what is scored, and the world gets the images."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import vision_worlds
from turn_cases import Scripted, assert_rows_are_what_was_told, reply, rows_of
from vision_kinds import KINDS, kinds
from vision_runs import quiet_trainer
from vision_seen import Toy, image, prompts
from vision_toys import picture, shown

from lit_rl.algorithms import GRPO, PPO
from lit_rl.algorithms.rollouts import checkpoints
from lit_rl.core.episode import PolicyTurn
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Completions, PromptBatch, Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.visual_prompts import PromptVisuals
from lit_rl.environments import CustomEnvironment, FunctionTools
from lit_rl.environments.interaction import Interaction
from lit_rl.environments.observations import ImageReturned
from lit_rl.environments.template_checks import TemplateRewriteCheck
from lit_rl.generation.hf import HFGenerator
from lit_rl.generation.native import NativeGenerator
from lit_rl.models import LanguageModel
from lit_rl.models.forward import response_logprobs
from lit_rl.models.language_model import ForwardOptions
from lit_rl.rewards import environment

FILE = vision_worlds.__file__
TEXT = ("No picture at all?", [])
WINDOWS = ("gemma3", "paligemma")
"""Layers of their caches drop tokens."""
WHOLE = tuple(kind for kind in KINDS if kind not in WINDOWS)


def talk(toy: Toy, how: Any = None, *, group_size: int = 3, only: int | None = None, **sampling: Any) -> Completions:
    """Rows that are over after one to four turns, of prompts with one image, two and none."""
    made = prompts(toy, *([] if toy.kind == "paligemma" else [TEXT]))
    asked = toy.asked(made, group_size)
    if only is not None:
        asked = replace(asked, token_ids=[made[only][0]], keys=[asked.keys[only]], vision=[made[only][1]])
    responder = Scripted(reply, max_tokens=40)
    out = toy.drawn(replace(asked, responder=responder), how, **sampling)
    assert_rows_are_what_was_told(out, responder)
    return out


def scored(toy: Toy, rows: Completions, *, shared: bool = True) -> torch.Tensor:
    with torch.no_grad():
        found = response_logprobs(toy.policy, rows, Sampling(), ForwardOptions(shared_prompts=shared))
    return found.masked_fill(~rows.response_mask, 0.0)


@pytest.mark.parametrize("kind", kinds("idefics3", "qwen2_5_vl"))
@pytest.mark.parametrize("how", [NativeGenerator, HFGenerator])
def test_a_conversation_is_what_it_is_alone(toy_of: Any, kind: str, how: Any) -> None:
    toy = toy_of(kind)
    together = rows_of(talk(toy, how()))
    for number in range(4):
        assert rows_of(talk(toy, how(), only=number)) == together[3 * number : 3 * number + 3]


# ------------------------------------------------------------------ prompts that begin with more than the data say

TOLD = shown("<image>").replace(
    "{% for m in messages %}",
    "{% if tools %}TOOLS {{ tools[0]['function']['name'] }}{% endif %}{% for m in messages %}",
    1,
)
QUESTION = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}]


def asked(toy: Toy, pictured: Any, **columns: Any) -> PromptBatch:
    """One prompt with an image, as a data module gives it."""
    text = str(toy.model.tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True))
    shows, processor = PromptVisuals(text, (pictured,), "rows[5]"), toy.model.processor
    assert processor is not None
    ids, _ = processor.process(text, (pictured,), "rows[5]")
    given = {"image": [pictured], **{name: [value] for name, value in columns.items()}}
    return PromptBatch([QUESTION], [ids], given, [5], [0], vision=lambda rows: [shows.vision(processor, 5)])


def interaction(toy: Toy, env: Any, **more: Any) -> Interaction:
    model, how = toy.model, {"chat": True, "template_kwargs": {}, **more}
    return Interaction(env, model.tokenizer, eos_ids=model.eos_ids, processor=model.processor, **how)


def begun(toy: Toy, env: Any, batch: PromptBatch) -> Any:
    assert batch.vision is not None
    return interaction(toy, env).begin(batch, [3], max_new_tokens=60, seen=batch.vision(batch.rows))


LIMITS: dict[str, Any] = {"max_turns": 3, "max_tokens": 200, "max_observation_tokens": 40}


@pytest.mark.parametrize("kind", kinds("idefics3", "gemma3", "paligemma", "llava_next", "qwen2_5_vl", "internvl"))
@pytest.mark.parametrize("world", ["Begins", "Says"])
def test_a_prompt_that_begins_with_words_of_the_world_is_processed_again(toy_of: Any, kind: str, world: str) -> None:
    toy, pictured = toy_of(kind), image(3, 40, 24)
    env = CustomEnvironment(getattr(vision_worlds, world), **LIMITS)
    (opened,), conversations = begun(toy, env, asked(toy, pictured, answer="4"))
    conversations.close()
    said = [{**QUESTION[0], "content": [{"type": "image"}, {"type": "text", "text": "Which? Row 4?"}]}]
    if world == "Says":
        said = [*QUESTION, {"role": "user", "content": "and row 4"}]
    assert opened.prompt == said
    text = str(toy.model.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True))
    ids, seen = toy.model.processor.process(text, (pictured,), "prompt")
    assert opened.ids == ids and opened.seen.row == 5 and opened.seen.source.text == text
    for ours, theirs in ((opened.seen.inputs, seen.inputs), (opened.seen.per_token, seen.per_token)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_a_prompt_that_is_told_of_tools_keeps_its_images(toy_folder: Any) -> None:
    model = LanguageModel(str(toy_folder("idefics3")), chat_template=TOLD)
    toy, pictured = Toy("idefics3", model, None), image(3)
    env = CustomEnvironment(vision_worlds.Looks, parser="regex", **LIMITS)
    (opened,), conversations = begun(toy, env, asked(toy, pictured))
    with closing(conversations):
        plain = asked(toy, pictured).prompt_ids[0]
        told = toy.model.tokenizer.encode("TOOLS pixel", add_special_tokens=False)
        assert opened.ids == [*told, *plain]
        said = toy.model.tokenizer.encode("pixel(2, 3)", add_special_tokens=False)
        conversations.tell(PolicyTurn(0, 0, [*said, toy.model.eos_ids[0]], True))
        (heard,) = conversations.answers(wait=True)
        values = list(pictured.open().getpixel((2, 3)))
        assert f"<|start|>tool\n{values}<|end|>" in toy.model.tokenizer.decode(heard.token_ids)


def test_tools_of_the_data_stand_in_the_prompt_beside_its_images(toy_folder: Any) -> None:
    """`data.chat_template_kwargs`: the data render them, and no environment has to."""
    from lit_rl.data.encode import Encoder
    from lit_rl.data.prompt_reader import PromptOptions, read_prompts
    from lit_rl.data.sources import Rows

    model = LanguageModel(str(toy_folder("idefics3")), chat_template=TOLD)
    row = {"prompt": [{"role": "user", "content": "Which?"}], "image": picture(1)}
    tools = [{"type": "function", "function": {"name": "look"}}]
    found = []
    for kwargs in ({}, {"tools": tools}):
        encoder = Encoder(model.tokenizer, kwargs, processor=model.processor)
        ((example,), _) = read_prompts(Rows("rows", [row]), encoder, PromptOptions())
        found.append(example.prompt_ids)
    assert found[1] == [*model.tokenizer.encode("TOOLS look", add_special_tokens=False), *found[0]]


@pytest.mark.parametrize("word", ["<image>", "<|end|>"])
def test_control_tokens_that_a_world_spells(toy_of: Any, word: str) -> None:
    """As an answer they are text; a prompt with images cannot begin with them, and says so."""
    toy = toy_of("idefics3")

    class Spells(vision_worlds.Sizes):
        def reset(self, *, seed: int, image: Any = None, answer: str = "") -> str | None:
            super().reset(seed=seed, image=image)
            return answer

        def step(self, action: str) -> Any:
            return f"a {word} b", 0.0, False, False, {}

    env = CustomEnvironment(Spells, **LIMITS)
    (opened,), conversations = begun(toy, env, asked(toy, image(1), answer=""))
    with closing(conversations):
        conversations.tell(PolicyTurn(0, 0, [70, toy.model.eos_ids[0]], True))
        (heard,) = conversations.answers(wait=True)
        ids = toy.model.tokenizer.encode(word, add_special_tokens=False)
        assert heard.token_ids.count(ids[0]) == (word == "<|end|>"), "the end of its own message alone"
        assert word in toy.model.tokenizer.decode(heard.token_ids)
    (opened,), conversations = begun(toy, env, asked(toy, image(1), answer=f" {word}"))
    with closing(conversations):
        assert opened.ids == asked(toy, image(1)).prompt_ids[0]
        (episode,) = conversations.episodes()
        assert episode.failed and f"holds the text '{word}'" in str(episode.error)


def test_a_placeholder_that_is_no_special_token(toy_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = toy_of("idefics3")
    monkeypatch.setattr(type(toy.model.processor), "placeholders", (70,))
    with pytest.raises(ConfigError, match="plain text 'g' into the placeholder"):
        interaction(toy, CustomEnvironment(vision_worlds.Sizes, **LIMITS))


# ------------------------------------------------------------------ images that come from the world


@pytest.mark.parametrize("at", ["step", "reset", "tool"])
def test_arrays_of_pixels_are_refused(toy_of: Any, at: str, form: str = "array") -> None:
    toy, pictured = toy_of("idefics3"), image(1)
    if at == "tool":
        env = CustomEnvironment(vision_worlds.Shows, parser="regex", **LIMITS)
    else:
        env = CustomEnvironment(vision_worlds.Draws, **LIMITS)
    match = rf"{'show' if at == 'tool' else f'Draws.{at}'}\W* returned array.* as an image .*PIL.Image.fromarray"
    with pytest.raises(ImageReturned, match=match):
        _, conversations = begun(toy, env, asked(toy, pictured, form=form, at=at))
        with closing(conversations):
            said = toy.model.tokenizer.encode(f'show("{form}")', add_special_tokens=False)
            conversations.tell(PolicyTurn(0, 0, [*said, toy.model.eos_ids[0]], True))
            conversations.answers(wait=True)


def test_what_has_a_type_is_no_image() -> None:
    from lit_rl.environments.observations import as_text

    assert as_text(vision_worlds.Shows().files(), "files").startswith('[{"type": "image", "name"')


# ------------------------------------------------------------------ runs


def rows(count: int = 12) -> list[dict[str, Any]]:
    """Every fourth row has no image."""
    question = [{"role": "user", "content": "Which?"}]
    return [
        {"prompt": question, "answer": str(i), **({} if i % 4 == 3 else {"image": picture(i, 32 + i, 32)})}
        for i in range(count)
    ]


def data(**more: Any) -> RolloutDataModule:
    return RolloutDataModule(**{"rows": rows(), "prompts_per_rollout": 4, "val_fraction": 0.0} | more)


SHORT: dict[str, Any] = {"max_turns": 3, "max_tokens": 120, "max_observation_tokens": 40}


def grpo(folder: Any, world: Any = vision_worlds.Begins, **more: Any) -> GRPO:
    settings = {"group_size": 4, "beta": 0.1, "sampling": Sampling(max_new_tokens=5), "minibatches": 2} | more
    env = world if isinstance(world, CustomEnvironment | FunctionTools) else CustomEnvironment(world, **SHORT)
    model = folder if isinstance(folder, LanguageModel) else str(folder)
    return GRPO(model, environment, env=env, **settings)


def weights(module: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.policy.state_dict().items()}


class Watches(L.Callback):
    """Keeps what the steps were of."""

    def __init__(self) -> None:
        self.rollouts: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:  # pyright: ignore
        self.rollouts.append(module.rollout)
        assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in module.parameters())


def test_values_of_tokens_are_those_of_the_longer_prompt_after_a_resume(toy_of: Any) -> None:
    toy = toy_of("gemma3")
    made = prompts(toy)
    longer = [([*ids, 70, 71], vision and vision.continued(2)) for ids, vision in made]
    drawn = toy.drawn(toy.asked(longer))
    again = checkpoints.restore_pixels(
        checkpoints.completions_from_plain(checkpoints.to_plain(drawn), torch.device("cpu")), lambda row: made[row][1]
    )
    assert torch.equal(scored(toy, again), scored(toy, drawn))


@pytest.mark.parametrize("kind", kinds("idefics3", "llava", "qwen3_vl"))
@pytest.mark.parametrize("critic", [False, True], ids=["grpo", "ppo"])
def test_small_runs(toy_folder: Any, kind: str, critic: bool, tmp_path: Path) -> None:
    env = CustomEnvironment(vision_worlds.Sizes, **SHORT)
    module: Any = grpo(toy_folder(kind), env)
    if critic:
        module = PPO(str(toy_folder(kind)), environment, env=env, sampling=Sampling(max_new_tokens=5), minibatches=2)
    watches = Watches()
    quiet_trainer(tmp_path, 2, callbacks=[watches]).fit(module, datamodule=data())
    assert len(watches.rollouts) == 2
    assert all(bool(value.isfinite().all()) for value in module.state_dict().values() if value.is_floating_point())


@pytest.mark.parametrize("kind", kinds("gemma3", "idefics3"))
def test_a_run_with_generate_of_transformers(toy_folder: Any, kind: str, tmp_path: Path) -> None:
    module = grpo(toy_folder(kind), generator=HFGenerator())
    quiet_trainer(tmp_path, 2, callbacks=[Watches()]).fit(module, datamodule=data())


@pytest.mark.parametrize("name", ["Begins", "Looks"])
def test_workers_get_the_images(toy_of: Any, name: str) -> None:
    """They say what the same world says in this process."""
    toy, heard = toy_of("idefics3"), []
    for workers in (0, 1):
        more = {"parser": "regex"} if name == "Looks" else {}
        env = CustomEnvironment(f"{FILE}:{name}", workers=workers, **more, **LIMITS)
        (opened,), conversations = begun(toy, env, asked(toy, image(3, 40, 24), **({} if more else {"answer": "4"})))
        with closing(conversations):
            said = toy.model.tokenizer.encode("pixel(2, 3) b", add_special_tokens=False)
            conversations.tell(PolicyTurn(0, 0, [*said, toy.model.eos_ids[0]], True))
            (answer,) = conversations.answers(wait=True)
            heard.append((opened.ids, toy.model.tokenizer.decode(answer.token_ids)))
    assert heard[0] == heard[1]
    assert "40 wide" in heard[0][1] or "[" in heard[0][1]


def test_a_template_that_only_appends_rewrites_nothing(toy_of: Any) -> None:
    """Prompts are compared as the template wrote them: with one placeholder an image."""
    toy = toy_of("idefics3")
    batch, rewriting = asked(toy, image(3)), TemplateRewriteCheck(toy.model.tokenizer)
    _, conversations = begun(toy, CustomEnvironment(vision_worlds.Sizes, **LIMITS), batch)
    with closing(conversations):
        seen = batch.vision(batch.rows) if batch.vision else []
        prompt = replace(toy.asked([(batch.prompt_ids[0], seen[0])], 1), responder=conversations)
        letters = dict.fromkeys(toy.model.tokenizer.encode("dg", add_special_tokens=False), 100.0)  # four of them go on
        drawn = toy.drawn(prompt, max_new_tokens=4, logit_bias=letters)
        drawn = replace(drawn, episodes=conversations.episodes())
        assert drawn.episodes[0].turns > 1
        rewriting.check(drawn, conversations.chat_frames)
    assert rewriting.pop_metrics() == {"template/rewritten": (0, 1)}
