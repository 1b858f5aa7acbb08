"""The outer step where weights lie on a GPU: the bits of a CPU."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from isles.dist.world import join_world, leave_world
from isles.outer import staging
from isles.outer.cluster import Cluster
from isles.outer.codec import parse_codec
from isles.outer.diloco import OuterSettings
from isles.outer.layout import make_layout
from isles.run.env import RankEnv
from tests.each import each
from tests.outer_trainer import SHAPES, Numbers, mean

pytestmark = pytest.mark.gpu


def turns_on(device: str, folder: Path, codec: str) -> list[str]:
    """Digests of outer parameters and weights, after turns on time, overlapped and late."""
    folder.mkdir()
    world = join_world(RankEnv(0, 0, 1, 1, 0, None), device=device, timeout_s=60)
    try:
        weights = Numbers(0, SHAPES)
        weights.values = {name: value.to(world.device) for name, value in weights.values.items()}
        layout = make_layout(weights.trained_shapes(), parse_codec(codec), num_fragments=2)
        cluster = Cluster(weights, world, layout, OuterSettings(max_norm=0.1))
        cluster.begin()
        found = []
        for turn, mode in enumerate(("on_time", "overlap", "late", "on_time")):
            fragment = turn % 2
            for value in weights.values.values():
                value.mul_(1 + 2.0 ** -(6 + turn))
            cluster.snapshot(fragment)
            cluster.encode(fragment, folder / "part")
            if mode == "overlap":
                for value in weights.values.values():
                    value.mul_(1 + 2.0**-8)
            elif mode == "late":
                cluster.drop(fragment)
            parts = [((folder / "part").read_bytes(), 1.0)]
            average = mean(layout.codec, layout.piece_counts(fragment), parts)
            (folder / "average").write_bytes(average)
            found.append(cluster.apply(fragment, folder / "average", 1, mode, alpha=0.5).digest)
            weights.values = {name: value.cpu() for name, value in weights.values.items()}
            found.append(weights.digest())
            weights.values = {n: value.to(world.device) for n, value in weights.values.items()}
        return found
    finally:
        leave_world()


@each(*itertools.product(("none", "bf16", "int8", "int4", "topk"), (2**24, 5000)))
def test_weights_on_a_gpu_take_the_same_outer_steps(
    codec: str, block: int, *, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str = "cuda"
) -> None:
    """CPU twins: tests/unit/test_outer_diloco.py, test_blocks_of_every_size_..., and
    tests/dist/test_outer.py, test_every_strategy_keeps_the_bits_..."""
    monkeypatch.setattr(staging, "_GPU_NUMBERS", block)
    assert turns_on(device, tmp_path / "there", codec) == turns_on("cpu", tmp_path / "here", codec)
