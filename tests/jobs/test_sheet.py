"""The page about a run: what it shows and in which order, that no prompt acts, that it works from a folder."""

from __future__ import annotations

import os
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from PIL import Image

from sdaccel.errors import StoreError
from sdaccel.jobs.sheet import SheetRow, write_sheet

HOSTILE = "<script>document.title = 'owned'</script>\"><img src=x onerror=\"document.title = 'owned'\">'&amp;\n\ud800\0"
ROWS = [
    SheetRow("1.png", "a red circle", "blur", 7, {"Steps": "20", "Size": "64x64"}, 1.234),
    SheetRow("2.png", "a blue circle", seed=8, error="the GPU ran out of <memory>"),
    SheetRow("a #1%?&<é>.png", HOSTILE, HOSTILE, None, {HOSTILE: HOSTILE}),
    SheetRow("javascript:alert(1).png", "a green square", seed=0),
]


class Page(HTMLParser):
    """All tags with their attributes, and the text between them."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def all(self, tag: str, attribute: str) -> list[str | None]:
        return [attrs[attribute] for name, attrs in self.tags if name == tag and attribute in attrs]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    Image.new("RGB", (64, 32), "red").save(tmp_path / "1.png")
    Image.new("RGB", (32, 64), "green").save(tmp_path / "a #1%?&<é>.png" if os.name != "nt" else tmp_path / "x.png")
    write_sheet(tmp_path / "index.html", "night & day <1>", iter(ROWS))
    return tmp_path / "index.html"


def test_it_holds_every_image_and_failures_first(page):
    found = Page(page)
    names = ["1.png", "a #1%?&<é>.png", "javascript:alert(1).png"]
    for tag, attribute in (("a", "href"), ("img", "src")):
        links = found.all(tag, attribute)
        assert [unquote(link or "") for link in links] == names
        assert not any(set(link or "") & set(':#?/&<"') for link in links)
    assert found.all("img", "loading") == ["lazy"] * 3
    assert found.all("img", "alt")[0] == "a red circle"
    text = found.text
    assert text.index("the GPU ran out of <memory>") < text.index("a blue circle") < text.index("a red circle")
    for part in ("night & day <1>", "3 images, 1 failed", "seed 7", "seed 0", "1.23", "64x64", "blur"):
        assert part in text
    assert text.count("document.title = 'owned'</script>\"><img") >= 3
    assert len([tag for tag, _ in found.tags if tag == "script"]) == 1
    assert not any(name.startswith("on") for _, attrs in found.tags for name in attrs)
    assert "http:" not in page.read_text(encoding="utf-8") and "https:" not in page.read_text(encoding="utf-8")


def test_it_is_written_whole_or_not_at_all(page, monkeypatch):
    before = page.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(StoreError, match=r"index\.html cannot be written: No space left"):
            write_sheet(page, "t", [])
    assert page.read_bytes() == before
    assert not list(page.parent.glob(".*"))
    write_sheet(page, "t", [])
    assert "0 images" in Page(page).text
    with pytest.raises(StoreError, match="cannot be written"):
        write_sheet(page.parent / "none" / "index.html", "t", [])


PLACES = ("/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome")


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    program = next((place for place in PLACES if Path(place).is_file()), None)
    if program is None:
        pytest.skip("there is no Chromium here")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.mark.browser
def test_in_a_browser(page, browser):
    rows = [*ROWS, *(SheetRow(f"{number}.png", f"image number {number}", seed=number) for number in range(200))]
    write_sheet(page, "a run", rows)
    for width, scheme in ((1280, "light"), (420, "dark")):
        tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        said: list[str] = []
        tab.on("pageerror", lambda error, said=said: said.append(str(error)))
        tab.on(
            "console", lambda line, said=said: said.append(line.text) if "ERR_FILE_NOT_FOUND" not in line.text else None
        )
        tab.goto(page.as_uri())
        assert tab.title() == "a run" and not said
        assert tab.evaluate("document.documentElement.scrollWidth") == width  # nothing sticks out
        tab.wait_for_function("document.querySelector('figure img').naturalWidth == 64")
        ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") is (scheme == "light")

        tab.keyboard.press("Tab")  # the box is first
        tab.keyboard.type("NUMBER  19")
        assert tab.inner_text("output") == "12 of 204"
        assert tab.locator(".row:visible").count() == 12 and not tab.locator("h2:has-text('Failed')").is_visible()
        tab.keyboard.press("Tab")
        assert unquote(tab.evaluate("document.activeElement.href")).endswith("/19.png")
        tab.keyboard.press("Tab")
        tab.keyboard.press("Enter")
        assert tab.locator("details[open] dt:visible").all_inner_texts() == ["Prompt", "File"]
        tab.fill("input", "owned")
        assert tab.inner_text("output") == "1 of 204"
        if os.name != "nt":
            tab.wait_for_function("document.querySelector('figure:not([hidden]) img').naturalWidth == 32")
        tab.fill("input", "")
        assert tab.locator("li.row:visible").count() == 1 and tab.inner_text("output") == ""
        assert tab.title() == "a run" and not said
        tab.close()
