"""The outer step over strategies: clusters that hold the model differently stay bit-identical."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
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
from isles.dist.batch import Batch
from isles.dist.world import World, join_world, leave_world
from isles.errors import TrainingError, UserError
from isles.models.build import fill_model
from isles.outer.cluster import Cluster
from isles.outer.codec import parse_codec
from isles.outer.diloco import OuterSettings
from isles.outer.layout import make_layout
from isles.run.env import RankEnv
from isles.strategies.base import Engine
from isles.train.model import empty_model, whole_model
from isles.train.optimizer import make_optimizers
from isles.train.strategy import is_sharded, make_engine, resolve_mesh, use_attention
from tests.outer_trainer import mean
from tests.ranks import run_ranks, start_ranks

ROWS, LENGTH, PIECE, TIMEOUT_S = 8, 16, 3000, 100.0
PLAIN = OuterSettings(lr=1.0, momentum=0.0)
ALONE = "{kind: ddp}"


class Side:
    """One cluster in a test: an engine, its outer state, and data of its own."""

    def __init__(
        self, run_file: str, world: World, strategy: str, *overrides: str, data: int = 0
    ) -> None:
        config = load_run_file(Path(run_file), [f"strategy={strategy}", *overrides]).config
        kind: Any = config.strategy
        self.world, self.data, self.step = world, data, 0
        self.mesh = resolve_mesh(kind, world)
        if is_sharded(kind):
            model = empty_model(config, None)
        else:
            model = whole_model(config, None, world.device)
        use_attention(model, kind, self.mesh, world.device, config.training)
        self.engine: Engine = make_engine(
            kind,
            model,
            functools.partial(fill_model, config=config.model, seed=config.seed),
            functools.partial(make_optimizers, config.training),
            self.mesh,
            world,
            config,
        )

    def outer(self, codec: str, settings: OuterSettings, fragments: int = 1) -> Cluster:
        """Its outer state."""
        self.layout = make_layout(
            self.engine.trained_shapes(),
            parse_codec(codec),
            num_fragments=fragments,
            piece_numbers=PIECE,
        )
        self.cluster = Cluster(self.engine, self.world, self.layout, settings)
        self.cluster.begin()
        return self.cluster

    def train(self, steps: int) -> int:
        """Inner steps on its data; their tokens."""
        for _ in range(steps):
            generator = torch.Generator().manual_seed(1000 * self.data + self.step)
            ids = torch.randint(0, 512, (ROWS, LENGTH + 1), generator=generator)
            mine = ids[self.mesh.dp_rank :: self.mesh.dp_size]
            batch = Batch(mine[:, :-1].contiguous(), mine[:, 1:].contiguous(), ())
            self.engine.forward_backward(batch, loss_divisor=ROWS * LENGTH, is_last=True)
            self.engine.optimizer_step(lr=0.01, max_norm=None)
            self.step += 1
        return steps * ROWS * LENGTH

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

    def contribute(self, fragment: int, path: Path) -> float:
        self.cluster.snapshot(fragment)
        return self.cluster.encode(fragment, path)

    def average(self, fragment: int, parts: Sequence[tuple[Path, float]], goal: Path) -> Path:
        """Rank 0 does what a hub does."""
        if self.world.is_main:
            counts = self.layout.piece_counts(fragment)
            read = [(path.read_bytes(), weight) for path, weight in parts]
            goal.write_bytes(mean(self.layout.codec, counts, read))
        return goal

    def export(self, fragment: int, path: Path, version: int) -> str:
        """Write the state; the digest that the hub would be told."""
        self.cluster.export_state(fragment, path, version=version)
        return self.cluster.digest(fragment)


class Meeting:
    """Rank 0 of two clusters meet in a file, and average what both have brought."""

    def __init__(self, folder: Path, number: int, world: World) -> None:
        self.folder, self.number = folder, number
        if world.is_main:
            self.store = dist.FileStore(str(folder / "store"), 2)
            self.store.set_timeout(timedelta(seconds=TIMEOUT_S))

    def part(self, outer_step: int) -> Path:
        return self.folder / f"{outer_step}-{self.number}.part"

    def average(self, side: Side, outer_step: int, fragment: int, tokens: int) -> Path:
        """The turn's average in a file, on rank 0."""
        parts = []
        if side.world.is_main:
            self.store.set(f"{outer_step}-{self.number}", str(tokens))
            for number in range(2):
                weight = float(self.store.get(f"{outer_step}-{number}"))
                parts.append((self.folder / f"{outer_step}-{number}.part", weight))
        return side.average(fragment, parts, self.part(outer_step).with_suffix(".average"))


def hash_of(weights: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in weights.items():
        digest.update(name.encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest over all weights."""
    return max(float((one[name] - other[name]).abs().max()) for name in one)


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
BF16_MIXED = ("training.precision=bf16-mixed",)
CASES: dict[int, dict[str, tuple[str, str, tuple[str, ...]]]] = {
    2: {
        "ddp": (ALONE, "none", ()),
        "fsdp": ("{kind: fsdp}", "int8", ("training.optimizer=muon",)),
        "fsdp-bf16": ("{kind: fsdp}", "bf16", ("training.precision=bf16-true",)),
        "fsdp-lora": ("{kind: fsdp}", "topk", LORA),
        "zero1": ("{kind: deepspeed, zero_stage: 1}", "int8", ()),
        "zero2": ("{kind: deepspeed, zero_stage: 2}", "topk:0.1", BF16_MIXED),
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
    world = join_world(env, device="cpu", timeout_s=TIMEOUT_S)
    found = {}
    for case, (strategy, codec, overrides) in cases.items():
        meeting = Meeting(Path(folder) / case, number, world)
        side = Side(run_file, world, ALONE if number == 0 else strategy, *overrides, data=number)
        cluster = side.outer(codec, OuterSettings(max_norm=0.05), fragments=2)
        # Under bf16 DeepSpeed rounds the weights that it begins with.
        seen = [hash_of(side.weights()) if case != "zero2" else "rounded"]
        for fragment in range(2):  # the second cluster begins with the state of the first
            state = meeting.folder / f"{fragment}.safetensors"
            if number == 0:
                meeting.store.set(f"state {fragment}", side.export(fragment, state, 0))
            digest = meeting.store.get(f"state {fragment}").decode() if world.is_main else ""
            if number == 1:
                digest = world.gather(digest)[0]
                cluster.import_state(
                    fragment, state, version=0, outer_params=digest, keeps_steps=False
                )
        # Two fragments by turns; in the third turn inner steps go on meanwhile, and in the last
        # two none is made, so that both have all weights in common.
        for outer_step, steps in enumerate((2, 1, 1, 1, 0, 0)):
            fragment, path = outer_step % 2, meeting.part(outer_step)
            tokens = side.train(steps) or 1
            if outer_step == 2:  # encoded in a thread, while inner steps go on
                cluster.snapshot(fragment)
                with ThreadPoolExecutor(1) as pool:
                    encoding = pool.submit(cluster.encode, fragment, path)
                    side.train(1)
                    made = encoding.result()
            else:
                made = side.contribute(fragment, path)
            average = meeting.average(side, outer_step, fragment, tokens + number)
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


@pytest.mark.long
@pytest.mark.parametrize("world_size", CASES)
def test_every_strategy_keeps_the_bits_of_one_rank_under_ddp(
    plain_run_file: Path, tmp_path: Path, world_size: int
) -> None:
    """Two clusters of different strategy and number of ranks, with fragments, by every codec."""
    cases = CASES[world_size]
    for case in cases:
        (tmp_path / case).mkdir()
    arguments = (str(plain_run_file), str(tmp_path))
    gangs = [
        start_ranks(turns_of_a_cluster, size, *arguments, number, cases)
        for number, size in enumerate((1, world_size))
    ]
    results = [result for gang in gangs for result in gang.wait()]
    for case in cases:
        seen = [result[case][0] for result in results]
        assert all(each == seen[0] for each in seen), (case, seen)
        assert len(set(seen[0])) == len(seen[0]), (case, "nothing was learnt")
        losses = [result[case][1] for result in results]
        rounded = 1e-4 if case == "zero2" else 1e-6  # all of the model in bf16
        assert losses == pytest.approx(losses[:1] * len(losses), rel=rounded), (case, losses)


def what_is_owed(cluster: Cluster) -> dict[str, str]:
    state = cluster.state_dict()
    return {name: hash_of({name: value}) for name, value in state.items() if ".error." in name}


def leave_a_state(env: RankEnv, run_file: str, folder: str) -> dict[str, Any]:
    """Two ranks: a checkpoint and a state for others, with a contribution under way."""
    world = join_world(env, device="cpu", timeout_s=TIMEOUT_S)
    path = Path(folder)
    refuse_broken_files(Side(run_file, world, "{kind: fsdp}"), path)
    side = Side(run_file, world, "{kind: fsdp}")
    cluster = side.outer("int4", OuterSettings(), fragments=2)
    for outer_step in range(3):
        fragment = outer_step % 2
        side.train(2)
        side.contribute(fragment, path / "part")
        average = side.average(fragment, [(path / "part", 1.0)], path / "average")
        if outer_step < 2:
            cluster.apply(fragment, average, 1, "on_time")
    assert cluster.pending == [0]
    digests = [side.export(fragment, path / f"{fragment}.safetensors", 2) for fragment in range(2)]
    (path / "saved").mkdir(exist_ok=True)
    write_shards(stage(cluster.state_dict(), (0, 1)), path / "saved", world.saving)
    weights = side.weights()
    if world.is_main:
        save_file(weights, path / "weights.safetensors")
    cluster.apply(0, average, 1, "on_time")
    after = [cluster.digest(0), hash_of(side.weights())]
    found = {"digests": digests, "after": after, "owed": what_is_owed(cluster)}
    leave_world()
    return found


def refuse_broken_files(side: Side, path: Path) -> None:
    """What broken files lead to, on every rank; nothing has changed afterwards."""
    cluster = side.outer("none", PLAIN)
    side.train(2)
    side.contribute(0, path / "part")
    average = side.average(0, [(path / "part", 9.0)], path / "average")
    before, broken = (hash_of(side.weights()), cluster.digest(0)), path / "broken"
    data = average.read_bytes() if side.world.is_main else b""
    for content, says in (
        (data[:-4], "broken: .*shorter"),
        (data + b"0000", "broken: .*longer"),
        (b"\xff" * 8 + data[8:], "the average of fragment 0 is not finite"),
        (None, "broken: No such file"),
    ):
        if side.world.is_main:
            broken.unlink(missing_ok=True)
            if content is not None:
                broken.write_bytes(content)
        with pytest.raises(TrainingError, match=says):
            cluster.apply(0, broken, 1, "late")
    with pytest.raises(TrainingError, match=r"x: .*exists"):
        side.contribute(0, path / "part" / "x")
    cluster.drop(0)
    state = path / "state"
    side.export(0, state, 7)
    for file, version, digest, says in (
        (average, 0, before[1], "average: .*layout"),
        (state, 8, before[1], "state: .*outer step"),
        (state, 7, "other", "state holds other outer parameters than the cluster that gave it"),
    ):
        with pytest.raises(TrainingError, match=says):
            cluster.import_state(0, file, version=version, outer_params=digest, keeps_steps=False)
    assert (hash_of(side.weights()), cluster.digest(0)) == before


def continue_alone(env: RankEnv, run_file: str, folder: str, digests: list[str]) -> dict[str, Any]:
    """A cluster of one rank takes over what two ranks have left."""
    world = join_world(env, device="cpu", timeout_s=TIMEOUT_S)
    path = Path(folder)

    def take(cluster: Cluster, fragment: int, *, keeps_steps: bool) -> None:
        file, digest = path / f"{fragment}.safetensors", digests[fragment]
        cluster.import_state(
            fragment, file, version=2, outer_params=digest, keeps_steps=keeps_steps
        )

    newcomer = Side(run_file, world, ALONE)
    cluster = newcomer.outer("int4", OuterSettings(), fragments=2)
    newcomer.train(1)
    for fragment in range(2):
        take(cluster, fragment, keeps_steps=False)
        assert cluster.digest(fragment) == digests[fragment]
        saved, names = load_file(path / f"{fragment}.safetensors"), newcomer.layout.fragments
        weights = newcomer.weights()
        flat = torch.cat([weights[name].flatten() for name in names[fragment].names])
        assert torch.equal(flat, saved["outer_param"])
        assert float(saved["momentum"].abs().max()) > 0

    # A straggler keeps what it has learnt since the outer parameters.
    late = Side(run_file, world, ALONE)
    cluster = late.outer("int4", OuterSettings(), fragments=2)
    outer_params = late.weights()
    late.train(1)
    now = late.weights()
    wanted = {name: now[name] - outer_params[name] + weights[name] for name in outer_params}
    for fragment in range(2):
        take(cluster, fragment, keeps_steps=True)
    assert difference(late.weights(), wanted) < 1e-6

    other = Side(run_file, world, ALONE).outer("int8", OuterSettings(), fragments=2)
    with pytest.raises(TrainingError, match="another fragment, layout or outer step"):
        take(other, 0, keeps_steps=False)

    resumed = Side(run_file, world, ALONE)
    cluster = resumed.outer("int4", OuterSettings(), fragments=2)
    for name, value in load_file(path / "weights.safetensors").items():
        resumed.engine.set_whole_weight(name, value)
    resumed.engine.weights_set()
    cluster.expect([0])
    load_tensors(cluster.state_dict(), path / "saved")
    cluster.apply(0, path / "average", 1, "on_time")
    after = [cluster.digest(0), hash_of(resumed.weights())]
    found = {"after": after, "owed": what_is_owed(cluster)}
    leave_world()
    return found


def test_state_goes_to_other_ranks_and_broken_files_change_nothing(
    plain_run_file: Path, tmp_path: Path
) -> None:
    arguments = (str(plain_run_file), str(tmp_path))
    one, two = run_ranks(leave_a_state, 2, *arguments)
    (alone,) = run_ranks(continue_alone, 1, *arguments, one["digests"])
    assert alone["after"] == one["after"] == two["after"]
    # Each rank has a share of what is owed; together they are all of it, also after a restart.
    assert not one["owed"].keys() & two["owed"].keys()
    assert alone["owed"] == one["owed"] | two["owed"]


def refuse_a_pipeline(env: RankEnv, run_file: str) -> str:
    world = join_world(env, device="cpu", timeout_s=TIMEOUT_S)
    side = Side(run_file, world, "{kind: ddp, pp_size: 2}", "model.init=scratch")
    with pytest.raises(UserError) as caught:
        side.outer("none", PLAIN)
    leave_world()
    return str(caught.value)


def test_a_pipeline_is_refused(plain_run_file: Path) -> None:
    model = plain_run_file.parent / "tiny" / "config.json"
    model.write_text(json.dumps(json.loads(model.read_text()) | {"tie_word_embeddings": False}))
    for text in run_ranks(refuse_a_pipeline, 2, str(plain_run_file)):
        assert "pp_size is 2" in text and "fix:" in text
