"""`lit-rl doctor` with the real vLLM: the numbers, and what follows from them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lit_rl.core.model_paths import copy_without_hub

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory):
    """Runs the command in a process of its own; `(exit code, stdout in one line, stderr)`."""
    known: dict[tuple[str, ...], tuple[int, str, str]] = {}
    folder = tmp_path_factory.mktemp("doctor")

    def run(*words: str) -> tuple[int, str, str]:
        if words not in known:
            program = [sys.executable, "-c", "from lit_rl.cli import main; main()", "doctor", "generator=vllm", *words]
            env = {**os.environ, "COLUMNS": "200"}
            done = subprocess.run(program, cwd=folder, env=env, text=True, capture_output=True, timeout=300)
            known[words] = done.returncode, " ".join(done.stdout.split()), done.stderr
        assert list(Path(folder).iterdir()) == []
        return known[words]

    return run


def number(text: str, row: str) -> float:
    found = re.search(rf"{re.escape(row)} (\S+)", text)
    assert found, text
    return float(found[1].rstrip("%"))


@pytest.mark.real
@pytest.mark.skipif(not (copy_without_hub(SMOLLM2) / "config.json").is_file(), reason="needs the model: make smollm2")
@pytest.mark.parametrize("generator", ["vllm", pytest.param("vllm_server", marks=pytest.mark.exhaustive)])
def test_a_real_pretrained_model(examined, generator):
    served = ["generator.launch=true"] if generator == "vllm_server" else []
    # Two workers with their engines fill 22 of 24 GB.
    small = ["generator.max_model_len=512", "generator.kv_cache_gib=0.25"]
    words = [f"generator={generator}", *served, *small, "model=smollm2_135m", "sampling.max_new_tokens=16"]
    words.append("trainer.precision=32-true")
    code, out, err = examined(*words)
    assert code == 0, err
    assert number(out, "max |difference|, nats") < 1e-4
    assert "SOUND" in out


def test_a_sound_engine(examined):
    code, out, err = examined()
    assert code == 0, err
    assert number(out, "mean |difference|, nats") < 1e-5 < number(out, "max |difference|, nats") * 100
    assert number(out, "effective share of tokens") > 0.9999
    assert number(out, "start") > 0.5 and number(out, "generated tokens a second") > 10
    assert "SOUND: the generator holds the policy, and followed it" in out and "its probe then differed by" in out
    assert "generator.dtype=float32 fits" in out
    assert "algo/correction=token_truncate (what auto takes)" in out
    assert "generator.kv_cache_gib=1:" in out


def test_a_coarser_engine_is_sound_and_the_type_is_advised(examined):
    """The probe is left out of the run by its setting; here it is what is asked for."""
    code, out, err = examined("generator.dtype=bfloat16", "generator.probe=off", "model.lora.r=4")
    assert code == 0, err
    assert 1e-3 < number(out, "mean |difference|, nats") < 0.1
    assert "- generator.dtype=float32: the trainer computes in float32 and the engine in bfloat16" in out
    assert "its probe then differed by" in out


def test_an_engine_beyond_the_limit_ends_with_5(examined):
    code, out, err = examined("generator.dtype=bfloat16", "generator.probe_mean_limit=1e-5")
    assert code == 5 and "does not hold policy version 0" in err and "Traceback" not in err
    assert "SOUND" not in out
