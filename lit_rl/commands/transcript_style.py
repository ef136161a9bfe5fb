"""How the page of `lit-rl transcripts` looks, and what it does: colours by what is chosen, and a filter."""

from __future__ import annotations

LEVELS = 4
"""Shades of a colour."""

_LAYOUT = """
:root { color-scheme: light dark; font: 14px/1.45 system-ui, sans-serif; }
body { margin: 0 auto; max-width: 1100px; padding: 0 1rem 4rem; }
h1 { font-size: 1.3rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
h3 { font-size: .95rem; margin: 1rem 0 .3rem; }
form { position: sticky; top: 0; z-index: 1; display: flex; flex-wrap: wrap; gap: .4rem 1rem; padding: .6rem 0;
  background: Canvas; border-bottom: 1px solid #8888; }
input[type=number] { width: 5rem; }
details { border: 1px solid #8885; border-radius: 4px; margin: .3rem 0; }
summary { cursor: pointer; padding: .3rem .6rem; overflow-wrap: anywhere; }
summary b { display: inline-block; min-width: 5rem; }
.turn { display: grid; grid-template-columns: 9rem minmax(0, 1fr); gap: .8rem; padding: .3rem .6rem;
  border-top: 1px solid #8883; content-visibility: auto; }
.who { text-align: right; font-size: .85rem; opacity: .8; }
.said { font-family: ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.prompt .said, .unread .said { opacity: .6; }
.bad b { color: #d1242f; }
i { font-style: normal; border-radius: 2px; box-shadow: inset -1px 0 #8883; }
i:empty::before { content: "\\00b7"; }
i.n::before { content: "\\23ce"; opacity: .5; }
.legend { display: none; margin: .3rem 0; }
[hidden] { display: none !important; }
"""

_BLUE, _AMBER, _GREEN, _RED, _VIOLET = "37,99,235", "217,119,6", "22,163,74", "220,38,38", "124,58,237"


def style() -> str:
    """Return the style sheet."""
    rules = [
        f"[data-by=author] .p {{ background: rgba({_BLUE},.3) }}",
        f"[data-by=author] .q {{ background: rgba({_BLUE},.1); opacity: .6 }}",
        f"[data-by=author] .e {{ background: rgba({_AMBER},.2); opacity: .7 }}",
        ":not([data-by=author]) > main .e { opacity: .5 }",
    ]
    shades = {"a": ("advantage", _GREEN), "b": ("advantage", _RED), "r": ("ratio", _GREEN), "s": ("ratio", _RED)}
    for letter, (by, colour) in {**shades, "l": ("logprob", _VIOLET)}.items():
        for level in range(1, LEVELS + 1):
            strength = f"{0.75 * level / LEVELS:.2f}"
            rules.append(f"[data-by={by}] .{letter}{level} {{ background: rgba({colour},{strength}) }}")
    rules += [f"[data-by={by}] .legend[data-for={by}] {{ display: block }}" for by in COLOURINGS]
    return _LAYOUT + "\n".join(rules) + "\n"


COLOURINGS = {
    "author": "who wrote it",
    "advantage": "advantage",
    "ratio": "ratio: training to sampler",
    "logprob": "log-prob of the sampler",
}
"""Quantities that tokens may be coloured by."""

SCRIPT = """
'use strict';
const at = id => document.getElementById(id), all = [...document.querySelectorAll('details')];
const inside = (value, low, high) => (low === '' || (value !== '' && +value >= +low))
  && (high === '' || (value !== '' && +value <= +high));
function filter() {
  const words = at('words').value.toLowerCase(), end = at('end').value, bad = at('bad').checked;
  let count = 0;
  for (const each of all) {
    const has = each.dataset;
    const shown = (!end || has.end === end) && (!bad || has.bad === '1')
      && inside(has.reward, at('low').value, at('high').value)
      && (!words || each.textContent.toLowerCase().includes(words));
    each.hidden = !shown;
    count += shown;
  }
  for (const part of document.querySelectorAll('section')) part.hidden = !part.querySelector('details:not([hidden])');
  at('count').textContent = count + ' of ' + all.length;
}
at('by').addEventListener('change', () => { document.body.dataset.by = at('by').value; });
for (const id of ['words', 'end', 'bad', 'low', 'high']) at(id).addEventListener('input', filter);
at('controls').addEventListener('submit', event => event.preventDefault());
document.addEventListener('mouseover', event => {
  const token = event.target;
  if (!token.dataset || !token.dataset.t || token.title) return;
  const [id, logprob, advantage, ratio] = token.dataset.t.split(' ');
  token.title = 'token ' + id + (logprob ? ', log-prob ' + logprob + ', advantage ' + advantage : ', read')
    + (ratio ? ', ratio ' + ratio : '');
});
document.body.dataset.by = at('by').value;
filter();
"""
"""The script, which reads the page alone. It holds no text of an episode."""
