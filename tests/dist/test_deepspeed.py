"""DeepSpeed ZeRO 1, 2 and 3: the mathematics of one process, and its checkpoints."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from isles.config.interop.deepspeed import deepspeed_settings
from isles.config.load import load_run_file
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import DeepSpeedStrategyConfig
from isles.dist.batch import IGNORE_INDEX, Batch
from isles.dist.split import RowSplit, even_split
from isles.dist.world import World, join_world, leave_world
from isles.errors import ExitCode
from isles.models.build import build_empty_model, build_model, fill_model
from isles.run.checkpoints import list_checkpoints
from isles.run.env import RankEnv
from isles.run.paths import RunDir
from isles.run.records import read_record, read_rows
from isles.train.optimizer import make_optimizers
from tests.dist.test_failures import check_that_the_last_good_weights_stay
from tests.dist.test_same_mathematics import weights_of
from tests.ranks import run_ranks, start_training, train_to_end

ROWS, LENGTH, STEPS = 12, 16, 20
PLAIN: list[dict[str, Any]] = [{"zero_stage": stage} for stage in (1, 2, 3)]
FILES = {
    "offload": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "infinity": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
    "small": {"stage": 3, "stage3_param_persistence_threshold": 0, "overlap_comm": False},
}


def rows_of_step(step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step, with targets of very different numbers in each row."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randint(0, 512, (ROWS, LENGTH), generator=generator)
    targets = torch.randint(0, 512, (ROWS, LENGTH), generator=generator)
    ends = torch.randint(1, LENGTH, (ROWS, 1), generator=generator)
    return inputs, targets.masked_fill(torch.arange(LENGTH) >= ends, IGNORE_INDEX)


def micro_batches(step: int, split: RowSplit, rank: int) -> Iterator[Batch]:
    """What a rank computes in a step; a row without targets where it has none."""
    inputs, targets = rows_of_step(step)
    first = split.first_row(rank)
    for rows in split.micro_steps(rank):
        if rows:
            yield Batch(inputs[first : first + rows], targets[first : first + rows], ())
        else:
            yield Batch(inputs[:1], torch.full_like(targets[:1], IGNORE_INDEX), ())
        first += rows


def train_alone(config: RunConfig) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """The weights, losses and norms of one process with whole batches."""
    model: Any = make_model(config)
    (optimizer,) = make_optimizers(config.training, model)
    losses, norms = [], []
    for step in range(STEPS):
        inputs, targets = rows_of_step(step)
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        losses.append(float(loss.detach()))
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), losses, norms


def rate(step: int) -> float:
    return 0.001 * (1 + step % 3)


def make_model(config: RunConfig) -> nn.Module:
    cpu = torch.device("cpu")
    return build_model(config.model, device=cpu, dtype=torch.float32, seed=0, vocab_size=None)


def make_engine(config: RunConfig, strategy: DeepSpeedStrategyConfig, world: World) -> Any:
    from isles.strategies.deepspeed.engine import DeepSpeedEngine

    settings = deepspeed_settings(config, strategy)
    if settings["zero_optimization"]["stage"] == 3:
        model = build_empty_model(config.model, dtype=torch.float32, vocab_size=None)
    else:
        model = make_model(config)
    return DeepSpeedEngine(
        model,
        functools.partial(fill_model, config=config.model, seed=0),
        functools.partial(make_optimizers, config.training),
        world,
        settings=settings,
    )


def train_one_step(engine: Any, step: int, split: RowSplit, world: World) -> tuple[float, float]:
    """The loss over all ranks, and the norm."""
    tokens = int((rows_of_step(step)[1] != IGNORE_INDEX).sum())
    batches = list(micro_batches(step, split, world.rank))
    total = 0.0
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        total += float(engine.forward_backward(batch, loss_divisor=tokens, is_last=is_last))
    norm = float(engine.optimizer_step(lr=rate(step), max_norm=0.5))
    return sum(world.gather(total)) / tokens, norm


def compare(env: RankEnv, run_file: str, strategies: list[dict[str, Any]]) -> dict[str, float]:
    """Train by every strategy and split; the largest differences to one process."""
    world = join_world(env, device="cpu", timeout_s=100)
    config = load_run_file(Path(run_file)).config
    weights, losses, norms = train_alone(config)
    found = {}
    size = env.world_size
    unequal = {1: (12,), 2: (9, 3), 4: (6, 5, 1, 0)}[size]
    splits = {
        "one micro-step": even_split(ROWS, size, 12, in_step=True),
        "three, unequal": RowSplit(unequal, ({1: 4, 2: 3, 4: 2}[size],) * size, in_step=True),
    }
    for keys in strategies:
        strategy = DeepSpeedStrategyConfig(**keys)
        for name, split in splits.items():
            if len(split.micro_steps(0)) == 1 and keys not in PLAIN:
                continue
            engine = make_engine(config, strategy, world)
            worst = 0.0
            for step in range(STEPS):
                loss, norm = train_one_step(engine, step, split, world)
                worst = max(worst, abs(loss - losses[step]), abs(norm - norms[step]))
            assert engine.good_steps() is None
            mine = engine.state_dict()
            for key, value in mine.items():
                if key.startswith("model."):
                    difference = (value - weights[key.removeprefix("model.")]).abs().max()
                    worst = max(worst, float(difference))
            held = world.gather([key for key in mine if key.startswith("model.")])
            names = list(itertools.chain.from_iterable(held))
            assert sorted(names) == sorted(f"model.{n}" for n in weights), "each is saved once"
            found[f"{keys} x {name}"] = max(world.gather(worst))
    leave_world()
    return found


@pytest.fixture
def plain_run_file(run_file: Path) -> Path:
    """Without a tokenizer: token ids are made up here."""
    content = yaml.safe_load(run_file.read_text())
    content["data"]["sources"] = [{"type": "fake"}]
    del content["tokenizer"]
    run_file.write_text(yaml.safe_dump(content))
    return run_file


@pytest.mark.brief("2-plain")
@pytest.mark.parametrize(
    "world_size, with_files",
    [(2, False), (2, True), (1, False), (4, False)],
    ids=["2-plain", "2-files", "1", "4"],
)
def test_every_stage_equals_one_process(
    plain_run_file: Path, world_size: int, with_files: bool
) -> None:
    """Stages, accumulation, unequal rows; and on two ranks buckets, offloading and files."""
    strategies = list(PLAIN)
    if with_files:
        strategies.append({"zero_stage": 1, "offload_optimizer": "cpu"})
        strategies.append({"zero_stage": 2, "reduce_bucket_size": 1000})
        for name, zero in FILES.items():
            path = plain_run_file.parent / f"{name}.json"
            path.write_text(json.dumps({"zero_optimization": zero, "gradient_clipping": "auto"}))
            strategies.append({"config_file": str(path)})
    found = run_ranks(compare, world_size, str(plain_run_file), strategies)[0]
    assert len(found) == len(PLAIN) + len(strategies)
    assert max(found.values()) < 1e-5, found


def strategy_of(word: str) -> tuple[str, int]:
    """`3x2`: stage 3 on two ranks; stage 0 is ddp."""
    number, ranks = word.split("x")
    kind = "{kind: ddp}" if number == "0" else f"{{kind: deepspeed, zero_stage: {number}}}"
    return f"strategy={kind}", int(ranks)


CONSTANT = (
    "training.lr_scheduler_type=constant",
    "training.micro_batch_size=2",
    "training.eval_steps=5",
)


def train_in_legs(run_file: Path, *legs: str) -> RunDir:
    """One run, each part of its 20 steps by another strategy on other ranks."""
    last: RunDir | None = None
    runs = run_file.parent / "-".join(legs)
    for index, leg in enumerate(legs):
        strategy, world_size = strategy_of(leg)
        until = 20 * (index + 1) // len(legs)
        options = (strategy, f"training.max_steps={until}", f"output_dir={runs}", *CONSTANT)
        resume = "auto" if last is None else str(last.path)
        last, code = train_to_end(run_file, world_size, *options, resume=resume)
        assert code == 0, leg
    assert last is not None
    return last


LEGS = [
    (("0x1", "2x2", "3x3"), True),
    (("3x2", "2x1"), False),
]


@pytest.mark.long
@pytest.mark.parametrize(("legs", "is_tied"), LEGS)
def test_checkpoints_fit_every_strategy(
    run_file: Path, legs: tuple[str, ...], is_tied: bool
) -> None:
    """Weights, optimizer state and evaluations are those of one process under ddp."""
    model = run_file.parent / "tiny" / "config.json"
    model.write_text(json.dumps(json.loads(model.read_text()) | {"tie_word_embeddings": is_tied}))
    alone, mixed = train_in_legs(run_file, "0x1"), train_in_legs(run_file, *legs)
    one, other = weights_of(alone), weights_of(mixed)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype and value.shape == other[name].shape, name
        assert float((value - other[name]).abs().max()) < 1e-5, name
    assert list_checkpoints(mixed)[-1].manifest["samples"] == 20 * 12
    for left, right in zip(evaluations(alone), evaluations(mixed), strict=True):
        assert left[0] == right[0] and abs(left[1] - right[1]) < 1e-5


def evaluations(run_dir: RunDir) -> list[tuple[int, float]]:
    rows = (row for row in read_rows(run_dir.metrics) if row["kind"] == "eval")
    return sorted(
        {int(row["step"]): float(row["loss"]) for row in rows if row["step"] % 5 == 0}.items()
    )


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 2, 3])
def test_resumed_equals_uninterrupted_bit_for_bit(run_file: Path, number: int) -> None:
    whole = weights_of(train_in_legs(run_file, f"{number}x2"))
    halves = weights_of(train_in_legs(run_file, f"{number}x2", f"{number}x2"))
    assert whole.keys() == halves.keys()
    assert all(torch.equal(whole[name], halves[name]) for name in whole)


@pytest.mark.brief("2-bf16-mixed")
@pytest.mark.parametrize(
    ("number", "precision"), [(1, "32-true"), (1, "bf16-mixed"), (2, "bf16-mixed"), (3, "32-true")]
)
def test_weights_of_the_last_good_step_stay(run_file: Path, number: int, precision: str) -> None:
    strategy, world_size = strategy_of(f"{number}x2")
    precise = f"training.precision={precision}"
    state = check_that_the_last_good_weights_stay(run_file, world_size, strategy, precise)
    assert all(bool(torch.isfinite(value).all()) for value in state.values())


def step_on_after_a_bad_step(env: RankEnv, run_file: str) -> list[float]:
    """How far weights move, by stage, in good steps that come after one that was not finite."""
    world = join_world(env, device="cpu", timeout_s=100)
    config = load_run_file(Path(run_file)).config
    split = even_split(ROWS, env.world_size, 12, in_step=True)
    moved = []
    for stage in (1, 2, 3):
        engine = make_engine(config, DeepSpeedStrategyConfig(zero_stage=stage), world)
        for step in range(2):
            train_one_step(engine, step, split, world)
        before = [part.detach().clone() for part in engine.trainable()]
        engine._guard.watch(torch.tensor(torch.nan))
        for step in range(2, 4):
            train_one_step(engine, step, split, world)
        pairs = zip(engine.trainable(), before, strict=True)
        moved.append(max(float((now - then).abs().max()) for now, then in pairs))
        assert engine.good_steps() == 2
    leave_world()
    return moved


@pytest.mark.long
def test_no_step_after_a_bad_one_moves_the_weights(plain_run_file: Path) -> None:
    """On a GPU the host looks only now and then; momentum must not go on until it does."""
    assert run_ranks(step_on_after_a_bad_step, 2, str(plain_run_file)) == [[0.0, 0.0, 0.0]] * 2


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 2, 3])
def test_bf16_learns_and_leaves_nothing_but_the_run(
    run_file: Path, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "here"
    empty.mkdir()
    monkeypatch.chdir(empty)
    options = ("training.precision=bf16-mixed", "training.learning_rate=0.01")
    strategy, world_size = strategy_of(f"{number}x2")
    run_dir, _, gang = start_training(run_file, world_size, strategy, *options)
    assert gang.wait() == [0, 0]
    losses = [row["loss"] for row in read_rows(run_dir.metrics) if row["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.5
    assert all(value.dtype == torch.float32 for value in weights_of(run_dir).values())
    assert list(empty.iterdir()) == []
    chatter = [line for line in gang.log.read_text().splitlines() if "deepspeed" in line.lower()]
    assert not [line for line in chatter if "isles." not in line], chatter


def overflow_first(env: RankEnv, run_file: str, file: str) -> tuple[list[float], dict[str, float]]:
    """Train in fp16 from a scale that overflows; losses, and the scale that is saved."""
    world = join_world(env, device="cpu", timeout_s=100)
    from isles.strategies.deepspeed.engine import import_deepspeed

    # DeepSpeed wants a CPU with fp16 instructions; torch computes without, only slower.
    accelerator: Any = import_deepspeed(world).accelerator.get_accelerator()
    type(accelerator).is_fp16_supported = lambda _: True
    config = load_run_file(Path(run_file), ["training.precision=fp16-mixed"]).config
    engine = make_engine(config, DeepSpeedStrategyConfig(config_file=file), world)
    split = even_split(ROWS, env.world_size, 3, in_step=True)
    before = {k: v for k, v in engine.state_dict().items() if k.startswith("model.")}
    losses = []
    for step in range(40):
        loss, norm = train_one_step(engine, step % 2, split, world)
        losses.append(loss)
        if step == 0:
            after = engine.state_dict()
            assert norm == float("inf")
            assert all(torch.equal(after[name], value) for name, value in before.items())
    assert engine.good_steps() is None
    state = engine.state_dict()
    engine.load_state_dict(state)
    again = engine.state_dict()
    assert all(torch.equal(again[name], value) for name, value in state.items())
    leave_world()
    return losses, {k: float(v) for k, v in state.items() if k.startswith("scaler.")}


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 2, 3])
def test_fp16_lowers_its_scale_and_learns(plain_run_file: Path, number: int) -> None:
    file = plain_run_file.parent / "ds.json"
    fp16 = {"enabled": "auto", "initial_scale_power": 28, "hysteresis": 1}
    file.write_text(json.dumps({"fp16": fp16, "zero_optimization": {"stage": number}}))
    (losses, scaler), *_ = run_ranks(overflow_first, 2, str(plain_run_file), str(file))
    assert losses[-1] < losses[0] - 0.2
    assert 2**8 < scaler["scaler.scale"] < 2**28 and scaler["scaler.growth"] > 5


def test_fp16_on_a_cpu_without_it_is_refused_by_name(run_file: Path) -> None:
    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
        pytest.skip("this CPU computes in fp16")
    strategy, _ = strategy_of("2x1")
    _, attempt, gang = start_training(run_file, 1, strategy, "training.precision=fp16-mixed")
    assert gang.wait() == [ExitCode.PREFLIGHT]
    error = read_record(attempt.rank_error(0)) or {}
    assert "cannot compute in fp16" in error["what"] and "32-true" in error["fix"]
