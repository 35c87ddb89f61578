"""The pages as their user sees them: headless Chromium against the program, a tiny model and a real build."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import pytest

from sdaccel.engine.store import Store
from sdaccel.ui.app import launch
from sdaccel.ui.services import Host, Services
from sdaccel.ui.tab import CUSTOM
from tests.ui import in_a_host
from tests.ui.in_a_host import button, tab

pytestmark = pytest.mark.browser

WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 420, "height": 900}


@pytest.fixture(scope="module")
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api")
    program = in_a_host.chromium()
    if program is None:
        pytest.skip("there is no Chromium here")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def services_of(tiny_store, folder: Path) -> Services:
    store = shutil.copytree(tiny_store.store, folder / "store")
    return Services(Store(store), Host("sdaccel", lambda: [("tiny", str(tiny_store.model))]), folder / "images")


@pytest.fixture(scope="module")
def served(tiny_store, tmp_path_factory):
    server = launch(services_of(tiny_store, tmp_path_factory.mktemp("served")), "127.0.0.1", 0)
    yield server
    server.close()


@pytest.fixture
def page(chromium, served):
    """A page that fails its test where the browser's console shows an error."""
    opened = chromium.new_page(viewport=WIDE)
    opened.set_default_timeout(20_000)
    errors: list[str] = []
    opened.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: errors.append(str(error)))
    open_pages(opened, served.url)
    yield opened
    opened.close()
    # A page that is left while it listens says so: Gradio's own words.
    assert [text for text in errors if not re.search("AbortError|Connection errored out", text)] == []


def open_pages(page, url):
    page.goto(url, wait_until="domcontentloaded")
    button(page, "Generate").wait_for()
    page.locator(".sd-slot").first.wait_for(state="attached")


def choose(page, label, option):
    page.get_by_label(label, exact=True).first.click()
    page.get_by_role("option", name=option).first.click()
    page.keyboard.press("Escape")


def fill_build(page):
    """The text encoder of the tiny model: the quickest build there is."""
    tab(page, "Build")
    page.get_by_role("button", name="Components and precision").click()
    choose(page, "Checkpoints", "tiny")
    page.locator(".token-remove, [aria-label='Remove choice'], [title^='Remove']").first.click()
    page.get_by_label("text encoder", exact=True).check()
    choose(page, "Sizes", CUSTOM)
    page.get_by_label("Images at once").fill("9")


def test_build_reload_cancel_and_build_again(page, served):
    fill_build(page)
    page.get_by_label("Resolutions").fill("60")
    page.get_by_text("Width 60 cannot be built").wait_for()
    page.get_by_label("Resolutions").fill("64")
    page.get_by_text("Every figure is an estimate").wait_for()
    button(page, "Build").click()
    page.locator(".sd-bar:visible").wait_for()
    open_pages(page, served.url)  # in the middle of it
    tab(page, "Build")
    page.locator(".sd-bar:visible").wait_for()
    began = time.monotonic()
    button(page, "Cancel build").click()
    page.locator(".sd-pill:visible", has_text="cancelled").first.wait_for()
    assert time.monotonic() - began < 5
    assert not list((served.services.store.root / "tmp").iterdir())
    before = len(served.services.engines())
    button(page, "Build again").click()
    page.locator(".sd-pill:visible", has_text="done").first.wait_for(timeout=90_000)
    assert len(served.services.engines()) == before + 1
    tab(page, "Engines")
    page.get_by_text(f"{before + 1} engines").wait_for()


def test_a_late_answer_does_not_replace_a_newer_one(page, served):
    fill_build(page)
    in_a_host.no_late_answer(page, served.services)


def test_generate_with_a_live_preview_stop_and_report(page, served):
    choose(page, "Checkpoint", "tiny")
    for label, value in (("Steps", "150"), ("Width", "1024"), ("Height", "1024")):
        page.get_by_label(f"number input for {label}").fill(value)
    button(page, "Generate").click()
    page.locator("img.sd-live").wait_for(timeout=60_000)
    button(page, "Stop").click()
    page.get_by_text("The drawing was stopped").wait_for(timeout=60_000)  # after a step, which lasts on busy cores
    for label, value in (("Steps", "2"), ("Width", "64"), ("Height", "64")):
        page.get_by_label(f"number input for {label}").fill(value)
    button(page, "Generate").click()
    page.get_by_text("drawn by engines alone").wait_for(timeout=60_000)
    assert page.locator(".sd-gallery img").count() >= 1 and len(served.services.images()) == 1


def test_compare_inspect_and_delete(page, served):
    tab(page, "Compare")
    page.get_by_label("Checkpoint", exact=True).last.click()
    page.get_by_role("option", name="tiny").last.click()
    for label, value in (("Width", "64"), ("Height", "64"), ("Steps", "1")):
        page.get_by_label(label, exact=True).last.fill(value)
    button(page, "Compare").click()
    page.locator(".sd-pictures img").nth(2).wait_for(timeout=60_000)
    tab(page, "Engines")
    button(page, "Delete").click()
    page.get_by_text("No engine is chosen").wait_for()
    choose(page, "Engines to work on", "VAE encoder")
    button(page, "Inspect").click()
    page.frame_locator("iframe.sd-frame").get_by_text("Profiles: width").first.wait_for()
    before = len(served.services.engines())
    button(page, "Delete").click()
    button(page, "Yes, do it").click()
    page.get_by_text(re.compile("1 engine deleted, .* freed")).wait_for()
    assert len(served.services.engines()) == before - 1


def test_it_can_be_used_with_the_keyboard_alone(page, served):
    def focused():
        return page.evaluate("document.activeElement.innerText || document.activeElement.ariaLabel || ''").strip()

    def reach(text):
        for _ in range(60):
            if focused() == text:
                return
            page.keyboard.press("Tab")
        raise AssertionError(f"{text!r} cannot be reached")

    reach("Generate")  # its tab; then along the tabs
    page.keyboard.press("ArrowRight")
    if focused() != "Engines":
        reach("Engines")
    page.keyboard.press("Enter")
    reach("Verify")
    page.keyboard.press("Enter")
    page.get_by_text("No engine is chosen").wait_for()


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_nothing_overflows(page, size):
    page.set_viewport_size(size)
    for name in ("Generate", "Engines", "Build", "Compare"):
        tab(page, name)
        page.wait_for_timeout(150)
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], name
        for picture in page.locator(".sd-rows:visible, .sd-card:visible").all():
            found = picture.bounding_box()
            assert found is None or found["x"] + found["width"] <= size["width"], name


def test_the_tab_answers_inside_of_a_host(chromium, tiny_store, tmp_path):
    """As AUTOMATIC1111 and Forge show it; .ci/gradios runs this under their versions of Gradio."""
    services = services_of(tiny_store, tmp_path)
    try:
        in_a_host.try_in_a_host(chromium, services)
    finally:
        services.close()
