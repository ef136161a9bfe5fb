"""Bounds against cases worked out by hand, medians and ratios, and what a workload asks for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench import bounds, page, workload
from bench.bounds import Dims, Work
from bench.ours import overrides
from bench.suites import (
    BF16_TRUE,
    BFLOAT16,
    C1,
    DEFAULT,
    LIKE_OURS,
    OURS,
    REFERENCE,
    SPINNING,
    SUITES,
    SWITCHES,
    ablations,
    bench,
    full,
    only,
    ours,
    peers,
)
from bench.workload import SHORTEST, Spec, Workload, write
from bench_results import MACHINE, contender, result
from composed_configs import config_of
from hydra._internal import hydra

from lit_rl.cli.hydra_start import load_checked
from lit_rl.core import upstream

HAND = Dims(backbone=10, head=4, layers=1, query_width=2, kv_width=1)
"""One prompt of 2 tokens and completions of 1 and 2 stand beside it."""


def test_decoding_reads_a_prompt_once_and_only_rows_that_go_on() -> None:
    # 2 bytes x 14 weights; keys and values of a token: 2 x 1 layer x 1 wide x 2 bytes = 4
    assert bounds.decode_bytes(HAND, 1, 2, [1, 2]) == [28 + 4 * (2 + 2 * 1), 28 + 4 * (2 + 1 * 2)]
    # a row: 2 x 14, and 4 x 1 layer x 2 wide for each token that it attends to
    assert bounds.decode_flops(HAND, 2, [1, 2]) == [2 * (28 + 8 * 3), 1 * (28 + 8 * 4)]


def test_training_flops_of_a_shared_and_of_a_repeated_prompt() -> None:
    # 4 x 1 layer x 2 wide a pair: 1 + 2 of the prompt; 3; 3 + 4
    attention = 8 * (1 + 2) + 8 * 3 + 8 * (3 + 4)
    assert bounds.train_flops(HAND, 1, 2, [1, 2], shared=True) == 60 * (2 + 3) + 24 * 3 + 3 * attention
    repeated = attention + 8 * (1 + 2)
    assert bounds.train_flops(HAND, 1, 2, [1, 2], shared=False) == 60 * (2 + 1 + 2 + 2) + 24 * 3 + 3 * repeated


def test_a_step_is_bound_by_bytes_or_by_flops_token_by_token() -> None:
    work = Work(HAND, 1, 2, [1, 2], [1, 2], 1, generates=True, reads_reference=True)
    found = work.bound(flops=10.0, bytes_=4.0)  # tokens: 44 bytes are 11 s beside 10.4 s, and 11 s beside 6 s
    train = work.train_flops / 10
    assert found.decode == pytest.approx(11 + 11)
    assert (found.prefill, found.train, found.reference, found.optimizer) == (4, train, train / 3, 30 * 14 / 4)
    assert found.step == pytest.approx(4 + 22 + train * 4 / 3 + 105)
    assert work.bound(flops=1.0, bytes_=4.0).decode == pytest.approx(104 + 60)


def test_the_published_case_of_half_a_billion_parameters() -> None:
    """32 prompts of 128 tokens x 8 completions of 512 on 790 TFLOP/s and 4.3 TB/s, as worked out in the protocol."""
    dims, lengths = Dims.of("0.5b"), [512] * 256
    assert (round(dims.backbone / 1e6, 1), round(dims.head / 1e6, 1), dims.kv_bytes) == (357.9, 136.1, 12_288)
    assert bounds.train_flops(dims, 32, 128, lengths, shared=False) == pytest.approx(472e12, rel=0.002)
    assert bounds.train_flops(dims, 32, 128, lengths, shared=True) == pytest.approx(410e12, rel=0.002)
    found = Work(dims, 32, 128, lengths, lengths, 32, generates=True, reads_reference=False).bound(790e12, 4.3e12)
    assert 1e3 * found.prefill == pytest.approx(4, abs=0.5)
    assert found.decode == pytest.approx(0.22, abs=0.01)
    assert found.train == pytest.approx(0.52, abs=0.005)
    assert 1e3 * found.optimizer == pytest.approx(3.4, abs=0.1)


def test_the_sizes_are_those_of_the_model_that_is_written(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    work = Workload("w", shape="tiny", prompts=2, group=3, prompt_tokens=5, completion_tokens=9, lengths="variable")
    write(work, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert Dims.of("tiny").total == sum(parameter.numel() for parameter in model.parameters())
    given, lengths = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("given", "lengths"))
    assert [len(ids) for ids in given] == lengths[0] and len({tuple(ids) for ids in given}) == work.rows
    for ids in given:
        assert (ids[-1] == 0) == (len(ids) < 9) and 0 not in ids[:-1]


def test_variable_lengths_have_the_mean_that_they_should() -> None:
    work = Workload("w", prompts=4, group=8, completion_tokens=200, lengths="variable")
    drawn = [length for number in range(60) for length in work.lengths_of(number)]
    assert min(drawn) >= SHORTEST and max(drawn) <= 200
    assert sum(drawn) / len(drawn) == pytest.approx(0.4 * 200, rel=0.06)
    assert work.lengths_of(3) == work.lengths_of(3) != work.lengths_of(4)


def test_a_dead_group_is_generated_and_not_trained() -> None:
    work, dead = (Work.of(Workload("w", shape="tiny", dead=dead), 1) for dead in (False, True))
    assert dead.train_flops == pytest.approx(work.train_flops / 2)
    assert dead.useful_flops == work.useful_flops and dead.bound(1e11, 1e10).decode == work.bound(1e11, 1e10).decode


def test_figures_are_medians_of_medians_and_ranges_are_of_rounds() -> None:
    found = result(
        C1,
        {
            DEFAULT: contender([[8, 9, 100], [10, 10, 10]], side="peer", role="default"),
            "tuned a": contender([[4, 4, 4], [6, 6, 6]], side="peer", role="tuned"),
            "tuned b": contender([[9, 9, 9], [9, 9, 9]], side="peer", role="tuned"),
            OURS: contender([[2, 3, 3], [2, 2, 50]]),
        },
    )
    assert page.of_rounds(found, OURS) == {0: 3, 1: 2}
    assert page.spread(found, DEFAULT) == page.Spread(9.5, 9, 10)
    assert page.ratio(found, DEFAULT, OURS) == page.Spread(9.5 / 2.5, 9 / 3, 10 / 2)
    assert page.ratio(found, DEFAULT, OURS, "cpu") == page.ratio(found, DEFAULT, OURS)
    assert page.spread(found, OURS, "cpu").middle == 5
    assert page.tuned(found) == "tuned a" and page.default(found) == DEFAULT and page.ours(found) == [OURS]
    assert page.tuned(result(C1, {OURS: contender([[1, 1, 1]])})) is None
    assert page.peak(found, OURS) == 1e9 + 1
    assert page.noisy(found, 0.05) == (4, 8)


def test_the_tuned_peer_is_its_fastest_of_all() -> None:
    quick, slow = (contender([[seconds]], side="peer", role=role) for seconds, role in ((2, "default"), (3, "tuned")))
    other = contender([[1]], side="peer")  # trains something else
    assert page.tuned(result(C1, {"quick": quick, "slow": slow, "other": other})) == "quick"


def test_the_share_of_the_limit() -> None:
    found = result(C1, {OURS: contender([[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]])})
    assert page.phases(found, OURS) == pytest.approx({"generate": 1, "reward": 0, "optimize": 0.2, "train": 0.8})
    share = page.share_of_limit(found, OURS, MACHINE)
    assert share == pytest.approx(Work.of(C1, 2).bound(1e11, 1e10).step / 2)


def test_every_suite_begins_with_a_reference_and_names_each_once() -> None:
    for suite in SUITES.values():
        for benchmark in suite(BFLOAT16):
            names = [one.name for one in benchmark.contenders]
            assert len(set(names)) == len(names) and benchmark.contenders[0].dtype == "float32", benchmark.workload
    assert [one.name for one in peers(C1, [DEFAULT])] == ["TRL, float32", DEFAULT]


def test_each_comparison_has_the_fastest_tuning_that_is_known_and_both_precisions() -> None:
    for benchmark in full():
        names = {one.name for one in benchmark.contenders}
        if DEFAULT in names and benchmark.series is None:
            assert {LIKE_OURS, SPINNING, OURS, BF16_TRUE} <= names, benchmark.workload
        for one in benchmark.contenders:
            said = " ".join(one.settings(benchmark.workload).get("overrides", []))
            assert one.side == "peer" or said.count("trainer.precision=") == 1, "its precision is named"


def test_some_contenders_of_a_benchmark_and_the_reference_without_turns() -> None:
    (whole,) = bench()
    few = only(whole, [DEFAULT, "as train.py's", BF16_TRUE])
    assert [one.name for one in few.contenders] == [DEFAULT, LIKE_OURS, BF16_TRUE]
    assert few.reference is not None and few.reference.name == REFERENCE
    assert only(whole, [REFERENCE, "without: head"]).reference is None
    assert len(only(whole, ["without: head"]).contenders) == 1 and not only(whole, ["nobody"]).contenders


def test_an_ablation_is_ours_and_one_override_more() -> None:
    base = ours("mine", "a=b", dtype="bfloat16")
    found = ablations(C1, base)
    there = [switch for switch in SWITCHES if switch.only is None]
    assert [one.technique for one in found] == [switch.technique for switch in there]
    for one, switch in zip(found, there):
        assert one.settings(C1)["overrides"] == ["a=b", *switch.off] and one.dtype == "bfloat16"


ALGO = {"grpo": ["algo=grpo"], "dpo": ["algo=dpo", "data=preferences"], "sft": ["algo=sft", "data=texts"]}


@pytest.mark.parametrize(
    ("switch", "method"),
    [(switch, method) for switch in SWITCHES for method in switch.methods],
    ids=lambda value: value if isinstance(value, str) else value.technique,
)
def test_every_switch_is_a_setting(switch, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the command line composes: by itself, Hydra adds no switch to `speedups: auto`."""
    monkeypatch.setattr(hydra, "ConfigLoaderImpl", hydra.ConfigLoaderImpl)  # put back after the test
    upstream.compose_with(load_checked)
    assert config_of(*ALGO[method], *switch.off) != config_of(*ALGO[method])


def test_every_technique_is_off_somewhere_and_only_where_it_acts() -> None:
    off = {one.technique for benchmark in full(BFLOAT16) for one in benchmark.contenders if one.technique}
    assert off == {switch.technique for switch in SWITCHES}
    for benchmark in full(BFLOAT16):
        for switch in SWITCHES:
            named = any(one.technique == switch.technique for one in benchmark.contenders)
            assert not named or switch.acts(benchmark.workload)


def test_places_micro_batches_and_slow_rewards_are_settings_of_ours(tmp_path: Path) -> None:
    def said(**fields: Any) -> list[str]:
        return overrides(Spec(replace(C1, **fields), tmp_path, tmp_path, "cpu", {}))

    assert set(said(places=8)) - set(said()) == {"generator.batch_size=8"}
    assert set(said(micro_batches=4)) - set(said()) == {"trainer.accumulate_grad_batches=4"}
    (function,) = set(said(slow_rewards=True)) - set(said())
    assert function.endswith("workload.py:slow")


def test_texts_of_variable_lengths_have_the_lengths_that_the_bounds_count(tmp_path: Path) -> None:
    for method, group, column in (("sft", 1, "completion"), ("dpo", 2, "chosen")):
        work = Workload("w", method, "tiny", 2, group, 5, 12, lengths="variable")
        write(work, tmp_path)
        rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
        lengths = [[len(row[name]) + 1 for name in (column, "rejected") if name in row] for row in rows]  # and EOS
        assert lengths[2] + lengths[3] == work.lengths_of(1)


def test_a_slow_reward_has_the_values_of_the_quick_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "SLOW_SECONDS", 0.001)
    ids, dead = [[1, 2, 3], [2, 4]], [0, 1]
    assert workload.slow(ids, dead) == workload.score(ids, dead)
