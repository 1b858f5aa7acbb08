"""Output to a terminal: control characters of foreign text are shown, not sent."""

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
"""Sequences that rich sends to draw progress: start of line, colors, erase line, line up, hide and
show the cursor. It does not include titles, the clipboard, links and queries to the terminal."""
_BEGUN = re.compile("\x1b(?:\\[[0-9;?]{0,32})?")
_ENDED = "\x1b[0m\x1b[?25h"  # no color, and a visible cursor


class ShownStream:
    """A text stream that shows control characters as text. It wraps another stream.

    A carriage return counts as a line end. So a progress bar in a log neither overwrites a line nor
    fills it with `\\u000d`.

    Args:
        raw: the wrapped stream. The console of isles writes its colors to it.
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
    """Show control characters in all output of this process, until it ends.

    Every process whose output a person may read calls this first. `shown_streams` does the same
    for one block of code.
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
    """Copy the output of an isles process on another machine, until it ends.

    Its progress bars are drawn on this terminal. Other control characters are shown as text, as
    another user may control that machine.

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
