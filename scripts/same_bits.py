"""Whether two checkouts train to the same bits: short real runs of every method, tensor by tensor and row by row.

    python scripts/same_bits.py record --out before.json --checkout ../untouched   # every run, as hashes and rows
    python scripts/same_bits.py compare before.json                                # the same runs of this checkout
    python scripts/same_bits.py compare before.json after.json                     # two records
    python scripts/same_bits.py repeat --threads 1 2 4                             # every run twice on each: equal?

A record says of each run: the weights (each tensor of the newest checkpoint, each file of `hf/`), the optimizer (each
tensor), `metrics.jsonl` less what measures time, and the samples (each parquet file, by content). Runs that have a
`resume` step are stopped there, in the middle of a rollout or an epoch, and go on to the end: a run of its own, which
must also equal the whole one. `compare` leaves with 1 where anything differs and says what differs first.

Records are of one machine: another processor or another torch rounds differently. `--python` is the interpreter that
runs the checkout (default: its `.venv`), `--only NAME ...` takes a few runs, `--quick` leaves the runs of two processes
and the further presets out. `--set KEY=VALUE ...` are further settings of all runs, which may be others before and
after: a technique that is off, to see whether it is what makes the difference. `--threads` is how many threads of torch
each process has (default 1); equal bits are promised between runs of one number. All of it takes about four minutes of
one core.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
FILES = {
    "texts.jsonl": "".join(json.dumps({"text": f"{n}+{n}={2 * n}"}) + "\n" for n in range(7)),
    # differs within most groups; a completion's prompt decides who of two is better
    "graded.py": """
def score(completions):
    return [0.5 * (len(text) % 2) + 0.25 * (sum(map(ord, text)) % 3) for text in completions]
""",
    # the shipped policy writes digits: 1 with digits behind it is a call
    "tool.py": """
def one(digits: int) -> str:
    '''Return the number doubled.

    Args:
        digits: A number.
    '''
    return str(2 * digits)

one.__name__ = "1"
""",
    # stands in for an engine in another precision: other log-probs, by token and position
    "engine.py": """
import dataclasses
import torch
from lit_rl.generation.native import NativeGenerator

class OtherLogprobs(NativeGenerator):
    def generate(self, prompts, sampling):
        completions = super().generate(prompts, sampling)
        position = torch.arange(completions.response_ids.shape[1], device=completions.response_ids.device)
        error = 0.3 * torch.sin(completions.response_ids * 12.9898 + position * 78.233)
        off = (completions.sampler_logprobs + error).masked_fill(~completions.response_mask, 0.0)
        return dataclasses.replace(completions, sampler_logprobs=off)
""",
}
"""What runs name as `{work}/...`, beside the folder `teacher`: another tiny policy."""


@dataclass(frozen=True)
class Run:
    """One run of `train.py`.

    Args:
        name: Of its row in the table.
        overrides: As on the command line; `{work}` is a folder with `FILES` and `teacher`.
        resume: The step from which it is run a second time; None: not at all. A multiple of 3.
        processes: 1 runs inside the process that runs them all, 2 starts `train.py`.
    """

    name: str
    overrides: tuple[str, ...]
    resume: int | None = None
    processes: int = 1


# 32 training prompts and one checkpoint every third step; the learning rate is high enough for ratios to be clipped.
COMMON = (
    "data.task.max_operand=5 data.task.val_rows=4 trainer.accelerator=cpu trainer.max_steps=12 logger=none eval.limit=2"
    " callbacks.samples.print=0 optimizer.lr=1e-3 callbacks.checkpoint.every_n_train_steps=3"
    " callbacks.checkpoint.save_top_k=-1"
)
# Four optimizer steps a rollout, of two micro-batches each: step 6 is in the middle of the second rollout.
ROLLOUTS = (
    "data.prompts_per_rollout=4 algo.group_size=4 algo.iterations=2 algo.minibatches=2"
    " trainer.accumulate_grad_batches=2"
)
PAIRED = "data.prompts_per_rollout=8 algo.iterations=2 algo.minibatches=2 trainer.accumulate_grad_batches=2"
# Two steps an epoch, of two micro-batches each: step 3 is in the middle of an epoch.
ROWS = "data.batch_size=8 trainer.accumulate_grad_batches=2 trainer.max_steps=6"
STATEFUL = (
    "algo.beta=0.1 reference=ema algo/kl_control=adaptive algo.kl_control.target=1e-3 algo.kl_control.horizon=64"
    " algo/entropy=adaptive algo.entropy.target=10 algo/reward_norm=running algo/groups=dynamic"
    " algo.groups.max_draws=1 algo/replay=buffer algo/selection=top_entropy algo.reward_beta=0.05"
)
ENGINE = "generator._target_=engine.OtherLogprobs allow_targets=[engine]"
TRUNCATED = (
    f"{ENGINE} algo/correction=token_truncate algo.correction.high=1.1 algo/weight_norm=token"
    " algo/rejection=tokens algo.rejection.high=0.03"
)
MASKED = (
    f"{ENGINE} algo/correction=sequence_mask algo.correction.high=1.2 algo/weight_norm=sequence"
    " algo/rejection=sequence_mean algo.rejection.high=0.03"
)
GRADED = "reward=function reward.fn={work}/graded.py:score"

GENERATES = {
    "grpo": "algo.beta=0.1",
    "grpo_scheduled": "scheduler=cosine reference=snapshot algo.beta=0.1 +model.init_kwargs.attention_dropout=0.1",
    "dapo": "algo=dapo sampling.max_new_tokens=2",
    "gspo": "algo=gspo algo.beta=0.02",
    "rloo": "algo=rloo algo.reward_beta=0.1 algo/reward_kl=k2",
    "reinforce_pp": "algo=reinforce_pp algo.reward_beta=0.05",
    "ppo": "algo=ppo algo.group_size=2 data.prompts_per_rollout=8 algo.reward_beta=0.05 algo.critic_lr=1e-2"
    " algo.value_clip=0.02",
    "ppo_shared_trunk": "algo=ppo algo/critic=shared_trunk algo/kl_control=adaptive algo.reward_beta=0.1"
    " algo.critic_warmup=2 algo.ptx.path={work}/texts.jsonl algo.ptx.batch_size=3 algo.ptx_coef=0.2",
    "ppo_adapter": "algo=ppo model.lora.r=4 algo/critic=adapter reference=adapter_base algo/critic_scheduler=cosine"
    " algo.reward_beta=0.05",
    "grpo_stateful": STATEFUL,
    "grpo_bf16_lora": f"model.lora.r=4 reference=adapter_base algo.beta=0.1 algo/entropy=fixed"
    f" trainer.precision=bf16-mixed {TRUNCATED}",
    "grpo_masked": f"algo.beta=0.1 algo/kl=sequence_corrected_k3 {MASKED}",
    "grpo_one_step": f"algo.iterations=1 algo.minibatches=1 algo/loss=importance_weighted {TRUNCATED}",
    "grpo_shaped": "algo/shaping=relative_length_penalty algo/whitening=rows algo/groups=top algo.groups.keep=2"
    " algo/selection=top_entropy_per_sequence algo.beta=0.1 algo/kl=corrected_k2 generator=hf",
}
GAME = (
    f"{COMMON.replace('data.task.max_operand=5 ', '')} {ROLLOUTS} data=repeated data.task.prompt='0..9='"
    " data.task.train_rows=32 env=environment env.path=lit_rl.environments.games:GuessNumber env.max_turns=3"
    " env.max_tokens=24 env.max_observation_tokens=8 sampling.max_new_tokens=4"
)
TOOLS = (
    f"{ROLLOUTS} {GRADED} env=tools env.functions=[{{work}}/tool.py:one] env.parser=regex"
    " env.call_pattern='(?P<name>1)(?P<arguments>[0-9]+)' env.max_turns=2 env.max_tokens=24"
    " env.max_observation_tokens=8 sampling.max_new_tokens=6"
)
EPISODES = {
    "grpo_guess": f"{GAME} algo.beta=0.1 algo/advantage=centered_return_to_go reward=environment_turns",
    "ppo_guess": f"{GAME} algo=ppo algo.reward_beta=0.05 reward=environment",
    "grpo_tools": f"{COMMON} {TOOLS} algo.beta=0.1",
}
IMAGES = {
    "grpo_images": f"experiment=vl_digits {COMMON.replace('data.task.max_operand=5 data.task.val_rows=4 ', '')}"
    f" {ROLLOUTS} trainer.val_check_interval=null algo.beta=0.1",
}
ONLINE_PAIRS = {
    "online_dpo": "algo=online_dpo",
    "nash_md": "algo=nash_md",
    "xpo": "algo=xpo",
}
OFFLINE = {
    "dpo": "algo=dpo",
    "dpo_moving": "algo=dpo algo/preference=[aot] reference=ema trainer.log_every_n_steps=2"
    " +model.init_kwargs.attention_dropout=0.1",
    "dpo_precomputed": "algo=dpo algo.precompute_reference=true",
    "kto": "algo=kto scheduler=cosine",
    "bco": "algo=bco algo/prompt_weights=density_ratio",
    "sft": "algo=sft data.packing=best_fit data.max_length=16 data.batch_size=4",
    "gkd": "algo=gkd algo.teacher.name={work}/teacher",
    "reward_model": "algo=reward_model",
}
PRESETS = {
    f"{ROLLOUTS} {GRADED} trainer.max_steps=4": "a2po bnpo cispo cispo_minimax clip_cov cpgd dppo_kl dppo_tv dr_grpo"
    " dro fipo gdpo gfpo gmpo gpg grpo_ps gspo_token high_entropy kl_cov lite_ppo luspo m2po opo"
    " otb prime_rl rae raft real reinforce reinforce_pp_baseline remax sapo up_grpo vespo",
    f"{ROLLOUTS} trainer.max_steps=8": "grpo_replay maxrl pass_at_k",
    f"{ROWS} trainer.max_steps=3": "alphapo aot_unpaired apo_down apo_zero apo_zero_unpaired bco_pair cdpo cpo"
    " cpo_simpo dft discopop dpo_norm exo hinge ipo ld_dpo mpo nca orpo process_reward_model robust_dpo rpo simpo sppo"
    " tpo tr_dpo wpo",
    f"{PAIRED} {GRADED} trainer.max_steps=4": "iterative_dpo online_ipo",
}
TWO = "trainer.devices=2 data.prompts_per_rollout=8"
TWO_PROCESSES = {
    "grpo_two_ranks": f"{ROLLOUTS} strategy=ddp {STATEFUL} {TWO}",
    "ppo_two_ranks": f"{ROLLOUTS} {GRADED} strategy=fsdp algo=ppo algo.reward_beta=0.05 {TWO}",
    "dpo_two_ranks": f"{ROWS} algo=dpo strategy=ddp trainer.devices=2",
    "online_dpo_two_ranks": f"{PAIRED} {GRADED} algo=online_dpo strategy=ddp trainer.devices=2",
}


def runs(quick: bool) -> list[Run]:
    """Every run, the shortest list that has each term of each method in it first."""

    def made(name: str, *overrides: str, resume: int | None = None, processes: int = 1) -> Run:
        return Run(name, tuple(" ".join((COMMON, *overrides)).split()), resume, processes)

    right_or_wrong = ("dapo", "grpo_stateful")  # what drops groups without spread needs some
    listed = [
        made(name, ROLLOUTS, "" if name in right_or_wrong else GRADED, own, resume=6) for name, own in GENERATES.items()
    ]
    listed += [Run(name, tuple(own.split()), resume=6) for name, own in (EPISODES | IMAGES).items()]
    listed += [made(name, PAIRED, GRADED, own, resume=6) for name, own in ONLINE_PAIRS.items()]
    listed += [made(name, ROWS, own, resume=3) for name, own in OFFLINE.items()]
    if not quick:
        short = "trainer.limit_val_batches=0"
        for settings, names in PRESETS.items():
            listed += [made(name, f"algo={name}", settings, short) for name in names.split()]
        listed += [made(name, own, resume=3, processes=2) for name, own in TWO_PROCESSES.items()]
    return listed


# What the checkout's own interpreter runs: nothing of this file, so that it may be older than this file.
WORKER = """
import contextlib, json, os, pathlib, shutil, sys, traceback
checkout, work = sys.argv[1:]
sys.path.insert(0, checkout)
import subprocess
from hydra.core.global_hydra import GlobalHydra
from lit_rl import cli
environment = dict(os.environ)

def train(overrides, processes):
    if processes > 1:
        command = [sys.executable, os.path.join(checkout, "train.py"), *overrides]
        return subprocess.run(command, stdout=sys.stdout, stderr=sys.stderr).returncode
    sys.argv = ["train.py"]
    try:
        return cli.run(overrides)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        os.environ.clear()
        os.environ.update(environment)
        GlobalHydra.instance().clear()

def interrupt(whole, again, step):
    shutil.copytree(whole, again)
    shutil.rmtree(again / "hf")
    for path in (again / "checkpoints").glob("*.ckpt"):
        if int(path.stem[5:]) > step:
            path.unlink() if path.is_file() else shutil.rmtree(path)
    summary = json.loads((again / "summary.json").read_text())
    kept = {name: summary[name] for name in ("before", "losses", "prompts") if name in summary}
    (again / "summary.json").write_text(json.dumps({"status": "running", **kept, "seconds": 1.0}))

answers = sys.__stdout__
for line in sys.stdin:
    run = json.loads(line)
    folder = pathlib.Path(work, run["name"])
    overrides = [each.replace("{work}", work) for each in run["overrides"]]
    with open(f"{folder}.log", "w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        if run["resumed"]:
            interrupt(pathlib.Path(work, run["whole"]), folder, run["resumed"])
            overrides.append("ckpt_path=last")
        code = train([*overrides, f"run_dir={folder}"], run["processes"])
    print(code, file=answers, flush=True)
"""


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def tensors(node: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Every leaf of a checkpoint's tree by its path: a tensor as type, shape and hash, anything else as it prints."""
    import torch

    if isinstance(node, dict):
        for key, value in node.items():
            yield from tensors(value, f"{where}/{key}")
    elif isinstance(node, list | tuple):
        for i, value in enumerate(node):
            yield from tensors(value, f"{where}/{i}")
    elif isinstance(node, torch.Tensor):
        raw = node.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if node.numel() else b""
        yield where, f"{str(node.dtype)[6:]} {list(node.shape)} {digest(raw)}"
    else:
        yield where, repr(node)


def newest(run_dir: Path) -> dict[str, Any]:
    import torch

    path = max((run_dir / "checkpoints").glob("*.ckpt"), key=lambda found: int(found.stem.rpartition("_")[2]))
    return torch.load(path, weights_only=True)


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl less what measures time and memory."""
    from lit_rl.algorithms.rollouts.phase_costs import is_speed

    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not is_speed(key)} for line in lines]


def samples(run_dir: Path) -> dict[str, str]:
    import pyarrow.parquet

    files = sorted((run_dir / "samples").glob("*.parquet"))
    return {
        path.name: digest(json.dumps(pyarrow.parquet.read_table(path).to_pydict(), default=str).encode())
        for path in files
    }


def measured(run_dir: Path) -> dict[str, Any]:
    """What a run left, small enough to keep. `rows` keeps NaN as Python's JSON does, so compare with `same`."""
    saved = newest(run_dir)
    exported = {path.name: digest(path.read_bytes()) for path in sorted((run_dir / "hf").rglob("*")) if path.is_file()}
    exported.pop("README.md", None)  # its text is no weight, and it names versions
    return {
        "weights": {**dict(tensors(saved["state_dict"])), **{f"hf/{name}": found for name, found in exported.items()}},
        "optimizer": dict(tensors([saved["optimizer_states"], saved["lr_schedulers"], saved["global_step"]])),
        "metrics": rows(run_dir),
        "samples": samples(run_dir),
    }


def teacher(checkout: Path, folder: Path) -> None:
    """The shipped policy with its weights a little smaller."""
    from safetensors.torch import load_file, save_file

    (shipped,) = checkout.glob("lit_rl/**/tiny/model.safetensors")
    shutil.copytree(shipped.parent, folder)
    weights = {name: 0.9 * tensor for name, tensor in load_file(shipped).items()}
    save_file(weights, folder / shipped.name, metadata={"format": "pt"})


def record(
    checkout: Path, python: Path, chosen: list[Run], keep: Path | None, settings: list[str], threads: int
) -> dict[str, Any]:
    """Run everything in one process of the checkout's interpreter; the runs that it could not do hold `failed`."""
    work = Path(tempfile.mkdtemp(prefix="same-bits-", dir=keep))
    for name, text in FILES.items():
        (work / name).write_text(text)
    teacher(checkout, work / "teacher")
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # more threads than free cores wait without turning
    env.pop("PYTHONPATH", None)
    command = [str(python), "-c", WORKER, str(checkout), str(work)]
    found: dict[str, Any] = {}
    with subprocess.Popen(
        command, env=env, cwd=work, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdin and worker.stdout
        for run in chosen:
            jobs = [{**asdict(run), "resumed": None}]
            if run.resume is not None:
                jobs.append({**jobs[0], "name": f"{run.name}-resumed", "whole": run.name, "resumed": run.resume})
            for job in jobs:
                told = job | {"overrides": [*job["overrides"], *settings]}
                worker.stdin.write(json.dumps(told) + "\n")
                worker.stdin.flush()
                answer = worker.stdout.readline().strip()
                log = work / f"{job['name']}.log"
                if answer == "0":
                    found[job["name"]] = {"overrides": list(job["overrides"]), **measured(work / job["name"])}
                    print(".", end="", file=sys.stderr, flush=True)
                else:
                    lines = log.read_text().splitlines()[-12:] if log.exists() else []
                    found[job["name"]] = {"failed": "\n".join([f"exit code {answer or 'none: it died'}", *lines])}
                    print(f"\n{job['name']}: {found[job['name']]['failed']}", file=sys.stderr)
                    break
            for job in jobs if keep is None else []:
                shutil.rmtree(work / job["name"], ignore_errors=True)
        worker.stdin.close()
    if keep is None:
        shutil.rmtree(work)
    print(file=sys.stderr)
    return found


def same(a: Any, b: Any) -> bool:
    """Equal to the bit: JSON's numbers are written so that they come back the same, and NaN equals NaN."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def first_difference(a: Any, b: Any, where: str = "") -> str:
    """The first place at which two trees differ, and both values."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            if key not in a or key not in b:
                return f"{where}{key}: only {'after' if key in b else 'before'}"
            if not same(a[key], b[key]):
                return first_difference(a[key], b[key], f"{where}{key} ")
    if isinstance(a, list) and isinstance(b, list):
        for i, (x, y) in enumerate(zip(a, b)):
            if not same(x, y):
                return first_difference(x, y, f"{where}row {i} ")
        return f"{where}{len(a)} rows, {len(b)} after"
    return f"{where}{a} -> {b}"


PARTS = ("weights", "optimizer", "metrics", "samples")


def table(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Print one row a run; returns how many runs differ."""
    width, different, notes = max(map(len, before)), 0, []
    print(f"{'run':{width}}  " + "  ".join(f"{part:9}" for part in PARTS) + "  resume exact")
    for name, was in before.items():
        now = after.get(name, {"failed": "not run"})
        failed = {when: found["failed"] for when, found in (("before", was), ("after", now)) if "failed" in found}
        if not failed and was["overrides"] != now["overrides"]:
            failed = {"after": "another run than the recorded one: its overrides have changed; record it again"}
        if failed:
            cells = ["FAILED"] * len(PARTS)
            notes += [f"{name}, {when}: {why}" for when, why in failed.items()]
        else:
            cells = ["equal" if same(was[part], now[part]) else "DIFFERENT" for part in PARTS]
            notes += [
                f"{name}, {part}: {first_difference(was[part], now[part])}"
                for part, cell in zip(PARTS, cells)
                if cell != "equal"
            ]
        exact = ""
        if name.endswith("-resumed") and not failed:
            whole = after[name.removesuffix("-resumed")]
            exact = "yes" if same(whole, now) else "NO"
            if exact == "NO":
                notes.append(f"{name} is not the whole run: {first_difference(whole, now)}")
        different += set(cells) != {"equal"} or exact == "NO"
        print(f"{name:{width}}  " + "  ".join(f"{cell:9}" for cell in cells) + f"  {exact}".rstrip())
    print(f"\n{len(before) - different} of {len(before)} runs are the same.", *notes, sep="\n")
    return different


def repeated(records: dict[int, list[dict[str, Any]]]) -> bool:
    """Print a hash for each run and number of threads; returns whether any is DIFFERENT from the other of its two.

    A run that was resumed is also held against the one that was not.
    """
    names = list(next(iter(records.values()))[0])
    width, wrong = max(map(len, names)), False
    print(f"{'run':{width}}  " + "  ".join(f"{f'{threads} threads':16}" for threads in records))
    for name in names:
        cells = []
        for first, second in records.values():
            twins = first.get(name), second.get(name), first.get(name.removesuffix("-resumed"))
            alike = all(each and "failed" not in each and same(each, twins[0]) for each in twins)
            cells.append(digest(json.dumps(twins[0], sort_keys=True).encode()) if alike else "DIFFERENT")
        wrong |= "DIFFERENT" in cells
        print(f"{name:{width}}  " + "  ".join(f"{cell:16}" for cell in cells))
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording, comparing, repeating = (commands.add_parser(name) for name in ("record", "compare", "repeat"))
    recording.add_argument("--out", type=Path, required=True, help="the file to write")
    comparing.add_argument("before", type=Path, help="a record")
    comparing.add_argument("after", type=Path, nargs="?", help="another; without it this checkout is run")
    for each in (recording, comparing):
        each.add_argument("--threads", type=int, default=1, help="of each process; default: 1")
    repeating.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4], help="numbers; default: 1 2 4")
    for each in (recording, comparing, repeating):
        each.add_argument("--checkout", type=Path, default=HERE, help="default: that of this script")
        each.add_argument("--python", type=Path, help="default: .venv/bin/python of the checkout, or this one")
        each.add_argument("--only", nargs="+", metavar="NAME", help="these runs")
        each.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of these runs")
        each.add_argument("--quick", action="store_true", help="one process, the runs that stand for the others")
        each.add_argument("--keep", type=Path, help="an existing folder in which the run directories stay")
    given = parser.parse_args()

    checkout = given.checkout.resolve()
    own = checkout / ".venv" / "bin" / "python"
    python = given.python.absolute() if given.python else (own if own.exists() else Path(sys.executable))

    def now(wanted: Callable[[str], bool], threads: int) -> dict[str, Any]:
        chosen = [run for run in runs(given.quick) if wanted(run.name) and (not given.only or run.name in given.only)]
        return record(checkout, python, chosen, given.keep, given.set, threads)

    if given.command == "repeat":
        return int(
            repeated({threads: [now(lambda name: True, threads) for _ in range(2)] for threads in given.threads})
        )

    if given.command == "record":
        found = now(lambda name: True, given.threads)
        given.out.write_text(json.dumps(found, indent=0) + "\n")
        failed = [name for name, run in found.items() if "failed" in run]
        print(f"{len(found)} runs in {given.out}" + (f"; failed: {', '.join(failed)}" if failed else ""))
        return int(bool(failed))
    before = json.loads(given.before.read_text())
    after = json.loads(given.after.read_text()) if given.after else now(lambda name: name in before, given.threads)
    if given.only or given.quick:
        before = {name: run for name, run in before.items() if name in after}
    if not before:
        parser.error("the records have no run in common")
    return int(table(before, after) > 0)


if __name__ == "__main__":
    raise SystemExit(main())
