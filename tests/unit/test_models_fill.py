"""Weights for models that were built without any: fresh, or from safetensors, part by part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config

from isles.config.sections.model import ModelConfig
from isles.errors import UserError
from isles.models.build import build_empty_model, build_model, fill_model
from isles.models.fill import NotCoveredError, fill_fresh, weights_folder
from isles.strategies.fsdp import find_blocks
from tests.each import each

CPU = torch.device("cpu")


def config_of(folder: Path, init: str) -> ModelConfig:
    """Of a folder's model."""
    return ModelConfig(name_or_path=str(folder), init=init)  # type: ignore[arg-type]


def filled(config: ModelConfig, seed: int = 0) -> nn.Module:
    """Built empty, allocated, and filled."""
    model = build_empty_model(config, dtype=torch.float32, vocab_size=None)
    model.to_empty(device=CPU)
    model.tie_weights()  # type: ignore[operator]
    fill_model(model, config, seed=seed)
    return model


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether all tensors are equal, the constants that no file holds too."""
    left = dict(one.named_parameters()) | dict(one.named_buffers())
    right = dict(other.named_parameters()) | dict(other.named_buffers())
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def test_fresh_weights_depend_on_the_seed_alone(tiny_model: Path) -> None:
    config = config_of(tiny_model, "scratch")
    torch.manual_seed(5)
    state = torch.get_rng_state()
    model = filled(config)
    assert torch.equal(torch.get_rng_state(), state), "nobody else's random numbers are used up"
    whole = build_model(config, device=CPU, dtype=torch.float32, seed=0, vocab_size=None)
    assert same(model, whole)
    assert not same(model, filled(config, seed=1))


SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "num_local_experts": 4,
    "num_experts": 4,
    "max_position_embeddings": 64,
}


@each("kind", ["llama", "qwen3", "gemma", "gpt_neox", "mixtral", "phi3", "opt"])
def test_fresh_weights_are_spread_as_transformers_spreads_them(kind: str) -> None:
    known = AutoConfig.for_model(kind).to_dict()
    config = AutoConfig.for_model(kind, **{k: v for k, v in SMALL.items() if k in known})
    real = AutoModelForCausalLM.from_config(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.to_empty(device="cpu")
    fill_fresh(model, 0)
    pairs = zip(model.state_dict().items(), real.state_dict().values(), strict=True)
    for (name, mine), theirs in pairs:
        if float(theirs.std()) == 0 or theirs.numel() < 500:
            assert float(mine.mean()) == pytest.approx(float(theirs.mean()), abs=0.02), name
        else:
            assert float(mine.std()) == pytest.approx(float(theirs.std()), rel=0.2), name
    for (name, mine), theirs in zip(model.named_buffers(), real.buffers(), strict=True):
        assert torch.equal(mine, theirs), name


def test_what_a_block_sets_in_its_children_is_set() -> None:
    """GPT-2 starts its residual projections smaller, by the number of layers."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GPT2Config(n_embd=64, n_layer=8, n_head=4))
    model.to_empty(device="cpu")
    fill_fresh(model, 0)
    weights = {name: float(value.std()) for name, value in model.state_dict().items()}
    assert weights["transformer.h.3.attn.c_proj.weight"] == pytest.approx(0.02 / 4, rel=0.1)
    assert weights["transformer.h.3.attn.c_attn.weight"] == pytest.approx(0.02, rel=0.1)


def test_a_model_that_initialises_elsewhere_is_named(tiny_model: Path) -> None:
    config = config_of(tiny_model, "scratch")
    model = build_empty_model(config, dtype=torch.float32, vocab_size=None)

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(3))

    model.odd = Odd()
    model.to_empty(device=CPU)
    with pytest.raises(NotCoveredError, match=r"odd\.scale"):
        fill_fresh(model, 0)
    with pytest.raises(UserError, match=r"odd\.scale") as raised:
        fill_model(model, config, seed=0)
    assert "ddp" in raised.value.fix


@pytest.mark.parametrize("tied", [False, True])
def test_pretrained_weights_come_from_safetensors(tiny_model: Path, tied: bool) -> None:
    path = tiny_model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": tied}))
    model = filled(config_of(tiny_model, "scratch"), seed=3)
    model.save_pretrained(tiny_model, max_shard_size="40KB")  # type: ignore[operator]
    assert len(list(tiny_model.glob("*.safetensors"))) > 1
    assert same(filled(config_of(tiny_model, "pretrained")), model)


def test_weights_without_the_head_s_prefix_are_found(tiny_model: Path) -> None:
    path = tiny_model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    model = filled(config_of(tiny_model, "scratch"), seed=3)
    model.save_pretrained(tiny_model)  # type: ignore[operator]
    file = tiny_model / "model.safetensors"
    save_file({k.removeprefix("model."): v for k, v in load_file(file).items()}, file)
    assert same(filled(config_of(tiny_model, "pretrained")), model)


@pytest.mark.parametrize("fault", ["missing", "shape", "torn", "none"])
def test_weights_that_do_not_fit_are_named(tiny_model: Path, fault: str) -> None:
    model = filled(config_of(tiny_model, "scratch"))
    model.save_pretrained(tiny_model)  # type: ignore[operator]
    file = tiny_model / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "missing":
        del tensors[name]
    if fault == "shape":
        tensors[name] = torch.zeros(3, 4)
    save_file(tensors, file)
    if fault == "torn":
        file.write_bytes(file.read_bytes()[:-100])
    if fault == "none":
        file.unlink()
    with pytest.raises(UserError) as raised:
        filled(config_of(tiny_model, "pretrained"))
    assert raised.value.where == "model.name_or_path"
    if fault in ("missing", "shape"):
        assert name in raised.value.what


def test_blocks_are_found_or_named(tiny_model: Path) -> None:
    model = build_empty_model(
        config_of(tiny_model, "scratch"), dtype=torch.float32, vocab_size=None
    )
    blocks = list(model.model.layers)  # type: ignore[union-attr, arg-type]
    assert find_blocks(model) == blocks
    assert find_blocks(model, ("MistralDecoderLayer", "LlamaDecoderLayer")) == blocks
    with pytest.raises(UserError, match="no module of class FooLayer") as raised:
        find_blocks(model, ("FooLayer",))
    assert "LlamaDecoderLayer" in raised.value.fix
    plain = nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    assert len(find_blocks(plain)) == 2
    with pytest.raises(UserError, match="cannot be found") as raised:
        find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    assert raised.value.where == "strategy.transformer_layer_cls_to_wrap"


def test_a_model_that_was_moved_away_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder") as caught:
        weights_folder(str(tmp_path / "away"))
    assert str(tmp_path / "away") in str(caught.value) and "put the model back" in str(caught.value)
