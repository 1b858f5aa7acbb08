"""The outer step over strategies: clusters that hold the model differently stay bit-identical."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from isles.checkpoint.load import load_tensors
from isles.checkpoint.save import write_shards
from isles.config.load import load_run_file
from isles.dist.batch import Batch
from isles.dist.world import World, join_world, leave_world
from isles.errors import TrainingError
from isles.outer.cluster import Cluster
from isles.outer.codec import parse_codec
from isles.outer.diloco import OuterSettings
from isles.outer.layout import make_layout
from isles.run.env import RankEnv
from isles.train.strategy import resolve_mesh
from tests.dist.test_same_mathematics import FAKE, give_weights
from tests.engines import engine_of
from tests.outer_trainer import mean
from tests.ranks import run_ranks

ROWS, LENGTH, TIMEOUT_S = 8, 16, 100.0
ALONE = "{kind: ddp}"
PLAIN = (*FAKE, "model.init=pretrained")


class Side:
    """One cluster in a test: an engine, its outer state, and data of its own."""

    def __init__(
        self,
        run_file: Path,
        world: World,
        strategy: str,
        codec: str,
        *overrides: str,
        settings: OuterSettings | None = None,
        fragments: int = 2,
    ) -> None:
        config = load_run_file(run_file, [*PLAIN, f"strategy={strategy}", *overrides]).config
        kind: Any = config.strategy
        self.world, self.step = world, 0
        self.mesh = resolve_mesh(kind, world)
        self.engine = engine_of(config, kind, world)
        shapes, pieces = self.engine.trained_shapes(), {"piece_numbers": 3000}
        self.layout = make_layout(shapes, parse_codec(codec), num_fragments=fragments, **pieces)
        self.cluster = Cluster(self.engine, world, self.layout, settings or OuterSettings())
        self.cluster.begin()

    def train(self, steps: int) -> None:
        """Inner steps on data of its own."""
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.step)
            ids = torch.randint(0, 512, (ROWS, LENGTH + 1), generator=generator)
            mine = ids[self.mesh.dp_rank :: self.mesh.dp_size]
            batch = Batch(mine[:, :-1].contiguous(), mine[:, 1:].contiguous(), ())
            self.engine.forward_backward(batch, loss_divisor=ROWS * LENGTH, is_last=True)
            self.engine.optimizer_step(lr=0.01, max_norm=None)
            self.step += 1

    def loss(self) -> float:
        """Of one row, with the weights that the model computes with; of all ranks the mean."""
        ids = torch.arange(LENGTH + 1).unsqueeze(0) * 7
        loss = float(self.engine.evaluate(Batch(ids[:, :-1], ids[:, 1:].contiguous(), ())))
        return sum(self.world.gather(loss)) / self.mesh.dp_size

    def weights(self) -> dict[str, Tensor]:
        """All trained weights, whole, as copies."""
        names = self.engine.trained_shapes()
        return {name: self.engine.whole_weight(name).clone() for name in names}

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

    def take(
        self, fragment: int, path: Path, version: int, digest: str, *, keeps_steps: bool = False
    ) -> None:
        """Take over a state that another has written."""
        told = {"version": version, "outer_params": digest}
        self.cluster.import_state(fragment, path, **told, keeps_steps=keeps_steps)


def hash_of(weights: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in weights.items():
        digest.update(name.encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest over all weights."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# Strategy of the second cluster, codec, and what both set: the first is one rank under ddp.
LORA = ("adapter.type=lora", "adapter.r=4", "adapter.alpha=8")
BF16_MIXED = ("training.precision=bf16-mixed",)
CASES: dict[int, dict[str, tuple[str, str, tuple[str, ...]]]] = {
    2: {
        "ddp": (ALONE, "none", ()),
        "fsdp": ("{kind: fsdp}", "int8", ("training.optimizer=muon",)),
        "fsdp-bf16": ("{kind: fsdp}", "bf16", ("training.precision=bf16-true",)),
        "fsdp-lora": ("{kind: fsdp}", "topk", LORA),
        "pp": ("{kind: ddp, pp_size: 2}", "int8", ()),
        "zero1": ("{kind: deepspeed, zero_stage: 1}", "int8", ()),
        "zero2": ("{kind: deepspeed, zero_stage: 2}", "topk:0.1", BF16_MIXED),
        "zero3": ("{kind: deepspeed, zero_stage: 3}", "int4", ()),
    },
    4: {
        "hsdp": ("{kind: fsdp, sharding_strategy: HYBRID_SHARD, shard_size: 2}", "int8", ()),
        "fsdp-tp": ("{kind: fsdp, tp_size: 2}", "topk", ()),
        "fsdp-pp": ("{kind: fsdp, pp_size: 2}", "int4", BF16_MIXED),
    },
}


def turns_of_a_cluster(
    env: RankEnv, run_file: Path, folder: Path, cases: dict[str, Any], first: Any
) -> dict[str, tuple[list[str], list[float]]]:
    """Every case's turns: digests of the outer state after each, and of weights; norms and losses.

    Args:
        first: what the first cluster has found, whose state and averages this one takes; or None.
    """
    world = join_world(env, device="cpu", timeout_s=TIMEOUT_S)
    found = {}
    for case, (strategy, codec, overrides) in cases.items():
        place, settings = folder / case, OuterSettings(max_norm=0.05)
        kind = strategy if first else ALONE
        side = Side(run_file, world, kind, codec, *overrides, settings=settings)
        cluster, path = side.cluster, place / f"{world.world_size} {kind}.part"
        if "adapter.type=lora" in overrides:  # only its matrices travel
            assert all("lora_" in n for part in side.layout.fragments for n in part.names)
        # Under bf16 DeepSpeed rounds the weights that it begins with.
        seen, figures = [hash_of(side.weights()) if case != "zero2" else "rounded"], []
        for fragment in range(2):
            state = place / f"{fragment}.safetensors"
            if first:
                side.take(fragment, state, 0, first[case][0][1 + fragment])
            seen.append(side.export(fragment, state, 0))
        # Two fragments by turns; in the third turn inner steps go on meanwhile, and in the last
        # two none is made, so that both have all weights in common.
        for outer_step, steps in enumerate((2, 1, 1, 1, 0, 0)):
            fragment, average = outer_step % 2, place / f"{outer_step}.average"
            side.train(steps)
            cluster.snapshot(fragment)
            with ThreadPoolExecutor(1) as pool:
                encoding = pool.submit(cluster.encode, fragment, path)
                side.train(int(outer_step == 2))
                figures.append(encoding.result())
            if not first:
                side.average(fragment, [(path, 1.0)], average)
            side.loss()  # weights that are gathered for this must not outlive the outer step
            if outer_step == 2:
                with ThreadPoolExecutor(1) as pool:
                    going = pool.submit(cluster.advance, fragment, average, 1, "overlap", alpha=0.5)
                    side.train(1)
                    applied = going.result()
                cluster.give(fragment)
            else:
                applied = cluster.apply(fragment, average, 1, "on_time")
            assert cluster.pending == []
            seen.append(f"{applied.digest} {applied.norm}")
        seen.append(hash_of(side.weights()))
        found[case] = seen, [*figures, side.loss()]
    leave_world()
    return found


@pytest.mark.long
@pytest.mark.parametrize("world_size", CASES)
def test_every_strategy_keeps_the_bits_of_one_rank_under_ddp(run_file, tmp_path, world_size):
    """What clusters of other strategies and numbers of ranks make of one cluster's averages, with
    fragments, by every codec; with the same data they contribute about the same."""
    give_weights(run_file, tie_word_embeddings=True)
    cases = CASES[world_size]
    for case in cases:
        (tmp_path / case).mkdir()
    (first,) = run_ranks(turns_of_a_cluster, 1, run_file, tmp_path, cases, None)
    others = run_ranks(turns_of_a_cluster, world_size, run_file, tmp_path, cases, first)
    for case in cases:
        seen, figures = first[case]
        assert len(set(seen)) == len(seen), (case, "nothing was learned")
        assert min(figures[:4]) > 0
        for other in others:
            assert other[case][0] == seen, case
            assert other[case][1][:4] == pytest.approx(figures[:4], rel=0.05), case
            rounded = 1e-4 if case == "zero2" else 1e-6  # all of the model in bf16
            assert other[case][1][-1] == pytest.approx(figures[-1], rel=rounded), case


def count_exchanges(env: RankEnv, run_file: Path, folder: Path) -> dict[str, Any]:
    """What a cluster under fsdp sends to read its weights, and to change them."""
    world = join_world(env, device="cpu", timeout_s=TIMEOUT_S)
    side = Side(run_file, world, "{kind: fsdp}", "int8", fragments=1)
    cluster, part = side.cluster, folder / "part"
    found: dict[str, Any] = {"pieces": len(side.layout.fragments[0].pieces)}
    for way in ("on_time", "late"):
        side.train(1)
        before = {name: value.clone() for name, value in side.weights().items()}
        with CommDebugMode() as reading:
            cluster.snapshot(0)
        cluster.encode(0, part)
        average = side.average(0, [(part, 1.0)], folder / "average")
        if way == "late":
            cluster.drop(0)
        cluster.advance(0, average, 1, way)
        with CommDebugMode() as writing:
            cluster.give(0)
        found[way] = [
            {str(op).rpartition(".")[2]: n for op, n in calls.get_comm_counts().items()}
            for calls in (reading, writing)
        ]
        assert difference(before, side.weights()) > 0
    leave_world()
    return found


def test_weights_travel_in_buckets(run_file, tmp_path):
    """Rows of the table in tests/unit/test_counts.py; a bucket has more than this model."""
    give_weights(run_file)
    for found in run_ranks(count_exchanges, 2, run_file, tmp_path):
        assert found.pop("pieces") > 30
        read, written = {"_allgather_base_": 1}, {"broadcast_": 2}  # one of each owner
        assert found == {"on_time": [read, written], "late": [read, written]}


def what_is_owed(cluster: Cluster) -> dict[str, str]:
    state = cluster.state_dict()
    return {name: hash_of({name: value}) for name, value in state.items() if ".error." in name}


def leave_a_state(env: RankEnv, run_file: Path, path: Path) -> dict[str, Any]:
    """Two ranks: a checkpoint and a state for others, with a contribution under way."""
    world = join_world(env, device="cpu", timeout_s=TIMEOUT_S)
    plain = {"settings": OuterSettings(lr=1.0, momentum=0.0), "fragments": 1}
    refuse_broken_files(Side(run_file, world, "{kind: fsdp}", "none", **plain), path)
    side = Side(run_file, world, "{kind: fsdp}", "int4")
    cluster = side.cluster
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
    write_shards(cluster.state_dict(), path / "saved", world.saving)
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
    cluster = side.cluster
    side.train(2)
    side.contribute(0, path / "part")
    average = side.average(0, [(path / "part", 9.0)], path / "average")
    before, broken = (hash_of(side.weights()), cluster.digest(0)), path / "broken"
    data = average.read_bytes() if side.world.is_main else b""
    for content, says in (
        (data[:-4], "broken: it is too short"),
        (data + b"0000", "broken: it is too long"),
        (b"\xff" * 8 + data[8:], "the average of fragment 0 is not finite"),
        (None, "broken: No such file"),
    ):
        if side.world.is_main:
            broken.unlink(missing_ok=True)
            if content is not None:
                broken.write_bytes(content)
        with pytest.raises(TrainingError, match=says):
            cluster.apply(0, broken, 1, "late")
    with pytest.raises(TrainingError, match="mem: Input/output error"):  # as of a broken disk
        cluster.apply(0, Path("/proc/self/mem"), 1, "late")
    with pytest.raises(TrainingError, match=r"x: .*exists"):
        side.contribute(0, path / "part" / "x")
    cluster.drop(0)
    state = path / "state"
    side.export(0, state, 7)
    for file, version, digest, says in (
        (average, 0, before[1], "average: .*layout"),
        (state, 8, before[1], "state: .*outer step"),
        (state, 7, "other", "outer parameters in state differ from those of the cluster"),
    ):
        with pytest.raises(TrainingError, match=says):
            side.take(0, file, version, digest)
    assert (hash_of(side.weights()), cluster.digest(0)) == before


def continue_alone(env: RankEnv, run_file: Path, path: Path, digests: list[str]) -> dict[str, Any]:
    """A cluster of one rank takes over what two ranks have left."""
    world = join_world(env, device="cpu", timeout_s=TIMEOUT_S)
    states = [path / f"{fragment}.safetensors" for fragment in range(2)]
    newcomer = Side(run_file, world, ALONE, "int4")
    newcomer.train(1)
    for fragment in range(2):
        newcomer.take(fragment, states[fragment], 2, digests[fragment])
        assert newcomer.cluster.digest(fragment) == digests[fragment]
        saved, names = load_file(states[fragment]), newcomer.layout.fragments[fragment].names
        weights = newcomer.weights()
        flat = torch.cat([weights[name].flatten() for name in names])
        assert torch.equal(flat, saved["outer_param"])
        assert float(saved["momentum"].abs().max()) > 0

    # A straggler keeps what it has learned since the outer parameters.
    late = Side(run_file, world, ALONE, "int4")
    outer_params = late.weights()
    late.train(1)
    now = late.weights()
    wanted = {name: now[name] - outer_params[name] + weights[name] for name in outer_params}
    for fragment in range(2):
        late.take(fragment, states[fragment], 2, digests[fragment], keeps_steps=True)
    assert difference(late.weights(), wanted) < 1e-6

    other = Side(run_file, world, ALONE, "int8")
    with pytest.raises(TrainingError, match="another fragment, layout or outer step"):
        other.take(0, states[0], 2, digests[0])

    resumed = Side(run_file, world, ALONE, "int4")
    cluster = resumed.cluster
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


def test_state_goes_to_other_ranks_and_broken_files_change_nothing(run_file, tmp_path):
    give_weights(run_file, tie_word_embeddings=True)
    one, two = run_ranks(leave_a_state, 2, run_file, tmp_path)
    (alone,) = run_ranks(continue_alone, 1, run_file, tmp_path, one["digests"])
    assert alone["after"] == one["after"] == two["after"]
    # Each rank has a share of what is owed; together they are all of it, also after a restart.
    assert not one["owed"].keys() & two["owed"].keys()
    assert alone["owed"] == one["owed"] | two["owed"]
