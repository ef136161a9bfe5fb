"""The pages of runs in a real browser, used as a reader uses them: keys, clicks, the pointer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from chromium import CHROMIUM
from run_folders import run_folder, samples

from lit_rl.reports import run_page
from lit_rl.reports import sweep as sweep_report
from lit_rl.reports.compare import compare
from lit_rl.reports.sweep import note_job

pytestmark = [pytest.mark.all, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")]

ANSWERS = ["a red fox", "a blue fox", "a red hen"]


@pytest.fixture
def used(root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], Awaitable[None]]], None]:
    """`used(how)` does this with the one tab of a browser."""
    monkeypatch.setattr(sys, "path", [str(root / "scripts"), *sys.path])
    from pictures import browser  # pyright: ignore[reportMissingImports]

    async def with_a_tab(how: Callable[[Any], Awaitable[None]]) -> None:
        async with browser() as tab:
            await how(tab)
            assert tab.errors == []

    return lambda how: asyncio.run(with_a_tab(how))


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """The page of a run with two curves, a rollout by its tokens, and another whose completions are text alone."""
    run = run_folder(tmp_path / "run", [{"step": i, "train/reward": i / 8, "train/kl": i / 9} for i in range(8)])
    texts = [[f"{word} " for word in answer.split()] for answer in ANSWERS]
    tokens: dict[str, list[Any]] = {
        "text": texts, "ids": [[1, 2, 3]] * 3, "turn": [[0] * 3] * 3, "by_policy": [[True, True, True]] * 3,
        "learned": [[True, True, False]] * 3, "sampler_logprobs": [[-1.0, -2.0, -1.0]] * 3,
        "advantages": [[0.5, -0.5, 0.0]] * 3, "logprobs": [[-1.0, -2.0, -1.0]] * 3,
        "ref_logprobs": [[-1.0, -1.0, -1.0]] * 3, "entropies": [[0.0, 0.1, 0.9]] * 3,
    }  # fmt: skip
    columns: dict[str, Any] = {f"tokens/{name}": values for name, values in tokens.items()}
    columns |= {"advantage": [1.0, -1.0, 0.5], "answer": ["heron", "stork", "crane"]}
    samples(run, "tokens_00000004", ["One?", "One?", "Two?"], [0.0, 1.0, 0.5], **columns)
    samples(run, "step_00000002", ["Three?"] * 2, [0.0, 1.0], said="plain", advantage=[-1.0, 1.0])
    return run_page.write_run_page(run)


SEEN = """(() => {
  const rows = [...document.querySelectorAll('#rows [role=option]')];
  return {
    rows: rows.map(row => row.textContent),
    chosen: rows.findIndex(row => row.getAttribute('aria-selected') === 'true'),
    count: document.querySelector('#count').textContent,
    held: document.querySelector('#held').textContent,
    said: [...document.querySelectorAll('#shown .said')].map(each => each.textContent.trim()),
    colours: [...document.querySelectorAll('#shown .said i')].map(each => getComputedStyle(each).backgroundColor),
  };
})()"""


def chosen_of(select: str, value: str) -> str:
    """Another value, told as a browser tells it."""
    told = "".join(f"node.dispatchEvent(new Event('{kind}', {{bubbles: true}}));" for kind in ("input", "change"))
    return f"{{ const node = document.querySelector('#{select}'); node.value = '{value}'; {told} }}"


def test_a_reader_searches_orders_chooses_and_colours_completions(used: Any, report: Path) -> None:
    async def reads(tab: Any) -> None:
        await tab.open(report.as_uri(), width=1200, settle=0)
        first = await tab.run(SEEN)
        assert [row.split(" \u2190 ")[0].strip() for row in first["rows"]] == [
            "0a red fox",
            "1a blue fox",
            "0.5000a red hen",
        ]
        assert first["said"] == ["One?", "a red fox"] and first["chosen"] == 0
        assert first["count"] == "" and first["held"] == "3 completions"

        await tab.point("#words", press=True)
        await tab.type("RED")
        found = await tab.run(SEEN)
        assert [row for row in found["rows"] if "blue" in row] == [] and found["count"] == "2 of 3 have it"
        await tab.type("x")
        assert (await tab.run(SEEN))["rows"] == []
        await tab.run(chosen_of("words", "Crane"))
        assert (await tab.run(SEEN))["said"] == ["Two?", "a red hen"], "a word of a column"
        await tab.run(chosen_of("words", ""))
        assert (await tab.run(SEEN))["rows"] == first["rows"]

        await tab.run(chosen_of("sort", "high"))
        sorted_ = await tab.run(SEEN)
        assert [row[0] for row in sorted_["rows"]] == ["1", "0", "0"] and sorted_["said"][1] == "a blue fox"
        await tab.point("#row2", press=True)
        clicked = await tab.run(SEEN)
        assert clicked["chosen"] == 2 and clicked["said"] == ["One?", "a red fox"]
        await tab.press("Home")
        await tab.press("ArrowDown")  # in the list, which has the focus since the click
        moved = await tab.run(SEEN)
        assert moved["chosen"] == 1 and moved["said"] == ["Two?", "a red hen"]

        painted = {}
        for by in ("advantage", "kl", "entropy", "mask", "none"):
            await tab.run(chosen_of("by", by))
            painted[by] = tuple((await tab.run(SEEN))["colours"])
        assert len(set(painted.values())) == 5 and len(set(painted["advantage"])) == 3
        assert len(set(painted["none"])) == 1

        await tab.point("#shown .said i:nth-child(2)")
        told = await tab.run("[...document.querySelectorAll(':hover')].at(-1).title")
        assert "learned from" in told and "advantage -0.5" in told and "entropy 0.1" in told
        assert await tab.run("document.querySelector('.chart .read').textContent") == ""
        await tab.point(".chart svg[data-frame]")
        told = await tab.run("document.querySelector('.chart .read').textContent")
        assert told.startswith("step ") and 0 < int(told.split()[1]) < 7

        await tab.run(chosen_of("file", "1"))
        other = await tab.run(SEEN)
        assert other["said"] == ["Three?", "plain"] and len(other["rows"]) == 2

    used(reads)


def test_the_pages_of_a_comparison_and_of_a_sweep_run_to_their_end(used: Any, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    for number in range(2):
        run = run_folder(sweep / str(number), [{"step": i, "val/reward": i / (number + 2)} for i in range(3)])
        samples(run, "val_00000002_t0", ["a", "b"], [number, 1.0])
        note_job(sweep, {"job": number, "overrides": [f"optimizer.lr=1e-{number}"], "folder": str(run), "exit_code": 0})
    assert compare(sweep / "0", sweep / "1") == 0 and sweep_report.write_sweep(sweep) == 0

    async def opens(tab: Any) -> None:
        for page in (sweep / "0" / "compare_1.html", sweep / "sweep.html"):
            await tab.open(page.as_uri(), width=1200, settle=0)
            assert await tab.run("document.documentElement.dataset.ready") == "1"
            await tab.point("svg[data-frame]")
            assert (await tab.run("document.querySelector('svg[data-frame]').parentNode.innerText")).count("step ")

    used(opens)
