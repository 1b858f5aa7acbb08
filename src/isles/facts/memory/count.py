"""Counts of the parts of a model in one micro-batch."""

from __future__ import annotations

from collections.abc import Callable

from isles.facts.memory.architecture import Architecture
from isles.facts.memory.forward import FP32, Adapter, Forward, Value
from isles.facts.memory.setting import Holding, MemorySettings

_CHUNK_LOGITS = 2**25
"""Logits of a chunk of the loss on a small device: 192 MiB in 16 bits and in fp32."""

_CHUNK_SHARE = 32
"""A chunk of the loss takes at most this part of a GPU's memory: one in 32."""

_LEAST_CHUNK, _MOST_CHUNK = 128, 4096
"""Fewest and most tokens of a chunk."""


def chunk_tokens(vocab: int, device_bytes: int) -> int:
    """Number of tokens whose logits the loss computes at the same time.

    Each chunk reads and writes the gradient of the whole head, so that small chunks are slow: with
    a vocabulary of 128,000, 2**25 logits are 261 tokens.

    Args:
        vocab: size of the vocabulary.
        device_bytes: memory of the GPU; 0 for a CPU, whose caches prefer small chunks.
    """
    logits = max(_CHUNK_LOGITS, device_bytes // _CHUNK_SHARE // (FP32 + 2))
    tokens = logits // vocab
    whole = tokens // _LEAST_CHUNK * _LEAST_CHUNK  # kernels compute tiles of 128 rows
    return min(_MOST_CHUNK, max(_LEAST_CHUNK, whole if device_bytes else tokens))


class Count:
    """Counts of the parts of a model, for one setting and sharding."""

    def __init__(self, model: Architecture, setting: MemorySettings, holding: Holding) -> None:
        self.model, self.setting, self.holding = model, setting, holding
        width = setting.trained_width if setting.is_whole else setting.compute_width
        self.width = 2 if holding.casts_whole and setting.is_mixed else width
        """Bytes per number of the weights while they compute."""
        tokens = setting.rows * setting.length
        seen = setting.seen or setting.length
        self.embedding, x = self._walk(lambda walk, _: model.embed(walk, tokens))
        self.first, y = self._walk(lambda walk, x: model.block(walk, x, seen), x)
        # The input of every block but the first is the output of a block.
        self.block, _ = self._walk(lambda walk, x: model.block(walk, x, seen), y)
        self.last, self.hidden = self._walk(model.end, y)
        self.keeps_input = self.block.keeps(y)

    def _walk(
        self, part: Callable[[Forward, Value], Value], x: Value | None = None
    ) -> tuple[Forward, Value]:
        setting, seen = self.setting, self.setting.seen or self.setting.length
        adapter = None
        if not setting.is_whole:
            casts = self.holding.casts_whole and setting.is_mixed
            width = self.width if casts else setting.trained_width
            adapter = Adapter(
                setting.adapter_rank,
                width,
                setting.adapter_targets,
                setting.has_dropout,
                setting.adapter_experts,
            )
        autocast = setting.compute_width if setting.is_mixed else None
        walk = Forward(
            weight=self.width,
            autocast=None if self.holding.casts_whole else autocast,
            is_trained=setting.is_whole,
            adapter=adapter,
            is_cuda=setting.is_cuda,
            repeats_keys=setting.is_packed,
            shares=seen // setting.length if setting.gathers_keys else 1,
            swaps_heads=setting.swaps_heads,
            tensor=self.holding.tensor,
            is_4bit=bool(setting.block_bits),
        )
        y = part(walk, x if x is not None else Value(0, 0, self.width))
        return walk, y

    @property
    def head_params(self) -> int:
        """Numbers of a separate head. 0 if the head is tied to the embedding."""
        return 0 if self.model.is_tied else self.model.head_params

    @property
    def params(self) -> int:
        """Numbers of the whole model, without adapters. With tensor parallel, on one rank."""
        ends = self.embedding.params + self.last.params + self.head_params
        return ends + self.model.layers * self.block.params

    @property
    def active(self) -> int:
        """Numbers that one token uses."""
        idle = self.model.layers * (self.block.params - self.block.active_params)
        return self.params - idle

    @property
    def trained(self) -> int:
        """Numbers that have gradients."""
        return self.trained_blocks + self.trained_ends

    @property
    def trained_blocks(self) -> int:
        """Numbers of blocks, or of adapters in them, that have gradients."""
        block = self.block
        return self.model.layers * (block.params if self.setting.is_whole else block.adapter_params)

    @property
    def trained_ends(self) -> int:
        """Numbers of embedding, last norm and head that have gradients."""
        if not (self.setting.is_whole or self.setting.trains_ends):
            return 0
        return self.embedding.params + self.last.params + self.head_params

    @property
    def saved_twice(self) -> int:
        """Numbers of a tied head, which a checkpoint has under both of its names."""
        return self.model.head_params if self.model.is_tied and self.trained_ends else 0
