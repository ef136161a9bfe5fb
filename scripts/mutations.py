"""Whether the tests notice: the code is broken on purpose in a few places, one at a time, and tests have to fail.

    python scripts/mutations.py                  # each break against the nearest tests of `make test`: minutes
    python scripts/mutations.py --whole          # each break against everything that `make test` runs: hours
    python scripts/mutations.py --only sign clip # some of them
    python scripts/mutations.py --check          # no test: whether every text to break is still there

The checkout is copied (what git tracks, and new files that it does not ignore), and only the copy is broken. Without
`--whole`, the tests must first pass in a copy that is whole. A text that is not found, or stands in two places, is an
error that names the break: the code has changed, so write the break anew in `MUTATIONS`. Leaves with 1 where a break
survives or could not be tried.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

OF_MAKE_TEST = "not all and not exhaustive and not slow"
"""The marker expression of `make test`."""


@dataclass(frozen=True)
class Mutation:
    """One break.

    Args:
        name: In one word.
        breaks: What is wrong afterwards.
        where: The file, or a folder in which one Python file holds the text: code that moves is found again.
        old: The text, which stands there exactly once.
        new: What it becomes.
        tests: The nearest tests, files or cases: one of them must fail.
    """

    name: str
    breaks: str
    where: str
    old: str
    new: str
    tests: str


MUTATIONS = [
    Mutation(
        "sign",
        "an advantage has the opposite sign",
        "lit_rl/ops",
        "divide(groups.deviation, groups.std(), eps).to(rewards.dtype)",
        "divide(-groups.deviation, groups.std(), eps).to(rewards.dtype)",
        "tests/ops/test_ops_advantages.py",
    ),
    Mutation(
        "mask",
        "what stands after the end of a response counts as response",
        "lit_rl/generation",
        "mask=within if turns is None",
        "mask=torch.ones_like(within) if turns is None",
        "tests/generation/test_contract.py::test_eos_stays_in_the_mask_and_every_eos_id_ends",
    ),
    Mutation(
        "endpoint",
        "what an agent is answered between its turns counts as written by the policy",
        "lit_rl/generation",
        "self.written += [*[0] * len(between)",
        "self.written += [*[1] * len(between)",
        "tests/generation/test_chat_conversation.py",
    ),
    Mutation(
        "denominator",
        "the mean over tokens divides by the rows",
        "lit_rl/ops",
        "masked_sum(per_token, mask) / _at_least_one(totals.tokens)",
        "masked_sum(per_token, mask) / _at_least_one(totals.sequences)",
        "tests/ops/test_ops_reductions.py",
    ),
    Mutation(
        "trait",
        "a mean over the tokens of a micro-batch is declared to be one over the step",
        "lit_rl/ops",
        "@ReductionTraits(adds_rows=False)",
        "@ReductionTraits(adds_rows=True)",
        "tests/ops/test_ops_traits.py",
    ),
    Mutation(
        "clip",
        "the clipped loss clips the other side",
        "lit_rl/ops",
        "loss = -torch.minimum(capped * terms.advantages, clipped * terms.advantages)",
        "loss = -torch.maximum(capped * terms.advantages, clipped * terms.advantages)",
        "tests/ops/test_ops_losses.py tests/ops/test_ops_losses_by_hand.py",
    ),
    Mutation(
        "kl",
        "k3 is that of the reference against the policy",
        "lit_rl/ops",
        "log_ratio = ref_logprobs - logprobs",
        "log_ratio = logprobs - ref_logprobs",
        "tests/ops/test_ops_kl.py",
    ),
    Mutation(
        "weight",
        "the weight against the engine is its own inverse",
        "lit_rl/ops",
        "difference = (old_logprobs - sampler_logprobs).detach().float()",
        "difference = (sampler_logprobs - old_logprobs).detach().float()",
        "tests/ops/test_ops_mismatch.py",
    ),
    Mutation(
        "selection",
        "the tokens of low entropy are learned from",
        "lit_rl/ops",
        "mask & (entropy.detach().float() >= _quantile(everything, 1 - share))",
        "mask & (entropy.detach().float() <= _quantile(everything, 1 - share))",
        "tests/ops/test_ops_selection.py",
    ),
    Mutation(
        "truncation",
        "mask_truncated leaves out the completions that ended",
        "lit_rl/algorithms",
        "mask & scored.completions.ended[:, None]",
        "mask & ~scored.completions.ended[:, None]",
        "tests/algorithms/test_credit.py",
    ),
    Mutation(
        "gather",
        "the rows of all ranks come in the wrong order of ranks",
        "lit_rl/algorithms",
        "return torch.cat(self._gather(column))",
        "return torch.cat(self._gather(column)[::-1])",
        "tests/algorithms/test_over_ranks.py",
    ),
    Mutation(
        "resume",
        "a resumed run begins its epoch anew",
        "lit_rl/data",
        "[whole_steps(state[name], slots) * self.slots if other else state[name] for name in counts]",
        "[whole_steps(state[name], slots) * self.slots if other else 0 for name in counts]",
        "tests/data/test_data_loader.py",
    ),
    Mutation(
        "worlds",
        "another number of processes goes on with the rollout that is half used",
        "lit_rl/data",
        "return -(-batches // slots)",
        "return batches // slots",
        "tests/data/test_data_loader.py",
    ),
    Mutation(
        "state",
        "a resumed run forgets what a term had learned: the running norm of rewards",
        "lit_rl/algorithms",
        'int(saved["count"]), saved["mean"], saved["squares"]',
        "0, 0.0, 0.0",
        "tests/algorithms/test_running_norm.py",
    ),
    Mutation(
        "master",
        "small updates of bfloat16 weights are rounded away: masters are taken anew from the weights at every step",
        "lit_rl/algorithms",
        "            split(master.data, weight, self._remainders[weight])\n",
        "            split(master.data, weight, torch.zeros_like(self._remainders[weight]))\n",
        "tests/algorithms/test_master_weights.py",
    ),
    Mutation(
        "sum",
        "gradients of bfloat16 weights are summed in bfloat16",
        "lit_rl/algorithms",
        "weight.grad_dtype = torch.float32",
        "weight.grad_dtype = torch.bfloat16",
        "tests/algorithms/test_master_weights.py",
    ),
    Mutation(
        "cut",
        "a step is cut into one micro-batch more than the coarsest that fits",
        "lit_rl/algorithms/checks/micro_batching.py",
        "if decoded and _plan_fits(",
        "if decoded and count > 1 and _plan_fits(",
        "tests/algorithms/test_memory_plan.py::test_the_cut_is_the_coarsest_that_fits",
    ),
    Mutation(
        "kept-cut",
        "a resumed run is cut by the memory of the day",
        "lit_rl/algorithms/loop/module.py",
        'checkpoint["micro_batch_plan"] = asdict(self.micro_batches.plan)',
        "pass",
        "tests/runs/test_memory_cut.py::test_a_resumed_run_keeps_its_cut_whatever_memory_is_free",
    ),
    Mutation(
        "failed-scored",
        "an episode whose environment failed is rewarded and learned from",
        "lit_rl/algorithms/rollouts/episode_outcomes.py",
        "for row, episode in enumerate(episodes) if not episode.failed]",
        "for row, episode in enumerate(episodes)]",
        "tests/algorithms/test_agents.py::test_scores_of_what_failed_are_none",
    ),
    Mutation(
        "rollout-time",
        "an environment is asked although the time of its rollout is over",
        "lit_rl/environments/runner.py",
        "raise _expired(self.task)",
        "left = 1.0",
        "tests/environments/test_conversation.py::test_resets_beyond_the_time_of_a_rollout_are_not_begun",
    ),
    Mutation(
        "episode-room",
        "an episode may be longer than its limit",
        "lit_rl/environments/conversations.py",
        "self.max_tokens - row.tokens - len(ids)",
        "self.max_tokens - row.tokens",
        "tests/environments/test_conversation.py",
    ),
    Mutation(
        "shared-generators",
        "what an environment draws depends on what ran before it",
        "lit_rl/environments/runner.py",
        "            seed_generators(seed)\n",
        "            pass\n",
        "tests/environments/test_conversation.py",
    ),
    Mutation(
        "shared-inputs",
        "a reward function changes what the next completion is scored by",
        "lit_rl/rewards/jobs.py",
        "return replace(self, inputs={key: _copy(key, values) for key, values in self.inputs.items()})",
        "return self",
        "tests/rewards/test_rewards_own_inputs.py",
    ),
    Mutation(
        "turn-twice",
        "the end of a turn stands twice before an answer",
        "lit_rl/environments/frames.py",
        "len(messages), ids) + closed :]",
        "len(messages), ids) :]",
        "tests/environments",
    ),
    Mutation(
        "lock",
        "two runs write into one folder",
        "lit_rl/runs/run_lock.py",
        "fcntl.LOCK_EX",
        "fcntl.LOCK_SH",
        "tests/runs/test_run_lock.py",
    ),
    Mutation(
        "half-folder",
        "a checkpoint of pieces counts as whole where one is missing",
        "lit_rl/callbacks/checkpoint_io.py",
        "return None if matches_manifest(path) else",
        "return None if True else",
        "tests/runs/test_damaged_checkpoints.py",
    ),
    Mutation(
        "full-disk",
        "what is half-written stays where the disk is full",
        "lit_rl/core/durable_files.py",
        "            unfinished.unlink()\n        raise\n",
        "            pass\n        raise\n",
        "tests/runs/test_full_disk.py",
    ),
    Mutation(
        "logger",
        "a logger that fails ends the run",
        "lit_rl/callbacks/loggers.py",
        "            self.note(what, error, time.monotonic() - began)\n",
        "            raise\n",
        "tests/runs/test_failing_loggers.py",
    ),
    Mutation(
        "other-image",
        "where rows are joined, the later ones see the images of the earlier",
        "lit_rl/core/vision_inputs.py",
        "other.index + len(self.prompts)",
        "other.index",
        "tests/vision/test_vision_training.py",
    ),
    Mutation(
        "placeholder",
        "a policy may say the placeholder of an image",
        "lit_rl/models/loading.py",
        "return logits.index_fill(-1, places, RULED_OUT)",
        "return logits",
        "tests/vision/test_vision_families.py",
    ),
    Mutation(
        "later-image",
        "what a tool shows stands one token too early",
        "lit_rl/core/vision_inputs.py",
        "at = prompt + each.column",
        "at = prompt + each.column - 1",
        "tests/vision/test_vision_returned.py",
    ),
]


def holder(root: Path, mutation: Mutation) -> Path:
    """The one file that holds the text.

    Raises:
        LookupError: none does, or it stands in several places.
    """
    where = root / mutation.where
    files = [where] if where.is_file() else sorted(where.rglob("*.py"))
    found = [path for path in files for _ in range(path.read_text().count(mutation.old))]
    if len(found) == 1:
        return found[0]
    places = "nowhere" if not found else "in " + ", ".join(str(path.relative_to(root)) for path in found)
    raise LookupError(
        f"{mutation.name}: the text to break stands {places} under {mutation.where}, and it must stand there once:\n"
        f"    {mutation.old}\nWrite this mutation anew, in MUTATIONS of scripts/mutations.py."
    )


def copied(target: Path) -> Path:
    """A copy of the checkout as it is now, with its environment linked in."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    if (ROOT / ".venv").exists():
        (target / ".venv").symlink_to(ROOT / ".venv")
    return target


def commands_of_make_test(root: Path) -> list[list[str]]:
    """What `make test` calls pytest with, stopped at the first failure."""
    made = subprocess.run(["make", "-n", "test", "args=-x"], cwd=root, check=True, capture_output=True, text=True)
    return [shlex.split(line) for line in made.stdout.splitlines() if re.search(r"-m pytest\b", line)]


def passes(root: Path, commands: list[list[str]], log: Path) -> bool:
    """Whether every test passes.

    Raises:
        LookupError: pytest found no such tests, or could not begin.
    """
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    for command in commands:
        with log.open("a") as file:
            code = subprocess.run(command, cwd=root, env=environment, stdout=file, stderr=file).returncode
        if code == 1:
            return False
        if code:
            tail = "\n".join(log.read_text().splitlines()[-5:])
            raise LookupError(f"pytest left with {code}: {shlex.join(command)}\n{tail}")
    return True


def nearest(*tests: str) -> list[list[str]]:
    names = dict.fromkeys(name for each in tests for name in each.split())
    options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", OF_MAKE_TEST]
    return [[sys.executable, "-m", "pytest", *options, *names]]


def first_failure(log: Path) -> str:
    found = re.findall(r"^(?:FAILED|ERROR) (\S+)", log.read_text(), re.MULTILINE)
    return found[0] if found else ""


def tried(root: Path, mutation: Mutation, whole: bool, log: Path) -> bool:
    """Break the copy, test it, mend it. Returns whether a test failed."""
    path = holder(root, mutation)
    text = path.read_text()
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        return not passes(root, commands_of_make_test(root) if whole else nearest(mutation.tests), log)
    finally:
        path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whole", action="store_true", help="everything that `make test` runs, for each break")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[each.name for each in MUTATIONS])
    parser.add_argument("--check", action="store_true", help="only look for the texts")
    given = parser.parse_args()
    chosen = [each for each in MUTATIONS if not given.only or each.name in given.only]

    missing = []
    for mutation in chosen:
        try:
            holder(ROOT, mutation)
        except LookupError as error:
            missing.append(str(error))
    if missing or given.check:
        print("\n\n".join(missing) or f"{len(chosen)} mutations, each text stands where it must.")
        return int(bool(missing))

    failed = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        root, width = copied(Path(folder, "copy").absolute()), max(len(each.breaks) for each in chosen)
        before = Path(folder, "before.log")
        if not given.whole and not passes(root, nearest(*(each.tests for each in chosen)), before):
            print(f"A test fails without any break: {first_failure(before)}")
            return 1
        for mutation in chosen:
            log, started = Path(folder, f"{mutation.name}.log"), time.monotonic()
            try:
                caught = tried(root, mutation, given.whole, log)
                outcome = f"caught: {first_failure(log)}" if caught else "SURVIVED"
            except LookupError as error:
                outcome = f"not tried: {error}"
            failed += not outcome.startswith("caught")
            seconds = time.monotonic() - started
            print(f"{mutation.name:11}  {mutation.breaks:{width}}  {seconds:5.0f} s  {outcome}", flush=True)
    print(f"\n{len(chosen) - failed} of {len(chosen)} breaks were caught.")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
