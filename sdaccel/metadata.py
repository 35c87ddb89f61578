"""What an image file says of how it was made: AUTOMATIC1111's parameters text, our details, the image's key.

======================  ============================  ============================
what                    PNG                           JPEG, WebP (EXIF)
======================  ============================  ============================
parameters              text chunk ``parameters``     UserComment, UTF-16
details, a JSON object  text chunk ``sdaccel``        not there: in a sidecar
key, 64 hex digits      ``key`` among the details     ImageUniqueID, the first 32
======================  ============================  ============================

The parameters text is the prompt, ``Negative prompt: ...`` and, on the last line, facts: ``Steps: 20, Sampler: DDIM``.
Its readers tell these apart by how lines begin. A prompt that they would read otherwise than it was meant is there a
second time, JSON-quoted, as the fact ``Prompt`` or ``Negative prompt``: they pass over it, `read_parameters` heeds it.
"""

from __future__ import annotations

import io
import json
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from sdaccel.errors import SettingError

_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
SUFFIXES = tuple(_FORMATS)
MOST_TEXT = 8 * 2**20
"""Bytes of text that an image may carry."""
COMPRESS_LEVEL = 1
"""1024x1024 like a photo: 0.06 to 0.1 s, 0 to 10 % larger than at level 6, which takes up to 0.36 s."""

_MOST_JPEG_EXIF = 65533
_MOST_CHUNKS = 100_000
_EXIF_IFD, _USER_COMMENT, _IMAGE_UNIQUE_ID = 0x8769, 0x9286, 0xA420

_NEGATIVE = "Negative prompt:"
_TEMPLATES = ("Template:", "Negative Template:")  # lines that the Dynamic Prompts extension adds at the end
_PROMPT_FACTS = ("Prompt", "Negative prompt")
_FEWEST_FACTS = 3
"""Readers take a last line with fewer for a part of the prompt."""
_KEY = re.compile(r"\w[\w \-/]+")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)+"(?=,|$)')
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_NO_TEXT = re.compile(r"[\x00\ud800-\udfff]")


@dataclass(frozen=True)
class Parameters:
    """A parameters text. Facts are as written, without the quotes: ``{"Steps": "20", "Size": "512x512", ...}``."""

    prompt: str
    negative: str = ""
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """What a file says of itself. ``key``: "" where there is none; 32 digits in JPEG and WebP, 64 in PNG."""

    parameters: Parameters | None = None
    details: dict[str, Any] | None = None
    key: str = ""


# ---- the parameters text


def write_parameters(prompt: str, negative: str, facts: Sequence[tuple[str, object]]) -> str:
    """The text, from which `read_parameters` gives the same prompts and facts, whatever these contain.

    AUTOMATIC1111 and those after it read the same, but for blanks at the ends of lines, empty lines at the beginning,
    and prompts with lines that look like something else. Raises SettingError for fewer than three facts, by which
    readers know the last line, and for a name of a fact that they would not find.
    """
    names = [name for name, _ in facts]
    for name in names:
        if not _KEY.fullmatch(name) or name != name.strip() or name in _PROMPT_FACTS or names.count(name) > 1:
            raise SettingError(f"{name!r} is no name that a fact can have: letters, digits, blanks, -, / and _, once.")
    if len(names) < _FEWEST_FACTS:
        raise SettingError(f"{len(names)} facts are too few to be read again: at least {_FEWEST_FACTS} are needed.")
    lines = [_NO_TEXT.sub("\ufffd", prompt)]
    if negative:
        lines.append(f"{_NEGATIVE} {_NO_TEXT.sub(chr(0xFFFD), negative)}")
    written = [f"{name}: {_value(str(value))}" for name, value in facts]
    found = read_parameters("\n".join([*lines, ", ".join(written)]))
    for name, meant, read in zip(_PROMPT_FACTS, (prompt, negative), (found.prompt, found.negative), strict=True):
        if read != meant:
            written.append(f"{name}: {_quoted(meant)}")
    return "\n".join([*lines, ", ".join(written)])


def _value(text: str) -> str:
    plain = text and text == text.strip() and text.isprintable() and not set(text) & set(',:"')
    return text if plain else _quoted(text)


def _quoted(value: object) -> str:
    """As JSON that any encoding takes."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def read_parameters(text: str) -> Parameters:
    """Reads what this module, AUTOMATIC1111 or one of its kind wrote. Any text can be read: at worst it is a prompt."""
    lines = text.strip().split("\n")
    end = len(lines) - 1
    facts = _read_facts(lines[end])
    if len(facts) < _FEWEST_FACTS:
        end, facts = _before_templates(lines)
    parts: tuple[list[str], list[str]] = ([], [])
    negative = False
    for line in map(str.strip, lines[:end]):
        if line.startswith(_NEGATIVE):
            negative, line = True, line.removeprefix(_NEGATIVE).strip()
        if line or parts[negative]:
            parts[negative].append(line)
    prompts = ["\n".join(part) for part in parts]
    found: dict[str, str] = {}
    for name, value in [*facts, *_read_templates(lines[end + 1 :])]:
        meant = _unquoted(value)
        if name in _PROMPT_FACTS and meant != value:
            prompts[_PROMPT_FACTS.index(name)] = meant
        elif meant or name not in found:  # what is empty takes no earlier value's place
            found[name] = meant
    return Parameters(prompts[0], prompts[1], found)


def _read_facts(line: str) -> list[tuple[str, str]]:
    """``Name: value, Name: "value", ...``, whatever stands between. Linear in time, however hostile."""
    found: list[tuple[str, str]] = []
    at = 0
    colon = line.find(":")
    while colon >= 0:
        start = colon
        while start > at and (line[start - 1] in " -/_" or line[start - 1].isalnum()):
            start -= 1
        key = line[start:colon].lstrip(" -/")
        if len(key) < 2:
            colon = line.find(":", colon + 1)
            continue
        begin = colon + 1
        while begin < len(line) and line[begin].isspace():
            begin += 1
        quoted = _QUOTED.match(line, begin)
        comma = line.find(",", begin)
        end = quoted.end() if quoted else comma if comma >= 0 else len(line)
        found.append((key, line[begin:end]))
        at = end + 1
        colon = line.find(":", at)
    return found


def _before_templates(lines: Sequence[str]) -> tuple[int, list[tuple[str, str]]]:
    """(the line of facts that lines about templates follow, those facts), or past the end and none."""
    for at in range(1, len(lines)):
        if lines[at].startswith(_TEMPLATES):
            facts = _read_facts(lines[at - 1])
            if len(facts) >= _FEWEST_FACTS:
                return at - 1, facts
    return len(lines), []


def _read_templates(lines: Sequence[str]) -> list[tuple[str, str]]:
    """Each goes on until the next begins."""
    found: list[tuple[str, str]] = []
    for line in lines:
        name, _, value = line.partition(":")
        if line.startswith(_TEMPLATES):
            found.append((name, value.strip()))
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]}\n{line}")
    return found


def _unquoted(value: str) -> str:
    if len(value) < 2 or value[0] != '"' or value[-1] != '"':
        return value
    try:
        return str(json.loads(value))
    except (ValueError, RecursionError):
        return value


# ---- files


def encode(
    image: Any,
    suffix: str,
    *,
    parameters: str = "",
    details: Mapping[str, Any] | None = None,
    key: str = "",
    quality: int = 95,
) -> bytes:
    """A PIL image as a file of that suffix (`SUFFIXES`), which carries what is not empty; see the table above.

    quality: of JPEG and WebP, 1 to 100. Raises SettingError for what cannot be written, such as a text that is longer
    than JPEG's 64 KB: cut, it would say something else.
    """
    form = image_format(suffix)
    if key and not re.fullmatch("[0-9a-f]{64}", key):
        raise SettingError(f"{key!r} is no key of an image: 64 hex digits.")
    if len(parameters) > MOST_TEXT:
        raise SettingError(
            f"{len(parameters)} characters of parameters are more than the {MOST_TEXT} that images carry."
        )
    options: dict[str, Any] = {"format": form}
    if form == "PNG":
        options |= {"compress_level": COMPRESS_LEVEL, "pnginfo": _png_texts(parameters, details, key)}
    else:
        options |= {"quality": quality, "exif": _exif(form, parameters, key)}
        image = image.convert("RGB") if image.mode == "RGBA" and form == "JPEG" else image
    file = io.BytesIO()
    try:
        image.save(file, **options)
    except (OSError, ValueError) as error:
        raise SettingError(f"an image of {image.width}x{image.height} cannot become a {form} file: {error}") from error
    return file.getvalue()


def image_format(suffix: str) -> str:
    """Pillow's name of the format. Raises SettingError for what is not of `SUFFIXES`."""
    try:
        return _FORMATS[suffix.lower()]
    except KeyError:
        kinds = ", ".join(SUFFIXES)
        raise SettingError(f"{suffix or 'no suffix'} is none that images are saved as: {kinds}.") from None


def _png_texts(parameters: str, details: Mapping[str, Any] | None, key: str) -> Any:
    """Pillow writes what is no Latin-1 as iTXt, in UTF-8."""
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    if parameters:
        info.add_text("parameters", parameters)
    if details is not None or key:
        if "key" in (details or {}):
            raise SettingError("details have no 'key': that is the image's own.")
        text = _quoted({**(details or {}), **({"key": key} if key else {})})
        if len(text) > MOST_TEXT:
            raise SettingError(f"{len(text)} characters of details are more than the {MOST_TEXT} that images carry.")
        info.add_text("sdaccel", text)
    return info


def _exif(form: str, parameters: str, key: str) -> bytes:
    """Written here, for Pillow gives UserComment another type than the specification, which readers refuse."""
    entries = []
    if parameters:
        entries.append((_USER_COMMENT, 7, b"UNICODE\0" + parameters.encode("utf-16-be")))
    if key:
        entries.append((_IMAGE_UNIQUE_ID, 2, f"{key[:32]}\0".encode()))
    if not entries:
        return b""
    pointer = struct.pack(">HHHIIIH", 1, _EXIF_IFD, 4, 1, 26, 0, len(entries))  # the directory at 8, ours at 26
    data = b""
    for tag, kind, value in entries:
        pointer += struct.pack(">HHII", tag, kind, len(value), 32 + 12 * len(entries) + len(data))
        data += value
    found = b"Exif\0\0MM\0*" + struct.pack(">I", 8) + pointer + bytes(4) + data
    if form == "JPEG" and len(found) > _MOST_JPEG_EXIF:
        raise SettingError(
            f"a text of {len(parameters)} characters is too long for a JPEG, which takes 64 KB.",
            hint="Save as .png or .webp.",
        )
    return found


def read(path: Path) -> Facts:
    """What a PNG, JPEG or WebP file says of itself. Reads its texts and nothing else, so that no file costs much.

    Raises SettingError for a file that is none of these, is damaged, or holds more text than `MOST_TEXT`.
    """
    try:
        with path.open("rb") as file:
            start = file.read(12)
            if start.startswith(b"\x89PNG\r\n\x1a\n"):
                return _png_facts(file)
            if start.startswith(b"\xff\xd8\xff"):
                return _exif_facts(_jpeg_exif(file))
            if start[:4] == b"RIFF" and start[8:] == b"WEBP":
                return _exif_facts(_webp_exif(file))
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError, struct.error, zlib.error) as error:
        raise SettingError(f"{path} is damaged, or no image: {error}.") from error
    raise SettingError(f"{path} is no PNG, JPEG or WebP file.")


def _facts(text: str, details: dict[str, Any] | None, key: object) -> Facts:
    return Facts(read_parameters(text) if text else None, details, key if isinstance(key, str) else "")


def _png_facts(file: BinaryIO) -> Facts:
    texts: dict[str, str] = {}
    for kind, size in _png_chunks(file):
        if kind == b"IDAT" and texts:
            break
        if kind in (b"tEXt", b"zTXt", b"iTXt"):
            data = _take(file, size)
            if struct.pack(">I", zlib.crc32(kind + data)) != file.read(4):
                raise ValueError("the checksum of a text is wrong")
            name, _, rest = data.partition(b"\0")
            if name in (b"parameters", b"sdaccel"):
                texts[name.decode()] = _png_text(kind, rest)
    details = json.loads(texts["sdaccel"]) if "sdaccel" in texts else None
    if not isinstance(details, (dict, type(None))):
        raise ValueError("its chunk sdaccel is no JSON object")
    key = details.pop("key", "") if details else ""
    return _facts(texts.get("parameters", ""), details, key)


def _png_chunks(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """(type, size) of each, with the file at its data."""
    at = 8
    for _ in range(_MOST_CHUNKS):
        file.seek(at)
        size, kind = struct.unpack(">I4s", file.read(8))
        if kind == b"IEND":
            return
        yield kind, size
        at += size + 12
    raise ValueError(f"it has more than {_MOST_CHUNKS} chunks")


def _png_text(kind: bytes, data: bytes) -> str:
    packed = kind == b"zTXt"
    if packed:
        data = data[1:]
    elif kind == b"iTXt":
        packed = data[:1] == b"\1"
        data = data[2:].split(b"\0", 2)[2] if data.count(b"\0", 2) >= 2 else b""
    if packed:
        inflate = zlib.decompressobj()
        data = inflate.decompress(data, MOST_TEXT)
        if not inflate.eof:
            raise ValueError(f"a text in it is cut off, or longer than {MOST_TEXT >> 20} MB")
    return data.decode("utf-8" if kind == b"iTXt" else "latin-1")


def _jpeg_exif(file: BinaryIO) -> bytes:
    file.seek(2)
    for _ in range(_MOST_CHUNKS):
        start, marker, size = struct.unpack(">BBH", file.read(4))
        if start != 0xFF:
            raise ValueError("a marker is missing")
        if marker == 0xFF:  # a fill byte
            file.seek(-3, io.SEEK_CUR)
        elif marker == 0xDA:
            return b""
        elif marker == 0xE1 and size >= 8 and (data := _take(file, size - 2)).startswith(b"Exif\0\0"):
            return data[6:]
        elif marker != 0xE1 or size < 8:
            file.seek(max(0, size - 2), io.SEEK_CUR)
    raise ValueError(f"it has more than {_MOST_CHUNKS} segments")


def _webp_exif(file: BinaryIO) -> bytes:
    at = 12
    for _ in range(_MOST_CHUNKS):
        file.seek(at)
        head = file.read(8)
        if not head:
            return b""
        kind, size = struct.unpack("<4sI", head)
        if kind == b"EXIF":
            return _take(file, size).removeprefix(b"Exif\0\0")
        at += 8 + size + size % 2
    raise ValueError(f"it has more than {_MOST_CHUNKS} chunks")


def _take(file: BinaryIO, size: int) -> bytes:
    if size > MOST_TEXT:
        raise ValueError(f"a text in it is longer than {MOST_TEXT >> 20} MB")
    data = file.read(size)
    if len(data) < size:
        raise ValueError("it ends too early")
    return data


def _exif_facts(data: bytes) -> Facts:
    """Of EXIF, which is a TIFF file without a picture."""
    if not data:
        return Facts()
    if data[:4] not in (b"II*\0", b"MM\0*"):
        raise ValueError("its EXIF data are none")
    order = "<" if data[:1] == b"I" else ">"
    (root,) = struct.unpack_from(f"{order}I", data, 4)
    pointer = _tags(data, order, root, (_EXIF_IFD,)).get(_EXIF_IFD)
    if pointer is None:
        return Facts()
    (place,) = struct.unpack(f"{order}I", pointer)
    tags = _tags(data, order, place, (_USER_COMMENT, _IMAGE_UNIQUE_ID))
    key = tags.get(_IMAGE_UNIQUE_ID, b"").rstrip(b"\0").decode("latin-1")
    return _facts(_comment(tags.get(_USER_COMMENT, b"")), None, key)


def _tags(data: bytes, order: str, at: int, wanted: tuple[int, ...]) -> dict[int, bytes]:
    """The bytes of those tags in the directory at ``at``. Text and plain bytes, or one pointer."""
    found: dict[int, bytes] = {}
    (count,) = struct.unpack_from(f"{order}H", data, at)
    for entry in range(at + 2, at + 2 + 12 * count, 12):
        tag, kind, size = struct.unpack_from(f"{order}HHI", data, entry)
        if tag in wanted:
            size *= 4 if kind == 4 else 1
            (place,) = (entry + 8,) if size <= 4 else struct.unpack_from(f"{order}I", data, entry + 8)
            found[tag] = data[place : place + size]
    return found


def _comment(value: bytes) -> str:
    """EXIF's UserComment: eight bytes name the encoding. The byte order is big-endian here, and in AUTOMATIC1111."""
    kind, rest = value[:8], value[8:]
    if kind != b"UNICODE\0":
        return (rest if kind in (b"ASCII\0\0\0", bytes(8)) else value).decode("utf-8", "replace").rstrip("\0")
    text, other = rest.decode("utf-16-be", "replace"), rest.decode("utf-16-le", "replace")
    return other.removeprefix("\ufeff") if ": " in other and ": " not in text else text
