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
    read.textContent = near.map(([name, [at, value]]) => `step ${at}  ${name ? name + '  ' : ''}${value}`).join('\n');
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
  const one_line = words => words.replace(/\s+/g, ' ');
  const words = (one_line(text(row)).trim() || '(empty)').slice(0, 120);
  line.append(
    make('b', short(row.r), row.r === null ? '' : row.r > mean ? 'above' : row.r < mean ? 'below' : ''),
    make('span', words + '  \u2190 ' + one_line(file.prompts[row.p].slice(-60)), 'mono'),
  );
  line.addEventListener('click', () => choose(place));
  return line;
}

function list() {
  const words = at('words').value.toLowerCase(), sort = at('sort').value;
  const says = row => [file.prompts[row.p], text(row), row.e, ...Object.values(row.x)].join('\n').toLowerCase();
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
  if (tokens.text[i].includes('\n')) token.classList.add('n');
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
