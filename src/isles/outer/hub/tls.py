"""The hub's own secrets: token, key and certificate, made once, kept with mode 0600."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

from isles.errors import ConfigError, MissingDependencyError
from isles.run.join_line import SECRET_BYTES, encode
from isles.run.records import write_secret

_VALID_DAYS = 3650
_OPENSSL_S = 60.0


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """Token and certificate of a hub."""

    token_file: Path
    certificate: Path
    key: Path

    @property
    def token(self) -> str:
        return self.token_file.read_text().strip()

    @property
    def fingerprint(self) -> bytes:
        der = ssl.PEM_cert_to_DER_cert(self.certificate.read_text())
        return hashlib.sha256(der).digest()

    def ssl_context(self) -> ssl.SSLContext:
        """TLS 1.3 with this certificate: both ends are ours."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self.certificate, self.key)
        return context


def make_identity(folder: Path) -> ServerIdentity:
    """The token and certificate of a state directory; made where they are not there (any more)."""
    identity = ServerIdentity(folder / "token", folder / "certificate.pem", folder / "key.pem")
    if not identity.token_file.exists():
        write_secret(identity.token_file, encode(secrets.token_bytes(SECRET_BYTES)))
    if not (identity.certificate.exists() and identity.key.exists()):
        key, certificate = _make_certificate(folder)
        write_secret(identity.key, key)
        write_secret(identity.certificate, certificate)
    return identity


def _make_certificate(folder: Path) -> tuple[str, str]:
    key = folder / "key.new"
    certificate = folder / "certificate.new"
    write_secret(key, "")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-sha256", "-days", str(_VALID_DAYS), "-subj", "/CN=isles hub"]
    try:
        subprocess.run(
            [*command, "-keyout", str(key), "-out", str(certificate)],
            check=True,
            capture_output=True,
            timeout=_OPENSSL_S,
        )
        return key.read_text(), certificate.read_text()
    except FileNotFoundError as error:
        raise MissingDependencyError(
            "the hub makes its certificate with openssl, which is not here",
            where=str(folder),
            fix="install openssl (`apt install openssl`, `dnf install openssl`)",
        ) from error
    except (subprocess.SubprocessError, OSError) as error:
        text = getattr(error, "stderr", b"") or b""
        raise ConfigError(
            f"openssl makes no certificate: {error} {text.decode(errors='replace')[-300:]}",
            where=str(folder),
            fix="run `openssl version`, and see whether that folder can be written",
        ) from error
    finally:
        key.unlink(missing_ok=True)
        certificate.unlink(missing_ok=True)


def lock_folder(folder: Path) -> int:
    """Make sure that no other hub uses a state directory, for as long as this process lives.

    Returns:
        A file handle that holds the lock.

    Raises:
        ConfigError: another does.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        text = os.pread(handle, 32, 0).decode(errors="replace").strip()
        os.close(handle)
        raise ConfigError(
            f"another hub (process {text}) uses this state directory",
            where=str(folder),
            fix="stop that one, or give this one a folder of its own",
        ) from None
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    return handle
