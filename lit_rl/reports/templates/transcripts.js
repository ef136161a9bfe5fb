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
