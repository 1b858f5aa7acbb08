"""A step that takes far too long is noticed, and the rank that holds it up is named."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from isles.data.mix import Dataset
from isles.errors import ExitCode
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record
from tests.dist.test_resume import until_recorded
from tests.ranks import Gang, one_rank, start_training

QUICK = ("watchdog.min_time=2s", "watchdog.slow_factor=2", "training.max_steps=1000000")


def block_while_told(folder: Path) -> None:
    """Read from a pipe until somebody writes to it."""
    if (folder / "block").exists():
        with (folder / "pipe").open("rb", buffering=0) as pipe:
            pipe.read(1)


def spin_while_told(folder: Path) -> None:
    """Compute without an end, until told."""
    while (folder / "spin").exists():
        pass


def troubled_rank(env: Any, run: Path, attempt: int, resume_from: Path | None) -> int:
    """A rank that reads or computes for ever when a file tells it to."""
    folder = run / f"rank-{env.rank}"
    folder.mkdir()
    os.mkfifo(folder / "pipe")
    read = Dataset.rows

    def read_slowly(*args: Any, **kwargs: Any) -> Any:
        block_while_told(folder)
        return read(*args, **kwargs)

    Dataset.rows = read_slowly  # type: ignore[method-assign]  # a disk that hangs
    torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: spin_while_told(folder))
    return one_rank(env, run, attempt, resume_from)


def hangs(attempt: Attempt) -> list[dict[str, Any]]:
    paths = sorted(attempt.hangs.glob("step-*.json"), key=lambda p: p.stat().st_mtime_ns)
    return [record for path in paths if (record := read_record(path))]


def nth_hang(gang: Gang, attempt: Attempt, number: int, rank: int) -> dict[str, Any]:
    """The report of a hang, which must name this rank."""
    gang.until(lambda: len(hangs(attempt)) > number)
    hang = hangs(attempt)[number]
    assert hang["root_causes"] == [rank], hang["text"]
    return hang


def nth_went_on(gang: Gang, attempt: Attempt, number: int) -> None:
    gang.until(lambda: hangs(attempt)[number]["went_on_after_s"] is not None)


def notes(run_dir: RunDir) -> list[str]:
    # Without the note that this long run reads its few samples again and again.
    found = (read_record(run_dir.status) or {}).get("notes", [])
    return [note for note in found if "the run reads its data" not in note]


def test_each_kind_of_stall_names_its_rank_and_place(run_file: Path) -> None:
    run_dir, attempt, gang = start_training(run_file, 3, *QUICK, rank=troubled_rank)
    until_recorded(run_dir, gang, 2)

    # A disk that hangs, on one rank.
    (run_dir.path / "rank-2" / "block").touch()
    hang = nth_hang(gang, attempt, 0, rank=2)
    assert "is behind: in data loading, at dist/test_watchdog.py:" in hang["text"]
    assert "block_while_told()" in hang["text"]
    assert "usually" in hang["text"]
    stacks = [attempt.hangs / f"step-{hang['step']}-rank-{rank}.txt" for rank in range(3)]
    assert "block_while_told" in stacks[2].read_text()
    assert "waiting in" in stacks[0].read_text().splitlines()[0]
    (run_dir.path / "rank-2" / "block").unlink()
    (run_dir.path / "rank-2" / "pipe").write_bytes(b"x")
    nth_went_on(gang, attempt, 0)

    # Python code without an end, in the model, while the others wait for its gradients.
    (run_dir.path / "rank-1" / "spin").touch()
    hang = nth_hang(gang, attempt, 1, rank=1)
    assert "is behind: in forward and backward, at dist/test_watchdog.py:" in hang["text"]
    assert "spin_while_told()" in hang["text"]
    (run_dir.path / "rank-1" / "spin").unlink()
    nth_went_on(gang, attempt, 1)

    # A process that does not run at all.
    pid = gang.processes[1].pid or 0
    os.kill(pid, signal.SIGSTOP)
    hang = nth_hang(gang, attempt, 2, rank=1)
    assert "no heartbeat from rank" in hang["text"]
    os.kill(pid, signal.SIGCONT)
    nth_went_on(gang, attempt, 2)

    gang.until(lambda: len(notes(run_dir)) >= 6)
    assert "is behind: in data loading" in notes(run_dir)[0]
    assert "continued after" in notes(run_dir)[1]
    gang.signal(signal.SIGTERM)
    assert set(gang.wait()) == {ExitCode.REQUEUE}  # report: nothing has ended it before


def test_action_stop_ends_the_run_and_names_who_froze(run_file: Path) -> None:
    """Here rank 0, which else decides."""
    stop = "watchdog.action=stop"
    run_dir, attempt, gang = start_training(run_file, 2, *QUICK, stop, rank=troubled_rank)
    until_recorded(run_dir, gang, 2)
    os.kill(gang.processes[0].pid or 0, signal.SIGSTOP)
    assert gang.code(1) == ExitCode.COMMUNICATION
    outcome = read_record(attempt.outcome) or {}
    assert (outcome["state"], outcome["exit_code"]) == ("failed", ExitCode.COMMUNICATION)
    assert outcome["error"]["rank"] == 0
    assert "no heartbeat from rank" in outcome["reason"]
    gang.kill()
