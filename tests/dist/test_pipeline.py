"""Pipeline parallel: stages on ranks in a row are the same model, and learn the same."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from isles.config.layout import make_layout
from isles.config.load import load_run_file
from isles.config.sections.model import ModelConfig
from isles.config.sections.strategy import FSDPStrategyConfig, PipelineSchedule
from isles.dist.batch import IGNORE_INDEX, Batch
from isles.dist.mesh import make_mesh
from isles.dist.world import join_world
from isles.errors import CommunicationError, ExitCode, UserError
from isles.facts.models import PIPELINE
from isles.models.build import build_empty_model, fill_model
from isles.run.env import RankEnv
from isles.run.paths import RunDir
from isles.run.records import read_record, read_rows
from isles.strategies.pipeline.engine import PipelineEngine
from isles.strategies.pipeline.stages import (
    MicroBatches,
    assign_layers,
    check_model,
    cut_stage,
    padded_count,
    rank_of_stage,
    stage_indices,
)
from tests.dist.test_failures import (
    check_that_a_killed_rank_is_noticed,
    check_that_the_last_good_weights_stay,
)
from tests.dist.test_same_mathematics import eval_loss, largest_difference, weights_of
from tests.each import each
from tests.ranks import run_ranks, start_training, train_to_end

SCHEDULES: tuple[PipelineSchedule, ...] = ("1f1b", "gpipe", "interleaved-1f1b", "zbv")


@pytest.fixture
def five_layers(run_file: Path, tiny_model: Path) -> Path:
    """The run file with a model whose layers no number of stages divides."""
    path = tiny_model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 5}))
    return run_file


def train(run_file: Path, world_size: int, strategy: str, *overrides: str) -> RunDir:
    run_dir, code = train_to_end(
        run_file, world_size, f"strategy={{{strategy}}}", *overrides, resume="no"
    )
    assert code == 0, strategy
    return run_dir


# Schedule, ranks, the rest of the strategy, rows of a micro-batch. Of 12 rows, 2 make 6 batches
# on two ranks and 3 on four; 12 make one, fewer than the ranks in a row; 4 make three, and with
# interleaving an odd number.
CASES = (
    ("1f1b", 2, "kind: ddp", 2),
    ("1f1b", 2, "kind: fsdp, sharding_strategy: SHARD_GRAD_OP", 12),
    ("1f1b", 4, "kind: fsdp", 2),
    ("1f1b", 4, "kind: fsdp, cp_size: 2", 3),
    ("1f1b", 4, "kind: ddp, tp_size: 2", 6),
    ("gpipe", 2, "kind: ddp", 12),
    ("interleaved-1f1b", 2, "kind: ddp", 4),
    ("interleaved-1f1b", 4, "kind: fsdp", 2),
    ("zbv", 2, "kind: ddp", 2),
    ("zbv", 4, "kind: fsdp", 2),
    ("zbv", 4, "kind: ddp, tp_size: 2", 3),
)


@pytest.mark.brief("some")
@pytest.mark.parametrize(
    "cases",
    [CASES[1::9], [case for n, case in enumerate(CASES) if n % 9 != 1]],
    ids=["some", "others"],
)
def test_a_pipeline_learns_what_one_process_learns(
    five_layers: Path, cases: Sequence[tuple[PipelineSchedule, int, str, int]]
) -> None:
    reference = train(five_layers, 1, "kind: ddp", "training.micro_batch_size=12")
    one_step = ("training.max_steps=1", "training.warmup_steps=0", "training.learning_rate=1e-30")
    start = train(five_layers, 1, "kind: ddp", *one_step)
    assert largest_difference(reference, start) > 1e-4, "it has learnt too little to compare with"
    for schedule, ranks, strategy, micro in cases:
        pipeline = f"{strategy}, pp_size: 2, pp_schedule: {schedule}"
        run_dir = train(five_layers, ranks, pipeline, f"training.micro_batch_size={micro}")
        difference = largest_difference(reference, run_dir)
        assert difference < 1e-5, (schedule, ranks, strategy, micro, difference)
        assert math.isclose(eval_loss(run_dir), eval_loss(reference), rel_tol=1e-4)


@pytest.mark.long
def test_four_stages_in_a_row_and_uneven_rows(five_layers: Path) -> None:
    """Stages of 1, 2, 1 and 1 layers; and one of two pipelines that takes three rows of four."""
    reference = train(five_layers, 1, "kind: ddp", "training.micro_batch_size=12")
    four = train(five_layers, 4, "kind: fsdp, pp_size: 4", "training.micro_batch_size=2")
    assert largest_difference(reference, four) < 1e-5
    uneven = 'balance={"0": 3, "1": 1, "2": 3, "3": 1}'
    size = "training.micro_batch_size=2"
    split = train(five_layers, 4, "kind: fsdp, pp_size: 2, pp_schedule: zbv", uneven, size)
    assert largest_difference(reference, split) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize(
    ("precision", "schedule", "checkpointing"),
    [
        ("bf16-mixed", "1f1b", "selective"),
        ("bf16-mixed", "zbv", "full"),
        ("bf16-true", "interleaved-1f1b", "full"),
        ("bf16-true", "zbv", "none"),
    ],
)
def test_every_precision_learns(
    five_layers: Path, precision: str, schedule: str, checkpointing: str
) -> None:
    """The loss after 20 steps is close to that of fp32, which falls by half a nat."""
    options = (
        f"training.precision={precision}",
        f"training.gradient_checkpointing={checkpointing}",
        "training.learning_rate=0.01",
        "training.micro_batch_size=3",
    )
    pipeline = f"kind: fsdp, pp_size: 2, pp_schedule: {schedule}"
    run_dir = train(five_layers, 2, pipeline, *options)
    losses = [row["loss"] for row in read_rows(run_dir.metrics) if row["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.long
def test_a_run_goes_on_with_and_without_a_pipeline(five_layers: Path) -> None:
    """A pipeline for 7 steps, one process for 6, another pipeline for 7: as one throughout."""
    constant = ("training.lr_scheduler_type=constant", "training.micro_batch_size=3")
    last: RunDir | None = None
    for world_size, strategy, until in [
        (2, "kind: ddp, pp_size: 2", 7),
        (1, "kind: ddp", 13),
        (4, "kind: fsdp, pp_size: 2, pp_schedule: zbv", 20),
    ]:
        last, code = train_to_end(
            five_layers,
            world_size,
            f"strategy={{{strategy}}}",
            f"training.max_steps={until}",
            *constant,
            f"output_dir={five_layers.parent / 'changing'}",
            resume="auto" if last is None else str(last.path),
        )
        assert code == 0
    once = train(five_layers, 1, "kind: ddp", *constant)
    assert last is not None
    assert largest_difference(once, last) < 1e-5
    one, other = weights_of(once), weights_of(last)
    moments = [name for name in one if name.startswith("optimizer.")]
    assert moments
    assert all(torch.allclose(one[n], other[n], rtol=1e-3, atol=1e-6) for n in moments)


@pytest.mark.long
def test_the_same_pipeline_goes_on_bit_for_bit(five_layers: Path) -> None:
    pipeline = "kind: fsdp, pp_size: 2, pp_schedule: interleaved-1f1b"
    options = ("training.lr_scheduler_type=constant", "training.micro_batch_size=3")
    once = train(five_layers, 2, pipeline, *options)
    runs = f"output_dir={five_layers.parent / 'cut'}"
    cut = train(five_layers, 2, pipeline, *options, "training.max_steps=9", runs)
    again, code = train_to_end(
        five_layers, 2, f"strategy={{{pipeline}}}", *options, runs, resume=str(cut.path)
    )
    assert code == 0
    one, other = weights_of(once), weights_of(again)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.long
def test_a_loss_that_is_not_finite_stops_every_stage(five_layers: Path) -> None:
    strategy = "strategy={kind: ddp, pp_size: 2}"
    check_that_the_last_good_weights_stay(five_layers, 2, strategy)


def _alone(env: RankEnv, folder: str) -> str:
    """Rank 0 takes a step; rank 1 does not come, and lives."""
    world = join_world(env, device="cpu", timeout_s=3, work_timeout_s=60)
    strategy = FSDPStrategyConfig(sharding_strategy="NO_SHARD", pp_size=2)
    mesh = make_mesh(make_layout(strategy, 2, local_world_size=2), world, is_sharded=True)
    config = ModelConfig(name_or_path=folder, init="scratch")
    engine = PipelineEngine(
        build_empty_model(config, dtype=torch.float32, vocab_size=None),
        functools.partial(fill_model, config=config, seed=0),
        lambda module: [torch.optim.AdamW(module.parameters())],
        strategy,
        mesh,
        world,
        precision="32-true",
        parallelize=lambda module: module,
    )
    said = torch.zeros(1)
    if env.rank == 1:
        dist.broadcast(said, src=0, group=world.work)
        return ""
    tokens = torch.ones(2, 8, dtype=torch.int64)
    try:
        engine.forward_backward(Batch(tokens, tokens, (0, 1)), loss_divisor=16, is_last=True)
    except CommunicationError as error:
        dist.broadcast(said, src=0, group=world.work)
        return str(error)
    return "no error"


@pytest.mark.long
def test_a_stage_that_does_not_come_is_waited_for_no_longer_than_said(tiny_model: Path) -> None:
    said = run_ranks(_alone, 2, str(tiny_model))[0]
    assert "rank 0 on" in said
    assert "stage 0 (0 to 1) of the pipeline" in said
    assert "ranks 0, 1" in said
    assert "fix:" in said


def test_a_killed_stage_is_noticed_by_the_others(five_layers: Path) -> None:
    check_that_a_killed_rank_is_noticed(five_layers, "strategy={kind: fsdp, pp_size: 2}")


def test_a_model_that_cannot_be_cut_is_refused_at_the_start(
    run_file: Path, tiny_model: Path
) -> None:
    path = tiny_model / "config.json"
    granite = {"model_type": "granite", "architectures": ["GraniteForCausalLM"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | granite))
    _, attempt, gang = start_training(run_file, 2, "strategy={kind: ddp, pp_size: 2}")
    assert set(gang.wait()) == {ExitCode.USER}
    error = read_record(attempt.rank_error(0)) or {}
    assert "granite" in error["what"]
    assert "strategy.pp_size" in error["where"] + error["what"]


def test_a_model_with_code_of_its_own_is_not_cut_into_stages() -> None:
    class Own(type(tiny("llama"))):  # type: ignore[misc]
        pass

    for model in (Own(tiny("llama").config), tiny("gpt2")):
        with pytest.raises(UserError) as caught:
            check_model(model)
        assert "cannot be cut into stages" in caught.value.what
        assert "pp_size" in caught.value.fix


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("training.torch_compile=true", "torch_compile does not go together"),
        ("training.gradient_checkpointing=selective", "zbv goes backwards twice"),
    ],
)
def test_what_a_pipeline_cannot_do_is_said_before_the_start(
    run_file: Path, override: str, what: str
) -> None:
    with pytest.raises(UserError) as caught:
        load_run_file(run_file, ("strategy={kind: ddp, pp_size: 2, pp_schedule: zbv}", override))
    assert what in str(caught.value)


def tiny(kind: str, **changes: object) -> Any:
    """A model of a kind, too small to be of use, with four layers that see all tokens."""
    known = AutoConfig.for_model(kind).to_dict()
    sizes: dict[str, object] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 4,
    }
    sizes = {key: value for key, value in sizes.items() if key in known}
    fixed = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(
        kind, **(sizes | fixed | {"tie_word_embeddings": False} | changes)
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@each("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@each("kind", sorted(PIPELINE))
def test_stages_one_after_the_other_are_the_whole_model(kind: str, dtype: torch.dtype) -> None:
    """Every kind of model that is let through, bit for bit, trained weights and all."""
    model = tiny(kind).to(dtype)
    check_model(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    tokens = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    x = tokens
    names: set[str] = set()
    for index, layers in enumerate(assign_layers(4, 3)):
        stage = cut_stage(model, layers, is_first=index == 0, is_last=index == 2, dtype=dtype)
        x = stage(x)
        own = {name for name, _ in stage.named_parameters()}
        assert not own & names, "no weight is on two stages"
        names |= own
    assert names == {name for name, _ in model.named_parameters()}
    assert torch.equal(x, model(input_ids=tokens).logits)


def test_layers_are_dealt_evenly_and_the_ends_get_fewer() -> None:
    def counts(layers: int, stages: int) -> list[int]:
        dealt = assign_layers(layers, stages)
        assert [index for part in dealt for index in part] == list(range(layers))
        return [len(part) for part in dealt]

    assert counts(8, 4) == [2, 2, 2, 2]
    assert counts(5, 2) == [3, 2]
    assert counts(6, 4) == [1, 2, 2, 1]
    assert counts(7, 4) == [2, 2, 2, 1]
    assert counts(4, 4) == [1, 1, 1, 1]


@each("schedule", SCHEDULES)
@each("pp_size", [2, 3, 4])
def test_every_stage_has_one_rank(schedule: PipelineSchedule, pp_size: int) -> None:
    found = {
        stage: rank for rank in range(pp_size) for stage in stage_indices(schedule, rank, pp_size)
    }
    assert sorted(found) == list(range(len(found)))
    assert all(rank_of_stage(schedule, s, pp_size) == rank for s, rank in found.items())


def test_micro_batches_are_brought_to_one_shape() -> None:
    held = MicroBatches()
    for rows in (2, 1):
        held.hold(torch.full((rows, 4), 7), torch.full((rows, 4), 8), None)
    inputs, targets, positions = held.take(3)
    assert inputs.tolist() == [[7] * 4] * 3 + [[0] * 4] * 3
    assert targets.tolist() == [[8] * 4] * 3 + [[IGNORE_INDEX] * 4] * 3
    assert positions is None
    assert len(held) == 0
    assert [padded_count("interleaved-1f1b", n, 2) for n in (1, 2, 3, 4, 5, 7)] == [
        1,
        2,
        3,
        4,
        6,
        8,
    ]
    assert padded_count("zbv", 5, 4) == 5
