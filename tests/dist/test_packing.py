"""Packed training is unpacked training: the same weights, whatever shares a sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from isles.data.tokens.tokenizer import train_tokenizer
from isles.dist.batch import Batch, cu_seqlens, isolation_inputs
from isles.facts.models import ISOLATED, WINDOWED
from isles.models.attention import use_maskless_attention
from isles.run.paths import RunDir
from isles.run.records import read_rows
from isles.strategies.sequence import whole
from tests.data import write_rows
from tests.dist.test_same_mathematics import largest_difference
from tests.each import each
from tests.engines import ReadsToHost
from tests.ranks import train
from tests.small_models import SIZES, small_config, small_model

SEQ_LENGTH = 48
WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0},
    "mistral": {"sliding_window": 7},
    "gemma3_text": WINDOWS,
}
PLACES = [*(n for small in range(4, 20) for n in (small, SEQ_LENGTH - small)), 20, 50, 60, 80]
"""Of each conversation. Two fill a sample exactly; then one leaves padding, and three are cut."""
UNPACKED, PACKED = len(PLACES), 20
"""Samples, all of which make one step."""


def write_run(run_file: Path, kind: str) -> Path:
    """Let the run file train such a model on conversations of which a part is trained."""
    rng, folder = np.random.default_rng(0), run_file.parent
    rows = []
    for places in PLACES:
        ids = rng.integers(3, 260, places + 1)
        labels = np.where(rng.random(places + 1) < 0.6, ids, -100)
        labels[1] = ids[1]
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    small_config(kind, vocab_size=320, **MODELS[kind]).save_pretrained(folder / "tiny")
    train_tokenizer(["some words"], 260).save_pretrained(folder / "tiny")
    sources = [{"path": str(write_rows(folder / "a.jsonl", rows)), "type": "tokens"}]
    content = yaml.safe_load(run_file.read_text())
    del content["tokenizer"]
    content["data"] = {"sources": sources, "seq_length": SEQ_LENGTH, "validation_fraction": 0}
    content["training"] |= {"max_steps": 3, "optimizer": "sgd", "learning_rate": 0.3}
    content["training"] |= {"warmup_steps": 0, "lr_scheduler_type": "constant", "weight_decay": 0.0}
    content["training"] |= {"max_grad_norm": None, "micro_batch_size": 2, "logging_steps": 1}
    run_file.write_text(yaml.safe_dump(content))
    return run_file


def trained(run_file: Path, ranks: int, samples: int, *options: str) -> RunDir:
    size = f"training.global_batch_size={samples}"
    return train(run_file, ranks, size, *options, resume="no")


def losses(run_dir: RunDir) -> list[float]:
    found = [row["loss"] for row in read_rows(run_dir.metrics) if row["kind"] == "train"]
    assert len(found) == 3 and found[-1] < found[0] - 0.01
    return found


@pytest.mark.brief("llama", "gemma3_text")
@pytest.mark.parametrize("kind", MODELS)
def test_packed_training_is_unpacked_training(run_file, kind):
    write_run(run_file, kind)
    unpacked = trained(run_file, 1, UNPACKED, "data.packing=false")
    packed = trained(run_file, 2, PACKED, "strategy.kind=fsdp")
    assert largest_difference(packed, unpacked) < 1e-5
    assert losses(packed) == pytest.approx(losses(unpacked), rel=1e-5)
    leaking = trained(run_file, 1, PACKED, "data.isolate_documents=false")
    assert largest_difference(leaking, unpacked) > 1e-3, "documents that see each other are told"


WAYS = [
    (1, "model.attn_implementation=eager"),
    (1, "training.gradient_checkpointing=full"),
    (2, "strategy={kind: fsdp, cp_size: 2}"),
    (2, "strategy={kind: fsdp, cp_size: 2, cp_method: ulysses}"),
    (2, "strategy={kind: fsdp, pp_size: 2}"),
]


@pytest.mark.long
def test_packed_training_is_the_same_in_every_way(run_file):
    write_run(run_file, "llama")
    unpacked = trained(run_file, 1, UNPACKED, "data.packing=false")
    for ranks, option in WAYS:
        packed = trained(run_file, ranks, PACKED, option)
        assert largest_difference(packed, unpacked) < 1e-5, option


def tiny(kind: str) -> Any:
    """A model of a kind with few and small layers, whose windows are shorter than a document."""
    known = AutoConfig.for_model(kind).to_dict()
    kinds = list(dict.fromkeys(known.get("layer_types") or ["full_attention"]))
    small = {
        **SIZES,
        "vocab_size": 320,
        "sliding_window": 4,
        "layer_types": (kinds * 2)[: max(2, len(kinds))],
        **dict.fromkeys(("d_model", "word_embed_proj_dim"), 32),
        **dict.fromkeys(("n_inner", "ffn_dim"), 64),
        **dict.fromkeys(("n_layers", "num_layers"), 2),
        **dict.fromkeys(("n_heads", "attention_heads", "n_routed_experts"), 4),
        **dict.fromkeys(("n_ctx", "max_seq_len"), 64),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
        **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
        **dict.fromkeys(("rotary_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
        **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
        "moe_topk": 2,
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


@each(*sorted(ISOLATED))
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


@each(*sorted(WINDOWED))
def test_sliding_windows_are_those_of_transformers(kind: str) -> None:
    """With and without documents in a row: without its masks, and with masks of ours."""
    layers = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
    model = small_model(kind, **layers, vocab_size=96, sliding_window=4, max_window_layers=1)
    model.eval()
    ids = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[i for n in row for i in range(n)] for row in [(7, 9), (3, 13)]])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)  # so that attention matters
        wanted = [model(input_ids=ids, use_cache=False).logits]
        wanted.append(model(input_ids=ids, position_ids=positions, use_cache=False).logits)
        assert not use_maskless_attention(model), "without a kernel it keeps its masks"
        assert use_maskless_attention(model, device=torch.device("cpu"))
        with ReadsToHost() as reads:
            found = model(input_ids=ids, use_cache=False).logits
        assert reads.count == 0
        assert (found - wanted[0]).abs().max() < 2e-5 * wanted[0].abs().max()
        for ends in (cu_seqlens(positions), None):
            inputs = isolation_inputs(model, positions, ends)
            assert ("attention_mask" in inputs) == (ends is None)
            found = model(input_ids=ids, **inputs, use_cache=False).logits
            assert (found - wanted[1]).abs().max() < 2e-5 * wanted[1].abs().max()


def test_a_packed_step_reads_nothing_back():
    """The mask is made on the device: no number comes to the host, as a GPU would be waited for."""
    model = small_model()
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
