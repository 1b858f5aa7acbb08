"""The kernel for packed documents, which only a GPU has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from isles.config.sections.model import ModelConfig
from isles.dist.batch import MASKED, VARLEN, cu_seqlens, isolation_inputs
from isles.dist.documents import Documents, attend_by_document
from isles.models.attention import use_maskless_attention
from isles.models.build import build_model

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


def test_the_kernel_keeps_documents_apart_and_waits_for_nothing(tiny_model: Path) -> None:
    """CPU twin: tests/dist/test_packing.py, test_packed_training_is_unpacked_training."""
    config = ModelConfig(name_or_path=str(tiny_model), init="scratch")
    model: Any = build_model(config, device=CUDA, dtype=torch.bfloat16, seed=0, vocab_size=None)
    lengths = [(40, 50, 38), (1, 100, 27)]
    positions = torch.tensor([[i for n in row for i in range(n)] for row in lengths], device=CUDA)
    ids = torch.randint(0, 512, (2, 128), generator=torch.Generator().manual_seed(0)).to(CUDA)
    ends = cu_seqlens(positions)
    grads = {}
    places: dict[str, Any] = {VARLEN: {"device": CUDA, "dtype": torch.bfloat16}, MASKED: {}}
    for name, place in places.items():
        model.set_attn_implementation("sdpa")
        assert use_maskless_attention(model, **place)
        assert model.config._attn_implementation == name
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            inputs = isolation_inputs(model, positions, ends)
            logits = model(input_ids=ids, **inputs, use_cache=False).logits
            logits.float().logsumexp(-1).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert ("attention_mask" in inputs) == (name == MASKED)
        grads[name] = {key: p.grad.float().clone() for key, p in model.named_parameters()}
        model.zero_grad()
    for key, grad in grads[MASKED].items():
        assert (grads[VARLEN][key] - grad).norm() < 0.05 * grad.norm(), key


def test_the_kernel_aligns_the_last_query_of_a_document_with_its_last_key() -> None:
    """Ranks that share a sequence have fewer queries than keys, and documents without queries.

    CPU twin: tests/dist/test_shared_sequence.py.
    """
    queries, keys = (0, 100, 28, 0), (150, 200, 28, 134)
    starts = [F.pad(torch.tensor(n).cumsum(0), (1, 0)).to(torch.int32) for n in (queries, keys)]
    generator = torch.Generator().manual_seed(0)
    sizes = ((1, 8, sum(queries), 64), *[(1, 2, sum(keys), 64)] * 2)
    given = [torch.randn(size, generator=generator).to(torch.bfloat16) for size in sizes]
    found = []
    for device, dtype in ((CUDA, torch.bfloat16), (torch.device("cpu"), torch.float32)):
        documents = Documents(*(x.to(device) for x in starts), max(queries), max(keys))
        inputs = [x.detach().to(device, dtype).requires_grad_() for x in given]
        out = attend_by_document(*inputs, documents)
        out.float().square().sum().backward()
        found.append([x.detach().float().cpu() for x in (out, *(x.grad for x in inputs))])
    for kernel, loop in zip(*found, strict=True):
        assert (kernel - loop).norm() < 0.02 * loop.norm()
