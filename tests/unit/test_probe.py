"""The micro-batch size that is chosen without trying: given, kept over a resume, or on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from isles.config.load import load_run_file
from isles.dist.world import join_world, leave_world
from isles.run.checkpoints import CheckpointInfo
from isles.run.env import RankEnv
from isles.train.probe import choose_micro_batch_size
from tests.each import each


@each(
    ("wanted", "rows", "before", "expected"),
    [
        ("3", 12, None, 3),
        ("auto", 12, None, 6),
        ("auto", 8, None, 8),
        ("auto", 7, None, 7),
        ("auto", 11, None, 1),
        ("auto", 12, 2, 2),
        ("auto", 12, 8, 6),
    ],
)
def test_size(run_file: Path, wanted: str, rows: int, before: int | None, expected: int) -> None:
    config = load_run_file(run_file, [f"training.micro_batch_size={wanted}"]).config
    manifest: dict[str, Any] = {"micro_batch_size": before}
    resume = None if before is None else CheckpointInfo(Path(), 1, manifest)
    world = join_world(RankEnv(0, 0, 1, 1, 0, None), device="cpu", timeout_s=10)
    try:
        found = choose_micro_batch_size(nn.Linear(1, 1), config, rows, world, resume)
    finally:
        leave_world()
    assert found == expected
    assert not torch.distributed.is_initialized()
