"""What an adapter cannot learn is named at the start."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from isles.config.sections.model import AdapterConfig, ModelConfig
from isles.data.mix import build_datasets
from isles.data.stream import segments
from isles.errors import UserError
from isles.facts.units import format_count
from isles.models.adapter import add_adapter, base_name, import_peft
from isles.models.build import build_empty_model
from isles.models.fill import fill_adapter
from isles.train.reach import adapter_notes
from tests.data import quiet, write_rows
from tests.each import each
from tests.run_files import faults, load
from tests.small_models import small_model
from tests.unit.test_models import make_base

RUN = """\
name: a
model: {name_or_path: ./base}
adapter: {type: lora}
data: {sources: [{path: rows.jsonl, type: chat}], seq_length: 32, validation_fraction: 0}
training: {max_steps: 1}
"""
START, END = "<|im_start|>", "<|im_end|>"
STACKS = ("experts.gate_up_proj", "experts.down_proj")


@pytest.fixture(autouse=True)
def _peft() -> None:
    """Imported before there is data: records of what it logs keep the frames that import it."""
    import_peft(AdapterConfig(type="lora"))


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Of 64 tokens: the last two begin and end a turn."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {f"w{number}": number for number in range(62)} | {START: 62, END: 63}
    made = Tokenizer(WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = Whitespace()
    found = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="w2")
    found.add_special_tokens({"additional_special_tokens": [START, END]})
    found.chat_template = (
        "{% for m in messages %}{{ '<|im_start|> ' + m.role + ' ' + m.content + ' <|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
    )
    return found


def notes(
    folder: Path, tokenizer: PreTrainedTokenizerFast, *values: str, num_rows: int = 3
) -> list[str]:
    """What is said at the start of a run of the base in this folder."""
    turns = [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": "w7"}]
    rows = write_rows(folder / "rows.jsonl", [{"messages": turns}] * num_rows)
    config = load(folder, RUN, f"data.sources=[{{path: {rows}, type: chat}}]", *values).config
    base = ModelConfig(name_or_path=str(folder / "base"), init="pretrained")
    model = build_empty_model(base, dtype=torch.float32, vocab_size=None, adapter=config.adapter)
    config = config.model_copy(update={"model": base})
    training, _ = build_datasets(
        config.data, tokenizer, folder / "cache", seed=0, progress=quiet, vocab_size=64
    )
    try:
        found = list(adapter_notes(config, model, tokenizer, training))
        first = np.arange(4)
        assert training.num_targets(first) > 0 and len(training.rows(first).targets_BT) == 4
        return found
    finally:
        training.close()


def set_rows(folder: Path, change: str, name: str) -> None:
    file = folder / "base" / "model.safetensors"
    tensors = load_file(file)
    rows = tensors[name]
    match change:
        case "zero":
            rows[62:64] = 0
        case "equal":
            rows[62:64] = rows.mean(0) + 1
        case "equal to a token that is not used":
            rows[63] = rows[11]
        case "tiny":
            rows[63] *= 0.01
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("change", ["zero", "equal", "equal to a token that is not used", "tiny"])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_turn_tokens_that_nobody_trained_are_named(change, name, tokenizer, tmp_path):
    make_base(tmp_path / "base", pad_token_id=None)
    assert notes(tmp_path, tokenizer) == []
    set_rows(tmp_path, change, name)
    module = name.split(".")[-2]
    (text,) = notes(tmp_path, tokenizer)
    assert re.search(rf"<\|im_end\|>.*has not learned.*modules_to_save: \[{module}\]", text)
    assert (START in text) == (change in ("zero", "equal"))
    assert notes(tmp_path, tokenizer, f"adapter.modules_to_save=[{module}]") == []


def test_a_stream_is_looked_at_and_begins_with_its_first_sample(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_TOKENS", 400)
    make_base(tmp_path / "base", pad_token_id=None)
    set_rows(tmp_path, "zero", "lm_head.weight")
    (text,) = notes(tmp_path, tokenizer, "data.streaming=true", num_rows=200)
    assert END in text and START in text


def test_a_head_that_is_the_embedding_gets_another_fix(tokenizer, tmp_path):
    make_base(tmp_path / "base", tie_word_embeddings=True, pad_token_id=None)
    set_rows(tmp_path, "zero", "model.embed_tokens.weight")
    (text,) = notes(tmp_path, tokenizer)
    assert END in text and "modules_to_save" not in text and "adapter.type: none" in text


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmoe"])
def test_experts_that_get_no_adapter_are_named(kind, tokenizer, tmp_path):
    make_base(tmp_path / "base", kind, pad_token_id=None)
    (text,) = notes(tmp_path, tokenizer)
    stacks = "experts.gate_up_proj, experts.down_proj"
    sizes = {n: p.numel() for n, p in small_model(kind).named_parameters()}
    total = format_count(sum(size for n, size in sizes.items() if "experts." in n))
    assert text.startswith(f"0 of {total} expert weights have an adapter")
    assert f"adapter.target_modules: [all-linear, {stacks}] adapts them" in text
    half = notes(tmp_path, tokenizer, "adapter.target_modules=[all-linear, experts.down_proj]")
    down = format_count(sum(size for n, size in sizes.items() if "experts.down_proj" in n))
    assert half[0].startswith(f"{down} of {total} expert weights have an adapter")
    assert notes(tmp_path, tokenizer, f"adapter.target_modules=[all-linear, {stacks}]") == []


@each(
    ("down_proj", {}, ["experts.down_proj"]),
    ("experts.gate_up_proj", {"r": 8}, ["experts.gate_up_proj"]),
    ("q_proj", {"dropout": 0.5, "use_dora": True}, []),
    ("experts.down_proj", {"dropout": 0.5}, "adapter.dropout does not work"),
    ("experts.down_proj", {"use_dora": True}, "adapter.use_dora does not work"),
)
def test_stacked_experts_get_an_adapter_by_name(name, options, expected):
    model = small_model("mixtral")
    adapter = AdapterConfig(type="lora", target_modules=("o_proj", name), **options)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            add_adapter(model, adapter, dtype=torch.float32, name="")
        return
    before = {n for n, _ in small_model("mixtral").named_parameters()}
    add_adapter(model, adapter, dtype=torch.float32, name="")
    assert {own for n, _ in model.named_parameters() if (own := base_name(n))} == before
    wrapped = [m.parameter_name for m in model.modules() if hasattr(m, "parameter_name")]
    assert wrapped == [n.rpartition(".")[2] for n in expected] * 2


@each("experts.gate_upproj", "mlp.experts.nothing")
def test_an_unknown_stack_names_the_stacks_that_exist(name):
    adapter = AdapterConfig(type="lora", target_modules=("all-linear", name))
    with pytest.raises(UserError, match=f"no module '{name}'") as caught:
        add_adapter(small_model("qwen3_moe"), adapter, dtype=torch.float32, name="")
    assert caught.value.fix.endswith(f"the stacks of experts {', '.join(STACKS)}")
    is_near = name == "experts.gate_upproj"
    assert is_near == ("did you mean experts.gate_up_proj" in caught.value.fix)


def test_routers_that_are_linear_layers_get_no_adapter():
    """They return more than a product, which an adapter could not add to."""
    model = small_model("phimoe")
    add_adapter(model, AdapterConfig(type="lora"), dtype=torch.float32, name="")
    assert not any("lora" in n and "router" in n for n, _ in model.named_parameters())
    model(torch.arange(8)[None]).logits.sum().backward()


GIVEN = {
    "r": 8,
    "alpha": 8,
    "target_modules": ["q_proj"],
    "modules_to_save": ["lm_head"],
    "use_dora": True,
}


@pytest.mark.parametrize("given", [{}, GIVEN], ids=["type alone", "with keys of an adapter"])
def test_the_fix_that_trains_every_weight_works(given, tokenizer, tmp_path):
    """Of each message that names `adapter.type: none`. Keys of an adapter are deleted, as the next
    message says, which lists them all at once."""
    make_base(tmp_path / "base", "mixtral", pad_token_id=None)
    (experts,) = notes(tmp_path, tokenizer)
    shutil.rmtree(tmp_path / "base")
    make_base(tmp_path / "base", tie_word_embeddings=True, pad_token_id=None)
    set_rows(tmp_path, "zero", "model.embed_tokens.weight")
    (unknown,) = notes(tmp_path, tokenizer)
    with pytest.raises(UserError, match="share their weights") as caught:
        notes(tmp_path, tokenizer, "adapter.modules_to_save=[lm_head]")
    scratch = faults(tmp_path, RUN.replace("./base", "llama-2m, init: scratch"))
    (frozen,) = [issue for issue in scratch if "adapter.type" in issue.fix]
    for fix in (experts, unknown, caught.value.fix, frozen.fix):
        ((key, value),) = re.findall(r"(adapter\.type): (\w+)", fix)
        content = yaml.safe_load(RUN)
        content["checkpoint"] = {"merge_adapter": bool(given)}
        content["adapter"] |= {**given, key.partition(".")[2]: value}
        if given:
            issues = faults(tmp_path, yaml.safe_dump(content))
            assert len(issues) == len(given) + 1
            for issue in issues:
                assert issue.fix.startswith("delete it"), issue
                section, _, name = issue.where.split()[1].partition(".")
                del content[section][name]
        config = load(tmp_path, yaml.safe_dump(content)).config
        model = build_empty_model(
            ModelConfig(name_or_path=str(tmp_path / "base")),
            dtype=torch.float32,
            vocab_size=None,
            adapter=config.adapter,
        )
        assert all(p.requires_grad for p in model.parameters())


def test_other_models_get_an_adapter_everywhere(tokenizer, tmp_path):
    for kind in ("llama", "qwen3", "gpt_neox"):
        make_base(tmp_path / kind, kind, pad_token_id=None).rename(tmp_path / "base")
        assert notes(tmp_path, tokenizer) == []
        (tmp_path / "base").rename(tmp_path / f"{kind}-done")


def test_adapters_of_experts_reach_a_loss_that_others_do_not():
    """The next token is any permutation of the tokens, which attention alone cannot learn."""
    dice = torch.Generator().manual_seed(0)
    successor = torch.randperm(64, generator=dice)
    found = []
    for targets in (("q_proj", "k_proj", "v_proj", "o_proj"), ("all-linear", *STACKS)):
        model = small_model("qwen3_moe")
        for name, parameter in model.named_parameters():
            if "experts" in name or "lm_head" in name:
                parameter.data.mul_(10 if "lm_head" in name else 5)
        adapter = AdapterConfig(type="lora", r=8, alpha=16, target_modules=targets)
        add_adapter(model, adapter, dtype=torch.float32, name="")
        fill_adapter(model, 0)
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
        losses = []
        for _ in range(100):
            ids = torch.randint(0, 64, (4, 32), generator=dice)
            logits = model(input_ids=ids).logits.flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, successor[ids].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    without, with_experts = found
    assert sum(with_experts[-10:]) / 10 < min(without) - 0.2, (with_experts[-1], min(without))
