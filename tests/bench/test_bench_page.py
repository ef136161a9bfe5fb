"""docs/benchmarks.md is what the results say, and says so where there are none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from bench import page
from bench.run import merged
from bench.suites import C1, DEFAULT, DPO, OURS
from bench_results import contender, result, run
from gpu.prove import read_stages


def test_the_page_is_what_its_results_make() -> None:
    runs = {"cpu": json.loads((page.RESULTS / "cpu.json").read_text()), "gpu": read_stages(page.RESULTS / "gpu")}
    assert page.PAGE.read_text() == page.page(runs), "run: PYTHONPATH=scripts python -m bench.page"


def test_the_page_of_a_run(tmp_path: Path) -> None:
    who = {
        "TRL, float32": contender([[6.0] * 3, [6.0] * 3], side="peer", role="tuned"),
        DEFAULT: contender([[8.0] * 3, [10.0] * 3], side="peer", role="default"),
        OURS: contender([[2.0] * 3, [2.0] * 3]),
        f"{OURS}, without: tricks": contender([[3.0] * 3, [3.0] * 3], technique="tricks"),
    }
    who[f"{OURS}, without: tricks"]["settings"]["overrides"].append("c=d")
    more = [result(replace(C1, prompts=4 * n), {OURS: who[OURS]}, series="completions", factor=n) for n in (8, 1)]
    found = run(result(C1, who), result(DPO, who), *more)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "cpu.json").write_text(json.dumps(found))
    page.write(tmp_path / "results", tmp_path / "page.md", tmp_path / "pictures")
    text = (tmp_path / "page.md").read_text()
    assert (
        "| C1, prompt 64 | lit_rl, float32 | 2.00 | **4.50** (4.00 to 5.00) | **3.00** (3.00 to 3.00) | 1.00 |" in text
    )
    assert "| generate, train, optimize: s |" in text and "| TRL default | 9 (8 to 10) | 4.50, 3.60, 0.90 |" in text
    assert "| TRL tuned | 6 (6 to 6) |" in text and '- TRL, default: `{"bf16": false}`' in text
    assert "| tricks | `c=d` | 3 | **1.50** (1.50 to 1.50) | 1.00 |" in text
    assert "avx512_bf16; without amx_bf16" in text and "took over 5% of the processor in 4 of 8 turns" in text
    assert text.index("| x 1 |") < text.index("| x 8 |")
    assert page.NO_CARD in text, "there is no result of a GPU"
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert names == {"cpu_ratios.png", "cpu_completions.png"}
    assert all(name in text for name in names)


def test_a_benchmark_that_was_not_measured_anew_stays() -> None:
    earlier = run(result(C1, {OURS: contender([[2.0]])}), result(DPO, {OURS: contender([[2.0]])}))
    found = merged(run(result(C1, {OURS: contender([[1.0]])})), earlier)
    seconds = {one["workload"]["name"]: page.spread(one, OURS).middle for one in found["benchmarks"]}
    assert seconds == {"C1, prompt 64": 1.0, "C3, DPO": 2.0}
    other = earlier | {"machine": earlier["machine"] | {"processor": "another"}}
    assert len(merged(run(result(C1, {OURS: contender([[1.0]])})), other)["benchmarks"]) == 1


def test_a_benchmark_that_stays_is_held_against_the_machine_of_its_own_time() -> None:
    one = result(C1, {OURS: contender([[2.0]])})
    before = page.page({"cpu": run(one)})
    slower = run(result(DPO, {OURS: contender([[2.0]])}))
    slower["machine"] = slower["machine"] | {"flops": {"float32": 2e10, "bfloat16": 4e10}}
    after = page.page({"cpu": merged(slower, run(one))})
    part = before.partition("### C1, prompt 64")[2].partition("###")[0]
    assert part and after.partition("### C1, prompt 64")[2].partition("###")[0] == part


def test_a_wider_gate_and_code_that_differs_from_its_commit_are_told() -> None:
    deep, code = contender([[2.0]]), {"commit": "0123456789abcdef", "changed": True}
    text = page.page({"cpu": run(result(C1, {OURS: deep}, code=code))})
    assert "commit 012345678+." in text and "the gate was wider" not in text
    deep["gate"]["allowed"] = 3e-2
    assert "wider than [in other workloads](#how-it-is-measured): 3.0e-02 nats in bfloat16" in page.page(
        {"cpu": run(result(C1, {OURS: deep}))}
    )


def test_a_smoke_run_is_marked() -> None:
    found = run(result(C1, {OURS: contender([[2.0]])}), suite="smoke")
    assert "its figures mean nothing" in page.page({"cpu": found})
    assert "its figures mean nothing" not in page.page({"cpu": run(*found["benchmarks"])})
