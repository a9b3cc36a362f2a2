"""Style and script of the page of a profile. The script zooms the timeline by changing the view box of its pictures."""

from typing import Final

STYLE: Final = """
.lane svg { height: 3.2rem; cursor: grab; touch-action: pan-y; }
#lanes > p { margin: .4rem 0 0; }
.zoom button { font: inherit; padding: .1rem .7rem; color: var(--ink); background: var(--paper);
  border: 1px solid var(--line); border-radius: 4px; }
tr:last-child td { font-weight: inherit; }
#phases tr:last-child td { font-weight: bold; }
"""

SCRIPT: Final = """
(() => {
  const lanes = document.getElementById('lanes');
  if (!lanes) return;
  const pictures = [...lanes.querySelectorAll('svg')], whole = 1000, end = Number(lanes.dataset.end);
  let left = 0, width = whole;
  const time = x => { const s = x / whole * end; return s < 1 ? (s * 1000).toFixed(1) + ' ms' : s.toFixed(2) + ' s'; };
  const show = () => {
    width = Math.min(whole, Math.max(whole / 5000, width));
    left = Math.min(whole - width, Math.max(0, left));
    for (const each of pictures) each.setAttribute('viewBox', `${left} 0 ${width} 42`);
    document.getElementById('from').textContent = left ? time(left) : '0';
    document.getElementById('to').textContent = time(left + width);
    document.getElementById('shown').textContent = 'shown: ' + time(width);
  };
  const zoom = (by, at) => {
    const fixed = left + width * at;
    width = by ? width / by : whole;
    width = Math.min(whole, Math.max(whole / 5000, width));
    left = fixed - width * at;
    show();
  };
  document.querySelector('.zoom').hidden = false;
  for (const button of document.querySelectorAll('.zoom button'))
    button.addEventListener('click', () => zoom(Number(button.dataset.by), 0.5));
  let held = null;
  for (const each of pictures) {
    each.addEventListener('wheel', event => {
      const box = each.getBoundingClientRect();
      if (event.ctrlKey) zoom(event.deltaY < 0 ? 1.3 : 1 / 1.3, (event.clientX - box.left) / box.width);
      else if (width < whole && event.deltaX) { left += event.deltaX / box.width * width; show(); }
      else return;
      event.preventDefault();
    }, {passive: false});
    each.addEventListener('pointerdown', event => { held = event.clientX; each.setPointerCapture(event.pointerId); });
    each.addEventListener('pointermove', event => {
      if (held === null) return;
      left -= (event.clientX - held) / each.getBoundingClientRect().width * width;
      held = event.clientX;
      show();
    });
    each.addEventListener('pointerup', () => { held = null; });
  }
  show();
})();
"""
