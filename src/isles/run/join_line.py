"""The line that lets a cluster join a run: address of the rendezvous, token, certificate."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass, field
from pathlib import Path

from isles.errors import ConfigError

SECRET_BYTES = 32
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What a run and a cluster may be called."""

_LINE = re.compile(
    r"isles://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})"
    r"/(?P<run>[^/#?]+)#(?P<token>[A-Za-z0-9_-]{43})\.(?P<fingerprint>[A-Za-z0-9_-]{43})"
)
_FIX = "paste the whole line that the rendezvous has written (isles://HOST:PORT/RUN#…)"


@dataclass(frozen=True, slots=True)
class JoinLine:
    """What a cluster needs to know of a rendezvous. Printed, it shows no secret."""

    host: str
    port: int
    run: str
    token: str = field(repr=False)
    fingerprint: bytes
    """sha256 of the certificate: no other server can pass for this one."""

    @classmethod
    def parse(cls, text: str, *, where: str = "the join line") -> JoinLine:
        """Read a pasted line.

        Args:
            text: the line; spaces and line breaks around it and within it (a mail has broken it)
                are dropped.
            where: names the file or key that holds it, for the error.

        Raises:
            ConfigError: it is none. The text stands in no error: it may hold half a token.
        """
        match = _LINE.fullmatch("".join(text.split()))
        if match is None:
            raise ConfigError("this is not a join line", where=where, fix=_FIX, id="join.line")
        port = int(match["port"])
        if not 0 < port < 2**16 or not NAME.fullmatch(match["run"]):
            raise ConfigError(
                "the join line names no such port or run", where=where, fix=_FIX, id="join.line"
            )
        try:
            fingerprint = _decode(match["fingerprint"])
            _decode(match["token"])
        except (binascii.Error, ValueError):
            raise ConfigError(
                "the join line is cut or mistyped", where=where, fix=_FIX, id="join.line"
            ) from None
        return cls(match["host"].strip("[]"), port, match["run"], match["token"], fingerprint)

    @classmethod
    def read(cls, path: Path) -> JoinLine:
        """The line that a file holds.

        Raises:
            ConfigError: the file cannot be read, or holds no join line.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"the join line cannot be read: {error}", where=str(path), fix=_FIX, id="join.line"
            ) from error
        return cls.parse(text, where=str(path))

    @property
    def address(self) -> str:
        """HOST:PORT."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """Where the server answers."""
        return f"https://{self.address}"

    def secret_text(self) -> str:
        """The whole line, token and all: for a file with mode 0600, never for a log."""
        return f"isles://{self.address}/{self.run}#{self.token}.{encode(self.fingerprint)}"

    def __str__(self) -> str:
        return f"isles://{self.address}/{self.run}"


def encode(secret: bytes) -> str:
    """Bytes as letters that survive a mail and a shell."""
    return base64.urlsafe_b64encode(secret).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    secret = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    if len(secret) != SECRET_BYTES or encode(secret) != text:
        raise ValueError("not 32 bytes")
    return secret
