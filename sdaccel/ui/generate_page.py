"""The Generate page of `sdaccel ui`: a prompt, images, and what ran."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gradio as gr

from sdaccel.draw import SCHEDULERS
from sdaccel.errors import SdaccelError
from sdaccel.ui import fragments as html
from sdaccel.ui.requests import BuildRequest, open_checkpoint
from sdaccel.ui.services import MOST_IMAGES, MOST_SIDE, Services
from sdaccel.ui.tab import Bell, Changes, drawing, fresh, guarded, slot

PROMPT = "a red circle on a blue background"


class GeneratePage:
    """To be made inside of a `gr.Blocks`."""

    def __init__(self, services: Services, bell: Bell):
        self.services, self.bell = services, bell
        models = services.models()
        side, guidance = usual(models[0][1])
        labels = [label for label, _ in models]
        with gr.Row(elem_classes=["sd-page"]):
            with gr.Column(scale=2, min_width=320, elem_classes=["sd-form"]):
                with gr.Column():
                    model = gr.Dropdown(labels, value=labels[0], label="Checkpoint", allow_custom_value=True)
                    prompt = gr.Textbox(value=PROMPT, label="Prompt", lines=2)
                    negative = gr.Textbox(label="Negative prompt", lines=1, placeholder="what not to draw")
                    with gr.Row():
                        drawing_ = gr.Button("Generate", variant="primary", min_width=120)
                        self.stopping = gr.Button("Stop", variant="stop", visible=False, min_width=120)
                with gr.Column(elem_classes=["sd-settings"]):
                    with gr.Row():
                        width = gr.Slider(64, MOST_SIDE, value=side, step=8, label="Width", min_width=200)
                        height = gr.Slider(64, MOST_SIDE, value=side, step=8, label="Height", min_width=200)
                    with gr.Row():
                        steps = gr.Slider(1, 150, value=20, step=1, label="Steps", min_width=200)
                        guide = gr.Slider(0, 30, value=guidance, step=0.5, label="Guidance", min_width=200)
                    with gr.Row():
                        seed = gr.Textbox(value="", label="Seed", placeholder="random", min_width=200)
                        count = gr.Slider(1, MOST_IMAGES, value=1, step=1, label="Images", min_width=200)
                    with gr.Accordion("Sampler, LoRA and engines", open=False):
                        samplers = [("the model's own", ""), *((name, name) for name in SCHEDULERS)]
                        sampler = gr.Dropdown(samplers, value="", label="Sampler")
                        loras = gr.Textbox(
                            label="LoRA", placeholder="/path/to/style.safetensors:0.8", lines=1, max_lines=8,
                            info="Files and their strength, one a line: LoRA, LoCon, LoHa, LoKr, DoRA, (IA)³ and more.",
                        )  # fmt: skip
                        engines = gr.Checkbox(value=True, label="Use engines", info="Off: plain torch draws it all.")
            with gr.Column(scale=3, min_width=320, elem_classes=["sd-result"]):
                self.notice = slot()
                self.bar = slot()
                self.gallery = gr.Gallery(
                    label="Images",
                    columns=2,
                    object_fit="contain",
                    height="auto",
                    interactive=False,
                    format="png",
                    elem_classes=["sd-gallery"],
                )
                self.report = slot()
                with gr.Accordion("Earlier images", open=False):
                    self.earlier = gr.Gallery(
                        label="In the output folder, the newest first", columns=4, height="auto", interactive=False,
                        object_fit="contain", format="png", elem_classes=["sd-gallery"],
                    )  # fmt: skip
                    slot(html.box(f'<p class="soft">Saved in <code>{services.output_folder()}</code></p>'))
        self.live = [self.bar, self.gallery, self.report, self.earlier, self.stopping]

        @guarded(self.notice)
        def draw(model_: Any, prompt_: Any, negative_: Any, w: Any, h: Any, n: Any, g: Any, s: Any, many: Any,
                 sampler_: Any, loras_: Any, by_engines: Any) -> Changes:  # fmt: skip
            text = str(s if s is not None else "").strip()
            request = drawing(prompt_, w, h, n, text or None, g, many, negative_, sampler_)
            request = replace(request, loras=services.loras(loras_))
            services.draw(model_, request, engines=by_engines is not False)
            return {self.notice: "", self.report: "", self.gallery: [], **bell.ring()}

        def stop() -> Changes:
            services.stop("draw")
            return bell.ring()

        @guarded(self.notice)
        def chosen(model_: Any) -> Changes:
            native, scale = usual(services.model(model_))
            return {width: native, height: native, guide: scale, self.notice: ""}

        fields = [model, prompt, negative, width, height, steps, guide, seed, count, sampler, loras, engines]
        quiet = {"show_progress": "hidden"}
        outputs = [self.notice, self.report, self.gallery, bell.component]
        drawing_.click(draw, fields, outputs, **quiet)
        prompt.submit(draw, fields, outputs, **quiet)
        self.stopping.click(stop, None, [bell.component], **quiet)
        model.change(chosen, [model], [width, height, guide, self.notice], **quiet)

    def busy(self) -> bool:
        task = self.services.tasks.get("draw")
        return task is not None and task.running

    def changes(self, sent: dict[str, Any]) -> Changes:
        found: Changes = {}
        task = self.services.tasks.get("draw")
        if task is not None and task.running:
            if fresh(sent, "draw", html.task(task)):
                found[self.bar] = sent["draw"]
        elif task is not None and fresh(sent, "draw", (id(task), task.state)):
            found.update(self._ended(task))
        if fresh(sent, "draw button", self.busy()):
            found[self.stopping] = gr.update(visible=self.busy())
            found[self.gallery] = {**found.get(self.gallery, gr.update()), **gr.update(visible=not self.busy())}
        if not self.busy():
            images = [str(path) for path in self.services.images()]
            if fresh(sent, "images", images):
                found[self.earlier] = images
        return found

    def _ended(self, task: Any) -> Changes:
        if task.state != "done":
            return {self.bar: html.task(task)}
        result = task.result
        images = [(str(drawn.path), f"seed {drawn.seed}") for drawn in result.images if drawn.path is not None]
        if not result.ok:
            return {
                self.bar: html.notice(f"Nothing was saved: {'; '.join(result.failed)}", "bad"),
                self.report: html.box(html.report(result)),
            }
        return {self.bar: "", self.gallery: gr.update(value=images), self.report: html.box(_told(result))}


def _told(result: Any) -> str:
    many = html.plural(len(result.images), "image")
    engines = any(run.calls for report in result.reports for run in report.components.values())
    if not engines and not result.fallbacks:
        who = "drawn in plain torch"
    elif result.fallbacks:
        who = "drawn in part by torch: why is below" if engines else "drawn by torch: no engine ran, why is below"
    else:
        who = "drawn by engines alone"
    kind = "ok" if engines and not result.fallbacks else "warn"
    hint = '<p class="soft">Engines for what is missing can be built on the Build page.</p>' if result.fallbacks else ""
    return f'<p><b class="{kind}">{many} in {result.seconds:.2f} s</b>, {who}.</p>{html.report(result)}{hint}'


def usual(model: str) -> tuple[int, float]:
    """(native side in pixels, guidance scale) of a checkpoint; of SD 1.5 where it cannot be opened."""
    from sdaccel.draw import usual_guidance

    try:
        checkpoint = open_checkpoint(BuildRequest(model=model))
    except SdaccelError:
        return 512, 7.5
    return checkpoint.native_side, usual_guidance(checkpoint)


__all__ = ["GeneratePage"]
