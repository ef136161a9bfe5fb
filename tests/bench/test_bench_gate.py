"""The gate refuses what computes something else, and says in what."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import bounds, protocol
from bench.bounds import GateError
from bench.suites import Contender, ours
from bench.workload import Workload

WORK = Workload("w", prompts=2, group=2, dead=True)
GIVEN = [[1, 2], [4, 0], [4, 5], [6, 7]]
"""The last two are of a dead group."""


def first_step(folder: Path, *, rows: int = 4, off: float = 0.0, scale: float = 1.0, name: str = "w") -> dict[str, Any]:
    """What a contender wrote of its first step."""
    folder.mkdir(exist_ok=True)
    step = protocol.FirstStep()
    ids = torch.tensor(GIVEN[:rows])
    step.add_logprobs(ids, torch.full(ids.shape, -1.0) + off, torch.ones(ids.shape))
    step.add_loss(torch.tensor(0.25))
    step.add_loss(torch.tensor(0.5))
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = scale * torch.tensor([1.0, 2.0, 2.0])
    step.add_gradient([(name, parameter.grad)], folder)
    step.add_loss(torch.tensor(100.0))  # of the second step, which nobody asks about
    return protocol.read_first_step(folder)


def check(tmp_path: Path, dtype: str = "float32", **other: Any) -> dict[str, Any]:
    reference = first_step(tmp_path / "reference")
    return bounds.check(it(dtype), WORK, first_step(tmp_path / "other", **other), GIVEN, reference)


def it(dtype: str, **more: Any) -> Contender:
    return ours("it", dtype=dtype, **more)


def test_the_peer_needs_no_lit_rl() -> None:
    """TRL's environment has none: what its process loads imports none."""
    folder, waiting, seen = Path(protocol.__file__).parent, ["peer"], set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text())):
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            assert not any(each.split(".")[0] == "lit_rl" for each in (module, *found)), name
            ours = (
                found if module == "bench" else [module.removeprefix("bench.")] if module.startswith("bench.") else []
            )
            waiting += [each for each in ours if each not in seen]
    assert seen == {"peer", "protocol", "workload"}


def test_the_same_passes(tmp_path: Path) -> None:
    found = check(tmp_path)
    same = {"tokens": 8, "logprobs": 0, "cosine": pytest.approx(1), "norm": pytest.approx(0), "loss": 0}
    assert found == same | {"allowed": 1e-4}
    assert protocol.read_first_step(tmp_path / "other")["loss"] == 0.75


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"off": 1e-3}, "log-probs differ by up to 0.001 nats"),
        ({"off": float("nan")}, "log-probs differ"),
        ({"scale": 1.01}, "norms differ by 1.00%"),
        ({"scale": -1.0}, "cosine of the gradients is -1"),
        ({"rows": 1}, "1 completions that teach something were not scored"),
        ({"name": "v"}, "only one side has a gradient of v, w"),
    ],
)
def test_another_computation_is_refused(tmp_path: Path, other: dict[str, Any], said: str) -> None:
    with pytest.raises(GateError, match=said):
        check(tmp_path, **other)


def test_a_dead_group_may_be_left_out(tmp_path: Path) -> None:
    assert check(tmp_path, rows=2)["tokens"] == 4


def test_a_row_whose_reward_is_its_groups_mean_may_be_left_out() -> None:
    rows = [[1, 3, 2, 4], [1, 3], [2, 4]]  # rewards 1/2, 1 and 0
    scored = {"logprobs": dict.fromkeys(protocol.key_of(ids) for ids in rows[1:])}
    assert bounds.missing(Workload("w", prompts=1, group=3), rows, scored) == 0
    assert bounds.missing(Workload("w", prompts=1, group=3), [[1, 3, 5, 4], *rows[1:]], scored) == 1


def test_bfloat16_may_round(tmp_path: Path) -> None:
    assert check(tmp_path, "bfloat16", off=1e-2, scale=1.01)["logprobs"] == pytest.approx(1e-2)
    with pytest.raises(GateError, match="log-probs"):
        check(tmp_path, "bfloat16", off=3e-2)
    deep = bounds.LIMITS["bfloat16"].logprobs + 4e-3  # what the peer itself is off in a deep model
    first = first_step(tmp_path / "deep", off=1.4 * deep)
    found = bounds.check(it("bfloat16"), WORK, first, GIVEN, first_step(tmp_path / "reference"), deep)
    assert found["allowed"] == pytest.approx(1.5 * deep)
    with pytest.raises(GateError, match="log-probs"):
        bounds.check(it("float32"), WORK, first, GIVEN, first_step(tmp_path / "reference"), deep)


def test_an_adapter_has_no_gradient_to_compare_and_has_to_score_the_same(tmp_path: Path) -> None:
    reference = first_step(tmp_path / "reference")
    adapter, other = it("float32", own_parameters=True), first_step(tmp_path / "other", name="lora_A")
    found = bounds.check(adapter, WORK, other, GIVEN, reference)
    assert (found["tokens"], found["cosine"], found["norm"]) == (8, None, None)
    with pytest.raises(GateError, match="log-probs"):
        bounds.check(adapter, WORK, first_step(tmp_path / "off", off=1e-3, name="lora_A"), GIVEN, reference)
