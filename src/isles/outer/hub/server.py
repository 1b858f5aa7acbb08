"""The hub as an HTTPS server: its secrets, its address, its join line."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import re
import resource
import secrets
import socket
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from isles.errors import CommunicationError, ConfigError, MissingDependencyError
from isles.outer.hub.acceptor import Acceptor
from isles.outer.hub.routes import make_app
from isles.outer.hub.rules import Settings
from isles.outer.hub.work import HubWork
from isles.run.entry import make_own_folder, open_own_file
from isles.run.join_line import SECRET_BYTES, JoinLine, encode
from isles.run.limits import raise_open_files
from isles.run.records import write_secret

log = logging.getLogger(__name__)

_LINGER_S, _SHUTDOWN_S = 5.0, 2.0
_BACKLOG = 1024
_VALID_DAYS = 3650
_OPENSSL_S = 60.0


class Server:
    """One hub. It locks its state directory against other hubs while this process lives.

    Args:
        folder: state directory; an existing state is continued.
        settings: settings of the run.
        threads: see `HubWork`.

    Raises:
        ConfigError: another hub uses the state directory, or it cannot be locked.
    """

    def __init__(self, folder: Path, settings: Settings, *, threads: int = 1) -> None:
        self._lock = lock_folder(folder)
        self._limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.folder = folder
        make_identity(folder)
        self.work = HubWork(folder, settings, threads=threads)

    async def start(self, host: str, port: int, run: str, announce: str = "") -> JoinLine:
        """Listen, and begin to close outer steps.

        Args:
            host: the address to listen on.
            port: the port; 0: the last port, or any free port.
            run: the run's name.
            announce: HOST or HOST:PORT for the clusters, if it differs (NAT, a name).

        Returns:
            The join line, which is also in the file `join`.

        Raises:
            CommunicationError: the address is not this machine's, or the port is in use.
        """
        self.work.run = run
        raise_open_files()  # each connection needs a file handle
        token = (self.folder / "token").read_text().strip()
        # Invalid data of unknown senders is not logged; failures of the hub are logged in
        # routes.py.
        quiet = logging.getLogger("isles.hub.http")
        quiet.disabled = True
        self._runner = web.AppRunner(
            make_app(self.work, token, self._knows),
            access_log=None,
            logger=quiet,
            lingering_time=_LINGER_S,
            auto_decompress=False,  # a megabyte from a stranger may decompress to a gigabyte
            keepalive_timeout=75.0,
            shutdown_timeout=_SHUTDOWN_S,
        )
        await self._runner.setup()
        port_file = self.folder / "port"
        if port == 0 and port_file.exists():
            port = int(port_file.read_text())
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except (OSError, UnicodeError) as error:
            raise CommunicationError(
                f"the hub cannot listen on {host}:{port}: {error}",
                where="--listen",
                fix="use an address of this machine and a free port",
                id="hub.address",
            ) from error
        # TLS 1.3 only: both ends are isles.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_cert_chain(self.folder / "certificate.pem", self.folder / "key.pem")
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"cannot use the hub's certificate: {error}",
                where=str(self.folder / "certificate.pem"),
                fix="restore certificate.pem and key.pem from a copy; or move both away, and pass "
                "the new join line to every cluster",
            ) from error
        assert self._runner.server is not None
        clusters = self.work.core.settings.max_clusters
        self._acceptor = Acceptor(listening, context, self._runner.server, clusters)
        port = listening.getsockname()[1]
        write_secret(port_file, str(port))
        line = JoinLine(*_dialed(announce, host, port), run, token, fingerprint(self.folder))
        write_secret(self.folder / "join", line.secret_text())
        self.work.begin()
        log.info("listening at=%s run=%s state=%s", line.address, run, self.folder)
        return line

    def _knows(self, transport: asyncio.BaseTransport | None, member_id: str) -> None:
        self._acceptor.knows(transport, member_id)

    async def stop(self) -> None:
        """Refuse new requests, stop all work, and release the state directory."""
        await self._acceptor.close()
        await self._runner.cleanup()
        await self.work.stop()
        self.release()

    def release(self) -> None:
        """Release the state directory. For a hub that could not start; `stop` calls it too."""
        os.close(self._lock)
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limit)


def _dialed(announce: str, host: str, port: int) -> tuple[str, int]:
    if found := re.fullmatch(r"(\[[^\]]+\]|[^:]+):(\d+)", announce):
        return found[1].strip("[]"), int(found[2])
    return announce.strip("[]") or host, port


# The hub's own secrets, created once, stored with mode 0600.


def lock_folder(folder: Path) -> int:
    """Lock a state directory against other hubs, while this process lives.

    Returns:
        A file descriptor that holds the lock.

    Raises:
        ConfigError: another hub holds the lock, or the disk has no file locks.
        UserError: the state directory belongs to another user.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    make_own_folder(folder, 0o700)
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(
            "another hub uses this state directory",
            where=str(folder),
            fix="stop that hub, or use another folder for this one",
        ) from None
    except OSError as error:
        os.close(handle)
        raise ConfigError(
            f"cannot lock this state directory against other hubs: {error.strerror}",
            where=str(folder),
            fix="put it on a local disk; some network file systems have no file locks",
        ) from error
    return handle


def fingerprint(folder: Path) -> bytes:
    """sha256 of the certificate in a state directory."""
    der = ssl.PEM_cert_to_DER_cert((folder / "certificate.pem").read_text())
    return hashlib.sha256(der).digest()


def make_identity(folder: Path) -> None:
    """Create the token and certificate of a state directory if they are missing.

    UserError: one of them belongs to another user, or is a link. That user would know the secret.
    """
    token, certificate, key = folder / "token", folder / "certificate.pem", folder / "key.pem"
    for path in (token, certificate, key):
        with suppress(FileNotFoundError):
            open_own_file(path).close()
    if not token.exists():
        write_secret(token, encode(secrets.token_bytes(SECRET_BYTES)))
    if certificate.exists() and key.exists():
        return
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-sha256", "-days", str(_VALID_DAYS), "-subj", "/CN=isles hub"]
    command += [
        "-keyout",
        "-",
        "-out",
        "-",
    ]  # both to a pipe, so that no other file contains a secret
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_OPENSSL_S
        )
    except FileNotFoundError as error:
        raise MissingDependencyError(
            "the hub needs openssl for its certificate, but it is not installed",
            where=str(folder),
            fix="install openssl (`apt install openssl`, `dnf install openssl`)",
        ) from error
    own, mark, rest = done.stdout.partition("-----BEGIN CERTIFICATE-----")
    if done.returncode or not mark:
        raise ConfigError(
            f"openssl could not create a certificate: {done.stderr[-300:]}",
            where=str(folder),
            fix="check that `openssl version` works",
        )
    write_secret(key, own)
    write_secret(certificate, mark + rest)
