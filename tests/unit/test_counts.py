"""What a step moves, launches and waits for, counted on a CPU: a table of counts and their bars.

| Counted | Before | Now | Bar |
|---|---:|---:|---:|
| chunks of the loss, 16,384 tokens, vocabulary 128,256, 80 GB | 63 | 8 | 8 |
| bytes moved for each logit, besides the products' operands | 44 | 14 | 16 |
| casts of an adapted layer beyond those of its products | 4 | 0 | 0 |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isles.config.sections.model import AdapterConfig
from isles.facts.memory.step import chunk_tokens
from isles.models.adapter import add_adapter
from isles.strategies import head as head_module
from tests.each import each
from tests.small_models import small_model

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


class Casts(TorchDispatchMode):
    """Counts copies to another type."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default and result.dtype != args[0].dtype
        self.count += is_cast
        return result


@each({}, {"use_rslora": True}, {"dropout": 0.5})
def test_an_adapter_casts_no_input_to_fp32(settings):
    ids = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(0))
    found = []
    for casts_first in (True, False):
        torch.manual_seed(1)
        model = small_model("llama", vocab_size=96).to(torch.bfloat16)
        add_adapter(model, AdapterConfig(type="lora", **settings), dtype=torch.float32, name="")
        for module in model.modules():
            if casts_first and hasattr(module, "cast_input_dtype_enabled"):
                module.cast_input_dtype_enabled = True
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.1)
        torch.manual_seed(2)
        with Casts() as casts:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(input_ids=ids).logits
            logits.float().logsumexp(-1).sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append((casts.count, gradients))
    (before, exact), (now, mine) = found
    layers = sum(hasattr(m, "cast_input_dtype_enabled") for m in model.modules())
    assert layers == 14
    assert before - now >= 2 * layers
    assert len(mine) == len(exact) >= 2 * layers
    if not settings.get("dropout"):  # whose random numbers depend on the type
        assert all(torch.equal(a, b) for a, b in zip(mine, exact, strict=True))
