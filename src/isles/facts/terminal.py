"""Text on its way to a terminal: control characters of others are shown there, not sent."""

from __future__ import annotations

import codecs
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from isles.facts.units import printable

_DRAWN = re.compile("\r|\x1b\\[(?:[0-9;]{0,32}m|2K|1A|\\?25[lh])")
"""What rich sends to draw progress: the begin of the line, colours, an erased line, the line above,
the cursor hidden and shown. A title, the clipboard, a link, a question to the terminal are not."""
_BEGUN = re.compile("\x1b(?:\\[[0-9;?]{0,32})?")
_ENDED = "\x1b[0m\x1b[?25h"  # no colour, and the cursor seen


class ShownStream:
    """A text stream that shows control characters; the rest is the stream below it.

    A carriage return is a line end, so that a progress bar of a log neither overwrites a line nor
    fills one with `\\u000d`.

    Args:
        raw: the stream below; our console writes its own colours to it.
    """

    def __init__(self, raw: IO[str]) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        self.raw.write(printable(text.replace("\r\n", "\n").replace("\r", "\n")))
        return len(text)

    def writelines(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def show_streams() -> None:
    """Show control characters in whatever this process prints until its end.

    Every process whose output a person may read calls this first; `shown_streams` does the same
    for the time of a block.
    """
    if not isinstance(sys.stdout, ShownStream):
        sys.stdout, sys.stderr = _shown(sys.stdout), _shown(sys.stderr)


@contextmanager
def shown_streams() -> Iterator[None]:
    before = sys.stdout, sys.stderr
    show_streams()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _shown(stream: IO[str]) -> Any:
    # A process without a terminal may have no streams at all.
    return stream and ShownStream(stream)


def copy_drawn(source: int, target: IO[str]) -> None:
    """Copy what an isles on another machine prints, until it ends.

    Its progress is drawn on this terminal; the other control characters are shown, since the
    machine may be another's by now.

    Args:
        source: a descriptor of bytes.

    Raises:
        OSError: the reader of the target has closed it.
    """
    raw = target.raw if isinstance(target, ShownStream) else target
    decoder, held, has_drawn = codecs.getincrementaldecoder("utf-8")("replace"), "", False
    while True:
        data = os.read(source, 1 << 16)
        text = held + decoder.decode(data, final=not data)
        escape = text.rfind("\x1b")
        is_cut = bool(data) and escape >= 0 and _BEGUN.fullmatch(text, escape) is not None
        text, held = (text[:escape], text[escape:]) if is_cut else (text, "")
        has_drawn = has_drawn or _DRAWN.search(text) is not None
        raw.write(_drawn(text))
        if not data:
            raw.write(_ENDED * has_drawn)
        raw.flush()
        if not data:
            return


def _drawn(text: str) -> str:
    begin, parts = 0, []
    for found in _DRAWN.finditer(text):
        parts += [printable(text[begin : found.start()]), found[0]]
        begin = found.end()
    return "".join([*parts, printable(text[begin:])])
