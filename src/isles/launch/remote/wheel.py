"""isles as it is installed here, as a wheel for the hosts: without a network or a build."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import zipfile

from isles import __version__
from isles.launch.ssh.facts import code_files

_WHEEL = "Wheel-Version: 1.0\nGenerator: isles\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_THEN = (2020, 1, 1, 0, 0, 0)


def wheel_name() -> str:
    """The file's name, which pip reads."""
    return f"isles-{__version__}-py3-none-any.whl"


def wheel_bytes() -> bytes:
    """The wheel's content: the same bytes for the same code."""
    distribution = importlib.metadata.distribution("isles")
    info = f"isles-{__version__}.dist-info"
    scripts = [e for e in distribution.entry_points if e.group == "console_scripts"]
    entries = "".join(f"{entry.name} = {entry.value}\n" for entry in scripts)
    files = [(f"isles/{name}", content) for name, content in code_files()]
    files += [
        (f"{info}/METADATA", (distribution.read_text("METADATA") or "").encode()),
        (f"{info}/WHEEL", _WHEEL.encode()),
        (f"{info}/entry_points.txt", f"[console_scripts]\n{entries}".encode()),
    ]
    rows = "".join(f"{name},{_digest(content)},{len(content)}\n" for name, content in files)
    files.append((f"{info}/RECORD", f"{rows}{info}/RECORD,,\n".encode()))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files:
            archive.writestr(zipfile.ZipInfo(name, _THEN), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _digest(content: bytes) -> str:
    value = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
    return f"sha256={value.decode()}"
