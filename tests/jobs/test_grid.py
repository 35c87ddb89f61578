"""Contact sheets: what is on them, in which order, and what is told of the rest."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sdaccel.cli import run
from sdaccel.errors import SettingError
from sdaccel.jobs import grid
from sdaccel.jobs.grid import contact_sheet, find_images
from sdaccel.metadata import encode, write_parameters

COLOURS = [(250, 0, 0), (0, 250, 0), (0, 0, 250), (250, 250, 0), (0, 250, 250)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files named 1, 2, 3, 10, 11: red, green, blue, yellow, cyan; 3 is tall and 10 is wide."""
    sizes = [(64, 64), (64, 64), (32, 64), (64, 32), (64, 64)]
    for name, colour, size in zip(
        ("1.png", "2.jpg", "img 3.webp", "img 10.PNG", "img 11.png"), COLOURS, sizes, strict=True
    ):
        facts = [("Steps", 1), ("Seed", 40 + size[0]), ("Size", "1x1")]
        text = write_parameters(f"é {name} circle", "", facts) if name != "1.png" else ""
        (tmp_path / name).write_bytes(encode(Image.new("RGB", size, colour), Path(name).suffix, parameters=text))
    (tmp_path / "notes.txt").write_text("no image", encoding="utf-8")
    (tmp_path / "inner.png").mkdir()
    return tmp_path


def cell(sheet: Image.Image, number: int, columns: int, side: int, high: int) -> np.ndarray:
    left, top = 8 + number % columns * (side + 8), 8 + number // columns * high
    return np.asarray(sheet)[top : top + side, left : left + side].astype(int)


def test_order_places_and_aspect_ratios(folder):
    paths = find_images([folder])
    assert [path.name for path in paths] == ["1.png", "2.jpg", "img 3.webp", "img 10.PNG", "img 11.png"]
    found = contact_sheet(paths, columns=3, side=64, label="none")
    assert (found.shown, found.columns, found.skipped) == (5, 3, {})
    assert found.image.size == (3 * 72 + 8, 2 * 72 + 8)
    for number, (colour, path) in enumerate(zip(COLOURS, paths, strict=True)):
        square = cell(found.image, number, 3, 64, 72)
        with Image.open(path) as image:
            wide, high = image.size
        filled = np.abs(square - colour).max(axis=-1) < 30
        assert filled.sum() == wide * high
        assert filled[32 - high // 2 : 32 + high // 2, 32 - wide // 2 : 32 + wide // 2].all()  # in the middle
        assert (square[~filled] == 255).all()


@pytest.mark.parametrize(("label", "lines"), [("name", 1), ("seed", 1), ("prompt", 3)])
def test_labels_stand_below_and_stay_in_their_column(folder, label, lines):
    paths = find_images([folder])
    plain, labelled = (contact_sheet(paths, columns=5, side=64, label=each).image for each in ("none", label))
    assert labelled.height > plain.height
    pixels = np.asarray(labelled)
    below = pixels[8 + 64 :]
    for number in range(5):
        assert (below[:, 8 + number * 72 : 72 + number * 72] < 128).any()
        assert (below[:, 72 + number * 72 : 80 + number * 72] == 255).all()
    other = np.asarray(contact_sheet(paths[:1], columns=1, side=64, label=label).image)
    assert (other == pixels[:, : other.shape[1]]).all()


def test_what_files_say_is_the_label(folder, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(grid, "_wrapped", lambda text, *_: said.append(text) or [])
    paths = find_images([folder])
    for label in ("seed", "prompt", "name", "none"):
        contact_sheet(paths[:2], side=64, label=label)
    assert said == ["1.png", "104", "1.png", "e 2.jpg circle", "1.png", "2.jpg", "", ""]


def test_long_labels_are_cut_with_an_ellipsis():
    from PIL import ImageFont

    font = ImageFont.load_default(size=16)
    rows = grid._wrapped("a photograph of " * 100, font, 200, 3)
    assert len(rows) == 3 and rows[2].endswith("…") and not rows[0].endswith("…")
    assert rows[0].startswith("a photograph of") and all(font.getlength(row) <= 216 for row in rows)
    assert grid._wrapped("short", font, 200, 3) == ["short"]
    assert grid._wrapped("x" * 100, font, 200, 1)[0].endswith("x…")
    assert grid._wrapped("two words", font, 1, 2) == ["t", "w…"]


def test_transparent_turned_and_grey_images(tmp_path):
    Image.new("RGBA", (64, 64), (0, 0, 0, 0)).save(tmp_path / "1.png")
    Image.new("L", (64, 64), 100).save(tmp_path / "2.png")
    turned = Image.new("RGB", (64, 32), "red")
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(tmp_path / "3.jpg", exif=exif, quality=95)
    palette = Image.new("P", (64, 64), 1)
    palette.putpalette([0, 0, 0, 200, 0, 0])
    palette.save(tmp_path / "4.png", transparency=1)
    sheet = contact_sheet(find_images([tmp_path]), columns=4, side=64, label="none").image
    assert (cell(sheet, 0, 4, 64, 72) == 255).all() and (cell(sheet, 3, 4, 64, 72) == 255).all()
    assert (cell(sheet, 1, 4, 64, 72) == 100).all()
    assert (cell(sheet, 2, 4, 64, 72)[:, :, 1] < 100).sum() == 64 * 32
    assert (cell(sheet, 2, 4, 64, 72)[0, 30:34, 1] < 100).all()  # it stands upright


def test_limits(folder, monkeypatch):
    paths = find_images([folder])
    for options, message in (
        ({"label": "size"}, "no label 'size': name, none"),
        ({"side": 8}, "side 8 is not between 16 and 2048"),
        ({"columns": 0}, "columns 0"),
    ):
        with pytest.raises(SettingError, match=message):
            contact_sheet(paths, **options)
    with pytest.raises(SettingError, match=r"9999 images of 2048 .* more than the 128 megapixels"):
        contact_sheet(paths[:1] * 9999, side=2048)
    with pytest.raises(SettingError, match="is not there"):
        find_images([folder / "none"])
    with pytest.raises(SettingError, match="there is no image in"):
        find_images([folder / "inner.png"])
    monkeypatch.setattr(grid, "MOST_IMAGES", 3)
    with pytest.raises(SettingError, match="5 images are more than the 3"):
        find_images([folder])
    monkeypatch.setattr(grid, "MOST_PIXELS_EACH", 64 * 64 - 1)
    assert contact_sheet(paths, side=64).shown == 2


# ---- the command


def test_the_command(folder, capfd, monkeypatch):
    monkeypatch.chdir(folder)
    assert run(["grid", ".", "-o", "sheet.png", "--columns", "2", "--side", "32"]) == 0
    assert capfd.readouterr().out == "5 images on sheet.png\n"
    with Image.open("sheet.png") as sheet:
        first = sheet.size
    assert run(["grid", ".", "-o", "sheet.png"]) == 1
    assert "is there already" in capfd.readouterr().err
    arguments = ["grid", str(folder), "-o", "sheet.png", "--columns", "2", "--side", "32", "--force", "--json"]
    assert run(arguments) == 0  # the sheet is not on itself
    assert json.loads(capfd.readouterr().out) == {"path": "sheet.png", "images": 5, "columns": 2, "skipped": {}}
    with Image.open("sheet.png") as sheet:
        assert sheet.size == first
    for name in ("sheet.jpg", "sheet.webp"):
        assert run(["grid", "1.png", "2.jpg", "-o", name]) == 0


def test_what_cannot_be_read_is_named_and_the_rest_is_drawn(folder, capfd):
    whole = (folder / "1.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[:60])
    (folder / "page.png").write_text("<html>", encoding="utf-8")
    (folder / "bitmap.png").write_bytes(b"BM" + bytes(100))
    out = folder / "sheet.png"
    assert run(["grid", str(folder), "-o", str(out), "--side", "32", "--label", "prompt"]) == 1
    said = capfd.readouterr()
    assert said.out == f"5 images on {out}\n"
    assert len(said.err.splitlines()) == 3
    for name in ("cut.png", "page.png", "bitmap.png"):
        assert f"left out: {folder / name} " in said.err
    assert run(["grid", str(folder / "page.png"), "-o", str(folder / "other.png")]) == 1
    assert "none of 1 images can be read" in capfd.readouterr().err
    assert not (folder / "other.png").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [(["-o", "x.gif"], 1, ".gif is none"), (["-o", "no/x.png"], 1, "is not there"), ([], 2, "--output")],
)
def test_wrong_usage(folder, capfd, monkeypatch, arguments, code, message):
    monkeypatch.chdir(folder)
    assert run(["grid", ".", *arguments]) == code
    assert message in capfd.readouterr().err
