"""A run on two machines whose completions come from a server of vLLM on a third one."""

from __future__ import annotations

import json
import time

import pytest
from hosts import ROOT, hosts

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


@pytest.mark.exhaustive
def test_two_nodes_learn_from_a_server_on_a_third_one(tmp_path):
    """Weights go there over gloo. It listens at an address that others reach, so it asks for a key."""
    key = {"VLLM_API_KEY": "of-this-test"}
    with hosts(tmp_path, 3) as (first, second, engine):
        program = "from lit_rl.cli import main; main()"
        words = ["serve", "model=tiny", f"serve.host={engine.address}", "serve.log=server.log"]
        server = engine.python("-c", program, *words, **key)
        deadline = time.monotonic() + 300
        while "Ctrl-C" not in server.said:
            assert server.process.poll() is None and time.monotonic() < deadline, server.said
            time.sleep(0.2)
        url = f"http://{engine.address}:8000"
        assert url in server.said
        generator = ["generator=vllm_server", f"generator.urls=[{url}]", "generator.transport=gloo"]
        meet = {"MASTER_ADDR": first.address, "MASTER_PORT": "29500"}
        nodes = [
            host.python(str(ROOT / "train.py"), *RUN, *generator, NODE_RANK=str(node), **meet, **key)
            for node, host in enumerate((first, second))
        ]
        for node in nodes:
            assert node.code(240) == 0, node.said + (engine.own / "server.log").read_text()[-3000:]
        steps = [json.loads(line) for line in (first.own / "run" / "metrics.jsonl").read_text().splitlines()]
        gaps = [step[name] for step in steps for name in step if "sampling_logp_difference/max" in name]
        assert len(gaps) == 2 and max(gaps) < 1e-3  # of the second step too: it was drawn with the weights of then
