"""Models: where their weights come from, what is refused, gradient checkpointing, attention."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from isles.config.sections.model import ModelConfig
from isles.errors import UserError
from isles.facts.memory.architecture import Architecture
from isles.facts.models import load_shape, shape_names
from isles.models import attention
from isles.models.attention import use_maskless_attention
from isles.models.build import (
    build_empty_model,
    build_model,
    fill_model,
    set_gradient_checkpointing,
)
from isles.models.fill import NotCoveredError, fill_fresh, weights_folder
from isles.strategies.fsdp import find_blocks
from tests.each import each
from tests.small_models import small_model

CPU = torch.device("cpu")


def whole(name: Path | str, init: Any = "scratch", seed: int = 0) -> Any:
    config = ModelConfig(name_or_path=str(name), init=init)
    return build_model(config, device=CPU, dtype=torch.float32, seed=seed, vocab_size=None)


def empty(name: Path | str, init: Any = "scratch") -> Any:
    config = ModelConfig(name_or_path=str(name), init=init)
    return build_empty_model(config, dtype=torch.float32, vocab_size=None)


def cut(name: Path | str, init: Any = "scratch", seed: int = 0) -> Any:
    """Built empty, allocated, and filled, as strategies do that cut the model."""
    model = empty(name, init)
    model.to_empty(device=CPU)
    model.tie_weights()
    fill_model(model, ModelConfig(name_or_path=str(name), init=init), seed=seed)
    return model


Build = Callable[..., Any]
WAYS = [whole, cut]


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether all tensors are equal, the constants that no file holds too."""
    left = dict(one.named_parameters()) | dict(one.named_buffers())
    right = dict(other.named_parameters()) | dict(other.named_buffers())
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def test_shapes_have_the_sizes_that_their_names_say() -> None:
    assert shape_names() == ("llama-2m", "llama-15m", "llama-150m", "llama-1b", "llama-8b")
    sizes = {name: Architecture.of(load_shape(name)).params for name in shape_names()}
    assert sizes["llama-1b"] == 1_235_814_400, "as published for Llama-3.2-1B"
    assert sizes["llama-8b"] == 8_030_261_248, "as published for Llama-3-8B"
    for name, size in sizes.items():
        unit = {"m": 10**6, "b": 10**9}[name[-1]]
        assert abs(size / (int(name.split("-")[1][:-1]) * unit) - 1) < 0.25
    with pytest.raises(KeyError):
        load_shape("../units")
    assert sizes["llama-2m"] == sum(p.numel() for p in empty("llama-2m").parameters())


def test_fresh_weights_depend_on_the_seed_alone(tiny_model: Path) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    model = cut(tiny_model)
    assert torch.equal(torch.get_rng_state(), state), "nobody else's random numbers are used up"
    assert same(model, whole(tiny_model))
    assert not same(model, cut(tiny_model, seed=1))


@each("kind", ["llama", "qwen3", "gemma", "gpt_neox", "gpt2", "mixtral", "phi3", "opt"])
def test_fresh_weights_are_spread_as_transformers_spreads_them(kind: str) -> None:
    """GPT-2 sets some in its blocks: residual projections are smaller, by the number of layers."""
    wide = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "n_embd": 64, "n_layer": 4}
    real = small_model(kind, **wide)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(real.config)
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


def test_a_model_that_initialises_elsewhere_is_named(tiny_model: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(3))

    model = empty(tiny_model)
    model.odd = Odd()
    model.to_empty(device=CPU)
    with pytest.raises(NotCoveredError, match=r"odd\.scale"):
        fill_fresh(model, 0)
    with pytest.raises(UserError, match=r"odd\.scale") as raised:
        fill_model(model, ModelConfig(name_or_path=str(tiny_model), init="scratch"), seed=0)
    assert "ddp" in raised.value.fix


@each("way", WAYS)
@each(("tied", "prefix"), [(False, "model."), (True, "model."), (True, "")])
def test_pretrained_weights_are_those_of_the_files(
    tiny_model: Path, tmp_path: Path, way: Build, tied: bool, prefix: str
) -> None:
    """In several files, and under the names of the bare model, which has no head."""
    change_config(tiny_model, tie_word_embeddings=tied)
    model, folder = cut(tiny_model, seed=3), tmp_path / "saved"
    model.save_pretrained(folder, max_shard_size="40KB" if prefix else "1GB")
    if not prefix:
        file = folder / "model.safetensors"
        renamed = {k.removeprefix("model."): v for k, v in load_file(file).items()}
        save_file(renamed, file, metadata={"format": "pt"})
    assert (len(list(folder.glob("*.safetensors"))) > 1) == bool(prefix)
    assert same(way(folder, init="pretrained", seed=5), model)


@each("way", WAYS)
@each(
    ("fault", "what"),
    [
        ("missing", "up_proj.weight"),
        ("left over", "up_proj.bias"),
        ("shape", "up_proj.weight"),
        ("torn", ""),
        ("none", ""),
    ],
)
def test_weights_that_do_not_fit_are_named(
    tiny_model: Path, tmp_path: Path, way: Build, fault: str, what: str
) -> None:
    folder = tmp_path / "saved"
    cut(tiny_model).save_pretrained(folder)
    file, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj"
    tensors = load_file(file)
    if fault == "missing":
        del tensors[f"{name}.weight"]
    elif fault == "left over":
        tensors[f"{name}.bias"] = torch.zeros(64)
    elif fault == "shape":
        tensors[f"{name}.weight"] = torch.zeros(3, 4)
    save_file(tensors, file, metadata={"format": "pt"})
    if fault == "torn":
        file.write_bytes(file.read_bytes()[:-100])
    elif fault == "none":
        file.unlink()
    with pytest.raises(UserError) as raised:
        way(folder, init="pretrained")
    assert raised.value.where == "model.name_or_path" and raised.value.fix
    assert what in raised.value.what


@each("way", WAYS)
def test_pickled_weights_are_refused(tiny_model: Path, tmp_path: Path, way: Build) -> None:
    """Also those that torch would read."""
    model, folder = cut(tiny_model), tmp_path / "pickled"
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="safetensors"):
        way(folder, init="pretrained")


@each("name", ["./nowhere", "/nowhere/at/all", "no-such-model"])
def test_unknown_model(name: str) -> None:
    with pytest.raises(UserError) as caught:
        whole(name, init="pretrained")
    assert name in str(caught.value)
    assert caught.value.fix


def test_a_model_that_was_moved_away_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder") as caught:
        weights_folder(str(tmp_path / "away"))
    assert str(tmp_path / "away") in str(caught.value) and "put the model back" in str(caught.value)


def test_remote_code_is_not_run_unless_asked(tmp_path: Path) -> None:
    folder = tmp_path / "remote"
    folder.mkdir()
    marker = tmp_path / "it-ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Config: pass\n")
    auto = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto}))
    with pytest.raises(UserError, match="trust_remote_code"):
        whole(folder)
    assert not marker.exists()


def test_blocks_are_found_or_named(tiny_model: Path) -> None:
    model = empty(tiny_model)
    blocks = list(model.model.layers)
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


@each("kind", ["full", "selective"])
def test_gradient_checkpointing_changes_no_gradient(tiny_model: Path, kind: str) -> None:
    """And, where all is recomputed, keeps less from the forward pass for the backward pass."""

    def train(model: nn.Module) -> tuple[list[torch.Tensor], int]:
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        ids = torch.arange(256).reshape(4, 64)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(input_ids=ids, use_cache=False).logits.square().mean()
        size = sum(kept.values())
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None], size

    plain, recomputing = whole(tiny_model), whole(tiny_model)
    set_gradient_checkpointing(recomputing, kind)
    (expected, all_bytes), (found, fewer_bytes) = train(plain), train(recomputing)
    assert len(expected) == len(found) > 10
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(expected, found, strict=True))
    if kind == "full":  # what selective keeps goes past these hooks
        assert fewer_bytes < 0.5 * all_bytes


def test_attention_without_a_mask_is_the_same_function(tiny_model: Path) -> None:
    usual, maskless = whole(tiny_model), whole(tiny_model)
    assert use_maskless_attention(maskless)
    ids = torch.randint(0, 512, (3, 40), generator=torch.Generator().manual_seed(0))
    assert torch.equal(usual(ids, use_cache=False).logits, maskless(ids, use_cache=False).logits)


def test_sliding_windows_keep_their_masks(tiny_model: Path) -> None:
    change_config(tiny_model, model_type="mistral", sliding_window=4)
    assert not use_maskless_attention(empty(tiny_model))


def test_the_kernel_for_documents_gets_what_it_takes_under_autocast() -> None:
    """Rotary embeddings give queries and keys in fp32, and autocast does not know the kernel."""
    seen: list[torch.dtype] = []

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if str(func).startswith("torch_attn._varlen_attn."):
                seen.extend(x.dtype for x in args[:3])
            return func(*args, **(kwargs or {}))

    enabled = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)  # torch.autocast would not, where there is no GPU
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with FakeTensorMode(), Sees(), torch.no_grad():
            on_gpu = functools.partial(torch.empty, device="cuda")
            query, key = on_gpu((1, 4, 8, 16)), on_gpu((1, 2, 8, 16))
            value = on_gpu((1, 2, 8, 16), dtype=torch.bfloat16)
            ends = {"cu_seq_lens_q": on_gpu((3,), dtype=torch.int32), "max_length_q": 8}
            out, _ = attention._attend(None, query, key, value, None, **ends)
    finally:
        torch.set_autocast_enabled("cuda", enabled)
        torch.set_autocast_dtype("cuda", torch.float16)
    assert out.shape == (1, 8, 4, 16)
    assert seen == [torch.bfloat16] * 3
