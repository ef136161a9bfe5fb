"""docs/metrics.md has every name that is logged, and no other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from doc_blocks import table_rows
from doc_runs import few_rows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

Train = Callable[..., int]

FORKING = Path(__file__).parents[1] / "algorithms" / "forking_agents.py"
COMMON = ["data.prompts_per_rollout=2", "algo.group_size=2", "callbacks=none", "trainer.max_steps=2", "eval.limit=4"]

TERMS = [
    ["algo/correction=token_truncate", "algo/rejection=tokens", "algo.off_policy_threshold=1", "algo.loss.delta=2"],
    [
        "algo/entropy=fixed",
        "algo/kl_control=adaptive",
        "algo.beta=0.1",
        "algo.reward_beta=0.1",
        *("eval.log_policy=true", "eval.temperature=1", "eval.group_size=2"),
        "algo/groups=dynamic",
        "algo/replay=buffer",
        "data.curriculum.unseen=1",
    ],
    [
        *(
            "algo=cispo",
            "algo.minibatches=1",
            "algo/groups=top",
            "algo.groups.keep=2",
            "reward=function",
            "reward.fn=lit_rl.rewards:exact_match",
        ),
        *("reward.on_error=0", "reward.cache=10"),
    ],
    [
        *("experiment=guess", "algo.minibatches=1", "data.task.train_rows=8", "data.task.val_rows=4"),
        "algo.echo_coef=0.1",
    ],
    ["algo=rae", "algo.role=answer", "algo.minibatches=1", "data.task.max_operand=9", "data.task.val_rows=4"],
    ["algo=sdft", "algo.minibatches=1"],
    ["experiment=opd_addition", "algo.minibatches=1"],
    [
        *("algo=opd", "algo/teacher=by_column", "algo.teacher.column=source", "algo.minibatches=1"),
        *("+algo/teacher@algo.teacher.teachers.sums=self", "algo.teacher.teachers.sums.context.column=answer"),
        *("algo/teacher/context@algo.teacher.teachers.sums.context=column", "data=jsonl"),
        *("data.path=rows.jsonl", "data.val_path=rows.jsonl"),
    ],
    [
        *("env=environment", "env.path=lit_rl.environments.games:GuessNumber", "env.max_turns=2", "env.max_tokens=24"),
        *("env.max_observation_tokens=8", "sampling.max_new_tokens=4", "reward=environment", "data=jsonl"),
        *("data.path=chats.jsonl", "data.val_path=chats.jsonl", "model.chat_template=chat.jinja"),
    ],
    [
        *("env=rollout_func", f"env.path={FORKING}:forking", "env.max_branches=3", "env.max_tokens=24"),
        *("sampling.max_new_tokens=4", "algo.minibatches=1"),
    ],
    ["algo=vespo", "algo.minibatches=1"],
    ["algo=fipo", "algo.minibatches=1"],
    ["algo=m2po", "algo.minibatches=1"],
    ["algo=clip_cov", "algo.minibatches=1"],
    ["algo=kl_cov", "algo.minibatches=1", "sampling.top_p=0.9"],
    [
        *("algo=ppo", "algo.critic_lr=1e-4", "algo.iterations=1"),
        *("algo.ptx_coef=0.1", "algo.ptx.path=rows.jsonl", "algo.ptx.text_key=prompt", "algo.ptx_decay_steps=9"),
    ],
]
"""Settings that log something of their own."""


OFFLINE = ["eval.limit=4", "callbacks=none", "trainer.max_steps=1", "data.batch_size=4"]
OFFLINE += ["data.task.max_operand=6", "data.task.val_rows=8"]

METHODS = [
    ["algo=raft", *COMMON],
    ["algo=online_dpo", "eval.win_rate_against=base", *COMMON],
    ["algo=nash_md", *COMMON],
    ["algo=xpo", *COMMON],
    *([f"algo={name}", *OFFLINE] for name in ("sft", "dpo", "cpo", "orpo", "kto", "bco")),
    *([f"algo={name}", *OFFLINE] for name in ("reward_model", "process_reward_model")),
    ["experiment=gkd_addition", *OFFLINE],
]
"""Methods that learn otherwise than by a policy gradient."""


ENGINES = {
    "train/sampling/sampling_logp_difference/probe_mean",
    "train/sampling/sampling_logp_difference/probe_max",
    "time/sync",
    "time/probe",
}
"""Logged by engines alone: tests/engines/test_engine_runs.py."""

CARDS = {"mfu"}
"""Logged on cards whose best is known: tests/algorithms/test_speed.py."""

TASK_SETS = {"train/verifiers/<name>"}
"""Logged by tasks of verifiers alone, which needs an environment of its own: tests/agents/test_verifiers_runs.py."""


_OF_REQUESTS = "unanswered unparsable cached requests prompt_tokens completion_tokens rate_limit_seconds"
SERVERS = {f"train/teacher/{name}" for name in ("silent", "requests", "rate_limit_seconds")}
"""Logged by teachers that are servers alone: tests/algorithms/test_served_teachers.py."""

JUDGES = {f"train/rewards/<fn>/{name}" for name in f"score quoted {_OF_REQUESTS}".split()}
"""Logged by judges behind an API alone: tests/rewards/test_rewards_llm.py."""


def documented(root: Path) -> dict[str, re.Pattern[str]]:
    """The first column of every table with a third for TRL, as patterns: `<fn>` stands for one part of a name."""
    names = [row[0].strip("`") for row in table_rows(root / "docs" / "metrics.md") if len(row) == 3]
    assert len(names) == len(set(names))
    return {name: re.compile(re.sub(r"<\w+>", "[^/]+", name)) for name in names}


def logged(run_dir: Path) -> set[str]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {name for row in rows for name in row} - {"step"}


def assert_its_page_names(run_dir: Path) -> None:
    """The page that a run of each family writes at its end has every metric, as a curve or in a line."""
    page = (run_dir / "report.html").read_text()
    ours = {name.partition("/")[2] for name in logged(run_dir) if name.startswith("train/")}
    assert ours and not {name for name in ours if name not in page} and "finished" in page, run_dir


@pytest.fixture
def names(train: Train, cwd: Path) -> set[str]:
    """What small runs log: GRPO with KL, RLOO with a named validation set, a test, and every term of an objective."""
    rows = cwd / "rows.jsonl"
    sums = [{"prompt": f"{n}+1=", "answer": f"{n + 1}", "source": "sums"} for n in range(8)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in sums))
    chat = json.dumps({"prompt": [{"role": "user", "content": "0..9="}]})
    (cwd / "chats.jsonl").write_text(f"{chat}\n" * 8)
    said = "{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    (cwd / "chat.jinja").write_text(f"{{% for m in messages %}}{said}{{% endfor %}}")
    own = ["data=jsonl", f"data.path={rows}", f"data.val_path={{easy: {rows}}}", "eval.group_size=2"]
    histograms = ["+schemas@callbacks.histograms=Histograms", "callbacks.histograms.every=1", "logger=tensorboard"]
    assert train("algo.beta=0.01", "run_dir=grpo", *COMMON, *histograms) == 0
    assert train("algo=rloo", "run_dir=rloo", "logger=none", "eval.temperature=1", *COMMON, *own) == 0
    assert train("task=test", "run_dir=test", "logger=none", *COMMON, *few_rows([])) == 0
    for number, terms in enumerate(TERMS):
        assert train(*terms, *few_rows(terms), f"run_dir=terms{number}", "logger=none", *COMMON) == 0, terms
    for number, method in enumerate(METHODS):
        assert train(*method, f"run_dir=method{number}", "logger=none") == 0, method
    for folder in (cwd / "grpo", *cwd.glob("method*")):
        assert_its_page_names(folder)
    (tested,) = (cwd / "test").glob("test_*")
    (events,) = {path.parent for path in (cwd / "grpo").glob("events.*")}
    board = EventAccumulator(str(events))
    board.Reload()
    found = set().union(*(logged(cwd / f"terms{number}") for number in range(len(TERMS))))
    found |= set().union(*(logged(cwd / f"method{number}") for number in range(len(METHODS))))
    found |= logged(cwd / "grpo") | logged(cwd / "rloo") | logged(tested) | set(board.Tags()["histograms"])
    assert "val/easy/reward" in found and "test/reward" in found
    # The second decoding has a row of its own for the reward alone.
    return {re.sub(r"^(val/easy|test|val_sampled(?!/reward$))/", "val/", name) for name in found}


@pytest.mark.all
def test_every_name_is_documented_and_every_documented_name_is_logged(names: set[str], root: Path) -> None:
    patterns = documented(root)
    unknown = {name for name in names if not any(p.fullmatch(name) for p in patterns.values())}
    # Where the loss is validated, its names are those of the training.
    assert sorted(name for name in unknown if re.sub(r"^val/", "train/", name) not in patterns) == []
    assert {told for told, p in patterns.items() if not any(p.fullmatch(name) for name in names)} == {
        *ENGINES,
        *CARDS,
        *TASK_SETS,
        *JUDGES,
        *SERVERS,
    }
