"""What errors of libraries mean to the user."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from isles.agent.failure import failure_report
from isles.agent.workers import let_cause_end_first
from isles.errors import ExitCode
from isles.run.env import RankEnv
from isles.run.paths import Attempt
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


def test_who_has_lost_another_is_no_culprit_even_where_its_disk_holds_no_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exit code says so, to the agents of several nodes and to itself."""
    attempt = Attempt(tmp_path, 1)
    attempt.rank_error(0).mkdir(parents=True)  # nothing can be written there
    error = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    env = RankEnv(0, 0, 2, 1, 1, None)
    code = record_error(attempt, env, error)
    assert code == ExitCode.COMMUNICATION and attempt.rank_error(0).is_dir()
    attempt.rank_error(0).rmdir()

    assert failure_report(attempt, 0, [0], 2, {0: code})["root_cause"] is None
    found = failure_report(attempt, 0, [0, 1], 3, {0: code, 1: 1})["root_cause"]
    assert found["what"] == "rank 1 ended with exit code 1"
    found = failure_report(attempt, 0, [0, 1], 3, {0: code, 1: -9})["root_cause"]
    assert found["what"] == "rank 1 was killed by SIGKILL"

    waited: list[float] = []
    monkeypatch.setattr("isles.agent.workers._CAUSE_FIRST_S", 0.1)
    monkeypatch.setattr("isles.agent.workers.time.sleep", waited.append)
    let_cause_end_first(attempt, env, ExitCode.TRAINING)
    assert not waited
    let_cause_end_first(attempt, env, code)
    assert waited
