"""The hub as an HTTPS server: address, TLS, join line."""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import socket
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from isles.errors import CommunicationError, ConfigError
from isles.outer.hub.routes import make_app
from isles.outer.hub.rules import Settings
from isles.outer.hub.tls import lock_folder, make_identity
from isles.outer.hub.work import Work
from isles.run.join_line import JoinLine
from isles.run.records import write_secret

log = logging.getLogger(__name__)

_LINGER_S, _SHUTDOWN_S, _HANDSHAKE_S = 5.0, 2.0, 10.0
_FIRST_REQUEST_S = 15.0
"""A connection that has not shown the token by then is cut."""
_BACKLOG, _HANDLES = 128, 65536


class Server:
    """One hub.

    Args:
        folder: state directory; what lies there is gone on with.
        settings: the rules of the run.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._lock = lock_folder(folder)
        self.folder = folder
        self._identity = make_identity(folder)
        self.work = Work(folder, settings)
        self._unknown: set[object] = set()

    async def start(self, host: str, port: int, run: str, announce: str = "") -> JoinLine:
        """Listen, and begin to close outer steps.

        Args:
            host: the address to listen at.
            port: the port; 0: the one of last time, or any.
            run: the run's name.
            announce: HOST or HOST:PORT that clusters shall dial, if it is another (NAT, a name).

        Returns:
            The join line, which also stands in the file `join`.

        Raises:
            CommunicationError: the address is not this machine's, or the port is taken.
        """
        self.work.run = run
        _raise_limit()
        self._runner = web.AppRunner(
            make_app(self.work, self._identity.token, self._unknown.discard),
            access_log=None,
            logger=_quiet_logger(),
            lingering_time=_LINGER_S,
            keepalive_timeout=75.0,
            shutdown_timeout=_SHUTDOWN_S,
        )
        await self._runner.setup()
        file = self.folder / "port"
        if port == 0 and file.exists():
            port = int(file.read_text())
        port = await self._listen(host, port)
        write_secret(file, str(port))
        dialled = _dialled(announce, host, port)
        line = JoinLine(*dialled, run, self._identity.token, self._identity.fingerprint)
        self._keep_line(line)
        self.work.begin()
        log.info("listening at=%s run=%s state=%s", line.address, run, self.folder)
        return line

    async def _listen(self, host: str, port: int) -> int:
        loop, make = asyncio.get_running_loop(), self._runner.server
        assert make is not None

        def cut(protocol: web.RequestHandler) -> None:
            if protocol in self._unknown:
                self._unknown.discard(protocol)
                protocol.force_close()
                protocol.close()

        def connection() -> web.RequestHandler:
            protocol = make()
            self._unknown.add(protocol)
            loop.call_later(_FIRST_REQUEST_S, cut, protocol)
            return protocol

        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except (OSError, UnicodeError) as error:
            raise CommunicationError(
                f"the hub cannot listen at {host}:{port}: {error}",
                where="--listen",
                fix="give an address of this machine and a free port",
                id="hub.address",
            ) from error
        self._server = await loop.create_server(
            connection,
            sock=listening,
            ssl=self._identity.ssl_context(),
            ssl_handshake_timeout=_HANDSHAKE_S,
            ssl_shutdown_timeout=_HANDSHAKE_S,
        )
        return int(listening.getsockname()[1])

    def _keep_line(self, line: JoinLine) -> None:
        path = self.folder / "join"
        with suppress(ConfigError):
            before = JoinLine.read(path)
            if before != line:
                log.warning(
                    "the join line is another than before (address, token or certificate; now at "
                    "%s): clusters come once it lies in their run directories, as the file join",
                    line.address,
                )
        write_secret(path, line.secret_text())

    async def stop(self) -> None:
        """Take no more requests, and close the files."""
        self._server.close()
        await self._runner.cleanup()
        await self.work.stop()


def _dialled(announce: str, host: str, port: int) -> tuple[str, int]:
    if found := re.fullmatch(r"(\[[^\]]+\]|[^:]+):(\d+)", announce):
        return found[1].strip("[]"), int(found[2])
    return announce.strip("[]") or host, port


def _raise_limit() -> None:
    # Each connection and each file that comes needs some file handles.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _HANDLES if hard == resource.RLIM_INFINITY else min(_HANDLES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _quiet_logger() -> logging.Logger:
    # For aiohttp: garbage of unknown senders is no news; our own failures are logged in routes.py.
    logger = logging.getLogger("isles.hub.http")
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
    return logger
