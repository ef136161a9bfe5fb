"""Functions named by path run in processes of their own, and nothing that they do there ends or stalls the training."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import until

from lit_rl.core.errors import RewardError
from lit_rl.core.processes import is_alive
from lit_rl.rewards import Rewards, TrainerState, from_paths

SOURCE = """
import os, sys, time

def good(completions):
    return [float(len(c)) for c in completions]

def services(completions, answer, completion_ids, trainer_state, log_metric, log_extra):
    log_metric("step", trainer_state.global_step)
    log_metric("torch", "torch" in sys.modules)
    log_extra("process", [os.getpid()] * len(completions))
    return [a + len(ids) for a, ids in zip(answer, completion_ids)]

def process(completion, log_extra):
    log_extra("process", os.getpid())
    return float(len(completion))

async def waits(completion):
    import asyncio
    await asyncio.sleep(0)
    return float(len(completion))

async def same_loop(completions, loops=[]):
    import asyncio
    loops.append(asyncio.get_running_loop())
    return [float(loops[0] is loops[-1])] * len(completions)

def plain_coroutine(completions):
    return waits_for(completions)

async def waits_for(completions):
    return [2.0] * len(completions)

def prints(completions):
    print("h\\u00e9llo", len(completions))
    return [0.0] * len(completions)

def where(completions):
    here = os.getcwd()
    open("left.txt", "w").close()
    os.chdir("/")
    return [float(here == completions[0])]

def loops(completion):
    while completion == "hang":
        pass
    return 1.0

def regex(completions):
    import re
    re.match("(a+)+$", "a" * 64 + "b")

def sleeps(completions):
    os.write(1, b"going to sleep")
    time.sleep(600)

def leaves(completions):
    sys.exit(0)

def exits(completions):
    print("goodbye")
    os._exit(0)

def killed(completions):
    os.kill(os.getpid(), 9)

def interrupted(completions):
    raise KeyboardInterrupt

def memory(completions):
    return [float(len(bytearray(50 * 2**30)))]

def floods(completions):
    os.write(1, b"first words")
    sys.stdout.write("x" * 2**20)
    print("last words")
    raise ValueError("after a megabyte")

def closes(completions):
    sys.stdout.close()
    os.close(1)
    return [1.0]

def reads(completions):
    return [float(input() == "")]

def comes_back_twice(completions):
    os.fork()
    return [float(len(completions))] * len(completions)

def leaves_children(completions, log_extra):
    child = os.fork()
    if not child:
        time.sleep(600)
    log_extra("child", [child])
    if completions[0] == "raise":
        raise ValueError(f"child={child}")
    if completions[0] == "hang":
        print(f"child={child}", flush=True)
        time.sleep(600)
    return [1.0]

def unsendable(completions, log_extra):
    log_extra("f", [lambda: 0])
    return [1.0]

def limits(completions):
    import resource
    memory = open("/proc/self/oom_score_adj").read()
    return [float(resource.getrlimit(resource.RLIMIT_NPROC)[0]), float(memory)]

def raises(completions):
    def deeper():
        raise KeyError("gold")
    deeper()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rewards(name: str, **settings) -> Rewards:
    return from_paths(f"./mine.py:{name}", **settings)


def total(made: Rewards, *completions: str) -> list[float]:
    return made.score(["p"] * len(completions), completions, {}).total.tolist()


def message(made: Rewards, *completions: str) -> str:
    with pytest.raises(RewardError) as error:
        total(made, *completions)
    return str(error.value)


def gone(pid: int) -> bool:
    """The process has ended, or does so within a minute; a zombie that nobody reaps counts."""
    return until(lambda: not is_alive(pid), 60)


def test_everything_crosses_the_border_and_one_worker_without_torch_does_it_all(folder):
    made = rewards("services")
    states = []
    for step in (3, 4):
        inputs = (["p", "q"], ["c", "d"], {"answer": [1, 2]})
        states.append(made.score(*inputs, completion_ids=[[5], [6, 7]], trainer_state=TrainerState(step)))
    assert [scores.total.tolist() for scores in states] == [[2.0, 4.0]] * 2
    assert [scores.metrics for scores in states] == [{"step": (step, 1), "torch": (0.0, 1)} for step in (3.0, 4.0)]
    (process,) = {pid for scores in states for pid in scores.extras["process"]}
    assert process != os.getpid()


def test_no_workers_means_this_process(folder):
    scores = rewards("process", workers=0).score(["p"], ["c"], {})
    assert scores.extras == {"process": [os.getpid()]}


@pytest.mark.parametrize("name", ["good", "process", "waits"])
def test_values_are_those_of_this_process(folder, name):
    completions = ["a" * (i % 5) for i in range(17)]
    assert total(rewards(name), *completions) == total(rewards(name, workers=0), *completions)


def test_coroutines_run_in_the_worker_on_one_loop(folder):
    same = rewards("same_loop")
    assert [total(same, "a"), total(same, "a")] == [[1.0], [1.0]]
    assert total(rewards("plain_coroutine"), "a", "b") == [2.0, 2.0]


def test_several_workers_share_the_completions_of_a_per_sample_function(folder):
    made = rewards("process", workers=2)
    scores = made.score(["p"] * 5, ["a", "bb", "ccc", "dddd", "eeeee"], {})
    assert scores.total.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert len(set(scores.extras["process"])) == 2


def test_a_worker_is_replaced_after_so_many_calls_and_runs_what_the_first_one_ran(folder):
    made = rewards("process", recycle_after=2)
    processes = [made.score(["p"], ["c"], {}).extras["process"][0] for _ in range(2)]
    (folder / "mine.py").write_text("def process(completion, log_extra): raise ValueError('edited in the middle')")
    processes += [made.score(["p"], ["c"], {}).extras["process"][0] for _ in range(2)]
    assert processes[0] == processes[1] != processes[2] == processes[3]
    assert gone(processes[0])


BAD_RETURNS = """
import math
from fractions import Fraction
def nan(completions): return [math.nan, 0.0]
def huge(completions): return [10**400, 0.0]
def text(completions): return [0.0, "1"]
def short(completions): return [1.0]
def scalar(completions): return 1.0
def generator(completions): return (1.0 for _ in completions)
def mapping(completions): return {"a": 1.0}
def array(completions):
    import numpy
    return numpy.ones((2, 1))
def spans(completions): return [[(0, 99, 1.0)], 0.0]
def fraction(completions): return [Fraction(1, 2), None]
def numbers(completions):
    import numpy
    return numpy.array([1, 0], dtype=bool)
def parts(completions): return [[(0, 1, 1.0), (0, 2, 2.0)], True]
"""


@pytest.mark.parametrize("name", re.findall(r"def (\w+)", BAD_RETURNS))
def test_what_a_function_returns_is_taken_or_refused_in_the_same_words(folder, name):
    (folder / "returns.py").write_text(BAD_RETURNS)

    def outcome(workers: int):
        try:
            scores = from_paths(f"./returns.py:{name}", workers=workers).score(["p", "p"], ["aaa", "bbb"], {})
        except RewardError as error:
            return re.sub("[0-9a-f]{8,}", "", str(error))  # addresses
        return scores.total.nan_to_num(-7).tolist(), scores.span_rewards

    assert outcome(1) == outcome(0)


def test_prints_reach_the_training_output(folder, capfd):
    total(rewards("prints"), "a", "b")
    assert capfd.readouterr().out == "héllo 2\n"


def test_the_folder_of_the_training_stays_and_the_worker_returns_to_it(folder):
    made = rewards("where")
    assert [total(made, str(folder)), total(made, str(folder))] == [[1.0], [1.0]]
    assert Path.cwd() == folder


KILLS = {
    "sleeps": (["more than 1 seconds for 1 completion", "it printed: 'going to sleep'", "reward.timeout"], {}),
    "regex": (["more than 1 seconds", "reward.on_error=0"], {}),
    "leaves": (["raised SystemExit"], {}),
    "exits": (["ended with exit code 0 while it scored 1 completion", "goodbye"], {}),
    "killed": (["was killed by SIGKILL (as the kernel does when memory is out) while it scored 1 completion"], {}),
    "interrupted": (["raised KeyboardInterrupt"], {}),
    "memory": (["raised MemoryError", "512 MiB (reward.memory_mb)"], {"memory_mb": 512}),
    "floods": (["after a megabyte", "first words", "bytes left out", "last words"], {}),
    "unsendable": (["log_extra cannot leave its process"], {}),
    "raises": (["raised KeyError", "'gold'", "line 113 of", "mine.py"], {}),
    "reads": (["EOFError"], {}),
}


@pytest.mark.parametrize("name", KILLS)
def test_what_goes_wrong_there_is_an_error_here(folder, name):
    told, settings = KILLS[name]
    text = message(rewards(name, timeout=1.0 if name in ("sleeps", "regex") else 60, **settings), "c")
    for part in (repr(name), *told):
        assert part in text
    assert len(text) < 4000


def test_a_hang_costs_its_own_completion_only_and_the_next_batch_is_served(folder):
    made = from_paths("./mine.py:loops", timeout=1.0, on_error=-1.0)
    with pytest.warns(UserWarning, match="failed on 1 of 3 completions.*TimeoutError"):
        scores = made.score(["p"] * 3, ["a", "hang", "b"], {})
    assert scores.total.tolist() == [1.0, -1.0, 1.0]
    assert scores.metrics["rewards/loops/timeout_ratio"] == (1.0, 3)
    assert total(made, "a", "b") == [1.0, 1.0]


@pytest.mark.parametrize("name", ["exits", "leaves"])
def test_a_function_that_ends_its_process_can_be_scored_too(folder, name):
    with pytest.warns(UserWarning, match="failed on 2 of 2"):
        assert total(rewards(name, on_error=0.25), "a", "b") == [0.25, 0.25]


def test_a_closed_stdout_does_no_harm(folder):
    made = rewards("closes")
    assert total(made, "c") == [1.0]


def test_a_child_that_comes_back_gives_no_second_answer(folder):
    made = rewards("comes_back_twice")
    assert [total(made, *"abc"[:n]) for n in (1, 2, 3)] == [[1.0], [2.0] * 2, [3.0] * 3]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of Linux")
def test_a_worker_has_a_bounded_number_of_processes_and_is_the_first_to_go_without_memory(folder):
    tasks, goes_first = total(rewards("limits"), "a", "b")
    assert tasks > 0  # -1 is no limit
    assert goes_first == 1000


@pytest.mark.parametrize("how", ["raise", "hang"])
def test_children_of_a_function_go_with_its_worker(folder, how):
    text = message(rewards("leaves_children", timeout=1.0 if how == "hang" else 60), how)
    assert gone(int(re.search(r"child=(\d+)", text)[1]))


def test_dropping_the_rewards_ends_their_workers_and_children(folder):
    made = rewards("leaves_children")
    child = made.score(["p"], ["c"], {}).extras["child"][0]
    assert Path(f"/proc/{child}").exists()
    del made
    assert gone(child)


def test_what_cannot_be_sent_says_so(folder):
    (folder / "columns.py").write_text("def score(completions, f): return [0.0]")
    with pytest.raises(RewardError, match=r"cannot be sent to a worker process.*reward\.workers=0"):
        from_paths("./columns.py:score").score(["p"], ["c"], {"f": [lambda: 0]})


def test_a_worker_that_cannot_import_its_module_is_an_error_even_where_failures_have_a_score(folder):
    (folder / "only_here.py").write_text(
        f"import os\nif os.getpid() != {os.getpid()}: raise OSError('no licence')\ndef score(completions): return [0.0]"
    )
    with pytest.raises(RewardError, match=r"only_here.py:score .*OSError: no licence"):
        from_paths("./only_here.py:score", on_error=0.0).score(["p"], ["c"], {})


def test_a_module_named_by_path_finds_this_process_s_packages(folder, monkeypatch):
    (folder / "lib").mkdir()
    (folder / "lib" / "reward_at_hand.py").write_text("def score(completions): return [3.0] * len(completions)")
    monkeypatch.syspath_prepend(str(folder / "lib"))
    assert from_paths("reward_at_hand:score").score(["p"], ["c"], {}).total.tolist() == [3.0]


SCRIPT = """
import os, sys
from lit_rl.rewards import from_paths
made = from_paths("./mine.py:process")

def worker():
    return made.score(["p"], ["c"], {}).extras["process"][0]

print(worker(), flush=True)
if sys.argv[1] == "hangs":
    from_paths("./mine.py:regex").score(["p"], ["c"], {})
child = os.fork()
print(worker(), flush=True)
if child:
    os.waitpid(child, 0)
"""


@pytest.fixture
def training(folder):
    """`training(what)`: another process that scores with a worker, and what it prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    started = []

    def start(what: str) -> subprocess.Popen:
        command = [sys.executable, "-c", SCRIPT, what]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.faults
@pytest.mark.all
def test_a_fork_starts_its_own_workers_and_at_their_end_none_is_left(training):
    process = training("forks")
    first, *others = map(int, process.communicate(timeout=120)[0].split())
    assert process.returncode == 0
    assert others.count(first) == 1 and len(set(others)) == 2
    assert gone(first) and all(map(gone, others))


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=[pytest.mark.faults, pytest.mark.all])]
)
def test_a_training_that_is_killed_leaves_no_worker_even_inside_c_code(training, number):
    process = training("hangs")
    idle = int(process.stdout.readline())
    (busy,) = children_of(process.pid, besides=idle)
    process.send_signal(number)
    assert process.wait(60) == -number
    assert gone(idle) and gone(busy)


def children_of(pid: int, besides: int) -> list[int]:
    """The worker that is started next."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
        if others := [int(child) for children in found for child in children if int(child) != besides]:
            return others
        time.sleep(0.02)
    return []
