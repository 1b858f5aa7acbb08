"""Law 5: every failure names its culprit, nothing waits for ever, the last good weights stay."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from isles.errors import ExitCode
from isles.rundir.manifest import list_checkpoints, verify_checkpoint
from isles.rundir.records import read_record
from tests.dist.test_resume import rows_after_start
from tests.dist.test_same_mathematics import weights_of
from tests.ranks import start_training, train_to_end


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_loss_that_is_not_finite(run_file: Path, precision: str, world_size: int) -> None:
    """A learning rate from hell blows up the weights within a few steps."""
    hell = (f"training.precision={precision}", "training.learning_rate=100.0")
    options = (*hell, "training.optimizer=sgd", "training.max_grad_norm=null")
    run_dir, _, gang = start_training(run_file, world_size, *options, "training.max_steps=200")
    codes = gang.wait()
    assert set(codes) == {ExitCode.TRAINING}
    attempt = run_dir.last_attempt()
    assert attempt is not None
    error = read_record(attempt.rank_error(0)) or {}
    assert "not finite" in error["what"]
    assert "rank " in error["what"] or "gradient" in error["what"]
    good = list_checkpoints(run_dir)[-1]
    assert f"step {good.step + 1}" in error["what"]
    assert good.manifest["samples"] == good.step * 12
    state = weights_of(run_dir, good.step)
    assert all(bool(torch.isfinite(v).all()) for n, v in state.items() if n.startswith("model."))


def test_a_killed_rank_is_noticed_by_the_others(run_file: Path) -> None:
    run_dir, attempt, gang = start_training(
        run_file, 2, "training.max_steps=100000", "training.logging_steps=1"
    )
    assert rows_after_start(run_dir, gang, 2)
    os.kill(gang.processes[1].pid or 0, signal.SIGKILL)
    gang.processes[0].join(60)
    assert gang.processes[0].exitcode is not None
    error = read_record(attempt.rank_error(0)) or {}
    assert error["is_communication"]
    assert error["exit_code"] == ExitCode.COMMUNICATION


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_full_disk_stops_with_a_clear_error_and_loses_nothing(
    run_file: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "small"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], check=True)
    try:
        runs = f"output_dir={disk}"
        run_dir, code = train_to_end(
            run_file,
            2,
            runs,
            "training.max_steps=100",
            "checkpoint.every_steps=5",
            "checkpoint.keep=50",
        )
        assert code == ExitCode.TRAINING
        attempt = run_dir.last_attempt()
        assert attempt is not None
        errors = [read_record(attempt.rank_error(rank)) for rank in range(2)]
        assert any("could not be saved" in (error or {}).get("what", "") for error in errors)
        assert any("are free on this disk" in (error or {}).get("what", "") for error in errors)
        kept = list_checkpoints(run_dir)
        assert kept, "what was saved before stays"
        assert verify_checkpoint(kept[-1].path) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)
