"""Ranks that share a sequence: equal work, few bytes sent, and no mask of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode

from isles.config.layout import make_layout
from isles.config.sections.strategy import DDPStrategyConfig
from isles.dist.batch import IGNORE_INDEX, Batch, block_mask, cu_seqlens, longest_document
from isles.dist.mesh import Mesh, make_mesh
from isles.dist.world import World, join_world
from isles.models.recompute import set_gradient_checkpointing
from isles.run.env import RankEnv
from isles.strategies.fused_loss import loss_of_logits
from isles.strategies.objective import CausalLM
from isles.strategies.sequence import localize, use_context_parallel_attention
from isles.train.strategy import resolve_mesh
from tests.ranks import run_ranks
from tests.small_models import small_model
from tests.unit.test_counts import fake_ranks

B, VOCAB = 2, 64


def _batch(length: int, *, is_packed: bool) -> Batch:
    generator = torch.Generator().manual_seed(length)
    tokens, targets = torch.randint(0, VOCAB, (2, B, length), generator=generator)
    targets[torch.rand((B, length), generator=generator) < 0.3] = IGNORE_INDEX
    positions = None
    if is_packed:
        # The second row has a document that begins and ends within a piece, and a longer one.
        begins = [[0, 3, length // 2, length - 2], [0, 1, 2, length // 4]]
        rows = [[t - max(e for e in row if e <= t) for t in range(length)] for row in begins]
        positions = torch.tensor(rows)
    ends = None if positions is None else cu_seqlens(positions)
    longest = None if ends is None else longest_document(ends, length)
    return Batch(
        tokens,
        targets,
        (0, 1),
        position_ids_BT=positions,
        cu_seqlens_N=ends,
        longest_document=longest,
    )


CASES = [(n, how) for n in (12, 24, 6, 3) for how in ("joined", "by mask", "by document")]
"""Lengths for three ranks: pieces of two tokens, of four, of one, and of none and one. With four,
blocks are checkpointed selectively, in a dispatch mode."""


def _gradients(env: RankEnv, method: str) -> list[tuple[float, float]]:
    world = join_world(env, device="cpu", timeout_s=60)
    mesh = resolve_mesh(DDPStrategyConfig(cp_size=env.world_size, cp_method=method), world)
    found = []
    for length, how in CASES:
        batch = _batch(length, is_packed=how != "joined")
        heads = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
        model, twin = small_model(**heads), small_model(**heads)
        device = torch.device("cpu") if how == "by document" else None
        use_context_parallel_attention(model, mesh, device=device)
        if length == 24:
            set_gradient_checkpointing(model, "selective")
        part = localize(batch, mesh, model)
        assert ("attention_mask" in part.inputs) == (how == "by mask")
        loss = CausalLM(model).loss_sum(model, part)
        loss.backward()
        whole = {"input_ids": batch.input_ids_BT}
        if batch.position_ids_BT is not None:
            whole["position_ids"] = batch.position_ids_BT
            whole["attention_mask"] = block_mask(batch.position_ids_BT)
        wanted = loss_of_logits(twin(**whole, use_cache=False).logits, batch.targets_BT)
        wanted.backward()
        mine = torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]
        other = torch.cat([p.grad.flatten() for p in twin.parameters()])  # type: ignore[union-attr]
        both = torch.cat([mine, loss.detach()[None]])
        dist.all_reduce(both)
        apart = float((both[:-1] - other).abs().max() / other.abs().max())
        found.append((apart, abs(float(both[-1] - wanted)) / float(wanted)))
    return found


@pytest.mark.parametrize("method", ["allgather", "ulysses"])
def test_ranks_that_share_a_sequence_have_the_gradients_of_one(method):
    for results in run_ranks(_gradients, 3, method):
        for case, (gradient, loss) in zip(CASES, results, strict=True):
            assert gradient < 2e-5 and loss < 1e-5, case


class Attention(TorchFunctionMode):
    """Collects masks, and products of queries and keys, of fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Any] = []
        self.products = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            mask = (kwargs or {}).get("attn_mask")
            self.masks.append(mask)
            query, key = args[:2]
            # Of the square at the end of the keys, half.
            queries, keys = query.shape[2], key.shape[2]
            self.products += queries * (keys - queries) + queries * (queries + 1) // 2
        return func(*args, **(kwargs or {}))


class Sent:
    """Counts collectives and their bytes."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []


@contextmanager
def sent(patch: pytest.MonkeyPatch) -> Iterator[Sent]:
    """Counts what `isles.strategies.sequence` sends."""
    found = Sent()
    with patch.context() as own:
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_gather", "all_reduce"):
            call = getattr(dist, name)

            def counted(*args: Any, _name: str = name, _call: Any = call, **kwargs: Any) -> Any:
                # The larger tensor of the two, which each rank receives or sends in parts.
                size = max(x.nbytes for x in args if isinstance(x, Tensor))
                found.calls.append((_name, size))
                return _call(*args, **kwargs)

            own.setattr(dist, name, counted)
        yield found


def test_ranks_that_share_a_sequence_work_alike_and_send_little(monkeypatch):
    ranks, length, layers = 4, 64, 2
    products = []
    for rank in range(ranks):
        with fake_ranks(ranks, rank) as world:
            products.append(_counted(world, monkeypatch, length, layers))
    assert len(set(products)) == 1, "of each rank"
    # Of the whole sequence, each pair of tokens once.
    assert sum(products) == layers * length * (length + 1) // 2


def _mesh(world: World, *, deals_ends: bool = True) -> Mesh:
    ranks = world.world_size
    layout = make_layout(DDPStrategyConfig(cp_size=ranks), ranks, local_world_size=ranks)
    return make_mesh(layout, world, is_sharded=False, deals_ends=deals_ends)


def _counted(world: World, patch: pytest.MonkeyPatch, length: int, layers: int) -> int:
    mesh = _mesh(world)
    model = small_model(num_hidden_layers=layers)
    use_context_parallel_attention(model, mesh)
    part = localize(_batch(length, is_packed=False), mesh, model)
    with sent(patch) as forward, Attention() as attention:
        logits = model(**part.inputs, use_cache=False).logits
    with sent(patch) as backward:
        logits.sum().backward()
    assert all(isinstance(mask, CausalBias) for mask in attention.masks)
    config = model.config
    keys_and_values = 2 * B * length * config.num_key_value_heads * config.head_dim * 4
    assert forward.calls == [("all_gather_into_tensor", keys_and_values)] * layers
    assert backward.calls == [("reduce_scatter_tensor", keys_and_values)] * layers
    return attention.products


@pytest.mark.parametrize("deals_ends", [True, False])
def test_ranks_that_share_a_sequence_get_boundaries_that_a_kernel_accepts(deals_ends):
    """And no mask, whose numbers grow with the square of the sequence."""
    ranks, length = 4, 64
    batch = _batch(length, is_packed=True)
    longest = int(batch.cu_seqlens_N.diff().max())  # type: ignore[union-attr]
    for rank in range(ranks):
        with fake_ranks(ranks, rank) as world:
            mesh, model = _mesh(world, deals_ends=deals_ends), small_model()
            use_context_parallel_attention(model, mesh, device=torch.device("cpu"))
            inputs = localize(batch, mesh, model).inputs
            use_context_parallel_attention(model, mesh)
            mask = localize(batch, mesh, model).inputs["attention_mask"]
        assert mask.numel() == B * length * (length // ranks if deals_ends else length)
        assert sum(x.numel() for x in inputs.values() if isinstance(x, Tensor) and x.ndim > 2) == 0
        tokens = length // ranks // 2 if deals_ends else length
        for name, own, most in (("q", tokens, min(longest, tokens)), ("k", length, longest)):
            starts = inputs[f"cu_seq_lens_{name}"].view(2 if deals_ends else 1, -1)
            assert starts.dtype == torch.int32
            assert (starts[:, 0] == 0).all() and (starts[:, -1] == B * own).all()
            lengths = starts.diff()
            assert lengths.min() >= 0 and lengths.max() <= inputs[f"max_length_{name}"]
            assert inputs[f"max_length_{name}"] < 2 * most
