"""Prompts with images as vLLM is asked them, and what it answers: no vLLM is needed."""

from __future__ import annotations

import base64
import io
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image
from standin_server import answers, standing_in
from vision_seen import image

from lit_rl.core.errors import GenerationError, NumericError
from lit_rl.core.http_client import HTTP_LOOP
from lit_rl.core.rollout import Prompts, Sampling
from lit_rl.core.vision_inputs import PromptVision
from lit_rl.data.visual_prompts import PromptVisuals
from lit_rl.generation.vllm.client import Client
from lit_rl.generation.vllm.engine import EngineAnswer, check_prompt_tokens, completions_of, requests_of, turn_request
from lit_rl.generation.vllm.engine_settings import model_arguments, write_model_files
from lit_rl.generation.vllm.in_process import prompt_input
from lit_rl.generation.vllm.server_engine import ServerTask, ask_server
from lit_rl.generation.vllm.weight_probe import image_probe
from lit_rl.generation.vllm.worker import rule_out
from lit_rl.models import LanguageModel

SEEN = PromptVision({}, row=4, source=PromptVisuals("ab<image>", (image(1, 24, 40),), "rows[4]"))
PROMPTS = Prompts(
    [[1, 2, 9, 9], [3]], [5, 6], 2, (0,), 0, encode=lambda text: [*text.encode()][:3], vision=[SEEN, None]
)
SAMPLING = Sampling(max_new_tokens=4)


def test_placeholders_are_for_vllm_to_expand() -> None:
    seen, blind = requests_of(PROMPTS, SAMPLING)
    assert seen.token_ids == [1, 2, 9, 9] and blind.pictured is None
    assert seen.pictured is not None and seen.pictured.token_ids == [97, 98, 60] and seen.pictured.row == 4
    asked = prompt_input(seen)
    (picture,) = asked["multi_modal_data"]["image"]
    assert asked["prompt_token_ids"] == [97, 98, 60] and (picture.mode, picture.size) == ("RGB", (24, 40))
    assert prompt_input(blind) == {"prompt_token_ids": [3]}
    later = turn_request(PROMPTS, SAMPLING, 1, 1, [7, 8], 3)
    assert later.token_ids == [1, 2, 9, 9, 7, 8]
    assert later.pictured is not None and later.pictured.token_ids == [97, 98, 60, 7, 8]


def test_pixels_of_nobody_knows_what() -> None:
    for lacking in (replace(PROMPTS, encode=None), replace(PROMPTS, vision=[replace(SEEN, source=None), None])):
        with pytest.raises(GenerationError, match="Prompt 0 of the batch has pixels.*takes the images"):
            requests_of(lacking, SAMPLING)


def test_another_prompt_than_the_policys_is_refused() -> None:
    seen, blind = requests_of(PROMPTS, SAMPLING)
    check_prompt_tokens(seen, 0, (1, 2, 9, 9))
    check_prompt_tokens(blind, 1, None)
    for made, first in (([1, 2, 9, 9, 9], 4), ([1, 2, 9], 3), ([1, 3, 9, 9], 1), (None, 0)):
        told = rf"Prompt 0 of the batch \(row 4 of the data\) has 4 tokens.*made {len(made or ())} .*token {first} on"
        with pytest.raises(GenerationError, match=told):
            check_prompt_tokens(seen, 0, made)


def choice(index: int, ids: list[int], logprobs: list[float], reason: str = "length") -> dict[str, Any]:
    said = [{"token_id": token, "logprob": value} for token, value in zip(ids, logprobs)]
    return {"index": index, "token_ids": ids, "logprobs": {"content": said}, "finish_reason": reason}


def asked_of(answer: dict[str, Any], request: Any) -> tuple[list[EngineAnswer], Any]:
    with standing_in(answers(answer)) as server:
        task = ServerTask(0, request, time.monotonic() + 5)
        found = HTTP_LOOP.wait(ask_server(Client(server.url), "policy", task, 10))
        return found, server.seen


def test_a_server_gets_the_very_pixels_and_its_answer_is_read() -> None:
    seen, blind = requests_of(PROMPTS, SAMPLING)
    choices = [choice(1, [5], [-2.0]), choice(0, [5, 0], [-1.0, -0.5], "stop")]
    found, ((verb, route, _, body),) = asked_of({"choices": choices, "prompt_token_ids": [1, 2, 9, 9]}, seen)
    assert found == [EngineAnswer([5, 0], [-1.0, -0.5], True), EngineAnswer([5], [-2.0], False)]
    assert (verb, route, body["model"]) == ("POST", "/inference/v1/generate", "policy")
    assert body["token_ids"] == [97, 98, 60] and body["sampling_params"] == seen.fields
    (part,) = body["content_parts"]
    head, _, data = part["url"].partition(",")
    sent = Image.open(io.BytesIO(base64.b64decode(data)))
    assert head == "data:image/png;base64" and sent.tobytes() == image(1, 24, 40).open().tobytes()
    plain = {"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"}
    found, ((_, route, _, body),) = asked_of({"choices": [plain | {"index": index} for index in range(2)]}, blind)
    assert found == [EngineAnswer([5], [-1.0], True)] * 2 and route == "/v1/completions" and body["prompt"] == [3]


def test_answers_that_no_policy_gave() -> None:
    seen, _ = requests_of(PROMPTS, SAMPLING)
    with pytest.raises(GenerationError, match="has 4 tokens with its images, and the engine made 6"):
        asked_of({"choices": [choice(0, [5], [-1.0])], "prompt_token_ids": [1, 2, 9, 9, 9, 9]}, seen)
    one, cpu = replace(PROMPTS, group_size=1), torch.device("cpu")
    said = {"choices": [choice(0, [5], [-9999.0])], "prompt_token_ids": seen.token_ids}
    found, _ = asked_of(said, requests_of(one, SAMPLING)[0])
    with pytest.raises(NumericError, match="NaN"):
        completions_of(one, [found, found], version=0, device=cpu)
    group = [EngineAnswer([5, 9], [-1.0, -1.0], False)]
    assert completions_of(one, [group, group], version=0, device=cpu).vision is not None
    with pytest.raises(GenerationError, match="the token 9, which stands for an image"):
        completions_of(one, [group, group], version=0, device=cpu, forbidden=(9,))


def test_the_engines_head_rules_placeholders_out_once() -> None:
    class Model:
        def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
            return hidden.clone() if len(hidden) else None

    model, plain = Model(), Model()
    for _ in range(2):
        rule_out(model, (1, 3))
        rule_out(plain, ())
    assert model.compute_logits(torch.ones(2, 4)).tolist() == [[1, -1e4, 1, -1e4]] * 2  # type: ignore[union-attr]
    assert model.compute_logits(torch.ones(0, 4)) is None
    assert "compute_logits" not in vars(plain)


def test_what_an_engine_reads_of_the_shipped_policy(tmp_path: Any) -> None:
    """Its processor too; the probe's prompt shows one image; a server is told to take images."""
    from transformers import AutoConfig, AutoProcessor

    model = LanguageModel("digits", freeze=[])
    policy: Any = model.load()
    policy.config.get_text_config().tie_word_embeddings = False
    write_model_files(policy, model, tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).get_text_config().tie_word_embeddings is True
    (prompt,) = (image_probe(model),)
    assert prompt is not None and model.processor is not None
    (vision,) = prompt.vision
    assert vision is not None and vision.source is not None
    images = [[picture.open() for picture in vision.source.visuals]]
    made = AutoProcessor.from_pretrained(tmp_path)(text=[vision.source.text], images=images, return_tensors="pt")
    assert made["input_ids"].tolist() == [list(prompt.token_ids[0])]
    assert made["pixel_values"].equal(vision.inputs["pixel_values"])
    assert image_probe(LanguageModel("tiny")) is None
    assert model_arguments(model)["enable_scale_out"] is True
    assert "enable_scale_out" not in model_arguments(LanguageModel("tiny"))
