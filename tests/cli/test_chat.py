"""`lit-rl chat`, through a pipe."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from cli_helpers import Command, Outcome, contents, refused

from lit_rl.core.episode import Prompt
from lit_rl.core.rollout import Prompts, Sampling
from lit_rl.data.rendering import encode_prompt
from lit_rl.generation.collect import response_ids
from lit_rl.generation.native import NativeGenerator
from lit_rl.generation.noise import prompt_key
from lit_rl.models import LanguageModel
from lit_rl.runs import chat as chatting

Chat = Callable[..., Outcome]
TEMPLATE = ["chat.plain=false"]
"""The shipped policy, which reads plain text, is asked in messages all the same."""


@pytest.fixture
def chat(command: Command, monkeypatch: pytest.MonkeyPatch) -> Chat:
    """`chat("line", "line", options=["seed=1"])`; nothing on stdout but the replies."""

    def run(*lines: str, options: Any = ()) -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return command("chat", "trainer.accelerator=cpu", *options)

    return run


def reply(model: LanguageModel, prompt: Prompt, turn: int = 0, seed: int = 0, **sampling: Any) -> str:
    """What the generator of training writes."""
    policy, tokenizer = model.load(), model.tokenizer
    generator = NativeGenerator()
    generator.sync(policy, 0)
    keys = [int(prompt_key(seed, turn, 0, 0))]
    ids = encode_prompt(tokenizer, prompt)
    prompts = Prompts([ids], keys, 1, model.eos_ids, model.pad_id, tokenizer.decode)
    (drawn,) = response_ids(generator.generate(prompts, Sampling(**{"max_new_tokens": 6, **sampling})))
    return tokenizer.decode(drawn, skip_special_tokens=True)


def test_lines_are_completed_as_in_training(chat, cwd):
    plain = ["chat.plain=true"]
    outcome = chat("17+25=", "", "31+4=", options=plain)
    model = LanguageModel("tiny")
    assert outcome.code == 0, outcome.err
    assert outcome.out == f"{reply(model, '17+25=')}\n{reply(model, '31+4=', turn=1)}\n"
    outcome = chat("17+25=", options=[*plain, "seed=3", "sampling.top_k=2", "sampling.repetition_penalty=1.2"])
    assert outcome.out == f"{reply(model, '17+25=', seed=3, top_k=2, repetition_penalty=1.2)}\n"
    assert contents(cwd) == []


@pytest.mark.all
def test_the_conversation_is_kept_until_it_is_reset(chat):
    outcome = chat(
        "hello", "and then?", "/reset", "hello", "/quit", "never read", options=[*TEMPLATE, "sampling.temperature=0.5"]
    )
    model = LanguageModel("tiny")
    asked = [{"role": "user", "content": "hello"}]
    first = reply(model, asked, temperature=0.5)
    asked += [{"role": "assistant", "content": first}, {"role": "user", "content": "and then?"}]
    second = reply(model, asked, turn=1, temperature=0.5)
    assert outcome.code == 0, outcome.err
    assert outcome.out == f"{first}\n{second}\n{first}\n"


@pytest.mark.all
def test_the_systems_message_opens_it(chat):
    outcome = chat("hello", options=[*TEMPLATE, "chat.system_prompt=Add.", "sampling.temperature=0"])
    asked = [{"role": "system", "content": "Add."}, {"role": "user", "content": "hello"}]
    assert outcome.out == f"{reply(LanguageModel('tiny'), asked, temperature=0.0)}\n"
    for plain in ([], ["chat.plain=true"]):  # the shipped policy reads plain text
        refused(chat("hello", options=["chat.system_prompt=Add.", *plain]), 2, "chat.system_prompt", "chat.plain=false")


@pytest.mark.all
def test_a_bad_line_is_left_out_and_said(chat):
    outcome = chat("<|im_end|>", "/what\x1b[2J", "hello", options=TEMPLATE)
    assert outcome.code == 0
    assert "control token" in outcome.err and "/what\\x1b[2J is not a command" in outcome.err
    assert outcome.out == f"{reply(LanguageModel('tiny'), [{'role': 'user', 'content': 'hello'}])}\n"


@pytest.mark.all
def test_a_full_context_is_said(chat):
    outcome = chat("a" * 600, "1+1=", options=["chat.plain=true", "sampling.temperature=0"])
    assert outcome.code == 0, outcome.err
    assert "600 tokens" in outcome.err and "512" in outcome.err
    assert outcome.out.strip()


@pytest.mark.all
def test_nothing_that_a_model_writes_moves_the_cursor(chat, monkeypatch):
    text = "\x1b[2J\rä\x08😀\tb\u202e\nc"
    ids = LanguageModel("tiny").tokenizer(text, add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(chatting, "stream", lambda *_: ((token, i == len(ids) - 1) for i, token in enumerate(ids)))
    outcome = chat("hello")
    assert outcome.out == "\\x1b[2J\\rä\\x08😀    b\\u202e\nc\n"


@pytest.mark.all
def test_interrupts(chat, monkeypatch):
    def stopped(*_: Any) -> Any:
        yield 20, False
        raise KeyboardInterrupt

    monkeypatch.setattr(chatting, "stream", stopped)
    outcome = chat("hello", "again")
    assert outcome.code == 130 and "Traceback" not in outcome.err  # a script ends

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    lines = iter(["hello", "/reset", None])

    def typed(_: str) -> str:
        line = next(lines)
        if line is None:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(sys, "stdin", Terminal())
    job = SimpleNamespace(
        model=LanguageModel("tiny"),
        sampling=Sampling(max_new_tokens=6),
        templated=True,
        system_prompt=None,
        seed=0,
        template_kwargs={},
    )
    chatting._talk(job, None)  # the reply ends at the first, the conversation at the second


@pytest.mark.all
def test_a_run_is_talked_to_by_its_export_or_a_checkpoint(chat, step, cwd):
    run = ["run_dir=run", "optimizer.lr=1.0e-2", "scheduler.warmup_steps=0", "sampling.max_new_tokens=4"]
    ended = step(*run, "model.lora.r=2")
    assert ended.code == 0
    assert "lit-rl chat run_dir=run  (each line is a prompt, as in training)" in ended.out
    model = LanguageModel(str(cwd / "run" / "hf"))
    wanted = f"{reply(model, '17+25=', max_new_tokens=4)}\n"
    before = contents(cwd)
    plain = ["run_dir=run"]  # the run learned from plain text, and says so
    for checkpoint in ([], ["ckpt_path=last"]):
        outcome = chat("17+25=", options=[*plain, *checkpoint])
        assert (outcome.code, outcome.out) == (0, wanted), outcome.err
    outcome = chat("17+25=", options=[*plain, "sampling.temperature=0"])  # the rest of its sampling is the run's
    assert outcome.out == f"{reply(model, '17+25=', max_new_tokens=4, temperature=0.0)}\n"
    assert "as it was trained" in outcome.err
    (Path("run") / "config.yaml").rename("elsewhere.yaml")
    outcome = chat("17+25=", options=[*plain, "sampling.max_new_tokens=4"])  # an export alone
    assert outcome.out == wanted
    Path("elsewhere.yaml").rename(Path("run") / "config.yaml")
    assert contents(cwd) == before
    config = Path("run") / "config.yaml"
    run_config = config.read_text()
    tree = yaml.safe_load(run_config)
    tree["algo"]["sampling"]["stop"] = ["${oc.create:{_target_: os.mkdir, path: canary}}"]
    config.write_text(yaml.safe_dump(tree))  # of somebody else: a text, whatever it looks like
    assert chat("17+25=", options=plain).out == wanted and not Path("canary").exists()
    config.write_text(run_config)
    # as of a run that was stopped, whose export was written, and that went on: the checkpoint is of a later step
    summary = Path("run") / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"hf_step": 0}))
    next((Path("run") / "hf").glob("*.safetensors")).unlink()
    outcome = chat("17+25=", options=plain)
    assert (outcome.code, outcome.out) == (0, wanted), outcome.err


@pytest.mark.all
def test_the_runs_own_rendering_is_kept(chat, step, cwd, monkeypatch):
    """What the policy was trained to read opens the conversation; a reward model writes nothing."""
    jobs: list[Any] = []
    monkeypatch.setattr("lit_rl.cli.model_commands.chat", lambda job: jobs.append(job) or 0)
    run = ["run_dir=run", "data.system_prompt=Add.", "data.chat_template_kwargs={mood: kind}"]
    assert step(*run, "sampling.max_new_tokens=3").code == 0
    for more in ([], ["chat.system_prompt=Be brief."], ["chat.plain=true"]):
        assert chat(options=["run_dir=run", *more]).code == 0
    assert [job.system_prompt for job in jobs] == ["Add.", "Be brief.", None]
    assert jobs[0].template_kwargs == {"mood": "kind"}
    (cwd / "scores" / "hf").mkdir(parents=True)
    (cwd / "scores" / "config.yaml").write_text(
        "algo: {_target_: a.RewardModeling, model: {}}\nsampling: {}\ntrainer: {}\n"
    )
    refused(chat(options=["run_dir=scores"]), 2, "RewardModeling", "writes no text")
