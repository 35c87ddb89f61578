"""The tab of engines, shown by `sdaccel ui`, AUTOMATIC1111 and Forge alike: Gradio 3.41, 4.40 and 6 build it unchanged.

Each button does one short thing, then rings the hidden ``bell``. That starts the page's only long event, `watch`, which
sends what has changed until nothing is under way. Loading the page rings the bell too, so that a page loaded in the
middle of a build finds it where it stands. What a list shows is what it gives: Gradio 3 knows no values behind labels.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gradio as gr

from sdaccel.draw import Request
from sdaccel.errors import SdaccelError, SettingError, StoreError
from sdaccel.listing import size_text
from sdaccel.presets import presets
from sdaccel.ui import fragments as html
from sdaccel.ui.queue import Job
from sdaccel.ui.requests import BuildRequest, words
from sdaccel.ui.rows import EngineRow
from sdaccel.ui.services import Host, Services
from sdaccel.ui.tasks import fault

_log = logging.getLogger("sdaccel")

Update = Any
Changes = dict[Any, Update]

POLL_SECONDS = 0.4
LINGER_SECONDS = 1.5
MOST_WATCHERS = 16
MOST_LOGS = 12

NATIVE, CUSTOM = "native: half to twice its own side", "custom ranges …"
THE_ONE = "the one that runs, else the last"
OWN = "the backend's own"
COMPONENTS = ("unet", "vae_decoder", "vae_encoder", "text_encoder", "text_encoder_2")
PRECISIONS = ("fp32", "fp16", "bf16")


def guarded(place: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Errors of an event become a message in ``place``, an HTML component: never a traceback, never a dead host."""

    def message(error: Exception) -> Changes:
        if isinstance(error, SdaccelError):
            return {place: html.notice(str(error), "bad")}
        _log.exception("an event of the page failed")
        return {place: html.notice(fault(error), "bad")}

    def wrap(event: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isgeneratorfunction(event):

            @functools.wraps(event)
            def stream(*values: Any) -> Iterator[Any]:
                try:
                    yield from event(*values)
                except Exception as error:  # noqa: BLE001 - the page's last resort
                    yield message(error)

            return stream

        @functools.wraps(event)
        def call(*values: Any) -> Any:
            try:
                return event(*values)
            except Exception as error:  # noqa: BLE001 - the page's last resort
                return message(error)

        return call

    return wrap


def unlimited() -> dict[str, Any]:
    """For events that last: several pages may watch at once. Gradio 3 has no such limit of one."""
    listener = inspect.signature(gr.Button(render=False).click).parameters
    return {"concurrency_limit": None} if "concurrency_limit" in listener else {}


class Bell:
    """Rung by events, heard by the page's watcher."""

    def __init__(self) -> None:
        self.component = gr.Textbox(value="", label="bell", elem_classes=["sd-out"], container=False)

    def ring(self) -> Changes:
        return {self.component: str(time.time_ns())}


def when_any_changes(components: Sequence[Any], fn: Any, inputs: Any, outputs: Any, **options: Any) -> None:
    """One listener for all, which works on one call at a time and always on the last: no answer comes after a newer.

    Gradio 3 has one listener a component, and drops what it is called for while it works. There all ring a bell of
    their own, and where that rang during the work the listener is called once more.
    """
    if hasattr(gr, "on"):
        gr.on([each.change for each in components], fn, inputs, outputs, trigger_mode="always_last", **options)
        return
    bell = Bell().component
    rung, heard = (f"window.sdaccel_{what}_{bell._id}" for what in ("rung", "heard"))
    ring = f"() => [String({rung} = performance.now())]"
    hear = f"(...values) => {{ {heard} = {rung}; return values.slice(0, {len(inputs or ())}); }}"
    again = f"(value) => [{heard} === {rung} ? value : String(performance.now())]"
    for component in components:
        component.change(None, None, [bell], _js=ring)
    bell.change(fn, inputs, outputs, _js=hear, **options).then(None, [bell], [bell], _js=again)


class Watchers:
    """Who watches, so that pages which were left without a word do not pile up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alive: list[object] = []

    def enter(self) -> object:
        mark = object()
        with self._lock:
            self._alive = [*self._alive, mark][-MOST_WATCHERS:]
        return mark

    def stays(self, mark: object) -> bool:
        return mark in self._alive

    def leave(self, mark: object) -> None:
        with self._lock:
            self._alive = [other for other in self._alive if other is not mark]


def watch(watchers: Watchers, changes: Callable[[dict[str, Any]], Changes], busy: Callable[[], bool]) -> Iterator[Any]:
    """Yields what has changed until nothing is under way. ``changes`` is given what was sent, and keeps it up."""
    sent: dict[str, Any] = {}
    mark = watchers.enter()
    idle = 0.0
    try:
        while watchers.stays(mark):
            under_way = busy()  # before looking, so that the end itself is sent
            found = changes(sent)
            if found:
                yield found
            idle = 0.0 if under_way else idle + POLL_SECONDS
            if idle > LINGER_SECONDS:
                return
            time.sleep(POLL_SECONDS)
    finally:
        watchers.leave(mark)


def slot(value: str = "") -> Any:
    """A place for a fragment; it takes no room while it is empty."""
    return gr.HTML(value, elem_classes=["sd-slot"])


def fresh(sent: dict[str, Any], name: str, value: Any) -> bool:
    """Whether ``value`` has not been sent yet; it counts as sent from now on."""
    if name in sent and sent[name] == value:
        return False
    sent[name] = value
    return True


# ---- the tab


def build_tab(services: Services, host: Host | None = None, first: Sequence[tuple[str, Any]] = ()) -> Any:
    """The tab as `gr.Blocks`, to be rendered into a host's page or launched alone.

    first: (title, page class) of pages to stand before the three of the tab.
    """
    if host is not None:
        services.host = host
    watchers = Watchers()
    with gr.Blocks(analytics_enabled=False) as blocks:
        slot(html.STYLE)
        bell = Bell()
        refusal = _refusal(services)
        if refusal:
            slot(html.notice(refusal, "warn"))
        pages = []
        with gr.Tabs():
            for title, page in (*first, ("Engines", EnginesPage), ("Build", BuildPage), ("Compare", ComparePage)):
                with gr.TabItem(title) as item:
                    pages.append(page(services, bell))
                item.select(bell.ring, None, [bell.component], show_progress="hidden")  # others may have changed it

        def changes(sent: dict[str, Any]) -> Changes:
            found: Changes = {}
            for page in pages:
                found.update(page.changes(sent))
            return found

        def busy() -> bool:
            return any(page.busy() for page in pages)

        @guarded(pages[0].notice)
        def watching() -> Iterator[Any]:
            yield from watch(watchers, changes, busy)

        outputs = [component for page in pages for component in (page.notice, *page.live)]
        when_any_changes([bell.component], watching, None, outputs, show_progress="hidden", **unlimited())
        blocks.load(bell.ring, None, [bell.component], show_progress="hidden")
    for block in blocks.blocks.values():
        block.do_not_save_to_config = True  # A1111 and Forge would show the first start's choices at every later one
    return blocks


def _refusal(services: Services) -> str:
    try:
        services.host.permit("building, deleting and importing")
    except SettingError as error:
        return str(error).replace(" is refused", " are refused", 1)
    return ""


class EnginesPage:
    def __init__(self, services: Services, bell: Bell):
        self.services, self.bell = services, bell
        free = services.host.allowed
        self.table = slot()
        self.chosen = gr.Dropdown(
            [], value=[], multiselect=True, label="Engines to work on", elem_classes=["sd-quiet"],
            info="One, several, or all of a checkpoint.",
        )  # fmt: skip
        with gr.Row():
            inspecting = gr.Button("Inspect")
            verifying = gr.Button("Verify")
            rebuilding = gr.Button("Rebuild", interactive=free)
            deleting = gr.Button("Delete", variant="stop", interactive=free)
        with gr.Column(visible=False) as confirm:
            question = slot()
            asked = gr.State(None)
            with gr.Row():
                yes = gr.Button("Yes, do it", variant="stop")
                no = gr.Button("No, keep them")
        self.notice = slot()
        self.bar = slot()
        stopping = self.stopping = gr.Button("Stop the comparison", visible=False)
        self.detail = slot()
        with gr.Accordion("Timing cache", open=False):
            slot(
                html.box(
                    '<p class="soft">What builds for an NVIDIA GPU have measured. On another machine of the same kind '
                    "it makes builds start from there.</p>"
                )
            )
            times = slot()
            with gr.Row():
                with gr.Column():
                    exporting = gr.Button("Export")
                    exported = gr.File(label="Exported", interactive=False)
                with gr.Column():
                    given = gr.File(label="A file to import", interactive=free)
                    importing = gr.Button("Import", interactive=free)
        self.live = [self.table, self.chosen, self.bar, self.stopping, self.detail]

        @guarded(self.notice)
        def inspect_(chosen: Any) -> Iterator[Any]:
            keys = self.keys(chosen)
            services.forget("verify")
            yield {self.detail: html.frame(services.page(keys), "engines"), self.notice: html.notice("Measuring …")}
            page = services.page(keys, measure=True)
            yield {self.detail: html.frame(page, "engines"), self.notice: ""}

        @guarded(self.notice)
        def verify(chosen: Any) -> Changes:
            services.verify(self.keys(chosen))
            return {self.notice: "", self.detail: "", **bell.ring()}

        def stop() -> Changes:
            services.stop("verify")
            return bell.ring()

        def ask(what: str) -> Callable[[Any], Changes]:
            @guarded(self.notice)
            def asking(chosen: Any) -> Changes:
                services.host.permit(what)
                keys = self.keys(chosen)
                return {
                    asked: [what, keys],
                    question: html.notice(self.question(what, keys), "warn"),
                    confirm: gr.update(visible=True),
                    self.notice: "",
                }

            return asking

        @guarded(self.notice)
        def do(pending: Any) -> Changes:
            done: Changes = {confirm: gr.update(visible=False), asked: None}
            try:
                what, keys = pending or (None, [])
                services.forget("verify")
                if what == "deleting":
                    freed = services.delete(keys)
                    text = f"{html.plural(len(keys), 'engine')} deleted, {size_text(freed)} freed."
                elif what == "rebuilding":
                    jobs = services.rebuild(keys)
                    text = f"{html.plural(len(jobs), 'build')} queued: see the Build page."
                else:
                    text = ""
            except SdaccelError as error:
                return {**done, self.notice: html.notice(str(error), "bad"), **bell.ring()}
            return {
                **done,
                self.notice: html.notice(text, "ok"),
                self.chosen: gr.update(value=[]),
                self.detail: "",
                **bell.ring(),
            }

        def keep() -> Changes:
            return {confirm: gr.update(visible=False), asked: None}

        @guarded(times)
        def export() -> Changes:
            return {exported: str(services.export_times()), times: ""}

        @guarded(times)
        def import_(path: Any) -> Changes:
            count = services.import_times(path)
            return {times: html.notice(f"{html.plural(count, 'measurement')} imported.", "ok")}

        quiet = {"show_progress": "hidden"}
        inspecting.click(inspect_, [self.chosen], [self.detail, self.notice], show_progress="minimal")
        verifying.click(verify, [self.chosen], [self.notice, self.detail, bell.component], **quiet)
        stopping.click(stop, None, [bell.component], **quiet)
        asking = [asked, question, confirm, self.notice]
        rebuilding.click(ask("rebuilding"), [self.chosen], asking, **quiet)
        deleting.click(ask("deleting"), [self.chosen], asking, **quiet)
        after = [confirm, asked, self.notice, self.chosen, self.detail, bell.component]
        yes.click(do, [asked], after, **quiet)
        no.click(keep, None, [confirm, asked], **quiet)
        exporting.click(export, None, [exported, times], **quiet)
        importing.click(import_, [given], [times], **quiet)

    def keys(self, chosen: Any) -> list[str]:
        """Keys of the engines chosen. Raises SettingError without one, StoreError for one that is gone."""
        choices = _engine_choices(self.services.engines())
        found: list[str] = []
        for value in chosen or []:
            if value not in choices:
                raise StoreError(f"there is no engine {value!r:.80} any more.", hint="Take it out of the choice.")
            found += choices[value]
        if not found:
            raise SettingError("no engine is chosen.", hint="Choose some in the list above the buttons.")
        return list(dict.fromkeys(found))

    def question(self, what: str, keys: list[str]) -> str:
        rows = [row for row in self.services.engines() if row.key in keys]
        names = ", ".join(f"{html.name(row.component) or 'unreadable'} {row.key[:8]}" for row in rows)
        if what == "deleting":
            size = size_text(sum(row.size for row in rows))
            return f"Delete {names}? That frees {size}, and the weights that nothing else uses."
        ready = any(row.state == "ready" for row in rows)
        return f"Build {names} again?" + (" Until that is done, torch runs in their place." if ready else "")

    def busy(self) -> bool:
        task = self.services.tasks.get("verify")
        return task is not None and task.running

    def changes(self, sent: dict[str, Any]) -> Changes:
        found: Changes = {}
        there = self.services.store.root / "engines"
        names = sorted(path.name for path in there.iterdir()) if there.is_dir() else []
        ended = [job.id for job in self.services.queue.jobs() if job.ended]
        if fresh(sent, "engines", (names, ended, self.busy())):
            rows = self.services.engines()
            found[self.table] = html.engines(rows)
            found[self.chosen] = gr.update(choices=list(_engine_choices(rows)))
        task = self.services.tasks.get("verify")
        if task is not None and task.running:
            if fresh(sent, "verify bar", html.task(task)):
                found[self.bar] = sent["verify bar"]
        elif task is not None and fresh(sent, "verify bar", task.state):
            found[self.bar] = "" if task.state == "done" else html.task(task)
            if task.state == "done":
                found[self.detail] = html.verification(task.result)
        if fresh(sent, "verify button", self.busy()):
            found[self.stopping] = gr.update(visible=self.busy())
        return found


def _engine_choices(rows: Sequence[EngineRow]) -> dict[str, list[str]]:
    """Label → keys."""
    found = {}
    for checkpoint, members in html.group(rows).items():
        if len(members) > 1:
            found[f"all of {checkpoint}"] = [row.key for row in members]
        for row in members:
            parts = (html.name(row.component), html.shapes(row), row.precision, row.key[:12])
            found[" · ".join(filter(None, parts))] = [row.key]
    return found


class BuildPage:
    FIELDS = ("model", "preset", "resolutions", "batches", "tokens", "components", "precision")

    def __init__(self, services: Services, bell: Bell):
        self.services, self.bell = services, bell
        free = services.host.allowed
        models = [label for label, _ in services.models()]
        with gr.Row():
            with gr.Column(scale=3, min_width=320):
                self.models = gr.Dropdown(
                    models, value=models[:1], multiselect=True, label="Checkpoints",
                    info="One or several; each is a build of its own.",
                )  # fmt: skip
                paths = gr.Textbox(
                    label="Other checkpoints", lines=1, placeholder="/path/to/model.safetensors",
                    info="Paths of .safetensors files or diffusers folders, one a line.", visible=free,
                )  # fmt: skip
                self.problems = {"model": slot()}
                preset = gr.Dropdown(_preset_choices(), value=NATIVE, label="Sizes")
                self.problems["preset"] = slot()
                with gr.Column(visible=False) as ranges:
                    resolutions = gr.Textbox(
                        label="Resolutions", placeholder="512-768, 832x1216",
                        info="512 is one size, 832x1216 is width x height, 512-768 is a range.",
                    )  # fmt: skip
                    self.problems["resolutions"] = slot()
                    with gr.Row():
                        with gr.Column(min_width=140):
                            batches = gr.Textbox(label="Images at once", placeholder="1-4", info="2 or 1-4.")
                            self.problems["batches"] = slot()
                        with gr.Column(min_width=140):
                            tokens = gr.Textbox(label="Prompt tokens", placeholder="77-231", info="77 a chunk.")
                            self.problems["tokens"] = slot()
                with gr.Accordion("Components and precision", open=False):
                    components = gr.CheckboxGroup(
                        [(html.name(component), component) for component in COMPONENTS],
                        value=list(services.host.components),
                        label="Components",
                        info="None chosen: all that the checkpoint has.",
                    )
                    self.problems["components"] = slot()
                    precision = gr.Dropdown(
                        [OWN, *PRECISIONS], value=OWN,
                        label="Precision",
                    )  # fmt: skip
                    self.problems["precision"] = slot()
                    pickle = gr.Checkbox(
                        value=False, label="Open .ckpt, .bin and .pt too",
                        info="They are pickles. Plain tensors alone are read; no code of theirs is run.",
                    )  # fmt: skip
            with gr.Column(scale=2, min_width=300):
                self.needs = slot(html.box('<p class="soft">What the build needs is shown here.</p>'))
                building = gr.Button("Build", variant="primary", interactive=free)
                self.notice = slot()
        slot(html.box("<h3>Builds</h3>"))
        self.now = slot()
        with gr.Column(visible=False) as self.controls:
            with gr.Row():
                self.job = gr.Dropdown(
                    [THE_ONE], value=THE_ONE, label="Which build", allow_custom_value=True, scale=2, min_width=300,
                    elem_classes=["sd-quiet"],
                )  # fmt: skip
                cancelling = gr.Button("Cancel build", interactive=free, min_width=120)
                retrying = gr.Button("Build again", interactive=free, min_width=120)
                forgetting = gr.Button("Clear ended", interactive=free, min_width=120)
            with gr.Accordion("Log", open=False):
                self.log = slot()
        self.past = slot()
        self.live = [self.now, self.controls, self.job, self.log, self.past]
        form = [self.models, paths, preset, resolutions, batches, tokens, components, precision, pickle]

        @guarded(self.notice)
        def check(*values: Any) -> Changes:
            found = {name: "" for name in self.problems}
            needs = []
            try:
                requests = self.requests(*values)
            except SdaccelError as error:
                return {self.needs: "", **self.said({"model": str(error)})}
            labels = {path: label for label, path in services.models()}
            for request in requests:
                problems, needed = services.check(request)
                for field, text in problems.items():
                    place = field if field in found else "model"
                    found[place] = found[place] or text
                if needed is not None:
                    needs.append(html.needs(labels.get(request.model, request.name), needed))
            if any(found.values()):
                needs.append(html.box('<p class="soft">Put right what is marked, then it is shown what is needed.</p>'))
            return {self.needs: "".join(needs), **self.said(found)}

        def sizes(value: str) -> Changes:
            return {ranges: gr.update(visible=value == CUSTOM)}

        @guarded(self.notice)
        def build(*values: Any) -> Changes:
            services.host.permit("building")
            requests = self.requests(*values)
            for request in requests:
                problems, _ = services.check(request)
                if problems:
                    return {**self.said(problems), self.notice: html.notice(_first(problems), "bad")}
            services.build(requests)
            text = f"{html.plural(len(requests), 'build')} queued."
            return {self.notice: html.notice(text, "ok"), **self.said({}), **bell.ring()}

        @guarded(self.notice)
        def cancel(job: Any) -> Changes:
            services.cancel(self.which(job, ended=False))
            return {self.notice: "", **bell.ring()}

        @guarded(self.notice)
        def retry(job: Any) -> Changes:
            services.retry(self.which(job, ended=True))
            return {self.notice: "", **bell.ring()}

        @guarded(self.notice)
        def forget() -> Changes:
            services.forget_finished()
            return {self.notice: "", self.job: gr.update(value=THE_ONE), **bell.ring()}

        quiet = {"show_progress": "hidden"}
        problems = list(self.problems.values())
        when_any_changes([*form, bell.component], check, form, [*problems, self.needs, self.notice], **quiet)
        preset.change(sizes, [preset], [ranges], **quiet)
        building.click(build, form, [*problems, self.notice, bell.component], **quiet)
        cancelling.click(cancel, [self.job], [self.notice, bell.component], **quiet)
        retrying.click(retry, [self.job], [self.notice, bell.component], **quiet)
        forgetting.click(forget, None, [self.notice, self.job, bell.component], **quiet)

    def requests(
        self, models: Any, paths: Any, preset: Any, resolutions: Any, batches: Any, tokens: Any, components: Any,
        precision: Any, pickle: Any,
    ) -> list[BuildRequest]:  # fmt: skip
        """One a checkpoint. Raises SettingError."""
        chosen = [str(model) for model in models or []]
        chosen += [line.strip().strip('"') for line in str(paths or "").splitlines() if line.strip()]
        if not chosen:
            raise SettingError("no checkpoint is chosen.", hint="Choose one, or name a path.")
        models = dict.fromkeys(self.services.model(model) for model in chosen)
        custom = preset == CUSTOM
        return [
            BuildRequest(
                model=model,
                preset=None if custom or preset in (NATIVE, None, "") else str(preset).partition(":")[0],
                resolutions=words(str(resolutions or "")) if custom else (),
                batches=words(str(batches or "")) if custom else (),
                tokens=words(str(tokens or "")) if custom else (),
                components=tuple(map(str, components)) if components else None,
                precision=str(precision) if precision not in (OWN, None, "") else None,
                allow_pickle=pickle is True,
            )
            for model in models
        ]

    def said(self, found: Mapping[str, str]) -> Changes:
        return {place: html.problem(found.get(field, "")) for field, place in self.problems.items()}

    def which(self, job: Any, ended: bool) -> str:
        """The id of the build that a button means: the chosen one, else the one that runs or the last that ended."""
        jobs = self.services.queue.jobs()
        if job not in (THE_ONE, None, ""):
            labels = {_job_label(each): each.id for each in jobs}
            return labels.get(str(job), str(job))
        found = [each for each in jobs if each.ended == ended]
        if not found:
            raise StoreError("no build has ended yet." if ended else "no build is under way.")
        running = [each for each in found if each.state == "running"]
        return (running or found)[-1 if ended else 0].id

    def busy(self) -> bool:
        return any(not job.ended for job in self.services.queue.jobs())

    def changes(self, sent: dict[str, Any]) -> Changes:
        found: Changes = {}
        jobs = self.services.queue.jobs()
        if fresh(sent, "now", html.jobs_now(jobs)):
            found[self.now] = sent["now"]
        if fresh(sent, "jobs", [(job.id, job.state) for job in jobs]):
            choices = [THE_ONE, *(_job_label(job) for job in reversed(jobs))]
            found[self.controls] = gr.update(visible=bool(jobs))
            found[self.job] = gr.update(choices=choices)
            ended = [job for job in reversed(jobs) if job.ended][:MOST_LOGS]
            logs = {job.id: self.services.queue.log(job.id, 60) for job in ended}
            found[self.past] = html.jobs_past(jobs, logs)
        speaking = next((job for job in jobs if job.state == "running"), jobs[-1] if jobs else None)
        text = self.services.queue.log(speaking.id) if speaking is not None else ""
        if fresh(sent, "log", text):
            found[self.log] = html.log(text)
        return found


def _preset_choices() -> list[str]:
    return [NATIVE, CUSTOM, *(f"{preset.name}: {preset.description}" for preset in presets())]


def _first(problems: Mapping[str, str]) -> str:
    field, text = next(iter(problems.items()))
    return f"{field}: {text}"


def _job_label(job: Job) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(job.created))
    return f"{when} {job.request.name} · {html.request_text(job.request)}"


class ComparePage:
    def __init__(self, services: Services, bell: Bell):
        self.services, self.bell = services, bell
        models = [label for label, _ in services.models()]
        slot(html.box('<p class="soft">One seed, drawn twice: by torch and by engines, side by side.</p>'))
        with gr.Row():
            model = gr.Dropdown(
                models, value=models[0], label="Checkpoint", allow_custom_value=True, scale=2, min_width=280
            )
            prompt = gr.Textbox(value="a red circle on a blue background", label="Prompt", scale=3, min_width=280)
        with gr.Row():
            numbers = [
                gr.Number(value=value, label=label, precision=digits, minimum=low)
                for label, value, digits, low in (
                    ("Width", 256, 0, 64),
                    ("Height", 256, 0, 64),
                    ("Steps", 6, 0, 1),
                    ("Seed", 0, 0, 0),
                    ("Guidance", 5.0, None, 0),
                )
            ]
        with gr.Row():
            comparing = gr.Button("Compare", variant="primary")
            self.stopping = gr.Button("Stop", visible=False)
        self.notice = slot()
        self.view = slot()
        self.live = [self.view, self.stopping]

        @guarded(self.notice)
        def compare(model_: Any, prompt_: Any, *values: Any) -> Changes:
            services.compare(model_, drawing(prompt_, *values))
            return {self.notice: "", **bell.ring()}

        def stop() -> Changes:
            services.stop("compare")
            return bell.ring()

        quiet = {"show_progress": "hidden"}
        comparing.click(compare, [model, prompt, *numbers], [self.notice, bell.component], **quiet)
        self.stopping.click(stop, None, [bell.component], **quiet)

    def busy(self) -> bool:
        task = self.services.tasks.get("compare")
        return task is not None and task.running

    def changes(self, sent: dict[str, Any]) -> Changes:
        found: Changes = {}
        task = self.services.tasks.get("compare")
        if task is not None and task.running:
            if fresh(sent, "compare", html.task(task)):
                found[self.view] = sent["compare"]
        elif task is not None and fresh(sent, "compare", (id(task), task.state)):
            found[self.view] = _compared(task.result) if task.state == "done" else html.task(task)
        if fresh(sent, "compare button", self.busy()):
            found[self.stopping] = gr.update(visible=self.busy())
        return found


def _compared(result: Any) -> str:
    from sdaccel.ui.studio import data_uri

    return html.comparison(result, [data_uri(image) for image in (result.torch, result.engines, result.difference)])


def drawing(
    prompt: Any, width: Any, height: Any, steps: Any, seed: Any, guidance: Any, count: Any = 1, negative: Any = "",
    sampler: Any = None,
) -> Request:  # fmt: skip
    """What a form's fields ask to be drawn. Raises SettingError naming the field."""
    steps, count = whole("steps", steps), whole("images", count)
    return Request(
        prompt=str(prompt or ""),
        negative=str(negative or ""),
        width=whole("width", width),
        height=whole("height", height),
        steps=20 if steps is None else steps,
        seed=whole("seed", seed),
        guidance=7.5 if guidance in (None, "") else number("guidance", guidance),
        count=1 if count is None else count,
        scheduler=str(sampler) if sampler else None,
    )


def number(field: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise SettingError(f"{field} {value!r:.40} is no number.") from None


def whole(field: str, value: Any) -> int | None:
    """None for a field left empty."""
    if value in (None, ""):
        return None
    found = number(field, value)
    if found != found or abs(found) > 2**53 or int(found) != found:
        raise SettingError(f"{field} {value!r:.40} is no whole number.")
    return int(found)


__all__ = ["build_tab"]
