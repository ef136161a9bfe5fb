"""The class of the docs around a client of OpenEnv, against a real server of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet
import pytest
from doc_blocks import blocks

pytest.importorskip("openenv.core")

PAGE = Path(__file__).parents[2] / "docs" / "other-environments.md"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name("openenv_guess.py")), str(port)]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + 60
    try:
        while True:
            assert process.poll() is None and time.monotonic() < until, "the server does not start"
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2).close()
                break
            except OSError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture
def here(cwd: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    (block,) = [block for block in blocks(PAGE) if block.file == "my_openenv.py"]
    (cwd / "my_openenv.py").write_text(block.text)
    monkeypatch.setenv("OPENENV_URL", server)
    return cwd


WORDS = [
    "env=environment", "env.path=./my_openenv.py:OnServer", "reward=environment", "data=repeated",
    "data.task.prompt=guess ", "env.max_turns=3", "env.max_tokens=60", "env.max_observation_tokens=16",
]  # fmt: skip


def test_episodes_are_played_on_the_server(here: Path, train: Callable[..., int]) -> None:
    small = ["trainer.max_steps=1", "trainer.limit_val_batches=0", "sampling.max_new_tokens=2", "algo.group_size=4",
             "data.prompts_per_rollout=4", "logger=none", "callbacks.samples.print=0", "run_dir=run"]  # fmt: skip
    assert train(*WORDS, *small, "callbacks.samples.every=1") == 0
    (path, *_) = sorted((here / "run" / "samples").glob("step_*.parquet"))
    rows = pyarrow.parquet.read_table(path).to_pylist()
    assert len(rows) == 16
    for row in rows:
        messages = json.loads(row["messages"])
        heard = [message["content"] for message in messages if message["role"] == "user"]
        assert set(heard) <= {">=", "<=", "="} and row["end"] in ("done", "max_turns")
        assert row["reward"] == float("=" in heard or row["end"] == "done")


def test_the_class_is_fit_to_train_on(
    here: Path, train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("env-check", *WORDS) == 0, capsys.readouterr().out
