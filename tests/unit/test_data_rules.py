"""What a run file may ask of its data together: packing, streams, preferences, kinds of models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isles.config.load import Loaded, load_run_file
from isles.config.rules.shape import check_shape
from isles.errors import ConfigErrors, UserError
from isles.models.attention import check_attention
from tests.each import each

RUN = """\
model: {name_or_path: some/model}
tokenizer: {name_or_path: some/tokenizer}
data:
  sources:
    - {path: a, type: chat}
training: {max_steps: 100}
"""
TEXT = "data.sources=[{path: a}]"
FAKE = "data.sources=[{type: fake}]"
PAIRS = "data.sources=[{path: a, type: preference}]"
STREAM = "data.streaming=true"
DPO = "training.method=dpo"
RING = "strategy={kind: fsdp, pp_size: 2, cp_size: 2}"
FLASH = "model.attn_implementation=flash_attention_2"


def load(tmp_path: Path, *overrides: str) -> Loaded:
    (tmp_path / "run.yaml").write_text(RUN, encoding="utf-8")
    return load_run_file(tmp_path / "run.yaml", overrides)


@each(
    ("overrides", "what", "fix"),
    [
        (
            ["data.packing=false", "data.isolate_documents=true"],
            "isolate_documents true means nothing to packing false",
            "packing: true",
        ),
        ([TEXT, "data.too_long=drop"], "too_long drop means nothing to text", "delete it"),
        ([RING], "stages of a pipeline (pp_size 2) are told of documents", "data.packing: false"),
        (
            ["strategy={kind: ddp, pp_size: 2}", FLASH],
            "flash_attention_2 must be told where each document ends",
            "attn_implementation: sdpa",
        ),
        ([PAIRS], "method causal_lm does not read a preference source", "method: dpo"),
        ([DPO], "a chat source has one", "type: preference"),
        (
            [STREAM, "training.max_steps=null", "training.num_train_epochs=2"],
            "num_train_epochs 2 cannot be told in steps",
            "max_steps",
        ),
        ([STREAM, "data.sources=[{path: a}, {path: b}]"], "of 2 sources", "weight: 1 for each"),
        ([STREAM, FAKE, "tokenizer={}"], "nothing to stream", "delete"),
        ([STREAM, DPO, PAIRS], "dpo", "delete"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, overrides: list[str], what: str, fix: str
) -> None:
    with pytest.raises(ConfigErrors) as caught:
        load(tmp_path, *overrides)
    assert any(what in issue.what and fix in issue.fix for issue in caught.value.issues)


@each(
    "overrides",
    [
        [],
        [TEXT, "data.isolate_documents=true"],
        ["data.isolate_documents=false", RING],
        ["data.packing=false", RING],
        [PAIRS, DPO, "data.too_long=drop"],
        [FAKE, DPO],
        [STREAM],
        [STREAM, "data.sources=[{path: a, weight: 1}, {path: b, weight: 2}]"],
    ],
)
def test_what_goes_together_is_let_through(tmp_path: Path, overrides: list[str]) -> None:
    load(tmp_path, *overrides)


@each(
    ("kind", "overrides", "what"),
    [
        ("mamba", [], "by model_type mamba: its layers carry a state from token to token"),
        ("bloom", [], "by model_type bloom: it takes no positions"),
        ("their_own", [TEXT, "data.isolate_documents=true"], "kept apart by model_type their_own"),
        ("opt", ["model.attn_implementation=flex_attention"], "flex_attention does not keep"),
        ("gptj", [FLASH], "flash_attention_2 does not keep"),
        ("mamba", ["data.packing=false"], None),
        ("mamba", ["data.isolate_documents=false"], None),
        ("mamba", [TEXT], None),
        ("opt", [], None),
    ],
)
def test_models_that_do_not_heed_borders_are_refused(
    tmp_path: Path, kind: str, overrides: list[str], what: str | None
) -> None:
    found = check_shape(load(tmp_path, *overrides).config, {"model_type": kind})
    if what is None:
        assert not found
    else:
        (issue,) = found
        assert what in issue.what and "data.packing: false" in issue.fix


def test_attention_for_gpus_is_refused_without_one() -> None:
    for name in ("flash_attention_2", "flex_attention"):
        with pytest.raises(UserError, match=f"{name} trains on a GPU only") as caught:
            check_attention(name, torch.device("cpu"))
        assert "attn_implementation: sdpa" in caught.value.fix
    check_attention("sdpa", torch.device("cpu"))
    check_attention("eager", torch.device("cpu"))
