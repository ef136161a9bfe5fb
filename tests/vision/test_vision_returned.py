"""Images that tools and environments return: seen where they stand, by who samples and by what scores."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
import vision_worlds
from PIL import Image
from test_vision_episodes import (
    LIMITS,
    Watches,
    asked,
    begun,
    data,
    grpo,
    interaction,
    scored,
    weights,
)
from test_vision_episodes import rows as question_rows
from turn_cases import Scripted
from vision_kinds import kinds
from vision_runs import quiet_trainer
from vision_seen import SEEN, Toy, image, prompts
from vision_toys import picture, shown

from lit_rl.algorithms import PPO
from lit_rl.callbacks import Samples
from lit_rl.callbacks.output_files import write_parquet
from lit_rl.core.episode import EnvironmentTurn, Message, PolicyTurn
from lit_rl.core.rollout import Completions, Sampling, select
from lit_rl.core.vision_inputs import Later, Vision
from lit_rl.data.row_visuals import image_of
from lit_rl.environments import CustomEnvironment
from lit_rl.environments.episode_replay import Journal
from lit_rl.environments.frames import ChatFrames
from lit_rl.environments.observations import IMAGE_LIMIT, ImageReturned, content_of, images_of_content, without_payload
from lit_rl.generation.hf import HFGenerator
from lit_rl.models import LanguageModel
from lit_rl.reports.transcripts import transcripts
from lit_rl.rewards import environment

SHAPES = [(32, 32), (40, 24), (24, 32), (32, 56)]
"""Of images that are returned: grids and tiles differ."""


def part(number: int) -> dict[str, Any]:
    return {"type": "image", "image": image(number, *SHAPES[number % 4])}


def answer(said: PolicyTurn) -> list[Message] | None:
    """Text, one image or two, or no more, by what was said; every fourth row sees none."""
    total = sum(said.token_ids) + said.turn
    if said.turn == 2 or total % 5 == 0:
        return None
    if said.row % 4 == 3 or total % 5 == 1:
        return [{"role": "user", "content": "no picture"}]
    content = [part(total % 7), {"type": "text", "text": f"and {total}"}]
    if total % 5 == 2:
        content = [{"type": "text", "text": "a <|end|> b"}, *content, part(total % 3)]
    return [{"role": "user", "content": content}]


class Shows(Scripted):
    """Answers by messages, which show images."""

    def __init__(self, frames: ChatFrames, eos_ids: Sequence[int], reply: Callable[[PolicyTurn], Any] = answer) -> None:
        super().__init__(lambda said: None, max_tokens=300)
        self._frames, self._eos_ids, self._messages = frames, eos_ids, reply
        self.messages: dict[int, list[list[Message]]] = {}

    def tell(self, said: PolicyTurn) -> None:
        self.told.setdefault(said.row, []).append(said)
        messages = self._messages(said)
        if messages is None:
            self._waiting.append(EnvironmentTurn(said.row, None))
            return
        self.messages.setdefault(said.row, []).append(messages)
        closed = said.token_ids[-1] in self._eos_ids
        if isinstance(messages[0]["content"], str):
            self._waiting.append(EnvironmentTurn(said.row, self._frames.encode(messages, closed=closed), 6))
        else:
            ids, seen = self._frames.encode_seen(messages, closed=closed)
            self._waiting.append(EnvironmentTurn(said.row, ids, 6, seen=seen))


def shows(toy: Toy, reply: Callable[[PolicyTurn], Any] = answer) -> Shows:
    model = toy.model
    frames = ChatFrames(model.tokenizer, eos_ids=model.eos_ids, kinds=("user",), processor=model.processor)
    return Shows(frames, model.eos_ids, reply)


def talk(toy: Toy, how: Any = None, *, group_size: int = 3, only: int | None = None, **sampling: Any) -> Completions:
    """Rows of prompts with one image, two and none, which are answered with images or without."""
    made = [prompts(toy, ("No picture at all?", []))[number] for number in (0, 1, 3)]
    wanted = toy.asked(made, group_size)
    if only is not None:
        wanted = replace(wanted, token_ids=[made[only][0]], keys=[wanted.keys[only]], vision=[made[only][1]])
    return toy.drawn(replace(wanted, responder=shows(toy)), how, **sampling)


def seen_rows(rows: Completions) -> list[int]:
    """How many images each row saw later."""
    assert rows.vision is not None
    return [len(of) for of in rows.vision.later_of_rows]


SEEING = kinds("idefics3", "llava", "llava_next", "qwen2_5_vl", "qwen3_vl", "internvl", "smolvlm")


@pytest.mark.parametrize("kind", (*SEEING, *kinds("gemma3")))
def test_rows_are_what_the_processor_makes_of_the_whole_conversation(toy_of: Any, kind: str) -> None:
    """The same tokens, and the same log-probs where the model reads all of it at once and finds positions itself."""
    toy = toy_of(kind)
    tokenizer, processor = toy.model.tokenizer, toy.model.processor
    letters = dict.fromkeys(tokenizer.encode("abcdefgh", add_special_tokens=False), 100.0)  # text stays as it is
    made = [prompts(toy, ("No picture at all?", []))[number] for number in (0, 3)]
    responder = shows(toy, lambda said: None if said.turn == 2 else told(said.row, said.turn))
    how = HFGenerator() if kind == "gemma3" else None
    rows = toy.drawn(replace(toy.asked(made, 2), responder=responder), how, max_new_tokens=3, logit_bias=letters)
    scores = scored(toy, rows)
    for row in range(len(rows)):
        said = [tokenizer.decode(each.token_ids) for each in responder.told[row]]
        asked = SEEN[0] if row < 2 else ("No picture at all?", [])
        shown, images = (
            [{"role": "user", "content": [*[{"type": "image"}] * len(asked[1]), text(asked[0])]}],
            [*asked[1]],
        )
        for turn, words in enumerate(said):
            shown.append({"role": "assistant", "content": [text(words)]})
            if turn < 2:
                (message,) = told(row, turn)
                images += images_of_content(message["content"])
                shown.append({**message, "content": without_payload(message["content"])})
        rendered = tokenizer.apply_chat_template(shown, tokenize=False)
        inputs = processor.processor(
            text=[rendered], images=[[each.open() for each in images]], add_special_tokens=False, return_tensors="pt"
        )
        ids, there = rows.response_ids[row], rows.attended[row]
        ours = [*rows.prompt_ids[row][rows.prompt_mask[row]].tolist(), *ids[there].tolist()]
        assert ours == inputs["input_ids"][0, : len(ours)].tolist()
        with torch.no_grad():
            logits = toy.policy(**inputs).logits[0, : len(ours) - 1]
        theirs = logits.log_softmax(-1)[torch.arange(len(ours) - 1), torch.tensor(ours[1:])][-int(there.sum()) :]
        sampled = rows.response_mask[row][there]
        torch.testing.assert_close(scores[row][there][sampled], theirs[sampled], rtol=1e-4, atol=2e-5)


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def told(row: int, turn: int) -> list[Message]:
    number = row + 2 * turn
    content = [text("here"), part(number), text("and"), part(number + 1)] if turn else [part(number), text("there")]
    return [{"role": "user", "content": content}]


def select_row(rows: Completions, row: int) -> Completions:
    return select(rows, torch.tensor([row]))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        *((kind, "reads texts with images both ways") for kind in kinds("paligemma")),
        *((kind, "gives one .* tokens alone and two") for kind in kinds("llava_onevision")),
    ],
)
def test_families_that_show_an_image_otherwise_in_a_conversation(toy_of: Any, kind: str, why: str) -> None:
    responder = shows(toy_of(kind))
    with pytest.raises(ImageReturned, match=why):
        responder.tell(PolicyTurn(0, 0, [73], False))


# ------------------------------------------------------------------ what the world gives


def looked(toy: Toy, form: str, **more: Any) -> tuple[EnvironmentTurn, Any]:
    """What the policy is told when its tool looks, and the episode so far."""
    env = CustomEnvironment(vision_worlds.Camera, parser="regex", **LIMITS)
    batch = asked(toy, image(1), answer="4")
    source = interaction(toy, env, **more)
    _, conversations = source.begin(batch, [3], max_new_tokens=60, seen=batch.vision(batch.rows))
    with closing(conversations):
        said = toy.model.tokenizer.encode(f'look("{form}")', add_special_tokens=False)
        conversations.tell(PolicyTurn(0, 0, [*said, toy.model.eos_ids[0]], True))
        (heard,) = conversations.answers(wait=True)
        return heard, conversations.episodes()[0]


@pytest.mark.parametrize("form", ["pil", "bytes", "parts", "spells"])
def test_a_tool_returns_an_image(toy_of: Any, form: str) -> None:
    toy = toy_of("idefics3")
    heard, episode = looked(toy, form)
    assert len(heard.seen) == 1 and heard.token_ids is not None
    placeholders = toy.model.processor.placeholders
    assert [token in placeholders for token in heard.token_ids].count(True) == 4, "one that is spelled is text"
    (seen,) = images_of_content(episode.messages[1]["content"])
    drawn = vision_worlds.painted(4) if form in ("pil", "parts") else Image.open(io.BytesIO(vision_worlds.encoded(4)))
    assert seen.open().tobytes() == drawn.tobytes(), "rewards find the very image"
    assert str(seen) in episode.transcript()
    text = f"<|start|>tool\n{'<image> <|end|>' if form == 'spells' else ''}<fake_token_around_image>"
    assert text in toy.model.tokenizer.decode(heard.token_ids)
    assert ("there<|end|>" in toy.model.tokenizer.decode(heard.token_ids)) == (form == "parts")


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ("broken", "the image bytes is no image that Pillow knows"),
        ("cut", "damaged"),
        ("large", r"has 204 x 32 pixels, data.max_image_pixels=3000"),
        ("many", "have 80 tokens, more than env.max_observation_tokens=40"),
    ],
)
def test_images_that_cannot_be_shown_fail_their_episode(toy_of: Any, form: str, why: str) -> None:
    heard, episode = looked(toy_of("idefics3"), form, max_image_pixels=3000)
    assert heard.token_ids is None and episode.end == "failed"
    assert re.search(why, str(episode.error)), episode.error


def test_a_path_is_never_opened(toy_of: Any) -> None:
    with pytest.raises(ImageReturned, match="Paths and addresses are not opened"):
        looked(toy_of("idefics3"), "path")


def test_a_template_that_shows_no_images_of_tools(toy_folder: Any) -> None:
    plain = "{% if p['type'] == 'image' %}"
    template = shown("<image>").replace(plain, "{% if p['type'] == 'image' and m['role'] == 'user' %}")
    template = template.replace("{{ p['text'] }}", "{{ p['text'] or '' }}")
    model = LanguageModel(str(toy_folder("idefics3")), chat_template=template)
    with pytest.raises(ImageReturned, match="shows 0 of the 1 of an answer"):
        looked(Toy("idefics3", model, None), "pil")


def test_a_policy_over_text_is_shown_none(toy_of: Any) -> None:
    token = IMAGE_LIMIT.set(None)
    with pytest.raises(ImageReturned, match="the policy is a language model over text"):
        content_of(picture(1), "The tool 'look'")
    IMAGE_LIMIT.reset(token)


@pytest.mark.parametrize("kind", ["video", "video_url"])
def test_a_video_is_not_read_as_words(kind: str) -> None:
    """By a policy that sees; to one over text, what a search found is words."""
    found: Any = {"type": kind, "url": "talk.mp4"}
    token = IMAGE_LIMIT.set(10**6)
    for given in (found, [image(1), {"type": kind, "video": [image(2)]}]):
        with pytest.raises(ImageReturned, match="The tool 'look' returned a video"):
            content_of(given, "The tool 'look'")
    IMAGE_LIMIT.reset(token)
    assert content_of(found, "The tool 'look'") == json.dumps(found)


@pytest.mark.parametrize("opens", ["image", "parts", "message"])
def test_an_environment_begins_with_an_image(toy_of: Any, opens: str) -> None:
    toy, pictured = toy_of("idefics3"), image(3, 40, 24)
    env = CustomEnvironment(vision_worlds.Paints, **LIMITS)
    (opened,), conversations = begun(toy, env, asked(toy, pictured, answer="4", opens=opens))
    conversations.close()
    given = image_of(vision_worlds.encoded(4) if opens == "parts" else vision_worlds.painted(4), "it")
    images = [{"type": "image"}, {"type": "text", "text": "Which? See:" if opens == "parts" else "Which?"}]
    said = [{"role": "user", "content": [*images, {"type": "image"}]}]
    if opens == "message":
        said = [{"role": "user", "content": images}, {"role": "user", "content": [{"type": "image"}]}]
    rendered = toy.model.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    ids, seen = toy.model.processor.process(rendered, (pictured, given), "prompt")
    if opens == "parts":  # neighbouring texts are two parts, and the same text
        assert opened.prompt[0]["content"][1:3] == [text("Which?"), text(" See:")]
    assert opened.ids == ids and all(torch.equal(opened.seen.inputs[name], seen.inputs[name]) for name in seen.inputs)
    assert opened.seen.source.visuals == (pictured, given)


def test_workers_and_the_journal_give_the_same_image(toy_of: Any, tmp_path: Path) -> None:
    toy, found = toy_of("idefics3"), []
    journals = [None, None, Journal(tmp_path, 0), Journal(tmp_path, 0)]
    for workers, journal in zip((0, 1, 0, 0), journals):
        env = CustomEnvironment(f"{vision_worlds.__file__}:Paints", workers=workers, **LIMITS)
        batch = asked(toy, image(1), answer="4", opens="parts")
        kept = None if journal is None else journal.request(0, batch)
        source = interaction(toy, env)
        opened, conversations = source.begin(batch, [3], max_new_tokens=60, seen=batch.vision(batch.rows), journal=kept)
        if len(found) == 3:  # what is written down is not asked for again
            source.factory.kinds["environment"].make = None  # type: ignore[method-assign]
        with closing(conversations):
            conversations.tell(PolicyTurn(0, 0, [70, toy.model.eos_ids[0]], True))
            (heard,) = conversations.answers(wait=True)
            found.append((opened[0].ids, opened[0].seen.inputs, heard.token_ids, heard.seen[0].seen.inputs))
    for other in found[1:]:
        assert (other[0], other[2]) == (found[0][0], found[0][2])
        for place in (1, 3):
            assert all(torch.equal(other[place][name], value) for name, value in found[0][place].items())


# ------------------------------------------------------------------ runs


def worldly(**more: Any) -> Any:
    """Rows with an image and without, of which some begin with one of the world."""
    opens = ("", "image", "message", "")
    return data(rows=[{**row, "opens": opens[i % 4]} for i, row in enumerate(question_rows())], **more)


def paints(folder: Any, **more: Any) -> Any:
    limits = {"max_turns": 3, "max_tokens": 160, "max_observation_tokens": 60}
    return grpo(folder, CustomEnvironment(vision_worlds.Paints, **limits), **more)


def test_micro_batches_and_heads_end_at_the_same_weights(toy_folder: Any, tmp_path: Path) -> None:
    ends = []
    for accumulate, fused in ((1, True), (2, True), (1, False)):
        module = paints(LanguageModel(str(toy_folder("idefics3")), speedups={"fused_head": fused}))
        trainer = quiet_trainer(tmp_path / str(len(ends)), 4, accumulate_grad_batches=accumulate)
        trainer.fit(module, datamodule=worldly())
        ends.append(weights(module))
    for other in ends[1:]:
        for name, value in ends[0].items():
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-5)


def test_a_critic_values_what_is_seen_later(toy_folder: Any, tmp_path: Path) -> None:
    env = CustomEnvironment(vision_worlds.Paints, max_turns=3, max_tokens=160, max_observation_tokens=60)
    module = PPO(str(toy_folder("idefics3")), environment, env=env, sampling=Sampling(max_new_tokens=5), minibatches=2)
    watches = Watches()
    quiet_trainer(tmp_path, 2, callbacks=[watches, Samples(print=0)]).fit(module, datamodule=worldly())
    drawn = next(rollout.completions for rollout in watches.rollouts if rollout.completions.vision.later)
    assert_in_records(watches.rollouts[0].completions, tmp_path)
    assert all(bool(value.isfinite().all()) for value in module.state_dict().values() if value.is_floating_point())
    shown = drawn.vision
    darker = Vision(shown.prompts, shown.index, [tuple(map(dark, of)) for of in shown.later])
    with torch.no_grad():
        usual, others = (module.values(replace(drawn, vision=vision)) for vision in (shown, darker))
    moved = (usual - others).abs().amax(1) > 1e-6
    assert moved.tolist() == [bool(of) for of in shown.later]


def test_a_validation_in_which_some_batches_show_nothing(tmp_path: Path) -> None:
    samples: Any = Samples(print=0)
    image = image_of(picture(1), "row")
    for more in ({}, {"returned_images": [[image], []]}, {}):
        samples.on_validation_batch_end(None, None, {"prompt": ["a", "b"], **more}, None, 0)
    write_parquet(samples._evaluated[0], tmp_path / "val.parquet")
    stored = pyarrow.parquet.read_table(tmp_path / "val.parquet").column("returned_images").to_pylist()
    assert [None if each is None else len(each) for each in stored] == [None, None, 1, 0, None, None]


def assert_in_records(drawn: Completions, folder: Path) -> None:
    """Each image that a row was answered with stands in its samples, and in the transcripts as a thumbnail."""
    assert drawn.vision is not None
    counts = [sum(len(each.seen.source.visuals) for each in of) for of in drawn.vision.later_of_rows]  # pyright: ignore
    samples = pyarrow.parquet.read_table(folder / "samples" / "step_00000000.parquet")
    stored = samples.column("returned_images").to_pylist()
    unread = [len(images) - count for images, count in zip(stored, counts, strict=True)]
    assert set(unread) <= {0, 1} and sum(counts) > 1, "of the answer to the last turn, which nobody reads"
    assert all(Image.open(io.BytesIO(image["bytes"])).size[0] > 1 for images in stored for image in images)
    transcripts(folder, files="step_00000000")
    page = (folder / "transcripts.html").read_text()
    assert page.count('<p class="pictures"><img') >= sum(map(bool, counts))


def dark(later: Later) -> Later:
    """The same image with half of its light."""
    inputs = {n: each * 0.5 if each.is_floating_point() else each for n, each in later.seen.inputs.items()}
    return replace(later, seen=replace(later.seen, inputs=inputs))
