"""The frame of a self-contained HTML page: style, light and dark, and no address of another file."""

from __future__ import annotations

from html import escape
from typing import Final

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1a1a1a; --dim: #5c5c5c; --paper: #ffffff; --line: #d8d8d8; --mark: #c1121f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ececec; --dim: #a8a8a8; --paper: #16181b; --line: #3a3d42; --mark: #ff6b6b; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1rem; font: 16px/1.45 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0; } .dim { color: var(--dim); font-size: .9rem; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin: .5rem 0; font-size: .9rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem; border-radius: 2px; }
.row { margin: .6rem 0; } .row > p { display: flex; justify-content: space-between; gap: 1rem; }
.row > p > span:last-child { white-space: nowrap; }
.bar { position: relative; display: flex; height: 1.6rem; }
.bar, svg { background: color-mix(in srgb, var(--line) 35%, transparent); }
.bar i { display: block; height: 100%; } .bar b { position: absolute; top: -.2rem; bottom: -.2rem; width: 2px;
  background: var(--mark); }
svg { display: block; width: 100%; height: 12rem; } svg.lanes { height: 7rem; }
.axis { display: flex; justify-content: space-between; gap: 1rem; font-size: .85rem; color: var(--dim); }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
td, th { padding: .25rem .5rem; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
td.n, th.n { text-align: right; }
.tree, .tree ul { list-style: none; margin: 0; padding: 0; }
.tree ul { padding-left: clamp(.6rem, 2vw, 1.4rem); border-left: 1px solid var(--line); }
.scroll { overflow-x: auto; }
"""


def html_document(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """Return a page.

    Args:
        body: HTML.
        style: CSS, in addition to that of all pages.
        script: JavaScript that runs after the body is parsed. The page is complete without it.
    """
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{escape(title)}</title><style>{_STYLE}{style}</style>"
    code = f"<script>{script}</script>" if script else ""
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}{code}</body></html>\n'
