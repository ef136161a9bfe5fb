"""Two runs as one HTML page: what their validations say, their curves in the same pictures, and their configs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lit_rl.commands.html_file import document, safe
from lit_rl.commands.paired import Paired
from lit_rl.commands.run_curves import groups_of
from lit_rl.commands.run_files import RunFiles
from lit_rl.commands.run_page import config_value, curves, table
from lit_rl.commands.run_page_style import SCRIPT, STYLE

Values = Sequence[tuple[str, float, float]]


def page(
    names: tuple[str, str],
    runs: tuple[RunFiles, RunFiles],
    tests: Sequence[tuple[str, Paired]],
    values: Values,
    config: Sequence[tuple[str, Any, Any]],
    notes: Sequence[str],
) -> str:
    """Return the whole page.

    Args:
        names: Names of the runs.
        runs: Their files, for the curves.
        tests: A validation and a measure, with what its prompts say.
        values: Metrics with the last number of each run.
        config: Keys with the value in each run.
        notes: Sentences.
    """
    said = "".join(f'<li class="note"><b>note</b>{safe(note)}</li>' for note in notes)
    body = (
        f"<h1>{safe(names[0])} and {safe(names[1])}</h1>"
        f'<p><span class="key c0">A: {safe(names[0])}</span> <span class="key c1">B: {safe(names[1])}</span></p>'
        '<nav aria-label="Contents"><a href="#prompts">Same prompts</a><a href="#curves">Curves</a>'
        '<a href="#config">Configs</a></nav><main>'
        '<h2 id="prompts">On the same validation prompts</h2>'
        f'{_tests(tests)}{_last(values)}<ul class="alarms">{said}</ul>'
        f'<h2 id="curves">Curves</h2>{curves(groups_of(list(zip("AB", runs))))}'
        f'<h2 id="config">What the configs differ in</h2>{_config(config)}</main>\n'
    )
    return document(f"{names[0]} and {names[1]}: compared", STYLE, body, SCRIPT)


def _tests(tests: Sequence[tuple[str, Paired]]) -> str:
    if not tests:
        return ""
    rows = [
        (
            safe(name),
            f"{each.first:.3f}",
            f"{each.second:.3f}",
            f'<b>{each.difference:+.3f}</b> <span class="interval-of">{each.interval}</span>',
            safe(each.p_text),
            each.test,
            f"{each.prompts}",
        )
        for name, each in tests
    ]
    return table(("", "A", "B", "B - A, 95 % interval", "p", "test", "prompts"), rows)


def _last(values: Values) -> str:
    rows = [(safe(name), f"{one:.4g}", f"{two:.4g}", f"{two - one:+.4g}") for name, one, two in values]
    if not rows:
        return ""
    heading = "<h3>Last validations, as they were logged: each over all prompts of its run</h3>"
    return heading + table(("metric", "A", "B", "B - A"), rows)


def _config(config: Sequence[tuple[str, Any, Any]]) -> str:
    rows = [tuple(f'<span class="mono">{safe(config_value(each))}</span>' for each in row) for row in config]
    return table(("key", "A", "B"), rows, numbers=()) if rows else '<p class="dim">In nothing.</p>'
