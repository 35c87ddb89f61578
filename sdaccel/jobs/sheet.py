"""A run's images on one HTML page beside them: what each was asked for, what failed. It asks the network for nothing.

Every text goes through `html.escape`: prompts are written by others.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from urllib.parse import quote

from sdaccel.engine import disk
from sdaccel.errors import StoreError


@dataclass(frozen=True)
class SheetRow:
    """One image. ``name``: its file beside the page. ``error``: why there is none."""

    name: str
    prompt: str
    negative: str = ""
    seed: int | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    seconds: float | None = None
    error: str | None = None


def write_sheet(path: Path, title: str, rows: Iterable[SheetRow]) -> None:
    """Writes the page, whole or not at all, over one that is there. Raises StoreError where it cannot be written."""
    data = _page(title, list(rows)).encode("utf-8", "replace")
    try:
        disk.overwrite(path, data)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}.") from None


def _page(title: str, rows: list[SheetRow]) -> str:
    failed = [row for row in rows if row.error is not None]
    drawn = [row for row in rows if row.error is None]
    said = [f"{len(drawn)} image{'s' * (len(drawn) != 1)}", *([f"{len(failed)} failed"] if failed else [])]
    policy = f"default-src 'none'; img-src 'self' file:; style-src 'unsafe-inline'; script-src 'sha256-{_HASH}'"
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        f"<header><h1>{escape(title)}</h1>\n<p>{', '.join(said)}</p>",
        '<p id="search" hidden><label>Prompt <input type="search" autocomplete="off"></label> '
        '<output aria-live="polite"></output></p></header>\n<main>',
    ]
    if failed:
        parts += ["<section><h2>Failed</h2>\n<ul>", *map(_failure, failed), "</ul></section>"]
    if drawn:
        parts += ['<section><h2>Images</h2>\n<div class="images">', *map(_image, drawn), "</div></section>"]
    parts.append(f"</main>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n")
    return "\n".join(parts)


def _failure(row: SheetRow) -> str:
    return (
        f'<li class="row"><p class="error">{escape(row.error or "")}</p>'
        f'<p class="prompt" dir="auto">{escape(row.prompt)}</p>{_details(row)}</li>'
    )


def _image(row: SheetRow) -> str:
    link = quote(row.name, safe="", errors="replace")
    return (
        f'<figure class="row"><a href="{link}"><img loading="lazy" decoding="async" src="{link}" '
        f'alt="{escape(row.prompt[:200] or row.name)}"></a>\n'
        f'<figcaption><p class="prompt" dir="auto">{escape(row.prompt)}</p>{_details(row)}</figcaption></figure>'
    )


def _details(row: SheetRow) -> str:
    facts = {
        "Prompt": row.prompt,
        "Negative prompt": row.negative,
        **row.facts,
        "File": row.name,
        "Seconds": "" if row.seconds is None else f"{row.seconds:.2f}",
    }
    cells = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items() if value)
    summary = row.name if row.seed is None else f"seed {row.seed}"
    return f"<details><summary>{escape(summary)}</summary><dl>{cells}</dl></details>"


_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --text: #1c1e21; --soft: #5f6670; --line: #d9dde2; --well: #f1f3f5;
  --mark: #2f6fb5; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ground: #16181b; --text: #e6e8ea; --soft: #9aa2ab; --line: #343a41;
  --well: #202429; --mark: #6aa5e8; --bad: #f2837a; } }
* { box-sizing: border-box; }
body { background: var(--ground); color: var(--text); font: 15px/1.45 system-ui, sans-serif; margin: 0 auto;
  max-width: 110rem; padding: 0 1rem 3rem; }
header { background: var(--ground); border-bottom: 1px solid var(--line); margin-bottom: 1rem; padding: .6rem 0;
  position: sticky; top: 0; z-index: 1; display: flex; flex-wrap: wrap; gap: .2rem 1.5rem; align-items: baseline; }
h1 { font-size: 1.2rem; } h2 { font-size: 1.05rem; margin: 1.5rem 0 .6rem; }
h1, header p, figure, figcaption p, li p { margin: 0; } h1, .prompt, .error, dd { overflow-wrap: anywhere; }
header p, summary, dt { color: var(--soft); }
input { background: var(--well); border: 1px solid var(--line); border-radius: 4px; color: var(--text); font: inherit;
  padding: .2rem .5rem; width: min(22rem, 45vw); }
.images { display: grid; gap: 1.2rem 1rem; grid-template-columns: repeat(auto-fill, minmax(min(13rem, 42vw), 1fr)); }
.row { content-visibility: auto; contain-intrinsic-size: auto 20rem; min-width: 0; }
li.row { contain-intrinsic-size: auto 5rem; }
.row[hidden], section:not(:has(.row:not([hidden]))) { display: none; }
figure a { background: var(--well); border-radius: 4px; display: block; }
img { aspect-ratio: 1; display: block; object-fit: contain; width: 100%; font-size: .8rem; }
:is(a, summary, input):focus-visible { outline: 3px solid var(--mark); outline-offset: -3px; }
figcaption { font-size: .88rem; margin-top: .3rem; }
.prompt { display: -webkit-box; overflow: hidden; -webkit-box-orient: vertical; -webkit-line-clamp: 3; }
summary { cursor: pointer; overflow-wrap: anywhere; padding: .1rem .3rem; }
dl { font-size: .85rem; margin: .3rem 0; } dd { margin: 0 0 .3rem; white-space: pre-wrap; }
ul { list-style: none; margin: 0; padding: 0; }
li { border-left: 3px solid var(--bad); margin-bottom: .8rem; padding-left: .7rem; }
.error { color: var(--bad); white-space: pre-wrap; }
"""

_SCRIPT = """
const box = document.querySelector("#search"), input = box.querySelector("input"), output = box.querySelector("output");
const found = [...document.querySelectorAll(".row")];
const rows = found.map(row => [row, row.querySelector(".prompt").textContent.toLowerCase()]);
function filter() {
  const words = input.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let shown = 0;
  for (const [row, prompt] of rows) {
    row.hidden = !words.every(word => prompt.includes(word));
    shown += !row.hidden;
  }
  output.textContent = words.length ? `${shown} of ${rows.length}` : "";
}
input.addEventListener("input", filter);
box.hidden = false;
filter();
"""
_HASH = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
