"""Prepared tokens on disk: what a folder of them holds, opened and verified."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from isles.data.rng import Int64Array
from isles.errors import DataError
from isles.run.records import read_record

FORMAT = 2
"""Of the files, and of how rows become tokens; another number is another key."""

TOKENS = "tokens.bin"
DOCUMENTS = "docs.npy"
TRAINED = "trained.bin"
MANIFEST = "manifest.json"

_READ_BYTES = 2**24

TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


def find_fault(folder: Path) -> str | None:
    """Why this folder is not whole, or None: the manifest is there and the sizes are right."""
    manifest = read_record(folder / MANIFEST)
    if manifest is None:
        return f"{MANIFEST} is missing or damaged"
    if manifest.get("format") != FORMAT:
        return f"{MANIFEST} has format {manifest.get('format')}, not {FORMAT}"
    for name, facts in manifest["files"].items():
        expected = facts["size_bytes"]
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if size != expected:
            return f"{name} has {size} bytes instead of {expected}"
    return None


@dataclass(frozen=True, slots=True)
class TokenStore:
    """The tokens of one source, memory-mapped. Documents of text end with the end-of-text id.

    Args:
        folder: where it lies.
        name: the source, for messages.
        tokens: all tokens, document after document; uint16 or uint32.
        document_ends: for each document, the place after its last token.
        end_of_text_id: the id that ends a text.
        max_token_id: the largest id there is.
        trained: for each token whether it is a target, predicted from those before it; None: all
            are.
        kind: what the documents are: text, chat, instruct, tokens, or preference, where they come
            in pairs, the chosen one first.
    """

    folder: Path
    name: str
    tokens: TokenArray
    document_ends: Int64Array
    end_of_text_id: int
    max_token_id: int
    trained: npt.NDArray[np.bool_ | np.uint8] | None = None
    kind: str = "text"

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        """A folder that `prepare` returned.

        Raises:
            DataError: it is not whole.
        """
        fault = find_fault(folder)
        if fault is not None:
            raise DataError(
                f"the prepared tokens are not whole: {fault}",
                where=str(folder),
                fix="start again: they are prepared anew",
                id="data.damaged",
            )
        manifest = cast("dict[str, Any]", read_record(folder / MANIFEST))
        tokens = np.memmap(folder / TOKENS, dtype=manifest["dtype"], mode="r")
        ends = np.load(folder / DOCUMENTS, mmap_mode="r", allow_pickle=False)
        trained = None
        if TRAINED in manifest["files"]:
            trained = np.memmap(folder / TRAINED, dtype=np.bool_, mode="r").view(np.ndarray)
        return cls(
            folder=folder,
            name=manifest["name"],
            tokens=tokens.view(np.ndarray),  # a plain view: slicing a memmap object is slow
            document_ends=ends.view(np.ndarray),
            end_of_text_id=manifest["end_of_text_id"],
            max_token_id=manifest["max_token_id"],
            trained=trained,
            kind=manifest["kind"],
        )

    @property
    def digest(self) -> str:
        """SHA-256 of all that samples are made of, as it was noted when it was written."""
        files = self.manifest["files"]
        if self.kind == "text":
            return str(files[TOKENS]["sha256"])
        parts = [str(files[name]["sha256"]) for name in sorted(files)]
        return hashlib.sha256(" ".join([self.kind, *parts]).encode()).hexdigest()

    @property
    def manifest(self) -> dict[str, Any]:
        """What was noted when it was written: `rows`, `empty`, `bad` and `first_bad` among it."""
        return cast("dict[str, Any]", read_record(self.folder / MANIFEST))

    def verify(self, progress: Callable[[str], None] = lambda line: None) -> None:
        """Read every byte and compare with the hashes that were taken when it was written.

        Args:
            progress: told how far it is.

        Raises:
            DataError: a file has changed.
        """
        files = self.manifest["files"]
        total, done = sum(facts["size_bytes"] for facts in files.values()), 0
        for name, facts in files.items():
            digest = hashlib.sha256()
            with (self.folder / name).open("rb") as stream:
                while piece := stream.read(_READ_BYTES):
                    digest.update(piece)
                    done += len(piece)
                    progress(f"{done / 1e6:.0f} of {total / 1e6:.0f} MB")
            if digest.hexdigest() != facts["sha256"]:
                raise DataError(
                    f"{name} has changed since it was prepared",
                    where=str(self.folder),
                    fix=f"rm -r {self.folder}: it is prepared anew at the next start",
                    id="data.changed",
                )
