"""What one rank computes in one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

IGNORE_INDEX = -100
"""A target that is not trained on, as in torch.nn.functional.cross_entropy."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of one rank. B: rows, T: tokens in a sample.

    Targets are shifted already: `targets_BT[b, t]` is the token that follows `input_ids_BT[b, t]`.
    """

    input_ids_BT: Tensor
    """int64, on the rank's device."""

    targets_BT: Tensor
    """int64; IGNORE_INDEX where nothing is trained."""

    sample_ids: tuple[int, ...]
    """The global sample index of each row; for preferences, of each two rows."""

    places_N: Tensor | None = None
    """int64; where the targets lie in the flattened rows, so that the head computes nothing else.
    None: every place is looked at."""

    position_ids_BT: Tensor | None = None
    """int64; a document that attends to itself alone begins at 0. None: each row is one document,
    from 0 on."""
