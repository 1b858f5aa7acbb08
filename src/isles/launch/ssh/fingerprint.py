"""What must be equal on all hosts of a run: Python, isles' own code, and the packages it uses."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Iterable
from pathlib import Path

import isles
from isles import __version__

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "datasets",
    "peft",
    "numpy",
    "deepspeed",
    "bitsandbytes",
)
"""Compared where a host has them."""


def fingerprint() -> dict[str, str]:
    """Versions by name; `code` is a short digest of isles' own files."""
    found = {"python": platform.python_version(), "isles": __version__, "code": code_digest()}
    for name in PACKAGES:
        if (found_version := version(name)) is not None:
            found[name] = found_version
    return found


def version(package: str) -> str | None:
    """Of an installed package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def code_files() -> list[tuple[str, bytes]]:
    """Every file of the package, by its path inside it."""
    root = Path(isles.__file__).parent
    paths = []
    for folder, inner, names in os.walk(root):
        # Not entered at all: another process may write or remove it at this moment.
        inner[:] = [name for name in inner if name != "__pycache__"]
        paths += [Path(folder, name) for name in names]
    # A copy of this folder alone holds a link to a page that is not there.
    there = (path for path in sorted(paths) if path.is_file())
    return [(path.relative_to(root).as_posix(), path.read_bytes()) for path in there]


def code_digest() -> str:
    """Equal on two hosts where the code is, whatever the version says."""
    return digest_of(code_files())


def digest_of(files: Iterable[tuple[str, bytes]]) -> str:
    """A short digest of files and their names."""
    digest = hashlib.sha256()
    for name, content in files:
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:12]
