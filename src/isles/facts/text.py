"""Text of unknown origin, as a terminal or a log may take it."""

from __future__ import annotations


def printable(text: str, *, keep: str = "\n\t", longest: int | None = None) -> str:
    """Text that does nothing to a terminal: control characters as they are written in Python.

    Args:
        text: from wherever.
        keep: control characters that stay as they are.
        longest: characters that are taken at the most; what is left out shows as an ellipsis.
    """
    if longest is not None and len(text) > longest:
        text = text[: longest - 1] + "…"
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)
