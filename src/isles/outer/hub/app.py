"""The rendezvous put together: the server and all requests that it answers."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from isles.outer.hub.averaging import Averager
from isles.outer.hub.epoch_requests import add_epoch_routes
from isles.outer.hub.file_requests import add_file_routes
from isles.outer.hub.requests import add_routes
from isles.outer.hub.server import Server
from isles.outer.hub.settings import Settings


def make_server(folder: Path, settings: Settings) -> Server:
    """One rendezvous, that does not listen yet.

    Args:
        folder: its state directory; what lies there is gone on with.
        settings: the rules of the run.
    """
    return Server(folder, settings, load_averager, _add_all)


def _add_all(app: web.Application, server: Server) -> None:
    for add in (add_routes, add_file_routes, add_epoch_routes):
        add(app, server)


def load_averager() -> Averager:
    """The codecs of isles; imports torch."""
    from isles.outer import average as codecs

    return codecs
