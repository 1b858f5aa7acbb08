"""Prepared tokens on disk: opened, verified, and split into training and validation part."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from isles.data.rng import Int64Array, draw, key_from
from isles.errors import DataError
from isles.run.records import read_record

log = logging.getLogger(__name__)

FORMAT = 2
"""Of the files, and of how rows become tokens; another number is another key."""

TOKENS = "tokens.bin"
DOCUMENTS = "docs.npy"
TRAINED = "trained.bin"
MANIFEST = "manifest.json"

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


@dataclass(frozen=True, slots=True)
class Ranges:
    """Pieces of a store's tokens, in order and apart; a piece is a document or part of one.

    Args:
        starts: place of the first token of each.
        ends: place after the last token of each.
    """

    starts: Int64Array
    ends: Int64Array

    @property
    def num_tokens(self) -> int:
        """Tokens in all of them."""
        return int((self.ends - self.starts).sum())

    def joined(self) -> Ranges:
        """The same tokens, where neighbours have become one piece."""
        gap = self.starts[1:] != self.ends[:-1]
        return Ranges(
            starts=self.starts[np.concatenate([[True], gap])[: len(self.starts)]],
            ends=self.ends[np.concatenate([gap, [True]])[: len(self.ends)]],
        )


def split_store(store: TokenStore, fraction: float, seed: int) -> tuple[Ranges, Ranges | None]:
    """Training and validation part of a store; every token is in exactly one of them.

    `fraction` of the documents, at least one and never all, are held out: which ones depends on
    the seed and the number of documents alone. Of a single text it is the tail. Pairs of
    preferences stay together.

    Returns:
        The validation part is None where the fraction is 0, or where there is too little: a single
        token, a single pair, a single document that is not text.
    """
    ends = np.asarray(store.document_ends)
    starts = np.concatenate([[0], ends[:-1]])
    each = 2 if store.kind == "preference" else 1
    num_units, num_tokens = len(ends) // each, int(ends[-1])
    if fraction == 0 or num_tokens == 1 or (num_units == 1 and store.kind != "text"):
        return Ranges(starts, ends), None
    if num_units == 1:
        # Two: a single token has nothing to predict.
        cut = num_tokens - _held_out(fraction, num_tokens, at_least=2)
        log.info(
            "source=%s has one document: its last %d of %d tokens are the validation part",
            store.name,
            num_tokens - cut,
            num_tokens,
        )
        return Ranges(starts, np.array([cut])), Ranges(np.array([cut]), ends)
    number = _held_out(fraction, num_units)
    lots = draw(key_from(seed, 3), np.arange(num_units))
    chosen = np.zeros(num_units, dtype=np.bool_)
    chosen[np.argpartition(lots, number)[:number]] = True
    held_out = np.repeat(chosen, each)
    return Ranges(starts[~held_out], ends[~held_out]), Ranges(starts[held_out], ends[held_out])


def _held_out(fraction: float, count: int, at_least: int = 1) -> int:
    return min(max(round(fraction * count), at_least), count - 1)
