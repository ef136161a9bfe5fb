"""What `lit-rl serve` refuses before it starts anything. (What it does is in `tests/engines/test_serve.py`.)"""

from __future__ import annotations

import importlib.util

import pytest
from cli_helpers import contents, refused
from test_refusals import rows

needs_no_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")


@needs_no_vllm
def test_without_vllm_it_says_how_to_get_it(command, cwd):
    refused(command("serve", "model=tiny"), 8, "lit-rl serve needs vLLM", "make engines")
    assert contents(cwd) == []


def test_what_has_no_meaning_is_refused(command, cwd):
    for line, (code, words) in rows("serve").items():
        refused(command("serve", *line.split()), code, *words)
    assert contents(cwd) == []
