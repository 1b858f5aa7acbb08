"""What one rank computes in one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
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

    reference_B: Tensor | None = None
    """fp32, for preferences: the log-probability of each row's targets before training."""

    position_ids_BT: Tensor | None = None
    """int64; a document that attends to itself alone begins at 0, and so does the padding behind
    the last. None: each row is one document, from 0 on."""

    cu_seqlens_N: Tensor | None = None
    """int32, there where position ids are; where documents begin in the flattened rows, and the
    end of these: as kernels for documents of different lengths want it."""

    def sample(self, index: int) -> Batch:
        """The rows of one sample; its `sample_ids` has at most one."""
        each = len(self.input_ids_BT) // max(1, len(self.sample_ids))
        rows = slice(index * each, (index + 1) * each)
        positions = None if self.position_ids_BT is None else self.position_ids_BT[rows]
        return Batch(
            self.input_ids_BT[rows],
            self.targets_BT[rows],
            self.sample_ids[index : index + 1],
            reference_B=None if self.reference_B is None else self.reference_B[rows],
            position_ids_BT=positions,
            cu_seqlens_N=None if positions is None else cu_seqlens(positions),
        )


def cu_seqlens(position_ids_BT: Tensor) -> Tensor:
    """Where documents begin in the flattened rows, and the end of these; int32.

    On a GPU this waits for it: how many there are is a number that the host must know.
    """
    begins_N = (position_ids_BT.flatten() == 0).nonzero().flatten()
    return F.pad(begins_N, (0, 1), value=position_ids_BT.numel()).to(torch.int32)
