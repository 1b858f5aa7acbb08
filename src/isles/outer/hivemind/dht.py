"""Other clusters over libp2p: a common secret, the DHT that finds them, streams, and a tunnel."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import hmac
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, PeerID
from hivemind.utils.timed_storage import get_dht_time

from isles.errors import CommunicationError, ConfigError
from isles.outer.hivemind import HivemindSettings
from isles.run.join_line import JoinLine, encode
from isles.run.records import write_secret

log = logging.getLogger(__name__)


_LEAST_SECRET = 16


class Keys:
    """Keys derived from the secret that all clusters share; an empty secret admits any cluster."""

    def __init__(self, run: str, secret: bytes) -> None:
        self._run = run
        self._key = hashlib.sha256(b"isles hivemind\0" + run.encode() + b"\0" + secret).digest()
        self._hub_key = Ed25519PrivateKey.from_private_bytes(self._derive("certificate"))

    @classmethod
    def read(cls, run: str, secret_file: Path | None) -> Keys:
        """Read the secret from a file."""
        if secret_file is None:
            return cls(run, b"")
        where = f"outer.hivemind.secret_file {secret_file}"
        fix = "write the same long random line to it on every cluster (`openssl rand -hex 32`)"
        try:
            secret = secret_file.expanduser().read_bytes().strip()
        except OSError as error:
            what = f"cannot read the secret: {error.strerror}"
            raise ConfigError(what, where=where, fix=fix) from None
        if len(secret) < _LEAST_SECRET:
            what = f"the secret has {len(secret)} bytes; it needs at least {_LEAST_SECRET}"
            raise ConfigError(what, where=where, fix=fix)
        return cls(run, secret)

    def _derive(self, purpose: str) -> bytes:
        return hmac.digest(self._key, purpose.encode(), "sha256")

    @property
    def topic(self) -> str:
        """Key under which the clusters find each other in the DHT; reveals nothing about the
        secret."""
        return f"isles-{self._derive('topic').hex()[:32]}"

    def proof(self, speaker: str, listener: str) -> str:
        """Proof that a peer knows the secret; valid only from this speaker to this listener."""
        return self._derive(f"proof {speaker} {listener}").hex()

    def is_proof(self, given: object, speaker: str, listener: str) -> bool:
        return isinstance(given, str) and hmac.compare_digest(
            given.encode(), self.proof(speaker, listener).encode()
        )

    def write_identity(self, folder: Path) -> None:
        """Write token and certificate of a hub: every host of the hub uses the same ones."""
        folder.mkdir(mode=0o700, exist_ok=True)
        write_secret(folder / "token", encode(self._derive("token")))
        pem, encryption = serialization.Encoding.PEM, serialization.NoEncryption()
        key = self._hub_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, encryption)
        write_secret(folder / "key.pem", key.decode())
        write_secret(folder / "certificate.pem", self._certificate().public_bytes(pem).decode())

    def line(self, port: int) -> JoinLine:
        """The join line of this machine's own tunnel."""
        certificate = self._certificate().public_bytes(serialization.Encoding.DER)
        shown = hashlib.sha256(certificate).digest()
        return JoinLine("127.0.0.1", port, self._run, encode(self._derive("token")), shown)

    def _certificate(self) -> x509.Certificate:
        # Ed25519 signs the same bytes in the same way, so that the certificate is the same, too.
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "isles hub")])
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self._hub_key.public_key())
            .serial_number(1)
            .not_valid_before(datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC))
            .not_valid_after(datetime.datetime(2124, 1, 1, tzinfo=datetime.UTC))
            .sign(self._hub_key, None)
        )


Body = dict[str, Any]
Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter
Handler = Callable[[str, Body, Reader, Writer], Awaitable[None]]
Streams = tuple[Reader, Writer]

_SLICE = 1 << 16
_PROTOCOL = "isles/outer/1"
_HEAD_S = 10.0
_RECORD_S = 600.0
"""Seconds that a record in the DHT is valid: clocks may differ by that much."""
_START_S = 60.0
_SOCKET_PATH = 60


class PeerError(OSError):
    """A peer does not answer, or answers incorrectly."""


class Peers:
    """This cluster as a peer in the network.

    Args:
        folder: for the identity and the sockets.
        known: addresses of peers that were met before.
        handlers: handlers of streams by their kind, called with the peer, its message, and the
            stream.
    """

    def __init__(
        self,
        settings: HivemindSettings,
        keys: Keys,
        folder: Path,
        known: Sequence[str],
        handlers: Mapping[str, Handler],
    ) -> None:
        self._settings, self._keys, self._folder, self._known = settings, keys, folder, known
        self._handlers = handlers
        self.id = ""
        """This peer's id for other peers."""
        self.addresses: list[str] = []
        """Addresses for `initial_peers` of others."""

    async def start(self) -> None:
        """Start the daemon, and enter the DHT; CommunicationError if no initial peer answers."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        key = Path(self._settings.identity_path or self._folder / "identity.key").expanduser()
        if not key.exists():
            P2P.generate_identity(str(key))
        own = str(PeerID.from_identity(key.read_bytes()))
        known = [*self._settings.initial_peers, *self._known]
        initial = [address for address in dict.fromkeys(known) if not address.endswith(f"/{own}")]
        try:
            await asyncio.wait_for(self._start(key, initial), _START_S)
        # hivemind raises many kinds of errors, some of them bare.
        except Exception as error:
            await self.close()
            raise _explained(error, initial) from error
        await self._p2p.add_binary_stream_handler(_PROTOCOL, self._answer)

    async def _start(self, key: Path, initial: Sequence[str]) -> None:
        settings, is_open = self._settings, self._settings.relay
        sockets = self._folder / "sockets"
        if len(str(sockets)) > _SOCKET_PATH:  # the system accepts no longer names
            mark = hashlib.sha256(str(self._folder.absolute()).encode()).hexdigest()[:16]
            sockets = Path(tempfile.gettempdir()) / f"isles-{os.getuid()}-{mark}"
        shutil.rmtree(sockets, ignore_errors=True)
        sockets.mkdir(mode=0o700)  # fails if it belongs to another user
        own: Any = type("P2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{sockets}/"})
        self._sockets = sockets
        self._p2p: P2P = await own.create(
            initial_peers=initial,
            host_maddrs=settings.host_maddrs,
            announce_maddrs=settings.announce_maddrs or None,
            identity_path=str(key),
            check_if_identity_free=False,
            use_relay=is_open,
            use_auto_relay=is_open,
            nat_port_map=settings.nat,
            auto_nat=settings.nat or is_open,
            startup_timeout=_START_S,
        )
        self._dht = await DHTNode.create(p2p=self._p2p, initial_peers=list(initial))
        self.id = str(self._p2p.peer_id)
        self.addresses = [str(address) for address in await self._p2p.get_visible_maddrs()]

    async def close(self) -> None:
        with suppress(AttributeError):  # not started, or only half
            await self._p2p.shutdown()
        with suppress(AttributeError):
            shutil.rmtree(self._sockets, ignore_errors=True)

    async def find(self) -> dict[str, list[str]]:
        """Addresses of the run's clusters in the DHT; also announces this cluster."""
        topic, now = self._keys.topic, get_dht_time()
        await self._dht.store(topic, self.addresses, now + _RECORD_S, subkey=self.id)
        found = await self._dht.get(topic, latest=True)
        if found is None or not isinstance(found.value, dict):
            return {}
        return {
            str(peer): [str(address) for address in entry.value]
            for peer, entry in found.value.items()
            if peer != self.id and isinstance(entry.value, list | tuple)
        }

    async def open(self, peer: str, kind: str, body: Body) -> tuple[Body, Reader, Writer]:
        """Open a stream to a peer, and read its first message; PeerError if it refuses."""
        try:
            _, reader, writer = await self._p2p.call_binary_stream_handler(
                PeerID.from_base58(peer), _PROTOCOL
            )
        except Exception as error:  # as above
            raise PeerError(f"cannot reach {peer[-8:]}: {error}") from error
        try:
            head = {**body, "kind": kind, "proof": self._keys.proof(self.id, peer)}
            await _send(writer, head)
            answer = await _receive(reader)
            if not self._keys.is_proof(answer.get("proof"), peer, self.id):
                why = answer.get("refused", "it does not know the secret of this run")
                raise PeerError(f"{peer[-8:]}: {why}")
            return answer, reader, writer
        except BaseException:
            writer.close()
            raise

    async def ask(self, peer: str, kind: str, body: Body, timeout_s: float) -> Body:
        """Request one answer; PeerError if it does not come in time."""
        try:
            async with asyncio.timeout(timeout_s):
                answer, _, writer = await self.open(peer, kind, body)
                writer.close()
                return answer
        except (OSError, TimeoutError, ValueError) as error:
            raise PeerError(str(error) or f"{peer[-8:]} is silent") from error

    async def accept(self, writer: Writer, peer: str, body: Body | None = None) -> None:
        """Accept a stream of a peer, with an additional message."""
        await _send(writer, {**(body or {}), "proof": self._keys.proof(self.id, peer)})

    async def _answer(self, info: Any, reader: Reader, writer: Writer) -> None:
        peer = str(info.peer_id)
        try:
            async with asyncio.timeout(_HEAD_S):
                head = await _receive(reader)
            handler = self._handlers.get(str(head.get("kind")))
            if not self._keys.is_proof(head.get("proof"), peer, self.id):
                log.warning("refused: %s does not know the secret of this run", peer)
                await _send(writer, {"refused": "the secret or the run differs"})
            elif handler is not None:
                await handler(peer, head, reader, writer)
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.debug("a stream from %s has ended: %s", peer, error)
        finally:
            writer.close()


def _explained(error: Exception, initial: Sequence[str]) -> CommunicationError:
    why = f"{type(error).__name__}: {error}"
    if initial and ("bootstrap" in why or isinstance(error, TimeoutError)):
        return CommunicationError(
            f"no initial peer answers: {', '.join(initial)} ({why})",
            where="outer.hivemind.initial_peers",
            fix="check that `hivemind-dht`, or the named cluster, is running, and that this "
            "machine "
            "can reach the address",
            id="hivemind.peers",
        )
    return CommunicationError(
        f"the peer-to-peer daemon could not start ({why})",
        where="outer.hivemind",
        fix="check that the port of host_maddrs is free and its address belongs to this machine, "
        "and that announce_maddrs has an address with a port",
        id="hivemind.peers",
    )


async def _send(writer: Writer, body: Body) -> None:
    writer.write(json.dumps(body).encode() + b"\n")
    await writer.drain()


async def _receive(reader: Reader) -> Body:
    body = json.loads(await reader.readline())  # ValueError if it is too long, or empty
    if not isinstance(body, dict):
        raise ValueError("a header that is not a mapping")
    return body


class Tunnel:
    """Listens only on the loopback interface, and forwards connections to the target of
    `connect`."""

    def __init__(self, connect: Callable[[], Awaitable[Streams | None]]) -> None:
        self._connect = connect
        self._ways: set[asyncio.Task[None]] = set()

    async def open(self) -> int:
        self._server = await asyncio.start_server(self._come_in, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _come_in(self, reader: Reader, writer: Writer) -> None:
        try:
            far = await self._connect()
            if far is not None:
                await self.join(reader, writer, *far)
        except (OSError, TimeoutError, ValueError) as error:
            log.debug("cannot reach the hub: %s", error)
        finally:
            writer.close()

    async def join(
        self, reader: Reader, writer: Writer, far_reader: Reader, far_writer: Writer
    ) -> None:
        """Forward data in both directions, until one end closes."""
        ways = {
            asyncio.create_task(_pump(reader, far_writer)),
            asyncio.create_task(_pump(far_reader, writer)),
        }
        self._ways |= ways
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            self._ways -= ways
            far_writer.close()

    def cut(self) -> None:
        for way in self._ways:
            way.cancel()


async def _pump(reader: Reader, writer: Writer) -> None:
    with suppress(OSError):
        while data := await reader.read(_SLICE):
            writer.write(data)
            await writer.drain()
