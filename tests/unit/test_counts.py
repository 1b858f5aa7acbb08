"""What a step moves, launches and waits for, counted on a CPU: a table of counts and their bars.

| Counted | Before | Now | Bar |
|---|---:|---:|---:|
| chunks of the loss, 16,384 tokens, vocabulary 128,256, 80 GB | 63 | 8 | 8 |
| bytes moved for each logit, besides the products' operands | 44 | 14 | 16 |
| gatherings of the head's weights under fsdp, per micro-batch | 2 | 1 | 1 |
| gatherings of a block's weights, 3 micro-batches, SHARD_GRAD_OP | 3 | 1 | 1 |
| casts of the head's weight for four chunks of Liger's loss | 4 | 1 | 1 |
| columns of logits on each of two tensor parallel ranks, vocabulary 96 | 96 | 48 | 48 |
| whole logits on the last stage of a pipeline | 1 | 0 | 0 |
| attention of the busiest rank to the idlest, 4 ranks sharing 64 tokens | 6.6 | 1 | 1 |
| collectives for keys and values of a layer that ranks gather | 4 | 2 | 2 |
| numbers in the mask of documents, 4 ranks sharing 64 tokens, a row | 1,024 | 0 | 0 |
| widths of rows in an epoch of chats of up to 2,048 tokens | 210 | 31 | 32 |
| products that selective checkpointing computes again | none | 1 in 2 | 0.2 of a pass |
| longest of five documents in a row of 74, as attention gets it | 74 | 64 | 64 |
| casts of an adapted layer beyond those of its products | 4 | 0 | 0 |
| casts of a Llama layer on one rank, forward and backward | 34 | 10 | 16 |
| fp32 operands of grouped products on one rank, fp16-mixed | all | 0 | 0 |
| graphs that blocks with balanced experts compile | - | 2 | 2 |
| graphs that all blocks of a model compile, and more for other rows | 1, 1 | 1, 1 | 1, 1 |
| products of a compiled Llama block that are not in fp8, of 21, fp8-mixed | 21 | 0 | 0 |
| bytes that this block keeps for the backward pass, of those with bf16-mixed | 1 | 0.7 | 1 |
| numbers that a step reads, adamw_8bit, rounding, SGD on shards, Muon | 1 or more | 0 | 0 |
| collectives of Muon for 8 matrices of a shape, ddp | 0 | 1 | 1 |
| collectives of Muon for 8 matrices of a shape, fsdp | 117 | 2 | 2 |
| matrices that a rank orthogonalizes, 8 of a shape, 8 ranks | 8 | 1 | 1 |
| broadcasts that give an average to 8 ranks, 7B | 6,491 | 137 | 140 |
| gatherings of the weights for a contribution, fsdp, 7B | 291 | 130 | 140 |
| gatherings of the weights that a late average changes, fsdp, 7B | 291 | 0 | 0 |
| passes over the gradients between norm and step, fp16 and clipping | 2 | 1 | 1 |
| saves that a step waits for, while one is unfinished | 1 | 0 | 0 |
| new main memory for the second save of a state, share of its bytes | 1 | 0 | 0 |
| share of a model that a rank holds in main memory while it loads it to a GPU | 1 | 0 | 0 |
| files of other ranks that rank 0 hashes or reads back in a save | all, twice | 0 | 0 |
| bits gathered for each frozen number of a block, QLoRA under fsdp | 16 | 4.3 | 4.5 |
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AutoModelForCausalLM

from isles.checkpoint import save as saving
from isles.checkpoint import staging
from isles.config.layout import make_layout
from isles.config.sections.model import AdapterConfig, ModelConfig
from isles.config.sections.output import CheckpointConfig
from isles.config.sections.strategy import FSDPStrategyConfig
from isles.config.sections.training import TrainingConfig
from isles.data.mix import row_width
from isles.dist.batch import VARLEN, cu_seqlens, isolation_inputs, longest_document
from isles.dist.mesh import make_mesh
from isles.dist.world import World
from isles.facts.memory.count import chunk_tokens
from isles.models import recompute
from isles.models.adapter import add_adapter
from isles.models.build import build_model
from isles.models.four_bit import use_four_bits
from isles.models.recompute import set_gradient_checkpointing
from isles.outer import cluster
from isles.outer.codec import parse_codec
from isles.outer.layout import make_layout as outer_layout
from isles.run import checkpoints
from isles.strategies import fsdp, fused_loss
from isles.strategies import head as head_module
from isles.strategies.fsdp import shard_model
from isles.strategies.fused_loss import HeadWeights, fused_loss_sum
from isles.strategies.objective import CausalLM
from isles.strategies.sequence import MicroBatchPart
from isles.strategies.stepper import Stepper
from isles.train.optimizer import muon
from isles.train.optimizer.make import make_optimizers
from isles.train.stop import Agreement
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
        fused_loss._turn_plainly(logits, targets)
    assert plain.bytes / logits.numel() == 12
    monkeypatch.setattr(fused_loss, "chunk_tokens", lambda vocab, gpu_bytes: tokens)
    with Traffic(logits.shape) as whole:
        apply = fused_loss._LossSum.apply
        apply(states, head.weight, None, targets, None, torch.bfloat16, True, False)
    assert whole.bytes / logits.numel() <= 16


class Casts(TorchDispatchMode):
    """Counts copies to another type, of all tensors or of those with so many numbers."""

    def __init__(self, numbers: int | None = None) -> None:
        super().__init__()
        self.count, self._numbers = 0, numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default and result.dtype != args[0].dtype
        is_counted = is_cast and self._numbers in (None, result.numel())
        self.count += is_counted or func is torch.ops.aten._foreach_copy_.default  # of many at once
        return result


def test_the_head_is_cast_once_for_all_chunks():
    """Of isles' loss, and of Liger's, whose function takes chunks of its own."""

    def liger(hidden: Tensor, weight: Tensor, targets: Tensor, **_: Any) -> Tensor:
        parts = zip(hidden.split(3), targets.split(3), strict=True)
        losses = [F.cross_entropy((x @ weight.t()).float(), y, reduction="sum") for x, y in parts]
        return torch.stack(losses).sum()

    torch.manual_seed(0)
    weight = torch.randn(97, 16, requires_grad=True)
    hidden, targets = torch.randn(12, 16), torch.randint(0, 97, (12,))
    head, losses = HeadWeights(weight), []
    for compute in (
        functools.partial(head_module._liger_loss_sum, liger),
        functools.partial(fused_loss_sum, may_ignore=False),
    ):
        with Casts(weight.numel()) as casts, torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(compute(hidden, head, targets))
        assert casts.count == 1
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-3)
    losses[0].backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32


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


class Gathered(TorchDispatchMode):
    """Lists the sizes, in numbers, of what ranks gather."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in str(func):
            tensors = [x for x in tree_leaves(args[0]) if isinstance(x, Tensor)]
            self.sizes.append(sum(x.numel() for x in tensors))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def fake_ranks(count: int, rank: int = 0) -> Iterator[World]:
    """One rank of a group whose other ranks do not exist."""
    dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
    try:
        group = dist.group.WORLD
        assert group is not None
        yield World(rank, rank, count, count, torch.device("cpu"), group, group, group, 60.0)
    finally:
        dist.destroy_process_group()


def test_the_head_is_gathered_once_per_micro_batch():
    layers, ranks = 3, 4
    ids = torch.zeros(2, 8, dtype=torch.int64)
    with fake_ranks(ranks) as world:
        model = small_model("llama", vocab_size=512, num_hidden_layers=layers)
        head_size = model.lm_head.weight.numel()
        config = FSDPStrategyConfig()
        mesh = make_mesh(make_layout(config, ranks, local_world_size=ranks), world, is_sharded=True)
        shard_model(model, config, mesh, world.device, precision="bf16-mixed")
        objective = CausalLM(model)
        for is_first in (True, False):
            with Gathered() as forward:
                loss = objective.loss_sum(model, MicroBatchPart({"input_ids": ids}, ids))
            with Gathered() as backward:
                loss.backward()
            if is_first:
                continue  # it tries the model with two tokens first
            # Embedding, blocks, head, and the last norm with the rest.
            assert len(forward.sizes) == layers + 3
            # Of these only the embedding, which is as large as the head, and at the end.
            assert len(backward.sizes) == layers + 1
            assert backward.sizes.index(head_size) == layers


def test_weights_are_gathered_once_per_step_if_only_gradients_are_sharded():
    ranks, found = 4, {}
    ids = torch.zeros(2, 8, dtype=torch.int64)
    for sharding in ("SHARD_GRAD_OP", "FULL_SHARD"):
        config = FSDPStrategyConfig(sharding_strategy=sharding)
        with fake_ranks(ranks) as world:
            model = small_model("llama", vocab_size=512, num_hidden_layers=3)
            layout = make_layout(config, ranks, local_world_size=ranks)
            mesh = make_mesh(layout, world, is_sharded=True)
            sharded = shard_model(model, config, mesh, world.device, precision="bf16-mixed")
            objective = CausalLM(model)
            for _ in range(2):  # the first step also tries the model with two tokens
                with Gathered() as step:
                    for is_last in (False, False, True):
                        is_full = sharding == "FULL_SHARD"
                        fsdp.set_sync(sharded, is_last=is_last, reduces_each=is_full)
                        batch = MicroBatchPart({"input_ids": ids}, ids)
                        objective.loss_sum(model, batch).backward()
            found[sharding] = len(step.sizes)
    # Each of three blocks, both ends and the rest: one time, or twice for each micro-batch.
    assert found["SHARD_GRAD_OP"] == 6
    assert found["FULL_SHARD"] > 3 * 6


def test_weights_in_four_bits_are_gathered_in_four_bits():
    ids, layers, precision = torch.zeros(2, 8, dtype=torch.int64), 3, "bf16-mixed"
    config = FSDPStrategyConfig()
    with fake_ranks(2) as world:
        with torch.device("meta"):
            model = small_model("llama", hidden_size=512, num_hidden_layers=layers)
        block = sum(p.numel() for p in model.model.layers[0].parameters())
        use_four_bits(model, AdapterConfig(type="qlora"), torch.bfloat16)
        mesh = make_mesh(make_layout(config, 2, local_world_size=2), world, is_sharded=True)
        shard_model(model, config, mesh, world.device, precision=precision)
        fsdp.allocate(model, world.device)
        with Gathered() as forward, torch.no_grad():
            model(input_ids=ids)
        of_blocks = sorted(forward.sizes)[-layers:]  # in numbers of 16 bits
    assert [16 * size / block for size in of_blocks] == pytest.approx([4.3] * layers, abs=0.2)


CPU = torch.device("cpu")


class Calls(TorchDispatchMode):
    """Counts operations by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().removeprefix("aten::").partition(".")[0])
        return func(*args, **(kwargs or {}))

    def count(self, *names: str) -> int:
        return sum(self.names.count(name) for name in names)


class Matrices(nn.Module):
    """Matrices of two shapes, and a norm."""

    def __init__(self, each: int, dtype: torch.dtype) -> None:
        super().__init__()
        wide = [nn.Linear(64, 32, bias=False, dtype=dtype) for _ in range(each)]
        tall = [nn.Linear(64, 128, bias=False, dtype=dtype) for _ in range(each)]
        self.matrices = nn.ModuleList([*wide, *tall])
        self.norm = nn.RMSNorm(64, dtype=dtype)

    def get_output_embeddings(self) -> None:
        return None


def stepper_of(each: int, *, shards: int = 0, **settings: Any) -> Stepper:
    """With gradients of ones, after a first step."""
    precision = settings.get("precision", "32-true")
    model = Matrices(each, torch.bfloat16 if precision == "bf16-true" else torch.float32)
    if shards:
        fully_shard(model, mesh=init_device_mesh("cpu", (shards,)))
    config = TrainingConfig(max_steps=1, **settings)
    stepper = Stepper(
        [model], lambda module: make_optimizers(config, module), device=CPU, precision=precision
    )
    fill(stepper)
    stepper.step(lr=1e-3, max_norm=1.0)
    fill(stepper)
    return stepper


def fill(stepper: Stepper) -> None:
    for parameter in stepper.parameters:
        parameter.grad = torch.ones_like(parameter)


OPTIMIZERS = [
    {"optimizer": "adamw"},
    {"optimizer": "adamw", "stochastic_rounding": True, "precision": "bf16-true"},
    {"optimizer": "adamw_8bit"},
    {"optimizer": "adamw_8bit", "stochastic_rounding": True, "precision": "bf16-true"},
    {"optimizer": "sgd"},
    {"optimizer": "muon"},
    {"optimizer": "muon", "precision": "fp16-mixed"},
]


@pytest.mark.parametrize("shards", [0, 2])
@each(*OPTIMIZERS)
def test_a_step_reads_no_number_from_the_device(settings, *, shards):
    with fake_ranks(2):
        stepper = stepper_of(3, shards=shards, **settings)
        with Calls() as calls:
            stepper.step(lr=1e-3, max_norm=1.0)
        assert calls.count("_local_scalar_dense", "is_nonzero", "nonzero") == 0
        assert calls.names
        with Calls() as calls:
            stepper.good_steps()
        assert calls.count("_local_scalar_dense") == 1, "the counter sees what it should see"


@each((2, 2), (8, 1))
def test_muon_sends_a_shape_at_once_and_shares_the_work(ranks, most, *, monkeypatch):
    solved: list[int] = []
    orthogonalized = muon._orthogonalized

    def counted(x: Tensor) -> Tensor:
        solved.append(len(x))
        return orthogonalized(x)

    monkeypatch.setattr(muon, "_orthogonalized", counted)
    for shards, name, most_calls in ((0, "_allgather_base_", 1), (ranks, "alltoall_base_", 2)):
        with fake_ranks(ranks):
            stepper = stepper_of(8, shards=shards, optimizer="muon")
            solved.clear()
            with CommDebugMode() as calls:
                stepper.step(lr=1e-3, max_norm=None)
        counts = {str(op).rpartition(".")[2]: n for op, n in calls.get_comm_counts().items()}
        assert counts.pop("all_reduce", 0) == (1 if shards else 0)  # the norm
        assert counts == {name: 2 * most_calls}
        assert solved == [8 // ranks] * 2


@each(({}, 0), ({"max_norm": 1.0}, 1))
def test_gradients_are_scaled_in_one_pass(clipping, passes):
    for precision, more in (("32-true", 0), ("fp16-mixed", 1)):
        stepper = stepper_of(2, optimizer="adamw", precision=precision)
        with Calls() as calls:
            stepper.step(lr=1e-3, **{"max_norm": None, **clipping})
        assert calls.count("_foreach_mul_") == max(passes, more)


class Work(TorchDispatchMode):
    """Counts the multiplications of products and attention, and lists what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.names = 0, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if count := flop_registry.get(packet):
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        self.names[packet.__name__] += 1
        return result


@each((3, 16, 31), (3, 2, 11), (6, 7, 25))
def test_all_ranks_make_the_same_stacks(ranks, rows, count, *, monkeypatch):
    """Else one waits for an exchange that another never begins; rows may be uneven, or none."""
    monkeypatch.setattr(muon, "_LARGEST_STACK", 8 * 5 * rows)
    found = []
    for rank in range(ranks):
        with fake_ranks(ranks, rank):
            mesh = init_device_mesh("cpu", (ranks,))
            model = nn.Sequential(*(nn.Linear(8, rows, bias=False) for _ in range(count)))
            fully_shard(model, mesh=mesh)
            found.append([len(stack) for stack in muon._stacks(model.parameters())])
    assert len(found[0]) > 1 and sum(found[0]) == count
    assert all(stacks == found[0] for stacks in found)


def test_selective_checkpointing_computes_little_again():
    ids = torch.randint(0, 96, (2, 64), generator=torch.Generator().manual_seed(0))
    work, losses, gradients = {}, {}, {}
    for kind in ("none", "selective", "full"):
        torch.manual_seed(1)
        model = small_model("qwen3_moe", vocab_size=96).train()
        set_gradient_checkpointing(model, kind)
        loss = model(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).sum()
        with Work() as work[kind]:
            loss.backward()
        losses[kind] = loss.detach()
        gradients[kind] = [p.grad for p in model.parameters() if p.grad is not None]
    assert work["selective"].flops <= 1.2 * work["none"].flops < work["full"].flops
    # Backward passes of products are products.
    assert work["selective"].names["_grouped_mm"] == work["none"].names["_grouped_mm"]
    assert work["full"].names["_grouped_mm"] > work["none"].names["_grouped_mm"]
    for kind in ("selective", "full"):
        assert losses[kind] == losses["none"]
        assert all(map(torch.equal, gradients[kind], gradients["none"]))


@each("mixtral", "olmoe", "qwen3_moe", "gpt_oss", "llama", "gemma3_text", "gpt2")
def test_selective_checkpointing_changes_no_gradient(kind):
    """Some models change scores of experts, or products, in place."""
    ids = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(0))
    found = []
    for kept in ("none", "selective"):
        torch.manual_seed(1)
        model = small_model(kind, vocab_size=96, sliding_window=64).train()
        if hasattr(model.config, "norm_topk_prob"):
            model.config.norm_topk_prob = True
            for module in model.modules():
                if hasattr(module, "norm_topk_prob"):
                    module.norm_topk_prob = True
        set_gradient_checkpointing(model, kept)
        torch.manual_seed(2)
        model(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).sum().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 10
    assert all(map(torch.equal, *found))


def test_attention_between_documents_is_kept_by_selective_checkpointing():
    _, always = recompute._kept(keeps_grouped=True, has_4bit=False)
    assert torch.ops.torch_attn._varlen_attn.default in always


def test_the_weights_of_7b_travel_between_ranks_in_few_buckets():
    hidden, inner, vocab = 4096, 11008, 32_000
    shapes = {"embed": (vocab, hidden), "head": (vocab, hidden), "norm": (hidden,)}
    for layer in range(32):
        place = f"layers.{layer}."
        shapes |= {place + name: (hidden, hidden) for name in "qkvo"}
        shapes |= {place + name: (inner, hidden) for name in ("gate", "up", "down")}
        shapes |= {place + name: (hidden,) for name in ("first", "second")}
    (fragment,) = outer_layout(shapes, parse_codec("int8")).fragments
    groups = list(cluster._groups(fragment.by_name()))
    assert [position for group in groups for position in group] == fragment.by_name()
    largest = max(stop - start for _, start, stop in fragment.by_name())
    assert all(g[-1][2] - g[0][1] <= max(largest, cluster._BUCKET_NUMBERS) for g in groups)
    ranks = 8
    assert len(fragment.pieces) > 6_400
    assert len(groups) + ranks - 1 <= 140  # with a bucket that two ranks share, at most each


def test_an_epoch_of_chats_has_few_widths():
    chance = np.random.default_rng(0)
    for mean, spread in ((400, 0.8), (350, 0.6), (120, 0.9)):
        lengths = np.clip(chance.lognormal(np.log(mean), spread, 20_000), 8, 2048).astype(np.int64)
        longest = lengths.reshape(-1, 8).max(1)
        widths = row_width(longest, 2048)
        assert len(np.unique(widths)) <= 32
        assert (widths >= longest).all() and widths.max() <= 2048
        assert widths.sum() <= 1.06 * (-(-longest // 8) * 8).sum()


def test_attention_gets_the_longest_document_not_the_row():
    lengths = [5, 17, 9, 40, 3]
    positions = torch.cat([torch.arange(n) for n in lengths]).view(1, -1)
    model = small_model("llama", vocab_size=96)
    model.config._attn_implementation = VARLEN
    ends = cu_seqlens(positions)
    longest = longest_document(ends, positions.shape[1])
    assert longest == 64  # few different numbers, for torch.compile
    inputs = isolation_inputs(model, positions, ends, longest)
    assert (inputs["max_length_q"], inputs["max_length_k"]) == (64, 64)
    assert isolation_inputs(model, positions, ends)["max_length_q"] == sum(lengths)
    assert longest_document(cu_seqlens(torch.arange(100).view(1, -1)), 100) == 100


def test_no_step_waits_for_an_unfinished_save():
    config: Any = SimpleNamespace(
        training=TrainingConfig(max_steps=9, global_batch_size=1), checkpoint=CheckpointConfig()
    )
    world: Any = SimpleNamespace(is_main=True, world_size=1)
    signals: Any = SimpleNamespace(stop_code=0)
    agreement, saves = Agreement(world, signals, config, 0.0), []
    for step in range(1, 10):
        agreement.ask(is_saving=step in range(3, 8))  # of step 2
        if agreement.may_save(agreement.decide(), is_due=step % 2 == 0):
            saves.append(step)
            agreement.saved(0.0)
    assert saves == [2, 8], "not at 4 and 6; the save of 4 takes its turn at 8, with that of 8"


def test_the_second_save_of_a_state_takes_no_new_main_memory(monkeypatch):
    state = {name: torch.randn(64, 64) for name in ("weight", "moment")}
    sizes, make = list[int](), torch.empty

    def noted(size: int, **options: Any) -> Tensor:
        sizes.append(size)
        return make(size, **options)

    monkeypatch.setattr(staging.torch, "empty", noted)
    buffers = staging.Buffers(torch.device("cpu"), 1)
    places = [{copy.data_ptr() for copy in buffers.copy(state).values()} for _ in range(2)]
    assert sizes == [2 * 64 * 64 * 4] and places[0] == places[1]


def test_rank_0_reads_no_file_of_another_rank(tmp_path, monkeypatch):
    partial, names = tmp_path / "partial", [f"tensors-{rank:05d}.bin" for rank in range(8)]
    partial.mkdir()
    for name in names:
        (partial / name).write_bytes(name.encode())
    files = {name: checkpoints.describe_file(partial / name) for name in names}
    read, on_disk = list[str](), saving._hash_on_disk
    monkeypatch.setattr(checkpoints, "hash_file", lambda file: read.append(file.name))
    monkeypatch.setattr(
        saving, "_hash_on_disk", lambda file, moved: read.append(file.name) or on_disk(file, moved)
    )
    saving.read_back(partial, {names[0]: files[names[0]]})
    saving.seal(partial, tmp_path / "whole", {"version": 1, "step": 1}, files)
    assert read == names[:1]


def test_a_rank_loads_weights_straight_to_its_device(tmp_path, monkeypatch):
    small_model().save_pretrained(tmp_path)
    load, devices = AutoModelForCausalLM.from_pretrained, set[str]()

    def noted(*args: Any, **options: Any) -> Any:
        model, report = load(*args, **options)
        devices.update(value.device.type for value in model.state_dict().values())
        return model, report

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", noted)
    config, meta = ModelConfig(name_or_path=str(tmp_path)), torch.device("meta")
    build_model(config, device=meta, dtype=torch.float32, seed=0, vocab_size=None)
    assert devices == {"meta"}, "which stands for a GPU"
