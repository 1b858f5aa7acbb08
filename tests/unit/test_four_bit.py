"""Layers in 4 bits that can be sharded: numbers and products of bitsandbytes, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import Tensor

from isles.config.sections.model import AdapterConfig
from isles.models import four_bit
from isles.models.four_bit import FourBitLinear, num_numbers, use_four_bits
from isles.models.untrained import beyond_adapter
from tests.small_models import small_model

SHAPES = [(96, 50), (7, 2), (3, 6), (130, 128)]
"""Rows that are no whole blocks of 64 numbers, and a last block that is not full."""


def of_bitsandbytes(weight: Tensor, adapter: AdapterConfig) -> Any:
    rows, columns = weight.shape
    layer = bitsandbytes.nn.Linear4bit(columns, rows, bias=False, compute_dtype=weight.dtype)
    layer.weight = bitsandbytes.nn.Params4bit(
        weight,
        requires_grad=False,
        quant_type=adapter.bnb_4bit_quant_type,
        compress_statistics=adapter.bnb_4bit_use_double_quant,
    ).to("cpu")
    layer.support_avx512bf16_for_cpu = False
    return layer


def gradient_and_product(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.float().square().sum().backward()
    assert x.grad is not None
    return x.grad, y


@pytest.mark.parametrize("at_once", [2**12, 3])
def test_a_layer_in_four_bits_computes_as_bitsandbytes(monkeypatch, at_once):
    """Read in pieces or at once, and from files with the inputs first (GPT-2)."""
    monkeypatch.setattr(four_bit, "_BLOCKS_AT_ONCE", at_once)
    torch.manual_seed(0)
    kinds = itertools.product(
        SHAPES, ("nf4", "fp4"), (True, False), (torch.float32, torch.bfloat16), (False, True)
    )
    for (rows, columns), kind, double, dtype, is_transposed in kinds:
        weight = torch.randn(rows, columns)
        saved = weight.T.contiguous() if is_transposed else weight

        def read(shape: tuple[int, ...], part: tuple[slice, ...], saved: Tensor = saved) -> Tensor:
            assert shape == tuple(saved.shape)
            return saved[part]

        adapter = AdapterConfig(
            type="qlora", bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double
        )
        layer = FourBitLinear(
            columns,
            rows,
            bias=False,
            adapter=adapter,
            dtype=dtype,
            device=torch.device("cpu"),
            is_transposed=is_transposed,
        )
        layer.fill(read)
        wanted = of_bitsandbytes(weight.to(dtype), adapter)
        state = wanted.weight.quant_state
        whole = bitsandbytes.functional.dequantize_4bit(wanted.weight.data, state)
        assert torch.equal(layer.weight, whole) and torch.equal(layer.as_held(read), whole)
        x = torch.randn(5, columns, dtype=dtype)
        for found, known in zip(
            gradient_and_product(layer, x), gradient_and_product(wanted, x), strict=True
        ):
            assert torch.equal(found, known), (rows, columns, kind, double, dtype)
        assert sum(map(num_numbers, layer.parameters())) == rows * columns


def test_a_compiled_layer_in_four_bits_has_one_graph():
    """A break of the graph would split views of the packed weight from its memory, which FSDP2
    frees and allocates again."""
    torch.manual_seed(0)
    weight, x = torch.randn(128, 64), torch.randn(5, 64)
    options: Any = {"bias": False, "dtype": torch.bfloat16, "device": torch.device("cpu")}
    layer = FourBitLinear(64, 128, adapter=AdapterConfig(type="qlora"), **options)
    layer.fill(lambda shape, part: weight[part])
    one_graph: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for found, known in zip(
        gradient_and_product(one_graph, x), gradient_and_product(layer, x), strict=True
    ):
        assert torch.equal(found, known)


def test_the_share_of_experts_counts_the_numbers_of_weights_in_four_bits():
    """Bytes of packed weights count as less than numbers, so that few experts look like many."""
    with torch.device("meta"):
        model = small_model("mixtral", hidden_size=64, intermediate_size=1)
    adapter = AdapterConfig(type="qlora")
    before = beyond_adapter(model)
    use_four_bits(model, adapter, torch.bfloat16)
    experts = [p for name, p in model.named_parameters() if p.ndim > 2 and "expert" in name]
    rest = [p for p in model.parameters() if p.ndim < 3]
    few = sum(p.numel() for p in experts)
    assert 0.1 * sum(p.numel() for p in (*experts, *rest)) < few
    assert few < 0.1 * (few + sum(map(num_numbers, rest)))
    assert beyond_adapter(model) == before == (0, 0, [])
