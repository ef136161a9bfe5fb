"""A run on two machines whose completions come from a server of vLLM on a third one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hosts import ROOT, Host, Started, hosts

RUN = [
    "data.task.max_operand=5",
    "data.task.val_rows=0",
    "data.prompts_per_rollout=4",
    "algo.group_size=4",
    "trainer.max_steps=2",
    "trainer.accelerator=cpu",
    "trainer.num_nodes=2",
    "logger=none",
    "callbacks.samples.print=0",
    "run_dir=run",
]


KEY = {"VLLM_API_KEY": "of-this-test"}
"""The server listens at an address that others reach, so it asks for a key."""

STEPS = 8
BOUND = 90
"""Seconds, on a machine that is busy with other tests, until a node ends whose other one was killed."""


@contextmanager
def serving(engine: Host) -> Iterator[tuple[Started, str]]:
    """A server of vLLM on that host, and its URL."""
    program = "from lit_rl.cli import main; main()"
    words = ["serve", "model=tiny", f"serve.host={engine.address}", "serve.log=server.log"]
    server = engine.python("-c", program, *words, **KEY)
    deadline = time.monotonic() + 300
    while "Ctrl-C" not in server.said:
        assert server.process.poll() is None and time.monotonic() < deadline, server.said
        time.sleep(0.2)
    url = f"http://{engine.address}:8000"
    assert url in server.said
    yield server, url


def started(nodes: tuple[Host, Host], url: str, *words: str) -> list[Started]:
    """The run on both nodes: weights go to the server over gloo."""
    generator = ["generator=vllm_server", f"generator.urls=[{url}]", "generator.transport=gloo"]
    meet = {"MASTER_ADDR": nodes[0].address, "MASTER_PORT": "29500"}
    return [
        host.python(str(ROOT / "train.py"), *RUN, *generator, *words, NODE_RANK=str(node), **meet, **KEY)
        for node, host in enumerate(nodes)
    ]


def ended_well(nodes: list[Started], engine: Host) -> None:
    for node in nodes:
        assert node.code(240) == 0, node.said + (engine.own / "server.log").read_text()[-3000:]


def steps_of(first: Host) -> list[dict[str, float]]:
    lines = (first.own / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for line in lines if "train/reward" in (row := json.loads(line))]


def gaps_of(first: Host) -> list[float]:
    """How far the server's log-probs are from the policy's, at most, in each step."""
    return [step[name] for step in steps_of(first) for name in step if "sampling_logp_difference/max" in name]


@pytest.mark.exhaustive
def test_two_nodes_learn_from_a_server_on_a_third_one(tmp_path):
    with hosts(tmp_path, 3) as (first, second, engine), serving(engine) as (_, url):
        ended_well(started((first, second), url), engine)
        gaps = gaps_of(first)
        assert len(gaps) == 2 and max(gaps) < 1e-3  # of the second step too: it was drawn with the weights of then


@pytest.mark.exhaustive
def test_a_node_is_killed_and_the_run_goes_on_with_the_same_server(tmp_path):
    """Nothing is lost: every step is there once, drawn with the weights of then, as in a run that nobody killed."""
    words = [f"trainer.max_steps={STEPS}", "callbacks.checkpoint.every_n_train_steps=2"]
    with hosts(tmp_path, 3) as (first, second, engine), serving(engine) as (server, url):
        ended_well(started((first, second), url, *words), engine)
        whole = steps_of(first)
        (first.own / "run").rename(tmp_path / "whole")
        (second.own / "run").rename(tmp_path / "whole_second")

        here, there = started((first, second), url, *words)
        deadline = time.monotonic() + 240
        while not (first.own / "run" / "checkpoints" / "step_00000004.ckpt").exists():
            assert here.process.poll() is None and time.monotonic() < deadline, here.said
            time.sleep(0.02)
        there.kill()
        killed = time.monotonic()
        assert here.code(BOUND) == 8, here.said
        print(f"node 0 had ended {time.monotonic() - killed:.1f} s after node 1 was killed")
        assert (
            f"Another process of the run, at {second.address}, has ended" in here.said and "ckpt_path=last" in here.said
        )
        assert len(steps_of(first)) < STEPS and server.process.poll() is None

        ended_well(started((first, second), url, *words, "ckpt_path=last"), engine)
        resumed = steps_of(first)
        assert [step["step"] for step in resumed] == [step["step"] for step in whole] == list(range(1, STEPS + 1))
        assert max(gaps_of(first)) < 1e-3
        for name in ("train/reward", "train/completions/mean_length"):
            assert [step[name] for step in resumed] == pytest.approx([step[name] for step in whole]), name
        assert json.loads((first.own / "run" / "summary.json").read_text())["status"] == "finished"
