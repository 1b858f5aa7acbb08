"""Seconds of a step on paper: constants that were counted, and what they must lead to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isles.config import roofline
from isles.config.load import load_run_file
from isles.config.roofline import LAUNCH_S, LAUNCHES, PASSES, Chip, work_of
from isles.facts.gpus import named_gpu
from isles.facts.memory.architecture import Architecture
from isles.facts.memory.count import Count
from isles.facts.memory.setting import Holding, MemorySettings
from isles.facts.models import load_shape
from isles.plan.find import parse_gpus
from isles.plan.machines import GUESSED_LINE, GUESSED_NETWORK, Machines
from isles.plan.outcome import Outcome
from isles.plan.step import Job, outcome
from tests.small_models import small_model

_VIEWS = ("view", "detach", "expand", "slice", "unsqueeze", "t", "transpose", "alias", "split")
_VIEWS += ("select", "permute", "squeeze", "_unsafe_view", "as_strided", "empty", "empty_like")
_PRODUCTS = ("mm", "addmm", "bmm", "linear")

RUN_FILE = """\
name: paper
model: {name_or_path: someone/a-model}
data: {sources: [{type: fake}], validation_fraction: 0, seq_length: 1024}
training: {max_steps: 1000, global_batch_size: 64, micro_batch_size: 16}
strategy: {kind: ddp}
balance: even
"""


class Kernels(TorchDispatchMode):
    """Counts kernels, and the bytes of operands and results without products and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name in _VIEWS:
            return result
        self.count += 1
        if name not in _PRODUCTS and "attention" not in name:
            tensors = (x for x in tree_leaves([args, kwargs, result]) if isinstance(x, Tensor))
            self.bytes += sum(x.numel() * x.element_size() for x in tensors)
        return result


def kernels_of(layers: int, tokens: int) -> Kernels:
    """Kernels of a small Llama in bf16, forward and backward, without its head."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = small_model(
        "llama", vocab_size=64, num_hidden_layers=layers, num_key_value_heads=2, **sizes
    ).to(torch.bfloat16)
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    with Kernels() as found:
        states = model.model(input_ids=ids, position_ids=torch.arange(tokens)[None])
        states.last_hidden_state.float().sum().backward()
    return found


def test_kernels_and_bytes_of_a_block_are_those_that_were_counted():
    tokens = 256
    small, large = kernels_of(1, tokens), kernels_of(3, tokens)
    shape = {
        **load_shape("llama-150m"),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    setting = MemorySettings("bf16-true", "adamw", 1, tokens)
    saved = Count(Architecture.of(shape), setting, Holding()).block.saved_bytes
    assert (large.count - small.count) / 2 == pytest.approx(LAUNCHES[False], rel=0.1)
    assert (large.bytes - small.bytes) / 2 / saved == pytest.approx(PASSES[False], rel=0.15)


def planned(*values: str, shape: str | dict[str, Any] = "llama-1b", gpus: str = "h100") -> Outcome:
    """The plan of a run on GPUs."""
    config = load_run_file(Path("run.yaml"), values, text=RUN_FILE).config.of_cluster(0)
    ((hosts, network),) = parse_gpus(gpus)
    machines = Machines("a", hosts, network or GUESSED_NETWORK, GUESSED_LINE)
    model = load_shape(shape) if isinstance(shape, str) else shape
    return outcome(Job(config, Architecture.of(model), model, machines))


def seconds(*values: str, shape: str = "llama-1b", gpus: str = "h100") -> float:
    """Seconds of a step on paper."""
    found = planned(*values, shape=shape, gpus=gpus)
    assert found.time is not None, found.refused
    return found.time.total_s


def test_settings_cost_what_they_do():
    eager = seconds("training.torch_compile=false")
    full, selective = (
        seconds("training.torch_compile=false", f"training.gradient_checkpointing={how}") / eager
        for how in ("full", "selective")
    )
    assert 1.25 < full < 1.45 and 1.05 < selective < full
    gains = {
        shape: seconds("training.torch_compile=false", shape=shape)
        / seconds("training.torch_compile=true", shape=shape)
        for shape in ("llama-150m", "llama-8b")
    }
    assert 1.1 < gains["llama-8b"] < gains["llama-150m"] < 2.5
    lora = seconds("training.torch_compile=false", "adapter.type=lora", shape="llama-8b")
    qlora = seconds("training.torch_compile=false", "adapter.type=qlora", shape="llama-8b")
    whole = seconds("training.torch_compile=false", shape="llama-8b")
    assert 0.6 < lora / whole < 0.8 and lora < qlora < whole


def test_fp32_products_are_faster_in_tf32_by_the_gpu():
    for name, gain in (("a100", 8.0), ("4090", 1.0), ("t4", 1.0), ("mi300x", 1.0)):
        exact, rounded = (Chip.of(named_gpu(name), products) for products in ("fp32", "tf32"))
        assert rounded.flops == pytest.approx(gain * exact.flops), name
    exact, rounded = (
        seconds("training.precision=32-true", f"training.tf32={v}") for v in ("false", "true")
    )
    assert 2 < exact / rounded < 8


def test_a_small_micro_batch_is_bound_by_launches_and_a_large_one_by_its_tokens():
    few = work_of_rows(1, 64)
    chip = Chip.of(named_gpu("h100"), "16-bit")
    assert few.seconds(chip) == few.launches * LAUNCH_S
    per_token = [work_of_rows(rows, 1024).seconds(chip) / rows for rows in (4, 16)]
    assert per_token[0] == pytest.approx(per_token[1], rel=0.1)


def work_of_rows(rows: int, length: int):
    """Work of a micro-batch of `llama-150m`."""
    setting = MemorySettings("bf16-mixed", "adamw", rows, length, gpu_bytes=80 << 30)
    count = Count(Architecture.of(load_shape("llama-150m")), setting, Holding(casts_whole=True))
    return work_of(count, planned().layout, is_compiled=False)


def test_each_rank_that_shares_the_vocabulary_moves_its_part_of_the_logits():
    setting = MemorySettings("bf16-mixed", "adamw", 16, 1024, gpu_bytes=80 << 30)
    moved = []
    for ranks in (1, 2):
        holding = Holding(casts_whole=True, tensor=ranks, cuts_ends=True)
        count = Count(Architecture.of(load_shape("llama-150m")), setting, holding)
        tokens, vocab = 16 * 1024, count.model.vocab / ranks
        moved.append(roofline._loss_bytes(count, tokens, vocab, is_compiled=False))
    assert 0.4 < moved[1] / moved[0] <= 0.5


def test_a_plan_takes_the_fastest_strategy_that_fits():
    """ddp sends fp32 gradients twice; a shard of them is sent once, and weights in 16 bits."""
    slow = "h100,h100@1gbe"
    auto = planned("strategy={kind: auto}", gpus=slow)
    assert auto.strategy.sharding_strategy == "SHARD_GRAD_OP"
    others = ("{kind: ddp}", "{kind: fsdp}", "{kind: fsdp, sharding_strategy: SHARD_GRAD_OP}")
    found = [seconds(f"strategy={text}", gpus=slow) for text in others]
    assert auto.time.total_s == min(found) < 0.85 * found[0]


def test_a_pipeline_waits_for_a_tied_head_and_for_gradients_of_equal_stages():
    """Both travel after the backward pass, so nothing hides them."""
    rate, slow = 125e6, "h100,h100@1gbe"
    tied, apart = (
        {**load_shape("llama-1b"), "tie_word_embeddings": is_tied} for is_tied in (True, False)
    )

    def exposed(shape: dict[str, Any], gpus: str, *values: str) -> float:
        strategy = "strategy={kind: ddp, pp_size: 2}"
        return planned(strategy, *values, shape=shape, gpus=gpus).time.exposed_s

    there_and_back = exposed(tied, slow) - exposed(apart, slow)
    head, numbers = Architecture.of(tied).head_params, Architecture.of(apart).params
    assert there_and_back == pytest.approx(2 * 4 * head / rate, rel=0.01)
    # Two pipelines of two stages. An all-reduce of two ranks sends each gradient once.
    rows = "training.global_batch_size=128"
    both = exposed(apart, "h100,h100,h100,h100@1gbe", rows) - exposed(apart, slow)
    assert both == pytest.approx(4 * numbers / 2 / rate, rel=0.01)
