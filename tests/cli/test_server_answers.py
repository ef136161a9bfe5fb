"""A server that answers nonsense ends a run with exit code 5; the whole table is `generation/test_vllm_answers.py`."""

from __future__ import annotations

from typing import Any

import pytest
from cli_helpers import Command, refused
from standin_server import routed, standing_in
from tiers import quick

CASES = [pytest.param(None, id="null"), pytest.param({"results": []}, id="no-results")]


@pytest.mark.parametrize("answer", quick(CASES, {"null"}))
def test_workers_that_say_nothing(step: Command, answer: Any) -> None:
    said = {"/v1/models": {"data": [{"id": "policy"}]}, "/collective_rpc": answer}
    with standing_in(routed(said)) as server:
        outcome = step("generator=vllm_server", f"generator.urls=[{server.url}]", "run_dir=run")
    refused(outcome, 5, f"{server.url}: rpc lit_rl_facts: ", "no answer of a vLLM server", "Another program")
