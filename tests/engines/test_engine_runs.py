"""Whole runs with the real vLLM: they learn as with the native generator, on two ranks, and through every fault."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_cases import untied_folder
from engine_fixtures import Case
from server_processes import children, end, is_free, session_members, start
from waiting import until

from lit_rl.core.processes import group_members

SMALL = [
    "data.task.max_operand=5",
    "data.task.val_rows=4",
    "data.prompts_per_rollout=4",
    "algo.group_size=4",
    "callbacks.samples.print=0",
    "callbacks.checkpoint.every_n_train_steps=1",
    "logger=none",
    "eval.limit=2",
    "trainer.max_epochs=-1",
]
GAME = ["experiment=guess", *(word for word in SMALL if not word.startswith("data.task."))]
SECONDS = 400.0
SOON = 10.0


class Run:
    """A `train.py` of its own."""

    def __init__(self, root: Path, folder: Path, *overrides: str) -> None:
        self.folder, self.log = folder, folder.with_suffix(".out")
        folder.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(root / "train.py"), *overrides, f"run_dir={folder}"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def end(self) -> int:
        """The exit code, once it has ended: finished, stopped or failed, and nothing that it started stays behind."""
        code = self.process.wait(SECONDS)
        assert until(lambda: not session_members(self.process.pid), SOON), session_members(self.process.pid)
        return code

    @property
    def said(self) -> str:
        return self.log.read_text()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.metrics if name in row]

    def reach(self, rollouts: int) -> None:
        """Wait until so many rollouts were learned from."""
        there = until(lambda: len(self.column("train/reward")) >= rollouts or self.process.poll() is not None, SECONDS)
        assert there and self.process.poll() is None, self.said


@pytest.fixture
def run(root: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*overrides: str, folder: str = "run") -> Run:
        runs.append(Run(root, tmp_path / folder, *overrides))
        return runs[-1]

    yield begin
    for one in runs:
        if one.process.poll() is None:
            os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()


def last_reward(one: Run, rollouts: int = 5) -> float:
    rewards = one.column("train/reward")[-rollouts:]
    return sum(rewards) / len(rewards)


def test_both_engines_learn_what_native_learns(run: Callable[..., Run], started: Callable[[str], Case]) -> None:
    """GRPO on the shipped task. 40 steps of 32 completions: a mean reward of five rollouts has an error of 0.04."""
    server = started("server-tied")
    server.fresh()
    url = server.generator.engine.clients[0].url  # pyright: ignore
    task = [*SMALL, "data.prompts_per_rollout=8", "trainer.max_steps=40", "optimizer.lr=1e-3", "algo.group_size=8"]
    generators = {
        "native": ["generator=native"],
        "vllm": ["generator=vllm"],
        "server": ["generator=vllm_server", f"generator.urls=[{url}]"],
    }
    rewards: dict[str, tuple[float, float]] = {}
    for name, chosen in generators.items():
        one = run(*task, *chosen, folder=name)
        assert one.end() == 0, one.said
        rewards[name] = one.column("train/reward")[0], last_reward(one)
        if name != "native":
            assert max(one.column("train/sampling/sampling_logp_difference/max")) < 1e-4
            assert max(one.column("train/sampling/sampling_logp_difference/probe_max")) < 1e-4
            assert len(one.column("time/sync")) == 40
    first, reached = rewards["native"]
    assert reached > first + 0.2, rewards
    for name in ("vllm", "server"):
        assert abs(rewards[name][1] - reached) < 0.15, rewards


@pytest.mark.parametrize(("lag", "ages"), [(1, [0, 1, 1, 1, 1, 1]), (2, [0, 1, 2, 2, 2, 2])])
def test_rollouts_ahead_while_the_policy_learns(
    run: Callable[..., Run], started: Callable[[str], Case], lag: int, ages: list[float]
) -> None:
    """Every rollout is as old as the lag, or as the run; one that was stopped goes on where it was."""
    server = started("server-tied")
    server.fresh()
    url = server.generator.engine.clients[0].url  # pyright: ignore
    ahead = [*SMALL, "generator=vllm_server", f"generator.urls=[{url}]", f"generator.lag={lag}", "trainer.max_steps=6"]
    whole = run(*ahead, folder="whole")
    assert whole.end() == 0, whole.said
    assert whole.column("train/sampling/staleness/max") == ages
    assert max(whole.column("train/sampling/sampling_logp_difference/probe_max")) < 1e-4
    part = run(*ahead, folder="part")
    part.reach(3)
    part.process.send_signal(signal.SIGTERM)
    assert part.end() == 143, part.said
    rest = run(*ahead, "ckpt_path=last", folder="part")
    assert rest.end() == 0, rest.said
    assert rest.column("train/sampling/staleness/max") == ages
    for name in ("train/reward", "train/completions/mean_length", "train/num_tokens"):
        assert rest.column(name) == whole.column(name), "the same seeds and weights draw the same samples"


def test_turns_of_a_game_from_a_truncated_engine(run: Callable[..., Run]) -> None:
    """Training scores every turn as the engine drew it, whose text before it lies in the engine's cache; temperature,
    top-p and top-k are in the engine's log-probs, and in those of the training: the weights are 1."""
    cut = ["sampling.temperature=0.8", "sampling.top_p=0.9", "sampling.top_k=20"]
    one = run(*GAME, *cut, "generator=vllm", "trainer.max_steps=4")
    assert one.end() == 0, one.said
    assert max(one.column("train/turns/max")) > 1
    assert max(one.column("train/sampling/sampling_logp_difference/max")) < 1e-3
    ratios = [one.column(f"train/sampling/importance_sampling_ratio/{end}") for end in ("min", "max")]
    assert all(ratios) and all(abs(ratio - 1) < 1e-3 for column in ratios for ratio in column)


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.exhaustive), "fsdp"])
def test_two_ranks_each_with_an_engine(run: Callable[..., Run], strategy: str) -> None:
    """Two processes, two engines, whole policies and sharded ones: each engine proves every update. A rank whose groups
    all teach something draws no others, and yet takes part where an engine is asked."""
    two = ["trainer.accelerator=cpu", "trainer.devices=2", f"strategy={strategy}", "algo=dapo"]
    one = run(*SMALL, *two, "trainer.max_steps=4", "generator=vllm")
    assert one.end() == 0, one.said
    assert len(one.column("train/reward")) == 4 and sum(one.column("train/groups/drawn")) > 0
    assert max(one.column("train/sampling/sampling_logp_difference/max")) < 1e-4


@pytest.mark.exhaustive  # siblings: tests/test_interruption.py, tests/runs/test_signals.py
def test_a_rollout_of_two_engines_is_given_up_together(run: Callable[..., Run]) -> None:
    """A signal to one of the ranks, early in a rollout: both leave their engines within seconds, and the run that goes
    on draws the same rollout from fresh ones."""
    two = ["trainer.accelerator=cpu", "trainer.devices=2", "strategy=ddp", "trainer.limit_val_batches=0"]
    long = ["sampling.max_new_tokens=120", "sampling.min_new_tokens=120", "generator.max_num_seqs=2"]
    paid = ["reward=function", f"reward.fn={Path(__file__).parent / 'digit_rewards.py'}:digits", "reward.workers=0"]
    chosen = [*SMALL, *two, *long, *paid, "generator=vllm", "generator.heartbeat=0.5", "trainer.max_steps=2"]
    part = run(*chosen, folder="part")
    part.reach(1)
    assert until(lambda: "generating" in part.said.partition("step 1/2")[2], SECONDS), part.said
    before = time.monotonic()
    part.process.send_signal(signal.SIGTERM)
    assert until(lambda: "Stopped at step 1" in part.said or part.process.poll() is not None, SECONDS)
    noticed = time.monotonic() - before
    assert part.end() == 143, part.said
    assert len(part.column("train/reward")) == 1
    rest = run(*chosen, "ckpt_path=last", folder="part")
    assert rest.end() == 0, rest.said
    assert noticed < rest.column("time/generate")[1] / 2, "the rollout was not waited for"
    whole = run(*chosen, folder="whole")
    assert whole.end() == 0, whole.said
    for name in ("train/reward", "train/rewards/digits/std", "train/num_tokens", "train/grad_norm"):
        assert rest.column(name) == whole.column(name), "the same seeds and weights draw the same samples"
    assert min(whole.column("train/grad_norm")) > 0, "the first rollout has moved the weights"


def test_two_ranks_share_a_server(run: Callable[..., Run], started: Callable[[str], Case]) -> None:
    """Rank 0 sends what both gather; each asks for its own prompts, and holds its own conversations."""
    server = started("server-tied")
    server.fresh()
    url = server.generator.engine.clients[0].url  # pyright: ignore
    two = ["trainer.accelerator=cpu", "trainer.devices=2", "strategy=fsdp"]
    ask = ["generator=vllm_server", f"generator.urls=[{url}]"]
    one = run(*GAME, *two, *ask, "trainer.max_steps=3")
    assert one.end() == 0, one.said
    assert len(one.column("train/reward")) == 3
    assert max(one.column("train/turns/max")) > 1
    assert max(one.column("train/sampling/sampling_logp_difference/max")) < 1e-4


def server_group(one: Run) -> int:
    """The process group of the server that a run has launched."""
    found = [pid for pid in children(one.process.pid) if os.getpgid(pid) == pid]
    assert len(found) == 1, one.said
    return found[0]


LAUNCHED = ["generator=vllm_server", "generator.launch=true", "generator.answer_deadline=10"]


@pytest.mark.parametrize(
    ("number", "lag"),
    [
        (signal.SIGKILL, 0),
        pytest.param(signal.SIGSTOP, 0, marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGKILL, 2, marks=pytest.mark.exhaustive),
    ],
    ids=["killed", "hangs", "two-ahead"],
)
def test_a_launched_server_that_is_lost_is_started_again(
    run: Callable[..., Run], number: signal.Signals, lag: int
) -> None:
    """In the middle of the run, which goes on and leaves nothing. One of several: `test_engine_updates.py`."""
    one = run(*SMALL, *LAUNCHED, f"generator.lag={lag}", "trainer.max_steps=12")
    one.reach(2)
    lost = server_group(one)
    os.killpg(lost, number)
    assert until(lambda: "It is back." in one.said or one.process.poll() is not None, SECONDS)
    assert one.process.poll() is None, one.said
    assert server_group(one) != lost
    assert one.end() == 0, one.said
    assert one.said.count("It is back.") == 1 and "last lines" in one.said
    assert ("no answer within" in one.said) == (number == signal.SIGSTOP)
    assert len(one.column("train/reward")) == 12
    assert one.column("train/sampling/staleness/max") == [min(k, lag) for k in range(12)], "drawn by the same weights"
    if not lag:
        assert max(one.column("train/sampling/sampling_logp_difference/max")) < 1e-4
    assert not children(one.process.pid)


@pytest.mark.exhaustive  # a sibling without a server: tests/runs/test_dist_generator_failures.py
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_ahead_of_a_server_that_is_killed(run: Callable[..., Run], strategy: str) -> None:
    """Its request in flight is lost to one rank or to both; they agree, one of them starts it again, and both go on."""
    two = ["trainer.accelerator=cpu", "trainer.devices=2", f"strategy={strategy}", "generator.lag=1"]
    one = run(*SMALL, *LAUNCHED, *two, "trainer.max_steps=30")
    one.reach(3)
    os.killpg(server_group(one), signal.SIGKILL)
    assert one.end() == 0, one.said
    assert one.said.count("It is back.") == 1
    ages = one.column("train/sampling/staleness/max")
    assert len(ages) == 30 and ages[:3] == [0, 1, 1] and set(ages) == {0, 1}
    assert ages.count(0) <= 2, "the first, and the one whose request was lost: drawn with the weights of now"
    assert max(one.column("train/sampling/sampling_logp_difference/probe_max")) < 1e-4
    assert not children(one.process.pid)


def test_a_server_that_stays_away_ends_the_run_saved_and_one_that_comes_back_does_not(
    run: Callable[..., Run], tmp_path: Path
) -> None:
    served = start(tmp_path).wait_ready()
    url = served.url
    ask = ["generator=vllm_server", f"generator.urls=[{url}]", "generator.answer_deadline=10"]
    try:
        # Restarted by somebody else, at the same address: the run waits, sends the weights again, and goes on.
        one = run(*SMALL, *ask, "trainer.max_steps=200", "generator.start_deadline=200")
        one.reach(2)
        os.killpg(served.group, signal.SIGKILL)
        served.process.wait(60)
        end(served)
        served = start(tmp_path, f"serve.port={url.rpartition(':')[2]}").wait_ready()
        assert until(lambda: "It is back." in one.said or one.process.poll() is not None, SECONDS), one.said
        one.reach(len(one.column("train/reward")) + 1)
        one.process.send_signal(signal.SIGTERM)
        assert one.end() == 143, one.said

        # Gone for good: exit 5, saved, and the command to go on with. Ctrl-C leaves no process, and a free port.
        two = run(*SMALL, *ask, "trainer.max_steps=200", "generator.start_deadline=3", folder="two")
        two.reach(2)
        group = served.group
        assert len(group_members(group)) >= 3 and not is_free(url)
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(60) == 130
        assert group_members(group) == [] and is_free(url)
    finally:
        end(served)
    assert two.end() == 5, two.said
    assert "did not come back within generator.start_deadline=3" in two.said
    assert "ckpt_path=last" in two.said
    done = len(two.column("train/reward"))
    assert (two.folder / "checkpoints" / f"step_{done:08d}.ckpt").exists()

    resumed = run(*SMALL, "generator=native", f"trainer.max_steps={done + 2}", "ckpt_path=last", folder="two")
    assert resumed.end() == 0, resumed.said
    assert len(resumed.column("train/reward")) == done + 2


def asked_by(url: str) -> int:
    """Connections that a server of this machine has from those that ask it."""
    port, rows = int(url.rpartition(":")[2]), Path("/proc/net/tcp").read_text().splitlines()[1:]
    established = [row.split()[1] for row in rows if row.split()[3] == "01"]
    return sum(int(local.rpartition(":")[2], 16) == port for local in established)


def draws_for(ranks: int, url: str) -> bool:
    """Whether so many have been waiting for completions for a while: a probe's requests are over sooner."""
    for _ in range(8):
        if asked_by(url) < ranks:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.exhaustive  # siblings: test_engine_updates.py has one process and two servers, two ranks share one above
def test_two_ranks_of_two_servers_lose_one_in_a_rollout_and_take_it_back(
    run: Callable[..., Run], tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    servers = [start(folder) for folder in folders]
    try:
        first, url = (each.wait_ready().url for each in servers)
        two = ["trainer.accelerator=cpu", "trainer.devices=2", "strategy=ddp"]
        ask = ["generator=vllm_server", f"generator.urls=[{first},{url}]", "generator.transport=gloo"]
        long = ["sampling.max_new_tokens=64", "sampling.min_new_tokens=64", "algo.group_size=8"]
        one = run(*SMALL, *two, *ask, *long, "generator.answer_deadline=20", "trainer.max_steps=2000")
        one.reach(2)
        assert until(lambda: draws_for(2, url) or one.process.poll() is not None, SECONDS)
        os.killpg(servers[1].group, signal.SIGKILL)
        servers[1].process.wait(60)
        end(servers[1])
        one.reach(len(one.column("train/reward")) + 2)
        said = " ".join(one.said.split())
        assert "that it has not answered are asked of the others" in said, said
        assert f"1 of 2; {url} will be tried again" in said

        servers[1] = start(folders[1], f"serve.port={url.rpartition(':')[2]}").wait_ready()
        assert until(lambda: "Servers that take the weights: 2 of 2." in one.said, SECONDS), one.said
        assert until(lambda: draws_for(2, url) or one.process.poll() is not None, SECONDS), "it is asked again"
        one.reach(len(one.column("train/reward")) + 2)
        one.process.send_signal(signal.SIGTERM)
        assert one.end() == 143, one.said
    finally:
        for each in servers:
            end(each)
    # Of the probe alone: an EOS that min_new_tokens forbids is in what an engine reports of every other token.
    assert max(one.column("train/sampling/sampling_logp_difference/probe_max")) < 1e-4


def test_another_model_is_refused_before_anything_is_drawn(
    run: Callable[..., Run], started: Callable[[str], Case], tiny_dir: Path, tmp_path: Path
) -> None:
    server = started("server-tied")
    server.fresh()
    url = server.generator.engine.clients[0].url  # pyright: ignore
    other = f"model.name={untied_folder(tiny_dir, tmp_path / 'untied')}"
    one = run(*SMALL, other, "trainer.max_steps=2", "generator=vllm_server", f"generator.urls=[{url}]")
    assert one.end() == 5, one.said
    assert "another model than the policy (tied: True, the policy's: False)" in " ".join(one.said.split())
    assert not one.column("train/reward")


def test_nobody_listens(run: Callable[..., Run]) -> None:
    one = run(*SMALL, "trainer.max_steps=2", "generator=vllm_server", "generator.urls=[http://127.0.0.1:9]")
    assert one.end() == 5, one.said
    assert "lit-rl serve model=" in one.said and "generator.launch=true" in one.said
