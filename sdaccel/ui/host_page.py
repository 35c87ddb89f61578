"""The page that the tab has in a WebUI alone: what the last image ran on, and sizes that are worth an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gradio as gr

from sdaccel.draw import Result
from sdaccel.errors import SettingError
from sdaccel.integrations.host import WebHost
from sdaccel.integrations.host_shapes import Offer, WantedShapes
from sdaccel.ui import fragments as html
from sdaccel.ui.requests import BuildRequest
from sdaccel.ui.services import Services
from sdaccel.ui.tab import Bell, Changes, fresh, guarded, slot


class HostPage:
    def __init__(self, web: WebHost, services: Services, bell: Bell):
        self.web, self.services = web, services
        free = services.host.allowed
        self.report = slot()
        with gr.Column(visible=False) as self.offered:
            self.chosen = gr.Dropdown(
                [], label="Made often in torch", elem_classes=["sd-quiet"],
                info="No engine has these sizes: an engine of its own makes one fast.",
            )  # fmt: skip
            with gr.Row():
                building = gr.Button("Build it", variant="primary", interactive=free)
                dropping = gr.Button("Not wanted", interactive=free)
        self.notice = slot()
        self.live = [self.report, self.chosen, self.offered]

        @guarded(self.notice)
        def build(text: Any) -> Changes:
            request = BuildRequest.from_json(self.offer(text).request())
            request = replace(request, components=services.host.components or None)
            services.build([request])
            return {self.notice: html.notice(f"{request.name} is queued: see the Build page.", "ok"), **bell.ring()}

        @guarded(self.notice)
        def drop(text: Any) -> Changes:
            services.host.permit("changing the offers")
            offer = self.offer(text)
            WantedShapes(web.store).drop(offer.path, offer.width, offer.height)
            return {self.notice: "", **bell.ring()}

        building.click(build, [self.chosen], [self.notice, bell.component], show_progress="hidden")
        dropping.click(drop, [self.chosen], [self.notice, bell.component], show_progress="hidden")

    def offer(self, text: Any) -> Offer:
        """The offer that reads so. Raises SettingError for one that is gone."""
        for offer in self.web.offers():
            if str(offer) == text:
                return offer
        raise SettingError("no size is chosen.", hint="Choose one in the list.")

    def busy(self) -> bool:
        return False

    def changes(self, sent: dict[str, Any]) -> Changes:
        found: Changes = {}
        report = self.web.report
        text = html.report(Result(reports=[report]))
        empty = '<div class="sd-empty">Make an image: what it ran on is told here.</div>'
        if fresh(sent, "host report", text):
            found[self.report] = html.box(f"<h3>The last image</h3>{text}" if text else empty)
        offers = [str(offer) for offer in self.web.offers()]
        if fresh(sent, "host offers", offers):
            found[self.chosen] = gr.update(choices=offers, value=offers[0] if offers else None)
            found[self.offered] = gr.update(visible=bool(offers))
        return found
