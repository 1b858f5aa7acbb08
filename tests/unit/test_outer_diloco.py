"""The outer optimizer by itself: against torch's, against algebra, bit by bit."""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isles.outer import staging
from isles.outer.codec import Codec, UnsoundUpdateError, parse_codec
from isles.outer.diloco import FragmentShare, OuterSettings, clip_scale, square_sums, total_norm
from isles.outer.layout import ParamSlice
from isles.outer.staging import Staging
from tests.deadline import run_program
from tests.each import each
from tests.outer_trainer import mean as mean_of_pieces

COUNTS = (1000, 4096, 1, 333)
PIECES = [ParamSlice("w", sum(COUNTS[:i]), count) for i, count in enumerate(COUNTS)]
TOTAL = sum(COUNTS)
CPU = Staging(torch.device("cpu"))
PLAIN = OuterSettings(lr=1.0, momentum=0.0)
CODECS = ("none", "bf16", "int8", "int4", "topk")


def normal(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(TOTAL, generator=torch.Generator().manual_seed(seed)) * scale


class One:
    """A cluster of one rank with one fragment: its local weights, and its share."""

    def __init__(self, codec: str, settings: OuterSettings) -> None:
        self.codec = parse_codec(codec)
        self.share = FragmentShare(PIECES, self.codec, settings)
        self.share.outer_param.copy_(normal(0))
        self.local = self.share.outer_param.clone()

    def contribute(self) -> bytes:
        self.share.begin_snapshot().copy_(self.local)
        self.share.encode(CPU)
        return bytes(self.share.encoded.numpy().tobytes())

    def learn(self, seed: int) -> None:
        self.local.sub_(normal(seed, 0.01))

    def apply(self, average: bytes, mode: Any, num_parts: int = 1, **more: Any) -> None:
        data = torch.frombuffer(bytearray(average), dtype=torch.uint8)
        how = {"alpha": 0.0, "scale": 1.0, **more}
        move = self.share.step(data, num_parts, mode, CPU, **how)
        if move is None:
            self.local.copy_(self.share.outer_param)
        else:
            self.local.add_(move)

    def turn(self, seed: int, **more: Any) -> bytes:
        """Learn, and apply the average of that alone; the average."""
        self.learn(seed)
        average = mean(self.codec, [(self.contribute(), 5.0)])
        self.apply(average, "on_time", **more)
        return average


def mean(codec: Codec, parts: Sequence[tuple[bytes, float]]) -> bytes:
    """What a hub does: piece by piece."""
    return mean_of_pieces(codec, COUNTS, parts)


@each(0.0, 0.9)
def test_nesterov_is_torchs(momentum: float):
    one = One("none", OuterSettings(lr=0.7, momentum=momentum))
    parameter = torch.nn.Parameter(one.share.outer_param.clone())
    nesterov = momentum > 0
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=momentum, nesterov=nesterov)
    for turn in range(20):
        parameter.grad = parameter.detach() - (one.local - normal(turn, 0.01))
        optimizer.step()
        one.turn(turn)
        difference = (one.share.outer_param - parameter.detach()).abs().max()
        assert float(difference) < 1e-7 * 2 * float(parameter.detach().abs().max())
        assert torch.equal(one.local, one.share.outer_param)


def test_the_warmup_averages_and_leaves_no_momentum():
    """Then the outer optimizer begins as if the run began there."""
    warmed, fresh = One("none", OuterSettings()), One("none", OuterSettings())
    for turn in range(3):
        learned = warmed.local - normal(turn, 0.01)
        warmed.turn(turn, is_warmup=True)
        assert torch.allclose(warmed.share.outer_param, learned, rtol=0, atol=1e-6)
    fresh.share.outer_param.copy_(warmed.share.outer_param)
    fresh.local.copy_(warmed.local)
    warmed.turn(9), fresh.turn(9)
    assert torch.equal(warmed.share.outer_param, fresh.share.outer_param)


@each(*CODECS)
def test_all_clusters_keep_the_same_bits(codec: str):
    """Three clusters, unequal tokens; one misses a turn, another has gone on training meanwhile."""
    clusters = [One(codec, OuterSettings()) for _ in range(3)]
    for turn in range(8):
        parts = []
        for number, cluster in enumerate(clusters):
            cluster.learn(10 * turn + number)
            parts.append((cluster.contribute(), 100.0 * (number + 1)))
        missing = turn % 4
        present = [part for number, part in enumerate(parts) if number != missing]
        average = mean(clusters[0].codec, present)
        for number, cluster in enumerate(clusters):
            if number == missing:
                cluster.apply(average, "late", len(present))
            elif turn % 2:
                cluster.learn(999)
                cluster.apply(average, "overlap", len(present), alpha=0.5)
            else:
                cluster.apply(average, "on_time", len(present))
        assert len({cluster.share.outer_param.numpy().tobytes() for cluster in clusters}) == 1


def test_with_rate_one_the_weights_become_the_mean_of_the_clusters_by_tokens():
    """After every step of SGD that is data parallel training."""
    clusters = [One("none", PLAIN) for _ in range(2)]
    for turn in range(5):
        for number, one in enumerate(clusters):
            one.learn(10 * turn + number)
        wanted = 0.25 * clusters[0].local + 0.75 * clusters[1].local
        parts = [(clusters[0].contribute(), 1.0), (clusters[1].contribute(), 3.0)]
        average = mean(clusters[0].codec, parts)
        for one in clusters:
            one.apply(average, "on_time", 2)
            assert torch.allclose(one.local, wanted, rtol=0, atol=1e-6)


def test_who_learns_nothing_has_the_bits_of_the_others():
    """Also where the engine rounds the weights that it is given, as DeepSpeed does under bf16."""
    one, idle = One("none", OuterSettings()), One("none", OuterSettings())
    for turn in range(3):
        idle.apply(one.turn(turn), "idle")
        for cluster in (one, idle):
            cluster.local = cluster.local.bfloat16().float()
        assert torch.equal(one.local, idle.local)


@each("none", "int8")
def test_no_inner_step_is_lost_or_counted_twice(codec: str):
    """Whatever comes late: with rate one, outer parameters, what is owed, and what is not sent
    yet add up to all that was ever learned."""
    one = One(codec, PLAIN)
    learned = one.local.clone().double()

    def train(turn: int) -> None:
        step = normal(turn, 0.01)
        one.local.sub_(step)
        learned.sub_(step.double())

    for turn in range(12):
        train(100 + turn)
        data = one.contribute()
        train(200 + turn)
        kind = turn % 3
        if kind == 0:  # in time for the average, which comes when more steps were made
            one.apply(mean(one.codec, [(data, 1.0)]), "overlap")
        elif kind == 1:  # left out: the others' average is of something else
            other = One(codec, PLAIN)
            other.share.outer_param.copy_(one.share.outer_param)
            other.local = one.share.outer_param - normal(300 + turn, 0.01)
            average = mean(one.codec, [(other.contribute(), 1.0)])
            before = one.share.outer_param.clone()
            one.apply(average, "late")
            learned += one.share.outer_param.double() - before.double()
        else:
            one.share.drop_snapshot()
        owed = torch.zeros(TOTAL) if one.share.error is None else one.share.error
        found = one.local.double() - owed.double()
        assert float((found - learned).abs().max()) < 1e-5, turn


def test_overlap_goes_a_part_of_the_way():
    """alpha 1 keeps the local weights, alpha 0 takes the outer ones; later steps are kept."""
    for alpha in (0.0, 0.5, 1.0):
        one = One("none", OuterSettings())
        one.learn(1)
        data, snapshot = one.contribute(), one.local.clone()
        one.learn(2)
        one.apply(mean(one.codec, [(data, 1.0)]), "overlap", alpha=alpha)
        wanted = alpha * snapshot + (1 - alpha) * one.share.outer_param - normal(2, 0.01)
        assert torch.allclose(one.local, wanted, atol=1e-6)


def test_norms():
    for n in (1, 2, 3, 1000, 65536, 65537, 200_001):
        x = torch.randn(n)
        exact = float(x.double().square().sum())
        assert square_sums(x.view(1, -1)) == pytest.approx([exact], rel=1e-12)
        both = torch.stack([x, 2 * x])
        assert square_sums(both) == [*square_sums(both[:1]), *square_sums(both[1:])]
    assert math.isnan(square_sums(torch.tensor([[1.0, torch.nan]]))[0])
    assert clip_scale(2.0, 1.0) == 0.5 and clip_scale(0.5, 1.0) == clip_scale(9.0, None) == 1.0
    assert total_norm([9.0, 16.0]) == 5.0


def test_what_is_not_finite_names_the_parameter_and_changes_nothing():
    one = One("int8", OuterSettings())
    one.local[1500] = torch.nan
    with pytest.raises(UnsoundUpdateError, match="w, numbers 1000 to 5095: number 500 of 4096"):
        one.contribute()
    assert not bool(one.share.error.any())


def test_a_contribution_from_a_checkpoint_is_encoded_again_to_the_same_bytes():
    """What encoding leaves out is only owed once the average has come, also after a restart."""
    owed = []
    for is_loaded in (False, True):
        one = One("int4", OuterSettings())
        one.learn(1)
        data = one.contribute()
        if is_loaded:
            one.share.encoded = None
        one.apply(mean(one.codec, [(data, 1.0)]), "on_time")
        owed.append(one.share.error)
    assert float(owed[0].abs().max()) > 0 and torch.equal(*owed)


RECORDED = {
    "none": "3a3adf93d5e707689623250c08bf236c06bf4feedea0cb78c623326b0ed8abc8",
    "bf16": "1d55f73b8994c28a27877c0d1c3560efffd7bdf896055bb725c112e3c18dc413",
    "int8": "058e0ed3ef6a339f3f2e1b7fdfe4d25cc5e653270f991658353d3008e399d390",
    "int4": "a87afccfca704fd4abb5ab926a0799adedf83886cd3734bf1f2db65ae9c491cf",
    "topk": "2938a67bd958ac3bec1d2ffb5afdb79914f9f2063f649384ba3c840687b764a9",
    "topk:0.02": "ae0523826160f06b54bd85715ae9614cd36ef64acb7be9770416ab95f8fc5fa8",
}
"""Hashes of `whole_history`, from a version that computed piece by piece."""

MIXED = (1000, 1000, 4096, 4096, 4096, 1, 333, 600_000, 32, 32)
"""Runs of equal pieces, and a piece larger than a slab of the codec."""


def exact(seed: int, scale: float) -> Tensor:
    """Numbers that are the same for every version of torch."""
    mixed = (torch.arange(1, sum(MIXED) + 1) * (2 * seed + 1) * 2654435761) % 2**24
    return (mixed - 2**23).float() * scale


def whole_history(codec: str, on: Staging) -> str:
    """Hash of all that a share computes: bytes, norms, state and moves, in every mode."""
    pieces = [ParamSlice("w", sum(MIXED[:i]), count) for i, count in enumerate(MIXED)]
    share, seen = FragmentShare(pieces, parse_codec(codec), OuterSettings()), hashlib.sha256()
    share.outer_param.copy_(exact(0, 2.0**-23))
    local = share.outer_param.clone()
    for turn, mode in enumerate(("on_time", "overlap", "late", "on_time", "on_time")):
        local.sub_(exact(turn + 1, 2.0**-30))
        share.begin_snapshot().copy_(local)
        squares = share.encode(on)
        data = share.encoded.numpy().tobytes()
        if mode == "late":
            share.drop_snapshot()
        average = mean_of_pieces(parse_codec(codec), MIXED, [(data, 1.0), (data, 2.0)])
        received = torch.frombuffer(bytearray(average), dtype=torch.uint8)
        norms = share.square_sums(received, 2, on)
        norm = total_norm(norms)
        how = {"scale": clip_scale(norm, norm * 0.7 if turn else None), "is_warmup": turn == 3}
        move = share.step(received, 2, mode, on, alpha=0.5, **how)
        local = share.outer_param.clone() if move is None else local + move
        seen.update(data + repr(squares).encode() + repr(norms).encode())
        for value in (share.outer_param, share.momentum, share.error, local):
            if value is not None:
                seen.update(value.numpy().tobytes())
    return seen.hexdigest()


@each("as it is", "staged", "staged in small blocks", "without memory on the GPU")
def test_blocks_of_every_size_and_place_give_the_recorded_bits(how, *, monkeypatch, caplog):
    """On a CPU through the buffers that a GPU needs. On a GPU: tests/gpu/test_outer.py."""
    if how == "staged in small blocks":
        monkeypatch.setattr(staging, "_GPU_NUMBERS", 9000)
    codecs = [c for c in RECORDED if how == "as it is" or not parse_codec(c).needs_cpu]
    for codec in codecs:
        on = Staging(torch.device("cpu"), is_staged=how != "as it is")
        if how == "without memory on the GPU":
            fill_up(on, monkeypatch)
        assert whole_history(codec, on) == RECORDED[codec], codec
    said = caplog.text.count("so the CPU computes the outer steps from now on")
    assert said == (len(codecs) if how == "without memory on the GPU" else 0)


def fill_up(on: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has no memory for the fifth tensor that is brought there."""
    bring, brought = on.bring, []

    def bring_few(source: Tensor, goal: Tensor | None = None) -> Tensor:
        brought.append(source)
        if len(brought) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return bring(source, goal)

    monkeypatch.setattr(on, "bring", bring_few)


def outcome(folder: Path) -> list[str]:
    """What a cluster computes from given bytes with every codec, as hashes."""
    found = []
    outer_param = torch.load(folder / "outer_param")
    for codec in CODECS:
        share = FragmentShare(PIECES, parse_codec(codec), OuterSettings())
        share.outer_param.copy_(outer_param)
        average = bytearray((folder / codec).read_bytes())
        data = torch.frombuffer(average, dtype=torch.uint8)
        for _ in range(3):
            norm = total_norm(share.square_sums(data, 2, CPU))
            share.step(data, 2, "late", CPU, alpha=0.0, scale=clip_scale(norm, norm * 0.7))
        whole = share.outer_param.numpy().tobytes() + share.momentum.numpy().tobytes()
        found.append(f"{codec}:{norm.hex()}:{hashlib.sha256(whole).hexdigest()}")
    return found


def test_another_kind_of_processor_computes_the_same_bits(tmp_path):
    """torch without vector instructions, in a process of its own, from the same bytes."""
    torch.save(normal(0), tmp_path / "outer_param")
    for codec in CODECS:
        parts = []
        for seed in (1, 2):
            one = One(codec, OuterSettings())
            one.learn(seed)
            parts.append((one.contribute(), float(seed)))
        (tmp_path / codec).write_bytes(mean(one.codec, parts))
    env = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.unit.test_outer_diloco", str(tmp_path)]
    child = run_program(command, Path(__file__).parents[2], env)
    assert child.returncode == 0, child.stderr
    capability, *found = child.stdout.split()
    assert capability == "DEFAULT"
    assert found == outcome(tmp_path)


if __name__ == "__main__":
    found = outcome(Path(sys.argv[1]))
    sys.stdout.write(" ".join([torch.backends.cpu.get_cpu_capability(), *found]))
