"""Text on its way to a terminal: control characters of others are shown there, not sent."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from isles.facts.units import printable


class ShownStream:
    """A text stream that shows control characters; the rest is the stream below it.

    A carriage return is a line end, so that a progress bar of a log neither overwrites a line nor
    fills one with `\\u000d`.

    Args:
        raw: where the text goes; our console writes its own colours there.
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
