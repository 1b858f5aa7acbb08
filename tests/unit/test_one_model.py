"""One file is one model, however it is loaded; and a loss that depends on no neighbor."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from isles.config.rules.shape import check_shape
from isles.config.sections.model import AdapterConfig
from isles.errors import UserError
from isles.models.adapter import add_adapter
from isles.models.pieces import StoredWeight
from isles.train.reference import disable_dropout
from tests.each import each
from tests.run_files import load
from tests.small_models import small_model
from tests.unit.test_models import WAYS, cut, make_base, same

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def rewrite(folder: Path, change: Any) -> None:
    """Change the tensors of a model's file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox", "gemma", "qwen2"])
def test_a_head_that_contradicts_a_tied_config_is_refused_however_it_is_loaded(kind, tmp_path):
    folder = make_base(tmp_path, kind, tie_word_embeddings=True)
    model = small_model(kind, tie_word_embeddings=True)
    ((head, embedding),) = model.get_expanded_tied_weights_keys().items()

    def other_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors[head] = tensors[embedding] * 1.5

    rewrite(folder, other_head)
    for way in WAYS:
        with pytest.raises(UserError) as raised:
            way(folder, "pretrained")
        assert head in raised.value.what and "tie_word_embeddings" in raised.value.what
        assert "tie_word_embeddings: false" in raised.value.fix


@pytest.mark.parametrize("kind", ["mixtral", "gpt_neox"])
def test_a_model_that_is_cut_finds_its_weights_by_the_names_of_the_files(kind, tmp_path):
    """FSDP changes the class of a model, by which transformers finds the names."""
    model = small_model(kind)
    model.save_pretrained(tmp_path)
    found = cut(tmp_path, "pretrained", changed=lambda cls: type(f"FSDP{cls.__name__}", (cls,), {}))
    assert type(found).__name__ == f"FSDP{type(model).__name__}" and same(found, model)


def test_a_head_that_is_the_embedding_is_one_weight_whichever_the_file_holds(tmp_path):
    folder = make_base(tmp_path, tie_word_embeddings=True)
    model = small_model(tie_word_embeddings=True)
    rewrite(folder, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    assert all(same(way(folder, "pretrained"), model) for way in WAYS)
    rewrite(folder, lambda tensors: tensors.pop(EMBEDDING))
    assert all(same(way(folder, "pretrained"), model) for way in WAYS)
    rewrite(folder, lambda tensors: tensors.pop(HEAD))
    for way in WAYS:
        with pytest.raises(UserError, match="lack"):
            way(folder, "pretrained")


MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "granitemoe", "deepseek_v3")
MIXTURES += ("deepseek_v2", "glm4_moe", "hunyuan_v1_moe")


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_as_the_hub_has_it_is_filled_piece_by_piece(kind, tmp_path):
    """`save_pretrained` writes the hub's names, an expert each."""
    folder = make_base(tmp_path, kind, first_k_dense_replace=0, n_routed_experts=4, n_group=1)
    whole, cut = (way(folder, "pretrained") for way in WAYS)
    own = set(dict(whole.named_parameters()))
    assert set(load_file(folder / "model.safetensors")) != own, "the names of the hub"
    assert same(whole, cut)


def test_any_part_of_joined_experts_is_read_alone():
    saved = {f"{name}{expert}": torch.randn(3, 5) for name in "ab" for expert in range(4)}
    whole = torch.stack([torch.cat((saved[f"a{e}"], saved[f"b{e}"])) for e in range(4)])
    blocks = tuple(tuple(f"{name}{expert}" for expert in range(4)) for name in "ab")
    asked: list[str] = []

    def read(name: str, shape: tuple[int, ...], part: tuple[slice, ...]) -> torch.Tensor:
        asked.append(name)
        assert saved[name].shape == shape
        return saved[name][part]

    pieces = StoredWeight(blocks, are_stacked=True)
    edges = [slice(first, last) for first in range(7) for last in range(first, 7)]
    for experts, rows in product([slice(0, 4), slice(1, 3), slice(2, 2)], edges):
        part = (experts, rows, slice(1, 4))
        found = pieces.read(whole.shape, part, read)
        assert found is not None and torch.equal(found, whole[part])
    asked.clear()
    pieces.read(whole.shape, (slice(1, 2), slice(0, 3), slice(0, 5)), read)
    assert asked == ["a1"], "nothing else is read"


def test_an_expert_that_is_missing_is_named(tmp_path):
    folder = make_base(tmp_path, "mixtral")
    names = [n for n in load_file(folder / "model.safetensors") if ".experts.3.w2" in n]
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in names])
    with pytest.raises(UserError, match=r"experts.*down_proj"):
        WAYS[1](folder, "pretrained")


@pytest.mark.parametrize("name", ["score.weight", "vision_tower.embeddings.weight", "mtp.0.weight"])
def test_a_head_that_the_model_does_not_have_is_refused_however_it_is_loaded(name, tmp_path):
    folder = make_base(tmp_path)
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(2, 32)}))
    for way in WAYS:
        with pytest.raises(UserError, match="no place for 1 ") as raised:
            way(folder, "pretrained")
        assert name in raised.value.what


def rope(kind: str, **values: Any) -> dict[str, Any]:
    values |= {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, ORIGINAL: 16}
    return {"rope_parameters": values}


ORIGINAL = "original_max_position_embeddings"
MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mistral", {"sliding_window": 8, "layer_types": None}),
        ("gemma3_text", MIXED),
        ("qwen3", MIXED | {"use_sliding_window": True}),
        ("llama", rope("dynamic")),
        ("llama", rope("yarn")),
        ("llama", rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0)),
        ("olmoe", {}),
    ],
)
def test_a_document_is_the_same_alone_and_beside_a_longer_one(kind, changes):
    """Else the loss depends on the micro-batch. Windows and frequencies are the document's own."""
    model = small_model(kind, initializer_range=0.2, **changes)
    short, long = torch.randint(3, 64, (1, 20)), torch.randint(3, 64, (1, 60))
    both = torch.cat([torch.nn.functional.pad(short, (0, 40)), long])
    with torch.no_grad():
        beside = model(both, use_cache=False).logits[:1, :20]
        alone = model(short, use_cache=False).logits
    assert (beside - alone).abs().max() < 1e-4


SCALED = """\
name: a
model: {name_or_path: a/b}
data: {sources: [{path: a, type: chat}], seq_length: 1024}
training: {max_steps: 9}
"""
LONG = {"rope_type": "longrope", ORIGINAL: 512}
TEXT = "data.sources=[{path: a}]"


@pytest.mark.parametrize(
    ("shape", "values"),
    [
        ({"rope_parameters": LONG}, ()),
        ({"rope_parameters": LONG}, ("data.packing=false",)),
        ({"rope_parameters": LONG}, (TEXT, "data.packing=false")),
        ({"rope_parameters": LONG}, (TEXT, "data.isolate_documents=true")),
        ({"rope_parameters": LONG}, ("data.sources=[{path: a}, {path: b, type: tokens}]",)),
        ({"rope_scaling": {"type": "su"}, ORIGINAL: 512}, ()),
        ({"rope_parameters": {"full_attention": LONG, "other": {"rope_type": "default"}}}, ()),
    ],
)
def test_positions_that_depend_on_the_neighbors_are_refused(shape, values, tmp_path):
    """transformers gives all rows of a micro-batch the frequencies of the longest document."""
    (issue,) = check_shape(load(tmp_path, SCALED, *values).config, shape)
    assert "longrope" in issue.what and "beyond 512 tokens" in issue.what
    assert "data.seq_length to 512 or less" in issue.fix


@pytest.mark.parametrize(
    ("shape", "values"),
    [
        ({"rope_parameters": LONG}, ("data.seq_length=512",)),
        ({"rope_parameters": LONG}, (TEXT,)),
        ({"rope_parameters": LONG}, ("data.sources=[{type: fake}]",)),
        ({"rope_parameters": LONG | {"rope_type": "yarn"}}, ()),
        ({"rope_parameters": {"rope_type": "default"}}, ()),
        ({"rope_scaling": None}, ()),
    ],
)
def test_positions_that_depend_on_no_neighbor_are_accepted(shape, values, tmp_path):
    assert check_shape(load(tmp_path, SCALED, *values).config, shape) == []


@each(
    ("gpt2", {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}),
    ("llama", {"attention_dropout": 0.5}),
    ("gpt_neox", {"attention_dropout": 0.5, "hidden_dropout": 0.5}),
)
def test_the_dropout_of_a_model_can_be_turned_off(kind, drops):
    model, ids = small_model(kind, **drops), torch.arange(8)[None]
    expected = model.eval()(ids).logits
    model.train()
    assert not torch.allclose(model(ids).logits, expected)
    disable_dropout(model)
    torch.testing.assert_close(model(ids).logits, expected)
    assert all(getattr(model.config, name) == 0.5 for name in drops), "it is exported"


def test_the_dropout_of_an_adapter_stays_on():
    model = small_model("gpt2")
    add_adapter(model, AdapterConfig(type="lora", dropout=0.5), dtype=torch.float32, name="")
    disable_dropout(model)
    modules = dict(model.named_modules()).items()
    on = {name for name, module in modules if isinstance(module, nn.Dropout) and module.p > 0}
    assert on and all("lora_dropout" in name for name in on)
