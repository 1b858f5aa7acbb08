"""Models: shapes, scratch, pretrained, gradient checkpointing."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from isles.config.sections.model import ModelConfig
from isles.errors import UserError
from isles.facts.models import llama_parameters, load_shape, shape_names
from isles.models import attention
from isles.models.attention import use_maskless_attention
from isles.models.build import build_model, set_gradient_checkpointing

CPU = torch.device("cpu")


def make(name: Path | str, init: Any = "scratch", seed: int = 0, vocab: int | None = None) -> Any:
    config = ModelConfig(name_or_path=str(name), init=init)
    return build_model(config, device=CPU, dtype=torch.float32, seed=seed, vocab_size=vocab)


def test_shapes_have_the_sizes_that_their_names_say() -> None:
    assert shape_names() == ("llama-2m", "llama-15m", "llama-150m", "llama-1b", "llama-8b")
    sizes = {name: llama_parameters(load_shape(name)) for name in shape_names()}
    assert sizes["llama-1b"] == 1_235_814_400, "as published for Llama-3.2-1B"
    assert sizes["llama-8b"] == 8_030_261_248, "as published for Llama-3-8B"
    for name, size in sizes.items():
        unit = {"m": 10**6, "b": 10**9}[name[-1]]
        assert abs(size / (int(name.split("-")[1][:-1]) * unit) - 1) < 0.25


def test_counted_parameters_are_those_of_the_built_model() -> None:
    model = make("llama-2m")
    assert sum(p.numel() for p in model.parameters()) == llama_parameters(load_shape("llama-2m"))


def test_same_seed_same_weights(tiny_model: Path) -> None:
    one, same, other = make(tiny_model), make(tiny_model), make(tiny_model, seed=1)
    pairs = list(zip(one.parameters(), same.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(next(one.parameters()), next(other.parameters()))


def test_pretrained_is_what_was_saved(tiny_model: Path, tmp_path: Path) -> None:
    model = make(tiny_model)
    model.save_pretrained(tmp_path / "saved")
    again = make(tmp_path / "saved", init="pretrained", seed=5)
    ids = torch.arange(10)[None]
    assert torch.equal(model.eval()(ids).logits, again.eval()(ids).logits)


def test_pickled_weights_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    model = make(tiny_model)
    folder = tmp_path / "pickled"
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickle"):
        make(folder, init="pretrained")


def test_missing_weights_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "part"
    model = make(tiny_model)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(UserError, match="lacks"):
        make(folder, init="pretrained")


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "no-such-model"])
def test_unknown_model(name: str) -> None:
    with pytest.raises(UserError) as caught:
        make(name, init="pretrained")
    assert name in str(caught.value)
    assert caught.value.fix


def test_remote_code_is_not_run_unless_asked(tmp_path: Path) -> None:
    folder = tmp_path / "remote"
    folder.mkdir()
    marker = tmp_path / "it-ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Config: pass\n")
    auto = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto}))
    with pytest.raises(UserError, match="trust_remote_code"):
        make(folder)
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_gradient_checkpointing_changes_no_gradient(tiny_model: Path, kind: str) -> None:
    def gradients(model: nn.Module) -> list[torch.Tensor]:
        ids = torch.arange(40).reshape(2, 20)
        model(input_ids=ids, use_cache=False).logits.square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain, recomputing = make(tiny_model), make(tiny_model)
    set_gradient_checkpointing(recomputing, kind)
    expected, found = gradients(plain), gradients(recomputing)
    assert len(expected) == len(found) > 10
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(expected, found, strict=True))


def saved_bytes(model: nn.Module) -> int:
    """Bytes that the forward pass keeps for the backward pass."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=torch.arange(256).reshape(4, 64), use_cache=False).logits.sum()
    return sum(kept.values())


def test_full_checkpointing_keeps_least(tiny_model: Path) -> None:
    sizes = {}
    for kind in ("none", "full"):
        model = make(tiny_model)
        set_gradient_checkpointing(model, kind)
        sizes[kind] = saved_bytes(model)
    assert sizes["full"] < 0.5 * sizes["none"]


def test_attention_without_a_mask_is_the_same_function(tiny_model: Path) -> None:
    usual, maskless = make(tiny_model), make(tiny_model)
    assert use_maskless_attention(maskless)
    ids = torch.randint(0, 512, (3, 40), generator=torch.Generator().manual_seed(0))
    assert torch.equal(usual(ids, use_cache=False).logits, maskless(ids, use_cache=False).logits)


def test_sliding_windows_keep_their_masks(tmp_path: Path) -> None:
    config = {"model_type": "mistral", "hidden_size": 32, "intermediate_size": 64, "vocab_size": 99}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 4}))
    assert not use_maskless_attention(make(tmp_path))


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

    attend = functools.partial(attention._attend, None, attention_mask=None, max_length_q=8)
    shape = {"q": (1, 4, 8, 16), "kv": (1, 2, 8, 16)}
    enabled = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)  # torch.autocast would not, where there is no GPU
    try:
        with FakeTensorMode(), Sees(), torch.no_grad():
            on_gpu = functools.partial(torch.empty, device="cuda")
            query, key = on_gpu(shape["q"]), on_gpu(shape["kv"])
            value = on_gpu(shape["kv"], dtype=torch.bfloat16)
            ends = on_gpu((3,), dtype=torch.int32)
            torch.set_autocast_dtype("cuda", torch.bfloat16)
            out, _ = attend(query, key, value, cu_seq_lens_q=ends)
    finally:
        torch.set_autocast_enabled("cuda", enabled)
        torch.set_autocast_dtype("cuda", torch.float16)
    assert out.shape == (1, 8, 4, 16)
    assert seen == [torch.bfloat16] * 3
