"""The outer step over strategies: clusters that hold the model differently stay bit-identical."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from isles.checkpoint.load import load_tensors
from isles.checkpoint.save import stage, write_shards
from isles.config.load import load_run_file
from isles.config.sections.run import RunConfig
from isles.dist.batch import Batch
from isles.dist.world import World, join_world, leave_world
from isles.errors import TrainingError, UserError
from isles.models.build import fill_model
from isles.outer.cluster import Cluster
from isles.outer.codec import parse_codec
from isles.outer.diloco import OuterSettings
from isles.outer.layout import Layout, make_layout
from isles.run.env import RankEnv
from isles.strategies.base import Engine
from isles.train.model import empty_model, whole_model
from isles.train.optimizer import make_optimizers
from isles.train.strategy import is_sharded, make_engine, resolve_mesh, use_attention
from tests.outer_trainer import mean
from tests.ranks import run_ranks, start_ranks

ROWS, LENGTH, PIECE = 8, 16, 3000
PLAIN = OuterSettings(lr=1.0, momentum=0.0)
SGD = ("training.optimizer=sgd", "training.momentum=0.0", "training.weight_decay=0.0")
ALONE = "{kind: ddp}"


class Side:
    """One cluster in a test: an engine, its outer state, and data of its own."""

    def __init__(
        self, run_file: str, world: World, strategy: str, *overrides: str, data: int = 0
    ) -> None:
        self.config: RunConfig = load_run_file(
            Path(run_file), [f"strategy={strategy}", *overrides]
        ).config
        kind: Any = self.config.strategy
        self.world, self.data = world, data
        self.mesh = resolve_mesh(kind, world)
        if is_sharded(kind):
            model = empty_model(self.config, None)
        else:
            model = whole_model(self.config, None, world.device)
        use_attention(model, kind, self.mesh, world.device, self.config.training)
        self.engine: Engine = make_engine(
            kind,
            model,
            functools.partial(fill_model, config=self.config.model, seed=self.config.seed),
            functools.partial(make_optimizers, self.config.training),
            self.mesh,
            world,
            self.config,
        )
        self.step = 0

    def outer(self, codec: str, settings: OuterSettings, fragments: int = 1) -> Cluster:
        """Its outer state."""
        shapes = self.engine.trained_shapes()
        self.layout = make_layout(
            shapes, parse_codec(codec), num_fragments=fragments, piece_numbers=PIECE
        )
        self.cluster = Cluster(self.engine, self.world, self.layout, settings)
        self.cluster.begin()
        return self.cluster

    def train(self, steps: int, rows: slice = slice(0, ROWS)) -> int:
        """Inner steps on rows of its data; their tokens."""
        for _ in range(steps):
            generator = torch.Generator().manual_seed(1000 * self.data + self.step)
            ids = torch.randint(0, 512, (ROWS, LENGTH + 1), generator=generator)[rows]
            mine = ids[self.mesh.dp_rank :: self.mesh.dp_size]
            batch = Batch(mine[:, :-1].contiguous(), mine[:, 1:].contiguous(), ())
            tokens = len(ids) * LENGTH
            self.engine.forward_backward(batch, loss_divisor=tokens, is_last=True)
            self.engine.optimizer_step(lr=0.01, max_norm=None)
            self.step += 1
        return steps * LENGTH * len(range(ROWS)[rows])

    def loss(self) -> float:
        """Of one row, with the weights that the model computes with; of all ranks the mean."""
        ids = torch.arange(LENGTH + 1).unsqueeze(0) * 7
        loss = float(self.engine.evaluate(Batch(ids[:, :-1], ids[:, 1:].contiguous(), ())))
        return sum(self.world.gather(loss)) / self.mesh.dp_size

    def weights(self) -> dict[str, Tensor]:
        """All trained weights, whole, as copies."""
        return {
            name: self.engine.whole_weight(name).clone() for name in self.engine.trained_shapes()
        }


class Meeting:
    """Stands for the hub: rank 0 of each cluster averages what all have brought."""

    def __init__(self, folder: Path, name: str, names: Sequence[str], world: World) -> None:
        self.folder, self.name, self.names = folder, name, names
        if world.is_main:
            self.store = dist.FileStore(str(folder / "store"), len(names))
            self.store.set_timeout(timedelta(seconds=100))

    def path(self, case: str, outer_step: int) -> Path:
        return self.folder / f"{case}-{outer_step}-{self.name}.part"

    def state(self, case: str, fragment: int) -> Path:
        return self.folder / f"{case}-{fragment}.safetensors"

    def wait(self, key: str, *, is_mine: bool) -> None:
        """Say that something is there, or wait for it, on rank 0."""
        if hasattr(self, "store"):
            self.store.set(key, "done") if is_mine else self.store.wait([key])

    def average(self, side: Side, case: str, outer_step: int, fragment: int, tokens: int) -> Path:
        """The turn's average in a file, on rank 0."""
        goal = self.path(case, outer_step).with_suffix(".average")
        if not side.world.is_main:
            return goal
        self.store.set(f"{case}-{outer_step}-{self.name}", str(tokens))
        parts = []
        for name in self.names:
            weight = float(self.store.get(f"{case}-{outer_step}-{name}"))
            parts.append(((self.folder / f"{case}-{outer_step}-{name}.part").read_bytes(), weight))
        goal.write_bytes(average_of(side.layout, fragment, parts))
        return goal


def average_of(layout: Layout, fragment: int, parts: Sequence[tuple[bytes, float]]) -> bytes:
    return mean(layout.codec, layout.piece_counts(fragment), parts)


def contribute(cluster: Cluster, fragment: int, path: Path) -> float:
    """Make a contribution between two inner steps."""
    cluster.snapshot(fragment)
    return cluster.encode(fragment, path)


def export(cluster: Cluster, fragment: int, path: Path, version: int) -> None:
    """Write the state, and the digest that the hub would be told."""
    cluster.export_state(fragment, path, version=version)
    digest = cluster.digest(fragment)
    path.with_suffix(".digest").write_text(digest)


def take(
    cluster: Cluster, fragment: int, path: Path, version: int, *, keeps_steps: bool = False
) -> None:
    """Take over what `export` wrote."""
    digest = path.with_suffix(".digest").read_text()
    cluster.import_state(
        fragment, path, version=version, outer_params=digest, keeps_steps=keeps_steps
    )


def hash_of(weights: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in weights.items():
        digest.update(name.encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture
def plain_run_file(run_file: Path) -> Path:
    """Without a tokenizer: token ids are made up here. A model with tied weights, on the disk."""
    content = yaml.safe_load(run_file.read_text())
    content["data"]["sources"] = [{"type": "fake"}]
    del content["tokenizer"]
    content["model"]["init"] = "pretrained"
    run_file.write_text(yaml.safe_dump(content))
    model = run_file.parent / "tiny" / "config.json"
    shape = json.loads(model.read_text()) | {"tie_word_embeddings": True}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(model.parent)
    return run_file


# Strategy of the second cluster, codec, and what both set: the first is one rank under ddp.
LORA = ("adapter.type=lora", "adapter.r=4", "adapter.alpha=8")
CASES: dict[int, dict[str, tuple[str, str, tuple[str, ...]]]] = {
    2: {
        "ddp": (ALONE, "none", ()),
        "fsdp": ("{kind: fsdp}", "int8", ("training.optimizer=muon",)),
        "fsdp-bf16": ("{kind: fsdp}", "bf16", ("training.precision=bf16-true",)),
        "fsdp-lora": ("{kind: fsdp}", "topk", LORA),
        "zero1": ("{kind: deepspeed, zero_stage: 1}", "int8", ()),
        "zero2": (
            "{kind: deepspeed, zero_stage: 2}",
            "topk:0.1",
            ("training.precision=bf16-mixed",),
        ),
        "zero3": ("{kind: deepspeed, zero_stage: 3}", "int4", ()),
    },
    4: {
        "hsdp": ("{kind: fsdp, sharding_strategy: HYBRID_SHARD, shard_size: 2}", "int8", ()),
        "fsdp-tp": ("{kind: fsdp, tp_size: 2}", "topk", ()),
    },
}


def turns_of_a_cluster(
    env: RankEnv, run_file: str, folder: str, number: int, cases: dict[str, Any]
) -> dict[str, tuple[list[str], float]]:
    """Every case's turns; digests of the outer state after each, and of weights; the last loss."""
    world = join_world(env, device="cpu", timeout_s=100)
    meeting = Meeting(Path(folder), f"cluster{number}", ("cluster0", "cluster1"), world)
    found = {}
    for case, (strategy, codec, overrides) in cases.items():
        side = Side(run_file, world, ALONE if number == 0 else strategy, *overrides, data=number)
        start = side.weights()
        cluster = side.outer(codec, OuterSettings(max_norm=0.05), fragments=2)
        # Under bf16 DeepSpeed rounds the weights that it begins with.
        seen = [hash_of(start) if case != "zero2" else "rounded"]
        if number == 0:
            for fragment in range(2):
                export(cluster, fragment, meeting.state(case, fragment), 0)
        meeting.wait(f"{case}-state", is_mine=number == 0)
        if number == 1:
            for fragment in range(2):
                take(cluster, fragment, meeting.state(case, fragment), 0)
        # Two fragments by turns; in the third turn inner steps go on meanwhile, and in the last
        # two none is made, so that both have all weights in common.
        for outer_step, steps in enumerate((2, 1, 1, 1, 0, 0)):
            fragment = outer_step % 2
            tokens = side.train(steps) or 1
            if outer_step == 2:  # encoded in a thread, while inner steps go on
                cluster.snapshot(fragment)
                with ThreadPoolExecutor(1) as pool:
                    encoding = pool.submit(cluster.encode, fragment, meeting.path(case, outer_step))
                    side.train(1)
                    made = encoding.result()
            else:
                made = contribute(cluster, fragment, meeting.path(case, outer_step))
            if outer_step == 0 and codec == "none":
                check_contribution(side, start, meeting.path(case, outer_step))
            average = meeting.average(side, case, outer_step, fragment, tokens + number)
            side.loss()  # weights that are gathered for this must not outlive the outer step
            if outer_step == 2:
                with ThreadPoolExecutor(1) as pool:
                    going = pool.submit(cluster.advance, fragment, average, 2, "overlap", alpha=0.5)
                    side.train(1)
                    applied = going.result()
                cluster.give(fragment)
            else:
                applied = cluster.apply(fragment, average, 2, "on_time")
            assert made > 0 or outer_step > 3
            assert cluster.pending == []
            seen.append(f"{applied.digest} {applied.norm}")
        seen.append(hash_of(side.weights()))
        found[case] = seen, side.loss()
    leave_world()
    return found


def check_contribution(side: Side, start: dict[str, Tensor], path: Path) -> None:
    """It is, bit by bit, what the weights have moved since the outer parameters."""
    now = side.weights()
    if side.world.is_main:
        names = side.layout.fragments[0].names
        wanted = torch.cat([(start[name] - now[name]).flatten() for name in names])
        found = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32)
        assert torch.equal(found, wanted)


@pytest.mark.long
@pytest.mark.parametrize("world_size", CASES)
def test_every_strategy_keeps_the_bits_of_one_rank_under_ddp(
    plain_run_file: Path, tmp_path: Path, world_size: int
) -> None:
    """Two clusters of different strategy and number of ranks, with fragments, by every codec."""
    cases = CASES[world_size]
    arguments = (str(plain_run_file), str(tmp_path))
    gangs = [
        start_ranks(turns_of_a_cluster, size, *arguments, number, cases)
        for number, size in enumerate((1, world_size))
    ]
    results = [result for gang in gangs for result in gang.wait(300)]
    for case in cases:
        seen = [result[case][0] for result in results]
        assert all(each == seen[0] for each in seen), (case, seen)
        assert len(set(seen[0])) == len(seen[0]), (case, "nothing was learnt")
        losses = [result[case][1] for result in results]
        rounded = 1e-4 if case == "zero2" else 1e-6  # all of the model in bf16
        assert losses == pytest.approx(losses[:1] * len(losses), rel=rounded), (case, losses)


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest over all weights."""
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def equal_to_others(env: RankEnv, run_file: str, folder: str, number: int) -> float:
    """Two clusters with SGD and a turn after each step, against one with the rows of both."""
    world = join_world(env, device="cpu", timeout_s=100)
    meeting = Meeting(Path(folder), f"cluster{number}", ("cluster0", "cluster1"), world)
    side = Side(run_file, world, (ALONE, "{kind: fsdp}")[number], *SGD)
    cluster = side.outer("none", PLAIN)
    for outer_step in range(5):
        tokens = side.train(1, slice(0, 2) if number == 0 else slice(2, ROWS))
        contribute(cluster, 0, meeting.path("sgd", outer_step))
        cluster.apply(0, meeting.average(side, "sgd", outer_step, 0, tokens), 2, "on_time")
    together = Side(run_file, world, ALONE, *SGD)
    start = together.weights()
    together.train(5)
    assert difference(start, together.weights()) > 1e-4
    found = difference(side.weights(), together.weights())
    leave_world()
    return found


def test_two_clusters_that_meet_after_each_step_are_data_parallel(
    plain_run_file: Path, tmp_path: Path
) -> None:
    """With rate one, no momentum and SGD inside; unequal rows, weighted by tokens."""
    arguments = (str(plain_run_file), str(tmp_path))
    gangs = [start_ranks(equal_to_others, 1, *arguments, number) for number in (0, 1)]
    assert max(gang.wait()[0] for gang in gangs) < 1e-6


def one_rank_or_two(env: RankEnv, run_file: str, folder: str) -> dict[str, Any]:
    """Alone in a run; faults of files; and state that goes to a cluster of one rank."""
    world = join_world(env, device="cpu", timeout_s=100)
    path = Path(folder)
    found: dict[str, Any] = {}
    plain = Side(run_file, world, "{kind: fsdp}")
    plain.train(6)
    side = Side(run_file, world, "{kind: fsdp}")
    cluster = side.outer("none", PLAIN)
    for _ in range(3):
        side.train(2)
        contribute(cluster, 0, path / "alone.part")
        average = path / "alone.average"
        if world.is_main:
            average.write_bytes(
                average_of(side.layout, 0, [((path / "alone.part").read_bytes(), 9.0)])
            )
        cluster.apply(0, average, 1, "on_time")
    found["alone"] = difference(plain.weights(), side.weights())
    found["failures"] = list(failures(side, path))

    coarse = Side(run_file, world, "{kind: fsdp}")
    cluster = coarse.outer("int4", OuterSettings(), fragments=2)
    for outer_step in range(3):  # the last is under way when the checkpoint is taken
        coarse.train(2)
        contribute(cluster, outer_step % 2, path / "coarse.part")
        average = path / "coarse.average"
        if world.is_main:
            parts = [((path / "coarse.part").read_bytes(), 1.0)]
            average.write_bytes(average_of(coarse.layout, outer_step % 2, parts))
        if outer_step < 2:
            cluster.apply(outer_step % 2, average, 1, "on_time")
    found["pending"] = cluster.pending
    for fragment in range(2):
        export(cluster, fragment, path / f"{fragment}.safetensors", 2)
    (path / "saved").mkdir(exist_ok=True)
    write_shards(stage(cluster.state_dict(), (0, 1)), path / "saved", world.saving)
    weights = coarse.weights()
    if world.is_main:
        save_file(weights, path / "weights.safetensors")
    found["digests"] = [cluster.digest(fragment) for fragment in range(2)]
    cluster.apply(0, path / "coarse.average", 1, "on_time")
    found["after"] = [cluster.digest(0), hash_of(coarse.weights())]
    errors = {k: v for k, v in cluster.state_dict().items() if ".error." in k}
    found["errors"] = {name: hash_of({name: value}) for name, value in errors.items()}
    leave_world()
    return found


def failures(side: Side, path: Path) -> Iterator[str]:
    """What broken files lead to, on every rank; nothing has changed afterwards."""
    before = hash_of(side.weights()), side.cluster.digest(0)
    good = path / "alone.average"
    broken = path / "broken.average"
    contents = {}
    if side.world.is_main:
        data = good.read_bytes()
        contents = {
            "short": data[:-4],
            "long": data + b"0000",
            "nan": b"\xff" * 8 + data[8:],
        }
    for name in ("short", "long", "nan", "absent"):
        if side.world.is_main:
            broken.unlink(missing_ok=True)
            if name in contents:
                broken.write_bytes(contents[name])
        try:
            side.cluster.apply(0, broken, 1, "late")
        except TrainingError as error:
            yield error.what
    try:
        contribute(side.cluster, 0, path / "alone.part" / "x")
    except TrainingError as error:
        yield error.what
    side.cluster.drop(0)
    for version, digest, name in ((0, before[1], good), (7, "other", path / "0.safetensors")):
        if name != good:
            side.cluster.export_state(0, name, version=7)
        try:
            side.cluster.import_state(
                0, name, version=version, outer_params=digest, keeps_steps=False
            )
        except TrainingError as error:
            yield error.what
    assert (hash_of(side.weights()), side.cluster.digest(0)) == before


def continue_alone(env: RankEnv, run_file: str, folder: str) -> dict[str, Any]:
    """A cluster of one rank takes over what two ranks have left."""
    world = join_world(env, device="cpu", timeout_s=100)
    path = Path(folder)
    newcomer = Side(run_file, world, ALONE)
    cluster = newcomer.outer("int4", OuterSettings(), fragments=2)
    newcomer.train(1)
    found: dict[str, Any] = {"digests": []}
    anchored: dict[str, Tensor] = {}
    for fragment in range(2):
        file = path / f"{fragment}.safetensors"
        take(cluster, fragment, file, 2)
        found["digests"].append(cluster.digest(fragment))
        saved, names = load_file(file), newcomer.layout.fragments[fragment].names
        anchored = newcomer.weights()
        flat = torch.cat([anchored[name].flatten() for name in names])
        assert torch.equal(flat, saved["outer_param"])
        assert float(saved["momentum"].abs().max()) > 0

    resumed = Side(run_file, world, ALONE)
    cluster = resumed.outer("int4", OuterSettings(), fragments=2)
    for name, value in load_file(path / "weights.safetensors").items():
        resumed.engine.set_whole_weight(name, value)
    resumed.engine.weights_set()
    cluster.expect([0])
    state = cluster.state_dict()
    load_tensors(state, path / "saved")
    cluster.apply(0, path / "coarse.average", 1, "on_time")
    found["after"] = [cluster.digest(0), hash_of(resumed.weights())]
    errors = {k: v for k, v in cluster.state_dict().items() if ".error." in k}
    found["errors"] = {name: hash_of({name: value}) for name, value in errors.items()}

    # A straggler keeps what it has learnt since the outer parameters.
    late = Side(run_file, world, ALONE)
    cluster = late.outer("int4", OuterSettings(), fragments=2)
    outer_params = late.weights()
    late.train(1)
    now = late.weights()
    wanted = {name: now[name] - outer_params[name] + anchored[name] for name in outer_params}
    for fragment in range(2):
        take(cluster, fragment, path / f"{fragment}.safetensors", 2, keeps_steps=True)
    found["lost"] = difference(late.weights(), wanted)
    try:
        take(Side(run_file, world, ALONE).outer("int8", PLAIN), 0, path / "0.safetensors", 2)
    except TrainingError as error:
        found["refused"] = error.what
    leave_world()
    return found


def test_state_goes_to_other_ranks_and_broken_files_change_nothing(
    plain_run_file: Path, tmp_path: Path
) -> None:
    arguments = (str(plain_run_file), str(tmp_path))
    results = run_ranks(one_rank_or_two, 2, *arguments)
    first = results[0]
    # One cluster with rate one is plain training, to the last bits of the outer parameters.
    assert first["alone"] < 1e-6
    for result in results:
        assert [what.split(":")[0] for what in result["failures"]] == [
            "broken.average",
            "broken.average",
            "the average of fragment 0 is not finite",
            "broken.average",
            "x",
            "alone.average",
            "0.safetensors holds other outer parameters than the cluster that gave it has",
        ]
        signs = ("shorter", "longer", "finite", "No such file", "exists", "layout", "holds")
        for what, sign in zip(result["failures"], signs, strict=True):
            assert sign in what, what
        assert result["pending"] == [0]
    (second,) = run_ranks(continue_alone, 1, *arguments)
    assert second["digests"] == first["digests"]
    assert second["after"] == first["after"]
    # Each rank has a share of what is owed; together they are all of it, also after a restart.
    assert second["errors"] == results[0]["errors"] | results[1]["errors"]
    assert len(second["errors"]) == len(results[0]["errors"]) + len(results[1]["errors"])
    assert second["lost"] < 1e-6
    assert "another fragment, layout or outer step" in second["refused"]


def refuse_a_pipeline(env: RankEnv, run_file: str) -> str:
    world = join_world(env, device="cpu", timeout_s=100)
    side = Side(run_file, world, "{kind: ddp, pp_size: 2}", "model.init=scratch")
    try:
        side.outer("none", PLAIN)
    except UserError as error:
        leave_world()
        return str(error)
    return ""


def test_a_pipeline_is_refused(plain_run_file: Path) -> None:
    model = plain_run_file.parent / "tiny" / "config.json"
    model.write_text(json.dumps(json.loads(model.read_text()) | {"tie_word_embeddings": False}))
    for text in run_ranks(refuse_a_pipeline, 2, str(plain_run_file)):
        assert "pp_size is 2" in text and "fix:" in text
