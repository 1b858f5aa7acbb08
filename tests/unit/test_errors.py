"""What errors of libraries mean to the user."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from isles.errors import ExitCode
from isles.rundir.env import RankEnv
from isles.rundir.paths import Attempt
from isles.train.worker import record_error


def test_out_of_memory_has_its_code_and_its_levers(tmp_path: Path) -> None:
    """More than any machine has: the allocator's real error."""
    attempt = Attempt(tmp_path, 1)
    try:
        torch.empty(1 << 50)
    except RuntimeError as error:
        code = record_error(attempt, RankEnv(1, 1, 2, 2, 1, None), error)
    assert code == ExitCode.OUT_OF_MEMORY
    record = json.loads(attempt.rank_error(1).read_text())
    assert record["rank"] == 1 and not record["is_communication"]
    assert "micro_batch_size" in record["fix"]
