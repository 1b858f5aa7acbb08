"""Weights that the files of a model hold under other names than the model, or in pieces.

Files of the Hugging Face Hub have a tensor for each expert of a mixture. transformers has one
tensor for all experts of a layer, and converts the tensors while it loads a whole model. This
module finds the pieces of each rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Read = Callable[[str, tuple[int, ...], tuple[slice, ...]], Tensor]
"""Reads a part of a weight from the files, by name, whole shape and part."""


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One weight of a model as its files hold it.

    Args:
        blocks: names in the files. Experts follow each other in a block. Blocks follow each other
            in the rows of an expert. A weight that only has another name is one block of one name.
        are_stacked: whether each name is one expert.
    """

    blocks: tuple[tuple[str, ...], ...]
    are_stacked: bool

    @property
    def names(self) -> tuple[str, ...]:
        """All names in the files."""
        return tuple(name for block in self.blocks for name in block)

    def read(self, shape: tuple[int, ...], part: tuple[slice, ...], read: Read) -> Tensor | None:
        """A part of the weight; None if these pieces do not make a weight of this shape."""
        if not self.are_stacked:
            return read(self.blocks[0][0], shape, part)
        experts, rows = shape[0], shape[1] // len(self.blocks)
        if any(len(block) != experts for block in self.blocks) or shape[1] % len(self.blocks):
            return None
        found = []
        for expert in range(experts)[part[0]]:
            pieces = []
            for number, block in enumerate(self.blocks):
                first, last = (
                    min(max(edge - number * rows, 0), rows)
                    for edge in (part[1].start, part[1].stop)
                )
                if first < last:
                    inner = (slice(first, last), *part[2:])
                    pieces.append(read(block[expert], (rows, *shape[2:]), inner))
            if pieces:
                found.append(torch.cat(pieces))
        if found:
            return torch.stack(found)
        return torch.empty([part.stop - part.start for part in part])


def pieces_of(model: Any, own: Collection[str], names: Iterable[str]) -> dict[str, StoredWeight]:
    """The weights of a model that are made of these names in its files.

    The result omits weights that transformers does not make by stacking.

    Args:
        model: the whole model, of the class that transformers has.
        own: the weights, by their names in the base model.
        names: the names in the files.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        Concatenate,
        MergeModulelist,
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    known = dict.fromkeys(own, True)
    found: dict[str, dict[str | None, list[str]]] = {}
    for name in sorted(names, key=dot_natural_key):
        # The base model's prefix is added or removed to match the model.
        target, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, known
        )
        if target in known:
            found.setdefault(target, {}).setdefault(pattern, []).append(name)
    pieces = {}
    for target, by_source in found.items():
        if None in by_source:
            pieces[target] = StoredWeight((tuple(by_source[None]),), are_stacked=False)
            continue
        converter = by_pattern[next(iter(filter(None, by_source)))]
        kinds = [(type(each), each.dim) for each in converter.operations if hasattr(each, "dim")]
        stacks = [(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]
        if len(kinds) == len(converter.operations) and kinds in stacks:
            blocks = (tuple(by_source.get(each, ())) for each in converter.source_patterns)
            pieces[target] = StoredWeight(tuple(blocks), are_stacked=True)
    return pieces
