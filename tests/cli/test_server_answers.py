"""A server that answers nonsense ends a run with exit code 5; the whole table is `generation/test_vllm_answers.py`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import Command, contents, refused
from standin_server import routed, standing_in
from tiers import quick

CASES = [pytest.param(None, id="null"), pytest.param({"results": []}, id="no-results")]


@pytest.mark.parametrize("answer", quick(CASES, {"null"}))
def test_workers_that_say_nothing(step: Command, cwd: Path, answer: Any) -> None:
    said = {"/v1/models": {"data": [{"id": "policy"}]}, "/collective_rpc": answer}
    with standing_in(routed(said)) as server:
        outcome = step("generator=vllm_server", f"generator.urls=[{server.url}]", "run_dir=run")
    refused(outcome, 5, f"{server.url}: rpc lit_rl_facts: ", "no answer of a vLLM server", "Another program")
    assert contents(cwd) == []


FACTS = {
    **{"instance": "a", "version": 0, "dtype": "float32", "max_model_len": 256, "block_size": 16, "device": "cpu"},
    **{"max_num_seqs": 8, "max_lora_rank": None, "logprobs_mode": "processed_logprobs"},
    "model": {"model_type": "llama", "tied": True, "hidden_size": 64, "vocab_size": 259},
}


def test_a_server_of_another_model(step: Command, cwd: Path) -> None:
    said = {"/v1/models": {"data": [{"id": "policy"}]}, "/collective_rpc": {"results": [FACTS]}}
    with standing_in(routed(said)) as server:
        outcome = step("generator=vllm_server", f"generator.urls=[{server.url}]", "run_dir=run")
    refused(outcome, 5, "another model than the policy", "model_type: llama, the policy's: qwen2", "model=tiny")
    assert contents(cwd) == []


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_an_engine_that_is_not_installed(step: Command, command: Command, cwd: Path) -> None:
    for words in (["generator=vllm"], ["generator=vllm_server", "generator.launch=true"]):
        refused(step(*words, "run_dir=run"), 8, "needs vLLM, which is not installed", "lit-rl[vllm]", "native")
    refused(command("serve", "model=tiny"), 8, "lit-rl serve needs vLLM", "make engines")
    assert contents(cwd) == []
