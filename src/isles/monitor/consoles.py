"""Where commands print what is more than plain lines."""

from __future__ import annotations

import errno

from rich.console import Console


class PipeConsole(Console):
    """A console whose reader may leave; rich itself would end the program without a word."""

    def on_broken_pipe(self) -> None:
        """The reader (head, less) has seen enough."""
        raise BrokenPipeError(errno.EPIPE, "nobody reads this any more")


def console(*, stderr: bool = False) -> Console:
    """For this command's stdout or stderr."""
    made = PipeConsole(stderr=stderr, highlight=False)
    # A pipe has no width: nothing is cut there.
    return made if made.is_terminal else PipeConsole(stderr=stderr, highlight=False, width=240)
