"""docs/benchmarks.md and its pictures, made of the results: nothing on it is typed by hand.

    PYTHONPATH=scripts python -m bench.page

A contender's seconds are the median over rounds of the median step of each; a ratio is one of such medians, and its
interval the lowest and highest ratio of a round.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.prove import markdown, read_stages
from matplotlib.axes import Axes
from run_curves import BLUE, GREEN, GREY, INK, ORANGE, look, plt, styled

from bench.bounds import LIMITS, Bound, Work
from bench.suites import BF16_TRUE, OURS
from bench.workload import SLOW_SECONDS, Workload

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "benchmarks.md"
RESULTS = DOCS / "benchmarks"
"""Results as JSON: `cpu.json`, and in `gpu` a file a stage of the proof; pictures stand in `docs/images/benchmarks`."""
PICTURES = DOCS / "images" / "benchmarks"

# --------------------------------------------------------------------------------- medians, ratios, shares of the limit


FOREIGN = 0.05
"""Share of the processor that others may take in a turn."""

Result = Mapping[str, Any]
"""One benchmark, as `Turns.run` gives it."""


@dataclass(frozen=True)
class Spread:
    """A number, and the lowest and highest of its rounds."""

    middle: float
    low: float
    high: float


def of_rounds(result: Result, name: str, what: str = "seconds") -> dict[int, float]:
    """Return the median step of each round."""
    return {turn["round"]: statistics.median(turn[what]) for turn in result["contenders"][name]["turns"]}


def spread(result: Result, name: str, what: str = "seconds") -> Spread:
    """Return seconds of a step, or CPU seconds."""
    rounds = list(of_rounds(result, name, what).values())
    return Spread(statistics.median(rounds), min(rounds), max(rounds))


def ratio(result: Result, slower: str, faster: str, what: str = "seconds") -> Spread:
    """Return how many times as long one takes."""
    a, b = of_rounds(result, slower, what), of_rounds(result, faster, what)
    rounds = [a[number] / b[number] for number in a if number in b]
    middle = statistics.median(a.values()) / statistics.median(b.values())
    return Spread(middle, min(rounds), max(rounds))


def fastest(result: Result, *roles: str) -> str | None:
    """Return the name of the peer's fastest setting of some roles, "default" or "tuned"; None where none takes part."""
    names = [name for name, one in result["contenders"].items() if one["role"] in roles]
    return min(names, key=lambda name: spread(result, name).middle) if names else None


def default(result: Result) -> str | None:
    """Return the peer as it comes: the fastest of its ways to wait."""
    return fastest(result, "default")


def tuned(result: Result) -> str | None:
    """Return the fastest of all settings of the peer, the default too."""
    return fastest(result, "default", "tuned")


def ours(result: Result) -> list[str]:
    """Return our contenders with every technique on."""
    return [name for name, one in result["contenders"].items() if one["side"] == "ours" and one["technique"] is None]


def is_compared(result: Result) -> bool:
    """Return whether ours and the peer as it comes both take part."""
    return bool(ours(result)) and default(result) is not None


def phases(result: Result, name: str) -> dict[str, float]:
    """Return median seconds of each phase; "train" is what is left of the step."""
    one = result["contenders"][name]
    steps = [(s, p) for turn in one["turns"] for s, p in zip(turn["seconds"], turn["phases"])]
    names = ("generate", "reward", "optimize")
    found = {phase: statistics.median(p.get(phase, 0.0) for _, p in steps) for phase in names}
    return found | {"train": statistics.median(s - sum(p.values()) for s, p in steps)}


def peak(result: Result, name: str) -> float:
    """Return highest memory of any turn, bytes."""
    return max(turn["peak"] for turn in result["contenders"][name]["turns"])


def work_of(result: Result) -> list[Work]:
    """Return what each of the timed rollouts asked for."""
    workload = Workload(**result["workload"])
    first = result["warmups"]
    count = result["steps"] if workload.lengths == "variable" else 1
    return [Work.of(workload, first + number) for number in range(count)]


def limit(result: Result, machine: Mapping[str, Any]) -> Bound:
    """Return the bound of the median rollout."""
    bounds = [work.bound(*best_rates(machine)) for work in work_of(result)]
    return sorted(bounds, key=lambda bound: bound.step)[len(bounds) // 2]


def best_rates(machine: Mapping[str, Any]) -> tuple[float, float]:
    """Return FLOP/s and bytes/s, the best that were measured."""
    return max(machine["flops"].values()), max(machine["copy"], machine["read"])


def share_of_limit(result: Result, name: str, machine: Mapping[str, Any]) -> float:
    """Return the bound of a contender's step over its seconds."""
    return limit(result, machine).step / spread(result, name).middle


def noisy(result: Result, allowed: float) -> tuple[int, int]:
    """Count turns in which others took more of the processor, and all turns."""
    turns = [turn for one in result["contenders"].values() for turn in one["turns"]]
    return sum(turn["foreign"] > allowed for turn in turns), len(turns)


def series(results: Sequence[Result], axis: str) -> list[Result]:
    """Return the points of cost against work, the least work first."""
    return sorted((r for r in results if r["series"] == axis), key=lambda r: r["factor"])


# ------------------------------------------------------------------------------------------------------------- the page


HEAD = (
    """\
# Benchmarks

{answer}Whole optimizer steps, with the same model, prompts, lengths, rewards, optimizer and loss, alternating on one
machine. The benchmark generates this page from its results in `docs/benchmarks/`.

| command | what it measures | time |
|---|---|---|
"""
    "| `make bench` | GRPO with 6 million weights, 4 prompts x 8 completions, 64 + 64 tokens; each technique switched "
    "off in turn | under 20 minutes on two quiet cores, estimated |\n"
    "| `make bench-full` | the same, and longer prompts, variable lengths, half-dead groups, the 0.5B shape, DPO, SFT, "
    "small decoding batches, slow rewards, micro-batches, two processes, scaling | about five hours, estimated |\n"
    "| `make bench-gpu` | the test on one GPU | at most nine minutes |\n"
    """
Some workloads and contenders only, in fewer rounds (`--list` prints their names; see `bench.run --help`):

```text
PYTHONPATH=scripts .venv/bin/python -m bench.run full --peer-python .venv-peer/bin/python --kept --rounds 2 --steps 3 \\
    --only "C1, prompt 64" DPO SFT --contenders "TRL, default" "threads and memory as train.py's" "lit_rl, float32"
```
"""
)

METHOD = f"""\
## How it is measured

- **Workloads.** C1 is GRPO with 6 million weights, C2 the 0.5B shape, C3 a data set, M1 two processes. Weights are
  random. Every completion ends at a length from a file: *fixed* lengths are equal, *variable* ones lognormal. In
  *half-dead* workloads every second prompt has equal rewards in its group.
- **Same result.** Every contender takes its first step on given completions. Its log-probs must be within 1e-4 nats of
  TRL's in float32, 2e-2 in bfloat16 (or 1.5 times TRL's own deviation, where that is more), with a cosine of gradients
  of at least 0.999; otherwise the workload has no results. With LoRA no gradient is compared, and for pairs and texts
  no log-probs.
- **Turns.** Contenders alternate (A B C, then C B A), with pinned threads and after warm-up. A result is the median
  over turns of their median step; a ratio has the lowest and highest ratio of a round in brackets. A round in which
  other processes took over {FOREIGN:.0%} of the processor is repeated, once or twice at most. Rows may be from
  different commits (a plus: uncommitted changes), never from different machines.
- **lit_rl** has the defaults of `train.py`, and what its name says.
- **TRL.** "default" is its default config, which computes in bfloat16 (on a processor without bfloat16 units:
  float32). "tuned" is the fastest of all settings measured, including the default. In bfloat16 weights under AdamW at
  1e-6 most updates are rounded away; such a setting still counts. With LoRA TRL trains other parameters, so it is
  used for no ratio.
- **The limit** is the time of the minimal work of a step at the measured matrix rate and memory bandwidth
  (`scripts/bench/bounds.py`). "Of the limit" is that time divided by the seconds.
"""

NOT_YET = "*Not yet run here.* The command above writes the results."

ON_ONE_GPU = """\
`bash scripts/gpu/prove.sh OUT` tests on a real GPU whether training is sound, whether kernels equal a CPU's float32,
and how fast the 0.5B shape trains compared with TRL. It needs at most nine minutes, PyTorch, transformers and
Lightning, and no network (`scripts/gpu/wheels.sh`, run elsewhere, collects the rest). Bounds were fixed before any
GPU was used. In a checkout without git history, `PROOF_COMMIT` names the commit. `make bench-gpu` runs it from
`.venv`, and writes this section.
"""
NO_CARD = """\
**The test has not run on a GPU yet: no statement of this site about a GPU's speed or memory was measured on one.** vLLM
on a GPU is not part of the test. A rehearsal in small shapes on the tests' simulated GPU (`PROOF_SMALL=1 PRETEND=2`,
2026-11-28) shows only that its stages run.
"""


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page.

    Args:
        results: "cpu" is what `run` writes, "gpu" the files of the proof by stage (`gpu.read_stages`).
    """
    cpu = "\n".join(_kind(results["cpu"], "cpu")) if "cpu" in results else NOT_YET + "\n"
    gpu = markdown(results["gpu"]) if results.get("gpu") else NO_CARD
    measured = results["cpu"]["benchmarks"] if "cpu" in results and results["cpu"]["suite"] != "smoke" else []
    head = HEAD.format(answer=_answer(measured))
    return "\n".join([head, f"## On a CPU\n\n{cpu}", f"## On one GPU\n\n{ON_ONE_GPU}\n{gpu}", METHOD])


def _answer(results: Sequence[Result]) -> str:
    """Return how many times as fast ours is in bfloat16, over all workloads."""
    compared = [
        result
        for result in results
        if result["series"] is None and is_compared(result) and BF16_TRUE in result["contenders"]
    ]
    if not compared:
        return ""
    ranges = []
    for which in (default, tuned):
        found = sorted(ratio(result, str(which(result)), BF16_TRUE).middle for result in compared)
        ranges.append(f"{found[0]:.1f} to {found[-1]:.1f}")
    return (
        f"On the CPU below, lit_rl with `bf16-true` alone is {ranges[0]} times as fast as TRL 1.16.0 with its\n"
        f"defaults, and {ranges[1]} times as fast as TRL with the fastest settings found.\n"
    )


def _kind(run: Mapping[str, Any], kind: str) -> Iterator[str]:
    if run["suite"] == "smoke":
        yield "**A smoke run: it only shows that the benchmark runs, its figures mean nothing.**\n"
    yield from _machine(run)
    whole = [result for result in run["benchmarks"] if result["series"] is None]
    compared = [result for result in whole if is_compared(result)]
    if compared:
        yield from _overview(compared)
        yield f"![Times as fast as TRL](images/benchmarks/{kind}_ratios.png)\n"
    for result in whole:
        yield from _benchmark(result)
    yield from _settings(whole)
    for axis in ("completions", "tokens"):
        if points := series(run["benchmarks"], axis):
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
    columns = ("", "", "s per step", "TRL default / lit_rl", "TRL tuned / lit_rl", "peak memory / TRL default")
    yield f"| {' | '.join(columns)} |"
    yield "|---|---|---|---|---|---|"
    for result in results:
        plain, fast = default(result), tuned(result)
        assert plain is not None and fast is not None
        for number, name in enumerate(ours(result)):
            theirs = [_ratio(ratio(result, peer, name)) for peer in (plain, fast)]
            memory = peak(result, name) / peak(result, plain)
            yield (
                f"| {'' if number else result['workload']['name']} | {name} "
                f"| {spread(result, name).middle:.2f} | {' | '.join(theirs)} | {memory:.2f} |"
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
    loud, turns = noisy(result, FOREIGN)
    rounds = f"{_count(result['rounds'], 'round')} of {_count(result['steps'], 'step')}"
    waits = "processes wait between their turns" if result["resident"] else "each turn is a fresh process"
    reached = " and ".join(_rates(result["rates"]))
    bound = limit(result, result["rates"])
    others = f" Other processes took over {FOREIGN:.0%} of the processor in {loud} of {turns} turns." if loud else ""
    return (
        f"{workload.method.upper()}, shape {workload.shape}: {what}. {rounds}; {waits}; {result['date']}, commit "
        f"{_commit(result)}. The machine reached {reached}; the limit is {bound.step:.3g} s.{others}\n"
    )


def _rates(machine: Mapping[str, Any]) -> list[str]:
    return [f"{value / 1e9:,.0f} GFLOP/s in {name}" for name, value in machine["flops"].items()]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _label(result: Result, name: str) -> str:
    """Return the name of a contender; of the peer's two that ratios are over, what those say."""
    if name == default(result):
        return "TRL default"
    return "TRL tuned" if name == tuned(result) else name


def _contenders(result: Result) -> Iterator[str]:
    parts = {name: phases(result, name) for name, one in result["contenders"].items() if not one["technique"]}
    order = ("generate", "reward", "train", "optimize")
    there = [phase for phase in order if any(round(part[phase], 2) for part in parts.values())]
    yield f"|  | s per step (rounds) | {', '.join(there)}: s | peak GB | of the limit |"
    yield "|---|---|---|---|---|"
    for name, part in parts.items():
        split = ", ".join(f"{part[phase]:.2f}" for phase in there)
        share = share_of_limit(result, name, result["rates"])
        seconds = _seconds(spread(result, name))
        yield f"| {_label(result, name)} | {seconds} | {split} | {_memory(result, name)} | {share:.1%} |"
    yield ""


def _ablations(result: Result) -> Iterator[str]:
    off = {name: one["technique"] for name, one in result["contenders"].items() if one["technique"] is not None}
    base = next((name.partition(", without: ")[0] for name in off), None)
    if base not in result["contenders"]:
        return
    yield f"| {base} without | its switch | s per step | times as slow | peak GB |"
    yield "|---|---|---|---|---|"
    usual = result["contenders"][base]["settings"]["overrides"]
    for name, technique in off.items():
        words = [word for word in result["contenders"][name]["settings"]["overrides"] if word not in usual]
        yield (
            f"| {technique} | `{' '.join(words)}` | {spread(result, name).middle:.3g} "
            f"| {_ratio(ratio(result, name, base))} | {_memory(result, name)} |"
        )
    yield ""


def _gate(result: Result) -> Iterator[str]:
    """Yield how far the first steps were from those of TRL in float32, at most."""
    gates = [(one["dtype"], one["gate"]) for one in result["contenders"].values()]
    far: dict[str, dict[str, float]] = {"nats": {}, "by 1 - cosine of gradients": {}}
    for dtype, gate in gates:
        cosine = None if gate["cosine"] is None else max(0.0, 1 - gate["cosine"])
        for most, value in zip(far.values(), (gate["logprobs"], cosine), strict=True):
            if value is not None:
                most[dtype] = max(most.get(dtype, 0.0), value)
    furthest = [
        f"{', '.join(f'{value:.1e} ({dtype})' for dtype, value in most.items())} {what}"
        for what, most in far.items()
        if most
    ]
    yield f"Furthest from TRL in float32: {'; '.join(furthest)}."
    widest = max((one["gate"].get("allowed", 0.0) for one in result["contenders"].values()), default=0.0)
    if widest > LIMITS["bfloat16"].logprobs:
        yield (
            f"Here the gate was wider than [in other workloads](#how-it-is-measured): {widest:.1e} nats in bfloat16, "
            f"1.5 times the deviation of TRL itself, instead of {LIMITS['bfloat16'].logprobs:.0e}."
        )
    yield ""


def _settings(results: Sequence[Result]) -> Iterator[str]:
    """Yield what each contender has in addition to its workload's settings; techniques have their switch above."""
    told: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for name, one in result["contenders"].items():
            if one["technique"] is None:
                settings = one["settings"]
                parts = [json.dumps(settings[key], sort_keys=True) for key in ("config", "lora") if key in settings]
                words = " and LoRA ".join(parts) or " ".join(settings["overrides"])
                if words not in ("", "{}"):
                    told.setdefault((name, words), []).append(result["workload"]["name"])
    yield "### Settings of the contenders\n"
    yield "In addition to the workload's:\n"
    names = [name for name, _ in told]
    for (name, words), where in told.items():
        of = f" ({'; '.join(where)})" if names.count(name) > 1 else ""
        yield f"- {name}{of}: `{words}`"
    yield ""


def _series(points: Sequence[Result], axis: str) -> Iterator[str]:
    names = list(points[0]["contenders"])
    yield f"### Cost against {axis}\n"
    yield f"| {axis} | {' | '.join(f'{name}: s per step, peak GB' for name in names)} |"
    yield "|---|" + "---|" * len(names)
    for point in points:
        cells = [f"{spread(point, name).middle:.2f}, {_memory(point, name)}" for name in names]
        yield f"| x {point['factor']} | {' | '.join(cells)} |"
    yield ""


def _seconds(value: Spread) -> str:
    return f"{value.middle:.3g} ({value.low:.3g} to {value.high:.3g})"


def _ratio(value: Spread) -> str:
    return f"**{value.middle:.2f}** ({value.low:.2f} to {value.high:.2f})"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _memory(result: Result, name: str) -> str:
    return f"{peak(result, name) / 1e9:.2f}"


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
    compared = [result for result in results if result["series"] is None and is_compared(result)]
    if compared:
        _ratios(compared, folder / f"{kind}_ratios.png")
    for axis in ("completions", "tokens"):
        if points := series(results, axis):
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
        (-0.19, BLUE, "TRL default", default),
        (0.19, ORANGE, "TRL tuned", tuned),
    ):
        for place, result in enumerate(results):
            theirs = which(result)
            if theirs is None or ours not in result["contenders"]:
                continue
            found = ratio(result, theirs, ours)
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
        seconds = [spread(point, name).middle for point in points]
        memory = [peak(point, name) / 1e9 for point in points]
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
