"""What images say of themselves: read back as written, by us and as AUTOMATIC1111 reads."""

from __future__ import annotations

import io
import json
import random
import re
import struct
import time
import zlib
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from sdaccel.errors import SettingError
from sdaccel.metadata import MOST_TEXT, Facts, Parameters, encode, read, read_parameters, write_parameters

FACTS = [
    ("Steps", 20),
    ("Sampler", "DPM++ 2M"),
    ("CFG scale", 7),
    ("Seed", 5),
    ("Size", "512x768"),
    ("Model", "a: b, c"),
]
READ = {"Steps": "20", "Sampler": "DPM++ 2M", "CFG scale": "7", "Seed": "5", "Size": "512x768", "Model": "a: b, c"}
FACTS_LINE = "Steps: 20, Sampler: Euler, Size: 1x1"
PIECES = [
    "a cat", "photo of a (red:1.2) circle", "<lora:ink:0.5>", "{a|b}", "BREAK", "--steps", "%s{0}$1", "Steps: ",
    ",", ", ", ":", '"', "\\", "\\n", "'", "\n", "\n\n", "\r\n", "\r", "\t", " ", "\0", "\x0b", "\x1c", "\x85", "\xa0",
    "\u2028", "\u2029", "\ufeff", "\ufffe", "\ud800", "é", "e\u0301", "猫", "一" * 30, "👩\u200d👩\u200d👧", "🇩🇪",
    FACTS_LINE, f"\n{FACTS_LINE}", "\nSteps: 1", "Negative prompt:", "\nNegative prompt: ", "Version: v1.10.1",
    "\nTemplate: x", "\nNegative Template: y", 'Prompt: "x"', ', Prompt: "y"',
]  # fmt: skip


def prompts(count: int, seed: int = 3) -> list[str]:
    """Pieces of what is awkward in any order; the first hold one piece each, and one is long."""
    rng = random.Random(seed)
    made = ["", *PIECES, "word, " * 2000]
    while len(made) < count:
        made.append("".join(rng.choice(PIECES) for _ in range(rng.randint(1, 8))))
    return made


def as_a1111(text: str) -> tuple[str, str, dict[str, str]]:
    """The rules by which AUTOMATIC1111 1.10 takes such a text apart."""
    pair = re.compile(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')
    *lines, last = text.strip().split("\n")
    pairs = pair.findall(last)
    if len(pairs) < 3:
        lines, pairs = [*lines, last], []
    parts, negative = ["", ""], False
    for line in map(str.strip, lines):
        if line.startswith("Negative prompt:"):
            negative, line = True, line[16:].strip()
        parts[negative] += ("\n" if parts[negative] else "") + line
    return parts[0], parts[1], {key: unquoted(value) for key, value in pairs if value}


def unquoted(value: str) -> str:
    try:
        return json.loads(value) if value[0] == '"' == value[-1] else value
    except ValueError:
        return value


def blank() -> Image.Image:
    return Image.new("RGB", (8, 8), "red")


# ---- the text


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=8)).map("".join), st.text() | st.sampled_from(PIECES))
@example(FACTS_LINE, f"x\n{FACTS_LINE}")
@example("a\n", "\nb ")
@example("Negative prompt: a", "")
@settings(max_examples=400, deadline=None)
def test_any_prompt_comes_back(prompt, negative):
    text = write_parameters(prompt, negative, FACTS)
    assert read_parameters(text) == Parameters(prompt, negative, READ)
    theirs, not_theirs, facts = as_a1111(text)
    assert {name: facts[name] for name in READ} == READ
    if (theirs, not_theirs) == (prompt, negative):
        assert set(facts) == set(READ)  # nothing more than what it would write
    else:
        assert set(facts) - set(READ)


def test_what_a1111_reads_well_is_as_it_writes():
    assert write_parameters("a (cat:1.2), <lora:x:1>\nBREAK a dog", "blurry", FACTS) == (
        "a (cat:1.2), <lora:x:1>\nBREAK a dog\nNegative prompt: blurry\n"
        'Steps: 20, Sampler: DPM++ 2M, CFG scale: 7, Seed: 5, Size: 512x768, Model: "a: b, c"'
    )


@given(st.lists(st.sampled_from([*PIECES, "aa", "a", "1x2:", "é -/:", ": "])).map("".join))
@example("1x2:a cat,1x2:")
@settings(max_examples=300, deadline=None)
def test_facts_are_found_where_a1111_finds_them(line):
    text = f"p\n{line}, aa: 1, bb: 2, cc: 3"
    ours, (_, _, theirs) = read_parameters(text).facts, as_a1111(text)
    for name in ("Prompt", "Negative prompt"):  # ours where they are quoted
        ours.pop(name, None), theirs.pop(name, None)
    assert {name: value for name, value in ours.items() if value} == {k: v for k, v in theirs.items() if v}


@given(st.text(st.characters(exclude_categories=["Cs"])))
@settings(deadline=None)
def test_any_value_comes_back(value):
    text = write_parameters("p", "", [*FACTS, ("Odd -/_ name", value)])
    assert read_parameters(text).facts["Odd -/_ name"] == value
    assert not value or as_a1111(text)[2]["Odd -/_ name"] == value


@pytest.mark.parametrize("name", ["", "a", "a,b", "a:b", " ab", "ab ", "Prompt", "Negative prompt", "Steps", "-ab"])
def test_names_that_readers_would_not_find(name):
    with pytest.raises(SettingError, match="no name that a fact can have"):
        write_parameters("p", "", [*FACTS, (name, 1)])


def test_too_few_facts():
    with pytest.raises(SettingError, match="2 facts are too few"):
        write_parameters("p", "", FACTS[:2])


def test_texts_of_other_programs():
    found = read_parameters(
        "masterpiece, <lora:add_detail:0.7>\nNegative prompt: EasyNegative, (worst quality:1.4)\n"
        "Steps: 30, Sampler: DPM++ 2M Karras, CFG scale: 7, Seed: 1234567890, Size: 512x768, Model hash: 6ce0161689, "
        'Hires upscaler: Latent (nearest-exact), Lora hashes: "add_detail: 7c6bad76eb54, ink: 1", '
        'TI hashes: "EasyNegative: c74b4e810b03", Future thing: yes, Version: v1.10.1'
    )
    assert found.negative == "EasyNegative, (worst quality:1.4)"
    assert found.facts["Lora hashes"] == "add_detail: 7c6bad76eb54, ink: 1"
    assert (found.facts["Future thing"], found.facts["Version"]) == ("yes", "v1.10.1")
    templated = read_parameters(
        "a red cat\nNegative prompt: bad\nSteps: 20, Sampler: Euler a, Size: 512x512\n"
        "Template: a {red|blue} cat\nof two lines\nNegative Template: __bad__"
    )
    assert (templated.prompt, templated.negative, templated.facts["Size"]) == ("a red cat", "bad", "512x512")
    assert templated.facts["Template"] == "a {red|blue} cat\nof two lines"
    assert templated.facts["Negative Template"] == "__bad__"
    assert read_parameters("only a prompt, with a: colon") == Parameters("only a prompt, with a: colon")
    assert read_parameters("") == Parameters("")
    unquoted = read_parameters('p\nSteps: 1, Prompt: other, Sampler: x, Broken: "a\\q", Size: 1x1')
    assert (unquoted.prompt, unquoted.facts["Prompt"], unquoted.facts["Broken"]) == ("p", "other", '"a\\q"')


LONG = ["a", "a ", ":", 'aa:"', "aa: ", 'aa: "\\', "\nTemplate:", "x\n", "\nNegative prompt:"]


@pytest.mark.parametrize("text", [*(piece * 300_000 for piece in LONG), "x\nTemplate: y" + "\nz" * 300_000])
def test_long_texts_take_no_longer_than_they_are(text):
    start = time.perf_counter()
    read_parameters(text)
    assert time.perf_counter() - start < 2


# ---- files


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
def test_500_prompts_through_files(tmp_path, suffix):
    path, image = tmp_path / f"image{suffix}", blank()
    key = "0123456789abcdef" * 4
    negatives = prompts(500, seed=4)[::-1]
    for prompt, negative in zip(prompts(500), negatives, strict=True):
        details = {"prompt": prompt, "n": [1, None]}
        text = write_parameters(prompt, negative, FACTS)
        path.write_bytes(encode(image, suffix, parameters=text, details=details, key=key))
        found = read(path)
        assert found.parameters == Parameters(prompt, negative, READ)
        assert (found.details, found.key) == ((details, key) if suffix == ".png" else (None, key[:32]))


def test_pillow_reads_the_same(tmp_path):
    text = write_parameters("é 猫\nb", "", FACTS)
    for latin, kind in ((text.replace("猫", "c"), str), (text, PngImagePlugin.iTXt)):
        with Image.open(
            io.BytesIO(encode(blank(), ".png", parameters=latin, details={"a": "猫"}, key="b" * 64))
        ) as image:
            assert image.text["parameters"] == latin and type(image.text["parameters"]) is kind
            assert json.loads(image.text["sdaccel"]) == {"a": "猫", "key": "b" * 64}
    for suffix in (".jpeg", ".webp"):
        data = encode(blank(), suffix, parameters=text, details={}, key="f" * 64)
        assert struct.pack(">HH", 0x9286, 7) in data  # of another type, piexif would not take it
        with Image.open(io.BytesIO(data)) as image:
            tags = image.getexif().get_ifd(0x8769)
            assert tags[0x9286] == b"UNICODE\0" + text.encode("utf-16-be") and tags[0xA420] == "f" * 32


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
def test_nothing_to_say(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(encode(blank(), suffix, parameters="", details=None))
    assert read(path) == Facts()
    blank().save(path)
    assert read(path) == Facts()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
@pytest.mark.parametrize("suffix", [".png", ".JPG", ".webp"])
def test_modes_and_quality(mode, suffix):
    noise = Image.effect_noise((64, 64), 90).convert(mode)
    small, large = (encode(noise, suffix, parameters="", quality=quality) for quality in (10, 95))
    assert Image.open(io.BytesIO(large)).size == (64, 64)
    assert len(small) < len(large) or suffix == ".png"


def test_what_cannot_be_written():
    with pytest.raises(SettingError, match=r"\.gif is none that images are saved as: \.png"):
        encode(blank(), ".gif", parameters="")
    with pytest.raises(SettingError, match="too long for a JPEG"):
        encode(blank(), ".jpg", parameters="é" * 33_000)
    assert encode(blank(), ".jpg", parameters="é" * 32_600) and encode(blank(), ".webp", parameters="é" * 33_000)
    with pytest.raises(SettingError, match="more than the 8388608"):
        encode(blank(), ".png", parameters="a" * (MOST_TEXT + 1))
    with pytest.raises(SettingError, match="'12' is no key of an image"):
        encode(blank(), ".png", parameters="", key="12")
    with pytest.raises(SettingError, match="no 'key'"):
        encode(blank(), ".png", parameters="", details={"key": 1})
    with pytest.raises(SettingError, match="16384x1 cannot become a WEBP"):
        encode(Image.new("RGB", (16384, 1)), ".webp", parameters="")


def test_exif_of_other_programs(tmp_path):
    path = tmp_path / "x.jpg"
    text = "猫 é\nSteps: 1, Sampler: x, Size: 1x1"
    for comment in (b"UNICODE\0" + text.encode("utf-16-le"), b"UNICODE\0" + text.encode("utf-16"), text.encode(),
                    b"ASCII\0\0\0" + text.encode(), bytes(8) + text.encode()):  # fmt: skip
        for order in (b"II*\0", b"MM\0*"):
            endian = "<" if order[:1] == b"I" else ">"
            root = struct.pack(f"{endian}I HHHIII", 8, 1, 0x8769, 4, 1, 26, 0)
            entry = struct.pack(f"{endian}HHHIII", 1, 0x9286, 7, len(comment), 44, 0)
            blank().save(path, exif=b"Exif\0\0" + order + root + entry + comment)
            assert read(path).parameters == Parameters("猫 é", "", {"Steps": "1", "Sampler": "x", "Size": "1x1"})


def png(*chunks: tuple[bytes, bytes], broken: bool = False) -> bytes:
    found = b"\x89PNG\r\n\x1a\n"
    for kind, data in [*chunks, (b"IEND", b"")]:
        found += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data) ^ broken)
    return found


def test_text_that_is_packed_or_stands_behind_the_pixels(tmp_path):
    path, text = tmp_path / "x.png", "é\nSteps: 1, Sampler: x, Size: 1x1"
    packed = zlib.compress(text.encode())
    for chunk in (
        (b"iTXt", b"parameters\0\1\0\0\0" + packed),
        (b"iTXt", b"parameters\0\0\0en\0\0" + text.encode()),
        (b"zTXt", b"parameters\0\0" + zlib.compress(text.encode("latin-1"))),
    ):
        path.write_bytes(png((b"IDAT", b"x"), (b"tEXt", b"Other\0thing"), chunk))
        assert read(path).parameters == Parameters("é", "", {"Steps": "1", "Sampler": "x", "Size": "1x1"})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no PNG, JPEG or WebP"),
        (b"<html>" * 9, "no PNG, JPEG or WebP"),
        (png()[:-6], "is damaged"),
        (png((b"tEXt", b"parameters\0x"), broken=True), "checksum"),
        (png()[:8] + struct.pack(">I4s", 2**31 - 1, b"tEXt"), "longer than 8 MB"),
        (png()[:8] + struct.pack(">I4s", 900, b"iTXt") + b"x", "ends too early"),
        (png((b"zTXt", b"parameters\0\0" + zlib.compress(bytes(9 * 2**20)))), "cut off, or longer than 8 MB"),
        (png((b"zTXt", b"parameters\0\0nonsense")), "is damaged"),
        (png((b"iTXt", b"parameters\0\0\0\0\0\xff")), "is damaged"),
        (png((b"tEXt", b"sdaccel\0{")), "is damaged"),
        (png((b"tEXt", b"sdaccel\0[]")), "no JSON object"),
        (png((b"tEXt", b"sdaccel\0" + b"[" * 10**6)), "is damaged"),
        (png(*[(b"aaAa", b"")] * 100_001), "more than 100000 chunks"),
        (b"\xff\xd8\xff\xe1\xff", "is damaged"),
        (b"\xff\xd8\xff\xe1\xff\xffExif\0\0", "ends too early"),
        (b"\xff\xd8\xff\xe1\x00\x10Exif\0\0MM\0*\xff\xff\xff\xff", "is damaged"),
        (b"\xff\xd8\xff\xe1\x00\x10Exif\0\0nonsense", "EXIF data are none"),
        (b"\xff\xd8" + b"\xff\xe0\0\x02" * 100_001, "more than 100000 segments"),
        (b"RIFF\0\0\0\0WEBPEXIF\xff\xff\xff\xff", "longer than 8 MB"),
    ],
)
def test_hostile_files(tmp_path, data, message):
    path = tmp_path / "x.png"
    path.write_bytes(data)
    with pytest.raises(SettingError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
def test_damaged_files_raise_nothing_but_our_error(tmp_path, suffix):
    path, rng = tmp_path / f"x{suffix}", random.Random(5)
    whole = encode(blank(), suffix, parameters=write_parameters("a 猫", "", FACTS), details={"a": 1}, key="1" * 64)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(min(len(data), 400))] = rng.randrange(256)
        path.write_bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
        with suppress(SettingError):
            read(path)


def test_a_file_that_is_not_there(tmp_path):
    for path in (tmp_path / "none.png", tmp_path):
        with pytest.raises(SettingError, match="cannot be read"):
            read(path)


def test_reading_decodes_no_pixels(tmp_path: Path):
    path = tmp_path / "x.png"
    path.write_bytes(
        png((b"IHDR", struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0)), (b"IDAT", b"no pixels"))
    )
    assert read(path) == Facts()
