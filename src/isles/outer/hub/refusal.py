"""Why the rendezvous does not do what it is asked."""

from __future__ import annotations


class Refusal(Exception):
    """A request that is refused: with an HTTP status, a kind for programs, and words for people.

    Args:
        status: 404, 409, 413, 422, 507 …
        kind: one word that the client acts on.
        what: what is wrong, with the value.
        fix: what to do about it.
    """

    def __init__(self, status: int, kind: str, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.status = status
        self.kind = kind
        self.what = what
        self.fix = fix
