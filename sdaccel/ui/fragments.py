"""The pages' own HTML: tables, bars, notices. Every text is escaped: names and paths are written by others.

It stands on the colours that every Gradio theme defines, so that it looks at home in each host, light or dark.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from sdaccel.listing import size_text
from sdaccel.ui.preflight import Preflight
from sdaccel.ui.queue import DONE, INTERRUPTED, RUNNING, WAITING, Job
from sdaccel.ui.requests import BuildRequest
from sdaccel.ui.rows import EngineRow
from sdaccel.ui.tasks import FAILED, Task

if TYPE_CHECKING:
    from sdaccel.draw import Result
    from sdaccel.ui.comparison import Comparison

STYLE = """<style>
.sd { --line: var(--border-color-primary, #d9dde2); --soft: #5f6670; --ok: #1a7f37; --warn: #8a5200; --bad: #c2272d;
  --accent: var(--color-accent, #2f6fb5); color: var(--body-text-color, #1c1e21); font-size: 14px; line-height: 1.5;
  overflow-wrap: anywhere; }
.dark .sd { --soft: #a3abb5; --ok: #57c478; --warn: #e3a34b; --bad: #ff8a80; }
.sd-slot:not(:has(.sd)) { display: none !important; }
.sd-slot, .sd-slot > div { padding: 0 !important; }
.sd p { margin: .25rem 0; } .sd h3 { font-size: 1rem; margin: 0 0 .4rem !important; }
.sd .soft { color: var(--soft); font-weight: 400; }
.sd .ok { color: var(--ok); } .sd .warn { color: var(--warn); } .sd .bad { color: var(--bad); }
.sd .run { color: var(--accent); }
.sd .sd-notice { border-left: 4px solid var(--accent); padding: .5rem .75rem; border-radius: 4px;
  background: var(--background-fill-secondary, #f4f5f7); color: inherit; }
.sd .sd-notice.bad { border-color: var(--bad); } .sd .sd-notice.ok { border-color: var(--ok); }
.sd .sd-notice.warn { border-color: var(--warn); }
.sd .sd-problem { color: var(--bad); margin: 0 0 .25rem .75rem; }
.sd-card { border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem; margin: 0 0 .6rem; }
.sd-card:last-child { margin-bottom: 0; }
.sd-head { display: flex; flex-wrap: wrap; gap: .15rem .75rem; align-items: baseline; }
.sd-head b { font-weight: 600; } .sd-head .end { margin-left: auto; }
.sd-pill { font-size: 12px; padding: 0 .5rem; border: 1px solid currentColor; border-radius: 99px;
  white-space: nowrap; }
.sd-bar { height: 8px; border-radius: 99px; overflow: hidden; margin: .45rem 0 .3rem; background: var(--line); }
.sd-bar span { display: block; height: 100%; background: var(--accent); border-radius: 99px; transition: width .3s; }
.sd-empty { border: 1px dashed var(--line); border-radius: 8px; padding: 1.25rem; text-align: center; }
.sd table { width: 100%; border-collapse: collapse; margin: 0 !important; font-size: 14px; border: 0 !important; }
.sd th, .sd td { text-align: left !important; padding: .4rem .9rem .4rem 0 !important; vertical-align: top;
  border: 0 !important; color: inherit; overflow-wrap: break-word; }
.sd tr { border: 0 !important; border-bottom: 1px solid var(--line) !important; background: none !important; }
.sd thead th { color: var(--soft); font-weight: 500; font-size: 12px; white-space: nowrap; }
.sd tr.group td { font-weight: 600; padding-top: 1rem !important; }
.sd tr.told { border-bottom: 0 !important; } .sd tr.why td { padding-top: 0 !important; }
.sd td .soft { font-size: 12px; } .sd .num { white-space: nowrap; font-variant-numeric: tabular-nums; }
.sd code { font: 12px ui-monospace, monospace; background: none; border: 0; padding: 0; color: var(--soft); }
.sd pre { font: 12px/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow: auto; max-height: 20rem; margin: 0;
  padding: .6rem .8rem; border-radius: 6px; border: 1px solid var(--line);
  background: var(--background-fill-secondary, #f4f5f7); color: inherit; }
.sd summary { cursor: pointer; color: var(--soft); padding: .2rem 0; }
.sd dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem .9rem; margin: 0; }
.sd dt { color: var(--soft); } .sd dd { margin: 0; }
.sd ul { margin: .4rem 0 0; padding-left: 1.1rem; list-style: disc; }
.sd-pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 220px), 1fr)); gap: .9rem;
  margin-top: .5rem; }
.sd-pictures figure { margin: 0; } .sd-pictures img { width: 100%; height: auto; border-radius: 6px; display: block;
  margin: 0; border: 1px solid var(--line); }
.sd figcaption { padding-top: .3rem; }
.sd-live { max-width: 100%; width: 384px; border-radius: 6px; display: block; margin: .5rem 0 0; }
.sd-frame { width: 100%; height: min(75vh, 900px); border: 1px solid var(--line); border-radius: 8px;
  background: #fff; }
.sd-out { display: none !important; }
.sd-slot .generating, .sd-quiet .generating { border-color: transparent !important; animation: none !important; }
@media (max-width: 760px) {
  .sd-rows thead { display: none; }
  .sd-rows, .sd-rows tbody { display: block; }
  .sd-rows tr { display: grid; grid-template-columns: 1fr 1fr; gap: .15rem .9rem; padding: .55rem 0; }
  .sd-rows td { display: block; padding: 0 !important; }
  .sd-rows td::before { content: attr(data-name); color: var(--soft); font-size: 12px; display: block; }
  .sd-rows td:first-child::before, .sd-rows td.wide::before { content: none; }
  .sd-rows td.wide, .sd-rows tr.group td { grid-column: 1 / -1; }
  .sd-rows td.top { grid-row: 1; grid-column: 2; text-align: right !important; }
  .sd-rows td.top::before { content: none; }
}
</style>"""

NAMES = {
    "unet": "UNet",
    "vae_decoder": "VAE decoder",
    "vae_encoder": "VAE encoder",
    "text_encoder": "text encoder",
    "text_encoder_2": "text encoder 2",
}


def name(component: str) -> str:
    return NAMES.get(component, component)


def box(inner: str) -> str:
    return f'<div class="sd">{inner}</div>'


# ---- words


def duration(seconds: float) -> str:
    """``8 s``, ``2 min 5 s``, ``1 h 20 min``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole < 600 and whole % 60 else f"{round(whole / 60)} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def ago(when: float | None) -> str:
    if when is None:
        return "never"
    seconds = time.time() - when
    for length, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'' if count == 1 else 's'} ago"
    return "just now"


def plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def request_text(request: BuildRequest) -> str:
    """What is built, in short."""
    if request.preset:
        parts = [f"preset {request.preset}"]
    elif request.profiles:
        parts = ["as it was built before"]
    else:
        parts = [", ".join(request.resolutions) + " px" if request.resolutions else "native range"]
    parts += [f"batch {', '.join(request.batches)}"] if request.batches else []
    parts += [f"tokens {', '.join(request.tokens)}"] if request.tokens else []
    parts += [", ".join(map(name, request.components))] if request.components else []
    parts += [request.precision] if request.precision else []
    return " · ".join(parts)


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


# ---- small things


def notice(text: str, kind: str = "") -> str:
    """kind: "", "ok", "warn" or "bad". Empty text shows nothing."""
    if not text:
        return ""
    role = "alert" if kind == "bad" else "status"
    return box(f'<div class="sd-notice {kind}" role="{role}">{escape(sentence(text))}</div>')


def problem(text: str) -> str:
    return box(f'<p class="sd-problem" role="alert">{escape(sentence(text))}</p>') if text else ""


def bar(fraction: float, label: str) -> str:
    percent = 100 * min(1.0, max(0.0, fraction))
    return (
        f'<div class="sd-bar" role="progressbar" aria-label="{escape(label)}" aria-valuemin="0" aria-valuemax="100" '
        f'aria-valuenow="{percent:.0f}"><span style="width:{percent:.1f}%"></span></div>'
    )


def _line(stage: str, fraction: float, seconds: float, left: float | None) -> str:
    parts = [f"{100 * fraction:.0f} %", duration(seconds)]
    parts += [f"about {duration(left)} left"] if left is not None else []
    return (
        f'<div class="sd-head soft"><span>{escape(stage)}</span><span class="end num">{" · ".join(parts)}</span></div>'
    )


def task(running: Task) -> str:
    """A task under way, with its picture; why it failed; nothing of one that is done."""
    if running.running:
        picture = f'<img class="sd-live" alt="the image so far" src="{running.preview}">' if running.preview else ""
        return box(
            f'<div class="sd-card">{bar(running.fraction, running.title)}'
            f"{_line(running.stage, running.fraction, running.seconds, running.seconds_left)}{picture}</div>"
        )
    if running.state == FAILED:
        return notice(running.message, "bad")
    return notice(f"{running.title} was stopped.", "warn")


# ---- engines


def engines(rows: Sequence[EngineRow]) -> str:
    """The table, a group a checkpoint."""
    if not rows:
        return box('<div class="sd-empty"><p><b>No engines yet</b></p><p class="soft">Build some on the Build page: '
                   "pick a checkpoint, look at what it needs, press Build.</p></div>")  # fmt: skip
    heads = ("component", "images", "precision", "size", "last used", "speed", "state")
    body = ""
    for checkpoint, members in group(rows).items():
        total = sum(row.size for row in members)
        body += (
            f'<tr class="group"><td colspan="{len(heads)}">{escape(checkpoint)} '
            f'<span class="soft">{plural(len(members), "engine")}, {size_text(total)} of their own</span></td></tr>'
        )
        body += "".join(_engine(row, heads) for row in members)
    head = "".join(f"<th>{text}</th>" for text in heads)
    return box(f'<table class="sd-rows"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>')


def group(rows: Sequence[EngineRow]) -> dict[str, list[EngineRow]]:
    """Checkpoint → its engines, by component."""
    found: dict[str, list[EngineRow]] = {}
    for row in rows:
        found.setdefault(row.checkpoint or "unreadable", []).append(row)
    order = list(NAMES)
    for members in found.values():
        members.sort(key=lambda row: order.index(row.component) if row.component in order else len(order))
    return found


def shapes(row: EngineRow) -> str:
    """``256-512 px · batch 1-4 · 77 tokens``: each distinct value once."""
    parts = [", ".join(dict.fromkeys(row.resolutions)) + " px"] if row.resolutions else []
    parts += [f"batch {', '.join(dict.fromkeys(row.batches))}"] if row.batches else []
    parts += [f"tokens {', '.join(dict.fromkeys(row.tokens))}"] if row.tokens else []
    return " · ".join(parts)


def _engine(row: EngineRow, heads: Sequence[str]) -> str:
    kind = {"ready": "ok", "stale": "warn"}.get(row.state, "bad")
    if row.component:
        speed = (
            f'<span class="num">{row.speed:.2f}×</span> torch'
            if row.speed
            else '<span class="soft">not measured</span>'
        )
        used = escape(ago(row.last_used))
    else:
        speed = used = ""
    cells = (
        f"{escape(name(row.component) or 'unreadable')}<br><code>{escape(row.key[:12])}</code>",
        escape(shapes(row)),
        f'{escape(row.precision)}<br><span class="soft">{escape(row.backend)}</span>',
        f'<span class="num">{size_text(row.size)}</span><br>'
        f'<span class="soft num">+ {size_text(row.shared)} shared</span>',
        used,
        speed,
        f'<span class="sd-pill {kind}">{escape(row.state)}</span>',
    )
    kinds = {"images": "wide", "state": "top"}
    joined = "".join(
        f'<td data-name="{head}" class="{kinds.get(head, "")}">{cell}</td>'
        for head, cell in zip(heads, cells, strict=True)
    )
    if not row.reason:
        return f"<tr>{joined}</tr>"
    why = f'<td class="wide" colspan="{len(heads)}"><span class="soft">{escape(sentence(row.reason))}</span></td>'
    return f'<tr class="told">{joined}</tr><tr class="why">{why}</tr>'


def frame(page: str, title: str) -> str:
    """A whole page of its own inside this one; it runs no scripts."""
    return box(f'<iframe class="sd-frame" sandbox title="{escape(title)}" srcdoc="{escape(page)}"></iframe>')


def verification(documents: Iterable[Mapping[str, Any]]) -> str:
    """What ``sdaccel verify --json`` said."""
    parts = []
    for document in documents:
        checks, image = document["components"], document["image"]
        # What was not chosen does not count against what was.
        equal = all(check["ok"] for check in checks) and (image is None or image["ok"])
        verdict = "Equal to torch" if equal else "Differs from torch"
        text = f'<p><b class="{"ok" if equal else "bad"}">{verdict}</b> <span class="soft">{escape(document["origin"])}'
        parts.append(f"{text}</span></p>{_checks(checks)}{_image_check(image)}")
    return box("".join(f'<div class="sd-card">{part}</div>' for part in parts))


def _checks(checks: Sequence[Mapping[str, Any]]) -> str:
    heads = ("component", "shape", "error", "limit", "verdict")
    body = ""
    for check in checks:
        shape = ", ".join(f"{axis} {size}" for axis, size in check["shape"].items())
        error = "none" if check["error"] is None else f"{check['error']:.1e}"
        cells = (
            f"{escape(name(check['component']))} <code>{escape(check['engine'][:12])}</code>",
            escape(shape),
            escape(check["problem"] or error),
            f"{check['limit']:.0e}",
            f'<span class="{"ok" if check["ok"] else "bad"}">{"equal" if check["ok"] else "differs"}</span>',
        )
        body += "<tr>" + "".join(f'<td data-name="{head}">{cell}</td>' for head, cell in zip(heads, cells, strict=True))
        body += "</tr>"
    head = "".join(f"<th>{text}</th>" for text in heads)
    return f'<table class="sd-rows"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _image_check(image: Mapping[str, Any] | None) -> str:
    if image is None:
        return ""
    text = (
        f"A whole image, {image['width']}×{image['height']}, {image['steps']} steps: {decibels(image['psnr'])} "
        f"(at least {image['limits']['image_psnr']:g})."
    )
    reasons = "".join(f"<li>{escape(str(reason))}</li>" for reason in [*image["fallbacks"], *image["failed"]])
    return f"<p>{escape(text)}</p>" + (f"<ul>{reasons}</ul>" if reasons else "")


def decibels(psnr: float | None) -> str:
    return "equal to the last bit" if psnr is None or math.isinf(psnr) else f"PSNR {psnr:.1f} dB"


# ---- builds


def needs(label: str, found: Preflight) -> str:
    """The preflight of one checkpoint."""
    to_build = [part.component for part in found.parts if not part.exact]
    if not to_build:
        return box(
            f'<div class="sd-card"><h3>{escape(label)}</h3>'
            '<p class="ok">Nothing to build: the store holds these very engines.</p></div>'
        )
    held = "Engines in the store hold all of these sizes already. A build adds others for just these."
    figures = {
        "to build": ", ".join(map(name, to_build)),
        "disk": f"about {size_text(found.disk)}; {size_text(found.disk_free)} free",
        "time": f"about {duration(found.seconds)}, from {found.seconds_from}",
        "main memory": f"about {size_text(found.memory)} while it builds",
        "GPU memory": None if found.vram is None else f"about {size_text(found.vram)} at the largest size",
        "for": found.device,
    }
    rows = "".join(f"<dt>{term}</dt><dd>{escape(text)}</dd>" for term, text in figures.items() if text)
    said = [f'<p class="ok">{held}</p>'] if found.covered else []
    said += [f'<p class="warn">{escape(sentence(text))}</p>' for text in found.warnings]
    said += [f'<p class="soft">{escape(sentence(text))}</p>' for text in found.notes]
    return box(
        f'<div class="sd-card"><h3>{escape(label)}</h3><dl>{rows}</dl>{"".join(said)}'
        '<p class="soft">Every figure is an estimate.</p></div>'
    )


STATES = {RUNNING: "run", WAITING: "soft", DONE: "ok", INTERRUPTED: "warn", "failed": "bad", "cancelled": "warn"}


def jobs_now(jobs: Sequence[Job]) -> str:
    """What runs and what waits."""
    alive = [job for job in jobs if not job.ended]
    if not alive:
        return box('<p class="soft">No build is under way.</p>')
    cards = ""
    for job in sorted(alive, key=lambda job: job.state != RUNNING):
        progress = ""
        if job.state == RUNNING:
            progress = bar(job.fraction, f"build of {job.request.name}")
            progress += _line(job.stage or "starting", job.fraction, job.seconds, job.seconds_left)
        cards += f'<div class="sd-card">{_job_head(job)}{progress}</div>'
    return box(cards)


def jobs_past(jobs: Sequence[Job], logs: Mapping[str, str]) -> str:
    """What has ended, the newest first, with what it said."""
    ended = [job for job in reversed(jobs) if job.ended]
    if not ended:
        return ""
    cards = ""
    for job in ended:
        took = "" if job.state == DONE and not job.seconds else f"after {duration(job.seconds)}"
        message = f'<p class="{STATES[job.state]}">{escape(job.message)}</p>' if job.message else ""
        notes = "".join(f'<p class="soft">{escape(note)}</p>' for note in job.notes)
        log = logs.get(job.id, "").strip()
        details = f"<details><summary>Log</summary><pre>{escape(log)}</pre></details>" if log else ""
        cards += f'<div class="sd-card">{_job_head(job, took)}{message}{notes}{details}</div>'
    return box(f"<h3>Ended</h3>{cards}")


def _job_head(job: Job, took: str = "") -> str:
    return (
        f'<div class="sd-head"><b>{escape(job.request.name)}</b><span class="soft">{escape(request_text(job.request))}'
        f'</span><span class="end"><span class="soft num">{took}</span> '
        f'<span class="sd-pill {STATES[job.state]}">{job.state}</span></span></div>'
    )


def log(text: str) -> str:
    return box(f"<pre>{escape(text.strip())}</pre>" if text.strip() else '<p class="soft">Nothing was said yet.</p>')


# ---- images


def comparison(found: Comparison, pictures: Sequence[str]) -> str:
    """``pictures``: data URIs of torch's image, the engines' and the difference."""
    if found.equal and found.by_engines:
        verdict = f'<b class="ok">Equal to torch</b>: {decibels(found.psnr)}, at least {found.limit:g} counts as equal.'
    elif not found.by_engines:
        verdict = f'<b class="warn">Engines did not run all of it</b>: {decibels(found.psnr)}.'
    else:
        verdict = f'<b class="bad">Differs from torch</b>: {decibels(found.psnr)}, {found.limit:g} is the least.'
    ratio = found.torch_seconds / found.engine_seconds if found.engine_seconds else 0.0
    gain = f"times {found.gain:g}; the largest is {found.max_abs:.0f} of 255" if found.max_abs else "there is none"
    captions = (
        ("torch", f"{found.torch_seconds:.2f} s"),
        ("engines", f"{found.engine_seconds:.2f} s, {ratio:.2f}× as fast"),
        ("difference", gain),
    )
    figures = "".join(
        f'<figure><img alt="{title}" src="{picture}"><figcaption><b>{title}</b> <span class="soft">{escape(text)}'
        "</span></figcaption></figure>"
        for (title, text), picture in zip(captions, pictures, strict=True)
    )
    return box(
        f'<p>{verdict} <span class="soft">Seed {found.seed}.</span></p>'
        f'<div class="sd-pictures">{figures}</div>{_reasons(found)}'
    )


def report(result: Result) -> str:
    """What ran, in plain words: which engines, what torch did instead and why, milliseconds."""
    totals: dict[str, list[float]] = {}
    ids: dict[str, set[str]] = {}
    adapters: dict[str, set[str]] = {}
    for each in result.reports:
        for component, run in each.components.items():
            row = totals.setdefault(component, [0.0] * 4)
            for at, value in enumerate((run.calls, run.milliseconds, run.torch_calls, run.torch_milliseconds)):
                row[at] += value
            ids.setdefault(component, set()).update(key[:12] for key in run.engines)
            adapters.setdefault(component, set()).update(run.adapters)
    heads = ("component", "ran by", "calls", "ms a call", "in all")
    body = ""
    for component, (calls, engine_ms, torch_calls, torch_ms) in totals.items():
        held = f" with {', '.join(sorted(adapters[component]))}" if adapters[component] else ""
        for who, count, spent in (
            (f"engine {', '.join(sorted(ids[component]))}", calls, engine_ms),
            ("torch", torch_calls, torch_ms),
        ):
            if count:
                cells = (name(component), who + held, f"{count:.0f}", f"{spent / count:.1f}", f"{spent / 1e3:.2f} s")
                body += "<tr>" + "".join(
                    f'<td data-name="{head}">{escape(cell)}</td>' for head, cell in zip(heads, cells, strict=True)
                )
                body += "</tr>"
    head = "".join(f"<th>{text}</th>" for text in heads)
    table = f'<table class="sd-rows"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>' if body else ""
    return f"{table}{_reasons(result)}"


def _reasons(result: Result | Comparison) -> str:
    counted: dict[tuple[str, str], int] = {}
    for fallback in result.fallbacks:
        key = (fallback.component, fallback.reason)
        counted[key] = counted.get(key, 0) + fallback.calls
    lines = [
        f"<li><b>{escape(name(component))}</b> ran in torch ({plural(count, 'call')}): {escape(reason)}</li>"
        for (component, reason), count in counted.items()
    ]
    lines += [f"<li>{escape(note)}</li>" for note in result.notes]
    lines += [f'<li class="bad">{escape(text)}</li>' for text in result.failed]
    return f"<ul>{''.join(lines)}</ul>" if lines else ""
