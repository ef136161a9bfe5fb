"""Settings of an engine, flags of a server, and its process: everything that needs no vLLM."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import watched_parent
from standin_vllm import write_vllm
from waiting import until

from lit_rl.core import machine
from lit_rl.core.errors import BackendError, ConfigError, GenerationError, StorageError
from lit_rl.core.processes import group_members
from lit_rl.generation.vllm import launch
from lit_rl.generation.vllm.engine_settings import EngineSettings, adapter_rank, model_arguments, model_dtype
from lit_rl.generation.vllm.launch import ServerProcess, checked_port, server_arguments
from lit_rl.models import LanguageModel, Lora


def test_what_an_engine_reports_does_not_depend_on_the_settings():
    for chosen in (EngineSettings(), EngineSettings(dtype="bfloat16", max_lora_rank=3, enforce_eager=True)):
        for cpu in (False, True):
            found = chosen.engine_arguments(model_dtype="float32", cpu=cpu)
            assert found["logprobs_mode"] == "processed_logprobs" and found["max_logprobs"] == -1
            assert found["generation_config"] == "vllm" and found["enable_prefix_caching"] is True
            module, _, name = found["worker_extension_cls"].rpartition(".")
            assert isinstance(getattr(importlib.import_module(module), name), type)


def test_what_is_not_set_follows_the_model_and_the_device():
    found = EngineSettings().engine_arguments(model_dtype="bfloat16", cpu=True)
    assert found["dtype"] == "bfloat16" and found["enforce_eager"] is True
    assert found["kv_cache_memory_bytes"] == 2**30
    assert "max_model_len" not in found and "enable_lora" not in found
    found = EngineSettings(dtype="float16").engine_arguments(model_dtype="bfloat16", cpu=False)
    assert found["dtype"] == "float16" and found["enforce_eager"] is False and "kv_cache_memory_bytes" not in found


@pytest.mark.parametrize("rank, room", [(1, 1), (2, 8), (8, 8), (9, 16), (257, 320), (512, 512)])
def test_room_for_adapters_is_the_next_rank_that_vllm_knows(rank, room):
    found = EngineSettings(max_lora_rank=rank).engine_arguments(model_dtype="float32", cpu=True)
    assert found["enable_lora"] is True and found["max_lora_rank"] == room


def test_the_files_of_a_model_and_its_overrides_reach_the_engine(tmp_path):
    model = LanguageModel("tiny", init_kwargs={"max_position_embeddings": 1024})
    found = model_arguments(model)
    assert found["model"] == model.path and found["load_format"] == "safetensors"
    assert found["hf_overrides"] == {"max_position_embeddings": 1024} and "revision" not in found
    assert "hf_overrides" not in model_arguments(LanguageModel("tiny"))
    (tmp_path / "config.json").write_text((Path(model.path) / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(StorageError, match="pickle"):
        model_arguments(LanguageModel(str(tmp_path)))


def test_the_type_of_a_model_is_never_left_to_vllm():
    assert model_dtype(LanguageModel("tiny", dtype="bfloat16")) == "bfloat16"
    stored = json.loads((Path(LanguageModel("tiny").path) / "config.json").read_text())
    assert model_dtype(LanguageModel("tiny", dtype="auto")) == stored.get("dtype", stored.get("torch_dtype"))


def test_the_rank_of_an_adapter_is_read_from_its_description(tmp_path):
    assert adapter_rank(LanguageModel("tiny")) is None
    assert adapter_rank(LanguageModel("tiny", lora=Lora(r=5))) == 5
    assert adapter_rank(LanguageModel("tiny", lora=Lora(r=5, dora=True))) is None
    assert adapter_rank(LanguageModel("tiny", lora=Lora(r=5, modules_to_save=["norm"]))) is None
    LanguageModel("tiny", lora=Lora(r=3)).load().save_pretrained(str(tmp_path))
    assert adapter_rank(LanguageModel("tiny", adapter=str(tmp_path))) == 3


def test_arguments_become_flags():
    engine = {"max_model_len": 64, "enforce_eager": True, "trust_remote_code": False, "hf_overrides": {"a": [1, "b c"]}}
    words = server_arguments(engine, name="-m", host="127.0.0.1", port=8001, transfer="nccl")
    assert {"--max-model-len=64", "--enforce-eager", "--no-trust-remote-code", "--port=8001"} <= set(words)
    assert '--hf-overrides={"a": [1, "b c"]}' in words and "--served-model-name=-m" in words
    assert '--weight-transfer-config={"backend": "nccl"}' in words
    assert not any(word.startswith("--weight-transfer") for word in server_arguments({}, name="m", host="h", port=1))


def test_a_port_that_is_taken_is_said_by_its_key():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"serve.port={port} on 127.0.0.1.*serve.port=0"):
            checked_port("127.0.0.1", port, "serve.port")
    assert checked_port("127.0.0.1", port, "serve.port") == port
    assert 0 < checked_port("127.0.0.1", 0, "serve.port") < 2**16
    for host, number in (("127.0.0.1", 70000), ("127.0.0.1", -1), ("192.0.2.1", 0), ("no-such-host.invalid", 0)):
        with pytest.raises(ConfigError, match="serve.port="):
            checked_port(host, number, "serve.port")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_it_says_how_to_get_it(monkeypatch):
    with pytest.raises(BackendError, match=r"generator=vllm needs vLLM.*lit-rl\[vllm\]") as error:
        machine.require_vllm("generator=vllm")
    assert "Linux" not in str(error.value)
    for system in ("Darwin", "Windows"):
        monkeypatch.setattr("platform.system", lambda system=system: system)
        with pytest.raises(BackendError, match=f"runs on Linux, and this is {system}"):
            machine.require_vllm("generator=vllm")


@pytest.mark.parametrize(
    ("version", "fits"), [("0.32.0", True), ("0.32.7+cu130", True), ("0.1.dev3+gabc", True), ("0.33.0", False)]
)
def test_another_version_of_vllm_is_refused(version, fits, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(write_vllm(tmp_path, version))
    if fits:
        return machine.require_vllm("generator=vllm")
    with pytest.raises(BackendError, match=r"needs vLLM 0\.32, .* 0\.33\.0 is installed"):
        machine.require_vllm("generator=vllm")


def test_the_version_is_that_of_the_extra(root):
    major, minor = machine.VLLM_VERSION
    assert f'"vllm>={major}.{minor},<{major}.{minor + 1}"' in (root / "pyproject.toml").read_text()


def test_a_server_is_no_rank_of_this_run(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    found = launch.server_environment(cpu=True)
    assert not {"RANK", "WORLD_SIZE", "VLLM_ENABLE_V1_MULTIPROCESSING"} & found.keys()
    assert found["VLLM_SERVER_DEV_MODE"] == "1" and found["PYTHONPATH"].split(os.pathsep)[-1] == "/somewhere"


# ---------------------------------------------------------------- processes, with a stand-in for the server


def gone(group: int, seconds: float = 5.0) -> bool:
    return until(lambda: not group_members(group), seconds)


def test_a_killed_parent_leaves_no_process():
    words = [sys.executable, watched_parent.__file__, "deaf"]
    parent = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    group = int(parent.stdout.readline())
    assert len(group_members(group)) == 3
    parent.kill()
    parent.wait()
    assert gone(group)


@pytest.mark.parametrize("kind", ["plain", "deaf", "short"])
def test_no_process_outlives_the_server(kind):
    running = watched_parent.start(kind)
    if kind != "short":
        assert len(group_members(running.pid)) == 3
        running.send_signal(signal.SIGTERM)
    assert running.wait(5) == -signal.SIGKILL
    assert gone(running.pid)
    assert running.stdout is not None
    said = running.stdout.read()
    assert ("Nobody stopped the server process: it has ended with exit code 7." in said) == (kind == "short")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="here the server would start")
def test_a_server_that_ends_while_it_starts_is_reported_with_its_log(tmp_path):
    log = tmp_path / "deep" / "server.log"
    server = ServerProcess(["--port=1"], url="http://127.0.0.1:1", cpu=True, log=log)
    server.stop()  # nothing to stop yet
    server.start()
    with pytest.raises(GenerationError, match="already"):
        server.start()
    began = time.monotonic()
    with pytest.raises(GenerationError, match=r"before it was ready"):
        server.wait_healthy(60)
    assert time.monotonic() - began < 20 and not server.alive and server.group is None
    server.stop()


def test_the_first_error_of_a_log_is_shown_before_its_last_lines(tmp_path):
    log = tmp_path / "server.log"
    lines = [
        "(APIServer pid=1) WARNING 01-01 00:00:00 [a.py:1] This can cause errors like `OSError: [Errno 24]`",
        "(EngineCore pid=2) ERROR 01-01 00:00:01 [core.py:9] Traceback (most recent call last):",
        "(EngineCore pid=2) ERROR 01-01 00:00:01 [core.py:9] ValueError: too little memory",
        *(f"line {i}" for i in range(40)),
        "RuntimeError: see above \x1b[31m",
    ]
    log.write_text("\n".join(lines))
    said = str(ServerProcess([], url="http://127.0.0.1:1", cpu=True, log=log).failure("It died."))
    assert said.splitlines()[:2] == ["It died.", "Its first error: ValueError: too little memory"]
    assert "line 39" in said and "line 10" not in said and "\x1b" not in said
