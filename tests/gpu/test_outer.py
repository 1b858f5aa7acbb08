"""The outer step where weights lie on a GPU: the bytes and the bits of a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from isles.dist.world import join_world, leave_world
from isles.outer.average import combine, decode_average
from isles.outer.cluster import Cluster
from isles.outer.codec import UnsoundUpdateError, parse_codec
from isles.outer.diloco import OuterSettings
from isles.outer.layout import make_layout
from isles.run.env import RankEnv
from tests.outer_trainer import SHAPES, Numbers

pytestmark = pytest.mark.gpu

CODECS = ("none", "bf16", "int8", "int4", "topk", "topk:0.02")
SIZES = (1, 33, 129, 4097, 2**20, 2**20 - 77)


def normal(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 1e-3


def both_ways(codec: str, x: Tensor, device: str) -> tuple[Tensor, Tensor]:
    """Bytes and what becomes of them, worked out on a device."""
    own, there = parse_codec(codec), x.to(device)
    data = torch.full((own.size(x.numel()),), 0xA5, dtype=torch.uint8, device=device)
    own.encode(there, data)
    out = torch.full_like(there, torch.nan)
    own.decode(data, out)
    return data.cpu(), out.cpu()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("codec", CODECS)
def test_a_gpu_encodes_and_decodes_as_a_cpu(codec: str, n: int, device: str = "cuda") -> None:
    """CPU twin: tests/unit/test_outer_codec.py, test_every_size_comes_back_...

    topk may choose another of two equal numbers, and add up its levels in another order; whatever
    the bytes, both decode them to the same bits.
    """
    x = normal(n)
    data, decoded = both_ways(codec, x, device)
    wanted_data, wanted = both_ways(codec, x, "cpu")
    own = parse_codec(codec)
    here = torch.full((n,), torch.nan)
    own.decode(data, here)
    assert torch.equal(here, decoded)
    if own.kind == "topk":
        assert torch.allclose(decoded, wanted, rtol=2**-7, atol=0.0)
    else:
        assert torch.equal(data, wanted_data)


@pytest.mark.parametrize("codec", CODECS)
def test_a_gpu_decodes_an_average_to_the_bits_of_a_cpu(codec: str, device: str = "cuda") -> None:
    """CPU twin: tests/unit/test_outer_diloco.py, test_another_kind_of_processor_..."""
    n, own = 3 * 4096 + 77, parse_codec(codec)
    parts = []
    for seed in (1, 2, 3):
        data, _ = both_ways(codec, normal(n, seed), "cpu")
        parts.append((data.numpy().tobytes(), float(seed)))
    average = torch.frombuffer(bytearray(combine(codec, n, parts)), dtype=torch.uint8)
    here, there = torch.empty(n), torch.empty(n, device=device)
    decode_average(own, average, here)
    decode_average(own, average.to(device), there)
    assert torch.equal(here, there.cpu())


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_not_finite_is_found_on_a_gpu(codec: str, device: str = "cuda") -> None:
    """CPU twin: tests/unit/test_outer_codec.py, test_what_is_not_finite_is_refused_by_its_place."""
    x = normal(5000)
    x[4999] = torch.nan
    with pytest.raises(UnsoundUpdateError, match="number 4999 of 5000"):
        both_ways(codec, x, device)


def turns_on(device: str, folder: Path) -> list[str]:
    """Digests of outer parameters and weights, after turns on time, overlapped and late."""
    folder.mkdir()
    world = join_world(RankEnv(0, 0, 1, 1, 0, None), device=device, timeout_s=60)
    try:
        weights = Numbers(0, SHAPES)
        weights.values = {name: value.to(world.device) for name, value in weights.values.items()}
        layout = make_layout(weights.trained_shapes(), parse_codec("int8"), num_fragments=2)
        cluster = Cluster(weights, world, layout, OuterSettings(max_norm=0.1))
        cluster.begin()
        found = []
        for turn, mode in enumerate(("on_time", "overlap", "late", "on_time")):
            fragment = turn % 2
            for value in weights.values.values():
                value.mul_(1 + 2.0 ** -(6 + turn))
            cluster.contribution(fragment, folder / "part")
            if mode == "overlap":
                for value in weights.values.values():
                    value.mul_(1 + 2.0**-8)
            elif mode == "late":
                cluster.drop(fragment)
            data, average, start = (folder / "part").read_bytes(), b"", 0
            for count in layout.piece_counts(fragment):
                end = start + layout.codec.size(count)
                average += combine("int8", count, [(data[start:end], 1.0)])
                start = end
            (folder / "average").write_bytes(average)
            found.append(cluster.apply(fragment, folder / "average", mode, alpha=0.5).digest)
            weights.values = {name: value.cpu() for name, value in weights.values.items()}
            found.append(weights.digest())
            weights.values = {n: value.to(world.device) for n, value in weights.values.items()}
        return found
    finally:
        leave_world()


def test_weights_on_a_gpu_take_the_same_outer_steps(tmp_path: Path, device: str = "cuda") -> None:
    """CPU twin: tests/dist/test_outer.py, test_every_strategy_keeps_the_bits_..."""
    assert turns_on(device, tmp_path / "there") == turns_on("cpu", tmp_path / "here")
