"""Why a side process ends by itself."""

from __future__ import annotations

from isles.outer.client.http import RendezvousRefusal

WHO_IS_THERE = frozenset({"token", "certificate", "http", "protocol"})
"""Refusals by somebody who may only for a while stand where the rendezvous was."""


class RejoinError(Exception):
    """The rendezvous does not know this cluster any more: rank 0 has it join anew."""


class NotLetInError(Exception):
    """The rendezvous says no, and will go on doing so.

    Args:
        refusal: what it says.
    """

    def __init__(self, refusal: RendezvousRefusal) -> None:
        super().__init__(refusal.what)
        self.refusal = refusal
