"""What a step moves, launches and waits for, counted on a CPU: a table of counts and their bars.

| Counted | Before | Now | Bar |
|---|---:|---:|---:|
| chunks of the loss, 16,384 tokens, vocabulary 128,256, 80 GB | 63 | 8 | 8 |
| bytes moved for each logit, besides the products' operands | 44 | 14 | 16 |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from isles.facts.memory.step import chunk_tokens
from isles.strategies import head as head_module
from tests.each import each

GB = 10**9

_VIEWS = {"__get__", "t", "unsqueeze", "split"}
_FEW = {"gather", "scatter_"}
"""Read or write one number of each row."""

_PRODUCTS = {"linear", "addmm_", "__matmul__", "matmul"}


class Traffic(TorchFunctionMode):
    """Counts the bytes that functions read and write of tensors of one shape.

    Functions of torch are counted, not their parts: a CUDA card computes `log_softmax` of 16-bit
    numbers in fp32 with one kernel, while a CPU copies the numbers first.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.bytes = shape, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__
        if name not in _VIEWS and name not in _FEW:
            reads = [] if name in _PRODUCTS else [*args]
            written = [(kwargs or {}).get("out", result)]
            self.bytes += sum(self._size(x) for x in tree_leaves([reads, written]))
        return result

    def _size(self, value: Any) -> int:
        if not isinstance(value, Tensor) or value.shape != self.shape:
            return 0
        return value.numel() * value.element_size()


@each((80, 2048, 8), (24, 768, 20), (8, 256, 64))
def test_chunks_of_the_loss_grow_with_the_memory_of_the_card(gigabytes, least_tokens, chunks):
    tokens = chunk_tokens(128_256, gigabytes * GB)
    assert tokens >= least_tokens
    assert -(-16_384 // tokens) <= chunks
    assert tokens * 128_256 * 6 <= gigabytes * GB / 32
    assert chunk_tokens(128_256, 0) == 2**25 // 128_256  # a CPU


def test_the_loss_moves_few_bytes_for_each_logit(monkeypatch):
    tokens, vocab, hidden = 2048, 128_256, 64
    with torch.device("meta"):
        head = nn.Linear(hidden, vocab, bias=False, dtype=torch.bfloat16)
        states = torch.empty(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.empty(tokens, dtype=torch.int64)
        logits = torch.empty(tokens, vocab, dtype=torch.bfloat16)
    with Traffic(logits.shape) as plain:
        head_module._turn_plainly(logits, targets)
    assert plain.bytes / logits.numel() == 12
    monkeypatch.setattr(head_module, "chunk_tokens", lambda vocab, gpu_bytes: tokens)
    with Traffic(logits.shape) as whole:
        apply = head_module._FusedLoss.apply
        apply(states, head.weight, None, targets, torch.bfloat16, True, False)
    assert whole.bytes / logits.numel() <= 16
