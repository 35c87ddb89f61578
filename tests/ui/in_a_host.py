"""The tab inside of a host's page, under whatever Gradio is installed.

`tests/ui/test_browser.py` tries it under the newest; run as a program (`.ci/gradios` does) it tries another:

    python tests/ui/in_a_host.py 3.41.2
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import gradio as gr

from sdaccel.engine.store import Store
from sdaccel.ui.services import Host, Services
from sdaccel.ui.tab import CUSTOM, LINGER_SECONDS, POLL_SECONDS, build_tab

PLACES = ("/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome")


def chromium() -> str | None:
    """The program, where there is one."""
    return next((place for place in PLACES if Path(place).is_file()), None)


def try_in_a_host(browser: Any, services: Services) -> None:
    """Builds the tab, serves it, sees what it lists, presses a button, is told of a mistake, builds and cancels."""
    inner = build_tab(services, services.host)
    with gr.Blocks(analytics_enabled=False) as host, gr.Tabs(), gr.TabItem("sdaccel", elem_id="tab_sdaccel"):
        inner.render()
    host.queue(64) if gr.__version__.startswith("3.") else host.queue()
    _, url, _ = host.launch(server_name="127.0.0.1", share=False, prevent_thread_lock=True, quiet=True)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(20_000)
    try:
        page.goto(url, wait_until="domcontentloaded")
        engines = len(services.engines())
        page.get_by_text(f"{engines} engines" if engines else "No engines yet").wait_for()
        button(page, "Inspect").click()
        page.get_by_text("No engine is chosen").wait_for()
        open_again(page, services)
        tab(page, "Build")
        page.get_by_text("Every figure is an estimate").wait_for()
        page.get_by_label("Sizes").first.click()
        page.locator("ul.options li, [role=option]").filter(has_text=CUSTOM).first.click()
        no_late_answer(page, services)
        page.get_by_label("Resolutions").fill("64")
        button(page, "Build").last.click()
        page.locator(".sd-bar:visible").wait_for()
        button(page, "Cancel build").click()
        page.locator(".sd-pill:visible", has_text="cancelled").first.wait_for()
    finally:
        page.close()
        host.close()


def no_late_answer(page: Any, services: Services) -> None:
    """A form with a batch gets a size. The look at it without one lasts until that with it is done, if both are under
    way at once: what is said of the size must stay.
    """
    check, newer = services.check, threading.Event()

    def slow(request: Any) -> Any:
        found = check(request)
        if request.resolutions:
            newer.set()
        elif request.batches:
            newer.wait(1.5)
        return found

    services.check = slow  # type: ignore[method-assign]
    try:
        page.get_by_label("Images at once").fill("8")
        page.wait_for_timeout(300)
        page.get_by_label("Resolutions").fill("60")
        page.get_by_text("Width 60 cannot be built").wait_for()
        page.wait_for_timeout(1500)
        if not page.get_by_text("Width 60 cannot be built").is_visible():
            raise AssertionError("a late answer has replaced a newer one")
    finally:
        del services.check


SCRIPT = Path(__file__).parents[2] / "extension" / "javascript" / "sdaccel.js"
WEBUI = """
    const gradioApp = () => document;
    const get_uiCurrentTabContent = () => document.getElementById("tab_sdaccel");
    const updateInput = (target) => target.dispatchEvent(new Event("input", {bubbles: true}));
    const onUiTabChange = (opened) => opened();
"""


def open_again(page: Any, services: Services) -> None:
    """The page rests; the web UI tells the extension's script that our tab was opened: the page looks what is new."""
    page.wait_for_timeout(1000 * (LINGER_SECONDS + 4 * POLL_SECONDS))
    looked, jobs = threading.Event(), services.queue.jobs

    def seen() -> Any:
        looked.set()
        return jobs()

    services.queue.jobs = seen  # type: ignore[method-assign]
    try:
        if looked.wait(2 * POLL_SECONDS):
            raise AssertionError("the page does not rest")
        page.evaluate(f"() => {{{WEBUI}{SCRIPT.read_text(encoding='utf-8')}}}")
        if not looked.wait(10):
            raise AssertionError("the page did not look")
    finally:
        del services.queue.jobs


def button(page: Any, name: str) -> Any:
    return page.get_by_role("button", name=name, exact=True)


def tab(page: Any, name: str) -> None:
    """Gradio 3 draws tabs as plain buttons, the first of their name."""
    found = page.get_by_role("tab", name=name, exact=True)
    (found if found.count() else button(page, name).first).click()


def main(version: str) -> None:
    from playwright.sync_api import sync_playwright

    if gr.__version__ != version:
        raise SystemExit(f"this is Gradio {gr.__version__}, not {version}")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        services = Services(Store(folder), Host("a host"))
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        try:
            try_in_a_host(browser, services)
        finally:
            browser.close()
            services.close()
    print(f"the tab works under Gradio {version}")


if __name__ == "__main__":
    main(sys.argv[1])
