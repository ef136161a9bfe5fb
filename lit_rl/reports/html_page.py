"""A page as one HTML file that needs no network, and the style and script that pages of runs share.

It loads nothing, no script runs but its own, and text of others is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from pathlib import Path
from typing import Any

from lit_rl.callbacks.display import escape_control
from lit_rl.core.durable_files import flush, replacing
from lit_rl.core.errors import StorageError


def safe(text: str) -> str:
    """Escape untrusted text for an element or an attribute in quotes; control characters become visible escapes."""
    return html.escape(escape_control(text))


def data(value: Any) -> str:
    """Return a value for the page's script to parse: ASCII JSON in which no tag can end or begin.

    Raises:
        ValueError: there is NaN or infinity in it, which JSON has not.
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def document(title: str, style: str, body: str, script: str, *, attributes: str = "", images: bool = False) -> str:
    """Return the whole file.

    Args:
        title: Plain text.
        style: The style sheet.
        body: Markup, with everything foreign in it `safe`.
        script: The only one that may run. It ends the body.
        attributes: Attributes of the body.
        images: Allow images that the body holds itself.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    seen = "img-src data:; " if images else ""
    policy = f"default-src 'none'; {seen}style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe(title)}</title><style>{style}</style></head>"
        f"<body{attributes and ' ' + attributes}>{body}<script>{script}</script></body></html>\n"
    )


def write_atomically(target: Path, text: str) -> None:
    """Write a file beside the target, then rename it: the target is whole or as it was.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        with replacing(target) as partial:
            partial.write_text(text, encoding="utf-8")
            flush(partial)
    except OSError as error:
        raise StorageError(f"{target} could not be written: {error.strerror}.") from error


PAGE_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif;
  --ink: light-dark(#1f2328, #e6edf3); --dim: light-dark(#59636e, #9198a1); --ground: light-dark(#fff, #0d1117);
  --card: light-dark(#f6f8fa, #151b23); --edge: light-dark(#d1d9e0, #30363d);
  --good: light-dark(#1a7f37, #3fb950); --bad: light-dark(#d1242f, #f85149); --warn: light-dark(#9a6700, #d29922);
  --c0: light-dark(#2f6db3, #6cb0f5); --c1: light-dark(#c4570f, #f0883e); --c2: light-dark(#2f7d4c, #56d364);
  --c3: light-dark(#7a4fb0, #bc8cff); --c4: light-dark(#a3336e, #f778ba); --c5: light-dark(#57606a, #9aa4af); }
body { margin: 0 auto; max-width: 1320px; padding: 0 1rem 4rem; color: var(--ink); background: var(--ground); }
h1 { font-size: 1.35rem; margin: 1.2rem 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.4rem 0 .6rem; padding-bottom: .2rem; border-bottom: 1px solid var(--edge); }
h3 { font-size: .95rem; margin: 1.2rem 0 .4rem; }
p { margin: .4rem 0; }
.dim, figcaption, th { color: var(--dim); }
nav { position: sticky; top: 0; z-index: 2; display: flex; gap: 1rem; overflow-x: auto; padding: .5rem 0;
  background: var(--ground); border-bottom: 1px solid var(--edge); white-space: nowrap; }
a { color: var(--c0); text-decoration: none; }
a:hover { text-decoration: underline; }
h2 { scroll-margin-top: 3rem; }
.status { padding: .05rem .5rem; border-radius: 1rem; border: 1px solid currentColor; font-size: .85rem; }
.status.finished { color: var(--good); } .status.failed { color: var(--bad); }
.status.stopped, .status.running, .status.unknown { color: var(--warn); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top; }
th { font-weight: 500; font-size: .9rem; }
tbody tr { border-top: 1px solid var(--edge); }
td.number, th.number { text-align: right; white-space: nowrap; }
.interval-of { color: var(--dim); font-size: .9em; white-space: nowrap; }
code, .mono, pre { font-family: ui-monospace, "SF Mono", Menlo, monospace; font-size: .88em; overflow-wrap: anywhere; }
pre { background: var(--card); padding: .8rem; border-radius: 6px; overflow: auto; max-height: 32rem;
  white-space: pre-wrap; }
.aside { color: var(--dim); font-size: .85rem; }
summary { cursor: pointer; color: var(--dim); padding: .2rem 0; }
.alarms { list-style: none; padding: 0; margin: .6rem 0; }
.alarms li { border-left: 4px solid var(--edge); background: var(--card); padding: .35rem .7rem; margin: .3rem 0;
  border-radius: 0 6px 6px 0; overflow-wrap: anywhere; white-space: pre-line; }
.alarms .failed { border-color: var(--bad); } .alarms .warning { border-color: var(--warn); }
.alarms b { font-weight: 600; margin-right: .5rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 360px), 1fr)); gap: .8rem; }
.chart { position: relative; margin: 0; padding: .5rem .6rem .3rem; background: var(--card); border-radius: 8px; }
figcaption { display: flex; flex-wrap: wrap; gap: .1rem .7rem; font-size: .82rem; min-height: 1.3rem; }
figcaption .name { color: var(--ink); font-weight: 600; overflow-wrap: anywhere; }
.key::before { content: ""; display: inline-block; width: .7em; height: .7em; margin-right: .3em; border-radius: 50%;
  background: currentColor; }
.key.hollow::before { background: none; box-shadow: inset 0 0 0 2px currentColor; }
.key b { font-weight: 500; color: var(--ink); }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); }
svg { display: block; width: 100%; height: auto; touch-action: pan-y; }
svg text { fill: var(--dim); font: 11px system-ui, sans-serif; }
svg path { fill: none; stroke: currentColor; stroke-linejoin: round; vector-effect: non-scaling-stroke; }
svg .line { stroke-width: 2; } svg .raw { stroke-width: 1; opacity: .3; }
svg .between { stroke-width: 1.2; opacity: .6; }
svg circle { fill: currentColor; } svg circle.hollow { fill: var(--card); stroke: currentColor; stroke-width: 1.6; }
svg .interval { stroke: currentColor; stroke-width: 1.4; opacity: .7; }
svg .grid { stroke: var(--edge); stroke-width: 1; } svg .cursor { stroke: var(--dim); stroke-dasharray: 3 3; }
svg .bar { fill: var(--c0); opacity: .8; }
.read { position: absolute; right: .6rem; top: 1.9rem; padding: .1rem .5rem; border-radius: 4px; font-size: .8rem;
  white-space: pre; background: var(--ground); border: 1px solid var(--edge); pointer-events: none; }
.read:empty { display: none; }
.share { display: flex; height: 1.1rem; border-radius: 5px; overflow: hidden; margin: .6rem 0; max-width: 46rem;
  gap: 1px; }
.share i { background: currentColor; }
.tools { display: flex; flex-wrap: wrap; gap: .5rem 1rem; align-items: end; margin: .6rem 0; }
.tools label { display: grid; font-size: .82rem; color: var(--dim); }
select, input, button { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--edge);
  border-radius: 6px; padding: .2rem .4rem; max-width: 100%; }
:focus-visible { outline: 2px solid var(--c0); outline-offset: 1px; }
.browser { display: grid; grid-template-columns: minmax(15rem, 24rem) minmax(0, 1fr); gap: 1rem; }
#rows { height: 28rem; overflow-y: auto; border: 1px solid var(--edge); border-radius: 8px; }
#rows div { display: flex; gap: .6rem; padding: .2rem .6rem; cursor: pointer; white-space: nowrap; }
#rows div[aria-selected=true] { background: light-dark(#dbeafe, #1f3a5f); }
#rows .first { border-top: 1px solid var(--edge); }
#rows b { flex: none; min-width: 3.6rem; text-align: right; font-variant-numeric: tabular-nums; font-weight: 600; }
#rows span { overflow: hidden; text-overflow: ellipsis; }
.above { color: var(--good); } .below { color: var(--bad); }
.said { font-family: ui-monospace, "SF Mono", Menlo, monospace; font-size: .9em; white-space: pre-wrap;
  overflow-wrap: anywhere; padding: .6rem .8rem; background: var(--card); border-radius: 8px; margin: .2rem 0 .8rem; }
.said i { font-style: normal; border-radius: 2px; box-shadow: inset -1px 0 light-dark(#0002, #fff3); }
.said i.n::before { content: "\\23ce"; opacity: .45; }
.said i:empty::before { content: "\\00b7"; }
.mask-read { opacity: .5; background: repeating-linear-gradient(45deg, #8883 0 3px, transparent 3px 7px); }
#shown { min-width: 0; }
#shown table { margin: .2rem 0 .8rem; }
#legend { font-size: .85rem; color: var(--dim); min-height: 1.3rem; }
#legend i, .swatch { font-style: normal; padding: 0 .4rem; border-radius: 3px; margin-right: .3rem; color: var(--ink); }
[hidden] { display: none !important; }
@media (max-width: 720px) {
  :root { font-size: 14px; }
  body { padding: 0 .7rem 3rem; }
  .browser { grid-template-columns: minmax(0, 1fr); }
  #rows { height: 13rem; }
  th, td { padding-right: .5rem; }
  .interval-of { display: block; }
}
"""
"""The style sheet, dark or light by the reader's system."""

PAGE_SCRIPT = """
'use strict';
const at = id => document.getElementById(id);
const make = (tag, text, name) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (name) node.className = name;
  return node;
};
const short = x => x === null || x === undefined ? '-' : Number.isInteger(x) ? String(x) : Number(x).toPrecision(4);

// Charts: the numbers nearest to the pointer.
const nearest = (points, step) => points.reduce((a, b) => Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a);
for (const svg of document.querySelectorAll('svg[data-frame]')) {
  const [first, last, left, right] = svg.dataset.frame.split(' ').map(Number);
  const lines = [...svg.querySelectorAll('[data-points]')];
  const named = lines.map(line => [line.dataset.name, JSON.parse(line.dataset.points)]);
  const cursor = svg.querySelector('.cursor'), read = svg.parentNode.querySelector('.read');
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const step = first + (x - left) / (right - left) * (last - first);
    const near = named.map(([name, points]) => [name, nearest(points, step)]);
    const to = nearest(near.map(([, point]) => point), step)[0];
    const place = left + (right - left) * (last > first ? (to - first) / (last - first) : 0);
    cursor.setAttribute('x1', place);
    cursor.setAttribute('x2', place);
    cursor.removeAttribute('hidden');
    read.textContent = near.map(([name, [at, value]]) => `step ${at}  ${name ? name + '  ' : ''}${value}`).join('\\n');
  });
  svg.addEventListener('pointerleave', () => {
    cursor.setAttribute('hidden', '');
    read.textContent = '';
  });
}

// Samples. What they say is put into the page as text, never as markup.
const files = at('samples') ? JSON.parse(at('samples').textContent) : [];
const GREEN = '22,163,74', RED = '220,38,38', VIOLET = '124,58,237', AMBER = '217,119,6', BLUE = '37,99,235';
// Of each number of a token: its size, of which 0 has no colour; colours above and below; what they say.
const kinds = {
  advantage: [x => x, GREEN, RED, 'above 0 green, below 0 red'],
  logprob: [x => -x, VIOLET, VIOLET, 'the less likely, the stronger'],
  ratio: [x => Math.log(Math.max(x, 1e-9)), GREEN, RED, 'above 1 green, below 1 red'],
  kl: [x => x, AMBER, BLUE, 'the further from the reference, the stronger'],
  entropy: [x => x, AMBER, AMBER, 'the higher, the stronger'],
  value: [x => x, GREEN, RED, 'above 0 green, below 0 red'],
};
const masks = {
  '': ['learned from', BLUE, .3],
  still: ['advantage 0', BLUE, .1],
  read: ['read', '128,128,128', .25],
  cut: ['not learned from: cut', RED, .25],
  unscored: ['not learned from: unscored', AMBER, .3],
  failed: ['not learned from: failed', RED, .4],
  left: ['not learned from: left out', AMBER, .2],
};
let file, order = [], chosen = 0, full = {};

const row_at = i => file.rows[i], text = row => row.t ? row.t.text.join('') : row.c;
const orders = {
  row: (a, b) => a - b,
  high: (a, b) => (row_at(b).r ?? -1e9) - (row_at(a).r ?? -1e9),
  low: (a, b) => (row_at(a).r ?? 1e9) - (row_at(b).r ?? 1e9),
  advantage: (a, b) => Math.abs(row_at(b).a ?? 0) - Math.abs(row_at(a).a ?? 0),
  long: (a, b) => text(row_at(b)).length - text(row_at(a)).length,
};
// What has the full colour: nineteen in twenty of the sizes other than 0 are at most that, so that one of them alone
// does not leave all others pale.
function strong(numbers) {
  const sorted = numbers.map(Math.abs).filter(x => x).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.ceil(.95 * sorted.length) - 1] : 0;
}

function sizes(row, name) {
  if (!row.t || !row.t[name]) return [];
  return row.t[name].filter((x, i) => x !== null && row.t.mask[i] !== 'read').map(kinds[name][0]);
}

function open_file() {
  file = files[at('file').value];
  full = {};
  for (const name in kinds) {
    const found = file.rows.flatMap(row => sizes(row, name));
    if (found.length) full[name] = strong(found) || 1;
  }
  const advantages = file.rows.map(row => row.a).filter(a => a !== null);
  if (!full.advantage && advantages.length) full.advantage = strong(advantages) || 1;
  const tokens = file.rows.some(row => row.t), by = at('by');
  for (const option of by.options) {
    option.disabled = !(option.value === 'none' || option.value in full || (option.value === 'mask' && tokens));
  }
  if (by.selectedOptions[0].disabled) by.value = full.advantage ? 'advantage' : 'none';
  at('held').textContent = file.said;
  list();
}

function line_of(row, place, mean, first) {
  const line = make('div', undefined, first ? 'first' : '');
  line.id = 'row' + place;
  line.setAttribute('role', 'option');
  const one_line = words => words.replace(/\\s+/g, ' ');
  const words = (one_line(text(row)).trim() || '(empty)').slice(0, 120);
  line.append(
    make('b', short(row.r), row.r === null ? '' : row.r > mean ? 'above' : row.r < mean ? 'below' : ''),
    make('span', words + '  \\u2190 ' + one_line(file.prompts[row.p].slice(-60)), 'mono'),
  );
  line.addEventListener('click', () => choose(place));
  return line;
}

function list() {
  const words = at('words').value.toLowerCase(), sort = at('sort').value;
  const says = row => [file.prompts[row.p], text(row), row.e, ...Object.values(row.x)].join('\\n').toLowerCase();
  order = [...file.rows.keys()].filter(i => !words || says(row_at(i)).includes(words));
  order.sort((a, b) => orders[sort](a, b) || a - b);
  const scored = file.rows.map(row => row.r).filter(r => r !== null);
  const mean = scored.reduce((a, b) => a + b, 0) / (scored.length || 1);
  at('rows').replaceChildren(...order.map((i, place) => {
    const row = row_at(i);
    return line_of(row, place, mean, place && sort === 'row' && row.p !== row_at(order[place - 1]).p);
  }));
  at('count').textContent = words ? order.length + ' of ' + file.rows.length + ' have it' : '';
  choose(sort === 'row' ? Math.max(0, order.findIndex(i => row_at(i).a)) : 0);
}

function choose(place) {
  chosen = Math.max(0, Math.min(order.length - 1, place));
  const box = at('rows'), line = at('row' + chosen);
  for (const other of box.querySelectorAll('[aria-selected=true]')) other.setAttribute('aria-selected', 'false');
  if (!line) {
    box.removeAttribute('aria-activedescendant');
    at('shown').replaceChildren(make('p', 'No completion has these words, in its text or in a column.'));
    return;
  }
  line.setAttribute('aria-selected', 'true');
  box.setAttribute('aria-activedescendant', line.id);
  const top = line.offsetTop - box.offsetTop, bottom = top + line.offsetHeight;
  if (top < box.scrollTop) box.scrollTop = top;
  if (bottom > box.scrollTop + box.clientHeight) box.scrollTop = bottom - box.clientHeight;
  show();
}

function paint(node, by, value) {
  if (value === null || value === undefined || !full[by]) return;
  const [size, above, below] = kinds[by], x = size(value), strength = .75 * Math.min(1, Math.abs(x) / full[by]);
  if (x) node.style.background = `rgba(${x < 0 ? below : above},${strength.toFixed(3)})`;
}

function paint_mask(node, mask) {
  node.style.background = `rgba(${masks[mask][1]},${masks[mask][2]})`;
}

function token_of(tokens, i, by) {
  const token = make('i', tokens.text[i]), mask = tokens.mask[i];
  const numbers = Object.keys(kinds).filter(name => tokens[name] && mask !== 'read');
  token.title = [masks[mask][0], ...numbers.map(name => name + ' ' + short(tokens[name][i]))].join(', ');
  if (tokens.text[i].includes('\\n')) token.classList.add('n');
  if (by === 'mask') paint_mask(token, mask);
  else if (mask === 'read') token.classList.add('mask-read');
  else if (by !== 'none' && tokens[by]) paint(token, by, tokens[by][i]);
  return token;
}

function completion(row) {
  const by = at('by').value, said = make('div', undefined, 'said');
  if (row.t) said.append(...row.t.text.map((_, i) => token_of(row.t, i, by)));
  else said.textContent = row.c;
  if (!row.t && by === 'advantage') paint(said, by, row.a);
  return said;
}

function table(pairs) {
  const node = make('table'), body = make('tbody');
  for (const [name, value] of pairs) {
    const line = make('tr');
    line.append(make('th', name), make('td', value, 'mono'));
    line.firstChild.scope = 'row';
    body.append(line);
  }
  node.append(body);
  return node;
}

function show() {
  const row = row_at(order[chosen]);
  if (!row) return;
  const numbers = [['reward', short(row.r)], ...Object.entries(row.f).map(([name, value]) => [name, short(value)])];
  if (row.a !== null) numbers.push(['advantage', short(row.a)]);
  numbers.push(['end', row.e], ...Object.entries(row.x));
  at('shown').replaceChildren(
    make('h3', 'Prompt'), make('div', file.prompts[row.p], 'said'),
    make('h3', 'Completion'), completion(row), table(numbers),
  );
  legend();
}

// What the legend shows: shares of the full colour, those below 0 where a token has such a colour.
function shares_of(by) {
  const below = by === 'advantage' || file.rows.some(row => sizes(row, by).some(x => x < 0));
  return kinds[by][1] !== kinds[by][2] && below ? [-1, -.5, 0, .5, 1] : [0, .5, 1];
}

function number_at(by, share) {
  const size = share * full[by];
  return { ratio: Math.exp(size), logprob: -size }[by] ?? size;
}

function legend() {
  const by = at('by').value, node = at('legend'), tokens = file.rows.filter(row => row.t);
  node.replaceChildren(make('b', at('by').selectedOptions[0].text + ': '));
  if (by === 'none') node.replaceChildren();
  if (by === 'mask') {
    for (const mask in masks) {
      if (!tokens.some(row => row.t.mask.includes(mask))) continue;
      const key = make('i', masks[mask][0]);
      paint_mask(key, mask);
      node.append(key);
    }
  } else if (kinds[by]) {
    const whole = tokens.length ? '' : ' (of the whole completion: this file has no tokens)';
    const row = row_at(order[chosen]);
    const missing = row && row.t && !row.t[by] ? ' (not computed of this completion when it was learned from)' : '';
    for (const share of full[by] ? shares_of(by) : []) {
      const key = make('i', short(number_at(by, share)));
      paint(key, by, number_at(by, share));
      node.append(key);
    }
    node.append(`and beyond; ${kinds[by][3]}${whole}${missing}`);
  }
}

if (files.length) {
  at('file').addEventListener('change', open_file);
  for (const id of ['words', 'sort']) at(id).addEventListener('input', list);
  at('by').addEventListener('change', show);
  at('rows').addEventListener('keydown', event => {
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
    if (!(event.key in steps)) return;
    event.preventDefault();
    choose(chosen + steps[event.key]);
  });
  open_file();
}
document.documentElement.dataset.ready = '1';
"""
"""The script, which reads the page and the JSON in it alone. It sets the mark `data-ready` at its end."""
