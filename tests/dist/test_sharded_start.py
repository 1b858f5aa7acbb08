"""How a model is cut and filled where that is out of the ordinary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from isles.config.layout import Layout
from isles.config.sections.strategy import FSDPStrategyConfig
from isles.dist.world import join_world
from isles.errors import ExitCode
from isles.run.env import RankEnv
from isles.run.records import read_record
from isles.train.strategy import resolve_mesh
from tests.dist.test_same_mathematics import largest_difference
from tests.ranks import run_ranks, start_training, train_to_end


@pytest.mark.long
def test_blocks_within_blocks_are_cut_too(run_file: Path) -> None:
    names = "[LlamaDecoderLayer, LlamaMLP]"
    strategy = f"strategy={{kind: fsdp, transformer_layer_cls_to_wrap: {names}}}"
    reference, code = train_to_end(run_file, 1)
    assert code == 0
    run_dir, code = train_to_end(run_file, 2, strategy, resume="no")
    assert code == 0
    assert largest_difference(reference, run_dir) < 1e-5


def _layout_on_unequal_nodes(env: RankEnv, sizes: list[int]) -> Layout:
    env = replace(env, local_world_size=sizes[env.rank])
    world = join_world(env, device="cpu", timeout_s=60)
    return resolve_mesh(FSDPStrategyConfig(sharding_strategy="HYBRID_SHARD"), world).layout


@pytest.mark.parametrize(
    ("sizes", "shard"), [([2, 2, 1, 1], 1), ([2, 2, 2, 2], 2), ([4, 4, 4, 4], 4)]
)
def test_ranks_of_unequal_nodes_make_the_same_groups(sizes: list[int], shard: int) -> None:
    layouts = run_ranks(_layout_on_unequal_nodes, 4, sizes)
    assert {layout.dp_shard for layout in layouts} == {shard}


@pytest.fixture
def quantized(run_file: Path) -> Path:
    """A run file for a model of which one matrix is fp8, with a scale in a tensor of its own."""
    folder = run_file.parent / "quantized"
    config = AutoConfig.from_pretrained(run_file.parent / "tiny")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = (weights[name] * 1000).to(torch.float8_e4m3fn)
    weights[f"{name}_scale_inv"] = torch.tensor([[0.001]])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    content = yaml.safe_load(run_file.read_text())
    content |= {"model": {"name_or_path": str(folder), "init": "pretrained"}, "tokenizer": {}}
    content["data"] = {"sources": [{"type": "fake"}], "seq_length": 32}
    run_file.write_text(yaml.safe_dump(content))
    return run_file


@pytest.mark.parametrize("strategy", ["{kind: ddp}", "{kind: fsdp}", "{kind: ddp, pp_size: 2}"])
def test_weights_without_a_place_are_refused(quantized: Path, strategy: str) -> None:
    """Read as they are, without their scales, they would be nonsense."""
    _, attempt, gang = start_training(quantized, 2, f"strategy={strategy}")
    assert set(gang.wait()) == {ExitCode.USER}
    error = read_record(attempt.rank_error(0)) or {}
    assert "up_proj.weight_scale_inv" in error["what"]
