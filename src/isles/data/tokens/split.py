"""Which documents are trained on and which are held out."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from isles.data.rng import Int64Array, draw, key_from
from isles.data.tokens.store import TokenStore

log = logging.getLogger(__name__)


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
