"""What `lit-rl serve` refuses before it starts anything. (What it does is in `tests/engines/test_serve.py`.)"""

from __future__ import annotations

import importlib.util

import pytest
from cli_helpers import contents, refused

needs_no_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")


@needs_no_vllm
def test_without_vllm_it_says_how_to_get_it(command, cwd):
    refused(command("serve", "model=tiny"), 8, "lit-rl serve needs vLLM", "make engines")
    assert contents(cwd) == []


@pytest.mark.parametrize("word", ["algo=dpo", "data.path=x.jsonl", "run_dir=x", "trainer.devices=2"])
def test_what_has_no_meaning_is_refused(command, cwd, word):
    refused(command("serve", "model=tiny", word), 2, word.partition("=")[0], "lit-rl serve", "model, generator, serve")
    assert contents(cwd) == []


def test_a_setting_of_the_run_is_not_the_servers(command):
    refused(command("serve", "generator.lag=1"), 2, "generator.lag", "max_model_len")
    refused(command("serve", "generator.gpu_memory_utilization=2"), 2, "generator.gpu_memory_utilization=2")


def test_a_key_that_does_not_exist_is_refused(command):
    refused(command("serve", "serve.prot=1"), 2, "serve.prot", "Did you mean 'port'?")


def test_a_folder_that_does_not_exist_is_refused(command):
    refused(command("serve", "model=local", "model.name=./nothing"), 2, "model.name", "no such folder")
