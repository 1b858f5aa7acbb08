"""What became of a source's documents."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """Documents of one part of a source, and the samples that they make.

    Args:
        documents: there were; of preferences, pairs.
        truncated: of them, longer than a sample, and cut at its end.
        too_long: of them, longer than a sample, and left out.
        untrained: of them, left out because nothing in them is trained.
        samples: that they make.
        used: places of all samples at which a token is read.
        places: of all samples at their full length.
    """

    documents: int
    truncated: int
    too_long: int
    untrained: int
    samples: int
    used: int
    places: int

    @property
    def dropped(self) -> int:
        """Documents that are in no sample."""
        return self.too_long + self.untrained

    @property
    def padding_share(self) -> float:
        """Share of all places that hold padding, where samples have their full length."""
        return 1 - self.used / self.places if self.places else 0.0
