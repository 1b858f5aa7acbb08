"""Adapters: where they are put, how they begin, what of the run file is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from isles.config.auto import Machine, choose_strategy, ddp_bytes
from isles.config.layout import make_layout
from isles.config.load import load_run_file
from isles.config.sections.data import DataConfig, SourceConfig
from isles.config.sections.model import AdapterConfig, ModelConfig
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import DDPStrategyConfig
from isles.config.sections.training import TrainingConfig
from isles.errors import ConfigErrors, MissingDependencyError, UserError
from isles.facts.cost import ModelSize, train_flops_per_token
from isles.models.adapter import base_name, frozen_dtype
from isles.models.build import build_empty_model, build_model, build_probe, fill_model
from isles.models.fill import base_fingerprint
from isles.run.checkpoints import CheckpointInfo
from isles.train.model import base_of, count_parameters, flops_per_token, with_base
from isles.train.optimizer import make_optimizers
from isles.train.probe import state_bytes
from tests.each import each

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 64,
}
GEMMA = LLAMA | {"model_type": "gemma", "head_dim": 8, "tie_word_embeddings": True}


def make_base(folder: Path, shape: dict[str, Any]) -> ModelConfig:
    """A model with weights in a folder."""
    torch.manual_seed(0)
    shape = dict(shape)
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return ModelConfig(name_or_path=str(folder))


def build(config: ModelConfig, adapter: AdapterConfig, seed: int = 0) -> Any:
    return build_model(
        config,
        device=torch.device("cpu"),
        dtype=torch.float32,
        seed=seed,
        vocab_size=None,
        adapter=adapter,
    )


def build_cut(config: ModelConfig, adapter: AdapterConfig) -> Any:
    """As strategies do that cut the model: empty, then filled from the files."""
    model: Any = build_empty_model(config, dtype=torch.float32, vocab_size=None, adapter=adapter)
    model.to_empty(device="cpu")
    model.tie_weights()
    fill_model(model, config, seed=0)
    return model


ADAPTERS = {
    "lora": AdapterConfig(type="lora"),
    "dora": AdapterConfig(type="lora", use_dora=True),
    "whole": AdapterConfig(type="lora", modules_to_save=("ln_f", "norm")),
}


@each("adapter", ADAPTERS.values(), ids=ADAPTERS)
@each("shape", [LLAMA, GPT2, GEMMA], ids=["llama", "gpt2", "gemma"])
def test_whole_and_cut_models_begin_alike_and_as_their_base(
    tmp_path: Path, shape: dict[str, Any], adapter: AdapterConfig
) -> None:
    if adapter.modules_to_save:
        end = "ln_f" if shape is GPT2 else "norm"
        adapter = adapter.model_copy(update={"modules_to_save": (end,)})
    config = make_base(tmp_path, shape)
    whole, cut = build(config, adapter), build_cut(config, adapter)
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


def test_magnitudes_are_those_of_peft(tmp_path: Path) -> None:
    """Of matrices that lie either way round, and of an embedding."""
    for shape, names in ((LLAMA, ["q_proj", "embed_tokens"]), (GPT2, ["c_attn"])):
        config = make_base(tmp_path / str(shape["model_type"]), shape)
        base = AutoModelForCausalLM.from_pretrained(config.name_or_path)
        theirs = get_peft_model(base, LoraConfig(target_modules=names, use_dora=True))
        adapter = AdapterConfig(type="lora", use_dora=True, target_modules=tuple(names))
        ours = dict(build_cut(config, adapter).named_parameters())
        compared = 0
        for name, value in theirs.named_parameters():
            if "magnitude" in name:
                own = ours[name.removeprefix("base_model.model.")]
                torch.testing.assert_close(own, value)
                compared += 1
        assert compared >= 2, names


def test_fresh_matrices_depend_on_seed_and_name_alone(tmp_path: Path) -> None:
    config = make_base(tmp_path, LLAMA)
    every = build(config, AdapterConfig(type="lora")).state_dict()
    few = build(config, AdapterConfig(type="lora", target_modules=("v_proj",))).state_dict()
    other = build(config, AdapterConfig(type="lora"), seed=1).state_dict()
    name = "model.layers.1.self_attn.v_proj.lora_A.default.weight"
    assert torch.equal(every[name], few[name])
    assert not torch.equal(every[name], other[name])
    assert not torch.equal(every[name], every[name.replace("layers.1", "layers.0")])
    limit = 32**-0.5  # uniform, as torch begins linear layers
    assert 0.9 * limit < float(every[name].abs().max()) <= limit
    assert not every[name.replace("lora_A", "lora_B")].any()


@each(
    ("changes", "what", "fix"),
    [
        ({"target_modules": ("q_prj",)}, "no module 'q_prj'", "did you mean q_proj"),
        ({"target_modules": ("q_proj", "qkv")}, "no module 'qkv'", "it has embed_tokens, q_proj"),
        ({"modules_to_save": ("lm_hed",)}, "no module 'lm_hed'", "did you mean lm_head"),
        ({"target_modules": ("mlp",)}, "cannot have this adapter", "all-linear"),
        ({"modules_to_save": ("mlp",)}, "mlp is to be trained whole, and", "one of them"),
    ],
)
def test_names_that_do_not_fit_the_model(
    tmp_path: Path, changes: dict[str, Any], what: str, fix: str
) -> None:
    config = make_base(tmp_path, LLAMA)
    with pytest.raises(UserError) as caught:
        build(config, AdapterConfig(type="lora", **changes))
    assert what in caught.value.what and fix in caught.value.fix
    assert caught.value.where.startswith("adapter.")


@pytest.mark.parametrize(
    "changes", [{"modules_to_save": ("lm_head",)}, {"target_modules": ("embed_tokens",)}]
)
def test_tied_ends_do_not_come_apart(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = make_base(tmp_path, LLAMA | {"tie_word_embeddings": True})
    with pytest.raises(UserError, match="shares the weights") as caught:
        build(config, AdapterConfig(type="lora", **changes))
    assert "take" in caught.value.fix


def test_four_bits_are_trained_on_after_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where bitsandbytes would pack the weights for a CPU with AVX512-BF16."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    config = make_base(tmp_path, LLAMA | {"hidden_size": 64})
    model = build(config, AdapterConfig(type="qlora"))
    tokens = torch.arange(8).view(1, 8)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    with torch.no_grad():
        model.eval()(tokens)
    assert all(
        torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen
    )
    model.train()(tokens, labels=tokens).loss.backward()
    grads = [
        p.grad for name, p in model.named_parameters() if "layers.0" in name and "lora_B" in name
    ]
    assert grads and all(grad is not None and grad.any() for grad in grads)


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_quantised_bases_are_refused(tmp_path: Path, kind: Any) -> None:
    config = make_base(tmp_path, LLAMA)
    file = tmp_path / "config.json"
    described = json.loads(file.read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    file.write_text(json.dumps(described))
    with pytest.raises(UserError, match="quantised already"):
        build(config, AdapterConfig(type=kind))


@pytest.mark.parametrize(("kind", "package"), [("lora", "peft"), ("qlora", "bitsandbytes")])
def test_missing_packages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, package: str
) -> None:
    config = make_base(tmp_path, LLAMA)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=package) as caught:
        build(config, AdapterConfig(type=kind))
    assert "pip install" in caught.value.fix


def test_four_bits_are_four_bits(tmp_path: Path) -> None:
    config = make_base(tmp_path, LLAMA | {"hidden_size": 64})
    adapter = AdapterConfig(type="qlora", bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True)
    model = build(config, adapter)
    plain = build(config, AdapterConfig(type="lora"))
    assert count_parameters(model) == count_parameters(plain)
    assert flops_per_token(model, 8) == flops_per_token(plain, 8)
    quantized = model.model.layers[0].self_attn.q_proj.base_layer.weight
    assert quantized.numel() * quantized.element_size() == 64 * 64 // 2
    assert quantized.quant_state.quant_type == "fp4" and quantized.quant_state.nested
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        difference = model.eval()(tokens).logits - plain.eval()(tokens).logits
    assert 0 < float(difference.abs().max()) < 0.5


def test_what_is_held_in_16_bits() -> None:
    lora, none = AdapterConfig(type="lora"), AdapterConfig()
    assert frozen_dtype("bf16-mixed", lora) == torch.bfloat16
    assert frozen_dtype("fp16-mixed", lora) == torch.float16
    assert frozen_dtype("32-true", lora) is None
    assert frozen_dtype("bf16-mixed", none) is None


def test_the_probe_trains_as_little_as_the_run(tmp_path: Path) -> None:
    """Even where the names are those of layers that it does not have."""
    config = make_base(tmp_path, LLAMA)
    adapter = AdapterConfig(type="lora", target_modules=("layers.1.mlp.up_proj",))
    probe = build_probe(
        config,
        num_layers=1,
        device=torch.device("cpu"),
        dtype=torch.float32,
        vocab_size=None,
        adapter=adapter,
        frozen_dtype=torch.bfloat16,
    )
    kinds = {(p.requires_grad, p.dtype) for p in probe.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}


def test_the_fingerprint_is_of_the_weights_and_not_of_their_place(tmp_path: Path) -> None:
    one = make_base(tmp_path / "one", LLAMA)
    same = make_base(tmp_path / "same", LLAMA)
    assert base_fingerprint(one) == base_fingerprint(same)
    file = tmp_path / "same" / "model.safetensors"
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    file.write_bytes(changed)
    assert base_fingerprint(one) != base_fingerprint(same)
    wider = make_base(tmp_path / "wider", LLAMA | {"rope_theta": 5000.0})
    assert base_fingerprint(one) != base_fingerprint(wider)


def test_frozen_weights_cost_two_thirds_and_no_state() -> None:
    """Forward, and backward through the activations: four operations of six."""
    shape = {"num_layers": 0, "hidden_size": 8, "seq_length": 16}
    whole = train_flops_per_token(matmul_params=300, **shape)
    assert train_flops_per_token(matmul_params=300, frozen_params=300, **shape) == whole * 4 / 6
    training = TrainingConfig(max_steps=1, gradient_checkpointing="full")
    size = ModelSize(8_030_261_248, 32, 4096, 128_256)
    lora = ModelSize(8_072_204_288, 32, 4096, 128_256, num_frozen=8_030_261_248)
    machine = Machine(2, 2, 40 * 2**30, 100e9)
    assert ddp_bytes(lora, training, 2048) < 0.15 * ddp_bytes(size, training, 2048)
    assert choose_strategy(lora, training, 2048, machine)[0].kind == "ddp"
    assert choose_strategy(size, training, 2048, machine)[0].kind == "fsdp"


def test_optimizers_hold_what_is_trained_and_nothing_else(tmp_path: Path) -> None:
    config = make_base(tmp_path, LLAMA)
    model = build(config, AdapterConfig(type="lora"))
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    for name in ("adamw", "adamw_8bit", "sgd", "muon"):
        optimizers = make_optimizers(TrainingConfig(max_steps=1, optimizer=name), model)
        held = [id(p) for o in optimizers for group in o.param_groups for p in group["params"]]
        assert set(held) == trained and len(held) == len(trained), name


def test_a_rank_needs_room_for_state_of_what_is_trained(tmp_path: Path) -> None:
    config = make_base(tmp_path, LLAMA)
    strategy = DDPStrategyConfig()
    mesh: Any = SimpleNamespace(layout=make_layout(strategy, 1, local_world_size=1))
    run = RunConfig(
        model=config,
        data=DataConfig(sources=(SourceConfig(type="fake"),)),
        training=TrainingConfig(max_steps=1),
    )
    model = build(config, AdapterConfig(type="lora", r=1))
    frozen = sum(p.numel() * 4 for p in model.parameters() if not p.requires_grad)
    trained = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    # Weights, gradients, two numbers of AdamW.
    assert state_bytes(model, run, strategy, mesh) == frozen + 4 * trained


def test_a_base_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_base(tmp_path / "here" / "tiny", LLAMA)
    run = RunConfig(
        model=ModelConfig(name_or_path="tiny"),
        adapter=AdapterConfig(type="lora"),
        data=DataConfig(sources=(SourceConfig(type="fake"),)),
        training=TrainingConfig(max_steps=1),
    )
    monkeypatch.chdir(tmp_path / "here")
    checkpoint = CheckpointInfo(tmp_path, 1, {"base": base_of(run)})
    assert with_base(run, checkpoint) == run
    monkeypatch.chdir(tmp_path)
    found = with_base(run, checkpoint).model.name_or_path
    assert found == str(tmp_path / "here" / "tiny")
    make_base(tmp_path / "here" / "tiny", LLAMA | {"intermediate_size": 32})
    with pytest.raises(UserError, match="not those that this adapter was trained beside"):
        with_base(run, checkpoint)


GOOD = """\
model: {name_or_path: gpt2}
data: {sources: [{path: a}]}
training: {max_steps: 100}
adapter:
  type: lora
"""


@each(
    ("overrides", "where", "what", "fix"),
    [
        (["model.init=scratch"], "run.yaml:5", "learnt nothing", "init: pretrained"),
        (["adapter.type=none", "adapter.r=8"], "adapter.r=8", "means nothing", "type: lora"),
        (["adapter.bnb_4bit_quant_type=fp4"], "quant_type=fp4", "means nothing", "type: qlora"),
        (["adapter.type=qlora", "strategy={kind: fsdp}"], "fsdp", "4 bits", "kind: ddp"),
        (["adapter.type=qlora", "strategy={kind: deepspeed}"], "deepspeed", "4 bits", "ddp"),
        (["adapter.type=qlora", "strategy={kind: ddp, tp_size: 2}"], "tp", "4 bits", "lora"),
        (["strategy={kind: ddp, pp_size: 2}"], "pp_size", "stage may hold nothing", "pp_size: 1"),
        (
            ["strategy={kind: ddp, tp_size: 2}", "adapter.dropout=0.1"],
            "adapter.dropout=0.1",
            "drop different values",
            "tp_size: 1",
        ),
        (
            ["strategy={kind: ddp, tp_size: 2}", "adapter.use_dora=true"],
            "use_dora",
            "whole rows",
            "tp_size: 1",
        ),
        (
            ["adapter.target_modules=[q_proj]", "adapter.modules_to_save=[q_proj]"],
            "modules_to_save",
            "q_proj stands in target_modules and in modules_to_save",
            "one of them",
        ),
        (
            ["adapter.type=none", "checkpoint.merge_adapter=true"],
            "merge_adapter=true",
            "trains no adapter",
            "whole model anyway",
        ),
        (["adapter.type=lra"], "adapter.type=lra", "lra", "lora"),
        (["adapter.r=0"], "adapter.r=0", "0", ""),
        (["adapter.dropout=1"], "adapter.dropout=1", "1", ""),
        (["adapter.target_modules=[]"], "target_modules", "", ""),
        (["adapter.target_modules=q_proj"], "target_modules", "q_proj", "a list such as"),
        (["adapter.rank=8"], "adapter.rank", "rank", "r, alpha"),
        (["adapter.lora_alpha=8"], "adapter.lora_alpha", "lora_alpha", "adapter.alpha"),
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


def test_a_good_file_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(GOOD, encoding="utf-8")
    adapter = load_run_file(file, ["adapter.target_modules=[q_proj, v_proj]"]).config.adapter
    assert adapter.target_modules == ("q_proj", "v_proj")
