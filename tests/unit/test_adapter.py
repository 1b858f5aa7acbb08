"""Adapters: where they are put, how they begin, what of the run file is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from isles.config.auto import Machine, choose_strategy, needed_bytes
from isles.config.layout import make_layout
from isles.config.load import load_run_file
from isles.config.sections.model import AdapterConfig, ModelConfig
from isles.config.sections.strategy import DDPStrategyConfig
from isles.config.sections.training import TrainingConfig
from isles.errors import ConfigErrors, MissingDependencyError, UserError
from isles.facts.cost import train_flops_per_token
from isles.facts.memory.architecture import Architecture
from isles.facts.models import load_shape
from isles.models.adapter import base_name, frozen_dtype
from isles.models.build import build_empty_model, build_model, build_probe, fill_model
from isles.run.checkpoints import CheckpointInfo
from isles.train.model import base_of, count_parameters, flops_per_token, with_base
from isles.train.optimizer import make_optimizers
from isles.train.probe import standing_bytes
from tests.each import each
from tests.engines import fake_run
from tests.small_models import small_model

TIED = {"tie_word_embeddings": True}
WIDE = {"hidden_size": 64}
LORA = AdapterConfig(type="lora")
CPU = torch.device("cpu")


def make_base(folder: Path, kind: str = "llama", **changes: Any) -> ModelConfig:
    """A model with weights in a folder."""
    small_model(kind, **changes).save_pretrained(folder)
    return ModelConfig(name_or_path=str(folder))


def build(config: ModelConfig, adapter: AdapterConfig, seed: int = 0) -> Any:
    options: dict[str, Any] = {"dtype": torch.float32, "vocab_size": None}
    return build_model(config, device=CPU, seed=seed, adapter=adapter, **options)


def build_cut(config: ModelConfig, adapter: AdapterConfig) -> Any:
    """As strategies do that cut the model: empty, then filled from the files."""
    model: Any = build_empty_model(config, dtype=torch.float32, vocab_size=None, adapter=adapter)
    model.to_empty(device=CPU)
    model.tie_weights()
    fill_model(model, config, seed=0)
    return model


@each(
    ("kind", "adapter"),
    [
        ("llama", {"use_dora": True}),
        ("llama", {"use_dora": True, "target_modules": ("embed_tokens",)}),
        ("gpt2", {}),
        ("gpt2", {"use_dora": True}),  # whose matrices lie the other way round
        ("gpt2", {"modules_to_save": ("ln_f",)}),
        ("gemma", {}),
        ("gemma", {"modules_to_save": ("norm",)}),
    ],
)
def test_whole_and_cut_models_begin_alike_and_as_their_base(
    tmp_path: Path, kind: str, adapter: dict[str, Any]
) -> None:
    """DoRA too answers as the base only where its magnitudes are those of the base's weights."""
    config = make_base(tmp_path, kind, tie_word_embeddings=kind == "gemma")
    section = AdapterConfig(type="lora", **adapter)
    whole, cut = build(config, section), build_cut(config, section)
    one, other = whole.state_dict(), cut.state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    base = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {own for name in one if (own := base_name(name))} == set(base.state_dict())
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        torch.testing.assert_close(cut.eval()(tokens).logits, base(tokens).logits)
    trained = {name for name, p in whole.named_parameters() if p.requires_grad}
    assert all("lora_" in name or "modules_to_save" in name for name in trained)
    assert any("lora_" in name for name in trained)


def test_fresh_matrices_depend_on_seed_and_name_alone(tmp_path: Path) -> None:
    config = make_base(tmp_path)
    every = build(config, LORA).state_dict()
    few = build(config, AdapterConfig(type="lora", target_modules=("v_proj",))).state_dict()
    other = build(config, LORA, seed=1).state_dict()
    name = "model.layers.1.self_attn.v_proj.lora_A.default.weight"
    assert torch.equal(every[name], few[name])
    assert not torch.equal(every[name], other[name])
    assert not torch.equal(every[name], every[name.replace("layers.1", "layers.0")])
    limit = 32**-0.5  # uniform, as torch begins linear layers
    assert 0.9 * limit < float(every[name].abs().max()) <= limit
    assert not every[name.replace("lora_A", "lora_B")].any()


@each(
    ("shape", "adapter", "what", "fix"),
    [
        ({}, {"target_modules": ("q_prj",)}, "no module 'q_prj'", "did you mean q_proj"),
        ({}, {"target_modules": ("q_proj", "qkv")}, "no module 'qkv'", "it has embed_tokens, q"),
        ({}, {"target_modules": ("mlp",)}, "cannot have this adapter", "all-linear"),
        ({}, {"modules_to_save": ("mlp",)}, "mlp is to be trained whole, and", "one of them"),
        (TIED, {"modules_to_save": ("lm_head",)}, "shares the weights", "take lm_head out"),
    ],
)
def test_names_that_do_not_fit_the_model(
    tmp_path: Path, shape: dict[str, Any], adapter: dict[str, Any], what: str, fix: str
) -> None:
    config = make_base(tmp_path, **shape)
    with pytest.raises(UserError) as caught:
        build(config, AdapterConfig(type="lora", **adapter))
    assert what in caught.value.what and fix in caught.value.fix
    assert caught.value.where.startswith("adapter.")


def test_quantised_bases_are_refused(tmp_path: Path) -> None:
    config = make_base(tmp_path)
    file = tmp_path / "config.json"
    described = json.loads(file.read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    file.write_text(json.dumps(described))
    with pytest.raises(UserError, match="quantised already"):
        build(config, LORA)


@each(("kind", "package"), [("lora", "peft"), ("qlora", "bitsandbytes")])
def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, kind: Any, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=package) as caught:
        build(ModelConfig(name_or_path="is/not-asked-for"), AdapterConfig(type=kind))
    assert "pip install" in caught.value.fix


def test_four_bits_are_trained_on_after_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where bitsandbytes would pack the weights for a CPU with AVX512-BF16."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    model = build(make_base(tmp_path, **WIDE), AdapterConfig(type="qlora"))
    tokens = torch.arange(8).view(1, 8)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    with torch.no_grad():
        model.eval()(tokens)
    named = dict(model.named_parameters())
    assert all(torch.equal(named[name], value) for name, value in frozen.items())
    model.train()(tokens, labels=tokens).loss.backward()
    grads = [p.grad for name, p in named.items() if "layers.0" in name and "lora_B" in name]
    assert grads and all(grad is not None and grad.any() for grad in grads)


def test_four_bits_are_four_bits(tmp_path: Path) -> None:
    config = make_base(tmp_path, **WIDE)
    adapter = AdapterConfig(type="qlora", bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True)
    model, plain = build(config, adapter), build(config, LORA)
    assert count_parameters(model) == count_parameters(plain)
    assert flops_per_token(model, 8) == flops_per_token(plain, 8)
    quantized, exact = (m.model.layers[0].mlp.up_proj.base_layer.weight for m in (model, plain))
    assert quantized.numel() * quantized.element_size() == exact.numel() // 2
    assert quantized.quant_state.quant_type == "fp4" and quantized.quant_state.nested
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        difference = model.eval()(tokens).logits - plain.eval()(tokens).logits
    assert 0 < float(difference.abs().max()) < 0.5


def test_the_probe_trains_as_little_as_the_run(tmp_path: Path) -> None:
    """Even where the names are those of layers that it does not have; the rest is in 16 bits."""
    adapter = AdapterConfig(type="lora", target_modules=("layers.1.mlp.up_proj",))
    probe = build_probe(
        make_base(tmp_path),
        num_layers=1,
        device=CPU,
        dtype=torch.float32,
        vocab_size=None,
        adapter=adapter,
        frozen_dtype=frozen_dtype("bf16-mixed", adapter),
    )
    kinds = {(p.requires_grad, p.dtype) for p in probe.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    assert frozen_dtype("bf16-mixed", AdapterConfig()) is None


def test_frozen_weights_cost_two_thirds_and_no_state(tmp_path: Path) -> None:
    """Forward, and backward through the activations: four operations of six."""
    shape = {"num_layers": 0, "hidden_size": 8, "seq_length": 16}
    whole = train_flops_per_token(matmul_params=300, **shape)
    assert train_flops_per_token(matmul_params=300, frozen_params=300, **shape) == whole * 4 / 6
    model = Architecture.of(load_shape("llama-8b"))
    whole_run = fake_run(tmp_path, gradient_checkpointing="full")
    lora_run = fake_run(tmp_path, LORA, gradient_checkpointing="full")
    machine = Machine(2, 2, 40 * 2**30, 100e9)
    ddp = DDPStrategyConfig()
    lora, full = (needed_bytes(model, run, ddp, machine) for run in (lora_run, whole_run))
    assert lora < 0.2 * full
    assert choose_strategy(model, lora_run, machine)[0].kind == "ddp"
    assert choose_strategy(model, whole_run, machine)[0].kind == "fsdp"


def test_only_what_is_trained_has_state(tmp_path: Path) -> None:
    model = build(make_base(tmp_path), AdapterConfig(type="lora", r=1))
    trained = {id(p): p.numel() * 4 for p in model.parameters() if p.requires_grad}
    for name in ("adamw", "adamw_8bit", "sgd", "muon"):
        optimizers = make_optimizers(TrainingConfig(max_steps=1, optimizer=name), model)
        held = [id(p) for o in optimizers for group in o.param_groups for p in group["params"]]
        assert set(held) == set(trained) and len(held) == len(trained), name
    strategy = DDPStrategyConfig()
    mesh: Any = SimpleNamespace(layout=make_layout(strategy, 1, local_world_size=1))
    frozen = sum(p.numel() * 4 for p in model.parameters() if not p.requires_grad)
    # Weights, gradients, two numbers of AdamW.
    run = fake_run(tmp_path, AdapterConfig(type="lora", r=1), precision="32-true")
    needed = standing_bytes(model, run, strategy, mesh)
    assert needed == frozen + 4 * sum(trained.values())


def test_a_base_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_base(tmp_path / "here" / "tiny")
    run = fake_run(Path("tiny"), LORA)
    monkeypatch.chdir(tmp_path / "here")
    checkpoint = CheckpointInfo(tmp_path, 1, {"base": base_of(run)})
    assert with_base(run, checkpoint) == run
    monkeypatch.chdir(tmp_path)
    found = with_base(run, checkpoint).model.name_or_path
    assert found == str(tmp_path / "here" / "tiny")
    weights = tmp_path / "here" / "tiny" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(UserError, match="not those that this adapter was trained beside"):
        with_base(run, checkpoint)


GOOD = """\
model: {name_or_path: gpt2}
data: {sources: [{path: a}]}
training: {max_steps: 100}
adapter:
  type: lora
"""
BOTH = ["adapter.target_modules=[q_proj]", "adapter.modules_to_save=[q_proj]"]
MERGE = "checkpoint.merge_adapter=true"
TP = "strategy={kind: ddp, tp_size: 2}"


@each(
    ("overrides", "where", "what", "fix"),
    [
        (["model.init=scratch"], "run.yaml:5", "learnt nothing", "init: pretrained"),
        (["adapter.type=none", "adapter.r=8"], "adapter.r=8", "means nothing", "type: lora"),
        (["adapter.bnb_4bit_quant_type=fp4"], "quant_type=fp4", "means nothing", "type: qlora"),
        (["adapter.type=qlora", "strategy={kind: fsdp}"], "fsdp", "4 bits", "kind: ddp"),
        (["adapter.type=qlora", TP], "tp", "4 bits", "lora"),
        (["strategy={kind: ddp, pp_size: 2}"], "pp_size", "stage may hold nothing", "pp_size: 1"),
        ([TP, "adapter.dropout=0.1"], "dropout=0.1", "drop different values", "tp_size: 1"),
        ([TP, "adapter.use_dora=true"], "use_dora", "whole rows", "tp_size: 1"),
        (BOTH, "modules_to_save", "q_proj stands in target_modules and in modules_", "one of them"),
        (["adapter.type=none", MERGE], MERGE, "trains no adapter", "whole model anyway"),
        (["adapter.target_modules=q_proj"], "target_modules", "q_proj", "a list such as"),
    ],
)
def test_what_the_file_alone_shows_to_be_wrong(
    tmp_path: Path, overrides: list[str], where: str, what: str, fix: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(GOOD, encoding="utf-8")
    with pytest.raises(ConfigErrors) as caught:
        load_run_file(file, overrides)
    [issue] = caught.value.issues
    assert where in issue.where and what in issue.what and fix in issue.fix, issue
