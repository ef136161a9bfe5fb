"""docs/benchmarks.md and its pictures, made of the results: nothing on it is typed by hand.

PYTHONPATH=scripts python -m bench.page
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu.result import markdown, read_stages
from matplotlib.axes import Axes
from run_curves import BLUE, GREEN, GREY, INK, ORANGE, look, plt, styled

from bench import summary
from bench.bounds import LIMITS
from bench.suites import BF16_TRUE, OURS
from bench.summary import FOREIGN, Result, Spread
from bench.workload import SLOW_SECONDS, Workload

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "benchmarks.md"
RESULTS = DOCS / "benchmarks"
"""Results as JSON: `cpu.json`, and in `gpu` a file a stage of the proof; pictures stand in `docs/images/benchmarks`."""
PICTURES = DOCS / "images" / "benchmarks"

HEAD = (
    """\
# Benchmarks

Whole optimizer steps of lit_rl compared with TRL 1.16.0: the same model, prompts, lengths, rewards, optimizer and loss,
alternating on one machine. The benchmark generates this page from its results, the JSON files in `docs/benchmarks/`.

| command | what it measures | on two quiet cores |
|---|---|---|
"""
    "| `make bench` | GRPO, 4 prompts x 8 completions, 64 + 64 tokens, a policy of 6 million parameters; each "
    "technique switched off in turn | under 20 minutes, estimated |\n"
    "| `make bench-full` | the same, and prompts of 256 tokens, variable lengths, half-dead groups, the shape of a "
    "0.5B model, DPO, SFT, small decoding batches, slow rewards, micro-batches of a data set, two processes, scaling "
    "| about five hours, estimated |\n"
    "| `make bench-gpu` | the test on one GPU: whether training is sound, whether its kernels equal a CPU's float32, "
    "the 0.5B shape compared with TRL, metrics that others publish | (one GPU: at most nine minutes) |\n"
    """
The letters before a workload's name denote its kind: C1 is GRPO with the policy of 6 million parameters, C2 the
shape of a 0.5B model, C3 a data set (DPO, SFT). A1 to A4 measure techniques that matter in one workload only (small
decoding batches, slow rewards, micro-batches of pairs and of texts), and M1 is two processes. "Without: a technique" is
lit_rl with that technique switched off.

To run some workloads and contenders of a suite, in fewer rounds (`--list` prints their names; see `bench.run --help`):

```text
PYTHONPATH=scripts .venv/bin/python -m bench.run full --peer-python .venv-peer/bin/python --kept --rounds 2 --steps 3 \\
    --only "C1, prompt 64" DPO SFT --contenders "TRL, default" "threads and memory as train.py's" "lit_rl, float32"
```
"""
)

METHOD = f"""\
## How it is measured

- **Same work.** Random weights from a fixed seed, one checkpoint folder for all; prompts from one file, in one order;
  AdamW at 1e-6, clipping at 1, a constant schedule, no checkpoints and no loggers on either side. Every completion ends
  at a length from a file: with *fixed* lengths none ends early, *variable* ones are lognormal, with mean 0.4 of
  the longest before capping. In *half-dead* workloads every second prompt has equal rewards in its group.
- **Gate.** Every contender takes its first step on the same given completions, in its real training loop.
  Log-probs, loss and gradient are compared with TRL in float32: 1e-4 nats in float32, 2e-2 in bfloat16, a cosine of at
  least 0.999. In deep models TRL itself deviates more in bfloat16; a contender may then deviate 1.5 times as much as
  TRL, and the workload says so. If one deviates more, the workload has no results. With LoRA no gradient is
  compared, and for pairs and texts no log-probs: these enter their loss and gradient.
- **Turns.** Each contender is a process with pinned threads that trains one step on request, so warm-up is excluded
  and contenders alternate (A B C, then C B A). The value of a turn is the median of its steps, a result the median of
  turns, a ratio the ratio of such medians, with the lowest and highest ratio of a round in brackets; the "middle half"
  contains half of all timed steps. If other processes took over {FOREIGN:.0%} of the processor in a turn, the round is
  repeated, once or twice at most. `make bench-full` starts a process for each turn; in `make bench` the processes
  measured last wait for the next round, in at most half of the memory. Each workload says which was used.
- **Commit.** Each workload names the commit it was measured on (a plus: with changed files) and the
  day. Rows of one table may be from different commits, but never from different machines or versions.
- **Ours.** Only the precision is set, and whatever a contender's name says; all other settings are the defaults of
  `train.py`.
- **TRL.** "default" is its default config, which computes in bfloat16. On a processor without bfloat16 units per step
  would take minutes, so there it is float32, and named so. "tuned" is the fastest of all settings measured for a
  workload, including the default. lit_rl's waiting threads spin briefly and then sleep, and its processes
  keep freed memory (`train.py` sets both); TRL can be measured with sleeping threads, with spinning
  ones, and with the thread and memory settings of `train.py`; each workload lists the settings used.
  bfloat16 weights under AdamW at 1e-6 hardly change (updates are rounded away); they still count as a tuning.
  With LoRA TRL trains other parameters, so it is used for no ratio.
- **The limit.** Matrix rate and memory bandwidth are measured first, again for each command, since the cores of a
  shared machine are not always equally fast. The bound of a step is the time of its minimal work at these rates
  (`scripts/bench/bounds.py` has the formulas); the share of the limit is the bound divided by the seconds. MFU counts
  useful FLOPs of the training only, of every row from its first token on: if rows share a prompt that is computed once,
  it may exceed 100 %. HFU counts executed FLOPs of the whole step, MBU the bytes that decoding must read.
"""

NOT_YET = "*Not yet run here.* The command above writes the results."

ON_ONE_GPU = """\
`bash scripts/gpu/prove.sh OUT` is the test that needs a real GPU: at most nine minutes, without a network,
on a machine that has PyTorch, transformers and Lightning (`scripts/gpu/wheels.sh`, run elsewhere, collects the rest).
It runs each stage in its own process with its own time limit, and compares the results with bounds that were fixed
before any GPU was used. In a checkout without git history, `PROOF_COMMIT` names the commit. `make bench-gpu` runs it
from `.venv`, and writes this section.
"""
NO_CARD = """\
**The test has not run on a GPU yet: no statement of this site about a GPU's speed or memory was measured on one.** vLLM
on a GPU is not part of the test.

The test was rehearsed: `PROOF_SMALL=1 PRETEND=2 bash scripts/gpu/prove.sh OUT`, small shapes on the tests' simulated
GPU, with the CPU's kernels, on two cores with other load (2026-11-28; Python 3.11.7, torch 2.13.0,
transformers 5.19.0, lightning 2.6.6, trl 1.16.0). This shows only that the stages run, not that they pass on a GPU.

| stage | seconds of the rehearsal | checks passed | not run | time limit on a GPU, seconds |
|---|---|---|---|---|
| imports before the first | 12 | | | 25 |
| machine | 4 | | | 30 |
| sound | 66 | 36 of 36 | 0 | 70 |
| kernels | 48 | 46 of 46 | 12: CUDA kernels, NCCL, Triton | 75 |
| main_command | 21 | 1 of 1 | 1: Triton | 120 |
| trl (on the CPU) | 19 | 1 of 1 | 0 | 110 |
| figures | 37 | | 0 | 60 |
| step_trace | 18 | | 1: a profile needs a GPU | 45 |
"""


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page.

    Args:
        results: "cpu" is what `run` writes, "gpu" the files of the proof by stage (`gpu.read_stages`).
    """
    cpu = "\n".join(_kind(results["cpu"], "cpu")) if "cpu" in results else NOT_YET + "\n"
    gpu = markdown(results["gpu"]) if results.get("gpu") else NO_CARD
    return "\n".join([HEAD, f"## On a CPU\n\n{cpu}", f"## On one GPU\n\n{ON_ONE_GPU}\n{gpu}", METHOD])


def _kind(run: Mapping[str, Any], kind: str) -> Iterator[str]:
    if run["suite"] == "smoke":
        yield "**A smoke run: it only shows that the benchmark runs, its figures mean nothing.**\n"
    yield from _machine(run)
    whole = [result for result in run["benchmarks"] if result["series"] is None]
    compared = [result for result in whole if summary.is_compared(result)]
    if compared:
        yield from _overview(compared)
        yield f"![Times as fast as TRL](images/benchmarks/{kind}_ratios.png)\n"
    for result in whole:
        yield from _benchmark(result)
    for axis in ("completions", "tokens"):
        if points := summary.series(run["benchmarks"], axis):
            yield from _series(points, axis)
            yield f"![Cost against {axis}](images/benchmarks/{kind}_{axis}.png)\n"


def _machine(run: Mapping[str, Any]) -> Iterator[str]:
    machine = run["machine"]
    flags = ", ".join(name for name, there in machine["flags"].items() if there) or "none of the relevant flags"
    missing = ", ".join(name for name, there in machine["flags"].items() if not there)
    flags += f"; without {missing}" if missing else ""
    rates = ", ".join(_rates(machine))
    name = machine["processor"]
    yield (
        f"{name}, {machine['cores']} cores ({flags}), {machine['memory'] / 1e9:.0f} GB; "
        f"{run['threads']} threads. torch {machine['torch']}, transformers {run['versions']['transformers']}, "
        f"TRL {run['versions']['trl']}.\n"
    )
    yield (
        f"Measured first: {rates}; {machine['copy'] / 1e9:.1f} GB/s copied, {machine['read'] / 1e9:.1f} GB/s read.\n"
    )


def _overview(results: Sequence[Result]) -> Iterator[str]:
    """Yield a row for each of our contenders that has every technique on."""
    columns = ("", "", "s per step", "TRL default / lit_rl", "TRL tuned / lit_rl", "by CPU time")
    yield f"| {' | '.join((*columns, 'peak memory / TRL default', 'rounds', 'commit'))} |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for result in results:
        default, tuned = summary.default(result), summary.tuned(result)
        assert default is not None and tuned is not None
        for number, ours in enumerate(summary.ours(result)):
            theirs = [_ratio(summary.ratio(result, name, ours)) for name in (default, tuned)]
            cpu = [f"{summary.ratio(result, name, ours, 'cpu').middle:.2f}" for name in (default, tuned)]
            memory = summary.peak(result, ours) / summary.peak(result, default)
            yield (
                f"| {'' if number else result['workload']['name']} | {ours} "
                f"| {summary.spread(result, ours).middle:.2f} | {' | '.join(theirs)} | {', '.join(cpu)} "
                f"| {memory:.2f} | {result['rounds']} | {_commit(result)} |"
            )
    yield ""


def _commit(result: Result) -> str:
    """Return the commit that was measured, with a plus where files differed from it."""
    code = result.get("code") or {}
    return f"{code['commit'][:9]}{'+' if code['changed'] else ''}" if code.get("commit") else "unknown"


def _benchmark(result: Result) -> Iterator[str]:
    workload = Workload(**result["workload"])
    yield f"### {workload.name}\n"
    yield _described(workload, result)
    yield from _contenders(result)
    yield from _ablations(result)
    yield from _gate(result)
    yield from _settings(result)


def _described(workload: Workload, result: Result) -> str:
    longest = f"{'up to ' * (workload.lengths == 'variable')}{workload.completion_tokens}"
    what = {
        "grpo": f"{workload.prompts} prompts of {workload.prompt_tokens} tokens x {workload.group} completions of "
        f"{longest}",
        "dpo": f"{workload.prompts} pairs, prompts of {workload.prompt_tokens} tokens, completions of {longest}",
        "sft": f"{workload.prompts} texts, prompts of {workload.prompt_tokens} tokens, completions of {longest}",
    }[workload.method]
    if workload.places is not None:
        what += f", {workload.places} decoded at a time"
    if workload.slow_rewards:
        what += f", rewards that take {1000 * SLOW_SECONDS:.0f} ms per completion"
    if workload.micro_batches is not None:
        what += f", {workload.micro_batches} micro-batches per step"
    loud, turns = summary.noisy(result, FOREIGN)
    rounds = f"{_count(result['rounds'], 'round')} of {_count(result['steps'], 'step')}"
    waits = "processes wait between their turns" if result["resident"] else "each turn is a fresh process"
    rates = " and ".join(_rates(result["rates"]))
    return (
        f"{workload.method.upper()}, shape {workload.shape}: {what}. {rounds}, alternating, after {result['warmups']} "
        f"for warm-up; {waits}; {result['minutes']:.0f} minutes. The machine reached {rates}. Other processes took "
        f"over {FOREIGN:.0%} of the processor in {loud} of {turns} turns; load average {result['load'][0]:.1f} before "
        f"and {result['load'][1]:.1f} after. {result['date']}, commit {_commit(result)}.{_counted(result)}\n"
    )


def _rates(machine: Mapping[str, Any]) -> list[str]:
    return [f"{value / 1e9:,.0f} GFLOP/s in {name}" for name, value in machine["flops"].items()]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _counted(result: Result) -> str:
    """Return which settings of TRL the ratios are over."""
    default, tuned = summary.default(result), summary.tuned(result)
    return f' "TRL default" is `{default}`, "TRL tuned" `{tuned}`.' if default and tuned else ""


def _contenders(result: Result) -> Iterator[str]:
    tokens, bound = summary.generated_tokens(result), summary.limit(result, result["rates"])
    columns = ("", "s per step (rounds)", "middle half of steps", "CPU s", "generate, reward, train, optimize")
    more = ("tokens/s generated, trained", "peak GB", "of the limit", "MFU, HFU, MBU")
    yield f"| {' | '.join((*columns, *more))} |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, one in result["contenders"].items():
        if one["technique"] is not None:
            continue
        parts, share = summary.phases(result, name), summary.shares(result, name, result["rates"])
        split = ", ".join(f"{parts[phase]:.2f}" for phase in ("generate", "reward", "train", "optimize"))
        low, high = summary.quartiles(result, name)
        rates = [tokens / parts["generate"] if tokens else None, summary.trained_tokens(result) / parts["train"]]
        yield (
            f"| {name} | {_seconds(summary.spread(result, name))} | {low:.3g} to {high:.3g} "
            f"| {summary.spread(result, name, 'cpu').middle:.2f} | {split} "
            f"| {', '.join('-' if rate is None else f'{rate:,.0f}' for rate in rates)} | {_memory(result, name)} "
            f"| {share.step:.1%} | {', '.join(map(_share, (share.mfu, share.hfu, share.mbu)))} |"
        )
    yield (
        f"\nThe bound is {bound.step:.3g} s: prefill {bound.prefill:.2g}, decode {bound.decode:.2g}, train "
        f"{bound.train:.2g}, reference {bound.reference:.2g}, optimizer {bound.optimizer:.2g}.\n"
    )


def _ablations(result: Result) -> Iterator[str]:
    off = {name: one["technique"] for name, one in result["contenders"].items() if one["technique"] is not None}
    base = next((name.partition(", without: ")[0] for name in off), None)
    if base not in result["contenders"]:
        return
    yield f"| {base} without | s per step | times as slow | by CPU time | peak GB |"
    yield "|---|---|---|---|---|"
    yield f"| (all on) | {_seconds(summary.spread(result, base))} | 1 | 1 | {_memory(result, base)} |"
    for name, technique in off.items():
        cpu = summary.ratio(result, name, base, "cpu").middle
        yield (
            f"| {technique} | {_seconds(summary.spread(result, name))} | {_ratio(summary.ratio(result, name, base))} "
            f"| {cpu:.2f} | {_memory(result, name)} |"
        )
    yield ""


def _gate(result: Result) -> Iterator[str]:
    yield "| gate | dtype | log-probs, nats | 1 - cosine of gradients | norms | loss | first step after, s |"
    yield "|---|---|---|---|---|---|---|"
    for name, one in result["contenders"].items():
        found = one["gate"]
        far = {key: "" if found[key] is None else f"{found[key]:.1e}" for key in ("logprobs", "norm", "loss")}
        cosine = "" if found["cosine"] is None else f"{max(0.0, 1 - found['cosine']):.1e}"
        yield (
            f"| {name} | {one['dtype']} | {far['logprobs']} | {cosine} | {far['norm']} | {far['loss']} "
            f"| {one['first_step']:.0f} |"
        )
    yield ""
    widest = max((one["gate"].get("allowed", 0.0) for one in result["contenders"].values()), default=0.0)
    if widest > LIMITS["bfloat16"].logprobs:
        yield (
            f"Here the gate was wider than [in other workloads](#how-it-is-measured): {widest:.1e} nats in bfloat16, "
            f"1.5 times the deviation of TRL itself, instead of {LIMITS['bfloat16'].logprobs:.0e}.\n"
        )


def _settings(result: Result) -> Iterator[str]:
    yield "Settings in addition to the workload's:\n"
    for name, one in result["contenders"].items():
        parts = [
            json.dumps(one["settings"][key], sort_keys=True) for key in ("config", "lora") if key in one["settings"]
        ]
        told = " and LoRA ".join(parts) or " ".join(one["settings"]["overrides"])
        yield f"- {name}: {f'`{told}`' if told not in ('', '{}') else 'none'}"
    yield ""


def _series(points: Sequence[Result], axis: str) -> Iterator[str]:
    names = list(points[0]["contenders"])
    yield f"### Cost against {axis}\n"
    yield f"| {axis} | {' | '.join(f'{name}: s per step, peak GB' for name in names)} |"
    yield "|---|" + "---|" * len(names)
    for point in points:
        cells = [f"{summary.spread(point, name).middle:.2f}, {_memory(point, name)}" for name in names]
        yield f"| x {point['factor']} | {' | '.join(cells)} |"
    yield ""


def _seconds(value: Spread) -> str:
    return f"{value.middle:.3g} ({value.low:.3g} to {value.high:.3g})"


def _ratio(value: Spread) -> str:
    return f"**{value.middle:.2f}** ({value.low:.2f} to {value.high:.2f})"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _memory(result: Result, name: str) -> str:
    return f"{summary.peak(result, name) / 1e9:.2f}"


def write(results: Path = RESULTS, path: Path = PAGE, pictures: Path = PICTURES) -> None:
    """Write the page and its pictures, from the results that are there."""
    file = results / "cpu.json"
    runs = {"cpu": json.loads(file.read_text())} if file.is_file() else {}
    path.write_text(page(runs | {"gpu": read_stages(results / "gpu")}))
    if runs:
        draw(runs["cpu"]["benchmarks"], pictures, "cpu")


# --------------------------------------------------------------- pictures: times as fast as TRL, and cost against work


def draw(results: Sequence[Result], folder: Path, kind: str) -> None:
    """Draw all pictures that these results are enough for, as `KIND_NAME.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    look()
    compared = [result for result in results if result["series"] is None and summary.is_compared(result)]
    if compared:
        _ratios(compared, folder / f"{kind}_ratios.png")
    for axis in ("completions", "tokens"):
        if points := summary.series(results, axis):
            _cost(points, axis, folder / f"{kind}_{axis}.png")


def _ratios(results: Sequence[Result], path: Path) -> None:
    """Draw TRL's seconds over ours in float32, and with bf16-true: a pair of bars for each workload."""
    there = [name for name in (OURS, BF16_TRUE) if any(name in result["contenders"] for result in results)]
    if not there:
        return
    size = (2.5 + 4.5 * len(there), 1.2 + 0.7 * len(results))
    figure, panels = plt.subplots(
        1, len(there), figsize=size, layout="constrained", sharex=True, sharey=True, squeeze=False
    )
    for axes, ours in zip(panels[0], there):
        _bars(axes, results, ours)
    panels[0][0].set_yticks(range(len(results)), [result["workload"]["name"] for result in results])
    panels[0][0].invert_yaxis()
    panels[0][0].legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _bars(axes: Axes, results: Sequence[Result], ours: str) -> None:
    """Draw TRL's seconds, as it comes and tuned, over those of one contender of ours, with the rounds' range."""
    for offset, color, label, which in (
        (-0.19, BLUE, "TRL default", summary.default),
        (0.19, ORANGE, "TRL tuned", summary.tuned),
    ):
        for place, result in enumerate(results):
            theirs = which(result)
            if theirs is None or ours not in result["contenders"]:
                continue
            found = summary.ratio(result, theirs, ours)
            error = [[max(0.0, found.middle - found.low)], [max(0.0, found.high - found.middle)]]
            axes.barh(place + offset, found.middle, 0.36, xerr=error, color=color, ecolor=INK, capsize=3, label=label)
            label = None
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set_xlabel(f"seconds a step over those of\n{ours} (range over rounds)")
    styled(axes, "x", behind=False)


def _cost(points: Sequence[Result], axis: str, path: Path) -> None:
    """Draw seconds a step and peak memory against the amount of work."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    factors = [point["factor"] for point in points]
    for name, color in zip(points[0]["contenders"], (GREY, ORANGE, BLUE, GREEN)):
        seconds = [summary.spread(point, name).middle for point in points]
        memory = [summary.peak(point, name) / 1e9 for point in points]
        left.plot(factors, seconds, "o-", color=color, label=name)
        right.plot(factors, memory, "o-", color=color)
    left.set_ylabel("seconds a step")
    right.set_ylabel("peak memory, GB")
    for axes in (left, right):
        axes.set_xlabel(f"times the {axis}")
        axes.set_xticks(factors)
        axes.set_ylim(bottom=0)
        styled(axes, "y", behind=False)
    left.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    write()
