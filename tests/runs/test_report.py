"""The page of `lit-rl report`: its numbers, what of a run it shows, and that nothing in it is more than text."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import subprocess
import time
from array import array
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from chromium import CHROMIUM
from run_folders import CONFIG, run_folder, samples

from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.reports import html_page, run_files
from lit_rl.reports.charts import ChartLine, Drawing, bin_counts, chart, dots, histograms, smoothed, thinned, ticks
from lit_rl.reports.compare import compare
from lit_rl.reports.config_changes import (
    changes_between,
    changes_from_defaults,
    keys_in_commands,
    set_by_model,
    typed_commands,
)
from lit_rl.reports.html_page import templates
from lit_rl.reports.metric_groups import chart_groups
from lit_rl.reports.run_files import Series
from lit_rl.reports.run_findings import run_findings
from lit_rl.reports.run_page import duration, report, run_page_html, show, write_run_page_or_hint
from lit_rl.reports.run_samples import (
    CHARACTERS,
    ROWS,
    RecordedCompletion,
    RecordedTokens,
    mask_reasons,
    samples_of,
    token_measures,
)
from lit_rl.reports.sweep import note_job, write_sweep
from lit_rl.reports.transcripts import transcripts
from lit_rl.runs.closing_report import phase_totals
from lit_rl.runs.run_dir import RunDir

NASTY = "</script><script>document.title='hit'</script><img src=x onerror=\"alert(1)\">\x1b[31m\x00&amp;"
"""What must stay text, wherever it stands."""

CANARY = f"'\"> {NASTY} \u202eevil\u2066\u200b {{{{ 7 * 7 }}}} {{% if %}} \x9b31m"
"""The same after quotes, and what turns a line around, hides, is a template's, or a terminal's."""

HALF = "\ud83d"
"""Of a surrogate pair: no file in UTF-8 can hold it."""


def series(*values: float) -> Series:
    return Series(array("d", range(len(values))), array("d", values))


class Page(HTMLParser):
    """Tags and attributes, texts, and what stands in `script` elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self._open: list[str] = []
        self._goes_on = False
        self.feed(text)
        self.close()
        assert not self._open, "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br", "wbr"):
            self._open.append(tag)
        self._goes_on = tag == "wbr"
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["script"]:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = attributes, text + data
        elif self._goes_on:
            self.texts[-1] += data
        elif self._open[-1:] != ["style"]:
            self.texts.append(data)
        self._goes_on = False

    @property
    def samples(self) -> list[dict[str, Any]]:
        (text,) = [text for attributes, text in self.scripts if attributes.get("id") == "samples"]
        return json.loads(text)


def page_of(folder: Path) -> Page:
    assert report(folder) == 0
    return Page((folder / "report.html").read_text(encoding="utf-8"))


@pytest.fixture
def nasty(tmp_path: Path) -> Path:
    """A failed run whose every text is an attack."""
    rows = [{"step": i, "train/reward": i / 40, f"train/{NASTY}": float(i)} for i in range(1, 41)]
    rows.append({"step": 40, f"val/{NASTY}/reward": 0.5})
    config = CONFIG | {"model": CONFIG["model"] | {"name": "<b>&" + NASTY[:60]}}
    folder = run_folder(tmp_path / "run", rows, config, {"status": "running", "not_written": [NASTY]})
    (folder / "error.json").write_text(
        json.dumps({"error": "RewardError", "message": NASTY + HALF, "rank": 0, "step": 40})
    )
    more = {"advantage": [1.0, -1.0], "answer": [NASTY, "1"], "note": [HALF, NASTY]}
    samples(folder, "step_00000039", [NASTY, NASTY], [1.0, math.nan], said=NASTY, **more)
    samples(folder, "val_00000040_t0_<i>", [[{"role": "user", "content": NASTY}]], [0.0], said=NASTY)
    return folder


def test_what_a_run_says_is_text_and_nothing_is_loaded(nasty: Path) -> None:
    page = page_of(nasty)
    text = (nasty / "report.html").read_text(encoding="utf-8")
    kinds = [attributes.get("type") for attributes, _ in page.scripts]
    assert kinds == ["application/json", None], "the data, and one script of ours"
    assert not {"img", "i", "b"} & {tag for tag, attributes in page.tags if "onerror" in attributes}
    assert "img" not in {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on") or name == "src"]
    assert {attributes["href"][0] for tag, attributes in page.tags if tag == "a"} == {"#"}  # pyright: ignore
    (policy,) = [str(attributes["content"]) for _, attributes in page.tags if "http-equiv" in attributes]
    assert policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy
    assert not set(text) & {"\x1b", "\x00"} and "http" not in text.replace("http-equiv", "")
    rollout = next(each for each in page.samples if each["name"].startswith("rollout"))
    shown = NASTY.encode("unicode_escape").decode()
    assert rollout["prompts"] == [shown] and rollout["rows"][0]["c"] == shown
    assert rollout["rows"][0]["x"]["answer"] == shown and "ud83d" in rollout["rows"][0]["x"]["note"]
    assert rollout["rows"][1]["r"] is None
    assert any(shown + "\\ud83d" in each for each in page.texts), "the message of the error"


def test_every_page_shows_what_others_say_as_text(tmp_path: Path) -> None:
    """Of metrics, prompts, completions, tokens, configs, errors, jobs: each page is read whole, by its parser."""
    sweep, tokens = tmp_path / "a <b>'sweep'", [CANARY, "\u202e", "\n"]
    for number in range(2):
        rows = [{"step": i, f"train/{CANARY}": float(i + number), f"val/{CANARY}/reward": i / 9} for i in range(3)]
        config = CONFIG | {CANARY: f"{CANARY}{number}", "model": {"name": CANARY}}
        told = {"status": "stopped", "stopped_by": CANARY, "command": CANARY, "not_written": [CANARY]}
        run = run_folder(sweep / f"{number}<i>'", rows, config, told)
        columns: dict[str, Any] = {
            "ids": [[1, 2, 3]], "text": [tokens], "turn": [[0, 0, 0]], "by_policy": [[True, True, False]],
            "learned": [[True, False, False]], "sampler_logprobs": [[-1.0, -2.0, 0.0]],
            "advantages": [[0.5, -0.5, 0.0]],
        }  # fmt: skip
        episode = {f"tokens/{name}": values for name, values in columns.items()}
        episode |= {"messages": [json.dumps([{"role": CANARY, "content": CANARY}])], "turns": [1], "end": [CANARY]}
        episode |= {"turn_rewards": ["[1.0]"], "episode_error": [CANARY], CANARY: [CANARY], "advantage": [1.0]}
        samples(run, "step_00000002", [CANARY], [1.0], said=CANARY, **episode)
        samples(run, "val_00000002_t0_<i>", [CANARY, f"{number}{CANARY}"], [number, 0.0], said=CANARY)
        message = f"{CANARY} is no number"
        job = {"job": number, "overrides": [f"a.{number}={CANARY}", f"lr=1e-{number}"], "folder": str(run)}
        note_job(sweep, {**job, "exit_code": 4 * number, "message": message * number})
    first, second = sorted(each for each in sweep.iterdir() if each.is_dir())
    assert report(first) == compare(first, second) == write_sweep(sweep) == transcripts(first) == 0
    pages = {path.name: path for path in sweep.rglob("*.html")}
    assert sorted(pages) == ["compare_1<i>'.html", "report.html", "sweep.html", "transcripts.html"]
    shown = CANARY.replace("\x1b", "\\x1b").replace("\x00", "\\x00").replace("\x9b", "\\x9b")
    shown = shown.replace("\u202e", "\\u202e").replace("\u2066", "\\u2066").replace("\u200b", "\\u200b")
    for name, path in pages.items():
        text = path.read_text(encoding="utf-8")
        page = Page(text)
        assert [char for char in {*text} if not char.isprintable() and char != "\n"] == [], name
        assert not {"img", "iframe", "link", "base", "object"} & {tag for tag, _ in page.tags}, name
        names = {name for _, attributes in page.tags for name in attributes}
        assert not [each for each in names if each.startswith("on") or each in ("src", "srcdoc")], name
        assert {str(a["href"])[0] for tag, a in page.tags if tag == "a"} <= {"#"}, name
        (script,) = [text for attributes, text in page.scripts if not attributes]
        (policy,) = [str(a["content"]) for _, a in page.tags if "http-equiv" in a]
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}'" in policy and policy.startswith("default-src 'none'; style-src"), name
        assert any(shown in each for each in page.texts), name


def test_no_template_lets_text_of_others_through() -> None:
    """What `safe`, `escape` and joined markup give is not escaped again."""
    for path in Path(html_page.__file__).with_name("templates").glob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\|\s*(safe|e|escape|forceescape|xmlattr|urlize)\b|autoescape", text), path.name


def test_data_for_the_script_ends_no_element() -> None:
    written = templates().from_string("{{ value | tojson }}")
    text = written.render(value={"b": "</script><!--", "a": "\ud83d"})
    assert "<" not in text and text.isascii() and json.loads(text) == {"b": "</script><!--", "a": "\ud83d"}
    assert list(json.loads(text)) == ["b", "a"], "in their order"
    with pytest.raises(ValueError):
        written.render(value=[math.nan])


# ---------------------------------------------------------------------- a browser


@pytest.mark.all
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_browser_runs_the_script_to_its_end_and_builds_nothing_of_what_a_run_says(
    nasty: Path, tmp_path: Path
) -> None:
    report(nasty)
    dom = dumped(nasty / "report.html", tmp_path)
    page = Page(dom)
    assert "img" not in {tag for tag, _ in page.tags} and len(page.scripts) == 2
    chosen = [attributes for _, attributes in page.tags if attributes.get("role") == "option"]
    assert [each.get("aria-selected") for each in chosen] == ["true", None], "the script has built the list"
    assert "<title>run: report</title>" in dom, "no script of the run's has run"


# ---------------------------------------------------------------------- runs of every kind


@pytest.mark.all
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_browser_colours_the_tokens_that_a_run_wrote_by_what_is_there(tmp_path: Path) -> None:
    """Two tokens with a ratio of 2 and 1; no reference, so that no KL is offered; the other row was not computed."""
    columns: dict[str, list[Any]] = {
        "ids": [[1, 2]] * 2, "text": [["4", "2"]] * 2, "turn": [[0, 0]] * 2, "by_policy": [[True, True]] * 2,
        "learned": [[True, True]] * 2, "sampler_logprobs": [[-1.0, -1.0]] * 2, "advantages": [[0.5, 0.5], [0.0, 0.0]],
        "logprobs": [[-1.0 + math.log(2), -1.0], None], "values": [[0.25, -0.5], None],
    }  # fmt: skip
    folder = run_folder(tmp_path / "run", [{"step": 1, "train/reward": 0.5}], None, {"status": "finished"})
    prefixed = {f"tokens/{name}": values for name, values in columns.items()}
    samples(folder, "tokens_00000000", ["40+2="] * 2, [1.0, 1.0], said="42", advantage=[0.5, 0.0], **prefixed)
    page = page_of(folder)
    (told,) = [text for text in page.texts if text.startswith("No file here holds, token by token")]
    assert "KL to the reference, entropy." in told, "and why"
    (file,) = page.samples
    assert [set(row["t"]) - {"text", "mask", "advantage", "logprob"} for row in file["rows"]] == [
        {"ratio", "value"},
        set(),
    ]

    path = folder / "report.html"
    script = "at('by').value = 'ratio'; show(); document.documentElement.dataset.ready"
    text = path.read_text(encoding="utf-8").replace("document.documentElement.dataset.ready", script)
    path.write_text(re.sub(r"script-src 'sha256-[^']*'", "script-src 'unsafe-inline'", text), encoding="utf-8")
    dom = dumped(path, tmp_path)
    options = {
        a["value"]: "disabled" in a for tag, a in Page(dom).tags if tag == "option" and str(a["value"]).isalpha()
    }
    assert {name for name in _BY if not options[name]} == {"advantage", "logprob", "ratio", "value", "mask", "none"}
    shown = re.findall(r'<i title="([^"]*)"( style="[^"]*")?>([^<]*)</i>', dom)
    assert [(title.split("ratio ")[1].split(",")[0], bool(style), text) for title, style, text in shown] == [
        ("2", True, "4"), ("1", False, "2"),
    ]  # fmt: skip
    (legend,) = re.findall(r'<p id="legend">(.*?)</p>', dom)
    assert re.findall(r"<i[^>]*>([^<]*)</i>", legend) == ["1", "1.414", "2"] and legend.startswith("<b>ratio: </b>")


_BY = ("advantage", "logprob", "ratio", "kl", "entropy", "value", "mask", "none")


def dumped(page: Path, folder: Path) -> str:
    """The page as it is once its script has run to its end."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}"]
    command = [str(CHROMIUM), *options, "--enable-logging=stderr", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert 'data-ready="1"' in done.stdout.partition(">")[2][:200], done.stderr
    assert not re.findall(r"CONSOLE.*", done.stderr)
    return done.stdout


def test_training_and_validations_of_one_name_are_one_picture(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"step": i, "train/reward": float(i % 3), "train/lr": 0.1} for i in range(1, 31)]
    rows += [{"step": at, "val/reward": 0.5, "val/reward_low": 0.4, "val/reward_high": 0.7} for at in (0, 30, 30)]
    rows += [{"step": at, "val_sampled/reward": at / 40, "val_sampled/reward_low": 0.0} for at in (0, 30)]
    rows += [{"step": 30, "val/hard/reward": 0.25, "val/hard/prompts": 8, "train/rewards/f/mean": 1.0}]
    summary = {"after": {"": {"greedy": {"reward": 0.5}, "sampled at 1": {"reward": 0.75}}}, "status": "finished"}
    run = run_files.RunFiles.of(run_folder(tmp_path / "run", rows, summary=summary))
    (first, *others) = chart_groups([("", run)])
    (title, lines), *more = first.charts
    assert title == "reward" and not more
    assert [line.name for line in lines] == ["training", "held-out, greedy", "held-out, sampled at 1", "hard"]
    assert list(lines[1].series.values) == [0.5, 0.5] and lines[1].low == [0.4, 0.4] and lines[1].high == [0.7, 0.7]
    assert list(lines[2].series.steps) == [0, 30] and list(lines[2].series.values) == [0, 0.75] and lines[2].hollow
    assert lines[2].low == [0, 0] and not lines[1].hollow
    assert ("rewards/f/mean", 1.0) in first.constant and [group.constant for group in others] == [[("lr", 0.1)]]
    assert any("0.500" in text for text in page_of(run.path).texts)


def test_every_metric_of_a_training_has_a_group(tmp_path: Path, root: Path) -> None:
    page = (root / "docs" / "metrics.md").read_text()
    cells = re.findall(r"^\| ([^|]+) \|", page, re.M)
    named = {name for cell in cells for name in re.findall(r"`(train/[^`]+)`", cell)}
    rows = [{"step": i, **{name: float(i * place) for place, name in enumerate(named, 1)}} for i in (1, 2)]
    groups = chart_groups([("", run_files.RunFiles.of(run_folder(tmp_path / "run", rows)))])
    assert len(named) > 100 and all(group.charts for group in groups)
    of = {name: group.title for group in groups for name, _ in group.charts}
    assert [name for name, title in of.items() if title == "Other"] == []
    homes = {"role/<role>/reward": "Is there a signal", "branches/mean": "What it writes", "teacher/kl": "The policy"}
    homes["curriculum/uniform/reward"] = "Is there a signal"
    assert {name: of[name] for name in homes} == homes


def test_the_numbers_of_the_results_have_the_same_decimals(tmp_path: Path) -> None:
    rows = [{"step": i, "train/reward": 0.48828, "val/reward": 0.608} for i in (1, 2)]
    shown = run_page_html(run_files.RunFiles.of(run_folder(tmp_path / "run", rows)))
    results = shown[shown.index('<h2 id="results"') : shown.index('<h2 id="curves"')]
    assert set(re.findall(r"[0-9]+[.][0-9]+", results)) == {"0.488", "0.608"}


def test_what_judges_were_asked_stands_on_the_page(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", [{"step": 1, "train/reward": 0.5}])
    counts = {"requests": 1200, "prompt_tokens": 7, "completion_tokens": 3, "failures": None}
    (folder / "summary.json").write_text(json.dumps({"judges": {"judge": counts, "other": 3}}))
    page = run_page_html(run_files.RunFiles.of(folder))
    cells = re.findall(r"<t[dh][^>]*>([^<]*)", page[page.index("tokens written") :])
    at = cells.index("judge")
    assert cells[at : at + 10] == ["judge", "1,200", "7", "3", "", "other", "", "", "", ""]


def test_a_run_that_is_being_written_and_a_damaged_one_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", [{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": None}])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('no json\n{"step": 3, "train/loss": 1.5}\n{"step": 4, "train/lo')
    (folder / "summary.json").write_text("{")
    (folder / "config.yaml").write_text("a: 2020-13-45\n")
    samples(folder, "step_00000001", ["p"], [1.0])
    (folder / "samples" / "step_00000000.parquet").write_bytes(b"half")
    run = run_files.RunFiles.of(folder)
    assert list(run.series["train/loss"].values) == [2.0, 1.5] and run.last_step == 3
    said = " ".join(finding.text for finding in run_findings(run))
    assert "1 line of metrics.jsonl" in said and "last line of metrics.jsonl is not whole" in said
    assert "summary.json is damaged" in said and "config.yaml is damaged: month must be" in said
    with pytest.raises(StorageError, match="config.yaml is damaged"):
        run.settings()
    (folder / "config.yaml").write_bytes(b"data: {path: r\xe9sultats.jsonl}\n")  # Latin-1
    with pytest.raises(StorageError, match="config.yaml is damaged, it is not UTF-8"):
        run_files.RunFiles.of(folder).settings()
    (folder / "config.yaml").write_text("{algo: {stop: \ufffd}, sampling: {}, trainer: {}}\n")
    assert run_files.RunFiles.of(folder).settings()["algo"]["stop"] == "\ufffd"
    page = page_of(folder)
    assert [each["name"] for each in page.samples] == ["rollout of step 1"]
    assert any("step_00000000.parquet holds no samples" in text for text in page.texts)


def test_a_folder_without_a_run_is_refused_and_one_with_a_config_alone_has_a_page(tmp_path: Path) -> None:
    for folder, why in ((tmp_path / "none", "is no folder"), (tmp_path, "holds no run")):
        with pytest.raises(ConfigError, match=why):
            report(folder)
    folder = run_folder(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    assert any("Nothing was measured yet" in text for text in page_of(folder).texts)


@pytest.mark.all
def test_a_huge_run_has_a_small_page_that_is_made_in_a_moment(tmp_path: Path) -> None:
    numbers = {f"train/metric_{i}": 0.0 for i in range(40)}
    rows = [{"step": i, **{name: math.sin(i * (k + 1)) for k, name in enumerate(numbers)}} for i in range(1, 701)]
    folder = run_folder(tmp_path / "run", rows)
    for step in range(0, 6):
        samples(
            folder,
            f"step_{step:08d}",
            [f"{i}" * 2000 for i in range(200)],
            [float(i % 2) for i in range(200)],
            "x" * 9999,
        )
    report(folder)
    began = time.perf_counter()
    page = page_of(folder)
    assert time.perf_counter() - began < 5  # on a busy machine; a real run of 700 steps took 0.3 to 0.7
    assert (folder / "report.html").stat().st_size < 5e6
    assert len(page.samples) == 4 and {len(each["rows"]) for each in page.samples} == {ROWS}
    assert all(
        len(row["c"]) < CHARACTERS + 60 and "characters more" in row["c"]
        for each in page.samples
        for row in each["rows"]
    )
    assert "48 of 200 completions" in page.samples[0]["said"]
    assert any("4 of the 6 files of samples" in text for text in page.texts)


def test_samples_stop_where_the_page_would_be_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(tmp_path / "run")
    for step in (0, 1):
        samples(folder, f"step_{step:08d}", ["p"] * 4, [1.0] * 4, "x" * 1000)
    monkeypatch.setattr("lit_rl.reports.run_samples.MAX_SIZE", 1500)
    found = samples_of(run_files.RunFiles.of(folder))
    assert [len(each["rows"]) for each in found.files] == [2]
    assert found.left_out == ["step_00000000 and what comes after it: the page would be too large."]


# ---------------------------------------------------------------------- tokens

TOKENS = RecordedTokens(
    ids=[1, 2, 3, 4], text=["a", "b", "c", "d"], turn=[0] * 4, by_policy=[True, False, True, True],
    learned=[True, False, True, False], sampler_logprobs=[-1.0, 0.0, -2.0, -1.0], advantages=[0.5, 0.0, 0.0, 0.5],
    old_logprobs=[-1.0, 0.0, -2.0, -1.0], logprobs=[-1.0 + math.log(2), 0.0, -2.0, -1.0],
    ref_logprobs=[-1.0, 0.0, -2.0 + math.log(2), -1.0], entropies=[0.1, 0.0, 0.2, 0.3],
)  # fmt: skip


def completion(**changes: Any) -> RecordedCompletion:
    fields: dict[str, Any] = {"number": 0, "group": 0, "prompt": "p", "messages": [], "reward": 1.0, "advantage": 0.5}
    fields |= {"end": "ended", "turn_rewards": [], "calls": 0, "failed_calls": 0, "error": "", "tokens": TOKENS}
    return RecordedCompletion(**fields | changes)


def test_of_each_token_why_it_teaches_nothing() -> None:
    assert list(mask_reasons(completion(), TOKENS, False)) == ["", "read", "still", "left"]
    assert list(mask_reasons(completion(end="cut"), TOKENS, True))[3] == "cut"
    assert list(mask_reasons(completion(end="cut"), TOKENS, False))[3] == "left"
    assert list(mask_reasons(completion(reward=math.nan), TOKENS, False))[3] == "unscored"
    assert list(mask_reasons(completion(end="failed", reward=math.nan), TOKENS, False))[3] == "failed"


def test_ratio_kl_and_entropy_of_tokens_by_hand() -> None:
    found = token_measures(TOKENS)
    assert found["ratio"] == pytest.approx([2, 1, 1, 1]) and found["entropy"] == [0.1, 0.0, 0.2, 0.3]
    # k3 of log(ref / policy): -log 2 at the first token, log 2 at the third
    assert found["kl"] == pytest.approx([0.5 + math.log(2) - 1, 0, 2 - math.log(2) - 1, 0])


# ---------------------------------------------------------------------- config, alarms, curves


def test_what_differs_from_the_constructors_is_said_once_and_nothing_foreign_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "evil_reward.py").write_text("raise SystemExit('imported')")
    config = CONFIG | {"reward": {"_target_": "evil_reward.score", "weight": 2}, "seed": 3}
    found = {key: (value, default) for key, value, default in changes_from_defaults(config)}
    assert found == {
        "seed": (3, 0),
        "trainer.max_steps": (40, -1),
        "optimizer.lr": (0.001, 1e-6),
        "data.path": ("mine.jsonl", None),
        "algo.loss.clip_low": (0.1, 0.2),
        "reward.weight": (2, None),
    }


def test_what_a_preset_of_the_model_sets_is_marked_and_stands_last(tmp_path: Path) -> None:
    config = CONFIG | {"optimizer": CONFIG["optimizer"] | {"lr": 5e-4}, "export": {"folder": None, "private": True}}
    config["algo"] = config["algo"] | {"optimizer": config["optimizer"]}
    config["callbacks"] = {"export": {"_target_": "lit_rl.callbacks.Export", "folder": "runs/x/hf_steps"}}
    assert set_by_model(config) == {"optimizer.lr": "tiny"} and not set_by_model(CONFIG)
    assert not [key for key, *_ in changes_from_defaults(config) if "export" in key]
    texts = page_of(run_folder(tmp_path / "run", config=config)).texts
    assert texts.index("data.path") < texts.index("optimizer.lr") < texts.index("set by model=tiny")


def test_what_was_typed_stands_first_and_what_presets_set_is_folded(tmp_path: Path) -> None:
    said = {"command": "python train.py algo=<x> seed=3 lr=0.001", "went_on": ["lit-rl fit --trainer.max_steps 40"]}
    assert keys_in_commands(typed_commands(said)) == {"algo", "seed", "lr", "trainer.max_steps"}
    assert (
        keys_in_commands(["python train.py 'seed=1"]) == set() and typed_commands({"command": None, "went_on": 3}) == []
    )
    texts = page_of(run_folder(tmp_path / "run", config=CONFIG | {"seed": 3}, summary=said)).texts
    order = [*said.values(), "seed", "trainer.max_steps", "optimizer.lr", "data.path"]
    at = [texts.index(each if isinstance(each, str) else each[0]) for each in order]
    folded = next(i for i, text in enumerate(texts) if "other keys that the chosen presets set" in text)
    assert at == sorted(at) and at[4] < folded < at[5]
    shown = texts[texts.index("What differs from the defaults") : folded]
    assert "default without presets" in shown and any("that of the chosen data, model" in text for text in shown)


def test_the_bar_of_phases_says_what_its_shares_are_of(tmp_path: Path) -> None:
    rows = [{"step": 1, "time/generate": 6.0, "time/reward": 1.0, "time/update": 3.0}]
    texts = page_of(run_folder(tmp_path / "run", rows, summary={"seconds": 20.0})).texts
    assert "60%" in texts and "30%" in texts, "of the phases, and of the run"
    assert "Shares of 10.0 s, the phases together; the table's are of the whole run." in texts


def test_the_page_says_how_fast_the_devices_were(tmp_path: Path) -> None:
    rows: list[dict[str, float]] = [
        {"step": i, "time/generate": 1.0, "time/score": 0.5, "time/update": 3.0, "mfu": mfu, "idle_share": 0.04}
        | {"tokens_per_second_per_device/generate": 1000.0 * i, "tflops_per_second": 305.0}
        for i, mfu in enumerate((0.1, 0.3, 0.4), start=1)
    ]
    page_ = page_of(run_folder(tmp_path / "run", rows, summary={"seconds": 20.0}))
    at = page_.texts.index("tokens a second and device")
    assert {"2,000", "score", "1.5"} <= {*page_.texts[at:]}
    told = "30.0% of a device's peak in the update (mfu) · 305 TFLOP/s a device in the update · 4.0% of the time in no"
    assert any(told in text for text in page_.texts)
    assert phase_totals(tmp_path / "run" / "metrics.jsonl")["update"]["mfu"] == pytest.approx(0.8 / 3)


def test_configs_of_two_runs_differ_by_key_and_by_what_makes_a_part() -> None:
    other = json.loads(json.dumps(CONFIG)) | {"run_dir": "runs/y", "env": None}
    other["optimizer"]["lr"] = other["algo"]["optimizer"]["lr"] = 0.5
    other["algo"]["loss"] = {"_target_": "lit_rl.ops.policy_losses.cispo_loss", "_partial_": True, "cap": 5.0}
    names = "lit_rl.ops.policy_losses.clipped_policy_loss", "lit_rl.ops.policy_losses.cispo_loss"
    assert changes_between(CONFIG, other) == [("optimizer.lr", 0.001, 0.5), ("algo.loss._target_", *names)]
    assert changes_between(CONFIG, CONFIG) == []


def test_alarms_are_what_the_files_say(tmp_path: Path) -> None:
    rows = [{"step": i, "train/skipped_steps": float(i == 3), "train/frac_reward_zero_std": 0.9} for i in range(1, 21)]
    rows[4] |= {"train/rewards/judge/failure_ratio": 0.25, "train/completions/unscored": 2.0}
    data_report = {"train": {"rows": 10, "overlong": 4, "kept": 6}}
    folder = run_folder(
        tmp_path / "run", rows, summary={"status": "stopped", "data": data_report, "not_written": ["x"]}
    )
    (folder / "bad_batch.pt").write_bytes(b"")
    (folder / "alarms.jsonl").write_text('{"step": 7, "message": "Alarm kl_blow_up"}\n{"step": 9, "mess')
    found = [(finding.weight, finding.text) for finding in run_findings(run_files.RunFiles.of(folder))]
    assert [weight for weight, _ in found] == ["warning"] * 7 + ["note"] * 3
    said = "\n".join(text for _, text in found)
    for expected in ("up to 100.0% optimizer steps were left out", "1 line of the log, the last at step 3", "25.0%"):
        assert expected in said
    for expected in ("Alarm kl_blow_up", "The last line of alarms.jsonl is not whole"):
        assert expected in said
    for expected in ("2 completions", "bad_batch.pt", "Not written: x", "4 of 10 rows", "step 20", "90% of the last"):
        assert expected in said
    assert {"Alarms (7), Notes (3)", "Alarms"} < {*page_of(folder).texts}
    noted = page_of(run_folder(tmp_path / "noted", rows[:1])).texts
    assert {"Notes (1)", "Notes"} < {*noted} and not [text for text in noted if "Alarm" in text]
    assert run_findings(run_files.RunFiles.of(run_folder(tmp_path / "well", [{"step": 1, "train/reward": 1.0}]))) == []


def test_a_device_in_the_place_of_a_file_is_not_read(tmp_path: Path) -> None:
    """What has no end, such as /dev/full, would fill the memory."""
    folder = run_folder(tmp_path / "run", summary={"status": "finished"})
    (folder / "metrics.jsonl").unlink()
    for name in ("metrics.jsonl", "error.json"):
        (folder / name).symlink_to("/dev/zero")
    found = run_files.RunFiles.of(folder)
    assert not found.series and not found.error
    assert found.unread == ["metrics.jsonl is no file: not read.", "error.json is no file: not read."]


def test_curves_keep_what_sticks_out_and_ticks_are_round() -> None:
    many = series(*(100.0 if i == 4321 else math.sin(i) for i in range(10_000)))
    few = thinned(many)
    assert len(few) <= 200 and max(few.values) == 100.0 and list(few.steps) == sorted(few.steps)
    assert list(smoothed(series(0, 0, 10, 0, 0)).values) == pytest.approx([10 / 3, 2.5, 2, 2.5, 10 / 3])
    assert ticks(0.0, 1.0) == pytest.approx([0, 0.5, 1]) and ticks(-3, 17, 5) == [0, 5, 10, 15] and ticks(2, 2) == [2]
    ranges = [(low / 10, (low + wide) / 10) for low in range(-30, 30) for wide in range(1, 40)]
    assert all(2 <= len(ticks(*ends, most)) <= most + 1 for ends in ranges for most in (4, 5)), "one says no scale"
    assert bin_counts([0, 0.5, 0.99, 1.0], 0, 1, 2) == [1, 3]
    assert [duration(each) for each in (None, 3.25, 125, 7300)] == ["-", "3.2 s", "2 min 5 s", "2 h 1 min"]


def drawn(picture: Drawing) -> str:
    return templates().get_template("charts.html").module.figure(picture)  # pyright: ignore


def test_a_point_is_where_its_number_is() -> None:
    """Of a line from (0, 0) to (1, 1) the ends lie on the frame less its margin of a twentieth."""
    text = drawn(chart("x", [ChartLine("a", series(0.0, 1.0))]))
    below, left = re.findall(r'<text class="axis"([^>]*)>([^<]*)</text>', text)
    assert below[1] == "optimizer step" and left[1] == "x" and "rotate(-90)" in left[0]
    assert len([step for step in re.findall(r'text-anchor="middle">([^<]*)<', text) if step == "0.5"]) == 0
    (path,) = re.findall(r'class="line c0"[^>]* d="M([^"]+)"', text)
    (x0, y0), (x1, y1) = (map(float, point.split()) for point in path.split("L"))
    assert (
        (x0, x1) == (58, 390)
        and y0 == pytest.approx(158 - 148 / 22, abs=0.1)
        and y1 == pytest.approx(10 + 148 / 22, abs=0.1)
    )


def test_every_picture_names_both_axes_and_cuts_long_names() -> None:
    long = "completions/max_terminated_length"
    pictures = {
        ("optimizer step", f"{long[:23]}\u2026"): chart(long, [ChartLine("a", series(0.0, 1.0))]),
        ("reward", "count"): histograms("reward", [("step 0", [0.0, 1.0])]),
        ("optimizer.lr", "val/reward"): dots("val/reward", "optimizer.lr", [("1e-5", [0.1]), ("1e-4", [0.2, 0.3])]),
    }
    for names, picture in pictures.items():
        assert tuple(re.findall(r'<text class="axis"[^>]*>([^<]*)</text>', drawn(picture))) == names
    assert f'<span class="name">{long}</span>' in drawn(next(iter(pictures.values()))), "whole above the picture"


# ---------------------------------------------------------------------- doors


def test_a_notebook_shows_the_page_in_a_frame_of_its_own(nasty: Path) -> None:
    shown = show(nasty)._repr_html_()
    (tag,) = Page(shown).tags
    assert tag[0] == "iframe" and tag[1]["sandbox"] == "allow-scripts"
    report(nasty)
    assert tag[1]["srcdoc"] == (nasty / "report.html").read_text(encoding="utf-8")


def test_a_run_of_lightning_that_logged_no_metrics_is_told_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run_page_or_hint(RunDir(tmp_path))
    said = capsys.readouterr().out.replace("\n", "")
    assert "--trainer.logger=lit_rl.callbacks.JsonlLogger" in said
    assert f"--trainer.logger.path={tmp_path / 'metrics.jsonl'}" in said and not list(tmp_path.iterdir())


def test_the_page_says_what_rank_0_held_at_most(tmp_path: Path) -> None:
    peaks = {"process": 662 * 2**30 // 1000, "tensors": 2**20, "reserved": "damaged"}
    summary = {"peak_memory": peaks, "phase_memory": {"update": 66 * 2**30 // 100, "reward": "damaged"}}
    rows = [{"step": 1, "time/reward": 1.0, "time/update": 3.0}]
    text = run_page_html(run_files.RunFiles.of(run_folder(tmp_path / "run", rows, summary=summary)))
    shown = text[text.index('id="time"') :]
    assert "memory of the process" in shown and "1 MiB" in shown and "keeps for" not in shown
    assert shown.count("0.66 GiB") == 2 and "0.662" not in shown and "damaged" not in shown
    assert "No memory was measured yet" in run_page_html(run_files.RunFiles.of(run_folder(tmp_path / "old")))
