"""bf16 on GPUs that only emulate it is refused before the start, on every rank alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isles.errors import UserError
from isles.train.strategy import check_precision
from tests.each import each


def world_of(ranks: list[tuple[str, tuple[int, int]]], own: int, monkeypatch: Any) -> Any:
    """The world of one rank; the other ranks are only told."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: ranks[own][1])
    old = [f"rank {rank} on {host} (GPU)" for rank, (host, _) in enumerate(ranks)]
    told = [text if of < (8, 0) else "" for text, (_, of) in zip(old, ranks, strict=True)]

    def gather(text: str) -> list[str]:
        assert text == told[own]
        return told

    device = torch.device("cuda", 0)
    return SimpleNamespace(
        rank=own, host=ranks[own][0], device=device, device_name="GPU", gather=gather
    )


@each(0, 1, 2)
def test_the_oldest_gpu_decides_for_all_ranks(own, *, monkeypatch):
    ranks = [("desk", (12, 0)), ("tower", (7, 5)), ("laptop", (8, 9))]
    world = world_of(ranks, own, monkeypatch)
    for precision in ("bf16-mixed", "bf16-true"):
        with pytest.raises(UserError, match="rank 1 on tower") as caught:
            check_precision(precision, world)
        error = caught.value
        assert error.where == "training.precision" and "fp16-mixed" in error.fix
        assert "rank 0" not in error.what and "rank 2" not in error.what


@each("fp16-mixed", "32-true")
def test_other_precisions_train_on_any_gpu(precision, *, monkeypatch):
    check_precision(precision, _quiet_world((7, 5), monkeypatch))


def test_bf16_trains_where_all_gpus_have_it(monkeypatch):
    check_precision("bf16-mixed", _quiet_world((8, 0), monkeypatch))


def _quiet_world(capability: tuple[int, int], monkeypatch: Any) -> Any:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    device = torch.device("cuda", 0)
    return SimpleNamespace(rank=0, host="a", device=device, device_name="GPU", gather=lambda x: [x])
