"""The real vLLM with a policy over images: in this process, as a server, and in a run."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import perturb
from engine_fixtures import MAKERS, Case
from engine_sights import CLOSE, SAMPLED, asked, gap, move_what_sees
from server_processes import Served, end, start
from vision_toys import picture
from vision_worlds import Begins

from lit_rl.core.errors import GenerationError, NumericError
from lit_rl.core.http_client import HTTP_LOOP
from lit_rl.core.rollout import Sampling
from lit_rl.data.encode import Encoder
from lit_rl.data.prompt_reader import PromptOptions, read_prompts
from lit_rl.data.prompt_set import PromptSet
from lit_rl.data.sources import Rows
from lit_rl.environments.interaction import Interaction
from lit_rl.environments.user_environments import CustomEnvironment
from lit_rl.generation.collect import RolloutRequest, Vocabulary
from lit_rl.generation.vllm.client import Client
from lit_rl.generation.vllm.engine import completions_of, requests_of
from lit_rl.generation.vllm.server import VLLMServerGenerator
from lit_rl.generation.vllm.server_engine import ServerTask, ask_server
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.vision_parts import placeholder_ids

wait = HTTP_LOOP.wait

DIGITS: dict[str, Any] = {"freeze": []}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`lit-rl serve`, for the tests of the server and for a run."""
    running = start(tmp_path_factory.mktemp("serve"), "model=digits", "generator.kv_cache_gib=0.25")
    try:
        yield running.wait_ready()
    finally:
        end(running)


@pytest.fixture(scope="module", params=["vllm", "server"])
def sees(request: pytest.FixtureRequest) -> Iterator[Case]:
    """An engine for the shipped policy over images."""
    name, model = request.param, LanguageModel("digits", **DIGITS)
    if name == "vllm":
        generator = MAKERS[name]()
    else:
        generator = VLLMServerGenerator(urls=[request.getfixturevalue("served").url], heartbeat=None)
    generator.prepare(model)
    yield Case(name, f"{name}-digits", generator, model)
    generator.close()


def test_logprobs_are_the_policys_as_it_learns_to_see(sees: Case) -> None:
    """The same images each time, after updates of the text, of the tower, and of both."""
    policy, prompts = sees.fresh(**DIGITS), asked(sees.model)
    first = sees.generator.generate(prompts, SAMPLED)
    assert gap(policy, first) < CLOSE
    assert first.vision is not None and first.vision.index.tolist() == first.group_id.tolist()
    blind = sees.generator.generate(asked(sees.model, vision=()), SAMPLED)
    assert blind.sampler_logprobs[3:6].equal(first.sampler_logprobs[3:6]), "without an image nothing changes"
    for seed, move in enumerate((move_what_sees, perturb, move_what_sees)):
        move(policy, seed)
        sees.sync(policy)
        out = sees.generator.generate(prompts, SAMPLED)
        assert gap(policy, out) < CLOSE
        assert sees.generator.gap is not None and sees.generator.gap.max < CLOSE
        assert sees.generator.gap.tokens == 32 + 8 + 8, "the probe shows an image too"


def keeping(post: Callable[..., Any]) -> Callable[..., Any]:
    """Calls of a server that leave what it saw in images alone: a pause empties the caches too."""

    async def call(route: str, *rest: Any, **query: Any) -> Any:
        if route == "/reset_encoder_cache":
            return None
        return await post(route, *rest, **query | ({"clear_cache": "false"} if route == "/pause" else {}))

    return call


def test_what_older_weights_saw_is_forgotten(sees: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that kept it would be found out by the probe: whole nats."""
    policy = sees.fresh(**DIGITS)
    move_what_sees(policy, 1)
    engine: Any = sees.generator.engine
    with monkeypatch.context() as patch:
        if sees.kind == "vllm":
            patch.setattr(engine._llm.llm_engine, "reset_encoder_cache", lambda: None)
        else:
            patch.setattr(engine.clients[0], "post", keeping(engine.clients[0].post))
        with pytest.raises(GenerationError, match="does not hold policy version.*a prompt with an image"):
            sees.sync(policy)
        assert sees.generator.gap is not None and sees.generator.gap.max > 0.1
    sees.sync(policy)
    assert gap(policy, sees.generator.generate(asked(sees.model), SAMPLED)) < CLOSE


def test_a_placeholder_is_never_said(sees: Case) -> None:
    """Its logit would be three times that of a digit, but for the head that rules it out: here and in the engine."""
    policy = sees.fresh(**DIGITS)
    (placeholder,) = placeholder_ids(policy.config)
    rows, (digit,) = policy.get_output_embeddings().weight, sees.model.tokenizer.encode("7", add_special_tokens=False)
    with torch.no_grad():
        rows[placeholder] = 3 * rows[digit]
    sees.sync(policy)
    out = sees.generator.generate(asked(sees.model, group_size=8), Sampling(max_new_tokens=8, temperature=1.0))
    assert placeholder not in out.response_ids[out.response_mask].tolist()
    assert gap(policy, out) < CLOSE


def test_a_prompt_that_the_engine_makes_otherwise(sees: Case) -> None:
    sees.fresh(**DIGITS)
    prompts = asked(sees.model)
    token_ids = [list(ids) for ids in prompts.token_ids]
    token_ids[2].insert(9, 70)
    n = len(token_ids[2])
    message = rf"Prompt 2 of the batch \(row 7 of the data\) has {n} tokens.*made {n - 1} of it.*from token 9 on"
    with pytest.raises(GenerationError, match=message):
        sees.generator.generate(replace(prompts, token_ids=token_ids), SAMPLED)
    assert sees.generator.generate(prompts, SAMPLED).lengths.tolist() == [8] * 12, "it goes on as before"


def test_episodes_whose_prompts_show_images(sees: Case) -> None:
    """The prompt begins with a word of the world, which answers with what it sees."""
    policy, model = sees.fresh(**DIGITS), sees.model
    env = CustomEnvironment(Begins, max_turns=3, max_tokens=120, max_observation_tokens=40)
    how: dict[str, Any] = {"eos_ids": model.eos_ids, "chat": True, "template_kwargs": {}}
    interaction = Interaction(env, model.tokenizer, processor=model.processor, **how)
    question = [{"role": "user", "content": "Which digit?"}]
    rows = [{"prompt": question, "answer": str(n), "image": picture(n, 24 + n, 32)} for n in range(3)]
    encoder = Encoder(model.tokenizer, processor=model.processor)
    made, _ = read_prompts(Rows("rows", [*rows, {"prompt": question, "answer": "3"}]), encoder, PromptOptions())
    batch = PromptSet.of(made, model.processor).batch(range(4))
    drawn = RolloutRequest(
        batch,
        policy,
        sampling=Sampling(max_new_tokens=6),
        group_size=3,
        vocabulary=Vocabulary.of(model),
        version=sees.sync(policy),
        seed=5,
        interaction=interaction,
    ).send_to(sees.generator)()
    assert drawn.episodes is not None and drawn.attended is not None and drawn.vision is not None
    assert not any(each.failed for each in drawn.episodes) and len({each.turns for each in drawn.episodes}) > 1
    assert bool((drawn.attended & ~drawn.response_mask).any())
    assert [seen is None for seen in drawn.vision.prompts] == [False, False, False, True]
    assert any("25 wide" in str(message["content"]) for message in drawn.episodes[3].messages)
    assert gap(policy, drawn) < CLOSE


SHORT = ["trainer.limit_val_batches=1", "data.prompts_per_rollout=4", "data.val_batch_size=4", "logger=none"]
SHORT += ["callbacks.samples.print=0"]


def train(root: Path, folder: Path, steps: int, *words: str) -> None:
    """A run that ends well, with a generator near the policy in every rollout and every probe."""
    words = *SHORT, *words, f"trainer.max_steps={steps}", f"run_dir={folder}"
    command = [sys.executable, root / "train.py", "experiment=vl_digits", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=env, text=True, capture_output=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for which in ("difference/max", "difference/probe_max"):
        gaps = [line[name] for line in lines for name in line if name.endswith(which)]
        assert len(gaps) == steps and max(gaps) < CLOSE


def test_a_run(root: Path, tmp_path: Path, sees: Case, request: pytest.FixtureRequest) -> None:
    """With an engine of its own, or by the words that `lit-rl serve` prints: that answers as the exported policy does
    in the end, and no more as before."""
    words = ["generator=vllm"]
    if sees.kind == "server":
        served: Served = request.getfixturevalue("served")
        (line,) = [line for line in served.said.splitlines() if "generator=" in line]
        words = shlex.split(line)
    train(root, tmp_path / "run", 3, *words)
    if sees.kind == "server":
        model, client = LanguageModel(str(tmp_path / "run" / "hf")), Client(served.url)
        prompts, vocabulary, until = asked(model), wait(client.facts(60)).vocabulary, time.monotonic() + 60
        tasks = [ServerTask(*each, until) for each in enumerate(requests_of(prompts, SAMPLED))]
        answers = [wait(ask_server(client, "digits", task, vocabulary)) for task in tasks]
        drawn = completions_of(prompts, answers, version=3, device=torch.device("cpu"))
        assert gap(model.load(), drawn) < CLOSE < gap(LanguageModel("digits").load(), drawn)


def test_nan_in_what_an_image_asked_for(sees: Case) -> None:
    """The route of a server that takes images has a number in the place of NaN. The last test of an engine: NaN stays
    in the blocks of its cache, and a CPU's kernels may read what lies behind a text."""
    policy = sees.fresh(**DIGITS)
    with torch.no_grad():
        policy.model.connector.modality_projection.proj.weight[0] = torch.nan
    with pytest.raises(NumericError, match="NaN"):
        sees.sync(policy)


def test_an_adapter_by_itself() -> None:
    generator = MAKERS["vllm"]()
    model = LanguageModel("digits", lora=Lora(r=4))
    generator.prepare(model)
    policy = model.load()
    try:
        for seed in range(2):
            perturb(policy, seed)
            generator.sync(policy, seed)
            assert generator._sender._base_is_there, "only the adapter is sent again"
            assert gap(policy, generator.generate(asked(model), SAMPLED)) < CLOSE
    finally:
        generator.close()
