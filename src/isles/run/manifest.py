"""The manifest of a checkpoint. isles checks the whole manifest before it uses a value of it.

A checkpoint may come from a bucket, from a shared disk, or from another person. So read a manifest
only with `Manifest.from_record`, and check each foreign file name with `is_plain`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from isles.config.foreign import is_plain
from isles.errors import TrainingError

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 8 << 20
"""Limit of a manifest. Each of its files takes 150 bytes, and each rank writes one or two."""
MANIFEST_VERSION = 2
"""2: the index of the tensors is JSON. 1: the index of isles 0.1.0, a pickle of torch."""

READ_VERSIONS = (1, 2)

_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_FILES, _MOST_BYTES, _MOST = 100_000, 1 << 56, 1 << 62
_LONGEST_TEXT = 10_000


class ManifestError(ValueError):
    """A record is not a manifest. Its text has the wrong value."""


def number_of(text: str) -> int | None:
    """Read a foreign name as a number, or None if it has a character other than 0-9.

    Not `int`, which also takes signs, underscores and the digits of other scripts.
    """
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None


def step_of(name: str) -> int | None:
    """The step of a checkpoint folder's name, `step-N`, or None for any other name."""
    return number_of(name.removeprefix("step-")) if name.startswith("step-") else None


def is_count(value: object) -> TypeGuard[int]:
    """True if `value` is a whole number from 0 to 2**62, and not True or False."""
    return type(value) is int and 0 <= value < _MOST


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Size in bytes and SHA-256 of one file of a checkpoint."""

    size: int
    sha256: str


class Manifest(Mapping[str, Any]):
    """The values of a valid manifest, by key. `from_record` makes it."""

    __slots__ = ("files", "record")

    def __init__(self, record: dict[str, Any], files: dict[str, FileFacts]) -> None:
        self.record, self.files = record, files

    @classmethod
    def from_record(cls, record: object) -> Manifest:
        """Check each value.

        Raises:
            ManifestError: a value is missing, or has a wrong type.
        """
        if not isinstance(record, dict) or not isinstance(record.get("files"), dict):
            raise ManifestError("it has no readable manifest.json")
        files = record["files"]
        if len(files) > _MOST_FILES:
            raise ManifestError(f"its manifest lists {len(files)} files")
        if not is_count(record.get("step")) or step_of(f"step-{record['step']}") is None:
            raise ManifestError(f"its manifest has step {_shown(record.get('step'))}")
        for key, value in record.items():
            is_open = value is None and key in _MAY_BE_NULL
            if key in _KINDS and not is_open and not _KINDS[key](value):
                raise ManifestError(f"its manifest has {key} {_shown(value)}")
        return cls(record, {name: _facts(name, entry) for name, entry in files.items()})

    @property
    def step(self) -> int:
        return int(self.record["step"])

    @property
    def version(self) -> int:
        return int(self.record.get("version") or MANIFEST_VERSION)

    @property
    def created_at(self) -> float:
        return float(self.record.get("created_at") or 0.0)

    @property
    def size_bytes(self) -> int:
        return sum(facts.size for facts in self.files.values())

    def __getitem__(self, key: str) -> Any:
        """The value of a required key. `get` is for optional keys.

        Raises:
            TrainingError: the key is missing.
        """
        if key not in self.record:
            raise TrainingError(
                f"the manifest of the checkpoint of step {self.step} has no {key!r}",
                where=MANIFEST,
                fix="use another checkpoint of `isles checkpoint list`",
                id="checkpoint.broken",
            )
        return self.record[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self.record.get(key, default)

    def __contains__(self, key: object) -> bool:
        return key in self.record

    def __iter__(self) -> Iterator[str]:
        return iter(self.record)

    def __len__(self) -> int:
        return len(self.record)


def _facts(name: str, entry: object) -> FileFacts:
    if not is_plain(name) or name == MANIFEST:
        raise ManifestError(
            f"its manifest lists the file {_shown(name)}, which is not a plain name"
        )
    size, sha256 = (entry.get("size"), entry.get("sha256")) if isinstance(entry, dict) else (0, "")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ManifestError(f"its manifest has no SHA-256 of {name}")
    if not is_count(size) or size > _MOST_BYTES:
        raise ManifestError(f"its manifest gives {name} the size {_shown(size)}")
    return FileFacts(size, sha256)


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and value is not True and 0 <= value < 1e12


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_TEXT


def _is_section(value: object) -> bool:
    return isinstance(value, dict)


def _is_scores(value: object) -> bool:
    return isinstance(value, list) and all(type(each) is float for each in value)


_KINDS: dict[str, Callable[[object], bool]] = {
    **dict.fromkeys(("samples", "tokens", "target_tokens", "total_steps", "attempt"), is_count),
    **dict.fromkeys(("world_size", "global_batch_size", "micro_batch_size"), is_count),
    "samples_per_epoch": is_count,
    **dict.fromkeys(("created_at", "elapsed_s"), _is_time),
    **dict.fromkeys(("lr_scheduler_type", "strategy", "sharding", "device"), _is_text),
    **dict.fromkeys(("config_digest", "git_commit", "host"), _is_text),
    **dict.fromkeys(("versions", "base", "outer"), _is_section),
    "probe": _is_scores,
}
_MAY_BE_NULL = {"total_steps", "micro_batch_size", "samples_per_epoch", "base", "outer", "device"}
_MAY_BE_NULL |= {"git_commit", "lr_scheduler_type", "probe", "sharding"}


def _shown(value: object) -> str:
    text = (
        ascii(value) if isinstance(value, (str, int, float, type(None))) else type(value).__name__
    )
    return text if len(text) <= 60 else f"{text[:57]}..."
