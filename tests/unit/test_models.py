"""Models and adapters: their weights, what is refused, gradient checkpointing, attention."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from isles.config.auto import Resources, choose_strategy, needed_bytes
from isles.config.layout import make_layout
from isles.config.roofline import Links
from isles.config.sections.data import DataConfig
from isles.config.sections.model import AdapterConfig, ModelConfig
from isles.config.sections.strategy import DDPStrategyConfig
from isles.config.sections.training import TrainingConfig
from isles.errors import MissingDependencyError, UserError
from isles.facts.cost import train_flops_per_token
from isles.facts.memory.architecture import Architecture
from isles.facts.models import load_shape, shape_names
from isles.models import attention, build
from isles.models.adapter import base_name, frozen_dtype
from isles.models.attention import use_maskless_attention
from isles.models.fill import fill_fresh, weights_folder
from isles.models.recompute import set_gradient_checkpointing
from isles.run.checkpoints import CheckpointInfo
from isles.run.manifest import Manifest
from isles.strategies.fsdp import find_blocks
from isles.train.data import data_cache
from isles.train.model import base_files, base_of, count_parameters, flops_per_token, with_base
from isles.train.optimizer.make import make_optimizers
from isles.train.probe import standing_bytes
from isles.train.strategy import check_is_read_whole
from tests.each import each
from tests.engines import fake_run
from tests.small_models import small_model

LORA = AdapterConfig(type="lora")
CPU = torch.device("cpu")


def whole(name: Path | str, init: Any = "scratch", seed: int = 0, **options: Any) -> Any:
    config = ModelConfig(name_or_path=str(name), init=init)
    options |= {"device": CPU, "dtype": torch.float32, "vocab_size": None}
    return build.build_model(config, seed=seed, **options)


def empty(name: Path | str, init: Any = "scratch", **options: Any) -> Any:
    config = ModelConfig(name_or_path=str(name), init=init)
    return build.build_empty_model(config, dtype=torch.float32, vocab_size=None, **options)


def cut(
    name: Path | str,
    init: Any = "scratch",
    seed: int = 0,
    changed: Callable[[type], type] = lambda cls: cls,
    **options: Any,
) -> Any:
    """Built empty, allocated, and filled, as strategies do that cut the model."""
    model = empty(name, init, **options)
    model.__class__ = changed(type(model))
    model.to_empty(device=CPU)
    model.tie_weights()
    build.fill_model(model, ModelConfig(name_or_path=str(name), init=init), seed=seed)
    return model


WAYS = (whole, cut)


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def adapted(base: Any, way: Any = whole, seed: int = 0, kind: Any = "lora", **adapter: Any) -> Any:
    return way(base, "pretrained", seed, adapter=AdapterConfig(type=kind, **adapter))


def make_base(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    """A model with weights in a folder."""
    small_model(kind, **changes).save_pretrained(folder)
    return folder


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether all tensors are equal, the constants that no file holds too."""
    left = dict(one.named_parameters()) | dict(one.named_buffers())
    right = dict(other.named_parameters()) | dict(other.named_buffers())
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def test_shapes_have_the_sizes_that_their_names_say():
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


def test_fresh_weights_depend_on_the_seed_alone(tiny_model):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    model = cut(tiny_model)
    assert torch.equal(torch.get_rng_state(), state), "nobody else's random numbers are used up"
    assert same(model, whole(tiny_model))
    assert not same(model, cut(tiny_model, seed=1))


@each("llama", "qwen3", "gemma", "gpt_neox", "gpt2", "mixtral", "phi3", "opt")
def test_fresh_weights_are_spread_as_transformers_spreads_them(kind):
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


def test_a_model_that_initializes_elsewhere_is_named(tiny_model):
    model = empty(tiny_model)
    model.odd = nn.Module()
    model.odd.scale = nn.Parameter(torch.empty(3))
    model.to_empty(device=CPU)
    with pytest.raises(UserError, match=r"odd\.scale") as raised:
        build.fill_model(model, ModelConfig(name_or_path=str(tiny_model), init="scratch"), seed=0)
    assert "ddp" in raised.value.fix


@each((False, "model."), (True, "model."), (True, ""))
def test_pretrained_weights_are_those_of_the_files(tied, prefix, *, tiny_model, tmp_path):
    """In several files, and under the names of the bare model, which has no head."""
    change_config(tiny_model, tie_word_embeddings=tied)
    model, folder = cut(tiny_model, seed=3), tmp_path / "saved"
    model.save_pretrained(folder, max_shard_size="40KB" if prefix else "1GB")
    if not prefix:
        file = folder / "model.safetensors"
        renamed = {k.removeprefix("model."): v for k, v in load_file(file).items()}
        save_file(renamed, file, metadata={"format": "pt"})
    assert (len(list(folder.glob("*.safetensors"))) > 1) == bool(prefix)
    for way in WAYS:
        assert same(way(folder, init="pretrained", seed=5), model)


def test_the_type_of_a_base_is_that_of_most_numbers_in_its_files(tmp_path):
    """Not the type in config.json, unless the files have gone."""
    model = small_model().bfloat16()
    model.model.norm.float()
    model.save_pretrained(tmp_path)
    change_config(tmp_path, dtype="float16")
    config = ModelConfig(name_or_path=str(tmp_path))
    assert base_files(config)[1] == torch.bfloat16
    (tmp_path / "model.safetensors").unlink()
    assert base_files(config)[1] == torch.float16


@each(
    ("missing", "up_proj.weight"),
    ("left over", "up_proj.bias"),
    ("shape", "up_proj.weight"),
    ("torn", ""),
    ("none", ""),
    ("pickled", ""),  # which torch would read
)
def test_weights_that_do_not_fit_are_named(fault, what, *, tiny_model, tmp_path):
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
    elif fault in ("none", "pickled"):
        file.unlink()
    if fault == "pickled":
        torch.save(tensors, folder / "pytorch_model.bin")
    for way in WAYS:
        with pytest.raises(UserError) as raised:
            way(folder, init="pretrained")
        assert raised.value.where == "model.name_or_path" and raised.value.fix
        assert what in raised.value.what


def test_a_model_that_is_unknown_or_was_moved_away_is_named(tmp_path):
    for name in ("/nowhere/at/all", "no-such-model"):
        with pytest.raises(UserError, match=name) as caught:
            whole(name, init="pretrained")
        assert caught.value.fix
    with pytest.raises(UserError, match="folder not found: ") as caught:
        weights_folder(str(tmp_path / "away"))
    assert str(tmp_path / "away") in str(caught.value) and "restore the model" in str(caught.value)


def test_remote_code_is_not_run_unless_asked(tmp_path):
    marker = tmp_path / "it-ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Config: pass\n")
    auto = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto}))
    with pytest.raises(UserError, match="trust_remote_code"):
        whole(tmp_path)
    assert not marker.exists()


def test_blocks_are_found_or_named(tiny_model):
    model = empty(tiny_model)
    blocks = list(model.model.layers)
    assert find_blocks(model) == blocks
    assert find_blocks(model, ("MistralDecoderLayer", "LlamaDecoderLayer")) == blocks
    with pytest.raises(UserError, match="no module of class FooLayer") as raised:
        find_blocks(model, ("FooLayer",))
    assert "LlamaDecoderLayer" in raised.value.fix
    plain = nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    assert len(find_blocks(plain)) == 2
    with pytest.raises(UserError, match="cannot find the blocks") as raised:
        find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    assert raised.value.where == "strategy.transformer_layer_cls_to_wrap"


@each("full", "selective")
def test_gradient_checkpointing_changes_no_gradient(kind, *, tiny_model):
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


def test_attention_without_a_mask_is_the_same_function_and_windows_keep_theirs(tiny_model):
    usual, maskless = whole(tiny_model), whole(tiny_model)
    assert use_maskless_attention(maskless)
    ids = torch.randint(0, 512, (3, 40), generator=torch.Generator().manual_seed(0))
    assert torch.equal(usual(ids, use_cache=False).logits, maskless(ids, use_cache=False).logits)
    change_config(tiny_model, model_type="mistral", sliding_window=4)
    assert not use_maskless_attention(empty(tiny_model))


def test_the_kernel_for_documents_gets_what_it_takes_under_autocast():
    """Rotary embeddings give queries and keys in fp32, and autocast does not know the kernel."""
    seen: list[torch.dtype] = []

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
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


@each(
    ("llama", {"use_dora": True}),
    ("llama", {"use_dora": True, "target_modules": ("embed_tokens",)}),
    ("gpt2", {"use_dora": True}),  # whose matrices lie the other way round
    ("gpt2", {"modules_to_save": ("ln_f",)}),
    ("gemma", {"modules_to_save": ("norm",)}),
)
def test_whole_and_cut_models_begin_alike_and_as_their_base(kind, adapter, *, tmp_path):
    """DoRA too answers as the base only where its magnitudes are those of the base's weights."""
    make_base(tmp_path, kind, tie_word_embeddings=kind == "gemma")
    one, other = (adapted(tmp_path, way, **adapter) for way in WAYS)
    assert same(one, other)
    base = AutoModelForCausalLM.from_pretrained(tmp_path)
    names = {own for name in one.state_dict() if (own := base_name(name))}
    assert names == set(base.state_dict())
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        torch.testing.assert_close(other.eval()(tokens).logits, base(tokens).logits)
    trained = {name for name, p in one.named_parameters() if p.requires_grad}
    assert all("lora_" in name or "modules_to_save" in name for name in trained)
    assert any("lora_" in name for name in trained)


def test_fresh_matrices_depend_on_seed_and_name_alone(tmp_path):
    base = make_base(tmp_path)
    every, other = adapted(base).state_dict(), adapted(base, seed=1).state_dict()
    few = adapted(base, target_modules=("v_proj",)).state_dict()
    name = "model.layers.1.self_attn.v_proj.lora_A.default.weight"
    assert torch.equal(every[name], few[name])
    assert not torch.equal(every[name], other[name])
    assert not torch.equal(every[name], every[name.replace("layers.1", "layers.0")])
    limit = 32**-0.5  # uniform, as torch begins linear layers
    assert 0.9 * limit < float(every[name].abs().max()) <= limit
    assert not every[name.replace("lora_A", "lora_B")].any()


@each(
    ("", {"target_modules": ("q_prj",)}, "no module 'q_prj'", "did you mean q_proj"),
    ("", {"target_modules": ("q_proj", "qkv")}, "no module 'qkv'", "it has embed_tokens, q"),
    ("", {"target_modules": ("mlp",)}, "cannot have this adapter", "all-linear"),
    ("", {"modules_to_save": ("mlp",)}, "mlp cannot be trained whole while", "one of the two"),
    ("tied", {"modules_to_save": ("lm_head",)}, "share their weights", "remove lm_head"),
)
def test_names_that_do_not_fit_the_model(tied, adapter, what, fix, *, tmp_path):
    make_base(tmp_path, tie_word_embeddings=bool(tied))
    with pytest.raises(UserError) as caught:
        adapted(tmp_path, **adapter)
    assert what in caught.value.what and fix in caught.value.fix
    assert caught.value.where.startswith("adapter.")


def test_quantized_bases_and_missing_packages_are_named(tmp_path, monkeypatch):
    change_config(make_base(tmp_path), quantization_config={"quant_method": "gptq"})
    with pytest.raises(UserError, match="already quantized"):
        adapted(tmp_path)
    for kind, package in (("lora", "peft"), ("qlora", "bitsandbytes")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(MissingDependencyError, match=package) as caught:
                adapted("is/not-asked-for", kind=kind)
        assert "pip install" in caught.value.fix


def test_a_model_that_also_sees_counts_as_its_text_does_and_is_refused_on_many_ranks(tmp_path):
    from transformers import Gemma3Config

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    text = sizes | {"num_hidden_layers": 3, "vocab_size": 300, "eos_token_id": 7}
    text["num_key_value_heads"] = 2
    eye = sizes | {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    Gemma3Config(text_config=text, vision_config=eye).save_pretrained(tmp_path)
    config = ModelConfig(name_or_path=str(tmp_path), init="scratch")
    model = build.build_empty_model(config, dtype=torch.float32, vocab_size=400)
    assert model.get_input_embeddings().weight.shape == (400, 32)
    assert model.config.get_text_config().eos_token_id is None
    shape = {"num_layers": 3, "hidden_size": 32, "seq_length": 8}
    params = count_parameters(model)
    assert flops_per_token(model, 8) == train_flops_per_token(matmul_params=params, **shape)
    world = SimpleNamespace(world_size=2)
    with pytest.raises(UserError, match=r"text input never uses \(such as model\.vision_"):
        check_is_read_whole(model, DDPStrategyConfig(), world)
    check_is_read_whole(model.get_decoder(), DDPStrategyConfig(), world)


def test_four_bits_are_four_bits_and_are_trained_on_after_an_evaluation(tmp_path, monkeypatch):
    """Also where bitsandbytes would pack the weights for a CPU with AVX512-BF16."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    make_base(tmp_path, hidden_size=64)
    four = {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True}
    model, plain = adapted(tmp_path, kind="qlora", **four), adapted(tmp_path)
    assert count_parameters(model) == count_parameters(plain)
    assert flops_per_token(model, 8) == flops_per_token(plain, 8)
    quantized, exact = (m.model.layers[0].mlp.up_proj.base_layer.weight for m in (model, plain))
    assert quantized.numel() * quantized.element_size() == exact.numel() // 2
    assert quantized.quant_state.quant_type == "fp4" and quantized.quant_state.nested
    tokens, named = torch.arange(32).view(2, 16), dict(model.named_parameters())
    frozen = {name: p.clone() for name, p in named.items() if not p.requires_grad}
    with torch.no_grad():
        difference = model.eval()(tokens).logits - plain.eval()(tokens).logits
    assert 0 < float(difference.abs().max()) < 0.5
    assert all(torch.equal(named[name], value) for name, value in frozen.items())
    model.train()(tokens, labels=tokens).loss.backward()
    grads = [p.grad for name, p in named.items() if "layers.0" in name and "lora_B" in name]
    assert grads and all(grad is not None and grad.any() for grad in grads)


def test_the_probe_trains_as_little_as_the_run(tmp_path):
    """Even where the names are those of layers that it does not have; the rest is in 16 bits."""
    adapter = AdapterConfig(type="lora", target_modules=("layers.1.mlp.up_proj",))
    how = {"device": CPU, "dtype": torch.float32, "vocab_size": None, "adapter": adapter}
    how["frozen_dtype"] = frozen_dtype("bf16-mixed", adapter)
    base = ModelConfig(name_or_path=str(make_base(tmp_path)))
    probe = build.build_probe(base, num_layers=1, **how)
    kinds = {(p.requires_grad, p.dtype) for p in probe.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    assert frozen_dtype("bf16-mixed", AdapterConfig()) is None


def test_frozen_weights_cost_two_thirds_and_no_state(tmp_path):
    """Forward, and backward through the activations: four operations of six."""
    shape = {"num_layers": 0, "hidden_size": 8, "seq_length": 16}
    whole = train_flops_per_token(matmul_params=300, **shape)
    assert train_flops_per_token(matmul_params=300, frozen_params=300, **shape) == whole * 4 / 6
    model = Architecture.of(load_shape("llama-8b"))
    whole_run = fake_run(tmp_path, gradient_checkpointing="full")
    lora_run = fake_run(tmp_path, LORA, gradient_checkpointing="full")
    machine = Resources(2, 2, 40 * 2**30, Links(2, 1, 100e9, 0.0))
    ddp = DDPStrategyConfig()
    lora, full = (needed_bytes(model, run, ddp, machine) for run in (lora_run, whole_run))
    assert lora < 0.2 * full
    assert choose_strategy(model, lora_run, machine)[0].kind == "ddp"
    assert choose_strategy(model, whole_run, machine)[0].kind == "fsdp"


def test_only_what_is_trained_has_state(tmp_path):
    model = adapted(make_base(tmp_path), r=1)
    trained = {id(p): p.numel() * 4 for p in model.parameters() if p.requires_grad}
    for name in ("adamw", "adamw_8bit", "sgd", "muon"):
        optimizers = make_optimizers(TrainingConfig(max_steps=1, optimizer=name), model)
        held = [id(p) for o in optimizers for group in o.param_groups for p in group["params"]]
        assert set(held) == set(trained) and len(held) == len(trained), name
    strategy = DDPStrategyConfig()
    layout = make_layout(strategy, 1, local_world_size=1)
    mesh = SimpleNamespace(layout=layout, place=layout.place(0), offloaded=0)
    frozen = sum(p.numel() * 4 for p in model.parameters() if not p.requires_grad)
    # Weights, gradients, two numbers of AdamW.
    run = fake_run(tmp_path, AdapterConfig(type="lora", r=1), precision="32-true")
    needed = standing_bytes(model, run, strategy, mesh)
    assert needed == frozen + 4 * sum(trained.values())


def test_a_model_and_a_cache_may_lie_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    make_base(tmp_path / "tiny")
    assert same(whole("~/tiny", "pretrained"), cut("~/tiny", "pretrained"))
    data = {"sources": [{"path": "any"}], "seq_length": 8, "cache_dir": "~/cache"}
    assert data_cache(DataConfig.model_validate(data)) == tmp_path / "cache"


def test_a_base_is_found_from_any_folder(tmp_path, monkeypatch):
    make_base(tmp_path / "here" / "tiny")
    run = fake_run(Path("tiny"), LORA)
    monkeypatch.chdir(tmp_path / "here")
    checkpoint = CheckpointInfo(tmp_path, 1, Manifest({"base": base_of(run)}, {}))
    assert with_base(run, checkpoint) == run
    monkeypatch.chdir(tmp_path)
    found = with_base(run, checkpoint).model.name_or_path
    assert found == str(tmp_path / "here" / "tiny")
    weights = tmp_path / "here" / "tiny" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(UserError, match="this adapter was trained with other weights"):
        with_base(run, checkpoint)
