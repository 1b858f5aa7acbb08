"""`isles plan`: machines, memory, ladder, strategies, links, and what is printed."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import struct
import sys
from pathlib import Path

import psutil
import pytest

from isles.cli import main
from isles.config.fit import MEMORY_OPTIONS
from isles.config.load import load_run_file
from isles.config.sections.outer import DiLoCoConfig
from isles.config.sections.strategy import DDPStrategyConfig, FSDPStrategyConfig
from isles.errors import ExitCode, UserError
from isles.facts.gpus import GPUS, find_gpu, named_gpu, short_name
from isles.facts.models import load_shape
from isles.plan import verb as plan_verb
from isles.plan.find import parse_gpus, parse_link
from isles.plan.links import outer_plan
from isles.plan.machines import Device, Host, Link, Machines
from isles.plan.model import files_params, model_facts, shape_of
from isles.plan.report import ClusterPlan, Plan
from isles.plan.step import split_rows
from isles.plan.verb import PlanOptions, plan_of
from isles.run.links import keep_links, read_links
from tests.documents import ROOT, blocks
from tests.each import each
from tests.model_hub import model_hub
from tests.programs import write_program

RUN = """\
name: trial   # a comment
model: {name_or_path: MODEL}
data:
  sources: [{path: python-docs}]
  seq_length: 1024   # tokens
training:
  max_steps: 1000
  global_batch_size: 24
  learning_rate: 2e-4   # of an adapter
  # the end of a section

checkpoint: {every_steps: 100}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an 8B model's config.json and a run file, on a machine without GPUs; programs
    are looked for in its folder bin first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(load_shape("llama-8b")))
    (tmp_path / "run.yaml").write_text(RUN.replace("MODEL", "./model"))
    return tmp_path


def planned(*overrides: str, gpus: str = "", nodes: int | None = None) -> Plan:
    """The plan of run.yaml."""
    loaded = load_run_file(Path("run.yaml"), overrides)
    return plan_of(loaded, PlanOptions(gpus=gpus, nodes=nodes))


def only(plan: Plan) -> ClusterPlan:
    """The one cluster of a plan."""
    (cluster,) = plan.clusters
    return cluster


def test_a_gpu_without_bf16_does_not_fit_a_run_in_bf16(here):
    found = only(planned("training.precision=bf16-mixed", gpus="v100,4090@1gbe")).own.issue
    assert found is not None and "is missing on V100" in found.what and "fp16-mixed" in found.fix
    assert only(planned("training.precision=fp16-mixed", gpus="v100,4090@1gbe")).own.issue is None


def test_fp8_needs_gpus_that_have_it_is_faster_and_holds_the_same(here):
    fp8, bf16 = "training.precision=fp8-mixed", "training.precision=bf16-mixed"
    compiled = ("training.torch_compile=true", "training.micro_batch_size=3")
    compiled += ("data.seq_length=4096",)
    found = only(planned(fp8, gpus="3090,4090@1gbe")).own.issue
    assert found is not None and "fp8, which is missing on RTX 3090." in found.what
    assert found.fix == "use training.precision: bf16-mixed"
    quick, plain = (only(planned(of, *compiled, gpus="8xh100")).own for of in (fp8, bf16))
    assert not quick.refused and quick.ranks[0].memory == plain.ranks[0].memory
    assert quick.time is not None and plain.time is not None
    assert 1.1 < plain.time.total_s / quick.time.total_s < 1.6


@each(
    ("4090", [["RTX 4090"]], None),
    ("2x4090+3090", [["RTX 4090", "RTX 4090", "RTX 3090"]], None),
    ("4090,3070ti@1gbe", [["RTX 4090"], ["RTX 3070 Ti"]], 125e6),
    (" 2 * a100-80 , rtx a6000 @ 20MB", [["A100-SXM4-80GB"] * 2, ["RTX A6000"]], 20e6),
    ("h100,h100@8xndr+3us", [["H100"], ["H100"]], 400e9),
)
def test_machines_as_typed(text: str, hosts: list[list[str]], rate: float | None):
    ((found, network),) = parse_gpus(text)
    assert [[device.name for device in host.devices] for host in found] == hosts
    assert (network.bytes_per_s if network else None) == rate


@each(
    ("--gpus 3075ti", "did you mean 3070ti"),
    ("--gpus 4090,", "'' is not a known GPU"),
    ("--gpus 4090@fast", "fast is not a valid network rate"),
    ("--gpus 4090@1gbe+soon", "soon is not a valid latency"),
    ("--gpus 4090,3090 --nodes 2", "--gpus names 2 machines"),
    ("--nodes 2", "--gpus 8xh100 --nodes 2"),
    ("--gpus 4090 --nodes 0", "1 to 1024"),
    ("--gpus 4090;3090", "names 2 clusters, and the run file has 1"),
    ("--link 1gbe;1gbe", "2 uplinks for 1 cluster"),
    ("--price 3", "0.30/kWh"),
)
def test_a_wrong_command_line_names_the_fix(words: str, hint: str, *, here, capsys):
    assert main(["plan", "run.yaml", *shlex.split(words.replace(";", "';'"))]) == ExitCode.USER
    error = capsys.readouterr().err
    assert hint in error and "Traceback" not in error


def test_every_card_has_a_short_name_of_its_own_and_is_never_guessed() -> None:
    names = [short_name(gpu) for gpu in GPUS]
    assert len(set(names)) == len(names)
    assert all(named_gpu(short_name(gpu)) is gpu for gpu in GPUS)
    assert all(find_gpu(f"NVIDIA {gpu.name}") is gpu for gpu in GPUS)
    assert all(gpu.source and gpu.watts and gpu.memory_bytes >= 4 << 30 for gpu in GPUS)
    assert all(gpu.bf16_flops > 1e12 for gpu in GPUS)
    unknown = ("RTX 3040 Laptop GPU", "RTX 4090 D", "RTX 3070 Mobile", "RTX 2080 Ti with Max-Q")
    for name in (*unknown, "Quadro RTX 6000", "of 2031"):
        assert find_gpu(f"NVIDIA GeForce {name}") is None
    for reported, name in (
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", "4070 laptop"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", "RTX 4070 laptop GPU"),
        ("NVIDIA GeForce RTX 3050 6GB Laptop GPU", "3050 6gb laptop"),
        ("NVIDIA GeForce RTX 2080 Super with Max-Q Design", "2080 super max-q"),
        ("NVIDIA RTX 2000 Ada Generation Laptop GPU", "RTX 2000 Ada laptop"),
        ("NVIDIA RTX A5000 Laptop GPU", "a5000-laptop"),
    ):
        assert find_gpu(reported) is named_gpu(name), reported
    assert named_gpu("a5000") is not named_gpu("a5000 laptop")
    # By SMs, clock and FLOPs a clock come out what the whitepapers print.
    published = {"5090": 209.5, "5080": 112.6, "5070ti": 87.9, "3080ti": 68.2, "4070ti": 80.2}
    published |= {"2080ti": 53.8, "2080": 40.3}
    for name, tflops in published.items():
        assert named_gpu(name).bf16_flops / 1e12 == pytest.approx(tflops, abs=0.06)


def test_a_run_that_fits_and_one_that_does_not(here, capsys):
    assert main(["plan", "run.yaml", "--gpus", "8xh100"]) == ExitCode.OK
    assert "run.yaml: fits" in capsys.readouterr().out
    assert main(["plan", "run.yaml", "--gpus", "4090,3080,3070@1gbe"]) == ExitCode.PREFLIGHT
    shown = capsys.readouterr().out
    assert "does NOT fit as written; first that fits: adapter" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_each_rung_needs_no_more_than_those_it_keeps(here):
    cluster = only(planned("strategy={kind: ddp}", gpus="2x3070"))
    peaks = {rung.name: rung.outcome.tightest.least.peak.total for rung in cluster.ladder}
    chain = ["as written", "optimizer: adamw_8bit", "gradient_checkpointing: selective"]
    chain += ["gradient_checkpointing: full", "strategy: {kind: fsdp}"]
    found = [peaks[name] for name in chain]
    assert found == sorted(found, reverse=True)
    four_bits = "adapter: {type: qlora}"
    assert peaks[four_bits] < peaks["adapter: {type: lora}"] < found[0]
    assert peaks[f"{four_bits} with fsdp"] < 0.85 * peaks[four_bits]
    lengths = [peak for name, peak in peaks.items() if name.startswith("seq_length")]
    assert len(lengths) == 2 and lengths == sorted(lengths, reverse=True)
    order = list(MEMORY_OPTIONS)
    places = [
        max(i for i, option in enumerate(order) if rung.name.startswith(option))
        for rung in cluster.ladder[1:]
    ]
    assert places == sorted(places) and len(set(places)) >= 6
    marked = [rung for rung in cluster.ladder if rung.is_first]
    fitting = [rung for rung in cluster.ladder if rung.outcome.fits]
    assert marked == fitting[:1] and not cluster.ladder[0].is_first


@each("none", "selective", "full", "offload")
def test_every_kind_of_checkpointing_has_a_plan(kind, *, here):
    changed = f"training.gradient_checkpointing={kind}"
    cluster = only(planned("strategy={kind: ddp}", changed, gpus="2x3070"))
    found = {rung.name: rung.outcome for rung in cluster.ladder}
    own, moved = found["as written"], found.get("gradient_checkpointing: offload")
    assert own.time is not None and own.time.total_s > 0
    assert (moved is None) == (kind == "offload")
    if moved is not None:
        assert moved.tightest.least.peak.total < own.tightest.least.peak.total
        assert moved.time is not None and moved.time.total_s > own.time.total_s


@each(
    ("4xt4", "32-true", "fp16-mixed"),
    ("4x4090", "32-true", "bf16-mixed"),
    ("4x4090", "fp8-mixed", "bf16-mixed"),
)
def test_options_have_a_precision_that_cards_and_adapters_support(gpus, given, taken, *, here):
    cluster = only(planned("strategy={kind: ddp}", f"training.precision={given}", gpus=gpus))
    changes = {rung.name: rung.changes for rung in cluster.ladder}
    assert "strategy: {kind: fsdp}" in changes
    assert changes["adapter: {type: qlora}"]["training.precision"] == taken


def test_a_compiled_run_gets_the_options_after_offload(here):
    """It refuses to offload, so that is not kept."""
    cluster = only(planned("strategy={kind: ddp}", "training.torch_compile=true", gpus="2x3070"))
    names = [rung.name for rung in cluster.ladder]
    assert "gradient_checkpointing: offload" not in names
    assert "strategy: {kind: fsdp}" in names


@each(
    RUN,
    "# one line\n{name: f, model: {name_or_path: MODEL}, data: {sources: [{path: "
    "python-docs}]}, training: {max_steps: 5, micro_batch_size: 8}}  # all of it\n",
    RUN + "clusters:\n  - name: own   # a host\n    strategy:   # its own\n      kind: ddp\n",
    RUN.replace("2e-4", "2e-4\n  optimizer:   # soon") + "adapter: {type: none}\n",
)
def test_apply_keeps_comments_and_the_file_then_fits(text: str, *, here, capsys):
    text = text.replace("MODEL", "./model").replace("optimizer:   #", "optimizer: adamw   #")
    Path("run.yaml").write_text(text)
    words = ["plan", "run.yaml", "--gpus", "4090,3080@1gbe", "--apply"]
    assert main(words) == ExitCode.OK
    shown, after = capsys.readouterr().out, Path("run.yaml").read_text()
    assert shown.startswith("--- run.yaml\n+++ run.yaml (new)\n") and "run.yaml: fits" in shown
    assert re.findall(r"#.*", after) == re.findall(r"#.*", text)
    kept = [line for line in text.splitlines() if line.strip() and "{" not in line]
    assert sum(line not in after for line in kept) <= 1
    assert main(words) == ExitCode.OK
    assert "nothing to apply: it fits as written" in capsys.readouterr().out
    assert Path("run.yaml").read_text() == after


def test_apply_changes_nothing_on_a_full_disk_nor_where_nothing_fits(here, capsys, monkeypatch):
    def refuse(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = Path("run.yaml").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(plan_verb, "write_text_atomic", refuse)
        assert main(["plan", "run.yaml", "--gpus", "4090,3080@1gbe", "--apply"]) == ExitCode.USER
    assert "no space left" in capsys.readouterr().err
    shape = {**load_shape("llama-8b"), "num_hidden_layers": 400}
    Path("model/config.json").write_text(json.dumps(shape))
    assert main(["plan", "run.yaml", "--gpus", "3070", "--apply"]) == ExitCode.PREFLIGHT
    assert "No option fits" in capsys.readouterr().out
    assert Path("run.yaml").read_text() == before


def test_json_has_the_same_facts(here, capsys):
    assert main(["plan", "run.yaml", "--gpus", "4090,3080@1gbe", "--json"]) == ExitCode.PREFLIGHT
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False and found["tokens_per_step"] == 24 * 1024
    assert found["model"]["params"] == found["model"]["trained"] == 8_030_261_248
    assert found["machines"][0]["network"]["confidence"] == "given"
    (cluster,) = found["clusters"]
    first, second = cluster["ranks"]
    assert (first["device"], first["confidence"]) == ("RTX 4090", "table")
    assert first["rows"] + second["rows"] == 24
    causes = ("weights", "gradients", "optimizer", "activations", "logits", "gathered")
    for moment in first["moments"]:
        assert moment["total"] == pytest.approx(sum(moment[cause] for cause in causes))
    assert max(moment["total"] for moment in first["moments"]) == first["peak_bytes"]
    assert cluster["strategies"][0]["is_chosen"] and cluster["ladder"]
    parts = ("compute_s", "optimizer_s", "exposed_s", "idle_s", "bubble_s")
    time = cluster["time"]
    assert time["total_s"] == pytest.approx(sum(time[part] for part in parts))
    assert {store["what"] for store in cluster["stores"]} == {"main memory", "disk"}
    assert found["assumptions"] and found["outer"] is None


def test_bytes_between_clusters_are_those_of_the_codec() -> None:
    """Of 100 million numbers, as docs/clusters.md has them."""
    line = Link(12.5e6, 0.0, "given", "100 Mbit/s")
    sites = [Machines(name, (), line, line) for name in "ab"]
    for codec, sent, fetched, seconds in (
        ("none", 400, 400, 64),
        ("bf16", 200, 200, 32),
        ("int8", 102, 102, 16),
        ("int4", 56, 102, 13),
        ("topk", 23, 45, 5.4),
    ):
        config = DiLoCoConfig.model_validate({"codec": codec})
        first = outer_plan(config, 10**8, sites, line, [1, 1]).lines[0]
        assert first.sent_bytes / 1e6 == pytest.approx(sent, rel=0.02)
        assert first.fetched_bytes / 1e6 == pytest.approx(fetched, rel=0.02)
        assert first.seconds == pytest.approx(seconds, rel=0.03)


def test_the_smallest_sync_every_keeps_the_sync_below_its_share() -> None:
    line = Link(12.5e6, 0.025, "given", "100 Mbit/s")
    host = (Host("a", (Device.of(named_gpu("4090")),)),)
    sites = [Machines(name, host, line, line) for name in "abcd"]
    config = DiLoCoConfig(codec="int8")
    found = outer_plan(config, 10**8, sites, Link(125e6, 0.001, "given"), [1.0, 2.0, 1.5, 1.0])
    assert found.lines[0].seconds == pytest.approx(16.3, abs=0.2)
    assert found.hub_in_bytes == found.hub_out_bytes == 4 * found.lines[0].sent_bytes
    assert found.hub_s < found.round_s == found.lines[0].seconds
    least = found.least_sync_every
    assert least is not None and found.step_s == 2.0  # all wait for the slowest
    assert found.round_s / (least * 2.0) <= 0.02 < found.round_s / ((least - 1) * 2.0)
    assert found.overhead == pytest.approx(found.round_s / (500 * 2.0))
    for delay in (100, "auto"):
        hidden = outer_plan(DiLoCoConfig(delay=delay), 10**8, sites, line, [1.0] * 4)
        assert hidden.overhead == 0.0


def test_unequal_cards_are_faster_together_than_alone_and_than_with_even_rows(here):
    settings = ("adapter.type=qlora", "training.gradient_checkpointing=full")
    cluster = only(planned(*settings, gpus="4090,3080,3070@10gbe"))
    time, speed = cluster.own.time, cluster.speed
    assert time is not None and speed is not None
    rows = [rank.rows for rank in cluster.own.ranks]
    assert sum(rows) == 24 and rows == sorted(rows, reverse=True) and rows[0] > 2 * rows[2]
    assert speed.even_s is not None and speed.alone_s is not None
    assert time.total_s < speed.even_s and time.total_s < speed.alone_s
    # No more than all three together.
    flops = [rank.device.flops for rank in cluster.own.ranks]
    assert speed.alone_s / time.total_s <= sum(flops) / flops[0] * 1.1
    for total in (1, 7, 24, 100):
        split = split_rows(total, [5.0, 3.0, 0.0])
        assert sum(split) == total and split[2] == 0


def test_a_pipeline_is_cut_for_unequal_cards_and_says_what_is_lost(here, capsys):
    """A 24 and an 8 GB GPU over 1 GbE: by speed, by memory, as given, and evenly."""
    lora = ("adapter={type: lora}", "training.gradient_checkpointing=full")
    pipeline = (*lora, "training.micro_batch_size=1", "strategy={kind: ddp, pp_size: 2}")
    gpus = "4090,3070@1gbe"
    cluster = only(planned(*pipeline, gpus=gpus))
    first, last = cluster.own.ranks
    assert first.layers + last.layers == 32 and first.layers > 3 * last.layers
    assert cluster.own.fits, "16 GB of frozen weights fit neither GPU"
    assert last.peak_bytes < first.peak_bytes
    time = cluster.own.time
    assert time is not None and time.bubble_s < 0.06 * time.total_s and time.exposed_s > 0
    even = only(planned(*pipeline, "balance=even", gpus=gpus)).own
    assert even.ranks[1].layers > 2, "only the memory limits it"
    assert even.time is None or even.time.total_s >= time.total_s
    given = only(planned(*pipeline, 'balance={"0": 9, "1": 1}', gpus=gpus)).own
    assert given.ranks[0].layers > 28
    main(["plan", "run.yaml", *pipeline, "--gpus", gpus])
    shown = " ".join(capsys.readouterr().out.split())
    layers = f"layers {first.layers} + {last.layers}; of a step, ranks wait "
    assert layers in shown and "while the pipeline fills and empties" in shown
    main(["plan", "run.yaml", *pipeline, "--gpus", gpus, "--json"])
    ranks = json.loads(capsys.readouterr().out)["clusters"][0]["ranks"]
    assert [rank["layers"] for rank in ranks] == [first.layers, last.layers]


@each(
    ("4090,3070@1gbe", "auto", 2, "a pipeline over 2 ranks, as neither ddp nor fsdp fits"),
    ("4090,3070@1gbe", "1", 1, "blocks that do not fit on a GPU stay in main memory"),
    ("2x4090", "auto", 1, "the whole model fits"),
    ("2x3070", "auto", 1, "nothing else fits in the 8.0 GiB"),  # and neither does a pipeline
)
def test_auto_takes_a_pipeline_or_main_memory_if_nothing_else_fits(
    gpus, given, stages, why, *, here
):
    lora = ("adapter={type: lora}", "training.gradient_checkpointing=full")
    strategy = f"strategy={{kind: auto, pp_size: {given}}}"
    cluster = only(planned(*lora, strategy, "training.micro_batch_size=1", gpus=gpus))
    found = cluster.own.strategy
    assert isinstance(found, DDPStrategyConfig | FSDPStrategyConfig)
    assert found.pp_size == stages and why in cluster.strategies[0].note
    assert cluster.own.fits


@each(("4090,3070@1gbe", [False, True]), ("2x4090", [False, False]), ("2x3070", [True, True]))
def test_each_gpu_keeps_in_main_memory_what_does_not_fit_on_it(gpus, is_moved, *, here, capsys):
    """Of a 1B model, all trained."""
    options = ("strategy={kind: fsdp, cpu_offload: auto}", "model.name_or_path=llama-1b")
    options += ("model.init=scratch", "training.gradient_checkpointing=full")
    options += ("tokenizer.train_vocab_size=8192", "training.micro_batch_size=1")
    cluster = only(planned(*options, gpus=gpus))
    offloaded = [rank.offloaded for rank in cluster.own.ranks]
    assert [0 < blocks < 16 for blocks in offloaded] == is_moved
    assert cluster.own.fits
    for rank in cluster.own.ranks:
        assert bool(rank.memory.host) == bool(rank.copied_bytes) == bool(rank.offloaded)
        assert rank.limit_bytes is not None and rank.peak_bytes <= rank.limit_bytes
    main(["plan", "run.yaml", *options, "--gpus", gpus])
    shown = " ".join(capsys.readouterr().out.split())
    assert (f"{offloaded[1]} of 16 blocks, which copies" in shown) == bool(offloaded[1])


def test_more_cards_never_need_more_memory_each(here):
    small = only(planned("strategy={kind: fsdp}", gpus="8xh100"))
    large = only(planned("strategy={kind: fsdp}", gpus="8xh100", nodes=2))
    peaks = [c.own.tightest.least.peak.total for c in (small, large)]
    assert peaks[1] < peaks[0]
    names = [each.name for each in large.strategies]
    assert {"ddp", "hsdp HYBRID_SHARD", "deepspeed ZeRO 3", "ddp pp 2"} < set(names)
    assert large.strategies[0].outcome is large.own and large.strategies[0].is_chosen


def test_a_model_of_an_unknown_kind_is_a_guess_and_its_files_are_counted(here, capsys):
    shape = {**load_shape("llama-8b"), "model_type": "nobody_knows"}
    Path("model/config.json").write_text(json.dumps(shape))
    header = json.dumps({"w": {"dtype": "BF16", "shape": [1000, 7], "data_offsets": [0, 14000]}})
    data = struct.pack("<Q", len(header)) + header.encode()
    Path("model/a.safetensors").write_bytes(data)  # no weights behind it
    assert files_params("./model") == 7000
    assert main(["plan", "run.yaml", "--gpus", "8xh100"]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "GUESS: the kind 'nobody_knows' is unknown, and is counted as a Llama" in shown
    assert "its safetensors files hold 7.0k numbers" in shown
    Path("model/config.json").write_text('{"model_type": "llama"}')
    assert main(["plan", "run.yaml", "--gpus", "8xh100"]) == ExitCode.USER
    captured = capsys.readouterr()
    assert "RTX" not in captured.out and "8 x H100" in captured.out
    assert "the model's config.json lacks hidden_size" in captured.err


def test_of_a_model_on_the_hub_only_its_config_is_fetched(here, capsys, monkeypatch):
    words = ["plan", "run.yaml", "--gpus", "4090"]
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with model_hub() as (url, asked):
        monkeypatch.setenv("HF_ENDPOINT", url)
        code = main([*words, "model.name_or_path=o/open", "adapter.type=lora"])
        shown = capsys.readouterr()
        assert code == ExitCode.OK, shown.err
        assert "1.2B parameters" in shown.out and "config.json from Hugging Face" in shown.out
        assert asked == [("/o/open/resolve/main/config.json", "Bearer hf_secret")]
        assert not list(here.rglob("models--*"))
        for name, hint in (
            ("o/gated", "requires a license"),
            ("o/no", "does not exist on Hugging Face"),
        ):
            assert main([*words, f"model.name_or_path={name}"]) == ExitCode.USER
            shown = capsys.readouterr()
            assert hint in shown.err and "RTX 4090" in shown.out and "24.6k tokens" in shown.out
            assert "hf_secret" not in shown.out + shown.err
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert main([*words, "model.name_or_path=o/open"]) == ExitCode.USER
        assert "HF_HUB_OFFLINE is set" in capsys.readouterr().err and len(asked) == 3


def test_the_cards_of_this_machine_are_measured(here, capsys, monkeypatch):
    lines = """case "$*" in
*memory.free*) echo "GPU-aa, 9000"; echo "GPU-bb, 24000";;
*) echo "0, NVIDIA GeForce RTX 4090, GPU-aa, 24564 MiB"
   echo "1, NVIDIA GeForce RTX 9999, GPU-bb, 30000 MiB";;
esac"""
    write_program(here / "bin" / "nvidia-smi", lines)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    first, second = only(planned("adapter.type=qlora")).own.ranks
    assert first.device.confidence == second.device.confidence == "measured"
    assert first.device.memory_bytes == 24564 * 2**20
    assert first.limit_bytes is not None and second.limit_bytes is not None
    assert first.limit_bytes < 9000 * 2**20 < second.limit_bytes
    assert second.device.flops == 0 and second.busy_s is None
    assert main(["plan", "run.yaml", "adapter.type=qlora"]) in (ExitCode.OK, ExitCode.PREFLIGHT)
    assert "the speed of a GPU is not in the table" in capsys.readouterr().out


def test_hosts_are_asked_and_the_silent_ones_are_unknown(here, capsys):
    lines = """case "$*" in
*desk1*) echo "0, NVIDIA GeForce RTX 3090, GPU-aa, 24576 MiB";;
*) echo "ssh: connect to host: Connection refused" >&2; exit 255;;
esac"""
    write_program(here / "bin" / "ssh", lines)
    launcher = "clusters=[{launcher: {kind: ssh, hosts: [me@desk1, me@desk2]}}]"
    plan = planned(launcher, "adapter.type=qlora")
    known, silent = only(plan).own.ranks
    assert (known.host, known.device.name) == ("desk1", "RTX 3090")
    assert silent.device.memory_bytes is None and plan.fits is None
    assert main(["plan", "run.yaml", launcher, "adapter.type=qlora"]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "whether it fits is not known" in shown and "no ssh server (" not in shown.split("\n")[0]


def test_cpu_ranks_have_a_time_wherever_they_run(here):
    lines = """case "$*" in
*nvidia-smi*) exit 127;;
*) echo 4; echo 8000000; echo 6000000;;
esac"""
    write_program(here / "bin" / "ssh", lines)
    kind = "kind: slurm, cpus_per_node: 4, memory_per_node: 8G"
    for launcher, cores, gib in (
        ("kind: ssh, hosts: [me@desk1, me@desk2]", 2.0, 7.6),
        (kind, 2.0, 8.0),
        (kind.replace("slurm", "pbs").replace("8G", "8gb"), 2.0, 8.0),
        ("kind: slurm", 1.0, None),
    ):
        plan = planned(f"clusters=[{{launcher: {{{launcher}}}, device: cpu, gpus_per_node: 2}}]")
        machines = only(plan).job.machines
        assert machines.devices[0].name == f"CPU process, {cores:g} cores"
        assert not machines.devices[0].is_cuda and only(plan).own.time is not None, launcher
        if gib is not None:
            assert round(machines.hosts[0].memory_bytes / 2**30, 1) == gib
        assert all("--gpus" not in note for note in machines.notes)
    assert (
        "2 threads for each rank"
        in planned(f"clusters=[{{launcher: {{{kind}}}, device: cpu, gpus_per_node: 2}}]")
        .machines[0]
        .notes[0]
    )


def test_main_memory_of_a_host_without_gpus_holds_the_steps_of_its_ranks(here):
    (cluster,) = planned("clusters=[{device: cpu, gpus_per_node: 2}]").clusters
    store = next(store for store in cluster.stores if store.what == "main memory")
    sizes = {item.name: item.size_bytes for item in store.items}
    assert sizes["steps of the ranks"] == sum(rank.peak_bytes for rank in cluster.own.ranks) > 0
    assert sizes["processes"] < 2**30


def test_the_cores_of_a_host_are_not_its_openmp_threads(here):
    lines = """case "$*" in
*nvidia-smi*) exit 127;;
*) export OMP_NUM_THREADS=3999; exec sh -c "${!#}";;
esac"""
    write_program(here / "bin" / "ssh", lines)
    plan = planned("clusters=[{launcher: {kind: ssh, hosts: [me@desk1]}, device: cpu}]")
    name = only(plan).job.machines.devices[0].name
    assert name.endswith(" cores") and name != "CPU process, 3999 cores"


def test_a_host_is_planned_within_the_limits_of_its_control_groups(here):
    lines = """case "$*" in
*nvidia-smi*) exit 127;;
*) exec sh -c "${!#}";;
esac"""
    write_program(here / "bin" / "ssh", lines)
    (group := here / "groups" / "job_1").mkdir(parents=True)
    (group / "memory.max").write_text(str(1200 << 20))
    (group / "cpu.max").write_text("100000 100000")
    (here / "own").write_text("0::/job_1")
    patched = "import sys, pathlib, isles.run.limits as limits; "
    patched += f"limits.CGROUPS = pathlib.Path('{here}/groups'); "
    patched += f"limits.OWN = pathlib.Path('{here}/own'); exec(sys.argv[2])"
    own = shlex.quote(sys.executable)
    python = write_program(here / "bin" / "limited", f'exec {own} -c "{patched}" "$@"')

    def host(path: object) -> tuple[str, float]:
        environment = f"environment: {{python: {path}}}, workdir: {here}"
        launcher = "launcher: {kind: ssh, hosts: [me@desk1]}, device: cpu"
        machines = only(planned(f"clusters=[{{{launcher}, {environment}}}]")).job.machines
        return machines.devices[0].name, machines.hosts[0].memory_bytes

    assert host(python) == ("CPU process, 1 cores", 1200 << 20)
    # Without isles there, the machine's.
    assert host("/nowhere/python")[1] == psutil.virtual_memory().total // 1024 * 1024


def test_what_slurm_is_asked_for_names_the_cards(here):
    cluster = "nodes: 2, gpus_per_node: 8"
    named = f"clusters=[{{launcher: {{kind: slurm, gres: 'gpu:h100:8'}}, {cluster}}}]"
    plan = planned(named)
    assert [device.name for device in only(plan).job.machines.devices] == ["H100"] * 16
    unnamed = planned(f"clusters=[{{launcher: {{kind: slurm}}, {cluster}}}]")
    own = only(unnamed).own
    assert own.fits is None and own.tightest.peak_bytes > 0 and own.time is None
    assert "--gpus 8xh100" in unnamed.machines[0].notes[0]


def test_a_script_is_not_planned_and_energy_has_its_price(here, capsys):
    Path("script.yaml").write_text("name: s\ntraining: {script: a.py}\n")
    assert main(["plan", "script.yaml"]) == ExitCode.USER
    assert "isles cannot plan a script" in capsys.readouterr().err
    words = ["plan", "run.yaml", "--gpus", "8xh100", "--json"]
    costs = []
    for price in ("0.30/kWh", "2.50/h"):
        assert main([*words, "--price", price]) == ExitCode.OK
        costs.append(json.loads(capsys.readouterr().out)["clusters"][0]["cost"])
    assert costs[0]["money"] == pytest.approx(0.3 * costs[0]["kwh"])
    assert costs[1]["money"] == pytest.approx(2.5 * costs[1]["gpu_hours"])


def test_flops_are_those_of_the_known_formula(here):
    config = load_run_file(Path("run.yaml")).config
    found = model_facts(config, shape_of(config))
    shape = load_shape("llama-8b")
    embedding = shape["vocab_size"] * shape["hidden_size"]
    matrices = 6 * (found.params - embedding)
    attention = 6 * 32 * 4096 * 1024
    assert found.flops_per_token == pytest.approx(matrices + attention, rel=1e-3)
    assert parse_link("2.5gbe").bytes_per_s == 312.5e6
    with pytest.raises(UserError):
        parse_link("0gbe")


def test_the_page_shows_what_is_printed(here, capsys):
    """ISLES_WRITE_GOLDEN=1 writes it anew: plan --gpus --nodes --link --hub-link --price --json
    --apply --details."""
    page = ROOT / "docs" / "plan.md"
    cached = here / "hub" / "models--meta-llama--Llama-2-7b-hf"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("a")
    (cached / "snapshots" / "a").mkdir(parents=True)
    sizes = {"intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 32000}
    llama_2 = load_shape("llama-8b") | sizes | {"max_position_embeddings": 4096}
    (cached / "snapshots" / "a" / "config.json").write_text(json.dumps(llama_2))
    (here / "examples").symlink_to(ROOT / "examples")
    golden = ROOT / "tests" / "golden" / "plan.md"
    for block in blocks(golden):
        if block.language == "yaml":
            (here / block.text.splitlines()[0].removeprefix("# ")).write_text(block.text)
    for path, shows in ((golden, 4), (page, 1)):
        text = path.read_text(encoding="utf-8")
        consoles = [b.text.partition("\n") for b in blocks(path) if b.language == "console"]
        assert len(consoles) == shows
        for typed, _, shown in consoles:
            code = main(shlex.split(typed.removeprefix("$ isles ")))
            assert code in (ExitCode.OK, ExitCode.PREFLIGHT)
            printed = capsys.readouterr().out
            if path == page:  # whether it fits, the memory, and the options
                printed = "\n\n".join(printed.split("\n\n")[:3]) + "\n"
            text = text.replace(f"{typed}\n{shown}```", f"{typed}\n{printed}```")
        if os.environ.get("ISLES_WRITE_GOLDEN"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")


def test_links_that_check_has_measured_are_those_of_a_plan(here, capsys):
    """By the hosts' own names or as ssh reaches them; where one is missing it guesses, as ever."""
    write_program(here / "bin" / "ssh", "exit 255")
    launcher = "clusters.0.launcher={kind: ssh, hosts: [me@10.0.0.1, me@10.0.0.2]}"
    words = ["plan", "run.yaml", launcher, "clusters.0.gpus_per_node=1", "--json"]

    def network():
        main(words)
        (machines,) = json.loads(capsys.readouterr().out)["machines"]
        return machines["network"], machines["notes"]

    assert network()[0]["confidence"] == "guess"
    names = {"me@10.0.0.1": "a1", "me@10.0.0.2": "a2"}
    third = {"bytes_per_s": 1.0, "rtt_s": 0.001}
    first = {"a1": {"a2": {"bytes_per_s": 118e6, "rtt_s": 0.001}, "a3": third}}
    keep_links(Path("runs"), first, names, 1.7e9)
    assert network()[0]["confidence"] == "guess", "one way only"
    keep_links(Path("runs"), {"a2": {"a1": {"bytes_per_s": 60e6, "rtt_s": 0.003}}}, names, 1.8e9)
    found, notes = network()
    assert (found["bytes_per_s"], found["latency_s"]) == (60e6, 0.0015)
    assert (found["confidence"], found["name"]) == ("measured", "480 Mbit/s")
    assert any("as `isles check` measured it on 2023-11-1" in note for note in notes), "the oldest"
    assert set(read_links(Path("runs"))["a1"]) == {"a2", "a3"}, "older pairs are kept"


def test_rows_that_are_not_packed_are_samples(here):
    Path("rows.jsonl").write_text('{"text": "a few words"}\n' * 60)
    source = "data.sources=[{path: rows.jsonl}]"
    epochs = ("training.max_steps=null", "training.num_train_epochs=2", source)
    assert planned(*epochs, "data.packing=false", "training.global_batch_size=8").data.steps == 16
    packed = planned(*epochs, "data.packing=true", "training.global_batch_size=8").data.steps
    assert packed is not None and packed < 16


def test_a_refusal_has_its_place_and_a_fix(here, capsys):
    sizes = ("strategy={kind: ddp, tp_size: 3}", "clusters=[{gpus_per_node: 3, device: cpu}]")
    for values, key, fix in (
        (sizes, "strategy.tp_size: tp_size 3 does not divide", "fix: use 2"),
        (("training.global_batch_size=2", sizes[1]), "training.global_batch_size", "fix: use 3"),
    ):
        assert main(["plan", "run.yaml", *values]) == ExitCode.USER
        shown = " ".join(capsys.readouterr().out.split())
        assert f"is refused: command line {key}" in shown and fix in shown


def test_the_disk_is_that_of_the_output_folder(here, monkeypatch):
    asked, usage = list[Path](), shutil.disk_usage

    def asks(path: Path) -> object:
        asked.append(path)
        return usage(path)

    monkeypatch.setattr("isles.plan.find.shutil.disk_usage", asks)
    Path("big").mkdir()
    planned("output_dir=big/new/runs", "clusters=[{device: cpu}]")
    assert asked == [here / "big"]
