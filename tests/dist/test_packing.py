"""Packed training is unpacked training: the same weights, whatever shares a sample."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from isles.config.sections.data import DataConfig, SourceConfig
from isles.config.sections.model import ModelConfig
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import DDPStrategyConfig, FSDPStrategyConfig
from isles.config.sections.training import TrainingConfig
from isles.data import builders
from isles.data.builders import Ranges
from isles.data.loader import Loader
from isles.data.mix import Dataset
from isles.data.order import SampleOrder
from isles.data.tokens.store import TokenStore
from isles.dist.batch import Batch, cu_seqlens, isolation_inputs
from isles.dist.split import even_split
from isles.dist.world import World, join_world, leave_world
from isles.facts.models import ISOLATED
from isles.models.attention import use_maskless_attention
from isles.models.build import (
    build_empty_model,
    build_model,
    fill_model,
    set_gradient_checkpointing,
)
from isles.run.env import RankEnv
from isles.strategies.sequence import whole
from isles.train.optimizer import make_optimizers
from isles.train.strategy import (
    is_sharded,
    make_engine,
    needs_fixed_length,
    resolve_mesh,
    runs_in_step,
    use_attention,
)
from tests.each import each
from tests.ranks import run_ranks
from tests.unit.test_no_sync import ReadsToHost

SEQ_LENGTH = 48
STEPS = 3

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **COMMON},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 96,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    },
    "mistral": {"model_type": "mistral", **COMMON, "sliding_window": 7},
    "gemma3_text": {
        "model_type": "gemma3_text",
        **COMMON,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def chats() -> TokenStore:
    """Conversations of very different lengths, trained in part, some longer than a sample."""
    rng = np.random.default_rng(0)
    lengths = [*rng.integers(3, 30, 36).tolist(), 49, 60, 80]
    ends = np.cumsum(lengths)
    tokens = rng.integers(3, 96, ends[-1]).astype(np.uint16)
    trained = rng.random(ends[-1]) < 0.6
    return TokenStore(Path("nowhere"), "chats", tokens, ends, 2, 95, trained, "chat")


def train(
    world: World, folder: Path, strategy: Any, keys: dict[str, Any], *, packs: bool, isolates: bool
) -> tuple[dict[str, Tensor], list[float]]:
    """Some steps over all conversations each: the weights, and the loss of each step."""
    config = RunConfig(
        model=ModelConfig(
            name_or_path=str(folder), init="scratch", attn_implementation=keys.get("attn", "sdpa")
        ),
        data=DataConfig(sources=(SourceConfig(type="fake"),), seq_length=SEQ_LENGTH),
        training=TrainingConfig(
            max_steps=STEPS,
            optimizer="sgd",
            precision="32-true",
            weight_decay=0.0,
            gradient_checkpointing=keys.get("checkpointing", "none"),
        ),
        strategy=strategy,
    )
    store = chats()
    ends = np.asarray(store.document_ends)
    part = builders.whole(
        store,
        Ranges(np.concatenate([[0], ends[:-1]]), ends),
        SEQ_LENGTH,
        packs=packs,
        isolates=isolates,
        too_long="truncate",
    )
    dataset = Dataset(
        [part],
        SampleOrder([part.num_samples], None, 0),
        SEQ_LENGTH,
        trims=not needs_fixed_length(config),
    )
    mesh = resolve_mesh(strategy, world)
    if is_sharded(strategy):
        model = build_empty_model(config.model, dtype=torch.float32, vocab_size=None)
    else:
        model = build_model(
            config.model, device=world.device, dtype=torch.float32, seed=0, vocab_size=None
        )
    set_gradient_checkpointing(model, config.training.gradient_checkpointing)
    use_attention(model, strategy, mesh, world.device, config.training)
    fill = functools.partial(fill_model, config=config.model, seed=0)
    optimizers = functools.partial(make_optimizers, config.training)
    engine = make_engine(strategy, model, fill, optimizers, mesh, world, config)
    split = even_split(part.num_samples, mesh.dp_size, 4, in_step=runs_in_step(strategy))
    loader = Loader(dataset, split=split, dp_rank=mesh.dp_rank, device=world.device)
    losses, samples = [], 0
    for _ in range(STEPS):
        step = loader.step(samples)
        total = torch.zeros(())
        for index, batch in enumerate(step.micro_batches):
            is_last = index == len(step.micro_batches) - 1
            total += engine.forward_backward(batch, loss_divisor=step.loss_divisor, is_last=is_last)
        engine.optimizer_step(lr=0.3, max_norm=None)
        losses.append(sum(world.gather(float(total))) / step.loss_divisor)
        samples = step.next_sample
    loader.close()
    # A pipeline's ranks have different weights, and each is somewhere.
    mine = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in engine.state_dict().items()
        if isinstance(value, Tensor) and name.startswith("model.")
    }
    every: dict[str, Tensor] = {}
    for other in world.gather(mine):
        every |= other
    return every, losses


def compare(
    env: RankEnv, folder: Path, strategy: Any, keys: dict[str, Any]
) -> tuple[float, float, float]:
    """How far packed training is from unpacked, with documents apart and not; and how far it goes.

    The largest difference of a weight, relative to the largest weight of its tensor.
    """
    world = join_world(env, device="cpu", timeout_s=60)
    try:
        run = functools.partial(train, world, folder)
        unpacked, losses = run(DDPStrategyConfig(), {}, packs=False, isolates=False)
        packed, packed_losses = run(strategy, keys, packs=True, isolates=True)
        leaking, _ = run(DDPStrategyConfig(), {}, packs=True, isolates=False)
    finally:
        leave_world()
    assert packed.keys() == unpacked.keys() and len(packed) > 10
    assert packed_losses == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < losses[0] - 0.01
    return distance(packed, unpacked), distance(leaking, unpacked), losses[0] - losses[-1]


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(
        float((one[name] - other[name]).abs().max() / other[name].abs().max()) for name in other
    )


def make_folder(tmp_path: Path, model: str) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    return tmp_path


@pytest.mark.brief("llama-", "gemma3_text-")
@pytest.mark.parametrize(
    ("model", "keys"),
    [
        ("llama", {}),
        ("llama", {"attn": "eager"}),
        ("llama", {"checkpointing": "full"}),
        ("gpt2", {}),
        ("mistral", {}),
        ("gemma3_text", {}),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else value,
)
def test_packed_training_is_unpacked_training(
    tmp_path: Path, model: str, keys: dict[str, Any]
) -> None:
    env = RankEnv(0, 0, 1, 1, 0, None)
    folder = make_folder(tmp_path, model)
    apart, leaking, _ = compare(env, folder, DDPStrategyConfig(), keys)
    assert apart < 1e-5
    assert leaking > 1e-3, "documents that see each other would be told"


@pytest.mark.brief("fsdp")
@pytest.mark.parametrize(
    "strategy",
    [
        FSDPStrategyConfig(),
        FSDPStrategyConfig(cp_size=2),
        FSDPStrategyConfig(cp_size=2, cp_method="ulysses"),
        FSDPStrategyConfig(pp_size=2),
    ],
    ids=["fsdp", "allgather", "ulysses", "pipeline"],
)
def test_packed_training_is_unpacked_training_over_ranks(tmp_path: Path, strategy: Any) -> None:
    for apart, leaking, _ in run_ranks(compare, 2, make_folder(tmp_path, "llama"), strategy, {}):
        assert apart < 1e-5
        assert leaking > 1e-3


def tiny(kind: str) -> Any:
    """A model of a kind with few and small layers, whose windows are shorter than a document."""
    known = AutoConfig.for_model(kind).to_dict()
    kinds = list(dict.fromkeys(known.get("layer_types") or ["full_attention"]))
    small = {
        **COMMON,
        "sliding_window": 4,
        "layer_types": (kinds * 2)[: max(2, len(kinds))],
        **dict.fromkeys(("n_embd", "d_model", "word_embed_proj_dim"), 32),
        **dict.fromkeys(("n_inner", "ffn_dim"), 64),
        **dict.fromkeys(("n_layer", "n_layers", "num_layers"), 2),
        **dict.fromkeys(("n_head", "n_heads", "attention_heads"), 4),
        **dict.fromkeys(("n_positions", "n_ctx", "max_seq_len"), 64),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
        **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
        **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
        **dict.fromkeys(("rotary_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
        **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    }
    if "qk_nope_head_dim" in known:
        del small["head_dim"]
        small["num_key_value_heads"] = 4
    dropouts = {name: 0.0 for name, value in known.items() if "drop" in name and value}
    unset = {name for name in ("sliding_window", "layer_types") if known.get(name) is None}
    sizes = {name: small[name] for name in small.keys() & known.keys() - unset}
    if "text_config" in known:
        sizes = {"text_config": {**sizes, **small}, "vision_config": {"num_hidden_layers": 1}}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes, **dropouts)
    try:
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    except ValueError:
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@each("kind", sorted(ISOLATED))
def test_documents_of_a_row_are_as_if_alone(kind: str) -> None:
    """Every kind of model that is let through."""
    model = tiny(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)  # so that attention matters
        use_maskless_attention(model, device=torch.device("cpu"))
        documents = [(7, 5, 4), (3, 9, 4)]
        ids = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(1))
        positions = torch.tensor([[i for n in row for i in range(n)] for row in documents])
        # Document by document where the model lets us, and by a mask.
        packed = [
            model(input_ids=ids, **isolation_inputs(model, positions, ends), use_cache=False).logits
            for ends in (cu_seqlens(positions), None)
        ]
        joined = model(input_ids=ids, use_cache=False).logits
        leaks = []
        for row, lengths in enumerate(documents):
            for piece in torch.arange(16).split(lengths):
                alone = model(input_ids=ids[row : row + 1, piece], use_cache=False).logits[0]
                scale = float(alone.abs().max())
                for logits in packed:
                    assert (logits[row, piece] - alone).abs().max() < 2e-5 * scale
                leaks.append(float((joined[row, piece] - alone).abs().max()) / scale)
    assert max(leaks) > 0.05, "seeing the documents before would be told"


def test_a_packed_step_reads_nothing_back(tmp_path: Path) -> None:
    """The mask is made on the device: no number comes to the host, as a GPU would be waited for."""
    world = join_world(RankEnv(0, 0, 1, 1, 0, None), device="cpu", timeout_s=10)
    try:
        config = ModelConfig(name_or_path=str(make_folder(tmp_path, "llama")), init="scratch")
        model = build_model(
            config, device=world.device, dtype=torch.float32, seed=0, vocab_size=None
        )
        assert use_maskless_attention(model)
        positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])
        batch = Batch(positions, positions, (0,), position_ids_BT=positions)
        with ReadsToHost() as reads:
            part = whole(batch, model)
            model(**part.inputs, use_cache=False).logits.sum().backward()
        assert reads.count == 0
        model.set_attn_implementation("sdpa")
        with ReadsToHost() as reads:
            model(input_ids=positions, position_ids=positions, use_cache=False)
        assert reads.count > 0, "the counter sees what it should see"
    finally:
        leave_world()
