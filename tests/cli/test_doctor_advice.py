"""What `lit-rl doctor` advises, and by which number."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from lit_rl.models import LanguageModel
from lit_rl.runs.doctor import ComputeTypes, Findings, LogprobGap, PlannedRollout, SyncReport, advice

NEAR = LogprobGap(32, 640, mean=0.02, max=0.2, k3=1e-3, beyond=0.5, share=0.98, within=1.0)


@pytest.fixture(scope="module")
def policy():
    return LanguageModel("tiny").load()


def advised(policy, trainer: str, engine: str, compared: LogprobGap = NEAR, *, exact: bool = False) -> str:
    update = SyncReport(1.0, 1.0, None, None)
    found = Findings(
        sides=ComputeTypes(trainer, engine, "cpu"),
        exact=exact,
        engine=not exact,
        unscored=(),
        compared={trainer: compared},
        moved=0.5,
        after=compared,
        updates=(update, update),
        tokens_per_second=1.0,
        planned=PlannedRollout(prompts=1000, group_size=16, prompt_tokens=100, new_tokens=156),
        policy=policy,
        device=torch.device("cpu"),
    )
    return "\n".join(advice(found))


@pytest.mark.parametrize(
    "trainer, engine, words",
    [
        ("float32", "float32", "generator.dtype=float32 fits"),
        ("float32", "bfloat16", "generator.dtype=float32: the trainer computes in float32 and the engine in bfloat16"),
        ("bfloat16", "bfloat16", "generator.dtype=bfloat16 fits"),
        ("bfloat16", "float32", "generator.dtype=bfloat16: .* takes twice the memory"),
        ("bfloat16", "float16", "generator.dtype=bfloat16: .* rounds otherwise"),
    ],
)
def test_the_types_are_brought_together(policy, trainer, engine, words):
    (line,) = [line for line in advised(policy, trainer, engine).splitlines() if line.startswith("generator.dtype")]
    assert re.search(words, line), line


def test_the_correction_goes_by_what_was_measured(policy):
    text = advised(policy, "float32", "bfloat16")
    assert "token_truncate (what auto takes): the mean difference is 0.02 nats" in text and "share of 0.980" in text
    assert "sequence_mask would do no harm" in text and "20 tokens long" in text
    wide = advised(policy, "float32", "bfloat16", replace(NEAR, within=0.8))
    assert "Not sequence_mask: only 80.0% of the responses" in wide
    assert "algo/correction=none (what auto takes)" in advised(policy, "float32", "float32", exact=True)


def test_the_cache_holds_the_planned_rollout(policy):
    # 2 layers, 4 heads of 32, keys and values, 2 bytes: 1024 a token; 16000 sequences of 256 tokens are 3.9 GiB.
    assert "generator.kv_cache_gib=4: " in advised(policy, "float32", "bfloat16")
    assert "generator.kv_cache_gib=8: " in advised(policy, "float32", "float32")
