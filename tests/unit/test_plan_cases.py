"""Models that are larger than the GPUs, as docs/large-models.md plans them."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from isles.cli import main
from isles.config.load import load_run_file
from isles.errors import ExitCode
from isles.plan.report import ClusterPlan
from isles.plan.verb import PlanOptions, plan_of
from tests.documents import ROOT, blocks

PAGE = ROOT / "docs" / "large-models.md"
NOT_SHOWN = ("Memory-saving options: not needed", "Times are guesses")

QWEN: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}
LLAMA = {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672}
LLAMA |= {"num_hidden_layers": 80, "vocab_size": 128256, "max_position_embeddings": 131072}
MIXTURE = {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144}
MIXTURE |= {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
MIXTURE |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
SHAPES = {
    "Qwen/Qwen3-32B": QWEN,
    "Qwen/Qwen3-30B-A3B": QWEN | MIXTURE,
    "meta-llama/Llama-3.3-70B-Instruct": QWEN | LLAMA,
}
"""The sizes of the published config.json files."""

THREE_PCS = "4060ti-16,3070,3070@1gbe"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the run files of the page, and a cache with the config.json of each model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name, shape in SHAPES.items():
        cached = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text("a")
        (cached / "snapshots" / "a").mkdir(parents=True)
        (cached / "snapshots" / "a" / "config.json").write_text(json.dumps(shape))
    for block in blocks(PAGE):
        if block.language == "yaml":
            (tmp_path / block.text.splitlines()[0].removeprefix("# ")).write_text(block.text)
    return tmp_path


def cluster_of(name: str, gpus: str, *overrides: str) -> ClusterPlan:
    """The plan of a run file of the page."""
    (cluster,) = plan_of(load_run_file(Path(name), overrides), PlanOptions(gpus=gpus)).clusters
    return cluster


def test_the_page_shows_what_is_printed(here, capsys):
    """ISLES_WRITE_GOLDEN=1 writes it anew: plan --gpus."""
    text = PAGE.read_text(encoding="utf-8")
    consoles = [b.text.partition("\n") for b in blocks(PAGE) if b.language == "console"]
    assert len(consoles) == len(SHAPES)
    for typed, _, shown in consoles:
        code = main(shlex.split(typed.removeprefix("$ isles ")))
        assert code in (ExitCode.OK, ExitCode.PREFLIGHT)
        parts = capsys.readouterr().out.split("\n\n")
        printed = "\n\n".join(p.strip("\n") for p in parts if not p.startswith(NOT_SHOWN)) + "\n"
        text = text.replace(f"{typed}\n{shown}```", f"{typed}\n{printed}```")
    if os.environ.get("ISLES_WRITE_GOLDEN"):
        PAGE.write_text(text, encoding="utf-8")
    assert text == PAGE.read_text(encoding="utf-8")


def test_layers_in_four_bits_are_dealt_by_memory(here):
    own = cluster_of("32b.yaml", THREE_PCS).own
    assert own.fits and own.layout is not None and own.layout.pp == 3
    layers = [rank.layers for rank in own.ranks]
    assert sum(layers) == 64 and layers[0] > layers[1] > layers[2]
    # Queries and output, keys and values, three matrices of the MLP; scales take 0.127 bits.
    block = 2 * 5120 * 8192 + 2 * 5120 * 1024 + 3 * 5120 * 25600
    # An adapter of rank 16 in fp32, on each matrix.
    adapter = 4 * 16 * (2 * (5120 + 8192) + 2 * (5120 + 1024) + 3 * (5120 + 25600))
    end = 2 * 151936 * 5120
    for rank, ends in zip(own.ranks, (end, 0, end), strict=True):
        expected = rank.layers * (block * 4.127 / 8 + adapter) + ends
        assert rank.memory.peak.weights == pytest.approx(expected, rel=1e-3)
    assert own.time is not None and own.time.sent_bytes == 2 * 16 * 1024 * 5120 * 2
    assert own.time.line_s == pytest.approx(own.time.sent_bytes / 125e6)


def test_a_pipeline_is_compared_with_itself_and_has_no_rows_to_balance(here, capsys):
    """Not with the slow strategy that auto would choose for a value that a pipeline refuses."""
    assert main(["plan", "32b.yaml", "--gpus", THREE_PCS]) == ExitCode.OK
    printed = capsys.readouterr().out
    assert "Scaling   the run does not fit the RTX 4060 Ti 16GB alone" in printed
    assert "Balance" not in printed
    speed = cluster_of("32b.yaml", THREE_PCS).speed
    assert speed is not None and all(0.9 < gain < 4 for gain in speed.gains.values())


def test_a_pipeline_is_the_first_option_of_unequal_gpus(here, capsys):
    """Before main memory, which takes five times as long; also with 4 bits as a further step."""
    options = cluster_of("32b.yaml", THREE_PCS, "strategy={kind: fsdp}").ladder
    times = {rung.name: rung.outcome.time for rung in options}
    first = times["strategy: {kind: ddp, pp_size: 3}"]
    offload = times["strategy: {kind: fsdp, cpu_offload: auto}"]
    assert first is not None and offload is not None and offload.total_s > 4 * first.total_s
    assert [rung.name for rung in options if rung.is_first] == ["strategy: {kind: ddp, pp_size: 3}"]
    lora = cluster_of("32b.yaml", THREE_PCS, "strategy={kind: fsdp}", "adapter.type=lora").ladder
    found = {rung.name: rung.outcome.fits for rung in lora}
    assert found["strategy: {kind: ddp, pp_size: 3}"] is False
    assert found["adapter: {type: qlora} in a pipeline"] is True
    cut = cluster_of("32b.yaml", "2x4090,2x4090@1gbe", "strategy={kind: fsdp, cp_size: 2}").ladder
    assert not any("pp_size" in rung.name for rung in cut), "its ranks share sequences already"
    auto, fsdp = "strategy: {kind: auto, pp_size: auto}\n", "strategy: {kind: fsdp}\n"
    Path("32b.yaml").write_text(Path("32b.yaml").read_text().replace(auto, fsdp))
    assert main(["plan", "32b.yaml", "--gpus", THREE_PCS, "--apply"]) == ExitCode.OK
    assert "pp_size: 3" in Path("32b.yaml").read_text() and "fits" in capsys.readouterr().out


def test_experts_are_in_main_memory_in_sixteen_bits(here):
    own = cluster_of("30b-a3b.yaml", "4090").own
    (rank,) = own.ranks
    assert own.fits and rank.memory.peak.weights == 0
    experts = 2 * 48 * 128 * 3 * 2048 * 768
    attention = 48 * (2 * 2048 * 4096 + 2 * 2048 * 512) * 4.127 / 8
    adapter = 48 * 16 * (2 * (2048 + 4096) + 2 * (2048 + 512))
    ends = 2 * 2 * 151936 * 2048
    # In fp32: the adapter, its gradients and two moments.
    expected = experts + attention + ends + 4 * 4 * adapter
    assert rank.memory.host == pytest.approx(expected, rel=2e-3)
    assert own.time is not None
    assert own.time.exposed_s == pytest.approx(2 * (experts + attention + ends) / 10e9, rel=0.01)
    assert cluster_of("30b-a3b.yaml", "4090", "strategy={kind: ddp}").own.fits is False
