"""How the clusters of one run know one another: all follows from a secret that they share."""

from __future__ import annotations

import datetime
import hashlib
import hmac
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from isles.errors import ConfigError
from isles.run.join_line import JoinLine, encode
from isles.run.records import write_secret

_LEAST_SECRET = 16


class Keys:
    """What every cluster of a run makes for itself, the same as all others.

    Args:
        run: name of the run.
        secret: that the clusters share; empty: whoever reaches a cluster may take part.
    """

    def __init__(self, run: str, secret: bytes) -> None:
        self._run = run
        self._key = hashlib.sha256(b"isles hivemind\0" + run.encode() + b"\0" + secret).digest()

    @classmethod
    def read(cls, run: str, secret_file: Path | None) -> Keys:
        """With the secret that stands in a file.

        Raises:
            ConfigError: it cannot be read, or is no secret.
        """
        if secret_file is None:
            return cls(run, b"")
        where = f"outer.hivemind.secret_file {secret_file}"
        fix = "put the same long random line there on every cluster (`openssl rand -hex 32`)"
        try:
            secret = secret_file.expanduser().read_bytes().strip()
        except OSError as error:
            what = f"the secret cannot be read: {error.strerror}"
            raise ConfigError(what, where=where, fix=fix) from None
        if len(secret) < _LEAST_SECRET:
            what = f"the secret has {len(secret)} bytes, less than {_LEAST_SECRET}"
            raise ConfigError(what, where=where, fix=fix)
        return cls(run, secret)

    def _derive(self, purpose: str) -> bytes:
        return hmac.digest(self._key, purpose.encode(), "sha256")

    @property
    def topic(self) -> str:
        """Under which the clusters find one another in the DHT; says nothing of the secret."""
        return f"isles-{self._derive('topic').hex()[:32]}"

    def proof(self, speaker: str, listener: str) -> str:
        """That a peer knows the secret; worth nothing to any other peer, nor towards one."""
        return self._derive(f"proof {speaker} {listener}").hex()

    def is_proof(self, given: object, speaker: str, listener: str) -> bool:
        """Whether that is what this peer would say to that one."""
        return isinstance(given, str) and hmac.compare_digest(
            given.encode(), self.proof(speaker, listener).encode()
        )

    def write_identity(self, folder: Path) -> None:
        """Token and certificate of a rendezvous: whoever hosts it shows the same ones."""
        folder.mkdir(mode=0o700, exist_ok=True)
        key, certificate = self._certificate()
        write_secret(folder / "token", encode(self._derive("token")))
        write_secret(
            folder / "key.pem",
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ).decode(),
        )
        pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
        write_secret(folder / "certificate.pem", pem)

    def line(self, port: int) -> JoinLine:
        """The join line of this machine's own door."""
        _, certificate = self._certificate()
        shown = hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest()
        return JoinLine("127.0.0.1", port, self._run, encode(self._derive("token")), shown)

    def _certificate(self) -> tuple[Ed25519PrivateKey, x509.Certificate]:
        # Ed25519 signs the same bytes in the same way, so that the certificate is the same, too.
        key = Ed25519PrivateKey.from_private_bytes(self._derive("certificate"))
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "isles rendezvous")])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(1)
            .not_valid_before(datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC))
            .not_valid_after(datetime.datetime(2124, 1, 1, tzinfo=datetime.UTC))
            .sign(key, None)
        )
        return key, certificate
