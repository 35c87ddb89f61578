"""Engines on one self-contained HTML page: facts, and plots drawn as inline SVG. It asks the network for nothing.

Every text goes through `html.escape`: names and paths of models are written by others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from sdaccel.bench import OpTime
from sdaccel.listing import Listed, check_error, profile_text, size_text
from sdaccel.profile import ImageProfile, Range

MOST_BARS = 24

_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --text: #1c1e21; --soft: #5f6670; --line: #d9dde2; --bar: #2f6fb5;
  --area: #2f6fb522; }
@media (prefers-color-scheme: dark) { :root { --ground: #16181b; --text: #e6e8ea; --soft: #9aa2ab; --line: #343a41;
  --bar: #6aa5e8; --area: #6aa5e82e; } }
body { background: var(--ground); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; border-top: 1px solid var(--line); padding-top: 1.5rem; }
h3 { font-size: 1rem; margin-bottom: .3rem; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .15rem 1.2rem .15rem 0; vertical-align: top; }
th { color: var(--soft); font-weight: 500; } code { font: 13px ui-monospace, monospace; overflow-wrap: anywhere; }
svg { max-width: 100%; height: auto; } svg text { fill: var(--text); font: 12px system-ui, sans-serif; }
svg .soft { fill: var(--soft); } svg .bar { fill: var(--bar); } svg .area { fill: var(--area); stroke: var(--bar); }
svg .axis { stroke: var(--line); } .plots { display: flex; flex-wrap: wrap; gap: 0 2.5rem; }
.ready { color: #23843b; } .stale { color: #b36b00; } .broken { color: #c22f2f; }
"""


def engines_page(
    items: Sequence[Listed], times: Mapping[str, tuple[dict[str, int], list[OpTime]]] | None = None
) -> str:
    """The page about ``items``. ``times``: engine key → (axis sizes, time by operator), where it was measured."""
    measured = times or {}
    title = f"sdaccel: {items[0].entry.engine.model}" if len(items) == 1 and items[0].entry else "sdaccel: engines"
    body = "\n".join(_engine(item, measured.get(item.key)) for item in items)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{_overview(items)}\n{body}\n</body>\n</html>\n"
    )


def _overview(items: Sequence[Listed]) -> str:
    rows = [
        (
            _name(item),
            item.state,
            size_text(item.nbytes),
            size_text(item.shared),
            f"<code>{escape(item.key[:12])}</code>",
        )
        for item in items
    ]
    head = "".join(f"<th>{name}</th>" for name in ("component", "state", "size", "shared", "id"))
    cells = "".join(
        f'<tr><td>{escape(name)}</td><td class="{escape(state)}">{escape(state)}</td><td>{own}</td>'
        f"<td>{shared}</td><td>{key}</td></tr>"
        for name, state, own, shared, key in rows
    )
    return f"<table><tr>{head}</tr>{cells}</table>"


def _name(item: Listed) -> str:
    return item.entry.engine.component if item.entry else "unreadable"


def _engine(item: Listed, times: tuple[dict[str, int], list[OpTime]] | None) -> str:
    head = f"<h2>{escape(_name(item))}</h2>"
    if item.entry is None:
        return f'{head}<p class="broken">{escape(item.reason)}</p>'
    engine = item.entry.engine
    details = engine.details
    error = check_error(item.entry)
    facts = {
        "id": item.key,
        "state": f"{item.state}{': ' + item.reason if item.reason else ''}",
        "model": f"{engine.model} ({engine.family})",
        "origin": engine.origin,
        "weights": engine.weights,
        "precision": engine.precision,
        "backend": f"{engine.backend}, {_pairs(engine.versions)}",
        "device": _pairs(engine.device),
        "profiles": "; ".join(profile_text(item.entry)),
        "built": f"{engine.created}, in {engine.build_seconds:.1f} s",
        "error against torch": "not checked" if error is None else f"{error:.2e}",
    }
    rows = "".join(f"<tr><th>{escape(k)}</th><td><code>{escape(str(v))}</code></td></tr>" for k, v in facts.items())
    plots = [
        ("Profiles: width × height in pixels, the dot is opt", profile_map(engine.image_profiles)),
        ("Operators", bars(_counts(details.get("ops")), "{:.0f}")),
        ("Fusions, how often each fired", bars(_counts(details.get("fused")), "{:.0f}")),
        (
            "Size on disk, MB",
            bars({"own files": item.nbytes / 1e6, "shared weights and graph": item.shared / 1e6}, "{:.1f}"),
        ),
    ]
    if times is not None:
        shape, ops = times
        where = ", ".join(f"{axis} {size}" for axis, size in shape.items())
        plots.insert(
            1, (f"Where time goes, ms of one call ({where})", bars({o.op: o.milliseconds for o in ops}, "{:.2f}"))
        )
    drawn = "".join(f"<div><h3>{escape(name)}</h3>{svg}</div>" for name, svg in plots if svg)
    return (
        f'{head}<table>{rows}</table><div class="plots">{drawn}</div>{_tensors(engine)}{_checks(details.get("check"))}'
    )


def _pairs(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _counts(value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        return {}
    return {
        str(name): float(number) for name, number in value.items() if isinstance(number, (int, float)) and number > 0
    }


def _tensors(engine: Any) -> str:
    rows = ""
    for kind, specs in (("input", engine.inputs), ("output", engine.outputs)):
        for spec in specs:
            shape = " × ".join(map(str, spec.shape))
            optional = "optional" if spec.optional else ""
            cells = (kind, spec.name, spec.dtype, shape, optional)
            rows += "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    return f"<details><summary>Inputs and outputs</summary><table>{rows}</table></details>"


def _checks(check: Any) -> str:
    shapes = check.get("shapes") if isinstance(check, dict) else None
    if not isinstance(shapes, list):
        return ""
    rows = ""
    for shape in shapes:
        if isinstance(shape, dict):
            where = ", ".join(f"{axis} {size}" for axis, size in shape.items() if axis != "error")
            rows += f"<tr><td>{escape(where)}</td><td>{escape(str(shape.get('error')))}</td></tr>"
    reference = escape(str(check.get("reference", "torch")))
    return (
        f"<details><summary>Errors against {reference}</summary>"
        f"<table><tr><th>shape</th><th>largest difference</th></tr>{rows}</table></details>"
    )


# ---- plots


def bars(values: Mapping[str, float], form: str) -> str:
    """A horizontal bar for each value, the largest first; the smallest are summed where there are too many."""
    ordered = sorted(values.items(), key=lambda item: -item[1])
    if len(ordered) > MOST_BARS:
        rest = ordered[MOST_BARS - 1 :]
        ordered = [*ordered[: MOST_BARS - 1], (f"{len(rest)} others", sum(value for _, value in rest))]
    if not ordered:
        return ""
    top = max(value for _, value in ordered) or 1.0
    label, width, row = 190, 220, 18
    parts = []
    for number, (name, value) in enumerate(ordered):
        y = number * row
        length = max(1.0, width * value / top)
        shown = name if len(name) <= 28 else name[:27] + "…"
        parts.append(
            f'<text x="{label - 8}" y="{y + 13}" text-anchor="end">{escape(shown)}</text>'
            f'<rect class="bar" x="{label}" y="{y + 3}" width="{length:.1f}" height="{row - 6}"/>'
            f'<text class="soft" x="{label + length + 6:.1f}" y="{y + 13}">{escape(form.format(value))}</text>'
        )
    height = row * len(ordered)
    full = label + width + 70
    return f'<svg role="img" viewBox="0 0 {full} {height}" width="{full}" height="{height}">{"".join(parts)}</svg>'


def profile_map(profiles: Sequence[ImageProfile]) -> str:
    """Each profile as the rectangle of sizes that it holds, width to the right and height upwards."""
    if not profiles:
        return ""
    top = max(max(profile.width.max, profile.height.max) for profile in profiles) * 1.08
    side, edge = 260, 44

    def x(pixels: float) -> float:
        return edge + side * pixels / top

    def y(pixels: float) -> float:
        return 10 + side - side * pixels / top

    parts = [
        f'<line class="axis" x1="{edge}" y1="{10 + side}" x2="{edge + side}" y2="{10 + side}"/>'
        f'<line class="axis" x1="{edge}" y1="10" x2="{edge}" y2="{10 + side}"/>'
    ]
    for profile in profiles:
        w, h = profile.width, profile.height
        wide, tall = max(3.0, x(w.max) - x(w.min)), max(3.0, y(h.min) - y(h.max))
        parts.append(
            f'<rect class="area" x="{x(w.min):.1f}" y="{y(h.max):.1f}" width="{wide:.1f}" height="{tall:.1f}"/>'
            f'<circle class="bar" cx="{x(w.opt):.1f}" cy="{y(h.opt):.1f}" r="3.5"/>'
        )
    for pixels in _spaced((profile.width for profile in profiles), x, 34):
        parts.append(f'<text class="soft" x="{x(pixels):.1f}" y="{side + 26}" text-anchor="middle">{pixels}</text>')
    for pixels in _spaced((profile.height for profile in profiles), y, 14):
        parts.append(f'<text class="soft" x="{edge - 6}" y="{y(pixels) + 4:.1f}" text-anchor="end">{pixels}</text>')
    full = side + edge + 24
    return (
        f'<svg role="img" viewBox="0 0 {full} {side + 34}" width="{full}" height="{side + 34}">{"".join(parts)}</svg>'
    )


def _spaced(ranges: Iterable[Range], place: Callable[[float], float], gap: float) -> list[int]:
    """The numbers to write at an axis: those whose places lie ``gap`` or more apart."""
    chosen: list[int] = []
    for number in sorted({n for r in ranges for n in (r.min, r.opt, r.max)}):
        if not chosen or abs(place(number) - place(chosen[-1])) >= gap:
            chosen.append(number)
    return chosen
