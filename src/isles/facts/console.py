"""The console of a process: it sends the colors of isles and no other control characters."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import IO, Any

from rich import console as rich
from rich.segment import Segment
from rich.text import Text

from isles.facts.terminal import ShownStream
from isles.facts.units import printable


class Console(rich.Console):
    """A rich console for text from foreign sources. isles uses no other class of console.

    Only `Text` objects and tables set styles. The console shows control characters as text, and
    markup such as `[red]` or `:smile:` too.

    Raises:
        BrokenPipeError: on any output, if the reader (head, less) has exited; rich itself would end
            the program silently.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    @property
    def file(self) -> IO[str]:
        """The raw stream, without the filter for control characters, so that colors pass."""
        found = super().file
        while not isinstance(found, ShownStream) and hasattr(found, "rich_proxied_file"):
            found = found.rich_proxied_file  # a progress bar is being drawn
        return found.raw if isinstance(found, ShownStream) else found

    @file.setter
    def file(self, new: IO[str]) -> None:
        self._file = new

    def render_str(self, text: str, **options: Any) -> Text:
        # Widths count the text as it is shown.
        return super().render_str(printable(text), **options)

    def render(
        self, renderable: rich.RenderableType, options: rich.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            is_ours = segment.control is not None
            yield segment if is_ours else Segment(printable(segment.text), segment.style)

    def print_lines(self, lines: Iterable[str | Text]) -> None:
        """Print lines uncut."""
        for line in lines:
            self.print(line, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Raise what `isles.cli` expects."""
        raise BrokenPipeError(errno.EPIPE, "the reader of this output has closed it")
