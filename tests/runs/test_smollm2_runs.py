"""A training of the one real pretrained model that needs no hub: resumed, exported, asked (`make smollm2`)."""

from __future__ import annotations

import io
import json
import sys

import pytest
from runs_helpers import assert_same_run, interrupted

from lit_rl.core.episode import PolicyTurn
from lit_rl.core.model_paths import copy_without_hub
from lit_rl.core.rollout import PromptBatch, Sampling
from lit_rl.environments import FunctionTools
from lit_rl.environments.games import QuestionDemonstrations, multiply
from lit_rl.environments.interaction import Interaction
from lit_rl.generation.collect import Vocabulary, texts_of
from lit_rl.generation.native import NativeGenerator
from lit_rl.models import LanguageModel

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
THERE = (copy_without_hub(NAME) / "config.json").is_file()
pytestmark = [
    pytest.mark.all,
    pytest.mark.real,
    pytest.mark.xdist_group("smollm2"),
    pytest.mark.skipif(not THERE, reason="needs the model: make smollm2"),
]
SHORT = [
    "experiment=smollm2_largest",
    "data.prompts_per_rollout=2",
    "algo.group_size=4",
    "algo.minibatches=2",
    "sampling.max_new_tokens=8",
    "trainer.max_steps=4",
    "eval.limit=2",
    "eval.group_size=2",
    "callbacks.checkpoint.every_n_train_steps=1",
    "callbacks.checkpoint.save_top_k=-1",
    "callbacks.samples.print=0",
    "logger=none",
]
"""Two rollouts of two optimizer steps each."""


def test_it_resumes_in_the_middle_of_a_rollout_and_what_it_exports_answers(train, tmp_path):
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert train(*SHORT, f"run_dir={whole}") == 0
    interrupted(whole, again, 3)
    assert train(*SHORT, f"run_dir={again}", "ckpt_path=last") == 0
    assert_same_run(whole, again)
    assert "Paris" in answer(LanguageModel(str(whole / "hf")))


def test_told_the_answer_it_is_its_own_teacher(train, tmp_path):
    """All rows have the context, and the same weights say something else behind it, so there is something to learn."""
    run_dir, teaching = tmp_path / "run", [word for word in SHORT if "group_size=4" not in word]
    words = [word for word in teaching if word != "experiment=smollm2_largest" and "minibatches" not in word]
    assert train("experiment=smollm2_taught", *words, f"run_dir={run_dir}") == 0
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    logged = [line for line in lines if "train/teacher/coverage" in line]
    assert len(logged) == 4 and all(line["train/teacher/coverage"] == 1 for line in logged)
    assert all(line["train/teacher/divergence"] > 0 and line["train/grad_norm"] > 0 for line in logged)


def answer(model: LanguageModel) -> str:
    generator = NativeGenerator()
    generator.sync(model.load().eval(), 0)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    prompts = Vocabulary.of(model).prompts([ids], [3], 1)
    return texts_of(generator.generate(prompts, Sampling(temperature=0.0, max_new_tokens=16)), model.tokenizer)[0]


def test_one_can_talk_to_it(train, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is the capital of France?\n"))
    words = ["task=chat", "model=smollm2_135m", "sampling.temperature=0", "sampling.max_new_tokens=16"]
    assert train(*words, "trainer.precision=32-true") == 0
    assert "Paris" in capsys.readouterr().out


def test_it_calls_a_tool_through_its_own_template(train, tmp_path):
    """Whose tokens are those of the whole conversation, though that was never rendered; and both experiments run."""
    tokenizer, tools = LanguageModel(NAME).tokenizer, FunctionTools([multiply], parser="regex", max_turns=2)
    interaction = Interaction(tools, tokenizer, eos_ids=(tokenizer.eos_token_id,), chat=True, template_kwargs={})
    chat = QuestionDemonstrations(max_operand=30, val_rows=0).train()[1]["prompt"]
    asked = PromptBatch([chat[:1]], [[1]], {}, [0], [0])
    (opened,), conversations = interaction.begin(asked, [0], max_new_tokens=24)
    said = [*tokenizer(chat[1]["content"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    conversations.tell(PolicyTurn(0, 0, said, True))
    (heard,) = conversations.answers(wait=True)
    whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert [*opened.ids, *said, *heard.token_ids] == whole

    short = ["trainer.max_steps=1", "eval.limit=2", "logger=none"]
    assert train("experiment=smollm2_tool_sft", *short, "data.batch_size=4", f"run_dir={tmp_path}/sft") == 0
    short += ["data.prompts_per_rollout=2", "algo.group_size=2", "eval.group_size=1", f"run_dir={tmp_path}/tool"]
    assert train("experiment=smollm2_tool", f"model.name={tmp_path}/sft/hf", *short) == 0


def test_its_generator_is_examined_and_its_memory_planned(train, capsys):
    words = ["model=smollm2_135m", "doctor.prompts=2", "doctor.completions=2", "sampling.max_new_tokens=8"]
    assert train("task=doctor", *words, "trainer.precision=32-true") == 0
    assert "SOUND" in capsys.readouterr().out
    assert train("task=plan", *SHORT, "plan.probe=false") == 0
    assert "activations" in capsys.readouterr().out
