"""A rule between keys that a run file breaks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule between keys that a run file breaks.

    Args:
        keys: the dotted keys that it is about; where it is reported: the first that was given.
        what: what is wrong, with the values.
        fix: what to do about it.
    """

    keys: tuple[str, ...]
    what: str
    fix: str
