"""Text files line by line, as they are on people's disks: any size, with or without a byte order mark, damaged.

Lines end with ``\\n``, ``\\r\\n`` or ``\\r`` and with nothing else: U+2028, U+0085 and form feeds are part of a text.
UTF-8; UTF-16 where the file begins with its mark, as what Excel and PowerShell write does.
"""

from __future__ import annotations

import codecs
import io
import re

LONGEST = 1_000_000
"""Characters of a line, and of a record of several."""
_UNUSABLE = re.compile("[\0\ud800-\udfff]")


def fault_of(text: str) -> str | None:
    """Why ``text`` is none: it holds a NUL, or half a character of UTF-16, or bytes that are no UTF-8."""
    found = _UNUSABLE.search(text)
    if found is None:
        return None
    if found.group() == "\0":
        return f"there is a NUL character in column {found.start() + 1}."
    if "\udc80" <= found.group() <= "\udcff":
        try:
            text.encode("utf-8", "surrogateescape").decode()
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            return f"byte {error.start + 1} of the line (0x{byte:02x}) is no UTF-8. Save the file as UTF-8."
        except UnicodeEncodeError:
            pass
    return f"there is half a character (U+{ord(found.group()):04X}) in column {found.start() + 1}."


class Lines:
    """The lines of a file, without their ends. After each, ``number`` (from 1) and ``fault`` speak of it.

    What cannot be used of a line is given as U+FFFD, and a line of more than ``longest`` characters as "".
    """

    def __init__(self, file: io.BufferedReader, longest: int = LONGEST):
        self.longest = longest
        self.number = 0
        self.fault: str | None = None
        mark = file.peek(4)[:4]
        wide = mark.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        self._text = io.TextIOWrapper(
            file,
            encoding="utf-16" if wide else "utf-8",
            errors="surrogatepass" if wide else "surrogateescape",
            newline=None,
        )
        self._ended = False

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> str:
        if self._ended:
            raise StopIteration
        self.number += 1
        self.fault = None
        try:
            line = self._text.readline(self.longest + 1)
            if not line:
                self._ended = True
                self.number -= 1
                raise StopIteration
            if len(line) > self.longest and not line.endswith("\n"):
                self._skip()
                self.fault = f"the line is longer than {self.longest:,} characters."
                return ""
        except UnicodeError as error:
            self._ended = True
            self.fault = f"it cannot be read from here on: {error}."
            return ""
        line = line.removesuffix("\n").removeprefix("\ufeff")  # in the middle, too, where files were joined
        self.fault = fault_of(line)
        return line if self.fault is None else _UNUSABLE.sub("\ufffd", line)

    def _skip(self) -> None:
        while (rest := self._text.readline(self.longest)) and not rest.endswith("\n"):
            pass

    def close(self) -> None:
        """Leaves the file open that it was given."""
        self._text.detach()
